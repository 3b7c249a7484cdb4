"""Fast CPU tests of expert parallelism, on 8 simulated devices."""
import dataclasses
import functools
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import model
from common.pallas import AotUnavailable, aot_compile, topology_devices
from expert_parallel import (collectives, exchange_bytes, expert_mesh, gradient_of, moe_layer_parallel, param_specs,
                             place, random_layer, relative_errors, ring_seconds)

HERE = Path(__file__).resolve().parent
CFG = model.MoEConfig(vocab_size=11, context=16, n_layer=1, n_head=1, n_embd=16, n_hidden=24, n_experts=8, top_k=2,
                      capacity_factor=1.25, dispatch="gather", balance_weight=0.3, z_weight=0.1)


def config(**changes):
    return dataclasses.replace(CFG, **changes)


@functools.cache
def programs(cfg, n):
    """(x, p, weights, mask) -> {y, aux, dx, dp}: over n devices, and of model.moe_layer on one."""
    parallel = partial(moe_layer_parallel, cfg=cfg, mesh=expert_mesh(n))
    return gradient_of(parallel, cfg), gradient_of(partial(model.moe_layer, cfg=cfg), cfg)


def both(cfg, n, x, p, weights, mask=None):
    mask = np.ones(x.shape[:2], bool) if mask is None else mask
    parallel, single = programs(cfg, n)
    return parallel(*place(x, p, expert_mesh(n)), weights, mask), single(x, p, weights, mask)


def assert_equal(got, want, tolerance=1e-6):
    errors = relative_errors(got, want)
    assert jax.tree.structure(got) == jax.tree.structure(want) and len(errors) == len(jax.tree.leaves(want)) >= 10
    assert max(errors.values()) <= tolerance, {path: e for path, e in errors.items() if not e <= tolerance}


# Equality with one device ----------------------------------------------------------------

TWO_EACH = config(n_experts=16, activation="swiglu", shared_hidden=8)
SWITCH = config(top_k=1, activation="relu")


@pytest.mark.parametrize("n, cfg", [
    pytest.param(8, CFG, id="8 devices"),
    pytest.param(8, TWO_EACH, id="16 experts on 8"),
    pytest.param(4, SWITCH, id="k = 1 on 4"),
    pytest.param(1, SWITCH, id="1 device"),
    pytest.param(2, config(n_experts=6, top_k=3, priority="choice", renormalise=False), id="6 experts on 2",
                 marks=pytest.mark.slow),
])
def test_outputs_statistics_and_gradients_equal_one_device(n, cfg):
    got, want = both(cfg, n, *random_layer(cfg, 8))
    assert all(np.linalg.norm(leaf) > 0 for leaf in jax.tree.leaves(want))  # dropped, too: some choices are
    assert_equal(got, want)


def test_in_float64_only_the_order_of_sums_differs():
    with jax.enable_x64(True):
        cfg = config(dtype="float64")
        x, p, weights = jax.tree.map(np.float64, random_layer(cfg, 2))
        got, want = both(cfg, 2, x, p, weights)
        assert got["y"].dtype == jnp.float64
        assert_equal(got, want, tolerance=1e-14)


def test_bfloat16_tokens_keep_their_type():
    x, p, _ = random_layer(CFG, 2)
    x = jnp.asarray(x, "bfloat16")
    got, _ = jax.jit(partial(moe_layer_parallel, cfg=CFG, mesh=expert_mesh(2)))(x, p)
    want, _ = jax.jit(partial(model.moe_layer, cfg=CFG))(x, p)
    assert got.dtype == want.dtype == jnp.bfloat16
    assert relative_errors([got], [want])["0"] <= 2**-8  # equal but for roundings to 8 bits that fall the other way


@pytest.mark.parametrize("n, cfg", [(8, CFG), (4, SWITCH)], ids=["k = 2", "k = 1"])
def test_all_tokens_may_choose_the_same_experts(n, cfg):
    """Expert 0 (and 1) overflow, the rest are empty: full slots and drops on one device, zero rows on the others."""
    k, T = cfg.top_k, cfg.context
    x, p, weights = random_layer(cfg, 8)
    x[..., 0] = 5.0
    p["w_router"] /= 10
    p["w_router"][0] = 4.0, 2.0, 0, 0, 0, 0, 0, 0
    got, want = both(cfg, n, x, p, weights)
    assert_equal(got, want)
    assert np.allclose(got["aux"]["load"], [1 / k] * k + [0] * (8 - k))
    assert np.isclose(got["aux"]["dropped"], 1 - model.capacity(T, 8, k, cfg.capacity_factor) / T, atol=1e-6)
    assert (np.asarray(got["dp"]["w_out"])[k:] == 0).all() and (np.asarray(got["dp"]["w_out"])[:k] != 0).any()


