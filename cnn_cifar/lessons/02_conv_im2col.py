# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---
# %% [markdown]
# # Convolution as a product of matrices: im2col
#
# After this lesson you can write a convolution in NumPy with any stride and padding, derive both of its gradients by
# hand, say what unfolding the image costs in memory, and read what JAX does instead.
#
# Uses this project's `model.py` (`conv`, `forward`).
#
# Legend: B batch, H, W height and width, Ho, Wo of the output, I, O channels in and out, kh × kw the kernel, u, v a
# position in it, s stride. A *patch* is what one output position sees: kh · kw · I numbers.

# %%
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent if "__file__" in globals() else Path.cwd()
sys.path[:0] = [str(PROJECT), str(PROJECT.parent)]  # the project's files, and common/ beside it

# %%
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import model

jax.config.update("jax_default_device", jax.devices("cpu")[0])  # GPUs and TPUs may round the factors of products
rng = np.random.default_rng(0)


def relative(got, want):
    """‖got - want‖ / ‖want‖."""
    assert np.shape(got) == np.shape(want), (np.shape(got), np.shape(want))
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def random(*shape):
    return rng.normal(size=shape).astype(np.float32)


# %% [markdown]
# ## What a convolution layer computes
# ```
#   y[b, i, j, o] = sum over u, v, c of  x[b, s i + u, s j + v, c] · w[u, v, c, o]        x with its padding around
# ```
# The kernel is laid on the image without being turned over: mathematics calls that a *cross-correlation*, and
# `np.convolve`, which does turn it over, differs.
#
# **Claim.** Those seven loops give what `lax.conv_general_dilated` gives. Its axes have names: N batch, H, W, C
# channels for images, and H, W, I, O for kernels. Images here are NHWC, kernels HWIO.

