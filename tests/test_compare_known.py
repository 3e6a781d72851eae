"""cofire compare --known: a comparison goes on where its run folders are lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compared import write_recipe
from typer.testing import CliRunner

from cofire import ConfigError, FileError, compare, create_backbone
from cofire.cli import app
from cofire.comparison.known import read_comparison
from cofire.comparison.plot import plot
from cofire.comparison.table import Comparison, Row


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return write_recipe(tmp_path_factory.mktemp("known"), create_backbone("resnet8_digits"))


@pytest.fixture(scope="module")
def known(recipe: Path) -> Path:
    """Two rows and a refusal, of a comparison whose folders are gone."""
    out = recipe.parent / "lost"
    compare([recipe], methods="L1,FBS", macs=0.5, epochs=0, out=out, rounds=3)
    path = recipe.parent / "known.json"
    shutil.move(out / "tiny" / "0.5" / "comparison.json", path)
    shutil.rmtree(out)
    (network,) = json.loads(path.read_text())["networks"]
    assert {row["method"]: bool(row["time"]) for row in network["rows"]} == {"L1": True, "FBS": True}
    refused = {"result": None, "row": None, "refused": "the loss must be finite"}
    network["rows"].append({"method": "Random", "sort": "static", "time": None, "not_timed": None, "seeds": {}})
    network["rows"][-1]["seeds"]["0"] = refused
    path.write_text(json.dumps({"networks": [network]}))
    return path


def rows(found: Comparison) -> dict[str, Row]:
    return {row.method: row for row in found.networks[0].rows}


def by_method(path: Path) -> dict[str, Any]:
    (network,) = json.loads(path.read_text())["networks"]
    return {row["method"]: row for row in network["rows"]}


def test_only_what_is_missing_is_run_and_the_whole_table_is_written(recipe: Path, known: Path, tmp_path: Path) -> None:
    said: list[str] = []
    options: dict[str, Any] = {"macs": 0.5, "epochs": 0, "out": tmp_path, "known": known}
    found = compare([recipe], methods="L1,FPGM,FBS", rounds=0, say=said.append, **options)
    folder = tmp_path / "tiny" / "0.5"
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["FPGM-s0"]
    assert "tiny: 2 of 3 runs are known" in said
    assert set(rows(found)) == {"L1", "FPGM", "FBS", "Random"}
    before, after = by_method(known), by_method(folder / "comparison.json")
    for name in ("L1", "FBS"):
        assert after[name]["seeds"] == before[name]["seeds"]
        assert after[name]["time"] == before[name]["time"]
    assert rows(found)["Random"].refused == "the loss must be finite"  # still there, since it was not asked for
    assert rows(found)["FPGM"].results

    # what came out is a file that is known in its turn
    again = compare([recipe], methods="L1,FPGM", rounds=0, **(options | {"known": folder / "comparison.json"}))
    assert by_method(folder / "comparison.json") == after
    assert set(rows(again)) == set(rows(found))


def test_a_file_read_back_says_what_was_found(recipe: Path, tmp_path: Path) -> None:
    found = compare([recipe], methods="L1,FBS", macs=0.5, epochs=0, out=tmp_path, rounds=3)
    again = read_comparison(tmp_path / "tiny" / "0.5" / "comparison.json")
    assert again.to_markdown() == found.to_markdown()
    assert plot(again.networks[0]).get_suptitle() == "resnet8_digits on digits"


@pytest.mark.parametrize("content", ["{}", '{"networks": [{}]}', '{"networks": [{"rows": [{"seeds": []}]}]}'])
def test_a_damaged_file_is_not_read_back(content: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(content)
    with pytest.raises(FileError, match="file must be a"):
        read_comparison(tmp_path / "file")


def test_what_was_refused_and_other_seeds_are_run(recipe: Path, known: Path, tmp_path: Path) -> None:
    found = compare([recipe], methods="Random", macs=0.5, epochs=0, seeds=2, out=tmp_path, rounds=0, known=known)
    assert sorted(rows(found)["Random"].outcomes) == [0, 1]
    assert rows(found)["Random"].refused is None
    assert sorted(rows(found)["L1"].outcomes) == [0]


def test_times_of_other_rounds_stay_and_are_named(recipe: Path, known: Path, tmp_path: Path) -> None:
    found = compare([recipe], methods="L1,FPGM", macs=0.5, epochs=0, out=tmp_path, rounds=3, known=known)
    table = rows(found)
    assert table["L1"].time == by_method(known)["L1"]["time"]
    assert table["FPGM"].time is not None
    notes = [note for note in found.networks[0].notes() if "other rounds" in note]
    assert [note.partition(" ")[0] for note in notes] == ["L1", "FBS"]


@pytest.mark.parametrize(
    ("options", "differs"),
    [
        ({"epochs": 1}, "train.epochs"),
        ({"macs": 0.4}, "macs"),
        ({"overrides": ["train.lr=0.5", "data.val=300"]}, "data.val, train.lr"),
    ],
)
def test_rows_under_another_recipe_are_not_mixed_in(
    recipe: Path, known: Path, tmp_path: Path, options: dict[str, Any], differs: str
) -> None:
    asked: dict[str, Any] = {"macs": 0.5, "epochs": 0, **options}
    message = rf"holds another comparison of 'tiny' \(it differs in {differs}\), whose rows do not compare"
    with pytest.raises(FileError, match=message):
        compare([recipe], methods="L1", out=tmp_path / "out", rounds=0, known=known, **asked)
    assert not (tmp_path / "out").exists()


def test_a_file_of_something_else_is_refused_by_name(recipe: Path, known: Path, tmp_path: Path) -> None:
    def refused(text: str, error: type[Exception], message: str) -> None:
        path = tmp_path / "other.json"
        path.write_text(text)
        with pytest.raises(error, match=message):
            compare([recipe], methods="L1", macs=0.5, epochs=0, out=tmp_path / "out", rounds=0, known=path)

    text = known.read_text()
    refused("{}", FileError, r"other.json must be a table with 'networks'")
    refused('{"networks": [{}]}', FileError, r"other.json must be a comparison.json of cofire compare")
    refused(text.replace('"name": "tiny"', '"name": "big"'), FileError, r"under the recipe 'tiny', got \['big'\]")
    refused(text.replace('"method": "FBS"', '"method": "Mine"'), ConfigError, r"unknown method 'Mine'.*--plugin FILE")


def test_the_command_line_takes_the_file(recipe: Path, known: Path, tmp_path: Path) -> None:
    options = ["--methods", "L1", "--epochs", "0", "--rounds", "0", "--out", str(tmp_path), "--known", str(known)]
    done = CliRunner().invoke(app, ["compare", str(recipe), *options])
    assert done.exit_code == 0, done.output
    assert "1 of 1 runs are known" in done.stderr
    assert not (tmp_path / "tiny" / "0.5" / "L1-s0").exists()
