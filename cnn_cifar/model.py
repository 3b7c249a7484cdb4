"""A small residual network for 32 x 32 colour images, whose batch norm keeps its running statistics in the open.

Legend: B batch, H height, W width, C channels (I in, O out), V classes.
Two pytrees of the same outline: `params`, which the gradient moves, and `stats`, the running means and variances,
which the forward pass moves. forward(params, stats, images, train) returns (logits, new stats): nothing changes in
place, and what a caller doesn't take over is gone.
Source: batch norm, Ioffe and Szegedy 2015; the network is a narrow form of David Page's ResNet-9.

    images (32, 32, 3) - stem - down1 - res1a,b - down2 - down3 - res3a,b - max over H, W, / 8 - head - logits
                         32x32  16x16   16x16     8x8     4x4     4x4
"""
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

WIDTHS = (32, 48, 96, 192)  # channels of stem, down1, down2, down3
CLASSES = 10
MOMENTUM = 0.9  # the share of a running statistic that a training step keeps (PyTorch's "momentum" is 1 - this)
EPS = 1e-5
HEAD_SCALE = 1 / 8  # of the head's inputs: maxima are large, and would start the loss far above that of guessing


# Parameters and statistics ---------------------------------------------------------------

def layers_of(widths=WIDTHS):
    """{name: (I, O)} of the convolutions, in the order in which they run."""
    w0, w1, w2, w3 = widths
    return {"stem": (3, w0), "down1": (w0, w1), "res1a": (w1, w1), "res1b": (w1, w1), "down2": (w1, w2),
            "down3": (w2, w3), "res3a": (w3, w3), "res3b": (w3, w3)}


def init_params(key, widths=WIDTHS):
    """{layer: {"w": (3, 3, I, O), "scale": (O,), "bias": (O,)}, ..., "head": {"w": (I, V), "b": (V,)}}, float32:
    w normal with variance 2 / (9 I) (He et al. 2015, eq. 10), scale 1, bias 0. A convolution has no bias of its own:
    batch norm would subtract it again."""
    layers = layers_of(widths)
    sizes = [9 * I * O for I, O in layers.values()] + [widths[-1] * CLASSES]
    # All weights in one draw, then cut up: XLA compiles a normal draw in about a second, so nine would take nine.
    *draws, head = jnp.split(jax.random.normal(key, (sum(sizes),)), np.cumsum(sizes)[:-1])
    params = {name: {"w": draw.reshape(3, 3, I, O) * (2 / (9 * I)) ** 0.5, "scale": jnp.ones(O), "bias": jnp.zeros(O)}
              for draw, (name, (I, O)) in zip(draws, layers.items())}
    params["head"] = {"w": head.reshape(widths[-1], CLASSES) / widths[-1] ** 0.5, "b": jnp.zeros(CLASSES)}
    return params


def init_stats(widths=WIDTHS):
    """{layer: {"mean": (O,) zeros, "var": (O,) ones}}, float32: before any training, batch norm in evaluation is about
    the identity."""
    return {name: {"mean": jnp.zeros(O), "var": jnp.ones(O)} for name, (_, O) in layers_of(widths).items()}


def count_params(params):
    return sum(leaf.size for leaf in jax.tree.leaves(params))


# Layers ----------------------------------------------------------------------------------

