"""ONNX nodes on elements and shapes, and over channels: activations, arithmetic, moves, reductions, resizing."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from cofire.importing.calls import Calls
from cofire.importing.onnx_file import Node
from cofire.importing.onnx_resize import resized, resizing
from cofire.importing.onnx_table import OPS, number, numbers, op, refused

_MOST = 1 << 24  # elements of a constant that a node makes of nothing

# One element


def _elementwise(kind: str, function: Callable[..., Any], **defaults: Any) -> None:
    def lowered(calls: Calls, node: Node, x: Any) -> Any:
        return calls.call(node.name, function, x, *(node.attrs.get(key, value) for key, value in defaults.items()))

    OPS[kind] = lowered


_ONE: tuple[tuple[str, Callable[..., Any], dict[str, float]], ...] = (
    ("Relu", F.relu, {}),
    ("LeakyRelu", F.leaky_relu, {"alpha": 0.01}),
    ("Elu", F.elu, {"alpha": 1.0}),
    ("Celu", F.celu, {"alpha": 1.0}),
    ("Sigmoid", torch.sigmoid, {}),
    ("Tanh", torch.tanh, {}),
    ("HardSwish", F.hardswish, {}),
    ("Mish", F.mish, {}),
    ("Softplus", F.softplus, {}),
    ("Softsign", F.softsign, {}),
    ("Exp", torch.exp, {}),
    ("Sqrt", torch.sqrt, {}),
    ("Abs", torch.abs, {}),
    ("Neg", torch.neg, {}),
    ("Erf", torch.erf, {}),
    ("Floor", torch.floor, {}),
    ("Ceil", torch.ceil, {}),
    ("Not", torch.logical_not, {}),
)
for _kind, _function, _defaults in _ONE:
    _elementwise(_kind, _function, **_defaults)


@op("Identity", "Dropout")
def _same(calls: Calls, node: Node, x: Any, *training: Any) -> Any:
    return x if len(node.outputs) == 1 else (x, *[None] * (len(node.outputs) - 1))


@op("Cast")
def _cast(calls: Calls, node: Node, x: Any) -> Any:
    to = node.attrs.get("to")
    if to in (1, 10, 11):  # float32, float16, float64: all are float32 here
        return x.float() if isinstance(x, Tensor) else x
    if isinstance(x, fx.Node) or to not in (5, 6, 7, 9, 12, 13, 2, 3, 4):
        raise refused(node, "what depends on the images must stay a floating-point number")
    return x.bool() if to == 9 else x.long()


@op("Gelu")
def _gelu(calls: Calls, node: Node, x: Any) -> Any:
    return calls.call(node.name, F.gelu, x, approximate=node.attrs.get("approximate", "none"))


@op("HardSigmoid")
def _hardsigmoid(calls: Calls, node: Node, x: Any) -> Any:
    factor, more = node.attrs.get("alpha", 0.2), node.attrs.get("beta", 0.5)
    if abs(factor - 1 / 6) < 1e-6 and more == 0.5:
        return calls.call(node.name, F.hardsigmoid, x)
    line = calls.call(node.name, operator.add, calls.call(node.name, operator.mul, x, factor), more)
    return calls.call(node.name, torch.clamp, line, 0.0, 1.0)


@op("Clip")
def _clip(calls: Calls, node: Node, x: Any, low: Any = None, high: Any = None) -> Any:
    bounds = [node.attrs.get(key) if value is None else number(value) for key, value in (("min", low), ("max", high))]
    if any(isinstance(bound, fx.Node) for bound in bounds):
        raise refused(node, "its bounds must be constant")
    return x if bounds == [None, None] else calls.call(node.name, torch.clamp, x, *bounds)


# Two operands


def _plain(value: Any, beside: int) -> Any:
    """A constant with one element as a number, where that does not change the result's shape."""
    return value.reshape(()) if isinstance(value, Tensor) and value.numel() == 1 and value.ndim <= beside else value


