"""What a config will cost, before any training: one pass over images gives every ratio; and a ratio for a budget.

Shapes: R ratios, B samples, O filters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

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
    layer_spread: dict[str, list[float]]
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


def _one_pass(
    model: nn.Module, config: FTWT, loader: AnyLoader, ratios: list[float], masks: Literal["open", "targets"] = "open"
) -> Estimate:
    totals: _Totals | None = None
    with ExitStack() as stack:
        for x_BCHW, _ in feed(loader, "estimating" if masks == "open" else f"applying r = {ratios[0]:g}"):
            shape = (int(x_BCHW.shape[1]), int(x_BCHW.shape[2]), int(x_BCHW.shape[3]))
            if totals is None:
                totals = _Totals(gate(model, config, input_shape=shape), ratios)
                for context in (torch.no_grad(), evaluating(totals.gated), totals.gated.force(masks)):
                    stack.enter_context(context)
                stack.enter_context(totals.gated.observe(totals.watch))
            totals.gated(x_BCHW.to(totals.device))
            totals.add(shape)
    assert totals is not None
    return totals.estimate(cascade=masks == "targets")


class _Totals:
    """Sums over samples of reductions and keep rates, and of their squares."""

    def __init__(self, gated: GatedModel, ratios: list[float]) -> None:
        self.gated, self.ratios = gated, ratios
        self.device = next(gated.parameters()).device
        self.n = 0
        self.sums: dict[str, Tensor] = {}
        self.targets_RBO: dict[str, Tensor] = {}
        self.dense: dict[str, int] = {}

    def watch(self, group: str, decision: Decision, y_BOHW: Tensor) -> None:
        found = self.gated.gates[group]
        assert isinstance(found, FTWTGate)
        self.targets_RBO[group] = found.targets(activity(y_BOHW, nonnegative=found.nonnegative), self.ratios)

    def add(self, shape: tuple[int, int, int]) -> None:
        """Take in the batch that was just watched."""
        cost = self.gated.cost({group: target.flatten(0, 1) for group, target in self.targets_RBO.items()}, shape)
        self.dense = dict(cost.dense)
        self._sum("reduction", [cost.reduction(column) for column in COLUMNS])
        self._sum("layer", [1 - cost.executed[layer].double() / macs for layer, macs in cost.dense.items()])
        bytes_RBO = (target.view(torch.uint8) for target in self.targets_RBO.values())
        self._sum("keep", [(b.sum(2, dtype=torch.int32) / b.shape[2]).flatten() for b in bytes_RBO])
        self.n += next(iter(self.targets_RBO.values())).shape[1]

    def _sum(self, what: str, rows: list[Tensor]) -> None:
        """Add up rows of (R * B,) values and their squares."""
        values_LRB = torch.stack(rows).double().unflatten(1, (len(self.ratios), -1))
        sums_2LR = torch.stack([values_LRB.sum(2), values_LRB.square().sum(2)])
        self.sums[what] = self.sums[what] + sums_2LR if what in self.sums else sums_2LR

    def estimate(self, cascade: bool) -> Estimate:
        def table(what: str, names: Iterable[str]) -> tuple[dict[Any, list[float]], dict[Any, list[float]]]:
            mean_LR, square_LR = self.sums[what] / self.n
            spread_LR = (square_LR - mean_LR.square()).clamp(min=0).sqrt()
            return dict(zip(names, mean_LR.tolist(), strict=True)), dict(zip(names, spread_LR.tolist(), strict=True))

        reduction, spread = table("reduction", COLUMNS)
        keep_rate, keep_spread = table("keep", list(self.targets_RBO))
        layers, layer_spread = table("layer", list(self.dense))
        return Estimate(
            ratios=self.ratios,
            reduction=reduction,
            spread=spread,
            keep_rate=keep_rate,
            keep_spread=keep_spread,
            layers=layers,
            layer_spread=layer_spread,
            dense_macs=sum(self.dense.values()),
            n=self.n,
            cascade=cascade,
        )


def _joined(parts: list[Estimate]) -> Estimate:
    """Estimates of one ratio each as one."""

    def column(field: str) -> Any:
        keys = getattr(parts[0], field)
        return {key: [getattr(part, field)[key][0] for part in parts] for key in keys}

    fields = ("reduction", "spread", "keep_rate", "keep_spread", "layers", "layer_spread")
    ratios = [part.ratios[0] for part in parts]
    return dataclasses.replace(parts[0], ratios=ratios, **{field: column(field) for field in fields})
