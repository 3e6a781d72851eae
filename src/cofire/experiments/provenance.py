"""Where a number comes from: machine, versions, commit. Every result file carries it."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from cofire.runtime import native_features


def version() -> str:
    """The installed version of cofire."""
    return importlib.metadata.version("cofire")


def provenance() -> dict[str, Any]:
    """Machine, versions and commit as JSON values, without anything that names a person or a path."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cofire": version(),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "features": list(native_features() or ()),
            "system": f"{platform.system()} {platform.machine()}",
        },
    }


@functools.cache  # a process keeps the code it has loaded, whatever is committed while it runs
def _commit() -> str | None:
    """Commit of the source tree cofire is imported from, with ``+dirty`` if it differs; None outside of git."""
    here = Path(__file__).parent

    def git(*args: str) -> str:
        command = ["git", "-C", str(here), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("rev-parse", "HEAD") + ("+dirty" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
