"""``cofire explore``: a page to look at."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Annotated

import typer

from cofire.errors import ConfigError
from cofire.explore.page import build, gradio, launch
from cofire.explore.subject import PICTURES, open_subject
from cofire.shell import AsJson

logger = logging.getLogger("cofire")


def explore(
    what: Annotated[
        str,
        typer.Argument(help="A run folder, a program, or zoo:NAME; see `cofire zoo`.", metavar="RUN|PROGRAM|zoo:NAME"),
    ] = "zoo:resnet8_digits_ftwt",
    images: Annotated[
        Path | None, typer.Option(help="Folder of pictures to pick from; default: the test set that RUN was made with.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on. There is no login.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: the first that is free from 7860 on.")] = 0,
    pictures: Annotated[int, typer.Option(min=1, max=500, help="How many to pick from.")] = PICTURES,
    as_json: AsJson = False,
) -> None:
    """A page in the browser: which filters fire for a picture, what that saves, and what the threshold or k does."""
    gradio()  # missing: says so before anything is compiled
    page = build(open_subject(what, pictures, images))
    try:
        address = launch(page, host, port)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another --host or --port") from error
    if host not in ("127.0.0.1", "::1", "localhost"):
        logger.warning("%s is not loopback: whoever reaches it can look, and there is no login", host)
    typer.echo(json.dumps({"address": address}) if as_json else f"{what} on {address}; stop with Ctrl-C")
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        page.close(verbose=False)
