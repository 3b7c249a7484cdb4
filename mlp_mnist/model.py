"""A multi-layer perceptron for images of digits: its parameters are a list of dicts, every function is pure.

Legend: B batch, I inputs and O outputs of a layer, V classes.
Two ways to write the same network: for one example, with `jax.vmap` making the batch, and as products of matrices.
The tests compare them down to the machine code; README.md says what was found.
"""
import jax
import jax.numpy as jnp

SIZES = (784, 512, 512, 10)  # pixels, two hidden layers, classes


def init_params(key, sizes=SIZES):
    """A list of {"w": (I, O), "b": (O,)}, float32: w normal with variance 2 / I, which keeps the scale of the
    activations through layers of ReLU (He et al. 2015, eq. 10); b zero."""
    return [{"w": jax.random.normal(k, (I, O)) * (2 / I) ** 0.5, "b": jnp.zeros(O)}
            for k, I, O in zip(jax.random.split(key, len(sizes) - 1), sizes[:-1], sizes[1:])]


# Forward ---------------------------------------------------------------------------------

def forward_one(params, x):
    """Logits of one example: (784,) -> (V,). Nothing here knows of a batch."""
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def forward_vmap(params, images):
    """The batch made by vmap: images (B, 784) -> logits (B, V)."""
    return jax.vmap(forward_one, in_axes=(None, 0))(params, images)


def linear_relu(x, w, b):
    """relu(x w + b): (B, I), (I, O), (O,) -> (B, O). kernels.linear_relu is the same as one Pallas kernel."""
    return jax.nn.relu(x @ w + b)


def forward(params, images, linear_relu=linear_relu):
    """The batch as products of matrices: images (B, 784) -> logits (B, V), in the parameters' dtype.

    linear_relu(x, w, b) computes the hidden layers. Raises: ValueError where the images don't fit the first layer.
    """
    if images.ndim != 2 or images.shape[1] != params[0]["w"].shape[0]:
        raise ValueError(f"images {images.shape} don't fit a first layer of {params[0]['w'].shape[0]} inputs: "
                         "pass (B, inputs), e.g. data.flatten(images)")
    x = images
    for layer in params[:-1]:
        x = linear_relu(x, layer["w"], layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


# Loss ------------------------------------------------------------------------------------

def cross_entropy(logits, labels):
    """-log softmax(logits)[label] in nats, in at least float32. logits: (B, V), labels: (B,) integer -> (B,).

    With m the row's largest logit, log(sum exp(x - m)) - (x_label - m): no exponent is positive, so nothing
    overflows, and the m that cancels is never added to anything small. A logit of -inf on a class other than the
    label means a probability of 0, and its gradient is 0.
    """
    x = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    x -= jax.lax.stop_gradient(x.max(axis=1, keepdims=True))  # any constant cancels, so it needs no gradient
    return jnp.log(jnp.exp(x).sum(axis=1)) - jnp.take_along_axis(x, labels[:, None], axis=1)[:, 0]


def loss_fn(params, images, labels, forward=forward):
    """Mean cross-entropy in nats. images: (B, 784), labels: (B,) -> scalar."""
    return cross_entropy(forward(params, images), labels).mean()


def count_correct(params, images, labels):
    """How many of the images the network gets right, int32; an example labelled -1 (padding) is never right."""
    return (forward(params, images).argmax(axis=1) == labels).sum()
