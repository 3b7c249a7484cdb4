# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---
# %% [markdown]
# # `switch`, `cond` and masks: choosing an expert with control flow
#
# After this lesson you can choose between branches by data inside a compiled program, say which of them run, predict
# what `vmap` makes of the choice and of its gradient, count what a `switch` over experts costs for a batch, and keep
# padded tokens from changing anything.
#
# It uses this project's `model.py` (`route`, `feed_forward`, `dispatch_gather`, `dispatch_dropless`, `moe_layer`) and
# `common/profiling.py` for XLA's counts of FLOPs and bytes. All claims hold on JAX 0.10 and 0.12.
#
# Letters: **B** sequences, **T** tokens of a sequence, **D** model, **F** hidden size of an expert, **E** experts,
# **C** capacity (places of an expert).

# %%
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent if "__file__" in globals() else Path.cwd()
sys.path[:0] = [str(PROJECT), str(PROJECT.parent)]  # the project's files, and common/ beside it

# %%
import contextlib
import io
import statistics
import time
from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from common.profiling import cost
from model import MoEConfig, capacity, dispatch_dropless, dispatch_gather, feed_forward, init_params, moe_layer, route

cfg = MoEConfig(vocab_size=11, context=128, n_layer=1, n_head=2, n_embd=32, n_hidden=64, n_experts=4, top_k=1,
                activation="relu")  # compiles soonest
random = np.random.default_rng(0)


def normal(*shape, scale=1.0):
    return jnp.asarray(random.normal(scale=scale, size=shape), jnp.float32)


def layer_weights(cfg):
    """One layer's weights, drawn by NumPy, each scaled by 1 / sqrt(fan in): large enough that the experts differ."""
    shapes = jax.eval_shape(partial(init_params, cfg=cfg), jax.random.key(0))["blocks"][0]["moe"]
    return {name: normal(*leaf.shape, scale=leaf.shape[-2] ** -0.5) for name, leaf in shapes.items()}


def message(error, f, *args):
    """The text of the error that f(*args) must raise."""
    try:
        f(*args)
    except error as why:
        return str(why)
    raise AssertionError(f"no {error.__name__} was raised")


