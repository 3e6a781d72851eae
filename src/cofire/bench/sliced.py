"""PyTorch with weights sliced per call: how the paper turns masks into time.

For each image and gated conv the rows of active filters and the columns of live inputs are gathered into a smaller
weight, and a smaller conv runs. Behind a gate, maps hold active filters only, until something reads all channels (an
addition, a flatten), which gets them back in their places.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from cofire.errors import ConfigError
from cofire.export import fold_norms
from cofire.gates.base import Compiling
from cofire.gates.gating import GatedModel, require_filters
from cofire.graph.graph import Graph

Rows = Tensor | None
"""Channels that a map holds, int64; None: all of them."""


class Sliced:
    """A gated model that computes active filters only, for one image per call; heads run also under forced masks."""

    def __init__(self, gated: GatedModel) -> None:
        require_filters(gated, "slicing weights")
        method = gated.gates
        if not isinstance(method, Compiling):
            raise ConfigError(f"weights can be sliced for linear heads, which {gated.config.label} has not")
        self._heads = {name: method.lower(site) for name, site in method.sites.items()}
        if scaling := [name for name, head in self._heads.items() if head.scale]:
            raise ConfigError(f"weights cannot be sliced where filters are scaled: {scaling[0]!r}")
        self._gated = gated
        self._forced: Mapping[str, Tensor] = {}
        self._image = torch.zeros(1)
        backbone = copy.deepcopy(gated.backbone).eval()
        calls = _sliced_calls(gated.graph, fold_norms(copy.deepcopy(gated.graph.calls), backbone), backbone)
        self._run = fx.GraphModule(backbone, calls)

    @torch.no_grad()
    def __call__(self, x_BCHW: Tensor) -> Tensor:
        if len(x_BCHW) != 1:
            raise ConfigError(f"weights are sliced for one image at a time, got a batch of {len(x_BCHW)}")
        self._image = x_BCHW
        logits: Tensor = self._run(x_BCHW, self._active)
        return logits

    @contextmanager
    def force(self, masks: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside the block the masks given, group -> (1, O) or (O,) bool, rule; other gates decide for themselves."""
        self._forced, before = {group: mask.reshape(-1) for group, mask in masks.items()}, self._forced
        try:
            yield
        finally:
            self._forced = before

    def _active(self, group: str, x_BIHW: Tensor, rows: Rows) -> Tensor:
        """Active filters of a group, int64; the head is asked in any case."""
        channels = self._gated.gates.sites[group].units[0].in_channels
        head, threshold = self._heads[group], self._gated.threshold or 0.0
        if head.source is not None:
            on_BO = head.chosen(head.source(self._image), threshold)
        else:
            on_BO = head.chosen(x_BIHW, threshold, lambda x_BI: _widened(x_BI, rows, channels))
        return self._forced.get(group, on_BO[0]).nonzero()[:, 0]


def _widened(x: Tensor, rows: Rows, channels: int) -> Tensor:
    """``x`` with all channels; those it does not hold are zero."""
    if rows is None:
        return x
    return x.new_zeros(x.shape[0], channels, *x.shape[2:]).index_copy_(1, rows, x)


def _sum(whole: Tensor, part: Tensor, rows: Tensor) -> Tensor:
    return whole.index_add(1, rows, part)


def _conv(x: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, columns: Rows, options: dict[str, Any]) -> Tensor:
    if rows is not None:
        weight = weight.index_select(0, rows)
        bias = None if bias is None else bias.index_select(0, rows)
    if columns is not None:
        weight = weight.index_select(1, columns)
    return F.conv2d(x, weight, bias, **options)


def _depthwise(x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, options: dict[str, Any]) -> Tensor:
    return _conv(x, weight, bias, rows, None, {**options, "groups": len(rows)})


def _sliced_calls(graph: Graph, calls: fx.Graph, backbone: nn.Module) -> fx.Graph:
    """``calls`` with a second input, the function that names active filters, and convs that compute only those."""
    return _Slicer(graph, calls, backbone).run()


