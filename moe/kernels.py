"""A grouped matrix product and both its gradients as Pallas kernels for TPU: what dropless experts compute.

Legend: M rows, sorted by group (expert); E groups; K and N, the axes of a group's matrix; I the contracted one of K and
N, O the other (forward I = K, for dx I = N); bM, bK, bN, bI, bO a block; i, o, k, n, v grid indices (v the visit).
Sources: Gale et al. 2022 (MegaBlocks: dropless experts as block-sparse products); JAX's megablox `gmm` (the schedule).

1. The mathematics. Group e owns the rows m with ends_(e-1) <= m < ends_e, where ends = cumsum(group_sizes); e(m) is the
   group of row m, and g the cotangent of y:

       y_m = x_m W_e(m)        dx_m = g_m W_e(m)^T        dW_e = sum over e's rows of x_m^T g_m

   Rows past the last group belong to none: y = dx = 0 there, and they add to no dW.

   A group's rows begin and end anywhere, blocks of rows don't. So a *visit* is a pair of a block of rows and a group
   that has rows in it: it multiplies the whole block by the group's matrix and keeps the group's own rows. Of
   T = ceil(M / bM) blocks and E groups that is at most T + E - 1 visits, whatever the sizes: the work grows with M, not
   with E M (the masked dense form), and no group is padded to a capacity.

   HBM traffic: x passes once a block of columns, y once, and W once, where all of K is in one block: consecutive visits
   of a group then share its matrix. 2 (M K ceil(N / bN) + E K N + M N) bytes in bfloat16. With K in several blocks, W
   passes once a visit. The dense form writes and reads E M N products instead.
"""
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import common.pallas
from common.pallas import budget, round_up


# 2. The reference ------------------------------------------------------------------------
def grouped_matmul_reference(x, w, group_sizes):
    """Every row times every matrix, and the products of other groups dropped; as grouped_matmul, E times its FLOPs."""
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(x.shape[0])
    own = (row >= (ends - group_sizes)[:, None]) & (row < ends[:, None])  # (E, M)
    products = jnp.einsum("mk,ekn->emn", x, w, preferred_element_type=wide_of(x))
    return jnp.where(own[..., None], products, 0).sum(0).astype(x.dtype)


def wide_of(x):
    """The dtype in which sums are taken: at least float32, and float64 for float64 (finite differences need it)."""
    return jnp.promote_types(x.dtype, jnp.float32)


# 3. The grid. Groups A (5 rows), B (0), C (8), then 2 rows of none; bM = 4:
#
#      rows  |A A A A|A C C C|C C C C|C - -|        y and dx: grid (o, v, i), i fastest: a sum over I ends before the
#      block |   0   |   1   |   2   |  3  |        next visit begins, and blocks of columns come one after the other.
#      visit |   0   | 1   2 |   3   | 4  5|        Visits to a block are consecutive: it stays in VMEM until all of its
#      group |   A   | A   C |   C   | C  -|        rows are there. Visit 5 writes the zeros, and computes nothing.
#
#      visit |   0   |1 2 3  |   4   |  5  |        dW: grid (k, n, v), v fastest: a group's visits are consecutive, and
#      group |   A   |A B C  |   C   |  C  |        its sum stays in VMEM. Visit 2 is B's, of no rows: it writes B's
#                                                   zeros. The rows of none have no visit.
#
#    How many visits there are, and of what, depends on the sizes: that is data. It is computed before the kernel and
#    prefetched into SMEM, where index maps can read it, and the grid is as long as there are visits (a dynamic bound).
#
# 4. operand   | block    | index                                  | fetched again
#    x (y); g  | (bM, bI) | block of rows of v, i                  | every step; where I is one block, once a block of
#              |          |                                        | rows (and o)
#    w         | (bI, bO) | group of v, i, o (NT: o, i)            | every step; there once a group (and o)
#    y; dx     | (bM, bO) | block of rows of v, o                  | written when the block of rows (or o) changes
#    x, g (dW) | (bM, bK) | block of rows of v, k (g: (bM, bN); n) | once a block of rows, for each k and n
#    dW        | (bK, bN) | group of v, k, n                       | written when the group changes
#    The visits of rows of none hold what the last visit before them held: they fetch nothing.
class Visits(NamedTuple):
    """What the grid walks along its axis v: int32 vectors with an entry for each visit (and unused ones behind them).

    `live` (1,): how many multiply; those behind them, in y and dx, only write zeros.
    """
    block: jax.Array  # of rows
    group: jax.Array
    start: jax.Array  # the rows of the block, from start to stop, are the visit's
    stop: jax.Array
    live: jax.Array


