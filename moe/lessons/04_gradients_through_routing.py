# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---
# %% [markdown]
# # Gradients through routing: how a router learns from a decision that has no derivative
#
# After this lesson you can predict the gradient of each "non-differentiable" operation, say which part of a router's
# choice carries a gradient and which does not, explain why finite differences explode at a tie, read the balance
# loss's gradient, and compare the estimators that put a gradient through a discrete choice.
#
# It uses this project's `model.py` (`route`, `gates_of`, `balance_loss`, `z_loss`, `dispatch_gather`).
# All claims hold on JAX 0.10 and 0.12.
#
# Letters: **B** sequences, **T** tokens, **D** model, **E** experts, **k** choices of a token, **C** capacity,
# **N** = B·T. l: logits, p: probabilities, g: gates, f: outputs of the experts, y: output of the layer.

# %%
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent if "__file__" in globals() else Path.cwd()
sys.path[:0] = [str(PROJECT), str(PROJECT.parent)]  # the project's files, and common/ beside it

# %%
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from model import MoEConfig, balance_loss, dispatch_gather, gates_of, init_params, load_of, route, z_loss

random = np.random.default_rng(0)


def normal(*shape, scale=1.0):
    return jnp.asarray(random.normal(scale=scale, size=shape), jnp.float32)


def message(error, f, *args):
    """The text of the error that f(*args) must raise."""
    try:
        f(*args)
    except error as why:
        return str(why)
    raise AssertionError(f"no {error.__name__} was raised")


def close(a, b, tolerance=1e-5):
    return np.allclose(a, b, rtol=tolerance, atol=tolerance)

# %% [markdown]
# ## What JAX returns at kinks and steps [S2-106] (must-read)
# A step function has the derivative 0 almost everywhere, and JAX returns it: no error, and a parameter behind it never
# moves. At a kink the derivative does not exist, and each operation takes its own convention.
#
# ```
#    relu at 0: 0       maximum(x, 0) at 0: 0.5        abs at 0: 1          round, floor, sign: 0 everywhere
#        │  /                 │  /                      \ │ /                       ┌───
#        │ /                  │ /                        \│/                    ┌───┘
#    ────┘────            ────┘────                   ────┴────              ───┘
# ```
#
# **Claim.** The table below, each row by running it. Two ways to write one function can differ at its kink: relu and
# `maximum(x, 0)` do, and |x| as √(x²) is NaN there. (It matters where a value sits *exactly* at the kink: zeros from
# masks, padding, dropped tokens.)

# %%
AT_A_POINT = [  # operation, the point, its gradient there
    ("relu(x)", jax.nn.relu, 0.0, 0.0),
    ("maximum(x, 0)", lambda x: jnp.maximum(x, 0.0), 0.0, 0.5),
    ("where(x > 0, x, 0)", lambda x: jnp.where(x > 0, x, 0.0), 0.0, 0.0),
    ("abs(x)", jnp.abs, 0.0, 1.0),
    ("sqrt(x * x)", lambda x: jnp.sqrt(x * x), 0.0, np.nan),
    ("clip(x, -1, 1), inside", lambda x: jnp.clip(x, -1.0, 1.0), 0.3, 1.0),
    ("clip(x, -1, 1), at its edge", lambda x: jnp.clip(x, -1.0, 1.0), 1.0, 0.5),
    ("clip(x, -1, 1), outside", lambda x: jnp.clip(x, -1.0, 1.0), 2.0, 0.0),
    ("round(x)", jnp.round, 1.3, 0.0),
    ("floor(x)", jnp.floor, 1.3, 0.0),
    ("sign(x)", jnp.sign, 1.3, 0.0),
    ("sign(x)", jnp.sign, 0.0, 0.0),
    ("float(x > 1)", lambda x: (x > 1.0).astype(jnp.float32), 1.3, 0.0),
]
print(f"{'operation':30}{'at':>6}{'gradient':>10}")
for name, f, at, want in AT_A_POINT:
    got = float(jax.jit(jax.grad(f))(at))
    print(f"{name:30}{at:6}{got:10.1f}")
    assert got == want or np.isnan(got) and np.isnan(want)

