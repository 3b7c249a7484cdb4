"""Fast CPU tests of the Flax NNX and Equinox ports, and of Hugging Face's GPT-2 folders. No network."""
import dataclasses
import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import data
import gpt2_weights
import model_eqx
import model_nnx
import run
import sample
import train
from model import IGNORE, GPTConfig, forward, generate, init_params, loss_fn, start

HERE = Path(__file__).resolve().parent
SMALL = GPTConfig(vocab_size=11, context=8, n_layer=2, n_head=2, n_embd=16)
TEXT = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer. " * 20

# Each port with its framework's jit and gradient.
PORTS = {"nnx": (model_nnx, nnx.jit, nnx.grad), "eqx": (model_eqx, eqx.filter_jit, eqx.filter_grad)}
each_port = pytest.mark.parametrize("name", PORTS)


def moved_params(cfg, dtype="float32"):
    """Random parameters, none of them at its trivial start: biases around 0, scales around 1."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(partial(init_params, cfg=cfg), jax.random.key(0))
    return jax.tree_util.tree_map_with_path(lambda path, leaf: jnp.asarray(
        0.1 * rng.standard_normal(leaf.shape) + path[-1].key.endswith("scale"), dtype), shapes)


def text_of(key, B=3, T=SMALL.context):
    return jax.random.randint(jax.random.key(key), (B, T), 0, SMALL.vocab_size, jnp.int32)


def distance(got, want):
    """||got - want|| / ||want|| over all leaves as one vector."""
    got, want = ([np.asarray(a, np.float64) for a in jax.tree.leaves(tree)] for tree in (got, want))
    assert [a.shape for a in got] == [a.shape for a in want]
    return np.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(got, want)) / sum((b**2).sum() for b in want))


# The ports -------------------------------------------------------------------------------

@each_port
def test_parameters_go_there_and_back_bit_for_bit(name):
    port, params = PORTS[name][0], moved_params(SMALL)
    back = port.to_raw(port.from_raw(params, SMALL))
    assert jax.tree.structure(back) == jax.tree.structure(params)
    assert all(a.dtype == b.dtype and jnp.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (back, params))))


@each_port
@pytest.mark.parametrize("dtype, change, tol", [
    ("float32", {}, 1e-6), ("float32", {"remat": True, "dropout": 0.3, "n_layer": 1}, 1e-6),
    ("float64", {"dtype": "float64"}, 1e-12), ("float32", {"dtype": "bfloat16", "n_layer": 1}, 3e-2)])
def test_logits_and_gradients_equal_those_of_raw(name, dtype, change, tol):
    """Dropout's masks are the same too: the ports split their key as model.py does."""
    port, jit, grad = PORTS[name]
    cfg = dataclasses.replace(SMALL, **change)
    with jax.enable_x64(dtype == "float64"):
        params, x, y = moved_params(cfg, dtype), text_of(1), text_of(2).at[0, 3:].set(IGNORE)
        key = jax.random.key(3) if cfg.dropout else None
        want, want_gradient = jax.jit(lambda p: (forward(p, x, cfg, key), jax.grad(loss_fn)(p, x, y, cfg, key)))(params)

        def loss(model):
            nats, count = port.summed_loss(model, x, y, key)
            return nats / count
        logits, gradient = jit(lambda m: (m(x, key), port.to_raw(grad(loss)(m))))(port.from_raw(params, cfg))
        assert logits.dtype == want.dtype and all(a.dtype == jnp.dtype(dtype) for a in jax.tree.leaves(gradient))
        assert distance(logits, want) <= tol and distance(gradient, want_gradient) <= tol
        if dtype == "float64":  # there each leaf apart: float32 rounds a short one, such as a bias, by up to 1e-6
            assert all(distance(*pair) <= tol for pair in zip(*map(jax.tree.leaves, (gradient, want_gradient))))


