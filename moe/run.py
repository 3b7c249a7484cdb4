"""The plumbing of a training run: folder, metrics, signals, checkpoints, provenance.

The same file, byte for byte, stands in every project that trains for minutes (a test compares the copies),
so that train.py can be the story and a copied folder stays whole. It knows nothing of any model.
"""
import ctypes
import dataclasses
import importlib.util
import json
import logging
import os
import platform
import signal
import sys
from importlib import metadata
from pathlib import Path

import jax

INTERRUPTED = 130  # the exit status after SIGINT or SIGTERM


def fail(message):
    """Bad input: one line, exit status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def prepare_host():
    """Call before the first JAX operation.

    Heap: XLA:CPU takes its temporaries from malloc and frees them on every call; glibc maps and unmaps blocks
    of that size, so each step faults all its pages in again. Here freed memory stays in one heap, whose first
    gigabyte is backed by huge pages where the kernel offers them (it is reserved, not used). README.md of nanogpt
    has the measured ratios. Linux with glibc only; a no-op elsewhere.
    Platform: libtpu (the tests compile for TPUs with it) prints errors on a host that has no TPU: there, and
    where no GPU is to be seen either, JAX is told to look for nothing but the CPU.
    """
    if platform.libc_ver()[0] == "glibc":
        M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX, MADV_HUGEPAGE = -1, -4, -8, 14  # malloc.h, mman.h
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        libc.malloc.argtypes = [ctypes.c_size_t]
        libc.free.argtypes = [ctypes.c_void_p]
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        libc.mallopt(M_ARENA_MAX, 1)  # the heaps of further threads are unmapped when they are empty
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        size, page = 2**30, 2**21
        if block := libc.malloc(size):
            libc.madvise(-(-block // page) * page, size - page, MADV_HUGEPAGE)
            libc.free(block)
    accelerators = [p for pattern in ("accel*", "vfio/*", "nvidia*", "kfd") for p in Path("/dev").glob(pattern)]
    if importlib.util.find_spec("libtpu") and not accelerators and not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
    logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax logs a page per checkpoint


def provenance():
    """What a result was made with: versions, device, machine."""
    def version(package):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None
    packages = {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")}
    device = jax.devices()[0]
    return {"python": platform.python_version(), **{k: v for k, v in packages.items() if v},
            "backend": device.platform, "device": device.device_kind, "devices": jax.device_count(),
            "platform": platform.platform(), "cores": os.cpu_count()}


# The run folder --------------------------------------------------------------------------

def newest_run(root="out"):
    """The run folder under `root` that was written last; a run is a folder with a config.json."""
    runs = [p.parent for p in Path(root).glob("*/config.json")]
    return max(runs, key=lambda p: (p / "config.json").stat().st_mtime, default=None)


def new_run(out_dir, name):
    """The folder of a new run: out_dir, or else out/<name>, numbered until it is free. Never one in use."""
    if out_dir:
        if (Path(out_dir) / "config.json").exists():
            fail(f"--out-dir {out_dir} already holds a run: pass --resume to continue it, or choose another folder")
        folder = Path(out_dir)
    else:
        tried = (Path("out") / (name if i == 1 else f"{name}-{i}") for i in range(1, sys.maxsize))
        folder = next(p for p in tried if not (p / "config.json").exists())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
    except OSError as why:
        fail(f"--out-dir {folder} can't be written ({why.strerror}): choose another folder")
    return folder


def write_json(path, value):
    """Under a temporary name first: a reader or a crash never meets half a file."""
    temporary = Path(f"{path}.tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def save_config(folder, cfg):
    write_json(folder / "config.json", dataclasses.asdict(cfg))


def load_config(folder, cls):
    """config.json as a `cls`; exits with status 2 where it is missing or not this program's."""
    try:
        return cls(**json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        fail(f"{folder} holds no run (no config.json): train first, or name a run's folder")
    except (TypeError, ValueError) as why:
        fail(f"{folder}/config.json is not of this program ({why})")


class Metrics:
    """metrics.jsonl: one JSON object a line, flushed at once. Lines past `step` (of a run that went on after its
    last checkpoint and was killed) are dropped on resume, so that each step stands there once."""

    def __init__(self, folder, step=0):
        self.path = folder / "metrics.jsonl"
        kept = [row for row in self.read() if row["step"] <= step] if step else []
        self.path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")

    def read(self):
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]  # a kill can cut the last line

    def write(self, **row):
        with open(self.path, "a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")