# %%
def by_definition(x, w, s):
    (B, H, W, I), (kh, kw, _, O) = x.shape, w.shape
    y = np.zeros((B, (H - kh) // s + 1, (W - kw) // s + 1, O))
    for b, i, j, o, u, v, c in np.ndindex(*y.shape, kh, kw, I):
        y[b, i, j, o] += x[b, s * i + u, s * j + v, c] * w[u, v, c, o]
    return y


def lax_conv(x, w, s=1, pads=((0, 0), (0, 0))):
    """pads: ((top, bottom), (left, right)), or "SAME" or "VALID"."""
    return lax.conv_general_dilated(x, w, (s, s), pads, dimension_numbers=("NHWC", "HWIO", "NHWC"))


x, w = random(2, 6, 5, 3), random(3, 2, 3, 4)
for s in (1, 2):
    assert relative(lax_conv(x, w, s), by_definition(x, w, s)) < 1e-6

signal, taps = random(10), random(3)
one_d = lax_conv(signal.reshape(1, 1, 10, 1), taps.reshape(1, 3, 1, 1)).reshape(-1)
assert relative(one_d, np.correlate(signal, taps)) < 1e-6
assert relative(one_d, np.convolve(signal, taps, "valid")) > 0.1  # turned over
assert relative(one_d, np.convolve(signal, taps[::-1], "valid")) < 1e-6

# %% [markdown]
# **Claim.** Without `dimension_numbers` the axes are taken to be NCHW and OIHW, as in PyTorch. An NHWC image then has
# its height for channels: mostly an error, but where the sizes happen to fit, a wrong result.

# %%
try:
    lax.conv_general_dilated(x, w, (1, 1), "VALID")
except (TypeError, ValueError) as why:
    print(str(why)[:100])
    assert "feature dimension size" in str(why)
else:
    raise AssertionError("NHWC was accepted as NCHW")
square, kernel = random(2, 3, 3, 3), random(3, 3, 3, 3)  # every axis of length 3: nothing to notice
silent = lax.conv_general_dilated(square, kernel, (1, 1), "SAME")
assert silent.shape == lax_conv(square, kernel, 1, "SAME").shape
assert relative(silent, lax_conv(square, kernel, 1, "SAME")) > 0.1

# %% [markdown]
# ### Stride and padding
# **Claim.** With `lo` and `hi` zeros at the two ends of an axis of n, a kernel of k and stride s, the output has
# (n + lo + hi - k) // s + 1 positions. "VALID" means no padding. "SAME" means ceil(n / s) positions: as many zeros as
# that takes, and where the number is odd, the odd one comes last.

# %%
def same_pads(n, k, s):
    """The (lo, hi) zeros of "SAME"."""
    total = max((-(-n // s) - 1) * s + k - n, 0)
    return total // 2, total - total // 2


for n, k, s in itertools.product(range(1, 13), range(1, 6), range(1, 4)):
    lo, hi = same_pads(n, k, s)
    assert [(lo, hi)] == lax.padtype_to_pads((n,), (k,), (s,), "SAME")
    assert (n + lo + hi - k) // s + 1 == -(-n // s)

# %% [markdown]
# **Claim.** So a 3 × 3 kernel with stride 2 on an even image has its padding on one side, (0, 1). PyTorch's `padding=1`
# is (1, 1). The outputs have the same shape and other numbers: the kernel sits one pixel further. That is the classic
# fault in porting a network.
#
# ```
#   n = 6, k = 3, s = 2      "SAME"      [x0 x1 x2] x3 x4 x5  .         first window on x0 x1 x2
#                            padding=1   [. x0 x1] x2 x3 x4 x5 .        first window on  0 x0 x1
# ```

# %%
assert same_pads(6, 3, 2) == (0, 1) and same_pads(6, 3, 1) == (1, 1) and same_pads(7, 3, 2) == (1, 1)
even, kernel = random(1, 6, 6, 2), random(3, 3, 2, 2)
same, torch_like = lax_conv(even, kernel, 2, "SAME"), lax_conv(even, kernel, 2, ((1, 1), (1, 1)))
assert same.shape == torch_like.shape and relative(same, torch_like) > 0.1

# %% [markdown]
# ## im2col: patches become rows [S1-022] (must-read)
# The sum over u, v, c is a scalar product: of a patch, written as one row, with a column of the kernel. Write every
# patch as a row, and the whole layer is one product of matrices, which libraries do near the peak of the machine.
#
# ```
#   image 4 x 4, one channel, kernel 2 x 2, stride 1            P (Ho Wo, kh kw I)
#
#      a b c d                                                  a b e f   <- patch at (0, 0)
#      e f g h                                                  b c f g   <- patch at (0, 1)
#      i j k l        -- im2col -->                             c d g h
#      m n o p                                                  e f i j   <- patch at (1, 0)
#                                                               ...             9 rows of 4 for 16 pixels
#
#   y (Ho Wo, O)  =  P  @  w.reshape(kh kw I, O)
# ```
#
# **Claim.** `sliding_window_view` shows all windows without a copy (the same memory, read at overlapping strides); a
# stride keeps every s-th. Making rows of them is the copy. The columns of P must be in the order of the kernel's rows:
# u, v, c.

# %%
def im2col(x, kh, kw, s, pads):
    """(B, H, W, I) -> (B Ho Wo, kh kw I), and (B, Ho, Wo)."""
    x = np.pad(x, ((0, 0), *pads, (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (kh, kw), axis=(1, 2))[:, ::s, ::s]  # (B, Ho, Wo, I, kh, kw)
    B, Ho, Wo = windows.shape[:3]
    return windows.transpose(0, 1, 2, 4, 5, 3).reshape(B * Ho * Wo, -1), (B, Ho, Wo)


def numpy_conv(x, w, s, pads):
    kh, kw, _, O = w.shape
    P, outer = im2col(x, kh, kw, s, pads)
    return (P @ w.reshape(-1, O)).reshape(*outer, O)


letters = np.arange(16.0).reshape(1, 4, 4, 1)
windows = np.lib.stride_tricks.sliding_window_view(letters, (2, 2), axis=(1, 2))
assert np.shares_memory(windows, letters) and windows.size == 9 * 4  # 36 numbers in the memory of 16
P, _ = im2col(letters, 2, 2, 1, ((0, 0), (0, 0)))
assert P.nbytes == 36 * letters.itemsize
print(P[:4].astype(int))

# %% [markdown]
# **Claim.** It equals `lax.conv_general_dilated` for any kernel, stride and padding.

# %%
def pads_of(x, w, s, pads):
    """Padding by name or in numbers -> ((top, bottom), (left, right))."""
    return tuple(lax.padtype_to_pads(x.shape[1:3], w.shape[:2], (s, s), pads)) if isinstance(pads, str) else pads


CASES = [  # H, W, kh, kw, s, pads
    (6, 6, 3, 3, 1, "SAME"),
    (6, 6, 3, 3, 1, "VALID"),
    (8, 6, 3, 3, 2, "SAME"),
    (7, 9, 5, 2, 3, ((2, 1), (0, 3))),
    (8, 8, 4, 4, 4, "VALID"),
    (5, 5, 1, 1, 1, "VALID"),
]
B, I, O = 4, 3, 5
print(" H  W  kernel  stride  padding                y's shape      error")
for H, W, kh, kw, s, named in CASES:
    x, w = random(B, H, W, I), random(kh, kw, I, O)
    pads = pads_of(x, w, s, named)
    y = numpy_conv(x, w, s, pads)
    error = relative(y, lax_conv(x, w, s, named))
    print(f"{H:2} {W:2}   {kh} x {kw}  {s:6}  {str(pads):20} {str(y.shape):15} {error:8.1e}")
    assert error < 1e-6

# %% [markdown]
# **Claim.** A 1 × 1 convolution is a product of matrices already: its patches are the pixels. A kernel as large as its
# stride cuts the image into tiles that don't overlap (a vision transformer's first layer): P is the image in another
# order.

# %%
x = random(2, 8, 8, 3)
assert np.array_equal(im2col(x, 1, 1, 1, ((0, 0), (0, 0)))[0], x.reshape(-1, 3))
assert np.array_equal(np.sort(im2col(x, 4, 4, 4, ((0, 0), (0, 0)))[0], axis=None), np.sort(x, axis=None))

# %% [markdown]
# **Claim.** The order of the columns is a convention. `lax.conv_general_dilated_patches` puts the channel first, also
# for NHWC images: c, u, v. Multiplied with `w.reshape(-1, O)` its patches give a wrong result of the right shape.

# %%
x, w = random(2, 6, 6, 3), random(3, 3, 3, 5)
P, outer = im2col(x, 3, 3, 1, ((1, 1), (1, 1)))
channel_first = lax.conv_general_dilated_patches(x, (3, 3), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
assert np.array_equal(channel_first.reshape(-1, 3, 9).swapaxes(1, 2).reshape(P.shape), P)
wrong, right = (channel_first @ w.reshape(-1, 5), channel_first @ w.transpose(2, 0, 1, 3).reshape(-1, 5))
assert relative(wrong, lax_conv(x, w, 1, "SAME")) > 0.1
assert relative(right, lax_conv(x, w, 1, "SAME")) < 1e-6

# %% [markdown]
# ### The price: memory
# **Claim.** Each number of the image stands in P once for every window that covers it: kh · kw times with stride 1 and
# "SAME", kh · kw / s² times with stride s. A 3 × 3 layer's patches are nine times its input.

# %%
print("kernel  stride   image bytes   patches bytes   factor")
for k, s in ((1, 1), (3, 1), (5, 1), (7, 1), (3, 3), (4, 2)):
    x = random(2, 12, 12, 8)
    P, _ = im2col(x, k, k, s, (same_pads(12, k, s),) * 2)
    print(f" {k} x {k} {s:7} {x.nbytes:13} {P.nbytes:15} {P.nbytes / x.nbytes:8.2f}")
    assert P.nbytes == x.nbytes * k * k / s**2

# %% [markdown]
# The project's layers, as `forward` calls them for a batch of 128. The convolutions are found in the jaxpr.

# %%
def equations(jaxpr, name):
    """All equations of that primitive, those of called functions included."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == name:
            yield eqn
        for value in eqn.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(inner := getattr(item, "jaxpr", item), "eqns"):
                    yield from equations(inner, name)


def convolutions(f, *args):
    return list(equations(jax.make_jaxpr(f)(*args).jaxpr, "conv_general_dilated"))


params, stats = jax.eval_shape(lambda: (model.init_params(jax.random.key(0)), model.init_stats()))
images = jax.ShapeDtypeStruct((128, 32, 32, 3), jnp.float32)
layers = convolutions(lambda p, s, x: model.forward(p, s, x, False), params, stats, images)
assert len(layers) == len(model.layers_of()) == 8
total = 0
print("layer   image                 MiB   patches MiB   GFLOP")
for name, eqn in zip(model.layers_of(), layers):
    (B, H, W, I), (kh, kw, _, O) = (v.aval.shape for v in eqn.invars)
    image, patches = 4 * B * H * W * I, 4 * B * H * W * kh * kw * I
    total += patches
    print(f"{name:7} {str((B, H, W, I)):18} {image / 2**20:7.1f} {patches / 2**20:11.1f} "
          f"{2 * B * H * W * kh * kw * I * O / 1e9:9.2f}")
    assert patches == 9 * image
print(f"patches of all layers, if kept for the backward pass: {total / 2**20:.0f} MiB")

# %% [markdown]
# **Claim.** XLA's convolution does not build P. The compiled program's own account of temporary memory shows it: with
# patches as nine shifted slices side by side, more than P's bytes; for the convolution, less than the image's nine.

# %%
def shifts(x):
    """3 x 3 patches of "SAME" in jax.numpy: (B, H, W, I) -> (B, H, W, 9 I)."""
    B, H, W, I = x.shape
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return jnp.concatenate([padded[:, u:u + H, v:v + W] for u, v in np.ndindex(3, 3)], axis=-1)


def conv_by_shifts(x, w):
    return shifts(x) @ w.reshape(-1, w.shape[-1])


x, w = random(16, 16, 16, 32), random(3, 3, 32, 32)
temporary = {}
for f in (conv_by_shifts, model.conv):
    program = jax.jit(f).lower(x, w).compile()
    temporary[f.__name__] = program.memory_analysis().temp_size_in_bytes
    assert relative(program(x, w), lax_conv(x, w, 1, "SAME")) < 1e-6
print(f"image {x.nbytes} bytes; temporaries:", temporary)
assert temporary["conv_by_shifts"] >= 9 * x.nbytes
assert temporary["conv"] < 3 * x.nbytes

# %% [markdown]
# ### The gradient by hand
# Let g be the gradient of the loss with respect to y, as rows (B Ho Wo, O). The layer is y = P w, so, as for any linear
# layer,
#
# ```
#   dw = P^T g          (kh kw I, O)       every patch times what its output position wanted
#   dP = g w^T          (B Ho Wo, kh kw I)
#   dx = col2im(dP)     (B, H, W, I)       each pixel collects from all the patches that it stands in
# ```
#
# im2col copies a pixel to several places; its transpose adds up what comes back from them. So col2im goes through
# the kernel's positions u, v: all patches' entries at (u, v) land s apart, on different pixels, and `+=` on that slice
# adds each once.
#
# **Claim.** col2im is im2col's transpose: ⟨im2col(x), Q⟩ = ⟨x, col2im(Q)⟩ for any Q. And the two gradients equal those
# of `lax.conv_general_dilated` by `jax.vjp`.

# %%
def col2im(Q, shape, kh, kw, s, pads):
    """The transpose of im2col: (B Ho Wo, kh kw I) -> (B, H, W, I) = shape."""
    B, H, W, I = shape
    (top, bottom), (left, right) = pads
    padded = np.zeros((B, top + H + bottom, left + W + right, I), Q.dtype)
    Ho, Wo = (top + H + bottom - kh) // s + 1, (left + W + right - kw) // s + 1
    Q = Q.reshape(B, Ho, Wo, kh, kw, I)
    for u, v in np.ndindex(kh, kw):
        padded[:, u:u + s * Ho:s, v:v + s * Wo:s] += Q[:, :, :, u, v]
    return padded[:, top:top + H, left:left + W]


def numpy_gradients(x, w, g, s, pads):
    """(dx, dw) for the gradient g (B, Ho, Wo, O) of y."""
    kh, kw, _, O = w.shape
    P, _ = im2col(x, kh, kw, s, pads)
    rows = g.reshape(-1, O)
    return col2im(rows @ w.reshape(-1, O).T, x.shape, kh, kw, s, pads), (P.T @ rows).reshape(w.shape)


B, I, O = 4, 3, 5
print("kernel  stride   error of dx   error of dw")
for H, W, kh, kw, s, named in CASES:
    x, w = random(B, H, W, I), random(kh, kw, I, O)
    pads = pads_of(x, w, s, named)
    y, pull = jax.vjp(lambda x, w: lax_conv(x, w, s, named), x, w)
    g = random(*y.shape)
    P, _ = im2col(x.astype(float), kh, kw, s, pads)
    Q = rng.normal(size=P.shape)  # float64
    assert np.isclose(np.vdot(P, Q), np.vdot(x, col2im(Q, x.shape, kh, kw, s, pads)), rtol=1e-9, atol=1e-9)
    errors = [relative(mine, theirs) for mine, theirs in zip(numpy_gradients(x, w, g, s, pads), pull(g))]
    print(f" {kh} x {kw} {s:7} {errors[0]:13.1e} {errors[1]:13.1e}")
    assert max(errors) < 1e-6

# %% [markdown]
# **Claim.** JAX finds col2im by itself where the patches are built from slices: the transpose of a slice is a `pad`,
# and what meets in one place is added.

# %%
x = random(2, 6, 6, 3)
_, pull = jax.vjp(shifts, x)
Q = random(2, 6, 6, 27)
assert relative(pull(Q)[0], col2im(Q, x.shape, 3, 3, 1, ((1, 1), (1, 1)))) < 1e-6
names = [e.primitive.name for e in jax.make_jaxpr(pull)(Q).jaxpr.eqns]
print({name: names.count(name) for name in sorted(set(names))})
assert names.count("pad") >= 9 and names.count("add_any") == 8  # nine parts, added up

# %% [markdown]
# ### The gradients are convolutions, too
# No patches are needed for them either. dx at a pixel sums over the output positions that saw it: a convolution of g
# with the kernel turned over, I and O exchanged. A stride s leaves s - 1 zeros between g's entries (`lhs_dilation`).
# dw at (u, v) sums over all images and positions: a convolution whose "kernel" is g, the batch being its channels.
#
# **Claim.** For every case dx is that convolution. JAX uses just these: the jaxpr of both gradients has three
# convolutions with the forward one. (The forward one's *result* is not used, so XLA drops it.) Where x needs no
# gradient, as in the first layer, one is gone.

# %%
def dx_as_convolution(g, w, shape, s, pads):
    turned = w[::-1, ::-1].swapaxes(2, 3)
    back = []
    for n, k, out, (lo, _) in zip(shape[1:3], w.shape[:2], g.shape[1:3], pads):
        back.append((k - 1 - lo, n - 1 - (out - 1) * s + lo))  # what is cut off is negative
    return lax.conv_general_dilated(g, turned, (1, 1), back, lhs_dilation=(s, s),
                                    dimension_numbers=("NHWC", "HWIO", "NHWC"))


for H, W, kh, kw, s, named in CASES:
    x, w = random(B, H, W, I), random(kh, kw, I, O)
    y, pull = jax.vjp(lambda x, w: lax_conv(x, w, s, named), x, w)
    g = random(*y.shape)
    assert relative(dx_as_convolution(g, w, x.shape, s, pads_of(x, w, s, named)), pull(g)[0]) < 1e-6

x, w = random(2, 8, 8, 3), random(3, 3, 3, 5)
both, only_w = (convolutions(jax.grad(lambda x, w: lax_conv(x, w, 2, "SAME").sum(), argnums), x, w)
                for argnums in ((0, 1), 1))
assert len(both) == 3 and len(only_w) == 2
dilations = sorted((e.params["lhs_dilation"], e.params["rhs_dilation"]) for e in both)
print("dilations of image and kernel:", dilations)
assert dilations == [((1, 1), (1, 1)), ((1, 1), (2, 2)), ((2, 2), (1, 1))]  # forward, dw, dx

# %% [markdown]
# ## The project's `conv`
# **Claim.** `model.conv` is the case 3 × 3, stride 1, "SAME", in the dtype of the images: its value and both gradients
# are those derived above. In bfloat16 the kernel's gradient comes back in the kernel's own float32.

# %%
x, w, ones = random(4, 8, 8, 6), random(3, 3, 6, 5), ((1, 1), (1, 1))
y, pull = jax.vjp(model.conv, x, w)
g = random(*y.shape)
assert relative(y, numpy_conv(x, w, 1, ones)) < 1e-6
for got, want in zip(pull(g), numpy_gradients(x, w, g, 1, ones)):
    assert relative(got, want) < 1e-6

y16, pull16 = jax.vjp(model.conv, jnp.asarray(x, jnp.bfloat16), w)
dx16, dw16 = pull16(g.astype(jnp.bfloat16))
assert (y16.dtype, dx16.dtype, dw16.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)

# %% [markdown]
# **Claim.** It has a VJP of its own, for speed on CPUs. The forward pass keeps (x, w), the backward pass asks JAX for
# the convolution's ordinary gradients, and *barriers* keep XLA from fusing anything into them. (Without, XLA:CPU
# computes batch norm and ReLU again inside the transpose of x that dw starts with.) A custom VJP says nothing of
# forward mode, so `jax.jvp` refuses it.

# %%
_, plain_pull = jax.vjp(lambda x, w: lax_conv(x, w, 1, "SAME"), x, w)
assert all(relative(mine, plain) < 1e-6 for mine, plain in zip(pull(g), plain_pull(g)))
assert next(equations(jax.make_jaxpr(model.conv)(x, w).jaxpr, "optimization_barrier"), None)
try:
    jax.jvp(model.conv, (x, w), (x, w))
except TypeError as why:
    assert "can't apply forward-mode autodiff (jvp) to a custom_vjp function" in str(why)
else:
    raise AssertionError("forward mode went through a custom VJP")

# %% [markdown]
# **Claim.** Where I < O and the images are large, XLA:CPU's convolution for dw is slow, and dw is Pᵀ g after all,
# without P: its columns at one (u, v) are the image moved by (u, v), a copy as large as the image. Nine such products
# give the nine (I, O) parts of dw (`model.weight_gradient_by_taps`).
#
# ```
#   P    =  | x moved by (0, 0) | x moved by (0, 1) | ... | x moved by (2, 2) |        B H W rows, 9 I columns
#   dw[u, v]  =  (x moved by (u, v))^T  g                                              (I, B H W) times (B H W, O)
# ```

# %%
large, narrow = random(2, 16, 16, 3), random(3, 3, 3, 4)
large_y, large_pull = jax.vjp(model.conv, large, narrow)
large_g = random(*large_y.shape)
by_hand = numpy_gradients(large, narrow, large_g, 1, ones)[1]
assert relative(large_pull(large_g)[1], by_hand) < 1e-6
assert relative(model.weight_gradient_by_taps(large, large_g), by_hand) < 1e-6
products = list(equations(jax.make_jaxpr(model.weight_gradient_by_taps)(large, large_g).jaxpr, "dot_general"))
assert [[v.aval.shape for v in e.invars] for e in products] == 9 * [[(3, 512), (512, 4)]]  # B H W = 512
assert not convolutions(model.weight_gradient_by_taps, large, large_g)

# %% [markdown]
# **Claim.** What a backward pass costs shows in the compiled programs: y, dx and dw are three convolutions of the same
# FLOPs, so value and gradient cost three times the value. A custom VJP returns both gradients, yet where only dw is
# used XLA removes the other: one convolution.

# %%
def value(x, w, g):
    return model.conv(x, w)


def value_and_gradients(x, w, g):
    y, pull = jax.vjp(model.conv, x, w)
    return y, pull(g)


def dw_only(x, w, g):
    return jax.vjp(model.conv, x, w)[1](g)[1]


flops = {}
for f in (value, value_and_gradients, dw_only):
    program = jax.jit(f).lower(x, w, g).compile()
    flops[f.__name__] = program.cost_analysis()["flops"]
    print(f"{f.__name__:20} {program.as_text().count(' convolution(')} convolutions, {flops[f.__name__]:9.0f} FLOPs")
assert flops["value_and_gradients"] == 3 * flops["value"] and flops["dw_only"] == flops["value"]
inside = 3 * 8 - 2  # of the 3 · 8 pairs of a row and a kernel's row, two meet the padding, which is not counted
assert flops["value"] == 2 * 4 * inside**2 * 6 * 5

# %% [markdown]
# ## Exercise 1
# A *dilated* kernel looks at every d-th pixel: its k × k entries span (k - 1) d + 1 pixels. Write
# `dilated_im2col(x, k, dilation)`: (B, H, W, I) -> (B Ho Wo, k k I), stride 1, no padding, so that the product with
# `w.reshape(-1, O)` is the convolution with `rhs_dilation`.

# %%
# Your answer
def dilated_im2col(x, k, dilation):
    raise NotImplementedError


# %%
# Self-check (runs on your answer once it is written, on the solution until then)
def check_dilated_im2col(f):
    x = random(2, 9, 8, 3)
    for k, dilation in ((3, 1), (3, 2), (2, 3), (1, 4)):
        w, span = random(k, k, 3, 4), (k - 1) * dilation + 1
        P = f(x, k, dilation)
        rows = 2 * (9 - span + 1) * (8 - span + 1)
        assert P.shape == (rows, k * k * 3), f"k {k}, dilation {dilation}: {rows} rows of {k * k * 3}, not {P.shape}"
        want = lax.conv_general_dilated(x, w, (1, 1), "VALID", rhs_dilation=(dilation, dilation),
                                        dimension_numbers=("NHWC", "HWIO", "NHWC"))
        assert relative(P @ w.reshape(-1, 4), want.reshape(-1, 4)) < 1e-6, f"k {k}, dilation {dilation}: other numbers"


# %% [markdown]
# ## Exercise 2
# The other product of the backward pass can do without P-sized arrays as well. dP = g wᵀ has kh · kw parts, one for
# each (u, v), each (B, H, W, I). Write `image_gradient(w, g)` in `jax.numpy`: (3, 3, I, O), (B, H, W, O) ->
# (B, H, W, I), dx of a 3 × 3 "SAME" convolution with stride 1, without an array as large as P.

# %%
# Your answer
def image_gradient(w, g):
    raise NotImplementedError


# %%
# Self-check
def check_image_gradient(f):
    x, w, g = random(2, 7, 6, 3), random(3, 3, 3, 4), random(2, 7, 6, 4)
    want = jax.vjp(lambda x: lax_conv(x, w, 1, "SAME"), x)[1](g)[0]
    got = f(w, g)
    assert got.shape == x.shape, f"dx has the image's shape {x.shape}, not {got.shape}"
    assert relative(got, want) < 1e-5, "g at (i, j) goes back through w[u, v] to the pixel (i + u - 1, j + v - 1)"
    largest = max(v.aval.size for e in jax.make_jaxpr(f)(w, g).jaxpr.eqns for v in e.outvars)
    assert largest < 9 * x.size, f"an intermediate result has {largest} entries: P has {9 * x.size}"


# %% [markdown]
# ## Rules
# | you want | write | mind |
# |---|---|---|
# | a convolution of NHWC images | `dimension_numbers=("NHWC", "HWIO", "NHWC")` | by default NCHW, OIHW |
# | a mathematical convolution | the kernel turned over | layers compute a cross-correlation |
# | the output's size | (n + lo + hi - k) // s + 1 | "SAME": ceil(n / s), the odd zero last |
# | PyTorch's `padding=1` with stride 2 | `((1, 1), (1, 1))` | not "SAME", which is (0, 1) for even n |
# | convolution as a product of matrices | patches as rows, `w.reshape(-1, O)` | the order of columns is u, v, c |
# | a 1 × 1 convolution | `x @ w` | no patches needed |
# | the bytes of the patches | kh kw / s² times the image's | 9 times for 3 × 3 |
# | dw | Pᵀ g, or a product for each (u, v) without P | no dx for the first layer |
# | dx | col2im(g wᵀ): im2col's transpose | or a convolution with the kernel turned over, I and O exchanged |

# %% [markdown]
# ## Solutions

# %%
def dilated_im2col_solution(x, k, dilation):
    span = (k - 1) * dilation + 1
    windows = np.lib.stride_tricks.sliding_window_view(x, (span, span), axis=(1, 2))[..., ::dilation, ::dilation]
    B, Ho, Wo = windows.shape[:3]
    return windows.transpose(0, 1, 2, 4, 5, 3).reshape(B * Ho * Wo, -1)


# %%
def image_gradient_solution(w, g):
    B, H, W, O = g.shape
    padded = jnp.zeros((B, H + 2, W + 2, w.shape[2]), g.dtype)
    for u, v in np.ndindex(3, 3):
        padded = padded.at[:, u:u + H, v:v + W].add(g @ w[u, v].T)
    return padded[:, 1:-1, 1:-1]


# %%
try:
    check_dilated_im2col(dilated_im2col)
except NotImplementedError:
    check_dilated_im2col(dilated_im2col_solution)

# %%
try:
    check_image_gradient(image_gradient)
except NotImplementedError:
    check_image_gradient(image_gradient_solution)
