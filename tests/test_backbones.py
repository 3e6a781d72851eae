"""Tests of the backbones: laws over every registered name, sizes known from the literature, loud loading."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

from cofire.backbones import (
    Backbone,
    create_backbone,
    list_backbones,
    load_weights,
    register_backbone,
    registry,
)
from cofire.errors import ConfigError, FileError

SHARED = Path(os.environ.get("COFIRE_SHARED", Path(__file__).parents[2] / "shared"))

NUM_CONV_MACS = {"vgg16_bn": 313_196_544, "resnet56": 125_485_056, "mobilenet_v1": 46_344_192}
# as published with the checkpoints of torchvision; MobileNetV1: 4.2 million in the paper
NUM_PARAMETERS = {
    "vgg11_imagenet": 132_863_336,
    "vgg11_bn_imagenet": 132_868_840,
    "vgg13_imagenet": 133_047_848,
    "vgg13_bn_imagenet": 133_053_736,
    "vgg16_imagenet": 138_357_544,
    "vgg16_bn_imagenet": 138_365_992,
    "vgg19_imagenet": 143_667_240,
    "vgg19_bn_imagenet": 143_678_248,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "mobilenet_v1_imagenet": 4_231_976,
    "mobilenet_v2_imagenet": 3_504_872,
}
SOME_TORCHVISION_KEYS = {
    "vgg16_imagenet": ["features.28.weight", "classifier.6.bias"],
    "vgg16_bn_imagenet": ["features.40.weight", "features.41.running_var", "classifier.0.weight"],
    "resnet18": ["layer2.0.downsample.0.weight", "layer4.1.bn2.running_mean", "fc.weight"],
    "resnet50": ["layer1.0.downsample.1.weight", "layer4.2.conv3.weight", "fc.bias"],
    "mobilenet_v2_imagenet": [
        "features.0.0.weight",
        "features.1.conv.1.weight",
        "features.17.conv.1.0.weight",
        "features.17.conv.3.running_var",
        "features.18.1.bias",
        "classifier.1.weight",
    ],
}


def on_meta(name: str, **args: int | float | bool) -> Backbone:
    """The network without memory: shapes, keys and MACs only, whatever its size."""
    with torch.device("meta"):
        return create_backbone(name, **args).eval()


def small(name: str = "resnet20", **args: int | float | bool) -> Backbone:
    return create_backbone(name, **args).eval()


@pytest.fixture
def registry_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))


@pytest.mark.parametrize("name", list_backbones())
def test_logits_have_one_column_per_class(name: str) -> None:
    model = on_meta(name, num_classes=7)
    assert model(torch.empty(2, *model.input_shape, device="meta")).shape == (2, 7)


@pytest.mark.parametrize("name", list_backbones("*_imagenet") + list_backbones("resnet??"))
def test_default_number_of_classes_follows_the_input_shape(name: str) -> None:
    model = on_meta(name)
    assert model.spec.args["num_classes"] == {32: 10, 224: 1000}[model.input_shape[1]]


@pytest.mark.parametrize("name", [name for name in list_backbones() if not name.endswith("_imagenet")])
def test_random_network_gives_finite_logits_that_differ_between_images(name: str) -> None:
    torch.manual_seed(0)
    model = create_backbone(name).eval()
    with torch.no_grad():
        logits = model(torch.randn(2, model.input_shape[0], 32, 32))
    assert logits.isfinite().all()
    assert not torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("name", list_backbones())
def test_every_backbone_can_be_traced(name: str) -> None:
    model = on_meta(name)
    traced = fx.symbolic_trace(model)
    targets = {node.target for node in traced.graph.nodes if node.op == "call_module"}
    assert {key for key, module in model.named_modules() if isinstance(module, nn.Conv2d)} <= targets


def test_traced_network_computes_the_same() -> None:
    model, x = small(), torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(fx.symbolic_trace(model)(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", list_backbones())
def test_spec_is_json_survives_deepcopy_and_builds_the_same_network(name: str) -> None:
    model = on_meta(name, num_classes=3)
    spec = copy.deepcopy(model).spec
    assert spec == model.spec
    assert copy.deepcopy(model).input_shape == model.input_shape
    again = on_meta(spec.name, **json.loads(json.dumps(spec.args)))
    assert again.spec == spec
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in model.state_dict().items()}


@pytest.mark.parametrize(("name", "macs"), NUM_CONV_MACS.items())
def test_conv_macs_are_the_known_ones(name: str, macs: int) -> None:
    model = on_meta(name)
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(1, *model.input_shape, device="meta"))
    assert counter.get_flop_counts()["Global"][torch.ops.aten.convolution] == 2 * macs


@pytest.mark.parametrize(("name", "count"), NUM_PARAMETERS.items())
def test_parameters_are_as_many_as_published(name: str, count: int) -> None:
    assert sum(p.numel() for p in on_meta(name).parameters()) == count


@pytest.mark.parametrize(("name", "keys"), SOME_TORCHVISION_KEYS.items())
def test_imagenet_networks_have_the_keys_of_torchvision(name: str, keys: list[str]) -> None:
    assert set(keys) <= set(on_meta(name).state_dict())


@pytest.mark.parametrize("name", list_backbones("mobilenet*"))
@pytest.mark.parametrize("width", [0.5, 0.75])
def test_width_narrows_a_mobilenet(name: str, width: float) -> None:
    wide, narrow = (sum(p.numel() for p in on_meta(name, width=w).parameters()) for w in (1.0, width))
    assert narrow < wide
    assert on_meta(name, width=1).spec == on_meta(name).spec


def test_tensorflow_form_keeps_shapes_and_reads_below_and_right() -> None:
    model = small("mobilenet_v1_imagenet", num_classes=2, width=0.25, tensorflow=True)
    shapes = {}
    for key, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda m, i, y, key=key: shapes.__setitem__(key, y.shape[-1]))
    x = torch.randn(1, 3, 64, 64)
    model(x)
    assert (shapes["conv1"], shapes["blocks.1.dw"], shapes["blocks.12.pw"]) == (32, 16, 2)
    first = model.conv1(nn.functional.pad(x, (0, 1, 0, 1)))[0, :, 0, 0]
    torch.testing.assert_close(first, (model.conv1.weight * x[:, :, :3, :3]).sum((1, 2, 3)))


def test_zero_pad_shortcut_puts_the_channels_in_the_middle() -> None:
    shortcut = small().get_submodule("layer2.0.downsample")
    x = torch.randn(1, 16, 4, 4)
    y = shortcut(x)
    assert y.shape == (1, 32, 2, 2)
    assert torch.equal(y[:, 8:24], x[:, :, ::2, ::2])
    assert y[:, :8].abs().sum() == y[:, 24:].abs().sum() == 0


def test_list_is_filtered_by_pattern() -> None:
    assert list_backbones("mobilenet_v1*") == ["mobilenet_v1", "mobilenet_v1_imagenet"]
    assert list_backbones("no-such-*") == []


def test_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown backbone 'resnet57'; did you mean 'resnet56'\? known: mob"):
        create_backbone("resnet57")


def test_unknown_argument_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"argument of backbone 'mobilenet_v1' 'widht'; did you mean 'width'\?"):
        create_backbone("mobilenet_v1", widht=0.5)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"num_classes": 0}, "num_classes .* must be at least 1, got 0"),
        ({"num_classes": 2.5}, "num_classes .* must be of type int, got 2.5"),
        ({"width": "half"}, "width of backbone 'mobilenet_v1' must be of type float, got 'half'"),
        ({"width": -1.0}, "width of a MobileNet must be above 0 and finite, got -1.0"),
        ({"width": float("nan")}, "must be above 0 and finite, got nan"),
        ({"tensorflow": 1}, "tensorflow .* must be of type bool, got 1"),
    ],
)
def test_argument_out_of_its_range_is_refused(args: dict[str, float], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        create_backbone("mobilenet_v1", **args)


@pytest.mark.usefixtures("registry_copy")
def test_name_can_be_registered_once() -> None:
    @register_backbone("tiny", input_shape=(3, 8, 8))
    def tiny(num_classes: int) -> Backbone:
        return small("resnet20", num_classes=num_classes)

    assert create_backbone("tiny", num_classes=4).spec.name == "tiny"
    assert create_backbone("tiny", num_classes=4).input_shape == (3, 8, 8)
    with pytest.raises(ConfigError, match="backbone 'tiny' must be given num_classes"):
        create_backbone("tiny")
    with pytest.raises(ConfigError, match="backbone 'tiny' is registered already"):
        register_backbone("tiny", input_shape=(3, 8, 8))(tiny)


@pytest.mark.usefixtures("registry_copy")
def test_factory_must_take_num_classes_and_return_a_backbone() -> None:
    with pytest.raises(ConfigError, match=r"must take num_classes, got \['classes'\]"):
        register_backbone("wrong", input_shape=(3, 8, 8))(lambda classes: small())
    register_backbone("plain", input_shape=(3, 8, 8))(lambda num_classes=10: nn.Linear(2, 2))  # type: ignore
    with pytest.raises(ConfigError, match="must return a Backbone, got Linear"):
        create_backbone("plain")


def save(path: Path, content: object) -> Path:
    if path.suffix == ".safetensors":
        registry.safetensors.torch.save_file(content, path)
    else:
        torch.save(content, path)
    return path


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth"])
def test_weights_come_back_from_a_file(tmp_path: Path, name: str) -> None:
    model = small()
    path = save(tmp_path / name, model.state_dict())
    again = create_backbone("resnet20", weights=str(path)).state_dict()
    assert all(torch.equal(again[key], tensor) for key, tensor in model.state_dict().items())


def test_wrapped_parallel_checkpoint_with_foreign_names_loads(tmp_path: Path) -> None:
    model = small()
    foreign = {
        "module." + key.replace("linear.", "fc."): tensor
        for key, tensor in model.state_dict().items()
        if not key.endswith("num_batches_tracked")
    }
    path = save(tmp_path / "w.th", {"state_dict": foreign, "epoch": 3})
    again = create_backbone("resnet20", weights=path).state_dict()
    assert all(torch.equal(again[key], tensor) for key, tensor in model.state_dict().items())


def test_mobilenet_knows_the_other_spelling_of_its_keys() -> None:
    keys = ["layers.0.conv1.weight", "layers.12.bn2.running_var", "linear.bias", "blocks.3.pw.weight"]
    own = ["blocks.0.dw.weight", "blocks.12.pw_bn.running_var", "fc.bias", "blocks.3.pw.weight"]
    model = on_meta("mobilenet_v1")
    assert [model.own_key(key) for key in keys] == own
    assert set(own) <= set(model.state_dict())


def test_plain_modules_can_be_loaded_too(tmp_path: Path) -> None:
    source, model = nn.Linear(2, 3), nn.Linear(2, 3)
    load_weights(model, save(tmp_path / "w.safetensors", source.state_dict()))
    assert torch.equal(model.weight, source.weight)


def test_weights_of_other_shape_are_refused_and_leave_the_model_alone(tmp_path: Path) -> None:
    path = save(tmp_path / "w.safetensors", small(num_classes=100).state_dict())
    model = small()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(FileError, match=r"wrong shape: linear.weight must be \(10, 64\), got \(100, 64\)"):
        load_weights(model, path)
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


def test_missing_and_unexpected_keys_are_named(tmp_path: Path) -> None:
    path = save(tmp_path / "w.safetensors", {"conv1.weight": torch.zeros(16, 3, 3, 3), "extra": torch.zeros(1)})
    text = "does not fit resnet20; missing: bn1.weight, .* and 93 more; unexpected: extra"
    with pytest.raises(FileError, match=text):
        load_weights(small(), path)


def test_key_under_two_names_is_refused(tmp_path: Path) -> None:
    weights = small().state_dict()
    path = save(tmp_path / "w.pth", {**weights, "fc.bias": weights["linear.bias"]})
    with pytest.raises(FileError, match=r"holds 'linear.bias' twice"):
        load_weights(small(), path)


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.99])
def test_truncated_file_is_refused(tmp_path: Path, name: str, share: float) -> None:
    path = save(tmp_path / name, small().state_dict())
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(FileError, match=rf"{name}' is truncated, damaged or holds more than tensors"):
        load_weights(small(), path)


def test_pickled_code_is_not_executed(tmp_path: Path) -> None:
    path = save(tmp_path / "w.pth", nn.Linear(2, 2))
    with pytest.raises(FileError, match="holds more than tensors"):
        load_weights(nn.Linear(2, 2), path)


@pytest.mark.parametrize("content", [[1, 2], {"epoch": 3}, {1: torch.zeros(1)}])
def test_checkpoint_without_state_dict_is_refused(tmp_path: Path, content: object) -> None:
    with pytest.raises(FileError, match="must hold a state dict of tensors"):
        load_weights(small(), save(tmp_path / "w.pth", content))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"weights file '.*nowhere.safetensors' does not exist"):
        create_backbone("resnet20", weights=tmp_path / "nowhere.safetensors")


@pytest.mark.parametrize(
    ("file", "name", "args"),
    [
        ("resnet20_cifar10.safetensors", "resnet20", {}),
        ("resnet56_cifar10.safetensors", "resnet56", {}),
        ("mobilenet_v1_imagenet.safetensors", "mobilenet_v1_imagenet", {"tensorflow": True}),
    ],
)
def test_stored_weights_fit(file: str, name: str, args: dict[str, bool]) -> None:
    path = SHARED / "weights" / file
    if not path.is_file():
        pytest.skip(f"{file} is not on this machine (set COFIRE_SHARED to the folder that holds weights/)")
    model = create_backbone(name, weights=path, **args)
    stored = registry.safetensors.torch.load_file(path)
    state = model.state_dict()
    assert {key for key in state if not key.endswith("num_batches_tracked")} == {
        key for key in stored if not key.endswith("num_batches_tracked")
    }
    assert all(torch.equal(state[key], tensor) for key, tensor in stored.items())
