"""Helpers of the Pallas kernels: interpret switch, tiles and padding, VMEM budget, and TPU proofs without a TPU.

libtpu compiles for a TPU that isn't there: `aot_compile` proves that a kernel is legal and fits, `predict_cycles` runs
libtpu's static evaluator over the scheduled code, `slot_use` counts what that code keeps busy. All need the libtpu wheel
(Linux x86_64) and no accelerator. A prediction is a prediction: label it so, with generation, clock and versions.
"""
import glob
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

VMEM_LIMIT = 16 * 2**20  # bytes the compiler grants a kernel by default on v4, v5e and v5p; v6e grants 32 MiB


def interpret(override=None):
    """What to pass as `pallas_call(interpret=...)`: True where kernels can't be compiled, which is on CPU.

    A wrapper takes `interpret=None` and hands it over: anything but None (True, False, pltpu.InterpretParams) wins.
    Otherwise the device being compiled for decides, so that `aot_compile` on a CPU host gets the real kernel.
    """
    if override is not None:
        return override
    target = jax.sharding.get_abstract_mesh().abstract_device
    return (target.platform if target else jax.default_backend()) == "cpu"


# Tiles -----------------------------------------------------------------------------------
def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is at least n: round_up(130, 128) = 256, round_up(0, 8) = 0."""
    return -(-n // multiple) * multiple


def pad_axis(x, axis: int, multiple: int, value=0):
    """x with `value` appended along one axis up to a multiple: (5, 130) on axis 1 to 128 gives (5, 256).

    An empty axis becomes one whole tile: pallas_call refuses empty operands.
    """
    short = round_up(max(x.shape[axis], 1), multiple) - x.shape[axis]
    if not short:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, short)
    return jnp.pad(x, widths, constant_values=value)


def pick_tile(n: int, preferred: int, multiple: int) -> int:
    """The largest tile that is at most `preferred`, a multiple of the hardware's (8 rows or 128 lanes), and not
    larger than n needs: pick_tile(5000, 512, 128) = 512, pick_tile(130, 512, 128) = 256, pick_tile(0, 512, 8) = 8.

    Raises: ValueError if preferred < multiple.
    """
    if preferred < multiple:
        raise ValueError(f"a tile of at most {preferred} can't be a multiple of {multiple}")
    return min(preferred // multiple * multiple, round_up(max(n, 1), multiple))


def vmem_bytes(shape, dtype) -> int:
    """Bytes that a block takes in VMEM, where its last two axes are padded to whole tiles.

    A tile is 128 lanes by 8 sublanes of 4 bytes: 8 rows of float32, 16 of bfloat16, 32 of int8. So (1, 1) costs 4096
    bytes in every dtype. `None` in a block shape counts as 1; a vector is one row.
    """
    itemsize = jnp.dtype(dtype).itemsize
    *leading, rows, lanes = [1, 1, *(1 if n is None else n for n in shape)]
    return math.prod(leading) * round_up(rows, max(8, 32 // itemsize)) * round_up(lanes, 128) * itemsize


def budget(inputs, outputs, scratch=(), temporaries: int = 0, limit: int = VMEM_LIMIT) -> int:
    """VMEM bytes of one grid step: 2 x (inputs + outputs) + scratch + temporaries.

    inputs, outputs, scratch: (block shape, dtype) pairs; blocks count twice because the next one is fetched, and the
    last one written, while this one is worked on. temporaries: bytes of the body's large values, which the compiler
    counts too: 2.4 MiB for a product of (1024, 1024) bfloat16 blocks on v5e. Raises: ValueError over the limit.
    """
    blocks, kept = (sum(vmem_bytes(*block) for block in group) for group in ([*inputs, *outputs], scratch))
    total = 2 * blocks + kept + temporaries
    if total > limit:
        raise ValueError(f"VMEM: 2 x {blocks} (blocks) + {kept} (scratch) + {temporaries} (temporaries) = {total} "
                         f"bytes of {limit}: take smaller tiles, or raise vmem_limit_bytes in pltpu.CompilerParams")
    return total


# Compiling ahead of time -----------------------------------------------------------------
class AotUnavailable(RuntimeError):
    """Nothing can be compiled for this TPU here: libtpu is missing, or doesn't know the topology."""


