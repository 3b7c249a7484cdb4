# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---
# %% [markdown]
# # The frameworks' answer to state: types in Flax NNX, collections in Flax Linen
#
# After this lesson you can say which part of a network is parameter, statistic or random state, choose among them with
# filters, keep batch norm's updates under jit and out of the optimiser, read and call a Linen model with mutable
# collections, carry weights from Linen to NNX to raw JAX and prove that nothing changed, and read a decoder written
# the way large Linen code bases (MaxText) write theirs.
# It uses this project's `model.py`, whose network is written here twice more. Lesson 01 has the raw form of the state.
# Rules are numbered F1, F2, ...; the assertion that proves a rule carries its number (flax 0.12).
#
# Letters: **B** batch, **H**, **W** height and width, **C** channels (**I** in, **O** out). In the decoder: **T**
# tokens, **D** model, **F** hidden, **H** query heads, **G** key and value heads, **K** head dim, **L** layers,
# **V** vocabulary.

# %%
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent if "__file__" in globals() else Path.cwd()
sys.path[:0] = [str(PROJECT), str(PROJECT.parent)]  # the project's files, and common/ beside it

# %%
import collections
import dataclasses
from functools import partial

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax.sharding import PartitionSpec

import model

WIDTHS = (4,) * 4
images = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16, 16, 3)), jnp.float32)  # (B, H, W, C)
labels = jnp.arange(8) % model.CLASSES


