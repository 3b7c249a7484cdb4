"""The grouped products against lax.ragged_dot, finite differences, compilers and planted bugs. No accelerator.

On a CPU the kernels are interpreted: small blocks, so that small sizes have at least four of them along each axis.
"""
import json
import math
import platform
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

import bench_kernels
import kernels
from common import gradcheck
from common.pallas import AotUnavailable, aot_compile, topology_devices
from kernels import Tile, Tiles, grouped_matmul, grouped_matmul_reference, grouped_matmul_transposed

HERE = Path(__file__).resolve().parent
SMALL = Tiles(*[Tile(8, 8, 8)] * 3)
needs_libtpu = pytest.mark.skipif(not (sys.platform == "linux" and platform.machine() == "x86_64"),
                                  reason="not verified: TPU compiles; libtpu is for Linux x86_64 only")


@pytest.fixture(autouse=True, scope="module")
def light_compiler():
    """Each case compiles its own programs, which takes longer than running them: half as long without optimisations."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def draw(M, K, N, E, dtype="float32", seed=0):
    """x, w and a cotangent."""
    keys = jax.random.split(jax.random.key(seed), 3)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, ((M, K), (E, K, N), (M, N)))]


def sizes_of(*sizes):
    return jnp.array(sizes, jnp.int32)


@partial(jax.jit, static_argnums=0)
def with_gradients(f, x, w, g, group_sizes):
    y, pull = jax.vjp(lambda x, w: f(x, w, group_sizes), x, w)
    return y, *pull(g)


def loop(x, w, g, group_sizes):
    """y, dx and dw, a group at a time in NumPy, in float64."""
    x, w, g = (np.asarray(z, "float64") for z in (x, w, g))
    y, dx, dw, start = np.zeros_like(g), np.zeros_like(x), np.zeros_like(w), 0
    for e, size in enumerate(np.asarray(group_sizes)):
        own = slice(start, start + size)
        y[own], dx[own], dw[e] = x[own] @ w[e], g[own] @ w[e].T, x[own].T @ g[own]
        start += size
    return y, dx, dw


def errors(got, want):
    """‖got - want‖ / ‖want‖ of each pair; absolute where the true value is 0."""
    pairs = [(np.asarray(a, float), np.asarray(b, float)) for a, b in zip(got, want)]
    return [float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1)) for a, b in pairs]


# Equality --------------------------------------------------------------------------------
# float32 rounds at 6e-8, in sums of at most 70 terms; of bfloat16 operands, exact in the float64 loop, only the result
# is rounded, at 2^-9 = 2e-3.
TOLERANCE = {"float32": 5e-7, "bfloat16": 2e-3}
SIZES = {  # of 6 groups among 40 rows, in blocks of 8
    "whole blocks": (8, 16, 0, 8, 0, 8), "odd": (5, 9, 3, 18, 1, 4), "all in the first": (40, 0, 0, 0, 0, 0),
    "all in one": (0, 0, 40, 0, 0, 0), "all in the last": (0, 0, 0, 0, 0, 40), "one row each": (1, 1, 1, 1, 1, 1),
    "empty first, between, last": (0, 17, 0, 0, 23, 0), "empty inside a block": (12, 0, 3, 0, 0, 25),
    "several groups a block": (2, 1, 0, 3, 1, 33), "rows of none": (7, 0, 6, 3, 2, 0),
    "rows of none from a block's edge on": (8, 3, 0, 13, 0, 0), "only rows of none": (0, 0, 0, 0, 0, 0)}
SHAPES = {  # K, N, group sizes, rows of no group, dtype, Tile
    "all in one block": (70, 50, (20, 0, 30), 1, "float32", Tile(64, 128, 128)),
    "unlike blocks": (65, 33, (20, 3, 30), 7, "float32", Tile(16, 24, 8)),
    "one row": (1, 1, (0, 1), 0, "float32", Tile(8, 8, 8)),
    "no rows, no K": (0, 5, (0, 0), 0, "float32", Tile(8, 8, 8)),
    "no groups, no N": (9, 0, (), 7, "float32", Tile(8, 8, 8)),
    "bfloat16, K in one block": (64, 48, (33, 31), 0, "bfloat16", Tile(16, 128, 16))}


traced = []


def in_small_blocks(x, w, group_sizes):
    traced.append(x.shape)
    return grouped_matmul(x, w, group_sizes, tiles=SMALL)


def check(f, args, sizes):
    got, want = with_gradients(f, *args, sizes_of(*sizes)), loop(*args, sizes)
    dtype = args[0].dtype.name
    assert [z.dtype for z in got] == [dtype] * 3 and [z.shape for z in got] == [z.shape for z in want]
    assert max(errors(got, want)) <= TOLERANCE[dtype]
    for a, b in zip(got, want):  # rows of none and empty groups are exactly 0
        assert not np.asarray(a, float)[b == 0].any()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", SIZES)
def test_equals_a_loop_over_groups(sizes, dtype):
    """At least four blocks along each axis, the last ones cut. The sizes are data: one program serves them all."""
    check(in_small_blocks, draw(40, 33, 37, 6, dtype), SIZES[sizes])


@pytest.mark.parametrize("case", SHAPES)
def test_equals_a_loop_in_other_shapes(case):
    K, N, sizes, rest, dtype, tile = SHAPES[case]
    f = partial(grouped_matmul, tiles=Tiles(tile, tile, tile))
    check(f, draw(sum(sizes) + rest, K, N, len(sizes), dtype), sizes)


def test_ragged_dot_the_reference_and_the_default_blocks_agree():
    sizes = sizes_of(100, 0, 37, 130, 1, 32)
    x, w, g = draw(310, 40, 24, 6)
    want = with_gradients(lax.ragged_dot, x, w, g, sizes)
    for f in (grouped_matmul, grouped_matmul_reference):
        assert max(errors(with_gradients(f, x, w, g, sizes), want)) <= TOLERANCE["float32"]
    assert (grouped_matmul_transposed(x, g, sizes) == with_gradients(grouped_matmul, x, w, g, sizes)[2]).all()


def test_other_sizes_compile_nothing_and_too_large_ones_are_cut():
    args = draw(40, 33, 37, 6)
    first = with_gradients(in_small_blocks, *args, sizes_of(9, 0, 31, 0, 0, 0))
    random, programs = np.random.default_rng(0), len(traced)
    for _ in range(20):
        check(in_small_blocks, args, np.diff(np.sort(random.integers(0, 41, 7))))
    cut = with_gradients(in_small_blocks, *args, sizes_of(9, 0, 70, 5, 0, 2))
    assert all((a == b).all() for a, b in zip(cut, first)) and len(traced) == programs


def test_what_stands_in_other_rows_does_not_matter():
    """NaN in the rows of none and in one group's stays there: nothing is multiplied by 0 and added."""
    sizes = sizes_of(5, 9, 6, 0, 0, 0)
    x, w, g = draw(40, 33, 37, 6)
    clean = with_gradients(in_small_blocks, x, w, g, sizes)
    bad = jnp.isin(jnp.arange(40), jnp.array([*range(5, 14), *range(20, 40)]))[:, None]  # group 1 and rows of none
    x, g = (jnp.where(bad, jnp.nan, z) for z in (x, g))
    y, dx, dw = with_gradients(in_small_blocks, x, w, g, sizes)
    for got, want in ((y, clean[0]), (dx, clean[1])):
        assert (got[:5] == want[:5]).all() and (got[14:] == want[14:]).all() and jnp.isnan(got[5:14]).all()
    others = jnp.array([0, 2, 3, 4, 5])
    assert (dw[others] == clean[2][others]).all() and jnp.isnan(dw[1]).all()


