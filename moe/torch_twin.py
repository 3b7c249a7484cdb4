"""The same model in PyTorch, experts one after the other: the yardstick for gradients, losses and speed.

Legend: B batch, T time, N = B * T rows, D model, F hidden of an expert, E experts, k choices a token, V vocabulary.
Only tests, gradcheck.py and bench.py import this file: training and sampling never need PyTorch.
Parameters come from `model.init_params`, so both sides start from the same numbers, in any float type, bit for bit.
PyTorch keeps weights as (out, in), we as (in, out).
"""
import jax
import torch
import torch.nn as nn
import torch.nn.functional as F

from model import capacity


def fill(module, tree):
    """Copies our arrays in, by module.leaves; returns the module. In NumPy, slices and transposes compile nothing."""
    with torch.no_grad():
        for array, parameter in module.leaves(jax.device_get(tree)):
            parameter.copy_(torch.from_numpy(array.copy()))
    return module


# The layer -------------------------------------------------------------------------------

class Expert(nn.Module):
    """A feed-forward without biases: (N, D) -> (N, D). activation: relu, gelu (tanh) or swiglu."""

    def __init__(self, n_embd, n_hidden, activation):
        super().__init__()
        self.activation = activation
        self.w_in = nn.Linear(n_embd, (2 if activation == "swiglu" else 1) * n_hidden, bias=False)
        self.w_out = nn.Linear(n_hidden, n_embd, bias=False)

    def forward(self, x):
        h = self.w_in(x)
        if self.activation == "swiglu":
            gate, up = h.chunk(2, dim=-1)
            h = F.silu(gate) * up
        else:
            h = F.relu(h) if self.activation == "relu" else F.gelu(h, approximate="tanh")
        return self.w_out(h)

    def leaves(self, w_in, w_out):
        """Pairs (our array, its parameter), the array turned as the parameter is."""
        yield w_in.T, self.w_in.weight
        yield w_out.T, self.w_out.weight


class MoELoop(nn.Module):
    """The loop over experts that most PyTorch code has, no capacity: (N, D) -> (N, D). An expert's rows are gathered
    (index_select), pass through it, are weighted and added to the output (index_add_)."""

    def __init__(self, n_embd, n_hidden, n_experts, top_k, activation="gelu", renormalise=True):
        super().__init__()
        self.top_k, self.renormalise = top_k, renormalise and top_k > 1
        self.router = nn.Linear(n_embd, n_experts, bias=False)
        self.experts = nn.ModuleList(Expert(n_embd, n_hidden, activation) for _ in range(n_experts))

    def route(self, x):
        """(N, D) -> logits and probabilities, (N, E); gates and experts of the choices, (N, k), best first."""
        logits = self.router(x)
        probs = logits.softmax(-1)
        gates, experts = probs.topk(self.top_k, dim=-1)
        return logits, probs, gates / gates.sum(-1, keepdim=True) if self.renormalise else gates, experts

    def combine(self, x, gates, experts, kept=None):
        """The weighted sum of what the chosen experts make of each row; kept: (N, k) bool, choices that are served."""
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows, choice = torch.where(experts == e if kept is None else (experts == e) & kept)
            y.index_add_(0, rows, expert(x.index_select(0, rows)) * gates[rows, choice, None])
        return y

    def forward(self, x):
        _, _, gates, experts = self.route(x)
        return self.combine(x, gates, experts)

    def leaves(self, p):
        """Pairs (our array, its parameter) for a layer's "moe" dict, as model.init_params makes it."""
        yield p["w_router"].T, self.router.weight
        for e, expert in enumerate(self.experts):
            yield from expert.leaves(p["w_in"][e], p["w_out"][e])

    def load(self, p):
        return fill(self, p)


