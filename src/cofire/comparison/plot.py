"""Accuracy against executed MACs, and against milliseconds in the engine: the paper's figure 1 for any network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from cofire.analysis.drawing import COLOURS, INK, MARKERS, new_figure, styled, tip
from cofire.comparison.table import Network

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SORTS = ("static", "dynamic")
_LINES = 26  # of text beside a panel: at one budget all dots stand above each other
_FAR = 4  # times the middle method's drop: what is further down would press all others together


@styled
def plot(network: Network) -> Figure:
    """Every method of one network, named; the dense network is the cross.

    What lies far below the others stands at the lower edge, with its accuracy beside the name.
    """
    dense = network.dense["test"]["top1"]
    top1s = {row.method: 100 * mean(row.values("top1")) for row in network.rows if row.results}
    edge = lowest(100 * dense, list(top1s.values()))
    times = (network.timing or {"ms": {}})["ms"]
    by_macs = {row.method: 100 * row.reached for row in network.rows if row.results}
    ratios = {row.method: float(row.time["ratio"] or 0) for row in network.rows if row.time is not None}
    panels = [("executed MACs with heads, %", by_macs, 100.0)]
    if ratios and "dense" in times:
        whole = float(times["dense"]["mean"])  # ratios, since a row may have been timed on another machine
        panels.append(("milliseconds per image in the engine", {name: whole * r for name, r in ratios.items()}, whole))
    figure = new_figure(4.4, 4.6 * len(panels))
    for number, (label, places, whole) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), number + 1)
        axes.grid()
        (cross,) = axes.plot(whole, 100 * dense, "x", color=INK, label="dense")
        tip(cross, f"dense: top-1 {100 * dense:.2f} %, {whole:.3g}")
        named: set[str] = set()
        dots: dict[str, tuple[float, float]] = {}
        for row in network.rows:
            if row.method not in places:
                continue
            kind = _SORTS.index(row.sort)
            top1, x = top1s[row.method], places[row.method]
            height, name = (top1, row.method) if top1 >= edge else (edge, f"{row.method} ↓ {top1:.1f}")
            label_once = row.sort if row.sort not in named else None
            (dot,) = axes.plot(x, height, MARKERS[kind], color=COLOURS[kind], label=label_once)
            named.add(row.sort)
            tip(dot, f"{row.method}: top-1 {top1:.2f} %, {x:.3g}")
            dots[name] = (x, height)
        axes.margins(x=0.1, y=0.08)
        _name(axes, dots)
        axes.set_xlabel(label)
        axes.set_ylabel("top-1, %" if number == 0 else "")
        axes.legend()
    figure.suptitle(f"{network.base.backbone.name} on {network.base.data.name}")
    return figure


def _name(axes: Axes, dots: Mapping[str, tuple[float, float]]) -> None:
    """The names beside the panel, each on a line of its own, as near to the height of its dot as the others let it."""
    low, high = axes.get_ylim()
    ranked = sorted(dots.items(), key=lambda item: item[1][1])
    heights = spread([y for _, (_, y) in ranked], (high - low) / max(_LINES, len(ranked)))
    line = {"arrowstyle": "-", "linewidth": 0.3, "color": INK, "alpha": 0.5, "relpos": (0.0, 0.5)}
    for (name, dot), height in zip(ranked, heights, strict=True):
        where: Any = ("axes fraction", "data")
        axes.annotate(name, dot, xytext=(1.03, height), textcoords=where, va="center", fontsize=6, arrowprops=line)


def lowest(dense: float, top1s: Sequence[float]) -> float:
    """The lower edge of the accuracies that are shown in their place."""
    least = min(top1s, default=dense)
    usual = dense - median(top1s) if top1s else 0.0
    return max(least, dense - _FAR * usual) if usual > 0 else least


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Rising heights moved until neighbours are at least a gap apart: halfway between all pushed up and all down."""
    up = accumulate(heights, lambda below, height: max(height, below + gap))
    down = accumulate(reversed(heights), lambda above, height: min(height, above - gap))
    return [(high + low) / 2 for high, low in zip(up, reversed(list(down)), strict=True)]
