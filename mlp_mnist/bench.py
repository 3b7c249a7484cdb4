"""Profiles mlp_mnist, and measures it beside the same network in PyTorch on the same machine in the same run.

    python bench.py             # results/bench.json, figures/, the tables of README.md; about 5 minutes
    python bench.py --quick     # the same rows from fewer rounds, to out/bench-quick.json; 2 minutes
    python bench.py --accuracy  # three full runs of train.py on MNIST and three on digits: results/accuracy.json
    python bench.py --kernels   # what libtpu predicts for the Pallas kernels, and their bytes: results/kernels.json
    python bench.py --readme    # only draws the figures and writes the tables of README.md anew from results/

Legend: B batch, I, O inputs and outputs of a layer. Speed is a ratio of medians of interleaved runs (A B A B ...):
PyTorch and JAX each in a process of its own with the same malloc settings, variants of the JAX program in one.
Close other programs first: the load average stands in the result.
"""
import argparse
import dataclasses
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))  # for common/

import data
import model
import run
import train
from common import pallas, profiling

CFG = train.CPU
STEPS = 100  # of an epoch of the benchmark's random images
SEEDS = (0, 1, 2)


def random_images(n=STEPS * CFG.batch_size):
    """(images uint8 (n, 28, 28), labels int32 (n,)): what a step costs doesn't depend on what they show."""
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (n, 28, 28), np.uint8), rng.integers(0, 10, n).astype(np.int32)


# Workers: one process a side -------------------------------------------------------------

def worker(spec):
    """spec: {"side", "seconds"} and what a side may add; sets up, then serves measured runs."""
    run.prepare_host()
    {"jax": serve_jax, "torch": serve_torch, "variants": serve_variants}[spec["side"]](spec)


def serve_epochs(epoch, seconds):
    """Serves runs of about `seconds` of whole epochs, after one that doesn't count: a process that waited for its
    turn comes back to cold caches."""
    epoch()
    began = time.perf_counter()
    epoch()
    n = max(1, round(seconds / (time.perf_counter() - began)))

    def once():
        epoch()
        began = time.perf_counter()
        for _ in range(n):
            epoch()
        return {"steps_per_s": n * STEPS / (time.perf_counter() - began)}
    profiling.serve(once)


def serve_jax(spec):
    cfg = dataclasses.replace(CFG, dtype=spec["dtype"])
    make = {"scanned epoch": scanned, "step by step": stepping}[spec["form"]]
    serve_epochs(make(cfg), spec["seconds"])


def serve_torch(spec):
    """PyTorch's own best case: float32 images ready in memory, cut by an index tensor."""
    import torch
    import torch_twin
    images, labels = random_images()
    images, labels = torch.from_numpy(data.flatten(images)), torch.from_numpy(labels).long()
    params = jax.tree.map(lambda a: torch.from_numpy(np.array(a)), model.init_params(jax.random.key(0)))
    network = torch_twin.mlp(params)
    optimizer = torch_twin.sgd(network, CFG.lr, CFG.momentum, CFG.weight_decay)
    if spec.get("compiled"):
        network = torch.compile(network)
    lr = np.asarray(jax.vmap(partial(train.schedule, cfg=CFG))(jnp.arange(STEPS))).tolist()

    def epoch():
        for step, at in enumerate(torch.randperm(len(images)).reshape(STEPS, -1)):
            loss = torch_twin.train_step(network, optimizer, images[at], labels[at], lr[step],
                                         spec["dtype"] == "bfloat16")
        loss.item()
    serve_epochs(epoch, spec["seconds"])


# Variants of the JAX program -------------------------------------------------------------
# Each builder takes a Config and returns a function that runs STEPS steps and waits for them.

def scanned(cfg):
    """train.py's own form: one dispatch an epoch."""
    images, labels = map(jnp.asarray, random_images())
    box = [train.init_state(cfg), 0]

    def epoch():
        box[0], losses = train.train_epoch(box[0], images, labels, jnp.int32(box[1]), cfg)
        box[1] += 1
        losses.block_until_ready()
    return epoch


