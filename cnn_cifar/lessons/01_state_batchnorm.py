# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---
# %% [markdown]
# # State: batch norm's running statistics [S2-031] (must-read)
#
# After this lesson you can turn a function that changes something into one that takes the old state and returns the new
# one, carry that state through `jit`, `grad`, `lax.scan` and `vmap`, recognise the two ways in which a global fails
# inside `jit`, and find out whether a network's statistics were updated at all.
#
# Uses this project's `model.py`. Frameworks' answers to the same question are lesson 05's subject.
#
# ```
#   state inside an object                      state in the open
#
#   +----------------------+                    params --+
#   | norm.mean, norm.var  |                    stats  --+--> forward(..., train=True) --+--> logits
#   | y = norm(x)          |                    images --+                               +--> new stats
#   +----------------------+
#   a call changes norm: the next one           a call changes nothing: whoever calls decides
#   with the same x differs                     which stats the next call gets
# ```
#
# Legend: B batch, D inputs, C channels, V classes, T steps.

# %%
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent if "__file__" in globals() else Path.cwd()
sys.path[:0] = [str(PROJECT), str(PROJECT.parent)]  # the project's files, and common/ beside it

# %%
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import model

rng = np.random.default_rng(0)


def close(got, want, rtol=1e-5):
    """Whether two trees of one outline agree: shapes, and each leaf to rtol of its largest entry."""
    got, want = (jax.tree.map(np.asarray, tree) for tree in (got, want))
    return jax.tree.all(jax.tree.map(lambda a, b: a.shape == b.shape and np.allclose(a, b, rtol, rtol * abs(b).max()),
                                     got, want))


def message(error, f, *args, **kwargs):
    """The text of the error that f must raise."""
    try:
        f(*args, **kwargs)
    except error as why:
        return str(why)
    raise AssertionError(f"no {error.__name__} was raised")


# %% [markdown]
# ## What batch norm has to remember
# In training, batch norm subtracts each channel's mean over the batch and divides by its standard deviation. One image
# alone has no batch, and its answer must not depend on the others, so evaluation uses *running* statistics: an
# exponential average over the batches of training.
#
# ```
#   running <- momentum · running + (1 - momentum) · this batch's          momentum 0.9, from mean 0 and variance 1
# ```
#
# **Claim.** As a pure function this is three lines: statistics in, statistics out. The batch 0, 2, 4, 6 has mean 3 and
# variance 5 (the mean of the squares: *biased*). A batch of four tens has mean 10 and variance 0.

# %%
start = {"mean": jnp.zeros(1), "var": jnp.ones(1)}
evens, tens = jnp.array([[0.0], [2.0], [4.0], [6.0]]), jnp.full((4, 1), 10.0)  # (B, C)
assert [float(moment[0]) for moment in model.moments(evens)] == [3, 5]
first = model.update_stats(start, *model.moments(evens), n=4)
second = model.update_stats(first, *model.moments(tens), n=4)
for when, held in (("start", start), ("after 0 2 4 6", first), ("after four tens", second)):
    print(f"{when:16} mean {held['mean'][0]:.2f}  variance {held['var'][0]:.2f}")
assert close(first, {"mean": np.array([0.3]), "var": np.array([1.4])})  # 0.9 · 0 + 0.1 · 3, 0.9 · 1 + 0.1 · 5
assert close(second, {"mean": np.array([1.27]), "var": np.array([1.26])})
assert start["mean"] == 0 and start["var"] == 1  # what was passed in is as it was

# %% [markdown]
# **Claim.** Two conventions differ between libraries, and nothing fails when they are mixed up. PyTorch's running
# variance takes in the *unbiased* variance, n/(n - 1) times as much; Flax's and this project's do not. And PyTorch's
# `momentum=0.1` is the share of the new batch, Flax's and ours, 0.9, the share of the old value.

# %%
unbiased = model.update_stats(start, *model.moments(evens), n=4, unbiased=True)
assert close(unbiased["var"], np.array([0.9 + 0.1 * 20 / 3]))  # 1.5667
assert close(model.update_stats(start, *model.moments(evens), n=4, momentum=0.1)["mean"], np.array([2.7]))

