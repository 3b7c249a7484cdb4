# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---
# %% [markdown]
# # Recompilation, asynchronous dispatch and honest timing [S2-036]
#
# After this lesson you can say what makes `jax.jit` trace and compile again, find the cause of a recompilation and
# remove it, write a training step that is traced once, keep large arrays out of closures, and time a JAX program
# without fooling yourself. It uses this project's `model.py` and `train.py`, and `common/profiling.py`.
# Rules are numbered R1, R2, ...; the assertion that proves a rule carries its number.

# %%
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent if "__file__" in globals() else Path.cwd()
sys.path[:0] = [str(PROJECT), str(PROJECT.parent)]  # the project's files, and common/ beside it

# %%
import collections
import dataclasses
import functools
import io
import logging
import statistics
import time
import typing
import warnings

import jax
import jax.numpy as jnp
import numpy as np

import model
import train
from common.profiling import measure

# All before JAX starts: restart the kernel to run this cell again.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)  # a second device, for a row of the table below
jax.config.update("jax_enable_compilation_cache", False)  # compile times are XLA's, not those of a folder on disk

cfg = train.Config(hidden=256, batch_size=64)
rng = np.random.default_rng(0)
images_np, labels_np = rng.random((640, 784), np.float32), rng.integers(0, 10, 640).astype(np.int32)
images, labels = jnp.asarray(images_np), jnp.asarray(labels_np)
params = model.init_params(jax.random.key(0), cfg.sizes)


def fresh_state():
    return {"params": jax.tree.map(jnp.copy, params), "velocity": jax.tree.map(jnp.zeros_like, params)}

# %% [markdown]
# ## Recompilation: triggers and diagnosis [S1-055] [S2-037] (must-read)
# A call of a jitted function passes through up to four stages. Each stage has a memory, and a call descends only as
# far as it must:
# ```
# f(x) ─> 1 fast path ─> 2 trace ─────────> 3 lower ──> 4 compile ─> run
#         C++ table      runs the Python    jaxpr to    XLA makes
#         _cache_size()  body: a jaxpr      StableHLO   machine code
#         microseconds   milliseconds       ...         milliseconds to minutes
# ```
# Two counters make that visible. The Python body of a jitted function runs only while it is traced, so a counter
# inside it counts traces; and `jax.monitoring` reports each compilation by XLA.

# %%
traced, compiled = collections.Counter(), collections.Counter()


def counted(f):
    """f, which notes in `traced` when its Python body runs: under jit, when it is traced."""
    @functools.wraps(f)
    def body(*args, **kwargs):
        traced[f.__name__] += 1
        return f(*args, **kwargs)
    return body


def note_compilation(event, seconds, fun_name=None, **_):
    if event.endswith("/backend_compile_duration"):
        compiled[fun_name] += 1


jax.monitoring.register_event_duration_secs_listener(note_compilation)


def work(jitted, call):
    """What call() makes `jitted` do: (traces, compilations, new entries of the fast path)."""
    def now():
        return traced[jitted.__name__], compiled[f"jit({jitted.__name__})"], jitted._cache_size()
    before = now()
    call()
    return tuple(after - b for after, b in zip(now(), before))


# %% [markdown]
# **Claim.** A function is traced again for: another shape, dtype, weak type, pytree structure, static value, *type* of
# a static value, a keyword where there was a position, and another setting that changes what is traced (matmul
# precision). It is not traced again for: other values, the order of a dict, NumPy instead of JAX arrays, `debug_nans`,
# another device; but another device, or the same one chosen explicitly ("committed"), does compile again.

# %%
def scale(d, flag=1):
    return {name: 2 * leaf for name, leaf in d.items()}


