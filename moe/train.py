"""Trains a character-level GPT whose feed-forward layers are mixtures of experts, or the dense GPT of the same cost.

    python train.py                        # the `moe` preset: 8 experts a layer, 2 of them a token
    python train.py --preset dense         # the same active FLOPs a token, without a router
    python train.py --preset switch        # one expert a token, twice as wide (Fedus et al. 2021)
    python train.py --max-iters 200        # a first look
    python train.py --resume               # go on with the newest run

Legend: B batch, T context, V vocabulary, L layers, E experts. README.md has the expected losses and times.
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
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax import lax
from tqdm import tqdm

import data
import run
from model import IGNORE, MoEConfig, active_params, count_params, init_params, loss_fn


@dataclass(frozen=True)
class Config:
    preset: str = "moe"  # moe, dense or switch: sets the defaults of the other flags
    dataset: str = "auto"  # auto, tiny_shakespeare, python-docs, or the path of a UTF-8 text file
    data_dir: str = ""  # a prepared TFDS folder; else TFDS_DATA_DIR, else ~/tensorflow_datasets
    out_dir: str = ""  # the run's folder; default: a new one under out/
    resume: bool = False  # continue the run in out_dir (default: the newest) with the flags it was started with
    seed: int = 0  # of the initial parameters, the batches and the router's jitter
    n_layer: int = 4  # layers
    n_head: int = 4  # attention heads a layer
    n_embd: int = 128  # width of the model
    context: int = 64  # tokens the model sees at once, and among which an expert's places are given away
    n_hidden: int = 256  # width of one expert
    n_experts: int = 8  # experts a layer; 0: one dense feed-forward of width n_hidden and no router
    top_k: int = 2  # experts a token
    capacity_factor: float = 1.25  # places an expert has, over its fair share of the choices of a sequence
    dispatch: Literal["einsum", "gather", "dropless", "expert_choice"] = "gather"  # how tokens reach their experts
    activation: Literal["relu", "gelu", "swiglu"] = "gelu"  # of the experts
    shared_hidden: int = 0  # width of an expert that every token passes through besides; 0: none
    priority: Literal["token", "choice"] = "token"  # who wins a full expert: earlier tokens, or first choices
    balance_weight: float = 0.01  # of the load-balance loss
    z_weight: float = 0.001  # of the router's z-loss
    jitter: float = 0.0  # the router's inputs are multiplied by uniform numbers from [1 - jitter, 1 + jitter]
    grouped_matmul: Literal["reference", "pallas"] = "reference"  # of dropless; pallas: kernels.py, for a TPU
    dtype: str = "float32"  # of the matmuls: float32 or bfloat16; parameters and router stay float32
    batch_size: int = 12  # sequences a step
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
        for name in ("batch_size", "max_iters", "eval_interval", "eval_batches", "log_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("lr", "grad_clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if not 0 <= self.warmup < self.decay_iters:
            raise ValueError(f"warmup_iters={self.warmup} must be below lr_decay_iters={self.decay_iters}: "
                             "the cosine starts where the warm-up ends")
        if self.grouped_matmul == "pallas" and (self.dispatch != "dropless" or not self.n_experts):
            raise ValueError(f"grouped_matmul='pallas' with dispatch={self.dispatch!r} and n_experts={self.n_experts}: "
                             "only --dispatch dropless, with experts, multiplies groups of unequal size")
        self.model(vocab_size=1)  # the model's own checks

    @property
    def decay_iters(self):
        return self.max_iters if self.lr_decay_iters is None else self.lr_decay_iters

    @property
    def warmup(self):
        return min(100, self.decay_iters // 4) if self.warmup_iters is None else self.warmup_iters

    def model(self, vocab_size):
        shared = {f.name for f in dataclasses.fields(self)} & {f.name for f in dataclasses.fields(MoEConfig)}
        return MoEConfig(vocab_size=vocab_size, **{name: getattr(self, name) for name in shared})


MOE = Config()
PRESETS = {
    "moe": MOE,
    "dense": dataclasses.replace(MOE, preset="dense", n_experts=0, n_hidden=MOE.top_k * MOE.n_hidden),
    "switch": dataclasses.replace(MOE, preset="switch", top_k=1, n_hidden=MOE.top_k * MOE.n_hidden, jitter=0.01),
}
# What a resumed run may change: how long it runs and what it reports, never what it computes.
FREE_ON_RESUME = {"out_dir", "data_dir", "resume", "max_iters", "eval_interval", "eval_batches", "log_interval",
                  "profile"}


# Optimiser and step ----------------------------------------------------------------------

def schedule(cfg):
    """Linear warm-up, then a cosine from lr to lr / 10 at step decay_iters."""
    curve = optax.warmup_cosine_decay_schedule(cfg.lr / (cfg.warmup + 1), cfg.lr, cfg.warmup, cfg.decay_iters,
                                               cfg.lr / 10)
    return lambda step: curve(jnp.asarray(step, float))  # of an int32 it is float32, also where x64 is on


def matrices(params):
    """Which leaves are matrices (or an expert's, stacked), as a tree of bools; the others are biases and scales."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def optimizer(cfg):
    """AdamW (Loshchilov & Hutter 2019) on clipped gradients; biases and scales don't decay."""
    return optax.chain(optax.clip_by_global_norm(cfg.grad_clip),
                       optax.adamw(schedule(cfg), b1=0.9, b2=0.99, weight_decay=cfg.weight_decay, mask=matrices))


@partial(jax.jit, static_argnames=("cfg", "model_cfg"))
def init_state(cfg, model_cfg):
    """{"params", "opt"}: all that training carries besides the step number; every random number is a function
    of (seed, step)."""
    params = init_params(purpose_keys(cfg.seed)["init"], model_cfg)
    return {"params": params, "opt": optimizer(cfg).init(params)}


def purpose_keys(seed):
    return dict(zip(("init", "batches", "jitter"), jax.random.split(jax.random.key(seed), 3)))


def grouped_matmul_of(cfg):
    """lax.ragged_dot, or the kernel of the same signature, which is loaded only when asked for."""
    if cfg.grouped_matmul == "reference":
        return lax.ragged_dot
    sys.path.append(str(Path(__file__).resolve().parent.parent))
    try:
        import kernels
    except ModuleNotFoundError as why:
        run.fail(f"--grouped-matmul pallas needs common/, which is not there ({why}): copy it beside this project's "
                 "folder, or use the project's notebook")
    return kernels.grouped_matmul


def update(state, grad, cfg):
    """The state after one step of the optimiser."""
    updates, opt = optimizer(cfg).update(grad, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}


@partial(jax.jit, static_argnames=("cfg", "model_cfg"), donate_argnames="state")
def train_step(state, ids, step, cfg, model_cfg):
    """One step. ids: the training text (n,), on the device; step: int32 scalar. Returns the new state and, on the
    device, where nobody waits for them: "loss" (the cross-entropy alone, as evaluations report it), "grad_norm", and
    the model's aux: "balance", "z", "dropped", "load_entropy", scalars, and "load", (L, E)."""
    keys = purpose_keys(cfg.seed)
    tokens, targets = data.sample_batch(ids, keys["batches"], step, cfg.batch_size, cfg.context)
    key = jax.random.fold_in(keys["jitter"], step) if cfg.jitter else None
    (_, (nats, aux)), grad = jax.value_and_grad(loss_fn, has_aux=True)(
        state["params"], tokens, targets, model_cfg, key, grouped_matmul=grouped_matmul_of(cfg))
    return update(state, grad, cfg), {"loss": nats, "grad_norm": optax.tree.norm(grad), **aux}


DISPATCH = 8  # steps: Python and the dispatch cost next to nothing beside that many


@partial(jax.jit, static_argnames=("cfg", "model_cfg"), donate_argnames="state")
def train_steps(state, ids, first, last, cfg, model_cfg):
    """The steps [first, last), at most DISPATCH of them, in one dispatch; first, last: int32 scalars. Returns the new
    state and what train_step returns, each with a leading axis of DISPATCH, of which the first last - first count."""
    one_step = partial(train_step, cfg=cfg, model_cfg=model_cfg)

    def body(step, carry):
        state, got = carry
        state, now = one_step(state, ids, step)
        return state, jax.tree.map(lambda all_steps, x: all_steps.at[step - first].set(x), got, now)
    _, now = jax.eval_shape(one_step, state, ids, first)
    nothing = jax.tree.map(lambda x: jnp.zeros((DISPATCH, *x.shape), x.dtype), now)
    return lax.fori_loop(first, last, body, (state, nothing))


# Evaluation ------------------------------------------------------------------------------

@partial(jax.jit, static_argnames=("model_cfg", "grouped_matmul"))
def summed_losses(params, tokens, targets, model_cfg, grouped_matmul=lax.ragged_dot):
    """({"loss", and what aux holds}, each times the number of targets it is a mean over, and their number) over n
    batches. tokens, targets: (n, B, T); a target of model.IGNORE doesn't count, and its token is masked: it takes no
    place at an expert."""
    def batch_sums(tokens, targets):
        counted = targets != IGNORE
        _, (nats, aux) = loss_fn(params, tokens, targets, model_cfg, mask=counted, grouped_matmul=grouped_matmul)
        count = counted.sum()
        return jax.tree.map(lambda mean: mean * count, {"loss": nats, **aux}), count

    def body(total, batch):
        return jax.tree.map(jnp.add, total, batch_sums(*batch)), None
    shapes = jax.eval_shape(batch_sums, tokens[0], targets[0])
    return lax.scan(body, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), (tokens, targets))[0]


