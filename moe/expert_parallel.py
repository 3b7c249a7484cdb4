"""Expert parallelism: tokens and experts both lie split over one mesh axis, and two all_to_alls join them.

    python expert_parallel.py             # 8 simulated devices: equality with one device, collectives, predicted times

Legend: B sequences, T tokens a sequence, D model, F hidden of an expert, E experts, C capacity, k choices a token,
n devices, b = B / n sequences a device, R rows of slots.

                       device 0             device 1           ...
    tokens             (b, T, D)            (b, T, D)                route and queue: nothing to ask the others
    slots              (E, b C, D)          (E, b C, D)              for every expert, from the device's own tokens
                           │  ╲           ╱   │
                       all_to_all: the slots of expert e go to the device that holds expert e
                           │  ╱           ╲   │
    rows               (E/n, B C, D)        (E/n, B C, D)            for its own experts, from every device's tokens
    expert_ffn         w_in, w_out of E/n experts
                           │  ╲           ╱   │
                       all_to_all: the same way back
                           │  ╱           ╲   │
    combine            (b, T, D)            (b, T, D)

Two properties make this exactly the layer of one device. A group is one sequence: who wins a place in a full expert is
decided within the sequence, so that no device needs another one's tokens to decide it. And capacity makes shapes
static: E b C rows leave each device whatever the router says, which is what all_to_all (and a compiler) needs.

Gradients: an all_to_all moves rows, so its transpose is the all_to_all that moves them back. A device has all rows of
its experts, so their gradients need no reduction. The router and a shared expert are replicated: their gradients are
summed over the devices, once. Differentiate the function that calls `moe_layer_parallel`: inside a shard_map, a
gradient with respect to a replicated array is already the sum (lessons/05_expert_parallel.py).

Source: Lepikhin et al. 2020 (GShard), Fedus et al. 2021 (Switch Transformer).
"""
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import model

SPLIT = ("w_in", "w_out")  # the leaves that have a leading axis of experts; the others are replicated
LINK_BYTES_PER_S = 4.5e10  # one link of a TPU v5e, one way: "How to Scale Your Model" (jax-ml.github.io/scaling-book)


# Where things lie ------------------------------------------------------------------------

def expert_mesh(n, axis="expert") -> Mesh:
    """A mesh of n devices along one Auto axis: accelerators where there are n of them, else CPU devices.

    Raises: ValueError where there are fewer.
    """
    devices = jax.devices() if len(jax.devices()) >= n else jax.devices("cpu")
    if len(devices) < n:
        raise ValueError(f"a mesh of {n} devices needs {n}, there are {len(devices)}: to simulate them on a CPU, call "
                         f"jax.config.update('jax_num_cpu_devices', {n}) before the first computation")
    return jax.make_mesh((n,), (axis,), axis_types=(AxisType.Auto,), devices=devices[:n])


def param_specs(p, axis="expert") -> dict:
    """The PartitionSpec of each leaf of one layer's parameters p: experts split over `axis`, the rest replicated."""
    return {name: P(axis) if name in SPLIT else P() for name in p}


def place(x, p, mesh, axis="expert"):
    """Puts tokens x (B, T, D) and a layer's parameters p where `moe_layer_parallel` wants them, each device holding
    B / n sequences and E / n experts. Without it the layer works too, but its arrays start on one device."""
    def put(array, spec):
        return jax.device_put(array, NamedSharding(mesh, spec))
    specs = param_specs(p, axis)
    return put(x, P(axis)), {name: put(array, specs[name]) for name, array in p.items()}


# The layer -------------------------------------------------------------------------------

def to_experts(slots, axis):
    """Slots of this device's tokens, (E, R, D) -> rows of all n devices for its E / n experts, (E/n, n R, D).

    Device j receives experts [j E/n, (j+1) E/n); its rows lie in the order of the devices they came from.
    """
    return lax.all_to_all(slots, axis, split_axis=0, concat_axis=1, tiled=True)


