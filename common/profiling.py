"""Timing that blocks, comparisons between processes, rooflines, compiler dumps, traces and provenance.

Importing this starts no device. Times are wall seconds unless a name says otherwise.
"""
import collections
import contextlib
import dataclasses
import datetime
import functools
import gzip
import importlib.metadata
import json
import math
import os
import platform
import queue
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np


# Timing ----------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one function: compilation, the first call, and the median and 90th percentile of n later calls."""
    compile_s: float
    first_s: float
    median_s: float
    p90_s: float
    n: int


def _jitted(f: Callable):
    return f if hasattr(f, "lower") else jax.jit(f)  # jit around a jitted f would lose its donations


def measure(f: Callable, make_args: Callable[[], tuple], n: int = 20, warmup: int = 3) -> Timing:
    """Times f ahead of time compiled, with every call blocking on all of its outputs.

    f: a function, or one that is already jitted (its donations hold; static arguments belong in a closure).
    make_args: returns a fresh tuple of arguments (a donated buffer dies in the call). It runs, and its arrays are
        waited for, outside the clock; so is the freeing of arguments and outputs.
    compile_s is tracing, lowering and XLA together; near 0 if this process has compiled f for such arguments before.
    Raises ValueError for n < 1.
    """
    if n < 1:
        raise ValueError(f"measure needs n >= 1 timed calls; got {n}")
    args = jax.block_until_ready(make_args())
    start = time.perf_counter()
    compiled = _jitted(f).lower(*args).compile()
    compile_s = time.perf_counter() - start
    del args

    def call() -> float:
        args = jax.block_until_ready(make_args())
        start = time.perf_counter()
        outputs = jax.block_until_ready(compiled(*args))  # held until the clock has stopped: freeing takes time
        return time.perf_counter() - start

    first_s = call()
    for _ in range(warmup):
        call()
    seconds = [call() for _ in range(n)]
    return Timing(compile_s, first_s, statistics.median(seconds), float(np.percentile(seconds, 90)), n)


# Comparison of long-lived processes --------------------------------------------------------
PREFIX = "@profiling "  # marks the protocol's lines on a worker's stdout, among whatever else it prints


def _send(message: dict):
    # A line of its own even after chatter without a newline; NumPy and JAX scalars become floats.
    print(f"\n{PREFIX}{json.dumps(message, default=float)}", file=sys.__stdout__, flush=True)


def serve(run_once: Callable[[], dict[str, float]], **provenance):
    """The worker's side of `compare`: call it last in the script, when all is compiled and warmed up.

    run_once() does one measured run, blocks on the outputs and returns its metrics, the same names each time, such as
    {"seconds": 0.1, "tokens_per_s": 9e3}. The keywords (versions, threads, ...) end up in `compare`'s "provenance".
    Returns when the parent says "stop" or is gone; what run_once raises ends the worker, and with it the comparison.
    """
    _send({"ready": True, **provenance})
    for line in sys.stdin:
        if line.strip() != "go":
            return
        _send(run_once())


class _Worker:
    """One side of `compare`: a process, and a thread that queues its messages so that waiting can time out."""

    def __init__(self, name: str, command: list[str], env: dict[str, str]):
        self.name, env = name, {**os.environ, **env}
        root = str(Path(__file__).resolve().parents[1])  # so that the worker finds `common`
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
        self.stderr = tempfile.TemporaryFile()  # a pipe that nobody reads would block a chatty worker
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.stderr, text=True, encoding="utf-8", errors="replace")
        self.messages = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        with self.process.stdout as lines:
            for line in lines:
                if line.startswith(PREFIX):
                    self.messages.put(json.loads(line[len(PREFIX):]))
        self.messages.put(None)  # end of file: the worker has ended

    def _failure(self, what: str) -> RuntimeError:
        self.stderr.seek(0)
        last = self.stderr.read().decode(errors="replace").splitlines()[-20:]
        return RuntimeError("\n".join([f"side {self.name!r} {what}; its stderr ends:", *last]))

    def receive(self, timeout_s: float) -> dict:
        try:
            message = self.messages.get(timeout=timeout_s)
        except queue.Empty:
            raise self._failure(f"did not answer within {timeout_s} s") from None
        if message is None:
            raise self._failure(f"ended with exit status {self.process.wait()}")
        return message

    def run(self, timeout_s: float) -> dict:
        with contextlib.suppress(OSError):  # a dead worker's pipe; `receive` then says what happened
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        return self.receive(timeout_s)

    def close(self):
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # ends a worker that waits for its next run
        try:
            self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.stderr.close()


