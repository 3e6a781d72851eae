"""A method that lives outside of cofire, as a user's own file would: the laws hold for it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from cofire import AbstractMethod, Decision, GateConfig, Graph, Site, Step, register_method


@dataclass(frozen=True, kw_only=True)
class Outside(GateConfig):
    """The filters whose logits are positive, learned through a soft mask with a price on each filter."""

    price: float = 0.01


@final
@register_method(Outside)
class OutsideMethod(AbstractMethod):
    """A linear map of the mean input, straight through; the loss keeps the output itself."""

    threshold = 0.0

    def __init__(self, config: Any, graph: Graph) -> None:
        super().__init__(config, graph)
        sizes = {name: (site.units[0].in_channels, site.filters) for name, site in self.sites.items()}
        self.hold({name: nn.Linear(*size) for name, size in sizes.items()})

    def decide(self, site: Site, x_BIHW: Tensor) -> Decision:
        logits_BO = self[site.name](x_BIHW.flatten(2).mean(2))
        share_BO = torch.sigmoid(logits_BO)
        hard_BO = (logits_BO > self.threshold).to(share_BO.dtype)
        return Decision(logits_BO, hard_BO + share_BO - share_BO.detach())

    def observe(self, site: Site, decision: Decision, y_BOHW: Tensor) -> Tensor:
        return y_BOHW.square().mean()

    def loss(self, step: Step) -> Tensor:
        kept = [decision.mask.on.sum(1).mean() for decision in step.decisions.values()]
        return self.config.price * (torch.stack(kept).sum() + torch.stack(list(step.seen.values())).sum())
