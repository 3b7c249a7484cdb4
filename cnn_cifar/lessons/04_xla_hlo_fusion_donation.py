# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---
# %% [markdown]
# # Compilation and the XLA boundary: HLO, fusion, donation [S1-050]
#
# After this lesson you can time the four stages between a Python function and its result, read the same layer as
# jaxpr, StableHLO and optimised HLO, dump what XLA did, say which kernels are not worth writing by hand because XLA
# fuses them already, update a training state in place by donation without its traps, and keep compiled programs from
# one process to the next.
# It uses this project's `model.py` and `kernels.py`, and `common/profiling.py`.
# Rules are numbered X1, X2, ...; the assertion that proves a rule carries its number. What is measured here was read on
# JAX 0.12 and 0.10, on a CPU.
#
# Letters: **B** batch, **H**, **W** height and width, **C** channels, **N** rows of a matrix, **K** its columns.

# %%
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent if "__file__" in globals() else Path.cwd()
sys.path[:0] = [str(PROJECT), str(PROJECT.parent)]  # the project's files, and common/ beside it

# %%
import functools
import gc
import json
import os
import re
import statistics
import subprocess
import tempfile
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import kernels
import model
from common.profiling import cost, op_table

# Before JAX starts: restart the kernel to run this cell again.
jax.config.update("jax_platforms", "cpu")  # the programs below are read as XLA:CPU writes them
jax.config.update("jax_enable_compilation_cache", False)  # compile times are XLA's, not those of a folder on disk

scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # dumps and a cache; gone when the process ends
WIDTHS = (8,) * 4
rng = np.random.default_rng(0)


def normal(shape, deviation=1.0):
    """Random float32 by NumPy: jax.random.normal would be compiled once for each shape, 0.7 s each."""
    return jnp.asarray(rng.normal(0, deviation, shape), jnp.float32)


shapes = jax.eval_shape(lambda: model.init_params(jax.random.key(0), WIDTHS))  # weights of He's deviation, vectors of 1
params = jax.tree.map(lambda s: normal(s.shape, (2 * s.shape[-1] / s.size) ** 0.5) if s.ndim > 1 else jnp.ones(s.shape),
                      shapes)
layer, stats = params["res1a"], model.init_stats(WIDTHS)["res1a"]
x = normal((8, 32, 32, 8))  # (B, H, W, C), 256 KiB


def convolve(x, w):
    """model.conv, without the gradient that it brings along."""
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def block(layer, stats, x):
    """A layer of model.forward in evaluation: (B, H, W, C) -> (B, H, W, C)."""
    with jax.named_scope("res1a"):
        x = convolve(x, layer["w"])
        return model.batch_norm_relu_inference(x, layer["scale"], layer["bias"], stats["mean"], stats["var"])


# %% [markdown]
# ## Trace, lower, compile, execute [S1-054] (must-read)
# Calling a jitted function for the first time goes through four stages. Each can be called by itself, and is an object
# that can be looked at:
# ```
#   jax.jit(f)            stage                what happens                                    what comes out
#   .trace(*args)         1 trace              the Python body runs, on shapes and dtypes      jaxpr
#   .lower()              2 lower              each primitive is written out in MLIR           StableHLO
#   ════════════════════ the XLA boundary: below it there is no Python and no JAX ════════════════════════════
#   .compile()            3 compile            XLA fuses, plans memory, makes machine code     optimised HLO
#   (*args)               4 execute            buffers in, buffers out                         arrays
# ```
# **Claim.** The Python body runs while tracing, once, and never again. Values aren't needed before stage 4: shapes and
# dtypes do, so that a program can be compiled before its data is there, or for a machine that isn't.

# %%
runs = []


def noted(layer, stats, x):
    runs.append(type(x).__name__)
    return block(layer, stats, x)


traced = jax.jit(noted).trace(*jax.eval_shape(lambda: (layer, stats, x)))  # ShapeDtypeStructs, no values
assert len(runs) == 1
lowered = traced.lower()
program = lowered.compile()
y = program(layer, stats, x)
assert len(runs) == 1 and runs[0] != type(x).__name__, "the body ran once, on a stand-in for x"  # X1
by_model = model.conv(x, layer["w"])
by_model = model.batch_norm_relu_inference(by_model, layer["scale"], layer["bias"], stats["mean"], stats["var"])
assert jnp.allclose(y, by_model, atol=1e-5)

# %% [markdown]
# **Claim.** A compiled program takes the shapes and dtypes that it was compiled for, and no others. (A jitted function
# would go back to stage 1: mlp_mnist, lesson 05.)

