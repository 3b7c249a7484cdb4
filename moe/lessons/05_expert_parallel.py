# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---
# %% [markdown]
# # Expert parallelism: two all_to_alls, and gradients that add up
#
# After this lesson you can say what an all_to_all does to an array, write a mixture-of-experts layer in which eight
# devices hold one expert each, name the two properties that make it *exactly* the layer of one device, tell which
# gradients need a sum over devices and avoid the factor n that hides there, keep the balance loss a loss over all
# tokens, and read the bytes a step sends from the compiled program and price them.
#
# It uses this project's `model.py` (`route`, `queue_positions`, `expert_ffn`, `moe_layer`) and `expert_parallel.py`.
# The eight devices are simulated on the CPU: they show what is computed and what is sent, never how fast.
#
# Letters: **n** devices, **B** sequences (b = B / n a device), **T** tokens a sequence, **D** model, **F** hidden,
# **E** experts, **C** capacity, **k** choices a token, **R** rows of slots.

# %%
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent if "__file__" in globals() else Path.cwd()
sys.path[:0] = [str(PROJECT), str(PROJECT.parent)]  # the project's files, and common/ beside it

# %%
import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)  # before the first array is made

import expert_parallel
import model
from common.profiling import markdown_table
from expert_parallel import (collectives, exchange_bytes, moe_layer_parallel, random_layer, relative_errors,
                             ring_seconds)

n = 8
mesh = jax.make_mesh((n,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:n])
CFG = model.MoEConfig(vocab_size=11, context=16, n_layer=1, n_head=1, n_embd=16, n_hidden=32, n_experts=8, top_k=2,
                      capacity_factor=1.25, dispatch="gather")


def on_devices(f, in_specs, out_specs, **options):
    """f, written for the part of the arrays that one device holds, jitted as a function of whole arrays."""
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options))


@partial(jax.jit, static_argnums=2)
def one_device(x, p, cfg):
    return model.moe_layer(x, p, cfg)

# %% [markdown]
# ## What an all_to_all does
# Every device cuts what it holds into n blocks and sends block j to device j. Write what device i holds as row i of a
# table: the blocks change places like the entries of a transposed matrix.
# ```
#                    before                               after
#     device 0 │ 0→0  0→1  0→2  0→3          device 0 │ 0→0  1→0  2→0  3→0
#     device 1 │ 1→0  1→1  1→2  1→3          device 1 │ 0→1  1→1  2→1  3→1
#     device 2 │ 2→0  2→1  2→2  2→3          device 2 │ 0→2  1→2  2→2  3→2
#     device 3 │ 3→0  3→1  3→2  3→3          device 3 │ 0→3  1→3  2→3  3→3
# ```
# **Claim.** Seen from outside, the array stays what it was; split over its rows before, it is split over its columns
# afterwards. An all_to_all moves the split from one axis to another, and keeps memory and shape a device the same size.

# %%
table = jnp.arange(n * n).reshape(n, n)


def rows_to_columns(row):  # (1, n) -> (n, 1): cut along axis 1, and joined along axis 0
    return lax.all_to_all(row, "expert", split_axis=1, concat_axis=0, tiled=True)


moved = on_devices(rows_to_columns, P("expert", None), P(None, "expert"))(table)
assert (moved == table).all()
assert all((part.data == table[:, i:i + 1]).all() for i, part in enumerate(moved.addressable_shards))

# %% [markdown]
# **Claim.** It only moves numbers, so its derivative moves them back: the transpose of an all_to_all is the all_to_all
# with both axes exchanged, and that is also its inverse.

# %%
def there_and_back(row):
    column, back = jax.vjp(rows_to_columns, row)
    return back(column)[0]  # the cotangent of each number is the number itself


there_and_back = on_devices(there_and_back, P("expert", None), P("expert", None))
values = jnp.arange(n * n, dtype=jnp.float32).reshape(n, n)
assert (there_and_back(values) == values).all()
jaxpr = str(jax.make_jaxpr(there_and_back)(values))
assert jaxpr.count("all_to_all[") == 2
assert "split_axis=1" in jaxpr and "split_axis=0" in jaxpr