def _binary(kind: str, function: Callable[[Any, Any], Any]) -> None:
    def lowered(calls: Calls, node: Node, x: Any, y: Any) -> Any:
        if isinstance(x, fx.Node) or isinstance(y, fx.Node):
            beside = max(len(calls.shape(value)) for value in (x, y) if isinstance(value, fx.Node))
            x, y = _plain(x, beside), _plain(y, beside)
        elif kind == "Div" and not x.is_floating_point():
            return calls.call(node.name, torch.div, x, y, rounding_mode="trunc")
        return calls.call(node.name, function, x, y)

    OPS[kind] = lowered


_TWO: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Div": operator.truediv,
    "Pow": torch.pow,
    "Equal": torch.eq,
    "Greater": torch.gt,
    "Less": torch.lt,
    "GreaterOrEqual": torch.ge,
    "LessOrEqual": torch.le,
    "Mod": torch.remainder,
    "And": torch.logical_and,
    "Or": torch.logical_or,
}
for _kind, _function in _TWO.items():
    _binary(_kind, _function)


@op("Sum")
def _sum(calls: Calls, node: Node, *values: Any) -> Any:
    total = values[0]
    for value in values[1:]:
        total = calls.call(node.name, operator.add, total, value)
    return total


@op("Where")
def _where(calls: Calls, node: Node, condition: Any, x: Any, y: Any) -> Any:
    return calls.call(node.name, torch.where, condition, x, y)


# Over channels or space


def _reduction(kind: str, function: Callable[..., Any]) -> None:
    def lowered(calls: Calls, node: Node, x: Any, axes: Any = None) -> Any:
        dims = node.attrs.get("axes") if axes is None else numbers(node, axes)
        if not dims and node.attrs.get("noop_with_empty_axes", 0):
            return x
        dims = dims or list(range(len(calls.shape(x))))
        return calls.call(node.name, function, x, tuple(dims), bool(node.attrs.get("keepdims", 1)))

    OPS[kind] = lowered


_reduction("ReduceMean", torch.mean)
_reduction("ReduceSum", torch.sum)
_reduction("ReduceMax", torch.amax)


@op("ReduceL2")
def _length(calls: Calls, node: Node, x: Any, axes: Any = None) -> Any:
    dims = node.attrs.get("axes", []) if axes is None else numbers(node, axes)
    return calls.call(node.name, torch.linalg.vector_norm, x, 2.0, dims, bool(node.attrs.get("keepdims", 1)))


@op("Softmax", "LogSoftmax")
def _softmax(calls: Calls, node: Node, x: Any) -> Any:
    # Before version 13 the axis was 1 and all behind it was one; both mean the same for the last dimension.
    axis = node.attrs.get("axis", -1)
    return calls.call(node.name, torch.softmax if node.kind == "Softmax" else torch.log_softmax, x, axis)


# Moves


@op("Shape")
def _shape(calls: Calls, node: Node, x: Any) -> Any:
    sizes = calls.shape(x)[node.attrs.get("start", 0) : node.attrs.get("end")]
    return torch.tensor(sizes, dtype=torch.int64)


@op("Size")
def _size(calls: Calls, node: Node, x: Any) -> Any:
    return torch.tensor(calls.shape(x)).prod()


@op("Constant")
def _constant(calls: Calls, node: Node) -> Any:
    for key in ("value", "value_float", "value_int", "value_floats", "value_ints"):
        if node.attrs.get(key) is not None:
            found = torch.as_tensor(node.attrs[key])
            return found.float() if found.is_floating_point() else found
    raise refused(node, "a constant must be a tensor of numbers")


def _limited(node: Node, count: float) -> None:
    if not 0 <= count <= _MOST:
        raise refused(node, f"it makes a constant of {count:,.0f} elements; at most {_MOST:,} are taken")


@op("ConstantOfShape")
def _filled(calls: Calls, node: Node, sizes: Any) -> Any:
    wanted = numbers(node, sizes)
    _limited(node, torch.tensor(wanted, dtype=torch.float64).prod().item())
    value = node.attrs.get("value", torch.zeros(1))
    return value.reshape(()).expand(wanted).clone()


@op("Range")
def _range(calls: Calls, node: Node, start: Any, limit: Any, step: Any) -> Any:
    if any(isinstance(value, fx.Node) for value in (start, limit, step)) or number(step) == 0:
        raise refused(node, "its bounds must be constant, its step not 0")
    _limited(node, max(0, (number(limit) - number(start)) / number(step)))
    return torch.arange(number(start), number(limit), number(step))


