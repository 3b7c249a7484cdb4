# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---
# %% [markdown]
# # Tracing and jaxprs [S1-025] [S2-005] [S2-009] (must-read)
#
# After this lesson you can say what JAX does with a Python function before it runs anything, predict which lines
# of yours run once and which at every call, read a jaxpr, and use one to find a bug that no value shows.
#
# Uses this project's `model.py` (`init_params`, `forward`, `forward_one`, `cross_entropy`, `loss_fn`) and
# `common/profiling.py`.
#
# ```
#   Python function ── trace ──> jaxpr ── lower ──> StableHLO ── compile ──> program, kept in jit's cache
#      runs once           typed operations       text for XLA           every later call starts here
# ```

# %%
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent if "__file__" in globals() else Path.cwd()
sys.path[:0] = [str(PROJECT), str(PROJECT.parent)]  # the project's files, and common/ beside it

# %%
import contextlib
import dataclasses
import io
import math
import time
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import model
from common import profiling

SIZES = (784, 32, 10)  # one hidden layer is enough here
params = model.init_params(jax.random.key(0), SIZES)
images = jnp.asarray(np.random.default_rng(0).normal(size=(8, 784)), jnp.float32)
labels = jnp.arange(8)

# %% [markdown]
# ## A first look: the same function, transformed
# **Claim.** `jit`, `grad` and `vmap` take a function and return a function. They ask one thing of it: that it is
# *pure*, that is, everything it uses comes in as an argument and everything it computes goes out as a result.

# %%
fast_loss = jax.jit(model.loss_fn)  # the same value, compiled
gradient = jax.grad(model.loss_fn)  # d loss / d params, of params' own structure
batched = jax.vmap(model.forward_one, in_axes=(None, 0))  # one image -> a batch of them

assert np.allclose(fast_loss(params, images, labels), model.loss_fn(params, images, labels), rtol=1e-5)
assert jax.tree.structure(gradient(params, images, labels)) == jax.tree.structure(params)
assert model.forward_one(params, images[0]).shape == (10,)
assert batched(params, images).shape == (8, 10)

# %% [markdown]
# Purity is why arrays are immutable: `x[0] = 1` would change something that another function still looks at.
# `x.at[0].set(1)` returns a new array (inside `jit` XLA updates in place where nobody else needs the old one).
# Two more differences from NumPy follow from running on an accelerator, which cannot raise an exception in the
# middle of a program and is slow in float64. Lesson 02 has more of them.

# %%
x = jnp.arange(3.0)
try:
    x[0] = 1
    raise AssertionError("JAX arrays have become mutable")
except TypeError as why:
    assert "immutable" in str(why)
assert x.at[0].set(1).tolist() == [1, 1, 2] and x.tolist() == [0, 1, 2]
assert x[10] == 2  # a read past the end is clamped to the last element, a write past it is dropped
assert jnp.array_equal(x.at[10].set(9), x)
assert jnp.asarray(np.float64(1)).dtype == jnp.float32  # unless jax_enable_x64 is on

# %% [markdown]
# ## 1. Tracing and abstract values [S1-026] (must-read)
# ### A tracer stands in for each array [S1-027] (must-read)
# **Claim.** At its first call `jit` runs the Python function with a *tracer* in the place of each array. A tracer
# records what is done to it. It is not a number: asking for its value is an error.

# %%
seen = []

@jax.jit
def double(x):
    print("    tracing with", x)
    seen.append((type(x).__name__, str(x)))  # not x itself: a tracer is of no use once tracing is over
    assert isinstance(x, jax.core.Tracer) and isinstance(x, jax.Array)
    return x + x

for value in ([1.0, 2.0], [3.0, 4.0]):
    print(double(jnp.array(value)))
# Two calls, one run of the Python code. The class has one name and prints another.
assert seen == [("DynamicJaxprTracer", "JitTracer(float32[2])")]

# %%
def error_of(f, *args):
    """The exception that f(*args) raises."""
    try:
        f(*args)
    except Exception as why:
        return why
    raise AssertionError("nothing was raised")

