# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---
# %% [markdown]
# # Control flow and data layout under jit, and the KV cache [S1-040] [S2-083]
#
# After this lesson you can replace a Python loop, branch or slice that depends on data by the operation that stays
# inside a compiled program, say how often each of them runs, read the errors they raise, stop generation at an end
# token, write and read a KV cache block by block, and build attention masks whose gradients are right.
#
# It uses `model.py` (`block`, `run_blocks`, `prefill`, `decode_step`, `generate`, `sample_token`, attention) and
# `train.py` (`accumulated_gradient`), with a model of 2 layers that is 16 wide.
#
# Legend: B batch, T query time, S key time (cache length = context), D model, H heads, K head dim, L layers.

# %%
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent if "__file__" in globals() else Path.cwd()
sys.path[:0] = [str(PROJECT), str(PROJECT.parent)]  # the project's files, and common/ beside it

# %%
from collections import Counter
from dataclasses import replace
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import model
from model import (IGNORE, Decoding, GPTConfig, attention, attention_reference, block, decode_step, embed, forward,
                   generate, init_params, layers_of, logits_of, loss_fn, pack, prefill, run_blocks, sample_token, start)
from train import accumulated_gradient

cfg = GPTConfig(vocab_size=11, context=16, n_layer=2, n_head=2, n_embd=16)
shallow = replace(cfg, n_layer=1)  # one layer compiles sooner, where depth adds nothing
B, S = 2, cfg.context
params = jax.jit(init_params, static_argnums=1)(jax.random.key(0), cfg)
# Fresh weights give almost uniform logits, under which wrong and right programs look alike: make them speak up.
params = {**params, "wte": 15 * params["wte"], "wpe": 15 * params["wpe"],
          "blocks": {name: 10 * a if name.startswith("w_") else a for name, a in params["blocks"].items()}}
first_layer = {**params, "blocks": jax.tree.map(lambda a: a[:1], params["blocks"])}
tokens = jax.random.randint(jax.random.key(1), (B, S), 0, cfg.vocab_size)


