"""Every lesson runs as a script, and each of its self-checks refuses a wrong answer."""
import re
from pathlib import Path

import pytest

from common import lessons

HERE = Path(__file__).resolve().parent

WRONG = {  # lesson -> exercise -> a plausible wrong answer, which the exercise's self-check must refuse
    "01_python_under_jax": {
        "scalers": """
def scalers(factors):
    return [lambda x: x * factor for factor in factors]
""",
        "counting_jit": """
def counting_jit(f):
    jitted, traces = jax.jit(f), []
    @functools.wraps(f)
    def counting(*args):
        traces.append(args)
        return jitted(*args)
    counting.traces = traces
    return counting
""",
        "clip_length": """
def clip_length(v, limit):
    length = jnp.sqrt(jnp.sum(v * v))
    return v * (limit / length) if length > limit else v
""",
        "snapshot": """
def snapshot(host):
    return jax.device_put(host, jax.devices('cpu')[0])
""",
    },
    "02_numpy_softmax_onehot": {
        "batches": """
def batches(x, B):
    return np.stack([x[i:i + B] for i in range(0, len(x) - B + 1, B)])
""",
        "tiles": """
def tiles(image, k):
    return image.reshape(image.shape[0] // k, image.shape[1] // k, k, k)
""",
        "windows": """
def windows(image, k):
    H, W = image.shape
    strides = (W * image.itemsize, image.itemsize)
    return np.lib.stride_tricks.as_strided(image, (H - k + 1, W - k + 1, k, k), strides * 2)
""",
        "moving_average": """
def moving_average(losses, k):
    return np.convolve(losses, np.ones(k) / k, 'same')
""",
        "shift": """
def shift(image, dy, dx):
    return np.roll(image, (dy, dx), axis=(0, 1))
""",
        "bounding_box": """
def bounding_box(image):
    rows, columns = np.nonzero(image)
    return (rows.min(), rows.max(), columns.min(), columns.max()) if len(rows) else (0, 0, 0, 0)
""",
        "standardise": """
def standardise(images):
    wide = images.astype(np.float32)
    return (wide - wide.mean()) / wide.std()
""",
        "nearest": """
def nearest(images, queries):
    return ((images[None] - queries[:, None])**2).sum(-1).argmin(1)
""",
        "top_k": """
def top_k(scores, k):
    return np.argpartition(-scores, k - 1, axis=1)[:, :k]
""",
        "confusion": """
def confusion(labels, predictions, V):
    counts = np.zeros((V, V), int)
    counts[labels, predictions] += 1
    return counts
""",
        "class_means": """
def class_means(x, labels, V):
    sums = np.zeros((V, x.shape[1]))
    sums[labels] += x
    return sums / np.maximum(np.bincount(labels, minlength=V), 1)[:, None]
""",
        "unshuffle": """
def unshuffle(shuffled, order):
    return shuffled[order]
""",
    },
    "03_tracing_and_jaxprs": {
        "matmul_flops": """
def matmul_flops(f, *args):
    total = 0
    for eqn in all_eqns(jax.make_jaxpr(f)(*args).jaxpr):
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            total += 2 * eqn.outvars[0].aval.size * math.prod(eqn.invars[0].aval.shape[a] for a in contracted)
    return total
""",
        "masked_mean": """
def masked_mean(x, mask):
    return jnp.where(mask, x, 0).mean()
""",
        "count_traces": """
def count_traces(f, calls):
    return len({tuple(np.shape(a) for a in args) for args in calls})
""",
    },
    "04_grad_and_vmap": {
        "safe_normalize": """
def safe_normalize(v):
    return v / (jnp.linalg.norm(v) + 1e-12)
""",
        "pairwise": """
def pairwise(f, xs, ys):
    return jax.vmap(jax.vmap(f, in_axes=(0, None)), in_axes=(None, 0))(xs, ys)
""",
        "loss_grad_norms": """
def loss_grad_norms(params, images, labels):
    losses, grads = jax.vmap(jax.value_and_grad(loss_one), in_axes=(None, 0, 0))(params, images, labels)
    norms = sum(jnp.linalg.norm(g.reshape(len(g), -1), axis=1) for g in jax.tree.leaves(grads))
    return losses, jax.tree.map(lambda g: g.mean(0), grads), norms
""",
    },
    "05_recompile_and_timing": {
        "pad_to_bucket": """
def pad_to_bucket(images, labels, buckets):
    if len(labels) > max(buckets):
        raise ValueError("too large")
    size = min(size for size in buckets if size >= len(labels))
    short = size - len(labels)
    return np.pad(images, ((0, short), (0, 0))), np.pad(labels, (0, short))
""",
        "honest_seconds": """
def honest_seconds(f, x, n):
    jax.block_until_ready(f(x))
    seconds = []
    for _ in range(n):
        start = time.perf_counter()
        f(x)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
""",
    },
    "06_profiling_and_roofline": {
        "longest_gap": """
def longest_gap(intervals, begin, end):
    ends = [begin] + [start + duration for start, duration in intervals]
    starts = [start for start, _ in intervals] + [end]
    return max(start - stop for stop, start in zip(ends, starts))
""",
        "compute_bound_batch": """
def compute_bound_batch(I, O, balance):
    return math.ceil(2 * balance)
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
