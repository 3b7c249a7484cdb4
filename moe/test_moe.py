"""Fast CPU tests of the model and its data: the conventions of model.py, each by a number or a plain loop. No network.

Training, resuming and the command line: test_train.py. Gradients by finite differences, PyTorch: test_gradcheck.py.
"""
import dataclasses
import math
import os
import re
import shlex
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params

import data
import model
import train
from model import (IGNORE, NO_PLACE, MoEConfig, active_params, balance_loss, capacity, count_params, flops_per_token,
                   forward, gates_of, generate, load_entropy, loss_fn, moe_layer, queue_positions, sample_token, z_loss)

HERE = Path(__file__).resolve().parent
SMALL = MoEConfig(vocab_size=11, context=8, n_layer=1, n_head=2, n_embd=16, n_hidden=12, n_experts=4, top_k=2,
                  capacity_factor=1.0)
FORMS = ("einsum", "gather", "dropless", "expert_choice")
ROOMY = 100.0  # a capacity factor with which nothing is dropped
init_params = jax.jit(model.init_params, static_argnames="cfg")
layer = jax.jit(moe_layer, static_argnames=("cfg", "grouped_matmul"))
route = jax.jit(model.route, static_argnames="cfg")


def change(**fields):
    return dataclasses.replace(SMALL, **fields)


def layer_params(cfg, seed=0):
    """One layer's "moe", with weights large enough for uneven loads and gates that differ."""
    shapes = jax.eval_shape(partial(init_params, cfg=cfg), jax.random.key(0))["blocks"][0]["moe"]
    draw = np.random.default_rng(seed).normal
    return {name: jnp.asarray(draw(0, 0.5, s.shape), s.dtype) for name, s in shapes.items()}


def inputs(seed=1):
    """(B, T, D) of SMALL."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=(3, 8, 16)), jnp.float32)


def tokens_of(seed, T=SMALL.context):
    return jnp.asarray(np.random.default_rng(seed).integers(0, SMALL.vocab_size, (3, T)), jnp.int32)


@pytest.fixture(scope="module")
def params():
    return init_params(jax.random.key(0), SMALL)


# The reference: one token after the other ------------------------------------------------

def feed_forward(x, w_in, w_out, activation):
    h = x @ w_in
    if activation == "swiglu":
        gate, up = np.split(h, 2)
        h = gate / (1 + np.exp(-gate)) * up
    elif activation == "relu":
        h = np.maximum(h, 0)
    else:
        h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
    return h @ w_out


def loop(x, p, cfg, mask=None):
    """moe_layer's y, and which choices (expert choice: experts) served a token, in NumPy and float64."""
    x, p = np.asarray(x, np.float64), {name: np.asarray(a, np.float64) for name, a in p.items()}
    B, T, _ = x.shape
    E, k = cfg.n_experts, cfg.top_k
    real = np.ones((B, T), bool) if mask is None else np.asarray(mask)
    places = max(1, math.ceil(k * T / E * cfg.capacity_factor))
    logits = x @ p["w_router"]
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    choices = np.argsort(-logits, axis=-1, kind="stable")[..., :k]
    y = np.zeros_like(x)
    served = np.zeros((B, T, E if cfg.dispatch == "expert_choice" else k), bool)

    def add(b, t, e, gate):
        y[b, t] += gate * feed_forward(x[b, t], p["w_in"][e], p["w_out"][e], cfg.activation)

    for b in range(B):
        taken = [0] * E
        if cfg.dispatch == "expert_choice":
            for e in range(E):
                ranked = sorted((t for t in range(T) if real[b, t]), key=lambda t: (-probs[b, t, e], t))
                for t in ranked[:places]:
                    served[b, t, e] = True
                    add(b, t, e, probs[b, t, e])
        else:
            by_token = [(t, j) for t in range(T) for j in range(k)]
            queue = by_token if cfg.priority == "token" else sorted(by_token, key=lambda turn: turn[::-1])
            for t, j in queue:
                e = choices[b, t, j]
                if real[b, t] and (cfg.dispatch == "dropless" or taken[e] < places):
                    taken[e] += 1
                    served[b, t, j] = True
                    chosen = probs[b, t, choices[b, t]]
                    add(b, t, e, chosen[j] / chosen.sum() if cfg.renormalise and k > 1 else chosen[j])
        if cfg.shared_hidden:
            for t in np.flatnonzero(real[b]):
                y[b, t] += feed_forward(x[b, t], p["shared_in"], p["shared_out"], cfg.activation)
    return y, served


