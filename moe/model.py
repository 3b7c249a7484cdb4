"""A GPT-2 style decoder whose feed-forward layers are mixtures of experts, in raw JAX: every function is pure.

Legend: B sequences, T tokens a sequence, N = B * T rows, D model, E experts, k choices a token, F hidden of an expert,
C capacity (places of an expert, in each sequence), S slots (places of all experts), R rows of one expert,
H heads, K head dim (D / H), V vocabulary, L layers.

A router scores each token for each expert; the token goes to its k best experts, and its output is the sum of theirs,
weighted by the gates. Four ways to bring tokens to experts (`cfg.dispatch`):

    einsum         one-hot tensors, two einsums   capacity: what finds its expert full is dropped   GShard, Switch
    gather         the same slots, by index       capacity; equals einsum; the fast form on a CPU
    dropless       sorted by expert, ragged_dot   no capacity, nothing dropped                      MegaBlocks
    expert_choice  each expert takes its best C   capacity, always full; sees the future            Zhou et al.

Conventions, where papers and libraries differ:
- A group is one sequence: capacity is counted in it, so that an output never depends on other rows of the batch.
- A full expert serves whom it met first, token by token: all choices of a token come before those of the next one.
  GShard and Switch serve all first choices before all second ones (`priority="choice"`); there a later token's first
  choice takes an earlier token's second one, and the earlier output depends on the later token.
- A dropped choice adds exactly 0 and the gates of the others stay as they are: the residual stream carries the token.
- Gates are probabilities of the softmax over all E experts, divided by their sum over the k choices (`gates_of`).
- The router works in at least float32, whatever the activations' dtype.
- Masked tokens (padding) take no place, enter no loss and get 0.

Sources: Shazeer et al. 2017 (top-k gating), Lepikhin et al. 2020 (GShard), Fedus et al. 2021 (Switch Transformer),
Zoph et al. 2022 (ST-MoE: z-loss), Gale et al. 2022 (MegaBlocks), Zhou et al. 2022 (expert choice), Jiang et al. 2024
(Mixtral: renormalised gates), Dai et al. 2024 (DeepSeekMoE: a shared expert). GPT-2: Radford et al. 2019.
"""
import dataclasses
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

IGNORE = -1  # a target with this value takes no part in the loss
NO_PLACE = jnp.iinfo(jnp.int32).max  # the place in a queue of a choice that doesn't stand in it

DISPATCH = ("einsum", "gather", "dropless", "expert_choice")
ACTIVATIONS = ("relu", "gelu", "swiglu")
PRIORITIES = ("token", "choice")
DTYPES = ("float32", "bfloat16", "float64")


@dataclass(frozen=True)
class MoEConfig:
    """The model's shape. Hashable, so that it can be a static argument of jit."""
    vocab_size: int
    context: int
    n_layer: int
    n_head: int
    n_embd: int
    n_hidden: int  # F, of one expert
    n_experts: int = 8  # 0: dense, one feed-forward of width n_hidden without a router
    top_k: int = 2  # experts a token
    capacity_factor: float = 1.25  # places of an expert over its fair share of a sequence's choices
    dispatch: str = "gather"  # einsum, gather, dropless or expert_choice
    activation: str = "gelu"  # relu, gelu (the tanh form) or swiglu
    shared_hidden: int = 0  # width of an expert that every token passes through besides; 0: none
    renormalise: bool = True  # gates of a token's choices sum to 1; see `renormalised`
    priority: str = "token"  # who wins a full expert: token (causal) or choice (first choices first)
    balance_weight: float = 0.01
    z_weight: float = 0.001
    jitter: float = 0.0  # in training the router's input is multiplied by numbers from U(1 - jitter, 1 + jitter)
    dtype: str = "float32"  # of activations and matmuls; parameters, residual stream and router stay as they are

    def __post_init__(self):
        for name in ("vocab_size", "context", "n_layer", "n_head", "n_embd", "n_hidden", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("n_experts", "shared_hidden", "balance_weight", "z_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        for name, allowed in (("dispatch", DISPATCH), ("activation", ACTIVATIONS), ("priority", PRIORITIES),
                              ("dtype", DTYPES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(allowed)}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}: each head takes "
                             f"n_embd / n_head columns; try n_embd={self.n_head * max(1, self.n_embd // self.n_head)}")
        if self.n_experts and self.top_k > self.n_experts:
            raise ValueError(f"top_k={self.top_k} exceeds n_experts={self.n_experts}: a token chooses an expert once; "
                             f"use top_k={self.n_experts} or less, or more experts")
        if not self.n_experts and self.shared_hidden:
            raise ValueError(f"shared_hidden={self.shared_hidden} with n_experts=0: the dense feed-forward meets every "
                             f"token already; use shared_hidden=0 and n_hidden={self.n_hidden + self.shared_hidden}")
        if not 0 < self.capacity_factor < math.inf:
            raise ValueError(f"capacity_factor={self.capacity_factor} must be positive and finite: 1 is an expert's "
                             "fair share; dispatch='dropless' has no capacity")
        if not 0 <= self.jitter < 1:
            raise ValueError(f"jitter={self.jitter} must lie in [0, 1): a factor from U(1 - jitter, 1 + jitter) "
                             "must stay positive")

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def renormalised(self):
        """Whether `route` divides gates by their sum: not for k = 1, where the quotient is the constant 1 and the
        router would get no gradient from the loss (Switch multiplies by the probability for this reason)."""
        return self.renormalise and self.top_k > 1


