"""Graph + masks -> MACs: a pure function, per sample and per conv or linear layer, in three columns.

Shapes: B samples, O filters, R masks. 1 MAC = one multiply-accumulate (papers' "FLOPs" are MACs).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Literal, get_args

import torch
from torch import Tensor

from cofire.errors import ConfigError, unknown
from cofire.graph.graph import Graph
from cofire.graph.live import AbstractLive, L, Live, live_inputs, union
from cofire.graph.masks import AbstractMask, FilterMask, mask_of
from cofire.graph.ops import Conv, Op
from cofire.graph.units import Site, head_macs

Column = Literal["paper", "executed", "executed+heads"]
COLUMNS: tuple[Column, ...] = get_args(Column)


@dataclass(frozen=True)
class Cost:
    """MACs of a batch.

    ``dense`` maps each conv and linear layer to its MACs for one sample; ``paper`` and ``executed`` map it to
    an int64 tensor (B,); ``heads`` maps each site to the MACs of its head, (B,). For R masks at once all are (R * B,).
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
    masks: Mapping[str, AbstractMask | Tensor | Live],
    input_shape: tuple[int, int, int] | None = None,
    heads: Mapping[str, int] | None = None,
) -> Cost:
    """MACs of a batch whose gates decided ``masks``.

    ``executed`` counts what has to be computed: active filters, at active positions, times input channels that can be
    non-zero there (an addition takes the union of its operands). ``paper`` counts as the paper's numbers were made:
    behind an addition only the filters of the last gated unit count as input. Heads are counted apart.

    Args:
        graph: with its sites, as ``gated.graph`` has them.
        masks: site -> mask of the site's kind, or its tensor; for filters also :class:`Live`, many masks at once.
            Sites left out are open.
        input_shape: (C, H, W), if other than the graph's.
        heads: site -> MACs of its head. Default: a linear map from input channels to filters for each group of filters
            in ``masks``.
    """
    graph = graph.at(input_shape or graph.input_shape)
    active = _active(graph, {name: _as_live(graph, site, masks[name]) for name, site in _named(graph, masks).items()})
    last_gated = _last_gated(graph, set(active.convs))

    def last_gated_operand(op: Op, operands: list[Live]) -> Live:
        latest = [last_gated[source] for source in op.sources]
        return union(op, [live for live, when in zip(operands, latest, strict=True) if when == max(latest)])

    executed = _layer_macs(graph, active, live_inputs(graph, active.outs, active.like))
    paper = _layer_macs(graph, active, live_inputs(graph, active.outs, active.like, last_gated_operand))
    per_head = heads or {name: head_macs(list(site.units)) for name, site in _named(graph, masks).items()}
    batch = next(iter(executed.values())).shape[0] if executed else 1
    inside = graph.macs_inside
    always = {name: torch.full((batch,), macs, dtype=torch.int64) for name, macs in inside.items()}
    return Cost(
        dense={name: op.conv.macs for name, op in graph.layers.items() if op.conv is not None} | inside,
        paper=paper | always,
        executed=executed | always,
        heads={name: torch.full((batch,), per_head[name], dtype=torch.int64) for name in masks},
    )


def expected_macs(
    graph: Graph, shares: Mapping[str, Tensor], input_shape: tuple[int, int, int] | None = None
) -> Tensor:
    """MACs that are to be expected where gates are on with some probability: float (B,), differentiable.

    For a loss that holds a method to a budget. Decisions count as independent of each other, so that an addition is
    live with 1 - (1 - p)(1 - q). At probabilities 0 and 1 it equals ``cost(...).total("executed")``.

    Args:
        shares: site -> probabilities in [0, 1], of the shape of the site's masks. Sites left out are open.
        input_shape: (C, H, W), if other than the graph's.
    """
    graph = graph.at(input_shape or graph.input_shape)
    found = {}
    for name, site in _named(graph, shares).items():
        mask = mask_of(site, shares[name], site_size(graph, site))
        found[name] = _switched(site, mask.chance(site.filters), mask.positions)
    active = _active(graph, found)
    layers = _layer_macs(graph, active, live_inputs(graph, active.outs, active.like))
    return torch.stack(list(layers.values())).sum(0) + sum(graph.macs_inside.values())


def site_size(graph: Graph, site: Site) -> tuple[int, ...]:
    """(H, W) of the output that a site masks."""
    return graph[site.out].size


def _named(graph: Graph, masks: Mapping[str, object]) -> dict[str, Site]:
    """The sites that masks are given for."""
    sites = {site.name: site for site in graph.sites}
    for name in masks:
        if name not in sites:
            raise unknown("group", name, sites)
    return {name: sites[name] for name in masks}


