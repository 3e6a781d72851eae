"""Laws of the engine on random programs: what it computes is what ``interpreter`` makes of them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import CLOSE, tensors
from test_engine_requests import NAN
from torch import Tensor

from cofire.runtime import interpreter, meanings
from cofire.runtime.engine import Engine
from cofire.runtime.program import (
    LIFTING,
    Act,
    Activation,
    Add,
    Affine,
    Cat,
    Conv,
    Deconv,
    Flatten,
    Gate,
    Group,
    Head,
    Move,
    Mul,
    Norm,
    Op,
    Pool,
    Program,
    Reduce,
    Resample,
    Rescale,
    Shape,
    Softmax,
    Strided,
)


class Maker:
    """Builds a program op by op; the seed of its weights does not depend on the choices."""

    def __init__(self, random: Random, seed: int) -> None:
        self.random, self.generator = random, torch.Generator().manual_seed(seed)
        self.buffers: list[Shape] = [(random.randint(1, 9), random.randint(1, 12), random.randint(1, 12))]
        self.groups: list[Group] = []
        self.scaled: set[int] = set()  # groups with factors
        self.ops: list[Op] = []

    def program(self) -> Program:
        while len(self.ops) < 1 + self.random.randrange(9):
            self.random.choice([self.conv, self.conv, self.conv, self.other, self.other])()
        last = self.ops[-1].dst if self.ops else self.conv() or self.ops[-1].dst
        shape = self.buffers[last]
        return Program(
            input=0,
            output=last,
            output_shape=shape[:1] if shape[1:] == (1, 1) and self.random.random() < 0.5 else shape,
            buffers=tuple(self.buffers),
            groups=tuple(self.groups),
            threshold=self.random.choice([0.0, 0.1]),
            ops=tuple(self.ops),
        )

    def values(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def source(self, fits: Callable[[Shape], bool] = lambda shape: True) -> int | None:
        found = [number for number, shape in enumerate(self.buffers) if fits(shape)]
        return self.random.choice(found) if found else None

    def emit(self, kind: type[Op], src: tuple[int, ...], shape: Shape, dst: int | None = None, **own: Any) -> None:
        gate = self.gate(self.buffers[src[0]][0], shape[0]) if self.random.random() < 0.5 else None
        if dst is None:
            dst = len(self.buffers)
            self.buffers.append(shape)
        if kind is Conv and gate is not None and gate.group in self.scaled and self.random.random() < 0.7:
            own["shift"] = self.values(shape[0])
        self.ops.append(kind(name=f"op{len(self.ops)}", src=src, dst=dst, gate=gate, **own))

    def gate(self, channels: int, filters: int) -> Gate:
        decided = [number for number, group in enumerate(self.groups) if group.filters == filters]
        if decided and self.random.random() < 0.5:
            return Gate(group=self.random.choice(decided), head=None)
        self.groups.append(Group(name=f"group{len(self.groups)}", filters=filters))
        pool = self.random.choice(["max", "avg", "abs", "both"])
        src = self.source() if self.random.random() < 0.3 else None
        inputs = (channels if src is None else self.buffers[src][0]) * (2 if pool == "both" else 1)
        rows = 1 if self.random.random() < 0.2 else filters
        head = Head(
            pool=pool,
            softmax=self.random.random() < 0.5,
            weight=self.values(rows, inputs),
            bias=self.values(rows) if self.random.random() < 0.5 else None,
            top=self.random.randint(1, filters) if rows == filters and self.random.random() < 0.5 else None,
            scale=self.random.random() < 0.5,
            src=src,
        )
        self.scaled |= {len(self.groups) - 1} if head.scale else set()
        return Gate(group=len(self.groups) - 1, head=head)

    def act(self, lifting: bool = True) -> dict[str, Any]:
        act = self.random.choice([act for act in get_args(Act) if lifting or act not in LIFTING])
        return {"act": act, "slope": {"leaky": 0.1, "elu": 0.5, "hardtanh": 1.5}.get(act, 0.0)}

    def conv(self) -> None:
        src = self.source()
        assert src is not None
        channels, *size = self.buffers[src]
        same = self.random.random() < 0.5
        kernel = (3, 3) if same else tuple(self.random.choice([1, 2, 3, 5]) for _ in size)
        padding = (1,) * 4 if same else tuple(self.random.randrange(4) for _ in range(4))
        stride, dilation = ((1, 1) if same else tuple(self.random.randint(1, 2) for _ in size) for _ in range(2))
        reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
        room = [n + padding[i] + padding[i + 2] - reach[i] for i, n in enumerate(size)]
        if min(room) < 0:
            return
        groups = self.random.choice([g for g in range(1, channels + 1) if channels % g == 0])
        filters = groups * self.random.choice([1, 2, 3]) if groups > 1 else self.random.randint(1, 14)
        shape: Any = (filters, *(n // s + 1 for n, s in zip(room, stride, strict=True)))
        kept = self.source(lambda other: other[1:] == shape[1:] and other[0] % groups == 0)
        if kept is not None and self.random.random() < 0.7:  # a residual, so take on its width
            shape = self.buffers[kept]
        else:
            kept = None
        in_place = kept not in (None, 0, src) and self.random.random() < 0.5
        weight = self.values(shape[0], channels // groups, *kernel)
        self.emit(
            Conv,
            (src,) if kept is None else (src, kept),
            shape,
            kept if in_place else None,
            kernel=kernel,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            residual=kept is not None,
            **self.act(lifting=kept is None),
            weight=weight / weight[0].numel() ** 0.5,
            bias=self.values(shape[0]),
        )

    def other(self) -> None:
        src = self.source()
        assert src is not None
        shape = self.buffers[src]
        channels, *size = shape
        kind = self.random.choice([Affine, Activation, Add, Mul, Cat, Move, Pool, Flatten, Rescale, *MAPS])
        if kind is Rescale:
            self.rescale()
        elif kind in MAPS:
            MAPS[kind](self, src, shape)
        elif kind is Affine:
            lift = self.random.random() < 0.5
            shift = self.values(channels) if lift else torch.zeros(channels)
            self.emit(Affine, (src,), shape, lift=lift, **self.act(lift), scale=self.values(channels), shift=shift)
        elif kind is Activation:
            self.emit(Activation, (src,), shape, **self.act())
        elif kind in (Add, Mul):
            other = self.source(lambda found: found in (shape, (channels, 1, 1)))
            assert other is not None
            self.emit(kind, (src, other), shape, **self.act())
        elif kind is Cat:
            other = self.source(lambda found: found[1:] == shape[1:])
            assert other is not None
            self.emit(Cat, (src, other), (channels + self.buffers[other][0], *shape[1:]))
        elif kind is Move:
            self.move(src, shape)
        elif kind is Flatten:
            self.emit(Flatten, (src,), (channels * size[0] * size[1], 1, 1))
        else:
            self.pool(src, shape)

    def rescale(self) -> None:
        group = self.random.choice(sorted(self.scaled)) if self.scaled else None
        src = None if group is None else self.source(lambda found: found[0] == self.groups[group].filters)
        if src is not None:
            shape = self.buffers[src]
            own = {"gate": Gate(group=group, head=None), **self.act()}
            self.buffers.append(shape)
            name, dst = f"op{len(self.ops)}", len(self.buffers) - 1
            self.ops.append(Rescale(name=name, src=(src,), dst=dst, shift=self.values(shape[0]), **own))

    def move(self, src: int, shape: Shape) -> None:
        width = self.random.randint(1, 8)
        channels = tuple(self.random.randint(-1, shape[0] - 1) for _ in range(width))
        out: Any = (width, self.random.randint(1, 9), self.random.randint(1, 9))
        stride = (self.random.randint(1, 3), self.random.randint(1, 3))
        offset = (self.random.randint(-3, 3), self.random.randint(-3, 3))
        self.emit(Move, (src,), out, channels=channels, stride=stride, offset=offset)

    def pool(self, src: int, shape: Shape) -> None:
        own: dict[str, Any] = {"op": self.random.choice(["max", "avg"]), "include_pad": self.random.random() < 0.5}
        if self.random.random() < 0.3:
            out = (shape[0], self.random.randint(1, 5), self.random.randint(1, 5))
            window = {"kernel": (1, 1), "stride": (1, 1), "dilation": (1, 1), "padding": (0, 0, 0, 0)}
            return self.emit(Pool, (src,), out, **own, **window, adaptive=True)
        kernel, stride, dilation = (tuple(self.random.randint(1, most) for _ in "hw") for most in (4, 3, 2))
        padding = tuple(self.random.randrange(3) for _ in range(4))
        up = self.random.randrange(2)  # ceil mode
        sides = []
        for i, n in enumerate(shape[1:]):
            room = n + padding[i] + padding[i + 2] - dilation[i] * (kernel[i] - 1) - 1
            sides.append((room + up * (stride[i] - 1)) // stride[i] + 1)
        op = Pool(
            name="",
            src=(),
            dst=0,
            gate=None,
            kernel=kernel,
            stride=stride,
            dilation=dilation,
            padding=padding,
            adaptive=False,
            **own,
        )
        touched = [meanings._windows(op, i, n, sides[i]) for i, n in enumerate(shape[1:])]
        if min(sides) >= 1 and all(places for windows in touched for places, _ in windows):
            given = {name: getattr(op, name) for name in ("kernel", "stride", "dilation", "padding")}
            self.emit(Pool, (src,), (shape[0], sides[0], sides[1]), **own, **given, adaptive=False)

    def deconv(self, src: int, shape: Shape) -> None:
        kernel, stride, dilation = (tuple(self.random.randint(1, most) for _ in "hw") for most in (4, 3, 2))
        padding = tuple(self.random.randrange(3) for _ in range(4))
        groups = self.random.choice([g for g in range(1, shape[0] + 1) if shape[0] % g == 0])
        filters = groups * self.random.randint(1, 3)
        sides = [
            (n - 1) * stride[i]
            + dilation[i] * (kernel[i] - 1)
            + 1
            - padding[i]
            - padding[i + 2]
            + self.random.randrange(max(stride[i], dilation[i]))
            for i, n in enumerate(shape[1:])
        ]
        if min(sides) >= 1 and max(sides) <= 40:
            own = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
            weight = self.values(shape[0], filters // groups, *kernel) / (shape[0] // groups) ** 0.5
            self.emit(Deconv, (src,), (filters, sides[0], sides[1]), **own, weight=weight, bias=self.values(filters))

    def resample(self, src: int, shape: Shape) -> None:
        out = [self.random.randint(1, 9) for _ in "hw"]
        taps = [self.random.randint(1, 3) for _ in "hw"]
        places = [
            tuple(self.random.randrange(n) for _ in range(m * k)) for n, m, k in zip(shape[1:], out, taps, strict=True)
        ]
        weights = [self.values(m, k) for m, k in zip(out, taps, strict=True)]
        weights[0][0, 0] = 0
        own = {"rows": places[0], "columns": places[1], "row_weights": weights[0], "column_weights": weights[1]}
        self.emit(Resample, (src,), (shape[0], out[0], out[1]), **own)

    def strided(self, src: int, shape: Shape) -> None:
        """The three sides in another order, one of them backwards, some of one repeated or left out."""
        channels, height, width = shape
        digits = [[channels, height * width], [height, width], [width, 1]]
        self.random.shuffle(digits)
        begin = 0
        if self.random.random() < 0.5:
            begin = (digits[1][0] - 1) * digits[1][1]
            digits[1][1] *= -1
        if self.random.random() < 0.5:
            digits[2][1] = 0
        digits[0][0] = self.random.randint(1, digits[0][0])
        sizes, strides = zip(*digits, strict=True)
        out = sizes if self.random.random() < 0.5 else (sizes[0] * sizes[1], 1, sizes[2])
        self.emit(Strided, (src,), out, sizes=sizes, strides=strides, begin=begin)

    def reduce(self, src: int, shape: Shape) -> None:
        channels = self.random.choice([n for n in range(1, shape[0] + 1) if shape[0] % n == 0])
        self.emit(Reduce, (src,), (channels, *shape[1:]), op=self.random.choice(["sum", "avg", "max"]))

    def softmax(self, src: int, shape: Shape) -> None:
        ways = self.random.choice([n for n in range(1, shape[0] + 1) if shape[0] % n == 0])
        self.emit(Softmax, (src,), shape, ways=ways, log=self.random.random() < 0.5)

    def norm(self, src: int, shape: Shape) -> None:
        over = self.random.choice(["group", "layer", "rms", "l2"])
        groups = self.random.choice([n for n in range(1, shape[0] + 1) if shape[0] % n == 0]) if over == "group" else 1
        own = {"over": over, "groups": groups, "epsilon": 0.1}
        self.emit(Norm, (src,), shape, **own, scale=self.values(shape[0]), shift=self.values(shape[0]))


MAPS: dict[type[Op], Callable[[Maker, int, Shape], None]] = {
    Deconv: Maker.deconv,
    Resample: Maker.resample,
    Strided: Maker.strided,
    Reduce: Maker.reduce,
    Softmax: Maker.softmax,
    Norm: Maker.norm,
}


def check_program(engine: Engine, x: Tensor, forced: dict[str, Tensor]) -> None:
    """The engine's masks are right but at the threshold, and all else is what the interpreter makes of them."""
    outputs = []
    for threads in (1, 2):
        engine(torch.full_like(x[:1], NAN), threads)
        engine(torch.full_like(x, NAN), threads)  # leaves NaN in all memory
        singles = []
        for number, image in enumerate(x):
            with engine.force({name: mask[number] for name, mask in forced.items()}):
                singles.append(engine(image[None], threads))
        outputs.append(torch.cat(singles))
        with engine.force(forced):
            outputs.append(engine(x, threads))
            logits = tensors(engine.logits(x))
    masks = tensors(engine.last_masks)
    wanted = interpreter.trace(engine.program, x.double(), forced=masks, unscaled=forced)
    heads = {op.gate.group: op.gate.head for op in engine.program.ops if op.gate is not None and op.gate.head}
    top = {group.name: heads[number].top for number, group in enumerate(engine.program.groups)}
    largest = max([1.0] + [float(value.data.nan_to_num().abs().max()) for value in wanted.values.values()])
    assert float((outputs[0] - wanted.out).abs().max()) <= 1e-5 * largest
    assert all(torch.equal(outputs[0], other) for other in outputs)
    for name, macs in wanted.macs.items():
        assert engine.last_macs[name].tolist() == macs.tolist(), name
    for group, mask in masks.items():
        away = wanted.logits[group] - engine.threshold
        k = top[group]
        if k is not None:
            away = wanted.logits[group] - wanted.logits[group].topk(k).values[:, -1:] + 1e-30
        assert float((wanted.logits[group] - logits[group]).abs().max()) <= CLOSE * largest, group
        if group in forced:
            assert torch.equal(mask, forced[group]), group
        else:
            assert k is None or mask.sum(1).tolist() == [k] * len(mask), group
            assert (((away > 0) == mask) | (away.abs() <= CLOSE * largest)).all(), group


@pytest.mark.parametrize("kernel", ["", "ref"])
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.randoms(use_true_random=False), st.integers(0, 2**32 - 1))
def test_random_programs(kernel: str, random: Random, seed: int) -> None:
    maker = Maker(random, seed)
    program = maker.program()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COFIRE_KERNEL", kernel)
        engine = Engine(program)
    assert (engine.kernel == "ref") == (kernel == "ref")
    x = maker.values(3, *program.buffers[0])
    half = [group for group in program.groups if random.random() < 0.5]
    check_program(engine, x, {group.name: maker.values(3, group.filters) > 0 for group in half})
