"""The batch norm kernels against their references, finite differences, libtpu's compiler and planted bugs.

No accelerator: on a CPU the kernels are interpreted, with small tiles, so that small sizes have four along each axis.
"""
import math
import platform
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

import kernels
import model
from common import gradcheck
from common.pallas import aot_compile
from kernels import Tiles

needs_libtpu = pytest.mark.skipif(not (sys.platform == "linux" and platform.machine() == "x86_64"),
                                  reason="not verified: TPU compiles; libtpu is for Linux x86_64 only")
KERNELS = ("forward", "backward", "inference", "inference_backward")


@pytest.fixture(autouse=True, scope="module")
def light_compiler():
    """Each case compiles its own programs, which takes longer than running them: half as long without optimisations."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def draw(shape, dtype="float32", seed=0):
    """x, scale, bias, mean, var of an evaluation, and cotangents of y, mean and var. Every channel of x has its own
    mean. The cotangent of y is 0 where a rounding of ReLU's input could decide: both gradients are right there."""
    keys, C = jax.random.split(jax.random.key(seed), 8), shape[-1:]
    x = (jax.random.normal(keys[0], shape, dtype) * 2 + 3 * jax.random.normal(keys[1], C, dtype)).astype(dtype)
    wide = kernels.wide_of(dtype)
    scale, mean = 1 + jax.random.normal(keys[2], C, wide), jax.random.normal(keys[3], C, wide)
    bias, var = jax.random.normal(keys[4], C, wide), jax.random.uniform(keys[5], C, wide, 0.5, 2)
    g_mean, g_var = jax.random.normal(keys[6], (2, *C), wide)
    g = jax.random.normal(keys[7], shape, dtype)
    for statistics in (model.moments(x), (mean, var)):
        z = model.normalise(x.astype(wide), scale, bias, *statistics)
        g = jnp.where(abs(z) > 1e-3, g, 0)
    return x, scale, bias, mean, var, g, g_mean, g_var


@partial(jax.jit, static_argnums=(0, 1))
def everything(training, inference, x, scale, bias, mean, var, g, g_mean, g_var):
    """Values and gradients of both forms."""
    outputs, pull = jax.vjp(training, x, scale, bias)
    y, pull_inference = jax.vjp(inference, x, scale, bias, mean, var)
    return {"training": outputs, "gradient": pull((g, g_mean, g_var)), "inference": y,
            "inference gradient": pull_inference(g)}


def by_kernels(tiles, *args):
    return everything(partial(kernels.batch_norm_relu, tiles=tiles),
                      partial(kernels.batch_norm_relu_inference, tiles=tiles), *args)


def by_reference(*args):
    wide = [a.astype(kernels.wide_of(a.dtype)) for a in args]
    return everything(kernels.batch_norm_relu_reference, kernels.batch_norm_relu_inference_reference, *wide)


def error(got, want):
    """‖got - want‖ / ‖want‖ of the worst array; where the true value vanishes, relative to entries of 0.1."""
    pairs = [(np.asarray(a, float), np.asarray(b, float)) for a, b in zip(*map(jax.tree.leaves, (got, want)))]
    return max(float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 0.1 * b.size**0.5, 1e-30)) for a, b in pairs)


# Equality --------------------------------------------------------------------------------
# float32 rounds at 6e-8 and sums at most 4,000 values here; bfloat16 rounds the results at 2^-9, its sums are float32.
TOLERANCE = {"float32": 1e-5, "bfloat16": 4e-3}
CASES = [  # shape, dtype, tiles
    ((390, 3, 3, 29), "float32", Tiles(2, 8, 128, 3)), ((390, 3, 3, 61), "bfloat16", Tiles(2, 16, 128, 99)),
    ((512, 2, 2, 32), "float32", Tiles(1, 8, 128, 99)), ((512, 2, 2, 64), "bfloat16", Tiles(1, 16, 128, 1)),
    ((500, 27), "float32", Tiles(1, 8, 128, 2)), ((33, 5, 7, 12), "bfloat16", None), ((2, 1, 1, 1), "float32", None)]


@pytest.mark.parametrize("shape, dtype, tiles", CASES)
def test_kernels_and_their_gradients_equal_the_references(shape, dtype, tiles):
    args = draw(shape, dtype)
    got, want = by_kernels(tiles, *args), by_reference(*args)
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, want)
    y, *statistics = got["training"]
    dx, *sums = got["gradient"]
    assert y.dtype == dx.dtype == got["inference"].dtype == dtype
    assert all(a.dtype == jnp.float32 for a in (*statistics, *sums, *got["inference gradient"][1:]))
    assert error((statistics, sums, got["inference gradient"][1:]), (
        want["training"][1:], want["gradient"][1:], want["inference gradient"][1:])) <= TOLERANCE["float32"]
    assert error(got, want) <= TOLERANCE[dtype]


