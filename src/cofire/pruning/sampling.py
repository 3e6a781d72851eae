"""What layers read at random places of some images, and least squares on it: for methods that look at the next layer.

Shapes: N places, I inputs, K taps of a kernel, O filters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cofire.data.feeding import AnyLoader, feed
from cofire.errors import DataError, NoUnitError
from cofire.graph.tracing import evaluating
from cofire.pruning.base import Masks
from cofire.pruning.channels import Channels, ids

POSITIONS = 10  # of each image, as in ThiNet and CP
_MOST = 10_000  # places in all


@dataclass(frozen=True, eq=False)
class Sample:
    """What one layer reads at N places of its output.

    Args:
        patch_NIK: float64, on the CPU.
        weight_OIK: the layer's, likewise.
    """

    patch_NIK: Tensor
    weight_OIK: Tensor

    @property
    def output_NO(self) -> Tensor:
        """What the layer gives there, without its bias."""
        return torch.einsum("nik,oik->no", self.patch_NIK, self.weight_OIK)

    def contributions(self, generator: torch.Generator) -> Tensor:
        """What each input adds to the output of one random filter a place, float64 (N, I)."""
        filter_N = torch.randint(len(self.weight_OIK), (len(self.patch_NIK),), generator=generator)
        return (self.patch_NIK * self.weight_OIK[filter_N]).sum(2)


def samples(model: nn.Module, layers: Iterable[str], loader: AnyLoader | None, why: str) -> dict[str, Sample]:
    """A sample of every layer, at the same places each time.

    Args:
        loader: all of its images are looked at.
        why: what needs images, for the error if there are none.
    """
    if loader is None:
        raise DataError(f"{why} needs images: prune(model, config, loader)")
    modules = {name: _mixing(model, name) for name in layers}
    found: dict[str, list[Tensor]] = {name: [] for name in modules}
    generator = torch.Generator()
    device = next(model.parameters()).device

    def keep(name: str, layer: nn.Conv2d | nn.Linear, x: Tensor) -> None:
        if sum(map(len, found[name])) < _MOST:
            generator.manual_seed(len(found[name]))  # the same places for a model and its smaller copy
            found[name].append(_patches(layer, x, generator).double().cpu())

    hooks = [
        layer.register_forward_pre_hook(lambda layer, args, name=name: keep(name, layer, args[0]))
        for name, layer in modules.items()
    ]
    try:
        with torch.no_grad(), evaluating(model):
            for x_BCHW, _ in feed(loader, "sampling"):
                model(x_BCHW.to(device))
    finally:
        for hook in hooks:
            hook.remove()
    return {name: Sample(torch.cat(found[name]), _weight(layer)) for name, layer in modules.items()}


def _weight(layer: nn.Conv2d | nn.Linear) -> Tensor:
    weight = layer.weight.detach().double().cpu()
    return weight.reshape(*weight.shape[:2], -1)


def _mixing(model: nn.Module, name: str) -> nn.Conv2d | nn.Linear:
    layer = model.get_submodule(name)
    if isinstance(layer, nn.Conv2d) and type(layer).forward is not nn.Conv2d.forward:
        raise NoUnitError(f"{name} ({type(layer).__name__}) pads or computes in its own way and cannot be sampled")
    return cast("nn.Conv2d | nn.Linear", layer)


def _patches(layer: nn.Conv2d | nn.Linear, x: Tensor, generator: torch.Generator) -> Tensor:
    """(N, I, K) at random places of the layer's output."""
    if isinstance(layer, nn.Linear):
        return x.reshape(-1, x.shape[-1], 1)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    size = [
        (side - dilation * (taps - 1) - 1) // stride + 1
        for side, dilation, taps, stride in zip(
            x.shape[2:], layer.dilation, layer.kernel_size, layer.stride, strict=True
        )
    ]
    unfolded_BCL = F.unfold(x, layer.kernel_size, dilation=layer.dilation, stride=layer.stride)
    place_BP = torch.randint(size[0] * size[1], (len(x), POSITIONS), generator=generator).to(x.device)
    chosen_BCP = unfolded_BCL.gather(2, place_BP[:, None].expand(-1, unfolded_BCL.shape[1], -1))
    return chosen_BCP.movedim(1, 2).reshape(len(x) * POSITIONS, layer.in_channels, -1)


def of_channels(channel_I: Tensor, size: int, value_NI: Tensor) -> Tensor:
    """Values of inputs added up by channel, (N, size); -1 is no channel of the group."""
    mine = channel_I >= 0
    return value_NI.new_zeros(len(value_NI), size).index_add_(1, channel_I[mine], value_NI[:, mine])


def listeners(channels: Channels, masks: Masks) -> dict[str, Tensor]:
    """Layer that lost inputs -> which of them are left, bool (I,); in execution order."""
    kept = channels.kept_ids(masks)
    found = {
        op.conv.module: kept[ids(op.reads[0])]
        for op in channels.graph.ops
        if op.conv is not None and op.conv.groups == 1 and op.reads
    }
    return {layer: kept_I for layer, kept_I in found.items() if not bool(kept_I.all())}


def least_squares(a_NM: Tensor, b_NP: Tensor) -> Tensor:
    """The x (M, P) with the smallest |a x - b|, of several the one with the smallest |x|; float64."""
    solution: Tensor = torch.linalg.lstsq(a_NM, b_NP, driver="gelsd").solution
    return solution