f = jax.jit(counted(scale), static_argnames="flag")
a, b = 1.0, jnp.ones(3)
cpus = jax.devices()
again, trace_compile, compile_only, entry_only = (0, 0, 0), (1, 1, 1), (0, 1, 1), (0, 0, 1)
VARIANTS = [  # what is new, the call, (traces, compilations, entries)
    ("first call", lambda: f({"a": a, "b": b}, flag=1), trace_compile),
    ("the same", lambda: f({"a": a, "b": b}, flag=1), again),
    ("other values", lambda: f({"a": 7.0, "b": 5 * b}, flag=1), again),
    ("order of the dict", lambda: f({"b": b, "a": a}, flag=1), again),
    ("debug_nans", lambda: jax.debug_nans(True)(f)({"a": a, "b": b}, flag=1), again),
    ("NumPy float32", lambda: f({"a": a, "b": np.ones(3, np.float32)}, flag=1), entry_only),
    ("NumPy float64, read as float32", lambda: f({"a": a, "b": np.ones(3)}, flag=1), again),
    ("device chosen", lambda: f({"a": a, "b": jax.device_put(b, cpus[0])}, flag=1), compile_only),
    ("another device", lambda: f({"a": a, "b": jax.device_put(b, cpus[1])}, flag=1), compile_only),
    ("shape", lambda: f({"a": a, "b": jnp.ones(4)}, flag=1), trace_compile),
    ("shape (1,) is not ()", lambda: f({"a": a, "b": jnp.ones(())}, flag=1), trace_compile),
    ("dtype", lambda: f({"a": a, "b": jnp.ones(3, jnp.int32)}, flag=1), trace_compile),
    ("weak type: 1.0 to float32(1)", lambda: f({"a": jnp.float32(a), "b": b}, flag=1), trace_compile),
    ("weak type: 1.0 to 1", lambda: f({"a": 1, "b": b}, flag=1), trace_compile),
    ("pytree: one more leaf", lambda: f({"a": a, "b": b, "c": b}, flag=1), trace_compile),
    ("pytree: another key", lambda: f({"a": a, "B": b}, flag=1), trace_compile),
    ("static value: 2", lambda: f({"a": a, "b": b}, flag=2), trace_compile),
    ("static type: True", lambda: f({"a": a, "b": b}, flag=True), trace_compile),
    ("static type: 1.0", lambda: f({"a": a, "b": b}, flag=1.0), trace_compile),
    ("static by position", lambda: f({"a": a, "b": b}, 1), trace_compile),
    ("static left at its default", lambda: f({"a": a, "b": b}), trace_compile),
    ("matmul precision", lambda: jax.default_matmul_precision("float32")(f)({"a": a, "b": b}, flag=1), trace_compile),
]
print(f"{'what is new':30} traces compilations entries")
for what, call, expected in VARIANTS:
    got = work(f, call)
    print(f"{what:30} {got[0]:6} {got[1]:12} {got[2]:7}")
    assert got == expected, (what, got, expected)  # R1

# %% [markdown]
# ## How it works: what is in the cache key [S2-038] (must-read)
# ```
# stage     its key                                                          not in its key
# 1 entry   all of 2; NumPy or JAX array; device, and whether it was chosen  values, order of a dict
# 2 trace   the function object; position or keyword; pytree; each leaf's    values, order of a dict, NumPy or JAX,
#           shape, dtype, weak type; static values and their types; settings device
# 3, 4      the jaxpr; devices, and whether they were chosen                 values, NumPy or JAX
# ```
# **Claim.** `_cache_size()` counts entries of the fast path, which can exceed the traces: here four entries, three
# traces. (The underscore says that it may change; for experiments it is fine.)

# %%
@jax.jit
@counted
def double(x):
    return 2 * x


calls = (np.ones(3, np.float32), jnp.ones(3), jnp.ones(4), jnp.ones(3, jnp.int32))
each = [work(double, lambda x=x: double(x)) for x in calls]
print("(traces, compilations, entries):", *each)
assert each == [trace_compile, entry_only, trace_compile, trace_compile]
assert (traced["double"], double._cache_size()) == (3, 4)  # R2

# %% [markdown]
# ## Hard requirements for static arguments [S2-012] (optional)
# **Claim.** A static argument is looked up in a table, so it must be hashable, and equal values must be equal by
# `==`, not by identity. `1`, `True` and `1.0` are equal in Python, yet jit keeps them apart: they trace to different
# programs.

# %%
def refusal(call):
    """The message of the ValueError that call() raises."""
    try:
        call()
    except ValueError as why:
        return str(why)
    raise AssertionError("no ValueError")


power = jax.jit(lambda x, n: x ** n, static_argnums=1)
for unhashable in ([1], np.ones(2), jnp.ones(2)):
    assert "Non-hashable static arguments" in refusal(lambda: power(2.0, unhashable))  # R3

# An index or a name that the function doesn't have is an error at once; *args take any index, in silence.
assert "only accepts 2 positional arguments" in refusal(lambda: jax.jit(lambda x, n: x, static_argnums=2))
assert "invalid argnames" in refusal(lambda: jax.jit(lambda x, n: x, static_argnames="m"))
assert jax.jit(lambda *args: args[0], static_argnums=3)(1.0) == 1

