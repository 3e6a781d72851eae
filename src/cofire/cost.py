"""Graph + masks -> MACs: a pure function, per sample and per conv or linear layer, in three columns.

Shapes: B samples, I input and O output channels. 1 MAC = one multiply-accumulate (papers' "FLOPs" are MACs).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Literal, get_args

import torch
from torch import Tensor

from cofire.errors import ConfigError, unknown
from cofire.graph import Graph, live_inputs
from cofire.ops import Op
from cofire.units import head_macs

Column = Literal["paper", "executed", "executed+heads"]
COLUMNS: tuple[Column, ...] = get_args(Column)


@dataclass(frozen=True)
class Cost:
    """MACs of a batch.

    ``dense`` maps each conv and linear layer to its MACs for one sample; ``paper`` and ``executed`` map it to
    an int64 tensor (B,); ``heads`` maps each group to the MACs of its head, (B,).
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
    masks: Mapping[str, Tensor],
    input_shape: tuple[int, int, int] | None = None,
    heads: Mapping[str, int] | None = None,
) -> Cost:
    """MACs of a batch whose gates decided ``masks``.

    ``executed`` counts what has to be computed: active filters times input channels that can be non-zero there
    (an addition takes the union of its operands). ``paper`` counts as the paper's numbers were made: behind an
    addition only the filters of the last gated unit count as input. Heads are counted apart.

    Args:
        graph: with its units, as ``gated.graph`` has them.
        masks: group -> (B, O) bool or 0/1. Groups left out are open.
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
    masks = {name: _checked(name, mask, groups[name][-1].out_channels) for name, mask in masks.items()}
    if len({mask.shape[0] for mask in masks.values()}) > 1:
        raise ConfigError(f"masks must have one batch size, got { {n: m.shape[0] for n, m in masks.items()} }")
    rows = {group: mask.T.contiguous() for group, mask in masks.items()}
    by_unit = {unit.conv: rows[unit.group] for unit in units if unit.gated and unit.group in rows}
    by_out = {unit.out: by_unit[unit.conv] for unit in units if unit.conv in by_unit}
    last_gated = _last_gated(graph, set(by_unit))

    def last_gated_operand(op: Op, operands: list[Tensor]) -> Tensor:
        latest = [last_gated[source] for source in op.sources]
        return _union(op, [live for live, when in zip(operands, latest, strict=True) if when == max(latest)])

    executed = _layer_macs(graph, live_inputs(graph, by_out, _union), by_unit)
    paper = _layer_macs(graph, live_inputs(graph, by_out, last_gated_operand), by_unit)
    per_head = heads or {name: head_macs(groups[name]) for name in masks}
    batch = next(iter(executed.values())).shape[0] if executed else 1
    return Cost(
        dense={name: op.conv.macs for name, op in _layers(graph) if op.conv},
        paper=paper,
        executed=executed,
        heads={name: torch.full((batch,), per_head[name], dtype=torch.int64) for name in masks},
    )


def _checked(name: str, mask: Tensor, filters: int) -> Tensor:
    if mask.ndim != 2 or mask.shape[1] != filters:
        raise ConfigError(f"group {name!r}: mask must have shape (B, {filters}), got {tuple(mask.shape)}")
    return mask if mask.dtype == torch.bool else mask.detach() > 0.5


def _union(op: Op, operands: list[Tensor]) -> Tensor:
    return reduce(torch.logical_or, operands)


def _last_gated(graph: Graph, gated_convs: set[str]) -> dict[str, int]:
    """Op name -> place, in execution order, of the last gated conv among the op and its ancestors; -1 if none."""
    last: dict[str, int] = {}
    for place, op in enumerate(graph.ops):
        before = max((last[source] for source in op.sources), default=-1)
        last[op.name] = place if op.name in gated_convs else before
    return last


def _layers(graph: Graph) -> list[tuple[str, Op]]:
    """Conv and linear calls with a name each; the second call of a module is named ``module#2``."""
    named: dict[str, Op] = {}
    for op in graph.ops:
        if op.conv is not None:
            calls = sum(name.split("#")[0] == op.conv.module for name in named)
            named[op.conv.module if not calls else f"{op.conv.module}#{calls + 1}"] = op
    return list(named.items())


def _layer_macs(graph: Graph, live: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Layer -> int64 (B,): its pairs of a live input and an active filter, times the MACs of such a pair."""
    macs = {}
    for name, op in _layers(graph):
        conv = op.conv
        assert conv is not None
        in_IB = live[op.name]
        out_OB = masks[op.name] if op.name in masks else in_IB.new_ones(()).expand(conv.out_channels, in_IB.shape[1])
        macs[name] = _num_pairs(in_IB, out_OB, conv.groups) * conv.macs_per_pair
    return macs


def _num_pairs(in_IB: Tensor, out_OB: Tensor, groups: int) -> Tensor:
    """Pairs of a live input and an active filter of the same group, int64 (B,)."""
    if groups == 1:
        return _count(in_IB) * _count(out_OB)
    if groups == len(in_IB) == len(out_OB):
        return _count(in_IB & out_OB)
    in_GB, out_GB = (side.unflatten(0, (groups, -1)).sum(1) for side in (in_IB, out_OB))
    pairs_B: Tensor = (in_GB * out_GB).sum(0)
    return pairs_B


def _count(rows_CB: Tensor) -> Tensor:
    """How many rows are on in each column, int64 (B,).

    In chunks that fit a byte: 18 times faster than summing booleans, which torch widens to int64 first.
    """
    chunks = [rows.view(torch.uint8).sum(0, dtype=torch.uint8) for rows in rows_CB.split(255)]
    return torch.stack(chunks).sum(0, dtype=torch.int64)