def visits_of(group_sizes, M, bM, for_dw=False):
    """(Visits, their number): (E,) int32 -> the walk over M rows in blocks of bM. Traced, not concrete.

    Three invariants, for any sizes: each of the M rows is in exactly one visit (the rows of none are a group of their
    own, E; for dW they are in none); blocks and groups never decrease from a visit to the next; there are at most
    ceil(M / bM) + E visits. For dW each group has a visit, an empty one of no rows.
    """
    E, blocks = group_sizes.shape[0], pl.cdiv(M, bM)
    ends = jnp.minimum(jnp.cumsum(group_sizes, dtype=jnp.int32), M)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])  # (E + 1,)
    ends = jnp.concatenate([ends, jnp.full(1, M, jnp.int32)])
    first = starts // bM
    n = jnp.where(ends > starts, (ends + bM - 1) // bM - first, int(for_dw))
    n = n.at[E].set(0) if for_dw else n
    until = jnp.cumsum(n, dtype=jnp.int32)
    v = jnp.arange(blocks + E + 1, dtype=jnp.int32)
    e = jnp.minimum((v[:, None] >= until).sum(1, dtype=jnp.int32), E)
    block = jnp.clip(first[e] + v - (until - n)[e], 0, blocks - 1)
    start, stop = (jnp.clip(row[e] - block * bM, 0, bM) for row in (starts, ends))
    return Visits(block, jnp.minimum(e, E - 1), start, stop, until[E - 1:E]), until[E]


# 5. Budget, M 8,192, K 4,096, N 14,336, E 8, bfloat16, the blocks of TILES["v5e"].forward, (512, 4096, 1024) (`vmem`
#    counts it for every call, and a compile proves it): 2 x (4 + 8 in + 1 out) + 2 temporaries = 28 MiB of 100 MiB.
#    2MKN = 962 GFLOPs for 2.1 GB (`hbm_bytes`): 455 FLOPs a byte, above the ridge of v5e (240) and below v6e's (560),
#    where wider blocks, (512, 4096, 2048), read x half as often.


# 6. The bodies ---------------------------------------------------------------------------
NN, NT, TN = (((1,), (0,)), ((), ())), (((1,), (1,)), ((), ())), (((0,), (0,)), ((), ()))


def dot(a, b, dims):
    """a b (NN), a b^T (NT) or a^T b (TN), accumulated in at least float32."""
    return lax.dot_general(a, b, dims, preferred_element_type=wide_of(a))


def own_rows(shape, start, stop):
    """True in the rows that are a visit's."""
    row = lax.broadcasted_iota(jnp.int32, shape, 0)
    return (row >= start) & (row < stop)


def zero_past(x, n, axis):
    """x with zeros from index n of an axis on. What a block holds past its array's edge is garbage (NaN in interpret
    mode), and 0 x NaN is NaN: both factors of a product need this."""
    return jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, axis) < n, x, jnp.zeros_like(x))


