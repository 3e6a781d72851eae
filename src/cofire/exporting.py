"""``cofire export``: a run's model for other engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cofire.experiments.runs import run_card
from cofire.export import to_onnx
from cofire.gates.persistence import load
from cofire.shell import AsJson


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run that `cofire train` made.", metavar="RUN")],
    path: Annotated[Path, typer.Option("--out", "-o", help="The ONNX file to write, e.g. model.onnx.")],
    batch: Annotated[int | None, typer.Option(min=1, help="Images per call; default: any number.")] = None,
    as_json: AsJson = False,
) -> None:
    """A run's model as an ONNX file for other engines; a gated one with its gates as multiplications."""
    card = run_card(run)
    to_onnx(load(run), path, card.input_shape, batch=batch, card=card)
    if as_json:
        described = {"onnx": str(path), "input_shape": card.input_shape, "mean": card.mean, "std": card.std}
        typer.echo(json.dumps(described, indent=2))
    else:
        typer.echo(f"{path}: {card.input_shape}, pixels in [0, 1] less {list(card.mean)}, over {list(card.std)}")
