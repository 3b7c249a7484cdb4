"""Measures the forms of the layer beside a loop over experts in PyTorch, what they cost as E and T grow, and training.

    python bench.py                # results/bench.json, figures/, the tables of README.md
    python bench.py --quick        # the same rows from fewer rounds, to out/bench-quick.json
    python bench.py --losses       # full runs of train.py and what is read off them: results/losses.json, routing.json
    python bench.py --losses PART  # only some: main, sizes, choices, time, or a run such as moe-s1
    python bench.py --parallel     # collectives of expert_parallel.py, counted and priced: results/parallel.json
    python bench.py --kernels      # what libtpu predicts for the Pallas kernels: results/kernels.json
    python bench.py --figures      # only draws the figures anew from results/
    python bench.py --readme       # the figures, and the tables of README.md

Finished runs of --losses are kept in out/losses-*/ and not repeated, so it can be done in parts.

Legend: B sequences, T tokens a sequence, D model, F hidden of an expert, E experts, k choices a token, L layers,
V vocabulary.
Speed is a ratio of medians of interleaved runs (A B A B ...): each side in a process of its own with the same malloc
settings, variants of the JAX layer in one. Close other programs first: the load average stands in the result.
"""
import argparse
import contextlib
import dataclasses
import json
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

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))  # for common/

import bench_report
import data
import model
import run
import sample
import train
from common import profiling

RESULTS = bench_report.RESULTS
D, F, K = 128, 512, 2  # of the layer that is measured: width, hidden units of an expert, choices
E, T = 8, 1024
FORMS, LOOP = ("einsum", "gather", "dropless"), "PyTorch loop"
VOCAB = 65  # symbols of tiny Shakespeare
# Where the cost of the layer is looked at: along E at T = 1,024, and along T at E = 8.
POINTS = [(e, T) for e in (2, 4, 8, 16, 32)] + [(E, t) for t in (256, 512, 2048)]


# The layer -------------------------------------------------------------------------------

def layer_config(form, n_experts=E, tokens=T, **changes):
    return model.MoEConfig(vocab_size=1, context=tokens, n_layer=1, n_head=1, n_embd=D, n_hidden=F,
                           n_experts=n_experts, top_k=K, dispatch=form, **changes)


def layer_arrays(n_experts=E, tokens=T):
    """x and g (1, T, D), one group, and a layer's parameters, as NumPy float32: a PyTorch worker starts no JAX."""
    rng = np.random.default_rng(0)

    def normal(*shape, std=1.0):
        return std * rng.standard_normal(shape, np.float32)
    p = {"w_router": normal(D, n_experts, std=0.02), "w_in": normal(n_experts, D, F, std=0.02),
         "w_out": normal(n_experts, F, D, std=0.02)}
    return normal(1, tokens, D), p, normal(1, tokens, D)


def outputs_and_gradients(x, p, g, cfg):
    """y (B, T, D), and the gradients of <g, y> with respect to x and to every parameter: forward and backward pass.
    Without auxiliary losses, which the loop beside it doesn't have."""
    y, pull = jax.vjp(lambda x, p: model.moe_layer(x, p, cfg)[0], x, p)
    return y, pull(g)


def jax_layer(form, n_experts=E, tokens=T, **changes):
    """(step, compiled): step() makes one pass forward and backward and waits for it."""
    cfg, arrays = layer_config(form, n_experts, tokens, **changes), jax.device_put(layer_arrays(n_experts, tokens))
    # A lambda of its own: jit remembers what a function was traced to, and a variant must be traced anew.
    compiled = jax.jit(lambda *arrays: outputs_and_gradients(*arrays, cfg)).lower(*arrays).compile()
    return lambda: jax.block_until_ready(compiled(*arrays)), compiled


def torch_layer(n_experts=E, tokens=T):
    """step() of the loop over experts: the same pass, with the same numbers; returns y and x's gradient."""
    import torch
    import torch_twin
    x, p, g = layer_arrays(n_experts, tokens)
    loop = torch_twin.MoELoop(D, F, n_experts, K).load(p)
    x, g = (torch.from_numpy(a[0]) for a in (x, g))
    x.requires_grad_()

    def step():
        loop.zero_grad(set_to_none=True)
        x.grad = None
        y = loop(x)
        y.backward(g)
        return y, x.grad
    return step