def plot(folder, rows, curves, ylabel):
    """loss.svg from metrics rows. curves: {label: key}."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for (label, key), colour in zip(curves.items(), ("#0072B2", "#D55E00", "#009E73")):  # Okabe-Ito
        points = [(row["step"], row[key]) for row in rows if key in row]
        if points:
            axes.plot(*zip(*points), color=colour, marker="o" if len(points) < 30 else None, markersize=3, label=label)
    axes.set(xlabel="step", ylabel=ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(folder / "loss.svg")
    plt.close(figure)


# Signals ---------------------------------------------------------------------------------

class Stop:
    """`with Stop() as stop`: SIGINT and SIGTERM set stop.requested, so that the loop can finish its step and
    save; a second one interrupts at once."""

    def __enter__(self):
        self.requested = False
        self.before = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _on_signal(self, number, frame):
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print("stopping after this step (once more to stop at once)", file=sys.stderr)

    def __exit__(self, *exception):
        for number, handler in self.before.items():
            signal.signal(number, handler)


# Checkpoints -----------------------------------------------------------------------------

class Checkpoints:
    """Orbax checkpoints of (state, meta) under folder/checkpoints: the last two of `latest`, one of `best`.

    state: a dict of pytrees of arrays, each restorable alone; meta: a dict for JSON.
    Orbax writes under a temporary name and renames. Saving is synchronous: on CPU a background write would read
    buffers that the next, donating step already reuses.
    """

    def __init__(self, folder):
        import orbax.checkpoint as ocp
        self.ocp, self.folder = ocp, Path(folder).resolve() / "checkpoints"  # Orbax refuses relative paths late
        self.managers = {}

    def manager(self, kind):
        if kind not in self.managers:
            options = self.ocp.CheckpointManagerOptions(
                max_to_keep={"latest": 2, "best": 1}[kind], enable_async_checkpointing=False)
            self.managers[kind] = self.ocp.CheckpointManager(self.folder / kind, options=options)
        return self.managers[kind]

    def save(self, kind, step, state, meta):
        manager = self.manager(kind)
        if step in manager.all_steps():  # of an earlier life of this run that could not be read
            manager.delete(step)
        items = {name: self.ocp.args.StandardSave(tree) for name, tree in state.items()}
        manager.save(step, args=self.ocp.args.Composite(meta=self.ocp.args.JsonSave(meta), **items))

    def restore(self, kind, like):
        """(state, meta) of the newest checkpoint that can be read, or None where there is none at all.

        like: {name: tree of arrays or ShapeDtypeStructs} for the parts that are wanted. A damaged newest
        checkpoint is skipped with a warning; if all are damaged, RuntimeError: never a silent restart at 0.
        """
        if not (self.folder / kind).is_dir():
            return None
        manager = self.manager(kind)
        steps = sorted(manager.all_steps(), reverse=True)
        for step in steps:
            try:
                items = {name: self.ocp.args.StandardRestore(tree) for name, tree in like.items()}
                got = manager.restore(step, args=self.ocp.args.Composite(meta=self.ocp.args.JsonRestore(), **items))
                return {name: got[name] for name in like}, got["meta"]
            except Exception as why:  # Orbax and TensorStore raise many types for a damaged file
                print(f"warning: checkpoint {kind}/{step} can't be read, trying the one before "
                      f"({str(why).splitlines()[0][:200]})", file=sys.stderr)
        if steps:
            raise RuntimeError(f"none of the checkpoints {kind}/{steps} in {self.folder.parent} can be read")
        return None

    def close(self):
        for manager in self.managers.values():
            manager.close()

