"""Proofs of gradients: float64 finite differences, tree comparison, planted bugs, a bridge to PyTorch.

Every check returns a list of `Check`; a project's gradcheck.py adds the lists up and ends with

    sys.exit(print_report(checks))

Central differences have two errors: truncation, about eps², and the rounding of the loss, about u |loss| / eps with
u = 1.1e-16 in float64. At eps = 3e-5 a small transformer's directional derivatives agree to between 3e-10 and 3e-9, so
a tolerance of 1e-7 has room, and a gradient off by 0.1 % stands four orders above it. In float32 (u = 6e-8) the best
eps leaves 1.5e-4 to 6e-4, the size of a bug: refused.

Losses and gradients are jitted: op by op, a transformer's gradient takes about fifty times as long.
"""
import importlib.util
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree


@dataclass(frozen=True)
class Check:
    """One row of the report: `error` (relative unless the name says otherwise) must not exceed `tolerance`."""
    name: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return bool(self.error <= self.tolerance)  # False for NaN


class PlantedBugMissed(AssertionError):
    """A deliberately wrong gradient passed every check: the checks prove nothing."""


def print_report(rows) -> int:
    """Prints a row a check and `N passed, N failed`; returns the exit status, 0 or 1.

    rows: Checks, and strings for notes such as torch_missing(), which are printed and decide nothing.
    A failed or NaN check is a failure, and so is a report without any check.
    """
    checks = [row for row in rows if isinstance(row, Check)]
    width = max((len(check.name) for check in checks), default=0)
    for row in rows:
        if isinstance(row, Check):
            numbers = f"error {row.error:8.1e}  tolerance {row.tolerance:8.1e}"
            print(f"{row.name:{width}}  {numbers}  {'ok' if row.ok else 'FAIL'}")
        else:
            print(row)
    failed = sum(not check.ok for check in checks)
    print(f"{len(checks) - failed} passed, {failed} failed" + ("" if checks else ": no check ran, which is a failure"))
    return int(failed > 0 or not checks)


# Finite differences ----------------------------------------------------------------------
def directional(loss, params, *args, key, n=3, eps=3e-5, tol=1e-7, grad=None, name="direction") -> list[Check]:
    """Central differences of a loss along n random directions against its gradient.

    Args: loss(params, *args) -> float64 scalar; params: pytree of float64 arrays; args: pytrees of arrays (close over
        configs); key: of the directions, which have norm 1 over the whole tree; grad(params, *args) -> gradient
        tree, by default jax.grad(loss), is how a planted bug gets in; it is jitted.
    Returns: n Checks. The error is |numeric - gradient·d| over the larger of |numeric| and ‖gradient‖ / √P, the size
        of a typical directional derivative among P parameters: a direction that happens to be almost orthogonal to
        the gradient doesn't inflate it. A gradient that is zero everywhere checks nothing, and gives NaN.
    Raises: ValueError for any leaf or loss that isn't float64, naming it.
    """
    _require_float64(loss, (params,), *args)
    at = jax.jit(loss)
    gradient = jax.jit(grad or jax.grad(loss))(params, *args)
    return [_along(f"{name} {i}", lambda p: at(p, *args), params, gradient, key, eps, tol)
            for i, key in enumerate(jax.random.split(key, n))]


def vjp(f, *args, key, eps=3e-5, tol=1e-7, name="vjp") -> list[Check]:
    """Proves a (custom) VJP: <g, (f(x + eps d) - f(x - eps d)) / 2 eps> against <vjp(g), d> for each argument.

    Args: f(*args) -> float64 array or pytree; args: float64 arrays or pytrees, each moved along its own random unit
        direction d; arguments without floating leaves (indices, group sizes) are held; key: of g and the directions.
    Returns: one Check an argument, error as in `directional`. Raises: ValueError as in `directional`.
    """
    moving = {i: x for i, x in enumerate(args)
              if any(jnp.issubdtype(jnp.result_type(leaf), jnp.floating) for leaf in jax.tree.leaves(x))}

    def flat_f(moving):
        return ravel_pytree(f(*(moving.get(i, x) for i, x in enumerate(args))))[0]

    out = _require_float64(flat_f, (moving,))
    at, (key, subkey) = jax.jit(flat_f), jax.random.split(key)
    g = jax.random.normal(subkey, out.shape, out.dtype)
    pulled = jax.jit(lambda moving, g: jax.vjp(flat_f, moving)[1](g)[0])(moving, g)
    return [_along(f"{name} argument {i}", lambda x: at(moving | {i: x}), moving[i], pulled[i], key, eps, tol, g)
            for i, key in zip(moving, jax.random.split(key, len(moving)))]


