"""Code from outside: a user's own file, named on the command line, and installed packages.

A plugin registers methods, criteria or backbones when it is imported. Only these two ways lead to an import: what a
recipe, a run or a model file says is looked up in the registries, and never imported.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from cofire.errors import ConfigError, FileError, unknown

GROUP = "cofire.plugins"
"""The entry points by which an installed package says that it has a plugin."""

logger = logging.getLogger("cofire")
loaded: list[Path] = []
"""The files that were imported, for processes that are to know the same methods."""
T = TypeVar("T")


def load_plugin(path: str | Path) -> None:
    """Import a Python file; a second time does nothing.

    Raises:
        FileError: there is no such Python file.
        ConfigError: it cannot be imported; says why.
    """
    path = Path(path).expanduser().resolve()
    name = f"cofire_plugin_{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise FileError(f"a plugin must be a Python file, got {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # it is the user's own code
        del sys.modules[name]
        raise ConfigError(f"plugin {path} cannot be imported: {type(error).__name__}: {error}") from error
    loaded.append(path)


@functools.cache
def load_installed() -> None:
    """Import the plugins of installed packages, once; one that is broken is named in a warning."""
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            logger.warning("the installed plugin %r (%s) cannot be imported: %s", entry.name, entry.value, reason)


def lookup(what: str, name: str, known: Callable[[], Mapping[str, T]]) -> T:
    """What a registry has under a name, which may be in a plugin that was not imported yet.

    Args:
        what: the kind of thing, for the error.
        known: gives the registry as it is at the time.
    """
    if name not in known():
        load_installed()
    if name not in known():
        hint = "if a file of yours defines it, name that file: cofire --plugin FILE ..."
        raise ConfigError(f"{unknown(what, name, known())}; {hint}")
    return known()[name]
