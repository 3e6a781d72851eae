"""``cofire shift``: the command line of `shift`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group

from cofire.analysis.drawing import check_format, write_figure
from cofire.errors import ConfigError
from cofire.files.atomic import write_json
from cofire.shell import AsJson, show
from cofire.shift.corruptions import corruption, list_corruptions
from cofire.shift.measure import PAPER
from cofire.shift.plot import plot as draw
from cofire.shift.runs import shift_runs


def shift(
    run: Annotated[Path, typer.Argument(help="Folder of a run that `cofire train` made.", metavar="RUN")],
    compare: Annotated[
        list[Path] | None,
        typer.Option(help="Another run on the same data: dense, gated, pruned. May be repeated.", metavar="RUN"),
    ] = None,
    corruptions: Annotated[
        list[str] | None,
        typer.Option(
            "--corruption",
            help=f"One of {', '.join(list_corruptions())}; NAME=0.1,0.2 sets its severities. May be repeated. "
            f"Default: {' and '.join(PAPER)}, as in the paper.",
            metavar="NAME",
        ),
    ] = None,
    images: Annotated[
        int | None, typer.Option(min=1, help="How many test images, each class its share; default: all.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of what is random.")] = 0,
    classes: Annotated[bool, typer.Option("--classes", help="Also each class, at the highest severities.")] = False,
    out_file: Annotated[Path | None, typer.Option("--out", help="Write everything to this file, as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw Brier score and top-1 by severity: .svg, .png, .pdf.")] = None,
    as_json: AsJson = False,
) -> None:
    """Test images get worse: accuracy, calibration, cost and masks of runs under blur, noise and more."""
    plan = dict(map(_severities, corruptions or PAPER))
    if plot is not None:
        check_format(plot)  # raises now, not after the measuring
    result, table = shift_runs([run, *(compare or ())], plan, images=images, seed=seed)
    if out_file is not None:
        write_json(out_file, table)
    show(as_json, table, Group(result, *(result.per_class(name) for name in plan if classes)))
    if plot is not None:
        write_figure(draw(result), plot)


def _severities(text: str) -> tuple[str, tuple[float, ...]]:
    """``NAME`` or ``NAME=0.1,0.2`` as name and severities."""
    name, given, numbers = text.partition("=")
    own = corruption(name).severities
    try:
        return name, tuple(float(number) for number in numbers.split(",")) if given else own
    except ValueError:
        raise ConfigError(f"--corruption {name}= takes numbers separated by commas, got {numbers!r}") from None
