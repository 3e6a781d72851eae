"""What models did under shift: a point for each model, corruption and severity; as JSON and as tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from rich.console import Group

from cofire.evaluation import Report
from cofire.files.strict import structure
from cofire.graph.cost import COLUMNS
from cofire.shift.drift import Drift
from cofire.shift.paper import PUBLISHED, paper_shift
from cofire.text import Grid, rendered


@dataclass(frozen=True, kw_only=True)
class AtSeverity:
    """One model on all images at one severity.

    Args:
        severity: in the corruption's unit; 0 is clean.
        brier: mean Brier score, in [0, 2].
        ece: expected calibration error, in [0, 1].
        report: accuracy, the three cost columns and keep rates, as `evaluate` gives them; per class too.
        drift: of the masks from the clean ones; None for a model without gates.
    """

    severity: float
    brier: float
    ece: float
    report: Report
    drift: Drift | None

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values, those of the report among them."""
        drift = None if self.drift is None else dataclasses.asdict(self.drift)
        own = {"severity": self.severity, "brier": self.brier, "ece": self.ece, "drift": drift}
        return own | self.report.to_json()

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> AtSeverity:
        """What `to_json` wrote."""
        own = {field.name for field in dataclasses.fields(cls)}
        mine = {name: value for name, value in table.items() if name in own}
        report = {name: value for name, value in table.items() if name not in own}
        return structure(cls, {**mine, "report": report}, "a point")


