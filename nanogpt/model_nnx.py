"""The GPT of model.py in Flax NNX: modules own their parameters, and training changes them in place.

Legend: B batch, T query time, S key time (context), D model, H heads, K head dim, V vocabulary, L layers,
A micro-batches, N = B * T rows.
What has no parameters (attention, the split into heads, attention over a cache) comes from model.py: the port ends
where the parameters end. `from_raw` and `to_raw` carry parameters, and gradients, across.
"""
from functools import partial
from operator import attrgetter

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from model import IGNORE, attend_cache, attention, matmul, merge_heads, split_heads, widen


# The model -------------------------------------------------------------------------------

class Block(nnx.Module):
    """One layer, (N, D) -> (N, D)."""

    def __init__(self, cfg, rngs):
        D, normal = cfg.n_embd, nnx.initializers.normal
        dense = partial(nnx.Linear, dtype=cfg.dtype, kernel_init=normal(0.02), rngs=rngs)
        # Written to the residual stream 2L times: scaled so that its variance does not grow with depth.
        to_stream = partial(dense, kernel_init=normal(0.02 / (2 * cfg.n_layer) ** 0.5))
        self.ln1, self.ln2 = layer_norm(D, rngs), layer_norm(D, rngs)
        self.qkv, self.proj = dense(D, 3 * D), to_stream(D, D)
        self.fc, self.out = dense(D, 4 * D), to_stream(4 * D, D)
        self.dropout = nnx.Dropout(cfg.dropout)
        self.n_head = cfg.n_head

    def __call__(self, x, B, key, mix):
        """mix: a function of (q, k, v, dropout rate, key), (B, H, T, K) each: attention, or one that keeps a cache."""
        k_mix, k_proj, k_mlp = (None,) * 3 if key is None else jax.random.split(key, 3)
        q, k, v = split_heads(self.qkv(self.ln1(x)), B, self.n_head)
        y = merge_heads(mix(q, k, v, self.dropout.rate, k_mix))
        x = x + drop(self.dropout, self.proj(y), k_proj)
        return x + drop(self.dropout, self.out(nnx.gelu(self.fc(self.ln2(x)))), k_mlp)  # tanh GELU, as GPT-2

    def remember(self, q, k, v, rate, key, room, mix):
        """A `mix` that also keeps the prompt's keys and values, with room for what follows."""
        pad = ((0, 0), (0, 0), (0, room), (0, 0))
        self.k_cache, self.v_cache = nnx.Cache(jnp.pad(k, pad)), nnx.Cache(jnp.pad(v, pad))
        return mix(q, k, v, rate, key)

    def recall(self, q, k, v, rate, key, position):
        """A `mix` of one query over the cache, to which its own key and value are added at `position`."""
        past = jnp.arange(self.k_cache.shape[2]) < position
        y = attend_cache(q, k, v, self.k_cache[...], self.v_cache[...], past)
        for cache, new in ((self.k_cache, k), (self.v_cache, v)):
            cache[...] = jax.lax.dynamic_update_slice_in_dim(cache[...], new, position, axis=2)
        return y


class GPT(nnx.Module):
    """tokens (B, T) int, T <= context -> logits (B, T, V), at least float32. Raises ValueError for more tokens.

    rngs draws GPT-2's initialisation, in another order than model.py's. Dropout takes a key with each call and splits
    it as model.py does, so the masks are the same; a stream held by nnx.Dropout would count its calls instead, and
    the count would be one more thing to save. attention is the place for a kernel.
    """

    def __init__(self, cfg, rngs, attention=attention):
        # A module's dtype is what its parameters are cast to before use: the embedding's stays wide, as the stream.
        embed = partial(nnx.Embed, features=cfg.n_embd, dtype=jnp.promote_types(cfg.dtype, jnp.float32),
                        embedding_init=nnx.initializers.normal(0.02), rngs=rngs)
        self.wte, self.wpe = embed(cfg.vocab_size), embed(cfg.context)
        self.blocks = nnx.List([Block(cfg, rngs) for _ in range(cfg.n_layer)])  # a plain list is refused
        self.lnf = layer_norm(cfg.n_embd, rngs)
        self.dropout = nnx.Dropout(cfg.dropout)
        self.cfg, self.attention = cfg, attention

    def __call__(self, tokens, key=None):
        B, T = tokens.shape
        if T > (S := self.cfg.context):
            raise ValueError(f"{T} tokens exceed the context of {S}: crop to the last {S}")
        keys = [None] * (len(self.blocks) + 1) if key is None else jax.random.split(key, len(self.blocks) + 1)
        x = drop(self.dropout, self.embed(tokens, jnp.arange(T)), keys[0])
        layer = nnx.remat(Block.__call__, static_argnums=(2, 4)) if self.cfg.remat else Block.__call__
        for block, layer_key in zip(self.blocks, keys[1:]):
            x = layer(block, x, B, layer_key, self.attention)
        return self.logits(x).reshape(B, T, -1)

    def embed(self, tokens, positions):
        """tokens (B, T), positions (T,) -> (N, D)."""
        return (self.wte(tokens) + self.wpe(positions)).reshape(tokens.size, -1)

    def logits(self, x):
        """(N, D) -> (N, V): one Param, used twice. (nnx.Embed.attend does this in the embedding's dtype.)"""
        return widen(matmul(self.lnf(x).astype(self.cfg.dtype), self.wte.embedding[...].T))

    def prefill(self, tokens):
        """Reads a prompt, (B, T) int, into the layers' caches -> logits (B, V) of the next token."""
        B, T = tokens.shape
        x = self.embed(tokens, jnp.arange(T))
        for block in self.blocks:
            x = block(x, B, None, partial(block.remember, room=self.cfg.context - T, mix=self.attention))
        self.length = nnx.Cache(jnp.int32(T))
        return self.logits(x.reshape(B, T, -1)[:, -1])

    def decode(self, token):
        """One more token, (B,) int -> logits (B, V) of the one after it. Call prefill first."""
        x = self.embed(token[:, None], self.length[...][None])
        for block in self.blocks:
            x = block(x, len(token), None, partial(block.recall, position=self.length[...]))
        self.length[...] += 1
        return self.logits(x)


