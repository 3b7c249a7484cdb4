# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---
# %% [markdown]
# # Debugging JAX programs [S2-054]
#
# After this lesson you can go from a symptom to its cause: read what the errors of tracing mean, see values inside a
# compiled program, find the layer, the operation and the line that make a NaN, check indices and divisions, find out
# why a function compiles again and which arrays are still alive. At the end you mend a training step with seven faults.
#
# It uses this project's `model.py` with 4 channels and 8 x 8 images, and `common/gradcheck.py`. The functions of
# `model.py` take what this lesson needs: `forward(..., norms=...)` lets us put a probe behind every layer.
#
# Letters: **B** batch, **H**, **W** height and width, **C** channels, **V** classes. Rules are numbered R1, R2, ...;
# the assertion that proves a rule carries its number.

# %%
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent if "__file__" in globals() else Path.cwd()
sys.path[:0] = [str(PROJECT), str(PROJECT.parent)]  # the project's files, and common/ beside it

# %%
import bisect
import contextlib
import functools
import gc
import inspect
import io
import logging
import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import checkify, io_callback
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import model
from common import gradcheck

# All before JAX starts: restart the kernel to run this cell again.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)  # a second device, for section 5
jax.config.update("jax_enable_compilation_cache", False)  # a cache on disk logs misses of its own

WIDTHS = (4, 4, 4, 4)
params = jax.jit(model.init_params, static_argnums=1)(jax.random.key(0), WIDTHS)
stats = model.init_stats(WIDTHS)
rng = np.random.default_rng(0)
images = jnp.asarray(rng.normal(size=(4, 8, 8, 3)), jnp.float32)  # (B, H, W, 3)


def message(error, call, *args):
    """The text of the error that call(*args) must raise, of exactly this class."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # debug_nans announces that it runs the function again
            call(*args)
    except error as why:
        assert type(why) is error, type(why)
        return str(why)
    raise AssertionError(f"no {error.__name__} was raised")


def printed(call, *args):
    """(what call(*args) prints, what it returns), once the device's prints have arrived."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        result = jax.block_until_ready(call(*args))
        jax.effects_barrier()
    return out.getvalue(), result


def logged(call, *args):
    """What JAX logs while call(*args) runs."""
    logger, log = logging.getLogger("jax"), io.StringIO()
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [logging.StreamHandler(log)], False
    try:
        call(*args)
    finally:
        logger.handlers, logger.propagate = before
    return log.getvalue()

# %% [markdown]
# ## 0. From the symptom to the section [S2-055] (must-read)
# An error of JAX names a class, and the class names the cause. Two times matter:
# ```
#   call ──> trace: Python runs, on tracers ──> compile ──> run: no Python, real values
#            shapes, `if`, indices, leaks                   NaN, inf, clamped indices, wrong statistics
#            errors, with the line                          silence, unless you ask
# ```
# **Claim.** Each symptom of the left column raises exactly this class, with these words in its message. The last column
# is the section of this lesson, or the lesson of another project (`nanogpt/lessons/01_...`), that goes on from there.

# %%
def use_after_its_function():
    kept = []
    jax.jit(lambda x: kept.append(2 * x))(images)
    return kept[0] + 1


def use_after_donation():
    x = jnp.ones(3)
    jax.jit(lambda x: 2 * x, donate_argnums=0)(x)
    return x + 1


def use_key_twice():
    with jax.debug_key_reuse(True):
        key = jax.random.key(0)
        return jax.random.normal(key) + jax.random.uniform(key)


new = jax.__version_info__ >= (0, 12)  # the texts are those of JAX 0.12; 0.10 words some of them otherwise
STATIC_SLICE = "static start/stop/step" if new else "Slice entries must be static integers"
SYMPTOMS = [  # symptom, class, words of the message, what triggers it, section
    ("`if` or `not` on a traced value", jax.errors.TracerBoolConversionError, "Attempted boolean conversion",
     lambda: jax.jit(model.forward)(params, stats, images, True), "4.1"),
    ("float(x), int(x), x.item()", jax.errors.ConcretizationTypeError, "Abstract tracer value encountered",
     lambda: jax.jit(lambda x: float(x.mean()))(images), "4.1"),
    ("range(n) with a traced n", jax.errors.TracerIntegerConversionError, "__index__() method was called",
     lambda: jax.jit(lambda n: list(range(n)))(3), "4.2"),
    ("a function of NumPy", jax.errors.TracerArrayConversionError, "__array__() was called",
     lambda: jax.jit(lambda x: np.log(x))(images), "4.1"),
    ("x[mask]", jax.errors.NonConcreteBooleanIndexError, "boolean indices must be concrete",
     lambda: jax.jit(lambda x: x[x > 0])(images), "4.2"),
    ("x[:n] with a traced n", IndexError, STATIC_SLICE,
     lambda: jax.jit(lambda x, n: x[:n])(images, 2), "4.2"),
    ("jnp.zeros(n) with a traced n", TypeError, "Shapes must be 1D sequences of concrete values",
     lambda: jax.jit(lambda n: jnp.zeros(n))(2), "4.2"),
    ("a value outlives its function", jax.errors.UnexpectedTracerError, "unexpected tracer",
     use_after_its_function, "4.3"),
    ("a loop changes its carry's type", TypeError, "must have equal types",
     lambda: lax.scan(lambda c, x: (c.astype(jnp.bfloat16), None), jnp.ones(3), jnp.ones(2)), "nanogpt 01"),
    ("shapes don't fit", TypeError, "incompatible shapes for broadcasting",
     lambda: jnp.ones(3) + jnp.ones(4), "2"),
    ("x[0] = 1", TypeError, "immutable", lambda: images.__setitem__(0, 1.0), "mlp_mnist 02"),
    ("grad of an array", TypeError, "Gradient only defined for scalar-output functions",
     lambda: jax.grad(lambda x: 2 * x)(images), "mlp_mnist 04"),
    ("grad by an integer", TypeError, "requires real- or complex-valued inputs",
     lambda: jax.grad(lambda n: 2.0 * n)(3), "mlp_mnist 04"),
    ("vmap over unlike sizes", ValueError, "inconsistent sizes",
     lambda: jax.vmap(jnp.add)(jnp.ones(3), jnp.ones(4)), "2"),
    ("a list as a static argument", ValueError, "Non-hashable static arguments",
     lambda: jax.jit(lambda x, sizes: x, static_argnums=1)(1.0, [1]), "5"),
    ("checkify.check under plain jit", ValueError, "not functionalized",
     lambda: jax.jit(lambda x: checkify.check(x > 0, "positive"))(1.0), "3.2"),
    ("NaN, with jax_debug_nans", FloatingPointError, "encountered in log",
     lambda: jax.debug_nans(True)(jnp.log)(-1.0), "3.1"),
    ("a donated array used again", RuntimeError, "Array has been deleted", use_after_donation, "6"),
    ("a key used twice, with its flag", jax.errors.KeyReuseError, "Previously-consumed key",
     use_key_twice, "nanogpt 02"),
]
for symptom, error, words, trigger, section in SYMPTOMS:
    text = message(error, trigger)
    assert words in text, (symptom, text)  # R1
    print(f"{symptom:33} {error.__name__:29} {section}")

