"""Trains a character-level GPT on one text, from nothing to something like a play.

    python train.py                        # the `cpu` preset: 0.8M parameters, a minute and a half on two cores
    python train.py --max-iters 200        # a first look
    python train.py --resume               # go on with the newest run
    python train.py --preset gpu           # nanoGPT's GPU setting: 10.7M parameters

Legend: B batch, T context, V vocabulary. README.md has the expected losses and times.
Everything of a run is in out/<run>/: config.json, metrics.jsonl, result.json, loss.svg, checkpoints.
"""
import argparse
import dataclasses
import math
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from tqdm import tqdm

import data
import run
from model import IGNORE, GPTConfig, count_params, init_params, summed_loss


@dataclass(frozen=True)
class Config:
    preset: str = "cpu"  # cpu or gpu: sets the defaults of the other flags
    dataset: str = "auto"  # auto, tiny_shakespeare, python-docs, or the path of a UTF-8 text file
    data_dir: str = ""  # a prepared TFDS folder; else TFDS_DATA_DIR, else ~/tensorflow_datasets
    out_dir: str = ""  # the run's folder; default: a new one under out/
    resume: bool = False  # continue the run in out_dir (default: the newest) with the flags it was started with
    seed: int = 0  # of the initial parameters, the batches and dropout
    n_layer: int = 4  # layers
    n_head: int = 4  # attention heads a layer
    n_embd: int = 128  # width of the model
    context: int = 64  # tokens the model sees at once
    dropout: float = 0.0  # probability of dropping an activation
    dtype: str = "float32"  # of the matmuls: float32 or bfloat16; parameters stay float32
    remat: bool = False  # recompute activations in the backward pass: less memory, more time
    batch_size: int = 12  # sequences a micro-batch
    accum_steps: int = 1  # micro-batches a step
    max_iters: int = 2000  # steps
    lr_decay_iters: int | None = None  # length of the cosine; default: max_iters
    lr: float = 2e-3  # peak learning rate; the cosine ends at a tenth of it
    warmup_iters: int | None = None  # steps of linear warm-up; default: 100, or a twentieth of a shorter cosine
    weight_decay: float = 0.1  # on matrices only
    grad_clip: float = 1.0  # largest global norm of the gradient
    eval_interval: int = 250  # steps between evaluations (and checkpoints)
    eval_batches: int = 20  # batches an evaluation, always the same positions
    log_interval: int = 50  # steps between log lines
    profile: str = ""  # write a jax.profiler trace of 10 steps to this folder

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
        self.model(vocab_size=1)  # the model's own checks

    @property
    def decay_iters(self):
        return self.max_iters if self.lr_decay_iters is None else self.lr_decay_iters

    @property
    def warmup(self):
        return min(100, self.decay_iters // 20) if self.warmup_iters is None else self.warmup_iters

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


def optimizer(cfg):
    """AdamW (Loshchilov & Hutter 2019) on clipped gradients; biases, scales and shifts don't decay."""
    def is_matrix(path, leaf):
        return jax.tree_util.keystr(path[-1:]).strip("[']").startswith("w")
    decayed = partial(jax.tree_util.tree_map_with_path, is_matrix)
    return optax.chain(optax.clip_by_global_norm(cfg.grad_clip),
                       optax.adamw(schedule(cfg), b1=0.9, b2=0.99, weight_decay=cfg.weight_decay, mask=decayed))


@partial(jax.jit, static_argnames=("cfg", "model_cfg"))
def init_state(cfg, model_cfg):
    """{"params", "opt"}: all that training carries besides the step number; every random number is a function
    of (seed, step)."""
    params = init_params(purpose_keys(cfg.seed)["init"], model_cfg)
    return {"params": params, "opt": optimizer(cfg).init(params)}


def purpose_keys(seed):
    return dict(zip(("init", "batches", "dropout"), jax.random.split(jax.random.key(seed), 3)))


def accumulated_gradient(params, tokens, targets, model_cfg, keys):
    """Gradient of the mean loss over A micro-batches. tokens, targets: (A, B, T); keys: (A,) or None.

    Sums of nats and of gradients are accumulated and divided once by the number of targets: means of means
    would weigh a micro-batch with few targets like a full one.
    """
    def micro(total, batch):
        tokens, targets, key = batch
        (nats, count), grad = jax.value_and_grad(summed_loss, has_aux=True)(params, tokens, targets, model_cfg, key)
        return jax.tree.map(jnp.add, total, (nats, count, grad)), None

    zero = (jnp.zeros(()), jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))
    # Unrolled, a loop of one is no loop: XLA:CPU runs what is in a loop more slowly.
    (nats, count, grad), _ = jax.lax.scan(micro, zero, (tokens, targets, keys), unroll=len(tokens) == 1)
    return nats / count, jax.tree.map(lambda g: g / count, grad)


