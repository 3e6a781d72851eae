"""The Ray Serve page on a local cluster of two nodes, one of which is killed (``make ray-serve``)."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster
from small import ROOT, tiny_gated
from test_docs import blocks

import cofire


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two nodes with a core each. On a busy machine a proxy takes longer to start than Ray waits for it."""
    for check in ("READY", "HEALTH"):
        monkeypatch.setenv(f"RAY_SERVE_PROXY_{check}_CHECK_TIMEOUT_S", "60")
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    found.add_node(num_cpus=1)
    found.wait_for_nodes()
    ray.init(address=found.address)
    yield found
    serve.shutdown()
    ray.shutdown()
    found.shutdown()


def app_of_the_page(program: Path) -> Any:
    """What docs/serving.md calls ``app``, with a program of ours."""
    page = blocks((ROOT / "docs" / "serving.md").read_text())
    (code,) = (block.code for block in page if "serve.deployment" in block.code)
    assert '"/models/a.cofire"' in code
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(code.replace("/models/a.cofire", str(program)), namespace)
    return namespace["app"]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def running() -> int:
    """Replicas that answer; a node holds one at most."""
    (deployment,) = serve.status().applications["default"].deployments.values()
    return deployment.replica_states.get("RUNNING", 0)


def test_two_nodes_answer_as_the_engine_does_and_so_does_the_one_that_is_left(cluster: Cluster, tmp_path: Path) -> None:
    engine = cofire.compile(tiny_gated().eval())
    program = engine.save(tmp_path / "a.cofire")
    x_BCHW = np.random.default_rng(0).standard_normal((3, *engine.input_shape)).astype("<f4")
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(app_of_the_page(program))

    def answer() -> np.ndarray:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/", data=x_BCHW.tobytes())
        with urllib.request.urlopen(request, timeout=60) as response:
            return np.array(json.load(response)["output"], np.float32)

    assert running() == 2
    for _ in range(20):
        assert np.array_equal(answer(), engine(x_BCHW))

    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    deadline = time.monotonic() + 120
    while running() != 1 and time.monotonic() < deadline:
        time.sleep(0.2)
    right = 0
    while right < 20 and time.monotonic() < deadline:  # a request that was on its way to the lost node may fail
        try:
            assert np.array_equal(answer(), engine(x_BCHW))
            right += 1
        except URLError:
            time.sleep(0.2)
    assert right == 20