# %% [markdown]
# ## The trap: a global inside `jit` [S2-032] (must-read)
# Where a function may change things, batch norm keeps its statistics in an object or a global. Under `jit` the Python
# code runs once, while tracing, and the compiled program runs ever after. So Python's assignment happens once too, and
# what it assigns is not a number.
#
# ```
#   first call   Python runs:      running_mean = 0.9 * running_mean + 0.1 * mean      mean is a tracer
#                program runs:     y                                                   a global is no output of it
#   later calls  program runs:     y                                                   no Python, no assignment
# ```
#
# **Claim.** Written from inside, a global becomes a leaked tracer. The function's own result is right, in every call,
# and nothing complains until somebody uses the global.

# %%
batches = rng.normal(3, 2, (5, 64, 8)).astype(np.float32)  # five batches (B, C) of mean 3, s.d. 2
running_mean = jnp.zeros(8)


@jax.jit
def centre_by_global(x):
    global running_mean
    mean = x.mean(0)
    running_mean = 0.9 * running_mean + 0.1 * mean
    return x - mean


for x in batches:
    assert close(centre_by_global(x), x - x.mean(0))
print("the global is now", running_mean)
assert isinstance(running_mean, jax.core.Tracer)
said = message(jax.errors.UnexpectedTracerError, lambda: running_mean + 1)
print(said.splitlines()[0])
assert "Encountered an unexpected tracer" in said and "intermediate value with type float32[8]" in said
assert "centre_by_global" in said  # the function that leaked it is named

# %% [markdown]
# **Claim.** A call with a new shape traces again, reads the leaked tracer, and fails far from the first cause: here in
# the last, smaller batch of an epoch. (How to find a leak in the call that makes it: lesson 03.)

# %%
assert "unexpected tracer" in message(jax.errors.UnexpectedTracerError, centre_by_global, batches[0][:10])

# %% [markdown]
# **Claim.** Read from inside, a global becomes a constant of the program. It may be updated properly, outside: the
# program never sees it. Here evaluation goes on with mean 0.

# %%
running_mean = jnp.zeros(8)


@jax.jit
def evaluate_by_global(x):
    return x - running_mean


assert close(evaluate_by_global(batches[0]), batches[0])
for x in batches:
    running_mean = 0.9 * running_mean + 0.1 * x.mean(0)  # outside: numbers
assert running_mean.min() > 0.5
assert jnp.array_equal(evaluate_by_global(batches[0]), batches[0])  # frozen: still minus 0
assert close(evaluate_by_global(batches[0][:10]), batches[0][:10] - running_mean)  # a new shape: traced with today's

# %% [markdown]
# **Claim.** Writing into an argument is no way out: inside, `jit` rebuilds every dictionary and list from the leaves,
# so the assignment changes a copy that is thrown away. No error, and no update.

# %%
@jax.jit
def centre_in_place(stats, x):
    stats["mean"] = 0.9 * stats["mean"] + 0.1 * x.mean(0)
    return x - x.mean(0)


held = {"mean": jnp.zeros(8)}
centre_in_place(held, batches[0])
assert jnp.array_equal(held["mean"], jnp.zeros(8))

# %% [markdown]
# **Claim.** The repair is a signature: what is read comes in, what is written goes out. The same loop in NumPy, with a
# variable that is changed, gives the same numbers.

# %%
@jax.jit
def centre(mean, x):
    """(x less its mean over the batch, the next running mean)."""
    return x - x.mean(0), 0.9 * mean + 0.1 * x.mean(0)


mean, by_numpy = jnp.zeros(8), np.zeros(8)
for x in batches:
    y, mean = centre(mean, x)
    by_numpy = 0.9 * by_numpy + 0.1 * x.mean(0)
assert close(mean, by_numpy) and close(mean, running_mean)

# %% [markdown]
# ## State through `jit` and `grad`
# Now the project's network, narrow and on small images, so that it compiles fast. The images are ten patterns of four
# coloured squares under noise; like real pixels they are far from mean 0 and variance 1.

