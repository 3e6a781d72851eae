"""One picture through an engine, with all filters and with gates at work. Shapes: O filters, H x W pixels."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cofire.analysis.responses import Heatmaps, heatmaps
from cofire.explore.subject import Pixels, Subject, as_input
from cofire.runtime.classify import name_of
from cofire.runtime.engine import Engine

ROUNDS = 5
TOP = 3
_one_at_a_time = threading.Lock()  # a model has one set of forced masks for all who ask


@dataclass(frozen=True, kw_only=True)
class Side:
    """What one of the two says: the best classes with their probabilities, MACs executed, milliseconds."""

    classes: list[str]
    probabilities: list[float]
    macs: int
    milliseconds: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Look:
    """A picture, seen twice.

    Args:
        dense: the same weights with every filter running.
        gated: with gates at work.
        masks: group -> bool (O,): which filters ran.
    """

    pixels_CHW: Pixels
    dense: Side
    gated: Side
    masks: dict[str, NDArray[np.bool_]]


def look(subject: Subject, pixels_CHW: Pixels, place: float | None = None) -> Look:
    """Both answers at a place of the subject's knob, default where it begins.

    Times are the least of a few calls, which take turns.
    """
    engine, threshold = subject.knob.at(subject.knob.value if place is None else place)
    x_BCHW = as_input(pixels_CHW[None])

    def gated() -> NDArray[np.float32]:
        found: NDArray[np.float32] = engine(x_BCHW, threshold=threshold)
        return found

    def dense() -> NDArray[np.float32]:
        with engine.force(every):
            return gated()

    every = {name: np.ones(filters) for name, filters in engine.groups.items()}
    milliseconds = {dense: np.inf, gated: np.inf}
    for _ in range(ROUNDS):
        for call in milliseconds:
            begin = time.perf_counter()
            call()
            milliseconds[call] = min(milliseconds[call], 1e3 * (time.perf_counter() - begin))
    sides = {call: _side(engine, call, milliseconds[call]) for call in milliseconds}
    masks = {name: mask_BO[0] for name, mask_BO in engine.last_masks.items()}  # of the last call, which was gated
    return Look(pixels_CHW=pixels_CHW, dense=sides[dense], gated=sides[gated], masks=masks)


def heat(subject: Subject, seen: Look, unit: str) -> Heatmaps | None:
    """Where a unit responds to the picture, with all filters and with those that ran for it.

    None without a gated model, or where a model's filters have factors, so that it has no dense form.
    """
    gated, card = subject.gated, subject.card
    if gated is None or card is None or not gated.gates.opens:
        return None
    mean_C11, std_C11 = (torch.tensor(values).view(-1, 1, 1) for values in (card.mean, card.std))
    x_BCHW = ((torch.from_numpy(as_input(seen.pixels_CHW[None])) - mean_C11) / std_C11).float()
    sites = gated.gates.sites
    masks = {
        name: torch.from_numpy(mask_O[:1] if sites[name].kind == "block" else mask_O)
        for name, mask_O in seen.masks.items()
    }
    with _one_at_a_time, gated.force(masks):
        return heatmaps(gated, x_BCHW, unit)


def _side(engine: Engine, call: Callable[[], NDArray[np.float32]], milliseconds: float) -> Side:
    logits = call()[0].astype(np.float64)
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    best = np.argsort(-shares, kind="stable")[:TOP]
    return Side(
        classes=[name_of(c, engine.classes) for c in best.tolist()],
        probabilities=shares[best].tolist(),
        macs=int(sum(macs[0] for macs in engine.last_macs.values())),
        milliseconds=milliseconds,
    )