@each_port
@pytest.mark.parametrize("length, B", [(3, 2), (SMALL.context, 1)])
def test_greedy_tokens_from_the_cache_equal_those_of_raw(name, length, B):
    port, params, prompt = PORTS[name][0], moved_params(SMALL), text_of(4, B, length)
    n = SMALL.context - length
    model = port.from_raw(params, SMALL)
    if n:
        begin = jax.jit(start, static_argnames="cfg")(params, prompt, length, cfg=SMALL)
        draw = jax.jit(generate, static_argnames=("n", "cfg"))
        want, _ = draw(params, begin, jax.random.key(0), n=n, cfg=SMALL, temperature=0.0)
        assert jnp.array_equal(port.greedy(model, prompt, n), want)
        assert len(jax.tree.leaves(port.to_raw(model))) == len(jax.tree.leaves(params))  # no cache is left behind
    with pytest.raises(ValueError, match="exceed the context of 8"):
        port.greedy(model, prompt, n + 1)
    with pytest.raises(ValueError, match="9 tokens exceed the context of 8"):
        model(text_of(1, T=9))


@each_port
def test_attention_is_an_argument(name):
    port, jit, _ = PORTS[name]
    params, x = moved_params(SMALL), text_of(1)

    def library(q, k, v, rate, key):
        q, k, v = (a.transpose(0, 2, 1, 3) for a in (q, k, v))
        return jax.nn.dot_product_attention(q, k, v).transpose(0, 2, 1, 3)  # not causal: another model
    got = jit(lambda m: m(x))(port.from_raw(params, SMALL, library))
    want = jax.jit(partial(forward, cfg=SMALL, attention=library))(params, x)
    assert distance(got, want) < 1e-6 < 1e-3 < distance(want, jax.jit(partial(forward, cfg=SMALL))(params, x))


def test_nnx_initialises_as_gpt2():
    cfg = dataclasses.replace(SMALL, n_embd=64, vocab_size=100)
    ours = nnx.jit(lambda: model_nnx.to_raw(model_nnx.GPT(cfg, nnx.Rngs(0))))()
    want = jax.jit(init_params, static_argnums=1)(jax.random.key(0), cfg)
    for got, leaf in zip(jax.tree.leaves(ours), jax.tree.leaves(want), strict=True):
        assert got.shape == leaf.shape and abs(got.mean() - leaf.mean()) < 2e-3
        assert abs(got.std() - leaf.std()) <= 0.03 * leaf.std() + 1e-7 or leaf.size < 2000


class Tied(nnx.Module):
    """The trap in its smallest form: one Param under two names."""

    def __init__(self):
        self.embedding = nnx.Param(jnp.arange(1.0, 4.0))
        self.head = self.embedding

    def __call__(self):
        return (self.embedding[...] * self.head[...]).sum()


def test_nnx_transformations_keep_tied_weights_tied_and_jaxs_do_not():
    model = Tied()
    assert len(jax.tree.leaves(nnx.grad(Tied.__call__)(model))) == 1
    assert len(jax.tree.leaves(jax.grad(Tied.__call__)(model))) == 2
    assert jnp.array_equal(nnx.grad(Tied.__call__)(model).embedding[...], 2 * model.embedding[...])
    assert jnp.array_equal(jax.grad(Tied.__call__)(model).embedding[...], model.embedding[...])  # half of it
    assert (kept := nnx.jit(lambda m: m)(model)).embedding is kept.head
    assert (cut := jax.jit(lambda m: m)(model)).embedding is not cut.head


@each_port
def test_the_ports_have_one_leaf_for_embedding_and_head(name):
    """So that they are tied under either family of transformations, jax.jit and jax.grad included."""
    port, params, x, y = PORTS[name][0], moved_params(SMALL), text_of(1), text_of(2)
    model = port.from_raw(params, SMALL)
    arrays = [leaf for leaf in jax.tree.leaves(model) if eqx.is_array(leaf)]
    assert sum(leaf.size for leaf in arrays) == sum(leaf.size for leaf in jax.tree.leaves(params))
    want = jax.jit(jax.grad(lambda p: loss_fn(p, x, y, SMALL)))(params)["wte"]
    parts, others = eqx.partition(model, eqx.is_array)
    gradient = jax.grad(lambda m: port.summed_loss(eqx.combine(m, others), x, y)[0] / y.size)
    assert distance(jax.jit(lambda m: port.to_raw(gradient(m))["wte"])(parts), want) < 1e-6


# Training --------------------------------------------------------------------------------

TINY = ("--n-layer=1", "--n-head=2", "--n-embd=16", "--context=8", "--batch-size=4", "--eval-batches=2", "--seed=3",
        "--dropout=0.1", "--accum-steps=2", "--log-interval=1", "--max-iters=6", "--eval-interval=6",
        "--warmup-iters=1", "--lr=1e-2")


