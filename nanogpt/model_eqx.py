"""The GPT of model.py in Equinox: a model is a pytree with methods, and an update returns a new one.

Legend: B batch, T query time, S key time (context), D model, H heads, K head dim, V vocabulary, L layers,
A micro-batches, N = B * T rows.
What has no parameters (attention, the split into heads, attention over a cache) comes from model.py: the port ends
where the parameters end. `from_raw` and `to_raw` carry parameters, and gradients, across.
"""
from collections.abc import Callable
from functools import partial
from operator import attrgetter

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from model import IGNORE, GPTConfig, attend_cache, attention, matmul, merge_heads, split_heads, widen


# The model -------------------------------------------------------------------------------

class Block(eqx.Module):
    """One layer, (N, D) -> (N, D)."""
    ln1: eqx.nn.LayerNorm
    qkv: eqx.nn.Linear
    proj: eqx.nn.Linear
    ln2: eqx.nn.LayerNorm
    fc: eqx.nn.Linear
    out: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    n_head: int = eqx.field(static=True)
    dtype: str = eqx.field(static=True)

    def __init__(self, cfg, key):
        D, keys = cfg.n_embd, jax.random.split(key, 4)
        self.ln1, self.ln2 = eqx.nn.LayerNorm(D), eqx.nn.LayerNorm(D)
        self.qkv, self.proj = eqx.nn.Linear(D, 3 * D, key=keys[0]), eqx.nn.Linear(D, D, key=keys[1])
        self.fc, self.out = eqx.nn.Linear(D, 4 * D, key=keys[2]), eqx.nn.Linear(4 * D, D, key=keys[3])
        self.dropout = eqx.nn.Dropout(cfg.dropout)
        self.n_head, self.dtype = cfg.n_head, cfg.dtype

    def __call__(self, x, B, key, mix):
        """Returns the stream and this layer's keys and values, (B, H, T, K) each. mix: a function of
        (q, k, v, dropout rate, key): attention, or one over a cache."""
        k_mix, k_proj, k_mlp = (None,) * 3 if key is None else jax.random.split(key, 3)
        dense = partial(linear, dtype=self.dtype)
        q, k, v = split_heads(dense(self.qkv, jax.vmap(self.ln1)(x)), B, self.n_head)
        y = merge_heads(mix(q, k, v, self.dropout.p, k_mix))
        x = x + drop(self.dropout, dense(self.proj, y), k_proj)
        h = dense(self.out, jax.nn.gelu(dense(self.fc, jax.vmap(self.ln2)(x))))  # tanh GELU, as GPT-2
        return x + drop(self.dropout, h, k_mlp), (k, v)


class GPT(eqx.Module):
    """tokens (B, T) int, T <= context -> logits (B, T, V), at least float32. Raises ValueError for more tokens.

    Equinox's layers offer no choice of initialisation, so this one is never used: `from_raw` fills a GPT's shapes with
    the values of model.init_params. A key given with a call switches dropout on, with model.py's masks. attention is
    the place for a kernel.
    """
    wte: eqx.nn.Embedding
    wpe: eqx.nn.Embedding
    blocks: list[Block]
    lnf: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout
    cfg: GPTConfig = eqx.field(static=True)
    attention: Callable = eqx.field(static=True)

    def __init__(self, cfg, key, attention=attention):
        keys = jax.random.split(key, cfg.n_layer + 2)
        self.wte = eqx.nn.Embedding(cfg.vocab_size, cfg.n_embd, key=keys[0])
        self.wpe = eqx.nn.Embedding(cfg.context, cfg.n_embd, key=keys[1])
        self.blocks = [Block(cfg, k) for k in keys[2:]]
        self.lnf = eqx.nn.LayerNorm(cfg.n_embd)
        self.dropout = eqx.nn.Dropout(cfg.dropout)
        self.cfg, self.attention = cfg, attention

    def __call__(self, tokens, key=None):
        return self.logits(self.run_blocks(tokens, key)[0]).reshape(*tokens.shape, -1)

    def run_blocks(self, tokens, key=None):
        """tokens (B, T) -> the stream (N, D) after the last layer, and each layer's (k, v)."""
        B, T = tokens.shape
        if T > (S := self.cfg.context):
            raise ValueError(f"{T} tokens exceed the context of {S}: crop to the last {S}")
        keys = [None] * (len(self.blocks) + 1) if key is None else jax.random.split(key, len(self.blocks) + 1)
        x, cached = drop(self.dropout, self.embed(tokens, jnp.arange(T)), keys[0]), []
        layer = eqx.filter_checkpoint(Block.__call__) if self.cfg.remat else Block.__call__
        for block, layer_key in zip(self.blocks, keys[1:]):
            x, kv = layer(block, x, B, layer_key, self.attention)
            cached.append(kv)
        return x, cached

    def embed(self, tokens, positions):
        """tokens (B, T), positions (T,) -> (N, D). (Called, an eqx.nn.Embedding takes one index.)"""
        return (self.wte.weight[tokens] + self.wpe.weight[positions]).reshape(tokens.size, -1)

    def logits(self, x):
        """(N, D) -> (N, V). One leaf, used twice: a pytree has no references, so a second leaf would train apart."""
        return widen(matmul(jax.vmap(self.lnf)(x).astype(self.cfg.dtype), self.wte.weight.T))

    def prefill(self, tokens):
        """Reads a prompt, (B, T) int -> logits (B, V) of the next token, and the cache: L pairs, (B, H, S, K) each."""
        B, T = tokens.shape
        x, cached = self.run_blocks(tokens)
        pad = ((0, 0), (0, 0), (0, self.cfg.context - T), (0, 0))
        return self.logits(x.reshape(B, T, -1)[:, -1]), jax.tree.map(lambda a: jnp.pad(a, pad), cached)

    def decode(self, cache, token, position):
        """One more token, (B,) int, at `position` -> logits (B, V) of the one after it, and the cache with this one."""
        x, new = self.embed(token[:, None], position[None]), []
        past = jnp.arange(self.cfg.context) < position
        for block, (k_old, v_old) in zip(self.blocks, cache):
            def recall(q, k, v, rate, key):
                return attend_cache(q, k, v, k_old, v_old, past)
            x, kv = block(x, len(token), None, recall)
            new.append(kv)
        write = partial(jax.lax.dynamic_update_slice_in_dim, start_index=position, axis=2)
        return self.logits(x), jax.tree.map(write, cache, new)