def stepping(cfg, forward=model.forward, donate=True, host=False, fetch=False):
    """One dispatch a step. host: batches are cut and scaled with NumPy and handed over; fetch: the loss is read after
    each step."""
    arrays = random_images()
    images, labels = arrays if host else map(jnp.asarray, arrays)
    order = train.epoch_order(0, len(labels), cfg)
    order = np.asarray(order) if host else order

    def update(state, images, labels, step):
        loss, grads = jax.value_and_grad(partial(model.loss_fn, forward=forward))(state["params"], images, labels)
        return train.sgd(state, grads, train.schedule(step, cfg), cfg.momentum, cfg.weight_decay), loss

    def cut(state, images, labels, order, step):
        return update(state, data.flatten(images[order[step]]), labels[order[step]], step)
    jitted = jax.jit(update if host else cut, donate_argnums=0 if donate else ())
    steps, box = [jnp.int32(i) for i in range(STEPS)], [train.init_state(cfg)]

    def epoch():
        for i, step in enumerate(steps):
            if host:
                box[0], loss = jitted(box[0], data.flatten(images[order[i]]), labels[order[i]], step)
            else:
                box[0], loss = jitted(box[0], images, labels, order, step)
            if fetch:
                float(loss)
        loss.block_until_ready()
    return epoch


VARIANTS = {"scanned epoch": scanned, "step by step": stepping,
            "step by step, vmap form": partial(stepping, forward=model.forward_vmap),
            "step by step, state not donated": partial(stepping, donate=False),
            "step by step, batches from the host": partial(stepping, host=True),
            "step by step, loss read each step": partial(stepping, fetch=True),
            "scanned epoch, bfloat16": lambda cfg: scanned(dataclasses.replace(cfg, dtype="bfloat16"))}
PAIRS = [("scanned epoch", "step by step"), ("step by step", "step by step, vmap form"),
         ("step by step", "step by step, state not donated"), ("step by step", "step by step, batches from the host"),
         ("step by step", "step by step, loss read each step"), ("scanned epoch, bfloat16", "scanned epoch")]


def serve_variants(spec):
    """All variants live in one process and take turns: far steadier than processes that wait for each other. Serves
    {variant: ms a step} and {"A / B": median over the turns of B's time by A's}."""
    epochs = {name: make(CFG) for name, make in VARIANTS.items()}
    ms = {name: [] for name in epochs}
    for _ in range(spec["turns"] + 1):  # the first turn compiles
        for name, epoch in epochs.items():
            began = time.perf_counter()
            epoch()
            ms[name].append(1e3 * (time.perf_counter() - began) / STEPS)
    result = {name: statistics.median(times[1:]) for name, times in ms.items()}
    result |= {f"{a} / {b}": statistics.median(y / x for x, y in zip(ms[a][1:], ms[b][1:])) for a, b in PAIRS}
    profiling.serve(lambda: result)


def compare(specs, rounds, seconds):
    commands = {name: [sys.executable, str(HERE / "bench.py"), "--worker", json.dumps({"seconds": seconds, **spec})]
                for name, spec in specs.items()}
    return profiling.compare(commands, rounds=rounds)


# Rows ------------------------------------------------------------------------------------

def row(name, metric, value, unit, baseline=None, ratio=None, predicted=False):
    """One row of the results; ratio > 1 means better than the baseline."""
    print(f"{name:44} {metric:22} {value:12,.4g} {unit:8}" + (f" {ratio:.2f}x {baseline}" if ratio else ""), flush=True)
    return {"name": name, "metric": metric, "value": value, "unit": unit, "baseline": baseline, "ratio": ratio,
            "predicted": predicted}