@dataclass(frozen=True, kw_only=True)
class Shift:
    """Models under shift; made by `shift`, prints as tables.

    Args:
        data: name of the set.
        n: number of images.
        classes: names of the classes.
        seed: of what is random.
        bins: of the calibration error.
        units: corruption -> what its severities count.
        softmax: model -> whether its heads have a softmax; no model without such heads.
        clean: model -> its point without any corruption.
        points: corruption -> model -> its points, one per severity in the order asked for.
    """

    data: str
    n: int
    classes: tuple[str, ...]
    seed: int
    bins: int
    units: dict[str, str]
    softmax: dict[str, bool]
    clean: dict[str, AtSeverity]
    points: dict[str, dict[str, tuple[AtSeverity, ...]]]

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models in the order given."""
        return tuple(self.clean)

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values, the paper's Brier scores among them where the set is the paper's."""
        return {
            "data": self.data,
            "n": self.n,
            "seed": self.seed,
            "bins": self.bins,
            "classes": list(self.classes),
            "softmax": self.softmax,
            "clean": {model: point.to_json() for model, point in self.clean.items()},
            "corruptions": {
                name: {
                    "unit": self.units[name],
                    "models": {model: [point.to_json() for point in points] for model, points in by_model.items()},
                    "paper": [dataclasses.asdict(row) for row in paper_shift().rows(self.data, name).values()],
                }
                for name, by_model in self.points.items()
            },
        }

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> Shift:
        """What `to_json` wrote; other keys do not matter."""
        corruptions = table["corruptions"]
        return cls(
            data=table["data"],
            n=table["n"],
            classes=tuple(table["classes"]),
            seed=table["seed"],
            bins=table["bins"],
            units={name: part["unit"] for name, part in corruptions.items()},
            softmax=table["softmax"],
            clean={model: AtSeverity.from_json(point) for model, point in table["clean"].items()},
            points={
                name: {model: tuple(map(AtSeverity.from_json, points)) for model, points in part["models"].items()}
                for name, part in corruptions.items()
            },
        )

    def __str__(self) -> str:
        return rendered(self.__rich__())

    def __rich__(self) -> Group:
        by_corruption = [grid for name in self.points for grid in (self._brier(name), self._measures(name))]
        return Group(self._clean(), *by_corruption, *self._softmax())

    def to_markdown(self) -> str:
        """All models on clean images, and the paper's tables: Brier scores by corruption, with and without softmax."""
        grids = [self._clean(), *map(self._brier, self.points), *self._softmax()]
        return "\n\n".join(grid.to_markdown() for grid in grids)

    def _clean(self) -> Grid:
        rows = []
        for model, point in self.clean.items():
            report = point.report
            costs = (_percent(report.reduction[column]) for column in COLUMNS)
            rows.append([model, f"{point.brier:.3f}", _percent(report.top1, 2), f"{point.ece:.3f}", *costs])
        return Grid(
            title=f"clean: {self.n} images of {self.data}; MACs saved in three columns",
            names=["model"],
            numbers=["Brier", "top-1 %", "ECE", *(f"saved %, {column}" for column in COLUMNS)],
            rows=rows,
        )

    def _brier(self, name: str) -> Grid:
        """The paper's form: a row for each severity, a column for each model; the paper's own beside."""
        known = paper_shift().rows(self.data, name)
        published = PUBLISHED if known else ()
        rows = []
        for points in zip(*self.points[name].values(), strict=True):
            severity = points[0].severity
            row = known.get(severity)
            theirs = row.published if row else (None,) * len(published)
            rows.append([f"{severity:g}", *(f"{point.brier:.3f}" for point in points), *map(_published, theirs)])
        note = f"; the paper's are of {paper_shift().network}" if known else ""
        return Grid(
            title=f"{name}: Brier score, 0 to 2, by severity: {self.units[name]}{note}",
            names=["severity"],
            numbers=[*self.models, *(f"paper: {what}" for what in published)],
            rows=rows,
        )

    def _measures(self, name: str) -> Grid:
        rows: list[list[str]] = []
        for model, points in self.points[name].items():
            for point in points:
                total = point.drift.total if point.drift else None
                moved = map(_percent, (total.keep_rate, total.flipped, total.routes)) if total else [""] * 3
                rows.append(
                    [
                        model if point is points[0] else "",
                        f"{point.severity:g}",
                        _percent(point.report.top1, 2),
                        f"{point.ece:.3f}",
                        _percent(point.report.reduction["executed"]),
                        *moved,
                    ]
                )
            rows.append([])
        return Grid(
            title=f"{name}: accuracy, calibration error, MACs saved (executed), and how far from clean the masks are",
            names=["model"],
            numbers=["severity", "top-1 %", "ECE", "saved %", "keep rate %", "flipped %", "routes %"],
            rows=rows,
        )

    def _softmax(self) -> list[Grid]:
        """The paper's third: heads with and without softmax, the corruptions side by side; none without such a pair."""
        having, lacking = ([model for model in self.models if self.softmax.get(model) is has] for has in (True, False))
        if not (having and lacking):
            return []
        pair = (having[0], lacking[0])
        heads: list[str] = []
        columns: list[list[str]] = []
        for name, by_model in self.points.items():
            severities = [point.severity for point in by_model[pair[0]]]
            heads += [name, "with", "without"]
            columns.append([f"{severity:g}" for severity in severities])
            columns += [[f"{point.brier:.3f}" for point in by_model[model]] for model in pair]
            if rows := paper_shift().rows(self.data, name):
                heads += ["paper: with", "paper: without"]
                found = [rows.get(severity) for severity in severities]
                columns.append([_published(row.ftwt if row else None) for row in found])
                columns.append([_published(row.without_softmax if row else None) for row in found])
        title = f"Brier score with softmax in the heads ({pair[0]}) and without ({pair[1]})"
        return [Grid(title=title, names=[], numbers=heads, rows=list(zip_longest(*columns, fillvalue="")))]

    def per_class(self, name: str) -> Grid:
        """Each class, clean and at the highest severity of a corruption: its top-1 beside its compute."""
        worst = 0.0
        rows: list[list[str]] = []
        for model, points in self.points[name].items():
            shifted = max(points, key=lambda point: point.severity)
            worst = shifted.severity
            for number, (label, after) in enumerate(shifted.report.per_class.items()):
                before = self.clean[model].report.per_class[label]
                rows.append(
                    [
                        "" if number else model,
                        self.classes[label],
                        str(after.n),
                        _percent(after.top1),
                        _percent(before.top1 - after.top1),
                        _percent(after.reduction),
                        f"{100 * (after.reduction - before.reduction):+.1f}",
                    ]
                )
            rows.append([])
        return Grid(
            title=f"{name} {worst:g}: top-1 and MACs saved (executed) of each class, and the points since clean",
            names=["model", "class"],
            numbers=["n", "top-1 %", "lost", "saved %", "change"],
            rows=rows,
        )


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f}"


def _published(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
