# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---
# %% [markdown]
# # Einsums: attention, one-hot dispatch and combine
#
# After this lesson you can read and write any einsum, count its FLOPs from the string, write its gradient, build the
# one-hot tensors that send tokens to experts and bring them back, and say when that is too expensive.
#
# It uses this project's `model.py` (`route`, `queue_positions`, `capacity`, `expert_ffn`, `dispatch_einsum`) and
# `common/profiling.py` for XLA's count of FLOPs. All claims hold on JAX 0.10 and 0.12.
#
# Letters: **B** sequences, **T** tokens of a sequence (queries), **S** keys, **D** model, **F** hidden size of an
# expert, **H** heads, **G** heads of keys and values, **K** size of a head, **E** experts, **C** capacity (slots of an
# expert), **k** experts that a token chooses. In an einsum the same letters stand in lower case, and q for T, k for S.

# %%
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent if "__file__" in globals() else Path.cwd()
sys.path[:0] = [str(PROJECT), str(PROJECT.parent)]  # the project's files, and common/ beside it

# %%
import itertools
import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from common.profiling import cost
from model import MoEConfig, capacity, dispatch_einsum, expert_ffn, init_params, queue_positions, route

random = np.random.default_rng(0)


def normal(*shape):
    return random.normal(size=shape).astype(np.float32)


def close(a, b):
    return np.shape(a) == np.shape(b) and np.allclose(a, b, atol=1e-5, rtol=1e-5)


def flops(f, *args):
    """XLA's count for the compiled program f(*args). args: arrays, or shapes as of jax.eval_shape."""
    return cost(jax.jit(f).lower(*args).compile())["flops"]

# %% [markdown]
# ## Einsum fluency [S1-017] (must-read)
# An einsum is a loop over all its letters. One rule explains every string:
#
# ```
#  "tec,td->ecd"        for t, e, c, d:  out[e, c, d] += a[t, e, c] * b[t, d]
#   ─┬─ ─┬  ─┬─
#    a   b   out        a letter that is missing on the right is summed over: here t
# ```
#
# **Claim.** That loop, written in NumPy, equals `jnp.einsum` for transposes, sums, diagonals and products alike.

# %%
def einsum_by_loops(spec, *arrays):
    """np.einsum(spec, *arrays) by its definition; the string names its output ("...->...")."""
    inputs, out = spec.split("->")
    inputs = inputs.split(",")
    size = {letter: n for letters, a in zip(inputs, arrays) for letter, n in zip(letters, a.shape)}
    result = np.zeros([size[letter] for letter in out])
    for point in itertools.product(*map(range, size.values())):
        at = dict(zip(size, point))
        index = lambda letters: tuple(at[letter] for letter in letters)
        result[index(out)] += math.prod(a[index(letters)] for letters, a in zip(inputs, arrays))
    return result


SIZE = {"b": 2, "i": 3, "j": 4, "k": 5, "t": 4, "e": 2, "c": 3, "d": 2}
for spec, what in {"ij->ji": "transpose", "ij->i": "sums of rows", "ij->": "sum of all", "ii->i": "diagonal",
                   "ii->": "trace", "i,j->ij": "outer product", "ij,ij->i": "dot products of rows",
                   "ij,jk->ik": "matrix product", "ij,kj->ik": "with a transposed matrix",
                   "bij,bjk->bik": "batch of products", "tec,td->ecd": "dispatch", "tec,ecd->td": "combine"}.items():
    arrays = [normal(*(SIZE[letter] for letter in letters)) for letters in spec.split("->")[0].split(",")]
    result = jnp.einsum(spec, *arrays)
    print(f"{spec:16}{what:26}{' x '.join(str(a.shape) for a in arrays)} -> {result.shape}")
    assert close(result, einsum_by_loops(spec, *arrays))

# %% [markdown]
# Always write the `->`. Without it the output's letters are those that occur once, *sorted*:
#
# **Claim.** "ecd,td" means "ecd,td->cet".

# %%
a, b = normal(SIZE["e"], SIZE["c"], SIZE["d"]), normal(SIZE["t"], SIZE["d"])
assert np.array_equal(jnp.einsum("ecd,td", a, b), jnp.einsum("ecd,td->cet", a, b))