dtypes = [power(2, n).dtype for n in (1, True, 1.0)]
print("2 ** 1, 2 ** True, 2 ** 1.0:", *dtypes)
assert power._cache_size() == 3 and dtypes[0] != dtypes[2]
power(2, n=1)
assert power._cache_size() == 4, "by keyword is another key than by position"


class ByIdentity:  # a class's default: equal only to itself
    n = 2


@dataclasses.dataclass(frozen=True)
class ByValue:  # eq and frozen give == and hash over the fields
    n: int = 2


for kind, entries in ((ByIdentity, 5), (ByValue, 1)):
    by_config = jax.jit(lambda x, config: x ** config.n, static_argnums=1)
    for _ in range(5):
        by_config(2.0, kind())
    assert by_config._cache_size() == entries  # R4

# %% [markdown]
# ## Asking JAX: `jax_explain_cache_misses`, and where it is silent
# **Claim.** With this setting each trace logs its cause, compared with the closest key seen before. It has blind spots:
# JAX 0.12 can't explain another static value (0.10 could); where a wrong key looks closest it blames something else
# (the last row: a setting, for what a static value did); and a compilation without a trace leaves no line at all.

# %%
log = io.StringIO()
handler, logger = logging.StreamHandler(log), logging.getLogger("jax")
logger.addHandler(handler)
logger.propagate = False
jax.config.update("jax_explain_cache_misses", True)


def explanation(call):
    log.seek(0)
    log.truncate()
    call()
    return " ".join(log.getvalue().split())


twice, times = jax.jit(lambda x: 2 * x), jax.jit(lambda x, n: n * x, static_argnums=1)
x = np.ones(8, np.float32)
unexplained = "explanation unavailable" if jax.__version_info__ >= (0, 12) else "Static(val=4) and before"
EXPECTED = [
    ("new function", lambda: twice(x), "never seen function"),
    ("shape", lambda: twice(x[:4]), "at x, now f32[4] and before f32[8]"),
    ("dtype", lambda: twice(x.astype(np.int32)), "at x, now i32[8] and before f32"),
    ("weak type", lambda: twice(1.0), "weak_type=True"),
    ("new function", lambda: times(x, 3), "never seen function"),
    ("static value", lambda: times(x, 4), unexplained),
    ("setting", lambda: jax.default_matmul_precision("float32")(times)(x, 3), "jax_default_matmul_precision differs"),
    ("static value", lambda: times(x, 5), "jax_default_matmul_precision differs"),
]
for what, call, words in EXPECTED:
    said = explanation(call)
    assert words in said, (words, said)  # R5
    print(f"{what:12} ... {words}")
entries = twice._cache_size()
assert explanation(lambda: twice(jax.device_put(x, cpus[1]))) == "" and twice._cache_size() == entries + 1  # R5

jax.config.update("jax_explain_cache_misses", False)
logger.removeHandler(handler)
logger.propagate = True

# %% [markdown]
# ## Fixes [S2-039] (must-read)
# Five ways to trace five times, and what brings each down to once:
#
# | trigger | fix |
# |---|---|
# | a shape that changes | pad to a bucket, and let the filler not count |
# | a static number that changes | pass it as an array |
# | a static object compared by identity | a frozen dataclass |
# | a new lambda in each round | hoist the jitted function, with a static argument if need be |
# | a type that changes | convert once, at the boundary |

# %%
LENGTHS = (64, 50, 33, 8, 1)


def traces(run):
    """(how often counted functions were traced while run() ran, what run() returned)."""
    before = traced.total()
    result = run()
    return traced.total() - before, result


def pad_to(n, images, labels):
    short = n - len(labels)  # NumPy: jnp.pad would itself be compiled for each length
    return np.pad(images, ((0, short), (0, 0))), np.pad(labels, (0, short), constant_values=-1)  # -1: never right


def ragged():
    count = jax.jit(counted(model.count_correct))
    return [int(count(params, images_np[:n], labels_np[:n])) for n in LENGTHS]


def padded():
    count = jax.jit(counted(model.count_correct))
    return [int(count(params, *pad_to(64, images_np[:n], labels_np[:n]))) for n in LENGTHS]


def shrunk(params, lr):
    return jax.tree.map(lambda p: p - lr * p, params)


def static_rate():
    step = jax.jit(counted(shrunk), static_argnames="lr")
    return [step(params, 0.1 / (i + 1))[0]["w"] for i in range(5)]


def traced_rate():
    step = jax.jit(counted(shrunk))
    return [step(params, 0.1 / (i + 1))[0]["w"] for i in range(5)]


