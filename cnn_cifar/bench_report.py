"""Figures and tables of README.md, from what bench.py left in results/: `python bench.py --readme`."""
import json
import statistics
from pathlib import Path

import numpy as np

from common import profiling

HERE = Path(__file__).resolve().parent
RESULTS, FIGURES = HERE / "results", HERE / "figures"

PARTS = {"forward": "forward", "dx": "gradient of the input, dx", "dw": "gradient of the weights, dw"}


# Figures ---------------------------------------------------------------------------------

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#777777"  # Okabe-Ito, and a grey


def new_axes(height=3.0, **grid):
    import matplotlib
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "cnn_cifar", "font.size": 9})  # the same data give the same file
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


def draw_bench(bench):
    value = {(r["name"], r["metric"]): r["value"] for r in bench["rows"]}
    parts = [r for r in bench["rows"] if r["metric"] == "GFLOP/s"]
    flops, bandwidth = value["machine", "peak float32"], value["machine", "peak bandwidth"]
    colours = dict(zip(PARTS, (BLUE, GREEN, ORANGE)))

    figure, axes = new_axes(3.4)
    x = np.logspace(0, 3, 200)
    axes.loglog(x, np.minimum(flops, x * bandwidth), color=GREY)
    axes.annotate(f"{bandwidth:.0f} GB/s", (1.5, 1.5 * bandwidth), color=GREY, xytext=(6, -8),
                  textcoords="offset points")
    axes.annotate(f"{flops:.0f} GFLOP/s", (1, flops), color=GREY, xytext=(0, 4), textcoords="offset points")
    for r in parts:
        axes.plot(r["intensity"], r["value"], "o", color=colours[r["part"]], markersize=5)
    at = value["step", "intensity"], value["step", "reached"]
    axes.plot(*at, "s", color="black")
    axes.annotate("training step", at, xytext=(0, -13), textcoords="offset points", ha="center")
    for i, (part, text) in enumerate(PARTS.items()):
        axes.text(0.02, 0.19 - 0.07 * i, text, color=colours[part], transform=axes.transAxes, fontsize=8)
    axes.set(xlabel="intensity (FLOP/byte)", ylabel="GFLOP/s (float32)",
             ylim=(min(r["value"] for r in parts) / 2, 1.6 * flops))
    plain_numbers(axes.xaxis)
    plain_numbers(axes.yaxis)
    save(figure, "roofline")

    figure, axes = new_axes(3.4)
    layers = list(dict.fromkeys(r["layer"] for r in parts))
    for r in parts:
        y, colour = layers.index(r["layer"]) + 0.22 * (list(PARTS).index(r["part"]) - 1), colours[r["part"]]
        axes.plot([r["value"], r["torch"]], [y, y], color=colour, linewidth=1)
        axes.plot(r["torch"], y, "o", markerfacecolor="white", color=colour)
        axes.plot(r["value"], y, "o", color=colour)
    axes.axvline(flops, color=GREY, linestyle="--")
    axes.annotate("peak", (flops, 0.02), xycoords=("data", "axes fraction"), color=GREY, ha="right", xytext=(-3, 0),
                  textcoords="offset points")
    for x, (part, text) in zip((0, 0.10, 0.37), PARTS.items()):
        axes.text(x, 1.02, text, color=colours[part], transform=axes.transAxes, fontsize=8)
    axes.text(1, 1.02, "filled: JAX, hollow: PyTorch", transform=axes.transAxes, fontsize=8, ha="right")
    axes.set(xlabel="GFLOP/s (float32)", yticks=range(len(layers)), yticklabels=layers, xlim=(0, 1.03 * flops))
    axes.invert_yaxis()
    save(figure, "layers")

    figure, axes = new_axes(2.4)
    kinds = bench["details"]["step_ms_by_kind"]
    names = list(kinds)[::-1]
    axes.barh(names, [kinds[n] for n in names], color=[BLUE if "convolution" in n else ORANGE for n in names])
    for i, n in enumerate(names):
        axes.text(kinds[n], i, f" {kinds[n]:.0f} ms", va="center")
    axes.set(xlabel="ms a step, on the thread that launches the operation")
    axes.set_xlim(0, 1.12 * max(kinds.values()))
    save(figure, "trace")