# %%
WIDTHS, B, V = (8, 8, 8, 8), 32, model.CLASSES
params, stats = model.init_params(jax.random.key(0), WIDTHS), model.init_stats(WIDTHS)
patterns = rng.normal(size=(V, 2, 2, 3)).astype(np.float32).repeat(8, axis=1).repeat(8, axis=2)  # (V, 16, 16, 3)


def draw(i):
    """Batch i: images (B, 16, 16, 3) and labels (B,). The batch is a function of its number: no state at all."""
    rng = np.random.default_rng(i)
    labels = rng.integers(V, size=B)
    return rng.normal(3 + 2 * patterns[labels]).astype(np.float32), labels


forward = jax.jit(model.forward, static_argnames="train")
images, labels = draw(0)

# %% [markdown]
# **Claim.** `forward` returns the moved statistics as a tree of the same outline, shapes and dtypes as the ones it got,
# so what comes out of one step fits into the next, and one compiled program serves them all. What it got is unchanged.

# %%
traces = 0


@jax.jit
def gradients(params, stats, images, labels):
    """(loss, (new stats, logits)), and the gradient with respect to (params, stats)."""
    global traces
    traces += 1  # counting traces is what a global in jit is good for
    return jax.value_and_grad(model.loss_fn, argnums=(0, 1), has_aux=True)(params, stats, images, labels)


@jax.jit
def descend(params, grads):
    return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)


def step(params, stats, images, labels):
    (loss, (stats, _)), (grads, _) = gradients(params, stats, images, labels)
    return descend(params, grads), stats, loss


moved_params, moved, _ = step(params, stats, images, labels)
step(moved_params, moved, *draw(1))
assert traces == 1
assert jax.eval_shape(lambda: moved) == jax.eval_shape(lambda: stats)
assert jnp.array_equal(stats["stem"]["mean"], jnp.zeros(8)) and not jnp.array_equal(moved["stem"]["mean"], jnp.zeros(8))

# %% [markdown]
# **Claim.** Only the parameters have a gradient to follow. The statistics leave `value_and_grad` as *auxiliary* output,
# beside the loss (`has_aux=True`), and the loss does not depend on the ones that came in: in training the batch's own
# are used. Asked for, that gradient is exactly 0. Nor does a gradient flow out through the new ones (`stop_gradient`).

# %%
_, (wrt_params, wrt_stats) = gradients(params, stats, images, labels)
assert jax.tree.structure(wrt_params) == jax.tree.structure(params)
assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(wrt_params))
assert all(np.array_equal(g, np.zeros(8)) for g in jax.tree.leaves(wrt_stats))
through = jax.grad(lambda x: model.update_stats(start, *model.moments(x), n=4)["var"][0])(evens)
assert np.array_equal(through, np.zeros((4, 1)))

# %% [markdown]
# ## Evaluation, with and without updates [S1-086] (must-read)
# **Claim.** Before training, running statistics say nothing about the data, and evaluation differs from training. Fed
# the same batch again and again (the parameters held still), a running statistic closes 10 % of the gap each time:
# after k updates it is 0.9^k of what it was, and the two modes' logits agree.

# %%
logits, target = forward(params, stats, images, train=True)
batch_mean = (target["stem"]["mean"] - 0.9 * stats["stem"]["mean"]) / 0.1
moving = stats
print("updates   stem's gap of means    0.9^k of the first    train against evaluation, logits")
for k in range(101):
    if k in (0, 1, 10, 30, 100):
        gap = jnp.abs(moving["stem"]["mean"] - batch_mean).max()
        apart = jnp.abs(forward(params, moving, images, train=False)[0] - logits).max()
        print(f"{k:7} {gap:18.5f} {0.9**k * jnp.abs(batch_mean).max():21.5f} {apart:22.5f}")
        assert np.isclose(gap, 0.9**k * jnp.abs(batch_mean).max(), rtol=0.02, atol=1e-5)
        first_apart = apart if k == 0 else first_apart
    moving = forward(params, moving, images, train=True)[1]
assert apart < 1e-3 * first_apart

