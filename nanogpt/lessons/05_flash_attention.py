# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---
# %% [markdown]
# # FlashAttention: from the N × N matrix to the kernel, block by block
#
# After this lesson you can say what naive attention costs in memory and when XLA saves it, derive the online softmax
# and state what holds after every block, turn a loop over tiles into a Pallas grid, skip the tiles that a causal mask
# hides, keep rows that see nothing free of NaN, and write the backward pass without storing a probability.
#
# It uses this project's `kernels.py` (`attention_reference`, `flash_attention`, `softmax_step`, `Tiling`),
# `model.forward` and `common/pallas.py`. Kernels run in interpret mode, on tiny sizes: nothing here needs an
# accelerator. Its companion picture is `figures/flash_attention.svg`, drawn by `flash_figure.py`.
#
# Letters: **T** queries, **S** keys, **N** = T = S, **K** head size, **bT** × **bS** a tile of scores, **i**, **j** its
# query tile and key tile, **n** tiles along an axis; **s** scores, **m** running maximum, **l** running sum, **acc**
# running sum of values, **o** output, **L** log-sum-exp, **g** cotangent of o.

# %%
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent if "__file__" in globals() else Path.cwd()
sys.path[:0] = [str(PROJECT), str(PROJECT.parent)]  # the project's files, and common/ beside it

# %%
import itertools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
from jax.test_util import check_grads

import kernels
import model
from common.pallas import AotUnavailable, aot_compile
from kernels import Tile, Tiles, Tiling, attention_reference, flash_attention

random = np.random.default_rng(0)


def normal(*shape):
    return random.normal(size=shape).astype(np.float32)


def error(got, want):
    """||got - want|| / ||want||."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)

# %% [markdown]
# ## What XLA fuses for free, and what it does not [S1-053b] (must-read)
# A fusion computes several operations in one pass over memory: what lies between them stays in registers. XLA finds
# fusions by itself, so the first question before writing a kernel is whether it has already done the work.
#
# **Claim.** A chain of elementwise operations is one fusion and needs no temporary: no kernel is worth writing.

# %%
def compiled(f, *shapes):
    return jax.jit(f).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile()


def entry(program):
    """The ENTRY computation of a compiled program: each line is one pass over memory, its fusions' insides hidden."""
    return re.search(r"^ENTRY .*?^}", program.as_text(), re.DOTALL | re.MULTILINE)[0]


def temporaries(program):
    return program.memory_analysis().temp_size_in_bytes


chain = compiled(lambda x, a, b: jax.nn.gelu(a * x + b), (512, 512), (512,), (512,))
print(f"gelu(a x + b): {entry(chain).count(' fusion(')} fusion, {temporaries(chain)} bytes of temporaries")
assert entry(chain).count(" fusion(") == 1 and temporaries(chain) == 0

# %% [markdown]
# **Claim.** Attention as it is written in a textbook keeps a whole N × N matrix in memory between its two products.
# ```
#      q k^T                        softmax                           p v
#   ┌──────────┐   N x N    ┌─────────────────────┐   N x N     ┌──────────┐
#   │ a product│ ─────────► │ row max, exp, sum, ÷│ ──────────► │ a product│
#   └──────────┘   written  └─────────────────────┘   written   └──────────┘
# ```
# No elementwise fusion closes this gap: the first probability of a row needs the row's *last* score (its maximum, its
# sum), and the products are calls into a matrix library (CPU, GPU) or loops of their own.

# %%
K = 64


def naive(q, k, v):
    return jax.nn.softmax(q @ k.mT * K**-0.5) @ v


naive_bytes = {}
for N in (1024, 2048):
    program = compiled(naive, *[(N, K)] * 3)
    naive_bytes[N] = temporaries(program)
    print(f"N = {N}: {naive_bytes[N] / 2**20:.0f} MiB of temporaries = {naive_bytes[N] / N**2:g} N^2 bytes; "
          f"q, k, v and o together {16 * N * K / 2**20:g} MiB")
    assert naive_bytes[N] == 4 * N**2 and f"f32[{N},{N}]" in entry(program)

# %% [markdown]
# 4 N² bytes are one float32 matrix, of every head of every sequence; N twice as long takes four times as much.
#
# **Surprise.** From N = 4,096 on, XLA's CPU backend (of JAX 0.10 and 0.12) fuses the whole of it, and the matrix is
# gone. What a compiler fuses is a heuristic of one backend and one version: read the compiled program, don't assume.

# %%
program = compiled(naive, *[(4096, K)] * 3)
print(f"N = 4096 on CPU, JAX {jax.__version__}: {temporaries(program):,} bytes of temporaries")
if jax.default_backend() == "cpu":
    assert temporaries(program) == 0