# %% [markdown]
# **Claim.** `argmax` gives an index; as a float, or as a one-hot row, its gradient is 0. As an integer it has none, and
# `grad` refuses. `max` passes the gradient to the largest entry, and equal entries share it.

# %%
v = jnp.array([0.3, 1.2, -0.5, 0.9])
as_float = lambda v: jnp.argmax(v).astype(jnp.float32)
as_one_hot = lambda v: jax.nn.one_hot(jnp.argmax(v), 4) @ jnp.arange(4.0)
assert all(not np.any(jax.jit(jax.grad(through_argmax))(v)) for through_argmax in (as_float, as_one_hot))
assert "real-valued outputs" in message(TypeError, jax.grad(jnp.argmax), v)
of_max = jax.jit(jax.grad(jnp.max))
assert of_max(v).tolist() == [0, 1, 0, 0] and of_max(jnp.array([1.0, 2.0, 2.0, 0.0])).tolist() == [0, 0.5, 0.5, 0]

# %% [markdown]
# **Claim.** `sort` and `top_k` move values, and their Jacobian is the move: one-hot rows, in the order of the result.
# At a tie they do not share: the order is stable, so the lower index comes first and takes the whole gradient.

# %%
order = jnp.argsort(v)
of_sort, of_top_k = jax.jit(jax.jacrev(lambda v: (jnp.sort(v), lax.top_k(v, 2)[0])))(v)
assert (of_sort == np.eye(4)[order]).all()
assert (of_top_k == np.eye(4)[[1, 3]]).all()
print(f"v = {v}, Jacobian of top_k(v, 2):\n{of_top_k}")

of_first = jax.jit(jax.grad(lambda v: lax.top_k(v, 1)[0][0]))
assert of_first(jnp.array([1.0, 2.0, 2.0, 0.0])).tolist() == [0, 1, 0, 0]  # max: [0, 0.5, 0.5, 0]

# %% [markdown]
# ## The router's choice: which, and how much
# ```
#                                ┌─► experts (integers): which      a step   no gradient
#  x ─► l = x W ─► p = softmax ──┤
#                                └─► gates g: how much              smooth   the router's only gradient
#
#  y = Σ_j  g_j · f_{experts_j}(x)          j = 1 ... k
# ```
# The router hears of the loss only through the gates of the experts that it chose: whether they should have weighed
# more. What another expert would have done is never computed, so nobody can tell it.
#
# With W the identity x *is* the logits, so that `route` can be looked at alone. f: one number an expert.

# %%
E, k = 4, 2
cfg = MoEConfig(vocab_size=11, context=16, n_layer=1, n_head=1, n_embd=E, n_hidden=8, n_experts=E, top_k=k)
f = jnp.array([1.0, -2.0, 3.0, 0.5])


@partial(jax.jit, static_argnames="cfg")
def choose(l, cfg):
    """l (T, E) -> route's Routing, its arrays (T, k) or (T, E)."""
    return jax.tree.map(lambda a: a[0], route(l[None], jnp.eye(E, dtype=l.dtype), cfg))


@partial(jax.jit, static_argnames="cfg")
def output(l, cfg=cfg):
    """y (T,) for logits l (T, E)."""
    routing = choose(l, cfg)
    return (routing.gates * f[routing.experts]).sum(-1)


@partial(jax.jit, static_argnames="cfg")
def output_held(l, experts, cfg=cfg):
    """The same with the decision held fixed: the gates of the given experts (T, k), whoever is the largest."""
    return (gates_of(jnp.take_along_axis(jax.nn.softmax(l), experts, -1), cfg.renormalised) * f[experts]).sum(-1)


l = jnp.array([[2.0, 1.0, 0.0, -1.0], [0.5, -0.3, 1.5, 0.1]])
assert choose(l, cfg).experts.tolist() == [[0, 1], [2, 0]]
assert close(choose(l, cfg).gates[0], [0.7311, 0.2689], 1e-4)  # logits 2, 1, renormalised: softmax over the chosen
raw = replace(cfg, renormalise=False)
three = jnp.array([[2.0, 1.0, 0.0, -60.0]])  # the fourth is as good as absent
assert close(choose(three, raw).gates, [[0.6652, 0.2447]], 1e-4)  # not renormalised: softmax over all