@pytest.mark.parametrize("shape", [(0, 2, 2, 3), (3, 0, 2, 4), (3, 2, 2, 0), (1, 1, 1, 1)])
def test_nothing_and_one_value_give_what_the_reference_gives(shape):
    """No value: a mean of NaN. One value: its variance is 0, y the bias, dx what the mean's cotangent says."""
    args = draw(shape)
    got, want = by_kernels(None, *args), by_reference(*args)
    for a, b in zip(*map(jax.tree.leaves, (got, want))):
        assert a.shape == b.shape and np.allclose(a, b, rtol=1e-5, atol=1e-4, equal_nan=True)
    if math.prod(shape) == 1:
        assert jnp.allclose(got["training"][0].ravel(), jax.nn.relu(args[2]))


def test_the_grids_of_the_cases_have_four_blocks_along_each_axis():
    for shape, dtype, tiles in CASES[:4]:
        for kernel in KERNELS:
            channels, passes, *walk = kernels.plan(kernel, shape, dtype, tiles).grid
            assert min(channels, *walk) >= 4 and passes == (1 if "inference" in kernel else 2)


def test_the_references_are_the_models_and_the_formulae_its_gradient():
    with jax.enable_x64(True):
        x, scale, bias, mean, var, g, g_mean, g_var = args = draw((6, 5, 3, 4), "float64")
        assert kernels.EPS == model.EPS
        want = everything(model.batch_norm_relu, model.batch_norm_relu_inference, *args)
        assert error(by_reference(*args), want) <= 1e-14
        statistics = want["training"][1:]
        assert error(kernels.backward_reference(x, scale, bias, *statistics, g, g_mean, g_var),
                     want["gradient"]) <= 1e-13


def test_no_cotangents_of_the_statistics_is_cotangents_of_zero():
    x, scale, bias, *_, g, g_mean, _ = draw((40, 3, 3, 5))
    (y, *_), pull = jax.vjp(kernels.batch_norm_relu, x, scale, bias)
    alone = jax.vjp(lambda *a: kernels.batch_norm_relu(*a)[0], x, scale, bias)[1](g)
    assert error(alone, pull((g, jnp.zeros(5), jnp.zeros(5)))) == 0
    assert error(pull((g, g_mean, jnp.zeros(5))), alone) > 1e-3


# Accuracy --------------------------------------------------------------------------------
def test_a_large_mean_costs_no_variance():
    """Mean 1e4, standard deviation 1, float32, where a mean is rounded at 1e-3: one of the variances merged here moves
    by some 1e-5 of it. The mean of squares less the square of the mean, a common single sweep, has nothing left."""
    x = 1e4 + jax.random.normal(jax.random.key(0), (512, 8, 8, 8))
    exact = np.asarray(x, float).reshape(-1, 8)
    y, mean, var = jax.jit(partial(kernels.batch_norm_relu, tiles=Tiles(8, 8, 128, 8)))(x, jnp.ones(8), jnp.zeros(8))
    assert max(abs(mean - exact.mean(0))) <= 3e-3 and max(abs(var / exact.var(0) - 1)) <= 1e-4
    assert np.abs(y.reshape(-1, 8) - np.maximum((exact - exact.mean(0)) / exact.std(0), 0)).max() <= 4e-3
    one_sweep = (x**2).mean((0, 1, 2)) - x.mean((0, 1, 2)) ** 2
    assert max(abs(one_sweep / exact.var(0) - 1)) > 0.5


def test_merging_in_any_split_gives_the_whole():
    values = np.random.default_rng(0).normal(5, 2, 1000)
    for split in (1, 10, 999):
        parts = values[:split], values[split:]
        merged = kernels.merge(parts[0].mean(), parts[0].var(), parts[1].mean(), parts[1].var(), 1 - split / 1000)
        assert np.allclose(merged, (values.mean(), values.var()), rtol=1e-13)


