"""What a config will cost, before any training: one pass over images gives every ratio; and a ratio for a budget.

Shapes: R ratios, B samples, O filters, L lines of a table.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn

from cofire.data.feeding import AnyLoader, feed
from cofire.errors import ConfigError
from cofire.gates.base import Decision, Foretelling, GateConfig
from cofire.gates.gating import GatedModel, gate
from cofire.graph.cost import COLUMNS, Column
from cofire.graph.live import Live
from cofire.graph.tracing import evaluating
from cofire.runtime.engine import Precision, compile
from cofire.runtime.latency import latency_model
from cofire.text import percent, rendered

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
_TIMED = 16  # images on which a latency is measured
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

    config: Any
    """As it was given, with the ratio that was found."""
    independent: float
    """Reduction (column ``executed``) that the one-pass table gives at the ratio; this one meets the budget."""
    cascade: float
    """The same with masks applied from layer to layer."""
    estimate: Estimate
    applied: Estimate
    latency_ms: float | None = None
    """The budget of milliseconds, if it was one: what was predicted for the ratio."""
    measured_ms: float | None = None
    """What the engine then took, with targets as masks: less, because masks applied make the next layers sparser."""

    def to_json(self) -> dict[str, Any]:
        """Ratio, both figures, both tables and the times as JSON values."""
        return {
            "ratio": self.config.ratio,
            "latency_ms": self.latency_ms,
            "measured_ms": self.measured_ms,
            "independent": self.independent,
            "cascade": self.cascade,
            "estimate": self.estimate.to_json(),
            "applied": self.applied.to_json(),
        }

    def __str__(self) -> str:
        return (
            f"r = {self.config.ratio:.4f}: {percent(self.independent)} of the MACs saved by the one-pass estimate, "
            f"{percent(self.cascade)} with masks applied"
            + (
                ""
                if self.measured_ms is None
                else f"; {self.latency_ms:.3f} ms asked, {self.measured_ms:.3f} ms measured"
            )
        )


def estimate(
    model: nn.Module,
    config: GateConfig,
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
    if not config.foretold:
        raise ConfigError(f"estimate needs a method whose cost is known before training, which {config.label} is not")
    chosen = sorted(with_ratio(config, ratio).ratio for ratio in ratios)
    if not chosen:
        raise ConfigError("ratios must name at least one ratio, got none")
    if not cascade:
        return _one_pass(model, config, loader, chosen)
    parts = [_one_pass(model, with_ratio(config, ratio), loader, [ratio], "targets") for ratio in chosen]
    return _joined(parts)


def solve_ratio(
    model: nn.Module,
    config: GateConfig,
    loader: AnyLoader,
    *,
    macs: float | None = None,
    latency_ms: float | None = None,
    precision: Precision = "float32",
) -> Solution:
    """The ratio for a budget, by the one-pass estimate (column ``executed``): of MACs, or of time on this machine.

    Args:
        macs: share of the dense MACs that REMAINS, in (0, 1); 0.5 is half.
        latency_ms: milliseconds for one image in the native engine, one thread, heads included; predicted from timings
            of every op at several keep rates, then measured at the ratio found. A budget that every ratio meets gives
            r = 1.
        precision: of the engine whose milliseconds count; int8 fits its ranges to the first images of the loader.

    Raises:
        ConfigError: no ratio reaches the budget; says what can be reached.
    """
    if (macs is None) == (latency_ms is None):
        raise ConfigError(f"solve_ratio takes one budget, macs or latency_ms, got macs={macs}, latency_ms={latency_ms}")
    if macs is not None and not 0.0 < macs < 1.0:
        raise ConfigError(f"macs is the share of MACs that remains and must be in (0, 1), got {macs}")
    if macs is not None and precision != "float32":
        raise ConfigError(
            f"precision={precision!r} changes milliseconds, not MACs: it needs latency_ms, got macs={macs}"
        )
    table = estimate(model, config, loader, _SOLVE_RATIOS)
    timer = None if latency_ms is None else _Timer(model, config, loader, precision)
    remains = [1 - saved for saved in table.reduction["executed"]] if timer is None else timer.curve(table)
    budget = macs if macs is not None else latency_ms
    assert budget is not None
    if budget < remains[0]:
        what, unit = ("macs", "of its MACs") if timer is None else ("latency_ms", "ms")
        raise ConfigError(
            f"{what}={budget} cannot be reached: from the smallest ratio to r = 1 this model takes between "
            f"{remains[0]:.3f} and {remains[-1]:.3f} {unit}"
        )
    ratio = float(np.interp(budget, remains, table.ratios))
    solved = with_ratio(config, min(ratio, 1.0))
    applied = estimate(model, solved, loader, [solved.ratio], cascade=True)
    return Solution(
        config=solved,
        independent=table.at(ratio),
        cascade=applied.reduction["executed"][0],
        estimate=table,
        applied=applied,
        latency_ms=latency_ms,
        measured_ms=None if timer is None else timer.measure(solved),
    )


def with_ratio(config: Any, ratio: float) -> Any:
    """A foretold method's config at another ratio, in (0, 1]."""
    return dataclasses.replace(config, ratio=ratio)