why = error_of(jax.jit(lambda x: int(x)), 3.0)
print(str(why).splitlines()[0])
assert type(why) is jax.errors.ConcretizationTypeError

# %% [markdown]
# ### Shapes and dtypes are known while tracing, values are not [S1-028] (must-read)
# **Claim.** A tracer carries a `ShapedArray`: shape, dtype, and whether the type is weak (that of a Python scalar).
# Every operation has a rule that gives the result's `ShapedArray` from the arguments', without computing.
# `jax.eval_shape` runs a function that way: checking the shapes of a product of 10¹² elements costs nothing.

# %%
assert str(jax.typeof(params[0]["w"])) == "float32[784,32]"
assert isinstance(jax.typeof(1.0), jax.core.ShapedArray) and jax.typeof(1.0).weak_type

huge = jax.ShapeDtypeStruct((1_000_000, 1_000_000), jnp.float32)  # 4 TB, were it an array
start = time.perf_counter()
product = jax.eval_shape(jnp.matmul, huge, huge)
print(f"{product.shape} {product.dtype}: 2e18 FLOPs not done in {1e3 * (time.perf_counter() - start):.1f} ms")
assert product.shape == (1_000_000, 1_000_000) and product.dtype == jnp.float32

logits = jax.eval_shape(model.forward, params, jax.ShapeDtypeStruct((128, 784), jnp.float32))
assert logits.shape == (128, 10)
why = error_of(jax.eval_shape, jnp.matmul, huge, jax.ShapeDtypeStruct((3, 3), jnp.float32))
assert "dot_general requires contracting dimensions to have the same shape" in str(why)

# %% [markdown]
# ### Side effects happen once per trace [S1-029] [S2-007] (must-read)
# **Claim.** What the Python code does besides computing (printing, appending, counting) happens while tracing: once
# per combination of shapes and dtypes, not once per call. `jax.debug.print` is an operation of the program instead.

# %%
trace_count = []

@jax.jit
def total(x):
    trace_count.append(x.shape)
    jax.debug.print("    the sum is {}", x.sum())
    return x.sum()

printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    for i in range(5):
        total(jnp.full(3, float(i)))
    assert len(trace_count) == 1  # five calls, one trace
    total(jnp.ones(4))
    assert trace_count == [(3,), (4,)]  # a new shape, a new trace
    jax.effects_barrier()  # until here the prints may still be on their way
assert len(printed.getvalue().splitlines()) == 6  # one a call
print(printed.getvalue(), end="")

# %% [markdown]
# ### Where JAX needs a real value [S1-030] (must-read)
# **Claim.** Seven uses of a value decide about Python's own control flow or about a *shape*, or hand the value to
# something that is not JAX; a tracer has none to offer. Each raises its own exception, and has a form that works.

# %%
def clamp_if(x):
    return x if x > 0 else 0.0 * x

def sum_below_range(n):
    return sum(range(n))

def sum_below_loop(n):
    return jax.lax.fori_loop(0, n, lambda i, total: total + i, 0)

def zeros_like_count(n):
    return jnp.zeros(n)

x, n = jnp.array([3.0, -1.0, 2.0]), 2
E = jax.errors
CASES = [  # name, form that fails, its arguments, exception, form that works, expected
    ("bool(x)", jax.jit(clamp_if), (-1.0,),
     E.TracerBoolConversionError, jax.jit(lambda x: jnp.where(x > 0, x, 0.0)), 0.0),
    ("int(x)", jax.jit(lambda x: int(x)), (2.7,),
     E.ConcretizationTypeError, jax.jit(lambda x: jnp.asarray(x).astype(int)), 2),
    ("range(n)", jax.jit(sum_below_range), (5,),
     E.TracerIntegerConversionError, jax.jit(sum_below_loop), 10),
    ("np.asarray(x)", jax.jit(lambda x: np.asarray(x).max()), (x,),
     E.TracerArrayConversionError, jax.jit(lambda x: jnp.asarray(x).max()), 3.0),
    ("x[mask]", jax.jit(lambda x: x[x > 0].sum()), (x,),
     E.NonConcreteBooleanIndexError, jax.jit(lambda x: jnp.where(x > 0, x, 0).sum()), 5.0),
    ("x[:n]", jax.jit(lambda x, n: x[:n].sum()), (x, n),
     IndexError, jax.jit(lambda x, n: jnp.where(jnp.arange(x.size) < n, x, 0).sum()), 2.0),
    ("jnp.zeros(n)", jax.jit(zeros_like_count), (n,),
     TypeError, jax.jit(zeros_like_count, static_argnums=0), [0.0, 0.0]),
]
for name, bad, args, exception, good, expected in CASES:
    why = error_of(bad, *args)
    print(f"{name:14} {type(why).__name__}")
    assert type(why) is exception, name
    assert np.array_equal(good(*args), expected), name

