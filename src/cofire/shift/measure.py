"""shift(models, images) -> Shift: accuracy, calibration, cost and mask drift under corruptions.

Shapes: B images of a batch, K classes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from cofire.analysis.decisions import Bits, packed
from cofire.data.feeding import AnyLoader
from cofire.data.images import AbstractImages
from cofire.errors import ConfigError, DataError
from cofire.evaluation import Report, evaluate
from cofire.gates.gating import GatedModel
from cofire.progress import progress
from cofire.shift.calibration import brier, calibration_error
from cofire.shift.corruptions import Corruption, corruption
from cofire.shift.drift import drift
from cofire.shift.loading import ShiftedLoader
from cofire.shift.results import AtSeverity, Shift

PAPER = ("blur", "noise")
"""The corruptions of the paper."""


def shift(
    models: Mapping[str, nn.Module],
    images: AbstractImages,
    corruptions: Sequence[str] | Mapping[str, Sequence[float]] = PAPER,
    *,
    seed: int = 0,
    bins: int = 15,
    batch_size: int = 250,
    dense_macs: Mapping[str, int] | None = None,
    text: str = "shift",
) -> Shift:
    """Models, gated or plain, on images that get worse.

    Args:
        models: by the names that tables use.
        images: labelled, of at least two classes.
        corruptions: names, see ``cofire.shift.list_corruptions()``, at their own severities; or name -> severities,
            each finite and at least 0, which is clean.
        seed: of what is random; every model sees the same images.
        bins: of the calibration error.
        dense_macs: model -> what its reductions are shares of, where that is not its own MACs: of a pruned model those
            of the network it was cut from.
        text: what the progress bar says; empty for none.
    """
    plan = _plan(corruptions)
    _check(models, images)
    for kind, severities in plan.items():  # what cannot be done fails now, not after an hour
        for severity in severities:
            next(iter(ShiftedLoader(images=images.take([0]), batch_size=1, corruption=kind, severity=severity)))
    measured = sum(1 for severities in plan.values() for severity in severities if severity) + 1
    batches = len(images.loader(batch_size))
    with progress(text) as bar:
        task = bar.add_task(text, total=len(models) * measured * batches)

        def measure(model: nn.Module, what: str, loader: AnyLoader, whole: int | None) -> _Measured:
            bar.update(task, description=f"{text}: {what}")
            return _measured(model, what, loader, whole, bins, lambda: bar.advance(task))

        clean: dict[str, AtSeverity] = {}
        points: dict[str, dict[str, tuple[AtSeverity, ...]]] = {kind.name: {} for kind in plan}
        for name, model in models.items():
            whole = (dense_macs or {}).get(name)
            reference = measure(model, f"{name}, clean", images.loader(batch_size), whole)
            clean[name] = reference.point(0.0, reference)
            for kind, severities in plan.items():
                found = []
                for severity in severities:
                    loader = ShiftedLoader(
                        images=images, batch_size=batch_size, corruption=kind, severity=severity, seed=seed
                    )
                    what = f"{name}, {kind.name} {severity:g}"
                    shifted = measure(model, what, loader, whole) if severity else reference
                    found.append(shifted.point(severity, reference))
                points[kind.name][name] = tuple(found)
    return Shift(
        data=images.name,
        n=len(images),
        classes=images.classes,
        seed=seed,
        bins=bins,
        units={kind.name: kind.unit for kind in plan},
        softmax={name: has for name, model in models.items() if (has := _softmax(model)) is not None},
        clean=clean,
        points=points,
    )


def _plan(corruptions: Sequence[str] | Mapping[str, Sequence[float]]) -> dict[Corruption, Sequence[float]]:
    if isinstance(corruptions, str) or not corruptions:
        raise ConfigError(f"corruptions must be names, at least one, got {corruptions!r}")
    asked = corruptions if isinstance(corruptions, Mapping) else {n: corruption(n).severities for n in corruptions}
    plan = {corruption(name): severities for name, severities in asked.items()}
    for kind, severities in plan.items():
        if len(severities) == 0:
            raise ConfigError(f"corruption {kind.name!r} must have at least one severity, got none")
    return plan


def _check(models: Mapping[str, nn.Module], images: AbstractImages) -> None:
    if not models:
        raise ConfigError("shift needs at least one model, got none")
    if images.label_N is None:
        raise DataError(f"shift needs labelled images, got none of {images.name}'s labelled")
    if len(images.classes) < 2:
        raise DataError(f"shift needs at least two classes, for one is always right; {images.name} has one")


def _softmax(model: nn.Module) -> bool | None:
    """Whether a method's heads have a softmax, as the paper asks; None where there is no such option."""
    options = vars(model.config) if isinstance(model, GatedModel) else {}
    return options.get("softmax")


@dataclass(frozen=True, kw_only=True, eq=False)
class _Measured:
    """One model on one set of batches."""

    report: Report
    brier: float
    ece: float
    bits: dict[str, Bits]
    filters: dict[str, int]

    def point(self, severity: float, clean: _Measured) -> AtSeverity:
        moved = drift(clean.bits, self.bits, self.filters) if self.bits else None
        return AtSeverity(severity=severity, brier=self.brier, ece=self.ece, report=self.report, drift=moved)


def _measured(
    model: nn.Module, what: str, loader: AnyLoader, whole: int | None, bins: int, tick: Callable[[], None]
) -> _Measured:
    """Everything in one pass; ``what`` is for errors, ``tick`` is called after each batch."""
    parts: dict[str, list[Tensor]] = defaultdict(list)
    bits: dict[str, list[Bits]] = defaultdict(list)
    gated = model if isinstance(model, GatedModel) else None

    def watch(logits_BK: Tensor, label_B: Tensor) -> None:
        if not logits_BK.isfinite().all():
            raise DataError(f"{what}: logits must be finite, got {int((~logits_BK.isfinite()).sum())} that are not")
        probability_BK = logits_BK.double().softmax(1)
        confidence_B, predicted_B = probability_BK.max(1)
        parts["brier"].append(brier(probability_BK, label_B).cpu())
        parts["confidence"].append(confidence_B.cpu())
        parts["right"].append((predicted_B == label_B).cpu())
        for group, mask_BO in (gated.masks if gated else {}).items():
            bits[group].append(packed(mask_BO))
        tick()

    report = evaluate(model, loader, text="", dense_macs=whole, watch=watch)
    return _Measured(
        report=report,
        brier=float(torch.cat(parts["brier"]).mean()),
        ece=calibration_error(torch.cat(parts["confidence"]), torch.cat(parts["right"]), bins),
        bits={group: np.concatenate(masks) for group, masks in bits.items()},
        filters={group: units[-1].out_channels for group, units in gated.units.groups.items()} if gated else {},
    )
