"""Predicts the grouped matrix products on TPUs that aren't here, beside megablox's at equal blocks.

    python bench_kernels.py             # results/kernels.json
    python bench_kernels.py --readme    # only writes README.md's tables anew from it

An estimate takes seconds to minutes. Those of the same code and versions are kept in out/ and not repeated.

Legend: M rows, K and N axes of a group's matrix, E groups; "dx" and "dw" are the gradients of y = x w.
Cycles are libtpu's static estimates of compiled code (common.pallas.predict_cycles), labelled predicted. It can't price
a grid whose length is data, nor index maps that read data. So what is priced is the *static twin*: the same body and
index maps, ours and megablox's alike, where the groups are equal and each begins at a block's edge, and visit v's block
and group are arithmetic of v instead of data in SMEM. What twins don't show: reading SMEM, and blocks with two groups,
whose further visits are counted instead (`rows_multiplied`).
"""
import argparse
import contextlib
import hashlib
import importlib
import importlib.metadata
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))  # for common/

import kernels
import run
from common import pallas, profiling
from kernels import Tile, Visits

GENERATIONS = {"v5e": ("v5e:1x1", 131072), "v6e": ("v6e:1x1", 524288)}  # topology; bfloat16 FLOPs a cycle
KERNELS = "forward", "dx", "dw"
PUBLISHED = (8192, 4096, 14336, 8)  # M, K, N, E of tokamax's timings on v5e, and of an expert layer of Mixtral 8x7B
SHAPES = [(2048, 4096, 2048, 2), (2048, 1024, 2048, 8)]  # a piece of it, as an estimate takes long; and smaller groups
EQUAL = Tile(512, 1024, 1024)  # fits the 16 MiB that megablox gets, in all three kernels
MEASURED = "y = x w, 8,192 × 4,096 × 14,336, E 8, v5e"
MEASURED_MS = {"ragged_dot": 9.47, "tokamax": 5.25}  # published by tokamax: XLA's default, and its own kernel, tuned
CALIBRATION = ("predicted: libtpu's static estimate of the kernel's static twin, at 1.5 GHz (v5e) and 1.75 GHz (v6e, "
               "assumed), or the bytes by the bandwidth, whichever is longer; against published timings of "
               "grouped matmuls on v5e it was off by -9 % to +9 %, on v6e it is unchecked")


# Static twins ----------------------------------------------------------------------------
@dataclass(frozen=True)
class Formula:
    """Stands in for a vector in SMEM: entry v is arithmetic of v."""
    entry: Callable
    size: int

    def __getitem__(self, v):
        return self.entry(v)


@contextlib.contextmanager
def prefetching(*scalars):
    """Inside, a pallas_call with prefetched scalars becomes one whose body and index maps are given `scalars` instead.
    Operands and result stay in HBM, as kernels.launch wants it: what XLA moves into VMEM before, nobody counts."""
    def static_call(body, *, grid_spec, out_shape, **how):
        def bound(spec):
            return pl.BlockSpec(spec.block_shape, lambda *step: spec.index_map(*step, *scalars))

        def call(*operands):
            arrays = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in operands[len(scalars):]
                      if x is not None]
            absent = [None] * (len(operands) - len(scalars) - len(arrays))
            return original(
                lambda *refs: body(*scalars, *refs[:len(arrays)], *absent, *refs[len(arrays):]), grid=grid_spec.grid,
                in_specs=[bound(spec) for spec in grid_spec.in_specs[:len(arrays)]],
                out_specs=bound(grid_spec.out_specs), out_shape=pltpu.HBM(out_shape.shape, out_shape.dtype),
                scratch_shapes=grid_spec.scratch_shapes, **how)(*arrays)
        return call

    original = pl.pallas_call
    with mock.patch.object(pl, "pallas_call", static_call):
        yield