def torch_rows(rounds, seconds):
    rows = []
    for dtype in ("float32", "bfloat16"):
        specs = {"JAX, scanned epoch": {"side": "jax", "form": "scanned epoch"},
                 "JAX, step by step": {"side": "jax", "form": "step by step"},
                 "torch eager": {"side": "torch"}, "torch.compile": {"side": "torch", "compiled": True}}
        if dtype == "bfloat16":
            specs = {name: specs[name] for name in ("JAX, scanned epoch", "torch eager")}
        got = compare({name: {**spec, "dtype": dtype} for name, spec in specs.items()}, rounds, seconds)
        for name in specs:
            s = got["sides"][name]["steps_per_s"]
            rows.append(row(f"{dtype}: {name}", "steps_per_s", s["median"], "steps/s"))
            rows[-1].update(min=s["min"], max=s["max"], rounds=rounds, load=got["load_before"])
        for ours in (name for name in specs if "JAX" in name):
            for theirs in (name for name in specs if "torch" in name):
                ratio = profiling.ratio(got, "steps_per_s", ours, theirs)
                rows.append(row(f"{dtype}: {ours}", "ratio", ratio, "x", f"{dtype}: {theirs}", ratio))
    return rows


def variant_rows(turns):
    taken = compare({"it": {"side": "variants", "turns": turns}}, 1, 0)["sides"]["it"]
    got = {name: s["median"] for name, s in taken.items()}
    rows = [row(f"variant: {name}", "ms_per_step", got[name], "ms") for name in VARIANTS]
    return rows + [row(f"variant: {a}", "ratio", got[f"{a} / {b}"], "x", f"variant: {b}", got[f"{a} / {b}"])
                   for a, b in PAIRS]


# The two forms of the network ------------------------------------------------------------

def hlo_lines(f, *args):
    """Lines of the optimised HLO of f(*args) without what only says where it came from: the module's name, the tables
    of source files and each line's metadata."""
    text = jax.jit(f).lower(*args).compile().as_text()
    program = text[re.search(r"^(%|ENTRY)", text, re.MULTILINE).start():]
    return [re.sub(r", metadata=\{.*?\}(?=$|, \w+=)", "", line) for line in program.splitlines() if line]


def form_rows():
    """vmap against products of matrices: outputs, jaxprs, and the programs that XLA makes of their gradients."""
    params = model.init_params(jax.random.key(0))
    images, labels = random_images(CFG.batch_size)
    images = data.flatten(images)
    grads = [jax.value_and_grad(partial(model.loss_fn, forward=f)) for f in (model.forward_vmap, model.forward)]
    logits = [jax.jit(f)(params, images) for f in (model.forward_vmap, model.forward)]
    jaxprs = [str(jax.make_jaxpr(g)(params, images, labels)).splitlines() for g in grads]
    programs = [hlo_lines(g, params, images, labels) for g in grads]
    differing = sum(a != b for a, b in zip(*programs)) + abs(len(programs[0]) - len(programs[1]))
    name = "vmap and batched"
    return [row(name, "largest difference", float(jnp.abs(logits[0] - logits[1]).max()), "of logits"),
            row(name, "jaxpr, vmap", len(jaxprs[0]), "lines"), row(name, "jaxpr, batched", len(jaxprs[1]), "lines"),
            row(name, "optimised HLO", len(programs[1]), "lines"),
            row(name, "optimised HLO differs", differing, "lines")]


# Profile of the training step ------------------------------------------------------------

def step_flops():
    """FLOPs of one step's products: 2 a multiply-add; forward, weight gradient and input gradient, the last not for
    the first layer, whose input is the image. Element-wise work isn't counted."""
    products = [I * O for I, O in zip(model.SIZES, model.SIZES[1:])]
    return 2 * CFG.batch_size * (3 * sum(products) - products[0])