def multiply(visits, x, w, y, *acc, dims, I):
    # x: (bM, bI); w: (bI, bO), or (bO, bI) for dims NT; y: (bM, bO); acc: (bM, bO), where I is more than one block
    v, i, last = pl.program_id(1), pl.program_id(2), pl.num_programs(2) - 1
    (bM, bI), live = x.shape, v < visits.live[0]

    def write(rows):
        whole = (visits.start[v] == 0) & (visits.stop[v] == bM)

        @pl.when(whole)
        def _():
            y[...] = rows().astype(y.dtype)

        @pl.when(~whole)
        def _():
            own = own_rows(y.shape, visits.start[v], visits.stop[v])
            y[...] = jnp.where(own, rows().astype(y.dtype), y[...])

    def partial_sum(rest=bI):
        a, b = x[...], w[...]
        if rest < bI:
            a, b = zero_past(a, rest, 1), zero_past(b, rest, dims[0][1][0])
        return dot(a, b, dims)

    @pl.when(live)
    def _():
        if not acc:
            return write(partial_sum)
        total, = acc

        @pl.when(i == 0)
        def _():
            total[...] = partial_sum()

        @pl.when((i > 0) & (i < last))
        def _():
            total[...] += partial_sum()

        @pl.when(i == last)
        def _():
            write(lambda: total[...] + partial_sum((I - 1) % bI + 1))

    @pl.when(~live & (i == last))
    def _():
        write(lambda: jnp.zeros(y.shape, wide_of(y)))


def multiply_transposed(visits, x, g, dw, total):
    # x: (bM, bK); g: (bM, bN); dw, total: (bK, bN)
    v = pl.program_id(2)
    group, start, stop = visits.group[v], visits.start[v], visits.stop[v]

    @pl.when((v == 0) | (visits.group[jnp.maximum(v - 1, 0)] != group))
    def _():
        total[...] = jnp.zeros_like(total)

    whole = stop - start == x.shape[0]

    @pl.when(whole)
    def _():
        total[...] += dot(x[...], g[...], TN)

    @pl.when((stop > start) & ~whole)
    def _():  # both factors: other groups' rows may hold anything, and those past M do
        a, b = (jnp.where(own_rows(z.shape, start, stop), z[...], jnp.zeros_like(z)) for z in (x, g))
        total[...] += dot(a, b, TN)

    @pl.when((v + 1 == visits.live[0]) | (visits.group[v + 1] != group))
    def _():
        dw[...] = total[...].astype(dw.dtype)


# 7. The wrappers -------------------------------------------------------------------------
class Tile(NamedTuple):
    """The largest block of one kernel along each axis; for a TPU bM a multiple of 16, bK and bN of 128."""
    bM: int
    bK: int
    bN: int


class Tiles(NamedTuple):
    """The Tile of each kernel."""
    forward: Tile
    dx: Tile
    dw: Tile


class How(NamedTuple):
    """What a call is compiled for; hashable, as custom_vjp's static argument."""
    tiles: Tiles
    interpret: object


VMEM_LIMIT = 100 * 2**20  # of the 128 MiB of a v5e or v6e core; the compiler grants 16 or 32 MiB unless asked
SMALL_TILES = Tiles(*[Tile(256, 512, 512)] * 3)  # fit into 16 MiB
# Wide blocks save HBM traffic: where I is one block, w passes once a group. bM stays at 512, as of uneven groups each
# pays for a further block. results/kernels.json has the predictions.
TILES = {"v5e": Tiles(Tile(512, 4096, 1024), Tile(512, 1024, 4096), Tile(512, 1024, 1024)),
         "v6e": Tiles(Tile(512, 4096, 2048), Tile(512, 2048, 4096), Tile(512, 2048, 2048))}