# %% [markdown]
# The other half of all faults raises nothing:
#
# | silent symptom | ask | section |
# |---|---|---|
# | a value, or a NaN, whose origin is unclear | `jax.debug.print`, `debug_nans`, `disable_jit` | 1, 3.1 |
# | an index out of bounds, an integer divided by zero | `checkify` | 3.2 |
# | a right value with a wrong gradient | finite differences | 3 |
# | each step is slow | `explain_cache_misses`, `log_compiles` | 5 |
# | memory grows | `live_arrays` | 6 |
# | statistics or parameters that don't move | print them before and after a step | 1, 7 |

# %% [markdown]
# ## 1. Seeing values: runtime numbers inside compiled code [S2-056] (must-read)
# ```
#                          runs while   sees                  in the program           gives it a value
#   print                  tracing      tracers               no                       -
#   jax.debug.print        running      values                yes                      no
#   jax.debug.callback     running      values                yes                      no
#   jax.debug.breakpoint   running      values of the frame   yes, stops at a prompt   no
#   io_callback            running      values                yes, never left out      yes
# ```
# ### 1.1 `print` against `jax.debug.print` [S2-013] (must-read)
# **Claim.** Of three calls of a jitted function, `print` shows the first, and a tracer; `jax.debug.print` shows all
# three, and numbers. An f-string is formatted by Python, so it brings the tracer's text into the program.

# %%
def predict(params, stats, images):
    logits, _ = model.forward(params, stats, images, False)
    top = jnp.abs(logits).max()
    print("traced:", top)
    jax.debug.print("ran: largest logit {:.3f}", top)
    jax.debug.print(f"f-string: {top}")
    return logits


jitted = jax.jit(predict)
text, outputs = printed(lambda: [jitted(params, stats, scale * images) for scale in (1.0, 2.0, 3.0)])
lines = text.splitlines()
print(text)
assert len([line for line in lines if line.startswith("traced:") and "Tracer" in line]) == 1  # R2
assert sorted(line for line in lines if line.startswith("ran:")) == \
    sorted(f"ran: largest logit {np.abs(logits).max():.3f}" for logits in map(np.asarray, outputs))  # R2
assert len([line for line in lines if line.startswith("f-string:") and "Tracer" in line]) == 3  # R2

# %% [markdown]
# **Claim.** Prints of one program may arrive in another order than they were written, and after the call has returned
# (`jax.effects_barrier()` waits for them). `ordered=True` keeps the order; it adds an effect that chains them.

# %%
def count_up(n):
    def body(i, _):
        jax.debug.print("{}", i, ordered=True)
        return i + 1, None
    return lax.scan(body, n, length=20)[0]


text, _ = printed(jax.jit(count_up), jnp.int32(0))
assert text.split() == [str(i) for i in range(20)]
assert "OrderedDebug" in str(jax.make_jaxpr(count_up)(jnp.int32(0)).effects)

# %% [markdown]
# ### 1.2 Under `vmap` [S2-022] (must-read)
# **Claim.** A function under `vmap` runs once for the whole batch. `print` shows one VmapTracer, an image's view of the
# batch; `jax.debug.print` prints once for each image.

# %%
def brightness(image):
    mean = image.mean()
    print("print:", mean)
    jax.debug.print("debug.print: {:.4f}", mean)
    return mean


text, means = printed(jax.vmap(brightness), images[:3])
print(text)
lines = text.splitlines()
assert len([line for line in lines if line.startswith("print: VmapTracer")]) == 1
assert [line for line in lines if line.startswith("debug")] == [f"debug.print: {m:.4f}" for m in means.tolist()]  # R2

# %% [markdown]
# ### 1.3 Collecting values: `jax.debug.callback`, `io_callback`, `jax.debug.breakpoint` (optional)
# **Claim.** `jax.debug.callback` hands values to any Python function: here the standard deviation before each batch
# norm of the compiled network, eight layers in their order.

# %%
def probing(note):
    """The two forms of batch norm for model.forward; the training form hands `note` the layer's mean s.d."""
    def norm(x, scale, bias):
        y, mean, var = model.batch_norm_relu(x, scale, bias)
        jax.debug.callback(note, jnp.sqrt(var).mean(), ordered=True)
        return y, mean, var
    return norm, model.batch_norm_relu_inference


spreads = []
train_forward = jax.jit(partial(model.forward, train=True, norms=probing(lambda sd: spreads.append(float(sd)))))
logits, new_stats = train_forward(params, stats, images)
jax.effects_barrier()
print({name: round(sd, 2) for name, sd in zip(model.layers_of(), spreads)})
assert len(spreads) == len(model.layers_of())
stem_var = model.moments(model.conv(images, params["stem"]["w"]))[1]
assert np.isclose(spreads[0], jnp.sqrt(stem_var).mean(), rtol=1e-5)

# %% [markdown]
# **Claim.** `io_callback` belongs to the program: it returns a value, and it runs even if nobody reads that value,
# where a `pure_callback` is dropped like any dead code. It has no derivative; `grad` doesn't see a `debug.callback`.

# %%
calls, scalar = [], jax.ShapeDtypeStruct((), jnp.float32)


def note(x):
    calls.append(float(x))
    return np.float32(x)


def unread(callback):
    def f(x):
        callback(note, scalar, x)
        return 2 * x
    return jax.jit(f)


for callback, expected in ((jax.pure_callback, []), (io_callback, [1.0])):
    calls.clear()
    unread(callback)(1.0).block_until_ready()
    jax.effects_barrier()
    assert calls == expected, callback

rates = iter([0.5, 0.25, 0.125])
step = jax.jit(lambda w: w - io_callback(lambda: np.float32(next(rates)), scalar, ordered=True))
w = jnp.float32(1)
for _ in range(3):
    w = step(w)
assert w == 0.125  # the host gave each step its rate: 1 - 0.5 - 0.25 - 0.125

assert "do not support JVP" in message(ValueError, jax.grad(lambda x: io_callback(note, scalar, x)), 1.0)
calls.clear()
assert jax.grad(lambda x: (jax.debug.callback(note, x), x * x)[1])(3.0) == 6 and calls == [3.0]

# %% [markdown]
# **Claim.** `jax.debug.breakpoint()` stops a running compiled program at a prompt, `(jdb)`, that knows the values of
# the frame's variables. (In a terminal, leave out all arguments; here the commands, print and continue, are a string.)

# %%
def spread(image):
    deviation = image.std()
    jax.debug.breakpoint(backend="cli", stdin=io.StringIO("p float(deviation)\nc\n"), stdout=session)
    return deviation


session = io.StringIO()
deviation = jax.jit(spread)(images[0]).block_until_ready()
jax.effects_barrier()
print(session.getvalue())
assert str(float(deviation)) in session.getvalue()

# %% [markdown]
# ### 1.4 `jax.disable_jit()`: a debugging aid and a bisection tool [S2-057] [S2-013] (must-read)
# **Claim.** Under `jax.disable_jit()` there is no tracing: `jit` is a plain call, and the body of a `scan` is a Python
# loop over concrete values. So `print`, `assert` and `pdb` work anywhere; each operation still runs compiled, alone.

