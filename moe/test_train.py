"""Fast CPU tests of training, resuming, sampling and the command line. No network."""
import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import data
import run
import sample
import train
from model import IGNORE, forward, init_params

HERE = Path(__file__).resolve().parent
TINY = ("--n-layer=1", "--n-head=2", "--n-embd=16", "--context=8", "--n-hidden=8", "--n-experts=4", "--batch-size=4",
        "--eval-batches=2", "--seed=3", "--dataset=python-docs", "--capacity-factor=1")
# A run of 6 steps with what could break a resume: random numbers in the router, evaluations, a line a step.
SIX = ("--max-iters=6", "--jitter=0.1", "--log-interval=1", "--eval-interval=6")


def command(script, *arguments, cwd, folder=HERE, **env):
    """Runs a script as a user would; returns the completed process with its text."""
    return subprocess.run([sys.executable, str(folder / script), *arguments], cwd=cwd, env={**os.environ, **env},
                          capture_output=True, text=True, encoding="utf-8", timeout=300)


def fit(folder, *flags):
    """train.py's own main path, in this process: returns the Result of a run in `folder`."""
    return train.train(train.parse([*TINY, "--out-dir", str(folder), *flags]))


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder):
    return {row["step"]: row["loss"] for row in rows(folder) if "loss" in row}


def saved_state(folder):
    """Every array of the latest checkpoint, as bytes by path."""
    cfg = run.load_config(folder, train.Config)
    checkpoints = run.Checkpoints(folder)
    _, meta = checkpoints.restore("latest", {})
    state, _ = checkpoints.restore("latest", train.init_state(cfg, cfg.model(len(meta["vocab"]))))
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes()
            for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "six"
    fit(folder, *SIX)
    return folder


# Configuration ---------------------------------------------------------------------------

def test_the_presets_have_the_same_active_matmuls():
    """moe and switch pay for the same hidden units a token as dense, and, but for the router, have the same active
    parameters; they keep four and eight times as many."""
    from model import active_params, count_params
    active, total = {}, {}
    for name, cfg in train.PRESETS.items():
        model_cfg = cfg.model(65)
        params = jax.eval_shape(partial(init_params, cfg=model_cfg), jax.random.key(0))
        routers = model_cfg.n_layer * model_cfg.n_embd * model_cfg.n_experts
        active[name], total[name] = active_params(params, model_cfg) - routers, count_params(params) - routers
    experts = 4 * 2 * 128 * 512  # of the dense model: layers, matrices, width, hidden
    assert active["moe"] == active["switch"] == active["dense"] == total["dense"]
    assert total["moe"] == total["dense"] + 3 * experts and total["switch"] == total["dense"] + 7 * experts


def test_the_schedule_warms_up_and_ends_at_a_tenth():
    lr = train.schedule(train.Config(max_iters=2000, lr=1e-3))
    assert np.allclose([lr(0), lr(100), lr(1050), lr(2000), lr(3000)], [1e-3 / 101, 1e-3, 5.5e-4, 1e-4, 1e-4])
    assert train.MOE.warmup == 100 and train.Config(max_iters=50).warmup == 12 and train.Config(max_iters=1).warmup == 0


def test_only_matrices_decay():
    cfg = train.Config(n_layer=1, n_head=1, n_embd=4, context=4, n_hidden=3, n_experts=2, shared_hidden=2, max_iters=2,
                       warmup_iters=0, lr=0.1)
    params = jax.tree.map(jnp.ones_like, init_params(jax.random.key(0), cfg.model(3)))
    moved = jax.jit(train.update, static_argnames="cfg")(
        {"params": params, "opt": train.optimizer(cfg).init(params)}, jax.tree.map(jnp.zeros_like, params), cfg=cfg)
    decayed = {jax.tree_util.keystr(path, simple=True, separator="/")
               for path, leaf in jax.tree_util.tree_leaves_with_path(moved["params"]) if bool((leaf != 1).any())}
    assert decayed == {"wte", "wpe", "blocks/0/w_qkv", "blocks/0/w_proj",
                       *(f"blocks/0/moe/{name}" for name in ("w_router", "w_in", "w_out", "shared_in", "shared_out"))}


