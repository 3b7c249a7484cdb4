# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---
# %% [markdown]
# # Performance: measure, bound, then mend in order [S2-090]
#
# After this lesson you can time a JAX program without fooling yourself, say from a count of FLOPs and bytes how fast
# it could be and which batch size changes the answer, and go through a slow program in an order that finds the large
# faults first.
#
# It uses this project's `model.py` (`block`, `matmul`, `decode_step`, `attend_cache`) and `common/profiling.py`.
# Times are printed; what is asserted are counts, and ratios that are far larger than any noise.
#
# Letters: **B** batch, **T** context, **N** = B·T rows, **D** width, **F** = 4D, **H** heads, **K** head size,
# **S** cache length, **I** × **O** a weight matrix.

# %%
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent if "__file__" in globals() else Path.cwd()
sys.path[:0] = [str(PROJECT), str(PROJECT.parent)]  # the project's files, and common/ beside it

# %%
import dataclasses
import itertools
import math
import statistics
import time
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import model
from common import profiling
from common.profiling import cost, measure

random = np.random.default_rng(0)


def normal(*shape, dtype=np.float32):
    return jnp.asarray(random.normal(size=shape), dtype)


def compiled(f, *args):
    return jax.jit(f).lower(*args).compile()

# %% [markdown]
# ## How to time a JAX program [S2-091] (must-read)
# ```
#   first call   | trace | lower | XLA compiles |░ run ░|      once per shape; hundreds of runs long
#   Python       |call|call|call|      | wait ...      |       a call only queues work ...
#   device            |░░░ run ░░░|░░░ run ░░░|░░░ run ░░░|    ... and the array it returns is not there yet
#                     ↑ the clock must stop here, at block_until_ready ┘
# ```
# **Claim.** The first call is no measurement of the program. `measure` compiles ahead of time and reports it apart.

# %%
CFG = model.GPTConfig(vocab_size=65, context=64, n_layer=1, n_head=4, n_embd=128)
B, T, D, H = 12, CFG.context, CFG.n_embd, CFG.n_head
N, F, K = B * T, 4 * D, CFG.head_dim
shapes = jax.eval_shape(partial(model.init_params, cfg=CFG), jax.random.key(0))
layer = {name: normal(*stacked.shape[1:]) for name, stacked in shapes["blocks"].items()}  # values don't matter here
x = normal(N, D)


def block(x, layer):
    return model.block(x, layer, CFG, B, model.attention, None)[0]


timing = measure(block, lambda: (x, layer), n=10)
print(f"one block: compiled in {timing.compile_s:.2f} s, runs in {1e3 * timing.median_s:.2f} ms")
assert timing.compile_s > 3 * timing.median_s

# %% [markdown]
# **Claim.** A call returns before its result exists, on a CPU too. Without `block_until_ready` you time the queueing.

# %%
square = jax.jit(lambda a: a @ a)
a = jnp.ones((1024, 1024))
jax.block_until_ready(square(a))
queued, finished = [], []
for _ in range(5):
    began = time.perf_counter()
    result = square(a)
    queued.append(time.perf_counter() - began)
    jax.block_until_ready(result)
    finished.append(time.perf_counter() - began)
print(f"returned after {1e3 * statistics.median(queued):.2f} ms, finished after "
      f"{1e3 * statistics.median(finished):.2f} ms")
assert statistics.median(finished) > 3 * statistics.median(queued)

# %% [markdown]
# **Claim.** XLA removes what nobody reads and computes beforehand what depends on no argument. A benchmark that drops
# its result, or closes over its input, times an empty program: look at the FLOPs that are left.

# %%
wanted = lambda a: (a @ a).sum()
ignored = lambda a: (wanted(a), a.sum())[1]
small = normal(128, 128)
foreseen = lambda: wanted(small)
flops = [cost(compiled(f, *args))["flops"] for f, args in ((wanted, [a]), (ignored, [a]), (foreseen, []))]
print("FLOPs: result used {:,.0f}, result ignored {:,.0f}, input known beforehand {:,.0f}".format(*flops))
assert flops[0] > 2 * 1024**3 and flops[1] < 2 * 1024**2 and flops[2] == 0

# %% [markdown]
# **Claim.** One number is no measurement. Time the *same* program under two names, in turns: what separates A from A
# is noise, and a smaller difference between A and B says nothing. In turns, because a slow spell of the machine must
# meet both.

