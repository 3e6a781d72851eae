"""Analyses of decisions made by hand, and of networks rigged so that a hand can work out their responses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from known import TARGETS, decisions
from nets import gated_net, images, inverted_net, random_masks, randomise
from small import tiny_gated, tiny_images, tiny_plain
from torch import Tensor, nn

from cofire import FTWT, ConfigError, DataError, FileError, GatedModel, analysis, gate
from cofire.analysis.compressibility import _largest, num_passes

# Routes


def test_three_images_two_clusters_one_core_filter() -> None:
    found = analysis.routes(decisions())
    assert list(found) == ["a", "b"]
    a, b = found["a"], found["b"]
    assert (a.filters, a.clusters, a.core, a.silent) == (4, 2, 1, 1)
    assert (a.pruned, a.core_share, a.silent_share) == (0.5, 0.25, 0.25)
    assert (b.filters, b.clusters, b.core, b.silent, b.pruned) == (2, 1, 1, 1, 0.5)
    assert analysis.core_filters(decisions(), "a").tolist() == [0]
    assert analysis.silent_filters(decisions(), "a").tolist() == [3]


def test_masks_are_compared_with_targets_over_images_and_filters() -> None:
    """`a` runs 6 filters, 5 of them asked for; 6 are asked for; of 12 decisions 10 are right."""
    found = analysis.agreement(decisions(targets=TARGETS))
    assert found["a"] == analysis.Agreement(precision=5 / 6, recall=5 / 6, accuracy=10 / 12)
    assert found["b"] == analysis.Agreement(precision=1.0, recall=1.0, accuracy=1.0)
    assert analysis.agreement(decisions()) == {}


def test_a_group_that_never_runs_has_no_precision() -> None:
    found = analysis.agreement(decisions(masks={"a": ("00", "00", "00")}, targets={"a": ("10", "10", "10")}))["a"]
    assert math.isnan(found.precision)
    assert (found.recall, found.accuracy) == (0.0, 0.5)


def test_redundancy_is_one_for_the_same_split_of_the_images_and_zero_for_independent_ones() -> None:
    masks = {
        "split": ("10", "10", "01", "01"),
        "same": ("0111", "0111", "1001", "1001"),  # other filters, the same two kinds of image
        "other": ("1", "0", "1", "0"),
        "static": ("10", "10", "10", "10"),
    }
    some = decisions(masks=masks, labels=None, predicted=(0,) * 4, macs=(1,) * 4)
    found = analysis.redundancy(some)
    assert np.allclose(found, found.T, equal_nan=True)
    assert found[0, 1] == pytest.approx(1.0)
    assert found[0, 2] == found[1, 2] == 0.0
    assert found[2, 2] == pytest.approx(1.0)
    assert np.isnan(found[3]).all()


def test_redundancy_of_single_filters_is_their_squared_correlation() -> None:
    rows = ("1110100", "1011001")
    masks = {name: tuple(row) for name, row in zip("ab", rows, strict=True)}
    found = analysis.redundancy(decisions(masks=masks, labels=None, predicted=(0,) * 7, macs=(1,) * 7))
    bits = np.array([[int(bit) for bit in row] for row in rows])
    assert found[0, 1] == pytest.approx(np.corrcoef(bits)[0, 1] ** 2)


# Spending


def test_cost_is_shared_out_per_class() -> None:
    found = analysis.spending_per_class(decisions())
    assert analysis.shares(decisions()).tolist() == [0.75, 0.25, 0.5]
    assert found == {
        0: analysis.ClassSpending(n=1, top1=1.0, share=0.75, spread=0.0),
        1: analysis.ClassSpending(n=2, top1=0.5, share=0.375, spread=0.125),
    }


def test_one_class_is_enough() -> None:
    found = analysis.spending_per_class(decisions(labels=(4, 4, 4), predicted=(4, 4, 4)))
    assert (list(found), found[4].n, found[4].top1, found[4].share) == ([4], 3, 1.0, 0.5)


def test_a_cost_per_class_needs_labels() -> None:
    with pytest.raises(DataError, match="needs labelled images"):
        analysis.spending_per_class(decisions(labels=None))


def test_the_cheapest_and_the_dearest_images_come_in_order() -> None:
    cheap, dear = analysis.extremes(decisions(), 2)
    assert (cheap.tolist(), dear.tolist()) == ([1, 2], [0, 2])
    cheap, dear = analysis.extremes(decisions(macs=(5, 5, 5)), 9)
    assert (cheap.tolist(), dear.tolist()) == ([0, 1, 2], [0, 1, 2])
    with pytest.raises(ConfigError, match="count must be at least 1, got 0"):
        analysis.extremes(decisions(), 0)


# Responses


class Copies(nn.Module):
    """Two 1x1 convs that copy 4 channels, the second with the sign turned; then a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 1, bias=False), nn.Conv2d(4, 4, 1, bias=False)
        self.last = nn.Linear(4, 4)
        nn.init.eye_(self.first.weight.data[:, :, 0, 0])
        nn.init.eye_(self.second.weight.data[:, :, 0, 0]).neg_()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(torch.relu(self.first(x))).mean((2, 3)))  # type: ignore[no-any-return]