def distance(got, want):
    """||got - want|| / ||want|| over all leaves as one vector."""
    got, want = (np.concatenate([np.ravel(a) for a in jax.tree.leaves(tree)]) for tree in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


# %% [markdown]
# ## State types: Param, BatchStat, RngState [S1-066] (must-read)
# A network holds three kinds of numbers, and each is moved by another hand:
# ```
#                moved by            model.py          Linen                       NNX
#   weights      the gradient        params            variables["params"]         nnx.Param
#   statistics   the forward pass    stats             variables["batch_stats"]    nnx.BatchStat
#   random state each draw           key, fold_in      rngs={"dropout": key}       nnx.RngState: RngKey, RngCount
# ```
# In raw JAX they are arguments of their own. In NNX they live in one object, and the *type* of the `nnx.Variable` that
# holds an array says which kind it is. This project's network in NNX:

# %%
class Block(nnx.Module):
    """Convolution, maybe pooling, batch norm, ReLU: (B, H, W, I) -> (B, H, W, O)."""

    def __init__(self, I, O, rngs):
        self.conv = nnx.Conv(I, O, (3, 3), use_bias=False, rngs=rngs)
        # The default momentum is 0.99, and the default variance is E[x^2] - E[x]^2, which cancels for a large mean.
        self.norm = nnx.BatchNorm(O, momentum=model.MOMENTUM, epsilon=model.EPS, use_fast_variance=False, rngs=rngs)

    def __call__(self, x, pool=False):
        x = self.conv(x)
        return nnx.relu(self.norm(model.max_pool(x) if pool else x))


class Net(nnx.Module):
    """model.forward's network, with dropout before the head: (B, H, W, 3) -> (B, 10)."""

    def __init__(self, widths, rngs, dropout=0.0):
        self.blocks = nnx.Dict({name: Block(I, O, rngs) for name, (I, O) in model.layers_of(widths).items()})
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.head = nnx.Linear(widths[-1], model.CLASSES, rngs=rngs)

    def __call__(self, images):
        b = self.blocks
        x = b.down1(b.stem(images), pool=True)
        x = x + b.res1b(b.res1a(x))
        x = b.down3(b.down2(x, pool=True), pool=True)
        x = x + b.res3b(b.res3a(x))
        return self.head(self.dropout(model.HEAD_SCALE * x.max((1, 2))))


net = Net(WIDTHS, nnx.Rngs(0, dropout=1))

# %% [markdown]
# **Claim.** Batch norm's scale and bias are Params, its running mean and variance BatchStats; dropout holds a key and a
# count of its draws. Nothing else distinguishes them: same module, same kind of array.

# %%
print("path                    type      shape")
for path, variable in nnx.to_flat_state(nnx.state(net)):
    if path[0] != "blocks" or path[1] == "stem":
        print(f"{'.'.join(path):23} {type(variable).__name__:9} {variable.shape}")

norm, stream = net.blocks.stem.norm, net.dropout.rngs
assert [type(v) for v in (norm.scale, norm.bias, norm.mean, norm.var)] == [nnx.Param] * 2 + [nnx.BatchStat] * 2  # F1
assert [type(v) for v in (stream.key, stream.count)] == [nnx.RngKey, nnx.RngCount]  # F1
assert issubclass(nnx.RngKey, nnx.RngState) and issubclass(nnx.RngCount, nnx.RngState)

# %% [markdown]
# **Claim.** Filters take the network apart by these types. `nnx.split` gives a static description (the graph) and one
# State for each filter; the first filter that matches takes a Variable, and none may be left over. The parts are
# exactly the two trees of `model.py`, and the random state that it hasn't.

# %%
graph, weights, statistics, randomness = nnx.split(net, nnx.Param, nnx.BatchStat, nnx.RngState)


def leaves(tree):
    return len(jax.tree.leaves(tree))


our_shapes = jax.eval_shape(lambda: (model.init_params(jax.random.key(0), WIDTHS), model.init_stats(WIDTHS)))
assert (leaves(weights), leaves(statistics), leaves(randomness)) == (*map(leaves, our_shapes), 2)  # F2
assert leaves(nnx.split(net, nnx.Variable, nnx.BatchStat)[2]) == 0, "the first filter that matches takes it"  # F2
try:
    nnx.split(net, nnx.Param, nnx.BatchStat)
except ValueError as why:
    print(str(why).splitlines()[0][:100])
else:
    raise AssertionError("the random state was left over")

# %% [markdown]
# A filter may be a type, a string (the tag of a random stream), `...` (the rest), a path, a function of (path,
# variable), or these combined by `nnx.All`, `nnx.Any` and `nnx.Not`.

# %%
FILTERS = {  # filter: how many Variables it takes
    "nnx.Param": (nnx.Param, 26),
    "'dropout', a tag": ("dropout", 2),
    "a part of the path": (nnx.PathContains("head"), 2),
    "scales and biases of batch norm": (nnx.All(nnx.Param, nnx.PathContains("norm")), 16),
    "all but the weights": (nnx.Not(nnx.Param), 18),
    "a function": (lambda path, variable: variable.ndim == 4, 8),
}
for name, (chosen, count) in FILTERS.items():
    print(f"{name:32} {leaves(nnx.state(net, chosen)):2}")
    assert leaves(nnx.state(net, chosen)) == count, name  # F2

# %% [markdown]
# ## `jax.jit` drops what the forward pass moved, `nnx.jit` keeps it [S1-066] (must-read)
# ```
#   nnx.jit(f)(net, x)                                   jax.jit(f)(net, x)
#   net ──split──► arrays ──► f ──► y, arrays'           net ──leaves──► copy of net ──► f ──► y
#    ▲                                 │                                     │
#    └──────── written back ───────────┘                                     └─ moved statistics: thrown away
# ```
# **Claim.** Under `jax.jit` a module is a pytree: the function gets a copy made of tracers, and moves the copy's
# statistics. No error, no warning, and evaluation normalises by mean 0 and variance 1 for ever.

# %%
def call(module, *args):
    return module(*args)


dropped, kept = Block(3, 4, nnx.Rngs(0)), Block(3, 4, nnx.Rngs(0))
jax.jit(call)(dropped, images)
nnx.jit(call)(kept, images)
print("running means: jax.jit", dropped.norm.mean[...], " nnx.jit", kept.norm.mean[...])
assert (dropped.norm.mean[...] == 0).all() and (dropped.norm.var[...] == 1).all()  # F3
assert (kept.norm.mean[...] != 0).all()  # F3

# %% [markdown]
# **Claim.** The third way is that of `model.forward`: split, hand the parts over, return the new statistics. It is
# plain JAX, goes through every transformation, and nothing moves until the caller takes it over.

# %%
def pure(graph, weights, statistics, images):
    """(outputs, new statistics): what model.forward returns."""
    module = nnx.merge(graph, weights, statistics)
    return module(images), nnx.state(module, nnx.BatchStat)


by_hand = Block(3, 4, nnx.Rngs(0))
parts = nnx.split(by_hand, nnx.Param, nnx.BatchStat)
_, moved = jax.jit(pure, static_argnums=0)(*parts, images)
assert (by_hand.norm.mean[...] == 0).all(), "not yet"
nnx.update(by_hand, moved)
assert distance(nnx.state(by_hand), nnx.state(kept)) < 1e-6  # F3

# %% [markdown]
# **Claim.** The same rule for random state: under `jax.jit` dropout's counter stays, and every step drops the same
# units.

# %%
def masks(jit):
    """Two draws of a jitted dropout, and its counter after them."""
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    draw = jit(call)
    return draw(dropout, jnp.ones(64)), draw(dropout, jnp.ones(64)), int(dropout.rngs.count[...])


first, second, count = masks(jax.jit)
assert jnp.array_equal(first, second) and count == 0  # F4
first, second, count = masks(nnx.jit)
assert not jnp.array_equal(first, second) and count == 2  # F4

# %% [markdown]
# **Claim.** Whether a module trains or evaluates is no Variable but a static attribute, set by `train()` and `eval()`
# in all its parts. It belongs to the graph, so that each mode is traced once; in evaluation nothing moves.

# %%
traces = []


@nnx.jit
def outputs(module, x):
    traces.append(module.norm.use_running_average)
    return module(x)


before = kept.norm.mean[...]
for mode in (kept.eval, kept.train, kept.eval, kept.train):
    mode()
    outputs(kept, images)
    if mode == kept.eval:
        assert jnp.array_equal(kept.norm.mean[...], before)  # F5
    before = kept.norm.mean[...]
assert traces == [True, False]  # F5

# %% [markdown]
# ## The optimiser moves Params, and nothing else [S1-066] (must-read)
# **Claim.** `nnx.grad` differentiates Params alone, and `nnx.Optimizer(..., wrt=nnx.Param)` holds state for them alone:
# BatchStats are what the forward pass made of them, however the optimiser decays weights.

# %%
rows = jnp.arange(12.0).reshape(4, 3)
optax_rule = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.5, momentum=0.9))