# %% [markdown]
# **Claim.** `jax.grad` differentiates with the decision held fixed. Away from ties that *is* the derivative: central
# differences agree, whether the decision is held or left free.

# %%
def central(f, x, direction, eps):
    """The central difference of the sum of f at x along `direction`, NumPy float64."""
    with jax.enable_x64(True):
        ahead, behind = (np.asarray(f(x + step * direction)).sum() for step in (eps, -eps))
    return (ahead - behind) / (2 * eps)


@jax.jit
def slopes(l):
    """The gradient of the sum of output's y: (T, E)."""
    return jax.grad(lambda l: output(l).sum())(l)


def exact(l, direction):
    with jax.enable_x64(True):
        return (np.asarray(slopes(l)) * direction).sum()


l64, direction = np.asarray(l, np.float64), random.normal(size=(2, E))
held = np.asarray(choose(l, cfg).experts)
derivative = exact(l64, direction)
for f_of_l in (output, lambda l: output_held(l, held)):
    measured = central(f_of_l, l64, direction, 1e-5)
    print(f"gradient · direction {derivative:.10f}, central difference {measured:.10f}")
    assert abs(measured - derivative) < 1e-8 * abs(derivative)

# %% [markdown]
# **Claim: a tie.** Here the second and third logits are equal: the smallest push decides who is the second choice,
# and y *jumps*. A central difference divides the jump by 2ε, and grows without bound; the gradient is that of the
# side which `top_k` took, as finite as ever. So gradient checks of a router hold the decision fixed.

# %%
tie = np.array([[2.0, 1.0, 1.0, 0.0], [1.0, 2.0, 2.0, 0.0]])  # for the second row see the next claim
push_1, push_2 = np.zeros((2, 2, E))
push_1[0, 1] = push_2[1, 1] = 1.0  # one logit of the first row, one of the second

at_tie = choose(jnp.asarray(tie, jnp.float32), cfg)
held = np.asarray(at_tie.experts)
assert held.tolist() == [[0, 1], [1, 2]]  # of equals the lower index
derivative = exact(tie, push_1)
jump = float(at_tie.gates[0, 1] * (f[1] - f[2]))
print(f"jump at the tie {jump:.4f}, gradient {derivative:.4f}")
print("    eps   decision free   jump / 2 eps   decision held")
for eps in (1e-1, 1e-2, 1e-4, 1e-6):
    free = central(output, tie, push_1, eps)
    fixed = central(lambda l: output_held(l, held), tie, push_1, eps)
    print(f"{eps:7.0e}{free:16.2f}{jump / (2 * eps):15.2f}{fixed:16.6f}")
    assert abs(fixed - derivative) < 1e-8 + eps**2
assert abs(free * 2 * eps / jump - 1) < 1e-5

# %% [markdown]
# **Claim.** A tie *among the chosen* is harmless: first and second choice swap, their sum does not.

# %%
assert abs(central(output, tie, push_2, 1e-5) - exact(tie, push_2)) < 1e-8

# %% [markdown]
# ## The gradient of the gates, and k = 1
# Let a_j = ∂L/∂g_j = (∂L/∂y) · f_j, how much the loss would grow with expert j's weight. For the logits that means:
#
# | gates | ∂L/∂l_e |
# |---|---|
# | raw, g_j = p_j | Σ_j a_j p_j (δ_je - p_e), for every expert, chosen or not |
# | renormalised, g_j = p_j / Σ p of the chosen | g_e (a_e - Σ_j a_j g_j) for the chosen, 0 for the others |
#
# Renormalised gates are a softmax over the chosen, so only *differences* between them count: expert e gains weight
# if its a_e is below the chosen ones' average. The others hear nothing at all from this token.
#
# **Claim.** Both formulas equal `jax.grad`.

