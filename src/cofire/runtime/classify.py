"""One picture through an engine, as ``cofire run`` does it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from cofire.data.decoding import decode, middle
from cofire.errors import ConfigError
from cofire.runtime.engine import Engine

ROUNDS = 5


@dataclass(frozen=True)
class Answer:
    """What a program says of a picture: the best classes with their probabilities, MACs executed, milliseconds."""

    picture: str
    classes: list[int]
    names: list[str]
    probabilities: list[float]
    macs: int
    milliseconds: float

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        best = ", ".join(f"{name} ({100 * p:.1f} %)" for name, p in zip(self.names, self.probabilities, strict=True))
        return f"{self.picture}: {best}; {self.macs:,} MACs in {self.milliseconds:.2f} ms"


def name_of(number: int, names: Sequence[str]) -> str:
    """Of a class; its number where it has no name."""
    return names[number] if number < len(names) else f"class {number}"


def pixels_of(pictures: Sequence[Path], shape: tuple[int, int, int]) -> Tensor:
    """Picture files as (B, C, H, W) in [0, 1], resized and cropped to ``shape``."""
    channels, height, width = shape
    if height != width or channels not in (1, 3):
        raise ConfigError(
            f"pictures need a program with square inputs of 1 or 3 channels, got {shape}; call the engine from Python "
            "instead"
        )
    named = [(str(picture), picture) for picture in pictures]
    for folder in (picture for picture in pictures if picture.is_dir()):
        raise ConfigError(f"{folder} is a folder; name its pictures, e.g. {folder}/*.jpg")
    pixels, _ = decode(named, height, lambda image: middle(image, height), way_out="it must be a JPEG, PNG or the like")
    x = pixels.float() / 255
    return x if channels == 3 else x.mean(1, keepdim=True)


def classify(engine: Engine, picture: Path, threads: int, top: int) -> Answer:
    """The ``top`` classes of a picture file, resized and cropped to the engine's input as in a folder of pictures.

    The time is the least of a few calls, without reading the file.
    """
    if len(engine.program.output_shape) != 1:
        raise ConfigError(
            f"a class needs a program with a vector as output, got {engine.program.output_shape}; call the engine from "
            "Python instead"
        )
    x = pixels_of([picture], engine.input_shape).numpy()
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        logits = engine(x, threads)[0].astype(np.float64)
        seconds.append(time.perf_counter() - begin)
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    order = np.argsort(-shares, kind="stable")[:top]
    return Answer(
        picture=str(picture),
        classes=order.tolist(),
        names=[name_of(c, engine.classes) for c in order.tolist()],
        probabilities=shares[order].tolist(),
        macs=int(sum(macs[0] for macs in engine.last_macs.values())),
        milliseconds=1e3 * min(seconds),
    )