def by_config(kind):
    run = jax.jit(counted(lambda x, config: x ** config.n), static_argnames="config")
    return [float(run(2.0, config=kind())) for _ in range(5)]


def jit_in_the_loop():
    return [float(jax.jit(counted(lambda x: x ** 2))(float(i))) for i in range(5)]


def jit_hoisted():
    square = jax.jit(counted(lambda x, n: x ** n), static_argnames="n")
    return [float(square(float(i), n=2)) for i in range(5)]


MIXED = (1, 1.0, np.float32(1), np.int32(1), np.uint8(1))


def mixed_types():
    f = jax.jit(counted(lambda x: x + 1))
    return [float(f(x)) for x in MIXED]


def converted():
    f = jax.jit(counted(lambda x: x + 1))
    return [float(f(np.float32(x))) for x in MIXED]


for what, costly, cheap in (("pad to a bucket", ragged, padded), ("number as an array", static_rate, traced_rate),
                            ("frozen dataclass", lambda: by_config(ByIdentity), lambda: by_config(ByValue)),
                            ("hoist the jit", jit_in_the_loop, jit_hoisted),
                            ("convert at the boundary", mixed_types, converted)):
    (many, expected), (one, got) = traces(costly), traces(cheap)
    print(f"{what:24} {many} traces -> {one}")
    assert (many, one) == (5, 1) and np.allclose(got, expected), what  # R6

# %% [markdown]
# What the loop repeats must be the *function*, not `jax.jit`: the trace is filed under the function object, so a new
# wrapper around the same one finds it, while a lambda is a new function each time it is evaluated.

# %%
square = counted(lambda x: x ** 2)
assert traces(lambda: [jax.jit(square)(float(i)) for i in range(5)])[0] == 1

# %% [markdown]
# ## The practical rule: one trace a run [S2-040] (must-read)
# ```
# ┌────────────────────────────────────────────────────────────────────────────┐
# │ After the first step, nothing in a training run traces. Count, and assert. │
# └────────────────────────────────────────────────────────────────────────────┘
# ```
# **Claim.** This project's step is traced once in two epochs, because every batch is full, the learning rate is an
# array and the config a frozen dataclass; so is the epoch that is one `lax.scan`, as its number is an int32 array.

# %%
step = jax.jit(counted(train.update), static_argnames="cfg", donate_argnames="state")


def two_epochs(state):
    for epoch in range(2):
        for i, batch in enumerate(rng.permutation(640).reshape(10, 64)):
            state, loss = step(state, images_np[batch], labels_np[batch], np.float32(0.1 / (i + 1)), cfg)
    return loss


n, loss = traces(lambda: two_epochs(fresh_state()))
assert n == step._cache_size() == 1 and np.isfinite(loss)  # R7

state = fresh_state()
for epoch in range(3):
    state, losses = train.train_epoch(state, images, labels, jnp.int32(epoch), cfg)
assert compiled["jit(train_epoch)"] == train.train_epoch._cache_size() == 1  # R7

# %% [markdown]
# ## The state of training: a pytree, and what belongs in it
# What a step carries goes in and comes out as *one* argument, so that it can be donated, scanned over and saved. A
# dict serves (`train.py` uses one). Two other forms give names that an editor knows:
#
# | form | a field is | another value of it |
# |---|---|---|
# | NamedTuple | always a leaf, so traced | runs the same program |
# | dataclass, registered | a leaf, or static if its metadata says so | static: traces again |
# | dataclass, not registered | no pytree: jit refuses it | TypeError |

# %%
class TupleState(typing.NamedTuple):
    params: list
    velocity: list
    step: jax.Array
    lr: float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    params: list
    velocity: list
    step: jax.Array  # int32 scalar
    cfg: train.Config = dataclasses.field(metadata={"static": True})  # hashed, part of the jit key, no leaf


@dataclasses.dataclass
class Unregistered:
    params: list


def advance(state):
    step = state.step + 1
    return state._replace(step=step) if isinstance(state, TupleState) else dataclasses.replace(state, step=step)


start = fresh_state()
as_tuple = [TupleState(**start, step=jnp.int32(0), lr=lr) for lr in (0.1, 0.2)]
as_class = [TrainState(**start, step=jnp.int32(0), cfg=dataclasses.replace(cfg, lr=lr)) for lr in (0.1, 0.2)]
leaves = len(jax.tree.leaves(start))
assert [len(jax.tree.leaves(s)) for s in (as_tuple[0], as_class[0])] == [leaves + 2, leaves + 1]
go = jax.jit(counted(advance))
assert traces(lambda: [go(s) for s in as_tuple])[0] == 1  # R8: lr is a leaf
assert traces(lambda: [go(s) for s in as_class])[0] == 2  # R8: cfg is static
try:
    go(Unregistered(params))
