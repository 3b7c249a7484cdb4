"""The attention kernels against JAX's own attention, finite differences, compilers and planted bugs. No accelerator.

On a CPU the kernels are interpreted: small tiles, so that small sizes have at least four of them along each axis.
"""
import json
import math
import os
import platform
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

import kernels
import model
import train
from common import gradcheck
from common.pallas import aot_compile
from kernels import Tile, Tiles, attention_reference, decode_attention, flash_attention

HERE = Path(__file__).resolve().parent
GPU = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,),
                   abstract_device=AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"))
needs_libtpu = pytest.mark.skipif(not (sys.platform == "linux" and platform.machine() == "x86_64"),
                                  reason="not verified: TPU compiles; libtpu is for Linux x86_64 only")
PLAIN, CUT, KEYS_FIRST = Tile(16, 16), Tile(16, 16, strip=8), Tile(16, 16, strip=8, keys_first=True)


@pytest.fixture(autouse=True, scope="module")
def light_compiler():
    """Each case compiles its own programs, which takes longer than running them: half as long without optimisations."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def draw(B, H, G, T, S, K, dtype="float32", seed=0):
    """q, k, v and a cotangent."""
    shapes = (B, H, T, K), (B, G, S, K), (B, G, S, K), (B, H, T, K)
    keys = jax.random.split(jax.random.key(seed), 4)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes)]


def kernel(form, causal, tile):
    return partial(flash_attention, causal=causal, form=form, tiles=Tiles(tile, tile, tile))


def library(q, k, v, causal):
    """jax.nn.dot_product_attention in this project's layout; what it says of queries that see nothing is set to 0."""
    T, S = q.shape[2], k.shape[2]
    seen = jnp.tril(jnp.ones((T, S), bool), S - T) if causal else jnp.ones((T, S), bool)
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    o = jax.nn.dot_product_attention(q, k, v, mask=seen[None, None], implementation="xla").transpose(0, 2, 1, 3)
    return jnp.where(seen.any(1)[:, None], o, 0)


@partial(jax.jit, static_argnums=0)
def with_gradients(f, q, k, v, g):
    o, pull = jax.vjp(f, q, k, v)
    return o, *pull(g)


def errors(got, want):
    """‖got - want‖ / ‖want‖ of each pair; where the true value vanishes (dq of one key), relative to entries of 0.1
    (the operands' are about 1)."""
    pairs = [(np.asarray(a, float), np.asarray(b, float)) for a, b in zip(got, want)]
    return [float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 0.1 * b.size**0.5)) for a, b in pairs]


# Equality --------------------------------------------------------------------------------
# float32 rounds at 6e-8 and sums at most 130 terms here (measured: 4e-7 at most); bfloat16 inputs are exact in the
# float32 library call, and what is rounded are q, p, ds and the result, at 2^-9 each (measured: 5e-3 at most).
TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3}
CASES = [  # B, H, G, T, S, K, causal, dtype, tile
    (1, 1, 1, 64, 64, 8, True, "float32", CUT), (1, 1, 1, 64, 64, 8, False, "float32", KEYS_FIRST),
    (2, 2, 1, 61, 67, 8, True, "float32", PLAIN), (2, 2, 2, 67, 61, 8, True, "float32", KEYS_FIRST),
    (1, 4, 2, 61, 67, 16, False, "float32", PLAIN), (1, 2, 1, 49, 81, 8, True, "float32", CUT),
    (1, 1, 1, 1, 1, 8, True, "float32", PLAIN), (1, 2, 1, 1, 70, 8, True, "float32", KEYS_FIRST),
    (1, 2, 1, 70, 1, 8, True, "float32", CUT), (1, 1, 1, 70, 1, 8, False, "float32", KEYS_FIRST),
    (1, 3, 1, 48, 96, 8, True, "float32", KEYS_FIRST), (1, 1, 1, 96, 48, 8, True, "float32", CUT),
    (1, 1, 1, 65, 65, 32, True, "float32", Tile(16, 8)), (1, 1, 1, 65, 65, 64, True, "float32", Tile(8, 16)),
    (1, 1, 1, 65, 65, 128, True, "float32", KEYS_FIRST), (1, 2, 1, 33, 50, 128, False, "float32", Tile(8, 16)),
    (1, 2, 1, 130, 130, 8, True, "float32", Tile(32, 32, strip=16, keys_first=True)),
    (1, 2, 1, 64, 64, 64, True, "bfloat16", KEYS_FIRST), (1, 2, 2, 61, 67, 32, True, "bfloat16", CUT),
    (1, 1, 1, 67, 61, 128, False, "bfloat16", PLAIN), (1, 2, 1, 70, 1, 8, True, "bfloat16", PLAIN),
    (1, 2, 1, 1, 70, 64, False, "bfloat16", KEYS_FIRST), (1, 1, 1, 65, 65, 48, True, "bfloat16", Tile(16, 8)),
    (1, 4, 1, 33, 50, 8, True, "bfloat16", Tile(8, 16, keys_first=True))]
