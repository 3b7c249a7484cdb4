"""The rows of gradcheck.py, in this process, and its planted bugs, which must be seen. No network."""
import dataclasses
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcheck
import model
from common.gradcheck import Check, PlantedBugMissed, planted, torch_missing

HERE = Path(__file__).resolve().parent
needs_torch = pytest.mark.skipif(torch_missing() is not None, reason=str(torch_missing()))


@pytest.fixture(scope="module")
def point():
    with jax.enable_x64(True):
        return gradcheck.setting()


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def failed(rows):
    return [row for row in rows if isinstance(row, Check) and not row.ok]


# What must pass --------------------------------------------------------------------------

def test_finite_differences_of_every_leaf_while_choices_are_dropped(point):
    params, tokens, _ = point
    dropped = jax.jit(partial(model.forward, cfg=gradcheck.SHAPE))(params, tokens)[1]["dropped"]
    assert 0.02 < dropped < 0.5  # else the checks would say nothing about a full expert
    rows = gradcheck.finite_differences(*point)
    assert len(rows) == 3 + len(jax.tree.leaves(params)) and not failed(rows), failed(rows)


FAST = ("einsum", "gather", "dropless", "expert choice", "k = 1")  # the others: test_gradcheck_script


@pytest.mark.parametrize("form", FAST)
def test_one_layer_in_each_form(form):
    rows = gradcheck.layer_rows({form: gradcheck.FORMS[form]})
    assert len(rows) == 2 and not failed(rows), failed(rows)


def test_a_tie_is_a_jump_that_the_gradient_does_not_see():
    *rows, note = gradcheck.tie_rows()
    assert len(rows) == 3 and not failed(rows), failed(rows)
    assert "difference quotient" in note


def test_the_kernel():
    rows = gradcheck.kernel_rows()
    assert len(rows) == 2 + 2 + 6 and not failed(rows), failed(rows)


@needs_torch
def test_gradients_equal_those_of_mixtral():
    rows = gradcheck.mixtral_rows()
    assert len(rows) == 1 + 4 + 1 and not failed(rows), failed(rows)


@needs_torch
def test_gradients_equal_those_of_torch(point):
    rows = gradcheck.torch_rows(*point)
    assert len(rows) == 1 + 3 + len(jax.tree.leaves(point[0])) and not failed(rows), failed(rows)


@needs_torch
def test_twenty_steps_of_training_equal_those_of_torch():
    rows = gradcheck.adamw_rows()
    assert len(rows) == 3 + 1 and not failed(rows), failed(rows)


# The twin --------------------------------------------------------------------------------

@needs_torch
@pytest.mark.parametrize("priority", ["token", "choice"])
def test_the_twin_gives_the_places_of_a_plain_loop(priority):
    import torch_twin
    rng = np.random.default_rng(0)
    experts = np.stack([[rng.permutation(3)[:2] for _ in range(7)] for _ in range(4)])  # (B, T, k)
    order = [(t, j) for t in range(7) for j in range(2)]
    if priority == "choice":
        order.sort(key=lambda at: at[::-1])
    want = np.zeros(experts.shape, bool)
    for b in range(4):
        left = [3, 3, 3]
        for t, j in order:
            want[b, t, j] = left[experts[b, t, j]] > 0
            left[experts[b, t, j]] -= 1
    got = torch_twin.within_capacity(torch_twin.torch.from_numpy(experts), 3, 3, priority)
    assert not want.all() and np.array_equal(got.numpy(), want)


@needs_torch
def test_the_loop_over_experts_is_a_dropless_layer():
    """What bench.py times beside ours computes the same."""
    import torch_twin
    cfg = dataclasses.replace(gradcheck.SHAPE, dispatch="dropless", shared_hidden=0, activation="gelu")
    both, _ = gradcheck.layer_setting(cfg, B=1)
    loop = torch_twin.MoELoop(cfg.n_embd, cfg.n_hidden, cfg.n_experts, cfg.top_k).double().load(both["p"])
    got = loop(gradcheck.to_torch(both["x"][0]))
    want, _ = jax.jit(partial(model.moe_layer, cfg=cfg))(both["x"], both["p"])
    assert np.allclose(got.detach().numpy(), want[0], rtol=1e-12, atol=1e-12)


# What must fail --------------------------------------------------------------------------

def test_planted_bugs_are_caught():
    rows = gradcheck.planted_rows()
    assert len(rows) == 6 and not failed(rows), failed(rows)


def test_a_decision_that_is_not_held_is_held_against_the_difference():
    """Across a tie even the right gradient fails: without `held` the check would blame it."""
    cfg = dataclasses.replace(gradcheck.SHAPE, context=1, n_experts=2, top_k=1, shared_hidden=0)
    both, g = gradcheck.layer_setting(cfg, B=1)
    both["p"]["w_router"] = jnp.stack([both["p"]["w_router"][:, 0]] * 2, axis=1)

    def loss(both, g):
        return gradcheck.layer_loss(both, g, cfg)
    free, held = (gradcheck.directional(f, both, g, key=jax.random.key(0), n=1, grad=jax.grad(loss))
                  for f in (loss, gradcheck.held(loss, cfg, both, g)))
    assert not free[0].ok and free[0].error > 0.5 and held[0].ok


def test_a_bug_that_no_check_sees_is_an_error():
    with pytest.raises(PlantedBugMissed, match="none"):
        planted("none", gradcheck.layer_rows({"gather": {}}))


@needs_torch
def test_the_twin_refuses_what_it_does_not_have():
    import torch_twin
    with pytest.raises(ValueError, match="expert_choice"):
        torch_twin.MoELayer(dataclasses.replace(gradcheck.SHAPE, dispatch="expert_choice"))


@pytest.mark.slow
def test_gradcheck_script(tmp_path):
    done = subprocess.run([sys.executable, str(HERE / "gradcheck.py")], cwd=tmp_path, env=dict(os.environ),
                          capture_output=True, text=True, encoding="utf-8", timeout=600)
    assert done.returncode == 0 and done.stdout.rstrip().endswith("passed, 0 failed"), done.stdout + done.stderr