# %%
def by_formula(l, cfg):
    """The table's ∂L/∂l, (T, E) NumPy, for L = Σ y² / 2."""
    experts, g, _, p = map(np.asarray, choose(l, cfg))
    y = np.asarray(output(l, cfg))
    a = y[:, None] * np.asarray(f)[experts]  # (T, k), as ∂L/∂y = y
    gradient = np.zeros_like(p)
    if cfg.renormalised:
        np.put_along_axis(gradient, experts, g * (a - (a * g).sum(-1, keepdims=True)), -1)
        return gradient
    np.put_along_axis(gradient, experts, a * g, -1)
    return gradient - p * (a * g).sum(-1, keepdims=True)


slopes_of_loss = jax.jit(jax.grad(lambda l, cfg: (output(l, cfg) ** 2).sum() / 2), static_argnums=1)
by_jax = {gates: np.asarray(slopes_of_loss(l, c)) for gates, c in (("renormalised", cfg), ("raw", raw))}
assert close(by_jax["renormalised"], by_formula(l, cfg)) and close(by_jax["raw"], by_formula(l, raw))
with np.printoptions(precision=4, suppress=True):
    for gates, gradient in by_jax.items():
        print(f"{gates} gates:\n{gradient}")
not_chosen = np.ones((2, E), bool)
np.put_along_axis(not_chosen, np.asarray(choose(l, cfg).experts), False, -1)
assert close(by_jax["renormalised"][not_chosen], 0) and close(by_jax["renormalised"].sum(-1), 0)
assert (np.abs(by_jax["raw"][not_chosen]) > 1e-4).all()

# %% [markdown]
# (Exercise 1 is the second formula.)
#
# **Claim.** With k = 1 a renormalised gate is p / p = 1, a constant: the router's gradient is 0 and it never learns
# from the task. The raw gate p keeps it: ∂L/∂l_e = a p (1 - p), so an expert that helps (a < 0) is chosen more surely.
# This is why Switch (Fedus et al. 2021) multiplies by the probability, and why `MoEConfig.renormalised` is False for
# k = 1.

# %%
best = jax.nn.softmax(l).max(-1, keepdims=True)  # (T, 1)
assert (gates_of(best, True) == 1).all() and (gates_of(best, False) == best).all()


def output_of_one(l, renormalise):
    """y, summed over the tokens, for k = 1."""
    experts = jnp.argmax(l, -1)[:, None]
    return (gates_of(jnp.take_along_axis(jax.nn.softmax(l), experts, -1), renormalise) * f[experts]).sum()


slopes_of_one = jax.jit(jax.grad(output_of_one), static_argnums=1)
dead, alive = (np.asarray(slopes_of_one(l, renormalise)) for renormalise in (True, False))
print(f"k = 1, largest entry of ∂y/∂l: renormalised {np.abs(dead).max():.1e}, raw {np.abs(alive).max():.3f}")
assert close(dead, 0, 1e-6)
chosen = np.argmax(l, -1)
a, p = np.asarray(f)[chosen], np.asarray(best)[:, 0]
assert close(alive[[0, 1], chosen], a * p * (1 - p))

top_1 = replace(cfg, top_k=1)
assert top_1.renormalise and not top_1.renormalised and cfg.renormalised
assert close(jax.jit(jax.grad(lambda l: output(l, top_1).sum()))(l), alive)

# %% [markdown]
# ## The balance loss's gradient goes through P alone
# L = E Σ_e f_e P_e (Fedus et al. 2021, eq. 4): f_e the share of choices that expert e gets, P_e its mean probability.
# f is counted, so it is a constant for the gradient; P is smooth:
#
# ```
#  ∂L/∂l_te = E / N · p_te (f_e - Σ_j f_j p_tj)          above average load: pushed down; below: pulled up
# ```
#
# **Claim.** That is `jax.grad` of `balance_loss`, k = 2 included. A "balance loss" of the counts alone, E Σ f², has
# the same values to look at and a gradient of 0.

# %%
T = 64
tokens = random.normal(size=(1, T, E)).astype(np.float32)  # logits
tokens += np.float32([3, 0, 0, -1])  # almost everybody's first choice is expert 0


@partial(jax.jit, static_argnames="cfg")
def balance(l, cfg=cfg):
    """The balance loss for logits l (1, T, E), and each expert's share of the choices, (E,)."""
    routing = route(l, jnp.eye(E), cfg)
    return balance_loss(routing.probs, routing.experts), load_of(routing.experts, E)


