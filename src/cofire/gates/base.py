"""What a gate is: decides on a unit's input which filters run, learns from the unit's output; and the registry.

Shapes: B samples, I input channels, O filters.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from cofire.errors import ConfigError, unknown
from cofire.graph.units import Placement, Unit


class Decision(NamedTuple):
    """What a gate decided for one batch."""

    logits_BO: Tensor | None
    mask: Tensor
    """(B, O) of 0/1, actually applied; carries a gradient where the method lets one through."""
    scale_BO: Tensor | None = None
    """For methods that also rescale the filters they keep."""


class Peak(NamedTuple):
    """A tensor's maximum over space, and the tensor's version at that time: in-place changes raise it."""

    value_BO: Tensor
    version: int


@dataclass(frozen=True, kw_only=True)
class GateConfig(Placement):
    """Base of every gate config: placement options plus how the groups' losses become one."""

    reduction: Literal["mean", "sum"] = "mean"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"default": {}}
    foretold: ClassVar[bool] = False
    """Whether `estimate` can tell what it will cost before training; such a config has a ``ratio``."""

    @property
    def label(self) -> str:
        """The method and its knob in a few words, for tables."""
        return type(self).__name__

    @classmethod
    def preset(cls, name: str, **options: Any) -> Self:
        """The config of a named preset, with ``options`` on top."""
        if name not in cls.presets:
            raise unknown(f"{cls.__name__} preset", name, cls.presets)
        return cls(**{**cls.presets[name], **options})


class AbstractGate(nn.Module):
    """Decides for one group of units. A subclass implements ``decide`` and ``loss``, and ``target`` if it has one."""

    head_macs: int

    def __init__(self) -> None:
        super().__init__()
        self.name = ""  # its group, once it is part of a model; for error texts
        self.threshold = 0.0
        self._forget()

    def _forget(self) -> None:
        self.decision: Decision | None = None
        self.lesson: Tensor | None = None
        self.forced: Tensor | Literal["open", "targets"] | None = None
        self.observer: Callable[[Decision, Tensor], None] | None = None
        self.input_peak_BI: Tensor | None = None
        self.peak: Peak | None = None

    @abstractmethod
    def decide(self, x_BIHW: Tensor) -> Decision:
        """The decision for a unit input (B, I, H, W): all that the native engine must mirror."""

    @abstractmethod
    def loss(self, decision: Decision, y_BOHW: Tensor) -> Tensor:
        """What ``decision`` should have been, given the unmasked output: scalar, sum over filters, mean over batch."""

    def study(self, decision: Decision, y_BOHW: Tensor) -> Tensor:
        """What ``total_loss`` needs to know, taken in training before the output may change: here the loss itself."""
        return self.loss(decision, y_BOHW)

    @classmethod
    def total_loss(cls, gates: Sequence[Any]) -> Tensor:
        """The losses of the last forward, added up over gates of this class; a method may do many at once."""
        return torch.stack([gate.lesson for gate in gates]).sum()

    def target(self, y_BOHW: Tensor) -> Tensor | None:
        """The mask that self-supervision asks for, bool (B, O); None for a method without targets."""
        return None

    def decided(self, x_BIHW: Tensor, peak: Peak | None = None) -> Decision | None:
        """The decision, taken before the unit's conv runs, or None if it is forced.

        ``peak`` is the input's maximum over space where the gate before has found it already, so that no map is
        pooled twice; ``decide`` finds it as ``self.input_peak_BI``, if the input has not been changed since.
        """
        self.lesson = self.peak = None
        known = peak is not None and not torch.compiler.is_compiling() and peak.version == x_BIHW._version
        self.input_peak_BI = peak.value_BO if peak is not None and known else None
        return self.decide(x_BIHW) if self.forced is None else None

    def masked(self, y_BOHW: Tensor, decision: Decision | None) -> Tensor:
        """The unit's output with the filters that are off at exactly zero; keeps decision and lesson on the gate."""
        if decision is None:
            decision = Decision(None, self._forced_mask(y_BOHW))
        elif self.training:
            self.lesson = self.study(decision, y_BOHW)
        self.decision = decision
        if self.observer is not None:
            self.observer(decision, y_BOHW)
        if isinstance(self.forced, str) and self.forced == "open":
            return y_BOHW
        mask = decision.mask.to(y_BOHW.dtype).reshape(*y_BOHW.shape[:2], *[1] * (y_BOHW.ndim - 2))
        if decision.scale_BO is not None:
            self.peak = None
            return y_BOHW * (mask * decision.scale_BO.to(y_BOHW.dtype).reshape(mask.shape))
        masked = _switched_off(y_BOHW, mask)
        if self.peak is not None:  # found by ``study``; of the masked output from here on
            self.peak = Peak(self.peak.value_BO * decision.mask.detach(), masked._version)
        return masked

    def _forced_mask(self, y_BOHW: Tensor) -> Tensor:
        if isinstance(self.forced, Tensor):
            if len(self.forced) not in (1, len(y_BOHW)):
                rows = f"a row for each of {len(y_BOHW)} samples, got {len(self.forced)}"
                raise ConfigError(f"group {self.name!r}: a forced mask must have one row or {rows}")
            return self.forced.expand(len(y_BOHW), -1)
        if self.forced == "targets":
            target_BO = self.target(y_BOHW)
            if target_BO is None:
                raise ConfigError(f"{type(self).__name__} has no targets to force")
            return target_BO.to(y_BOHW.dtype)
        return y_BOHW.new_ones(()).expand(y_BOHW.shape[:2])

    def __getstate__(self) -> dict[str, Any]:
        """What deepcopy and pickle take along: not the last batch, whose tensors hang on an autograd graph."""
        kept = dict(self.__dict__)
        return kept | dict.fromkeys(("decision", "lesson", "forced", "observer", "input_peak_BI", "peak"))


