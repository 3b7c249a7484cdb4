# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---
# %% [markdown]
# # Profiling: from a trace to the roofline [S1-060]
#
# After this lesson you can record a trace, read it without any viewer, say how much of a step is computation, gap and
# host, find the op that takes the time, and predict a program's time from its FLOPs and bytes. It uses this project's
# `model.py` and `train.py`, and `common/profiling.py`.
# Rules are numbered P1, P2, ...; the assertion that proves a rule carries its number.

# %%
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent if "__file__" in globals() else Path.cwd()
sys.path[:0] = [str(PROJECT), str(PROJECT.parent)]  # the project's files, and common/ beside it

# %%
import collections
import gzip
import json
import math
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

import train
from common.profiling import cost, op_table, peak, read_trace, roofline

jax.config.update("jax_platforms", "cpu")  # before JAX starts: the names of events below are those of a CPU
cfg = train.Config(batch_size=128)
rng = np.random.default_rng(0)
images = jnp.asarray(rng.random((128, 784), np.float32))
labels = jnp.asarray(rng.integers(0, 10, 128), jnp.int32)
scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # the traces; gone when the process ends

# %% [markdown]
# ## `jax.profiler` and what it writes [S1-061] (must-read)
# `jax.profiler.trace(folder)` records everything in its block: Python calls, dispatches, XLA's ops. Two annotations
# give the record names of yours: `StepTraceAnnotation("train", step_num=i)` around a step, `TraceAnnotation(name)`
# around any part of it. Warm up first, or you profile the compiler; a few steps are enough.
#
# **Claim.** Three files come out, below `plugins/profile/<time>/`. `*.xplane.pb` is everything, for XProf
# (TensorBoard's profile plugin) and `jax.profiler.ProfileData`; `*.trace.json.gz` and, when asked for,
# `perfetto_trace.json.gz` are the events as JSON.

# %%
class Steps:
    """Calls of the project's jitted step, each from the state that the last one left (it is donated)."""

    def __init__(self, step):
        self.step, self.state = step, train.init_state(cfg)

    def __call__(self):
        self.state, loss = self.step(self.state, images, labels, 0.1, cfg)
        return self.state, loss


def profile(name, step, n=5, wait_inside=True, python=True):
    """Traces n annotated calls of step() into a new folder, which it returns. Waits inside or after the annotation."""
    folder = Path(scratch.name) / name
    jax.block_until_ready(step())  # compiles
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = int(python)
    with jax.profiler.trace(str(folder), create_perfetto_trace=True, profiler_options=options):
        for i in range(n):
            with jax.profiler.StepTraceAnnotation("train", step_num=i):
                with jax.profiler.TraceAnnotation("dispatch the update"):
                    outputs = step()
                if wait_inside:
                    jax.block_until_ready(outputs)
            jax.block_until_ready(outputs)
    return folder


jitted_folder = profile("jitted", Steps(train.train_step))
files = sorted(path.relative_to(jitted_folder) for path in jitted_folder.rglob("*") if path.is_file())
for path in files:
    print(path)
assert all(path.match("plugins/profile/*/*") for path in files)  # P1
assert {path.name.split(".", 1)[1] for path in files} == {"xplane.pb", "trace.json.gz", "json.gz"}  # P1

# %% [markdown]
# To look at it: open https://ui.perfetto.dev in a browser and drop `perfetto_trace.json.gz` on it; nothing is uploaded.
# W and S zoom, A and D move; a click on a slice shows its arguments. One row is one thread.
# ```
# python           |train 0                        |train 1 ...    your annotation
#                  | |dispatch the update|         |
#                  |   |PjitFunction(train_step)|  |               host: one jitted call
# tf_XLAEigen/..   |          |dot|add|fusion|dot| |               XLA's ops, with an hlo_op each
#                  |<- gap -> |<---- busy ---->|gap|
# ```
# But a trace is a list of events, and numbers come from reading that list. An event of phase "X" has a start `ts` and
# a duration `dur`, in microseconds, a process `pid`, a thread `tid`, and `args`.