# %% [markdown]
# **Claim.** Evaluation uses the statistics that are passed in and nothing else: an image's logits don't depend on its
# batch-mates, and the statistics come back as they were. In training they do depend on them.

# %%
mates = np.concatenate([images[:1], 2 * images[1:]])
for train in (False, True):
    first_alone, first_among = (forward(params, moving, batch, train=train)[0][0] for batch in (images, mates))
    assert close(first_alone, first_among) == (not train)
assert jax.tree.all(jax.tree.map(jnp.array_equal, forward(params, moving, images, train=False)[1], moving))

# %% [markdown]
# **Claim.** Nobody forces the caller to take over the new statistics. Forgotten, the training losses are the same bit
# for bit, since training never reads them: the loss curve cannot show it. Evaluation does.

# %%
def train(take_over, steps=100):
    trained, running, losses = params, stats, []
    for i in range(steps):
        trained, moved, loss = step(trained, running, *draw(i))
        running = moved if take_over else running
        losses.append(float(loss))
    return trained, running, losses


def accuracy(params, stats, train):
    """Over four batches that training has not seen."""
    return np.mean([(forward(params, stats, images, train=train)[0].argmax(1) == labels).mean()
                    for images, labels in map(draw, range(1000, 1004))])


(trained, running, losses), (same, forgotten, same_losses) = train(take_over=True), train(take_over=False)
assert losses == same_losses and close(trained, same, rtol=0)
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, with and without updates")
scores = {(kept, mode): accuracy(trained, held, mode == "training")
          for kept, held in (("updated", running), ("forgotten", forgotten)) for mode in ("training", "evaluation")}
for (kept, mode), score in scores.items():
    print(f"statistics {kept:9}, {mode:10} mode: accuracy {score:.2f}")
assert scores["updated", "evaluation"] > 0.9
assert scores["forgotten", "evaluation"] < 0.6
assert scores["forgotten", "training"] == scores["updated", "training"] > 0.9

# %% [markdown]
# The last line is the diagnosis: where evaluation is poor and the *same* images score well in training mode, the
# parameters are sound and the statistics are not.
#
# ## `lax.scan`: the carry is the state [S2-033] (must-read)
# `scan(body, carry, xs)` calls `body(carry, x) -> (next carry, y)` along xs, as one program. A training step has that
# form: the carry is everything that a step hands on, (params, stats), x is a batch, y the loss.
#
# ```
#                    xs[0]              xs[1]                  xs[T-1]
#                      |                  |                       |
#   (params, stats) --step--> (p, s) --step--> (p, s) --> ... --step--> (params, stats) at the end
#                      |                  |                       |
#                   ys[0] loss         ys[1]                   ys[T-1]     stacked: (T,)
# ```
#
# XLA on a CPU compiles convolutions inside a loop to a slow form, so the project calls its steps one by one. The
# network here is one layer on vectors: the same batch norm, and products of matrices.

# %%
D, C, T = 12, 8, 50


@jax.jit
def init(key):
    """A state (params, stats) of the small network."""
    key_in, key_out = jax.random.split(key)
    params = {"w": jax.random.normal(key_in, (D, C)) / D**0.5, "scale": jnp.ones(C), "bias": jnp.zeros(C),
              "head": jax.random.normal(key_out, (C, 4)) / C**0.5}
    return params, {"mean": jnp.zeros(C), "var": jnp.ones(C)}


def small_loss(params, stats, x, labels):
    """(mean loss, new stats). x: (B, D)."""
    y, mean, var = model.batch_norm_relu(x @ params["w"], params["scale"], params["bias"])
    return model.cross_entropy(y @ params["head"], labels).mean(), model.update_stats(stats, mean, var, len(x))


def small_step(state, batch):
    params, stats = state
    (loss, stats), grads = jax.value_and_grad(small_loss, has_aux=True)(params, stats, *batch)
    return (jax.tree.map(lambda p, g: p - 0.3 * g, params, grads), stats), loss


small_labels = rng.integers(4, size=(T, B))
xs = rng.normal(1 + 2 * rng.normal(size=(4, D))[small_labels]).astype(np.float32)  # (T, B, D)
first_state = init(jax.random.key(1))