except TypeError as why:
    assert "Unregistered" in str(why)
else:
    raise AssertionError("an unregistered dataclass went through jit")

# %% [markdown]
# A template for a training step. Jitted once at the top level; one state in, one state of the same structure out;
# the state donated; the loss returned as a device scalar that nobody has to wait for.

# %%
@functools.partial(jax.jit, donate_argnames="state")
@counted
def template_step(state, images, labels):
    cfg = state.cfg
    loss, grads = jax.value_and_grad(train.loss_of)(state.params, images, labels, cfg)
    new = train.sgd({"params": state.params, "velocity": state.velocity}, grads,
                    train.schedule(state.step, cfg), cfg.momentum, cfg.weight_decay)
    return dataclasses.replace(state, **new, step=state.step + 1), loss


state = TrainState(**fresh_state(), step=jnp.int32(0), cfg=cfg)
structure, old = jax.tree.structure(state), state.params[0]["w"]
for i in range(5):
    state, loss = template_step(state, images[:64], labels[:64])
assert traced["template_step"] == 1 and jax.tree.structure(state) == structure and state.step == 5
assert old.is_deleted(), "donated: the new state was written over the old one"  # R9

plain = fresh_state()
for i in range(5):
    plain, plain_loss = step(plain, images_np[:64], labels_np[:64], np.float32(train.schedule(i, cfg)), cfg)
assert np.allclose(loss, plain_loss, rtol=1e-5), "the project's own step does the same"

# %% [markdown]
# ## Globals and captured arrays: old and new value at once [S2-014] (optional)
# **Claim.** A global or closed-over value is read while the function is traced, and is a constant from then on. Rebind
# it, and signatures that were traced before keep the old value while new ones get the new one: two truths at once.

# %%
s = jnp.float32(2)
scaled = jax.jit(lambda x: x * s)
scaled(1.0)
s = jnp.float32(5)
print("after s = 5:", scaled(1.0), scaled(jnp.ones(2)))
assert scaled(1.0) == 2 and scaled(jnp.ones(2))[0] == 5  # R10

# %% [markdown]
# **Claim.** A captured array is written into the program, number by number: the text of the lowered program grows with
# it. (With `jnp.ones` it would not show, a splat is written as one number.) JAX can warn about that; by default it
# does from 2 GB on.

# %%
W, x = jax.block_until_ready((jax.random.normal(jax.random.key(0), (1500, 1500)), jnp.ones((2, 1500))))


def captured(x):
    return x @ W.T


def passed(x, W):
    return x @ W.T


sizes = [len(jax.jit(f).lower(*args).as_text()) for f, args in ((captured, (x,)), (passed, (x, W)))]
print("characters of StableHLO, captured and passed:", *sizes)
assert sizes[0] > 100 * sizes[1]  # R10

assert jax.config.jax_captured_constants_warn_bytes == 2_000_000_000
jax.config.update("jax_captured_constants_warn_bytes", 1_000_000)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    jax.jit(lambda x: captured(x) + 1)(x)
jax.config.update("jax_captured_constants_warn_bytes", 2_000_000_000)
assert "large amount of constants were captured" in str(caught[0].message)

# %% [markdown]
# ## Pass large arrays as arguments: measured [S2-026] (optional)
# **Claim.** An array that is passed costs nothing at compile time, whatever its size. A captured one is copied from
# stage to stage, and XLA computes at compile time what depends on constants alone, here the transpose: 260 ms against
# 11 on two cores. XLA's memory analysis shows who owns the array: as an argument it is counted, as a constant it isn't.

# %%
def stages(f, *args):
    """Milliseconds of (trace, lower, compile), the medians of three programs, and the last of them."""
    seconds = []
    for _ in range(3):
        clock = [time.perf_counter()]
        trace = jax.jit(lambda *args: f(*args)).trace(*args)  # a new lambda: nothing is remembered
        clock.append(time.perf_counter())
        lowered = trace.lower()
        clock.append(time.perf_counter())
        program = lowered.compile()
        clock.append(time.perf_counter())
        seconds.append(np.diff(clock))
    return 1e3 * np.median(seconds, axis=0), program


