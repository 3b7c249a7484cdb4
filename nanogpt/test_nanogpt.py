"""Fast CPU tests of the model, its data, training, sampling and resuming. No network."""
import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data
import run
import sample
import train
from model import (IGNORE, GPTConfig, attention, attention_reference, decode_step, forward, generate, init_params, loss_fn, pack,
                   prefill, sample_token, start, summed_loss)

HERE = Path(__file__).resolve().parent
SMALL = GPTConfig(vocab_size=11, context=8, n_layer=2, n_head=2, n_embd=16)
TINY = ("--n-layer=2", "--n-head=2", "--n-embd=16", "--context=8", "--batch-size=4", "--eval-batches=2", "--seed=3",
        "--dataset=python-docs")


@pytest.fixture(scope="module")
def params():
    return init_params(jax.random.key(0), SMALL)


def tokens_of(key, B=3, T=SMALL.context):
    return jax.random.randint(jax.random.key(key), (B, T), 0, SMALL.vocab_size)


def command(script, *arguments, cwd, folder=HERE, **env):
    """Runs a script as a user would; returns the completed process with its text."""
    return subprocess.run([sys.executable, str(folder / script), *arguments], cwd=cwd, env={**os.environ, **env},
                          capture_output=True, text=True, encoding="utf-8", timeout=900)


def fit(folder, *flags):
    """train.py's own main path, in this process: returns the Result of a run in `folder`."""
    return train.train(train.parse([*TINY, "--out-dir", str(folder), *flags]))


def losses(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def saved_state(folder):
    """Every array of the latest checkpoint, as bytes by path."""
    cfg = run.load_config(folder, train.Config)
    checkpoints = run.Checkpoints(folder)
    _, meta = checkpoints.restore("latest", {})
    state, _ = checkpoints.restore("latest", train.init_state(cfg, cfg.model(len(meta["vocab"]))))
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes()
            for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


# The model -------------------------------------------------------------------------------

def test_loss_at_init_is_that_of_guessing():
    cfg = GPTConfig(vocab_size=65, context=64, n_layer=4, n_head=4, n_embd=128)
    text = jax.random.randint(jax.random.key(1), (8, 65), 0, 65)
    loss = loss_fn(init_params(jax.random.key(0), cfg), text[:, :-1], text[:, 1:], cfg)
    assert abs(loss - math.log(65)) < 0.05


def test_residual_projections_are_scaled_by_depth():
    cfg = dataclasses.replace(SMALL, n_layer=8, n_embd=128)
    blocks = init_params(jax.random.key(0), cfg)["blocks"]
    assert abs(float(blocks["w_proj"].std()) / (0.02 / 4) - 1) < 0.02  # sqrt(2 * 8) = 4
    assert abs(float(blocks["w_fc"].std()) / 0.02 - 1) < 0.02


def test_one_batch_overfits(params):
    x, y = tokens_of(1), tokens_of(2)
    step = jax.jit(lambda p: jax.tree.map(lambda a, g: a - 0.5 * g, p, jax.grad(loss_fn)(p, x, y, SMALL)))
    for _ in range(300):
        params = step(params)
    assert loss_fn(params, x, y, SMALL) < 0.1


def test_later_tokens_leave_earlier_logits_bitwise_unchanged(params):
    x = tokens_of(3)
    f = jax.jit(partial(forward, cfg=SMALL))
    for t in range(1, SMALL.context):
        changed = x.at[:, t:].set((x[:, t:] + 1) % SMALL.vocab_size)
        a, b = f(params, x), f(params, changed)
        assert jnp.array_equal(a[:, :t], b[:, :t])
        assert not jnp.array_equal(a[:, t], b[:, t])


def test_batch_rows_are_independent(params):
    x = tokens_of(4)
    f = jax.jit(partial(forward, cfg=SMALL))
    other_rows_changed = x.at[1:].set(tokens_of(5)[1:])
    assert jnp.array_equal(f(params, x)[0], f(params, other_rows_changed)[0])
    assert jnp.allclose(f(params, x)[:1], f(params, x[:1]), atol=1e-6)


def test_remat_and_a_shorter_input_change_nothing(params):
    x, y = tokens_of(1), tokens_of(2)
    plain = jax.grad(loss_fn)(params, x, y, SMALL)
    remat = jax.grad(loss_fn)(params, x, y, dataclasses.replace(SMALL, remat=True))
    assert all(jnp.allclose(a, b, atol=1e-6) for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(remat)))
    f = partial(forward, params, cfg=SMALL)
    assert jnp.allclose(f(x)[:, :5], f(x[:, :5]), atol=1e-5)


