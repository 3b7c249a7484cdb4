# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---
# %% [markdown]
# # Random keys [S2-069]
#
# After this lesson you can say where a random number comes from, hand keys to layers, steps, examples and devices by
# four patterns, let JAX find a reused key (and know which ones it overlooks), and resume a run with the same batches
# and the same dropout.
#
# It uses `model.py` (`dropout`, `generate`, `sample_token`), `data.py` (`sample_batch`) and `train.py`
# (`purpose_keys`). Random numbers on several devices go on in `nanogpt_sharded/lessons/04_sharded_randomness.py`.
#
# Legend: B batch, T time, D model, V vocabulary, n a number of keys. R1 to R10 name the rules; a table at the end
# collects them.

# %%
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent if "__file__" in globals() else Path.cwd()
sys.path[:0] = [str(PROJECT), str(PROJECT.parent)]  # the project's files, and common/ beside it

# %%
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)  # for the summary; before the first array is made

from data import sample_batch
from model import GPTConfig, dropout, generate, init_params, sample_token, start
from train import purpose_keys

cfg = GPTConfig(vocab_size=11, context=16, n_layer=1, n_head=2, n_embd=16)


def bits(key):
    """A key as NumPy integers, to compare keys by."""
    return np.asarray(jax.random.key_data(key))


def same(a, b):
    return bool((np.asarray(a) == np.asarray(b)).all())


def close(a, b):
    """For normal draws: their bits are equal, the function applied to them may be fused, and rounded, differently."""
    return np.allclose(a, b, rtol=1e-5, atol=1e-6)


def message(error, f, *args):
    """The text of the error that f(*args) must raise."""
    try:
        f(*args)
    except error as why:
        return str(why)
    raise AssertionError(f"no {error.__name__} was raised")

# %% [markdown]
# ## The design: no global state [S2-070] (must-read)
# ```
#  NumPy   state ──► draw a ──► state' ──► draw b ──► state''     a chain: b depends on whether a was drawn before
#
#  JAX     key ──┬──► key_a ──► a                                 a tree: b depends on the path to its key,
#                └──► key_b ──► b                                 and on nothing else
# ```
# NumPy's global generator makes every draw depend on all draws before it. A compiler that reorders, drops or
# parallelises draws would change results. JAX has no generator: `jax.random.normal(key, shape)` is a pure function,
# a hash of the key and of each entry's index.
#
# **R1.** A draw depends on its key, shape and dtype only; not on order, and not on what runs beside it.

# %%
def numpy_draws(order):
    np.random.seed(0)
    return {name: np.random.normal(size=3) for name in order}


def jax_draws(order):
    keys = dict(zip(("weights", "noise"), jax.random.split(jax.random.key(0))))
    return {name: jax.random.normal(keys[name], (3,)) for name in order}


forwards, backwards = ("weights", "noise"), ("noise", "weights")
assert not same(numpy_draws(forwards)["noise"], numpy_draws(backwards)["noise"])
assert same(jax_draws(forwards)["noise"], jax_draws(backwards)["noise"])
together = jax.vmap(lambda key: jax.random.normal(key, (3,)))(jax.random.split(jax.random.key(0)))  # in parallel
assert close(together[1], jax_draws(forwards)["noise"])

# %% [markdown]
# A typed key is an array of dtype `key<fry>` (the hash is called threefry): two 32-bit words of state, no arithmetic.
# n keys are an array of shape (n,). `jax.random.PRNGKey`, the old form, is a plain uint32 array with the same words.

# %%
key = jax.random.key(0)
assert str(key.dtype) == "key<fry>" and key.shape == () and bits(key).tolist() == [0, 0]
assert jax.random.split(key, 5).shape == (5,)
assert "does not accept dtypes key<fry>" in message(TypeError, lambda: key + 1)
old = jax.random.PRNGKey(0)
assert old.dtype == jnp.uint32 and same(old, bits(key)) and (old + 1).shape == (2,)  # nothing protects it

# %% [markdown]
# ## The number one mistake: reusing a key [S2-008] (must-read)
# **Claim.** The same key gives the same numbers: two dropout layers with one key drop the same entries. Even another
# shape begins with the same numbers, and another distribution is a function of the same bits.