# %% [markdown]
# The rule behind the table: what a *shape* or a Python branch depends on must be known while tracing (static, see
# below); everything else is computed by `jnp.where`, `lax.cond`, `lax.fori_loop` and masks (lesson 04, and
# `nanogpt/lessons/01`). `x.shape` and `len(x)` are known: Python may branch on them.
#
# ### Watching real values: `jax.debug.print` and `jax.disable_jit` (optional)
# **Claim.** Under `jax.disable_jit()` nothing is traced: the function runs operation by operation on real arrays, and
# `print`, `if` and a debugger work. It is slow, and a way to look, never a mend. `cnn_cifar/lessons/03` goes on.

# %%
with jax.disable_jit():
    assert jax.jit(clamp_if)(-1.0) == 0.0  # TracerBoolConversionError above
    jax.jit(lambda x: print("    a real value:", x))(jnp.float32(3))

# %% [markdown]
# ## 2. jaxprs, the language between Python and XLA [S1-031] (must-read)
# ### `jax.make_jaxpr` shows the trace [S1-032] (must-read)
# **Claim.** What tracing records is a *jaxpr*: a list of typed operations without Python in it, no classes, no lists
# of layers, no branches that were not taken. Nothing is computed to get one.

# %%
jaxpr = jax.make_jaxpr(model.loss_fn)(params, images, labels)
print(jaxpr)

# %% [markdown]
# Read it from top to bottom:
# ```
#   { lambda ; a:f32[32] b:f32[784,32] ...   arguments, name:dtype[shape]: the leaves of (params, images, labels);
#                                            a dict's are sorted by key, so the bias comes before w
#     g:f32[8,32] = dot_general[             result = primitive[its parameters] operands
#        dimension_numbers=(([1], [0]), ([], []))     contract images' axis 1 with w's axis 0; no batch axes
#     ] e b
#     ... = custom_jvp_call[..., jit[...     a call to another jaxpr (relu): the same language, one level down
#   in (z,) }                                what is returned
# ```

# %%
def sub_jaxprs(eqn):
    """The jaxprs inside an equation's parameters: bodies of jit, scan, cond, custom_jvp, ..."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(inner := getattr(item, "jaxpr", item), "eqns"):  # a ClosedJaxpr carries a jaxpr and constants
                yield inner

def all_eqns(jaxpr):
    """Every equation of a jaxpr; of an equation that calls a jaxpr, that jaxpr's."""
    for eqn in jaxpr.eqns:
        inner = list(sub_jaxprs(eqn))
        for sub in inner:
            yield from all_eqns(sub)
        if not inner:
            yield eqn

def count_eqns(f, *args):
    """How often each primitive occurs in the jaxpr of f(*args): Counter {name: number}."""
    return Counter(eqn.primitive.name for eqn in all_eqns(jax.make_jaxpr(f)(*args).jaxpr))

forward_count = count_eqns(model.loss_fn, params, images, labels)
print(dict(forward_count))
assert {"dot_general", "max", "exp", "log", "reduce_sum"} <= forward_count.keys()
assert forward_count["dot_general"] == len(params)  # one a layer

