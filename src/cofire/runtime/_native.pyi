from typing import Any

import numpy as np
from numpy.typing import NDArray

def cpu_features() -> list[str]:
    """Instruction sets of this machine that kernels can use."""

def machine() -> str:
    """The CPU's model and instruction sets: what a tuning holds for."""

def conv_algorithms() -> list[str]:
    """Names of all algorithms for convs; the last is the reference."""

def check(file: bytes) -> None:
    """Raises RuntimeError unless the bytes are a program file."""

def speeds(kernel: str, bytes: int) -> tuple[float, float, float, float]:
    """MACs of floats, MACs of bytes, and bytes read of so much memory, each per second at best."""

class TooCostly(RuntimeError):
    """The program would take more memory or work than the limits allow."""

class Engine:
    """A program, ready to run. Calls may come from several threads."""

    kernel: str
    tuning: str

    def __init__(
        self,
        file: bytes,
        kernel: str = "",
        tuning: str = "",
        memory: int = ...,
        work: float = 0.0,
        tuning_seconds: float = -1.0,
    ) -> None: ...
    def run(
        self,
        x: NDArray[np.float32],
        output: NDArray[np.float32],
        threads: int,
        threshold: float,
        heads: bool,
        masks: NDArray[np.uint8] | None,
        macs: NDArray[np.int64] | None,
        logits: NDArray[np.float32] | None,
        seconds: NDArray[np.float64] | None,
        forced: NDArray[np.uint8] | None,
        is_forced: list[bool],
    ) -> Any: ...