# %% [markdown]
# ## The layer on eight devices, one expert each [S1-089b] (must-read)
# A device holds b whole sequences and E / n experts. Its tokens want experts everywhere, its expert serves tokens from
# everywhere. In between lie *slots*: C places in each expert for each sequence, E b C rows a device.
#
# | step | on each device | shape | talks to others |
# |---|---|---|---|
# | route, queue | its b sequences | (b, T, k) | no |
# | fill slots | for all E experts | (E, b C, D) | no |
# | all_to_all | E → E / n experts, b → B sequences | (E/n, B C, D) | yes |
# | feed-forward | its E / n experts | (E/n, B C, D) | no |
# | all_to_all back | E / n → E experts, B → b sequences | (E, b C, D) | yes |
# | combine | its b sequences | (b, T, D) | no |
#
# Here it is, with slots by one-hot einsums (`01_einsum_dispatch_combine.py`), which are slow and easy to read.

# %%
def layer_by_hand(x, p, cfg=CFG):
    """One device's part: x (b, T, D), w_in (E/n, D, F), w_out (E/n, F, D), w_router (D, E) -> (b, T, D)."""
    b, T, D = x.shape
    E, C = cfg.n_experts, model.capacity(T, cfg.n_experts, cfg.top_k, cfg.capacity_factor)
    w_router = lax.pcast(p["w_router"], "expert", to="varying")  # one array, from here on n copies: see Gradients
    routing = model.route(x, w_router, cfg)
    place = model.queue_positions(routing.experts, E)  # (b, T, k); a place beyond C has a one-hot of zeros: dropped
    slot = jax.nn.one_hot(routing.experts, E)[..., None] * jax.nn.one_hot(place, C)[..., None, :]  # (b, T, k, E, C)

    slots = jnp.einsum("btkec,btd->ebcd", slot, x).reshape(E, b * C, D)
    rows = lax.all_to_all(slots, "expert", split_axis=0, concat_axis=1, tiled=True)  # (E/n, B C, D)
    rows = model.expert_ffn(rows, p, cfg)
    slots = lax.all_to_all(rows, "expert", split_axis=1, concat_axis=0, tiled=True)  # (E, b C, D)
    return jnp.einsum("btkec,ebcd,btk->btd", slot, slots.reshape(E, b, C, D), routing.gates)


x, p, weights = random_layer(CFG, B=16)  # p["w_router"] (D, E), p["w_in"] (E, D, F), p["w_out"] (E, F, D)
SPECS = {"w_router": P(), "w_in": P("expert"), "w_out": P("expert")}  # the router on all, the experts split
by_hand = on_devices(layer_by_hand, (P("expert"), SPECS), P("expert"))
want = one_device(x, p, CFG)[0]
error = relative_errors({"y": by_hand(x, p)}, {"y": want})["y"]
print(f"eight devices against one: {error:.1e}")
assert error < 1e-6 and jnp.linalg.norm(want) > 0

# %% [markdown]
# Two properties make this the same layer, not a similar one.
#
# 1. **A group is one sequence.** Capacity is counted within a sequence, so a device decides alone who gets a place. Had
#    all B T tokens shared one queue, a device would need to know how many places the others' tokens took before.
# 2. **Slots have a fixed number of rows.** Full or empty, E b C rows leave each device: sizes the compiler knows.
#
# **Claim.** What sequences on other devices hold changes nothing, to the last bit.

# %%
elsewhere_changed = np.concatenate([x[:2], 3 * x[2:] + 1])  # device 0 has the sequences 0 and 1
assert jnp.array_equal(by_hand(x, p)[:2], by_hand(elsewhere_changed, p)[:2])
assert not jnp.array_equal(by_hand(x, p)[2:], by_hand(elsewhere_changed, p)[2:])

# %% [markdown]
# **Claim.** A router in trouble changes neither the shapes nor the bytes: one program, traced once, serves a balanced
# router and one that sends every token to the same two experts. What changes is how many slots hold a token, and how
# many choices found none.

# %%
traces = []


