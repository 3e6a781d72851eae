"""Brier score and accuracy against severity, one line per model."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from cofire.data.decoding import require
from cofire.errors import ConfigError
from cofire.shift.results import Point, Shift

FORMATS = (".svg", ".png", ".pdf")


def plot(result: Shift, path: Path) -> None:
    """Draw a column of two panels for each corruption: Brier score above, top-1 below; severity 0 is clean.

    Args:
        path: ends in .svg, .png or .pdf.
    """
    matplotlib = library_for(path)
    columns = len(result.points)
    figure = matplotlib.Figure(figsize=(1 + 3.6 * columns, 6), layout="constrained")
    panels = figure.subplots(2, columns, sharex="col", squeeze=False)
    for (name, by_model), (brier, top1) in zip(result.points.items(), panels.T, strict=True):
        for model, points in by_model.items():
            line = _line(result.clean[model], points)
            severities = [point.severity for point in line]
            brier.plot(severities, [point.brier for point in line], marker="o", markersize=3, label=model)
            top1.plot(severities, [100 * point.report.top1 for point in line], marker="o", markersize=3)
        brier.set_title(name)
        top1.set_xlabel(result.units[name].replace(", ", ",\n"))
    panels[0, 0].set_ylabel("Brier score (low is good)")
    panels[1, 0].set_ylabel("top-1, %")
    panels[0, 0].legend(fontsize="small")
    figure.suptitle(f"{result.n} images of {result.data}")
    figure.savefig(path)


def library_for(path: Path) -> ModuleType:
    """The library that draws, or an error if it is missing or cannot write such a file."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"a plot must be a file in {', '.join(FORMATS)}, got {path}")
    return require("matplotlib.figure", package="matplotlib", extra="plots")


def _line(clean: Point, points: tuple[Point, ...]) -> list[Point]:
    """The points by rising severity, the clean one first."""
    return [clean, *sorted((point for point in points if point.severity), key=lambda point: point.severity)]
