"""Trains a character-level GPT on one text, from nothing to something like a play.

    python train.py                        # the `cpu` preset: 0.8M parameters, a minute and a half on two cores
    python train.py --max-iters 200        # a first look
    python train.py --resume               # go on with the newest run
    python train.py --preset gpu           # nanoGPT's GPU setting: 10.7M parameters
    python train.py --model nnx            # the same run by the model in Flax NNX; eqx: in Equinox
    python train.py --init-from DIR        # fine-tunes a Hugging Face GPT-2 on the text, in its tokens

Legend: B batch, T context, V vocabulary. README.md has the expected losses and times.
Everything of a run is in out/<run>/: config.json, metrics.jsonl, result.json, loss.svg, checkpoints.
"""
import argparse
import dataclasses
import importlib
import math
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from tqdm import tqdm

import data
import gpt2_weights
import run
from model import IGNORE, GPTConfig, attention, count_params, init_params, summed_loss


@dataclass(frozen=True)
class Config:
    preset: str = "cpu"  # cpu or gpu: sets the defaults of the other flags
    dataset: str = "auto"  # auto, tiny_shakespeare, python-docs, or the path of a UTF-8 text file
    data_dir: str = ""  # a prepared TFDS folder; else TFDS_DATA_DIR, else ~/tensorflow_datasets
    out_dir: str = ""  # the run's folder; default: a new one under out/
    resume: bool = False  # continue the run in out_dir (default: the newest) with the flags it was started with
    seed: int = 0  # of the initial parameters, the batches and dropout
    framework: Annotated[Literal["raw", "nnx", "eqx"], tyro.conf.arg(name="model")] = "raw"  # model.py, or its port
    init_from: str = ""  # start from a Hugging Face GPT-2 folder: its weights, shape and tokens; lr is then 3e-5
    n_layer: int = 4  # layers
    n_head: int = 4  # attention heads a layer
    n_embd: int = 128  # width of the model
    context: int = 64  # tokens the model sees at once
    dropout: float = 0.0  # probability of dropping an activation
    dtype: str = "float32"  # of the matmuls: float32 or bfloat16; parameters stay float32
    attention: Literal["reference", "pallas"] = "reference"  # pallas: the kernels of kernels.py, for a TPU or GPU
    remat: bool = False  # recompute activations in the backward pass: less memory, more time
    batch_size: int = 12  # sequences a micro-batch
    accum_steps: int = 1  # micro-batches a step
    max_iters: int = 2000  # steps
    lr_decay_iters: int | None = None  # length of the cosine; default: max_iters
    lr: float = 2e-3  # peak learning rate; the cosine ends at a tenth of it
    warmup_iters: int | None = None  # steps of linear warm-up; default: 100, or a quarter of a shorter cosine
    weight_decay: float = 0.1  # on matrices only
    grad_clip: float = 1.0  # largest global norm of the gradient
    eval_interval: int = 250  # steps between evaluations (and checkpoints)
    eval_batches: int = 20  # batches an evaluation, always the same positions
    log_interval: int = 50  # steps between log lines
    profile: str = ""  # write a jax.profiler trace of 16 steps to this folder

    def __post_init__(self):
        for name in ("batch_size", "accum_steps", "max_iters", "eval_interval", "eval_batches", "log_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("lr", "grad_clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if not 0 <= self.warmup < self.decay_iters:
            raise ValueError(f"warmup_iters={self.warmup} must be below lr_decay_iters={self.decay_iters}: "
                             "the cosine starts where the warm-up ends")
        if self.attention == "pallas" and self.dropout:
            raise ValueError(f"attention='pallas' with dropout={self.dropout}: the kernels drop no probabilities; set "
                             "--dropout 0")
        self.model(vocab_size=1)  # the model's own checks

    @property
    def decay_iters(self):
        return self.max_iters if self.lr_decay_iters is None else self.lr_decay_iters

    @property
    def warmup(self):
        return min(100, self.decay_iters // 4) if self.warmup_iters is None else self.warmup_iters

    def model(self, vocab_size):
        shape = {name: getattr(self, name) for name in ("context", "n_layer", "n_head", "n_embd", "dropout", "dtype",
                                                        "remat")}
        return GPTConfig(vocab_size=vocab_size, **shape)


CPU = Config()
PRESETS = {
    "cpu": CPU,
    "gpu": dataclasses.replace(CPU, preset="gpu", n_layer=6, n_head=6, n_embd=384, context=256, batch_size=64,
                               dropout=0.2, max_iters=5000, lr=1e-3),
}
# What a resumed run may change: how long it runs and what it reports, never what it computes.
FREE_ON_RESUME = {"out_dir", "data_dir", "resume", "max_iters", "eval_interval", "eval_batches", "log_interval",
                  "profile"}


# Optimiser and step ----------------------------------------------------------------------

def schedule(cfg):
    """Linear warm-up, then a cosine from lr to lr / 10 at step decay_iters."""
    return optax.warmup_cosine_decay_schedule(cfg.lr / (cfg.warmup + 1), cfg.lr, cfg.warmup, cfg.decay_iters,
                                              cfg.lr / 10)


def matrices(params):
    """Which leaves of model.py's parameters are matrices, as a tree of bools."""
    def is_matrix(path, leaf):
        return jax.tree_util.keystr(path[-1:]).strip("[']").startswith("w")
    return jax.tree_util.tree_map_with_path(is_matrix, params)


def optimizer(cfg, decayed=matrices):
    """AdamW (Loshchilov & Hutter 2019) on clipped gradients; biases, scales and shifts don't decay."""
    return optax.chain(optax.clip_by_global_norm(cfg.grad_clip),
                       optax.adamw(schedule(cfg), b1=0.9, b2=0.99, weight_decay=cfg.weight_decay, mask=decayed))


@partial(jax.jit, static_argnames=("cfg", "model_cfg"))
def init_state(cfg, model_cfg, params=None):
    """{"params", "opt"}: all that training carries besides the step number; every random number is a function
    of (seed, step). params: to start from; default: drawn."""
    if params is None:
        params = init_params(purpose_keys(cfg.seed)["init"], model_cfg)
    return {"params": params, "opt": optimizer(cfg).init(params)}


def purpose_keys(seed):
    return dict(zip(("init", "batches", "dropout"), jax.random.split(jax.random.key(seed), 3)))


def attention_of(cfg):
    """model.attention, or the kernels' of the same signature, which are loaded only when asked for."""
    if cfg.attention == "reference":
        return attention
    sys.path.append(str(Path(__file__).resolve().parent.parent))
    try:
        import kernels
    except ModuleNotFoundError as why:
        run.fail(f"--attention pallas needs common/, which is not there ({why}): copy it beside this project's folder, "
                 "or use the project's notebook")
    return kernels.attention


def accumulated_gradient(params, tokens, targets, model_cfg, keys, attention=attention):
    """Gradient of the mean loss over A micro-batches. tokens, targets: (A, B, T); keys: (A,) or None.

    Sums of nats and of gradients are accumulated and divided once by the number of targets: means of means
    would weigh a micro-batch with few targets like a full one.
    """
    def micro(total, batch):
        tokens, targets, key = batch
        (nats, count), grad = jax.value_and_grad(summed_loss, has_aux=True)(params, tokens, targets, model_cfg, key,
                                                                            attention)
        return jax.tree.map(jnp.add, total, (nats, count, grad)), None

    zero = (jnp.zeros(()), jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))
    # Unrolled, a loop of one is no loop: XLA:CPU runs what is in a loop more slowly.
    (nats, count, grad), _ = jax.lax.scan(micro, zero, (tokens, targets, keys), unroll=len(tokens) == 1)
    return nats / count, jax.tree.map(lambda g: g / count, grad)


def micro_batches(ids, step, cfg):
    """tokens and targets, (A, B, T) each, and dropout keys, (A,) or None, of a step: functions of (seed, step)."""
    keys, A = purpose_keys(cfg.seed), cfg.accum_steps
    tokens, targets = data.sample_batch(ids, keys["batches"], step, A * cfg.batch_size, cfg.context)
    micro = (A, cfg.batch_size, cfg.context)
    dropout_keys = jax.random.split(jax.random.fold_in(keys["dropout"], step), A) if cfg.dropout else None
    return tokens.reshape(micro), targets.reshape(micro), dropout_keys


@partial(jax.jit, static_argnames=("cfg", "model_cfg"), donate_argnames="state")
def train_step(state, ids, step, cfg, model_cfg):
    """One update. ids: the training text (n,), on the device; step: int32 scalar. Returns the new state and
    {"loss", "grad_norm"} as device scalars, which nobody waits for."""
    tokens, targets, dropout_keys = micro_batches(ids, step, cfg)
    loss, grad = accumulated_gradient(state["params"], tokens, targets, model_cfg, dropout_keys, attention_of(cfg))
    updates, opt = optimizer(cfg).update(grad, state["opt"], state["params"])
    new = {"params": optax.apply_updates(state["params"], updates), "opt": opt}
    return new, {"loss": loss, "grad_norm": optax.tree.norm(grad)}


DISPATCH = 8  # steps; `bench.py --choices` says what they are worth beside one


@partial(jax.jit, static_argnames=("cfg", "model_cfg"), donate_argnames="state")
def train_steps(state, ids, first, last, cfg, model_cfg):
    """The steps [first, last), at most DISPATCH of them, in one dispatch; first, last: int32 scalars. Returns the new
    state and {"loss", "grad_norm"}, (DISPATCH,) each, of which the first last - first count."""
    def body(step, carry):
        state, got = carry
        state, now = train_step(state, ids, step, cfg, model_cfg)
        return state, {name: got[name].at[step - first].set(now[name]) for name in got}
    nothing = {name: jnp.zeros(DISPATCH) for name in ("loss", "grad_norm")}
    return jax.lax.fori_loop(first, last, body, (state, nothing))


# The ports -------------------------------------------------------------------------------

def port(cfg):
    """The module of cfg.framework's model, loaded only when asked for: model.py needs neither Flax nor Equinox."""
    try:
        return importlib.import_module(f"model_{cfg.framework}")
    except ModuleNotFoundError as why:
        run.fail(f"--model {cfg.framework} needs the package {why.name}: pip install {why.name}")


def begin(cfg, model_cfg, params=None):
    """init_state's state, or what a port carries in its place."""
    if cfg.framework == "raw":
        return init_state(cfg, model_cfg, params)
    if params is None:
        params = jax.jit(init_params, static_argnames="cfg")(purpose_keys(cfg.seed)["init"], cfg=model_cfg)
    decayed = partial(jax.tree.map, lambda a: a.ndim > 1)  # layers aren't stacked there: the matrices are of rank 2
    return port(cfg).start(params, model_cfg, optimizer(cfg, decayed), attention_of(cfg))


def compile_steps(state, ids, cfg, model_cfg):
    """train_steps, compiled: steps(state, ids, first, last) -> (state, {"loss", "grad_norm"}). A port's steps are
    dispatched one by one, and what they return is listed."""
    i = jnp.int32(0)
    if cfg.framework == "raw":
        return train_steps.lower(state, ids, i, i, cfg, model_cfg).compile()
    draw = jax.jit(partial(micro_batches, cfg=cfg)).lower(ids, i).compile()
    update = port(cfg).train_step.lower(draw(ids, i), state).compile()

    def steps(state, ids, first, last):
        got = {"loss": [], "grad_norm": []}
        for step in range(first, last):
            state, now = update(draw(ids, jnp.int32(step)), state)
            for name, values in got.items():
                values.append(now[name])
        return state, got
    return steps


def saved(state, cfg):
    """The state as checkpoints hold it: its "params" are model.py's, whichever model trains."""
    return state if cfg.framework == "raw" else port(cfg).saved(state)


# Evaluation ------------------------------------------------------------------------------

@partial(jax.jit, static_argnames=("model_cfg", "attention"))
def summed_losses(params, tokens, targets, model_cfg, attention=attention):
    """(nats, count) over n batches. tokens, targets: (n, B, T); targets of model.IGNORE don't count."""
    def body(total, batch):
        return jax.tree.map(jnp.add, total, summed_loss(params, *batch, model_cfg, attention=attention)), None
    return jax.lax.scan(body, (jnp.zeros(()), jnp.zeros((), jnp.int32)), (tokens, targets))[0]


def evaluate(params, windows, shape, model_cfg, attention=attention):
    """Mean loss in nats a character, every target counted once.

    windows: (tokens, targets), (m, T) each, any m: they run through one compiled program in groups of
    shape = (n, B); the last group is filled up with windows that don't count.
    """
    nats = count = 0
    size, T = math.prod(shape), model_cfg.context
    for first in range(0, len(windows[0]), size):
        group = [np.full((*shape, T), fill, np.int32) for fill in (0, IGNORE)]
        for filled, part in zip(group, windows):
            rows = part[first:first + size]
            filled.reshape(size, T)[:len(rows)] = rows
        more_nats, more = summed_losses(params, *group, model_cfg, attention)
        nats, count = nats + float(more_nats), count + int(more)
    return nats / count


# The run ---------------------------------------------------------------------------------

@dataclass(frozen=True)
class Result:
    dataset: str
    steps: int
    seed: int
    val_loss: float  # nats a character (or token) over the whole validation part
    train_loss: float  # on the evaluation's fixed positions of the training part
    params: int
    tokens_per_s: float  # of training alone, after compilation
    compile_s: float
    wall_s: float
    provenance: dict


def train(cfg):
    """Runs the training described by cfg and returns its Result. Raises FloatingPointError, naming the step, when
    the loss or the gradient is no longer finite; returns None when a signal stopped the run (its state is saved)."""
    began = time.perf_counter()
    run.prepare_host()
    attend = attention_of(cfg)
    unit, params = "token" if cfg.init_from else "character", None
    try:
        corpus = data.load(cfg.dataset, cfg.data_dir)
        if cfg.init_from:  # a resumed run has a copy of what it needs
            corpus = gpt2_weights.tokenized(corpus, Path(cfg.out_dir) / "gpt2" if cfg.resume else cfg.init_from)
        shortest = min(len(corpus.train), len(corpus.val))
        if shortest < cfg.context + 1:
            raise ValueError(f"{corpus.name} has a part of {shortest} {unit}s, but context={cfg.context} needs at "
                             f"least {cfg.context + 1}: use a longer text or a smaller --context")
        model_cfg = cfg.model(len(corpus.vocab))
        if cfg.init_from and not cfg.resume:
            params = gpt2_weights.load_params(cfg.init_from, model_cfg)
    except ValueError as why:
        run.fail(why)
    made_with = run.provenance()
    print(f"jax {made_with['jax']}, {made_with['backend']} ({made_with['device']}), dataset {corpus.name}: "
          f"{corpus.source}; {len(corpus.train):,} + {len(corpus.val):,} {unit}s, {len(corpus.vocab)} symbols")

    if cfg.attention == "pallas" and made_with["backend"] == "cpu":
        print("attention pallas: nothing compiles the kernels for a CPU, so they run in interpret mode, slowly; "
              "--attention reference is the fast path here")

    # Set up: state, from a checkpoint or from the seed
    state, first, best = begin(cfg, model_cfg, params), 0, math.inf
    folder = Path(cfg.out_dir) if cfg.resume else run.new_run(cfg.out_dir, f"{cfg.preset}-{corpus.name}-s{cfg.seed}")
    checkpoints = run.Checkpoints(folder)
    if cfg.resume:
        restored = checkpoints.restore("latest", saved(state, cfg))
        if restored is None:
            run.fail(f"{folder} holds no checkpoint to resume from: start it anew in another folder")
        checkpoint, meta = restored
        state = checkpoint if cfg.framework == "raw" else port(cfg).restored(checkpoint, state)
        first, best = meta["step"], meta["best"]
        if meta["vocab"] != corpus.vocab:
            run.fail(f"{folder} was trained on {meta['dataset']}, whose symbols differ from those of {corpus.name}: "
                     "resume with the same text")
        print(f"resuming {folder} at step {first}")
    if first >= cfg.max_iters and cfg.resume:
        run.fail(f"{folder} is at step {first} already: pass --max-iters above it")
    run.save_config(folder, dataclasses.replace(cfg, resume=False, out_dir="", profile=""))
    if cfg.init_from and not cfg.resume:
        gpt2_weights.keep_tokenizer(cfg.init_from, folder)
    metrics = run.Metrics(folder, first)
    n_params = count_params(saved(state, cfg)["params"])
    print(f"{n_params / 1e6:.2f}M parameters, {cfg.accum_steps * cfg.batch_size * cfg.context} tokens a step, "
          f"run folder {folder}")

    train_ids = jnp.asarray(corpus.train)
    eval_shape = (cfg.eval_batches, cfg.batch_size)
    fixed_train, fixed_val = (data.even_windows(ids, cfg.context, math.prod(eval_shape))
                              for ids in (corpus.train, corpus.val))
    compile_began = time.perf_counter()
    steps_fn = compile_steps(state, train_ids, cfg, model_cfg)
    compile_s = time.perf_counter() - compile_began
    lr_at = schedule(cfg)

    def save(kind, step):
        meta = {"step": step, "best": best, "vocab": corpus.vocab, "dataset": corpus.name}
        checkpoints.save(kind, step, saved(state, cfg), meta)

    # The loop: `pending` holds the losses on the device until they are logged
    pending, training_s, trained = [], 0.0, 0
    profiler = Profiler(cfg.profile, first + DISPATCH, first + 3 * DISPATCH)
    with run.Stop() as stop, tqdm(total=cfg.max_iters, initial=first, disable=None, unit="step", leave=False) as bar:
        began_steps, n_steps, done = time.perf_counter(), 0, first
        while done < cfg.max_iters:
            step, stops = done, (cfg.log_interval, cfg.eval_interval)
            done = min(step + DISPATCH, cfg.max_iters, *(step + n - step % n for n in stops))
            with profiler.step(step):
                state, got = steps_fn(state, train_ids, np.int32(step), np.int32(done))
            pending.append((got, done - step))
            n_steps += done - step
            bar.update(done - step)
            evaluating = done % cfg.eval_interval == 0
            stopping = stop.requested or done == cfg.max_iters
            if not (done % cfg.log_interval == 0 or evaluating or stopping):
                continue

            losses, norms = (np.concatenate([np.asarray(got[name])[:n] for got, n in pending])
                             for name in ("loss", "grad_norm"))
            seconds = time.perf_counter() - began_steps
            finite = np.isfinite(losses) & np.isfinite(norms)
            if not finite.all():
                bad = int(np.argmin(finite))
                stop_non_finite(folder, done - len(finite) + bad,
                                f"loss {losses[bad]}, gradient norm {norms[bad]}")
            pending = []
            training_s, trained = training_s + seconds, trained + n_steps
            tokens_per_s = n_steps * cfg.accum_steps * cfg.batch_size * cfg.context / seconds
            metrics.write(step=done, loss=float(losses.mean()), grad_norm=float(norms[-1]), lr=float(lr_at(step)),
                          ms_per_step=1e3 * seconds / n_steps, tokens_per_s=tokens_per_s, dataset=corpus.name)
            bar.write(f"step {done:5d} | loss {losses.mean():.4f} | {1e3 * seconds / n_steps:7.1f} ms/step | "
                      f"{tokens_per_s:8,.0f} tokens/s | {corpus.name}")

            if evaluating or stopping:
                val_loss = evaluate(saved(state, cfg)["params"], fixed_val, eval_shape, model_cfg, attend)
                if not math.isfinite(val_loss):  # this step's update ruined what its own loss still found good
                    stop_non_finite(folder, done - 1, f"validation loss {val_loss} after it")
                metrics.write(step=done, eval_val_loss=val_loss, dataset=corpus.name)
                bar.write(f"step {done:5d} | validation {val_loss:.4f} | {corpus.name}")
                if val_loss < best:
                    best = val_loss
                    save("best", done)
                save("latest", done)
                if stop.requested and done < cfg.max_iters:
                    checkpoints.close()
                    print(f"stopped after step {done}, saved in {folder}; go on with: "
                          f"python train.py --resume --out-dir {folder}")
                    return None
            began_steps, n_steps = time.perf_counter(), 0
    profiler.close()
    checkpoints.close()

    # Report
    params = saved(state, cfg)["params"]
    result = Result(
        dataset=corpus.name, steps=cfg.max_iters, seed=cfg.seed,
        val_loss=evaluate(params, data.all_windows(corpus.val, cfg.context, IGNORE), eval_shape, model_cfg,
                          attend),
        train_loss=evaluate(params, fixed_train, eval_shape, model_cfg, attend),
        params=n_params, tokens_per_s=trained * cfg.accum_steps * cfg.batch_size * cfg.context / training_s,
        compile_s=compile_s, wall_s=time.perf_counter() - began, provenance=made_with)
    run.write_json(folder / "result.json", dataclasses.asdict(result))
    run.plot(folder, metrics.read(), {"train": "loss", "validation": "eval_val_loss"}, f"loss (nats a {unit})")
    print(f"{corpus.name}: {result.steps} steps, val_loss {result.val_loss:.4f} on {len(corpus.val):,} {unit}s, "
          f"train_loss {result.train_loss:.4f}, {result.tokens_per_s:,.0f} tokens/s, compiled in {compile_s:.1f} s, "
          f"{result.wall_s:.1f} s in all -> {folder}")
    return result


def stop_non_finite(folder, step, what):
    raise FloatingPointError(f"step {step}: {what}; the last good checkpoint in {folder} is untouched: try a smaller "
                             "--lr in a new run")


class Profiler:
    """Traces the dispatches from step `first` to step `last` into a folder with common.profiling; without a folder it
    does nothing."""

    def __init__(self, folder, first, last):
        self.first, self.last, self.context = first, last, None
        self.trace = None
        if folder:
            sys.path.append(str(Path(__file__).resolve().parent.parent))
            try:
                from common.profiling import trace
            except ModuleNotFoundError:
                run.fail("--profile needs the folder common/ beside this project's")
            self.trace = lambda: trace(folder)

    def step(self, step):
        if self.trace and not self.context and self.first <= step < self.last:
            self.context = self.trace()
            self.context.__enter__()
        if step >= self.last:
            self.close()
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def close(self):
        if self.context:
            self.context.__exit__(None, None, None)
            self.context = self.trace = None


# Command line ----------------------------------------------------------------------------

def parse(argv):
    """argv -> Config. --preset, --init-from and --resume choose the defaults of the other flags, so are read first."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default="cpu")
    first.add_argument("--resume", action="store_true")
    first.add_argument("--out-dir", "--out_dir", default="")
    first.add_argument("--init-from", "--init_from", default="")
    early, _ = first.parse_known_args(argv)
    if early.preset not in PRESETS:
        run.fail(f"--preset {early.preset!r} is not one of {', '.join(PRESETS)}")
    resumed, shape, default = None, {}, PRESETS[early.preset]
    if early.resume:
        folder = early.out_dir or run.newest_run()
        if folder is None:
            run.fail("--resume: there is no run under out/ yet; train first, or name one with --out-dir")
        resumed = run.load_config(folder, Config)
        default = dataclasses.replace(resumed, out_dir=str(folder), resume=True)
    elif early.init_from:
        try:
            shape = gpt2_weights.read_shape(early.init_from)
            del shape["vocab_size"]
            default = dataclasses.replace(default, lr=3e-5, **shape)  # nanoGPT's rate for fine-tuning
        except ValueError as why:
            run.fail(why)
    cfg = tyro.cli(Config, default=default, args=argv, description=__doc__)
    for name, value in dataclasses.asdict(resumed).items() if resumed else ():
        if name not in FREE_ON_RESUME and getattr(cfg, name) != value:
            run.fail(f"--resume: the run in {folder} has {name}={value}, not {getattr(cfg, name)}; drop the flag, or "
                     "start a new run")
    for name, value in shape.items():
        asked = getattr(cfg, name)
        shorter = name == "context" and asked < value  # the position embeddings are cropped
        if asked != value and not shorter:
            run.fail(f"--init-from: the model in {cfg.init_from} has {name}={value}, not {asked}; drop the flag")
    return cfg


if __name__ == "__main__":
    try:
        result = train(parse(sys.argv[1:]))
    except KeyboardInterrupt:  # before the first step, or for the second time
        sys.exit(run.INTERRUPTED)
    except FloatingPointError as why:
        print(f"error: {why}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0 if result else run.INTERRUPTED)