@jax.jit
def parallel(x, p):
    traces.append(x.shape)  # Python runs only while JAX traces
    return moe_layer_parallel(x, p, CFG, mesh)


always_on = np.where(np.arange(CFG.n_embd) == 0, np.float32(4), x)  # a feature of every token, for a router to fall for
spread, fallen = p["w_router"].copy(), p["w_router"].copy()
spread[0] = 0
fallen[0] = 3, 3, 0, 0, 0, 0, 0, 0  # logits of 12, the others' are about 1
C = model.capacity(CFG.context, CFG.n_experts, CFG.top_k, CFG.capacity_factor)
slots_in_all = len(x) * CFG.n_experts * C
rows = []
for name, w_router in (("spread", spread), ("fallen for two experts", fallen)):
    routed = p | {"w_router": w_router}
    y, aux = parallel(always_on, routed)
    served = (1 - float(aux["dropped"])) * CFG.top_k * x.shape[0] * x.shape[1]
    rows.append({"router": name, "dropped": float(aux["dropped"]), "slots filled": served / slots_in_all,
                 "balance loss": float(aux["balance"]),
                 "kB a device and all_to_all": exchange_bytes(CFG, *x.shape[:2], n, 4) / 1e3})
    assert relative_errors({"y": y}, {"y": one_device(always_on, routed, CFG)[0]})["y"] < 1e-6
print(markdown_table(rows))
assert len(traces) == 1
assert np.isclose(rows[1]["dropped"], 1 - C / CFG.context) and rows[0]["dropped"] < 0.5 * rows[1]["dropped"]
assert np.isclose(rows[1]["slots filled"], 2 / CFG.n_experts)

# %% [markdown]
# ## Gradients: which are summed over devices, and the factor n
# A device computes with all rows of its experts, whoever sent them: their gradients are complete where they are. The
# router is a copy on every device and saw only that device's tokens: its gradient must be summed over the devices.
#
# **Claim.** Differentiated from *outside*, as one function of whole arrays, the layer has the gradients of one device:
# x, router and experts. (`moe_layer_parallel` is `layer_by_hand` with slots by gather.)

# %%
def loss(layer, x, p):
    return (layer(x, p) * weights).sum(-1).mean()  # a mean over all B T tokens


def gradient_program(layer, x, p):
    """Compiled for arrays that lie as these do: (x, p) -> the loss's gradients."""
    return jax.jit(jax.grad(partial(loss, layer), argnums=(0, 1))).lower(x, p).compile()


def by_gather(x, p):
    return moe_layer_parallel(x, p, CFG, mesh)[0]


on_one = gradient_program(lambda x, p: one_device(x, p, CFG)[0], x, p)(x, p)
placed = expert_parallel.place(x, p, mesh)  # each device receives its sequences and its expert
programs = {layer: gradient_program(layer, *placed) for layer in (by_hand, by_gather)}
for program in programs.values():
    errors = relative_errors(program(*placed), on_one)
    print("  ".join(f"{path}: {e:.1e}" for path, e in errors.items()))
    assert len(errors) == 4 and max(errors.values()) < 1e-6

# %% [markdown]
# Where is the sum? In the cast: `pcast(w_router, "expert", to="varying")` turns one array that all devices share into
# a copy on each, which costs nothing; its transpose turns their cotangents into one, by a psum. JAX inserts the cast
# where an operation meets both kinds of arrays. For a function with a `custom_vjp` it can't: the rule is opaque to it.
#
# **Claim.** Without the cast, the output is computed and the gradient refused: `model.route` multiplies by the router's
# weights with a VJP of its own, and that rule returns one device's gradient for an array of all devices.

# %%
def route_without_cast(x, w_router):
    return model.route(x, w_router, CFG).logits


routed = on_devices(route_without_cast, (P("expert"), P()), P("expert"))
assert routed(x, p["w_router"]).shape == (16, CFG.context, CFG.n_experts)
try:
    jax.make_jaxpr(jax.grad(lambda w_router: routed(x, w_router).sum()))(p["w_router"])
except ValueError as why:
    print(str(why)[-150:])
    assert "Custom VJP bwd rule" in str(why) and "manual axis types do not match" in str(why)
