"""Trains a small residual network with batch norm on 32 x 32 colour images, parameters and statistics apart.

    python train.py                        # CIFAR-10 where TFDS has it, else drawn shapes; at most five minutes
    python train.py --preset long          # 25 minutes of CIFAR-10
    python train.py --max-iters 100        # a first look
    python train.py --resume               # go on with the newest run

Legend: B batch, n examples, H height, W width, V classes. README.md has the expected accuracies and times.
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
import model
import run

NORMS = (model.batch_norm_relu, model.batch_norm_relu_inference)
ITERS = {"cpu": {"cifar10": 800, "shapes": 300}, "long": {"cifar10": 3900, "shapes": 300}}  # max_iters by preset


@dataclass(frozen=True)
class Config:
    preset: str = "cpu"  # cpu (five minutes) or long (25): sets the defaults of the other flags
    dataset: str = "auto"  # auto, cifar10 or shapes
    data_dir: str = ""  # a prepared TFDS folder; else TFDS_DATA_DIR, else ~/tensorflow_datasets
    out_dir: str = ""  # the run's folder; default: a new one under out/
    resume: bool = False  # continue the run in out_dir (default: the newest) with the flags it was started with
    seed: int = 0  # of the initial parameters, the order of the examples and the augmentation
    width: int = 32  # channels of the first layer, even; the others have 1.5, 3 and 6 times as many
    dtype: str = "float32"  # to compute in: float32 or bfloat16; parameters and statistics stay float32
    norm: str = "reference"  # batch norm with ReLU: reference (XLA) or pallas (kernels.py)
    batch_size: int = 128  # examples a step
    max_iters: int | None = None  # steps; default: 800 on cifar10 (long: 3900), 300 on shapes
    lr_decay_iters: int | None = None  # steps of the learning rate's cycle; default: max_iters
    lr: float = 0.2  # learning rate at its peak
    warmup: float = 0.2  # share of the cycle in which the learning rate rises
    momentum: float = 0.9  # share of the velocity that a step keeps (Nesterov's form)
    weight_decay: float = 5e-4  # added to the gradient, times the weight; scales and biases don't decay
    label_smoothing: float = 0.1  # share of the target that is spread over all classes
    augment: bool = True  # random crops and mirroring
    cutout: int = 0  # side of the square blanked in each augmented image; 0 for none
    eval_interval: int = 400  # steps between evaluations (and checkpoints)
    log_interval: int = 50  # steps between log lines
    profile: str = ""  # write a jax.profiler trace of five steps to this folder

    def __post_init__(self):
        for name in ("width", "batch_size", "steps", "decay_iters", "eval_interval", "log_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.width % 2:
            raise ValueError(f"width={self.width} must be even: the second layer has 1.5 times as many channels")
        if not self.lr > 0:
            raise ValueError(f"lr={self.lr} must be positive")
        for name in ("warmup", "momentum", "weight_decay", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0 and below 1")
        if not 0 <= self.cutout <= 32:
            raise ValueError(f"cutout={self.cutout} must be between 0 and 32, the side of an image")
        if self.cutout and not self.augment:
            raise ValueError(f"cutout={self.cutout} with augment=False: pass --cutout 0, or leave augmentation on")
        for name, known in (("dtype", ("float32", "bfloat16")), ("norm", ("reference", "pallas"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(known)}")

    @property
    def steps(self):
        return ITERS["cpu"]["cifar10"] if self.max_iters is None else self.max_iters

    @property
    def decay_iters(self):
        return self.steps if self.lr_decay_iters is None else self.lr_decay_iters

    @property
    def widths(self):
        return tuple(round(self.width * times) for times in (1, 1.5, 3, 6))


CPU = Config()
PRESETS = {"cpu": CPU, "long": dataclasses.replace(CPU, preset="long", cutout=4, eval_interval=800)}
# What a resumed run may change: how long it runs and what it reports, never what it computes.
FREE_ON_RESUME = {"out_dir", "data_dir", "resume", "max_iters", "eval_interval", "log_interval", "profile"}


# Optimiser and step ----------------------------------------------------------------------

def schedule(step, cfg):
    """Learning rate of a step: one cycle (Smith and Topin 2019), a line from lr / 10 up to lr, then one down to
    lr / 100 at step decay_iters, where it stays."""
    return cfg.lr * jnp.interp(step, jnp.array([0, cfg.warmup * cfg.decay_iters, cfg.decay_iters]),
                               jnp.array([0.1, 1, 0.01]))


def optimizer(cfg):
    """Gradient -> direction, of which a step takes schedule(step, cfg): weight decay on the weights of convolutions
    and head, then Nesterov's momentum in PyTorch's form. The learning rate stays outside, so that nothing but the
    velocity is carried from step to step."""
    return optax.chain(optax.add_decayed_weights(cfg.weight_decay, partial(jax.tree.map, lambda p: p.ndim > 1)),
                       optax.trace(cfg.momentum, nesterov=True))


@partial(jax.jit, static_argnames="cfg")
def init_state(cfg):
    """{"params", "stats", "opt"}: all that training carries besides the step number."""
    params = model.init_params(purpose_keys(cfg.seed)["init"], cfg.widths)
    return {"params": params, "stats": model.init_stats(cfg.widths), "opt": optimizer(cfg).init(params)}


def purpose_keys(seed):
    return dict(zip(("init", "order", "augment"), jax.random.split(jax.random.key(seed), 3)))


def norms_of(cfg):
    """Batch norm with ReLU as cfg asks for it, for training and for evaluation: model.py's or the Pallas kernels."""
    if cfg.norm == "reference":
        return NORMS
    import kernels  # only here: the reference path needs neither Pallas nor common/
    return kernels.batch_norm_relu, kernels.batch_norm_relu_inference