def weighted(norm):
    return (norm(rows) * rows**2).sum()


def after_step(wrt):
    """A batch norm after one step of the optimiser on what `wrt` chooses, and the gradient."""
    norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(norm, optax_rule, wrt=wrt)
    grads = nnx.grad(weighted, argnums=nnx.DiffState(0, wrt))(norm)
    optimizer.update(norm, grads)
    return norm, grads


forward_only = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
forward_only(rows)
right, grads = after_step(nnx.Param)
assert leaves(grads) == 2 and leaves(nnx.grad(weighted)(nnx.BatchNorm(3, rngs=nnx.Rngs(0)))) == 2  # F6
assert jnp.array_equal(right.var[...], forward_only.var[...]) and not jnp.array_equal(right.scale[...], jnp.ones(3))

# %% [markdown]
# **Claim.** With a filter that is too wide the statistics are optimised, too. In training they have no gradient, since
# the batch's own are used, and yet they move: weight decay shrinks them.

# %%
wrong, grads = after_step((nnx.Param, nnx.BatchStat))
print("running variance: right", right.var[...], " decayed", wrong.var[...])
assert leaves(grads) == 4 and (grads["var"][...] == 0).all()
assert jnp.allclose(wrong.var[...], (1 - 0.5 * 0.1) * right.var[...])  # F6

