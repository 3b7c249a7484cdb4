# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---
# %% [markdown]
# # The port to Flax NNX: what a framework takes off your hands, counted
#
# After this lesson you can carry parameters between raw JAX and an NNX model and prove that nothing changed, say which
# lines the framework replaced and which it did not, keep tied weights tied, choose between `nnx.jit` and `jax.jit`,
# and write the same training step in Equinox.
# Files: `model.py` (raw), `model_nnx.py`, `model_eqx.py`, and the training step of `train.py`.

# %%
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent if "__file__" in globals() else Path.cwd()
sys.path[:0] = [str(PROJECT), str(PROJECT.parent)]  # the project's files, and common/ beside it

# %%
import ast
import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import model_eqx
import model_nnx
import train
from model import GPTConfig, dropout, forward, init_params, loss_fn

# %% [markdown]
# ## First prove that it is the same model [S1-070] (must-read)
# **Claim.** A port is right when the *same parameters* give the same logits and the same gradients: no training run,
# whose losses also fall for a wrong model, says as much. `from_raw` copies the dict of arrays into the module,
# `to_raw` copies parameters, or a gradient, back.
#
# ```
# params["blocks"]["w_qkv"]  (L, D, 3D)      ──from_raw──►   model.blocks[i].qkv.kernel  (D, 3D), i < L
#        one dict, stacked layers            ◄──to_raw────   a tree of modules, each owning its Params
# ```

# %%
cfg = GPTConfig(vocab_size=17, context=8, n_layer=2, n_head=2, n_embd=16)
params = jax.jit(init_params, static_argnums=1)(jax.random.key(0), cfg)
x, y = jax.random.randint(jax.random.key(1), (2, 3, cfg.context), 0, cfg.vocab_size)
model = model_nnx.from_raw(params, cfg)