def draw_accuracy(results):
    kinds = {"short": ("5 minutes", BLUE), "long": ("25 minutes", ORANGE), "shapes": ("shapes", GREEN)}
    shown = {r["run"].partition("-")[0] for r in results["rows"]}
    figure, (left, right) = new_axes(3.0, ncols=2)
    for r in results["rows"]:
        colour = kinds[r["run"].partition("-")[0]][1]
        left.plot(*zip(*r["loss_curve"]), color=colour, linewidth=1)
        steps, values = zip(*r["accuracy_curve"])
        right.plot(steps, [100 * v for v in values], color=colour, linewidth=1, marker="o", markersize=2.5)
    for i, (text, colour) in enumerate(kinds[kind] for kind in kinds if kind in shown):
        right.text(0.98, 0.05 + 0.08 * i, text, color=colour, transform=right.transAxes, ha="right")
    left.set(xlabel="step", ylabel="training loss (nats)")
    right.set(xlabel="step", ylabel="test accuracy (%)")
    save(figure, "curves")


def draw_predictions(stored):
    classes, confusion = stored["classes"], stored["confusion"]
    figure, axes = new_axes(3.0, nrows=3, ncols=8)
    for each, image, label, guess in zip(axes.flat, stored["images"], stored["labels"], stored["guess"]):
        each.imshow(image, interpolation="none")
        each.set_title(classes[guess], fontsize=7, color="black" if label == guess else ORANGE, pad=2)
        if label != guess:
            each.text(0.5, -0.04, f"is {classes[label]}", fontsize=6, ha="center", va="top", transform=each.transAxes)
        each.axis("off")
    save(figure, "predictions")

    figure, axes = new_axes(4.6)
    share = 100 * confusion / confusion.sum(1, keepdims=True)
    wrong = np.where(np.eye(len(classes), dtype=bool), 0, share)
    axes.pcolormesh(wrong, cmap="Blues", vmax=1.3 * wrong.max(), edgecolors="white")
    for i, j in np.ndindex(*share.shape):
        axes.text(j + 0.5, i + 0.5, f"{share[i, j]:.1f}", ha="center", va="center", fontsize=8,
                  weight="bold" if i == j else "normal",
                  color="white" if wrong[i, j] > 0.7 * wrong.max() else "black")
    at = np.arange(len(classes)) + 0.5
    axes.set(xticks=at, yticks=at, yticklabels=classes, xlabel="predicted", ylabel="true (% of its images)")
    axes.set_xticklabels(classes, rotation=35, ha="right")
    axes.tick_params(length=0)
    axes.invert_yaxis()
    save(figure, "confusion")


def draw_statistics(results):
    held, training = results["held"], results["training"]
    figure, (left, right) = new_axes(2.9, ncols=2, sharey=True)
    for axes, rows in ((left, held), (right, training)):
        steps = [r["step"] for r in rows]
        for what, colour in (("mean", BLUE), ("var", ORANGE)):
            axes.semilogy(steps, [r[what] for r in rows], color=colour)
        axes.set(xlabel="step")
    steps = np.arange(0, 31)
    for what in ("mean", "var"):
        left.plot(steps, held[0][what] * results["momentum"] ** steps, color=GREY, linestyle="--", linewidth=1)
    left.text(0.98, 0.90, f"dashed: start × {results['momentum']}$^{{step}}$", color=GREY, transform=left.transAxes,
              ha="right")
    right.text(0.98, 0.90, "variance", color=ORANGE, transform=right.transAxes, ha="right")
    right.text(0.98, 0.82, "mean", color=BLUE, transform=right.transAxes, ha="right")
    left.set_ylabel("distance from the data's statistics")
    left.set_title("parameters held", fontsize=9)
    right.set_title("while training", fontsize=9)
    save(figure, "statistics")

    figure, (left, right) = new_axes(2.9, ncols=2)
    modes = {"never_updated": ("never updated: (0, 1)", ORANGE), "running": ("running", BLUE),
             "of_the_batch": ("the batch's own", GREEN)}
    for i, (name, (text, colour)) in enumerate(modes.items()):
        steps = [r["step"] for r in training]
        left.semilogy(steps, [r[f"loss_{name}"] for r in training], color=colour)
        right.plot(steps, [100 * r[f"accuracy_{name}"] for r in training], color=colour)
        right.text(0.02, 0.78 + 0.08 * i, text, color=colour, transform=right.transAxes)
    left.set(xlabel="step", ylabel="test loss (nats)")
    plain_numbers(left.yaxis)
    right.set(xlabel="step", ylabel="test accuracy (%)")
    right.set_ylim(0)
    save(figure, "discrepancy")


