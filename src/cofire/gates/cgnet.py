"""CGNet, "Channel Gating Neural Networks" (Hua et al. 2019): a part of the sum says where the rest of it is needed.

A conv first adds up a few of its input channels at every position. Where these partial sums, normalised, are above a
learned threshold of their filter, the other channels are added too; elsewhere the partial sums stay as they are.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar, Literal, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cofire.errors import ConfigError
from cofire.files.strict import check
from cofire.gates.base import AbstractMethod, Decision, GateConfig, Step, register_method
from cofire.graph.graph import Graph
from cofire.graph.masks import AbstractMask, PixelMask
from cofire.graph.placement import Filter, place_pixels
from cofire.graph.units import Site, Unit


@dataclass(frozen=True, kw_only=True)
class CGNet(GateConfig):
    """The method's options.

    Args:
        parts: one of so many equal parts of the input channels, the first, is always added up; at least 2.
        target: where the thresholds start and are pulled to, in standard deviations of the partial sums; higher is
            cheaper.
        strength: of that pull.
        slope: of the sigmoid that a decision is taken for in the backward pass, above 0.
    """

    parts: int = 4
    target: float = 1.0
    strength: float = 1e-4
    slope: float = 2.0
    reduction: Literal["mean", "sum"] = "sum"

    def __post_init__(self) -> None:
        check(self)
        if self.parts < 2:
            raise ConfigError(f"CGNet.parts must be at least 2, got {self.parts}")
        if self.strength < 0 or self.slope <= 0:
            got = f"{self.strength} and {self.slope}"
            raise ConfigError(f"CGNet.strength must be >= 0 and CGNet.slope above 0, got {got}")

    @property
    def label(self) -> str:
        return f"CGNet target = {self.target:g}"

    @property
    def knob(self) -> str:
        return "target"

    def aimed(self, macs: float) -> CGNet:
        """The partial sums taken for normally distributed, as their norm leaves them."""
        always = 1 / self.parts
        if not always < macs < 1:
            raise ConfigError(
                f"macs={macs} cannot be reached: CGNet adds up {always:.3g} of the MACs at every position"
            )
        closed = (1 - macs) / (1 - always)
        return dataclasses.replace(self, target=round(NormalDist().inv_cdf(closed), 3))


class CGNetGate(nn.Module):
    """The norm of one unit's partial sums, and a threshold for each filter."""

    def __init__(self, site: Site, config: CGNet) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(site.filters, affine=False)
        self.threshold_O = nn.Parameter(torch.full((site.filters,), config.target))

    def forward(self, partial_BOHW: Tensor) -> Tensor:
        above: Tensor = self.norm(partial_BOHW) - self.threshold_O[:, None, None]
        return above


@final
@register_method(CGNet)
class CGNetMethod(AbstractMethod):
    """Positions at which a conv adds up all of its inputs, by image and filter."""

    config: CGNet
    threshold = 0.0
    pace: ClassVar[Literal["heads", "backbone"]] = "backbone"

    def __init__(self, config: CGNet, graph: Graph) -> None:
        super().__init__(config, graph)
        # Not held as modules: they are the backbone's.
        self.convs = {name: cast(nn.Conv2d, graph.modules[site.units[0].name]) for name, site in self.sites.items()}
        for name, conv in self.convs.items():
            if type(conv).forward is not nn.Conv2d.forward or conv.padding_mode != "zeros":
                what = f"{type(conv).__name__} with padding_mode={conv.padding_mode!r}"
                raise ConfigError(
                    f"CGNet needs a plain Conv2d padded with zeros, got {what} as unit {name!r}; use filter_fn"
                )
        self.hold({name: CGNetGate(site, config) for name, site in self.sites.items()})

    @classmethod
    def place(cls, graph: Graph, config: CGNet, filter_fn: Filter | None) -> Graph:
        def partial(unit: Unit) -> int:
            return -(-unit.in_channels // unit.groups // config.parts)

        def everywhere(units: list[Unit]) -> int:
            return units[0].macs // (units[0].in_channels // units[0].groups) * partial(units[0])

        return place_pixels(graph, config, filter_fn, everywhere, at="conv", partial=partial)

    def head_macs(self, site: Site) -> int:
        """None: what a decision looks at is a part of the conv's own sum."""
        return 0

    def partial(self, site: Site, x_BIHW: Tensor) -> Tensor:
        """The sums of the first channels of each of the conv's groups, (B, O, H, W), with the conv's bias."""
        conv = self.convs[site.name]
        x_BGIHW = x_BIHW.unflatten(1, (conv.groups, -1))[:, :, : site.partial]
        weight = conv.weight[:, : site.partial]
        padding = cast(tuple[int, int], conv.padding)  # or a word
        return F.conv2d(x_BGIHW.flatten(1, 2), weight, conv.bias, conv.stride, padding, conv.dilation, conv.groups)

    def decide(self, site: Site, x_BIHW: Tensor) -> Decision:
        partial_BOHW = self.partial(site, x_BIHW)
        above_BOHW = self[site.name](partial_BOHW)
        soft = torch.sigmoid(self.config.slope * above_BOHW)
        hard = (above_BOHW > self.threshold).to(soft.dtype)
        mask = PixelMask(hard + (soft - soft.detach()))  # value of the mask, gradient of the sigmoid
        return Decision(above_BOHW.detach(), mask, partial_BOHW=partial_BOHW)

    def forced(self, site: Site, x_BIHW: Tensor, mask: AbstractMask) -> Decision:
        return Decision(None, mask, partial_BOHW=self.partial(site, x_BIHW))

    def loss(self, step: Step) -> Tensor:
        away = [(self[name].threshold_O - self.config.target).square().sum() for name in step.decisions]
        return self.config.strength * torch.stack(away).sum()
