"""Laws of the forms a gate has: what heads pool, the largest few, factors, one row for a whole branch, other sources.

The oracle is ``interpreter``. That every algorithm of every kernel set computes convs right is in ``test_kernels``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from test_kernels import (
    ONE_OF_EACH_KIND,
    Layer,
    Residual,
    Values,
    engines,
    every_kernel_set,
    program_of,
    rounding,
    with_kernel,
)
from torch import Tensor

from cofire.errors import FileError
from cofire.runtime import interpreter
from cofire.runtime.engine import Engine
from cofire.runtime.folding import folded
from cofire.runtime.program import (
    Act,
    Activation,
    Add,
    Affine,
    Conv,
    Gate,
    Group,
    Head,
    Move,
    Op,
    Pool,
    Program,
    Rescale,
    Shape,
)
from cofire.runtime.program_file import read, to_bytes, write


def conv(src: int, dst: int, weight: Tensor, bias: Tensor, **own: Any) -> Conv:
    """One that keeps the map's size."""
    pad = weight.shape[2] // 2
    options: dict[str, Any] = {"stride": (1, 1), "padding": (pad,) * 4, "dilation": (1, 1), "groups": 1}
    options |= {"residual": False, "act": "none", "slope": 0.0, "gate": None, **own}
    kernel = (weight.shape[2], weight.shape[3])
    return Conv(name=f"conv{dst}", src=(src,), dst=dst, kernel=kernel, weight=weight, bias=bias, **options)


def chain(buffers: list[Shape], ops: Iterable[Op], threshold: float = 0.0) -> Program:
    """Of ops that end in the last buffer; groups are named by their numbers."""
    ops = tuple(ops)
    gates = {op.gate.group: op for op in ops if op.gate is not None}
    groups = [Group(name=str(number), filters=buffers[gates[number].dst][0]) for number in sorted(gates)]
    shape = buffers[-1]
    return Program(
        input=0,
        output=len(buffers) - 1,
        output_shape=shape,
        buffers=tuple(buffers),
        groups=tuple(groups),
        threshold=threshold,
        ops=ops,
    )


# Factors and what heads pool: the layer rescales its sums, a head behind it pools what it wrote


