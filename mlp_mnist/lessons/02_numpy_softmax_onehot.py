# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---
# %% [markdown]
# # NumPy for JAX, and softmax and one-hot from scratch [S1-014] (must-read)
#
# After this lesson you can replace loops by operations on whole arrays, say which of them copy, reason about axes,
# index with arrays and masks, update an immutable JAX array, and write a cross-entropy that neither overflows nor
# gives NaN gradients. Twelve exercises train it on images of digits.
#
# Uses this project's `data.py` (the embedded digits, `flatten`) and `model.py` (`forward`, `cross_entropy`).
#
# Legend: N images, B batch, H and W height and width, P = H · W pixels, V classes.

# %%
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent if "__file__" in globals() else Path.cwd()
sys.path[:0] = [str(PROJECT), str(PROJECT.parent)]  # the project's files, and common/ beside it

# %%
import statistics
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np

import data
import model

digits = data.load("digits")
images, labels = digits.train_images, digits.train_labels  # uint8 (N, 28, 28), int32 (N,)
params = model.init_params(jax.random.key(0))
jax_logits = model.forward(params, jnp.asarray(data.flatten(images)))  # (N, V), of an untrained network
logits = np.array(jax_logits)
N, V = logits.shape
print(f"{N} images of {images.shape[1:]}, {V} classes")


def median_s(f, n):
    """Median seconds of n calls of f, after one that warms up."""
    f()
    seconds = []
    for _ in range(n):
        start = time.perf_counter()
        f()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


# %% [markdown]
# ## 1. From Python to NumPy [S1-015] (must-read)
# **Claim.** Three ways to make a batch of the network's input (N, P) from images (N, H, W): a loop over pixels, an
# operation per image, one operation for all. They give the same numbers, and each step out of Python is faster.

# %%
def by_pixel(images):
    return np.array([[pixel / 255 for row in image for pixel in row] for image in images.tolist()], np.float32)


def by_image(images):
    return np.stack([image.reshape(-1).astype(np.float32) / np.float32(255) for image in images])


batch = images[:256]
assert np.allclose(by_pixel(batch), data.flatten(batch)) and np.array_equal(by_image(batch), data.flatten(batch))
seconds = {f.__name__: median_s(lambda: f(batch), 5) for f in (by_pixel, by_image, data.flatten)}
print("256 images:", ", ".join(f"{name} {1e3 * s:.2f} ms" for name, s in seconds.items()))
assert seconds["by_pixel"] > 10 * seconds["flatten"]

# %% [markdown]
# The same for accuracy, the share of images whose largest logit is the label's.

# %%
def accuracy_in_loops(logits, labels):
    right = 0
    for row, label in zip(logits, labels):
        best = 0
        for v in range(len(row)):
            if row[v] > row[best]:
                best = v
        right += best == label
    return right / len(labels)


def accuracy(logits, labels):
    return (logits.argmax(axis=1) == labels).mean()


assert np.isclose(accuracy_in_loops(logits, labels), accuracy(logits, labels))
speedup = median_s(lambda: accuracy_in_loops(logits, labels), 3) / median_s(lambda: accuracy(logits, labels), 50)
print(f"accuracy {accuracy(logits, labels):.3f} (guessing gives 0.1); vectorised {speedup:.0f} times as fast")
assert speedup > 10

# %% [markdown]
# ### Broadcasting: axes of length 1 are repeated
# **Claim.** Shapes are compared from the right. Where one has length 1, or no axis left, it is repeated without a copy;
# other differences are an error. So one expression gives the accuracies of many networks, and all distances between
# two sets of points.
#
# ```
#   argmax   (S, N)      queries[:, None]  (Q, 1, P)      predictions[:, None]  (N, 1)
#   labels      (N)      points [None]     (1, N, P)      labels                   (N)
#   ==       (S, N)      difference        (Q, N, P)      ==                    (N, N)   <- not what you meant
# ```

# %%
three_networks = np.stack([logits, -logits, np.eye(V)[labels]])  # (S, N, V); the third knows the labels
by_network = (three_networks.argmax(-1) == labels).mean(-1)  # (S, N) against (N,), then a mean over N
assert by_network.shape == (3,) and by_network[0] == accuracy(logits, labels) and by_network[2] == 1.0

predictions = logits.argmax(1)
assert (predictions[:, None] == labels).shape == (N, N)  # a stray axis makes N x N comparisons, and no error
try:
    np.ones((3, 4)) + np.ones(3)  # from the right: 4 against 3
except ValueError as why:
    assert "could not be broadcast" in str(why)
else:
    raise AssertionError("4 was broadcast against 3")

# %% [markdown]
# **Claim.** All squared distances between Q and N points need no loop, but the broadcast difference has Q · N · P
# numbers. |a - b|² = |a|² - 2 a·b + |b|² needs Q · N, and its work is one product of matrices. (Where points nearly
# coincide it subtracts nearly equal numbers: there it loses digits, and can fall below 0.)