def test_bfloat16_is_near_float32_and_keeps_float32_gradients(params):
    x, y = tokens_of(1), tokens_of(2)
    low = dataclasses.replace(SMALL, dtype="bfloat16")
    want, gradient = jax.value_and_grad(loss_fn)(params, x, y, SMALL)
    got, low_gradient = jax.value_and_grad(loss_fn)(params, x, y, low)
    assert abs(got - want) < 2**-8 * want  # half a unit of bfloat16's last place, relative
    for a, b in zip(jax.tree.leaves(low_gradient), jax.tree.leaves(gradient)):
        assert a.dtype == jnp.float32
        assert jnp.linalg.norm(a - b) <= 0.03 * jnp.linalg.norm(b) + 1e-4


def test_a_gradient_can_be_differentiated_again():
    """A Hessian-vector product, forward over reverse, against differences of gradients in float64."""
    with jax.enable_x64(True):
        cfg = dataclasses.replace(SMALL, n_layer=1, dtype="float64")
        wide, v = (jax.tree.map(lambda a: a.astype(jnp.float64), init_params(jax.random.key(i), cfg)) for i in (8, 9))
        gradient = jax.jit(jax.grad(partial(loss_fn, tokens=tokens_of(1), targets=tokens_of(2), cfg=cfg)))
        got = jax.jvp(gradient, (wide,), (v,))[1]
        above, below = (gradient(jax.tree.map(lambda p, v: p + eps * v, wide, v)) for eps in (1e-4, -1e-4))
        for a, up, down in zip(*map(jax.tree.leaves, (got, above, below))):
            want = (up - down) / 2e-4
            assert jnp.linalg.norm(a - want) <= 1e-6 * jnp.linalg.norm(want)


def test_dropout_needs_a_key_and_keeps_the_mean(params):
    x, y = tokens_of(1), tokens_of(2)
    cfg = dataclasses.replace(SMALL, dropout=0.5)
    f = partial(loss_fn, params, x, y, cfg)
    assert f() == loss_fn(params, x, y, SMALL)
    assert f(key=jax.random.key(0)) == f(key=jax.random.key(0)) != f(key=jax.random.key(1))


def test_ignored_targets_do_not_count(params):
    x, y = tokens_of(1), tokens_of(2)
    nats, count = summed_loss(params, x, y.at[:, 3:].set(IGNORE), SMALL)
    assert count == 9 and jnp.allclose(nats, summed_loss(params, x[:, :3], y[:, :3], SMALL)[0], rtol=1e-5)


def test_attention_is_an_argument_and_equals_jax_nn(params):
    def library(q, k, v, rate, key):
        q, k, v = (a.transpose(0, 2, 1, 3) for a in (q, k, v))
        return jax.nn.dot_product_attention(q, k, v, is_causal=True).transpose(0, 2, 1, 3)
    x = tokens_of(1)
    assert jnp.allclose(forward(params, x, SMALL, attention=library), forward(params, x, SMALL), atol=1e-5)


@pytest.mark.parametrize("dtype, tol", [("float32", 1e-6), ("bfloat16", 2e-2)])
def test_attention_and_its_own_vjp_equal_the_reference_and_jax_nn(dtype, tol):
    q, k, v, g = jax.random.normal(jax.random.key(0), (4, 2, 2, 7, 4)).astype(dtype)
    y, pull = jax.vjp(attention, q, k, v)
    want, pull_reference = jax.vjp(attention_reference, *(a.astype("float32") for a in (q, k, v)))
    library = jax.nn.dot_product_attention(*(a.transpose(0, 2, 1, 3) for a in (q, k, v)), is_causal=True)
    assert jnp.allclose(y, want, atol=tol) and jnp.allclose(y.transpose(0, 2, 1, 3), library, atol=tol)
    for a, b in zip(pull(g), pull_reference(g.astype("float32"))):
        assert a.dtype == q.dtype and jnp.linalg.norm(a - b) <= tol * jnp.linalg.norm(b)