else:
    raise AssertionError("the gradient was accepted")

# %% [markdown]
# It is tempting to take the gradient *inside* the shard_map instead, of the mean over the device's own tokens, and to
# average gradients afterwards, as data-parallel training does. With split experts that goes wrong silently.
#
# **Claim.** A device's expert receives cotangents from the losses of all n devices, each a mean over 1/n of the tokens:
# its gradient is n times the true one, and averaging can't repair it, since every device holds *another* expert. The
# router's gradient depends on the type system: with `check_vma=True` (the default) it is already summed over the
# devices, and a pmean leaves it n times too large; with `check_vma=False` it is the device's own, and pmean is right.

# %%
true = on_one[1]  # of the parameters


def own_mean(p, x, weights):
    """The device's own loss: the mean over its b T tokens."""
    return (layer_by_hand(x, p) * weights).sum(-1).mean()


def inside_then_average(p, x, weights):
    gradient = jax.grad(own_mean)(p, x, weights)
    return gradient | {"w_router": lax.pmean(gradient["w_router"], "expert")}


def average_inside(p, x, weights):
    return jax.grad(lambda p: lax.pmean(own_mean(p, x, weights), "expert"))(p)


def ratios(f, check_vma):
    got = on_devices(f, (SPECS, P("expert"), P("expert")), SPECS, check_vma=check_vma)(p, x, weights)
    for name, g in got.items():  # all entries have the same factor, so that a norm can measure it
        scale = jnp.linalg.norm(g) / jnp.linalg.norm(true[name])
        assert relative_errors([g / scale], [true[name]])["0"] < 1e-5, name
    return {name: float(jnp.linalg.norm(g) / jnp.linalg.norm(true[name])) for name, g in got.items()}


rows = [{"gradient inside shard_map": name, "check_vma": vma, **ratios(f, vma)} for name, f, vma in (
    ("of the own mean, router averaged", inside_then_average, True),
    ("of the own mean, router averaged", inside_then_average, False),
    ("of the averaged loss", average_inside, True))]
print("gradient / true gradient")
print(markdown_table(rows))
for row, want in zip(rows, ((n, n), (1, n), (1, 1))):
    assert np.isclose(row["w_router"], want[0], rtol=1e-5)
    assert np.isclose(row["w_in"], want[1], rtol=1e-5) and np.isclose(row["w_out"], want[1], rtol=1e-5)

# %% [markdown]
# The second row is the treacherous one: the router learns as it should, and the experts with n times their gradient.
#
# **Claim.** Adam hides it. It divides by the gradient's own size, so a constant factor leaves its steps as they are and
# the loss curve looks right. What isn't hidden: the norm that clipping sees, and the experts' part in it. So compare
# gradient norms with one device's, not losses.

# %%
def adam_first_step(g):
    m, v = 0.1 * g, 0.001 * g**2  # its moments after one step, corrected for their start at zero
    return (m / 0.1) / (jnp.sqrt(v / 0.001) + 1e-8)


def norm(gradient):
    return float(jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradient))))


large = true["w_in"][jnp.abs(true["w_in"]) > 1e-5]  # far above Adam's 1e-8
assert large.size > true["w_in"].size / 4
assert jnp.allclose(adam_first_step(n * large), adam_first_step(large), rtol=2e-3)
wrong = {name: g if name == "w_router" else n * g for name, g in true.items()}
print(f"gradient norm: true {norm(true):.3f}, experts times {n} {norm(wrong):.3f}")
assert norm(wrong) > 1.5 * norm(true)

# %% [markdown]
# ## A mean of means is not the mean
# The load-balance loss is E Σ f_e P_e, f_e the share of choices that expert e got, P_e the mean of its probabilities:
# products of two means over tokens. Data parallelism averages losses over devices; here that is another loss.
#
# **Claim.** Let every device's tokens choose an expert of their own, as when each device reads another language. Over
# all tokens the load is perfectly even: balance 1. On each device it is collapsed: balance E, and so is their mean.

