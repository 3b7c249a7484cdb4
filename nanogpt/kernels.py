"""FlashAttention, forward and backward, and attention of one token over a KV cache, as Pallas kernels.

Legend: B batch, H query heads, G kv heads, R = H / G query heads that share a kv head, T query time, S key time,
K head dim; bT, bS rows of a query and of a key tile; b, h, g, r, i, j grid indices (i query tile, j key tile).
Sources: Milakov & Gimelshein 2018 (online softmax); Dao et al. 2022 and Dao 2023 (FlashAttention 1 and 2).

1. The mathematics, in base 2, whose exponential is what the hardware computes: with c = log2(e) / sqrt(K),

       s_ts = c q_t . k_s    m_t = max_s s_ts    l_t = sum_s 2^(s_ts - m_t)    o_t = sum_s 2^(s_ts - m_t) v_s / l_t

   over the keys s that query t sees: all S, or, causal, those with s <= t + S - T (the last query sees every key). A
   query that sees none gives 0. Keys come a tile at a time. A tile with the larger maximum m' changes what was summed
   so far only by a factor, so one pass suffices and no row of scores is ever whole:

       l <- l 2^(m - m') + sum_s 2^(s_ts - m')        acc <- acc 2^(m - m') + sum_s 2^(s_ts - m') v_s        m <- m'

   Kept for the backward pass: L_t = m_t + log2 l_t (infinite where nothing is seen), which gives every probability back
   as p_ts = 2^(s_ts - L_t). With the cotangent g of o:

       dv_s = sum_t p_ts g_t        dp_ts = g_t . v_s        D_t = sum_s p_ts dp_ts = g_t . o_t
       ds_ts = p_ts (dp_ts - D_t)   dq_t = sum_s ds_ts k_s / sqrt(K)      dk_s = sum_t ds_ts q_t / sqrt(K)

   HBM traffic: naive attention writes and reads T x S scores and probabilities several times; here q, o and L pass
   once, k and v once a query tile: 2 BHK (2T + 2S ceil(T / bT)) bytes in bfloat16.
"""
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu

import common.pallas
from common.pallas import budget, pad_axis, round_up


# 2. The reference ------------------------------------------------------------------------
def attention_reference(q, k, v, causal=True):
    """Softmax attention with T x S scores in memory; arguments and result as in flash_attention."""
    (B, H, T, K), (G, S) = q.shape, k.shape[1:3]
    wide = wide_of(q)
    s = jnp.einsum("bgrtk,bgsk->bgrts", q.reshape(B, G, H // G, T, K), k, preferred_element_type=wide) * K**-0.5
    if causal:
        s = jnp.where(jnp.tril(jnp.ones((T, S), bool), S - T), s, -jnp.inf)
    p = jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True, initial=jnp.finfo(wide).min)))
    total = p.sum(-1, keepdims=True)
    p = p / jnp.where(total > 0, total, 1)
    return jnp.einsum("bgrts,bgsk->bgrtk", p.astype(v.dtype), v).reshape(B, H, T, K)


def wide_of(x):
    """The dtype in which sums are taken: at least float32, and float64 for float64 (finite differences need it)."""
    return jnp.promote_types(x.dtype, jnp.float32)


# 3. The grid. One (b, h); columns are key tiles j, rows query tiles i; bT = bS, T = S, causal:
#
#              j = 0   1   2   3
#            +---+---+---+---+     \   partly hidden: computed, and the hidden scores set to -inf
#      i = 0 | \ | . | . | . |     #   whole: computed without a mask
#            +---+---+---+---+     .   hidden: neither computed nor fetched (the index map repeats the tile before)
#          1 | # | \ | . | . |
#            +---+---+---+---+     forward and dq: row by row, j fastest; m, l and acc live from j = 0 to the last j
#          2 | # | # | \ | . |     dk and dv: column by column, (r, i) fastest; dk and dv live through a column, over
#            +---+---+---+---+                all query heads r of the kv head
#          3 | # | # | # | \ |
#            +---+---+---+---+     Only the edges and the diagonal pay for masks. Where T or S is no multiple of its
#                                  tile, the last tile reads garbage (NaN in interpret mode), which is zeroed or masked.
#
# 4. operand       | block     | index (b, h, i, j)       | fetched again
#    q, g, o, L, D | (bT, K|1) | (b, h, i)                | once a query tile (dk, dv: once a tile below the diagonal)
#    k, v          | (bS, K)   | (b, h / R, min(j, last)) | once a tile below the diagonal (dk, dv: once a key tile)
#    o, L, dq, D   | as above  | (b, h, i)                | written when i changes
#    dk, dv        | (bS, K)   | (b, g, j)                | written when j changes
def quotient(n, size):
    """n // size for n >= 0. Of signed numbers `//` takes half a dozen more instructions; int32 whatever x64 says."""
    return lax.div(n, np.int32(size))


class Tile(NamedTuple):
    """How one kernel cuts the scores up; in the form "gpu" only bT and bS count."""
    bT: int
    bS: int
    strip: int = 0  # rows of a strip of a tile on the diagonal (see Tiling.parts); 0: no strips
    keys_first: bool = False  # forward on TPU: scores lie as keys x queries, so that the softmax reduces over sublanes


