"""Are gradients and statistics right? Finite differences, kernels, PyTorch, Flax, Equinox, and planted bugs.

    python gradcheck.py        # about a minute; exit status 1 if any row fails

Legend: B batch, H height, W width, C channels.
The chain: the loss itself, in training over the parameters and in evaluation over parameters and statistics (central
differences, float64) -> our gradient; the new statistics, against NumPy's mean and variance of what entered each layer
-> the kernels' own VJP, in interpret mode (central differences, and the reference's gradient) -> PyTorch: gradient and
five steps of running statistics (same parameters, float64), 20 steps of torch.optim.SGD on the same batches (float32)
-> the batch norms of Flax and Equinox -> gradients and statistics that are wrong on purpose.

Where the tolerances come from: 1e-7 of the differences, see common/gradcheck.py; 1e-9 between two float64 programs
that sum in another order (measured: below 1e-14); 1e-3 of the float32 losses over 20 steps (measured: 2e-7).
"""
import math
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for common/

import kernels
import model
import run
import train
from common.gradcheck import (Check, compare, coordinates, directional, from_torch, planted, print_report, scaled,
                              to_torch, torch_missing, vjp, zeroed)
from model import MOMENTUM

WIDTHS = (4, 5, 6, 7)  # all different: an axis taken for another one doesn't fit
SMOOTHING = 0.1


def draw(rng, shapes):
    """A tree of arrays, float64 where x64 is on: weights of variance 2 / inputs, scales and variances around 1, biases
    and means around 0, where model.init_params and init_stats put exactly 1 and 0."""
    def leaf(path, a):
        spread = (2 / math.prod(a.shape[:-1])) ** 0.5 if a.ndim > 1 else 0.1
        return jnp.asarray(rng.normal(path[-1].key in ("scale", "var"), spread, a.shape))
    return jax.tree_util.tree_map_with_path(leaf, shapes)


def setting(seed=0, widths=WIDTHS, B=3, side=16):
    """Parameters, statistics, images (B, side, side, 3) and labels (B,)."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(partial(model.init_params, widths=widths), jax.random.key(0))
    return (draw(rng, shapes), draw(rng, model.init_stats(widths)), jnp.asarray(rng.normal(size=(B, side, side, 3))),
            jnp.asarray(rng.integers(0, model.CLASSES, B)))


def training_loss(params, stats, images, labels, **options):
    return model.loss_fn(params, stats, images, labels, SMOOTHING, **options)[0]


def evaluation_loss(both, images, labels):
    """Over {"params", "stats"}: in evaluation the statistics are inputs like any other."""
    logits, _ = model.forward(both["params"], both["stats"], images, False)
    return model.cross_entropy(logits, labels).mean()


# Named, so that jit knows them again: each compiles once, however many checks take it.
training_gradient, evaluation_gradient = jax.grad(training_loss), jax.grad(evaluation_loss)


def finite_differences(params, stats, images, labels):
    k1, k2, k3 = jax.random.split(jax.random.key(1), 3)
    rows = directional(training_loss, params, stats, images, labels, key=k1, grad=training_gradient,
                       name="finite differences, direction")
    rows += coordinates(training_loss, params, stats, images, labels, key=k2, per_leaf=2, grad=training_gradient,
                        name="finite differences,")
    both = {"params": params, "stats": stats}
    rows += directional(evaluation_loss, both, images, labels, key=k2, grad=evaluation_gradient,
                        name="evaluation, finite differences, direction")
    rows += coordinates(evaluation_loss, both, images, labels, key=k3, per_leaf=2, grad=evaluation_gradient,
                        name="evaluation, finite differences,")
    layer = params["res1a"]
    x = jax.random.normal(k3, (*images.shape[:3], len(layer["bias"])), jnp.float64)
    return rows + vjp(model.batch_norm_relu, x, layer["scale"], layer["bias"], key=k1,
                      name="batch norm (y, mean, var), finite differences,")


# Statistics as an input and an output ------------------------------------------------------

def moved_sum(params, stats, images):
    """The sum of all new statistics after one batch: a scalar to take derivatives of."""
    new_stats = model.forward(params, stats, images, True)[1]
    return sum(leaf.sum() for leaf in jax.tree.leaves(new_stats))


def stopped(name, f, x, *args):
    """The gradient of f at x is exactly 0 though f changes with x; NaN where it doesn't, as then nothing is stopped."""
    before, after = (float(jax.jit(f)(at, *args)) for at in (x, scaled(x)))
    gradient = jax.jit(jax.grad(f))(x, *args)
    size = math.hypot(*(float(jnp.linalg.norm(leaf)) for leaf in jax.tree.leaves(gradient)))
    return [Check(f"{name} (absolute)", size if after != before else math.nan, 0.0)]