# %%
seen = []


def total(xs):
    def body(carry, x):
        seen.append(carry)
        return carry + x, None
    return lax.scan(body, jnp.float32(0), xs)[0]


jax.jit(total)(jnp.arange(5.0))
assert len(seen) < 5 and all(isinstance(carry, jax.core.Tracer) for carry in seen)
seen.clear()
with jax.disable_jit():
    jax.jit(total)(jnp.arange(5.0))
assert [float(carry) for carry in seen] == [0, 0, 1, 3, 6]  # R3

# %% [markdown]
# **First cut: is it the mathematics or the tracing?** Run the same call with and without jit.
# - wrong both times: the mathematics; go on below, with concrete values;
# - wrong only under jit: the function reads or writes something outside its arguments, and the program holds the value
#   from the time of tracing.

# %%
momentum = 0.9
decayed = jax.jit(lambda x: momentum * x)
decayed(1.0)
momentum = 0.5
with jax.disable_jit():
    assert decayed(1.0) == 0.5
assert decayed(1.0) == np.float32(0.9)  # R3

# %% [markdown]
# **Second cut: which layer?** A fault is planted in the convolution block: its batch norm forgets EPS. That does no
# harm until a channel dies (all its weights are 0): its variance is 0, and 0 / sqrt(0) is NaN.
#
# **Claim.** A Python assertion behind each layer finds it under `disable_jit`: there `pdb` stops with all values at
# hand. Under jit the same assertion is a TracerBoolConversionError.

# %%
def norm_without_eps(x, scale, bias):
    mean, var = model.moments(x)
    return jax.nn.relu((x - mean) * (lax.rsqrt(var) * scale) + bias), mean, var


def asserting(norm):
    names = iter(model.layers_of())

    def checked(x, scale, bias):
        y, mean, var = norm(x, scale, bias)
        name, finite = next(names), jnp.isfinite(y).all((0, 1, 2))
        assert finite.all(), f"{name}: channels {np.flatnonzero(~finite)} are not finite"
        return y, mean, var
    return checked, model.batch_norm_relu_inference


down3 = params["down3"] | {"w": params["down3"]["w"].at[..., 0].set(0)}
dying = params | {"down3": down3}
checked_forward = jax.jit(lambda params: model.forward(params, stats, images, True, asserting(norm_without_eps)))
message(jax.errors.TracerBoolConversionError, checked_forward, dying)
with jax.disable_jit():
    text = message(AssertionError, checked_forward, dying)
print(text)
assert text == "down3: channels [0] are not finite"  # R3

# %% [markdown]
# **Bisection.** Where the pieces are many or slow, don't look behind each: a NaN that is there stays there, so the
# first bad piece of n is found by running log2(n) prefixes.
# ```
#   stem  down1  res1  down2  down3  res3
#    ok    ok     ok    ok     bad    bad         look behind the middle one, then in the half that holds the change
# ```

# %%
def stages(params, norm):
    """{name: function}: model.forward in training, up to the head, cut between its blocks."""
    def block(name, pool=False):
        def run(x):
            x = model.conv(x, params[name]["w"])
            x = model.max_pool(x) if pool else x
            return norm(x, params[name]["scale"], params[name]["bias"])[0]
        return run

    def residual(name):
        first, second = block(name + "a"), block(name + "b")
        return lambda x: x + second(first(x))
    return {"stem": block("stem"), "down1": block("down1", True), "res1": residual("res1"),
            "down2": block("down2", True), "down3": block("down3", True), "res3": residual("res3")}


def run_stages(functions, x):
    return functools.reduce(lambda y, f: f(y), functions, x)


def first_bad(stages, x, ok):
    """(name of the first stage after which ok fails, how many prefixes ran). Once false, ok must stay false."""
    names, functions, runs = list(stages), list(stages.values()), []

    def bad(i):
        runs.append(i)
        return not ok(run_stages(functions[:i + 1], x))
    return names[bisect.bisect_left(range(len(names)), True, key=bad)], len(runs)


with jax.disable_jit():  # each operation is compiled already; a jitted prefix would be compiled as a whole
    features = model.HEAD_SCALE * run_stages(stages(params, model.batch_norm_relu).values(), images).max((1, 2))
    found = first_bad(stages(dying, norm_without_eps), images, lambda x: jnp.isfinite(x).all())
assert np.allclose(features @ params["head"]["w"] + params["head"]["b"], logits, atol=1e-5), "the stages are the model"
print("first bad stage, prefixes run:", *found)
assert found == ("down3", 3)  # R3

# %% [markdown]
# ## 2. Seeing the program: what JAX actually traced and compiled [S2-058] (must-read)
# ```
#   jax.make_jaxpr(f)(x)        the jaxpr: what was traced        shapes, dtypes, casts, dead or doubled work
#   f.lower(x).as_text()        StableHLO: what XLA is given      constants, donation, custom calls
#   ....compile().as_text()     HLO after XLA: what runs          fusions, copies, buffers (lesson 04)
#   jax.eval_shape(f, x)        only the types of the result, without compiling
#   jax.log_compiles(True)      a line for each compilation
# ```
# **Claim.** All three texts show the eight convolutions; XLA has melted the elementwise work between them into fewer
# operations than JAX traced.

# %%
infer = jax.jit(partial(model.forward, train=False))
jaxpr, lowered = jax.make_jaxpr(infer)(params, stats, images), infer.lower(params, stats, images)
program = lowered.compile().as_text()


def all_eqns(jaxpr):
    """Every equation of a jaxpr; of an equation that calls jaxprs, those jaxprs' equations."""
    for eqn in jaxpr.eqns:
        values = (item for value in eqn.params.values() for item in (value if isinstance(value, tuple) else (value,)))
        inner = [body for item in values if hasattr(body := getattr(item, "jaxpr", item), "eqns")]
        for body in inner:
            yield from all_eqns(body)
        if not inner:
            yield eqn


primitives = Counter(eqn.primitive.name for eqn in all_eqns(jaxpr.jaxpr))
entry = re.search(r"^ENTRY .*?^}", program, re.DOTALL | re.MULTILINE)[0].splitlines()
works = [line for line in entry if " = " in line and not re.search(r"\b(parameter|constant|tuple|bitcast)\(", line)]
print(f"{primitives.total()} equations in the jaxpr, {len(works)} operations in the compiled program")
assert primitives["conv_general_dilated"] == lowered.as_text().count("stablehlo.convolution") == 8
assert sum("convolution" in line for line in works) >= 8 and len(works) < primitives.total()
assert jax.eval_shape(infer, params, stats, images)[0].shape == (4, model.CLASSES)

# %% [markdown]
# **A wrong dtype.** This function means to compute in bfloat16. Its mean is a NumPy float32 array, so the subtraction
# promotes the images, and the model, which computes in the dtype of its images, runs in float32 from there on.
#
# **Claim.** The jaxpr's `convert_element_type` to float32 shows it, with the function that asked for it.

# %%
def classify(params, stats, pixels, mean):
    return model.forward(params, stats, pixels.astype(jnp.bfloat16) / 255 - mean, False)[0]


