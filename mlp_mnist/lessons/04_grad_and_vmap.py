# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---
# %% [markdown]
# # `grad`, `vmap` and how they compose [S1-035] [S2-015] [S2-020] (must-read)
#
# After this lesson you can take gradients, Jacobian products and values together in one pass, prove a gradient, keep
# NaN out of one, write a function for one example and run it on a batch, and stack these transformations.
#
# Uses this project's `model.py` (the network for one example and for a batch), `train.py` (`sgd`) and `data.py`
# (scikit-learn's digits), and `common/gradcheck.py`.
#
# ```
#   f(params, x) -> loss                       function            what it returns
#     jax.grad(f)                              (params, x)      -> d loss / d params, a tree like params
#     jax.jvp(f, (x,), (v,))                   x, direction v   -> f(x), J v        forwards
#     jax.vjp(f, x)                            x                -> f(x), u -> u^T J backwards
#     jax.vmap(f, in_axes=(None, 0))           (params, xs)     -> losses, one for each x
#     jax.jit(jax.vmap(jax.grad(f), (None, 0)))                 -> a gradient for each x, compiled
# ```

# %%
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent if "__file__" in globals() else Path.cwd()
sys.path[:0] = [str(PROJECT), str(PROJECT.parent)]  # the project's files, and common/ beside it

# %%
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import data
import model
from common import gradcheck, profiling
from train import sgd

SIZES = (784, 32, 10)
digits = data.load("digits")
images, labels = data.flatten(digits.train_images), digits.train_labels  # float32 (1438, 784), int32 (1438,)
params = model.init_params(jax.random.key(0), SIZES)
batch = images[:16], labels[:16]
rng = np.random.default_rng(0)

def random_params(*sizes):
    """Parameters as model.init_params lays them out, drawn by NumPy: JAX compiles its generator for each new shape."""
    shapes = jax.eval_shape(lambda: model.init_params(jax.random.key(0), sizes))
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(scale=0.1, size=leaf.shape), leaf.dtype), shapes)

def error_of(f, *args):
    """The exception that f(*args) raises."""
    try:
        f(*args)
    except Exception as why:
        return why
    raise AssertionError("nothing was raised")

def close(got, want, rtol=2e-5):
    """Whether two trees agree: every difference at most rtol times its leaf's largest entry. Sums of hundreds of
    float32 terms (rounding unit 6e-8) in two different orders differ by up to about 1e-5 of that."""
    pairs = zip(*map(jax.tree.leaves, jax.device_get((got, want))), strict=True)
    return all(np.abs(g - w).max() <= rtol * np.abs(w).max() for g, w in pairs)

# %% [markdown]
# ## 1. `grad`, `vjp`, `jvp` [S1-037] (must-read)
# **Claim.** `grad` is exact up to rounding: it does not perturb anything, it transforms the jaxpr. Finite differences,
# which do perturb, agree with it; they are the proof, in float64, because in float32 rounding hides small bugs.

# %%
small = random_params(6, 5, 3)
x, y = rng.normal(size=(4, 6)).astype("float32"), np.array([0, 2, 1, 2])
with jax.enable_x64(True):
    small64, x64 = jax.tree.map(lambda a: np.asarray(a, "float64"), (small, x))
    checks = gradcheck.directional(model.loss_fn, small64, x64, y, key=jax.random.key(3), n=2)
    assert gradcheck.print_report(checks) == 0
    wrong = lambda *args: gradcheck.scaled(jax.grad(model.loss_fn)(*args), factor=1.001)
    checks = gradcheck.directional(model.loss_fn, small64, x64, y, key=jax.random.key(3), n=1, grad=wrong)
    assert not any(check.ok for check in checks)  # a gradient off by 0.1 % is caught

# %% [markdown]
# **Claim.** For a function with many outputs the derivative is the Jacobian J, (outputs, inputs). `jvp` multiplies it
# by a column (forwards, along with the value), `vjp` by a row (backwards); neither builds J. `grad` is the `vjp`
# of a scalar function with the row (1.0).

# %%
net = lambda x: model.forward_one(small, x)  # (6,) -> (3,)
x1 = x[0]
J = jax.jit(jax.jacobian(net))(x1)
v, u = rng.normal(size=6).astype("float32"), rng.normal(size=3).astype("float32")
value, pushed = jax.jvp(net, (x1,), (v,))
value_again, pull = jax.vjp(net, x1)
assert J.shape == (3, 6) and np.allclose(value, value_again, rtol=1e-6)
assert close(pushed, J @ v)
assert close(pull(u)[0], J.T @ u)

