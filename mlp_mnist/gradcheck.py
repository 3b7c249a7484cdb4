"""Is the gradient right? Finite differences, the Pallas kernels, PyTorch, and bugs planted to be caught.

    python gradcheck.py        # half a minute; exit status 1 if any row fails

Legend: B batch, I inputs and O outputs of a layer.
The chain: the loss itself (central differences, float64) -> our gradient -> the kernels' own VJP, in interpret mode
(central differences, and the reference's gradient) -> PyTorch's gradient (same parameters, float64) -> the optimiser
(20 steps of torch.optim.SGD with momentum on the same batches) -> gradients that are wrong on purpose.

Where the tolerances come from: 1e-7 of the differences, see common/gradcheck.py; 1e-9 between two float64 programs
that sum in another order (measured: below 1e-15); 1e-4 of the float32 losses after 20 steps (float32's 6e-8 grows
along the trajectory; measured: 2e-7).
"""
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for common/

import kernels
import model
import run
import train
from common.gradcheck import (Check, compare, coordinates, directional, from_torch, planted, print_report, scaled,
                              to_torch, torch_missing, vjp, zeroed)

SIZES = (30, 20, 15, 5)
TILES = (8, 128, 128)  # the smallest, so that small arrays have several


def setting(key, sizes=SIZES, B=7):
    """Parameters (float64, with biases moved off zero), images (B, inputs) and labels (B,)."""
    k_init, k_bias, k_images, k_labels = jax.random.split(key, 4)
    params = jax.tree.map(lambda a: a.astype(jnp.float64), model.init_params(k_init, sizes))
    for layer, k in zip(params, jax.random.split(k_bias, len(params))):
        layer["b"] = 0.1 * jax.random.normal(k, layer["b"].shape, jnp.float64)
    images = jax.random.uniform(k_images, (B, sizes[0]), jnp.float64)
    return params, images, jax.random.randint(k_labels, (B,), 0, sizes[-1])


def finite_differences(params, images, labels):
    k1, k2 = jax.random.split(jax.random.key(1))
    by_vmap = partial(model.loss_fn, forward=model.forward_vmap)
    return (directional(model.loss_fn, params, images, labels, key=k1, name="finite differences, direction")
            + coordinates(model.loss_fn, params, images, labels, key=k2, name="finite differences,")
            + directional(by_vmap, params, images, labels, key=k1, n=1, name="finite differences, vmap form"))


# The kernels -----------------------------------------------------------------------------

def kernel_rows(B=37, I=450, O=400):
    """The kernels' VJP by finite differences, over 5 x 4 x 4 tiles of which the last ones are cut; the network's
    gradient through them against the reference's."""
    keys = jax.random.split(jax.random.key(2), 5)
    x, w, b = (jax.random.normal(k, shape, jnp.float64) for k, shape in zip(keys, ((B, I), (I, O), (O,))))
    linear_relu = partial(kernels.linear_relu, tiles=TILES)
    rows = vjp(linear_relu, x, w / I**0.5, b, key=keys[3], name="kernel VJP, finite differences,")
    setup = setting(keys[4], sizes=(150, 140, 130, 5), B=21)
    through = partial(model.loss_fn, forward=partial(model.forward, linear_relu=linear_relu))
    got, want = (jax.jit(jax.grad(f))(*setup) for f in (through, model.loss_fn))
    return rows + compare("kernel against reference, gradient", got, want, 1e-9)


# PyTorch ---------------------------------------------------------------------------------

def torch_rows(params, images, labels):
    """Logits, loss and every gradient leaf in float64."""
    import torch
    import torch_twin
    network = torch_twin.mlp(to_torch(params))
    logits = network(to_torch(images))
    loss = torch.nn.functional.cross_entropy(logits, to_torch(labels).long())
    loss.backward()
    ours, gradient = jax.jit(jax.value_and_grad(model.loss_fn))(params, images, labels)
    rows = compare("torch, logits", jax.jit(model.forward)(params, images), from_torch(logits), 1e-9)
    rows += compare("torch, loss", ours, from_torch(loss), 1e-9)
    return rows + compare("torch, gradient", gradient, from_torch(torch_twin.gradients(network)), 1e-9)


def sgd_rows(steps=20):
    """train.py's own step against torch.optim.SGD, on the same batches: losses, and the parameters at the end."""
    import torch_twin
    cfg = train.Config(hidden=64, max_iters=steps, warmup_iters=5, lr=0.1, momentum=0.9, weight_decay=1e-2)
    images = jax.random.uniform(jax.random.key(3), (steps, 32, 784))
    labels = jax.random.randint(jax.random.key(4), (steps, 32), 0, 10)
    state = train.init_state(cfg)
    network = torch_twin.mlp(to_torch(state["params"]))
    optimizer = torch_twin.sgd(network, cfg.lr, cfg.momentum, cfg.weight_decay)
    ours, want = [], []
    for step in range(steps):
        lr = train.schedule(step, cfg)
        want.append(float(torch_twin.train_step(network, optimizer, to_torch(images[step]),
                                                to_torch(labels[step]).long(), float(lr))))
        state, loss = train.train_step(state, images[step], labels[step], lr, cfg)
        ours.append(float(loss))
    worst = float(np.abs(np.array(ours) / np.array(want) - 1).max())
    theirs = [{"w": m.weight.T, "b": m.bias} for m in network if hasattr(m, "weight")]
    return [Check(f"torch SGD, losses of {steps} steps", worst, 1e-4),
            *compare(f"torch SGD, parameters after {steps} steps", state["params"], from_torch(theirs), 1e-4)]


# Bugs that must be caught ----------------------------------------------------------------

@jax.custom_vjp
def unmasked(x, w, b):
    """linear_relu whose gradient forgets the ReLU."""
    return model.linear_relu(x, w, b)


unmasked.defvjp(lambda x, w, b: (model.linear_relu(x, w, b), (x, w)),
                lambda residual, g: (g @ residual[1].T, residual[0].T @ g, g.sum(0)))


def planted_rows(params, images, labels):
    """A gradient 0.1 % too large, one entry lost, and two bugs of the kind one really writes."""
    key = jax.random.key(5)

    def of(wrong):
        return directional(model.loss_fn, params, images, labels, key=key, grad=wrong) + \
            coordinates(model.loss_fn, params, images, labels, key=key, grad=wrong)

    right = jax.grad(model.loss_fn)
    return [planted("gradient times 1.001", of(lambda *a: scaled(right(*a)))),
            planted("one entry of 1/w zeroed", of(lambda *a: zeroed(right(*a), "1/w"))),
            planted("ReLU's mask forgotten", of(jax.grad(partial(
                model.loss_fn, forward=partial(model.forward, linear_relu=unmasked))))),
            planted("sum instead of mean over the batch", of(jax.grad(
                lambda *a: model.cross_entropy(model.forward(*a[:2]), a[2]).sum())))]


def main():
    run.prepare_host()
    with jax.enable_x64(True):
        setup = setting(jax.random.key(0))
        rows = finite_differences(*setup) + kernel_rows()
        rows += [f"torch: {torch_missing()}"] if torch_missing() else torch_rows(*setup)
        rows += planted_rows(*setup)
    if not torch_missing():
        rows += sgd_rows()  # float32, as training runs
    return print_report(rows)


if __name__ == "__main__":
    sys.exit(main())