class Tiling(NamedTuple):
    """Which tiles exist and what each of them sees. Tile indices are Python ints or traced int32 scalars."""
    T: int
    S: int
    K: int
    bT: int
    bS: int
    strip: int
    keys_first: bool
    causal: bool

    def key_tiles(self, i):
        """How many key tiles, from the first on, hold keys that query tile i sees."""
        if not self.causal:
            return pl.cdiv(self.S, self.bS)
        keys = jnp.maximum(jnp.minimum((i + 1) * self.bT, self.T) + self.S - self.T, 0)
        return quotient(keys + self.bS - 1, self.bS)

    def first_query_tile(self, j):
        """The first query tile that sees key tile j."""
        if not self.causal:
            return 0
        return quotient(jnp.maximum(j * self.bS + self.T - self.S, 0), self.bT)

    def key_tile(self, i, j):
        """The key tile to hold at step j of query tile i: past those that it sees, the last of them stays."""
        return jnp.minimum(j, jnp.maximum(self.key_tiles(i) - 1, 0)) if self.causal else j

    def query_tile(self, j, i):
        """The query tile to hold at step i of key tile j: before those that see it, the first of them waits."""
        last = pl.cdiv(self.T, self.bT) - 1
        return jnp.minimum(jnp.maximum(i, self.first_query_tile(j)), last) if self.causal else i

    def parts(self):
        """[(queries, keys, seen)]: what is computed of a tile on the diagonal or at the edge, as slices of its rows,
        and how many of those keys, from the first on, every query of the part sees.

        Where the diagonal runs from corner to corner of its tiles, a strip of queries needs the keys up to its own end
        only: of n strips together that is (n + 1) / 2n of the tile.
        """
        aligned = self.causal and self.bT == self.bS and (self.S - self.T) % self.bS == 0
        if not (aligned and self.strip):
            return [(slice(0, self.bT), slice(0, self.bS), 0)]
        ends = [min(start + self.strip, self.bT) for start in range(0, self.bT, self.strip)]
        return [(slice(start, end), slice(0, end), start) for start, end in zip([0, *ends], ends)]


def visible(tiling, i, j, queries, keys, query_axis):
    """Which scores count, of rows `queries` and `keys` (slices) of tiles i and j: queries x keys for query_axis 0.

    Causal, that a query sees a key implies that the key exists. What queries past the edge see doesn't matter.
    """
    size = [0, 0]
    size[query_axis], size[1 - query_axis] = queries.stop - queries.start, keys.stop - keys.start
    s, first = lax.broadcasted_iota(jnp.int32, size, 1 - query_axis), j * tiling.bS + keys.start
    if not tiling.causal:
        return s < tiling.S - first
    t = lax.broadcasted_iota(jnp.int32, size, query_axis)
    return s - t <= i * tiling.bT + queries.start + tiling.S - tiling.T - first  # one comparison with a scalar


def hide(s, tiling, i, j, queries, keys, seen=0, query_axis=0):
    """Scores with the hidden ones set to -inf, but for those of the first `seen` keys, which aren't looked at."""
    if seen:
        shown, rest = jnp.split(s, [seen], axis=1 - query_axis)
        rest = hide(rest, tiling, i, j, queries, slice(keys.start + seen, keys.stop), 0, query_axis)
        return jnp.concatenate([shown, rest], axis=1 - query_axis)
    return jnp.where(visible(tiling, i, j, queries, keys, query_axis), s, -jnp.inf)


def zero_past(x, start, n, tile, axis=0, value=0):
    """x, whose rows begin at `start`, with those at or past n zeroed, if the last tile reaches past n at all. There a
    block holds garbage (NaN in interpret mode), and 0 x NaN is NaN: masking the scores is not enough."""
    if n % tile == 0:
        return x
    inside = start + lax.broadcasted_iota(jnp.int32, x.shape, axis) < n
    return jnp.where(inside, x, jnp.asarray(value, x.dtype))


# 5. Budget, tiles of 2,048 x 2,048, K = 128, bfloat16 (`vmem` counts it for every call): 2 x (inputs + outputs) +
#    scratch + scores and their copies = 38 MiB forward, 58 dq, 72 dk and dv, of the 100 that VMEM_LIMIT asks for.
#    Intensity: 4TSK FLOPs over 4SK T / bT bytes of keys: bT FLOPs a byte. The ridge lies at 240 (v5e) and 560 (v6e):
#    tiles of a thousand queries are bound by arithmetic.


# 6. The mathematics of one tile, used by both forms ---------------------------------------
NN, NT, TN = (((1,), (0,)), ((), ())), (((1,), (1,)), ((), ())), (((0,), (0,)), ((), ()))


def dot(a, b, dims):
    """a b (NN), a b^T (NT) or a^T b (TN), accumulated in at least float32."""
    return lax.dot_general(a, b, dims, preferred_element_type=wide_of(a))


def scale(K):
    """c: from a dot product to a score in base 2."""
    return math.log2(math.e) / math.sqrt(K)


def scaled(q, K):
    """c q in q's dtype: rounded once here, which both passes do alike, so that p sums to 1 in the backward pass too."""
    return (q.astype(wide_of(q)) * scale(K)).astype(q.dtype)


def rescale(m, m_new):
    """The factor of what was summed up under the maximum m."""
    return jnp.exp2(m - m_new)


def softmax_step(s, v, m, l, acc, key_axis=1):
    """One tile of the online softmax. s: queries x keys, m and l: (queries, 1), acc: (queries, K), v: (keys, K); all
    but v transposed where key_axis is 0."""
    m_new = jnp.maximum(m, s.max(key_axis, keepdims=True))
    p, factor = jnp.exp2(s - m_new), rescale(m, m_new)
    pv = dot(p.astype(v.dtype), v, NN) if key_axis == 1 else dot(v, p.astype(v.dtype), TN)
    return m_new, l * factor + p.sum(key_axis, keepdims=True), acc * factor + pv