# %% [markdown]
# ## Reading Linen [S1-067] (must-read)
# Much large JAX code is written in Flax Linen, the older of the two: MaxText, the Vision Transformers, T5X. You need to
# read it more often than to write it. A Linen module holds *no* arrays: it is a frozen dataclass of settings, and a
# recipe.
# ```
#   net.init(key, x)                                     ->  variables = {"params": ..., "batch_stats": ...}
#   net.apply(variables, x)                              ->  y
#   net.apply(variables, x, mutable=["batch_stats"])     ->  y, {"batch_stats": moved}
#             └ collections by name: a dict of dicts, the first level names the kind of state
# ```
# - `@linen.compact`: submodules and parameters are made where they are used, in `__call__`. The alternative, `setup()`,
#   reads like `__init__`.
# - Names come from `name=...`, from the attribute in `setup`, or else from class and number: `Conv_0`, `BatchNorm_0`.
# - Shapes of inputs are not written down: `init` sees an example and infers them.

# %%
class LinenBlock(linen.Module):
    """Block, in Linen."""
    features: int
    pool: bool = False

    @linen.compact
    def __call__(self, x, train):
        x = linen.Conv(self.features, (3, 3), use_bias=False)(x)
        x = model.max_pool(x) if self.pool else x
        x = linen.BatchNorm(use_running_average=not train, momentum=model.MOMENTUM, epsilon=model.EPS,
                            use_fast_variance=False)(x)
        return linen.relu(x)


class LinenNet(linen.Module):
    """Net, in Linen."""
    widths: tuple[int, ...]
    dropout: float = 0.0

    @linen.compact
    def __call__(self, images, train):
        def block(name, x, pool=False):
            O = model.layers_of(self.widths)[name][1]
            return LinenBlock(O, pool, name=name)(x, train)

        x = block("down1", block("stem", images), pool=True)
        x = x + block("res1b", block("res1a", x))
        x = block("down3", block("down2", x, pool=True), pool=True)
        x = x + block("res3b", block("res3a", x))
        x = linen.Dropout(self.dropout, deterministic=not train)(model.HEAD_SCALE * x.max((1, 2)))
        return linen.Dense(model.CLASSES, name="head")(x)


linen_net = LinenNet(WIDTHS)
initial = linen_net.init(jax.random.key(0), images[:1, :8, :8], train=False)  # any example of the right channels
for collection, tree in initial.items():
    print(collection, jax.tree.map(jnp.shape, {name: tree[name] for name in ("stem", "head") if name in tree}))
assert set(initial) == {"params", "batch_stats"}  # F7
assert jax.tree.leaves(linen_net) == [linen_net], "no arrays in the module: to JAX it is an opaque object"  # F7
assert [leaves(initial[name]) for name in ("params", "batch_stats")] == [*map(leaves, our_shapes)]  # F7

# %% [markdown]
# **Claim.** In `apply` every collection is read-only unless named in `mutable`. A training pass without it is an error,
# not a silent loss: `ModifyScopeVariableError`. With it, the call returns a pair, and what was passed in is unchanged:
# the caller must take the new statistics over, as with `model.forward`.

# %%
train_pass = partial(linen_net.apply, train=True)
try:
    jax.eval_shape(train_pass, initial, images)  # the error comes while tracing: nothing needs to be compiled
except flax.errors.ModifyScopeVariableError as why:
    print(str(why)[:108])
    assert 'collection "batch_stats" is immutable' in str(why)  # F8
else:
    raise AssertionError("Linen moved an immutable collection")

train_logits, moved = jax.jit(partial(train_pass, mutable=["batch_stats"]))(initial, images)
assert set(moved) == {"batch_stats"}  # F8
assert (initial["batch_stats"]["stem"]["BatchNorm_0"]["mean"] == 0).all(), "what was passed in did not change"
variables = {**initial, **moved}  # taken over
assert (variables["batch_stats"]["stem"]["BatchNorm_0"]["mean"] != 0).all()