def _load() -> float | None:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def compare(commands: dict[str, list[str]], rounds: int = 5, env: dict[str, dict[str, str]] | None = None,
            timeout_s: float = 600, fresh: bool = False) -> dict:
    """Runs each side in a process of its own (thread pools disturb each other), in turns A B A B ...

    commands: side -> command line of a worker script, which ends in `serve(run_once)`; it can import `common`.
    env: side -> extra environment variables.  timeout_s: for one set-up or one run.
    Sides set up one after the other, then take turns, so that a slow spell of the machine meets all of them.
    fresh: a new process for each run. Systems take memory back from a process that waits (Linux's DAMON does, and
    splits huge pages): where that counts, a waiting worker is slower than the program it stands for.
    Returns {"sides": {side: {metric: {"median", "min", "max", "values"}}}, "provenance": {side: {...}}, "rounds",
    "load_before", "load_after"}: load averages over one minute (None where the system has none) before the first
    set-up, when the machine should be quiet, and after the last round.
    Raises ValueError for rounds < 1 or an env for no side; RuntimeError when a worker dies or is silent for timeout_s,
    with the end of its stderr. No worker outlives the call.
    """
    env = env or {}
    if rounds < 1:
        raise ValueError(f"compare needs rounds >= 1; got {rounds}")
    if set(env) - set(commands):
        raise ValueError(f"env for {sorted(set(env) - set(commands))}, but the sides are {sorted(commands)}")
    load_before, runs, provenance = _load(), {name: [] for name in commands}, {}
    with contextlib.ExitStack() as stack:
        def started(name: str) -> _Worker:
            worker = _Worker(name, commands[name], env.get(name, {}))
            stack.callback(worker.close)
            provenance[name] = worker.receive(timeout_s)
            del provenance[name]["ready"]
            return worker

        waiting = {} if fresh else {name: started(name) for name in commands}
        for _ in range(rounds):
            for name in commands:
                worker = waiting.get(name) or started(name)
                runs[name].append(worker.run(timeout_s))
                if fresh:
                    worker.close()
        load_after = _load()

    def summary(values: list[float]) -> dict:
        return {"median": statistics.median(values), "min": min(values), "max": max(values), "values": values}

    sides = {name: {metric: summary([run[metric] for run in results]) for metric in results[0]}
             for name, results in runs.items()}
    return {"sides": sides, "provenance": provenance, "rounds": rounds,
            "load_before": load_before, "load_after": load_after}


def ratio(comparison: dict, metric: str, side: str, baseline: str, higher_is_better: bool = True) -> float:
    """How many times better `side` is than `baseline`, by the medians of `compare`: > 1 means better."""
    ours, theirs = (comparison["sides"][name][metric]["median"] for name in (side, baseline))
    return ours / theirs if higher_is_better else theirs / ours


