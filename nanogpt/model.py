"""A GPT-2 style decoder in raw JAX: parameters are a dict, every function is pure.

Legend: B batch, T query time, S key time (cache length = context), D model, F hidden (4D), H heads,
K head dim (D / H), V vocabulary, L layers, N = B * T rows.
Source: Radford et al. 2019 (GPT-2); layout and initialisation as in nanoGPT and Hugging Face's GPT2.

The residual stream is kept as (N, D): on XLA:CPU a product of two matrices meets the fast library call,
a product with a (B, T, D) operand does not, and its weight gradient drags transposes along.
What this and the other choices made for speed are worth, bench.py measures and README.md lists ("choice: ...").
"""
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

IGNORE = -1  # a target with this value takes no part in the loss


@dataclass(frozen=True)
class GPTConfig:
    """The model's shape. Hashable, so that it can be a static argument of jit."""
    vocab_size: int
    context: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float = 0.0
    dtype: str = "float32"  # of activations and matmuls; parameters and the residual stream stay as they are
    remat: bool = False  # recompute each block in the backward pass instead of saving its activations

    def __post_init__(self):
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}: each head takes "
                             f"n_embd / n_head columns; try n_embd={self.n_head * max(1, self.n_embd // self.n_head)}")
        for name in ("vocab_size", "context", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must lie in [0, 1)")
        if self.dtype not in ("float32", "bfloat16", "float64"):
            raise ValueError(f"dtype={self.dtype!r} must be float32, bfloat16 or float64")

    @property
    def head_dim(self):
        return self.n_embd // self.n_head


# Parameters ------------------------------------------------------------------------------

def init_params(key, cfg):
    """GPT-2's initialisation: normal(0, 0.02); the two projections that write to the residual stream are
    scaled by 1/sqrt(2L), so that the stream's variance does not grow with depth.

    Returns a dict of float32 arrays; leaves under "blocks" are stacked on a leading axis L.
    """
    L, D, F = cfg.n_layer, cfg.n_embd, 4 * cfg.n_embd
    keys = iter(jax.random.split(key, 6))

    def normal(*shape, std=0.02):
        return std * jax.random.normal(next(keys), shape, jnp.float32)

    residual_std = 0.02 / (2 * L) ** 0.5
    return {
        "wte": normal(cfg.vocab_size, D),  # token embedding and, transposed, the output head
        "wpe": normal(cfg.context, D),
        "blocks": {
            "ln1_scale": jnp.ones((L, D)), "ln1_bias": jnp.zeros((L, D)),
            "w_qkv": normal(L, D, 3 * D), "b_qkv": jnp.zeros((L, 3 * D)),
            "w_proj": normal(L, D, D, std=residual_std), "b_proj": jnp.zeros((L, D)),
            "ln2_scale": jnp.ones((L, D)), "ln2_bias": jnp.zeros((L, D)),
            "w_fc": normal(L, D, F), "b_fc": jnp.zeros((L, F)),
            "w_out": normal(L, F, D, std=residual_std), "b_out": jnp.zeros((L, D)),
        },
        "lnf_scale": jnp.ones(D), "lnf_bias": jnp.zeros(D),
    }


def count_params(params):
    return sum(leaf.size for leaf in jax.tree.leaves(params))


# Layers ----------------------------------------------------------------------------------

def widen(x):
    """x in at least float32 (float64 stays float64, so that finite differences can check the model)."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def layer_norm(x, scale, bias):
    """(N, D) -> (N, D): (x - mean) / sqrt(var + 1e-5) * scale + bias over D, in at least float32. Ba et al. 2016."""
    wide = widen(x)
    centred = wide - wide.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + bias


@jax.custom_vjp
def matmul(x, w):
    """(N, I) @ (I, O) -> (N, O) in x's dtype. The VJP is the ordinary one, except that the weight's gradient
    accumulates in and leaves as w's own dtype (float32 under bfloat16 activations), and how a CPU computes it."""
    return x @ w.astype(x.dtype)


def _matmul_fwd(x, w):
    return x @ w.astype(x.dtype), (x, w)  # not matmul: a gradient is differentiated again (Hessian-vector products)


def _matmul_bwd(residual, g):
    x, w = residual
    dw = lax.platform_dependent(x, g, cpu=_weight_gradient_cpu, default=_weight_gradient)
    return g @ w.astype(x.dtype).T, dw.astype(w.dtype)


def _weight_gradient(x, g):
    """x.T @ g: (N, I), (N, O) -> (I, O), accumulated in at least float32."""
    return wide_matmul(x.T, g)


def _weight_gradient_cpu(x, g):
    """The same with x.T laid out row by row first: XLA:CPU turns a bfloat16 product with a transposed operand
    into a float32 one. The batch axis of 1 and the barriers keep XLA from folding transposes back into the product
    (for bfloat16 into one that its runtime then refuses)."""
    return lax.optimization_barrier(wide_matmul(lax.optimization_barrier(x.T[None]), g[None])[0])


def wide_matmul(a, b):
    return jnp.matmul(a, b, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


matmul.defvjp(_matmul_fwd, _matmul_bwd)


def linear(x, w, b):
    """(N, I) @ (I, O) + (O,) -> (N, O), x's dtype; the bias is added, and its gradient summed, in at least float32."""
    return (widen(matmul(x, w)) + b).astype(x.dtype)


def dropout(x, rate, key):
    """Inverted dropout; the identity without a key or at rate 0."""
    if key is None or rate == 0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def attention_weights(q, k):
    """Causal softmax(q k^T / sqrt(K)): (B, H, T, K) twice -> (B, H, T, T), in at least float32."""
    T, K = q.shape[2:]
    scores = wide_matmul(q, k.swapaxes(2, 3)) * K**-0.5
    causal = jnp.tril(jnp.ones((T, T), bool))
    return jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(scores.dtype).min), axis=-1)