def widen(x):
    """x in at least float32 (float64 stays float64, so that finite differences can check the model)."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def plain_conv(x, w):
    """conv's value, and by JAX's own rules its gradient."""
    return lax.conv_general_dilated(x, w.astype(x.dtype), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@jax.custom_vjp
def conv(x, w):
    """3 x 3 convolution with zeros around, in x's dtype: (B, H, W, I), (3, 3, I, O) -> (B, H, W, O).

    It has a VJP of its own only for speed on CPUs: nothing fuses into a convolution or its gradient there. Left to
    itself, XLA:CPU computes relu(batch norm) again inside the badly strided transpose that the weights' gradient
    starts with."""
    return _conv_fwd(x, w)[0]


def _conv_fwd(x, w):
    x = cpu_barrier(x)
    return cpu_barrier(plain_conv(x, w)), (x, w)


def _conv_bwd(residual, g):
    x, w = residual
    g = cpu_barrier(g)
    dx = jax.vjp(lambda x: plain_conv(x, w), x)[1](g)[0]
    if x.shape[3] < w.shape[3] and x.shape[1] >= 16:
        dw = lax.platform_dependent(x, g, cpu=lambda x, g: summed_like(w, weight_gradient_by_taps(x, g)),
                                    default=lambda x, g: weight_gradient(w, x, g))
    else:
        dw = weight_gradient(w, x, g)
    return dx, dw


def weight_gradient(w, x, g):
    """The cotangent of w in plain_conv(x, w) for a cotangent g of the result."""
    return jax.vjp(lambda w: plain_conv(x, w), w)[1](g)[0]


@jax.named_scope("weight_gradient_by_taps")  # so that a trace can tell
def weight_gradient_by_taps(x, g):
    """The same as nine products, one for each place of the kernel: (the images moved by it)^T g, in at least float32.

    (B, H, W, I), (B, H, W, O) -> (3, 3, I, O). On two cores, with the barrier that has the moved images laid out first,
    2.4 times as fast as XLA:CPU's convolution for (128, 32, 32, 32 -> 48) and 2.0 times for (128, 16, 16, 48 -> 96);
    slower where I = O, and no faster for small images."""
    (B, H, W, I), O = x.shape, g.shape[3]
    padded, g = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), g.reshape(B * H * W, O)
    moved = [padded[:, i:i + H, j:j + W].reshape(B * H * W, I) for i in range(3) for j in range(3)]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    taps = [jnp.matmul(lax.optimization_barrier(x).T, g, preferred_element_type=wide) for x in moved]
    return jnp.stack(taps).reshape(3, 3, I, O)


def summed_like(w, dw):
    """dw as a cotangent of w: in w's dtype, and inside shard_map, where each device has its part of the batch's gradient,
    summed over the mesh axes that w is replicated over. JAX's own rules do so by themselves."""
    varying = [jax.typeof(x).manual_axis_type.varying for x in (dw, w)]
    axes = tuple(varying[0] - varying[1])
    return (lax.psum(dw, axes) if axes else dw).astype(w.dtype)


conv.defvjp(_conv_fwd, _conv_bwd)


def cpu_barrier(x):
    """x, computed as such on a CPU: XLA fuses nothing across it. On other platforms nothing."""
    return lax.platform_dependent(x, cpu=lax.optimization_barrier, default=lambda x: x)


def moments(x, axis_name=None):
    """Mean and biased variance of each channel over everything else: (B, H, W, C) -> (C,), (C,), in at least float32.

    axis_name: a mapped axis (of vmap or shard_map) that the batch is spread over, for statistics of the whole batch.
    The mean comes first and the squares are of what is left: E[x^2] - E[x]^2 cancels where the mean is large.
    """
    wide, axes = widen(x), tuple(range(x.ndim - 1))
    mean = wide.mean(axes)
    mean = lax.pmean(mean, axis_name) if axis_name else mean
    var = ((wide - mean) ** 2).mean(axes)
    return mean, lax.pmean(var, axis_name) if axis_name else var


def normalise(x, scale, bias, mean, var):
    """(x - mean) / sqrt(var + EPS) * scale + bias by channel, in at least float32, returned in x's dtype."""
    return ((widen(x) - mean) * (lax.rsqrt(var + EPS) * scale) + bias).astype(x.dtype)


def batch_norm_relu(x, scale, bias, axis_name=None):
    """The training form: (relu(normalised x), mean, var), by the batch's own statistics. x: (B, H, W, C).

    kernels.batch_norm_relu is the same as Pallas kernels. axis_name: see `moments`."""
    mean, var = moments(x, axis_name)
    return jax.nn.relu(normalise(x, scale, bias, mean, var)), mean, var