# %% [markdown]
# **Claim.** The scan gives what a Python loop over jitted steps gives: the same final parameters and statistics, and
# the losses stacked.

# %%
state, loop_losses, jitted_step = first_state, [], jax.jit(small_step)
for batch in zip(xs, small_labels):
    state, loss = jitted_step(state, batch)
    loop_losses.append(loss)

scanned = jax.jit(lambda state, batches: lax.scan(small_step, state, batches))
last_state, scan_losses = scanned(first_state, (xs, small_labels))
assert scan_losses.shape == (T,)
assert close(last_state, state, rtol=1e-4) and close(scan_losses, jnp.stack(loop_losses), rtol=1e-4)
assert scan_losses[-1] < 0.5 * scan_losses[0]

# %% [markdown]
# **Claim.** The carry holds the present, ys the history. To see the state's path, return what you want to see of it as
# a further y. It is stored T times over: a channel's mean, not the whole state. The running mean approaches where the
# data is, (1 - 0.9^k) of the way if that stood still.

# %%
def recorded_step(state, batch):
    state, loss = small_step(state, batch)
    return state, {"loss": loss, "mean": state[1]["mean"][0], "var": state[1]["var"][0]}


end, path = jax.jit(lambda state, batches: lax.scan(recorded_step, state, batches))(first_state, (xs, small_labels))
print("step    loss   running mean   running variance   (channel 0)")
for t in (0, 1, 5, 10, 20, T - 1):
    print(f"{t:4} {path['loss'][t]:7.3f} {path['mean'][t]:14.3f} {path['var'][t]:18.3f}")
assert {name: y.shape for name, y in path.items()} == {"loss": (T,), "mean": (T,), "var": (T,)}
assert close(path["loss"], scan_losses, rtol=1e-4)
assert path["mean"][-1] == end[1]["mean"][0]  # the path ends where the carry does

# %% [markdown]
# **Claim.** What comes out of the body must have the type of what went in, or `scan` refuses it. Running statistics
# kept in bfloat16 meet float32 moments and come out in float32; `update_stats` casts back to what it got.

# %%
def careless(stats, x):
    mean, var = model.moments(x)
    return jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, stats, {"mean": mean, "var": var}), None


def careful(stats, x):
    return model.update_stats(stats, *model.moments(x), n=len(x)), None


half = {"mean": jnp.zeros(D, jnp.bfloat16), "var": jnp.ones(D, jnp.bfloat16)}
said = message(TypeError, lax.scan, careless, half, xs)
assert "carry" in said and "so the dtypes do not match" in said
assert lax.scan(careful, half, xs)[0]["mean"].dtype == jnp.bfloat16

# %% [markdown]
# **Claim.** The cast makes it run, not right. Near 10 bfloat16 numbers stand 1/16 apart, and a step that adds less
# than half of that is rounded away: the running mean stands still, 0.1 short of its goal. So the project keeps
# statistics in float32, also when it computes in bfloat16.

# %%
near_ten = jnp.full((100, 4, 1), 10.1)
for dtype, reached in ((jnp.bfloat16, 10.0), (jnp.float32, 10.1)):
    held = {"mean": jnp.full(1, 10, dtype), "var": jnp.ones(1, dtype)}
    mean = lax.scan(careful, held, near_ten)[0]["mean"]
    print(f"after 100 batches of 10.1: {mean[0]:.3f} in {mean.dtype}")
    assert close(mean.astype(jnp.float32), np.array([reached]), rtol=1e-4)

# %% [markdown]
# ### A key is state too (optional)
# **Claim.** What draws random numbers in a step carries a key: split it, use one half, hand on the other. A body that
# closes over a key has the same mask in every step. (Chapter on keys: `nanogpt/lessons/02_random_keys.py`.)

# %%
def noisy(state, x):
    """Running statistics of inputs of which a random half is dropped."""
    stats, key = state
    key, used = jax.random.split(key)
    kept = jax.random.bernoulli(used, 0.5, x.shape)
    return (model.update_stats(stats, *model.moments(jnp.where(kept, x, 0)), n=len(x)), key), kept