def profile_rows():
    images, labels = map(jnp.asarray, random_images(CFG.batch_size))
    images, lr = data.flatten(images), jnp.float32(0.1)
    step = jax.jit(partial(train.update, cfg=CFG), donate_argnums=0)
    timing = profiling.measure(step, lambda: (train.init_state(CFG), images, labels, lr), n=200)
    compiled = step.lower(train.init_state(CFG), images, labels, lr).compile()
    top = profiling.measure_cpu_peak("float32", seconds=3)
    cost = profiling.cost(compiled)
    same = jax.jit(lambda state: state, donate_argnums=0)  # twelve arrays in and out, nothing to compute
    box = [same(train.init_state(CFG))]
    calls = []
    for _ in range(2000):
        began = time.perf_counter()
        box[0] = same(box[0])
        calls.append(time.perf_counter() - began)
    rows = [row("step", "compile", timing.compile_s, "s"), row("step", "first call", 1e3 * timing.first_s, "ms"),
            row("step", "median", 1e3 * timing.median_s, "ms"), row("step", "p90", 1e3 * timing.p90_s, "ms"),
            row("step", "dispatch alone", 1e6 * statistics.median(calls), "us"),
            row("machine", "peak float32", top.flops_per_s / 1e9, "GFLOP/s"),
            row("machine", "peak bandwidth", top.bytes_per_s / 1e9, "GB/s"),
            row("step", "FLOPs", step_flops() / 1e9, "GFLOP"),
            row("step", "reached", step_flops() / timing.median_s / 1e9, "GFLOP/s"),
            row("step", "share of peak", step_flops() / timing.median_s / top.flops_per_s, ""),
            row("step", "intensity", step_flops() / cost["bytes"], "FLOP/byte")]

    with tempfile.TemporaryDirectory() as folder:
        state = train.init_state(CFG)
        for i in range(23):
            if i == 3:
                tracing = profiling.trace(folder)
                tracing.__enter__()
            with jax.profiler.StepTraceAnnotation("train", step_num=i):
                state, loss = compiled(state, images, labels, lr)
                loss.block_until_ready()
        tracing.__exit__(None, None, None)
        trace = profiling.read_trace(folder, top=1000)
    rows += [row("trace", name, trace[f"{name}_ms"], "ms") for name in ("wall", "busy", "gap", "host")]
    kinds = op_kinds(compiled, trace)
    return rows, {"op_table": profiling.op_table(compiled, top=8), "step_ms_by_kind": kinds,
                  "v_curve": v_curve()}


def op_kinds(compiled, trace):
    """{kind: ms a step} of the traced operations, sorted into kinds by the JAX operation they come from."""
    sources = dict(re.findall(r'^\s*(?:ROOT )?%?(\S+) = .*?op_name="([^"]*)"', compiled.as_text(), re.MULTILINE))
    kinds = {}
    for op in trace["top_ops"]:
        source = sources.get(op["name"], "")
        backward = "transpose(jvp" in source
        product = "dot_general" in source or op["name"].partition(".")[0] in ("dot", "ynn_fusion")  # dots are renamed
        kind = ("product" if product else "element-wise") + (", backward" if backward else ", forward") \
            if "jvp" in source else "SGD and other"
        kinds[kind] = kinds.get(kind, 0) + op["total_ms"] / trace["steps"]
    return dict(sorted(kinds.items(), key=lambda item: -item[1]))


def v_curve():
    """{what: [[eps, relative error], ...]} of a central difference of the loss along its gradient, against the
    gradient's norm. Moving only the last layer crosses no kink of ReLU; moving all layers does."""
    images, labels = random_images(32)
    curve = {}
    with jax.enable_x64(True):
        params = jax.tree.map(lambda a: a.astype("float64"), model.init_params(jax.random.key(0), (784, 64, 64, 10)))
        images = data.flatten(images).astype("float64")
        gradient = jax.jit(jax.grad(model.loss_fn))(params, images, labels)
        last = [*jax.tree.map(jnp.zeros_like, gradient[:-1]), gradient[-1]]
        for name, direction, dtype in (("float32, last layer", last, "float32"),
                                       ("float64, last layer", last, "float64"),
                                       ("float64, all layers", gradient, "float64")):
            norm = jnp.linalg.norm(ravel_pytree(direction)[0])

            def moved(h):
                at = jax.tree.map(lambda a, d: a.astype(dtype) + (h * d / norm).astype(dtype), params, direction)
                return model.loss_fn(at, images.astype(dtype), labels).astype("float64")
            moved = jax.jit(moved)
            curve[name] = [[float(eps), float(abs((moved(eps) - moved(-eps)) / (2 * eps * norm) - 1))]
                           for eps in np.logspace(-7 if dtype == "float32" else -11, 0, 45)]
    return curve


# Accuracy --------------------------------------------------------------------------------