WITH_GRADIENTS = {0, 3, 4, 5, 6, 8, 14, 18}  # indices into CASES: three kernels take three times as long to compile


def name_of(case):
    B, H, G, T, S, K, causal, dtype, tile = case
    return f"B{B}H{H}G{G}-T{T}S{S}K{K}-{'causal' if causal else 'full'}-{dtype}-{tile.bT}x{tile.bS}" + \
        ("k" if tile.keys_first else "") + (f"s{tile.strip}" if tile.strip else "")


@pytest.mark.parametrize("form", ["tpu", "gpu"])
@pytest.mark.parametrize("i", range(len(CASES)), ids=[name_of(case) for case in CASES])
def test_equals_jax_attention(i, form):
    *sizes, causal, dtype, tile = CASES[i]
    q, k, v, g = draw(*sizes, dtype)
    f, wide = kernel(form, causal, tile), [x.astype("float32") for x in (q, k, v, g)]
    if i in WITH_GRADIENTS:
        got, want = with_gradients(f, q, k, v, g), with_gradients(partial(library, causal=causal), *wide)
    else:
        got, want = [jax.jit(f)(q, k, v)], [library(*wide[:3], causal)]
    assert all(a.dtype == q.dtype for a in got)
    assert max(errors(got, want)) <= TOLERANCE[dtype]


def test_the_reference_is_the_models_attention_and_jax_nn():
    q, k, v, g = draw(2, 4, 4, 13, 13, 8)
    assert max(errors(with_gradients(attention_reference, q, k, v, g),
                      with_gradients(model.attention_reference, q, k, v, g))) <= 1e-6
    for causal, sizes in ((True, (2, 4, 2, 13, 9, 8)), (False, (2, 4, 1, 9, 13, 8))):
        q, k, v, g = draw(*sizes)
        assert max(errors(with_gradients(partial(attention_reference, causal=causal), q, k, v, g),
                          with_gradients(partial(library, causal=causal), q, k, v, g))) <= 1e-6


@pytest.mark.parametrize("form, tile", [("tpu", PLAIN), ("tpu", KEYS_FIRST), ("gpu", PLAIN)])
def test_queries_that_see_nothing_give_zero(form, tile):
    q, k, v, g = draw(1, 1, 1, 40, 9, 8)  # the first 31 queries
    o, dq, dk, dv = with_gradients(kernel(form, True, tile), q, k, v, g)
    assert (o[:, :, :31] == 0).all() and (dq[:, :, :31] == 0).all()
    assert (o[:, :, 31:] != 0).all() and all(jnp.isfinite(x).all() for x in (o, dq, dk, dv))


@pytest.mark.parametrize("form, tile", [("tpu", PLAIN), ("tpu", KEYS_FIRST), ("gpu", PLAIN)])
@pytest.mark.parametrize("offset", [-40.0, 40.0])
def test_scores_far_from_zero_neither_overflow_nor_vanish(form, tile, offset):
    """All scores near -650 or 650 in base 2, where what stands past an edge would have a score of 0."""
    q, k, v, g = draw(1, 1, 1, 21, 37, 8)
    q, k = q + 40, k + offset / 10
    got = with_gradients(kernel(form, False, tile), q, k, v, g)
    want = with_gradients(partial(library, causal=False), q, k, v, g)
    assert max(errors(got, want)) <= 1e-4  # float32 rounds scores of 650 at 4e-5


