"""The container file and the KServe file of docs/serving.md: they parse, and say what `cofire serve` does.

Neither is built or applied here.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from served import serving
from small import ROOT, tiny_gated
from test_docs import blocks, unknown_options

import cofire
from cofire.runtime.observed import beside


@pytest.fixture(scope="module")
def page() -> dict[str, str]:
    """Language of a block -> its code."""
    return {block.language: block.code for block in blocks((ROOT / "docs" / "serving.md").read_text())}


@pytest.fixture(scope="module")
def container(page: dict[str, str]) -> dict[str, str]:
    """Instruction of the container file -> what follows it."""
    return dict(line.split(" ", 1) for line in page["dockerfile"].splitlines())


def test_the_container_installs_what_serving_needs_and_copies_what_compile_writes(container: dict[str, str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.match(r"[\w-]+", text)[0] for text in project["optional-dependencies"]["serve"]}
    assert needed | {"numpy", "typer", "rich"} == set(container["RUN"].split("&&")[0].split()[3:])
    python = container["FROM"].removeprefix("python:").split("-")[0]
    assert project["requires-python"] == f">={python}"
    copied = container["COPY"].split()
    assert copied[:2] == ["a.cofire", beside(Path("a.cofire")).name]


def test_its_command_and_the_probe_of_kserve_are_ones_that_the_server_knows(
    page: dict[str, str], container: dict[str, str], tmp_path: Path
) -> None:
    start, *command = json.loads(container["ENTRYPOINT"])
    assert start == "cofire"
    assert unknown_options(command) == []
    service = yaml.safe_load(page["yaml"])
    assert (service["apiVersion"], service["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
    (predictor,) = service["spec"]["predictor"]["containers"]
    probe = predictor["readinessProbe"]["httpGet"]
    ports = {predictor["ports"][0]["containerPort"], probe["port"], int(container["EXPOSE"])}
    assert ports == {int(command[command.index("--port") + 1])}
    cofire.compile(tiny_gated()).save(tmp_path / "a.cofire")
    (model,) = (word for word in command if "=" in word)
    with serving(model.replace(container["COPY"].split()[-1], f"{tmp_path}/")) as server:
        assert server.ask("GET", probe["path"])[0] == 200
