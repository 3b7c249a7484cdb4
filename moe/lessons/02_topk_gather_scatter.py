# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---
# %% [markdown]
# # Top-k, gather and scatter: choosing experts and moving rows
#
# After this lesson you can write top-k three ways with the right order of ties, reduce along the axis you mean, select
# rows by a mask inside `jit`, predict what a gather or scatter does with indices that repeat or are out of range, say
# what moving rows costs by index and by a one-hot product, and keep scatters out of a backward pass.
#
# It uses this project's `model.py` (`route`, `balance_loss`, `masked_mean`, `queue_positions`, `to_slots`,
# `from_slots`, `inverse`) and `common/profiling.py`. All claims hold on JAX 0.10 and 0.12. Times are printed; what is
# asserted are counts, and ratios that are far larger than any noise.
#
# Letters: **B** sequences, **T** tokens of a sequence, **D** model, **E** experts, **k** experts that a token chooses,
# **C** capacity of an expert, **S** = E·C slots.

# %%
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent if "__file__" in globals() else Path.cwd()
sys.path[:0] = [str(PROJECT), str(PROJECT.parent)]  # the project's files, and common/ beside it

# %%
import itertools
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from common.profiling import cost
from model import (MoEConfig, balance_loss, capacity, from_slots, inverse, masked_mean, queue_positions, route,
                   to_slots)

random = np.random.default_rng(0)


def normal(*shape):
    return random.normal(size=shape).astype(np.float32)


def close(a, b):
    return np.shape(a) == np.shape(b) and np.allclose(a, b, atol=1e-5, rtol=1e-5)

# %% [markdown]
# ## Top-k from scratch [S1-023] (must-read)
# `lax.top_k(scores, k)` returns the k largest values along the last axis and their indices, the largest first. Of equal
# values the one with the lower index comes first. Equal scores are not exotic: padding, a fresh router, or bfloat16
# with its 8 bits make them.
#
# ```
#  scores    3   5   1   5   3          k = 3
#  index     0   1   2   3   4          top_k -> 1, 3, 0        (both 5s in order; of the 3s the first)
# ```
#
# **Claim.** By definition it is a *stable* sort, cut after k.

# %%
def top_k_by_sort(scores, k):
    """NumPy: (..., E) -> (..., k) indices."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :k]


assert lax.top_k(np.array([3, 5, 1, 5, 3]), 3)[1].tolist() == [1, 3, 0]
tied = random.integers(0, 4, (500, 8)).astype(np.float32)  # 8 scores of 4 values: a tie in every row
want = np.asarray(lax.top_k(tied, 3)[1])
assert (top_k_by_sort(tied, 3) == want).all()

# %% [markdown]
# **Claim: k rounds of argmax** give the same, ties included, since argmax returns the *first* maximum. Each round hides
# what was taken. That is k E comparisons and no sort.

# %%
@partial(jax.jit, static_argnames="k")
def top_k_by_argmax(scores, k):
    """(..., E) -> (..., k) int32."""
    rest, chosen = scores, []
    for _ in range(k):
        best = jnp.argmax(rest, axis=-1)
        chosen.append(best)
        rest = jnp.where(jax.nn.one_hot(best, scores.shape[-1], dtype=bool), -jnp.inf, rest)
    return jnp.stack(chosen, axis=-1)


assert np.array_equal(top_k_by_argmax(tied, 3), want)

# %% [markdown]
# **Trap.** Where fewer than k scores are finite (experts switched off by -inf), "hidden" and "never there" look alike,
# and a round takes an expert for the second time. `top_k` never does.

# %%
one_expert_left = np.array([2.0, -np.inf, -np.inf], np.float32)
assert top_k_by_argmax(one_expert_left, 2).tolist() == [0, 0]
assert lax.top_k(one_expert_left, 2)[1].tolist() == [0, 1]

# %% [markdown]
# **Claim: a partition** finds the k largest without sorting the rest (NumPy's `argpartition`; on average linear in E),
# but promises no order, neither within the k nor among ties. So on ties it picks other experts than `top_k`, of equal
# value.

# %%
loose = np.argpartition(-tied, 2, axis=-1)[:, :3]
differs = (np.sort(loose, axis=-1) != np.sort(want, axis=-1)).any(-1)
print(f"argpartition chooses other experts than top_k in {differs.mean():.0%} of the rows with ties")
assert differs.any()
assert (np.sort(np.take_along_axis(tied, loose, -1)) == np.sort(np.take_along_axis(tied, want, -1))).all()

# %% [markdown]
# **Claim.** The k-th largest value decides without ambiguity: take all that is above it, and of what equals it the
# first ones, until there are k. A boolean mask and a cumulative sum do it, then k values are sorted stably.

# %%
def top_k_by_partition(scores, k):
    """NumPy: (N, E) -> (N, k) indices, in lax.top_k's order."""
    N, E = scores.shape
    kth = np.partition(scores, E - k, axis=-1)[:, E - k, None]  # (N, 1)
    above, level = scores > kth, scores == kth
    chosen = above | (level & (level.cumsum(-1) <= k - above.sum(-1, keepdims=True)))
    assert (chosen.sum(-1) == k).all()
    experts = np.nonzero(chosen)[1].reshape(N, k)  # row by row, in ascending order: each row has k
    order = np.argsort(-np.take_along_axis(scores, experts, -1), axis=-1, kind="stable")
    return np.take_along_axis(experts, order, -1)


