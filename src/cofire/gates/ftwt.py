"""FTWT, "Fire Together Wire Together" (CVPR 2022): heads that learn which filters will fire from the network itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from cofire.errors import ConfigError, TrainingError
from cofire.files.strict import check
from cofire.gates.base import AbstractGate, Decision, GateConfig, Gates, Peak, register_gate
from cofire.gates.heads import Head
from cofire.gates.losses import mask_bce
from cofire.gates.pooling import peak
from cofire.gates.targets import activity, mass_levels, top_target
from cofire.graph.units import Unit


@dataclass(frozen=True, kw_only=True)
class FTWT(GateConfig):
    """The method's options; the defaults are ours, ``FTWT.preset("paper" | "official")`` the published forms.

    Args:
        ratio: share r of the activation mass that targets keep, in (0, 1]; the only knob.
        mode: ``decoupled`` keeps task loss and mask loss apart; ``joint`` lets both reach backbone and heads.
        signature: filters to keep per group, the same for every sample, in place of ``ratio``; see
            ``cofire.signatures``.
        pool, softmax, bias: of the heads.
        open_bias: if not 0, the heads' bias at the beginning; with 2 or so the gates start open.
        straight_through: in joint mode the task loss reaches the heads through the binarisation.
        floor: smallest number of filters in a mass target, 0 or 1.
        silent: what the target of an all-zero map is: what the floor says, or all filters.
        tolerance: how far the mass may pass ``ratio``.
    """

    ratio: float = 0.9
    mode: Literal["joint", "decoupled"] = "decoupled"
    signature: Mapping[str, int] | None = None
    pool: Literal["max", "avg"] = "max"
    softmax: bool = True
    bias: bool = True
    open_bias: float = 0.0
    straight_through: bool = True
    floor: Literal[0, 1] = 1
    silent: Literal["floor", "all"] = "floor"
    tolerance: float = 0.0

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {},
        "paper": {"floor": 0, "reduction": "sum", "depthwise": "separate", "always": True},
        "official": {
            "pool": "avg",
            "floor": 0,
            "silent": "all",
            "tolerance": 1e-5,
            "straight_through": False,
            "depthwise": "separate",
            "always": True,
            "linear": True,
        },
    }

    foretold: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return f"FTWT r = {self.ratio:g}"

    def __post_init__(self) -> None:
        check(self)
        if not 0.0 < self.ratio <= 1.0:
            raise ConfigError(f"FTWT.ratio must be in (0, 1], got {self.ratio}")
        if self.open_bias and not self.bias:
            raise ConfigError(f"FTWT.open_bias must be 0 where bias is off, got {self.open_bias}")
        if not 0.0 <= self.tolerance < 1.0:
            raise ConfigError(f"FTWT.tolerance must be in [0, 1), got {self.tolerance}")


class FTWTGate(AbstractGate):
    """One head and the rule that makes its targets."""

    def __init__(self, group: list[Unit], config: FTWT) -> None:
        super().__init__()
        self.config = config
        self.joint = config.mode == "joint"
        self.k = _kept(group, config)
        self.nonnegative = group[-1].nonnegative
        sizes = (group[0].in_channels, group[-1].out_channels)
        self.head = Head(*sizes, pool=config.pool, softmax=config.softmax, bias=config.bias)
        if config.open_bias:
            nn.init.constant_(self.head.linear.bias, config.open_bias)
        self.head_macs = self.head.macs

    def decide(self, x_BIHW: Tensor) -> Decision:
        logits_BO = self.head(x_BIHW) if self.joint else self.head(x_BIHW.detach(), self.input_peak_BI)
        mask_BO = (logits_BO > self.threshold).to(logits_BO.dtype)
        if self.joint and self.config.straight_through:
            share_BO = torch.sigmoid(logits_BO)
            mask_BO = mask_BO + (share_BO - share_BO.detach())  # value of the mask, gradient of the sigmoid
        return Decision(logits_BO, mask_BO)

    def loss(self, decision: Decision, y_BOHW: Tensor) -> Tensor:
        assert decision.logits_BO is not None
        return mask_bce(decision.logits_BO, self.target(y_BOHW))

    def study(self, decision: Decision, y_BOHW: Tensor) -> Tensor:
        self.peak = Peak(peak(y_BOHW.detach()), -1)
        return activity(y_BOHW, self.peak.value_BO, self.nonnegative)

    @classmethod
    def total_loss(cls, gates: Sequence[FTWTGate]) -> Tensor:
        """Gates with equally many filters share one sort and one loss, for each call on so little data costs."""
        alike: dict[tuple[int, int | None], list[FTWTGate]] = {}
        for gate in gates:
            alike.setdefault((gate.head.linear.out_features, gate.k), []).append(gate)
        return torch.stack([cls._loss_of_alike(members) for members in alike.values()]).sum()

    @staticmethod
    def _loss_of_alike(gates: list[FTWTGate]) -> Tensor:
        activity_BO = torch.cat([gate.lesson for gate in gates if gate.lesson is not None])
        logits_BO = torch.cat([gate.decision.logits_BO for gate in gates])  # type: ignore[union-attr, misc]
        try:
            target_BO = gates[0].levels(activity_BO, [gates[0].config.ratio]).logical_not()
        except TrainingError as error:
            names = [gate.name for gate in gates if gate.lesson is not None and not gate.lesson.isfinite().all()]
            raise TrainingError(f"group {names[0]!r}: {error}") from error
        return mask_bce(logits_BO, target_BO) * len(gates)

    def target(self, y_BOHW: Tensor) -> Tensor:
        return self.levels(activity(y_BOHW, nonnegative=self.nonnegative), [self.config.ratio]).logical_not()

    def levels(self, activity_BO: Tensor, ratios: list[float]) -> Tensor:
        """The first of nested ratios whose target has a filter on, R if none has; from activities, int (B, O)."""
        if self.k is not None:
            return torch.where(top_target(activity_BO, self.k), 0, len(ratios))
        level_BO = mass_levels(activity_BO, ratios, floor=self.config.floor, tolerance=self.config.tolerance)
        if self.config.silent == "all":
            level_BO *= activity_BO.any(1, keepdim=True)
        return level_BO


def _kept(group: list[Unit], config: FTWT) -> int | None:
    if config.signature is None:
        return None
    name, filters = group[0].group, group[-1].out_channels
    if name not in config.signature:
        raise ConfigError(f"FTWT.signature must name every group, got none for {name!r}")
    k = config.signature[name]
    if not 1 <= k <= filters:
        raise ConfigError(f"FTWT.signature[{name!r}] must be in 1..{filters}, got {k}")
    return k


@register_gate(FTWT)
def build(groups: list[list[Unit]], config: FTWT) -> Gates:
    return {group[0].group: FTWTGate(group, config) for group in groups}