def near(got, want, tol=2e-6):
    """Relative, in norm: float32 rounds each of the few dozen terms of a sum by 6e-8."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) <= tol * np.linalg.norm(want)


MASK = jnp.arange(8) < jnp.array([8, 5, 0])[:, None]
CASES = [
    ("einsum", {}),
    ("einsum", {"priority": "choice", "renormalise": False, "top_k": 3, "activation": "relu", "n_experts": 3}),
    ("gather", {}),
    ("gather", {"top_k": 1, "capacity_factor": 1.3}),
    ("gather", {"top_k": 4, "capacity_factor": ROOMY, "activation": "relu"}),
    ("gather", {"capacity_factor": 0.01, "n_experts": 3}),  # one place an expert
    ("gather", {"priority": "choice", "renormalise": False, "top_k": 3}),
    ("gather", {"activation": "swiglu", "shared_hidden": 10}),
    ("dropless", {}),
    ("dropless", {"top_k": 1, "activation": "swiglu", "shared_hidden": 10}),
    ("expert_choice", {}),
    ("expert_choice", {"top_k": 1, "capacity_factor": 1.3, "n_experts": 3, "activation": "relu"}),
]


@pytest.mark.parametrize("dispatch, fields", CASES)
def test_every_form_equals_the_loop_over_tokens(dispatch, fields):
    cfg = change(dispatch=dispatch, **fields)
    x, p = inputs(), layer_params(cfg)
    y, aux = layer(x, p, cfg, mask=MASK)
    want, served = loop(x, p, cfg, MASK)
    assert near(y, want)
    lost = ~served.any(-1, keepdims=True) if dispatch == "expert_choice" else ~served
    assert np.isclose(aux["dropped"], lost[MASK].mean(), atol=1e-6) and np.isclose(aux["load"].sum(), 1, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), dispatch=st.sampled_from(FORMS), bias=st.sampled_from([0.0, 3.0, 30.0]),
       lengths=st.lists(st.integers(0, 8), min_size=3, max_size=3))
def test_any_load_and_any_mask_are_served_as_in_the_loop(seed, dispatch, bias, lengths):
    """bias: that of the first expert, which at 30 is the first choice of all, and its opposite, the choice of none."""
    cfg = change(dispatch=dispatch)
    x, p = inputs(seed=seed).at[..., 0].set(1), layer_params(cfg, seed)
    mask = jnp.arange(8) < jnp.array(lengths)[:, None]
    p["w_router"] = p["w_router"].at[0].add(jnp.array([1, 0, 0, -1]) * (0 if dispatch == "expert_choice" else bias))
    assert near(layer(x, p, cfg, mask=mask)[0], loop(x, p, cfg, mask)[0])


def gradients(x, p, cfg, g):
    def loss(x, p):
        y, aux = moe_layer(x, p, cfg)
        return (y * g).sum() + aux["balance"] + aux["z"]
    return jax.jit(jax.grad(loss, argnums=(0, 1)))(x, p)


@pytest.mark.parametrize("factor, forms", [(1.0, ("einsum", "gather")), (ROOMY, ("einsum", "dropless"))])
def test_the_forms_have_the_same_gradients(factor, forms):
    """einsum has no VJP of ours in its dispatch: it checks those of gather and dropless."""
    with jax.enable_x64(True):
        cfg = change(capacity_factor=factor, dtype="float64", activation="swiglu", shared_hidden=10)
        x, g = inputs().astype("float64"), inputs(seed=2).astype("float64")
        p = jax.tree.map(lambda a: a.astype("float64"), layer_params(cfg))
        want, *others = (jax.tree.leaves(gradients(x, p, dataclasses.replace(cfg, dispatch=form), g)) for form in forms)
        for got in others:
            assert all(near(a, b, 1e-13) for a, b in zip(got, want, strict=True))


# Conventions, by numbers -----------------------------------------------------------------

@pytest.mark.parametrize("k, T, E, factor, places", [
    (1, 4, 2, 1, 2), (1, 1, 8, 1, 1), (2, 10, 4, 1.25, 7), (1, 10, 1, 1.1, 11), (2, 64, 8, 1.25, 20),
    (1, 8, 4, 0.1, 1)])
def test_capacity(k, T, E, factor, places):
    assert capacity(T, E, k, factor) == places


def test_gates_are_probabilities_of_the_best_first():
    logits, router = jnp.array([[[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]]]), jnp.eye(3)
    cfg = MoEConfig(vocab_size=2, context=2, n_layer=1, n_head=1, n_embd=3, n_hidden=2, n_experts=3, top_k=2)
    r = route(logits, router, cfg)
    assert np.allclose(r.gates, [[[0.7311, 0.2689]] * 2], atol=5e-5)
    assert r.experts.tolist() == [[[0, 1], [2, 1]]] and r.experts.dtype == jnp.int32
    assert np.allclose(r.probs.sum(-1), 1) and np.array_equal(r.logits, logits)
    raw = route(logits, router, dataclasses.replace(cfg, renormalise=False))
    assert np.allclose(raw.gates, [[[0.6652, 0.2447]] * 2], atol=5e-5)
    assert route(jnp.ones((1, 1, 3)), router, cfg).experts.tolist() == [[[0, 1]]]  # of equals the lower index


def test_balance_loss_is_1_when_uniform_and_E_over_k_when_collapsed():
    E, T = 4, 8
    uniform = jnp.full((1, T, E), 1 / E)
    for k in (1, 2):
        even = (jnp.arange(T * k) % E).reshape(1, T, k)
        assert np.isclose(balance_loss(uniform, even), 1)
    sure = jnp.zeros((1, T, E)).at[..., 0].set(1)
    assert np.isclose(balance_loss(sure, jnp.zeros((1, T, 1), int)), E)
    both = jnp.zeros((1, T, E)).at[..., :2].set(0.5)
    assert np.isclose(balance_loss(both, jnp.broadcast_to(jnp.arange(2), (1, T, 2))), E / 2)
    assert np.isclose(load_entropy(jnp.full(E, 1 / E)), math.log(E)) and load_entropy(jnp.eye(E)[0]) == 0


def test_balance_is_computed_per_layer_and_then_averaged():
    """Two layers that each love one expert: 2 each. Their loads taken together would be even, and give 1."""
    cfg = change(n_layer=2, n_experts=2, top_k=1)
    params = init_params(jax.random.key(0), cfg)
    for e, p in enumerate(params["blocks"]):
        p["ln2_scale"], p["ln2_bias"] = jnp.zeros(16), jnp.ones(16)
        p["moe"]["w_router"] = jnp.zeros((16, 2)).at[:, e].set(2.0)
    aux = jax.jit(lambda params: forward(params, tokens_of(1), cfg)[1])(params)
    assert np.isclose(aux["balance"], 2) and np.array_equal(aux["load"], [[1, 0], [0, 1]])
    assert np.isclose(aux["load_entropy"], 0) and np.isclose(aux["dropped"], 0.5)


def test_z_loss_is_the_mean_squared_logsumexp():
    assert np.isclose(z_loss(jnp.zeros((2, 3, 4))), math.log(4) ** 2)
    mask = jnp.array([[True, False]])
    assert np.isclose(z_loss(jnp.array([[[1.0], [5.0]]]), mask), 1)


def test_places_in_the_queue():
    experts = jnp.array([[[0, 1], [1, 0], [1, 2]]])
    assert queue_positions(experts, 3).tolist() == [[[0, 0], [1, 1], [2, 0]]]
    assert queue_positions(experts, 3, "choice").tolist() == [[[0, 2], [0, 1], [1, 0]]]
    mask = jnp.array([[True, False, True]])
    assert queue_positions(experts, 3, "token", mask).tolist() == [[[0, 0], [NO_PLACE] * 2, [1, 0]]]
    assert queue_positions(experts, 3, "choice", mask).tolist() == [[[0, 1], [NO_PLACE] * 2, [0, 0]]]


@pytest.mark.parametrize("dispatch", ["einsum", "gather"])
def test_a_dropped_token_gets_exactly_zero(dispatch):
    """All tokens alike choose the same two experts of 2 places each: two are served, six get 0."""
    cfg = change(dispatch=dispatch, capacity_factor=0.5)
    x = jnp.broadcast_to(inputs()[:1, :1], (3, 8, 16))
    y, aux = layer(x, layer_params(cfg), cfg)
    assert np.all(np.asarray(y[:, 2:]) == 0) and np.all(np.abs(y[:, :2]).sum(-1) > 0)
    assert aux["dropped"] == 12 / 16 and sorted(aux["load"].tolist()) == [0, 0, 0.5, 0.5]


def test_one_expert_is_the_dense_layer():
    cfg = change(n_experts=1, top_k=1)
    p, x = layer_params(cfg), inputs()
    dense = {"w_in": p["w_in"][0], "w_out": p["w_out"][0]}
    want, aux = layer(x, dense, change(n_experts=0))
    assert aux["load"].shape == (0,) and aux["balance"] == aux["dropped"] == 0
    for dispatch in FORMS:
        y, aux = layer(x, p, dataclasses.replace(cfg, dispatch=dispatch))
        assert near(y, want) and aux["dropped"] == 0 and np.isclose(aux["balance"], 1)


def test_renormalising_one_choice_kills_the_routers_gradient():
    cfg = change(top_k=1)
    assert not cfg.renormalised and change(top_k=2).renormalised and not change(renormalise=False).renormalised
    x, p, g = inputs(), layer_params(cfg), inputs(seed=2)

    def loss(w_router, gates):
        routing = route(x, w_router, cfg)
        chosen = jnp.take_along_axis(routing.probs, routing.experts, -1)
        return (model.dispatch_gather(x, routing._replace(gates=gates(chosen)), p, cfg)[0] * g).sum()
    alive, dead = (jax.jit(jax.grad(loss), static_argnums=1)(p["w_router"], partial(gates_of, renormalise=choice))
                   for choice in (cfg.renormalised, True))
    assert jnp.linalg.norm(alive) > 0.1 and near(alive + dead, alive)  # p / p: what is left is rounding


# Causality, masks, the batch -------------------------------------------------------------

@pytest.mark.parametrize("dispatch", ["einsum", "gather", "dropless"])
def test_later_tokens_leave_earlier_outputs_unchanged(dispatch):
    """Bit for bit where a token's slot stays the same; sorting moves its row, and a product may round otherwise."""
    cfg = change(dispatch=dispatch)
    x, p = inputs(), layer_params(cfg)
    y, aux = layer(x, p, cfg)
    assert dispatch == "dropless" or aux["dropped"] > 0.1
    for t in range(1, 8):
        changed = layer(x.at[:, t:].set(inputs(seed=t + 10)[:, t:]), p, cfg)[0]
        assert near(changed[:, :t], y[:, :t], 1e-6 if dispatch == "dropless" else 0)
        assert not near(changed[:, t], y[:, t], 1e-3)


