"""Packages that only some features need: imported where they are used."""

from __future__ import annotations

import importlib
from types import ModuleType

from cofire.errors import DataError


def require(module: str, package: str, extra: str) -> ModuleType:
    """The module of an optional package, or an error that names the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"{package} is needed here: pip install 'cofire[{extra}]'") from error