def target():
    """(platform, generation) of the device that is compiled for: ("tpu", "v5e"), ("cpu", None), ..."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = device.platform if device else jax.default_backend()
    kind = device.device_kind if device else jax.devices()[0].device_kind
    return platform, {"TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v6 lite": "v6e", "TPU v6e": "v6e"}.get(kind)


def tiles_for(generation, M, E):
    """The Tiles of a TPU generation, small ones for those that were not tuned for and for the interpreter; with no more
    rows than a group has on average, but at least 128: a visit pays for a whole block."""
    rows = max(128, round_up(pl.cdiv(M, max(E, 1)), 128))
    return Tiles(*(tile._replace(bM=min(tile.bM, rows)) for tile in TILES.get(generation, SMALL_TILES)))


def even(n, largest, multiple):
    """The block size that shares n out evenly: 1,100 in blocks of at most 512 and whole 128s are three of 384. All of n
    where it fits: one block may have any size."""
    return n if n <= largest else round_up(pl.cdiv(n, pl.cdiv(n, largest)), min(largest, multiple))


class Call(NamedTuple):
    """A kernel about to be launched: what pallas_call needs, and what a benchmark counts bytes from."""
    body: Callable
    bM: int
    grid: tuple  # None where the visits go
    inputs: list  # (array, BlockSpec) pairs
    output: tuple  # (ShapeDtypeStruct, BlockSpec)
    scratch: list  # ShapeDtypeStructs
    temporary: tuple  # shape of what the body computes, in at least float32
    name: str


def multiply_call(x, w, tile, transposed=False):
    """y = x W of each row's group: x (M, K), w (E, K, N) -> (M, N); transposed, x W^T: x (M, N) -> (M, K)."""
    (M, I), (E, K, N) = x.shape, w.shape
    O, sizes = (K, (tile.bN, tile.bK)) if transposed else (N, (tile.bK, tile.bN))
    bM, bI, bO = even(M, tile.bM, 16), even(I, sizes[0], 128), even(O, sizes[1], 128)
    last = pl.cdiv(I, bI) - 1

    def held(v, i, visits):
        """The visit and the block of I whose operands are to be there: past the live visits, the last one's."""
        live = visits.live[0]
        return jnp.maximum(jnp.minimum(v, live - 1), 0), jnp.where(v < live, i, last)

    def rows(o, v, i, visits):
        v, i = held(v, i, visits)
        return visits.block[v], i

    def matrix(o, v, i, visits):
        v, i = held(v, i, visits)
        return (visits.group[v], o, i) if transposed else (visits.group[v], i, o)

    y = jax.ShapeDtypeStruct((M, O), x.dtype)
    return Call(functools.partial(multiply, dims=NT if transposed else NN, I=I), bM, (pl.cdiv(O, bO), None, last + 1),
                [(x, pl.BlockSpec((bM, bI), rows)),
                 (w, pl.BlockSpec((None, bO, bI) if transposed else (None, bI, bO), matrix))],
                (y, pl.BlockSpec((bM, bO), lambda o, v, i, visits: (visits.block[v], o))),
                [jax.ShapeDtypeStruct((bM, bO), wide_of(x))] if last else [], (bM, bO),
                "grouped_matmul_dx" if transposed else "grouped_matmul")


def transposed_call(x, g, E, tile):
    """dW = x^T g of each group's rows: x (M, K), g (M, N) -> (E, K, N)."""
    (M, K), N = x.shape, g.shape[1]
    bM, bK, bN = even(M, tile.bM, 16), even(K, tile.bK, 128), even(N, tile.bN, 128)
    return Call(multiply_transposed, bM, (pl.cdiv(K, bK), pl.cdiv(N, bN), None),
                [(x, pl.BlockSpec((bM, bK), lambda k, n, v, visits: (visits.block[v], k))),
                 (g, pl.BlockSpec((bM, bN), lambda k, n, v, visits: (visits.block[v], n)))],
                (jax.ShapeDtypeStruct((E, K, N), x.dtype),
                 pl.BlockSpec((None, bK, bN), lambda k, n, v, visits: (visits.group[v], k, n))),
                [jax.ShapeDtypeStruct((bK, bN), wide_of(x))], (bK, bN), "grouped_matmul_dw")


def vmem(call):
    """VMEM bytes of a call, by common.pallas.budget. Raises: ValueError above VMEM_LIMIT."""
    inputs, output = ([(spec.block_shape, x.dtype) for x, spec in pairs] for pairs in (call.inputs, [call.output]))
    return budget(inputs, output, [(x.shape, x.dtype) for x in call.scratch], 4 * math.prod(call.temporary), VMEM_LIMIT)


