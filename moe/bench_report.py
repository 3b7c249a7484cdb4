"""Figures and tables of README.md, from what bench.py left in results/: `python bench.py --readme`.

Of a file that results/ doesn't hold yet no figure is drawn, and its tables say so.
"""
import json
import statistics
from pathlib import Path

import numpy as np

from common import profiling

HERE = Path(__file__).resolve().parent
RESULTS, FIGURES = HERE / "results", HERE / "figures"

BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#777777"  # Okabe-Ito, and a grey
FORMS = {"PyTorch loop": GREY, "einsum": ORANGE, "gather": BLUE, "dropless": GREEN}  # as bench.py names them


def read(name):
    """A file of results/, or None where it isn't there."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


# Figures ---------------------------------------------------------------------------------

def new_axes(height=3.0, **grid):
    import matplotlib
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "moe", "font.size": 9})  # the same data give the same file
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(figsize=(6, height), layout="constrained", **grid)
    for each in np.ravel(axes):
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure, name):
    import matplotlib.pyplot as plt
    FIGURES.mkdir(exist_ok=True)
    figure.savefig(FIGURES / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def plain_numbers(axis):
    """Labels of a logarithmic axis as 2, 5, 10, also where it spans less than a decade."""
    from matplotlib.ticker import LogFormatter
    axis.set_major_formatter(LogFormatter())
    axis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.4)))


def ticks_at(axis, values):
    """Only these ticks on a logarithmic axis."""
    axis.set_ticks(values, labels=[f"{v:,}" for v in values])
    axis.set_ticks([], minor=True)


def draw_cost(bench):
    """Cost of a token in each form, as E and as T grow."""
    rows = [r for r in bench["rows"] if r["metric"] == "us_per_token"]
    base = {"E": 8, "T": 1024}
    figure, panels = new_axes(3.0, ncols=2, sharey=True)
    for axes, letter, other, label in zip(panels, "ET", "TE", ("experts E", "tokens of a group T")):
        for form, colour in FORMS.items():
            points = sorted((r[letter], r["value"]) for r in rows if r["form"] == form and r[other] == base[other])
            axes.loglog(*zip(*points), color=colour, marker="o", markersize=3)
            if letter == "E":  # the curves end far enough from each other here
                axes.annotate(form, points[-1], xytext=(4, 0), textcoords="offset points", color=colour, va="center",
                              fontsize=8, annotation_clip=False)
        ticks_at(axes.xaxis, sorted({r[letter] for r in rows if r[other] == base[other]}))
        axes.set(xlabel=f"{label} ({other} = {base[other]:,})")
    panels[0].set_ylabel("µs a token, forward and backward")
    plain_numbers(panels[0].yaxis)
    save(figure, "cost")


def draw_roofline(bench):
    value = {(r["name"], r["metric"]): r["value"] for r in bench["rows"]}
    flops, bandwidth = value["machine", "peak float32"], value["machine", "peak bandwidth"]
    figure, axes = new_axes()
    x = np.logspace(-0.5, 2.5, 200)
    axes.loglog(x, np.minimum(flops, x * bandwidth), color=GREY)
    axes.annotate(f"{bandwidth:.0f} GB/s", (0.6, 0.6 * bandwidth), color=GREY, xytext=(8, -6),
                  textcoords="offset points")
    axes.annotate(f"{flops:.0f} GFLOP/s", (100, flops), color=GREY, xytext=(0, 4), textcoords="offset points")
    for preset, colour in (("moe", BLUE), ("dense", ORANGE)):
        at = value[f"step {preset}", "intensity"], value[f"step {preset}", "reached"]
        axes.plot(*at, "o", color=colour)
        axes.annotate(f"training step, {preset}", at, color=colour, xytext=(8, -4), textcoords="offset points")
    axes.set(xlabel="intensity (FLOP/byte, bytes as XLA counts them)", ylabel="GFLOP/s (float32)")
    plain_numbers(axes.xaxis)
    plain_numbers(axes.yaxis)
    save(figure, "roofline")


def draw_trace(bench):
    kinds = bench["details"]["step_ms_by_kind"]
    names = list(kinds)[::-1]
    figure, axes = new_axes(2.6)
    routing = ("router", "finding places", "moving rows")
    axes.barh(names, [kinds[n] for n in names], color=[ORANGE if n in routing else BLUE for n in names])
    for i, n in enumerate(names):
        axes.text(kinds[n], i, f" {kinds[n]:.1f} ms", va="center")
    axes.set(xlabel="ms a step, on the thread that launches the operation")
    axes.set_xlim(0, 1.15 * max(kinds.values()))
    save(figure, "trace")


def draw_losses(rows):
    """Validation loss over the main runs; three seeds each."""
    figure, axes = new_axes()
    for preset, colour, line in (("moe", BLUE, 0), ("dense", ORANGE, 1)):
        for r in rows:
            if r["run"].startswith(f"{preset}-s"):
                axes.plot(*zip(*r["curve"]), color=colour, marker="o", markersize=2.5, linewidth=1)
        axes.text(0.98, 0.94 - 0.08 * line, preset, color=colour, transform=axes.transAxes, ha="right")
    axes.set(xlabel="step", ylabel="validation loss (nats a character)")
    save(figure, "losses")


def draw_loads(rows):
    """Each expert's share of the choices over training, with and without the balance loss, and what is dropped."""
    runs = {r["run"]: r for r in rows if "load_curve" in r}
    names = [name for name in ("moe-s0", "unbalanced") if name in runs]
    if not names:
        return
    figure, panels = new_axes(3.0, ncols=3)
    panels[1].sharey(panels[0])
    for axes in panels[len(names):2]:
        axes.set_visible(False)
    for axes, name, heading in zip(panels, names, ("with the balance loss", "without")):
        steps, load = [step for step, _ in runs[name]["load_curve"]], np.array([a for _, a in runs[name]["load_curve"]])
        for layer, colour in enumerate((BLUE, ORANGE, GREEN, PURPLE)[:load.shape[1]]):
            axes.plot(steps, 100 * load[:, layer], color=colour, linewidth=0.7)
            axes.text(0.98, 0.94 - 0.07 * layer, f"layer {layer + 1}", color=colour, transform=axes.transAxes,
                      ha="right", fontsize=7)
        axes.axhline(100 / load.shape[2], color=GREY, linestyle="--", linewidth=1)
        axes.set_title(heading, fontsize=9)
        axes.set(xlabel="step")
    panels[0].set_ylabel("share of an expert (%)")
    panels[0].set_ylim(0, 1.4 * 100 * max(np.max(a) for name in names for _, a in runs[name]["load_curve"]))
    for name, colour, text in zip(names, (BLUE, ORANGE), ("with", "without")):
        curve = runs[name]["dropped_curve"]
        panels[2].plot([step for step, _ in curve], [100 * share for _, share in curve], color=colour, linewidth=1)
        top = 100 * max(share for _, share in curve[len(curve) // 2:])
        panels[2].annotate(text, (curve[-1][0], top), color=colour, xytext=(0, 4), fontsize=8,
                           textcoords="offset points", ha="right")
    panels[2].set_title("dropped", fontsize=9)
    panels[2].set(xlabel="step", ylabel="share of the choices (%)")
    panels[2].set_ylim(0)
    save(figure, "loads")


def draw_params(rows):
    """Final validation loss against the parameters that a token meets, and against all there are."""
    by_run = {r["run"]: r for r in rows}
    seeds = {preset: [r for r in rows if r["run"].startswith(f"{preset}-s")] for preset in ("moe", "dense")}
    lines = {"dense": ({"dense-256": "256", "dense-s0": "512", "dense-1024": "1024", "dense-2048": "F 2048"}, ORANGE),
             "moe": ({"moe-4": "E 4", "moe-s0": "8", "moe-16": "16"}, BLUE), "switch": ({"switch": "k 1"}, GREEN)}
    figure, panels = new_axes(3.2, ncols=2, sharey=True)
    for axes, key, label in zip(panels, ("active_params", "params"), ("active", "all")):
        for name, (labels, colour) in lines.items():
            points = [(by_run[run][key] / 1e6, by_run[run]["val_loss"], text) for run, text in labels.items()
                      if run in by_run]
            if points:
                axes.plot(*zip(*(p[:2] for p in points)), color=colour, marker="o", markersize=4, linewidth=1)
            for x, y, text in points:
                axes.annotate(text, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7, color=colour)
            for r in seeds.get(name, ()):
                axes.plot(r[key] / 1e6, r["val_loss"], "o", color=colour, markersize=4, markerfacecolor="none")
        axes.set_xscale("log")
        ticks_at(axes.xaxis, [0.5, 1, 2, 4])
        axes.set(xlabel=f"{label} parameters (millions)")
    panels[0].set_ylabel("validation loss (nats a character)")
    for i, (name, (_, colour)) in enumerate(lines.items()):
        panels[1].text(0.98, 0.94 - 0.08 * i, name, color=colour, transform=panels[1].transAxes, ha="right")
    save(figure, "params")


def draw_routing(routing):
    """Where each character's choices go: a row an expert, a column a character; before and after training."""
    shown = {"\n": "↵", " ": "␣"}
    characters = [shown.get(c, c) for c in routing["characters"]]
    before, after = np.array(routing["before"]), np.array(routing["after"])
    last = len(after) - 1
    panels = ((before[0], "layer 1, before training"), (after[0], "layer 1, after"),
              (after[last], f"layer {last + 1}, after"))
    figure, axes = new_axes(4.2, nrows=3)
    for each, (share, heading) in zip(axes, panels):
        drawn = each.pcolormesh(100 * share.T, cmap="Blues", vmin=0, vmax=100 / routing["k"], edgecolors="white",
                                linewidth=0.3)  # a token's k choices differ: no share exceeds 1 / k
        each.set_xticks(np.arange(len(characters)) + 0.5, characters, fontsize=7)
        each.set_yticks(np.arange(share.shape[1]) + 0.5, range(1, share.shape[1] + 1), fontsize=7)
        each.tick_params(length=0)
        each.set_title(heading, fontsize=9)
    axes[1].set_ylabel("expert")
    axes[2].set_xlabel("character, the most frequent first")
    figure.colorbar(drawn, ax=list(axes), label="share of the character's choices (%)", aspect=40)
    save(figure, "routing")


def draw_all():
    """Every figure whose data results/ holds."""
    bench, losses, routing = read("bench"), read("losses"), read("routing")
    if bench:
        draw_cost(bench)
        draw_roofline(bench)
        draw_trace(bench)
    if losses:
        draw_losses(losses["rows"])
        draw_loads(losses["rows"])
        draw_params(losses["rows"])
    if routing:
        draw_routing(routing)


# Tables ----------------------------------------------------------------------------------

def spread(r):
    return f"{r['min']:,.0f} to {r['max']:,.0f}"


def bench_tables(bench):
    """{name: rows} of the tables from bench.json."""
    speeds = {r["name"]: r for r in bench["rows"] if r["metric"] == "tokens_per_s"}
    ratios = {(r["name"], r["baseline"]): r["ratio"] for r in bench["rows"] if r["metric"] == "ratio"}
    loop = "layer: PyTorch loop"
    layer = [{"form": name.removeprefix("layer: "), "tokens/s": f"{r['value']:,.0f}", "spread": spread(r),
              "speed beside the loop": f"**{ratios[name, loop]:.2f}×**" if name != loop else "1",
              "choices dropped": f"{100 * r['dropped']:.1f} %"} for name, r in speeds.items() if "dropped" in r]
    trained = []
    for (name, baseline), ratio in ratios.items():
        if name.startswith("train: "):
            ours, theirs = speeds[name], speeds[baseline]
            trained.append({"training": name.removeprefix("train: "), "tokens/s": f"{ours['value']:,.0f}",
                            "spread": spread(ours), "beside": baseline.removeprefix("train: "),
                            "its tokens/s": f"{theirs['value']:,.0f}", "its spread": spread(theirs),
                            "ratio": f"**{ratio:.2f}×**"})
    at = {}
    for r in bench["rows"]:
        if r["metric"] == "us_per_token":
            cells = at.setdefault((r["E"], r["T"]), {"E": r["E"], "T": f"{r['T']:,}"})
            cells[f"{r['form']}, µs"] = f"{r['value']:.1f}"
            if r["temporaries_MiB"] is not None:
                cells[f"{r['form']}, MiB"] = f"{r['temporaries_MiB']:.1f}"
    columns = ["E", "T", *(f"{form}, µs" for form in FORMS), *(f"{form}, MiB" for form in list(FORMS)[1:])]
    cost = [{column: cells[column] for column in columns} for cells in at.values()]
    variants = [{"variant": r["name"].removeprefix("variant: "), "ms": f"{r['value']:.1f}",
                 "speed": f"{r['ratio']:.2f}×" if r["ratio"] else "1"}
                for r in bench["rows"] if r["name"].startswith("variant")]
    quantities = {}
    for r in bench["rows"]:
        if r["name"].startswith("step "):
            cell = f"{r['value']:.3g} {r['unit']}".rstrip()
            quantities.setdefault(r["metric"], {"a training step": r["metric"]})[r["name"].removeprefix("step ")] = cell
    machine = [{"a training step": f"{r['name']}: {r['metric']}", "moe": f"{r['value']:.3g} {r['unit']}"}
               for r in bench["rows"] if r["name"] in ("machine", "trace moe")]
    largest = [{"operation": r["name"], "for": r["kind"], "shape": r["shape"].partition("{")[0],
                "MiB": f"{r['bytes'] / 2**20:.1f}", "from": (r["op_name"] or "").split("/")[-1]}
               for r in bench["details"]["largest"]]
    return {"layer": layer, "train": trained, "cost": cost, "variants": variants,
            "step": [*quantities.values(), *machine], "largest": largest}


def made_by(made):
    """One line that says where a result is from; made: its provenance."""
    load = "unknown" if made["load"] is None else f"{made['load']:.1f}"  # Windows counts none
    return (f"`{made['command']}`; {made['cpu']}, {made['cores']} cores, Python {made['python']}, JAX {made['jax']}, "
            f"PyTorch {made.get('torch', 'not installed')}; load average {load} at the start; {made['date'][:10]}.")


def run_cells(r):
    moe = r["params"] != r["active_params"]
    return {"parameters": f"{r['params'] / 1e6:.2f}M", "active": f"{r['active_params'] / 1e6:.2f}M",
            "steps": f"{r['steps']:,}", "validation loss": f"{r['val_loss']:.4f}",
            "dropped": f"{100 * r['dropped']:.1f} %" if moe else "", "load entropy": f"{r['load_entropy']:.3f}" if moe
            else "", "tokens/s": f"{r['tokens_per_s']:,.0f}", "wall time, s": f"{r['wall_s']:.0f}"}


def loss_tables(rows):
    """{name: rows} of the tables from losses.json: the main runs with their means, and the others."""
    main, others = [], []
    for preset in ("moe", "dense"):
        these = [r for r in rows if r["run"].startswith(f"{preset}-s")]
        main += [{"train.py": " ".join(r["flags"][:1]), "seed": r["seed"], **run_cells(r)} for r in these]
        values = [r["val_loss"] for r in these]
        if len(values) > 1:
            main.append({"train.py": f"{preset}: mean ± s.d.",
                         "validation loss": f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"})
    others = [{"train.py": " ".join(r["flags"]), **run_cells(r)} for r in rows
              if not r["run"].startswith(("moe-s", "dense-s"))]
    return {"losses": main, "others": others, "wins": wins(rows)}


def wins(rows):
    """Where MoE wins and where it doesn't. A loss counts as better where the difference exceeds twice the larger
    standard deviation of the three seeds; speed and memory where they differ by more than 2 %."""
    by_run = {r["run"]: r for r in rows}
    seeds = {preset: [r for r in rows if r["run"].startswith(f"{preset}-s")] for preset in ("moe", "dense")}
    if any(len(runs) < 2 for runs in seeds.values()):
        return []
    losses = {preset: [r["val_loss"] for r in runs] for preset, runs in seeds.items()}
    noise = 2 * max(map(statistics.stdev, losses.values()))
    table = []

    def add(question, moe, dense, form, margin, lower_is_better=True):
        better = "neither" if abs(moe - dense) <= margin else "MoE" if (moe < dense) == lower_is_better else "dense"
        table.append({"compared": question, "MoE": form(moe), "dense": form(dense), "better": better})

    def nats(x):
        return f"{x:.4f}"
    moe, dense = map(statistics.mean, losses.values())
    add("validation loss after as many steps, the same active FLOPs (three seeds)", moe, dense, nats, noise)
    if "dense-time" in by_run:
        steps = by_run["dense-time"]["steps"]
        add(f"validation loss after the same training time: dense makes {steps:,} steps in it", moe,
            by_run["dense-time"]["val_loss"], nats, noise)
    if "dense-2048" in by_run:
        add("validation loss with as many parameters in all (dense: F 2048)", moe, by_run["dense-2048"]["val_loss"],
            nats, noise)
        speed = statistics.median(r["tokens_per_s"] for r in seeds["moe"])
        add("training tokens/s with as many parameters in all", speed, by_run["dense-2048"]["tokens_per_s"],
            "{:,.0f}".format, 0.02 * speed, lower_is_better=False)
    speeds = [statistics.median(r["tokens_per_s"] for r in runs) for runs in seeds.values()]
    add("training tokens/s with the same active FLOPs", *speeds, "{:,.0f}".format, 0.02 * speeds[0],
        lower_is_better=False)
    sizes = [runs[0]["params"] for runs in seeds.values()]
    add("parameters to store", *sizes, "{:,}".format, 0.02 * sizes[0])
    return table


def parallel_table(parallel):
    return [{"program": r["program"], "collective": r["collective"], "number": r["number"],
             "kB a device": f"{r['bytes'] / 1e3:.1f}", "µs on a ring of v5e, predicted": f"{1e6 * r['seconds']:.2g}"}
            for r in parallel["table"]]


SOURCES = {"bench": ("layer", "train", "cost", "variants", "step", "largest", "made-bench"),
           "losses": ("wins", "losses", "others", "made-losses"), "routing": ("sample",), "parallel": ("parallel",),
           "kernels": ("kernels", "kernels-published")}
COMMANDS = {"bench": "bench.py", "losses": "bench.py --losses", "routing": "bench.py --losses",
            "parallel": "bench.py --parallel", "kernels": "bench.py --kernels"}


def readme_tables():
    """{name: Markdown} of every table, and other piece, that README.md takes from results/."""
    tables = {name: f"Not measured yet: `python {COMMANDS[source]}`." for source, names in SOURCES.items()
              for name in names}
    rows = {}
    if bench := read("bench"):
        rows |= bench_tables(bench)
        tables["made-bench"] = made_by(bench["provenance"])
    if losses := read("losses"):
        rows |= loss_tables(losses["rows"])
        tables["made-losses"] = made_by(losses["provenance"])
    if routing := read("routing"):
        lines = routing["sample"].splitlines()
        tables["sample"] = "\n".join(("```", *(line.rstrip() for line in lines), "```"))
    if parallel := read("parallel"):
        rows["parallel"] = parallel_table(parallel)
    tables |= {name: profiling.markdown_table(table) for name, table in rows.items() if table}
    if kernels := read("kernels"):
        import bench_kernels
        tables |= bench_kernels.readme_tables(kernels)
    return tables


def write_readme():
    """Puts each table between its marks, <!-- table:NAME --> and <!-- /table -->."""
    path = HERE / "README.md"
    text = path.read_text(encoding="utf-8")
    for name, table in readme_tables().items():
        before, mark, rest = text.partition(f"<!-- table:{name} -->\n")
        if mark:
            text = before + mark + table.rstrip() + "\n" + rest[rest.index("<!-- /table -->"):]
    path.write_text(text, encoding="utf-8")
