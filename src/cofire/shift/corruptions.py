"""Pictures -> worse pictures: a pure function of the picture, its place in the set, a severity and a seed each.

Severity 0 is the picture as it is, and the higher the worse; what it counts is the corruption's ``unit``.

Shapes: B pictures of a batch, C channels, H height, W width.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cofire.data.augmenting import stream
from cofire.errors import ConfigError, DataError, unknown
from cofire.extras import require

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, kw_only=True, eq=False)
class Pictures:
    """A batch of pictures, and what a corruption may know beside their pixels.

    Args:
        pixels_BCHW: float32; black is 0, white is 1.
        index_B: place of each picture in its set, int64.
        std: of the set's normalisation, one per channel: how much of a pixel's range is 1 for the network.
        seed: of everything random.
    """

    pixels_BCHW: Tensor
    index_B: Tensor
    std: tuple[float, ...]
    seed: int

    def normal(self) -> Tensor:
        """Standard normal values, float32 (B, C, H, W): those of a picture follow from seed and index alone."""
        shape = self.pixels_BCHW.shape[1:]
        return torch.stack([torch.randn(shape, generator=stream(self.seed, int(i))) for i in self.index_B])


Worsen = Callable[[Pictures, float], Tensor]
"""(pictures, severity above 0) -> their new pixels, float32 (B, C, H, W)."""


@dataclass(frozen=True, kw_only=True)
class Corruption:
    """One way for pictures to get worse.

    Args:
        worsen: what it does.
        severities: those of a table, rising.
        unit: what a severity counts.
        highest: largest severity that means anything.
    """

    name: str
    worsen: Worsen
    severities: tuple[float, ...]
    unit: str
    highest: float = math.inf

    def __call__(self, pictures: Pictures, severity: float) -> Tensor:
        """The pixels of worse pictures, float32 (B, C, H, W); with severity 0 those given."""
        self.check(severity)
        return self.worsen(pictures, severity) if severity else pictures.pixels_BCHW

    def check(self, severity: float) -> None:
        """Raise unless ``severity`` is finite and in [0, highest]."""
        if not (math.isfinite(severity) and 0 <= severity <= self.highest):
            top = "a finite number of at least 0" if math.isinf(self.highest) else f"in 0..{self.highest:g}"
            raise ConfigError(f"a severity of {self.name!r} ({self.unit}) must be {top}, got {severity}")


_corruptions: dict[str, Corruption] = {}


def register_corruption(
    name: str, *, severities: tuple[float, ...], unit: str, highest: float = math.inf
) -> Callable[[Worsen], Worsen]:
    """Decorator: ``worsen(pictures, severity) -> pixels_BCHW`` becomes the corruption ``name``; see `Corruption`."""
    if name in _corruptions:
        raise ConfigError(f"a corruption named {name!r} is registered already")

    def register(worsen: Worsen) -> Worsen:
        made = Corruption(name=name, worsen=worsen, severities=severities, unit=unit, highest=highest)
        for severity in severities:
            made.check(severity)
        _corruptions[name] = made
        return worsen

    return register


def list_corruptions() -> list[str]:
    """Names of all corruptions."""
    return list(_corruptions)


def corruption(name: str) -> Corruption:
    """The corruption of that name."""
    if name not in _corruptions:
        raise unknown("corruption", name, _corruptions)
    return _corruptions[name]


BLURS = (0.5, 0.7, 0.9, 1.09, 1.27, 1.45)  # the paper's
NOISES = (0.0, 0.02, 0.05, 0.11, 0.14, 0.20)


@register_corruption("blur", severities=BLURS, unit="sigma in pixels, 3x3 kernel")
def _blur(pictures: Pictures, severity: float) -> Tensor:
    return blurred(pictures.pixels_BCHW, severity, radius=1)


@register_corruption("blur-full", severities=BLURS, unit="sigma in pixels, kernel of 4 sigma to each side")
def _blur_full(pictures: Pictures, severity: float) -> Tensor:
    return blurred(pictures.pixels_BCHW, severity, radius=int(4 * severity + 0.5))


@register_corruption("noise", severities=NOISES, unit="sigma of the normalised input")
def _noise(pictures: Pictures, severity: float) -> Tensor:
    return pictures.pixels_BCHW + severity * torch.tensor(pictures.std).view(-1, 1, 1) * pictures.normal()


@register_corruption("noise-pixels", severities=NOISES, unit="sigma of pixels in 0..1, clipped")
def _noise_pixels(pictures: Pictures, severity: float) -> Tensor:
    return (pictures.pixels_BCHW + severity * pictures.normal()).clamp(0, 1)


# The further severities are those of CIFAR-10-C (Hendrycks and Dietterich, 2019), counted from 0 upwards.


@register_corruption(
    "brightness", severities=(0.05, 0.1, 0.15, 0.2, 0.3), unit="added to the value of HSV, 0..1", highest=1
)
def _brightness(pictures: Pictures, severity: float) -> Tensor:
    value_B1HW = pictures.pixels_BCHW.amax(1, keepdim=True)
    brighter_B1HW = (value_B1HW + severity).clamp(max=1)
    black = value_B1HW <= 0  # has no hue to keep
    return torch.where(black, brighter_B1HW, pictures.pixels_BCHW * (brighter_B1HW / value_B1HW.where(~black, 1.0)))


@register_corruption("contrast", severities=(0.25, 0.5, 0.6, 0.7, 0.85), unit="share of the contrast lost", highest=1)
def _contrast(pictures: Pictures, severity: float) -> Tensor:
    return pictures.pixels_BCHW.lerp(pictures.pixels_BCHW.mean((2, 3), keepdim=True), severity)


@register_corruption("jpeg", severities=(20, 35, 42, 50, 60), unit="100 - JPEG quality", highest=99)
def _jpeg(pictures: Pictures, severity: float) -> Tensor:
    if severity != round(severity):
        raise ConfigError(f"a severity of 'jpeg', 100 - quality, must be a whole number, got {severity}")

    def through_jpeg(image: Image) -> Image:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=100 - round(severity))
        return pillow().open(file, formats=("JPEG",))  # type: ignore[no-any-return]

    return one_by_one(pictures, through_jpeg)


@register_corruption(
    "pixelate", severities=(0.05, 0.1, 0.15, 0.25, 0.35), unit="share of height and width lost", highest=1
)
def _pixelate(pictures: Pictures, severity: float) -> Tensor:
    def in_blocks(image: Image) -> Image:
        box = pillow().Resampling.BOX
        fewer = [max(1, int(side * (1 - severity))) for side in image.size]
        return image.resize(fewer, box).resize(image.size, box)

    return one_by_one(pictures, in_blocks)


def pillow() -> ModuleType:
    """Pillow, or an error that says how to get it."""
    return require("PIL.Image", package="pillow", extra="data")


def one_by_one(pictures: Pictures, change: Callable[[Image], Image]) -> Tensor:
    """Each picture, rounded to bytes, through a function of Pillow's images that keeps the size."""
    pixels_BHWC = (255 * pictures.pixels_BCHW).round().clamp(0, 255).byte().permute(0, 2, 3, 1).contiguous().numpy()
    channels = pixels_BHWC.shape[3]
    if channels not in (1, 3):
        raise DataError(f"Pillow is for pictures of 1 or 3 channels, got {channels}")
    images = (pillow().fromarray(pixels_HWC[:, :, 0] if channels == 1 else pixels_HWC) for pixels_HWC in pixels_BHWC)
    changed_BHWC = np.stack([np.asarray(change(image)) for image in images]).reshape(pixels_BHWC.shape)
    return torch.from_numpy(changed_BHWC).permute(0, 3, 1, 2).float().div(255).contiguous()


def blurred(pixels_BCHW: Tensor, sigma: float, radius: int) -> Tensor:
    """Each channel under a Gaussian cut off at ``radius`` pixels and scaled to sum 1; edges are mirrored.

    Args:
        sigma: in pixels, above 0.
        radius: at least 0, and below height and width.
    """
    height, width = pixels_BCHW.shape[2:]
    if radius >= min(height, width):
        size = f"{height}x{width}"
        raise DataError(f"a blur that reaches {radius} pixels needs larger pictures than {size}; lower the severity")
    bell = [math.exp(-0.5 * (offset / sigma) ** 2) for offset in range(-radius, radius + 1)]
    weights = [value / sum(bell) for value in bell]
    # Sums of moved pictures, not convolutions: those may give other last bits for other batch sizes.
    padded = F.pad(pixels_BCHW, (radius, radius, radius, radius), mode="reflect")
    rows = torch.zeros_like(padded[:, :, :height])
    for first, weight in enumerate(weights):
        rows += weight * padded[:, :, first : first + height]
    blurred_BCHW = torch.zeros_like(pixels_BCHW)
    for first, weight in enumerate(weights):
        blurred_BCHW += weight * rows[..., first : first + width]
    return blurred_BCHW
