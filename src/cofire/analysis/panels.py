"""Panels: a figure, how to read it, and its values per row; one function per analysis.

Shapes: N images, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cofire.analysis import figures
from cofire.analysis.compressibility import Compressibility
from cofire.analysis.decisions import Decisions
from cofire.analysis.responses import Heatmaps, Responses
from cofire.analysis.routes import agreement, redundancy, routes
from cofire.analysis.spending import ClassSpending, shares
from cofire.analysis.tradeoff import Point, Result, foretold, points
from cofire.graph.cost import Column
from cofire.text import percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Picture = tuple[NDArray[np.uint8], str]
"""Pixels (H, W, C), and a line of text."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Panel:
    """A figure with its values.

    Args:
        name: of its files.
        title: what it shows.
        text: how to read it, and what the reader should know.
        figure: the drawing; with a note in place of values where there is nothing to show.
        columns: of the table of values.
        rows: of the table; shares are in [0, 1].
    """

    name: str
    title: str
    text: str
    figure: Figure
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[Any, ...], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Title, text and values as JSON values; null where a value does not exist."""
        rows = [{key: _plain(cell) for key, cell in zip(self.columns, row, strict=True)} for row in self.rows]
        return {"title": self.title, "text": self.text, "values": rows}


def empty_panel(name: str, title: str, why: str) -> Panel:
    """A panel that has nothing to show and says why."""
    return Panel(name=name, title=title, text=why, figure=figures.empty(why))


def group_panels(decisions: Decisions) -> list[Panel]:
    """What the gates do: clusters, pruning ratios, core filters, agreement with targets, redundancy."""
    found = routes(decisions)
    n = len(decisions)
    return [
        Panel(
            name="clusters",
            title="Unique masks per group",
            text=f"How many different sets of filters {n} images take. One: the group is pruned statically. "
            "As many as images: every image has a set of its own.",
            figure=figures.clusters(found, n),
            columns=("group", "filters", "unique masks"),
            rows=tuple((group, part.filters, part.clusters) for group, part in found.items()),
        ),
        Panel(
            name="pruning_ratios",
            title="Pruning ratio per group",
            text="Share of filters that are off, mean over images.",
            figure=figures.pruning_ratios(found),
            columns=("group", "filters", "share off"),
            rows=tuple((group, part.filters, part.pruned) for group, part in found.items()),
        ),
        Panel(
            name="core_filters",
            title="Core filters and silent filters",
            text="Core filters run for every image and need no decision; silent filters run for none and could leave.",
            figure=figures.core_filters(found),
            columns=("group", "filters", "core", "core share", "silent"),
            rows=tuple((group, part.filters, part.core, part.core_share, part.silent) for group, part in found.items()),
        ),
        _agreement_panel(decisions),
        _redundancy_panel(decisions),
    ]


def _agreement_panel(decisions: Decisions) -> Panel:
    name, title = "agreement", "Masks against targets"
    if not decisions.target_bits:
        return empty_panel(name, title, "This method has no targets to compare its masks with.")
    found = agreement(decisions)
    return Panel(
        name=name,
        title=title,
        text="Precision: share of the filters that ran which the target asks for. Recall: share of the filters asked "
        "for which ran.",
        figure=figures.agreement(found),
        columns=("group", "precision", "recall", "accuracy"),
        rows=tuple((group, part.precision, part.recall, part.accuracy) for group, part in found.items()),
    )


def _redundancy_panel(decisions: Decisions) -> Panel:
    found_GG = redundancy(decisions)
    others_GG = np.where(np.eye(len(found_GG), dtype=bool), -1.0, np.nan_to_num(found_GG, nan=-1.0))
    nearest_G = others_GG.argmax(1)
    rows = [
        (
            group,
            decisions.groups[nearest] if others_GG[row, nearest] >= 0 else "none",
            max(0.0, others_GG[row, nearest]),
        )
        for row, (group, nearest) in enumerate(zip(decisions.groups, nearest_G, strict=True))
    ]
    return Panel(
        name="redundancy",
        title="Redundancy between groups",
        text="1: two groups tell images apart in the same way; 0: neither tells anything about the other. "
        "Grey: the group treats all images alike.",
        figure=figures.redundancy(decisions.groups, found_GG),
        columns=("group", "most like", "RV coefficient"),
        rows=tuple(rows),
    )


def cost_panel(decisions: Decisions) -> Panel:
    """How MACs are spread over images."""
    share_N = shares(decisions)
    quantiles = {name: float(np.quantile(share_N, q)) for name, q in _QUANTILES.items()}
    return Panel(
        name="cost",
        title="MACs per image",
        text="Share of the dense MACs that each image takes (column executed); dotted: the mean.",
        figure=figures.cost_histogram(share_N),
        columns=("images", "share of dense MACs"),
        rows=(*quantiles.items(), ("mean", float(share_N.mean()))),
    )


_QUANTILES = {"cheapest": 0.0, "10 % are below": 0.1, "median": 0.5, "90 % are below": 0.9, "dearest": 1.0}


def class_panels(found: Mapping[int, ClassSpending], names: Sequence[str], *, gated: bool) -> list[Panel]:
    """MACs and accuracy per class; only accuracy for a model without gates."""
    rows = tuple((names[label], part.n, part.top1) for label, part in found.items())
    accuracy = Panel(
        name="class_accuracy",
        title="Accuracy per class",
        text="Top-1 of each class on these images.",
        figure=figures.class_accuracy(found, names),
        columns=("class", "images", "top-1"),
        rows=rows,
    )
    if not gated:
        return [accuracy]
    spending = Panel(
        name="class_cost",
        title="MACs per class",
        text="Mean share of the dense MACs; the line is one standard deviation to each side.",
        figure=figures.class_spending(found, names),
        columns=("class", "images", "share of dense MACs", "standard deviation"),
        rows=tuple((names[label], part.n, part.share, part.spread) for label, part in found.items()),
    )
    return [spending, accuracy]


def extremes_panel(pictures: Mapping[str, Sequence[Picture]]) -> Panel:
    """The cheapest and the dearest images."""
    return Panel(
        name="extremes",
        title="The cheapest and the dearest images",
        text="Beneath each image: its share of the dense MACs.",
        figure=figures.extremes(pictures),
        columns=("row", "place", "share of dense MACs"),
        rows=tuple((row, i + 1, text) for row, found in pictures.items() for i, (_, text) in enumerate(found)),
    )


def response_panel(found: Responses, names: Sequence[str]) -> Panel:
    """The maximum responses of a unit."""
    mean_O, fires_O = found.peak_NO.mean(0), (found.peak_NO > 0).mean(0)
    return Panel(
        name=f"responses_{found.unit}",
        title=f"Maximum responses of {found.unit}",
        text=f"{len(found.peak_NO)} images from top to bottom, filters from left to right. Images of one class tend to "
        "wake the same filters.",
        figure=figures.responses(found, names),
        columns=("filter", "mean maximum", "share of images above 0"),
        rows=tuple((i, float(mean), float(fires)) for i, (mean, fires) in enumerate(zip(mean_O, fires_O, strict=True))),
    )


def heatmap_panel(found: Heatmaps, pixels_NHWC: NDArray[np.uint8]) -> Panel:
    """Triplets image, dense, gated of a unit."""
    dense_N, gated_N = (maps_NHW.sum((1, 2), dtype=np.float64) for maps_NHW in (found.dense_NHW, found.gated_NHW))
    kept_N = gated_N / np.where(dense_N > 0, dense_N, 1.0)
    return Panel(
        name=f"heatmaps_{found.unit}",
        title=f"Heatmaps of {found.unit}",
        text="Sum of absolute responses over filters: the same weights with all filters on (dense) and with gates at "
        "work, in one colour scale per image.",
        figure=figures.heatmaps(found, pixels_NHWC),
        columns=("image", "gated to dense"),
        rows=tuple((i, float(kept)) for i, kept in enumerate(kept_N)),
    )


def compressibility_panel(found: Compressibility, weights: str) -> Panel:
    """Core share against the static ratio a group tolerates.

    Args:
        weights: whose were pruned, in words.
    """
    return Panel(
        name="compressibility",
        title="Does the core share foretell what can leave for good?",
        text=f"Each group of {weights} loses its smallest filters (L1), alone and without training, until top-1 falls "
        f"by more than {100 * found.drop:g} points from {percent(found.top1)}. Spearman's correlation, p by shuffling.",
        figure=figures.compressibility(found),
        columns=("group", "core share", "can leave"),
        rows=tuple((group, core, found.tolerated[group]) for group, core in found.core_share.items()),
    )


def trade_off_panel(results: Mapping[str, Result], paper: Sequence[Point] = (), column: Column = "executed") -> Panel:
    """Accuracy against MACs saved, of all results that have a dense one beside them."""
    name, title = "trade_off", "Accuracy against MACs saved"
    found, left_out = points(results, column)
    why = f"No dense run to compare with for {', '.join(left_out)}: name it too." if left_out else ""
    if not found and not paper:
        return empty_panel(name, title, why or "No gated or pruned run here.")
    return Panel(
        name=name,
        title=title,
        text="Top-1 against the dense run of the same network. " + why,
        figure=figures.trade_off(found, paper, column=column),
        columns=("run", "kind", "share of MACs saved", "top-1 lost"),
        rows=tuple((point.label, point.kind, point.reduction, point.drop) for point in (*found, *paper)),
    )


def foretold_panel(results: Mapping[str, Result]) -> Panel:
    """Cost estimated before training against cost reached."""
    name, title = "foretold", "MACs saved: estimated and reached"
    found = foretold(results)
    if not found:
        return empty_panel(
            name,
            title,
            "No estimate in result.json: its method's cost is not known before training, or it is older.",
        )
    return Panel(
        name=name,
        title=title,
        text="Estimated before training: one pass reads all targets off the dense model; with masks on, each group "
        "sees what the masks before it let through.",
        figure=figures.foretold(found),
        columns=("run", "estimated, one pass", "estimated, masks applied", "reached"),
        rows=tuple((row.label, row.independent, row.cascade, row.reached) for row in found),
    )


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value
