"""Numbers in the documents come from result files, and result files say where they come from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from small import ROOT
from test_cli import Cofire

from cofire.analysis.drawing import to_svg
from cofire.experiments.recipes import read_experiment
from cofire.experiments.runs import train_experiment
from cofire.results import DOCUMENTS, FIGURE, drawn, floors_tables, written

FILES = sorted((ROOT / "results").rglob("*.json"))
RECIPE = """# Tiny.
[data]
name = "synthetic"
batch_size = 8
args = {train = 16, test = 8, shape = [1, 8, 8]}
[backbone]
name = "resnet8_digits"
[train]
epochs = 1
"""


@pytest.fixture
def cofire(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cofire:
    return Cofire(capsys, monkeypatch)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_show_exactly_what_the_result_files_say(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    assert written(document, ROOT) == text, "run: cofire results table --write"


def test_the_figure_of_the_comparison_shows_what_its_file_says() -> None:
    shown = (ROOT / FIGURE).read_bytes()
    assert to_svg(drawn(ROOT), Path(FIGURE).stem) == shown, "run: cofire results table --write"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_result_names_machine_versions_and_commit(path: Path) -> None:
    origin = json.loads(path.read_text(encoding="utf-8"))["provenance"]
    assert {"cpu", "cores", "system"} <= origin["machine"].keys()
    assert all(origin[key] for key in ("commit", "torch", "cofire", "time"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_result_names_a_place_of_the_machine_that_made_it(path: Path) -> None:
    assert "../" not in (text := path.read_text(encoding="utf-8"))
    assert '"/' not in text


# cofire results


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with the recipes, results and documents of the project."""
    for name in ("recipes", "results", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def test_tables_are_printed_or_written_into_the_documents(cofire: Cofire, clone: Path) -> None:
    whole = {document: (clone / document).read_text() for document in DOCUMENTS}
    assert (
        whole["README.md"].split("<!-- end of results -->")[0].splitlines()[-1]
        in cofire("results", "table", "--root", clone).stdout
    )
    for document, text in whole.items():
        (clone / document).write_text(text.replace("| ResNet-20 |", "| ResNet-2000 |"))
    assert cofire("results", "table", "--write", "--root", clone).code == 0
    assert {document: (clone / document).read_text() for document in DOCUMENTS} == whole


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"networks": {"a": {}}}'])
def test_a_damaged_file_leaves_documents_of_other_files_whole(
    content: str, cofire: Cofire, clone: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (clone / "results" / "bench_latency.json").write_text(content)
    done = cofire("results", "table", "--write", "--root", clone)
    assert (done.code, "2 of 7 documents could not be made" in done.stderr) == (2, True)
    assert "docs/engine.md is left as it is" in caplog.text
    assert "bench_latency.json" in caplog.text
    for document in DOCUMENTS:
        assert (clone / document).read_text() == (ROOT / document).read_text()


def test_ops_furthest_from_their_floors_come_first_and_small_ones_together() -> None:
    rows = {
        "gemm, 8 x 8": [5.0, 4.0, 1.0, 4.0],
        "dot, 2 x 2": [6.0, 1.0, 2.0, 2.5],  # of some ops the products take longer, of others the bytes
        "pool, 4 x 4": [0.1, 0.0, 0.1, 0.1],
        "add, 8 x 8": [0.2, 0.0, 0.1, 0.1],
    }
    speeds = {"macs": 5e10, "macs8": 2e11, "macs16": 1e11, "bytes": 2.5e10}
    engine = {"network": "net", "precision": "int8", "macs": 0.48, "kernel": "v4", "speeds": speeds, "rows": rows}
    title, _, _, _, *shown = floors_tables([engine]).splitlines()
    assert title == "net, int8, 48 % of MACs; kernels v4, at best 200 MACs / ns, 100 in Winograd's 16 bits, 25.0 GB/s:"
    assert shown == [
        "| dot, 2 x 2 | 6.000 | 1.000 | 2.000 | 2.500 | 3.500 |",
        "| gemm, 8 x 8 | 5.000 | 4.000 | 1.000 | 4.000 | 1.000 |",
        "| all others | 0.300 | 0.000 | 0.200 | 0.200 | 0.100 |",
        "| all | 11.300 | 5.000 | 3.200 | 6.700 | 4.600 |",
    ]
    dense = {**engine, "macs": 1.0, "precision": "float32"}
    assert floors_tables([dense]).startswith("net, float32, dense; kernels v4, at best 50 MACs / ns, 25.0 GB/s:")


def test_a_ratio_beyond_its_limit_has_it_beside(cofire: Cofire, clone: Path) -> None:
    path = clone / "results" / "bench_latency.json"
    found = json.loads(path.read_text())
    row = found["networks"]["resnet34"]["rows"][0]
    for middle, shown in ((row["limit"], f"**{row['limit']:.3f}**"), (9.0, f"9.000 ({row['limit']:.2f})")):
        row["middle"] = middle
        path.write_text(json.dumps(found))
        assert cofire("results", "table", "--write", "--root", clone).code == 0
        assert f"| {shown} |" in (clone / "docs" / "engine.md").read_text()


def test_a_damaged_file_of_floors_is_said(cofire: Cofire, clone: Path, caplog: pytest.LogCaptureFixture) -> None:
    (clone / "results" / "bench_floors.json").write_text('{"engines": [{}]}')
    assert cofire("results", "table", "--write", "--root", clone).code == 2
    assert "docs/floors.md is left as it is" in caplog.text


def test_a_run_is_added_under_the_name_of_its_recipe(cofire: Cofire, tmp_path: Path) -> None:
    recipe = tmp_path / "recipes" / "some" / "net.toml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text(RECIPE)
    result = train_experiment(read_experiment(recipe, ["train.seed=3"]), tmp_path / "run")
    done = cofire("results", "add", tmp_path / "run", "--root", tmp_path)
    path = tmp_path / "results" / "some" / "net-s3.json"
    assert (done.code, "".join(done.stdout.split())) == (0, str(path))
    assert json.loads(path.read_text()) == result
    cofire("results", "add", tmp_path / "run", "--as", "own", "--root", tmp_path)
    assert json.loads((tmp_path / "results" / "own-s3.json").read_text()) == result


def test_a_run_that_no_recipe_makes_must_be_named(cofire: Cofire, tmp_path: Path) -> None:
    recipe = tmp_path / "recipes" / "net.toml"
    recipe.parent.mkdir()
    recipe.write_text(RECIPE)
    train_experiment(read_experiment(recipe, ["train.lr=0.5"]), tmp_path / "run")
    assert "makes the run" in (said := cofire.fails("results", "add", tmp_path / "run", "--root", tmp_path))
    assert "--as NAME" in said
    (tmp_path / "run" / "result.json").unlink()
    assert "is not finished" in cofire.fails("results", "add", tmp_path / "run", "--root", tmp_path)
    assert not (tmp_path / "results").exists()