def test_first_choices_first_lets_a_later_token_evict_an_earlier_one():
    """Why it is not the default. Two tokens, two experts of one place each, mirrored scores."""
    cfg = change(n_head=1, n_embd=2, n_experts=2, capacity_factor=0.5)
    p = layer_params(cfg) | {"w_router": jnp.eye(2)}
    alike, mirrored = jnp.array([[[2.0, 1.0], [2.0, 1.0]]]), jnp.array([[[2.0, 1.0], [1.0, 2.0]]])
    for priority, leaks in (("token", False), ("choice", True)):
        causal = dataclasses.replace(cfg, priority=priority)
        first = [layer(x, p, causal)[0][0, 0] for x in (alike, mirrored)]
        assert np.array_equal(*first) != leaks


def test_expert_choice_sees_the_future():
    cfg = change(dispatch="expert_choice")
    x, p = inputs(), layer_params(cfg)
    changed = x.at[:, 7].set(inputs(seed=5)[:, 7] * 3)
    assert not near(layer(changed, p, cfg)[0][:, :7], layer(x, p, cfg)[0][:, :7], 1e-3)


def test_each_expert_takes_exactly_its_capacity():
    cfg = change(dispatch="expert_choice", top_k=1)
    x, p = inputs(), layer_params(cfg)
    kept = jax.jit(lambda x: model.dispatch_expert_choice(x, route(x, p["w_router"], cfg), p, cfg)[1])(x)
    assert kept.shape == (3, 8, 4) and np.all(kept.sum(1) == 2)
    assert kept.sum(-1).min() == 0 and kept.sum(-1).max() > 1  # some tokens get none, some more than k


