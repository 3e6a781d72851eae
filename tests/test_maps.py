"""Calls that make maps of other sizes and orders, reduce, normalise or bend: the engine computes what PyTorch does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nets import Net
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from cofire import FTWT, compile, cost, gate
from cofire.errors import CompileError
from cofire.runtime import interpreter
from cofire.runtime.engine import Engine, load_program
from cofire.runtime.lowering import lower
from cofire.runtime.program import Resample, Strided

SHAPE = (3, 6, 10)
Call = Callable[[Any], Any] | nn.Module


class ScaledActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x) * 1.7


class StandardisedConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(F.pad(x, (1, 0, 0, 2)), weight, self.bias, self.stride, self.padding)


CALLS: dict[str, Call] = {
    "GELU": nn.GELU(),
    "GELU by tanh": nn.GELU("tanh"),
    "ELU": nn.ELU(0.3),
    "Tanh": nn.Tanh(),
    "Hardtanh": nn.Hardtanh(-0.2, 0.2),
    "Hardtanh aside": nn.Hardtanh(-0.1, 0.5),
    "clamp from zero": lambda x: x.clamp(0, 0.3),
    "Mish": nn.Mish(),
    "Softplus": nn.Softplus(),
    "PReLU per channel": nn.PReLU(8),
    "activation times a number": ScaledActivation(),
    "softmax": nn.Softmax(1),
    "log softmax": lambda x: F.log_softmax(x, dim=1),
    "softmax along rows": lambda x: x.softmax(-1),
    "nearest": nn.Upsample(scale_factor=2),
    "nearest, smaller": lambda x: F.interpolate(x, size=(4, 7)),
    "bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
    "bilinear, corners": nn.Upsample(size=(13, 27), mode="bilinear", align_corners=True),
    "bicubic": lambda x: F.interpolate(x, scale_factor=1.5, mode="bicubic"),
    "to the size of another": lambda x: F.interpolate(x, size=x.shape[-2:], mode="bilinear"),
    "transposed conv": nn.ConvTranspose2d(8, 6, 3, 2, 1, 1),
    "transposed conv in groups": nn.ConvTranspose2d(8, 4, (4, 2), (2, 1), (1, 0), groups=2, dilation=(1, 2)),
    "pixel shuffle": nn.PixelShuffle(2),
    "pixel unshuffle": nn.PixelUnshuffle(2),
    "reflection": nn.ReflectionPad2d((2, 1, 3, 0)),
    "replication": nn.ReplicationPad2d(2),
    "circular": lambda x: F.pad(x, (1, 1, 1, 1), mode="circular"),
    "conv that reflects": nn.Conv2d(8, 4, 3, padding=1, padding_mode="reflect"),
    "conv of standardised weights": StandardisedConv(8, 4, 3),
    "mean over channels": lambda x: x.mean(1, keepdim=True),
    "maximum over channels": lambda x: torch.max(x, 1, keepdim=True)[0],
    "channels away": lambda x: x.amax(1),
    "sum over space": lambda x: x.sum((2, 3)),
    "mean over rows": lambda x: x.mean(2),
    "mean over columns, kept": lambda x: x.mean(3, keepdim=True),
    "unit length": lambda x: F.normalize(x),
    "GroupNorm": nn.GroupNorm(4, 8),
    "InstanceNorm": nn.InstanceNorm2d(8, affine=True),
    "sum of branches": lambda x: torch.stack([x, 2 * x.relu()], 1).sum(1),
    "weights of branches": lambda x: x.view(x.shape[0], 2, 4, 6, 10).softmax(1).flatten(1, 2),
    "turned": lambda x: x.flip(3),
    "transposed": lambda x: x.transpose(2, 3),
    "channels last": lambda x: x.permute(0, 2, 3, 1) * 2,
    "rows as channels": lambda x: x.reshape(x.shape[0], 6, 8, 10).relu(),
}
MODULES: dict[str, tuple[Callable[[Any, Tensor], Any], dict[str, Callable[[], nn.Module]]]] = {
    "LayerNorm and Linear, channels last": (
        lambda m, x: m.fc(m.norm(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2),
        {"norm": lambda: nn.LayerNorm(8), "fc": lambda: nn.Linear(8, 5)},
    ),
    "Conv1d over channels": (
        lambda m, x: x * m.eca(x.mean((2, 3)).view(x.shape[0], 1, -1)).view(x.shape[0], -1, 1, 1).sigmoid(),
        {"eca": lambda: nn.Conv1d(1, 1, 3, padding=1, bias=False)},
    ),
    "functional conv with a buffer": (
        lambda m, x: F.conv2d(x, m.blur.weight, groups=8, stride=2),
        {"blur": lambda: nn.Conv2d(8, 8, 3, groups=8)},
    ),
}


def spread(wanted: Tensor) -> float:
    return float(wanted.max() - wanted.min())


def check(model: nn.Module, shape: tuple[int, int, int]) -> Engine:
    engine = compile(model.eval(), shape)
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted, form = tree_flatten(model(x))
    found, found_form = tree_flatten(engine(x))
    assert found_form == form
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert float((one - other).abs().max()) <= 1e-4 * spread(other)
    first = interpreter.trace(engine.program, x.double()).out  # of the first output
    assert float((first - wanted[0]).abs().max()) <= 1e-4 * spread(wanted[0])
    return engine


@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_what_pytorch_gives(name: str) -> None:
    call = CALLS[name]
    modules = {"module": call} if isinstance(call, nn.Module) else {}
    check(
        Net(lambda m, x: (m.module if modules else call)(m.one(x)), one=nn.Conv2d(3, 8, 3, padding=1), **modules), SHAPE
    )


@pytest.mark.parametrize("name", MODULES)
def test_modules_give_what_pytorch_gives(name: str) -> None:
    forward, makers = MODULES[name]
    modules = {key: make() for key, make in makers.items()}
    check(Net(lambda m, x: forward(m, m.one(x)), one=nn.Conv2d(3, 8, 3, padding=1), **modules), SHAPE)


def test_nearest_repeats_rows_and_bilinear_weighs_them() -> None:
    """A row of 2 as one of 4: nearest 0 0 1 1; bilinear 1, 3/4 and 1/4, 1/4 and 3/4, 1."""
    for mode, places, weights in (
        ("nearest", [[0], [0], [1], [1]], [[1.0]] * 4),
        ("bilinear", [[0, 1], [0, 1], [0, 1], [1, 0]], [[1, 0], [0.75, 0.25], [0.25, 0.75], [1, 0]]),
    ):
        net = Net(lambda m, x: m.up(m.one(x)), one=nn.Conv2d(3, 2, 1), up=nn.Upsample(scale_factor=2, mode=mode))
        (op,) = [op for op in lower(net, (3, 2, 2)).ops if isinstance(op, Resample)]
        assert torch.tensor(op.columns).view(4, -1).tolist() == places
        assert op.column_weights.tolist() == weights


def test_a_transposed_map_is_one_strided_op() -> None:
    net = Net(lambda m, x: m.one(x).transpose(2, 3), one=nn.Conv2d(3, 2, 1))
    (op,) = [op for op in lower(net, (3, 4, 5)).ops if isinstance(op, Strided)]
    assert (op.sizes, op.strides, op.begin) == ((2, 5, 4), (20, 1, 5), 0)


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda x: (x, x.relu()),
    "list of one": lambda x: [x],
    "dict": lambda x: {"out": x.mean((2, 3)), "aux": x},
    "nested": lambda x: (x.amax((2, 3)), [x, {"a": x * 2, "b": x[:, :3]}]),
    "chunks": lambda x: x.chunk(2, 1),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_several_outputs_come_back_as_the_model_gives_them(name: str, tmp_path: Path) -> None:
    engine = check(Net(lambda m, x: OUTPUTS[name](m.one(x)), one=nn.Conv2d(3, 8, 3, padding=1)), SHAPE)
    x = torch.randn(3, *SHAPE)
    loaded, form = tree_flatten(load_program(engine.save(tmp_path / "x.cofire"))(x))
    assert form == tree_flatten(engine(x))[1]
    assert all(torch.equal(one, other) for one, other in zip(loaded, tree_flatten(engine(x))[0], strict=True))
    threads, _ = tree_flatten(engine(x, threads=2))
    assert all(torch.equal(one, other) for one, other in zip(loaded, threads, strict=True))


def test_a_program_remembers_its_card(tmp_path: Path) -> None:
    card = {"classes": ["cat", "größer"], "data": {"images": 3}, "note": None}
    net = Net(lambda m, x: m.one(x), one=nn.Conv2d(3, 8, 3))
    path = compile(net.eval(), SHAPE, card=card).save(tmp_path / "x.cofire")
    assert load_program(path).card == card
    assert load_program(path).program.card == card


def test_the_error_names_the_part_that_can_be_compiled() -> None:
    net = Net(lambda m, x: m.two(m.one(x).exp()), one=nn.Conv2d(3, 8, 3), two=nn.Conv2d(8, 8, 3))
    with pytest.raises(CompileError, match=r"'exp' .*\n.*can be, up to 'one'"):
        lower(net, SHAPE)


def test_a_gated_network_with_maps_executes_what_cost_says() -> None:
    torch.manual_seed(0)
    net = Net(
        lambda m, x: m.last(m.up(m.two(F.gelu(m.norm(m.one(x)))).tanh())),
        one=nn.Conv2d(3, 8, 3, padding=1),
        norm=nn.BatchNorm2d(8),
        two=nn.Conv2d(8, 12, 3, padding=1),
        up=nn.Upsample(scale_factor=2, mode="bilinear"),
        last=nn.Conv2d(12, 4, 3, padding=1),
    )
    gated = gate(net, FTWT(), input_shape=SHAPE)
    engine = compile(gated.eval())
    x = torch.randn(4, *SHAPE)
    engine(x)
    masks = {name: torch.from_numpy(mask) for name, mask in engine.last_masks.items()}
    executed = cost(gated.graph, masks).executed
    assert engine.last_masks
    for name, macs in engine.last_macs.items():
        assert macs.tolist() == executed[name].tolist(), name