# %%
try:
    program(layer, stats, x[:4])
except TypeError as why:
    print(str(why).splitlines()[0][:110])
    assert "compiled" in str(why)  # X1
else:
    raise AssertionError("a compiled program took another shape")

# %% [markdown]
# **Claim.** The four stages are the first call: their times add up to it. Every later call is stage 4 alone. Compiling
# is the largest part, and grows with the program; tracing grows with the Python code that runs.

# %%
def clocked(call):
    """(seconds, result) of call(), with its arrays ready."""
    start = time.perf_counter()
    result = jax.block_until_ready(call())
    return time.perf_counter() - start, result


def fresh():
    return jax.jit(lambda *args: block(*args))  # a new function, of which JAX remembers nothing


def stage_times():
    f = fresh()
    trace_s, traced = clocked(lambda: f.trace(layer, stats, x))
    lower_s, lowered = clocked(traced.lower)
    compile_s, program = clocked(lowered.compile)
    return trace_s, lower_s, compile_s, clocked(lambda: program(layer, stats, x))[0]


def call_times():
    f = fresh()
    return [clocked(lambda: f(layer, stats, x))[0] for _ in range(2)]


rounds = [(*stage_times(), *call_times()) for _ in range(6)][1:]  # the first round also traces what jax.nn keeps
trace_s, lower_s, compile_s, execute_s, first_s, second_s = (statistics.median(column) for column in zip(*rounds))
total_s = trace_s + lower_s + compile_s + execute_s
for name, s in (("trace", trace_s), ("lower", lower_s), ("compile", compile_s), ("execute", execute_s),
                ("sum", total_s), ("first call", first_s), ("second call", second_s)):
    print(f"{name:12} {1e3 * s:8.2f} ms  " + "#" * round(40 * s / max(total_s, first_s)))
assert first_s / 3 < total_s < 3 * first_s  # X2
assert first_s > 3 * second_s and compile_s > execute_s  # X2

# %% [markdown]
# ## The same layer three times: jaxpr, StableHLO, optimised HLO [S1-051] (must-read)
# | | jaxpr | StableHLO | optimised HLO |
# |---|---|---|---|
# | written by | tracing | lowering | XLA, for one backend and version |
# | an operation is | a JAX primitive | one of about a hundred, with types and attributes | a fusion, a library call |
# | you read it for | dtypes, what runs twice | shardings, donations, constants | passes over memory, layouts |
#
# Read the jaxpr first: it is short, and most surprises are in it already.

# %%
print(re.sub(r"dilated\[.*?\n    \]", "dilated[...]", str(traced.jaxpr), flags=re.DOTALL))
primitives = {"conv_general_dilated", "sub", "rsqrt", "mul", "add", "max"}
assert all(re.search(rf"\b{name}\b", str(traced.jaxpr)) for name in primitives)

# %% [markdown]
# **Claim.** StableHLO says the same, operation by operation, with every shape and broadcast written out. It is what
# JAX hands to XLA, and nothing in it depends on the machine: lowered for a TPU it is the same text, unless the program
# itself asks where it runs, with `lax.platform_dependent`.

# %%
stablehlo = lowered.as_text()
print("\n".join(line[:118] for line in stablehlo.splitlines() if " stablehlo." in line or "func.func" in line))
ops = re.findall(r"stablehlo\.(\w+)", stablehlo)
assert {"convolution", "subtract", "rsqrt", "multiply", "add", "maximum", "broadcast_in_dim"} <= set(ops)
assert traced.lower(lowering_platforms=("tpu",)).as_text() == stablehlo  # X3
asks = jax.jit(lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)).trace(1.0)
assert asks.lower(lowering_platforms=("tpu",)).as_text() != asks.lower().as_text()

# %% [markdown]
# **Claim.** The optimised HLO is another program: the same arithmetic in fewer operations. Its ENTRY computation is
# what runs, each line one pass over memory. How to read a line:
# ```
# %fusion.1 = f32[8,32,32,8]{3,2,1,0} fusion(%convolution, ...), kind=kLoop, calls=%fused_computation, metadata=...
#  name       dtype[shape]{layout:      opcode  what it reads      how its      its body, computed   where it came
#             the last axis is nearest}                            loop runs    in registers         from
# ```

# %%
def entry(program):
    """The ENTRY computation of a compiled program: each line is one pass over memory, its fusions' insides hidden."""
    return re.search(r"^ENTRY .*?^}", program.as_text(), re.DOTALL | re.MULTILINE)[0]


