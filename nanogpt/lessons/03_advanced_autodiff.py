# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---
# %% [markdown]
# # Advanced autodiff: what `jax.grad` does, how to replace it, how to trust the replacement [S2-100]
#
# After this lesson you can take `jax.grad` apart into two steps, choose between forward and reverse mode by counting,
# write a gradient by hand and say what it saves, find the error that a float32 check lets through, and predict which
# loops and which "non-differentiable" operations have a gradient.
#
# It uses this project's `model.py` (`layer_norm`, `mlp`, `matmul`, `attention_reference`, `loss_fn`) and, from
# `common/`, the finite differences behind `gradcheck.py` and XLA's counts of FLOPs and bytes. Measured on JAX 0.12;
# all of it holds on 0.10 too.
#
# Letters: **N** rows, **D** width, **n** inputs and **m** outputs of a function, **L** layers, **V** vocabulary.

# %%
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent if "__file__" in globals() else Path.cwd()
sys.path[:0] = [str(PROJECT), str(PROJECT.parent)]  # the project's files, and common/ beside it

# %%
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.test_util import check_grads

import model
from common import gradcheck
from common.profiling import cost


def raised(f, *args):
    """The exception that f(*args) raises, or None."""
    try:
        f(*args)
    except Exception as error:
        return error


def primitives(f, *args):
    """Names of the primitives in f's jaxpr; a jit within it is looked into, not named."""
    def names(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("jit", "pjit"):
                yield from names(eqn.params["jaxpr"].jaxpr)
            else:
                yield eqn.primitive.name
    return set(names(jax.make_jaxpr(f)(*args).jaxpr))


def counted(f, *args):
    """XLA's {"flops", "bytes"} for f(*args) and the median "ms" of five runs; and the value."""
    compiled = jax.jit(f).lower(*args).compile()
    value, seconds = compiled(*args), []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        seconds.append(time.perf_counter() - began)
    return {**cost(compiled), "ms": 1e3 * statistics.median(seconds)}, value


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)

# %% [markdown]
# ## Reverse mode is linearize + transpose [S2-101] (must-read)
# A derivative is a linear map. JAX has rules for that map in one direction only, *forward* (the JVP of each
# primitive). Reverse mode is made from it:
# ```
#   x ─────────► f ────────► y      1. run f once, keep the residuals r (all that the derivative needs to know of x)
#                │ r
#   dx ───────► L_r ───────► dy     2. linearize: what is left of f is linear in dx; its coefficients are r
#
#   x̄  ◄─────── L_rᵀ ◄────── ȳ      3. transpose: the same steps, backwards; no new calculus
# ```
# **Claim.** The linear part of LayerNorm holds no square root any more, only sums, differences and products with
# constants. Transposed and applied to 1, it is the gradient.

# %%
N, D = 4, 8
x, weights = normal(0, N, D), normal(1, N, D)
scale, bias = 1 + 0.1 * normal(2, D), 0.1 * normal(3, D)


def scalar(x):
    return (model.layer_norm(x, scale, bias) * weights).sum()


y, linear_part = jax.linearize(scalar, x)
print("LayerNorm:     ", *sorted(primitives(scalar, x)))
print("its derivative:", *sorted(primitives(linear_part, x)))
LINEAR = {"add", "add_any", "sub", "neg", "mul", "div", "reduce_sum", "broadcast_in_dim", "reshape"}
assert "rsqrt" in primitives(scalar, x)
assert primitives(linear_part, x) <= LINEAR

dx, dz = normal(4, N, D), normal(5, N, D)
along_dx, along_dz, along_both = jax.jit(jax.vmap(linear_part))(jnp.stack([dx, dz, 2 * dx - 3 * dz]))
assert np.isclose(along_both, 2 * along_dx - 3 * along_dz, atol=1e-5)
[gradient] = jax.jit(jax.linear_transpose(linear_part, x))(1.0)
assert np.allclose(gradient, jax.jit(jax.grad(scalar))(x), atol=1e-6)

# %% [markdown]
# `mul` and `div` stand in the list because one of their two operands is a residual: a constant. For GELU, which acts
# on each entry alone, nothing else is left: a multiplication by its slope, written as products and sums.
#
# **Claim.** `jax.linear_transpose` checks this: a function that is not linear is refused.

# %%
assert "tanh" in primitives(jax.nn.gelu, x)
assert primitives(jax.linearize(jax.nn.gelu, x)[1], x) <= {"mul", "add", "add_any"}

for nonlinear, why in ((lambda x: x * x, "x * x has x in both operands"), (jnp.sin, "sin has no transpose")):
    error = raised(lambda: jax.linear_transpose(nonlinear, 1.0)(1.0))
    print(f"{why}: {type(error).__name__}")
    assert isinstance(error, (AssertionError, NotImplementedError))

