"""``cofire analyze`` and ``cofire report``: the command line of the analyses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cofire.analysis.page import write_page
from cofire.analysis.study import IMAGES, find_dense, open_run, read_results, study
from cofire.shell import AsJson, show

RunFolder = Annotated[Path, typer.Argument(help="Folder of a run that `cofire train` made.", metavar="RUN")]
NumImages = Annotated[int, typer.Option("--images", min=1, help="How many test images to look at, at most.")]
UnitNames = Annotated[
    list[str] | None,
    typer.Option("--unit", help="Whose responses and heatmaps to show, see `cofire info RUN`. May be repeated."),
]


def analyze(
    run: RunFolder,
    out_folder: Annotated[Path, typer.Option("--out", help="Where figures (.svg, .png), values and arrays go.")],
    images: NumImages = IMAGES,
    units: UnitNames = None,
    as_json: AsJson = False,
) -> None:
    """Figures and arrays of what a run's gates do: routes, core filters, cost per image and class, responses."""
    found = study(open_run(run, images), units=units or ())
    found.write(out_folder)
    show(
        as_json,
        {"folder": str(out_folder), "figures": [panel.name for panel in found.panels]},
        f"{len(found.panels)} figures (.svg, .png), values.json and arrays.safetensors in {out_folder}; "
        f"as one page: cofire report {run}",
    )


def report(
    run: RunFolder,
    compare: Annotated[
        list[Path] | None, typer.Option(help="Further runs for the summary and the trade-off. May be repeated.")
    ] = None,
    out_file: Annotated[Path, typer.Option("--out", help="The page to write.")] = Path("report.html"),
    images: NumImages = IMAGES,
    units: UnitNames = None,
    as_json: AsJson = False,
) -> None:
    """One HTML file about a run: summary, all figures with their values, recipe, provenance, commands."""
    opened = open_run(run, images)
    found = study(opened, units=units or ())
    dense = find_dense(opened)
    folders = [run, *(compare or ()), *([dense] if dense else ())]
    command = ["cofire", "report", str(run), *(word for other in compare or () for word in ("--compare", str(other)))]
    write_page(out_file, found, read_results(folders), [*command, "--out", str(out_file)])
    show(as_json, {"page": str(out_file)}, f"{out_file}: open it in any browser; it needs no network")