def loss_of(params, stats, images, labels, cfg):
    """(loss, (new stats, logits)) as cfg asks for it. images: normalised floats (B, H, W, 3), computed on in
    cfg.dtype; the weights are cast layer by layer, as part of what is differentiated, so gradients are float32."""
    return model.loss_fn(params, stats, images.astype(cfg.dtype), labels, cfg.label_smoothing, norms=norms_of(cfg))


def update(state, images, labels, step, cfg, key=None):
    """One step of SGD. images: uint8 (B, H, W, 3), or floats that are normalised already; key: of the augmentation
    of all steps, None to take the images as they are. Returns (state, loss, how many of the B are classified right).

    The statistics are carried like the parameters, but without a gradient: the forward pass has moved them."""
    if key is not None:
        images = data.augment(jax.random.fold_in(key, step), images, cutout=cfg.cutout)
    if images.dtype == jnp.uint8:
        images = data.normalise(images)
    gradient = jax.value_and_grad(loss_of, has_aux=True)
    (loss, (stats, logits)), grads = gradient(state["params"], state["stats"], images, labels, cfg)
    directions, opt = optimizer(cfg).update(grads, state["opt"], state["params"])
    lr = schedule(step, cfg)
    params = jax.tree.map(lambda p, d: p - lr * d, state["params"], directions)
    return {"params": params, "stats": stats, "opt": opt}, loss, (logits.argmax(1) == labels).sum()


@partial(jax.jit, static_argnames="cfg", donate_argnames="state")
def train_step(state, images, labels, step, cfg, key=None):
    """update, jitted; the state's buffers are given away, so that the new one is written over the old one.

    One step a dispatch: in a lax.scan over steps, XLA:CPU loses its fast convolutions."""
    return update(state, images, labels, step, cfg, key)


def epoch_order(epoch, n, cfg):
    """Which examples the steps of an epoch see: (n // B, B) indices without repetition, a pure function of
    (seed, epoch), so that there is nothing to save and nothing to replay. n % B examples sit this epoch out."""
    steps = n // cfg.batch_size
    order = jax.random.permutation(jax.random.fold_in(purpose_keys(cfg.seed)["order"], epoch), n)
    return np.asarray(order[:steps * cfg.batch_size].reshape(steps, cfg.batch_size))


# Evaluation ------------------------------------------------------------------------------

@partial(jax.jit, static_argnames="norms")
def predict(params, stats, images, norms=NORMS):
    """Logits (B, V) by the running statistics, each image for itself. images: uint8 or normalised floats
    (B, H, W, 3)."""
    images = data.normalise(images) if images.dtype == jnp.uint8 else images
    return model.forward(params, stats, images, False, norms=norms)[0]


def evaluate(params, stats, images, labels, batch_size, norms=NORMS):
    """(accuracy, counted): every example counts once, whatever the batch size.

    images: uint8 or normalised floats (n, H, W, 3); labels: (n,). The last batch is filled up with blank images,
    which aren't counted and, as statistics are given, touch no other image; so one compiled program serves all.
    Raises: ValueError without an example.
    """
    if not len(labels):
        raise ValueError("evaluate needs at least one example")
    right = counted = 0
    for first in range(0, len(labels), batch_size):
        part, want = (np.asarray(a[first:first + batch_size]) for a in (images, labels))
        filled = np.pad(part, [(0, batch_size - len(part)), (0, 0), (0, 0), (0, 0)])
        guess = np.asarray(predict(params, stats, filled, norms)).argmax(1)[:len(part)]
        right, counted = right + int((guess == want).sum()), counted + len(part)
    return right / counted, counted


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
    train_loss: float  # mean of the steps since the last log line but one, augmented and smoothed, in nats
    params: int
    examples_per_s: float  # of training alone, after compilation
    training_s: float
    compile_s: float
    wall_s: float
    provenance: dict


