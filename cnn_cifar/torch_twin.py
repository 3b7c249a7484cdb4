"""The same network in PyTorch: the yardstick for gradients, running statistics, losses and speed.

Legend: B batch, H height, W width, I and O channels in and out.
Only tests, gradcheck.py and bench.py import this file: training never needs PyTorch.
Parameters come from `model.init_params`, so both sides start from the same numbers (bit for bit).
"""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from model import EPS, HEAD_SCALE


class Block(nn.Module):
    """Convolution, perhaps max pooling, batch norm, ReLU. (B, I, H, W) -> (B, O, H, W), or half of H and W."""

    def __init__(self, I, O, pool):
        super().__init__()
        self.conv = nn.Conv2d(I, O, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(O, eps=EPS, momentum=0.1)  # the share of the new batch: ours keeps 0.9 of the old
        self.pool = pool

    def forward(self, x):
        x = self.conv(x)
        return F.relu(self.norm(F.max_pool2d(x, 2) if self.pool else x), inplace=True)


class ResNet(nn.Module):
    """images (B, 3, H, W) -> logits (B, V); .train() and .eval() choose the statistics. widths: {layer: (I, O)}."""

    def __init__(self, widths, classes):
        super().__init__()
        self.blocks = nn.ModuleDict({name: Block(I, O, "down" in name) for name, (I, O) in widths.items()})
        self.head = nn.Linear(widths["res3b"][1], classes)

    def forward(self, images):
        f = self.blocks
        x = f["down1"](f["stem"](images))
        x = x + f["res1b"](f["res1a"](x))
        x = f["down3"](f["down2"](x))
        x = x + f["res3b"](f["res3a"](x))
        return self.head(HEAD_SCALE * x.amax((2, 3)))


def resnet(params, stats=None, channels_last=False):
    """A ResNet, in training mode, with our parameters and running statistics ((0, 1) where stats is None).

    params, stats: trees as model.init_params' and init_stats', of JAX or NumPy arrays or tensors; they set the dtype.
    channels_last: weights in PyTorch's channels_last layout, which the activations then follow.
    """
    def as_tensor(leaf):
        return torch.from_numpy(np.array(leaf))
    head = as_tensor(params["head"]["w"])
    network = ResNet({name: layer["w"].shape[2:] for name, layer in params.items() if name != "head"}, head.shape[1])
    network.to(head.dtype)
    with torch.no_grad():
        network.head.weight.copy_(head.T)  # torch keeps weights as (out, in), we as (in, out)
        network.head.bias.copy_(as_tensor(params["head"]["b"]))
        for name, block in network.blocks.items():
            block.conv.weight.copy_(as_tensor(params[name]["w"]).permute(3, 2, 0, 1))  # (3, 3, I, O) -> (O, I, 3, 3)
            block.norm.weight.copy_(as_tensor(params[name]["scale"]))
            block.norm.bias.copy_(as_tensor(params[name]["bias"]))
            if stats is not None:
                block.norm.running_mean.copy_(as_tensor(stats[name]["mean"]))
                block.norm.running_var.copy_(as_tensor(stats[name]["var"]))
    return network.to(memory_format=torch.channels_last) if channels_last else network


def parameters(network, of=torch.Tensor.detach):
    """of(parameter), by default its values, in the shape of model.init_params' tree."""
    tree = {name: {"w": of(block.conv.weight).permute(2, 3, 1, 0), "scale": of(block.norm.weight),
                   "bias": of(block.norm.bias)} for name, block in network.blocks.items()}
    tree["head"] = {"w": of(network.head.weight).T, "b": of(network.head.bias)}
    return tree


def gradients(network):
    """Its .grad tensors in the shape of model.init_params' tree."""
    return parameters(network, lambda parameter: parameter.grad)


def statistics(network):
    """Its running statistics in the shape of model.init_stats' tree; views, which the next step writes over."""
    return {name: {"mean": block.norm.running_mean, "var": block.norm.running_var}
            for name, block in network.blocks.items()}


def sgd(network, lr, momentum, weight_decay, nesterov=True):
    """train.py's rule: Nesterov momentum, weight decay on weights alone (of convolutions and head; a batch norm's
    weight is a scale). `foreach` is PyTorch's fastest form on CPU."""
    decayed, others = ([p for p in network.parameters() if (p.ndim > 1) == weights] for weights in (True, False))
    return torch.optim.SGD([{"params": decayed, "weight_decay": weight_decay}, {"params": others}], lr, momentum,
                           nesterov=nesterov, foreach=True)


def train_step(network, optimizer, images, labels, lr, smoothing=0.0, bfloat16=False):
    """One step; returns the loss as a tensor (not fetched). images: (B, 3, H, W) float32, labels: (B,) int64."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
        loss = F.cross_entropy(network(images), labels, label_smoothing=smoothing)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss.detach()
