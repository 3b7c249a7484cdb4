"""Profiles cnn_cifar, and measures its training step beside the same network in PyTorch on the same CPU.

    python bench.py                  # results/bench.json, figures/, the tables of README.md
    python bench.py --quick          # the same rows from fewer rounds, to out/bench-quick.json
    python bench.py --accuracy       # full runs of train.py and what is read off them: over an hour
    python bench.py --accuracy PART  # only one part: short, long, shapes, twin, statistics, or a run such as short-s1
    python bench.py --kernels        # what libtpu predicts for the Pallas kernels: results/kernels.json
    python bench.py --readme         # only draws the figures and writes the tables of README.md anew from results/

Finished runs of --accuracy are kept in out/accuracy-*/ and not repeated, so it can be done in parts.

Legend: B batch, H height and width, I and O channels in and out of a layer.
Speed is a ratio of medians of interleaved runs (A B A B ...): PyTorch and JAX each in a process of its own with the
same malloc settings, variants of the JAX program in one. Close other programs first: the load average stands in the
result.
"""
import argparse
import ctypes
import dataclasses
import json
import platform
import re
import shutil
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
from jax import lax

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))  # for common/

import bench_report
import data
import model
import run
import train
from common import pallas, profiling

RESULTS = bench_report.RESULTS
CFG = train.CPU
B = CFG.batch_size
# Height and width at which each layer convolves an image of 32 x 32; pooling comes after a convolution.
SIDES = {"stem": 32, "down1": 32, "res1a": 16, "res1b": 16, "down2": 16, "down3": 8, "res3a": 4, "res3b": 4}
PARTS = ("forward", "dx", "dw")


def batches(n=8):
    """(images float32 (n, B, 32, 32, 3) of mean 0 and variance 1, labels int32 (n, B)): what a step costs doesn't
    depend on what they show."""
    rng = np.random.default_rng(0)
    images = rng.standard_normal((n, B, 32, 32, 3), np.float32)
    return images, rng.integers(0, model.CLASSES, (n, B)).astype(np.int32)


# Workers: one process a side -------------------------------------------------------------

def worker(spec):
    """spec: {"side", "heap", "seconds"} and what a side may add; sets up, then serves measured runs."""
    prepare(spec.get("heap", "huge pages"))
    {"jax": serve_jax, "torch": serve_torch, "variants": serve_variants, "jax layers": serve_jax_layers,
     "torch layers": serve_torch_layers}[spec["side"]](spec)


def prepare(heap):
    """Sets malloc up. "huge pages": as train.py does (run.prepare_host); "plain": freed memory stays in the process
    too, but on pages of 4 KiB; "untouched": as the system has it."""
    if heap == "huge pages":
        run.prepare_host()
    elif heap == "plain" and platform.libc_ver()[0] == "glibc":
        M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def page_faults():
    """Pages mapped for this process so far; 0 on Windows, which doesn't count them like that."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def serve_steps(step, wait, seconds):
    """Serves runs of about `seconds` of training steps, after a few that don't count."""
    def timed(n):
        faults, began = page_faults(), time.perf_counter()
        for _ in range(n):
            step()
        wait()
        s = (time.perf_counter() - began) / n
        return {"images_per_s": B / s, "ms_per_step": 1e3 * s, "faults_per_step": (page_faults() - faults) / n}
    timed(3)
    n = max(3, round(1e3 * seconds / timed(3)["ms_per_step"]))
    profiling.serve(lambda: timed(n))


def serve_jax(spec):
    serve_steps(*make_step(dataclasses.replace(CFG, dtype=spec["dtype"])), spec["seconds"])


def serve_torch(spec):
    """PyTorch's own best case: float32 batches ready in memory, in the layout that the network asks for."""
    import torch
    import torch_twin
    channels_last = spec["form"] != "NCHW"
    network = torch_twin.resnet(model.init_params(jax.random.key(0)), channels_last=channels_last)
    optimizer = torch_twin.sgd(network, CFG.lr, CFG.momentum, CFG.weight_decay)
    if spec["form"] == "compiled":
        network = torch.compile(network)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images, labels = batches()
    images = [torch.from_numpy(x).permute(0, 3, 1, 2).contiguous(memory_format=layout) for x in images]
    labels, box = torch.from_numpy(labels).long(), {"step": 0}

    def step():
        i = box["step"] = (box["step"] + 1) % len(images)
        box["loss"] = torch_twin.train_step(network, optimizer, images[i], labels[i], 0.01, CFG.label_smoothing,
                                            spec["dtype"] == "bfloat16")
    serve_steps(step, lambda: box["loss"].item(), spec["seconds"])


