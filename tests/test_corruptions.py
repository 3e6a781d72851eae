"""Corruptions: laws that hold for each of them, and what each does against independent oracles."""

from __future__ import annotations

import colorsys
import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cofire import ConfigError, DataError, data
from cofire.data import Images
from cofire.shift import Corruption, Pictures, ShiftedLoader, corruption, list_corruptions, register_corruption
from cofire.shift import corruptions as module

Image = pytest.importorskip("PIL.Image", reason="pillow is needed (extra data)")
ALL = list_corruptions()
STD = (0.2, 0.25, 0.3)
UNBOUNDED = {"noise"}  # may leave [0, 1]
RANDOM = {"noise", "noise-pixels"}


def photos(n: int = 6, channels: int = 3, side: int = 32) -> Images:
    """Smooth patterns under noise, of many colours."""
    images = data.synthetic(n, (channels, side, side), classes=3)
    return Images(**{**vars(images), "mean": (0.5, 0.4, 0.6)[:channels], "std": STD[:channels]})


def pictures(images: Images, rows: list[int] | None = None, seed: int = 0) -> Pictures:
    index_B = torch.arange(len(images)) if rows is None else torch.tensor(rows)
    pixels_BCHW = images.pixels_NCHW[index_B].float() / 255
    return Pictures(pixels_BCHW=pixels_BCHW, index_B=index_B, std=images.std, seed=seed)


def given(pixels: Any) -> Pictures:
    """Pictures with the pixels given."""
    pixels_BCHW = torch.as_tensor(pixels, dtype=torch.float32)
    std = (1.0,) * pixels_BCHW.shape[1]
    return Pictures(pixels_BCHW=pixels_BCHW, index_B=torch.arange(len(pixels_BCHW)), std=std, seed=0)


def loader(name: str, severity: float, batch_size: int = 6, seed: int = 0, n: int = 6) -> ShiftedLoader:
    kind = corruption(name)
    return ShiftedLoader(images=photos(n), batch_size=batch_size, corruption=kind, severity=severity, seed=seed)


def joined(batches: ShiftedLoader) -> tuple[Tensor, Tensor]:
    images, labels = zip(*batches, strict=True)
    return torch.cat(images), torch.cat(labels)


# Laws of all


@pytest.mark.parametrize("name", ALL)
def test_severity_0_is_the_clean_set_bit_for_bit(name: str) -> None:
    clean_NCHW, label_N = next(iter(photos().loader(6)))
    found_NCHW, found_N = joined(loader(name, 0.0))
    assert torch.equal(found_NCHW, clean_NCHW)
    assert torch.equal(found_N, label_N)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [1, 4])
def test_an_image_does_not_depend_on_the_batch_size(name: str, size: int) -> None:
    severity = corruption(name).severities[-1]
    whole, parts = (joined(loader(name, severity, batch_size)) for batch_size in (6, size))
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])
    assert len(loader(name, severity, size)) == math.ceil(6 / size)


@pytest.mark.parametrize("name", ALL)
def test_an_image_depends_on_its_place_in_the_set_alone(name: str) -> None:
    kind, images = corruption(name), photos()
    severity = kind.severities[-1]
    whole_BCHW = kind(pictures(images), severity)
    assert torch.equal(kind(pictures(images, [4, 1]), severity), whole_BCHW[[4, 1]])


@pytest.mark.parametrize("name", ALL)
def test_another_seed_is_another_noise_and_nothing_else(name: str) -> None:
    severity = corruption(name).severities[-1]
    one, same, other = (joined(loader(name, severity, seed=seed))[0] for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert torch.equal(one, other) == (name not in RANDOM)


@pytest.mark.parametrize("name", ALL)
def test_a_higher_severity_is_worse(name: str) -> None:
    kind, images = corruption(name), photos()
    clean = pictures(images)
    damage = [float((kind(clean, severity) - clean.pixels_BCHW).abs().mean()) for severity in kind.severities]
    assert list(kind.severities) == sorted(kind.severities)
    assert damage == sorted(set(damage))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("channels", "side"), [(1, 8), (3, 8), (3, 32)])