@pytest.mark.parametrize("dispatch", FORMS)
def test_masked_tokens_change_nothing(dispatch):
    cfg = change(dispatch=dispatch, shared_hidden=5)
    p, g = layer_params(cfg), inputs(seed=2)
    mask = jnp.array([[True] * 8, [False, True, True, False, True, True, True, False], [False] * 8])
    weights = g * mask[..., None]

    @jax.jit
    def outcome(x):
        def loss(p, x):
            y, aux = moe_layer(x, p, cfg, mask=mask)
            return (y * weights).sum() + aux["balance"] + aux["z"], (y, aux)
        (dp, dx), (y, aux) = jax.grad(loss, argnums=(0, 1), has_aux=True)(p, x)
        return y, aux, dp, dx
    x = inputs()
    want, got = outcome(x), outcome(jnp.where(mask[..., None], x, 7 * inputs(seed=3)))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.array_equal(a, b)
    y, dx = np.asarray(got[0]), np.asarray(got[3])
    assert np.all(y[~mask] == 0) and np.all(dx[~mask] == 0)


@pytest.mark.parametrize("dispatch", FORMS)
def test_rows_of_the_batch_are_independent_and_a_full_mask_is_none(dispatch):
    cfg, full = change(dispatch=dispatch), jnp.ones((3, 8), bool)
    x, p = inputs(), layer_params(cfg)
    y, aux = layer(x, p, cfg)
    assert near(layer(x[::-1], p, cfg)[0][::-1], y)
    for i in range(3):  # the others go and come
        assert near(layer(x, p, cfg, mask=full.at[i].set(False))[0], y.at[i].set(0))
    masked, same = layer(x, p, cfg, mask=full)
    assert near(masked, y) and all(near(same[name], aux[name]) for name in aux)