def primitives(f, *args):
    """How often each primitive occurs in f's jaxpr; a jit within it is looked into, a cond's branches are not."""
    def names(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("jit", "pjit"):
                yield from names(eqn.params["jaxpr"].jaxpr)
            else:
                yield eqn.primitive.name
    return Counter(names(jax.make_jaxpr(f)(*args).jaxpr))


executed = Counter()


def tick(name, *per_row):
    """Counts, on the host, what the compiled program executes: under vmap once for the batch, or, where it is given
    an array of the row's own, once for each row."""
    jax.debug.callback(lambda *_: executed.update([name]), *per_row)


def counted(f, *args):
    """f(*args), and how often each tick ran in it."""
    executed.clear()
    out = jax.block_until_ready(f(*args))
    jax.effects_barrier()  # callbacks may lag behind results
    return out, dict(executed)


D, F, E = cfg.n_embd, cfg.n_hidden, cfg.n_experts
p = layer_weights(cfg)
x = normal(D)

# %% [markdown]
# ## `lax.switch` and `lax.select_n` [S2-085] (must-read)
# The most literal mixture of experts: the router names an expert, the token goes through it. In Python that is an
# `if`/`elif`, or a list and an index. Inside `jit` the index is data, and the same sentence is `lax.switch`.
#
# ```
#  index ──clamp(0, E - 1)──┐
#                           ├── 0 ──► expert 0 ──┐
#  x, weights ──────────────┼── 1 ──► expert 1 ──┼──► y       switch: one branch runs
#                           ├── 2 ──► expert 2 ──┤
#                           └── 3 ──► expert 3 ──┘
# ```
#
# **Claim.** It equals the `if`/`elif`, and an index outside of the list is *clamped*: 7 is the last expert, -3 the
# first (a Python list would raise for 7 and count -3 from the end).

# %%
def expert(e, p, x):
    """Expert e, a Python int, of one token: (D,) -> (D,)."""
    return feed_forward(x[None], p["w_in"][e], p["w_out"][e], cfg)[0]


EXPERTS = [partial(expert, e) for e in range(E)]


def switched(index, p, x):
    return lax.switch(index, EXPERTS, p, x)


alone = np.asarray(jax.jit(lambda p, x: jnp.stack([f(p, x) for f in EXPERTS]))(p, x))  # (E, D)


def by_if(index):
    if index <= 0:
        return alone[0]
    elif index == 1:
        return alone[1]
    elif index == 2:
        return alone[2]
    else:
        return alone[3]


one_program = jax.jit(switched)
found = {index: np.asarray(one_program(index, p, x)) for index in (-3, 0, 1, 2, 3, 7)}
assert all(np.allclose(y, by_if(index), atol=1e-6) for index, y in found.items())
assert np.array_equal(found[7], found[3]) and np.array_equal(found[-3], found[0])
assert min(np.abs(a - b).max() for i, a in enumerate(alone) for b in alone[:i]) > 0.1  # the experts do differ

# %% [markdown]
# So a wrong index is not an error but a wrong expert. An index that comes from `lax.top_k` over E logits is in range;
# one that comes from a file may not be. Exercise 1 writes a switch in which that shows.
#
# **Claim.** The index is one integer, and all branches return one type, for the result has one.

# %%
assert "Index type must be an integer" in message(TypeError, switched, 1.0, p, x)
assert "Branch index must be scalar" in message(TypeError, switched, jnp.array([1, 2]), p, x)
said = message(TypeError, lambda: lax.switch(0, [lambda x: x, lambda x: x.astype(jnp.bfloat16)], x))
[line] = [line for line in said.splitlines() if "has type" in line]
print(line)
assert "float32[32]" in line and "bfloat16[32]" in line

# %% [markdown]
# **Claim.** `lax.select_n(which, *cases)` selects between *values*, which are all computed before it. `which` holds
# integers (or booleans, for two cases), is one number or has the cases' shape, and nothing broadcasts. For two cases
# the order is the reverse of `lax.select`: `False` is 0 and names the first case.

# %%
which = jnp.array([2, 0, 1, 2])
cases = [jnp.array([10, 11, 12, 13]), jnp.array([20, 21, 22, 23]), jnp.array([30, 31, 32, 33])]  # integers are fine
assert lax.select_n(which, *cases).tolist() == [30, 11, 22, 33] == np.choose(which, cases).tolist()

upper = jnp.array([True, False, True, False])
first_or_second = lax.select_n(upper, cases[0], cases[1])
assert np.array_equal(first_or_second, lax.select(upper, cases[1], cases[0]))
assert np.array_equal(first_or_second, jnp.where(upper, cases[1], cases[0]))
assert "cannot have > 2 cases" in message(TypeError, lax.select_n, upper, *cases)
assert "must have the same shapes" in message(TypeError, lax.select_n, which, cases[0], jnp.zeros(1, jnp.int32))
assert "must be boolean or integer type" in message(TypeError, lax.select_n, which.astype(float), *cases)

# %% [markdown]
# Outside of 0 ... n - 1 the result of `select_n` depends on the implementation: clamp the index yourself.
#
# ## `cond`, `select`, `switch`, `while_loop`: who runs [S1-042b] (must-read)
# | | decides | for one token runs | under `vmap`, each row its own predicate | under `vmap`, one predicate |
# |---|---|---|---|---|
# | `jnp.where`, `lax.select` | each entry | both sides | both sides | both sides |
# | `lax.select_n` | each entry | all cases | all cases | all cases |
# | `lax.cond` | a boolean | one branch | both, then `select_n` | one branch |
# | `lax.switch` | an integer, clamped | one branch | all, then `select_n` | one branch |
# | `lax.while_loop` | a boolean, each round | as many rounds as needed | the most that a row needs | as needed |
#
# **Claim.** For one token the select computes all experts, the switch one. XLA's count of FLOPs says it before
# anything runs (for a conditional it counts the dearest branch), and `tick` counts what ran.

# %%
def selected(index, p, x):
    return lax.select_n(index, *(f(p, x) for f in EXPERTS))


def ticking(index, p, x):
    """switched, with a tick in each branch."""
    def branch(e, p, x):
        tick(f"expert {e}", x)
        return expert(e, p, x)
    return lax.switch(index, [partial(branch, e) for e in range(E)], p, x)


assert np.allclose(jax.jit(selected)(2, p, x), alone[2], atol=1e-6)
flops = {f.__name__: cost(jax.jit(f).lower(2, p, x).compile())["flops"] for f in (switched, selected)}
print(f"FLOPs for one token: switch {flops['switched']:,.0f}, select {flops['selected']:,.0f}")
print(f"two products by hand: 4 · D · F = {4 * D * F:,}")
assert 4 * D * F < flops["switched"] < 1.3 * 4 * D * F  # and the activation
assert 0.9 * E < flops["selected"] / flops["switched"] < 1.1 * E
assert counted(jax.jit(ticking), 2, p, x)[1] == {"expert 2": 1}

# %% [markdown]
# **Claim.** A branch that is not taken does not run, so a `cond` can skip an expert that nobody chose. (It decides
# once, for whole arrays. Where entries differ, and both sides are cheap, take `where`.)

# %%
def unless_empty(count, p, x):
    def run(p, x):
        tick("expert 0")
        return expert(0, p, x)
    return lax.cond(count > 0, run, lambda p, x: jnp.zeros_like(x), p, x)


assert [counted(jax.jit(unless_empty), count, p, x)[1] for count in (0, 3)] == [{}, {"expert 0": 1}]

# %% [markdown]
# **Claim.** A `while_loop` under `vmap` runs until its *last* row is done; rows that are done idle, held by a select.
# The example is top-p routing: a token takes experts, most probable first, until their probabilities reach a sum. A
# sure token needs one round, an unsure one several; the batch needs the maximum of them, not the sum.

# %%
def choose_until(probs, enough):
    """Top-p routing of one token: probs (E,) -> (E,) bool, the most probable experts that together reach `enough`."""
    def going(carry):
        chosen, total = carry
        return (total < enough) & ~chosen.all()  # rounded sums may stop short of 1: the second condition ends the loop

    def take(carry):
        chosen, total = carry
        tick("round")
        best = jnp.argmax(jnp.where(chosen, -1.0, probs))
        return chosen.at[best].set(True), total + probs[best]
    return lax.while_loop(going, take, (jnp.zeros(probs.shape, bool), jnp.zeros((), probs.dtype)))[0]


def choose_by_sorting(probs, enough):
    ranked = jnp.sort(probs, descending=True)
    kept = (jnp.cumsum(ranked) - ranked < enough).sum()
    return probs >= ranked[kept - 1]


probs = jnp.array([[0.97, 0.01, 0.01, 0.01], [0.05, 0.15, 0.5, 0.3], [0.22, 0.25, 0.24, 0.29]])
rounds = [counted(jax.jit(choose_until), row, 0.7)[1]["round"] for row in probs]
chosen, batched = counted(jax.jit(jax.vmap(choose_until, (0, None))), probs, 0.7)
print("experts a token takes:", chosen.sum(-1).tolist(), "; rounds alone:", rounds, "; rounds of the batch:", batched)
assert rounds == chosen.sum(-1).tolist() == [1, 2, 3] and batched == {"round": 3}
assert np.array_equal(chosen, jax.jit(jax.vmap(choose_by_sorting, (0, None)))(probs, 0.7))

# %% [markdown]
# ## Under `vmap`, `cond` becomes `select_n`, and both branches run [S2-027] (must-read)
# One compiled program serves all rows, and rows disagree; so there is nothing to jump over.
#
# **Claim.** The jaxpr shows it: no `cond`, both branches' primitives, a `select_n`. With one predicate for all rows
# the `cond` stays.

# %%
def root(x):
    jax.debug.print("root of {}", x)
    return jnp.sqrt(x)


def exponential(x):
    jax.debug.print("exponential of {}", x)
    return jnp.expm1(x)


def squash(x):
    return lax.cond(x > 0, root, exponential, x)


def printed(f, *args):
    """The lines that f(*args) prints while it runs, sorted: rows of a batch print in no particular order."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        jax.block_until_ready(f(*args))
        jax.effects_barrier()
    return sorted(out.getvalue().splitlines())


def quiet(x):
    return lax.cond(x > 0, jnp.sqrt, jnp.expm1, x)


xs = jnp.array([4.0, -1.0])
print(jax.make_jaxpr(jax.vmap(quiet))(xs))
alone_has, batch_has = primitives(quiet, xs[0]), primitives(jax.vmap(quiet), xs)
assert alone_has["cond"] == 1 and not alone_has["select_n"] and not alone_has["sqrt"]  # sqrt is inside the cond
assert not batch_has["cond"] and batch_has["sqrt"] == batch_has["expm1"] == 1 and batch_has["select_n"]
for_all = jax.vmap(lambda up, x: lax.cond(up, jnp.sqrt, jnp.expm1, x), (None, 0))
assert primitives(for_all, True, xs)["cond"] == 1

# %% [markdown]
# **Claim.** And a `jax.debug.print` fires in both branches, for every row, with the row's true value: the square root
# of -1 *is* computed. Its NaN is then not selected.

# %%
assert printed(jax.jit(squash), 4.0) == ["root of 4.0"]
lines = printed(jax.jit(jax.vmap(squash)), xs)
print(*lines, sep="\n")
assert lines == ["exponential of -1.0", "exponential of 4.0", "root of -1.0", "root of 4.0"]
assert np.allclose(jax.vmap(quiet)(xs), [2.0, np.expm1(-1.0)])

# %% [markdown]
# So a print, a callback or a host counter inside a branch says under `vmap` nothing about what was chosen.
#
# **Claim: gradients.** This is where a batched `cond` and a `where` part. At 0 the derivative of √x is infinite; the
# chain rule multiplies it by the 0 of the branch that was not selected, and 0 · ∞ is NaN. `where` has this fault. A
# batched `cond` does not: see the `stop_gradient`s in the jaxpr above. Before branch i, JAX passes each operand through
#
# ```
#   select_n(index == i, stop_gradient(x), x)      the value of x either way; a gradient only where i was chosen
# ```
#
# The NaN arrives at the stopped copy and ends there.

# %%
def by_where(x):
    return jnp.where(x > 0, jnp.sqrt(x), jnp.expm1(x))


assert batch_has["stop_gradient"] == 2 and batch_has["select_n"] == 3  # an operand for each branch; the result

def slopes(f):
    """f's values and their derivatives at 0 and 4; f: (2,) -> (2,), entry by entry."""
    value, backward = jax.vjp(f, jnp.array([0.0, 4.0]))
    return value, backward(jnp.ones(2))[0]


(y_cond, through_cond), (y_where, through_where) = jax.jit(lambda: (slopes(jax.vmap(quiet)), slopes(by_where)))()
print("at 0 and 4: batched cond", y_cond, "gradient", through_cond, "; where", y_where, "gradient", through_where)
assert np.allclose(y_cond, [0, 2]) and np.allclose(y_where, [0, 2])
assert np.allclose(through_cond, [1, 0.25]) and np.allclose(jax.vmap(jax.grad(quiet))(jnp.array([0.0, 4.0])), [1, 0.25])
assert np.isnan(through_where[0]) and through_where[1] == 0.25

# %% [markdown]
# With `where` do the same by hand, the *double where*: give the side that is not chosen an input at which its
# derivative is finite.

# %%
def by_double_where(x):
    return jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1.0)), jnp.expm1(x))


