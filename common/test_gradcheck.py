"""common.gradcheck: right gradients pass, wrong ones don't, and neither does a report that proves nothing."""
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common.gradcheck import (Check, PlantedBugMissed, compare, coordinates, directional, from_torch, planted,
                              print_report, scaled, to_torch, torch_missing, vjp, zeroed)

KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def mlp(activation=jax.nn.gelu):
    """A loss, its parameters and a batch: 16 -> 32 -> 4, cross-entropy over 8 rows."""
    keys = iter(jax.random.split(KEY, 4))
    params = {"hidden": {"w": jax.random.normal(next(keys), (16, 32)) / 4, "b": jnp.zeros(32)},
              "out": jax.random.normal(next(keys), (32, 4)) / 6}
    batch = jax.random.normal(next(keys), (8, 16)), jax.random.randint(next(keys), (8,), 0, 4)

    def loss(params, x, labels):
        logits = activation(x @ params["hidden"]["w"] + params["hidden"]["b"]) @ params["out"]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1).mean()

    return loss, params, batch


def bug(loss, plant, *args):
    return lambda *inputs: plant(jax.grad(loss)(*inputs), *args)


# The report ------------------------------------------------------------------------------
def test_report_prints_aligned_rows_and_the_status(capsys):
    assert print_report([Check("a", 1.23e-9, 1e-7), "not verified: a note", Check("longer", 1e-7, 1e-7)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a       error  1.2e-09  tolerance  1.0e-07  ok",
        "not verified: a note",
        "longer  error  1.0e-07  tolerance  1.0e-07  ok",
        "2 passed, 0 failed"]


@pytest.mark.parametrize("rows, last", [
    ([Check("fine", 0.0, 1.0), Check("wrong", 2.0, 1.0)], "1 passed, 1 failed"),
    ([Check("fine", 0.0, 1.0), Check("nan", math.nan, 1.0)], "1 passed, 1 failed"),
    (["not verified: torch is not installed"], "0 passed, 0 failed: no check ran, which is a failure"),
    ([], "0 passed, 0 failed: no check ran, which is a failure")])
def test_failed_nan_and_empty_reports_exit_1(rows, last, capsys):
    assert print_report(rows) == 1
    assert capsys.readouterr().out.splitlines()[-1] == last


# Finite differences ----------------------------------------------------------------------
@pytest.mark.parametrize("activation", [jax.nn.gelu, jax.nn.relu])
def test_a_right_gradient_passes(activation):
    loss, params, batch = mlp(activation)
    checks = directional(loss, params, *batch, key=KEY, n=4) + coordinates(loss, params, *batch, key=KEY)
    assert [c.name.split("[")[0] for c in checks] == [
        *(f"direction {i}" for i in range(4)), "entry hidden/b", "entry hidden/w", "entry out"]
    assert all(c.ok for c in checks) and max(c.error for c in checks) < 2e-8


@pytest.mark.parametrize("plant", [(scaled,), (scaled, "hidden/b"), (zeroed, "hidden/w"), (zeroed, 2)])
def test_planted_bugs_are_caught(plant):
    loss, params, batch = mlp()
    for check in directional, coordinates:
        row = planted("bug", check(loss, params, *batch, key=KEY, grad=bug(loss, *plant)))
        assert row.ok and row.error < 0.01


def test_coordinates_locate_the_wrong_leaf():
    loss, params, batch = mlp()
    checks = coordinates(loss, params, *batch, key=KEY, grad=bug(loss, scaled, "hidden/b"))
    assert [c.ok for c in checks] == [False, True, True]
    assert checks[0].error == pytest.approx(1e-3, rel=0.9)


def test_a_leaf_of_zero_gradient_passes_and_an_empty_one_has_no_row():
    params = {"empty": jnp.zeros((0, 3)), "shift": jnp.ones(3), "x": jnp.arange(3.0)}
    loss = lambda p: jnp.sum(jax.nn.softmax(p["x"] + p["shift"].sum()) * jnp.arange(3.0)) + p["empty"].sum()
    checks = coordinates(loss, params, key=KEY)
    assert [c.name.split("[")[0] for c in checks] == ["entry shift", "entry x"] and all(c.ok for c in checks)


def test_a_kink_within_eps_is_stepped_over():
    loss, at = lambda p: jnp.sum(jnp.array([1.0, 3.0]) * abs(p)), lambda *p: jnp.array(p)
    assert all(c.ok for c in directional(loss, at(1, 2.5e-5), key=KEY, n=8))  # 37 % of the directions cross it
    (check,) = coordinates(loss, at(1, 2e-6), key=KEY)
    assert check.name == "entry .[0]" and check.ok
    assert [c.ok for c in coordinates(loss, at(2e-6, 2e-6), key=KEY)] == [False]  # nothing left to check


def test_a_direction_almost_orthogonal_to_the_gradient_is_no_failure():
    loss = lambda p: 5e3 + p[0]  # large: its rounding, 1e-8 of the gradient, is 1e-6 of the smallest of 64 derivatives
    assert all(c.ok for c in directional(loss, jnp.ones(2), key=KEY, n=64))


def test_a_loss_that_does_not_depend_on_its_parameters_fails():
    checks = [check(lambda p: 0 * p.sum(), jnp.ones(3), key=KEY)[0] for check in (directional, coordinates)]
    assert all(math.isnan(c.error) and not c.ok for c in checks)


@pytest.mark.parametrize("check", [directional, coordinates])
def test_anything_but_float64_is_refused(check):
    loss, params, batch = mlp()
    for dtype in jnp.float32, jnp.bfloat16:
        params["hidden"]["w"] = params["hidden"]["w"].astype(dtype)
        with pytest.raises(ValueError, match=rf"hidden/w is {jnp.dtype(dtype)}.*1.5e-4.*enable_x64"):
            check(loss, params, *batch, key=KEY)
    with pytest.raises(ValueError, match="returns float32"):
        check(lambda p: p.sum().astype(jnp.float32), jnp.ones(3), key=KEY)
    with jax.enable_x64(False), pytest.raises(ValueError, match="is float32"):  # JAX would round it silently
        check(jnp.sum, np.ones(3), key=KEY)


def scaled_matmul_with_vjp(factor):
    @jax.custom_vjp
    def f(a, b, rows):
        return a[rows] @ b

    def backward(residuals, g):
        a, b, rows = residuals
        return jnp.zeros_like(a).at[rows].add(g @ b.T), factor * a[rows].T @ g, None

    f.defvjp(lambda a, b, rows: (f(a, b, rows), (a, b, rows)), backward)
    return f


def test_vjp_finds_a_wrong_factor_and_the_argument_it_belongs_to():
    a, b = jax.random.normal(KEY, (2, 5, 5))
    args = a, b, jnp.array([0, 3, 3])  # the indices are held
    right = vjp(scaled_matmul_with_vjp(1.0), *args, key=KEY)
    assert [c.name for c in right] == ["vjp argument 0", "vjp argument 1"] and all(c.ok for c in right)
    assert [c.ok for c in vjp(scaled_matmul_with_vjp(1.001), *args, key=KEY)] == [True, False]
    with pytest.raises(ValueError, match="float32"):
        vjp(jnp.sin, a.astype(jnp.float32), key=KEY)
    with pytest.raises(ValueError, match="nothing to move"):
        vjp(lambda rows: a[rows], args[2], key=KEY)


# Comparison and planted bugs -------------------------------------------------------------
TREE = {"blocks": {"wq": np.linspace(1, 2, 6).reshape(2, 3), "bk": np.zeros(3)}, "head": np.ones(2)}


def test_compare_is_relative_a_leaf():
    got = jax.tree.map(np.copy, TREE)
    got["head"] += 1e-3
    checks = compare("torch", got, TREE, 1e-4)
    assert [c.name for c in checks] == ["torch blocks/bk (absolute)", "torch blocks/wq", "torch head"]
    assert [c.error for c in checks] == pytest.approx([0, 0, 1e-3]) and [c.ok for c in checks] == [True, True, False]


@pytest.mark.parametrize("dtype, noise", [(np.float64, 1e-14), (np.float32, 1e-8)])
def test_compare_takes_zero_leaves_absolutely(dtype, noise):
    want = {"bk": np.full(4, noise, dtype), "w": np.ones(4, dtype)}
    for got, error in ((0, 2 * noise), (1e-3, 2e-3)):
        check = compare("", want | {"bk": np.full(4, got, dtype)}, want, 1e-6)[0]
        assert check.name.endswith("bk (absolute)") and check.error == pytest.approx(error, rel=1e-3)
        assert check.ok == (got == 0)
    small = want | {"bk": np.full(4, 1e-5, dtype)}  # small, and still a value
    assert compare("", want, small, 1e-6)[0] == Check(" bk", pytest.approx(1, abs=2e-3), 1e-6)


def test_compare_names_what_does_not_match():
    with pytest.raises(ValueError, match=r"torch blocks/wq: got shape \(3, 2\), want \(2, 3\)"):
        compare("torch", TREE | {"blocks": TREE["blocks"] | {"wq": np.ones((3, 2))}}, TREE, 1)
    with pytest.raises(ValueError, match=r"only in got: \['extra'\], only in want: \['head'\]"):
        compare("torch", {"blocks": TREE["blocks"], "extra": 1}, TREE, 1)
    with pytest.raises(ValueError, match="0 leaves"):
        compare("torch", {}, {}, 1)
    nan = scaled(TREE, factor=math.nan)
    assert not any(c.ok for c in compare("torch", nan, TREE, 1) + compare("torch", TREE, nan, 1))


def test_plants():
    assert (scaled(TREE, "head")["head"] == 1.001).all() and scaled(TREE, "head")["blocks"] is not None
    assert compare("", scaled(TREE), TREE, 1)[1].error == pytest.approx(1e-3)
    assert zeroed(TREE, 1)["blocks"]["wq"].tolist() == zeroed(TREE, "blocks/wq")["blocks"]["wq"].tolist()
    assert zeroed(TREE, 1)["blocks"]["wq"].ravel().tolist() == [*TREE["blocks"]["wq"].ravel()[:-1], 0]
    assert zeroed(jax.tree.map(jnp.asarray, TREE), 1)["blocks"]["wq"].dtype == jnp.float64
    with pytest.raises(ValueError, match="no leaf 'blocks/wx': there are blocks/bk, blocks/wq, head"):
        zeroed(TREE, "blocks/wx")


def test_planted_raises_when_the_bug_passes():
    for plant in (scaled(TREE), zeroed(TREE, "blocks/wq")):
        assert planted("bug", compare("", plant, TREE, 1e-9)).ok
    with pytest.raises(PlantedBugMissed, match="loose: a planted bug passed 3 checks"):
        planted("loose", compare("", scaled(TREE), TREE, 1e-2))
    with pytest.raises(PlantedBugMissed, match="none"):
        planted("none", [])
    assert planted("nan", [Check("", math.nan, 1.0)]).error == 0


# PyTorch ---------------------------------------------------------------------------------
def test_torch_round_trip():
    pytest.importorskip("torch", reason="not verified: the PyTorch bridge; torch is not installed")
    dtypes = jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64, jnp.int32, jnp.int64, jnp.uint8, jnp.bool_
    tree = {jnp.dtype(d).name: [jnp.arange(6).reshape(2, 3).astype(d).T, jnp.ones((), d), jnp.ones((0, 2), d)]
            for d in dtypes}
    there = to_torch(tree)
    assert all(str(there[name][0].dtype) == f"torch.{name}" for name in tree)
    back = from_torch(jax.tree.map(lambda t: t.requires_grad_(t.dtype.is_floating_point), there))
    for got, want in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape and (got == np.asarray(want)).all()
    there["float64"][0].data.mul_(2)
    assert (back["float64"][0] == tree["float64"][0]).all()  # copies, both ways


def test_without_torch_the_report_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert torch_missing() == "not verified: torch is not installed"
    for bridge in to_torch, from_torch:
        with pytest.raises(ImportError, match="torch is not installed: pip install torch"):
            bridge(TREE)