def attention_reference(q, k, v, rate=0.0, key=None):
    """Causal softmax(q k^T / sqrt(K)) v. q, k, v: (B, H, T, K) -> (B, H, T, K). Vaswani et al. 2017, eq. 1.

    `rate` and `key` drop attention probabilities.
    """
    return dropout(attention_weights(q, k), rate, key).astype(v.dtype) @ v


def attention(q, k, v, rate=0.0, key=None):
    """attention_reference; without dropout its VJP is the one below, which saves the probabilities in v's dtype and
    lays out their transposes before it multiplies them. Forward mode needs attention_reference."""
    if key is not None and rate > 0:
        return attention_reference(q, k, v, rate, key)
    return _attend(q, k, v)


@jax.custom_vjp
def _attend(q, k, v):
    return attention_reference(q, k, v)


def _attend_fwd(q, k, v):
    p = lax.optimization_barrier(attention_weights(q, k).astype(v.dtype))
    y = p @ v
    return y, (q, k, v, p, y)


def _attend_bwd(residual, dy):
    """dP = dY V^T;  dS = P * (dP - rowsum(dP * P)), and rowsum(dP * P) = rowsum(dY * Y) (Dao et al. 2022, B.4)."""
    q, k, v, p, y = residual

    def transposed(a):
        return lax.optimization_barrier(a.swapaxes(2, 3))

    dp = wide_matmul(dy, v.swapaxes(2, 3))
    ds = widen(p) * (dp - (widen(dy) * widen(y)).sum(-1, keepdims=True)) * q.shape[-1] ** -0.5
    ds = lax.optimization_barrier(ds.astype(q.dtype))
    return ds @ k, transposed(ds) @ q, transposed(p) @ dy


_attend.defvjp(_attend_fwd, _attend_bwd)