def relative(got, want):
    """The largest ||got - want|| / ||want|| over the leaves of two trees."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(np.linalg.norm(np.subtract(got, want)) / np.linalg.norm(want) for got, want in pairs)


def message(error, f, *args):
    """The text of the error that f(*args) must raise."""
    try:
        f(*args)
    except error as why:
        return str(why)
    raise AssertionError(f"no {error.__name__} was raised")

# %% [markdown]
# `jit` runs your Python once, on tracers: stand-ins that know shape and dtype but no value. What Python decides is
# decided then, for good. What must be decided by the data has to be an operation of the program:
#
# | Python, at trace time | operation, at run time | executes |
# |---|---|---|
# | `for` over a known number of steps | `lax.scan` | its body, once a step |
# | `for` over a traced number of steps | `lax.fori_loop` | its body, that many times |
# | `while` | `lax.while_loop` | its body, until the condition is false |
# | `if` | `lax.cond` | the chosen branch |
# | `a if c else b`, entry by entry | `jnp.where`, `lax.select` | both, then selects |
# | `x[i:i + 4]` | `lax.dynamic_slice(x, (i,), (4,))` | i is data, the size is not |
# | `x[i:i + 4] = y` | `lax.dynamic_update_slice(x, y, (i,))` | returns the new array |
#
# **Claim.** A Python `if` and a Python slice on traced values are refused, and the messages say what to do instead.

# %%
assert "Attempted boolean conversion of traced array" in message(
    jax.errors.TracerBoolConversionError, jax.jit(lambda x: x if x > 0 else -x), 1.0)
said = message(IndexError, jax.jit(lambda x, i: x[i:i + 2]), jnp.arange(5), 1)
assert "static" in said
if jax.__version_info__ >= (0, 12):
    assert "lax.dynamic_slice" in said
assert "Shapes must be 1D sequences of concrete values" in message(
    TypeError, jax.jit(lambda x, n: lax.dynamic_slice(x, (0,), (n,))), jnp.arange(5), 2)

# %% [markdown]
# ## `lax.scan`, a loop as one operation [S1-041] (must-read)
# `scan(body, carry, xs)` takes xs apart along its leading axis; `body(carry, x)` returns the next carry and a y;
# the ys come back stacked.
#
# ```
#              xs[0]          xs[1]          xs[2]
#                │              │              │
#  carry ─────► body ────────► body ────────► body ─────► final carry
#                │              │              │
#              ys[0]          ys[1]          ys[2]
# ```
#
# **Claim: over layers.** `block` has just this signature, (x, layer) -> (x, (k, v)), and the parameters are stacked on
# L. So a scan over the layers is one line, equals the project's Python loop, and returns the caches stacked on L.

# %%
def scan_blocks(params, tokens, cfg):
    """What run_blocks computes; the cache is a pair of (L, B, H, T, K)."""
    step = partial(block, cfg=cfg, B=tokens.shape[0], attention=attention, key=None)
    return lax.scan(step, embed(params, tokens, jnp.arange(tokens.shape[1])), params["blocks"])


x_loop, cache_loop = jax.jit(run_blocks, static_argnames="cfg")(params, tokens, cfg)
x_scan, cache_scan = jax.jit(scan_blocks, static_argnames="cfg")(params, tokens, cfg)
assert relative(x_scan, x_loop) < 1e-5
assert relative(cache_scan, tuple(jnp.stack(kv) for kv in zip(*cache_loop))) < 1e-5

# %% [markdown]
# **Claim.** The loop's program grows with depth, the scan's does not: its body is traced and compiled once.
# (That is what scan buys. It may cost time at each step: README.md lists layers unrolled against layers scanned. The
# project unrolls its few layers; a model of a hundred would scan.)

# %%
def program_lines(f, n_layer):
    deep = replace(cfg, n_layer=n_layer)
    shapes = jax.eval_shape(partial(init_params, cfg=deep), jax.random.key(0))
    return len(str(jax.make_jaxpr(partial(f, cfg=deep))(shapes, tokens)).splitlines())


loop_lines, scan_lines = ([program_lines(f, L) for L in (1, 2, 4)] for f in (run_blocks, scan_blocks))
print("layers        1    2    4")
for name, lines in (("Python loop", loop_lines), ("scan", scan_lines)):
    print(f"{name:11}" + "".join(f"{n:5}" for n in lines) + "  lines of jaxpr")
assert len(set(scan_lines)) == 1
assert loop_lines[2] > 3 * loop_lines[0]

# %% [markdown]
# **Claim: online softmax.** Attention is softmax(s) · V = Σ e^(s_j - m) v_j / Σ e^(s_j - m) with m = max s. That seems
# to need the whole row of scores at once. A carry of maximum, sum and weighted sum does it block by block. When a block
# raises the maximum from m to m', everything summed so far is worth e^(m - m') of what it was:
#
# ```
#  l   <- l   · e^(m - m') + Σ_block e^(s_j - m')            l:   running sum
#  acc <- acc · e^(m - m') + Σ_block e^(s_j - m') v_j        acc: running weighted sum of values
# ```
#
# The row of S scores never exists. (Lesson 05 makes this a kernel.)

# %%
def absorb(carry, scores, v):
    """The online softmax's step: scores (..., b) and values (..., b, K) join carry = (m, l, acc)."""
    m, l, acc = carry
    raised = jnp.maximum(m, scores.max(-1))
    shrink, p = jnp.exp(m - raised), jnp.exp(scores - raised[..., None])
    return raised, l * shrink + p.sum(-1), acc * shrink[..., None] + jnp.einsum("...s,...sk->...k", p, v)


def attend_by_scan(q, k, v, b):
    """One query (K,) over all of k, v (S, K), b keys at a time -> (K,), and the running maxima (S / b,)."""
    def body(carry, kv):
        carry = absorb(carry, kv[0] @ q * q.size**-0.5, kv[1])
        return carry, carry[0]
    first = (jnp.float32(-jnp.inf), jnp.float32(0), jnp.zeros_like(q))
    (_, l, acc), maxima = lax.scan(body, first, (k.reshape(-1, b, q.size), v.reshape(-1, b, q.size)))
    return acc / l, maxima


q, k, v = jax.random.normal(jax.random.key(2), (3, S, 8))
whole = attention_reference(*(a[None, None] for a in (q, k, v)))[0, 0, -1]  # the last query sees every key
blockwise, maxima = jax.jit(attend_by_scan, static_argnums=3)(q[-1], k, v, 4)
assert relative(blockwise, whole) < 1e-5
print("running maximum after each block:", *(f"{m:.3f}" for m in maxima.tolist()))
assert (jnp.diff(maxima) >= 0).all()
assert jnp.isfinite(attend_by_scan(1000 * q[-1], k, v, 4)[0]).all()  # e^s alone would overflow from s = 89