def fit(folder, *flags):
    """train.py's own main path, in this process: returns the Result of a run in `folder`."""
    return train.train(train.parse([*flags, "--out-dir", str(folder)]))


def losses(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def saved_bytes(folder):
    """Every array of the latest checkpoint, as bytes by path."""
    cfg = run.load_config(folder, train.Config)
    checkpoints = run.Checkpoints(folder)
    _, meta = checkpoints.restore("latest", {})
    like = train.saved(train.begin(cfg, cfg.model(len(meta["vocab"]))), cfg)
    state, _ = checkpoints.restore("latest", like)
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes()
            for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "hamlet.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory, text_file):
    """{name: folder} of six steps with each model: accumulation, dropout and all."""
    root = tmp_path_factory.mktemp("runs")
    for name in ("raw", *PORTS):
        fit(root / name, *TINY, f"--dataset={text_file}", f"--model={name}")
    return {name: root / name for name in ("raw", *PORTS)}


@each_port
def test_training_repeats_the_losses_of_raw(runs, name):
    raw, port = losses(runs["raw"]), losses(runs[name])
    assert sorted(port) == sorted(raw) == [1, 2, 3, 4, 5, 6]
    assert max(abs(port[step] - raw[step]) for step in raw) < 1e-4
    assert raw[1] - raw[6] > 0.05  # something was learnt, so that equality says something
    results = [json.loads((runs[which] / "result.json").read_text()) for which in ("raw", name)]
    assert abs(results[0]["val_loss"] - results[1]["val_loss"]) < 1e-4 and results[0]["params"] == results[1]["params"]


@pytest.mark.slow
def test_fifty_steps_of_the_preset_have_the_losses_of_raw(tmp_path):
    """Also at the full learning rate: a warm-up over a quarter of the steps keeps rounding from growing into losses."""
    for name in ("raw", *PORTS):
        fit(tmp_path / name, "--dataset=python-docs", "--max-iters=50", f"--model={name}", "--log-interval=1")
    raw, *ports = (losses(tmp_path / name) for name in ("raw", *PORTS))
    assert len(raw) == 50 and max(abs(port[step] - raw[step]) for port in ports for step in raw) < 1e-4


@each_port
def test_resume_equals_an_uninterrupted_run_bit_for_bit(runs, name, text_file, tmp_path):
    fit(tmp_path, *TINY, f"--dataset={text_file}", f"--model={name}", "--max-iters=3", "--lr-decay-iters=6")
    fit(tmp_path, "--resume", "--max-iters=6")
    assert losses(tmp_path) == losses(runs[name]) and saved_bytes(tmp_path) == saved_bytes(runs[name])


def test_a_run_is_resumed_by_the_model_that_began_it(runs, capsys):
    with pytest.raises(SystemExit) as stopped:
        train.parse(["--resume", "--out-dir", str(runs["nnx"]), "--max-iters=9", "--model=eqx"])
    assert stopped.value.code == 2 and "has framework=nnx, not eqx" in capsys.readouterr().err


@each_port
def test_checkpoints_of_a_port_are_sampled_as_those_of_raw(runs, name, capsys):
    params, _, _ = sample.load(runs[name], "best")
    want, _, _ = sample.load(runs["raw"], "best")
    assert jax.tree.structure(params) == jax.tree.structure(want) and distance(params, want) < 1e-3
    sample.main(sample.SampleConfig(out_dir=str(runs[name]), prompt="To be", temperature=0.0, max_new_tokens=20))
    assert capsys.readouterr().out.startswith("To be")


def test_raw_needs_neither_framework_and_a_missing_one_is_named():
    code = ("import sys, train, sample\n"
            "assert not {'flax', 'equinox', 'safetensors', 'tokenizers'} & set(sys.modules), sorted(sys.modules)\n"
            "sys.modules['equinox'] = None\n"
            "train.port(train.parse(['--model', 'eqx']))")
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and done.stderr == "error: --model eqx needs the package equinox: pip install equinox\n"


# GPT-2 folders ---------------------------------------------------------------------------

GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 12, "vocab_size": 288}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """(folder, transformers' model): every parameter random, written by save_pretrained, with a byte-level BPE
    tokenizer of 280 tokens; the vocabulary is padded to 288, as checkpoints often are."""
    transformers = pytest.importorskip("transformers", reason="not verified: transformers is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="not verified: tokenizers is not installed")
    import torch
    folder = tmp_path_factory.mktemp("gpt2")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, bos_token_id=None, eos_token_id=None)).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator([TEXT], tokenizers.trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=byte_level.alphabet(), show_progress=False))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder, model


