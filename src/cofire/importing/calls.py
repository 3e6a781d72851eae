"""Calls of torch functions and layers under construction: an fx graph whose shapes are known, its constants folded.

A *value* is a node of the graph, which depends on the images, or a constant: a tensor, a number, a list of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_map

from cofire.errors import CompileError
from cofire.importing.spelled import ONLY_SPELLED, spelled_out

_ELEMENTS = 1 << 28
"""Of one value; more is refused before it is made: a small file may ask for any size."""
_WORK = 1 << 40
"""Multiply-accumulates of all layers."""


class Calls:
    """Each call is run on tensors without data, and really if all that it takes is constant."""

    def __init__(self, batch: int, input_shape: tuple[int, int, int]) -> None:
        self.graph = fx.Graph()
        self.held: dict[str, Tensor | nn.Module] = {}
        self.shaped: dict[fx.Node, Any] = {}
        self.input = self.graph.placeholder("images")
        self.shaped[self.input] = self._checked(torch.empty(batch, *input_shape, device="meta"), "the input")
        self.batch = batch
        self.work = 0

    def module(self, outputs: Sequence[Any], arranged: Callable[[Sequence[Any]], Any] | None = None) -> fx.GraphModule:
        """The finished network; several outputs are a tuple, or as ``arranged`` gives them."""
        for output in outputs:
            if not isinstance(output, fx.Node):
                raise CompileError("an output of the graph does not depend on its images; leave it out of the file")
        whole = outputs[0] if len(outputs) == 1 else tuple(outputs)
        self.graph.output(whole if arranged is None else arranged(list(outputs)))
        spelled_out(self.graph)
        self._refuse_what_is_left()
        self.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
        return fx.GraphModule(self.held, self.graph, "Imported").eval()

    def _refuse_what_is_left(self) -> None:
        for node in self.graph.nodes:
            if node.target in ONLY_SPELLED and node.users:
                what = getattr(node.target, "__name__", node.target)
                raise CompileError(
                    f"{node.meta['inside']!r} ({what}) cannot be compiled: the engine has no such op for what depends "
                    "on the images. Ways out: export the model up to it, or compile the PyTorch model itself"
                )

    def shape(self, value: Any) -> tuple[int, ...]:
        """Of a node or a tensor, the batch included."""
        return tuple((self.shaped[value] if isinstance(value, fx.Node) else torch.as_tensor(value)).shape)

    # Calls

    def call(self, name: str, function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """The value that ``function``, or the method of that name, gives."""
        run = function if callable(function) else getattr(Tensor, function)
        shaped = self._checked(run(*tree_map(self._meta, args), **tree_map(self._meta, kwargs)), name)
        if not any(isinstance(part, fx.Node) for part in tree_flatten((args, kwargs))[0]):
            return run(*args, **kwargs)
        op = "call_function" if callable(function) else "call_method"
        node = self.graph.create_node(op, function, *tree_map(self._held(name), (args, kwargs)))
        return self._added(node, name, shaped)

    def layer(self, name: str, layer: nn.Module, x: Any) -> Any:
        """What ``layer``, which holds its weights, gives for ``x``."""
        state = {key: tensor.detach().to("meta") for key, tensor in layer.state_dict().items()}
        shaped = torch.func.functional_call(layer.eval(), state, (self._meta(x),))
        self._count(name, layer, shaped, x)
        self._checked(shaped, name)
        if not isinstance(x, fx.Node):
            return layer(x)
        name = self._free(name)
        self.held[name] = layer
        return self._added(self.graph.call_module(name, (x,)), name, shaped)

    def _meta(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to("meta")
        return self.shaped[value] if isinstance(value, fx.Node) else value

    def _held(self, name: str) -> Callable[[Any], Any]:
        def held(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.numel() == 1 and value.ndim == 0:
                return value.item()
            key = self._free(f"{name}.constant")
            self.held[key] = value
            return self.graph.get_attr(key)

        return held

    def _added(self, node: fx.Node, name: str, shaped: Any) -> fx.Node:
        node.meta["inside"] = name
        self.shaped[node] = shaped
        return node

    def _free(self, name: str) -> str:
        """A path for a module, with a number behind it if there is one already."""
        parts = [re.sub(r"\W+", "_", part) for part in name.split(".")]
        path = ".".join(part for part in parts if part.strip("_")) or "layer"
        found, number = path, 1
        while any(found == key or key.startswith(f"{found}.") or found.startswith(f"{key}.") for key in self.held):
            number += 1
            found = f"{path}_{number}"
        return found

    def _checked(self, shaped: Any, name: str) -> Any:
        for part in tree_flatten(shaped)[0]:
            if isinstance(part, Tensor) and part.numel() > _ELEMENTS:
                raise CompileError(
                    f"{name!r} would have {part.numel():,} elements, shape {tuple(part.shape)}; at most {_ELEMENTS:,} "
                    "are taken: give a smaller input_shape"
                )
        return shaped

    def _count(self, name: str, layer: nn.Module, shaped: Tensor, x: Any) -> None:
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim > 1:
            transposed = isinstance(layer, nn.ConvTranspose2d)
            filters = weight.shape[0]
            positions = math.prod(self.shape(x)) if transposed else shaped.numel()
            self.work += positions // max(1, filters) * weight.numel()
            if self.work > _WORK * self.batch:
                raise CompileError(
                    f"up to {name!r} it takes more than {_WORK:,} multiply-accumulates; that is too many"
                )

    # What both kinds of graphs write otherwise than modules do

    def reshape(self, name: str, x: Any, sizes: Sequence[int]) -> Any:
        """With any batch where the first size is the batch's."""
        sizes = list(sizes)
        if isinstance(x, fx.Node) and sizes and self.shape(x)[:1] == (self.batch,) and sizes[0] in (self.batch, -1):
            rest = self.shaped[x].reshape(sizes).shape
            if rest[0] == self.batch:
                sizes = [-1, *rest[1:]]
        return self.call(name, torch.reshape, x, sizes)

    def expand(self, name: str, x: Any, sizes: Sequence[int]) -> Any:
        """Broadcast to at least ``sizes``, the batch left as it is."""
        wanted = list(torch.broadcast_shapes(self.shape(x), tuple(sizes)))
        if isinstance(x, fx.Node) and len(wanted) == len(self.shape(x)) and wanted[0] == self.shape(x)[0]:
            if tuple(wanted) == self.shape(x):
                return x
            wanted[0] = -1
        return self.call(name, "expand", x, wanted)

    def conv(self, name: str, x: Any, weight: Any, bias: Any, transposed: bool = False, **window: Any) -> Any:
        """A conv of one or two dimensions; ``padding`` may differ between the sides: (top, left, bottom, right)."""
        dims = len(self.shape(weight)) - 2
        if not isinstance(weight, Tensor) or isinstance(bias, fx.Node):
            raise CompileError(f"{name!r} cannot be compiled: the weights of a conv must be constant")
        kinds: dict[tuple[int, bool], Any] = {
            (1, False): nn.Conv1d,
            (2, False): nn.Conv2d,
            (2, True): nn.ConvTranspose2d,
        }
        if (dims, transposed) not in kinds:
            what = "transposed conv" if transposed else "conv"
            raise CompileError(f"{name!r} cannot be compiled: there is no {what} of {dims} dimensions")
        padding = window.pop("padding", (0,) * dims)
        if not isinstance(padding, (int, str)) and len(padding) == 2 * dims:
            if padding[:dims] == padding[dims:]:
                padding = padding[:dims]
            elif transposed:
                raise CompileError(f"{name!r} cannot be compiled: its padding differs between the sides: {padding}")
            else:
                x, padding = self.pad(f"{name}.pad", x, padding), (0,) * dims
        groups = int(window.get("groups", 1))
        into, out = weight.shape[1] * groups, weight.shape[0]
        if transposed:
            into, out = out, into
        made = kinds[dims, transposed](
            into, out, tuple(weight.shape[2:]), padding=padding, bias=bias is not None, device="meta", **window
        )
        return self.layer(name, _filled(made, weight=weight, bias=bias), x)

    def pad(self, name: str, x: Any, around: Sequence[int], **options: Any) -> Any:
        """``around`` is what comes before each dimension of a map, then what comes behind each."""
        half = len(around) // 2
        pairs = zip(reversed(around[:half]), reversed(around[half:]), strict=True)
        return self.call(name, F.pad, x, [side for pair in pairs for side in pair], **options)

    def linear(self, name: str, x: Any, weight_OI: Tensor, bias: Tensor | None) -> Any:
        """A linear layer on the last dimension."""
        made = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias is not None, device="meta")
        return self.layer(name, _filled(made, weight=weight_OI, bias=bias), x)

    def batch_norm(self, name: str, x: Any, epsilon: float, **tensors: Tensor | None) -> Any:
        """``tensors``: weight, bias, running_mean, running_var, all constant."""
        kind = nn.BatchNorm2d if len(self.shape(x)) == 4 else nn.BatchNorm1d
        affine = tensors.get("weight") is not None
        made = kind(self.shape(x)[1], eps=epsilon, affine=affine, device="meta")
        count = torch.tensor(0)
        return self.layer(name, _filled(made, num_batches_tracked=count, **tensors), x)

    def norm(self, name: str, x: Any, made: nn.Module, weight: Tensor | None, bias: Tensor | None) -> Any:
        """A group, layer or instance norm that was made without tensors, with these."""
        return self.layer(name, _filled(made, weight=weight, bias=bias), x)


def _filled(layer: nn.Module, **tensors: Tensor | None) -> nn.Module:
    """``layer``, made without data, with these parameters and buffers."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        own = getattr(layer, name)
        if own is None or own.shape != tensor.shape:
            raise CompileError(
                f"{type(layer).__name__}.{name} must have the shape {None if own is None else tuple(own.shape)}, "
                f"got {tuple(tensor.shape)}"
            )
        is_parameter = isinstance(own, nn.Parameter)
        setattr(layer, name, nn.Parameter(tensor.detach().clone(), False) if is_parameter else tensor.detach().clone())
    return layer