# %% [markdown]
# **Claim.** A product with a fixed matrix is its own linear part, so its VJP is a product with the transpose. That is
# what `model.matmul` writes out by hand, in order to choose how a CPU computes it.

# %%
w, g = normal(6, D, 3), normal(7, N, 3)
by_hand = jax.vjp(model.matmul, x, w)[1](g)
assert np.allclose(by_hand[0], jax.linear_transpose(lambda x: x @ w, x)(g)[0], atol=1e-6)
assert np.allclose(by_hand[1], jax.linear_transpose(lambda w: x @ w, w)(g)[0], atol=1e-6)

# %% [markdown]
# A function with a custom VJP has a rule for reverse mode only, and that closes forward mode. `model.py` therefore
# keeps the plain form beside it: `attention_reference` beside `attention`.

# %%
q = normal(8, 1, 2, 4, 4)
forward_mode = lambda f: jax.jit(lambda q: jax.jvp(lambda q: f(q, q, q), (q,), (q,))).lower(q)
error = raised(forward_mode, model.attention)
print(f"{type(error).__name__}: {error}")
assert isinstance(error, TypeError) and "forward-mode autodiff (jvp) to a custom_vjp function" in str(error)
assert raised(forward_mode, model.attention_reference) is None

# %% [markdown]
# ## jacfwd, jacrev, jvp or vjp? [S2-044] (must-read)
# The Jacobian of f: Rⁿ → Rᵐ is a table of m × n numbers. One JVP gives one **column**, one VJP one **row**, and each
# costs a small multiple of f itself:
# ```
#            n columns                 jacfwd = n JVPs      cost ≈ n · c · cost(f)
#         ┌─────────────┐              jacrev = m VJPs      cost ≈ m · c · cost(f)
#  m rows │      J      │ ◄── VJP      a loss: m = 1        one VJP, whatever n: jax.grad
#         └─────────────┘
#                ▲ JVP
# ```
# **Claim.** `jacfwd == jacrev`, and XLA's FLOP count follows the smaller side. The function is the model's own MLP
# with a plain linear layer (`mlp` takes it as an argument; `model.linear` has no forward mode).

# %%
def mlp_of(n, m, hidden=32):
    p = {"w_fc": normal(1, n, hidden) / n**0.5, "b_fc": jnp.zeros(hidden),
         "w_out": normal(2, hidden, m) / hidden**0.5, "b_out": jnp.zeros(m)}
    return lambda x: model.mlp(x[None], p, dense=lambda h, w, b: h @ w + b)[0]


print("    n     m |  FLOPs of f   of jacfwd   of jacrev | ms of jacfwd   of jacrev")
for n, m in ((256, 4), (4, 256)):
    f, at = mlp_of(n, m), normal(3, n)
    (once, _), (columns, by_columns), (rows, by_rows) = (counted(g, at) for g in (f, jax.jacfwd(f), jax.jacrev(f)))
    own, forward, reverse = once["flops"], columns["flops"], rows["flops"]
    print(f"{n:5d} {m:5d} | {own:11,.0f} {forward:11,.0f} {reverse:11,.0f} | {columns['ms']:12.3f} {rows['ms']:11.3f}")
    assert np.allclose(by_columns, by_rows, atol=1e-5) and by_rows.shape == (m, n)
    assert (forward > 20 * reverse) == (n > m) and (reverse > 20 * forward) == (m > n)  # 64 times as many passes
    assert n / 4 < forward / own < 2 * n and m / 4 < reverse / own < 3 * m

# %% [markdown]
# | you want | use | passes |
# |---|---|---|
# | the gradient of a loss | `jax.grad` | 1 VJP |
# | the change along one direction | `jax.jvp` | 1 JVP |
# | one row, or a weighted sum of rows, of J | `jax.vjp` | 1 VJP |
# | all of J, n ≤ m | `jax.jacfwd` | n JVPs |
# | all of J, n > m | `jax.jacrev` | m VJPs |
# | a Hessian times a vector | `jvp` of `grad` | 1 |

# %% [markdown]
# ## Building J when you only need J v [S2-045] (must-read)
# **Claim.** `jax.jacfwd(f)(x) @ v` computes n columns in order to add them up; `jax.jvp` never builds them. For one
# row of LayerNorm with n = m = 1000 that is a thousandfold in FLOPs, and some hundredfold in bytes.

# %%
n = 1000
at, v = normal(1, n), normal(2, n)
row_norm = lambda x: model.layer_norm(x[None], jnp.ones(n), jnp.zeros(n))[0]
product = lambda x, v: jax.jvp(row_norm, (x,), (v,))[1]
whole = lambda x, v: jax.jacfwd(row_norm)(x) @ v
(cheap, got), (dear, want) = counted(product, at, v), counted(whole, at, v)
for name, c in (("jvp", cheap), ("jacfwd @ v", dear)):
    print(f"{name:12} {c['flops']:12,.0f} FLOPs {c['bytes']:12,.0f} bytes")
