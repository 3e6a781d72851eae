"""Signatures: how many filters each group keeps, the same for every sample; used as ``FTWT(signature=...)``.

``uniform`` and ``taylor`` make one, ``read`` and ``write`` keep it in a JSON file. Without a signature FTWT
takes the number per sample from the activation mass.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cofire.cost import cost
from cofire.data.feeding import AnyLoader, feed
from cofire.errors import ConfigError, DataError, FileError
from cofire.files import read_json, write_json
from cofire.gates.base import GateConfig
from cofire.gating import GatedModel, gate
from cofire.tracing import evaluating

Signature = dict[str, int]


def uniform(
    model: nn.Module, config: GateConfig, keep: float, input_shape: tuple[int, int, int] | None = None
) -> Signature:
    """The same share ``keep`` in (0, 1] of every group's filters, at least one; ``input_shape`` as in ``gate``."""
    if not 0.0 < keep <= 1.0:
        raise ConfigError(f"keep must be in (0, 1], got {keep}")
    groups = gate(model, config, input_shape=input_shape).units.groups
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

    A filter's score is the squared gradient of the loss with respect to a factor of 1 on its output, averaged
    over batches. The lowest are dropped until the model, statically pruned so, has ``macs`` of its ``executed``
    MACs left; each group keeps at least one.

    Args:
        loader: labelled batches.
        macs: share that remains, in (0, 1].
        input_shape: as in ``gate``.
    """
    if not 0.0 < macs <= 1.0:
        raise ConfigError(f"macs must be in (0, 1], got {macs}")
    gated = gate(model, config, input_shape=input_shape)
    scores = taylor_scores(gated, loader)
    ranked = torch.cat(list(scores.values())).sort().values
    low, high = 0, len(ranked)
    while low < high:  # the fewest filters to drop that meet the budget
        middle = (low + high) // 2
        low, high = (low, middle) if _remaining(gated, _kept(scores, ranked, middle)) <= macs else (middle + 1, high)
    kept = _kept(scores, ranked, low)
    if _remaining(gated, kept) > macs:
        raise ConfigError(f"macs={macs} cannot be reached: one filter per group leaves {_remaining(gated, kept):.3f}")
    return {name: int(mask.sum()) for name, mask in kept.items()}


def taylor_scores(gated: GatedModel, loader: AnyLoader) -> dict[str, Tensor]:
    """Taylor score of each group's filters, (O,) float64."""
    factors = {name: torch.ones(units[-1].out_channels) for name, units in gated.units.groups.items()}
    scores = {name: torch.zeros(len(factor), dtype=torch.float64) for name, factor in factors.items()}
    batches = 0
    device = next(gated.parameters()).device
    for x_BCHW, label_B in feed(loader, "ranking filters"):
        if label_B is None:
            raise DataError("a Taylor signature needs labelled images")
        leaves = {name: factor.to(device).requires_grad_() for name, factor in factors.items()}
        with evaluating(gated), gated.force(leaves):
            loss = F.cross_entropy(gated(x_BCHW.to(device)), label_B.to(device))
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        for name, gradient in zip(leaves, gradients, strict=True):
            scores[name] += gradient.double().cpu().square()
        batches += 1
    return {name: score / batches for name, score in scores.items()}


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


def _kept(scores: dict[str, Tensor], ranked: Tensor, drop: int) -> dict[str, Tensor]:
    limit = ranked[drop] if drop < len(ranked) else torch.tensor(float("inf"))
    kept = {}
    for name, score in scores.items():
        mask = score >= limit
        mask[score.argmax()] = True
        kept[name] = mask
    return kept


def _remaining(gated: GatedModel, masks: dict[str, Tensor]) -> float:
    return 1 - float(cost(gated.graph, {name: mask[None] for name, mask in masks.items()}).reduction("executed"))