# %% [markdown]
# **Claim.** Randomness is a named stream of keys, given with each call. Forgotten, it is an error, too.

# %%
with_dropout = partial(LinenNet(WIDTHS, dropout=0.5).apply, train=True, mutable=["batch_stats"])
try:
    jax.eval_shape(with_dropout, initial, images)
except flax.errors.InvalidRngError as why:
    assert 'needs PRNG for "dropout"' in str(why)  # F9
else:
    raise AssertionError("dropout without a key")
logits, _ = jax.eval_shape(partial(with_dropout, rngs={"dropout": jax.random.key(0)}), initial, images)
assert logits.shape == (8, model.CLASSES)

# %% [markdown]
# ## The same weights in all three [S1-067] (must-read)
# **Claim.** Weights copied from Linen to NNX to `model.py` give the same logits in evaluation, and one training step of
# each ends with the same parameters and statistics. Then the three forms are one network, and which one to write is a
# matter of taste.
# ```
#   Linen params["stem"]["Conv_0"]["kernel"]        NNX blocks.stem.conv.kernel        ours params["stem"]["w"]
#   Linen params["stem"]["BatchNorm_0"]["scale"]    NNX blocks.stem.norm.scale         ours params["stem"]["scale"]
#   Linen batch_stats["stem"]["BatchNorm_0"]["var"] NNX blocks.stem.norm.var           ours stats["stem"]["var"]
# ```

# %%
def nnx_from_linen(variables):
    net, params = Net(WIDTHS, nnx.Rngs(0)), variables["params"]
    for name, block in net.blocks.items():
        block.conv.kernel.set_value(params[name]["Conv_0"]["kernel"])
        for holder in (params, variables["batch_stats"]):
            for leaf, value in holder[name]["BatchNorm_0"].items():
                getattr(block.norm, leaf).set_value(value)
    net.head.kernel.set_value(params["head"]["kernel"])
    net.head.bias.set_value(params["head"]["bias"])
    return net


def ours_from_nnx(net):
    """(params, stats) of model.py."""
    params = {name: {"w": block.conv.kernel[...], "scale": block.norm.scale[...], "bias": block.norm.bias[...]}
              for name, block in net.blocks.items()}
    params["head"] = {"w": net.head.kernel[...], "b": net.head.bias[...]}
    return params, {name: {"mean": block.norm.mean[...], "var": block.norm.var[...]}
                    for name, block in net.blocks.items()}


net = nnx_from_linen(variables)
params, stats = ours_from_nnx(net)
net.eval()
eval_logits = {
    "Linen": jax.jit(partial(linen_net.apply, train=False))(variables, images),
    "NNX": nnx.jit(call)(net, images),
    "ours": jax.jit(model.forward, static_argnames="train")(params, stats, images, train=False)[0],
}
for name, logits in eval_logits.items():
    print(f"{name:5} {distance(logits, eval_logits['ours']):.1e} from ours")
    assert distance(logits, eval_logits["ours"]) < 1e-5  # F10

# %%
LR = 0.1


@nnx.jit
def nnx_step(net, optimizer, images, labels):
    loss, grads = nnx.value_and_grad(lambda net: model.cross_entropy(net(images), labels).mean())(net)
    optimizer.update(net, grads)
    return loss


@jax.jit
def our_step(params, stats, images, labels):
    (loss, (stats, _)), grads = jax.value_and_grad(model.loss_fn, has_aux=True)(params, stats, images, labels)
    return jax.tree.map(lambda p, g: p - LR * g, params, grads), stats, loss


net.train()
nnx_loss = nnx_step(net, nnx.Optimizer(net, optax.sgd(LR), wrt=nnx.Param), images, labels)
new_params, new_stats, our_loss = our_step(params, stats, images, labels)
print(f"losses: NNX {nnx_loss:.6f}, ours {our_loss:.6f}")
assert jnp.allclose(nnx_loss, our_loss, rtol=1e-5)
for got, want, start in zip(ours_from_nnx(net), (new_params, new_stats), (params, stats)):
    assert distance(got, want) < 1e-5 < 1e-3 < distance(want, start)  # F10