# %% [markdown]
# **Claim: gradient accumulation.** `train.accumulated_gradient` scans over micro-batches, its carry is (nats, count,
# gradient), and it equals the gradient of the whole batch. Sums are carried and divided once at the end: where
# micro-batches have different numbers of targets, a mean of means is another function.

# %%
targets = jnp.roll(tokens, -1, axis=1).at[1, 2:].set(IGNORE)  # 16 targets in row 0, 2 in row 1
whole = jax.jit(jax.grad(loss_fn), static_argnums=3)(first_layer, tokens, targets, shallow)
micro_tokens, micro_targets = tokens[:, None], targets[:, None]  # (A, 1, S): micro-batches of one row
accumulate = jax.jit(accumulated_gradient, static_argnums=3)
loss, accumulated = accumulate(first_layer, micro_tokens, micro_targets, shallow, None)
assert relative(accumulated, whole) < 1e-5

means = [accumulate(first_layer, micro_tokens, micro_targets.at[1 - i].set(IGNORE), shallow, None)[0] for i in (0, 1)]
print(f"loss {loss:.4f}, mean of the micro-batches' means {sum(means) / B:.4f}")
assert jnp.allclose((16 * means[0] + 2 * means[1]) / 18, loss, rtol=1e-5) and abs(sum(means) / B - loss) > 0.01

# %% [markdown]
# ## Common mistakes with loops [S2-046] (must-read)
# | mistake | what happens | instead |
# |---|---|---|
# | a long Python loop under jit | one copy of the body a step: long compilation, a huge program | `scan`, `fori_loop` |
# | the body changes the carry's dtype | TypeError | cast to the carry's dtype, or start with the right one |
# | `list.append` in the body | one tracer, not n values | return it as y |
#
# **Claim.** 100 steps are 300 equations as a Python loop and 1 as a scan; a bfloat16 carry that meets float32 inputs
# is refused until the body casts; what is appended in a body is a single leaked tracer.

# %%
decays = jnp.linspace(0.5, 1.0, 100)


def looped(h, decays):
    for i in range(100):
        h = h * decays[i]
    return h


def scanned(h, decays):
    return lax.scan(lambda h, decay: (h * decay, None), h, decays)[0]


assert jnp.allclose(jax.jit(looped)(1.0, decays), scanned(1.0, decays), rtol=1e-5)
looped_size, scanned_size = (len(jax.make_jaxpr(f)(1.0, decays).eqns) for f in (looped, scanned))
print(f"100 steps: {looped_size} equations unrolled, {scanned_size} scanned")
assert looped_size >= 300 and scanned_size == 1  # slice, squeeze, multiply; scan

assert "so the dtypes do not match" in message(TypeError, scanned, jnp.bfloat16(1), decays)
cast = lax.scan(lambda h, decay: ((h * decay).astype(h.dtype), None), jnp.bfloat16(1), decays)[0]
assert cast.dtype == jnp.bfloat16

seen = []


def appending(total, x):
    seen.append(total + x)
    return total + x, None


lax.scan(appending, jnp.float32(0), decays)
assert len(seen) == 1  # the body was traced once
assert "Encountered an unexpected tracer" in message(jax.errors.UnexpectedTracerError, lambda: seen[0] + 1)
totals = lax.scan(lambda total, x: (total + x, total + x), jnp.float32(0), decays)[1]
assert jnp.allclose(totals, jnp.cumsum(decays), rtol=1e-5)

# %% [markdown]
# ## Reading carry-type errors [S2-084] (must-read)
# A loop is compiled once for all its steps, so the carry that comes out must have the type of the one that goes in:
# tree structure, shapes, dtypes and, inside `shard_map`, the mesh axes along which it varies. Read the message from
# its last clause, "so the ... do not match"; the two types before it are (in, out).
#
# **Claim.** Three messages for three mistakes:

# %%
ones = jnp.ones(3)
for said, body, carry in (
        ("so the shapes do not match", lambda c, x: (jnp.append(c, x), None), jnp.zeros(1)),
        ("so the dtypes do not match", lambda c, x: (c + x, None), jnp.int32(0)),  # int32 + float32 is float32
        ("so the numbers of children do not match, with the symmetric difference of key sets: {'count'}",
         lambda c, x: ({"sum": c["sum"] + x, "count": 1.0}, None), {"sum": 0.0})):
    text = message(TypeError, lax.scan, body, carry, ones)
    print(text.split("\n\n")[1])
    assert said in text and "scan body function carry input and carry output" in text