def train(cfg):
    """Runs the training described by cfg and returns its Result. Raises FloatingPointError, naming the step, when
    the loss, a parameter or a statistic is no longer finite; returns None when a signal stopped the run (its state
    is saved)."""
    began = time.perf_counter()
    run.prepare_host()
    check_norm(cfg)
    try:
        images = data.load(cfg.dataset, cfg.data_dir)
        n = len(images.train_labels)
        if n < cfg.batch_size:
            raise ValueError(f"batch_size={cfg.batch_size} exceeds the {n} training examples of {images.name}: "
                             "use a smaller --batch-size")
    except ValueError as why:
        run.fail(why)
    if cfg.max_iters is None:
        cfg = dataclasses.replace(cfg, max_iters=ITERS[cfg.preset][images.name])
    made_with = run.provenance()
    print(f"jax {made_with['jax']}, {made_with['backend']} ({made_with['device']}), dataset {images.name}: "
          f"{images.source}; {n:,} + {len(images.test_labels):,} images")

    # Set up: state, from a checkpoint or from the seed
    state, first = init_state(cfg), 0
    folder = Path(cfg.out_dir) if cfg.resume else run.new_run(cfg.out_dir, f"{cfg.preset}-{images.name}-s{cfg.seed}")
    checkpoints = run.Checkpoints(folder)
    if cfg.resume:
        restored = checkpoints.restore("latest", state)
        if restored is None:
            run.fail(f"{folder} holds no checkpoint to resume from: start it anew in another folder")
        state, meta = restored
        first = meta["step"]
        if meta["dataset"] != images.name:
            run.fail(f"{folder} was trained on {meta['dataset']}, not on {images.name}: pass --data-dir of the former")
        print(f"resuming {folder} at step {first}")
    if first >= cfg.max_iters and cfg.resume:
        run.fail(f"{folder} is at step {first} already: pass --max-iters above it")
    if cfg.profile and first + Profiler.LAST >= cfg.max_iters:
        run.fail(f"--profile traces the steps up to {first + Profiler.LAST}, but the run ends at {cfg.max_iters}: pass "
                 "a larger --max-iters")
    profiler = Profiler(cfg.profile, first)
    run.save_config(folder, dataclasses.replace(cfg, resume=False, out_dir="", profile=""))
    metrics = run.Metrics(folder, first)
    n_params, epoch_steps = model.count_params(state["params"]), n // cfg.batch_size
    print(f"{n_params:,} parameters, {cfg.max_iters} steps of {cfg.batch_size} images, {epoch_steps} an epoch, "
          f"run folder {folder}")

    key, norms = purpose_keys(cfg.seed)["augment"] if cfg.augment else None, norms_of(cfg)
    compile_began = time.perf_counter()
    batch = images.train_images[:cfg.batch_size], images.train_labels[:cfg.batch_size]
    step_fn = train_step.lower(state, *batch, jnp.int32(0), cfg, key).compile()
    predict(state["params"], state["stats"], batch[0], norms).block_until_ready()
    compile_s = time.perf_counter() - compile_began

    # The loop: each step is waited for, which costs it nothing, so that a signal is seen before the next one
    losses, right, training_s = [], 0, 0.0
    with run.Stop() as stop, tqdm(total=cfg.max_iters, initial=first, disable=None, unit="step", leave=False) as bar:
        for step in range(first, cfg.max_iters):
            epoch, i = divmod(step, epoch_steps)
            if i == 0 or step == first:
                order = epoch_order(epoch, n, cfg)
            began_step = time.perf_counter()
            with profiler.step(step):
                state, loss, correct = step_fn(state, images.train_images[order[i]], images.train_labels[order[i]],
                                               jnp.int32(step), key)
                losses.append(float(loss))
            training_s += time.perf_counter() - began_step
            right += int(correct)
            done = step + 1
            bar.update()
            if not math.isfinite(losses[-1]):
                stop_non_finite(folder, step, f"loss {losses[-1]}")
            stopping = stop.requested or done == cfg.max_iters
            evaluating = done % cfg.eval_interval == 0 or stopping
            if not evaluating and done % cfg.log_interval:
                continue

            train_loss, seconds_a_step = float(np.mean(losses)), training_s / (done - first)
            row = {"step": done, "loss": train_loss, "losses": [round(loss, 5) for loss in losses],
                   "train_accuracy": right / (len(losses) * cfg.batch_size), "lr": float(schedule(step, cfg)),
                   "ms_per_step": 1e3 * seconds_a_step, "examples_per_s": cfg.batch_size / seconds_a_step,
                   "dataset": images.name}
            line = (f"step {done:5d} | loss {train_loss:.4f} | train accuracy {100 * row['train_accuracy']:6.2f} % | "
                    f"{row['ms_per_step']:6.1f} ms/step | {row['examples_per_s']:7,.0f} images/s | {images.name}")
            losses, right = [], 0
            if evaluating:
                if not all_finite((state["params"], state["stats"])):  # this step ruined what its own loss found good
                    stop_non_finite(folder, step, "a parameter or statistic is not finite after it")
                accuracy, counted = evaluate(state["params"], state["stats"], images.test_images, images.test_labels,
                                             cfg.batch_size, norms)
                row["test_accuracy"] = accuracy
                line += f" | test accuracy {100 * accuracy:6.2f} %"
                checkpoints.save("latest", done, state, {"step": done, "dataset": images.name})
            metrics.write(**row)
            bar.write(line)
            sys.stdout.flush()  # a pipe would hold the lines back
            if stopping and done < cfg.max_iters:  # not a signal that came since: this step may not be saved
                checkpoints.close()
                print(f"stopped after step {done}, saved in {folder}; go on with: "
                      f"python train.py --resume --out-dir {folder}")
                return None
    checkpoints.close()

    # Report
    result = Result(
        dataset=images.name, steps=cfg.max_iters, seed=cfg.seed, test_accuracy=accuracy, test_examples=counted,
        train_loss=train_loss, params=n_params, examples_per_s=cfg.batch_size / seconds_a_step, training_s=training_s,
        compile_s=compile_s, wall_s=time.perf_counter() - began, provenance=made_with)
    run.write_json(folder / "result.json", dataclasses.asdict(result))
    run.plot(folder, metrics.read(), {"train": "loss"}, "loss (nats)")
    print(f"{images.name}: {result.steps} steps, test accuracy {100 * accuracy:.2f} % of {counted:,}, train loss "
          f"{train_loss:.4f}, {result.examples_per_s:,.0f} images/s, trained in {training_s:.1f} s, compiled in "
          f"{compile_s:.1f} s, {result.wall_s:.1f} s in all -> {folder}")
    return result