def test_bad_shapes_are_refused_by_name(params):
    with pytest.raises(ValueError, match="n_embd=64.*n_head=5"):
        GPTConfig(vocab_size=11, context=8, n_layer=1, n_head=5, n_embd=64)
    with pytest.raises(ValueError, match="9 tokens exceed the context of 8"):
        forward(params, tokens_of(1, T=9), SMALL)


# Generation ------------------------------------------------------------------------------

def padded(x, S=SMALL.context):
    return jnp.zeros((x.shape[0], S), jnp.int32).at[:, :x.shape[1]].set(x)


@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("length", [1, 2, SMALL.context - 1, SMALL.context])
def test_cached_decoding_equals_the_full_forward(params, length, B):
    x = tokens_of(6, B)
    full = jax.jit(partial(forward, cfg=SMALL))(params, x)
    window = padded(x[:, :length]).at[:, length:].set(7)  # what stands behind the prompt must not matter
    logits, cache = jax.jit(partial(prefill, cfg=SMALL))(params, window, length)
    assert jnp.allclose(logits, full[:, length - 1], atol=1e-5)
    step, packed = jax.jit(partial(decode_step, cfg=SMALL)), pack(params, SMALL, len(x))
    for t in range(length, SMALL.context):
        logits, cache = step(packed, cache, x[:, t], jnp.int32(t))
        assert jnp.allclose(logits, full[:, t], atol=1e-5), t


@pytest.mark.parametrize("length", [1, 5, SMALL.context])
def test_past_the_window_equals_cropping(params, length):
    S, n = SMALL.context, 2 * SMALL.context
    prompt = tokens_of(7, T=length)
    begin = jax.jit(partial(start, cfg=SMALL))
    draw = jax.jit(partial(generate, cfg=SMALL, temperature=0.0), static_argnames="n")
    f = jax.jit(partial(forward, cfg=SMALL))
    state, text = begin(params, padded(prompt), length), prompt
    for i in range(n):  # one token a call, so that the state's logits can be looked at
        cropped = text[:, -S:]
        want = f(params, padded(cropped))[:, cropped.shape[1] - 1]
        assert jnp.allclose(state.logits, want, atol=1e-4)
        token, state = draw(params, state, jax.random.key(i), n=1)
        assert jnp.array_equal(token[:, 0], want.argmax(-1))
        text = jnp.concatenate([text, token], axis=1)
    at_once, _ = draw(params, begin(params, padded(prompt), length), jax.random.key(0), n=n)
    assert jnp.array_equal(at_once, text[:, length:])


def test_fifty_tokens_compile_at_most_three_times(params):
    compiled = []

    def count(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    cfg = sample.SampleConfig(prompt="abc", max_new_tokens=50)
    jax.block_until_ready([jax.random.fold_in(jax.random.key(0), 1), jnp.float32(1), jnp.int32(1)])  # eager helpers
    jax.config.update("jax_enable_compilation_cache", False)
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        drawn = list(sample.stream(params, SMALL, "abcdefghijk", cfg))
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
        jax.config.update("jax_enable_compilation_cache", True)
    assert 1 <= len(compiled) <= 3
    assert np.concatenate(drawn, axis=1).shape == (1, 50)


def test_temperature_zero_is_the_first_argmax():
    logits = jnp.array([[0.0, 2.0, 2.0, 1.0]])
    for key in range(20):
        assert sample_token(logits, jax.random.key(key), 0.0) == 1


def drawn(logits, **how):
    keys = jax.random.split(jax.random.key(0), 400)
    return set(np.unique(jax.vmap(lambda k: sample_token(logits[None], k, 1.0, **how)[0])(keys)).tolist())


def test_ties_in_top_k_keep_exactly_k():
    logits = jnp.array([1.0, 3.0, 1.0, 1.0, 1.0])
    assert [drawn(logits, top_k=k) for k in (1, 2, 3, 5)] == [{1}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3, 4}]


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    logits = jnp.log(jnp.array([0.1, 0.5, 0.15, 0.25]))
    assert [drawn(logits, top_p=p) for p in (0.4, 0.51, 0.76, 1.0)] == [{1}, {1, 3}, {1, 2, 3}, {0, 1, 2, 3}]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=6, max_size=6), st.integers(1, 6), st.integers(0, 10**6))
