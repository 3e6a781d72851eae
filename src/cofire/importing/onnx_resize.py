"""ONNX's resizing of maps -> the same by torch, found by trying both on each side of a map."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_SIDE = 1 << 13
"""Of a map that is resized: what is tried takes its square."""


def resizing(
    sizes: Sequence[int], wanted: Sequence[int], scales: Sequence[float] | None, attrs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Arguments of `F.interpolate` that resize maps of ``sizes`` to ``wanted`` as ``attrs`` say; None if it cannot.

    Args:
        sizes: height and width.
        scales: of height and width, where the file gives these.
    """
    if max(*sizes, *wanted) > _SIDE or attrs.get("antialias") or attrs.get("exclude_outside"):
        return None
    ratios = scales or [out / size for out, size in zip(wanted, sizes, strict=True)]
    made = [_matrix(size, out, ratio, attrs) for size, out, ratio in zip(sizes, wanted, ratios, strict=True)]
    ours = [matrix for matrix in made if matrix is not None]
    if len(ours) < len(made):
        return None
    for options in _candidates(wanted, scales):
        found = [_tried(sizes, dim, options) for dim in (0, 1)]
        same = (a.shape == b.shape and torch.allclose(a, b, atol=1e-5) for a, b in zip(found, ours, strict=True))
        if all(same):
            return options
    return None


def _candidates(wanted: Sequence[int], scales: Sequence[float] | None) -> Iterator[dict[str, Any]]:
    modes: list[dict[str, Any]] = [{"mode": "nearest"}, {"mode": "nearest-exact"}]
    modes += [
        {"mode": mode, "align_corners": corners}
        for mode, corners in itertools.product(("bilinear", "bicubic"), (False, True))
    ]
    places: list[dict[str, Any]] = [{"size": list(wanted)}]
    places += [{"scale_factor": [float(scale) for scale in scales]}] if scales else []
    for mode, place in itertools.product(modes, places):
        yield {**place, **mode}


def _tried(sizes: Sequence[int], dim: int, options: Mapping[str, Any]) -> Tensor:
    """What each row, or column, of the source gives alone: (out, in)."""
    eye = torch.eye(sizes[dim], dtype=torch.float64)
    shape = (1, sizes[dim], *((-1, 1) if dim == 0 else (1, -1)))
    other = (1, 1, 1, sizes[1]) if dim == 0 else (1, 1, sizes[0], 1)
    given = F.interpolate(eye.view(shape).tile(other), **options)[0]
    return (given[:, :, 0] if dim == 0 else given[:, 0]).T


def _matrix(size: int, out: int, scale: float, attrs: Mapping[str, Any]) -> Tensor | None:
    """ONNX's definition: (out, in) weights of a side."""
    place_O = torch.arange(out, dtype=torch.float64)
    match attrs.get("coordinate_transformation_mode", "half_pixel"):
        case "half_pixel":
            x_O = (place_O + 0.5) / scale - 0.5
        case "half_pixel_symmetric":
            x_O = size / 2 * (1 - out / (scale * size)) + (place_O + 0.5) / scale - 0.5
        case "pytorch_half_pixel":
            x_O = (place_O + 0.5) / scale - 0.5 if out > 1 else torch.zeros(out).double()
        case "align_corners":
            x_O = place_O * ((size - 1) / (out - 1) if out > 1 else 0.0)
        case "asymmetric":
            x_O = place_O / scale
        case _:
            return None
    taps = _taps(x_O, attrs)
    if taps is None:
        return None
    matrix = torch.zeros(out, size, dtype=torch.float64)
    for index_O, weight_O in taps:
        matrix.scatter_add_(1, index_O.clamp(0, size - 1).long()[:, None], weight_O[:, None])
    return matrix


def _taps(x_O: Tensor, attrs: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]] | None:
    low_O = x_O.floor()
    part_O = x_O - low_O
    match attrs.get("mode", "nearest"):
        case "nearest":
            how = attrs.get("nearest_mode", "round_prefer_floor")
            rounded = {
                "floor": x_O.floor(),
                "ceil": x_O.ceil(),
                "round_prefer_floor": (x_O - 0.5).ceil(),
                "round_prefer_ceil": (x_O + 0.5).floor(),
            }
            return [(rounded[how], torch.ones_like(x_O))] if how in rounded else None
        case "linear":
            return [(low_O, 1 - part_O), (low_O + 1, part_O)]
        case "cubic":
            a = float(attrs.get("cubic_coeff_a", -0.75))
            return [(low_O + at, _cubic((part_O - at).abs(), a)) for at in (-1, 0, 1, 2)]
        case _:
            return None


def _cubic(far_O: Tensor, a: float) -> Tensor:
    near = (a + 2) * far_O**3 - (a + 3) * far_O**2 + 1
    return torch.where(far_O <= 1, near, a * (far_O**3 - 5 * far_O**2 + 8 * far_O - 4))


def resized(sizes: Sequence[int], scales: Sequence[float]) -> list[int]:
    """What sizes become."""
    return [math.floor(size * scale) for size, scale in zip(sizes, scales, strict=True)]