# %% [markdown]
# ### Anatomy: invars, equations, primitives, outvars [S1-033] (must-read)
# **Claim.** A jaxpr is plain data that you can walk: `invars` (arguments), `constvars` (arrays that the function
# closed over), `eqns` (each with `primitive.name`, `params`, `invars`, `outvars`), `outvars` (results).

# %%
def layer(w, b, x):
    return jnp.maximum(x @ w + b, 0)

closed = jax.make_jaxpr(layer)(params[0]["w"], params[0]["b"], images[0])
print(closed)
inner = closed.jaxpr
assert [str(v.aval) for v in inner.invars] == ["float32[784,32]", "float32[32]", "float32[784]"]
assert [e.primitive.name for e in all_eqns(inner)] == ["dot_general", "add", "max"]
assert inner.eqns[0].params["dimension_numbers"] == (((0,), (0,)), ((), ()))
assert inner.eqns[0].invars == [inner.invars[2], inner.invars[0]]  # x @ w: x first
assert [v.aval.shape for v in inner.outvars] == [(32,)] and not inner.constvars

closing_over = jax.make_jaxpr(lambda x: layer(params[0]["w"], params[0]["b"], x))(images[0])
assert [v.aval.shape for v in closing_over.jaxpr.constvars] == [(784, 32), (32,)]  # baked in, no longer arguments
assert closing_over.consts[0] is params[0]["w"]

# %% [markdown]
# **Claim.** A transformation makes a jaxpr from a jaxpr, so its cost can be counted. The gradient of a network with
# n layers has 3n - 1 products: n forward; backward, one a layer for its weights and one to pass the gradient on to
# the layer before, which the first layer doesn't need.

# %%
three = model.init_params(jax.random.key(0), (784, 32, 32, 10))
for p in (params, three):
    forward_eqns, gradient_eqns = (count_eqns(f, p, images, labels) for f in (model.loss_fn, jax.grad(model.loss_fn)))
    n = len(p)
    print(f"{n} layers: {forward_eqns.total()} equations, gradient {gradient_eqns.total()}")
    assert forward_eqns["dot_general"] == n and gradient_eqns["dot_general"] == 3 * n - 1
    assert forward_eqns.total() < gradient_eqns.total()

# %% [markdown]
# ### Debugging with jaxprs [S1-034] (must-read)
# **Claim.** Some bugs leave the values right and waste time or memory; the jaxpr shows them. First: an unintended
# dtype. With 64-bit types enabled, `np.sqrt(2.0)` is a float64 *array type* and drags the logits, the loss and the
# backward pass along; `math.sqrt(2.0)` is a Python float, weakly typed, and takes the dtype of what it meets.

# %%
def scaled_loss(params, images, labels, scale=np.sqrt(2.0)):
    return model.cross_entropy(model.forward(params, images) / scale, labels).mean()

def wide_eqns(f, *args):
    """The equations of f(*args) that write float64."""
    with jax.enable_x64(True):
        return [eqn for eqn in all_eqns(jax.make_jaxpr(f)(*args).jaxpr)
                if any(v.aval.dtype == jnp.float64 for v in eqn.outvars)]

wide = wide_eqns(scaled_loss, params, images, labels)
print(f"{len(wide)} equations write float64, the first is {wide[0].primitive.name}")
assert wide[0].primitive.name == "convert_element_type" and len(wide) > 5
assert not wide_eqns(partial(scaled_loss, scale=math.sqrt(2.0)), params, images, labels)

# %% [markdown]
# Which line is it? `pretty_print(source_info=True)` writes behind each equation where it comes from.

# %%
with jax.enable_x64(True):
    listing = jax.make_jaxpr(scaled_loss)(params, images, labels).jaxpr.pretty_print(source_info=True)
guilty = next(line for line in listing.splitlines() if "convert_element_type[new_dtype=float64" in line)
print(guilty.strip()[:60], "...", guilty[-40:])
assert "scaled_loss" in guilty

# %% [markdown]
# Second: work done twice. The loss and the accuracy each run the network.

# %%
def loss_and_accuracy_twice(params, images, labels):
    accuracy = (model.forward(params, images).argmax(1) == labels).mean()
    return model.loss_fn(params, images, labels), accuracy