print("\n".join(re.sub(r", metadata=.*", "", line)[:118] for line in entry(program).splitlines()))
before = lowered.as_text("hlo")  # HLO as XLA receives it
assert " fusion(" not in before and " fusion(" in entry(program)
assert len(op_table(program)) < len(re.findall(r"stablehlo\.(?!constant|return)", stablehlo)) / 2  # X3

# %% [markdown]
# **Claim.** Nothing is anonymous: the metadata of each operation carries the JAX primitive it came from, with the jits
# and `jax.named_scope`s around it. A fusion has the name of one of its operations, the others are named inside. So a
# slow or large line of HLO leads back to Python.

# %%
for row in op_table(program):
    print(f"{row['opcode']:12} {row['bytes'] / 2**10:6.1f} KiB  {row['op_name']}")
came_from = set(re.findall(r'op_name="([^"]*)"', program.as_text()))
assert primitives <= {name.rsplit("/", 1)[-1] for name in came_from}  # X4
assert "jit(noted)/res1a/conv_general_dilated" in came_from  # X4

# %% [markdown]
# ## Dumping what XLA did [S1-052] (optional)
# Flags in the environment make XLA write every program that it compiles, before and after optimisation, as files:
#
# | variable | what it does |
# |---|---|
# | `XLA_FLAGS=--xla_dump_to=DIR` | where to |
# | `... --xla_dump_hlo_as_text` | as text; else as protocol buffers |
# | `... --xla_dump_hlo_module_re=REGEX` | only modules of this name (a jitted `f` is `jit_f`), else all |
# | `... --xla_dump_hlo_pass_re=.*` | also after every single pass: long |
# | `JAX_DUMP_IR_TO=DIR` | what JAX hands over: StableHLO |
#
# They are read once, when the backend starts, so that they belong into the environment of a new process.
#
# **Claim.** Each module gives `module_NNNN.jit_f.before_optimizations.txt` and, on a CPU,
# `module_NNNN.jit_f.cpu_after_optimizations.txt`, which is the HLO that `compile().as_text()` shows.