def conv_dtypes(jaxpr):
    return {str(eqn.invars[0].aval.dtype) for eqn in all_eqns(jaxpr) if eqn.primitive.name == "conv_general_dilated"}


def casts(jaxpr):
    """The equations that cast to float32, each with the line of source that they come from."""
    return [line.strip() for line in jaxpr.pretty_print(source_info=True).splitlines()
            if "convert_element_type[new_dtype=float32" in line]


pixels, mean = jnp.uint8(255 * rng.random((4, 8, 8, 3))), np.array([0.49, 0.48, 0.45], np.float32)
wrong = jax.make_jaxpr(classify)(params, stats, pixels, mean).jaxpr
right = jax.make_jaxpr(classify)(params, stats, pixels, mean.astype(jnp.bfloat16)).jaxpr
guilty = [line for line in casts(wrong) if "(classify)" in line]
print(re.sub(r"/\S*/|  +", " ", guilty[0]))
assert len(guilty) == 1 and "f32[4,8,8,3]" in guilty[0] and conv_dtypes(wrong) == {"float32"}
assert not [line for line in casts(right) if "(classify)" in line] and conv_dtypes(right) == {"bfloat16"}
assert len(casts(right)) >= 8, "batch norm widens in each layer, on purpose"  # R4

# %% [markdown]
# **Claim.** `jax.log_compiles` names what is compiled, with shapes and types. A second call leaves no line.

# %%
double = jax.jit(lambda x: 2 * x)
with jax.log_compiles(True):
    first, second = logged(double, images), logged(double, images)
print(next(line for line in first.splitlines() if line.startswith("Compiling"))[:78], "...")
assert "Compiling jit" in first and "float32[4,8,8,3]" in first and second == ""

# %% [markdown]
# ## 3. Numerical problems: NaN, inf, out-of-bounds, division by zero and wrong gradients [S2-059] (must-read)
# Five planted bugs, as they happen in a classifier, and the tool that finds each:
#
# | bug | what you see without the tool | tool |
# |---|---|---|
# | 1 entropy of a sure prediction: 0 log 0 | NaN | `jax.debug_nans` |
# | 2 weights 1 / count, and a class without examples | inf | `jax.debug_infs` |
# | 3 labels 1..V instead of 0..V-1 | the last weight, in silence | `checkify.index_checks` |
# | 4 accuracy in whole percent of 0 examples | some integer, in silence | `checkify.div_checks` |
# | 5 batch statistics held fixed by the gradient | the right value | finite differences |

# %%
def entropy(logits):
    p = jax.nn.softmax(logits)
    return -(p * jnp.log(p)).sum()


def class_weights(counts):
    return 1 / counts


def percent(right, counted):
    return 100 * right // counted


sure, counts = jnp.array([0.0, 200.0]), jnp.array([3.0, 0.0, 5.0])
assert jnp.isnan(entropy(sure)) and jnp.isinf(class_weights(counts)[1])
with jax.debug_nans(True):
    text = message(FloatingPointError, jax.jit(entropy), sure)
    jax.jit(class_weights)(counts)  # inf is no NaN: nothing is raised
print("1", text)
assert "nan" in text and "encountered in mul" in text
with jax.debug_infs(True):
    text = message(FloatingPointError, jax.jit(class_weights), counts)
print("2", text)
assert "inf" in text and "encountered in div" in text

weights, labels = jnp.array([1.0, 2.0, 3.0]), jnp.array([1, 2, 3])
assert (weights[labels] == jnp.array([2.0, 3.0, 3.0])).all()  # 3 is out of bounds: the nearest entry is read
error, _ = jax.jit(checkify.checkify(lambda weights, labels: weights[labels], checkify.index_checks))(weights, labels)
print("3", error.get())
assert "index 3 is out of bounds for axis 0 with size 3" in error.get()

nothing = jax.jit(percent)(0, 0)
print(f"4 0 of 0 is {nothing} %")
assert nothing.dtype == jnp.int32, "integers have no NaN"
error, _ = jax.jit(checkify.checkify(percent, checkify.div_checks))(0, 0)
print("4", error.get())
assert error.get() == "division by zero"

# %% [markdown]
# The fifth has no symptom of its own. Values agree to the last bit; only a difference quotient knows the gradient. It
# takes float64: in float32 rounding hides errors like this one, so `common/gradcheck.py` refuses it.

# %%
def held_norm_relu(x, scale, bias):
    mean, var = lax.stop_gradient(model.moments(x))  # the planted bug
    return jax.nn.relu(model.normalise(x, scale, bias, mean, var)), mean, var


message(ValueError, lambda: gradcheck.directional(jnp.sum, jnp.ones(3), key=jax.random.key(0)))
with jax.enable_x64(True):
    layer = {"x": jnp.asarray(rng.normal(size=(2, 2, 2, 3))), "scale": jnp.ones(3), "bias": jnp.zeros(3)}
    pull = jnp.asarray(rng.normal(size=(2, 2, 2, 3)))
    assert (held_norm_relu(**layer)[0] == model.batch_norm_relu(**layer)[0]).all()
    rows = [gradcheck.directional(lambda layer: (norm(**layer)[0] * pull).sum(), layer, key=jax.random.key(0), n=1)[0]
            for norm in (model.batch_norm_relu, held_norm_relu)]
print("5 error of the gradient: {:.0e} right, {:.0e} with held statistics".format(*(row.error for row in rows)))
assert rows[0].ok and rows[1].error > 1e-2  # R7

# %% [markdown]
# ### 3.1 Locating NaNs with `jax_debug_nans` [S2-043] (must-read)
# It looks at what comes *out* of each jitted function, and of each operation outside of one. When it finds a NaN there,
# it runs the function again, operation by operation, to name the first that makes one.
# ```
#    jit ┌───────────────────────────────┐        no jit:   log ─ looked at ─ where ─ looked at
#        │  log ── where ── sum          │ ── looked at
#        └───────────────────────────────┘
# ```
# **Claim.** So it misses a NaN that a `where` hides inside one jitted function, and an infinity; of a loop it says
# `scan`, not the operation; a NaN of the backward pass is named by the operation of the backward pass.

# %%
def log_sum(x):
    return jnp.log(x).sum()


def masked_log_sum(x):
    return jnp.where(x > 0, jnp.log(x), 0.0).sum()


def decay(x):
    return lax.scan(lambda c, _: (jnp.log(c) - 1, None), x, length=3)[0]


def root(x):
    return jnp.where(x > 0, jnp.sqrt(x), 0.0)


x = jnp.array([-1.0, 1.0])
with jax.debug_nans(True):
    assert "encountered in log" in message(FloatingPointError, jax.jit(log_sum), x)
    assert jax.jit(masked_log_sum)(x) == 0  # missed: the NaN does not come out
    assert "encountered in log" in message(FloatingPointError, masked_log_sum, x)
    assert jnp.isinf(jax.jit(lambda x: 1 / x)(0.0))  # missed: no NaN
    assert "encountered in scan" in message(FloatingPointError, decay, 1.0)
    with jax.disable_jit():  # R5: then the loop is Python, and its operations are named
        assert "encountered in log" in message(FloatingPointError, decay, 1.0)
    assert root(0.0) == 0
    text = message(FloatingPointError, jax.grad(root), 0.0)
