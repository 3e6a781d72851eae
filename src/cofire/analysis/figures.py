"""One function per figure; each takes what an analysis gave and returns a matplotlib Figure.

Shapes: N images, O filters, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cofire.analysis.compressibility import Compressibility
from cofire.analysis.drawing import (
    BLUE,
    COLOUR_MAP,
    COLOURS,
    GREEN,
    GREY,
    INK,
    MARKERS,
    ORANGE,
    RED,
    WIDTH,
    new_figure,
    styled,
    tip,
)
from cofire.analysis.responses import Heatmaps, Responses
from cofire.analysis.routes import Agreement, GroupRoutes
from cofire.analysis.spending import ClassSpending
from cofire.analysis.tradeoff import Foretold, Point
from cofire.text import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROW, _MOST_NAMES = 0.17, 48  # inches of a row; names that fit beside a figure of full height
_SQUARE = 15  # names that fit beside a square one
_MANY_POINTS = 12  # more of them are not named in the figure


@styled
def clusters(routes: Mapping[str, GroupRoutes], num_images: int) -> Figure:
    """Different masks per group, in log scale (figure 4a of the paper)."""
    figure, axes = _rows(list(routes))
    lowest = 0.7  # a single cluster still has a bar
    for row, (group, found) in enumerate(routes.items()):
        axes.barh(row, found.clusters - lowest, left=lowest, color=BLUE)
        _row_tip(axes, row, f"{group}: {found.clusters} clusters in {num_images} images")
    axes.set_xscale("log")
    axes.axvline(num_images, color=INK, linestyle=":", linewidth=1)
    axes.set_xlim(lowest, num_images * 1.6)
    axes.set_xlabel("unique masks (dotted: one per image)")
    return figure


@styled
def pruning_ratios(routes: Mapping[str, GroupRoutes]) -> Figure:
    """Mean share of filters that are off, per group (figure 4b of the paper)."""
    figure, axes = _rows(list(routes))
    for row, (group, found) in enumerate(routes.items()):
        axes.barh(row, 100 * found.pruned, color=BLUE)
        _row_tip(axes, row, f"{group}: {percent(found.pruned)} of {found.filters} filters off")
    axes.set_xlim(0, 100)
    axes.set_xlabel("filters off, mean over images, %")
    return figure


@styled
def core_filters(routes: Mapping[str, GroupRoutes]) -> Figure:
    """Filters that run for every image, for some, and for none, per group (appendix of the paper)."""
    figure, axes = _rows(list(routes), extra=0.4)
    for row, (group, found) in enumerate(routes.items()):
        parts = {
            "every image": (found.core, BLUE),
            "some images": (found.filters - found.core - found.silent, ORANGE),
            "no image": (found.silent, GREY),
        }
        left = 0.0
        for name, (count, colour) in parts.items():
            share = 100 * count / found.filters
            (bar,) = axes.barh(row, share, left=left, color=colour, label=name if row == 0 else None)
            tip(bar, f"{group}: {count} of {found.filters} filters run for {name}")
            left += share
    axes.set_xlim(0, 100)
    axes.set_xlabel("filters, %")
    _legend(axes, "run for")
    return figure


@styled
def agreement(found: Mapping[str, Agreement]) -> Figure:
    """Masks against targets per group: precision, recall, accuracy."""
    figure, axes = _rows(list(found), extra=0.2)
    axes.grid(axis="y")
    for number, name in enumerate(("precision", "recall", "accuracy")):
        for row, (group, values) in enumerate(found.items()):
            share = float(getattr(values, name))
            label = name if row == 0 else None
            (dot,) = axes.plot(
                100 * share, row, MARKERS[number], color=COLOURS[number], markersize=5, label=label, clip_on=False
            )
            tip(dot, f"{group}: {name} {percent(share)}")
    axes.set_xlim(0, 100)
    axes.set_xlabel("masks against targets, %")
    _legend(axes)
    return figure


@styled
def redundancy(groups: Sequence[str], found_GG: NDArray[np.float64]) -> Figure:
    """How far groups repeat each other's routing, 0 to 1; grey where a group treats all images alike."""
    figure, axes = _rows(groups, extra=0.2, most=_SQUARE)
    shown = axes.imshow(np.ma.masked_invalid(found_GG), vmin=0, vmax=1, cmap=_colour_map(), aspect="auto")
    for row, group in enumerate(groups):
        others = [(value, groups[i]) for i, value in enumerate(found_GG[row]) if i != row and np.isfinite(value)]
        most = f"most like {max(others)[1]} ({max(others)[0]:.2f})" if others else "treats all images alike"
        _row_tip(axes, row, f"{group}: {most}")
    axes.set_xticks([])
    axes.set_xlabel("groups in the same order")
    axes.spines[:].set_visible(False)
    _colour_bar(figure, shown, axes, "RV coefficient of masks")
    return figure