# Parameters ------------------------------------------------------------------------------

def init_params(key, cfg):
    """GPT-2's initialisation: normal(0, 0.02), the router too; the projections that write to the residual stream are
    scaled by 1/sqrt(2L), so that the stream's variance does not grow with depth.

    Returns a dict of float32 arrays; "blocks" is a list of L dicts. A layer's "moe" holds "w_router" (D, E),
    "w_in" (E, D, F), for swiglu (E, D, 2F): gate | up, "w_out" (E, F, D), and of a shared expert "shared_in",
    "shared_out" without the axis E. Dense: "w_in" (D, F), "w_out" (F, D). No biases in the experts: an empty slot,
    a row of zeros, then has output 0.
    """
    D, F, E = cfg.n_embd, cfg.n_hidden, cfg.n_experts
    keys = iter(jax.random.split(key, 2 + 7 * cfg.n_layer))
    residual_std = 0.02 / (2 * cfg.n_layer) ** 0.5
    gated = 2 if cfg.activation == "swiglu" else 1

    def normal(*shape, std=0.02):
        return std * jax.random.normal(next(keys), shape, jnp.float32)

    def experts():
        if not E:
            return {"w_in": normal(D, gated * F), "w_out": normal(F, D, std=residual_std)}
        p = {"w_router": normal(D, E), "w_in": normal(E, D, gated * F), "w_out": normal(E, F, D, std=residual_std)}
        if cfg.shared_hidden:
            p |= {"shared_in": normal(D, gated * cfg.shared_hidden),
                  "shared_out": normal(cfg.shared_hidden, D, std=residual_std)}
        return p

    def layer():
        return {
            "ln1_scale": jnp.ones(D), "ln1_bias": jnp.zeros(D),
            "w_qkv": normal(D, 3 * D), "b_qkv": jnp.zeros(3 * D),
            "w_proj": normal(D, D, std=residual_std), "b_proj": jnp.zeros(D),
            "ln2_scale": jnp.ones(D), "ln2_bias": jnp.zeros(D),
            "moe": experts(),
        }

    return {
        "wte": normal(cfg.vocab_size, D),  # token embedding and, transposed, the output head
        "wpe": normal(cfg.context, D),
        "blocks": [layer() for _ in range(cfg.n_layer)],
        "lnf_scale": jnp.ones(D), "lnf_bias": jnp.zeros(D),
    }