# %%
x = jnp.ones((4, 8))
one = jax.random.key(1)
first, second = dropout(x, 0.5, one), dropout(x, 0.5, one)
assert same(first, second)
assert same(jax.random.uniform(one, (9,))[:2], jax.random.uniform(one, (2,)))
uniform, normal = jax.random.uniform(one, (1000,)), jax.random.normal(one, (1000,))
assert jnp.corrcoef(uniform, normal)[0, 1] > 0.9  # normal is a rising function of uniform: by no means independent

# %% [markdown]
# **R2.** Consume a key once: `split` it and use the children. That `model.block` does: one key in, three out, for the
# attention weights, the projection and the MLP.

# %%
key_proj, key_mlp = jax.random.split(jax.random.key(1))
first, second = dropout(x, 0.5, key_proj), dropout(x, 0.5, key_mlp)
assert not same(first, second)
print("kept by both of two layers: {:.2f} with one key, {:.2f} after split (0.25 is right)".format(
    *(jnp.mean((dropout(jnp.ones(4096), 0.5, a) > 0) & (dropout(jnp.ones(4096), 0.5, b) > 0))
      for a, b in ((one, one), (key_proj, key_mlp)))))

# %% [markdown]
# **R3.** Let JAX look for reuse: `jax.debug_key_reuse(True)`, a context manager (or the flag `jax_debug_key_reuse`),
# raises KeyReuseError. Claim: it follows typed keys only, takes `fold_in` for no consumption, and sees a whole `vmap`
# as one use.

# %%
def reuse(key):
    return jax.random.normal(key) + jax.random.normal(key)


with jax.debug_key_reuse(True):
    error = jax.errors.KeyReuseError
    assert "Previously-consumed key passed" in message(error, reuse, jax.random.key(1))
    assert "argument 0 is already consumed" in message(error, jax.jit(reuse), jax.random.key(1))
    message(error, lambda key: (jax.random.split(key), jax.random.normal(key)), jax.random.key(1))  # a split consumes
    jax.random.normal(key_proj), jax.random.normal(key_mlp)  # siblings are fine

    reuse(jax.random.PRNGKey(1))  # overlooked: an old key
    key = jax.random.key(1)
    assert same(*(jax.random.normal(jax.random.fold_in(key, 7)) for _ in range(2)))  # overlooked: one fold_in twice
    rows = jax.vmap(lambda key, i: jax.random.normal(key), in_axes=(None, 0))(key, jnp.arange(3))
    assert same(rows, rows[0])  # overlooked: one key for all rows

# %% [markdown]
# ## A key is a piece of state, and must be passed [S2-034] (must-read)
# A generator remembers where it stopped; a key does not. So a training loop that augments its data has to carry the key
# like it carries the parameters, or compute it from the step. Here the augmentation replaces a quarter of the tokens.
#
# **Claim.** With the same key every step has the same mask: always the same positions are lost. Both repairs give a new
# mask each step.

# %%
def augment(key, tokens):
    """tokens with about a quarter of them replaced at random, and the mask of the replaced."""
    key_where, key_what = jax.random.split(key)
    hit = jax.random.bernoulli(key_where, 0.25, tokens.shape)
    return jnp.where(hit, jax.random.randint(key_what, tokens.shape, 0, cfg.vocab_size), tokens), hit


def same_key(key, step):
    return key, key


def split_off(key, step):
    key, used = jax.random.split(key)
    return key, used


def folded(key, step):
    return key, jax.random.fold_in(key, step)


def masks(next_key, key, steps=5):
    """(steps, B, T) bool: a training loop whose carry is its key."""
    def step(key, i):
        key, used = next_key(key, i)
        return key, augment(used, jnp.zeros((2, cfg.context), int))[1]
    return lax.scan(step, key, jnp.arange(steps))[1]


for next_key in (same_key, split_off, folded):
    distinct = len(np.unique(masks(next_key, jax.random.key(2)), axis=0))
    print(f"{next_key.__name__:9}: {distinct} different masks in 5 steps")
    assert distinct == (1 if next_key is same_key else 5)

# %% [markdown]
# ## Four patterns for keys [S2-072] (must-read)
# ```
#  seed ── key ── split ──┬── "init" ───── split ──► wte, wpe, w_qkv, ...     by name       a fixed few
#                         ├── "batches" ── fold_in(step) ──► positions        by number     resumable
#                         └── "dropout" ── fold_in(step) ── split ──► layers
#                                          carry: key, used = split(key)      by sequence   in a scan
#                                          vmap over split(key, n)            by example    in parallel
# ```
# The cells of this section run with the checker on.