print(text)
assert "encountered in mul" in text  # 0 * inf: the derivative of sqrt at 0, times the zero that where passes back  # R5

# %% [markdown]
# The cure of the last one, a `where` around the input too, is in `mlp_mnist/lessons/04_grad_and_vmap.py`. What the flag
# costs: each output is fetched and looked at, and donation is off, since the arguments may be needed again.

# %%
with jax.debug_nans(True):
    x = jnp.ones(3)
    jax.jit(lambda x: 2 * x, donate_argnums=0)(x)
assert not x.is_deleted()

# %% [markdown]
# ### 3.2 `jax.experimental.checkify` [S2-060] (must-read)
# `checkify(f, errors)` is a transformation, as `grad` is: f returns a value, the checked f returns (error, value), and
# the error is data that travels through jit, scan and vmap. Outside, `error.get()` is its message or None, and
# `error.throw()` raises it.
#
# **Claim.** One faulty function, four kinds of fault; each set of checks reports its own. Where several were made, the
# first in the program's order is reported.

# %%
def weighted(loss, counts, label):
    checkify.check(loss >= 0, "the cross-entropy {loss} is negative", loss=loss)
    return jnp.log(loss) * (1 / counts)[label]


faulty = jnp.float32(-1), jnp.array([2.0, 0.0]), 5
EXPECTED = {"user_checks": "the cross-entropy -1.0 is negative", "nan_checks": "nan generated by primitive: log",
            "div_checks": "division by zero", "index_checks": "index 5 is out of bounds for axis 0 with size 2",
            "float_checks": "nan generated by primitive: log", "all_checks": "the cross-entropy -1.0 is negative"}
for name, words in EXPECTED.items():
    run = jax.jit(checkify.checkify(weighted, getattr(checkify, name)))
    error, _ = run(*faulty)
    print(f"{name:13} {error.get()}")
    assert words in error.get()  # R6
assert checkify.float_checks == checkify.nan_checks | checkify.div_checks
assert checkify.all_checks == checkify.float_checks | checkify.index_checks | checkify.user_checks
assert run(jnp.float32(1), jnp.array([2.0, 1.0]), 1)[0].get() is None

# %% [markdown]
# **Claim.** `checkify.check` without `checkify` works only outside of jit. In a scan the error is the first step's;
# under `vmap` each example has its own. `throw` raises `checkify.JaxRuntimeError`, a ValueError, which has only its
# name in common with `jax.errors.JaxRuntimeError`.

# %%
assert "not functionalized" in message(ValueError, jax.jit(weighted), *faulty)
assert "is negative" in message(checkify.JaxRuntimeError, weighted, *faulty)


def budget(xs):
    def body(spent, step):
        spent = spent + xs[step]
        checkify.check(spent <= 3, "step {step}: {spent} is over budget", step=step, spent=spent)
        return spent, None
    return lax.scan(body, jnp.float32(0), jnp.arange(len(xs)))[0]


error, spent = jax.jit(checkify.checkify(budget))(jnp.ones(6))
assert "step 3: 4.0 is over budget" in error.get() and spent == 6, "the program runs on; the error is its first"  # R6
assert "step 3" in message(checkify.JaxRuntimeError, error.throw)
assert issubclass(checkify.JaxRuntimeError, ValueError)
assert checkify.JaxRuntimeError is not jax.errors.JaxRuntimeError

error, _ = jax.jit(jax.vmap(checkify.checkify(budget)))(jnp.array([[1.0, 1.0], [1.0, 5.0], [4.0, 0.0]]))
print(error.get())
assert [line.split(" (")[0] for line in error.get().splitlines()] == [
    "at mapped index 1: step 1: 6.0 is over budget", "at mapped index 2: step 0: 4.0 is over budget"]

# %% [markdown]
# **Claim.** On the network: one check behind each layer, in compiled code, finds the dead channel of section 1.4 before
# it harms anyone. Users' checks are cheap; the automatic ones follow every operation.

# %%
def alive(x, scale, bias, name):
    y, mean, var = model.batch_norm_relu(x, scale, bias)
    checkify.check((var > 0).all(), f"{name}: a channel is constant, its variances are {{var}}", var=var)
    return y, mean, var


def checked_forward(params, stats, images):
    names = iter(model.layers_of())
    norms = (lambda x, scale, bias: alive(x, scale, bias, next(names)), model.batch_norm_relu_inference)
    return model.forward(params, stats, images, True, norms)


watched = jax.jit(checkify.checkify(checked_forward))
assert watched(params, stats, images)[0].get() is None
text = watched(dying, stats, images)[0].get()
print(text)
assert text.startswith("down3: a channel is constant, its variances are [0. ")

sizes = [len(list(all_eqns(jax.make_jaxpr(f)(params, stats, images).jaxpr))) for f in (
    partial(model.forward, train=True), checkify.checkify(checked_forward),
    checkify.checkify(checked_forward, checkify.all_checks))]
print("equations: {} plain, {} with users' checks, {} with all checks".format(*sizes))
assert sizes[0] < sizes[1] < sizes[2] and sizes[2] > 2 * sizes[1]

# %% [markdown]
# ## 4. Tracers where Python needs values
# ### 4.1 TracerBoolConversionError [S2-061] (must-read)
# **Claim.** The message names the tracer's type and the argument that its value depends on. Three ways out:
#
# | fix | when | costs |
# |---|---|---|
# | a static argument | it selects the program: train or not | a compilation for each value |
# | `jnp.where` | both sides are cheap, or elementwise | both sides run |
# | `lax.cond` | one side is expensive | nothing, but under `vmap` it becomes a `where` |

# %%
text = message(jax.errors.TracerBoolConversionError, jax.jit(model.forward), params, stats, images, True)
assert "Attempted boolean conversion of traced array with shape bool[]" in text
assert "depends on the value of the argument train" in text

static = jax.jit(model.forward, static_argnames="train")
sizes = [len(static.trace(params, stats, images, train=train).jaxpr.jaxpr.eqns) for train in (False, True)]
assert sizes[0] < sizes[1], "two programs: training also computes statistics"  # R8


def clip_if(g, limit):
    norm = jnp.linalg.norm(g)
    if norm > limit:
        return g * (limit / norm)
    return g


def clip_where(g, limit):
    norm = jnp.linalg.norm(g)
    return g * jnp.where(norm > limit, limit / norm, 1)


def clip_cond(g, limit):
    norm = jnp.linalg.norm(g)
    return lax.cond(norm > limit, lambda g: g * (limit / norm), lambda g: g, g)


message(jax.errors.TracerBoolConversionError, jax.jit(clip_if), jnp.ones(4), 1.0)
for limit in (1.0, 3.0):  # the norm is 2
    want = clip_if(jnp.ones(4), limit)  # outside of jit there is a value to decide by
    assert all(jnp.allclose(jax.jit(clip)(jnp.ones(4), limit), want) for clip in (clip_where, clip_cond))  # R8