def loss_and_accuracy(params, images, labels):
    logits = model.forward(params, images)
    return model.cross_entropy(logits, labels).mean(), (logits.argmax(1) == labels).mean()

args = params, images, labels
assert count_eqns(loss_and_accuracy_twice, *args)["dot_general"] == 2 * len(params)
assert count_eqns(loss_and_accuracy, *args)["dot_general"] == len(params)
assert np.allclose(loss_and_accuracy_twice(*args), loss_and_accuracy(*args), rtol=1e-6)

# %% [markdown]
# Inside one `jit` XLA finds the two equal products and keeps one, so the compiled programs do the same work, to a
# few FLOPs. Called outside `jit`, or as two jitted functions, you pay for both. A jaxpr shows what was asked for, not
# what runs.

# %%
def flops(f):
    return profiling.cost(jax.jit(f).lower(*args).compile())["flops"]

assert flops(loss_and_accuracy_twice) < 1.01 * flops(loss_and_accuracy)

# %% [markdown]
# ## 3. `jit`, the first of the transformations [S1-035] (must-read)
# (`grad`, `vmap` and how they compose are lesson 04.)
# ### Trace, lower, compile, cache [S1-036] (must-read)
# **Claim.** The three steps of a first call can be taken one at a time, each with a result to look at. A later call
# with the same shapes and dtypes does none of them.

# %%
python_runs = 0

def loss(params, images, labels):
    global python_runs
    python_runs += 1
    return model.loss_fn(params, images, labels)

jitted = jax.jit(loss)
traced = jitted.trace(*args)
lowered = traced.lower()
compiled = lowered.compile()
print("traced:  ", len(traced.jaxpr.eqns), "equations")
print("lowered: ", len(lowered.as_text().splitlines()), "lines of StableHLO")
print("compiled:", len(compiled.as_text().splitlines()), "lines of optimised HLO")
assert [type(stage).__name__ for stage in (traced, lowered, compiled)] == ["Traced", "Lowered", "Compiled"]
assert "stablehlo.dot_general" in lowered.as_text()
assert np.allclose(compiled(*args), model.loss_fn(*args), rtol=1e-5)

jitted(*args)
jitted(params, images + 1, labels)  # other values, the same types
assert python_runs == 1 and jitted._cache_size() == 1
jitted(params, images[:4], labels[:4])  # another shape: all three steps again
assert python_runs == 2 and jitted._cache_size() == 2
# What else is part of the cache's key, and how to see why something was traced again, is lesson 05.

# %% [markdown]
# ### Ways to write `jit`, and a common trap [S2-010] (must-read)
# **Claim.** Decorator, call and `partial` are the same thing.

# %%
@jax.jit
def decorated(x):
    return 2 * x

@partial(jax.jit, static_argnames="n")  # a decorator with options
def decorated_with_options(x, n):
    return n * x

called = jax.jit(lambda x: 2 * x)
assert decorated(3) == decorated_with_options(3, n=2) == called(3) == 6

# %% [markdown]
# **Trap 1.** The cache belongs to the *function object*. A `lambda`, `def` or `partial` made inside a loop is a new
# object each time round, traced and compiled each time; made once outside, it is compiled once.

# %%
traces = 0

def step(x):
    global traces
    traces += 1
    return x + 1

for _ in range(3):
    jax.jit(lambda x: step(x))(1.0)
assert traces == 3

traces, hoisted = 0, jax.jit(lambda x: step(x))
for _ in range(3):
    hoisted(1.0)
assert traces == 1

traces = 0
for _ in range(3):
    jax.jit(step)(2.0)  # a new jit, but the same function: found in the cache
assert traces == 1

# %% [markdown]
# **Trap 2.** A method with a static `self` is cached by *which object* it is, not by what is in it: after `s = 5`
# the old program answers, silently. Make what changes an argument, or make the object immutable with equality by
# value (a frozen dataclass), so that a changed one is another one.