# %% [markdown]
# **Claim.** A Python number has a *weak* type, which gives way: as a first carry it is promoted to what the body
# returns, without an error. So `0` works where `jnp.int32(0)` does not, and the result's dtype is the body's choice.
# Write the first carry with the dtype you mean.

# %%
promoted, _ = lax.scan(lambda c, x: (c + x, None), 0, ones)
assert promoted == 3.0 and promoted.dtype == jnp.float32
assert lax.while_loop(lambda c: c < 3, lambda c: c + 1.0, 0).dtype == jnp.float32

# %% [markdown]
# **Claim.** Inside `shard_map` a constant is the same on every device, a shard is not, and the type says so: `{V:d}`
# is "varying along d". A carry that starts as a constant and takes in shards must be declared varying: `lax.pcast`.

# %%
mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))


def shard_sum(first):
    def local(x):
        return lax.scan(lambda c, x: (c + x, None), first(), x)[0][None]
    return jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(ones)


text = message(TypeError, shard_sum, lambda: jnp.float32(0))
assert "float32[]{V:d}, so the manual axis types do not match" in text and "jax.lax.pcast" in text
assert shard_sum(lambda: lax.pcast(jnp.float32(0), "d", to="varying")) == 3.0

# %% [markdown]
# ## `cond`, `select`, `while_loop`: generation that stops [S1-042a] (must-read)
# `model.generate` draws n tokens, always n. Here is its loop with an end token, in one `while_loop`:
#
# ```
#  while i < n and some row has not drawn `end`:
#      token = end where the row is done, else a draw            select: both computed, cheap
#      cond: room in the cache?   yes -> decode_step             one cached step
#                                 no  -> slide, then prefill     the whole window again
# ```
#
# `tick` counts on the host what the compiled program really executes.

# %%
executed = Counter()


def tick(name):
    jax.debug.callback(lambda: executed.update([name]))


def counted(f, *args):
    """f(*args), and how often each tick ran in it."""
    executed.clear()
    out = jax.block_until_ready(f(*args))
    jax.effects_barrier()  # callbacks may lag behind results
    return out, dict(executed)


def generate_until(params, state, key, n, cfg, end, temperature):
    """As model.generate, but stops once every row has drawn `end`, which also fills what was not drawn."""
    B, S = state.window.shape
    params, packed = {**params, "blocks": layers_of(params, cfg)}, pack(params, cfg, B)

    def cached(s, token):
        tick("cached step")
        logits, cache = decode_step(packed, s.cache, token, s.length, cfg)
        window = lax.dynamic_update_slice_in_dim(s.window, token[:, None], s.length, axis=1)
        return Decoding(window, s.length + 1, cache, logits)

    def slid(s, token):
        tick("prefill")
        window = jnp.concatenate([s.window[:, 1:], token[:, None]], axis=1)
        logits, cache = prefill(params, window, S, cfg)
        return Decoding(window, s.length, cache, logits)

    def going(carry):
        _, _, done, i = carry
        return (i < n) & ~done.all()

    def draw(carry):
        s, out, done, i = carry
        token = sample_token(s.logits, jax.random.fold_in(key, i), temperature)
        token = jnp.where(done, end, token)
        s = lax.cond(s.length < S, cached, slid, s, token)
        return s, lax.dynamic_update_slice_in_dim(out, token[:, None], i, axis=1), done | (token == end), i + 1

    first = (state, jnp.full((B, n), end, jnp.int32), jnp.zeros(B, bool), jnp.int32(0))
    _, out, _, drawn = lax.while_loop(going, draw, first)
    return out, drawn


n, room = 24, S - 4  # the prompt takes 4 of the cache's 16 places
state = jax.jit(start, static_argnums=3)(first_layer, tokens[:, :4], 4, shallow)
free = np.asarray(jax.jit(generate, static_argnums=(3, 4))(first_layer, state, jax.random.key(3), n, shallow, 1.0)[0])
until = jax.jit(generate_until, static_argnums=(3, 4))


def first_draws(end):
    return [min([*np.flatnonzero(row == end), n - 1]) for row in free]


drawn_by_both = [end for end in range(cfg.vocab_size) if max(first_draws(end)) < n - 1]
early, late = (choose(drawn_by_both, key=lambda end: max(first_draws(end))) for choose in (min, max))
for end in (early, late, cfg.vocab_size):  # the last one is never drawn
    stops = first_draws(end)
    (out, drawn), counts = counted(until, first_layer, state, jax.random.key(3), n, shallow, end, 1.0)
    print(f"end token {end:2}: {drawn} of {n} steps, {counts}")
    assert drawn == max(stops) + 1
    assert counts.get("cached step", 0) == min(drawn, room) and counts.get("prefill", 0) == max(drawn - room, 0)
    for row, want, stop in zip(np.asarray(out), free, stops):
        assert (row[:stop + 1] == want[:stop + 1]).all() and (row[stop + 1:] == end).all()