def hbm_bytes(call, group_sizes):
    """Bytes that a call moves between HBM and VMEM for concrete sizes: a block each time that its index changes along
    the grid; what lies past an array's edge isn't moved."""
    M = call.inputs[0][0].shape[0]
    visits, n = visits_of(jnp.asarray(group_sizes, jnp.int32), M, call.bM, call.body is multiply_transposed)
    visits, grid, total = jax.tree.map(np.asarray, visits), [int(n) if size is None else size for size in call.grid], 0
    for x, spec in (*call.inputs, call.output):
        before = None
        for step in np.ndindex(*grid):
            index = tuple(int(i) for i in spec.index_map(*step, visits))
            if index != before:
                sizes = [1 if b is None else min(b, n - i * b) for i, b, n in zip(index, spec.block_shape, x.shape)]
                total += math.prod(sizes) * x.dtype.itemsize
            before = index
    return total


def launch(call, visits, n, interpret):
    """The output of a call on a walk of n visits."""
    arrays, in_specs = zip(*call.inputs)
    out, out_spec = call.output
    cost = pl.CostEstimate(flops=2 * math.prod(arrays[0].shape) * out.shape[-1], transcendentals=0, bytes_accessed=sum(
        math.prod(x.shape) * x.dtype.itemsize for x in (*arrays, out)))
    interpreted = common.pallas.interpret(interpret)
    if not interpreted:  # XLA would move whole operands into VMEM, without regard to what the kernel needs of it
        arrays = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in arrays]
        out = pltpu.HBM(out.shape, out.dtype)
    grid = tuple(n if size is None else size for size in call.grid)
    default = common.pallas.VMEM_LIMIT  # more is asked for well below it: the compiler can need more than `vmem` counts
    limit = VMEM_LIMIT if vmem(call) > 3 * default // 4 else default
    semantics = ["arbitrary" if size is None or i == 2 else "parallel" for i, size in enumerate(call.grid)]
    return pl.pallas_call(
        call.body, out_shape=out, name=call.name, cost_estimate=cost, interpret=interpreted,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=grid, in_specs=in_specs, out_specs=out_spec,
            scratch_shapes=[pltpu.VMEM(x.shape, x.dtype) for x in call.scratch]),
        compiler_params=pltpu.CompilerParams(dimension_semantics=tuple(semantics), vmem_limit_bytes=limit))(
            visits, *arrays)


def at_least(x, *sizes):
    """x with zeros appended where an axis is shorter than that: Mosaic compiles no blocks of one or two rows, and
    pallas_call refuses empty operands. Rows appended are rows of no group, and groups appended have none."""
    widths = [(0, max(size - n, 0)) for n, size in zip(x.shape, sizes)]
    return jnp.pad(x, widths) if np.any(widths) else x


def product(x, w, group_sizes, tile, interpret, transposed=False):
    """x W, or x W^T, of each row's group, of any sizes."""
    M, O = x.shape[0], w.shape[1 if transposed else 2]
    call = multiply_call(at_least(x, 8, 8), at_least(w, 1, 8, 8), tile, transposed)
    visits, n = visits_of(at_least(group_sizes, 1), max(M, 8), call.bM)
    return launch(call, visits, n, interpret)[:M, :O]


def transposed_product(x, g, group_sizes, tile, interpret):
    """x^T g of each group's rows, of any sizes."""
    (M, K), N, E = x.shape, g.shape[1], group_sizes.shape[0]
    call = transposed_call(at_least(x, 8, 8), at_least(g, 8, 8), max(E, 1), tile)
    visits, n = visits_of(at_least(group_sizes, 1), max(M, 8), call.bM, for_dw=True)
    return launch(call, visits, n, interpret)[:E, :K, :N]