# %% [markdown]
# ### 4.2 Tracers in boolean masks, shapes and slices [S2-062] (must-read)
# One reason, three classes: the *shape* of the result would depend on a value, and a program has fixed shapes.
#
# | you write | class | write |
# |---|---|---|
# | `losses[losses > 1].mean()` | NonConcreteBooleanIndexError | `jnp.where(mask, losses, 0).sum() / mask.sum()` |
# | `jnp.flatnonzero(mask)` | ConcretizationTypeError | `jnp.flatnonzero(mask, size=k, fill_value=-1)` |
# | `images[i:i + B]` | IndexError | `images[jax.ds(i, B)]`, `lax.dynamic_slice_in_dim(images, i, B)` |
# | `jnp.zeros(n)` | TypeError | n static |

# %%
losses = jnp.array([0.5, 2.0, 1.5, 0.1])
masked_mean = jax.jit(lambda losses: (lambda mask: jnp.where(mask, losses, 0).sum() / mask.sum())(losses > 1))
text = message(jax.errors.NonConcreteBooleanIndexError, jax.jit(lambda losses: losses[losses > 1].mean()), losses)
assert "Array boolean indices must be concrete" in text
assert masked_mean(losses) == losses[losses > 1].mean() == 1.75  # R8

message(jax.errors.ConcretizationTypeError, jax.jit(lambda losses: jnp.flatnonzero(losses > 1)), losses)
hard = jax.jit(lambda losses: jnp.flatnonzero(losses > 1, size=3, fill_value=-1))(losses)
assert hard.tolist() == [1, 2, -1]  # R8

text = message(IndexError, jax.jit(lambda images, i: images[i:i + 2]), images, 1)
assert STATIC_SLICE in text and ("x[jax.ds(start, size)]" in text or not new)
by_ds = jax.jit(lambda images, i: images[jax.ds(i, 2)])
by_slice = jax.jit(lambda images, i: lax.dynamic_slice_in_dim(images, i, 2))
for cut in (by_ds, by_slice):
    assert (cut(images, 1) == images[1:3]).all()  # R8
    assert (cut(images, 3) == images[2:4]).all()  # R6: no error past the end; the window is pushed back inside

assert "Shapes must be 1D sequences of concrete values" in message(TypeError, jax.jit(jnp.zeros), 2)
assert jax.jit(jnp.zeros, static_argnums=0)(2).shape == (2,)  # R8

# %% [markdown]
# ### 4.3 UnexpectedTracerError: tracer leaks [S2-063] (must-read)
# A traced function that writes to a list, a global or an attribute of `self` leaves a tracer there, and a tracer that
# outlives its trace is worthless.
#
# **Claim.** The leak itself is silent; the error comes where the leaked value is *used*, maybe much later. Its message
# names the line where the value was made. `jax.checking_leaks()` raises at the call that leaks instead, a plain
# Exception. The cure: return the value.

# %%
activations = []


def leaky(images):
    scaled = images / jnp.abs(images).max()
    activations.append(scaled)  # the planted bug
    return model.conv(scaled, params["stem"]["w"])


jax.jit(leaky)(images)  # silent
text = message(jax.errors.UnexpectedTracerError, lambda: activations[0] + 1)
line, function = re.search(r"created on line \S+?:(\d+)\S* \((\w+)\)", text).groups()
print(f"created on line {line} of {function}")
assert function == "leaky" and int(line) == leaky.__code__.co_firstlineno + 1

activations.clear()
with jax.checking_leaks():
    assert "Leaked trace" in message(Exception, jax.jit(lambda x: activations.append(2 * x)), images)  # R9
    activations.clear()
    activations.append(jax.jit(lambda x: 2 * x)(images))  # R9: returned, then kept
assert (activations[0] == 2 * images).all()

# %% [markdown]
# ## 5. `jax_explain_cache_misses`: three explanations, and where it goes quiet [S2-064] (must-read)
# **Claim.** With it each trace logs its cause: the function was never seen, the types of its inputs differ (which, now
# and before), or a function is defined anew on the same line in each round. Another static value is explained by JAX
# 0.10 only; 0.12 says that it can't, or, once it has seen a key that differs in types too, blames those (`*`).

# %%
cross_entropy = jax.jit(model.cross_entropy, static_argnums=2)
spread_of = jax.jit(lambda logits, ddof: logits.std(ddof=ddof), static_argnums=1)
labels = jnp.array([3, 1, 4, 1])


def fresh_lambda():
    return jax.jit(lambda x: x + 1)(labels)


if new:
    unexplained, misled = "explanation unavailable", "at labels, now i32[4] and before u8[4]"
else:
    unexplained, misled = "Static(val=2) and before", "Static(val=0.2) and before"
MISSES = [
    ("first call", lambda: cross_entropy(logits, labels, 0.0), "never seen function"),
    ("another shape", lambda: cross_entropy(logits[:2], labels[:2], 0.0),
     "different input types: * at logits, now f32[2,10] and before f32[4,10]"),
    ("another dtype", lambda: cross_entropy(logits, labels.astype("uint8"), 0.0), "at labels, now u8[4] and before"),
    ("another static value *", lambda: cross_entropy(logits, labels, 0.2), misled),
    ("first call", lambda: spread_of(logits, 1), "never seen function"),
    ("another static value", lambda: spread_of(logits, 2), unexplained),
    ("a lambda", fresh_lambda, "never seen function"),
    ("the lambda again", fresh_lambda, "being re-defined repeatedly"),
    ("nothing new", lambda: cross_entropy(logits, labels, 0.0), ""),
]
with jax.explain_cache_misses(True):
    for what, call, words in MISSES:
        text = " ".join(logged(call).split())
        print(f"{what:22} {words or '-'}")
        assert words in text and ("CACHE MISS" in text) == bool(words), (what, text)  # R10

# %% [markdown]
# **Claim.** It is about *traces*. What compiles without a trace leaves no line: arguments on another device, or spread
# in another way over a mesh with Auto axes. With Explicit axes the sharding is part of the type, so there is a trace
# and a line. `log_compiles` sees all three.

# %%
def on(kind, spec):
    return jax.device_put(images, NamedSharding(jax.make_mesh((2,), ("d",), axis_types=(kind,)), spec))


MOVES = [  # what changes, arguments of the first and of the second call, whether the second is explained
    ("device", images, jax.device_put(images, jax.devices()[1]), False),
    ("sharding, Auto", on(AxisType.Auto, P("d")), on(AxisType.Auto, P(None, "d")), False),
    ("sharding, Explicit", on(AxisType.Explicit, P("d")), on(AxisType.Explicit, P(None, "d")), True),
]
for what, before, after, explained in MOVES:
    triple = jax.jit(lambda x: 3 * x)
    triple(before)
    with jax.explain_cache_misses(True), jax.log_compiles(True):
        text = logged(triple, after)
    print(f"another {what:19} compiled, {'explained' if explained else 'not a word'}")
    assert "Compiling jit" in text and triple._cache_size() == 2  # R10
    assert ("CACHE MISS" in text) == explained == ("now f32[4,8@d,8,3]" in text)  # R10

# %% [markdown]
# The keys of all caches are in `mlp_mnist/lessons/05_recompile_and_timing.py`, what a slow step does in
# `nanogpt/lessons/04_performance.py`.