# %%
def child(code, *args, **env):
    """Runs Python code in a process of its own, in the project's folder, with no settings of JAX's but those in env."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    return subprocess.run([sys.executable, "-c", code, *args], cwd=PROJECT, text=True, capture_output=True,
                          env={**inherited, "JAX_PLATFORMS": "cpu", **env})


DUMPED = """
import jax, jax.numpy as jnp, model
x, c = jnp.ones((8, 32, 32, 8)), jnp.ones(8)
jax.jit(model.batch_norm_relu_inference)(x, c, c, c, c)
"""
hlo_folder, ir_folder = Path(scratch.name) / "hlo", Path(scratch.name) / "ir"
flags = f"--xla_dump_to={hlo_folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*batch_norm.*"
done = child(DUMPED, XLA_FLAGS=flags, JAX_DUMP_IR_TO=str(ir_folder))
assert done.returncode == 0, done.stderr[-2000:]

files = sorted(path.name for path in hlo_folder.glob("*optimizations.txt"))
print(*files, *sorted(path.name for path in ir_folder.iterdir() if "batch_norm" in path.name), sep="\n")
texts = {kind: next(hlo_folder.glob(f"*.jit_batch_norm_relu_inference.{kind}.txt")).read_text()
         for kind in ("before_optimizations", "cpu_after_optimizations")}
assert len(files) == 2 and all("batch_norm" in name for name in files), "the regular expression chose"

# %% [markdown]
# The dumps are HLO like the one above, so that the same few lines read them.

# %%
def instructions(text):
    """[(name, opcode)] of the ENTRY computation of HLO text."""
    body = re.search(r"^ENTRY .*?^}", text, re.DOTALL | re.MULTILINE)[0]
    return re.findall(r"^\s+(?:ROOT )?%?(\S+) = .+? ([a-z][\w-]*)\(", body, re.MULTILINE)


opcodes = {kind: [opcode for _, opcode in instructions(text)] for kind, text in texts.items()}
print({kind: f"{len(found)} instructions, {found.count('fusion')} fusions" for kind, found in opcodes.items()})
assert opcodes["before_optimizations"].count("fusion") == 0 < opcodes["cpu_after_optimizations"].count("fusion")
c = jnp.ones(8)
here = jax.jit(model.batch_norm_relu_inference).lower(x, c, c, c, c).compile()
assert opcodes["cpu_after_optimizations"] == [opcode for _, opcode in instructions(here.as_text())]  # X5
handed_over = next(path for path in ir_folder.iterdir() if "jit_batch_norm_relu_inference" in path.name)
assert "stablehlo.maximum" in handed_over.read_text()  # X5

# %% [markdown]
# **Claim.** XLA does not forgive a typing error in `XLA_FLAGS`: the process aborts, with no Python exception to catch.

# %%
done = child(DUMPED, XLA_FLAGS="--xla_dump_too=elsewhere")
print(next(line for line in done.stderr.splitlines() if "xla_dump_too" in line)[-100:])
assert done.returncode != 0 and "Traceback" not in done.stderr  # X5

# %% [markdown]
# **Claim.** One program of a running session is dumped by an option of `compile`; there a wrong name is an exception.

# %%
one_folder = Path(scratch.name) / "one"
lowered.compile(compiler_options={"xla_dump_to": str(one_folder), "xla_dump_hlo_as_text": True})
assert list(one_folder.glob("*.jit_noted.cpu_after_optimizations.txt"))  # X5
try:
    lowered.compile(compiler_options={"xla_dump_too": str(one_folder)})
except jax.errors.JaxRuntimeError as why:
    assert "No such compile option: 'xla_dump_too'" in str(why)  # X5
else:
    raise AssertionError("an unknown option was accepted")

# %% [markdown]
# ## What XLA fuses for free, and which kernels are not worth writing [S1-053a] (must-read)
# A fusion computes several operations in one pass over memory. Without it every operation reads its operands from
# memory and writes its result back:
# ```
#   x * scale      + bias       relu                     one fusion
#  read  write  read  write  read  write                read              write
#    x ──► t1 ────► t1 ──► t2 ──► t2 ──► y                x ──► *, +, max ──► y
#      6 times the bytes of x                               2 times: what any program must move
# ```
# A hand-written kernel can win only what XLA left: bytes moved beyond those of arguments and outputs. XLA counts both.
#
# **Claim.** A chain of elementwise operations becomes one fusion, and moves the least that is possible.

# %%
def compiled(f, *args):
    return jax.jit(f).lower(*args).compile()


def fusions(program):
    return entry(program).count(" fusion(")


def least_bytes(program):
    """Bytes of the arguments and outputs: each must be read or written once."""
    memory = program.memory_analysis()
    return memory.argument_size_in_bytes + memory.output_size_in_bytes


def scale_bias_relu(x, scale, bias):
    return jax.nn.relu(x * scale + bias)


lowered = jax.jit(scale_bias_relu).lower(x, c, c)
program = lowered.compile()
unfused, fused, least = lowered.cost_analysis()["bytes accessed"], cost(program)["bytes"], least_bytes(program)
print(f"fusions 0 -> {fusions(program)}, bytes {unfused:,.0f} -> {fused:,.0f}; at least {least:,}")
assert " fusion(" not in lowered.as_text("hlo") and fusions(program) == 1 and len(op_table(program)) == 1  # X6
assert unfused > 5 * x.nbytes and least <= fused < 1.01 * least  # X6

# %% [markdown]
# **Claim.** This project's Pallas kernel for the evaluation form of batch norm moves no fewer bytes than what XLA makes
# of the lines of `model.py`. As a replacement for one elementwise pass it is not worth having; `kernels.py` keeps it
# beside the training form, whose case is another one.

# %%
program = compiled(model.batch_norm_relu_inference, x, c, c, c, c)
by_hand = kernels.hbm_bytes("inference", x.shape, x.dtype)
print(f"XLA {cost(program)['bytes']:,.0f} bytes, the Pallas kernel {by_hand:,}")
assert cost(program)["bytes"] < 1.01 * by_hand  # X7

# %% [markdown]
# **Claim.** A fusion ends
#
# - where a reduction over much data must be complete before its input is needed again: batch norm in training reads x
#   for the mean, again for the variance, and again to normalise;
# - at a convolution or a product of matrices, which is a library call: it takes in little of what surrounds it;
# - at the end of a jit, since what a program returns is in memory. (A jit *inside* a jit is no border: it is inlined.)
# - at `lax.optimization_barrier`, a border drawn by hand, for the rare case that a fusion does harm. (XLA:CPU of JAX
#   0.10 fused across it.)
#
# What is moved there in excess is what a kernel could win: these are the candidates.

# %%
q = jnp.ones((512, 64))  # (N, K)
scale, bias_relu = jax.jit(lambda x, s: x * s), jax.jit(lambda x, b: jax.nn.relu(x + b))
CASES = {
    "scale, bias, ReLU": (scale_bias_relu, x, c, c),
    "a jit inside a jit": (lambda x, s, b: bias_relu(scale(x, s), b), x, c, c),
    "a barrier inside": (lambda x, s, b: bias_relu(lax.optimization_barrier(scale(x, s)), b), x, c, c),
    "batch norm in training": (lambda *args: model.batch_norm_relu(*args)[0], x, c, c),
    "conv, batch norm, ReLU": (block, layer, stats, x),
    "softmax(q k) v": (lambda q, k, v: jax.nn.softmax(q @ k.T) @ v, q, q, q),
}
programs = {name: compiled(*case) for name, case in CASES.items()}
excess = {name: cost(program)["bytes"] / least_bytes(program) for name, program in programs.items()}
passes = {name: len(op_table(program, top=1000)) for name, program in programs.items()}
print(f"{'':24} passes  bytes moved / least possible")
for name in programs:
    print(f"{name:24} {passes[name]:6} {excess[name]:7.2f}")
assert max(excess["scale, bias, ReLU"], excess["a jit inside a jit"]) < 1.01  # X6
assert passes["a barrier inside"] == (2 if jax.__version_info__ >= (0, 12) else 1)
assert excess["batch norm in training"] > 1.9 and passes["batch norm in training"] >= 3  # X8
assert excess["conv, batch norm, ReLU"] > 1.5 and excess["softmax(q k) v"] > 3  # X8
apart = cost(compiled(scale, x, c))["bytes"] + cost(compiled(bias_relu, x, c))["bytes"]
assert apart > 1.9 * cost(programs["a jit inside a jit"])["bytes"], "two programs: the value between them is written"

# %% [markdown]
# The convolution stands in ENTRY by itself; and the N × N probabilities of the softmax are a buffer in memory.

# %%
assert " convolution(" in entry(programs["conv, batch norm, ReLU"])  # X8
assert programs["softmax(q k) v"].memory_analysis().temp_size_in_bytes >= 4 * 512**2  # X8

# %% [markdown]
# ## Donation: the new state in the old one's memory [S1-056] (must-read)
# JAX arrays never change, so an update makes a new array while the old one still exists: twice the memory of the whole
# training state. Donation hands the old buffers to the program, which may write its outputs there:
# ```
#   without   state ──► step ──► state'        with   state ══► step ══► state'
#   memory    [ old ]            [ new ]       memory  [ old, then new ]      the old name is dead
# ```
# The template for a training step, used from here on. The state is one pytree: whatever the next step needs.

# %%
LR, MOMENTUM = 0.02, 0.9
traces = []


@functools.partial(jax.jit, donate_argnames="state")
def train_step(state, key, images, labels):
    """One step of SGD with momentum on randomly mirrored images -> (new state, metrics)."""
    traces.append("train_step")
    mirrored = jax.random.bernoulli(jax.random.fold_in(key, state["step"]), 0.5, (len(images), 1, 1, 1))
    images = jnp.where(mirrored, images[:, :, ::-1], images)
    gradient_of = jax.value_and_grad(model.loss_fn, has_aux=True)
    (loss, (stats, logits)), grads = gradient_of(state["params"], state["stats"], images, labels)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, state["velocity"], grads)
    params = jax.tree.map(lambda p, v: p - LR * v, state["params"], velocity)
    metrics = {"loss": loss, "accuracy": (logits.argmax(axis=1) == labels).mean()}
    return {"params": params, "stats": stats, "velocity": velocity, "step": state["step"] + 1}, metrics


def begin():
    return {"params": jax.tree.map(jnp.copy, params), "stats": model.init_stats(WIDTHS),
            "velocity": jax.tree.map(jnp.zeros_like, params), "step": jnp.int32(0)}


key, images, labels = jax.random.key(0), normal((8, 16, 16, 3)), jnp.arange(8) % model.CLASSES
state = begin()

# %% [markdown]
# **Claim.** The compiled program says so: its header maps outputs to arguments, and the bytes it aliases are those of
# the whole state. XLA:CPU does it, too (JAX 0.12 and 0.10).

# %%
def nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


program = train_step.lower(state, key, images, labels).compile()
memory = program.memory_analysis()
print(f"state {nbytes(state):,} bytes, aliased {memory.alias_size_in_bytes:,}")
print(re.search(r"input_output_alias=\{.{60}", program.as_text())[0], "...")
assert memory.alias_size_in_bytes == nbytes(state)  # X9

# %% [markdown]
# **Claim.** After the call each leaf of the old state is deleted, and each leaf of the new one lies at the old address.

# %%
addresses = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
old = state
state, metrics = train_step(state, key, images, labels)
assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))  # X9
assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)] == addresses  # X9
assert not images.is_deleted(), "not donated: the next step may use it again"

# %% [markdown]
# ## Common mistakes, measured [S2-048] (must-read)
# **1. The old state used after donation.** Every name of it is dead: also `best = state["params"]`, kept for later.

# %%
@functools.partial(jax.jit, donate_argnums=0)
def decay(tree):
    return jax.tree.map(lambda a: 0.9 * a, tree)


def raised(call, error):
    """The message of the error, of a type `error`, that call() raises."""
    try:
        call()
    except error as why:
        return str(why)
    raise AssertionError(f"no {error}")


weights = {"w": jnp.ones(1024)}
best = weights["w"]
weights = decay(weights)
print(raised(lambda: best + 1, RuntimeError)[:80])
assert "Array has been deleted" in raised(lambda: best + 1, RuntimeError)  # X10
best = jax.tree.map(jnp.copy, weights)  # the mend
weights = decay(weights)
assert best["w"][0] == jnp.float32(0.9) and not best["w"].is_deleted()  # X10

# %% [markdown]
# **2. One array donated twice.** It happens in the first step, when two parts of the state begin as the same array: an
# average of the weights that starts as the weights. `jnp.asarray` and `tree.map(lambda a: a, ...)` don't copy.

# %%
message = raised(lambda: decay({"weights": best["w"], "average": jnp.asarray(best["w"])}), (RuntimeError, ValueError))
print(message[:100])
assert "donate the same buffer twice" in message
decay({"weights": best["w"], "average": jnp.copy(best["w"])})  # the mend  # X11

# %% [markdown]
# **3. A donation that can't be used.** The state must come out in the shapes and dtypes in which it went in. An output
# of another size is a warning at compile time, which nobody reads. An output of the same number of elements and a
# narrower dtype (a step that returns bfloat16) isn't even that: nothing is saved, in silence. So ask the program.

# %%
def donated(f, x):
    """(warnings while compiling f with its argument donated, bytes aliased, whether x is deleted after the call)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = jax.jit(f, donate_argnums=0).lower(x).compile()
    program(x)
    return [str(w.message) for w in caught], program.memory_analysis().alias_size_in_bytes, x.is_deleted()


