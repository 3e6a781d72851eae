"""quantize(model, images) -> Quantized: int8 in PyTorch, bit for bit what the engine computes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from cofire.data.feeding import AnyLoader, first_images
from cofire.errors import ConfigError, DataError, unknown
from cofire.runtime.integers import rounded
from cofire.runtime.interpreter import trace
from cofire.runtime.lowering import lower
from cofire.runtime.program import Conv8, Program
from cofire.runtime.quantizing import quantized_program

_MOST_ADDED = 1 << 29  # to a bias, so that no sum leaves int32

IMAGES = 256
"""Images that ranges are fitted to by default."""


class Quantized(nn.Module):
    """A model in int8. Made by :func:`quantize`; :func:`cofire.compile` gives its engine.

    A forward takes float32 images (B, C, H, W) and computes what the engine computes: the integers bit for bit, heads
    and ops that stay in float32 up to the order of their sums. In training mode it computes the same, and gradients
    pass roundings as if they were not there: :func:`cofire.fit` trains the weights and biases of all convs in int8, by
    what is added to them; scales, heads and what is in float32 stay.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._begin = program
        self.threshold = program.threshold
        """Of the gates' logits."""
        self.masks: dict[str, Tensor] = {}
        """Group -> bool (B, O), of the last forward."""
        scales = {quant.buffer: quant.scale for quant in program.quants}
        convs = [op for op in program.ops if isinstance(op, Conv8)]
        self._units = [_Units.of(op, scales) for op in convs]
        self.added_weights = nn.ParameterList(torch.zeros(op.weight.shape) for op in convs)
        self.added_biases = nn.ParameterList(torch.zeros(op.bias.shape) for op in convs)

    @property
    def program(self) -> Program:
        """What the engine runs, with all that training has added so far."""
        with torch.no_grad():
            convs = [(weight.to(torch.int8), bias.to(torch.int32)) for weight, bias in self._trained()]
        return self._with(convs)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        learning = self.training and torch.is_grad_enabled()
        program = self._with(list(self._trained())) if learning else self.program
        with torch.set_grad_enabled(learning), torch.autocast(x_BCHW.device.type, enabled=False):
            done = trace(program, x_BCHW.cpu().float(), self.threshold)
        self.masks = done.masks
        return done.out.to(x_BCHW.device)

    def _trained(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Weight and bias of each conv in int8: whole numbers, in a float type."""
        begin = [op for op in self._begin.ops if isinstance(op, Conv8)]
        for op, units, weight, bias in zip(begin, self._units, self.added_weights, self.added_biases, strict=True):
            moved = op.weight + weight.cpu() / units.weight_O[:, None, None, None]
            yield (
                rounded(moved).clamp(-127, 127),
                op.bias.double() + rounded(bias.cpu().double() / units.bias_O).clamp(-_MOST_ADDED, _MOST_ADDED),
            )

    def _with(self, convs: Sequence[tuple[Tensor, Tensor]]) -> Program:
        left = iter(convs)
        ops = [_with_weights(op, *next(left)) if isinstance(op, Conv8) else op for op in self._begin.ops]
        return replace(self._begin, ops=tuple(ops))


@dataclass(frozen=True)
class _Units:
    """What one step of a filter's weights and of its bias stands for, (O,) each."""

    weight_O: Tensor
    bias_O: Tensor

    @classmethod
    def of(cls, op: Conv8, scales: Mapping[int, float]) -> _Units:
        bias_O = op.multiplier.double() * scales.get(op.dst, 1.0)
        return cls((bias_O / scales[op.src[0]]).float(), bias_O)


def _with_weights(op: Conv8, weight: Tensor, bias: Tensor) -> Conv8:
    return replace(op, weight=weight, bias=bias)


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