for scores, k in itertools.product((tied, normal(500, 8)), (1, 2, 8)):
    assert np.array_equal(top_k_by_partition(scores, k), lax.top_k(scores, k)[1])

# %% [markdown]
# **Claim.** NaN counts as the largest value: one bad logit is an expert's certain choice, without an error.

# %%
assert lax.top_k(np.array([1.0, np.nan, 3.0], np.float32), 2)[1].tolist() == [1, 2]

# %% [markdown]
# **In the router.** `route` is a product, a softmax and `lax.top_k`. **Claim.** A router that starts at zero sends
# *every* token to experts 0 and 1: all scores are tied and the lower index wins. The balance loss can't see it: it
# multiplies the load by the mean probabilities, which are uniform, and reports 1, as for perfect balance. Hence the
# random start.

# %%
B, T, D, E, k = 2, 12, 16, 8, 2
cfg = MoEConfig(vocab_size=11, context=T, n_layer=1, n_head=2, n_embd=D, n_hidden=32, n_experts=E, top_k=k)
x, w_router = normal(B, T, D), normal(D, E)
choose, balance = jax.jit(route, static_argnames="cfg"), jax.jit(balance_loss)
queue = jax.jit(queue_positions, static_argnames="n_experts")
routing = jax.tree.map(np.asarray, choose(x, w_router, cfg))
assert np.array_equal(routing.experts, top_k_by_argmax(routing.logits, k))
assert np.array_equal(routing.experts.reshape(-1, k), top_k_by_partition(routing.logits.reshape(-1, E), k))

at_zero = jax.tree.map(np.asarray, choose(x, np.zeros_like(w_router), cfg))
load = np.bincount(at_zero.experts.ravel(), minlength=E) / at_zero.experts.size
loss = balance(at_zero.probs, at_zero.experts)
print(f"load of a router at zero: {load.tolist()}, balance loss {loss:.3f}")
assert (at_zero.experts == [0, 1]).all() and close(loss, 1.0)

# %% [markdown]
# ## Axes, masks and static sizes [S1-018b] (must-read)
# `probs` is (B, T, E). A reduction removes the axes you name, and what is left is the answer's "for each":
#
# | question | expression | shape |
# |---|---|---|
# | how probable is each expert? | `probs.mean((0, 1))` | (E,) |
# | each token's favourite expert | `probs.argmax(-1)` | (B, T) |
# | each expert's favourite token, a sequence | `probs.argmax(1)` | (B, E) |
# | choices on each expert, a sequence | `one_hot(experts, E).sum((1, 2))` | (B, E) |
# | rows that sum to 1 again | `chosen / chosen.sum(-1, keepdims=True)` | (B, T, k) |
#
# **Claim.** Each of them, against a loop; and two of them make the balance loss, E Σ_e f_e P_e.

# %%
probs, experts = routing.probs, routing.experts
favourite_expert, favourite_token = probs.argmax(-1), probs.argmax(1)
for b, t, e in np.ndindex(B, T, E):
    assert probs[b, t, favourite_expert[b, t]] >= probs[b, t, e] <= probs[b, favourite_token[b, e], e]
assert (favourite_expert == experts[..., 0]).all()