# %% [markdown]
# An einsum of two operands has four kinds of letters, and their sizes say what a machine has to do:
#
# | the letter is in | kind | in `q @ k.T` of each head, "bqhd,bkhd->bhqk" |
# |---|---|---|
# | a, b, output | batch: independent products | b, h |
# | a, b | contracted: summed over | d |
# | a, output | rows | q |
# | b, output | columns | k |
#
# **Claim.** It becomes one `dot_general`, JAX's only matrix product, whatever the order of the letters; and so does a
# `vmap` of `matmul` over the batch letters. Equal FLOPs, equal numbers.

# %%
B, T, H, K = 2, 16, 4, 8
q, k, v = normal(3, B, T, H, K)
scores_einsum = partial(jnp.einsum, "bqhd,bkhd->bhqk")
scores_vmap = jax.vmap(jax.vmap(lambda q, k: q @ k.T, in_axes=1))  # over b, then over h, axis 1 of what is left
for scores in (scores_einsum, scores_vmap):
    assert str(jax.make_jaxpr(scores)(q, k)).count("dot_general[") == 1
    assert close(jax.jit(scores)(q, k), q.transpose(0, 2, 1, 3) @ k.transpose(0, 2, 3, 1))
    assert flops(scores, q, k) == 2 * B * H * T * T * K

# %% [markdown]
# **Claim: attention is two einsums** around a softmax. No reshape, no transpose, and it equals
# `jax.nn.dot_product_attention`.

