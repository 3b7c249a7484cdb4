"""A hidden layer as Pallas kernels for TPU: product, bias and ReLU in one, and its gradient in two.

Legend: B batch, I inputs, O outputs of the layer; bB, bI, bO their tiles; i, j, k the grid indices over B, O, I.

1. The mathematics
   y = relu(x w + b),   x: (B, I), w: (I, O), b: (O,)
   With dz = g where y > 0, else 0 (as z > 0 exactly where y > 0, the mask follows from the output):
   dx = dz w^T,   dw = x^T dz,   db = sum over B of dz
   Unfused, z = x w is written once and read twice more (bias, ReLU), and dz is written once and read three times:
   3 BO elements of HBM traffic forward, 4 BO backward. Here z and dz live in VMEM only. XLA fuses bias and ReLU into
   its product too: `bench.py --kernels` puts its predicted time beside ours.
"""
import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from common.pallas import budget, interpret, pick_tile, vmem_bytes


# 2. The reference ------------------------------------------------------------------------
def widen(dtype):
    """At least float32; float64 stays float64, so that finite differences can check a kernel."""
    return jnp.promote_types(dtype, jnp.float32)


def linear_relu_reference(x, w, b):
    """relu(x w + b), computed in at least float32. x: (B, I), w: (I, O), b: (O,) -> (B, O), x's dtype."""
    z = jnp.dot(x, w, preferred_element_type=widen(x.dtype)) + b.astype(widen(b.dtype))
    return jax.nn.relu(z).astype(x.dtype)


def backward_reference(x, w, y, g):
    """(dx, dw, db) of linear_relu_reference at its output y, for a cotangent g: (B, O)."""
    wide = widen(x.dtype)
    dz = jnp.where(y > 0, g, jnp.zeros_like(g))
    dx = jnp.dot(dz, w.T, preferred_element_type=wide).astype(x.dtype)
    dw = jnp.dot(x.T, dz, preferred_element_type=wide).astype(w.dtype)
    return dx, dw, dz.astype(wide).sum(0).astype(w.dtype)


# 3. The grids. The last axis runs fastest and is the reduction: its partial sums stay in a VMEM scratch `acc`.
#
#      forward (i, j, k)             dx (i, k, j)                    dw, db (j, k, i)
#             O                            I                                O
#       +-----+-----+                +-----+-----+                   +-----+-----+
#     B | 0,0 | 0,1 |  each y tile   | 0,0 | 0,1 |  each dx tile   I | 0,0 | 1,0 |  each dw tile sums over i
#       +-----+-----+  sums over k   +-----+-----+  sums over j      +-----+-----+
#       | 1,0 | 1,1 |              B | 1,0 | 1,1 |                   | 0,1 | 1,1 |  db tile j: summed while k = 0
#       +~~~~~+~~~~~+                +~~~~~+~~~~~+                   +~~~~~+~~~~~+
#     Rows and columns past an edge (~) hold garbage, stay in their own row or column, and are dropped when the tile is
#     written. Past the edge of the reduction garbage would be summed: there both factors are set to 0 (`within`),
#     since NaN times 0 is NaN.
#
# 4. kernel  | operand | block    | index map        | fetched again when
#    forward | x       | (bB, bI) | i, j, k -> i, k  | every step (once an i where I is one tile)
#            | w       | (bI, bO) |         -> k, j  | every step (once where I and O are one tile)
#            | b       | (1, bO)  |         -> 0, j  | j changes
#            | y       | (bB, bO) |         -> i, j  | written when i or j changes
#    dx      | g, y    | (bB, bO) | i, k, j -> i, j  | every step (once an i where O is one tile)
#            | w       | (bI, bO) |         -> k, j  | every step
#            | dx      | (bB, bI) |         -> i, k  | written when i or k changes
#    dw      | x       | (bB, bI) | j, k, i -> i, k  | every step
#            | g, y    | (bB, bO) |         -> i, j  | every step (once a j where B is one tile)
#            | dw      | (bI, bO) |         -> k, j  | written when j or k changes
#            | db      | (1, bO)  |         -> 0, j  | written when j changes
#
# 5. Budget, bfloat16, output tile 1024 x 1024, reduction tile 512 (`plan` computes it and hands it to the compiler as
#    the kernel's VMEM limit, so a compile proves it):
#      forward 2 x (1 + 1 + 0.03 in + 2 out) + 4 scratch + 7 temporaries = 19 MiB of 32 MiB
#      dx      2 x (1 + 1 + 1 in + 2 out)    + 4 scratch + 8 temporaries = 22 MiB
#      dw      2 x (1 + 1 + 1 in + 2 out)    + 4 scratch + 8 temporaries = 22 MiB
#    Each does 2 BIO FLOPs. A step of 2 x 1024 x 1024 x 512 FLOPs fetches 2 MiB forward: 512 FLOP/byte, above the ridge
#    of v5e (240), just below that of v6e (560). An output tile of 1024 x 512 would do with the 16 MiB that a kernel is
#    granted unasked, but moves the factors half as often again: predicted 12 % slower forward on v6e.
VMEM = 32 * 2**20


