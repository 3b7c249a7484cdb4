"""Profiles nanogpt, and measures it beside the same model in PyTorch on the same machine in the same run.

    python bench.py            # everything: results/bench.json, figures/, the tables of README.md; 10 minutes
    python bench.py --quick    # the same rows from fewer rounds, to out/bench-quick.json; 7 minutes
    python bench.py --choices  # only the rows "choice: ...", put into results/bench.json; 3 minutes
    python bench.py --losses   # three full training runs beside three of the twin: results/losses.json; 10 minutes
    python bench.py --kernels  # the attention kernels on TPUs, predicted: results/kernels.json; 15 minutes
    python bench.py --ports    # model.py beside its ports in Flax NNX and Equinox: results/ports.json; 3 minutes
    python bench.py --readme   # only draws the figures and writes the tables of README.md anew from results/

Legend: B batch, T context, D width, L layers, V vocabulary.
Speed is a ratio of medians of interleaved runs (A B A B ...), each side in its own process with the same malloc
settings. Close other programs first: the load average stands in the result.
"""
import argparse
import dataclasses
import json
import math
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))  # for common/

import data
import model
import run
import train
from common import profiling

SMALL = train.CPU
LARGE = dataclasses.replace(train.PRESETS["gpu"], batch_size=8, dropout=0.0)  # 6 x 384; a step of a second or so
VOCAB, NEW_TOKENS = 65, 255


# Workers: one process a side -------------------------------------------------------------

def worker(spec):
    """spec: {"side", "job", "size"} and what a job may add; sets up, then serves measured runs."""
    if spec.get("without") != "heap":
        run.prepare_host()
    cfg = dataclasses.replace({"small": SMALL, "large": LARGE}[spec["size"]], dtype=spec.get("dtype", "float32"))
    {"jax train": jax_train, "torch train": torch_train, "jax generate": jax_generate,
     "torch generate": torch_generate, "jax choices": jax_choices}[f"{spec['side']} {spec['job']}"](cfg, spec)


