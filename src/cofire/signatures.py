"""Signatures: how many filters each group keeps, the same for every sample; for configs that have a ``signature``.

``uniform`` and ``taylor`` make one, ``read`` and ``write`` keep it in a JSON file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from cofire.data.feeding import AnyLoader
from cofire.errors import ConfigError, FileError
from cofire.files.atomic import read_json, write_json
from cofire.gates.base import GateConfig
from cofire.gates.fixed import Fixed
from cofire.gates.gating import GatedModel, gate
from cofire.graph.cost import cost
from cofire.graph.units import Placement
from cofire.pruning.allocation import within_budget
from cofire.pruning.taylor import taylor_scores

Signature = dict[str, int]


def uniform(
    model: nn.Module, config: GateConfig, keep: float, input_shape: tuple[int, int, int] | None = None
) -> Signature:
    """The same share ``keep`` in (0, 1] of every group's filters, at least one; ``input_shape`` as in ``gate``."""
    if not 0.0 < keep <= 1.0:
        raise ConfigError(f"keep must be in (0, 1], got {keep}")
    groups = _placed(model, config, input_shape).units.groups
    return {name: max(1, round(keep * units[-1].out_channels)) for name, units in groups.items()}


def taylor(
    model: nn.Module,
    config: GateConfig,
    loader: AnyLoader,
    *,
    macs: float,
    input_shape: tuple[int, int, int] | None = None,
) -> Signature:
    """Filters that survive a global Taylor ranking (Molchanov et al. 2019) at a share ``macs`` of the MACs.

    The filters with the lowest `taylor_scores` are dropped until the model, statically pruned so, has ``macs`` of its
    ``executed`` MACs left; each group keeps at least one.

    Args:
        loader: labelled batches.
        macs: share that remains, in (0, 1].
        input_shape: as in ``gate``.
    """
    if not 0.0 < macs <= 1.0:
        raise ConfigError(f"macs must be in (0, 1], got {macs}")
    gated = _placed(model, config, input_shape)

    def remaining(masks: Mapping[str, Tensor]) -> float:
        return 1 - float(
            cost(gated.graph, {name: mask_O[None] for name, mask_O in masks.items()}).reduction("executed")
        )

    kept = within_budget(taylor_scores(gated, loader), macs, remaining)
    return {name: int(mask.sum()) for name, mask in kept.items()}


def _placed(model: nn.Module, config: GateConfig, input_shape: tuple[int, int, int] | None) -> GatedModel:
    """The model with gates where ``config`` has them; they decide nothing, for ``config`` may lack its signature."""
    where: dict[str, Any] = {option.name: getattr(config, option.name) for option in dataclasses.fields(Placement)}
    return gate(model, Fixed(**where), input_shape=input_shape)


def read(path: str | Path) -> Signature:
    """A signature from a JSON file ``{group: filters}``."""
    table = read_json(Path(path))
    fits = isinstance(table, Mapping) and all(type(k) is int and k >= 1 for k in table.values())
    if not fits:
        raise FileError(f"{path} must be a JSON table of group -> number of filters >= 1")
    return {str(name): int(k) for name, k in table.items()}


def write(path: str | Path, signature: Signature) -> None:
    """A signature into a JSON file."""
    write_json(Path(path), signature)