def compare(specs, rounds, seconds):
    """profiling.compare with a fresh process for each run: a worker that waits would lose its huge pages."""
    commands = {name: [sys.executable, str(HERE / "bench.py"), "--worker", json.dumps({"seconds": seconds, **spec})]
                for name, spec in specs.items()}
    env = {name: {"JAX_PLATFORMS": "cpu"} for name in specs}
    return profiling.compare(commands, rounds=rounds, env=env, fresh=True)


# Variants of the JAX step ----------------------------------------------------------------

def make_step(cfg, patches=None, donate=True, augmented=False):
    """(step, wait): step() starts the next training step of train.py, wait() waits for the last one.

    patches: {name: what stands in model.py instead while the step is traced}. augmented: images come as uint8, and are
    cropped, mirrored, blanked and scaled as part of the step."""
    images, labels = batches()
    key = jax.random.key(1) if augmented else None
    if augmented:
        images = np.clip(128 + 60 * images, 0, 255).astype(np.uint8)
    images, labels = [*map(jnp.asarray, images)], [*map(jnp.asarray, labels)]
    steps = [jnp.int32(i) for i in range(len(images))]
    state, original = train.init_state(cfg), dict(vars(model))
    vars(model).update(patches or {})
    try:
        jitted = jax.jit(lambda state, images, labels, step: train.update(state, images, labels, step, cfg, key),
                         donate_argnums=0 if donate else ())
        compiled = jitted.lower(state, images[0], labels[0], steps[0]).compile()
    finally:
        vars(model).update(original)
    box = {"state": state, "step": 0}

    def step():
        i = box["step"] = (box["step"] + 1) % len(images)
        box["state"], box["loss"], _ = compiled(box["state"], images[i], labels[i], steps[i])
    return step, lambda: jax.block_until_ready(box["loss"])


def conv_of_patches(x, w):
    """model.conv as one product: the nine shifted images side by side (im2col), nine times the memory."""
    (B, H, W, I), O = x.shape, w.shape[3]
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    patches = jnp.concatenate([padded[:, r:r + H, c:c + W] for r in range(3) for c in range(3)], axis=3)
    return (patches.reshape(B * H * W, 9 * I) @ w.astype(x.dtype).reshape(9 * I, O)).reshape(B, H, W, O)


def weight_gradient_by_xla(x, g):
    """model.weight_gradient_by_taps as the convolution that JAX makes of it."""
    return model.weight_gradient(jnp.zeros((3, 3, x.shape[3], g.shape[3]), x.dtype), x, g)


def pool_by_window(x):
    """model.max_pool by the primitive meant for it, whose gradient is select_and_scatter."""
    return lax.reduce_window(x, jnp.array(-jnp.inf, x.dtype), lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def moments_in_one_pass(x, axis_name=None):
    """model.moments by E[x^2] - E[x]^2: one pass over x, and few correct digits where the mean is large."""
    wide, axes = model.widen(x), tuple(range(x.ndim - 1))
    mean, square = wide.mean(axes), (wide ** 2).mean(axes)
    return mean, square - mean ** 2


AS_IT_IS = "as train.py runs it"
VARIANTS = {AS_IT_IS: {},
            "convolutions differentiated by JAX": {"patches": {"conv": model.plain_conv}},
            "no gradient of weights as nine products": {"patches": {"weight_gradient_by_taps": weight_gradient_by_xla}},
            "no barriers around convolutions": {"patches": {"cpu_barrier": lambda x: x}},
            "convolutions as products of patches": {"patches": {"conv": conv_of_patches}},
            "pooling by reduce_window": {"patches": {"max_pool": pool_by_window}},
            "variance in one pass": {"patches": {"moments": moments_in_one_pass}},
            "state not donated": {"donate": False},
            "batches augmented in the step": {"augmented": True},
            "bfloat16": {"dtype": "bfloat16"}}


def serve_variants(spec):
    """All variants live in one process and take turns: far steadier than processes that wait for each other. Serves
    {variant: ms a step} and {"ratio: variant": median over the turns of AS_IT_IS's time by the variant's}."""
    def made(dtype="float32", **options):
        return make_step(dataclasses.replace(CFG, dtype=dtype), **options)
    sides, ms = {name: made(**options) for name, options in VARIANTS.items()}, {name: [] for name in VARIANTS}
    for _ in range(spec["turns"] + 1):  # the first turn warms up
        for name, (step, wait) in sides.items():
            step(), wait()  # the one before may have left its temporaries in the caches
            began = time.perf_counter()
            for _ in range(spec["steps"]):
                step()
            wait()
            ms[name].append(1e3 * (time.perf_counter() - began) / spec["steps"])
    ms = {name: times[1:] for name, times in ms.items()}
    result = {name: statistics.median(times) for name, times in ms.items()}
    result |= {f"ratio: {name}": statistics.median(a / b for a, b in zip(ms[AS_IT_IS], times))
               for name, times in ms.items()}
    profiling.serve(lambda: result)


# One layer at a time ---------------------------------------------------------------------

LAYERS = [name for name in SIDES if name not in ("res1b", "res3b")]  # these two repeat the shapes of res1a, res3a


def layer_arrays(layer):
    """(x (B, H, H, I), w (3, 3, I, O), g (B, H, H, O)) of one layer, float32."""
    H, (I, O) = SIDES[layer], model.layers_of()[layer]
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal(shape, np.float32) for shape in ((B, H, H, I), (3, 3, I, O), (B, H, H, O)))