# %% [markdown]
# ## 6. `jax.live_arrays()`: finding arrays that weren't freed [S2-066] (must-read)
# It lists every array that is still alive. Count it before and after a step, or group it by shape.
#
# **Claim.** A history of losses keeps an array for each step; as Python floats it keeps none.

# %%
def live():
    gc.collect()
    return len(jax.live_arrays())


before = live()
history = [cross_entropy(logits, labels, 0.0).mean() for _ in range(10)]
assert live() == before + 10
history = [float(loss) for loss in history]
assert live() == before  # R11

# %% [markdown]
# **Claim.** An array that a jitted function has captured lives as long as the function, whatever else you delete. As an
# argument it would not have been held.

# %%
def alive_with_shape(shape):
    gc.collect()
    return Counter(array.shape for array in jax.live_arrays())[shape]


table = jnp.ones((61, 67))
lookup = jax.jit(lambda i: table[i])
lookup(3).block_until_ready()
del table
assert alive_with_shape((61, 67)) > 0
del lookup
assert alive_with_shape((61, 67)) == 0  # R11

table = jnp.ones((61, 67))
lookup = jax.jit(lambda table, i: table[i])
lookup(table, 3).block_until_ready()
del table
assert alive_with_shape((61, 67)) == 0  # R11

# %% [markdown]
# **Claim.** `x.delete()` frees the memory now, and for every array that shares it: `jnp.asarray` of it, `device_put` to
# the device where it is already, the data of a shard. `jnp.copy` owns its memory. (On a GPU or TPU,
# `device.memory_stats()` has the bytes in use; on a CPU there are none.)

# %%
x = jnp.arange(3.0)
sharing = [jnp.asarray(x), jax.device_put(x, jax.devices()[0]), x.addressable_data(0)]
copy = jnp.copy(x)
x.delete()
assert all(array.is_deleted() for array in sharing) and not copy.is_deleted()
assert "Array has been deleted" in message(RuntimeError, lambda: sharing[1] + 1)
assert jax.devices()[0].memory_stats() is None

# %% [markdown]
# ## 7. Hands-on: a training step with seven faults [S2-067] (must-read)
# `broken_step()` returns a training step and the list that it keeps its losses in. The step trains one layer of the
# network and a head, on batch number `step` of a pool of images that is gone through round and round; a label of -1
# marks filler that must not count. Three of its seven faults raise an error, one after the other; four are silent.

# %%
BATCH, LIMIT, RATE = 4, 1.0, 0.1
pool = jnp.asarray(rng.normal(size=(8, 8, 8, 3)), jnp.float32)
pool_labels = jnp.array([3, 1, -1, 4, 5, 9, 2, -1])
start = params["stem"] | {"head": params["head"]["w"]}


def net(params, stats, images):
    """(logits (B, V), new statistics): one convolution, batch norm, ReLU, the mean of the image, and a head."""
    x = model.conv(images, params["w"])
    y, mean, var = model.batch_norm_relu(x, params["scale"], params["bias"])
    return y.mean((1, 2)) @ params["head"], model.update_stats(stats, mean, var, x.size // x.shape[-1])


def broken_step():
    """(train_step, losses): train_step(params, stats, images, labels, step) -> (params, stats) is a step of SGD with
    clipped gradients on BATCH images, and adds its loss to the list."""
    losses = []

    @partial(jax.jit, static_argnames="step")
    def train_step(params, stats, images, labels, step):
        batch = lax.dynamic_slice_in_dim(images, step * BATCH, BATCH)
        targets = lax.dynamic_slice_in_dim(labels, step * BATCH, BATCH)

        def loss_fn(params):
            logits, new_stats = net(params, stats, batch)
            logp = jnp.log(jax.nn.softmax(logits))
            picked = jnp.take_along_axis(logp, targets[:, None], axis=1)[:, 0]
            return -picked[targets >= 0].mean(), new_stats

        (loss, new_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        norm = jnp.sqrt(sum((g ** 2).sum() for g in jax.tree.leaves(grads)))
        if norm > LIMIT:
            grads = jax.tree.map(lambda g: g * (LIMIT / norm), grads)
        losses.append(loss)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), stats
    return train_step, losses


train_step, _ = broken_step()
message(jax.errors.NonConcreteBooleanIndexError, train_step, start, stats["stem"], pool, pool_labels, 0)

# %% [markdown]
# ## Exercise 1: find and mend all seven
# Start from `broken_step`. In a repaired one the losses are Python floats. What the errors tell you is in sections 4.1
# to 4.3. Then ask of each line: what does it do to a sure prediction (3), past the end of the pool (3.2, 4.2), in the
# second step (5), and does everything that was computed leave the function (1)?

# %%
# Your answer
def make_step():
    raise NotImplementedError

# %%
# Self-check (runs on your answer once it is written, on the solution until then)
def check_make_step(f):
    train_step, losses = f()

    def run(params, step):
        try:
            after, new_stats = train_step(params, stats["stem"], pool, pool_labels, step)
            return after, new_stats, float(losses[-1])
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as why:
            raise AssertionError(f"a fault that raises is left: {type(why).__name__}") from why

    sure = start | {"head": 1000 * start["head"]}  # its softmax has exact zeros
    logits, want_stats = net(sure, stats["stem"], pool[:BATCH])
    counted = np.asarray(pool_labels[:BATCH]) >= 0
    want = np.asarray(model.cross_entropy(logits, pool_labels[:BATCH]))[counted].mean()
    after, new_stats, loss = run(sure, 0)
    assert len(losses) == 1 and isinstance(losses[0], float), "a step adds one Python float to the losses"
    assert np.isclose(loss, want, rtol=1e-4), f"the loss of a network that is sure is {want:.1f}, not {loss}"
    moved = np.sqrt(sum(float(((a - b) ** 2).sum()) for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(sure))))
    assert np.isclose(moved, RATE * LIMIT, rtol=0.02), f"a clipped step moves {RATE * LIMIT}, not {moved:.4f}"
    assert all(np.allclose(new_stats[name], want_stats[name], atol=1e-6) for name in want_stats), \
        "the running statistics are not those after the step"

    with jax.log_compiles(True):
        log = logged(lambda: [run(start, 0), run(start, 2)])
    assert "Compiling jit" not in log, "another step of the same shapes compiles again"
    first, second, third = (run(start, step)[2] for step in range(3))
    assert first == third != second, "the pool has two batches: the third step is the first batch again"


# %% [markdown]
# ## Exercise 2
# Write `first_nonfinite(params, stats, images)`: the name of the first layer of `model.forward` in training whose
# output is not finite, or None, from one run of the *compiled* network. Use `norms` and `jax.debug.callback`.

# %%
# Your answer
def first_nonfinite(params, stats, images):
    raise NotImplementedError

# %%
# Self-check
def check_first_nonfinite(f):
    assert f(params, stats, images) is None, "this network is healthy"
    broken = params | {"down2": params["down2"] | {"bias": jnp.array([0.0, jnp.inf, 0.0, 0.0])}}
    name = f(broken, stats, images)
    assert name == "down2", f"the output of down2 is the first that is not finite, not {name}'s"


