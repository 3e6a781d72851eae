"""Pictures without labels, from a folder or a NumPy file, as a model expects them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch

from cofire.data.images import AbstractImages, Images
from cofire.data.sources import folder
from cofire.errors import DataError, FileError
from cofire.files.card import Card


def read_pictures(place: Path, card: Card, most: int) -> AbstractImages:
    """At most ``most`` pictures of a place, drawn evenly from it, as ``card`` says.

    Args:
        place: a folder with pictures at any depth, whose middles are cut out; or a ``.npy`` file of uint8 pixels,
            (N, C, H, W) or (N, H, W, C), of the size that the model takes.
    """
    found = _from_array(place, card) if place.suffix == ".npy" else _from_folder(place, card)
    if len(found) <= most:
        return found
    return found.take(torch.linspace(0, len(found) - 1, most).long())


def _from_folder(place: Path, card: Card) -> Images:
    channels, height, width = card.input_shape
    if channels not in (1, 3) or height != width:
        raise DataError(
            f"pictures need a model with square inputs of 1 or 3 channels, got {card.input_shape}; give a .npy file"
        )
    colours = (0.0,) * 3, (1.0,) * 3  # those of the card follow, for as many channels as it has
    found = folder(place, height, labelled=False, unreadable="skip", mean=colours[0], std=colours[1])
    pixels = found.pixels_NCHW
    if channels == 1:
        pixels = pixels.float().mean(1, keepdim=True).round().to(torch.uint8)
    return dataclasses.replace(found, pixels_NCHW=pixels, mean=card.mean, std=card.std)


def _from_array(place: Path, card: Card) -> Images:
    try:
        array = np.load(place, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise FileError(f"{place} must be a NumPy file of pictures: {error}") from error
    channels, height, width = card.input_shape
    if array.ndim == 4 and array.shape[1:] == (height, width, channels):
        array = array.transpose(0, 3, 1, 2)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[1:] != card.input_shape or not len(array):
        wanted = f"(N, {channels}, {height}, {width}) or (N, {height}, {width}, {channels})"
        raise DataError(f"{place} must hold uint8 pixels {wanted}, got {array.dtype} {array.shape}")
    pixels = torch.from_numpy(np.ascontiguousarray(array))
    return Images(pixels_NCHW=pixels, label_N=None, classes=(), mean=card.mean, std=card.std, name=place.stem)
