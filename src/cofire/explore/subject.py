"""What is explored: an engine, pictures to show it, and the model it came from where there is one.

Shapes: N pictures, C x H x W pixels.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from cofire import data, zoo
from cofire.data import AbstractImages
from cofire.data.decoding import centre, channels_first, open_rgb
from cofire.errors import CofireError, ConfigError, DataError
from cofire.experiments.recipes import read_run
from cofire.experiments.runs import compile_run, read_sets, run_card
from cofire.explore.knob import Knob, knob_of
from cofire.files.card import Card
from cofire.gates.gating import GatedModel
from cofire.gates.persistence import load
from cofire.runtime.engine import Engine, load_program
from cofire.runtime.observed import observe

logger = logging.getLogger("cofire")
Pixels = NDArray[np.uint8]
ZOO = "zoo:"
PICTURES = 60
MAX_PIXELS = 50_000_000  # of a picture that is dropped on the page


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """All that the page shows.

    Args:
        name: as the user gave it.
        engine: takes pixels in [0, 1].
        pixels_NCHW: pictures to pick from, cheapest first.
        macs_N: what each of them costs, ascending.
        images: where the pictures come from.
        knob: what can be moved.
        gated: the model, for heatmaps; None for a program, and for a model without gates.
        card: of the model.
    """

    name: str
    engine: Engine
    pixels_NCHW: Pixels
    macs_N: NDArray[np.int64]
    images: str
    knob: Knob
    gated: GatedModel | None
    card: Card | None


def open_subject(what: str, pictures: int = PICTURES, images: Path | None = None) -> Subject:
    """A run folder, a program, or ``zoo:NAME``; with pictures of the folder ``images``, else of the run's test set."""
    run = zoo.folder(what.removeprefix(ZOO)) if what.startswith(ZOO) else Path(what)
    if not run.is_dir():
        engine, card, model = load_program(run), None, None
    else:
        engine, card, model = compile_run(run), run_card(run), load(run)
    _require_pictures(engine)
    shown = _pictures(run, engine.input_shape, pictures, images)
    return _subject(what, engine, card, model if isinstance(model, GatedModel) else None, *shown)


def _require_pictures(engine: Engine) -> None:
    channels, height, width = engine.input_shape
    if height != width or channels not in (1, 3) or [len(shape) for shape in engine.output_shapes] != [1]:
        raise ConfigError(
            f"the page needs a model of square pictures with 1 or 3 channels that gives a vector, got "
            f"{engine.input_shape} -> {engine.output_shapes}; look at it with `cofire analyze`"
        )


def _subject(
    name: str, engine: Engine, card: Card | None, gated: GatedModel | None, pixels_NCHW: Pixels, images: str
) -> Subject:
    x_NCHW = as_input(pixels_NCHW)
    engine(x_NCHW)
    macs_N = np.stack([*engine.last_macs.values()]).sum(0)
    order_N = np.argsort(macs_N, kind="stable")
    return Subject(
        name=name,
        engine=engine,
        pixels_NCHW=pixels_NCHW[order_N],
        macs_N=macs_N[order_N],
        images=images,
        knob=knob_of(engine, observe(engine, x_NCHW)),
        gated=gated,
        card=card,
    )


def as_input(pixels_NCHW: Pixels) -> NDArray[np.float32]:
    """Pixels in [0, 1]."""
    return pixels_NCHW.astype(np.float32) / np.float32(255)


def read_picture(path: Path, shape: tuple[int, int, int]) -> Pixels:
    """A picture from outside, (C, H, W), resized and cropped to the model's input.

    Raises:
        DataError: it is no picture, or a huge one.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            if image.width * image.height > MAX_PIXELS:
                raise DataError(
                    f"a picture must have at most {MAX_PIXELS:,} pixels, got {image.width} x {image.height}"
                )
        return _fitted(channels_first(centre(open_rgb(path), shape[1], shape[1])), shape[0])
    except DataError:
        raise
    except Exception as error:  # each of Pillow's decoders has its own
        raise DataError(f"{path.name} is not a picture that can be read") from error


def _pictures(run: Path, shape: tuple[int, int, int], count: int, folder: Path | None) -> tuple[Pixels, str]:
    """Of the folder or the run's test set; where that is not here, the digits that come with scikit-learn."""
    if folder is not None:
        found = data.folder(folder, size=shape[1], labelled=False)
        return np.stack([_fitted(pixels_CHW, shape[0]) for pixels_CHW in _spread(found, count)]), str(folder)
    if run.is_dir():
        try:
            test = read_sets(read_run(run)).test
        except CofireError as error:
            logger.warning("digits stand in for the model's own pictures: %s; give --images FOLDER", error)
        else:
            return _spread(test, count), f"{test.name}, test set"
    digits = data.digits()[1].pixels(torch.arange(count))
    larger = torch.nn.functional.interpolate(digits.float(), shape[1:], mode="nearest").to(torch.uint8)
    return np.repeat(larger.numpy(), shape[0], 1), "digits, which may not be what the model was made for"


def _spread(images: AbstractImages, count: int) -> Pixels:
    chosen = torch.linspace(0, len(images) - 1, min(count, len(images))).long()
    pixels_NCHW: Pixels = images.pixels(chosen).numpy()
    return pixels_NCHW


def _fitted(pixels_CHW: Pixels, channels: int) -> Pixels:
    """Grey for a model that takes one channel."""
    return pixels_CHW if channels == 3 else pixels_CHW.mean(0, keepdims=True).astype(np.uint8)