def topology_devices(topology: str = "v5e:2x2") -> list:
    """The devices of a TPU slice that isn't here, e.g. v5e:1x1, v6e:2x2, v5p:2x2x1, tpu7x:2x2x1, v5e:16x16.

    For aot_compile(mesh=Mesh(np.reshape(topology_devices(...), ...), names)). Raises: AotUnavailable.
    """
    from jax.experimental import topologies  # here: it isn't needed to run a kernel

    if importlib.util.find_spec("libtpu") is None:
        raise AotUnavailable("libtpu is not installed: pip install libtpu (wheels exist for Linux x86_64 only)")
    if not glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*"):  # a TPU host answers all this itself
        for name, value in {
            "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a lock file lets one process of the machine compile at a time
            "TPU_WORKER_HOSTNAMES": "localhost", "TPU_HOST_BOUNDS": "1,1,1",
            "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",  # these three spare the reader its complaints, and change no result
        }.items():  # read once, when libtpu loads
            os.environ.setdefault(name, value)
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except jax.errors.JaxRuntimeError as error:
        raise AotUnavailable(f"libtpu refused the topology {topology!r}: {error}") from error


def aot_compile(f, *avals, topology: str = "v5e:2x2", mesh: Mesh | None = None):
    """Compiles f for a TPU on this machine: a real compile, which refuses illegal tiles and VMEM overflow.

    Args: f: function, jitted or not, whose kernels choose `interpret()`; avals: its arguments, pytrees of
        jax.ShapeDtypeStruct or arrays (only shape and dtype count); topology: where `mesh` isn't given, its first
        device compiles the program; mesh: over topology_devices(...), for a program on many chips. An aval with a
        sharding of its own keeps it, the others are replicated over the mesh.
    Returns: the jax.stages.Compiled, with memory_analysis(), cost_analysis(), as_text(); it can't be run here.
    Raises: AotUnavailable; ValueError or JaxRuntimeError from the compiler, for an illegal program.
    """
    mesh = mesh or Mesh(topology_devices(topology)[:1], ("x",), axis_types=(AxisType.Auto,))

    def placed(x):
        own = x.sharding if isinstance(x, jax.ShapeDtypeStruct) else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own or NamedSharding(mesh, PartitionSpec()))

    f = f if hasattr(f, "lower") else jax.jit(f)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # tells interpret(), and kernels that ask, the target
        return f.lower(*jax.tree.map(placed, avals)).compile()


# Predicting ------------------------------------------------------------------------------
_PREDICT = """
import importlib, json, sys
from common.pallas import aot_compile
target, kwargs, topology = sys.argv[1:]
module, function = target.split(":")
f, avals = getattr(importlib.import_module(module), function)(**json.loads(kwargs))
aot_compile(f, *avals, topology=topology)
"""


def _compile_apart(target, kwargs, folder, topology, timeout_s, flags):
    """Compiles target's program in a process of its own (libtpu reads its flags once) with {dump} in `flags` replaced by
    an empty folder; returns what is read of that folder as {name: text}, and the child's CompletedProcess."""
    topology_devices(topology)  # a missing libtpu or a bad name is refused here, not in the child's output
    with tempfile.TemporaryDirectory() as dump:
        path = f"{Path(__file__).resolve().parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        flags = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags.format(dump=dump)}"
        env = os.environ | {"JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": flags, "PYTHONPATH": path}
        try:
            child = subprocess.run([sys.executable, "-c", _PREDICT, target, json.dumps(kwargs or {}), topology],
                                   cwd=folder, env=env, timeout=timeout_s, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{target} on {topology}: no estimate after {timeout_s} s; a dynamic grid can hang the "
                               "evaluator: profile a twin with a static one, or fewer, larger blocks") from None
        wanted = (*Path(dump).glob("*.textproto"), *Path(dump).glob("*final_hlo-static-per-bundle-utilization.txt"))
        return {file.name: file.read_text() for file in wanted}, child


def predict_cycles(target: str, kwargs: dict | None = None, folder=".", topology: str = "v5e:1x1",
                   timeout_s: float = 120) -> list[dict]:
    """Cycles of each operation of a program by libtpu's static evaluator, in its own process (flags are read once).

    Args: target: "module:function", importable from `folder`; function(**kwargs), kwargs being JSON, returns
        (f, avals) for aot_compile, so the file that defines a kernel also says how to build it for a prediction.
    Returns: [{"name": HLO operation, "cycles": int}], most cycles first. A Pallas call bears the name of its
        pallas_call(name=...) or of the jitted function around it; what a loop repeats is counted once.
    Raises: AotUnavailable; TimeoutError (a dynamic grid can hang the evaluator: profile a static twin);
        RuntimeError with the end of the compiler's output (it aborts on some scalar prefetches on v5e).
    Limits: bandwidth shared by several streams, and branches on loaded data, aren't seen: `predicted_seconds`
        guards against both.
    """
    files, child = _compile_apart(target, kwargs, folder, topology, timeout_s,
                                  "--xla_jf_dump_static_llo_profile_to={dump}")
    estimates = re.findall(r'hlo_op_name: "(.*)"\s+estimated_cycles: (\d+)', "".join(files.values()))
    if child.returncode or not estimates:
        raise RuntimeError(f"{target} on {topology}: exit {child.returncode}, {len(estimates)} estimates\n"
                           f"{child.stderr[-2000:]}")
    return sorted(({"name": name, "cycles": int(cycles)} for name, cycles in estimates), key=lambda e: -e["cycles"])


