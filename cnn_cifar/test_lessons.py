"""Every lesson runs as a script, and each of its self-checks refuses a wrong answer."""
import re
from pathlib import Path

import pytest

from common import lessons

HERE = Path(__file__).resolve().parent

WRONG = {  # lesson -> exercise -> a plausible wrong answer, which the exercise's self-check must refuse
    "01_state_batchnorm": {
        "patience": """
def patience(state, loss):
    best = jnp.minimum(loss, state["best"])
    since = jnp.where(loss < best, 0, state["since"] + 1)
    return {"best": best, "since": since}, since >= 3
""",
        "recalibrate": """
def recalibrate(params, xs):
    def body(stats, x):
        return model.update_stats(stats, *model.moments(x @ params["w"]), n=len(x)), None
    return lax.scan(body, {"mean": jnp.zeros(C), "var": jnp.ones(C)}, xs)[0]
""",
        "spread_moments": """
def spread_moments(shares):
    mean, var = jax.vmap(model.moments)(shares)
    return mean.mean(0), var.mean(0)
""",
    },
    "02_conv_im2col": {
        "dilated_im2col": """
def dilated_im2col(x, k, dilation):
    span = k * dilation
    windows = np.lib.stride_tricks.sliding_window_view(x, (span, span), axis=(1, 2))[..., ::dilation, ::dilation]
    B, Ho, Wo = windows.shape[:3]
    return windows.transpose(0, 1, 2, 4, 5, 3).reshape(B * Ho * Wo, -1)
""",
        "image_gradient": """
def image_gradient(w, g):
    B, H, W, O = g.shape
    padded = jnp.pad(g, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return sum(padded[:, u:u + H, v:v + W] @ w[u, v].T for u in range(3) for v in range(3))
""",
    },
    "03_debugging": {
        "make_step": """
def make_step():
    losses = []

    @jax.jit
    def update(params, stats, images, labels, step):
        batch = lax.dynamic_slice_in_dim(images, step * BATCH, BATCH)
        targets = lax.dynamic_slice_in_dim(labels, step * BATCH, BATCH)

        def loss_fn(params):
            logits, new_stats = net(params, stats, batch)
            counted = targets >= 0
            return jnp.where(counted, model.cross_entropy(logits, targets), 0).sum() / counted.sum(), new_stats

        (loss, new_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        norm = jnp.sqrt(sum((g ** 2).sum() for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g * jnp.minimum(1, LIMIT / norm), grads)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), new_stats, loss

    def train_step(params, stats, images, labels, step):
        params, stats, loss = update(params, stats, images, labels, step)
        losses.append(float(loss))
        return params, stats
    return train_step, losses
""",
        "first_nonfinite": """
def first_nonfinite(params, stats, images):
    names, found = iter(model.layers_of()), []

    def norm(x, scale, bias):
        name = next(names)
        y, mean, var = model.batch_norm_relu(x, scale, bias)
        jax.debug.callback(lambda finite: None if finite else found.append(name), jnp.isfinite(var).all(), ordered=True)
        return y, mean, var

    jax.jit(partial(model.forward, train=True, norms=(norm, None)))(params, stats, images)
    jax.effects_barrier()
    return found[0] if found else None
""",
        "hard_examples": """
def hard_examples(losses, limit, k):
    mask = losses > limit
    return jnp.flatnonzero(mask, size=k, fill_value=-1), jnp.where(mask, losses, 0).mean()
""",
    },
    "04_xla_hlo_fusion_donation": {
        "one_pass": """
def one_pass(f, *args):
    return fusions(compiled(f, *args)) == 1
""",
        "keep_best": """
def keep_best(step, state, steps):
    best, losses = None, []
    for _ in range(steps):
        state, loss = step(state)
        losses.append(float(loss))
        if losses[-1] == min(losses):
            best = state
    return state, best, losses
""",
    },
    "05_nnx_linen_state_types": {
        "decayed": """
def decayed(path, variable):
    return path[-1] != "bias"
""",
        "linen_step": """
def linen_step(variables, images, labels, lr):
    def loss_of(params):
        logits, _ = linen_net.apply({**variables, "params": params}, images, train=True, mutable=["batch_stats"])
        return model.cross_entropy(logits, labels).mean()
    loss, grads = jax.value_and_grad(loss_of)(variables["params"])
    return {**variables, "params": jax.tree.map(lambda p, g: p - lr * g, variables["params"], grads)}, loss
""",
        "count_parameters": """
def count_parameters(config):
    D, F, L, V = (config[name] for name in ("base_emb_dim", "base_mlp_dim", "base_num_decoder_layers", "vocab_size"))
    H, K = config["base_num_query_heads"], config["head_dim"]
    mlp = D * F * (len(config["mlp_activations"]) + 1)
    embeddings = V * D * (1 if config["logits_via_embedding"] else 2)
    return L * (4 * D * H * K + mlp + 2 * D) + D + embeddings
""",
    },
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_lesson_runs_and_its_self_checks_refuse_wrong_answers(name):
    lessons.check(HERE / "lessons" / f"{name}.py", WRONG[name])


def test_every_lesson_has_exercises_that_are_tested():
    assert sorted(path.stem for path in HERE.glob("lessons/*.py")) == sorted(WRONG)
    assert all(len(answers) >= 2 for answers in WRONG.values())


def test_the_readme_lists_the_topics_that_each_lesson_teaches():
    """The ids in a lesson's headings, [S1-025], are those in its row of the README's table."""
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    for name in WRONG:
        headings = re.findall(r"^# #+ .*", (HERE / "lessons" / f"{name}.py").read_text(encoding="utf-8"), re.M)
        taught = set(re.findall(r"\[(S\d-\d+[a-z]?)\]", "\n".join(headings)))
        row = next(line for line in readme.splitlines() if line.startswith(f"| [`{name}`]"))
        assert taught == set(re.findall(r"S\d-\d+[a-z]?", row)), name
