"""Checkpoints of a training run: one tensor file each, whole or not there, the last two kept."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cofire.errors import FileError
from cofire.files.atomic import remove
from cofire.files.tensors import read_tensors, write_tensors
from cofire.gates.persistence import fill

logger = logging.getLogger("cofire")
_FORMAT = "cofire-checkpoint/1"
_KEEP = 2


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after ``step`` steps: tensors, and what else the loop must know to go on, as JSON values."""

    step: int
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]


def capture(
    step: int,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    state: Mapping[str, Any],
    parts: Mapping[str, Mapping[str, Tensor]],
) -> Checkpoint:
    """The model's weights, the optimisers' buffers and further named parts at this moment."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        for index, buffers in optimizer.state_dict()["state"].items():
            for name, value in buffers.items():
                if isinstance(value, Tensor):
                    tensors[f"{_optimizer(number)}.{index}.{name}"] = value
    more = {f"{part}.{name}": tensor for part, named in parts.items() for name, tensor in named.items()}
    return Checkpoint(step, {**tensors, **more}, state)


def restore(
    checkpoint: Checkpoint, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, dict[str, Tensor]]:
    """Put a checkpoint's tensors back, and return its further parts; learning rates are the schedule's business."""
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, tensor in checkpoint.tensors.items():
        part, _, name = key.partition(".")
        parts[part][name] = tensor
    fill(model, parts["model"], f"the checkpoint of step {checkpoint.step}")
    for number, optimizer in enumerate(optimizers):
        buffers: dict[int, dict[str, Any]] = {}
        for key, tensor in parts[_optimizer(number)].items():
            index, _, name = key.partition(".")
            buffers.setdefault(int(index), {})[name] = tensor
        optimizer.load_state_dict({**optimizer.state_dict(), "state": buffers})
    device = next(model.parameters()).device
    further = {part: {name: tensor.to(device) for name, tensor in named.items()} for part, named in parts.items()}
    return {"average": {}, "callback": {}, **further}


def _optimizer(number: int) -> str:
    """The part of a checkpoint that holds an optimiser: the run's own is the first."""
    return "optimizer" if number == 0 else f"optimizer{number}"


class CheckpointFolder:
    """``step-00000123.safetensors`` files in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, checkpoint: Checkpoint) -> None:
        """Add a checkpoint, then drop all but the last two."""
        path = self.folder / f"step-{checkpoint.step:08d}.safetensors"
        header = {"format": _FORMAT, "step": checkpoint.step, "state": dict(checkpoint.state)}
        write_tensors(path, checkpoint.tensors, header)
        for old in self._paths()[:-_KEEP]:
            remove(old)

    def tidy(self) -> None:
        """Remove what a writer that was killed left behind."""
        for left_over in self.folder.glob(".*.tmp"):
            remove(left_over)

    def newest(self) -> Checkpoint | None:
        """The newest readable checkpoint; a damaged one is named in a warning and the one before is taken."""
        for path in reversed(self._paths()):
            try:
                tensors, header = read_tensors(path)
                if header.get("format") != _FORMAT:
                    raise FileError(f"{path} must have format {_FORMAT!r}, got {header.get('format')!r}")
                return Checkpoint(int(header["step"]), tensors, header["state"])
            except FileError as error:
                logger.warning("%s; the checkpoint before it is used", error)
        return None

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.safetensors"))