counts = np.eye(E)[experts].sum((1, 2))  # one-hot rows (B, T, k, E) -> (B, E)
assert counts.tolist() == [[(experts[b] == e).sum() for e in range(E)] for b in range(B)]
f, P = counts.sum(0) / (B * T * k), probs.mean((0, 1))
assert close(E * (f * P).sum(), balance(probs, experts)) and close(P.sum(), 1.0)

# %% [markdown]
# **Trap: `keepdims`.** Shapes are aligned from the right. (B, T, E) / (B, T) is refused as a rule. With one sequence
# of as many tokens as experts it passes, and divides by other tokens' sums.

# %%
try:
    probs / probs.sum(-1)  # (2, 12, 8) / (2, 12)
except ValueError as why:
    assert "could not be broadcast" in str(why)
else:
    raise AssertionError("shapes that do not match were accepted")
square = np.exp(normal(1, E, E))  # B = 1, T = E
assert close((square / square.sum(-1, keepdims=True)).sum(-1), np.ones((1, E)))
assert not close((square / square.sum(-1)).sum(-1), np.ones((1, E)))

# %% [markdown]
# **Trap: a mean over what is masked.** Zeros in the sum are harmless, in the count they aren't.

# %%
real = np.arange(T) < np.array([[5], [T]])  # (B, T): the first sequence has 5 tokens and 7 of padding
by_hand = np.where(real[..., None], probs, 0).sum((0, 1)) / real.sum()
assert close(by_hand, np.mean(probs, axis=(0, 1), where=real[..., None]))
assert close(by_hand, jax.jit(masked_mean)(probs, real)) and close(by_hand.sum(), 1.0)
too_small = (probs * real[..., None]).mean((0, 1))
print(f"mean probabilities sum to {by_hand.sum():.3f}; with padding in the count, to {too_small.sum():.3f}")
assert close(too_small.sum(), (5 + T) / (2 * T))

# %% [markdown]
# **Selecting by a mask.** The tokens of expert e are `x[(experts == e).any(-1)]` in NumPy: as many rows as the mask has
# True, a shape that depends on data. **Claim.** Inside `jit` that is refused; `jnp.nonzero` with a fixed `size` takes
# its place: indices first, then a fill value. Choose T, one past the end, and read with `mode="fill"`:
#
# ```
#  mask                                . # . . # # .                 T = 7
#  nonzero(mask, size=5, fill_value=7)      1 4 5 7 7
#  x.at[index].get(mode="fill", fill_value=0)     x1 x4 x5 0 0       5 rows, always
# ```

# %%
def rows_by_mask(x, mask):
    return x[mask]


def tokens_by_mask(mask, C):
    """(T,) bool -> (C,) int32: the first C tokens where mask is True; T where there are fewer."""
    return jnp.nonzero(mask, size=C, fill_value=mask.shape[0])[0]


def rows_at(x, index):
    """x[index], zeros where index is past the end."""
    return x.at[index].get(mode="fill", fill_value=0)


C = capacity(T, E, k, 1.0)
x0, experts0 = x[0], experts[0]  # one sequence
try:
    jax.jit(rows_by_mask)(x0, (experts0 == 0).any(-1))
except jax.errors.NonConcreteBooleanIndexError as why:
    print(str(why).split(";")[0])
else:
    raise AssertionError("a boolean index was accepted inside jit")

rows_of = jax.jit(lambda x, mask: rows_at(x, tokens_by_mask(mask, C)))
for e in range(E):
    mask = (experts0 == e).any(-1)
    got, n = np.asarray(rows_of(x0, mask)), mask.sum()
    assert got.shape == (C, D) and (got[:n] == rows_by_mask(x0, mask)[:C]).all() and (got[n:] == 0).all()

# %% [markdown]
# **Claim: truncation is capacity.** Where more than C tokens chose the expert, `size=C` keeps the first C: those that
# `queue_positions` lets in. All experts at once is a `vmap`; the result is the table of slots, (E, C).

# %%
slot_table = jax.jit(lambda experts: jax.vmap(lambda e: tokens_by_mask((experts == e).any(-1), C))(jnp.arange(E)))
table, place = slot_table(experts0), np.asarray(queue(experts0[None], E))[0]
print(f"expert   the tokens in its slots; {T}: empty")
for e, tokens in enumerate(table.tolist()):
    served = [t for t, j in np.ndindex(T, k) if experts0[t, j] == e and place[t, j] < C]
    print(f"{e:6}   {tokens}")
    assert tokens == served + [T] * (C - len(served))
assert np.bincount(experts0.ravel()).max() > C  # there was something to truncate

