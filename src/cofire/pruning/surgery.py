"""Model + masks -> the smaller module, proven to compute what the masked one does."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from cofire.errors import TraceError
from cofire.graph.cost import cost
from cofire.graph.graph import trace
from cofire.graph.tracing import evaluating
from cofire.pruning.channels import Channels, ids
from cofire.pruning.probe import scaled

_OF_SPREAD, _OF_SIZE = 1e-4, 1e-5  # sums in another order differ by less, a wrong channel by far more


def cut(model: nn.Module, channels: Channels, masks: Mapping[str, Tensor], *, check: bool = True) -> nn.Module:
    """A copy of ``model`` without the channels that ``masks`` switches off.

    Args:
        channels: of ``model``.
        masks: group -> bool (O,), at least one True each.
        check: compare it with the masked model; a search that cuts often need not.

    Raises:
        TraceError: the copy does not run, or does not compute what the masked model does, e.g. because a width is
            written into the forward.
    """
    smaller = copy.deepcopy(model)
    kept = channels.kept_ids(masks)
    for op in channels.graph.ops:
        name = channels.called.get(op.name, "")
        if op.conv is not None and name:
            _cut_layer(smaller.get_submodule(name), kept[ids(op.reads[0])], kept[ids(op.own)])
        elif op.channels and name:
            _cut_channels(smaller.get_submodule(name), kept[ids(op.own)])
    if check:
        _check(model, smaller, channels, masks)
    return smaller


def _cut_layer(layer: nn.Module, inputs_I: Tensor, filters_O: Tensor) -> None:
    """Take inputs and filters out of a conv or linear layer in place."""
    if not isinstance(layer, (nn.Conv2d, nn.Linear)):
        return  # pinned
    _keep(layer, "weight", filters_O)
    _keep(layer, "bias", filters_O)
    if isinstance(layer, nn.Linear):
        _keep(layer, "weight", inputs_I, dim=1)
        layer.out_features, layer.in_features = layer.weight.shape
        return
    if layer.groups > 1:  # whole groups leave, so that a filter has as many inputs as before
        layer.groups = int(filters_O.sum()) // (layer.out_channels // layer.groups)
    else:
        _keep(layer, "weight", inputs_I, dim=1)
    layer.out_channels, layer.in_channels = len(layer.weight), layer.weight.shape[1] * layer.groups


def _cut_channels(module: nn.Module, kept_C: Tensor) -> None:
    """Take channels out of what treats them one by one: a norm, a PReLU."""
    if isinstance(module, _NormBase):
        for name in ("weight", "bias", "running_mean", "running_var"):
            _keep(module, name, kept_C)
        module.num_features = int(kept_C.sum())
    elif isinstance(module, nn.PReLU) and module.num_parameters > 1:
        _keep(module, "weight", kept_C)
        module.num_parameters = int(kept_C.sum())


def _keep(module: nn.Module, name: str, kept: Tensor, dim: int = 0) -> None:
    """Replace a parameter or buffer, if there is one, by its part that stays."""
    tensor = getattr(module, name)
    if tensor is None or bool(kept.all()):
        return
    part = tensor.detach().index_select(dim, kept.nonzero().flatten().to(tensor.device)).contiguous()
    learned = isinstance(tensor, nn.Parameter)
    setattr(module, name, nn.Parameter(part, tensor.requires_grad) if learned else part)


@torch.no_grad()
def _check(model: nn.Module, smaller: nn.Module, channels: Channels, masks: Mapping[str, Tensor]) -> None:
    """MACs as planned, and outputs equal to those of the masked model on images of noise."""
    like = next(model.parameters())
    noise = torch.randn(2, *channels.input_shape, generator=torch.Generator().manual_seed(0)).to(like)
    factors = {name: mask_O.to(like) for name, mask_O in masks.items()}
    try:
        with evaluating(smaller):
            found = _tensors(smaller(noise))
        macs = cost(trace(smaller, channels.input_shape), {}).dense_total
    except Exception as error:
        raise TraceError(
            f"the model does not run with fewer filters; its forward may have a width written into it: {error}"
        ) from error
    with evaluating(model):
        expected = _tensors(scaled(model, channels, factors, noise))
    rounding = 10 * torch.finfo(like.dtype).eps
    planned = round(channels.remaining(masks) * cost(channels.graph, {}).dense_total)
    wrong = [f"{macs:,} MACs instead of {planned:,}"] if macs != planned else []
    for one, other in zip(found, expected, strict=True):
        difference, spread, size = (float(x) for x in ((one - other).abs().max(), other.std(), other.abs().max()))
        if not difference <= (_OF_SPREAD + rounding) * spread + _OF_SIZE * size:
            wrong.append(f"outputs that differ by {difference:.3g} (their spread is {spread:.3g})")
    if wrong:
        raise TraceError(
            f"the smaller model must compute what the masked one does, but has {' and '.join(wrong)}; its forward may "
            "do something with channels that tracing does not see"
        )


def _tensors(outputs: object) -> list[Tensor]:
    """The tensors in what a model returns."""
    if isinstance(outputs, Tensor):
        return [outputs]
    parts = outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, (tuple, list)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]
