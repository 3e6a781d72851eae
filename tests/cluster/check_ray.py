"""`compare(on="ray")` on a local cluster of two nodes, one of which is killed while it trains (``make cluster``)."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from cofire import ConfigError, Recipe, compare, create_backbone, data, fit, save
from cofire.files.lock import alone_in
from cofire.files.tensors import read_tensors

pytestmark = pytest.mark.filterwarnings("default")  # Ray's own

RECIPE = """
[data]
name = "digits"
batch_size = 128
val = 200

[backbone]
name = "resnet8_digits"
weights = "{weights}"

[train]
epochs = {epochs}
lr = 0.02
checkpoint_steps = 4
"""
METHODS = ("L1", "FPGM")  # as fast as each other, so that both are under way when a node is lost


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = create_backbone("resnet8_digits")
    fit(model, data.digits()[0].loader(64, train=True), Recipe(epochs=1, lr=0.1))
    save(model, tmp_path / "dense")
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE.format(weights=tmp_path / "dense", epochs=5))
    return path


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two nodes with a core each."""
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    found.add_node(num_cpus=1)
    found.wait_for_nodes()
    monkeypatch.setenv("RAY_ADDRESS", found.address)
    yield found
    ray.shutdown()
    found.shutdown()


def test_the_runs_of_a_lost_node_go_on_elsewhere_to_the_same_end(
    cluster: Cluster, recipe: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "lost" / "tiny" / "0.5"
    lost: list[set[Path]] = []

    def lose_a_node() -> None:
        """Once both runs, one on each node, have checkpoints behind their first."""
        under_way: set[Path] = set()
        while len(under_way) < len(METHODS):
            time.sleep(0.02)
            under_way = {path.parent for path in folder.glob("*/run/checkpoints/step-*") if path.stem > "step-00000004"}
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        lost.append({path for path in under_way if not (path.parents[1] / "row.json").exists()})

    watcher = threading.Thread(target=lose_a_node, daemon=True)
    watcher.start()
    said: list[str] = []
    found = compare([recipe], methods=",".join(METHODS), out=tmp_path / "lost", on="ray", rounds=0, say=said.append)
    watcher.join(timeout=10)
    assert len(lost[0]) == len(METHODS)  # neither was done
    assert not cluster.worker_nodes
    assert [line.split("]")[0] for line in said if line.startswith("[")] == ["[1/2", "[2/2"]  # as they came

    whole = compare([recipe], methods=",".join(METHODS), out=tmp_path / "whole", rounds=0)
    assert [row.values("top1") for row in found.networks[0].rows] == [
        row.values("top1") for row in whole.networks[0].rows
    ]
    for method in METHODS:
        ends = [tmp_path / out / "tiny" / "0.5" / f"{method}-s0" / "run" for out in ("lost", "whole")]
        one, other = (read_tensors(end / "model.safetensors")[0] for end in ends)
        assert all(torch.equal(one[name], other[name]) for name in other)
        steps = [json.loads(line).get("step") for line in (ends[0] / "log.jsonl").read_text().splitlines()]
        assert steps == sorted(steps)  # it went on; it did not begin anew


def test_without_an_address_it_says_what_is_missing(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="RAY_ADDRESS=HOST:PORT"):
        compare([recipe], methods="L1", out=tmp_path / "out", on="ray")
    assert not ray.is_initialized()
    with alone_in(tmp_path / "out"):  # nobody is left in it
        assert os.listdir(tmp_path / "out") == []
