"""``cofire serve``: programs behind HTTP. Runs where PyTorch is not."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
from typing import Annotated

import typer

from cofire.errors import ConfigError
from cofire.extras import require
from cofire.serving.app import Bounds, Server
from cofire.serving.models import load_models
from cofire.shell import AsJson

logger = logging.getLogger("cofire")
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(
    programs: Annotated[
        list[str],
        typer.Argument(help="Programs that `cofire compile` made, each PATH or NAME=PATH.", metavar="PROGRAM..."),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on. There is no login: only loopback is closed to others.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    requests: Annotated[int, typer.Option(min=1, help="Inside at a time; more get 429.")] = Bounds.requests,
    body_mb: Annotated[float, typer.Option(help="Megabytes of one request; more get 413.")] = Bounds.body / (1 << 20),
    batch: Annotated[int, typer.Option(min=1, help="Images of one request.")] = Bounds.batch,
    body_seconds: Annotated[
        float, typer.Option(help="For a client to send its body; then it gets 408.")
    ] = Bounds.seconds,
    workers: Annotated[int, typer.Option(min=0, help="Requests computed at a time; 0: one for each core.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Of the engine, for each request.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Answer the Open Inference Protocol v2 over HTTP (KServe, Triton clients), with metrics at /metrics.

    SIGTERM and Ctrl-C stop it: who was let in is answered first.
    """
    uvicorn = require("uvicorn", package="uvicorn", extra="serve")
    bounds = Bounds(
        requests=requests,
        body=int(body_mb * (1 << 20)),
        batch=batch,
        seconds=body_seconds,
        workers=workers or os.cpu_count() or 1,
        threads=threads,
    )
    server = Server(load_models(programs), bounds)
    app = server.app()
    try:
        listening = socket.create_server((host, port), backlog=1024, family=_family(host))
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose --host and --port"
        ) from error
    if host not in LOOPBACK:
        logger.warning("%s is not loopback: whoever reaches it can ask, and there is no login", host)
    address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
    told = {"address": address, "models": list(server.models)}
    typer.echo(json.dumps(told) if as_json else f"{', '.join(server.models)} on {address}/v2; stop with Ctrl-C")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _noted)  # uvicorn stops at the signal and raises it again when it is done
    uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", server_header=False, backlog=1024)
    ).run(sockets=[listening])
    done = {"accepted": server.accepted, "answered": server.answered}
    typer.echo(
        json.dumps(done) if as_json else f"stopped: {server.accepted} requests let in, {server.answered} answered"
    )


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _noted(number: int, frame: object) -> None:
    """A signal that was obeyed already."""
