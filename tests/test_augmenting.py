"""Random resized crops: boxes as they must be drawn, pixels as PyTorch and Pillow resize an explicit crop."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cofire import data
from cofire.data import random_boxes, resized_crop
from cofire.data.augmenting import flipped, stream

# Shapes: B pictures, C channels, H height, W width.


def noise(b: int, h: int, w: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (b, 3, h, w), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def boxes(height: int, width: int, n: int, seed: int = 0) -> Tensor:
    return random_boxes(torch.tensor([[height, width]]).expand(n, 2), stream(seed))


def slow_size(height: int, width: int) -> tuple[int, int]:
    """Height and width of one random box, after its definition; a picture in which some box fits."""
    while True:
        area, ratio = (
            height * width * random.uniform(0.08, 1),
            math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3))),
        )
        box = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if box[0] <= height and box[1] <= width:
            return box


@given(h=st.integers(1, 20), w=st.integers(1, 20), seed=st.integers(0, 1000))
def test_a_box_is_resized_as_pytorch_resizes_the_explicit_crop(h: int, w: int, seed: int) -> None:
    pixels_BCHW, box_B4 = noise(3, h, w, seed), boxes(h, w, 3, seed)
    got = resized_crop(pixels_BCHW, box_B4)
    assert got.dtype == torch.uint8
    for found, image, (top, left, height, width) in zip(got, pixels_BCHW, box_B4.tolist(), strict=True):
        cut = image[None, :, top : top + height, left : left + width].double()
        want = F.interpolate(cut, size=(h, w), mode="bilinear", align_corners=False)[0]
        assert (found - want).abs().max() < 0.5 + 1e-3


def test_a_box_is_resized_as_pillow_resizes_it() -> None:
    pillow = pytest.importorskip("PIL.Image")
    pixels_BCHW, box_B4 = noise(8, 32, 24), boxes(32, 24, 8)
    for found, image, (top, left, height, width) in zip(
        resized_crop(pixels_BCHW, box_B4), pixels_BCHW, box_B4.tolist(), strict=True
    ):
        picture = pillow.fromarray(image.permute(1, 2, 0).contiguous().numpy())
        picture = picture.crop((left, top, left + width, top + height)).resize((24, 32), pillow.Resampling.BILINEAR)
        want = torch.from_numpy(np.asarray(picture).transpose(2, 0, 1).astype(np.int64))
        assert (found.long() - want).abs().max() <= 1


def test_the_whole_picture_as_a_box_is_the_picture() -> None:
    pixels_BCHW = noise(2, 7, 9)
    assert torch.equal(resized_crop(pixels_BCHW, torch.tensor([[0, 0, 7, 9]] * 2)), pixels_BCHW)


@given(h=st.integers(1, 400), w=st.integers(1, 400), seed=st.integers(0, 1000))
def test_every_box_lies_inside_of_its_picture(h: int, w: int, seed: int) -> None:
    top, left, height, width = boxes(h, w, 16, seed).T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (height >= 1).all()
    assert (width >= 1).all()
    assert (top + height <= h).all()
    assert (left + width <= w).all()


def test_area_and_ratio_fill_their_ranges() -> None:
    random.seed(0)
    top, left, height, width = boxes(300, 400, 4000).double().T
    share, ratio = height * width / (300 * 400), width / height
    assert 0.078 < share.min() < 0.09
    assert 0.95 < share.max() <= 1
    assert 0.74 < ratio.min() < 0.76
    assert 1.32 < ratio.max() < 1.35
    assert abs(ratio[share < 0.5].log().mean()) < 0.02  # small boxes always fit: wide ones are as many as tall ones
    slow = torch.tensor([slow_size(300, 400) for _ in range(4000)], dtype=torch.float64)
    assert abs(slow.prod(1).mean() / (300 * 400) - share.mean()) < 0.015
    assert abs(slow[:, 1].mean() - width.mean()) < 5
    place = (top / (300 - height).clamp(min=1), left / (400 - width).clamp(min=1))
    assert all(0.47 < each.mean() < 0.53 for each in place)
    assert all((each == 0).any() for each in (top, left))


@pytest.mark.parametrize(("size", "largest"), [((10, 1000), (10, 13)), ((1000, 12), (16, 12))])
def test_where_no_box_fits_it_is_the_largest_of_an_allowed_ratio(
    size: tuple[int, int], largest: tuple[int, int]
) -> None:
    found = {tuple(box[2:]) for box in boxes(*size, 200).tolist()}
    assert largest in found
    assert max(found) == largest


def test_boxes_are_a_function_of_the_stream_and_each_picture_has_its_own() -> None:
    assert torch.equal(boxes(50, 60, 9, seed=1), boxes(50, 60, 9, seed=1))
    assert not torch.equal(boxes(50, 60, 9, seed=1), boxes(50, 60, 9, seed=2))
    assert len(set(map(tuple, boxes(50, 60, 9).tolist()))) == 9


def test_mirroring_is_for_those_asked() -> None:
    pixels_BCHW = noise(2, 3, 4)
    got = flipped(pixels_BCHW, torch.tensor([True, False]))
    assert torch.equal(got[0], pixels_BCHW[0].flip(2))
    assert torch.equal(got[1], pixels_BCHW[1])


def test_a_loader_cuts_boxes_and_mirrors_about_half_of_the_images() -> None:
    """Images that rise from left to right, whatever is cut out of them, fall only where they are mirrored."""
    rising = torch.arange(0, 160, 10, dtype=torch.uint8).expand(64, 3, 16, 16).contiguous()
    images = data.Images(pixels_NCHW=rising, label_N=None, classes=(), mean=(0.0,) * 3, std=(1.0,) * 3, name="rising")
    x_BCHW, _ = next(iter(images.loader(64, train=True, augment="resized-crop-flip")))
    steps = (x_BCHW[..., 1:] - x_BCHW[..., :-1])[:, 0]
    falling = (steps <= 0).all((1, 2))
    assert ((steps >= 0).all((1, 2)) | falling).all()
    assert 16 < int(falling.sum()) < 48
    spans = (x_BCHW.amax((1, 2, 3)) - x_BCHW.amin((1, 2, 3))).unique()
    assert len(spans) > 5  # boxes of many widths
