"""trim: what never runs is gone, what always runs alike has no head, and the function stays the same."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from small import digest, tiny_images, tiny_plain

import cofire
from cofire import FBS, FTWT, ConfigError, create_backbone, gate, trim
from cofire.gates.ftwt_offline import keep_rates
from cofire.gates.gating import GatedModel, mask_loss


def images(n: int, shape: tuple[int, int, int]) -> torch.Tensor:
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(3))


def partly_static(name: str, **options: Any) -> tuple[GatedModel, torch.Tensor]:
    """A gated network with heads of chance in which every second group is fixed and each head shuns some filters."""
    torch.manual_seed(0)
    model = create_backbone(name).eval()
    gated = gate(model, FTWT(**{"softmax": False, "pool": "both", "standardise": True, **options})).eval()
    for number, one in enumerate(gated.gates.values()):
        linear = one.head.linear
        torch.nn.init.normal_(linear.weight, std=0.0 if number % 2 else 1.0)
        linear.bias.data[::2], linear.bias.data[1::2] = 0.5, -0.5 if number % 2 else 0.1
        linear.bias.data[:3] = -1e4
    return gated, images(24, model.input_shape)


@pytest.mark.parametrize("name", ["resnet8_digits", "mobilenet_v1", "vgg11_bn"])
@pytest.mark.parametrize("softmax", [False, True])
def test_a_trimmed_model_computes_the_same_with_fewer_filters(name: str, softmax: bool) -> None:
    gated, x = partly_static(name, softmax=softmax, standardise=not softmax)
    before = digest(gated)
    trimmed = trim(gated, [x])
    assert isinstance(trimmed, GatedModel)
    with torch.no_grad():
        torch.testing.assert_close(trimmed(x), gated(x), rtol=1e-4, atol=1e-4)
    assert digest(gated) == before
    ours, theirs = trimmed.cost(), gated.cost()
    assert ours.total("executed").tolist() == theirs.total("executed").tolist()
    assert sum(ours.heads.values())[0] < sum(theirs.heads.values())[0]
    if not softmax:
        assert ours.dense_total < theirs.dense_total


def test_the_units_say_what_became_of_each_group() -> None:
    gated, x = partly_static("resnet8_digits")
    trimmed = trim(gated, [x])
    assert isinstance(trimmed, GatedModel)
    told = {unit.name: unit.reason for unit in trimmed.units}
    both = r"decides per image(, \d+ of \d+ always run)?, \d+ of \d+ never run"
    assert any(re.fullmatch(both, reason) for reason in told.values())
    assert any(reason.startswith("the same ") and "are cut, no head" in reason for reason in told.values())
    assert "the same" in str(trimmed.units)
    gated, x = partly_static("mobilenet_v1")
    depthwise = trim(gated, [x])
    assert isinstance(depthwise, GatedModel)
    assert not any("filter_fn" in unit.reason for unit in depthwise.units)
    for name, filters in trimmed.config.fixed.items():
        assert "an addition reads it" in told[name]
        assert len(filters) < trimmed.gates.sites[name].filters


def test_it_is_saved_loaded_compiled_and_its_macs_are_the_engines(tmp_path: Path) -> None:
    gated, x = partly_static("resnet8_digits")
    trimmed = trim(gated, [x])
    assert isinstance(trimmed, GatedModel)
    trimmed.save(tmp_path)
    loaded = cofire.load(tmp_path)
    with torch.no_grad():
        logits = trimmed(x)
        assert torch.equal(loaded(x), logits)
    assert [unit.reason for unit in loaded.units] == [unit.reason for unit in trimmed.units]
    engine = cofire.compile(trimmed)
    torch.testing.assert_close(engine(x), logits, rtol=1e-3, atol=1e-3)
    same = [torch.equal(torch.from_numpy(engine.last_masks[name]), mask) for name, mask in trimmed.masks.items()]
    assert all(same)
    assert sum(engine.last_macs.values()).tolist() == trimmed.cost().total("executed").tolist()


def test_what_decides_nothing_becomes_a_plain_smaller_network() -> None:
    gated, x = partly_static("vgg11_bn")
    for one in gated.gates.values():
        torch.nn.init.zeros_(one.head.linear.weight)
    small = trim(gated, [x])
    assert not isinstance(small, GatedModel)
    with torch.no_grad():
        torch.testing.assert_close(small(x), gated(x), rtol=1e-4, atol=1e-4)


def test_a_method_whose_heads_cannot_shrink_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trim needs a method whose heads can lose filters, which FBS d = 0\.5 is"):
        trim(gate(tiny_plain(), FBS()), tiny_images(4).loader(4))


@pytest.mark.parametrize("select", ["threshold", "top"])
def test_what_always_runs_has_nothing_in_the_head(select: str, tmp_path: Path) -> None:
    gated, x = partly_static("resnet8_digits")
    if select == "top":
        signature = {name: site.filters // 2 for name, site in gated.gates.sites.items()}
        top = gate(gated.backbone, dataclasses.replace(gated.config, select="top", signature=signature)).eval()
        top.load_state_dict(gated.state_dict())
        gated = top
    rates = keep_rates(gated, [x])
    trimmed = trim(gated, [x])
    assert isinstance(trimmed, GatedModel)
    found = {name: rate_O for name, rate_O in rates.items() if bool(((rate_O > 0) & (rate_O < 1)).any())}
    assert any(bool((rate_O == 1).any()) for rate_O in found.values())
    for name, rate_O in found.items():
        site, linear = trimmed.gates.sites[name], trimmed.gates[name].head.linear
        certain = list(trimmed.config.certain.get(name, ()))
        assert len(certain) == int((rate_O == 1).sum())
        assert trimmed.gates.head_macs(site) == (site.filters - len(certain)) * linear.in_features
        assert not linear.weight[certain].any()
    trimmed.save(tmp_path)
    engine = cofire.compile(trimmed)
    with torch.no_grad():
        logits = trimmed(x)
        assert torch.equal(cofire.load(tmp_path)(x), logits)
    torch.testing.assert_close(engine(x), logits, rtol=1e-3, atol=1e-3)
    for name, mask in trimmed.masks.items():
        assert torch.equal(torch.from_numpy(engine.last_masks[name]), mask.bool())
    # Its loss wants them on, and does not move them; a threshold that calibration finds leaves them on.
    trimmed.train()(x)
    loss = mask_loss(trimmed)
    loss.backward()
    assert bool(loss.isfinite())
    for name in found:
        head, certain = trimmed.gates[name].head, list(trimmed.config.certain.get(name, ()))
        assert not head.linear.weight.grad[certain].any()
        assert not head.linear.bias.grad[certain].any()
    if select == "threshold":
        trimmed.eval()
        reached = cofire.calibrate(
            trimmed, [x], macs=0.9 * float(1 - trimmed.cost().reduction("executed+heads").mean())
        )
        assert 0 < reached < 1
        trimmed(x)
        for name in found:
            assert bool(trimmed.masks[name][:, list(trimmed.config.certain.get(name, ()))].all())


def test_what_is_certain_runs_from_the_beginning() -> None:
    model = tiny_plain()
    name = next(iter(gate(model, FTWT()).gates))
    gated = gate(model, FTWT(certain={name: (0, 3)})).eval()
    gated(next(iter(tiny_images(5).loader(5)))[0])
    assert bool(gated.masks[name][:, [0, 3]].all())
    assert not gated.gates[name].head.linear.weight[[0, 3]].any()
    with pytest.raises(ConfigError, match=r"FTWT\.certain needs a bias"):
        FTWT(certain={name: (0,)}, bias=False)