def prepared(x, other, group_sizes, tiles, interpret):
    """(group_sizes as int32, How) of valid operands."""
    platform, generation = target()
    if interpret is None and platform not in ("tpu", "cpu"):
        raise NotImplementedError(f"grouped_matmul has no form for {platform}: its sums outlive a grid step, which "
                                  "Triton doesn't offer; jax.lax.ragged_dot runs everywhere")
    if not (x.dtype == other.dtype and jnp.issubdtype(x.dtype, jnp.floating)):
        raise ValueError(f"the operands must have one floating dtype; got {x.dtype} and {other.dtype}: cast one")
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"group_sizes must be integers; got {group_sizes.dtype}")
    tiles = tiles or tiles_for(generation, x.shape[0], group_sizes.shape[0])
    return group_sizes.astype(jnp.int32), How(tiles, interpret)


def grouped_matmul(x, w, group_sizes, *, tiles=None, interpret=None):
    """x[m] @ w[e] for each row m of group e: lax.ragged_dot as a Pallas kernel, with a VJP of two more.

    Args: x: (M, K), rows sorted by group; w: (E, K, N); one floating dtype. group_sizes: (E,) integers, any that are
        not negative, also 0 or M; where their sum exceeds M, the last groups are cut. They are data: other sizes
        compile nothing anew. tiles: Tiles, by default those of tiles_for. interpret: as in common.pallas.interpret.
    Returns: (M, N), x's dtype, sums in at least float32; rows past the last group are 0, in value and gradient. For
        TPU, and interpreted on a CPU. Reverse mode only, once; not under vmap.
    Raises: ValueError for shapes or dtypes that don't fit together, and for tiles that don't fit VMEM;
        NotImplementedError on a GPU.
    """
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1] or group_sizes.shape != w.shape[:1]:
        raise ValueError(f"grouped_matmul takes x (M, K), w (E, K, N) and group_sizes (E,); got {x.shape}, {w.shape} "
                         f"and {group_sizes.shape}")
    group_sizes, how = prepared(x, w, group_sizes, tiles, interpret)
    return _grouped(x, w, group_sizes, how)


def grouped_matmul_transposed(x, g, group_sizes, *, tiles=None, interpret=None):
    """x[rows of e].T @ g[rows of e] for each group e: the gradient of grouped_matmul by w.

    Args: x: (M, K); g: (M, N); the others as in grouped_matmul.
    Returns: (E, K, N), x's dtype, sums in at least float32; 0 for an empty group. Not differentiable.
    Raises: as grouped_matmul.
    """
    if x.ndim != 2 or g.ndim != 2 or x.shape[0] != g.shape[0] or group_sizes.ndim != 1:
        raise ValueError(f"grouped_matmul_transposed takes x (M, K), g (M, N) and group_sizes (E,); got {x.shape}, "
                         f"{g.shape} and {group_sizes.shape}")
    group_sizes, how = prepared(x, g, group_sizes, tiles, interpret)
    return transposed_product(x, g, group_sizes, how.tiles.dw, how.interpret)


# 8. The VJP ------------------------------------------------------------------------------
# residual    | dtype | bytes (bfloat16) | kept anyway?
# x           | x's   | 2MK              | by no one: the layer before it writes it for this product alone
# w           | x's   | 2EKN             | yes: a parameter
# group_sizes | int32 | 4E               | by no one; the visits are computed again (other blocks, and dW's differ)
# dx is the same kernel with w read as its transpose (another index map, and a product by NT): no copy of w is made.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped(x, w, group_sizes, how):
    return product(x, w, group_sizes, how.tiles.forward, how.interpret)


def _grouped_fwd(x, w, group_sizes, how):
    return _grouped(x, w, group_sizes, how), (x, w, group_sizes)


def _grouped_bwd(how, residuals, g):
    x, w, group_sizes = residuals
    return (product(g, w, group_sizes, how.tiles.dx, how.interpret, transposed=True),
            transposed_product(x, g, group_sizes, how.tiles.dw, how.interpret), None)


_grouped.defvjp(_grouped_fwd, _grouped_bwd)