def layer_norm(D, rngs):
    # The default variance, E[x^2] - E[x]^2, loses digits where the mean is large: 3e-6 of float32's logits here.
    return nnx.LayerNorm(D, epsilon=1e-5, use_fast_variance=False, rngs=rngs)


def drop(dropout, x, key):
    return dropout(x, deterministic=key is None, rngs=key)


def summed_loss(model, tokens, targets, key=None):
    """model.py's: cross-entropy summed over the targets that count, and their number."""
    counted = targets != IGNORE
    nats = optax.softmax_cross_entropy_with_integer_labels(model(tokens, key), jnp.where(counted, targets, 0))
    return jnp.where(counted, nats, 0).sum(), counted.sum()


def greedy(model, prompt, n):
    """The n most probable tokens, one at a time from the caches. prompt: (B, P) int, P + n <= context -> (B, n) int32.

    Each call changes the model's caches in place, which nnx.jit carries out of the compiled function. To sample, or
    to go past the context, give to_raw(model) to model.generate.
    """
    if prompt.shape[1] + n > model.cfg.context:
        raise ValueError(f"{prompt.shape[1]} + {n} tokens exceed the context of {model.cfg.context}")
    prefill, decode = nnx.jit(GPT.prefill), nnx.jit(GPT.decode)
    logits, drawn = prefill(model, prompt), []
    for _ in range(n):
        drawn.append(logits.argmax(-1).astype(jnp.int32))
        logits = decode(model, drawn[-1])
    nnx.pop(model, nnx.Cache)
    return jnp.stack(drawn, axis=1)


# To and from model.py's parameters --------------------------------------------------------

TOP = {"wte": "wte.embedding", "wpe": "wpe.embedding", "lnf_scale": "lnf.scale", "lnf_bias": "lnf.bias"}
BLOCK = {"ln1_scale": "ln1.scale", "ln1_bias": "ln1.bias", "w_qkv": "qkv.kernel", "b_qkv": "qkv.bias",
         "w_proj": "proj.kernel", "b_proj": "proj.bias", "ln2_scale": "ln2.scale", "ln2_bias": "ln2.bias",
         "w_fc": "fc.kernel", "b_fc": "fc.bias", "w_out": "out.kernel", "b_out": "out.bias"}


def from_raw(params, cfg, attention=attention):
    """model.py's parameters as a GPT."""
    model = nnx.eval_shape(lambda: GPT(cfg, nnx.Rngs(0), attention))
    for name, path in TOP.items():
        attrgetter(path)(model).set_value(params[name])
    for name, path in BLOCK.items():
        for block, value in zip(model.blocks, params["blocks"][name]):
            attrgetter(path)(block).set_value(value)
    return model


def to_raw(model):
    """A GPT's parameters as model.py's dict; a gradient from nnx.grad, whose State has the same paths, likewise."""
    blocks = [model.blocks[i] for i in range(len(model.blocks))]
    return {**{name: attrgetter(path)(model)[...] for name, path in TOP.items()},
            "blocks": {name: jnp.stack([attrgetter(path)(block)[...] for block in blocks])
                       for name, path in BLOCK.items()}}


# Training, as train.py calls it -----------------------------------------------------------

def start(params, cfg, tx, attention=attention):
    """The state of a run: the model, and its optimizer, which holds tx (optax)."""
    model = from_raw(params, cfg, attention)
    return {"model": model, "optimizer": nnx.Optimizer(model, tx, wrt=nnx.Param)}


@nnx.jit(donate_argnames="state")
def train_step(batch, state):
    """One update, in place, by the gradient of the mean loss over A micro-batches.

    batch: tokens and targets, (A, B, T) int, and dropout keys, (A,) or None. Returns the state, whose modules are
    the ones passed in, and {"loss", "grad_norm"}.
    """
    graph, params = nnx.split(state["model"], nnx.Param)

    def micro(total, batch):
        # Merged in here, and as a copy: nnx.grad refuses modules and Params of another trace.
        model = nnx.merge(graph, params, copy=True)
        (nats, count), grad = nnx.value_and_grad(summed_loss, has_aux=True)(model, *batch)
        return jax.tree.map(jnp.add, total, (nats, count, grad)), None

    zero = (jnp.zeros(()), jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))
    (nats, count, grad), _ = jax.lax.scan(micro, zero, batch, unroll=len(batch[0]) == 1)
    grad = jax.tree.map(lambda g: g / count, grad)
    state["optimizer"].update(state["model"], grad)
    return state, {"loss": nats / count, "grad_norm": optax.tree.norm(grad)}


def saved(state):
    """What a checkpoint holds: the parameters as model.py's, so that every program here reads them."""
    return {"params": to_raw(state["model"]), "opt": nnx.state(state["optimizer"])}


def restored(checkpoint, state):
    """`state` with the values of a checkpoint of `saved`."""
    nnx.update(state["optimizer"], checkpoint["opt"])
    return {**state, "model": from_raw(checkpoint["params"], state["model"].cfg, state["model"].attention)}