def test_sequences_of_padding_change_nothing():
    """Some devices' tokens are masked altogether: their values don't matter, and the rest is as without them."""
    x, p, weights = random_layer(CFG, 8)
    mask = (np.arange(8) < 5)[:, None] & (np.arange(16) < 13)
    got, want = both(CFG, 8, x, p, weights, mask)
    assert_equal(got, want)
    other, _ = both(CFG, 8, np.where(mask[..., None], x, np.float32(7)), p, weights, mask)
    assert_equal(other, got)
    assert (np.asarray(got["y"])[~mask] == 0).all() and (np.asarray(got["dx"])[~mask] == 0).all()


def test_a_batch_of_padding_only_is_finite():
    x, p, weights = random_layer(CFG, 8)
    got, _ = both(CFG, 8, x, p, weights, np.zeros(x.shape[:2], bool))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got)) and (np.asarray(got["y"]) == 0).all()


def test_the_balance_loss_is_that_of_all_tokens():
    """Each device's tokens choose an expert of their own: balanced over all, collapsed on each device."""
    x, p, weights = random_layer(SWITCH, 8)
    p["w_router"] = 6 * np.eye(16, 8, dtype=np.float32)  # feature e chooses expert e
    own = np.repeat(np.arange(4), 2)  # two sequences a device
    for feature, balance in ((own, 2), (np.zeros(8, int), 8)):  # E / 4: four of eight experts, evenly; and E
        x[:] = 4 * np.eye(16)[feature][:, None]
        got, want = both(SWITCH, 4, x, p, weights)
        assert np.isclose(got["aux"]["balance"], balance, atol=1e-4)
        assert np.isclose(want["aux"]["balance"], balance, atol=1e-4)


def test_sequences_on_other_devices_do_not_matter():
    x, p, _ = random_layer(CFG, 8)
    f = jax.jit(partial(moe_layer_parallel, cfg=CFG, mesh=expert_mesh(8)))
    changed = np.concatenate([x[:1], 2 * x[1:] + 1])
    y, other = f(x, p)[0], f(changed, p)[0]
    assert jnp.array_equal(y[0], other[0]) and not jnp.array_equal(y[1], other[1])


# What it costs ---------------------------------------------------------------------------

def sizes_of(op, program):
    return [size for found, size in collectives(program) if found == op]


def test_two_all_to_alls_forward_and_two_more_backward():
    x, p, weights = random_layer(TWO_EACH, 8)
    x, p = place(x, p, expert_mesh(8))
    forward = jax.jit(partial(moe_layer_parallel, cfg=TWO_EACH, mesh=expert_mesh(8))).lower(x, p).compile()
    gradient = programs(TWO_EACH, 8)[0].lower(x, p, weights, np.ones(x.shape[:2], bool)).compile()

    size = exchange_bytes(TWO_EACH, *x.shape[:2], 8, x.dtype.itemsize)
    assert size == 16 * model.capacity(16, 16, 2, 1.25) * 16 * 4
    assert sizes_of("all-to-all", forward) == [size] * 2 and sizes_of("all-to-all", gradient) == [size] * 4
    statistics = 4 * (2 * 16 + 3)  # load and probs of 16 experts, z, tokens, kept
    replicated = sum(p[name].nbytes for name in ("w_router", "shared_in", "shared_out"))
    assert sum(sizes_of("all-reduce", forward)) == statistics
    assert sum(sizes_of("all-reduce", gradient)) == replicated + statistics
    assert {op for op, _ in collectives(gradient)} == {"all-to-all", "all-reduce"}


def test_each_device_holds_its_share_and_so_do_its_gradients():
    x, p, weights = random_layer(TWO_EACH, 8)
    x, p = place(x, p, expert_mesh(8))
    out = programs(TWO_EACH, 8)[0](x, p, weights, np.ones(x.shape[:2], bool))
    for tree in (p, out["dp"]):
        assert {a.data.shape[0] for a in tree["w_in"].addressable_shards} == {2}
        assert {a.data.shape for a in tree["w_router"].addressable_shards} == {(16, 16)}
    assert {a.data.shape[0] for a in out["y"].addressable_shards} == {1}


