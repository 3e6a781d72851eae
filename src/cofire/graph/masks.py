"""Masks with a kind: what one decision switches off for each sample of a batch. Only these say what a mask means.

Shapes: B samples, O filters, H x W positions. Masks are 0/1, bool or float; a float mask may carry a gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from cofire.errors import ConfigError
from cofire.graph.live import Chance, Live
from cofire.graph.units import MaskKind, Site


@dataclass(frozen=True, eq=False)
class AbstractMask(ABC):
    """The mask of one site for one batch."""

    on: Tensor
    kind: ClassVar[MaskKind]

    @property
    def bits(self) -> Tensor:
        """Where it is on, bool, of the shape of ``on``, without gradient."""
        return self.on if self.on.dtype == torch.bool else self.on.detach() > 0.5

    @property
    def keep_rate(self) -> Tensor:
        """Share that is on for each sample, float64 (B,)."""
        return self.bits.flatten(1).double().mean(1) if self.on.ndim > 1 else self.bits.double()

    @property
    def empty(self) -> Tensor:
        """Samples for which nothing is on, bool (B,)."""
        return ~self.bits.flatten(1).any(1) if self.on.ndim > 1 else ~self.bits

    @abstractmethod
    def spread(self, y_BOHW: Tensor) -> Tensor:
        """The mask in the dtype of a unit's output, of a shape that multiplies it."""

    @abstractmethod
    def live(self, channels: int) -> Live:
        """Which of the masked output's channels can be non-zero."""

    @abstractmethod
    def chance(self, channels: int) -> Chance:
        """The same where ``on`` holds probabilities."""

    @property
    def positions(self) -> Tensor | None:
        """Output positions at which each filter runs, (B, O) or (B, 1); None: at all or none of them."""
        return None

    @classmethod
    @abstractmethod
    def checked(cls, site: Site, on: Tensor, size: tuple[int, ...]) -> AbstractMask:
        """A mask made of a tensor, for all samples alike where it has no batch; ``size`` is (H, W) of the output."""


def _refused(site: Site, shape: str, on: Tensor) -> ConfigError:
    return ConfigError(f"group {site.name!r}: mask must have shape {shape}, got {tuple(on.shape)}")


@final
@dataclass(frozen=True, eq=False)
class FilterMask(AbstractMask):
    """Filters of a group that run: ``on`` is (B, O)."""

    kind: ClassVar[MaskKind] = "filters"

    def spread(self, y_BOHW: Tensor) -> Tensor:
        return self.on.to(y_BOHW.dtype)[(..., *[None] * (y_BOHW.ndim - 2))]  # no size, which exports would hold on to

    def live(self, channels: int) -> Live:
        return Live.under(self.bits)

    def chance(self, channels: int) -> Chance:
        return Chance(self.on)

    @classmethod
    def checked(cls, site: Site, on: Tensor, size: tuple[int, ...]) -> FilterMask:
        if on.ndim not in (1, 2) or on.shape[-1] != site.filters:
            raise _refused(site, f"(B, {site.filters})", on)
        return cls(on.reshape(-1, site.filters))


@final
@dataclass(frozen=True, eq=False)
class PixelMask(AbstractMask):
    """Positions of a unit's output that are computed: ``on`` is (B, 1, H, W) for all filters alike, or (B, O, H, W)."""

    kind: ClassVar[MaskKind] = "pixels"

    def spread(self, y_BOHW: Tensor) -> Tensor:
        return self.on.to(y_BOHW.dtype)

    def live(self, channels: int) -> Live:
        return Live.under(self.bits.flatten(2).any(2)).expand(channels)

    def chance(self, channels: int) -> Chance:
        return Chance(1 - (1 - self.on.flatten(2)).prod(2)).expand(channels)

    @property
    def positions(self) -> Tensor | None:
        on = self.on if self.on.is_floating_point() else self.on.to(torch.int64)
        return on.flatten(2).sum(2)

    @classmethod
    def checked(cls, site: Site, on: Tensor, size: tuple[int, ...]) -> PixelMask:
        on = on if on.ndim == 4 else on[None]
        if on.ndim != 4 or on.shape[1] not in (1, site.filters) or tuple(on.shape[2:]) != tuple(size):
            sizes = ", ".join(map(str, size))
            raise _refused(site, f"(B, 1, {sizes}) or (B, {site.filters}, {sizes})", on)
        return cls(on)


@final
@dataclass(frozen=True, eq=False)
class BlockMask(AbstractMask):
    """Residual branches that run: ``on`` is (B,)."""

    kind: ClassVar[MaskKind] = "block"

    def spread(self, y_BOHW: Tensor) -> Tensor:
        return self.on.to(y_BOHW.dtype).reshape(-1, *[1] * (y_BOHW.ndim - 1))

    def live(self, channels: int) -> Live:
        return Live.under(self.bits[:, None]).expand(channels)

    def chance(self, channels: int) -> Chance:
        return Chance(self.on[:, None]).expand(channels)

    @classmethod
    def checked(cls, site: Site, on: Tensor, size: tuple[int, ...]) -> BlockMask:
        if on.ndim > 1:
            raise _refused(site, "(B,)", on)
        return cls(on.reshape(-1))


_KINDS: dict[MaskKind, type[AbstractMask]] = {mask.kind: mask for mask in (FilterMask, PixelMask, BlockMask)}


def mask_of(site: Site, mask: Tensor | AbstractMask, size: tuple[int, ...]) -> AbstractMask:
    """What was given for a site as a mask of the site's kind.

    Raises:
        ConfigError: it is of another kind or shape.
    """
    if isinstance(mask, AbstractMask):
        if mask.kind != site.kind:
            raise ConfigError(f"site {site.name!r} takes masks of {site.kind}, got one of {mask.kind}")
        mask = mask.on
    return _KINDS[site.kind].checked(site, mask, size)


def switched_off(y_BOHW: Tensor, mask: Tensor) -> Tensor:
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