def batch_norm_relu_inference(x, scale, bias, mean, var):
    """The evaluation form: relu of x normalised by the statistics that are passed in."""
    return jax.nn.relu(normalise(x, scale, bias, mean, var))


def update_stats(stats, mean, var, n, momentum=MOMENTUM, unbiased=False):
    """The running statistics after a batch of n values a channel: each <- momentum * old + (1 - momentum) * new.

    unbiased: whether the running variance takes n / (n - 1) of the batch's, as PyTorch's does; Flax's, and ours by
    default, takes the biased one, by which the batch itself is normalised. Gradients don't flow through statistics.
    Where `moments` has an axis_name, n must be the values of all devices.
    """
    var = var * (n / max(n - 1, 1)) if unbiased else var
    new = lax.stop_gradient({"mean": mean, "var": var})
    return jax.tree.map(lambda old, now: (momentum * old + (1 - momentum) * now).astype(old.dtype), stats, new)


def max_pool(x):
    """The largest of each 2 x 2 square: (B, H, W, C) -> (B, H/2, W/2, C)."""
    B, H, W, C = x.shape
    return x.reshape(B, H // 2, 2, W // 2, 2, C).max((2, 4))


# Network ---------------------------------------------------------------------------------

def forward(params, stats, images, train, norms=(batch_norm_relu, batch_norm_relu_inference), unbiased=False):
    """(logits (B, V), new stats). images: (B, H, W, 3), H and W multiples of 8, in the dtype to compute in.

    train: a Python bool. True normalises by the batch and returns moved statistics; False normalises by `stats`, one
    image at a time, and returns them as they are. norms: the two forms of batch norm with ReLU; see kernels.py.
    Raises: ValueError for other images.
    """
    if images.ndim != 4 or images.shape[3] != 3 or images.shape[1] % 8 or images.shape[2] % 8:
        raise ValueError(f"images {images.shape} are not (B, H, W, 3) with H and W multiples of 8: the network halves "
                         "them three times")
    norm_train, norm_eval = norms
    new_stats = dict(stats)

    def block(name, x, pool=False):
        layer = params[name]
        x = conv(x, layer["w"])
        x = max_pool(x) if pool else x  # first, as batch norm and ReLU then have a quarter of the work
        if not train:
            return norm_eval(x, layer["scale"], layer["bias"], stats[name]["mean"], stats[name]["var"])
        y, mean, var = norm_train(x, layer["scale"], layer["bias"])
        new_stats[name] = update_stats(stats[name], mean, var, x.size // x.shape[-1], unbiased=unbiased)
        return y

    x = block("stem", images)  # (B, 32, 32, w0)
    x = block("down1", x, pool=True)  # (B, 16, 16, w1)
    x = x + block("res1b", block("res1a", x))
    x = block("down2", x, pool=True)  # (B, 8, 8, w2)
    x = block("down3", x, pool=True)  # (B, 4, 4, w3)
    x = x + block("res3b", block("res3a", x))
    x = HEAD_SCALE * widen(x).max((1, 2))  # (B, w3)
    return x @ params["head"]["w"] + params["head"]["b"], new_stats


# Loss ------------------------------------------------------------------------------------

def cross_entropy(logits, labels, smoothing=0.0):
    """Cross-entropy in nats with label smoothing: (B, V), (B,) integer -> (B,), in at least float32.

    The target is 1 - smoothing on the label plus smoothing / V on every class (Szegedy et al. 2016, section 7)."""
    logp = jax.nn.log_softmax(widen(logits))
    picked = jnp.take_along_axis(logp, labels[:, None], axis=1)[:, 0]
    return -(1 - smoothing) * picked - smoothing * logp.mean(1)


def loss_fn(params, stats, images, labels, smoothing=0.0, **forward_options):
    """(mean loss over the batch, (new stats, logits)) in training: what jax.value_and_grad(..., has_aux=True) takes."""
    logits, new_stats = forward(params, stats, images, True, **forward_options)
    return cross_entropy(logits, labels, smoothing).mean(), (new_stats, logits)