def serve_steps(steps, cfg, seconds):
    """Serves runs of about `seconds` of training steps each, after half as many that don't count: a process's first
    fifty steps are slower than the rest. steps(n): makes n steps and waits for them."""
    steps(1)
    began = time.perf_counter()
    steps(3)
    n = max(2, round(seconds / (time.perf_counter() - began) * 3))

    def once():
        steps(-(-n // 2))
        began = time.perf_counter()
        steps(n)
        s = (time.perf_counter() - began) / n
        return {"ms_per_step": 1e3 * s, "tokens_per_s": cfg.batch_size * cfg.context / s}
    profiling.serve(once)


def jax_train(cfg, spec):
    ablate(spec.get("without"))
    model_cfg = cfg.model(VOCAB)
    state, ids = train.init_state(cfg, model_cfg), random_text()
    compiled = train.compile_steps(state, ids, cfg, model_cfg)
    box = {"state": state, "step": 0}

    def steps(n):
        for first in range(box["step"], box["step"] + n, train.DISPATCH):
            last = min(first + train.DISPATCH, box["step"] + n)
            box["state"], box["got"] = compiled(box["state"], ids, np.int32(first), np.int32(last))
        box["step"] += n
        jax.block_until_ready(box["got"])
    serve_steps(steps, cfg, spec.get("seconds", 4.0))


def torch_train(cfg, spec):
    import torch
    import torch_twin
    twin = torch_twin.GPT(VOCAB, cfg.context, cfg.n_layer, cfg.n_head, cfg.n_embd)
    optimizer = torch_twin.adamw(twin, cfg.lr, cfg.weight_decay, beta2=0.99)
    if spec.get("compiled"):
        twin.forward = torch.compile(twin.forward)
    ids = torch.randint(0, VOCAB, (100_000,))

    def steps(n):
        for _ in range(n):
            starts = torch.randint(len(ids) - cfg.context, (cfg.batch_size,))
            x = torch.stack([ids[i:i + cfg.context] for i in starts])
            y = torch.stack([ids[i + 1:i + 1 + cfg.context] for i in starts])
            loss = torch_twin.train_step(twin, optimizer, x, y, cfg.lr, cfg.grad_clip, cfg.dtype == "bfloat16")
        loss.item()
    serve_steps(steps, cfg, spec.get("seconds", 4.0))


def jax_generate(cfg, spec):
    model_cfg, B, n = cfg.model(VOCAB), spec["B"], spec.get("n", NEW_TOKENS)
    params = model.init_params(jax.random.key(0), model_cfg)
    begin = jax.jit(partial(model.start, cfg=model_cfg))
    draw = jax.jit(partial(model.generate, n=n, cfg=model_cfg), donate_argnames="state")
    if spec.get("uncached"):
        draw = jax.jit(partial(generate_uncached, n=n, cfg=model_cfg))
    prompt = jnp.zeros((B, 1), jnp.int32)

    def once():
        began = time.perf_counter()
        tokens, _ = draw(params, begin(params, prompt, 1), jax.random.key(1))
        tokens.block_until_ready()
        s = time.perf_counter() - began
        return {"seconds": s, "tokens_per_s": B * n / s}
    once()
    profiling.serve(once)


def generate_uncached(params, state, key, n, cfg):
    """A forward pass over the whole window for each token: what the cache saves. Each token costs the same, so a
    few of them measure the rate."""
    def body(i, window):
        x, _ = model.run_blocks(params, window, cfg)
        logits = model.logits_of(params, x.reshape(*window.shape, -1)[:, i], cfg)
        token = model.sample_token(logits, jax.random.fold_in(key, i), 1.0)
        return jax.lax.dynamic_update_slice_in_dim(window, token[:, None], i + 1, axis=1)
    params = {**params, "blocks": model.layers_of(params, cfg)}
    window = jax.lax.fori_loop(0, n, body, state.window)
    return window[:, 1:n + 1], state


def torch_generate(cfg, spec):
    import torch
    import torch_twin
    twin = torch_twin.GPT(VOCAB, cfg.context, cfg.n_layer, cfg.n_head, cfg.n_embd)
    prompt = torch.zeros((spec["B"], 1), dtype=torch.int64)

    def once():
        began = time.perf_counter()
        torch_twin.generate(twin, prompt, NEW_TOKENS, cached=not spec.get("uncached"))
        s = time.perf_counter() - began
        return {"seconds": s, "tokens_per_s": spec["B"] * NEW_TOKENS / s}
    torch_twin.generate(twin, prompt, 8, cached=True)  # warms the thread pool up
    profiling.serve(once)


def random_text():
    return jax.random.randint(jax.random.key(0), (100_000,), 0, VOCAB).astype(jnp.uint8)


def ablate(without):
    """Undoes one choice of model.py, so that its worth is measured rather than believed."""
    if without == "flat":  # products on (B, T, D), as one would write them
        model.matmul = lambda x, w: (x.reshape(-1, SMALL.context, x.shape[1]) @ w.astype(x.dtype)).reshape(len(x), -1)
    if without == "weight gradient":
        model._weight_gradient_cpu = model._weight_gradient
    if without == "unrolled":
        def scanned(params, tokens, cfg, key=None, attention=model.attention):
            def body(x, p):
                return model.block(x, p, cfg, len(tokens), attention, None)[0], None
            x = model.embed(params, tokens, jnp.arange(tokens.shape[1]))
            return jax.lax.scan(body, x, params["blocks"])[0], None
        model.run_blocks = scanned
    if without == "attention":  # its gradient left to JAX
        model._attend = model.attention_reference
    if without == "split":
        model.layers_of = lambda params, cfg: [jax.tree.map(lambda a: a[i], params["blocks"])
                                               for i in range(cfg.n_layer)]


def compare(specs, rounds, fresh=False):
    seconds = 1.0 if rounds <= 2 else 4.0  # of training in each run: as long as the machine's slow spells, or --quick
    commands = {name: [sys.executable, str(HERE / "bench.py"), "--worker", json.dumps({"seconds": seconds, **spec})]
                for name, spec in specs.items()}
    return profiling.compare(commands, rounds=rounds, fresh=fresh)


# Rows ------------------------------------------------------------------------------------

def row(name, metric, value, unit, baseline=None, ratio=None):
    """One row of bench.json; ratio > 1 means better than the baseline."""
    print(f"{name:44} {metric:16} {value:12,.4g} {unit:10}" + (f" {ratio:.2f}x {baseline}" if ratio else ""), flush=True)
    return {"name": name, "metric": metric, "value": value, "unit": unit, "baseline": baseline, "ratio": ratio,
            "predicted": False}


def against(title, specs, rounds, baselines, metric="tokens_per_s", fresh=False):
    """Rows of every side, ours with its ratio to each baseline; the load average rides along."""
    got = compare(specs, rounds, fresh)
    rows = []
    for name in specs:
        s = got["sides"][name][metric]
        entry = row(f"{title}: {name}", metric, s["median"], "tokens/s")
        entry.update(min=s["min"], max=s["max"], rounds=rounds, load=got["load_before"])
        rows.append(entry)
    for side, baseline in baselines:
        ratio = profiling.ratio(got, metric, side, baseline)
        rows.append(row(f"{title}: {side}", "ratio", ratio, "x", f"{title}: {baseline}", ratio))
    return rows


def training_rows(rounds):
    rows = []
    for size, dtype, title in (("small", "float32", "train 4 x 128"), ("large", "float32", "train 6 x 384"),
                               ("large", "bfloat16", "train 6 x 384 bfloat16")):
        base = {"job": "train", "size": size, "dtype": dtype}
        specs = {"jax": {"side": "jax", **base}, "torch eager": {"side": "torch", **base}}
        baselines = [("jax", "torch eager")]
        if size == "small":
            specs["torch.compile"] = {"side": "torch", "compiled": True, **base}
            baselines.append(("jax", "torch.compile"))
        rows += against(title, specs, rounds, baselines, fresh=True)
    return rows


CHOICES = {"flat": "products of 2-D operands", "unrolled": "layers unrolled, not scanned",
           "weight gradient": "own form of the weight gradient", "attention": "attention's own VJP",
           "split": "layers by split, not by index", "dispatch": "8 steps a dispatch, not 1"}


def choice_rows(rounds):
    """The step as it is against the step without one choice. The variants are all JAX, so one process holds them
    and they take turns every second: far steadier than processes that wait for each other."""
    specs = {"as it is": {"side": "jax", "job": "train", "size": "small"}}
    got = compare(specs | {"without": {**specs["as it is"], "without": "heap"}}, rounds, fresh=True)
    ratio = profiling.ratio(got, "tokens_per_s", "as it is", "without")
    rows = [row("choice: one heap that keeps its memory", "ratio", ratio, "x", "train 4 x 128 without it", ratio)]
    for size, dtype, title, names in (("small", "float32", "4 x 128", CHOICES),
                                      ("large", "bfloat16", "6 x 384 bfloat16", ("weight gradient", "attention"))):
        specs = {"it": {"side": "jax", "job": "choices", "size": size, "dtype": dtype, "names": list(names),
                        "turns": 3 if rounds <= 2 else 9}}
        taken = compare(specs, 1)["sides"]["it"]
        for name in names:
            ratio = taken[name]["median"]
            rows.append(row(f"choice: {CHOICES[name]}, {title}", "ratio", ratio, "x", f"train {title} without it", ratio))
    return rows


def jax_choices(cfg, spec):
    """Serves {choice: median over the turns of (time without it / time as it is)}."""
    model_cfg, ids, originals = cfg.model(VOCAB), random_text(), dict(vars(model))
    sides = {}
    for name in (None, *spec["names"]):
        ablate(name)
        jax.clear_caches()  # of train_step's jaxpr, made with another model
        state = train.init_state(cfg, model_cfg)
        sides[name] = [train.compile_steps(state, ids, cfg, model_cfg), state]
        vars(model).update(originals)
    seconds = {name: [] for name in sides}
    steps = 24 if cfg.n_embd == SMALL.n_embd else 2
    for _ in range(spec["turns"] + 1):  # the first turn warms up
        for name, side in sides.items():
            dispatch = 1 if name == "dispatch" else train.DISPATCH
            began = time.perf_counter()
            for i in range(0, steps, dispatch):
                side[1], got = side[0](side[1], ids, np.int32(i), np.int32(min(i + dispatch, steps)))
            jax.block_until_ready(got)
            seconds[name].append(time.perf_counter() - began)
    ratios = {name: statistics.median(a / b for a, b in zip(seconds[name][1:], seconds[None][1:]))
              for name in spec["names"]}
    profiling.serve(lambda: ratios)


def generation_rows(rounds):
    rows = []
    for B in (1, 8):
        base = {"job": "generate", "size": "large", "B": B}
        specs = {"jax cached": {"side": "jax", **base}, "torch cached": {"side": "torch", **base}}
        rows += against(f"generate 6 x 384, B {B}", specs, rounds, [("jax cached", "torch cached")])
        slow = {"jax cached": {"side": "jax", **base}, "jax uncached": {"side": "jax", "uncached": True, "n": 32, **base}}
        if B == 1:
            slow["torch uncached"] = {"side": "torch", "uncached": True, **base}
        rows += against(f"generate 6 x 384, B {B}, against no cache", slow, max(2, rounds // 2),
                        [("jax cached", name) for name in slow if name != "jax cached"])
    return rows


# Profile of the training step ------------------------------------------------------------

def step_flops(cfg):
    """Floating point operations of one training step, counted from the shapes: 2 a multiply-add, the backward pass
    twice the forward. Element-wise work isn't counted."""
    N, D, L, T = cfg.batch_size * cfg.context, cfg.n_embd, cfg.n_layer, cfg.context
    return 3 * (2 * N * L * 12 * D * D + 2 * N * L * 2 * T * D + 2 * N * D * VOCAB)


def compiled_step(cfg):
    model_cfg = cfg.model(VOCAB)
    shapes = jax.eval_shape(partial(train.init_state, cfg, model_cfg))
    ids = jax.ShapeDtypeStruct((100_000,), jnp.uint8)
    return train.train_step.lower(shapes, ids, jax.ShapeDtypeStruct((), jnp.int32), cfg, model_cfg).compile()


def profile_rows():
    cfg, model_cfg = SMALL, SMALL.model(VOCAB)
    ids, step = random_text(), jnp.int32(0)
    run_step = partial(train.train_step, cfg=cfg, model_cfg=model_cfg)
    jitted = jax.jit(lambda state, ids, step: run_step(state, ids, step), donate_argnums=0)
    timing = profiling.measure(jitted, lambda: (train.init_state(cfg, model_cfg), ids, step), n=30)
    rows = [row("step 4 x 128", "compile", timing.compile_s, "s"), row("step 4 x 128", "first call", timing.first_s, "s"),
            row("step 4 x 128", "median", 1e3 * timing.median_s, "ms"), row("step 4 x 128", "p90", 1e3 * timing.p90_s, "ms")]

    compiled = compiled_step(cfg)
    peak = profiling.measure_cpu_peak("float32", seconds=3)
    place = profiling.roofline(step_flops(cfg), profiling.cost(compiled)["bytes"], timing.median_s)
    rows += [row("machine", "peak float32", peak.flops_per_s / 1e9, "GFLOP/s"),
             row("machine", "peak bandwidth", peak.bytes_per_s / 1e9, "GB/s"),
             row("step 4 x 128", "FLOPs", step_flops(cfg) / 1e9, "GFLOP"),
             row("step 4 x 128", "share of peak", step_flops(cfg) / timing.median_s / peak.flops_per_s, ""),
             row("step 4 x 128", "intensity", place.intensity, "FLOP/byte")]

    table = profiling.op_table(compiled, top=12)
    with tempfile.TemporaryDirectory() as folder:
        state = train.init_state(cfg, model_cfg)
        for i in range(8):
            if i == 3:
                tracing = profiling.trace(folder)
                tracing.__enter__()
            with jax.profiler.StepTraceAnnotation("train", step_num=i):
                state, got = compiled(state, ids, jnp.int32(i))
                jax.block_until_ready(got)
        tracing.__exit__(None, None, None)
        trace = profiling.read_trace(folder, top=10_000)
    rows += [row("trace 4 x 128", name, trace[f"{name}_ms"], "ms") for name in ("wall", "busy", "gap", "host")]

    memory = []
    for T in (64, 128, 256, 512, 1024):
        for remat in (False, True):
            at_T = dataclasses.replace(cfg, context=T, remat=remat, batch_size=max(1, 768 // T))
            temp = compiled_step(at_T).memory_analysis().temp_size_in_bytes
            memory.append({"context": T, "batch": at_T.batch_size, "remat": remat, "temp_MiB": temp / 2**20})
            rows.append(row(f"memory 4 x 128, T {T}, B {at_T.batch_size}{', remat' if remat else ''}", "temporaries",
                            temp / 2**20, "MiB"))
    kinds = op_kinds(compiled, trace)
    trace["top_ops"] = trace["top_ops"][:12]
    return rows, {"op_table": table, "trace": trace, "step_ms_by_kind": kinds, "memory": memory}


# Figures ---------------------------------------------------------------------------------

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#999999"  # Okabe-Ito


def new_axes(height=3.2):
    import matplotlib
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "nanogpt", "font.size": 9})  # the same data give the same file
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(figsize=(6, height), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure, folder, name):
    folder.mkdir(exist_ok=True)
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


def draw(bench):
    """figures/ from results/bench.json."""
    kinds = bench["details"].get("step_ms_by_kind")
    if kinds:
        figure, axes = new_axes(2.8)
        names = list(kinds)[::-1]
        axes.barh(names, [kinds[n] for n in names], color=[BLUE if "product" in n else ORANGE for n in names])
        for i, n in enumerate(names):
            axes.text(kinds[n], i, f" {kinds[n]:.1f} ms", va="center")
        axes.set(xlabel="ms a step, on the thread that launches the operation")
        save(figure, HERE / "figures", "trace")

    figure, axes = new_axes()
    memory = bench["details"]["memory"]
    for remat, colour, label in ((False, BLUE, "activations saved"), (True, ORANGE, "recomputed (--remat)")):
        points = [(m["context"], m["temp_MiB"]) for m in memory if m["remat"] is remat]
        axes.plot(*zip(*points), color=colour, marker="o")
        axes.annotate(label, points[0], xytext=(0, 14), textcoords="offset points", color=colour)
    axes.set(xscale="log", xlabel="context T (768 tokens a step; 512 at T = 512, 1024 at T = 1024)",
             ylabel="temporaries (MiB)", xticks=[64, 128, 256, 512, 1024],
             xticklabels=["64", "128", "256", "512", "1024"])
    axes.minorticks_off()
    axes.set_ylim(0)
    save(figure, HERE / "figures", "memory")

    figure, axes = new_axes()
    value = {(r["name"], r["metric"]): r["value"] for r in bench["rows"]}
    flops, bandwidth = value["machine", "peak float32"], value["machine", "peak bandwidth"]
    intensity = value["step 4 x 128", "intensity"]
    reached = value["step 4 x 128", "share of peak"] * flops
    x = np.logspace(-1, 3, 200)
    axes.loglog(x, np.minimum(flops, x * bandwidth), color=GREY)
    axes.annotate(f"{bandwidth:.0f} GB/s", (0.4, 0.4 * bandwidth), color=GREY, xytext=(6, -10),
                  textcoords="offset points")
    axes.annotate(f"{flops:.0f} GFLOP/s", (300, flops), color=GREY, xytext=(0, 4), textcoords="offset points")
    axes.plot(intensity, reached, "o", color=BLUE)
    axes.annotate("training step, 4 x 128", (intensity, reached), color=BLUE, xytext=(8, -4),
                  textcoords="offset points")
    axes.set(xlabel="intensity (FLOP/byte, bytes as XLA counts them)", ylabel="GFLOP/s (float32)")
    save(figure, HERE / "figures", "roofline")


def op_kinds(compiled, trace):
    """{kind: ms a step} of the traced operations, sorted into kinds by the JAX operation they come from."""
    names = {}
    for line in compiled.as_text().splitlines():
        head, _, rest = line.strip().partition(" = ")
        if 'op_name="' in rest:
            names[head.removeprefix("ROOT ").lstrip("%")] = (rest.split('op_name="')[1].split('"')[0], rest)
    kinds = {}
    for op in trace["top_ops"]:
        source, text = names.get(op["name"], ("", ""))
        backward = "transpose(jvp" in source
        product = "dot_general" in source or "ynn_fusion" in op["name"] or " dot(" in text
        kind = ("product, backward" if backward else "product, forward") if product else \
            ("element-wise, backward" if backward else "element-wise, forward" if "jvp" in source else
             "optimiser, batch, other")
        kinds[kind] = kinds.get(kind, 0) + op["total_ms"] / trace["steps"]
    return dict(sorted(kinds.items(), key=lambda item: -item[1]))


# Training losses beside the twin ---------------------------------------------------------

def losses(seeds=(0, 1, 2)):
    """Full `cpu` runs of train.py, and the twin trained from the same parameters on the same batches."""
    import subprocess
    corpus, rows = data.load("tiny_shakespeare"), []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            subprocess.run([sys.executable, str(HERE / "train.py"), f"--seed={seed}", "--dataset=tiny_shakespeare",
                            f"--out-dir={folder}/run"], check=True, cwd=folder)
            wall = time.perf_counter() - began
            result = json.loads(Path(folder, "run", "result.json").read_text(encoding="utf-8"))
            curve = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        twin = subprocess.run([sys.executable, str(HERE / "bench.py"), "--twin", str(seed)], check=True,
                              stdout=subprocess.PIPE, text=True)
        rows.append({"seed": seed, "val_loss": result["val_loss"], "wall_s": wall, "compile_s": result["compile_s"],
                     "tokens_per_s": result["tokens_per_s"],
                     "twin_val_loss": json.loads(twin.stdout.splitlines()[-1])["val_loss"],
                     "curve": [[r["step"], r["eval_val_loss"]] for r in curve if "eval_val_loss" in r]})
        print({key: value for key, value in rows[-1].items() if key != "curve"}, flush=True)
    means = {key: statistics.mean(r[key] for r in rows) for key in rows[0] if key not in ("seed", "curve")}
    return {"provenance": profiling.provenance(), "characters": len(corpus.val), "mean": means, "rows": rows}


def train_twin(seed):
    """The twin: train.py's parameters, batches and schedule, PyTorch's autograd and AdamW."""
    import torch
    import torch_twin
    run.prepare_host()
    cfg = dataclasses.replace(SMALL, seed=seed)
    corpus = data.load("tiny_shakespeare")
    keys, ids = train.purpose_keys(seed), jnp.asarray(corpus.train)
    params = jax.tree.map(np.asarray, model.init_params(keys["init"], cfg.model(len(corpus.vocab))))
    batches = jax.jit(jax.vmap(partial(data.sample_batch, ids, keys["batches"], batch_size=cfg.batch_size,
                                       context=cfg.context)))
    x, y = (torch.from_numpy(np.array(a)).long() for a in batches(jnp.arange(cfg.max_iters)))
    lr = np.asarray(jax.jit(jax.vmap(train.schedule(cfg)))(jnp.arange(cfg.max_iters)))
    twin = torch_twin.GPT(len(corpus.vocab), cfg.context, cfg.n_layer, cfg.n_head, cfg.n_embd).load(params)
    optimizer = torch_twin.adamw(twin, cfg.lr, cfg.weight_decay, beta2=0.99)
    for step in range(cfg.max_iters):
        torch_twin.train_step(twin, optimizer, x[step], y[step], float(lr[step]), cfg.grad_clip)
    nats = count = 0
    tokens, targets = (torch.from_numpy(a).long() for a in data.all_windows(corpus.val, cfg.context, model.IGNORE))
    with torch.no_grad():
        for i in range(0, len(tokens), 100):
            y = targets[i:i + 100].flatten()
            logits = twin(tokens[i:i + 100]).flatten(0, 1)
            nats += torch.nn.functional.cross_entropy(logits, y, ignore_index=model.IGNORE, reduction="sum").item()
            count += int((y != model.IGNORE).sum())
    print(json.dumps({"val_loss": nats / count}))


# README ----------------------------------------------------------------------------------

def readme_tables():
    """{name: Markdown} of every table that README.md takes from results/."""
    bench = json.loads((HERE / "results" / "bench.json").read_text(encoding="utf-8"))
    loss = json.loads((HERE / "results" / "losses.json").read_text(encoding="utf-8"))
    older = HERE / "results" / "bench-jax-0.10.json"
    old = {(r["name"], r["baseline"]): r for r in json.loads(older.read_text(encoding="utf-8"))["rows"] if r["metric"] == "ratio"} \
        if older.exists() else {}
    speeds = {r["name"]: r for r in bench["rows"] if r["metric"] == "tokens_per_s"}
    ratios = [r for r in bench["rows"] if r["metric"] == "ratio" and not r["name"].startswith("choice")]
    speed = [{"what": r["name"].replace(", against no cache", "").replace(": jax", ": JAX"),
              "tokens/s": f"{speeds[r['name']]['value']:,.0f}",
              "spread": f"{speeds[r['name']]['min']:,.0f} to {speeds[r['name']]['max']:,.0f}",
              "beside": r["baseline"].split(": ")[1],
              "its tokens/s": f"{speeds[r['baseline']]['value']:,.0f}", "ratio": f"**{r['ratio']:.2f}×**",
              "JAX 0.10": f"{old[r['name'], r['baseline']]['ratio']:.2f}×" if (r["name"], r["baseline"]) in old
              else "not measured"} for r in ratios]
    choices = [{"choice": r["name"].removeprefix("choice: "), "ratio": f"{r['ratio']:.2f}×"}
               for r in bench["rows"] if r["name"].startswith("choice")]
    runs = [{"seed": r["seed"], "validation loss": f"{r['val_loss']:.4f}", "PyTorch twin": f"{r['twin_val_loss']:.4f}",
             "wall time, s": f"{r['wall_s']:.1f}", "of it compiling the step, s": f"{r['compile_s']:.1f}",
             "tokens/s": f"{r['tokens_per_s']:,.0f}"} for r in loss["rows"]]
    values = [[r["val_loss"] for r in loss["rows"]], [r["twin_val_loss"] for r in loss["rows"]]]
    runs.append({"seed": "mean ± s.d.", **{k: f"{statistics.mean(v):.4f} ± {statistics.stdev(v):.4f}"
                                           for k, v in zip(("validation loss", "PyTorch twin"), values)},
                 "wall time, s": f"{loss['mean']['wall_s']:.1f}", "of it compiling the step, s": "", "tokens/s": ""})
    step = [{"quantity": f"{r['name']}: {r['metric']}", "value": f"{r['value']:.3g} {r['unit']}"}
            for r in bench["rows"] if r["name"] in ("step 4 x 128", "machine", "trace 4 x 128")]
    made = bench["provenance"]
    line = (f"`{made['command']}`; {made['cpu']}, {made['cores']} cores, Python {made['python']}, JAX {made['jax']}, "
            f"PyTorch {made['torch']}; load average {made['load']:.1f} at the start; {made['date'][:10]}.")
    ops = [{"op": r["name"], "fusion": r["fusion"] or "", "shape": r["shape"], "KiB": f"{r['bytes'] / 1024:,.0f}",
            "from": (r["op_name"] or "").split("/")[-1]} for r in bench["details"]["op_table"][:8]]
    tables = {"speed": speed, "choices": choices, "losses": runs, "step": step, "ops": ops}
    written = {name: profiling.markdown_table(rows) for name, rows in tables.items()} | {"provenance": line}
    attention = HERE / "results" / "kernels.json"
    if attention.exists():
        import bench_kernels
        written |= bench_kernels.readme_tables(json.loads(attention.read_text(encoding="utf-8")))
    sweep = HERE / "results" / "kernels-sweep.json"
    if sweep.exists():
        import bench_kernels
        written["sweep"] = bench_kernels.sweep_table(json.loads(sweep.read_text(encoding="utf-8"))["rows"])
    ports = HERE / "results" / "ports.json"
    if ports.exists():
        import bench_ports
        written["ports"] = bench_ports.readme_table(json.loads(ports.read_text(encoding="utf-8")))
    return written


def draw_losses(loss):
    """Validation loss over the runs of losses.json, with the twin's final value as a line."""
    figure, axes = new_axes()
    for r, colour in zip(loss["rows"], (BLUE, ORANGE, GREEN)):
        axes.plot(*zip(*r["curve"]), color=colour, marker="o", markersize=3, label=f"seed {r['seed']}")
    axes.axhline(loss["mean"]["twin_val_loss"], color=GREY, linestyle="--")
    axes.annotate("PyTorch twin at the end, mean", (250, loss["mean"]["twin_val_loss"]), color=GREY, xytext=(0, 4),
                  textcoords="offset points")
    axes.set(xlabel="step", ylabel="validation loss (nats a character)")
    axes.legend(frameon=False)
    save(figure, HERE / "figures", "losses")


def write_readme():
    """Draws the figures and puts each table between its marks, <!-- table:NAME --> and <!-- /table -->."""
    draw(json.loads((HERE / "results" / "bench.json").read_text(encoding="utf-8")))
    draw_losses(json.loads((HERE / "results" / "losses.json").read_text(encoding="utf-8")))
    path = HERE / "README.md"
    text = path.read_text(encoding="utf-8")
    for name, table in readme_tables().items():
        before, mark, rest = text.partition(f"<!-- table:{name} -->\n")
        if mark:
            text = before + mark + table.rstrip() + "\n" + rest[rest.index("<!-- /table -->"):]
    path.write_text(text, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--quick", "--choices", "--losses", "--ports", "--kernels", "--readme"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--twin", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(json.loads(args.worker))
    if args.twin is not None:
        return train_twin(args.twin)
    if args.readme:
        return write_readme()
    run.prepare_host()
    if args.kernels:
        import bench_kernels
        bench_kernels.measure_all()
        return write_readme() if (HERE / "results" / "bench.json").exists() else None
    if args.ports:
        import bench_ports
        run.write_json(HERE / "results" / "ports.json", bench_ports.measure_all())
        return write_readme()
    if args.losses:
        loss = losses()
        (HERE / "results").mkdir(exist_ok=True)
        run.write_json(HERE / "results" / "losses.json", loss)
        return write_readme() if (HERE / "results" / "bench.json").exists() else None
    if args.choices:
        path = HERE / "results" / "bench.json"
        bench = json.loads(path.read_text(encoding="utf-8"))
        bench["details"]["choices_provenance"] = profiling.provenance()
        bench["rows"] = [r for r in bench["rows"] if not r["name"].startswith("choice")] + choice_rows(rounds=5)
        run.write_json(path, bench)
        return write_readme()
    provenance = profiling.provenance()  # before anything runs: the load average is that of the quiet machine
    reference = jax.__version_info__ >= (0, 12)  # older versions: only the ratios, to stand beside the reference's
    rounds = 2 if args.quick else 5 if reference else 3
    rows, details = training_rows(rounds) + generation_rows(rounds), {}
    if reference or args.quick:
        profile, details = profile_rows()
        rows += profile + choice_rows(rounds)
    folder, name = (Path("out"), "bench-quick.json") if args.quick else \
        (HERE / "results", "bench.json" if reference else "bench-jax-0.10.json")
    folder.mkdir(exist_ok=True)
    run.write_json(folder / name, {"provenance": provenance, "rows": rows, "details": details})
    if reference and not args.quick and (HERE / "results" / "losses.json").exists():
        write_readme()


if __name__ == "__main__":
    main()
