"""Laws of save and load: the same logits come back, and a folder that is not what it should be says so."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import OwnNet, digest, tiny_gated, tiny_plain
from torch import nn

from cofire import FTWT, CofireError, ConfigError, FileError, GatedModel, create_backbone, gate, load, save
from cofire.files.strict import unstructure
from cofire.gates.persistence import gate_config_from

X = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
X_OWN = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def own_gated(**options: Any) -> GatedModel:
    torch.manual_seed(0)
    return gate(OwnNet(), FTWT(always=True, **options), input_shape=(3, 8, 8))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# Round trips


@pytest.mark.parametrize("make", [tiny_gated, tiny_plain])
def test_a_saved_model_comes_back_with_the_same_logits(tmp_path: Path, make: Any) -> None:
    model = make().eval()
    assert save(model, tmp_path / "a") == tmp_path / "a"
    torch.manual_seed(123)
    loaded = load(tmp_path / "a")
    assert type(loaded) is type(model)
    assert not loaded.training
    assert digest(loaded) == digest(model)
    assert torch.equal(loaded(X), model(X))


def test_a_backbone_s_arguments_come_back(tmp_path: Path) -> None:
    model = create_backbone("mobilenet_v1", num_classes=7, width=0.5)
    save(model, tmp_path)
    assert load(tmp_path)(torch.zeros(1, 3, 32, 32)).shape == (1, 7)


@pytest.mark.parametrize("gated", [True, False])
def test_a_user_s_own_model_is_filled_into_the_one_that_is_passed(tmp_path: Path, gated: bool) -> None:
    model = own_gated() if gated else OwnNet()
    save(model.eval(), tmp_path)
    other = OwnNet()
    before = digest(other)
    loaded = load(tmp_path, model=other)
    assert torch.equal(loaded(X_OWN), model(X_OWN))
    assert digest(other) == before
    with pytest.raises(ConfigError, match=r"not one of cofire's backbones: pass it, load\(path, model=\.\.\.\)"):
        load(tmp_path)


def test_threshold_config_groups_and_input_shape_come_back(tmp_path: Path) -> None:
    config = FTWT.preset("official", ratio=0.7, mode="joint")
    gated = gate(tiny_plain(), config, filter_fn=lambda unit: unit.role == "residual", input_shape=(1, 16, 16))
    gated.threshold = 0.25
    gated.save(tmp_path)
    loaded = load(tmp_path)
    assert isinstance(loaded, GatedModel)
    assert loaded.config == config
    assert loaded.threshold == 0.25
    assert list(loaded.gates) == list(gated.gates) == ["layer1.0.conv2", "layer2.0.conv2", "layer3.0.conv2"]
    assert loaded.graph.input_shape == (1, 16, 16)
    assert str(loaded.units) == str(gated.units)


def test_a_signature_comes_back(tmp_path: Path) -> None:
    groups = {name: 3 for name in tiny_gated().gates}
    gated = tiny_gated(signature=groups).eval()
    gated.save(tmp_path)
    loaded = load(tmp_path)
    with loaded.force("targets"), gated.force("targets"):
        assert torch.equal(loaded(X), gated(X))
    assert {int(mask.sum(1).unique()) for mask in loaded.masks.values()} == {3}


def any_value(hint: Any) -> st.SearchStrategy[Any]:
    """Values of one field's type."""
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if type(None) in get_args(hint):
        return st.none() | st.dictionaries(st.text(max_size=5), any_value(get_args(get_args(hint)[0])[1]))
    if get_origin(hint) is tuple:
        return st.lists(st.integers(0, 99)).map(tuple)
    simple = {bool: st.booleans(), float: st.floats(0.01, 0.99), int: st.integers(1, 99), str: st.text(max_size=5)}
    return simple[hint]


def any_ftwt() -> st.SearchStrategy[FTWT]:
    hints = get_type_hints(FTWT)
    values = {field.name: any_value(hints[field.name]) for field in dataclasses.fields(FTWT)}
    return st.fixed_dictionaries(values).map(_possible)


def _possible(values: dict[str, Any]) -> FTWT:
    """The config of options drawn one by one, without those that exclude each other."""
    values = dict(values)
    if not values["bias"]:
        values["open_bias"], values["certain"] = 0.0, None
    if values["standardise"]:
        values["softmax"] = False
    if values["rank"]:
        values["hidden"] = 0
    if values["saliency"] == "gradient":
        values["targets"] = "self"
    if values["select"] == "top":
        values["signature"] = values["signature"] or {"a": 1}
    return FTWT(**values)


@given(any_ftwt())
@settings(deadline=None)
def test_every_option_of_ftwt_survives_json(config: FTWT) -> None:
    table = json.loads(json.dumps({"type": "FTWT", "fields": unstructure(config)}))
    assert gate_config_from(table, "here") == config


