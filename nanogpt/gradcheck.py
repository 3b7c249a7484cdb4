"""Is the gradient right? Finite differences, Hugging Face's GPT-2, PyTorch's AdamW, and bugs planted to be caught.

    python gradcheck.py        # about a minute; exit status 1 if any row fails

Legend: B batch, T time, V vocabulary, L layers.
The chain: the loss itself (central differences, float64) -> our gradient -> the attention kernels' own (kernels.py,
interpreted) -> the gradient of an implementation that others wrote (transformers' GPT2LMHeadModel, same parameters,
float64) -> the optimiser (20 steps of torch.optim.AdamW on the same batches) -> gradients that are wrong on purpose.

Where the tolerances come from: 1e-7 of the differences, see common/gradcheck.py; 1e-9 between two float64
programs that sum in another order (measured: below 2e-15); 1e-4 of the float32 losses after 20 steps (float32's
6e-8 grows along the trajectory; measured: 2e-7); 1e-3 of the parameters then (measured: 1e-4: Adam divides by the
root of the second moment, so where the true gradient is 0, as for key biases, it scales rounding up to a full step).
"""
import dataclasses
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for common/

import data
import kernels
import run
import train
from common.gradcheck import (Check, compare, coordinates, directional, from_torch, planted, print_report, scaled,
                              to_torch, torch_missing, vjp, zeroed)
from model import GPTConfig, attention_reference, forward, init_params, loss_fn

SHAPE = GPTConfig(vocab_size=17, context=12, n_layer=2, n_head=3, n_embd=24, dtype="float64")


def setting(key, cfg=SHAPE, B=3):
    """Parameters (float64, with every bias and scale moved off its trivial start), tokens and targets (B, T)."""
    k_init, k_noise, k_text = jax.random.split(key, 3)
    params = jax.tree.map(lambda a: a.astype(jnp.float64), init_params(k_init, cfg))
    keys = jax.tree.unflatten(jax.tree.structure(params), list(jax.random.split(k_noise, len(jax.tree.leaves(params)))))
    params = jax.tree.map(lambda a, k: a + 0.1 * jax.random.normal(k, a.shape, a.dtype), params, keys)
    text = jax.random.randint(k_text, (B, cfg.context + 1), 0, cfg.vocab_size)
    return params, text[:, :-1], text[:, 1:]


def finite_differences(params, tokens, targets):
    loss = partial(loss_fn, cfg=SHAPE)
    k1, k2, k3 = jax.random.split(jax.random.key(1), 3)
    rows = directional(loss, params, tokens, targets, key=k1, name="finite differences, direction")
    rows += coordinates(loss, params, tokens, targets, key=k2, name="finite differences,")
    remat = partial(loss_fn, cfg=dataclasses.replace(SHAPE, remat=True))
    dropped = partial(loss_fn, cfg=dataclasses.replace(SHAPE, dropout=0.3), key=k3)  # one fixed mask is differentiable
    rows += directional(remat, params, tokens, targets, key=k1, n=1, name="finite differences, remat")
    rows += directional(dropped, params, tokens, targets, key=k1, n=1, name="finite differences, dropout")
    return rows


def kernel_rows():
    """The attention kernels, interpreted, both forms: differences through their own VJP, and the reference's gradient.
    Sizes that are no multiple of the tile, four tiles along each axis, two query heads to a kv head."""
    keys = jax.random.split(jax.random.key(4), 4)
    shapes = (1, 2, 29, 8), (1, 1, 31, 8), (1, 1, 31, 8), (1, 2, 29, 8)
    q, k, v, g = (jax.random.normal(key, shape, jnp.float64) for key, shape in zip(keys, shapes))
    rows = []
    for form, tile in (("tpu", kernels.Tile(8, 8, keys_first=True)), ("gpu", kernels.Tile(8, 8))):
        f = partial(kernels.flash_attention, form=form, tiles=kernels.Tiles(tile, tile, tile))
        rows += vjp(f, q, k, v, key=keys[0], name=f"finite differences, {form} kernel,")
        got, want = (jax.jit(lambda q, k, v, f=f: dict(zip("qkv", jax.vjp(f, q, k, v)[1](g))))(q, k, v)
                     for f in (f, kernels.attention_reference))
        rows += compare(f"{form} kernel, gradient of", got, want, 1e-9)
    return rows


# PyTorch ---------------------------------------------------------------------------------

def hugging_face(cfg, params):
    """transformers' GPT2LMHeadModel with our parameters; built from a config, nothing is downloaded."""
    import torch
    import transformers
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=cfg.vocab_size, n_positions=cfg.context, n_embd=cfg.n_embd, n_layer=cfg.n_layer, n_head=cfg.n_head,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
        attn_implementation="eager"))
    model.to(to_torch(params["wte"]).dtype)
    with torch.no_grad():
        for parameter, values in hugging_face_leaves(model, params):
            parameter.copy_(to_torch(values))
    return model