# Tiles -----------------------------------------------------------------------------------
@pytest.mark.parametrize("T, S, bT, bS", [(64, 64, 16, 16), (61, 67, 16, 8), (67, 61, 8, 16), (40, 9, 16, 16),
                                          (1, 70, 16, 16)])
def test_tiles_above_the_diagonal_are_never_visited(T, S, bT, bS):
    t = kernels.Tiling(T, S, 8, bT, bS, 0, False, True)
    seen = np.tril(np.ones((T, S), bool), S - T)
    some = np.array([[seen[i:i + bT, j:j + bS].any() for j in range(0, S, bS)] for i in range(0, T, bT)])
    for i, row in enumerate(some):
        n = row.sum()
        assert int(t.key_tiles(i)) == n and row[:n].all()  # those seen come first
        assert [int(t.key_tile(i, j)) for j in range(len(row))] == [min(j, max(n - 1, 0)) for j in range(len(row))]
    for j, column in enumerate(some.T):
        first = int(t.first_query_tile(j))
        assert not column[:first].any() and column[first:].all()
        assert [int(t.query_tile(j, i)) for i in range(len(column))] == [max(i, first) for i in range(len(column))]


def test_keys_above_the_diagonal_are_not_computed_and_masked():
    """NaN there would come through a product with a probability of 0."""
    q, k, v, _ = draw(1, 1, 1, 64, 64, 8)
    k, v = (x.at[:, :, 32:].set(jnp.nan) for x in (k, v))
    for form, tile in (("tpu", CUT), ("tpu", KEYS_FIRST), ("gpu", PLAIN)):
        o = jax.jit(kernel(form, True, tile))(q, k, v)
        assert jnp.isfinite(o[:, :, :32]).all() and jnp.isnan(o[:, :, 32:]).all()


def test_strips_cover_what_is_seen_of_a_diagonal_tile_and_little_more():
    t = kernels.Tiling(64, 128, 8, 64, 64, 16, False, True)
    computed = np.zeros((64, 64), int)
    for queries, keys, seen in t.parts():
        computed[queries, keys] += 1
        assert np.tril(np.ones((64, 64)))[queries, keys.start:keys.start + seen].all()
    assert computed.max() == 1 and (computed >= np.tril(np.ones((64, 64), int))).all()
    assert computed.mean() == (4 + 1) / (2 * 4)
    assert t._replace(S=127).parts() == t._replace(causal=False).parts() == [(slice(0, 64), slice(0, 64), 0)]


@pytest.mark.parametrize("causal, tile", [(True, CUT), (False, KEYS_FIRST)])
def test_what_lies_past_the_edges_is_nan_and_does_not_matter(causal, tile, monkeypatch):
    q, k, v, g = draw(1, 1, 1, 61, 67 if not causal else 61, 8)
    got = with_gradients(kernel("tpu", causal, tile), q, k, v, g)
    assert max(errors(got, with_gradients(partial(library, causal=causal), q, k, v, g))) <= TOLERANCE["float32"]
    monkeypatch.setattr(kernels, "zero_past", lambda x, *_, **__: x)
    unguarded = with_gradients(kernel("tpu", causal, tile), q, k, v, g)
    assert all(jnp.isnan(x).any() for x in unguarded)  # so the NaN are really there


def test_one_code_path_for_all_sizes():
    """T = 2,000 and 8,191, with the tiles that the table gives them."""
    for T, rows in ((2000, 2000), (8191, 40)):
        q, k, v, _ = draw(1, 1, 1, T, T, 32)
        q = q[:, :, -rows:]
        got, want = jax.jit(partial(flash_attention, form="tpu"))(q, k, v), library(q, k, v, True)
        assert errors([got], [want])[0] <= TOLERANCE["float32"]