class Block(NamedTuple):
    """How one operand is cut: its whole shape, its tile, and the map from grid indices to the tile's indices."""
    shape: tuple[int, int]
    tile: tuple[int, int]
    index: Callable

    def spec(self):
        return pl.BlockSpec(self.tile, self.index)


class Plan(NamedTuple):
    """What the wrapper needs of one kernel, and what counts its bytes: one description for both."""
    body: Callable
    grid: tuple[int, int, int]
    semantics: tuple[str, str, str]
    inputs: list[Block]
    outputs: list[Block]
    scratch: list[tuple[int, int]]
    vmem: int  # bytes, the budget


def plan(kernel, B, I, O, dtype, tiles=None):
    """The Plan of "forward", "dx" or "dw". tiles: the largest (bB, bI, bO); by default 512 along the reduction, and
    1024 along the other two in bfloat16, 512 in float32.

    Raises: ValueError where the budget exceeds VMEM.
    """
    itemsize = jnp.dtype(dtype).itemsize
    side = 2048 // itemsize
    bB, bI, bO = tiles or {"forward": (side, 512, side), "dx": (side, side, 512), "dw": (512, side, side)}[kernel]
    bB, bI, bO = pick_tile(B, bB, max(8, 32 // itemsize)), pick_tile(I, bI, 128), pick_tile(O, bO, 128)
    nB, nI, nO = pl.cdiv(B, bB), pl.cdiv(I, bI), pl.cdiv(O, bO)
    if kernel == "forward":
        body, grid, semantics = functools.partial(_forward, I=I), (nB, nO, nI), ("parallel", "parallel", "arbitrary")
        inputs = [Block((B, I), (bB, bI), lambda i, j, k: (i, k)), Block((I, O), (bI, bO), lambda i, j, k: (k, j)),
                  Block((1, O), (1, bO), lambda i, j, k: (0, j))]
        outputs, scratch = [Block((B, O), (bB, bO), lambda i, j, k: (i, j))], [(bB, bO)]
    elif kernel == "dx":
        body, grid, semantics = functools.partial(_dx, O=O), (nB, nI, nO), ("parallel", "parallel", "arbitrary")
        inputs = [*2 * [Block((B, O), (bB, bO), lambda i, k, j: (i, j))],
                  Block((I, O), (bI, bO), lambda i, k, j: (k, j))]
        outputs, scratch = [Block((B, I), (bB, bI), lambda i, k, j: (i, k))], [(bB, bI)]
    else:  # the tiles of db stay in place while k runs, so k isn't parallel
        body, grid, semantics = functools.partial(_dw, B=B), (nO, nI, nB), ("parallel", "arbitrary", "arbitrary")
        inputs = [Block((B, I), (bB, bI), lambda j, k, i: (i, k)),
                  *2 * [Block((B, O), (bB, bO), lambda j, k, i: (i, j))]]
        outputs = [Block((I, O), (bI, bO), lambda j, k, i: (k, j)), Block((1, O), (1, bO), lambda j, k, i: (0, j))]
        scratch = [(bI, bO), (1, bO)]
    wide = widen(dtype)
    # The product before it is added to acc, a copy of each block (edge cut off, mask applied), and what the compiler
    # keeps for itself: 0.75 MiB.
    temporaries = vmem_bytes(scratch[0], wide) + sum(vmem_bytes(block.tile, dtype) for block in inputs) + 2**20
    vmem = budget([(block.tile, dtype) for block in inputs], [(block.tile, dtype) for block in outputs],
                  [(shape, wide) for shape in scratch], temporaries, VMEM)
    return Plan(body, grid, semantics, inputs, outputs, scratch, vmem)


def hbm_bytes(kernel, B, I, O, dtype, tiles=None):
    """Bytes that a kernel moves between HBM and VMEM, from its index maps: walking the grid in order, a block is
    fetched (or written) when its index changes; what lies past an array's edge isn't moved."""
    p, total = plan(kernel, B, I, O, dtype, tiles), 0
    for block in (*p.inputs, *p.outputs):
        before = None
        for at in itertools.product(*map(range, p.grid)):
            index = block.index(*at)
            if index != before:
                total += (min(block.tile[0], block.shape[0] - index[0] * block.tile[0])
                          * min(block.tile[1], block.shape[1] - index[1] * block.tile[1]))
            before = index
    return total * jnp.dtype(dtype).itemsize


# 6. The kernel bodies --------------------------------------------------------------------
def within(block, n, size, axis):
    """The n-th block along an axis of `size`, with what lies past the array's edge set to 0."""
    tile = block.shape[axis]
    if size % tile == 0:
        return block
    inside = n * tile + jax.lax.broadcasted_iota(jnp.int32, block.shape, axis) < size
    return jnp.where(inside, block, jnp.zeros_like(block))


def masked(g, y):
    """dz: the cotangent where ReLU let its input through. y is compared in float32: v5e has no bfloat16 comparison."""
    return jnp.where(y.astype(widen(y.dtype)) > 0, g, jnp.zeros_like(g))


def accumulate(acc_ref, a, b, contract):
    """acc += the product of a and b over their axes `contract`; acc starts at 0 with each run of the last grid axis."""
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)
    acc_ref[...] += jax.lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=acc_ref.dtype)