# %%
jax.config.update("jax_debug_key_reuse", True)

# %% [markdown]
# ### `split(key, n)`: names [S2-073] (must-read)
# **R4.** One key for each purpose, named, at the start. `train.purpose_keys` is that line. Claim: the first keys of a
# larger split are those of a smaller one, so a purpose added at the end leaves the others, and old runs, unchanged.

# %%
keys = purpose_keys(seed=0)
print({name: bits(key).tolist() for name, key in keys.items()})
assert len({bits(key).tobytes() for key in keys.values()}) == 3
assert same(bits(jax.random.split(jax.random.key(0), 9)[:2]), bits(jax.random.split(jax.random.key(0), 2)))
assert same(bits(jax.random.split(jax.random.key(0), 4)[:3]), [bits(key) for key in keys.values()])

# %% [markdown]
# ### `fold_in(key, step)`: steps and data indices [S2-074] (must-read)
# **R5.** What belongs to step s draws with `fold_in(key, s)`. Claim: a run that resumes at step 3 meets the batches and
# the dropout that it would have met without the stop, bit for bit; nothing but the step has to be saved.

# %%
text = jnp.asarray(np.random.default_rng(0).integers(0, cfg.vocab_size, 500))


@jax.jit
def randomness(keys, step):
    """What is random in train.train_step: its batch, and a layer's dropout."""
    tokens, _ = sample_batch(text, keys["batches"], step, 2, cfg.context)
    return tokens, dropout(jnp.ones((4, 8)), 0.5, jax.random.fold_in(keys["dropout"], step))


def run(first, last):
    keys = purpose_keys(seed=0)  # as each process makes them
    return [b"".join(np.asarray(a).tobytes() for a in randomness(keys, step)) for step in range(first, last)]


whole = run(0, 6)
assert run(3, 6) == whole[3:] and len(set(whole)) == 6

# %% [markdown]
# **Trap.** `fold_in(key, i)` *is* `split(key, n)[i]`. Whoever splits a key by purpose and folds steps into the same key
# gives step 0 the key of "init". The checker says nothing, as `fold_in` does not consume.
#
# **R6.** Split a key or fold numbers into it, never both: fold into a purpose's own key.

# %%
assert all(same(bits(jax.random.fold_in(jax.random.key(0), i)), bits(jax.random.split(jax.random.key(0), 5)[i]))
           for i in range(5))
root = jax.random.key(0)
purposes = jax.random.split(root, 3)
assert same(bits(jax.random.fold_in(root, 0)), bits(purposes[0]))  # a collision, and no error
purpose_bits, step_bits = bits(purposes), bits(jax.vmap(partial(jax.random.fold_in, keys["dropout"]))(jnp.arange(100)))
assert len(np.unique(np.concatenate([purpose_bits, step_bits]), axis=0)) == 103  # the repair: no two alike

# %% [markdown]
# ### The key in the carry of `scan` [S2-075] (must-read)
# **R7.** `key, used = split(key)`: carry the one, consume the other. Claim: the scan equals the Python loop; a body
# that consumes the key which it carries on is refused. (One variant, carrying the child that was consumed, JAX 0.10
# overlooks.)

# %%
def walk(key, _):
    key, used = jax.random.split(key)
    return key, jax.random.normal(used)


def walk_on_the_spot(key, _):
    return key, jax.random.normal(key)


def walk_with_the_wrong_child(key, _):
    child, _ = jax.random.split(key)
    return child, jax.random.normal(child)


_, scanned = lax.scan(walk, jax.random.key(3), length=4)
key, looped = jax.random.key(3), []
for _ in range(4):
    key, draw = walk(key, None)
    looped.append(draw)
assert close(scanned, jnp.stack(looped))

said = message(error, partial(lax.scan, walk_on_the_spot, length=4), jax.random.key(3))
print(said.split(":")[0])
assert "scan body function leads to key reuse when repeatedly executed" in said
if jax.__version_info__ >= (0, 12):
    assert "consumed inputs don't match sourced outputs" in message(
        error, partial(lax.scan, walk_with_the_wrong_child, length=4), jax.random.key(3))
else:
    lax.scan(walk_with_the_wrong_child, jax.random.key(3), length=4)

# %% [markdown]
# ### `vmap` over an array of keys [S2-076] (must-read)
# **R8.** n independent examples: `vmap` over `split(key, n)`, an array of shape (n,). Claim: it equals the loop; the
# samplers themselves take one key and say so.

