"""The rows of gradcheck.py, in this process, and its planted bugs, which must fail only where they are. No network."""
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import gradcheck
import model
from common.gradcheck import PlantedBugMissed, planted, torch_missing

HERE = Path(__file__).resolve().parent
LAYERS = list(model.layers_of())
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
    return [row for row in rows if not row.ok]


# What must pass --------------------------------------------------------------------------

def test_finite_differences(point):
    rows = gradcheck.finite_differences(*point)
    leaves = 3 * len(LAYERS) + 2
    assert len(rows) == 3 + leaves + 3 + (leaves + 2 * len(LAYERS)) + 3 and not failed(rows), failed(rows)


def test_statistics_as_an_input_and_an_output(point):
    rows = gradcheck.gradient_rows(*point) + gradcheck.evaluation_rows(*point[:3])
    assert len(rows) == 5 and not failed(rows), failed(rows)
    rows = gradcheck.statistics_rows(*point[:3])
    assert len(rows) == 2 * len(LAYERS) and not failed(rows), failed(rows)


def test_the_kernels_pass_finite_differences():
    rows = gradcheck.kernel_rows()
    assert len(rows) == 2 * (3 + 5) and not failed(rows), failed(rows)


@needs_torch
def test_gradients_equal_those_of_torch(point):
    rows = gradcheck.torch_rows(*point)
    assert len(rows) == 3 + 3 * len(LAYERS) + 2 and not failed(rows), failed(rows)


@needs_torch
def test_five_steps_of_statistics_equal_those_of_torch(point):
    rows = gradcheck.torch_statistics_rows(*point[:3])
    assert len(rows) == 2 * len(LAYERS) and not failed(rows), failed(rows)
    biased = failed(gradcheck.torch_statistics_rows(*point[:3], unbiased=False))
    assert len(biased) == len(LAYERS) and all(row.name.endswith("/var") for row in biased)


@needs_torch
def test_twenty_steps_of_training_equal_those_of_torch():
    with jax.enable_x64(False):  # float32, as training runs
        rows, plain = gradcheck.sgd_rows(), gradcheck.sgd_rows(nesterov=False)
    assert len(rows) == 1 and not failed(rows), failed(rows)
    assert not plain[0].ok  # the losses see a momentum that isn't Nesterov's


@needs_torch
def test_the_twin_keeps_what_it_is_given(point):
    import torch
    import torch_twin
    params, stats, images, _ = point
    network, last = (torch_twin.resnet(params, stats, channels_last=last) for last in (False, True))
    for tree, want in ((torch_twin.parameters(network), params), (torch_twin.statistics(network), stats)):
        assert all(jax.tree.leaves(jax.tree.map(lambda a, b: np.array_equal(a.numpy(), b), tree, want)))
    fresh = torch_twin.statistics(torch_twin.resnet(params))
    assert all((layer["mean"] == 0).all() and (layer["var"] == 1).all() for layer in fresh.values())
    torch.testing.assert_close(network(gradcheck.planes(images)), last(gradcheck.planes(images)))


def test_the_batch_norms_of_flax_and_equinox():
    rows = gradcheck.framework_rows()
    assert len(rows) == 4 * 7 and not failed(rows), failed(rows)


# What must fail --------------------------------------------------------------------------

def test_planted_bugs_are_caught(point):
    rows = gradcheck.planted_rows(*point)
    assert len(rows) == 7 and not failed(rows), failed(rows)


@pytest.mark.parametrize("wrong", [gradcheck.not_updated, gradcheck.momentum_reversed])
def test_wrong_statistics_fail_in_every_layer(point, wrong):
    rows = gradcheck.statistics_rows(*point[:3], forward=wrong)
    assert failed(rows) == rows


def test_batch_statistics_in_evaluation_fail_where_logits_depend_on_batch_mates(point):
    norms = model.batch_norm_relu, gradcheck.batch_statistics
    bad = failed(gradcheck.evaluation_rows(*point[:3], norms=norms))
    assert [row.name for row in bad] == ["evaluation, logits without batch-mates"]


def test_a_bug_that_no_check_sees_is_an_error(point):
    with pytest.raises(PlantedBugMissed, match="none"):
        planted("none", gradcheck.statistics_rows(*point[:3]))


@pytest.mark.slow
def test_gradcheck_script(tmp_path):
    done = subprocess.run([sys.executable, str(HERE / "gradcheck.py")], cwd=tmp_path, env=dict(os.environ),
                          capture_output=True, text=True, encoding="utf-8", timeout=900)
    assert done.returncode == 0 and done.stdout.rstrip().endswith("passed, 0 failed"), done.stdout + done.stderr
