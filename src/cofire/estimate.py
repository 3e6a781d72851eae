"""What a config will cost, before any training: one pass over images gives every ratio; and a ratio for a budget.

Shapes: R ratios, B samples, O filters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn

from cofire.cost import COLUMNS, Column
from cofire.data.feeding import AnyLoader, feed
from cofire.errors import ConfigError
from cofire.gates.base import Decision
from cofire.gates.ftwt import FTWT, FTWTGate
from cofire.gating import GatedModel, gate
from cofire.targets import activity
from cofire.text import percent, rendered
from cofire.tracing import evaluating

RATIOS = (
    0.5,
    0.55,
    0.6,
    0.65,
    0.7,
    0.75,
    0.8,
    0.82,
    0.84,
    0.85,
    0.86,
    0.88,
    0.9,
    0.92,
    0.94,
    0.95,
    0.97,
    0.98,
    0.99,
    1.0,
)
_SOLVE_RATIOS = (
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.3,
    0.4,
    *(round(0.5 + 0.0125 * i, 4) for i in range(40)),
    0.999,
    1.0,
)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Cost for each ratio. Lists run over ``ratios``; means and standard deviations run over samples.

    ``reduction[column]`` is the share of dense MACs saved; ``keep_rate[group]`` the share of filters kept and
    ``layers[name]`` the share of a layer's own MACs saved (column ``executed``).
    """

    ratios: list[float]
    reduction: dict[Column, list[float]]
    spread: dict[Column, list[float]]
    keep_rate: dict[str, list[float]]
    keep_spread: dict[str, list[float]]
    layers: dict[str, list[float]]
    dense_macs: int
    n: int
    cascade: bool

    def at(self, ratio: float, column: Column = "executed") -> float:
        """The reduction at any ratio between the smallest and the largest, interpolated."""
        return float(np.interp(ratio, self.ratios, self.reduction[column]))

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return rendered(self.__rich__())

    def __rich__(self) -> Table:
        how = "masks applied, one pass per r" if self.cascade else "one dense pass for all r"
        table = Table(
            title=f"MACs saved before training: {how}, n = {self.n}, dense {self.dense_macs:,} MACs",
            title_justify="left",
            caption=None if self.cascade else "masks not applied: expect 4 to 8 points more once they are",
            caption_justify="left",
        )
        table.add_column("r", justify="right")
        for column in COLUMNS:
            table.add_column(column, justify="right")
        table.add_column("keep rate", justify="right")
        for i, ratio in enumerate(self.ratios):
            cells = [f"{percent(self.reduction[c][i])} ± {100 * self.spread[c][i]:.1f}" for c in COLUMNS]
            kept = float(np.mean([rates[i] for rates in self.keep_rate.values()]))
            table.add_row(f"{ratio:g}", *cells, percent(kept))
        return table


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The config whose ratio meets a budget, with the reductions expected of it."""

    config: FTWT
    independent: float
    """Reduction (column ``executed``) that the one-pass table gives at the ratio; this one meets the budget."""
    cascade: float
    """The same with masks applied from layer to layer."""
    estimate: Estimate
    applied: Estimate

    def to_json(self) -> dict[str, Any]:
        """Ratio, both figures and both tables as JSON values."""
        return {
            "ratio": self.config.ratio,
            "independent": self.independent,
            "cascade": self.cascade,
            "estimate": self.estimate.to_json(),
            "applied": self.applied.to_json(),
        }

    def __str__(self) -> str:
        return (
            f"r = {self.config.ratio:.4f}: {percent(self.independent)} of the MACs saved by the one-pass estimate, "
            f"{percent(self.cascade)} with masks applied"
        )


def estimate(
    model: nn.Module,
    config: FTWT,
    loader: AnyLoader,
    ratios: Sequence[float] = RATIOS,
    *,
    cascade: bool = False,
) -> Estimate:
    """Cost of ``model`` under ``config`` for many ratios, with targets as masks; nothing is trained.

    By default all ratios come from one pass of the dense model. That underestimates, because masks in one layer
    make the next layers' activations sparser; ``cascade=True`` applies the masks, at one pass per ratio.

    Args:
        model: a plain model; left alone.
        loader: images with or without labels.
        ratios: in (0, 1].
    """
    if not isinstance(config, FTWT):
        raise ConfigError(f"estimate needs an FTWT config (its targets give the cost), got {type(config).__name__}")
    chosen = sorted(dataclasses.replace(config, ratio=ratio).ratio for ratio in ratios)
    if not chosen:
        raise ConfigError("ratios must name at least one ratio, got none")
    if not cascade:
        return _one_pass(model, config, loader, chosen)
    parts = [_one_pass(model, dataclasses.replace(config, ratio=ratio), loader, [ratio], "targets") for ratio in chosen]
    return _joined(parts)


def solve_ratio(model: nn.Module, config: FTWT, loader: AnyLoader, *, macs: float) -> Solution:
    """The ratio that leaves a share ``macs`` of the dense MACs, by the one-pass estimate (column ``executed``).

    Args:
        macs: share that REMAINS, in (0, 1); 0.5 is half the MACs.

    Raises:
        ConfigError: no ratio reaches the budget; says what can be reached.
    """
    if not 0.0 < macs < 1.0:
        raise ConfigError(f"macs is the share of MACs that remains and must be in (0, 1), got {macs}")
    table = estimate(model, config, loader, _SOLVE_RATIOS)
    saved = table.reduction["executed"]
    if not saved[-1] <= 1 - macs <= saved[0]:
        raise ConfigError(
            f"macs={macs} cannot be reached: this model keeps between {1 - saved[0]:.3f} and {1 - saved[-1]:.3f} "
            "of its MACs, from the smallest ratio to r = 1"
        )
    ratio = float(np.interp(1 - macs, saved[::-1], table.ratios[::-1]))
    solved = dataclasses.replace(config, ratio=min(ratio, 1.0))
    applied = estimate(model, solved, loader, [solved.ratio], cascade=True)
    return Solution(
        config=solved,
        independent=table.at(ratio),
        cascade=applied.reduction["executed"][0],
        estimate=table,
        applied=applied,
    )


def _one_pass(model: nn.Module, config: FTWT, loader: AnyLoader, ratios: list[float], masks: Any = "open") -> Estimate:
    gated: GatedModel | None = None
    totals: _Totals | None = None
    activities: dict[str, Tensor] = {}

    def pool(group: str, decision: Decision, y_BOHW: Tensor) -> None:
        activities[group] = activity(y_BOHW)

    for x_BCHW, _ in feed(loader, "estimating" if masks == "open" else f"applying r = {ratios[0]:g}"):
        shape = (int(x_BCHW.shape[1]), int(x_BCHW.shape[2]), int(x_BCHW.shape[3]))
        if gated is None or totals is None:
            gated = gate(model, config, input_shape=shape)
            totals = _Totals(gated, ratios)
        device = next(gated.parameters()).device
        with torch.no_grad(), evaluating(gated), gated.force(masks), gated.observe(pool):
            gated(x_BCHW.to(device))
        totals.add(activities, shape)
    assert totals is not None
    return totals.estimate(cascade=masks == "targets")


class _Totals:
    """Sums over samples of reductions and keep rates, and of their squares."""

    def __init__(self, gated: GatedModel, ratios: list[float]) -> None:
        self.gated, self.ratios = gated, ratios
        self.n = 0
        self.sums: dict[tuple[str, str], Tensor] = {}
        self.dense_macs = 0

    def add(self, activities: dict[str, Tensor], shape: tuple[int, int, int]) -> None:
        masks_RBO = {}
        for group, activity_BO in activities.items():
            found = self.gated.gates[group]
            assert isinstance(found, FTWTGate)
            masks_RBO[group] = found.targets(activity_BO, self.ratios)
        cost = self.gated.cost({group: mask.flatten(0, 1) for group, mask in masks_RBO.items()}, shape)
        self.dense_macs = cost.dense_total
        for column in COLUMNS:
            self._sum(("reduction", column), cost.reduction(column).unflatten(0, (len(self.ratios), -1)))
        for group, mask_RBO in masks_RBO.items():
            self._sum(("keep", group), mask_RBO.double().mean(2))
        for layer, macs in cost.executed.items():
            self._sum(("layer", layer), 1 - macs.double().unflatten(0, (len(self.ratios), -1)) / cost.dense[layer])
        self.n += len(next(iter(activities.values())))

    def _sum(self, key: tuple[str, str], values_RB: Tensor) -> None:
        sums = torch.stack([values_RB.sum(1), values_RB.square().sum(1)])
        self.sums[key] = self.sums[key] + sums if key in self.sums else sums

    def estimate(self, cascade: bool) -> Estimate:
        mean: dict[tuple[str, str], list[float]] = {}
        spread: dict[tuple[str, str], list[float]] = {}
        for key, (first, second) in self.sums.items():
            mean[key] = (first / self.n).tolist()
            spread[key] = (second / self.n - (first / self.n).square()).clamp(min=0).sqrt().tolist()
        return Estimate(
            ratios=self.ratios,
            reduction={column: mean["reduction", column] for column in COLUMNS},
            spread={column: spread["reduction", column] for column in COLUMNS},
            keep_rate={name: values for (what, name), values in mean.items() if what == "keep"},
            keep_spread={name: values for (what, name), values in spread.items() if what == "keep"},
            layers={name: values for (what, name), values in mean.items() if what == "layer"},
            dense_macs=self.dense_macs,
            n=self.n,
            cascade=cascade,
        )


def _joined(parts: list[Estimate]) -> Estimate:
    """Estimates of one ratio each as one."""

    def column(field: str) -> Any:
        keys = getattr(parts[0], field)
        return {key: [getattr(part, field)[key][0] for part in parts] for key in keys}

    fields = ("reduction", "spread", "keep_rate", "keep_spread", "layers")
    ratios = [part.ratios[0] for part in parts]
    return dataclasses.replace(parts[0], ratios=ratios, **{field: column(field) for field in fields})
