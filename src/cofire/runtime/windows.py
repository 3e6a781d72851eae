"""What a conv or pooling call was given -> kernel, stride, padding and dilation as a program has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import fx, nn

from cofire.runtime.program import Padding, Pair

# Names of a function's arguments, in order; the module of the same kind has attributes of these names.
CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_MAX_POOL = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
_AVG_POOL = ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
_POOLS: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys((nn.MaxPool2d, F.max_pool2d, torch.max_pool2d), _MAX_POOL),
    **dict.fromkeys((nn.AvgPool2d, F.avg_pool2d), _AVG_POOL),
}
_ADAPTIVE: dict[Any, Literal["max", "avg"]] = {
    **dict.fromkeys((nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d, torch.mean, "mean"), "avg"),
    **dict.fromkeys((nn.AdaptiveMaxPool2d, F.adaptive_max_pool2d, torch.amax, "amax"), "max"),
}


def arguments(n: fx.Node, callee: Any, names: tuple[str, ...], env: Mapping[fx.Node, Any]) -> dict[str, Any]:
    """What the function ``callee`` is called with by ``n``, or what the module ``callee`` holds, by name."""
    if isinstance(callee, nn.Module):
        return {name: getattr(callee, name) for name in names if hasattr(callee, name)}
    args: Any = fx.node.map_arg(n.args, env.__getitem__)
    kwargs: Any = fx.node.map_arg(n.kwargs, env.__getitem__)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def conv_window(given: Mapping[str, Any]) -> dict[str, Any]:
    """Attrs of a conv from its arguments, of which only ``weight`` has to be there."""
    kernel = _pair(given["weight"].shape[2:])
    dilation = _pair(given.get("dilation", 1))
    return {
        "kernel": kernel,
        "stride": _pair(given.get("stride", 1)),
        "padding": _padding(given.get("padding", 0), kernel, dilation),
        "dilation": dilation,
        "groups": int(given.get("groups", 1)),
    }


def pool_window(n: fx.Node, callee: Any, env: Mapping[fx.Node, Any]) -> dict[str, Any] | None:
    """Attrs of a pooling call; None if it is not one that a program can express."""
    key = type(callee) if isinstance(callee, nn.Module) else callee
    if key in _ADAPTIVE:
        still = {"kernel": (1, 1), "stride": (1, 1), "padding": (0, 0, 0, 0), "dilation": (1, 1)}
        return {"op": _ADAPTIVE[key], **still, "include_pad": False, "adaptive": True}
    if key not in _POOLS:
        return None
    given = arguments(n, callee, _POOLS[key], env)
    if given.get("divisor_override") is not None:
        return None
    kernel = _pair(given["kernel_size"])
    dilation = _pair(given.get("dilation", 1))
    is_mean = _POOLS[key] is _AVG_POOL
    return {
        "op": "avg" if is_mean else "max",
        "kernel": kernel,
        "stride": _pair(given.get("stride") or kernel),
        "padding": _padding(given.get("padding", 0), kernel, dilation),
        "dilation": dilation,
        "include_pad": is_mean and bool(given.get("count_include_pad", True)),
        "adaptive": False,
    }


def _pair(value: Any) -> Pair:
    """A size given as one number or two."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return (int(values[0]), int(values[-1]))


def _padding(given: Any, kernel: Pair, dilation: Pair) -> Padding:
    if given == "valid":
        return (0, 0, 0, 0)
    if given == "same":
        return _split(*(d * (k - 1) for d, k in zip(dilation, kernel, strict=True)))
    height, width = _pair(given)
    return (height, width, height, width)


def _split(height: int, width: int) -> Padding:
    """Half of it on either side, the odd one below and right."""
    return (height // 2, width // 2, height - height // 2, width - width // 2)