def conv_flops(layer):
    """FLOPs of a layer's convolution, and of each of its two gradients: 2 a multiply-add, the zeros around counted."""
    H, (I, O) = SIDES[layer], model.layers_of()[layer]
    return 2 * 9 * I * O * H * H * B


def layer_parts(layer):
    """The stem has no dx: its input is the image."""
    return [part for part in PARTS if (layer, part) != ("stem", "dx")]


def serve_layers(programs, seconds):
    """Serves {"layer part": ms} of programs, functions that run one of them and wait, timed in turns."""
    for program in programs.values():
        program()

    def once():
        ms = {name: [] for name in programs}
        for _ in range(5):
            for name, program in programs.items():
                program()
                began, n = time.perf_counter(), 0
                while n == 0 or time.perf_counter() - began < seconds:
                    program()
                    n += 1
                ms[name].append(1e3 * (time.perf_counter() - began) / n)
        return {name: statistics.median(times) for name, times in ms.items()}
    profiling.serve(once)


def serve_jax_layers(spec):
    functions = {"forward": lambda x, w, g: model.conv(x, w),
                 "dx": lambda x, w, g: jax.vjp(lambda x: model.conv(x, w), x)[1](g)[0],
                 "dw": lambda x, w, g: jax.vjp(lambda w: model.conv(x, w), w)[1](g)[0]}
    programs = {}
    for layer in LAYERS:
        arrays = [*map(jnp.asarray, layer_arrays(layer))]
        for part in layer_parts(layer):
            compiled = jax.jit(functions[part]).lower(*arrays).compile()
            programs[f"{layer} {part}"] = lambda compiled=compiled, arrays=arrays: compiled(*arrays).block_until_ready()
    serve_layers(programs, spec["seconds"])


def serve_torch_layers(spec):
    """The same programs by PyTorch in its channels_last layout, which is our NHWC in memory."""
    import torch
    functions = {"forward": lambda x, w, g: torch.conv2d(x, w, padding=1)}
    for part, mask in (("dx", (True, False, False)), ("dw", (False, True, False))):
        functions[part] = lambda x, w, g, mask=mask: torch.ops.aten.convolution_backward(
            g, x, w, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1, mask)
    programs = {}
    for layer in LAYERS:
        x, w, g = map(torch.from_numpy, layer_arrays(layer))
        x, w, g = (a.contiguous(memory_format=torch.channels_last) for a in (
            x.permute(0, 3, 1, 2), w.permute(3, 2, 0, 1), g.permute(0, 3, 1, 2)))
        for part in layer_parts(layer):
            programs[f"{layer} {part}"] = partial(functions[part], x, w, g)
    with torch.no_grad():
        serve_layers(programs, spec["seconds"])


# Rows ------------------------------------------------------------------------------------

def row(name, metric, value, unit, baseline=None, ratio=None, predicted=False):
    """One row of the results; ratio > 1 means better than the baseline."""
    print(f"{name:44} {metric:22} {value:12,.4g} {unit:8}" + (f" {ratio:.2f}x {baseline}" if ratio else ""), flush=True)
    return {"name": name, "metric": metric, "value": value, "unit": unit, "baseline": baseline, "ratio": ratio,
            "predicted": predicted}


