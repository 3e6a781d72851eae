"""What the page's slider moves: the threshold, or how many filters run where that number is fixed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from cofire.runtime.engine import Engine
from cofire.runtime.observed import Observed
from cofire.runtime.program import Gate, Op, Program

STEP, LEAST = 0.05, 0.1  # of k, in shares of the model's own


class Setting(NamedTuple):
    """An engine, and the threshold to call it with; None: its own."""

    engine: Engine
    threshold: float | None


@dataclass(frozen=True, kw_only=True)
class Knob:
    """A slider from ``low`` to ``high`` that begins at ``value``; ``at`` says what a place on it means.

    Args:
        name: ``threshold``, ``k``, or ``none`` where the model has nothing to move.
    """

    name: str
    label: str
    low: float
    high: float
    step: float
    value: float
    at: Callable[[float], Setting]


def knob_of(engine: Engine, observed: Observed) -> Knob:
    """The knob of a program; ``observed`` has the thresholds that matter, if any do."""
    if observed.thresholds:
        return Knob(
            name="threshold",
            label="Threshold: filters with a logit above it run",
            low=math.floor(observed.thresholds[0]),
            high=math.ceil(observed.thresholds[-1]),
            step=0.01,
            value=engine.threshold,
            at=lambda value: Setting(engine, value),
        )
    program = engine.program
    room = [program.groups[gate.group].filters / top for gate, top in map(_choosing, program.ops) if gate and top]
    if not room:
        label = "This model has no threshold and no k to move"
        return Knob(name="none", label=label, low=0, high=1, step=1, value=0, at=lambda value: Setting(engine, None))

    high = math.ceil(max(*room, 1.0) / STEP) * STEP

    @cache
    def at_step(step: int) -> Setting:
        return Setting(Engine(_with_k(program, step * STEP), tuning=engine.tuning), None)

    def at(value: float) -> Setting:
        """Of the nearest of the slider's places, whatever a browser sends: an engine is kept for each."""
        return at_step(round(min(max(value, LEAST), high) / STEP))

    return Knob(
        name="k",
        label="k: filters that run in each layer, in shares of the model's own number",
        low=LEAST,
        high=high,
        step=STEP,
        value=1.0,
        at=at,
    )


def _with_k(program: Program, share: float) -> Program:
    """The program with ``share`` times as many filters on wherever a head chooses so many; at least 1, at most all."""

    def changed(op: Op) -> Op:
        gate, top = _choosing(op)
        if gate is None or gate.head is None or top is None:
            return op
        k = min(max(1, round(share * top)), program.groups[gate.group].filters)
        return replace(op, gate=replace(gate, head=replace(gate.head, top=k)))

    return replace(program, ops=tuple(map(changed, program.ops)))


def _choosing(op: Op) -> tuple[Gate | None, int | None]:
    """An op's gate and its k, where a head looks at the image and takes the k largest logits."""
    head = op.gate.head if op.gate else None
    return (op.gate, head.top) if head is not None and head.top and head.weight.any() else (None, None)
