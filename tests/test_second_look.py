"""SecondLook: doubt, answers, MACs and loss by hand; a budget that is met; the engine runs what is decided."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import tiny_images
from torch import Tensor, nn

import cofire
from cofire import ConfigError, GatedModel, NoUnitError, Recipe, SecondLook, calibrate, evaluate, fit, gate, mask_loss
from cofire.evaluation import bits_per_filter
from cofire.experiments.recipes import read_experiment
from cofire.experiments.runs import train_experiment
from cofire.experiments.twin import train_twin
from cofire.export import to_onnx
from cofire.runtime.engine import Engine


def looking(threshold_at: float = 0.5, first: float = 0.3) -> tuple[GatedModel, Tensor]:
    """A gated network, its threshold at a quantile of its doubts, and the images."""
    torch.manual_seed(0)
    gated = gate(cofire.create_backbone("resnet8_digits"), SecondLook(first=first)).eval()
    x = 3 * torch.randn(16, *gated.graph.input_shape)
    with torch.no_grad():
        doubt, _ = gated.gates.first(x)
    gated.threshold = float(doubt.quantile(threshold_at))
    return gated, x


def test_doubt_and_answers_by_hand() -> None:
    gated, x = looking()
    with torch.no_grad():
        found = gated(x)
        first, second = gated.gates.first.network(x), gated.backbone(x)
    doubt = -first.softmax(1).max(1).values.log()
    assert gated.threshold is not None
    in_doubt = doubt > gated.threshold
    assert int(in_doubt.sum()) == 8
    assert torch.equal(gated.decisions["whole"].mask.bits, in_doubt)
    assert torch.equal(found[~in_doubt], first[~in_doubt])
    assert torch.equal(found[in_doubt], second[in_doubt])


def test_it_begins_in_doubt_where_no_class_has_half_of_the_probability() -> None:
    gated = gate(cofire.create_backbone("resnet8_digits"), SecondLook())
    assert gated.threshold == pytest.approx(-math.log(0.5))


def test_an_image_costs_the_first_look_and_the_network_where_it_is_in_doubt() -> None:
    gated, x = looking()
    with torch.no_grad():
        gated(x)
    first = cofire.cost(cofire.trace(gated.gates.first.network, gated.graph.input_shape), {}).dense_total
    dense = gated.cost().dense_total
    assert 0.28 < first / dense <= 0.3
    in_doubt = gated.decisions["whole"].mask.bits
    assert gated.cost().total("executed").tolist() == [dense if doubt else 0 for doubt in in_doubt]
    assert gated.cost().total("executed+heads").tolist() == [first + (dense if doubt else 0) for doubt in in_doubt]


def test_the_loss_by_hand() -> None:
    gated, x = looking()
    gated.gates.train()
    labels = torch.arange(16) % 10
    answer = gated(x)
    with torch.no_grad():
        assert torch.equal(answer, gated.backbone(x))  # in training the network answers, whatever the first look says
    first = gated.decisions["whole"].partial_BOHW
    assert first is not None
    p, q = (answer / 4).softmax(1), (first / 4).softmax(1)
    distance = (p * (p.log() - q.log())).sum(1).mean() * 16
    wanted = 0.9 * distance + 0.1 * F.cross_entropy(first, labels)
    torch.testing.assert_close(mask_loss(gated, labels), wanted)
    torch.testing.assert_close(mask_loss(gated), 0.9 * distance)


def test_only_the_first_look_learns() -> None:
    gated, _ = looking()
    before = {name: tensor.clone() for name, tensor in gated.state_dict().items()}
    loader = tiny_images(48).loader(12, train=True)
    fit(gated, loader, Recipe(epochs=1, head_lr=0.05, train="heads"))
    changed = {name for name, tensor in gated.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed
    assert all(name.startswith("gates.first.network.") for name in changed)


RECIPE = """
[data]
name = "digits"
val = 200

[backbone]
name = "resnet8_digits"

[gate]
type = "SecondLook"

[budget]
macs = 0.5

