"""The same GPT in PyTorch, written the way nanoGPT writes it: the yardstick for speed and for the loss.

Legend: B batch, T time, D model, H heads, K head dim, V vocabulary, L layers.
Only tests, gradcheck.py and bench.py import this file: training and sampling never need PyTorch.
Parameters come from `model.init_params`, so both sides start from the same numbers (float32, bit for bit).
"""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    """Pre-LayerNorm attention and MLP, each added to the residual stream. (B, T, D) -> (B, T, D)."""

    def __init__(self, n_head, n_embd, dropout):
        super().__init__()
        self.n_head, self.dropout = n_head, dropout
        self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.qkv, self.proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.fc, self.out = nn.Linear(n_embd, 4 * n_embd), nn.Linear(4 * n_embd, n_embd)

    def forward(self, x, cache=None):
        """cache: None, or a dict that holds the keys and values of earlier tokens and is extended in place."""
        B, T, D = x.shape
        q, k, v = (a.view(B, T, self.n_head, -1).transpose(1, 2) for a in self.qkv(self.ln1(x)).split(D, dim=2))
        if cache is not None:
            t = cache["length"]
            cache["k"][:, :, t:t + T], cache["v"][:, :, t:t + T] = k, v
            k, v = cache["k"][:, :, :t + T], cache["v"][:, :, :t + T]
            cache["length"] = t + T
        y = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1, dropout_p=self.dropout if self.training else 0.0)
        x = x + F.dropout(self.proj(y.transpose(1, 2).reshape(B, T, D)), self.dropout, self.training)
        return x + F.dropout(self.out(F.gelu(self.fc(self.ln2(x)), approximate="tanh")), self.dropout, self.training)


class GPT(nn.Module):
    """tokens (B, T) int64 -> logits (B, T, V). Output head tied to the token embedding, as in GPT-2."""

    def __init__(self, vocab_size, context, n_layer, n_head, n_embd, dropout=0.0):
        super().__init__()
        self.context, self.dropout = context, dropout
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(context, n_embd)
        self.blocks = nn.ModuleList(Block(n_head, n_embd, dropout) for _ in range(n_layer))
        self.lnf = nn.LayerNorm(n_embd)

    def forward(self, tokens, caches=None, last_only=False):
        """last_only: logits of the last position alone, (B, 1, V), which is all that generation needs."""
        start = caches[0]["length"] if caches else 0
        x = self.wte(tokens) + self.wpe(torch.arange(start, start + tokens.shape[1]))
        x = F.dropout(x, self.dropout, self.training)
        for i, block in enumerate(self.blocks):
            x = block(x, caches[i] if caches else None)
        if last_only:
            x = x[:, -1:]
        return self.lnf(x) @ self.wte.weight.T

    def loss(self, tokens, targets):
        """Mean cross-entropy in nats a token."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def load(self, params):
        """Copies model.init_params' tree in, as NumPy arrays (torch keeps weights as (out, in), we as (in, out))."""
        def put(parameter, array):
            parameter.data.copy_(torch.from_numpy(array.copy()))
        put(self.wte.weight, params["wte"])
        put(self.wpe.weight, params["wpe"])
        put(self.lnf.weight, params["lnf_scale"])
        put(self.lnf.bias, params["lnf_bias"])
        for i, block in enumerate(self.blocks):
            for name in ("qkv", "proj", "fc", "out"):
                put(getattr(block, name).weight, params["blocks"][f"w_{name}"][i].T)
                put(getattr(block, name).bias, params["blocks"][f"b_{name}"][i])
            for ln in ("ln1", "ln2"):
                put(getattr(block, ln).weight, params["blocks"][f"{ln}_scale"][i])
                put(getattr(block, ln).bias, params["blocks"][f"{ln}_bias"][i])
        return self


def adamw(model, lr, weight_decay, beta2):
    """nanoGPT's optimiser: decay on matrices only; `foreach` is PyTorch's fastest form on CPU."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, beta2), eps=1e-8)


def train_step(model, optimizer, tokens, targets, lr, grad_clip, bfloat16=False):
    """One step; returns the loss as a tensor (not fetched). tokens, targets: (B, T) int64."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
        loss = model.loss(tokens, targets)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def generate(model, tokens, n, cached):
    """n more tokens by sampling at temperature 1. Without a cache this is nanoGPT's generate().

    tokens: (B, T0) int64 with T0 + n <= context where cached. Returns (B, T0 + n).
    """
    model.eval()
    caches = None
    if cached:
        block = model.blocks[0]
        K = model.wte.weight.shape[1] // block.n_head
        shape = (tokens.shape[0], block.n_head, model.context, K)
        caches = [{"k": torch.zeros(shape), "v": torch.zeros(shape), "length": 0} for _ in model.blocks]
    x = tokens
    for _ in range(n):
        logits = model(x if cached else tokens[:, -model.context:], caches, last_only=True)[:, -1]
        x = torch.multinomial(F.softmax(logits, dim=-1), 1)
        tokens = torch.cat([tokens, x], dim=1)
    return tokens