assert np.allclose(got, want, atol=1e-5)
assert dear["flops"] > 100 * cheap["flops"] and dear["bytes"] > 100 * cheap["bytes"]

# %% [markdown]
# **Claim.** The same holds one derivative higher: H v is the JVP of the gradient, no Hessian needed.

# %%
energy = lambda x: (row_norm(x) ** 4).sum()
hvp = lambda x, v: jax.jvp(jax.grad(energy), (x,), (v,))[1]
with_hessian = lambda x, v: jax.hessian(energy)(x) @ v
(cheap, got), (dear, want) = counted(hvp, at, v), counted(with_hessian, at, v)
print(f"{'hvp':12} {cheap['flops']:12,.0f} FLOPs\n{'hessian @ v':12} {dear['flops']:12,.0f} FLOPs")
assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()
assert dear["flops"] > 100 * cheap["flops"]

# %% [markdown]
# **Claim.** `jvp` of `grad` also passes through a custom VJP: the inner `grad` takes the rule, so that forward mode
# meets only what the rule consists of. If the rule's forward half calls the *decorated* function again, forward mode
# meets that: call the plain function there. Reverse mode over reverse mode works in either case.

# %%
def square(x):
    return x * x


def square_with(inner):
    """square with a custom VJP whose forward half calls `inner`, or, for None, the decorated function itself."""
    f = jax.custom_vjp(square)
    f.defvjp(lambda x: ((inner or f)(x), x), lambda x, g: (2 * x * g,))
    return f


for inner, error_type in ((square, type(None)), (None, TypeError)):
    f = square_with(inner)
    error = raised(lambda: jax.jvp(jax.grad(f), (3.0,), (1.0,)))
    print(f"fwd calls {'square' if inner else 'itself'}: jvp of grad gives {error or 'the right value'}")
    assert type(error) is error_type
    assert jax.grad(jax.grad(f))(3.0) == 2.0
assert jax.jvp(jax.grad(square_with(square)), (3.0,), (1.0,)) == (6.0, 2.0)

# %% [markdown]
# ## LayerNorm, forward and backward by hand [S1-021] (must-read)
# With x̂ = (x - mean) · r and r = 1/√(var + ε), a row of the output is y = x̂ · scale + bias.
#
# **Claim.** NumPy's four lines, `model.layer_norm` and Flax's `nnx.LayerNorm` agree to 1e-5; before scale and bias a
# row has mean 0 and variance 1 (short of it by ε/var).

# %%
def layer_norm_numpy(x, scale, bias, eps=1e-5):
    mean = x.mean(-1, keepdims=True)
    var = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(var + eps) * scale + bias


flax_norm = nnx.LayerNorm(D, epsilon=1e-5, rngs=nnx.Rngs(0))  # its default epsilon is 1e-6
flax_norm.scale[...], flax_norm.bias[...] = scale, bias
ours = model.layer_norm(x, scale, bias)
assert np.abs(ours - layer_norm_numpy(np.asarray(x), np.asarray(scale), np.asarray(bias))).max() < 1e-5
assert np.abs(ours - flax_norm(x)).max() < 1e-5
plain = model.layer_norm(x, jnp.ones(D), jnp.zeros(D))
assert np.abs(plain.mean(-1)).max() < 1e-6 and np.abs(plain.var(-1) - 1).max() < 1e-4

# %% [markdown]
# **The backward pass.** Write ḡ = g · scale for the cotangent of x̂. Every x_j of a row moves x̂_i in three ways:
# directly (r, if i = j), through the mean (-r/D) and through r itself (-r x̂_i x̂_j / D). Summed up, with means over
# the row:
# ```
#   dx     = r · ( ḡ  -  mean(ḡ)  -  x̂ · mean(ḡ · x̂) )      ḡ without its components along 1 and along x̂:
#   dscale = Σ_rows g · x̂                                     LayerNorm doesn't see shifts and scalings of a row
#   dbias  = Σ_rows g
# ```
# **Claim.** It equals `jax.grad`: to 2e-6 in float32, to 1e-13 in float64.
#
# `saved` chooses what the forward pass keeps: the input (x, mean, r) or the normalised rows (x̂, r).

# %%
@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def layer_norm(x, scale, bias, saved="input", eps=1e-5):
    return layer_norm_fwd(x, scale, bias, saved, eps)[0]


def layer_norm_fwd(x, scale, bias, saved, eps):  # the arguments in their own order
    mean = x.mean(-1, keepdims=True)
    r = lax.rsqrt(x.var(-1, keepdims=True) + eps)
    normalised = (x - mean) * r
    return normalised * scale + bias, (x, mean, r, scale) if saved == "input" else (normalised, r, scale)