(warning,), aliased, deleted = donated(lambda w: w[:2], jnp.ones(1024))
print(warning.splitlines()[0])
assert "donated buffers were not usable" in warning and (aliased, deleted) == (0, False)  # X12
assert donated(lambda w: w.astype(jnp.bfloat16), jnp.ones(1024)) == ([], 0, False), "no warning"  # X12
assert donated(lambda w: 2 * w, jnp.ones(1024)) == ([], 4096, True)  # X12

# %% [markdown]
# **4. A jit around a jitted step.** The inner one is inlined, and its donation goes with its border, in silence.

# %%
around = jax.jit(lambda w: decay(w))
weights = jnp.ones(1024)
around(weights)
assert not weights.is_deleted()  # X13
assert decay.lower(weights).compile().memory_analysis().alias_size_in_bytes == weights.nbytes
assert around.lower(weights).compile().memory_analysis().alias_size_in_bytes == 0  # X13

# %% [markdown]
# **5. A NumPy view of the state.** On a CPU `np.asarray` and `jax.device_get` don't copy: they look into the buffer,
# which then can't be written over. The call, told to donate, copies instead, in silence. Copy what a checkpoint needs.

# %%
weights = jnp.ones(1024)
view = jax.device_get(weights)
assert view.__array_interface__["data"][0] == weights.unsafe_buffer_pointer(), "no copy"
decay(weights)
assert not weights.is_deleted() and view[0] == 1  # X10

