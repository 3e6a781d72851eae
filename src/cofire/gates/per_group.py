"""The short way to a method: one gate per group of filters, each of which decides and learns for itself.

Shapes: B samples, I input channels, O filters.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from cofire.errors import ConfigError
from cofire.gates.base import AbstractMethod, Decision, GateConfig, Step, register_method
from cofire.graph.graph import Graph
from cofire.graph.units import Site, Unit


class AbstractGate(nn.Module):
    """Decides for one group of units. A subclass implements ``decide`` and ``loss``, and ``target`` if it has one."""

    head_macs: int
    """MACs of one sample's decision."""

    def __init__(self) -> None:
        super().__init__()
        self.threshold = 0.0

    @abstractmethod
    def decide(self, x_BIHW: Tensor) -> Decision:
        """The decision for a unit input (B, I, H, W)."""

    @abstractmethod
    def loss(self, decision: Decision, y_BOHW: Tensor) -> Tensor:
        """What ``decision`` should have been, given the unmasked output: scalar, sum over filters, mean over batch."""

    def target(self, y_BOHW: Tensor) -> Tensor | None:
        """The mask that self-supervision asks for, bool (B, O); None for a method without targets."""
        return None


Gates = Mapping[str, AbstractGate]
Builder = Callable[[list[list[Unit]], Any], Gates]


def register_gate(config_type: type[GateConfig]) -> Callable[[Builder], Builder]:
    """Decorator: ``build(groups, config) -> {group: gate}`` makes the gates for configs of this type.

    ``groups`` is a list of groups, each a list of units in execution order: the gate reads the first unit's
    input and masks the last unit's output.
    """
    add = register_method(config_type)

    def register(build: Builder) -> Builder:
        @final
        class PerGroup(_GatePerGroup):
            builder = staticmethod(build)

        add(PerGroup)
        return build

    return register


class _GatePerGroup(AbstractMethod):
    """Gates made by a builder, one per site."""

    builder: Builder

    def __init__(self, config: Any, graph: Graph) -> None:
        super().__init__(config, graph)
        gates = self.builder([list(site.units) for site in graph.sites], config)
        if set(gates) != set(self.sites):
            raise ConfigError(
                f"the builder of {type(config).__name__} must return one gate per group; "
                f"missing {sorted(set(self.sites) - set(gates))}, unexpected {sorted(set(gates) - set(self.sites))}"
            )
        self.hold({name: gates[name] for name in self.sites})

    @property
    def threshold(self) -> float:
        return float(next(iter(self.values())).threshold)

    @threshold.setter
    def threshold(self, value: float) -> None:
        for gate in self.values():
            gate.threshold = value

    def head_macs(self, site: Site) -> int:
        return int(self[site.name].head_macs)

    def decide(self, site: Site, x_BIHW: Tensor) -> Decision:
        decision: Decision = self[site.name].decide(x_BIHW)
        return decision

    def observe(self, site: Site, decision: Decision, y_BOHW: Tensor) -> Tensor:
        loss: Tensor = self[site.name].loss(decision, y_BOHW)
        return loss

    def target(self, site: Site, y_BOHW: Tensor) -> Tensor | None:
        target: Tensor | None = self[site.name].target(y_BOHW)
        return target

    def loss(self, step: Step) -> Tensor:
        return torch.stack(list(step.seen.values())).sum()
