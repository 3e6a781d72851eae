"""evaluate(model, loader) -> Report: accuracy, the three cost columns, and what the gates did.

Shapes: B samples, O filters, K classes.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from cofire.data.feeding import AnyLoader, feed, map_tensors
from cofire.errors import ConfigError, DataError
from cofire.gates.base import Decision
from cofire.gates.gating import GatedModel
from cofire.graph.cost import COLUMNS, Column, Cost, cost
from cofire.graph.graph import trace
from cofire.graph.tracing import evaluating
from cofire.graph.units import Site
from cofire.text import percent, rendered

_OF_LOGITS = ("top1", "top5", "loss")
Watch = Callable[[Tensor, Tensor], None]
"""Sees (logits_BK, label_B)."""
Metric = Callable[[Any, Any], Mapping[str, Tensor]]
"""(output, target) -> metrics by name, each a number per sample (B,), higher is better. ``output`` is what the model
returns for a batch, ``target`` the batch's second part as it is."""


@dataclass(frozen=True, kw_only=True)
class ClassReport:
    """One class: its number of images, top-1, and mean reduction (column ``executed``)."""

    n: int
    top1: float
    reduction: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a model does on a set of ``n`` images; shares in [0, 1].

    ``metrics`` holds the means of the caller's own; then ``top1``, ``top5`` and ``loss`` are nan and classes empty.
    ``reduction[column]`` is the mean share of dense MACs saved and ``spread`` its standard deviation over samples.
    Per site: ``keep_rate``, the share of its filters, positions or branches that ran, ``mask_accuracy`` against the
    targets, ``empty`` the number of samples for which nothing ran there.
    """

    n: int
    top1: float
    top5: float
    loss: float
    dense_macs: int
    reduction: dict[Column, float]
    spread: dict[Column, float]
    keep_rate: dict[str, float]
    mask_accuracy: dict[str, float]
    empty: dict[str, int]
    per_class: dict[int, ClassReport]
    threshold: float | None
    bits: float | None = None
    """Bits per filter: how much a filter's gate depends on the image, mean over filters. 0 for one mask for all
    images, 1 where each filter runs for half of them. None for a method that decides on pixels."""
    metrics: dict[str, float] = field(default_factory=dict)
    twin_top1: float | None = None
    """Of the static twin on the same images, if one was given."""

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values."""
        per_class = {str(label): dataclasses.asdict(part) for label, part in self.per_class.items()}
        found = {**dataclasses.asdict(self), "per_class": per_class}
        if not self.metrics:
            return {name: value for name, value in found.items() if name != "metrics"}
        return {**found, "top1": None, "top5": None, "loss": None}

    def __str__(self) -> str:
        return rendered(self.__rich__())

    def __rich__(self) -> Table:
        table = Table(title=f"n = {self.n}, dense {self.dense_macs:,} MACs", title_justify="left", show_header=False)
        if not self.metrics:
            table.add_row("top-1 / top-5", f"{percent(self.top1, 2)} / {percent(self.top5, 2)}")
        for name, value in self.metrics.items():
            table.add_row(name, f"{value:.4f}")
        for column in COLUMNS:
            saved = f"{percent(self.reduction[column])} ± {100 * self.spread[column]:.1f} saved"
            table.add_row(f"MACs, {column}", saved)
        if self.bits is not None:
            table.add_row("bits per filter", f"{self.bits:.3f}")
        if self.twin_top1 is not None:
            table.add_row("static twin, top-1", percent(self.twin_top1, 2))
        for group, rate in self.keep_rate.items():
            empty = f", no filter for {self.empty[group]} samples" if self.empty[group] else ""
            right = f", mask accuracy {percent(self.mask_accuracy[group])}" if group in self.mask_accuracy else ""
            table.add_row(group, f"{bar(rate)} {percent(rate)} kept{right}{empty}")
        return table


def bar(share: float, width: int = 20) -> str:
    """A share in [0, 1] as a bar."""
    full = round(share * width)
    return "█" * full + "░" * (width - full)