def with_factors(program: Program, values: Values) -> Program:
    """The layer's head chooses the largest half and gives factors, small whole numbers if inputs are."""
    layer = program.ops[-2]
    assert isinstance(layer, Conv)
    assert layer.gate is not None
    assert layer.gate.head is not None
    filters, channels = layer.gate.head.weight.shape
    weight = torch.eye(channels)[torch.arange(filters) % channels]  # one input each, so that factors stay small
    head = replace(layer.gate.head, weight=weight, bias=values(filters), top=(filters + 1) // 2, scale=True)
    layer = replace(layer, gate=replace(layer.gate, head=head), shift=values(filters))
    return replace(program, ops=(*program.ops[:-2], layer, program.ops[-1]))


def with_next_pool(program: Program, pool: Any, values: Values) -> Program:
    last = program.ops[-1]
    assert last.gate is not None
    assert last.gate.head is not None
    rows, inputs = last.gate.head.weight.shape
    head = replace(last.gate.head, pool=pool, weight=values(rows, inputs * (2 if pool == "both" else 1)))
    return replace(program, ops=(*program.ops[:-1], replace(last, gate=replace(last.gate, head=head))))


@every_kernel_set
@pytest.mark.parametrize("whole", [True, False])
def test_sums_times_factors(kernel: str, whole: bool) -> None:
    for residual in get_args(Residual):
        for layer in ONE_OF_EACH_KIND:
            values = Values(2, whole)
            program = with_factors(program_of(replace(layer, act="relu", residual=residual), values), values)
            x = values(3, 2, *layer.size)
            free = interpreter.trace(program, x.double())
            scales = free.factors["out"].max() + 1
            for word, engine in engines(program, kernel):
                for threads in (1, 2):
                    found = engine(x, threads)
                    assert {name: mask.tolist() for name, mask in engine.last_masks.items()} == {
                        name: mask.tolist() for name, mask in free.masks.items()
                    }, word
                    allowed = torch.zeros(()) if whole else rounding(program, x, word) * 4 * scales
                    off = (found - free.out).abs()
                    assert (off <= allowed).all(), f"{word}, {threads} threads: off by {off.max()}"


@every_kernel_set
@pytest.mark.parametrize("heads", [True, False])
def test_forced_masks_have_factors_only_if_heads_run(kernel: str, heads: bool) -> None:
    for layer in ONE_OF_EACH_KIND:
        values = Values(3, True)
        program = with_factors(program_of(layer, values), values)
        x = values(2, 2, *layer.size)
        masks = {group.name: values.mask(group.filters, "some") for group in program.groups}
        wanted = interpreter.trace(program, x.double(), forced=masks, unscaled=() if heads else None)
        for word, engine in engines(program, kernel):
            with engine.force(masks, heads=heads):
                assert torch.equal(engine(x).double(), wanted.out), word
                logits = engine.logits(x)  # asking for them changes nothing
            assert all(np.array_equal(logits[name], values) for name, values in wanted.logits.items()), word


@every_kernel_set
@pytest.mark.parametrize("pool", ["max", "avg", "abs", "both"])
@pytest.mark.parametrize("act", ["relu", "none"])
def test_what_a_head_pools(kernel: str, pool: str, act: Act) -> None:
    """As near as rounding allows, and bit for bit the same with any number of threads."""
    larger = (Layer(3, 9, (40, 36)), Layer(5, 12, (28, 28), kernel=(1, 1), padding=(0, 0, 0, 0)))
    kept: tuple[Residual, ...] = ("no", "in place")
    for number, layer in enumerate((*ONE_OF_EACH_KIND, *larger)):
        values = Values(4, False)
        program = program_of(replace(layer, act=act, residual=kept[number % 2]), values)
        program = with_next_pool(program, pool, values)
        x = values(1, 2, *layer.size)
        masks = {group.name: values.mask(group.filters, "some") for group in program.groups}
        wanted = interpreter.trace(program, x.double(), forced=masks).logits["next"]
        for word, engine in engines(program, kernel):
            found = []
            for threads in (1, 2):
                logits = np.zeros(engine._filters, np.float32)
                with engine.force(masks):
                    engine._run(x.numpy(), threads, logits=logits)
                found.append(logits[-3:])
            assert np.abs(found[0] - wanted.numpy()).max() <= 1e-4 * (1 + float(wanted.abs().max())), word
            assert np.array_equal(*found), f"{word}: two threads differ from one"


def largest_of(weights: list[float], top: int, pixel: float = 1.0) -> list[int]:
    """Which filters an engine switches on whose head gives these logits, times ``pixel``."""
    filters = len(weights)
    head = Head(pool="max", softmax=False, weight=torch.tensor(weights)[:, None], bias=None, top=top)
    ones, zeros = torch.ones(filters, 1, 1, 1), torch.zeros(filters)
    program = chain([(1, 2, 2), (filters, 2, 2)], [conv(0, 1, ones, zeros, gate=Gate(group=0, head=head))])
    x = torch.full((1, 1, 2, 2), pixel)
    for threshold in (-9.0, 9.0):  # means nothing to it
        engine = Engine(program, tuning="ref")
        engine.threshold = threshold
        out = engine(x)
        on = engine.last_masks["0"][0]
        assert (out[0, :, 0, 0] != 0).tolist() == on.tolist()
        assert on.tolist() == interpreter.trace(program, x.double()).masks["0"][0].tolist()
    return [int(o) for o in np.flatnonzero(on)]


def test_top_takes_the_largest_logits_and_of_equal_ones_the_first() -> None:
    nan, infinite = (
        float("nan"),
        float("inf"),
    )  # a row of zeros is not multiplied: its logit is 0, whatever the pixel is
    assert largest_of([0.0, 3.0, -1.0, 2.0], 1) == [1]
    assert largest_of([0.0, 3.0, -1.0, 2.0], 3) == [0, 1, 3]
    assert largest_of([-5.0, -4.0], 2) == [0, 1]
    assert largest_of([1.0, 2.0, 2.0, 2.0, 0.0], 2) == [1, 2]
    assert largest_of([0.0, -0.0, 0.0, -0.0], 2) == [0, 1]
    assert largest_of([0.0, -1.0, 0.0, 1.0], 1, infinite) == [3]
    assert largest_of([0.0, -1.0, 0.0, 1.0], 2, infinite) == [0, 3]
    assert largest_of([0.0, -1.0, 0.0, 1.0], 3, infinite) == [0, 2, 3]
    assert largest_of([1.0, 2.0, 3.0], 2, nan) == [0, 1]
    assert largest_of([1.0, 2.0, 0.0], 1, nan) == [2]
    assert largest_of([1.0, 2.0, 0.0], 2, nan) == [0, 2]
    random = torch.randint(-9, 9, (200,), generator=torch.Generator().manual_seed(0)).double()
    order = sorted(range(200), key=lambda o: (-float(random[o]), o))
    assert largest_of(random.tolist(), 77) == sorted(order[:77])


# One row for a whole branch


def blocks(values: Values) -> Program:
    """Two residual blocks of two convs each; a policy of three features decides about each block as a whole."""
    size = (6, 6)
    buffers: list[Shape] = [(3, *size), (4, *size), (3, 1, 1), (5, *size), (4, *size), (5, *size), (4, *size)]

    def gate(number: int, row: Tensor) -> Gate:
        head = Head(pool="max", softmax=False, weight=row[None], bias=torch.zeros(1), src=2)
        return Gate(group=number, head=head)

    def branch(number: int, src: int, inside: int, dst: int) -> list[Op]:
        row = torch.eye(3)[number]
        one = conv(src, inside, values(5, 4, 3, 3), values(5), act="relu", gate=gate(2 * number, row))
        two = conv(inside, dst, values(4, 5, 3, 3), values(4), act="relu", gate=gate(2 * number + 1, row))
        return [one, replace(two, src=(inside, src), residual=True)]

    window: dict[str, Any] = {"kernel": (1, 1), "stride": (1, 1), "padding": (0,) * 4, "dilation": (1, 1)}
    mean = Pool(name="policy", src=(0,), dst=2, gate=None, op="avg", **window, include_pad=False, adaptive=True)
    stem = conv(0, 1, values(4, 3, 3, 3), values(4), act="relu")
    return chain(buffers, [stem, mean, *branch(0, 1, 3, 4), *branch(1, 4, 5, 6)])


@pytest.mark.parametrize("kernel", ["", "ref"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_branch_is_on_or_off_as_a_whole(kernel: str, in_place: bool) -> None:
    values = Values(0, False)
    program = folded(blocks(values)) if in_place else blocks(values)
    assert len(program.buffers) == (5 if in_place else 7)
    x = values(4, 3, 6, 6)
    for number, (first, second) in enumerate([(False, False), (False, True), (True, False), (True, True)]):
        for channel, on in enumerate((first, second)):
            x[number, channel] += (1.0 if on else -1.0) - x[number, channel].mean()
    engine = with_kernel(kernel, program, "")
    wanted = interpreter.trace(program, x.double())
    for threads in (1, 2):
        engine(torch.full_like(x, float("nan")), threads)
        single = torch.cat([engine(image[None], threads) for image in x])
        assert torch.equal(engine(x, threads), single)
        assert (single - wanted.out).abs().max() <= 1e-6 * wanted.out.max()
    masks = [engine.last_masks[str(group)].tolist() for group in range(4)]
    assert masks[0] == [[False] * 5, [False] * 5, [True] * 5, [True] * 5]
    assert masks[1] == [[row[0]] * 4 for row in masks[0]]
    assert masks[2] == [[False] * 5, [True] * 5, [False] * 5, [True] * 5]
    stem, *macs = (macs.tolist() for macs in engine.last_macs.values())
    assert stem == [4 * 3 * 9 * 36] * 4
    once = 5 * 4 * 9 * 36
    assert macs == [[0, 0, once, once]] * 2 + [[0, once, 0, once]] * 2
    logits = engine.logits(x)
    assert np.allclose(logits["3"], x.mean((2, 3)).numpy()[:, 1:2].repeat(4, 1), atol=1e-6)


def test_what_is_off_reads_as_zero() -> None:
    """Not as what another image left there."""
    values = Values(1, False)
    program = blocks(values)
    inside = replace(program, output=3, output_shape=program.buffers[3])
    x = values(1, 3, 6, 6)
    engine = Engine(inside)
    with engine.force({"0": torch.ones(5)}):
        assert engine(x).abs().max() > 0
    with engine.force({"0": torch.zeros(5)}):
        assert not engine(x).any()


# Folding


def scaled(values: Values, ops: Callable[[Gate], list[Op]], shapes: list[Shape]) -> Program:
    """A conv to buffer 1 whose head gives factors, and ops that follow its gate."""
    head = Head(pool="abs", softmax=False, weight=values(4, 3), bias=values(4) + 1, top=3, scale=True)
    first = conv(0, 1, values(4, 3, 3, 3), values(4), gate=Gate(group=0, head=head))
    return chain([(3, 5, 5), (4, 5, 5), *shapes], [first, *ops(Gate(group=0, head=None))])


def rescale(src: int, dst: int, gate: Gate, shift: Tensor, act: Act = "none") -> Rescale:
    slope = 0.1 if act == "leaky" else 0.0
    return Rescale(name=f"rescale{dst}", src=(src,), dst=dst, gate=gate, act=act, slope=slope, shift=shift)


def act(src: int, dst: int, kind: Act, gate: Gate | None = None) -> Activation:
    return Activation(name=f"act{dst}", src=(src,), dst=dst, gate=gate, act=kind, slope=0.1 if kind == "leaky" else 0.0)


def norm(src: int, dst: int, gate: Gate, values: Values) -> Affine:
    own: dict[str, Any] = {"lift": True, "act": "none", "slope": 0.0, "scale": values(4), "shift": values(4)}
    return Affine(name=f"norm{dst}", src=(src,), dst=dst, gate=gate, **own)


MAP: Shape = (4, 5, 5)
CHAINS: dict[str, tuple[Callable[[Values, Gate], list[Op]], int]] = {
    "norm, factor, act": (
        lambda v, g: [norm(1, 2, g, v), rescale(2, 3, g, v(4)), act(3, 4, "relu", g)],
        1,
    ),
    "factor with its act": (lambda v, g: [rescale(1, 2, g, v(4), "silu")], 1),
    "factor, norm, act": (lambda v, g: [rescale(1, 2, g, v(4)), norm(2, 3, g, v), act(3, 4, "leaky", g)], 1),
    "relu, then a bare factor": (lambda v, g: [act(1, 2, "relu", g), rescale(2, 3, g, torch.zeros(4))], 1),
    "leaky, then a bare factor": (lambda v, g: [act(1, 2, "leaky", g), rescale(2, 3, g, torch.zeros(4))], 1),
    "relu, then a factor with a shift": (lambda v, g: [act(1, 2, "relu", g), rescale(2, 3, g, v(4))], 2),
    "relu6, then a bare factor": (lambda v, g: [act(1, 2, "relu6", g), rescale(2, 3, g, torch.zeros(4))], 2),
    "two factors, act": (lambda v, g: [rescale(1, 2, g, v(4)), rescale(2, 3, g, v(4)), act(3, 4, "relu", g)], 2),
    "factor, sum, act": (
        lambda v, g: [
            rescale(1, 2, g, v(4)),
            conv(0, 3, v(4, 3, 1, 1), v(4)),
            Add(name="add", src=(2, 3), dst=4, gate=None, act="none", slope=0.0),
            act(4, 5, "relu"),
        ],
        2,
    ),
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("seed", range(3))
def test_folding_keeps_what_factors_do(name: str, seed: int) -> None:
    values, (make, num_ops) = Values(seed, False), CHAINS[name]
    ops = make(values, Gate(group=0, head=None))
    plain = scaled(values, lambda gate: ops, [MAP] * len(ops))
    fewer = folded(plain)
    assert len(fewer.ops) == num_ops
    x = values(3, 3, 5, 5).double()
    before, after = interpreter.trace(plain, x), interpreter.trace(fewer, x)
    assert torch.allclose(before.out, after.out, atol=1e-5)
    assert torch.equal(before.masks["0"], after.masks["0"])
    assert before.macs.keys() == after.macs.keys()
    assert torch.allclose(Engine(fewer)(x.float()).double(), after.out, atol=1e-4)


def test_a_buffer_that_a_head_reads_stays() -> None:
    """It is neither folded into what comes after it nor overwritten before the head has read it."""
    values = Values(0, False)
    buffers: list[Shape] = [(3, 5, 5), MAP, MAP, MAP, MAP]
    head = Head(pool="both", softmax=False, weight=values(4, 8), bias=values(4), src=1)
    plain = chain(
        buffers,
        [
            conv(0, 1, values(4, 3, 3, 3), values(4)),
            act(1, 2, "relu"),
            replace(conv(0, 3, values(4, 3, 3, 3), values(4), residual=True), src=(0, 2)),
            conv(3, 4, values(4, 4, 3, 3), values(4), gate=Gate(group=0, head=head)),
        ],
    )
    fewer = folded(plain)
    x = values(5, 3, 5, 5).double()
    before, after = interpreter.trace(plain, x), interpreter.trace(fewer, x)
    assert torch.allclose(before.logits["0"], after.logits["0"])
    assert torch.allclose(before.out, after.out)
    assert torch.allclose(Engine(fewer)(x.float()).double(), after.out, atol=1e-4)


def test_a_residual_that_a_later_head_reads_is_not_written_over() -> None:
    values = Values(1, False)
    head = Head(pool="avg", softmax=False, weight=values(4, 4), bias=None, src=1)
    stem = conv(0, 1, values(4, 3, 3, 3), values(4))
    add = replace(conv(0, 2, values(4, 3, 3, 3), values(4), residual=True), src=(0, 1))
    last = conv(2, 3, values(4, 4, 3, 3), values(4), gate=Gate(group=0, head=head))
    plain = chain([(3, 5, 5), MAP, MAP, MAP], [stem, add, last])
    fewer = folded(plain)
    assert len(fewer.buffers) == 4
    x = values(2, 3, 5, 5).double()
    assert torch.allclose(interpreter.trace(plain, x).logits["0"], interpreter.trace(fewer, x).logits["0"])


@pytest.mark.parametrize("named", [True, False])
def test_a_conv_whose_head_reads_elsewhere_pads_for_itself(named: bool) -> None:
    """A head that pools the conv's own source needs the padded map, which has more zeros."""
    values = Values(2, False)
    pad = Move(name="pad", src=(0,), dst=1, gate=None, channels=(0, 1, 2), stride=(1, 1), offset=(-1, -1))
    head = Head(pool="avg", softmax=False, weight=values(4, 3), bias=None, src=0 if named else None)
    last = replace(conv(1, 2, values(4, 3, 3, 3), values(4), gate=Gate(group=0, head=head)), padding=(0, 0, 0, 0))
    plain = chain([(3, 5, 5), (3, 7, 7), MAP], [pad, last])
    fewer = folded(plain)
    assert len(fewer.ops) == (1 if named else 2)
    x = values(2, 3, 5, 5).double()
    before, after = interpreter.trace(plain, x), interpreter.trace(fewer, x)
    assert torch.allclose(before.out, after.out)
    assert torch.allclose(before.logits["0"], after.logits["0"])


# Files


def every_form(values: Values) -> Program:
    return scaled(values, lambda g: [norm(1, 2, g, values), rescale(2, 3, g, values(4), "relu")], [MAP, MAP])


def test_every_form_comes_back_from_its_file(tmp_path: Path) -> None:
    values = Values(0, False)
    for program in (every_form(values), folded(every_form(values)), blocks(values)):
        path = write(program, tmp_path / "x.cofire")
        again = read(path)
        assert to_bytes(again) == path.read_bytes()
        for one, other in zip(program.ops, again.ops, strict=True):
            assert vars(one).keys() == vars(other).keys()
            if one.gate is not None and one.gate.head is not None:
                assert other.gate is not None
                assert other.gate.head is not None
                head, found = vars(one.gate.head), vars(other.gate.head)
                assert all(found[name] == head[name] for name in ("pool", "softmax", "top", "scale", "src"))


def with_head(**changes: Any) -> Program:
    program = every_form(Values(0, False))
    first = program.ops[0]
    assert first.gate is not None
    assert first.gate.head is not None
    gate = replace(first.gate, head=replace(first.gate.head, **changes))
    return replace(program, ops=(replace(first, gate=gate), *program.ops[1:]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top": 0}, "top must be an integer from 1 to 4, got 0"),
        ({"top": 5}, "top must be an integer from 1 to 4, got 5"),
        ({"pool": "both"}, r'"0.head.weight" must have the shape \[4, 6\], got \[4, 3\]'),
        ({"pool": "min"}, 'must be one of max avg abs both, got "min"'),
        ({"weight": torch.zeros(2, 3)}, r"must have the shape \[4, 3\], got \[2, 3\]"),
        ({"weight": torch.zeros(1, 3), "bias": torch.zeros(1)}, "top of a head with one row must be null, got 3"),
        ({"bias": torch.zeros(1)}, r"must have the shape \[4\], got \[1\]"),
        ({"bias": torch.full((4,), float("nan"))}, "must have finite values only"),
        ({"scale": False}, "group whose head has scale"),
        ({"src": 4}, "src of the head must be an integer from 0 to 3, got 4"),
        ({"src": 1}, "src 1 of the head must be written before it is read"),
        ({"src": -1}, "src of the head must be an integer from 0 to 3, got -1"),
    ],
)
def test_a_wrong_head_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    program = with_head(**changes)
    with pytest.raises(FileError, match=message):
        read(write(program, tmp_path / "x.cofire"))
    with pytest.raises(Exception, match=r"invalid program file: op \d"):
        Engine(program)
