# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---
# %% [markdown]
# # Python under JAX [S1-002] (must-read)
#
# After this lesson you can say why a Python loop over numbers is hundreds of times slower than an array operation,
# what Python still does while XLA computes, which arrays share memory and which are copies, and which of a function's
# values JAX knows before it runs. You can read decorators and closures, which JAX is built from.
#
# Uses this project's `model.py` (`init_params`, `forward_one`, `forward`, `cross_entropy`) and `data.py`.
#
# ```
#       Python                                          XLA
#   +------------------------------+             +-----------------------------+
#   | def step(params, images):    |  trace and  | a program for one set of    |
#   |     ...                      |  compile    | shapes: machine code with   |
#   |                              |   once ---> | threads of its own          |
#   | for images in batches:       |  dispatch   |                             |
#   |     step(params, images)     |   each time | reads and writes buffers:   |
#   |                              |  -------->  | no Python object in sight   |
#   +------------------------------+             +-----------------------------+
#     objects, one thread at a time
# ```
# Section 1 is about the two arrows' cost and the buffers, section 2 about the Python on the left, section 3 about what
# tracing can know.

# %%
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent if "__file__" in globals() else Path.cwd()
sys.path[:0] = [str(PROJECT), str(PROJECT.parent)]  # the project's files, and common/ beside it

# %%
import array
import functools
import inspect
import statistics
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

import data
import model

digits = data.load("digits")
images = data.flatten(digits.train_images)  # float32 (n, 784), NumPy
params = model.init_params(jax.random.key(0))


def median_s(f, n):
    """Median seconds of n calls of f, after one call that warms up whatever f needs."""
    f()
    seconds = []
    for _ in range(n):
        start = time.perf_counter()
        f()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


# %% [markdown]
# ## 1. Execution and memory [S1-003] (must-read)
# ### A Python number is an object, and loops over objects are slow [S1-004] (must-read)
# **Claim.** A list holds pointers to objects. Each float is an object of 24 bytes: a reference count, a pointer to its
# type, and only then the 8 bytes of the number. An array is one block of bare numbers.
#
# ```
#   list   [  *  |  *  |  *  ]  8-byte pointers      array  [ 0.50 | 0.25 | 0.75 ]  8 bytes each, float64
#             |     |     |                                   side by side; one dtype and one shape for all
#             v     v     v
#           0.50  0.25  0.75    24 bytes each,
#                               anywhere in memory
# ```

# %%
N = 100_000
values = [i / N for i in range(N)]
packed = np.array(values)
boxed_bytes = sys.getsizeof(values) + sum(map(sys.getsizeof, values))
print(f"{N} floats: {boxed_bytes} bytes as a list, {packed.nbytes} as an array")
assert sys.getsizeof(1.0) == 24
assert packed.nbytes == 8 * N
assert boxed_bytes > 3 * packed.nbytes

# %% [markdown]
# **Claim.** For each `v * v` the interpreter follows two pointers, looks up the types, finds the multiplication, and
# makes a new object for the result. An array operation decides all this once, then runs a loop of machine code. The
# difference is a factor of 100 to 1000, the more so the more arithmetic is in one operation.
#
# Two traps in measuring it. The first call of a library pays for loading it: warm up. And a linear algebra library
# (BLAS) starts threads for big operands, which stall on a busy machine; the operands here are too small for that.

# %%
short, short_packed = values[:10_000], packed[:10_000]
matrix = np.random.default_rng(0).random((64, 64))
rows = matrix.tolist()


def matmul_of_lists(a, b):
    columns = list(zip(*b))
    return [[sum(x * y for x, y in zip(row, column)) for column in columns] for row in a]


slower = {
    "v * v for each v": median_s(lambda: [v * v for v in short], 9) / median_s(lambda: short_packed * short_packed, 99),
    "sum of v * v": median_s(lambda: sum(v * v for v in short), 9) / median_s(
        lambda: np.dot(short_packed, short_packed), 99),
    "64 x 64 matmul": median_s(lambda: matmul_of_lists(rows, rows), 3) / median_s(lambda: matrix @ matrix, 99),
}
for what, ratio in slower.items():
    print(f"{what:17} a loop over objects takes {ratio:6.0f} times as long")
