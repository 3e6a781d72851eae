"""A `cofire serve` process, and clients that check every answer; `make serve-load` has them ask ten thousand times."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import cofire
from cofire.runtime.engine import Engine

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from cofire.start import main; main()"
LENGTH = "Inference-Header-Content-Length"


@dataclass
class Server:
    process: subprocess.Popen[str]
    host: str
    models: list[str]
    told: dict[str, int] = field(default_factory=dict)

    @property
    def port(self) -> int:
        return int(self.host.rpartition(":")[2])

    def ask(
        self, method: str, path: str, body: bytes = b"", **headers: str
    ) -> tuple[int, Any, http.client.HTTPResponse]:
        """Status, body (parsed if it is JSON) and response of one request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        is_json = response.headers["content-type"] == "application/json"
        return response.status, json.loads(content) if is_json else content, response

    def memory(self) -> float:
        """Megabytes that the process holds."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))

    def stop(self) -> dict[str, int]:
        """SIGTERM; how many requests it says were let in and answered."""
        self.process.send_signal(signal.SIGTERM)
        out, errors = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, errors
        assert "Traceback" not in errors
        self.told = json.loads(out)
        return self.told


@contextmanager
def serving(*arguments: object) -> Iterator[Server]:
    """`cofire serve ARGUMENTS` on any port, in a process that cannot import PyTorch."""
    command = [sys.executable, "-c", WITHOUT_TORCH, "serve", *map(str, arguments), "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise AssertionError(process.communicate()[1])
    told = json.loads(line)
    server = Server(process, told["address"].removeprefix("http://"), told["models"])
    try:
        yield server
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def binary(x_BCHW: np.ndarray, **more: Any) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a request with the images as bytes, which wants bytes back."""
    entry = {"name": "input", "shape": list(x_BCHW.shape), "datatype": "FP32"}
    entry["parameters"] = {"binary_data_size": x_BCHW.nbytes}
    parameters = {"binary_data_output": True, **more.pop("parameters", {})}
    text = json.dumps({"inputs": [entry], "parameters": parameters, **more}).encode()
    return text + x_BCHW.tobytes(), {LENGTH: str(len(text))}


@dataclass
class Hammer:
    """Clients that ask one model with images of their own, over and over, each on one connection."""

    server: Server
    model: str
    engine: Engine
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self, requests: int, clients: int) -> None:
        """Each client its share of the requests, or until `stop` is set."""
        each = [requests // clients + (c < requests % clients) for c in range(clients)]
        threads = [threading.Thread(target=self._client, args=(c, count)) for c, count in enumerate(each)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _client(self, number: int, requests: int) -> None:
        rng = np.random.default_rng(number)
        images = [rng.random((1 + n % 3, *self.engine.input_shape), np.float32) for n in range(8)]
        wanted = [self.engine(x_BCHW).tobytes() for x_BCHW in images]
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        for n in range(requests):
            if self.stop.is_set():
                break
            name = f"{number}-{n}"
            body, headers = binary(images[n % 8], id=name, outputs=[{"name": "output"}])
            try:
                connection.request("POST", f"/v2/models/{self.model}/infer", body, headers)
                response = connection.getresponse()
                content = response.read()
            except (OSError, http.client.HTTPException):
                self.counts["no answer"] += 1
                connection.close()
                continue
            self.counts[str(response.status)] += 1
            if response.status == 200:
                length = int(response.headers[LENGTH])
                if json.loads(content[:length])["id"] != name or content[length:] != wanted[n % 8]:
                    self.wrong.append(name)
        connection.close()


def main(requests: int, clients: int) -> None:
    """Not one answer may be lost or mixed up, and memory stays flat."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "digits.cofire"
        cofire.compile(cofire.create_backbone("resnet8_digits")).save(program)
        engine = cofire.load_program(program)
        with serving(program, "--requests", clients) as server:
            warm = Hammer(server, "digits", engine)
            warm.run(requests // 10, clients)
            before = server.memory()
            hammer = Hammer(server, "digits", engine)
            hammer.run(requests, clients)
            after = server.memory()
            told = server.stop()
    print(f"{dict(hammer.counts)}, {len(hammer.wrong)} wrong; {before:.1f} MB before, {after:.1f} MB after; {told}")
    assert hammer.counts == {"200": requests}
    assert not hammer.wrong
    assert after < before + 5


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