# %% [markdown]
# What each form makes easy to forget:
#
# | | model.py | Linen | NNX |
# |---|---|---|---|
# | statistics not taken over | old ones used, silent | the same; error without `mutable` | lost by `jax.jit`, silent |
# | train or evaluate | an argument | an argument | an attribute: `eval()` stays until `train()` |
# | a random key | an argument | an error where it is missing | counted inside; must be saved to resume |
# | optimising the statistics | impossible: another tree | only by passing all of `variables` to optax | a wide `wrt` |
#
# ## Exercise 1: what weight decay may touch
# Write the filter `decayed(path, variable)`: True for the kernels among the Params, the weights of convolutions and of
# the head; False for scales, biases, and anything that is no Param.

# %%
# Your answer
def decayed(path, variable):
    raise NotImplementedError


# %%
# Self-check (runs on your answer once it is written, on the solution until then)
def check_decayed(f):
    chosen = nnx.to_flat_state(nnx.state(net, f))
    names = collections.Counter(path[-1] for path, _ in chosen)
    assert names == {"kernel": 9}, f"8 convolutions and the head have a kernel, but it chose {dict(names)}"
    average = nnx.Dict(kernel=nnx.BatchStat(jnp.ones(2)))
    assert leaves(nnx.state(average, f)) == 0, "a statistic that is called kernel is no Param"
    assert leaves(nnx.state(nnx.Dict(kernel_scale=nnx.Param(jnp.ones(2))), f)) == 0, "the name is kernel, exactly"


# %% [markdown]
# ## Exercise 2: a training step in Linen
# Write `linen_step(variables, images, labels, lr)`: one step of plain gradient descent of `linen_net` on the mean of
# `model.cross_entropy` -> (new variables, loss). Both collections move, each by its own hand.

# %%
# Your answer
def linen_step(variables, images, labels, lr):
    raise NotImplementedError


# %%
# Self-check
def check_linen_step(f):
    got, loss = jax.jit(f)(variables, images, labels, LR)
    assert jax.tree.structure(got) == jax.tree.structure(variables), "the same collections come out"
    got_params, got_stats = ours_from_nnx(nnx_from_linen(got))
    assert jnp.allclose(loss, our_loss, rtol=1e-5), "the mean loss before the step"
    assert distance(got_params, new_params) < 1e-5, "params move by -lr times their gradient"
    assert distance(got_stats, new_stats) < 1e-5, "batch_stats are what the training pass made of them"


# %% [markdown]
# ## Reading a decoder in MaxText's style [S1-067] (optional)
# In such code the numbers stand in a YAML file, every layer takes the whole `config`, and four idioms repeat:
#
# | you see | it means |
# |---|---|
# | `config.base_emb_dim`, `base_num_kv_heads`, ... | sizes; fewer kv heads than query heads: several share one |
# | `mlp_activations: [silu, linear]` | one input projection for each, multiplied: a gated MLP |
# | `linen.with_logical_partitioning(init, ("embed", "mlp"))` | names for the axes of a parameter, stored with it |
# | `logical_axis_rules` | which mesh axis each name is spread over: the only place that knows the machine |
# | `linen.scan(Layer, variable_axes={"params": 1}, ...)` | L layers as one, their parameters stacked along axis 1 |
# | `logits_via_embedding` | no head of its own: the embedding, transposed |

# %%
CONFIG = {"base_emb_dim": 4096, "base_num_query_heads": 32, "base_num_kv_heads": 8, "head_dim": 128,
          "base_mlp_dim": 14336, "mlp_activations": ("silu", "linear"), "base_num_decoder_layers": 32,
          "vocab_size": 128256, "logits_via_embedding": False, "scan_layers": True, "param_scan_axis": 1}