def softmax_end(m, l, acc):
    """o and L. Where nothing was seen l is 0: o = 0, and L = inf makes every p of the backward pass 0."""
    seen = l > 0
    l = jnp.where(seen, l, 1)
    return acc * (1 / l), jnp.where(seen, m + jnp.log2(l), jnp.inf)


def gradient_step(s, dp, lse, D):
    """p and ds of one tile: queries x keys with columns lse and D, or keys x queries with rows."""
    p = jnp.exp2(s - lse)
    return p, p * (dp - D)


# TPU: the grid walks the tiles, and scratch in VMEM keeps what is summed up between its steps -----------------------
# Edges: scores of keys past S are hidden; queries past T get L = inf, so that their p is 0 in dk and dv; what rows of
# one's own compute there is dropped when the block is written.
def to_row(x):
    """(n, 1) -> (1, n). Spread over the lanes first: Mosaic transposes whole (8, 128) tiles."""
    return jnp.broadcast_to(x, (x.shape[0], 128)).T[:1]


def to_column(x):
    """(1, n) -> (n, 1)."""
    return jnp.broadcast_to(x, (128, x.shape[1])).T[:, :1]


def each_tile(tiling, i, j, step, ragged=False):
    """Calls step(queries, keys, seen) for the parts of tile (i, j) that are to be computed: slices of its rows, and
    what `hide` is told, or None where nothing is hidden. Nothing for a tile above the diagonal. ragged: the last key
    tile has keys to hide."""
    queries, keys = slice(0, tiling.bT), slice(0, tiling.bS)
    whole = True
    if tiling.causal:
        whole &= (j + 1) * tiling.bS <= i * tiling.bT + 1 + tiling.S - tiling.T
    if ragged and tiling.S % tiling.bS:
        whole &= (j + 1) * tiling.bS <= tiling.S
    pl.when(whole)(lambda: step(queries, keys, None))
    if whole is True:
        return

    @pl.when((j < tiling.key_tiles(i)) & ~whole)
    def _():
        for part in tiling.parts():
            step(*part)


def forward_tpu(q, k, v, o, lse, q_scaled, m, l, acc, *, tiling):
    # q, o, q_scaled: (bT, K); k, v: (bS, K); lse: (1, bT); m, l: (bT, 1), acc: (bT, K), or transposed (keys_first)
    i, j, key_axis = pl.program_id(2), pl.program_id(3), 0 if tiling.keys_first else 1

    @pl.when(j == 0)
    def _():
        q_scaled[...] = scaled(q[...], tiling.K)
        m[...] = jnp.full_like(m, jnp.finfo(m.dtype).min)  # not -inf: -inf - -inf is NaN
        l[...], acc[...] = jnp.zeros_like(l), jnp.zeros_like(acc)

    def step(queries, keys, seen):
        at = (slice(None), queries) if tiling.keys_first else (queries, slice(None))
        q_rows, k_rows, v_rows = q_scaled[queries], k[keys], v[keys]
        s = dot(k_rows, q_rows, NT) if tiling.keys_first else dot(q_rows, k_rows, NT)
        if seen is not None:
            s = hide(s, tiling, i, j, queries, keys, seen, 1 - key_axis)
            v_rows = zero_past(v_rows, j * tiling.bS + keys.start, tiling.S, tiling.bS)
        m[at], l[at], acc[at] = softmax_step(s, v_rows, m[at], l[at], acc[at], key_axis)

    each_tile(tiling, i, j, step, ragged=True)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        out, lse_out = softmax_end(m[...], l[...], acc[...])
        o[...] = (out.T if tiling.keys_first else out).astype(o.dtype)
        lse[...] = lse_out if tiling.keys_first else to_row(lse_out)


def dq_tpu(q, k, v, o, g, lse, dq, D, q_scaled, lse_column, D_column, acc, *, tiling):
    # q, o, g, dq, q_scaled, acc: (bT, K); k, v: (bS, K); lse, D: (1, bT); lse_column, D_column: (bT, 1)
    i, j = pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _():
        q_scaled[...], lse_column[...], acc[...] = scaled(q[...], tiling.K), to_column(lse[...]), jnp.zeros_like(acc)
        D_column[...] = (g[...].astype(acc.dtype) * o[...].astype(acc.dtype)).sum(1, keepdims=True)
        D[...] = to_row(D_column[...])

    def step(queries, keys, seen):
        k_rows, v_rows = (zero_past(x[keys], j * tiling.bS + keys.start, tiling.S, tiling.bS) for x in (k, v))
        s, dp = dot(q_scaled[queries], k_rows, NT), dot(g[queries], v_rows, NT)
        if seen is not None:
            s = hide(s, tiling, i, j, queries, keys, seen)
        ds = gradient_step(s, dp, lse_column[queries], D_column[queries])[1]
        acc[queries] += dot(ds.astype(k_rows.dtype), k_rows, NN)

    each_tile(tiling, i, j, step, ragged=True)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        dq[...] = (acc[...] / math.sqrt(tiling.K)).astype(dq.dtype)


