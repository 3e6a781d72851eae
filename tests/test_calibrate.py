"""calibrate: the budget asked for is the budget reached; bits per filter by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from small import tiny_gated, tiny_images, tiny_plain

import cofire
from cofire import FBS, FTWT, ConfigError, GatedModel, calibrate, create_backbone, evaluate, gate
from cofire.calibrate import _shift
from cofire.evaluation import bits_per_filter


@pytest.mark.parametrize("macs", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("per", ["model", "group", "filter"])
def test_the_budget_asked_for_is_reached(macs: float, softmax: bool, per: Any) -> None:
    gated, loader = tiny_gated(softmax=softmax), tiny_images(40).loader(20)
    reached = calibrate(gated, loader, macs=macs, per=per)
    report = evaluate(gated, loader, text="")
    assert 1 - report.reduction["executed+heads"] == pytest.approx(reached, abs=1e-9)
    assert reached == pytest.approx(macs, abs=0.005)
    x = next(iter(loader))[0]
    with torch.no_grad():
        wanted = gated.eval()(x)
    torch.testing.assert_close(cofire.compile(gated)(x), wanted, rtol=1e-3, atol=1e-3)  # biases and threshold travel


@pytest.mark.parametrize("name", ["resnet20", "mobilenet_v1"])
@pytest.mark.parametrize("per", ["model", "group"])
def test_half_of_a_larger_network_is_reached_within_half_a_point(name: str, per: Any) -> None:
    torch.manual_seed(0)
    gated = gate(create_backbone(name), FTWT(softmax=False))
    images = [torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    assert calibrate(gated, images, macs=0.5, per=per) == pytest.approx(0.5, abs=0.005)


def test_odds_move_alike_by_hand() -> None:
    logits = torch.tensor([[4.0, 0.5], [3.0, -1.0], [2.0, -2.0], [-1.0, -3.0]])  # odds 3 : 1 and 1 : 3
    by = _shift(logits, 0.0, math.log(1 / 3), "filter")
    assert (logits + by > 0).sum(0).tolist() == [2, 0]  # 1 : 1, and 1 : 9 of four images: none
    by = _shift(logits, 0.0, 0.0, "group")
    assert (logits + by > 0).sum().item() == 4
    assert len(by.unique()) == 1


def test_groups_keep_their_shares_where_one_threshold_would_close_the_one_with_small_logits() -> None:
    kept = {}
    for per in ("model", "group"):
        gated, loader = tiny_gated(softmax=False), tiny_images(40).loader(20)
        small = list(gated.gates.values())[-1].head.linear
        small.weight.data *= 0.01
        small.bias.data *= 0.01
        calibrate(gated, loader, macs=0.5, per=per)  # type: ignore[arg-type]
        kept[per] = list(evaluate(gated, loader, text="").keep_rate.values())[-1]
    assert kept["model"] in (0.0, 1.0)
    assert 0 < kept["group"] < 1


def test_a_latency_is_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gated, loader = tiny_gated(softmax=False), tiny_images(40).loader(20)

    def milliseconds(tried: GatedModel, images: torch.Tensor) -> float:
        """Ten times the share of MACs."""
        tried(images)
        return 10 * (1 - float(tried.cost().reduction("executed+heads").mean()))

    monkeypatch.setitem(calibrate.__globals__, "_milliseconds", milliseconds)
    reached = calibrate(gated, loader, latency_ms=6.0)
    assert 0.5 < reached <= 0.62
    assert 1 - evaluate(gated, loader, text="").reduction["executed+heads"] == pytest.approx(reached, abs=1e-9)
    with pytest.raises(ConfigError, match=r"latency_ms=0\.001 cannot be reached"):
        calibrate(gated, loader, latency_ms=0.001)
    with pytest.raises(ConfigError, match="takes one budget, macs or latency_ms, got macs=None"):
        calibrate(gated, loader)


def test_the_engine_is_timed() -> None:
    gated, loader = tiny_gated(softmax=False), tiny_images(8).loader(8)
    assert 0 < calibrate(gated, loader, latency_ms=1000.0) <= 1


def test_thresholds_per_filter_need_a_bias() -> None:
    with pytest.raises(ConfigError, match=r"FTWT\.bias must be on"):
        calibrate(tiny_gated(bias=False), tiny_images(20).loader(10), macs=0.5, per="filter")


def test_what_no_threshold_reaches_is_refused_and_nothing_is_changed() -> None:
    gated, loader = tiny_gated(), tiny_images(20).loader(10)
    gated.threshold = 0.125
    with pytest.raises(ConfigError, match=r"macs=0\.0001 cannot be reached by a threshold: between 0\."):
        calibrate(gated, loader, macs=0.0001)
    assert gated.threshold == 0.125
    with pytest.raises(ConfigError, match=r"must be in \(0, 1\), got 1"):
        calibrate(gated, loader, macs=1.0)
    with pytest.raises(ConfigError, match=r"FBS d = 0\.5 does not decide by one"):
        calibrate(gate(tiny_plain(), FBS()), loader, macs=0.5)


def test_bits_per_filter_by_hand() -> None:
    assert bits_per_filter(torch.tensor([0.0, 1.0])) == 0.0
    assert bits_per_filter(torch.tensor([0.5])) == 1.0
    quarter = -(0.25 * math.log2(0.25) + 0.75 * math.log2(0.75))
    assert bits_per_filter(torch.tensor([0.25, 1.0])) == pytest.approx(quarter / 2)


def test_a_report_says_how_much_the_gates_see_of_the_image() -> None:
    gated, loader = tiny_gated(softmax=False), tiny_images(40).loader(20)
    rates = []
    masks: dict[str, list[torch.Tensor]] = {name: [] for name in gated.gates}
    with torch.no_grad(), gated.eval().observe(lambda name, decision, y: masks[name].append(decision.mask.bits)):
        for x, _ in loader:
            gated(x)
    rates = torch.cat([torch.cat(parts).double().mean(0) for parts in masks.values()])
    assert evaluate(gated, loader, text="").bits == pytest.approx(bits_per_filter(rates))
    fixed = {site.name: torch.ones(site.filters) for site in gated.gates.sites.values()}
    with gated.force(fixed):
        assert evaluate(gated, loader, text="").bits == 0.0
    assert evaluate(tiny_plain(), loader, text="").bits is None
