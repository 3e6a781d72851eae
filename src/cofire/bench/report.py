"""A `Result` for people: a table, and a plot of latency saved against MACs saved."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table

from cofire.bench.results import Result, Timed
from cofire.extras import require
from cofire.text import percent

LOWEST = -150  # per cent of latency saved; what is slower is below the plot


def table(result: Result) -> RenderableType:
    """Every engine with its medians, by cost, the slowest first; then who was left out, and why.

    The ratio is that of the medians; its p10 and p90 are of ratios taken round by round.
    """
    size = "x".join(map(str, result.input_shape))
    title = f"{result.network}, {size}, batch 1, {result.threads} thread(s), {result.rounds} interleaved rounds"
    rows = Table(title=title, title_justify="left")
    rows.add_column("engine")
    for column in ("MACs saved", "mean ms", "median (p10 .. p90)", "to fastest dense (p10 .. p90)"):
        rows.add_column(column, justify="right", no_wrap=column.startswith("me"))
    for timed in sorted(result.timed, key=lambda t: (result.reduction(t), -t.spread.median)):
        rows.add_row(*_cells(result, timed))
    gated = sum(unit.gated for unit in result.units)
    notes = [f"{gated} of {len(result.units)} convs gated; masks: {result.masks}; inputs: {result.inputs}"]
    for number, point in enumerate(result.points):
        saved = f"executed MACs -{percent(point.executed_macs_reduction)} of {result.dense_macs:,}"
        notes.append(f"point {number + 1}: keep rate {point.keep:.3f}, {saved}, heads +{percent(point.heads, 2)}")
    notes += [f"left out: {engine}: {why}" for engine, why in result.left_out.items()]
    return Group(rows, *notes)


def _cells(result: Result, timed: Timed) -> list[str]:
    time, by_round, ratio = timed.spread, result.ratio_by_round(timed), result.ratio(timed)
    return [
        f"{timed.engine} {timed.version or ''}",
        "dense" if timed.point is None else percent(result.reduction(timed)),
        f"{1e3 * timed.mean:.2f}",
        f"{1e3 * time.median:.2f} ({1e3 * time.p10:.2f} .. {1e3 * time.p90:.2f})",
        "" if by_round is None else f"{ratio:.3f} ({by_round.p10:.3f} .. {by_round.p90:.3f})",
    ]


def plot(result: Result, path: Path) -> None:
    """Latency saved against MACs saved, both against the fastest dense engine, with the line where they are equal.

    Args:
        path: ends in .svg, .png or .pdf.
    """
    matplotlib = require("matplotlib.figure", package="matplotlib", extra="plots")
    figure = matplotlib.Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([0, 100], [0, 100], color="0.6", linestyle="--", label="ideal: latency = MACs")
    axes.axhline(0, color="0.8", linewidth=1)
    for engine in dict.fromkeys(timed.engine for timed in result.timed):
        points = _saved(result, engine)
        hidden = all(saved < LOWEST for _, saved in points)
        axes.plot(*zip(*points, strict=True), marker="o", label=engine + " (below)" * hidden)
    most = max((100 * point.executed_macs_reduction for point in result.points), default=0.0)
    axes.set_xlim(-2, min(100, most + 15))
    axes.set_ylim(LOWEST, 100)
    fastest = result.fastest_dense
    axes.set_xlabel("MACs saved, % (executed)")
    axes.set_ylabel("latency saved, %" + (f" of dense {fastest.engine}" if fastest else ""))
    axes.set_title(f"{result.network}, {'x'.join(map(str, result.input_shape))}, {result.threads} thread(s)")
    axes.legend(fontsize="small")
    figure.savefig(path)


def _saved(result: Result, engine: str) -> list[tuple[float, float]]:
    """(MACs saved, latency saved) of an engine's points in per cent, by rising MACs saved."""
    ratios = [(result.reduction(t), result.ratio(t)) for t in result.timed if t.engine == engine]
    return sorted((100 * saved, 100 * (1 - ratio)) for saved, ratio in ratios if ratio is not None)