def dkv_tpu(q, k, v, g, lse, D, dk, dv, dk_sum, dv_sum, *, tiling):
    # q, g: (bT, K); k, v, dk, dv, dk_sum, dv_sum: (bS, K); lse, D: (1, bT). Scores lie as keys x queries: lse and D
    # are rows then, and both products take p and ds as they are.
    j, r, i = (pl.program_id(axis) for axis in (2, 3, 4))

    @pl.when((r == 0) & (i == 0))
    def _():
        dk_sum[...], dv_sum[...] = jnp.zeros_like(dk_sum), jnp.zeros_like(dv_sum)

    def step(queries, keys, seen):
        inside = functools.partial(zero_past, start=i * tiling.bT + queries.start, n=tiling.T, tile=tiling.bT)
        q_rows, g_rows = inside(q[queries]), inside(g[queries])
        lse_row, D_row = inside(lse[:, queries], axis=1, value=jnp.inf), inside(D[:, queries], axis=1)
        q_rows = scaled(q_rows, tiling.K)
        s, dp = dot(k[keys], q_rows, NT), dot(v[keys], g_rows, NT)
        if seen is not None:
            s = hide(s, tiling, i, j, queries, keys, seen, 1)
        p, ds = gradient_step(s, dp, lse_row, D_row)
        dv_sum[keys] += dot(p.astype(g_rows.dtype), g_rows, NN)
        dk_sum[keys] += dot(ds.astype(q_rows.dtype), q_rows, NN)

    each_tile(tiling, i, j, step)

    @pl.when((r == pl.num_programs(3) - 1) & (i == pl.num_programs(4) - 1))
    def _():
        dk[...] = (dk_sum[...] * math.log(2)).astype(dk.dtype)  # c ln 2 = 1 / sqrt(K), and c is in the scaled q
        dv[...] = dv_sum[...].astype(dv.dtype)


# GPU: Triton has no scratch that outlives a grid step: the loop over tiles is in the body, which carries the sums -----
# T and S are padded with zeros to whole tiles and K to a power of two (T', S', K'), as Triton's shapes have to be.
def rows(index, size):
    return pl.ds(index * size, size)


def masked_scores(tiling, i, j, query_axis, a, b):
    return hide(dot(a, b, NT), tiling, i, j, slice(0, tiling.bT), slice(0, tiling.bS), 0, query_axis)


def forward_gpu(q, k, v, o, lse, *, tiling):
    # q, o: (bT, K'); k, v: (S', K'); lse: (bT,)
    i, wide = pl.program_id(2), wide_of(q)
    q_scaled = scaled(q[...], tiling.K)

    def step(j, carry):
        at = rows(j, tiling.bS)
        return softmax_step(masked_scores(tiling, i, j, 0, q_scaled, k[at, :]), v[at, :], *carry)

    start = (jnp.full((tiling.bT, 1), jnp.finfo(wide).min, wide), jnp.zeros((tiling.bT, 1), wide),
             jnp.zeros(q.shape, wide))
    out, column = softmax_end(*lax.fori_loop(0, tiling.key_tiles(i), step, start))
    o[...], lse[...] = out.astype(o.dtype), column[:, 0]


def dq_gpu(q, k, v, o, g, lse, dq, D, *, tiling):
    # q, o, g, dq: (bT, K'); k, v: (S', K'); lse, D: (bT,)
    i, wide = pl.program_id(2), wide_of(q)
    q_scaled, g_tile, lse_column = scaled(q[...], tiling.K), g[...], lse[...][:, None]
    D_column = (g_tile.astype(wide) * o[...].astype(wide)).sum(1, keepdims=True)
    D[...] = D_column[:, 0]

    def step(j, total):
        at = rows(j, tiling.bS)
        s, dp = masked_scores(tiling, i, j, 0, q_scaled, k[at, :]), dot(g_tile, v[at, :], NT)
        ds = gradient_step(s, dp, lse_column, D_column)[1]
        return total + dot(ds.astype(k.dtype), k[at, :], NN)

    total = lax.fori_loop(0, tiling.key_tiles(i), step, jnp.zeros(q.shape, wide))
    dq[...] = (total / math.sqrt(tiling.K)).astype(dq.dtype)


def dkv_gpu(q, k, v, g, lse, D, dk, dv, *, tiling):
    # q, g: (R, T', K'); k, v, dk, dv: (bS, K'); lse, D: (R, T')
    j, wide = pl.program_id(2), wide_of(q)
    k_tile, v_tile, R, query_tiles = k[...], v[...], q.shape[0], q.shape[1] // tiling.bT

    def step(n, sums):
        r, i = lax.div(n, query_tiles - first), first + lax.rem(n, query_tiles - first)
        at = rows(i, tiling.bT)
        q_tile, g_tile = scaled(q[r, at, :], tiling.K), g[r, at, :]
        s, dp = masked_scores(tiling, i, j, 1, k_tile, q_tile), dot(v_tile, g_tile, NT)
        p, ds = gradient_step(s, dp, lse[r, at][None], D[r, at][None])
        return sums[0] + dot(ds.astype(q.dtype), q_tile, NN), sums[1] + dot(p.astype(g.dtype), g_tile, NN)

    first = tiling.first_query_tile(j)
    zero = jnp.zeros(k.shape, wide)
    dk_sum, dv_sum = lax.fori_loop(0, R * (query_tiles - first), step, (zero, zero))
    dk[...], dv[...] = (dk_sum * math.log(2)).astype(dk.dtype), dv_sum.astype(dv.dtype)


# 7. The wrappers -------------------------------------------------------------------------
class Tiles(NamedTuple):
    """The Tile of each kernel."""
    forward: Tile
    dq: Tile
    dkv: Tile


class How(NamedTuple):
    """What a call is compiled for; hashable, as custom_vjp's static argument."""
    causal: bool
    form: str
    tiles: Tiles
    interpret: object