def coordinates(loss, params, *args, key, per_leaf=3, eps=1e-5, tol=1e-7, grad=None, name="entry") -> list[Check]:
    """Central differences in single entries of every leaf: what `directional` finds, this one locates.

    A leaf's entries: the per_leaf of largest gradient, the one of smallest (a bug that drops an entry leaves a zero),
    and per_leaf random ones, without those that have a kink within eps. eps is smaller than along a direction, where
    an entry moves by eps / √P only: embeddings of size 0.02 before a LayerNorm have a large third derivative.
    Arguments and errors raised as in `directional`.
    Returns: one Check a leaf, its worst entry, named like `entry blocks/wq[0, 2]`. The error is relative to the leaf's
        largest gradient entry, or to a tenth of the tree's where that is larger: in a leaf whose gradient is zero (a
        key bias) or tiny, a difference is the rounding of the whole loss. At tol 1e-7, a leaf off by 0.1 % is seen
        down to 1e-5 of the tree's largest gradient. NaN if every entry has a kink; no row for an empty leaf.
    """
    _require_float64(loss, (params,), *args)
    flat, unravel = ravel_pytree(params)
    at, bump = jax.jit(loss), jax.jit(lambda flat, i, h: unravel(flat.at[i].add(h)))
    gradient = np.asarray(ravel_pytree(jax.jit(grad or jax.grad(loss))(params, *args))[0])
    checks, start = [], 0
    for path, leaf in _leaves(params).items():
        if not leaf.size:
            continue
        g, (key, subkey) = gradient[start:start + leaf.size], jax.random.split(key)
        order, drawn = np.argsort(abs(g)), jax.random.randint(subkey, (per_leaf,), 0, leaf.size)
        entries = np.unique(np.concatenate([order[:1], order[-per_leaf:], drawn]))
        scale = max(abs(g).max(), abs(gradient).max() / 10)
        numeric, narrow = np.asarray(jax.device_get(
            [[(at(bump(flat, start + i, h), *args) - at(bump(flat, start + i, -h), *args)) / (2 * h) for i in entries]
             for h in (eps, eps / 2)]))
        difference = np.where(abs(numeric - narrow) <= tol * scale, abs(numeric - g[entries]), -1.0)
        worst = difference.argmax()
        index = [int(i) for i in np.unravel_index(entries[worst], leaf.shape)]
        error = _relative(difference[worst], scale) if difference[worst] >= 0 else math.nan
        checks.append(Check(f"{name} {path}{index}", error, tol))
        start += leaf.size
    return checks


def _along(name, at, x, gradient, key, eps, tol, cotangent=1.0) -> Check:
    """Checks <cotangent, at(x)> along a random unit direction: a new one while a kink lies within eps of x.

    At a kink (ReLU, max pooling) a central difference is no derivative: it averages two slopes, and changes with eps.
    """
    flat, unravel = ravel_pytree(x)
    g = ravel_pytree(gradient)[0]
    for key in jax.random.split(key, 5):
        d = jax.random.normal(key, flat.shape, flat.dtype)
        d /= jnp.linalg.norm(d)
        numeric, narrow = (jnp.vdot(cotangent, at(unravel(flat + h * d)) - at(unravel(flat - h * d))) / (2 * h)
                           for h in (eps, eps / 2))
        scale = max(abs(numeric), jnp.linalg.norm(g) / math.sqrt(g.size))
        if abs(numeric - narrow) <= tol * scale:
            break
    return Check(name, _relative(abs(numeric - g @ d), scale), tol)


def _relative(difference, scale):
    return float(difference / scale) if scale > 0 else math.nan  # nothing moved, so nothing was checked


def _require_float64(f, moving, *held):
    """Raises ValueError unless each leaf of moving, and f(*moving, *held), is float64; returns the latter's shape."""
    if not jax.tree.leaves(moving):
        raise ValueError("there is nothing to move: no floating array")
    for path, leaf in _leaves(moving).items():
        if (dtype := jnp.result_type(leaf)) != jnp.float64:  # of NumPy's float64 it is float32 while x64 is off
            raise ValueError(f"leaf {path} is {dtype}: finite differences need float64, as in float32 they are never "
                             "better than about 1.5e-4, which hides wrong gradients. Run the check inside `with "
                             "jax.enable_x64(True):` and convert: jax.tree.map(lambda x: x.astype('float64'), params)")
    out = jax.eval_shape(f, *moving, *held)
    if out.dtype != jnp.float64:
        raise ValueError(f"the function returns {out.dtype} for float64 arguments: something in it rounds. Accumulate "
                         "in jnp.promote_types(x.dtype, jnp.float32), which keeps float64")
    return out


