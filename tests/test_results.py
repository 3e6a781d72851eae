"""Numbers in the README come from result files, and result files say where they come from."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "results").rglob("*.json"))


def _table_script():
    spec = importlib.util.spec_from_file_location("results_table", ROOT / "results" / "table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("document", _table_script().DOCUMENTS, ids=lambda document: document.name)
def test_documents_show_exactly_what_the_result_files_say(document):
    text = document.read_text(encoding="utf-8")
    assert _table_script().written(document) == text, "run: python results/table.py --write"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_result_names_machine_versions_and_commit(path):
    origin = json.loads(path.read_text(encoding="utf-8"))["provenance"]
    assert {"cpu", "cores", "system"} <= origin["machine"].keys()
    assert all(origin[key] for key in ("commit", "torch", "cofire", "time"))