loss_of = lambda p: model.loss_fn(p, x, y)
by_grad, by_vjp = jax.jit(lambda p: (jax.grad(loss_of)(p), jax.vjp(loss_of, p)[1](1.0)[0]))(small)
assert close(by_grad, by_vjp)

# %% [markdown]
# **Claim.** `value_and_grad` needs no second forward pass: the value falls out of the one that the gradient needs.

# %%
def sub_jaxprs(eqn):
    """The jaxprs inside an equation's parameters (lesson 03)."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(inner := getattr(item, "jaxpr", item), "eqns"):
                yield inner

def primitives(jaxpr):
    """Names of all primitives of a jaxpr, those of called jaxprs included."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for inner in sub_jaxprs(eqn):
            yield from primitives(inner)

def count(f, *args):
    return Counter(primitives(jax.make_jaxpr(f)(*args).jaxpr))

loss, grads = jax.jit(jax.value_and_grad(model.loss_fn))(params, *batch)
assert np.allclose(loss, model.loss_fn(params, *batch), rtol=1e-6)
products = {name: count(transformed(model.loss_fn), params, *batch)["dot_general"] for name, transformed in (
    ("loss", lambda f: f), ("grad", jax.grad), ("value_and_grad", jax.value_and_grad))}
print("products of matrices:", products)
assert products["value_and_grad"] == products["grad"]

# %% [markdown]
# ### Stochastic gradient descent by hand (must-read)
# **Claim.** A gradient has the structure of the parameters, so that an optimiser is one `jax.tree.map`. With momentum
# and weight decay at zero, `train.sgd` is that line.

# %%
lr = 0.1
by_hand = jax.tree.map(lambda p, g: p - lr * g, params, grads)
state = {"params": params, "velocity": jax.tree.map(jnp.zeros_like, params)}
assert close(sgd(state, grads, lr, momentum=0.0, weight_decay=0.0)["params"], by_hand, rtol=1e-6)

@jax.jit
def step(params, images, labels):
    loss, grads = jax.value_and_grad(model.loss_fn)(params, images, labels)
    return jax.tree.map(lambda p, g: p - lr * g, params, grads), loss

trained, losses = params, []
for i in range(60):
    trained, loss = step(trained, images[20 * i:20 * i + 20], labels[20 * i:20 * i + 20])
    losses.append(float(loss))
print("loss, mean of ten steps:", " ".join(f"{np.mean(losses[i:i + 10]):.2f}" for i in range(0, 60, 10)))
assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:10])

# %% [markdown]
# ### The jaxpr of a gradient, and the two modes [S2-016] (must-read)
# **Claim.** `grad` writes the forward pass and behind it, in reverse order, the backward pass: a product `x @ w` turns
# into two, `xᵀ @ g` for w and `g @ wᵀ` for x. Forward one product a layer, backward two; where nobody asks for the
# gradient of the input, the first layer has only the first of them.
# ```
#   forward    x ──@w1──> relu ──@w2──> loss
#   backward   dx <─@w1ᵀ─ mask <─@w2ᵀ── g         dw1 = xᵀ @ g1    dw2 = hᵀ @ g2
# ```

# %%
closed = jax.make_jaxpr(jax.grad(lambda w, x: jnp.sin(x @ w).sum()))(jnp.ones((3, 2)), jnp.ones((4, 3)))
print(closed)

# %% [markdown]
# The first product and `sin` are the function itself; `cos` is computed beside them and kept for later. From the
# `broadcast_in_dim` of 1.0 (the derivative of the sum) the backward pass begins: times `cos`, then the second product,
# xᵀ g written as (gᵀ x)ᵀ. The result of `sin` is never used: its sum is not returned, and XLA drops both.

# %%
assert [e.primitive.name for e in closed.eqns] == [
    "dot_general", "sin", "cos", "reduce_sum", "broadcast_in_dim", "mul", "dot_general", "transpose"]

L = len(params)
forward, wrt_params, wrt_both = (count(f, params, *batch)["dot_general"] for f in (
    model.loss_fn, jax.grad(model.loss_fn), jax.grad(model.loss_fn, argnums=(0, 1))))
assert forward == L
assert wrt_both - forward == 2 * L
assert wrt_params - forward == 2 * L - 1

# %% [markdown]
# **Claim.** The full Jacobian is n calls of `jvp` (n inputs, a column each) or m of `vjp` (m outputs, a row each).