class _Slicer:
    """Rewrites calls in execution order; ``holds`` knows which node's map holds only which channels."""

    def __init__(self, graph: Graph, calls: fx.Graph, backbone: nn.Module) -> None:
        self.graph, self.calls, self.backbone = graph, calls, backbone
        self.groups = {unit.conv: unit.group for unit in graph.units if unit.gated}
        self.kinds = {op.name: op.kind for op in graph.ops}
        self.holds: dict[fx.Node, fx.Node] = {}
        self.rows: dict[str, fx.Node] = {}
        with calls.inserting_after(calls.find_nodes(op="placeholder")[-1]):
            self.active = calls.placeholder("active")
        self.inside = self._inside_units()

    def _inside_units(self) -> set[str]:
        """Ops between a gated conv and the place of its mask: what they make of a zero does not matter."""
        inside: set[str] = set()
        for unit in self.graph.units:
            op = self.graph[unit.conv]
            while unit.gated and op.name != unit.out:
                readers = self.graph.users(op)
                if len(readers) != 1 or len(readers[0].sources) != 1:
                    raise ConfigError(f"unit {unit.name!r}: weights cannot be sliced for a mask behind an addition")
                op = readers[0]
                inside.add(op.name)
        return inside

    def run(self) -> fx.Graph:
        for node in list(self.calls.nodes):
            if node.op in ("placeholder", "get_attr"):
                continue
            with self.calls.inserting_before(node):
                self._rewrite(node)
        self.calls.lint()
        return self.calls

    def _rewrite(self, node: fx.Node) -> None:
        sources = node.all_input_nodes
        held = [source for source in sources if source in self.holds]
        kind = self.kinds.get(node.name)
        if node.name in self.groups:
            self._replace_gated(node)
        elif kind == "conv" and held and self._is_plain(node):
            self._replace(node, sources[0], None, self.holds[held[0]])
        elif len(sources) == len(held) == 1 and (kind in ("activation", "pass") or node.name in self.inside):
            self.holds[node] = self.holds[held[0]]
        elif kind == "add" and len(held) == 1 and len(sources) == 2 and node.kwargs == {}:
            whole = next(source for source in sources if source not in held)
            summed = self._call(_sum, whole, held[0], self.holds[held[0]])
            self._take_over(node, summed)
        else:
            for source in held:
                node.replace_input_with(source, self._whole(source))

    def _replace_gated(self, conv: fx.Node) -> None:
        group, x = self.groups[conv.name], conv.all_input_nodes[0]
        module = self.backbone.get_submodule(str(conv.target))
        if not isinstance(module, nn.Conv2d):
            raise ConfigError(f"unit {conv.target!r}: weights are sliced for convs alone, not for {module}")
        if group not in self.rows:
            self.rows[group] = self.calls.call_function(_ask, (self.active, group, x, self.holds.get(x)))
        rows = self.rows[group]
        if self._is_plain(conv):
            new = self._replace(conv, x, rows, self.holds.get(x))
        elif self._is_depthwise(conv):
            same = self.holds.get(x) is rows
            inputs = x if same else self._call(torch.index_select, self._whole(x), 1, rows)
            new = self._replace(conv, inputs, rows, None)
        else:
            raise ConfigError(f"conv {conv.target!r}: weights cannot be sliced for {self._module(conv).groups} groups")
        self.holds[new] = rows

    def _replace(self, conv: fx.Node, x: fx.Node, rows: fx.Node | None, columns: fx.Node | None) -> fx.Node:
        module = self._module(conv)
        options = {"stride": module.stride, "padding": module.padding, "dilation": module.dilation}
        weight = self.calls.get_attr(f"{conv.target}.weight")
        bias = None if module.bias is None else self.calls.get_attr(f"{conv.target}.bias")
        if self._is_depthwise(conv):
            new = self._call(_depthwise, x, weight, bias, rows, options)
        else:
            new = self._call(_conv, x, weight, bias, rows, columns, options)
        self._take_over(conv, new)
        return new

    def _take_over(self, old: fx.Node, new: fx.Node) -> None:
        old.replace_all_uses_with(new)
        self.calls.erase_node(old)

    def _whole(self, node: fx.Node) -> fx.Node:
        if node not in self.holds:
            return node
        group = next(group for group, rows in self.rows.items() if rows is self.holds[node])
        channels = self.graph.units.groups[group][-1].out_channels
        return self._call(_widened, node, self.holds[node], channels)

    def _call(self, function: Any, *args: Any) -> fx.Node:
        return self.calls.call_function(function, args)

    def _module(self, conv: fx.Node) -> nn.Conv2d:
        return cast(nn.Conv2d, self.backbone.get_submodule(str(conv.target)))

    def _is_plain(self, conv: fx.Node) -> bool:
        """A conv whose weight can be cut in both directions."""
        if conv.op != "call_module" or type(self._module(conv)) is not nn.Conv2d:
            return False
        return self._module(conv).groups == 1 and self._module(conv).padding_mode == "zeros"

    def _is_depthwise(self, conv: fx.Node) -> bool:
        module = self._module(conv)
        return module.groups == module.in_channels == module.out_channels and module.groups > 1


def _ask(active: Any, group: str, x: Tensor, rows: Rows) -> Tensor:
    found: Tensor = active(group, x, rows)
    return found
