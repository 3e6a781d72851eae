"""Any model in: each of the list is gated, learns a step, is estimated, saved and loaded; or the error says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from laws.models import MODELS, Model
from torch import Tensor

from cofire import FTWT, GatedModel, NoUnitError, estimate, gate, load, mask_loss, save

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(zoo.why_not), reason=zoo.why_not)]


def tensors(output: Any) -> list[Tensor]:
    """What a model returns, in whatever form."""
    if isinstance(output, Tensor):
        return [output]
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    return [tensor for part in parts for tensor in tensors(part)]


@pytest.mark.parametrize("model", [model for model in MODELS if not model.refused], ids=str)
def test_a_model_is_gated_learns_is_estimated_saved_and_loaded(model: Model, tmp_path: Path) -> None:
    plain = model.build()
    shape = (3, model.side, model.side)
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    gated = gate(plain, FTWT(), input_shape=shape)
    with torch.no_grad(), gated.force("open"):
        expected, found = tensors(plain(x)), tensors(gated(x))
    assert len(expected) == len(found) > 0
    assert all(torch.equal(theirs, ours) for theirs, ours in zip(expected, found, strict=True))
    table = estimate(plain, FTWT(), [x], [0.5])
    assert 0 < table.reduction["executed"][0] < 1
    assert all(op.reason for op in gated.graph.opaque if op.inside)

    gated.train()
    loss = torch.stack([tensor.float().square().mean() for tensor in tensors(gated(x))]).sum() + mask_loss(gated)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(parameter.grad is not None for parameter in gated.gates.parameters())

    save(gated.eval(), tmp_path)
    again = load(tmp_path, model=plain)
    assert isinstance(again, GatedModel)
    with torch.no_grad():
        pairs = zip(tensors(gated(x)), tensors(again(x)), strict=True)
    assert all(torch.equal(ours, loaded) for ours, loaded in pairs)


@pytest.mark.parametrize("model", [model for model in MODELS if model.refused], ids=str)
def test_a_model_in_which_nothing_can_be_gated_is_refused_with_the_reason(model: Model) -> None:
    with pytest.raises(NoUnitError, match=rf"(?s){model.refused}"):
        gate(model.build(), FTWT(), input_shape=(3, model.side, model.side))


def test_the_list_is_long_and_no_model_stands_twice() -> None:
    names = [model.name for model in MODELS]
    assert len(names) == len(set(names)) >= 70
    assert sum(not model.refused for model in MODELS) >= 60