# %%
def attend(q, k, v):
    """Causal attention. q, k, v: (B, T, H, K) -> (B, T, H, K)."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    seen = jnp.tri(q.shape[1], dtype=bool)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), v)


assert close(jax.jit(attend)(q, k, v), jax.jit(partial(jax.nn.dot_product_attention, is_causal=True))(q, k, v))

# %% [markdown]
# **Claim: FLOPs from the string.** Each point of the loop is a multiplication and an addition, so an einsum of two
# operands costs 2 × the product of *all* its letters' sizes. XLA counts exactly that for each product of this lesson.

# %%
def einsum_flops(spec, **size):
    return 2 * math.prod(size[letter] for letter in set(spec) - set(",->"))


def shapes_of(spec, **size):
    """The operands of an einsum as shapes: enough to compile it."""
    return [jax.ShapeDtypeStruct([size[letter] for letter in letters], jnp.float32)
            for letters in spec.split("->")[0].split(",")]


size = {"t": 64, "e": 4, "c": 40, "d": 16, "f": 32, "b": 2, "h": 4, "q": 24, "k": 48}
for spec, what in {"td,df->tf": "dense layer", "ecd,edf->ecf": "experts' layer", "bqhd,bkhd->bhqk": "attention scores",
                   "bhqk,bkhd->bqhd": "attention values", "tec,td->ecd": "dispatch", "tec,ecd->td": "combine"}.items():
    by_string, by_xla = einsum_flops(spec, **size), flops(partial(jnp.einsum, spec), *shapes_of(spec, **size))
    print(f"{spec:18}{what:18}{by_string:10,} FLOPs from the string,{by_xla:10,.0f} counted by XLA")
    assert by_string == by_xla

# %% [markdown]
# **Claim: three operands are two products, and their order is a choice.** `jnp.einsum` takes the cheaper one unless
# you give a path. A router or adapter of low rank r, "td,dr,rf->tf", costs a fraction if x goes through the
# bottleneck; merging the two matrices first costs even more than the dense layer.

# %%
size = {"t": 128, "d": 64, "r": 2, "f": 64}
spec = "td,dr,rf->tf"
narrow = einsum_flops("td,dr->tr", **size) + einsum_flops("tr,rf->tf", **size)
merged = einsum_flops("dr,rf->df", **size) + einsum_flops("td,df->tf", **size)
print(f"through the bottleneck {narrow:,} FLOPs, merged first {merged:,}")
operands = shapes_of(spec, **size)
assert flops(partial(jnp.einsum, spec), *operands) == narrow
assert flops(partial(jnp.einsum, spec, optimize=[(1, 2), (0, 1)]), *operands) == merged

# %% [markdown]
# **Claim: the result has the operands' dtype.** A sum of bfloat16 products is returned as bfloat16, 8 bits of
# precision. `preferred_element_type` asks for the accumulator instead.

# %%
ones = np.ones(1001, jnp.bfloat16)
rounded = jnp.einsum("i,i->", ones, ones)
exact = jnp.einsum("i,i->", ones, ones, preferred_element_type=jnp.float32)
print(f"1001 ones: {rounded} in {rounded.dtype}, {exact} in {exact.dtype}")
assert rounded.dtype == jnp.bfloat16 and float(rounded) == 1000 and float(exact) == 1001

# %% [markdown]
# ## From choices to slots: the one-hot dispatch tensor [S1-024b] (must-read)
# A router has chosen k experts for each token. Experts work on arrays of a fixed shape: each has C *slots*, and a
# token must find one. Three steps, each of them one-hot:
#
# ```
#  experts (T, k)   ──one_hot──►  expert (T, k, E)   which expert
#  place   (T, k)   ──one_hot──►  slot   (T, k, C)   which of its slots; a place >= C has no 1: the choice is dropped
#  gates   (T, k)                                    how much
#
#  combine  = Σ_k gates · expert · slot    "tk,tke,tkc->tec"    (T, E, C), at most k entries of a token are not 0
#  dispatch = the same with gates of 1
# ```
#
# The *place* is the length of the expert's queue on arrival: how many earlier choices named the same expert. Choices
# come token by token, and within a token by rank (`queue_positions` in `model.py`). One cumulative sum counts it.

# %%
@partial(jax.jit, static_argnames="n_experts")
def places(experts, n_experts):
    """(T, k) int32 -> (T, k) int32: the choice's place in its expert's queue, token by token."""
    T, k = experts.shape
    chosen = jax.nn.one_hot(experts.reshape(T * k), n_experts, dtype=jnp.int32)  # (T k, E)
    before = jnp.cumsum(chosen, axis=0) - chosen
    return (before * chosen).sum(-1).reshape(T, k)


@partial(jax.jit, static_argnames=("n_experts", "C"))
def combine_tensor(experts, gates, n_experts, C):
    """experts, gates (T, k) -> (T, E, C): the gate of token t at slot c of expert e, 0 where it is not there."""
    expert = jax.nn.one_hot(experts, n_experts, dtype=gates.dtype)  # (T, k, E)
    slot = jax.nn.one_hot(places(experts, n_experts), C, dtype=gates.dtype)  # (T, k, C)
    return jnp.einsum("tk,tke,tkc->tec", gates, expert, slot)


experts = np.array([[0, 1], [0, 2], [0, 1], [2, 0], [1, 0]], np.int32)  # T = 5, k = 2
E, C = 3, 2
place = places(experts, E)
dispatch = np.asarray(combine_tensor(experts, np.ones(experts.shape, np.float32), E, C))
print("          " + "".join(f"expert {e}  " for e in range(E)))
for t, row in enumerate(dispatch):
    chosen = ", ".join(f"{e} at place {at}" for e, at in zip(experts[t].tolist(), place[t].tolist()))
    print(f"token {t}   " + "".join(f"{' '.join('#' if one else '.' for one in slots):10}" for slots in row.tolist())
          + f"chose {chosen}")

# %% [markdown]
# **Claim.** Places are those of `queue_positions`. A slot holds at most one token; an expert serves min(load, C)
# choices, the earliest; the others are dropped, and one token here loses both of its choices.

# %%
assert place.tolist() == [[0, 0], [1, 0], [2, 1], [1, 3], [2, 4]]
queue = jax.jit(queue_positions, static_argnames=("n_experts", "priority"))
assert np.array_equal(place, queue(experts[None], E)[0])
load = np.bincount(experts.ravel(), minlength=E)
assert (dispatch.sum(0) <= 1).all() and (dispatch.sum((0, 2)) == np.minimum(load, C)).all()
dropped = experts.size - int(dispatch.sum())
print(f"load {load.tolist()}, C = {C}: {dropped} of {experts.size} choices dropped")
assert dropped == np.maximum(load - C, 0).sum() == 4
assert dispatch.sum((1, 2)).tolist() == [2, 2, 1, 1, 0]  # choices of each token that found a slot

# %% [markdown]
# **Claim.** What drops a choice is a property of `one_hot`: an index out of range gives a row of zeros, no error. (An
# index like `eye(C)[place]` would clamp: everybody who is too late would share the last slot.)

# %%
assert jax.nn.one_hot(jnp.array([1, 2, 7]), C).tolist() == [[0, 1], [0, 0], [0, 0]]
assert jnp.eye(C)[jnp.array([1, 2, 7])].tolist() == [[0, 1], [0, 1], [0, 1]]

# %% [markdown]
# **Trap: count in integers.** bfloat16 has no 257. A queue counted in it gives two tokens the same place, and a slot
# then holds their sum.

# %%
def distinct_places(dtype):
    queue = jnp.cumsum(jnp.ones(600, dtype))
    return len(np.unique(queue.astype(jnp.float32)))


in_int32, in_bfloat16 = distinct_places(jnp.int32), distinct_places(jnp.bfloat16)
print(f"places of 600 tokens: {in_int32} counted in int32, {in_bfloat16} in bfloat16")
assert in_bfloat16 < in_int32 == 600

# %% [markdown]
# **Trap: who comes first.** GShard and Switch serve all first choices before any second one. That drops fewer first
# choices, but a token's second choice then waits for the first choices of *later* tokens: in a language model the
# future decides what the past computes. Served token by token, it does not (the project's default).

# %%
now = np.array([[0, 1], [2, 0], [2, 0]], np.int32)
other_future = np.array([[0, 1], [1, 0], [1, 0]], np.int32)
for priority in ("token", "choice"):
    second = [np.asarray(queue(chosen[None], E, priority))[0, 0, 1].item() for chosen in (now, other_future)]
    print(f"priority {priority!r}: token 0's second choice has place {second[0]}, with another future {second[1]}")
    assert second == ([0, 0] if priority == "token" else [0, 2])

# %% [markdown]
# ## Dispatch and combine [S1-017] (must-read)
# With the two tensors the layer is three lines (Lepikhin et al. 2020, GShard, algorithm 1; Fedus et al. 2021, Switch):
#
# ```
#  x (T, D)  ── "tec,td->ecd" ──►  slots (E, C, D)  ── experts ──►  h (E, C, D)  ── "tec,ecd->td" ──►  y (T, D)
#               dispatch                                                            combine
# ```

# %%
@partial(jax.jit, static_argnames="cfg")
def moe_by_einsums(x, dispatch, combine, p, cfg):
    """x (T, D); dispatch, combine (T, E, C) -> (T, D)."""
    slots = jnp.einsum("tec,td->ecd", dispatch, x)
    return jnp.einsum("tec,ecd->td", combine, expert_ffn(slots, p, cfg))


def moe_by_loop(experts, gates, by_expert, C):
    """The definition, in NumPy. experts, gates (T, k); by_expert (E, T, D): each expert's output for each token."""
    used = np.zeros(len(by_expert), int)
    y = np.zeros(by_expert.shape[1:], by_expert.dtype)
    for t, j in np.ndindex(*experts.shape):
        e = experts[t, j]
        if used[e] < C:
            y[t] += gates[t, j] * by_expert[e, t]
        used[e] += 1
    return y