def test_shape_and_type_stay_and_the_input_too(name: str, channels: int, side: int) -> None:
    clean = pictures(photos(3, channels, side))
    before = clean.pixels_BCHW.clone()
    worse_BCHW = corruption(name)(clean, corruption(name).severities[-1])
    assert torch.equal(clean.pixels_BCHW, before)
    assert (worse_BCHW.shape, worse_BCHW.dtype) == (before.shape, torch.float32)
    assert worse_BCHW.isfinite().all()
    if name not in UNBOUNDED:
        assert 0 <= worse_BCHW.min() <= worse_BCHW.max() <= 1 + 1e-6


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("severity", [-0.1, math.nan, math.inf])
def test_a_severity_that_means_nothing_is_refused(name: str, severity: float) -> None:
    with pytest.raises(ConfigError, match=f"a severity of '{name}' .* must be .*, got {severity}"):
        loader(name, severity)


@pytest.mark.parametrize("name", ["brightness", "contrast", "pixelate", "jpeg"])
def test_a_severity_above_the_highest_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"must be in 0\.\.{corruption(name).highest:g}, got 100"):
        corruption(name).check(100)


def test_the_paper_s_severities_are_the_defaults() -> None:
    assert corruption("blur").severities == (0.5, 0.7, 0.9, 1.09, 1.27, 1.45)
    assert corruption("noise").severities == (0.00, 0.02, 0.05, 0.11, 0.14, 0.20)


# Each by itself


@pytest.mark.parametrize(("name", "options"), [("blur", {"radius": 1}), ("blur-full", {"truncate": 4.0})])
@pytest.mark.parametrize("sigma", [0.3, 0.9, 1.45])
def test_blur_is_scipy_s(name: str, options: dict[str, Any], sigma: float) -> None:
    ndimage = pytest.importorskip("scipy.ndimage", reason="scipy is needed (extra demo)")
    clean = pictures(photos())
    expected = ndimage.gaussian_filter(clean.pixels_BCHW.double().numpy(), sigma, axes=(2, 3), mode="mirror", **options)
    np.testing.assert_allclose(corruption(name)(clean, sigma).numpy(), expected, atol=1e-6)


def test_blur_is_the_same_before_and_after_normalising() -> None:
    """It is linear and keeps constants: the unit of its input does not matter."""
    images = photos()
    x_NCHW = next(iter(images.loader(6)))[0]
    torch.testing.assert_close(joined(loader("blur", 0.9))[0], module.blurred(x_NCHW, 0.9, radius=1))


def test_a_blur_that_reaches_past_a_small_picture_is_refused() -> None:
    with pytest.raises(DataError, match="reaches 6 pixels needs larger pictures than 4x4"):
        corruption("blur-full")(pictures(photos(side=4)), 1.45)


def test_noise_is_sigma_for_the_network_whatever_the_channel() -> None:
    images = photos(40)
    x_NCHW = next(iter(images.loader(40)))[0]
    noise_NCHW = joined(loader("noise", 0.2, 40, n=40))[0] - x_NCHW
    assert noise_NCHW.std((0, 2, 3)).tolist() == pytest.approx([0.2] * 3, rel=0.02)
    assert noise_NCHW.mean((0, 2, 3)).tolist() == pytest.approx([0.0] * 3, abs=0.005)


def test_a_higher_severity_has_the_same_noise_scaled() -> None:
    x_NCHW = next(iter(photos().loader(6)))[0]
    weak, strong = (joined(loader("noise", severity))[0] - x_NCHW for severity in (0.05, 0.2))
    torch.testing.assert_close(4 * weak, strong, atol=1e-5, rtol=1e-4)


def test_no_two_images_have_the_same_noise() -> None:
    noise_BCHW = pictures(photos()).normal()
    flat = torch.corrcoef(noise_BCHW.flatten(1)) - torch.eye(6)
    assert flat.abs().max() < 0.1