# %%
languages = dataclasses.replace(CFG, top_k=1, n_embd=8)
x8 = np.tile(4 * np.eye(8, dtype=np.float32)[:, None], (1, languages.context, 1))  # sequence i is made of feature i
p8 = random_layer(languages, B=8)[1] | {"w_router": 4 * np.eye(8, dtype=np.float32)}  # feature i chooses expert i


def own_balance(x, w_router):
    routing = model.route(x, w_router, languages)  # no gradient is wanted here, so no cast either
    return lax.pmean(model.balance_loss(routing.probs, routing.experts), "expert")


mean_of_own = on_devices(own_balance, (P("expert"), P()), P())(x8, p8["w_router"])
of_all = jax.jit(lambda x, p: moe_layer_parallel(x, p, languages, mesh)[1]["balance"])(x8, p8)
print(f"balance loss: {of_all:.4f} over all tokens, {mean_of_own:.4f} as a mean of the devices' own")
assert np.isclose(of_all, 1, atol=1e-5) and np.isclose(mean_of_own, 8, atol=1e-3)

# %% [markdown]
# Minimising the second one would spread every device's own tokens over all experts. It is what comes of calling the
# one-device loss inside shard_map. GShard wants it so, a loss for each group of tokens; here it would make the result
# depend on the number of devices. `expert_parallel.statistics` sums f and P over the devices first, in one all-reduce
# of 2 E + 3 numbers.
#
# ## Bytes a step, counted in the compiled program [S1-089b] (must-read)
# What is sent can be known without sending anything: collectives stand in the compiled program, shapes and all.
#
# **Claim.** The forward pass has two all_to_alls, its gradient two more. Each hands over E b C slots of D numbers a
# device: k · factor · D numbers a token where capacity needs no rounding, whatever E is.

# %%
def tally(program):
    """{op: (number, bytes a device)}."""
    found = collectives(program)
    return {op: (sum(o == op for o, _ in found), sum(size for o, size in found if o == op)) for op, _ in found}


forward = tally(jax.jit(by_gather).lower(*placed).compile())
gradient = tally(programs[by_gather])  # which was compared with one device above
one = exchange_bytes(CFG, *x.shape[:2], n, 4)
print(f"forward {forward}\ngradient {gradient}\none all_to_all by formula: {one}")
assert forward == {"all-to-all": (2, 2 * one)}
assert gradient["all-to-all"] == (4, 4 * one)
assert gradient["all-reduce"][1] == 4 * CFG.n_embd * CFG.n_experts  # the router's gradient: D E float32
assert set(gradient) == {"all-to-all", "all-reduce"}
own_tokens = len(x) // n * CFG.context
assert one == own_tokens * CFG.top_k * CFG.capacity_factor * CFG.n_embd * 4  # 2 · 1.25 · 16 / 8 = 5 needs no rounding

# %% [markdown]
# **Claim.** The alternative is data parallelism: all experts on all devices, no all_to_all, and an all-reduce of all
# experts' gradients. Expert parallelism holds 1/n of the experts a device, and what it sends grows with tokens and not
# with the parameters.

# %%
def all_experts_here(x, p):
    p = jax.tree.map(lambda a: lax.pcast(a, "expert", to="varying"), p)  # copies, whose gradients are summed
    return model.moe_layer(x, p, CFG)[0]


data_parallel = jax.shard_map(all_experts_here, mesh=mesh, in_specs=(P("expert"), P()), out_specs=P("expert"))
replicated = placed[0], jax.device_put(p, NamedSharding(mesh, P()))
copies = tally(gradient_program(data_parallel, *replicated))
held = {name: sum(a.addressable_shards[0].data.nbytes for a in (q["w_in"], q["w_out"]))
        for name, q in (("data parallel", replicated[1]), ("expert parallel", placed[1]))}
rows = [{"layer": name, "kB of experts a device": held[name] / 1e3,
         **{f"{op}, kB": sent.get(op, (0, 0))[1] / 1e3 for op in ("all-to-all", "all-reduce")}}
        for name, sent in (("data parallel", copies), ("expert parallel", gradient))]
print(markdown_table(rows))
assert held["data parallel"] == n * held["expert parallel"]
assert copies["all-reduce"][1] == sum(a.nbytes for a in p.values()) and "all-to-all" not in copies