def evaluate(params, windows, shape, model_cfg, grouped_matmul=lax.ragged_dot):
    """Mean loss in nats a character, every target counted once, and the means of model.moe_layer's aux.

    windows: (tokens, targets), (m, T) each, any m: they run through one compiled program in groups of
    shape = (n, B); the last group is filled up with windows that don't count. The load-balance loss and the entropy
    of the load are those of a batch of B windows, averaged over batches, as in training.
    """
    sums, count = None, 0
    size, T = math.prod(shape), model_cfg.context
    for first in range(0, len(windows[0]), size):
        group = [np.full((*shape, T), fill, np.int32) for fill in (0, IGNORE)]
        for filled, part in zip(group, windows):
            rows = part[first:first + size]
            filled.reshape(size, T)[:len(rows)] = rows
        more, n = jax.device_get(summed_losses(params, *group, model_cfg, grouped_matmul))
        wide = jax.tree.map(np.float64, more)
        sums = wide if sums is None else jax.tree.map(np.add, sums, wide)
        count += int(n)
    means = jax.tree.map(lambda x: x / count, sums)
    return float(means.pop("loss")), means


# The run ---------------------------------------------------------------------------------

@dataclass(frozen=True)
class Result:
    dataset: str
    steps: int
    seed: int
    val_loss: float  # nats a character over the whole validation part
    train_loss: float  # on the evaluation's fixed positions of the training part
    params: int
    active_params: int  # of them, those that one token meets
    dropped: float  # share of the choices over the whole validation part that found their expert full
    load_entropy: float  # of the choices' distribution over experts there, in nats; log E where all are equally busy
    tokens_per_s: float  # of training alone, after compilation
    compile_s: float
    wall_s: float
    provenance: dict