# %%
run = compiled(block, x, layer)
rounds = {"A": [], "A again": []}
for _, name in itertools.product(range(15), rounds):
    began = time.perf_counter()
    jax.block_until_ready(run(x, layer))
    rounds[name].append(time.perf_counter() - began)
for name, seconds in rounds.items():
    ms = 1e3 * np.array(seconds)
    print(f"{name:8} median {np.median(ms):.2f} ms, range {ms.min():.2f} to {ms.max():.2f}")
medians = [statistics.median(seconds) for seconds in rounds.values()]
print(f"noise: a ratio within {max(medians) / min(medians):.2f} of 1 is no difference here, today")
assert min(rounds["A again"]) <= medians[0] <= max(rounds["A again"])

# %% [markdown]
# The protocol, as `common.profiling` follows it (`measure` in one process, `compare` between processes):
#
# 1. compile ahead of time, report it apart; 2. warm up; 3. fresh arguments outside the clock (a donated buffer dies);
# 4. block on every output, and hold it until the clock has stopped; 5. A B A B, not A A B B; 6. the median, with its
# range; 7. an A/A run says what a difference means; 8. FLOPs ÷ time must stay below the machine's peak, else the
# program is not what you think; 9. write down device, versions, load.

# %% [markdown]
# ## The roofline of one block [S2-092] (must-read)
# A program that does f FLOPs on b bytes needs at least max(f / peak FLOP/s, b / peak bytes/s) (Williams et al. 2009).
# Its **intensity** f / b decides which of the two binds; they are equal at the **ridge**, peak FLOP/s ÷ peak bytes/s.
# ```
#  FLOP/s       ┌──────────────  peak: products of large matrices
#            ／ │
#         ／    │                memory-bound left of the ridge: LayerNorm, GELU, softmax, a product with few rows
#      ／ slope = bytes/s
#    ─────────ridge──────────► intensity (FLOP/byte)
# ```
# By hand, in float32 (4 bytes), each operand read once and each result written once:
#
# | op | FLOPs | bytes |
# |---|---|---|
# | product of N rows with I × O | 2 N I O | 4 (N I + I O + N O) |
# | attention, T × T scores in memory | 4 N T D | 4 (4 N D + 2 B H T²), more for the softmax |
# | LayerNorm, GELU | about 8 per entry | 8 per entry |
#
# **Claim.** XLA counts the same FLOPs; its bytes are at least the operands and the result. The four products are
# nine tenths of the block's FLOPs.

# %%
peak = profiling.measure_cpu_peak(seconds=0.2) if jax.default_backend() == "cpu" else profiling.peak()
assert peak is not None and peak.flops_per_s, f"no peak is known for {jax.devices()[0].device_kind}: use another device"
ridge = peak.flops_per_s / peak.bytes_per_s
print(f"this machine, now: {peak.flops_per_s / 1e9:.0f} GFLOP/s, {peak.bytes_per_s / 1e9:.0f} GB/s, "
      f"ridge {ridge:.1f} FLOP/byte")

heads, wide = normal(B, H, T, K), normal(N, F)
OPS = {  # name: function, arguments, FLOPs by hand
    "layer_norm": (model.layer_norm, (x, layer["ln1_scale"], layer["ln1_bias"]), 8 * N * D),
    "qkv": (model.linear, (x, layer["w_qkv"], layer["b_qkv"]), 2 * N * D * 3 * D),
    "attention": (model.attention_reference, (heads, heads, heads), 4 * N * T * D),
    "proj": (model.linear, (x, layer["w_proj"], layer["b_proj"]), 2 * N * D * D),
    "fc": (model.linear, (x, layer["w_fc"], layer["b_fc"]), 2 * N * D * F),
    "gelu": (jax.nn.gelu, (wide,), 8 * N * F),
    "out": (model.linear, (wide, layer["w_out"], layer["b_out"]), 2 * N * F * D),
}
PRODUCTS = ("qkv", "proj", "fc", "out")


def nbytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


