"""SecondLook: a small copy of the network looks first, the network itself only where the first look is in doubt.

The first look is the network with most of its filters pruned. It learns the network's own answers; the network stays as
it is. For an image that the first look is sure of, no other layer runs. Where it is in doubt, the network runs too, and
its answer counts. Doubt is -log of the probability of the first look's best class, so that a threshold on it
meets any budget above the first look's own cost: one training, a dial afterwards. Known as a cascade.

Shapes: B samples, K classes.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cofire.errors import ConfigError
from cofire.files.strict import check
from cofire.gates.base import AbstractMethod, Decision, GateConfig, LinearHead, Step, register_method
from cofire.gates.losses import distillation
from cofire.graph.cost import cost
from cofire.graph.graph import Graph, trace
from cofire.graph.masks import AbstractMask, BlockMask
from cofire.graph.placement import WHOLE, Filter, place_whole
from cofire.graph.units import Site
from cofire.pruning import L1
from cofire.pruning.apply import prune_below
from cofire.training.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class SecondLook(GateConfig):
    """The method's options.

    Args:
        first: share of the MACs that the first look may cost, in (0, 1); the budget of a run must be above it.
        distill: share in [0, 1] of the first look's loss that is its distance to the network's answers, beside labels.
        temperature: of both in that distance, above 0.
    """

    first: float = 0.3
    distill: float = 0.9
    temperature: float = 4.0
    reduction: Literal["mean", "sum"] = "sum"
    alone: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return f"SecondLook, first {self.first:g}"

    @property
    def knob(self) -> str:
        return "threshold"

    def twin(self, macs: float, recipe: Recipe) -> tuple[L1, Recipe]:
        """What the first look is made by, pruned to what both looks cost, and trained as the first look was."""
        trained = dataclasses.replace(recipe, train="all", lr=recipe.head_lr)
        return L1(macs=macs), dataclasses.replace(trained, distill=self.distill, temperature=self.temperature)

    def __post_init__(self) -> None:
        check(self)
        if not 0.0 < self.first < 1.0:
            raise ConfigError(f"SecondLook.first is a share of the MACs and must be in (0, 1), got {self.first}")
        if not (0.0 <= self.distill <= 1.0 and 0.0 < self.temperature < math.inf):
            got = f"{self.distill} and {self.temperature}"
            raise ConfigError(f"SecondLook needs distill in [0, 1] and temperature above 0, got {got}")


class FirstLook(nn.Module):
    """Images -> doubt (B, 1), in 0..log K, and logits (B, K) of a network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        logits_BK = self.network(x_BCHW)
        return -F.log_softmax(logits_BK, 1).amax(1, keepdim=True), logits_BK


@final
@register_method(SecondLook)
class SecondLookMethod(AbstractMethod):
    """One decision for the whole network."""

    config: SecondLook
    threshold = math.log(2)  # until it is calibrated: where the best class has less than half of the probability

    def __init__(self, config: SecondLook, graph: Graph) -> None:
        super().__init__(config, graph)
        network, _ = prune_below(graph.root, L1(macs=config.first), input_shape=graph.input_shape)
        self.first = FirstLook(network)
        self.first_macs = cost(trace(network, graph.input_shape), {}).dense_total
        self._doubt_B1 = self._logits_BK = torch.zeros(0)

    def __getstate__(self) -> dict[str, Any]:
        """What deepcopy and pickle take along: nothing of the last batch."""
        return self.__dict__ | {"_doubt_B1": torch.zeros(0), "_logits_BK": torch.zeros(0)}

    @classmethod
    def place(cls, graph: Graph, config: SecondLook, filter_fn: Filter | None) -> Graph:
        return place_whole(graph, filter_fn)

    def head_macs(self, site: Site) -> int:
        return self.first_macs

    def begin(self, x_BCHW: Tensor) -> None:
        self._doubt_B1, self._logits_BK = self.first(x_BCHW)

    def decide(self, site: Site, x_BIHW: Tensor) -> Decision:
        """In training the network always runs: the first look learns from it."""
        threshold = -1.0 if self.training else self.threshold
        on_B = (self._doubt_B1[:, 0] > threshold).to(x_BIHW.dtype)
        return Decision(self._doubt_B1, BlockMask(on_B), partial_BOHW=self._logits_BK)

    def forced(self, site: Site, x_BIHW: Tensor, mask: AbstractMask) -> Decision:
        return Decision(None, mask, partial_BOHW=self._logits_BK)

    def masked(self, site: Site, decision: Decision, y_BOHW: Tensor, alone: bool) -> Tensor:
        """The network's answer where it runs, and in training, where it is learned; else the first look's."""
        return y_BOHW if self.training else super().masked(site, decision, y_BOHW, alone)

    def observe(self, site: Site, decision: Decision, y_BOHW: Tensor) -> Tensor:
        return y_BOHW.detach()

    def loss(self, step: Step) -> Tensor:
        decision, own = step.decisions[WHOLE], self.config
        assert decision.partial_BOHW is not None
        logits_BK = decision.partial_BOHW.float()
        parts = [own.distill * distillation(logits_BK, step.seen[WHOLE].float(), own.temperature)]
        if step.labels is not None:
            parts.append((1 - own.distill) * F.cross_entropy(logits_BK, step.labels))
        return torch.stack(parts).sum()

    def parameter_groups(self, recipe: Any) -> list[dict[str, Any]]:
        """The first look is a network and decays like one."""
        return [{"params": list(self.parameters()), "weight_decay": recipe.weight_decay}]

    def lower(self, site: Site) -> LinearHead:
        return LinearHead(weight=torch.ones(1, 1), bias=None, source=self.first, answers=True)
