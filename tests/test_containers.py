"""What docs/serving.md shows: a request is answered; container and KServe file parse, and say what `cofire serve` does.

Neither of the two is built or applied here.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
import yaml
from nets import Net, fc
from served import serving
from small import ROOT, tiny_gated
from test_docs import blocks, unknown_options
from torch import nn

import cofire
from cofire.runtime.limits import Limits
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


def test_the_pages_request_of_a_picture_is_answered(
    page: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("PIL")
    monkeypatch.chdir(tmp_path)
    exec(page["python"], {})
    net = Net(lambda m, x: m.logits(m.stem(x)), stem=nn.Conv2d(3, 4, 8, 8), fc=fc(4)).eval()
    engine = cofire.compile(net, (3, 224, 224), limits=Limits(tuning_seconds=0.0))
    engine.save(tmp_path / "a.cofire")
    body = (tmp_path / "body.json").read_bytes()
    orange = torch.tensor([255, 165, 0]).view(1, 3, 1, 1).expand(1, 3, 224, 224) / 255
    with serving(tmp_path / "a.cofire") as server:
        status, answer, _ = server.ask("POST", "/v2/models/a/infer", body)
    assert status == 200
    assert answer["outputs"][0]["data"] == pytest.approx(engine(orange)[0].tolist(), abs=1e-5)