def gradient_rows(params, stats, images, labels):
    """Where statistics must and must not pass a gradient on."""
    rows = stopped("new statistics over parameters: gradient stopped", moved_sum, params, stats, images)
    over_old, _ = ravel_pytree(jax.jit(jax.grad(moved_sum, argnums=1))(params, stats, images))
    loss, other = (float(jax.jit(training_loss)(params, s, images, labels)) for s in (stats, scaled(stats, factor=2.0)))
    return [*rows, Check("new statistics over old ones: gradient is the momentum",
                         float(abs(over_old / MOMENTUM - 1).max()), 1e-12),
            Check("training loss doesn't depend on the statistics (absolute)", abs(loss - other), 0.0)]


def statistics_rows(params, stats, images, forward=model.forward):
    """Every layer's new statistics against NumPy's mean and biased variance of what entered its batch norm."""
    entered = []

    def norm(x, scale, bias):
        entered.append(np.asarray(x))
        return model.batch_norm_relu(x, scale, bias)
    _, new_stats = forward(params, stats, images, True, norms=(norm, None))
    want = {name: {"mean": MOMENTUM * stats[name]["mean"] + (1 - MOMENTUM) * x.mean((0, 1, 2)),
                   "var": MOMENTUM * stats[name]["var"] + (1 - MOMENTUM) * x.var((0, 1, 2))}
            for name, x in zip(model.layers_of(), entered)}
    return compare("new statistics", new_stats, want, 1e-12)


def evaluation_rows(params, stats, images, norms=(model.batch_norm_relu, model.batch_norm_relu_inference)):
    """In evaluation an image has the same logits alone and in a batch, and statistics come back as they went in."""
    evaluate = jax.jit(partial(model.forward, train=False, norms=norms))
    logits, same = evaluate(params, stats, images)
    alone = jnp.concatenate([evaluate(params, stats, image[None])[0] for image in images])
    moved = float(abs(ravel_pytree(same)[0] - ravel_pytree(stats)[0]).max())
    return [Check("evaluation returns the statistics it was given (absolute)", moved, 0.0),
            Check("evaluation, logits without batch-mates", float(abs(alone / logits - 1).max()), 1e-9)]


# The kernels -----------------------------------------------------------------------------

def kernel_rows():
    """The kernels' VJPs by finite differences, through y, mean and var, over 2 x 2 x 2 tiles of which the last ones are
    cut and one is kept for the second pass; and against the references' gradients."""
    tiles = kernels.Tiles(A=2, C=8, Q=128, kept=1)
    k_x, k_channels, k_g, k1, k2 = jax.random.split(jax.random.key(3), 5)
    x, g = (jax.random.normal(k, (130, 3, 1, 10), jnp.float64) for k in (k_x, k_g))
    scale, bias, mean, var = 1 + 0.3 * jax.random.normal(k_channels, (4, 10), jnp.float64)
    training, evaluation = (partial(f, tiles=tiles) for f in (kernels.batch_norm_relu,
                                                              kernels.batch_norm_relu_inference))
    rows = vjp(training, x, scale, bias, key=k1, name="kernel VJP (y, mean, var), finite differences,")
    rows += vjp(evaluation, x, scale, bias, mean, var, key=k2, name="kernel VJP in evaluation, finite differences,")
    for name, kernel, reference, cotangent, *args in (
            ("training", training, model.batch_norm_relu, (g, mean, var), x, scale, bias),
            ("evaluation", evaluation, model.batch_norm_relu_inference, g, x, scale, bias, mean, var)):
        got, want = (jax.jit(lambda g, *args, f=f: jax.vjp(f, *args)[1](g))(cotangent, *args)
                     for f in (kernel, reference))
        rows += compare(f"kernel against reference in {name}, gradient of argument", got, want, 1e-9)
    return rows


# PyTorch ---------------------------------------------------------------------------------