# Steps and evaluation --------------------------------------------------------------------

def test_steps_in_one_dispatch_are_those_one_by_one():
    cfg = train.parse([*TINY, *SIX])
    model_cfg, ids = cfg.model(11), jax.random.randint(jax.random.key(0), (500,), 0, 11).astype(jnp.uint8)
    state = train.init_state(cfg, model_cfg)
    _, got = train.train_steps(jax.tree.map(jnp.copy, state), ids, jnp.int32(2), jnp.int32(5), cfg, model_cfg)
    for i in range(3):
        state, one = train.train_step(state, ids, jnp.int32(2 + i), cfg, model_cfg)
        for name, value in one.items():
            assert np.allclose(got[name][i], value, rtol=1e-4), name
    assert got["load"].shape == (train.DISPATCH, 1, 4) and not got["load"][3:].any()
    assert np.allclose(got["load"][:3].sum(-1), 1) and 0 < got["dropped"][0] < 1


@pytest.mark.parametrize("dispatch", ["gather", "expert_choice"])
def test_evaluation_counts_every_character_once_and_its_padding_not_at_all(dispatch):
    """Also where choices compete beyond a token: padding that took places would change what is dropped."""
    cfg = train.parse([*TINY, f"--dispatch={dispatch}"])
    model_cfg = cfg.model(11)
    params = jax.tree.map(lambda a: 3 * a, init_params(jax.random.key(0), model_cfg))
    ids = np.asarray(jax.random.randint(jax.random.key(8), (60,), 0, 11))
    windows = data.all_windows(ids, cfg.context, IGNORE)
    one = jax.jit(partial(forward, cfg=model_cfg))
    nats = dropped = 0
    for tokens, targets in zip(*windows):
        counted = targets != IGNORE
        logits, aux = one(params, tokens[None], mask=counted[None])
        nats -= jax.nn.log_softmax(logits[0])[np.arange(8), targets][counted].sum()
        dropped += float(aux["dropped"]) * counted.sum()
    assert (windows[1] != IGNORE).sum() == 59
    for shape in ((1, 2), (2, 3), (4, 5)):
        got, aux = train.evaluate(params, windows, shape, model_cfg)
        assert abs(got - float(nats) / 59) < 1e-5 and abs(aux["dropped"] - dropped / 59) < 1e-5
        assert aux["load"].shape == (1, 4) and np.allclose(aux["load"].sum(-1), 1, atol=1e-5)


def test_the_kernel_trains_as_ragged_dot_does():
    """Three steps with the Pallas kernel, interpreted."""
    ids, got = jax.random.randint(jax.random.key(0), (500,), 0, 11).astype(jnp.uint8), {}
    for grouped_matmul in ("reference", "pallas"):
        cfg = train.parse([*TINY, "--dispatch=dropless", f"--grouped-matmul={grouped_matmul}", "--max-iters=3"])
        state, steps = train.train_steps(train.init_state(cfg, cfg.model(11)), ids, jnp.int32(0), jnp.int32(3), cfg,
                                         cfg.model(11))
        got[grouped_matmul] = np.concatenate([steps["loss"][:3], steps["grad_norm"][:3]])
    assert len(set(got["pallas"])) == 6 and np.allclose(got["pallas"], got["reference"], rtol=1e-5), got


@pytest.mark.slow
def test_a_whole_run_with_the_kernel(tmp_path):
    flags = ("--dispatch=dropless", "--max-iters=3", "--eval-batches=1")
    want, got = (fit(tmp_path / how, *flags, f"--grouped-matmul={how}") for how in ("reference", "pallas"))
    assert abs(got.val_loss - want.val_loss) < 1e-5


# A run and its folder --------------------------------------------------------------------