# %% [markdown]
# **Claim.** A `where` computes both sides and selects; a `cond` runs one. `sample_token` may select between a draw and
# an argmax because both are cheap. It also guards its division, `logits / where(temperature > 0, temperature, 1)`:
# the side that is not chosen is computed, too.

# %%
def primitives(f, *args):
    return [e.primitive.name for e in jax.make_jaxpr(f)(*args).eqns]


assert (sample_token(state.logits, jax.random.key(4), 0.0) == state.logits.argmax(-1)).all()
names = str(jax.make_jaxpr(sample_token)(state.logits, jax.random.key(4), 0.0))
assert "cond[" not in names and names.count("argmax[") == 2 and "select_n" in names  # categorical is an argmax, too
assert "select cases must have the same shapes" in message(  # unlike where, select does not broadcast
    TypeError, lax.select, jnp.array([True, False, True]), ones, jnp.zeros(1))

# %% [markdown]
# **Claim.** Under `vmap` a condition may differ from row to row, and one program must serve all rows: `cond` becomes a
# select, both branches run for every row, and `while_loop` runs until the last row is done, the finished rows idling.

# %%
def grow(x):
    tick("grow")
    return 2 * x


def shrink(x):
    tick("shrink")
    return x / 2


def branch(x):
    return lax.cond(x > 0, grow, shrink, x)


def countdown(x):
    def body(x):
        tick("body")
        return x - 1
    return lax.while_loop(lambda x: x > 0, body, x)


assert counted(jax.jit(branch), 1.0)[1] == {"grow": 1}
assert counted(jax.jit(jax.vmap(branch)), jnp.array([1.0, -1.0, 1.0]))[1] == {"grow": 1, "shrink": 1}  # of all rows
assert "cond" not in primitives(jax.vmap(branch), ones) and "select_n" in primitives(jax.vmap(branch), ones)
assert "cond" in primitives(jax.vmap(lambda p, x: lax.cond(p, jnp.sin, jnp.cos, x), (None, 0)), True, ones)

assert [counted(jax.jit(countdown), steps)[1]["body"] for steps in (1, 5)] == [1, 5]
assert counted(jax.jit(jax.vmap(countdown)), jnp.array([1, 5]))[1] == {"body": 5}  # of both rows

# %% [markdown]
# **Claim.** A `while_loop` has no reverse mode: the number of its steps, and so the memory for their residuals, is not
# known. With a fixed number of steps use `scan`, or `fori_loop` with Python ints as bounds. (Lesson 03 has the table.)

# %%
assert "Reverse-mode differentiation does not work for lax.while_loop" in message(
    ValueError, jax.grad(lambda x: lax.while_loop(lambda c: c < 3, lambda c: 2 * c, x)), 1.0)
assert jax.grad(lambda x: lax.fori_loop(0, 3, lambda i, c: 2 * c, x))(1.0) == 8

# %% [markdown]
# ## Load and store a block: the KV cache [S1-043a] (must-read)
# Without a cache, token number t costs a forward pass over t tokens. But keys and values of the past never change (the
# mask is causal), so `prefill` keeps them, `decode_step` computes those of the new token alone, scores them against
# the stored ones, and stores its own:
#
# ```
#  k of one layer and head: S places of K numbers, `position` of them written
#
#  ┌────┬────┬────┬────┬────┬────┬────┬────┐   decode_step at position 5
#  │ k0 │ k1 │ k2 │ k3 │ k4 │    │    │    │   reads places < 5 (where(past, scores, -inf)),
#  └────┴────┴────┴────┴────┴────┴────┴────┘   writes place 5: dynamic_update_slice(k, new, 5)
#    block 0: 0 to 3     block 1: 4 to 7       a block: dynamic_slice(k, (start,), (4,))
# ```
#
# The shapes are static, start is data. These two operations are how every tiled kernel loads and stores.
#
# **Claim.** A prefill of 5 and then token by token gives the logits of the full recomputation, to 1e-5.

# %%
def decode_rest(params, cache, tokens):
    """Logits (S - 5, B, V) after each of the tokens 5, 6, ... S - 1: one cached step each."""
    packed = pack(params, cfg, B)

    def step(cache, at):
        logits, cache = decode_step(packed, cache, tokens[:, at], at, cfg)
        return cache, logits
    return lax.scan(step, cache, jnp.arange(5, S))[1]