def ring_all_to_all_seconds(n, nbytes, link):
    """By simulation: every device sends nbytes / n to each other one, the shorter way; the fullest link decides."""
    load = np.zeros((n, 2))  # bytes on the link from i to i + 1, and from i + 1 to i
    for source in range(n):
        for step in range(1, n):
            halves = [1.0, 0.0] if step < n - step else [0.0, 1.0] if step > n - step else [0.5, 0.5]
            for hop in range(step):
                load[(source + hop) % n, 0] += halves[0] * nbytes / n
            for hop in range(n - step):
                load[(source - hop - 1) % n, 1] += halves[1] * nbytes / n
    return load.max() / link


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 16])
def test_the_price_of_an_all_to_all_is_that_of_the_fullest_link(n):
    assert np.isclose(ring_seconds("all-to-all", 1e6, n, 1e9), ring_all_to_all_seconds(n, 1e6, 1e9), rtol=1e-12)


def test_prices_of_reductions():
    assert np.isclose(ring_seconds("all-reduce", 8e6, 8, 1e9), 2 * 7e6 / 2e9)
    assert ring_seconds("all-gather", 8e6, 8, 1e9) == ring_seconds("all-reduce", 8e6, 8, 1e9) / 2
    with pytest.raises(ValueError, match="collective-permute"):
        ring_seconds("collective-permute", 1, 8)


def test_collectives_are_read_from_hlo_text():
    class Program:
        def as_text(self):
            return ("%a = (f32[2,3]{1,0:T(8,128)}, bf16[4]{0}) all-to-all(f32[2,3] %x, bf16[4] %y), dimensions={0}\n"
                    '%r = s32[] all-reduce-start(s32[] %z), to_apply=%add, metadata={op_name="psum"}\n'
                    "%d = s32[] all-reduce-done(s32[] %r)\n  ROOT %g = pred[8,2]{1,0} all-gather(pred[1,2] %q)\n")
    assert collectives(Program()) == [("all-to-all", 32), ("all-reduce", 4), ("all-gather", 16)]


@pytest.mark.slow
def test_a_tpu_program_has_the_same_collectives():
    try:
        mesh = Mesh(np.array(topology_devices("v5e:2x4")), ("expert",), axis_types=(AxisType.Auto,))
    except AotUnavailable as why:
        pytest.skip(f"not verified: the TPU program's collectives ({why})")
    cfg = config(n_embd=128, n_hidden=256, context=64)
    x, p, _ = random_layer(cfg, 8)

    def described(a, spec):
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))
    specs = param_specs(p)
    program = aot_compile(partial(moe_layer_parallel, cfg=cfg, mesh=mesh), described(x, P("expert")),
                          {name: described(a, specs[name]) for name, a in p.items()}, mesh=mesh)
    assert sizes_of("all-to-all", program) == [exchange_bytes(cfg, 8, 64, 8, 4)] * 2


# Bad input, and the command --------------------------------------------------------------

@pytest.mark.parametrize("changes, B, axis, message", [
    ({"dispatch": "dropless"}, 8, "expert", "dispatch='dropless'.*dispatch='gather'"),
    ({"dispatch": "expert_choice"}, 8, "expert", "dispatch='expert_choice'"),
    ({"n_experts": 0}, 8, "expert", "n_experts=0"),
    ({}, 6, "expert", "6 sequences and 8 experts on 8 devices"),
    ({"n_experts": 12}, 8, "expert", "12 experts on 8 devices"),
    ({}, 8, "experts", "axes.*not 'experts'"),
])
def test_bad_input_is_refused_by_name(changes, B, axis, message):
    cfg = config(**changes)
    with pytest.raises(ValueError, match=message):
        moe_layer_parallel(jnp.zeros((B, 16, 16)), {}, cfg, expert_mesh(8), axis)
    with pytest.raises(ValueError, match=r"\(8, 16\).*expected \(B, T, D\)"):
        moe_layer_parallel(jnp.zeros((8, 16)), {}, cfg, expert_mesh(8))


def test_too_few_devices_are_refused_with_the_remedy():
    with pytest.raises(ValueError, match="1000 devices.*jax_num_cpu_devices"):
        expert_mesh(1000)


def test_the_command_prints_errors_collectives_and_times():
    done = subprocess.run([sys.executable, "expert_parallel.py", "--devices=4", "--batch=4", "--tokens=16", "--embd=32",
                           "--hidden=32"], cwd=HERE, text=True, capture_output=True, timeout=120,
                          env={**os.environ, "XLA_FLAGS": ""})
    assert done.returncode == 0, done.stderr[-2000:]
    assert "4 cpu devices, 8 experts" in done.stdout
    error = float(done.stdout.split("against one device: ")[1].split()[0])
    assert 0 < error <= 1e-6
    rows = [line.split()[:3] for line in done.stdout.splitlines() if line.startswith(("forward", "gradient"))]
    assert ["forward", "all-to-all", "2"] in rows and ["gradient", "all-to-all", "4"] in rows