def layer_norm_bwd(saved, eps, residuals, g):  # the nondiff arguments first
    *head, r, scale = residuals
    normalised = (head[0] - head[1]) * r if saved == "input" else head[0]
    d = g * scale
    dx = r * (d - d.mean(-1, keepdims=True) - normalised * (d * normalised).mean(-1, keepdims=True))
    return dx, (g * normalised).sum(0), g.sum(0)


layer_norm.defvjp(layer_norm_fwd, layer_norm_bwd)


def gradients(norm, *args):
    return jax.jit(jax.grad(lambda *a: jnp.sin(norm(*a)).sum(), argnums=(0, 1, 2)))(*args)


def worst(got, want):
    return max(float(jnp.abs(a - b).max()) for a, b in zip(got, want))


with jax.enable_x64(True):
    wide = [a.astype(jnp.float64) for a in (x, scale, bias)]
    for args, tolerance in (((x, scale, bias), 2e-6), (wide, 1e-13)):
        want = gradients(model.layer_norm, *args)
        for saved in ("input", "normalised"):
            error = worst(gradients(lambda *a: layer_norm(*a, saved), *args), want)
            print(f"{args[0].dtype}, saved {saved:10}: largest difference to jax.grad {error:.0e}")
            assert error < tolerance

# %% [markdown]
# ## Signature, residuals, nondiff_argnums [S2-102] (must-read)
# ```
#   f  (x, scale, bias, saved, eps)              nondiff_argnums=(3, 4)
#   fwd(x, scale, bias, saved, eps)        -> y, residuals
#   bwd(saved, eps, residuals, g)          -> (dx, dscale, dbias)      one cotangent per differentiable argument
# ```
# **Claim.** The residuals are what is alive between the two passes, and you can weigh them: they are the leaves of the
# function that `jax.vjp` returns. JAX, left to itself, saves three arrays of x's size for LayerNorm. By hand it is
# one; and where that one is x itself, it costs nothing, since the caller holds it anyway.

# %%
big = [normal(0, 256, 128), jnp.ones(128), jnp.zeros(128)]
table = {"JAX's own": model.layer_norm, "x, mean, r": layer_norm,
         "normalised, r": lambda *a: layer_norm(*a, "normalised")}
print("residuals       in units of x   of them not an argument")
new = {}
for name, norm in table.items():
    held = {a.unsafe_buffer_pointer() for a in big}
    leaves = jax.tree.leaves(jax.vjp(norm, *big)[1])
    total = sum(leaf.nbytes for leaf in leaves) / big[0].nbytes
    new[name] = sum(a.nbytes for a in leaves if a.unsafe_buffer_pointer() not in held) / big[0].nbytes
    print(f"{name:15} {total:13.2f} {new[name]:25.2f}")
assert new["JAX's own"] > 2.9 and 0.9 < new["normalised, r"] < 1.1 and new["x, mean, r"] < 0.05

# %% [markdown]
# Within one compiled program XLA has the last word: it may recompute what is cheap. Where it can't, as between the two
# loops that a differentiated `scan` becomes, the residuals are stacked, and the choice shows in the temporaries.

# %%
def stacked_norms(norm):
    def loss(x, scales):
        return lax.scan(lambda x, scale: (x + norm(x, scale, big[2]), None), x, scales)[0].sum()
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(big[0], jnp.ones((12, 128))).compile()
    return compiled.memory_analysis().temp_size_in_bytes / 12 / big[0].nbytes


theirs, ours = stacked_norms(model.layer_norm), stacked_norms(layer_norm)
print(f"temporaries of 12 layers, in units of x a layer: JAX's own {theirs:.2f}, by hand {ours:.2f}")
assert ours < theirs / 2

# %% [markdown]
# **Claim.** The three errors of a custom VJP that one meets: a tracer in a nondiff position, a tuple of the wrong
# length, a cotangent of the wrong shape. `nondiff_argnums` is for what is known when the program is traced (a
# function, a string, a flag); a number that `jit`, `grad` or `vmap` may trace must be an ordinary argument.

# %%
traced_eps = raised(lambda: jax.jit(lambda eps: layer_norm(x, scale, bias, "input", eps))(1e-5))
print(f"{type(traced_eps).__name__}: {str(traced_eps).splitlines()[0][:112]} ...")
assert isinstance(traced_eps, jax.errors.UnexpectedTracerError)
assert "in a position indicated by nondiff_argnums" in str(traced_eps)


def product_rule(bwd):
    f = jax.custom_vjp(lambda a, b: a * b)
    f.defvjp(lambda a, b: (a * b, (a, b)), bwd)
    return jax.grad(f, argnums=(0, 1))


short = raised(product_rule(lambda r, g: (g * r[1],)), 2.0, 3.0)
assert isinstance(short, TypeError) and "must produce a tuple of length equal to the number of arguments" in str(short)
misshaped = raised(product_rule(lambda r, g: (g * r[1], jnp.ones(3))), 2.0, 3.0)
assert isinstance(misshaped, ValueError) and "the shapes do not match" in str(misshaped)
assert product_rule(lambda r, g: (g * r[1], g * r[0]))(2.0, 3.0) == (3.0, 2.0)