RULES = (("vocab", "tensor"), ("embed", "fsdp"), ("heads", "tensor"), ("mlp", "tensor"))
Config = dataclasses.make_dataclass("Config", CONFIG, frozen=True)


def dense(features, name, axes, axis=-1):
    kernel_init = linen.with_logical_partitioning(linen.initializers.lecun_normal(), axes)
    return linen.DenseGeneral(features, axis=axis, use_bias=False, kernel_init=kernel_init, name=name)


class DecoderLayer(linen.Module):
    config: Config

    @linen.compact
    def __call__(self, x, _):  # (B, T, D); the second argument is what scan would slice for each layer
        cfg = self.config
        h = linen.RMSNorm(name="pre_self_attention_norm")(x)
        query = dense((cfg.base_num_query_heads, cfg.head_dim), "query", ("embed", "heads", "kv"))(h)  # (B, T, H, K)
        key, value = (dense((cfg.base_num_kv_heads, cfg.head_dim), name, ("embed", "heads", "kv"))(h)
                      for name in ("key", "value"))  # (B, T, G, K)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + dense(cfg.base_emb_dim, "out", ("heads", "kv", "embed"), axis=(-2, -1))(mixed)
        h, product = linen.RMSNorm(name="pre_mlp_norm")(x), 1
        for i, activation in enumerate(cfg.mlp_activations):
            hidden = dense(cfg.base_mlp_dim, f"wi_{i}", ("embed", "mlp"))(h)
            product *= hidden if activation == "linear" else getattr(linen, activation)(hidden)
        return x + dense(cfg.base_emb_dim, "wo", ("mlp", "embed"))(product), None


class Decoder(linen.Module):
    config: Config

    @linen.compact
    def __call__(self, tokens):  # (B, T) -> (B, T, V)
        cfg = self.config
        table_init = linen.with_logical_partitioning(linen.initializers.normal(0.02), ("vocab", "embed"))
        embedder = linen.Embed(cfg.vocab_size, cfg.base_emb_dim, embedding_init=table_init, name="token_embedder")
        x = embedder(tokens)
        if cfg.scan_layers:
            layers = linen.scan(DecoderLayer, variable_axes={"params": cfg.param_scan_axis},
                                split_rngs={"params": True}, length=cfg.base_num_decoder_layers,
                                metadata_params={linen.PARTITION_NAME: "layers"})
            x, _ = layers(cfg, name="layers")(x, None)
        else:
            for i in range(cfg.base_num_decoder_layers):
                x, _ = DecoderLayer(cfg, name=f"layers_{i}")(x, None)
        x = linen.RMSNorm(name="decoder_norm")(x)
        return embedder.attend(x) if cfg.logits_via_embedding else dense(cfg.vocab_size, "logits_dense",
                                                                         ("embed", "vocab"))(x)


# %% [markdown]
# **Claim.** `jax.eval_shape` of `init` shows the parameters of any such model without a byte of memory: here 8 billion.
# Each is boxed with its axis names, the stacked axis of `scan` among them; the rules turn names into a sharding.

# %%
def abstract(config):
    """The boxed parameters of a decoder, as shapes."""
    return jax.eval_shape(Decoder(Config(**config)).init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]


boxed = abstract(CONFIG)
shapes, names = linen.meta.unbox(boxed), linen.get_partition_spec(boxed)
spread = linen.logical_to_mesh(names, RULES)
for name in ("query", "key", "wi_0", "wo"):
    print(f"layers.{name:6} {shapes['layers'][name]['kernel'].shape}  {names['layers'][name]['kernel']}")
wi = [tree["layers"]["wi_0"]["kernel"] for tree in (shapes, names, spread)]
assert wi[0].shape == (4096, 32, 14336)  # F11: the layers are axis 1, param_scan_axis
assert wi[1:] == [PartitionSpec("embed", "layers", "mlp"), PartitionSpec("fsdp", None, "tensor")]  # F11

