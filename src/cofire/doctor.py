"""``cofire doctor``: what is installed, which kernels this CPU gets, which extras are missing. Needs no PyTorch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import re
from typing import Any

from cofire.errors import CofireError
from cofire.runtime import native_features
from cofire.runtime.engine import Engine
from cofire.runtime.outline import KEY
from cofire.shell import AsJson, show

CORE = "core"


def doctor(as_json: AsJson = False) -> None:
    """What is installed here, which kernels this CPU gets, and which extras are missing."""
    found = examine()
    show(as_json, found, _told(found))


def examine() -> dict[str, Any]:
    """Versions, engine and extras as JSON values; a package that is not installed has the version None."""
    return {
        "cofire": importlib.metadata.version("cofire"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "engine": _engine(),
        "packages": _packages(importlib.metadata.requires("cofire") or []),
    }


def _engine() -> dict[str, Any]:
    """The kernel set that a program gets here, found by loading and calling one; or why there is none."""
    try:
        engine = Engine(_smallest())
    except CofireError as error:
        return {"kernel": None, "features": [], "error": str(error)}
    return {"kernel": engine.kernel, "features": list(native_features() or ()), "error": None}


def _smallest() -> bytes:
    """A program file: one number, and a ReLU."""
    op = {"kind": "act", "name": "relu", "src": [0], "dst": 1, "attrs": {"act": "relu", "slope": 0.0}}
    table = {
        "version": 1,
        "input": 0,
        "output": 1,
        "output_shape": [1, 1, 1],
        "buffers": [[1, 1, 1], [1, 1, 1]],
        "groups": [],
        "threshold": 0.0,
        "ops": [{**op, "weights": [], "gate": None}],
        "sha256": hashlib.sha256(b"").hexdigest(),
    }
    text = json.dumps({"__metadata__": {KEY: json.dumps(table)}}).encode()
    return len(text).to_bytes(8, "little") + text


def _packages(requirements: list[str]) -> dict[str, dict[str, str | None]]:
    """Extra -> package -> its version; packages that every installation has are under ``core``."""
    found: dict[str, dict[str, str | None]] = {CORE: {}}
    for text in requirements:
        named, marked = re.match(r"[\w.-]+", text), re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", text)
        if named and named[0] != "cofire":  # an extra of extras
            found.setdefault(marked[1] if marked else CORE, {})[named[0]] = _version(named[0])
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _told(found: dict[str, Any]) -> str:
    engine = found["engine"]
    lines = [
        f"cofire {found['cofire']}, Python {found['python']}, {found['system']}",
        f"engine: kernels {engine['kernel']} ({', '.join(engine['features'])})"
        if engine["kernel"]
        else f"engine: none: {engine['error']}",
    ]
    for extra, packages in found["packages"].items():
        there = [f"{name} {version}" for name, version in packages.items() if version]
        missing = [name for name, version in packages.items() if not version]
        how = "pip install cofire" if extra == CORE else f"pip install 'cofire[{extra}]'"
        told = [", ".join(there)] if there else []
        told += [f"missing: {', '.join(missing)} ({how})"] if missing else []
        lines.append(f"{extra}: {'; '.join(told)}")
    return "\n".join(lines)