def within_capacity(experts, n_experts, places, priority="token"):
    """Which choices find a place: (B, T, k) -> bool (B, T, k). Each sequence fills the `places` of each expert anew,
    token by token, or (priority "choice") first choices before second ones."""
    queue = experts if priority == "token" else experts.transpose(1, 2)
    taken = F.one_hot(queue.flatten(1), n_experts).cumsum(1)  # (B, kT, E): places taken up to and with this choice
    kept = (taken.gather(2, queue.flatten(1)[..., None]) <= places).view(queue.shape)
    return kept if priority == "token" else kept.transpose(1, 2)


class MoELayer(nn.Module):
    """model.moe_layer in its causal forms: x (B, T, D) -> y (B, T, D) and the layer's balance and z losses.

    cfg: a model.MoEConfig; einsum and gather mean the same numbers: a capacity for each sequence.
    """

    def __init__(self, cfg):
        super().__init__()
        if cfg.dispatch == "expert_choice":
            raise ValueError("dispatch='expert_choice' has no twin here: use gather, einsum or dropless")
        self.cfg = cfg
        self.loop = MoELoop(cfg.n_embd, cfg.n_hidden, cfg.n_experts, cfg.top_k, cfg.activation, cfg.renormalise)
        self.shared = Expert(cfg.n_embd, cfg.shared_hidden, cfg.activation) if cfg.shared_hidden else None

    def forward(self, x):
        cfg, (B, T, D) = self.cfg, x.shape
        rows = x.reshape(B * T, D)
        logits, probs, gates, experts = self.loop.route(rows)
        kept = None
        if cfg.dispatch != "dropless":
            places = capacity(T, cfg.n_experts, cfg.top_k, cfg.capacity_factor)
            kept = within_capacity(experts.view(B, T, -1), cfg.n_experts, places, cfg.priority).reshape(experts.shape)
        y = self.loop.combine(rows, gates, experts, kept)
        if self.shared is not None:
            y = y + self.shared(rows)
        share = torch.bincount(experts.flatten(), minlength=cfg.n_experts).to(probs.dtype) / experts.numel()
        balance = cfg.n_experts * (share * probs.mean(0)).sum()
        return y.view(B, T, D), balance, logits.logsumexp(-1).square().mean()

    def leaves(self, p):
        yield from self.loop.leaves(p)
        if self.shared is not None:
            yield from self.shared.leaves(p["shared_in"], p["shared_out"])


class Dense(nn.Module):
    """The feed-forward of n_experts = 0, with the same signature."""

    def __init__(self, cfg):
        super().__init__()
        self.ffn = Expert(cfg.n_embd, cfg.n_hidden, cfg.activation)

    def forward(self, x):
        return self.ffn(x), x.new_zeros(()), x.new_zeros(())

    def leaves(self, p):
        yield from self.ffn.leaves(p["w_in"], p["w_out"])


# The model -------------------------------------------------------------------------------

class Block(nn.Module):
    """Pre-LayerNorm attention and experts, each added to the residual stream. (B, T, D) -> (B, T, D), balance, z."""

    def __init__(self, cfg):
        super().__init__()
        self.n_head = cfg.n_head
        self.ln1, self.ln2 = nn.LayerNorm(cfg.n_embd), nn.LayerNorm(cfg.n_embd)
        self.qkv, self.proj = nn.Linear(cfg.n_embd, 3 * cfg.n_embd), nn.Linear(cfg.n_embd, cfg.n_embd)
        self.moe = MoELayer(cfg) if cfg.n_experts else Dense(cfg)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = (a.view(B, T, self.n_head, -1).transpose(1, 2) for a in self.qkv(self.ln1(x)).split(D, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, D))
        y, balance, z = self.moe(self.ln2(x))
        return x + y, balance, z

    def leaves(self, p):
        for name in ("qkv", "proj"):
            yield p[f"w_{name}"].T, getattr(self, name).weight
            yield p[f"b_{name}"], getattr(self, name).bias
        for name in ("ln1", "ln2"):
            yield p[f"{name}_scale"], getattr(self, name).weight
            yield p[f"{name}_bias"], getattr(self, name).bias
        yield from self.moe.leaves(p["moe"])


