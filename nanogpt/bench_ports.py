"""Times the training steps of model.py, model_nnx.py and model_eqx.py beside each other, in one process.

    python bench.py --ports          # results/ports.json and the table of README.md; 3 minutes

The three run the same program but for what their frameworks add, so they take turns every second: a slow spell of the
machine meets all of them. The small setting has so little to compute that the time of a step is that of its call.
"""
import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import train
from common import profiling

NAMES = {"raw": "raw JAX", "nnx": "Flax NNX", "eqx": "Equinox"}
VOCAB = 65
SETTINGS = {"4 x 128": (train.CPU, 25), "2 x 16": (dataclasses.replace(
    train.CPU, n_layer=2, n_head=2, n_embd=16, context=8, batch_size=4), 250)}  # and the steps of one turn


def entry(name, metric, value, unit, ratio=None):
    """One row of ports.json; ratio > 1 means faster than raw."""
    print(f"{name:28} {metric:14} {value:12,.4g} {unit}", flush=True)
    return {"name": name, "metric": metric, "value": value, "unit": unit, "ratio": ratio, "predicted": False,
            "baseline": None if ratio is None else f"{name.split(':')[0]}: {NAMES['raw']}"}


def measure(title, turns):
    """Rows of one setting: of each model its compile time, ms a step, and the median over the turns of the ratio of
    raw's time in that turn to its own."""
    cfg, steps = SETTINGS[title]
    ids = jax.random.randint(jax.random.key(0), (100_000,), 0, VOCAB).astype(jnp.uint8)
    sides, compile_s = {}, {}
    for name in NAMES:
        mine = dataclasses.replace(cfg, framework=name)
        model_cfg = mine.model(VOCAB)
        state = train.begin(mine, model_cfg)
        began = time.perf_counter()
        sides[name] = [train.compile_steps(state, ids, mine, model_cfg), state]
        compile_s[name] = time.perf_counter() - began
    seconds = {name: [] for name in NAMES}
    for _ in range(turns + 1):  # the first turn warms up
        for name, side in sides.items():
            began = time.perf_counter()
            for i in range(steps):
                side[1], got = side[0](side[1], ids, np.int32(i), np.int32(i + 1))
            jax.block_until_ready(got)
            seconds[name].append((time.perf_counter() - began) / steps)
    rows = []
    for name, label in NAMES.items():
        ratios = sorted(a / b for a, b in zip(seconds["raw"][1:], seconds[name][1:]))
        ratio = statistics.median(ratios)
        rows += [entry(f"{title}: {label}", "compile", compile_s[name], "s"),
                 entry(f"{title}: {label}", "ms_per_step", 1e3 * statistics.median(seconds[name][1:]), "ms")]
        if name != "raw":
            rows.append({**entry(f"{title}: {label}", "ratio", ratio, "x", ratio), "min": ratios[0], "max": ratios[-1]})
    return rows


def measure_all(turns=15):
    """The content of results/ports.json."""
    made_with = profiling.provenance()  # first: its load average is that of the quiet machine
    rows = [row for title in SETTINGS for row in measure(title, turns)]
    return {"provenance": made_with, "turns": turns, "rows": rows}


def readme_table(ports):
    """ports: the content of results/ports.json -> Markdown."""
    value = {(row["name"], row["metric"]): row for row in ports["rows"]}
    table = []
    for title in SETTINGS:
        for label in NAMES.values():
            name = f"{title}: {label}"
            beside, got = "", value.get((name, "ratio"))
            if got:
                beside = f"**{got['value']:.2f}×** ({got['min']:.2f} to {got['max']:.2f})"
            table.append({"training step": name, "ms": f"{value[name, 'ms_per_step']['value']:.2f}",
                          "speed beside raw": beside, "compile, s": f"{value[name, 'compile']['value']:.1f}"})
    return profiling.markdown_table(table)