@partial(jax.jit, static_argnames=("cfg", "model_cfg"), donate_argnames="state")
def train_step(state, ids, step, cfg, model_cfg):
    """One update. ids: the training text (n,), on the device; step: int32 scalar. Returns the new state and
    {"loss", "grad_norm"} as device scalars, which nobody waits for."""
    keys, A = purpose_keys(cfg.seed), cfg.accum_steps
    tokens, targets = data.sample_batch(ids, keys["batches"], step, A * cfg.batch_size, cfg.context)
    micro = (A, cfg.batch_size, cfg.context)
    dropout_keys = jax.random.split(jax.random.fold_in(keys["dropout"], step), A) if cfg.dropout else None
    loss, grad = accumulated_gradient(state["params"], tokens.reshape(micro), targets.reshape(micro), model_cfg,
                                      dropout_keys)
    updates, opt = optimizer(cfg).update(grad, state["opt"], state["params"])
    new = {"params": optax.apply_updates(state["params"], updates), "opt": opt}
    return new, {"loss": loss, "grad_norm": optax.tree.norm(grad)}


# Evaluation ------------------------------------------------------------------------------

@partial(jax.jit, static_argnames="model_cfg")
def summed_losses(params, tokens, targets, model_cfg):
    """(nats, count) over n batches. tokens, targets: (n, B, T); targets of model.IGNORE don't count."""
    def body(total, batch):
        return jax.tree.map(jnp.add, total, summed_loss(params, *batch, model_cfg)), None
    return jax.lax.scan(body, (jnp.zeros(()), jnp.zeros((), jnp.int32)), (tokens, targets))[0]


def evaluate(params, windows, shape, model_cfg):
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
        more_nats, more = summed_losses(params, *group, model_cfg)
        nats, count = nats + float(more_nats), count + int(more)
    return nats / count


# The run ---------------------------------------------------------------------------------