VMEM_LIMIT = 100 * 2**20  # of the 128 MiB of a v5e or v6e core; the compiler grants 16 or 32 MiB unless asked
GPU_TILES = Tiles(Tile(128, 64), Tile(64, 64), Tile(64, 64))  # not tuned: no GPU was at hand
SMALL_TILES = Tiles(*[Tile(512, 512, 128)] * 3)  # fit into 16 MiB
# By (generation, causal), from results/kernels-sweep.json: the fewest predicted cycles at T = 2,048 and 8,192, K = 128.
TPU_TILES = {
    ("v5e", True): Tiles(Tile(2048, 2048, 512, True), Tile(2048, 2048, 256), Tile(2048, 2048, 256)),
    ("v5e", False): Tiles(Tile(1024, 2048), Tile(2048, 2048), Tile(2048, 2048)),
    ("v6e", True): Tiles(Tile(2048, 2048, 512, True), Tile(2048, 2048, 256), Tile(2048, 2048, 256)),
    ("v6e", False): Tiles(Tile(2048, 2048, 0, True), Tile(2048, 2048), Tile(2048, 2048)),
}


def generation():
    """"v5e" or "v6e" where that is what is compiled for, else None."""
    target = jax.sharding.get_abstract_mesh().abstract_device
    kind = target.device_kind if target else jax.devices()[0].device_kind
    return {"TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v6 lite": "v6e", "TPU v6e": "v6e"}.get(kind)


def tiles_for(generation, causal):
    """The Tiles of a TPU generation; small ones for those that were not tuned for, and for the interpreter."""
    return TPU_TILES.get((generation, causal), SMALL_TILES)


def choose_form(form=None):
    """"tpu", "gpu" or "reference": the form asked for, or else that of the device being compiled for.

    On a CPU that is the reference: kernels could only be interpreted there. Raises: ValueError for another name.
    """
    if form is None:
        target = jax.sharding.get_abstract_mesh().abstract_device
        platform = target.platform if target else jax.default_backend()
        return {"tpu": "tpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu"}.get(platform, "reference")
    if form not in ("tpu", "gpu", "reference"):
        raise ValueError(f"form={form!r} is not one of tpu, gpu, reference")
    return form


def check_shapes(q, k, v):
    """Raises ValueError, naming the shapes, unless q is (B, H, T, K), k and v are (B, G, S, K) and G divides H."""
    if not (q.ndim == k.ndim == 4 and k.shape == v.shape and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]):
        raise ValueError(f"attention takes q (B, H, T, K) and k, v (B, G, S, K); got {q.shape}, {k.shape}, {v.shape}")
    if 0 in q.shape or 0 in k.shape or q.shape[1] % k.shape[1]:
        raise ValueError(f"q {q.shape} has H = {q.shape[1]} heads, k {k.shape} has G = {k.shape[1]}: H must be a "
                         "multiple of G, and no size may be 0")
    if not (q.dtype == k.dtype == v.dtype and jnp.issubdtype(q.dtype, jnp.floating)):
        raise ValueError(f"q, k and v must have one floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}")


def flash_attention(q, k, v, causal=True, *, form=None, tiles=None, interpret=None):
    """softmax(q k^T / sqrt(K)) v without the matrix of scores: memory grows with T + S, not with T S.

    Args: q: (B, H, T, K); k, v: (B, G, S, K), H a multiple of G: query head h reads kv head h // (H / G); one
        floating dtype. causal: query t sees the keys s <= t + S - T. form: see choose_form. tiles: Tiles, by default
        those of tiles_for, for a TPU. interpret: as in common.pallas.interpret.
    Returns: (B, H, T, K), q's dtype; sums in at least float32. A query that sees no key gives 0, in value and gradient.
    Reverse mode only, once. Raises: ValueError for shapes or dtypes that don't fit together.
    """
    check_shapes(q, k, v)
    form = choose_form(form)
    if form == "reference":
        return attention_reference(q, k, v, causal)
    tiles = tiles or (GPU_TILES if form == "gpu" else tiles_for(generation(), causal))
    return _flash(q, k, v, How(causal, form, tiles, interpret))


def tiling_of(q, k, tile, causal):
    """The tile, made smaller so that T and S are shared out evenly: for T = 2,050 two tiles of 1,152, not of 2,048.
    Whole 128s, as L and D lie along the lanes."""
    def even(n, size):
        return round_up(pl.cdiv(n, pl.cdiv(n, size)), min(size, 128))

    (T, K), S = q.shape[2:], k.shape[2]
    return Tiling(T, S, K, *tile._replace(bT=even(T, tile.bT), bS=even(S, tile.bS)), causal)


class Call(NamedTuple):
    """A kernel about to be launched: what pallas_call needs, and what a benchmark counts bytes from."""
    body: object
    tiling: Tiling
    grid: tuple  # (B, heads, parallel axis, sequential axes ...)
    inputs: list  # (array, BlockSpec) pairs
    outputs: list  # (ShapeDtypeStruct, BlockSpec) pairs
    products: int  # matrix products of a tile, T S K multiplications each over all tiles
    scratch: tuple = ()  # ShapeDtypeStructs


def vmem(call):
    """VMEM bytes of a TPU call, by common.pallas.budget; the scores of a tile, p and their copies are temporaries."""
    blocks = [[(spec.block_shape, x.dtype) for x, spec in pairs] for pairs in (call.inputs, call.outputs)]
    scores = call.tiling.bT * call.tiling.bS * 4
    return budget(*blocks, [(x.shape, x.dtype) for x in call.scratch], call.products * scores, VMEM_LIMIT)