prompt = tokens * (jnp.arange(S) < 5)  # what follows the prompt is not yet known
first, cache = jax.jit(prefill, static_argnums=3)(params, prompt, 5, cfg)
full = logits_of(params, x_loop, cfg).reshape(B, S, -1)  # x_loop: all S tokens at once, from the first section
assert relative(first, full[:, 4]) < 1e-5
assert relative(jax.jit(decode_rest)(params, cache, tokens), full[:, 5:].swapaxes(0, 1)) < 1e-5

# %% [markdown]
# **Claim.** The read, too, can go block by block. `decode_step`'s attention over the cache is replaced by one that
# loads 4 keys at a time with `dynamic_slice` into the online softmax, and only as many blocks as are written:
# the number of blocks is data, so the loop is a `fori_loop`. The logits stay.

# %%
def attend_cache_by_blocks(q, k, v, k_old, v_old, past, b=4):
    """model.attend_cache. q, k, v: (B, H, 1, K); k_old, v_old: (B, H, S, K), S a multiple of b; past: (S,) bool."""
    q = q[:, :, 0] * q.shape[-1] ** -0.5
    written = past.sum()

    def body(i, carry):
        tick("block")
        k_block, v_block = (lax.dynamic_slice_in_dim(a, i * b, b, axis=2) for a in (k_old, v_old))  # (B, H, b, K)
        scores = jnp.einsum("bhk,bhsk->bhs", q, k_block)
        return absorb(carry, jnp.where(i * b + jnp.arange(b) < written, scores, -jnp.inf), v_block)

    own = (q * k[:, :, 0]).sum(-1)  # the new token's own score opens the sums, so m is finite from the start
    _, l, acc = lax.fori_loop(0, (written + b - 1) // b, body, (own, jnp.ones_like(own), v[:, :, 0]))
    return (acc / l[..., None])[:, :, None]


with mock.patch.object(model, "attend_cache", attend_cache_by_blocks):
    # A new function: jit(decode_rest) would be found in jit's cache, with the attention it was traced with.
    by_blocks, counts = counted(jax.jit(lambda *args: decode_rest(*args)), params, cache, tokens)
assert relative(by_blocks, full[:, 5:].swapaxes(0, 1)) < 1e-5
assert counts == {"block": cfg.n_layer * sum(-(-at // 4) for at in range(5, S))}

# %% [markdown]
# **Trap.** A block that would reach past the end is not an error: its *start* is moved back until it fits. A load
# returns other entries than you name, a store overwrites other ones. (A gather clamps too; a scatter drops.)
# `decode_step` at position S would overwrite the last key; `generate` stops filling at S for that reason.

# %%
a = jnp.arange(5)
assert lax.dynamic_slice(a, (4,), (3,)).tolist() == [2, 3, 4]  # not [4] and not an error
assert lax.dynamic_update_slice(a, jnp.array([8, 9]), (4,)).tolist() == [0, 1, 2, 8, 9]
assert a[10] == 4 and (a.at[10].set(7) == a).all()
full_k, new_k = cache_loop[0][0], jnp.zeros((B, cfg.n_head, 1, cfg.head_dim))
overrun = lax.dynamic_update_slice_in_dim(full_k, new_k, S, axis=2)  # decode_step's write, at position S
assert (overrun[:, :, :-1] == full_k[:, :, :-1]).all() and (overrun[:, :, -1] == 0).all()

# %% [markdown]
# ## Masks by broadcasting [S2-087] (must-read)
# A mask is a comparison of a column of query positions with a row of key positions; masks combine with `&`.
#
# | mask | query t may see key s | shape |
# |---|---|---|
# | causal | s <= t | (T, S) |
# | sliding window of W | t - s < W | (T, S) |
# | padding | s < length of the row | (B, 1, S) |
# | segments (several texts packed in a row) | segment[t] == segment[s] | (B, T, S) |
#
# **Claim.** Four comparisons and three `&` equal the loop over every (b, t, s).

# %%
def combined_mask(lengths, segments, window):
    """lengths (B,), segments (B, T) -> bool (B, T, T): causal, in the window, real, and of the same segment."""
    t = jnp.arange(segments.shape[1])
    causal = t[None, :] <= t[:, None]
    near = t[:, None] - t[None, :] < window
    real = t < lengths[:, None, None]
    same = segments[:, :, None] == segments[:, None, :]
    return causal & near & real & same


lengths, segments = np.array([8, 5]), np.array([[0, 0, 0, 1, 1, 1, 1, 1], [0] * 8])
mask = combined_mask(lengths, segments, window=3)
loop = [[[s <= t and t - s < 3 and s < lengths[b] and segments[b, t] == segments[b, s] for s in range(8)]
         for t in range(8)] for b in range(2)]
assert mask.tolist() == loop
print("row 0: two segments     row 1: 5 tokens of 8")
for left, right in zip(*np.where(mask, "#", ".")):
    print("   " + " ".join(left) + "         " + " ".join(right))
assert mask.any(-1).sum() == 8 + 7  # in row 1 the last query sees nothing: its row of the mask is empty

# %% [markdown]
# ## Masking the scores: three ways, and the row that is empty [S2-088] (must-read)
# | where the mask acts | masked entries | an empty row |
# |---|---|---|
# | scores -> `-inf`, then softmax | exactly 0 | NaN |
# | scores -> `finfo.min`, then softmax | exactly 0 | uniform over the *masked* entries |
# | softmax, then weights -> 0 | 0, but they stay in the denominator | 0 |
#
# **Claim.** All three hide the values; the last is wrong none the less: its rows do not sum to 1, and the denominator
# lets the future through. The first two differ only in an empty row. `attention_weights` uses `finfo.min` (causal
# rows are never empty), `attend_cache` `-inf` (the own key is always there). Neither is right for an empty row:
# exercise 2.

# %%
scores = jnp.array([[1.0, 2.0, 5.0], [1.0, 2.0, 3.0]])
allowed = jnp.array([[True, True, False], [False, False, False]])
with_inf = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf))
with_min = jax.nn.softmax(jnp.where(allowed, scores, jnp.finfo(scores.dtype).min))
after = jnp.where(allowed, jax.nn.softmax(scores), 0)
assert jnp.isnan(with_inf[1]).all() and jnp.allclose(with_min[1], 1 / 3) and (after[1] == 0).all()
assert (with_inf[0] == with_min[0]).all() and with_inf[0, 2] == 0
assert jnp.allclose(with_inf[0].sum(), 1) and after[0].sum() < 0.1

# %% [markdown]
# **Claim.** Causality is a statement about gradients: what the model says at time t has exactly zero gradient with
# respect to any later input. Here the inputs are the position embeddings, and t = 6.

# %%
def said_at(wpe, t):
    return (forward({**first_layer, "wpe": wpe}, tokens, shallow)[:, t] ** 2).sum()


by_position = np.abs(jax.jit(jax.grad(said_at), static_argnums=1)(params["wpe"], 6)).max(-1)  # (S,)
assert (by_position[:7] > 0).all() and (by_position[7:] == 0).all()

# %% [markdown]
# **Claim.** With the mask after the softmax the later keys do get a gradient: training would learn from what sampling
# cannot see.

# %%
def masked_too_late(q, k, v):
    weights = jax.nn.softmax(q @ k.swapaxes(2, 3) * q.shape[-1] ** -0.5, axis=-1)
    return jnp.tril(weights) @ v


def key_gradient(attention, t=6):
    """The largest |gradient| at each key position of what attention returns at query t: (S,)."""
    def said(q, k, v):
        return (attention(q, k, v)[:, :, t] ** 2).sum()
    heads = (a[None, None] for a in (q, k, v))  # (B, H, S, K) with B = H = 1
    return np.abs(jax.jit(jax.grad(said, argnums=1))(*heads)).max((0, 1, 3))


assert (key_gradient(attention)[7:] == 0).all()
assert (key_gradient(masked_too_late)[7:] > 0).all()

# %% [markdown]
# ## Exercise 1
# Write `logsumexp_by_blocks(x, b)`: log Σ e^x of a vector x: (S,), for any S >= b, loading b entries at a time with
# `lax.dynamic_slice` in a scan. S need not be a multiple of b: what does the last load return?

# %%
# Your answer
def logsumexp_by_blocks(x, b):
    raise NotImplementedError

# %%
# Self-check (runs on your answer once it is written, on the solution until then)
def check_logsumexp_by_blocks(f):
    f, x = jax.jit(f, static_argnums=1), jax.random.normal(jax.random.key(5), (16,))
    assert jnp.allclose(f(x, 4), jax.nn.logsumexp(x), rtol=1e-5), "16 entries, 4 at a time"
    assert jnp.allclose(f(x[:10], 4), jax.nn.logsumexp(x[:10]), rtol=1e-5), \
        "10 entries, 4 at a time: the last load is moved back by 2 and meets entries again"
    assert jnp.allclose(f(x[:5], 5), jax.nn.logsumexp(x[:5]), rtol=1e-5), "one block is the whole vector"
    assert jnp.allclose(f(x + 1000, 4), jax.nn.logsumexp(x + 1000), rtol=1e-5), "e^1000 overflows: carry the maximum"
    assert jnp.allclose(jax.grad(f)(x[:10], 4), jax.nn.softmax(x[:10]), atol=1e-6), "its gradient is softmax(x)"
    program = str(jax.make_jaxpr(f, static_argnums=1)(x, 4))
    assert "scan[" in program and "dynamic_slice[" in program, "load blocks by dynamic_slice in a scan"

# %% [markdown]
# ## Exercise 2
# Write `masked_softmax(scores, mask)`: softmax over the last axis among the entries where the mask is True, 0
# elsewhere, and a row of zeros where a row is all masked. Its gradient must be finite, too: many programs *add* a bias
# of 0 or -inf to the scores; try what the empty row's gradient is then.

# %%
# Your answer
def masked_softmax(scores, mask):
    raise NotImplementedError

# %%
# Self-check
def check_masked_softmax(f):
    f = jax.jit(f)
    assert jnp.allclose(f(scores, jnp.ones_like(allowed)), jax.nn.softmax(scores)), "with nothing masked it is softmax"
    assert jnp.allclose(f(scores, allowed)[0], with_inf[0]) and f(scores, allowed)[0, 2] == 0, \
        "masked entries are 0, and the others sum to 1"
    assert (f(scores, allowed)[1] == 0).all(), "a row with nothing to see is 0"
    gradient = jax.grad(lambda s: (f(s, allowed) * jnp.arange(3.0)).sum())(scores)
    assert jnp.isfinite(gradient).all(), "the gradient is finite, in the empty row as well"
    assert (gradient[~allowed] == 0).all() and (gradient[0, :2] != 0).all(), "only visible scores have a gradient"

# %% [markdown]
# ## Rules
# | symptom or task | rule |
# |---|---|
# | compilation time grows with depth or steps | `scan`: the body is traced once, the program's size is constant |
# | "carry input and carry output must have equal types" | read the last clause; cast in the body, or fix the carry |
# | a first carry of `0` | is promoted silently: write `jnp.int32(0)` or `jnp.float32(0)` |
# | "manual axis types do not match" | `lax.pcast(first, axis, to="varying")` |
# | values wanted from inside a loop | return them as y; `append` leaks one tracer |
# | micro-batches of unequal counts | carry sums, divide once |
# | one of two costly paths | `cond`; never under a vmap with a batched condition, where both run |
# | one of two cheap values | `where`, with a safe input on the side that is not chosen |
# | stop early | `while_loop` with a `done` mask; no reverse mode |
# | load or store at a traced place | `dynamic_slice`, `dynamic_update_slice`; the start is clamped: guard the end |
# | hide keys | mask the scores before the softmax; treat empty rows apart; test that future gradients are exactly 0 |

# %% [markdown]
# ## Solutions

# %%
def logsumexp_by_blocks_solution(x, b):
    S, = x.shape

    def body(carry, i):
        m, l = carry
        start = jnp.minimum(i * b, S - b)  # where dynamic_slice would move it
        loaded = lax.dynamic_slice(x, (start,), (b,))
        fresh = jnp.where(start + jnp.arange(b) >= i * b, loaded, -jnp.inf)  # the last load meets old entries again
        raised = jnp.maximum(m, fresh.max())
        return (raised, l * jnp.exp(m - raised) + jnp.exp(fresh - raised).sum()), None

    (m, l), _ = lax.scan(body, (jnp.asarray(-jnp.inf, x.dtype), jnp.zeros((), x.dtype)), jnp.arange(-(-S // b)))
    return m + jnp.log(l)


def masked_softmax_solution(scores, mask):
    # finfo.min keeps everything finite; `where` sends no gradient to a masked score, a sum would.
    masked = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    return jnp.where(mask, jax.nn.softmax(masked, axis=-1), 0.0)

# %%
try:
    check_logsumexp_by_blocks(logsumexp_by_blocks)
except NotImplementedError:
    check_logsumexp_by_blocks(logsumexp_by_blocks_solution)

# %%
try:
    check_masked_softmax(masked_softmax)
except NotImplementedError:
    check_masked_softmax(masked_softmax_solution)