def slot_use(target: str, kwargs: dict | None = None, folder=".", topology: str = "v5e:1x1",
             timeout_s: float = 120) -> dict[str, dict]:
    """What a program's Pallas kernels keep busy: the share of each unit's issue slots that the compiled code fills.

    A TPU core issues one bundle of instructions a cycle, with room for so many of each unit: the unit whose slots are
    nearly full binds. Args, raised errors: as for predict_cycles.
    Returns: {kernel: {"bundles": int, "MATMUL": share, "XLU": ..., "VALU": ..., "EUP": ..., "VLOAD": ...,
        "VSTORE:SPILL": ..., ...}}, shares in [0, 1], by libtpu's names: MATMUL and MATPUSH feed the matrix units, XLU
        moves and reduces across lanes, VALU is the vector arithmetic, EUP exponentials and the like; SPILL and FILL are
        stores and loads of registers that ran out. Each bundle counts once, however often its loop runs, and branches
        count in full.
    """
    files, child = _compile_apart(target, kwargs, folder, topology, timeout_s,
                                  "--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true")
    found = {}
    for name, text in files.items():
        kernel = re.fullmatch(r"\d+-([\w.]+?)(?:\.\d+)?-\d+-final_hlo-.*", name)
        if not kernel or kernel[1] == "TLP":  # the program around the kernels
            continue
        _, units, capacities, _, *bundles = text.splitlines()
        counts = [sum(column) for column in zip(*(map(int, bundle.split()) for bundle in bundles if bundle.strip()))]
        found[kernel[1]] = {"bundles": len(bundles)} | {
            unit.strip(): count / (int(capacity) * len(bundles))
            for unit, capacity, count in zip(units.split(","), capacities.split(), counts)}
    if child.returncode or not found:
        raise RuntimeError(f"{target} on {topology}: exit {child.returncode}, no bundles\n{child.stderr[-2000:]}")
    return found


# Clock in Hz (v6e's is assumed), HBM bytes a second, bfloat16 FLOPs a cycle of the matrix units.
_CHIPS = {"v5e": (1.5e9, 819e9, 131072), "v6e": (1.75e9, 1638e9, 524288)}
_SPEED_UP = {"int8": 2, "bfloat16": 1, "float32": 1}  # of the matrix units against bfloat16; float32 is no faster


def predicted_seconds(cycles: int, hbm_bytes: int, flops: int, generation: str, dtype="bfloat16") -> float:
    """A kernel's predicted time: max(cycles / clock, bytes / bandwidth), the evaluator ignoring shared bandwidth.

    hbm_bytes: counted from the index maps, a block being fetched again only when its index changes; flops: of the
    matrix products, in dtype. Checked against published timings of grouped matmuls on v5e: -9 % to +9 %; on v6e
    against none. Raises: ValueError for another generation ("v5e", "v6e") or dtype, and for fewer cycles than the
    FLOPs take, which means that the evaluator skipped a branch.
    """
    if generation not in _CHIPS or jnp.dtype(dtype).name not in _SPEED_UP:
        raise ValueError(f"no established clock or peak for {dtype} on {generation!r}: known are "
                         f"{', '.join(_CHIPS)} and {', '.join(_SPEED_UP)}")
    clock, bandwidth, flops_a_cycle = _CHIPS[generation]
    bound = flops / (flops_a_cycle * _SPEED_UP[jnp.dtype(dtype).name])
    if cycles < bound:
        raise ValueError(f"invalid prediction: {cycles} cycles, but {flops} {dtype} FLOPs take at least {bound:.0f} on "
                         f"{generation}; the evaluator doesn't follow branches on loaded or prefetched data")
    return max(cycles / clock, hbm_bytes / bandwidth)
