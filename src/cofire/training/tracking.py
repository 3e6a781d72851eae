"""Trackers of experiments (TensorBoard, trackio, wandb) as a second place for a run's figures, through Accelerate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, get_available_trackers

from cofire.errors import ConfigError, unknown

TRACKERS = ("tensorboard", "trackio", "wandb")
Track: TypeAlias = str | GeneralTracker
"""One of `TRACKERS`, or a tracker of one's own: a GeneralTracker of Accelerate."""
_PROJECT = "cofire"


def tracking(track: Track | None, out: Path | None) -> dict[str, Any]:
    """The arguments of an Accelerator that reports to ``track``; none without one.

    Raises:
        ConfigError: the tracker is unknown or not installed, or needs a folder and there is none.
    """
    if track is None:
        return {}
    if isinstance(track, str):
        if track not in TRACKERS:
            raise unknown("tracker", track, TRACKERS)
        if track not in [str(known) for known in get_available_trackers()]:
            raise ConfigError(f"tracker {track!r} is not installed here: pip install {track}")
    if out is None and (track == "tensorboard" or getattr(track, "requires_logging_directory", False)):
        raise ConfigError(f"tracker {track!r} writes files: give fit the folder out= for them")
    return {"log_with": track, "project_dir": out}


def start(accelerator: Accelerator, out: Path | None, settings: Mapping[str, Any]) -> None:
    """Begin to report a run; ``settings`` are its hyperparameters."""
    plain = {key: value if isinstance(value, bool | int | float) else str(value) for key, value in settings.items()}
    named = {"name": out.resolve().name} if out is not None else {}
    accelerator.init_trackers(_PROJECT, config=plain, init_kwargs={"trackio": named, "wandb": named})


def finish(accelerator: Accelerator) -> None:
    """End the report; unlike Accelerator.end_training this leaves the processes connected."""
    for tracker in accelerator.trackers:
        tracker.finish()