def equal_groups(M, E, bM):
    """(Visits, their number) of E equal groups of whole blocks, as arithmetic. Raises: ValueError for other sizes."""
    rows, rest = divmod(M, E)
    if rest or rows % bM:
        raise ValueError(f"{M} rows in {E} groups are not equal groups of whole blocks of {bM}: no static twin")
    blocks = M // bM

    def group(v):
        return lax.div(v, np.int32(rows // bM))

    def edge(e, v):
        return jnp.clip(e * rows - v * bM, 0, bM)

    return Visits(Formula(lambda v: v, blocks), Formula(group, blocks), Formula(lambda v: edge(group(v), v), blocks),
                  Formula(lambda v: edge(group(v) + 1, v), blocks), Formula(lambda _: blocks, 1)), blocks


def call_of(kernel, shape, tile, dtype="bfloat16"):
    """The Call of one of our kernels on abstract operands."""
    M, K, N, E = shape
    x, w, g = (jax.ShapeDtypeStruct(s, dtype) for s in ((M, K), (E, K, N), (M, N)))
    if kernel == "dw":
        return kernels.transposed_call(x, g, E, Tile(*tile))
    return kernels.multiply_call(g if kernel == "dx" else x, w, Tile(*tile), transposed=kernel == "dx")


def build_ours(kernel, shape, tile, interpret=None):
    """(f, avals) for predict_cycles: the static twin of one of our kernels."""
    avals = [x for x, _ in call_of(kernel, shape, tile).inputs]

    def f(*arrays):
        call = call_of(kernel, shape, tile)
        call = call._replace(inputs=[(x, spec) for x, (_, spec) in zip(arrays, call.inputs)])
        visits, n = equal_groups(shape[0], shape[3], call.bM)
        with prefetching(visits):
            return kernels.launch(call, visits, n, interpret)
    return f, avals


def build_megablox(kernel, shape, tile, interpret=False):
    """The static twin of megablox's gmm (for dx with its transposed right operand) or tgmm."""
    module = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
    (M, _, _, E), (bM, bK, bN) = shape, tile
    visits, n = equal_groups(M, E, bM)
    offsets = Formula(lambda e: e * (M // E), E + 1)
    metadata = offsets, visits.group, visits.block

    def f(a, b):
        sizes = jnp.zeros(E, jnp.int32)  # only their number is looked at
        with prefetching(metadata, Formula(lambda _: 0, 1)), \
                mock.patch.object(module, "make_group_metadata", lambda **_: (metadata, n)):
            if kernel == "dw":  # takes x as (K, M), and transposes it again
                return module.tgmm.__wrapped__(a.T, b, sizes, a.dtype, tiling=tuple(tile), interpret=interpret)
            tiling = (bM, bN, bK) if kernel == "dx" else tuple(tile)
            return module.gmm.__wrapped__(a, b, sizes, a.dtype, tiling=tiling, transpose_rhs=kernel == "dx",
                                          interpret=interpret)
    return f, [x for x, _ in call_of(kernel, shape, tile).inputs]


def estimates_file():
    """Where estimates are kept: another file for other code or other versions of what compiles it."""
    code = b"".join((HERE / name).read_bytes() for name in ("kernels.py", "bench_kernels.py"))
    versions = " ".join(importlib.metadata.version(name) for name in ("jax", "libtpu"))
    return Path("out") / f"kernel-estimates-{hashlib.sha256(code + versions.encode()).hexdigest()[:12]}.json"


def kept_estimate(*args):
    """estimate(*args), from the file where it is there."""
    path, key = estimates_file(), json.dumps(args)
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if key not in known:
        known[key] = estimate(*args)
        path.parent.mkdir(exist_ok=True)
        run.write_json(path, known)
    return known[key]


def estimate(side, generation, kernel, shape, tile):
    """Predicted cycles of a side's twin ("ours", "megablox"), of all that its program contains."""
    key = {"kernel": kernel, "shape": shape, "tile": tile}
    operations = pallas.predict_cycles(f"bench_kernels:build_{side}", key, HERE, GENERATIONS[generation][0], 900)
    print(side, generation, key, operations, flush=True)
    return sum(operation["cycles"] for operation in operations)


# The table -------------------------------------------------------------------------------
def predicted(generation, kernel, shape, tile, beside):
    """One row: a kernel at given blocks; beside: megablox at the same ones, too."""
    M, K, N, E = shape
    call, flops = call_of(kernel, shape, tile), 2 * M * K * N
    cycles = kept_estimate("ours", generation, kernel, shape, tile)
    theirs = kept_estimate("megablox", generation, kernel, shape, tile) if beside else None
    for value in filter(None, (cycles, theirs)):  # raises ValueError for fewer cycles than the FLOPs take
        pallas.predicted_seconds(value, 0, flops, generation)
    moved = kernels.hbm_bytes(call, np.full(E, M // E))
    return {"generation": generation, "kernel": kernel, "M": M, "K": K, "N": N, "E": E, "tile": list(tile),
            "cycles": cycles, "bound": flops / GENERATIONS[generation][1], "megablox": theirs, "bytes": moved,
            "flops": flops, "seconds": pallas.predicted_seconds(cycles, moved, flops, generation),
            "vmem": kernels.vmem(call), "rows_multiplied": rows_multiplied(shape, call.bM)}


def rows_multiplied(shape, bM, draws=100):
    """Rows multiplied by rows there are, for equal groups and, as a mean, for uneven ones: each row's expert is drawn
    from probabilities which are themselves drawn evenly from all there are (Dirichlet, 1)."""
    M, _, _, E = shape
    blocks = jax.jit(lambda sizes: kernels.visits_of(sizes, M, bM)[0].live[0])
    random = np.random.default_rng(0)
    uneven = [random.multinomial(M, random.dirichlet(np.ones(E))) for _ in range(draws)]
    equal, *counts = (int(blocks(np.asarray(sizes, np.int32))) for sizes in (np.full(E, M // E), *uneven))
    return {"equal": equal * bM / M, "uneven": float(np.mean(counts)) * bM / M}


def measure_all():
    """Writes results/kernels.json: rows as in bench.json, all predicted, and what README.md's tables need."""
    made_with, table = profiling.provenance(), []
    for shape in (PUBLISHED, *SHAPES):
        M, _, _, E = shape
        equal = EQUAL._replace(bM=min(EQUAL.bM, M // E))
        for generation, kernel in itertools.product(*([["v5e"], ["forward"]] if shape == PUBLISHED else
                                                      [GENERATIONS, KERNELS])):
            table.append(predicted(generation, kernel, shape, equal, beside=True))
            tile = Tile(*map(min, getattr(kernels.tiles_for(generation, M, E), kernel), shape))
            if tile != equal:
                table.append(predicted(generation, kernel, shape, tile, beside=False))
    rows = [{"name": f"grouped matmul {r['kernel']}, {r['M']} x {r['K']} x {r['N']}, E {r['E']}, {r['generation']}, "
                     f"blocks {tuple(r['tile'])}", "metric": "cycles", "value": r["cycles"], "unit": "cycles",
             "baseline": r["megablox"] and "megablox, same blocks",
             "ratio": r["megablox"] and r["megablox"] / r["cycles"], "predicted": True} for r in table]
    made_with["libtpu"] = importlib.metadata.version("libtpu")
    (HERE / "results").mkdir(exist_ok=True)
    run.write_json(HERE / "results" / "kernels.json", {
        "provenance": made_with, "note": CALIBRATION, "rows": rows, "table": table, "published_ms": MEASURED_MS})


def readme_tables(result):
    """{name: Markdown} of the tables that README.md takes from results/kernels.json."""
    def blocks(r):
        return " × ".join(map(str, r["tile"]))

    def shape(r):
        return f"{r['M']:,} × {r['K']:,} × {r['N']:,}, {r['E']}"

    cycles = [{"chip": r["generation"], "kernel": r["kernel"], "M × K × N, E": shape(r), "blocks": blocks(r),
               "cycles": f"{r['cycles'] / 1e3:,.0f}k", "over the MXU bound": f"{r['cycles'] / r['bound']:.2f}",
               "megablox": f"{r['megablox'] / 1e3:,.0f}k" if r["megablox"] else "–",
               "ours / megablox": f"**{r['cycles'] / r['megablox']:.2f}**" if r["megablox"] else "–",
               "HBM, MB": f"{r['bytes'] / 1e6:,.0f}", "VMEM, MiB": f"{r['vmem'] / 2**20:.0f}",
               "ms": f"{1e3 * r['seconds']:.3f}",
               "rows multiplied, equal / uneven": " / ".join(
                   f"{r['rows_multiplied'][groups]:.2f}" for groups in ("equal", "uneven"))}
              for r in result["table"]]
    mine = [r for r in result["table"] if (r["M"], r["K"], r["N"], r["E"]) == PUBLISHED and r["kernel"] == "forward"
            and r["generation"] == "v5e"]
    published = [{MEASURED: f"this kernel, blocks {blocks(r)}", "ms": f"{1e3 * r['seconds']:.2f}", "how": "predicted"}
                 for r in mine]
    for name, title in (("ragged_dot", "XLA's default `lax.ragged_dot`"), ("tokamax", "tokamax's kernel, tuned")):
        published.append({MEASURED: title, "ms": f"{result['published_ms'][name]:.2f}",
                          "how": "measured, published by tokamax"})
    return {"kernels": profiling.markdown_table(cycles), "kernels-published": profiling.markdown_table(published)}


def write_readme():
    """Puts each table between its marks in README.md, <!-- table:NAME --> and <!-- /table -->."""
    path = HERE / "README.md"
    text = path.read_text(encoding="utf-8")
    result = json.loads((HERE / "results" / "kernels.json").read_text(encoding="utf-8"))
    for name, table in readme_tables(result).items():
        before, mark, rest = text.partition(f"<!-- table:{name} -->\n")
        if mark:
            text = before + mark + table.rstrip() + "\n" + rest[rest.index("<!-- /table -->"):]
    path.write_text(text, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readme", action="store_true")
    if not parser.parse_args().readme:
        run.prepare_host()
        measure_all()
    if (HERE / "README.md").exists():
        write_readme()


if __name__ == "__main__":
    main()
