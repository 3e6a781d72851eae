"""A unit's input -> one logit per filter: the only part of a gate that the native engine has to mirror.

Shapes: B samples, I input channels, O filters.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from cofire.gates.pooling import peak


class Head(nn.Module):
    """Global pooling over space, softmax over channels, linear map (section 3.3 of the paper).

    Args:
        in_channels, out_channels: I and O.
        pool: global ``max`` or ``avg``.
        softmax: normalise the pooled input over its channels.
        bias: of the linear map.
    """

    def __init__(
        self, in_channels: int, out_channels: int, *, pool: Literal["max", "avg"], softmax: bool, bias: bool
    ) -> None:
        super().__init__()
        self.pool = pool
        self.softmax = softmax
        self.linear = nn.Linear(in_channels, out_channels, bias=bias)

    @property
    def macs(self) -> int:
        """MACs for one sample."""
        return self.linear.in_features * self.linear.out_features

    def forward(self, x_BIHW: Tensor, peak_BI: Tensor | None = None) -> Tensor:
        """Logits (B, O) for an input (B, I, H, W); ``peak_BI`` is its maximum over space, if known already."""
        known_BI = peak_BI if self.pool == "max" else None
        pooled_BI = self._pooled(x_BIHW) if known_BI is None else known_BI
        logits_BO: Tensor = self.linear(torch.softmax(pooled_BI, dim=1) if self.softmax else pooled_BI)
        return logits_BO

    def _pooled(self, x_BIHW: Tensor) -> Tensor:
        return peak(x_BIHW) if self.pool == "max" else x_BIHW.flatten(2).mean(2)
