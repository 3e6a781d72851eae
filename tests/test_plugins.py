"""Code from outside: what a user names or has installed is imported; what a file names is not."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import zoo
from small import tiny_gated
from test_cli import Cofire

from cofire import CofireError, ConfigError, FileError, create_backbone, gate, list_backbones, load, plugins, save
from cofire.backbones.packages import Packaged
from cofire.experiments.recipes import parse_experiment, read_experiment
from cofire.experiments.runs import eval_run, train_experiment
from cofire.gates import DEFAULT
from cofire.gates.persistence import read_card

NUMBER = itertools.count()  # names are registered once in a process
METHOD = """
from dataclasses import dataclass
from cofire import AbstractMethod, Decision, GateConfig, register_method

@dataclass(frozen=True, kw_only=True)
class {name}(GateConfig):
    knob: float = 0.5

@register_method({name})
class Method(AbstractMethod):
    def decide(self, site, x):
        return Decision(None, x.new_ones(()).expand(len(x), site.filters))

    def loss(self, step):
        return step.logits_BK.new_zeros(())
"""
CRITERION = '''
from dataclasses import dataclass
import torch
from cofire import PruneConfig, register_criterion

@dataclass(frozen=True, kw_only=True)
class {name}(PruneConfig):
    """The first filters leave."""

@register_criterion({name})
def score(model, channels, loader, config):
    return {{group: torch.arange(size, dtype=torch.float64) for group, size in channels.sizes.items()}}
'''
BACKBONE = """
from torch import nn
from cofire import Backbone, register_backbone

class Net(Backbone):
    def __init__(self, num_classes, width):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 8, 3, padding=1)
        self.last = nn.Linear(8, num_classes)

    def forward(self, x):
        return self.last(self.second(self.first(x).relu()).relu().mean((2, 3)))

@register_backbone("{name}", input_shape=(1, 8, 8))
def net(num_classes: int = 10, *, width: int = 8):
    return Net(num_classes, width)
"""
KINDS = {
    "gate": (METHOD, '[gate]\ntype = "{name}"\nknob = 0.25\n'),
    "prune": (CRITERION, '[prune]\ntype = "{name}"\nmacs = 0.6\n'),
    "backbone": (BACKBONE, ""),
}
RECIPE = """
[data]
name = "synthetic"
batch_size = 8
args = {{train = 16, test = 8, shape = {shape}}}
[backbone]
name = "{backbone}"
[train]
epochs = 1
"""


@pytest.fixture
def cofire(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cofire:
    return Cofire(capsys, monkeypatch)


def outside(folder: Path, kind: str) -> tuple[Path, Path, str]:
    """A plugin file, a recipe that needs it, and the name they share."""
    code, section = KINDS[kind]
    name = f"Outside{next(NUMBER)}"
    plugin, recipe = folder / f"{kind}_plugin.py", folder / "own.toml"
    plugin.write_text(code.format(name=name))
    backbone = name if kind == "backbone" else "resnet8_digits"
    recipe.write_text(RECIPE.format(backbone=backbone, shape=[1, 8, 8]) + section.format(name=name))
    return plugin, recipe, name


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_named_on_the_command_line_serves_every_command(kind: str, cofire: Cofire, tmp_path: Path) -> None:
    plugin, recipe, name = outside(tmp_path, kind)
    said = cofire.fails("train", recipe, "--out", tmp_path / "run")
    assert f"'{name}'" in said
    assert "cofire --plugin FILE" in " ".join(said.split())
    result = cofire.json("--plugin", plugin, "train", recipe, "--out", tmp_path / "run")
    assert name in json.dumps(result["experiment"])
    assert cofire.json("--plugin", plugin, "eval", tmp_path / "run")["top1"] == result["test"]["top1"]
    known = cofire.json("info")
    assert name in {"gate": known["gates"], "prune": known["criteria"], "backbone": known["backbones"]}[kind]


def test_a_run_of_a_plugin_says_what_is_missing(tmp_path: Path) -> None:
    save(tiny_gated(), tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace(f'"{DEFAULT.__name__}"', '"Elsewhere"'))
    with pytest.raises(ConfigError, match=r"unknown gate type 'Elsewhere'.*name that file: cofire --plugin FILE"):
        load(tmp_path / "model")


def test_several_files_may_be_named_and_one_twice(cofire: Cofire, tmp_path: Path) -> None:
    (first, _, one), (second, _, two) = (outside(tmp_path, kind) for kind in ("gate", "backbone"))
    known = cofire.json("--plugin", first, "--plugin", second, "--plugin", first, "info")
    assert (one in known["gates"], two in known["backbones"]) == (True, True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("def (", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_broken_file_is_named_with_its_error(text: str, said: str, cofire: Cofire, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(text)
    flat = " ".join(cofire.fails("--plugin", tmp_path / "broken.py", "info").split())
    assert f"plugin {tmp_path / 'broken.py'} cannot be imported: {said}" in flat


@pytest.mark.parametrize("name", ["gone.py", "a.txt", "."])
def test_a_plugin_must_be_a_python_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(FileError, match="a plugin must be a Python file"):
        plugins.load_plugin(tmp_path / name)


# Installed packages


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a method in an installed package, which has a broken plugin too."""
    name, package = f"Installed{next(NUMBER)}", f"own_package_{next(NUMBER)}"
    (tmp_path / f"{package}.py").write_text(METHOD.format(name=name))
    described = tmp_path / f"{package}-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(f"[cofire.plugins]\na_broken = {package}_gone\nwhole = {package}\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugins.load_installed.cache_clear()
    return name


