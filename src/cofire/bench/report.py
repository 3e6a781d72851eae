"""A `Result` for people: a table, and a plot of latency saved against MACs saved."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from rich.console import Group, RenderableType
from rich.table import Table

from cofire.bench.results import Result, Timed
from cofire.extras import require
from cofire.runtime.engine import Precision
from cofire.text import percent

LOWEST = -150  # per cent of latency saved; what is slower is below the plot


def table(result: Result) -> RenderableType:
    """Every engine with its medians, by cost, the slowest first; then who was left out, and why.

    Ratios are to the fastest dense engine of a precision that is not ours; see `Result.ratio`.
    """
    size = "x".join(map(str, result.input_shape))
    title = f"{result.network}, {size}, batch 1, {result.threads} thread(s), {result.rounds} interleaved rounds"
    rows = Table(title=title, title_justify="left")
    columns = [
        *("engine", "precision", "MACs saved", "mean ms", "median (p10 .. p90)"),
        *("to fastest float32", "to fastest int8", "agrees", "accuracy"),
    ]
    cells = [
        _cells(result, timed)
        for timed in sorted(result.timed, key=lambda t: (result.reduction(t), t.precision, -t.spread.median))
    ]
    used = [n for n in range(len(columns)) if n < 2 or any(row[n] for row in cells)]
    for n in used:
        rows.add_column(
            columns[n], justify="left" if n < 2 else "right", no_wrap=columns[n].startswith(("me", "precision"))
        )
    for row in cells:
        rows.add_row(*(row[n] for n in used))
    gated = sum(unit.gated for unit in result.units)
    notes = [
        f"{gated} of {len(result.units)} convs gated, dense is the same with all gates open; masks: {result.masks}; "
        f"inputs: {result.inputs}"
    ]
    for number, point in enumerate(result.points):
        saved = f"executed MACs -{percent(point.executed_macs_reduction)} of {result.dense_macs:,}"
        notes.append(f"point {number + 1}: keep rate {point.keep:.3f}, {saved}, heads +{percent(point.heads, 2)}")
    notes += [f"left out: {engine}: {why}" for engine, why in result.left_out.items()]
    return Group(rows, *notes)


def _cells(result: Result, timed: Timed) -> list[str]:
    time, ratios = timed.spread, [result.ratio(timed, precision) for precision in get_args(Precision)]
    return [
        f"{timed.engine} {timed.version or ''}",
        timed.precision,
        "dense" if timed.point is None else percent(result.reduction(timed)),
        f"{1e3 * timed.mean:.2f}",
        f"{1e3 * time.median:.2f} ({1e3 * time.p10:.2f} .. {1e3 * time.p90:.2f})",
        *("" if ratio is None else f"{ratio:.3f}" for ratio in ratios),
        "" if timed.agreement is None else percent(timed.agreement),
        "" if timed.accuracy is None else percent(timed.accuracy),
    ]


def plot(result: Result, path: Path) -> None:
    """Latency saved against MACs saved, against the fastest dense float32 engine, with the line where they are equal.

    Args:
        path: ends in .svg, .png or .pdf.
    """
    matplotlib = require("matplotlib.figure", package="matplotlib", extra="plots")
    figure = matplotlib.Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([0, 100], [0, 100], color="0.6", linestyle="--", label="ideal: latency = MACs")
    axes.axhline(0, color="0.8", linewidth=1)
    for engine, precision in dict.fromkeys((timed.engine, timed.precision) for timed in result.timed):
        points = _saved(result, engine, precision)
        hidden = all(saved < LOWEST for _, saved in points)
        name = engine if precision == "float32" else f"{engine}, {precision}"
        axes.plot(*zip(*points, strict=True), marker="o", label=name + " (below)" * hidden)
    most = max((100 * point.executed_macs_reduction for point in result.points), default=0.0)
    axes.set_xlim(-2, min(100, most + 15))
    axes.set_ylim(LOWEST, 100)
    fastest = result.fastest_dense()
    axes.set_xlabel("MACs saved, % (executed)")
    axes.set_ylabel("latency saved, %" + (f" of dense {fastest.engine}" if fastest else ""))
    axes.set_title(f"{result.network}, {'x'.join(map(str, result.input_shape))}, {result.threads} thread(s)")
    axes.legend(fontsize="small")
    figure.savefig(path)


def _saved(result: Result, engine: str, precision: Precision) -> list[tuple[float, float]]:
    """(MACs saved, latency saved) of an engine's points in per cent, by rising MACs saved."""
    timed = [t for t in result.timed if (t.engine, t.precision) == (engine, precision)]
    ratios = [(result.reduction(t), result.ratio(t)) for t in timed]
    return sorted((100 * saved, 100 * (1 - ratio)) for saved, ratio in ratios if ratio is not None)
