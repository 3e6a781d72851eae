"""Calls that make maps of other sizes, reduce or normalise -> attrs of the ops that do so, found by trying them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cofire.runtime.program import Padding

RESAMPLES: set[Any] = {F.interpolate, F.upsample, nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d}
SHUFFLES: set[Any] = {nn.PixelShuffle, nn.PixelUnshuffle, F.pixel_shuffle, F.pixel_unshuffle, nn.CircularPad2d}
REDUCTIONS: dict[Any, Literal["sum", "avg", "max"]] = {
    **dict.fromkeys((torch.mean, "mean"), "avg"),
    **dict.fromkeys((torch.sum, "sum"), "sum"),
    **dict.fromkeys((torch.amax, "amax", torch.max, "max"), "max"),
}
SOFTMAXES: dict[Any, bool] = {
    **dict.fromkeys((torch.softmax, F.softmax, "softmax", nn.Softmax, nn.Softmax2d), False),
    **dict.fromkeys((torch.log_softmax, F.log_softmax, "log_softmax", nn.LogSoftmax), True),
}
_AT_ONCE = 1 << 22  # elements of a probe


class Taps(NamedTuple):
    """Of each row, or column, of the result: which of the source it is made of, and how much of each."""

    places: tuple[int, ...]
    weights: Tensor


def taps(function: Callable[[Tensor], Any], size: tuple[int, int], like: Tensor) -> tuple[Taps, Taps] | None:
    """Rows and columns of a resampling of maps of ``size``; None if the function is not linear along each axis."""
    rows = _taps_along(lambda x: function(x).select(3, 0), size, like)
    columns = _taps_along(lambda x: function(x.transpose(2, 3)).select(2, 0), size[::-1], like)
    noise = torch.randn(1, 1, *size, generator=torch.Generator().manual_seed(0)).to(like)
    wanted = function(noise)
    found = _matrix(rows, size[0], like) @ noise @ _matrix(columns, size[1], like).T
    close = found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)
    return (rows, columns) if close else None


def _taps_along(function: Callable[[Tensor], Tensor], size: tuple[int, int], like: Tensor) -> Taps:
    """What each row of the source, alone, gives."""
    length, width = size
    parts = []
    for some in torch.eye(length).to(like).split(max(1, _AT_ONCE // (16 * length * width))):
        image = some[None, :, :, None].expand(-1, -1, -1, width).contiguous()
        parts.append(function(image)[0])  # (some, length of the result)
    matrix = torch.cat(parts).T
    most = max(1, int((matrix != 0).sum(1).max()))
    order = (matrix != 0).int().argsort(dim=1, descending=True, stable=True)[:, :most]
    return Taps(tuple(order.flatten().tolist()), matrix.gather(1, order).float().cpu())


def _matrix(found: Taps, length: int, like: Tensor) -> Tensor:
    places = torch.tensor(found.places).view_as(found.weights)
    return torch.zeros(len(places), length).scatter_add_(1, places, found.weights).to(like)


class Normalising(NamedTuple):
    """Attrs of a norm over the channels, which are dimension ``dim`` of a tensor with the batch in front."""

    over: Literal["group", "layer", "rms", "l2"]
    groups: int
    epsilon: float
    dim: int


def normalising(norm: nn.Module, shape: tuple[int, ...]) -> Normalising | None:
    """What a norm without its activation, in float64, does to a tensor of ``shape``, batch excluded."""
    epsilon = float(getattr(norm, "eps", None) or torch.finfo(torch.float32).eps)
    groups = int(getattr(norm, "num_groups", shape[0]))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, *shape, generator=generator).double() + torch.randn(shape[0], generator=generator).double().view(
        1, -1, *[1] * (len(shape) - 1)
    )
    try:
        wanted = norm(x.clone())
    except Exception:
        return None
    candidates = [Normalising("layer", 1, epsilon, dim) for dim in (1, -1)]
    candidates += [Normalising("rms", 1, epsilon, dim) for dim in (1, -1)]
    candidates += [Normalising("group", groups, epsilon, 1)] if shape[0] % groups == 0 else []
    scale, shift = scale_and_shift(norm)
    for found in candidates:
        channels = x.shape[found.dim]
        if all(values is None or values.numel() == channels for values in (scale, shift)):
            y = _normalised(found, x).movedim(found.dim, -1)
            y = y * (1 if scale is None else scale.flatten()) + (0 if shift is None else shift.flatten())
            if torch.allclose(y.movedim(-1, found.dim), wanted, rtol=1e-6, atol=1e-6):
                return found
    return None


def scale_and_shift(norm: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """The norm's weight and bias, where it has them."""
    own = dict(norm.named_parameters(recurse=False)) | dict(norm.named_buffers(recurse=False))
    return own.get("weight"), own.get("bias")


def _normalised(norm: Normalising, x: Tensor) -> Tensor:
    if norm.over == "group":
        return F.group_norm(x, norm.groups, eps=norm.epsilon)
    away = x - x.mean(norm.dim, keepdim=True) if norm.over == "layer" else x
    return away / (away.square().mean(norm.dim, keepdim=True) + norm.epsilon).sqrt()


class _Seen(TorchFunctionMode):
    """Keeps the arguments of the first conv."""

    def __init__(self) -> None:
        super().__init__()
        self.convs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.conv2d or func is F.conv2d:
            self.convs.append((args, dict(kwargs or {})))
        return func(*args, **(kwargs or {}))


def conv_inside(conv: nn.Conv2d, size: tuple[int, int]) -> dict[str, Any] | None:
    """The arguments of the one plain conv that a conv with a forward of its own makes, such as standardised weights.

    ``padding`` is (top, left, bottom, right) with what was padded before; None if it does more than such a conv.
    """
    probe = torch.randn(2, conv.in_channels, *size, generator=torch.Generator().manual_seed(0)).to(conv.weight)
    with _Seen() as seen, torch.no_grad():
        wanted = copy.deepcopy(conv)(probe)
    if len(seen.convs) != 1:
        return None
    args, kwargs = seen.convs[0]
    given = dict(zip(("input", "weight", "bias", "stride", "padding", "dilation", "groups"), args, strict=False))
    given |= kwargs
    before = _padded_by(given.pop("input"), probe)
    if before is None or isinstance(given.get("padding", 0), str):
        return None
    own = given.get("padding", 0)
    height, width = (own, own) if isinstance(own, int) else (own[0], own[-1])
    top, left, bottom, right = before
    given["padding"] = 0
    padding: Padding = (top + height, left + width, bottom + height, right + width)
    found = F.conv2d(F.pad(probe, (padding[1], padding[3], padding[0], padding[2])), **given)
    same = found.shape == wanted.shape and torch.allclose(
        found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max())
    )
    return {**given, "padding": padding} if same else None


def _padded_by(padded: Tensor, x: Tensor) -> Padding | None:
    """How ``x`` was padded with zeros; None if it was otherwise changed."""
    if padded.shape == x.shape:
        return (0, 0, 0, 0) if torch.equal(padded, x) else None
    more = [padded.shape[dim] - x.shape[dim] for dim in (2, 3)]
    for top in range(more[0] + 1):
        for left in range(more[1] + 1):
            around = (left, more[1] - left, top, more[0] - top)
            if min(around) >= 0 and torch.equal(F.pad(x, around), padded):
                return (top, left, more[0] - top, more[1] - left)
    return None
