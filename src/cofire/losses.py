"""Logits + targets -> the loss that teaches the heads; pure functions."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def mask_bce(logits_BO: Tensor, target_BO: Tensor) -> Tensor:
    """Binary cross entropy of the mask, summed over filters and averaged over the batch: a scalar (equation 2)."""
    loss = F.binary_cross_entropy_with_logits(logits_BO.float(), target_BO.float(), reduction="sum")
    return loss / logits_BO.shape[0]