# %% [markdown]
# **Trap: three wrong fill values.** The default is 0, the index of a real token. Past the end, plain indexing clamps to
# the last token. And -1 counts from the end, in `mode="fill"` as well: again the last token.

# %%
mask = np.arange(T) == 3
for fill, index, plain_read, fill_read in (({}, 0, x0[0], x0[0]), ({"fill_value": T}, T, x0[-1], np.zeros(D)),
                                           ({"fill_value": -1}, -1, x0[-1], x0[-1])):
    tokens = jax.jit(partial(jnp.nonzero, size=2, **fill))(mask)[0]
    assert tokens.tolist() == [3, index]
    assert close(jax.jit(lambda x, i: x[i])(x0, tokens), np.stack([x0[3], plain_read]))
    assert close(jax.jit(rows_at)(x0, tokens), np.stack([x0[3], fill_read]))

# %% [markdown]
# ## Gather, scatter, and why they are expensive [S1-044] (must-read)
# | | reads or writes | an index twice | an index past the end |
# |---|---|---|---|
# | gather `x[index]` | y_i = x_{index_i} | fine: read twice | clamped |
# | scatter-add `y.at[index].add(u)` | y_{index_i} += u_i | both are added | dropped |
# | scatter `y.at[index].set(u)` | y_{index_i} = u_i | one of them, order undefined | dropped |
#
# **Claim.** They are operations of their own in the program XLA gets, and the gradient of one is the other: what is
# read twice has two gradients to add.

# %%
def gather(x, index):
    return x[index]


def scatter_add(u, index):
    return jnp.zeros((4, u.shape[-1])).at[index].add(u)


index = np.array([2, 0, 2])


def operations(f, *args):
    """Which of gather and scatter the lowered program of f(*args) contains."""
    text = jax.jit(f).lower(*args).as_text()
    return [name for name in ("gather", "scatter") if f"stablehlo.{name}" in text]


def pull_back(f, index):
    """The gradient of f(., index), as a function of the point and the cotangent."""
    return jax.jit(lambda a, g: jax.vjp(lambda a: f(a, index), a)[1](g)[0])


four, three = normal(4, D), normal(3, D)
assert operations(gather, four, index) == ["gather"] and operations(scatter_add, three, index) == ["scatter"]
assert operations(pull_back(gather, index), four, three) == ["scatter"]
assert operations(pull_back(scatter_add, index), three, four) == ["gather"]
added = np.stack([three[1], np.zeros(D), three[0] + three[2], np.zeros(D)])
assert close(pull_back(gather, index)(four, three), added) and close(jax.jit(scatter_add)(three, index), added)

# %% [markdown]
# **Claim: duplicates.** `.add` sums them, in whatever order. With `.set` one of them wins and nothing says which: the
# same pairs in another order give another array. Here, on a CPU, it is the last in the list; a program must not rely on
# it. Two safe ways: make the indices differ (a slot holds one token), or let an operation decide that needs no order,
# such as `.max` of the position.

# %%
pairs = [(1, 10.0), (1, 20.0), (1, 30.0)]  # three values for place 1


@jax.jit
def write(at, values):
    """What .add and .set leave at place 1, and the array in which the last of the list wins by construction."""
    last = jnp.full(3, -1).at[at].max(jnp.arange(3))  # the last position that names each place; -1: none does
    decided = jnp.where(last < 0, 0.0, values[last])
    return jnp.zeros(3).at[at].add(values)[1], jnp.zeros(3).at[at].set(values)[1], decided


by_add, by_set = set(), set()
for order in itertools.permutations(pairs):
    at, values = (np.array(column) for column in zip(*order))
    added, left, decided = write(at, values)
    by_add.add(float(added))
    by_set.add(float(left))
    assert left == values[-1] or jax.default_backend() != "cpu"
    assert decided.tolist() == [0, values[-1], 0]
print("the six orders: .add gives", sorted(by_add), " .set gives", sorted(by_set))
assert by_add == {60.0} and by_set <= {10.0, 20.0, 30.0}
if jax.default_backend() == "cpu":
    assert by_set == {10.0, 20.0, 30.0}

