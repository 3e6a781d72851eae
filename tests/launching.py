"""Several processes of one run, started as `torchrun` or `accelerate launch` would start them."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def environment() -> dict[str, str]:
    """One thread each, no accelerator; the tests' folder can be imported from."""
    tests = str(Path(__file__).parent)
    return {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": tests}


def start(command: list[str], world: int = 2) -> list[subprocess.Popen[str]]:
    """The command once per rank; outputs are pipes of text."""
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        subprocess.Popen(
            command,
            env={**environment(), **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
