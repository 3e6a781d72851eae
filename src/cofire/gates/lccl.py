"""LCCL, "More is Less" (Dong et al. 2017): a cheap conv says at which positions the real one need not be computed.

Beside each unit stands a low-cost collaborative conv with norm and ReLU; the outputs are multiplied, so that where the
cheap one is zero the unit's own value does not matter. No loss asks for sparsity: it is learned from the task alone.
The paper multiplies the conv's output; here it is the unit's, behind norm and activation, so that readers see a true 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, cast, final

import torch
from torch import Tensor, nn

from cofire.files.strict import check
from cofire.gates.base import AbstractMethod, Decision, GateConfig, Step, register_method
from cofire.graph.graph import Graph
from cofire.graph.masks import PixelMask
from cofire.graph.placement import Filter, place_pixels
from cofire.graph.units import Site, Unit


@dataclass(frozen=True, kw_only=True)
class LCCL(GateConfig):
    """The method's options.

    Args:
        form: the cheap conv has the unit's own window and a ``single`` map for all filters, or is ``pointwise`` with a
            map for each filter.
    """

    form: Literal["single", "pointwise"] = "single"

    def __post_init__(self) -> None:
        check(self)


class LCCLGate(nn.Module):
    """The cheap conv of one unit."""

    def __init__(self, conv: nn.Conv2d, config: LCCL) -> None:
        super().__init__()
        single = config.form == "single"
        maps, size = (1, conv.kernel_size) if single else (conv.out_channels, 1)
        padding, dilation = (conv.padding, conv.dilation) if single else (0, 1)
        self.conv = nn.Conv2d(conv.in_channels, maps, size, conv.stride, padding, dilation, bias=False)  # type: ignore[arg-type]
        self.norm = nn.BatchNorm2d(maps)
        # Around 1, everywhere above 0: it starts close to the network it stands beside.
        nn.init.constant_(self.norm.weight, 0.1)
        nn.init.ones_(self.norm.bias)

    def forward(self, x_BIHW: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x_BIHW)))


@final
@register_method(LCCL)
class LCCLMethod(AbstractMethod):
    """Positions that are computed, by image and unit."""

    config: LCCL
    pace: ClassVar[Literal["heads", "backbone"]] = "backbone"

    def __init__(self, config: LCCL, graph: Graph) -> None:
        super().__init__(config, graph)
        convs = {name: cast(nn.Conv2d, graph.modules[site.units[0].name]) for name, site in self.sites.items()}
        self.hold({name: LCCLGate(conv, config) for name, conv in convs.items()})

    @classmethod
    def place(cls, graph: Graph, config: LCCL, filter_fn: Filter | None) -> Graph:
        return place_pixels(graph, config, filter_fn, lambda units: _cheap_macs(units[0], config))

    def head_macs(self, site: Site) -> int:
        return _cheap_macs(site.units[0], self.config)

    def decide(self, site: Site, x_BIHW: Tensor) -> Decision:
        factor = self[site.name](x_BIHW)
        return Decision(None, PixelMask((factor.detach() > 0).to(factor.dtype)), factor)

    def loss(self, step: Step) -> Tensor:
        return step.logits_BK.new_zeros(())


def _cheap_macs(unit: Unit, config: LCCL) -> int:
    """MACs of the cheap conv beside a unit."""
    positions = unit.out_size[0] * unit.out_size[1]
    if config.form == "pointwise":
        return unit.in_channels * unit.out_channels * positions
    return unit.in_channels * unit.kernel_size[0] * unit.kernel_size[1] * positions