def count_params(params):
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def active_params(params, cfg):
    """How many of the parameters one token meets: all but E - k experts of each layer (expert choice: on average)."""
    experts = sum(count_params([p["moe"]["w_in"], p["moe"]["w_out"]]) for p in params["blocks"])
    return count_params(params) - (experts // cfg.n_experts * (cfg.n_experts - cfg.top_k) if cfg.n_experts else 0)


def flops_per_token(cfg):
    """FLOPs of the matmuls of a forward pass, a token, at full context: 2 for each parameter of a matrix that the
    token meets, and 4 T D a layer for attention (nothing taken off for causality). Each of the k choices counts,
    dropped or not; empty slots and the one-hot einsums, which compute nothing of use, don't."""
    D, gated = cfg.n_embd, 2 if cfg.activation == "swiglu" else 1
    hidden = cfg.top_k * cfg.n_hidden + cfg.shared_hidden if cfg.n_experts else cfg.n_hidden
    layer = 2 * D * (4 * D + cfg.n_experts + (gated + 1) * hidden) + 4 * cfg.context * D
    return cfg.n_layer * layer + 2 * D * cfg.vocab_size


# Matrix products -------------------------------------------------------------------------

def widen(x):
    """x in at least float32 (float64 stays float64, so that finite differences can check the model)."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def wide_matmul(a, b):
    return jnp.matmul(a, b, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


@jax.custom_vjp
def matmul(x, w):
    """(N, I) @ (I, O) -> (N, O), or E such products: (E, R, I) @ (E, I, O) -> (E, R, O); in x's dtype.

    The VJP is the ordinary one, except that the weight's gradient accumulates in and leaves as w's own dtype (float32
    under bfloat16 activations), and how a CPU computes it. Dense layers flatten their input to (N, I) first: on
    XLA:CPU a product of two matrices meets the fast library call, one with a (B, T, I) operand does not.
    """
    return x @ w.astype(x.dtype)


def _matmul_fwd(x, w):
    return x @ w.astype(x.dtype), (x, w)  # not matmul: a gradient is differentiated again (Hessian-vector products)


def _matmul_bwd(residual, g):
    x, w = residual
    dw = lax.platform_dependent(x, g, cpu=_weight_gradient_cpu, default=_weight_gradient)
    return g @ w.astype(x.dtype).mT, dw.astype(w.dtype)


def _weight_gradient(x, g):
    """x^T g: (..., N, I), (..., N, O) -> (..., I, O), accumulated in at least float32."""
    return wide_matmul(x.mT, g)


def _weight_gradient_cpu(x, g):
    """The same with x^T laid out row by row first: XLA:CPU turns a bfloat16 product with a transposed operand
    into a float32 one. A batch axis, if only of 1, and the barriers keep XLA from folding transposes back into the
    product (for bfloat16 into one that its runtime then refuses)."""
    if x.ndim == 2:
        return _weight_gradient_cpu(x[None], g[None])[0]
    return lax.optimization_barrier(wide_matmul(lax.optimization_barrier(x.mT), g))


matmul.defvjp(_matmul_fwd, _matmul_bwd)


def linear(x, w, b):
    """(N, I) @ (I, O) + (O,) -> (N, O), x's dtype; the bias is added, and its gradient summed, in at least float32."""
    return (widen(matmul(x, w)) + b).astype(x.dtype)


# The router ------------------------------------------------------------------------------

class Routing(NamedTuple):
    """What the router says of each token; the choices best first."""
    experts: jax.Array  # (B, T, k) int32
    gates: jax.Array  # (B, T, k), at least float32
    logits: jax.Array  # (B, T, E), at least float32
    probs: jax.Array  # (B, T, E): softmax of the logits


def route(x, w_router, cfg, key=None):
    """x: (B, T, D); w_router: (D, E) -> Routing. Of equal scores the lower index comes first.

    key: a PRNG key switches jitter on (Fedus et al. 2021): x is multiplied by U(1 - jitter, 1 + jitter), for the
    router alone. Which experts are chosen has no gradient, only the gates have one.
    """
    B, T, D = x.shape
    rows = widen(x).reshape(B * T, D)
    if key is not None and cfg.jitter:
        rows = rows * jax.random.uniform(key, rows.shape, rows.dtype, 1 - cfg.jitter, 1 + cfg.jitter)
    logits = matmul(rows, widen(w_router))  # (N, E)
    probs = jax.nn.softmax(logits, axis=-1)
    experts = lax.top_k(lax.stop_gradient(logits), cfg.top_k)[1]  # (N, k)
    # A sum with a one-hot picks the same numbers as an index would; its gradient is a product, not a scatter.
    chosen = (probs[:, None] * jax.nn.one_hot(experts, cfg.n_experts, dtype=probs.dtype)).sum(-1)
    parts = experts, gates_of(chosen, cfg.renormalised), logits, probs
    return Routing(*(part.reshape(B, T, -1) for part in parts))


def gates_of(chosen, renormalise):
    """(..., k) probabilities of the choices -> gates: divided by their sum (Mixtral) or as they are (Switch).

    Logits (2, 1, 0) and k = 2: .7311, .2689 renormalised, .6652, .2447 raw.
    """
    return chosen / chosen.sum(-1, keepdims=True) if renormalise else chosen


def masked_mean(values, mask=None):
    """The mean of (B, T, ...) over the tokens that mask (B, T) lets in; 0 where it lets none in."""
    if mask is None:
        return values.mean((0, 1))
    mask = mask.reshape(*mask.shape, *(1,) * (values.ndim - 2))
    return jnp.where(mask, values, 0).sum((0, 1)) / jnp.maximum(mask.sum(), 1)


def load_of(experts, n_experts, mask=None, dtype=jnp.float32):
    """(B, T, k) -> (E,): the share of the choices that fall on each expert, before any is dropped; sums to 1."""
    return masked_mean(jax.nn.one_hot(experts, n_experts, dtype=dtype), mask).mean(0)


def load_entropy(load):
    """(E,) shares -> scalar, nats: log E where all experts are equally busy, 0 where one does everything."""
    return jax.scipy.special.entr(load).sum()


def balance_loss(probs, experts, mask=None):
    """E sum_e f_e P_e over one layer's tokens: f_e the share of the choices that fall on e, P_e its mean probability.

    probs: (B, T, E); experts: (B, T, k) int; mask: (B, T) bool or None -> scalar. 1 for a uniform router; E where all
    go to one expert with k = 1, E / 2 with k = 2: counts are divided by k. Fedus et al. 2021, eq. 4 to 6 (k = 1).
    f is piecewise constant: the gradient comes through P alone.
    """
    E = probs.shape[-1]
    return E * (load_of(experts, E, mask, probs.dtype) * masked_mean(probs, mask)).sum()


def z_loss(logits, mask=None):
    """The mean over tokens of logsumexp(logits)^2, which keeps logits small. Zoph et al. 2022, eq. 5."""
    return masked_mean(jax.nn.logsumexp(logits, axis=-1) ** 2, mask)


# Capacity --------------------------------------------------------------------------------

def capacity(tokens, n_experts, top_k, factor):
    """Places that each expert has in a sequence of so many tokens: max(1, ceil(k T / E factor)). Fedus et al. 2021,
    eq. 3, for k choices. The factor is taken as the decimal it is written as: 1.1 times 10 is 11, not a bit more."""
    return max(1, math.ceil(Fraction(top_k * tokens, n_experts) * Fraction(str(float(factor)))))


def queue_positions(experts, n_experts, priority="token", mask=None):
    """The place of each choice in its expert's queue: (B, T, k) int -> (B, T, k) int32, counted from 0 a sequence.

    priority "token": all choices of a token stand before those of the next one, so that a place depends on nothing
    later. "choice": all first choices, then all second ones (GShard, Switch). Masked tokens (mask (B, T) False) take no
    place: theirs is NO_PLACE.
    """
    B, T, k = experts.shape
    if mask is not None:
        experts = jnp.where(mask[..., None], experts, n_experts)  # no such expert: its one-hot is all zeros
    queue = experts if priority == "token" else experts.mT  # (B, k, T)
    chosen = jax.nn.one_hot(queue.reshape(B, T * k), n_experts, dtype=jnp.int32)
    before = jnp.cumsum(chosen, axis=1) - chosen
    places = (before * chosen).sum(-1).reshape(queue.shape)
    places = places if priority == "token" else places.mT
    return places if mask is None else jnp.where(mask[..., None], places, NO_PLACE)


# The experts -----------------------------------------------------------------------------

def activate(h, cfg):
    """(..., F) -> (..., F); for swiglu (..., 2F) -> (..., F): silu(gate) * up (Shazeer 2020)."""
    if cfg.activation == "swiglu":
        gate, up = jnp.split(h, 2, axis=-1)
        return jax.nn.silu(gate) * up
    return jax.nn.relu(h) if cfg.activation == "relu" else jax.nn.gelu(h, approximate=True)


def feed_forward(x, w_in, w_out, cfg):
    """(N, D), (D, F), (F, D) -> (N, D): the dense layer, and the shared expert."""
    return matmul(activate(matmul(x, w_in), cfg), w_out)


def expert_ffn(h, p, cfg):
    """Each expert on its own rows: h (E, R, D), p["w_in"] (E, D, F), p["w_out"] (E, F, D) -> (E, R, D)."""
    return matmul(activate(matmul(h, p["w_in"]), cfg), p["w_out"])


def shared_expert(x, p, cfg):
    """The expert that every token meets: x (B, T, D) -> (B, T, D). Dai et al. 2024."""
    return feed_forward(x.reshape(-1, x.shape[-1]), p["shared_in"], p["shared_out"], cfg).reshape(x.shape)


# Dispatch and combine --------------------------------------------------------------------

def dispatch_einsum(x, routing, p, cfg, mask=None):
    """Tokens to experts and back by two einsums with one-hot tensors (GShard, Switch): the definition of the others.

    x: (B, T, D) -> y (B, T, D), x's dtype, and kept (B, T, k) bool: which choices found a place. Two more products of
    B T E C D multiply-adds, nearly all of them with 0, and tensors of B T E C numbers, quadratic in T.
    """
    B, T, D = x.shape
    E, C = cfg.n_experts, capacity(T, cfg.n_experts, cfg.top_k, cfg.capacity_factor)
    places = queue_positions(routing.experts, E, cfg.priority, mask)
    wide = routing.gates.dtype
    expert = jax.nn.one_hot(routing.experts, E, dtype=wide)  # (B, T, k, E)
    place = jax.nn.one_hot(places, C, dtype=wide)  # (B, T, k, C): all zeros past the capacity
    combine = jnp.einsum("btk,btke,btkc->btec", routing.gates, expert, place)
    dispatch = jnp.einsum("btke,btkc->btec", expert, place)  # not combine > 0: a gate may be 0
    h = jnp.einsum("btec,btd->ebcd", dispatch.astype(x.dtype), x).reshape(E, B * C, D)
    out = widen(expert_ffn(h, p, cfg)).reshape(E, B, C, D)
    return jnp.einsum("btec,ebcd->btd", combine, out).astype(x.dtype), places < C


def dispatch_gather(x, routing, p, cfg, mask=None, ffn=expert_ffn):
    """dispatch_einsum by index: the same slots, the same numbers, and no product with a 0 but those of empty slots.

    ffn: a function of (h, p, cfg), the place for experts that live elsewhere; h (E, B * C, D) has an expert's rows by
    (sequence, place), and so has what it returns.
    """
    B, T, D = x.shape
    E, C = cfg.n_experts, capacity(T, cfg.n_experts, cfg.top_k, cfg.capacity_factor)
    places = queue_positions(routing.experts, E, cfg.priority, mask)
    kept = places < C
    sequence = jnp.arange(B, dtype=jnp.int32)[:, None, None]
    slots = jnp.where(kept, (routing.experts * B + sequence) * C + places, E * B * C).reshape(B * T, -1)
    choices = inverse(slots.reshape(-1), E * B * C)

    def experts(h):
        return ffn(h.reshape(E, B * C, D), p, cfg).reshape(-1, D)
    return through_slots(experts, x, routing.gates, slots, choices), kept


def dispatch_dropless(x, routing, p, cfg, mask=None, grouped_matmul=lax.ragged_dot):
    """Choices sorted by expert, so that each expert's rows lie together, however many: no capacity, nothing dropped.

    x: (B, T, D) -> y (B, T, D), and kept (B, T, k): all of the unmasked. grouped_matmul: a function of (rows (M, K),
    w (E, K, N), group_sizes (E,) int32) -> (M, N), lax.ragged_dot or a kernel. Gale et al. 2022.
    """
    B, T, D = x.shape
    E, k = cfg.n_experts, cfg.top_k
    kept = jnp.broadcast_to(True if mask is None else mask[..., None], (B, T, k))
    keys = jnp.where(kept, routing.experts, E).reshape(-1)  # what is masked sorts behind the last expert
    order = jnp.argsort(keys, stable=True).astype(jnp.int32)
    sizes = (keys[:, None] == jnp.arange(E)).sum(0, dtype=jnp.int32)
    n = B * T * k
    slots = jnp.where(kept.reshape(-1), inverse(order, n), n).reshape(B * T, k)
    choices = jnp.where(jnp.arange(n) < sizes.sum(), order, n)

    def experts(h):
        h = activate(grouped_matmul(h, p["w_in"].astype(h.dtype), sizes), cfg)
        return grouped_matmul(h, p["w_out"].astype(h.dtype), sizes)
    return through_slots(experts, x, routing.gates, slots, choices), kept


def dispatch_expert_choice(x, routing, p, cfg, mask=None):
    """Each expert takes the C tokens of a sequence that score highest with it (Zhou et al. 2022): always full, never
    overfull, some tokens with many experts and some with none. Gates are the raw probabilities.

    x: (B, T, D) -> y (B, T, D), and kept (B, T, E) bool: which experts took the token. Not causal: whether a token is
    among the best depends on the tokens after it. So a loss it reaches in training can't be had in generation.
    """
    B, T, D = x.shape
    E, C = cfg.n_experts, min(T, capacity(T, cfg.n_experts, cfg.top_k, cfg.capacity_factor))
    scores = routing.probs if mask is None else jnp.where(mask[..., None], routing.probs, -1)
    best, taken = lax.top_k(lax.stop_gradient(scores).mT, C)  # (B, E, C)
    token = jnp.arange(B, dtype=jnp.int32)[:, None, None] * T + taken
    choices = jnp.where(best >= 0, token * E + jnp.arange(E)[:, None], B * T * E)  # masked tokens leave slots empty
    choices = choices.swapaxes(0, 1).reshape(-1)  # (E, B, C), an expert's slots together
    slots = inverse(choices, B * T * E).reshape(B * T, E)

    def experts(h):
        return expert_ffn(h.reshape(E, B * C, D), p, cfg).reshape(-1, D)
    return through_slots(experts, x, routing.probs, slots, choices), (slots < E * B * C).reshape(B, T, E)


def inverse(index, size):
    """Where each of 0 ... size - 1 stands in index: (n,) int32 -> (size,) int32, n for what stands nowhere. Entries of
    index that are below size differ from each other; others don't count."""
    n = index.shape[0]
    return jnp.full(size, n, jnp.int32).at[index].set(jnp.arange(n, dtype=jnp.int32), mode="drop")


def through_slots(experts, x, gates, slots, choices):
    """x: (B, T, D), each token copied to its slots, through `experts`, a function (S, D) -> (S, D), and summed with
    its gates (B, T, k) -> (B, T, D). slots: (N, k), the slot of each choice, S for none; choices: (S,), the inverse."""
    B, T, D = x.shape
    h = to_slots(x.reshape(B * T, D), slots, choices)
    return from_slots(experts(h), gates.reshape(B * T, -1), slots, choices).reshape(B, T, D)


def rows_at(a, index):
    """a[index], zeros where the index is past the end."""
    return a.at[index].get(mode="fill", fill_value=0)


# The transpose of a gather is a scatter-add. But choices and slots are each other's inverse, so that both gradients are
# gathers again: they fuse with the products around them, read no target back, and sum in one order, always.

@jax.custom_vjp
def to_slots(x, slots, choices):
    """x: (N, D); slots: (N, k); choices: (S,) -> (S, D): the token of each slot, zeros where the slot is empty."""
    return rows_at(x, choices // slots.shape[1])


def _to_slots_fwd(x, slots, choices):
    return rows_at(x, choices // slots.shape[1]), slots


def _to_slots_bwd(slots, g):
    return sum(widen(rows_at(g, slot)) for slot in slots.T).astype(g.dtype), None, None


to_slots.defvjp(_to_slots_fwd, _to_slots_bwd)


@jax.custom_vjp
def from_slots(out, gates, slots, choices):
    """y_n = sum_j gates_nj out[slots_nj]. out: (S, D); gates, slots: (N, k); choices: (S,) -> (N, D), out's dtype.
    The sum is taken in at least float32."""
    return _weighted_rows(out, gates, slots)


def _weighted_rows(out, gates, slots):
    parts = (gate[:, None] * widen(rows_at(out, slot)) for gate, slot in zip(gates.T, slots.T))
    return sum(parts).astype(out.dtype)


def _from_slots_fwd(out, gates, slots, choices):
    return _weighted_rows(out, gates, slots), (out, gates, slots, choices)


def _from_slots_bwd(residual, g):
    """For slot s of choice (n, j): dout_s = gate_nj g_n and dgate_nj = <out_s, g_n>: one gather of g serves both."""
    out, gates, slots, choices = residual
    at_slots = widen(rows_at(g, choices // slots.shape[1]))  # (S, D)
    dout = rows_at(gates.reshape(-1), choices)[:, None] * at_slots
    dgates = rows_at((widen(out) * at_slots).sum(-1), slots)
    return dout.astype(out.dtype), dgates.astype(gates.dtype), None, None


from_slots.defvjp(_from_slots_fwd, _from_slots_bwd)


# The layer -------------------------------------------------------------------------------

def moe_layer(x, p, cfg, key=None, mask=None, grouped_matmul=lax.ragged_dot):
    """A mixture of experts, or with n_experts = 0 the dense layer: x (B, T, D), p a layer's "moe" -> y (B, T, D), aux.

    key: switches jitter on; mask: (B, T) bool, False for padding, or None; grouped_matmul: of dispatch_dropless.
    aux, all at least float32: "balance" and "z", the two auxiliary losses, unweighted; "dropped", the share of the
    unmasked choices that found their expert full; "load" (E,), the share of the choices on each expert before drops;
    "load_entropy" of it, nats. Expert choice needs no balance loss: it is the constant 1; "dropped" is the share of
    tokens that no expert took, "load" counts the tokens taken. Dense: zeros, and a load of shape (0,).
    Raises ValueError for a wrong shape of x or mask.
    """
    if x.ndim != 3 or x.shape[-1] != cfg.n_embd:
        raise ValueError(f"x has shape {x.shape}, expected (B, T, {cfg.n_embd}): capacity is counted a sequence")
    if mask is not None and mask.shape != x.shape[:2]:
        raise ValueError(f"mask has shape {mask.shape}, expected {x.shape[:2]}, one bool a token")
    if not cfg.n_experts:
        y = feed_forward(x.reshape(-1, cfg.n_embd), p["w_in"], p["w_out"], cfg).reshape(x.shape)
        zero = jnp.zeros((), widen(y).dtype)
        aux = {name: zero for name in ("balance", "z", "dropped", "load_entropy")} | {"load": zero[None][:0]}
        return y if mask is None else jnp.where(mask[..., None], y, 0), aux

    routing = route(x, p["w_router"], cfg, key)
    wide = routing.probs.dtype
    if cfg.dispatch == "expert_choice":
        y, kept = dispatch_expert_choice(x, routing, p, cfg, mask)
        served = kept.any(-1, keepdims=True)
        taken = kept.sum((0, 1)).astype(wide)
        load, balance = taken / jnp.maximum(taken.sum(), 1), jnp.ones((), wide)
    else:
        if cfg.dispatch == "dropless":
            y, kept = dispatch_dropless(x, routing, p, cfg, mask, grouped_matmul)
        else:
            form = dispatch_einsum if cfg.dispatch == "einsum" else dispatch_gather
            y, kept = form(x, routing, p, cfg, mask)
        served = kept
        load = load_of(routing.experts, cfg.n_experts, mask, wide)
        balance = balance_loss(routing.probs, routing.experts, mask)
    if cfg.shared_hidden:
        shared = shared_expert(x, p, cfg)
        y = y + (shared if mask is None else jnp.where(mask[..., None], shared, 0))
    dropped = masked_mean((~served).astype(wide), mask).mean()
    return y, {"balance": balance, "z": z_loss(routing.logits, mask), "dropped": dropped, "load": load,
               "load_entropy": load_entropy(load)}


# The rest of the decoder -----------------------------------------------------------------

def layer_norm(x, scale, bias):
    """(N, D) -> (N, D): (x - mean) / sqrt(var + 1e-5) * scale + bias over D, in at least float32. Ba et al. 2016."""
    wide = widen(x)
    centred = wide - wide.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + bias


def attention_weights(q, k):
    """Causal softmax(q k^T / sqrt(K)): (B, H, T, K) twice -> (B, H, T, T), in at least float32."""
    T, K = q.shape[2:]
    scores = wide_matmul(q, k.mT) * K**-0.5
    causal = jnp.tril(jnp.ones((T, T), bool))
    return jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(scores.dtype).min), axis=-1)


@jax.custom_vjp
def attention(q, k, v):
    """Causal softmax(q k^T / sqrt(K)) v. q, k, v: (B, H, T, K) -> (B, H, T, K). Vaswani et al. 2017, eq. 1.

    The VJP saves the probabilities in v's dtype and lays out their transposes before it multiplies them.
    """
    return attention_weights(q, k).astype(v.dtype) @ v


def _attention_fwd(q, k, v):
    p = lax.optimization_barrier(attention_weights(q, k).astype(v.dtype))
    y = p @ v
    return y, (q, k, v, p, y)


def _attention_bwd(residual, dy):
    """dP = dY V^T;  dS = P * (dP - rowsum(dP * P)), and rowsum(dP * P) = rowsum(dY * Y) (Dao et al. 2022, B.4)."""
    q, k, v, p, y = residual

    def transposed(a):
        return lax.optimization_barrier(a.mT)

    dp = wide_matmul(dy, v.mT)
    ds = widen(p) * (dp - (widen(dy) * widen(y)).sum(-1, keepdims=True)) * q.shape[-1] ** -0.5
    ds = lax.optimization_barrier(ds.astype(q.dtype))
    return ds @ k, transposed(ds) @ q, transposed(p) @ dy


attention.defvjp(_attention_fwd, _attention_bwd)


def split_heads(qkv, B, H):
    """(N, 3D) -> q, k, v: (B, H, T, K) each."""
    N, D3 = qkv.shape
    return jnp.moveaxis(qkv.reshape(B, N // B, 3, H, D3 // 3 // H), (2, 3), (0, 2))


def merge_heads(y):
    """(B, H, T, K) -> (N, D)."""
    B, H, T, K = y.shape
    return y.transpose(0, 2, 1, 3).reshape(B * T, H * K)


def block(x, p, cfg, B, key, mask, grouped_matmul):
    """One layer. x: (N, D) -> (N, D), and moe_layer's aux."""
    h = layer_norm(x, p["ln1_scale"], p["ln1_bias"]).astype(cfg.dtype)
    y = merge_heads(attention(*split_heads(linear(h, p["w_qkv"], p["b_qkv"]), B, cfg.n_head)))
    x = x + linear(y, p["w_proj"], p["b_proj"])
    h = layer_norm(x, p["ln2_scale"], p["ln2_bias"]).astype(cfg.dtype)
    y, aux = moe_layer(h.reshape(B, -1, cfg.n_embd), p["moe"], cfg, key, mask, grouped_matmul)
    return x + y.reshape(x.shape), aux


# The model -------------------------------------------------------------------------------

def forward(params, tokens, cfg, key=None, mask=None, grouped_matmul=lax.ragged_dot):
    """tokens (B, T) int, T <= context -> logits (B, T, V), at least float32, and aux: moe_layer's, averaged over the
    layers, but "load" as (L, E).

    key: a PRNG key switches jitter on (training). mask: (B, T) bool, False for padding: it keeps tokens away from the
    experts; attention is causal and sees them, so padding stands behind the text. grouped_matmul: of dispatch_dropless,
    the place for a kernel. Raises ValueError for more tokens than the context holds.
    """
    B, T = tokens.shape
    if T > cfg.context:
        raise ValueError(f"{T} tokens exceed the context of {cfg.context}: crop to the last {cfg.context}")
    keys = [None] * cfg.n_layer if key is None else jax.random.split(key, cfg.n_layer)
    x = (params["wte"][tokens] + params["wpe"][:T]).reshape(B * T, cfg.n_embd)
    layers = []
    for p, layer_key in zip(params["blocks"], keys):
        x, aux = block(x, p, cfg, B, layer_key, mask, grouped_matmul)
        layers.append(aux)
    h = layer_norm(x, params["lnf_scale"], params["lnf_bias"]).astype(cfg.dtype)
    logits = widen(matmul(h, params["wte"].T))  # tied to the embedding
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *layers)
    aux = {name: a if name == "load" else a.mean() for name, a in stacked.items()}
    return logits.reshape(B, T, -1), aux


def loss_fn(params, tokens, targets, cfg, key=None, mask=None, grouped_matmul=lax.ragged_dot):
    """What training minimises: cross-entropy + balance_weight * balance + z_weight * z. tokens, targets: (B, T) int.

    Returns (loss, (nats, aux)): nats the cross-entropy alone, the mean over targets that are not IGNORE and not masked
    (0 where there are none), aux as forward's. key, mask, grouped_matmul: see forward.
    """
    logits, aux = forward(params, tokens, cfg, key, mask, grouped_matmul)
    counted = targets != IGNORE if mask is None else (targets != IGNORE) & mask
    picked = jnp.take_along_axis(logits, jnp.where(counted, targets, 0)[..., None], -1)[..., 0]
    nats = masked_mean(jax.nn.logsumexp(logits, axis=-1) - picked, counted)
    return nats + cfg.balance_weight * aux["balance"] + cfg.z_weight * aux["z"], (nats, aux)


# Generation ------------------------------------------------------------------------------

def sample_token(logits, key, temperature, top_k=None):
    """logits (B, V) -> tokens (B,) int32. temperature 0 is argmax (the first of equals); top_k keeps exactly k entries
    (of equals, those with the lower index)."""
    kept = logits
    if top_k is not None:
        ranks = jnp.argsort(jnp.argsort(logits, axis=-1, stable=True, descending=True), axis=-1)
        kept = jnp.where(ranks < top_k, logits, -jnp.inf)
    drawn = jax.random.categorical(key, kept / jnp.where(temperature > 0, temperature, 1.0), axis=-1)
    return jnp.where(temperature > 0, drawn, jnp.argmax(logits, axis=-1)).astype(jnp.int32)


def generate(params, tokens, n, cfg, key, temperature=1.0, top_k=None):
    """n more tokens: (B, P) int, P >= 1 -> (B, n) int32. n, cfg and top_k are static. No cache: each token costs a
    forward pass over the last `context` tokens. The i-th token draws with fold_in(key, i).

    Tokens are generated without dropping (dispatch_dropless), whatever the dispatch of training: with a capacity, a
    token's output would depend on how far the window has moved.
    Raises ValueError for expert choice, whose training saw tokens that are yet to come here, and an empty prompt.
    """
    if cfg.n_experts and cfg.dispatch == "expert_choice":
        raise ValueError("dispatch='expert_choice' can't generate: which tokens an expert takes depends on tokens that "
                         "are not there yet; train with gather, einsum or dropless")
    B, P = tokens.shape
    if P < 1:
        raise ValueError("an empty prompt: generation needs at least one token to start from")
    cfg, S = dataclasses.replace(cfg, dispatch="dropless"), cfg.context
    prompt = tokens[:, -S:].astype(jnp.int32)
    window = jnp.pad(prompt, ((0, 0), (0, S - prompt.shape[1])))  # left-aligned: causality hides what follows

    def body(i, carry):
        window, length, out = carry
        logits = lax.dynamic_index_in_dim(forward(params, window, cfg)[0], length - 1, axis=1, keepdims=False)
        token = sample_token(logits, jax.random.fold_in(key, i), temperature, top_k)[:, None]
        window = jnp.where(length == S, jnp.roll(window, -1, axis=1), window)
        window = lax.dynamic_update_slice_in_dim(window, token, jnp.minimum(length, S - 1), axis=1)
        return window, jnp.minimum(length + 1, S), lax.dynamic_update_slice_in_dim(out, token, i, axis=1)

    carry = window, jnp.int32(prompt.shape[1]), jnp.zeros((B, n), jnp.int32)
    return lax.fori_loop(0, n, body, carry)[2]