# %%
def keys_of(seed, n=4):
    return jax.random.split(jax.random.key(seed), n)  # made anew: the checker counts across the cells, too


mapped = jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys_of(4))
looped = jnp.stack([jax.random.normal(key, (3,)) for key in keys_of(4)])
assert keys_of(4).shape == (4,) and mapped.shape == (4, 3) and close(mapped, looped)
assert "normal accepts a single key, but was given a key array of shape (4,)" in message(
    ValueError, jax.random.normal, keys_of(4))

# %%
jax.config.update("jax_debug_key_reuse", False)

# %% [markdown]
# ## vmap and random numbers: which axis maps what [S2-025] (must-read)
# **Claim.** `in_axes=None` for the key hands every row the same one: the rows of a batch get one dropout mask.

# %%
batch = jnp.ones((4, 8))
drop = partial(dropout, rate=0.5)
shared = jax.vmap(lambda row, key: drop(row, key=key), in_axes=(0, None))(batch, jax.random.key(5))
apart = jax.vmap(lambda row, key: drop(row, key=key))(batch, jax.random.split(jax.random.key(5), 4))
assert same(shared, shared[:1]) and len(np.unique(apart, axis=0)) == 4
one_call = drop(batch, key=jax.random.key(5))  # the project's way: one key, one mask of the whole batch's shape
assert len(np.unique(one_call, axis=0)) == 4

# %% [markdown]
# **Claim.** That a vmap equals the loop is a property of threefry. `rbg`, the implementation that calls the backend's
# own generator, draws the whole batch from the first key: the numbers differ from row to row, and from the loop's.

# %%
for impl, equal_rows in (("threefry2x32", 4), ("rbg", 1)):
    rows = jax.random.split(jax.random.key(0, impl=impl), 4)
    mapped = jax.vmap(lambda key: jax.random.uniform(key, (3,)))(rows)
    looped = jnp.stack([jax.random.uniform(key, (3,)) for key in rows])
    print(f"{impl:12} rows of vmap equal to the loop's: {(mapped == looped).all(1).sum()} of 4")
    assert (mapped == looped).all(1).sum() == equal_rows and same(mapped[0], looped[0])
    assert len(np.unique(mapped)) == 12

# %% [markdown]
# ## Common pitfalls [S2-077] (must-read)
# | pitfall | what you see | instead |
# |---|---|---|
# | one key for two layers, two steps, all rows | equal masks; no error | R2, R7, R8; the checker R3 |
# | `fold_in` and `split` of one key | two purposes share numbers; no error | R6 |
# | `key(seed + step)` | runs of neighbouring seeds share most of their numbers | `fold_in(key(seed), step)` |
# | the same seed for two purposes | initial weights and noise are correlated | R4 |
# | `split(key)` without taking the result | the numbers repeat | `key, used = split(key)` |
# | a key captured by a jitted function | a constant | R9 |
# | `np.random`, `random` under jit | a constant | R10 |
#
# The first two are asserted above, the last two below. **Claim.** The other three:

# %%
def steps_of(seed, make):
    return {bits(make(seed, step)).tobytes() for step in range(100)}


added, folded_in = (lambda seed, step: jax.random.key(seed + step)), (
    lambda seed, step: jax.random.fold_in(jax.random.key(seed), step))
assert len(steps_of(0, added) & steps_of(1, added)) == 99
assert len(steps_of(0, folded_in) & steps_of(1, folded_in)) == 0

weights, noise = (jax.random.uniform(jax.random.key(6), shape) for shape in ((8, 4), (32,)))
assert same(weights.ravel(), noise)  # the same numbers in another shape

key = jax.random.key(6)
before = jax.random.normal(key)
jax.random.split(key)  # returns two keys, and leaves this one as it is
assert jax.random.normal(key) == before

# %% [markdown]
# ### A key captured in a jitted function becomes a constant [S2-078] (must-read)
# **R9.** Keys are arguments of jitted functions. Claim: a captured one is baked into the program; every call returns
# the same numbers, even after the name is bound to another key.

# %%
captured = jax.random.key(7)
frozen = jax.jit(lambda: jax.random.normal(captured, (2,)))
once = frozen()
captured = jax.random.key(8)
assert same(once, frozen())

passed = jax.jit(lambda key: jax.random.normal(key, (2,)))
assert close(once, passed(jax.random.key(7))) and not close(once, passed(jax.random.key(8)))