# %% [markdown]
# **Claim.** An argument without a derivative (token ids) still takes its place in bwd's tuple: return `None` for it.
# The embedding by hand: rows are looked up in the forward pass, and *added* to in the backward pass, as a token may
# occur more than once.

# %%
@jax.custom_vjp
def lookup(table, tokens):
    return table[tokens]


lookup.defvjp(lambda table, tokens: (table[tokens], (tokens, table.shape)),
              lambda residuals, g: (jnp.zeros(residuals[1]).at[residuals[0]].add(g), None))
embedding, tokens = normal(9, 5, 3), jnp.array([1, 1, 4])
by_hand, by_jax = (jax.grad(lambda t: jnp.sin(f(t, tokens)).sum())(embedding) for f in (lookup, lambda t, i: t[i]))
assert np.array_equal(by_hand, by_jax)
assert by_hand.any(1).tolist() == [False, True, False, False, True]

# %% [markdown]
# ## check_grads, and what its float32 misses [S2-103] (must-read)
# `jax.test_util.check_grads` compares with finite differences; `order=2` also checks the derivative of the rule, and
# a custom VJP needs `modes=["rev"]`.
#
# **Claim.** In float32 it tolerates 2e-3: a gradient that is 0.5 % too large fails, one 0.05 % too large passes.

# %%
def square_rule(factor):
    f = jax.custom_vjp(square)
    f.defvjp(lambda x: (square(x), x), lambda x, g: (factor * 2 * x * g,))
    return f


def scaled_norm(factor):
    """LayerNorm with a VJP of its own: the right gradient times factor."""
    f = jax.custom_vjp(lambda x: model.layer_norm(x, scale.astype(x.dtype), bias.astype(x.dtype)))
    f.defvjp(lambda x: jax.vjp(lambda x: model.layer_norm(x, scale.astype(x.dtype), bias.astype(x.dtype)), x),
             lambda pull, g: (factor * pull(g)[0],))
    return jax.jit(f)


def passes(f, *args, order=1, **how):
    error = raised(partial(check_grads, f, args, order=order, modes=["rev"], **how))
    assert error is None or isinstance(error, AssertionError), error
    return error is None


point = jnp.float32(1.5)
assert passes(square_rule(1.0), point, order=2)
assert not passes(square_rule(1.005), point)
assert passes(square_rule(1.0005), point)  # wrong, and passes
assert passes(scaled_norm(1.0005), x)  # wrong, and passes

# %% [markdown]
# **Claim.** float32 also refuses what is right, where a sum is large: its rounding, divided by the step, is the error.
# Both ends are mended by float64. There the default tolerance is 1e-5; `common.gradcheck`, with which this project's
# `gradcheck.py` works, asks for 1e-7 and sees an error of one in a million.

# %%
total = lambda x: jnp.sum(x**2)
assert not passes(total, jnp.linspace(0.0, 1000.0, 1000))  # right, and fails

with jax.enable_x64(True):
    x64 = x.astype(jnp.float64)
    assert passes(total, jnp.linspace(0.0, 1000.0, 1000))
    assert not passes(scaled_norm(1.0005), x64)
    assert passes(jax.jit(lambda *a: layer_norm(*a)), *wide, order=2, atol=1e-7, rtol=1e-7)
    for factor, right in ((1.0, True), (1 + 1e-6, False)):
        [check] = gradcheck.vjp(scaled_norm(factor), x64, key=jax.random.key(1), name=f"gradient times {factor}")
        print(check)
        assert check.ok == right

# %% [markdown]
# **Claim.** Two errors that say little about their cause: forward mode, which `check_grads` tries by default, stops
# at a custom VJP, and a Python float has no shape for it.

# %%
assert isinstance(raised(lambda: check_grads(square_rule(1.0), (point,), order=1)), TypeError)
assert isinstance(raised(lambda: check_grads(square_rule(1.0), (1.5,), order=1, modes=["rev"])), AttributeError)

# %% [markdown]
# ## A JVP rule must be linear in the tangent [S2-104] (must-read)
# `custom_jvp` writes forward mode, and reverse mode comes from it by transposition: one rule serves both, as long as
# it is linear in the tangent t. Nobody checks that in forward mode.
#
# **Claim.** A rule with t² instead of t gives a wrong number silently: along t = 2 it says 2.16 for sin at 1, where
# the derivative is 2 cos 1 = 1.08. Only reverse mode, which must transpose t², refuses. A constant in the rule is
# worse: wrong in forward mode, and in reverse mode dropped without a word.

# %%
def sin_rule(tangent):
    f = jax.custom_jvp(jnp.sin)
    f.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), tangent(jnp.cos(primals[0]), tangents[0])))
    return f