def launch(call, how):
    """The outputs of a call, in how's form."""
    (arrays, in_specs), (out_shapes, out_specs) = zip(*call.inputs), zip(*call.outputs)
    t, (B, H) = call.tiling, arrays[0].shape[:2]
    scores = B * H * t.T * t.S // (2 if t.causal else 1)
    cost = pl.CostEstimate(flops=2 * call.products * scores * t.K, transcendentals=scores, bytes_accessed=sum(
        math.prod(x.shape) * x.dtype.itemsize for x in (*arrays, *out_shapes)))
    interpreted = common.pallas.interpret(how.interpret)
    if how.form == "gpu":
        params = plgpu.CompilerParams(num_warps=4, num_stages=2)
    else:
        if not interpreted:  # XLA would move whole operands into VMEM, without regard to what the kernel needs of it
            arrays = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in arrays]
            out_shapes = [pltpu.HBM(x.shape, x.dtype) for x in out_shapes]
        semantics = ("parallel",) * 3 + ("arbitrary",) * (len(call.grid) - 3)
        # Asked for in full: where a tile is ragged or cut into strips, the compiler needs more than `vmem` counts.
        limit = VMEM_LIMIT if vmem(call) > common.pallas.VMEM_LIMIT else common.pallas.VMEM_LIMIT
        params = pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=limit)
    return pl.pallas_call(
        functools.partial(call.body, tiling=t), grid=call.grid, in_specs=in_specs, out_specs=out_specs,
        out_shape=out_shapes, scratch_shapes=[pltpu.VMEM(x.shape, x.dtype) for x in call.scratch],
        name=f"flash_{call.body.__name__}", compiler_params=params, cost_estimate=cost, interpret=interpreted)(*arrays)


def padded(x, tile=1):
    """(B, heads, n, K) with n padded to whole tiles and K to a power of two, at least the 16 of a Triton product."""
    return pad_axis(pad_axis(x, 2, tile), 3, max(16, pl.next_power_of_2(x.shape[3])))


def like(x, *shape):
    """x's shape and dtype; with a shape, that and the dtype of its sums."""
    return jax.ShapeDtypeStruct(shape or x.shape, wide_of(x) if shape else x.dtype)


def forward_call_tpu(q, k, v, how):
    (B, H, T, K), R, t = q.shape, q.shape[1] // k.shape[1], tiling_of(q, k, how.tiles.forward, how.causal)
    tile, keys, row = tpu_specs(t, R)
    stat, acc = ((1, t.bT), (K, t.bT)) if t.keys_first else ((t.bT, 1), (t.bT, K))
    return Call(forward_tpu, t, (B, H, pl.cdiv(T, t.bT), pl.cdiv(t.S, t.bS)), [(q, tile), (k, keys), (v, keys)],
                [(like(q), tile), (like(q, B, H, 1, T), row)], 2,
                (jax.ShapeDtypeStruct((t.bT, K), q.dtype), like(q, *stat), like(q, *stat), like(q, *acc)))


def dq_call_tpu(q, k, v, o, g, lse, how):
    (B, H, T, K), R, t = q.shape, q.shape[1] // k.shape[1], tiling_of(q, k, how.tiles.dq, how.causal)
    tile, keys, row = tpu_specs(t, R)
    column = like(q, t.bT, 1)
    return Call(dq_tpu, t, (B, H, pl.cdiv(T, t.bT), pl.cdiv(t.S, t.bS)),
                [(q, tile), (k, keys), (v, keys), (o, tile), (g, tile), (lse, row)],
                [(like(q), tile), (like(lse), row)], 3,
                (jax.ShapeDtypeStruct((t.bT, K), q.dtype), column, column, like(q, t.bT, K)))


def dkv_call_tpu(q, k, v, g, lse, D, how):
    (B, H, T, K), (G, S), t = q.shape, k.shape[1:3], tiling_of(q, k, how.tiles.dkv, how.causal)
    R = H // G
    tile = pl.BlockSpec((None, None, t.bT, K), lambda b, g, j, r, i: (b, g * R + r, t.query_tile(j, i), 0))
    row = pl.BlockSpec((None, None, 1, t.bT), lambda b, g, j, r, i: (b, g * R + r, 0, t.query_tile(j, i)))
    keys = pl.BlockSpec((None, None, t.bS, K), lambda b, g, j, r, i: (b, g, j, 0))
    return Call(dkv_tpu, t, (B, G, pl.cdiv(S, t.bS), R, pl.cdiv(T, t.bT)),
                [(q, tile), (k, keys), (v, keys), (g, tile), (lse, row), (D, row)], [(like(k), keys), (like(v), keys)],
                4, (like(k, t.bS, K),) * 2)


def tpu_specs(t, R):
    """Query tile, key tile and row of statistics on a grid (b, h, i, j)."""
    return (pl.BlockSpec((None, None, t.bT, t.K), lambda b, h, i, j: (b, h, i, 0)),
            pl.BlockSpec((None, None, t.bS, t.K), lambda b, h, i, j: (b, quotient(h, R), t.key_tile(i, j), 0)),
            pl.BlockSpec((None, None, 1, t.bT), lambda b, h, i, j: (b, h, 0, i)))


def forward_call_gpu(q, k, v, how):
    (B, H, T, _), R, t = q.shape, q.shape[1] // k.shape[1], tiling_of(q, k, how.tiles.forward, how.causal)
    q, k, v = padded(q, t.bT), padded(k, t.bS), padded(v, t.bS)
    tile, keys, row = gpu_specs(t, R, k)
    return Call(forward_gpu, t, (B, H, pl.cdiv(T, t.bT)), [(q, tile), (k, keys), (v, keys)],
                [(like(q), tile), (like(q, B, H, 1, q.shape[2]), row)], 2)