value, through_double_where = jax.jit(lambda: slopes(by_double_where))()
assert np.allclose(value, [0, 2]) and np.allclose(through_double_where, [1, 0.25])

# %% [markdown]
# ## A vmapped `switch` over experts computes all of them [S2-086] (must-read)
# Now the whole layer: T tokens, each with its expert. `jax.vmap(switched)` is right, and looks as cheap as for one
# token. By the rule above it is E experts for every token. And every operand of the branches, *the weights too*, gets
# a batch axis: T copies, which JAX leaves to XLA to remove, and XLA:CPU does not.
#
# Five ways to the same (T, D):
#
# | | FLOPs of experts | weights read |
# |---|---|---|
# | scan over tokens, `switch` in it | T | once a token, one matrix-vector product after another |
# | `vmap(switch)` | T · E | E experts, in T copies |
# | `vmap` of `w[index]` | T | a copy of its expert's weights for every token |
# | dispatch into C places (`dispatch_gather`) | E · C = T · capacity factor, for k = 1 | each expert once |
# | dispatch, sorted (`dispatch_dropless`) | T (XLA:CPU expands it to T · E) | each expert once |
#
# **Claim.** All agree. (Into C places: for the tokens that found one; here an expert has 1.25 times its fair share.)

# %%
cfg = replace(cfg, n_embd=64, n_hidden=128, n_experts=8, capacity_factor=1.25)
T, D, F, E = 128, cfg.n_embd, cfg.n_hidden, cfg.n_experts
EXPERTS = [partial(expert, e) for e in range(E)]  # switched reads EXPERTS and cfg when it is traced
p, xs = layer_weights(cfg), normal(1, T, D)
routing = jax.jit(partial(route, cfg=cfg))(xs, p["w_router"])
index, gate = routing.experts[0, :, 0], routing.gates[0, :, 0]  # (T,)