# %%
def events_of(folder):
    """The events with a duration in the trace under `folder`, by their start."""
    with gzip.open(next(folder.rglob("perfetto_trace.json.gz")), "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    return sorted((e for e in events if e.get("ph") == "X"), key=lambda e: e["ts"])


events = events_of(jitted_folder)
names = collections.Counter(e["name"] for e in events)
print(f"{len(events)} events of {len(names)} names; ours:", {n: names[n] for n in ("train", "dispatch the update")})
assert names["train"] == names["dispatch the update"] == 5  # P1
steps = [e for e in events if e["name"] == "train"]
assert [int(e["args"]["step_num"]) for e in steps] == [0, 1, 2, 3, 4]
assert names["PjitFunction(train_step)"] >= 5, "the dispatches"

planes = jax.profiler.ProfileData.from_file(str(next(jitted_folder.rglob("*.xplane.pb")))).planes
assert any("CPU" in plane.name for plane in planes)

# %% [markdown]
# **Claim.** Each Python call is an event too, `$file:line function`, and recording it takes time: the host looks slower
# than it is. The option `python_tracer_level = 0` leaves them out.

# %%
quiet_folder = profile("quiet", Steps(train.train_step), python=False)
quiet = events_of(quiet_folder)
calls = [sum(e["name"].startswith("$") for e in recorded) for recorded in (events, quiet)]
print("recorded Python calls:", *calls)
assert calls[0] > 0 == calls[1]  # P2

# %% [markdown]
# **Claim.** Wait inside the annotation. A call returns when its work is queued, so an annotation without
# `block_until_ready` ends before the ops that it started.

# %%
def xla_ops(events):
    return [e for e in events if "hlo_op" in e.get("args", {})]


def end(event):
    return event["ts"] + event["dur"]


def ops_within_steps(events):
    """(ops that ended within a step's annotation, all ops)."""
    steps = [e for e in events if e["name"] == "train"]
    ends = [end(op) for op in xla_ops(events)]
    return sum(any(step["ts"] < e <= end(step) for step in steps) for e in ends), len(ends)


after_folder = profile("after", Steps(train.train_step), wait_inside=False)
for wait_inside, folder in ((True, jitted_folder), (False, after_folder)):
    within, n_ops = ops_within_steps(events_of(folder))
    print(f"waiting inside: {wait_inside}; {within} of {n_ops} ops ended within their step")
    assert within == n_ops if wait_inside else within < n_ops  # P3

# %% [markdown]
# ## Reading a timeline: kernels, gaps and the host [S1-062] (must-read)
# For a step, split the wall time:
#
# - **busy**: XLA computed. Ops on several threads overlap, so it is the *union* of their intervals, not the sum. On a
#   CPU a parallel op has its event on the thread that launched it, which then waits for the rest: that wait counts.
# - **gap** = wall - busy: the device had nothing to do. Something in Python, or in the dispatch, held it up.
# - **dispatch**: time inside `PjitFunction(...)`, the host's side of a jitted call. Every op outside jit is one too.

# %%
WAIT = "ThunkExecutor::Execute (wait for completion)"


def covered(events, step):
    """Microseconds of `step` that the union of the events' intervals covers. events: sorted by start."""
    total, reached = 0.0, step["ts"]
    for e in events:
        begin, stop = max(e["ts"], reached), min(end(e), end(step))
        if stop > begin:
            total, reached = total + stop - begin, stop
    return total


def timeline(events):
    """Per step, in ms: {"wall", "busy", "gap", "dispatch"}, and how often a jitted function was called."""
    rows = []
    for step in (e for e in events if e["name"] == "train"):
        within = [e for e in events if step["ts"] <= e["ts"] < end(step)]
        calls = [e for e in within if e["name"].startswith("PjitFunction") and e["tid"] == step["tid"]]
        busy = covered([e for e in within if "hlo_op" in e.get("args", {}) or e["name"] == WAIT], step)
        rows.append({"wall": step["dur"] / 1e3, "busy": busy / 1e3, "gap": (step["dur"] - busy) / 1e3,
                     "dispatch": covered(calls, step) / 1e3, "calls": len(calls)})
    return rows


def median(rows, key):
    return statistics.median(row[key] for row in rows)


# %% [markdown]
# **Claim.** The same update, op by op instead of in one jit, has a larger gap and a larger share of it: each of its
# hundreds of small ops is dispatched from Python while the device waits.

# %%
by_op_folder = profile("op by op", Steps(train.update), n=3, python=False)
one_jit, by_op = timeline(quiet), timeline(events_of(by_op_folder))
print(f"{'':9} {'wall':>7} {'busy':>7} {'gap':>7} {'dispatch':>8}  share of gap  calls of jitted functions")
for name, rows in (("one jit", one_jit), ("op by op", by_op)):
    wall, busy, gap, dispatch = (median(rows, key) for key in ("wall", "busy", "gap", "dispatch"))
    print(f"{name:9} {wall:7.2f} {busy:7.2f} {gap:7.2f} {dispatch:8.2f} ms {gap / wall:10.0%} "
          f"{median(rows, 'calls'):9.0f}")
assert median(by_op, "gap") > 3 * median(one_jit, "gap")  # P4
assert median(by_op, "gap") / median(by_op, "wall") > median(one_jit, "gap") / median(one_jit, "wall")  # P4
assert median(by_op, "calls") > 10 * median(one_jit, "calls")  # P4

# %% [markdown]
# `common.profiling.read_trace` reads the same numbers from the newest trace of a folder (its `host_ms` also counts
# other work of the step's thread that falls into the gap).

# %%
theirs = read_trace(quiet_folder)
print({key: round(theirs[key], 3) for key in ("steps", "wall_ms", "busy_ms", "gap_ms", "host_ms")})
for key in ("wall", "busy", "gap"):
    assert np.allclose([row[key] for row in one_jit], [row[key + "_ms"] for row in theirs["per_step"]], atol=1e-5)

# %% [markdown]
# **Claim.** The name in an event's `hlo_op` is that of an instruction of the optimised program, whose metadata says
# which line of JAX it came from: from the time to the source in two steps.

# %%
steps_of = Steps(train.train_step)
program = train.train_step.lower(steps_of.state, images, labels, 0.1, cfg).compile()
came_from = {row["name"]: row["op_name"] for row in op_table(program, top=1000)}
for op in theirs["top_ops"][:4]:
    print(f"{op['total_ms'] / theirs['steps']:6.3f} ms  {op['name']:24} {came_from.get(op['name'])}")
text = program.as_text()
assert all(f"%{op['name']} = " in text for op in theirs["top_ops"])  # P5
assert any("dot_general" in (came_from.get(op["name"]) or "") for op in theirs["top_ops"])

# %% [markdown]
# ## From the roofline to the observed time [S1-063] (must-read)
# A program that does F FLOPs and moves M bytes takes at least F / peak FLOP/s, and at least M / peak bytes/s. If both
# overlap, the larger one is the prediction:
# ```
# FLOP/s │            ┌─────────────── peak FLOP/s        time = max(F / peak FLOP/s, M / peak bytes/s)
#        │          ╱ │
#        │        ╱ memory│compute                        intensity = F / M, in FLOP/byte
#        │      ╱   bound │bound                          balance = peak FLOP/s / peak bytes/s:
#        └────╱───────┴────────────── intensity           where the roof bends
# ```
# **Claim.** The prediction is within a factor of three of the time observed, for a matrix times a vector (0.5
# FLOP/byte: memory bound) and for a product of matrices (171 FLOP/byte: compute bound). F and M are XLA's own count.
# The peaks are those of this machine at this moment: other programs share its memory, so calibration and observation
# take turns, and a slow spell meets both.

# %%
def in_turns(programs, rounds):
    """Median seconds of each program {name: (f, *args)}, blocked; one round runs each of them once."""
    seconds = {name: [] for name in programs}
    for _ in range(rounds + 1):
        for name, (f, *args) in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(f(*args))
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}  # the first one compiles


