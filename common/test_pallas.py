"""common.pallas, on a tiled matmul: C = A B, grid (i, j, k), accumulated over k in scratch."""
import os
import platform
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import common.pallas
from common.pallas import (AotUnavailable, aot_compile, budget, interpret, pad_axis, pick_tile, predict_cycles,
                           predicted_seconds, round_up, slot_use, topology_devices, vmem_bytes)

needs_libtpu = pytest.mark.skipif(not (sys.platform == "linux" and platform.machine() == "x86_64"),
                                  reason="not verified: TPU compiles and predictions; libtpu is for Linux x86_64 only")


def matmul_kernel(a, b, c, total):  # (bM, bK), (bK, bN), (bM, bN), (bM, bN)
    @pl.when(pl.program_id(2) == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    total[...] += jnp.dot(a[...], b[...], preferred_element_type=total.dtype)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        c[...] = total[...].astype(c.dtype)


def call_matmul(a, b, tile, interpreted=None):
    (M, K), N, (bM, bN, bK) = a.shape, b.shape[1], tile
    return pl.pallas_call(
        matmul_kernel, grid=(pl.cdiv(M, bM), pl.cdiv(N, bN), pl.cdiv(K, bK)), name="matmul",
        in_specs=[pl.BlockSpec((bM, bK), lambda i, j, k: (i, k)), pl.BlockSpec((bK, bN), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((bM, bN), lambda i, j, k: (i, j)), out_shape=jax.ShapeDtypeStruct((M, N), a.dtype),
        scratch_shapes=[pltpu.VMEM((bM, bN), jnp.promote_types(a.dtype, jnp.float32))],
        interpret=interpret(interpreted))(a, b)


def matmul(a, b, preferred=512):
    """(M, K) @ (K, N), any sizes: padded to whole tiles, so that no garbage enters the sum over k."""
    (M, K), N = a.shape, b.shape[1]
    tile = bM, bN, bK = [pick_tile(n, preferred, multiple) for n, multiple in ((M, 16), (N, 128), (K, 128))]
    budget([((bM, bK), a.dtype), ((bK, bN), b.dtype)], [((bM, bN), a.dtype)], [((bM, bN), jnp.float32)])
    a, b = pad_axis(pad_axis(a, 0, bM), 1, bK), pad_axis(pad_axis(b, 0, bK), 1, bN)
    return call_matmul(a, b, tile)[:M, :N]


def build_matmul(n, preferred=512):
    """What predict_cycles compiles."""
    return lambda a, b: matmul(a, b, preferred), [jax.ShapeDtypeStruct((n, n), jnp.bfloat16)] * 2


def build_nothing():
    return lambda x: x, avals((0, 128))


def build_endless(n):
    while True:
        pass


def avals(*shapes, dtype=jnp.bfloat16):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


# Tiles -----------------------------------------------------------------------------------
def test_round_up_and_pick_tile():
    assert [round_up(n, 128) for n in (0, 1, 128, 129)] == [0, 128, 128, 256]
    assert [pick_tile(n, 512, 128) for n in (0, 1, 130, 512, 5000)] == [128, 128, 256, 512, 512]
    assert pick_tile(5000, 500, 128) == 384  # the preferred size need not be a multiple
    with pytest.raises(ValueError, match="at most 100 can't be a multiple of 128"):
        pick_tile(5000, 100, 128)


def test_pad_axis():
    x = jnp.ones((3, 5), jnp.bfloat16)
    padded = pad_axis(x, 1, 4, value=-2)
    assert padded.shape == (3, 8) and padded.dtype == x.dtype
    assert (padded[:, :5] == 1).all() and (padded[:, 5:] == -2).all()
    assert pad_axis(x, -1, 5) is x and pad_axis(jnp.ones((0, 5)), 0, 8).shape == (8, 5)


def test_vmem_bytes_pads_to_whole_tiles():
    assert vmem_bytes((8, 128), jnp.float32) == 8 * 128 * 4
    assert [vmem_bytes((1, 1), dtype) for dtype in ("float32", "bfloat16", "int8")] == [4096] * 3
    assert vmem_bytes((9, 130), jnp.bfloat16) == 16 * 256 * 2
    assert vmem_bytes((None, 3, 33, 128), jnp.int8) == 3 * 64 * 128
    assert vmem_bytes((130,), jnp.float32) == vmem_bytes((1, 130), jnp.float32)


def test_budget_counts_blocks_twice_and_refuses_with_the_numbers():
    block = (512, 512), jnp.float32  # 1 MiB
    assert budget([block, block], [block], [block], temporaries=5) == 7 * 2**20 + 5
    assert budget([block] * 7, [block]) == 16 * 2**20  # exactly the limit
    with pytest.raises(ValueError, match="16777217 bytes of 16777216: take smaller tiles"):
        budget([block] * 7, [block], temporaries=1)


# Interpret mode --------------------------------------------------------------------------
def test_interpret_follows_the_override_then_the_target():
    assert interpret() is (jax.default_backend() == "cpu")
    assert interpret(False) is False and interpret(True) is True
    params = pltpu.InterpretParams()
    assert interpret(params) is params
    seen = []
    mesh = Mesh(jax.devices(), ("x",), axis_types=(AxisType.Auto,))
    jax.shard_map(lambda x: seen.append(interpret()) or x, mesh=mesh, in_specs=P(), out_specs=P())(jnp.ones(1))
    assert seen == [interpret()]  # a mesh of this process's devices changes nothing


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-6), (jnp.bfloat16, 4e-3)])  # of the dtype: 2^-23, 2^-8
@pytest.mark.parametrize("M, K, N", [(1, 1, 1), (128, 128, 128), (513, 700, 400), (0, 5, 7), (5, 0, 7)])
def test_matmul_equals_numpy(M, K, N, dtype, tolerance):
    a, b = (jax.random.normal(key, shape, dtype)
            for key, shape in zip(jax.random.split(jax.random.key(0)), ((M, K), (K, N))))
    got = np.asarray(jax.jit(lambda a, b: matmul(a, b, preferred=128))(a, b), float)
    want = np.asarray(a, float) @ np.asarray(b, float)
    assert got.shape == (M, N)
    assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)