# %%
points = data.flatten(images[:300])
queries = points[:20]
difference = queries[:, None] - points[None]  # (Q, N, P)
by_difference = (difference**2).sum(-1)
by_product = (queries**2).sum(1)[:, None] - 2 * queries @ points.T + (points**2).sum(1)
print(f"the difference takes {difference.nbytes} bytes, the product {by_product.nbytes}")
assert by_difference.shape == by_product.shape == (20, 300)
assert np.allclose(by_difference, by_product, atol=1e-3)
assert difference.nbytes == 784 * by_product.nbytes

# %% [markdown]
# ### Views and copies
# **Claim.** An array is a buffer, a shape, and strides: how many bytes further the next element of each axis lies.
# Slices, transposes and most reshapes only change shape and strides: a *view* of the same memory, at no cost, and a
# write through it is seen by all. Indexing with an array or a mask copies; so does a reshape that no strides can
# express.

# %%
views = {"slice": images[:100], "every second column": images[:, :, ::2], "mirrored": images[:, :, ::-1],
         "transposed": images.transpose(0, 2, 1), "reshaped": images.reshape(N, -1), "new axis": images[..., None]}
copies = {"indexed by an array": images[np.arange(100)], "indexed by a mask": images[labels == 3],
          "transposed, then reshaped": images.transpose(0, 2, 1).reshape(N, -1), "astype": images.astype(np.float32)}
for name, array in {**views, **copies}.items():
    print(f"{name:26} {str(array.shape):17} strides {str(array.strides):16} "
          f"{'view' if np.shares_memory(array, images) else 'copy'}")
assert all(np.shares_memory(array, images) for array in views.values())
assert not any(np.shares_memory(array, images) for array in copies.values())
assert images.strides == (784, 28, 1) and images[:, :, ::-1].strides == (784, 28, -1)

# %% [markdown]
# ### `einsum`: name the axes
# **Claim.** In `einsum("bi,io->bo", x, w)` each letter is an axis. A letter that is missing on the right is summed
# over; the others stay, in the order you write. As loops: for all b and o, out[b, o] = sum over i of x[b, i] w[i, o].

# %%
x, w = data.flatten(images[:32]), np.asarray(params[0]["w"])  # (B, P), (P, hidden)
assert np.allclose(np.einsum("bi,io->bo", x, w), x @ w, atol=1e-4)
assert np.allclose(np.einsum("bp,bp->b", x, x), (x * x).sum(1))  # each row's squared length
assert np.allclose(np.einsum("bp->p", x), x.sum(0), atol=1e-4)  # a sum over the batch
assert np.array_equal(np.einsum("bhw->bwh", images[:32]), images[:32].transpose(0, 2, 1))
outer = np.einsum("bi,bo->io", x, x @ w)  # what a weight's gradient is: a sum of outer products over the batch
assert outer.shape == w.shape and np.allclose(outer, x.T @ (x @ w), rtol=1e-4, atol=1e-2)

# %% [markdown]
# ## 2. Fancy indexing, masks, axes [S1-018a] (must-read)
# **Claim.** Two index arrays are paired, element by element (after broadcasting): `logits[rows, columns]` takes one
# entry per pair, not a block. A boolean mask takes the entries where it is true, in order: how many is known only when
# it runs. `np.where` keeps the shape and replaces the rest.

# %%
rows = np.arange(N)
own = logits[rows, labels]  # the logit of each image's own label
assert own.shape == (N,) and own[5] == logits[5, labels[5]]
assert logits[rows[:3, None], [0, 1]].shape == (3, 2)  # (3, 1) with (2,): a block, by broadcasting

threes = images[labels == 3]
assert threes.shape == ((labels == 3).sum(), 28, 28)
positive = np.where(logits > 0, logits, 0)
assert positive.shape == logits.shape and np.isclose(positive.sum(), logits[logits > 0].sum())

chosen = images[[0, 1]]
chosen[:] = 0  # a copy: images keeps its pixels
assert images[0].any()

# %% [markdown]
# **Claim.** `axis` names the axis that disappears. `keepdims=True` leaves it with length 1, so that the result
# broadcasts against what it came from. Axis -1 is the last one whatever comes before.

# %%
colour = np.random.default_rng(0).random((8, 28, 28, 3), np.float32)  # (N, H, W, C)
shapes = {
    "logits.argmax(1)": (logits.argmax(1), (N,)),  # one class per image
    "logits.argmax(0)": (logits.argmax(0), (V,)),  # one image per class
    "logits.sum(-1, keepdims=True)": (logits.sum(-1, keepdims=True), (N, 1)),
    "logits.mean()": (logits.mean(), ()),
    "colour.mean((0, 1, 2))": (colour.mean((0, 1, 2)), (3,)),  # one mean per channel, as batch norm takes
    "colour.mean((1, 2))": (colour.mean((1, 2)), (8, 3)),  # one per image and channel
    "colour.mean((1, 2), keepdims=True)": (colour.mean((1, 2), keepdims=True), (8, 1, 1, 3)),
    "colour.argmax(-1)": (colour.argmax(-1), (8, 28, 28)),  # which channel is brightest, per pixel
}
for expression, (result, shape) in shapes.items():
    print(f"{expression:35} {shape}")
    assert result.shape == shape
