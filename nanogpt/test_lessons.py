"""Every lesson runs as a script, and each of its self-checks refuses a wrong answer."""
import re
from pathlib import Path

import pytest

from common import lessons

HERE = Path(__file__).resolve().parent

WRONG = {  # lesson -> exercise -> a plausible wrong answer, which the exercise's self-check must refuse
    "01_control_flow_and_kv_cache": {
        "logsumexp_by_blocks": """
def logsumexp_by_blocks(x, b):
    def body(carry, i):
        m, l = carry
        block = lax.dynamic_slice(x, (i * b,), (b,))
        raised = jnp.maximum(m, block.max())
        return (raised, l * jnp.exp(m - raised) + jnp.exp(block - raised).sum()), None
    (m, l), _ = lax.scan(body, (jnp.float32(-jnp.inf), jnp.float32(0)), jnp.arange(-(-x.size // b)))
    return m + jnp.log(l)
""",
        "masked_softmax": """
def masked_softmax(scores, mask):
    return jnp.where(mask, jax.nn.softmax(scores + jnp.where(mask, 0.0, -jnp.inf), axis=-1), 0.0)
""",
    },
    "02_random_keys": {
        "epoch_batch": """
def epoch_batch(key, step, n, B):
    return jax.random.permutation(jax.random.fold_in(key, step), n)[:B]
""",
        "sample_chains": """
def sample_chains(key, logits, n, steps):
    def step(tokens, _):
        tokens = sample_token(logits[tokens], key, 1.0)
        return tokens, tokens
    return lax.scan(step, jnp.zeros(n, jnp.int32), length=steps)[1].T
""",
    },
    "03_advanced_autodiff": {
        "rms_norm": """
@jax.custom_vjp
def own(x, scale):
    return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale
def fwd(x, scale):
    r = lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    return x * r * scale, (x, r, scale)
own.defvjp(fwd, lambda residuals, g: (g * residuals[2] * residuals[1], (g * residuals[0] * residuals[1]).sum(0)))
def rms_norm(x, scale):  # treats r as a constant
    return own(x, scale)
""",
        "curvature": """
def curvature(loss, x, v):  # builds the Hessian
    return v @ jax.hessian(loss)(x) @ v
""",
        "quantise": """
def quantise(x):  # straight through everywhere: not clipped
    return x + lax.stop_gradient(jnp.round(8 * x) / 8 - x)
""",
    },
    "04_performance": {
        "crossover_rows": """
def crossover_rows(I, O, ridge, bytes_per_value):  # counts the matrix only, not the rows
    return ridge * bytes_per_value / 2
""",
        "seconds_per_call": """
def seconds_per_call(f, args, n, clock):  # doesn't wait for the results
    jax.block_until_ready(f(*args))
    seconds = []
    for _ in range(n):
        began = clock()
        f(*args)
        seconds.append(clock() - began)
    return statistics.median(seconds)
""",
    },
    "05_flash_attention": {
        "merge": """
def merge(a, b):  # the values are not rescaled
    m = max(a[0], b[0])
    return m, a[1] * np.exp(a[0] - m) + b[1] * np.exp(b[0] - m), a[2] + b[2]
""",
        "window_tiles": """
def window_tiles(i, bT, bS, window):  # the last query's window: the first ones reach further back
    last = (i + 1) * bT - 1
    return max(last - window + 1, 0) // bS, last // bS + 1
""",
    },
    "06_port_to_nnx": {
        "tied_gradient": """
def tied_gradient(loss, module, *batch):
    return jax.grad(loss)(module, *batch)
""",
        "sgd_step": """
def sgd_step(model, tokens, targets, lr):
    gradient = eqx.filter_grad(lambda m: model_eqx.summed_loss(m, tokens, targets)[0])(model)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -lr * g, gradient))
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
