"""``cofire compare``: the command line of `compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cofire.comparison.compare import Where
from cofire.comparison.compare import compare as run_comparison
from cofire.comparison.contenders import contenders


def compare(
    recipes: Annotated[
        list[Path] | None,
        typer.Argument(help="Recipes without [gate] and [prune]; nothing: list the methods.", metavar="RECIPE..."),
    ] = None,
    methods: Annotated[str, typer.Option(help="all, static, dynamic, or names with commas between them.")] = "all",
    macs: Annotated[float, typer.Option(help="Share of the MACs that may REMAIN; 0.5 is half.")] = 0.5,
    seeds: Annotated[int, typer.Option(min=1, help="Runs per method.")] = 1,
    epochs: Annotated[int | None, typer.Option(min=0, help="Of each method; default: the recipe's.")] = None,
    out_folder: Annotated[
        Path, typer.Option("--out", help="Where runs go; an interrupted comparison there goes on.")
    ] = Path("runs/compare"),
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Change a recipe value, e.g. train.lr=0.02. May be repeated.")
    ] = None,
    on: Annotated[
        Where, typer.Option(help="ray: a task per run on the cluster of $RAY_ADDRESS; --out on shared storage.")
    ] = "here",
    twins: Annotated[
        bool, typer.Option("--twins", help="Also train the static twin of methods that choose filters; twice the time.")
    ] = False,
    rounds: Annotated[
        int, typer.Option(min=0, help="Of timing in the native engine, three for each image; 0: none.")
    ] = 150,
    known: Annotated[
        Path | None,
        typer.Option(help="A comparison.json under the same recipe: what it has a result of is not run again."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines in place of tables.")] = False,
) -> None:
    """Several methods at one budget, from one baseline, under one recipe: accuracy, MACs, milliseconds, side by side.

    For example `cofire compare recipes/digits/resnet8_compare.toml --methods static --macs 0.5`: every static method
    trains from the same weights for the same epochs, the best epoch on validation images is tested, and a table and
    a figure show accuracy against executed MACs and against milliseconds in the engine. Killed and called again, it
    goes on; called twice at the same time, the two share the work.
    """
    if not recipes:
        sorts = {name: one.sort for name, one in contenders().items()}
        typer.echo(json.dumps(sorts, indent=2) if as_json else "\n".join(f"{k:14} {v}" for k, v in sorts.items()))
        return
    found = run_comparison(
        recipes,
        methods=methods,
        macs=macs,
        seeds=seeds,
        epochs=epochs,
        out=out_folder,
        overrides=overrides or (),
        on=on,
        twins=twins,
        rounds=rounds,
        known=known,
        say=lambda text: Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True),
    )
    typer.echo(json.dumps(found.to_json(), indent=2) if as_json else str(found))