# Finite differences ----------------------------------------------------------------------
@pytest.mark.parametrize("form, causal, tile, sizes", [
    ("tpu", True, CUT, (1, 2, 1, 33, 33, 8)), ("tpu", True, KEYS_FIRST, (1, 1, 1, 37, 33, 8)),
    ("tpu", False, KEYS_FIRST, (1, 2, 1, 17, 33, 8)), ("gpu", True, PLAIN, (1, 2, 1, 33, 37, 8))])
def test_finite_differences_through_the_vjp_in_float64(form, causal, tile, sizes):
    with jax.enable_x64(True):
        q, k, v, _ = draw(*sizes, "float64")
        checks = gradcheck.vjp(kernel(form, causal, tile), q, k, v, key=jax.random.key(1))
        assert len(checks) == 3 and all(check.ok for check in checks), checks


# Bugs that must be caught ----------------------------------------------------------------
def mask_too_wide(tiling, i, j, queries, keys, query_axis):
    return kernels_visible(tiling._replace(S=tiling.S + 1), i, j, queries, keys, query_axis)


def mask_too_narrow(tiling, i, j, queries, keys, query_axis):
    return kernels_visible(tiling._replace(T=tiling.T + 1), i, j, queries, keys, query_axis)


kernels_visible = kernels.visible
BUGS = {"a dropped rescale": ("rescale", lambda m, m_new: jnp.ones_like(m)),
        "a mask one key too wide": ("visible", mask_too_wide),
        "a mask one key too narrow": ("visible", mask_too_narrow),
        "a missing scale": ("scale", lambda K: math.log2(math.e)),
        "dS without D": ("gradient_step", lambda s, dp, lse, D: (p := jnp.exp2(s - lse), p * dp))}


@pytest.mark.parametrize("form, tile", [("tpu", CUT), ("gpu", PLAIN)])
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug, form, tile, monkeypatch):
    monkeypatch.setattr(kernels, *BUGS[bug])
    args = draw(1, 1, 1, 50, 50, 8)
    got = with_gradients(kernel(form, True, tile), *args)
    want = with_gradients(partial(library, causal=True), *args)
    assert not all(error <= 1000 * TOLERANCE["float32"] for error in errors(got, want))  # a NaN is caught too


# Memory ----------------------------------------------------------------------------------
def test_residuals_grow_with_T_not_with_its_square():
    def kept(T):
        q, k, v, _ = (jax.ShapeDtypeStruct((1, 8, T, 128), jnp.bfloat16),) * 4
        _, residuals = jax.eval_shape(lambda q, k, v: kernels._flash_fwd(
            q, k, v, kernels.How(True, "tpu", kernels.tiles_for("v5e", True), True)), q, k, v)
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in residuals)
    assert kept(2048) == 2 * kept(1024) == 8 * 2048 * (4 * 128 * 2 + 4)


def test_tiles_that_do_not_fit_are_refused_with_the_numbers():
    q, k, v, _ = draw(1, 1, 1, 8192, 8192, 128)
    with pytest.raises(ValueError, match="VMEM.*take smaller tiles"):
        jax.eval_shape(kernel("tpu", True, Tile(8192, 8192)), q, k, v)


# Compilers -------------------------------------------------------------------------------
def avals(H, G, T, S, K, dtype=jnp.bfloat16, B=1):
    return [jax.ShapeDtypeStruct((B, heads, n, K), dtype) for heads, n in ((H, T), (G, S), (G, S), (H, T))]


def forward_and_backward(causal):
    return lambda *args: with_gradients(partial(flash_attention, causal=causal), *args)


def kernels_in(compiled):
    return compiled.as_text().count("tpu_custom_call")


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:1x1"])
@pytest.mark.parametrize("causal, sizes, dtype", [
    (True, (4, 2, 1, 1, 32), jnp.bfloat16), (True, (2, 1, 300, 1000, 64), jnp.float32),
    (False, (2, 2, 1000, 5, 128), jnp.bfloat16)])
