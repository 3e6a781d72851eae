"""Accuracy against executed MACs, and against milliseconds in the engine: the paper's figure 1 for any network."""

from __future__ import annotations

from statistics import mean
from typing import TYPE_CHECKING

from cofire.analysis.drawing import COLOURS, INK, MARKERS, new_figure, styled, tip
from cofire.comparison.table import Network

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SORTS = ("static", "dynamic")


@styled
def plot(network: Network) -> Figure:
    """Every method of one network, named; the dense network is the cross."""
    dense = network.dense["test"]["top1"]
    times = (network.timing or {"ms": {}})["ms"]
    by_macs = {row.method: 100 * row.reached for row in network.rows if row.results}
    ratios = {row.method: float(row.time["ratio"] or 0) for row in network.rows if row.time is not None}
    panels = [("executed MACs with heads, %", by_macs, 100.0)]
    if ratios and "dense" in times:
        whole = float(times["dense"]["mean"])  # ratios, since a row may have been timed on another machine
        panels.append(("milliseconds per image in the engine", {name: whole * r for name, r in ratios.items()}, whole))
    figure = new_figure(3.6, 4.2 * len(panels))
    for number, (label, places, whole) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), number + 1)
        axes.grid()
        (cross,) = axes.plot(whole, 100 * dense, "x", color=INK, label="dense")
        tip(cross, f"dense: top-1 {100 * dense:.2f} %, {whole:.3g}")
        named: set[str] = set()
        for row in network.rows:
            if row.method not in places:
                continue
            kind = _SORTS.index(row.sort)
            top1, x = 100 * mean(row.values("top1")), places[row.method]
            label_once = row.sort if row.sort not in named else None
            (dot,) = axes.plot(x, top1, MARKERS[kind], color=COLOURS[kind], label=label_once)
            named.add(row.sort)
            tip(dot, f"{row.method}: top-1 {top1:.2f} %, {x:.3g}")
            axes.annotate(row.method, (x, top1), (4, 3), textcoords="offset points", fontsize=6)
        axes.margins(x=0.15, y=0.12)
        axes.set_xlabel(label)
        axes.set_ylabel("top-1, %" if number == 0 else "")
        axes.legend()
    figure.suptitle(f"{network.base.backbone.name} on {network.base.data.name}")
    return figure