ms = {}
for name, f, args in (("captured", captured, (x,)), ("passed", passed, (x, W))):
    ms[name], program = stages(f, *args)
    held = program.memory_analysis().argument_size_in_bytes
    assert held == sum(a.nbytes for a in args)
    print(f"{name:9} trace {ms[name][0]:6.1f}  lower {ms[name][1]:6.1f}  compile {ms[name][2]:6.1f} ms; "
          f"arguments {held:,} bytes")
assert ms["captured"][2] > 3 * ms["passed"][2]  # R10

# %% [markdown]
# ## Four problems with capturing large arrays [S2-089] (optional)
# The form in which it happens in practice: an evaluation function that captures the parameters. Four assertions, four
# problems: the value is stale, the program is large, compiling it is slow, and the memory stays alive.

# %%
trained = jax.tree.map(jnp.copy, params)
hidden = trained[0]["w"]


def predict_captured(images):
    return model.forward(trained, images)


predict = jax.jit(predict_captured)
before = predict(images[:64])
trained = jax.tree.map(lambda p: 2 * p, trained)  # "a training step"
assert jnp.array_equal(predict(images[:64]), before), "stale: it does not see that the parameters moved"
assert not jnp.allclose(model.forward(trained, images[:64]), before)

text_captured = jax.jit(lambda images: model.forward(trained, images)).lower(images[:64]).as_text()
text_passed = jax.jit(model.forward).lower(trained, images[:64]).as_text()
assert len(text_captured) > 100 * len(text_passed), "large: each parameter is written out"

assert ms["captured"].sum() > 3 * ms["passed"].sum(), "slow: measured above, on 9 MB"

shape = (784, 64 + 1)  # a shape that nothing else in this process has
big = jnp.ones(shape)
use = jax.jit(lambda x: x @ big)
use(images[:1])
del big
assert any(a.shape == shape for a in jax.live_arrays()), "alive: the trace holds the array whose name is gone"

# %% [markdown]
# ## Asynchronous dispatch [S1-057] (must-read)
# A call of a compiled function only *queues* it. Python gets an array whose value is still being computed, and runs
# ahead; it waits where a value is needed: `block_until_ready()`, `float(x)`, `np.asarray(x)`, `print`.
# ```
# Python  |call|call|call|.......... free for other work ..........|print: waits
# device       |== step 1 ==|== step 2 ==|== step 3 ==|
#         |<->| what a clock without block_until_ready sees
# ```
# **Claim.** A dispatch returns long before the result is ready, so that a benchmark that doesn't block reports an
# absurd throughput. Here a product of two 1500 × 1500 matrices, 2 · 1500³ FLOPs; medians of five.

# %%
N = 1500
matmul, matrix = jax.jit(jnp.matmul), jnp.ones((N, N))
matmul(matrix, matrix).block_until_ready()
dispatched, ready = [], []
for _ in range(5):
    start = time.perf_counter()
    product = matmul(matrix, matrix)
    dispatched.append(time.perf_counter() - start)
    product.block_until_ready()
    ready.append(time.perf_counter() - start)
dispatch_s, ready_s = statistics.median(dispatched), statistics.median(ready)
claimed, real = (2 * N**3 / seconds / 1e9 for seconds in (dispatch_s, ready_s))
print(f"returned after {1e3 * dispatch_s:.2f} ms, ready after {1e3 * ready_s:.1f} ms: "
      f"{claimed:,.0f} GFLOP/s claimed, {real:,.0f} real")
assert ready_s > 5 * dispatch_s and claimed > 10 * real  # R11

# %% [markdown]
# ## Timing correctly [S1-058] (must-read)
# `common.profiling.measure` compiles first and on a clock of its own, makes fresh arguments outside the clock (a
# donated one dies in the call), discards warm-up calls, blocks on all outputs and returns the median, which a single
# disturbed call can't move.
#
# **Claim.** Compile time is not in the median. To see it, a function whose *tracing* takes a second:

# %%
def slow_to_trace(x):
    time.sleep(1.0)  # runs in Python, so only while tracing
    return x + 1


timing = measure(slow_to_trace, lambda: (jnp.ones(3),), n=5)
print(f"compile {timing.compile_s:.2f} s, median of {timing.n} calls {1e6 * timing.median_s:.0f} µs")
assert timing.compile_s >= 1.0 and timing.median_s < 1.0  # R12

blocked = measure(jnp.matmul, lambda: (matrix, matrix), n=3, warmup=1)
assert blocked.median_s > 5 * dispatch_s, "it waits for the product"  # R12

