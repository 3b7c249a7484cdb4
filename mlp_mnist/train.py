"""Trains a multi-layer perceptron on images of digits with stochastic gradient descent written by hand.

    python train.py                        # MNIST where TFDS has it, else scikit-learn's digits; half a minute
    python train.py --max-iters 500        # a first look
    python train.py --resume               # go on with the newest run
    python train.py --preset plain         # without momentum and weight decay: what do they buy?

Legend: B batch, n examples. README.md has the expected accuracies and times.
Everything of a run is in out/<run>/: config.json, metrics.jsonl, result.json, loss.svg, checkpoints.
"""
import argparse
import contextlib
import dataclasses
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from tqdm import tqdm

import data
import model
import run


@dataclass(frozen=True)
class Config:
    preset: str = "cpu"  # cpu or plain: sets the defaults of the other flags
    dataset: str = "auto"  # auto, mnist, fashion_mnist or digits
    data_dir: str = ""  # a prepared TFDS folder; else TFDS_DATA_DIR, else ~/tensorflow_datasets
    out_dir: str = ""  # the run's folder; default: a new one under out/
    resume: bool = False  # continue the run in out_dir (default: the newest) with the flags it was started with
    seed: int = 0  # of the initial parameters and the order of the examples
    hidden: int = 512  # width of the two hidden layers
    dtype: str = "float32"  # of the products: float32 or bfloat16; parameters stay float32
    linear: str = "reference"  # the hidden layers: reference (XLA) or pallas (kernels.py)
    batch_size: int = 128  # examples a step
    max_iters: int = 4680  # steps; ten epochs of MNIST
    lr_decay_iters: int | None = None  # steps until the learning rate has fallen to lr / 100; default: max_iters
    lr: float = 0.2  # learning rate at its peak
    warmup_iters: int = 100  # steps of linear warm-up
    momentum: float = 0.9  # share of the velocity that a step keeps
    weight_decay: float = 3e-4  # added to the gradient, times the parameter
    eval_interval: int = 400  # evaluate, log and save at the first end of an epoch after so many steps
    profile: str = ""  # write a jax.profiler trace of the second epoch to this folder

    def __post_init__(self):
        for name in ("hidden", "batch_size", "max_iters", "eval_interval", "decay_iters"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not self.lr > 0:
            raise ValueError(f"lr={self.lr} must be positive")
        for name in ("momentum", "weight_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0 and below 1")
        if self.warmup_iters < 0:
            raise ValueError(f"warmup_iters={self.warmup_iters} must not be negative")
        for name, known in (("dtype", ("float32", "bfloat16")), ("linear", ("reference", "pallas"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(known)}")

    @property
    def decay_iters(self):
        return self.max_iters if self.lr_decay_iters is None else self.lr_decay_iters

    @property
    def sizes(self):
        return (model.SIZES[0], self.hidden, self.hidden, model.SIZES[-1])


CPU = Config()
PRESETS = {"cpu": CPU, "plain": dataclasses.replace(CPU, preset="plain", momentum=0.0, weight_decay=0.0)}
# What a resumed run may change: how long it runs and what it reports, never what it computes.
FREE_ON_RESUME = {"out_dir", "data_dir", "resume", "max_iters", "eval_interval", "profile"}


# Optimiser and step ----------------------------------------------------------------------

def schedule(step, cfg):
    """Learning rate of a step: linear warm-up, then a cosine from lr to lr / 100 at step decay_iters."""
    warm = jnp.minimum(1, (step + 1) / max(1, cfg.warmup_iters))
    fall = (1 + jnp.cos(jnp.pi * jnp.minimum(step / cfg.decay_iters, 1))) / 2
    return cfg.lr * warm * (0.01 + 0.99 * fall)


@partial(jax.jit, static_argnames="cfg")
def init_state(cfg):
    """{"params", "velocity"}: all that training carries besides the step number."""
    params = model.init_params(purpose_keys(cfg.seed)["init"], cfg.sizes)
    return {"params": params, "velocity": jax.tree.map(jnp.zeros_like, params)}


def purpose_keys(seed):
    return dict(zip(("init", "order"), jax.random.split(jax.random.key(seed))))


def sgd(state, grads, lr, momentum, weight_decay):
    """Stochastic gradient descent with momentum (Polyak 1964, in PyTorch's form): for each leaf
    v <- momentum v + (g + weight_decay p),  p <- p - lr v.  Returns the new state."""
    velocity = jax.tree.map(lambda v, g, p: momentum * v + g + weight_decay * p,
                            state["velocity"], grads, state["params"])
    return {"params": jax.tree.map(lambda p, v: p - lr * v, state["params"], velocity), "velocity": velocity}


def loss_of(params, images, labels, cfg):
    """model.loss_fn as cfg asks for it: hidden layers by XLA or by the Pallas kernel, products in cfg.dtype.

    The cast is part of what is differentiated, so gradients come back in float32."""
    linear_relu = model.linear_relu
    if cfg.linear == "pallas":
        import kernels  # only here: the reference path needs neither Pallas nor common/
        linear_relu = kernels.linear_relu
    params, images = jax.tree.map(lambda a: a.astype(cfg.dtype), (params, images))
    return model.loss_fn(params, images, labels, partial(model.forward, linear_relu=linear_relu))


def update(state, images, labels, lr, cfg):
    """One step of SGD. images: (B, 784) float in [0, 1], or uint8 (B, 28, 28). Returns (state, loss)."""
    if images.dtype == jnp.uint8:
        images = data.flatten(images)
    loss, grads = jax.value_and_grad(loss_of)(state["params"], images, labels, cfg)
    return sgd(state, grads, lr, cfg.momentum, cfg.weight_decay), loss


@partial(jax.jit, static_argnames="cfg", donate_argnames="state")
def train_step(state, images, labels, lr, cfg):
    """update, jitted; the state's buffers are given away, so that the new one is written over the old one."""
    return update(state, images, labels, lr, cfg)


def epoch_order(epoch, n, cfg):
    """Which examples the steps of an epoch see: (n // B, B) indices without repetition, a pure function of
    (seed, epoch), so that there is nothing to save and nothing to replay. n % B examples sit this epoch out."""
    steps = n // cfg.batch_size
    order = jax.random.permutation(jax.random.fold_in(purpose_keys(cfg.seed)["order"], epoch), n)
    return order[:steps * cfg.batch_size].reshape(steps, cfg.batch_size)


@partial(jax.jit, static_argnames=("cfg", "first", "last"), donate_argnames="state")
def train_epoch(state, images, labels, epoch, cfg, first=0, last=None):
    """A whole epoch, or its steps [first, last), in one dispatch. images: all n of them, on the device, uint8
    (n, 28, 28) or float (n, 784); epoch: int32 scalar. Returns (state, losses (steps,))."""
    order = epoch_order(epoch, len(images), cfg)
    steps = jnp.arange(len(order)) + epoch * len(order)

    def body(state, at):
        step, batch = at
        return update(state, images[batch], labels[batch], schedule(step, cfg), cfg)
    return jax.lax.scan(body, state, (steps[first:last], order[first:last]))


# Evaluation ------------------------------------------------------------------------------

@jax.jit
def count_over_batches(params, images, labels):
    """(right, counted) over m batches: images uint8 (m, B, 28, 28) or float (m, B, 784), labels (m, B)."""
    def body(total, batch):
        images, labels = batch
        images = data.flatten(images) if images.dtype == jnp.uint8 else images
        right = model.count_correct(params, images, labels)
        return (total[0] + right, total[1] + (labels >= 0).sum()), None
    return jax.lax.scan(body, (jnp.int32(0), jnp.int32(0)), (images, labels))[0]


def evaluate(params, images, labels, batch_size):
    """(accuracy, counted): every example counts once, whatever the batch size.

    images: uint8 (n, 28, 28) or float (n, 784); labels: (n,). The last batch is filled up with examples labelled
    -1, which don't count; a mean of the batches' accuracies would weigh a short batch like a full one.
    Raises: ValueError without an example.
    """
    if not len(labels):
        raise ValueError("evaluate needs at least one example")
    short = -len(labels) % batch_size
    images = jnp.pad(images, [(0, short)] + [(0, 0)] * (images.ndim - 1))
    labels = jnp.pad(labels, (0, short), constant_values=-1)
    right, counted = count_over_batches(params, images.reshape(-1, batch_size, *images.shape[1:]),
                                        labels.reshape(-1, batch_size))
    return int(right) / int(counted), int(counted)


@jax.jit
def all_finite(tree):
    return jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]))


