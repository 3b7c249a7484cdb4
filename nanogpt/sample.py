"""Continues a prompt with a model that train.py saved, as it is drawn.

    python sample.py                                    # the newest run under out/
    python sample.py --prompt "ROMEO:" --temperature 0  # always the same text
    python sample.py --top-k 10 --num-samples 3 --seed 7
    python sample.py --init-from DIR --prompt "Once"    # a Hugging Face GPT-2 folder instead
"""
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import data
import gpt2_weights
import run
from model import GPTConfig, generate, init_params, start
from train import Config

CHUNK = 16  # tokens a dispatch: short enough to read along, long enough to hide Python


@dataclass(frozen=True)
class SampleConfig:
    out_dir: str = ""  # the run's folder; default: the newest under out/
    init_from: str = ""  # a Hugging Face GPT-2 folder with a tokenizer.json, instead of a run
    checkpoint: str = "best"  # best (lowest validation loss) or latest
    prompt: str = "\n"  # the text to continue
    max_new_tokens: int = 500  # characters (of a GPT-2: tokens) to draw
    num_samples: int = 1  # independent continuations, drawn in one batch
    temperature: float = 0.8  # 0 always takes the most probable character
    top_k: int | None = None  # draw among the k most probable characters only
    top_p: float | None = None  # draw among the most probable that together reach p
    seed: int = 0  # of the draws
    stream: bool = True  # print the (first) sample as it is drawn

    def __post_init__(self):
        for name in ("max_new_tokens", "num_samples", "top_k"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature} must not be negative: 0 takes the most probable")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]")
        if self.checkpoint not in ("best", "latest"):
            raise ValueError(f"checkpoint={self.checkpoint!r} must be best or latest")
        if self.init_from and self.out_dir:
            raise ValueError(f"out_dir={self.out_dir!r} and init_from={self.init_from!r} each name a model: drop one")
        if not self.prompt:
            raise ValueError("prompt='' is empty: give at least one character, for example a line break")


def load(folder, kind):
    """(params, model config, vocabulary) of a run folder. The vocabulary is the characters in id order, or, of a run
    that started from a GPT-2, its tokenizer."""
    cfg, checkpoints = run.load_config(folder, Config), run.Checkpoints(folder)
    found = checkpoints.restore(kind, {})
    if found is None:
        run.fail(f"{folder} holds no checkpoint {kind!r} yet: train until its first evaluation")
    model_cfg = cfg.model(len(found[1]["vocab"]))
    shapes = jax.eval_shape(partial(init_params, cfg=model_cfg), jax.random.key(0))
    state, meta = checkpoints.restore(kind, {"params": shapes})
    checkpoints.close()
    vocab = gpt2_weights.load_tokenizer(Path(folder) / "gpt2") if cfg.init_from else meta["vocab"]
    return state["params"], model_cfg, vocab


def load_gpt2(folder):
    """The same of a Hugging Face folder. Raises ValueError where something is missing or doesn't fit."""
    vocab, shape = gpt2_weights.load_tokenizer(folder), gpt2_weights.read_shape(folder)
    model_cfg = GPTConfig(**shape)
    return gpt2_weights.load_params(folder, model_cfg), model_cfg, vocab


def encode(text, vocab):
    return data.encode(text, vocab) if isinstance(vocab, str) else gpt2_weights.encode(text, vocab)


def decode(ids, vocab):
    return data.decode(ids, vocab) if isinstance(vocab, str) else gpt2_weights.decode(ids, vocab)


def stream(params, model_cfg, vocab, cfg):
    """Yields (num_samples, at most CHUNK) arrays of token ids until max_new_tokens are drawn.

    Raises ValueError listing the characters of the prompt that the vocabulary lacks.
    """
    prompt = encode(cfg.prompt, vocab)[-model_cfg.context:]
    begin = jax.jit(start, static_argnames="cfg")
    draw = jax.jit(generate, static_argnames=("n", "cfg", "top_k", "top_p"), donate_argnames="state")
    prompts = np.tile(prompt.astype(np.int32), (cfg.num_samples, 1))
    state = begin(params, prompts, len(prompt), model_cfg)
    key = jax.random.key(cfg.seed)
    for i, left in enumerate(range(cfg.max_new_tokens, 0, -CHUNK)):
        tokens, state = draw(params, state, jax.random.fold_in(key, i), CHUNK, model_cfg,
                             jnp.float32(cfg.temperature), cfg.top_k, cfg.top_p)
        yield np.asarray(tokens[:, :left])


def main(cfg):
    run.prepare_host()
    sys.stdout.reconfigure(encoding="utf-8")  # a C locale would refuse what the model may say
    folder = cfg.init_from or cfg.out_dir or run.newest_run()
    if folder is None:
        run.fail("there is no run under out/ yet: python train.py makes one")
    chunks, shown = [], 0
    try:
        params, model_cfg, vocab = load_gpt2(folder) if cfg.init_from else load(folder, cfg.checkpoint)
        for chunk in stream(params, model_cfg, vocab, cfg):
            if cfg.stream and not chunks:
                print(cfg.prompt, end="")
            chunks.append(chunk)
            text = decode(np.concatenate(chunks, axis=1)[0], vocab)
            if cfg.stream and not text.endswith("\ufffd"):  # a token can end within a character: wait for its rest
                print(text[shown:], end="", flush=True)
                shown = len(text)
    except ValueError as why:
        run.fail(why)
    samples = np.concatenate(chunks, axis=1)
    if cfg.stream:
        print(text[shown:])
    for i, sample in enumerate(samples[1:] if cfg.stream else samples):
        print(f"{'-' * 40}\n{cfg.prompt}{decode(sample, vocab)}")


if __name__ == "__main__":
    main(tyro.cli(SampleConfig, description=__doc__))