# Peaks and rooflines -----------------------------------------------------------------------
# Dense peaks of one JAX device, by its exact device_kind: FLOP/s by dtype and bytes/s of HBM; None: not published.
# TPU: docs.cloud.google.com/tpu/docs and the book "How to Scale Your Model" (jax-ml.github.io/scaling-book).
# The two cores of a v4 or v5p chip are one device (megacore, the default); those of a TPU7x chip are two, so its row
# is half a chip. GPU: NVIDIA's data sheets, SXM boards; "with sparsity" figures are halved. float32 is the rate of the
# ordinary cores: JAX's default matmul precision may use TF32 (or bfloat16 on TPU) and then go beyond it.
DEVICE_PEAKS = {
    "TPU v4": {"bfloat16": 275e12, "float32": None, "bytes_per_s": 1.2e12},
    "TPU v5 lite": {"bfloat16": 197e12, "float32": None, "bytes_per_s": 819e9},  # v5e
    "TPU v5": {"bfloat16": 459e12, "float32": None, "bytes_per_s": 2.765e12},  # v5p
    "TPU v5p": {"bfloat16": 459e12, "float32": None, "bytes_per_s": 2.765e12},
    "TPU v6 lite": {"bfloat16": 918e12, "float32": None, "bytes_per_s": 1.638e12},  # v6e
    "TPU7x": {"bfloat16": 2307e12 / 2, "float32": None, "bytes_per_s": 7.37e12 / 2},
    "Tesla T4": {"bfloat16": None, "float32": 8.1e12, "bytes_per_s": 320e9},  # Turing has no bfloat16 unit
    "NVIDIA A100-SXM4-80GB": {"bfloat16": 312e12, "float32": 19.5e12, "bytes_per_s": 2.039e12},
    "NVIDIA H100 80GB HBM3": {"bfloat16": 989e12, "float32": 67e12, "bytes_per_s": 3.35e12},
    "NVIDIA H200": {"bfloat16": 989e12, "float32": 67e12, "bytes_per_s": 4.8e12},
}


@dataclasses.dataclass(frozen=True)
class Peak:
    """The best a device can do: FLOP/s in one dtype, and bytes/s of its main memory; None where unknown."""
    flops_per_s: float | None
    bytes_per_s: float | None


def _fastest(run: Callable, seconds: float) -> float:
    run()  # compiles, and maps the memory
    times = []
    while len(times) < 3 or sum(times) < seconds:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def measure_cpu_peak(dtype="float32", seconds: float = 1.0) -> Peak:
    """Measures what this CPU reaches, spending about `seconds` on each of two programs and keeping the fastest run.

    FLOP/s: a 2048 x 2048 x 2048 matmul in dtype. bytes/s: b = a + 1 on 256 MiB each, counted as one read of a and one
    write of b, as XLA's cost analysis counts. The hardware may move more: a CPU that fetches a line before writing it
    (write-allocate) moves 3 bytes for 2 counted, so an update in place can beat this peak by half.
    It measures all cores at the load of the moment: a busy machine has a low peak.
    """
    N, M = 2048, 2**26
    with jax.default_device(jax.devices("cpu")[0]), jax.enable_x64(True):  # without x64, float64 would become float32
        x = jnp.ones((N, N), dtype)
        matmul = jax.jit(jnp.matmul)
        matmul_s = _fastest(lambda: matmul(x, x).block_until_ready(), seconds)

        # b is donated and written over: a fresh output each time would measure page faults (5 GB/s instead of 28).
        stream = jax.jit(lambda a, b: a + 1, donate_argnums=1, keep_unused=True)
        a, b = jnp.ones(M, jnp.float32), [jnp.ones(M, jnp.float32)]
        stream_s = _fastest(lambda: b.append(stream(a, b.pop()).block_until_ready()), seconds)
    return Peak(2 * N**3 / matmul_s, 2 * a.nbytes / stream_s)


@functools.cache
def _cpu_peak(dtype: str) -> Peak:
    return measure_cpu_peak(dtype)