@dataclass(frozen=True)
class _Switched(Generic[L]):
    """What a site lets through, and at how many positions its convs run where that is not all or none of them.

    The first ``partial`` input channels of each of a conv's groups are added up at every position all the same.
    """

    live: L
    positions_BO: Tensor | None
    partial: int


@dataclass(frozen=True)
class _Active(Generic[L]):
    """Op -> what masks leave of it: convs that run less, outputs that are masked; and a batch like theirs."""

    convs: dict[str, _Switched[L]]
    outs: dict[str, L]
    like: L


def _as_live(graph: Graph, site: Site, mask: AbstractMask | Tensor | Live) -> _Switched[Live]:
    if isinstance(mask, Live):
        if site.kind != FilterMask.kind:
            raise ConfigError(f"site {site.name!r} takes masks of {site.kind}, got several of filters at once")
        return _switched(site, mask, None)
    found = mask_of(site, mask, site_size(graph, site))
    binary = type(found)(found.bits)
    return _switched(site, binary.live(site.filters), binary.positions)


def _switched(site: Site, live: L, positions_BO: Tensor | None) -> _Switched[L]:
    through = live.one(True).expand(site.filters) if site.partial else live  # partial sums stay where a mask is off
    return _Switched(through, positions_BO, site.partial)


def _active(graph: Graph, switched: Mapping[str, _Switched[L]]) -> _Active[L]:
    sizes = {name: len(part.live.table_BC) for name, part in switched.items()}
    if len(set(sizes.values())) > 1:
        raise ConfigError(f"masks must have one batch size, got {sizes}")
    sites = {site.name: site for site in graph.sites}
    convs: dict[str, _Switched[L]] = {}
    outs: dict[str, L] = {}
    for name, part in switched.items():
        site = sites[name]
        for conv in site.convs:
            live = part.live if site.kind != "block" else part.live.like(part.live.table_BC[:, :1])
            convs[conv] = _Switched(live.expand(_conv(graph, conv).out_channels), part.positions_BO, part.partial)
        if site.kind == "filters":
            outs |= {unit.out: part.live for unit in site.units}
        outs[site.out] = part.live
    none: AbstractLive = Live(torch.zeros(1, 1, dtype=torch.uint8))
    return _Active(convs, outs, next((part.live for part in switched.values()), none))  # type: ignore[arg-type]


def _conv(graph: Graph, op: str) -> Conv:
    conv = graph[op].conv
    assert conv is not None
    return conv


def _layer_macs(graph: Graph, active: _Active[L], inputs: Mapping[str, L]) -> dict[str, Tensor]:
    macs = {}
    for name, op in graph.layers.items():
        assert op.conv is not None
        macs[name] = _macs(inputs[op.name], active.convs.get(op.name), op.conv)
    return macs


def _macs(live: L, switched: _Switched[L] | None, conv: Conv) -> Tensor:
    """MACs of one conv under each mask for each sample."""
    if switched is None or switched.positions_BO is None:
        return _num_pairs(live, None if switched is None else switched.live, conv) * conv.macs_per_pair
    filters, taps = conv.out_channels, conv.macs_per_pair // conv.positions
    at_BO = switched.positions_BO.expand(-1, filters)
    inputs = live.split(conv.groups)
    always_BG = inputs.like(inputs.table_BC[:, : switched.partial]).count.view(-1, conv.groups)
    others_BG = inputs.count.view(-1, conv.groups) - always_BG
    pairs_BG: Tensor = others_BG * at_BO.unflatten(1, (conv.groups, -1)).sum(2)
    pairs_BG = pairs_BG + always_BG * (filters // conv.groups * conv.positions)
    return pairs_BG.sum(1) * taps


def _num_pairs(live: L, active: L | None, conv: Conv) -> Tensor:
    """Pairs of a live input and an active filter of the same group, (R * B,)."""
    if active is None:
        return live.count * (conv.out_channels // conv.groups)
    if conv.groups == 1:
        return live.count * active.count
    if conv.groups == conv.in_channels == conv.out_channels:
        return (live & active).count
    pairs: Tensor = live.split(conv.groups).count * active.split(conv.groups).count
    return pairs.view(-1, conv.groups).sum(1)


def _last_gated(graph: Graph, gated_convs: set[str]) -> dict[str, int]:
    """Op name -> place, in execution order, of the last gated conv among the op and its ancestors; -1 if none."""
    last: dict[str, int] = {}
    for place, op in enumerate(graph.ops):
        before = max((last[source] for source in op.sources), default=-1)
        last[op.name] = place if op.name in gated_convs else before
    return last