slopes_of_balance = jax.jit(jax.value_and_grad(balance, has_aux=True))
(value, share), gradient = slopes_of_balance(tokens)
share, p = np.asarray(share), np.asarray(jax.nn.softmax(tokens))
print(f"load {np.round(share, 3)}, balance loss {value:.3f}")
assert close(value, E * (share * p.mean((0, 1))).sum())
assert close(gradient, E / T * p * (share - (share * p).sum(-1, keepdims=True)), 1e-6)
assert not np.any(jax.jit(jax.grad(lambda l: E * (balance(l)[1] ** 2).sum()))(tokens))

# %% [markdown]
# **Claim.** Uniform routing gives 1, all on one expert E, all on the same two (k = 2) E / 2. But 1 is not the least
# value: f and P are different things, and can disagree. Here two tokens lean to expert 0, one is sure of expert 1.

# %%
collapsed = np.tile(np.float32([60, 30, 0, 0]), (1, T, 1))
assert close(balance(collapsed, top_1)[0], E)
on_two = np.tile(np.float32([60, 60, 0, 0]), (1, T, 1))
assert close(balance(on_two)[0], E / 2)
evenly = np.tile(np.eye(E, dtype=np.float32), (1, T // E, 1))  # each expert is the first choice of T / E tokens
assert close(balance(evenly, top_1)[0], 1.0)
leaning = jnp.array([[[0.51, 0.49], [0.51, 0.49], [0.01, 0.99]]])
disagreeing = jax.jit(balance_loss)(leaning, jnp.array([[[0], [0], [1]]]))
print(f"counts 2 : 1, mean probabilities 0.34 : 0.66, balance loss {disagreeing:.3f}")
assert disagreeing < 0.9

# %% [markdown]
# **Claim.** It works all the same: descending it alone, a router whose first expert takes almost everything evens out
# its load, though the counts themselves have no derivative.

# %%
@jax.jit
def descend(l, rate=5.0):
    """Gradient descent on a bias (E,) that is added to all logits. Returns the loads on the way, (100, E)."""
    def step(bias, _):
        gradient, load = jax.grad(lambda bias: balance(l + bias, top_1), has_aux=True)(bias)
        return bias - rate * gradient, load
    return lax.scan(step, jnp.zeros(E), length=100)[1]


loads = np.asarray(descend(tokens))
print("largest load at step 0, 10, 99:", *(f"{loads[i].max():.2f}" for i in (0, 10, 99)), "(even: 0.25)")
assert loads[0].max() > 0.8 and loads[-20:].max() < 0.5

# %% [markdown]
# **Claim.** The z-loss, mean logsumexp(l)² (Zoph et al. 2022, eq. 5), does another thing: the balance loss moves
# probability between experts (its gradient sums to 0 over them), the z-loss shifts all logits of a token (its gradient
# sums to 2 logsumexp / N).

# %%
assert close(gradient.sum(-1), 0, 1e-7)
assert close(jax.jit(jax.grad(z_loss))(tokens).sum(-1), 2 * jax.nn.logsumexp(tokens, -1) / T)

# %% [markdown]
# ## What gets no gradient: dropped tokens, idle experts
# **Claim.** A token whose expert is full leaves the layer as exactly 0, and exactly no gradient passes: neither to its
# x (the residual path around the layer carries both) nor through its gate to the router. An expert that got no token
# gets no gradient at all.

# %%
D = 6
cfg = replace(cfg, n_embd=D, top_k=1, capacity_factor=1.0, activation="relu")
T = 8  # capacity: T / E = 2 places
shapes = jax.eval_shape(partial(init_params, cfg=cfg), jax.random.key(0))["blocks"][0]["moe"]
weights = {name: normal(*leaf.shape, scale=leaf.shape[-2] ** -0.5) for name, leaf in shapes.items()}
x = normal(1, T, D)
# Expert 1 for the first four tokens, expert 2 for the rest: each has two places; 0 and 3 stay idle.
decision = jnp.array([[1, 1, 1, 1, 2, 2, 2, 2]])[..., None]


@jax.jit
@partial(jax.grad, argnums=(0, 1), has_aux=True)
def forced(x, weights):
    """The layer with the decision above: the gradients of Σ y² for x and the weights, and (y, kept)."""
    routing = route(x, weights["w_router"], cfg)
    gates = jnp.take_along_axis(routing.probs, decision, -1)
    y, kept = dispatch_gather(x, routing._replace(experts=decision, gates=gates), weights, cfg)
    return (y**2).sum(), (y, kept)


(into_x, into_weights), (y, kept) = jax.tree.map(np.asarray, forced(x, weights))
kept = kept[0, :, 0]
assert kept.tolist() == [True, True, False, False, True, True, False, False]
assert (y[0, ~kept] == 0).all() and (np.abs(y[0, kept]).max(-1) > 0).all()
assert (into_x[0, ~kept] == 0).all() and (np.abs(into_x[0, kept]).max(-1) > 0).all()

of_expert = np.abs(into_weights["w_in"]).max((1, 2))
print("largest gradient of each expert's w_in:", np.round(of_expert, 3))
assert (of_expert[[0, 3]] == 0).all() and (of_expert[[1, 2]] > 0).all()

(_, without_dropped), _ = forced(np.where(kept[:, None], x, 0), weights)
assert close(into_weights["w_router"], without_dropped["w_router"])  # dropped tokens say nothing to the router

# %% [markdown]
# An idle expert is not lost: the balance loss (and, where gates are raw, their denominator) still moves its *logits*,
# so tokens may come back.
#
# ## Three estimators for a discrete choice
# Suppose the expert is *drawn*: e ~ p. The loss to go down is then the mean over draws, J = Σ_e p_e L(f_e), and its
# gradient needs every expert. What can one draw say about it?
#
# | estimator | from a draw e | computes |
# |---|---|---|
# | score function (Williams 1992) | L(f_e) ∂log p_e | one expert |
# | gate (Switch): y = p_e f_e | ∂L(p_e f_e) | one expert |
# | straight-through (Bengio et al. 2013): y = Σ z_j f_j, z = onehot(e) + p - stop_gradient(p) | ∂L(y) | all experts |
#
# z's value is the one-hot row, its derivative that of p: forward the hard choice, backward the soft one.
#
# With E experts the mean over draws is a sum over e, so that no sampling error blurs the comparison.

# %%
l, f = normal(E), normal(E, 3)  # one token, experts' outputs (E, 3)
LOSSES = {"linear": lambda y: y @ jnp.array([1.0, -2.0, 0.5]), "quadratic": lambda y: (y**2).sum() / 2}


def straight_through_one(l, e):
    p = jax.nn.softmax(l)
    return jax.nn.one_hot(e, E) + p - lax.stop_gradient(p)


ESTIMATORS = {
    "score function": lambda l, e, L: L(f[e]) * jax.nn.log_softmax(l)[e],
    "gate": lambda l, e, L: L(jax.nn.softmax(l)[e] * f[e]),
    "straight-through": lambda l, e, L: L(straight_through_one(l, e) @ f),
}


def mean_loss(l, L):
    return jax.nn.softmax(l) @ jax.vmap(L)(f)  # J


ESTIMATORS["score function, baseline J"] = lambda l, e, L: (
    (L(f[e]) - lax.stop_gradient(mean_loss(l, L))) * jax.nn.log_softmax(l)[e])


def mean_and_spread(estimator, L, l):
    """Mean over all draws of the estimated ∂J/∂l, (E,), and the draws' root mean square distance from it."""
    p = jax.nn.softmax(l)
    drawn = jax.vmap(lambda e: jax.grad(estimator)(l, e, L))(jnp.arange(E))  # (E draws, E logits)
    mean = p @ drawn
    return mean, jnp.sqrt(p @ ((drawn - mean) ** 2).sum(-1))


@jax.jit
def compare(l):
    """Each loss's exact ∂J/∂l, and mean and spread of each estimator for each loss."""
    return ({name: jax.grad(mean_loss)(l, L) for name, L in LOSSES.items()},
            {name: {loss: mean_and_spread(estimator, L, l) for loss, L in LOSSES.items()}
             for name, estimator in ESTIMATORS.items()})


gradients, estimates = jax.tree.map(np.asarray, compare(l))
found = {}
print(f"{'estimator':28}{'loss':11}{'bias / |gradient|':>18}{'spread / |gradient|':>21}")
for name in ESTIMATORS:
    for loss, gradient in gradients.items():
        (mean, spread), size = estimates[name][loss], np.linalg.norm(gradient)
        found[name, loss] = np.linalg.norm(mean - gradient) / size, spread / size
        print(f"{name:28}{loss:11}{found[name, loss][0]:18.3f}{found[name, loss][1]:21.3f}")

# %% [markdown]
# **Claim.** The score function is right in the mean for any loss, and scatters. Straight-through is *exact for a
# loss that is linear in y*, with every draw: its gradient is that of Σ p_e f_e, whichever e was drawn. For another
# loss it is biased: for the quadratic one its mean is the gradient of L(Σ p_e f_e), the loss of the mean output
# instead of the mean loss. The gate is biased for both; for the linear one its mean is the gradient of
# Σ p_e² L(f_e) / 2, because Σ p_e L(f_e) ∂p_e is.

# %%
for loss in LOSSES:
    assert found["score function", loss][0] < 1e-5 < 0.1 < found["score function", loss][1]
assert max(found["straight-through", "linear"]) < 1e-5
assert found["straight-through", "quadratic"][0] > 0.05 and min(found["gate", loss][0] for loss in LOSSES) > 0.05


@jax.jit
def followed(l):
    """The gradients of L(Σ p_e f_e) for the quadratic loss, and of Σ p_e² L(f_e) / 2 for the linear one."""
    of_the_mean = jax.grad(lambda l: LOSSES["quadratic"](jax.nn.softmax(l) @ f))
    of_squares = jax.grad(lambda l: jax.nn.softmax(l) ** 2 @ jax.vmap(LOSSES["linear"])(f) / 2)
    return of_the_mean(l), of_squares(l)


of_the_mean, of_squares = followed(l)
assert close(estimates["straight-through"]["quadratic"][0], of_the_mean)
assert close(estimates["gate"]["linear"][0], of_squares)

# %% [markdown]
# **Claim.** A baseline b (Williams 1992), (L - b) ∂log p_e, leaves the mean as it is, because Σ p_e ∂log p_e = 0. With
# b = J the spread of the quadratic loss, whose values are all of one sign, falls.

# %%
with_baseline, without = found["score function, baseline J", "quadratic"], found["score function", "quadratic"]
assert with_baseline[0] < 1e-5 and with_baseline[1] < without[1]

# %% [markdown]
# **Claim.** Straight-through's price: the other experts' outputs enter the gradient of the router, so all E must be
# computed, and the saving that routing is for is gone. Their *weights* still get nothing: z is 0 there.

# %%
@jax.jit
@partial(jax.grad, argnums=(0, 1))
def from_draw_1(l, f):
    return LOSSES["quadratic"](straight_through_one(l, 1) @ f)


into_l, into_f = map(np.asarray, from_draw_1(l, f))
assert close(into_f[[0, 2, 3]], 0, 1e-6) and np.abs(into_f[1]).max() > 0.01
another_3 = np.array(f) + np.array([[0.0], [0.0], [0.0], [1.0]])  # expert 3 was not drawn; and yet
assert not close(from_draw_1(l, another_3)[0], into_l, 1e-2)

# %% [markdown]
# So layers like this project's take the gate, and draw nothing: k experts are computed, and the gradient is exact for
# the function that is computed, y = Σ g_j f_j with the decision held.
#
# ## Exercise 1
# Write `router_gradient(experts, gates, a, n_experts)`: ∂L/∂logits (T, E) for renormalised gates, from experts (T, k)
# int, gates (T, k), and a = ∂L/∂gates (T, k). Without `jax.grad`.

# %%
# Your answer
def router_gradient(experts, gates, a, n_experts):
    raise NotImplementedError

# %%
# Self-check (runs on your answer once it is written, on the solution until then)
def check_router_gradient(f):
    @jax.jit
    def both(logits, a):
        """The gradient by jax.grad and by f, and experts."""
        experts = lax.top_k(logits, a.shape[-1])[1]
        gates, backward = jax.vjp(
            lambda logits: gates_of(jnp.take_along_axis(jax.nn.softmax(logits), experts, -1), True), logits)
        return backward(a)[0], f(experts, gates, a, logits.shape[-1]), experts

    for k in (1, 3):
        logits, a = np.random.default_rng(k).normal(size=(2, 5, 6)).astype(np.float32)
        want, got, experts = map(np.asarray, both(logits, a[:, :k]))
        assert got.shape == want.shape, f"the shape is (T, E) = {want.shape}, not {got.shape}"
        elsewhere = np.ones(want.shape)
        np.put_along_axis(elsewhere, experts, 0, -1)
        assert close(got * elsewhere, 0, 1e-6), "experts that were not chosen get 0"
        assert close(got.sum(-1), 0, 1e-5), "gates sum to 1, so gradients sum to 0 over the experts"
        assert close(got, want, 1e-5), "differs from jax.grad"

# %% [markdown]
# ## Exercise 2
# Write `straight_through(logits, k)`, (T, E) -> (T, E): forward 1 for the k largest logits of a row (equal ones: the
# lower index) and 0 for the others, backward the gradient of k · softmax(logits), whose rows sum to k as well.

# %%
# Your answer
def straight_through(logits, k):
    raise NotImplementedError

# %%
# Self-check
def check_straight_through(f):
    @partial(jax.jit, static_argnums=2)
    def three(logits, c, k):
        """f's value, its gradient times c, and that of k · softmax."""
        value, backward = jax.vjp(lambda l: f(l, k), logits)
        return value, backward(c)[0], jax.vjp(lambda l: k * jax.nn.softmax(l), logits)[1](c)[0]

    logits = jnp.array([[0.3, 1.2, -0.5, 0.9], [1.0, 1.0, 1.0, -2.0]])
    c = jnp.array([[1.0, -1.0, 2.0, 0.5], [0.3, 0.1, -0.7, 2.0]])
    for k, want in ((1, [[0, 1, 0, 0], [1, 0, 0, 0]]), (2, [[0, 1, 0, 1], [1, 1, 0, 0]])):
        value, got, soft = three(logits, c, k)
        assert close(value, want, 1e-6), f"k = {k}: forward is the hard choice"
        assert np.abs(got).max() > 0, "no gradient passes"
        assert close(got, soft, 1e-6), f"k = {k}: backward is that of k · softmax"

# %% [markdown]
# ## Rules
# | rule | because |
# |---|---|
# | round, floor, sign, argmax and comparisons give 0, silently | derivative almost everywhere |
# | at a kink look the convention up: relu 0, maximum and clip 0.5, abs 1 | equal functions differ there |
# | `max` shares among equals, `sort` and `top_k` don't | they permute: the lower index first |
# | a router learns through its gates alone | the choice is a step |
# | check a router's gradient with the decision held | at a tie y jumps, and a difference quotient is jump / 2ε |
# | never renormalise k = 1 | p / p is constant: gradient 0 |
# | renormalised gates tell nothing to experts that were not chosen | softmax over the chosen |
# | a balance loss needs a smooth factor | counts have no gradient, P has |
# | a dropped token passes nothing, forward or backward | the residual path carries it |
# | straight-through: exact for a linear loss, needs all experts | backward is that of Σ p_e f_e |

# %% [markdown]
# ## Solutions

# %%
def router_gradient_solution(experts, gates, a, n_experts):
    chosen = gates * (a - (a * gates).sum(-1, keepdims=True))  # (T, k): softmax's gradient, over the chosen
    return jnp.einsum("tk,tke->te", chosen, jax.nn.one_hot(experts, n_experts, dtype=gates.dtype))


def straight_through_solution(logits, k):
    hard = jax.nn.one_hot(lax.top_k(logits, k)[1], logits.shape[-1]).sum(-2)
    soft = k * jax.nn.softmax(logits)
    return hard + soft - lax.stop_gradient(soft)

# %%
try:
    check_router_gradient(router_gradient)
except NotImplementedError:
    check_router_gradient(router_gradient_solution)

# %%
try:
    check_straight_through(straight_through)
except NotImplementedError:
    check_straight_through(straight_through_solution)
