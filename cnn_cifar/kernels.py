"""Batch norm with ReLU as Pallas kernels for TPU: the training form and its gradient, the evaluation form and its own.

Legend: B batch, H height, W width, C channels, N = BHW values a channel. The kernels see x as (A, C, Q): A = HW rows,
Q = B lanes; bA, bC, bQ the tile; c, p, a, q grid indices (p the pass).
Sources: Ioffe & Szegedy 2015 (batch norm); Chan, Golub & LeVeque 1979 (merging of means and variances).

1. The mathematics, for each channel
   mean = sum x / N,  var = sum (x - mean)^2 / N,  r = 1 / sqrt(var + EPS),  y = relu((x - mean) r scale + bias)
   With dz = g where y > 0, else 0, and cotangents g_mean and g_var of the statistics:
   dbias = sum dz,   dscale = sum dz (x - mean) r,
   dx = r scale dz - (r scale dbias - g_mean) / N - (x - mean) (r^2 scale dscale - 2 g_var) / N
   Two sets of values merge by w, the share that the second has of their sum (no step subtracts large squares):
   mean <- mean + w d,   var <- var + w (var' - var) + w (1 - w) d^2,   d = mean' - mean
   So one sweep is enough where sum x^2 / N - mean^2 would cancel: the tests take a mean of 1e4 and a variance of 1 in
   float32.

   HBM traffic in units of N C: two-pass statistics read x three times and write y, 4 forward; the gradient reads x and
   g twice and writes dx, 5. Here the first pass leaves what it fetched in VMEM for the second: 2 and 3, as long as it
   fits, and never more than 3 and 5. XLA leaves in VMEM what fits, too.

   What it is worth (predicted by libtpu, nothing was measured on a TPU): alone, against XLA's own form of the same
   formulae on v5e in bfloat16, forward and backward take 0.87 and 1.08 times as many cycles at 128 x 32 x 32 x 32,
   0.78 and 0.78 times at 128 x 8 x 8 x 96. In the network they are a loss to expect: compiled for v5e, XLA takes the
   mean in the epilogue of the convolution before, normalises and applies ReLU while the convolution after reads its
   input, and needs no temporaries in HBM at a batch of 128. A kernel stands between the two convolutions and ends both
   fusions. (libtpu's evaluator refuses the fusions of the network: there is no number for that.)
"""
import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from common.pallas import budget, interpret, pick_tile, vmem_bytes

EPS = 1e-5  # model.EPS


# 2. The references -----------------------------------------------------------------------
def wide_of(dtype):
    """At least float32; float64 stays float64, so that finite differences can check a kernel."""
    return jnp.promote_types(dtype, jnp.float32)


def batch_norm_relu_inference_reference(x, scale, bias, mean, var):
    """relu((x - mean) / sqrt(var + EPS) * scale + bias), in at least float32, returned in x's dtype."""
    z = (x.astype(wide_of(x.dtype)) - mean) * (lax.rsqrt(var + EPS) * scale) + bias
    return jax.nn.relu(z).astype(x.dtype)


def batch_norm_relu_reference(x, scale, bias):
    """(y, mean, var) by x's own mean and biased variance: (..., C) -> (..., C), (C,), (C,)."""
    wide, axes = x.astype(wide_of(x.dtype)), tuple(range(x.ndim - 1))
    mean = wide.mean(axes)
    var = ((wide - mean) ** 2).mean(axes)
    return batch_norm_relu_inference_reference(x, scale, bias, mean, var), mean, var


def backward_reference(x, scale, bias, mean, var, g, g_mean, g_var):
    """(dx, dscale, dbias) of batch_norm_relu_reference, by the formulae above."""
    axes, N = tuple(range(x.ndim - 1)), x.size // x.shape[-1]
    d, r = x.astype(wide_of(x.dtype)) - mean, lax.rsqrt(var + EPS)
    dz = jnp.where(d * (r * scale) + bias > 0, g.astype(d.dtype), 0)
    dscale, dbias = (dz * d).sum(axes) * r, dz.sum(axes)
    dx = r * scale * dz - (r * scale * dbias - g_mean) / N - d * ((r * r * scale * dscale - 2 * g_var) / N)
    return dx.astype(x.dtype), dscale, dbias


