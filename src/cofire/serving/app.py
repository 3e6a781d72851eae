"""Routes of the Open Inference Protocol v2 on a set of models, with a bounded number of requests inside.

A request is let in or sent away with 429 before its body is read, so that memory is bounded by requests times bytes.
Those that are in wait for a thread of the pool; there is no other queue.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from cofire.errors import CofireError, ConfigError, unknown
from cofire.extras import require
from cofire.serving import protocol
from cofire.serving.metrics import exposition
from cofire.serving.models import Model

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

logger = logging.getLogger("cofire")


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a server takes.

    Args:
        requests: inside at a time, from the first byte of the body to the answer; more are told to come again.
        body: bytes of one request.
        batch: images of one request.
        seconds: for a client to send its body.
        workers: requests that are computed at a time.
        threads: of the engine, for each of those.
    """

    requests: int = 64
    body: int = 64 << 20
    batch: int = 256
    seconds: float = 30.0
    workers: int = 1
    threads: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ConfigError(f"Bounds.{name} must be above 0, got {value}")


class _Refused(Exception):
    """A request that is answered with an error before anything is computed."""

    def __init__(self, status: int, reason: str, **headers: str) -> None:
        super().__init__(reason)
        self.status, self.headers = status, headers


class Server:
    """The models, how many requests are inside, and how many were let in and answered."""

    def __init__(self, models: Mapping[str, Model], bounds: Bounds) -> None:
        self.models, self.bounds = dict(models), bounds
        self.accepted = self.answered = 0
        self._inside = 0
        self._pool = ThreadPoolExecutor(bounds.workers, thread_name_prefix="cofire")
        self._responses = require("starlette.responses", package="starlette", extra="serve")

    def app(self) -> Starlette:
        """The ASGI application."""
        starlette = require("starlette.applications", package="starlette", extra="serve")
        route = require("starlette.routing", package="starlette", extra="serve").Route
        failure = require("starlette.exceptions", package="starlette", extra="serve").HTTPException

        async def failed(_: Request, error: Any) -> Response:
            return self._json({"error": str(error.detail)}, error.status_code)

        routes = [
            route("/v2", self._server),
            route("/v2/health/live", self._healthy("live")),
            route("/v2/health/ready", self._healthy("ready")),
            route("/v2/repository/index", self._index, methods=["POST"]),
            route("/v2/repository/models/{model}/load", self._load, methods=["POST"]),
            route("/metrics", self._metrics),
        ]
        for start in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            routes += [
                route(start, self._about(lambda model: protocol.metadata(model.name, *_shapes(model)))),
                route(f"{start}/ready", self._about(lambda model: {"name": model.name, "ready": True})),
                route(f"{start}/infer", self._infer, methods=["POST"]),
            ]
        app: Starlette = starlette.Starlette(routes=routes, exception_handlers={failure: failed})
        return app

    async def _server(self, _: Request) -> Response:
        return self._json({"name": "cofire", "version": version("cofire"), "extensions": protocol.EXTENSIONS})

    def _healthy(self, word: str) -> Callable[[Request], Any]:
        async def endpoint(_: Request) -> Response:
            return self._json({word: True})

        return endpoint

    def _about(self, describe: Callable[[Model], dict[str, Any]]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            try:
                return self._json(describe(self._model(request)))
            except _Refused as refused:
                return self._error(refused)

        return endpoint

    async def _index(self, _: Request) -> Response:
        return self._json([{"name": name, "version": protocol.VERSION, "state": "READY"} for name in self.models])

    async def _load(self, request: Request) -> Response:
        """A model that is served is loaded already."""
        try:
            self._model(request)
        except _Refused as refused:
            return self._error(refused)
        return self._json({})

    async def _metrics(self, _: Request) -> Response:
        text = exposition({name: model.metrics for name, model in self.models.items()})
        plain: Response = self._responses.Response(text, media_type="text/plain; version=0.0.4")
        return plain

    async def _infer(self, request: Request) -> Response:
        begin, response = time.perf_counter(), None
        try:
            model = self._model(request)
        except _Refused as refused:
            return self._error(refused)
        try:
            response = await self._let_in(request, model)
        except _Refused as refused:
            response = self._error(refused)
        except CofireError as error:
            response = self._json({"error": str(error)}, 400)
        except Exception:
            logger.exception("a request to %s failed", model.name)
            response = self._json({"error": "the server failed; its log says how"}, 500)
        model.metrics.request(response.status_code, time.perf_counter() - begin)
        return response

    async def _let_in(self, request: Request, model: Model) -> Response:
        if self._inside >= self.bounds.requests:
            raise _Refused(
                429, f"{self._inside} requests are inside, and no more fit; come again", **{"Retry-After": "1"}
            )
        self._inside += 1
        self.accepted += 1
        try:
            body = await self._body(request)
            length = request.headers.get(protocol.HEADER_LENGTH)
            loop = asyncio.get_running_loop()
            content, json_bytes = await loop.run_in_executor(self._pool, self._compute, model, body, length)
        finally:
            self._inside -= 1
            self.answered += 1
        if json_bytes is None:
            return self._bytes(content, "application/json", {})
        return self._bytes(content, "application/octet-stream", {protocol.HEADER_LENGTH: str(json_bytes)})

    async def _body(self, request: Request) -> bytes:
        bounds, gone = self.bounds, require("starlette.requests", package="starlette", extra="serve").ClientDisconnect
        too_large = _Refused(413, f"a body must have at most {bounds.body} bytes", Connection="close")
        if encoding := request.headers.get("content-encoding"):
            raise _Refused(415, f"a body must not be encoded, got {encoding}", Connection="close")
        size, body = int(request.headers.get("content-length", 0)), bytearray()
        if size > bounds.body and request.headers.get("expect", "").lower() == "100-continue":
            raise too_large
        try:
            async with asyncio.timeout(bounds.seconds):
                async for chunk in request.stream():
                    body += chunk
                    size = max(size, len(body))
                    if size > bounds.body:
                        body.clear()  # read on all the same: most clients listen only once all is sent
        except TimeoutError:
            raise _Refused(408, f"a body must arrive within {bounds.seconds} s", Connection="close") from None
        except gone:
            raise _Refused(400, "the client left before its body was there", Connection="close") from None
        if size > bounds.body:
            raise too_large
        return bytes(body)

    def _compute(self, model: Model, body: bytes, length: str | None) -> tuple[bytes, int | None]:
        """In a thread of the pool: everything that takes long."""
        bounds = self.bounds
        request = protocol.parse(body, length, model.engine.input_shape, bounds.batch)
        threshold = model.threshold(request)
        tensors = model.infer(request.x_BCHW, threshold, bounds.threads)
        told = {"threshold": model.engine.threshold if threshold is None else threshold}
        return protocol.answer(model.name, request, tensors, told if model.engine.groups else {})

    def _model(self, request: Request) -> Model:
        name, wanted = request.path_params["model"], request.path_params.get("version", protocol.VERSION)
        if name not in self.models:
            raise _Refused(404, str(unknown("model", name, self.models)))
        if wanted != protocol.VERSION:
            raise _Refused(404, f"{name} has the version {protocol.VERSION} only, got {wanted!r}")
        return self.models[name]

    def _error(self, refused: _Refused) -> Response:
        return self._json({"error": str(refused)}, refused.status, refused.headers)

    def _json(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
        found: Response = self._responses.JSONResponse(value, status, headers)
        return found

    def _bytes(self, content: bytes, media_type: str, headers: Mapping[str, str]) -> Response:
        found: Response = self._responses.Response(content, 200, headers, media_type)
        return found


def _shapes(model: Model) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return model.engine.input_shape, model.engine.output_shape
