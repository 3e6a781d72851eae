"""FTWT, "Fire Together Wire Together" (CVPR 2022): heads that learn which filters will fire from the network itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, final

import torch
from torch import Tensor, nn

from cofire.errors import ConfigError, TrainingError
from cofire.files.strict import check
from cofire.gates.base import AbstractMethod, Decision, GateConfig, LinearHead, Step, register_method
from cofire.gates.fixed import check_kept, constant_head, mask_row
from cofire.gates.gating import gate
from cofire.gates.heads import InnerMap, PoolingHead
from cofire.gates.losses import felt_later, mask_bce
from cofire.gates.pooling import peak
from cofire.gates.targets import activity, largest, mass_levels, nested, signature_of, top_target
from cofire.graph.graph import Graph
from cofire.graph.placement import Filter, explained, place
from cofire.graph.units import Site, Unit

_CERTAIN = 1e30  # a logit above all that a head finds, and above every threshold but infinity


@dataclass(frozen=True, kw_only=True)
class FTWT(GateConfig):
    """The method's options; the defaults are ours, ``FTWT.preset("paper" | "official")`` the published forms.

    Args:
        ratio: share r of the activation mass that targets keep, in (0, 1]; the only knob.
        mode: ``decoupled`` keeps task loss and mask loss apart; ``joint`` lets both reach backbone and heads.
        signature: filters to keep per group, the same for every sample, in place of ``ratio``; see
            ``cofire.signatures``.
        fixed: group -> the filters that run for every image, by their index; such a group has no head.
        certain: group -> the filters among others that run for every image: their rows of the head are zeros, which the
            engine does not multiply, and their targets say so too.
        why: group -> what was decided on it, in words; ``print(gated.units)`` shows them.
        pool, softmax, standardise, bias, rank, hidden: of the heads; see ``cofire.gates.heads.PoolingHead``.
        select: which filters run: those with a logit above the threshold, or as many of the ``top`` logits as the
            signature says, so that every image costs the same.
        saliency: what makes a filter strong in a target: its ``max`` response, the ``l2`` norm of its map, its
            ``mean`` absolute response, or ``gradient``: the sum over its map of |response * dL/d(masked response)|, how
            much the loss hangs on it, also where it is off. Training's own backward pass tells that, so the mask loss
            is 0 in the forward pass and in logs; its gradient is the usual one.
        targets: of the network ``self`` as it is, or of the ``teacher`` that it is distilled from, a dense network with
            the same layers.
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
    certain: Mapping[str, tuple[int, ...]] | None = None
    why: Mapping[str, str] | None = None
    pool: Literal["max", "avg", "both"] = "max"
    softmax: bool = True
    standardise: bool = False
    select: Literal["threshold", "top"] = "threshold"
    saliency: Literal["max", "l2", "mean", "gradient"] = "max"
    targets: Literal["self", "teacher"] = "self"
    rank: int = 0
    hidden: int = 0
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

    forms: ClassVar[Mapping[str, Mapping[str, Any]]] = {"": {}, "paper": presets["paper"], "top": {"select": "top"}}

    @property
    def label(self) -> str:
        found = f"FTWT r = {self.ratio:g}" if self.signature is None else "FTWT, fixed k"
        return f"{found}, by gradient" if self.saliency == "gradient" else found

    @property
    def foretold(self) -> bool:
        return self.saliency != "gradient"  # which no forward pass tells

    @property
    def knob(self) -> str:
        return "signature" if self.select == "top" else "ratio"

    def __post_init__(self) -> None:
        check(self)
        if not 0.0 < self.ratio <= 1.0:
            raise ConfigError(f"FTWT.ratio must be in (0, 1], got {self.ratio}")
        if self.softmax and self.standardise:
            raise ConfigError("FTWT.softmax must be off where standardise is on: a head normalises its input once")
        if self.certain and not self.bias:
            raise ConfigError("FTWT.certain needs a bias, which is the logit of what always runs; bias is off")
        if self.open_bias and not self.bias:
            raise ConfigError(f"FTWT.open_bias must be 0 where bias is off, got {self.open_bias}")
        if min(self.rank, self.hidden) < 0 or (self.rank and self.hidden):
            got = f"{self.rank} and {self.hidden}"
            raise ConfigError(f"FTWT.rank and FTWT.hidden must be at least 0, and one of them 0, got {got}")
        if self.targets == "teacher" and self.saliency == "gradient":
            raise ConfigError('FTWT.saliency must not be "gradient" with targets of a teacher, which makes no gradient')
        if not 0.0 <= self.tolerance < 1.0:
            raise ConfigError(f"FTWT.tolerance must be in [0, 1), got {self.tolerance}")


