"""quantize(model, images) -> Quantized: int8 in PyTorch, bit for bit what the engine computes."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from cofire.data.feeding import AnyLoader, first_images
from cofire.errors import ConfigError, DataError, unknown
from cofire.runtime.interpreter import trace
from cofire.runtime.lowering import lower
from cofire.runtime.program import Program
from cofire.runtime.quantizing import quantized_program

IMAGES = 256
"""Images that ranges are fitted to by default."""


class Quantized(nn.Module):
    """A model in int8. Made by :func:`quantize`; :func:`cofire.compile` gives its engine.

    A forward takes float32 images (B, C, H, W) and computes what the engine computes: the integers bit for bit, heads
    and ops that stay in float32 up to the order of their sums.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.threshold = program.threshold
        """Of the gates' logits."""
        self.masks: dict[str, Tensor] = {}
        """Group -> bool (B, O), of the last forward."""

    def forward(self, x_BCHW: Tensor) -> Tensor:
        done = trace(self.program, x_BCHW.float(), self.threshold)
        self.masks = done.masks
        return done.out


def quantize(
    model: nn.Module,
    images: AnyLoader | Tensor,
    *,
    input_shape: tuple[int, int, int] | None = None,
    keep: Collection[str] = (),
    most: int = IMAGES,
) -> Quantized:
    """``model``, plain or gated, in int8: u8 activations, s8 weights, sums in int32; ``model`` is left alone.

    Batch norm is folded first. Weights have a scale for each filter; every buffer has one scale and zero, by the least
    squares of what the images' activations lose. Convs with an activation other than ReLU and ReLU6, factors, and ops
    that neither are convs nor only move numbers stay in float32; ``engine.profile`` says which and why.

    Args:
        images: a few hundred like those to come, prepared as for the model: a tensor (B, C, H, W) or a loader. Labels
            are not looked at.
        input_shape: (C, H, W). Default: that of the images.
        keep: names of layers that stay in float32, as ``engine.profile`` shows them.
        most: of a loader, no more than so many images are used.

    Raises:
        CompileError: as :func:`cofire.compile`.
        DataError: no images, or of another shape.
    """
    if most < 1:
        raise ConfigError(f"most must be at least 1, got {most}")
    batches = first_images([images] if isinstance(images, Tensor) else images, most)
    shape = tuple(batches[0].shape[1:])
    if input_shape is not None and shape != tuple(input_shape):
        raise DataError(f"images must have the shape (B, {', '.join(map(str, input_shape))}), got (B, {shape})")
    program = lower(model, (shape[0], shape[1], shape[2]))
    names = {op.name for op in program.ops}
    for name in keep:
        if name not in names:
            raise unknown("layer to keep", name, names)
    with torch.no_grad():
        return Quantized(quantized_program(program, batches, keep))