def test_compiles_for_tpu(topology, causal, sizes, dtype):
    assert kernels_in(aot_compile(forward_and_backward(causal), *avals(*sizes, dtype), topology=topology)) >= 3


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:1x1"])
@pytest.mark.parametrize("causal, T, K, dtype", [
    (True, 2000, 128, jnp.bfloat16), (False, 8191, 64, jnp.bfloat16), (True, 2048, 32, jnp.float32),
    (False, 8192, 128, jnp.float32), (True, 32768, 128, jnp.bfloat16)])
def test_compiles_for_tpu_at_length(topology, causal, T, K, dtype):
    assert kernels_in(aot_compile(forward_and_backward(causal), *avals(8, 2, T, T, K, dtype), topology=topology)) >= 3


@needs_libtpu
@pytest.mark.slow
def test_memory_is_linear_in_T_where_the_naive_form_is_quadratic():
    def temporaries(f, T):
        compiled = aot_compile(f, *avals(8, 8, T, T, 128, B=8), topology="v5e:2x2")  # of less, scores stay in VMEM
        return compiled.memory_analysis().temp_size_in_bytes
    naive = [temporaries(partial(with_gradients, attention_reference), T) for T in (1024, 2048, 4096)]
    assert all(3.5 < b / a < 4.5 for a, b in zip(naive, naive[1:]))
    ours = [temporaries(forward_and_backward(True), T) for T in (1024, 2048, 4096, 8192)]
    assert all(b <= 2.2 * a + 2**20 for a, b in zip(ours, ours[1:])) and ours[2] < naive[2] / 50


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:1x1"])
def test_decoding_compiles_for_tpu(topology):
    for H, G, K, S in ((8, 2, 64, 1024), (4, 4, 32, 64), (8, 8, 128, 1000)):
        assert kernels_in(aot_compile(decode_attention, *decode_avals(H, G, K, S), topology=topology)) >= 1


def decode_avals(H, G, K, S):
    q, own, cache = (jax.ShapeDtypeStruct((2, *shape, K), jnp.bfloat16) for shape in ((H, 1), (G, 1), (G, S)))
    return q, own, own, cache, cache, jax.ShapeDtypeStruct((S,), jnp.bool_)


@pytest.mark.parametrize("sizes, causal", [((4, 2, 1, 1, 32), True), ((4, 2, 2000, 2000, 128), True),
                                           ((2, 1, 200, 100, 48), False)])
def test_lowers_for_triton(sizes, causal):
    with use_abstract_mesh(GPU):
        lowered = jax.jit(forward_and_backward(causal)).trace(*avals(*sizes)).lower(lowering_platforms=("cuda",))
        decoding = jax.jit(decode_attention).trace(*decode_avals(8, 2, 64, 1000)).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("triton") >= 3 and "triton" in decoding.as_text()


# The choice ------------------------------------------------------------------------------
def test_the_device_compiled_for_chooses_the_form():
    tpu = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,),
                       abstract_device=AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu"))
    assert kernels.choose_form() == "reference" and kernels.asked() == "tpu"
    with use_abstract_mesh(tpu):
        assert kernels.choose_form() == kernels.asked() == "tpu" and kernels.generation() == "v6e"
        assert kernels.choose_form("reference") == "reference"
    with use_abstract_mesh(GPU):
        assert kernels.choose_form() == "gpu"
    with pytest.raises(ValueError, match="'cuda' is not one of tpu, gpu, reference"):
        kernels.choose_form("cuda")
    q, k, v, _ = draw(1, 1, 1, 9, 9, 8)
    assert "pallas_call" not in str(jax.make_jaxpr(flash_attention)(q, k, v))
    assert "pallas_call" in str(jax.make_jaxpr(kernels.attention)(q, k, v))


def test_bad_input_is_refused_by_name():
    q, k, v, _ = draw(1, 3, 2, 9, 9, 8)
    with pytest.raises(ValueError, match=r"H = 3.*G = 2"):
        flash_attention(q, k, v)
    with pytest.raises(ValueError, match=r"got \(1, 3, 9, 8\), \(1, 2, 9, 8\), \(1, 2, 8, 8\)"):
        flash_attention(q, k, v[:, :, :8])
    with pytest.raises(ValueError, match="one floating dtype"):
        flash_attention(q[:, :2], k, v.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="dropout=0.1"):
        kernels.attention(q[:, :2], k, v, 0.1, jax.random.key(0))
    with pytest.raises(ValueError, match=r"past \(S,\)"):
        decode_attention(q[:, :2, :1], k[:, :, :1], v[:, :, :1], k, v, jnp.ones(8, bool))


# In the model ----------------------------------------------------------------------------
@pytest.mark.parametrize("form", ["tpu", "gpu"])
@pytest.mark.parametrize("H, G", [(2, 2), (4, 2)])
def test_decoding_equals_attend_cache_and_reads_no_further(form, H, G):
    q, k, v, _ = draw(2, H, G, 1, 1, 8)
    k_old, v_old = jax.random.normal(jax.random.key(3), (2, 2, G, 70, 8))
    repeated = [jnp.repeat(x, H // G, axis=1) for x in (k, v, k_old, v_old)]
    f = jax.jit(partial(decode_attention, form=form, tile=16))
    for length in (0, 1, 16, 33, 70):
        past = jnp.arange(70) < length
        want = model.attend_cache(q, *repeated, past)
        k_bad, v_bad = (jnp.where(past[:, None], x, jnp.nan) for x in (k_old, v_old))
        assert errors([f(q, k, v, k_bad, v_bad, past)], [want])[0] <= TOLERANCE["float32"]


def test_decode_step_with_the_kernel_gives_the_same_logits():
    cfg = model.GPTConfig(vocab_size=11, context=8, n_layer=2, n_head=2, n_embd=16)
    params = model.init_params(jax.random.key(0), cfg)
    _, cache = jax.jit(partial(model.prefill, cfg=cfg))(params, jnp.zeros((2, 8), jnp.int32), 5)
    arguments = model.pack(params, cfg, 2), cache, jnp.array([3, 4]), jnp.int32(5)
    got, want = (jax.tree.leaves(jax.jit(partial(model.decode_step, cfg=cfg, attend=attend))(*arguments))
                 for attend in (decode_attention, model.attend_cache))
    assert max(errors(got, want)) <= 1e-5


def fit(folder, *flags):
    return train.train(train.parse(["--n-layer=1", "--n-head=2", "--n-embd=16", "--context=32", "--batch-size=64",
                                    "--eval-batches=20", "--dataset=python-docs", "--max-iters=3", "--log-interval=1",
                                    f"--out-dir={folder}", *flags]))


def test_three_training_steps_give_the_reference_paths_losses(tmp_path, capsys):
    want = fit(tmp_path / "reference")
    assert "interpret mode" not in capsys.readouterr().out
    got = fit(tmp_path / "pallas", "--attention=pallas")
    assert capsys.readouterr().out.count("interpret mode") == 1
    rows = [[json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
            for name in ("reference", "pallas")]
    losses = [[row["loss"] for row in part if "loss" in row] for part in rows]
    assert len(losses[0]) == 3 and np.allclose(*losses, rtol=1e-5, atol=0)
    assert math.isclose(got.val_loss, want.val_loss, rel_tol=1e-5)


def test_without_common_one_line_says_what_is_missing(tmp_path):
    folder = tmp_path / "alone"
    folder.mkdir()
    for path in HERE.glob("*.py"):
        shutil.copy(path, folder)
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['common'] = None  # also where it is installed\n")
    done = subprocess.run([sys.executable, "train.py", "--attention=pallas", "--dataset=python-docs"], cwd=folder,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=900)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "--attention pallas needs common/" in done.stderr and "notebook" in done.stderr


def test_dropout_is_refused_at_once(tmp_path, capsys):
    with pytest.raises((SystemExit, ValueError)):
        fit(tmp_path / "run", "--attention=pallas", "--dropout=0.1")
    assert not (tmp_path / "run").exists()
