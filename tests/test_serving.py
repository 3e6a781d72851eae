"""`cofire serve`: a client that others wrote, many clients, bad requests, slow and killed ones, SIGTERM, metrics."""

from __future__ import annotations

import http.client
import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served import LENGTH, Hammer, Server, binary, serving
from small import tiny_gated, tiny_plain

import cofire
from cofire.errors import ConfigError, FileError
from cofire.runtime.engine import Engine
from cofire.runtime.observed import Observed, observe, read_observed, write_observed
from cofire.serving.protocol import parse


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gated program with what was observed of it, and a plain one without."""
    path = tmp_path_factory.mktemp("programs")
    cofire.compile(tiny_gated()).save(path / "gated.cofire")
    cofire.compile(tiny_plain()).save(path / "plain.cofire")
    engine = cofire.load_program(path / "gated.cofire")
    write_observed(observe(engine, images(64, engine)), path / "gated.cofire")
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder / "gated.cofire", f"other={folder / 'plain.cofire'}", "--batch", 8, "--body-mb", 1) as found:
        yield found


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return cofire.load_program(folder / "gated.cofire")


def images(n: int, engine: Engine) -> np.ndarray:
    return np.random.default_rng(n).random((n, *engine.input_shape), np.float32)


def infer(server: Server, x_BCHW: np.ndarray, **more: Any) -> tuple[int, Any]:
    """Status and answer of a request in JSON."""
    entry = {"name": "input", "shape": list(x_BCHW.shape), "datatype": "FP32", "data": x_BCHW.tolist()}
    body = json.dumps({"inputs": [entry], **more}).encode()
    return server.ask("POST", "/v2/models/gated/infer", body)[:2]


# A client that others wrote


@pytest.mark.filterwarnings("ignore")  # gevent's own
@pytest.mark.parametrize("as_bytes", [True, False])
def test_tritonclient_lists_describes_and_infers_bit_equal(server: Server, engine: Engine, as_bytes: bool) -> None:
    from tritonclient import http as triton

    with triton.InferenceServerClient(server.host) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert [model["name"] for model in client.get_model_repository_index()] == ["gated", "other"]
        client.load_model("gated")
        assert client.is_model_ready("gated", "1")
        assert not client.is_model_ready("gone")
        assert client.get_server_metadata()["extensions"] == ["binary_tensor_data", "model_repository"]
        told = client.get_model_metadata("other")
        assert told["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, *engine.input_shape]}]
        assert told["outputs"][0] == {"name": "output", "datatype": "FP32", "shape": [-1, *engine.output_shape]}
        x_BCHW = images(3, engine)
        for threshold in (None, -1e9, 1e9):
            given = triton.InferInput("input", x_BCHW.shape, "FP32")
            given.set_data_from_numpy(x_BCHW, binary_data=as_bytes)
            wanted = [triton.InferRequestedOutput(name, binary_data=as_bytes) for name in ("output", "macs")]
            parameters = {} if threshold is None else {"threshold": threshold}
            answer = client.infer("gated", [given], outputs=wanted, request_id="me", parameters=parameters)
            expected = engine(x_BCHW, threshold=threshold)
            assert answer.as_numpy("output").tobytes() == expected.tobytes()
            assert np.array_equal(answer.as_numpy("macs"), sum(engine.last_macs.values()))
            assert answer.get_response()["id"] == "me"


# Many


def test_no_answer_is_lost_or_mixed_up(server: Server, engine: Engine) -> None:
    hammer = Hammer(server, "gated", engine)
    hammer.run(requests=320, clients=16)
    assert (hammer.counts, hammer.wrong) == ({"200": 320}, [])


def test_sigterm_under_load_answers_everyone_who_was_let_in(folder: Path, engine: Engine) -> None:
    with serving(folder / "gated.cofire") as server:
        hammer = Hammer(server, "gated", engine)
        load = threading.Thread(target=hammer.run, args=(10**6, 4))
        load.start()
        while hammer.counts["200"] < 50:
            time.sleep(0.01)
        told = server.stop()
        hammer.stop.set()
        load.join()
    assert told["accepted"] == told["answered"] == hammer.counts["200"]
    assert hammer.wrong == []
    assert set(hammer.counts) <= {"200", "no answer"}


# What is refused


def body_of(**changes: Any) -> bytes:
    entry = {"name": "input", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.0] * 64}
    table: dict[str, Any] = {"inputs": [entry | changes.pop("entry", {})]}
    return json.dumps(table | changes).encode()


REFUSED = {
    "not JSON": (b"{", {}, 400, "must be JSON"),
    "a list": (b"[]", {}, 400, "must be a JSON object, got list"),
    "nested too deep": (b"[" * 100000, {}, 400, "must be JSON"),
    "NaN as JSON": (body_of(entry={"data": [math.nan] * 64}), {}, 400, "NaN is not JSON"),
    "no input": (body_of(inputs=[]), {}, 400, "inputs must be a list of one tensor"),
    "another input": (body_of(entry={"name": "x"}), {}, 400, "unknown input 'x'"),
    "another type": (body_of(entry={"datatype": "FP64"}), {}, 400, "must be FP32, got 'FP64'"),
    "another shape": (body_of(entry={"shape": [1, 3, 8, 8]}), {}, 400, "must be [B, 1, 8, 8], got [1, 3, 8, 8]"),
    "a shape of texts": (body_of(entry={"shape": ["1", 1, 8, 8]}), {}, 400, "must be [B, 1, 8, 8]"),
    "too few numbers": (body_of(entry={"data": [0.0]}), {}, 400, "must have 64 numbers, as its shape says, got 1"),
    "texts": (body_of(entry={"data": ["a"] * 64}), {}, 400, "must be numbers"),
    "no images": (body_of(entry={"shape": [0, 1, 8, 8], "data": []}), {}, 400, "1 to 8 images, got 0"),
    "too many images": (body_of(entry={"shape": [9, 1, 8, 8]}), {}, 400, "1 to 8 images, got 9"),
    "another output": (body_of(outputs=[{"name": "y"}]), {}, 400, "unknown output 'y'"),
    "another parameter": (body_of(parameters={"treshold": 1}), {}, 400, "did you mean 'threshold'?"),
    "a threshold of text": (body_of(parameters={"threshold": "1"}), {}, 400, "threshold must be a finite number"),
    "both": (body_of(parameters={"threshold": 1, "budget": 0.5}), {}, 400, "one of threshold and budget, got both"),
    "a budget of 2": (body_of(parameters={"budget": 2}), {}, 400, "must be in (0, 1], got 2.0"),
    "an id of 1": (body_of(id=1), {}, 400, "id must be a text"),
    "a length of text": (body_of(), {LENGTH: "x"}, 400, "must be at most the body's"),
    "a length beyond": (body_of(), {LENGTH: "99999"}, 400, "must be at most the body's"),
    "encoded": (body_of(), {"Content-Encoding": "gzip"}, 415, "must not be encoded, got gzip"),
    "too large": (b" " * (1 << 20) + body_of(), {}, 413, "at most 1048576 bytes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_request_gets_a_clear_status(server: Server, case: str) -> None:
    body, headers, status, message = REFUSED[case]
    found, told, _ = server.ask("POST", "/v2/models/gated/infer", body, **headers)
    assert found == status
    assert message in told["error"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_bytes_that_are_not_finite_are_refused(server: Server, engine: Engine, value: float) -> None:
    x_BCHW = images(1, engine)
    x_BCHW[0, 0, 3, 4] = value
    body, headers = binary(x_BCHW)
    status, told, _ = server.ask("POST", "/v2/models/gated/infer", body, **headers)
    assert (status, told["error"]) == (400, f"'input' must be finite, got {value} among its numbers")


def test_bytes_must_be_as_many_as_the_json_says(server: Server, engine: Engine) -> None:
    body, headers = binary(images(1, engine))
    for wrong in (body[:-1], body + b"\0"):
        status, told, _ = server.ask("POST", "/v2/models/gated/infer", wrong, **headers)
        assert status == 400
        assert "binary_data_size" in told["error"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/models/gatd", 404),
        ("POST", "/v2/models/gatd/infer", 404),
        ("GET", "/v2/models/gated/versions/2/ready", 404),
        ("GET", "/v3", 404),
        ("GET", "/v2/models/gated/infer", 405),
        ("POST", "/v2/repository/models/gatd/load", 404),
    ],
)
def test_an_unknown_place_is_an_error_in_json(server: Server, method: str, path: str, status: int) -> None:
    found, told, _ = server.ask(method, path)
    assert (found, list(told)) == (status, ["error"])


def test_a_body_of_100_megabytes_is_refused_and_not_kept(server: Server) -> None:
    before = server.memory()
    status, told, _ = server.ask("POST", "/v2/models/gated/infer", bytes(100 << 20))
    assert (status, told["error"]) == (413, "a body must have at most 1048576 bytes")
    assert server.memory() < before + 20


def test_who_asks_before_sending_too_much_is_told_at_once(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        head = f"POST /v2/models/gated/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {100 << 20}\r\n"
        client.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
        assert client.recv(1000).startswith(b"HTTP/1.1 413 ")


# Clients that are slow, killed, or too many


def start_of_request(server: Server) -> socket.socket:
    """A client that is let in and sends half of its body."""
    client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    body = body_of()
    head = f"POST /v2/models/gated/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body[: len(body) // 2])
    return client


def test_who_does_not_fit_is_told_to_come_again_and_a_killed_client_makes_room(folder: Path, engine: Engine) -> None:
    with serving(folder / "gated.cofire", "--requests", 1) as server:
        first = start_of_request(server)
        while (refused := server.ask("POST", "/v2/models/gated/infer", body_of()))[0] == 200:
            time.sleep(0.01)
        assert (refused[0], refused[2].headers["retry-after"]) == (429, "1")
        assert "come again" in refused[1]["error"]
        assert server.ask("GET", "/v2/health/live")[0] == 200
        first.close()  # half of its body was sent
        while server.ask("POST", "/v2/models/gated/infer", body_of())[0] != 200:
            time.sleep(0.01)
        told = server.stop()
        assert told["accepted"] == told["answered"]


def test_a_slow_client_is_cut_off(folder: Path) -> None:
    with serving(folder / "gated.cofire", "--body-seconds", 0.2) as server, start_of_request(server) as client:
        answer = http.client.HTTPResponse(client)
        answer.begin()
        assert answer.status == 408
        assert json.loads(answer.read())["error"] == "a body must arrive within 0.2 s"


# Metrics, drift, budget


def metric(server: Server, name: str) -> float:
    lines = server.ask("GET", "/metrics")[1].decode().splitlines()
    return float(next(line.rpartition(" ")[2] for line in lines if line.startswith(name)))


def test_metrics_count_what_was_computed(folder: Path, engine: Engine) -> None:
    with serving(folder / "gated.cofire", f"plain={folder / 'plain.cofire'}") as server:
        x_BCHW = images(5, engine)
        assert infer(server, x_BCHW)[0] == 200
        assert infer(server, x_BCHW, id=1)[0] == 400
        engine(x_BCHW)
        assert metric(server, 'cofire_images_total{model="gated"}') == 5
        assert metric(server, 'cofire_macs_total{model="gated"}') == sum(m.sum() for m in engine.last_macs.values())
        assert metric(server, 'cofire_requests_total{model="gated",status="200"}') == 1
        assert metric(server, 'cofire_requests_total{model="gated",status="400"}') == 1
        assert metric(server, 'cofire_request_seconds_count{model="gated"}') == 2
        assert metric(server, 'cofire_request_seconds_bucket{model="gated",le="+Inf"}') == 2
        assert 'cofire_mask_drift{model="plain"}' not in server.ask("GET", "/metrics")[1].decode()
        before = metric(server, 'cofire_mask_drift{model="gated"}')
        for _ in range(20):  # masks that nobody observed: all filters run
            assert infer(server, np.repeat(x_BCHW, 8, 0), parameters={"threshold": -1e9})[0] == 200
        assert metric(server, 'cofire_mask_drift{model="gated"}') > before + 0.05


def test_a_budget_is_met_as_it_was_observed(server: Server, folder: Path, engine: Engine) -> None:
    observed = read_observed(folder / "gated.cofire", engine)
    assert observed is not None
    budget = float(np.median(observed.macs))
    status, told = infer(server, images(2, engine), parameters={"budget": budget})
    assert status == 200
    assert told["parameters"]["threshold"] == observed.threshold(budget)
    found, told, _ = server.ask("POST", "/v2/models/other/infer", body_of(parameters={"budget": 0.5}))
    assert found == 400
    assert "cofire compile --observe N" in told["error"]


def test_a_budget_that_no_threshold_meets_is_refused() -> None:
    observed = Observed(n=1, rates={}, thresholds=(-1.0, 0.0, 1.0), macs=(0.9, 0.8, 0.5))
    assert [observed.threshold(budget) for budget in (1.0, 0.8, 0.7, 0.5)] == [-1.0, 0.0, 1.0, 1.0]
    with pytest.raises(ConfigError, match=r"cannot be met by a threshold: the least is 0\.500"):
        observed.threshold(0.4)


def test_what_is_observed_is_what_the_engine_does(engine: Engine, tmp_path: Path) -> None:
    x_NCHW = images(16, engine)
    observed = observe(engine, x_NCHW)
    engine(x_NCHW)
    for name, mask_NO in engine.last_masks.items():
        assert observed.rates[name] == pytest.approx(mask_NO.mean(0))
    assert list(observed.thresholds) == sorted(observed.thresholds)
    assert list(observed.macs) == sorted(observed.macs, reverse=True)
    middle = observed.threshold(observed.macs[7])
    engine(x_NCHW, threshold=middle)
    some = sum(m.mean() for m in engine.last_macs.values())
    with engine.force({name: np.ones(filters) for name, filters in engine.groups.items()}):
        engine(x_NCHW)
    assert some / sum(m.mean() for m in engine.last_macs.values()) == pytest.approx(observed.macs[7])
    write_observed(observed, tmp_path / "a.cofire")
    assert read_observed(tmp_path / "a.cofire", engine) == observed
    write_observed(Observed(n=1, rates={}, thresholds=(), macs=()), tmp_path / "b.cofire")
    with pytest.raises(FileError, match="is not of this program"):
        read_observed(tmp_path / "b.cofire", engine)


def test_a_request_parses_to_its_images_and_wishes() -> None:
    body = body_of(id="a", parameters={"threshold": 2}, outputs=[{"name": "macs"}])
    request = parse(body, None, (1, 8, 8), 4)
    assert (request.id, request.threshold, request.budget, request.outputs) == ("a", 2.0, None, {"macs": False})
    assert request.x_BCHW.shape == (1, 1, 8, 8)
    with pytest.raises(ConfigError, match="unknown parameter"):
        parse(body_of(parameters={"x": 1}), None, (1, 8, 8), 4)
