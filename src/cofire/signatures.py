"""Signatures: how many filters each group keeps, the same for every sample; for configs that have a ``signature``.

``uniform``, ``taylor`` and ``mass`` make one, ``recounted`` mends that of a trained model, ``read`` and ``write`` keep
it in a JSON file.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from cofire.data.feeding import AnyLoader, first_images
from cofire.errors import ConfigError, FileError
from cofire.files.atomic import read_json, write_json
from cofire.gates.base import Decision, Foretelling, GateConfig
from cofire.gates.gating import GatedModel, gate
from cofire.gates.targets import largest
from cofire.graph.cost import cost
from cofire.graph.tracing import evaluating
from cofire.pruning.allocation import within_budget
from cofire.pruning.taylor import taylor_scores

Signature = dict[str, int]
IMAGES = 512  # that are looked at
DRAWN = 64  # that stand for images nobody has looked at


def uniform(
    model: nn.Module,
    config: GateConfig,
    keep: float | None = None,
    input_shape: tuple[int, int, int] | None = None,
    *,
    macs: float | None = None,
) -> Signature:
    """The same share of every group's filters, at least one: the share ``keep``, or that for which ``macs`` remain.

    One share is a coarse knob, for it changes all groups at once. So where one more filter in each is too much,
    ``macs`` adds them group by group. It is counted as if each group drew its filters for each image.

    Args:
        keep: share of the filters, in (0, 1]; or
        macs: share of the MACs that remains, heads included, in (0, 1).
        input_shape: as in ``gate``.
    """
    gated = gate(model, config, input_shape=input_shape)
    sizes = {name: units[-1].out_channels for name, units in gated.units.groups.items()}
    if keep is not None and macs is None:
        if not 0.0 < keep <= 1.0:
            raise ConfigError(f"keep must be in (0, 1], got {keep}")
        return {name: max(1, round(keep * size)) for name, size in sizes.items()}
    if macs is None or keep is not None:
        raise ConfigError(f"signatures.uniform needs either keep or macs, got keep={keep} and macs={macs}")
    by_place = {name: -torch.arange(size, dtype=torch.float64) / size for name, size in sizes.items()}
    generator = torch.Generator().manual_seed(0)
    anyhow = {name: torch.rand(DRAWN, size, generator=generator) for name, size in sizes.items()}
    return _counts(within_budget(by_place, macs, partial(_remaining, gated, anyhow)))


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
    gated = gate(model, config, input_shape=input_shape)

    def remaining(masks: Mapping[str, Tensor]) -> float:
        return 1 - float(
            cost(gated.graph, {name: mask_O[None] for name, mask_O in masks.items()}).reduction("executed")
        )

    return _counts(within_budget(taylor_scores(gated, loader), macs, remaining))


def mass(
    model: nn.Module,
    config: GateConfig,
    loader: AnyLoader,
    *,
    macs: float,
    input_shape: tuple[int, int, int] | None = None,
) -> Signature:
    """Filters that hold one share of the activation mass in every group, that share for which ``macs`` remain.

    Args:
        config: of a method whose cost is foretold; without a signature.
        loader: batches of images, with or without labels; the first `IMAGES` are looked at.
        macs: share of the MACs that remains, heads included, in (0, 1).
        input_shape: as in ``gate``.
    """
    gated = gate(model, config, input_shape=input_shape).eval()
    if not isinstance(gated.gates, Foretelling):
        raise ConfigError(f"signatures.mass needs a method whose cost is foretold, which {config.label} is not")
    method = gated.gates
    found: dict[str, list[Tensor]] = {name: [] for name in gated.gates}

    def watch(name: str, decision: Decision, y_BOHW: Tensor) -> None:
        found[name].append(method.activity(gated.gates.sites[name], y_BOHW))

    with torch.no_grad(), gated.force("open"), gated.observe(watch):
        for batch in first_images(loader, IMAGES):
            gated(batch)
    activity = {name: torch.cat(parts).double() for name, parts in found.items()}
    left_by_stronger = {name: _left(activity_BO) for name, activity_BO in activity.items()}
    return _counts(within_budget(left_by_stronger, macs, partial(_remaining, gated, activity)))


def recounted(gated: GatedModel, loader: AnyLoader, *, macs: float) -> Signature:
    """A trained model's signature, made smaller or larger by one factor so that ``macs`` remain.

    What is trained together is chosen together. So a signature that was counted before training, when nobody knew which
    filters would run side by side, may end some points off.

    Args:
        gated: of a method that runs a fixed number of filters, those with the largest logits.
        loader: batches of images, with or without labels; the first `IMAGES` are looked at.
        macs: share of the MACs that remains, heads included, in (0, 1).
    """
    kept: Signature = getattr(gated.config, "signature", None) or {}
    if gated.threshold is not None or set(kept) != set(gated.gates):
        raise ConfigError(
            f"signatures.recounted needs a model with a signature for each group that decides, got {gated.config.label}"
        )
    found: dict[str, list[Tensor]] = {name: [] for name in gated.gates}

    def watch(name: str, decision: Decision, y_BOHW: Tensor) -> None:
        assert decision.logits_BO is not None
        found[name].append(decision.logits_BO)

    with torch.no_grad(), evaluating(gated), gated.observe(watch):
        for batch in first_images(loader, IMAGES):
            gated(batch)
    logits = {name: torch.cat(parts).double() for name, parts in found.items()}
    by_place = {
        name: -torch.arange(1, logits_BO.shape[1] + 1, dtype=torch.float64) / kept[name]
        for name, logits_BO in logits.items()
    }
    return _counts(within_budget(by_place, macs, partial(_remaining, gated, logits)))


def _counts(masks: Mapping[str, Tensor]) -> Signature:
    return {name: int(mask_O.sum()) for name, mask_O in masks.items()}


def _remaining(gated: GatedModel, activity: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> float:
    """Share of the MACs that remains where of each image's filters as many run as the masks have, the most active."""
    kept = {name: largest(activity[name], int(mask_O.sum())) for name, mask_O in masks.items()}
    heads = {name: gated.gates.head_macs(site) for name, site in gated.gates.sites.items()}
    return 1 - float(cost(gated.graph, kept, heads=heads).reduction("executed+heads").mean())


def _left(activity_BO: Tensor) -> Tensor:
    """Share of the mass that the stronger filters leave, at each rank, mean over samples, (O,)."""
    sorted_BO = activity_BO.sort(dim=1, descending=True).values
    share_BO = sorted_BO / sorted_BO.sum(1, keepdim=True).clamp_min(1e-12)
    return 1 - (share_BO.cumsum(1) - share_BO).mean(0)


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