def peak(device=None, dtype="float32") -> Peak | None:
    """Peak of a device (default: the first): measured on a CPU, once; else from DEVICE_PEAKS; None for other kinds."""
    kind, dtype = (device or jax.devices()[0]).device_kind, jnp.dtype(dtype).name
    if kind == "cpu":
        return _cpu_peak(dtype)
    row = DEVICE_PEAKS.get(kind)
    return None if row is None else Peak(row.get(dtype), row["bytes_per_s"])


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Where a program stands under its device's roof; None, and bound "unknown", where the peak is unknown."""
    intensity: float  # FLOP/byte
    flops_per_s: float  # achieved
    bytes_per_s: float  # achieved
    attainable_flops_per_s: float | None  # min(peak FLOP/s, intensity x peak bytes/s)
    fraction_of_attainable: float | None
    fraction_of_peak: float | None  # of the peak FLOP/s
    bound: str  # "compute", "memory" or "unknown"


def roofline(flops: float, bytes: float, seconds: float, dtype="float32", device=None) -> Roofline:
    """Roofline of a program that does `flops` FLOPs and moves `bytes` bytes in `seconds`; the peak is `peak`'s.

    `roofline(**cost(compiled), seconds=t)` works. A fraction above 1 means that the count or the peak is not what the
    hardware does: data that stays in a cache, or float32 run at a lower precision.
    Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", 2009.
    Raises ValueError unless flops >= 0, bytes > 0 and seconds > 0.
    """
    if not (flops >= 0 and bytes > 0 and seconds > 0):
        raise ValueError(f"roofline needs flops >= 0, bytes > 0, seconds > 0; got {flops}, {bytes}, {seconds}")
    achieved = flops / bytes, flops / seconds, bytes / seconds
    top = peak(device, dtype)
    if top is None or top.flops_per_s is None or top.bytes_per_s is None:
        return Roofline(*achieved, None, None, None, "unknown")
    compute, memory = achieved[1] / top.flops_per_s, achieved[2] / top.bytes_per_s
    return Roofline(*achieved, min(top.flops_per_s, achieved[0] * top.bytes_per_s), max(compute, memory), compute,
                    "compute" if compute >= memory else "memory")


# What the compiler made --------------------------------------------------------------------
def cost(compiled) -> dict[str, float]:
    """XLA's own count for a compiled program: {"flops", "bytes"}, a static estimate; what it leaves out counts as 0.

    The body of a while loop or scan counts once, whatever its trip count; a custom call or Pallas kernel counts only
    what its cost estimate says; "bytes" are those that each op reads and writes, as if no cache held them.
    """
    analysis = compiled.cost_analysis()
    analysis = analysis[0] if isinstance(analysis, list) else analysis  # a list of one in some versions
    return {"flops": float(analysis.get("flops", 0)), "bytes": float(analysis.get("bytes accessed", 0))}


def dump(f: Callable, *args, out) -> dict[str, Path]:
    """Writes what becomes of f(*args) into the folder `out`, without running it.

    Returns the paths {"jaxpr", "stablehlo", "hlo_optimised", "memory"}: jaxpr.txt, stablehlo.mlir, hlo_optimised.txt
    and memory.json (bytes of arguments, outputs, temporaries, ... by XLA's memory analysis).
    Source files are named without their folders, so that dumps of two machines can be compared.
    """
    traced = _jitted(f).trace(*args)
    lowered = traced.lower()
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    sizes = {name: getattr(memory, name) for name in dir(memory) if name.endswith("_in_bytes")}
    texts = {"jaxpr.txt": str(traced.jaxpr), "stablehlo.mlir": lowered.as_text(),
             "hlo_optimised.txt": compiled.as_text(), "memory.json": json.dumps(sizes, indent=1)}
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (out / name).write_text(re.sub(r'(?<=["\s])/(?:[^/\s"]+/)+', "", text) + "\n", encoding="utf-8")
    return {Path(name).stem: out / name for name in texts}