# %%
columns = jnp.stack([jax.jvp(net, (x1,), (e,))[1] for e in jnp.eye(6)], axis=1)
rows = jnp.stack([pull(e)[0] for e in jnp.eye(3)])
assert close(columns, J) and close(rows, J)

# %% [markdown]
# ### `jacfwd` or `jacrev`? (optional)
# **Claim.** They are those loops, by `vmap`: equal results, different cost. Few inputs and many outputs: `jacfwd`; many
# inputs and few outputs (a loss): `jacrev`. `nanogpt/lessons/03` goes on from here.

# %%
print(f"{'inputs':>7} {'outputs':>8} {'jacfwd':>9} {'jacrev':>9}   FLOPs")
for n, m in ((64, 2), (2, 64)):
    net_nm = random_params(n, 32, m)
    f, at = (lambda x: model.forward_one(net_nm, x)), np.linspace(-1, 1, n, dtype="float32")
    fwd, rev = (jax.jit(jac(f)).lower(at).compile() for jac in (jax.jacfwd, jax.jacrev))
    assert close(fwd(at), rev(at))
    ahead, back = (profiling.cost(program)["flops"] for program in (fwd, rev))
    print(f"{n:7} {m:8} {ahead:9.0f} {back:9.0f}")
    assert ahead > 2 * back if n > m else back > 2 * ahead

# %% [markdown]
# ### `has_aux`: return more than the loss [S2-017] (must-read)
# **Claim.** `grad` wants a scalar. What else the function computed (logits, accuracy) comes out beside the gradient
# with `has_aux=True`, without a second forward pass.

# %%
per_example = lambda params, images, labels: model.cross_entropy(model.forward(params, images), labels)
why = error_of(jax.grad(per_example), params, *batch)
print(str(why).partition(" To get")[0])
assert type(why) is TypeError
assert "Gradient only defined for scalar-output functions. Output had shape: (16,)" in str(why)

def loss_and_logits(params, images, labels):
    logits = model.forward(params, images)
    return model.cross_entropy(logits, labels).mean(), logits

(loss, logits), same_grads = jax.jit(jax.value_and_grad(loss_and_logits, has_aux=True))(params, *batch)
assert close(same_grads, grads)
assert (logits.argmax(1) == batch[1]).sum() == model.count_correct(params, *batch)
assert count(jax.value_and_grad(loss_and_logits, has_aux=True), params, *batch)["dot_general"] == products["grad"]

# %% [markdown]
# ### What comes back, and in which order [S2-018] (must-read)
# **Claim.** `value_and_grad` returns `((value, aux), grads)`, `grad` returns `(grads, aux)`.

# %%
shape_of = jax.tree.structure
both = jax.eval_shape(jax.value_and_grad(loss_and_logits, has_aux=True), params, *batch)
only = jax.eval_shape(jax.grad(loss_and_logits, has_aux=True), params, *batch)
assert shape_of(both) == shape_of(((0.0, 0.0), params))
assert shape_of(only) == shape_of((params, 0.0))

# %% [markdown]
# A Python float in aux comes back as a `TypedFloat`, a float that remembers its JAX dtype; it is a float wherever one
# is expected.

# %%
w, aux = jax.grad(lambda w: (w**2, w), has_aux=True)(3.0)
assert type(aux).__name__ == "TypedFloat" and isinstance(aux, float) and aux == 3.0

# %% [markdown]
# ## 2. Gradients that are NaN
# ### `jnp.where` differentiates both branches [S2-011] (must-read)
# **Claim.** `jnp.where` is the way to write an element-wise `if`. It selects *values*; both branches are computed and
# differentiated. If the branch not taken has an infinite derivative, the zero that the selection passes back to it
# makes 0 · inf = NaN, and the value shows nothing. Feeding that branch a harmless input repairs it.
# ```
#            ok? ──────────────────┐
#   x ──> where(ok, x, 1) ──> sqrt ──> where(ok, ·, 0)      the inner where cuts the pole off,
#                                                           the outer one picks the value
# ```

# %%
def root(x):
    return jnp.where(x > 0, jnp.sqrt(x), 0.0)

def safe_root(x):
    return jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1.0)), 0.0)

def root_cond(x):
    return jax.lax.cond(x > 0, jnp.sqrt, lambda x: 0.0 * x, x)

xs = jnp.array([-1.0, 0.0, 4.0])
assert root(xs).tolist() == safe_root(xs).tolist() == jax.vmap(root_cond)(xs).tolist() == [0, 0, 2]
assert np.isnan(jax.grad(root)(0.0)) and jax.grad(safe_root)(0.0) == 0