# %% [markdown]
# ## Common mistakes, measured [S2-047] (must-read)
# Each against the honest time of the same thing: this project's step on 256 images, with 256 hidden units.

# %%
batch, targets = images[:256], labels[:256]


def step_256(state, images, labels):
    return train.update(state, images, labels, 0.1, cfg)


step = jax.jit(step_256, donate_argnums=0)
honest = measure(step, lambda: (fresh_state(), batch, targets), n=10)
state, loss = step(fresh_state(), batch, targets)
loss.block_until_ready()
print(f"honest: {1e3 * honest.median_s:.2f} ms a step, compiled in {honest.compile_s:.2f} s")

# %% [markdown]
# **1. No `block_until_ready`**: what is timed is how long it takes to queue a step.

# %%
STEPS, queued = 15, []
for _ in range(STEPS):
    start = time.perf_counter()
    state, loss = step(state, batch, targets)
    queued.append(time.perf_counter() - start)
queued_s = statistics.median(queued)
loss.block_until_ready()
print(f"1 no block:          {1e3 * queued_s:8.2f} ms, {honest.median_s / queued_s:.0f} times too fast")
assert honest.median_s > 5 * queued_s  # R11

# %% [markdown]
# **2. Compilation included**: a mean over few calls is mostly XLA.

# %%
state = jax.block_until_ready(fresh_state())
uncompiled = jax.jit(lambda *args: step_256(*args), donate_argnums=0)
start = time.perf_counter()
for _ in range(3):
    state, loss = uncompiled(state, batch, targets)
    loss.block_until_ready()
mean_s = (time.perf_counter() - start) / 3
print(f"2 compile included:  {1e3 * mean_s:8.2f} ms, {mean_s / honest.median_s:.0f} times too slow")
assert mean_s > 2 * honest.median_s  # R12

# %% [markdown]
# **3. A transfer in the loop**: a data set that is a NumPy array crosses to the device in each call. A transfer guard
# makes such a hidden transfer an error.

# %%
gather = jax.jit(lambda images, index: images[index])
dataset_np, index = np.tile(images_np, (20, 1)), jnp.arange(64)
dataset = jnp.asarray(dataset_np)
seconds = []
for source in (dataset, dataset_np):
    gather(source, index).block_until_ready()
    calls = []
    for _ in range(7):
        start = time.perf_counter()
        gather(source, index).block_until_ready()
        calls.append(time.perf_counter() - start)
    seconds.append(statistics.median(calls))
print(f"3 transfer in a call:{1e3 * seconds[1]:8.2f} ms, {seconds[1] / seconds[0]:.0f} times too slow "
      f"({dataset_np.nbytes / 1e6:.0f} MB)")
assert seconds[1] > 3 * seconds[0]  # R13
with jax.transfer_guard("disallow"):
    gather(dataset, index)
    try:
        gather(dataset_np, index)
    except jax.errors.JaxRuntimeError as why:
        assert "Disallowed host-to-device transfer" in str(why)  # R13
    else:
        raise AssertionError("the transfer went unnoticed")

# %% [markdown]
# **4. `float(loss)` in each step**: Python waits for each step instead of preparing the next one meanwhile; host and
# device take turns where they could overlap. Python's own work is a sleep here, as long as a step.

# %%
def loop(fetch):
    """(seconds a step, losses, whether each step was done when Python went on)."""
    state, losses, done = jax.block_until_ready(fresh_state()), [], []
    start = time.perf_counter()
    for _ in range(STEPS):
        time.sleep(honest.median_s)  # "load the next batch"
        state, loss = step(state, batch, targets)
        losses.append(fetch(loss))
        done.append(loss.is_ready())
    jax.block_until_ready(losses)
    return (time.perf_counter() - start) / STEPS, losses, done


fetched_s, fetched, fetched_done = loop(float)
kept_s, kept, kept_done = loop(lambda loss: loss)
print(f"4 float(loss):       {1e3 * fetched_s:8.2f} ms, against {1e3 * kept_s:.2f} with the loss left on the device")
assert all(fetched_done) and not all(kept_done), "float waits; the loop without it runs ahead"  # R14
assert np.array_equal(fetched, np.array(kept)), "the same losses, fetched once at the end"  # R14

# %% [markdown]
# ## Exercise 1
# Batches of any size arrive. Write `pad_to_bucket(images, labels, buckets)`: NumPy images (n, 784) and labels (n,),
# filled up to the smallest bucket that holds them, so that `model.count_correct` counts as before. A batch larger than
# every bucket is a ValueError.

