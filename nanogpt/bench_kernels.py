"""Predicts the attention kernels on TPUs that aren't here, and measures them on a GPU that is.

    python bench.py --kernels             # the table: results/kernels.json
    python bench_kernels.py --sweep       # tile sizes, and the bundled kernel's blocks: results/kernels-sweep.json
    python bench_kernels.py --gpu         # measured beside cuDNN and XLA, where there is a GPU

Legend: B batch, H heads, T queries = keys, K head dim. Setting: B 1, H 8, K 128, bfloat16, H kv heads.
Cycles are libtpu's static estimates of the compiled code (common.pallas.predict_cycles), labelled predicted. The sweep
goes on where it stopped; what libtpu refuses, or doesn't estimate in time, stands there with its reason.
"""
import argparse
import functools
import importlib.metadata
import json
import math
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))  # for common/

import kernels
import run
from common import pallas, profiling
from kernels import Tile

H, K, PASSES = 8, 128, {"forward": ("forward",), "backward": ("dq", "dkv")}
GENERATIONS = {"v5e": ("v5e:1x1", 131072), "v6e": ("v6e:1x1", 524288)}  # topology; bfloat16 FLOPs a cycle
CASES = [(generation, causal) for generation in GENERATIONS for causal in (True, False)]
# (queries, keys) of the bundled kernel, by whether the backward pass is wanted: there its inner loops are unrolled,
# libtpu needs minutes for larger ones, and one head is estimated, times H: at T = 2,048 that is up to 3 % more than for
# all heads together. At its default blocks, 128, it takes several times as long.
BLOCKS = {False: [(512, 512), (512, 1024), (512, 2048), (1024, 512), (1024, 1024), (1024, 2048), (2048, 2048)],
          True: [(512, 512), (512, 1024), (1024, 512), (1024, 1024)]}
NAIVE = (2048, 8192)
UNITS = {"matrix unit": "MATMUL", "vector arithmetic": "VALU", "exponentials": "EUP", "across lanes": "XLU",
         "stores": "VSTORE", "of them spills": "VSTORE:SPILL"}  # of common.pallas.slot_use
CALIBRATION = ("predicted: libtpu's static estimate of the compiled kernel, at 1.5 GHz (v5e) and 1.75 GHz (v6e, "
               "assumed); against published timings of grouped matmuls on v5e it was off by -9 % to +9 %, on v6e it is "
               "unchecked")


# What predict_cycles compiles ------------------------------------------------------------
def avals(T, *names, B=1, heads=H):
    """q, k, v, o, g: (B, H, T, K) bfloat16; lse, D: (B, H, 1, T) float32."""
    return [jax.ShapeDtypeStruct((B, heads, 1, T), jnp.float32) if name in ("lse", "D") else
            jax.ShapeDtypeStruct((B, heads, T, K), jnp.bfloat16) for name in names]


def call_of(kernel, T, causal, tile):
    """The Call of one TPU kernel, on abstract arguments."""
    how = kernels.How(causal, "tpu", kernels.Tiles(*[Tile(*tile)] * 3), None)
    make, names = {"forward": (kernels.forward_call_tpu, "q k v"), "dq": (kernels.dq_call_tpu, "q k v o g lse"),
                   "dkv": (kernels.dkv_call_tpu, "q k v g lse D")}[kernel]
    return make(*avals(T, *names.split()), how), how


def build_kernel(kernel, T, causal, tile):
    """One kernel of ours. libtpu compiles, but doesn't estimate, copies of rows that are no multiple of 8: for such a T
    the arrays are longer, as they are in HBM anyway, and the kernel masks what lies past T."""
    call, how = call_of(kernel, T, causal, tile)

    def long(pairs):
        return [(jax.ShapeDtypeStruct([pallas.round_up(n, 8) if n == T else n for n in x.shape], x.dtype), spec)
                for x, spec in pairs]

    def f(*arrays):
        inputs = [(x, spec) for x, (_, spec) in zip(arrays, call.inputs)]
        return kernels.launch(call._replace(inputs=inputs, outputs=long(call.outputs)), how)
    return f, [x for x, _ in long(call.inputs)]