rows = []
for name, (f, args, by_hand) in {**OPS, "block": (block, (x, layer), None)}.items():
    count = cost(compiled(f, *args))
    median_s = measure(f, lambda: args, n=7, warmup=1).median_s
    compute_s, memory_s = count["flops"] / peak.flops_per_s, count["bytes"] / peak.bytes_per_s
    rows.append({"op": name, "MFLOP": count["flops"] / 1e6, "by hand": by_hand and by_hand / 1e6,
                 "MB": count["bytes"] / 1e6, "FLOP/byte": count["flops"] / count["bytes"],
                 "bound": "compute" if compute_s > memory_s else "memory",
                 "at least, ms": 1e3 * max(compute_s, memory_s), "measured, ms": 1e3 * median_s})
    assert count["bytes"] >= nbytes((args, jax.eval_shape(f, *args))) / 2  # equal operands are counted once
print(profiling.markdown_table(rows))

flops = {row["op"]: 1e6 * row["MFLOP"] for row in rows}
intensity = {row["op"]: row["FLOP/byte"] for row in rows}
for name in PRODUCTS:
    assert 1 <= flops[name] / OPS[name][2] < 1.02  # and the biases
assert 0.8 < sum(flops[name] for name in PRODUCTS) / flops["block"] < 1
assert abs(sum(flops[name] for name in OPS) + flops["layer_norm"] - flops["block"]) < 0.02 * flops["block"]
assert min(intensity[name] for name in PRODUCTS) > 5 * max(intensity["layer_norm"], intensity["gelu"])

# %% [markdown]
# How to read it: what stands far above "at least" is worth a look; what stands near it can only become faster by
# doing less. A measured time *below* the memory bound is data that never left the cache: XLA counts every operand of
# every op, as if there were none.
#
# **Claim.** Training costs three times the forward pass: for y = x w the backward pass makes two products of the same
# size, dx = g wᵀ and dw = xᵀ g. Hence the rule 6 · parameters · tokens.

# %%
gradient = jax.grad(lambda x, layer: (block(x, layer) ** 2).sum(), argnums=(0, 1))
training = cost(compiled(gradient, x, layer))["flops"]
weights = sum(layer[name].size for name in ("w_qkv", "w_proj", "w_fc", "w_out"))
print(f"gradient / forward {training / flops['block']:.2f}; gradient / (6 · weights · tokens) "
      f"{training / (6 * weights * N):.2f}, attention's scores being the rest")
assert 2.8 < training / flops["block"] < 3.2
assert 1 < training / (6 * weights * N) < 1.2

# %% [markdown]
# **The batch-size crossover.** A product of N rows with an I × O matrix has an intensity of
# 2 N I O / (s (N I + I O + N O)), s bytes a number: for few rows about 2 N / s. Left of the ridge the matrix must be
# read whatever N is, and the arithmetic is free: ideally, all of these batches take the time of one row. This is why
# generation for one user wastes a machine, and why servers batch.
#
# **Claim.** Per row, 256 rows cost a fraction of what one costs. (The matrix is 64 MiB, more than the caches hold. A CPU's
# library falls short of the ideal at a few rows, where it packs the matrix anew for too little work.)

# %%
def rows_to_ridge(I, O, ridge, bytes_per_value):
    """The smallest N at which the product is compute-bound; None below a million."""
    at = lambda n: 2 * n * I * O / (bytes_per_value * (n * I + I * O + n * O))
    return next((n for n in range(1, 10**6) if at(n) >= ridge), None)


I, O = 2048, 8192
w = jnp.ones((I, O))
per_row = {}
print("rows      ms   ms a row   GB/s of the matrix   GFLOP/s")
for n in (1, 4, 16, 64, 256):
    seconds = measure(model.matmul, lambda: (jnp.ones((n, I)), w), n=5, warmup=1).median_s
    per_row[n] = seconds / n
    print(f"{n:4d} {1e3 * seconds:7.1f} {1e3 * per_row[n]:10.2f} {w.nbytes / seconds / 1e9:20.1f} "
          f"{2 * n * I * O / seconds / 1e9:9.1f}")
print(f"predicted: compute-bound from {rows_to_ridge(I, O, ridge, 4)} rows on")
assert per_row[1] > 1.5 * per_row[256]  # a tenth on a quiet machine; other programs take cores sooner than bandwidth

# %% [markdown]
# The same count for devices that are not here, in bfloat16, from their published peaks:

