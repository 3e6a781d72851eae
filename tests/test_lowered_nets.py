"""What becomes of each rule of lowering: one small net for each, which computes what PyTorch does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from lowered import (
    check,
    check_macs,
    counts,
    in_place,
)
from nets import SHAPE, FrozenNorm, Net, NormAct, bn, conv, fc, gated_net, images, random_masks
from small import tiny_gated
from torch import Tensor, nn

from cofire.runtime.interpreter import trace
from cofire.runtime.lowering import lower
from cofire.runtime.program import Activation, Add, Affine, Conv, Program


class Case(NamedTuple):
    """``plain`` and ``gated``: the ops by kind; None: as plain."""

    forward: Callable[[Any, Tensor], Tensor]
    plain: dict[str, int]
    modules: Mapping[str, nn.Module] = MappingProxyType({})
    gated: dict[str, int] | None = None


def ops(**kinds: int) -> dict[str, int]:
    """Beside the pooling and the linear layer that every net ends in, and its convs."""
    return kinds


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    both = x.chunk(2, 1)
    return both[0], both[1]


def shuffled(x: Tensor, groups: int = 2) -> Tensor:
    batch, channels, height, width = x.shape
    return x.view(batch, groups, channels // groups, height, width).transpose(1, 2).reshape(batch, -1, height, width)


def pre_activation(m: Any, x: Tensor) -> Tensor:
    x = m.one(x)
    return F.relu(m.bn2(x + m.two(F.relu(m.bn(x)))))


def written_over(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.one(x))
    F.relu_(y)
    return y


def excited(m: Any, x: Tensor) -> Tensor:
    y = F.relu(m.one(x))
    return y * torch.sigmoid(m.excite(y.mean((2, 3), keepdim=True)))


TWO = {"two": conv(8, 8)}
NORM = {"bn": bn(8)}
ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu method": lambda x: x.relu(),
    "relu in place": F.relu_,
    "clamp": lambda x: x.clamp(min=0),
    "relu6": F.relu6,
    "clamp to 6": lambda x: torch.clamp(x, 0, 6),
    "leaky": lambda x: F.leaky_relu(x, 0.2),
    "silu": F.silu,
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
    "sigmoid method": lambda x: x.sigmoid(),
    "hardsigmoid": F.hardsigmoid,
}
MODULES = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.SiLU, nn.Hardswish, nn.Sigmoid, nn.Hardsigmoid, nn.PReLU)
POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: F.max_pool2d(x, 2),
    "max in ceil mode": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "max with dilation": lambda x: F.max_pool2d(x, (2, 3), 1, (0, 1), dilation=2),
    "mean": lambda x: F.avg_pool2d(x, 2),
    "mean with padding": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "mean without padding's zeros": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "mean in ceil mode": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "mean in ceil mode without zeros": lambda x: F.avg_pool2d(x, (2, 3), (3, 2), (1, 0), True, False),
    "adaptive mean": lambda x: F.adaptive_avg_pool2d(x, (3, 5)),
    "adaptive maximum to more": lambda x: F.adaptive_max_pool2d(x, (9, 3)),
    "amax": lambda x: x.amax((2, 3), keepdim=True),
}

CASES: dict[str, Case] = {
    "pre-activation": Case(pre_activation, ops(affine=2), TWO | NORM | {"bn2": bn(8)}),
    "conv, act, norm": Case(lambda m, x: m.bn(F.relu(m.one(x))), ops(affine=1), NORM),
    "norm twice": Case(lambda m, x: F.relu(m.bn2(m.bn(m.one(x)))), ops(), NORM | {"bn2": bn(8)}),
    "frozen norm": Case(lambda m, x: F.relu(m.bn(m.one(x))), ops(), {"bn": FrozenNorm(8)}),
    "norm with activation": Case(lambda m, x: m.bn(m.one(x)), ops(), {"bn": NormAct(8)}),
    "norm of a sum": Case(lambda m, x: m.bn(m.one(x) + m.two(m.one(x))), ops(affine=1), TWO | NORM),
    "numbers": Case(lambda m, x: F.relu(m.one(x)) * 0.5 + 3, ops(affine=1)),
    "numbers, other way round": Case(lambda m, x: 3 - 2 * F.relu(m.one(x)) / 4, ops(affine=1)),
    "numbers on a conv": Case(lambda m, x: F.relu(m.one(x) * 0.5 + 3), ops(), gated=ops(affine=1)),
    "twice itself": Case(lambda m, x: (lambda y: y + y)(F.relu(m.one(x))), ops(affine=1)),
    "parameter per channel": Case(lambda m, x: F.relu(m.one(x)) * m.one.bias[:, None, None], ops(affine=1)),
    "scale before a conv": Case(lambda m, x: F.relu(m.two(F.relu(m.one(x)) * 2)), ops(), TWO, ops(affine=1)),
    "norm before a conv": Case(
        lambda m, x: F.relu(m.two(m.bn(F.relu(m.one(x))))), ops(), {"two": conv(8, 8, 1)} | NORM, ops(affine=1)
    ),
    "norm before a conv with padding": Case(
        lambda m, x: F.relu(m.two(m.bn(F.relu(m.one(x))))), ops(affine=1), TWO | NORM
    ),
    "swish written out": Case(lambda m, x: (lambda y: y * torch.sigmoid(y))(m.one(x)), ops(act=1, mul=1)),
    "in place, result unused": Case(written_over, ops(), NORM),
    "dropout between": Case(lambda m, x: F.relu(m.bn(m.drop(m.one(x)))), ops(), NORM | {"drop": nn.Dropout(0.5)}),
    "two convs added": Case(lambda m, x: F.relu(m.one(x) + m.other(x)), ops(), {"other": conv(3, 8)}),
    "in place addition": Case(
        lambda m, x: F.relu(m.two(F.relu(m.one(x))).add_(m.other(x))), ops(), TWO | {"other": conv(3, 8, 1)}
    ),
    "difference": Case(lambda m, x: F.relu(m.one(x) - m.other(x)), ops(), {"other": conv(3, 8)}, None),
    "addition with alpha": Case(
        lambda m, x: torch.add(F.relu(m.one(x)), F.relu(m.other(x)), alpha=0.5),
        ops(affine=1, add=1),
        {"other": conv(3, 8)},
    ),
    "activation before the addition": Case(
        lambda m, x: (lambda y: y + F.relu(m.two(y)))(F.relu(m.one(x))), ops(add=1), TWO
    ),
    "sigmoid of a sum": Case(lambda m, x: (lambda y: torch.sigmoid(y + m.two(y)))(F.relu(m.one(x))), ops(act=1), TWO),
    "sum of three": Case(
        lambda m, x: (lambda y: F.relu(y + m.two(y) + m.three(y)))(F.relu(m.one(x))), ops(), TWO | {"three": conv(8, 8)}
    ),
    "sum with one value per channel": Case(
        lambda m, x: (lambda y: F.relu(y.mean((2, 3), keepdim=True) + m.two(y)))(F.relu(m.one(x))),
        ops(pool=1, add=1),
        TWO,
    ),
    "squeeze and excite": Case(excited, ops(pool=1, mul=1), {"excite": conv(8, 8, 1)}),
    "spatial attention": Case(
        lambda m, x: (lambda y: torch.sigmoid(m.where(y)) * y)(F.relu(m.one(x))),
        ops(move=1, mul=1),
        {"where": conv(8, 1)},
    ),
    "one number per image": Case(
        lambda m, x: (lambda y: y * torch.sigmoid(m.where(y.mean((2, 3), True))))(F.relu(m.one(x))),
        ops(pool=1, move=1, mul=1),
        {"where": conv(8, 1, 1)},
    ),
    "channel shuffle": Case(lambda m, x: F.relu(m.two(shuffled(F.relu(m.one(x))))), ops(move=1), TWO),
    "halves, one of them further": Case(
        lambda m, x: (lambda a, b: torch.cat([a, F.relu(m.two(b))], 1))(*halves(F.relu(m.one(x)))),
        ops(move=2, cat=1),
        {"two": conv(4, 8), "fc": fc(12)},
    ),
    "concatenation": Case(
        lambda m, x: F.relu(m.two(torch.cat([F.relu(m.one(x)), x, F.relu(m.other(x))], 1))),
        ops(cat=1),
        {"other": conv(3, 8), "two": conv(19, 8)},
    ),
    "option A": Case(
        lambda m, x: F.relu(m.down(F.relu(m.one(x))) + F.pad(F.relu(m.one(x))[:, :, ::2, ::2], (0, 0, 0, 0, 4, 4))),
        ops(move=1),
        {"down": conv(8, 16, stride=2), "fc": fc(16)},
    ),
    "asymmetric padding": Case(
        lambda m, x: F.relu(m.two(F.pad(F.relu(m.one(x)), (0, 1, 2, 0)))),
        ops(),
        {"two": nn.Conv2d(8, 8, 3, stride=2)},
        ops(move=1),
    ),
    "cropping": Case(lambda m, x: F.relu(m.two(F.relu(m.one(x))[:, :, 1:-2, 2:])), ops(move=1), TWO),
    "padding before a pooling": Case(
        lambda m, x: F.max_pool2d(m.pad(-F.relu(m.one(x))), 3), ops(affine=1, move=1, pool=1), {"pad": nn.ZeroPad2d(1)}
    ),
    "even kernel, same": Case(
        lambda m, x: F.relu(m.two(F.relu(m.one(x)))),
        ops(),
        {"two": nn.Conv2d(8, 8, (4, 2), padding="same", dilation=(1, 3))},
    ),
    "stride, dilation, groups": Case(
        lambda m, x: F.relu(m.two(F.relu(m.one(x)))),
        ops(),
        {"two": nn.Conv2d(8, 8, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1), groups=4, bias=False)},
    ),
    "one module twice": Case(lambda m, x: F.relu(m.two(F.relu(m.two(F.relu(m.one(x)))))), ops(), TWO),
    "functions": Case(lambda m, x: F.relu(F.conv2d(F.relu(m.one(x)), m.two.weight, stride=2, padding=1)), ops(), TWO),
    **{f"act {name}": Case(lambda m, x, act=act: act(m.bn(m.one(x))), ops(), NORM) for name, act in ACTS.items()},
    **{
        f"module {kind.__name__}": Case(lambda m, x: m.act(m.bn(m.one(x))), ops(), NORM | {"act": kind()})
        for kind in MODULES
    },
    **{
        f"pool {name}": Case(lambda m, x, pool=pool: pool(F.relu(m.one(x))), ops(pool=1))
        for name, pool in POOLS.items()
    },
}


def net_of(case: Case) -> Net:
    modules = {"one": conv(3, 8), "fc": fc(8), **{name: copy.deepcopy(module) for name, module in case.modules.items()}}
    return Net(lambda m, x: m.logits(case.forward(m, x)), **modules).eval()


def without_convs(program: Program) -> dict[str, int]:
    found = {kind: count for kind, count in counts(program).items() if kind != "conv"}
    found["pool"] -= 1  # the last one
    return {kind: count for kind, count in found.items() if count}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", CASES)
def test_a_small_net_computes_what_pytorch_does(name: str) -> None:
    case, shape = CASES[name], (3, 9, 8)
    net = net_of(case)
    assert without_convs(check(net, shape)) == case.plain
    for site in ("pre_add", "post_add"):
        gated = gated_net(net, shape, linear=True, site=site)
        program = check(gated, shape)
        masks = random_masks(gated, 3)
        with torch.no_grad(), gated.force(masks):
            expected = gated(images(3, shape))
        done = trace(program, images(3, shape), forced=masks)
        assert torch.allclose(done.out, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))
        check_macs(done, gated, masks, shape)
        if site == "pre_add":
            assert without_convs(program) == (case.plain if case.gated is None else case.gated)


def ends(forward: Callable[[Any, Tensor], Tensor], **modules: nn.Module) -> Program:
    return check(Net(forward, one=conv(3, 8), **modules).eval(), SHAPE)


def test_a_linear_layer_reads_a_flattened_map_in_any_order() -> None:
    for forward in (
        lambda m, x: m.fc(F.relu(m.one(x)).flatten(1)),
        lambda m, x: m.fc(F.relu(m.one(x)).view(x.size(0), -1)),
        lambda m, x: m.fc(F.relu(m.one(x)).permute(0, 2, 3, 1).flatten(1)),
        lambda m, x: m.fc(torch.dropout(F.relu(m.one(x)).flatten(1), 0.5, False)),
    ):
        program = ends(forward, fc=fc(8 * 64))
        assert counts(program) == {"conv": 2}
        assert program.ops[-1].kernel == (8, 8)  # type: ignore[attr-defined]


def test_what_else_reads_a_flattened_map_has_it_flattened_but_for_activations() -> None:
    assert counts(ends(lambda m, x: m.fc(torch.sigmoid(m.one(x).flatten(1))), fc=fc(512))) == dict(conv=2)
    assert counts(ends(lambda m, x: m.one(x).flatten(1))) == dict(conv=1, flatten=1)
    part = ends(lambda m, x: m.fc(m.one(x).flatten(1)[:, 10:30]), fc=fc(20))
    assert counts(part) == dict(conv=2, flatten=1, move=1)


def test_a_vector_has_norms_and_activations_too() -> None:
    program = ends(
        lambda m, x: m.last(F.relu(m.bn(m.fc(m.one(x).mean((2, 3)))))), fc=fc(8, 6), bn=nn.BatchNorm1d(6), last=fc(6)
    )
    assert counts(program) == dict(conv=3, pool=1)


def test_a_map_may_be_the_output() -> None:
    program = ends(lambda m, x: F.relu(m.one(x)))
    assert (program.output_shape, counts(program)) == ((8, 8, 8), {"conv": 1})


class SameConv(nn.Conv2d):
    """Pads as TensorFlow does, in its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        height, width = (max((-(-n // 2) - 1) * 2 + 5 - n, 0) for n in x.shape[2:])  # kernel 5, stride 2
        return super().forward(F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2)))


@pytest.mark.parametrize("side", [1, 2, 5, 8])
def test_a_conv_that_pads_by_itself_may_have_a_kernel_larger_than_its_map(side: int) -> None:
    net = Net(lambda m, x: m.logits(m.same(m.one(x))), one=conv(3, 8), same=SameConv(8, 8, 5, stride=2), fc=fc(8))
    assert counts(check(net.eval(), (3, side, side))) == dict(conv=3, pool=1)


def test_names_are_those_of_the_cost_table_and_the_calls() -> None:
    net = Net(
        lambda m, x: m.logits(torch.sigmoid(m.add(m.add(m.one(x)) + m.one(x)).sigmoid() * m.one(x))),
        one=conv(3, 8),
        add=conv(8, 8),
        fc=fc(8),
    ).eval()
    names = [op.name for op in check(net, SHAPE).ops]
    assert len(set(names)) == len(names)
    assert {"one", "one#2", "one#3", "add", "add#2", "fc"} <= set(names)


def test_a_residual_that_is_read_again_is_not_written_over() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = F.relu(m.one(x))
        return m.logits(F.relu(m.three(F.relu(m.two(y) + y)) + y))

    modules = {"one": conv(3, 8), "two": conv(8, 8), "three": conv(8, 8), "fc": fc(8)}
    program = check(Net(forward, **modules).eval(), SHAPE)
    two, three = (op for op in program.ops if isinstance(op, Conv) and op.residual)
    # `two` also reads it as its input, and `three` after that
    assert two.dst not in two.src
    assert three.dst == three.src[1]


def test_the_input_and_a_convs_own_source_are_not_written_over() -> None:
    own = Net(lambda m, x: m.logits(m.two(F.relu(m.one(x) + x))), one=conv(3, 3), two=conv(3, 8), fc=fc(8)).eval()
    program = check(own, SHAPE)
    assert in_place(program) == 0
    assert program.ops[0].src == (program.input, program.input)


def test_a_mask_ends_a_unit_before_what_makes_something_of_zero() -> None:
    """The norm's shift, or a sigmoid behind the unit's end, must not be switched off with the filter."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.one(x)
        return m.logits(torch.sigmoid(y) + m.bn(y))

    gated = gated_net(Net(forward, one=conv(3, 8), bn=bn(8), fc=fc(8)), linear=True)
    program = check(gated, SHAPE)
    kinds = [type(op) for op in program.ops]
    assert kinds[:4] == [Conv, Activation, Affine, Add]
    assert [op.gate is not None for op in program.ops[:4]] == [True, False, False, False]
    assert program.ops[2].lift  # type: ignore[attr-defined]


def test_a_gate_whose_filters_are_all_off_works() -> None:
    gated = tiny_gated(always=True).eval()
    x, program = images(2, (1, 8, 8)), lower(gated)
    off = {group: torch.zeros(2, units[-1].out_channels) for group, units in gated.units.groups.items()}
    with torch.no_grad(), gated.force(off):
        expected = gated(x)
    done = trace(program, x, forced=off)
    assert torch.allclose(done.out, expected, atol=1e-6)
    assert sum(int(macs.sum()) for name, macs in done.macs.items() if name != "linear") == 0