@styled
def cost_histogram(share_N: NDArray[np.float64]) -> Figure:
    """Distribution of MACs over images, as shares of the dense ones."""
    figure = new_figure(2.6)
    axes = figure.add_subplot()
    count, edge = np.histogram(100 * share_N, bins=min(30, max(5, len(share_N) // 8)))
    for number, low, high in zip(count, edge[:-1], edge[1:], strict=True):
        bar = axes.bar(low, number, width=high - low, align="edge", color=BLUE, edgecolor="none")[0]
        tip(bar, f"{number} images at {low:.1f} to {high:.1f} % of the dense MACs")
    mean = 100 * float(share_N.mean())
    axes.axvline(mean, color=INK, linestyle=":", linewidth=1)
    axes.set_xlabel(f"MACs of an image, % of dense (mean {mean:.1f})")
    axes.set_ylabel("images")
    return figure


@styled
def class_spending(found: Mapping[int, ClassSpending], names: Sequence[str]) -> Figure:
    """Mean MACs of each class, with the standard deviation over its images."""
    figure, axes = _rows([names[label] for label in found])
    for row, (label, part) in enumerate(found.items()):
        axes.barh(row, 100 * part.share, color=BLUE)
        axes.plot([100 * (part.share - part.spread), 100 * (part.share + part.spread)], [row, row], color=INK, lw=1)
        spent = f"{percent(part.share)} ± {100 * part.spread:.1f} of the dense MACs"
        _row_tip(axes, row, f"{names[label]}: {spent}, {part.n} images")
    axes.set_xlim(0, 100)
    axes.set_xlabel("MACs, % of dense (line: standard deviation)")
    return figure


@styled
def class_accuracy(found: Mapping[int, ClassSpending], names: Sequence[str]) -> Figure:
    """Top-1 accuracy of each class."""
    figure, axes = _rows([names[label] for label in found])
    for row, (label, part) in enumerate(found.items()):
        axes.barh(row, 100 * part.top1, color=GREEN)
        _row_tip(axes, row, f"{names[label]}: top-1 {percent(part.top1)} of {part.n} images")
    axes.set_xlim(0, 100)
    axes.set_xlabel("top-1, %")
    return figure


@styled
def extremes(rows: Mapping[str, Sequence[tuple[NDArray[np.uint8], str]]]) -> Figure:
    """Pictures in rows, each with a line of text: the cheapest images and the dearest.

    Args:
        rows: name of a row -> (pixels HWC, text) of its pictures.
    """
    most = max(len(pictures) for pictures in rows.values())
    figure = new_figure(len(rows) * (WIDTH / most + 0.45))
    grid = figure.subplots(len(rows), most, squeeze=False, gridspec_kw={"wspace": 0, "hspace": 0.3})
    for line, (name, pictures) in zip(grid, rows.items(), strict=True):
        for axes in line:
            axes.set_axis_off()
        for axes, (pixels_HWC, text) in zip(line, pictures, strict=False):
            _picture(axes, pixels_HWC)
            line_of_text = axes.text(0.5, -0.06, text, transform=axes.transAxes, fontsize=8, ha="center", va="top")
            line_of_text.set_in_layout(False)  # else a long one would make its picture small
        line[0].set_title(name, fontsize=9, loc="left")
    return figure


@styled
def responses(found: Responses, names: Sequence[str]) -> Figure:
    """Maximum response of each filter (columns) to each image (rows, sorted by class); figure 2 of the paper."""
    figure = new_figure(3.4)
    axes = figure.add_subplot()
    highest = float(np.quantile(found.peak_NO, 0.995)) or 1.0  # a few outliers would leave the rest dark
    shown = axes.imshow(found.peak_NO, aspect="auto", interpolation="none", cmap=_colour_map(), vmin=0, vmax=highest)
    axes.set_xlabel(f"filters of {found.unit}")
    if found.label_N is None:
        axes.set_ylabel("images")
    else:
        label, first, count = np.unique(found.label_N, return_index=True, return_counts=True)
        for start in first[1:]:
            axes.axhline(start - 0.5, color="white", linewidth=0.7)
        step = -(-len(label) // 20)
        axes.set_yticks((first + count / 2 - 0.5)[::step], [names[i] for i in label[::step]])
        axes.tick_params(axis="y", length=0)
        axes.set_ylabel("images, by class")
    _colour_bar(figure, shown, axes, "maximum response")
    return figure


@styled
def heatmaps(found: Heatmaps, pixels_NHWC: NDArray[np.uint8]) -> Figure:
    """Triplets: image, dense, gated; the two maps of an image share one colour scale (appendix of the paper)."""
    n, columns = len(pixels_NHWC), 2
    lines = -(-n // columns)
    figure = new_figure(0.25 + lines * WIDTH / (3.3 * columns))
    grid = figure.subplots(lines, 3 * columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for place, name in enumerate(("image", "dense", "gated") * min(columns, n)):
        grid[0, place].set_title(name, fontsize=8)
    for i in range(n):
        line, place = divmod(i, columns)
        triplet = grid[line, 3 * place : 3 * place + 3]
        _picture(triplet[0], pixels_NHWC[i])
        highest = float(max(found.dense_NHW[i].max(), found.gated_NHW[i].max())) or 1.0
        for axes, map_HW in zip(triplet[1:], (found.dense_NHW[i], found.gated_NHW[i]), strict=True):
            axes.imshow(map_HW, vmin=0, vmax=highest, cmap=_colour_map(), interpolation="nearest")
    return figure


@styled
def trade_off(points: Sequence[Point], paper: Sequence[Point] = (), *, column: str = "executed") -> Figure:
    """Accuracy given for MACs saved (figure 1 of the paper); its points lie beneath, hollow and grey.

    Args:
        column: in which the points' MACs are counted.
    """
    figure = new_figure(3.4)
    axes = figure.add_subplot()
    axes.grid()
    axes.axhline(0, color=INK, linewidth=0.8)
    widest = min(100.0, 150 * max(point.reduction for point in (*points, *paper)))
    for layer, hollow in ((paper, True), (points, False)):
        kinds = list(dict.fromkeys(point.kind for point in layer))
        for point in layer:
            number = kinds.index(point.kind) % len(MARKERS)
            colour = GREY if hollow else COLOURS[number]
            known = {label for _, label in _labelled(axes)}
            (dot,) = axes.plot(
                100 * point.reduction,
                -100 * point.drop,
                MARKERS[number],
                color=colour,
                markerfacecolor="none" if hollow else colour,
                label=point.kind if point.kind not in known else None,
            )
            tip(dot, f"{point.label}: {percent(point.reduction)} of MACs saved, top-1 {-100 * point.drop:+.2f} points")
            if len(points) + len(paper) <= _MANY_POINTS:
                place = (100 * point.reduction, -100 * point.drop)
                side = "right" if place[0] > 0.75 * widest else "left"
                offset = (-5 if side == "right" else 5, 4)
                axes.annotate(point.label, place, offset, textcoords="offset points", fontsize=8, ha=side)
    axes.margins(y=0.15)
    axes.set_xlim(0, widest)
    axes.set_xlabel(f"MACs saved, % (column {column})")
    axes.set_ylabel("top-1 against dense, points")
    _legend(axes)
    return figure


@styled
def foretold(rows: Sequence[Foretold]) -> Figure:
    """MACs saved: as estimated before training, masks not applied and applied, and as reached."""
    figure, axes = _rows([row.label for row in rows], extra=0.4)
    axes.grid(axis="y")
    names = {"independent": "est., one pass", "cascade": "est., masks on", "reached": "reached"}
    for number, (field, name) in enumerate(names.items()):
        for place, row in enumerate(rows):
            share = float(getattr(row, field))
            label = name if place == 0 else None
            (dot,) = axes.plot(100 * share, place, MARKERS[number], color=COLOURS[number], label=label)
            tip(dot, f"{row.label}: {name} {percent(share)}")
    axes.set_xlim(0, 100)
    axes.set_xlabel("MACs saved, % (column executed)")
    _legend(axes)
    return figure


@styled
def compressibility(found: Compressibility) -> Figure:
    """The static ratio that each group tolerates by itself, against its core share."""
    figure = new_figure(3.0)
    axes = figure.add_subplot()
    axes.grid()
    for group, core in found.core_share.items():
        ratio = found.tolerated[group]
        (dot,) = axes.plot(100 * core, 100 * ratio, "o", color=RED, alpha=0.7, clip_on=False)
        tip(dot, f"{group}: {percent(core, 0)} core filters, {percent(ratio, 0)} can leave")
    axes.set_xlim(-2, 102)
    axes.set_ylim(-2, 102)
    axes.set_xlabel("core filters, % of the group")
    axes.set_ylabel("filters that can leave, %")
    rank = "undefined" if np.isnan(found.correlation) else f"{found.correlation:.2f}, p = {found.p_value:.2f}"
    axes.set_title(f"rank correlation {rank}; {len(found.tolerated)} groups", fontsize=9)
    return figure


@styled
def empty(why: str) -> Figure:
    """A figure that has nothing to show and says why."""
    figure = new_figure(1.0)
    figure.text(0.5, 0.5, why, ha="center", va="center", wrap=True)
    return figure


def _rows(names: Sequence[str], extra: float = 0.0, most: int = _MOST_NAMES) -> tuple[Figure, Axes]:
    """A figure with a row per name from top to bottom; where there are too many, only some are named."""
    figure = new_figure(0.75 + extra + _ROW * min(len(names), most))
    axes = figure.add_subplot()
    step = -(-len(names) // most)
    axes.set_yticks(range(0, len(names), step), list(names)[::step])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    return figure, axes


def _row_tip(axes: Axes, row: int, text: str) -> None:
    """The whole row says ``text``, so that a bar of no length can be pointed at too."""
    # Nearly transparent: what is not painted at all cannot be hovered over.
    tip(axes.axhspan(row - 0.5, row + 0.5, facecolor=INK, edgecolor="none", alpha=0.004, zorder=3), text)


def _legend(axes: Axes, title: str | None = None) -> None:
    """Above the axes, in one line."""
    if handles := [handle for handle, _ in _labelled(axes)]:
        axes.figure.legend(
            handles=handles, title=title, loc="outside upper center", ncols=3, handletextpad=0.3, columnspacing=1.0
        )


def _labelled(axes: Axes) -> list[tuple[Any, str]]:
    return list(zip(*axes.get_legend_handles_labels(), strict=True))


def _colour_bar(figure: Figure, shown: Any, axes: Axes, label: str) -> None:
    bar = figure.colorbar(shown, ax=axes, label=label, pad=0.02)
    bar.outline.set_visible(False)


def _colour_map() -> Any:
    import matplotlib

    return matplotlib.colormaps[COLOUR_MAP].with_extremes(bad=GREY)


def _picture(axes: Axes, pixels_HWC: NDArray[np.uint8]) -> None:
    grey = pixels_HWC.shape[2] == 1
    axes.imshow(pixels_HWC[:, :, 0] if grey else pixels_HWC, cmap="gray" if grey else None, vmin=0, vmax=255)
