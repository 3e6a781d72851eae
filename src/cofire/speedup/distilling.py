"""A gated network that follows its dense teacher's answers, without labels, its heads as they are.

Shapes: B images of a batch.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor, nn

from cofire.gates.gating import GatedModel, gate
from cofire.training.loop import fit
from cofire.training.recipe import Recipe

_BATCH = 50
_RATE = 0.005


def distilled(gated: GatedModel, teacher: nn.Module, images: Sequence[Tensor], epochs: int) -> GatedModel:
    """A copy of ``gated`` whose network was trained for so many epochs; its heads decide as they did."""
    student = _with_plain_heads(gated)
    recipe = Recipe(epochs=epochs, lr=_RATE, head_lr=0.0, schedule="cosine", distill=1.0, select="last")
    fit(student, _Shuffled(images), recipe, teacher=teacher)
    return student.eval()


def _with_plain_heads(gated: GatedModel) -> GatedModel:
    """A copy whose heads have their standardisation folded in: in training it would follow each batch."""
    config, groups = dataclasses.replace(gated.gates.config, standardise=False), set(gated.gates)
    shape = gated.graph.input_shape
    plain = gate(gated.backbone, config, filter_fn=lambda unit: unit.group in groups, input_shape=shape)
    for name, one in gated.gates.items():
        if not one.fixed:
            weight, bias = one.head.folded()
            plain.gates[name].head.linear.load_state_dict({"weight": weight.detach(), "bias": bias.detach()})
    return plain


def with_network_of(gated: GatedModel, other: GatedModel) -> GatedModel:
    """A copy of ``gated`` with the backbone of ``other``."""
    found = copy.deepcopy(gated)
    found.backbone.load_state_dict(other.backbone.state_dict())
    return found


@final
class _Shuffled:
    """Batches of images in a new order in each epoch, the last few images of which are left out."""

    def __init__(self, images: Sequence[Tensor]) -> None:
        self._images, self._epoch = images, 0
        starts = torch.tensor([0, *map(len, images)]).cumsum(0)
        self._size, self._starts = min(_BATCH, int(starts[-1])), starts

    def __len__(self) -> int:
        return int(self._starts[-1]) // self._size

    def __iter__(self) -> Iterator[tuple[Tensor, None]]:
        order = torch.randperm(int(self._starts[-1]), generator=torch.Generator().manual_seed(self._epoch))
        self._epoch += 1
        for row_B in order.split(self._size)[: len(self)]:
            place_B = torch.searchsorted(self._starts, row_B, right=True) - 1
            offset_B = row_B - self._starts[place_B]
            pairs = zip(place_B.tolist(), offset_B.tolist(), strict=True)
            yield torch.stack([self._images[place][offset] for place, offset in pairs]), None
