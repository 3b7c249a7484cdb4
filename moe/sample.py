"""Continues a prompt with a model that train.py saved.

    python sample.py                                    # the newest run under out/
    python sample.py --prompt "ROMEO:" --temperature 0  # always the same text
    python sample.py --top-k 10 --num-samples 3 --seed 7

Every character is a pass over the last `context` ones, without a capacity: a character that finds its expert full in
training is never refused here. nanogpt/ shows how a cache of keys and values makes this fast.
"""
import sys
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import data
import run
from model import generate, init_params
from train import Config


@dataclass(frozen=True)
class SampleConfig:
    out_dir: str = ""  # the run's folder; default: the newest under out/
    checkpoint: str = "best"  # best (lowest validation loss) or latest
    prompt: str = "\n"  # the text to continue
    max_new_tokens: int = 500  # characters to draw
    num_samples: int = 1  # independent continuations, drawn in one batch
    temperature: float = 0.8  # 0 always takes the most probable character
    top_k: int | None = None  # draw among the k most probable characters only
    seed: int = 0  # of the draws

    def __post_init__(self):
        for name in ("max_new_tokens", "num_samples", "top_k"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature} must not be negative: 0 takes the most probable")
        if self.checkpoint not in ("best", "latest"):
            raise ValueError(f"checkpoint={self.checkpoint!r} must be best or latest")
        if not self.prompt:
            raise ValueError("prompt='' is empty: give at least one character, for example a line break")


def load(folder, kind):
    """(params, model config, characters in id order) of a run folder; exits with status 2 without a checkpoint."""
    cfg, checkpoints = run.load_config(folder, Config), run.Checkpoints(folder)
    found = checkpoints.restore(kind, {})
    if found is None:
        run.fail(f"{folder} holds no checkpoint {kind!r} yet: train until its first evaluation")
    vocab = found[1]["vocab"]
    model_cfg = cfg.model(len(vocab))
    shapes = jax.eval_shape(partial(init_params, cfg=model_cfg), jax.random.key(0))
    state, _ = checkpoints.restore(kind, {"params": shapes})
    checkpoints.close()
    return state["params"], model_cfg, vocab


def continuations(params, model_cfg, vocab, cfg):
    """cfg.num_samples texts of cfg.max_new_tokens characters that follow cfg.prompt.

    Raises ValueError listing the characters of the prompt that the vocabulary lacks, and for a model with expert
    choice, in which a token's experts depend on the tokens after it.
    """
    prompt = data.encode(cfg.prompt, vocab)[-model_cfg.context:].astype(np.int32)
    draw = jax.jit(generate, static_argnames=("n", "cfg", "top_k"))
    tokens = draw(params, np.tile(prompt, (cfg.num_samples, 1)), n=cfg.max_new_tokens, cfg=model_cfg,
                  key=jax.random.key(cfg.seed), temperature=jnp.float32(cfg.temperature), top_k=cfg.top_k)
    return [data.decode(row, vocab) for row in np.asarray(tokens)]


def main(cfg):
    run.prepare_host()
    sys.stdout.reconfigure(encoding="utf-8")  # a C locale would refuse what the model may say
    folder = cfg.out_dir or run.newest_run()
    if folder is None:
        run.fail("there is no run under out/ yet: python train.py makes one")
    try:
        texts = continuations(*load(folder, cfg.checkpoint), cfg)
    except ValueError as why:
        run.fail(why)
    print(f"\n{'-' * 40}\n".join(cfg.prompt + text for text in texts))


if __name__ == "__main__":
    main(tyro.cli(SampleConfig, description=__doc__))