def _shape_bytes(shape: str) -> int:
    """Bytes of an HLO shape, a tuple's parts added up: "(f32[2,3]{1,0}, pred[])" -> 25."""
    bits = 0
    for dtype, dims in re.findall(r"([a-z]\w*)\[([\d,]*)\]", shape):
        width = re.search(r"\d+", dtype)  # in bits: s4, bf16, f8e4m3fn; pred is a byte, a token nothing
        bits += (int(width[0]) if width else 8 * (dtype == "pred")) * math.prod(int(d) for d in dims.split(",") if d)
    return -(-bits // 8)


def op_table(compiled, top: int = 15) -> list[dict]:
    """The ops with the biggest outputs in the entry computation of a compiled program's optimised HLO, biggest first.

    Bytes of the outputs, not time: it shows what goes through memory between ops (and what XLA has fused away).
    A loop is one row, its output all that it carries. Parameters, constants, tuples and bitcasts do no work: left out.
    Rows: name, opcode, shape (HLO text), bytes, fusion (kLoop, kInput, kOutput, kCustom, or None), calls (the
    computation that a fusion, call, loop or reduction runs, or None), op_name (the JAX op it came from, or None).
    """
    entry = re.search(r"^ENTRY .*?^}", compiled.as_text(), re.DOTALL | re.MULTILINE)[0]
    rows = []
    for line in entry.splitlines():
        op = re.match(r"\s+(?:ROOT )?%?(\S+) = (.+?) ([a-z][\w-]*)\(", line)
        if op and op[3] not in {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}:
            found = {"fusion": re.search(r"\bkind=(\w+)", line),
                     "calls": re.search(r"\b(?:calls|body|to_apply)=%?([\w.-]+)", line),
                     "op_name": re.search(r'\bop_name="([^"]*)"', line)}
            rows.append({"name": op[1], "opcode": op[3], "shape": op[2], "bytes": _shape_bytes(op[2]),
                         **{key: match and match[1] for key, match in found.items()}})
    return sorted(rows, key=lambda row: -row["bytes"])[:top]


def markdown_table(rows: list[dict], columns: list[str] | None = None) -> str:
    """GitHub table of `rows`; columns default to all keys in order of appearance, missing and None cells are empty."""
    columns = columns or list(dict.fromkeys(key for row in rows for key in row))

    def cell(value) -> str:
        if isinstance(value, float):
            value = f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")

    lines = [columns, ["---"] * len(columns), *([cell(row.get(key)) for key in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# Traces ------------------------------------------------------------------------------------
def trace(dir):
    """Context manager: writes a profile under `dir`, for Perfetto, XProf and `read_trace`.

    Annotate each step with `jax.profiler.StepTraceAnnotation("train", step_num=i)` and block on its outputs inside
    the annotation, else its ops run in a later step. A few warm steps are enough: every Python call is recorded,
    which makes Python look slower than it is.
    """
    return jax.profiler.trace(str(dir), create_perfetto_trace=True)


def _covered(events: list[dict], step: dict) -> float:
    """Microseconds of `step` that the union of the events' intervals covers."""
    covered, reached, step_end = 0.0, step["ts"], step["ts"] + step["dur"]
    for event in sorted(events, key=lambda e: e["ts"]):
        begin, end = max(event["ts"], reached), min(event["ts"] + event["dur"], step_end)
        if end > begin:
            covered, reached = covered + end - begin, end
    return covered


def read_trace(dir, top: int = 10) -> dict:
    """Reads where the time of the annotated steps went from the newest trace under `dir` (see `trace`).

    busy_ms: the union over threads of XLA's ops (events with an hlo_op) and of "ThunkExecutor::Execute (wait for
        completion)": a parallel op has its event only on the thread that launched it, which then waits for the rest.
    gap_ms: wall - busy; nothing of XLA ran.
    host_ms: the part of the gap in which the step's own thread was inside a recorded Python call or dispatch, other
        than waiting for an array (block_until_ready, float(x), np.asarray(x)).
    top_ops: the `top` ops with most time in all steps, {"name", "total_ms", "count"}. It is time on the launching thread
        without ops nested in it (a loop's own row is without its body); count is of events, and an op may have two.
    Returns {"steps", "wall_ms", "busy_ms", "gap_ms", "host_ms": medians over steps, "per_step": [{...}], "top_ops"}.
    Checked on CPU traces of JAX 0.10.2 and 0.12; not verified on GPU or TPU.
    Raises ValueError, naming the folder, without a trace, an annotated step, or an op inside a step.
    """
    files = sorted(Path(dir).rglob("*trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise ValueError(f"no *trace.json.gz under {dir}: nothing was profiled there")
    with gzip.open(files[-1], "rt", encoding="utf-8") as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    steps = sorted((e for e in events if e["name"] == "train" and "step_num" in e.get("args", {})),
                   key=lambda e: e["ts"])
    if not steps:
        raise ValueError(f'the trace under {dir} has no StepTraceAnnotation("train", step_num=...)')

    def in_a_step(e):
        return any(step["ts"] <= e["ts"] < step["ts"] + step["dur"] for step in steps)

    ops = sorted((e for e in events if "hlo_op" in e.get("args", {}) and in_a_step(e)),
                 key=lambda e: (e["ts"], -e["dur"]))
    if not ops:
        raise ValueError(f"the trace under {dir} has no XLA op inside its steps: block inside the annotation")
    busy = ops + [e for e in events if e["name"] == "ThunkExecutor::Execute (wait for completion)"]
    waiting, host = [], []
    for e in events:
        if (e["pid"], e["tid"]) == (steps[0]["pid"], steps[0]["tid"]) and "step_num" not in e.get("args", {}):
            waits = e["name"].endswith(("block_until_ready", " _value", " asarray"))
            (waiting if waits else host).append(e)

    per_step = []
    for step in steps:
        busy_us = _covered(busy, step)
        host_us = _covered(busy + waiting + host, step) - _covered(busy + waiting, step)
        times = {"wall_ms": step["dur"], "busy_ms": busy_us, "gap_ms": step["dur"] - busy_us, "host_ms": host_us}
        per_step.append({"step": int(step["args"]["step_num"]),  # to the trace's nanosecond
                         **{key: round(us / 1e3, 6) for key, us in times.items()}})

    total, count, open_ops = collections.Counter(), collections.Counter(), collections.defaultdict(list)
    for op in ops:
        name, around = op["args"]["hlo_op"], open_ops[op["pid"], op["tid"]]
        while around and around[-1]["ts"] + around[-1]["dur"] <= op["ts"]:
            around.pop()
        if around:
            total[around[-1]["args"]["hlo_op"]] -= op["dur"]
        total[name] += op["dur"]
        count[name] += 1
        around.append(op)
    top_ops = [{"name": name, "total_ms": round(us / 1e3, 6), "count": count[name]}
               for name, us in total.most_common(top)]
    medians = {key: statistics.median(step[key] for step in per_step) for key in times}
    return {"steps": len(steps), **medians, "per_step": per_step, "top_ops": top_ops}


# Provenance --------------------------------------------------------------------------------
def _cpu_name() -> str:
    with contextlib.suppress(OSError):  # Linux only
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def provenance() -> dict:
    """What a result needs beside it: versions (of what is installed), backend, devices, CPU, load, UTC date, command.

    JSON-serialisable and without absolute paths. Starts the JAX backend: not for a worker that measures PyTorch.
    """
    packages = {}
    arguments = [re.sub(r"(^|=)(?:[A-Za-z]:)?[\\/](?:.*[\\/])?", r"\1", argument) for argument in sys.argv[1:]]
    for name in ("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "torch", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return {
        "python": platform.python_version(), "platform": platform.platform(), **packages,
        "backend": jax.default_backend(), "device_kind": jax.devices()[0].device_kind,
        "device_count": jax.device_count(), "cpu": _cpu_name(), "cores": os.cpu_count(), "load": _load(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *arguments]),
    }