def test_saving_again_replaces_the_older_model(tmp_path: Path) -> None:
    save(tiny_plain(seed=1), tmp_path)
    save(tiny_gated(seed=2), tmp_path)
    assert digest(load(tmp_path)) == digest(tiny_gated(seed=2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("failing", ["config.json", "model.safetensors"])
def test_a_save_that_fails_leaves_the_older_files_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    save(tiny_gated(seed=1), tmp_path)
    before = (tmp_path / failing).read_bytes()
    original = os.replace

    def fails(source: Any, target: Any) -> None:
        if Path(target).name == failing:
            raise OSError("disk full")
        original(source, target)

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(FileError, match=f"{failing} cannot be written: disk full"):
        save(tiny_gated(seed=2), tmp_path)
    assert (tmp_path / failing).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    load(tmp_path)


# Folders that are not what they should be


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tiny_gated(), tmp_path / "run")


def test_a_missing_folder_and_missing_files_are_named(saved: Path) -> None:
    with pytest.raises(FileError, match=r"nowhere holds no model: it has no config\.json"):
        load(saved / "nowhere")
    (saved / "model.safetensors").unlink()
    with pytest.raises(FileError, match=r"model\.safetensors does not exist"):
        load(saved)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"format": "cofire-model/99"}, "must have format 'cofire-model/1', got 'cofire-model/99'"),
        ({"format": None}, "must have format 'cofire-model/1', got None"),
        ({"gate": {"type": "FTWT", "fields": {"ratio": 2.0}}}, r"FTWT.ratio must be in \(0, 1\], got 2.0"),
        ({"gate": {"type": "FTWT", "fields": {"ration": 0.5}}}, "did you mean 'ratio'"),
        ({"gate": {"type": "FTWD", "fields": {}}}, "unknown gate type 'FTWD'; did you mean 'FTWT'"),
        ({"gate": {"fields": {}}}, "is damaged: KeyError"),
        ({"backbone": {"name": "resnet8_digit", "args": {}}}, "did you mean 'resnet8_digits'"),
        ({"backbone": {"name": "resnet20", "args": {}}}, "belongs to another model|is it the right one|does not run"),
        ({"backbone": 3}, "is damaged: TypeError"),
        ({"threshold": "high"}, "is damaged: ValueError"),
        ({"groups": ["conv1", "conv9"]}, r"has no units \['conv9'\]; is it the right one"),
        ({"groups": ["conv1"]}, "has unknown gates.*it belongs to another model"),
        ({"input_shape": [1]}, "damaged|input_shape|shape"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_config_that_does_not_fit_is_an_error(saved: Path, changes: dict[str, Any], error: str) -> None:
    edit_config(saved, **changes)
    with pytest.raises(CofireError, match=error):
        load(saved)


def test_a_config_that_is_no_table_is_an_error(saved: Path) -> None:
    (saved / "config.json").write_text("[1, 2]")
    with pytest.raises(FileError, match="must have format"):
        load(saved)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where in nested tables and lists something can be replaced."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(leaf for key, item in inner for leaf in leaves(item, (*path, key)))]


@given(data=st.data(), junk=st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3) | st.just([]))
@settings(deadline=None, max_examples=60)
def test_any_junk_in_a_config_gets_an_error_for_people_or_loads(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, junk: Any
) -> None:
    folder = save(tiny_gated(), tmp_path_factory.mktemp("junk"))
    config = json.loads((folder / "config.json").read_text())
    *path, last = data.draw(st.sampled_from([leaf for leaf in leaves(config) if leaf]))
    table = config
    for key in path:
        table = table[key]
    table[last] = copy.deepcopy(junk)
    (folder / "config.json").write_text(json.dumps(config))
    with contextlib.suppress(CofireError):
        assert isinstance(load(folder), nn.Module)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "foreign"])
def test_damaged_weights_are_an_error(saved: Path, damage: str) -> None:
    path = saved / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1000] ^= 4
    path.write_bytes({"truncated": content[:-1], "flipped": content, "foreign": b"PK\x03\x04" + bytes(99)}[damage])
    with pytest.raises(FileError, match={"flipped": "checksum is wrong"}.get(damage, "truncated or not a safetensors")):
        load(saved)


def test_weights_of_another_model_are_named(saved: Path, tmp_path: Path) -> None:
    save(tiny_plain(), tmp_path / "plain")
    (saved / "model.safetensors").write_bytes((tmp_path / "plain" / "model.safetensors").read_bytes())
    with pytest.raises(FileError, match=r"lacks gates\.conv1\.head.* and \d+ more; it belongs to another model"):
        load(saved)


def test_the_wrong_model_for_a_folder_is_an_error(tmp_path: Path) -> None:
    own_gated().save(tmp_path)
    with pytest.raises(CofireError):
        load(tmp_path, model=tiny_plain())