matmul = jax.jit(jnp.matmul)
W, v, A, larger = (jnp.ones(shape) for shape in ((8192, 4096), (4096,), (1024, 1024), (1536, 1536)))  # W: 134 MB
reading = in_turns({"maximum": (jax.jit(lambda W: W.max(axis=0)), W), "sum": (jax.jit(lambda W: W.sum(axis=1)), W),
                    "matrix x vector": (matmul, W, v)}, rounds=15)
products = in_turns({"larger": (matmul, larger, larger), "matrix x matrix": (matmul, A, A),
                     "training step": (steps_of,)}, rounds=5)
peak_bytes = W.nbytes / min(reading["maximum"], reading["sum"])
peak_flops = 2 * 1536**3 / products["larger"]
balance = peak_flops / peak_bytes
print(f"peaks {peak_flops / 1e9:.0f} GFLOP/s and {peak_bytes / 1e9:.0f} GB/s: balance {balance:.1f} FLOP/byte")

bounds = {}
for name, args, observed in (("matrix x vector", (W, v), reading), ("matrix x matrix", (A, A), products)):
    counted = cost(matmul.lower(*args).compile())
    flop_s, memory_s = counted["flops"] / peak_flops, counted["bytes"] / peak_bytes
    predicted, bounds[name] = max(flop_s, memory_s), "compute" if flop_s > memory_s else "memory"
    print(f"{name}: {counted['flops'] / counted['bytes']:5.1f} FLOP/byte, {bounds[name]} bound, predicted "
          f"{1e3 * predicted:.1f} ms, observed {1e3 * observed[name]:.1f} ms")
    assert predicted / 3 < observed[name] < 3 * predicted, name  # P6