# %% [markdown]
# **Dispatch and combine, three ways.** The one-hot product of lesson 01, a gather, a scatter. `slots` (T, k) says where
# a token's choices went; its inverse, a table of slots as above, says which choice a slot holds. With both at hand
# *dispatch and combine are gathers*: a slot holds one token, a token has k slots.
#
# ```
#             one-hot product                     gather                            scatter
#  dispatch   "ts,td->sd"  2 T S D FLOPs          slot s reads its token            token t writes to its k slots
#  combine    "ts,sd->td"  2 T S D FLOPs          token t reads its k slots         slot s adds to its token
# ```

# %%
T, D, E, k = 1024, 128, 8, 2
big = MoEConfig(vocab_size=11, context=T, n_layer=1, n_head=2, n_embd=D, n_hidden=32, n_experts=E, top_k=k)
x = normal(T, D)
C = capacity(T, E, k, big.capacity_factor)
S = E * C


@jax.jit
def route_to_slots(x, w_router):
    """gates and slots (T, k), choices and token (S,), and the one-hot tensors dispatch and combine (T, S)."""
    routing = route(x[None], w_router, big)
    experts, gates, place = routing.experts[0], routing.gates[0], queue_positions(routing.experts, E)[0]
    slots = jnp.where(place < C, experts * C + place, S)  # S for a dropped choice
    choices = inverse(slots.ravel(), S)  # which of the T k choices a slot holds, T k for none
    hot = jax.nn.one_hot(slots, S)  # (T, k, S); slot S is out of range: zeros
    return gates, slots, choices, choices // k, hot.sum(1), jnp.einsum("tk,tks->ts", gates, hot)


gates, slots, choices, token, dispatch, combine = route_to_slots(x, 0.1 * normal(D, E))


def gather_combine(h, gates, slots):
    return sum(gates[:, j, None] * rows_at(h, slots[:, j]) for j in range(k))


def scatter_dispatch(x, slots):
    return jnp.zeros((S, D)).at[slots.ravel()].set(jnp.repeat(x, k, axis=0), mode="drop")


def scatter_combine(h, gate, token):
    return jnp.zeros((T, D)).at[token].add(gate[:, None] * h, mode="drop")


DISPATCH = {  # name: a function of x (T, D) and indices -> (S, D), and its indices
    "one-hot product": (lambda x, dispatch: jnp.einsum("ts,td->sd", dispatch, x), dispatch),
    "gather": (rows_at, token),
    "scatter": (scatter_dispatch, slots),
}
COMBINE = {  # of h (S, D) -> (T, D)
    "one-hot product": (lambda h, combine: jnp.einsum("ts,sd->td", combine, h), combine),
    "gather": (gather_combine, gates, slots),
    "scatter": (scatter_combine, jax.jit(rows_at)(gates.ravel(), choices), token),
}

# %% [markdown]
# **Claim.** Equal output. But the product does hundreds of millions of FLOPs, nearly all of them with 0, to move a
# megabyte; it reads more bytes as well (the one-hot tensor), and takes a multiple of the gather's time. The scatter, as
# XLA counts, moves more than twice the gather's bytes.

# %%
def profile(f, *args):
    """f(*args), and XLA's count {"flops", "bytes"} for it, with "ms", the fastest of 9 runs."""
    compiled = jax.jit(f).lower(*args).compile()
    result = jax.block_until_ready(compiled(*args))
    seconds = []
    for _ in range(9):
        began = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        seconds.append(time.perf_counter() - began)
    return result, {**cost(compiled), "ms": 1e3 * min(seconds)}


h = normal(S, D)
print(f"{'':10}{'':17}{'MFLOP':>8}{'MB':>8}{'ms':>8}      T = {T}, S = {S}, D = {D}")
for step, ways, operand in (("dispatch", DISPATCH, x), ("combine", COMBINE, h)):
    counts, results = {}, {}
    for name, (f, *indices) in ways.items():
        results[name], row = profile(f, operand, *indices)
        counts[name] = row
        print(f"{step:10}{name:17}{row['flops'] / 1e6:8.1f}{row['bytes'] / 1e6:8.1f}{row['ms']:8.2f}")
    product, by_gather, by_scatter = counts.values()
    assert close(results["gather"], results["one-hot product"]) and close(results["gather"], results["scatter"])
    assert product["flops"] == 2 * T * S * D and by_gather["flops"] < product["flops"] / 100
    assert product["bytes"] > 2 * by_gather["bytes"] and product["ms"] > 2 * by_gather["ms"]
    assert by_scatter["bytes"] > 2 * by_gather["bytes"]