def to_tokens(rows, axis):
    """The inverse of `to_experts`, and its transpose: (E/n, n R, D) -> (E, R, D)."""
    return lax.all_to_all(rows, axis, split_axis=1, concat_axis=0, tiled=True)


def moe_layer_parallel(x, p, cfg, mesh, axis="expert", mask=None):
    """`model.moe_layer` over the n devices of a mesh axis, by shard_map: same outputs, same gradients.

    x: (B, T, D), B a multiple of n; p: one layer's parameters, E a multiple of n, as `place` lays them out or anywhere;
    mask: (B, T) bool, False for padding, or None. The mesh axis is Auto. To be jitted, and differentiated from outside.
    Returns (y, aux): y (B, T, D) split over the axis by sequence, x's dtype; aux as moe_layer's, replicated. The
    balance loss is that of all tokens, not the mean of the devices' own. No jitter: it would need a key a device.
    Raises: ValueError for another dispatch than "gather", an unknown axis, B or E that n doesn't divide.
    """
    if x.ndim != 3:
        raise ValueError(f"x has shape {x.shape}, expected (B, T, D): capacity is counted a sequence")
    B, T, D = x.shape
    if axis not in mesh.shape:
        raise ValueError(f"the mesh has the axes {tuple(mesh.shape)}, not {axis!r}")
    n, E = mesh.shape[axis], cfg.n_experts
    if cfg.dispatch != "gather" or E < 1:
        raise ValueError(f"dispatch={cfg.dispatch!r} with n_experts={E}: all_to_all sends equally many rows to every "
                         "device, as the capacity form does; use dispatch='gather' and at least one expert")
    if B % n or E % n:
        raise ValueError(f"{B} sequences and {E} experts on {n} devices: both must be multiples of {n}; pad the batch "
                         "with masked sequences, or use fewer devices")
    if mask is None:
        mask = jnp.ones((B, T), bool)

    def on_each_device(x, p, mask):
        # A replicated array enters a device's own computation here, so here its gradient is summed over the devices.
        p = {name: a if name in SPLIT else lax.pcast(a, axis, to="varying") for name, a in p.items()}

        def experts_elsewhere(slots, p, cfg):
            return to_tokens(model.expert_ffn(to_experts(slots, axis), p, cfg), axis)

        routing = model.route(x, p["w_router"], cfg)
        y, kept = model.dispatch_gather(x, routing, p, cfg, mask, ffn=experts_elsewhere)
        if cfg.shared_hidden:
            y = y + jnp.where(mask[..., None], model.shared_expert(x, p, cfg), 0)
        return y, statistics(routing, kept, mask, cfg, axis)

    mapped = jax.shard_map(on_each_device, mesh=mesh, in_specs=(P(axis), param_specs(p, axis), P(axis)),
                           out_specs=(P(axis), P()))
    return mapped(x, p, mask)


def statistics(routing, kept, mask, cfg, axis):
    """moe_layer's aux over the tokens of all devices: sums first, one all-reduce, then the nonlinear parts.

    A mean over devices would do for z, a mean over tokens itself; balance is a product of two such means, and the mean
    of products is another number: E instead of 1 where each device's tokens choose an expert of their own.
    """
    E, k = cfg.n_experts, cfg.top_k
    chosen = jax.nn.one_hot(routing.experts, E, dtype=routing.probs.dtype) * mask[..., None, None]  # (b, T, k, E)
    sums = lax.psum({
        "chosen": chosen.sum((0, 1, 2)),  # (E,)
        "probs": (routing.probs * mask[..., None]).sum((0, 1)),  # (E,)
        "z": (jax.nn.logsumexp(routing.logits, axis=-1) ** 2 * mask).sum(),
        "tokens": mask.sum(dtype=routing.probs.dtype),
        "kept": kept.sum(dtype=routing.probs.dtype),  # of which masked tokens have none
    }, axis)
    tokens = jnp.maximum(sums["tokens"], 1)  # a batch of padding only: zeros, not NaN
    load = sums["chosen"] / (k * tokens)
    return {
        "balance": E * (load * sums["probs"]).sum() / tokens,
        "z": sums["z"] / tokens,
        "dropped": 1 - sums["kept"] / (k * tokens),
        "load": load,
        "load_entropy": model.load_entropy(load),
    }