def test_top_k_draws_from_the_k_largest(values, k, seed):
    logits = jnp.array([values], jnp.float32)
    token = int(sample_token(logits, jax.random.key(seed), 1.0, top_k=k)[0])
    assert token in sorted(range(6), key=lambda i: (-values[i], i))[:k]


def test_sampling_follows_the_probabilities():
    p = np.array([0.1, 0.2, 0.7])
    keys = jax.random.split(jax.random.key(1), 20000)
    tokens = jax.vmap(lambda k: sample_token(jnp.log(p)[None], k, 1.0)[0])(keys)
    share = np.bincount(tokens, minlength=3) / len(keys)
    assert np.all(abs(share - p) < 4 * np.sqrt(p * (1 - p) / len(keys)))


# Data ------------------------------------------------------------------------------------

def test_batches_are_a_function_of_seed_and_step():
    ids = jnp.arange(1000, dtype=jnp.uint16)
    batch = partial(data.sample_batch, ids, batch_size=5, context=7)
    x, y = batch(jax.random.key(0), 3)
    assert jnp.array_equal(x, batch(jax.random.key(0), 3)[0]) and jnp.array_equal(x[:, 1:], y[:, :-1])
    assert not jnp.array_equal(x, batch(jax.random.key(0), 4)[0])
    assert not jnp.array_equal(x, batch(jax.random.key(1), 3)[0])
    many = batch(jax.random.key(0), 0, batch_size=20000)[0][:, 0]
    assert many.min() == 0 and many.max() == 1000 - 7 - 1  # every crop can come, none reads past the end


def test_all_windows_hold_each_target_once():
    for n in (9, 16, 17, 18):
        tokens, targets = data.all_windows(np.arange(n, dtype=np.uint8), 8, IGNORE)
        assert sorted(targets[targets != IGNORE]) == list(range(1, n))
        assert np.all((targets == tokens + 1)[targets != IGNORE])


def test_evaluation_counts_every_character_once(params):
    ids = np.asarray(tokens_of(8, B=1, T=60))[0]
    windows = data.all_windows(ids, SMALL.context, IGNORE)
    want = [summed_loss(params, jnp.asarray(ids[i:i + 8][:59 - i])[None], jnp.asarray(ids[i + 1:i + 9])[None], SMALL)
            for i in range(0, 59, 8)]
    assert sum(int(count) for _, count in want) == 59
    for shape in ((1, 2), (2, 3), (4, 5)):
        got = train.evaluate(params, windows, shape, SMALL)
        assert abs(got - sum(float(nats) for nats, _ in want) / 59) < 1e-5


def test_tiny_shakespeare_is_split_as_nanogpt_does():
    if not (Path(os.environ.get("TFDS_DATA_DIR", "/nowhere")) / "tiny_shakespeare").is_dir():
        pytest.skip("not verified: TFDS_DATA_DIR names no prepared tiny_shakespeare")
    corpus = data.load("tiny_shakespeare")
    assert (len(corpus.train), len(corpus.val), len(corpus.vocab)) == (1_003_854, 111_540, 65)
    assert data.decode(corpus.train[:14], corpus.vocab) == "First Citizen:"