def test_garbage_past_the_edges_is_really_there(monkeypatch):
    x, w, g = draw(29, 17, 19, 3)
    monkeypatch.setattr(kernels, "zero_past", lambda x, n, axis: x)
    y, dx, _ = with_gradients(partial(grouped_matmul, tiles=SMALL), x, w, g, sizes_of(5, 9, 6))
    assert jnp.isnan(y[:20]).all() and jnp.isnan(dx[:20]).all()


def test_nothing_is_read_before_it_is_written():
    """The TPU simulator's VMEM starts as NaN, and keeps blocks between steps as the hardware does."""
    simulated = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
    check(partial(grouped_matmul, tiles=SMALL, interpret=simulated), draw(17, 16, 16, 3), (5, 0, 9))


# The walk --------------------------------------------------------------------------------
@pytest.mark.parametrize("for_dw", [False, True])
def test_each_row_is_in_one_visit_and_blocks_come_in_order(for_dw):
    random = np.random.default_rng(0)
    for M, bM, E in ((1, 4, 1), (15, 4, 3), (16, 4, 5), (40, 8, 6), (7, 16, 9)):
        walk = jax.jit(partial(kernels.visits_of, M=M, bM=bM, for_dw=for_dw))
        for _ in range(40):
            sizes = random.multinomial(random.integers(0, M + 1), random.dirichlet(np.full(E, 0.5))).astype(np.int32)
            visits, n = walk(sizes)
            block, group, start, stop = (np.asarray(z)[:int(n)] for z in visits[:4])
            owner = np.repeat(np.arange(E + 1), [*sizes, M - sizes.sum()])
            seen = [(int(b) * bM + r, int(e)) for b, e, lo, hi in zip(block, group, start, stop) for r in range(lo, hi)]
            rows = M if not for_dw else sizes.sum()
            assert [row for row, _ in seen] == list(range(rows))
            assert all(owner[row] in (e, E) for row, e in seen)
            live = int(visits.live[0])
            assert all(owner[row] < E for row, _ in seen[:int((stop - start)[:live].sum())])
            assert (np.diff(block) >= 0).all() and (np.diff(group) >= 0).all() and (block < -(-M // bM)).all()
            assert n <= -(-M // bM) + E <= len(visits.block) - 1
            assert set(group) == set(range(E)) if for_dw else (stop > start).all()


def test_bytes_are_counted_from_the_index_maps():
    """16 rows, K 8, N 16, 2 groups, blocks of 4 x 8 x 8, float32."""
    call = bench_kernels.call_of("forward", (16, 8, 16, 2), Tile(4, 8, 8), "float32")
    x, w, y = 16 * 8 * 4, 2 * 8 * 16 * 4, 16 * 16 * 4
    assert kernels.hbm_bytes(call, [8, 8]) == 2 * x + w + y  # x once a block of columns, w once
    assert kernels.hbm_bytes(call, [6, 10]) == 2 * x + w + y  # a block of two groups is fetched and written once
    assert kernels.hbm_bytes(call, [16, 0]) == 2 * x + w // 2 + y  # an empty group's matrix is not fetched
    assert kernels.hbm_bytes(call, [4, 4]) == x + w + y  # nor are rows of none
    call = bench_kernels.call_of("forward", (16, 8, 16, 2), Tile(4, 4, 8), "float32")
    assert kernels.hbm_bytes(call, [8, 8]) == 2 * x + 2 * w + y  # K in two blocks: w once a visit
    call = bench_kernels.call_of("dx", (16, 8, 16, 2), Tile(4, 8, 16), "float32")
    assert kernels.hbm_bytes(call, [8, 8]) == y + w + x
    call = bench_kernels.call_of("dw", (16, 8, 16, 2), Tile(4, 8, 8), "float32")
    assert kernels.hbm_bytes(call, [8, 8]) == kernels.hbm_bytes(call, [6, 10]) == 2 * x + y + w


# Finite differences ----------------------------------------------------------------------
def test_finite_differences_through_the_vjp_in_float64():
    """K and N in one block each; gradcheck.py has them in several."""
    with jax.enable_x64(True):
        x, w, _ = draw(21, 10, 11, 4, "float64")
        f = partial(grouped_matmul, group_sizes=sizes_of(5, 0, 9, 3), tiles=Tiles(*[Tile(8, 16, 16)] * 3))
        checks = gradcheck.vjp(f, x, w, key=jax.random.key(1))
        assert len(checks) == 2 and all(check.ok for check in checks), checks


# Bugs that must be caught ----------------------------------------------------------------
own_rows, visits_of = kernels.own_rows, kernels.visits_of
BUGS = {"a mask one row too wide": ("own_rows", lambda shape, start, stop: own_rows(shape, start, stop + 1)),
        "a mask one row too narrow": ("own_rows", lambda shape, start, stop: own_rows(shape, start + 1, stop)),
        "no visit for an empty group": ("visits_of", lambda *args, for_dw=False: visits_of(*args)),
        "w not transposed for dx": ("NT", kernels.NN)}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug, monkeypatch):
    monkeypatch.setattr(kernels, *BUGS[bug])
    sizes = (5, 0, 9, 4)
    args = draw(18, 8, 8, 4)
    got = with_gradients(partial(grouped_matmul, tiles=SMALL), *args, sizes_of(*sizes))
    assert not all(error <= 1000 * TOLERANCE["float32"] for error in errors(got, loop(*args, sizes)))  # NaN, too


# Compilers -------------------------------------------------------------------------------
def avals(M, K, N, E, dtype=jnp.bfloat16):
    shapes = ((M, K), dtype), ((E, K, N), dtype), ((M, N), dtype), ((E,), jnp.int32)
    return [jax.ShapeDtypeStruct(*shape) for shape in shapes]


def compiled(topology, *sizes):
    f = partial(with_gradients.__wrapped__, grouped_matmul)
    return aot_compile(f, *avals(*sizes), topology=topology).as_text().count("tpu_custom_call")


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:1x1"])
@pytest.mark.parametrize("sizes", [(300, 200, 130, 5, jnp.float32), (2048, 128, 512, 8), (5, 1, 3, 2)])
def test_compiles_for_tpu(topology, sizes):
    assert compiled(topology, *sizes) >= 3


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:1x1"])
@pytest.mark.parametrize("sizes", [(8192, 4096, 14336, 8), (8191, 1000, 4100, 32)])
def test_compiles_for_tpu_at_length(topology, sizes):
    assert compiled(topology, *sizes) >= 3


def test_default_blocks_stay_in_the_budget():
    for generation in (None, "v5e", "v6e"):
        for dtype in ("bfloat16", "float32"):
            for shape in ((8192, 4096, 14336, 8), (8191, 4100, 14337, 7), (65536, 8192, 28672, 64)):
                tiles = kernels.tiles_for(generation, shape[0], shape[3])
                used = [kernels.vmem(bench_kernels.call_of(kernel, shape, getattr(tiles, kernel), dtype))
                        for kernel in bench_kernels.KERNELS]
                assert max(used) <= (kernels.VMEM_LIMIT if generation else 16 * 2**20)


def test_tiles_that_do_not_fit_are_refused_with_the_numbers():
    x, w, _, sizes = avals(8192, 8192, 8192, 8)
    with pytest.raises(ValueError, match="VMEM.*take smaller tiles"):
        jax.eval_shape(partial(grouped_matmul, tiles=Tiles(*[Tile(4096, 8192, 8192)] * 3)), x, w, sizes)


def test_an_estimate_is_not_repeated_for_the_same_code(tmp_path, monkeypatch):
    made = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_kernels, "estimate", lambda *args: made.append(args) or len(made))
    monkeypatch.setattr(bench_kernels.importlib.metadata, "version", lambda name: "1")  # libtpu may be missing
    asked = [("ours", "v5e", "dx", (8, 8, 8, 1), Tile(8, 8, 8)), ("ours", "v6e", "dx", (8, 8, 8, 1), Tile(8, 8, 8))]
    assert [bench_kernels.kept_estimate(*args) for args in asked * 2] == [1, 2, 1, 2] and made == asked
    monkeypatch.setattr(bench_kernels.importlib.metadata, "version", lambda name: "2")
    assert bench_kernels.kept_estimate(*asked[0]) == 3


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("kernel", bench_kernels.KERNELS)
def test_the_twins_take_no_more_cycles_than_megabloxs(kernel):
    try:
        topology_devices("v5e:1x1")
    except AotUnavailable as why:
        pytest.skip(f"not verified: predicted cycles; {why}")
    shape, tile = (2048, 1024, 1024, 2), (512, 512, 512)
    ours, theirs = (bench_kernels.estimate(side, "v5e", kernel, shape, tile) for side in ("ours", "megablox"))
    bound = 2 * math.prod(shape[:3]) / 131072
    assert bound <= ours <= 1.05 * theirs


@pytest.mark.parametrize("kernel", bench_kernels.KERNELS)
def test_the_twins_compute_the_same(kernel, monkeypatch):
    """Static twins of both sides, interpreted, against the kernel that reads its walk from memory."""
    monkeypatch.setattr(pltpu, "with_memory_space_constraint", lambda x, _: x)
    monkeypatch.setattr(pltpu, "HBM", jax.ShapeDtypeStruct)
    shape, tile = (64, 32, 48, 4), (8, 16, 16)
    x, w, g = draw(*shape, "bfloat16")
    want = loop(x, w, g, [16] * 4)[bench_kernels.KERNELS.index(kernel)]
    operands = {"forward": (x, w), "dx": (g, w), "dw": (x, g)}[kernel]
    for build in (bench_kernels.build_ours, bench_kernels.build_megablox):
        f, _ = build(kernel, shape, tile, interpret=True)
        assert max(errors([jax.jit(f)(*operands)], [want])) <= TOLERANCE["bfloat16"]


# The choice, and bad input ---------------------------------------------------------------
def test_a_gpu_is_refused_and_the_alternative_named():
    gpu = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=AbstractDevice(
        device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"))
    x, w, _, sizes = avals(16, 8, 8, 2)
    with use_abstract_mesh(gpu), pytest.raises(NotImplementedError, match="ragged_dot runs everywhere"):
        jax.eval_shape(grouped_matmul, x, w, sizes)


def test_bad_input_is_refused_by_name():
    x, w, g = draw(9, 4, 6, 3)
    sizes = sizes_of(2, 3, 4)
    with pytest.raises(ValueError, match=r"got \(9, 6\), \(3, 4, 6\) and \(3,\)"):
        grouped_matmul(g, w, sizes)
    with pytest.raises(ValueError, match=r"and \(2,\)"):
        grouped_matmul(x, w, sizes[:2])
    with pytest.raises(ValueError, match="one floating dtype; got float32 and bfloat16"):
        grouped_matmul(x, w.astype(jnp.bfloat16), sizes)
    with pytest.raises(ValueError, match="must be integers; got float32"):
        grouped_matmul(x, w, sizes / 1)
    with pytest.raises(ValueError, match=r"g \(M, N\).*\(8, 6\)"):
        grouped_matmul_transposed(x, g[:8], sizes)


# The report ------------------------------------------------------------------------------
def test_the_committed_predictions_are_valid_and_at_most_megabloxs_by_a_twentieth():
    path = HERE / "results" / "kernels.json"
    if not path.exists():
        pytest.skip("not verified: results/kernels.json is not there; python bench_kernels.py writes it")
    result = json.loads(path.read_text(encoding="utf-8"))
    beside = [r for r in result["table"] if r["megablox"]]
    assert {(r["generation"], r["kernel"]) for r in beside} == {(g, k) for g in ("v5e", "v6e") for k in
                                                                 bench_kernels.KERNELS}
    assert all(r["bound"] <= r["cycles"] for r in result["table"])
    assert all(r["cycles"] <= 1.05 * r["megablox"] for r in beside)
    assert all(row["predicted"] for row in result["rows"])
    tables = bench_kernels.readme_tables(result)
    assert "9.47" in tables["kernels-published"] and "predicted" in tables["kernels-published"]