def hugging_face_leaves(model, params):
    """Pairs (their parameter, our array). GPT2's Conv1D keeps weights as (in, out), as we do."""
    body, blocks = model.transformer, params["blocks"]
    yield from ((body.wte.weight, params["wte"]), (body.wpe.weight, params["wpe"]),
                (body.ln_f.weight, params["lnf_scale"]), (body.ln_f.bias, params["lnf_bias"]))
    for i, theirs in enumerate(body.h):
        for module, weight, bias in ((theirs.ln_1, "ln1_scale", "ln1_bias"), (theirs.ln_2, "ln2_scale", "ln2_bias"),
                                     (theirs.attn.c_attn, "w_qkv", "b_qkv"), (theirs.attn.c_proj, "w_proj", "b_proj"),
                                     (theirs.mlp.c_fc, "w_fc", "b_fc"), (theirs.mlp.c_proj, "w_out", "b_out")):
            yield module.weight, blocks[weight][i]
            yield module.bias, blocks[bias][i]


def hugging_face_gradient(model, params):
    """model's .grad in the shape of our parameter tree, as NumPy arrays."""
    gradient = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), params)
    for parameter, view in hugging_face_leaves(model, gradient):  # indexing a NumPy array gives a view to write to
        view[...] = from_torch(parameter.grad)
    return gradient


def transformers_rows(params, tokens, targets):
    """Logits, loss and every gradient leaf in float64. The loss is computed from their logits: GPT2's own
    `labels=` returns it in float32 (transformers 5.24), which costs eight digits of the gradient."""
    import torch
    model = hugging_face(SHAPE, params)
    logits = model(to_torch(tokens).long()).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), to_torch(targets).flatten().long())
    loss.backward()
    ours, gradient = jax.jit(jax.value_and_grad(partial(loss_fn, cfg=SHAPE)))(params, tokens, targets)
    rows = compare("transformers GPT2, logits", jax.jit(partial(forward, cfg=SHAPE))(params, tokens),
                   from_torch(logits), 1e-9)
    rows += compare("transformers GPT2, loss", ours, from_torch(loss), 1e-9)
    return rows + compare("transformers GPT2, gradient", gradient, hugging_face_gradient(model, params), 1e-9)


def adamw_rows(steps=20):
    """train.py's own step against torch.optim.AdamW: the largest difference of the losses over the steps."""
    import torch
    from torch_twin import adamw, train_step
    cfg = train.Config(n_layer=2, n_head=4, n_embd=32, context=16, batch_size=4, accum_steps=2, max_iters=steps,
                       warmup_iters=5, grad_clip=0.5)
    model_cfg = cfg.model(vocab_size=17)
    ids = jax.random.randint(jax.random.key(2), (1000,), 0, 17).astype(jnp.uint8)
    state = train.init_state(cfg, model_cfg)
    theirs = hugging_face(model_cfg, state["params"])
    theirs.loss = lambda x, y: torch.nn.functional.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten())
    optimizer = adamw(theirs, cfg.lr, cfg.weight_decay, beta2=0.99)
    lr, batches = train.schedule(cfg), train.purpose_keys(cfg.seed)["batches"]
    ours, want = [], []
    for step in range(steps):
        x, y = data.sample_batch(ids, batches, step, cfg.accum_steps * cfg.batch_size, cfg.context)
        want.append(float(train_step(theirs, optimizer, to_torch(x).long(), to_torch(y).long(), float(lr(step)),
                                     cfg.grad_clip)))
        state, got = train.train_step(state, ids, jnp.int32(step), cfg, model_cfg)
        ours.append(float(got["loss"]))
    worst = float(np.abs(np.array(ours) / np.array(want) - 1).max())
    parameters = [float(np.linalg.norm(from_torch(p.detach()) - np.asarray(a)) / np.linalg.norm(a))
                  for p, a in hugging_face_leaves(theirs, state["params"])]
    return [Check(f"torch AdamW, losses of {steps} steps", worst, 1e-4),
            Check(f"torch AdamW, parameters after {steps} steps", max(parameters), 1e-3)]


# Bugs that must be caught ----------------------------------------------------------------

def planted_rows(params, tokens, targets):
    """A gradient 0.1 % too large, one entry lost, and two bugs of the kind one really writes."""
    loss = partial(loss_fn, cfg=SHAPE)
    key = jax.random.key(3)

    def of(wrong):
        return directional(loss, params, tokens, targets, key=key, grad=wrong) + \
            coordinates(loss, params, tokens, targets, key=key, grad=wrong)

    def unscaled_attention(q, k, v, rate, key):
        return attention_reference(q * q.shape[-1] ** 0.5, k, v, rate, key)

    right = jax.grad(loss)
    untied = jax.grad(lambda p, x, y: loss({**p, "wte": jax.lax.stop_gradient(p["wte"])}, x, y))
    unscaled = jax.grad(partial(loss, attention=unscaled_attention))
    return [planted("gradient times 1.001", of(lambda *a: scaled(right(*a)))),
            planted("one entry of blocks/w_fc zeroed", of(lambda *a: zeroed(right(*a), "blocks/w_fc"))),
            planted("no gradient into wte", of(untied)),
            planted("attention without 1/sqrt(K)", of(unscaled))]


def main():
    run.prepare_host()
    with jax.enable_x64(True):
        setup = setting(jax.random.key(0))
        rows = finite_differences(*setup) + kernel_rows()
        if torch_missing():
            rows += [f"transformers GPT2: {torch_missing()}", f"torch AdamW: {torch_missing()}"]
        else:
            rows += transformers_rows(*setup)
        rows += planted_rows(*setup)
    if not torch_missing():
        rows += adamw_rows()  # float32, as training runs
    return print_report(rows)


if __name__ == "__main__":
    sys.exit(main())
