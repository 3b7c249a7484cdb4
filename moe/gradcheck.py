"""Is the gradient right where a router decides? Finite differences, kernels, Mixtral, PyTorch, and planted bugs.

    python gradcheck.py        # exit status 1 if any row fails

Legend: B batch, T time, D model, F hidden of an expert, E experts, k choices a token, L layers.
The chain: the loss of the whole model, then of one layer in each of its forms (central differences, float64) -> our
gradient -> what happens at a tie -> the kernel's own VJP (kernels.py, interpreted) -> the sparse block of
transformers' Mixtral and the whole model in PyTorch, same parameters -> 20 steps of torch.optim.AdamW on the same
batches -> gradients that are wrong on purpose.

Which experts a token gets is a piecewise constant function of the parameters: between two ties its derivative is 0, at
a tie it jumps. A difference whose two ends lie on different sides of a tie is no derivative, so the decision is held at
that of the unmoved parameters (`held`) while the loss is moved; the gradient that is compared is that of the loss as
it is trained. Only expert choice, whose decision lies inside its dispatch, is differenced as it is.

Where the tolerances come from: 1e-7 of the differences, see common/gradcheck.py; 1e-9 between two float64 programs
that sum in another order (measured: below 2e-15; parameters after 20 steps of Adam 4e-13); 1e-6 against Mixtral,
whose router rounds to float32 (measured: 1e-7).
"""
import dataclasses
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for common/

import data
import kernels
import model
import run
import train
from common.gradcheck import (Check, compare, coordinates, directional, from_torch, planted, print_report, scaled,
                              to_torch, torch_missing, vjp, zeroed)
from model import MoEConfig, forward, gates_of, init_params, loss_fn, moe_layer

# Of 24 choices a sequence, 4 experts hold 6 each: whenever the load is uneven, some are dropped.
SHAPE = MoEConfig(vocab_size=17, context=12, n_layer=2, n_head=3, n_embd=24, n_hidden=20, n_experts=4, top_k=2,
                  capacity_factor=1.0, activation="swiglu", shared_hidden=10, balance_weight=0.5, z_weight=0.2,
                  dtype="float64")


def draw(rng, shapes):
    """A tree of float64 arrays (where x64 is on): scales around 1, everything else around 0, with a spread of 0.1: no
    bias or scale at the trivial value where training starts, no score near a tie."""
    def leaf(path, a):
        return jnp.asarray(rng.normal(path[-1].key.endswith("scale"), 0.1, a.shape))
    return jax.tree_util.tree_map_with_path(leaf, shapes)