class FTWTGate(nn.Module):
    """One head, and how many filters its targets have if that is fixed; no head where the filters are fixed too."""

    def __init__(self, site: Site, config: FTWT) -> None:
        super().__init__()
        self.fixed = site.name in (config.fixed or {})
        self.k = None if self.fixed else signature_of(config.signature, site, "FTWT")
        if self.fixed:
            return
        self.head = PoolingHead(
            site.units[0].in_channels,
            site.filters,
            pool=config.pool,
            softmax=config.softmax,
            bias=config.bias,
            standardise=config.standardise,
            rank=config.rank,
            hidden=config.hidden,
        )
        if config.open_bias:
            nn.init.constant_(self.head.linear.bias, config.open_bias)
        self.certain = list((config.certain or {}).get(site.name, ()))
        self.settle()

    @torch.no_grad()
    def settle(self) -> None:
        """What always runs has nothing in the head but a logit above all others."""
        if self.certain:
            self.head.linear.weight[self.certain] = 0.0
            self.head.linear.bias[self.certain] = _CERTAIN


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
        check_kept(config.certain, self.sites, "FTWT.certain")
        self._shape, self._glance = graph.input_shape, nn.AdaptiveAvgPool2d(1)
        self.hold({name: FTWTGate(site, config) for name, site in self.sites.items()})
        self._forget()

    @classmethod
    def place(cls, graph: Graph, config: FTWT, filter_fn: Filter | None) -> Graph:
        if config.rank or config.hidden:
            placed = place(graph, config, filter_fn, head=lambda units: _two_maps(units, config))
        else:
            placed = super().place(graph, config, filter_fn)
        return placed if config.why is None else explained(placed, config.why)

    def _forget(self) -> None:
        self._peaks: dict[str, _Peak] = {}  # so that no map is pooled twice
        self._found_BO: Tensor | None = None  # the peak of the output that is being masked
        self._later: dict[str, Tensor] = {}  # mask losses that gradients will tell
        self._taught: dict[str, Tensor] = {}  # what the teacher's filters did

    def __getstate__(self) -> dict[str, Any]:
        """What deepcopy and pickle take along: nothing of the last batch."""
        return self.__dict__ | {"_peaks": {}, "_found_BO": None, "_later": {}, "_taught": {}}

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
        return 0 if gate.fixed else int(gate.head.macs_of(site.filters - len(gate.certain)))

    def _known_peak(self, site: Site, x_BIHW: Tensor) -> Tensor | None:
        """The input's maximum over space where the site before found it, and nothing has changed the input since."""
        known = self._peaks.get(site.after or "")
        if known is None or torch.compiler.is_compiling() or known.version != x_BIHW._version:
            return None
        return known.value_BO

    def observe(self, site: Site, decision: Decision, y_BOHW: Tensor) -> Tensor | None:
        self._found_BO = peak(y_BOHW.detach())
        if self.config.saliency == "gradient" or self.config.targets == "teacher":
            return None
        return activity(y_BOHW, self._found_BO, site.units[-1].nonnegative, self.config.saliency)

    def masked(self, site: Site, decision: Decision, y_BOHW: Tensor, alone: bool) -> Tensor:
        late = self.config.saliency == "gradient" and self.training and torch.is_grad_enabled()
        if late and decision.logits_BO is not None:
            mask, wanted = decision.mask.spread(y_BOHW), partial(self._wanted, site)
            masked, self._later[site.name] = felt_later(y_BOHW, mask, decision.logits_BO, wanted)
        else:
            masked = super().masked(site, decision, y_BOHW, alone)
        if self._found_BO is not None:
            self._peaks[site.name] = _Peak(self._found_BO * decision.mask.on.detach(), masked._version)
            self._found_BO = None
        return masked

    def taught_by(self, teacher: nn.Module) -> nn.Module:
        if self.config.targets == "self":
            return teacher
        config = dataclasses.replace(self.config, targets="self", always=True)
        open_one = gate(teacher, config, filter_fn=lambda unit: unit.group in self.sites, input_shape=self._shape)
        found, own = ({n: s.filters for n, s in m.sites.items()} for m in (open_one.gates, self))
        if found != own:
            raise ConfigError(
                'FTWT.targets = "teacher" needs a teacher with the groups of the model, and as many filters in each; '
                f"the model has {own}, the teacher {found}"
            )

        def watch(name: str, decision: Decision, y_BOHW: Tensor) -> None:
            self._taught[name] = self.activity(self.sites[name], y_BOHW)

        open_one.switchboard.observer, open_one.switchboard.forced = watch, dict.fromkeys(found, "open")
        return open_one.eval()

    def loss(self, step: Step) -> Tensor:
        """Sites with equally many filters share one sort and one loss, for each call on so little data costs."""
        names = [name for name in step.seen if not self[name].fixed]
        if not names:
            return step.logits_BK.new_zeros(())
        if self.config.saliency == "gradient":
            if not self._later:
                raise TrainingError('FTWT.saliency = "gradient" needs a forward without torch.no_grad')
            return torch.stack([self._later[name] for name in names]).sum()
        if self.config.targets == "teacher" and not self._taught:
            raise ConfigError(
                'FTWT.targets = "teacher" needs a teacher that sees the images of each step: fit(teacher=...) with '
                "Recipe.distill above 0 and warm_heads = 0"
            )
        alike: dict[tuple[int, int | None], list[str]] = {}
        for name in names:
            alike.setdefault((self.sites[name].filters, self[name].k), []).append(name)
        seen = step.seen if self.config.targets == "self" else self._taught
        return torch.stack([self._loss_of_alike(names, step, seen) for names in alike.values()]).sum()

    def _loss_of_alike(self, names: list[str], step: Step, seen: Mapping[str, Tensor]) -> Tensor:
        activity_BO = torch.cat([seen[name] for name in names])
        logits_BO = torch.cat([step.decisions[name].logits_BO for name in names])  # type: ignore[misc]
        try:
            target_BO = self._wanted(self.sites[names[0]], activity_BO)
        except TrainingError as error:
            damaged = [name for name in names if not seen[name].isfinite().all()]
            raise TrainingError(f"group {damaged[0]!r}: {error}") from error
        return mask_bce(logits_BO, target_BO) * len(names)

    def target(self, site: Site, y_BOHW: Tensor) -> Tensor | None:
        if self.config.saliency == "gradient":  # a forward pass does not tell
            return None
        return self._wanted(site, self.activity(site, y_BOHW))

    def _wanted(self, site: Site, activity_BO: Tensor) -> Tensor:
        return self.levels(site, activity_BO, [self.config.ratio]).logical_not()

    # Its cost is foretold

    def activity(self, site: Site, y_BOHW: Tensor) -> Tensor:
        if self.config.saliency == "gradient":
            raise ConfigError('FTWT.saliency must not be "gradient" here, where there is no backward pass')
        return activity(y_BOHW, None, site.units[-1].nonnegative, self.config.saliency)

    def levels(self, site: Site, activity_BO: Tensor, ratios: list[float]) -> Tensor:
        level_BO = self._levels(site, activity_BO, ratios)
        if self[site.name].fixed or not (certain := self[site.name].certain):
            return level_BO
        return level_BO.index_fill(1, torch.tensor(certain, device=level_BO.device), 0)

    def _levels(self, site: Site, activity_BO: Tensor, ratios: list[float]) -> Tensor:
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

    def trimmed(
        self,
        groups: Collection[str],
        fixed: Mapping[str, tuple[int, ...]],
        certain: Mapping[str, tuple[int, ...]],
        why: Mapping[str, str],
    ) -> FTWT:
        kept = self.config.signature
        signature = None if kept is None else {name: k for name, k in kept.items() if name in groups}
        without_rows = dict(certain) if self.config.bias else None
        return dataclasses.replace(
            self.config, signature=signature, fixed=dict(fixed), certain=without_rows, why=dict(why), always=True
        )

    def take(self, other: AbstractMethod, site: Site, filters_O: Tensor, inputs_I: Tensor) -> None:
        before: PoolingHead = other[site.name].head
        self[site.name].head.load_state_dict(before.narrowed(filters_O, inputs_I))
        self[site.name].settle()

    # The engine runs it

    def lower(self, site: Site) -> LinearHead:
        if self[site.name].fixed:
            return constant_head(mask_row(self.config.fixed, site)[0], self._shape[0], self._glance)
        head = self[site.name].head
        weight, bias = head.folded()
        top = self._top(site) if self.config.select == "top" else None
        options = {"pool": head.pool, "softmax": head.softmax, "top": top}
        if head.inner is None:
            return LinearHead(weight=weight, bias=bias, **options)
        inner = InnerMap(weight, bias, head.relu)
        return LinearHead(weight=head.linear.weight, bias=head.linear.bias, inner=inner, **options)


def _two_maps(units: Sequence[Unit], config: FTWT) -> int:
    """MACs of a group's head of two maps."""
    features = units[0].in_channels * (2 if config.pool == "both" else 1)
    return (features + units[-1].out_channels) * (config.rank or config.hidden)