# %%
print("device                    ridge   rows")
for kind in ("TPU v5 lite", "TPU v6 lite", "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"):
    published = profiling.DEVICE_PEAKS[kind]
    device_ridge = published["bfloat16"] / published["bytes_per_s"]
    rows_needed = rows_to_ridge(I, O, device_ridge, 2)
    print(f"{kind:24} {device_ridge:6.0f} {rows_needed:6d}")
    assert rows_needed > device_ridge  # 2 N / s = N in bfloat16, and reading the rows comes on top

# %% [markdown]
# **Claim.** Attention in a decode step has no crossover: each sequence reads a cache of its own, so intensity stays
# below 1 at any batch size. Past the ridge of the products, the cache is what a decode step waits for.

# %%
by_batch = {}
for n in (1, 16):
    q, cache = normal(n, H, 1, K), normal(n, H, T, K)
    count = cost(compiled(model.attend_cache, q, q, q, cache, cache, jnp.arange(T) < 40))
    by_batch[n] = count["flops"] / count["bytes"]
print("FLOP/byte of attend_cache:", {f"B = {n}": round(i, 2) for n, i in by_batch.items()})
assert max(by_batch.values()) < 1 and abs(by_batch[16] / by_batch[1] - 1) < 0.1

# %% [markdown]
# ## Slow code: what to check, in order [S2-065] (must-read)
# | | check | how it shows | where to look |
# |---|---|---|---|
# | 1 | retraces | as slow in the tenth step as in the first | a counter in the traced function, `jax.log_compiles` |
# | 2 | host sync | gaps between steps in a trace | `float(x)`, `int(x)`, `np.asarray(x)`, `print(x)` in the loop |
# | 3 | small dispatches | many calls of well under a millisecond | calls per step; `lax.scan`, a larger batch |
# | 4 | dtype | twice the bytes | `f64` (or f32 where bf16 was meant) in the jaxpr |
# | 5 | closure constants | slow compilation, a huge program text | `len(lowered.as_text())` |
# | 6 | layout | transposes or copies of large arrays | `profiling.op_table`, temporaries |
#
# The order is that of the usual size, and each fault hides those below it: while every step compiles, no layout can
# be measured. Here is a script with all six: it generates a few tokens for a batch, from a cache that holds 128.
# `faults` says which are still in it; each `if` shows a fault beside its repair.

# %%
SLOW = dataclasses.replace(CFG, context=256)
B, S, NEW = 8, SLOW.context, 3
PARAMS = jax.tree.map(lambda a: random.normal(size=a.shape) / 8, jax.eval_shape(
    partial(model.init_params, cfg=SLOW), jax.random.key(0)))  # NumPy, and so float64
PARAMS["blocks"] = [jax.tree.map(lambda stacked: stacked[0], PARAMS["blocks"])]  # a list of layers: one
CACHE = [tuple(random.normal(size=(B, H, S, K)) for _ in "kv") for _ in range(SLOW.n_layer)]
FAULTS = ["retraces", "host sync", "small dispatches", "float64", "closure constants", "layout"]


def turned(cache):
    """(B, H, S, K) <-> (B, S, H, K)."""
    return jax.tree.map(lambda a: a.swapaxes(1, 2), cache)


def make_script(faults):
    """-> script() -> tokens (NEW, B), its counts, and the lowered program it runs."""
    counts = Counter()
    dtype = "float64" if "float64" in faults else "float32"
    cfg = dataclasses.replace(SLOW, dtype=dtype)
    params, cache = jax.tree.map(lambda a: jnp.asarray(a, dtype), (PARAMS, CACHE))
    start = jnp.zeros(B, jnp.int32), jnp.int32(128), turned(cache) if "layout" in faults else cache

    def step(params, carry):
        token, position, cache = carry
        if "layout" in faults:  # the cache lies as (B, S, H, K), and is turned round in every step
            logits, cache = model.decode_step(params, turned(cache), token, position, cfg)
            cache = turned(cache)
        else:
            logits, cache = model.decode_step(params, cache, token, position, cfg)
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return (token, position + 1, cache), token

    def program(params, carry):
        counts["traces"] += 1  # Python runs only while JAX traces
        if "small dispatches" in faults:
            return step(params, carry)
        return lax.scan(lambda carry, _: step(params, carry), carry, None, length=NEW)

    def prepare():
        if "closure constants" in faults:
            return (jax.jit(partial(program, params)),)
        return jax.jit(program), params

    jitted, *arguments = prepare()

    def script():
        carry, tokens = start, []
        for _ in range(NEW if "small dispatches" in faults else 1):
            f, *args = prepare() if "retraces" in faults else (jitted, *arguments)  # a new jit forgets the old one
            carry, token = f(*args, carry)
            counts["calls"] += 1
            if "host sync" in faults:
                token = np.asarray(token)  # waits: the device then has nothing to do until Python is back
                counts["fetches"] += 1
            tokens.append(token)
        tokens = [np.asarray(token).reshape(-1, B) for token in tokens]
        counts["fetches"] += "host sync" not in faults
        return np.concatenate(tokens)

    return script, counts, lambda: jitted.lower(*arguments, start)