def test_finite_differences_through_the_vjps_in_float64():
    shape, tiles = (130, 3, 3, 9), Tiles(2, 8, 128, 2)
    with jax.enable_x64(True):
        x, scale, bias, mean, var, *_ = draw(shape, "float64")
        checks = gradcheck.vjp(partial(kernels.batch_norm_relu, tiles=tiles), x, scale, bias, key=jax.random.key(1))
        checks += gradcheck.vjp(partial(kernels.batch_norm_relu_inference, tiles=tiles), x, scale, bias, mean, var,
                                key=jax.random.key(2))
    assert len(checks) == 8 and all(check.ok for check in checks), checks


# Masks and bugs --------------------------------------------------------------------------
RAGGED = (130, 3, 1, 9), Tiles(2, 8, 128, 2)  # cut along every axis; what is read past an edge is NaN in interpret mode


def test_what_lies_past_the_edges_is_nan_and_does_not_matter(monkeypatch):
    from jax.experimental import pallas as pl
    past = pl.pallas_call(lambda x_ref, y_ref: y_ref.__setitem__(..., x_ref[...]), grid=(2,), interpret=True,
                          in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
                          out_specs=pl.BlockSpec((8, 128), lambda i: (i, 0)),
                          out_shape=jax.ShapeDtypeStruct((16, 128), jnp.float32))(jnp.zeros((9, 128)))
    assert jnp.isnan(past[9:]).all() and not past[:9].any()
    (shape, tiles), guard = RAGGED, kernels.Walk.within
    args = draw(shape)
    assert error(by_kernels(tiles, *args), by_reference(*args)) <= TOLERANCE["float32"]
    monkeypatch.setattr(kernels.Walk, "within", lambda walk, tile, a, q: tile)
    unguarded = by_kernels(tiles, *args)
    assert all(jnp.isnan(x).any() for x in (*unguarded["training"], *unguarded["gradient"][:2],
                                            unguarded["inference gradient"][1]))
    # dbias stayed finite only because ReLU lets no NaN through; garbage may be a number: its mask is checked without.
    monkeypatch.setattr(kernels, "through_relu", lambda d, g, slope, bias: g)
    unguarded = by_kernels(tiles, *args)
    assert jnp.isnan(unguarded["gradient"][2]).any() and jnp.isnan(unguarded["inference gradient"][2]).any()
    monkeypatch.setattr(kernels.Walk, "within", guard)
    guarded = by_kernels(tiles, *args)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(guarded))


def half_merged(mean, var, tile_mean, tile_var, share):
    return mean + share * (tile_mean - mean), var + share * (tile_var - var)


@pytest.mark.parametrize("where, name, bug", [
    (kernels, "merge", half_merged), (kernels, "through_relu", lambda d, g, slope, bias: g),
    (kernels.Walk, "share", lambda walk, a, q, dtype: (walk.bA * walk.bQ, 1 / (1 + a * walk.columns + q))),
    (kernels, "EPS", 1e-2)], ids=["merge without the distance", "no ReLU", "edge tiles count in full", "EPS"])
def test_planted_bugs_are_caught(where, name, bug, monkeypatch):
    shape, tiles = RAGGED
    args = draw(shape)
    want = by_reference(*args)
    monkeypatch.setattr(where, name, bug)
    assert error(by_kernels(tiles, *args), want) >= 100 * TOLERANCE["float32"]


def test_wrong_operands_are_refused():
    x, c = jnp.zeros((2, 3, 3, 4)), jnp.zeros(4)
    with pytest.raises(ValueError, match=r"\(2, 3, 3, 4\) and \(3,\), \(4,\)"):
        kernels.batch_norm_relu(x, jnp.zeros(3), c)
    with pytest.raises(ValueError, match="floating dtypes; got uint8"):
        kernels.batch_norm_relu_inference(x.astype(jnp.uint8), c, c, c, c)
    with pytest.raises(ValueError, match="VMEM.*take smaller tiles"):
        kernels.plan("forward", (4096, 8, 8, 128), "float32", Tiles(64, 128, 4096, 1))


# Bytes and budget ------------------------------------------------------------------------
def test_bytes_are_counted_from_the_index_maps():
    """By hand, 4 x 4 tiles of each of 4 channel tiles. Kept in VMEM, x and g come once; of 16 tiles of which 3 are
    kept, 13 come again, and none of them is at hand from the step before."""
    shape, n, C = (512, 2, 2, 32), 512 * 4 * 32, 32
    for kept, again in ((99, 0), (3, 13)):
        count = partial(kernels.hbm_bytes, shape=shape, dtype="float32", tiles=Tiles(1, 8, 128, kept))
        x = n + again * n // 16
        assert count("forward") == 4 * (x + n + 4 * C) and count("backward") == 4 * (2 * x + n + 8 * C)
        assert count("inference") == 4 * (2 * n + 4 * C) and count("inference_backward") == 4 * (3 * n + 6 * C)
    ragged, n = (130, 3, 1, 9), 130 * 3 * 9
    assert kernels.hbm_bytes("forward", ragged, "bfloat16", Tiles(2, 16, 128, 99)) == 2 * 2 * n + 4 * 4 * 16