# %% [markdown]
# **Claim.** So the reason for a kernel is the accelerator. Compiled for a TPU v5e (ahead of time, no TPU needed), one
# head's matrix of N = 1,024 fits into the chip's own memory and costs none outside; those of 8 sequences with 8 heads
# do not fit, and go to main memory.

# %%
try:
    for heads in (1, 64):
        program = aot_compile(naive, *[jax.ShapeDtypeStruct((heads, 1024, K), jnp.bfloat16)] * 3)
        kept = temporaries(program)
        print(f"TPU v5e, {heads:2} heads of N = 1024, bfloat16: {kept / 2**20:.0f} MiB of temporaries")
        assert kept >= 2 * heads * 1024**2 if heads == 64 else kept < 2 * 1024**2
except AotUnavailable as why:
    print(f"not verified: what a TPU keeps ({why})")

# %% [markdown]
# ## The online softmax [S1-078] (must-read)
# The textbook's softmax reads a row three times: maximum, sum, quotient. We want one pass over the keys, a block at a
# time, forgetting every block as soon as it is used. Keep three things for the keys seen so far:
#
#     m = max s        l = sum e^(s - m)        acc = sum e^(s - m) v
#
# A new block may bring a larger maximum m'. Every term so far was computed with e^(s - m) and should have been
# e^(s - m') = e^(s - m) e^(m - m'): all of them lack the *same* factor, so their sums can be mended without the terms.
#
#     m' = max(m, max of the block)
#     l'   = l   e^(m - m') + sum over the block of e^(s - m')
#     acc' = acc e^(m - m') + sum over the block of e^(s - m') v
#
# **Claim (the loop's invariant).** After every block, m, l and acc / l are the maximum, the sum and the
# softmax-weighted value over the keys seen so far. After the last block that is attention.

# %%
S, bS, K = 64, 8, 16
row = np.random.default_rng(95)  # of which the maximum rises three times
q, k, v = 2 * row.normal(size=K), row.normal(size=(S, K)), row.normal(size=(S, K))  # one query, float64
s = k @ q / np.sqrt(K)
weights = np.exp(s - s.max())
o = weights @ v / weights.sum()

