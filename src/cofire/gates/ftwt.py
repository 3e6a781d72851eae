"""FTWT, "Fire Together Wire Together" (CVPR 2022): heads that learn which filters will fire from the network itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, final

import torch
from torch import Tensor, nn

from cofire.errors import ConfigError, TrainingError
from cofire.files.strict import check
from cofire.gates.base import AbstractMethod, Decision, GateConfig, LinearHead, Step, register_method
from cofire.gates.fixed import check_kept, constant_head, mask_row
from cofire.gates.heads import PoolingHead
from cofire.gates.losses import mask_bce
from cofire.gates.pooling import peak
from cofire.gates.targets import activity, largest, mass_levels, nested, top_target
from cofire.graph.graph import Graph
from cofire.graph.placement import Filter, explained
from cofire.graph.units import Site


@dataclass(frozen=True, kw_only=True)
class FTWT(GateConfig):
    """The method's options; the defaults are ours, ``FTWT.preset("paper" | "official")`` the published forms.

    Args:
        ratio: share r of the activation mass that targets keep, in (0, 1]; the only knob.
        mode: ``decoupled`` keeps task loss and mask loss apart; ``joint`` lets both reach backbone and heads.
        signature: filters to keep per group, the same for every sample, in place of ``ratio``; see
            ``cofire.signatures``.
        fixed: group -> the filters that run for every image, by their index; such a group has no head.
        why: group -> what was decided on it, in words; ``print(gated.units)`` shows them.
        pool, softmax, standardise, bias: of the heads; see ``cofire.gates.heads.PoolingHead``.
        select: which filters run: those with a logit above the threshold, or as many of the ``top`` logits as the
            signature says, so that every image costs the same.
        saliency: what makes a filter strong in a target: its ``max`` response, the ``l2`` norm of its map, or its
            ``mean`` absolute response.
        open_bias: if not 0, the heads' bias at the beginning; with 2 or so the gates start open.
        straight_through: in joint mode the task loss reaches the heads through the binarisation.
        floor: smallest number of filters in a mass target, 0 or 1.
        silent: what the target of an all-zero map is: what the floor says, or all filters.
        tolerance: how far the mass may pass ``ratio``.
    """

    ratio: float = 0.9
    mode: Literal["joint", "decoupled"] = "decoupled"
    signature: Mapping[str, int] | None = None
    fixed: Mapping[str, tuple[int, ...]] | None = None
    why: Mapping[str, str] | None = None
    pool: Literal["max", "avg", "both"] = "max"
    softmax: bool = True
    standardise: bool = False
    select: Literal["threshold", "top"] = "threshold"
    saliency: Literal["max", "l2", "mean"] = "max"
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
    forms: ClassVar[Mapping[str, Mapping[str, Any]]] = {"": {}, "paper": presets["paper"], "top": {"select": "top"}}

    @property
    def label(self) -> str:
        return f"FTWT r = {self.ratio:g}" if self.signature is None else "FTWT, fixed k"

    @property
    def knob(self) -> str:
        return "signature" if self.select == "top" else "ratio"

    def __post_init__(self) -> None:
        check(self)
        if not 0.0 < self.ratio <= 1.0:
            raise ConfigError(f"FTWT.ratio must be in (0, 1], got {self.ratio}")
        if self.softmax and self.standardise:
            raise ConfigError("FTWT.softmax must be off where standardise is on: a head normalises its input once")
        if self.open_bias and not self.bias:
            raise ConfigError(f"FTWT.open_bias must be 0 where bias is off, got {self.open_bias}")
        if not 0.0 <= self.tolerance < 1.0:
            raise ConfigError(f"FTWT.tolerance must be in [0, 1), got {self.tolerance}")


class FTWTGate(nn.Module):
    """One head, and how many filters its targets have if that is fixed; no head where the filters are fixed too."""

    def __init__(self, site: Site, config: FTWT) -> None:
        super().__init__()
        self.fixed = site.name in (config.fixed or {})
        self.k = None if self.fixed else _kept(site, config)
        if self.fixed:
            return
        self.head = PoolingHead(
            site.units[0].in_channels,
            site.filters,
            pool=config.pool,
            softmax=config.softmax,
            bias=config.bias,
            standardise=config.standardise,
        )
        if config.open_bias:
            nn.init.constant_(self.head.linear.bias, config.open_bias)


class _Peak(NamedTuple):
    """A masked output's maximum over space, and the tensor's version at that time: in-place changes raise it."""

    value_BO: Tensor
    version: int


@final
@register_method(FTWT)
class FTWTMethod(AbstractMethod):
    """Heads that learn which filters will fire, and the rule that makes their targets."""

    config: FTWT
    threshold: float | None = 0.0

    def __init__(self, config: FTWT, graph: Graph) -> None:
        super().__init__(config, graph)
        self.joint = config.mode == "joint"
        if config.select == "top":
            self.threshold = None
        check_kept(config.fixed, self.sites, "FTWT.fixed")
        self._colours, self._glance = graph.input_shape[0], nn.AdaptiveAvgPool2d(1)
        self.hold({name: FTWTGate(site, config) for name, site in self.sites.items()})
        self._forget()

    @classmethod
    def place(cls, graph: Graph, config: FTWT, filter_fn: Filter | None) -> Graph:
        placed = super().place(graph, config, filter_fn)
        return placed if config.why is None else explained(placed, config.why)

    def _forget(self) -> None:
        self._peaks: dict[str, _Peak] = {}  # so that no map is pooled twice
        self._found_BO: Tensor | None = None  # the peak of the output that is being masked

    def __getstate__(self) -> dict[str, Any]:
        """What deepcopy and pickle take along: nothing of the last batch."""
        return self.__dict__ | {"_peaks": {}, "_found_BO": None}

    def begin(self, x_BCHW: Tensor) -> None:
        self._forget()

    def decide(self, site: Site, x_BIHW: Tensor) -> Decision:
        if self[site.name].fixed:
            return Decision(None, mask_row(self.config.fixed, site).to(x_BIHW).expand(x_BIHW.shape[0], -1))
        head = self[site.name].head
        logits_BO = head(x_BIHW) if self.joint else head(x_BIHW.detach(), self._known_peak(site, x_BIHW))
        mask_BO = self._on(site, logits_BO).to(logits_BO.dtype)
        if self.joint and self.config.straight_through:
            share_BO = torch.sigmoid(logits_BO)
            mask_BO = mask_BO + (share_BO - share_BO.detach())  # value of the mask, gradient of the sigmoid
        return Decision(logits_BO, mask_BO)

    def _on(self, site: Site, logits_BO: Tensor) -> Tensor:
        if self.config.select == "top":
            return largest(logits_BO.detach(), self._top(site))
        assert self.threshold is not None
        return logits_BO > self.threshold

    def _top(self, site: Site) -> int:
        k: int | None = self[site.name].k
        if k is None:  # not an error before: the number may be found by looking at the gated model
            raise ConfigError('FTWT.select = "top" needs a signature: how many filters run in each group')
        return k

    def head_macs(self, site: Site) -> int:
        gate = self[site.name]
        return 0 if gate.fixed else int(gate.head.macs)

    def _known_peak(self, site: Site, x_BIHW: Tensor) -> Tensor | None:
        """The input's maximum over space where the site before found it, and nothing has changed the input since."""
        known = self._peaks.get(site.after or "")
        if known is None or torch.compiler.is_compiling() or known.version != x_BIHW._version:
            return None
        return known.value_BO

    def observe(self, site: Site, decision: Decision, y_BOHW: Tensor) -> Tensor:
        self._found_BO = peak(y_BOHW.detach())
        return activity(y_BOHW, self._found_BO, site.units[-1].nonnegative, self.config.saliency)

    def masked(self, site: Site, decision: Decision, y_BOHW: Tensor, alone: bool) -> Tensor:
        masked = super().masked(site, decision, y_BOHW, alone)
        if self._found_BO is not None:
            self._peaks[site.name] = _Peak(self._found_BO * decision.mask.on.detach(), masked._version)
            self._found_BO = None
        return masked

    def loss(self, step: Step) -> Tensor:
        """Sites with equally many filters share one sort and one loss, for each call on so little data costs."""
        alike: dict[tuple[int, int | None], list[str]] = {}
        for name in (name for name in step.seen if not self[name].fixed):
            alike.setdefault((self.sites[name].filters, self[name].k), []).append(name)
        losses = [self._loss_of_alike(names, step) for names in alike.values()]
        return torch.stack(losses).sum() if losses else step.logits_BK.new_zeros(())

    def _loss_of_alike(self, names: list[str], step: Step) -> Tensor:
        activity_BO = torch.cat([step.seen[name] for name in names])
        logits_BO = torch.cat([step.decisions[name].logits_BO for name in names])  # type: ignore[misc]
        try:
            target_BO = self.levels(self.sites[names[0]], activity_BO, [self.config.ratio]).logical_not()
        except TrainingError as error:
            damaged = [name for name in names if not step.seen[name].isfinite().all()]
            raise TrainingError(f"group {damaged[0]!r}: {error}") from error
        return mask_bce(logits_BO, target_BO) * len(names)

    def target(self, site: Site, y_BOHW: Tensor) -> Tensor:
        return self.levels(site, self.activity(site, y_BOHW), [self.config.ratio]).logical_not()

    # Its cost is foretold

    def activity(self, site: Site, y_BOHW: Tensor) -> Tensor:
        return activity(y_BOHW, None, site.units[-1].nonnegative, self.config.saliency)

    def levels(self, site: Site, activity_BO: Tensor, ratios: list[float]) -> Tensor:
        if self[site.name].fixed:
            on_O = mask_row(self.config.fixed, site)[0].bool().to(activity_BO.device)
            return torch.where(on_O, 0, len(ratios)).expand(len(activity_BO), -1)
        if (k := self[site.name].k) is not None:
            return torch.where(top_target(activity_BO, k), 0, len(ratios))
        level_BO = mass_levels(activity_BO, ratios, floor=self.config.floor, tolerance=self.config.tolerance)
        if self.config.silent == "all":
            level_BO *= activity_BO.any(1, keepdim=True)
        return level_BO

    def nested(self, ratios: Sequence[float]) -> list[list[float]]:
        return nested(ratios, self.config.tolerance)

    # It can be calibrated, and made smaller

    def shift(self, site: Site, by_O: Tensor) -> None:
        if not self.config.bias:
            raise ConfigError("FTWT.bias must be on for thresholds per group or filter, which become part of it")
        self[site.name].head.linear.bias.data += by_O

    @property
    def narrows(self) -> bool:
        return not self.config.softmax and self.config.bias  # a softmax is over all channels, a zero counts too

    def trimmed(self, groups: Collection[str], fixed: Mapping[str, tuple[int, ...]], why: Mapping[str, str]) -> FTWT:
        kept = self.config.signature
        signature = None if kept is None else {name: k for name, k in kept.items() if name in groups}
        return dataclasses.replace(self.config, signature=signature, fixed=dict(fixed), why=dict(why), always=True)

    def take(self, other: AbstractMethod, site: Site, filters_O: Tensor, inputs_I: Tensor) -> None:
        before: PoolingHead = other[site.name].head
        self[site.name].head.load_state_dict(before.narrowed(filters_O, inputs_I))

    # The engine runs it

    def lower(self, site: Site) -> LinearHead:
        if self[site.name].fixed:
            return constant_head(mask_row(self.config.fixed, site)[0], self._colours, self._glance)
        head = self[site.name].head
        weight, bias = head.folded()
        top = self._top(site) if self.config.select == "top" else None
        return LinearHead(weight=weight, bias=bias, pool=head.pool, softmax=head.softmax, top=top)


def _kept(site: Site, config: FTWT) -> int | None:
    if config.signature is None:
        return None
    if site.name not in config.signature:
        raise ConfigError(f"FTWT.signature must name every group, got none for {site.name!r}")
    k = config.signature[site.name]
    if not 1 <= k <= site.filters:
        raise ConfigError(f"FTWT.signature[{site.name!r}] must be in 1..{site.filters}, got {k}")
    return k