def one_by_one(p, xs):
    return gate[:, None] * lax.map(lambda token: switched(token[0], p, token[1]), (index, xs[0]))


def all_at_once(p, xs):
    return gate[:, None] * jax.vmap(switched, (0, None, 0))(index, p, xs[0])


def weights_by_token(p, xs):
    w_in, w_out = p["w_in"][index], p["w_out"][index]  # (T, D, F), (T, F, D): a copy for every token
    return gate[:, None] * jax.vmap(lambda x, *w: feed_forward(x[None], *w, cfg)[0])(xs[0], w_in, w_out)


def into_places(p, xs, cfg=cfg):
    return dispatch_gather(xs, routing, p, cfg)[0][0]


def by_sorting(p, xs):
    return dispatch_dropless(xs, routing, p, cfg)[0][0]


programs = {name: jax.jit(f).lower(p, xs).compile() for name, f in {
    "scan of switch": one_by_one, "vmap(switch)": all_at_once, "vmap of w[index]": weights_by_token,
    "into C places": into_places, "sorted": by_sorting}.items()}
results = {name: np.array(program(p, xs)) for name, program in programs.items()}
want = results["scan of switch"]
served = np.abs(results["into C places"]).max(-1) > 0  # who finds no place gets exactly 0
print(f"C = {capacity(T, E, 1, cfg.capacity_factor)}: {T - served.sum()} of {T} tokens found their expert full")
results["into C places"][~served] = want[~served]
assert all(np.allclose(y, want, atol=1e-5) for y in results.values()) and served.mean() > 0.7