# Workers: one process a side -------------------------------------------------------------

def worker(spec):
    """spec: {"side", "seconds"} and what a side may add; sets up, then serves measured runs."""
    run.prepare_host()
    {"layer": serve_layer, "costs": serve_costs, "variants": serve_variants, "train": serve_train,
     "torch train": serve_torch_train}[spec["side"]](spec)


def serve_steps(step, tokens, seconds, **more):
    """Serves runs of about `seconds` of steps, after half as many that don't count: the first steps of a process are
    slower than the rest. tokens: of a step; more: further numbers to serve with each run."""
    def per_step(n):
        began = time.perf_counter()
        for _ in range(n):
            step()
        return (time.perf_counter() - began) / n
    per_step(2)
    n = max(3, round(seconds / per_step(3)))

    def once():
        per_step(-(-n // 2))
        s = per_step(n)
        return {"ms": 1e3 * s, "tokens_per_s": tokens / s, **more}
    profiling.serve(once)


def serve_layer(spec):
    if spec["form"] == LOOP:
        return serve_steps(torch_layer(), T, spec["seconds"], dropped=0.0)
    (x, p, _), cfg = layer_arrays(), layer_config(spec["form"])
    dropped = float(jax.jit(lambda x, p: model.moe_layer(x, p, cfg)[1]["dropped"])(x, p))
    serve_steps(jax_layer(spec["form"])[0], T, spec["seconds"], dropped=dropped)


def point(n_experts, tokens):
    return f"E {n_experts}, T {tokens}"


def serve_costs(spec):
    """Serves {"point": ms} over POINTS, which take turns, and of our forms {"point, MiB": XLA's temporaries}."""
    programs, memory = {}, {}
    for n_experts, tokens in POINTS:
        name = point(n_experts, tokens)
        if spec["form"] == LOOP:
            programs[name] = torch_layer(n_experts, tokens)
        else:
            programs[name], compiled = jax_layer(spec["form"], n_experts, tokens)
            memory[f"{name}, MiB"] = compiled.memory_analysis().temp_size_in_bytes / 2**20
    ms = in_turns(programs, spec["turns"], spec["seconds"])
    profiling.serve(lambda: {name: statistics.median(times) for name, times in ms.items()} | memory)


def in_turns(programs, turns, seconds):
    """{name: ms, one a turn} of programs, {name: function that runs one and waits}. They take turns, so that a slow
    spell of the machine meets all of them."""
    for program in programs.values():
        program()
    ms = {name: [] for name in programs}
    for _ in range(turns):
        for name, program in programs.items():
            program()  # the one before has left its data in the caches
            began, n = time.perf_counter(), 0
            while n == 0 or time.perf_counter() - began < seconds:
                program()
                n += 1
            ms[name].append(1e3 * (time.perf_counter() - began) / n)
    return ms


def random_text():
    return jax.random.randint(jax.random.key(0), (100_000,), 0, VOCAB).astype(jnp.uint8)


def serve_train(spec):
    """Training steps as train.py makes them, DISPATCH at a time."""
    cfg = train.PRESETS[spec["preset"]]
    model_cfg = cfg.model(VOCAB)
    ids, zero = random_text(), jnp.int32(0)
    box = {"state": train.init_state(cfg, model_cfg), "step": 0}
    compiled = train.train_steps.lower(box["state"], ids, zero, zero, cfg, model_cfg).compile()

    def step():
        first, box["step"] = box["step"], box["step"] + train.DISPATCH
        box["state"], got = compiled(box["state"], ids, np.int32(first), np.int32(box["step"]))
        jax.block_until_ready(got)
    serve_steps(step, train.DISPATCH * cfg.batch_size * cfg.context, spec["seconds"])


def serve_torch_train(spec):
    import torch
    import torch_twin
    cfg = train.PRESETS[spec["preset"]]
    model_cfg = cfg.model(VOCAB)
    network = torch_twin.GPT(model_cfg).load(train.init_state(cfg, model_cfg)["params"])
    optimizer = torch_twin.adamw(network, cfg.lr, cfg.weight_decay, beta2=0.99)
    ids = torch.randint(0, VOCAB, (100_000,))

    def step():
        starts = torch.randint(len(ids) - cfg.context, (cfg.batch_size,))
        x, y = (torch.stack([ids[i + ahead:i + ahead + cfg.context] for i in starts]) for ahead in (0, 1))
        torch_twin.train_step(network, optimizer, x, y, cfg.lr, cfg.grad_clip)
    serve_steps(step, cfg.batch_size * cfg.context, spec["seconds"])


def compare(specs, rounds, seconds):
    """profiling.compare with a fresh process for each run: a worker that waits would lose its huge pages."""
    commands = {name: [sys.executable, str(HERE / "bench.py"), "--worker", json.dumps({"seconds": seconds, **spec})]
                for name, spec in specs.items()}
    env = {name: {"JAX_PLATFORMS": "cpu"} for name in specs}
    return profiling.compare(commands, rounds=rounds, env=env, fresh=True)


# Variants of the layer -------------------------------------------------------------------

@contextlib.contextmanager
def patched(functions):
    """Within it model.py calls these in place of its own functions of the same names. It must surround tracing; what
    was traced before is forgotten, and so is what was traced within."""
    original = dict(vars(model))
    vars(model).update(functions)
    jax.clear_caches()
    try:
        yield
    finally:
        vars(model).update(original)
        jax.clear_caches()


def plain_to_slots(x, slots, choices):
    """model.to_slots with its gradient left to JAX, which scatters and adds."""
    return model.rows_at(x, choices // slots.shape[1])


def plain_from_slots(out, gates, slots, choices):
    """model.from_slots likewise."""
    return (gates[..., None] * model.widen(model.rows_at(out, slots))).sum(1).astype(out.dtype)


def plain_matmul(x, w):
    """model.matmul likewise."""
    return x @ w.astype(x.dtype)


AS_IT_IS = "as train.py runs it"
VARIANTS = {AS_IT_IS: {},
            "gradients of the gathers left to JAX": {
                "patches": {"to_slots": plain_to_slots, "from_slots": plain_from_slots}},
            "gradients of the products left to JAX": {"patches": {"matmul": plain_matmul}},
            "capacity factor 1": {"capacity_factor": 1.0},
            "capacity factor 4: nothing is ever dropped": {"capacity_factor": E / K},
            "first choices first": {"priority": "choice"},
            "experts choose": {"form": "expert_choice"}}


def variant(form="gather", patches=None, **changes):
    """step() of the layer in one of VARIANTS."""
    if not patches:
        return jax_layer(form, **changes)[0]
    with patched(patches):
        return jax_layer(form, **changes)[0]


def serve_variants(spec):
    """Serves {variant: ms a step} and {"ratio: variant": median over the turns of AS_IT_IS's time by the variant's}.
    All variants live in one process and take turns: far steadier than processes that wait for each other."""
    ms = in_turns({name: variant(**options) for name, options in VARIANTS.items()}, spec["turns"], spec["seconds"])
    result = {name: statistics.median(times) for name, times in ms.items()}
    result |= {f"ratio: {name}": statistics.median(a / b for a, b in zip(ms[AS_IT_IS], times))
               for name, times in ms.items()}
    profiling.serve(lambda: result)


# Rows ------------------------------------------------------------------------------------

def row(name, metric, value, unit, baseline=None, ratio=None, predicted=False):
    """One row of the results; ratio > 1 means better than the baseline."""
    print(f"{name:50} {metric:16} {value:12,.4g} {unit:9}" + (f" {ratio:.2f}x {baseline}" if ratio else ""), flush=True)
    return {"name": name, "metric": metric, "value": value, "unit": unit, "baseline": baseline, "ratio": ratio,
            "predicted": predicted}


def against(title, specs, baselines, rounds, seconds):
    """Rows of every side, and a row of the ratio for each pair (side, baseline)."""
    got = compare(specs, rounds, seconds)
    rows = []
    for name in specs:
        side = got["sides"][name]
        speed = side["tokens_per_s"]
        rows.append(row(f"{title}: {name}", "tokens_per_s", speed["median"], "tokens/s"))
        rows[-1].update(min=speed["min"], max=speed["max"], rounds=rounds, load=got["load_before"])
        if "dropped" in side:
            rows[-1]["dropped"] = side["dropped"]["median"]
    for name, baseline in baselines:
        ratio = profiling.ratio(got, "tokens_per_s", name, baseline)
        rows.append(row(f"{title}: {name}", "ratio", ratio, "x", f"{title}: {baseline}", ratio))
    return rows


def layer_rows(rounds, seconds):
    sides = (LOOP, *FORMS)
    return against("layer", {form: {"side": "layer", "form": form} for form in sides},
                   [(form, LOOP) for form in FORMS], rounds, seconds)


def train_rows(rounds, seconds):
    specs = {f"{preset}, {name}": {"side": side, "preset": preset} for preset in ("moe", "dense")
             for name, side in (("JAX", "train"), ("PyTorch", "torch train"))}
    pairs = [(f"{preset}, JAX", f"{preset}, PyTorch") for preset in ("moe", "dense")] + [("moe, JAX", "dense, JAX")]
    return against("train", specs, pairs, rounds, seconds)


def cost_rows(rounds, turns, seconds):
    got = compare({form: {"side": "costs", "form": form, "turns": turns} for form in (LOOP, *FORMS)}, rounds,
                  seconds)["sides"]
    rows = []
    for n_experts, tokens in POINTS:
        at = point(n_experts, tokens)
        loop = got[LOOP][at]["median"]
        for form in (LOOP, *FORMS):
            ms = got[form][at]["median"]
            against_loop = (f"cost, {at}: {LOOP}", loop / ms) if form != LOOP else ()
            rows.append(row(f"cost, {at}: {form}", "us_per_token", 1e3 * ms / tokens, "us", *against_loop))
            memory = got[form].get(f"{at}, MiB", {}).get("median")  # PyTorch doesn't say
            rows[-1].update(E=n_experts, T=tokens, form=form, temporaries_MiB=memory)
    return rows


def variant_rows(turns, seconds):
    taken = compare({"it": {"side": "variants", "turns": turns}}, 1, seconds)["sides"]["it"]
    got = {name: s["median"] for name, s in taken.items()}
    return [row(f"variant: {name}", "ms", got[name], "ms",
                *(() if name == AS_IT_IS else (f"variant: {AS_IT_IS}", got[f"ratio: {name}"]))) for name in VARIANTS]


# Profile of the training step ------------------------------------------------------------

# What each function's operations are for; of functions that call each other the inner one decides.
SCOPES = {"block": "attention and norms", "moe_layer": "experts", "route": "router", "balance_loss": "router",
          "z_loss": "router", "load_of": "router", "queue_positions": "finding places", "inverse": "finding places",
          "to_slots": "moving rows", "from_slots": "moving rows"}
OUTSIDE, OTHER = "embedding, head and loss", "optimiser, batch and other"


def scoped_step(cfg):
    """The compiled training step in which the op_name of an operation tells the functions of SCOPES it came from."""
    model_cfg = cfg.model(VOCAB)
    shapes = jax.eval_shape(partial(train.init_state, cfg, model_cfg))
    ids, step = jax.ShapeDtypeStruct((100_000,), jnp.uint8), jax.ShapeDtypeStruct((), jnp.int32)
    with patched({name: jax.named_scope(f"scope_{name}")(getattr(model, name)) for name in SCOPES}):
        return train.train_step.lower(shapes, ids, step, cfg, model_cfg).compile()


def kind_of(op):
    """What an operation is for; op: a row of profiling.op_table of a `scoped_step`."""
    source = op["op_name"] or ""
    scopes = re.findall(r"scope_(\w+)", source)
    if not scopes:
        return OUTSIDE if "jvp(" in source else OTHER
    kind = SCOPES[scopes[-1]]
    product = "dot_general" in source or "ynn" in op["name"]  # YNNPACK, which XLA:CPU hands its products to
    return f"{kind}, products" if kind == "experts" and product else kind


def step_flops(cfg):
    """FLOPs of one training step, counted from the shapes: the backward pass twice the forward one. Element-wise work,
    and what empty slots cost, isn't counted."""
    return 3 * cfg.batch_size * cfg.context * model.flops_per_token(cfg.model(VOCAB))


def profile_rows():
    """Rows of compile time, speed and roofline of both presets' steps; of the MoE step the trace, and details."""
    top = profiling.measure_cpu_peak("float32", seconds=2)
    rows = [row("machine", "peak float32", top.flops_per_s / 1e9, "GFLOP/s"),
            row("machine", "peak bandwidth", top.bytes_per_s / 1e9, "GB/s")]
    ids, step = random_text(), jnp.int32(0)
    for preset in ("moe", "dense"):
        cfg = train.PRESETS[preset]
        model_cfg = cfg.model(VOCAB)
        jitted = jax.jit(lambda *args: train.train_step(*args, cfg, model_cfg), donate_argnums=0)
        timing = profiling.measure(jitted, lambda: (train.init_state(cfg, model_cfg), ids, step), n=30)
        compiled, flops = scoped_step(cfg), step_flops(cfg)
        memory, name = compiled.memory_analysis(), f"step {preset}"
        reached = flops / timing.median_s
        rows += [row(name, "compile", timing.compile_s, "s"), row(name, "first call", 1e3 * timing.first_s, "ms"),
                 row(name, "median", 1e3 * timing.median_s, "ms"), row(name, "p90", 1e3 * timing.p90_s, "ms"),
                 row(name, "FLOPs", flops / 1e9, "GFLOP"), row(name, "reached", reached / 1e9, "GFLOP/s"),
                 row(name, "share of peak", reached / top.flops_per_s, ""),
                 row(name, "intensity", flops / profiling.cost(compiled)["bytes"], "FLOP/byte"),
                 row(name, "state", memory.alias_size_in_bytes / 2**20, "MiB"),
                 row(name, "temporaries", memory.temp_size_in_bytes / 2**20, "MiB")]
        if preset == "moe":
            traced = compiled

    cfg = train.MOE
    state = train.init_state(cfg, cfg.model(VOCAB))
    with tempfile.TemporaryDirectory() as folder:
        for i in range(11):
            if i == 3:
                tracing = profiling.trace(folder)
                tracing.__enter__()
            with jax.profiler.StepTraceAnnotation("train", step_num=i):
                state, got = traced(state, ids, jnp.int32(i))
                jax.block_until_ready(got)
        tracing.__exit__(None, None, None)
        trace = profiling.read_trace(folder, top=10_000)
    rows += [row("trace moe", name, trace[f"{name}_ms"], "ms") for name in ("wall", "busy", "gap", "host")]
    known, ops, kinds = {op["name"]: op for op in profiling.op_table(traced, top=100_000)}, [], {}
    for op in trace["top_ops"]:
        op = {"shape": "", "op_name": None, **known.get(op["name"], {}), "ms": op["total_ms"] / trace["steps"],
              "name": op["name"]}
        op["kind"] = kind_of(op)
        ops.append({key: op[key] for key in ("name", "kind", "shape", "ms")})
        kinds[op["kind"]] = kinds.get(op["kind"], 0) + op["ms"]
    largest = [{key: op[key] for key in ("name", "shape", "bytes", "op_name")} | {"kind": kind_of(op)}
               for op in profiling.op_table(traced, top=8)]
    return rows, {"ops": ops[:12], "largest": largest,
                  "step_ms_by_kind": dict(sorted(kinds.items(), key=lambda item: -item[1]))}


# Full runs -------------------------------------------------------------------------------

PARTS = {
    "main": {f"{preset}-s{seed}": (f"--preset={preset}", f"--seed={seed}")
             for preset in ("moe", "dense") for seed in (0, 1, 2)},
    "sizes": {**{f"dense-{hidden}": ("--preset=dense", f"--n-hidden={hidden}") for hidden in (256, 1024, 2048)},
              **{f"moe-{n}": (f"--n-experts={n}",) for n in (4, 16)}, "switch": ("--preset=switch",)},
    "choices": {"unbalanced": ("--balance-weight=0",), "capacity-1": ("--capacity-factor=1",),
                "capacity-4": ("--capacity-factor=4",), "first-choices": ("--priority=choice",),
                "expert-choice": ("--dispatch=expert_choice",)},
    "time": {"dense-time": ("--preset=dense",)},  # for as many steps as fit in the training time of `moe`
}
RUNS = {name: flags for part in PARTS.values() for name, flags in part.items()}
SHOWN, WITHOUT_BALANCE = "moe-s0", "unbalanced"  # the runs whose load is drawn
KEPT = ("dataset", "steps", "seed", "val_loss", "train_loss", "params", "active_params", "dropped", "load_entropy",
        "tokens_per_s", "compile_s", "wall_s")


def run_folder(name):
    return Path("out") / f"losses-{name}"


def finished(name):
    """A run's result.json, or None where it isn't done."""
    path = run_folder(name) / "result.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def script(name, *arguments):
    """Runs one of this folder's scripts. Where it fails it has said why: this one ends with the same status."""
    status = subprocess.run([sys.executable, str(HERE / name), *arguments]).returncode
    if status:
        sys.exit(status)


def steps_in_the_same_time():
    """How many steps the dense model makes while `moe` makes its own, by the tokens/s of the main runs."""
    speeds = {preset: [result["tokens_per_s"] for seed in (0, 1, 2) if (result := finished(f"{preset}-s{seed}"))]
              for preset in ("moe", "dense")}
    if not all(speeds.values()):
        run.fail("dense-time needs the speed of moe and dense: run bench.py --losses main first")
    return round(train.MOE.max_iters * statistics.median(speeds["dense"]) / statistics.median(speeds["moe"]))


def losses(part):
    """The runs of `part` that are not done yet, each train.py in a process of its own; then results/losses.json from
    all that are done. A run that was cut starts anew: its times are those of one process."""
    RESULTS.mkdir(exist_ok=True)
    for name in PARTS.get(part) or ([part] if part in RUNS else RUNS):
        folder, flags = run_folder(name), RUNS[name]
        if finished(name) is None:
            if name in PARTS["time"]:
                flags = (*flags, f"--max-iters={steps_in_the_same_time()}")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            run.write_json(folder / "machine.json", profiling.provenance())
            script("train.py", *flags, "--dataset=tiny_shakespeare", "--out-dir", str(folder))
        if name == SHOWN:
            run.write_json(RESULTS / "routing.json", routing_of(folder))
    rows = [read_run(name) for name in RUNS if finished(name)]
    run.write_json(RESULTS / "losses.json", {"provenance": profiling.provenance(), "rows": rows})


def read_run(name):
    """One row of losses.json from a finished run's folder: its result, the machine's load at its start, its curves."""
    folder, result = run_folder(name), finished(name)
    machine = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    entry = {"run": name, "flags": list(RUNS[name]), **{key: result[key] for key in KEPT},
             "machine_load": machine["load"],
             "curve": [[line["step"], round(line["eval_val_loss"], 4)] for line in lines if "eval_val_loss" in line]}
    if name in (SHOWN, WITHOUT_BALANCE):
        logged = [line for line in lines if "load" in line]
        entry["load_curve"] = [[line["step"], np.round(line["load"], 4).tolist()] for line in logged]  # (L, E) each
        entry["dropped_curve"] = [[line["step"], round(line["dropped"], 4)] for line in logged]
    return entry


def choices_of(params, tokens, cfg):
    """The experts that each layer's router chooses: tokens (B, T) -> (L, B, T, k) int32."""
    made, own = [], model.route

    def note(*args):
        made.append(own(*args))
        return made[-1]
    model.route = note
    try:
        model.forward(params, tokens, cfg)
    finally:
        model.route = own
    return jnp.stack([routing.experts for routing in made])


def shares_of(params, tokens, cfg):
    """(L, V, E): which share of the choices of each character falls on each expert; zeros for absent characters."""
    counts = np.zeros((cfg.n_layer, cfg.vocab_size, cfg.n_experts))
    choose = jax.jit(partial(choices_of, cfg=cfg))
    for first in range(0, len(tokens), 256):
        some = tokens[first:first + 256]
        chosen = np.asarray(choose(params, some))  # (L, B, T, k)
        for layer, experts in enumerate(chosen):
            np.add.at(counts[layer], (np.broadcast_to(some[..., None], experts.shape), experts), 1)
    return counts / np.maximum(counts.sum(-1, keepdims=True), 1)


def routing_of(folder, most=40):
    """What a finished run says, and where characters of the validation part go before and after it. {"sample": text,
    "k": choices a token, "characters": the `most` frequent ones, most frequent first, "before", "after": (L,
    characters, E) shares}."""
    cfg, checkpoints = run.load_config(folder, train.Config), run.Checkpoints(folder)
    corpus = data.load(cfg.dataset, cfg.data_dir)
    model_cfg = cfg.model(len(corpus.vocab))
    before = train.init_state(cfg, model_cfg)["params"]
    after = checkpoints.restore("latest", {"params": before})[0]["params"]
    checkpoints.close()
    tokens = data.all_windows(corpus.val, cfg.context, model.IGNORE)[0][:-1]  # the last one may be padded
    frequent = np.argsort(-np.bincount(tokens.reshape(-1), minlength=len(corpus.vocab)), kind="stable")[:most]
    shares = {name: np.round(shares_of(params, tokens, model_cfg)[:, frequent], 4).tolist()
              for name, params in (("before", before), ("after", after))}
    ask = sample.SampleConfig(prompt="ROMEO:", max_new_tokens=300)
    text = ask.prompt + sample.continuations(after, model_cfg, corpus.vocab, ask)[0]
    return {"provenance": profiling.provenance(), "run": SHOWN, "k": cfg.top_k, "sample": text,
            "characters": [corpus.vocab[i] for i in frequent], **shares}


# Expert parallel -------------------------------------------------------------------------

def parallel_rows(devices=8, batch=16, tokens=64, embd=128, hidden=256):
    """Collectives of the layer on simulated devices: their number and bytes as the compiled program has them, and the
    time that those bytes take on a ring of TPU v5e, predicted. Needs `devices` CPU devices."""
    import expert_parallel
    cfg = model.MoEConfig(vocab_size=VOCAB, context=tokens, n_layer=1, n_head=1, n_embd=embd, n_hidden=hidden,
                          n_experts=devices)
    got = expert_parallel.report(expert_parallel.expert_mesh(devices), cfg, batch)
    rows, table = [], []
    for program in ("forward", "gradient"):
        for op in sorted({op for op, _ in got[program]}):
            sizes = [size for found, size in got[program] if found == op]
            seconds = sum(expert_parallel.ring_seconds(op, size, devices) for size in sizes)
            table.append({"program": program, "collective": op, "number": len(sizes), "bytes": sum(sizes),
                          "seconds": seconds})
            name = f"expert parallel, {program}: {op}"
            rows += [row(name, "bytes a device", sum(sizes), "bytes"),
                     row(name, "time", 1e6 * seconds, "us", predicted=True)]
    return {"provenance": profiling.provenance(), "rows": rows, "table": table, "devices": devices, "B": batch,
            "T": tokens, "errors": got["errors"], "expert_bytes": got["expert_bytes"]}


# Command line ----------------------------------------------------------------------------

def measure_all(quick):
    provenance = profiling.provenance()  # before anything runs: the load average is that of the quiet machine
    profile, details = profile_rows()  # first, as a process that has waited loses its huge pages
    rows = layer_rows(*((1, 0.5) if quick else (5, 2.0)))
    rows += train_rows(*((1, 1.0) if quick else (5, 4.0)))
    rows += variant_rows(*((3, 0.05) if quick else (15, 0.3)))
    rows += cost_rows(*((1, 2, 0.02) if quick else (3, 5, 0.2)))
    folder, name = (Path("out"), "bench-quick.json") if quick else (RESULTS, "bench.json")
    folder.mkdir(exist_ok=True)
    run.write_json(folder / name, {"provenance": provenance, "rows": rows + profile, "details": details})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--quick", "--parallel", "--kernels", "--figures", "--readme"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--losses", nargs="?", const="all", metavar="PART", choices=("all", *PARTS, *RUNS))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(json.loads(args.worker))
    run.prepare_host()
    if args.losses:
        losses(args.losses)
    elif args.parallel:
        jax.config.update("jax_num_cpu_devices", 8)  # before the first computation
        RESULTS.mkdir(exist_ok=True)
        run.write_json(RESULTS / "parallel.json", parallel_rows())
    elif args.kernels:
        import bench_kernels
        bench_kernels.measure_all()
    elif not (args.figures or args.readme):
        measure_all(args.quick)
    if not args.quick:
        bench_report.draw_all()
    if not (args.quick or args.figures):
        bench_report.write_readme()


if __name__ == "__main__":
    main()