# %% [markdown]
# ### The double where as a helper [S2-041] (must-read)
# **Claim.** The pattern is always the same, so it fits in one function: value and gradient are finite at the pole, and
# equal to f's own elsewhere.

# %%
def safe_apply(f, x, ok, fill, harmless=1.0):
    """f(x) where ok, else fill, with a finite gradient: f never sees an x that is not ok.

    ok: boolean, broadcasts against x and against f(x). harmless: any input where f and its derivative are finite.
    """
    return jnp.where(ok, f(jnp.where(ok, x, harmless)), fill)

POLES = [  # name, f, a point at its pole, whether that is ok, a point where it is
    ("sqrt", jnp.sqrt, jnp.float32(0), lambda x: x > 0, jnp.float32(4)),
    ("log", jnp.log, jnp.float32(0), lambda x: x > 0, jnp.float32(2)),
    ("1/x", lambda x: 1 / x, jnp.float32(0), lambda x: x != 0, jnp.float32(-3)),
    ("norm", jnp.linalg.norm, jnp.zeros(3), lambda x: (x != 0).any(), jnp.array([3.0, 0.0, 4.0])),
]
for name, f, pole, ok, point in POLES:
    safe = lambda x: safe_apply(f, x, ok(x), 0.0)
    single = lambda x: jnp.where(ok(x), f(x), 0.0)
    assert np.isnan(jax.jit(jax.grad(single))(pole)).all(), name
    value, slope = jax.jit(jax.value_and_grad(safe))(pole)
    assert value == 0 and not np.any(slope), name
    assert close(*(jax.jit(jax.value_and_grad(g))(point) for g in (safe, f))), name

# %% [markdown]
# ### Where gradients are NaN, and what to write instead [S2-019] (must-read)
# **Claim.** These come up in every project: a zero vector's norm, the deviation of equal numbers, a softmax whose row
# is masked away entirely. In each the value is finite, or was meant to be masked.

# %%
def safe_norm(v):
    squared = (v * v).sum()
    return safe_apply(jnp.sqrt, squared, squared > 0, 0.0)

def safe_std(v):
    variance = v.var()
    return safe_apply(jnp.sqrt, variance, variance > 0, 0.0)

def safe_softmax(x):
    some = jnp.isfinite(x).any()
    return safe_apply(jax.nn.softmax, x, some, 0.0)

def power_zero(x):
    return x**0.0

def safe_power_zero(x):
    return safe_apply(power_zero, x, x != 0, 1.0)

def angle(v):
    return jnp.arctan2(v[1], v[0])

def safe_angle(v):
    ok = (v != 0).any()
    return safe_apply(angle, v, ok, 0.0)

masked_row = jnp.full(3, -jnp.inf)
KINKS = [  # name, f, where, safe form
    ("where(x > 0, sqrt(x), 0)", root, 0.0, safe_root),
    ("norm of zeros", jnp.linalg.norm, jnp.zeros(3), safe_norm),
    ("std of equal numbers", jnp.std, jnp.ones(3), safe_std),
    ("softmax of all -inf", lambda x: jax.nn.softmax(x)[0], masked_row, lambda x: safe_softmax(x)[0]),
    ("x ** 0. at 0", power_zero, 0.0, safe_power_zero),
    ("arctan2(0, 0)", angle, jnp.zeros(2), safe_angle),
]
for name, f, at, safe in KINKS:
    unsafe, (value, mended) = jax.jit(jax.grad(f))(at), jax.jit(jax.value_and_grad(safe))(at)
    print(f"{name:26} {str(np.ravel(unsafe)):16} -> {np.ravel(mended)}")
    assert np.isnan(unsafe).any(), name
    assert np.isfinite(mended).all() and np.isfinite(value), name
point = jnp.array([1.0, 2.0, -2.0])
for f, safe in ((jnp.linalg.norm, safe_norm), (jnp.std, safe_std), (angle, safe_angle)):
    assert close(jax.grad(safe)(point), jax.grad(f)(point))  # elsewhere nothing has changed

# %% [markdown]
# A kink without a pole has no NaN, and a convention: `relu` has slope 0 at 0, `maximum(x, 0)` shares it out, ½ each.

# %%
assert jax.grad(jax.nn.relu)(0.0) == 0 and jax.grad(lambda x: jnp.maximum(x, 0.0))(0.0) == 0.5
assert jax.grad(jnp.sqrt)(0.0) == jnp.inf  # a true infinity, not a NaN