# README ----------------------------------------------------------------------------------

def read(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def speed_tables(bench):
    """{name: rows} of the tables that README.md takes from bench.json, and the line that says where that is from."""
    speeds = {r["name"]: r for r in bench["rows"] if r["metric"] == "images_per_s"}
    speed = [{"setting": r["name"].removesuffix(": JAX"), "JAX, images/s": f"{speeds[r['name']]['value']:,.0f}",
              "spread": f"{speeds[r['name']]['min']:,.0f} to {speeds[r['name']]['max']:,.0f}",
              "beside": r["baseline"].partition(": ")[2], "its images/s": f"{speeds[r['baseline']]['value']:,.0f}",
              "its spread": f"{speeds[r['baseline']]['min']:,.0f} to {speeds[r['baseline']]['max']:,.0f}",
              "ratio": f"**{r['ratio']:.2f}×**"} for r in bench["rows"] if r["metric"] == "ratio"]
    settings = list(dict.fromkeys(name.partition(": ")[0] for name in speeds))
    faults = [{"setting": setting, **{f"{name.partition(': ')[2]}, page faults a step": f"{r['faults']:,.0f}"
                                      for name, r in speeds.items() if name.partition(": ")[0] == setting}}
              for setting in settings]
    variants = [{"variant": r["name"].removeprefix("variant: "), "ms a step": f"{r['value']:.0f}",
                 "speed": f"{r['ratio']:.2f}×" if r["ratio"] else "1"}
                for r in bench["rows"] if r["name"].startswith("variant")]
    if bench["details"]["torch.compile"] != "ran":
        speed.append({"setting": "float32", "beside": "torch.compile", "ratio": bench["details"]["torch.compile"]})
    parts = [r for r in bench["rows"] if r["metric"] == "GFLOP/s"]
    cells = {(r["layer"], r["part"]): f"{r['value']:.0f} ({r['ratio']:.2f}×)" for r in parts}
    layers = [{"layer": r["layer"], "image": f"{r['H']} × {r['H']}", "channels": f"{r['I']} → {r['O']}",
               **{f"{part}, GFLOP/s": cells.get((r["layer"], part), "not needed") for part in PARTS}}
              for r in parts if r["part"] == "forward"]
    step = [{"quantity": f"{r['name']}: {r['metric']}", "value": f"{r['value']:.3g} {r['unit']}".rstrip()}
            for r in bench["rows"] if r["name"].partition(",")[0] in ("step", "machine", "trace", "memory")]
    ops = [{"operation": r["name"], "kind": r["kind"], "shape": r["shape"].partition("{")[0],
            "ms a step": f"{r['ms']:.1f}"} for r in bench["details"]["ops"]]
    largest = [{"operation": r["opcode"], "fused as": r["fusion"], "shape": r["shape"].partition("{")[0],
                "MiB": f"{r['bytes'] / 2**20:.1f}", "from": "/".join((r["op_name"] or "").split("/")[1:])}
               for r in bench["details"]["largest"]]
    made = bench["provenance"]
    line = (f"`{made['command']}`; {made['cpu']}, {made['cores']} cores, Python {made['python']}, JAX {made['jax']}, "
            f"PyTorch {made['torch']}; load average {made['load']:.1f} at the start; {made['date'][:10]}.")
    return {"speed": speed, "faults": faults, "variants": variants, "layers": layers, "step": step, "ops": ops,
            "largest": largest}, line


def readme_tables():
    """{name: Markdown} of every table that README.md takes from results/; without bench.json, of the others."""
    acc, predicted = read("accuracy"), read("kernels")
    runs = []
    for kind in ("short", "long", "shapes"):
        these = [r for r in acc["rows"] if r["run"].startswith(kind)]
        runs += [{"command": " ".join(("train.py", *(f for f in r["flags"] if "seed" not in f))), "seed": r["seed"],
                  "test accuracy": f"{100 * r['test_accuracy']:.2f} %", "of images": f"{r['test_examples']:,}",
                  "steps": f"{r['steps']:,}", "images/s": f"{r['examples_per_s']:,.0f}",
                  "training, s": f"{r['training_s']:.0f}", "compiling, s": f"{r['compile_s']:.0f}",
                  "wall time, s": f"{r['wall_s']:.0f}"} for r in these]
        values = [100 * r["test_accuracy"] for r in these]
        if len(values) > 1:
            runs.append({"seed": "mean ± s.d.",
                         "test accuracy": f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f} %"})
        runs += [{"command": "its twin in PyTorch", "seed": r["seed"],
                  "test accuracy": f"{100 * r['twin_test_accuracy']:.2f} %", "of images": f"{r['test_examples']:,}",
                  "steps": f"{r['steps']:,}"} for r in these if "twin_test_accuracy" in r]
    with np.load(RESULTS / "predictions.npz") as stored:
        modes = [{"statistics in evaluation": text, "test accuracy": f"{100 * stored[key]:.2f} %"} for text, key in (
            ("running, as trained", "running"), ("of each batch of 100 test images", "of_the_batch"),
            ("never updated: mean 0, variance 1", "never_updated"))]
    kernels = [{"chip": e["chip"], "what": e["kernel"], "B × H × W × C": " × ".join(map(str, e["shape"])),
                "VMEM, MiB": f"{e['vmem'] / 2**20:.1f}", "HBM, MiB": f"{e['bytes'] / 2**20:.1f}",
                "XLA, at most": f"{e['xla_bytes'] / 2**20:.1f}",
                **{f"{title}, cycles": f"{e[key]:,}" if e[key] else "no estimate"
                   for title, key in (("kernel", "pallas_cycles"), ("XLA", "xla_cycles"))},
                **{f"{title}, µs": f"{e[key]:.0f}" if e.get(key) else ""
                   for title, key in (("kernel", "pallas_us"), ("XLA, at least", "xla_us"))},
                "ratio": f"{e['xla_us'] / e['pallas_us']:.2f}×" if e["pallas_cycles"] and e["xla_cycles"] else ""}
               for e in predicted["table"]]
    tables, lines = {"accuracy": runs, "modes": modes, "kernels": kernels}, {}
    if (RESULTS / "bench.json").exists():
        speed, lines["provenance"] = speed_tables(read("bench"))
        tables |= speed
    return {name: profiling.markdown_table(rows) for name, rows in tables.items()} | lines


def write_readme():
    """Draws the figures and puts each table between its marks, <!-- table:NAME --> and <!-- /table -->."""
    if (RESULTS / "bench.json").exists():
        draw_bench(read("bench"))
    draw_accuracy(read("accuracy"))
    draw_statistics(read("statistics"))
    with np.load(RESULTS / "predictions.npz") as stored:
        draw_predictions(stored)
    path = HERE / "README.md"
    text = path.read_text(encoding="utf-8")
    for name, table in readme_tables().items():
        before, mark, rest = text.partition(f"<!-- table:{name} -->\n")
        if mark:
            text = before + mark + table.rstrip() + "\n" + rest[rest.index("<!-- /table -->"):]
    path.write_text(text, encoding="utf-8")