[train]
train = "heads"
epochs = 1
head_lr = 0.05
"""


def test_a_run_meets_its_budget_and_is_held_against_pruning_to_as_much(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is needed (extra demo)")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    dense = cofire.create_backbone("resnet8_digits")
    cofire.save(dense, tmp_path / "dense")
    experiment = read_experiment(tmp_path / "recipe.toml", [f"backbone.weights={tmp_path / 'dense'}"])
    result = train_experiment(experiment, tmp_path / "run")
    executed = 1 - result["test"]["reduction"]["executed+heads"]
    twin = train_twin(tmp_path / "run")
    made = twin["experiment"]
    assert made.get("gate") is None
    assert made["prune"]["type"] == "L1"
    assert made["prune"]["macs"] == pytest.approx(executed, abs=1e-4)
    assert executed - 0.01 <= 1 - twin["test"]["reduction"]["executed"] <= executed + 1e-4
    assert {key: made["train"][key] for key in ("train", "lr", "distill")} == {
        "train": "all",
        "lr": 0.05,
        "distill": 0.9,
    }


@pytest.mark.parametrize("macs", [0.4, 0.55])
def test_the_budget_is_met(macs: float) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is needed (extra demo)")
    train, test = cofire.data.digits()
    torch.manual_seed(0)
    model = cofire.create_backbone("resnet8_digits")
    fit(model, train.loader(64, train=True), Recipe(epochs=1, lr=0.1))
    gated = gate(model, SecondLook())
    fit(gated, train.loader(64, train=True), Recipe(epochs=1, head_lr=0.05, train="heads"))
    assert calibrate(gated, test.loader(360), macs=macs) == pytest.approx(macs, abs=0.005)
    report = evaluate(gated, test.loader(360), text="")
    assert 1 - report.reduction["executed+heads"] == pytest.approx(macs, abs=0.005)
    looked_twice = report.keep_rate["whole"]
    assert report.bits == pytest.approx(bits_per_filter(torch.tensor([looked_twice])))
    with pytest.raises(ConfigError, match=r"macs=0\.2 cannot be reached by a threshold: between 0\.29"):
        calibrate(gated, test.loader(360), macs=0.2)


@torch.no_grad()
def check_engine(engine: Engine, gated: GatedModel, x: Tensor) -> None:
    """Answers as PyTorch's, both looks counted, and the network's convs only for the images it looks at."""
    torch.testing.assert_close(engine(x), gated(x), atol=1e-5, rtol=1e-4)
    counted = gated.cost(input_shape=gated.last_shape).executed
    found = {layer: macs.tolist() for layer, macs in engine.last_macs.items() if not layer.startswith("gates.")}
    assert found == {layer: macs.tolist() for layer, macs in counted.items()}
    first = sum(macs for layer, macs in engine.last_macs.items() if layer.startswith("gates."))
    assert first.tolist() == [gated.gates.first_macs] * len(x)


def with_half_in_doubt(gated: GatedModel, x: Tensor) -> GatedModel:
    with torch.no_grad():
        gated.threshold = float(gated.gates.first(x)[0].median())
    return gated


@pytest.mark.parametrize(("name", "args"), [("resnet8_digits", {}), ("mobilenet_v2", {"width": 0.25})])
def test_the_engine_runs_the_network_only_where_it_is_needed(name: str, args: dict[str, Any]) -> None:
    torch.manual_seed(0)
    gated = gate(cofire.create_backbone(name, **args), SecondLook()).eval()
    x = torch.randn(8, *gated.graph.input_shape)
    with_half_in_doubt(gated, x)
    check_engine(cofire.compile(gated), gated, x)


def test_in_int8_engine_and_simulation_agree() -> None:
    gated, x = looking()
    quantized = cofire.quantize(gated, x)
    with torch.no_grad():
        assert torch.equal(cofire.compile(quantized)(x), quantized(x))


def test_it_goes_through_onnx(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is needed (extra dev)")
    gated, x = looking()
    to_onnx(gated, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    (found,) = session.run(None, {"images": x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), gated(x), atol=1e-5, rtol=1e-4)


def test_a_network_without_logits_is_refused_by_name() -> None:
    with pytest.raises(NoUnitError, match="must end in a linear layer that gives logits"):
        gate(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)), SecondLook(), input_shape=(3, 16, 16))


@pytest.mark.parametrize(
    ("options", "match"),
    [({"first": 1.0}, "first is a share"), ({"distill": 1.5}, "distill in"), ({"temperature": 0.0}, "temperature")],
)
def test_options_are_checked(options: dict[str, float], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        SecondLook(**options)