@op("Reshape")
def _reshape(calls: Calls, node: Node, x: Any, sizes: Any) -> Any:
    wanted, own = numbers(node, sizes), calls.shape(x)
    if not node.attrs.get("allowzero", 0):
        wanted = [own[at] if size == 0 and at < len(own) else size for at, size in enumerate(wanted)]
    return calls.reshape(node.name, x, wanted)


@op("Flatten")
def _flatten(calls: Calls, node: Node, x: Any) -> Any:
    if node.attrs.get("axis", 1) != 1:
        raise refused(node, f"axis must be 1, got {node.attrs['axis']}")
    return calls.call(node.name, torch.flatten, x, 1)


@op("Transpose")
def _transpose(calls: Calls, node: Node, x: Any) -> Any:
    order = node.attrs.get("perm") or list(reversed(range(len(calls.shape(x)))))
    return calls.call(node.name, torch.permute, x, tuple(order))


@op("Unsqueeze")
def _unsqueeze(calls: Calls, node: Node, x: Any, axes: Any = None) -> Any:
    dims = node.attrs.get("axes", []) if axes is None else numbers(node, axes)
    many = len(calls.shape(x)) + len(dims)
    for dim in sorted(dim % many for dim in dims):
        x = calls.call(node.name, torch.unsqueeze, x, dim)
    return x


@op("Squeeze")
def _squeeze(calls: Calls, node: Node, x: Any, axes: Any = None) -> Any:
    dims = node.attrs.get("axes") if axes is None else numbers(node, axes)
    sizes = calls.shape(x)
    given = dims if dims is not None else [dim for dim, size in enumerate(sizes) if size == 1]
    for dim in sorted((dim % len(sizes) for dim in given), reverse=True):
        x = calls.call(node.name, torch.squeeze, x, dim)
    return x


@op("Concat")
def _concat(calls: Calls, node: Node, *values: Any) -> Any:
    return calls.call(node.name, torch.cat, list(values), node.attrs["axis"])


@op("Split")
def _split(calls: Calls, node: Node, x: Any, sizes: Any = None) -> Any:
    dim, count = node.attrs.get("axis", 0), len(node.outputs)
    parts = node.attrs.get("split") if sizes is None else numbers(node, sizes)
    if not parts:
        each = -(-calls.shape(x)[dim] // count)
        parts = [each] * (count - 1) + [calls.shape(x)[dim] - each * (count - 1)]
    return tuple(_sliced(calls, node, x, dim, sum(parts[:at]), sum(parts[: at + 1]), 1) for at in range(count))


def _sliced(calls: Calls, node: Node, x: Any, dim: int, start: int, end: int, step: int) -> Any:
    where = (*[slice(None)] * (dim % len(calls.shape(x))), slice(start, end, step))
    return calls.call(node.name, operator.getitem, x, where)


@op("Slice")
def _slice(calls: Calls, node: Node, x: Any, *given: Any) -> Any:
    names = ("starts", "ends", "axes", "steps")
    values = [numbers(node, value) if value is not None else None for value in given]
    starts, ends, axes, steps = (
        values[at] if at < len(values) and values[at] is not None else node.attrs.get(name)
        for at, name in enumerate(names)
    )
    if starts is None or ends is None:
        raise refused(node, "it has no starts and ends")
    for start, end, dim, step in zip(starts, ends, axes or range(len(starts)), steps or [1] * len(starts), strict=True):
        if step < 1:
            if (start, step) != (-1, -1) or end > -(calls.shape(x)[dim]):
                raise refused(node, "a step must be above 0, but for turning a whole side")
            x = calls.call(node.name, torch.flip, x, [dim])
        else:
            x = _sliced(calls, node, x, dim, start, end, step)
    return x


@op("Gather")
def _gather(calls: Calls, node: Node, x: Any, index: Any) -> Any:
    if not isinstance(index, Tensor) or index.ndim > 1:
        raise refused(node, "its indices must be constant, a number or a list")
    dim = node.attrs.get("axis", 0) % max(1, len(calls.shape(x)))
    where = index.item() if index.ndim == 0 else index.tolist()
    return calls.call(node.name, operator.getitem, x, (*[slice(None)] * dim, where))


@op("Expand")
def _expand(calls: Calls, node: Node, x: Any, sizes: Any) -> Any:
    return calls.expand(node.name, x, numbers(node, sizes))


@op("Tile")
def _tile(calls: Calls, node: Node, x: Any, counts: Any) -> Any:
    return calls.call(node.name, torch.tile, x, numbers(node, counts))


@op("Pad")
def _pad(calls: Calls, node: Node, x: Any, pads: Any = None, value: Any = None, axes: Any = None) -> Any:
    around: list[int] = node.attrs["pads"] if pads is None else numbers(node, pads)
    many = len(calls.shape(x))
    dims = list(range(many)) if axes is None else [dim % many for dim in numbers(node, axes)]
    before, behind = [0] * many, [0] * many
    for at, dim in enumerate(dims):
        before[dim], behind[dim] = around[at], around[at + len(dims)]
    filled = number(value) if value is not None else node.attrs.get("value", 0.0)
    how = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}
    mode = how.get(node.attrs.get("mode", "constant"))
    if (before[:2] + behind[:2] != [0] * 4 and mode != "constant") or mode is None:
        raise refused(node, "it must pad maps of two dimensions")
    first = next((at for at in range(many) if before[at] or behind[at]), many)
    first = 2 if mode != "constant" else first
    if first == many:
        return x
    options: dict[str, Any] = {"mode": mode} | ({"value": filled} if mode == "constant" and filled else {})
    return calls.pad(node.name, x, [*before[first:], *behind[first:]], **options)