EAGER = ("PyTorch NCHW", "PyTorch channels_last")
SETTINGS = {"float32": {}, "bfloat16": {"dtype": "bfloat16"}, "float32, plain heap": {"heap": "plain"},
            "float32, untouched heap": {"heap": "untouched"}}


def torch_rows(rounds, seconds):
    """Rows of every side under each of SETTINGS, ours with its ratio to each of PyTorch's; and whether torch.compile
    ran: it needs a C++ compiler."""
    sides = {"JAX": {"side": "jax"}, **{name: {"side": "torch", "form": name.split()[-1]} for name in EAGER},
             "torch.compile": {"side": "torch", "form": "compiled"}}
    sides = {name: {"dtype": "float32", **spec} for name, spec in sides.items()}
    said = "ran"
    try:  # also fills its cache, so that the processes of the comparison start faster
        compare({"torch.compile": sides["torch.compile"]}, 1, 0.1)
    except RuntimeError as why:
        said = f"did not run: {str(why).splitlines()[-1]}"
        print(f"torch.compile {said}", flush=True)
    rows = []
    for setting, options in SETTINGS.items():
        names = ["JAX", *EAGER] + ["torch.compile"] * (setting == "float32" and said == "ran")
        got = compare({name: {**sides[name], **options} for name in names}, rounds, seconds)
        for name in names:
            speed, faults = (got["sides"][name][metric] for metric in ("images_per_s", "faults_per_step"))
            rows.append(row(f"{setting}: {name}", "images_per_s", speed["median"], "images/s"))
            rows[-1].update(min=speed["min"], max=speed["max"], faults=faults["median"], rounds=rounds,
                            load=got["load_before"])
        for theirs in names[1:]:
            ratio = profiling.ratio(got, "images_per_s", "JAX", theirs)
            rows.append(row(f"{setting}: JAX", "ratio", ratio, "x", f"{setting}: {theirs}", ratio))
    return rows, said


def variant_rows(turns, steps):
    taken = compare({"it": {"side": "variants", "turns": turns, "steps": steps}}, 1, 0)["sides"]["it"]
    got = {name: s["median"] for name, s in taken.items()}
    return [row(f"variant: {name}", "ms_per_step", got[name], "ms",
                *([] if name == AS_IT_IS else [f"variant: {AS_IT_IS}", got[f"ratio: {name}"]])) for name in VARIANTS]


def layer_rows(rounds, seconds):
    got = compare({"JAX": {"side": "jax layers"}, "PyTorch": {"side": "torch layers"}}, rounds, seconds)["sides"]
    rows = []
    for layer in LAYERS:
        for part in layer_parts(layer):
            ours, theirs = (conv_flops(layer) / got[side][f"{layer} {part}"]["median"] / 1e6
                            for side in ("JAX", "PyTorch"))
            rows.append(row(f"{layer}, {part}", "GFLOP/s", ours, "GFLOP/s", "PyTorch channels_last", ours / theirs))
            H, (I, O) = SIDES[layer], model.layers_of()[layer]
            rows[-1].update(layer=layer, part=part, H=H, I=I, O=O, torch=theirs,
                            intensity=conv_flops(layer) / (4 * (B * H * H * (I + O) + 9 * I * O)))  # x, w and y, once
    return rows


# Profile of the training step ------------------------------------------------------------

def step_flops():
    """FLOPs of one step's convolutions and of the head: forward, dx and dw. The rest isn't counted."""
    head = 3 * 2 * B * model.layers_of()["res3b"][1] * model.CLASSES
    return sum(len(layer_parts(layer)) * conv_flops(layer) for layer in SIDES) + head


def step_and_batch(cfg, donate=True):
    """The jitted training step on a ready float32 batch, and the arguments that it takes after the state."""
    images, labels = batches(1)
    args = jnp.asarray(images[0]), jnp.asarray(labels[0]), jnp.int32(0)
    jitted = jax.jit(lambda state, *args: train.update(state, *args, cfg), donate_argnums=0 if donate else ())
    return jitted, args