def accuracy():
    """Three full runs of train.py a data set; for MNIST also the twin from the same parameters on the same batches.
    Writes results/accuracy.json, and results/figures.npz with what seed 0 of MNIST learned and got wrong."""
    rows = []
    for dataset in ("mnist", "digits"):
        for seed in SEEDS:
            with tempfile.TemporaryDirectory() as folder:
                subprocess.run([sys.executable, str(HERE / "train.py"), f"--seed={seed}", f"--dataset={dataset}",
                                f"--out-dir={folder}/run"], check=True, cwd=folder)
                result = json.loads(Path(folder, "run", "result.json").read_text(encoding="utf-8"))
                lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
                if (dataset, seed) == ("mnist", 0):
                    save_figures_data(Path(folder, "run"))
            losses = np.concatenate([line["losses"] for line in lines])
            blocks = np.array_split(losses, 90)
            kept = ("dataset", "seed", "test_accuracy", "test_examples", "train_loss", "examples_per_s", "training_s",
                    "compile_s", "wall_s")
            rows.append({key: result[key] for key in kept}
                        | {"accuracy_curve": [[line["step"], line["test_accuracy"]] for line in lines],
                           "loss_curve": [[int(n), round(float(block.mean()), 5)] for n, block in
                                          zip(np.cumsum([len(block) for block in blocks]), blocks)]})
            if dataset == "mnist":
                twin = subprocess.run([sys.executable, str(HERE / "bench.py"), "--twin", str(seed)], check=True,
                                      stdout=subprocess.PIPE, text=True)
                rows[-1]["twin_test_accuracy"] = json.loads(twin.stdout.splitlines()[-1])["test_accuracy"]
            print({key: value for key, value in rows[-1].items() if "curve" not in key}, flush=True)
    (HERE / "results").mkdir(exist_ok=True)
    run.write_json(HERE / "results" / "accuracy.json", {"provenance": profiling.provenance(), "rows": rows})


