"""The whole model with a factor on each channel wherever a layer mixes it with others: 0 is a channel that has left.

It says what surgery must give, without surgery: nothing of a removed channel arrives at a conv or linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from cofire.pruning.channels import Channels, ids

Change = Callable[[str, Tensor], Tensor]
"""(layer, what it reads (B, I, ...)) -> what it shall read instead."""


class Probe(fx.Interpreter):
    """Runs the calls of the original model; what convs and linear layers read goes through ``change`` first."""

    def __init__(self, model: nn.Module, channels: Channels, change: Change) -> None:
        super().__init__(model, graph=channels.graph.calls)
        self.layers = {op.name: op.conv.module for op in channels.graph.ops if op.conv is not None}
        self.change = change

    def run_node(self, n: fx.Node) -> Any:
        layer = self.layers.get(n.name)
        if layer is None:
            return super().run_node(n)
        source = n.all_input_nodes[0]
        whole = self.env[source]
        self.env[source] = self.change(layer, whole)
        result = super().run_node(n)
        if source in self.env:
            self.env[source] = whole
        return result


def factors_of_inputs(channels: Channels, factors: Mapping[str, Tensor]) -> Change:
    """The change that multiplies each channel by its group's factor (O,), or by one a sample, (B, O)."""
    per_channel = torch.cat([factors[name].reshape(-1, size) for name, size in channels.sizes.items()], 1)
    one = torch.ones_like(per_channel[:, :1])
    table = torch.cat([per_channel, one], 1)  # -1, what stays, is the last
    reads = {
        op.conv.module: channels.channel_of[ids(op.reads[0])]
        for op in channels.graph.ops
        if op.conv is not None and op.conv.groups == 1 and op.reads
    }

    def change(layer: str, x: Tensor) -> Tensor:
        channel_I = reads.get(layer)
        if channel_I is None or not bool((channel_I >= 0).any()):
            return x
        factor = table[:, channel_I.to(table.device)].to(x.dtype)
        return x * spread(factor, x, last=layer in channels.linear)

    return change


def spread(values_BI: Tensor, x: Tensor, *, last: bool) -> Tensor:
    """A number for each channel of ``x``, which stand in the last place or the first, of a shape that multiplies it."""
    ones = [1] * (x.ndim - 2)
    return values_BI.view(len(values_BI), *ones, -1) if last else values_BI.view(*values_BI.shape, *ones)


def scaled(model: nn.Module, channels: Channels, factors: Mapping[str, Tensor], x_BCHW: Tensor) -> Tensor:
    """What the whole model makes of images with its channels scaled: group -> factors (O,) or (B, O)."""
    result: Tensor = Probe(model, channels, factors_of_inputs(channels, factors)).run(x_BCHW)
    return result
