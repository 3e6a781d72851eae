"""``cofire compile``: a run, or an ONNX file, as a program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cofire.errors import ConfigError
from cofire.experiments import runs
from cofire.runtime.of_pixels import of_pixels
from cofire.shell import AsJson, show
from cofire.speedup.command import Mean, Size, Std, numbers
from cofire.speedup.models import is_file, model_of_file


def compile(
    what: Annotated[
        Path, typer.Argument(help="Folder of a run that `cofire train` made, or an .onnx file.", metavar="RUN")
    ],
    path: Annotated[Path, typer.Option("--out", "-o", help="The program file to write, e.g. model.cofire.")],
    int8: Annotated[bool, typer.Option("--int8", help="Compute in int8, fitted to the pictures of --images.")] = False,
    images: Annotated[
        Path | None, typer.Option(help="A folder of pictures like those to come; needs no labels.", metavar="FOLDER")
    ] = None,
    observe: Annotated[
        int, typer.Option(min=0, help="Also run so many training images, for `cofire serve`: budgets and drift.")
    ] = 0,
    size: Size = None,
    mean: Mean = "",
    std: Std = "",
    as_json: AsJson = False,
) -> None:
    """A model as a program for the native engine. It takes pixels in [0, 1]; normalising is part of it.

    An ONNX file is dense, but for one that `cofire export` wrote of a gated run. It does not say how pixels are
    normalised, unless cofire wrote it: give --mean and --std if they are not those of ImageNet.
    """
    if int8 != (images is not None):
        raise ConfigError("--int8 needs --images FOLDER, pictures that it is fitted to, and --images needs --int8")
    if is_file(what):
        if observe:
            raise ConfigError("--observe needs a run, which knows its training images")
        named = model_of_file(what, size=size, mean=numbers("mean", mean), std=numbers("std", std))
        engine, card = of_pixels(named.model, named.card, images), named.card
    else:
        if size or mean or std:
            raise ConfigError("--size, --mean and --std are for ONNX files; a run knows its own")
        engine, card = runs.compile_run(what, images), runs.run_card(what)
    engine.save(path)
    if observe:
        runs.observe_run(what, engine, path, observe)
    described = {
        "program": str(path),
        "kernel": engine.kernel,
        "input_shape": list(engine.input_shape),
        "mean": list(card.mean),
        "std": list(card.std),
        "gated": bool(engine.groups),
    }
    kind = "gated" if engine.groups else "dense"
    show(
        as_json,
        described,
        f"{path}: {kind}, {engine.input_shape} on kernels {engine.kernel}, pixels less {list(card.mean)}, over "
        f"{list(card.std)}; try it: cofire run {path} PICTURE",
    )