# %% [markdown]
# **Pricing.** On a ring of n devices (n even), each linked to both neighbours, blocks of v / n bytes that take the
# shorter way make n² / 4 hops for each sender. Shared out among the 2 n one-way links, that is v n / 8 bytes a link:
# the time of an all_to_all, over a link's speed. An all-reduce passes (n - 1) / n of the array through every device
# twice, half of it each way round: v (n - 1) / n over the speed. (Bytes only: latency comes on top.)

# %%
link = expert_parallel.LINK_BYTES_PER_S  # of a TPU v5e, one way, published
assert np.isclose(ring_seconds("all-to-all", 1e6, n, link), 1e6 * n / 8 / link)
assert np.isclose(ring_seconds("all-reduce", 1e6, n, link), 1e6 * (n - 1) / n / link)

# %% [markdown]
# At a realistic size: a step of one layer with D = 4096, F = 14336, E = 8, k = 2, 8 devices, bfloat16, predicted.

# %%
D, F, factor, peak = 4096, 14336, 1.25, 197e12  # peak: bfloat16 FLOP/s of a TPU v5e, published
print("tokens a device   all_to_all x 4, ms   all-reduce of all experts, ms   experts' products, ms   (all predicted)")
for tokens in (256, 1024, 4096, 16384):
    R = 2 * factor * tokens  # rows that a device sends, and receives
    exchange = 4 * ring_seconds("all-to-all", R * D * 2, n)
    reduce = ring_seconds("all-reduce", 8 * 2 * D * F * 2, n)
    products = 3 * 4 * R * D * F / peak  # forward, and twice as much backward
    print(f"{tokens:15} {1e3 * exchange:20.1f} {1e3 * reduce:31.1f} {1e3 * products:23.1f}")
assert exchange < products and ring_seconds("all-to-all", 2 * factor * 16384 * D * 2, n) * 4 < reduce

# %% [markdown]
# The all_to_alls and the products are both proportional to the rows, so that their quotient depends on F alone: an
# expert must be wide enough to be worth the journey. How wide is exercise 3.

# %% [markdown]
# ## Exercise 1
# Write `rows_of_my_experts(slots)`: what `lax.all_to_all(slots, "expert", 0, 1, tiled=True)` does, slots (E, R, D) on
# each device -> (E/n, n R, D), with the untiled form: `lax.all_to_all(a, "expert", split_axis=0, concat_axis=0)` takes
# (n, ...) and returns (n, ...), of which entry i came from device i. E is a multiple of n.

# %%
# Your answer
def rows_of_my_experts(slots):
    raise NotImplementedError

# %%
# Self-check (runs on your answer once it is written, on the solution until then)
def check_rows_of_my_experts(f):
    for E in (n, 2 * n):
        slots = np.arange(n * E * 3 * 2, dtype=np.float32).reshape(n, E, 3, 2)  # [d, e]: of device d, for e
        got = on_devices(f, P("expert"), P("expert"))(slots.reshape(n * E, 3, 2))
        want = slots.swapaxes(0, 1).reshape(E, n * 3, 2)
        assert got.shape == want.shape, f"{E} experts: the shape in all is {got.shape}, not {want.shape}"
        assert (got == want).all(), f"{E} experts on {n} devices: rows went to the wrong expert"

# %% [markdown]
# ## Exercise 2
# Write `balance_of_all(probs, experts)` for use inside a shard_map over "expert": from the device's own probs (b, T, E)
# and experts (b, T, k), the balance loss over the tokens of all devices, the same on each. (It must be differentiable
# with respect to probs, from outside.)

# %%
# Your answer
def balance_of_all(probs, experts):
    raise NotImplementedError

