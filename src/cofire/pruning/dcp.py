"""DCP: discrimination-aware channel pruning (Zhuang et al. 2018).

A layer starts without the channels of a group and takes them back one by one: next is the one on whose weights the
gradient of a joint loss is largest. The loss is the distance to the layer's own output plus that of a small classifier
on it, so that what tells classes apart comes first.

Shapes: B images, I inputs, P filters, O channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cofire.data.feeding import AnyLoader, feed
from cofire.errors import ConfigError, DataError
from cofire.graph.tracing import evaluating
from cofire.pruning.allocation import uniform_counts
from cofire.pruning.base import PruneConfig, register_criterion
from cofire.pruning.channels import Channels

_TEACHING = 50  # steps of a classifier


@dataclass(frozen=True, kw_only=True)
class DCP(PruneConfig):
    """The gradients select the channels; every group keeps the same share.

    Args:
        images: of the loader that are looked at, at least 1.
        refits: steps of SGD on the layer's weights after each choice, at least 0.
        at_once: how many channels are chosen by one gradient, at least 1; the paper takes one.
    """

    recovery: str = "least-squares"
    images: int = 128
    refits: int = 1
    at_once: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value, least in (
            ("images", self.images, 1),
            ("refits", self.refits, 0),
            ("at_once", self.at_once, 1),
        ):
            if value < least:
                raise ConfigError(f"DCP.{name} must be at least {least}, got {value}")


@register_criterion(DCP)
def dcp_selection(model: nn.Module, channels: Channels, loader: AnyLoader | None, config: DCP) -> dict[str, Tensor]:
    """Group -> bool (O,)."""
    if loader is None:
        raise DataError("DCP needs labelled images: prune(model, DCP(...), loader)")
    readers = {layer for group in channels.groups.values() for layer in group.inputs}
    inputs, label_B = _inputs(model, sorted(readers), loader, config.images)
    tasks = {
        layer: Task(cast("nn.Conv2d | nn.Linear", model.get_submodule(layer)), x, label_B)
        for layer, x in inputs.items()
    }
    counts = uniform_counts(channels, config.macs)
    return {
        name: chosen(
            {layer: (tasks[layer], group.inputs[layer]) for layer in group.inputs}, counts[name], group.size, config
        )
        for name, group in channels.groups.items()
    }


class Task:
    """What one layer shall go on doing: give its output, and let a classifier read the labels from it."""

    def __init__(self, layer: nn.Conv2d | nn.Linear, x: Tensor, label_B: Tensor) -> None:
        self.layer, self.x, self.label_B = layer, x, label_B
        self.weight = layer.weight.detach()
        with torch.no_grad():
            self.output = self.run(self.weight)
        feature_BP = self.read(self.output)
        self.spread = feature_BP.std().clamp(min=1e-6)
        self.classifier = _taught(feature_BP / self.spread, label_B)

    def run(self, weight: Tensor) -> Tensor:
        """The layer's output with other weights."""
        other = torch.func.functional_call(self.layer, {"weight": weight}, (self.x,))
        return cast(Tensor, other)

    def read(self, output: Tensor) -> Tensor:
        """What a classifier reads, (B, P): the mean over space of what is positive."""
        positive = F.relu(output.movedim(-1, 1) if isinstance(self.layer, nn.Linear) else output)
        return positive.flatten(2).mean(2) if positive.ndim > 2 else positive

    def loss(self, weight: Tensor) -> Tensor:
        """Distance to its own output, in its variance, plus the classifier's loss."""
        output = self.run(weight)
        distance = (output - self.output).square().mean() / self.output.var().clamp(min=1e-12)
        logits_BK = F.linear(self.read(output) / self.spread, *self.classifier)
        return distance + F.cross_entropy(logits_BK, self.label_B)


def chosen(tasks: Mapping[str, tuple[Task, Tensor]], count: int, size: int, config: DCP) -> Tensor:
    """The channels of a group that are taken back first, bool (O,); ``tasks`` has each reader's task and channels."""
    kept_O = torch.zeros(size, dtype=torch.bool)
    weights = {layer: _without(task.weight, channel_I) for layer, (task, channel_I) in tasks.items()}
    while (missing := count - int(kept_O.sum())) > 0:
        strength_O = sum(
            (
                _by_channel(_gradient(task, weights[layer]), channel_I, size)
                for layer, (task, channel_I) in tasks.items()
            ),
            torch.zeros(size, dtype=torch.float64),
        )
        new = strength_O.masked_fill(kept_O, -1).topk(min(config.at_once, missing)).indices
        kept_O[new] = True
        for layer, (task, channel_I) in tasks.items():
            back_I = torch.isin(channel_I, new)
            weights[layer][:, back_I] = task.weight[:, back_I]
            for _ in range(config.refits):
                live_I = (channel_I < 0) | kept_O[channel_I.clamp(min=0)]
                step = _gradient(task, weights[layer])
                weights[layer][:, live_I] -= 0.01 * step[:, live_I]
    return kept_O


def _gradient(task: Task, weight: Tensor) -> Tensor:
    leaf = weight.clone().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(task.loss(leaf), [leaf])
    return gradient


def _by_channel(gradient: Tensor, channel_I: Tensor, size: int) -> Tensor:
    """The squared norm of a gradient (P, I, ...) by channel, float64 (O,)."""
    square_I = gradient.double().cpu().square().transpose(0, 1).flatten(1).sum(1)
    mine = channel_I >= 0
    return torch.zeros(size, dtype=torch.float64).index_add_(0, channel_I[mine], square_I[mine])


def _without(weight: Tensor, channel_I: Tensor) -> Tensor:
    """A copy with zeros for the inputs that are of a channel."""
    without = weight.clone()
    without[:, channel_I >= 0] = 0
    return without


def _taught(feature_BP: Tensor, label_B: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias of a linear classifier that learned the labels."""
    classes = int(label_B.max()) + 1
    weight = feature_BP.new_zeros(classes, feature_BP.shape[1], requires_grad=True)
    bias = feature_BP.new_zeros(classes, requires_grad=True)
    optimizer = torch.optim.Adam([weight, bias], lr=0.05)
    for _ in range(_TEACHING):
        loss = F.cross_entropy(F.linear(feature_BP, weight, bias), label_B)
        weight.grad, bias.grad = torch.autograd.grad(loss, [weight, bias])
        optimizer.step()
    return weight.detach(), bias.detach()


def _inputs(model: nn.Module, layers: list[str], loader: AnyLoader, images: int) -> tuple[dict[str, Tensor], Tensor]:
    """Layer -> what it reads for the first images, and their labels."""
    found: dict[str, list[Tensor]] = {layer: [] for layer in layers}
    labels: list[Tensor] = []
    device = next(model.parameters()).device
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda layer, args, name=name: found[name].append(args[0].clone())
        )
        for name in layers
    ]
    try:
        with torch.no_grad(), evaluating(model):
            for x_BCHW, label_B in feed(loader):
                if label_B is None:
                    raise DataError("DCP needs labelled images, got unlabelled ones")
                more = images - sum(map(len, labels))
                labels.append(label_B[:more].to(device))
                model(x_BCHW[:more].to(device))
                if sum(map(len, labels)) >= images:
                    break
    finally:
        for hook in hooks:
            hook.remove()
    return {layer: torch.cat(parts) for layer, parts in found.items()}, torch.cat(labels)