# %% [markdown]
# ## 3. `vmap`: write it for one example [S1-038] (must-read)
# **Claim.** `vmap(f)` is not a loop. Every primitive has a *batching rule* that says what it becomes with one more
# axis: `sin` stays `sin`, a vector times a matrix becomes a matrix times a matrix. What is not batched
# (`in_axes=None`) stays as it is; with both operands batched a product gets *batch axes*.

# %%
one = lambda x, w: x @ w
X, W = jnp.ones((8, 3)), jnp.ones((8, 3, 2))

def dimension_numbers(f, *args):
    eqn, = (e for e in jax.make_jaxpr(f)(*args).eqns if e.primitive.name == "dot_general")
    return eqn.params["dimension_numbers"]  # ((contracted left, right), (batch left, right))

shared, own = dimension_numbers(jax.vmap(one, (0, None)), X, W[0]), dimension_numbers(jax.vmap(one), X, W)
print("one w for all:", shared, "\none w for each:", own)
assert dimension_numbers(one, X[0], W[0]) == (((0,), (0,)), ((), ()))
assert shared == (((1,), (0,)), ((), ()))
assert own == (((1,), (1,)), ((0,), (0,)))

# %% [markdown]
# A Pallas kernel has such a rule too: `vmap` of a `pallas_call` adds an axis to its grid (`ragged_kernel/lessons/03`).
#
# ### `vmap` over the batch against products of matrices [S2-020] (must-read)
# **Claim.** `model.forward_vmap` is the network for one image under `vmap`; `model.forward` is written for batches.
# The batching rules turn the jaxpr of one image, equation by equation, into the one written by hand: what is left to
# tell them apart is how the rule for a broadcast stores an axis (`np.int64(1)`, not `1`). XLA makes the same program
# of both, line for line.

# %%
wide = random_params(*model.SIZES)  # 784-512-512-10, the project's own network
many = images[:128]

def optimised(f, *args):
    """The instructions of f's optimised HLO, without the name of f and the lines of Python that they came from."""
    text = jax.jit(f).lower(*args).compile().as_text()
    text = re.sub(r", metadata=\{[^}]*\}", "", text)
    return [line for line in text.splitlines() if line.startswith(("%", "ENTRY", " ", "}"))]

assert close(model.forward_vmap(wide, many), model.forward(wide, many))
alone, mapped, matrices = (str(jax.make_jaxpr(f)(wide, x)) for f, x in (
    (model.forward_one, many[0]), (model.forward_vmap, many), (model.forward, many)))
assert "f32[128," not in alone and "broadcast_in_dim" not in alone  # one image: vectors, and no axis to add
assert mapped != matrices and mapped.replace("np.int64(1)", "1") == matrices
by_vmap, by_matrix = (optimised(f, wide, many) for f in (model.forward_vmap, model.forward))
print(len(by_vmap), "and", len(by_matrix), "lines of HLO, equal:", by_vmap == by_matrix)
assert by_vmap == by_matrix

for name, f in (("vmap", model.forward_vmap), ("matrices", model.forward)):
    timing = profiling.measure(f, lambda: (wide, many), n=10)
    print(f"{name:9} {1e6 * timing.median_s:6.0f} us a batch of 128")  # the same program: what differs is noise

# %% [markdown]
# **Claim.** A rule keeps the order in which the example was written. One that computes wᵀ x gives wᵀ Xᵀ, (outputs, B),
# between two transposes that nobody writes by hand. The jaxprs differ, and XLA folds the transposes into the product:
# again the same instructions, under other names.

# %%
def column_layer(w, b, x):
    return jax.nn.relu(w.T @ x + b)

def row_layers(w, b, x):
    return jax.nn.relu(x @ w + b)

layers = jax.vmap(column_layer, in_axes=(None, None, 0)), row_layers
args = wide[0]["w"], wide[0]["b"], many
assert [count(f, *args)["transpose"] for f in layers] == [2, 0]
column, row = ([re.sub(r"%[\w.-]+", "%", line) for line in optimised(f, *args)] for f in layers)
assert column == row

# %% [markdown]
# ### `in_axes`, `out_axes`, and mapping over keys (optional)
# **Claim.** `in_axes` says for each argument which axis is the mapped one, `None` for none; it may be a tree.
# `out_axes` says where the new axis goes. An ensemble is then one tree of stacked parameters, mapped over its first
# axis.