@dataclass(frozen=True)
class Result:
    dataset: str
    steps: int
    seed: int
    val_loss: float  # nats a character over the whole validation part
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
    try:
        corpus = data.load(cfg.dataset, cfg.data_dir)
        shortest = min(len(corpus.train), len(corpus.val))
        if shortest < cfg.context + 1:
            raise ValueError(f"{corpus.name} has a part of {shortest} characters, but context={cfg.context} needs at "
                             f"least {cfg.context + 1}: use a longer text or a smaller --context")
    except ValueError as why:
        run.fail(why)
    model_cfg = cfg.model(len(corpus.vocab))
    made_with = run.provenance()
    print(f"jax {made_with['jax']}, {made_with['backend']} ({made_with['device']}), dataset {corpus.name}: "
          f"{corpus.source}; {len(corpus.train):,} + {len(corpus.val):,} characters, {len(corpus.vocab)} symbols")

    # Set up: state, from a checkpoint or from the seed
    state, first, best = init_state(cfg, model_cfg), 0, math.inf
    folder = Path(cfg.out_dir) if cfg.resume else run.new_run(cfg.out_dir, f"{cfg.preset}-{corpus.name}-s{cfg.seed}")
    checkpoints = run.Checkpoints(folder)
    if cfg.resume:
        restored = checkpoints.restore("latest", state)
        if restored is None:
            run.fail(f"{folder} holds no checkpoint to resume from: start it anew in another folder")
        state, meta = restored
        first, best = meta["step"], meta["best"]
        if meta["vocab"] != corpus.vocab:
            run.fail(f"{folder} was trained on {meta['dataset']}, whose symbols differ from those of {corpus.name}: "
                     "resume with the same text")
        print(f"resuming {folder} at step {first}")
    if first >= cfg.max_iters and cfg.resume:
        run.fail(f"{folder} is at step {first} already: pass --max-iters above it")
    run.save_config(folder, dataclasses.replace(cfg, resume=False, out_dir="", profile=""))
    metrics = run.Metrics(folder, first)
    n_params = count_params(state["params"])
    print(f"{n_params / 1e6:.2f}M parameters, {cfg.accum_steps * cfg.batch_size * cfg.context} tokens a step, "
          f"run folder {folder}")

    train_ids = jnp.asarray(corpus.train)
    eval_shape = (cfg.eval_batches, cfg.batch_size)
    fixed_train, fixed_val = (data.even_windows(ids, cfg.context, math.prod(eval_shape))
                              for ids in (corpus.train, corpus.val))
    compile_began = time.perf_counter()
    step_fn = train_step.lower(state, train_ids, jnp.int32(0), cfg, model_cfg).compile()
    compile_s = time.perf_counter() - compile_began
    lr_at = schedule(cfg)

    def save(kind, step):
        meta = {"step": step, "best": best, "vocab": corpus.vocab, "dataset": corpus.name}
        checkpoints.save(kind, step, state, meta)

    # The loop: `pending` holds the losses on the device until they are logged
    pending, training_s, trained = [], 0.0, 0
    profiler = Profiler(cfg.profile, first + 10, first + 20)
    with run.Stop() as stop, tqdm(total=cfg.max_iters, initial=first, disable=None, unit="step", leave=False) as bar:
        began_steps, n_steps = time.perf_counter(), 0
        for step in range(first, cfg.max_iters):
            with profiler.step(step):
                state, got = step_fn(state, train_ids, jnp.int32(step))
            pending.append(got)
            done, n_steps = step + 1, n_steps + 1
            bar.update()
            evaluating = done % cfg.eval_interval == 0
            stopping = stop.requested or done == cfg.max_iters
            if not (done % cfg.log_interval == 0 or evaluating or stopping):
                continue

            losses, norms = (np.array([p[name] for p in pending]) for name in ("loss", "grad_norm"))
            seconds = time.perf_counter() - began_steps
            finite = np.isfinite(losses) & np.isfinite(norms)
            if not finite.all():
                bad = int(np.argmin(finite))
                stop_non_finite(folder, done - len(pending) + bad,
                                f"loss {losses[bad]}, gradient norm {norms[bad]}")
            pending = []
            training_s, trained = training_s + seconds, trained + n_steps
            tokens_per_s = n_steps * cfg.accum_steps * cfg.batch_size * cfg.context / seconds
            metrics.write(step=done, loss=float(losses.mean()), grad_norm=float(norms[-1]), lr=float(lr_at(step)),
                          ms_per_step=1e3 * seconds / n_steps, tokens_per_s=tokens_per_s, dataset=corpus.name)
            bar.write(f"step {done:5d} | loss {losses.mean():.4f} | {1e3 * seconds / n_steps:7.1f} ms/step | "
                      f"{tokens_per_s:8,.0f} tokens/s | {corpus.name}")

            if evaluating or stopping:
                val_loss = evaluate(state["params"], fixed_val, eval_shape, model_cfg)
                if not math.isfinite(val_loss):  # this step's update ruined what its own loss still found good
                    stop_non_finite(folder, step, f"validation loss {val_loss} after it")
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
    result = Result(
        dataset=corpus.name, steps=cfg.max_iters, seed=cfg.seed,
        val_loss=evaluate(state["params"], data.all_windows(corpus.val, cfg.context, IGNORE), eval_shape, model_cfg),
        train_loss=evaluate(state["params"], fixed_train, eval_shape, model_cfg),
        params=n_params, tokens_per_s=trained * cfg.accum_steps * cfg.batch_size * cfg.context / training_s,
        compile_s=compile_s, wall_s=time.perf_counter() - began, provenance=made_with)
    run.write_json(folder / "result.json", dataclasses.asdict(result))
    run.plot(folder, metrics.read(), {"train": "loss", "validation": "eval_val_loss"}, "loss (nats a character)")
    print(f"{corpus.name}: {result.steps} steps, val_loss {result.val_loss:.4f} on {len(corpus.val):,} characters, "
          f"train_loss {result.train_loss:.4f}, {result.tokens_per_s:,.0f} tokens/s, compiled in {compile_s:.1f} s, "
          f"{result.wall_s:.1f} s in all -> {folder}")
    return result


def stop_non_finite(folder, step, what):
    raise FloatingPointError(f"step {step}: {what}; the last good checkpoint in {folder} is untouched: try a smaller "
                             "--lr in a new run")


class Profiler:
    """Traces the steps [first, last) into a folder with common.profiling; without a folder it does nothing."""

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
        if self.trace and step == self.first:
            self.context = self.trace()
            self.context.__enter__()
        if step == self.last:
            self.close()
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def close(self):
        if self.context:
            self.context.__exit__(None, None, None)
            self.context = self.trace = None


# Command line ----------------------------------------------------------------------------

def parse(argv):
    """argv -> Config. --preset and --resume choose the defaults of the other flags, so they are read first."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default="cpu")
    first.add_argument("--resume", action="store_true")
    first.add_argument("--out-dir", "--out_dir", default="")
    early, _ = first.parse_known_args(argv)
    if early.preset not in PRESETS:
        run.fail(f"--preset {early.preset!r} is not one of {', '.join(PRESETS)}")
    saved, default = None, PRESETS[early.preset]
    if early.resume:
        folder = early.out_dir or run.newest_run()
        if folder is None:
            run.fail("--resume: there is no run under out/ yet; train first, or name one with --out-dir")
        saved = run.load_config(folder, Config)
        default = dataclasses.replace(saved, out_dir=str(folder), resume=True)
    cfg = tyro.cli(Config, default=default, args=argv, description=__doc__)
    for name, value in dataclasses.asdict(saved).items() if saved else ():
        if name not in FREE_ON_RESUME and getattr(cfg, name) != value:
            run.fail(f"--resume: the run in {folder} has {name}={value}, not {getattr(cfg, name)}; drop the flag, or "
                     "start a new run")
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