assert np.allclose(matmul_of_lists(rows, rows), matrix @ matrix)
assert slower["v * v for each v"] > 20 and slower["sum of v * v"] > 20 and slower["64 x 64 matmul"] > 100

# %% [markdown]
# The project's whole network is short in plain Python, too, and gives the same ten logits for one image. Only it takes
# some 60 ms instead of 0.1 (measured on one core of a server): an hour for one look at MNIST's 60,000 images.

# %%
def forward_in_loops(layers, x):
    for i, (columns, bias) in enumerate(layers):
        x = [sum(a * w for a, w in zip(x, column)) + b for column, b in zip(columns, bias)]
        if i < len(layers) - 1:
            x = [max(a, 0.0) for a in x]  # ReLU
    return x


layers_of_lists = [(layer["w"].T.tolist(), layer["b"].tolist()) for layer in params]
start = time.perf_counter()
by_loops = forward_in_loops(layers_of_lists, images[0].tolist())
loops_s = time.perf_counter() - start
forward_one = jax.jit(model.forward_one)
jax_s = median_s(lambda: forward_one(params, images[0]).block_until_ready(), 20)
print(f"one image: {1e3 * loops_s:.0f} ms in loops, {1e3 * jax_s:.2f} ms in JAX")
assert np.allclose(by_loops, forward_one(params, images[0]), atol=1e-4)
del layers_of_lists

# %% [markdown]
# ### The GIL, and what is left for Python to do [S1-005] (must-read)
# **Claim.** One lock, the *global interpreter lock*, lets one thread at a time run Python. Two threads of Python code
# therefore use one core between them: the CPU seconds that they spend together never exceed the seconds that pass.
# Twice the work takes twice the time, however many cores there are. (Builds of Python 3.13 and later without
# the lock exist; the cell looks for one.)

# %%
def count_to_a_million():
    total = 0
    for i in range(1_000_000):
        total += i
    return total