cfg = MoEConfig(vocab_size=11, context=32, n_layer=1, n_head=2, n_embd=16, n_hidden=32, n_experts=4, top_k=2,
                capacity_factor=0.75, dispatch="einsum")
T, D, F, E, k = cfg.context, cfg.n_embd, cfg.n_hidden, cfg.n_experts, cfg.top_k
shapes = jax.eval_shape(partial(init_params, cfg=cfg), jax.random.key(0))["blocks"][0]["moe"]
p = {name: normal(*leaf.shape) * leaf.shape[-2] ** -0.5 for name, leaf in shapes.items()}  # experts that do differ
x = normal(T, D)
choose = jax.jit(route, static_argnames="cfg")
routing = choose(x[None], p["w_router"], cfg)
experts, gates = (np.asarray(a[0]) for a in (routing.experts, routing.gates))  # (T, k)
by_expert = np.asarray(jax.jit(expert_ffn, static_argnames="cfg")(np.broadcast_to(x, (E, T, D)), p, cfg))

# %% [markdown]
# **Claim.** The three lines equal the loop, and the project's `dispatch_einsum` does the same: with a capacity so small
# that choices are dropped, and with one that has room for all. A token without a slot comes back as exactly 0; in the
# model the residual connection carries it on.

# %%
for factor in (0.75, E / k):
    C = capacity(T, E, k, factor)
    combine = combine_tensor(experts, gates, E, C)
    dispatch = combine_tensor(experts, np.ones_like(gates), E, C)
    y = np.asarray(moe_by_einsums(x, dispatch, combine, p, cfg))
    assert close(y, moe_by_loop(experts, gates, by_expert, C))

    in_model = jax.jit(partial(dispatch_einsum, cfg=replace(cfg, capacity_factor=factor)))(x[None], routing, p)
    y_model, kept = (np.asarray(a[0]) for a in in_model)
    assert close(y_model, y) and (kept == (np.asarray(places(experts, E)) < C)).all()
    lost = np.flatnonzero(~kept.any(-1))
    print(f"capacity {C:2} for {T} tokens: {(~kept).sum():2} of {T * k} choices dropped, lost: {lost.tolist()}")
    assert (y[lost] == 0).all() and (y_model[lost] == 0).all()
    assert (C == T) == kept.all() == (len(lost) == 0)