def planes(images):
    """(..., H, W, 3) -> a tensor (..., 3, H, W)."""
    return to_torch(jnp.moveaxis(images, -1, -3))


def torch_rows(params, stats, images, labels):
    """Logits, loss and every gradient leaf in float64, in training; logits in evaluation. Where two values tie for a
    maximum both gradients are right, ours shared and PyTorch's given to one: random float64 numbers don't tie, and
    the zeros that do, at the last maximum, pass nothing on through their ReLUs."""
    import torch
    import torch_twin
    network = torch_twin.resnet(params, stats)
    evaluated = network.eval()(planes(images))
    logits = network.train()(planes(images))
    loss = torch.nn.functional.cross_entropy(logits, to_torch(labels).long(), label_smoothing=SMOOTHING)
    loss.backward()
    ours, gradient = (jax.jit(f)(params, stats, images, labels) for f in (training_loss, training_gradient))
    our_logits, our_evaluated = (jax.jit(partial(model.forward, train=train))(params, stats, images)[0]
                                 for train in (True, False))
    rows = compare("torch, evaluation logits", our_evaluated, from_torch(evaluated), 1e-9)
    rows += compare("torch, logits", our_logits, from_torch(logits), 1e-9)
    rows += compare("torch, loss", ours, from_torch(loss), 1e-9)
    return rows + compare("torch, gradient", gradient, from_torch(torch_twin.gradients(network)), 1e-9)


def torch_statistics_rows(params, stats, images, unbiased=True, steps=5):
    """Running statistics after five batches. PyTorch normalises by the biased variance, but keeps a running mean of
    the unbiased one; its momentum 0.1 is the share of the new batch."""
    import torch_twin
    network = torch_twin.resnet(params, stats)
    batches = jax.random.normal(jax.random.key(2), (steps, *images.shape), jnp.float64)
    forward = jax.jit(partial(model.forward, train=True, unbiased=unbiased))
    for images in batches:
        network(planes(images))
        stats = forward(params, stats, images)[1]
    return compare(f"torch, statistics after {steps} batches (running variance unbiased)", stats,
                   from_torch(torch_twin.statistics(network)), 1e-9)


def sgd_rows(steps=20, B=32, nesterov=True):
    """train.py's own step against torch.optim.SGD, on the same batches: the losses.

    The batches, all different, can be learned: ten images, one a class, with noise added, so the loss falls. On pure
    noise it doesn't, and rounding grows up to tenfold a step, to 2e-2 of the loss at step 14, as ReLUs and maxima
    turn over one after the other.
    """
    import torch_twin
    cfg = train.Config(width=8, batch_size=B, max_iters=steps, lr=0.1, weight_decay=5e-2)
    rng = np.random.default_rng(6)
    labels = rng.integers(0, model.CLASSES, (steps, B))
    images = rng.normal(size=(model.CLASSES, 16, 16, 3))[labels] + rng.normal(0, 0.5, (steps, B, 16, 16, 3))
    images, labels = jnp.asarray(images), jnp.asarray(labels)
    params = setting(widths=cfg.widths)[0]
    state = {"params": params, "stats": model.init_stats(cfg.widths), "opt": train.optimizer(cfg).init(params)}
    network = torch_twin.resnet(state["params"])
    optimizer = torch_twin.sgd(network, cfg.lr, cfg.momentum, cfg.weight_decay, nesterov)
    ours, want = [], []
    for step in range(steps):
        want.append(float(torch_twin.train_step(network, optimizer, planes(images[step]), to_torch(labels[step]).long(),
                                                float(train.schedule(step, cfg)), cfg.label_smoothing)))
        state, loss, _ = train.train_step(state, images[step], labels[step], step, cfg)
        ours.append(float(loss))
    worst = float(np.abs(np.array(ours) / np.array(want) - 1).max())
    return [Check(f"torch SGD, losses of {steps} steps", worst, 1e-3)]


# Other batch norms -------------------------------------------------------------------------
# Each takes two batches in training, from (0, 1), then the second one in evaluation:
# {"first": {"y", "mean", "var"}, "second": {...}, "evaluation": y}, with ReLU, which is ours alone, put after theirs.