# %%
class Scale:
    def __init__(self, s):
        self.s = s

    @partial(jax.jit, static_argnums=0)
    def __call__(self, x):
        return self.s * x

scale = Scale(2.0)
assert scale(1.0) == 2.0
scale.s = 5.0
assert scale(1.0) == 2.0  # stale: 5 was expected

@dataclasses.dataclass(frozen=True)
class FrozenScale:
    s: float

    @partial(jax.jit, static_argnums=0)
    def __call__(self, x):
        return self.s * x

frozen = FrozenScale(2.0)
assert frozen(1.0) == 2.0 and dataclasses.replace(frozen, s=5.0)(1.0) == 5.0

# %% [markdown]
# ### Static arguments, in short (optional)
# **Claim.** A static argument is an ordinary Python value while tracing, and part of the cache's key: each new value
# costs a trace. It must be hashable, as a key has to be. Details are in lesson 05.

# %%
@partial(jax.jit, static_argnames="widths")
def ones_of(widths):
    return [jnp.ones(w) for w in widths]  # shapes from values: needs them static

assert [a.shape for a in ones_of(widths=(2, 3))] == [(2,), (3,)]
why = error_of(lambda: ones_of(widths=[2, 3]))
assert type(why) is ValueError and "Non-hashable static arguments" in str(why)

# %% [markdown]
# ### Globals are read while tracing (optional)
# **Claim.** A global that the function reads is a constant of the program. Changed later, the compiled program keeps
# the old value, while a new shape traces again and sees the new one: two truths at once.

# %%
factor = 2.0
times_factor = jax.jit(lambda x: factor * x)
assert times_factor(jnp.ones(())) == 2.0
factor = 5.0
assert times_factor(jnp.ones(())) == 2.0 and times_factor(jnp.ones(1)) == 5.0
# The cure is an argument: jax.jit(lambda x, factor: factor * x)

# %% [markdown]
# ### Random numbers: a key used twice gives the same numbers twice (optional)
# **Claim.** Purity again: a generator with hidden state would be a side effect, so the state is an argument, the key.
# The same key gives the same numbers. `split` makes new keys; `jax.debug_key_reuse` finds a second use of one.
# The whole story is `nanogpt/lessons/02`.

# %%
key = jax.random.key(0)
assert jnp.array_equal(jax.random.normal(key, (3,)), jax.random.normal(key, (3,)))
first, second = jax.random.split(key)
assert not jnp.array_equal(jax.random.normal(first, (3,)), jax.random.normal(second, (3,)))
with jax.debug_key_reuse(True):
    why = error_of(lambda key: jax.random.normal(key) + jax.random.normal(key), jax.random.key(0))
    assert type(why) is jax.errors.KeyReuseError

# %% [markdown]
# ## Exercise 1
# Write `matmul_flops(f, *args)`: the floating-point operations of all `dot_general`s in f(*args), read off the jaxpr,
# 2 · (elements of the result) · (length of the contracted axes) each. A `scan`'s body counts `eqn.params["length"]`
# times. Use `sub_jaxprs`.

# %%
# Your answer
def matmul_flops(f, *args):
    raise NotImplementedError

# %%
# Self-check (runs on your answer once it is written, on the solution until then)
def check_matmul_flops(f):
    forward = 2 * 8 * (784 * 32 + 32 * 10)
    assert f(model.forward, params, images) == forward, "each layer costs 2 * batch * inputs * outputs"
    assert f(jax.jit(model.forward), params, images) == forward, "look inside jit"
    assert f(jax.grad(model.loss_fn), *args) == 2 * forward + 2 * 8 * 32 * 10, \
        "the gradient: forward, once more for the weights, and the second layer's inputs"
    batch = jax.ShapeDtypeStruct((5, 2, 3), jnp.float32), jax.ShapeDtypeStruct((5, 3, 4), jnp.float32)
    assert f(jnp.matmul, *batch) == 2 * 5 * 2 * 3 * 4, "a batch axis is in the result, count it once"
    def chain(x, w):
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=6)[0]
    assert f(chain, jnp.ones((2, 4)), jnp.ones((4, 4))) == 6 * 2 * 2 * 4 * 4, "a scan runs its body length times"

