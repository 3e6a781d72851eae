"""Channels that leave together: groups of them, and what remains of a model's MACs under masks; only data.

Shapes: O channels of a group, F channels of all groups, L conv and linear calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from cofire.graph.graph import Graph
from cofire.graph.open_units import open_unit
from cofire.graph.ops import Op
from cofire.graph.units import Unit, Units


@dataclass(frozen=True, eq=False)
class ChannelGroup:
    """O channels, each of which leaves all of its layers at once.

    A channel may have several filters in one layer: those of one group of a grouped conv leave together.

    Args:
        name: of the first conv that writes its channels.
        size: O.
        filters: layer -> the channel each of its filters writes, int64 (filters,); -1 for none of this group.
        inputs: layer that mixes channels -> the channel each of its inputs is, int64 (inputs,); -1 likewise.
        stream: whether the channels pass an addition, as those of a residual stream do.
    """

    name: str
    size: int
    filters: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    stream: bool = False

    def total(self, values: Callable[[str], Tensor]) -> Tensor:
        """The sum over a channel's filters in all layers, float64 (O,); ``values(layer)`` is (filters,)."""
        found_O = torch.zeros(self.size, dtype=torch.float64)
        for layer, channel_W in self.filters.items():
            written = channel_W >= 0
            found_O.index_add_(0, channel_W[written], values(layer).detach().double().cpu()[written])
        return found_O


@dataclass(frozen=True, eq=False)
class Channels:
    """The channels of a model that can leave for good.

    Args:
        groups: name -> group, in execution order.
        reasons: conv -> why its filters stay, for those that do.
        channel_of: id -> its place among all F channels, int64; -1 for ids that stay.
    """

    graph: Graph
    groups: Mapping[str, ChannelGroup]
    reasons: Mapping[str, str]
    channel_of: Tensor

    @property
    def sizes(self) -> dict[str, int]:
        """Group -> O."""
        return {name: group.size for name, group in self.groups.items()}

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an image."""
        return self.graph.input_shape

    @cached_property
    def units(self) -> Units:
        """Every conv; the gated ones are those whose filters can leave. Prints as a table."""
        group_of = {layer: group.name for group in self.groups.values() for layer in group.filters}
        return Units(_unit(op, group_of, self.reasons) for op in self.graph.ops if op.is_conv)

    @cached_property
    def called(self) -> dict[str, str]:
        """Op -> the module it calls, for those that call one."""
        return {node.name: str(node.target) for node in self.graph.calls.nodes if node.op == "call_module"}

    @cached_property
    def linear(self) -> set[str]:
        """Linear layers: their inputs stand in the last place, those of all other layers in the first."""
        return {op.conv.module for op in self.graph.ops if op.conv is not None and op.kind == "linear"}

    def kept_ids(self, masks: Mapping[str, Tensor]) -> Tensor:
        """Id -> whether it remains under ``masks``, group -> bool (O,)."""
        kept_F = torch.cat([masks[name].cpu() for name in self.groups])
        return torch.where(self.channel_of >= 0, kept_F[self.channel_of.clamp(min=0)], True)

    def remaining(self, masks: Mapping[str, Tensor]) -> float:
        """Share of the MACs that remains under ``masks``, group -> bool (O,)."""
        kept_F = torch.cat([masks[name].cpu() for name in self.groups])
        return float(self._macs(kept_F) / self._macs(torch.ones_like(kept_F)))

    def _macs(self, kept_F: Tensor) -> Tensor:
        per_pair_L, inputs_LF, fixed_inputs_L, filters_LF, fixed_filters_L = self._counts
        inputs_L = fixed_inputs_L + inputs_LF @ kept_F.float()
        filters_L = fixed_filters_L + filters_LF @ kept_F.float()
        return (per_pair_L * inputs_L.double() * filters_L.double()).sum()

    @cached_property
    def _counts(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Per layer: MACs of a pair, then inputs per channel, those that stay, filters per channel, those that stay."""
        layers = [(op, op.conv) for op in self.graph.ops if op.conv is not None]
        total = sum(self.sizes.values())
        inputs_LF, filters_LF = torch.zeros(len(layers), total), torch.zeros(len(layers), total)
        per_pair_L = torch.tensor([conv.macs_per_pair for _, conv in layers], dtype=torch.float64)
        inputs_L, filters_L = torch.zeros(len(layers)), torch.zeros(len(layers))
        for row, (op, conv) in enumerate(layers):
            filters_L[row] = _count(self.channel_of[ids(op.own)], filters_LF[row])
            if conv.groups > 1:  # what leaves is whole groups, so that a filter has as many inputs as before
                inputs_L[row] = conv.in_channels // conv.groups
            else:
                read = self.channel_of[ids(op.reads[0])]
                inputs_L[row] = _count(read.expand(conv.in_channels) if len(read) == 1 else read, inputs_LF[row])
        return per_pair_L, inputs_LF, inputs_L, filters_LF, filters_L


def ids(read: Tensor | slice) -> Tensor:
    """The ids of an operand's channels, int64 (C,)."""
    return torch.arange(read.start, read.stop) if isinstance(read, slice) else read


def _count(channel_C: Tensor, per_channel_F: Tensor) -> int:
    """Count how often each channel occurs, in place; return how many stay."""
    leaving = channel_C[channel_C >= 0]
    per_channel_F.index_add_(0, leaving, torch.ones(len(leaving)))
    return len(channel_C) - len(leaving)


def _unit(op: Op, group_of: Mapping[str, str], reasons: Mapping[str, str]) -> Unit:
    shape = op.conv
    assert shape is not None
    depthwise = shape.groups > 1 and shape.groups == shape.in_channels
    return replace(
        open_unit(op, shape),
        role="depthwise" if depthwise else "plain",
        group=group_of.get(shape.module, shape.module),
        gated=shape.module in group_of,
        reason=reasons.get(shape.module, ""),
    )