def pictures() -> Tensor:
    """Two images (2, 4, 2, 2) with known maxima."""
    x = torch.zeros(2, 4, 2, 2)
    x[0, 0, 0, 0], x[0, 1, 1, 1], x[1, 2, 0, 1], x[1, 3] = 3.0, -2.0, 5.0, 1.0
    return x


def test_the_maximum_response_is_taken_over_space_and_images_are_sorted_by_class() -> None:
    found = analysis.responses(Copies(), [(pictures(), torch.tensor([1, 0]))], "first")
    assert found.peak_NO.tolist() == [[0, 0, 5, 1], [3, 0, 0, 0]]  # after the activation: -2 is cut off
    assert found.label_N is not None
    assert found.label_N.tolist() == [0, 1]


def test_units_that_nothing_gates_respond_too_and_negative_responses_count() -> None:
    gated = gate(Copies(), FTWT(always=True), input_shape=(4, 2, 2))
    assert list(gated.gates) == ["first"]
    for model in (Copies(), gated):
        with gated.force("open"):
            found = analysis.responses(model, [pictures()], "second")
        assert found.peak_NO.tolist() == [[3, 0, 0, 0], [0, 0, 5, 1]]
        assert found.label_N is None


def test_filters_that_are_off_do_not_respond_here_nor_behind() -> None:
    gated = gate(Copies(), FTWT(always=True), input_shape=(4, 2, 2))
    with gated.force({"first": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 1]])}):
        for unit in ("first", "second"):
            found = analysis.responses(gated, [pictures()], unit)
            assert found.peak_NO.tolist() == [[3, 0, 0, 0], [0, 0, 0, 1]]


def test_any_unit_of_a_network_with_depthwise_convs_can_be_watched() -> None:
    """The last unit of each group against what gates see themselves; a depthwise conv's feeder is off where it is."""
    net = inverted_net()
    randomise(net)
    gated, x = gated_net(net), images(3)
    masks = random_masks(gated, 3)
    seen: dict[str, Tensor] = {}
    with gated.force(masks), gated.observe(lambda group, _, y: seen.__setitem__(group, y.abs().amax((2, 3)))):
        gated(x)
    with gated.force(masks):
        for unit in gated.units:
            found = analysis.responses(gated, [x], unit.name, text="")
            assert found.peak_NO.shape == (3, unit.out_channels)
            if unit.gated:
                assert (found.peak_NO[~masks[unit.group].numpy()] == 0).all()
            if unit.gated and gated.units.groups[unit.group][-1] is unit:
                wanted = seen[unit.group].detach().numpy() * masks[unit.group].numpy()
                assert np.allclose(found.peak_NO, wanted, rtol=1e-5)
    assert any(len(members) > 1 for members in gated.units.groups.values())


def test_watching_gives_the_logits_and_the_modes_of_the_model_itself() -> None:
    gated, x = tiny_gated(ratio=0.7).train(), tiny_images(8)
    found = analysis.responses(gated, x.loader(8), "layer3.0.conv2")
    masks = gated.masks
    gated.eval()(x.normalise(x.pixels_NCHW))
    assert all(torch.equal(mask, masks[group]) for group, mask in gated.masks.items())
    assert x.label_N is not None
    order = x.label_N.argsort(stable=True)
    assert ((found.peak_NO > 0) <= gated.masks["layer3.0.conv2"][order].numpy()).all()


