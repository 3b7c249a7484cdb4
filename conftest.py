"""Lets `pytest` at the root and `cd PROJECT && pytest` both work.

Projects repeat module names on purpose (model, train, run, ...): each is a folder to run in, not a package. So
before a test module is imported and before each test, the modules of other projects are set aside and this
project's folder is put first on the import path.
"""
import atexit
import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent
PROJECTS = {folder for folder in ROOT.iterdir() if (folder / "train.py").exists()}

# Before JAX starts: tests run on the CPU, seen as 8 devices, unless the caller chose otherwise.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

# Most of a test's time is compiling: LLVM's optimisations are left out, but for the slow tests of .ci/run. XLA's own
# passes, which decide what fuses, stay. JAX_DISABLE_MOST_OPTIMIZATIONS=0 tests the programs as users run them.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# Many tests compile the same program, in this process and in scripts they start: compile it once a session.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jax-cache-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

loaded = {folder: {} for folder in (*PROJECTS, None)}  # each project's modules while another one's are in place
current = None


def enter_project(path):
    """Swaps the modules of the project that ran before for those of the project that `path` lies in."""
    global current
    project = next((folder for folder in PROJECTS if folder in Path(path).parents), None)
    if project is current:
        return
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) and Path(module.__file__).parent == current:
            loaded[current][name] = sys.modules.pop(name)
    sys.modules.update(loaded[project])
    sys.path[:] = [str(project or ROOT), *(p for p in sys.path if Path(p) not in PROJECTS)]
    current = project


def pytest_collectstart(collector):
    enter_project(collector.path)


def pytest_runtest_setup(item):
    enter_project(item.path)


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_programs():
    """Linux allows a process 65,530 memory mappings and each compiled program takes several of them: one process
    that runs every project's tests would reach that, and XLA's compiler then dies of a segmentation fault."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        gc.collect()