# The run ---------------------------------------------------------------------------------

@dataclass(frozen=True)
class Result:
    dataset: str
    steps: int
    seed: int
    test_accuracy: float  # share of test_examples
    test_examples: int
    train_loss: float  # mean of the steps since the last but one evaluation, in nats
    params: int
    examples_per_s: float  # of training alone, after compilation
    training_s: float
    compile_s: float
    wall_s: float
    provenance: dict


def pieces(first, last, epoch_steps):
    """The steps [first, last) cut at the ends of epochs: (epoch, its first step, its last step + 1), in order."""
    while first < last:
        epoch, begin = divmod(first, epoch_steps)
        end = min(epoch_steps, begin + last - first)
        yield epoch, begin, end
        first += end - begin


def train(cfg):
    """Runs the training described by cfg and returns its Result. Raises FloatingPointError, naming the step, when
    the loss or a parameter is no longer finite; returns None when a signal stopped the run (its state is saved)."""
    began = time.perf_counter()
    run.prepare_host()
    check_linear(cfg)
    try:
        digits = data.load(cfg.dataset, cfg.data_dir)
        n = len(digits.train_labels)
        if n < cfg.batch_size:
            raise ValueError(f"batch_size={cfg.batch_size} exceeds the {n} training examples of {digits.name}: "
                             "use a smaller --batch-size")
    except ValueError as why:
        run.fail(why)
    made_with = run.provenance()
    print(f"jax {made_with['jax']}, {made_with['backend']} ({made_with['device']}), dataset {digits.name}: "
          f"{digits.source}; {n:,} + {len(digits.test_labels):,} images")

    # Set up: state, from a checkpoint or from the seed
    state, first = init_state(cfg), 0
    folder = Path(cfg.out_dir) if cfg.resume else run.new_run(cfg.out_dir, f"{cfg.preset}-{digits.name}-s{cfg.seed}")
    checkpoints = run.Checkpoints(folder)
    if cfg.resume:
        restored = checkpoints.restore("latest", state)
        if restored is None:
            run.fail(f"{folder} holds no checkpoint to resume from: start it anew in another folder")
        state, meta = restored
        first = meta["step"]
        if meta["dataset"] != digits.name:
            run.fail(f"{folder} was trained on {meta['dataset']}, not on {digits.name}: pass --data-dir of the former")
        print(f"resuming {folder} at step {first}")
    if first >= cfg.max_iters and cfg.resume:
        run.fail(f"{folder} is at step {first} already: pass --max-iters above it")
    plan = list(pieces(first, cfg.max_iters, n // cfg.batch_size))
    if cfg.profile and len(plan) < 2:
        run.fail(f"--profile traces the second epoch, but steps {first} to {cfg.max_iters} end in the first, which "
                 f"has {n // cfg.batch_size} steps: pass a larger --max-iters")
    profiler = Profiler(cfg.profile)
    run.save_config(folder, dataclasses.replace(cfg, resume=False, out_dir="", profile=""))
    metrics = run.Metrics(folder, first)
    n_params = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    print(f"{n_params:,} parameters, {n // cfg.batch_size} steps of {cfg.batch_size} images an epoch, "
          f"run folder {folder}")

    train_set, test_set = ([jnp.asarray(a) for a in pair] for pair in (
        (digits.train_images, digits.train_labels), (digits.test_images, digits.test_labels)))
    compile_began = time.perf_counter()
    programs = {(a, b): train_epoch.lower(state, *train_set, jnp.int32(0), cfg, first=a, last=b).compile()
                for a, b in {piece[1:] for piece in plan}}  # each program once
    compile_s = time.perf_counter() - compile_began

    # The loop: a piece is the rest of an epoch; `pending` holds the losses until they are logged
    pending, training_s, done = [], 0.0, first
    with run.Stop() as stop, tqdm(total=cfg.max_iters, initial=first, disable=None, unit="step", leave=False) as bar:
        for i, (epoch, a, b) in enumerate(plan):
            with profiler.piece(i):
                began_piece = time.perf_counter()
                state, losses = programs[a, b](state, *train_set, jnp.int32(epoch))
                pending.append(np.asarray(losses))  # waits for the piece, so that a signal is seen before the next
            training_s += time.perf_counter() - began_piece
            done += b - a
            bar.update(b - a)
            stopping = stop.requested or done == cfg.max_iters
            if not stopping and (b < n // cfg.batch_size or sum(map(len, pending)) < cfg.eval_interval):
                continue

            losses, pending = np.concatenate(pending), []
            if not np.isfinite(losses).all():
                bad = int(np.argmin(np.isfinite(losses)))
                stop_non_finite(folder, done - len(losses) + bad, f"loss {losses[bad]}")
            if not all_finite(state["params"]):  # the last update ruined what its own loss still found good
                stop_non_finite(folder, done - 1, "a parameter is not finite after it")
            train_loss = float(losses.mean())
            seconds_a_step = training_s / (done - first)
            accuracy, counted = evaluate(state["params"], *test_set, cfg.batch_size)
            metrics.write(step=done, loss=train_loss, losses=[round(float(x), 5) for x in losses],
                          lr=float(schedule(done - 1, cfg)), ms_per_step=1e3 * seconds_a_step,
                          examples_per_s=cfg.batch_size / seconds_a_step, test_accuracy=accuracy, dataset=digits.name)
            bar.write(f"step {done:5d} | loss {train_loss:.4f} | test accuracy {100 * accuracy:6.2f} % | "
                      f"{1e3 * seconds_a_step:6.2f} ms/step | {cfg.batch_size / seconds_a_step:9,.0f} images/s | "
                      f"{digits.name}")
            sys.stdout.flush()  # a pipe would hold the lines back
            checkpoints.save("latest", done, state, {"step": done, "dataset": digits.name})
            if stop.requested and done < cfg.max_iters:
                checkpoints.close()
                print(f"stopped after step {done}, saved in {folder}; go on with: "
                      f"python train.py --resume --out-dir {folder}")
                return None
    checkpoints.close()

    # Report
    result = Result(
        dataset=digits.name, steps=cfg.max_iters, seed=cfg.seed, test_accuracy=accuracy, test_examples=counted,
        train_loss=train_loss, params=n_params, examples_per_s=cfg.batch_size / seconds_a_step, training_s=training_s,
        compile_s=compile_s, wall_s=time.perf_counter() - began, provenance=made_with)
    run.write_json(folder / "result.json", dataclasses.asdict(result))
    run.plot(folder, metrics.read(), {"train": "loss"}, "loss (nats)")
    print(f"{digits.name}: {result.steps} steps, test accuracy {100 * accuracy:.2f} % of {counted:,}, train loss "
          f"{train_loss:.4f}, {result.examples_per_s:,.0f} images/s, trained in {training_s:.1f} s, compiled in "
          f"{compile_s:.1f} s, {result.wall_s:.1f} s in all -> {folder}")
    return result


def check_linear(cfg):
    """Ends with status 2 where --linear pallas can't run; says once which path a run takes that isn't the default."""
    if cfg.linear == "reference":
        return
    sys.path.append(str(Path(__file__).resolve().parent.parent))  # for common/
    try:
        import kernels
    except ModuleNotFoundError:
        run.fail("--linear pallas needs the folder common/ beside this project's; --linear reference doesn't")
    if jax.default_backend() not in ("cpu", "tpu"):
        run.fail(f"--linear pallas is a TPU kernel and doesn't run on {jax.default_backend()}: use --linear reference")
    how = "in Pallas's interpret mode: to check it, never for speed" if kernels.interpret() else "compiled for the TPU"
    print(f"hidden layers by the Pallas kernel, {how}")


def stop_non_finite(folder, step, what):
    raise FloatingPointError(f"step {step}: {what}; the last good checkpoint in {folder} is untouched: try a smaller "
                             "--lr in a new run")


class Profiler:
    """Traces the second piece of a run into a folder with common.profiling; without a folder it does nothing."""

    def __init__(self, folder):
        self.folder = folder
        if folder:
            sys.path.append(str(Path(__file__).resolve().parent.parent))
            try:
                from common.profiling import trace
            except ModuleNotFoundError:
                run.fail("--profile needs the folder common/ beside this project's")
            self.trace = trace

    def piece(self, i):
        return self.trace(self.folder) if self.folder and i == 1 else contextlib.nullcontext()


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
