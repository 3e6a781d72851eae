"""speedup: from a network and pictures to a program that keeps its budget; models and pictures by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small import digest
from torch import nn
from typer.testing import CliRunner

import cofire
from cofire import ConfigError, DataError, FileError, Recipe, create_backbone, data, fit
from cofire.cli import app
from cofire.files.card import Card
from cofire.speedup import whole
from cofire.speedup.distilling import _Shuffled
from cofire.speedup.measure import executed, spread_by_cost
from cofire.speedup.models import named_model
from cofire.speedup.pictures import read_pictures


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    torch.manual_seed(0)
    model = create_backbone("resnet8_digits")
    fit(model, data.digits()[0].loader(64, train=True), Recipe(epochs=3, lr=0.1, schedule="cosine"))
    return model.eval()


@pytest.fixture(scope="module")
def found(trained: nn.Module) -> cofire.Speedup:
    return cofire.speedup(trained, data.digits()[0].loader(200), macs=0.6)


def test_the_budget_is_met_and_the_answers_are_mostly_the_dense_networks(
    trained: nn.Module, found: cofire.Speedup
) -> None:
    assert found.macs == pytest.approx(0.6, abs=0.005)
    assert (found.fitted_on, found.held_out) == (1150, 287)
    assert found.twin_agreement < found.agreement <= 1
    assert set(found.milliseconds) == {"engine, dense", "engine, gated", "PyTorch, dense"}
    assert min(found.milliseconds.values()) > 0
    x = torch.cat([x for x, _ in data.digits()[0].loader(200)])[4::5]
    with torch.no_grad():
        same = (found.engine(x).argmax(1) == trained(x).argmax(1)).double().mean()
    assert float(same) == pytest.approx(found.agreement, abs=1 / 287)


def test_what_is_deployed_is_trimmed_and_computes_the_same(found: cofire.Speedup) -> None:
    x = torch.cat([x for x, _ in data.digits()[0].loader(200)])[:100]
    with torch.no_grad():
        torch.testing.assert_close(found.model(x), found.gated(x), rtol=1e-3, atol=1e-3)
    size = [sum(p.numel() for p in model.parameters()) for model in (found.model, found.gated)]
    assert size[0] < size[1]


def test_distilling_keeps_what_agrees_best_and_leaves_the_model_alone(trained: nn.Module) -> None:
    before = digest(trained)
    found = cofire.speedup(trained, data.digits()[0].loader(200), macs=0.4, distill=2)
    assert digest(trained) == before
    assert set(found.tried) == {"gates fitted", "gates, network distilled", "gates fitted again", "a second look"}
    assert found.agreement == max(found.tried.values()) > found.tried["gates fitted"]
    assert found.twin_agreement <= found.agreement
    assert found.macs == pytest.approx(0.4, abs=0.01)


def test_the_images_that_are_timed_cost_what_all_cost_in_the_mean(trained: nn.Module) -> None:
    train = data.digits()[0]
    looking = cofire.gate(trained, cofire.SecondLook())
    cofire.calibrate(looking, train.loader(200), macs=0.55, images=1000)
    batches = [x for x, _ in train.take(slice(0, 1000)).loader(200)]
    costs = executed(looking, batches)
    assert len(costs.unique()) == 2  # one look, or two
    some = executed(looking, [spread_by_cost(looking, batches)])
    assert float(some.mean() / costs.mean()) == pytest.approx(1.0, abs=0.05)


def test_a_latency_is_searched_for(trained: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def milliseconds(engines: dict[str, Any], model: nn.Module, batches: torch.Tensor) -> dict[str, float]:
        """Proportional to the MACs executed."""
        x, found = batches[:20], {}
        for name, engine in engines.items():
            engine(x)
            found[name] = float(sum(macs.mean() for macs in engine.last_macs.values())) / 1e5
        return found

    monkeypatch.setattr(whole, "timed", milliseconds)
    dense = sum(cofire.cost(cofire.trace(trained), {}).dense.values()) / 1e5
    found = cofire.speedup(trained, data.digits()[0].loader(200), latency_ms=0.7 * dense)
    assert 0.64 * dense <= found.milliseconds["engine, gated"] <= 0.72 * dense
    with pytest.raises(ConfigError, match="the dense network takes"):
        cofire.speedup(trained, data.digits()[0].loader(200), latency_ms=2 * dense)
    with pytest.raises(ConfigError, match="latency_ms=1e-06 cannot be reached"):
        cofire.speedup(trained, data.digits()[0].loader(200), latency_ms=1e-6)


def test_one_budget_and_enough_images(trained: nn.Module) -> None:
    with pytest.raises(ConfigError, match="takes one budget, macs or latency_ms, got macs=None, latency_ms=None"):
        cofire.speedup(trained, data.digits()[0].loader(200))
    with pytest.raises(ConfigError, match=r"must be in \(0, 1\), got 2"):
        cofire.speedup(trained, data.digits()[0].loader(200), macs=2)
    with pytest.raises(DataError, match="at least 10 images"):
        cofire.speedup(trained, [torch.zeros(3, 1, 8, 8)], macs=0.5)


def test_every_image_comes_once_in_an_epoch_in_another_order_in_the_next() -> None:
    batches = [torch.arange(30.0).view(30, 1, 1, 1), 30 + torch.arange(70.0).view(70, 1, 1, 1)]
    shuffled = _Shuffled(batches)
    first, second = ([int(one) for x, _ in shuffled for one in x.flatten()] for _ in range(2))
    assert len(shuffled) == 2
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second


# On the command line


def saved_digits(folder: Path, n: int = 120) -> Path:
    """Digits as pictures, some in a folder of their own."""
    pixels = data.digits()[0].pixels_NCHW[:n, 0].numpy()
    (folder / "deep").mkdir(parents=True)
    for number, picture in enumerate(pixels):
        Image.fromarray(picture).save(folder / ("deep" if number % 2 else "") / f"{number}.png")
    return folder


def test_from_a_folder_of_pictures_to_a_program(trained: nn.Module, tmp_path: Path) -> None:
    card = Card(input_shape=(1, 8, 8), mean=(0.305,), std=(0.376,), classes=tuple("0123456789"))
    cofire.save(trained, tmp_path / "dense", card)
    pictures = saved_digits(tmp_path / "pictures")
    arguments = ["--images", str(pictures), "--macs", "0.7", "--out", str(tmp_path / "out"), "--json"]
    result = CliRunner().invoke(app, ["speedup", str(tmp_path / "dense"), *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert told["macs"] == pytest.approx(0.7, abs=0.02)
    assert told["fitted_on"] == 96
    written = json.loads((tmp_path / "out" / "speedup.json").read_text())
    assert written["agreement"] == told["agreement"]
    engine = cofire.load_program(tmp_path / "out" / "model.cofire")
    loaded = cofire.load(tmp_path / "out")
    pixels = data.digits()[1].pixels_NCHW[:20].float() / 255
    with torch.no_grad():
        wanted = loaded((pixels - 0.305) / 0.376)
    torch.testing.assert_close(engine(pixels), wanted, rtol=1e-3, atol=1e-3)


def test_pictures_from_a_numpy_file(tmp_path: Path) -> None:
    card = Card(input_shape=(3, 4, 5), mean=(0.0,) * 3, std=(1.0,) * 3)
    pixels = np.random.default_rng(0).integers(0, 256, (7, 4, 5, 3), np.uint8)
    np.save(tmp_path / "last.npy", pixels)
    np.save(tmp_path / "first.npy", pixels.transpose(0, 3, 1, 2))
    for name in ("last", "first"):
        found = read_pictures(tmp_path / f"{name}.npy", card, 100)
        assert found.pixels(torch.arange(7)).tolist() == pixels.transpose(0, 3, 1, 2).tolist()
    assert len(read_pictures(tmp_path / "last.npy", card, 3)) == 3
    np.save(tmp_path / "wrong.npy", pixels.astype(np.float32))
    with pytest.raises(DataError, match=r"must hold uint8 pixels \(N, 3, 4, 5\) or \(N, 4, 5, 3\), got float32"):
        read_pictures(tmp_path / "wrong.npy", card, 100)
    (tmp_path / "no.npy").write_bytes(b"nothing")
    with pytest.raises(FileError, match="must be a NumPy file of pictures"):
        read_pictures(tmp_path / "no.npy", card, 100)


def test_models_by_name(trained: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(trained.state_dict(), tmp_path / "weights.pth")
    named = named_model("resnet8_digits", tmp_path / "weights.pth")
    assert digest(named.model) == digest(trained)
    assert named.card.input_shape == (1, 8, 8)
    monkeypatch.chdir(tmp_path)
    Path("my_networks_for_speedup.py").write_text(
        "import torch\n\ndef small():\n    return torch.nn.Conv2d(3, 2, 1)\n\ndef number():\n    return 3\n"
    )
    own = named_model("my_networks_for_speedup:small", size=64, mean=(0.5,) * 3)
    assert isinstance(own.model, nn.Conv2d)
    assert (own.card.input_shape, own.card.mean) == ((3, 64, 64), (0.5,) * 3)
    for name, problem in (
        ("my_networks_for_speedup:number", "must give an nn.Module, got int"),
        ("my_networks_for_speedup:none", "has no function 'none'"),
        ("no_such_module:f", "no_such_module:f must give a model, but raised ModuleNotFoundError"),
        ("resnet8_digits", "is no folder, and as the name of a network it needs --weights FILE"),
        ("zoo:resnet20_cifar10_ftwt", "has gates already"),
    ):
        with pytest.raises(ConfigError, match=problem):
            named_model(name)