# %%
members = [random_params(*SIZES) for _ in range(3)]
ensemble = jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)  # w: (3, 784, 32)
votes = jax.jit(jax.vmap(model.forward, in_axes=(0, None), out_axes=1))(ensemble, batch[0])  # (B, members, V)
assert votes.shape == (16, 3, 10)
assert close(votes[:, 1], model.forward(members[1], batch[0]))
shift = jax.vmap(lambda p, x: x + p["b"], in_axes=({"w": None, "b": 0}, None))
assert shift({"w": 1.0, "b": np.arange(2.0)}, 10.0).tolist() == [10, 11]

# %% [markdown]
# **Claim.** Keys are arrays, so they are mapped like any other: a mask of its own for each example, and the same one
# that its key gives alone. (`nanogpt/lessons/02` has a generator for which that fails.)

# %%
keys = jax.random.split(jax.random.key(7), 3)
keep = lambda key: jax.random.bernoulli(key, 0.5, (20,))
masks = jax.vmap(keep)(keys)
assert jnp.array_equal(masks, jnp.stack([keep(key) for key in keys]))
assert not jnp.array_equal(masks[0], masks[1])

# %% [markdown]
# ### Where vectorising by hand goes wrong [S2-021] (must-read)
# **Claim.** Broadcasting never asks. Predictions (N, 1) against targets (N,) give (N, N) differences: a number comes
# out, training runs, and learns the mean. Written for one example and mapped, the function never sees a batch axis.
# Sizes that do not match are an error.

# %%
targets = jnp.arange(8.0)
predictions = (targets + 0.1)[:, None]  # (N, 1), as a layer with one output gives them
by_hand = ((predictions - targets) ** 2).mean()
mapped = jax.vmap(lambda p, t: ((p - t) ** 2).mean())(predictions, targets).mean()
print(f"by hand {by_hand:.2f}, by vmap {mapped:.2f}")
assert (predictions - targets).shape == (8, 8)
assert np.allclose(mapped, 0.01, rtol=1e-4) and by_hand > 100 * mapped

why = error_of(jax.vmap(jnp.dot), X, W[:5])
print(str(why).splitlines()[0])
assert type(why) is ValueError and "vmap got inconsistent sizes for array axes to be mapped" in str(why)

# %% [markdown]
# ### No Python `if` on what is batched [S2-023] (must-read)
# **Claim.** Inside `vmap` one `x` stands for all of them, and an `if` would have to go both ways: an error. `jnp.where`
# and `lax.cond` work.

# %%
def leaky_if(x):
    return x if x > 0 else 0.1 * x

leaky_where = lambda x: jnp.where(x > 0, x, 0.1 * x)
leaky_cond = lambda x: jax.lax.cond(x > 0, lambda x: x, lambda x: 0.1 * x, x)
assert type(error_of(jax.vmap(leaky_if), xs)) is jax.errors.TracerBoolConversionError
loop = jnp.stack([leaky_if(x) for x in xs])
assert jnp.array_equal(jax.vmap(leaky_where)(xs), loop) and jnp.array_equal(jax.vmap(leaky_cond)(xs), loop)

# %% [markdown]
# **Claim.** `cond` on a batched predicate becomes a selection, and *both* branches run: it saves no time. On an
# unbatched one it stays a `cond`. Where a branch is not taken, JAX hands it the same operand behind a `stop_gradient`, so
# that whatever derivative it has there, infinite or NaN, reaches nothing: the gradient of `root_cond` under `vmap` is
# finite where that of `jnp.where` is NaN.

# %%
batched = count(jax.vmap(root_cond), xs)
assert "cond" not in batched and batched["sqrt"] == 1 and batched["select_n"] >= 1
assert batched["stop_gradient"] == 2  # one for each branch
apply_if = lambda p, x: jax.lax.cond(p, jnp.sin, jnp.cos, x)
assert "cond" in count(jax.vmap(apply_if, in_axes=(None, 0)), True, xs)
assert jax.vmap(jax.grad(root_cond))(xs).tolist() == [0, 0, 0.25]
assert np.isnan(jax.vmap(jax.grad(root))(xs)[1])

# %% [markdown]
# ## 4. Composition: `jit(grad(vmap(f)))` [S1-039] (must-read)
# **Claim.** Every transformation returns an ordinary function, so they stack in any order, and the order is the
# meaning. `grad` outside: one gradient, of the mean of the losses. `vmap` outside: one gradient an example. Their mean
# is the former, because differentiation is linear. `jit` may stand anywhere; outermost it leaves XLA the most.