centred = colour - colour.mean((1, 2), keepdims=True)  # without keepdims (8, 3) would not fit (8, 28, 28, 3)
assert np.allclose(centred.mean((1, 2)), 0, atol=1e-6)

# %% [markdown]
# **Claim.** Under `jit` shapes are fixed before the values are known, so indexing with a mask is an error. `jnp.where`
# with three arguments, then a sum, says the same.

# %%
try:
    jax.jit(lambda x: x[x > 0].sum())(jax_logits)
except jax.errors.NonConcreteBooleanIndexError as why:
    print(str(why).splitlines()[0])
    assert "Array boolean indices must be concrete" in str(why)
else:
    raise AssertionError("a mask of traced values gave a shape")
sum_of_positive = jax.jit(lambda x: jnp.where(x > 0, x, 0).sum())
assert np.isclose(sum_of_positive(jax_logits), logits[logits > 0].sum(), rtol=1e-4)

# %% [markdown]
# ## 3. Where JAX arrays differ
# ### Updates: `.at[].set()` and its siblings [S1-045] (must-read)
# **Claim.** A JAX array cannot be written to. `.at[index].set(value)` gives a new array; `add`, `multiply`, `min` and
# `max` update likewise. Where an index occurs twice, `add` adds both, like `np.add.at` and unlike `x[i] += 1`.

# %%
x = jnp.arange(3)
try:
    x[0] = 1
except TypeError as why:
    print(str(why).split(":")[0])
    assert "JAX arrays are immutable" in str(why) and "x = x.at[idx].set(y)" in str(why)
else:
    raise AssertionError("a JAX array was written to")
assert x.at[0].set(9).tolist() == [9, 1, 2] and x.tolist() == [0, 1, 2]  # the original is as it was
assert x.at[1:].add(10).tolist() == [0, 11, 12]
assert x.at[jnp.array([0, 1])].max(jnp.array([5, -5])).tolist() == [5, 1, 2]

twice = np.array([0, 0, 1])
assert jnp.zeros(3).at[twice].add(1).tolist() == [2, 1, 0]
counts = np.zeros(3)
counts[twice] += 1  # NumPy reads once, adds, writes twice
assert counts.tolist() == [1, 1, 0]
np.add.at(counts, twice, 1)
assert counts.tolist() == [3, 2, 0]

# %% [markdown]
# **Claim.** This need not cost a copy. Inside `jit` XLA writes in place where nobody needs the old array; across the
# call, *donate* it: the result then takes over its memory, and the donated array is gone. `train.py` donates its state.

# %%
set_first = jax.jit(lambda x, value: x.at[0].set(value))
set_first_in_place = jax.jit(lambda x, value: x.at[0].set(value), donate_argnums=0)
kept, given = jnp.zeros(1000), jnp.zeros(1000)
address = given.unsafe_buffer_pointer()
assert set_first(kept, 1.0).unsafe_buffer_pointer() != kept.unsafe_buffer_pointer()
assert set_first_in_place(given, 1.0).unsafe_buffer_pointer() == address
assert given.is_deleted() and not kept.is_deleted()

# %% [markdown]
# ### Three behaviours that trip people up, and two more [S2-006] (must-read)
# **Claim.** 1. Arrays are immutable (above). 2. An index out of bounds is no error: a compiled program cannot raise.
# Reads clamp to the nearest valid index, writes are dropped, `jnp.take` and `.get(mode="fill")` fill in NaN, or for
# integers the smallest one. A negative index counts from the end first, as in NumPy.

# %%
x, f = jnp.arange(3), jnp.arange(3.0)
assert x[10] == 2 and x[-1] == 2 and x[-10] == 0
assert x.at[10].set(5).tolist() == [0, 1, 2]
assert jnp.isnan(jnp.take(f, 10)) and jnp.take(x, 10) == jnp.iinfo(jnp.int32).min
assert jnp.isnan(f.at[10].get(mode="fill")) and f.at[10].get(mode="fill", fill_value=-1.0) == -1
assert x.at[10].get(mode="clip") == 2
assert jax.lax.dynamic_slice(jnp.arange(5), (4,), (3,)).tolist() == [2, 3, 4]  # moved back until it fits
try:
    np.arange(3)[10]
except IndexError as why:
    assert "out of bounds" in str(why)
else:
    raise AssertionError("NumPy read beyond the end")

# %% [markdown]
# **Claim.** 3. Numbers of 64 bits silently become 32: float64 loses digits, an int64 that does not fit is garbage.
# There is a warning only where you name the type. (`jax.enable_x64` switches 64 bits on; `gradcheck.py` does.)

