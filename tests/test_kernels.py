"""Every conv algorithm of every kernel set computes what docs/program.md says, whatever the shape and the masks.

The oracle is ``interpreter``, in float64. Sums of small whole numbers are exact in float32 too, also in the Winograd
domain if weights are multiples of its denominators, so algorithms have no excuse there; elsewhere they may round.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cofire import create_backbone, list_backbones
from cofire.errors import CompileError
from cofire.runtime import _native, interpreter
from cofire.runtime.engine import Engine
from cofire.runtime.lowering import lower
from cofire.runtime.program import LIFTING, Act, Conv, Gate, Group, Head, Pair, Program

ALGORITHMS = tuple(_native.conv_algorithms())
ACTS: tuple[Act, ...] = get_args(Act)
MACS = 1_000_000  # of one layer: a layer with more is cut down to fewer filters
CHANNELS = (1, 2, 5, 6, 7, 8, 13, 16)
SIDES = (*range(1, 10), *range(13, 19))
WINOGRAD = {2: 6**2, 3: 24**2, 4: 180**2}  # taps for each phase of the stride -> what makes transformed weights whole
Residual = Literal["no", "apart", "in place"]
KEEPS = ("none", "one", "all but one", "all", "some")
thorough = settings(max_examples=70, deadline=None, derandomize=True, database=None)


@dataclass(frozen=True)
class Layer:
    """A conv's shape; its residual lies in a buffer of its own or is written over."""

    channels: int
    filters: int
    size: Pair
    kernel: Pair = (3, 3)
    stride: Pair = (1, 1)
    padding: tuple[int, int, int, int] = (1, 1, 1, 1)
    dilation: Pair = (1, 1)
    groups: int = 1
    act: Act = "none"
    residual: Residual = "no"

    def __str__(self) -> str:
        window = f"k{self.kernel} s{self.stride} p{self.padding} d{self.dilation} g{self.groups}"
        return f"{self.channels}x{self.size[0]}x{self.size[1]} to {self.filters} {window}".replace(", ", ",")

    @property
    def out(self) -> Pair:
        top, left, bottom, right = self.padding
        spans = zip(self.size, (top + bottom, left + right), self.kernel, self.stride, self.dilation, strict=True)
        height, width = ((n + pad - d * (k - 1) - 1) // s + 1 for n, pad, k, s, d in spans)
        return height, width

    @property
    def macs(self) -> int:
        return self.channels // self.groups * self.filters * prod(self.kernel) * prod(self.out)


# Programs: a gated conv feeds the layer, so that some of its inputs are dead; another gives the residual; a gated conv
# behind it has a head that reads its peaks. All read one image of two channels.


class Values:
    """Tensors of small whole numbers, or of any."""

    def __init__(self, seed: int, whole: bool) -> None:
        self.generator, self.whole = torch.Generator().manual_seed(seed), whole

    def __call__(self, *shape: int, scale: float = 1) -> Tensor:
        if self.whole:
            return scale * torch.randint(-1, 2, shape, generator=self.generator).float()
        return torch.randn(shape, generator=self.generator)

    def mask(self, width: int, keep: str) -> Tensor:
        on = torch.zeros(width, dtype=torch.bool)
        count = {"none": 0, "one": 1, "all but one": width - 1, "all": width}
        chosen = torch.randperm(width, generator=self.generator)
        on[chosen[: count.get(keep, (width + 1) // 2)]] = True
        return on


def conv(
    number: int, src: tuple[int, ...], dst: int, weight: Tensor, bias: Tensor, head: Tensor, group: int, **own: Any
) -> Conv:
    options: dict[str, Any] = {"kernel": (1, 1), "stride": (1, 1), "padding": (0, 0, 0, 0), "dilation": (1, 1)}
    options |= {"groups": 1, "residual": False, "act": "none", "slope": 0.0, **own}
    gate = Gate(group=group, head=Head(pool="max", softmax=False, weight=head, bias=None))
    return Conv(name=f"conv{number}", src=src, dst=dst, gate=gate, weight=weight, bias=bias, **options)


def program_of(layer: Layer, values: Values) -> Program:
    """Groups ``in`` (what the layer reads), ``kept`` (its residual), ``out`` (its filters), ``next``."""
    channels, filters, has_residual = layer.channels, layer.filters, layer.residual != "no"
    scale = WINOGRAD.get(-(-layer.kernel[0] // layer.stride[0]), 1)
    window = {name: getattr(layer, name) for name in ("kernel", "stride", "padding", "dilation")}
    buffers = [(2, *layer.size), (channels, *layer.size), (filters, *layer.out), (3, *layer.out)]
    names = ["in", "kept", "out", "next"] if has_residual else ["in", "out", "next"]
    widths = {"in": channels, "kept": filters, "out": filters, "next": 3}
    ops = [conv(0, (0,), 1, values(channels, 2, 1, 1), values(channels), values(channels, 2), 0)]
    src, dst = (1,), 2
    if has_residual:
        weight, bias = values(filters, 2, *layer.kernel), values(filters)
        ops.append(conv(1, (0,), 2, weight, bias, values(filters, 2), 1, **window))
        src, dst = (1, 2), 2 if layer.residual == "in place" else 4
        buffers += [] if layer.residual == "in place" else [(filters, *layer.out)]
    weight = values(filters, channels // layer.groups, *layer.kernel, scale=scale)
    own = {**window, "groups": layer.groups, "act": layer.act, "residual": has_residual}
    own["slope"] = {"leaky": 0.25, "elu": 0.5, "hardtanh": 1.5}.get(layer.act, 0.0)
    ops.append(conv(2, src, dst, weight, values(filters), values(filters, channels), names.index("out"), **own))
    head = values(3, filters)
    ops.append(conv(3, (dst,), 3, values(3, filters, 1, 1), values(3), head, names.index("next")))
    return Program(
        input=0,
        output=dst,
        output_shape=buffers[dst],
        buffers=tuple(buffers),
        groups=tuple(Group(name=name, filters=widths[name]) for name in names),
        threshold=0.0,
        ops=tuple(ops),
    )


POISON = 2.0**100


def poisoned(program: Program, masks: dict[str, Tensor]) -> Program:
    """What filters that are off weigh must not matter: whoever reads it gets far too large a number."""
    ops = []
    for op in program.ops:
        assert isinstance(op, Conv)
        assert op.gate is not None
        off = ~masks[program.groups[op.gate.group].name]
        weight = op.weight.masked_fill(off[:, None, None, None], POISON)
        ops.append(replace(op, weight=weight, bias=op.bias.masked_fill(off, POISON)))
    return replace(program, ops=tuple(ops))


# Engines


def with_kernel(name: str, program: Program, tuning: str) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COFIRE_KERNEL", name)
        return Engine(program, tuning=tuning)


def missing(kernel: str) -> str:
    """Why a kernel set cannot run here."""
    try:
        with_kernel(kernel, program_of(Layer(1, 1, (1, 1)), Values(0, True)), "ref ref ref")
    except CompileError as error:
        return str(error)
    return ""


WHY_NOT = {name: missing(name) for name in ("v2", "v3", "v4", "base")}
KERNELS = [name for name, reason in WHY_NOT.items() if not reason]
every_kernel_set = pytest.mark.parametrize("kernel", KERNELS)


@pytest.mark.parametrize("kernel", WHY_NOT)
def test_kernel_set_is_tested(kernel: str) -> None:
    if WHY_NOT[kernel]:
        pytest.skip(WHY_NOT[kernel])
    assert kernel in KERNELS


def engines(program: Program, kernel: str, words: Sequence[str] = ALGORITHMS) -> Iterator[tuple[str, Engine]]:
    """An engine for each algorithm that the layer, the program's last conv but one, can run with."""
    for word in words:
        tuning = ["ref"] * (len(program.ops) - 2) + [word, "ref"]
        try:
            engine = with_kernel(kernel, program, " ".join(tuning))
        except CompileError as error:
            if f"cannot be '{word}'" not in str(error):
                raise
        else:
            yield word, engine


def rounding(program: Program, x: Tensor, word: str) -> Tensor:
    """What an algorithm may be off, (O, 1, 1): float32's epsilon for the largest sum that each filter can have."""
    feeder, layer = program.ops[0], program.ops[-2]
    assert isinstance(feeder, Conv)
    assert isinstance(layer, Conv)

    def largest(op: Conv, inputs: Tensor) -> Tensor:
        weight, bias = (part.masked_fill(part == POISON, 0.0).abs() for part in (op.weight, op.bias))
        return weight.flatten(1).sum(1) * inputs.max() + bias

    total = largest(layer, largest(feeder, x.abs()))
    if layer.residual:
        kept = program.ops[1]
        assert isinstance(kept, Conv)
        total = total + largest(kept, x.abs())
    slack = 8 if word.startswith("wino") else 2
    return slack * torch.finfo(torch.float32).eps * (total[:, None, None] + 1)  # 1: activations round too


def check(
    layer: Layer,
    seed: int,
    keeps: tuple[str, str],
    kernel: str,
    whole: bool,
    algorithms: Sequence[str] = ALGORITHMS,
) -> list[str]:
    """All laws on one layer; returns the algorithms that were tried."""
    values = Values(seed, whole)
    program = program_of(layer, values)
    keep = {"in": keeps[0], "out": keeps[1], "kept": "some", "next": "all"}
    masks = {group.name: values.mask(group.filters, keep[group.name]) for group in program.groups}
    program, x = poisoned(program, masks), values(1, 2, *layer.size)
    wanted = interpreter.trace(program, x.double(), forced=masks)
    return check_engines(program, x, masks, wanted, engines(program, kernel, algorithms), exact=whole)


def check_engines(
    program: Program,
    x: Tensor,
    masks: dict[str, Tensor],
    wanted: interpreter.Trace,
    made: Iterator[tuple[str, Engine]],
    exact: bool,
) -> list[str]:
    dirt = torch.full_like(x, float("nan"))
    tried = []
    for word, engine in made:
        assert engine.tuning.split()[-2] == word
        allowed = torch.zeros(()) if exact else rounding(program, x, word)
        found = []
        for threads in (1, 2):
            with engine.force({name: torch.ones_like(mask) for name, mask in masks.items()}):
                engine(dirt, threads)  # dead planes and all scratch now hold NaN
            with engine.force(masks):
                found.append(engine(x, threads))
                macs = {name: macs.tolist() for name, macs in engine.last_macs.items()}
            assert macs == {name: macs.tolist() for name, macs in wanted.macs.items()}, word
        off = (found[0] - wanted.out).abs()
        assert (off <= allowed).all(), f"{word}: off by {off.max()}"
        assert torch.equal(*found), f"{word}: two threads differ from one"
        with engine.force(masks):
            logits = engine.logits(x)
        for name, values in wanted.logits.items():
            heads = {"next": allowed.max() * 3 * program.groups[-2].filters}
            close = heads.get(name, 0.0 if exact else 1e-4)
            assert np.abs(logits[name] - values.numpy()).max() <= float(close), f"{word}: logits of {name}"
        tried.append(word)
    return tried


# Laws over ragged shapes


@st.composite
def layers(draw: st.DrawFn, acts: tuple[Act, ...]) -> Layer:
    channels, filters, groups = draw(st.sampled_from(CHANNELS)), draw(st.sampled_from(CHANNELS)), 1
    sharing = draw(st.sampled_from(["dense", "dense", "grouped", "depthwise", "multiplied"]))
    if sharing == "grouped":
        groups = draw(st.integers(2, 3))
        channels, filters = channels * groups, filters * groups
    elif sharing != "dense":
        groups = channels
        filters = channels * (1 if sharing == "depthwise" else draw(st.integers(2, 3)))
    side = st.sampled_from(SIDES)
    act = draw(st.sampled_from(acts))
    layer = Layer(channels, filters, (draw(side), draw(side)), groups=groups, act=act)
    if act not in LIFTING:
        layer = replace(layer, residual=draw(st.sampled_from(get_args(Residual))))
    if not draw(st.booleans()):  # else as most convs are: 3 x 3, stride 1, padding 1
        kernel = st.sampled_from([1, 2, 3, 5, 7])
        square = draw(kernel)
        one_or_two = st.integers(1, 2)
        layer = replace(
            layer,
            kernel=draw(st.sampled_from([(square, square), (square, draw(kernel))])),
            stride=draw(st.sampled_from([(1, 1), (2, 2), (3, 3), (1, 2), (3, 1)])),
            padding=tuple(draw(st.lists(st.integers(0, 4), min_size=4, max_size=4))),
            dilation=(draw(one_or_two), draw(one_or_two)),
        )
    assume(min(layer.out) >= 1)
    return layer


keeping = st.tuples(st.sampled_from(KEEPS), st.sampled_from(KEEPS))
seeds = st.integers(0, 2**32 - 1)


@every_kernel_set
@thorough
@given(layers(("none", "relu", "relu6", "leaky")), seeds, keeping)
def test_whole_numbers_come_out_exactly(kernel: str, layer: Layer, seed: int, keeps: tuple[str, str]) -> None:
    assert "ref" in check(layer, seed, keeps, kernel, whole=True)


@every_kernel_set
@thorough
@given(layers(ACTS), seeds, keeping)
@example(Layer(12, 13, (18, 17), act="silu"), 0, ("all", "all"))
def test_sums_are_off_by_rounding_only(kernel: str, layer: Layer, seed: int, keeps: tuple[str, str]) -> None:
    assert "ref" in check(layer, seed, keeps, kernel, whole=False)


@every_kernel_set
def test_every_remainder_of_tiles_and_rows(kernel: str) -> None:
    for side in SIDES:
        for filters, channels in zip(CHANNELS, CHANNELS[::-1], strict=True):
            check(Layer(channels, filters, (side, 20 - side)), side, ("some", "all"), kernel, whole=True)


@every_kernel_set
@pytest.mark.parametrize("act", ["relu", "leaky"])
def test_vectors_of_filters(kernel: str, act: Act) -> None:
    """Filters that fill no vector, one, some, and lists that come from many of them; blocks of a large map."""
    point: dict[str, Any] = {"kernel": (1, 1), "padding": (0, 0, 0, 0), "act": act}
    for filters in (5, 16, 32, 47, 100):
        for size in ((7, 7), (14, 14), (3, 2), (5, 11)):
            layer = Layer(19, filters, size, **point)
            for keeps in itertools.product(KEEPS, KEEPS):
                check(layer, filters, keeps, kernel, whole=True, algorithms=["filters"])
    wide = Layer(150, 40, (71, 73), **point)
    for keeps in (("some", "some"), ("all", "all"), ("all", "some")):
        assert check(wide, 0, keeps, kernel, whole=True, algorithms=["filters"])
        assert check(replace(wide, residual="in place"), 1, keeps, kernel, whole=True, algorithms=["filters"])


ONE_OF_EACH_KIND = (
    Layer(5, 7, (10, 9)),
    Layer(6, 6, (5, 7), groups=6),
    Layer(6, 4, (7, 5), groups=2, stride=(2, 2)),
    Layer(7, 13, (2, 2), kernel=(1, 1), padding=(0, 0, 0, 0)),
    Layer(7, 21, (7, 5), kernel=(1, 1), padding=(0, 0, 0, 0)),
)


@every_kernel_set
@pytest.mark.parametrize("act", ACTS)
def test_every_activation_and_residual(kernel: str, act: Act) -> None:
    kinds: tuple[Residual, ...] = ("no",) if act in LIFTING else get_args(Residual)
    for residual in kinds:
        for layer in ONE_OF_EACH_KIND:
            check(replace(layer, act=act, residual=residual), 0, ("some", "all but one"), kernel, whole=False)


@every_kernel_set
@pytest.mark.parametrize("keep_out", KEEPS)
def test_every_mask(kernel: str, keep_out: str) -> None:
    for keep_in in KEEPS:
        for layer in ONE_OF_EACH_KIND:
            check(replace(layer, act="relu", residual="in place"), 1, (keep_in, keep_out), kernel, whole=True)


@every_kernel_set
def test_images_of_a_batch_have_masks_of_their_own(kernel: str) -> None:
    layer = Layer(7, 13, (9, 10), act="relu", residual="in place")
    values = Values(0, True)
    program = program_of(layer, values)
    x = values(len(KEEPS) ** 2, 2, *layer.size)
    pairs = [(first, second) for first in KEEPS for second in KEEPS]
    masks = {
        group.name: torch.stack([values.mask(group.filters, pair[group.name == "out"]) for pair in pairs])
        for group in program.groups
    }
    wanted = interpreter.trace(program, x.double(), forced=masks)
    assert len(check_engines(program, x, masks, wanted, engines(program, kernel), exact=True)) >= 4


@pytest.mark.parametrize(
    ("layer", "algorithms"),
    [
        (Layer(6, 6, (14, 14)), {"wino4", "wino2", "gemm", "im2col", "ref"}),
        (Layer(6, 6, (14, 14), stride=(2, 2)), {"gemm", "im2col", "ref"}),
        (Layer(6, 6, (14, 14), kernel=(1, 1), padding=(0, 0, 0, 0)), {"gemm", "filters", "ref"}),
        (Layer(6, 6, (14, 14), groups=2), {"gemm", "ref"}),
        (Layer(6, 6, (14, 14), groups=6), {"depthwise", "ref"}),
        (Layer(6, 6, (1, 1), kernel=(1, 1), padding=(0, 0, 0, 0)), {"dot", "gemm", "ref"}),
    ],
)
def test_algorithms_run_where_they_are_meant_to(layer: Layer, algorithms: set[str]) -> None:
    assert {word for word, _ in engines(program_of(layer, Values(0, True)), "")} >= algorithms


# Laws over the layers of the registry's backbones


class _Recorder(TorchFunctionMode):
    """Notes the convs and linear layers that run inside, as lowering makes them: padding and flattening taken in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: set[Layer] = set()
        self.padded: dict[Tensor, tuple[torch.Size, tuple[int, int, int, int]]] = {}
        self.flattened: dict[Tensor, torch.Size] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.pad and len(args[1]) == 4:
            left, right, top, bottom = args[1]
            self.padded[result] = args[0].shape, (top, left, bottom, right)
        elif func is torch.flatten:
            self.flattened[result] = args[0].shape
        elif func is torch.nn.functional.linear:
            _, channels, *size = (*self.flattened.get(args[0], args[0].shape), 1, 1)[:4]
            self.layers.add(Layer(channels, len(args[1]), tuple(size), tuple(size), padding=(0, 0, 0, 0)))
        elif func is torch.conv2d:
            x, weight, _, stride, (top, left), dilation, groups = args
            shape, padding = self.padded.get(x, (x.shape, (top, left, top, left)))
            window = (tuple(weight.shape[2:]), tuple(stride), padding, tuple(dilation), groups)
            self.layers.add(Layer(shape[1], len(weight), tuple(shape[2:]), *window))
        return result


@cache
def layers_of(name: str) -> frozenset[Layer]:
    with torch.device("meta"), torch.no_grad():
        model = create_backbone(name).eval()
        x = torch.empty(1, *model.input_shape)
        with _Recorder() as recorder:
            model(x)
    return frozenset(recorder.layers)


REGISTRY = sorted(set().union(*map(layers_of, list_backbones())), key=str)


def test_layers_are_what_lowering_makes_of_a_backbone() -> None:
    for name in ("mobilenet_v1_imagenet", "resnet20", "vgg11_bn"):
        program = lower(create_backbone(name).eval())
        assert {_layer(program, op) for op in program.ops if isinstance(op, Conv)} == layers_of(name)


def _layer(program: Program, op: Conv) -> Layer:
    channels, *size = program.buffers[op.src[0]]
    return Layer(channels, len(op.weight), tuple(size), op.kernel, op.stride, op.padding, op.dilation, op.groups)


@pytest.mark.parametrize("layer", REGISTRY, ids=str)
def test_every_layer_of_the_registry(layer: Layer) -> None:
    if layer.groups == 1:
        most = MACS * layer.filters // layer.macs
        layer = replace(layer, filters=min(layer.filters, max(2, most)))
    layer = replace(layer, act="relu")
    fast = ALGORITHMS[:-1]
    for kernel in KERNELS:
        assert check(layer, 0, ("some", "all but one"), kernel, whole=True, algorithms=fast)
    assert check(layer, 0, ("all but one", "some"), KERNELS[-1], whole=False, algorithms=fast)