def same_noise(state, x):
    (stats, _), kept = noisy(state, x)
    return (stats, state[1]), kept


noisy_start = ({"mean": jnp.zeros(D), "var": jnp.ones(D)}, jax.random.key(2))
whole, masks = lax.scan(noisy, noisy_start, xs)
assert len(np.unique(masks, axis=0)) == T
assert len(np.unique(lax.scan(same_noise, noisy_start, xs)[1], axis=0)) == 1

# %% [markdown]
# **Claim.** A state that is all in the open can be put aside and taken up again. 25 steps, then 25 from what came
# out, equal 50, bit for bit, random numbers included. A checkpoint is nothing else.

# %%
halfway, _ = lax.scan(noisy, noisy_start, xs[:25])
resumed, _ = lax.scan(noisy, halfway, xs[25:])
assert jax.tree.all(jax.tree.map(jnp.array_equal, resumed, whole))

# %% [markdown]
# ## `vmap`: one state, or one for each? `out_axes` [S2-035] (must-read)
# `out_axes` says for each output where the new axis goes; `None` says that there is none, since the value is the same
# for every element.
#
# ```
#   in_axes=(None, None, 0)                        out_axes=0           out_axes=(None, 0)
#   params --\
#   stats  ----> evaluate one of B images  --> stats (B, C) copies      stats (C,) once
#   images --/                                 logits (B, V)            logits (B, V)
# ```
#
# **Claim.** Evaluation, mapped over images, hands the statistics on. By default they come back B times over, in
# memory as well. With `out_axes=(None, 0)` they come back once.

# %%
def evaluate_one(params, stats, image):
    logits, stats = model.forward(params, stats, image[None], train=False)
    return stats, logits[0]


def nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


args = trained, running, images[:16]
copies, _ = jax.jit(jax.vmap(evaluate_one, in_axes=(None, None, 0)))(*args)
shared, each_logits = jax.jit(jax.vmap(evaluate_one, in_axes=(None, None, 0), out_axes=(None, 0)))(*args)
print(f"statistics: {nbytes(running)} bytes; by default {nbytes(copies)}, out_axes=None {nbytes(shared)}")
assert copies["stem"]["mean"].shape == (16, 8) and shared["stem"]["mean"].shape == (8,)
assert nbytes(copies) == 16 * nbytes(running) and nbytes(shared) == nbytes(running)
assert jax.tree.all(jax.tree.map(jnp.array_equal, shared, running))
assert close(each_logits, forward(trained, running, images, train=False)[0][:16], rtol=1e-4)

# %% [markdown]
# **Claim.** `None` is a promise that is checked. In training, each element would compute statistics of its own; which
# of them should be returned? The message names the output, and the axis if it has a name.

# %%
shares = rng.normal(3, 2, (4, 16, C)).astype(np.float32)  # a batch of 64, spread over 4
scale, bias = jnp.ones(C), jnp.zeros(C)


def spread(vmap_name=None, norm_name=None, out_axes=(0, None, None)):
    """(y, mean, var) of the four shares: by default y of each, and one mean and one variance."""
    return jax.jit(jax.vmap(lambda x: model.batch_norm_relu(x, scale, bias, norm_name), axis_name=vmap_name,
                            out_axes=out_axes))(shares)


said = message(ValueError, spread)
print(said)
assert said == "at vmap out_axes[1], got axis spec None but output was batched on axis 0"
assert "vmap has mapped output (axis_name=share) but out_axes is None" in message(ValueError, spread, "share")

# %% [markdown]
# **Claim.** What makes the value common is a sum or mean over the named axis. `moments(x, axis_name)` averages so
# (`lax.pmean`), first the means, then the squares around the common one. The result is one value, the whole batch's,
# and `None` is accepted. On several devices the same code, mapped by `shard_map`, is *synchronised* batch norm. Without
# the name each share is normalised by itself, which is another function.