def evaluate(
    model: nn.Module,
    loader: AnyLoader,
    *,
    text: str = "evaluating",
    dense_macs: int | None = None,
    watch: Watch | None = None,
    metric: Metric | None = None,
    twin: nn.Module | None = None,
) -> Report:
    """Accuracy and cost of ``model``, gated or plain, in eval mode.

    Args:
        model: of a plain model with gated parts, the parts' MACs are counted and no others.
        loader: labelled batches (x_BCHW, label_B).
        text: what the progress bar says; empty for none.
        dense_macs: what reductions are shares of. Default: the model's own MACs with nothing switched off; for a pruned
            model those of the network it was cut from are of more interest.
        watch: sees the logits and labels of each batch; ``model.masks`` are those of the batch then.
        metric: what to measure in place of accuracy, for models that return anything but logits: see `Metric`. Targets
            may have any form then.
        twin: the model's static twin (`static_twin`), whose accuracy is put beside its own; goes without a ``metric``.
    """
    if metric is not None and twin is not None:
        raise ConfigError("evaluate takes a metric of your own or a twin, got both")
    sums, twin_right = _Sums(model, dense_macs, watch, metric), 0
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    for x_BCHW, target in feed(loader, text, labels=metric is None):
        if target is None:
            raise DataError("evaluate needs labelled images; for unlabelled ones use estimate")
        x_BCHW, target = map_tensors((x_BCHW, target), lambda tensor: tensor.to(device))
        sums.add(x_BCHW, target)
        if twin is not None:
            with torch.no_grad(), evaluating(twin):
                twin_right += int((twin(x_BCHW).argmax(1) == target).sum())
    report = sums.report()
    return report if twin is None else dataclasses.replace(report, twin_top1=twin_right / report.n)


def require_logits(output: Any, who: str, instead: str) -> Tensor:
    """What a model returned, if it is logits (B, K)."""
    if isinstance(output, Tensor) and output.ndim == 2:
        return output
    got = f"a tensor {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
    raise DataError(
        f"{who} takes a model whose output is logits (B, K), got {got}; for another task bring your own: {instead}"
    )


def check_labels(label_B: Tensor, classes: int) -> None:
    """Raise unless every label names one of the model's classes."""
    low, high = int(label_B.min()), int(label_B.max())
    if low < 0 or high >= classes:
        raise DataError(f"labels must be in 0..{classes - 1}, the model's classes, got {low}..{high}")