assert close(y, np.einsum("tk,tke,etd->td", gates, np.eye(E)[experts], by_expert))  # nothing was dropped

# %% [markdown]
# **Claim.** Dispatch only moves rows: a product with ones and zeros copies each row to the last bit (in float32, on a
# CPU), and a slot that nobody took is 0. So no expert sees a mixture of tokens.

# %%
C = capacity(T, E, k, 0.75)
dispatch = np.asarray(combine_tensor(experts, np.ones_like(gates), E, C))
slots = np.asarray(jnp.einsum("tec,td->ecd", dispatch, x))
for e, c in np.ndindex(E, C):
    tokens = np.flatnonzero(dispatch[:, e, c])
    assert len(tokens) <= 1 and (slots[e, c] == (x[tokens[0]] if len(tokens) else 0)).all()

# %% [markdown]
# **Claim: the gradient of an einsum is an einsum.** Put the cotangent in the operand's place and exchange their
# letters. The gradient of dispatch is a combine (without gates), that of combine is a dispatch.
#
# ```
#  forward    slots = "tec,td ->ecd"   dispatch, x          y  = "tec,ecd->td"    combine, h
#  backward   dx    = "tec,ecd->td"    dispatch, dslots     dh = "tec,td ->ecd"   combine, dy
#                                                      dcombine = "td,ecd->tec"   dy, h
# ```

# %%
@jax.jit
def pull_back(x, h, dslots, combine, dy):
    """dx of dispatch, and (dcombine, dh) of combine, as JAX derives them."""
    dx, = jax.vjp(lambda x: jnp.einsum("tec,td->ecd", dispatch, x), x)[1](dslots)
    return dx, *jax.vjp(partial(jnp.einsum, "tec,ecd->td"), combine, h)[1](dy)


h, dslots, dy = normal(E, C, D), normal(E, C, D), normal(T, D)
combine = combine_tensor(experts, gates, E, C)
dx, dcombine, dh = pull_back(x, h, dslots, combine, dy)
assert close(dx, jnp.einsum("tec,ecd->td", dispatch, dslots))
assert close(dh, jnp.einsum("tec,td->ecd", combine, dy)) and close(dcombine, jnp.einsum("td,ecd->tec", dy, h))

# %% [markdown]
# The router learns through the last of them: dcombine is the only way from the loss to the gates.
#
# ## What the einsums cost
# Dispatch and combine: 2 · 2 T · E C · D FLOPs. The experts' two products: 2 · 2 E C · D · F. The quotient is
# **T / F**: neither E nor k matters, the length of a group of tokens does, for each token is multiplied with each slot,
# and the slots (E C = factor · k · T) grow with T as well.
#
# **Claim.** XLA counts the same, and the experts become the smaller part where T passes F. Training counts worse: dx,
# dh and dcombine make it 5 such einsums, against 3 times the experts' products, together 5 T / 6 F.

# %%
def wide_layer(T, D=64, F=128, E=4, k=2, factor=1.25):
    """Shapes for moe_by_einsums, and the FLOPs of one dispatch and of the experts, by hand."""
    C = capacity(T, E, k, factor)
    size = {"t": T, "e": E, "c": C, "d": D, "f": F}
    x, mask, w_in, w_out = (jax.ShapeDtypeStruct([size[letter] for letter in letters], jnp.float32)
                            for letters in ("td", "tec", "edf", "efd"))
    experts = einsum_flops("ecd,edf->ecf", **size) + einsum_flops("ecf,efd->ecd", **size)
    return (x, mask, mask, {"w_in": w_in, "w_out": w_out}), einsum_flops("tec,td->ecd", **size), experts


