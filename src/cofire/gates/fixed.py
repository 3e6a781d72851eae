"""Fixed: the same filters for every image. All of them run, unless masks are forced: a probe, and a static twin."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cofire.files.strict import check
from cofire.gates.base import AbstractGate, Decision, GateConfig, Gates, register_gate
from cofire.graph.units import Unit


@dataclass(frozen=True, kw_only=True)
class Fixed(GateConfig):
    """Gates that decide nothing and learn nothing."""

    def __post_init__(self) -> None:
        check(self)


class FixedGate(AbstractGate):
    """All filters on."""

    head_macs = 0

    def __init__(self, filters: int) -> None:
        super().__init__()
        self.filters = filters

    def decide(self, x_BIHW: Tensor) -> Decision:
        return Decision(None, x_BIHW.new_ones(()).expand(len(x_BIHW), self.filters))

    def loss(self, decision: Decision, y_BOHW: Tensor) -> Tensor:
        return y_BOHW.new_zeros(())


@register_gate(Fixed)
def build(groups: list[list[Unit]], config: Fixed) -> Gates:
    return {group[0].group: FixedGate(group[-1].out_channels) for group in groups}