def our_batch_norm(first, second, scale, bias):
    stats, out = {"mean": jnp.zeros_like(bias), "var": jnp.ones_like(bias)}, {}
    for name, x in (("first", first), ("second", second)):
        y, mean, var = model.batch_norm_relu(x, scale, bias)
        stats = model.update_stats(stats, mean, var, x.size // len(bias))
        out[name] = {"y": y, **stats}
    return out | {"evaluation": model.batch_norm_relu_inference(second, scale, bias, **stats)}


def linen_batch_norm(first, second, scale, bias):
    from flax import linen
    layer, params = linen.BatchNorm(momentum=MOMENTUM, epsilon=model.EPS), {"scale": scale, "bias": bias}
    stats, out = {"mean": jnp.zeros_like(bias), "var": jnp.ones_like(bias)}, {}
    for name, x in (("first", first), ("second", second)):
        y, changed = layer.apply({"params": params, "batch_stats": stats}, x, use_running_average=False,
                                 mutable="batch_stats")
        stats = changed["batch_stats"]
        out[name] = {"y": jax.nn.relu(y), **stats}
    y = layer.apply({"params": params, "batch_stats": stats}, second, use_running_average=True)
    return out | {"evaluation": jax.nn.relu(y)}


def nnx_batch_norm(first, second, scale, bias):
    from flax import nnx
    layer, out = nnx.BatchNorm(len(bias), momentum=MOMENTUM, epsilon=model.EPS, rngs=nnx.Rngs(0)), {}
    layer.scale, layer.bias = nnx.Param(scale), nnx.Param(bias)
    layer.mean, layer.var = nnx.BatchStat(jnp.zeros_like(bias)), nnx.BatchStat(jnp.ones_like(bias))  # float64, too
    for name, x in (("first", first), ("second", second)):
        y = layer(x, use_running_average=False)  # moves layer.mean and layer.var in place
        out[name] = {"y": jax.nn.relu(y), "mean": layer.mean[...], "var": layer.var[...]}
    return out | {"evaluation": jax.nn.relu(layer(second, use_running_average=True))}


def equinox_batch_norm(first, second, scale, bias, mode):
    import equinox
    layer, state = equinox.nn.make_with_state(equinox.nn.BatchNorm)(
        len(bias), "batch", model.EPS, momentum=MOMENTUM, dtype=bias.dtype, mode=mode)
    layer = equinox.tree_at(lambda layer: (layer.weight, layer.bias), layer, (scale, bias))
    index, out = layer.batch_state_index if mode == "batch" else layer.ema_state_index, {}

    def apply(layer, x, state):  # an Equinox layer sees one example, channels first; statistics need the axis's name
        y, state = jax.vmap(layer, (0, None), (0, None), axis_name="batch")(jnp.moveaxis(x, -1, 1), state)
        return jax.nn.relu(jnp.moveaxis(y, 1, -1)), state
    for name, x in (("first", first), ("second", second)):
        y, state = apply(layer, x, state)
        out[name] = dict(zip(("y", "mean", "var"), (y, *state.get(index))))
    return out | {"evaluation": apply(equinox.nn.inference_mode(layer), second, state)[0]}


def framework_rows(C=5):
    """Outputs and running statistics against Flax Linen, Flax NNX and Equinox, whose momentum, like ours, is the share
    of the old, and whose running variance is the biased one (Equinox 0.13 documents "unbiased", and computes biased).

    Linen and NNX agree with ours throughout. Equinox's mode "batch" does in training; in evaluation it divides both
    statistics by 1 - momentum^updates, as though both had started at 0. The variance starts at 1: after one update of
    momentum 0.9 the variance used is 9 + the batch's.
    Its mode "ema" takes the first batch's statistics whole, and normalises by the running ones in training too.
    """
    keys = jax.random.split(jax.random.key(4), 4)
    scale, bias = (1 + 0.3 * jax.random.normal(k, (C,), jnp.float64) for k in keys[:2])
    first, second = (1 + jnp.arange(1, C + 1) * jax.random.normal(k, (4, 6, 6, C), jnp.float64) for k in keys[2:])
    ours = our_batch_norm(first, second, scale, bias)
    rows = compare("Flax Linen (momentum = share kept, variance biased),", linen_batch_norm(first, second, scale, bias),
                   ours, 1e-9)
    rows += compare("Flax NNX (momentum = share kept, variance biased),", nnx_batch_norm(first, second, scale, bias),
                    ours, 1e-9)

    used = {name: ours["second"][name] / (1 - MOMENTUM**2) for name in ("mean", "var")}
    want = ours | {"evaluation": model.batch_norm_relu_inference(second, scale, bias, **used)}
    rows += compare("Equinox batch (share kept, biased, debiased in evaluation),",
                    equinox_batch_norm(first, second, scale, bias, "batch"), want, 1e-9)

    y, *at_first = model.batch_norm_relu(first, scale, bias)
    at_second = [MOMENTUM * old + (1 - MOMENTUM) * new for old, new in zip(at_first, model.moments(second))]
    by_running = model.batch_norm_relu_inference(second, scale, bias, *at_second)
    want = {"first": dict(zip(("y", "mean", "var"), (y, *at_first))),
            "second": dict(zip(("y", "mean", "var"), (by_running, *at_second))), "evaluation": by_running}
    return rows + compare("Equinox ema (first batch taken whole, then share kept, biased),",
                          equinox_batch_norm(first, second, scale, bias, "ema"), want, 1e-9)


# Bugs that must be caught ----------------------------------------------------------------

def constant_statistics(x, scale, bias):
    """Batch norm whose gradient forgets that the batch's mean and variance depend on x."""
    mean, var = jax.lax.stop_gradient(model.moments(x))
    return jax.nn.relu(model.normalise(x, scale, bias, mean, var)), mean, var


def not_updated(params, stats, images, train, **options):
    return model.forward(params, stats, images, train, **options)[0], stats


def momentum_reversed(params, stats, images, train, **options):
    """Keeps 1 - momentum of the old statistics, as who passes PyTorch's 0.1 for our 0.9 does."""
    logits, new_stats = model.forward(params, stats, images, train, **options)
    batch = jax.tree.map(lambda old, new: (new - MOMENTUM * old) / (1 - MOMENTUM), stats, new_stats)
    return logits, jax.tree.map(lambda old, new: (1 - MOMENTUM) * old + MOMENTUM * new, stats, batch)


def batch_statistics(x, scale, bias, mean, var):
    """The evaluation form that normalises by the batch at hand all the same."""
    return model.batch_norm_relu(x, scale, bias)[0]


def unstopped_sum(params, stats, images):
    """moved_sum where the statistics let gradients through."""
    seen = []

    def norm(x, scale, bias):
        y, mean, var = model.batch_norm_relu(x, scale, bias)
        seen.extend((mean, var))
        return y, mean, var
    model.forward(params, stats, images, True, norms=(norm, None))
    return sum(leaf.sum() for leaf in seen)


def planted_rows(params, stats, images, labels):
    """A gradient 0.1 % too large, one entry lost, and bugs of the kind one really writes."""
    setup, key = (params, stats, images, labels), jax.random.key(5)
    right = jax.jit(training_gradient)(*setup)
    constant = jax.grad(partial(training_loss, norms=(constant_statistics, None)))
    return [planted("gradient times 1.001", directional(training_loss, *setup, key=key, grad=lambda *_: scaled(right))),
            planted("one entry of res1a/w zeroed", coordinates(training_loss, *setup, key=key,
                                                               grad=lambda *_: zeroed(right, "res1a/w"))),
            planted("mean and variance held constant in the gradient", directional(training_loss, *setup, key=key,
                                                                                   grad=constant)),
            planted("statistics not updated", statistics_rows(params, stats, images, forward=not_updated)),
            planted("momentum reversed", statistics_rows(params, stats, images, forward=momentum_reversed)),
            planted("batch statistics used in evaluation", evaluation_rows(
                params, stats, images, norms=(model.batch_norm_relu, batch_statistics))),
            planted("statistics let the gradient through", stopped("", unstopped_sum, params, stats, images))]


def main():
    run.prepare_host()
    with jax.enable_x64(True):
        setup = setting()
        rows = finite_differences(*setup) + gradient_rows(*setup) + statistics_rows(*setup[:3])
        rows += evaluation_rows(*setup[:3]) + kernel_rows()
        rows += [f"torch: {torch_missing()}"] if torch_missing() else \
            torch_rows(*setup) + torch_statistics_rows(*setup[:3])
        rows += framework_rows() + planted_rows(*setup)
    if not torch_missing():
        rows += sgd_rows()  # float32, as training runs
    return print_report(rows)


if __name__ == "__main__":
    sys.exit(main())