forward = partial(moe_by_einsums, cfg=cfg)
print("    T    C   dispatch + combine   experts (MFLOP)   quotient   the tensor (T, E, C)")
for T in (32, 128, 512):
    args, one_dispatch, in_experts = wide_layer(T)
    counted = flops(forward, *args)
    tensor = args[1]
    print(f"{T:5}{tensor.shape[2]:5}{2 * one_dispatch / 1e6:21.1f}{in_experts / 1e6:18.1f}"
          f"{2 * one_dispatch / in_experts:11.2f}{4 * math.prod(tensor.shape) / 1e3:16.0f} kB")
    assert 2 * one_dispatch * 128 == in_experts * T  # the quotient is T / F
    assert 1 <= counted / (2 * one_dispatch + in_experts) < 1.1  # and the activation

training = jax.grad(lambda x, dispatch, combine, p: (forward(x, dispatch, combine, p) ** 2).sum(), argnums=(0, 2, 3))
assert 1 <= flops(training, *args) / (5 * one_dispatch + 3 * in_experts) < 1.1

# %% [markdown]
# **Claim: groups.** Cut T tokens into groups and dispatch within each: the einsums cost as much less as the groups are
# shorter. The price is capacity counted within the group: in a small one the loads vary more, and more is dropped.
# (In this project a group is one sequence.)