def linear(layer, x, dtype):
    """An eqx.nn.Linear, which takes one row, over the rows of x in dtype: (N, I) -> (N, O)."""
    return jax.vmap(jax.tree.map(lambda a: a.astype(dtype), layer))(x.astype(dtype))


def drop(dropout, x, key):
    return dropout(x, key=key, inference=key is None)


def summed_loss(model, tokens, targets, key=None):
    """model.py's: cross-entropy summed over the targets that count, and their number."""
    counted = targets != IGNORE
    nats = optax.softmax_cross_entropy_with_integer_labels(model(tokens, key), jnp.where(counted, targets, 0))
    return jnp.where(counted, nats, 0).sum(), counted.sum()


@eqx.filter_jit
def greedy(model, prompt, n):
    """The n most probable tokens, one at a time from the cache. prompt: (B, P) int, P + n <= context -> (B, n) int32.

    n is no array, so filter_jit takes it as static. To sample, or to go past the context, give to_raw(model) to
    model.generate.
    """
    P = prompt.shape[1]
    if P + n > model.cfg.context:
        raise ValueError(f"{P} + {n} tokens exceed the context of {model.cfg.context}")

    def body(carry, position):
        logits, cache = carry
        token = logits.argmax(-1).astype(jnp.int32)
        return model.decode(cache, token, position), token
    return jax.lax.scan(body, model.prefill(prompt), P + jnp.arange(n))[1].T


# To and from model.py's parameters --------------------------------------------------------

TOP = {"wte": "wte.weight", "wpe": "wpe.weight", "lnf_scale": "lnf.weight", "lnf_bias": "lnf.bias"}
BLOCK = {"ln1_scale": "ln1.weight", "ln1_bias": "ln1.bias", "w_qkv": "qkv.weight", "b_qkv": "qkv.bias",
         "w_proj": "proj.weight", "b_proj": "proj.bias", "ln2_scale": "ln2.weight", "ln2_bias": "ln2.bias",
         "w_fc": "fc.weight", "b_fc": "fc.bias", "w_out": "out.weight", "b_out": "out.bias"}


def turned(name, value):
    """eqx.nn.Linear keeps its weight as (O, I), model.py as (I, O)."""
    return value.T if name.startswith("w_") else value


def leaves(model):
    return [attrgetter(path)(model) for path in TOP.values()] + \
        [attrgetter(path)(block) for path in BLOCK.values() for block in model.blocks]


def from_raw(params, cfg, attention=attention):
    """model.py's parameters as a GPT."""
    model = eqx.filter_eval_shape(GPT, cfg, jax.random.key(0), attention)
    blocks = [turned(name, value) for name in BLOCK for value in params["blocks"][name]]
    return eqx.tree_at(leaves, model, [params[name] for name in TOP] + blocks)


def to_raw(model):
    """A GPT's parameters as model.py's dict; a gradient from eqx.filter_grad, which is a GPT too, likewise."""
    return {**{name: attrgetter(path)(model) for name, path in TOP.items()},
            "blocks": {name: jnp.stack([turned(name, attrgetter(path)(block)) for block in model.blocks])
                       for name, path in BLOCK.items()}}


# Training, as train.py calls it -----------------------------------------------------------

def start(params, cfg, tx, attention=attention):
    """The state of a run: the model, tx (optax) and its state."""
    model = from_raw(params, cfg, attention)
    return {"model": model, "tx": tx, "opt": tx.init(eqx.filter(model, eqx.is_array))}


@eqx.filter_jit(donate="all-except-first")
def train_step(batch, state):
    """One update by the gradient of the mean loss over A micro-batches.

    batch: tokens and targets, (A, B, T) int, and dropout keys, (A,) or None. Returns the new state and
    {"loss", "grad_norm"}.
    """
    model, tx = state["model"], state["tx"]
    params = eqx.filter(model, eqx.is_array)  # a GPT with None where a leaf is no array, such as Dropout's rate

    def micro(total, batch):
        (nats, count), grad = eqx.filter_value_and_grad(summed_loss, has_aux=True)(model, *batch)
        return jax.tree.map(jnp.add, total, (nats, count, grad)), None

    zero = (jnp.zeros(()), jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))
    (nats, count, grad), _ = jax.lax.scan(micro, zero, batch, unroll=len(batch[0]) == 1)
    grad = jax.tree.map(lambda g: g / count, grad)
    updates, opt = tx.update(grad, state["opt"], params)
    new = {"model": eqx.apply_updates(model, updates), "tx": tx, "opt": opt}
    return new, {"loss": nats / count, "grad_norm": optax.tree.norm(grad)}


def saved(state):
    """What a checkpoint holds: the parameters as model.py's, so that every program here reads them."""
    return {"params": to_raw(state["model"]), "opt": state["opt"]}


def restored(checkpoint, state):
    """`state` with the values of a checkpoint of `saved`."""
    model = from_raw(checkpoint["params"], state["model"].cfg, state["model"].attention)
    return {**state, "model": model, "opt": checkpoint["opt"]}