# %%
def loss_one(params, image, label):
    return model.cross_entropy(model.forward_one(params, image)[None], label[None])[0]

losses_of = jax.vmap(loss_one, in_axes=(None, 0, 0))
mean_loss = lambda params, images, labels: losses_of(params, images, labels).mean()
grad_of_batch = jax.jit(jax.grad(mean_loss))(params, *batch)
per_example_grads = jax.jit(jax.vmap(jax.grad(loss_one), in_axes=(None, 0, 0)))
grads_each = per_example_grads(params, *batch)
assert grad_of_batch[0]["w"].shape == (784, 32) and grads_each[0]["w"].shape == (16, 784, 32)
assert close(jax.tree.map(lambda g: g.mean(0), grads_each), grad_of_batch)
assert close(grad_of_batch, grads)  # of model.loss_fn, written for batches

# %% [markdown]
# With respect to the examples themselves the order even commutes: each loss depends on its own image only.

# %%
grad_then_vmap = jax.jit(jax.vmap(jax.grad(loss_one, argnums=1), in_axes=(None, 0, 0)))(params, *batch)
vmap_then_grad = jax.jit(jax.grad(lambda images: losses_of(params, images, batch[1]).sum()))(batch[0])
jit_inside = jax.vmap(jax.jit(jax.grad(loss_one, argnums=1)), in_axes=(None, 0, 0))(params, *batch)
assert close(grad_then_vmap, vmap_then_grad) and close(jit_inside, grad_then_vmap)

# %% [markdown]
# ### Per-example gradients, and clipping each [S2-024] (must-read)
# **Claim.** `vmap(grad(loss_one))` gives what the gradient of a batch hides: how much each example pulls. After some
# training most pull little and a few pull hard. It costs memory, B times the parameters, so take small batches.

# %%
@jax.jit
def norms_of(grads):
    """Norm of each example's gradient over the whole tree: leaves (B, ...) -> (B,)."""
    return jnp.sqrt(sum((g**2).reshape(len(g), -1).sum(1) for g in jax.tree.leaves(grads)))

norms = norms_of(per_example_grads(trained, images[:128], labels[:128]))
counts, edges = np.histogram(norms, bins=8)
for number, low, high in zip(counts, edges, edges[1:]):
    print(f"  norm {low:5.2f} to {high:5.2f}  {'#' * int(number)}")
assert norms.shape == (128,) and counts.sum() == 128
assert np.max(norms) > 2 * np.median(norms)

# %% [markdown]
# **Claim.** Differentially private SGD (Abadi et al. 2016) scales each example's gradient to norm at most C before it
# averages, so that no single example contributes more than C / B to the mean; then it adds noise (left out here).
# Clipping the *mean* does not bound that. One line of `vmap` equals the loop over examples.

# %%
@jax.jit
def clipped_mean(grads, C):
    """Mean over the examples of g · min(1, C / ‖g‖). grads: leaves (B, ...); norms are over the whole tree."""
    norms = norms_of(grads)
    factors = C / jnp.maximum(norms, C)  # 1 where the norm is below C; nothing divides by 0
    return jax.tree.map(lambda g: jnp.tensordot(factors, g, 1) / len(factors), grads)

C = np.median(norms_of(grads_each))  # clips half of the batch
private = clipped_mean(grads_each, C)
grad_one, clipped = jax.jit(jax.grad(loss_one)), []
for image, label in zip(*batch):
    flat, unravel = ravel_pytree(grad_one(params, image, label))
    clipped.append(flat * min(1.0, C / np.linalg.norm(flat)))
assert close(private, unravel(sum(clipped) / len(clipped)))
steep = clipped_mean(jax.tree.map(lambda g: 1e6 * g, grads_each), C)
assert np.linalg.norm(ravel_pytree(steep)[0]) <= 1.0001 * C  # the bound holds, however steep the losses

# %% [markdown]
# ## Exercise 1
# Write `safe_normalize(v)`: v / ‖v‖, and the zero vector at 0, where its gradient (the Jacobian) is 0, not NaN.

# %%
# Your answer
def safe_normalize(v):
    raise NotImplementedError

# %%
# Self-check (runs on your answer once it is written, on the solution until then)
def check_safe_normalize(f):
    v = jnp.array([3.0, 4.0])
    assert np.allclose(f(v), [0.6, 0.8]), "(3, 4) has norm 5"
    assert np.allclose(f(v * 1e-6), [0.6, 0.8]), "a short vector is normalised like a long one"
    want = (np.eye(2) - np.outer(v, v) / 25) / 5
    assert np.allclose(jax.jacobian(f)(v), want, atol=1e-6), "away from 0 the Jacobian is (I - v v^T / |v|^2) / |v|"
    assert np.array_equal(f(jnp.zeros(2)), np.zeros(2)), "the zero vector stays zero"
    assert np.array_equal(jax.jacobian(f)(jnp.zeros(2)), np.zeros((2, 2))), "at 0 the Jacobian is 0, not NaN"

