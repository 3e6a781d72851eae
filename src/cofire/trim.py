"""trim(gated, images): what a gated model never needs leaves it for good; what it always does alike loses its head.

Shapes: O filters of a group, I input channels, F channels that can leave.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from cofire.data.feeding import AnyLoader, first_images
from cofire.errors import ConfigError, NoUnitError
from cofire.gates.base import AbstractMethod
from cofire.gates.ftwt_offline import keep_rates
from cofire.gates.gating import GatedModel, gate
from cofire.graph.units import Site
from cofire.pruning.channels import Channels, ids
from cofire.pruning.removal import removable
from cofire.pruning.surgery import cut


@runtime_checkable
class Trimming(Protocol):
    """A method whose heads can lose filters that never run, and groups that always decide alike."""

    @property
    def narrows(self) -> bool:
        """Whether a head can do without input channels that are always zero."""

    def trimmed(
        self,
        groups: Collection[str],
        fixed: Mapping[str, tuple[int, ...]],
        certain: Mapping[str, tuple[int, ...]],
        why: Mapping[str, str],
    ) -> Any:
        """The config with these groups left.

        Some of them are fixed; of the others the filters in ``certain`` always run. ``why`` is what became of each
        group, in words.
        """

    def take(self, other: AbstractMethod, site: Site, filters_O: Tensor, inputs_I: Tensor) -> None:
        """Take over a site's head from the method before, for the filters and inputs that stay."""


def trim(gated: GatedModel, loader: AnyLoader, *, images: int = 10_000) -> nn.Module:
    """A smaller copy of ``gated`` that computes the same for the images seen; ``gated`` is left alone.

    Filters that run for none of the images are cut out where no addition needs their channel. A group in which every
    filter runs for all images or for none has no head any more: it is a plain, smaller conv, or a mask that never
    changes. In other groups, filters that run for all images are not decided on any more. ``print(trimmed.units)`` says
    which and why.

    Args:
        loader: batches of images, with or without labels: what the gates are watched on.
        images: how many to use at most.

    Returns:
        A gated model; a plain one if no group is left that decides anything.

    Raises:
        ConfigError: the method is not one whose heads can be made smaller.
    """
    method = gated.gates
    if not isinstance(method, Trimming):
        raise ConfigError(f"trim needs a method whose heads can lose filters, which {gated.config.label} is not")
    rates = keep_rates(gated, first_images(loader, images))
    decided = {name for name, rate_O in rates.items() if bool(((rate_O > 0) & (rate_O < 1)).any())}
    try:
        channels = removable(gated.backbone, gated.graph.input_shape)
    except NoUnitError:
        channels = None
    seeing = set() if method.narrows else decided
    cuts = _Cuts(gated, channels, {name: rate_O > 0 for name, rate_O in rates.items()}, seeing)
    smaller = gated.backbone if channels is None else cut(gated.backbone, channels, cuts.masks)
    fixed: dict[str, tuple[int, ...]] = {}
    certain: dict[str, tuple[int, ...]] = {}
    why: dict[str, str] = {}
    for name, site in method.sites.items():
        kept_O, on_O = cuts.filters(site), rates[name] > 0
        if name not in decided and not bool(on_O[kept_O].all()):
            fixed[name] = tuple(on_O[kept_O].nonzero().flatten().tolist())
        if name in decided and bool((always_O := (rates[name] == 1)[kept_O]).any()):
            certain[name] = tuple(always_O.nonzero().flatten().tolist())
        told = _why(name in decided, rates[name], kept_O, channels, site)
        why |= {unit.name: told for unit in site.units}
    left = decided | set(fixed)
    if not left:
        return smaller.eval()
    config = method.trimmed(left, fixed, certain, why)
    found = gate(smaller, config, filter_fn=lambda unit: unit.group in left, input_shape=gated.graph.input_shape)
    for name in decided:
        site, own = method.sites[name], found.gates
        assert isinstance(own, Trimming)
        own.take(method, site, cuts.filters(site), cuts.inputs(site))
    found.threshold = gated.threshold
    return found.eval()


@final
class _Cuts:
    """Which channels leave: those that no filter that ever runs writes, and that no head must see, be it at zero.

    Args:
        on: group -> filters that ever run, bool (O,).
        seeing: groups whose heads must see all of their inputs.
    """

    def __init__(
        self, gated: GatedModel, channels: Channels | None, on: Mapping[str, Tensor], seeing: set[str]
    ) -> None:
        self._graph, self._kept = gated.graph, torch.ones(0, dtype=torch.bool)
        self.masks: dict[str, Tensor] = {}
        if channels is None:
            return
        of_conv = {unit.conv: name for name, site in gated.gates.sites.items() for unit in site.units}
        heads = {site.first for name, site in gated.gates.sites.items() if name in seeing}
        needed_F = torch.zeros(sum(channels.sizes.values()), dtype=torch.bool)
        for op in channels.graph.ops:
            if op.conv is None:
                continue
            wanted_O = on[of_conv[op.name]] if op.name in of_conv else torch.ones(op.channels, dtype=torch.bool)
            _mark(needed_F, channels.channel_of[ids(op.own)][wanted_O])
            if op.name in heads:
                _mark(needed_F, channels.channel_of[ids(op.reads[0])])
        for name, mask_O in zip(channels.groups, needed_F.split(list(channels.sizes.values())), strict=True):
            mask_O[0] |= not bool(mask_O.any())  # a conv has at least one filter
            self.masks[name] = mask_O
        self._kept = channels.kept_ids(self.masks)

    def filters(self, site: Site) -> Tensor:
        """Which filters of a site stay, bool (O,)."""
        return self._of(self._graph[site.units[-1].conv].own, site.filters)

    def inputs(self, site: Site) -> Tensor:
        """Which input channels of a site stay, bool (I,)."""
        return self._of(self._graph[site.first].reads[0], site.units[0].in_channels)

    def _of(self, which: Tensor | slice, count: int) -> Tensor:
        return self._kept[ids(which)] if len(self._kept) else torch.ones(count, dtype=torch.bool)


def _mark(needed_F: Tensor, channel: Tensor) -> None:
    needed_F[channel[channel >= 0]] = True


def _why(decides: bool, rate_O: Tensor, kept_O: Tensor, channels: Channels | None, site: Site) -> str:
    """What became of a group, in words."""
    on_O = rate_O > 0
    runs, filters, gone = int(on_O.sum()), len(on_O), len(kept_O) - int(kept_O.sum())
    cut_out = f"; {gone} are cut" if gone else ""
    if decides:
        never = f", {filters - runs} of {filters} never run{cut_out}" if runs < filters else ""
        always = f", {certain} of {filters} always run" if (certain := int((rate_O == 1).sum())) else ""
        return f"decides per image{always}{never}"
    told = f"the same {runs} of {filters} for every image{cut_out}"
    stay = bool(kept_O[~on_O].any())
    reason = "" if channels is None else channels.reasons.get(site.units[-1].name, "")
    return f"{told}, no head" + (f"; the others stay: {reason or 'they cannot leave'}" if stay else "")