def test_a_run_writes_its_folder(six_steps):
    result = json.loads((six_steps / "result.json").read_text())
    assert result["steps"] == 6 and result["dataset"] == "python-docs"
    assert result["provenance"]["jax"] == jax.__version__
    assert abs(result["val_loss"] - math.log(100)) < 0.5 and 0 < result["active_params"] < result["params"]
    assert 0 < result["dropped"] < 1 and 0 < result["load_entropy"] <= math.log(4)
    assert (six_steps / "loss.svg").read_text().lstrip().startswith("<?xml")
    assert sorted(losses(six_steps)) == [1, 2, 3, 4, 5, 6]
    for row in rows(six_steps):
        assert row["dataset"] == "python-docs"
        prefix = "" if "loss" in row else "eval_"
        assert np.allclose(np.sum(row[f"{prefix}load"], axis=1), 1, atol=1e-5) and len(row[f"{prefix}load"]) == 1
        assert {f"{prefix}{name}" for name in ("dropped", "balance", "z", "load_entropy")} <= row.keys()


def test_a_dense_run_has_no_routing_to_report(tmp_path):
    result = fit(tmp_path / "dense", "--preset=dense", "--n-experts=0", "--max-iters=2", "--eval-batches=1")
    assert result.params == result.active_params and result.dropped == 0
    assert all("load" not in row and "eval_load" not in row for row in rows(tmp_path / "dense"))


def test_resume_equals_an_uninterrupted_run_bit_for_bit(six_steps, tmp_path):
    fit(tmp_path / "cut", *SIX[1:], "--max-iters=3", "--lr-decay-iters=6")
    done = command("train.py", "--resume", "--out-dir=cut", "--max-iters=6", cwd=tmp_path)
    assert done.returncode == 0 and "resuming cut at step 3" in done.stdout, done.stderr
    assert losses(tmp_path / "cut") == losses(six_steps)
    assert saved_state(tmp_path / "cut") == saved_state(six_steps)


