"""What a static method is: a config, and a criterion that gives every removable filter a score; and the registry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from cofire.data.feeding import AnyLoader
from cofire.errors import ConfigError, unknown
from cofire.files.strict import check
from cofire.graph.graph import Graph

Scores = Mapping[str, Tensor]
"""Group -> a score for each of its filters, float64 (O,); the lowest leave first."""


@dataclass(frozen=True, kw_only=True)
class PruneConfig:
    """Base of every static method's config.

    Args:
        macs: share of the MACs that REMAINS (column ``executed``), in (0, 1].
        allocation: ``uniform`` takes the same share of every group; ``global`` compares scores across groups.
        recovery: what happens to the smaller module before any training: ``none``, or ``norms``: batch norms measure
            their statistics anew.
    """

    macs: float
    allocation: Literal["uniform", "global"] = "uniform"
    recovery: Literal["none", "norms"] = "none"

    def __post_init__(self) -> None:
        check(self)
        if not 0.0 < self.macs <= 1.0:
            raise ConfigError(f"{type(self).__name__}.macs, the share that remains, must be in (0, 1], got {self.macs}")


Criterion = Callable[[nn.Module, Graph, AnyLoader | None, Any], Scores]

_criteria: dict[type[PruneConfig], Criterion] = {}


def register_criterion(config_type: type[PruneConfig]) -> Callable[[Criterion], Criterion]:
    """Decorator: ``score(model, graph, loader, config) -> Scores`` is the criterion for configs of this type.

    ``graph.units.groups`` are the groups to score, ``loader`` is what `prune` was given.
    """
    if not (dataclasses.is_dataclass(config_type) and issubclass(config_type, PruneConfig)):
        raise ConfigError(f"register_criterion takes a dataclass derived from PruneConfig, got {config_type!r}")
    if config_type.__name__ in prune_types():
        raise ConfigError(f"a prune config named {config_type.__name__!r} is registered already")

    def register(score: Criterion) -> Criterion:
        _criteria[config_type] = score
        return score

    return register


def prune_types() -> dict[str, type[PruneConfig]]:
    """Name -> config type of every registered method."""
    return {config_type.__name__: config_type for config_type in _criteria}


def scores(model: nn.Module, graph: Graph, loader: AnyLoader | None, config: PruneConfig) -> Scores:
    """What the criterion of ``config`` says of every removable filter."""
    if type(config) not in _criteria:
        raise unknown("prune config", type(config).__name__, prune_types())
    found = _criteria[type(config)](model, graph, loader, config)
    wanted = {group: (units[-1].out_channels,) for group, units in graph.units.groups.items()}
    if (got := {group: tuple(score.shape) for group, score in found.items()}) != wanted:
        raise ConfigError(f"the criterion of {type(config).__name__} must score every filter: {wanted}, got {got}")
    return found
