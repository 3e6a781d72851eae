"""Does the core share of a group tell how much of it can leave for good? Each group pruned alone, more and more.

Shapes: N images, O filters of a group, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cofire.analysis.decisions import Decisions
from cofire.analysis.routes import routes
from cofire.data.feeding import AnyLoader, feed
from cofire.errors import ConfigError, DataError, unknown
from cofire.gates.gating import GatedModel
from cofire.graph.tracing import evaluating
from cofire.progress import progress
from cofire.pruning.base import Scores
from cofire.pruning.l1 import l1_norms

Order = Literal["l1", "keep rate"]
"""Which filters leave first: those with the smallest weights, or those that run for the fewest images."""

Batches = list[tuple[Tensor, Tensor]]
RATIOS = tuple(round(0.1 * step, 1) for step in range(1, 10))
_SHUFFLES = 10_000


@dataclass(frozen=True, kw_only=True)
class Compressibility:
    """The static ratio each group tolerates by itself, beside its core share.

    Args:
        top1: accuracy with every filter running, in [0, 1].
        drop: how much of it a group may cost, in (0, 1).
        core_share: group -> share of filters that run for every image, in [0, 1].
        tolerated: group -> the largest of the ratios at which pruning cost at most ``drop``; 0 if none.
        correlation: Spearman's rank correlation of the two over groups, in [-1, 1]; nan if one of them is constant.
        p_value: how often shuffled groups are correlated at least as much; nan as above.
    """

    top1: float
    drop: float
    core_share: dict[str, float]
    tolerated: dict[str, float]
    correlation: float
    p_value: float


def compressibility(
    gated: GatedModel,
    decisions: Decisions,
    loader: AnyLoader,
    *,
    drop: float = 0.02,
    ratios: Sequence[float] = RATIOS,
    by: Order = "l1",
    text: str = "pruning group by group",
) -> Compressibility:
    """Prune each group alone, the same filters for every image, and see how far the others can carry it.

    Filters are masked, not cut out, and nothing is trained afterwards. The ratio is found by halving, in about
    log2(ratios) passes per group: more pruning is taken to cost more.

    Args:
        gated: its gates are held open. For the dense model that gating started from: ``gate(dense, gated.config)``.
        decisions: of the gated model; they have the core shares.
        loader: labelled images on which accuracy is measured.
        drop: of top-1 that is accepted, in (0, 1).
        ratios: shares of a group's filters to take away, in (0, 1].
        by: which filters leave first.
        text: what the progress bar says; empty for none.
    """
    if not 0.0 < drop < 1.0:
        raise ConfigError(f"drop must be in (0, 1), got {drop}")
    if not ratios or min(ratios) <= 0.0 or max(ratios) > 1.0:
        raise ConfigError(f"ratios must be in (0, 1] and at least one, got {tuple(ratios)}")
    if set(gated.gates) != set(decisions.groups):
        raise ConfigError("the decisions must be of a model with the same groups as this one")
    batches = _labelled(loader)
    scores = _scores(gated, decisions, by)
    tolerated = {}
    with torch.no_grad(), evaluating(gated), gated.force("open"), progress(text) as bar:
        top1 = _top1(gated, batches)
        for group in bar.track(decisions.groups, description=text):

            def tolerates(ratio: float, group: str = group) -> bool:
                with gated.force({group: _without_lowest(scores[group], ratio)}):
                    return top1 - _top1(gated, batches) <= drop

            tolerated[group] = _largest(ratios, tolerates)
    core_share = {group: found.core_share for group, found in routes(decisions).items()}
    correlation, p_value = spearman(list(core_share.values()), list(tolerated.values()))
    return Compressibility(
        top1=top1, drop=drop, core_share=core_share, tolerated=tolerated, correlation=correlation, p_value=p_value
    )


def num_passes(num_groups: int, num_ratios: int = len(RATIOS)) -> int:
    """Passes over the images that :func:`compressibility` makes at most."""
    return 1 + num_groups * num_ratios.bit_length()


def _largest(ratios: Sequence[float], tolerates: Callable[[float], bool]) -> float:
    """The largest ratio that is tolerated, 0 if none, where every smaller one is tolerated too."""
    rising = [0.0, *sorted(ratios)]
    low, high = 0, len(rising)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if tolerates(rising[middle]) else (low, middle)
    return rising[low]


def spearman(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Rank correlation of two lists (ties share their mean rank), and its two-sided p-value by shuffling."""
    x_G, y_G = (_ranks(np.asarray(values, dtype=np.float64)) for values in (first, second))
    scale = float(np.linalg.norm(x_G) * np.linalg.norm(y_G))
    if scale == 0.0:
        return np.nan, np.nan
    generator = np.random.default_rng(0)
    shuffled_SG = generator.permuted(np.tile(y_G, (_SHUFFLES, 1)), axis=1)
    found = float(x_G @ y_G)
    beyond = np.abs(shuffled_SG @ x_G) >= abs(found) - 1e-9
    return found / scale, float((1 + beyond.sum()) / (1 + _SHUFFLES))


def _ranks(values_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks around 0, equal values at the mean of theirs."""
    _, place_G, count = np.unique(values_G, return_inverse=True, return_counts=True)
    rank_G = (np.cumsum(count) - (count - 1) / 2)[place_G]
    around_G: NDArray[np.float64] = rank_G - rank_G.mean()
    return around_G


def _labelled(loader: AnyLoader) -> Batches:
    batches = []
    for x_BCHW, label_B in feed(loader):
        if label_B is None:
            raise DataError("compressibility needs labelled images, got unlabelled ones")
        batches.append((x_BCHW, label_B))
    return batches


def _scores(gated: GatedModel, decisions: Decisions, by: Order) -> Scores:
    if by == "l1":
        return {
            group: torch.stack([l1_norms(gated.backbone.get_submodule(unit.name)) for unit in units]).sum(0)
            for group, units in gated.units.groups.items()
        }
    if by == "keep rate":
        return {group: torch.from_numpy(decisions.keep_rate(group)) for group in decisions.groups}
    raise unknown("order of filters", by, get_args(Order))


def _without_lowest(score_O: Tensor, ratio: float) -> Tensor:
    """A mask without the share ``ratio`` of filters that score lowest, float (O,)."""
    mask_O = torch.ones(len(score_O))
    mask_O[score_O.argsort(stable=True)[: round(ratio * len(score_O))]] = 0.0
    return mask_O


def _top1(gated: GatedModel, batches: Batches) -> float:
    device = next(gated.parameters()).device
    right = sum(int((gated(x_BCHW.to(device)).argmax(1).cpu() == label_B.cpu()).sum()) for x_BCHW, label_B in batches)
    return right / sum(len(label_B) for _, label_B in batches)