# %%
third = np.array([1 / 3])
assert third.dtype == np.float64 and jnp.asarray(third).dtype == jnp.float32
assert float(jnp.asarray(third)[0]) != third[0]  # 0.33333334 against 0.3333333333333333
assert jnp.asarray(np.array([2**40])).tolist() == [0]  # the lower 32 bits
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert jnp.zeros(3, "float64").dtype == jnp.float32
assert "will be truncated to dtype float32" in str(caught[0].message)
with jax.enable_x64(True):
    assert jnp.asarray(third).dtype == jnp.float64

# %% [markdown]
# **Claim.** 4. Dividing an integer by zero raises nothing and gives a meaningless number (1 // 0 is -2 on the CPU).
# 5. Functions of `jnp` refuse lists: each element of a list would become an input of its own, thousands of them.

# %%
cpu = jax.devices("cpu")[0]
one, zero = (jax.device_put(jnp.int32(n), cpu) for n in (1, 0))
assert one // zero == -2
assert np.isinf(jnp.float32(1) / 0)  # floats follow IEEE 754
try:
    jnp.sum([1, 2, 3])
except TypeError as why:
    print(why)
    assert "sum requires ndarray or scalar arguments, got <class 'list'>" in str(why)
else:
    raise AssertionError("jnp.sum took a list")
assert jnp.sum(jnp.array([1, 2, 3])) == np.sum([1, 2, 3]) == 6

# %% [markdown]
# ## 4. From scratch [S1-019] (must-read)
# ### Softmax [S1-020] (must-read)
# Softmax makes probabilities of logits: p_v = exp(x_v) / sum over u of exp(x_u).
#
# **Claim.** As written it fails: float32 ends at 3.4e38 = exp(88.7), so a logit of 1000 gives inf / inf = NaN. But a
# constant c taken off all logits cancels, as exp(x - c) = exp(x) / exp(c). With c the row's maximum no exponent is
# above 0 and the sum is at least 1: nothing overflows, nothing is divided by 0.
#
# ```
#   logits           1000    999    990       exp: inf    inf    inf        inf / inf = NaN
#   minus the max       0     -1    -10       exp: 1      0.368  0.00005    sum 1.368, p = 0.731 0.269 0.00003
# ```

# %%
def naive_softmax(x):
    e = np.exp(x)
    return e / e.sum(-1, keepdims=True)


