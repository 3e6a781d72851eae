"""Laws of int8 in PyTorch: what a quantised model computes, in numbers worked out by hand, and how near it stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from nets import SHAPE, Net, bn, conv, fc, gated_net, images, option_a_net
from small import tiny_gated, tiny_plain
from torch import Tensor, nn

import cofire
from cofire import ConfigError, DataError, quantize
from cofire.runtime.integers import in_steps
from cofire.runtime.interpreter import trace
from cofire.runtime.lowering import lower
from cofire.runtime.program import Conv, Conv8, Dequantize, Program, Quant, Quantize, kind_of
from cofire.runtime.ranges import Ranges

DIGITS = (1, 8, 8)


def one_conv(quants: tuple[Quant, ...], x: Tensor, **own: Any) -> Tensor:
    """A float32 image through ``Quantize``, one 1x1 conv, and ``Dequantize`` if the conv's output is u8."""
    plain: dict[str, Any] = {
        "kernel": (1, 1),
        "stride": (1, 1),
        "padding": (0, 0, 0, 0),
        "dilation": (1, 1),
        "groups": 1,
        "residual": False,
        "low": 0,
        "high": 255,
        "residual_multiplier": 0.0,
    }
    ops: list[Any] = [
        Quantize(name="in", src=(0,), dst=1, gate=None),
        Conv8(name="conv", src=(1,), dst=2, gate=None, **plain | own),
    ]
    if len(quants) == 2:
        ops.append(Dequantize(name="out", src=(2,), dst=3, gate=None))
    shapes = (tuple(x.shape[1:]),) * 2 + ((len(own["weight"]), *x.shape[2:]),) * (len(ops) - 1)
    program = Program(
        input=0,
        output=len(ops),
        output_shape=shapes[-1],
        buffers=shapes,
        groups=(),
        threshold=0.0,
        ops=tuple(ops),
        quants=quants,
    )
    return trace(program, x).out.flatten()


def test_numbers_by_hand() -> None:
    """x = 0.5 * (q - 10); sum = 3 * (q - 10) - 4; y = sum * 0.5 rounded to even + 100; out = 2 * (y - 100)."""
    quants = (Quant(buffer=1, scale=0.5, zero=10), Quant(buffer=2, scale=2.0, zero=100))
    x = torch.tensor([0.0, 1.0, 0.74, 0.76, -50.0, 500.0, float("nan"), float("inf")]).view(1, 1, 1, -1)
    own = {"weight": torch.tensor([[[[3]]]], dtype=torch.int8), "bias": torch.tensor([-4], dtype=torch.int32)}
    found = one_conv(quants, x, **own, multiplier=torch.tensor([0.5]))
    #  q - 10:   0, 2, 1 (0.74 / 0.5 = 1.48), 2 (1.52), -10 (clamped), 245 (clamped), 0 (NaN), 245
    #  sum:     -4, 2, -1, 2, -34, 731, -4, 731;  halves -2, 1, -0.5 -> -0, 1, -17, 365.5 -> 155 (clamped), -2, 155
    assert found.tolist() == [-4.0, 2.0, 0.0, 2.0, -34.0, 310.0, -4.0, 310.0]
    float32 = one_conv(quants[:1], x, **own, multiplier=torch.tensor([0.5]))
    assert float32.tolist() == [-2.0, 1.0, -0.5, 1.0, -17.0, 365.5, -2.0, 365.5]
    clamped = one_conv(quants, x, **own, multiplier=torch.tensor([0.5]), low=100, high=102)
    assert clamped.tolist() == [0.0, 2.0, 0.0, 2.0, 0.0, 4.0, 0.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_beyond_float32_are_exact(dtype: torch.dtype) -> None:
    quants = (Quant(buffer=1, scale=1.0, zero=0),)
    own = {"weight": torch.full((1, 600, 1, 1), 127, dtype=torch.int8), "bias": torch.tensor([1], dtype=torch.int32)}
    x = torch.full((1, 600, 1, 1), 255.0, dtype=dtype)
    found = one_conv(quants, x, **own, multiplier=torch.tensor([1.0]))
    assert found.tolist() == [float(np.float32(600 * 127 * 255 + 1))]  # rounded once, from an exact sum


def test_zero_stays_zero_and_ranges_lose_little() -> None:
    program = lower(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(256, 2)), SHAPE)
    x = images(4)
    for shift in (0.0, -2.0, 5.0):
        quant = Ranges(program, [x + shift]).quant(0, [0])
        lost = ((x + shift) / quant.scale).round().clamp(-quant.zero, 255 - quant.zero) * quant.scale - (x + shift)
        assert 0 <= quant.zero <= 255
        assert float(lost.square().mean()) <= 1.1 * ((x.max() - x.min() + abs(shift)) / 255) ** 2 / 12
    only_positive = Ranges(program, [x.relu()]).quant(0, [0])
    assert only_positive.zero == 0