# %%
y, mean, var = spread("share", "share")
y_whole, mean_whole, var_whole = model.batch_norm_relu(shares.reshape(64, C), scale, bias)
assert mean.shape == var.shape == (C,)
assert close((y.reshape(64, C), mean, var), (y_whole, mean_whole, var_whole))
y_alone, mean_alone, var_alone = spread(out_axes=0)
assert mean_alone.shape == (4, C) and close(mean_alone.mean(0), mean)
assert not close(y_alone.reshape(64, C), y_whole, rtol=0.05)
print("variance of the whole, mean of the shares' variances:", *(f"{v.mean():.3f}" for v in (var, var_alone)))
assert (var_alone.mean(0) < var).all()  # what the shares' means differ by is missing

# %% [markdown]
# **Claim.** `vmap` is no loop: every element gets the same old state. A shared running statistic so moves once for the
# whole batch, not once for each element. Where each element *owns* its state, as networks of an ensemble do, copies are
# what you want, and `in_axes=0`, `out_axes=0` are right.

# %%
held = {"mean": jnp.zeros(C), "var": jnp.ones(C)}
moved = jax.jit(jax.vmap(lambda x: model.update_stats(held, *model.moments(x, "share"), n=64), axis_name="share",
                         out_axes=None))(shares)
assert close(moved["mean"], 0.1 * mean_whole)

pair = jax.tree.map(lambda *leaves: np.stack(leaves), first_state, last_state)  # an untrained and a trained network
batch = xs[0], small_labels[0]
states, losses = jax.jit(jax.vmap(small_step, in_axes=(0, None)))(pair, batch)
assert states[1]["mean"].shape == (2, C) and not close(states[1]["mean"][0], states[1]["mean"][1])
assert close((jax.tree.map(lambda leaf: leaf[1], states), losses[1]), jitted_step(last_state, batch), rtol=1e-4)

# %% [markdown]
# ## An array that may be written: `jax.new_ref` (optional)
# **Claim.** A *ref* is a buffer that JAX knows to be written: reads and writes become operations of the program, in
# their order, and `jit` carries the change out again. So this version of the trap works. The price: a call changes what
# other calls read, so their order matters again, and a checkpoint has to collect the refs.

# %%
running = jax.new_ref(jnp.zeros(8))


@jax.jit
def centre_by_ref(x):
    mean = x.mean(0)
    running[...] = 0.9 * running[...] + 0.1 * mean
    return x - mean


for x in batches:
    assert close(centre_by_ref(x), x - x.mean(0))
assert close(running[...], by_numpy)  # five updates, five times written

# %% [markdown]
# ## Exercise 1
# This object tells when to stop: when the loss has not fallen for three steps.
# Write it as a body for `scan`: `patience(state, loss) -> (next state, stop)`, where state is {"best": the least loss
# so far, "since": the steps since then}, and stop is a bool. The loss is traced: no Python `if` on it.

# %%
class Patience:
    def __init__(self):
        self.best, self.since = float("inf"), 0

    def __call__(self, loss):
        if loss < self.best:
            self.best, self.since = loss, 0
        else:
            self.since += 1
        return self.since >= 3


# %%
# Your answer
def patience(state, loss):
    raise NotImplementedError


# %%
# Self-check (runs on your answer once it is written, on the solution until then)
def check_patience(f):
    losses = [3.0, 2.0, 2.5, 2.0, 2.2, 1.0, 1.5, 1.5, 1.5, 0.5]
    by_object = Patience()
    want = [by_object(loss) for loss in losses]
    before = {"best": jnp.float32(jnp.inf), "since": jnp.int32(0)}
    after, stops = lax.scan(f, before, jnp.array(losses))
    assert stops.tolist() == want, f"stop at each loss should be {want}, not {stops.tolist()}"
    assert after == {"best": 0.5, "since": 0}, f"the last state is best 0.5, 0 steps ago, not {after}"
    assert before["since"] == 0 and before["best"] == jnp.inf, "the state that came in is unchanged"


# %% [markdown]
# ## Exercise 2
# After training, the running statistics still hold a share of the start and lag behind the parameters. Write
# `recalibrate(params, xs)`: xs (T, B, D) -> {"mean": (C,), "var": (C,)}, the plain average over the T batches of each
# batch's moments of `x @ params["w"]`, in one `lax.scan`. (With which momentum is the running value the average of all
# batches so far? It changes with each batch, so it, too, is state.)

