"""Reports against figures worked out by hand, on networks rigged so that a hand can do it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from small import tiny_gated, tiny_images, tiny_plain
from torch import Tensor, nn

from cofire import FTWT, DataError, GatedModel, TraceError, evaluate, gate
from cofire.gates.targets import activity, mass_target
from cofire.graph.cost import COLUMNS


class Rigged(nn.Module):
    """Two 1x1 convs and a linear layer that copy their 8 channels: the logits are the channels' means."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(8, 8, 1, bias=False) for _ in range(2))
        self.last = nn.Linear(8, 8, bias=False)
        nn.init.eye_(self.last.weight)
        for conv in (self.first, self.second):
            nn.init.eye_(conv.weight.data[:, :, 0, 0])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.last(x.mean((2, 3)))  # type: ignore[no-any-return]


def images_with_logits(logits_BK: list[list[float]]) -> Tensor:
    return torch.tensor(logits_BK)[:, :, None, None].expand(-1, -1, 4, 4).contiguous()


RANKED = [float(k) for k in range(8, 0, -1)]  # class 0 first, class 7 last
X = images_with_logits([RANKED] * 6)
LABELS = torch.tensor([0, 0, 1, 4, 5, 7])


def rigged(ratio: float = 0.5) -> GatedModel:
    return gate(Rigged(), FTWT(ratio=ratio), input_shape=(8, 4, 4))


def mask(*filters: int) -> Tensor:
    return torch.zeros(8).index_fill(0, torch.tensor(filters, dtype=torch.int64), 1.0)


# Accuracy


def test_top1_and_top5_count_the_label_s_place() -> None:
    report = evaluate(Rigged(), [(X, LABELS)])
    assert (report.n, report.top1, report.top5) == (6, 2 / 6, 4 / 6)


def test_the_loss_is_the_mean_cross_entropy() -> None:
    report = evaluate(Rigged(), [(X[:2], LABELS[:2]), (X[2:], LABELS[2:])])
    assert report.loss == pytest.approx(float(nn.functional.cross_entropy(X.mean((2, 3)), LABELS)))


def test_each_class_is_counted_by_itself() -> None:
    report = evaluate(Rigged(), [(X, LABELS)])
    assert {label: (part.n, part.top1) for label, part in report.per_class.items()} == {
        0: (2, 1.0),
        1: (1, 0.0),
        4: (1, 0.0),
        5: (1, 0.0),
        7: (1, 0.0),
    }


def test_with_fewer_than_five_classes_top5_is_certain() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 8), nn.Flatten())
    assert evaluate(model, [(torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0]))]).top5 == 1.0


@pytest.mark.parametrize("size", [1, 5, 7, 20])
def test_the_batch_size_does_not_matter(size: int) -> None:
    gated, images = tiny_gated(), tiny_images(20)
    whole, parts = (evaluate(gated, images.loader(b)).to_json() for b in (20, size))
    assert parts.pop("loss") == pytest.approx(whole.pop("loss"), rel=1e-5)
    flat_parts, flat_whole = (json.dumps(report, sort_keys=True) for report in (parts, whole))
    if size == 20:
        assert flat_parts == flat_whole
    for column in COLUMNS:
        assert parts["reduction"][column] == pytest.approx(whole["reduction"][column])
        assert parts["spread"][column] == pytest.approx(whole["spread"][column], abs=1e-7)
    assert parts["top1"] == whole["top1"]
    assert parts["empty"] == whole["empty"]


# Gates


def test_keep_rate_and_empty_masks_are_those_of_the_masks() -> None:
    gated = rigged()
    first_BO = torch.stack([mask(0, 1), mask(), mask(), mask(*range(8)), mask(5), mask(0)])
    with gated.force({"first": first_BO, "second": mask(0, 1, 2, 3)}):
        report = evaluate(gated, [(X, LABELS)])
    assert report.keep_rate == pytest.approx({"first": (2 + 0 + 0 + 8 + 1 + 1) / 48, "second": 0.5})
    assert report.empty == {"first": 2, "second": 0}


def test_the_reduction_is_worked_out_per_sample() -> None:
    gated = rigged()
    kept_B = [2, 0, 0, 8, 1, 1]
    first_BO = torch.stack([mask(*range(k)) for k in kept_B])
    with gated.force({"first": first_BO, "second": mask(0, 1, 2, 3)}):
        report = evaluate(gated, [(X, LABELS)])
    # 16 pixels: first has 8 * k pairs of channels, second k * 4; last reads 4 channels and has 8 logits
    dense = 16 * (64 + 64) + 64
    saved_B = torch.tensor([1 - (16 * (8 * k + 4 * k) + 4 * 8) / dense for k in kept_B], dtype=torch.float64)
    assert report.dense_macs == dense
    assert report.reduction["executed"] == pytest.approx(float(saved_B.mean()))
    assert report.reduction["paper"] == pytest.approx(float(saved_B.mean()))
    assert report.reduction["executed+heads"] == pytest.approx(float(saved_B.mean()) - 128 / dense)
    assert report.spread["executed"] == pytest.approx(float(saved_B.std(correction=0)))
    assert report.per_class[0].reduction == pytest.approx(float(saved_B[:2].mean()))
    assert report.per_class[4].reduction == pytest.approx(float(saved_B[3]))