def _leaves(tree):
    """{path: leaf}, paths like blocks/wq; a tree that is one leaf has the path '.'."""
    return {jax.tree_util.keystr(path, simple=True, separator="/") or ".": leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


# Comparison ------------------------------------------------------------------------------
def compare(name, got, want, tol) -> list[Check]:
    """Compares two pytrees, e.g. a kernel's gradient against PyTorch's, in NumPy float64.

    Returns: one Check a leaf, ‖got - want‖ / ‖want‖. A leaf whose true value is zero (a key bias), that is ‖want‖ at
        most 1e-12 of the whole tree's norm (1e-6 unless `want` is float64: the rounding such a leaf is made of), has
        nothing to be relative to: its error is ‖got - want‖, and its name ends in "(absolute)". Dtypes may differ:
        `want` is the more precise one.
    Raises: ValueError, naming the path, for a leaf that one side lacks or that has another shape; for an empty tree.
    """
    got, want = ({path: np.asarray(x) for path, x in _leaves(tree).items()} for tree in (got, want))
    if got.keys() != want.keys() or not want:
        raise ValueError(f"{name}: only in got: {sorted(got.keys() - want.keys())}, "
                         f"only in want: {sorted(want.keys() - got.keys())}, {len(want)} leaves wanted")
    norms = {path: np.linalg.norm(w.astype(float)) for path, w in want.items()}
    checks = []
    for path, w in want.items():
        if got[path].shape != w.shape:
            raise ValueError(f"{name} {path}: got shape {got[path].shape}, want {w.shape}")
        difference = float(np.linalg.norm(got[path].astype(float) - w.astype(float)))
        if norms[path] > (1e-12 if w.dtype == float else 1e-6) * math.hypot(*norms.values()):
            checks.append(Check(f"{name} {path}", difference / float(norms[path]), tol))
        else:
            checks.append(Check(f"{name} {path} (absolute)", difference, tol))
    return checks


# Planted bugs ----------------------------------------------------------------------------
def planted(name, checks) -> Check:
    """A row that says that a planted bug was caught: its error is tolerance / error of the check that saw it best.

    checks: made on a deliberately wrong gradient. Raises: PlantedBugMissed if all of them passed, or there are none.
    """
    failed = [check for check in checks if not check.ok]
    if not failed:
        raise PlantedBugMissed(f"{name}: a planted bug passed {len(checks)} checks")
    return Check(f"caught: {name} (tolerance / error)",
                 min(0.0 if math.isnan(check.error) else check.tolerance / check.error for check in failed), 1.0)


def scaled(tree, leaf=None, factor=1.001):
    """The tree with one leaf (a path like blocks/wq, or its index), by default every leaf, times factor."""
    return _edit(tree, leaf, lambda x: x * factor)


def zeroed(tree, leaf):
    """The tree with the largest entry of one leaf (a path or an index) set to zero."""
    return _edit(tree, leaf, lambda x: x * (np.arange(x.size) != abs(x.reshape(-1)).argmax()).reshape(x.shape))


def _edit(tree, leaf, change):
    leaves = _leaves(tree)
    if leaf is not None and leaf not in leaves and leaf not in range(len(leaves)):
        raise ValueError(f"no leaf {leaf!r}: there are {', '.join(leaves)}")
    edited = [change(x) if leaf in (None, i, path) else x for i, (path, x) in enumerate(leaves.items())]
    return jax.tree.unflatten(jax.tree.structure(tree), edited)


# PyTorch ---------------------------------------------------------------------------------
def torch_missing() -> str | None:
    """The note that stands in a report in place of the torch rows, or None where torch is installed."""
    return None if importlib.util.find_spec("torch") else "not verified: torch is not installed"


def _torch():
    if torch_missing():
        raise ImportError("torch is not installed: pip install torch")
    import torch
    return torch


def to_torch(tree):
    """Copies a pytree of JAX or NumPy arrays to torch CPU tensors of the same dtype. Raises: ImportError."""
    torch = _torch()

    def tensor(x):
        x = np.array(x)  # a copy: torch would write through to JAX's buffer
        if x.dtype == jnp.bfloat16:  # which torch.from_numpy doesn't know
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(x)
    return jax.tree.map(tensor, tree)


def from_torch(tree):
    """Copies a pytree of torch tensors to NumPy arrays of the same dtype (float64 even where JAX's x64 is off)."""
    torch = _torch()

    def array(x):
        x = x.detach().cpu()
        if x.dtype == torch.bfloat16:
            return x.view(torch.int16).numpy().view(jnp.bfloat16).copy()
        return x.numpy().copy()
    return jax.tree.map(array, tree)
