"""Networks that follow their dense teacher's answers, without labels: gated ones, first looks, static twins.

Shapes: B images of a batch.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor, nn

from cofire.gates.ftwt_offline import static_twin
from cofire.gates.gating import GatedModel, gate
from cofire.pruning.apply import prune_below
from cofire.second_look import SecondLook
from cofire.training.loop import fit
from cofire.training.recipe import Recipe

_BATCH = 50
_RATE = 0.005
_FIRST, _FIRST_RATE = 0.6, 0.02  # of the budget: what a first look costs; its rate


def distilled(gated: GatedModel, teacher: nn.Module, images: Sequence[Tensor], epochs: int) -> GatedModel:
    """A copy of ``gated`` whose network was trained for so many epochs; its heads decide as they did."""
    student = _with_plain_heads(gated)
    followed(student, teacher, images, _recipe(epochs))
    return student


def followed(student: nn.Module, teacher: nn.Module, images: Sequence[Tensor], recipe: Recipe) -> None:
    """Train ``student`` to give the answers of ``teacher``; it is left in eval mode."""
    fit(student, _Shuffled(images), dataclasses.replace(recipe, distill=1.0), teacher=teacher)
    student.eval()


def second_look(teacher: nn.Module, images: Sequence[Tensor], macs: float, epochs: int) -> GatedModel:
    """``teacher`` behind a pruned copy that learned its answers for so many epochs; no threshold is set yet.

    Raises:
        CofireError: the network has no such copy, or no classes.
    """
    _, channels, height, width = images[0].shape
    config = SecondLook(first=round(_FIRST * macs, 4), distill=1.0)
    looking = gate(teacher, config, input_shape=(channels, height, width))
    recipe = dataclasses.replace(_recipe(epochs), train="heads", head_lr=_FIRST_RATE)
    fit(looking, _Shuffled(images), recipe)
    return looking.eval()


def twin(model: nn.Module, gated: GatedModel, macs: float, images: Sequence[Tensor], epochs: int) -> nn.Module:
    """What ``gated`` is held against: static, at ``macs`` of the MACs, trained for as many epochs."""
    recipe = _recipe(epochs)
    if (static := gated.config.twin(macs, dataclasses.replace(recipe, head_lr=_FIRST_RATE))) is None:
        found: nn.Module = static_twin(model, gated, images)
    else:
        _, channels, height, width = images[0].shape
        found, _ = prune_below(model, static[0], input_shape=(channels, height, width))
        recipe = static[1]
    if epochs:
        followed(found, model, images, recipe)
    return found


def _recipe(epochs: int) -> Recipe:
    return Recipe(epochs=epochs, lr=_RATE, head_lr=0.0, schedule="cosine", select="last")


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
