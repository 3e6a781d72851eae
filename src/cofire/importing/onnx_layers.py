"""ONNX nodes with windows or weights as layers: convs, poolings, norms, products with constant matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from cofire.importing.calls import Calls
from cofire.importing.onnx_file import Node
from cofire.importing.onnx_table import layer_name, number, op, refused


def _constant(node: Node, value: Any, what: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise refused(node, f"its {what} must be constant")
    return value


def _window(node: Node, sizes: Sequence[int], kernel: Sequence[int]) -> dict[str, Any]:
    """Stride, dilation, and padding (before each dimension, then behind each)."""
    dims = len(kernel)
    stride, dilation = node.attrs.get("strides", [1] * dims), node.attrs.get("dilations", [1] * dims)
    how = node.attrs.get("auto_pad", "NOTSET")
    if how in ("SAME_UPPER", "SAME_LOWER"):
        more = [
            max(0, (-(-size // s) - 1) * s + d * (k - 1) + 1 - size)
            for size, k, s, d in zip(sizes, kernel, stride, dilation, strict=True)
        ]
        less, rest = [all_of // 2 for all_of in more], [-(-all_of // 2) for all_of in more]
        padding = [*less, *rest] if how == "SAME_UPPER" else [*rest, *less]
    else:
        padding = node.attrs.get("pads", [0] * 2 * dims) if how == "NOTSET" else [0] * 2 * dims
    if not len(stride) == len(dilation) == dims or len(padding) != 2 * dims:
        raise refused(node, f"strides, dilations and pads must be of {dims} dimensions")
    if min(stride) < 1 or min(dilation) < 1 or min(padding) < 0 or min(kernel) < 1:
        raise refused(node, "strides, dilations and kernel must be positive, pads at least 0")
    return {"stride": tuple(stride), "dilation": tuple(dilation), "padding": tuple(padding)}


@op("Conv")
def _conv(calls: Calls, node: Node, x: Any, weight: Any, bias: Any = None) -> Any:
    weight = _constant(node, weight, "weight")
    window = _window(node, calls.shape(x)[2:], weight.shape[2:])
    return calls.conv(layer_name(node), x, weight, bias, groups=node.attrs.get("group", 1), **window)


@op("ConvTranspose")
def _transposed(calls: Calls, node: Node, x: Any, weight: Any, bias: Any = None) -> Any:
    weight = _constant(node, weight, "weight")
    if node.attrs.get("output_shape") or node.attrs.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise refused(node, "its padding must be given by pads and output_padding")
    window = _window(node, calls.shape(x)[2:], weight.shape[2:])
    more = tuple(node.attrs.get("output_padding", [0] * (weight.ndim - 2)))
    options: dict[str, Any] = {"groups": node.attrs.get("group", 1), "output_padding": more}
    return calls.conv(layer_name(node), x, weight, bias, transposed=True, **options, **window)


@op("Gemm")
def _gemm(calls: Calls, node: Node, x: Any, weight: Any, bias: Any = None) -> Any:
    weight = _constant(node, weight, "second operand")
    if node.attrs.get("transA", 0):
        raise refused(node, "transA must be 0")
    weight = (weight if node.attrs.get("transB", 0) else weight.T) * node.attrs.get("alpha", 1.0)
    if bias is not None:
        bias = (_constant(node, bias, "bias") * node.attrs.get("beta", 1.0)).expand(1, len(weight))[0]
    return calls.linear(layer_name(node), x, weight, bias)


@op("MatMul")
def _matmul(calls: Calls, node: Node, x: Any, y: Any) -> Any:
    if isinstance(x, fx.Node) and isinstance(y, Tensor) and y.ndim == 2:
        return calls.linear(layer_name(node), x, y.T, None)
    return calls.call(node.name, torch.matmul, x, y)


# Norms


@op("BatchNormalization")
def _batch_norm(calls: Calls, node: Node, x: Any, scale: Any, shift: Any, mean: Any, var: Any) -> Any:
    if node.attrs.get("training_mode", 0):
        raise refused(node, "it is in training mode; export the model in eval mode")
    tensors = {"weight": scale, "bias": shift, "running_mean": mean, "running_var": var}
    own = {name: _constant(node, tensor, name) for name, tensor in tensors.items()}
    return calls.batch_norm(layer_name(node), x, node.attrs.get("epsilon", 1e-5), **own)


@op("InstanceNormalization")
def _instance_norm(calls: Calls, node: Node, x: Any, scale: Any, shift: Any) -> Any:
    kind = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d}.get(len(calls.shape(x)))
    if kind is None:
        raise refused(node, f"it must get 3 or 4 dimensions, got the shape {calls.shape(x)}")
    made = kind(calls.shape(x)[1], node.attrs.get("epsilon", 1e-5), affine=True, device="meta")
    return calls.norm(layer_name(node), x, made, _constant(node, scale, "scale"), _constant(node, shift, "shift"))


@op("LayerNormalization")
def _layer_norm(calls: Calls, node: Node, x: Any, scale: Any, shift: Any = None) -> Any:
    axis = node.attrs.get("axis", -1)
    sizes = calls.shape(x)[axis:]
    made = nn.LayerNorm(sizes, node.attrs.get("epsilon", 1e-5), bias=shift is not None, device="meta")
    shift = None if shift is None else _constant(node, shift, "shift").expand(sizes)
    return calls.norm(layer_name(node), x, made, _constant(node, scale, "scale").expand(sizes), shift)


@op("GroupNormalization")
def _group_norm(calls: Calls, node: Node, x: Any, scale: Any, shift: Any) -> Any:
    groups, channels = node.attrs.get("num_groups", 1), calls.shape(x)[1]
    if groups < 1 or channels % groups:
        raise refused(node, f"num_groups must divide {channels} channels, got {groups}")
    own = [_constant(node, tensor, "scale and shift") for tensor in (scale, shift)]
    own = [tensor.repeat_interleave(channels // groups) if len(tensor) == groups else tensor for tensor in own]
    made = nn.GroupNorm(groups, channels, node.attrs.get("epsilon", 1e-5), device="meta")
    return calls.norm(layer_name(node), x, made, *own)


# Poolings


@op("MaxPool")
def _max_pool(calls: Calls, node: Node, x: Any) -> Any:
    kernel = node.attrs["kernel_shape"]
    window = _window(node, calls.shape(x)[2:], kernel)
    half = len(kernel)
    ceil = bool(node.attrs.get("ceil_mode", 0))
    if window["padding"][:half] != window["padding"][half:]:
        if (
            max(window["dilation"]) > 1
            or ceil
            or any(p >= k for p, k in zip(window["padding"], 2 * kernel, strict=True))
        ):
            raise refused(node, "its padding differs between the sides, with dilation or ceil_mode")
        # The border again, in place of nothing: it is in every such window, so that no maximum changes.
        x = calls.pad(f"{node.name}.pad", x, window["padding"], mode="replicate")
        window["padding"] = (0,) * 2 * half
    stride, padding, dilation = window["stride"], window["padding"][:half], window["dilation"]
    if half != 2:
        raise refused(node, "it must pool maps of two dimensions")
    return calls.call(node.name, F.max_pool2d, x, tuple(kernel), stride, padding, dilation, ceil)


@op("AveragePool")
def _average_pool(calls: Calls, node: Node, x: Any) -> Any:
    kernel = node.attrs["kernel_shape"]
    window = _window(node, calls.shape(x)[2:], kernel)
    half = len(kernel)
    ceil, counted = bool(node.attrs.get("ceil_mode", 0)), bool(node.attrs.get("count_include_pad", 0))
    if max(window["dilation"]) > 1 or half != 2:
        raise refused(node, "it must pool maps of two dimensions, without dilation")
    if window["padding"][:half] != window["padding"][half:]:
        if ceil or not counted:
            raise refused(node, "its padding differs between the sides and is not counted")
        x = calls.pad(f"{node.name}.pad", x, window["padding"])
        window["padding"] = (0,) * 2 * half
    return calls.call(
        node.name, F.avg_pool2d, x, tuple(kernel), window["stride"], window["padding"][:half], ceil, counted
    )


@op("GlobalAveragePool")
def _global_average(calls: Calls, node: Node, x: Any) -> Any:
    return calls.call(node.name, F.adaptive_avg_pool2d, x, 1)


@op("GlobalMaxPool")
def _global_max(calls: Calls, node: Node, x: Any) -> Any:
    return calls.call(node.name, F.adaptive_max_pool2d, x, 1)


@op("PRelu")
def _prelu(calls: Calls, node: Node, x: Any, slope: Any) -> Any:
    slope_C = _constant(node, slope, "slope")
    if slope_C.numel() not in (1, calls.shape(x)[1]):
        raise refused(node, f"it must have one slope or one for each channel, got the shape {tuple(slope_C.shape)}")
    if slope_C.numel() == 1:
        return calls.call(node.name, F.leaky_relu, x, number(slope_C))
    made = nn.PReLU(slope_C.numel(), device="meta")
    return calls.norm(layer_name(node), x, made, slope_C.flatten(), None)