# %% [markdown]
# **6. A list of losses.** Each is an array on the device, alive as long as the list: ten steps, ten arrays.

# %%
def alive():
    return len(jax.live_arrays())


gc.collect()  # else garbage of earlier cells may die in between and spoil the count
before = alive()
losses = [jnp.sum(weights) * i for i in range(10)]
assert alive() == before + 10
losses = [float(loss) for loss in losses]
assert alive() == before  # X14

# %% [markdown]
# ## A template for the training step [S2-049] (must-read)
# `train_step` above, and the loop around it:
# ```
# @partial(jax.jit, donate_argnames="state")      one program, jitted once, at the top level
# def train_step(state, key, images, labels):     all that changes in one pytree, donated
#     key = fold_in(key, state["step"])           the same key in every call: resumable, no key to carry
#     ...
#     return new_state, metrics                   of the same structure; metrics stay on the device
#
# for i in range(steps):
#     state, metrics = train_step(state, key, ...)     the old name is overwritten: nothing dead is left to use
#     if (i + 1) % every == 0:                         fetched seldom: float() waits for the device
#         log({k: float(v) for k, v in metrics.items()})
# ```
# **Claim.** It is traced once; it writes the state in place in every step; and after 20 steps no more arrays are alive
# than before.

# %%
def run(state, steps, every):
    log = []
    for i in range(steps):
        state, metrics = train_step(state, key, images, labels)
        if (i + 1) % every == 0:
            log.append({"step": i + 1, **{name: float(value) for name, value in metrics.items()}})
    return state, log