# %% [markdown]
# ### `random` and `np.random` run once, while tracing [S2-079] (must-read)
# **R10.** No Python or NumPy generator inside jit. Claim: its number is drawn at trace time and becomes a constant. Two
# calls agree although the generator has moved on in between; a new shape traces again and brings a new number.

# %%
@jax.jit
def noisy(x):
    return x + np.random.normal()


np.random.seed(0)
a = noisy(jnp.zeros(2))
expected_next = np.random.normal()
assert same(a, noisy(jnp.zeros(2)))
c = noisy(jnp.zeros(3))  # another shape, another trace, another number
assert a[0] != c[0] and np.float32(expected_next) not in (a[0], c[0])

repaired = jax.jit(lambda key, x: x + jax.random.normal(key))
first, second = (repaired(key, jnp.zeros(2)) for key in jax.random.split(jax.random.key(9)))
assert not same(first, second)

# %% [markdown]
# ## Chapter summary [S2-081] (must-read)
# | what draws | its key | pattern |
# |---|---|---|
# | the initial parameters | `purpose_keys(seed)["init"]`, split by leaf | names |
# | the batch of step s | `fold_in(keys["batches"], s)` | numbers |
# | dropout of step s | `fold_in(keys["dropout"], s)`, split by micro-batch, layer and place | numbers, names |
# | token i of a generation | `fold_in(key, i)` | numbers |
# | a device's own numbers | `fold_in(key, lax.axis_index(axis))` | numbers |
#
# **Claim.** Because a number is a hash of key and index, 8 devices generate their parts of one array with no
# communication, and with the values of one device. Inside `shard_map` each device sees the same key and the same local
# indices: 8 times the same 2 numbers, unless it folds in its own place. (More in
# `nanogpt_sharded/lessons/04_sharded_randomness.py`.)

# %%
mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:8])
key = jax.device_put(jax.random.key(10), NamedSharding(mesh, P()))


def global_draw(key):
    return jax.random.normal(key, (16,))


sharded = jax.jit(global_draw, out_shardings=NamedSharding(mesh, P("d")))
assert close(sharded(key), global_draw(jax.random.key(10)))
program = sharded.lower(key).compile().as_text()
assert not any(op in program for op in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))


def local_draw(key):
    return jax.random.normal(key, (2,))


def local_draw_folded(key):
    return jax.random.normal(jax.random.fold_in(key, lax.axis_index("d")), (2,))


counts = [len(np.unique(jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P("d")))(key)))
          for f in (local_draw, local_draw_folded)]
print("different values among the 16 of 8 devices: {} with one key, {} with fold_in(axis_index)".format(*counts))
assert counts == [2, 16]

# %% [markdown]
# ## Exercise 1
# Write `epoch_batch(key, step, n, B)`: indices (B,) of the examples of batch number `step`, so that each epoch (n / B
# batches; B divides n) visits all n examples once, each epoch in an order of its own. A pure function of (key, step)
# that works for a traced step: `jax.random.permutation` and `lax.dynamic_slice` are all it takes.

# %%
# Your answer
def epoch_batch(key, step, n, B):
    raise NotImplementedError

# %%
# Self-check (runs on your answer once it is written, on the solution until then)
def check_epoch_batch(f):
    batch = jax.jit(f, static_argnums=(2, 3))
    epochs = [np.concatenate([batch(jax.random.key(0), 4 * epoch + i, 12, 3) for i in range(4)]) for epoch in range(3)]
    for order in epochs:
        assert sorted(order.tolist()) == list(range(12)), "an epoch of 4 batches visits each of the 12 examples once"
    assert len({order.tobytes() for order in epochs}) == 3, "each epoch has an order of its own"
    assert same(batch(jax.random.key(0), 5, 12, 3), epochs[1][3:6]), "asked again, a step gives the same batch"
    assert not same(batch(jax.random.key(1), 0, 12, 3), epochs[0][:3]), "another key gives another order"

# %% [markdown]
# ## Exercise 2
# Write `sample_chains(key, logits, n, steps)`: n independent chains of tokens, (n, steps) int32. Each starts from token
# 0 (not returned) and draws its next token with `model.sample_token` at temperature 1 from `logits[current]`; logits is
# (V, V). Every draw, of any chain at any step, needs numbers of its own.

# %%
# Your answer
def sample_chains(key, logits, n, steps):
    raise NotImplementedError