# %% [markdown]
# **Claim.** Counted by XLA, the vmapped switch does E times the work of one expert a token, dispatch 1.25 times; and
# on a CPU its temporaries are the T copies of the weights. (A scan's body is counted once: its row is T times that.)

# %%
one = 4 * D * F  # two products, one token through one expert
on_cpu, rows = jax.default_backend() == "cpu", {}
print(f"T = {T}, E = {E}   {'FLOPs':>12}{'experts a token':>17}{'MB moved':>10}{'temporary MB':>14}{'ms':>8}")
for name, program in programs.items():
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(program(p, xs))
        seconds.append(time.perf_counter() - began)
    row = {**cost(program), "temporary": program.memory_analysis().temp_size_in_bytes}
    if name == "scan of switch":
        row |= {"flops": row["flops"] * T, "bytes": row["bytes"] * T}
    rows[name] = {**row, "ms": 1e3 * statistics.median(seconds)}
    print("{:17}{flops:12,.0f}{:17.2f}{:10.1f}{:14.1f}{ms:8.2f}".format(
        name, row["flops"] / one / T, row["bytes"] / 1e6, row["temporary"] / 1e6, **rows[name]))
assert capacity(T, E, 1, 1.25) * E == 1.25 * T
assert 0.95 * E < rows["vmap(switch)"]["flops"] / one / T < 1.3 * E
assert 0.95 < rows["vmap of w[index]"]["flops"] / one / T < 1.3
assert 1.2 < rows["into C places"]["flops"] / one / T < 1.6
weights = p["w_in"].nbytes + p["w_out"].nbytes
assert rows["vmap of w[index]"]["bytes"] > 2 * T * weights / E  # written and read
if on_cpu:
    assert rows["vmap(switch)"]["temporary"] > 0.9 * T * weights > 100 * rows["into C places"]["temporary"]
    assert rows["vmap(switch)"]["ms"] > 5 * rows["into C places"]["ms"]
    assert rows["sorted"]["flops"] / one / T > 0.9 * E  # what lax.ragged_dot becomes here