# %%
tokens = normal(1, 1024, D)
chosen = np.asarray(choose(tokens, p["w_router"], cfg).experts)
dropped = {}
for length in (1024, 128, 16):
    grouped = chosen.reshape(1024 // length, length, k)
    C = capacity(length, E, k, 1.25)
    dropped[length] = (np.asarray(queue(grouped, E)) >= C).mean()
    print(f"groups of {length:4} tokens: dispatch {length / 1024:6.1%} of the FLOPs, {dropped[length]:.1%} dropped")
assert dropped[16] > dropped[128] >= dropped[1024]

# %% [markdown]
# Of the T · E · C numbers in `dispatch`, at most k · T are not 0. Lesson 02 keeps only their indices, and moves rows by
# gather: no FLOPs at all.
#
# ## Exercise 1
# Grouped-query attention has fewer heads of keys than of queries: query head i reads head i // (H / G). Write
# `grouped_attention(q, k, v)`, not causal, scale 1 / sqrt(K), without repeating the keys in memory.
# q: (B, T, H, K); k, v: (B, S, G, K), G divides H -> (B, T, H, K). Three lines: split H into two letters first.

# %%
# Your answer
def grouped_attention(q, k, v):
    raise NotImplementedError

# %%
# Self-check (runs on your answer once it is written, on the solution until then)
def sizes_inside(jaxpr):
    """The number of entries of every array that a jaxpr computes, calls in it included."""
    for eqn in jaxpr.eqns:
        yield from (var.aval.size for var in eqn.outvars)
        for inner in eqn.params.values():
            if hasattr(inner, "jaxpr"):
                yield from sizes_inside(inner.jaxpr)


def check_grouped_attention(f):
    q, k, v = normal(2, 5, 6, 4), normal(2, 7, 3, 4), normal(2, 7, 3, 4)
    y, want = jax.jit(f)(q, k, v), jax.jit(jax.nn.dot_product_attention)
    assert y.shape == q.shape, f"shape {y.shape}, want {q.shape}"
    assert close(y, want(q, k, v)), "query heads 2 g and 2 g + 1 read key head g"
    repeated = 2 * 7 * 6 * 4
    assert repeated not in sizes_inside(jax.make_jaxpr(f)(q, k, v).jaxpr), "an array of B S H K: keys were repeated"
    one = k[:, :, :1], v[:, :, :1]
    assert close(jax.jit(f)(q, *one), want(q, *one)), "G = 1, multi-query attention"

# %% [markdown]
# ## Exercise 2
# Write `einsum_vjp(spec, a, b, g)`: the gradients (da, db) of (jnp.einsum(spec, a, b) * g).sum(), by two einsums. Each
# letter of `spec` occurs in at least two of a, b and the output, and not twice in one.

# %%
# Your answer
def einsum_vjp(spec, a, b, g):
    raise NotImplementedError

# %%
# Self-check
def check_einsum_vjp(f):
    for spec in ("ij,jk->ik", "tec,td->ecd", "tec,ecd->td", "bij,bjk->bik", "ij,kj->ki", "i,j->ji"):
        a, b = (normal(*(SIZE[letter] for letter in letters)) for letters in spec.split("->")[0].split(","))
        g = normal(*np.einsum(spec, a, b).shape)
        want = jax.jit(jax.grad(lambda a, b: (jnp.einsum(spec, a, b) * g).sum(), argnums=(0, 1)))(a, b)
        for name, got, right in zip("ab", jax.jit(partial(f, spec))(a, b, g), want):
            assert got.shape == right.shape, f"{spec}: d{name} has the shape {got.shape}, {name} has {right.shape}"
            assert close(got, right), f"{spec}: d{name} is wrong"

# %% [markdown]
# ## Exercise 3
# GShard's order: write `places_by_choice(experts, n_experts)`, the places if all first choices are served before all
# second ones, and so on; within a rank, earlier tokens first. (T, k) int32 -> (T, k) int32. `places` may help.

# %%
# Your answer
def places_by_choice(experts, n_experts):
    raise NotImplementedError

# %%
# Self-check
def check_places_by_choice(f):
    f = jax.jit(f, static_argnums=1)
    assert f(np.array([[0, 1], [1, 0]]), 2).tolist() == [[0, 1], [0, 1]], "first choices first"
    for T, k in ((6, 1), (5, 2), (4, 3)):
        experts = random.permuted(np.tile(np.arange(4), (T, 1)), axis=1)[:, :k]
        queue, want = np.zeros(4, int), np.zeros((T, k), int)
        for j, t in np.ndindex(k, T):
            want[t, j] = queue[experts[t, j]]
            queue[experts[t, j]] += 1
        got = f(experts, 4)
        assert np.array_equal(got, want), f"T = {T}, k = {k}: places {got.tolist()}, want {want.tolist()}"

# %% [markdown]
# ## Rules
# | task or symptom | rule |
# |---|---|
# | reading a string | a loop over all letters; what is missing on the right is summed |
# | FLOPs | 2 × the product of all letters' sizes |
# | a strange order of axes | write the `->`: without it the output's letters are sorted |
# | three operands | a path of two products; the order can change the cost by far |
# | bfloat16 in, rounding out | `preferred_element_type=jnp.float32` |
# | a gradient | exchange the operand's letters with the output's |
# | a place in a queue | exclusive cumulative sum of one-hot, in int32 |
# | dropping what is too late | `one_hot` of a place >= C is a row of zeros; indexing would clamp |
# | causal routing | serve token by token; choice by choice lets the future in |
# | dispatch and combine are slow | they cost T / F of the experts: shorter groups, or gather (lesson 02) |

# %% [markdown]
# ## Solutions

# %%
def grouped_attention_solution(q, k, v):
    B, T, H, K = q.shape
    q = q.reshape(B, T, k.shape[2], -1, K)  # (B, T, G, H / G, K): the heads that share a key head lie together
    weights = jax.nn.softmax(jnp.einsum("bqgrd,bkgd->bgrqk", q, k) * K**-0.5)
    return jnp.einsum("bgrqk,bkgd->bqgrd", weights, v).reshape(B, T, H, K)


def einsum_vjp_solution(spec, a, b, g):
    inputs, out = spec.split("->")
    in_a, in_b = inputs.split(",")
    return jnp.einsum(f"{out},{in_b}->{in_a}", g, b), jnp.einsum(f"{in_a},{out}->{in_b}", a, g)


def places_by_choice_solution(experts, n_experts):
    T, k = experts.shape
    return places(experts.T.reshape(k * T, 1), n_experts).reshape(k, T).T

# %%
try:
    check_grouped_attention(grouped_attention)
except NotImplementedError:
    check_grouped_attention(grouped_attention_solution)

# %%
try:
    check_einsum_vjp(einsum_vjp)
except NotImplementedError:
    check_einsum_vjp(einsum_vjp_solution)

# %%
try:
    check_places_by_choice(places_by_choice)
except NotImplementedError:
    check_places_by_choice(places_by_choice_solution)
