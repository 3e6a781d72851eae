"""Model -> Program: the calls of a plain or gated model, in eval mode, as the ops the native engine has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from cofire.gates.gating import GatedModel
from cofire.graph.graph import trace
from cofire.graph.ops import Op as Call
from cofire.graph.tracing import evaluating
from cofire.runtime.building import ArrangementError
from cofire.runtime.folding import folded
from cofire.runtime.gates import LoweredGates, lower_gates
from cofire.runtime.lowered_calls import AbstractCalls
from cofire.runtime.lowered_ids import of_both, of_one
from cofire.runtime.program import (
    Add,
    Affine,
    Gate,
    Group,
    Mul,
    Output,
    Program,
    Rescale,
)
from cofire.runtime.windows import pool_window


def lower(model: nn.Module, input_shape: tuple[int, int, int] | None = None) -> Program:
    """The program of ``model``, plain or gated, as it computes in eval mode; ``model`` is left alone.

    Args:
        input_shape: (C, H, W) of an image. Default: the shape a gated model or a registered backbone was made for,
            else 224 x 224.

    Raises:
        CompileError: the engine has nothing like some call or gate; names it and lists what there is.
        TraceError: the model cannot be traced, or does not run at ``input_shape``.
    """
    threshold, gates = 0.0, LoweredGates()
    if isinstance(model, GatedModel):
        graph = model.graph.at(input_shape or model.graph.input_shape)
        threshold, gates = model.threshold or 0.0, lower_gates(model, graph)
    else:
        graph = trace(model, input_shape)
    walk = _Lowering(graph, gates)
    with torch.no_grad(), evaluating(graph.root):
        walk.run(_two_images(graph.root, graph.input_shape))
    return folded(walk.program(tuple(gates.groups), threshold))


def _two_images(model: nn.Module, shape: tuple[int, int, int]) -> Tensor:
    tensors = [*model.parameters(), *model.buffers()]
    like = next((tensor for tensor in tensors if tensor.is_floating_point()), torch.zeros(1))
    return torch.zeros(2, *shape, device=like.device, dtype=like.dtype)


class _Lowering(AbstractCalls):
    """The walk that found the calls' kinds, once more, with an id for each element in place of one for each channel.

    Every call becomes one op or more, unfused; calls that only move data become ops where something reads the result.
    """

    def program(self, groups: tuple[Group, ...], threshold: float) -> Program:
        """What the walk has lowered."""
        return Program(
            input=self.first,
            output=self.outputs[0].buffer,
            output_shape=self.outputs[0].shape,
            more_outputs=tuple(self.outputs[1:]),
            structure=self.structure,
            buffers=tuple(self.builder.buffers),
            groups=groups,
            threshold=threshold,
            ops=tuple(self.builder.ops),
        )

    def _record(self, n: fx.Node, sources: list[fx.Node], operands: list[Any], result: Any) -> None:
        call = self.calls.get(n.name)
        if call is None or _is_named_tuple(n):
            return  # sizes, checks, parameters; what the model returns
        try:
            if call.kind == "output":
                self._end(n, result)
            else:
                self.ids[n] = self._lowered(n, call, sources)
                if n.name in self.shifts:
                    self._rescale(n, call)
                if n.name in self.answers:
                    self._answer(n, call)
                self._follow_writes(n, result)
        except ArrangementError as error:
            raise self._refused(n, str(error)) from None
        for node in self.user_to_last_uses.get(n, ()):
            self.ids.pop(node, None)

    def _lowered(self, n: fx.Node, call: Call, sources: list[fx.Node]) -> Any:
        """The ids of a call's result."""
        callee = self._callee(n)
        if call.kind == "move":
            moved = self._moved(n, callee)
            if moved is None:
                raise self._refused(n, "there is no such op")
            if callee not in (torch.cat, torch.concat):
                return moved
            buffer = self._gathered(of_one(moved), n.name)  # once, for many may read what is joined here
        elif (found := self._over_channels_or_maps(n, call, callee, sources)) is not None:
            return found
        elif call.kind in ("activation", "lift", "pass"):
            attrs = pool_window(n, callee, self.env)
            made = (
                self._elementwise(n, call, callee, sources[0])
                if attrs is None
                else self._pool(n, call, attrs, sources[0])
            )
            if not isinstance(made, int):
                return made
            buffer = made
        elif call.kind == "input":
            buffer = self._begin(call)
        elif call.kind == "conv":
            buffer = self._conv2d(n, call, callee, sources[0])
        elif call.kind == "linear" and self.ids[sources[0]].ndim > 2:
            return self._pointwise(n, call, callee, sources[0])
        elif call.kind == "linear":
            buffer = self._linear(n, call, callee, sources[0])
        elif call.kind == "norm":
            return self._norm(n, call, callee, sources[0])
        elif call.kind == "add":
            buffer = self._add(n, call, sources)
        elif call.kind == "mul":
            buffer = self._combined(n, call, Mul, [self._operand(n, call, source) for source in sources])
        else:
            raise self._refused(n, "there is no such op")
        return of_both(self.builder.ids(buffer, call.shape))

    def _begin(self, call: Call) -> int:
        """The input's buffer, and behind it what heads want to see of the image."""
        if self.first >= 0:
            return self.first
        self.first = self.builder.buffer(call.shape)
        for conv, module in self.looks.items():
            if module not in self.looked:
                look = _Lowering(trace(module, self.input_shape), LoweredGates(), self)
                with evaluating(module):
                    look.run(_two_images(module, self.input_shape))
                self.looked[module] = look.outputs
            gate = self.gates[conv]
            assert gate.head is not None
            self.gates[conv] = replace(gate, head=replace(gate.head, src=self.looked[module][0].buffer))
        return self.first

    def _rescale(self, n: fx.Node, call: Call) -> None:
        """Filters are multiplied with their factors behind a call, and shifted."""
        buffer = self._channels_first(n, n) if call.last else self._read(n)
        gate, shape = replace(self.gates[n.name], head=None), self.builder.buffers[buffer]
        attrs: dict[str, Any] = {"act": "none", "slope": 0.0, "shift": self.shifts[n.name]}
        made = self.builder.emit(Rescale, n.name, (buffer,), shape, gate, **attrs)
        self.ids[n] = (
            self._channels_last(made, call.shape) if call.last else of_both(self.builder.ids(made, call.shape))
        )

    def _answer(self, n: fx.Node, call: Call) -> None:
        """What a module made of the image stands in for a call that does not run."""
        module, gate = self.answers[n.name]
        assert gate.head is not None
        doubt, answer = (output.buffer for output in self.looked[module])
        # A gate of its own: folding puts the call itself behind what is added to it.
        runs = self._ones_or_zeros(n, call, answer, replace(gate, head=replace(gate.head, src=doubt)), 0.0, 1.0)
        rests = self._ones_or_zeros(n, call, runs, None, -1.0, 1.0)
        alone = self.builder.emit(Mul, n.name, (answer, rests), call.shape, act="none", slope=0.0)
        total = self.builder.emit(Add, n.name, (self._read(n), alone), call.shape, act="none", slope=0.0)
        self.ids[n] = of_both(self.builder.ids(total, call.shape))

    def _ones_or_zeros(self, n: fx.Node, call: Call, src: int, gate: Gate | None, scale: float, shift: float) -> int:
        """scale * src + shift, where a gate lets it through."""
        rows: dict[str, Any] = {
            "scale": torch.full(call.shape, scale).double(),
            "shift": torch.full(call.shape, shift).double(),
        }
        return self.builder.emit(Affine, n.name, (src,), call.shape, gate, lift=True, act="none", slope=0.0, **rows)

    def _end(self, n: fx.Node, result: Any) -> None:
        structure = self._given(n, n.args[0])
        self.structure = None if isinstance(structure, int) else structure
        if any(output.buffer == self.first for output in self.outputs):
            raise self._refused(n, "the model must not return its input")

    def _given(self, n: fx.Node, value: Any) -> Any:
        """The structure of what the model returns; its tensors become outputs, a named tuple a plain one."""
        if isinstance(value, fx.Node) and _is_named_tuple(value):
            value = tuple(value.args)
        if isinstance(value, Mapping):
            return {"dict": {str(key): self._given(n, part) for key, part in value.items()}}
        if isinstance(value, tuple | list):  # fx has lists of its own
            return {"tuple" if isinstance(value, tuple) else "list": [self._given(n, part) for part in value]}
        ids = self.ids.get(value) if isinstance(value, fx.Node) else None
        if isinstance(ids, tuple | list):
            kind = "tuple" if isinstance(ids, tuple) else "list"
            return {kind: [self._output(n, self._gathered(of_one(part), n.name), part) for part in ids]}
        if not isinstance(ids, Tensor):
            raise self._refused(n, f"the model must return tensors that it computes, got {value!r} among them")
        return self._output(n, self._read(value), ids)

    def _output(self, n: fx.Node, buffer: int, ids: Tensor) -> int:
        self.outputs.append(Output(buffer=buffer, shape=tuple(ids.shape[1:])))
        return len(self.outputs) - 1

    def _follow_writes(self, n: fx.Node, result: Any) -> None:
        """After a call in place, everyone who holds its operand holds its result."""
        written = [node for node in self.ids if node is not n and self.env.get(node) is result]
        if not written or torch.equal(self.ids[written[0]], self.ids[n]):
            return
        for node in [node for node in self.ids if node in self.env and node not in written]:
            if _overlap(result, self.env[node]):
                raise self._refused(n, f"in place, it changes {node.name!r} too, one being a view of the other")
        for node in written:
            self.ids[node] = self.ids[n]


def _is_named_tuple(n: fx.Node) -> bool:
    return isinstance(n.target, type) and issubclass(n.target, tuple)


def _overlap(written: Tensor, other: Any) -> bool:
    """Whether a tensor shares memory with another, or one of several; found by trying."""
    if not isinstance(other, Tensor):
        return isinstance(other, tuple | list) and any(_overlap(written, part) for part in other)
    kept = written.clone()
    written.fill_(float("nan"))
    found = bool(other.isnan().any())
    written.copy_(kept)
    return found
