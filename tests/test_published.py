"""Published weights: named by where they come from, known again by their tensors, in any format."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small import digest as whole_digest
from small import tiny_plain

from cofire import FileError, create_backbone, load_weights
from cofire.backbones import published
from cofire.backbones.published import PUBLISHED, Published
from cofire.errors import ConfigError
from cofire.experiments.recipes import parse_experiment
from cofire.experiments.runs import build_model, read_sets


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A weights folder, and weights of our own that count as published."""
    monkeypatch.setenv("COFIRE_WEIGHTS", str(tmp_path))
    entry = Published(origin="example.org/tiny.pth", tensors=published.digest(tiny_plain(seed=5).state_dict()))
    monkeypatch.setitem(PUBLISHED, "tiny", entry)
    return tmp_path


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".th"])
def test_any_format_of_the_same_tensors_will_do(suffix: str, home: Path) -> None:
    wanted = tiny_plain(seed=5)
    if suffix == ".safetensors":
        save_file(wanted.state_dict(), home / f"tiny{suffix}")
    else:
        torch.save({"state_dict": {f"module.{k}": v for k, v in wanted.state_dict().items()}}, home / f"tiny{suffix}")
    model = create_backbone("resnet8_digits", weights="published:tiny")
    assert whole_digest(model) == whole_digest(wanted)
    table = {"data": {"name": "digits"}, "backbone": {"name": "resnet8_digits", "weights": "published:tiny"}}
    experiment = parse_experiment(table)
    assert whole_digest(build_model(experiment, read_sets(experiment))) == whole_digest(wanted)


def test_other_tensors_are_refused_and_the_model_is_left_alone(home: Path) -> None:
    save_file(tiny_plain(seed=6).state_dict(), home / "tiny.safetensors")
    model = tiny_plain()
    before = whole_digest(model)
    with pytest.raises(FileError, match=r"tiny\.safetensors must hold the published weights 'tiny'.*example\.org"):
        load_weights(model, "published:tiny")
    assert whole_digest(model) == before


def test_an_original_file_may_be_known_by_its_own_digest(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(tiny_plain(seed=5).state_dict(), home / "tiny.pth")
    own = hashlib.sha256((home / "tiny.pth").read_bytes()).hexdigest()
    monkeypatch.setitem(PUBLISHED, "tiny", Published(origin="example.org/tiny.pth", file=own[:8]))
    assert whole_digest(create_backbone("resnet8_digits", weights="published:tiny")) == whole_digest(tiny_plain(seed=5))
    monkeypatch.setitem(PUBLISHED, "tiny", Published(origin="example.org/tiny.pth", file="0" * 8))
    with pytest.raises(FileError, match=rf"whose file has SHA-256 0+, got {own}"):
        create_backbone("resnet8_digits", weights="published:tiny")


@pytest.mark.parametrize("entry", PUBLISHED.values(), ids=list(PUBLISHED))
def test_all_that_is_published_can_be_known_again(entry: Published) -> None:
    assert (len(entry.tensors) == 64) != (len(entry.file) >= 8)
    assert entry.file in entry.origin


def test_a_missing_file_says_where_to_get_it_and_where_to_put_it(home: Path) -> None:
    with pytest.raises(FileError, match=rf"get them from example\.org.*{home}/tiny\.safetensors.*COFIRE_WEIGHTS"):
        create_backbone("resnet8_digits", weights="published:tiny")
    with pytest.raises(ConfigError, match=r"unknown published weights 'tinny'; did you mean 'tiny'"):
        create_backbone("resnet8_digits", weights="published:tinny")


def test_the_folder_is_in_the_cache_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COFIRE_WEIGHTS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert published.weights_root() == tmp_path / ".cache" / "cofire" / "weights"
