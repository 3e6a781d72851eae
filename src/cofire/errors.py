"""What a user can do wrong, one class each; every text says what must be how, what was got, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CofireError(Exception):
    """Base of all errors that a user of cofire can fix; the command line prints them without a traceback."""


class ConfigError(CofireError, ValueError):
    """A value of a config, a recipe or a call is out of its range, or a key is unknown."""


class TraceError(CofireError, ValueError):
    """The model cannot be read as a graph: torch.fx failed, or a forward at the given input shape did."""


class CompileError(CofireError, ValueError):
    """The model has a call or a gate that the native engine cannot run."""


class NoUnitError(CofireError, ValueError):
    """Nothing in the model can be gated, or the filter refused every unit."""


class DataError(CofireError, ValueError):
    """Images, labels or a loader are not as they must be."""


class FileError(CofireError, ValueError):
    """A file is missing, truncated, damaged or not one of ours."""


class BusyError(FileError):
    """Another process is at work in a folder."""


class TrainingError(CofireError, RuntimeError):
    """Training cannot go on: a loss or an activation is not finite, or another process has ended."""


def unknown(what: str, got: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that is not among ``known``: offers the nearest one and lists the rest."""
    names = sorted(known)
    near = difflib.get_close_matches(got, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ConfigError(f"unknown {what} {got!r}; {hint}known: {', '.join(names) or 'none'}")