def check_norm(cfg):
    """Ends with status 2 where --norm pallas can't run; says once which path a run takes that isn't the default."""
    if cfg.norm == "reference":
        return
    sys.path.append(str(Path(__file__).resolve().parent.parent))  # for common/
    try:
        import kernels
    except ModuleNotFoundError:
        run.fail("--norm pallas needs the folder common/ beside this project's; --norm reference doesn't")
    if jax.default_backend() not in ("cpu", "tpu"):
        run.fail(f"--norm pallas is a TPU kernel and doesn't run on {jax.default_backend()}: use --norm reference")
    how = "in Pallas's interpret mode: to check it, never for speed" if kernels.interpret() else "compiled for the TPU"
    print(f"batch norm with ReLU by the Pallas kernels, {how}")


def stop_non_finite(folder, step, what):
    raise FloatingPointError(f"step {step}: {what}; the last good checkpoint in {folder} is untouched: try a smaller "
                             "--lr in a new run")


class Profiler:
    """Traces five steps of a run, once it is warm, into a folder with common.profiling; without one it does nothing."""
    FIRST, LAST = 5, 10  # counted from the run's first step

    def __init__(self, folder, first_step):
        self.folder, self.first_step, self.context = folder, first_step, None
        if folder:
            sys.path.append(str(Path(__file__).resolve().parent.parent))
            try:
                from common.profiling import trace
            except ModuleNotFoundError:
                run.fail("--profile needs the folder common/ beside this project's")
            self.trace = trace

    def step(self, step):
        if self.folder and step == self.first_step + self.FIRST:
            self.context = self.trace(self.folder)
            self.context.__enter__()
        if self.context and step == self.first_step + self.LAST:
            self.context.__exit__(None, None, None)
            self.context = None
        return jax.profiler.StepTraceAnnotation("train", step_num=step)


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
