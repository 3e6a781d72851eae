"""A moving average of a model's weights, kept beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn


@final
class Average:
    """Exponential moving average of all floating-point parameters and buffers.

    Args:
        decay: in [0, 1), what a step leaves of the average; in step n at most (1 + n) / (10 + n), so that the weights
            of the beginning do not stay in it.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.tensors = {name: tensor.clone() for name, tensor in _weights(model).items()}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Take in the weights after ``step`` steps."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, tensor in _weights(model).items():
            self.tensors[name].lerp_(tensor, 1 - decay)

    @torch.no_grad()
    def write_to(self, model: nn.Module) -> None:
        """Give the model the average."""
        _write(model, self.tensors)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Inside the block the model has the average."""
        own = {name: tensor.clone() for name, tensor in _weights(model).items()}
        self.write_to(model)
        try:
            yield
        finally:
            with torch.no_grad():
                _write(model, own)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict().items() if tensor.is_floating_point()}


def _write(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in _weights(model).items():
        tensor.copy_(tensors[name])