# %%
# Your answer
def recalibrate(params, xs):
    raise NotImplementedError


# %%
# Self-check
def check_recalibrate(f):
    params, _ = end
    each = [model.moments(x @ params["w"]) for x in xs[:7]]
    got = f(params, xs[:7])
    mean, var = (np.mean(moment, 0) for moment in zip(*each))
    assert close(got["mean"], mean, rtol=1e-4), "every batch counts alike, and the start not at all"
    assert close(got["var"], var, rtol=1e-4), "the variance: the average of the batches' variances"
    loops = [e for e in jax.make_jaxpr(f)(params, xs).eqns if e.primitive.name == "scan"]
    assert len(loops) == 1 and loops[0].params["length"] == T, "one scan over the T batches"


# %% [markdown]
# ## Exercise 3
# Write `spread_moments(shares)`: (S, B, C), a batch of S · B in S shares -> (mean (C,), var (C,)) of the whole batch,
# with `jax.vmap` over the shares.

# %%
# Your answer
def spread_moments(shares):
    raise NotImplementedError


# %%
# Self-check
def check_spread_moments(f):
    uneven = shares + 5 * np.arange(4, dtype=np.float32)[:, None, None]  # the shares' means differ
    mean, var = f(uneven)
    assert mean.shape == var.shape == (C,), f"one mean and one variance a channel, not {mean.shape} and {var.shape}"
    want_mean, want_var = model.moments(uneven.reshape(64, C))
    assert close(mean, want_mean), "the mean of the whole batch"
    assert close(var, want_var), "the variance of the whole batch: the shares' means differ, and that is part of it"


# %% [markdown]
# ## Rules
# | you see | because | rule |
# |---|---|---|
# | a function answers differently each time | it reads what it writes | old state in, new state out |
# | UnexpectedTracerError, far from its cause | a jitted function assigned to a global or an attribute | return it |
# | a changed global has no effect | `jit` read it while tracing: a constant | pass it as an argument |
# | a dictionary changed inside `jit` stays as it was | inside is a copy | return the new one |
# | training is fine, evaluation poor | the new statistics were dropped | score the same images in training mode |
# | running variances off by n/(n - 1), or by far | another convention | state bias, and whose share momentum is |
# | zero gradient for statistics | training does not read them | differentiate params; statistics are aux |
# | "carry ... dtypes do not match" | the body changes the state's type | cast to the type that came in |
# | a bfloat16 average stands still | its updates are rounded away | statistics in float32 |
# | B copies of one state | `out_axes=0` | `out_axes=None` for what is common |
# | "out_axes is None", "got axis spec None" | the value differs between elements | reduce it over the named axis |
# | a resumed run differs | some state was not saved: a key, a counter | all state in one tree |

# %% [markdown]
# ## Solutions

# %%
def patience_solution(state, loss):
    fell = loss < state["best"]
    state = {"best": jnp.minimum(loss, state["best"]), "since": jnp.where(fell, 0, state["since"] + 1)}
    return state, state["since"] >= 3


# %%
def recalibrate_solution(params, xs):
    def body(carry, x):
        stats, t = carry  # the average of t batches
        mean, var = model.moments(x @ params["w"])
        return (model.update_stats(stats, mean, var, len(x), momentum=t / (t + 1)), t + 1), None

    nothing = {"mean": jnp.zeros(C), "var": jnp.zeros(C)}
    (stats, _), _ = lax.scan(body, (nothing, jnp.float32(0)), xs)
    return stats


# %%
def spread_moments_solution(shares):
    return jax.vmap(lambda x: model.moments(x, "share"), axis_name="share", out_axes=None)(shares)


# %%
try:
    check_patience(patience)
except NotImplementedError:
    check_patience(patience_solution)

# %%
try:
    check_recalibrate(recalibrate)
except NotImplementedError:
    check_recalibrate(recalibrate_solution)

# %%
try:
    check_spread_moments(spread_moments)
except NotImplementedError:
    check_spread_moments(spread_moments_solution)