# 3. The grid (c, p, a, q), q fastest. One channel tile c, forward, A = 3 rows of tiles, Q = 2, room for 4 tiles:
#
#       p = 0: statistics      VMEM        p = 1: y
#         q = 0   1                          q = 0   1
#       +-----+-----+     +-----+-----+    +-----+-----+    0 .. 3 come from VMEM, 4 and 5 from HBM again.
#     a |  0  |  1  |     |  0  |  1  |    |  0  |  1  |    Tiles are merged into mean and var one after the other;
#       +-----+-----+     +-----+-----+    +-----+-----+    the gradient sums dscale and dbias in its first pass.
#       |  2  |  3  | --> |  2  |  3  |    |  2  |  3  |    Evaluation needs one pass only, forward and backward.
#       +-----+-----+     +-----+-----+    +-----+-----+    Past an edge of A or Q (~) lies garbage, which is set to 0
#       |  4  |  5  |                      |  4  |  5  |    before it is summed (`within`); past C it stays in its own
#       +~~~~~+~~~~~+                      +~~~~~+~~~~~+    channel. What is written there is dropped.
#
# 4. operand         | block        | index (c, p, a, q)                | fetched again
#    x, g            | (bA, bC, bQ) | a, c, q; of a tile in VMEM: p = 0 | every step of p = 0, and of p = 1 what VMEM
#                    |              | the last one stays in p = 1       | had no room for
#    y, dx           | (bA, bC, bQ) | p a, c, p q                       | written every step of p = 1
#    scale, bias ... | (1, bC)      | c, 0, 0 of (C / bC, 1, bC)        | c changes
#    mean, var, ...  | (1, bC)      | likewise                          | written when c changes
SEMANTICS = "parallel", "arbitrary", "arbitrary", "arbitrary"


class Block(NamedTuple):
    """How one operand is cut: its whole shape, its tile, and the map from grid indices to the tile's indices."""
    shape: tuple
    tile: tuple
    index: Callable
    dtype: object

    def spec(self):
        return pl.BlockSpec(self.tile, self.index)


class Tiles(NamedTuple):
    """The largest tile, and the most tiles of an operand that stay in VMEM between the passes."""
    A: int
    C: int
    Q: int
    kept: int


class Walk(NamedTuple):
    """The walk over the tiles of a channel: true sizes, tile sizes, tiles that stay in VMEM."""
    A: int
    Q: int
    bA: int
    bQ: int
    kept: int

    @property
    def rows(self):
        return pl.cdiv(max(self.A, 1), self.bA)

    @property
    def columns(self):
        return pl.cdiv(max(self.Q, 1), self.bQ)

    def fetched(self, p, a, q):
        """The tile to hold at a step: in the second pass the last one of the first, while the kept ones are used."""
        waits = p * (a * self.columns + q < self.kept)
        return a + waits * (self.rows - 1 - a), q + waits * (self.columns - 1 - q)

    def share(self, a, q, dtype):
        """How much of the values up to and with tile (a, q) are the tile's own: 1 at the first."""
        rows, columns = jnp.minimum(self.bA, self.A - a * self.bA), jnp.minimum(self.bQ, self.Q - q * self.bQ)
        before, own = a * self.bA * self.Q + rows * (q * self.bQ), rows * columns
        return own.astype(dtype), own.astype(dtype) / (before + own).astype(dtype)

    def within(self, tile, a, q):
        """Tile (a, q) with what lies past the edges set to 0."""
        for axis, index, size, n in ((0, a, self.bA, self.A), (2, q, self.bQ, self.Q)):
            if n % size or not n:
                inside = index * size + lax.broadcasted_iota(jnp.int32, tile.shape, axis) < n
                tile = jnp.where(inside, tile, jnp.zeros_like(tile))
        return tile


# 5. Budget, bfloat16, 128 x 32 x 32 x 32 in 8 tiles of 1 MiB (`plan` computes it and hands it to the compiler as the
#    kernel's VMEM limit, so a compile proves it; temporaries: four copies of a tile in float32, and 1 MiB):
#      forward  2 x (1 in + 1 out) + 8 kept + 9 temporaries  = 21 MiB of 100 MiB
#      backward 2 x (2 in + 1 out) + 16 kept + 9 temporaries = 31 MiB
#    About 10 FLOPs a value forward and 20 backward, for 4 and 6 bytes: bound by HBM, on v6e by the vector unit.
VMEM = 100 * 2**20  # of the 128 MiB of a v5e or v6e core
TILE = 2**20  # bytes: a step costs about 500 cycles of its own, which is a quarter MiB from HBM on v5e


