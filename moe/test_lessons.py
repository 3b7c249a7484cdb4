"""Every lesson runs as a script, and each of its self-checks refuses a wrong answer."""
import re
from pathlib import Path

import pytest

from common import lessons

HERE = Path(__file__).resolve().parent

WRONG = {  # lesson -> exercise -> a plausible wrong answer, which the exercise's self-check must refuse
    "01_einsum_dispatch_combine": {
        "grouped_attention": """
def grouped_attention(q, k, v):  # query head i reads head i % G
    B, T, H, K = q.shape
    q = q.reshape(B, T, -1, k.shape[2], K)
    weights = jax.nn.softmax(jnp.einsum("bqrgd,bkgd->bgrqk", q, k) * K**-0.5)
    return jnp.einsum("bgrqk,bkgd->bqrgd", weights, v).reshape(B, T, H, K)
""",
        "einsum_vjp": """
def einsum_vjp(spec, a, b, g):  # without "->" the output's letters are sorted
    inputs, out = spec.split("->")
    in_a, in_b = inputs.split(",")
    return jnp.einsum(f"{out},{in_b}", g, b), jnp.einsum(f"{in_a},{out}", a, g)
""",
        "places_by_choice": """
def places_by_choice(experts, n_experts):  # reshaped where it should be transposed back
    T, k = experts.shape
    return places(experts.T.reshape(k * T, 1), n_experts).reshape(T, k)
""",
    },
    "02_topk_gather_scatter": {
        "top_k_in_groups": """
def top_k_in_groups(scores, n_groups, top_groups, k):  # closed groups get a score of 0, not of -inf
    *lead, E = scores.shape
    best = scores.reshape(*lead, n_groups, E // n_groups).max(-1)
    is_open = jax.nn.one_hot(lax.top_k(best, top_groups)[1], n_groups, dtype=bool).any(-2)
    return lax.top_k(scores * jnp.repeat(is_open, E // n_groups, axis=-1), k)[1]
""",
        "permute_rows": """
@jax.custom_vjp
def permute_rows(x, order):  # the gradient is permuted once more, not back
    return x[order]
permute_rows.defvjp(lambda x, order: (x[order], order), lambda order, g: (g[order], None))
""",
    },
    "03_switch_cond_and_masks": {
        "switch_or_zeros": """
def switch_or_zeros(index, branches, x):  # a branch runs, and its result is thrown away
    known = (index >= 0) & (index < len(branches))
    return jnp.where(known, lax.switch(index, branches, x), 0.0)
""",
        "run_experts": """
def run_experts(h, counts, p, f):  # the vmapped cond is a select: every expert runs
    one = lambda count, p, h: lax.cond(count > 0, f, lambda p, h: jnp.zeros_like(h), p, h)
    return jax.vmap(one)(counts, p, h)
""",
    },
    "04_gradients_through_routing": {
        "router_gradient": """
def router_gradient(experts, gates, a, n_experts):  # as if the gates did not have to sum to 1
    return jnp.einsum("tk,tke->te", gates * (1 - gates) * a, jax.nn.one_hot(experts, n_experts))
""",
        "straight_through": """
def straight_through(logits, k):  # the gradient of the chosen ones only
    hard = jax.nn.one_hot(lax.top_k(logits, k)[1], logits.shape[-1]).sum(-2)
    soft = k * hard * jax.nn.softmax(logits)
    return hard + soft - lax.stop_gradient(soft)
""",
    },
    "05_expert_parallel": {
        "rows_of_my_experts": """
def rows_of_my_experts(slots):  # right for one expert a device only: senders and experts change places
    E, R, D = slots.shape
    arrived = lax.all_to_all(slots.reshape(n, E // n, R, D), "expert", split_axis=0, concat_axis=0)
    return arrived.reshape(E // n, n * R, D)
""",
        "balance_of_all": """
def balance_of_all(probs, experts):  # a mean of products
    return lax.pmean(model.balance_loss(probs, experts), "expert")
""",
        "smallest_hidden": """
def smallest_hidden(n, flops_per_s, link, bytes_per_value):  # counts the way there and not the way back
    return n * bytes_per_value * flops_per_s / (32 * link)
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