# Ahead of time ---------------------------------------------------------------------------
@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_compiles_for_tpu(topology, dtype):
    compiled = aot_compile(matmul, *avals((1000, 700), (700, 1100), dtype=dtype), topology=topology)
    assert compiled.memory_analysis().output_size_in_bytes >= 1000 * 1100 * jnp.dtype(dtype).itemsize
    assert "tpu_custom_call" in compiled.as_text()  # the kernel itself, not its interpretation


@needs_libtpu
def test_a_function_already_traced_for_cpu_compiles_the_real_kernel():
    jitted = jax.jit(matmul)
    a = jnp.ones((256, 256))
    assert (jitted(a, a) == 256).all()
    assert "tpu_custom_call" in aot_compile(jitted, a, a).as_text()
    assert (jitted(a, a) == 256).all()


@needs_libtpu
def test_a_jitted_function_keeps_its_donations():
    (x,) = avals((8, 128), dtype=jnp.float32)
    assert aot_compile(jax.jit(jnp.sin, donate_argnums=0), x).memory_analysis().alias_size_in_bytes == 4096
    assert aot_compile(jnp.sin, x).memory_analysis().alias_size_in_bytes == 0


@needs_libtpu
def test_compiles_a_sharded_program():
    mesh = Mesh(np.reshape(topology_devices("v5e:2x2"), (2, 2)), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    rows = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    tree = {"rows": rows, "bias": jnp.float32(0)}
    compiled = aot_compile(lambda tree: tree["rows"].sum() + tree["bias"], tree, mesh=mesh)
    assert "all-reduce" in compiled.as_text()
    assert compiled.memory_analysis().argument_size_in_bytes < 64 * 128 * 4  # each chip has half the rows


@needs_libtpu
def test_an_illegal_tile_is_refused():
    tile = (7, 100, 128)
    with pytest.raises(ValueError, match="divisible by 8 and 128"):
        aot_compile(lambda a, b: call_matmul(a, b, tile), *avals((1024, 1024), (1024, 1024)))


@needs_libtpu
def test_a_kernel_over_the_vmem_limit_is_refused_by_the_compiler_and_by_the_budget():
    args = avals((4096, 4096), (4096, 4096))
    with pytest.raises(ValueError, match="take smaller tiles"):
        matmul(*args, preferred=2048)
    blocks = [((2048, 1024), jnp.bfloat16), ((1024, 1024), jnp.bfloat16)], [((2048, 1024), jnp.bfloat16)]
    needed = budget(*blocks, [((2048, 1024), jnp.float32)], limit=2**30)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"size {needed / 2**20:.2f}M and limit 16.00M"):
        aot_compile(lambda a, b: call_matmul(a, b, (2048, 1024, 1024)), *args, topology="v5e:2x2")
    aot_compile(lambda a, b: call_matmul(a, b, (1024, 1024, 512)), *args, topology="v5e:2x2")


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(common.pallas.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AotUnavailable, match="libtpu is not installed"):
        aot_compile(matmul, *avals((8, 8), (8, 8)))
    with pytest.raises(AotUnavailable, match="libtpu is not installed"):
        predict_cycles("test_pallas:build_matmul", {"n": 8})