# %% [markdown]
# ## Exercise 3: read the configuration
# Write `count_parameters(config)`: how many parameters the decoder has, from the dict alone, in closed form, without
# building the model. Read the code above for what each setting does.

# %%
# Your answer
def count_parameters(config):
    raise NotImplementedError


# %%
# Self-check
def check_count_parameters(f):
    small = {**CONFIG, "base_emb_dim": 64, "base_mlp_dim": 96, "base_num_decoder_layers": 3, "vocab_size": 100}
    for what, config in {
        "8 billion": CONFIG,
        "small": small,
        "as many kv heads as query heads": {**small, "base_num_kv_heads": 32},
        "the embedding as head": {**small, "logits_via_embedding": True},
        "layers one by one": {**small, "scan_layers": False},
        "no gate": {**small, "mlp_activations": ("gelu",)},
    }.items():
        want = sum(leaf.size for leaf in jax.tree.leaves(linen.meta.unbox(abstract(config))))
        assert f(config) == want, f"{what}: {want:,} parameters, not {f(config):,}"


# %% [markdown]
# ## Rules
# Each rule is proved by the assertion that carries its number.
#
# | | rule | because |
# |---|---|---|
# | F1 | ask for the type: Param, BatchStat, RngKey, RngCount | it says whose hand moves a number |
# | F2 | choose with filters, the narrowest first | the first match takes a Variable; none may be left |
# | F3 | `nnx.jit`, or split, return the new state and update | `jax.jit` moves the statistics of a copy |
# | F4 | the same for dropout | under `jax.jit` the counter stays, and so does the mask |
# | F5 | call `eval()` and `train()` in pairs | the mode is an attribute that stays, part of the graph |
# | F6 | `wrt=nnx.Param` | weight decay shrinks statistics that a wider filter lets in |
# | F7 | a Linen module is settings; the arrays are in `variables` | `init` returns them, `apply` takes them |
# | F8 | `mutable=["batch_stats"]` in training, and take the result over | collections are read-only, and pure |
# | F9 | `rngs={"dropout": key}` with each call | Linen keeps no random state |
# | F10 | prove a port by equal logits and an equal step, from the same weights | a loss that falls proves little |
# | F11 | read shapes and shardings with `eval_shape`, not by running | any size costs nothing |

# %% [markdown]
# ## Solutions

# %%
def decayed_solution(path, variable):
    return isinstance(variable, nnx.Param) and path[-1] == "kernel"


def linen_step_solution(variables, images, labels, lr):
    def loss_of(params):
        logits, moved = linen_net.apply({**variables, "params": params}, images, train=True, mutable=["batch_stats"])
        return model.cross_entropy(logits, labels).mean(), moved

    (loss, moved), grads = jax.value_and_grad(loss_of, has_aux=True)(variables["params"])
    params = jax.tree.map(lambda p, g: p - lr * g, variables["params"], grads)
    return {"params": params, **moved}, loss


def count_parameters_solution(config):
    D, F, L, V = (config[name] for name in ("base_emb_dim", "base_mlp_dim", "base_num_decoder_layers", "vocab_size"))
    H, G, K = (config[name] for name in ("base_num_query_heads", "base_num_kv_heads", "head_dim"))
    attention = D * K * (2 * H + 2 * G)  # query and out; key and value
    mlp = D * F * (len(config["mlp_activations"]) + 1)
    embeddings = V * D * (1 if config["logits_via_embedding"] else 2)
    return L * (attention + mlp + 2 * D) + D + embeddings  # two norms a layer, and the last one


# %%
try:
    check_decayed(decayed)
except NotImplementedError:
    check_decayed(decayed_solution)

# %%
try:
    check_linen_step(linen_step)
except NotImplementedError:
    check_linen_step(linen_step_solution)

# %%
try:
    check_count_parameters(count_parameters)
except NotImplementedError:
    check_count_parameters(count_parameters_solution)
