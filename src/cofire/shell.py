"""What all commands share: ``--json``, errors for people, exit codes."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler

from cofire.errors import CofireError

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines in place of tables.")]


WIDE = 180  # characters: no table needs more


def output() -> Console:
    """Standard output; where no terminal says how wide it is, wide enough for tables."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDE
    return console


def show(as_json: bool, machine: Any, human: Any) -> None:
    """One result, for machines or for people."""
    if as_json:
        typer.echo(json.dumps(machine, indent=2))
    else:
        output().print(human, markup=False)


def run(app: Callable[[], Any]) -> None:
    """Call a command line: errors a user can fix are printed without a traceback, exit code 2."""
    logging.basicConfig(level="WARNING", format="%(message)s", handlers=[RichHandler(console=Console(stderr=True))])
    try:
        app()
    except CofireError as error:
        Console(stderr=True).print(f"cofire: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except SystemExit as leaving:
        if leaving.code == 130:  # typer's for Ctrl-C
            Console(stderr=True).print("interrupted; call the same command again to go on", style="yellow")
        raise
