"""What a static method is: a config that names its parts, and the registries of the parts.

A *criterion* says what each channel is worth, or which ones stay; an *allocation* turns worth and a budget into masks;
a *recovery* gives the smaller module something back before any training. Each part is a function with a decorator.

Shapes: O channels of a group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from cofire.data.feeding import AnyLoader
from cofire.errors import ConfigError, unknown
from cofire.files.strict import check
from cofire.pruning.channels import Channels

Scores = Mapping[str, Tensor]
"""Group -> a score for each of its channels, float64 (O,), the lowest leave first; or bool (O,), the ones that stay."""

Masks = Mapping[str, Tensor]
"""Group -> which of its channels stay, bool (O,)."""

Criterion = Callable[[nn.Module, Channels, AnyLoader | None, Any], Scores]
"""(model, channels, loader, config) -> scores, or a selection that meets ``config.macs``."""

Allocation = Callable[[nn.Module, Channels, AnyLoader | None, Any, Scores], Masks]
"""(model, channels, loader, config, scores) -> masks under which at most ``config.macs`` remains."""

Recovery = Callable[[nn.Module, nn.Module, Channels, Masks, AnyLoader | None, Any], None]
"""(model, smaller, channels, masks, loader, config): changes ``smaller`` in place; ``channels`` are of ``model``."""

_criteria: dict[type[PruneConfig], Criterion] = {}
_allocations: dict[str, Allocation] = {}
_recoveries: dict[str, Recovery] = {}
_OLD_NAMES = {"Uniform": "Random"}  # of 0.1, in recipes


@dataclass(frozen=True, kw_only=True)
class PruneConfig:
    """Base of every static method's config.

    Args:
        macs: share of the MACs that REMAINS (column ``executed``), in (0, 1].
        allocation: ``uniform`` takes the same share of every group, ``global`` compares scores across groups; others
            are listed by `allocations`.
        recovery: what happens to the smaller module before any training: ``none``, ``norms`` (batch norms measure
            their statistics anew) and what else `recoveries` lists.
        streams: ``whole`` keeps channels that pass an addition, as those of a residual stream do; ``cut`` lets them
            leave from all layers of the stream at once; ``auto`` does so only if the budget cannot be met otherwise.
        soft: a run sets channels to zero after every epoch and cuts them out in the end, see `SoftPruning`; for methods
            that need no images. `prune` itself cuts at once.
    """

    macs: float
    allocation: str = "uniform"
    recovery: str = "none"
    streams: Literal["auto", "whole", "cut"] = "auto"
    soft: bool = False
    forms: ClassVar[Mapping[str, Mapping[str, Any]]] = {"": {}}
    """The forms of the method that `compare` runs, by what is put behind its name."""

    def __post_init__(self) -> None:
        check(self)
        if not 0.0 < self.macs <= 1.0:
            raise ConfigError(f"{type(self).__name__}.macs, the share that remains, must be in (0, 1], got {self.macs}")
        if self.allocation not in _allocations:
            raise unknown("allocation", self.allocation, _allocations)
        if self.recovery not in _recoveries:
            raise unknown("recovery", self.recovery, _recoveries)


def register_criterion(config_type: type[PruneConfig]) -> Callable[[Criterion], Criterion]:
    """Decorator: ``score(model, channels, loader, config) -> Scores`` is the criterion for configs of this type.

    ``channels.groups`` are the groups to score, ``loader`` is what `prune` was given.
    """
    if not (dataclasses.is_dataclass(config_type) and issubclass(config_type, PruneConfig)):
        raise ConfigError(f"register_criterion takes a dataclass derived from PruneConfig, got {config_type!r}")
    if config_type.__name__ in prune_types():
        raise ConfigError(f"a prune config named {config_type.__name__!r} is registered already")

    def register(score: Criterion) -> Criterion:
        _criteria[config_type] = score
        return score

    return register


def register_allocation(name: str) -> Callable[[Allocation], Allocation]:
    """Decorator: ``allocate(model, channels, loader, config, scores) -> Masks`` is chosen by ``allocation=name``."""
    if name in _allocations:
        raise ConfigError(f"an allocation named {name!r} is registered already")

    def register(allocate: Allocation) -> Allocation:
        _allocations[name] = allocate
        return allocate

    return register


def register_recovery(name: str) -> Callable[[Recovery], Recovery]:
    """Decorator: ``recover(model, smaller, channels, masks, loader, config)`` is chosen by ``recovery=name``."""
    if name in _recoveries:
        raise ConfigError(f"a recovery named {name!r} is registered already")

    def register(recover: Recovery) -> Recovery:
        _recoveries[name] = recover
        return recover

    return register


def prune_types() -> dict[str, type[PruneConfig]]:
    """Name -> config type of every registered method; names of 0.1 are in it too."""
    types = {config_type.__name__: config_type for config_type in _criteria}
    return types | {old: types[new] for old, new in _OLD_NAMES.items() if new in types}


def allocations() -> list[str]:
    """Names of all allocations."""
    return list(_allocations)


def recoveries() -> list[str]:
    """Names of all recoveries."""
    return list(_recoveries)


def scores(model: nn.Module, channels: Channels, loader: AnyLoader | None, config: PruneConfig) -> Scores:
    """What the criterion of ``config`` says of every channel that can leave."""
    if type(config) not in _criteria:
        raise unknown("prune config", type(config).__name__, prune_types())
    found = _criteria[type(config)](model, channels, loader, config)
    wanted = {name: (size,) for name, size in channels.sizes.items()}
    if (got := {name: tuple(score.shape) for name, score in found.items()}) != wanted:
        raise ConfigError(f"the criterion of {type(config).__name__} must score every filter: {wanted}, got {got}")
    for name, score_O in found.items():
        if not bool(torch.isfinite(score_O).all()):
            raise ConfigError(
                f"the criterion of {type(config).__name__} must give finite scores; group {name!r} has not"
            )
    return found


def allocate(
    model: nn.Module, channels: Channels, loader: AnyLoader | None, config: PruneConfig, found: Scores
) -> Masks:
    """The masks that ``config`` makes of scores; a selection is taken as it is."""
    if all(score_O.dtype == torch.bool for score_O in found.values()):
        return found
    return _allocations[config.allocation](model, channels, loader, config, found)


def recover(
    model: nn.Module,
    smaller: nn.Module,
    channels: Channels,
    masks: Masks,
    loader: AnyLoader | None,
    config: PruneConfig,
) -> None:
    """Change ``smaller`` in place, as ``config`` says."""
    _recoveries[config.recovery](model, smaller, channels, masks, loader, config)