def softmax(x):
    """(..., V) -> (..., V), rows sum to 1."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


assert np.abs(softmax(logits) - jax.nn.softmax(jax_logits)).max() < 1e-6
assert np.allclose(softmax(logits).sum(-1), 1) and np.allclose(softmax(logits), naive_softmax(logits))
large = np.array([1000, 999, 990], np.float32)
with np.errstate(over="ignore", invalid="ignore"):  # NumPy warns here; JAX would not
    assert np.isfinite(np.exp(np.float32(88.7))) and np.isinf(np.exp(np.float32(88.8)))
    assert np.isnan(naive_softmax(large)).all() and jnp.isnan(jnp.exp(large) / jnp.exp(large).sum()).all()
assert np.allclose(softmax(large), jax.nn.softmax(large)) and np.allclose(softmax(large), softmax(large - 1000))
print("softmax of 1000, 999, 990:", *(f"{p:.5f}" for p in softmax(large)))

# %% [markdown]
# ### Log-sum-exp and log-softmax [S2-042] (must-read)
# A loss needs log p. **Claim.** The logarithm of a softmax fails at the other end: a probability below 1e-45 is 0 in
# float32, and its logarithm is -inf. Take the logarithm on paper: log p_v = x_v - lse(x), with
# lse(x) = log of the sum of exp(x_u) = max + log of the sum of exp(x_u - max).

# %%
def logsumexp(x):
    """(..., V) -> (...)."""
    top = x.max(-1, keepdims=True)
    return (top + np.log(np.exp(x - top).sum(-1, keepdims=True)))[..., 0]


def log_softmax(x):
    return x - logsumexp(x)[..., None]


far = np.array([0, -200], np.float32)
with np.errstate(divide="ignore"):
    assert np.log(softmax(far))[1] == -np.inf
assert log_softmax(far)[1] == -200.0 == jax.nn.log_softmax(far)[1]
with np.errstate(over="ignore"):
    assert np.log(np.exp(large).sum()) == np.inf  # overflows as written
assert np.isclose(logsumexp(large), jax.nn.logsumexp(large)) and np.isclose(logsumexp(large), 1000.3133)
assert np.allclose(logsumexp(logits), jax.nn.logsumexp(jax_logits, axis=-1), atol=1e-5)
assert np.allclose(log_softmax(logits), jax.nn.log_softmax(jax_logits), atol=1e-5)

# %% [markdown]
# **Claim.** `model.cross_entropy`, -log p of the label, is written so. Its gradient is softmax - one-hot: pull up the
# label's logit by what its probability lacks, push down the others by what they have. It never exceeds 1, even where
# the loss is 1000.

# %%
def total_loss(logits, labels):
    return model.cross_entropy(logits, labels).sum()


gradient = jax.grad(total_loss)(jax_logits, jnp.asarray(labels))
assert np.allclose(gradient, softmax(logits) - np.eye(V)[labels], atol=1e-6)
by_jax_nn = jax.grad(lambda x: -jax.nn.log_softmax(x)[jnp.arange(N), labels].sum())(jax_logits)
assert np.allclose(gradient, by_jax_nn, atol=1e-6)

wrong, label = jnp.array([[1000.0, 0.0]]), jnp.array([1])
assert total_loss(wrong, label) == 1000.0
assert jax.grad(total_loss)(wrong, label).tolist() == [[1.0, -1.0]]

# %% [markdown]
# **Claim.** A logit of -inf says "impossible", and one of them is fine: exp(-inf) = 0. A row of nothing else has no
# probabilities: -inf minus the maximum, -inf, is NaN, in `jax.nn.softmax` too. `jax.nn.logsumexp` gives -inf, the
# logarithm of 0, but its gradient is NaN. Where a mask can empty a row, decide what such a row shall be, and keep inf
# out of the subtraction: here it is all zeros, as with `jax.nn.softmax(x, where=mask)`.

# %%
def masked_softmax(x, mask):
    """Softmax over the entries where mask is true, 0 elsewhere, and a row of zeros where there are none."""
    top = jnp.where(mask, x, jnp.finfo(x.dtype).min).max(-1, keepdims=True)
    e = jnp.where(mask, jnp.exp(jnp.where(mask, x - top, 0)), 0)  # else a large masked x: inf, gradient NaN
    total = e.sum(-1, keepdims=True)
    return e / jnp.where(total > 0, total, 1)


none = jnp.full((1, 3), -jnp.inf)
assert np.allclose(jax.nn.softmax(jnp.array([0.0, -jnp.inf, 0.0])), [0.5, 0, 0.5])
assert jnp.isnan(jax.nn.softmax(none)).all() and jnp.isnan(jax.nn.log_softmax(none)).all()
assert jax.nn.logsumexp(none) == -jnp.inf and jnp.isnan(jax.grad(jax.nn.logsumexp)(none)).all()

scores = jnp.concatenate([none, jnp.array([[1.0, 1000.0, 3.0]])])
mask = jnp.array([[False, False, False], [True, False, True]])
assert np.allclose(masked_softmax(scores, mask), [[0, 0, 0], [0.11920292, 0, 0.88079708]])
assert np.allclose(masked_softmax(scores, mask), jax.nn.softmax(scores, where=mask))
assert jnp.isfinite(jax.grad(lambda x: masked_softmax(x, mask)[:, 2].sum())(scores)).all()

# %% [markdown]
# ### One-hot [S1-024a] (must-read)
# **Claim.** Three ways to write a label as a row with a single 1: rows of the identity matrix, a comparison with
# 0 ... V-1 by broadcasting, `jax.nn.one_hot`. They agree on valid labels. On others the comparison and `jax.nn.one_hot`
# give a row of zeros, which drops the example from a sum; the identity does not: in NumPy -1 is the last class and V an
# error, in JAX V clamps to the last class.

# %%
one_hot = (labels[:, None] == np.arange(V)).astype(np.float32)  # (N, 1) against (V,)
assert np.array_equal(one_hot, np.eye(V)[labels])
assert np.array_equal(one_hot, jax.nn.one_hot(labels, V))
assert np.array_equal(one_hot.argmax(1), labels)  # the way back

invalid = jnp.array([-1, V])
assert not jax.nn.one_hot(invalid, V).any() and not (invalid[:, None] == jnp.arange(V)).any()
assert np.eye(V)[-1].argmax() == V - 1 and jnp.eye(V)[invalid].argmax(1).tolist() == [V - 1, V - 1]

# %% [markdown]
# **Claim.** Multiplying by a one-hot row and summing picks one entry, as `take_along_axis` does by index: the same
# cross-entropy. The index reads N numbers, the product N · V. And one-hot as a matrix sums by class.

# %%
by_product = -(one_hot * log_softmax(logits)).sum(1)
by_index = -np.take_along_axis(log_softmax(logits), labels[:, None], axis=1)[:, 0]
assert np.allclose(by_product, by_index) and np.allclose(by_index, model.cross_entropy(jax_logits, labels), atol=1e-5)
print(f"cross-entropy of the untrained network {by_index.mean():.2f} nats; of equal logits log {V} = {np.log(V):.2f}")
assert np.allclose(model.cross_entropy(jnp.zeros((4, V)), jnp.arange(4)), np.log(V))
assert np.array_equal(np.einsum("nv->v", one_hot), np.bincount(labels, minlength=V))

# %% [markdown]
# ## 5. Twelve exercises in NumPy [S1-016] (optional)
# In the style of rougier/numpy-100 (github.com/rougier/numpy-100, MIT licence), with tasks of our own. None needs a
# loop. `rng` below makes test data.

# %%
rng = np.random.default_rng(0)

# %% [markdown]
# ### Exercise 1: batches
# `batches(x, B)`: (N, ...) -> (N // B, B, ...) without copying. The last N % B examples are left out.

# %%
# Your answer
def batches(x, B):
    raise NotImplementedError


# %%
# Self-check (each runs on your answer once it is written, on the solution until then)
def check_batches(f):
    cut = f(images, 100)
    assert cut.shape == (N // 100, 100, 28, 28), "N // B batches of B, the other axes as they are"
    assert np.array_equal(cut[3, 7], images[307]), "batch 3 begins with image 300"
    assert np.shares_memory(cut, images), "a slice and a reshape are views: nothing needs copying"


# %% [markdown]
# ### Exercise 2: tiles
# `tiles(image, k)`: (H, W) -> (H / k, W / k, k, k), the k x k tiles that the image is laid out in. k divides H and W.

# %%
# Your answer
def tiles(image, k):
    raise NotImplementedError


# %%
# Self-check
def check_tiles(f):
    image = np.arange(4 * 6).reshape(4, 6)
    cut = f(image, 2)
    assert cut.shape == (2, 3, 2, 2), "2 rows of 3 tiles"
    assert cut[1, 2].tolist() == [[16, 17], [22, 23]], "tile (1, 2) is image[2:4, 4:6]: split both axes, then swap"


# %% [markdown]
# ### Exercise 3: windows
# `windows(image, k)`: (H, W) -> (H - k + 1, W - k + 1, k, k), all k x k windows of an image, overlapping, as a view.
# (`np.lib.stride_tricks` has two functions for it: one safe, one that believes any strides you give it.)

# %%
# Your answer
def windows(image, k):
    raise NotImplementedError


# %%
# Self-check
def check_windows(f):
    for image in (images[0], images[0][::2, ::2]):
        H, W = image.shape
        seen = f(image, 3)
        assert seen.shape == (H - 2, W - 2, 3, 3), "a window fits H - k + 1 times"
        assert np.array_equal(seen[5, 4], image[5:8, 4:7]), "window (i, j) is image[i:i+k, j:j+k], for a view as well"
        assert np.shares_memory(seen, image), "windows overlap in memory: no copy"


# %% [markdown]
# ### Exercise 4: moving average
# `moving_average(losses, k)`: (T,) -> (T - k + 1,), the mean of each k neighbours, in work that does not grow with k.

# %%
# Your answer
def moving_average(losses, k):
    raise NotImplementedError


# %%
# Self-check
def check_moving_average(f):
    means = f(np.array([1.0, 2.0, 6.0, 4.0]), 2)
    assert means.shape == (3,), "only whole windows: T - k + 1 of them"
    assert np.allclose(means, [1.5, 4.0, 5.0]), "means of (1, 2), (2, 6), (6, 4)"
    losses = rng.random(50)
    assert np.allclose(f(losses, 1), losses), "k = 1 changes nothing"
    assert np.allclose(f(losses, 50), [losses.mean()]), "k = T gives the mean"


# %% [markdown]
# ### Exercise 5: shift
# `shift(image, dy, dx)`: the image moved down by dy and right by dx (up and left if negative); what moves in is 0.
# |dy| < H, |dx| < W.

# %%
# Your answer
def shift(image, dy, dx):
    raise NotImplementedError


# %%
# Self-check
def check_shift(f):
    image = np.arange(1, 10).reshape(3, 3)
    assert f(image, 1, 0).tolist() == [[0, 0, 0], [1, 2, 3], [4, 5, 6]], "down by 1: zeros come in, nothing comes round"
    assert f(image, -1, 2).tolist() == [[0, 0, 4], [0, 0, 7], [0, 0, 0]], "up by 1, right by 2"
    assert np.array_equal(f(image, 0, 0), image) and image[0, 0] == 1, "no shift, and the image itself is unchanged"


# %% [markdown]
# ### Exercise 6: bounding box
# `bounding_box(image)`: (top, bottom, left, right), the smallest so that image[top:bottom, left:right] has all pixels
# that are not 0; (0, 0, 0, 0) for an empty image.

# %%
# Your answer
def bounding_box(image):
    raise NotImplementedError


# %%
# Self-check
def check_bounding_box(f):
    image = np.zeros((6, 8), np.uint8)
    assert tuple(f(image)) == (0, 0, 0, 0), "an empty image"
    image[2, 3] = image[4, 3] = 1
    assert tuple(f(image)) == (2, 5, 3, 4), "bottom and right are exclusive, as in a slice"
    top, bottom, left, right = f(images[0])
    assert images[0][top:bottom, left:right].sum() == images[0].sum(), "all the ink is inside"


# %% [markdown]
# ### Exercise 7: standardise
# `standardise(images)`: (N, H, W) -> float32 of the same shape, each image with mean 0 and standard deviation 1. An
# image of one colour becomes 0.

# %%
# Your answer
def standardise(images):
    raise NotImplementedError


# %%
# Self-check
def check_standardise(f):
    some = images[:5].copy()
    some[4] = 7
    done = f(some)
    assert done.shape == some.shape and done.dtype == np.float32, "float32, the same shape"
    assert np.allclose(done[:4].mean((1, 2)), 0, atol=1e-5), "each image has mean 0, not all of them together"
    assert np.allclose(done[:4].std((1, 2)), 1, atol=1e-4), "each image has standard deviation 1"
    assert not done[4].any(), "an image of one colour becomes 0, not NaN"


# %% [markdown]
# ### Exercise 8: nearest neighbour
# `nearest(images, queries)`: uint8 (N, P) and (Q, P) -> (Q,), the index of the image nearest to each query.
# Mind what uint8 does when you subtract.

# %%
# Your answer
def nearest(images, queries):
    raise NotImplementedError


# %%
# Self-check
def check_nearest(f):
    assert f(np.array([[0], [100]], np.uint8), np.array([[30], [90]], np.uint8)).tolist() == [0, 1], \
        "30 is nearest to 0, 90 to 100; in uint8 0 - 30 is 226 and squares are taken modulo 256"
    flat = images[:200].reshape(200, -1)
    assert np.array_equal(f(flat, flat[50:60]), np.arange(50, 60)), "each image is nearest to itself"
    found = f(images.reshape(N, -1), digits.test_images.reshape(len(digits.test_images), -1))
    right = (labels[found] == digits.test_labels).mean()
    assert right > 0.95, f"the neighbour's label is right for {right:.3f} of the test images; it should be over 0.95"


# %% [markdown]
# ### Exercise 9: top k
# `top_k(scores, k)`: (R, M) -> (R, k), the columns of each row's k largest scores, the largest first, without sorting
# all M. (`np.argpartition` puts the k largest to one side, in any order.)

# %%
# Your answer
def top_k(scores, k):
    raise NotImplementedError


# %%
# Self-check
def check_top_k(f):
    by_class = logits.T  # (V, N): which images look most like each class?
    for k in (1, 20, N):
        best = f(by_class, k)
        assert best.shape == (V, k) and np.issubdtype(best.dtype, np.integer), "k columns of each row"
        assert all(len(set(row)) == k for row in best.tolist()), "k different columns"
        found = np.take_along_axis(by_class, best, axis=1)
        assert np.array_equal(found, -np.sort(-by_class, axis=1)[:, :k]), "the k largest, the largest first"


# %% [markdown]
# ### Exercise 10: confusion matrix
# `confusion(labels, predictions, V)`: (V, V) integers, how many examples of class i (row) were taken for j (column).

# %%
# Your answer
def confusion(labels, predictions, V):
    raise NotImplementedError


# %%
# Self-check
def check_confusion(f):
    counted = f(np.array([0, 0, 0, 1]), np.array([0, 2, 2, 1]), 3)
    assert counted.tolist() == [[1, 0, 2], [0, 1, 0], [0, 0, 0]], "the pair (0, 2) occurs twice: count it twice"
    counted = f(labels, predictions, V)
    assert counted.sum() == N and np.trace(counted) == (labels == predictions).sum(), "the diagonal holds what is right"
    assert np.array_equal(counted.sum(1), np.bincount(labels, minlength=V)), "rows are labels"


# %% [markdown]
# ### Exercise 11: mean image of each class
# `class_means(x, labels, V)`: (N, P) -> float64 (V, P), the mean of each class's examples; 0 for one that has none.

# %%
# Your answer
def class_means(x, labels, V):
    raise NotImplementedError


# %%
# Self-check
def check_class_means(f):
    means = f(np.array([[1.0], [3.0], [7.0]]), np.array([2, 2, 0]), 4)
    assert means.tolist() == [[7.0], [0.0], [2.0], [0.0]], "class 2 has mean 2, class 0 has 7; 1 and 3 are empty"
    means = f(data.flatten(images), labels, V)
    assert means.shape == (V, 784), "one mean a class"
    assert np.allclose(means[3], data.flatten(images)[labels == 3].mean(0), atol=1e-5), "the mean of the threes"


# %% [markdown]
# ### Exercise 12: unshuffle
# An epoch shuffles with `shuffled = x[order]`. `unshuffle(shuffled, order)` gives x back.

# %%
# Your answer
def unshuffle(shuffled, order):
    raise NotImplementedError


# %%
# Self-check
def check_unshuffle(f):
    x = np.array(["a", "b", "c"])
    order = np.array([1, 2, 0])
    assert f(x[order], order).tolist() == ["a", "b", "c"], "shuffled[i] was x[order[i]]: send it back there"
    order = rng.permutation(N)
    assert np.array_equal(f(images[order], order), images), "images come back as well"


# %% [markdown]
# ## Rules
# | you want, or see | rule |
# |---|---|
# | a loop over elements | one operation on the array; align shapes from the right with `None` or `keepdims` |
# | (N, N) where (N,) was meant | a stray axis was broadcast: assert shapes |
# | no copy | slice, transpose, reshape of what lies in order; `np.shares_memory` tells |
# | one entry a row | `x[np.arange(N), index]`, `take_along_axis`, or one-hot times x and a sum |
# | sums where indices repeat | `np.add.at`, `np.bincount`, `x.at[i].add`; never `x[i] += 1` |
# | NonConcreteBooleanIndexError | keep the shape: `jnp.where(mask, x, 0)` |
# | "JAX arrays are immutable" | `x = x.at[i].set(value)`; donate x to reuse its memory |
# | a plausible wrong number at the edge | JAX clamps reads and drops writes out of bounds: check indices beforehand |
# | fewer digits than expected | 64 bits became 32: `jax.enable_x64` |
# | NaN from large logits | subtract the row's maximum before `exp` |
# | log of a probability is -inf | `log_softmax`, never `log(softmax)` |
# | NaN where a mask leaves nothing | choose a value for empty rows; `where` before and after the `exp` |
# | a label out of range | one-hot gives zeros, indexing clamps: mask such examples by name |

# %% [markdown]
# ## Solutions

# %%
def batches_solution(x, B):
    return x[:len(x) // B * B].reshape(-1, B, *x.shape[1:])


def tiles_solution(image, k):
    H, W = image.shape
    return image.reshape(H // k, k, W // k, k).swapaxes(1, 2)


def windows_solution(image, k):
    return np.lib.stride_tricks.sliding_window_view(image, (k, k))


def moving_average_solution(losses, k):
    sums = np.cumsum(np.concatenate([[0.0], losses]))  # sums[i]: of the first i
    return (sums[k:] - sums[:-k]) / k


def shift_solution(image, dy, dx):
    H, W = image.shape
    moved = np.zeros_like(image)
    moved[max(dy, 0):H + min(dy, 0), max(dx, 0):W + min(dx, 0)] = \
        image[max(-dy, 0):H + min(-dy, 0), max(-dx, 0):W + min(-dx, 0)]
    return moved


def bounding_box_solution(image):
    rows, columns = np.flatnonzero(image.any(1)), np.flatnonzero(image.any(0))
    if len(rows) == 0:
        return 0, 0, 0, 0
    return rows[0], rows[-1] + 1, columns[0], columns[-1] + 1


def standardise_solution(images):
    centred = images.astype(np.float32) - images.mean((1, 2), keepdims=True, dtype=np.float32)
    std = centred.std((1, 2), keepdims=True)
    return centred / np.where(std > 0, std, 1)


def nearest_solution(images, queries):
    points, queries = images.astype(np.float32), queries.astype(np.float32)
    return ((points**2).sum(1) - 2 * queries @ points.T).argmin(1)  # |query|^2 is the same for all: left out


def top_k_solution(scores, k):
    largest = np.argpartition(-scores, k - 1, axis=1)[:, :k]
    order = np.argsort(-np.take_along_axis(scores, largest, axis=1), axis=1)
    return np.take_along_axis(largest, order, axis=1)


def confusion_solution(labels, predictions, V):
    counts = np.zeros((V, V), int)
    np.add.at(counts, (labels, predictions), 1)
    return counts


def class_means_solution(x, labels, V):
    sums = np.zeros((V, x.shape[1]))
    np.add.at(sums, labels, x)
    return sums / np.maximum(np.bincount(labels, minlength=V), 1)[:, None]


def unshuffle_solution(shuffled, order):
    x = np.empty_like(shuffled)
    x[order] = shuffled
    return x


# %%
try:
    check_batches(batches)
except NotImplementedError:
    check_batches(batches_solution)

# %%
try:
    check_tiles(tiles)
except NotImplementedError:
    check_tiles(tiles_solution)

# %%
try:
    check_windows(windows)
except NotImplementedError:
    check_windows(windows_solution)

# %%
try:
    check_moving_average(moving_average)
except NotImplementedError:
    check_moving_average(moving_average_solution)

# %%
try:
    check_shift(shift)
except NotImplementedError:
    check_shift(shift_solution)

# %%
try:
    check_bounding_box(bounding_box)
except NotImplementedError:
    check_bounding_box(bounding_box_solution)

# %%
try:
    check_standardise(standardise)
except NotImplementedError:
    check_standardise(standardise_solution)

# %%
try:
    check_nearest(nearest)
except NotImplementedError:
    check_nearest(nearest_solution)

# %%
try:
    check_top_k(top_k)
except NotImplementedError:
    check_top_k(top_k_solution)

# %%
try:
    check_confusion(confusion)
except NotImplementedError:
    check_confusion(confusion_solution)

# %%
try:
    check_class_means(class_means)
except NotImplementedError:
    check_class_means(class_means_solution)

# %%
try:
    check_unshuffle(unshuffle)
except NotImplementedError:
    check_unshuffle(unshuffle_solution)