def test_a_damaged_cache_is_rebuilt(tmp_path):
    path = tmp_path / "cache" / "x.npz"
    assert data.read_cache(path) is None
    data.write_cache(path, ("to be", "ö?"))
    assert data.read_cache(path) == ("to be", "ö?")
    whole = path.read_bytes()
    path.write_bytes(whole[:len(whole) // 2])
    assert data.read_cache(path) is None
    np.savez(path, train=np.zeros(3, np.uint8), val=np.zeros(3, np.uint8), sha256="of something else")
    assert data.read_cache(path) is None
    assert [p.name for p in path.parent.iterdir()] == ["x.npz"]


def test_a_data_set_asked_for_by_name_never_falls_back(tmp_path):
    began = time.monotonic()
    done = command("train.py", "--dataset=tiny_shakespeare", f"--data-dir={tmp_path}", cwd=tmp_path)
    assert done.returncode == 2 and str(tmp_path) in done.stderr and "no download" in done.stderr
    assert time.monotonic() - began < 30 and not (tmp_path / "out").exists()


def test_a_file_is_read_as_utf8_in_a_c_locale(tmp_path):
    (tmp_path / "verse.txt").write_text("Grüße, 世界! " * 50, encoding="utf-8")
    flags = [f for f in TINY if not f.startswith("--dataset")]
    done = command("train.py", *flags, "--dataset=verse.txt", "--max-iters=2", "--out-dir=run", cwd=tmp_path,
                   LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["dataset"] == "verse.txt"
    done = command("sample.py", "--out-dir=run", "--prompt=世", "--max-new-tokens=5", cwd=tmp_path, LC_ALL="C",
                   PYTHONUTF8="1")
    assert done.returncode == 0 and done.stdout.startswith("世"), done.stderr


@pytest.mark.parametrize("text, why", [("short", "part of"), (b"\xff\xfe", "not UTF-8")])
def test_unusable_texts_are_refused(tmp_path, text, why, capsys):
    path = tmp_path / "text.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SystemExit) as stopped:
        fit(tmp_path / "run", f"--dataset={path}", "--max-iters=2")
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and why in said
    if why == "part of":
        assert "part of 1 characters" in said and "at least 9" in said


# Training --------------------------------------------------------------------------------

def test_accumulation_weighs_by_token(params):
    """Micro-batches with unequal numbers of targets give the gradient of the one large batch."""
    x, y = tokens_of(1, B=4), tokens_of(2, B=4)
    y = y.at[:2, 1:].set(IGNORE)  # 2 targets in the first micro-batch, 16 in the second
    loss, grad = train.accumulated_gradient(params, x.reshape(2, 2, -1), y.reshape(2, 2, -1), SMALL, None)
    want_loss, want = jax.value_and_grad(loss_fn)(params, x, y, SMALL)
    assert jnp.allclose(loss, want_loss, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(grad), jax.tree.leaves(want)):
        assert jnp.allclose(a, b, atol=1e-6)


def test_the_schedule_warms_up_and_ends_at_a_tenth():
    lr = train.schedule(train.Config(max_iters=2000, lr=1e-3))
    assert np.allclose([lr(0), lr(100), lr(1050), lr(2000), lr(3000)], [1e-3 / 101, 1e-3, 5.5e-4, 1e-4, 1e-4])


def test_only_matrices_decay():
    cfg = train.Config(n_layer=1, n_head=1, n_embd=4, context=4, max_iters=2, warmup_iters=0, lr=0.1)
    params = jax.tree.map(jnp.ones_like, init_params(jax.random.key(0), cfg.model(3)))
    optimizer = train.optimizer(cfg)

    @jax.jit
    def update(params):
        return optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)[0]
    updates = update(params)
    moved = {jax.tree_util.keystr(path, simple=True, separator="/")
             for path, u in jax.tree_util.tree_leaves_with_path(updates) if bool((u != 0).any())}
    assert moved == {"wte", "wpe", "blocks/w_qkv", "blocks/w_proj", "blocks/w_fc", "blocks/w_out"}


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory):
    """A run of 6 steps with all that could break a resume: accumulation, dropout, evaluations, logging."""
    folder = tmp_path_factory.mktemp("runs") / "six"
    fit(folder, *SIX)
    return folder


SIX = ("--max-iters=6", "--accum-steps=2", "--dropout=0.1", "--log-interval=1", "--eval-interval=6")


def test_a_run_writes_its_folder(six_steps):
    result = json.loads((six_steps / "result.json").read_text())
    assert result["steps"] == 6 and result["dataset"] == "python-docs" and result["provenance"]["jax"] == jax.__version__
    assert abs(result["val_loss"] - math.log(100)) < 0.5 and result["params"] > 0
    assert (six_steps / "loss.svg").read_text().lstrip().startswith("<?xml")
    assert sorted(losses(six_steps)) == [1, 2, 3, 4, 5, 6]
    assert all(json.loads(line)["dataset"] == "python-docs"
               for line in (six_steps / "metrics.jsonl").read_text().splitlines())


def test_resume_equals_an_uninterrupted_run_bit_for_bit(six_steps, tmp_path):
    first = SIX[1:]
    fit(tmp_path / "cut", *first, "--max-iters=3", "--lr-decay-iters=6")
    done = command("train.py", "--resume", "--out-dir=cut", "--max-iters=6", cwd=tmp_path)
    assert done.returncode == 0 and "resuming cut at step 3" in done.stdout, done.stderr
    assert losses(tmp_path / "cut") == losses(six_steps)
    assert saved_state(tmp_path / "cut") == saved_state(six_steps)


def test_the_evaluation_interval_changes_nothing(six_steps, tmp_path):
    fit(tmp_path / "often", *SIX[:-1], "--eval-interval=2")
    assert losses(tmp_path / "often") == losses(six_steps)
    assert saved_state(tmp_path / "often") == saved_state(six_steps)


def test_a_truncated_newest_checkpoint_is_skipped_with_a_warning(six_steps, tmp_path, capfd):
    folder = tmp_path / "run"
    fit(folder, *SIX[:-1], "--eval-interval=3")
    newest = max((folder / "checkpoints" / "latest" / "6").rglob("*"), key=lambda p: p.is_file() and p.stat().st_size)
    newest.write_bytes(newest.read_bytes()[:10])
    cfg = run.load_config(folder, train.Config)
    state = train.init_state(cfg, cfg.model(len(data.load("python-docs").vocab)))
    _, meta = run.Checkpoints(folder).restore("latest", state)
    assert meta["step"] == 3 and "latest/6 can't be read" in capfd.readouterr().err
    fit(folder, "--resume", *SIX)
    assert saved_state(folder) == saved_state(six_steps)
    for file in (folder / "checkpoints" / "latest").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with pytest.raises(RuntimeError, match="can be read"):
        run.Checkpoints(folder).restore("latest", state)


def test_a_non_finite_loss_names_the_step_and_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "schedule", lambda cfg: lambda step: jnp.where(step < 5, 1e-3, 1e30))
    folder = tmp_path / "run"
    with pytest.raises(FloatingPointError, match="step 5: validation loss"):  # found before it is saved
        fit(folder, "--max-iters=9", "--log-interval=1", "--eval-interval=2")
    assert not (folder / "result.json").exists()
    cfg = run.load_config(folder, train.Config)
    checkpoints = run.Checkpoints(folder)
    _, meta = checkpoints.restore("latest", {})
    state, _ = checkpoints.restore("latest", train.init_state(cfg, cfg.model(len(meta["vocab"]))))
    with pytest.raises(FloatingPointError, match="step 6: loss"):  # without an evaluation the next step shows it
        fit(tmp_path / "blind", "--max-iters=9", "--log-interval=1", "--eval-interval=9")
    assert meta["step"] == 4 and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_a_non_finite_loss_exits_with_status_1(tmp_path):
    done = command("train.py", *TINY, "--lr=1e30", "--grad-clip=1e30", "--warmup-iters=0", "--max-iters=5",
                   cwd=tmp_path)
    assert done.returncode == 1 and "error: step " in done.stderr and "Traceback" not in done.stderr