assert bounds == {"matrix x vector": "memory", "matrix x matrix": "compute"}  # P6

# %% [markdown]
# **Claim.** A batch of B examples through a layer of I inputs and O outputs does 2 B I O FLOPs on 4 (B I + I O + B O)
# bytes: the weights are read once for the whole batch, so the intensity grows with B.

# %%
def intensity(B, I, O):
    return 2 * B * I * O / (4 * (B * I + I * O + B * O))


for B in (1, 8, 64, 512):
    counted = cost(matmul.lower(jnp.ones((B, 512)), jnp.ones((512, 512))).compile())
    by_xla = counted["flops"] / counted["bytes"]
    bound = "compute" if by_xla > balance else "memory"
    print(f"layer 512 -> 512, batch {B:3}: {by_xla:6.2f} FLOP/byte, {bound} bound")
    assert np.isclose(by_xla, intensity(B, 512, 512), rtol=0.01)  # P7

# %% [markdown]
# The whole training step, against the peaks above, and by `common.profiling.roofline`, which takes the fastest runs of
# `measure_cpu_peak`. What is missing to 100 % went into gaps, small ops and threads that wait; above 100 % the count is
# wrong for this machine (XLA counts the bytes of each op as if no cache held them), or its load changed in between.

# %%
counted, step_s = cost(program), products["training step"]
attainable = min(peak_flops, counted["flops"] / counted["bytes"] * peak_bytes)
placed = roofline(**counted, seconds=step_s)
print(f"step of {cfg.batch_size}: {placed.intensity:.1f} FLOP/byte, {placed.flops_per_s / 1e9:.0f} GFLOP/s, "
      f"{counted['flops'] / step_s / attainable:.0%} of what is attainable here and now; by roofline() "
      f"{placed.fraction_of_attainable:.0%}, {placed.bound} bound")
assert placed.attainable_flops_per_s == min(peak().flops_per_s, placed.intensity * peak().bytes_per_s)
forward_flops = sum(2 * cfg.batch_size * I * O for I, O in zip(cfg.sizes, cfg.sizes[1:]))
first = 2 * cfg.batch_size * cfg.sizes[0] * cfg.sizes[1]  # its input needs no gradient
assert 1 < counted["flops"] / (3 * forward_flops - first) < 1.1, "forward, and two products a layer backward"  # P7

# %% [markdown]
# **Claim.** XLA's count is static: the body of a loop counts once, whatever the trip count. Multiply by hand.

# %%
def repeated(x, times):
    return jax.lax.scan(lambda x, _: (x @ x, None), x, length=times)[0]


x = jnp.ones((256, 256))
flops = {n: cost(jax.jit(lambda x: repeated(x, n)).lower(x).compile())["flops"] for n in (10, 1000)}
print("FLOPs by XLA's count of 10 and of 1000 rounds:", *flops.values())
assert flops[10] == flops[1000] < 2 * 2 * 256**3  # P8