def setting(cfg=SHAPE, B=3, seed=0):
    """Parameters, tokens and targets (B, T)."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, cfg.vocab_size, (B, cfg.context + 1))
    params = draw(rng, jax.eval_shape(partial(init_params, cfg=cfg), jax.random.key(0)))
    return params, jnp.asarray(text[:, :-1]), jnp.asarray(text[:, 1:])


def layer_setting(cfg=SHAPE, B=3, seed=5):
    """{"x": (B, T, D), "p": one layer's "moe" dict} and g, (B, T, D), by which its output is weighted."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(partial(init_params, cfg=cfg), jax.random.key(0))["blocks"][0]["moe"]
    x, g = jnp.asarray(rng.normal(size=(2, B, cfg.context, cfg.n_embd)))
    return {"x": x, "p": draw(rng, shapes)}, g


# The decision, held ----------------------------------------------------------------------

@contextmanager
def swapped(**functions):
    """Within it model.py calls these in place of its own functions of the same names. It must surround tracing."""
    own = {name: getattr(model, name) for name in functions}
    for name, function in functions.items():
        setattr(model, name, function)
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(model, name, function)


def rerouted(f, change):
    """f with every layer's Routing passed through change(routing)."""
    own = model.route

    def g(*args, **options):
        with swapped(route=lambda *args, **options: change(own(*args, **options))):
            return f(*args, **options)
    return g


def held(f, cfg, *args):
    """f(*args, ...) with the routing decisions, layer by layer, that f makes at args. The gates stay a function of
    what moves: only which experts they belong to is fixed."""
    made = []

    def note(routing):
        made.append(routing.experts)
        return routing

    def decide(*args):
        made.clear()
        rerouted(f, note)(*args)
        return list(made)
    decided = jax.jit(decide)(*args)

    def g(*args):
        layers = iter(decided)

        def fix(routing):
            experts = next(layers)
            gates = gates_of(jnp.take_along_axis(routing.probs, experts, axis=-1), cfg.renormalised)
            return routing._replace(experts=experts, gates=gates)
        return rerouted(f, fix)(*args)
    return g


# Finite differences ----------------------------------------------------------------------

def training_loss(params, tokens, targets, cfg=SHAPE):
    return loss_fn(params, tokens, targets, cfg)[0]


def layer_loss(both, g, cfg=SHAPE, key=None, mask=None, grouped_matmul=lax.ragged_dot):
    """A scalar that moves with everything moe_layer returns."""
    y, aux = moe_layer(both["x"], both["p"], cfg, key=key, mask=mask, grouped_matmul=grouped_matmul)
    return (y * g).sum() + aux["balance"] + aux["z"]


def finite_differences(params, tokens, targets):
    """The whole model: every leaf."""
    k1, k2 = jax.random.split(jax.random.key(1))
    loss, gradient = held(training_loss, SHAPE, params, tokens, targets), jax.grad(training_loss)
    rows = directional(loss, params, tokens, targets, key=k1, grad=gradient, name="finite differences, direction")
    return rows + coordinates(loss, params, tokens, targets, key=k2, per_leaf=2, grad=gradient,
                              name="finite differences,")


FORMS = {
    "einsum": {"dispatch": "einsum"}, "gather": {"dispatch": "gather"}, "dropless": {"dispatch": "dropless"},
    "expert choice": {"dispatch": "expert_choice"}, "first choices first": {"priority": "choice"},
    "k = 1": {"top_k": 1, "activation": "gelu"}, "k = 3, gates raw": {"top_k": 3, "renormalise": False},
    "ReLU": {"activation": "relu", "shared_hidden": 0}, "jitter": {"jitter": 0.1},
}


def layer_rows(forms=FORMS):
    """One layer in each form, over its input and its parameters, with a mask that leaves half of the last sequence."""
    rows = []
    for name, change in forms.items():
        cfg = dataclasses.replace(SHAPE, **change)
        both, g = layer_setting(cfg)
        T = cfg.context
        mask = jnp.arange(T) < jnp.array([T, T, T // 2])[:, None]
        g = g * mask[..., None]  # what a masked token outputs is nobody's business
        loss = partial(layer_loss, cfg=cfg, key=jax.random.key(2) if cfg.jitter else None, mask=mask)
        fixed = loss if cfg.dispatch == "expert_choice" else held(loss, cfg, both, g)
        rows += directional(fixed, both, g, key=jax.random.key(3), n=2, grad=jax.grad(loss),
                            name=f"layer, {name}, direction")
    return rows


def tie_rows(eps=1e-6):
    """One token whose two experts have the same score, k = 1, the router moved from one side of the tie to the other.

    The loss jumps by the gate, 1/2, times what the experts' outputs differ by: the difference quotient grows without
    bound as eps shrinks. The gradient doesn't see that: it is the slope with the expert of the lower index, which
    top_k takes of equals. Returns Checks and a note with both numbers.
    """
    cfg = dataclasses.replace(SHAPE, context=1, n_experts=2, top_k=1, shared_hidden=0)
    both, g = layer_setting(cfg, B=1)
    x, router = both["x"][0, 0], both["p"]["w_router"]
    tied = both["p"] | {"w_router": jnp.stack([router[:, 0]] * 2, axis=1)}
    across = jnp.stack([x, -x], axis=1) / (x @ x)  # the logits move by s and -s

    def loss(s, g):
        p = tied | {"w_router": tied["w_router"] + s * across}
        return (moe_layer(both["x"], p, cfg)[0] * g).sum()
    at, slope, zero = jax.jit(loss), jax.grad(loss), jnp.zeros(())
    outputs = jax.jit(partial(model.expert_ffn, cfg=cfg))(jnp.stack([both["x"][0]] * 2), tied)[:, 0] @ g[0, 0]  # (E,)
    jump = (outputs[0] - outputs[1]) / 2
    far, near = ((at(h, g) - at(-h, g)) / (2 * h) for h in (10 * eps, eps))
    rows = [Check("tie: the loss jumps by half the experts' difference", float(abs(2 * eps * near / jump - 1)), 1e-4),
            Check("tie: a tenth of eps, ten times the difference quotient", float(abs(near / far / 10 - 1)), 1e-3)]
    rows += directional(held(loss, cfg, zero, g), zero, g, key=jax.random.key(6), n=1, grad=slope,
                        name="tie: the gradient is that of the lower index, direction")
    return rows + [f"tie: at eps {eps:.0e} the difference quotient is {near:.1e}, the gradient "
                   f"{jax.jit(slope)(zero, g):.1e}"]


# The kernel ------------------------------------------------------------------------------

def kernel_rows():
    """The grouped matmul, interpreted, in five blocks along each axis, the last ones cut: differences through its own
    VJP and the gradient of lax.ragged_dot, with empty groups and rows past the last one; then a layer with it."""
    rng = np.random.default_rng(4)
    group_sizes = jnp.array([9, 0, 17, 3, 0], jnp.int32)
    x, w, g = (jnp.asarray(rng.normal(size=shape)) for shape in ((37, 13), (5, 13, 14), (37, 14)))
    kernel = partial(kernels.grouped_matmul, tiles=kernels.Tiles(*[kernels.Tile(8, 3, 3)] * 3))
    rows = vjp(kernel, x, w, group_sizes, key=jax.random.key(4), name="kernel VJP, finite differences,")

    def pulled(f):
        return jax.jit(lambda: dict(zip(("dx", "dw"), jax.vjp(lambda x, w: f(x, w, group_sizes), x, w)[1](g))))()
    rows += compare("kernel against ragged_dot, gradient", pulled(kernel), pulled(lax.ragged_dot), 1e-9)
    cfg = dataclasses.replace(SHAPE, dispatch="dropless")
    got, want = (jax.jit(jax.grad(partial(layer_loss, cfg=cfg, grouped_matmul=f)))(*layer_setting(cfg))
                 for f in (kernels.grouped_matmul, lax.ragged_dot))
    return rows + compare("layer with the kernel, gradient", got, want, 1e-9)


# PyTorch ---------------------------------------------------------------------------------

def torch_gradient(module, tree):
    """The .grad of a module of torch_twin.py in the shape of the tree that filled it, as NumPy arrays."""
    gradient = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), tree)
    for view, parameter in module.leaves(gradient):  # slices and transposes of NumPy arrays are views to write to
        view[...] = from_torch(parameter.grad)
    return gradient


def mixtral_rows():
    """Outputs, and gradients of input and parameters, of transformers' sparse block; and its load-balance loss, in
    which counts aren't divided by k."""
    import torch_twin
    cfg = dataclasses.replace(SHAPE, dispatch="dropless", shared_hidden=0)
    both, g = layer_setting(cfg)
    block, x = torch_twin.Mixtral(both["p"], cfg.top_k), to_torch(both["x"]).requires_grad_()
    y = block(x)
    (y * to_torch(g)).sum().backward()

    def weighted(both):
        y, aux = moe_layer(both["x"], both["p"], cfg)
        return (y * g).sum(), (y, aux)
    gradient, (ours, aux) = jax.jit(jax.grad(weighted, has_aux=True))(both)
    rows = compare("transformers Mixtral, output", ours, from_torch(y), 1e-6)
    rows += compare("transformers Mixtral, gradient", gradient,
                    {"x": from_torch(x.grad), "p": torch_gradient(block, both["p"])}, 1e-6)
    logits = (x @ block.block.gate.weight.T).flatten(0, 1)
    theirs = torch_twin.mixtral_balance_loss(logits, cfg.top_k)
    return rows + compare("transformers Mixtral, balance loss / k", aux["balance"],
                          from_torch(theirs) / cfg.top_k, 1e-6)


def torch_rows(params, tokens, targets):
    """Logits, the three losses and every gradient leaf of the whole model, in float64."""
    import torch_twin
    network = torch_twin.GPT(SHAPE).load(params)
    x, y = to_torch(tokens).long(), to_torch(targets).long()
    losses = network.losses(x, y)
    network.total(losses).backward()
    (_, (nats, aux)), gradient = jax.jit(jax.value_and_grad(partial(loss_fn, cfg=SHAPE), has_aux=True))(
        params, tokens, targets)
    rows = compare("torch, logits", jax.jit(partial(forward, cfg=SHAPE))(params, tokens)[0], from_torch(network(x)[0]),
                   1e-9)
    names = ("cross-entropy", "balance", "z")
    rows += compare("torch,", dict(zip(names, (nats, aux["balance"], aux["z"]))),
                    dict(zip(names, map(from_torch, losses))), 1e-9)
    return rows + compare("torch, gradient", gradient, torch_gradient(network, params), 1e-9)


def adamw_rows(steps=20, **change):
    """train.py's own step, in float64, against torch.optim.AdamW: the largest difference of each loss over the steps.
    In float32 two scores that tie but for rounding would send a token elsewhere, and two right programs apart."""
    import torch
    import torch_twin
    cfg = train.Config(n_layer=2, n_head=4, n_embd=32, context=16, n_hidden=24, n_experts=4, capacity_factor=1.0,
                       activation="swiglu", shared_hidden=12, batch_size=4, max_iters=steps, warmup_iters=5,
                       grad_clip=0.5, dtype="float64")
    cfg = dataclasses.replace(cfg, **change)
    model_cfg = cfg.model(vocab_size=17)
    ids = jax.random.randint(jax.random.key(2), (1000,), 0, 17).astype(jnp.uint8)
    params, _, _ = setting(model_cfg)
    network = torch_twin.GPT(model_cfg).load(params)
    optimizer = torch_twin.adamw(network, cfg.lr, cfg.weight_decay, beta2=0.99)
    state = {"params": params, "opt": jax.jit(train.optimizer(cfg).init)(params)}
    batches = train.purpose_keys(cfg.seed)["batches"]
    draw = jax.jit(lambda step: data.sample_batch(ids, batches, step, cfg.batch_size, cfg.context))
    lr = jax.jit(train.schedule(cfg))
    names = {"loss": "cross-entropy"} | ({"balance": "balance", "z": "z"} if cfg.n_experts else {})
    ours, want = [], []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # operators this small wait for other threads longer than they compute
    for step in range(steps):
        x, y = draw(step)
        losses = torch_twin.train_step(network, optimizer, to_torch(x).long(), to_torch(y).long(), float(lr(step)),
                                       cfg.grad_clip)
        state, got = train.train_step(state, ids, jnp.int32(step), cfg, model_cfg)
        want.append([float(loss) for loss, _ in zip(losses, names)])
        ours.append([float(got[name]) for name in names])
    torch.set_num_threads(threads)
    worst = np.abs(np.array(ours) / np.array(want) - 1).max(0)
    label = "torch AdamW" if cfg.n_experts else "torch AdamW, dense"
    rows = [Check(f"{label}, {name} of {steps} steps", float(error), 1e-9)
            for name, error in zip(names.values(), worst)]
    parameters = [float(np.linalg.norm(from_torch(parameter.detach()) - a) / np.linalg.norm(a))
                  for a, parameter in network.leaves(jax.device_get(state["params"]))]
    return rows + [Check(f"{label}, parameters after {steps} steps", max(parameters), 1e-9)]


# Bugs that must be caught ----------------------------------------------------------------

def without_gates(routing):
    """The weights of the combination forgotten: every chosen expert counts in full."""
    return routing._replace(gates=jnp.ones_like(routing.gates))


def gates_stopped(routing):
    """The gates taken for constants: the router learns from the auxiliary losses alone."""
    return routing._replace(gates=lax.stop_gradient(routing.gates))


def through_the_one_hot(routing):
    """The one-hot of the choice given the softmax's gradient (a straight-through estimator): values stay right."""
    p = jnp.take_along_axis(routing.probs, routing.experts, axis=-1)
    return routing._replace(gates=routing.gates * (1 + p - lax.stop_gradient(p)))


def undivided(probs, experts, mask=None, own=model.balance_loss):
    """The load-balance loss with counts not divided by k."""
    return experts.shape[-1] * own(probs, experts, mask)


def planted_rows():
    """A gradient 0.1 % too large, one entry lost, and four bugs of the kind one really writes, in one layer."""
    both, g = layer_setting()
    loss, right = held(layer_loss, SHAPE, both, g), jax.grad(layer_loss)

    def caught(name, wrong):
        key = jax.random.key(7)
        return planted(name, directional(loss, both, g, key=key, grad=wrong)
                       + coordinates(loss, both, g, key=key, per_leaf=2, grad=wrong))

    def balance_undivided(both, g):
        with swapped(balance_loss=undivided):
            return layer_loss(both, g)

    return [caught("gradient times 1.001", lambda *a: scaled(right(*a))),
            caught("one entry of w_out zeroed", lambda *a: zeroed(right(*a), "p/w_out")),
            caught("combine weights dropped", jax.grad(rerouted(layer_loss, without_gates))),
            caught("no gradient through the gates", jax.grad(rerouted(layer_loss, gates_stopped))),
            caught("gradient through the one-hot", jax.grad(rerouted(layer_loss, through_the_one_hot))),
            caught("balance loss not divided by k", jax.grad(balance_undivided))]


def main():
    run.prepare_host()
    with jax.enable_x64(True):
        point = setting()
        rows = finite_differences(*point) + layer_rows() + tie_rows() + kernel_rows()
        if torch_missing():
            rows += [f"{name}: {torch_missing()}" for name in ("transformers Mixtral", "torch", "torch AdamW")]
        else:
            rows += mixtral_rows() + torch_rows(*point) + adamw_rows() + adamw_rows(n_experts=0, shared_hidden=0)
        rows += planted_rows()
    return print_report(rows)


if __name__ == "__main__":
    sys.exit(main())