def test_noise_of_pixels_is_clipped_to_them() -> None:
    grey = given(torch.full((20, 1, 16, 16), 0.5))
    found = corruption("noise-pixels")(grey, 0.1)
    assert float(found.std()) == pytest.approx(0.1, rel=0.05)
    black = given(torch.zeros(4, 1, 16, 16))
    found = corruption("noise-pixels")(black, 0.1)
    assert float((found == 0).float().mean()) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("severity", [0.1, 0.3, 1.0])
def test_brightness_raises_the_value_and_keeps_hue_and_saturation(severity: float) -> None:
    clean = pictures(photos(1, side=8))
    pixels_BCHW = clean.pixels_BCHW
    pixels_BCHW[0, :, 0, 0] = 0.0
    found_BCHW = corruption("brightness")(clean, severity)
    for before, after in zip(pixels_BCHW[0].flatten(1).T.tolist(), found_BCHW[0].flatten(1).T.tolist(), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*before)
        assert after == pytest.approx(colorsys.hsv_to_rgb(hue, saturation, min(1.0, value + severity)), abs=1e-5)


def test_contrast_moves_every_pixel_to_the_mean_of_its_channel() -> None:
    clean = given([[[[0.0, 0.4], [0.8, 0.4]], [[0.2, 0.2], [0.2, 1.0]]]])
    found = corruption("contrast")(clean, 0.75)
    expected = [[[[0.3, 0.4], [0.5, 0.4]], [[0.35, 0.35], [0.35, 0.55]]]]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_jpeg_is_pillow_s_at_the_quality_that_is_left() -> None:
    images = photos(2)
    found = corruption("jpeg")(pictures(images), 60)
    for n in range(2):
        file = io.BytesIO()
        picture_HWC = images.pixels_NCHW[n].permute(1, 2, 0).contiguous().numpy()
        Image.fromarray(picture_HWC).save(file, "JPEG", quality=40)
        expected = torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1)
        assert torch.equal((found[n] * 255).round().byte(), expected)


def test_jpeg_needs_a_whole_number_and_grey_or_colour() -> None:
    with pytest.raises(ConfigError, match=r"100 - quality, must be a whole number, got 20\.5"):
        corruption("jpeg")(pictures(photos(1)), 20.5)
    with pytest.raises(DataError, match="pictures of 1 or 3 channels, got 2"):
        corruption("jpeg")(given(torch.zeros(1, 2, 8, 8)), 20)


def test_pixelate_makes_blocks_of_one_colour() -> None:
    clean = given(torch.arange(16.0).view(1, 1, 4, 4) * 4 / 255)
    means = torch.tensor([[10.0, 18.0], [42.0, 50.0]]) / 255
    expected = means.repeat_interleave(2, 0).repeat_interleave(2, 1)
    assert torch.equal(corruption("pixelate")(clean, 0.5)[0, 0], expected)


@pytest.mark.parametrize("side", [1, 2, 3])
def test_pixelate_leaves_at_least_one_pixel(side: int) -> None:
    clean = given(torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(0)))
    found = corruption("pixelate")(clean, 1.0)
    expected = clean.pixels_BCHW.mean((2, 3), keepdim=True).expand_as(found)
    torch.testing.assert_close(found, expected, atol=1.5 / 255, rtol=0)


# The registry


def test_an_unknown_corruption_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="unknown corruption 'blurr'; did you mean 'blur'"):
        corruption("blurr")


def test_a_corruption_of_your_own_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_corruptions", dict(module._corruptions))
    before = list_corruptions()

    @register_corruption("night", severities=(0.5,), unit="share of the light lost", highest=1)
    def night(pictures: Pictures, severity: float) -> Tensor:
        return pictures.pixels_BCHW * (1 - severity)

    clean = pictures(photos(2))
    assert isinstance(corruption("night"), Corruption)
    assert torch.equal(corruption("night")(clean, 0.5), clean.pixels_BCHW / 2)
    assert list_corruptions() == [*before, "night"]
    with pytest.raises(ConfigError, match="a corruption named 'night' is registered already"):
        register_corruption("night", severities=(1,), unit="")
