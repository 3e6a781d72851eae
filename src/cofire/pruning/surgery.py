"""Model + masks -> the smaller module. Our graph says which channels of which layer go; Torch-Pruning cuts the layers.

Torch-Pruning's own dependency graph is not used: version 1.6.1 loses track of channels in nested concatenations.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor, nn

from cofire.errors import CofireError, TraceError
from cofire.extras import require
from cofire.graph.cost import cost
from cofire.graph.graph import Graph, trace
from cofire.graph.live import Live, live_inputs
from cofire.pruning.removal import inner_modules


def cut(model: nn.Module, graph: Graph, masks: Mapping[str, Tensor]) -> nn.Module:
    """A copy of ``model`` without the filters that ``masks`` switches off.

    Args:
        graph: of ``model``; its gated units are removable.
        masks: group -> bool (O,), at least one True each.

    Raises:
        TraceError: the copy does not run, e.g. because a width is written into the forward.
    """
    pruning = require("torch_pruning", package="torch-pruning", extra="prune")
    smaller = copy.deepcopy(model)
    trained = {name: parameter.requires_grad for name, parameter in smaller.named_parameters()}
    kept = {unit: masks[unit.group] for unit in graph.units if unit.gated}
    filters = {unit.conv: mask_O for unit, mask_O in kept.items()}
    through = {unit.out: Live.under(mask_O[None]) for unit, mask_O in kept.items()}
    live = live_inputs(graph, through, next(iter(through.values())))
    with torch.no_grad():
        for op in graph.ops:
            if op.conv is not None:
                inputs_I = live[op.name].table_BC[0] == 0
                _cut_layer(pruning, smaller.get_submodule(op.conv.module), inputs_I, filters.get(op.name))
        for unit, mask_O in kept.items():
            for name in inner_modules(graph, unit):
                _cut_channels(pruning, smaller.get_submodule(name), mask_O)
    for name, learns in trained.items():
        smaller.get_parameter(name).requires_grad_(learns)
    _check(smaller, graph, masks)
    return smaller


def _cut_layer(pruning: ModuleType, layer: nn.Module, inputs_I: Tensor, filters_O: Tensor | None) -> None:
    """Take channels out of a conv or linear layer in place: inputs that are dead, filters that are off."""
    if isinstance(layer, nn.Conv2d) and layer.groups > 1:
        if filters_O is not None:
            pruning.prune_depthwise_conv_out_channels(layer, _gone(filters_O))
        return
    if gone := _gone(inputs_I):
        kind = "linear" if isinstance(layer, nn.Linear) else "conv"
        getattr(pruning, f"prune_{kind}_in_channels")(layer, gone)
    if filters_O is not None:
        pruning.prune_conv_out_channels(layer, _gone(filters_O))


def _cut_channels(pruning: ModuleType, module: nn.Module, mask_C: Tensor) -> None:
    """Take channels out of what stands between a unit's conv and its end."""
    if isinstance(module, nn.BatchNorm2d):
        pruning.prune_batchnorm_out_channels(module, _gone(mask_C))
    elif isinstance(module, nn.PReLU) and module.num_parameters > 1:
        pruning.prune_prelu_out_channels(module, _gone(mask_C))


def _gone(mask_C: Tensor) -> list[int]:
    found: list[int] = (~mask_C).nonzero().flatten().tolist()
    return found


def _check(smaller: nn.Module, graph: Graph, masks: Mapping[str, Tensor]) -> None:
    planned = cost(graph, {group: mask_O[None] for group, mask_O in masks.items()}).executed
    try:
        found = cost(trace(smaller, graph.input_shape), {}).dense
    except CofireError as error:
        raise TraceError(
            f"the model does not run with fewer filters; its forward may have a width written into it: {error}"
        ) from error
    assert {layer: int(macs) for layer, macs in planned.items()} == found