def dq_call_gpu(q, k, v, o, g, lse, how):
    (B, H, T, _), R, t = q.shape, q.shape[1] // k.shape[1], tiling_of(q, k, how.tiles.dq, how.causal)
    q, o, g, k, v = *(padded(x, t.bT) for x in (q, o, g)), padded(k, t.bS), padded(v, t.bS)
    lse, (tile, keys, row) = pad_axis(lse, 3, t.bT), gpu_specs(t, R, k)
    return Call(dq_gpu, t, (B, H, pl.cdiv(T, t.bT)),
                [(q, tile), (k, keys), (v, keys), (o, tile), (g, tile), (lse, row)],
                [(like(q), tile), (like(lse), row)], 3)


def dkv_call_gpu(q, k, v, g, lse, D, how):
    (B, H), (G, S), t = q.shape[:2], k.shape[1:3], tiling_of(q, k, how.tiles.dkv, how.causal)
    q, g, k, v = padded(q, t.bT), padded(g, t.bT), padded(k, t.bS), padded(v, t.bS)
    lse, D = pad_axis(lse, 3, t.bT), pad_axis(D, 3, t.bT)
    group = pl.BlockSpec((None, H // G, *q.shape[2:]), lambda b, g, j: (b, g, 0, 0))
    row = pl.BlockSpec((None, H // G, None, lse.shape[3]), lambda b, g, j: (b, g, 0, 0))
    tile = pl.BlockSpec((None, None, t.bS, k.shape[3]), lambda b, g, j: (b, g, j, 0))
    return Call(dkv_gpu, t, (B, G, pl.cdiv(S, t.bS)),
                [(q, group), (k, tile), (v, tile), (g, group), (lse, row), (D, row)],
                [(like(k), tile), (like(v), tile)], 4)


def gpu_specs(t, R, k):
    """Query tile, all keys of a head, and row of statistics on a grid (b, h, i)."""
    return (pl.BlockSpec((None, None, t.bT, k.shape[3]), lambda b, h, i: (b, h, i, 0)),
            pl.BlockSpec((None, None, *k.shape[2:]), lambda b, h, i: (b, quotient(h, R), 0, 0)),
            pl.BlockSpec((None, None, None, t.bT), lambda b, h, i: (b, h, 0, i)))


def forward(q, k, v, how):
    """o: (B, H, T, K), and L: (B, H, 1, T) in at least float32."""
    o, lse = launch((forward_call_gpu if how.form == "gpu" else forward_call_tpu)(q, k, v, how), how)
    return o[:, :, :q.shape[2], :q.shape[3]], lse[..., :q.shape[2]]


def gradients(q, k, v, o, g, lse, how):
    """dq, dk and dv. The dq kernel, which has g and o at hand, hands D on to the other one."""
    (T, K), S = q.shape[2:], k.shape[2]
    on_dq, on_dkv = (dq_call_gpu, dkv_call_gpu) if how.form == "gpu" else (dq_call_tpu, dkv_call_tpu)
    dq, D = launch(on_dq(q, k, v, o, g, lse, how), how)
    dk, dv = launch(on_dkv(q, k, v, g, lse, D[..., :T], how), how)
    return dq[:, :, :T, :K], dk[:, :, :S, :K], dv[:, :, :S, :K]


# 8. The VJP ------------------------------------------------------------------------------
# residual | dtype            | bytes         | instead of
# q, k, v  | theirs           | (kept anyway) |
# o        | q's              | BHTK x 2      | D would need the scores
# L        | at least float32 | BHT x 4       | the probabilities, BHTS x 2
@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _flash(q, k, v, how):
    return forward(q, k, v, how)[0]


def _flash_fwd(q, k, v, how):
    o, lse = forward(q, k, v, how)
    return o, (q, k, v, o, lse)


def _flash_bwd(how, residuals, g):
    q, k, v, o, lse = residuals
    return gradients(q, k, v, o, g, lse, how)


_flash.defvjp(_flash_fwd, _flash_bwd)


# One token over a KV cache ---------------------------------------------------------------
# Grid (b, g, j), j over key tiles of the cache; the length is known before the grid starts (scalar prefetch), so tiles
# behind it are neither computed nor fetched: a step reads 2 BG length K elements, and is bound by them. The running
# softmax starts with the token's own key, which isn't in the cache yet: it is never empty.
def decode_tpu(length, q, k_new, v_new, k, v, o, m, l, acc, q_scaled, *, K):
    # length: (1,) int32 in SMEM; q, o, acc, q_scaled: (R, K); k_new, v_new: (1, K); k, v: (bS, K); m, l: (R, 1)
    j, bS, wide = pl.program_id(2), k.shape[0], acc.dtype

    @pl.when(j == 0)
    def _():
        q_scaled[...] = scaled(q[...], K)
        m[...] = (q_scaled[...].astype(wide) * k_new[...].astype(wide)).sum(1, keepdims=True)
        l[...], acc[...] = jnp.ones_like(l), jnp.broadcast_to(v_new[...].astype(wide), acc.shape)

    @pl.when(j * bS < length[0])
    def _():
        at = j * bS + lax.broadcasted_iota(jnp.int32, (bS, 1), 0)
        s = dot(q_scaled[...], k[...], NT)
        s = jnp.where(j * bS + lax.broadcasted_iota(jnp.int32, s.shape, 1) < length[0], s, -jnp.inf)
        v_rows = jnp.where(at < length[0], v[...], jnp.zeros_like(v))  # what lies there may be anything
        m[...], l[...], acc[...] = softmax_step(s, v_rows, m[...], l[...], acc[...])

    @pl.when(j == pl.num_programs(2) - 1)
    def _():
        o[...] = (acc[...] / l[...]).astype(o.dtype)


def decode_gpu(length, q, k_new, v_new, k, v, o, *, bS, K):
    # length: (1,) int32; q, k_new, v_new, o: (K',) of one head; k, v: (S', K'). Vectors: Triton's product needs 16 rows
    wide = wide_of(q)
    n, q_scaled = length[0], scaled(q[...], K).astype(wide)

    def step(j, carry):
        m, l, acc = carry
        at = rows(j, bS)
        past = j * bS + lax.broadcasted_iota(jnp.int32, (bS,), 0) < n
        s = jnp.where(past, (q_scaled[None] * k[at, :].astype(wide)).sum(1), -jnp.inf)
        v_rows = jnp.where(past[:, None], v[at, :].astype(wide), 0)
        m_new = jnp.maximum(m, s.max())
        p, factor = jnp.exp2(s - m_new), rescale(m, m_new)
        return m_new, l * factor + p.sum(), acc * factor + (p[:, None] * v_rows).sum(0)

    start = ((q_scaled * k_new[...].astype(wide)).sum(), jnp.ones((), wide), v_new[...].astype(wide))
    _, l, acc = lax.fori_loop(0, quotient(n + bS - 1, bS), step, start)
    o[...] = (acc / l).astype(o.dtype)


def decode_attention(q, k, v, k_old, v_old, past, *, form=None, tile=512, interpret=None):
    """model.attend_cache as a kernel: one query over the cached keys where `past`, and over its own key.

    Args: q: (B, H, 1, K); k, v: (B, G, 1, K), G dividing H; k_old, v_old: (B, G, S, K); past: (S,) bool, True for the
        first `length` positions and False after them; what the cache holds there isn't read, or is masked.
        form, interpret: as in flash_attention, but a CPU interprets the TPU form; tile: keys at once.
    Returns: (B, H, 1, K), q's dtype. No gradient. Raises: ValueError for shapes that don't fit together.
    """
    check_shapes(q, k_old, v_old)
    (B, H, T, K), (G, S) = q.shape, k_old.shape[1:3]
    if T != 1 or not k.shape == v.shape == (B, G, 1, K) or past.shape != (S,):
        raise ValueError(f"decoding takes q (B, H, 1, K), k and v (B, G, 1, K) and past (S,); got {q.shape}, "
                         f"{k.shape}, {v.shape}, {past.shape} with a cache of {k_old.shape}")
    R, bS, length = H // G, min(tile, round_up(S, 128)), past.sum(dtype=jnp.int32)[None]
    if asked(form) == "gpu":
        q, k, v = (padded(x) for x in (q, k, v))
        k_old, v_old = padded(k_old, bS), padded(v_old, bS)
        head = pl.BlockSpec((None, None, None, q.shape[3]), lambda b, h: (b, h, 0, 0))
        own = pl.BlockSpec((None, None, None, q.shape[3]), lambda b, h: (b, quotient(h, R), 0, 0))
        cache = pl.BlockSpec((None, None, *k_old.shape[2:]), lambda b, h: (b, quotient(h, R), 0, 0))
        o = pl.pallas_call(functools.partial(decode_gpu, bS=bS, K=K), grid=(B, H), name="flash_decode_gpu",
                           in_specs=[pl.BlockSpec((1,), lambda b, h: (0,)), head, own, own, cache, cache],
                           out_specs=head, out_shape=like(q), interpret=common.pallas.interpret(interpret),
                           compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2))(
                               length, q, k, v, k_old, v_old)
        return o[..., :K]
    group = pl.BlockSpec((None, None, R, K), lambda b, g, j, n: (b, g, 0, 0))
    own = pl.BlockSpec((None, None, 1, K), lambda b, g, j, n: (b, g, 0, 0))
    cache = pl.BlockSpec((None, None, bS, K), lambda b, g, j, n: (
        b, g, jnp.minimum(j, quotient(jnp.maximum(n[0] - 1, 0), bS)), 0))  # behind the length the last tile stays
    q = q.reshape(B, G, R, K)
    scratch = [like(q, R, 1), like(q, R, 1), like(q, R, K), jax.ShapeDtypeStruct((R, K), q.dtype)]
    o = pl.pallas_call(functools.partial(decode_tpu, K=K), name="flash_decode_tpu", out_shape=like(q),
                       grid_spec=pltpu.PrefetchScalarGridSpec(
                           num_scalar_prefetch=1, grid=(B, G, pl.cdiv(S, bS)),
                           in_specs=[group, own, own, cache, cache], out_specs=group,
                           scratch_shapes=[pltpu.VMEM(x.shape, x.dtype) for x in scratch]),
                       compiler_params=pltpu.CompilerParams(
                           dimension_semantics=("parallel", "parallel", "arbitrary")),
                       interpret=common.pallas.interpret(interpret))(length, q, k, v, k_old, v_old)
    return o.reshape(B, H, 1, K)


# The model's attention -------------------------------------------------------------------
def asked(form=None):
    """The form of a kernel that was asked for by name: where nothing compiles it, the TPU form, interpreted."""
    form = choose_form(form)
    return "tpu" if form == "reference" else form


def attention(q, k, v, rate=0.0, key=None):
    """flash_attention with the signature of model.attention, for forward(attention=...). Causal.

    Raises: ValueError for dropout: the kernels never hold the probabilities that it drops.
    """
    if key is not None and rate > 0:
        raise ValueError(f"dropout={rate}: the attention kernels drop no attention probabilities; set dropout to 0, or "
                         "take the reference attention")
    return flash_attention(q, k, v, form=asked())