def test_heatmaps_sum_what_filters_give_with_gates_open_and_at_work() -> None:
    gated = gate(Copies(), FTWT(always=True), input_shape=(4, 2, 2))
    with gated.force({"first": torch.tensor([1.0, 1.0, 0.0, 1.0])}):
        found = analysis.heatmaps(gated, pictures(), "second")
    assert found.dense_NHW.tolist() == [[[3, 0], [0, 0]], [[1, 6], [1, 1]]]
    assert found.gated_NHW.tolist() == [[[3, 0], [0, 0]], [[1, 1], [1, 1]]]


def test_an_unknown_unit_gets_an_error_with_the_nearest_name() -> None:
    for model in (tiny_plain(), tiny_gated()):
        with pytest.raises(ConfigError, match=r"unknown unit 'layer1.0.conv'; did you mean 'layer1.0.conv"):
            analysis.responses(model, tiny_images(2).loader(2), "layer1.0.conv")


def test_a_plain_model_has_no_two_heatmaps() -> None:
    with pytest.raises(ConfigError, match="got a plain Copies"):
        analysis.heatmaps(Copies(), pictures(), "first")


# Trade-off


def result(top1: float, gate: Any = None, prune: Any = None, backbone: str = "net", **more: Any) -> dict[str, Any]:
    recipe = {"data": {"name": "digits", "args": {}}, "backbone": {"name": backbone, "args": {}}}
    saved = {"paper": 0.5, "executed": 0.4, "executed+heads": 0.39}
    return {"experiment": {**recipe, "gate": gate, "prune": prune}, "test": {"top1": top1, "reduction": saved}, **more}


def test_a_drop_is_against_the_mean_dense_run_of_the_same_network() -> None:
    results = {
        "dense 0": result(0.90),
        "dense 1": result(0.92),
        "gated": result(0.88, gate={"type": "FTWT"}),
        "l1": result(0.93, prune={"type": "L1"}),
        "alone": result(0.7, gate={"type": "FTWT"}, backbone="other"),
    }
    found, left_out = analysis.points(results)
    assert left_out == ["alone"]
    assert [(p.label, p.kind, p.reduction, round(p.drop, 6)) for p in found] == [
        ("gated", "gated", 0.4, 0.03),
        ("l1", "pruned", 0.4, -0.02),
    ]
    assert {p.reduction for p in analysis.points(results, "paper")[0]} == {0.5}


def test_the_paper_s_points_are_those_of_the_same_network_and_data() -> None:
    def named(data: str, backbone: str) -> dict[str, analysis.Point]:
        recipe = {"data": {"name": data, "args": {}}, "backbone": {"name": backbone, "args": {}}}
        return {point.label: point for point in analysis.paper_points({**result(0.9), "experiment": recipe})}

    point = named("cifar10", "resnet56")["FTWT decoupled, r = 0.80"]
    assert (point.reduction, round(point.drop, 6)) == (0.66, 0.0103)  # 93.66 dense, 92.63
    kinds = {point.kind for point in named("cifar10", "resnet56").values()}
    assert kinds == {"paper: FTWT", "paper: static", "paper: other"}
    assert named("imagenet", "mobilenet_v1_imagenet")["FTWT r = 1"].drop == pytest.approx(-0.0009)
    assert "baseline" not in named("cifar10", "resnet56")
    assert named("digits", "resnet8_digits") == named("cifar10", "resnet20") == {}


def test_what_was_foretold_stands_beside_what_came() -> None:
    estimated = {"images": 9, "independent": {"executed": 0.3}, "cascade": {"executed": 0.35}}
    results = {"a": result(0.9, gate={}, estimated=estimated), "b": result(0.9, gate={}, estimated=None)}
    assert analysis.foretold(results) == [analysis.Foretold(label="a", independent=0.3, cascade=0.35, reached=0.4)]
    assert analysis.foretold(results, "paper") == []


def test_a_file_that_is_no_result_gets_an_error() -> None:
    with pytest.raises(FileError, match="must have the parts 'experiment' and 'test'"):
        analysis.points({"x": {"dense": {}}})


# Compressibility