# %% [markdown]
# ## Exercise 3
# Write `hard_examples(losses, limit, k)`, which works under jit with a traced limit: the indices (k,) of the first k
# losses above the limit, filled up with -1, and the mean of *all* losses above it, 0 where there are none.

# %%
# Your answer
def hard_examples(losses, limit, k):
    raise NotImplementedError

# %%
# Self-check
def check_hard_examples(f):
    jitted = jax.jit(f, static_argnames="k")
    losses = jnp.array([0.5, 2.0, 1.5, 0.1, 4.0])
    for limit, indices, mean in ((1.0, [1, 2], 2.5), (3.0, [4, -1], 4.0), (9.0, [-1, -1], 0.0)):
        try:
            got, got_mean = jitted(losses, limit, k=2)
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as why:
            raise AssertionError(f"under jit it raises {type(why).__name__}") from why
        assert got.tolist() == indices, f"above {limit} are {indices}, not {got.tolist()}"
        assert float(got_mean) == mean, f"the mean above {limit} is {mean}, not {got_mean}"


# %% [markdown]
# ## 8. Chapter summary: which tool answers which question [S2-068] (must-read)
# | question | tool | section |
# |---|---|---|
# | what is this value, at run time? | `jax.debug.print`, `jax.debug.callback`, `jax.debug.breakpoint` | 1 |
# | is it the mathematics or the tracing? | `jax.disable_jit`, then `print`, `assert`, `pdb` | 1.4 |
# | which layer is the first bad one? | bisection over prefixes; a check behind each layer | 1.4, 3.2 |
# | which shapes and dtypes were traced, and by which line? | `jax.make_jaxpr`, `jax.eval_shape` | 2 |
# | what does XLA make of it? | `lower`, `compile`, `as_text` | 2, lesson 04 |
# | which operation makes the NaN, the inf? | `jax.debug_nans`, `jax.debug_infs` | 3, 3.1 |
# | is an index, a divisor, my own invariant violated? | `checkify` | 3.2 |
# | is the gradient right? | `common.gradcheck`, `jax.test_util.check_grads` | 3, lesson 03 of nanogpt |
# | why does tracing fail? | the table of section 0 | 4 |
# | who leaks a tracer? | `jax.checking_leaks` | 4.3 |
# | why does it trace again, or compile again? | `jax.explain_cache_misses`, `jax.log_compiles` | 5 |
# | what fills the memory? | `jax.live_arrays` | 6 |
# | was a key used twice? | `jax.debug_key_reuse` | lesson 02 of nanogpt |

# %% [markdown]
# ## Rules
# | | rule | because |
# |---|---|---|
# | R1 | read the class of the error first | it names the cause |
# | R2 | `jax.debug.print` with a format string, never an f-string | Python runs while tracing only |
# | R3 | first jit against no jit, then bisect | the two halves need other tools |
# | R4 | look for casts in the jaxpr | a strongly typed constant promotes all that follows, in silence |
# | R5 | after `debug_nans` found nothing, or only `scan`: run without jit | it sees what comes out |
# | R6 | check indices and divisors with checkify | out of bounds is clamped, an integer has no NaN |
# | R7 | check a gradient by differences, in float64 | its value can be right to the last bit |
# | R8 | no Python decision or shape from a traced value | static, `where`, `cond`, a fixed size |
# | R9 | return what you want to keep | a tracer outlives its trace in silence |
# | R10 | count compilations as well as traces | a program can be compiled anew without a line |
# | R11 | keep floats, pass arrays as arguments | histories and closures hold arrays |

# %% [markdown]
# ## Solutions

# %%
def make_step_solution():
    losses = []

    @jax.jit
    def update(params, stats, images, labels, step):
        first = step % (len(images) // BATCH) * BATCH
        batch = lax.dynamic_slice_in_dim(images, first, BATCH)
        targets = lax.dynamic_slice_in_dim(labels, first, BATCH)

        def loss_fn(params):
            logits, new_stats = net(params, stats, batch)
            logp = jax.nn.log_softmax(logits)
            picked, counted = jnp.take_along_axis(logp, targets[:, None], axis=1)[:, 0], targets >= 0
            return -jnp.where(counted, picked, 0).sum() / counted.sum(), new_stats

        (loss, new_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        norm = jnp.sqrt(sum((g ** 2).sum() for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g * jnp.where(norm > LIMIT, LIMIT / norm, 1), grads)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), new_stats, loss

    def train_step(params, stats, images, labels, step):
        params, stats, loss = update(params, stats, images, labels, step)
        losses.append(float(loss))
        return params, stats
    return train_step, losses


def first_nonfinite_solution(params, stats, images):
    names, found = iter(model.layers_of()), []

    def norm(x, scale, bias):
        name = next(names)  # Python, so while tracing: each layer gets its own
        y, mean, var = model.batch_norm_relu(x, scale, bias)
        jax.debug.callback(lambda finite: None if finite else found.append(name), jnp.isfinite(y).all(), ordered=True)
        return y, mean, var

    forward = jax.jit(partial(model.forward, train=True, norms=(norm, model.batch_norm_relu_inference)))
    jax.block_until_ready(forward(params, stats, images))
    jax.effects_barrier()
    return found[0] if found else None


def hard_examples_solution(losses, limit, k):
    mask = losses > limit
    return jnp.flatnonzero(mask, size=k, fill_value=-1), jnp.where(mask, losses, 0).sum() / jnp.maximum(mask.sum(), 1)

# %%
try:
    check_make_step(make_step)
except NotImplementedError:
    check_make_step(make_step_solution)

# %% [markdown]
# The self-check passes only when all seven are mended: here each fault is put back alone.

# %%
FAULTS = [  # fault, the line of the solution, the line with the fault
    ("boolean mask", "-jnp.where(counted, picked, 0).sum() / counted.sum()", "-picked[counted].mean()"),
    ("if", "g * jnp.where(norm > LIMIT, LIMIT / norm, 1)", "g * (LIMIT / norm if norm > LIMIT else 1)"),
    ("leak", "        return jax.tree.map", "        losses.append(loss)\n        return jax.tree.map"),
    ("log of softmax", "jax.nn.log_softmax(logits)", "jnp.log(jax.nn.softmax(logits))"),
    ("static step", "@jax.jit", "@partial(jax.jit, static_argnames='step')"),
    ("past the end", "step % (len(images) // BATCH) * BATCH", "step * BATCH"),
    ("old statistics", "grads), new_stats, loss", "grads), stats, loss"),
]
source = inspect.getsource(make_step_solution)
for fault, right_line, wrong_line in FAULTS:
    assert source.count(right_line) == 1, fault
    scope = dict(globals())
    exec(source.replace(right_line, wrong_line), scope)
    print(f"{fault:15} refused: {message(AssertionError, check_make_step, scope['make_step_solution'])}")

# %%
try:
    check_first_nonfinite(first_nonfinite)
except NotImplementedError:
    check_first_nonfinite(first_nonfinite_solution)

# %%
try:
    check_hard_examples(hard_examples)
except NotImplementedError:
    check_hard_examples(hard_examples_solution)