def test_a_gpt2_folder_gives_the_logits_of_transformers(gpt2):
    import torch
    folder, theirs = gpt2
    cfg = GPTConfig(**gpt2_weights.read_shape(folder))
    params = gpt2_weights.load_params(folder, cfg)
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (3, cfg.context))
    with torch.no_grad():
        want = theirs(torch.from_numpy(tokens)).logits.numpy()
    got = jax.jit(partial(forward, cfg=cfg))(params, jnp.asarray(tokens, jnp.int32))
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max() and np.abs(want).max() > 1
    short = dataclasses.replace(cfg, context=5)
    cropped = jax.jit(partial(forward, cfg=short))(gpt2_weights.load_params(folder, short),
                                                   jnp.asarray(tokens[:, :5], jnp.int32))
    assert np.abs(cropped - want[:, :5]).max() < 1e-5 * np.abs(want).max()


def edited(folder, to, tensors=None, **config):
    """A copy of a GPT-2 folder with some tensors and entries of config.json changed (None removes a tensor)."""
    from safetensors.numpy import load_file, save_file
    shutil.copytree(folder, to)
    (to / "config.json").write_text(json.dumps(json.loads((to / "config.json").read_text()) | config))
    if tensors is not None:
        stored = load_file(to / "model.safetensors")
        save_file({name: a for name, a in tensors(stored).items() if a is not None}, to / "model.safetensors")
    return to


def test_older_files_and_bfloat16_load_too(gpt2, tmp_path):
    """The first GPT-2 files name no `transformer.` and hold the causal masks; some store half precision, or the tied
    head once more."""
    import ml_dtypes
    folder, _ = gpt2
    cfg = GPTConfig(**gpt2_weights.read_shape(folder))
    want = gpt2_weights.load_params(folder, cfg)
    mask = {"h.0.attn.bias": np.tril(np.ones((1, 1, 12, 12), np.float32))}
    old = edited(folder, tmp_path / "old", lambda t: {n.removeprefix("transformer."): a for n, a in t.items()} | mask)
    head = edited(folder, tmp_path / "head", lambda t: t | {"lm_head.weight": t["transformer.wte.weight"]})
    half = edited(folder, tmp_path / "half", lambda t: {n: a.astype(ml_dtypes.bfloat16) for n, a in t.items()})
    for same in (old, head):
        assert distance(gpt2_weights.load_params(same, cfg), want) == 0
    assert 0 < distance(gpt2_weights.load_params(half, cfg), want) < 2**-8


ATTENTION = "transformer.h.1.attn.c_attn.weight"


@pytest.mark.parametrize("tensors, config, says", [
    (lambda t: t | {ATTENTION: t[ATTENTION].T.copy()}, {}, [ATTENTION, "w_qkv", "(48, 16)", "(16, 48)"]),
    (lambda t: t | {ATTENTION: None}, {}, ["lacks " + ATTENTION, "w_qkv"]),
    (lambda t: t | {"lm_head.weight": 2 * t["transformer.wte.weight"]}, {}, ["lm_head.weight"]),
    (None, {"n_layer": 1}, ["transformer.h.1.", "no place"]),
    (None, {"activation_function": "relu"}, ["activation_function='relu'", "gelu_new"]),
    (None, {"n_embd": "wide"}, ["config.json", "wide"]),
    (None, {"n_head": 3}, ["n_embd=16", "n_head=3"]),
    (None, {"vocab_size": 200}, ["280 tokens", "vocab_size=200"]),
])
def test_a_folder_that_does_not_fit_is_refused_by_name(gpt2, tmp_path, capsys, text_file, tensors, config, says):
    folder = edited(gpt2[0], tmp_path / "bad", tensors, **config)
    for command in (lambda: sample.main(sample.SampleConfig(init_from=str(folder))),
                    lambda: fit(tmp_path / "run", f"--init-from={folder}", f"--dataset={text_file}", "--max-iters=2")):
        with pytest.raises(SystemExit) as stopped:
            command()
        said = capsys.readouterr().err
        assert stopped.value.code == 2 and all(word in said for word in says) and said.count("error:") == 1, said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("file, content, says", [
    ("config.json", None, "holds no config.json"), ("model.safetensors", None, "holds no model.safetensors"),
    ("tokenizer.json", None, "holds no tokenizer.json"), ("model.safetensors", b"broken", "can't be read"),
    ("tokenizer.json", b"broken", "is no tokenizer"), ("config.json", b"[]", "no configuration")])
