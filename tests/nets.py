"""Small networks for tests: modules by name and a forward in one expression."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cofire import FTWT, GatedModel, gate

SHAPE = (3, 8, 8)


class Net(nn.Module):
    """``forward(net, x)`` over the modules given; ends in a linear layer named ``fc`` where ``logits`` is called."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.call = forward
        randomise(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)

    def logits(self, x: Tensor) -> Tensor:
        return self.fc(x.mean((2, 3)))


def conv(in_channels: int, out_channels: int, size: int = 3, **options: Any) -> nn.Conv2d:
    """A conv that keeps the map's size."""
    return nn.Conv2d(in_channels, out_channels, size, padding=size // 2, **options)


def bn(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels)


def fc(channels: int, classes: int = 5) -> nn.Linear:
    return nn.Linear(channels, classes)


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Random weights and norm statistics, so that no channel is zero unless a mask makes it so."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("running_var") or name.endswith("bn.weight"):
                tensor.uniform_(0.5, 1.5, generator=generator)
            elif tensor.is_floating_point():
                tensor.normal_(0.0, 0.5, generator=generator)


def gated_net(
    model: nn.Module, shape: tuple[int, int, int] = SHAPE, filter_fn: Any = None, **options: Any
) -> GatedModel:
    """``model`` in eval mode behind FTWT gates, also where a head does not pay."""
    torch.manual_seed(0)  # of the heads' weights
    return gate(model.eval(), FTWT(**{"always": True, **options}), input_shape=shape, filter_fn=filter_fn)


def images(batch: int = 3, shape: tuple[int, int, int] = SHAPE, seed: int = 1) -> Tensor:
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(seed))


def random_masks(gated: GatedModel, batch: int, keep: float = 0.5, seed: int = 2) -> dict[str, Tensor]:
    """A bool mask (B, O) for every group."""
    generator = torch.Generator().manual_seed(seed)
    widths = {group: units[-1].out_channels for group, units in gated.units.groups.items()}
    return {group: torch.rand(batch, width, generator=generator) < keep for group, width in widths.items()}


@torch.no_grad()
def run(gated: GatedModel, x: Tensor, masks: Mapping[str, Tensor] | str) -> Tensor:
    """Logits under forced masks."""
    with gated.force(masks):
        return gated(x)


def live_inputs(gated: GatedModel, layer: str, masks: Mapping[str, Tensor]) -> list[int]:
    """Channels (features of a linear layer) that an ungated or fully open layer reads, per sample."""
    module = gated.get_submodule(layer)
    width = module.in_features if isinstance(module, nn.Linear) else module.in_channels
    cost = gated.cost(masks)
    assert cost.dense[layer] % width == 0
    per_channel = cost.dense[layer] // width
    return [macs // per_channel for macs in cost.executed[layer].tolist()]