# %%
# Your answer
def pad_to_bucket(images, labels, buckets):
    raise NotImplementedError


# %%
# Self-check (runs on your answer once it is written, on the solution until then)
def check_pad_to_bucket(f):
    count = jax.jit(counted(model.count_correct))
    predicted = np.asarray(model.forward(params, images[:64])).argmax(axis=1)

    def count_all():
        for n in (1, 7, 8, 9, 20, 32):
            x, y = images_np[:n], labels_np[:n]
            padded = f(x, y, (8, 32, 64))
            want = 8 if n <= 8 else 32
            assert padded[0].shape == (want, 784) and padded[1].shape == (want,), f"{n} examples belong in {want}"
            assert count(params, *padded) == (predicted[:n] == y).sum(), "an example of filler counts as right"
    assert traces(count_all)[0] == 2, "two buckets are two traces"
    refusal(lambda: f(images_np[:33], labels_np[:33], (8, 32)))


# %% [markdown]
# ## Exercise 2
# Write `honest_seconds(f, x, n)`: the median time of n calls f(x) with their outputs ready, without the first call,
# which compiles. The output may be a pytree.

# %%
# Your answer
def honest_seconds(f, x, n):
    raise NotImplementedError


# %%
# Self-check: a stand-in for a device, whose first call takes half a second and whose outputs are ready after 20 ms.
def check_honest_seconds(g):
    class Output:
        waited = False

        def block_until_ready(self):
            time.sleep(0 if self.waited else 0.02)
            self.waited = True
            return self

    outputs = []

    def device(x):
        if not outputs:
            time.sleep(0.5)
        outputs.append(Output())
        return {"loss": outputs[-1]}

    seconds = g(device, 1.0, 5)
    assert len(outputs) == 6, "one call to compile and five to time"
    assert all(output.waited for output in outputs[1:]), "an output was not waited for"
    assert 0.02 <= seconds, "outputs are ready after 20 ms, not before"
    assert seconds < 0.1, "the first call, which compiles, is not to be timed"


# %% [markdown]
# ## Rules: a checklist [S2-052] (must-read)
# Each rule is proved by the assertion that carries its number.
#
# | | rule | because |
# |---|---|---|
# | R1 | keep shapes, dtypes, weak types, pytrees and static values fixed | each is in the key of a trace |
# | R2 | count traces, not `_cache_size()` | fast-path entries exceed the traces |
# | R3 | make static only what is hashable: numbers, strings, tuples | a list or an array is refused |
# | R4 | make a config a frozen dataclass | by identity, each new object is a new key |
# | R5 | ask `jax_explain_cache_misses`, but don't trust its silence | another device compiles without a line |
# | R6 | pad, pass numbers as arrays, hoist the jit, convert at the boundary | five traces become one |
# | R7 | one trace a run: count them, and assert it | full batches, an array for the learning rate |
# | R8 | leaves for what changes, static fields for what selects the program | a static field traces again |
# | R9 | one state in, one out, donated | the new state takes the old one's memory |
# | R10 | pass arrays as arguments, capture only small constants | stale, large, slow to compile, kept alive |
# | R11 | stop the clock after `block_until_ready` | a dispatch returns early |
# | R12 | compile on a clock of its own, warm up, take the median | the first call is mostly tracing and XLA |
# | R13 | put the data on the device once; guard with `jax.transfer_guard` | a NumPy argument crosses in each call |
# | R14 | leave losses on the device until they are logged | `float(loss)` makes host and device take turns |

# %% [markdown]
# ## Solutions

# %%
def pad_to_bucket_solution(images, labels, buckets):
    n = len(labels)
    if n > max(buckets):
        raise ValueError(f"a batch of {n} exceeds the largest bucket, {max(buckets)}: add a bucket or split the batch")
    short = min(size for size in buckets if size >= n) - n
    return np.pad(images, ((0, short), (0, 0))), np.pad(labels, (0, short), constant_values=-1)


def honest_seconds_solution(f, x, n):
    jax.block_until_ready(f(x))
    seconds = []
    for _ in range(n):
        start = time.perf_counter()
        jax.block_until_ready(f(x))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


# %%
try:
    check_pad_to_bucket(pad_to_bucket)
except NotImplementedError:
    check_pad_to_bucket(pad_to_bucket_solution)

# %%
try:
    check_honest_seconds(honest_seconds)
except NotImplementedError:
    check_honest_seconds(honest_seconds_solution)
