"""What stands in pages and in the workflow is what was measured and what there is."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from small import ROOT

WORKFLOW = ROOT / ".github" / "workflows" / "test.yml"


def jobs() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the docs extra")
    found: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    return found


def test_numerics_shows_the_measured_errors() -> None:
    page = (ROOT / "docs" / "numerics.md").read_text()
    networks = json.loads((ROOT / "results" / "winograd_error.json").read_text())["networks"]
    assert re.findall(r"^## (.*)$", page, re.M) == list(networks)
    for rows in networks.values():
        for row in rows:
            cells = ["" if row[name] is None else f"{row[name]:.1e}" for name in ("wino4", "wino2", "gemm")]
            assert f"| {row['layer']} | {row['weights']} | {' | '.join(cells)} |\n" in page
            assert max(row[name] or 0 for name in ("wino4", "wino2")) < 5e-4


def test_the_workflow_calls_targets_that_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    called = [
        word
        for job in jobs().values()
        for step in job["steps"]
        if step.get("run", "").startswith("make ")
        for word in re.sub(r"\w+=\$\{\{.*?\}\}", "", step["run"]).split()[1:]
    ]
    assert {"test", "fuzz", "fuzz-python", "fuzz-readers", "soak", "kill", "cross", "wheels"} <= set(called)
    assert set(called) <= set(targets)


def test_the_workflow_keeps_what_the_targets_write() -> None:
    """Each folder that is kept as an artifact, or copied from, is named where it is made."""
    makers = "".join((ROOT / name).read_text() for name in ("Makefile", "csrc/tests/fuzz.sh", "tests/fuzz_python.py"))
    folders = re.findall(r"build/[\w/-]+", WORKFLOW.read_text())
    assert folders
    assert [folder for folder in folders if folder.rstrip("/") not in makers] == []


def test_wheels_have_provenance_and_a_bill_of_materials() -> None:
    uses = [step["uses"] for job in jobs().values() for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@(v\d+(\.\d+)*|[0-9a-f]{40})", use) for use in uses), uses
    wheel = jobs()["wheel"]
    assert wheel["permissions"] == {"contents": "read", "id-token": "write", "attestations": "write"}
    names = [step["uses"].split("@")[0] for step in wheel["steps"] if "uses" in step]
    made = [
        names.index(name) for name in ("anchore/sbom-action", "actions/attest-build-provenance", "actions/attest-sbom")
    ]
    assert made == sorted(made)
    assert all(
        step["with"]["subject-path"] == "dist/*.whl" for step in wheel["steps"] if "attest" in step.get("uses", "")
    )
    for job in jobs().values():
        assert set(job.get("needs", [])) <= set(jobs())