class _Timer:
    """Milliseconds of a model in the native engine: predicted for any estimate, measured for a config."""

    def __init__(self, model: nn.Module, config: GateConfig, loader: AnyLoader, precision: Precision) -> None:
        images, _ = next(iter(feed(loader, "compiling", labels=False)))
        self.images = images[:_TIMED].float().cpu()
        self.model = model
        calibration = self.images if precision == "int8" else None
        self.engine = compile(self._gated(config), precision=precision, images=calibration)

    def _gated(self, config: GateConfig) -> GatedModel:
        _, channels, height, width = self.images.shape
        return gate(self.model, config, input_shape=(channels, height, width)).eval()

    def curve(self, table: Estimate) -> list[float]:
        """Predicted milliseconds for each ratio of a table."""
        times = latency_model(self.engine)
        predicted = [
            times.predict({layer: 1 - saved[i] for layer, saved in table.layers.items()}, 1 - reduction)
            for i, reduction in enumerate(table.reduction["executed"])
        ]
        return [float(ms) for ms in np.maximum.accumulate(predicted)]

    def measure(self, config: GateConfig) -> float:
        """The median over some images, with their targets as masks and the heads evaluated."""
        gated = self._gated(config)
        with torch.no_grad(), gated.force("targets"):
            gated(self.images)
        seconds = []
        for _ in range(3):
            for n, image in enumerate(self.images.split(1)):
                with self.engine.force({group: mask[n] for group, mask in gated.masks.items()}, heads=True):
                    begin = time.perf_counter()
                    self.engine(image)
                    seconds.append(time.perf_counter() - begin)
        return 1e3 * float(np.median(seconds))


def _one_pass(
    model: nn.Module,
    config: GateConfig,
    loader: AnyLoader,
    ratios: list[float],
    masks: Literal["open", "targets"] = "open",
) -> Estimate:
    totals: _Totals | None = None
    with ExitStack() as stack:
        for x_BCHW, _ in feed(loader, "estimating" if masks == "open" else f"applying r = {ratios[0]:g}", labels=False):
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
        method = gated.gates
        assert isinstance(method, Foretelling)
        self.gated, self.method, self.sites = gated, method, method.sites
        self.runs = method.nested(ratios)
        self.device = next(gated.parameters()).device
        self.n = 0
        self.sums: dict[str, Tensor] = {}
        self.activity_BO: dict[str, Tensor] = {}
        self.dense: dict[str, int] = {}

    def watch(self, group: str, decision: Decision, y_BOHW: Tensor) -> None:
        self.activity_BO[group] = self.method.activity(self.sites[group], y_BOHW)

    def add(self, shape: tuple[int, int, int]) -> None:
        """Take in the batch that was just watched."""
        figures = [self._figures(run, shape) for run in self.runs]
        for what in figures[0]:
            values_LRB = torch.cat([figure[what] for figure in figures], 1)
            sums_2LR = torch.stack([values_LRB.sum(2), values_LRB.square().sum(2)])
            self.sums[what] = self.sums[what] + sums_2LR if what in self.sums else sums_2LR
        self.n += len(next(iter(self.activity_BO.values())))

    def _figures(self, ratios: list[float], shape: tuple[int, int, int]) -> dict[str, Tensor]:
        """Reductions, each layer's and each group's share, float64 (L, R, B)."""
        levels = {name: self.method.levels(self.sites[name], a_BO, ratios) for name, a_BO in self.activity_BO.items()}
        live = {group: Live(level_BO, len(ratios)) for group, level_BO in levels.items()}
        cost = self.gated.cost(live, shape)
        self.dense = dict(cost.dense)
        rows = {
            "reduction": [cost.reduction(column) for column in COLUMNS],
            "layer": [1 - cost.executed[layer].double() / macs for layer, macs in cost.dense.items()],
            "keep": [target.count / target.channels for target in live.values()],
        }
        return {what: torch.stack(row).double().unflatten(1, (len(ratios), -1)) for what, row in rows.items()}

    def estimate(self, cascade: bool) -> Estimate:
        def table(what: str, names: Iterable[str]) -> tuple[dict[Any, list[float]], dict[Any, list[float]]]:
            mean_LR, square_LR = self.sums[what] / self.n
            spread_LR = (square_LR - mean_LR.square()).clamp(min=0).sqrt()
            return dict(zip(names, mean_LR.tolist(), strict=True)), dict(zip(names, spread_LR.tolist(), strict=True))

        reduction, spread = table("reduction", COLUMNS)
        keep_rate, keep_spread = table("keep", list(self.activity_BO))
        layers, layer_spread = table("layer", list(self.dense))
        return Estimate(
            ratios=[ratio for run in self.runs for ratio in run],
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
