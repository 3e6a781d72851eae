"""Logits + what they should be -> losses: of the heads against targets, of a student against its teacher; pure."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def mask_bce(logits_BO: Tensor, target_BO: Tensor) -> Tensor:
    """Binary cross entropy of the mask, summed over filters and averaged over the batch: a scalar (equation 2)."""
    loss = F.binary_cross_entropy_with_logits(logits_BO.float(), target_BO.float(), reduction="sum")
    return loss / logits_BO.shape[0]


def distillation(logits_BK: Tensor, taught_BK: Tensor, temperature: float) -> Tensor:
    """Distance of a student's logits from its teacher's, a scalar (Hinton et al. 2015).

    The Kullback-Leibler divergence of the distributions at ``temperature``, averaged over the batch, times its square,
    so that gradients keep their size.
    """
    student_BK = F.log_softmax(logits_BK / temperature, 1)
    teacher_BK = F.log_softmax(taught_BK / temperature, 1)
    return F.kl_div(student_BK, teacher_BK, reduction="batchmean", log_target=True) * temperature**2