def _forward(x_ref, w_ref, b_ref, y_ref, acc_ref, *, I):  # (bB, bI), (bI, bO), (1, bO), (bB, bO), (bB, bO)
    k = pl.program_id(2)
    accumulate(acc_ref, within(x_ref[...], k, I, 1), within(w_ref[...], k, I, 0), ((1,), (0,)))

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        y_ref[...] = jnp.maximum(acc_ref[...] + b_ref[...].astype(acc_ref.dtype), 0).astype(y_ref.dtype)


def _dx(g_ref, y_ref, w_ref, dx_ref, acc_ref, *, O):  # (bB, bO), (bB, bO), (bI, bO), (bB, bI), (bB, bI)
    j = pl.program_id(2)
    dz = within(masked(g_ref[...], y_ref[...]), j, O, 1)
    accumulate(acc_ref, dz, within(w_ref[...], j, O, 1), ((1,), (1,)))

    @pl.when(j == pl.num_programs(2) - 1)
    def _():
        dx_ref[...] = acc_ref[...].astype(dx_ref.dtype)


def _dw(x_ref, g_ref, y_ref, dw_ref, db_ref, acc_ref, db_acc_ref, *, B):
    # (bB, bI), (bB, bO), (bB, bO), (bI, bO), (1, bO), (bI, bO), (1, bO)
    k, i = pl.program_id(1), pl.program_id(2)
    dz = within(masked(g_ref[...], y_ref[...]), i, B, 0)
    accumulate(acc_ref, within(x_ref[...], i, B, 0), dz, ((0,), (0,)))

    @pl.when((k == 0) & (i == 0))
    def _():
        db_acc_ref[...] = jnp.zeros_like(db_acc_ref)

    @pl.when(k == 0)  # every k sees all of dz: one of them is enough
    def _():
        db_acc_ref[...] += dz.astype(db_acc_ref.dtype).sum(0, keepdims=True)

    @pl.when(i == pl.num_programs(2) - 1)
    def _():
        dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)
        db_ref[...] = db_acc_ref[...].astype(db_ref.dtype)