# Types, options, cost --------------------------------------------------------------------

@pytest.mark.parametrize("dispatch", FORMS)
def test_the_router_works_in_float32_under_bfloat16(dispatch):
    cfg = change(dispatch=dispatch, dtype="bfloat16", capacity_factor=ROOMY)
    x, p = inputs().astype("bfloat16"), layer_params(cfg)
    r = route(x, p["w_router"], cfg)
    assert r.logits.dtype == r.gates.dtype == r.probs.dtype == jnp.float32
    y, aux = layer(x, p, cfg)
    assert y.dtype == jnp.bfloat16 and all(a.dtype == jnp.float32 for a in aux.values())
    wide = x.astype("float32")
    assert near(r.logits, route(wide, p["w_router"], cfg).logits) and near(y, layer(wide, p, cfg)[0], 2**-6)


def test_jitter_needs_a_key_and_moves_the_router_alone():
    cfg = change(jitter=0.1)
    x, p = inputs(), layer_params(cfg)
    plain = route(x, p["w_router"], SMALL)
    assert np.array_equal(route(x, p["w_router"], cfg).logits, plain.logits)
    assert np.array_equal(route(x, p["w_router"], SMALL, jax.random.key(0)).logits, plain.logits)
    moved = route(jnp.ones((64, 8, 16)), jnp.eye(16), change(n_experts=16, jitter=0.1), jax.random.key(0)).logits
    assert 0.9 <= moved.min() < 0.905 and 1.095 < moved.max() <= 1.1 and abs(moved.mean() - 1) < 0.002
    alone = change(n_experts=1, top_k=1, jitter=0.5)  # one expert: the router has nothing to say
    p = layer_params(alone)
    assert np.array_equal(layer(x, p, alone, jax.random.key(0))[0], layer(x, p, alone)[0])


