"""Model + images -> what units give out: maximum response per filter, and heatmaps with gates open and at work.

Shapes: N images, B of a batch, O filters, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from cofire.data.feeding import AnyLoader, feed
from cofire.errors import ConfigError, DataError, unknown
from cofire.gates.base import Decision
from cofire.gates.gating import GatedModel
from cofire.gates.switchboard import Switchboard
from cofire.graph.graph import Graph, trace
from cofire.graph.placement import place
from cofire.graph.tracing import evaluating
from cofire.graph.units import Placement, Unit, Units

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Responses:
    """Each filter's largest absolute response to each image, images sorted by class, each class in the set's order.

    Args:
        unit: whose filters they are.
        peak_NO: float32, at least 0; exactly 0 where a gate switched the filter off.
        label_N: int64 and rising, or None for unlabelled images, which stay in the set's order.
    """

    unit: str
    peak_NO: Floats
    label_N: NDArray[np.int64] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Heatmaps:
    """Sum over filters of a unit's absolute output, per image: with all gates open, and with gates at work.

    Args:
        unit: whose output it is.
        dense_NHW: float32, the same weights with every filter running.
        gated_NHW: float32, what is left of it.
    """

    unit: str
    dense_NHW: Floats
    gated_NHW: Floats


def responses(model: nn.Module, loader: AnyLoader, unit: str, *, text: str = "responses") -> Responses:
    """The maximum responses of any unit of a model, gated or plain (figure 2 of the paper).

    Args:
        loader: images with or without labels.
        unit: its name, as ``gated.units`` or ``cofire info`` list it; also a unit that has no gate.
        text: what the progress bar says; empty for none.
    """
    peaks: list[Tensor] = []
    labels: list[Tensor] = []
    for x_BCHW, label_B in feed(loader, text):
        watch_unit(model, x_BCHW, unit, lambda y_BOHW: peaks.append(y_BOHW.abs().flatten(2).amax(2).float().cpu()))
        if label_B is not None:
            labels.append(label_B.cpu())
    peak_NO = torch.cat(peaks).numpy()
    if not labels:
        return Responses(unit=unit, peak_NO=peak_NO, label_N=None)
    label_N = torch.cat(labels).numpy()
    if len(label_N) != len(peak_NO):
        raise DataError(f"images must all have labels or none, got {len(label_N)} labels for {len(peak_NO)} images")
    order_N = np.argsort(label_N, kind="stable")
    return Responses(unit=unit, peak_NO=peak_NO[order_N], label_N=label_N[order_N])


def heatmaps(gated: nn.Module, x_BCHW: Tensor, unit: str) -> Heatmaps:
    """Where a unit responds, dense and gated (appendix of the paper).

    Args:
        x_BCHW: normalised images.
        unit: its name, as ``gated.units`` lists it.
    """
    if not isinstance(gated, GatedModel):
        raise ConfigError(f"heatmaps compare open gates with gates at work, got a plain {type(gated).__name__}")
    maps: list[Floats] = []

    def add(y_BOHW: Tensor) -> None:
        maps.append(y_BOHW.abs().sum(1).float().cpu().numpy())

    with gated.force("open"):
        watch_unit(gated, x_BCHW, unit, add)
    watch_unit(gated, x_BCHW, unit, add)
    return Heatmaps(unit=unit, dense_NHW=maps[0], gated_NHW=maps[1])


def model_units(model: nn.Module, input_shape: tuple[int, int, int] | None = None) -> Units:
    """Every conv of a model, gated or plain, in execution order."""
    return _placed(model, input_shape).units


def watch_unit(model: nn.Module, x_BCHW: Tensor, unit: str, see: Callable[[Tensor], None]) -> None:
    """Run a batch in eval mode and show ``see`` the output (B, O, H, W) of a unit, masked where it is gated."""
    graph = _placed(model, (int(x_BCHW.shape[1]), int(x_BCHW.shape[2]), int(x_BCHW.shape[3])))
    units = {each.name: each for each in graph.units}
    if unit not in units:
        raise unknown("unit", unit, units)
    board = model.switchboard if isinstance(model, GatedModel) else None
    device = next(graph.root.parameters()).device
    with torch.no_grad(), evaluating(model), evaluating(graph.root):
        if board is not None:
            board.begin(x_BCHW.to(device))
        _Watched(graph, board, units[unit], see).run(x_BCHW.to(device))


def _placed(model: nn.Module, input_shape: tuple[int, int, int] | None) -> Graph:
    if isinstance(model, GatedModel):
        return model.graph
    return place(trace(model, input_shape), Placement(linear=True, always=True))


class _Watched(fx.Interpreter):
    """Runs the calls of a graph one by one, with the gates where gating writes them, and shows one unit's output."""

    def __init__(self, graph: Graph, board: Switchboard | None, unit: Unit, see: Callable[[Tensor], None]) -> None:
        super().__init__(graph.root, graph=graph.calls)
        sites = graph.sites if board is not None else ()
        self.board, self.see = board, see
        self.firsts = {site.first: site for site in sites}
        self.lasts = {site.out: site for site in sites}
        self.decisions: dict[str, Decision | None] = {}
        self.nodes = {node.name: node for node in graph.calls.nodes}
        self.watched = unit.out
        # The filters of a unit that only feeds its group's last one are off as well, though no mask is written there.
        mine = next((site for site in sites if site.kind == "filters" and unit in site.units), None)
        self.masked = unit.out if mine is None else mine.out
        self.held: Tensor | None = None

    def run_node(self, n: fx.Node) -> Any:
        if self.board is not None and (site := self.firsts.get(n.name)) is not None:
            self.decisions[site.name] = self.board.decided(site.name, self.env[self.nodes[site.x]])
        result = super().run_node(n)
        if n.name == self.watched != self.masked:
            self.held = result.clone()
        if self.board is not None and (site := self.lasts.get(n.name)) is not None:
            result = self.board.masked(site.name, result, self.decisions[site.name])
        if n.name == self.masked:
            self.see(result if self.held is None else self.held * self._mask(n.name, self.held))
        return result

    def _mask(self, last: str, y_BOHW: Tensor) -> Tensor:
        assert self.board is not None
        return self.board.decisions[self.lasts[last].name].mask.spread(y_BOHW)
