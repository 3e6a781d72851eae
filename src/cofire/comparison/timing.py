"""Milliseconds of the models of a comparison in the native engine, all in the same interleaved rounds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cofire.bench.rounds import Contestant, interleaved, pinned, spread
from cofire.data.images import AbstractImages
from cofire.errors import CofireError
from cofire.experiments.provenance import provenance
from cofire.files.atomic import read_json, write_json
from cofire.gates.persistence import load
from cofire.progress import progress
from cofire.runtime.engine import Engine, compile
from cofire.runtime.latency import mean_over_images

DENSE = "dense"
_WARM_UP = 5
_EACH = 3  # rounds of one image


def timed(path: Path, runs: Mapping[str, Path], images: AbstractImages, rounds: int) -> dict[str, Any]:
    """What ``path`` says if all ``runs`` are in it, else all are timed again, and it is written.

    One image per round, the same for all, one thread; each image has three rounds.

    Args:
        runs: name -> folder with a model; `DENSE` is what the others are compared with.

    Returns:
        ``rounds``, ``ms`` (name -> ``mean`` over images, median, p10, p90, and ``ratio`` to dense, of the means),
        ``refused`` (name -> why the engine does not run it) and the provenance.
    """
    if path.exists():
        known: dict[str, Any] = read_json(path)
        if known["rounds"] == rounds and runs.keys() <= {*known["ms"], *known["refused"]}:
            return known
    found = _measured(runs, images, rounds)
    write_json(path, found)
    return found


def _measured(runs: Mapping[str, Path], images: AbstractImages, rounds: int) -> dict[str, Any]:
    engines: dict[str, Engine] = {}
    refused: dict[str, str] = {}
    for name, folder in runs.items():
        try:
            engines[name] = compile(load(folder).eval(), images.shape)
        except CofireError as error:
            refused[name] = str(error)
    x_NCHW = images.normalise(images.pixels(torch.arange(min(-(-rounds // _EACH), len(images)))))
    place = [0]

    def contestant(engine: Engine) -> Contestant:
        return Contestant(lambda: engine(x_NCHW[place[0] : place[0] + 1]))

    def told(done: int) -> None:
        place[0] = done % len(x_NCHW)
        bar.update(task, completed=done)

    with progress("timing") as bar, pinned(1):
        task = bar.add_task("timing", total=rounds + _WARM_UP)
        contestants = {name: contestant(engine) for name, engine in engines.items()}
        seconds = interleaved(contestants, rounds, _WARM_UP, told=told) if engines else {}
    return {
        "provenance": provenance(),
        "rounds": rounds,
        "images": images.name,
        "ms": {name: _figures(own, seconds.get(DENSE), len(x_NCHW)) for name, own in seconds.items()},
        "refused": refused,
    }


def _figures(own: list[float], dense: list[float] | None, images: int) -> dict[str, float | None]:
    found, mean = spread([1e3 * value for value in own]), mean_over_images(own, images)
    ratio = mean / mean_over_images(dense, images) if dense else None
    return {"mean": 1e3 * mean, "median": found.median, "p10": found.p10, "p90": found.p90, "ratio": ratio}