@needs_libtpu
def test_an_unknown_topology_is_named():
    with pytest.raises(AotUnavailable, match="refused the topology 'v7x'"):
        topology_devices("v7x")


# Predictions -----------------------------------------------------------------------------
HERE = Path(__file__).parent


@needs_libtpu
def test_predicts_no_less_than_the_matrix_unit_needs():
    n = 1000  # padded, so that the program has more operations than the kernel
    before = dict(os.environ)
    estimates = predict_cycles("test_pallas:build_matmul", {"n": n}, folder=HERE)
    assert os.environ.get("LIBTPU_INIT_ARGS") == before.get("LIBTPU_INIT_ARGS")
    assert len(estimates) > 1
    assert [e["cycles"] for e in estimates] == sorted((e["cycles"] for e in estimates), reverse=True)
    (kernel,) = [e for e in estimates if e["name"].startswith("matmul")]
    bound = 2 * n**3 / 131072
    assert bound <= kernel["cycles"] < 3 * bound
    seconds = predicted_seconds(kernel["cycles"], 2 * 2 * n**2 * 2 + 2 * n**2, 2 * n**3, "v5e")
    assert seconds == kernel["cycles"] / 1.5e9


@needs_libtpu
def test_slot_use_of_a_product_is_that_of_the_matrix_unit():
    (used,) = slot_use("test_pallas:build_matmul", {"n": 1024}, folder=HERE).values()
    assert used["bundles"] > 1000 and all(0 <= share <= 1 for name, share in used.items() if name != "bundles")
    assert used["MATMUL"] > 0.3 > used["EUP"] == 0  # a product has no exponentials


@needs_libtpu
def test_failures_of_the_prediction_say_what_happened():
    with pytest.raises(RuntimeError, match="(?s)exit 1, 0 estimates.*no attribute 'absent'"):
        predict_cycles("test_pallas:absent", folder=HERE)
    with pytest.raises(RuntimeError, match="exit 0, 0 estimates"):
        predict_cycles("test_pallas:build_nothing", folder=HERE)
    with pytest.raises(TimeoutError, match="no estimate after 2 s"):
        predict_cycles("test_pallas:build_endless", {"n": 8}, folder=HERE, timeout_s=2)
    with pytest.raises(AotUnavailable, match="v7x"):
        predict_cycles("test_pallas:build_matmul", {"n": 8}, folder=HERE, topology="v7x")


def test_predicted_seconds():
    assert predicted_seconds(1_500_000, 0, 0, "v5e") == 1e-3
    assert predicted_seconds(1, 1638e6, 0, "v6e") == 1e-3  # bound by bandwidth
    assert predicted_seconds(1000, 0, 2 * 131_072_000, "v5e", "int8") == 1000 / 1.5e9  # twice bfloat16's rate
    with pytest.raises(ValueError, match="999 cycles, but 131072000 bfloat16 FLOPs take at least 1000 on v5e"):
        predicted_seconds(999, 0, 131_072_000, "v5e")
    with pytest.raises(ValueError, match="'v7x': known are v5e, v6e"):
        predicted_seconds(1, 0, 0, "v7x")
    with pytest.raises(ValueError, match="no established clock or peak for float64"):
        predicted_seconds(1, 0, 0, "v5e", "float64")
