"""A program: a flat list of ops on numbered buffers, all that the native engine runs.

``docs/program.md`` is the definition; the fields here bear its names.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from rich.table import Table
from torch import Tensor

_Older = Literal["none", "relu", "relu6", "leaky", "silu", "hardswish", "sigmoid", "hardsigmoid"]
_Newer = Literal["gelu", "gelu_tanh", "elu", "tanh", "hardtanh", "mish", "softplus"]
Act = Literal[_Older, _Newer]
LIFTING: frozenset[Act] = frozenset({"sigmoid", "hardsigmoid", "softplus"})
"""The activations that do not leave zero at zero."""

Shape: TypeAlias = tuple[int, int, int]
Pair: TypeAlias = tuple[int, int]
Padding: TypeAlias = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Head:
    """Decides a group's mask, for each image, right before the op it stands on.

    logits = weight . softmax(pooled) + bias, where ``pooled`` is what ``pool`` makes of a buffer over space.
    """

    pool: Literal["max", "avg", "abs", "both"]
    """Maximum, mean, or mean of magnitudes, (C); ``both`` is all maxima, then all means, (2C)."""
    softmax: bool
    """Over all that was pooled."""
    weight: Tensor
    """(filters, C), with ``both`` (filters, 2C); or one such row, whose logit is that of every filter."""
    bias: Tensor | None
    """As many as ``weight`` has rows."""
    top: int | None = None
    """This many filters are on, those with the largest logits; default: those with a logit above the threshold."""
    scale: bool = False
    """The group's filters have factors, max(logit, 0), for the ops that use them."""
    src: int | None = None
    """The buffer that is pooled; default: the op's first source."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Gate:
    """Of an op's output only the channels in the mask of ``group`` exist; with a head, the mask is decided here."""

    group: int
    head: Head | None


@dataclass(frozen=True, kw_only=True)
class Group:
    """A mask's name and width."""

    name: str
    filters: int


@dataclass(frozen=True, kw_only=True)
class Quant:
    """A buffer that holds u8, each of which stands for the number scale * (q - zero)."""

    buffer: int
    scale: float
    zero: int
    """0 to 255; what a channel that is not live reads as."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Op:
    """What every op has; a subclass adds its attrs and, as tensors, its weights."""

    name: str
    src: tuple[int, ...]
    dst: int
    gate: Gate | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Conv(Op):
    """act(conv(src0) + bias [+ src1]); padding is (top, left, bottom, right).

    With a ``shift``: act(factor * conv(src0) + (factor * bias + shift) [+ src1]), by the factors of its gate's group.
    """

    kernel: Pair
    stride: Pair
    padding: Padding
    dilation: Pair
    groups: int
    residual: bool
    act: Act
    slope: float
    weight: Tensor
    bias: Tensor
    shift: Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Affine(Op):
    """act(src0 * scale + shift), per channel; with ``lift`` all channels are live afterwards."""

    lift: bool
    act: Act
    slope: float
    scale: Tensor
    shift: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Activation(Op):
    """act(src0)."""

    act: Act
    slope: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Add(Op):
    """act(src0 + src1)."""

    act: Act
    slope: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Mul(Op):
    """act(src0 * src1)."""

    act: Act
    slope: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Cat(Op):
    """The channels of all sources, one after the other."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Move(Op):
    """dst[c, y, x] = src0[channels[c], y * stride + offset, x * stride + offset]; 0 outside and for channel -1."""

    channels: tuple[int, ...]
    stride: Pair
    offset: Pair


