"""Signatures: a number of filters per group, by share, by Taylor ranking, from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import OwnNet, digest, tiny_gated, tiny_images, tiny_plain

from cofire import FTWT, ConfigError, DataError, FileError, data, estimate, evaluate, fit, gate, signatures
from cofire.training.loop import Recipe

ALL = FTWT(always=True)


def own_batches() -> list[Any]:
    return list(data.synthetic(12, (3, 8, 8), classes=3).loader(6))


def own_net() -> OwnNet:
    torch.manual_seed(3)
    return OwnNet()


def test_uniform_keeps_a_share_of_every_group_and_at_least_one_filter() -> None:
    half = signatures.uniform(tiny_plain(), FTWT(), 0.5)
    sizes = {name: units[-1].out_channels for name, units in tiny_gated().units.groups.items()}
    assert half == {name: filters // 2 for name, filters in sizes.items()}
    assert signatures.uniform(tiny_plain(), FTWT(), 1.0) == sizes
    assert set(signatures.uniform(tiny_plain(), FTWT(), 1e-6).values()) == {1}


def test_uniform_meets_a_budget_or_keeps_a_share_but_not_both() -> None:
    model = tiny_plain()
    signature = signatures.uniform(model, FTWT(), macs=0.6)
    gated = gate(model, FTWT(signature=signature, select="top")).eval()
    gated(next(iter(tiny_images(4).loader(4)))[0])
    assert 0.57 <= float(1 - gated.cost().reduction("executed+heads").mean()) <= 0.6
    for keep, macs in ((None, None), (0.5, 0.5)):
        with pytest.raises(ConfigError, match=f"needs either keep or macs, got keep={keep} and macs={macs}"):
            signatures.uniform(model, FTWT(), keep, macs=macs)


def test_a_signature_fixes_the_number_of_filters_of_every_sample() -> None:
    signature = signatures.uniform(tiny_plain(), FTWT(), 0.25)
    gated = gate(tiny_plain(), FTWT(signature=signature))
    with gated.force("targets"):
        report = evaluate(gated, tiny_images(20).loader(20))
    assert report.keep_rate == pytest.approx(dict.fromkeys(signature, 0.25))
    assert report.spread["paper"] == pytest.approx(0.0, abs=1e-6)
    table = estimate(tiny_plain(), FTWT(signature=signature), tiny_images(20).loader(20), [0.1, 0.9])
    assert table.reduction["paper"] == pytest.approx([report.reduction["paper"]] * 2)


def test_a_model_with_a_signature_trains() -> None:
    gated = gate(tiny_plain(), FTWT(signature=signatures.uniform(tiny_plain(), FTWT(), 0.5)))
    before = digest(gated)
    fit(gated, tiny_images(32).loader(16, train=True), Recipe(epochs=1))
    assert digest(gated) != before


def test_taylor_scores_are_squared_gradients_of_a_factor_on_each_filter() -> None:
    """By finite differences, in double precision."""
    net, batches = own_net().double(), [(x.double(), label) for x, label in own_batches()]
    scores = signatures.taylor_scores(gate(net, ALL, input_shape=(3, 8, 8)).double(), batches)

    def loss(x: Any, label: Any, factor_O: torch.Tensor, unit: str) -> float:
        factors = {"first": torch.ones(8), "second": torch.ones(8), unit: factor_O}
        y = torch.relu(net.first(x)) * factors["first"][:, None, None]
        y = torch.relu(net.second(y)) * factors["second"][:, None, None]
        return F.cross_entropy(net.last(y.mean((2, 3))), label).item()

    for unit in ("first", "second"):
        for filter_ in range(8):
            step = torch.zeros(8, dtype=torch.float64).index_fill(0, torch.tensor([filter_]), 1e-4)
            slopes = [(loss(x, y, 1 + step, unit) - loss(x, y, 1 - step, unit)) / 2e-4 for x, y in batches]
            mean = sum(slope**2 for slope in slopes) / len(slopes)
            assert float(scores[unit][filter_]) == pytest.approx(mean, rel=1e-3, abs=1e-12)


@pytest.mark.parametrize("macs", [0.2, 0.5, 0.8])
def test_taylor_drops_the_fewest_filters_that_meet_the_budget(macs: float) -> None:
    signature = signatures.taylor(tiny_plain(), FTWT(), tiny_images(20).loader(10), macs=macs)
    gated = tiny_gated(signature=signature)

    def remaining(counts: dict[str, int]) -> float:
        groups = gated.units.groups
        masks = {name: (torch.arange(groups[name][-1].out_channels) < k)[None] for name, k in counts.items()}
        return 1 - float(gated.cost(masks).reduction("executed"))

    scores = signatures.taylor_scores(tiny_gated(), tiny_images(20).loader(10))
    masks = {
        name: (score.argsort(descending=True, stable=True).argsort() < signature[name])[None]
        for name, score in scores.items()
    }
    assert 1 - float(gated.cost(masks).reduction("executed")) <= macs
    assert remaining(signature) > macs - 0.1
    assert all(1 <= k <= len(scores[name]) for name, k in signature.items())


def test_taylor_keeps_everything_when_everything_may_remain() -> None:
    signature = signatures.taylor(own_net(), ALL, own_batches(), macs=1.0)
    assert signature == {"first": 8, "second": 8}


def test_taylor_leaves_the_model_alone() -> None:
    net = own_net()
    before = digest(net)
    signatures.taylor(net, ALL, own_batches(), macs=0.5)
    assert digest(net) == before
    assert all(p.grad is None for p in net.parameters())


def test_a_signature_survives_its_file(tmp_path: Path) -> None:
    signature = {"layer1.0.conv1": 3, "conv1": 16}
    signatures.write(tmp_path / "signature.json", signature)
    assert signatures.read(tmp_path / "signature.json") == signature
    assert signatures.read(str(tmp_path / "signature.json")) == signature


@pytest.mark.parametrize("content", ["[]", "3", '{"a": 0}', '{"a": 1.5}', '{"a": true}', '{"a": "3"}', "{"])
def test_a_file_that_is_no_signature_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "s.json").write_text(content)
    with pytest.raises(FileError, match=r"s\.json (must be a JSON table of group|is not readable as JSON)"):
        signatures.read(tmp_path / "s.json")


def test_signatures_that_do_not_fit_the_model_are_errors() -> None:
    whole = signatures.uniform(tiny_plain(), FTWT(), 0.5)
    with pytest.raises(ConfigError, match="must name every group, got none for 'conv1'"):
        gate(tiny_plain(), FTWT(signature={name: k for name, k in whole.items() if name != "conv1"}))
    with pytest.raises(ConfigError, match=r"signature\['conv1'\] must be in 1\.\.16, got 17"):
        gate(tiny_plain(), FTWT(signature={**whole, "conv1": 17}))


@pytest.mark.parametrize("share", [0.0, 1.1, -1.0])
def test_shares_out_of_range_are_errors(share: float) -> None:
    with pytest.raises(ConfigError, match=r"keep must be in \(0, 1\], got"):
        signatures.uniform(own_net(), ALL, share)
    with pytest.raises(ConfigError, match=r"macs must be in \(0, 1\], got"):
        signatures.taylor(own_net(), ALL, own_batches(), macs=share)


def test_taylor_says_what_it_cannot_do() -> None:
    with pytest.raises(ConfigError, match=r"macs=0.001 cannot be reached: one filter per group leaves 0\.0\d+"):
        signatures.taylor(own_net(), ALL, own_batches(), macs=0.001)
    with pytest.raises(DataError, match="needs labelled images"):
        signatures.taylor(own_net(), ALL, [x for x, _ in own_batches()], macs=0.5)
    with pytest.raises(DataError, match="the loader gave no batch"):
        signatures.taylor(own_net(), ALL, [], macs=0.5)
