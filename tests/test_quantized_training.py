"""Fine-tuning through the simulation of int8: it learns, and the engine still computes the same bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from small import tiny_gated, tiny_plain
from torch import Tensor

from cofire import Quantized, Recipe, compile, data, fit, quantize
from cofire.runtime.integers import rounded
from cofire.runtime.interpreter import trace
from cofire.runtime.program import Conv8


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    pytest.importorskip("sklearn", reason="scikit-learn is needed (extra demo)")
    train = data.digits()[0]
    assert train.label_N is not None
    return train.normalise(train.pixels(torch.arange(80))), train.label_N[:80]


def loss(model: Quantized, digits: tuple[Tensor, Tensor]) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(model.eval()(digits[0]), digits[1]))


def test_gradients_pass_a_rounding() -> None:
    x = torch.tensor([0.5, 1.5, -2.4], requires_grad=True)
    y = rounded(x)
    assert y.tolist() == [0, 2, -2]
    y.backward(torch.tensor([1.0, 2.0, 3.0]))
    assert x.grad is not None
    assert x.grad.tolist() == [1, 2, 3]


def test_training_mode_computes_the_same(digits: tuple[Tensor, Tensor]) -> None:
    model = quantize(tiny_gated().eval(), digits[0][:32])
    learning = model.train()(digits[0][:16])
    assert learning.requires_grad
    assert torch.equal(learning, model.eval()(digits[0][:16]))


@pytest.mark.parametrize("gated", [False, True])
def test_what_was_fitted_is_better_and_still_what_the_engine_computes(
    gated: bool, digits: tuple[Tensor, Tensor]
) -> None:
    model = quantize((tiny_gated() if gated else tiny_plain()).eval(), digits[0][:32])
    begin, before = model.program, loss(model, digits)
    batches = [(digits[0][n : n + 40], digits[1][n : n + 40]) for n in (0, 40)]
    fit(model, batches, Recipe(epochs=4, lr=0.3))
    assert loss(model, digits) < before - 0.05
    now = model.program
    for op, old in zip(now.ops, begin.ops, strict=True):
        if isinstance(op, Conv8) and isinstance(old, Conv8):
            assert (op.weight.dtype, op.bias.dtype) == (torch.int8, torch.int32)
            assert not torch.equal(op.weight, old.weight)
            assert torch.equal(op.multiplier, old.multiplier)
    engine = compile(model)
    logits = engine(digits[0])
    masks = {name: torch.from_numpy(mask) for name, mask in engine.last_masks.items()}
    assert torch.equal(logits, trace(now, digits[0], forced=masks).out)
    if not gated:
        assert torch.equal(logits, model.eval()(digits[0]))
