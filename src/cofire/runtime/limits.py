"""What a program may cost."""

from __future__ import annotations

from dataclasses import dataclass

from cofire.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may cost; ``docs/program.md`` says how it is counted. A program beyond them is refused.

    The defaults let every usual network pass and no small file do harm.
    """

    memory: int = 1 << 29
    """Bytes that one image takes on one thread."""
    work: float | None = None
    """Steps that one image takes; default 2^34, and 2^16 for each weight."""
    tuning_seconds: float | None = None
    """For timing convs; default 1, and 0.2 for each megabyte of weights. 0: the likely best algorithms are taken."""

    def __post_init__(self) -> None:
        if not self.memory > 0:
            raise ConfigError(f"memory must be above 0, got {self.memory}")
        if self.work is not None and not self.work > 0:
            raise ConfigError(f"work must be above 0, got {self.work}")
        if self.tuning_seconds is not None and not self.tuning_seconds >= 0:
            raise ConfigError(f"tuning_seconds must be 0 or more, got {self.tuning_seconds}")

    def seconds(self) -> float:
        """For the native side: negative for the default."""
        return -1.0 if self.tuning_seconds is None else self.tuning_seconds