def test_a_truncated_newest_checkpoint_is_skipped_and_evaluating_often_changes_nothing(six_steps, tmp_path, capfd):
    folder = tmp_path / "run"
    fit(folder, *SIX[:-1], "--eval-interval=3")
    assert losses(folder) == losses(six_steps) and saved_state(folder) == saved_state(six_steps)
    newest = max((folder / "checkpoints" / "latest" / "6").rglob("*"), key=lambda p: p.is_file() and p.stat().st_size)
    newest.write_bytes(newest.read_bytes()[:10])
    fit(folder, "--resume", *SIX)
    said = capfd.readouterr()
    assert "latest/6 can't be read" in said.err and "at step 3" in said.out
    assert saved_state(folder) == saved_state(six_steps)


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
    assert meta["step"] == 4 and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_the_folder_alone_trains_and_samples(tmp_path):
    """Copied into an empty directory, with nothing of this repository importable."""
    alone = tmp_path / "moe"
    shutil.copytree(HERE, alone, ignore=shutil.ignore_patterns("out", "__pycache__", "results", "figures"))
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['common'] = None  # installed or not\n")
    env = {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": ""}
    done = command("train.py", *TINY, "--max-iters=2", cwd=alone, folder=alone, **env)
    assert done.returncode == 0, done.stderr
    assert json.loads((alone / "out" / "moe-python-docs-s3" / "result.json").read_text())["steps"] == 2
    done = command("sample.py", "--max-new-tokens=20", "--prompt=The", "--temperature=0", cwd=alone, folder=alone,
                   **env)
    assert done.returncode == 0 and done.stdout.startswith("The") and len(done.stdout) == 24, done.stderr
    done = command("train.py", *TINY, "--dispatch=dropless", "--grouped-matmul=pallas", cwd=alone, folder=alone, **env)
    assert done.returncode == 2 and "needs common/" in done.stderr, done.stderr


@pytest.mark.slow
def test_a_non_finite_loss_exits_with_status_1(tmp_path):
    done = command("train.py", *TINY, "--lr=1e30", "--grad-clip=1e30", "--warmup-iters=0", "--max-iters=5",
                   cwd=tmp_path)
    assert done.returncode == 1 and "error: step " in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_sigterm_finishes_the_step_and_saves(tmp_path):
    arguments = [sys.executable, str(HERE / "train.py"), *TINY, "--max-iters=1000000", "--out-dir=run",
                 "--log-interval=10"]
    process = subprocess.Popen(arguments, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step"):
            break
    process.send_signal(signal.SIGTERM)
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "go on with: python train.py --resume" in rest
    stopped = int(rest.split("stopped after step ")[1].split(",")[0])
    done = command("train.py", "--resume", f"--max-iters={stopped + 2}", "--out-dir=run", cwd=tmp_path)
    assert done.returncode == 0 and f"resuming run at step {stopped}" in done.stdout, done.stderr


# Sampling --------------------------------------------------------------------------------

def test_sampling_is_deterministic_at_temperature_zero(six_steps, capsys):
    said = []
    for seed in (0, 1):
        sample.main(sample.SampleConfig(out_dir=str(six_steps), prompt="The", temperature=0.0, seed=seed,
                                        max_new_tokens=40, num_samples=2))
        said.append(capsys.readouterr().out)
    first, second = said[0].rstrip("\n").split("\n" + "-" * 40 + "\n")
    assert said[0] == said[1] and first == second and first.startswith("The") and len(first) == 43


def test_a_prompt_outside_the_vocabulary_is_listed(six_steps, capsys):
    with pytest.raises(SystemExit) as stopped:
        sample.main(sample.SampleConfig(out_dir=str(six_steps), prompt="a\x00b→"))
    said = capsys.readouterr()
    assert stopped.value.code == 2 and "'\\x00' '→'" in said.err and said.out == ""


def test_expert_choice_is_not_sampled_from():
    cfg = train.parse([*TINY, "--dispatch=expert_choice"]).model(3)
    params = init_params(jax.random.key(0), cfg)
    with pytest.raises(ValueError, match="expert_choice"):
        sample.continuations(params, cfg, "abc", sample.SampleConfig(prompt="a", max_new_tokens=2))


# Command line ----------------------------------------------------------------------------

@pytest.mark.parametrize("script, flags, says", [
    ("train.py", ["--n-head=5", "--n-embd=64"], ["n_head=5", "n_embd=64"]),
    ("train.py", ["--n-haed", "5"], ["Perhaps you meant", "--n-head"]),
    ("train.py", ["--preset=gpt"], ["'gpt'", "moe, dense, switch"]),
    ("train.py", ["--resume"], ["no run under out/"]),
    ("train.py", ["--dataset=nowhere.txt"], ["nowhere.txt"]),
    ("train.py", ["--lr=0"], ["lr=0"]),
    ("train.py", ["--warmup-iters=9", "--max-iters=9"], ["warmup_iters=9", "lr_decay_iters=9"]),
    ("train.py", ["--grouped-matmul=pallas"], ["grouped_matmul='pallas'", "dispatch='gather'"]),
    ("train.py", ["--top-k=9"], ["top_k=9", "n_experts=8"]),
    ("train.py", ["--capacity-factor=0"], ["capacity_factor=0"]),
    ("sample.py", [], ["no run under out/"]),
    ("sample.py", ["--temperature=-1"], ["temperature=-1"]),
    ("sample.py", ["--top-k=-3"], ["top_k=-3"]),
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
        train.parse(["--resume", "--out-dir", str(six_steps), "--n-experts=5"])
    assert "n_experts=4, not 5" in capsys.readouterr().err
    assert saved_state(six_steps) == before


# The programs that other machines run -----------------------------------------------------

def test_the_training_step_compiles_for_a_tpu():
    from common.pallas import AotUnavailable, aot_compile
    cfg = dataclasses.replace(train.MOE, dtype="bfloat16", n_layer=1, jitter=0.01)
    model_cfg = cfg.model(65)
    state = jax.eval_shape(lambda: train.init_state(cfg, model_cfg))
    ids, step = jax.ShapeDtypeStruct((10000,), jnp.uint8), jax.ShapeDtypeStruct((), jnp.int32)
    try:
        compiled = aot_compile(lambda s, ids, step: train.train_step(s, ids, step, cfg, model_cfg), state, ids, step,
                               topology="v5e:2x2")
    except AotUnavailable as why:
        pytest.skip(f"not verified: {why}")
    assert compiled.memory_analysis().temp_size_in_bytes > 0