class Plan(NamedTuple):
    """What the wrapper needs of one kernel, and what counts its bytes: one description for both."""
    body: Callable
    grid: tuple
    inputs: list[Block]
    outputs: list[Block]
    scratch: list  # (shape, dtype)
    vmem: int  # bytes, the budget


def plan(kernel, shape, dtype, tiles=None):
    """The Plan of "forward", "backward", "inference" or "inference_backward" for x: (B, H, W, C) or (N, C).

    tiles: Tiles; by default about TILE bytes, and as many of them kept as VMEM takes.
    Raises: ValueError where the budget exceeds VMEM.
    """
    k, (Q, *HW, C), wide, itemsize = KERNELS[kernel], shape, wide_of(dtype), jnp.dtype(dtype).itemsize
    A = math.prod(HW)
    bC = pick_tile(C, tiles.C if tiles else 256, max(8, 32 // itemsize))
    bQ = pick_tile(Q, tiles.Q if tiles else max(128, TILE // (bC * itemsize)), 128)
    bA = pick_tile(A, tiles.A if tiles else max(1, TILE // vmem_bytes((bC, bQ), dtype)), 1)
    bA = bA if tiles else pl.cdiv(A, max(pl.cdiv(A, bA), 2)) or 1  # shared out evenly, and not all in one tile
    nC, tile, whole = pl.cdiv(max(C, 1), bC), (bA, bC, bQ), (max(A, 1), max(C, 8), max(Q, 8))
    walk, row, columns = Walk(A, Q, bA, bQ, 0), (None, 1, bC), (k.channels + k.sums, bC, 128)
    steps, slot = walk.rows * walk.columns, k.tensors * vmem_bytes(tile, dtype)
    used = budget([*k.tensors * [(tile, dtype)], *k.channels * [(row, wide)]],
                  [(tile, dtype), *k.sums * [(row, wide)]], [(columns, wide)],
                  4 * vmem_bytes(tile, wide) + 2**20, VMEM)
    kept = max(1, min(steps, tiles.kept if tiles else steps, (VMEM - used) // slot)) if k.passes == 2 else 0
    walk = walk._replace(kept=kept)

    def fetch(c, p, a, q):
        a, q = walk.fetched(p, a, q)
        return a, c, q

    def write(c, p, a, q):
        return (p * a, c, p * q) if k.passes == 2 else (a, c, q)

    channel = Block((nC, 1, bC), row, lambda c, p, a, q: (c, 0, 0), wide)
    return Plan(functools.partial(_body, kernel=k, walk=walk), (nC, k.passes, walk.rows, walk.columns),
                [*k.tensors * [Block(whole, tile, fetch, dtype)], *k.channels * [channel]],
                [Block(whole, tile, write, dtype), *k.sums * [channel]],
                [(columns, wide), *(k.tensors if kept else 0) * [((kept, *tile), dtype)]], used + kept * slot)


def hbm_bytes(kernel, shape, dtype, tiles=None):
    """Bytes that a kernel moves between HBM and VMEM, from its index maps: walking the grid in order, a block is
    fetched (or written) when its index changes; what lies past an array's edge isn't moved."""
    p, total = plan(kernel, shape, dtype, tiles), 0
    for block in (*p.inputs, *p.outputs):
        before = None
        for at in itertools.product(*map(range, p.grid)):
            index = block.index(*at)
            if index != before:
                sizes = (min(tile or 1, n - i * (tile or 1)) for i, tile, n in zip(index, block.tile, block.shape))
                total += math.prod(sizes) * jnp.dtype(block.dtype).itemsize
            before = index
    return total


# 6. The kernel bodies. What differs between the kernels are functions of values: tiles (bA, bC, bQ), and columns
#    (bC, bQ), each lane the same, of the channel operands and of the sums so far, in at least float32 ----------------
def channel_sum(tile):
    return tile.sum(0).sum(1, keepdims=True)


def merge(mean, var, tile_mean, tile_var, share):
    """Mean and variance of two sets of values, of which the second is `share` of all (Chan et al. 1979)."""
    d = tile_mean - mean
    return mean + share * d, var + share * (tile_var - var) + share * (1 - share) * d**2


def through_relu(d, g, slope, bias):
    """dz: the cotangent g where d slope + bias, ReLU's input, is above 0."""
    return jnp.where(d * slope + bias > 0, g.astype(d.dtype), 0)


def statistics(walk, a, q, x, scale, bias, mean, var):
    x, (n, share) = x.astype(mean.dtype), walk.share(a, q, mean.dtype)
    tile_mean = channel_sum(walk.within(x, a, q)) / n
    tile_var = channel_sum(walk.within((x - tile_mean) ** 2, a, q)) / n
    return merge(mean, var, tile_mean, tile_var, share)


def gradient_sums(walk, a, q, x, g, scale, bias, mean, var, *rest):
    """dscale and dbias with a tile's part added; rest: other channel operands, and the two sums so far."""
    d, r, (*_, dscale, dbias) = x.astype(mean.dtype) - mean, lax.rsqrt(var + EPS), rest
    dz = through_relu(d, g, r * scale, bias)
    return dscale + r * channel_sum(walk.within(dz * d, a, q)), dbias + channel_sum(walk.within(dz, a, q))


def gradient(walk, x, g, scale, bias, mean, var, g_mean, g_var, dscale, dbias):
    d, r, N = x.astype(mean.dtype) - mean, lax.rsqrt(var + EPS), max(walk.A * walk.Q, 1)
    slope = r * scale
    constant, factor = (slope * dbias - g_mean) / N, (slope * r * dscale - 2 * g_var) / N
    return slope * through_relu(d, g, slope, bias) - constant - factor * d


def inference_gradient(walk, x, g, scale, bias, mean, var, dscale, dbias):
    d, slope = x.astype(mean.dtype) - mean, lax.rsqrt(var + EPS) * scale
    return slope * through_relu(d, g, slope, bias)


class Kernel(NamedTuple):
    """passes over the tiles; how many tensors come in, channel operands and sums; add(walk, a, q, *tiles, *columns)
    gives the sums with a tile's part, in the first pass; output(walk, *tiles, *columns) the result, in the last."""
    passes: int
    tensors: int
    channels: int
    sums: int
    add: Callable | None
    output: Callable


KERNELS = {
    "forward": Kernel(2, 1, 2, 2, statistics, lambda _, *operands: batch_norm_relu_inference_reference(*operands)),
    "backward": Kernel(2, 2, 6, 2, gradient_sums, gradient),
    "inference": Kernel(1, 1, 4, 0, None, lambda _, *operands: batch_norm_relu_inference_reference(*operands)),
    "inference_backward": Kernel(1, 2, 4, 2, gradient_sums, inference_gradient)}


def to_column(row):
    """(1, n) -> (n, 128), each lane the same: to spread one lane in every use costs a tenth of the time."""
    return jnp.broadcast_to(row, (128, row.shape[1])).T


def to_row(column):
    """(n, 128) -> (1, n)."""
    return column.T[:1]


def _body(*refs, kernel, walk):
    # tensors (bA, bC, bQ), channels (1, bC); out (bA, bC, bQ), totals (1, bC); columns (channels + sums, bC, 128),
    # slots (kept, bA, bC, bQ) of each tensor
    p, a, q = (pl.program_id(axis) for axis in (1, 2, 3))
    n, t, steps = kernel.channels, a * walk.columns + q, walk.rows * walk.columns
    refs = iter(refs)
    tensors, channels, (out,), totals, (columns,), slots = (list(itertools.islice(refs, count)) for count in (
        kernel.tensors, n, 1, kernel.sums, 1, kernel.tensors))

    @pl.when((p == 0) & (t == 0))
    def _():
        for i, row in enumerate(channels):
            columns[i] = to_column(row[...])
        for i in range(kernel.sums):
            columns[n + i] = jnp.zeros(columns.shape[1:], columns.dtype)

    def operands(tiles):
        return [*tiles, *(jnp.tile(columns[i], (1, walk.bQ // 128)) for i in range(n + kernel.sums))]

    def write(tiles):
        out[...] = kernel.output(walk, *operands(tiles)).astype(out.dtype)

    def add(tiles):
        for i, total in enumerate(kernel.add(walk, a, q, *operands(tiles))):
            columns[n + i] = total[:, :128]

        @pl.when(t == steps - 1)
        def _():
            for i, row in enumerate(totals):
                row[...] = to_row(columns[n + i])

    if kernel.passes == 1:
        tiles = [ref[...] for ref in tensors]
        write(tiles)
        if kernel.add:
            add(tiles)
        return

    @pl.when(p == 0)
    def _():
        @pl.when(t < walk.kept)
        def _():
            for slot, ref in zip(slots, tensors):
                slot[t] = ref[...]
        add([ref[...] for ref in tensors])

    @pl.when((p == 1) & (t < walk.kept))
    def _():
        write([slot[t] for slot in slots])

    if walk.kept < steps:
        @pl.when((p == 1) & (t >= walk.kept))
        def _():
            write([ref[...] for ref in tensors])


# 7. The wrappers -------------------------------------------------------------------------
def to_view(x):
    """(B, H, W, C) -> (HW, C, B), (N, C) -> (1, C, N): full lanes, however few the channels."""
    B, *HW, C = x.shape
    return jnp.moveaxis(x, 0, -1).reshape(math.prod(HW), C, B)


def from_view(view, shape):
    B, *HW, C = shape
    return jnp.moveaxis(view.reshape(*HW, C, B), -1, 0)


def fill(x, shape):
    """x with zeros appended up to a shape; a vector is appended to and folded."""
    if x.ndim == 1:
        return jnp.pad(x, (0, math.prod(shape) - len(x))).reshape(shape)
    return jnp.pad(x, [(0, full - n) for full, n in zip(shape, x.shape)])


def run_kernel(kernel, tiles, tensors, channels):
    """The outputs of one kernel on tensors (..., C) and channel operands (C,). An axis of the view shorter than 8,
    also an empty one, is filled up, which the masks hide: Mosaic doesn't compile masked blocks of one or two rows."""
    shape, dtype = tensors[0].shape, tensors[0].dtype
    A, C, Q = math.prod(shape[1:-1]), shape[-1], shape[0]
    p = plan(kernel, shape, dtype, tiles)
    operands = [to_view(x) for x in tensors] + [x.astype(wide_of(dtype)) for x in channels]
    operands = [fill(x, block.shape) for x, block in zip(operands, p.inputs)]
    if not (interpreted := interpret()):  # XLA would move whole operands into the VMEM that the kernel counts on
        operands = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in operands]
    n = math.prod(shape)
    y, *sums = pl.pallas_call(
        p.body, name=f"batch_norm_relu_{kernel}", grid=p.grid,
        in_specs=[block.spec() for block in p.inputs], out_specs=[block.spec() for block in p.outputs],
        out_shape=[jax.ShapeDtypeStruct(block.shape, block.dtype) for block in p.outputs],
        scratch_shapes=[pltpu.VMEM(*scratch) for scratch in p.scratch],
        compiler_params=pltpu.CompilerParams(dimension_semantics=SEMANTICS, vmem_limit_bytes=p.vmem),
        cost_estimate=pl.CostEstimate(flops=10 * n, transcendentals=C,
                                      bytes_accessed=hbm_bytes(kernel, shape, dtype, tiles)),
        interpret=interpreted)(*operands)
    return from_view(y[:A, :C, :Q], shape), *(x.reshape(-1)[:C] for x in sums)


def check(x, *channels):
    """Raises ValueError, naming shapes and dtypes, unless x is (..., C) with C channels, and all are floating."""
    if x.ndim < 2 or any(c.shape != x.shape[-1:] for c in channels):
        raise ValueError(f"batch norm takes x (B, H, W, C) or (N, C) and channel values (C,); got {x.shape} and "
                         f"{', '.join(str(c.shape) for c in channels)}")
    if not all(jnp.issubdtype(c.dtype, jnp.floating) for c in (x, *channels)):
        raise ValueError(f"batch norm takes floating dtypes; got {x.dtype} and "
                         f"{', '.join(str(c.dtype) for c in channels)}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def batch_norm_relu(x, scale, bias, tiles=None):
    """The training form as one Pallas kernel, and one for its gradient; for TPU, and in interpret mode on CPU.

    Args: x: (B, H, W, C) or (N, C), any sizes; scale, bias: (C,); floating. tiles: see `plan`.
    Returns: (relu of x normalised by its own statistics, in x's dtype; mean; biased variance), the latter (C,) in at
        least float32, in which sums are taken; both NaN where N is 0. Gradients flow through all three.
    Raises: ValueError for other shapes or dtypes. Statistics of one device only: model.moments has axis_name.
    There is no GPU form: what stays in VMEM from one grid step to the next is a TPU notion, which the Triton lowering
    refuses; model.batch_norm_relu runs everywhere.
    """
    check(x, scale, bias)
    return run_kernel("forward", tiles, [x], [scale, bias])


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def batch_norm_relu_inference(x, scale, bias, mean, var, tiles=None):
    """The evaluation form: relu of x normalised by the statistics that are passed in, in x's dtype. See above."""
    check(x, scale, bias, mean, var)
    return run_kernel("inference", tiles, [x], [scale, bias, mean, var])[0]


# 8. The VJPs. residual | dtype            | values | kept anyway?
#    x                  | x's              | BHWC   | it is the convolution's output: kept for this alone
#    mean, var          | at least float32 | C      | by the caller, for the running statistics
#    scale, bias        | theirs           | C      | yes: parameters
#    y, dz              | recomputed: ReLU's input from x, at 2 operations a value and no traffic
#    XLA keeps x too, and as it sees fit x - mean or ReLU's mask.
def _training_fwd(x, scale, bias, tiles):
    y, mean, var = batch_norm_relu(x, scale, bias, tiles)
    return (y, mean, var), (x, scale, bias, mean, var)


def _training_bwd(tiles, residuals, cotangents):
    (x, scale, bias, mean, var), (g, g_mean, g_var) = residuals, cotangents
    dx, dscale, dbias = run_kernel("backward", tiles, [x, g], [scale, bias, mean, var, g_mean, g_var])
    return dx, dscale.astype(scale.dtype), dbias.astype(bias.dtype)


def _inference_fwd(x, scale, bias, mean, var, tiles):
    return batch_norm_relu_inference(x, scale, bias, mean, var, tiles), (x, scale, bias, mean, var)


def _inference_bwd(tiles, residuals, g):
    """mean shifts ReLU's input by -r scale, and dr / dvar = -r^3 / 2."""
    x, scale, bias, mean, var = residuals
    dx, dscale, dbias = run_kernel("inference_backward", tiles, [x, g], [scale, bias, mean, var])
    r = lax.rsqrt(var + EPS)
    return (dx, dscale.astype(scale.dtype), dbias.astype(bias.dtype), (-r * scale * dbias).astype(mean.dtype),
            (-r**2 / 2 * scale * dscale).astype(var.dtype))


batch_norm_relu.defvjp(_training_fwd, _training_bwd)
batch_norm_relu_inference.defvjp(_inference_fwd, _inference_bwd)


# Predictions -----------------------------------------------------------------------------
def prediction(kernel, form, shape, dtype):
    """(f, avals) for common.pallas.predict_cycles. kernel: as in `plan`; form: "pallas", or "xla" for the references;
    shape: (B, H, W, C). x, g and the results lie as (HW, C, B)."""
    view = jax.ShapeDtypeStruct((math.prod(shape[1:-1]), shape[-1], shape[0]), dtype)
    channel = jax.ShapeDtypeStruct(shape[-1:], jnp.float32)

    def inference_bwd_reference(x, scale, bias, mean, var, g):
        return jax.vjp(batch_norm_relu_inference_reference, x, scale, bias, mean, var)[1](g)

    f, tensors, channels = {
        ("forward", "pallas"): (batch_norm_relu, 1, 2), ("forward", "xla"): (batch_norm_relu_reference, 1, 2),
        ("backward", "pallas"): (lambda *a: _training_bwd(None, a[:5], a[5:]), 2, 6),
        ("backward", "xla"): (backward_reference, 2, 6),
        ("inference", "pallas"): (batch_norm_relu_inference, 1, 4),
        ("inference", "xla"): (batch_norm_relu_inference_reference, 1, 4),
        ("inference_backward", "pallas"): (lambda *a: _inference_bwd(None, a[:5], a[5]), 2, 4),
        ("inference_backward", "xla"): (inference_bwd_reference, 2, 4)}[kernel, form]

    def g(*views):
        out = f(*(from_view(v, shape) if v.ndim == 3 else v for v in views))
        return jax.tree.map(lambda y: to_view(y) if y.ndim > 1 else y, out)

    avals = [view, *4 * [channel], view, channel, channel] if tensors == 2 else [view, *channels * [channel]]
    return g, avals[:tensors + channels]