class GPT(nn.Module):
    """tokens (B, T) int64 -> logits (B, T, V), balance and z, each a mean over layers. cfg: a model.MoEConfig, whose
    dtype the parameters take; output head tied to the token embedding."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.wte, self.wpe = nn.Embedding(cfg.vocab_size, cfg.n_embd), nn.Embedding(cfg.context, cfg.n_embd)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.lnf = nn.LayerNorm(cfg.n_embd)
        self.to(getattr(torch, cfg.dtype))

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight[:tokens.shape[1]]
        losses = []
        for block in self.blocks:
            x, *more = block(x)
            losses.append(torch.stack(more))
        balance, z = torch.stack(losses).mean(0)
        return self.lnf(x) @ self.wte.weight.T, balance, z

    def losses(self, tokens, targets):
        """Cross-entropy (nats a token), balance, z."""
        logits, balance, z = self(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), balance, z

    def total(self, losses):
        """What training minimises, from the three."""
        nats, balance, z = losses
        return nats + self.cfg.balance_weight * balance + self.cfg.z_weight * z

    def leaves(self, params):
        """Pairs (our array, its parameter) for a tree as model.init_params makes it."""
        yield params["wte"], self.wte.weight
        yield params["wpe"], self.wpe.weight
        yield params["lnf_scale"], self.lnf.weight
        yield params["lnf_bias"], self.lnf.bias
        for block, p in zip(self.blocks, params["blocks"]):
            yield from block.leaves(p)

    def load(self, params):
        return fill(self, params)


# Training --------------------------------------------------------------------------------

def adamw(model, lr, weight_decay, beta2):
    """train.py's optimiser: decay on matrices only; `foreach` is PyTorch's fastest form on CPU."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, beta2), eps=1e-8, foreach=True)


def train_step(model, optimizer, tokens, targets, lr, grad_clip):
    """One step; returns the three losses (cross-entropy, balance, z) as tensors (not fetched). tokens, targets: (B, T)
    int64."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    losses = model.losses(tokens, targets)
    optimizer.zero_grad(set_to_none=True)
    model.total(losses).backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    # PyTorch divides by norm + 1e-6, optax by the norm: in float64 that is the largest difference between the two.
    nn.utils.clip_grads_with_norm_(model.parameters(), grad_clip, norm - 1e-6)
    optimizer.step()
    return [loss.detach() for loss in losses]


# Mixtral ---------------------------------------------------------------------------------

class Mixtral(nn.Module):
    """The sparse block of transformers' Mixtral (transformers 5) with our parameters; nothing is downloaded.

    (B, T, D) -> (B, T, D): top-k experts of SwiGLU, gates renormalised, no capacity. Its router rounds logits to
    float32, whatever the type of the rest. p: a layer's "moe" dict of a model with activation="swiglu".
    """

    def __init__(self, p, top_k):
        super().__init__()
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
        n_experts, n_hidden, n_embd = p["w_out"].shape
        self.block = MixtralSparseMoeBlock(MixtralConfig(
            hidden_size=n_embd, intermediate_size=n_hidden, num_local_experts=n_experts, num_experts_per_tok=top_k,
            num_attention_heads=1, num_key_value_heads=1, experts_implementation="eager"))
        self.to(getattr(torch, str(p["w_out"].dtype)))
        fill(self, p)

    def forward(self, x):
        return self.block(x)

    def leaves(self, p):
        """Pairs (our array, its parameter); gate and up stand in the same order in both."""
        yield p["w_router"].T, self.block.gate.weight
        yield p["w_in"].swapaxes(1, 2), self.block.experts.gate_up_proj
        yield p["w_out"].swapaxes(1, 2), self.block.experts.down_proj


def mixtral_balance_loss(logits, top_k):
    """transformers' load-balance loss of one layer: counts per token, not divided by k, so k times ours. logits: (N, E)
    tensor."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
    return load_balancing_loss_func((logits,), logits.shape[1], top_k)