def test_mask_accuracy_is_the_share_of_filters_decided_as_the_targets_ask() -> None:
    """Mass 8 + 7 of 36 is below a half, 8 + 7 + 6 is not: the target is filters 0 and 1."""
    gated = rigged(ratio=0.5)
    assert mass_target(activity(X[:1]), 0.5).tolist() == [[True, True] + [False] * 6]
    with gated.force({"first": mask(1, 2), "second": mask(0, 1)}):
        report = evaluate(gated, [(X, LABELS)])
    assert report.mask_accuracy["first"] == pytest.approx(6 / 8)
    # second sees filters 1 and 2 only: 7 of 13 is above a half, so that only the floor keeps filter 1
    assert report.mask_accuracy["second"] == pytest.approx(7 / 8)


def test_forced_targets_are_right_and_open_gates_save_nothing() -> None:
    gated, loader = tiny_gated(ratio=0.8), tiny_images(20).loader(10)
    with gated.force("targets"):
        report = evaluate(gated, loader)
    assert set(report.mask_accuracy.values()) == {1.0}
    assert report.reduction["executed"] > 0.2
    with gated.force("open"):
        report = evaluate(gated, loader)
    assert set(report.keep_rate.values()) == {1.0}
    assert report.reduction["paper"] == report.reduction["executed"] == 0.0


def test_the_threshold_is_a_dial_from_everything_to_nothing() -> None:
    gated, loader = tiny_gated(), tiny_images(20).loader(10)
    reports = []
    for threshold in (-1e9, -0.1, 0.0, 0.1, 1e9):
        gated.threshold = threshold
        reports.append(evaluate(gated, loader))
    rates = [sum(report.keep_rate.values()) / len(report.keep_rate) for report in reports]
    assert rates == sorted(rates, reverse=True)
    assert (rates[0], rates[-1]) == (1.0, 0.0)
    assert set(reports[-1].empty.values()) == {20}
    assert [report.threshold for report in reports] == [-1e9, -0.1, 0.0, 0.1, 1e9]


# Plain models, and what stays as it was


def test_the_report_of_a_dense_model_saves_nothing() -> None:
    report = evaluate(tiny_plain(), tiny_images(20).loader(10))
    assert set(report.reduction.values()) == set(report.spread.values()) == {0.0}
    assert report.keep_rate == report.mask_accuracy == report.empty == {}
    assert report.threshold is None
    assert report.dense_macs == evaluate(tiny_gated(), tiny_images(20).loader(20)).dense_macs


def test_open_gates_give_the_accuracy_of_the_dense_model() -> None:
    loader = tiny_images(40).loader(20)
    gated = tiny_gated()
    with gated.force("open"):
        report = evaluate(gated, loader)
    dense = evaluate(tiny_plain(), loader)
    assert (report.top1, report.top5, report.loss) == (dense.top1, dense.top5, dense.loss)


def test_evaluation_leaves_modes_and_statistics_alone() -> None:
    gated = tiny_gated().train()
    gated.backbone.layer1.eval()
    modes = {name: module.training for name, module in gated.named_modules()}
    state = {name: tensor.clone() for name, tensor in gated.state_dict().items()}
    evaluate(gated, tiny_images(20).loader(10))
    assert {name: module.training for name, module in gated.named_modules()} == modes
    assert all(torch.equal(tensor, state[name]) for name, tensor in gated.state_dict().items())
    assert all(p.grad is None for p in gated.parameters())


def test_a_report_is_json_and_a_table() -> None:
    gated = tiny_gated()
    with gated.force({"conv1": torch.zeros(16)}):
        report = evaluate(gated, tiny_images(20).loader(10))
    assert json.loads(json.dumps(report.to_json())) == report.to_json()
    text = str(report)
    for part in ("top-1 / top-5", "MACs, executed+heads", "layer3.0.conv2", "no filter for 20 samples"):
        assert part in text


# Errors


@pytest.mark.parametrize(
    ("loader", "error"),
    [
        ([], "the loader gave no batch"),
        ([X], "evaluate needs labelled images"),
        ([(X, LABELS + 1)], r"labels must be in 0\.\.7, the model's classes, got 1\.\.8"),
        ([(X, LABELS - 1)], r"labels must be in 0\.\.7, the model's classes, got -1\.\.6"),
    ],
)
@pytest.mark.parametrize("model", [Rigged(), rigged()], ids=["plain", "gated"])
def test_a_loader_that_does_not_fit_gets_an_error_that_says_so(model: nn.Module, loader: Any, error: str) -> None:
    with pytest.raises(DataError, match=error):
        evaluate(model, loader)


def test_images_of_another_shape_get_an_error_that_says_so() -> None:
    with pytest.raises(DataError, match=r"shape \(B, 8, H, W\), got \(6, 7, 4, 4\)"):
        evaluate(rigged(), [(X[:, :7], LABELS)])
    with pytest.raises(TraceError, match=r"7, 4, 4"):
        evaluate(Rigged(), [(X[:, :7], LABELS)])