m, l, acc, factors = -np.inf, 0.0, np.zeros(K), []
print("block | its max |      m | factor |      l | distance of acc / l from o")
for j in range(S // bS):
    block = s[j * bS:(j + 1) * bS]
    m_new = max(m, block.max())
    p, factor = np.exp(block - m_new), np.exp(m - m_new)
    m, l, acc = m_new, l * factor + p.sum(), acc * factor + p @ v[j * bS:(j + 1) * bS]
    factors.append(factor)
    print(f"{j:5} | {block.max():7.3f} | {m:6.3f} | {factor:6.3f} | {l:6.3f} | {error(acc / l, o):5.3f} "
          + "#" * round(20 * error(acc / l, o)))

    seen = s[:(j + 1) * bS]
    full = np.exp(seen - seen.max())
    assert m == seen.max() and np.isclose(l, full.sum(), rtol=1e-14)
    assert np.allclose(acc / l, full @ v[:len(seen)] / full.sum(), rtol=0, atol=1e-14)

assert np.allclose(acc / l, o, rtol=0, atol=1e-14)
assert factors[0] == 0  # nothing was seen before: e^(-inf - m) removes it
assert sum(0 < factor < 1 for factor in factors) >= 2 and factors.count(1) >= 2  # mended where m grew, else left alone

# %% [markdown]
# The sum l may *fall* when m grows: it counts in units of the largest term. Why carry m at all? Because e^s overflows.
#
# **Claim.** Without the maximum, a score of 100 is inf in float32, and inf / inf is NaN. With it every exponent is ≤ 0.

# %%
large = jnp.array([100.0, 99.0])
assert jnp.isnan(jnp.exp(large) / jnp.exp(large).sum()).any()
assert np.allclose(jnp.exp(large - 100) / jnp.exp(large - 100).sum(), [1 / (1 + np.exp(-1)), 1 / (1 + np.e)])

# %% [markdown]
# **Claim.** `kernels.softmax_step` is this step in base 2, the exponential that hardware computes: e^x = 2^(x log2 e),
# and the constant hides in the scale of q, where it costs nothing. m comes out times log2 e, l and acc unchanged.

# %%
step2 = (jnp.full((1, 1), -1e30), jnp.zeros((1, 1)), jnp.zeros((1, K)))
for j in range(S // bS):
    scores = jnp.asarray(k[j * bS:(j + 1) * bS] @ q * kernels.scale(K))[None]
    step2 = kernels.softmax_step(scores, jnp.asarray(v[j * bS:(j + 1) * bS]), *step2)
assert np.isclose(kernels.scale(K), np.log2(np.e) / np.sqrt(K))
assert all(error(got, want) < 1e-6 for got, want in zip(step2, (m * np.log2(np.e), l, acc)))

# %% [markdown]
# ## The loop over tiles, and the tiles that need no visit [S1-078] (must-read)
# Many queries: cut them into tiles of bT too. Each query tile walks over the key tiles with its own m, l and acc, one
# entry (or row) a query. With a causal mask, query t sees the keys s ≤ t + S - T (the last query sees every key).

# %%
LOWEST = np.finfo(np.float32).min


def tile_loop(q, k, v, bT, bS, causal=True):
    """q (T, K), k and v (S, K) -> o (T, K), L (T,), and the tiles (i, j) that were computed, in order."""
    (T, K), S = q.shape, len(k)
    o, L, visited = np.zeros((T, K)), np.zeros(T), []
    for i in range(-(-T // bT)):
        t = np.arange(i * bT, min((i + 1) * bT, T))
        m, l, acc = np.full((len(t), 1), LOWEST), np.zeros((len(t), 1)), np.zeros((len(t), K))
        for j in range(-(-S // bS)):
            keys = np.arange(j * bS, min((j + 1) * bS, S))
            seen = visible(t, keys, T, S) if causal else np.ones((len(t), len(keys)), bool)
            if not seen.any():
                continue
            s = np.where(seen, q[t] @ k[keys].T / np.sqrt(K), -np.inf)
            m_new = np.maximum(m, s.max(1, keepdims=True))
            p, factor = np.exp(s - m_new), np.exp(m - m_new)
            m, l, acc = m_new, l * factor + p.sum(1, keepdims=True), acc * factor + p @ v[keys]
            visited.append((i, j))
        nothing = l == 0
        o[t] = acc / np.where(nothing, 1, l)
        L[t] = np.where(nothing, np.inf, m + np.log(np.where(nothing, 1, l)))[:, 0]
    return o, L, visited


def visible(t, keys, T, S):
    """(len(t), len(keys)) bool: which keys each query sees, causally."""
    return keys[None] <= t[:, None] + S - T


@partial(jax.jit, static_argnames="causal")
def reference(q, k, v, causal=True):
    """kernels.attention_reference for one head."""
    return attention_reference(*(jnp.asarray(x, jnp.float32)[None, None] for x in (q, k, v)), causal)[0, 0]


for T, S, bT, bS, causal in ((64, 64, 16, 16, True), (50, 64, 16, 8, True), (37, 53, 8, 16, False),
                             (1, 20, 8, 8, True)):
    q, k, v = normal(T, 16), normal(S, 16), normal(S, 16)
    assert error(tile_loop(q, k, v, bT, bS, causal)[0], reference(q, k, v, causal)) < 1e-6

# %% [markdown]
# The grid of tiles, N = 64 in tiles of 16 × 16. The numbers are the order in which the tiles are computed.

# %%
def draw(tiles, n_i, n_j, T, S, bT, bS):
    """Prints the grid of tiles: '#' computed whole, '\\' computed and masked, '.' never computed."""
    order = {tile: at for at, tile in enumerate(tiles)}
    print("        " + "".join(f" j={j:<4}" for j in range(n_j)))
    for i in range(n_i):
        cells = []
        for j in range(n_j):
            whole = visible(np.arange(i * bT, (i + 1) * bT), np.arange(j * bS, (j + 1) * bS), T, S).all()
            cells.append(f"{'#' if whole else chr(92)}{order[i, j]:<3} " if (i, j) in order else ".    ")
        print(f"  i={i}  | " + "| ".join(cells) + "|")


q, k, v = normal(64, 16), normal(64, 16), normal(64, 16)
visited = tile_loop(q, k, v, 16, 16)[2]
draw(visited, 4, 4, 64, 64, 16, 16)
assert visited == [(i, j) for i in range(4) for j in range(i + 1)]

# %% [markdown]
# **Claim.** Of n² tiles, n (n + 1) / 2 are computed: the share (n + 1) / 2n, which is 1 for one tile and tends to 1/2.
# Only the n on the diagonal need a mask. Masking instead of skipping would cost the n (n - 1) / 2 others for zeros.

# %%
for n in (1, 2, 4, 8):
    visited = tile_loop(q, k, v, 64 // n, 64 // n)[2]
    print(f"{n} x {n} tiles: {len(visited):2} computed, {len(visited) / n**2:.3f} of all")
    assert len(visited) / n**2 == (n + 1) / (2 * n)

# %% [markdown]
# **Claim.** `kernels.Tiling` visits exactly these tiles, also where T ≠ S and tiles do not divide them.

# %%
def causal_tiling(T, S, bT, bS):
    return Tiling(T=T, S=S, K=16, bT=bT, bS=bS, strip=0, keys_first=False, causal=True)


for T, S, bT, bS in ((64, 64, 16, 16), (50, 64, 16, 8), (64, 50, 8, 16), (1, 20, 8, 8)):
    tiling = causal_tiling(T, S, bT, bS)
    by_loop = tile_loop(normal(T, 16), normal(S, 16), normal(S, 16), bT, bS)[2]
    assert by_loop == [(i, j) for i in range(-(-T // bT)) for j in range(int(tiling.key_tiles(i)))]

# %% [markdown]
# ### Rows that see nothing
# With more queries than keys (T > S) the first T - S queries see no key. Three answers are in use:
#
# | hidden scores are | row that sees nothing | why |
# |---|---|---|
# | -inf, then a softmax | NaN | -inf - (-inf), and 0 / 0 |
# | a large negative number | mean of all v | every score is equal: the mask is lost |
# | -inf, m from a finite start, guarded division | 0 | e^(-inf - m) = 0 and 0 / 1 = 0 |
#
# **Claim.** The third is the one to want, and takes both repairs: m starts at the lowest *finite* number (LOWEST
# above), and l = 0 is replaced by 1 in the division. L = inf, so that the backward pass gets e^(s - L) = 0.

# %%
T, S = 6, 4
q, k, v = normal(T, 16), normal(S, 16), normal(S, 16)
seen = visible(np.arange(T), np.arange(S), T, S)
scores = q @ k.T / 4
assert np.isnan(jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)) @ v)[:2].all()
assert np.allclose((jax.nn.softmax(jnp.where(seen, scores, LOWEST)) @ v)[:2], v.mean(0), atol=1e-6)

o, L, _ = tile_loop(q, k, v, 4, 2)
print("L, the log-sum-exp of each row:", L.round(2))
assert (o[:2] == 0).all() and np.isinf(L[:2]).all()
assert error(o[2:], tile_loop(q[2:], k, v, 4, 2)[0]) == 0
assert (reference(q, k, v)[:2] == 0).all() and error(o, reference(q, k, v)) < 1e-6

# %% [markdown]
# ## The matrix need not exist [S1-079] (must-read)
# The same loop in JAX: `lax.scan` over key tiles, all queries at once.
#
# **Claim.** Twice N takes twice the temporaries, not four times: one N × bS tile of scores, and m, l and acc. No N × N
# array is in the ENTRY computation, nor anywhere else in the program.

# %%
def scanned(q, k, v, bS=128):
    """Attention by the online softmax: q, k, v (N, K), bS dividing N -> (N, K)."""
    N, K = q.shape

    def step(state, tile):
        (m, l, acc), (k_tile, v_tile) = state, tile
        s = q @ k_tile.T * K**-0.5  # (N, bS)
        m_new = jnp.maximum(m, s.max(1, keepdims=True))
        p, factor = jnp.exp(s - m_new), jnp.exp(m - m_new)
        return (m_new, l * factor + p.sum(1, keepdims=True), acc * factor + p @ v_tile), None

    start = jnp.full((N, 1), -jnp.inf), jnp.zeros((N, 1)), jnp.zeros((N, K))
    (_, l, acc), _ = lax.scan(step, start, (k.reshape(-1, bS, K), v.reshape(-1, bS, K)))
    return acc / l


q, k, v = normal(256, 64), normal(256, 64), normal(256, 64)
assert error(jax.jit(scanned)(q, k, v), reference(q, k, v, False)) < 1e-6

scan_bytes = {}
for N in (1024, 2048):
    program = compiled(scanned, *[(N, 64)] * 3)
    scan_bytes[N] = temporaries(program)
    assert f"f32[{N},{N}]" not in entry(program) and f"{N},{N}]" not in program.as_text()
print("temporaries, MiB | N = 1024 | N = 2048 | growth")
for name, size in (("naive", naive_bytes), ("scan over tiles", scan_bytes)):
    print(f"{name:16} | {size[1024] / 2**20:8.2f} | {size[2048] / 2**20:8.2f} | x {size[2048] / size[1024]:.2f}")
assert naive_bytes[2048] == 4 * naive_bytes[1024] and 1.8 < scan_bytes[2048] / scan_bytes[1024] < 2.1

# %% [markdown]
# Memory is saved, but is time? The scan carries acc (N × K) through main memory once a tile, and the tile of scores
# goes there too, between two products. On an accelerator the state must live on the chip through a whole row of tiles.
# No JAX operation says "keep this in fast memory"; a Pallas kernel does. Per head, values moved to and from main
# memory where nothing fits on the chip:
#
# | | scores and probabilities | q, k, v, o | state |
# |---|---|---|---|
# | naive | about 4 N² | 4 N K | |
# | scan over key tiles | about 4 N² | 2 N K + 2 N K N / bS | 2 N K N / bS |
# | kernel | 0 | 2 N K + 2 N K N / bT | 0: on the chip |
#
# ## From the tile loop to the kernel [S1-080] (must-read)
# Every line of the loop has its place in Pallas:
#
# | tile loop | kernel |
# |---|---|
# | `for i`, `for j` | `grid=(n, n)`: the last axis is the fastest, in order on a TPU core |
# | `q[t]`, `k[keys]`, `o[t] = ` | BlockSpecs: the block's shape, and an index map (i, j) → which block |
# | `m, l, acc` | scratch in VMEM: outlives a grid step |
# | set before the inner loop | `@pl.when(j == 0)` |
# | `if not seen.any(): continue` | `@pl.when(j <= i)`, and an index map that asks for nothing new |
# | after the inner loop | `@pl.when(j == last)`; o's block is written back when i changes |
# ```
#   main memory     q: n blocks               k, v: n blocks             o: n blocks
#                   │ block i                 │ block min(j, i)          ▲ block i, when i changes
#   on the chip     q (bT, K)                 k, v (bS, K)               │
#                   └───────┬─────────────────┘                          │
#                           ▼  one step of the online softmax            │
#                           m (bT, 1)   l (bT, 1)   acc (bT, K) ─────────┘ acc / l
#                           └─────── stay here for the row of tiles
# ```

# %%
def kernel(q, k, v, o, m, l, acc):  # q, o, acc: (bT, K); k, v: (bT, K); m, l: (bT, 1); square tiles, T = S
    i, j = pl.program_id(0), pl.program_id(1)
    bT, K = q.shape

    @pl.when(j == 0)
    def _():
        m[...], l[...], acc[...] = jnp.full_like(m, LOWEST), jnp.zeros_like(l), jnp.zeros_like(acc)

    @pl.when(j <= i)
    def _():
        row, column = (lax.broadcasted_iota(jnp.int32, (bT, bT), axis) for axis in (0, 1))
        s = jnp.dot(q[...], k[...].T, preferred_element_type=jnp.float32) / np.sqrt(K)
        s = jnp.where(j * bT + column <= i * bT + row, s, -jnp.inf)
        m_new = jnp.maximum(m[...], s.max(1, keepdims=True))
        p, factor = jnp.exp(s - m_new), jnp.exp(m[...] - m_new)
        m[...], l[...] = m_new, l[...] * factor + p.sum(1, keepdims=True)
        acc[...] = acc[...] * factor + jnp.dot(p.astype(v.dtype), v[...], preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o[...] = (acc[...] / l[...]).astype(o.dtype)  # square and causal: every query sees its own key, so l > 0


def small_flash(q, k, v, bT):
    (T, K), n = q.shape, len(q) // bT
    queries = pl.BlockSpec((bT, K), lambda i, j: (i, 0))
    keys = pl.BlockSpec((bT, K), lambda i, j: (jnp.minimum(j, i), 0))
    return pl.pallas_call(
        kernel, grid=(n, n), in_specs=[queries, keys, keys], out_specs=queries,
        out_shape=jax.ShapeDtypeStruct((T, K), q.dtype), interpret=True,
        scratch_shapes=[pltpu.VMEM((bT, width), jnp.float32) for width in (1, 1, K)])(q, k, v)


q, k, v = normal(64, 16), normal(64, 16), normal(64, 16)
print(f"small_flash and the reference differ by {error(small_flash(q, k, v, 16), reference(q, k, v)):.1e}")
assert error(small_flash(q, k, v, 16), reference(q, k, v)) < 1e-6

# %% [markdown]
# **Claim.** Skipped means skipped: NaN among keys that no query of the first half sees does not reach that half. A
# kernel that computes and then masks would let 0 · NaN = NaN through the product with v.

# %%
poisoned = small_flash(q, *(np.where(np.arange(64)[:, None] < 32, x, np.nan) for x in (k, v)), 16)
assert np.isfinite(poisoned[:32]).all() and np.isnan(poisoned[32:]).all()

# %% [markdown]
# **Claim.** A block is fetched only when its index changes. With the index map min(j, last), a causal row of tiles
# fetches what it sees and then waits: n (n + 1) / 2 - 1 fetches of k in all (the first row's tile is still there for
# the second one), where the plain map (j) fetches n² and saves the arithmetic only.

# %%
def fetches(index_map, n):
    """How often a block is fetched on the grid (n, n): whenever its index differs from the step before."""
    indices = [int(index_map(i, j)) for i, j in itertools.product(range(n), range(n))]
    return 1 + sum(a != b for a, b in zip(indices, indices[1:]))


for n in (4, 8, 16):
    tiling = causal_tiling(16 * n, 16 * n, 16, 16)
    skipping, plain = fetches(tiling.key_tile, n), fetches(lambda i, j: j, n)
    print(f"{n} x {n} tiles: k fetched {skipping} times, by the plain map {plain}")
    assert skipping == n * (n + 1) // 2 - 1 and plain == n**2

# %% [markdown]
# `kernels.flash_attention` is this kernel with batch and heads as further grid axes, grouped kv heads in an index map,
# masks for ragged edges, whole tiles computed without a mask, base 2, and a gradient.
#
# **Claim.** It equals the reference at ragged sizes, with grouped heads, and gives 0 where nothing is seen.

# %%
small_tiles = Tiles(*[Tile(16, 8)] * 3)
flash = jax.jit(partial(flash_attention, form="tpu", tiles=small_tiles))  # on a CPU: interpreted
q, k, v, g = normal(1, 2, 37, 8), normal(1, 1, 29, 8), normal(1, 1, 29, 8), normal(1, 2, 37, 8)


def with_gradients(f, q, k, v, g):
    o, pull = jax.vjp(f, q, k, v)
    return o, *pull(g)


got, want = (with_gradients(f, q, k, v, g) for f in (flash, jax.jit(attention_reference)))
print(f"o differs by {error(got[0], want[0]):.1e}")
assert error(got[0], want[0]) < 1e-6 and (got[0][:, :, :8] == 0).all() and (got[0][:, :, 8:] != 0).all()

# %% [markdown]
# ## The backward pass: recompute, don't remember [S1-080] (must-read)
# The gradient needs the probabilities, the very matrix we refused to write. Keep one number a row instead,
# L = m + log l, the log of the softmax's denominator: then a tile of p comes back with one product and one exponential,
#
#     p = e^(s - L)
#
# and with g = dloss/do, from o = p v and the softmax's Jacobian dp_s/ds_r = p_s (δ_sr - p_r):
#
#     dv_s = sum_t p_ts g_t        dp_ts = g_t · v_s        D_t = sum_s p_ts dp_ts = g_t · o_t   (no pass over the keys)
#     ds_ts = p_ts (dp_ts - D_t)   dq_t = sum_s ds_ts k_s / √K      dk_s = sum_t ds_ts q_t / √K
#
# No running maximum any more: L is final. dq sums along a row of tiles, dk and dv down a column: hence two kernels,
# each of which keeps its sums on the chip.
# ```
#     dq:  j ──────►            dk, dv:   j = 0   1   2   3
#     i=0  \                         i │  \
#       1  # ► \                       │  #   \
#       2  # ► # ► \                   ▼  #   #   \
#       3  # ► # ► # ► \                  #   #   #   \
# ```
# **Claim.** The tile loop below gives `jax.grad`'s gradients, rows that see nothing included (there L = inf and p = 0).

# %%
def tile_loop_backward(q, k, v, o, L, g, bT, bS):
    """dq, dk, dv of causal attention, from o and L alone: no probability was stored."""
    (T, K), S = q.shape, len(k)
    dq, dk, dv = np.zeros((T, K)), np.zeros((S, K)), np.zeros((S, K))
    D = (g * o).sum(1, keepdims=True)
    for start_t, start_s in itertools.product(range(0, T, bT), range(0, S, bS)):
        t, keys = np.arange(start_t, min(start_t + bT, T)), np.arange(start_s, min(start_s + bS, S))
        seen = visible(t, keys, T, S)
        if not seen.any():
            continue
        p = np.where(seen, np.exp(q[t] @ k[keys].T / np.sqrt(K) - L[t, None]), 0)
        ds = p * (g[t] @ v[keys].T - D[t])
        dv[keys] += p.T @ g[t]
        dq[t] += ds @ k[keys] / np.sqrt(K)
        dk[keys] += ds.T @ q[t] / np.sqrt(K)
    return dq, dk, dv


Q, G, (X, V) = q[0, 0], g[0, 0], (x[0, 0] for x in (k, v))  # one head
O, L, _ = tile_loop(Q, X, V, 16, 8)
by_jax = jax.jit(jax.grad(lambda q, k, v: (reference(q, k, v) * G).sum(), (0, 1, 2)))(Q, X, V)
by_hand = tile_loop_backward(Q, X, V, O, L, G, 16, 8)
for name, a, b in zip(("dq", "dk", "dv"), by_hand, by_jax):
    print(f"{name}: tile loop and jax.grad differ by {error(a, b):.1e}")
    assert error(a, b) < 1e-6
assert (by_hand[0][:8] == 0).all()

# %% [markdown]
# **Claim.** So do the kernels (1e-4 is the usual bound in float32; they keep 1e-6), and `check_grads` agrees by finite
# differences.

# %%
for name, a, b in zip(("dq", "dk", "dv"), got[1:], want[1:]):
    print(f"{name}: kernel and reference differ by {error(a, b):.1e}")
    assert error(a, b) < 1e-6
check_grads(flash, (q, k, v), order=1, modes=["rev"], atol=1e-2, rtol=1e-2)

# %% [markdown]
# The bounds of `check_grads` are wide because its differences are float32; `gradcheck.py` repeats them in float64.
#
# **Claim.** What waits between forward and backward is q, k, v, o and L: it doubles with N. The reference also keeps
# its probabilities, and nearly quadruples.

# %%
def residual_bytes(f, N):
    head = jax.ShapeDtypeStruct((1, 1, N, 64), jnp.float32)
    kept = jax.eval_shape(lambda *args: jax.tree.leaves(jax.vjp(f, *args)[1]), head, head, head)
    return sum(x.size * x.dtype.itemsize for x in kept)


for name, f, growth in (("reference", attention_reference, 4), ("flash", partial(flash_attention, form="tpu"), 2)):
    kept = [residual_bytes(f, N) for N in (1024, 2048)]
    mib = [size / 2**20 for size in kept]
    print(f"{name:9}: {mib[0]:5.2f} MiB at N = 1024, {mib[1]:5.2f} at 2048, x {mib[1] / mib[0]:.2f}")
    assert abs(kept[1] / kept[0] - growth) < 0.25
assert kept[1] == 4 * (4 * 2048 * 64 + 2048)  # four arrays of N x 64, and L

# %% [markdown]
# **Claim.** The model takes its attention as an argument. With the kernel (`kernels.attention`, which is what
# `python train.py --attention pallas` passes; here with small tiles) its logits stay the same.

# %%
cfg = model.GPTConfig(vocab_size=17, context=8, n_layer=1, n_head=2, n_embd=16)
shapes = jax.eval_shape(partial(model.init_params, cfg=cfg), jax.random.key(0))
params = jax.tree.map(lambda x: 0.3 * normal(*x.shape), shapes)  # any values will do
tokens = random.integers(cfg.vocab_size, size=(1, cfg.context))


def forward_with(attention):
    return partial(model.forward, cfg=cfg, attention=attention)


def small_attention(q, k, v, rate, key):
    return flash_attention(q, k, v, form="tpu", tiles=Tiles(*[Tile(8, 8)] * 3))


logits = [jax.jit(forward_with(attention))(params, tokens) for attention in (model.attention, small_attention)]
assert error(*logits) < 1e-6
assert "pallas_call" in str(jax.make_jaxpr(forward_with(kernels.attention))(params, tokens))

# %% [markdown]
# ## Lowered for machines that are not here [S1-080] (must-read)
# **Claim.** Lowering (JAX to StableHLO with the kernel inside) needs neither a TPU nor its compiler: `export` for the
# platform "tpu" runs Pallas' own checks of blocks and operations. Forward and backward are three kernels, and no
# array of the program is N × N. (Whether it also compiles and fits is `common.pallas.aot_compile`'s business.)

# %%
N = 1024
heads = [jax.ShapeDtypeStruct((1, 2, N, 64), jnp.bfloat16)] * 4


def step_of(f):
    return jax.jit(partial(with_gradients, f))


# interpret=False: asked on a CPU, common.pallas.interpret would choose the interpreter
for_tpu = jax.export.export(step_of(partial(flash_attention, form="tpu", interpret=False)), platforms=["tpu"])(*heads)
text = for_tpu.mlir_module()
print(f"for TPU: {text.count('stablehlo.custom_call @tpu_custom_call')} kernels")
assert text.count("stablehlo.custom_call @tpu_custom_call") == 3 and f"{N}x{N}x" not in text
assert f"{N}x{N}x" in jax.export.export(step_of(attention_reference), platforms=["tpu"])(*heads).mlir_module()

# %% [markdown]
# **Claim.** The GPU form lowers here too, through Triton, again as three kernels. A GPU runs the steps of a grid in
# parallel, so no sum can wait in scratch from one step to the next: the loop over key tiles is *inside* the kernel, its
# state in the loop's carry. The abstract mesh tells JAX which device the program is for.

# %%
gpu = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=AbstractDevice(
    device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"))


def for_gpu(form):
    with use_abstract_mesh(gpu):
        step = step_of(partial(flash_attention, form=form, tiles=kernels.GPU_TILES))
        return step.trace(*heads).lower(lowering_platforms=("cuda",)).as_text()


text = for_gpu("gpu")
kernels_for_gpu = len(re.findall(r"custom_call @\S*triton", text))
print(f"for a GPU: {kernels_for_gpu} kernels")
assert kernels_for_gpu == 3 and f"{N}x{N}x" not in text

# %% [markdown]
# ## When to write a kernel
# Ask in this order: (1) Does the compiled program write something large between its inputs and its outputs (`entry`,
# `temporaries`)? If not, XLA has fused it: stop. (2) Can the algorithm do without it, as the online softmax does? Write
# that in plain JAX first, as `scanned`: it may be enough, and it is the reference. (3) Must a state stay on the chip
# while tiles stream past it? Then, and on the device that has the problem, a kernel pays. (4) Has somebody written it?
# `jax.nn.dot_product_attention` reaches cuDNN's on a GPU.
#
# ## Exercise 1
# Write `merge(a, b)`. Two machines each hold half of the keys; each ran the loop over its half, and has (m, l, acc) of
# one query: two floats and an array (K,), in base e. Return (m, l, acc) of all keys. A half in which the query sees
# nothing comes as (LOWEST, 0.0, zeros). Ring attention and split-K decoding are this function.

# %%
# Your answer
def merge(a, b):
    """(m, l, acc), (m, l, acc) -> (m, l, acc)."""
    raise NotImplementedError

# %%
# Self-check (runs on your answer once it is written, on the solution until then)
def check_merge(f):
    random = np.random.default_rng(1)
    s, v = 3 * random.normal(size=12), random.normal(size=(12, 4))

    def state(keys):
        m = s[keys].max(initial=LOWEST)
        p = np.exp(s[keys] - m)
        return m, p.sum(), p @ v[keys]

    everything = state(slice(0, 12))
    for cut in (1, 5, 11):
        for halves in ((slice(0, cut), slice(cut, 12)), (slice(cut, 12), slice(0, cut))):
            m, l, acc = f(*map(state, halves))
            assert np.isclose(m, everything[0]), "m is the larger maximum"
            assert np.isclose(l, everything[1]), "both sums must be brought to the common maximum before they are added"
            assert np.allclose(acc, everything[2]), "acc takes the same factors as l"
    empty = state(slice(0, 0))
    assert np.allclose(f(empty, everything)[2], everything[2]), "a half that sees nothing changes nothing"
    assert f(empty, empty)[1] == 0 and not np.isnan(f(empty, empty)[2]).any(), "two empty halves are empty, not NaN"

# %% [markdown]
# ## Exercise 2
# A sliding window: query t sees the keys t - window < s ≤ t (T = S = N). Write `window_tiles(i, bT, bS, window)`: the
# first key tile that query tile i must visit, and the one behind the last, so that `range(*window_tiles(...))` visits
# exactly the tiles that hold a visible score. bT divides N.

# %%
# Your answer
def window_tiles(i, bT, bS, window):
    """ints -> (first, end)."""
    raise NotImplementedError

# %%
# Self-check (runs on your answer once it is written, on the solution until then)
def check_window_tiles(f):
    N = 48
    t, s = np.arange(N)[:, None], np.arange(N)[None]
    for bT, bS, window in itertools.product((4, 8, 16), (4, 8, 16), (1, 4, 5, 9, 48)):
        seen = (s <= t) & (s > t - window)
        for i in range(N // bT):
            needed = {j for j in range(N // bS) if seen[i * bT:(i + 1) * bT, j * bS:(j + 1) * bS].any()}
            chosen = set(range(*f(i, bT, bS, window)))
            where = f"query tile {i}, tiles {bT} x {bS}, window {window}"
            assert needed <= chosen, f"{where}: tiles {sorted(needed - chosen)} hold visible scores and are skipped"
            assert chosen <= needed, f"{where}: tiles {sorted(chosen - needed)} are computed for nothing"

# %% [markdown]
# ## Rules
# | rule | why |
# |---|---|
# | before a kernel, read `temporaries` and the ENTRY computation | elementwise chains are one fusion already |
# | a kernel is for the backend that keeps the N × N matrix | XLA:CPU drops it from N = 4,096 on |
# | carry (m, l, acc); rescale l *and* acc by e^(m - m') | after every block they are right for the keys so far |
# | skip what is hidden, in arithmetic and in the index map | (n + 1) / 2n of the tiles remain; 0 · NaN is NaN |
# | m starts finite, and l = 0 becomes 1 before dividing | a row that sees nothing is 0, not NaN, not the mean of v |
# | keep L, recompute p = e^(s - L) | residuals grow with N, not with N² |
# | dq along rows, dk and dv down columns of tiles | each sum stays on the chip in its own kernel |
# | state between grid steps: scratch on a TPU, the carry of an inner loop on a GPU | there grid steps run in parallel |

# %% [markdown]
# ## Solutions

# %%
def merge_solution(a, b):
    m = max(a[0], b[0])
    factor_a, factor_b = np.exp(a[0] - m), np.exp(b[0] - m)
    return m, factor_a * a[1] + factor_b * b[1], factor_a * a[2] + factor_b * b[2]


def window_tiles_solution(i, bT, bS, window):
    first_key, last_key = max(i * bT - window + 1, 0), (i + 1) * bT - 1  # of its first query, and of its last
    return first_key // bS, last_key // bS + 1

# %%
try:
    check_merge(merge)
except NotImplementedError:
    check_merge(merge_solution)

# %%
try:
    check_window_tiles(window_tiles)
except NotImplementedError:
    check_window_tiles(window_tiles_solution)
