"""A program of `torch.export` as a module: its aten calls as the functions and layers they came from."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_flatten, tree_unflatten

from cofire.errors import CofireError, CompileError, ConfigError, TraceError
from cofire.importing.calls import Calls

_SAME = {"dropout", "contiguous", "clone", "detach", "alias", "lift_fresh_copy", "feature_dropout", "alpha_dropout"}
_NEAR = 1e-4  # of the outputs' spread


def input_shape_of(program: ExportedProgram, given: tuple[int, int, int] | None) -> tuple[int, int, int]:
    """(C, H, W) that it was exported for."""
    images = _images(program)
    channels, height, width = (int(size) for size in images.shape[1:])
    if given is not None and tuple(given) != (channels, height, width):
        raise ConfigError(f"input_shape must be {(channels, height, width)}, for which it was exported, got {given}")
    return channels, height, width


def _images(program: ExportedProgram) -> Tensor:
    """What stands for the images when it was exported."""
    by_name = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    inputs = [by_name[name].meta.get("val") for name in program.graph_signature.user_inputs if name in by_name]
    if len(inputs) != 1 or not isinstance(inputs[0], Tensor) or inputs[0].ndim != 4:
        raise TraceError(f"the program must take one batch of images (B, C, H, W), got {len(inputs)} inputs: {inputs}")
    return inputs[0]


def module_of(program: ExportedProgram, input_shape: tuple[int, int, int]) -> fx.GraphModule:
    """The network in eval mode, for any batch.

    Raises:
        CompileError: a call that there is nothing like, or a program that does not compute the same as ours.
    """
    flat = program.module(check_guards=False)
    batch = int(_images(program).shape[0])
    calls, values = Calls(batch, input_shape), dict[fx.Node, Any]()
    outputs: list[Any] = []
    for node in flat.graph.nodes:
        if node.op == "placeholder":
            values[node] = calls.input
        elif node.op == "get_attr":
            values[node] = operator.attrgetter(str(node.target))(flat)
        elif node.op == "call_function":
            values[node] = _made(calls, node, values)
        elif node.op == "output":
            outputs, _ = tree_flatten(fx.node.map_arg(node.args[0], values.__getitem__))
    module = calls.module(outputs, lambda found: tree_unflatten(found, program.call_spec.out_spec))
    _check_same(module, flat, batch, input_shape)
    return module


def _made(calls: Calls, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    packet = getattr(node.target, "overloadpacket", node.target)
    name = getattr(packet, "__name__", str(packet)).rpartition(".")[2]
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    where = _layer_path(node) or node.name
    try:
        made = _call(calls, where, name, packet, args, kwargs)
    except CofireError:
        raise
    except Exception as error:
        raise CompileError(f"{node.name!r} ({name}) cannot be compiled: {error}") from error
    if name.endswith("_") and not name.startswith("_") and node.all_input_nodes:  # in place
        values[node.all_input_nodes[0]] = made
    return made


def _layer_path(node: fx.Node) -> str:
    """The module whose weight the call reads."""
    weights = [str(source.target) for source in node.all_input_nodes if source.op == "get_attr"]
    return next((path.rpartition(".")[0] for path in weights if path.endswith(".weight")), "")


def _call(calls: Calls, where: str, name: str, packet: Any, args: Any, kwargs: Any) -> Any:
    plain = name.rstrip("_")
    if plain in _SAME:
        return args[0]
    if plain.startswith(("_assert", "sym_constrain")) or plain == "_guards_fn":
        return None
    if plain in ("sym_size", "size"):
        return calls.shape(args[0])[args[1]]
    if packet is operator.getitem and isinstance(args[0], tuple):
        return args[0][args[1]]
    if plain in _LOWERED:
        return _LOWERED[plain](calls, where, *args, **kwargs)
    function: Any = packet
    if hasattr(packet, "overloads"):
        function = plain if plain in _METHODS else _function(plain)
    if function is None:
        raise CompileError(f"{where!r} ({name}) cannot be compiled: there is no function of torch like it")
    return calls.call(where, function, *args, **kwargs)


def _function(name: str) -> Callable[..., Any] | None:
    """The function of torch that is called so."""
    found = getattr(F, name, None) or getattr(torch, name, None)
    return found if callable(found) else None


_METHODS = {"expand_as", "view_as", "repeat"}


def _conv(
    calls: Calls,
    where: str,
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    window = {"stride": _sides(stride), "padding": _sides(padding), "dilation": _sides(dilation), "groups": groups}
    return calls.conv(where, x, weight, bias, **window)


def _transposed(
    calls: Calls,
    where: str,
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    window = {"stride": _sides(stride), "padding": _sides(padding), "dilation": _sides(dilation), "groups": groups}
    return calls.conv(where, x, weight, bias, transposed=True, output_padding=_sides(output_padding), **window)


def _sides(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        return value
    return value[0] if len(value) == 1 else tuple(value)


def _linear(calls: Calls, where: str, x: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(weight, Tensor):
        raise CompileError(f"{where!r} (linear) cannot be compiled: its weight must be constant")
    return calls.linear(where, x, weight, bias)


def _batch_norm(
    calls: Calls,
    where: str,
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = False,
) -> Any:
    if training or mean is None:
        raise CompileError(f"{where!r} (batch_norm) is in training mode; export the model in eval mode")
    return calls.batch_norm(where, x, eps, weight=weight, bias=bias, running_mean=mean, running_var=var)


def _layer_norm(
    calls: Calls, where: str, x: Any, sizes: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *rest: Any
) -> Any:
    made = nn.LayerNorm(list(sizes), eps, weight is not None, bias is not None, device="meta")
    return calls.norm(where, x, made, weight, bias)


def _group_norm(
    calls: Calls, where: str, x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *rest: Any
) -> Any:
    made = nn.GroupNorm(groups, calls.shape(x)[1], eps, weight is not None, device="meta")
    return calls.norm(where, x, made, weight, bias)


def _prelu(calls: Calls, where: str, x: Any, weight: Tensor) -> Any:
    return calls.norm(where, x, nn.PReLU(weight.numel(), device="meta"), weight, None)


def _slice(calls: Calls, where: str, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    place = (*[slice(None)] * (dim % len(calls.shape(x))), slice(start, end, step))
    return calls.call(where, operator.getitem, x, place)


def _select(calls: Calls, where: str, x: Any, dim: int, index: int) -> Any:
    return calls.call(where, operator.getitem, x, (*[slice(None)] * (dim % len(calls.shape(x))), index))


def _nearest(calls: Calls, where: str, x: Any, size: Any, scales: Any) -> Any:
    return calls.call(where, F.interpolate, x, size=size, scale_factor=scales, mode="nearest")


def _nearest_exact(calls: Calls, where: str, x: Any, size: Any, scales: Any) -> Any:
    return calls.call(where, F.interpolate, x, size=size, scale_factor=scales, mode="nearest-exact")


def _smooth(mode: str) -> Callable[..., Any]:
    def lowered(calls: Calls, where: str, x: Any, size: Any, corners: bool, scales: Any) -> Any:
        options = {"size": size, "scale_factor": scales, "mode": mode, "align_corners": corners}
        return calls.call(where, F.interpolate, x, **options)

    return lowered


def _with_indices(function: Callable[..., Any]) -> Callable[..., Any]:
    """A pooling that also says where its maxima are, which nobody may read."""
    return lambda calls, where, *given: (calls.call(where, function, *given), None)


def _arithmetic(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def lowered(calls: Calls, where: str, x: Any, y: Any, alpha: float = 1, **options: Any) -> Any:
        if options.get("rounding_mode") is not None:
            return calls.call(where, torch.div, x, y, **options)
        if alpha != 1:
            y = calls.call(where, operator.mul, y, alpha)
        return calls.call(where, function, x, y)

    return lowered


def _cast(calls: Calls, where: str, x: Any, *rest: Any, **options: Any) -> Any:
    if isinstance(x, Tensor):
        return x.to(*rest, **options)
    return x  # all that depends on the images is float32 here


_LOWERED: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("conv1d", "conv2d"), _conv),
    "conv_transpose2d": _transposed,
    "linear": _linear,
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "prelu": _prelu,
    "slice": _slice,
    "select": _select,
    "upsample_nearest2d": _nearest,
    "_upsample_nearest_exact2d": _nearest_exact,
    "upsample_bilinear2d": _smooth("bilinear"),
    "upsample_bicubic2d": _smooth("bicubic"),
    "adaptive_max_pool2d": _with_indices(F.adaptive_max_pool2d),
    "max_pool2d_with_indices": _with_indices(F.max_pool2d),
    "add": _arithmetic(operator.add),
    "sub": _arithmetic(operator.sub),
    "mul": _arithmetic(operator.mul),
    "div": _arithmetic(operator.truediv),
    "linalg_vector_norm": lambda calls, where, *given: calls.call(where, torch.linalg.vector_norm, *given),
    "to": _cast,
    "_to_copy": _cast,
    "view": Calls.reshape,
    "reshape": Calls.reshape,
    "_unsafe_view": Calls.reshape,
    "expand": lambda calls, where, x, sizes, implicit=False: calls.expand(where, x, sizes),
    "split_with_sizes": lambda calls, where, x, sizes, dim=0: calls.call(where, torch.split, x, list(sizes), dim),
}


def _check_same(module: nn.Module, program: nn.Module, batch: int, input_shape: tuple[int, int, int]) -> None:
    """Both on the same images: what is written in place may be seen elsewhere, through a view."""
    images = torch.randn(batch, *input_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = (tree_flatten(each(images))[0] for each in (module, program))
    for one, other in zip(ours, theirs, strict=True):
        if not float((one - other).abs().max()) <= _NEAR * float(other.max() - other.min()) + 1e-12:
            raise CompileError(
                "the program does not compute what its calls say, perhaps it writes on tensors in place; compile the "
                "PyTorch model itself, or export it without functions that end in _"
            )
