"""What training does to pictures: pure functions of pixels and of numbers drawn from a stream of their own.

Shapes: B pictures, C channels, H height, W width, T tries. A box is (top, left, height, width) in pixels.
"""

from __future__ import annotations

import hashlib
import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Augment = Literal["none", "crop", "crop-flip", "resized-crop-flip"]
_SHARE = (0.08, 1.0)  # of the picture's area that a random box covers
_RATIO = (3 / 4, 4 / 3)  # its width : height
_TRIES = 10


def stream(*key: int) -> torch.Generator:
    """A random stream of its own for each key; neighbouring keys give unrelated streams."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=4).digest()  # torch's CPU seeds have 32 bits
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


def crop_flip(pixels_BCHW: Tensor, top_B: Tensor, left_B: Tensor, flip_B: Tensor, pad: int) -> Tensor:
    """Each image padded with zeros, cut to its old size at its own corner, then mirrored where asked.

    Args:
        pixels_BCHW: any dtype.
        top_B: first row of the cut in the padded image, int64 in [0, 2 * pad].
        left_B: first column, likewise.
        flip_B: bool; True mirrors left and right.
        pad: zeros added on each side.

    Returns:
        a new tensor of the same shape and dtype.
    """
    b, c, h, w = pixels_BCHW.shape
    padded_BCP = F.pad(pixels_BCHW, (pad, pad, pad, pad)).flatten(2)
    column_W = torch.arange(w)
    column_BW = left_B[:, None] + torch.where(flip_B[:, None], column_W.flip(0), column_W)
    row_BH = top_B[:, None] + torch.arange(h)
    index_BHW = row_BH[:, :, None] * (w + 2 * pad) + column_BW[:, None, :]
    # One gather over flattened images crops and flips at once, several times faster than 4-d indexing.
    return padded_BCP.gather(2, index_BHW.view(b, 1, h * w).expand(b, c, h * w)).view(b, c, h, w)


def random_boxes(size_B2: Tensor, generator: torch.Generator) -> Tensor:
    """A random box for each picture, as Inception was trained: 8 to 100 % of its area, width : height 3/4 to 4/3.

    Area and ratio are drawn until the box fits, at most 10 times; then it is the largest of an allowed ratio.

    Args:
        size_B2: height and width of each picture, int64, at least 1.

    Returns:
        box_B4: int64, inside of its picture; a function of the sizes and of the generator alone.
    """
    size_2B = size_B2.double().T
    height_B, width_B = size_2B
    drawn_4TB = torch.rand(4, _TRIES, len(size_B2), generator=generator, dtype=torch.float64)
    area_TB = height_B * width_B * (_SHARE[0] + (_SHARE[1] - _SHARE[0]) * drawn_4TB[0])
    low, high = math.log(_RATIO[0]), math.log(_RATIO[1])
    ratio_TB = torch.exp(low + (high - low) * drawn_4TB[1])
    tried_2TB = torch.stack([area_TB / ratio_TB, area_TB * ratio_TB]).sqrt().round()
    largest_2B = torch.stack([height_B.minimum(width_B / _RATIO[0]), width_B.minimum(height_B * _RATIO[1])]).round()
    tried_2TB = torch.cat([tried_2TB, largest_2B[:, None]], 1)
    fits_TB = ((tried_2TB >= 1) & (tried_2TB <= size_2B[:, None])).all(0)
    fits_TB[-1] = True
    chosen_1B = fits_TB.int().argmax(0)[None]  # the first that fits
    box_2B = tried_2TB.gather(1, chosen_1B.expand(2, 1, -1)).squeeze(1).clamp(min=1)
    corner_2B = (drawn_4TB[2:, 0] * (size_2B - box_2B + 1)).floor()
    return torch.cat([corner_2B, box_2B]).long().T.contiguous()


def resized_crop(pixels_BCHW: Tensor, box_B4: Tensor) -> Tensor:
    """Each image's box, enlarged to the size of the image by bilinear interpolation: uint8 (B, C, H, W).

    Args:
        pixels_BCHW: uint8.
        box_B4: int64, inside of the image.
    """
    top_B, left_B, height_B, width_B = box_B4.T
    row_BHH = _resizing(top_B, height_B, pixels_BCHW.shape[2])[:, None]
    column_BWW = _resizing(left_B, width_B, pixels_BCHW.shape[3])[:, None]
    return (row_BHH @ pixels_BCHW.float() @ column_BWW.mT).round_().to(torch.uint8)


def _resizing(start_B: Tensor, length_B: Tensor, n: int) -> Tensor:
    """Weights (B, n, n) that stretch the pixels [start, start + length) of n to all n; a box is never shrunk."""
    place_N = torch.arange(n) + 0.5
    centre_BN = start_B[:, None] + place_N * length_B[:, None] / n
    # Beyond the middle of its outermost pixels a box goes on in their colour: what lies outside does not count.
    centre_BN = centre_BN.clamp((start_B + 0.5)[:, None], (start_B + length_B - 0.5)[:, None])
    return (1 - (centre_BN[:, :, None] - place_N).abs()).clamp_(min=0)


def flipped(pixels_BCHW: Tensor, flip_B: Tensor) -> Tensor:
    """The images, left and right mirrored where ``flip_B`` is True."""
    return torch.where(flip_B[:, None, None, None], pixels_BCHW.flip(3), pixels_BCHW)