class Needy(nn.Module):
    """Class k is channel k. The first conv doubles each channel into two filters; the second needs every filter."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.once = nn.Conv2d(4, 8, 1, bias=False), nn.Conv2d(8, 4, 1, bias=False)
        self.last = nn.Linear(4, 4, bias=False)
        eye = torch.eye(4)
        self.twice.weight.data = torch.cat([eye, 2 * eye])[:, :, None, None]
        self.once.weight.data = torch.cat([eye, eye], 1)[:, :, None, None]
        self.last.weight.data = eye

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.once(torch.relu(self.twice(x))))
        return self.last(x.mean((2, 3)))  # type: ignore[no-any-return]


def needy() -> tuple[GatedModel, list[tuple[Tensor, Tensor]]]:
    x = torch.eye(4)[:, :, None, None].expand(-1, -1, 2, 2).contiguous() + 0.1
    return gate(Needy(), FTWT(always=True), input_shape=(4, 2, 2)), [(x, torch.arange(4))]


def test_a_group_with_every_filter_twice_tolerates_half_and_one_without_spare_tolerates_none() -> None:
    gated, loader = needy()
    masks = {"twice": ("11110000",) * 4, "once": ("1111",) * 4}
    some = decisions(masks=masks, labels=(0, 1, 2, 3), predicted=(0, 1, 2, 3), macs=(1,) * 4)
    found = analysis.compressibility(gated, some, loader, ratios=(0.25, 0.5, 0.75))
    assert found.top1 == 1.0
    assert found.tolerated == {"twice": 0.5, "once": 0.0}
    assert found.core_share == {"twice": 0.5, "once": 1.0}
    assert found.correlation == pytest.approx(-1.0)
    assert found.p_value == 1.0  # of two groups, shuffled or not, every order is as extreme
    rarest = analysis.compressibility(gated, some, loader, ratios=(0.5,), by="keep rate")
    assert rarest.tolerated == {"twice": 0.5, "once": 0.0}


@pytest.mark.parametrize("tolerated", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_halving_finds_any_ratio_within_the_passes_it_promises(tolerated: float) -> None:
    asked: list[float] = []

    def tolerates(ratio: float) -> bool:
        asked.append(ratio)
        return ratio <= tolerated

    assert _largest((1.0, 0.5, 0.25, 0.75), tolerates) == tolerated
    assert 1 + len(asked) <= num_passes(1, 4)


def test_a_generous_drop_tolerates_everything() -> None:
    gated, loader = needy()
    masks = {"twice": ("1" * 8,) * 4, "once": ("1111",) * 4}
    some = decisions(masks=masks, labels=(0, 1, 2, 3), predicted=(0, 1, 2, 3), macs=(1,) * 4)
    found = analysis.compressibility(gated, some, loader, drop=0.9)
    assert set(found.tolerated.values()) == {0.9}
    assert math.isnan(found.correlation)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"drop": 0.0}, r"drop must be in \(0, 1\), got 0.0"),
        ({"ratios": (0.5, 1.5)}, r"ratios must be in \(0, 1\]"),
        ({"by": "l2"}, "unknown order of filters 'l2'; known: keep rate, l1"),
    ],
)
def test_compressibility_says_what_does_not_fit(options: dict[str, Any], error: str) -> None:
    gated, loader = needy()
    masks = {"twice": ("1" * 8,) * 4, "once": ("1111",) * 4}
    with pytest.raises(ConfigError, match=error):
        analysis.compressibility(gated, decisions(masks=masks), loader, **options)


def test_decisions_of_another_model_are_refused() -> None:
    gated, loader = needy()
    with pytest.raises(ConfigError, match="same groups"):
        analysis.compressibility(gated, decisions(), loader)


def test_the_rank_correlation_is_scipy_s_with_ties_too() -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy comes with scikit-learn (extra demo)")
    first, second = [0.1, 0.5, 0.5, 0.9, 0.2, 0.7, 0.3, 0.3], [1.0, 3.0, 2.0, 9.0, 2.0, 2.0, 4.0, 5.0]
    found, p_value = analysis.spearman(first, second)
    wanted = stats.spearmanr(first, second)
    assert found == pytest.approx(wanted.statistic)
    assert p_value == pytest.approx(wanted.pvalue, abs=0.05)
