"""The same network in PyTorch: the yardstick for gradients, losses and speed.

Only tests, gradcheck.py and bench.py import this file: training never needs PyTorch.
Parameters come from `model.init_params`, so both sides start from the same numbers (float32, bit for bit).
"""
import torch
import torch.nn as nn
import torch.nn.functional as F


def mlp(params):
    """nn.Sequential of the layers in params (model.init_params' list, or one of gradients' shape), in their dtype."""
    layers = []
    for layer in params:
        I, O = layer["w"].shape
        linear = nn.Linear(I, O, dtype=layer["w"].dtype)
        with torch.no_grad():
            linear.weight.copy_(layer["w"].T)  # torch keeps weights as (out, in), we as (in, out)
            linear.bias.copy_(layer["b"])
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def gradients(network):
    """Its .grad tensors in the shape of model.init_params' list."""
    return [{"w": m.weight.grad.T, "b": m.bias.grad} for m in network if isinstance(m, nn.Linear)]


def sgd(network, lr, momentum, weight_decay):
    """train.sgd's rule; `foreach` is PyTorch's fastest form of it on CPU."""
    return torch.optim.SGD(network.parameters(), lr, momentum, weight_decay=weight_decay, foreach=True)


def train_step(network, optimizer, images, labels, lr, bfloat16=False):
    """One step; returns the loss as a tensor (not fetched). images: (B, 784) float32 in [0, 1], labels: (B,) int64."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
        loss = F.cross_entropy(network(images), labels)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss.detach()