# %%
# Self-check
def check_sample_chains(f):
    V = 5
    cycle = 100.0 * jnp.eye(V)[(jnp.arange(V) + 1) % V]  # after token i comes i + 1
    assert same(f(jax.random.key(0), cycle, 2, 6), [[1, 2, 3, 4, 0, 1]] * 2), "the logits are those of the last token"
    flat = np.asarray(f(jax.random.key(0), jnp.zeros((V, V)), 40, 50))
    assert flat.shape == (40, 50) and flat.dtype == np.int32, "tokens are (n, steps) int32"
    assert len(np.unique(flat, axis=0)) == 40, "no two chains are alike: each has its own numbers"
    repeats = (flat[:, 1:] == flat[:, :-1]).mean()  # 1 / V = 0.2, standard deviation 0.009
    assert abs(repeats - 0.2) < 0.05, f"flat logits repeat the last token in 1 of 5 draws, not in {repeats:.2f}"
    agree = (flat[1:] == flat[:-1]).mean()
    assert abs(agree - 0.2) < 0.05, f"neighbouring chains agree in 1 of 5 draws, not in {agree:.2f}"
    assert same(flat, f(jax.random.key(0), jnp.zeros((V, V)), 40, 50)), "the same key gives the same chains"

# %% [markdown]
# ## Rules: a checklist [S2-080] (must-read)
# | rule | proven under |
# |---|---|
# | R1 a draw is a function of key and shape; think of a tree of keys, not of a generator | the design |
# | R2 consume a key once, then use children | reusing a key |
# | R3 switch `jax_debug_key_reuse` on in tests; typed keys only | reusing a key |
# | R4 one named key for each purpose, new ones at the end | `split(key, n)` |
# | R5 what belongs to a step or an index: `fold_in` of it; then resuming is free | `fold_in(key, step)` |
# | R6 split a key or fold into it, never both | `fold_in(key, step)` |
# | R7 in a loop: carry one child, consume the other | the key in the carry |
# | R8 in parallel: vmap over `split(key, n)`, or one draw of the whole shape | `vmap` |
# | R9 keys are arguments of jitted functions | a key captured |
# | R10 no `random`, no `np.random` under jit | run once, while tracing |
#
# **Claim.** `generate` keeps them. Its key is an argument (R9), token i draws with `fold_in(key, i)` (R5), and one draw
# serves all rows of the batch (R8). The caller's part is R2: `sample.py` generates in chunks, and each needs a key of
# its own, `fold_in(key, chunk)`. With all parameters zero the logits are flat, and the tokens show the bare noise.

# %%
shapes = jax.eval_shape(partial(init_params, cfg=cfg), jax.random.key(0))
silent = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
begin = jax.jit(start, static_argnums=3)(silent, jnp.zeros((2, 1), jnp.int32), 1, cfg)
draw = jax.jit(generate, static_argnums=(3, 4))
key = jax.random.key(11)
with jax.debug_key_reuse(True):
    chunk, state = draw(silent, begin, key, 6, cfg)
    again, _ = draw(silent, begin, key, 6, cfg)
    reused, _ = draw(silent, state, key, 6, cfg)
    chunks = [draw(silent, s, jax.random.fold_in(key, i), 6, cfg)[0] for i, s in enumerate((begin, state))]
print("second chunk with the first one's key:", reused[0], "\n                  and with its own:    ", chunks[1][0])
assert same(chunk, again) and not same(chunk[0], chunk[1])
assert same(chunk, reused)  # the mistake: the next chunk repeats the noise, and the checker overlooks it (fold_in)
assert not same(chunks[0], chunks[1])

# %% [markdown]
# ## Solutions

# %%
def epoch_batch_solution(key, step, n, B):
    epoch, i = step // (n // B), step % (n // B)
    return lax.dynamic_slice(jax.random.permutation(jax.random.fold_in(key, epoch), n), (i * B,), (B,))


def sample_chains_solution(key, logits, n, steps):
    def step(tokens, key):
        tokens = sample_token(logits[tokens], key, 1.0)  # one key, one draw for all n chains
        return tokens, tokens
    return lax.scan(step, jnp.zeros(n, jnp.int32), jax.random.split(key, steps))[1].T

# %%
try:
    check_epoch_batch(epoch_batch)
except NotImplementedError:
    check_epoch_batch(epoch_batch_solution)

# %%
try:
    check_sample_chains(sample_chains)
except NotImplementedError:
    check_sample_chains(sample_chains_solution)