@op("DepthToSpace")
def _depth_to_space(calls: Calls, node: Node, x: Any) -> Any:
    size = node.attrs["blocksize"]
    if node.attrs.get("mode", "DCR") == "CRD":
        return calls.call(node.name, F.pixel_shuffle, x, size)
    _, channels, height, width = calls.shape(x)
    apart = calls.reshape(node.name, x, [calls.batch, size, size, channels // size**2, height, width])
    turned = calls.call(node.name, torch.permute, apart, (0, 3, 4, 1, 5, 2))
    return calls.reshape(node.name, turned, [calls.batch, channels // size**2, height * size, width * size])


@op("SpaceToDepth")
def _space_to_depth(calls: Calls, node: Node, x: Any) -> Any:
    size = node.attrs["blocksize"]
    _, channels, height, width = calls.shape(x)
    apart = calls.reshape(node.name, x, [calls.batch, channels, height // size, size, width // size, size])
    turned = calls.call(node.name, torch.permute, apart, (0, 3, 5, 1, 2, 4))
    return calls.reshape(node.name, turned, [calls.batch, channels * size**2, height // size, width // size])


@op("Resize", "Upsample")
def _resize(calls: Calls, node: Node, x: Any, *given: Any) -> Any:
    own = calls.shape(x)
    attrs = dict(node.attrs)
    if node.kind == "Upsample":
        attrs |= {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        given = (None, *given)
    values = [value if isinstance(value, Tensor) and value.numel() else None for value in (*given, None, None, None)]
    scales, sizes = values[1], values[2]
    if scales is None and node.kind == "Upsample" and "scales" in attrs:
        scales = torch.tensor(attrs["scales"])
    stretched = attrs.get("keep_aspect_ratio_policy", "stretch") == "stretch"
    if len(own) != 4 or (scales is None and sizes is None) or not stretched:
        raise refused(node, "it must resize maps by constant scales or to constant sizes")
    dims = [dim % 4 for dim in attrs.get("axes") or range(4)]
    factors, wanted = [1.0] * 4, list(own)
    for at, dim in enumerate(dims):
        if scales is None:
            wanted[dim] = numbers(node, sizes)[at]
        else:
            factors[dim] = float(scales[at])
    wanted = wanted if scales is None else resized(own, factors)
    found = resizing(own[2:], wanted[2:], None if scales is None else factors[2:], attrs)
    if tuple(wanted[:2]) != own[:2] or found is None:
        raise refused(node, f"torch has no resizing like it: {attrs}")
    return calls.call(node.name, F.interpolate, x, **found)