# %% [markdown]
# **Why they are expensive.** Hardly a FLOP, but:
#
# 1. Each index is an address that nobody knew before. A row of 128 numbers is then read in a stream; a single number is
#    a jump. Keep what moves together contiguous: gather rows, not elements.
# 2. A gather disappears into the operation that reads it; the combine above is one loop. A scatter needs the array it
#    writes to: filled with zeros, then read and written. These are the bytes.
# 3. Two updates of a scatter-add may meet in one place. A device that runs thousands of them at once needs atomic
#    additions or an order. On a CPU, where they come one after another, rows scatter in about the time they gather.
#
# **Claim.** The combine by gather is one fused loop, by scatter it is several (XLA on a CPU).
#
# **Measure.** The same million numbers, in random order: as rows, and as single elements. The bytes are the same, the
# times are not: where this was written, elements took 3 to 8 times as long. (Only printed: a busy machine hides it.)

# %%
def loops(f, *args):
    """The number of fused loops in f(*args), compiled."""
    text = jax.jit(f).lower(*args).compile().as_text()
    return text[text.index("ENTRY"):].count(" fusion(")


if jax.default_backend() == "cpu":
    one, several = (loops(f, h, *indices) for f, *indices in (COMBINE["gather"], COMBINE["scatter"]))
    print(f"fused loops of combine: {one} by gather, {several} by scatter")
    assert one == 1 < several

rows = normal(8192, 128)
row_order, element_order = (random.permutation(n).astype(np.int32) for n in (len(rows), rows.size))
MOVES = {
    "copy, in order": (lambda a, order: a + 1, rows, row_order),
    "gather of rows": (lambda a, order: a[order], rows, row_order),
    "gather of elements": (lambda a, order: a[order], rows.ravel(), element_order),
    "scatter-add of rows": (lambda a, order: jnp.zeros_like(a).at[order].add(a), rows, row_order),
    "scatter-add of elements": (lambda a, order: jnp.zeros_like(a).at[order].add(a), rows.ravel(), element_order),
}
ms = {name: profile(*program)[1]["ms"] for name, program in MOVES.items()}
for name, fastest in ms.items():
    print(f"{name:24}{fastest:8.2f} ms, {fastest / ms['copy, in order']:5.1f} times the copy")

# %% [markdown]
# **How to avoid the scatter.** It usually comes in through the back door: the gradient of a gather. But `slots` and
# `choices` are each other's inverse. What the scatter would send to a token, the token can fetch, for it knows its k
# slots. JAX can't know that two index arrays are inverse; a `custom_vjp` can. `to_slots` and `from_slots` in
# `model.py` are dispatch and combine with gathers in both directions. (`inverse` itself scatters, S integers once, not
# rows.)
#
# **Claim.** Same gradients, no scatter in the program, and three quarters of the bytes.

# %%
def plain(x, gates):
    return gather_combine(rows_at(x, token), gates, slots)


def by_inverse(x, gates):
    return from_slots(to_slots(x, slots, choices), gates, slots, choices)


gradients = {f.__name__: jax.grad(lambda x, gates, f=f: (f(x, gates) ** 2).sum(), argnums=(0, 1))
             for f in (plain, by_inverse)}
assert "scatter" in operations(gradients["plain"], x, gates)
assert operations(gradients["by_inverse"], x, gates) == ["gather"]
(want, with_scatters), (got, with_gathers) = (profile(gradient, x, gates) for gradient in gradients.values())
assert close(got[0], want[0]) and close(got[1], want[1])
print(f"forward and backward: {with_scatters['ms']:.2f} ms with scatters, {with_gathers['ms']:.2f} ms with gathers")
assert with_gathers["bytes"] < 0.8 * with_scatters["bytes"]

# %% [markdown]
# **Promises.** `.at[index].add(u, unique_indices=True, indices_are_sorted=True)` lets XLA skip the precautions. Nothing
# checks a promise: with duplicates the result is undefined. Make it only where it holds by construction.
#
# ## Exercise 1
# With experts on several machines, a token that chooses k experts may need k machines. Device-limited routing
# (DeepSeek-V2, 2024) bounds that: experts lie in groups of E / n_groups neighbours, a group's score is its best
# expert's, and the k experts are chosen from the best `top_groups` groups only. Write
# `top_k_in_groups(scores, n_groups, top_groups, k)`: (..., E) -> (..., k) indices, in `lax.top_k`'s order.
# Scores are finite and may be negative; top_groups · E / n_groups >= k.