def routing_row(means):
    """What a metrics row says of the routing: plain numbers, rounded to six digits, from means of aux; empty for a
    dense model."""
    if not means["load"].size:
        return {}
    return {name: np.round(np.asarray(means[name], float), 6).tolist()
            for name in ("dropped", "balance", "z", "load_entropy", "load")}


def train(cfg):
    """Runs the training described by cfg and returns its Result. Raises FloatingPointError, naming the step, when
    the loss or the gradient is no longer finite; returns None when a signal stopped the run (its state is saved)."""
    began = time.perf_counter()
    run.prepare_host()
    grouped_matmul = grouped_matmul_of(cfg)
    try:
        corpus = data.load(cfg.dataset, cfg.data_dir)
        shortest = min(len(corpus.train), len(corpus.val))
        if shortest < cfg.context + 1:
            raise ValueError(f"{corpus.name} has a part of {shortest} characters, but context={cfg.context} needs at "
                             f"least {cfg.context + 1}: use a longer text or a smaller --context")
        model_cfg = cfg.model(len(corpus.vocab))
    except ValueError as why:
        run.fail(why)
    made_with = run.provenance()
    print(f"jax {made_with['jax']}, {made_with['backend']} ({made_with['device']}), dataset {corpus.name}: "
          f"{corpus.source}; {len(corpus.train):,} + {len(corpus.val):,} characters, {len(corpus.vocab)} symbols")
    if cfg.grouped_matmul == "pallas" and made_with["backend"] == "cpu":
        print("grouped_matmul pallas: nothing compiles the kernel for a CPU, so it runs in interpret mode, slowly; "
              "--grouped-matmul reference is the fast path here")
    elif cfg.grouped_matmul == "pallas" and made_with["backend"] != "tpu":
        run.fail(f"--grouped-matmul pallas: the kernel is for a TPU, not for {made_with['backend']}: use "
                 "--grouped-matmul reference")

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
    n_params, n_active = count_params(state["params"]), active_params(state["params"], model_cfg)
    print(f"{n_params / 1e6:.2f}M parameters, of which a token meets {n_active / 1e6:.2f}M, "
          f"{cfg.batch_size * cfg.context} tokens a step, run folder {folder}")

    train_ids = jnp.asarray(corpus.train)
    eval_shape = (cfg.eval_batches, cfg.batch_size)
    fixed_train, fixed_val = (data.even_windows(ids, cfg.context, math.prod(eval_shape))
                              for ids in (corpus.train, corpus.val))
    compile_began = time.perf_counter()
    zero = jnp.int32(0)
    steps_fn = train_steps.lower(state, train_ids, zero, zero, cfg, model_cfg).compile()
    compile_s = time.perf_counter() - compile_began
    lr_at = schedule(cfg)

    def save(kind, step):
        meta = {"step": step, "best": best, "vocab": corpus.vocab, "dataset": corpus.name}
        checkpoints.save(kind, step, state, meta)

    # The loop: `pending` holds what the steps returned, on the device, until it is logged
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

            by_step = {name: np.concatenate([np.asarray(got[name])[:n] for got, n in pending])
                       for name in pending[0][0]}
            losses, norms = by_step["loss"], by_step["grad_norm"]
            seconds = time.perf_counter() - began_steps
            finite = np.isfinite(losses) & np.isfinite(norms)
            if not finite.all():
                bad = int(np.argmin(finite))
                stop_non_finite(folder, done - len(finite) + bad,
                                f"loss {losses[bad]}, gradient norm {norms[bad]}")
            pending = []
            training_s, trained = training_s + seconds, trained + n_steps
            tokens_per_s = n_steps * cfg.batch_size * cfg.context / seconds
            routing = routing_row({name: values.mean(0) for name, values in by_step.items()})
            metrics.write(step=done, loss=float(losses.mean()), grad_norm=float(norms[-1]), lr=float(lr_at(step)),
                          ms_per_step=1e3 * seconds / n_steps, tokens_per_s=tokens_per_s, dataset=corpus.name,
                          **routing)
            dropped = f"dropped {routing['dropped']:5.1%} | " if routing else ""
            bar.write(f"step {done:5d} | loss {losses.mean():.4f} | {1e3 * seconds / n_steps:7.1f} ms/step | "
                      f"{tokens_per_s:8,.0f} tokens/s | {dropped}{corpus.name}")

            if evaluating or stopping:
                val_loss, val_aux = evaluate(state["params"], fixed_val, eval_shape, model_cfg, grouped_matmul)
                if not math.isfinite(val_loss):  # this step's update ruined what its own loss still found good
                    stop_non_finite(folder, done - 1, f"validation loss {val_loss} after it")
                val_routing = {f"eval_{name}": value for name, value in routing_row(val_aux).items()}
                metrics.write(step=done, eval_val_loss=val_loss, dataset=corpus.name, **val_routing)
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
    val_loss, aux = evaluate(state["params"], data.all_windows(corpus.val, cfg.context, IGNORE), eval_shape, model_cfg,
                             grouped_matmul)
    result = Result(
        dataset=corpus.name, steps=cfg.max_iters, seed=cfg.seed, val_loss=val_loss,
        train_loss=evaluate(state["params"], fixed_train, eval_shape, model_cfg, grouped_matmul)[0],
        params=n_params, active_params=n_active, dropped=float(aux["dropped"]),
        load_entropy=float(aux["load_entropy"]), tokens_per_s=trained * cfg.batch_size * cfg.context / training_s,
        compile_s=compile_s, wall_s=time.perf_counter() - began, provenance=made_with)
    run.write_json(folder / "result.json", dataclasses.asdict(result))
    run.plot(folder, metrics.read(), {"train": "loss", "validation": "eval_val_loss"}, "loss (nats a character)")
    routed = (f"dropped {result.dropped:.1%}, load entropy {result.load_entropy:.3f} of {math.log(cfg.n_experts):.3f}, "
              if cfg.n_experts else "")
    print(f"{corpus.name}: {result.steps} steps, val_loss {result.val_loss:.4f} on {len(corpus.val):,} characters, "
          f"train_loss {result.train_loss:.4f}, {routed}{result.tokens_per_s:,.0f} tokens/s, compiled in "
          f"{compile_s:.1f} s, {result.wall_s:.1f} s in all -> {folder}")
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
    """argv -> Config. --preset and --resume choose the defaults of the other flags, so are read first."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default="moe")
    first.add_argument("--resume", action="store_true")
    first.add_argument("--out-dir", "--out_dir", default="")
    early, _ = first.parse_known_args(argv)
    if early.preset not in PRESETS:
        run.fail(f"--preset {early.preset!r} is not one of {', '.join(PRESETS)}")
    resumed, default = None, PRESETS[early.preset]
    if early.resume:
        folder = early.out_dir or run.newest_run()
        if folder is None:
            run.fail("--resume: there is no run under out/ yet; train first, or name one with --out-dir")
        resumed = run.load_config(folder, Config)
        default = dataclasses.replace(resumed, out_dir=str(folder), resume=True)
    cfg = tyro.cli(Config, default=default, args=argv, description=__doc__)
    for name, value in dataclasses.asdict(resumed).items() if resumed else ():
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