del metrics
gc.collect()
before = alive()
state, log = run(state, steps=20, every=5)
print(*log, sep="\n")
assert len(traces) == 1  # X15
assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)] == addresses  # X15
assert alive() == before  # X15
assert log[-1]["loss"] < log[0]["loss"] and int(state["step"]) == 21

# %% [markdown]
# **Claim.** With `fold_in(key, step)` the randomness belongs to the step and not to the process: 21 steps in one go
# reach the same state, bit for bit, as 1 and then 20.

# %%
again, _ = run(begin(), steps=21, every=21)
assert all(jnp.array_equal(a, b) for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(state)))  # X15

# %% [markdown]
# ## The persistent cache: stage 3 once for all processes [S1-054] (must-read)
# Compiled programs live as long as the process. With `JAX_COMPILATION_CACHE_DIR=DIR` (or
# `jax.config.update("jax_compilation_cache_dir", DIR)`, before the first compilation) they are also kept as files, and
# the next process finds them: tracing and lowering run again, XLA does not.
#
# | setting | default | |
# |---|---|---|
# | `JAX_COMPILATION_CACHE_DIR` | none: no cache | share it only with whom you trust: programs are run from it |
# | `JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS` | 1.0 | what compiled faster is not kept: set 0 to keep everything |
# | `JAX_ENABLE_COMPILATION_CACHE` | true | false ignores the folder: to measure compile times, as here |
#
# **Claim.** The second process has as many hits as the first had misses, adds no file, and compiles faster. The key is
# the lowered program with the compile options, the version of XLA and the kind of device: another batch size misses.

# %%
CACHED = """
import collections, json, sys, time
import jax, model
default_s = jax.config.jax_persistent_cache_min_compile_time_secs
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
params = jax.eval_shape(lambda: model.init_params(jax.random.key(0), (8,) * 4))
stats = jax.eval_shape(lambda: model.init_stats((8,) * 4))
for B in map(int, sys.argv[1:]):
    images = jax.ShapeDtypeStruct((B, 16, 16, 3), "float32")
    lowered = jax.jit(model.forward, static_argnames="train").lower(params, stats, images, train=True)
    events.clear()
    start = time.perf_counter()
    lowered.compile()
    print(json.dumps({"B": B, "compile_s": round(time.perf_counter() - start, 3), "default_s": default_s,
                      **{what: events["/jax/compilation_cache/cache_" + what] for what in ("hits", "misses")}}))
"""
cache = Path(scratch.name) / "cache"


def compile_in_new_process(*batches):
    """One row for each batch size; and the names of the programs kept on disk afterwards."""
    done = child(CACHED, *map(str, batches), JAX_COMPILATION_CACHE_DIR=str(cache))
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    for row in rows:
        print({key: row[key] for key in ("B", "hits", "misses", "compile_s")})
    return rows, {path.name for path in cache.iterdir() if path.name.endswith("-cache")}


[first], kept = compile_in_new_process(4)
[second, other], kept_then = compile_in_new_process(4, 8)
assert (first["hits"], first["misses"]) == (0, 1) and len(kept) == 1 and first["default_s"] == 1.0  # X16
assert (second["hits"], second["misses"]) == (1, 0) and second["compile_s"] < first["compile_s"]  # X16
assert (other["hits"], other["misses"]) == (0, 1) and len(kept_then - kept) == 1  # X16

# %% [markdown]
# A program that comes out of the cache was not compiled, so that XLA dumps nothing of it: switch the cache off before
# you look for a dump, or time a compilation.
#
# ## Exercise 1
# Write `one_pass(f, *args)`: True if f is compiled to a single pass over memory, so that no kernel could move less:
# one instruction in ENTRY that does any work, and not a byte of temporaries.