@dataclass(frozen=True, kw_only=True, eq=False)
class Pool(Op):
    """Maximum or mean over windows."""

    op: Literal["max", "avg"]
    kernel: Pair
    stride: Pair
    padding: Padding
    dilation: Pair
    include_pad: bool
    adaptive: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Flatten(Op):
    """(C, H, W) -> (C*H*W, 1, 1)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rescale(Op):
    """act(src0 * factor + shift), per channel, by the factors of its gate's group."""

    act: Act
    slope: float
    shift: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Deconv(Op):
    """Transposed conv(src0) + bias; ``padding`` is taken off the result."""

    kernel: Pair
    stride: Pair
    padding: Padding
    dilation: Pair
    groups: int
    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Resample(Op):
    """Each row is a weighted sum of the source's rows, and each column of its columns; as many for each."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    row_weights: Tensor
    column_weights: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Strided(Op):
    """Element i, whose digits in the mixed radix ``sizes`` are d, is element begin + sum(d * strides) of src0."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Reduce(Op):
    """Channel c is the sum, mean or maximum of src0's channels c, c + C, c + 2 C, ..."""

    op: Literal["sum", "avg", "max"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Softmax(Op):
    """Softmax or its logarithm at each position, over ``ways`` channels that lie C / ways apart."""

    ways: int
    log: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Norm(Op):
    """Group norm; or, over all channels at each position, layer norm, RMS norm or division by the length."""

    over: Literal["group", "layer", "rms", "l2"]
    groups: int
    epsilon: float
    scale: Tensor
    shift: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Conv8(Op):
    """float(conv(q - zero) + bias) * multiplier [+ float(r - zero) * residual_multiplier]; q and r are u8.

    Into a quantised buffer goes clamp(round(that) + zero, low, high), halves to even; else that itself.
    """

    kernel: Pair
    stride: Pair
    padding: Padding
    dilation: Pair
    groups: int
    residual: bool
    low: int
    high: int
    residual_multiplier: float
    weight: Tensor
    """int8 (O, I / groups, kh, kw), from -127 on."""
    bias: Tensor
    """int32 (O)."""
    multiplier: Tensor
    """float32 (O)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Quantize(Op):
    """clamp(round(src0 * (1 / scale)) + zero, 0, 255), by the destination's scale and zero."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Dequantize(Op):
    """float(q - zero) * scale, by the source's scale and zero."""


KINDS: dict[str, type[Op]] = {
    "conv": Conv,
    "affine": Affine,
    "act": Activation,
    "add": Add,
    "mul": Mul,
    "cat": Cat,
    "move": Move,
    "pool": Pool,
    "flatten": Flatten,
    "rescale": Rescale,
    "deconv": Deconv,
    "resample": Resample,
    "strided": Strided,
    "reduce": Reduce,
    "softmax": Softmax,
    "norm": Norm,
    "conv8": Conv8,
    "quantize": Quantize,
    "dequantize": Dequantize,
}
_KIND_OF = {cls: kind for kind, cls in KINDS.items()}


def kind_of(op: Op) -> str:
    """The op's kind as files spell it."""
    return _KIND_OF[type(op)]


@dataclass(frozen=True, kw_only=True)
class Output:
    """A buffer that the caller gets, in a shape of as many elements."""

    buffer: int
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """Ops in order of execution, and the buffers they work on."""

    input: int
    output: int
    output_shape: tuple[int, ...]
    buffers: tuple[Shape, ...]
    groups: tuple[Group, ...]
    threshold: float
    ops: tuple[Op, ...]
    more_outputs: tuple[Output, ...] = ()
    """What the caller gets beside the first output."""
    structure: Any = None
    """Where each output belongs: its number, or one of ``{"tuple": [...]}``, ``{"list": [...]}``, ``{"dict": {...}}``.

    None: there is one, and the caller gets it as it is."""
    card: dict[str, Any] = field(default_factory=dict)
    """What people want to know of the model, as JSON values; ``classes`` are the names of the classes."""
    quants: tuple[Quant, ...] = ()
    """The buffers that hold u8; the others hold float32."""

    @property
    def outputs(self) -> tuple[Output, ...]:
        """All of them."""
        return (Output(buffer=self.output, shape=self.output_shape), *self.more_outputs)

    def describe(self) -> dict[str, Any]:
        """Shapes, groups and ops as JSON values, without weights."""
        return {
            "input_shape": list(self.buffers[self.input]),
            "output_shape": list(self.output_shape),
            "groups": {group.name: group.filters for group in self.groups},
            "threshold": self.threshold,
            "card": self.card,
            "ops": [
                {"kind": kind_of(op), "name": op.name, "shape": list(self.buffers[op.dst]), "gate": self._gate(op)}
                for op in self.ops
            ],
        }

    def __rich__(self) -> Table:
        described = self.describe()
        shapes = " -> ".join("x".join(map(str, described[key])) for key in ("input_shape", "output_shape"))
        table = Table(title=f"program: {shapes}, {len(self.ops)} ops, {len(self.groups)} gates", title_justify="left")
        for column in ("kind", "name", "shape", "gate"):
            table.add_column(column)
        for op in described["ops"]:
            table.add_row(op["kind"], op["name"], "x".join(map(str, op["shape"])), op["gate"] or "")
        return table

    def _gate(self, op: Op) -> str | None:
        return None if op.gate is None else self.groups[op.gate.group].name


def normalised(program: Program, mean: tuple[float, ...], std: tuple[float, ...]) -> Program:
    """The program with ``(x - mean) / std`` as its first op, per channel: it takes pixels in [0, 1] then."""
    first = Affine(
        name="normalise",
        src=(len(program.buffers),),
        dst=program.input,
        gate=None,
        lift=True,
        act="none",
        slope=0.0,
        scale=torch.tensor([1 / s for s in std]),
        shift=torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]),
    )
    buffers = (*program.buffers, program.buffers[program.input])
    return replace(program, input=len(program.buffers), buffers=buffers, ops=(first, *program.ops))