# Counting and pricing --------------------------------------------------------------------

def exchange_bytes(cfg, B, T, n, itemsize) -> int:
    """Bytes that one device hands to one all_to_all: its b E C slots of D numbers, full or not."""
    C = model.capacity(T, cfg.n_experts, cfg.top_k, cfg.capacity_factor)
    return B // n * cfg.n_experts * C * cfg.n_embd * itemsize


def collectives(compiled) -> list[tuple[str, int]]:
    """The collectives in a compiled program's optimised HLO: (op, bytes of its result on one device), in text order.

    ops: all-to-all, all-reduce, all-gather, reduce-scatter, collective-permute. The halves of an asynchronous pair
    count once. A loop's body counts once, whatever its trip count.
    """
    found = []
    for shape, op in re.findall(r" = (.+?) (all-to-all|all-reduce|all-gather|reduce-scatter|collective-permute)"
                                r"(?:-start)?\(", compiled.as_text()):
        parts = [int((re.search(r"\d+", dtype) or [8])[0]) // 8 * math.prod(int(d) for d in dims.split(",") if d)
                 for dtype, dims in re.findall(r"([a-z]\w*)\[([\d,]*)\]", shape)]  # pred is a byte
        found.append((op, sum(parts)))
    return found


def ring_seconds(op, nbytes, n, link=LINK_BYTES_PER_S) -> float:
    """The least time of a collective on a ring of n devices, predicted from bytes alone (no latency).

    nbytes: as in `collectives`; link: bytes/s one way; each device has a link to both neighbours, both ways at once.
    An all_to_all sends nbytes / n from each device to each other one, by the shorter way: floor(n²/4) hops in sum, for
    even n and nbytes on each device n/4 of what one direction of its two links carries at a time. An all_reduce is a
    reduce-scatter and an all_gather, each of which passes (n - 1)/n of the array through every device. A TPU v5e closes
    a ring of 16 along an axis of its pod; a ring of 8 runs around a 2 x 4 slice.
    Raises: ValueError for another op.
    """
    both_ways = 2 * link
    if op == "all-to-all":
        return nbytes / n * (n * n // 4) / both_ways
    if op in ("all-reduce", "all-gather"):
        return {"all-reduce": 2, "all-gather": 1}[op] * nbytes * (n - 1) / n / both_ways
    raise ValueError(f"no price for {op!r}: all-to-all, all-reduce and all-gather have one")


# The report ------------------------------------------------------------------------------

def random_layer(cfg, B, seed=0):
    """Tokens x (B, T, D) with T = cfg.context, a layer's parameters p, all normal with 1/sqrt(fan-in), so that a router
    has logits of size 1, and weights (B, T, D) that make a loss of the output; NumPy float32."""
    random = np.random.default_rng(seed)
    shapes = jax.eval_shape(partial(model.init_params, cfg=cfg), jax.random.key(0))["blocks"][0]["moe"]
    p = {name: random.normal(size=a.shape).astype(np.float32) / np.float32(a.shape[-2] ** 0.5)
         for name, a in shapes.items()}
    x, weights = random.normal(size=(2, B, cfg.context, cfg.n_embd)).astype(np.float32)
    return x, p, weights


def gradient_of(layer, cfg):
    """jitted (x, p, weights, mask=None) -> {"dx", "dp": gradients of <weights, y> + the auxiliary losses, "y", "aux"}
    of a layer(x, p, mask=None) -> (y, aux)."""
    def loss(x, p, weights, mask):
        y, aux = layer(x, p, mask=mask)
        return (weights * y).sum() + cfg.balance_weight * aux["balance"] + cfg.z_weight * aux["z"], (y, aux)

    def outputs_and_gradients(x, p, weights, mask=None):
        (dx, dp), (y, aux) = jax.grad(loss, argnums=(0, 1), has_aux=True)(x, p, weights, mask)
        return {"y": y, "aux": aux, "dx": dx, "dp": dp}
    return jax.jit(outputs_and_gradients)


def relative_errors(got, want) -> dict[str, float]:
    """{path: ‖got - want‖ / ‖want‖} over the leaves of two trees; a leaf that should be zero is compared absolutely."""
    errors = {}
    for (path, g), w in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want)):
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        errors[jax.tree_util.keystr(path, simple=True, separator="/")] = float(
            np.linalg.norm(g - w) / (np.linalg.norm(w) or 1.0))
    return errors