def equations(jaxpr):
    """All of them, those of inner jaxprs too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


@pytest.mark.parametrize("dispatch", ["gather", "dropless", "expert_choice"])
def test_no_gradient_is_scattered(dispatch):
    """What is left is the scatter of int32 indices in the forward pass."""
    cfg = change(dispatch=dispatch)
    x, p = inputs(), layer_params(cfg)
    closed = jax.make_jaxpr(jax.grad(lambda x, p: moe_layer(x, p, cfg)[0].sum(), argnums=(0, 1)))(x, p)
    scatters = [eqn for eqn in equations(closed.jaxpr) if eqn.primitive.name.startswith("scatter")]
    assert all(eqn.outvars[0].aval.dtype == jnp.int32 for eqn in scatters), scatters


def test_flops_are_those_of_the_matmuls():
    cfg = change(n_layer=2, n_experts=0, activation="swiglu")
    params = jax.eval_shape(partial(init_params, cfg=cfg), jax.random.key(0))
    closed = jax.make_jaxpr(partial(forward, cfg=cfg))(params, jax.ShapeDtypeStruct((1, 8), jnp.int32))
    total = 0
    for eqn in equations(closed.jaxpr):
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            total += 2 * eqn.outvars[0].aval.size * math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
    assert total == 8 * flops_per_token(cfg)
    routed = change(n_layer=2, n_hidden=6, activation="swiglu")  # two experts half as wide: the router comes on top
    assert flops_per_token(routed) == flops_per_token(cfg) + cfg.n_layer * 2 * cfg.n_embd * routed.n_experts
    assert flops_per_token(dataclasses.replace(routed, n_hidden=5, shared_hidden=2)) == flops_per_token(routed)


def test_a_token_meets_the_active_parameters(params):
    router, expert = 16 * 4, 2 * 16 * 12
    assert count_params(params) - active_params(params, SMALL) == 2 * expert  # two idle ones
    dense = change(n_experts=0, n_hidden=24)
    dense_params = jax.eval_shape(partial(init_params, cfg=dense), jax.random.key(0))
    assert active_params(dense_params, dense) == count_params(dense_params) == active_params(params, SMALL) - router


# The model -------------------------------------------------------------------------------

def test_loss_at_init_is_that_of_guessing():
    """A little above it: the tied embedding lets a token expect itself, a logit of up to 0.02 * 128 against noise."""
    cfg = MoEConfig(vocab_size=65, context=64, n_layer=1, n_head=4, n_embd=128, n_hidden=256)
    params = init_params(jax.random.key(0), cfg)
    text = jax.random.randint(jax.random.key(1), (8, 65), 0, 65)
    total, (nats, aux) = jax.jit(loss_fn, static_argnames="cfg")(params, text[:, :-1], text[:, 1:], cfg)
    assert 0 < nats - math.log(65) < 0.1 and aux["load"].shape == (1, 8)
    assert np.isclose(total, nats + 0.01 * aux["balance"] + 0.001 * aux["z"], rtol=1e-6)
    assert abs(float(params["blocks"][0]["moe"]["w_out"].std()) / (0.02 / math.sqrt(2)) - 1) < 0.02
    assert abs(float(params["blocks"][0]["moe"]["w_in"].std()) / 0.02 - 1) < 0.02


def test_one_batch_overfits(params):
    x, y = tokens_of(1), tokens_of(2)

    @jax.jit
    def steps(params):
        def step(_, carry):
            grad, (nats, _) = jax.grad(loss_fn, has_aux=True)(carry[0], x, y, SMALL)
            return jax.tree.map(lambda a, g: a - 0.5 * g, carry[0], grad), nats
        return jax.lax.fori_loop(0, 400, step, (params, jnp.float32(0)))
    assert steps(params)[1] < 0.1


def test_the_model_is_causal(params):
    x = tokens_of(3)
    logits = jax.jit(lambda x: forward(params, x, SMALL)[0])
    for t in range(1, 8):
        a, b = logits(x), logits(x.at[:, t:].set((x[:, t:] + 1) % 11))
        assert np.array_equal(a[:, :t], b[:, :t]) and not np.array_equal(a[:, t], b[:, t])


def test_a_gradient_can_be_differentiated_again():
    """A Hessian-vector product of one layer, forward over reverse, against differences of gradients in float64."""
    with jax.enable_x64(True):
        cfg = change(dtype="float64")
        p, v = (jax.tree.map(lambda a: a.astype("float64"), layer_params(cfg, seed)) for seed in (8, 9))
        x, g = inputs().astype("float64"), inputs(seed=2).astype("float64")
        gradient = jax.jit(jax.grad(lambda p: (moe_layer(x, p, cfg)[0] * g).sum()))
        got = jax.jit(lambda p, v: jax.jvp(gradient, (p,), (v,))[1])(p, v)
        above, below = (gradient(jax.tree.map(lambda p, v: p + eps * v, p, v)) for eps in (1e-6, -1e-6))
        for a, up, down in zip(*map(jax.tree.leaves, (got, above, below)), strict=True):
            assert near(a, (up - down) / 2e-6, 1e-6)


def test_ignored_and_masked_targets_do_not_count(params):
    x, y, full = tokens_of(1), tokens_of(2), jnp.ones((3, 8), bool)
    cfg = change(capacity_factor=ROOMY)
    nats = jax.jit(lambda y, mask: loss_fn(params, x, y, cfg, mask=mask)[1][0])
    logits = np.asarray(jax.jit(lambda x: forward(params, x, cfg)[0])(x), np.float64)
    losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, np.asarray(y)[..., None], -1)[..., 0]
    assert np.isclose(nats(y, full), losses.mean(), rtol=1e-6)
    assert np.isclose(nats(y.at[:, 5:].set(IGNORE), full), losses[:, :5].mean(), rtol=1e-6)
    assert np.isclose(nats(y, full.at[:, 5:].set(False)), losses[:, :5].mean(), rtol=1e-6)
    assert nats(jnp.full((3, 8), IGNORE), full) == 0


@pytest.mark.parametrize("fields, words", [
    ({"n_head": 5}, ["n_embd=16", "n_head=5", "n_embd=15"]),
    ({"top_k": 5}, ["top_k=5", "n_experts=4"]), ({"top_k": 0}, ["top_k=0", "at least 1"]),
    ({"n_experts": -1}, ["n_experts=-1"]), ({"n_experts": 0, "shared_hidden": 8}, ["shared_hidden=8", "n_hidden=20"]),
    ({"capacity_factor": 0.0}, ["capacity_factor=0.0", "dropless"]), ({"jitter": 1.0}, ["jitter=1.0", "[0, 1)"]),
    ({"dispatch": "scatter"}, ["'scatter'", "einsum, gather, dropless, expert_choice"]),
    ({"activation": "tanh"}, ["'tanh'", "relu, gelu, swiglu"]), ({"priority": "last"}, ["'last'", "token, choice"]),
    ({"dtype": "int8"}, ["'int8'", "bfloat16"]), ({"balance_weight": -1.0}, ["balance_weight=-1.0"]),
    ({"balance_weight": math.nan}, ["balance_weight=nan"]), ({"vocab_size": 0}, ["vocab_size=0"])])
def test_a_bad_config_is_refused_by_name(fields, words):
    with pytest.raises(ValueError) as refused:
        change(**fields)
    assert all(word in str(refused.value) for word in words), refused.value


def test_bad_shapes_are_refused(params):
    p = layer_params(SMALL)
    with pytest.raises(ValueError, match=r"\(8, 16\), expected \(B, T, 16\)"):
        moe_layer(inputs()[0], p, SMALL)
    with pytest.raises(ValueError, match=r"mask has shape \(3, 7\), expected \(3, 8\)"):
        moe_layer(inputs(), p, SMALL, mask=jnp.ones((3, 7), bool))
    with pytest.raises(ValueError, match="9 tokens exceed the context of 8"):
        forward(params, tokens_of(1, T=9), SMALL)


# Generation ------------------------------------------------------------------------------

@pytest.mark.parametrize("P", [1, 11])
def test_generation_equals_a_forward_pass_over_the_cropped_text(params, P):
    dropless = change(dispatch="dropless")
    draw = jax.jit(generate, static_argnames=("n", "cfg", "top_k"))
    got = draw(params, tokens_of(7, T=P), n=12, cfg=SMALL, key=jax.random.key(0), temperature=0.0)
    assert got.shape == (3, 12) and got.dtype == jnp.int32
    text = np.concatenate([tokens_of(7, T=P), got], axis=1)
    logits = jax.jit(lambda window: forward(params, window, dropless)[0])
    for i in range(P, P + 12):
        last = text[:, max(0, i - 8):i]
        window = np.pad(last, ((0, 0), (0, 8 - last.shape[1])), constant_values=9)  # causal: what follows is not seen
        assert np.array_equal(logits(window)[:, last.shape[1] - 1].argmax(-1), text[:, i]), i


def test_generation_refuses_what_it_cannot_do(params):
    with pytest.raises(ValueError, match="expert_choice"):
        generate(params, tokens_of(1), 2, change(dispatch="expert_choice"), jax.random.key(0))
    with pytest.raises(ValueError, match="empty prompt"):
        generate(params, tokens_of(1)[:, :0], 2, SMALL, jax.random.key(0))


def test_sampling_keeps_exactly_k_and_follows_the_probabilities():
    draw = jax.jit(partial(sample_token, key=jax.random.key(0)))
    tied = jnp.array([[1.0, 3.0, 1.0, 1.0, 1.0]] * 400)
    for k, want in ((1, {1}), (2, {0, 1}), (3, {0, 1, 2}), (5, {0, 1, 2, 3, 4})):
        assert set(draw(tied, temperature=1.0, top_k=k).tolist()) == want
    p, n = np.array([0.1, 0.2, 0.7]), 20000
    share = np.bincount(draw(jnp.array([2 * np.log(p)] * n), temperature=2.0), minlength=3) / n
    assert np.all(abs(share - p) < 4 * np.sqrt(p * (1 - p) / n))
    assert np.all(draw(jnp.array([[0.0, 2.0, 2.0, 1.0]] * 5), temperature=0.0) == 1)


# Data ------------------------------------------------------------------------------------

def test_batches_are_a_function_of_seed_and_step():
    ids = jnp.arange(1000, dtype=jnp.uint16)
    batch = jax.jit(partial(data.sample_batch, ids, batch_size=20000, context=7))
    x, y = batch(jax.random.key(0), 3)
    assert np.array_equal(x, batch(jax.random.key(0), 3)[0]) and np.array_equal(x[:, 1:], y[:, :-1])
    assert not np.array_equal(x, batch(jax.random.key(0), 4)[0])
    assert not np.array_equal(x, batch(jax.random.key(1), 3)[0])
    assert x[:, 0].min() == 0 and x[:, 0].max() == 1000 - 7 - 1  # every crop can come, none reads past the end


def test_all_windows_hold_each_target_once():
    for n in (9, 16, 17, 18):
        tokens, targets = data.all_windows(np.arange(n, dtype=np.uint8), 8, IGNORE)
        assert sorted(targets[targets != IGNORE]) == list(range(1, n))
        assert np.all((targets == tokens + 1)[targets != IGNORE])


def test_tiny_shakespeare_is_split_as_nanogpt_does():
    if not (Path(os.environ.get("TFDS_DATA_DIR", "/nowhere")) / "tiny_shakespeare").is_dir():
        pytest.skip("not verified: TFDS_DATA_DIR names no prepared tiny_shakespeare")
    corpus = data.load("tiny_shakespeare")
    assert (len(corpus.train), len(corpus.val), len(corpus.vocab)) == (1_003_854, 111_540, 65)
    assert data.decode(corpus.train[:14], corpus.vocab) == "First Citizen:"


def test_a_damaged_cache_is_rebuilt(tmp_path):
    path = tmp_path / "cache" / "x.npz"
    data.write_cache(path, ("to be", "ö?"))
    assert data.read_cache(path) == ("to be", "ö?")
    whole = path.read_bytes()
    path.write_bytes(whole[:len(whole) // 2])
    assert data.read_cache(path) is None
    np.savez(path, train=np.zeros(3, np.uint8), val=np.zeros(3, np.uint8), sha256="of something else")
    assert data.read_cache(path) is None


# What the README says ---------------------------------------------------------------------

def test_the_readme_names_scripts_and_flags_that_exist():
    """Every command in its code blocks: the script is there, and train.py accepts the flags."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"^```[a-z]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    commands = [shlex.split(line, comments=True) for line in blocks.splitlines() if line.startswith("python ")]
    assert {"train.py", "gradcheck.py", "bench.py"} <= {words[1] for words in commands}
    for _, script, *flags in commands:
        assert (HERE / script).is_file(), script
        if script == "train.py" and "--resume" not in flags:
            train.parse(flags)
