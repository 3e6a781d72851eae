"""Logits + what they should be -> losses: of the heads against targets, of a student against its teacher; pure.

Shapes: B samples, O filters, K classes, S positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from cofire.errors import TrainingError


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


def felt_later(
    y_BOHW: Tensor, mask: Tensor, logits_BO: Tensor, wanted: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """``y_BOHW * mask``, and the loss of a mask whose target only the gradient of that product will tell.

    The loss is 0 by value. Its gradient is that of `mask_bce` with the target that ``wanted`` makes of the filters'
    saliencies (B, O): the sum over space of |y * gradient of the product|. That gradient is dense: a filter that is off
    has its saliency too. Both results come from one node of the graph, so autograd has the gradients of both when it
    runs that node's backward; that of ``y_BOHW`` is what it would be without the loss.

    Args:
        mask: (B, O, 1, 1), 0 or 1.
        wanted: (B, O) -> bool (B, O).
    """
    found: tuple[Tensor, Tensor] = _FeltLater.apply(y_BOHW, mask, logits_BO, wanted)  # type: ignore[no-untyped-call]
    return found


class _FeltLater(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_BOHW: Tensor, mask: Tensor, logits_BO: Tensor, wanted: Any) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(y_BOHW, mask, logits_BO)
        ctx.wanted = wanted
        ctx.set_materialize_grads(False)
        return y_BOHW * mask, logits_BO.new_zeros((), dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, product_BOHW: Tensor | None, loss: Tensor | None) -> Any:
        if product_BOHW is None:
            raise TrainingError(
                "the gates learn from the gradient of the network's own loss, which takes no part in this backward "
                "pass: add it to the mask loss; in a recipe, warm_heads must be 0"
            )
        y_BOHW, mask, logits_BO = ctx.saved_tensors
        wide = torch.promote_types(y_BOHW.dtype, torch.float32)
        felt_BOS = (y_BOHW.to(wide) * product_BOHW.to(wide)).flatten(2)
        of_logits = None
        if loss is not None:
            off_BO = torch.sigmoid(logits_BO.float()) - ctx.wanted(felt_BOS.abs().sum(2)).float()
            of_logits = (off_BO * (loss / len(y_BOHW))).to(logits_BO.dtype)
        of_mask = felt_BOS.sum(2).view(mask.shape).to(mask.dtype) if ctx.needs_input_grad[1] else None
        return product_BOHW * mask, of_mask, of_logits, None