# %% [markdown]
# ## Exercise 2
# `x[mask].mean()` cannot be traced: the number of elements would be a shape. Write `masked_mean(x, mask)`, the mean of
# the elements where the mask is true and 0 where there are none, so that it works under `jit`.

# %%
# Your answer
def masked_mean(x, mask):
    raise NotImplementedError

# %%
# Self-check
def check_masked_mean(f):
    x = jnp.array([1.0, 2.0, 6.0, -4.0])
    f = jax.jit(f)
    assert f(x, x > 0) == 3.0, "the mean of 1, 2 and 6 is 3"
    assert f(x, x < 0) == -4.0, "one element is its own mean"
    assert f(x, x > 9) == 0.0, "an empty selection gives 0, not NaN"
    assert f(jnp.array([1.0, jnp.nan]), jnp.array([True, False])) == 1.0, "what the mask leaves out must not matter"

# %% [markdown]
# ## Exercise 3
# Write `count_traces(f, calls)`: how often `jit(f)` traces `f` when called with each tuple of arguments in `calls`.
# Do not guess from the arguments: count.

# %%
# Your answer
def count_traces(f, calls):
    raise NotImplementedError

# %%
# Self-check
def check_count_traces(f):
    calls = [(jnp.ones(3),), (jnp.zeros(3),), (np.ones(3, np.float32),)]
    assert f(jnp.sin, calls) == 1, "values and NumPy against JAX make no difference"
    assert f(jnp.sin, calls + [(jnp.ones(4),)]) == 2, "a new shape is a new trace"
    assert f(jnp.sin, calls + [(jnp.ones(3, jnp.int32),)]) == 2, "a new dtype is a new trace"
    assert f(jnp.sin, [(1.0,), (2.0,), (jnp.float32(1),)]) == 2, "a Python float's type is weak, an array's is not"

# %% [markdown]
# ## Rules
# | you see | because | do |
# |---|---|---|
# | `print` shows a tracer, once | Python runs while tracing only | `jax.debug.print`, or `jax.disable_jit()` |
# | TracerBoolConversionError | `if`, `while`, `and` on a traced value | `jnp.where`, `lax.cond`, or a static argument |
# | NonConcreteBooleanIndexError, IndexError with "static" | a shape would depend on a value | a mask of fixed size |
# | TracerArrayConversionError | a NumPy function got a tracer | the same function from `jnp` |
# | the result ignores a changed global or attribute | it is a constant of the program | pass it as an argument |
# | every call is slow | `jit` of a new function object each time | jit once, outside the loop |
# | float64 or a conversion in the jaxpr | a NumPy scalar is strongly typed | Python scalars |
# | over 3 `dot_general`s a layer in a gradient | the network runs twice | share the result (`has_aux`, lesson 04) |

# %% [markdown]
# ## Solutions

# %%
def matmul_flops_solution(f, *args):
    def count(jaxpr):
        total = 0
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                (contracted, _), _ = eqn.params["dimension_numbers"]
                inner = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
                total += 2 * eqn.outvars[0].aval.size * inner
            times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            total += times * sum(count(sub) for sub in sub_jaxprs(eqn))
        return total
    return count(jax.make_jaxpr(f)(*args).jaxpr)

def masked_mean_solution(x, mask):
    return jnp.where(mask, x, 0).sum() / jnp.maximum(mask.sum(), 1)

def count_traces_solution(f, calls):
    traces = 0

    def counted(*args):
        nonlocal traces
        traces += 1
        return f(*args)

    jitted = jax.jit(counted)
    for args in calls:
        jitted(*args)
    return traces

# %%
try:
    check_matmul_flops(matmul_flops)
except NotImplementedError:
    check_matmul_flops(matmul_flops_solution)

# %%
try:
    check_masked_mean(masked_mean)
except NotImplementedError:
    check_masked_mean(masked_mean_solution)

# %%
try:
    check_count_traces(count_traces)
except NotImplementedError:
    check_count_traces(count_traces_solution)