def test_everything_stays_in_vmem_at_the_networks_sizes_and_what_fits_at_larger_ones():
    for H, C in ((32, 32), (16, 48), (8, 96), (4, 192)):
        shape = (512, H, H, C)
        for kernel, moved in (("forward", 2), ("backward", 3)):
            bound = moved * 2 * math.prod(shape)
            assert bound < kernels.hbm_bytes(kernel, shape, "bfloat16") < 1.01 * bound
            assert kernels.plan(kernel, shape, "bfloat16").vmem <= kernels.VMEM
    large = (2048, 32, 32, 32)
    bound = 2 * math.prod(large)
    assert 2 * bound < kernels.hbm_bytes("forward", large, "bfloat16") < 3 * bound
    assert 3 * bound < kernels.hbm_bytes("backward", large, "bfloat16") < 5 * bound


# Compilers -------------------------------------------------------------------------------
def compile_all(topology, shape, dtype, which=KERNELS):
    """One program with several kernels."""
    programs = [kernels.prediction(kernel, "pallas", shape, dtype) for kernel in which]
    compiled = aot_compile(lambda *avals: [f(*a) for (f, _), a in zip(programs, avals)], *(a for _, a in programs),
                           topology=topology)
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == len(which)


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1"])
def test_compiles_for_tpu_within_the_budget(topology, monkeypatch):
    compile_all(topology, (128, 4, 4, 192), "bfloat16")
    planned = kernels.plan
    monkeypatch.setattr(kernels, "plan", lambda *a: planned(*a)._replace(vmem=planned(*a).vmem // 4))
    with pytest.raises(Exception, match="(?i)vmem"):  # the budget is handed over: a quarter of it is refused
        compile_all(topology, (128, 4, 4, 192), "bfloat16", ["forward"])


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1"])
@pytest.mark.parametrize("shape, dtype", [
    ((128, 32, 32, 32), "bfloat16"), ((512, 16, 16, 48), "float32"), ((100, 32, 32, 32), "float32"),
    ((1, 32, 32, 32), "bfloat16"), ((2, 1, 1, 1), "float32"), ((2048, 32, 32, 32), "bfloat16"), ((70000, 33), "bfloat16")])
def test_compiles_for_tpu_at_many_sizes(topology, shape, dtype):
    compile_all(topology, shape, dtype)


def test_there_is_no_gpu_form():
    gpu = AbstractMesh((1,), ("x",), axis_types=(AxisType.Explicit,),
                       abstract_device=AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu"))
    f, avals = kernels.prediction("forward", "pallas", (128, 4, 4, 192), "float32")
    with use_abstract_mesh(gpu), pytest.raises(Exception):  # its type differs between JAX versions
        jax.jit(f).trace(*avals).lower(lowering_platforms=("cuda",))


def test_what_is_predicted_computes_the_same_in_both_forms():
    for kernel in KERNELS:
        (ours, avals), (xlas, _) = (kernels.prediction(kernel, form, [6, 3, 3, 5], "float32")
                                    for form in ("pallas", "xla"))
        keys = jax.random.split(jax.random.key(3), len(avals))
        args = [jax.random.uniform(key, a.shape, a.dtype, 0.5, 1.5) for key, a in zip(keys, avals)]
        assert error(jax.jit(ours)(*args), jax.jit(xlas)(*args)) <= TOLERANCE["float32"]


# In the network --------------------------------------------------------------------------
def test_the_network_evaluates_alike_with_the_kernels():
    """Three training steps with them, through train.py's flag, are in test_cnn_cifar.py."""
    params, stats = model.init_params(jax.random.key(0), (4, 4, 8, 8)), model.init_stats((4, 4, 8, 8))
    stats = jax.tree.map(lambda s: s + 0.25, stats)
    images = jax.random.normal(jax.random.key(1), (2, 8, 8, 3))
    norms = kernels.batch_norm_relu, kernels.batch_norm_relu_inference
    got, want = (jax.jit(partial(model.forward, train=False, **options))(params, stats, images)[0]
                 for options in ({"norms": norms}, {}))
    assert error(got, want) <= TOLERANCE["float32"]