def clocked(f):
    began = time.perf_counter()
    result = f()
    return time.perf_counter() - began, result


versions, tokens = [], []
for fixed in range(len(FAULTS) + 1):
    faults = FAULTS[fixed:]
    with jax.enable_x64("float64" in faults):
        script, counts, lower = make_script(faults)
        first_s, got = clocked(script)
        per_run = dict(counts)
        later_s = statistics.median(clocked(script)[0] for _ in range(1 if "retraces" in faults else 7))
        lowered = lower()
        program = lowered.compile()
    tokens.append(got)
    versions.append({"repaired": f"{fixed} {FAULTS[fixed - 1]}" if fixed else "nothing yet", **per_run,
                     "program, kB": len(lowered.as_text()) / 1e3,
                     "temporaries, kB": program.memory_analysis().temp_size_in_bytes / 1e3,
                     "MB a token": cost(program)["bytes"] / 1e6,  # a loop's body is counted once
                     "first run, ms": 1e3 * first_s, "later, ms": 1e3 * later_s})
print(profiling.markdown_table(versions))

# %% [markdown]
# Every repair leaves the tokens as they are, which is the first thing to check. Then, one by one:
#
# **Claims.** (1) A `jax.jit` made in the loop traces and compiles in every round; made once, it does so once.
# (2) Tokens fetched at the end are fetched once. (3) A scan is one call. (4) float64, left over from NumPy and from a
# gradient check, moves twice the bytes. (5) Parameters in a closure are written into the program. (6) A cache that
# has to be turned round is copied: the copies are temporaries, many times what the step itself needs (XLA as of
# JAX 0.10 copies the cache once more, in either layout).

# %%
assert all(np.array_equal(got, tokens[0]) for got in tokens) and len(np.unique(tokens[0])) > 2
before = dict(zip(FAULTS, versions))
after = dict(zip(FAULTS, versions[1:]))


def saved(fault, column):
    return before[fault][column] / after[fault][column]


assert saved("retraces", "traces") == NEW and after["retraces"]["traces"] == 1
assert saved("retraces", "later, ms") > 3
assert saved("host sync", "fetches") == NEW and after["host sync"]["fetches"] == 1
assert saved("small dispatches", "calls") == NEW and after["small dispatches"]["calls"] == 1
assert 1.8 < saved("float64", "MB a token") < 2.2
assert saved("closure constants", "program, kB") > 30
assert saved("layout", "temporaries, kB") > (10 if jax.__version_info__ >= (0, 12) else 1.5)
print(f"from the first version to the last: {versions[0]['later, ms'] / versions[-1]['later, ms']:.0f}×")
assert versions[0]["later, ms"] > 10 * versions[-1]["later, ms"]

# %% [markdown]
# A closure constant is also a trap: the compiled program keeps the value it was traced with.

# %%
holder = {"w": jnp.ones((2, 2))}
stale = jax.jit(lambda x: x @ holder["w"])
stale(jnp.ones(2))
holder["w"] = jnp.zeros((2, 2))
assert stale(jnp.ones(2)).tolist() == [2.0, 2.0]  # the old weights
assert stale(jnp.ones((1, 2))).tolist() == [[0.0, 0.0]]  # another shape is another trace: the new ones

# %% [markdown]
# Two repairs that are small here and large elsewhere: a fetch costs a CPU little, since there is no device to idle
# far away; and a call costs some 0.1 ms, which is nothing beside a step of a large model and everything beside one of
# a microsecond. That is why each is measured on the program at hand, and kept only if it pays.

# %% [markdown]
# ## Exercise 1
# Write `crossover_rows(I, O, ridge, bytes_per_value)`: the number of rows (a float) at which a product with an I × O
# matrix reaches the ridge, in closed form, or `math.inf` where it never does (small matrices on a fast machine).