def _switched_off(y_BOHW: Tensor, mask: Tensor) -> Tensor:
    """``y_BOHW * mask``, in place where autograd cannot tell the difference: a fifth of the cost in training."""
    maker = "" if mask.requires_grad or y_BOHW.grad_fn is None else y_BOHW.grad_fn.name()
    if maker == "ReluBackward0" and not torch.compiler.is_compiling():
        # The backward of ReLU lets a gradient pass where its own result is positive. With the mask written into
        # that result, behind the version counter, it stops the gradient too, without a step of its own.
        y_BOHW.data.mul_(mask)
        return y_BOHW
    if maker == "NativeBatchNormBackward0":
        return y_BOHW.mul_(mask)  # batch norm does not keep its output for the backward
    return y_BOHW * mask


Gates = Mapping[str, AbstractGate]
Builder = Callable[[list[list[Unit]], Any], Gates]

_builders: dict[type[GateConfig], Builder] = {}


def register_gate(config_type: type[GateConfig]) -> Callable[[Builder], Builder]:
    """Decorator: ``build(groups, config) -> {group: gate}`` makes the gates for configs of this type.

    ``groups`` is a list of groups, each a list of units in execution order: the gate reads the first unit's
    input and masks the last unit's output.
    """
    if not (dataclasses.is_dataclass(config_type) and issubclass(config_type, GateConfig)):
        raise ConfigError(f"register_gate takes a dataclass derived from GateConfig, got {config_type!r}")
    if any(known.__name__ == config_type.__name__ for known in _builders):
        raise ConfigError(f"a gate config named {config_type.__name__!r} is registered already")

    def register(build: Builder) -> Builder:
        _builders[config_type] = build
        return build

    return register


def gate_types() -> dict[str, type[GateConfig]]:
    """Name -> config type of every registered method."""
    return {config_type.__name__: config_type for config_type in _builders}


def build_gates(groups: list[list[Unit]], config: GateConfig) -> Gates:
    """The gates of a registered method, one per group."""
    if type(config) not in _builders:
        raise unknown("gate config", type(config).__name__, gate_types())
    gates = _builders[type(config)](groups, config)
    wanted = {group[0].group for group in groups}
    if set(gates) != wanted:
        raise ConfigError(
            f"the builder of {type(config).__name__} must return one gate per group; "
            f"missing {sorted(wanted - set(gates))}, unexpected {sorted(set(gates) - wanted)}"
        )
    return gates