def profile_rows():
    jitted, args = step_and_batch(CFG)
    state, clock = train.init_state(CFG), [time.perf_counter()]
    traced = jitted.trace(state, *args)
    clock.append(time.perf_counter())
    lowered = traced.lower()
    clock.append(time.perf_counter())
    compiled = lowered.compile()
    clock.append(time.perf_counter())
    rows = [row("step", what, float(s), "s") for what, s in zip(("tracing", "lowering", "compiling"), np.diff(clock))]
    timing = profiling.measure(jitted, lambda: (train.init_state(CFG), *args), n=30)
    top, cost = profiling.measure_cpu_peak("float32", seconds=3), profiling.cost(compiled)
    rows += [row("step", "first call", 1e3 * timing.first_s, "ms"), row("step", "median", 1e3 * timing.median_s, "ms"),
             row("step", "p90", 1e3 * timing.p90_s, "ms"),
             row("machine", "peak float32", top.flops_per_s / 1e9, "GFLOP/s"),
             row("machine", "peak bandwidth", top.bytes_per_s / 1e9, "GB/s"),
             row("step", "FLOPs", step_flops() / 1e9, "GFLOP"),
             row("step", "reached", step_flops() / timing.median_s / 1e9, "GFLOP/s"),
             row("step", "share of peak", step_flops() / timing.median_s / top.flops_per_s, ""),
             row("step", "intensity", step_flops() / cost["bytes"], "FLOP/byte")]
    for name, donate in (("memory", True), ("memory, not donated", False)):
        jitted, args = step_and_batch(CFG, donate)
        used = jitted.lower(train.init_state(CFG), *args).compile().memory_analysis()
        rows += [row(name, what, getattr(used, f"{key}_size_in_bytes") / 2**20, "MiB") for what, key in (
            ("state and batch", "argument"), ("outputs", "output"), ("of them written in place", "alias"),
            ("temporaries", "temp"))]

    with tempfile.TemporaryDirectory() as folder:
        for i in range(11):
            if i == 3:
                tracing = profiling.trace(folder)
                tracing.__enter__()
            with jax.profiler.StepTraceAnnotation("train", step_num=i):
                state, loss, _ = compiled(state, *args)
                loss.block_until_ready()
        tracing.__exit__(None, None, None)
        trace = profiling.read_trace(folder, top=10_000)
    rows += [row("trace", name, trace[f"{name}_ms"], "ms") for name in ("wall", "busy", "gap", "host")]
    known, ops, kinds = {op["name"]: op for op in op_table(compiled)}, [], {}
    for op in trace["top_ops"]:
        op = {"shape": "", "kind": OTHER, **known.get(op["name"], {}), "ms": op["total_ms"] / trace["steps"]}
        ops.append(op)
        kinds[op["kind"]] = kinds.get(op["kind"], 0) + op["ms"]
    return rows, {"ops": ops[:12], "largest": op_table(compiled)[:8],
                  "step_ms_by_kind": dict(sorted(kinds.items(), key=lambda item: -item[1]))}


OTHER = "optimiser and other"


def op_table(compiled):
    """profiling.op_table of all operations, each with its kind: what it is for."""
    bodies = dict(re.findall(r"^%?(\S+) \([^\n]*\{\n(.*?)^\}", compiled.as_text(), re.DOTALL | re.MULTILINE))
    return [op | {"kind": kind_of(op, bodies.get(op["calls"], ""))} for op in profiling.op_table(compiled, top=100_000)]


def kind_of(op, body):
    """op: a row of profiling.op_table; body: the computation that it calls, as HLO text. The operations of a fusion
    remember the JAX operation that they come from, those that XLA put in between don't."""
    source = f"{op['op_name']} {body}"
    backward = "transpose(jvp" in source
    if re.match("(wrapped_)?(transpose|copy)", op["name"]):
        return "transposes"
    if model.weight_gradient_by_taps.__name__ in source:
        return "convolution, dw"
    if op["opcode"] == "convolution" or " convolution(" in body or "conv_general_dilated" in str(op["op_name"]):
        of_weights = re.search(r"\[(\d+,)?3,3,", op["shape"])
        return "convolution, " + ("dw" if of_weights else "dx" if backward else "forward")
    if "jvp(" in source:
        return "norm, ReLU, pooling, " + ("backward" if backward else "forward")
    return OTHER


# Accuracy --------------------------------------------------------------------------------

RUNS = {f"{kind}-s{seed}": (*flags, f"--seed={seed}") for kind, flags, seeds in (
    ("short", ("--dataset=cifar10",), (0, 1, 2)),
    ("long", ("--preset=long", "--dataset=cifar10"), (0,)),
    ("shapes", ("--dataset=shapes",), (0, 1, 2))) for seed in seeds}
SHOWN = "long-s0"  # the run whose predictions are drawn
KEPT = ("dataset", "steps", "seed", "test_accuracy", "test_examples", "train_loss", "params", "examples_per_s",
        "training_s", "compile_s", "wall_s")