def distance(got, want):
    """||got - want|| / ||want|| over all leaves as one vector."""
    got, want = (np.concatenate([np.ravel(a) for a in jax.tree.leaves(tree)]) for tree in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def mean_loss(model, tokens, targets):
    nats, count = model_nnx.summed_loss(model, tokens, targets)
    return nats / count


raw_logits, raw_gradient = jax.jit(lambda p: (forward(p, x, cfg), jax.grad(loss_fn)(p, x, y, cfg)))(params)
nnx_logits, nnx_gradient = nnx.jit(lambda m: (m(x), model_nnx.to_raw(nnx.grad(mean_loss)(m, x, y))))(model)
logits_apart, gradients_apart = abs(nnx_logits - raw_logits).max(), distance(nnx_gradient, raw_gradient)
print(f"logits differ by {logits_apart:.1e}, gradients by {gradients_apart:.1e}")
assert logits_apart < 1e-5 and gradients_apart < 1e-6

# %% [markdown]
# ## What the framework absorbed, counted [S1-070] (must-read)
# The table is counted from the source: lines of code without docstrings, comments and blank lines. What has no
# parameters (attention, the split into heads, attention over the cache) is not ported at all: `model_nnx.py` imports
# it. **Claim.** The framework absorbs the layers' arithmetic and the threading of a parameter dict through every call.
# It does not absorb the initialisation: GPT-2's scales must still be said, one way or the other. And whoever wants to
# compare with something else pays for a conversion.

# %%
def lines_of(file, names):
    """Lines of code of some functions, given as "f" or "Class.f"."""
    text = (PROJECT / file).read_text(encoding="utf-8")
    found, total = {}, 0
    for node in ast.parse(text).body:
        for f in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(f, ast.FunctionDef):
                found[f.name if f is node else f"{node.name}.{f.name}"] = f
    for name in names.split():
        f = found[name]
        docs = {i for d in ast.walk(f) if isinstance(d, ast.FunctionDef) and ast.get_docstring(d)
                for i in range(d.body[0].lineno, d.body[0].end_lineno + 1)}
        lines = text.splitlines()
        total += sum(1 for i in range(f.lineno, f.end_lineno + 1)
                     if i not in docs and lines[i - 1].strip() and not lines[i - 1].strip().startswith("#"))
    return total


JOBS = {
    "initialisation": (("model.py", "init_params"), ("model_nnx.py", "Block.__init__ GPT.__init__ layer_norm")),
    "layers' arithmetic, dropout": (("model.py", "layer_norm linear dropout mlp"), ("model_nnx.py", "drop")),
    "forward pass": (("model.py", "layers_of embed block run_blocks logits_of forward"),
                     ("model_nnx.py", "GPT.embed Block.__call__ GPT.__call__ GPT.logits")),
    "KV cache": (("model.py", "prefill decode_step"),
                 ("model_nnx.py", "GPT.prefill GPT.decode Block.remember Block.recall")),
    "training step, optimiser": (("train.py", "init_state accumulated_gradient train_step"),
                                 ("model_nnx.py", "start train_step")),
    "conversion, checkpoints": (None, ("model_nnx.py", "from_raw to_raw saved restored")),
}
count = {job: tuple(lines_of(*side) if side else 0 for side in sides) for job, sides in JOBS.items()}
print(f"{'lines of code':29} raw  NNX")
for job, (raw, nnx_lines) in count.items():
    print(f"{job:29} {raw:3}  {nnx_lines:3}")
print(f"{'sum':29} {sum(r for r, _ in count.values()):3}  {sum(n for _, n in count.values()):3}")
assert count["layers' arithmetic, dropout"][1] <= count["layers' arithmetic, dropout"][0] / 3
assert count["forward pass"][1] <= 0.75 * count["forward pass"][0]
assert count["initialisation"][1] >= 0.75 * count["initialisation"][0]
assert abs(sum(n for _, n in count.values()) / sum(r for r, _ in count.values()) - 1) < 0.25

# %% [markdown]
# So the sum hardly moves. What moves is *where* things stand: names of parameters next to the code that uses them,
# instead of strings in one dict. Running statistics (batch norm) are where a framework saves most; a GPT has none.
#
# ## Where the parameters live (optional)
# **Claim.** An NNX module is an object that holds `Variable`s. `nnx.split` takes it apart into a static description
# and a tree of values; filters choose by the Variable's type. A plain list of modules is refused, because NNX could
# not know that it holds parameters.

# %%
graph, values = nnx.split(model, nnx.Param)
assert sum(a.size for a in jax.tree.leaves(values)) == sum(a.size for a in jax.tree.leaves(params))
assert isinstance(model.wte.embedding, nnx.Param) and isinstance(model.blocks, nnx.List)


class PlainList(nnx.Module):
    def __init__(self):
        self.layers = [nnx.Linear(2, 2, rngs=nnx.Rngs(0))]


try:
    PlainList()
    raise SystemExit("a plain list of modules was accepted")
except ValueError as why:
    assert "nnx.List" in str(why)

# %% [markdown]
# **Claim.** `nnx.merge` does not copy: the merged module shares its Variables with the one that was split. That is why
# `model_nnx.train_step`, which merges inside a `scan`, says `copy=True`.

# %%
shared, copied = nnx.merge(*nnx.split(model)), nnx.merge(*nnx.split(model), copy=True)
assert shared.lnf.bias is model.lnf.bias and copied.lnf.bias is not model.lnf.bias
shared.lnf.bias[...] = jnp.ones(cfg.n_embd)
assert model.lnf.bias[0] == 1 and copied.lnf.bias[0] == 0
model.lnf.bias[...] = jnp.zeros(cfg.n_embd)

# %% [markdown]
# ## The tying trap [S1-070] (must-read)
# GPT-2 uses its embedding a second time as the output head. Say it as two names for one Param, and you have met the
# one difference between `nnx.grad` and `jax.grad` that costs accuracy without an error:
#
# ```
#            one graph (nnx.*)                         one tree (jax.*)
#    embedding ──┐                             embedding ──► leaf 1: gradient g1
#                ├──► one Param: g1 + g2
#    head ───────┘                             head ───────► leaf 2: gradient g2, trained apart
# ```
# **Claim.** `nnx.*` transformations see the graph and keep the sharing. `jax.*` transformations see a pytree, which has
# no notion of "the same leaf twice": the gradient falls in two, and after `jax.jit` the two names hold two arrays.

# %%
class TwoNames(nnx.Module):
    def __init__(self, table):
        self.embedding = nnx.Param(table)
        self.head = self.embedding

    def __call__(self, tokens):
        return self.embedding[...][tokens] @ self.head[...].T


def two_names_loss(m, tokens, targets):
    return optax.softmax_cross_entropy_with_integer_labels(m(tokens), targets).mean()


tied, tokens, targets = TwoNames(params["wte"]), x[0], y[0]
right, half = nnx.grad(two_names_loss)(tied, tokens, targets), jax.grad(two_names_loss)(tied, tokens, targets)
assert len(jax.tree.leaves(right)) == 1 and len(jax.tree.leaves(half)) == 2
assert jnp.allclose(right.embedding[...], half.embedding[...] + half.head[...], atol=1e-7)
assert distance(half.embedding[...], right.embedding[...]) > 0.1
kept, cut = nnx.jit(lambda m: m)(tied), jax.jit(lambda m: m)(tied)
assert kept.embedding is kept.head and cut.embedding is not cut.head

# %% [markdown]
# `model_nnx.py` has no second name: `GPT.logits` reads `self.wte.embedding`. Used twice but held once, it is safe under
# both families.

# %%
plain = jax.jit(lambda m: model_nnx.to_raw(jax.grad(mean_loss)(m, x, y)))(model)
assert distance(plain["wte"], raw_gradient["wte"]) < 1e-6

# %% [markdown]
# ## `nnx.jit` or `jax.jit`? (must-read)
# **Claim.** A function under `nnx.jit` may change its modules in place; the changes are carried out of the compiled
# function. Under `jax.jit` they happen to a copy that is thrown away, silently: batch norm's running mean never moves.

# %%
def normalise(bn, x):
    return bn(x)


bn, batch = nnx.BatchNorm(3, rngs=nnx.Rngs(0)), jnp.arange(12.0).reshape(4, 3)
jax.jit(normalise)(bn, batch)
assert (bn.mean[...] == 0).all()
nnx.jit(normalise)(bn, batch)
assert (bn.mean[...] != 0).any() and isinstance(bn.mean, nnx.BatchStat)

# %% [markdown]
# The same rule makes the KV cache of `model_nnx.py` work: `GPT.decode` writes into `nnx.Cache` Variables.
# **Claim.** A new Variable changes the module's structure, which is part of the cache key of `nnx.jit`: the function is
# traced again. `greedy` therefore removes the caches when it is done.

# %%
traces = []


@nnx.jit
def logits_of(model, tokens):
    traces.append(1)
    return model(tokens)


logits_of(model, x), logits_of(model, x)
assert len(traces) == 1
nnx.jit(model_nnx.GPT.prefill)(model, x[:, :3])
assert isinstance(model.blocks[0].k_cache, nnx.Cache)
logits_of(model, x)
assert len(traces) == 2
nnx.pop(model, nnx.Cache)
logits_of(model, x)
assert len(traces) == 2

# %% [markdown]
# That the whole graph is looked at on every call is the price: Python time a call, which hides behind a large step and
# not behind a small one (`python bench.py --ports` measures both). Where it matters, split once, use `jax.jit` on the
# values, and merge inside: exercise 1.
#
# ## Keys: a stream counts, a function does not (must-read)
# **Claim.** `nnx.Rngs` is a key and a counter: the n-th draw is `fold_in(key, n)`. It saves you the splitting, and
# makes the counter part of the state: resume without it, and the masks differ.

# %%
stream = nnx.Rngs(dropout=jax.random.key(7)).dropout
drawn = [stream(), stream()]
assert all(jnp.array_equal(jax.random.key_data(got), jax.random.key_data(jax.random.fold_in(jax.random.key(7), n)))
           for n, got in enumerate(drawn))
assert stream.count[...] == 2

# %% [markdown]
# `train.py` promises that every random number is a function of (seed, step), so `model_nnx.GPT` takes a key a call.
# **Claim.** `nnx.Dropout` given a key makes the mask that `model.dropout` makes: the ports train like raw with dropout
# on, too.

# %%
key, ones = jax.random.key(3), jnp.ones((4, 5))
assert jnp.array_equal(nnx.Dropout(0.5)(ones, deterministic=False, rngs=key), dropout(ones, 0.5, key))

# %% [markdown]
# ## The training step, side by side (optional)
# ```
# raw                                              NNX
# loss, grad = value_and_grad(f)(params, ...)      loss, grad = nnx.value_and_grad(f)(model, ...)
# updates, opt = tx.update(grad, opt, params)      optimizer.update(model, grad)      # in place
# params = optax.apply_updates(params, updates)
# return params, opt, loss                         return loss
# ```
# **Claim.** Three steps of both, with dropout, give the same losses.

# %%
settings = train.Config(n_layer=1, n_head=2, n_embd=16, context=8, batch_size=4, dropout=0.1, max_iters=3,
                        warmup_iters=0)
text = jax.random.randint(jax.random.key(2), (500,), 0, cfg.vocab_size).astype(jnp.uint8)
losses = {}
for name in ("raw", "nnx"):
    run_cfg = dataclasses.replace(settings, framework=name)
    model_cfg = run_cfg.model(cfg.vocab_size)
    state = train.begin(run_cfg, model_cfg)
    steps = train.compile_steps(state, text, run_cfg, model_cfg)
    state, got = steps(state, text, jnp.int32(0), jnp.int32(3))
    losses[name] = [float(loss) for loss in got["loss"][:3]]
print(losses)
assert np.allclose(losses["raw"], losses["nnx"], atol=1e-5) and losses["raw"][0] != losses["raw"][2]

# %% [markdown]
# ## Exercise 1: the right gradient with `jax.grad`
# Write `tied_gradient(loss, module, *batch)`: the gradient of `loss(module, *batch)` with respect to the module's
# Params, as the State that `nnx.grad` would return, using `jax.grad` and neither `nnx.grad` nor any knowledge of which
# names are tied. Other Variables, such as a BatchStat, have no gradient. (Split; differentiate a function of the
# values; merge inside it.)

# %%
# Your answer
def tied_gradient(loss, module, *batch):
    raise NotImplementedError

# %%
# Self-check (runs on your answer once it is written, on the solution until then)
def check_tied_gradient(f):
    got, want = f(two_names_loss, tied, tokens, targets), right
    assert len(jax.tree.leaves(got)) == 1, "a Param with two names has one gradient"
    assert distance(got, want) < 1e-6, "the gradient is the sum over both uses"
    bn, squares = nnx.BatchNorm(3, rngs=nnx.Rngs(0)), lambda bn, x: (bn(x) ** 2).sum()
    assert distance(f(squares, bn, batch), nnx.grad(squares)(bn, batch)) < 1e-6, "no second name: as nnx.grad"
    assert len(jax.tree.leaves(f(squares, bn, batch))) == 2, "a BatchStat is no Param: it has no gradient"

# %% [markdown]
# ## Exercise 2: the same in Equinox [S1-087b] (optional)
# `model_eqx.py` is the third form: a module is an immutable pytree, a gradient is a module of the same shape, an update
# returns a new one. **Claim.** The logits and gradients are again the same, and the trap is another one: whatever is no
# static field is a leaf. `eqx.nn.Dropout` holds its rate and a flag as leaves, which `jax.grad` refuses and
# `eqx.filter_grad` leaves alone.

# %%
def eqx_loss(model, tokens, targets):
    nats, count = model_eqx.summed_loss(model, tokens, targets)
    return nats / count


eqx_model = model_eqx.from_raw(params, cfg)
eqx_logits, eqx_gradient = eqx.filter_jit(lambda m: (m(x), eqx.filter_grad(eqx_loss)(m, x, y)))(eqx_model)
assert jnp.abs(eqx_logits - raw_logits).max() < 1e-5
assert distance(model_eqx.to_raw(eqx_gradient), raw_gradient) < 1e-6
assert eqx_model.dropout.p in jax.tree.leaves(eqx_model.dropout) and eqx_gradient.dropout.inference is None
try:
    jax.grad(eqx_loss)(eqx_model, x, y)
    raise SystemExit("jax.grad took a bool for a parameter")
except TypeError as why:
    assert "bool" in str(why)

# %% [markdown]
# Write `sgd_step(model, tokens, targets, lr)`: one step of plain gradient descent on the mean loss (`eqx_loss`), which
# returns the new model. The model passed in must stay as it is.

# %%
# Your answer
def sgd_step(model, tokens, targets, lr):
    raise NotImplementedError

# %%
# Self-check
def check_sgd_step(f):
    want = jax.tree.map(lambda a, g: a - 0.1 * g, params, raw_gradient)
    got = f(eqx_model, x, y, 0.1)
    moved = jax.tree.map(jnp.subtract, model_eqx.to_raw(got), params)
    assert distance(moved, jax.tree.map(jnp.subtract, want, params)) < 1e-3, "the step is -lr times the gradient"
    assert got.dropout.p == eqx_model.dropout.p and type(got.dropout.p) is float, "only arrays move"
    assert distance(model_eqx.to_raw(eqx_model), params) == 0, "the old model is unchanged"

# %% [markdown]
# ## Rules
# | question | rule |
# |---|---|
# | is my port right? | same parameters, same logits, same gradients; converted both ways |
# | what does the framework save? | layers, names, running statistics; not the initialisation, not the mathematics |
# | tied weights | hold one Param and use it twice; with two names only `nnx.*` transformations keep it one |
# | in-place changes (BatchStat, Cache) | `nnx.jit`; `jax.jit` drops them without a word |
# | many small steps | split once, `jax.jit` on the values, merge inside |
# | dropout that resumes bit for bit | a key a call; or save the stream's counter |
# | a list of modules | `nnx.List` |
# | Equinox | `filter_*` wherever a leaf may be no array |

# %% [markdown]
# ## Solutions

# %%
def tied_gradient_solution(loss, module, *batch):
    graph, values, others = nnx.split(module, nnx.Param, ...)
    return jax.grad(lambda values: loss(nnx.merge(graph, values, others, copy=True), *batch))(values)


def sgd_step_solution(model, tokens, targets, lr):
    gradient = eqx.filter_jit(eqx.filter_grad(eqx_loss))(model, tokens, targets)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -lr * g, gradient))

# %%
try:
    check_tied_gradient(tied_gradient)
except NotImplementedError:
    check_tied_gradient(tied_gradient_solution)

# %%
try:
    check_sgd_step(sgd_step)
except NotImplementedError:
    check_sgd_step(sgd_step_solution)