# %%
# Your answer
def crossover_rows(I, O, ridge, bytes_per_value):
    raise NotImplementedError

# %%
# Self-check (runs on your answer once it is written, on the solution until then)
def check_crossover_rows(f):
    for I, O, at, s in ((2048, 8192, 240, 2), (128, 512, 6.5, 4), (4096, 4096, 20, 4)):
        rows = f(I, O, at, s)
        assert math.isfinite(rows) and rows > 0, f"{I} x {O} does reach {at} FLOP/byte; got {rows} rows"
        assert math.isclose(2 * rows * I * O / (s * (rows * I + I * O + rows * O)), at, rel_tol=1e-9), \
            f"at {rows:.1f} rows the intensity of {I} x {O} isn't {at}: count the rows read and written, too"
        assert math.ceil(rows) == rows_to_ridge(I, O, at, s), "it isn't what counting finds"
    assert f(128, 512, 240, 2) == math.inf, "128 x 512 in bfloat16 never reaches 240 FLOP/byte: at most 102"

# %% [markdown]
# ## Exercise 2
# Write `seconds_per_call(f, args, n, clock)`: the median time of n calls f(*args), by `clock()`, honest by the protocol
# above. (The self-check brings a device of its own, whose clock only it can move.)

# %%
# Your answer
def seconds_per_call(f, args, n, clock):
    raise NotImplementedError

# %%
# Self-check
class FakeDevice:
    """A function on a device: a call takes 0.001 s to queue; its result is ready 1 s later, the first one 100 s later
    (compilation), the fourth one 50 s (the machine was busy)."""

    def __init__(self):
        self.now, self.calls = 0.0, 0

    def __call__(self, x):
        self.calls += 1
        self.now += 0.001
        ready_at = self.now + {1: 100.0, 4: 50.0}.get(self.calls, 1.0)
        device = self

        class Result:
            def block_until_ready(self):
                device.now = max(device.now, ready_at)
                return self
        return Result()


def check_seconds_per_call(f):
    device = FakeDevice()
    got = f(device, (0,), 5, lambda: device.now)
    assert got > 0.5, f"{got} s is the time to queue a call, not to finish it: block"
    assert got < 5, f"{got} s: leave out the first call, and take the median"
    assert math.isclose(got, 1.001), f"{got} s; a warm call takes 1.001 s"
    assert device.calls >= 6, "one call to compile, and five timed"

# %% [markdown]
# ## Rules
# | rule | because |
# |---|---|
# | compile apart, block, median, range, A/A | the first call compiles; a call returns before its result |
# | look at the FLOPs of what you time | XLA drops what isn't used and computes what is known |
# | bound first: max(FLOPs / peak, bytes / bandwidth) | it says what can be gained, and from where |
# | products carry the FLOPs, element-wise ops the bytes | 2 N I O against a few per entry |
# | training = 3 × forward = 6 · weights · tokens | two products backwards for each one forwards |
# | few rows are memory-bound; about ridge · s / 2 rows are free | the matrix is read once for all rows |
# | batching doesn't help attention over a cache | each sequence reads its own |
# | check in order: traces, fetches, calls, dtype, constants, layout | each hides those below it |
# | after every repair: the same result, and a new measurement | a repair that doesn't pay is complexity |

# %% [markdown]
# ## Solutions

# %%
def crossover_rows_solution(I, O, ridge, bytes_per_value):
    # 2 N I O = ridge s (N (I + O) + I O), solved for N
    scaled = ridge * bytes_per_value
    slope = 2 * I * O - scaled * (I + O)
    return scaled * I * O / slope if slope > 0 else math.inf


def seconds_per_call_solution(f, args, n, clock):
    jax.block_until_ready(f(*args))  # compiles
    seconds = []
    for _ in range(n):
        began = clock()
        result = f(*args)
        jax.block_until_ready(result)
        seconds.append(clock() - began)
    return statistics.median(seconds)

# %%
try:
    check_crossover_rows(crossover_rows)
except NotImplementedError:
    check_crossover_rows(crossover_rows_solution)

# %%
try:
    check_seconds_per_call(seconds_per_call)
except NotImplementedError:
    check_seconds_per_call(seconds_per_call_solution)
