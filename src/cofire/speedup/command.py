"""``cofire speedup``: the command line of `speedup`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from cofire.errors import ConfigError
from cofire.experiments.provenance import provenance
from cofire.files.atomic import write_json
from cofire.gates.persistence import save
from cofire.runtime.of_pixels import of_pixels
from cofire.shell import output
from cofire.speedup.measure import Speedup
from cofire.speedup.models import SIZE, Named, named_model
from cofire.speedup.pictures import read_pictures
from cofire.speedup.whole import speedup as make_faster

PROGRAM = "model.cofire"
Size = Annotated[int | None, typer.Option(min=1, help=f"Height and width of pictures, if not {SIZE}.")]
Mean = Annotated[str, typer.Option(help="Of the normalisation of pixels in [0, 1], e.g. 0.5,0.5,0.5.")]
Std = Annotated[str, typer.Option(help="The same.")]


def speedup(
    model: Annotated[
        str,
        typer.Argument(
            help="A run or model folder; a dense .onnx file; zoo:NAME; a backbone, timm:NAME or torchvision:NAME with "
            "--weights; or MODULE:FUNCTION, which is imported and called.",
            metavar="MODEL",
        ),
    ],
    images: Annotated[Path, typer.Option(help="Folder of pictures at any depth, or a .npy file; no labels needed.")],
    macs: Annotated[float | None, typer.Option(help="Share of the MACs that may REMAIN; 0.7 saves 30 %.")] = None,
    latency_ms: Annotated[
        float | None, typer.Option(help="Or milliseconds per picture in the native engine on this machine.")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="File of weights, or published:NAME, of a named network.")] = None,
    distill: Annotated[int, typer.Option(min=0, help="Then so many epochs that follow the dense network.")] = 0,
    out_folder: Annotated[Path | None, typer.Option("--out", help="Where model, card, program and figures go.")] = None,
    most: Annotated[int, typer.Option(min=10, help="Pictures to use at most, one in five of them for testing.")] = 2000,
    size: Size = None,
    mean: Mean = "",
    std: Std = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines in place of tables.")] = False,
) -> None:
    """From a trained network and a folder of pictures to a faster program; no training, no labels."""
    named = named_model(model, weights, size=size, mean=numbers("mean", mean), std=numbers("std", std))
    pictures = read_pictures(images, named.card, most)
    found = make_faster(named.model, pictures.loader(50), macs=macs, latency_ms=latency_ms, distill=distill, most=most)
    if out_folder is not None:
        _write(found, named, out_folder, pictures.name)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
        return
    console = output()
    console.print(found, markup=False)
    if out_folder is not None:
        program = out_folder / PROGRAM
        console.print(f"model and figures in {out_folder}; try it: cofire run {program} PICTURE", soft_wrap=True)


def _write(found: Speedup, named: Named, folder: Path, data: str) -> None:
    card = dataclasses.replace(named.card, data=named.card.data or data, macs=round(found.macs * found.dense_macs))
    save(found.model, folder, card)
    of_pixels(found.model, card).save(folder / PROGRAM)
    write_json(folder / "speedup.json", {"provenance": provenance(), **found.to_json()})


def numbers(name: str, text: str) -> tuple[float, ...] | None:
    """Those of an option, separated by commas; None if it is empty."""
    try:
        return tuple(float(part) for part in text.split(",")) if text else None
    except ValueError:
        raise ConfigError(f"--{name} takes numbers separated by commas, got {text!r}") from None