# %% [markdown]
# ## Exercise 1
# Write `longest_gap(intervals, begin, end)`: the longest stretch of [begin, end] in which none of the intervals (start,
# duration), sorted by start, is running. Ops on several threads overlap, and one may lie within another.

# %%
# Your answer
def longest_gap(intervals, begin, end):
    raise NotImplementedError


# %%
# Self-check (runs on your answer once it is written, on the solution until then)
def check_longest_gap(f):
    assert f([], 0, 10) == 10, "nothing ran: one gap"
    assert f([(0, 4), (6, 4)], 0, 10) == 2, "from 4 to 6"
    assert f([(5, 2)], 0, 10) == 5, "before the first op is a gap too"
    assert f([(0, 3)], 0, 10) == 7, "after the last op is a gap too"
    assert f([(0, 9), (1, 1), (9.5, 0.5)], 0, 10) == 0.5, "an op inside a longer one opens no gap"
    ops = [(e["ts"], e["dur"]) for e in xla_ops(quiet)]
    step = next(e for e in quiet if e["name"] == "train")
    gap = f([op for op in ops if step["ts"] <= op[0] < end(step)], step["ts"], end(step))
    assert 0 < gap <= step["dur"], "in a real step"


# %% [markdown]
# ## Exercise 2
# Write `compute_bound_batch(I, O, balance)`: the smallest batch with which a layer I -> O in float32 reaches the
# balance (FLOP/byte) of a machine, or None if no batch does.

# %%
# Your answer
def compute_bound_batch(I, O, balance):
    raise NotImplementedError


# %%
# Self-check
def check_compute_bound_batch(f):
    for I, O, balance in ((512, 512, 4.0), (784, 512, 20.0), (512, 10, 4.0), (4096, 4096, 240.0)):
        B = f(I, O, balance)
        assert B == int(B) and intensity(B, I, O) >= balance, f"{I} -> {O}: a batch of {B} is still memory bound"
        assert B == 1 or intensity(B - 1, I, O) < balance, f"{I} -> {O}: a batch of {B - 1} is enough"
    assert f(512, 10, 20.0) is None, "512 -> 10 never exceeds 512 x 10 / (2 (512 + 10)) = 4.9 FLOP/byte"


# %% [markdown]
# ## Rules
# Each rule is proved by the assertion that carries its number.
#
# | | rule | because |
# |---|---|---|
# | P1 | profile a few warm steps, each in a StepTraceAnnotation; read the JSON | the trace is a list of named events |
# | P2 | for honest host times set `python_tracer_level = 0` | each Python call is recorded, and slowed by it |
# | P3 | block inside the annotation | else the ops run after the step's annotation |
# | P4 | a large gap: fewer dispatches (one jit, a scan) | the device waits for Python between small ops |
# | P5 | from the slowest `hlo_op` to its `op_name` | events are named after optimised instructions |
# | P6 | predict first: max of FLOPs and bytes over the peaks | within a factor of three for simple programs |
# | P7 | count by hand as well, and compare with `cost` | a wrong count makes a wrong roofline |
# | P8 | multiply a loop's cost by its trip count | XLA counts the body once |

# %% [markdown]
# ## Solutions

# %%
def longest_gap_solution(intervals, begin, end):
    longest, reached = 0, begin
    for start, duration in intervals:
        longest = max(longest, start - reached)
        reached = max(reached, start + duration)
    return max(longest, end - reached)


def compute_bound_batch_solution(I, O, balance):
    # 2 B I O >= 4 balance (B (I + O) + I O)  <=>  B (I O - 2 balance (I + O)) >= 2 balance I O
    room = I * O - 2 * balance * (I + O)
    return math.ceil(2 * balance * I * O / room) if room > 0 else None


# %%
try:
    check_longest_gap(longest_gap)
except NotImplementedError:
    check_longest_gap(longest_gap_solution)

# %%
try:
    check_compute_bound_batch(compute_bound_batch)
except NotImplementedError:
    check_compute_bound_batch(compute_bound_batch_solution)