def along(f):
    return float(jax.jvp(f, (1.0,), (2.0,))[1])


right, squared, shifted = (sin_rule(rule) for rule in (lambda c, t: c * t, lambda c, t: c * t**2,
                                                       lambda c, t: c * t + 1))
print(f"along t = 2: c·t {along(right):.2f}, c·t² {along(squared):.2f}, c·t + 1 {along(shifted):.2f}")
assert round(along(right), 2) == 1.08 and round(along(squared), 2) == 2.16 and round(along(shifted), 2) == 2.08
assert np.allclose(jax.grad(right)(1.0), jnp.cos(1.0))
error = raised(jax.grad(squared), 1.0)
print(f"grad of c·t²: {type(error).__name__}: {error}")
assert isinstance(error, NotImplementedError) and "Transpose rule" in str(error) and "integer_pow" in str(error)
assert np.allclose(jax.grad(shifted)(1.0), jnp.cos(1.0))

# %% [markdown]
# A test for any rule, before it is used: `jax.linear_transpose` of its tangent part must work, and the rule must be 0
# for t = 0. `check_grads` in forward mode catches all three.

# %%
for f, ok in ((right, True), (squared, False), (shifted, False)):
    assert (raised(lambda: check_grads(f, (jnp.float32(1.0),), order=1, modes=["fwd"])) is None) == ok
assert along(right) == 2 * float(jax.jvp(right, (1.0,), (1.0,))[1])
assert jax.jvp(shifted, (1.0,), (0.0,))[1] != 0

# %% [markdown]
# ## Differentiability of control flow, each cell run [S2-105] (must-read)
# Reverse mode runs a loop backwards, so it must know how many residuals to keep: a `scan` knows its length, a `while`
# doesn't. Forward mode carries the tangent along and needs to know nothing.
#
# **Claim.** Everything below computes x³ and has a JVP and a vmap; `while_loop`, and a `fori_loop` whose bound is
# traced (it *is* a while loop), have no gradient.

# %%
CUBES = {
    "scan": lambda x: lax.scan(lambda c, _: (c * x, None), x, None, length=2)[0],
    "cond": lambda x: lax.cond(x > 0, lambda x: x**3, lambda x: x, x),
    "switch": lambda x: lax.switch(jnp.int32(x > 0), [lambda x: x, lambda x: x**3], x),
    "fori, static bound": lambda x: lax.fori_loop(0, 2, lambda i, c: c * x, x),
    "fori, traced bound": lambda x: lax.fori_loop(0, jnp.int32(x > 0) * 2, lambda i, c: c * x, x),
    "while": lambda x: lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, s[1] * x), (0, x))[1],
}


def cell(run, want):
    """Runs one cell of the table: "ok" if the result is `want`, else the error's name."""
    error = raised(run)
    if error is None:
        assert np.allclose(run(), want)
    return "ok" if error is None else type(error).__name__


print(f"{'':20}{'becomes':9}{'jvp':6}{'vmap':6}grad")
cube_at = jnp.float32(1.5)
for name, f in CUBES.items():
    becomes = min(primitives(f, cube_at) & {"scan", "while", "cond"})
    forward = cell(lambda: jax.jit(lambda x: jax.jvp(f, (x,), (1.0,))[1])(cube_at), 6.75)
    batched = cell(lambda: jax.jit(jax.vmap(f))(jnp.array([1.5, 2.0])), [3.375, 8.0])
    reverse = cell(lambda: jax.jit(jax.grad(f))(cube_at), 6.75)
    print(f"{name:20}{becomes:9}{forward:6}{batched:6}{reverse}")
    assert forward == batched == "ok"
    assert reverse == ("ValueError" if becomes == "while" else "ok")

error = raised(jax.grad(CUBES["while"]), cube_at)
print(error)
assert "Reverse-mode differentiation does not work for lax.while_loop or lax.fori_loop with dynamic" in str(error)

# %% [markdown]
# **Claim.** A bound that is a Python number is static, so a `fori_loop` can have a gradient in a notebook and lose it
# under `jit`, where its bound becomes an argument.

# %%
power = lambda x, n: lax.fori_loop(0, n, lambda i, c: c * x, jnp.float32(1))
assert jax.grad(power)(1.5, 3) == 6.75
assert isinstance(raised(jax.jit(jax.grad(power)), 1.5, 3), ValueError)

# %% [markdown]
# The repair where the number of steps is bounded: a `scan` of the largest length that does nothing once it is done.
# (Where it isn't, the result is often defined by an equation, and implicit differentiation applies.)

# %%
def power_of_at_most(x, n, longest=8):
    return lax.scan(lambda c, i: (jnp.where(i < n, c * x, c), None), jnp.float32(1), jnp.arange(longest))[0]


assert jax.jit(jax.grad(power_of_at_most))(1.5, 3) == 6.75

