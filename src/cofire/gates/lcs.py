"""LCS, "Dynamic Network Pruning with Interpretable Layerwise Channel Selection" (Wang et al. 2020): one of a few masks.

Each group has a table of gates, a row for each of N actions. A head on the mean input chooses the row, whose values
multiply what the norm gives, before the activation; a filter whose value is 0 does not run. The choice is learned with
Gumbel noise, as if it were a softmax; so a group never has more than N masks. The loss holds the share of the MACs that
the chosen rows leave to a target: it pulls small gates down until enough of them are at zero.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cofire.errors import ConfigError
from cofire.files.strict import check
from cofire.gates.base import AbstractMethod, Decision, GateConfig, LinearHead, Step, register_method
from cofire.graph.graph import Graph
from cofire.graph.placement import Filter, place
from cofire.graph.units import Site

_SMALLEST = 1e-2  # that a gate starts at
_SMALL = 0.25  # gates that the loss pulls hardest
_ENOUGH = 0.1  # of the images, to learn a row from
_LARGEST = 5.0  # that a gate may grow to, as in the authors' code


@dataclass(frozen=True, kw_only=True)
class LCS(GateConfig):
    """The method's options.

    Args:
        actions: rows of each group's table, so that it has at most as many masks.
        target: share of the dense MACs, heads included, that training aims at, in [0, 1].
        strength: weight of the squared distance to it in the loss.
        temperature: of the softmax that the choice is taken for in training, above 0.
    """

    actions: int = 40
    target: float = 0.5
    strength: float = 20.0
    temperature: float = 1.0
    reduction: Literal["mean", "sum"] = "sum"

    def __post_init__(self) -> None:
        check(self)
        if self.actions < 1:
            raise ConfigError(f"LCS.actions must be at least 1, got {self.actions}")
        if not 0.0 <= self.target <= 1.0:
            raise ConfigError(f"LCS.target must be in [0, 1], got {self.target}")
        if self.strength < 0 or self.temperature <= 0:
            got = f"{self.strength} and {self.temperature}"
            raise ConfigError(f"LCS.strength must be >= 0 and LCS.temperature above 0, got {got}")

    @property
    def label(self) -> str:
        return f"LCS {self.actions} actions, target {self.target:g}"

    @property
    def knob(self) -> str:
        return "target"

    def aimed(self, macs: float) -> LCS:
        return dataclasses.replace(self, target=macs)


class LCSGate(nn.Module):
    """The head and the table of one group; N actions."""

    def __init__(self, site: Site, actions: int) -> None:
        super().__init__()
        self.linear = nn.Linear(site.units[0].in_channels, actions, bias=False)
        self.gates_NO = nn.Parameter(torch.ones(actions, site.filters))

    def rows(self) -> Tensor:
        """The directions of the head's rows, (N, I): their lengths do not count."""
        return F.normalize(self.linear.weight, dim=1)

    def logits(self, x_BIHW: Tensor) -> Tensor:
        """Of each action, (B, N)."""
        return F.linear(x_BIHW.flatten(2).mean(2), self.rows()).to(self.linear.weight.dtype)


@final
@register_method(LCS)
class LCSMethod(AbstractMethod):
    """One row of gates per group, chosen by image."""

    config: LCS
    pace: ClassVar[Literal["heads", "backbone"]] = "backbone"

    def __init__(self, config: LCS, graph: Graph) -> None:
        super().__init__(config, graph)
        self.hold({name: LCSGate(site, config.actions) for name, site in self.sites.items()})

    @torch.no_grad()
    def prepare(self, graph: Graph) -> None:
        """The norms give the size of their factors to the gates, so that small ones are the first to reach zero."""
        for name, site in self.sites.items():
            affine = dict(graph.module(site.out).named_parameters()) if graph[site.out].kind == "norm" else {}
            if "weight" in affine:
                size_O = affine["weight"].abs().clamp(_SMALLEST, _LARGEST)
                self[name].gates_NO.copy_(size_O)
                for parameter in affine.values():
                    parameter.div_(size_O)

    @classmethod
    def place(cls, graph: Graph, config: LCS, filter_fn: Filter | None) -> Graph:
        return place(graph, config, filter_fn, at="norm", head=lambda units: units[0].in_channels * config.actions)

    def head_macs(self, site: Site) -> int:
        return site.units[0].in_channels * self.config.actions

    def decide(self, site: Site, x_BIHW: Tensor) -> Decision:
        gate = self[site.name]
        logits_BN = gate.logits(x_BIHW)
        if self.training:
            chosen_BN = F.gumbel_softmax(logits_BN, self.config.temperature, hard=True)
            gates_BO = chosen_BN @ by_image(gate.gates_NO, chosen_BN.detach().sum(0))
        else:
            gates_BO = gate.gates_NO[logits_BN.argmax(1)]
        return Decision(None, (gates_BO.detach() > 0).to(gates_BO.dtype), gates_BO)

    def lower(self, site: Site) -> LinearHead:
        gate = self[site.name]
        choice = LinearHead(weight=gate.rows(), bias=None, pool="avg", top=1)
        shift = torch.zeros(site.filters)
        return LinearHead(weight=gate.gates_NO.T, bias=None, scale=True, shift=shift, choice=choice)

    def loss(self, step: Step) -> Tensor:
        gates = {name: found.scale_BO for name, found in step.decisions.items() if found.scale_BO is not None}
        share = step.share({name: _runs(gates_BO) for name, gates_BO in gates.items()}).mean()
        return self.config.strength * (share - self.config.target).square()

    @torch.no_grad()
    def on_step(self) -> None:
        for gate in self.values():
            gate.gates_NO.clamp_(0.0, _LARGEST)


def by_image(gates_NO: Tensor, images_N: Tensor) -> Tensor:
    """The table, each of whose rows learns from the mean over the images that chose it, not over all.

    Args:
        images_N: how many chose each row; of fewer than `_ENOUGH`, each counts as one among that many.
    """
    share_N = (images_N / images_N.sum()).clamp(min=_ENOUGH)
    return gates_NO.detach() + (gates_NO - gates_NO.detach()) / share_N[:, None]


def _runs(gates_BO: Tensor) -> Tensor:
    """1 where a filter runs, else 0. Its gradient is steep for small gates: they are the ones to be closed."""
    gates_BO = gates_BO.float()
    soft_BO = 1 - torch.exp(-gates_BO / _SMALL)
    return (gates_BO.detach() > 0).float() + soft_BO - soft_BO.detach()