# %%
# Self-check
def check_balance_of_all(f):
    def of_logits(balance):
        return jax.jit(jax.value_and_grad(lambda logits, experts: balance(jax.nn.softmax(logits), experts)))

    losses = of_logits(on_devices(f, (P("expert"), P("expert")), P())), of_logits(model.balance_loss)
    for skew in (0, 3):  # of device i towards expert i
        logits = np.random.default_rng(1).normal(size=(n, 16, 8)).astype(np.float32)
        logits += skew * np.eye(8, dtype=np.float32)[:, None]
        experts = np.argsort(-logits, axis=-1)[..., :2].astype(np.int32)
        (got, slope), (want, true_slope) = (value_and_slope(logits, experts) for value_and_slope in losses)
        assert got.shape == (), f"the loss is a scalar, the same on each device; got shape {got.shape}"
        assert np.isclose(got, want, rtol=1e-5), f"{got:.4f}, over all tokens it is {want:.4f}: sum f and P first"
        assert relative_errors([slope], [true_slope])["0"] < 1e-5, "the value is right and its gradient isn't"

# %% [markdown]
# ## Exercise 3
# Write `smallest_hidden(n, flops_per_s, link, bytes_per_value)`: the width F at which, in a forward pass, the products
# of the experts (two matrices, 4 R D F FLOPs a device for its R rows) take as long as the two all_to_alls, on a ring of
# n devices, n even.

# %%
# Your answer
def smallest_hidden(n, flops_per_s, link, bytes_per_value):
    raise NotImplementedError

# %%
# Self-check
def check_smallest_hidden(f):
    R, D = 1000, 512
    for n, flops_per_s, link, s in ((8, 197e12, 4.5e10, 2), (16, 197e12, 4.5e10, 2), (4, 918e12, 9e10, 1)):
        F = f(n, flops_per_s, link, s)
        products, exchange = 4 * R * D * F / flops_per_s, 2 * ring_seconds("all-to-all", R * D * s, n, link)
        assert np.isclose(products, exchange, rtol=1e-9), \
            f"n = {n}: at F = {F:.0f} the products take {products / exchange:.3f} of the time of both all_to_alls"

# %% [markdown]
# ## Rules
# | rule | because |
# |---|---|
# | an all_to_all moves the split of an array to another axis | its transpose, and inverse, moves it back |
# | count capacity within a sequence | then a device decides alone, and n devices compute what one does |
# | a fixed number of slots | all_to_all and the compiler need shapes before the router has spoken |
# | differentiate the function that calls shard_map | inside it, experts get n times their gradient, a router 1 or n |
# | compare gradient norms with one device's | Adam hides a constant factor |
# | sum, then multiply: the balance loss of all tokens | a mean of products isn't the product of means |
# | cast a replicated weight to varying where a device's own work begins | the transpose of the cast is the sum |
# | 2 all_to_alls forward, 4 with gradients, k · factor · D numbers a token each | read them from the compiled program |
# | wide experts | the journey costs D a row, the work D F |

# %% [markdown]
# ## Solutions

# %%
def rows_of_my_experts_solution(slots):
    E, R, D = slots.shape
    arrived = lax.all_to_all(slots.reshape(n, E // n, R, D), "expert", split_axis=0, concat_axis=0)
    return arrived.swapaxes(0, 1).reshape(E // n, n * R, D)  # (sender, expert, R, D): experts first


def balance_of_all_solution(probs, experts):
    E = probs.shape[-1]
    f = lax.pmean(jax.nn.one_hot(experts, E).mean((0, 1, 2)), "expert")  # devices hold equally many tokens
    P_e = lax.pmean(probs.mean((0, 1)), "expert")
    return E * (f * P_e).sum()


def smallest_hidden_solution(n, flops_per_s, link, bytes_per_value):
    # 4 R D F / flops_per_s = 2 (R D s) n / (8 link), solved for F
    return n * bytes_per_value * flops_per_s / (16 * link)

# %%
try:
    check_rows_of_my_experts(rows_of_my_experts)
except NotImplementedError:
    check_rows_of_my_experts(rows_of_my_experts_solution)

# %%
try:
    check_balance_of_all(balance_of_all)
except NotImplementedError:
    check_balance_of_all(balance_of_all_solution)

# %%
try:
    check_smallest_hidden(smallest_hidden)
except NotImplementedError:
    check_smallest_hidden(smallest_hidden_solution)
    print(f"8 TPU v5e: F = {smallest_hidden_solution(8, 197e12, 4.5e10, 2):.0f}")