# %% [markdown]
# ## Operations "without" a derivative (optional)
# None of these raises unless integers come out or go in. A step function has the derivative 0 almost everywhere, and
# that is what JAX returns: silently, so training just doesn't move. Sorting is a permutation, and permutes gradients.
#
# **Claim.** The table's gradients at v = (0.3, 1.2, -0.5, 0.9).

# %%
v = jnp.array([0.3, 1.2, -0.5, 0.9])
GRADIENTS = {
    "max(v)": (jnp.max, [0, 1, 0, 0]),
    "v[argmax(v)]": (lambda v: v[jnp.argmax(v)], [0, 1, 0, 0]),
    "float(argmax(v))": (lambda v: jnp.argmax(v).astype(float), [0, 0, 0, 0]),
    "sum(round(v))": (lambda v: jnp.round(v).sum(), [0, 0, 0, 0]),
    "sum(v > 0)": (lambda v: (v > 0).astype(float).sum(), [0, 0, 0, 0]),
    "sort(v) · (0, 1, 2, 3)": (lambda v: jnp.sort(v) @ jnp.arange(4.0), [1, 3, 0, 2]),
    "top_k(v, 2) · (1, 10)": (lambda v: lax.top_k(v, 2)[0] @ jnp.array([1.0, 10.0]), [0, 1, 0, 10]),
    "sum(v[[0, 0, 2]])": (lambda v: v[jnp.array([0, 0, 2])].sum(), [2, 0, 1, 0]),
    "sum(stop_gradient(v) v)": (lambda v: (lax.stop_gradient(v) * v).sum(), [0.3, 1.2, -0.5, 0.9]),
    "sampled token": (lambda v: model.sample_token(v[None], jax.random.key(0), 1.0).astype(float)[0], [0, 0, 0, 0]),
}
for name, (f, want) in GRADIENTS.items():
    got = jax.jit(jax.grad(f))(v)
    print(f"{name:24}", got)
    assert np.allclose(got, want)

integer_out, integer_in = raised(jax.grad(jnp.argmax), v), raised(jax.grad(lambda i: v[i]), 1)
assert isinstance(integer_out, TypeError) and "real-valued outputs" in str(integer_out)
assert isinstance(integer_in, TypeError) and "valued inputs" in str(integer_in)

# %% [markdown]
# **Claim.** At a kink JAX takes a convention, and equal formulas may take different ones: a gradient check there
# compares conventions, not mathematics.

# %%
for f, want in ((jax.nn.relu, 0), (lambda x: jnp.maximum(x, 0.0), 0.5), (jnp.abs, 1), (jnp.sqrt, jnp.inf)):
    assert jax.grad(f)(0.0) == want
assert jax.grad(jnp.max)(jnp.ones(2)).tolist() == [0.5, 0.5]  # equal entries share

# %% [markdown]
# **The straight-through estimator** (Bengio et al. 2013) replaces the useless 0 by 1: the forward pass rounds, the
# backward pass pretends that it didn't. `stop_gradient` says it in one line: value round(v), derivative that of v.

# %%
straight_through = lambda v: v + lax.stop_gradient(jnp.round(v) - v)
assert np.allclose(straight_through(v), jnp.round(v))
assert np.array_equal(jax.grad(lambda v: straight_through(v).sum())(v), jnp.ones(4))

# %% [markdown]
# ## Exercise 1
# Write `rms_norm(x, scale)`, RMSNorm (Zhang & Sennrich 2019): y = x / sqrt(mean(x²) + 1e-6) · scale over the last
# axis of x (N, D), with a custom VJP by hand: `return` the result of a function that you define above the stub. Of
# x's size it may save one array.

# %%
# Your answer
def rms_norm(x, scale):
    raise NotImplementedError

# %%
# Self-check (runs on your answer once it is written, on the solution until then)
def check_rms_norm(f):
    def by_jax(x, scale):
        return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

    with jax.enable_x64(True):
        x = normal(1, 6, 5).astype(jnp.float64)
        scale = jnp.arange(1.0, 6.0)
        assert np.allclose(f(x, scale), by_jax(x, scale), rtol=1e-12), "the value is not RMSNorm's"
        grads = [jax.jit(jax.grad(lambda x, s: jnp.sin(g(x, s)).sum(), argnums=(0, 1)))(x, scale) for g in (f, by_jax)]
        assert np.allclose(grads[0][1], grads[1][1], rtol=1e-10), "dscale differs from jax.grad"
        assert np.allclose(grads[0][0], grads[1][0], rtol=1e-10), "dx differs from jax.grad: r depends on x, too"
        forward = raised(lambda: jax.jvp(lambda x: f(x, scale), (x,), (x,)))
    assert isinstance(forward, TypeError), "the gradient is JAX's, not yours: use jax.custom_vjp"
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(jax.vjp(f, big[0], big[1])[1])) / big[0].nbytes
    assert kept < 1.1, f"the residuals are {kept:.2f} times x"