# %% [markdown]
# **Claim.** The same by counting, with branches that do nothing but tick: in the scan a branch runs once for each token
# that chose it; under `vmap` every branch runs for every token.

# %%
def only_tick(index):
    def branch(e, x):
        tick(f"expert {e}", x)
        return x
    return lax.switch(index, [partial(branch, e) for e in range(E)], index)


few = index[:8]
load = np.bincount(few, minlength=E)
_, in_scan = counted(jax.jit(partial(lax.map, only_tick)), few)
_, in_vmap = counted(jax.jit(jax.vmap(only_tick)), few)
print("tokens of each expert:", load.tolist(), "; runs under vmap:", sorted(in_vmap.values()))
assert in_scan == {f"expert {e}": n for e, n in enumerate(load.tolist()) if n}
assert in_vmap == {f"expert {e}": few.size for e in range(E)}

# %% [markdown]
# This is why a mixture of experts moves *tokens to experts*, instead of choosing an expert for each token: after the
# move, expert e is a dense layer on its own rows, nobody branches, and the work is that of the experts chosen.
# (Lessons 01 and 02 build the move.)
#
# ## Masks: padded tokens change nothing
# Sequences have different lengths, arrays don't: short ones are padded, and a mask (B, T) says what is real. A mask is
# one more way to make a choice: everything is computed, and what is not real must not be felt.
#
# **Claim.** Selecting keeps garbage out, multiplying by 0 does not: 0 · NaN is NaN. The same holds in a product with a
# one-hot matrix, where every entry is multiplied by 0 or 1: one bad row spoils all rows; a gather takes what it names.

# %%
@jax.jit
def four_ways(rows, real):
    """rows (2, D), real (2,) bool: masked by multiplying, by selecting; the first row by one-hot, by index."""
    first = jnp.array([0])
    return (rows * real[:, None], jnp.where(real[:, None], rows, 0.0),
            jax.nn.one_hot(first, 2) @ rows, rows[first])


spoiled = np.array([[1.0, 2.0], [np.nan, np.inf]], np.float32)
multiplied, kept_rows, by_one_hot, by_index = four_ways(spoiled, np.array([True, False]))
assert np.isnan(multiplied[1]).all() and np.array_equal(kept_rows, [[1, 2], [0, 0]])
assert np.isnan(by_one_hot).all() and np.array_equal(by_index, [[1, 2]])

# %% [markdown]
# **Claim.** `moe_layer` with a mask: whatever stands in the padded places, the real tokens' outputs, the balance loss,
# the load and the drops stay the same to the last bit, and no gradient reaches the padding.

# %%
B, T, length = 3, 24, 16
cfg = replace(cfg, top_k=2, capacity_factor=1.0)
p = layer_weights(cfg)


