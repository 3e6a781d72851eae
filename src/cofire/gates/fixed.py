"""Fixed: the same filters for every image; all of them, unless some are named. A probe, and a static twin.

Shapes: B samples, O filters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from cofire.errors import ConfigError
from cofire.files.strict import check
from cofire.gates.base import AbstractMethod, Decision, GateConfig, LinearHead, Step, register_method
from cofire.graph.graph import Graph
from cofire.graph.units import Site


@dataclass(frozen=True, kw_only=True)
class Fixed(GateConfig):
    """Gates that decide nothing and learn nothing.

    Args:
        kept: group -> the filters that run, by their index; groups left out run whole.
    """

    kept: Mapping[str, tuple[int, ...]] | None = None
    forms: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def __post_init__(self) -> None:
        check(self)


@final
@register_method(Fixed)
class FixedMethod(AbstractMethod):
    """The same mask for every image."""

    config: Fixed

    def __init__(self, config: Fixed, graph: Graph) -> None:
        super().__init__(config, graph)
        check_kept(config.kept, self.sites, "Fixed.kept")
        self._colours, self._glance = graph.input_shape[0], nn.AdaptiveAvgPool2d(1)

    def head_macs(self, site: Site) -> int:
        return 0

    def decide(self, site: Site, x_BIHW: Tensor) -> Decision:
        return Decision(None, mask_row(self.config.kept, site).to(x_BIHW).expand(x_BIHW.shape[0], -1))

    def lower(self, site: Site) -> LinearHead:
        return constant_head(mask_row(self.config.kept, site)[0], self._colours, self._glance)

    def loss(self, step: Step) -> Tensor:
        return step.logits_BK.new_zeros(())


def mask_row(kept: Mapping[str, tuple[int, ...]] | None, site: Site) -> Tensor:
    """The mask of any image at a site, (1, O), where ``kept`` names the filters that run; all where it does not."""
    filters = (kept or {}).get(site.name)
    if filters is None:
        return torch.ones(1, site.filters)
    return torch.zeros(1, site.filters).index_fill(1, torch.tensor(filters, dtype=torch.long), 1.0)


def constant_head(row_O: Tensor, colours: int, glance: nn.Module) -> LinearHead:
    """The same filters for every image as the engine decides it: of the image's mean colour, nothing.

    Args:
        glance: what makes the mean colour; one module for all groups, so that it is computed once.
    """
    nothing_OC = torch.zeros(len(row_O), colours)
    return LinearHead(weight=nothing_OC, bias=row_O, pool="avg", top=int(row_O.sum()), source=glance)


def check_kept(kept: Mapping[str, tuple[int, ...]] | None, sites: Mapping[str, Site], who: str) -> None:
    """Raise unless the filters named are there; ``who`` is the option they come from."""
    for name, filters in (kept or {}).items():
        if name in sites and not all(0 <= o < sites[name].filters for o in filters):
            raise ConfigError(f"{who}[{name!r}] must be in 0..{sites[name].filters - 1}, got {filters}")