# %% [markdown]
# ## Exercise 2
# Write `curvature(loss, x, v)`: vᵀ H v, H the Hessian of `loss` at x (both vectors), without ever making an n × n
# array. It must also work for a loss with a custom VJP whose forward half calls itself (as `square_with(None)`).

# %%
# Your answer
def curvature(loss, x, v):
    raise NotImplementedError

# %%
# Self-check
def check_curvature(f):
    x, v = normal(1, 50), normal(2, 50)
    cubic = lambda x: (x**3).sum() / 6
    assert np.allclose(f(cubic, x, v), (x * v * v).sum(), rtol=1e-4), "for Σ x³/6 it is Σ x v²"
    jaxpr = jax.make_jaxpr(lambda x, v: f(cubic, x, v))(x, v)
    assert "[50,50]" not in str(jaxpr), "an n × n array is made"
    closed = square_with(None)
    error = raised(lambda: f(lambda x: closed(x).sum(), x, v))
    assert error is None, f"not possible through such a custom VJP: {error}"
    assert np.allclose(f(lambda x: closed(x).sum(), x, v), 2 * (v * v).sum(), rtol=1e-4), "for Σ x² it is 2 Σ v²"

# %% [markdown]
# ## Exercise 3
# Write `quantise(x)`: x rounded to multiples of 1/8, with the *clipped* straight-through gradient, 1 where |x| ≤ 1 and
# 0 elsewhere. Forward mode must work, too.

# %%
# Your answer
def quantise(x):
    raise NotImplementedError

# %%
# Self-check
def check_quantise(f):
    x = jnp.array([-1.7, -0.55, 0.3, 0.98, 2.2])
    assert np.allclose(f(x), jnp.round(8 * x) / 8), "the value is x rounded to eighths, inside and outside of [-1, 1]"
    inside = jnp.array([0.0, 1.0, 1.0, 1.0, 0.0])
    assert np.array_equal(jax.grad(lambda x: f(x).sum())(x), inside), "the gradient is 1 inside, 0 outside"
    error = raised(lambda: jax.jvp(f, (x,), (x,)))
    assert error is None, f"forward mode: {error}"
    assert np.allclose(jax.jvp(f, (x,), (3 * x,))[1], 3 * x * inside), "along t it is t inside, 0 outside"

# %% [markdown]
# ## Rules
# | rule | because |
# |---|---|
# | reverse mode = linearize, then transpose | the linear part has no nonlinear primitive left |
# | few inputs: `jacfwd`; few outputs: `jacrev`; one direction: `jvp`; a loss: `grad` | a pass per column or per row |
# | never build J or H to multiply it with a vector | a thousand times the FLOPs at n = 1000 |
# | inside `fwd` call the plain function | `jvp` of `grad` then works through the rule |
# | weigh the residuals: `jax.tree.leaves(jax.vjp(f, *args)[1])` | JAX saves 3 arrays for LayerNorm, by hand it is 1 |
# | `nondiff_argnums` only for what is never traced | a tracer there raises UnexpectedTracerError |
# | check a rule in float64, order 2, rtol 1e-7, on arrays | float32 lets 0.05 % pass, and refuses large sums |
# | a JVP rule is linear in t | else forward mode is silently wrong |
# | a loop that needs a gradient is a `scan`, or has a static bound | reverse mode needs the number of residuals |
# | round, argmax, comparisons and sampling give 0, silently | derivative almost everywhere; straight-through gives 1 |

# %% [markdown]
# ## Solutions

# %%
@jax.custom_vjp
def rms_norm_by_hand(x, scale):
    return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def rms_norm_fwd(x, scale):
    r = lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    return x * r * scale, (x, r, scale)


def rms_norm_bwd(residuals, g):
    x, r, scale = residuals
    normalised, d = x * r, g * scale
    return r * (d - normalised * (d * normalised).mean(-1, keepdims=True)), (g * normalised).sum(0)


rms_norm_by_hand.defvjp(rms_norm_fwd, rms_norm_bwd)


def rms_norm_solution(x, scale):
    return rms_norm_by_hand(x, scale)


def curvature_solution(loss, x, v):
    return jax.grad(lambda x: jnp.vdot(jax.grad(loss)(x), v))(x) @ v  # reverse over reverse


def quantise_solution(x):
    through = jnp.where(jnp.abs(x) <= 1, x, lax.stop_gradient(x))
    return through + lax.stop_gradient(jnp.round(8 * x) / 8 - x)

# %%
try:
    check_rms_norm(rms_norm)
except NotImplementedError:
    check_rms_norm(rms_norm_solution)

# %%
try:
    check_curvature(curvature)
except NotImplementedError:
    check_curvature(curvature_solution)

# %%
try:
    check_quantise(quantise)
except NotImplementedError:
    check_quantise(quantise_solution)