def train_twin(seed):
    """The twin: train.py's parameters, batches and schedule, PyTorch's autograd and optimiser."""
    import torch
    import torch_twin
    run.prepare_host()
    cfg, digits = dataclasses.replace(CFG, seed=seed), data.load("mnist")
    images, test_images = (torch.from_numpy(data.flatten(a)) for a in (digits.train_images, digits.test_images))
    labels, test_labels = (torch.from_numpy(a).long() for a in (digits.train_labels, digits.test_labels))
    params = jax.tree.map(lambda a: torch.from_numpy(np.array(a)), train.init_state(cfg)["params"])
    network = torch_twin.mlp(params)
    optimizer = torch_twin.sgd(network, cfg.lr, cfg.momentum, cfg.weight_decay)
    lr = np.asarray(jax.vmap(partial(train.schedule, cfg=cfg))(jnp.arange(cfg.max_iters))).tolist()
    for epoch, a, b in train.pieces(0, cfg.max_iters, len(labels) // cfg.batch_size):
        order = torch.from_numpy(np.array(train.epoch_order(epoch, len(labels), cfg))).long()
        for i in range(a, b):
            torch_twin.train_step(network, optimizer, images[order[i]], labels[order[i]], lr[epoch * len(order) + i])
    with torch.no_grad():
        right = (network(test_images).argmax(1) == test_labels).sum().item()
    print(json.dumps({"test_accuracy": right / len(test_labels)}))


def save_figures_data(folder):
    """results/figures.npz: the first 40 test images that the run in `folder` gets wrong, and 40 units' weights."""
    cfg, digits = run.load_config(folder, train.Config), data.load("mnist")
    params = run.Checkpoints(folder).restore("latest", train.init_state(cfg))[0]["params"]
    guess = np.asarray(jax.jit(model.forward)(params, data.flatten(digits.test_images)).argmax(1))
    wrong = np.flatnonzero(guess != digits.test_labels)
    w = np.asarray(params[0]["w"])
    largest = np.argsort(-np.linalg.norm(w, axis=0))[:40]
    (HERE / "results").mkdir(exist_ok=True)
    np.savez_compressed(HERE / "results" / "figures.npz", images=digits.test_images[wrong[:40]],
                        labels=digits.test_labels[wrong[:40]].astype(np.uint8),
                        guess=guess[wrong[:40]].astype(np.uint8),
                        n_wrong=len(wrong), weights=w[:, largest].astype(np.float16))


# Kernels ---------------------------------------------------------------------------------

def kernel_rows():
    """What libtpu's static evaluator predicts for the kernels and for XLA's own form; bytes, VMEM and FLOPs counted.
    None: the evaluator gave no estimate, and `why` holds its words."""
    import kernels
    table = []
    for generation in ("v5e", "v6e"):
        for B, I, O in ((CFG.batch_size, 784, 512), (2048, 2048, 2048)):
            for kernel in ("forward", "backward"):
                entry = {"chip": generation, "kernel": kernel, "B": B, "I": I, "O": O, "dtype": "bfloat16"}
                parts = ("forward",) if kernel == "forward" else ("dx", "dw")
                entry["flops"] = len(parts) * 2 * B * I * O
                entry["bytes"] = sum(kernels.hbm_bytes(part, B, I, O, "bfloat16") for part in parts)
                entry["vmem"] = max(kernels.plan(part, B, I, O, "bfloat16").vmem for part in parts)
                for form in ("pallas", "xla"):
                    entry[f"{form}_cycles"] = None
                    try:
                        ops = pallas.predict_cycles("kernels:prediction", {"form": form, **{k: entry[k] for k in (
                            "kernel", "B", "I", "O", "dtype")}}, folder=HERE, topology=f"{generation}:1x1")
                    except (RuntimeError, TimeoutError) as why:
                        if isinstance(why, pallas.AotUnavailable):
                            raise
                        entry[f"{form}_why"] = str(why).splitlines()[0]
                        continue
                    cycles = sum(op["cycles"] for op in ops)  # copies around a kernel are part of its price
                    entry[f"{form}_cycles"] = cycles
                    if form == "pallas":
                        entry["pallas_us"] = 1e6 * pallas.predicted_seconds(cycles, entry["bytes"], entry["flops"],
                                                                           generation)
                table.append(entry)
                print(entry, flush=True)
    rows = []
    for e in table:
        name = f"{e['chip']} {e['kernel']} {e['B']} x {e['I']} x {e['O']}, {e['dtype']}"
        rows.append(row(name, "HBM bytes", e["bytes"], "bytes"))
        if e["pallas_cycles"]:
            ratio = e["xla_cycles"] and e["xla_cycles"] / e["pallas_cycles"]
            rows.append(row(name, "cycles", e["pallas_cycles"], "cycles", "XLA's own form", ratio, predicted=True))
    return {"provenance": profiling.provenance(), "rows": rows, "table": table}


# Figures ---------------------------------------------------------------------------------

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#777777"  # Okabe-Ito, and a grey


def new_axes(height=3.2, **grid):
    import matplotlib
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "mlp_mnist", "font.size": 9})  # the same data give the same file
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(figsize=(6, height), layout="constrained", **grid)
    for each in np.ravel(axes):
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure, name):
    import matplotlib.pyplot as plt
    (HERE / "figures").mkdir(exist_ok=True)
    figure.savefig(HERE / "figures" / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def draw_bench(bench):
    figure, axes = new_axes()
    value = {(r["name"], r["metric"]): r["value"] for r in bench["rows"]}
    flops, bandwidth = value["machine", "peak float32"], value["machine", "peak bandwidth"]
    intensity, reached = value["step", "intensity"], value["step", "reached"]
    x = np.logspace(-1, 3, 200)
    axes.loglog(x, np.minimum(flops, x * bandwidth), color=GREY)
    axes.annotate(f"{bandwidth:.0f} GB/s", (0.4, 0.4 * bandwidth), color=GREY, xytext=(8, -10),
                  textcoords="offset points")
    axes.annotate(f"{flops:.0f} GFLOP/s", (300, flops), color=GREY, xytext=(0, 4), textcoords="offset points")
    axes.plot(intensity, reached, "o", color=BLUE)
    axes.annotate("training step", (intensity, reached), color=BLUE, xytext=(8, -8), textcoords="offset points")
    axes.set(xlabel="intensity (FLOP/byte, bytes as XLA counts them)", ylabel="GFLOP/s (float32)")
    save(figure, "roofline")

    figure, axes = new_axes(2.4)
    kinds = bench["details"]["step_ms_by_kind"]
    names = list(kinds)[::-1]
    axes.barh(names, [kinds[n] for n in names], color=[BLUE if "product" in n else ORANGE for n in names])
    for i, n in enumerate(names):
        axes.text(kinds[n], i, f" {kinds[n]:.2f} ms", va="center")
    axes.set(xlabel="ms a step, on the thread that launches the operation")
    axes.set_xlim(0, 1.15 * max(kinds.values()))
    save(figure, "trace")

    figure, axes = new_axes()
    labels = {"float32, last layer": (1e-7, 1.0), "float64, last layer": (2e-4, 1e-10),
              "float64, all layers": (1e-8, 1e-4)}
    for (what, points), colour in zip(bench["details"]["v_curve"].items(), (ORANGE, BLUE, GREEN)):
        axes.loglog(*zip(*points), color=colour)
        axes.annotate(what, labels[what], color=colour)
    axes.set(xlabel="eps", ylabel="relative error of the central difference")
    save(figure, "finite_differences")


def draw_accuracy(results):
    runs = [r for r in results["rows"] if r["dataset"] == "mnist"]
    figure, (left, right) = new_axes(2.9, ncols=2)
    for r, colour in zip(runs, (BLUE, ORANGE, GREEN)):
        left.semilogy(*zip(*r["loss_curve"]), color=colour, linewidth=1)
        steps, values = zip(*r["accuracy_curve"])
        right.plot(steps, [100 * v for v in values], color=colour, marker="o", markersize=3)
        right.annotate(f"seed {r['seed']}", (0.62, 0.08 + 0.08 * r["seed"]), xycoords="axes fraction", color=colour)
    left.set(xlabel="step", ylabel="training loss (nats)")
    right.set(xlabel="step", ylabel="test accuracy (%)")
    save(figure, "curves")


def draw_images(stored):
    figure, axes = new_axes(4.0, nrows=4, ncols=10)
    for each, image, label, guess in zip(axes.flat, stored["images"], stored["labels"], stored["guess"]):
        each.imshow(image, cmap="Greys")
        each.set_title(f"{label}, not {guess}", fontsize=7)
        each.axis("off")
    save(figure, "wrong")
    figure, axes = new_axes(2.7, nrows=4, ncols=10)
    for each, w in zip(axes.flat, stored["weights"].astype(float).T):
        each.imshow(w.reshape(28, 28), cmap="RdBu", vmin=-abs(w).max(), vmax=abs(w).max())
        each.axis("off")
    save(figure, "weights")


# README ----------------------------------------------------------------------------------

def read(name):
    return json.loads((HERE / "results" / f"{name}.json").read_text(encoding="utf-8"))


def readme_tables():
    """{name: Markdown} of every table that README.md takes from results/."""
    bench, acc, predicted = read("bench"), read("accuracy"), read("kernels")
    speeds = {r["name"]: r for r in bench["rows"] if r["metric"] in ("steps_per_s", "ms_per_step")}
    ratios = [r for r in bench["rows"] if r["metric"] == "ratio"]
    speed = [{"what": r["name"], "steps/s": f"{speeds[r['name']]['value']:,.0f}",
              "spread": f"{speeds[r['name']]['min']:,.0f} to {speeds[r['name']]['max']:,.0f}",
              "beside": r["baseline"].split(": ")[1], "its steps/s": f"{speeds[r['baseline']]['value']:,.0f}",
              "ratio": f"**{r['ratio']:.2f}×**"} for r in ratios if not r["name"].startswith("variant")]
    variants = [{"this": r["name"].removeprefix("variant: "), "ms a step": f"{speeds[r['name']]['value']:.2f}",
                 "against": r["baseline"].removeprefix("variant: "),
                 "its ms a step": f"{speeds[r['baseline']]['value']:.2f}", "ratio": f"{r['ratio']:.2f}×"}
                for r in ratios if r["name"].startswith("variant")]
    runs = []
    for dataset in ("mnist", "digits"):
        these = [r for r in acc["rows"] if r["dataset"] == dataset]
        runs += [{"data": dataset, "seed": r["seed"], "test accuracy": f"{100 * r['test_accuracy']:.2f} %",
                  "of images": f"{r['test_examples']:,}",
                  "PyTorch twin": f"{100 * r['twin_test_accuracy']:.2f} %" if "twin_test_accuracy" in r else "not run",
                  "training, s": f"{r['training_s']:.1f}", "compiling, s": f"{r['compile_s']:.1f}",
                  "wall time, s": f"{r['wall_s']:.1f}"} for r in these]
        values = [100 * r["test_accuracy"] for r in these]
        runs.append({"data": dataset, "seed": "mean ± s.d.",
                     "test accuracy": f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f} %"})
    step = [{"quantity": f"{r['name']}: {r['metric']}", "value": f"{r['value']:.3g} {r['unit']}"}
            for r in bench["rows"] if r["name"] in ("step", "machine", "trace", "vmap and batched")]
    kernels = [{"chip": e["chip"], "what": e["kernel"], "B × I × O": f"{e['B']} × {e['I']} × {e['O']}",
                "VMEM, MiB": f"{e['vmem'] / 2**20:.1f}", "HBM, MiB": f"{e['bytes'] / 2**20:.1f}",
                "FLOP/byte": f"{e['flops'] / e['bytes']:.0f}",
                **{f"{form} cycles": f"{e[key]:,}" if e[key] else "no estimate"
                   for form, key in (("kernel,", "pallas_cycles"), ("XLA,", "xla_cycles"))},
                "kernel, µs": f"{e['pallas_us']:.0f}" if e.get("pallas_us") else "",
                "ratio": f"{e['xla_cycles'] / e['pallas_cycles']:.2f}×"
                if e["pallas_cycles"] and e["xla_cycles"] else ""}
               for e in predicted["table"]]
    made = bench["provenance"]
    line = (f"`{made['command']}`; {made['cpu']}, {made['cores']} cores, Python {made['python']}, JAX {made['jax']}, "
            f"PyTorch {made['torch']}; load average {made['load']:.1f} at the start; {made['date'][:10]}.")
    tables = {"speed": speed, "variants": variants, "accuracy": runs, "step": step, "kernels": kernels}
    return {name: profiling.markdown_table(rows) for name, rows in tables.items()} | {"provenance": line}


def write_readme():
    """Draws the figures and puts each table between its marks, <!-- table:NAME --> and <!-- /table -->."""
    draw_bench(read("bench"))
    draw_accuracy(read("accuracy"))
    with np.load(HERE / "results" / "figures.npz") as stored:
        draw_images(stored)
    path = HERE / "README.md"
    text = path.read_text(encoding="utf-8")
    for name, table in readme_tables().items():
        before, mark, rest = text.partition(f"<!-- table:{name} -->\n")
        if mark:
            text = before + mark + table.rstrip() + "\n" + rest[rest.index("<!-- /table -->"):]
    path.write_text(text, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--quick", "--accuracy", "--kernels", "--readme"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--twin", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(json.loads(args.worker))
    if args.twin is not None:
        return train_twin(args.twin)
    results = HERE / "results"
    run.prepare_host()
    if args.accuracy:
        accuracy()
    elif args.kernels:
        results.mkdir(exist_ok=True)
        run.write_json(results / "kernels.json", kernel_rows())
    elif not args.readme:
        provenance = profiling.provenance()  # before anything runs: the load average is that of the quiet machine
        rows = torch_rows(*((2, 1.0) if args.quick else (5, 4.0))) + variant_rows(3 if args.quick else 15) + form_rows()
        profile, details = profile_rows()
        folder, name = (Path("out"), "bench-quick.json") if args.quick else (results, "bench.json")
        folder.mkdir(exist_ok=True)
        run.write_json(folder / name, {"provenance": provenance, "rows": rows + profile, "details": details})
    if not args.quick and all((results / f"{name}.json").exists() for name in ("bench", "accuracy", "kernels")):
        write_readme()


if __name__ == "__main__":
    main()
