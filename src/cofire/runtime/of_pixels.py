"""A model and its card -> the engine that takes pixels in [0, 1]."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from cofire.data.folders import existing, pictures_below
from cofire.files.card import Card
from cofire.runtime.classify import pixels_of
from cofire.runtime.engine import Engine
from cofire.runtime.lowering import lower
from cofire.runtime.program import normalised
from cofire.runtime.quantized import IMAGES
from cofire.runtime.quantizing import quantized_program


def of_pixels(model: nn.Module, card: Card, int8: Path | None = None) -> Engine:
    """The engine of ``model``, normalising as ``card`` says; in int8 if there is a folder of pictures to fit it to.

    Of the card the program keeps what people ask it for: the names of classes, and the data set.
    """
    kept = {"classes": list(card.classes), "data": card.data}
    program = normalised(lower(model, card.input_shape), card.mean, card.std)
    program = replace(program, card={key: value for key, value in kept.items() if value})
    if int8 is not None:
        pictures = pictures_below(existing(int8))
        few = pictures[:: max(1, len(pictures) // IMAGES)][:IMAGES]  # from all over the folder
        program = quantized_program(program, [pixels_of(few, card.input_shape)], keep=())
    return Engine(program)