def in_threads(work, n):
    """Seconds until n threads have each done the work, and the CPU seconds they spent on it together."""
    cpu_s = []

    def run():
        before = time.thread_time()
        work()
        cpu_s.append(time.thread_time() - before)

    threads = [threading.Thread(target=run) for _ in range(n)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start, sum(cpu_s)


_, one_cpu_s = min(in_threads(count_to_a_million, 1) for _ in range(3))
both_s, both_cpu_s = in_threads(count_to_a_million, 2)
print(f"two threads of Python take {both_s / one_cpu_s:.1f} times what one needs, on {both_cpu_s / both_s:.2f} cores")
has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
assert not has_gil or both_cpu_s < 1.15 * both_s  # 15 % for the clocks; two free threads would spend 2 x

# %% [markdown]
# **Claim.** JAX lets go of the lock while XLA works. A thread that counts in Python goes on counting while the main
# thread waits for a result; were the lock held, it would not get one turn. This is why the GIL does not limit the
# computation, and why a thread can prepare the next batch meanwhile.
#
# ```
#   main thread    | call | block_until_ready: waits without the lock ......... |
#   XLA's threads         | ================ products of matrices ============= |
#   other thread          | n += 1, n += 1, n += 1, ...                         |
# ```

# %%
product = jax.jit(lambda x: (x @ x) @ x)
x = jnp.full((1500, 1500), 1e-3)
product(x).block_until_ready()  # compiles
counted, done = 0, threading.Event()


def count():
    global counted
    while not done.is_set():
        counted += 1


counter = threading.Thread(target=count)
counter.start()
y = product(x)  # returns before the products are computed
before = counted
y.block_until_ready()
while_waiting = counted - before
done.set()
counter.join()
print(f"the other thread counted {while_waiting} while this one waited")
assert while_waiting > 10_000

# %% [markdown]
# **Claim.** What is left for Python is *dispatch*: each call of a compiled function checks the arguments, finds the
# program and hands it over. That costs some microseconds (about 5 measured on two cores of a server, 20 on a busy
# one), however small the program. So make each call do much, or put the loop into the program, as `train.py` does
# when it runs a whole epoch in one call. Where a call takes milliseconds, dispatch does not matter.

# %%
add_one = jax.jit(lambda x: x + 1)
add_thousand = jax.jit(lambda x: jax.lax.fori_loop(0, 1000, lambda i, x: x + 1, x))  # the loop is in the program
zero = jnp.float32(0)


def thousand_calls():
    x = zero
    for _ in range(1000):
        x = add_one(x)
    return x.block_until_ready()


forward = jax.jit(model.forward)
batch = jnp.asarray(images[:1024])
dispatch_s = median_s(lambda: add_one(zero).block_until_ready(), 200)
calls_s, loop_s = median_s(thousand_calls, 5), median_s(lambda: add_thousand(zero).block_until_ready(), 50)
batch_s = median_s(lambda: forward(params, batch).block_until_ready(), 10)
print(f"one call of a trivial program  {1e6 * dispatch_s:8.1f} us: dispatch")
print(f"a thousand calls               {1e6 * calls_s:8.1f} us")
print(f"one call that loops 1000 times {1e6 * loop_s:8.1f} us")
print(f"the network on 1024 images     {1e6 * batch_s:8.1f} us: there dispatch is lost in the kernels")
assert thousand_calls() == add_thousand(zero) == 1000
assert calls_s > 10 * loop_s
assert batch_s > 10 * dispatch_s

# %% [markdown]
# ### Buffers: who shares memory with whom [S1-006] (must-read)
# **Claim.** The *buffer protocol* is how Python objects lend each other memory without copying: an address, a format
# letter, a shape, and *strides*, the number of bytes to the next element along each axis. `memoryview` shows it.
#
# ```
#   digits.train_images[0]: 28 x 28 bytes in one row    | row 0: 28 bytes | row 1: 28 bytes | ...
#   strides (28, 1): one row down is 28 bytes further, one column right is 1 byte further
# ```

# %%
view = memoryview(digits.train_images[0])
assert (view.format, view.shape, view.strides, view.nbytes) == ("B", (28, 28), (28, 1), 784)  # B: unsigned byte
assert view.c_contiguous and not memoryview(digits.train_images[0][:, ::2]).c_contiguous  # every second column: gaps

lender = array.array("f", [1.0, 2.0, 3.0])  # the standard library's packed array
borrower = np.frombuffer(lender, np.float32)
lender[0] = 9.0
assert borrower[0] == 9.0  # one memory, two objects
try:
    lender.append(4.0)  # would move the memory away under the borrower
except BufferError as why:
    assert "exporting buffers" in str(why)
else:
    raise AssertionError("the buffer was resized while it was lent")

# %% [markdown]
# **Claim.** A JAX array on the CPU lends its buffer as well, but read-only: compiled programs rely on arrays never
# changing. `np.asarray` of it costs nothing; write on a copy.

# %%
cpu = jax.devices("cpu")[0]
ones = jax.device_put(jnp.ones(3), cpu)
view = memoryview(ones)
assert view.readonly and view.nbytes == 12 and view.format == "=f"
borrowed = np.asarray(ones)
assert borrowed.ctypes.data == ones.unsafe_buffer_pointer() and not borrowed.flags.writeable
assert np.array(ones).flags.writeable  # np.array copies

# %% [markdown]
# **Claim.** The other way round there is a trap. On the CPU, `jax.device_put` borrows a NumPy array whose memory
# starts at a multiple of 64 bytes. A loader that fills the same NumPy array again for the next batch then changes
# the "immutable" JAX array of the last one, sometimes: most NumPy arrays are not aligned so. `jnp.asarray` and
# `jnp.array` copy.

# %%
def aligned_zeros(n):
    """n float32 zeros whose address is a multiple of 64."""
    raw = np.zeros(4 * n + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset:offset + 4 * n].view(np.float32)


host = aligned_zeros(4096)
put, as_array, copied = jax.device_put(host, cpu), jnp.asarray(host), jnp.array(host)
host[0] = 7.0
print(f"after host[0] = 7: device_put has {put[0]}, jnp.asarray {as_array[0]}, jnp.array {copied[0]}")
assert put[0] == 7.0 and as_array[0] == 0.0 and copied[0] == 0.0

# %% [markdown]
# ## 2. Language machinery that JAX is made of [S1-007] (must-read)
# ### Decorators: a function that takes a function [S1-008] (must-read)
# **Claim.** `@jax.jit` above a `def` means `f = jax.jit(f)` below it, and nothing else. A decorator of our own shows
# what `jit` does in principle: run the function once with stand-ins for its arguments, keep what it did (the *jaxpr*,
# lesson 03), and replay that for every later call with the same shapes and types. The real one hands the jaxpr to XLA.

# %%
def my_jit(f):
    """For an f of arrays that returns one array: runs f's Python once per shapes and dtypes, then replays it."""
    programs = {}

    @functools.wraps(f)  # copies __name__, __doc__, ... to `call`, and keeps f as call.__wrapped__
    def call(*args):
        key = tuple((jnp.shape(a), jnp.result_type(a)) for a in args)
        if key not in programs:
            programs[key] = jaxpr_as_fun(jax.make_jaxpr(f)(*args))
        return programs[key](*args)[0]
    return call


python_runs = 0


@my_jit
def loss(logits, labels):
    """Mean cross-entropy."""
    global python_runs
    python_runs += 1
    return model.cross_entropy(logits, labels).mean()


logits, labels = forward(params, batch), jnp.asarray(digits.train_labels[:1024])
first, second = loss(logits, labels), loss(logits + 1, labels)
assert python_runs == 1  # the second call replayed the program
assert np.allclose(first, model.cross_entropy(logits, labels).mean())
loss(logits[:10], labels[:10])
assert python_runs == 2  # a new shape is a new program

# %% [markdown]
# **Claim.** `jit` as a decorator, as a call, and through `functools.partial` (which fixes some arguments of `jit`
# itself) are the same thing. Like ours, it leaves the function's name, signature and original behind; so does `pmap`.

# %%
def scaled(x, power=2):
    """x to a power."""
    return x**power


@jax.jit
def decorated(x, power=2):
    return x**power


@functools.partial(jax.jit, static_argnames="power")
def decorated_with_options(x, power=2):
    return x**power


called = jax.jit(scaled)
assert decorated(3.0) == called(3.0) == decorated_with_options(3.0) == scaled(3.0) == 9.0
for transformed in (my_jit(scaled), called, jax.pmap(scaled)):
    assert callable(transformed) and transformed.__wrapped__ is scaled
    assert transformed.__name__ == "scaled" and transformed.__doc__ == "x to a power."
    assert inspect.signature(transformed) == inspect.signature(scaled)
assert jnp.array_equal(jax.pmap(scaled)(jnp.ones((1, 3))), jnp.ones((1, 3)))  # maps over one device

# %% [markdown]
# ### Closures: what a function carries along [S1-009] (must-read)
# **Claim.** A function defined inside another one keeps the variables it uses in *cells*. A cell holds the variable,
# not the value it had: functions made in a loop all see the loop's last value.

# %%
def make_layer(w):
    def layer(x):
        return x @ w
    return layer


w = params[0]["w"]  # (784, 512)
layer = make_layer(w)
assert layer.__code__.co_freevars == ("w",)
assert layer.__closure__[0].cell_contents is w

adders = [lambda x: x + i for i in range(3)]
assert [add(10) for add in adders] == [12, 12, 12]  # not 10, 11, 12
adders = [lambda x, i=i: x + i for i in range(3)]  # a default value is computed at once: its own i for each
assert [add(10) for add in adders] == [10, 11, 12]

# %% [markdown]
# **Claim.** When JAX traces a function, a captured array becomes a *constant* of the program. Passed as an argument
# it is a place to be filled. The text of the program for XLA shows the difference: it contains the constant's every
# number. So weights come as arguments; capture what is small and never changes.

# %%
x = jnp.asarray(images[0])
assert jax.make_jaxpr(layer)(x).consts[0] is w
captured = jax.jit(layer).lower(x).as_text()
passed = jax.jit(lambda x, w: x @ w).lower(x, w).as_text()
print(f"text of the program: {len(captured)} characters with w captured, {len(passed)} with w as an argument")
assert len(captured) > 100 * len(passed)

# %% [markdown]
# **Claim.** A constant is read once, while tracing. Rebinding the variable afterwards changes nothing for shapes
# already compiled, and does for new ones: two truths at once.

# %%
def make_scaler(scale):
    @jax.jit
    def apply(x):
        return x * scale

    def set_scale(value):
        nonlocal scale
        scale = value
    return apply, set_scale


apply, set_scale = make_scaler(2.0)
assert apply(1.0) == 2.0
set_scale(5.0)
assert apply(1.0) == 2.0  # stale: the program for a scalar has 2.0 in it
assert apply(jnp.ones(2))[0] == 5.0  # a new shape was traced just now

# %% [markdown]
# ### `functools`: `partial`, `wraps`, and static arguments [S1-010] (must-read)
# **Claim.** A *static* argument is one that JAX treats as a Python value: it may decide loops and shapes, must be
# hashable, and each of its values gets a program of its own. `jit` finds it by name in the function's signature,
# so a decorator in between must use `functools.wraps`. Without it a typo goes unnoticed, and a static argument
# passed by position is traced after all.

# %%
def power(x, n):
    result = 1.0
    for _ in range(n):  # needs a Python int
        result *= x
    return result


def wrapped(f):
    @functools.wraps(f)
    def call(*args, **kwargs):
        return f(*args, **kwargs)
    return call


def bare(f):
    def call(*args, **kwargs):
        return f(*args, **kwargs)
    return call


assert jax.jit(wrapped(power), static_argnames="n")(2.0, 3) == 8.0
try:
    jax.jit(bare(power), static_argnames="n")(2.0, 3)  # `call` has no parameter n: 3 is traced
except jax.errors.TracerIntegerConversionError as why:
    assert "__index__() method was called on traced array" in str(why)
else:
    raise AssertionError("n was static without a signature that names it")
try:
    jax.jit(power, static_argnames="m")
except ValueError as why:
    assert "invalid argnames {'m'}" in str(why)
else:
    raise AssertionError("a static argument that does not exist was accepted")

# %% [markdown]
# **Claim.** `jit` keeps its programs with the function *object*. A `partial` or a lambda made inside a loop is a new
# object each time, so it is traced (and compiled) each time. `jit` of one function is not: make it once, outside.

# %%
traces = 0


def scale_by(x, factor):
    global traces
    traces += 1
    return x * factor


for _ in range(3):
    jax.jit(functools.partial(scale_by, factor=2))(1.0)
made_in_the_loop, traces = traces, 0
double = jax.jit(functools.partial(scale_by, factor=2))
for _ in range(3):
    double(1.0)
made_once, traces = traces, 0
for _ in range(3):
    jax.jit(scale_by)(1.0, 2)
same_function = traces
print(f"traces in three calls: {made_in_the_loop} new partial each time, {made_once} one partial, "
      f"{same_function} the function itself")
assert (made_in_the_loop, made_once, same_function) == (3, 1, 1)

# %% [markdown]
# ## 3. Static and dynamic values [S1-011] (must-read)
# While JAX traces, some values are there and some are not yet:
#
# | known while tracing (static) | not known (dynamic, *traced*) |
# |---|---|
# | shapes, dtypes, the number of layers in `params` | the numbers in arrays that come as arguments |
# | captured Python numbers, static arguments | everything computed from those numbers |
# | a new one means a new program | a new one costs nothing |
#
# ### A Python int is a compile-time constant [S1-012] (must-read)
# **Claim.** A Python loop runs while tracing, so the program holds its body once per turn: a long loop makes a long
# program. `forward_one` loops over its layers so; with four layers that is right, over a thousand steps it is not
# (`lax.scan` and `fori_loop` keep one body).

# %%
def equations(f, *args):
    return len(jax.make_jaxpr(f)(*args).eqns)


by_n = [equations(lambda x: power(x, n), 2.0) for n in (1, 2, 10)]
by_layers = [equations(model.forward_one, model.init_params(jax.random.key(0), (4,) * layers + (2,)), jnp.ones(4))
             for layers in (1, 2, 3)]
print(f"equations: power 1, 2, 10: {by_n}; networks of 1, 2, 3 layers: {by_layers}")
assert by_n == [1, 2, 10]
assert by_layers[0] < by_layers[1] < by_layers[2] and by_layers[2] - by_layers[1] == by_layers[1] - by_layers[0]
looped = equations(lambda x: jax.lax.fori_loop(0, 1000, lambda i, y: y * x, 1.0), 2.0)
assert looped == 1  # one equation, `scan`, whatever the number of turns

# %% [markdown]
# **Claim.** A shape must be static: the program is compiled for it. A Python `int` from a closure or a static argument
# gives one; a traced integer does not, though at the call both are written `3`.

# %%
assert jax.jit(lambda x: x + jnp.zeros(3))(1.0).shape == (3,)
assert jax.jit(jnp.zeros, static_argnums=0)(3).shape == (3,)
try:
    jax.jit(lambda n: jnp.zeros(n))(3)
except TypeError as why:
    assert "Shapes must be 1D sequences of concrete values" in str(why)
else:
    raise AssertionError("a traced integer was accepted as a shape")

# %% [markdown]
# ### Why `if` fails on a traced value [S1-013] (must-read)
# **Claim.** `if x > 0:` asks the traced value for True or False. It has none: the one program must serve every x.

# %%
def leaky_relu(x):
    if x > 0:
        return x
    return 0.01 * x


assert leaky_relu(2.0) == 2.0 and leaky_relu(-2.0) == -0.02  # plain Python
try:
    jax.jit(leaky_relu)(2.0)
except jax.errors.TracerBoolConversionError as why:
    print(str(why).splitlines()[0])
    assert "Attempted boolean conversion of traced array with shape bool[]" in str(why)
    assert "depends on the value of the argument x" in str(why)
else:
    raise AssertionError("`if` accepted a traced value")

# %% [markdown]
# **Claim.** There are three ways out. `jnp.where` computes both sides and selects element by element: right for
# arrays. `lax.cond` puts both branches into the program and runs one: right where a branch is costly. A static argument
# makes the value a Python value again, at the price of a program for each: right for options, wrong for data.
# The lesson on control flow in `nanogpt/lessons/` goes on from here.

# %%
def by_where(x):
    return jnp.where(x > 0, x, 0.01 * x)


def by_cond(x):
    return jax.lax.cond(x > 0, lambda x: x, lambda x: 0.01 * x, x)


traced_for = []


@functools.partial(jax.jit, static_argnums=0)
def by_static(x):
    traced_for.append(x)  # Python code: runs only while tracing
    return leaky_relu(x)


for value in (2.0, -2.0, 0.5, 2.0):
    for f in (jax.jit(by_where), jax.jit(by_cond), by_static):
        assert np.allclose(f(value), leaky_relu(value))
assert traced_for == [2.0, -2.0, 0.5]  # three values, three programs
assert np.allclose(by_where(jnp.array([2.0, -2.0])), [2.0, -0.02])  # and `where` takes whole arrays

# %% [markdown]
# ## Exercise 1
# Write `scalers(factors)`: a list of functions, one for each number in `factors`, each multiplying its argument by
# its own factor. Each must also work under `jax.jit`.

# %%
# Your answer
def scalers(factors):
    raise NotImplementedError


# %%
# Self-check (runs on your answer once it is written, on the solution until then)
def check_scalers(f):
    made = f([2.0, 3.0, 5.0])
    assert [g(10.0) for g in made] == [20.0, 30.0, 50.0], "each function has its own factor: a cell keeps the variable"
    assert [float(jax.jit(g)(10.0)) for g in made] == [20.0, 30.0, 50.0], "the same under jit"


# %% [markdown]
# ## Exercise 2
# Write the decorator `counting_jit(f)`: `jax.jit` of `f`, whose attribute `traces` is a list that grows by one
# element whenever f's Python code runs. Name and signature stay those of `f`, so that other tools can read them.

# %%
# Your answer
def counting_jit(f):
    raise NotImplementedError


# %%
# Self-check (runs on your answer once it is written, on the solution until then)
def check_counting_jit(f):
    def mean_loss(logits, labels):
        return model.cross_entropy(logits, labels).mean()

    counted = f(mean_loss)
    for _ in range(3):
        value = counted(logits, labels)
    assert np.allclose(value, mean_loss(logits, labels)), "it computes what the function computes"
    assert len(counted.traces) == 1, "three calls with the same shapes run the Python code once"
    counted(logits[:7], labels[:7])
    assert len(counted.traces) == 2, "another shape runs it once more"
    assert counted.__name__ == "mean_loss", "functools.wraps keeps the name"
    assert list(inspect.signature(counted).parameters) == ["logits", "labels"], "functools.wraps keeps the signature"


# %% [markdown]
# ## Exercise 3
# Write `clip_length(v, limit)`: the vector v where its Euclidean length is at most `limit`, else v scaled down to that
# length. It must work under `jax.jit` with both arguments traced. (Gradients are clipped like this.)

# %%
# Your answer
def clip_length(v, limit):
    raise NotImplementedError


# %%
# Self-check (runs on your answer once it is written, on the solution until then)
def check_clip_length(f):
    v = jnp.array([3.0, 4.0])
    try:
        clipped = jax.jit(f)(v, 1.0)
    except jax.errors.TracerBoolConversionError:
        raise AssertionError("a Python `if` asked for a traced value: select with jnp.where") from None
    assert np.allclose(clipped, v / 5), "(3, 4) has length 5: at limit 1 it is scaled to (0.6, 0.8)"
    assert np.array_equal(jax.jit(f)(v, 9.0), v), "a vector shorter than the limit is not touched"
    assert np.array_equal(jax.jit(f)(jnp.zeros(2), 1.0), jnp.zeros(2)), "zero stays zero, not NaN"


# %% [markdown]
# ## Exercise 4
# A loader fills the NumPy array `host` again and again. Write `snapshot(host)`: a JAX array with its present content
# that later writes to `host` cannot change.

# %%
# Your answer
def snapshot(host):
    raise NotImplementedError


# %%
# Self-check (runs on your answer once it is written, on the solution until then)
def check_snapshot(f):
    host = aligned_zeros(4096)
    host[:] = 1.0
    taken = f(host)
    assert isinstance(taken, jax.Array), "a JAX array is asked for"
    host[:] = 2.0
    assert np.array_equal(taken, np.ones(4096)), "a later write to host changed the snapshot: it shares memory"


# %% [markdown]
# ## Rules
# | you see | because | rule |
# |---|---|---|
# | a loop over numbers is 100 to 1000 times slower than an array | each number is an object | operate on whole arrays |
# | many small jitted calls are slow | each costs microseconds of dispatch | put the loop into the program |
# | two threads of Python are no faster than one | the GIL | only waiting and compiled work run beside Python |
# | a thread goes on while JAX computes | XLA runs without the GIL | prepare the next batch in a thread |
# | a JAX array changes | `device_put` borrowed an aligned NumPy buffer (CPU) | `jnp.array` copies |
# | a changed variable has no effect | captured values are read while tracing | what changes is an argument |
# | a huge program | a captured array is a constant in it | weights are arguments |
# | every call compiles | a new `partial` or lambda is a new function to `jit` | make it once, outside the loop |
# | TracerIntegerConversionError, "Shapes must be ..." | a traced value where an int must be | a static argument |
# | TracerBoolConversionError | `if` on a traced value | `jnp.where`, `lax.cond`, or a static argument |

# %% [markdown]
# ## Solutions

# %%
def scalers_solution(factors):
    return [lambda x, factor=factor: x * factor for factor in factors]


# %%
def counting_jit_solution(f):
    traces = []

    @functools.wraps(f)
    def counting(*args):
        traces.append(args)  # Python code: runs only while tracing
        return f(*args)

    jitted = jax.jit(counting)
    jitted.traces = traces
    return jitted


# %%
def clip_length_solution(v, limit):
    length = jnp.sqrt(jnp.sum(v * v))
    return jnp.where(length > limit, v * (limit / length), v)


# %%
def snapshot_solution(host):
    return jnp.array(host)


# %%
try:
    check_scalers(scalers)
except NotImplementedError:
    check_scalers(scalers_solution)

# %%
try:
    check_counting_jit(counting_jit)
except NotImplementedError:
    check_counting_jit(counting_jit_solution)

# %%
try:
    check_clip_length(clip_length)
except NotImplementedError:
    check_clip_length(clip_length_solution)

# %%
try:
    check_snapshot(snapshot)
except NotImplementedError:
    check_snapshot(snapshot_solution)
