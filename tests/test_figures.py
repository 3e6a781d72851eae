"""Figures of decisions made by hand: what is drawn, and what a reader can point at, is the known answer."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from known import TARGETS, decisions

pytest.importorskip("matplotlib", reason="matplotlib is needed (extra report)")

from matplotlib.figure import Figure

from cofire import analysis
from cofire.analysis import figures, panels
from cofire.analysis.drawing import INK, to_inline_svg, to_png, to_svg
from cofire.analysis.responses import Heatmaps, Responses

SVG = "{http://www.w3.org/2000/svg}"
NAMES = ("cat", "dog", "emu")


def tips(figure: Figure) -> list[str]:
    """What the parts of a figure say on hover."""
    root = ElementTree.fromstring(to_svg(figure, "x"))
    return [title.text or "" for title in root.iter(f"{SVG}title")]


def lengths(figure: Figure) -> list[float]:
    """Lengths of horizontal bars."""
    return [bar.get_width() for bars in figure.axes[0].containers for bar in bars]


def test_two_clusters_and_one() -> None:
    figure = figures.clusters(analysis.routes(decisions()), 3)
    assert tips(figure) == ["a: 2 clusters in 3 images", "b: 1 clusters in 3 images"]
    assert figure.axes[0].get_xscale() == "log"
    assert [bar.get_x() + bar.get_width() for bars in figure.axes[0].containers for bar in bars] == [2, 1]


def test_half_of_the_filters_are_off() -> None:
    figure = figures.pruning_ratios(analysis.routes(decisions()))
    assert tips(figure) == ["a: 50.0 % of 4 filters off", "b: 50.0 % of 2 filters off"]
    assert lengths(figure) == [50, 50]


def test_one_core_filter_two_that_depend_and_a_silent_one() -> None:
    figure = figures.core_filters(analysis.routes(decisions()))
    assert lengths(figure) == [25, 50, 25, 50, 0, 50]
    assert tips(figure)[:3] == [
        "a: 1 of 4 filters run for every image",
        "a: 2 of 4 filters run for some images",
        "a: 1 of 4 filters run for no image",
    ]


def test_agreement_has_three_marks_per_group() -> None:
    figure = figures.agreement(analysis.agreement(decisions(targets=TARGETS)))
    assert tips(figure) == [
        "a: precision 83.3 %",
        "b: precision 100.0 %",
        "a: recall 83.3 %",
        "b: recall 100.0 %",
        "a: accuracy 83.3 %",
        "b: accuracy 100.0 %",
    ]


def test_redundancy_names_the_group_that_repeats_most_and_leaves_static_ones_grey() -> None:
    masks = {"a": ("10", "10", "01"), "c": ("100", "100", "011"), "b": ("10", "10", "10")}
    some = decisions(masks=masks)
    figure = figures.redundancy(some.groups, analysis.redundancy(some))
    assert tips(figure) == ["a: most like c (1.00)", "c: most like a (1.00)", "b: treats all images alike"]
    shown = figure.axes[0].images[0].get_array()
    assert np.ma.getmaskarray(shown).tolist() == [[False, False, True], [False, False, True], [True, True, True]]


def test_the_histogram_counts_every_image_once() -> None:
    figure = figures.cost_histogram(analysis.shares(decisions()))
    assert sum(patch.get_height() for patch in figure.axes[0].patches) == 3
    assert tips(figure)[0] == "1 images at 25.0 to 35.0 % of the dense MACs"
    assert "mean 50.0" in figure.axes[0].get_xlabel()


def test_images_of_equal_cost_still_make_a_histogram() -> None:
    figure = figures.cost_histogram(analysis.shares(decisions(macs=(20, 20, 20))))
    assert sum(patch.get_height() for patch in figure.axes[0].patches) == 3


def test_classes_show_their_macs_and_their_accuracy() -> None:
    found = analysis.spending_per_class(decisions())
    spending, accuracy = figures.class_spending(found, NAMES), figures.class_accuracy(found, NAMES)
    assert lengths(spending) == [75, 37.5]
    assert tips(spending)[1] == "dog: 37.5 % ± 12.5 of the dense MACs, 2 images"
    assert lengths(accuracy) == [100, 50]
    assert [tick.get_text() for tick in accuracy.axes[0].get_yticklabels()] == ["cat", "dog"]


def test_one_class_makes_one_bar() -> None:
    found = analysis.spending_per_class(decisions(labels=(2, 2, 2), predicted=(2, 2, 0)))
    assert tips(figures.class_accuracy(found, NAMES)) == ["emu: top-1 66.7 % of 3 images"]


def test_responses_are_drawn_as_they_are_with_a_tick_per_class() -> None:
    peak_NO = np.array([[0, 5], [1, 2], [3, 4]], dtype=np.float32)
    figure = figures.responses(Responses(unit="u", peak_NO=peak_NO, label_N=np.array([0, 2, 2])), NAMES)
    axes = figure.axes[0]
    assert np.asarray(axes.images[0].get_array()).tolist() == peak_NO.tolist()
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["cat", "emu"]
    assert axes.get_yticks().tolist() == [0, 1.5]
    unlabelled = figures.responses(Responses(unit="u", peak_NO=peak_NO, label_N=None), NAMES)
    assert unlabelled.axes[0].get_ylabel() == "images"


def test_the_two_maps_of_an_image_share_one_colour_scale() -> None:
    dense, gated = np.array([[[1, 2]], [[0, 0]]], dtype=np.float32), np.array([[[1, 8]], [[0, 0]]], dtype=np.float32)
    pixels = np.zeros((2, 3, 3, 3), dtype=np.uint8)
    figure = figures.heatmaps(Heatmaps(unit="u", dense_NHW=dense, gated_NHW=gated), pixels)
    maps = [axes.images[0] for axes in figure.axes]
    assert [image.get_clim() for image in maps[1:3]] == [(0, 8), (0, 8)]
    assert np.asarray(maps[2].get_array()).tolist() == [[1, 8]]
    assert maps[4].get_clim() == (0, 1)  # a silent map has a scale too


def test_extremes_show_grey_and_coloured_pictures() -> None:
    grey, colour = np.full((2, 2, 1), 7, dtype=np.uint8), np.full((2, 2, 3), 9, dtype=np.uint8)
    figure = figures.extremes({"cheapest": [(grey, "10 %"), (grey, "20 %")], "dearest": [(colour, "90 %")]})
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert texts == ["10 %", "20 %", "90 %"]
    assert [axes.get_title(loc="left") for axes in figure.axes if axes.get_title(loc="left")] == ["cheapest", "dearest"]


def test_the_trade_off_has_the_paper_s_points_as_a_layer_of_its_own() -> None:
    ours = [analysis.Point(label="r = 0.9", reduction=0.4, drop=0.01, kind="gated")]
    paper = [analysis.Point(label="LCCL", reduction=0.25, drop=-0.002, kind="paper: dynamic")]
    figure = figures.trade_off(ours, paper)
    assert tips(figure) == [
        "LCCL: 25.0 % of MACs saved, top-1 +0.20 points",
        "r = 0.9: 40.0 % of MACs saved, top-1 -1.00 points",
    ]
    dots = [line for line in figure.axes[0].lines if line.get_marker() not in ("None", "")]
    assert [dot.get_markerfacecolor() for dot in dots] == ["none", dots[1].get_color()]


def test_many_points_are_not_named_in_the_figure() -> None:
    few, many = (
        [analysis.Point(label=str(i), reduction=0.5, drop=0.0, kind="gated") for i in range(n)] for n in (2, 40)
    )
    assert len(figures.trade_off(few).axes[0].texts) == 2
    assert len(figures.trade_off(many).axes[0].texts) == 0
    assert len(tips(figures.trade_off(many))) == 40


def test_what_was_foretold_stands_in_one_row_with_what_came() -> None:
    figure = figures.foretold([analysis.Foretold(label="a", independent=0.3, cascade=0.35, reached=0.4)])
    assert [text.split(" ", 1)[1] for text in tips(figure)] == [
        "est., one pass 30.0 %",
        "est., masks on 35.0 %",
        "reached 40.0 %",
    ]


def test_compressibility_says_the_rank_correlation_or_that_there_is_none() -> None:
    def found(correlation: float) -> analysis.Compressibility:
        return analysis.Compressibility(
            top1=0.9,
            drop=0.02,
            core_share={"a": 0.25, "b": 0.5},
            tolerated={"a": 0.1, "b": 0.4},
            correlation=correlation,
            p_value=0.5,
        )

    figure = figures.compressibility(found(1.0))
    assert tips(figure) == ["a: 25 % core filters, 10 % can leave", "b: 50 % core filters, 40 % can leave"]
    assert "1.00, p = 0.50; 2 groups" in figure.axes[0].get_title()
    assert "undefined" in figures.compressibility(found(math.nan)).axes[0].get_title()


def test_a_network_with_more_groups_than_names_fit_stays_on_the_page() -> None:
    masks = {f"layer{i}": ("10", "10", "01") for i in range(110)}
    figure = figures.pruning_ratios(analysis.routes(decisions(masks=masks)))
    assert figure.get_figheight() < 10
    assert len(figure.axes[0].get_yticklabels()) <= 48
    assert len(tips(figure)) == 110


def test_an_empty_figure_says_why() -> None:
    figure = figures.empty("nothing here")
    assert [text.get_text() for text in figure.texts] == ["nothing here"]


# Panels: the values beneath


PANELS: list[tuple[Callable[[], panels.Panel], tuple[Any, ...]]] = [
    (lambda: panels.group_panels(decisions())[0], ("a", 4, 2)),
    (lambda: panels.group_panels(decisions())[1], ("a", 4, 0.5)),
    (lambda: panels.group_panels(decisions())[2], ("a", 4, 1, 0.25, 1)),
    (lambda: panels.group_panels(decisions(targets=TARGETS))[3], ("a", 5 / 6, 5 / 6, 10 / 12)),
    (lambda: panels.group_panels(decisions())[4], ("a", "none", 0.0)),
    (lambda: panels.cost_panel(decisions()), ("cheapest", 0.25)),
    (
        lambda: panels.class_panels(analysis.spending_per_class(decisions()), NAMES, gated=True)[0],
        ("cat", 1, 0.75, 0.0),
    ),
    (lambda: panels.class_panels(analysis.spending_per_class(decisions()), NAMES, gated=False)[0], ("cat", 1, 1.0)),
]


@pytest.mark.parametrize(("make", "row"), PANELS)
def test_the_table_beneath_a_figure_has_its_values(make: Callable[[], panels.Panel], row: tuple[Any, ...]) -> None:
    panel = make()
    assert panel.rows[0] == row
    assert all(len(each) == len(panel.columns) for each in panel.rows)
    assert panel.to_json()["values"][0] == dict(zip(panel.columns, row, strict=True))


def test_without_targets_or_results_a_panel_is_honestly_empty() -> None:
    assert "no targets" in panels.group_panels(decisions())[3].text
    assert "No estimate" in panels.foretold_panel({}).text
    assert panels.trade_off_panel({}).text == "No gated or pruned run here."
    assert panels.foretold_panel({}).rows == ()


def test_what_does_not_exist_is_null_in_json() -> None:
    panel = panels.Panel(name="x", title="", text="", figure=figures.empty(""), columns=("a",), rows=((math.nan,),))
    assert panel.to_json()["values"] == [{"a": None}]


# Files


def test_an_svg_is_the_same_each_time_and_its_letters_are_at_least_eight_points() -> None:
    first, second = (to_svg(figures.core_filters(analysis.routes(decisions())), "x") for _ in range(2))
    assert first == second
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: ([\d.]+)px", first.decode())]
    assert min(sizes) >= 8
    assert to_png(figures.empty("x")).startswith(b"\x89PNG")


def test_an_svg_in_a_page_takes_the_page_s_colour_and_shares_no_id_with_others() -> None:
    texts = [to_inline_svg(figures.redundancy(("a",), np.ones((1, 1))), name, "<label>") for name in ("x", "y")]
    roots = [ElementTree.fromstring(text) for text in texts]
    ids = [{element.get("id") for element in root.iter() if element.get("id")} for root in roots]
    assert ids[0]
    assert not ids[0] & ids[1]
    pointed = set(re.findall(r"(?:url\(#|href=\"#)([^\")]+)", texts[0]))
    assert pointed == ids[0]
    assert roots[0].get("aria-label") == "<label>"
    assert "currentColor" in texts[0]
    assert f"fill: {INK}" not in texts[0]
    assert roots[0].get("width") is None


def test_figures_leave_no_trace_in_matplotlib_and_need_no_pyplot() -> None:
    code = (
        "import sys, matplotlib\n"
        "def params(): return {k: matplotlib.rcParams[k] for k in matplotlib.rcParams if k != 'backend'}\n"
        "before = params()\n"
        "from cofire.analysis import figures\nfrom cofire.analysis.drawing import to_svg\n"
        "to_svg(figures.empty('x'), 'x')\n"
        "assert params() == before\n"
        "print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr
