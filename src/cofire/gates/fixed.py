"""Fixed: the same filters for every image. All of them run, unless masks are forced: a probe for other methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from cofire.files.strict import check
from cofire.gates.base import AbstractMethod, Decision, GateConfig, Step, register_method
from cofire.graph.units import Site


@dataclass(frozen=True, kw_only=True)
class Fixed(GateConfig):
    """Gates that decide nothing and learn nothing."""

    def __post_init__(self) -> None:
        check(self)


@final
@register_method(Fixed)
class FixedMethod(AbstractMethod):
    """All filters on."""

    def head_macs(self, site: Site) -> int:
        return 0

    def decide(self, site: Site, x_BIHW: Tensor) -> Decision:
        return Decision(None, x_BIHW.new_ones(()).expand(len(x_BIHW), site.filters))

    def loss(self, step: Step) -> Tensor:
        return step.logits_BK.new_zeros(())
