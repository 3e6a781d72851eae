"""A method of one's own: registered, it gates, trains, saves and loads like FTWT; what does not fit is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nets import SHAPE, Net, conv, fc, images
from test_gates import residual_net
from torch import Tensor, nn

import cofire
from cofire import (
    AbstractGate,
    ConfigError,
    Decision,
    GateConfig,
    GatedModel,
    create_backbone,
    gate,
    mask_loss,
    register_gate,
)
from cofire.gates import base


@dataclass(frozen=True, kw_only=True)
class Ranked(GateConfig):
    """Filters in a fixed, learned order; those that stay are scaled."""

    scale: float = 1.0


class RankedGate(AbstractGate):
    head_macs = 0

    def __init__(self, filters: int, scale: float) -> None:
        super().__init__()
        self.score_O = nn.Parameter(torch.linspace(-1.0, 1.0, filters))
        self.scale = scale

    def decide(self, x_BIHW: Tensor) -> Decision:
        logits_BO = self.score_O.expand(len(x_BIHW), -1)
        return Decision(logits_BO, (logits_BO > self.threshold).float(), torch.full_like(logits_BO, self.scale))

    def loss(self, decision: Decision, y_BOHW: Tensor) -> Tensor:
        return decision.logits_BO.sum(1).mean()


def build_ranked(groups: list[Any], config: Ranked) -> dict[str, AbstractGate]:
    return {group[0].group: RankedGate(group[-1].out_channels, config.scale) for group in groups}


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_methods", dict(base._methods))


@pytest.mark.usefixtures("own_registry")
def test_an_own_method_gates_trains_saves_and_loads(tmp_path: Path) -> None:
    register_gate(Ranked)(build_ranked)
    assert base.gate_types()["Ranked"] is Ranked
    torch.manual_seed(0)
    gated = gate(create_backbone("resnet8_digits"), Ranked(reduction="sum", depthwise="separate", scale=2.0))
    x = images(5, (1, 8, 8))
    (F.cross_entropy(gated(x), torch.arange(5)) + mask_loss(gated)).backward()
    assert all(torch.equal(g.score_O.grad, torch.ones_like(g.score_O)) for g in gated.gates.values())
    widths = [units[-1].out_channels for units in gated.units.groups.values()]
    assert [int(mask[0].sum()) for mask in gated.masks.values()] == [width // 2 for width in widths]
    cost = gated.cost()
    assert cost.total("executed+heads").tolist() == cost.total("executed").tolist()
    assert (cost.reduction("executed") > 0.5).all()

    gated.eval().threshold = 0.25
    gated.save(tmp_path / "own")
    loaded = cofire.load(tmp_path / "own")
    assert isinstance(loaded, GatedModel)
    assert loaded.config == gated.config
    assert loaded.threshold == 0.25
    assert torch.equal(loaded(x), gated(x))


@pytest.mark.usefixtures("own_registry")
def test_the_filters_an_own_method_keeps_are_scaled() -> None:
    register_gate(Ranked)(build_ranked)
    net = Net(lambda m, x: m.logits(F.relu(m.one(x))), one=conv(3, 8), fc=fc(8)).eval()
    gated, x = gate(net, Ranked(scale=3.0), input_shape=SHAPE), images()
    half = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]).reshape(1, 8, 1, 1)
    torch.testing.assert_close(gated(x), net.logits(F.relu(net.one(x)) * half * 3))


class KeepingGate(RankedGate):
    """Its loss hangs on the unit's own output."""

    def decide(self, x_BIHW: Tensor) -> Decision:
        return Decision(None, (self.score_O.detach() > 0).to(x_BIHW.dtype).expand(len(x_BIHW), -1))

    def loss(self, decision: Decision, y_BOHW: Tensor) -> Tensor:
        return y_BOHW.square().sum()


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("activation", [F.relu, F.silu])
def test_a_loss_that_keeps_the_output_gets_the_gradient_of_finite_differences(activation: Any) -> None:
    register_gate(Ranked)(lambda groups, config: {g[0].group: KeepingGate(g[-1].out_channels, 1.0) for g in groups})
    net = Net(lambda m, x: m.logits(activation(m.one(x))), one=conv(3, 8), fc=fc(8)).double().train()
    gated, x = gate(net, Ranked(), input_shape=SHAPE).double(), images().double()
    weight = gated.get_parameter("one.weight")

    def loss() -> Tensor:
        return gated(x).square().sum() + mask_loss(gated)

    loss().backward()
    assert weight.grad is not None
    for place in ((0, 0, 1, 1), (7, 2, 0, 1)):  # a filter that is off, and one that is on
        values = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                weight[place] += step
                values.append(float(loss().detach()))
                weight[place] -= step
        assert float(weight.grad[place]) == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-4)
        assert abs(float(weight.grad[place])) > 1e-3


@pytest.mark.usefixtures("own_registry")
def test_a_name_is_registered_once_and_must_be_a_gate_config() -> None:
    register_gate(Ranked)(build_ranked)
    with pytest.raises(ConfigError, match="'Ranked' is registered already"):
        register_gate(Ranked)
    with pytest.raises(ConfigError, match="needs a dataclass derived from GateConfig"):
        register_gate(int)  # type: ignore[arg-type]


@pytest.mark.usefixtures("own_registry")
def test_a_config_that_nobody_registered_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown gate config 'Ranked'.*known: .*FTWT"):
        gate(create_backbone("resnet8_digits"), Ranked())


@pytest.mark.usefixtures("own_registry")
def test_a_saved_model_of_a_method_that_is_not_registered_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    register_gate(Ranked)(build_ranked)
    gate(create_backbone("resnet8_digits"), Ranked()).save(tmp_path / "own")
    base._methods.pop(Ranked)
    with pytest.raises(ConfigError, match="unknown gate type 'Ranked'"):
        cofire.load(tmp_path / "own")


@pytest.mark.usefixtures("own_registry")
def test_a_builder_must_return_one_gate_per_group() -> None:
    register_gate(Ranked)(lambda groups, config: {"other": RankedGate(8, 1.0)})
    with pytest.raises(
        ConfigError, match=r"one gate per group; missing \['one', 'stem', 'two'\], unexpected \['other'\]"
    ):
        gate(residual_net(), Ranked(), input_shape=SHAPE)


@pytest.mark.usefixtures("own_registry")
def test_targets_of_a_method_without_targets_cannot_be_forced() -> None:
    register_gate(Ranked)(build_ranked)
    gated = gate(residual_net().eval(), Ranked(), input_shape=SHAPE)
    with gated.force("targets"), pytest.raises(ConfigError, match="Ranked has no targets"):
        gated(images())
