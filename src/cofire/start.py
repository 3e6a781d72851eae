"""Where the command line starts: verbs that need no PyTorch run without it, and the others when it is there."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from cofire.doctor import doctor
from cofire.errors import ConfigError
from cofire.serving.command import serve
from cofire.shell import run

LIGHT: dict[str, Callable[..., None]] = {"doctor": doctor, "serve": serve}
"""Verbs of the whole command line that run with numpy, typer and the packages of their extra."""


def main() -> None:
    """Entry point of ``cofire``."""
    run(_light if sys.argv[1:2] and sys.argv[1] in LIGHT else _whole)


def _light() -> None:
    app = typer.Typer(name="cofire", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
    app.callback()(lambda: None)  # so that a single verb is one still
    for name, function in LIGHT.items():
        app.command(name=name)(function)
    app()


def _whole() -> None:
    try:
        from cofire.cli import app
    except ModuleNotFoundError as error:
        here = ", ".join(LIGHT)
        raise ConfigError(f"{error.name} is needed here: pip install cofire; without it there is: {here}") from error
    app()