def test_sigterm_finishes_the_step_and_saves(tmp_path):
    arguments = [sys.executable, str(HERE / "train.py"), *TINY, "--max-iters=1000000", "--out-dir=run",
                 "--log-interval=10"]
    process = subprocess.Popen(arguments, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step"):
            break
    process.send_signal(signal.SIGTERM)
    rest = process.communicate(timeout=300)[0]
    assert process.returncode == 130 and "go on with: python train.py --resume" in rest
    stopped = int(rest.split("stopped after step ")[1].split(",")[0])
    done = command("train.py", "--resume", f"--max-iters={stopped + 2}", "--out-dir=run", cwd=tmp_path)
    assert done.returncode == 0 and f"resuming run at step {stopped}" in done.stdout, done.stderr


def test_the_folder_alone_trains_and_samples(tmp_path):
    """Copied into an empty directory, with nothing of this repository importable."""
    alone = tmp_path / "nanogpt"
    shutil.copytree(HERE, alone, ignore=shutil.ignore_patterns("out", "__pycache__", "results", "figures"))
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['common'] = None  # also where it is installed\n")
    env = {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": ""}
    done = command("train.py", *TINY, "--max-iters=2", cwd=alone, folder=alone, **env)
    assert done.returncode == 0, done.stderr
    assert json.loads((alone / "out" / "cpu-python-docs-s3" / "result.json").read_text())["steps"] == 2
    done = command("sample.py", "--max-new-tokens=20", "--prompt=The", "--temperature=0", cwd=alone, folder=alone, **env)
    assert done.returncode == 0 and done.stdout.startswith("The") and len(done.stdout) == 24, done.stderr


def test_a_short_run_warms_up_over_a_quarter():
    assert train.CPU.warmup == 100 and train.Config(max_iters=50).warmup == 12
    assert train.Config(max_iters=50, warmup_iters=2).warmup == 2 and train.Config(max_iters=1).warmup == 0


# Command line ----------------------------------------------------------------------------

@pytest.mark.parametrize("script, flags, says", [
    ("train.py", ["--n-head=5", "--n-embd=64"], ["n_head=5", "n_embd=64"]),
    ("train.py", ["--n-haed", "5"], ["Perhaps you meant", "--n-head"]),
    ("train.py", ["--preset=tpu"], ["'tpu'", "cpu, gpu"]),
    ("train.py", ["--resume"], ["no run under out/"]),
    ("train.py", ["--dataset=nowhere.txt"], ["nowhere.txt"]),
    ("train.py", ["--lr=0"], ["lr=0"]),
    ("train.py", ["--warmup-iters=9", "--max-iters=9"], ["warmup_iters=9", "lr_decay_iters=9"]),
    ("sample.py", [], ["no run under out/"]),
    ("sample.py", ["--temperature=-1"], ["temperature=-1"]),
    ("sample.py", ["--top-k=-3"], ["top_k=-3"]),
    ("sample.py", ["--top-p=1.5"], ["top_p=1.5"]),
])
def test_bad_input_exits_2_and_names_the_value(script, flags, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *flags])
    with pytest.raises(SystemExit) as stopped:
        if script == "train.py":
            train.train(train.parse(flags))
        else:
            sample.main(sample.tyro.cli(sample.SampleConfig))
    said = capsys.readouterr()
    text = " ".join((said.err + said.out).replace("│", " ").split())
    assert stopped.value.code == 2 and all(word in text for word in says), text
    assert not (tmp_path / "out").exists()


def test_an_existing_run_is_never_overwritten(six_steps, capsys):
    before = saved_state(six_steps)
    with pytest.raises(SystemExit) as stopped:
        fit(six_steps, "--max-iters=2")
    assert stopped.value.code == 2 and "--resume" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train.parse(["--resume", "--out-dir", str(six_steps), "--n-layer=3"])
    assert "n_layer=2, not 3" in capsys.readouterr().err
    assert saved_state(six_steps) == before


def test_a_prompt_outside_the_vocabulary_is_listed(six_steps, capsys):
    with pytest.raises(SystemExit) as stopped:
        sample.main(sample.SampleConfig(out_dir=str(six_steps), prompt="a\x00b→"))
    said = capsys.readouterr()
    assert stopped.value.code == 2 and "'\\x00' '→'" in said.err and said.out == ""


def test_sampling_is_deterministic_at_temperature_zero(six_steps, capsys):
    said = []
    for seed in (0, 1):
        sample.main(sample.SampleConfig(out_dir=str(six_steps), prompt="The", temperature=0.0, seed=seed,
                                        max_new_tokens=40, num_samples=2))
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and len(said[0].splitlines()) >= 3
    first, second = said[0].rstrip("\n").split("-" * 40 + "\n")
    assert first.rstrip("\n") == second.rstrip("\n") and first.startswith("The") and len(first.rstrip("\n")) >= 40


# Gradients and other compilers ----------------------------------------------------------

def test_gradients_equal_those_of_transformers():
    pytest.importorskip("transformers", reason="not verified: transformers is not installed")
    import gradcheck
    with jax.enable_x64(True):
        rows = gradcheck.transformers_rows(*gradcheck.setting(jax.random.key(0)))
    assert len(rows) == 18 and all(row.ok for row in rows), [row for row in rows if not row.ok]


def test_adamw_trains_as_torch_does():
    pytest.importorskip("torch", reason="not verified: torch is not installed")
    import gradcheck
    assert all(row.ok for row in gradcheck.adamw_rows())


def test_planted_bugs_are_caught():
    import gradcheck
    with jax.enable_x64(True):
        assert all(row.ok for row in gradcheck.planted_rows(*gradcheck.setting(jax.random.key(0))))


def test_the_training_step_compiles_for_a_tpu():
    from common.pallas import AotUnavailable, aot_compile
    cfg = dataclasses.replace(train.CPU, dtype="bfloat16", n_layer=1, dropout=0.1)
    model_cfg = cfg.model(65)
    state = jax.eval_shape(lambda: train.init_state(cfg, model_cfg))
    ids, step = jax.ShapeDtypeStruct((10000,), jnp.uint8), jax.ShapeDtypeStruct((), jnp.int32)
    try:
        compiled = aot_compile(lambda s, ids, step: train.train_step(s, ids, step, cfg, model_cfg), state, ids, step,
                               topology="v5e:2x2")
    except AotUnavailable as why:
        pytest.skip(f"not verified: {why}")
    assert compiled.memory_analysis().temp_size_in_bytes > 0
    assert "opt-barrier" not in compiled.as_text()  # the CPU's form of the weight gradient stays on the CPU


# What the README says ---------------------------------------------------------------------

def test_the_tables_of_the_readme_are_those_of_results():
    import bench
    text = (HERE / "README.md").read_text(encoding="utf-8")
    for name, table in bench.readme_tables().items():
        assert f"<!-- table:{name} -->\n{table.rstrip()}\n<!-- /table -->" in text, name


def test_the_ratio_under_another_jax_stands_beside_the_same_baseline(tmp_path, monkeypatch):
    import bench
    shutil.copytree(HERE / "results", tmp_path / "results")
    (tmp_path / "results" / "bench-jax-0.10.json").unlink(missing_ok=True)
    rows = [row for row in json.loads((tmp_path / "results" / "bench.json").read_text())["rows"]
            if row["metric"] == "ratio" and not row["name"].startswith("choice")]
    assert len({row["name"] for row in rows}) < len(rows)  # a name alone doesn't tell two baselines apart
    older = [{**row, "ratio": i} for i, row in enumerate(rows[1:])]
    (tmp_path / "results" / "bench-jax-0.10.json").write_text(json.dumps({"rows": older[::-1]}))
    monkeypatch.setattr(bench, "HERE", tmp_path)
    lines = bench.readme_tables()["speed"].splitlines()[2:]
    assert [line.split("|")[-2].strip() for line in lines] == ["not measured", *(f"{i}.00×" for i in range(len(older)))]


def test_results_hold_every_ratio_of_the_readme():
    results = json.loads((HERE / "results" / "bench.json").read_text(encoding="utf-8"))
    assert results["provenance"]["jax"].startswith("0.12")
    assert all(set(row) >= {"name", "metric", "value", "unit", "baseline", "ratio", "predicted"}
               for row in results["rows"])
    names = {row["name"] for row in results["rows"] if row["metric"] == "ratio"}
    assert {"train 4 x 128: jax", "train 6 x 384: jax", "train 6 x 384 bfloat16: jax",
            "generate 6 x 384, B 1: jax cached", "generate 6 x 384, B 8: jax cached"} <= names


@pytest.mark.slow
def test_bench_quick_repeats_the_rows(tmp_path):
    done = subprocess.run([sys.executable, str(HERE / "bench.py"), "--quick"], cwd=tmp_path, capture_output=True,
                          text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    quick = json.loads((tmp_path / "out" / "bench-quick.json").read_text())["rows"]
    committed = json.loads((HERE / "results" / "bench.json").read_text(encoding="utf-8"))["rows"]
    assert [row["name"] for row in quick] == [row["name"] for row in committed]


@pytest.mark.slow
def test_gradcheck_script(tmp_path):
    done = command("gradcheck.py", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.rstrip().endswith("passed, 0 failed"), done.stdout + done.stderr