# %% [markdown]
# ## Exercise 2
# Write `pairwise(f, xs, ys)`: the matrix of f(xs[i], ys[j]), (len(xs), len(ys)), for a function f of two single
# examples, with `vmap` alone.

# %%
# Your answer
def pairwise(f, xs, ys):
    raise NotImplementedError

# %%
# Self-check
def check_pairwise(f):
    xs, ys = rng.normal(size=(4, 3)), rng.normal(size=(5, 3))
    got = f(lambda x, y: jnp.sqrt(((x - y) ** 2).sum()), xs, ys)
    want = [[np.linalg.norm(x - y) for y in ys] for x in xs]
    assert got.shape == (4, 5), f"4 x against 5 y give (4, 5), not {got.shape}: rows are the first argument's"
    assert np.allclose(got, want, rtol=1e-5), "entry [i, j] is f(xs[i], ys[j])"

# %% [markdown]
# ## Exercise 3
# Write `loss_grad_norms(params, images, labels)`, which returns in one pass, without computing a loss apart, the loss
# of each example (B,), the gradient of the mean loss (a tree like params), and each example's gradient norm (B,).

# %%
# Your answer
def loss_grad_norms(params, images, labels):
    raise NotImplementedError

# %%
# Self-check
def check_loss_grad_norms(f):
    images, labels = batch
    losses, grads, norms = jax.jit(f)(params, images, labels)
    assert np.allclose(losses, losses_of(params, images, labels), rtol=1e-5), "losses: one an example"
    assert close(grads, grad_of_batch), "the gradient of the mean is the mean of the gradients"
    alone = [np.linalg.norm(ravel_pytree(grad_one(params, image, label))[0]) for image, label in zip(images, labels)]
    assert np.allclose(norms, alone, rtol=1e-4), "the norm goes over all leaves together: the root of a sum of squares"
    forward = count(losses_of, params, images, labels)["dot_general"]
    assert count(f, params, images, labels)["dot_general"] == 3 * forward - 1, "one forward and one backward pass"

# %% [markdown]
# ## Rules
# | you want | write | because |
# |---|---|---|
# | loss and gradient | `value_and_grad` | the forward pass is needed anyway |
# | logits or accuracy as well | `has_aux=True` | ((value, aux), grads): no second forward pass |
# | J v, or uᵀ J | `jvp`, or `vjp` | one pass; building J takes one for each input or output |
# | J itself | `jacfwd` for few inputs, `jacrev` for few outputs | a pass for each input, or for each output |
# | a function that is not defined everywhere | double `where` | both branches are differentiated |
# | a batch | the function for one example, `vmap` | no axis to broadcast by mistake, the same program |
# | a branch on batched data | `jnp.where`, or `cond`, which runs both sides too | one tracer stands for all examples |
# | a gradient for each example | `vmap(grad(loss_one))` | its mean is the batch's gradient; memory is B times as much |
# | trust in a gradient | float64 finite differences | a gradient wrong by 0.1 % still trains |

# %% [markdown]
# ## Solutions

# %%
def safe_normalize_solution(v):
    squared = (v * v).sum()
    return safe_apply(lambda s: v / jnp.sqrt(s), squared, squared > 0, jnp.zeros_like(v))

def pairwise_solution(f, xs, ys):
    return jax.vmap(jax.vmap(f, in_axes=(None, 0)), in_axes=(0, None))(xs, ys)

def loss_grad_norms_solution(params, images, labels):
    losses, grads = jax.vmap(jax.value_and_grad(loss_one), in_axes=(None, 0, 0))(params, images, labels)
    return losses, jax.tree.map(lambda g: g.mean(0), grads), norms_of(grads)

# %%
try:
    check_safe_normalize(safe_normalize)
except NotImplementedError:
    check_safe_normalize(safe_normalize_solution)

# %%
try:
    check_pairwise(pairwise)
except NotImplementedError:
    check_pairwise(pairwise_solution)

# %%
try:
    check_loss_grad_norms(loss_grad_norms)
except NotImplementedError:
    check_loss_grad_norms(loss_grad_norms_solution)
