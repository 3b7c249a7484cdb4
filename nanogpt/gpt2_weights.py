"""Hugging Face's GPT-2 folders: config.json, model.safetensors and tokenizer.json, as model.py and data.py need them.

Needs the packages safetensors (weights) and tokenizers (text), each only when it is used. Every function raises
ValueError, naming the file, what is wrong and the remedy.
Source: the layout that transformers' GPT2LMHeadModel.save_pretrained writes; weights are (I, O), as model.py's.
"""
import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import data
from model import init_params

TOP = {"wte": "wte.weight", "wpe": "wpe.weight", "lnf_scale": "ln_f.weight", "lnf_bias": "ln_f.bias"}
BLOCK = {"ln1_scale": "ln_1.weight", "ln1_bias": "ln_1.bias",
         "w_qkv": "attn.c_attn.weight", "b_qkv": "attn.c_attn.bias",
         "w_proj": "attn.c_proj.weight", "b_proj": "attn.c_proj.bias",
         "ln2_scale": "ln_2.weight", "ln2_bias": "ln_2.bias",
         "w_fc": "mlp.c_fc.weight", "b_fc": "mlp.c_fc.bias",
         "w_out": "mlp.c_proj.weight", "b_out": "mlp.c_proj.bias"}
# What model.py fixes and a config.json could choose otherwise; a key that is absent has this value.
FIXED = {"model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_inner": None,
         "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True}


def read_shape(folder):
    """The model's shape, {"vocab_size", "context", "n_layer", "n_head", "n_embd"}, from config.json."""
    path = Path(folder) / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        shape = {ours: int(found[theirs]) for ours, theirs in (
            ("vocab_size", "vocab_size"), ("context", "n_positions"), ("n_layer", "n_layer"), ("n_head", "n_head"),
            ("n_embd", "n_embd"))}
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no config.json: name a folder of a Hugging Face GPT-2 checkpoint") from None
    except (ValueError, TypeError, KeyError) as why:
        raise ValueError(f"{path} is no configuration of a GPT-2 ({type(why).__name__}: {why})") from why
    for name, fixed in FIXED.items():
        allowed = (fixed, 4 * shape["n_embd"]) if name == "n_inner" else (fixed,)
        if found.get(name, fixed) not in allowed:
            raise ValueError(f"{path} has {name}={found[name]!r}; model.py knows only {allowed[-1]!r}: "
                             "use another checkpoint")
    return shape


def load_params(folder, cfg):
    """model.safetensors as model.py's parameters, float32. cfg: a GPTConfig of the folder's shape, whose context may be
    shorter: the position embeddings are cropped. Every shape is checked before the first value is read."""
    shape, path = read_shape(folder), Path(folder) / "model.safetensors"
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:
        raise ValueError(f"reading {path} needs the package safetensors: pip install safetensors") from None
    if not path.is_file():
        raise ValueError(f"{folder} holds no model.safetensors: save the model as one file with "
                         'save_pretrained(folder, max_shard_size="100GB")')
    whole = dataclasses.replace(cfg, context=shape["context"])
    wanted = jax.eval_shape(partial(init_params, cfg=whole), jax.random.key(0))
    try:
        with safe_open(path, framework="flax") as file:  # jax arrays: NumPy alone has no bfloat16
            names = set(file.keys())
            prefix = "transformer." if f"transformer.{TOP['wte']}" in names else ""
            sources = {leaf: [prefix + name] for leaf, name in TOP.items()} | {
                leaf: [f"{prefix}h.{i}.{name}" for i in range(cfg.n_layer)] for leaf, name in BLOCK.items()}
            for leaf, tensors in sources.items():
                want = wanted["blocks"][leaf].shape[1:] if leaf in BLOCK else wanted[leaf].shape
                for name in tensors:
                    if name not in names:
                        raise ValueError(f"{path} lacks {name} (our {leaf}): it isn't the model of its config.json")
                    got = tuple(file.get_slice(name).get_shape())
                    if got != want:
                        raise ValueError(f"{path}: {name} (our {leaf}) has the shape {got}, but its config.json "
                                         f"asks for {want}: the two files don't belong together")
            masks = {name for name in names if name.endswith((".attn.bias", ".attn.masked_bias"))}  # no parameters
            unknown = sorted(names - masks - {name for tensors in sources.values() for name in tensors})
            if "lm_head.weight" in unknown and jnp.array_equal(file.get_tensor("lm_head.weight"),
                                                               file.get_tensor(prefix + TOP["wte"])):
                unknown.remove("lm_head.weight")
            if unknown:
                raise ValueError(f"{path} holds {unknown[0]}, which model.py has no place for: "
                                 "it isn't the model of its config.json")
            read = {leaf: np.stack([np.asarray(file.get_tensor(name)).astype(np.float32) for name in tensors])
                    for leaf, tensors in sources.items()}
    except SafetensorError as why:
        raise ValueError(f"{path} can't be read ({why}): copy it again") from why
    read["wpe"] = read["wpe"][:, :cfg.context]
    return jax.tree.map(jnp.asarray, {leaf: read[leaf][0] for leaf in TOP} | {
        "blocks": {leaf: read[leaf] for leaf in BLOCK}})


# Text ------------------------------------------------------------------------------------

def load_tokenizer(folder):
    """tokenizer.json as a tokenizers.Tokenizer, none of whose ids exceeds the model's vocabulary."""
    path, V = Path(folder) / "tokenizer.json", read_shape(folder)["vocab_size"]
    if not path.is_file():
        raise ValueError(f"{folder} holds no tokenizer.json, so the model can't read text: save one beside the weights "
                         "(transformers: AutoTokenizer.from_pretrained(...).save_pretrained(folder))")
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise ValueError(f"reading {path} needs the package tokenizers: pip install tokenizers") from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as why:  # the package raises plain Exception for a damaged file
        raise ValueError(f"{path} is no tokenizer ({why})") from why
    if tokenizer.get_vocab_size() > V:
        raise ValueError(f"{path} has {tokenizer.get_vocab_size()} tokens, but config.json's vocab_size={V}: "
                         "the two files don't belong together")
    return tokenizer


def encode(text, tokenizer):
    """Text -> ids (n,) int32. Raises ValueError where nothing of the text is in the vocabulary."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if not ids:
        raise ValueError(f"the tokenizer knows nothing of {text[:40]!r}: use another text")
    return np.array(ids, np.int32)


def decode(ids, tokenizer):
    return tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def tokenized(corpus, folder):
    """A data.Corpus of characters as one of the folder's tokens; its vocab is then the list of the V tokens."""
    tokenizer, V = load_tokenizer(folder), read_shape(folder)["vocab_size"]
    small = np.uint16 if V <= 2**16 else np.uint32
    train, val = (encode(data.decode(part, corpus.vocab), tokenizer).astype(small)
                  for part in (corpus.train, corpus.val))
    return dataclasses.replace(corpus, vocab=[tokenizer.id_to_token(i) or "" for i in range(V)], train=train, val=val)


def keep_tokenizer(folder, run_folder):
    """Copies what reading and writing text needs into the run's folder, which then needs `folder` no longer."""
    kept = Path(run_folder) / "gpt2"
    kept.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        shutil.copyfile(Path(folder) / name, kept / name)