# %%
# Your answer
def one_pass(f, *args):
    raise NotImplementedError


# %%
# Self-check (runs on your answer once it is written, on the solution until then)
def check_one_pass(f):
    assert f(scale_bias_relu, x, c, c) is True, "a chain of elementwise operations is one pass"
    assert f(lambda x: jnp.tanh(x) * jax.nn.sigmoid(x), x) is True, "x is read once, for both factors"
    assert f(lambda x: scale_bias_relu(convolve(x, layer["w"]), c, c), x) is False, "a convolution, then one fusion"
    assert f(lambda x: model.batch_norm_relu(x, c, c)[0], x) is False, "mean and variance come before normalising"


# %% [markdown]
# ## Exercise 2
# Write `keep_best(step, state, steps)`: calls `state, loss = step(state)` `steps` times; the step donates its argument,
# and `loss` is the loss of the state that it returns. Return (the last state, the state with the smallest loss, all
# losses as floats). The best state must outlive the steps that follow, and memory must not grow with `steps`.

# %%
# Your answer
def keep_best(step, state, steps):
    raise NotImplementedError


# %%
# Self-check
def check_keep_best(f):
    @functools.partial(jax.jit, donate_argnums=0)
    def up(state):
        w = state["w"] + 1
        return {"w": w}, jnp.sum((w - 3) ** 2)

    counts = []

    def step(state):
        counts.append(alive())
        return up(state)

    gc.collect()
    last, best, losses = f(step, {"w": jnp.zeros(2)}, 8)
    assert losses == [8, 2, 0, 2, 8, 18, 32, 50] and all(type(loss) is float for loss in losses), "all losses, floats"
    assert not best["w"].is_deleted(), "the best state was donated to the step after it: keep a copy"
    assert (best["w"] == 3).all() and (last["w"] == 8).all(), "w = 3 has the smallest loss"
    assert counts[-1] - counts[1] <= 1, "one copy may be alive besides the state, not one for each step"


# %% [markdown]
# ## Rules
# Each rule is proved by the assertion that carries its number.
#
# | | rule | because |
# |---|---|---|
# | X1 | compile from shapes, ahead of time, where it helps | no stage but the last needs a value |
# | X2 | report the first call apart | it is trace + lower + compile + execute |
# | X3 | read the jaxpr first, the optimised HLO last | StableHLO is the same for every machine, HLO for one |
# | X4 | name parts with `jax.named_scope` | an instruction's op_name leads back to them |
# | X5 | dump in a new process, with a module filter | flags are read once; a wrong one aborts |
# | X6 | leave elementwise chains, and jits in jits, to XLA | they are one fusion and move the least possible |
# | X7 | count bytes before writing a kernel | a kernel for one pass moves no less than XLA |
# | X8 | look for kernels where a reduction meets its input again, and around products | XLA stops fusing there |
# | X9 | donate the state, and check `alias_size_in_bytes` | the new state lies where the old one was |
# | X10 | copy what must survive a step | donation kills every name of a buffer; a NumPy view of it prevents donation |
# | X11 | copy where two parts of a state begin equal | one buffer can't be donated twice |
# | X12 | keep shapes and dtypes of the state | a donation that doesn't fit saves nothing: a warning, or not even that |
# | X13 | donate at the outermost jit | an inner jit's donation is dropped in silence |
# | X14 | fetch metrics as floats, seldom | arrays in a list stay alive; `float()` waits |
# | X15 | one trace, one state, `fold_in(key, step)` | nothing grows, and 1 + 20 steps are 21 |
# | X16 | a cache folder for programs that are run again | the second process doesn't compile |

# %% [markdown]
# ## Solutions

# %%
def one_pass_solution(f, *args):
    program = compiled(f, *args)
    return len(op_table(program)) == 1 and program.memory_analysis().temp_size_in_bytes == 0


def keep_best_solution(step, state, steps):
    best, losses = None, []
    for _ in range(steps):
        state, loss = step(state)
        losses.append(float(loss))
        if losses[-1] == min(losses):
            best = jax.tree.map(jnp.copy, state)
    return state, best, losses


# %%
try:
    check_one_pass(one_pass)
except NotImplementedError:
    check_one_pass(one_pass_solution)

# %%
try:
    check_keep_best(keep_best)
except NotImplementedError:
    check_keep_best(keep_best_solution)
