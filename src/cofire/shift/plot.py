"""Brier score and accuracy against severity, one line per model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cofire.analysis.drawing import COLOURS, MARKERS, new_figure, styled, tip
from cofire.shift.results import AtSeverity, Shift

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@styled
def plot(result: Shift) -> Figure:
    """A column of two panels for each corruption: Brier score above, top-1 below; severity 0 is clean."""
    columns = len(result.points)
    figure = new_figure(6, 1 + 3.6 * columns)
    panels = figure.subplots(2, columns, sharex="col", squeeze=False)
    for (name, by_model), (brier, top1) in zip(result.points.items(), panels.T, strict=True):
        for number, (model, points) in enumerate(by_model.items()):
            line = _line(result.clean[model], points)
            severities = [point.severity for point in line]
            look = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "markersize": 4}
            for panel, values in (
                (brier, [point.brier for point in line]),
                (top1, [100 * point.report.top1 for point in line]),
            ):
                (drawn,) = panel.plot(severities, values, label=model, **look)
                tip(drawn, f"{model}: " + ", ".join(f"{value:.3g}" for value in values))
        brier.set_title(name)
        top1.set_xlabel(result.units[name].replace(", ", ",\n"))
    panels[0, 0].set_ylabel("Brier score (low is good)")
    panels[1, 0].set_ylabel("top-1, %")
    panels[0, 0].legend()
    figure.suptitle(f"{result.n} images of {result.data}")
    return figure


def _line(clean: AtSeverity, points: tuple[AtSeverity, ...]) -> list[AtSeverity]:
    """The points by rising severity, the clean one first."""
    return [clean, *sorted((point for point in points if point.severity), key=lambda point: point.severity)]