def test_a_missing_or_broken_file_is_named(gpt2, tmp_path, capsys, file, content, says):
    folder = shutil.copytree(gpt2[0], tmp_path / "bad")
    (folder / file).unlink() if content is None else (folder / file).write_bytes(content)
    with pytest.raises(SystemExit) as stopped:
        sample.main(sample.SampleConfig(init_from=str(folder)))
    assert stopped.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize("package", ["safetensors", "tokenizers"])
def test_a_missing_package_is_named(gpt2, monkeypatch, capsys, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as stopped:
        sample.main(sample.SampleConfig(init_from=str(gpt2[0])))
    assert stopped.value.code == 2 and f"needs the package {package}: pip install {package}" in capsys.readouterr().err


@pytest.mark.parametrize("flags, says", [
    (["--n-layer=3"], "n_layer=2, not 3"), (["--n-embd=32"], "n_embd=16, not 32"),
    (["--context=99"], "context=12, not 99")])
def test_flags_that_contradict_the_folder_are_refused(gpt2, capsys, flags, says):
    with pytest.raises(SystemExit) as stopped:
        train.parse([f"--init-from={gpt2[0]}", *flags])
    assert stopped.value.code == 2 and says in capsys.readouterr().err


def test_a_gpt2_speaks_as_transformers_lets_it(gpt2, capsys):
    import torch
    folder, theirs = gpt2
    tokenizer = gpt2_weights.load_tokenizer(folder)
    assert gpt2_weights.decode(gpt2_weights.encode("naïve ☃ to be", tokenizer), tokenizer) == "naïve ☃ to be"
    ids = tokenizer.encode("To be").ids
    with torch.no_grad():
        want = theirs.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False, pad_token_id=0)[0, len(ids):]
    said = []
    for stream in (True, False):  # drawn bytes are no whole characters: what is streamed must come to the same text
        sample.main(sample.SampleConfig(init_from=str(folder), prompt="To be", temperature=0.0, max_new_tokens=6,
                                        stream=stream))
        said.append(capsys.readouterr().out.removeprefix("-" * 40 + "\n"))
    assert said == ["To be" + tokenizer.decode(want.tolist()) + "\n"] * 2


def test_fine_tuning_starts_at_the_folders_loss_and_resumes_without_the_folder(gpt2, text_file, tmp_path, capsys):
    folder = shutil.copytree(gpt2[0], tmp_path / "gpt2")
    flags = (f"--init-from={folder}", f"--dataset={text_file}", "--context=8", "--batch-size=4", "--eval-batches=2",
             "--log-interval=1", "--eval-interval=4", "--warmup-iters=1")
    fit(tmp_path / "cut", *flags, "--max-iters=2", "--lr-decay-iters=4")
    cfg = run.load_config(tmp_path / "cut", train.Config)
    assert (cfg.n_layer, cfg.n_embd, cfg.context, cfg.lr) == (2, 16, 8, 3e-5)

    corpus = gpt2_weights.tokenized(data.load(str(text_file)), folder)
    assert len(corpus.vocab) == 288 and len(corpus.train) + len(corpus.val) < 0.6 * len(TEXT)  # tokens, not characters
    model_cfg = cfg.model(288)
    params, ids = gpt2_weights.load_params(folder, model_cfg), jnp.asarray(corpus.train)
    tokens, targets, _ = jax.jit(train.micro_batches, static_argnums=2)(ids, 0, cfg)
    first = jax.jit(loss_fn, static_argnums=3)(params, tokens[0], targets[0], model_cfg)
    assert abs(losses(tmp_path / "cut")[1] - first) < 1e-5

    shutil.rmtree(folder)
    fit(tmp_path / "cut", "--resume", "--max-iters=4")
    assert "resuming" in capsys.readouterr().out and sorted(losses(tmp_path / "cut")) == [1, 2, 3, 4]
    sample.main(sample.SampleConfig(out_dir=str(tmp_path / "cut"), prompt="To be", max_new_tokens=4))
    assert capsys.readouterr().out.startswith("To be")
