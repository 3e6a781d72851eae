"""FBS, "Dynamic Channel Pruning: Feature Boosting and Suppression" (Gao et al. 2019): the strongest filters, rescaled.

A head predicts each filter's saliency from the mean absolute input; a fixed share of filters, those with the largest
saliency in this image, runs, and the saliency takes the place of the norm's factor: act(g * norm(conv x) + beta).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor, nn

from cofire.errors import ConfigError
from cofire.files.strict import check
from cofire.gates.base import AbstractMethod, Decision, GateConfig, LinearHead, Step, register_method
from cofire.gates.targets import largest, signature_of
from cofire.graph.graph import Graph
from cofire.graph.placement import Filter, place
from cofire.graph.tracing import norm_activates
from cofire.graph.units import Site

_SPREAD = 0.05  # of the heads' weights at the beginning, as in the authors' code


@dataclass(frozen=True, kw_only=True)
class FBS(GateConfig):
    """The method's options.

    Args:
        density: share of each group's filters that runs, in (0, 1]; the same for every image, so the cost is too.
        signature: filters that run in each group, in place of ``density``; see ``cofire.signatures``.
        lowering: epochs over which the number of filters falls from all to these; in evaluation it is these at once.
        sparsity: weight of the saliencies' sum in the loss.
    """

    density: float = 0.5
    signature: Mapping[str, int] | None = None
    lowering: int = 0
    sparsity: float = 1e-8

    def __post_init__(self) -> None:
        check(self)
        if not 0.0 < self.density <= 1.0:
            raise ConfigError(f"FBS.density must be in (0, 1], got {self.density}")
        if self.lowering < 0 or self.sparsity < 0:
            raise ConfigError(f"FBS.lowering and FBS.sparsity must be >= 0, got {self.lowering} and {self.sparsity}")

    @property
    def label(self) -> str:
        return f"FBS d = {self.density:g}" if self.signature is None else "FBS, fixed k"

    @property
    def knob(self) -> str:
        return "signature"


class FBSGate(nn.Module):
    """Saliencies of one group: a linear map whose bias starts at the norm's factor, and the norm's own shift."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.linear = nn.Linear(site.units[0].in_channels, site.filters)
        nn.init.normal_(self.linear.weight, std=_SPREAD)
        nn.init.ones_(self.linear.bias)
        self.beta = nn.Parameter(torch.zeros(site.filters))


@final
@register_method(FBS)
class FBSMethod(AbstractMethod):
    """A fixed number of filters per group, chosen and scaled by image."""

    config: FBS
    opens: ClassVar[bool] = False
    pace: ClassVar[Literal["heads", "backbone"]] = "backbone"

    def __init__(self, config: FBS, graph: Graph) -> None:
        super().__init__(config, graph)
        self.hold({name: FBSGate(site) for name, site in self.sites.items()})
        self.finals = {name: _final(site, config) for name, site in self.sites.items()}
        self.lowered = 0.0 if config.lowering else 1.0  # how far training is on its way down

    @classmethod
    def place(cls, graph: Graph, config: FBS, filter_fn: Filter | None) -> Graph:
        return place(graph, config, filter_fn, at="norm")

    @torch.no_grad()
    def prepare(self, graph: Graph) -> None:
        """The norms give their factor and shift away; a conv without a norm its bias."""
        for name, site in self.sites.items():
            gate, op = self[name], graph[site.out]
            norm = graph.module(site.out)
            if op.kind == "norm" and (not isinstance(norm, nn.BatchNorm2d) or norm_activates(norm)):
                raise ConfigError(f"FBS needs a plain BatchNorm2d behind unit {name!r}, got {type(norm).__name__}")
            if op.kind == "norm":
                _move(norm.weight, gate.linear.bias, leave=1.0)
            _move(norm.bias, gate.beta, leave=0.0)

    def kept(self, site: Site) -> int:
        """How many filters run now, at least one."""
        share = self.finals[site.name] / site.filters
        return _ceil(site, 1.0 - (1.0 - share) * self.lowered) if self.training else self.finals[site.name]

    def decide(self, site: Site, x_BIHW: Tensor) -> Decision:
        gate = self[site.name]
        logits_BO = gate.linear(x_BIHW.abs().flatten(2).mean(2))
        mask_BO = largest(logits_BO.detach(), self.kept(site)).to(logits_BO.dtype)
        return Decision(logits_BO, mask_BO, torch.relu(logits_BO), gate.beta)

    def loss(self, step: Step) -> Tensor:
        saliencies = [decision.scale_BO for decision in step.decisions.values() if decision.scale_BO is not None]
        return self.config.sparsity * torch.stack([g_BO.sum(1).mean() for g_BO in saliencies]).sum()

    def on_epoch(self, epoch: int, epochs: int) -> None:
        self.lowered = min(1.0, (epoch + 1) / self.config.lowering) if self.config.lowering else 1.0

    def lower(self, site: Site) -> LinearHead:
        gate = self[site.name]
        weight, bias = gate.linear.weight, gate.linear.bias
        top = self.finals[site.name]
        return LinearHead(weight=weight, bias=bias, pool="abs", top=top, scale=True, shift=gate.beta)


def _final(site: Site, config: FBS) -> int:
    """How many of a site's filters run when nothing is lowered any more."""
    return signature_of(config.signature, site, "FBS") or _ceil(site, config.density)


def _ceil(site: Site, share: float) -> int:
    """ceil(share O): products such as 0.7 * 10 must not become 8 by rounding."""
    return math.ceil(round(share * site.filters, 6))


def _move(given: Tensor | nn.Module | None, taker: Tensor, leave: float) -> None:
    """Give a layer's parameter, if it has it, to the gate; what stays behind is a constant."""
    if isinstance(given, Tensor):
        taker.copy_(given)
        given.fill_(leave).requires_grad_(False)