def split_heads(qkv, B, H):
    """(N, 3D) -> q, k, v: (B, H, T, K) each: in this order each head's keys lie together, as decoding reads them."""
    N, D3 = qkv.shape
    return jnp.moveaxis(qkv.reshape(B, N // B, 3, H, D3 // 3 // H), (2, 3), (0, 2))


def merge_heads(y):
    """(B, H, T, K) -> (N, D)."""
    B, H, T, K = y.shape
    return y.transpose(0, 2, 1, 3).reshape(B * T, H * K)


def mlp(h, p, dense=linear):
    return dense(jax.nn.gelu(dense(h, p["w_fc"], p["b_fc"])), p["w_out"], p["b_out"])  # tanh GELU, as GPT-2


def block(x, p, cfg, B, attention, key):
    """One layer. x: (N, D) -> (N, D), and its keys and values, (B, H, T, K) each, for the cache."""
    k_attention, k_proj, k_mlp = (None,) * 3 if key is None else jax.random.split(key, 3)
    h = layer_norm(x, p["ln1_scale"], p["ln1_bias"]).astype(cfg.dtype)
    q, k, v = split_heads(linear(h, p["w_qkv"], p["b_qkv"]), B, cfg.n_head)
    y = merge_heads(attention(q, k, v, cfg.dropout, k_attention))
    x = x + dropout(linear(y, p["w_proj"], p["b_proj"]), cfg.dropout, k_proj)
    h = layer_norm(x, p["ln2_scale"], p["ln2_bias"]).astype(cfg.dtype)
    return x + dropout(mlp(h, p), cfg.dropout, k_mlp), (k, v)


def layers_of(params, cfg):
    """The blocks as a list of L dicts (as they are, where they are a list already): unrolled layers run faster
    here than scanned ones. `split` has a concatenation as its gradient, indexing a sum of L padded arrays."""
    if isinstance(params["blocks"], list):
        return params["blocks"]
    parts = {name: lax.split(a, [1] * cfg.n_layer) for name, a in params["blocks"].items()}
    return [{name: part[i][0] for name, part in parts.items()} for i in range(cfg.n_layer)]


def embed(params, tokens, positions):
    """tokens (B, T), positions (T,) -> (N, D)."""
    return (params["wte"][tokens] + params["wpe"][positions]).reshape(tokens.size, -1)


def logits_of(params, x, cfg):
    """The residual stream (N, D) -> logits (N, V), in at least float32."""
    h = layer_norm(x, params["lnf_scale"], params["lnf_bias"]).astype(cfg.dtype)
    return widen(matmul(h, params["wte"].T))  # tied to the embedding


# The model -------------------------------------------------------------------------------

def run_blocks(params, tokens, cfg, key=None, attention=attention):
    """tokens (B, T) -> residual stream (N, D) after the last layer, and each layer's (k, v)."""
    B, T = tokens.shape
    if T > cfg.context:
        raise ValueError(f"{T} tokens exceed the context of {cfg.context}: crop to the last {cfg.context}")
    keys = [None] * (cfg.n_layer + 1) if key is None else jax.random.split(key, cfg.n_layer + 1)
    x = dropout(embed(params, tokens, jnp.arange(T)), cfg.dropout, keys[0])
    step = partial(block, cfg=cfg, B=B, attention=attention)
    if cfg.remat:
        step = jax.checkpoint(step)
    cached = []
    for p, layer_key in zip(layers_of(params, cfg), keys[1:]):
        x, kv = step(x, p, key=layer_key)
        cached.append(kv)
    return x, cached


def forward(params, tokens, cfg, key=None, attention=attention):
    """tokens (B, T) int, T <= context -> logits (B, T, V), at least float32.

    key: a PRNG key switches dropout on (training); None is evaluation.
    attention: a function of (q, k, v, dropout rate, key), the place for a kernel.
    Raises ValueError for more tokens than the context holds.
    """
    x, _ = run_blocks(params, tokens, cfg, key, attention)
    return logits_of(params, x, cfg).reshape(*tokens.shape, -1)


def summed_loss(params, tokens, targets, cfg, key=None, attention=attention):
    """Cross-entropy summed over the targets that count, and their number: sums add up over micro-batches of
    unequal counts, means do not. tokens, targets: (B, T) int -> (nats, count)."""
    logits = forward(params, tokens, cfg, key, attention)
    counted = targets != IGNORE
    picked = jnp.take_along_axis(logits, jnp.where(counted, targets, 0)[..., None], -1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    return jnp.where(counted, losses, 0).sum(), counted.sum()


def loss_fn(params, tokens, targets, cfg, key=None, attention=attention):
    """Mean cross-entropy, nats a token. tokens, targets: (B, T) int -> scalar."""
    total, count = summed_loss(params, tokens, targets, cfg, key, attention)
    return total / count


# Inference with a KV cache ---------------------------------------------------------------

def prefill(params, tokens, length, cfg):
    """Reads a prompt. tokens: (B, S) int, left-aligned, only the first `length` are real (the causal mask keeps
    what follows from reaching them). Returns logits (B, V) after token length - 1, and the cache: a list of
    L pairs (k, v), (B, H, S, K) each, whose positions from `length` on are overwritten before they are read.
    """
    B, S = tokens.shape
    x, cache = run_blocks(params, tokens, cfg)
    last = lax.dynamic_slice_in_dim(x.reshape(B, S, -1), length - 1, 1, axis=1)[:, 0]  # (B, D)
    return logits_of(params, last, cfg), cache


def pack(params, cfg, B):
    """The parameters as decode_step reads them for a batch of B: layers apart and, for B = 1, weights as (O, I).

    A row times a matrix is bound by reading the matrix. As (O, I), XLA:CPU turns it into a loop over outputs,
    shared out among threads, each of which reads its rows from end to end; as (I, O) it calls the matrix library,
    which reached 0.6 of that bandwidth. From a few rows on the library is the faster one.
    """
    layers = layers_of(params, cfg)
    if B == 1:
        layers = [{name: a.T if name.startswith("w_") else a for name, a in p.items()} for p in layers]
    return {**params, "blocks": lax.optimization_barrier(layers)}


def linear_row(x, w, b):
    """linear for one row and a weight of pack's: (1, I), (O, I), (O,) -> (1, O). The barriers leave the product
    alone in its fusion: XLA:CPU would compute what precedes it once for every output."""
    product = lax.optimization_barrier(lax.optimization_barrier(x) @ w.astype(x.dtype).T)
    return (widen(product) + b).astype(x.dtype)


def decode_step(packed, cache, token, position, cfg, attend=None):
    """One more token. packed: pack(params, cfg, B); token: (B,) int at `position` (scalar < S); cache: prefill's,
    with the positions before it. Returns logits (B, V) for the next token, and the cache with this one written.
    attend: attend_cache (the default) or a kernel with its signature.

    Every layer reads the *old* cache and scores its own new key apart; all writes come at the end, behind a
    barrier. Written layer by layer, XLA:CPU copies the whole cache once for each of them.
    """
    B, S = token.shape[0], cache[0][0].shape[2]
    x = embed(packed, token[:, None], position[None])  # (B, D)
    past, new, attend = jnp.arange(S) < position, [], attend or attend_cache
    dense = linear_row if B == 1 else linear
    for p, (k_old, v_old) in zip(packed["blocks"], cache):
        h = layer_norm(x, p["ln1_scale"], p["ln1_bias"]).astype(cfg.dtype)
        q, k, v = split_heads(dense(h, p["w_qkv"], p["b_qkv"]), B, cfg.n_head)  # (B, H, 1, K)
        x = x + dense(merge_heads(attend(q, k, v, k_old, v_old, past)), p["w_proj"], p["b_proj"])
        x = x + mlp(layer_norm(x, p["ln2_scale"], p["ln2_bias"]).astype(cfg.dtype), p, dense)
        new.append((k, v))
    x, new, cache = lax.optimization_barrier((x, new, cache))
    write = partial(lax.dynamic_update_slice_in_dim, start_index=position, axis=2)
    return logits_of(packed, x, cfg), jax.tree.map(write, cache, new)


def attend_cache(q, k, v, k_old, v_old, past):
    """One query over the cached keys where `past` and over its own. q, k, v: (B, H, 1, K); k_old, v_old:
    (B, H, S, K); past: (S,) bool -> (B, H, 1, K). One softmax over S + 1 scores."""
    K = q.shape[-1]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    q = q * jnp.asarray(K**-0.5, q.dtype)
    old = jnp.einsum("bhtk,bhsk->bhts", q, k_old, preferred_element_type=wide)
    own = jnp.einsum("bhtk,bhtk->bht", q, k, preferred_element_type=wide)[..., None]
    p = jax.nn.softmax(jnp.concatenate([jnp.where(past, old, -jnp.inf), own], axis=-1), axis=-1).astype(v.dtype)
    return jnp.einsum("bhts,bhsk->bhtk", p[..., :-1], v_old) + p[..., -1:] * v


def sample_token(logits, key, temperature, top_k=None, top_p=None):
    """logits (B, V) -> tokens (B,) int32. temperature 0 is argmax (the first of equals).

    top_k keeps exactly k entries (of equals, those with the lower index); top_p keeps the smallest set, most
    probable first, whose probability reaches p (Holtzman et al. 2020) at the given temperature.
    """
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    kept = scaled
    if top_k is not None or top_p is not None:
        order = jnp.argsort(scaled, axis=-1, stable=True, descending=True)  # (B, V)
        ranked = jnp.take_along_axis(scaled, order, -1)
        if top_k is not None:
            ranked = jnp.where(jnp.arange(ranked.shape[-1]) < top_k, ranked, -jnp.inf)
        if top_p is not None:
            p = jax.nn.softmax(ranked, axis=-1)
            ranked = jnp.where(jnp.cumsum(p, -1) - p < top_p, ranked, -jnp.inf)
        kept = jnp.put_along_axis(scaled, order, ranked, -1, inplace=False)
    drawn = jax.random.categorical(key, kept, axis=-1)
    return jnp.where(temperature > 0, drawn, jnp.argmax(logits, axis=-1)).astype(jnp.int32)


class Decoding(NamedTuple):
    """What generation carries from token to token."""
    window: jax.Array  # (B, S) int32: the last tokens, left-aligned
    length: jax.Array  # scalar: how many of them are real
    cache: list  # as prefill returns it
    logits: jax.Array  # (B, V): of the next token


def start(params, prompt, length, cfg):
    """Reads a prompt: (B, P) int32, P <= context, left-aligned, of which 1 <= length <= P are real -> Decoding."""
    logits, cache = prefill(params, prompt, length, cfg)
    room = cfg.context - prompt.shape[1]
    cache = jax.tree.map(lambda a: jnp.pad(a, ((0, 0), (0, 0), (0, room), (0, 0))), cache)
    return Decoding(jnp.pad(prompt, ((0, 0), (0, room))), jnp.asarray(length, jnp.int32), cache, logits)


def generate(params, state, key, n, cfg, temperature=1.0, top_k=None, top_p=None):
    """n more tokens as one compiled loop. Returns tokens (B, n) int32 and the state to go on from.

    Until the window is full each token costs one cached step. After that the window slides: learned positions
    move with it, so every key changes and the cache is of no use; each token is a forward pass over the last
    `context` tokens, exactly what cropping the text would give.
    The i-th token draws with fold_in(key, i): pass another key to the next call.
    """
    def fill(s, token):
        logits, cache = decode_step(packed, s.cache, token, s.length, cfg)
        window = lax.dynamic_update_slice_in_dim(s.window, token[:, None], s.length, axis=1)
        return Decoding(window, s.length + 1, cache, logits)

    def slide(s, token):
        window = jnp.concatenate([s.window[:, 1:], token[:, None]], axis=1)
        x, _ = run_blocks(params, window, cfg)
        return s._replace(window=window, logits=logits_of(params, x.reshape(*window.shape, -1)[:, -1], cfg))

    def loop(advance, first, last, carry):
        def body(i, carry):
            s, out = carry
            token = sample_token(s.logits, jax.random.fold_in(key, i), temperature, top_k, top_p)
            return advance(s, token), lax.dynamic_update_slice_in_dim(out, token[:, None], i, axis=1)
        return lax.fori_loop(first, last, body, carry)

    B, S = state.window.shape
    # Outside the loops: taken apart inside, the stacked weights would be copied once a token.
    params, packed = {**params, "blocks": layers_of(params, cfg)}, pack(params, cfg, B)
    cached = jnp.minimum(n, S - state.length)
    carry = loop(fill, 0, cached, (state, jnp.zeros((B, n), jnp.int32)))
    state, tokens = loop(slide, cached, n, carry)
    return tokens, state
