"""The cost before training: equal to independent code, monotone, and true on a pretrained network."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nets import SHAPE, Net, images, inverted_net, mixed_net, option_a_net
from small import SHARED, OwnNet, digest, tiny_gated, tiny_images, tiny_plain
from torch import Tensor

from cofire import (
    FTWT,
    CofireError,
    ConfigError,
    DataError,
    Estimate,
    GateConfig,
    create_backbone,
    data,
    estimate,
    gate,
    signatures,
    solve_ratio,
)
from cofire.data import Images
from cofire.graph.cost import COLUMNS

RATIOS = [0.3, 0.5, 0.7, 0.8, 0.9, 0.99, 1.0]
ALL = FTWT(always=True)


def own_net() -> OwnNet:
    torch.manual_seed(3)
    return OwnNet()


def own_images(n: int = 12) -> Images:
    return data.synthetic(n, (3, 8, 8), classes=3)


def kept_by_hand(peaks: list[float], ratio: float) -> int:
    """Algorithm 1 in slow words: how many filters hold ``ratio`` of the mass, at least one."""
    kept, mass, total = 0, 0.0, sum(peaks)
    for peak in sorted(peaks, reverse=True):
        mass += peak
        if peak == 0 or mass > ratio * total:
            break
        kept += 1
    return max(kept, 1)


def counts_by_hand(net: OwnNet, images: Images, ratio: float) -> list[tuple[int, int]]:
    """Filters of both convs that each image keeps, one image at a time."""
    counts = []
    for x_1CHW, _ in images.loader(1):
        with torch.no_grad():
            first = torch.relu(net.first(x_1CHW))
            second = torch.relu(net.second(first))
        peaks = [[float(map_HW.abs().max()) for map_HW in y[0]] for y in (first, second)]
        counts.append((kept_by_hand(peaks[0], ratio), kept_by_hand(peaks[1], ratio)))
    return counts


# One pass


def test_one_pass_equals_independent_code_for_every_ratio() -> None:
    net, images = own_net(), own_images()
    table = estimate(net, ALL, images.loader(5), RATIOS)
    dense = 64 * 9 * (3 * 8 + 8 * 8) + 8 * 3
    assert (table.dense_macs, table.n, table.ratios, table.cascade) == (dense, 12, RATIOS, False)
    for i, ratio in enumerate(RATIOS):
        counts = counts_by_hand(net, images, ratio)
        saved = [1 - (64 * 9 * (3 * a + a * b) + b * 3) / dense for a, b in counts]
        assert table.reduction["executed"][i] == pytest.approx(np.mean(saved))
        assert table.reduction["paper"][i] == pytest.approx(np.mean(saved))
        assert table.reduction["executed+heads"][i] == pytest.approx(np.mean(saved) - (3 * 8 + 8 * 8) / dense)
        assert table.spread["executed"][i] == pytest.approx(np.std(saved), abs=1e-7)
        assert table.keep_rate["first"][i] == pytest.approx(np.mean([a / 8 for a, _ in counts]))
        assert table.keep_rate["second"][i] == pytest.approx(np.mean([b / 8 for _, b in counts]))
        assert table.keep_spread["second"][i] == pytest.approx(np.std([b / 8 for _, b in counts]), abs=1e-7)
        assert table.layers["second"][i] == pytest.approx(np.mean([1 - a * b / 64 for a, b in counts]))


def test_many_ratios_at_once_equal_one_ratio_at_a_time() -> None:
    model, loader = tiny_plain(), tiny_images(20).loader(8)
    table = estimate(model, FTWT(), loader, RATIOS)
    for i, ratio in enumerate(RATIOS):
        alone = estimate(model, FTWT(), loader, [ratio])
        for column in COLUMNS:
            assert alone.reduction[column] == pytest.approx([table.reduction[column][i]], abs=1e-12)


@pytest.mark.parametrize("cascade", [False, True])
def test_a_larger_ratio_never_saves_more(cascade: bool) -> None:
    table = estimate(tiny_plain(), FTWT(), tiny_images(20).loader(20), RATIOS, cascade=cascade)
    for column in COLUMNS:
        falling = table.reduction[column]
        assert falling == sorted(falling, reverse=True) if not cascade else falling[0] > falling[-1]


CONFIGS = {
    "default": ALL,
    "paper": FTWT.preset("paper"),
    "official": FTWT.preset("official"),
    "tolerant, so that 1.0 drops filters": FTWT(always=True, tolerance=0.05, site="post_add"),
    "the same number for all": ALL,
}


def figures(table: Estimate, i: int) -> dict[Any, tuple[float, float]]:
    """Mean and spread of everything at the ratio of index ``i``."""
    found: dict[Any, tuple[float, float]] = {c: (table.reduction[c][i], table.spread[c][i]) for c in COLUMNS}
    found |= {("layer", k): (v[i], table.layer_spread[k][i]) for k, v in table.layers.items()}
    return found | {("keep", k): (v[i], table.keep_spread[k][i]) for k, v in table.keep_rate.items()}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("make", [option_a_net, inverted_net, mixed_net])
def test_the_table_holds_the_figures_of_one_mask_for_each_ratio(make: Callable[[], Net], config: str) -> None:
    net, how, batches = make().eval(), CONFIGS[config], [images(5), images(2, seed=7)]
    if config == "the same number for all":
        how = dataclasses.replace(how, signature=signatures.uniform(net, how, 0.4, SHAPE))
    table = estimate(net, how, batches, RATIOS)
    for i, ratio in enumerate(RATIOS):
        gated = gate(net, dataclasses.replace(how, ratio=ratio), input_shape=SHAPE)
        masks: dict[str, Any] = {}
        values: dict[Any, list[float]] = defaultdict(list)

        def watch(group: str, decision: Any, y_BOHW: Tensor, gated: Any = gated, masks: Any = masks) -> None:
            masks[group] = gated.gates.target(gated.gates.sites[group], y_BOHW)

        with torch.no_grad(), gated.force("open"), gated.observe(watch):
            for x_BCHW in batches:
                gated(x_BCHW)
                cost = gated.cost(masks)
                for column in COLUMNS:
                    values[column] += cost.reduction(column).tolist()
                for layer, macs_B in cost.executed.items():
                    values["layer", layer] += (1 - macs_B.double() / cost.dense[layer]).tolist()
                for group, mask_BO in masks.items():
                    values["keep", group] += mask_BO.double().mean(1).tolist()
        for name, (mean, spread) in figures(table, i).items():
            assert mean == pytest.approx(np.mean(values[name]), abs=1e-7)
            assert spread == pytest.approx(np.std(values[name]), abs=1e-6)
        assert values.keys() == figures(table, i).keys()


def test_there_may_be_hundreds_of_ratios() -> None:
    """More than a byte could tell apart."""
    ratios = [i / 300 for i in range(1, 301)]
    table = estimate(own_net(), ALL, own_images().loader(12), ratios)
    few = estimate(own_net(), ALL, own_images().loader(12), ratios[::50])
    assert table.reduction["executed"][::50] == few.reduction["executed"]
    assert table.keep_rate["second"][::50] == few.keep_rate["second"]


def test_ratios_come_back_sorted() -> None:
    assert estimate(own_net(), ALL, own_images().loader(12), [0.9, 0.5]).ratios == [0.5, 0.9]


@pytest.mark.parametrize("batches", [1, 3, 20])
def test_the_batch_size_does_not_matter(batches: int) -> None:
    model = tiny_plain()
    whole, parts = (estimate(model, FTWT(), tiny_images(20).loader(b), RATIOS) for b in (20, 20 // batches))
    assert parts.n == whole.n == 20
    assert parts.reduction["executed"] == pytest.approx(whole.reduction["executed"])


def unlabelled_batches(images: Images) -> Any:
    return dataclasses.replace(images, label_N=None).loader(6)


def bare_tensors(images: Images) -> Any:
    return [x_BCHW for x_BCHW, _ in images.loader(6)]


@pytest.mark.parametrize("convert", [unlabelled_batches, bare_tensors])
def test_unlabelled_images_give_the_same_table(convert: Callable[[Images], Any]) -> None:
    images = own_images()
    labelled = estimate(own_net(), ALL, images.loader(6), RATIOS)
    assert estimate(own_net(), ALL, convert(images), RATIOS) == labelled


def test_the_model_is_left_alone() -> None:
    model = tiny_plain().train()
    before = digest(model)
    estimate(model, FTWT(), tiny_images(20).loader(10), [0.8], cascade=True)
    assert digest(model) == before
    assert all(module.training for module in model.modules())


def test_images_of_two_sizes_are_each_counted_at_their_own() -> None:
    """The same pictures twice as large cost four times as much, and save the same share where filters do."""
    small, large = torch.ones(2, 3, 8, 8), torch.ones(2, 3, 16, 16)
    saved = [estimate(own_net(), ALL, loader, [0.5]).reduction["executed"][0] for loader in ([small], [large])]
    both = estimate(own_net(), ALL, [small, large], [0.5])
    assert both.reduction["executed"][0] == pytest.approx(np.mean(saved))


# Cascade


@pytest.mark.parametrize("ratio", [0.5, 0.85])
def test_cascade_equals_running_with_targets_as_masks(ratio: float) -> None:
    model, loader = tiny_plain(), tiny_images(20).loader(8)
    table = estimate(model, FTWT(), loader, [ratio, 1.0], cascade=True)
    assert table.cascade
    gated = gate(model, FTWT(ratio=ratio)).eval()
    saved: dict[str, list[float]] = {column: [] for column in COLUMNS}
    with torch.no_grad(), gated.force("targets"):
        for x_BCHW, _ in loader:
            gated(x_BCHW)
            for column in COLUMNS:
                saved[column] += gated.cost().reduction(column).tolist()
    for column in COLUMNS:
        assert table.reduction[column][0] == pytest.approx(np.mean(saved[column]))
        assert table.spread[column][0] == pytest.approx(np.std(saved[column]), abs=1e-7)


def test_a_single_conv_has_no_cascade() -> None:
    net = own_net()
    config = FTWT(always=True)
    first = [
        estimate(net, config, own_images().loader(12), RATIOS, cascade=c).keep_rate["first"] for c in (False, True)
    ]
    assert first[0] == first[1]


# Solving


@pytest.mark.parametrize("macs", [0.3, 0.5, 0.7])
def test_the_solved_ratio_meets_the_budget_when_it_is_worked_out_again(macs: float) -> None:
    model, loader = tiny_plain(), tiny_images(40).loader(20)
    solution = solve_ratio(model, FTWT(mode="joint"), loader, macs=macs)
    again = estimate(model, solution.config, loader, [solution.config.ratio])
    assert again.reduction["executed"][0] == pytest.approx(1 - macs, abs=0.005)
    assert solution.independent == pytest.approx(1 - macs, abs=1e-6)
    applied = estimate(model, solution.config, loader, [solution.config.ratio], cascade=True)
    assert solution.cascade == applied.reduction["executed"][0]
    assert solution.config == FTWT(mode="joint", ratio=solution.config.ratio)


def test_a_budget_out_of_reach_says_what_can_be_reached() -> None:
    with pytest.raises(ConfigError, match=r"macs=0.0001 cannot be reached: .* takes between 0\.\d+ and"):
        solve_ratio(tiny_plain(), FTWT(), tiny_images(20).loader(20), macs=0.0001)


@pytest.mark.parametrize("macs", [0.0, 1.0, -0.5, 50, float("nan")])
def test_a_budget_that_is_no_share_is_an_error(macs: float) -> None:
    with pytest.raises(ConfigError, match=r"share of MACs that remains and must be in \(0, 1\), got"):
        solve_ratio(tiny_plain(), FTWT(), tiny_images(20).loader(20), macs=macs)


def test_tables_and_solutions_are_json_and_text() -> None:
    solution = solve_ratio(tiny_plain(), FTWT(), tiny_images(20).loader(20), macs=0.5)
    table = json.loads(json.dumps(solution.to_json()))
    assert table["ratio"] == solution.config.ratio
    assert len(table["estimate"]["ratios"]) == len(table["estimate"]["reduction"]["executed"])
    assert "of the MACs saved by the one-pass estimate" in str(solution)
    assert "one dense pass for all r, n = 20" in str(solution.estimate)
    assert "masks applied, one pass per r" in str(solution.applied)


# Errors


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.01, float("nan")])
def test_a_ratio_outside_its_range_is_an_error(ratio: float) -> None:
    with pytest.raises(ConfigError, match=r"FTWT.ratio must be in \(0, 1\], got"):
        estimate(own_net(), ALL, own_images().loader(4), [0.5, ratio])


def test_what_cannot_be_estimated_is_an_error() -> None:
    with pytest.raises(ConfigError, match="at least one ratio, got none"):
        estimate(own_net(), ALL, own_images().loader(4), [])
    with pytest.raises(DataError, match="the loader gave no batch"):
        estimate(own_net(), ALL, [], [0.5])
    with pytest.raises(DataError, match="used up by an earlier pass"):
        estimate(own_net(), ALL, iter(list(own_images().loader(4))), [0.5, 0.9], cascade=True)
    with pytest.raises(ConfigError, match="whose cost is known before training, which GateConfig is not"):
        estimate(own_net(), GateConfig(), own_images().loader(4), [0.5])  # type: ignore[arg-type]
    with pytest.raises(CofireError):
        estimate(tiny_gated(), FTWT(), tiny_images(20).loader(4), [0.5])


# A pretrained network on real images


WEIGHTS, CIFAR = SHARED / "weights" / "resnet56_cifar10.safetensors", SHARED / "data" / "cifar10"
real = pytest.mark.skipif(
    not (WEIGHTS.is_file() and (CIFAR / "test.parquet").is_file()),
    reason="needs resnet56_cifar10.safetensors and CIFAR-10 in the folder `shared` beside the repository",
)


@pytest.fixture(scope="module")
def cifar_test() -> Images:
    return data.cifar10(root=CIFAR.parent)[1]


def resnet56(path: Path) -> Any:
    return create_backbone("resnet56", weights=path)


@real
def test_resnet56_on_cifar10_one_pass_gives_the_measured_figures(cifar_test: Images) -> None:
    table = estimate(resnet56(WEIGHTS), FTWT(), cifar_test.take(slice(0, 500)).loader(250), [0.80, 0.88])
    assert table.reduction["paper"] == pytest.approx([0.642, 0.505], abs=0.005)
    assert table.reduction["executed"] == pytest.approx([0.537, 0.417], abs=0.005)


@real
@pytest.mark.slow
def test_resnet56_on_cifar10_with_masks_applied_gives_the_measured_figures(cifar_test: Images) -> None:
    loader = cifar_test.take(slice(0, 2000)).loader(250)
    table = estimate(resnet56(WEIGHTS), FTWT(), loader, [0.80, 0.88], cascade=True)
    assert table.reduction["paper"] == pytest.approx([0.702, 0.538], abs=0.005)
    assert table.reduction["executed"] == pytest.approx([0.613, 0.455], abs=0.005)