def task(x, mask):
    y, aux = moe_layer(x, p, cfg, mask=mask)
    return (y**2).sum() + aux["balance"] + aux["z"], (y, aux)


layer = jax.jit(jax.grad(task, has_aux=True))  # (x, mask) -> the gradient for x, and (y, aux)
xs = random.normal(size=(B, T, D)).astype(np.float32)
mask = np.arange(T) < np.array([[length], [T], [T]])  # the first sequence is padded on the right
other = np.where(mask[..., None], xs, random.normal(scale=100, size=xs.shape).astype(np.float32))  # other padding
(gradient, (y, aux)), (_, (y_other, aux_other)) = jax.tree.map(np.asarray, (layer(xs, mask), layer(other, mask)))
assert np.array_equal(y[mask], y_other[mask])
assert all(np.array_equal(aux[name], aux_other[name]) for name in aux)
assert (gradient[~mask] == 0).all() and (gradient[mask] != 0).any()

unmasked = layer(other, np.ones_like(mask))[1][1]
print(f"balance loss {aux['balance']:.3f}, without the mask {unmasked['balance']:.3f}")
assert abs(unmasked["balance"] - aux["balance"]) > 1e-3  # the padding takes part in it

# %% [markdown]
# **Claim.** Without the mask, padding that stands *before* the text (as batched generation has it) takes places in the
# experts' queues, which are served in the order of tokens; real tokens are then dropped. Behind the text it takes
# places only after them.

# %%
text = xs[0, :length]
padding = np.tile(xs[1, :1], (T - length, 1))  # one padding token, again and again: always the same experts
before, behind = np.concatenate([padding, text]), np.concatenate([text, padding])
masks = np.ones((B, T), bool)
masks[0, :T - length] = False
y = np.asarray(layer(np.stack([before, before, behind]), masks)[1][0])  # three sequences, each with its own queues
masked, disturbed, undisturbed = y[0, T - length:], y[1, T - length:], y[2, :length]
changed = [int((np.abs(y - masked).max(-1) > 1e-5).sum()) for y in (disturbed, undisturbed)]
print(f"of {length} real tokens change without a mask: padding before {changed[0]}, behind {changed[1]}")
assert changed[0] > 0 and changed[1] == 0

# %% [markdown]
# **Claim.** A predicate about the *whole batch* does not differ from row to row: its `cond` stays a `cond`. Here the
# expensive branch runs only if some token needs it, and a `where` inside keeps it to those tokens.

# %%
def for_those(needed, x, expensive):
    """expensive(x) where needed (T,), x elsewhere; nothing is computed where no token needs it."""
    return lax.cond(needed.any(), lambda x: jnp.where(needed[:, None], expensive(x), x), lambda x: x, x)


def expensive(x):
    tick("expensive")
    return jnp.tanh(x)


short = xs[0, :4]
some, nobody = np.array([True, False, False, True]), np.zeros(4, bool)
skipping = jax.jit(partial(for_those, expensive=expensive))
(y, ran), (y_nobody, ran_nobody) = counted(skipping, some, short), counted(skipping, nobody, short)
assert ran == {"expensive": 1} and ran_nobody == {}
assert np.allclose(y, np.where(some[:, None], np.tanh(short), short)) and np.array_equal(y_nobody, short)
by_sequence = jax.vmap(partial(for_those, expensive=jnp.tanh))  # now each sequence has a predicate of its own
assert not primitives(by_sequence, some[None], short[None])["cond"]

# %% [markdown]
# ## Exercise 1
# Write `switch_or_zeros(index, branches, x)`: branches[index](x) for an index in range, and zeros of the same shape and
# dtype for one that isn't. At most one branch may run, so use one `lax.switch`. Index: an int32 scalar, traced.

# %%
# Your answer
def switch_or_zeros(index, branches, x):
    raise NotImplementedError

