"""calibrate: the budget asked for is the budget reached; bits per filter by hand."""

from __future__ import annotations

import math

import pytest
import torch
from small import tiny_gated, tiny_images, tiny_plain

from cofire import FBS, ConfigError, calibrate, evaluate, gate
from cofire.evaluation import bits_per_filter


@pytest.mark.parametrize("macs", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("softmax", [True, False])
def test_the_budget_asked_for_is_reached(macs: float, softmax: bool) -> None:
    gated, loader = tiny_gated(softmax=softmax), tiny_images(40).loader(20)
    reached = calibrate(gated, loader, macs=macs)
    report = evaluate(gated, loader, text="")
    assert 1 - report.reduction["executed+heads"] == pytest.approx(reached, abs=1e-9)
    assert reached == pytest.approx(macs, abs=0.005)


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
