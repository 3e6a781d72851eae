"""Graph + masks -> MACs: a pure function, per sample and per conv or linear layer, in three columns.

Shapes: B samples, O filters, R masks. 1 MAC = one multiply-accumulate (papers' "FLOPs" are MACs).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Literal, get_args

import torch
from torch import Tensor

from cofire.errors import ConfigError, unknown
from cofire.graph.graph import Graph, Live, live_inputs
from cofire.graph.ops import Conv, Op
from cofire.graph.units import head_macs

Column = Literal["paper", "executed", "executed+heads"]
COLUMNS: tuple[Column, ...] = get_args(Column)


@dataclass(frozen=True)
class Cost:
    """MACs of a batch.

    ``dense`` maps each conv and linear layer to its MACs for one sample; ``paper`` and ``executed`` map it to
    an int64 tensor (B,); ``heads`` maps each group to the MACs of its head, (B,). For R masks at once all are (R * B,).
    """

    dense: Mapping[str, int]
    paper: Mapping[str, Tensor]
    executed: Mapping[str, Tensor]
    heads: Mapping[str, Tensor]

    @property
    def dense_total(self) -> int:
        """Dense MACs of one sample, conv and linear layers together."""
        return sum(self.dense.values())

    def total(self, column: Column) -> Tensor:
        """MACs per sample, int64 (B,)."""
        if column not in COLUMNS:
            raise unknown("cost column", column, COLUMNS)
        layers = self.paper if column == "paper" else self.executed
        total = torch.stack(list(layers.values())).sum(0)
        return total + sum(self.heads.values()) if column == "executed+heads" else total

    def reduction(self, column: Column) -> Tensor:
        """Share of the dense MACs that is saved, per sample, float64 (B,); 0 with all gates open."""
        return 1 - self.total(column).double() / self.dense_total


def cost(
    graph: Graph,
    masks: Mapping[str, Tensor | Live],
    input_shape: tuple[int, int, int] | None = None,
    heads: Mapping[str, int] | None = None,
) -> Cost:
    """MACs of a batch whose gates decided ``masks``.

    ``executed`` counts what has to be computed: active filters times input channels that can be non-zero there
    (an addition takes the union of its operands). ``paper`` counts as the paper's numbers were made: behind an
    addition only the filters of the last gated unit count as input. Heads are counted apart.

    Args:
        graph: with its units, as ``gated.graph`` has them.
        masks: group -> (B, O) bool or 0/1, or :class:`Live` for many masks at once. Groups left out are open.
        input_shape: (C, H, W), if other than the graph's.
        heads: group -> MACs of its head. Default: a linear map from input channels to filters for each group in
            ``masks``.
    """
    graph = graph.at(input_shape or graph.input_shape)
    units = graph.units
    groups = units.groups
    for name in masks:
        if name not in groups:
            raise unknown("group", name, groups)
    live = {name: _checked(name, mask, groups[name][-1].out_channels) for name, mask in masks.items()}
    sizes = {name: len(mask.level_BC) for name, mask in live.items()}
    if len(set(sizes.values())) > 1:
        raise ConfigError(f"masks must have one batch size, got {sizes}")
    by_unit = {unit.conv: live[unit.group] for unit in units if unit.gated and unit.group in live}
    by_out = {unit.out: by_unit[unit.conv] for unit in units if unit.conv in by_unit}
    last_gated = _last_gated(graph, set(by_unit))

    def last_gated_operand(op: Op, operands: list[Live]) -> Live:
        latest = [last_gated[source] for source in op.sources]
        return _union(op, [live for live, when in zip(operands, latest, strict=True) if when == max(latest)])

    layers = _layers(graph)

    def layer_macs(add: Callable[[Op, list[Live]], Live]) -> dict[str, Tensor]:
        inputs = live_inputs(graph, by_out, add)
        return {
            name: _num_pairs(inputs[op], by_unit.get(op), conv) * conv.macs_per_pair
            for name, (op, conv) in layers.items()
        }

    executed, paper = layer_macs(_union), layer_macs(last_gated_operand)
    per_head = heads or {name: head_macs(groups[name]) for name in masks}
    batch = next(iter(executed.values())).shape[0] if executed else 1
    return Cost(
        dense={name: conv.macs for name, (_, conv) in layers.items()},
        paper=paper,
        executed=executed,
        heads={name: torch.full((batch,), per_head[name], dtype=torch.int64) for name in masks},
    )


def _checked(name: str, mask: Tensor | Live, filters: int) -> Live:
    if isinstance(mask, Live):
        return mask
    if mask.ndim != 2 or mask.shape[1] != filters:
        raise ConfigError(f"group {name!r}: mask must have shape (B, {filters}), got {tuple(mask.shape)}")
    return Live.under(mask if mask.dtype == torch.bool else mask.detach() > 0.5)


def _union(op: Op, operands: list[Live]) -> Live:
    return reduce(or_, operands)


def _last_gated(graph: Graph, gated_convs: set[str]) -> dict[str, int]:
    """Op name -> place, in execution order, of the last gated conv among the op and its ancestors; -1 if none."""
    last: dict[str, int] = {}
    for place, op in enumerate(graph.ops):
        before = max((last[source] for source in op.sources), default=-1)
        last[op.name] = place if op.name in gated_convs else before
    return last


def _layers(graph: Graph) -> dict[str, tuple[str, Conv]]:
    """Conv and linear calls by a name each; the second call of a module is named ``module#2``."""
    named: dict[str, tuple[str, Conv]] = {}
    calls = Counter[str]()
    for op in graph.ops:
        if op.conv is not None:
            module = op.conv.module
            calls[module] += 1
            named[module if calls[module] == 1 else f"{module}#{calls[module]}"] = op.name, op.conv
    return named


def _num_pairs(live: Live, active: Live | None, conv: Conv) -> Tensor:
    """Pairs of a live input and an active filter of the same group, int64 (R * B,)."""
    if active is None:
        return live.count * (conv.out_channels // conv.groups)
    if conv.groups == 1:
        return live.count * active.count
    if conv.groups == conv.in_channels == conv.out_channels:
        return (live & active).count
    pairs: Tensor = live.split(conv.groups).count * active.split(conv.groups).count
    return pairs.view(-1, conv.groups).sum(1)