def test_outliers_are_clipped_by_least_squares() -> None:
    program = lower(nn.Sequential(nn.Conv2d(1, 1, 1), nn.Flatten(), nn.Linear(4096, 2)), (1, 64, 64))
    x = torch.rand(64, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    x[0, 0, 0, 0] = 4.0
    # (4 - high)^2 of the one, and (high / 255)^2 / 12 of each of the others, are least at
    high = 4 / (1 + x.numel() / (12 * 255**2))
    assert Ranges(program, [x]).quant(0, [0]).scale == pytest.approx(high / 255, rel=0.02)


@pytest.mark.parametrize(
    ("net", "shape"),
    [(tiny_plain, DIGITS), (tiny_gated, DIGITS), (option_a_net, SHAPE), (lambda: gated_net(option_a_net()), SHAPE)],
    ids=["plain", "gated", "option a", "option a, gated"],
)
def test_int8_is_near_float32(net: Any, shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    model, x = net().eval(), images(64, shape)
    found = quantize(model, x)
    program, plain = found.program, lower(model, shape)
    assert all(
        isinstance(op, Conv8) for op in program.ops if op.name in {o.name for o in plain.ops if isinstance(o, Conv)}
    )
    masks = trace(plain, x).masks
    wanted, got = trace(plain, x, forced=masks).out, trace(program, x, forced=masks).out
    assert float((got - wanted).norm() / wanted.norm()) < 0.05
    agree = [(found_masks == masks[name]).float().mean() for name, found_masks in trace(program, x).masks.items()]
    assert all(float(share) > 0.9 for share in agree)
    assert torch.equal(found(x), trace(program, x).out)
    assert torch.equal(found(x), trace(program, x.double()).out.float()) or program.groups  # integers, in either dtype


def test_macs_and_masks_are_those_of_float32() -> None:
    model, x = tiny_gated().eval(), images(8, DIGITS)
    plain, program = lower(model, DIGITS), quantize(model, x).program
    masks = trace(plain, x).masks
    one, other = trace(plain, x, forced=masks), trace(program, x, forced=masks)
    assert one.macs.keys() == other.macs.keys()
    assert all(torch.equal(one.macs[name], other.macs[name]) for name in one.macs)


def test_what_has_no_int8_form_stays_in_float32() -> None:
    """SiLU, a sigmoid's product and layers that are named; conversions stand where the two meet."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = F.silu(m.bn0(m.first(x)))
        x = x * torch.sigmoid(m.squeeze(x.mean((2, 3), keepdim=True)))
        x = F.relu(m.second(x))
        return m.fc(F.relu6(m.third(x)).mean((2, 3)))

    modules = {"first": conv(3, 6), "bn0": bn(6), "squeeze": conv(6, 6, 1), "second": conv(6, 6), "third": conv(6, 6)}
    net, x = Net(forward, **modules, fc=fc(6)).eval(), images(16)
    program = quantize(net, x, keep=["third"]).program
    kinds = {op.name: kind_of(op) for op in program.ops}
    assert {name: kinds[name] for name in ("first", "squeeze", "second", "third", "fc")} == {
        "first": "conv",
        "squeeze": "conv",
        "second": "conv8",
        "third": "conv",
        "fc": "conv8",
    }
    wanted, found = net(x).detach(), trace(program, x).out
    assert float((found - wanted).norm() / wanted.norm()) < 0.05


def test_errors() -> None:
    model = tiny_plain()
    with pytest.raises(ConfigError, match="unknown layer to keep 'conv9'"):
        quantize(model, images(4, DIGITS), keep=["conv9"])
    with pytest.raises(ConfigError, match="most must be at least 1, got 0"):
        quantize(model, images(4, DIGITS), most=0)
    with pytest.raises(DataError, match="no batch"):
        quantize(model, [])
    with pytest.raises(DataError, match="finite"):
        quantize(model, images(4, DIGITS) * float("inf"))
    with pytest.raises(DataError, match=r"\(B, 3, 8, 8\)"):
        quantize(model, images(4, DIGITS), input_shape=(3, 8, 8))


def test_the_model_is_left_alone() -> None:
    model = tiny_plain().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    cofire.quantize(model, images(4, DIGITS))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_weights_of_heads_are_whole_numbers_times_a_factor() -> None:
    rows = torch.randn(5, 70, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1e-3], [1], [40], [0], [1e-38]]
    )
    rows[2, 3] = float("nan")
    found = in_steps(rows)
    assert torch.equal(found[3:], rows[3:])
    assert torch.equal(found[2].isnan(), rows[2].isnan())
    assert torch.equal(found[2, 4:], rows[2, 4:])
    for before, after in zip(rows[:2], found[:2], strict=True):
        factor = after.abs().max() / 127
        assert torch.equal((after / factor).round() * factor, after)
        assert (after - before).abs().max() <= 0.51 * before.abs().max() / 127
    assert torch.equal(in_steps(found[:2]), found[:2])