def run_folder(name):
    return Path("out") / f"accuracy-{name}"


def script(name, *arguments):
    """Runs one of this folder's scripts. Where it fails it has said why: this one ends with the same status."""
    status = subprocess.run([sys.executable, str(HERE / name), *arguments]).returncode
    if status:
        sys.exit(status)


def cifar10():
    try:
        return data.load("cifar10")
    except ValueError as why:
        run.fail(why)


def accuracy(part):
    """The runs of `part` that are not done yet, each train.py in a process of its own; then results/accuracy.json from
    all that are done. A run that was cut starts anew: its times are those of one process."""
    RESULTS.mkdir(exist_ok=True)
    for name in (name for name in RUNS if part in ("all", name.partition("-")[0], name)):
        folder = run_folder(name)
        if not (folder / "result.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            run.write_json(folder / "machine.json", profiling.provenance())
            script("train.py", *RUNS[name], "--out-dir", str(folder))
        if name == SHOWN:
            save_predictions(folder)
    twin = run_folder("twin") / "result.json"
    if part in ("all", "twin") and not twin.exists():
        twin.parent.mkdir(parents=True, exist_ok=True)
        script("bench.py", "--twin", str(twin))
    if part in ("all", "statistics"):
        run.write_json(RESULTS / "statistics.json", statistics_run())
    rows = [read_run(name) for name in RUNS if (run_folder(name) / "result.json").exists()]
    for entry in rows:
        if entry["run"] == "short-s0" and twin.exists():
            entry["twin_test_accuracy"] = json.loads(twin.read_text(encoding="utf-8"))["test_accuracy"]
    if rows:
        run.write_json(RESULTS / "accuracy.json", {"provenance": profiling.provenance(), "rows": rows})


def read_run(name):
    """One row of accuracy.json from a finished run's folder: its result, the load it ran under, and its curves."""
    folder = run_folder(name)
    result, machine = (json.loads((folder / f"{file}.json").read_text(encoding="utf-8"))
                       for file in ("result", "machine"))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = np.concatenate([line["losses"] for line in lines])
    blocks = np.array_split(losses, 90)
    return {"run": name, "flags": list(RUNS[name]), **{key: result[key] for key in KEPT}, "load": machine["load"],
            "accuracy_curve": [[line["step"], line["test_accuracy"]] for line in lines if "test_accuracy" in line],
            "loss_curve": [[int(n), round(float(block.mean()), 4)] for n, block in
                           zip(np.cumsum([len(block) for block in blocks]), blocks)]}


def save_predictions(folder):
    """results/predictions.npz of a finished run: the first 24 test images with their classes and its guesses, the
    confusion matrix of the whole test set (row: true class), and the accuracy under three kinds of statistics."""
    images, state = cifar10(), train.init_state(run.load_config(folder, train.Config))
    saved = run.Checkpoints(folder).restore("latest", {name: state[name] for name in ("params", "stats")})[0]
    params, labels = saved["params"], images.test_labels
    forward = jax.jit(model.forward, static_argnames="train")
    fresh = model.init_stats()

    def guesses(stats, train):
        logits = [forward(params, stats, data.normalise(images.test_images[i:i + 100]), train=train)[0]
                  for i in range(0, len(labels), 100)]
        return np.concatenate(logits).argmax(1)
    guess = guesses(saved["stats"], False)
    confusion = np.zeros((len(images.classes),) * 2, np.int32)
    np.add.at(confusion, (labels, guess), 1)
    np.savez_compressed(RESULTS / "predictions.npz", images=images.test_images[:24], labels=labels[:24],
                        guess=guess[:24], classes=np.array(images.classes), confusion=confusion,
                        running=np.mean(guess == labels), never_updated=np.mean(guesses(fresh, False) == labels),
                        of_the_batch=np.mean(guesses(fresh, True) == labels))


def train_twin(path):
    """The twin of the run short-s0: train.py's parameters, batches and schedule, PyTorch's autograd, batch norm and
    optimiser. Writes its test accuracy to `path`."""
    import torch
    import torch_twin
    run.prepare_host()
    cfg, images = CFG, cifar10()
    state, key = train.init_state(cfg), train.purpose_keys(cfg.seed)["augment"]
    augment = jax.jit(lambda images, step: data.normalise(
        data.augment(jax.random.fold_in(key, step), images, cutout=cfg.cutout)))
    network = torch_twin.resnet(state["params"], state["stats"], channels_last=True)
    optimizer = torch_twin.sgd(network, cfg.lr, cfg.momentum, cfg.weight_decay)
    lr = np.asarray(jax.vmap(partial(train.schedule, cfg=cfg))(jnp.arange(cfg.steps))).tolist()

    def as_torch(images):  # (B, 3, H, W), which in memory is (B, H, W, 3) still: PyTorch's channels_last
        return torch.from_numpy(np.array(images)).permute(0, 3, 1, 2)
    labels, test_labels = (torch.from_numpy(a).long() for a in (images.train_labels, images.test_labels))
    for step in range(cfg.steps):
        epoch, i = divmod(step, len(labels) // cfg.batch_size)
        if i == 0:
            order = train.epoch_order(epoch, len(labels), cfg)
        batch = as_torch(augment(images.train_images[order[i]], step))
        torch_twin.train_step(network, optimizer, batch, labels[torch.tensor(order[i])], lr[step],
                              cfg.label_smoothing)
    network.eval()
    with torch.no_grad():
        right = sum((network(as_torch(data.normalise(images.test_images[i:i + 500]))).argmax(1)
                     == test_labels[i:i + 500]).sum().item() for i in range(0, len(test_labels), 500))
    run.write_json(path, {"test_accuracy": right / len(test_labels)})


# Running statistics ----------------------------------------------------------------------

def distance(stats, true):
    """{"mean", "var"}: how far running statistics are from true ones, as the root mean square over channels, then the
    mean over layers. Means count in standard deviations of the data, variances relative to them."""
    def rms(a):
        return jnp.sqrt(jnp.mean(a ** 2))
    pairs = [(stats[name], true[name]) for name in true]
    return {"mean": float(np.mean([rms((s["mean"] - t["mean"]) * lax.rsqrt(t["var"])) for s, t in pairs])),
            "var": float(np.mean([rms(s["var"] / t["var"] - 1) for s, t in pairs]))}


def statistics_run(steps=200, held=60):
    """How running statistics approach the data's. {"held": [...], "training": [...]}.

    held: parameters stay at their initial values, `held` batches pass through. training: the first `steps` steps of a
    short run without augmentation. The data's statistics are those of 2,048 training images at the parameters of the
    moment; losses and accuracies are of the first 1,000 test images, in evaluation mode with the running statistics
    and with (0, 1), which is what forgetting to update them leaves, and by the batch's own statistics."""
    images = cifar10()
    order = np.random.default_rng(0).permutation(len(images.train_labels))
    sample = data.normalise(images.train_images[order[:2048]])
    test, test_labels = data.normalise(images.test_images[:1000]), images.test_labels[:1000]
    forward = jax.jit(model.forward, static_argnames="train")
    fresh = model.init_stats()
    zeros = jax.tree.map(jnp.zeros_like, fresh)

    def of_data(params):  # one update from 0 leaves (1 - momentum) times the statistics of the batch
        return jax.tree.map(lambda a: a / (1 - model.MOMENTUM), forward(params, zeros, sample, train=True)[1])

    def batch(i):
        at = order[2048:][i * B:(i + 1) * B]
        return data.normalise(images.train_images[at]), images.train_labels[at]

    def modes(params, stats):
        entry = {}
        for name, logits in (("running", forward(params, stats, test, train=False)[0]),
                             ("never_updated", forward(params, fresh, test, train=False)[0]),
                             ("of_the_batch", forward(params, fresh, test, train=True)[0])):
            entry[f"loss_{name}"] = float(model.cross_entropy(logits, test_labels).mean())
            entry[f"accuracy_{name}"] = float((logits.argmax(1) == test_labels).mean())
        return entry

    state = train.init_state(CFG)
    stats, true, rows = state["stats"], of_data(state["params"]), {"held": [], "training": []}
    for i in range(held + 1):
        rows["held"].append({"step": i, **distance(stats, true)})
        stats = forward(state["params"], stats, batch(i)[0], train=True)[1]
    marks = {0, *np.geomspace(1, steps, 24).round().astype(int).tolist()}
    for i in range(steps + 1):
        if i in marks:
            rows["training"].append({"step": i, **distance(state["stats"], of_data(state["params"])),
                                     **modes(state["params"], state["stats"])})
        state = train.train_step(state, *map(jnp.asarray, batch(i)), jnp.int32(i), CFG)[0]
    return {"provenance": profiling.provenance(), "momentum": model.MOMENTUM, **rows}


# Kernels ---------------------------------------------------------------------------------

def kernel_rows():
    """What libtpu's static evaluator predicts for the kernels and for XLA's own form; bytes and VMEM counted. None: the
    evaluator gave no estimate, and `why` holds its words.

    xla_bytes: what XLA's operations read and write, some of it perhaps in VMEM. xla_us: as if all but xla_least, the
    operands and results once, stayed there: the least that it can be."""
    import kernels
    table = []
    for chip in ("v5e", "v6e"):
        for shape in ((B, 32, 32, 32), (B, 8, 8, 96), (B, 56, 56, 64)):  # stem, down2, and ResNet-50's first stage
            for kernel in ("forward", "backward", "inference"):
                sizes = {"kernel": kernel, "shape": shape, "dtype": "bfloat16"}
                entry = {"chip": chip, **sizes, "bytes": kernels.hbm_bytes(**sizes), "vmem": kernels.plan(**sizes).vmem}
                f, avals = kernels.prediction(form="xla", **sizes)
                entry["xla_bytes"] = profiling.cost(pallas.aot_compile(f, *avals, topology=f"{chip}:1x1"))["bytes"]
                entry["xla_least"] = sum(a.size * a.dtype.itemsize
                                         for a in jax.tree.leaves((avals, jax.eval_shape(f, *avals))))
                for form, moved in (("pallas", entry["bytes"]), ("xla", entry["xla_least"])):
                    entry[f"{form}_cycles"] = None
                    try:
                        ops = pallas.predict_cycles("kernels:prediction", {"form": form, **sizes}, folder=HERE,
                                                    topology=f"{chip}:1x1")
                    except (RuntimeError, TimeoutError) as why:
                        if isinstance(why, pallas.AotUnavailable):
                            raise
                        entry[f"{form}_why"] = str(why).splitlines()[0]
                        continue
                    cycles = sum(op["cycles"] for op in ops)  # copies around a kernel are part of its price
                    entry[f"{form}_cycles"] = cycles
                    entry[f"{form}_us"] = 1e6 * pallas.predicted_seconds(cycles, moved, 0, chip)
                table.append(entry)
                print(entry, flush=True)
    rows = []
    for e in table:
        name = f"{e['chip']} {e['kernel']} {' x '.join(map(str, e['shape']))}, {e['dtype']}"
        rows.append(row(name, "HBM bytes", e["bytes"], "bytes", "XLA's own form, at most", e["xla_bytes"] / e["bytes"]))
        if e["pallas_cycles"]:
            ratio = e["xla_cycles"] and e["xla_us"] / e["pallas_us"]
            rows.append(row(name, "time", e["pallas_us"], "us", "XLA's own form, at least", ratio, predicted=True))
    return {"provenance": profiling.provenance(), "rows": rows, "table": table}


# Command line ----------------------------------------------------------------------------

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--quick", "--kernels", "--readme"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--accuracy", nargs="?", const="all", metavar="PART",
                        choices=("all", "short", "long", "shapes", "twin", "statistics", *RUNS))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--twin", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(json.loads(args.worker))
    if args.twin:
        return train_twin(args.twin)
    run.prepare_host()
    if args.accuracy:
        accuracy(args.accuracy)
    elif args.kernels:
        RESULTS.mkdir(exist_ok=True)
        run.write_json(RESULTS / "kernels.json", kernel_rows())
    elif not args.readme:
        provenance = profiling.provenance()  # before anything runs: the load average is that of the quiet machine
        profile, details = profile_rows()  # first, as a process that has waited loses its huge pages
        rows, compiled = torch_rows(*((1, 1.0) if args.quick else (3, 2.0)))
        rows += variant_rows(*((2, 2) if args.quick else (8, 3)))
        rows += layer_rows(*((1, 0.02) if args.quick else (3, 0.1)))
        folder, name = (Path("out"), "bench-quick.json") if args.quick else (RESULTS, "bench.json")
        folder.mkdir(exist_ok=True)
        run.write_json(folder / name, {"provenance": provenance, "rows": rows + profile,
                                       "details": {"torch.compile": compiled, **details}})
    missing = [name for name in ("accuracy.json", "statistics.json", "predictions.npz", "kernels.json")
               if not (RESULTS / name).exists()]
    if args.readme and missing:
        run.fail(f"results/ lacks {', '.join(missing)}: run bench.py --accuracy and bench.py --kernels")
    if not args.quick and not missing:
        bench_report.write_readme()


if __name__ == "__main__":
    main()
