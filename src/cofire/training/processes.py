"""The processes of a run, and what the others see when one of them ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from accelerate import PartialState

from cofire.errors import TrainingError


def processes() -> PartialState:
    """The processes of this run: one, unless it was started by accelerate launch or torchrun."""
    return PartialState(cpu=not torch.accelerator.is_available())


@contextmanager
def together() -> Iterator[None]:
    """Inside the block the end of another process is a `TrainingError` that says so."""
    try:
        yield
    except RuntimeError as error:
        # What gloo raises has no class of its own, but names the line of its source that raised.
        if not isinstance(error, dist.DistError) and "/gloo/" not in str(error):
            raise
        rank, world = processes().process_index, processes().num_processes
        raise TrainingError(
            f"another process of this run has ended, so that this one, {rank} of 0..{world - 1}, cannot go on; "
            "its own message, or its system's log if it was killed, says why. Call the same command again: "
            f"with --out, the run goes on from its last checkpoint. ({error})"
        ) from error