# %%
# Your answer
def top_k_in_groups(scores, n_groups, top_groups, k):
    raise NotImplementedError

# %%
# Self-check (runs on your answer once it is written, on the solution until then)
def check_top_k_in_groups(f):
    f = jax.jit(f, static_argnums=(1, 2, 3))
    scores = np.array([[5.0, -9.0, 4.0, 4.5, 3.0, 2.0]], np.float32)  # groups of two: best 5, 4.5, 3
    assert f(scores, 3, 1, 2).tolist() == [[0, 1]], "from the best group alone, its worse expert, too"
    assert f(scores, 3, 2, 2).tolist() == [[0, 3]], "two groups are open"
    assert f(scores - 100, 3, 1, 2).tolist() == [[0, 1]], "negative scores: what is closed must not win"
    tied = random.integers(0, 3, (50, 8)).astype(np.float32)
    assert np.array_equal(f(tied, 4, 4, 3), lax.top_k(tied, 3)[1]), "with all groups open it is top_k, ties included"
    for row, got in zip(tied, f(tied, 4, 2, 3).tolist()):
        groups = sorted(range(4), key=lambda g: (-row[2 * g:2 * g + 2].max(), g))[:2]
        want = sorted((2 * g + i for g in groups for i in (0, 1)), key=lambda e: (-row[e], e))[:3]
        assert got == want, f"scores {row.tolist()}: {got}, want {want}"

# %% [markdown]
# ## Exercise 2
# `x[order]`, order a permutation, has a scatter-add as its gradient. Write `permute_rows(x, order)` with the same value
# and gradient, and no scatter in either: a `jax.custom_vjp`. x: (N, D); order: (N,) integers, each of 0 ... N - 1 once.
# (For an integer argument the backward pass returns None.)

# %%
# Your answer
def permute_rows(x, order):
    raise NotImplementedError

# %%
# Self-check
def check_permute_rows(f):
    order = np.array([2, 0, 1, 4, 5, 3])
    x, g = normal(6, 3), normal(6, 3)
    assert np.array_equal(jax.jit(f)(x, order), x[order]), "row i of the result is row order[i] of x"
    back = pull_back(f, order)
    assert np.array_equal(back(x, g), pull_back(gather, order)(x, g)), "row i of g belongs to row order[i] of x"
    assert "scatter" not in operations(back, x, g), "the backward pass scatters: which row of g does row n of x get?"

# %% [markdown]
# ## Rules
# | task or symptom | rule |
# |---|---|
# | top-k that others can reproduce | the lower index first among equals; `argpartition` alone does not |
# | -inf among the scores | argmax rounds may choose twice, `top_k` does not |
# | a NaN logit | is chosen first: check for NaN before the router |
# | a router's first weights | random: at zero every token takes experts 0 ... k - 1, and the balance loss says 1 |
# | a quotient by a sum | `keepdims=True` |
# | a mean under a mask | divide by the mask's count |
# | rows where a mask is True, under jit | `nonzero(size=C, fill_value=T)`, then `mode="fill"`; never 0 or -1 |
# | indices that repeat | `.add`, `.max`, `.min`; with `.set` the order is undefined |
# | moving rows | gather, rows contiguous; a one-hot product costs 2 T S D FLOPs, a scatter twice the bytes |
# | a scatter in the backward pass | if the inverse index is known, `custom_vjp` with a gather |

# %% [markdown]
# ## Solutions

# %%
def top_k_in_groups_solution(scores, n_groups, top_groups, k):
    *lead, E = scores.shape
    best = scores.reshape(*lead, n_groups, E // n_groups).max(-1)  # (..., n_groups)
    is_open = jax.nn.one_hot(lax.top_k(best, top_groups)[1], n_groups, dtype=bool).any(-2)
    return lax.top_k(jnp.where(jnp.repeat(is_open, E // n_groups, axis=-1), scores, -jnp.inf), k)[1]


@jax.custom_vjp
def permute_rows_solution(x, order):
    return x[order]


permute_rows_solution.defvjp(lambda x, order: (x[order], order), lambda order, g: (g[jnp.argsort(order)], None))

# %%
try:
    check_top_k_in_groups(top_k_in_groups)
except NotImplementedError:
    check_top_k_in_groups(top_k_in_groups_solution)

# %%
try:
    check_permute_rows(permute_rows)
except NotImplementedError:
    check_permute_rows(permute_rows_solution)