# %%
# Self-check (runs on your answer once it is written, on the solution until then)
def check_switch_or_zeros(f):
    def branch(factor, x):
        tick("branch")
        return factor * x

    branches = [partial(branch, factor) for factor in (1.0, 2.0, 3.0)]
    x = jnp.array([1.0, -2.0])
    run = jax.jit(lambda index, x: f(index, branches, x))
    for index in (0, 1, 2):
        assert np.allclose(run(index, x), (index + 1) * x), f"index {index} is in range: it names its branch"
    for index in (-3, -1, 3, 7):
        got, ran = counted(run, index, x)
        assert got.shape == x.shape and got.dtype == x.dtype, "zeros of the branches' shape and dtype"
        assert not np.any(got), f"index {index} is out of range: zeros"
        assert not ran, f"index {index}: a branch ran for nothing"
    rows = jax.vmap(lambda index: f(index, branches, x))(jnp.array([-1, 2, 3]))
    assert np.allclose(rows, [[0, 0], [3, -6], [0, 0]]), "under vmap, too"

# %% [markdown]
# ## Exercise 2
# Write `run_experts(h, counts, p, f)`: for every expert e the rows f(p_e, h[e]), (C, D), where h is (E, C, D), p a dict
# of arrays with a leading E, and counts (E,) says how many rows are used. For an expert with count 0 the result is
# zeros, and f must not run. The experts may run one after another.

# %%
# Your answer
def run_experts(h, counts, p, f):
    raise NotImplementedError

# %%
# Self-check
def check_run_experts(f):
    def ffn(p, h):
        tick("expert", h)  # with h, so that it counts every row of a vmap
        return h @ p["w"] + 1.0

    h, p, counts = normal(4, 3, 2), {"w": normal(4, 2, 2)}, jnp.array([2, 0, 3, 0])
    got, ran = counted(jax.jit(lambda *args: f(*args, ffn)), h, counts, p)
    want = np.where(np.asarray(counts > 0)[:, None, None], np.asarray(h) @ np.asarray(p["w"]) + 1, 0)
    assert got.shape == want.shape and np.allclose(got, want, atol=1e-6), "f of each used expert, zeros for the others"
    assert ran == {"expert": 2}, f"two experts have tokens, {ran.get('expert', 0)} ran"
    gradient = np.asarray(jax.jit(jax.grad(lambda p: f(h, counts, p, lambda p, h: h @ p["w"]).sum()))(p)["w"])
    assert (gradient[1] == 0).all() and (gradient[0] != 0).any(), "gradients of the used experts, 0 for the others"

# %% [markdown]
# ## Rules
# | rule | because |
# |---|---|
# | check an index before `switch` if it can be wrong | it is clamped: a wrong expert, no error |
# | `where` between cheap values, `cond` around expensive work | `where` computes both sides, `cond` one of them |
# | expect both branches under `vmap` | rows disagree; `cond` becomes `select_n`, prints fire in both |
# | a batched `cond` needs no double `where` for its gradient, `where` does | operands are selected before each branch |
# | never `vmap` a `switch` over experts | T · E experts' work; dispatch does T · capacity factor |
# | reduce the predicate over the batch (`any`) to keep a `cond` | only a predicate for all rows can skip work |
# | mask by selecting, not by multiplying | 0 · NaN is NaN |
# | pass the mask to the layer | padding takes places, load and a share of the balance loss |

# %% [markdown]
# ## Solutions

# %%
def switch_or_zeros_solution(index, branches, x):
    nothing = lambda x: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(branches[0], x))
    return lax.switch(index + 1, [nothing, *branches, nothing], x)  # the clamp now ends in one of the two `nothing`


def run_experts_solution(h, counts, p, f):
    def one(expert):
        count, p, h = expert
        return lax.cond(count > 0, f, lambda p, h: jnp.zeros_like(h), p, h)
    return lax.map(one, (counts, p, h))  # a scan: in each round the predicate is one boolean

# %%
try:
    check_switch_or_zeros(switch_or_zeros)
except NotImplementedError:
    check_switch_or_zeros(switch_or_zeros_solution)

# %%
try:
    check_run_experts(run_experts)
except NotImplementedError:
    check_run_experts(run_experts_solution)