class _Sums:
    """Sums over batches, so that memory does not grow with the set."""

    def __init__(self, model: nn.Module, whole: int | None, watch: Watch | None, metric: Metric | None) -> None:
        self.model, self.whole, self.watch, self.metric = model, whole, watch, metric
        self.parts = {path: part for path, part in model.named_modules() if isinstance(part, GatedModel)}
        self.n = 0
        self.sums: dict[Any, float] = defaultdict(float)
        self.classes: dict[int, list[float]] = defaultdict(lambda: [0, 0, 0.0])
        self.dense: dict[tuple[int, int, int], Cost] = {}
        self.dense_macs = 0
        self.on: dict[str, Tensor] = {}

    def add(self, x_BCHW: Tensor, target: Any) -> None:
        with torch.no_grad(), evaluating(self.model):
            output = self._forward(x_BCHW)
        saved_B = self._add_cost(x_BCHW)
        if self.metric is not None:
            self._add_metrics(self.metric(output, target), len(x_BCHW))
        else:
            self._add_logits(require_logits(output, "evaluate", "metric=..."), target, saved_B)
        self.n += len(x_BCHW)

    def _add_metrics(self, metrics: Mapping[str, Tensor], batch: int) -> None:
        for name, value_B in metrics.items():
            if not isinstance(value_B, Tensor) or value_B.shape != (batch,):
                got = tuple(value_B.shape) if isinstance(value_B, Tensor) else type(value_B).__name__
                raise DataError(f"metric {name!r} must be a number for each of {batch} samples, ({batch},), got {got}")
            self.sums["metric", name] += float(value_B.double().sum())

    def _add_logits(self, logits_BK: Tensor, label_B: Tensor, saved_B: Tensor) -> None:
        check_labels(label_B, logits_BK.shape[1])
        ranked = logits_BK.topk(min(5, logits_BK.shape[1]), dim=1).indices
        hit = ranked == label_B[:, None]
        self.sums["top1"] += float(hit[:, 0].sum())
        self.sums["top5"] += float(hit.any(1).sum())
        self.sums["loss"] += float(F.cross_entropy(logits_BK.float(), label_B, reduction="sum"))
        for label, right, share in zip(label_B.tolist(), hit[:, 0].tolist(), saved_B.tolist(), strict=True):
            counts = self.classes[label]
            counts[:] = counts[0] + 1, counts[1] + right, counts[2] + share
        if self.watch is not None:
            self.watch(logits_BK, label_B)

    def _add_cost(self, x_BCHW: Tensor) -> Tensor:
        """The share of MACs that each sample saved, (B,)."""
        batch_cost = self._cost(x_BCHW)
        self.dense_macs = self.whole or batch_cost.dense_total
        saved = {column: 1 - batch_cost.total(column).double() / self.dense_macs for column in COLUMNS}
        for column, share_B in saved.items():
            saved_B = share_B.expand(len(x_BCHW))
            self.sums["reduction", column] += float(saved_B.sum())
            self.sums["square", column] += float(saved_B.square().sum())
        return saved["executed"].expand(len(x_BCHW))

    def _forward(self, x_BCHW: Tensor) -> Any:
        if not self.parts:
            self._cost(x_BCHW)  # before the forward, for its errors say more than those of a conv
        with ExitStack() as stack:
            for path, part in self.parts.items():
                stack.enter_context(part.observe(partial(self._watch, path)))
            return self.model(x_BCHW)

    def _watch(self, path: str, site: str, decision: Decision, y_BOHW: Tensor) -> None:
        mask, method, name = decision.mask, self.parts[path].gates, _inside(path, site)
        self.sums["keep", name] += float(mask.keep_rate.sum())
        self.sums["empty", name] += float(mask.empty.sum())
        if mask.kind != "pixels":
            bits = (
                mask.bits if mask.kind == "filters" else mask.bits[:, None].expand(-1, _num_filters(method.sites[site]))
            )
            self.on[name] = self.on.get(name, 0) + bits.double().sum(0).cpu()
        target = method.target(method.sites[site], y_BOHW)
        if target is not None:
            right = (mask.bits == target).double()
            self.sums["right", name] += float(right.flatten(1).mean(1).sum() if right.ndim > 1 else right.sum())

    def _cost(self, x_BCHW: Tensor) -> Cost:
        if self.parts:
            return _together({path: part.cost(input_shape=part.last_shape) for path, part in self.parts.items()})
        shape = (int(x_BCHW.shape[1]), int(x_BCHW.shape[2]), int(x_BCHW.shape[3]))
        if shape not in self.dense:
            self.dense[shape] = cost(trace(self.model, shape), {})
        return self.dense[shape]

    def report(self) -> Report:
        def per_group(what: str) -> dict[str, float]:
            return {key[1]: value / self.n for key, value in self.sums.items() if key[0] == what}

        mean = {column: self.sums["reduction", column] / self.n for column in COLUMNS}
        spread = {
            column: max(0.0, self.sums["square", column] / self.n - mean[column] ** 2) ** 0.5 for column in COLUMNS
        }
        measured = {name: self.sums[name] / self.n if self.metric is None else math.nan for name in _OF_LOGITS}
        return Report(
            n=self.n,
            **measured,
            metrics=per_group("metric"),
            dense_macs=self.dense_macs,
            reduction=mean,
            spread=spread,
            keep_rate=per_group("keep"),
            mask_accuracy=per_group("right"),
            empty={key[1]: int(value) for key, value in self.sums.items() if key[0] == "empty"},
            per_class={
                label: ClassReport(n=int(n), top1=right / n, reduction=saved / n)
                for label, (n, right, saved) in sorted(self.classes.items())
            },
            threshold=next((part.threshold for part in self.parts.values()), None),
            bits=bits_per_filter(torch.cat(list(self.on.values())) / self.n) if self.on else None,
        )


def bits_per_filter(rate_F: Tensor) -> float:
    """Mutual information of image and gate, mean over filters, from the share of images each filter runs for.

    Gates decide without chance, so it is the entropy of that share, in [0, 1] bits.
    """
    rate_F = rate_F.double()
    entropy_F = -(torch.xlogy(rate_F, rate_F) + torch.xlogy(1 - rate_F, 1 - rate_F)) / math.log(2)
    return float(entropy_F.mean())


def _num_filters(site: Site) -> int:
    """Filters that run or rest with a branch."""
    return sum(unit.out_channels for unit in site.units)


def _inside(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _together(costs: Mapping[str, Cost]) -> Cost:
    """The gated parts of a model as one."""

    def joined(field: str) -> dict[str, Any]:
        return {
            _inside(path, name): macs for path, part in costs.items() for name, macs in getattr(part, field).items()
        }

    return Cost(dense=joined("dense"), paper=joined("paper"), executed=joined("executed"), heads=joined("heads"))