def build_bundled(T, causal, blocks, backward=False, heads=H):
    """JAX's own kernel. blocks: (queries, keys); backward: the program of forward pass and VJP."""
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention
    bq, bk = blocks
    sizes = BlockSizes(bq, bk, bk, 1, bq, bk, bk, bq, bk, bk, bq) if backward else BlockSizes(bq, bk, bk, 1)
    f = functools.partial(flash_attention, causal=causal, sm_scale=K**-0.5, block_sizes=sizes)
    return (with_vjp(f), avals(T, *"qkvg", heads=heads)) if backward else (f, avals(T, *"qkv", heads=heads))


def build_naive(T, causal, backward=False):
    f = functools.partial(kernels.attention_reference, causal=causal)
    return (with_vjp(f), avals(T, *"qkvg")) if backward else (f, avals(T, *"qkv"))


def with_vjp(f):
    return lambda q, k, v, g: (lambda o, pull: (o, *pull(g)))(*jax.vjp(f, q, k, v))


# Estimates, kept in results/kernels-sweep.json -------------------------------------------
SWEEP = HERE / "results" / "kernels-sweep.json"


def versions():
    return {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}


class Estimates:
    """Predicted cycles, kept in the sweep's file with the versions that made them; another version starts anew."""

    def __init__(self):
        kept = json.loads(SWEEP.read_text(encoding="utf-8")) if SWEEP.exists() else {}
        self.rows = kept["rows"] if kept.get("versions") == versions() else []

    def find(self, what, **key):
        """Rows of a kind whose columns are `key`'s."""
        key = json.loads(json.dumps(key))
        return [r for r in self.rows if r["what"] == what and all(r.get(name) == value for name, value in key.items())]

    def get(self, what, generation, timeout_s=400, **key):
        """The row of one estimate, from the file or made now: "cycles" is None, with a "why", where there is none."""
        if known := self.find(what, generation=generation, **key):
            return known[0]
        row = json.loads(json.dumps({"what": what, "generation": generation, **key, "cycles": None}))
        try:
            operations = pallas.predict_cycles(f"bench_kernels:build_{what}", key, HERE, GENERATIONS[generation][0],
                                               timeout_s)
            row["cycles"] = sum(operation["cycles"] for operation in operations) * H // key.get("heads", H)
        except TimeoutError:
            row["why"] = f"no estimate after {timeout_s} s"
        except RuntimeError as why:
            reasons = {"memory space vmem": "does not fit VMEM", "Unsupported DMA": "a copy that isn't modelled"}
            known = [reason for text, reason in reasons.items() if text.lower() in str(why).lower()]
            if not known:
                raise
            row["why"] = known[0]
        self.rows.append(row)
        self.write()
        print({name: value for name, value in row.items() if name != "what"}, flush=True)
        return row

    def write(self):
        """One row a line, in the order of their columns, whatever order they were made in."""
        lines = ",\n".join(sorted(json.dumps(row) for row in self.rows))
        head = json.dumps({"versions": versions(), "note": CALIBRATION})[:-1]
        temporary = SWEEP.with_suffix(".tmp")
        temporary.write_text(f'{head}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")
        os.replace(temporary, SWEEP)


def candidates(kernel, causal):
    """Tiles worth an estimate: large ones (on every chip larger was better until the next was refused), those with
    bT = bS in strips where a diagonal is to be cut, and for the forward pass both orientations."""
    tiles = [Tile(1024, 1024, 256), Tile(2048, 2048, 512), Tile(2048, 2048, 256)] if causal else \
        [Tile(1024, 1024), Tile(1024, 2048), Tile(2048, 1024), Tile(2048, 2048)]
    return tiles + [tile._replace(keys_first=True) for tile in tiles if kernel == "forward"]


def sweep(estimates):
    """All candidates at T = 2,048, and the best two of them at 8,192; the bundled kernel's blocks likewise."""
    for generation, causal in CASES:
        for kernel in ("forward", "dq", "dkv"):
            rows = [estimates.get("kernel", generation, kernel=kernel, T=2048, causal=causal, tile=tile)
                    for tile in candidates(kernel, causal)]
            for row in best(rows, 2):
                estimates.get("kernel", generation, kernel=kernel, T=8192, causal=causal, tile=row["tile"])
        rows = [estimates.get("bundled", generation, T=2048, causal=causal, blocks=blocks, backward=False)
                for blocks in BLOCKS[False]]
        estimates.get("bundled", generation, T=8192, causal=causal, blocks=best(rows)[0]["blocks"], backward=False)
        for T in (2048, 8192):
            rows = [estimates.get("bundled", generation, T=T, causal=causal, blocks=blocks, backward=True, heads=1)
                    for blocks in BLOCKS[True]]
            for row in best(rows):  # for `forward_part`
                estimates.get("bundled", generation, T=T, causal=causal, blocks=row["blocks"], backward=False)


def best(rows, n=1):
    return sorted((r for r in rows if r["cycles"]), key=lambda r: r["cycles"])[:n]


def sweep_table(rows):
    """README.md's table of the sweep's best estimates: ours and the bundled kernel's, forward pass alone and with the
    backward pass, as Markdown."""
    def fewest(what, generation, causal, T, **key):
        key |= {"what": what, "generation": generation, "causal": causal, "T": T}
        found = [r for r in rows if all(r.get(name) == value for name, value in key.items())]
        return best(found)[0]["cycles"] if best(found) else None

    def columns(title, ours, theirs):
        known = ours and theirs
        return {title: f"{ours / 1e3:,.0f}k" if ours else "no estimate",
                f"{title}: bundled": f"{theirs / 1e3:,.0f}k" if theirs else "no estimate",
                f"{title}: ratio": f"**{ours / theirs:.2f}**" if known else "–"}

    table = []
    for T in (2048, 8192):
        for generation, causal in CASES:
            ours = [fewest("kernel", generation, causal, T, kernel=kernel) for kernel in ("forward", "dq", "dkv")]
            theirs = [fewest("bundled", generation, causal, T, backward=backward) for backward in (False, True)]
            bound = 4 * H * T * T * K / (2 if causal else 1) / GENERATIONS[generation][1]
            if ours[0] and ours[0] < bound:
                raise ValueError(f"{generation}, T {T}: {ours[0]} cycles are below the physical bound {bound:.0f}")
            table.append({"chip": generation, "mask": "causal" if causal else "full", "T": f"{T:,}",
                          "MXU bound": f"{bound / 1e3:,.0f}k", **columns("forward", ours[0], theirs[0]),
                          **columns("forward + backward", sum(ours) if all(ours) else None, theirs[1])})
    return profiling.markdown_table(table)


# The table -------------------------------------------------------------------------------
def hbm_bytes(call):
    """Bytes that a call moves between HBM and VMEM: a block each time its index changes along the grid."""
    total = 0
    for x, spec in (*call.inputs, *call.outputs):
        indices = [tuple(int(i) for i in spec.index_map(*step)) for step in np.ndindex(*call.grid)]
        for before, index in zip([None, *indices], indices):
            if index != before:
                sizes = [1 if b is None else min(b, n - i * b) for i, b, n in zip(index, spec.block_shape, x.shape)]
                total += math.prod(sizes) * x.dtype.itemsize
    return total


def predicted(generation, causal, T, name, estimates):
    """One row: forward or backward pass, ours beside the bundled kernel at its best blocks and beside naive XLA."""
    total = {"cycles": 0, "bytes": 0, "vmem": 0, "seconds": 0.0, "bound": 0.0}
    for kernel in PASSES[name]:
        tile = getattr(kernels.tiles_for(generation, causal), kernel)
        call, _ = call_of(kernel, T, causal, tile)
        row = estimates.get("kernel", generation, kernel=kernel, T=T, causal=causal, tile=tile)
        if row["cycles"] is None:
            raise RuntimeError(f"{kernel}, T {T}, {generation}: {row['why']}")
        flops = 2 * call.products * H * K * (T * (T + 1) // 2 if causal else T * T)
        total["cycles"] += row["cycles"]
        total["bytes"] += (moved := hbm_bytes(call))
        total["vmem"] = max(total["vmem"], kernels.vmem(call))
        # raises ValueError for fewer cycles than the matrix units need for these FLOPs
        total["seconds"] += pallas.predicted_seconds(row["cycles"], moved, flops, generation)
        total["bound"] += flops / GENERATIONS[generation][1]
    backward = name == "backward"
    bundled = [{**r, "cycles": r["cycles"] - forward_part(estimates, r)} if backward else r
               for r in estimates.find("bundled", generation=generation, causal=causal, T=T, backward=backward)
               if r["cycles"]]
    theirs = best(bundled)[0] if bundled else {"cycles": None, "blocks": None}
    naive = None
    if T in NAIVE:
        both = [estimates.get("naive", generation, T=T, causal=causal, backward=b)["cycles"] for b in (False, backward)]
        naive = both[1] - (both[0] if backward else 0) if None not in both else None
    return {"generation": generation, "pass": name, "causal": causal, "T": T, **total, "bundled": theirs["cycles"],
            "bundled_blocks": theirs["blocks"], "naive": naive}


def forward_part(estimates, row):
    """Cycles of the forward pass that the bundled kernel's backward program contains."""
    return estimates.get("bundled", row["generation"], T=row["T"], causal=row["causal"], blocks=row["blocks"],
                         backward=False)["cycles"]


def memory(T):
    """Bytes of HBM on v5e, from the compiler: temporaries of forward pass and VJP together (None where that is more than
    the chip has), and what is kept between them. A batch of 8: of less, XLA holds the shorter matrices of scores in
    VMEM."""
    def temporaries(f):
        try:
            compiled = pallas.aot_compile(f, *avals(T, *"qkvg", B=8), topology="v5e:1x1")
        except jax.errors.JaxRuntimeError as why:
            if "CompileTimeHbmOom" not in str(why):
                raise
            return None
        return compiled.memory_analysis().temp_size_in_bytes

    def residuals(q, k, v):
        return kernels.forward(q, k, v, kernels.How(True, "tpu", kernels.tiles_for("v5e", True), None))

    kept = pallas.aot_compile(residuals, *avals(T, *"qkv", B=8), topology="v5e:1x1").memory_analysis()
    return {"T": T, "temporaries": temporaries(with_vjp(kernels.flash_attention)),
            "residuals": kept.output_size_in_bytes,
            "naive_temporaries": temporaries(with_vjp(kernels.attention_reference))}


def slots(generation, kernel, T=2048):
    """What binds one of our kernels, full mask: the share of each unit's issue slots that its code fills."""
    tile = getattr(kernels.tiles_for(generation, False), kernel)
    key = {"kernel": kernel, "T": T, "causal": False, "tile": tile}
    (used,) = pallas.slot_use("bench_kernels:build_kernel", key, HERE, GENERATIONS[generation][0]).values()
    return {"generation": generation, "kernel": kernel, **used}


def measure_all():
    """results/kernels.json: rows as in bench.json, all predicted, and the tables of README.md."""
    made_with, estimates = profiling.provenance(), Estimates()
    table = [predicted(generation, causal, T, name, estimates) for T in (2048, 8192, 2000, 8191)
             for generation, causal in CASES for name in PASSES if causal or T in NAIVE]
    rows = []
    for r in table:
        title = f"attention {r['pass']}, {'causal' if r['causal'] else 'full'}, T {r['T']}, {r['generation']}"
        rows.append({"name": title, "metric": "cycles", "value": r["cycles"], "unit": "cycles", "predicted": True,
                     "baseline": r["bundled"] and f"bundled, blocks {r['bundled_blocks']}",
                     "ratio": r["bundled"] and r["bundled"] / r["cycles"]})
        print(f"{title:44} {r['cycles']:10,} cycles predicted, {rows[-1]['ratio'] or math.nan:5.2f}x the bundled one's "
              f"speed, {r['cycles'] / r['bound']:4.2f}x the MXU bound", flush=True)
    result = {"provenance": made_with, "note": CALIBRATION, "rows": rows, "table": table,
              "slots": [slots(generation, kernel) for generation in GENERATIONS for kernel in ("forward", "dq", "dkv")],
              "memory": [memory(T) for T in (1024, 2048, 4096, 8192)], "measured": measure_gpu()}
    run.write_json(HERE / "results" / "kernels.json", result)


def readme_tables(result):
    """{name: Markdown} of the tables that README.md takes from results/kernels.json."""
    def number(value):
        return f"{value / 1e3:,.0f}k" if value else "–"

    def ratio(r, other):
        return f"{r['cycles'] / r[other]:.2f}" if r[other] else "–"

    cycles = [{"chip": r["generation"], "pass": r["pass"], "mask": "causal" if r["causal"] else "full", "T": r["T"],
               "cycles": number(r["cycles"]), "ms": f"{1e3 * r['seconds']:.3f}",
               "over the MXU bound": f"{r['cycles'] / r['bound']:.2f}", "bundled": number(r["bundled"]),
               "ours / bundled": f"**{ratio(r, 'bundled')}**" if r["bundled"] else "–", "naive": number(r["naive"]),
               "ours / naive": ratio(r, "naive"), "HBM, MB": f"{r['bytes'] / 1e6:.1f}",
               "VMEM, MiB": f"{r['vmem'] / 2**20:.0f}"} for r in result["table"]]
    memory = [{"T": f"{r['T']:,}", "temporaries, MiB": f"{r['temporaries'] / 2**20:.1f}",
               "residuals o and L, MiB": f"{r['residuals'] / 2**20:.1f}",
               "naive: temporaries, MiB": f"{r['naive_temporaries'] / 2**20:,.0f}" if r["naive_temporaries"] else
               "more than the chip's 16 GiB"} for r in result["memory"]]
    slots = [{"chip": r["generation"], "kernel": r["kernel"], "bundles": f"{r['bundles']:,}",
              **{title: f"{r[unit]:.0%}" for title, unit in UNITS.items()}} for r in result["slots"]]
    return {"kernels": profiling.markdown_table(cycles), "kernels-memory": profiling.markdown_table(memory),
            "kernels-slots": profiling.markdown_table(slots)}


# On a GPU --------------------------------------------------------------------------------
def measure_gpu():
    """Milliseconds of the GPU form beside cuDNN's attention and XLA's, forward and with the VJP; None without a GPU."""
    if jax.default_backend() != "gpu":
        print("GPU: not measured, there is none here")
        return None
    rows = []
    for T in (1024, 2048, 4096, 8192, 16384):
        q, k, v, g = (jax.random.normal(key, (1, H, T, K), jnp.bfloat16)
                      for key in jax.random.split(jax.random.key(0), 4))
        sides = {"ours": kernels.flash_attention} | {name: functools.partial(library, implementation=name)
                                                     for name in ("cudnn", "xla")}
        for name, f in sides.items():
            if name == "xla" and T > 8192:
                continue  # 16 GiB of scores
            for title, timed, arrays in (("forward", f, (q, k, v)), ("both", with_vjp(f), (q, k, v, g))):
                seconds = profiling.measure(timed, lambda: arrays).median_s
                rows.append({"T": T, "pass": title, "implementation": name, "ms": 1e3 * seconds})
                print(rows[-1], flush=True)
    return {"device": jax.devices()[0].device_kind, "rows": rows}


def library(q, k, v, implementation):
    """jax.nn.dot_product_attention, causal, in this project's layout."""
    o = jax.nn.dot_product_attention(*(x.transpose(0, 2, 1, 3) for x in (q, k, v)), is_causal=True,
                                     implementation=implementation)
    return o.transpose(0, 2, 1, 3)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    part = parser.add_mutually_exclusive_group(required=True)
    for flag in ("--sweep", "--gpu"):
        part.add_argument(flag, action="store_true")
    args = parser.parse_args()
    if args.gpu:
        return measure_gpu()
    run.prepare_host()
    sweep(Estimates())


if __name__ == "__main__":
    main()