# 7. The wrapper --------------------------------------------------------------------------
def run_kernel(kernel, B, I, O, tiles, *operands):
    """The outputs of one kernel. An axis shorter than 8, also an empty one, is filled up with 0, which adds nothing
    and is cut off again: Mosaic doesn't compile masked bfloat16 blocks of one or two rows."""
    dtype = operands[0].dtype
    B, I, O = (max(n, 8) for n in (B, I, O))
    p = plan(kernel, B, I, O, dtype, tiles)
    return pl.pallas_call(
        p.body, name=f"linear_relu_{kernel}", grid=p.grid,
        in_specs=[block.spec() for block in p.inputs], out_specs=[block.spec() for block in p.outputs],
        out_shape=[jax.ShapeDtypeStruct(block.shape, dtype) for block in p.outputs],
        scratch_shapes=[pltpu.VMEM(shape, widen(dtype)) for shape in p.scratch],
        compiler_params=pltpu.CompilerParams(dimension_semantics=p.semantics, vmem_limit_bytes=p.vmem),
        cost_estimate=pl.CostEstimate(flops=2 * B * I * O, transcendentals=0,
                                      bytes_accessed=hbm_bytes(kernel, B, I, O, dtype, tiles)),
        interpret=interpret(),
    )(*(jnp.pad(a, [(0, full - n) for full, n in zip(block.shape, a.shape)])
        for a, block in zip(operands, p.inputs)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def linear_relu(x, w, b, tiles=None):
    """relu(x w + b) as one Pallas kernel, with two for its gradient; for TPU, and in interpret mode on CPU.

    Args: x: (B, I), w: (I, O), b: (O,), one floating dtype; any sizes. tiles: see `plan`.
    Returns: (B, O), the same dtype; sums are taken in at least float32. Raises: ValueError for other shapes or
        dtypes. There is no GPU form: the accumulator that survives from one grid step to the next is a TPU notion,
        which the Triton lowering refuses; model.linear_relu runs everywhere.
    """
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0] or b.shape != w.shape[1:]:
        raise ValueError(f"linear_relu takes x (B, I), w (I, O), b (O,); got {x.shape}, {w.shape}, {b.shape}")
    if not x.dtype == w.dtype == b.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"linear_relu takes one floating dtype; got {x.dtype}, {w.dtype}, {b.dtype}")
    B, O = len(x), len(b)
    return run_kernel("forward", B, *w.shape, tiles, x, w, b[None])[0][:B, :O]


# 8. The VJP. residual | dtype | bytes a value of the output | kept anyway?
#    x        | x's   | BI | yes: it is the output of the layer before, or the batch
#    w        | x's   | IO | yes: a parameter
#    y        | x's   | BO | yes: it is the input of the layer after
#    z, dz    | recomputed: dz = g where y > 0, twice (in dx and in dw), which costs 2 BO comparisons and no traffic.
#    So the layer keeps nothing of its own. XLA's own gradient of relu keeps y or a mask of BO bytes as it sees fit.
def _linear_relu_fwd(x, w, b, tiles):
    y = linear_relu(x, w, b, tiles)
    return y, (x, w, y)


def _linear_relu_bwd(tiles, residual, g):
    x, w, y = residual
    (B, I), O = x.shape, w.shape[1]
    dx = run_kernel("dx", B, I, O, tiles, g, y, w)[0]
    dw, db = run_kernel("dw", B, I, O, tiles, x, g, y)
    return dx[:B, :I], dw[:I, :O], db[0, :O]


linear_relu.defvjp(_linear_relu_fwd, _linear_relu_bwd)


# Predictions -----------------------------------------------------------------------------
def prediction(kernel, form, B, I, O, dtype, tiles=None):
    """(f, avals) for common.pallas.predict_cycles. kernel: "forward" or "backward" (dx, dw and db); form: "pallas",
    or "xla" for the reference."""
    x, w, y, b = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((B, I), (I, O), (B, O), (O,)))
    tiles = tuple(tiles) if tiles else None
    if kernel == "forward":
        return (functools.partial(linear_relu, tiles=tiles) if form == "pallas" else linear_relu_reference), (x, w, b)

    def pallas_backward(x, w, y, g):
        return _linear_relu_bwd(tiles, (x, w, y), g)
    return (pallas_backward if form == "pallas" else backward_reference), (x, w, y, y)