def report(mesh, cfg, B, axis="expert") -> dict:
    """Compares the layer on `mesh` with the layer on one device, for B sequences, and counts its collectives.

    Returns {"errors": of y, aux and every gradient leaf, "expert_bytes": (on one device, in all), "forward",
    "gradient": lists of `collectives`}.
    """
    x, p, weights = random_layer(cfg, B)
    want = gradient_of(partial(model.moe_layer, cfg=cfg), cfg)(x, p, weights)
    parallel = partial(moe_layer_parallel, cfg=cfg, mesh=mesh, axis=axis)
    x, p = place(x, p, mesh, axis)
    gradient = gradient_of(parallel, cfg)
    return {
        "errors": relative_errors(gradient(x, p, weights), want),
        "expert_bytes": (sum(p[name].addressable_shards[0].data.nbytes for name in SPLIT),
                         sum(p[name].nbytes for name in SPLIT)),
        "forward": collectives(jax.jit(parallel).lower(x, p).compile()),
        "gradient": collectives(gradient.lower(x, p, weights).compile()),
    }


def main(devices: int = 8, experts: int = 8, batch: int = 16, tokens: int = 64, embd: int = 128, hidden: int = 256):
    """Checks the expert-parallel layer on simulated devices, counts its collectives and predicts their time."""
    jax.config.update("jax_num_cpu_devices", devices)  # before the first computation
    mesh = expert_mesh(devices)
    cfg = model.MoEConfig(vocab_size=65, context=tokens, n_layer=1, n_head=1, n_embd=embd, n_hidden=hidden,
                          n_experts=experts, dispatch="gather")
    print(f"{devices} {mesh.devices.flat[0].platform} devices, {experts} experts, {batch} x {tokens} tokens, JAX "
          f"{jax.__version__}")
    result = report(mesh, cfg, batch)
    worst = max(result["errors"], key=result["errors"].get)
    print(f"largest relative error against one device: {result['errors'][worst]:.1e} ({worst}), of y, aux and all "
          "gradients")
    here, everywhere = result["expert_bytes"]
    print(f"experts' weights: {here / 1e3:.0f} kB a device of {everywhere / 1e3:.0f} kB")
    print(f"all_to_all, by formula: {exchange_bytes(cfg, batch, tokens, devices, 4) / 1e3:.0f} kB a device\n")
    print(f"{'program':10}{'collective':14}{'number':>7}{'kB a device':>13}   predicted on a ring of TPU v5e, µs")
    for program in ("forward", "gradient"):
        for op in sorted({op for op, _ in result[program]}):
            sizes = [size for found, size in result[program] if found == op]
            predicted = sum(ring_seconds(op, size, devices) for size in sizes)
            print(f"{program:10}{op:14}{len(sizes):7}{sum(sizes) / 1e3:13.1f}   {1e6 * predicted:.1f}")


if __name__ == "__main__":
    import tyro
    tyro.cli(main)