def test_an_installed_method_is_found_by_its_name(installed: str, caplog: pytest.LogCaptureFixture) -> None:
    table = {"data": {"name": "digits"}, "backbone": {"name": "resnet8_digits"}, "gate": {"type": installed}}
    assert type(parse_experiment(table).gate).__name__ == installed
    assert len(caplog.records) == 1
    assert "the installed plugin 'a_broken'" in caplog.text


def test_known_names_import_no_installed_package(installed: str, caplog: pytest.LogCaptureFixture) -> None:
    parse_experiment({"data": {"name": "digits"}, "backbone": {"name": "resnet8_digits"}, "gate": {}})
    create_backbone("resnet8_digits")
    assert caplog.records == []
    list_backbones()
    assert "the installed plugin 'a_broken'" in caplog.text


# What a file says is never imported


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module in the working folder and on the path that leaves a mark when it is imported."""
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


NAMES = [
    "trap",
    "trap.py",
    "./trap.py",
    "trap:Trap",
    "trap.Trap",
    "timm:trap",
    "timm:local-dir:.",
    "torchvision:../trap",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("section", ["gate", "prune", "backbone"])
def test_a_recipe_that_names_code_does_not_import_it(name: str, section: str, trap: Path) -> None:
    table: dict[str, Any] = {"data": {"name": "digits"}, "backbone": {"name": "resnet8_digits"}}
    table[section] = {"name": name} if section == "backbone" else {"type": name, "macs": 0.5}
    with pytest.raises(CofireError):
        train_experiment(parse_experiment(table), trap / "run")
    assert not (trap / "sprung").exists()
    assert "trap" not in sys.modules


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("section", ["gate", "backbone"])
def test_a_model_file_that_names_code_does_not_import_it(name: str, section: str, trap: Path) -> None:
    save(tiny_gated(), trap / "model")
    config = json.loads((trap / "model" / "config.json").read_text())
    config[section]["name" if section == "backbone" else "type"] = name
    config["plugin"] = config["plugins"] = ["trap.py"]
    (trap / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CofireError):
        load(trap / "model")
    assert not (trap / "sprung").exists()


# Networks of timm and torchvision

needs_packages = pytest.mark.skipif(bool(zoo.why_not), reason=zoo.why_not or "they are here")


@needs_packages
@pytest.mark.parametrize("name", ["timm:resnet18", "torchvision:resnet18"])
def test_a_network_of_another_package_is_a_backbone_like_any_other(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(RECIPE.format(backbone=name, shape=[3, 32, 32]) + "[gate]\nratio = 0.8\n")
    experiment = read_experiment(tmp_path / "a.toml")
    result = train_experiment(experiment, tmp_path / "run")
    assert eval_run(tmp_path / "run").to_json()["top1"] == result["test"]["top1"]
    model = load(tmp_path / "run")
    assert (model.graph.input_shape, model.backbone.input_shape) == ((3, 32, 32), (3, 32, 32))
    assert model.backbone.spec.name == name
    assert model.backbone.net.fc.out_features == 10
    assert read_card(tmp_path / "run").input_shape == (3, 32, 32)


@needs_packages
def test_a_file_with_the_package_s_own_keys_can_be_loaded(tmp_path: Path) -> None:
    import torch

    own = zoo.build("timm/resnet18", num_classes=3)
    torch.save(own.state_dict(), tmp_path / "own.pth")
    model = create_backbone("timm:resnet18", num_classes=3, weights=tmp_path / "own.pth").eval()
    assert isinstance(model, Packaged)
    assert model.input_shape == (3, 224, 224)
    x = torch.rand(2, 3, 64, 64)
    assert torch.equal(model(x), own(x))
    assert gate(model, DEFAULT(), input_shape=(3, 64, 64)).gates["net.layer1.0.conv1"]


@needs_packages
@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("timm:resnet18x", {}, "timm has no classifier named 'resnet18x'; did you mean .*'resnet18'"),
        ("torchvision:fasterrcnn_resnet50_fpn", {}, "torchvision has no classifier named"),
        ("timm:resnet18", {"pretrained": True}, "pretrained is no argument of backbone 'timm:resnet18' here"),
        ("timm:resnet18", {"checkpoint_path": "x.pth"}, "checkpoint_path is no argument"),
        ("torchvision:resnet18", {"weights_only": 1}, "weights_only is no argument"),
        ("timm:resnet18", {"widht": 2}, "timm cannot make 'resnet18': TypeError"),
        ("keras:resnet18", {}, "unknown library of backbones 'keras'; known: timm, torchvision"),
    ],
)
def test_what_another_package_cannot_make_is_named(name: str, args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        create_backbone(name, **args)


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match=r"(?s)need the package timm, which fails to import.*pip install timm"):
        create_backbone("timm:resnet18")
