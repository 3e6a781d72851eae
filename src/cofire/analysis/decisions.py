"""collect(gated, loader) -> Decisions: what every gate decided for a whole set, as bits.

Shapes: N images of the set, B of a batch, O filters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cofire.data.feeding import AnyLoader, feed
from cofire.errors import ConfigError, DataError, unknown
from cofire.gates.base import Decision
from cofire.gates.gating import GatedModel, require_filters
from cofire.graph.tracing import evaluating

Bits = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, eq=False)
class Decisions:
    """The masks of N images, eight filters to a byte, beside what the model made of the images.

    Args:
        bits: group -> uint8 (N, ceil(O / 8)), as ``numpy.packbits`` packs masks (N, O); in execution order.
        filters: group -> O.
        label_N: int64, or None for unlabelled images.
        predicted_N: int64, the class with the largest logit.
        macs_N: int64, MACs of each image, column ``executed``.
        dense_macs: MACs of an image with all gates open.
        target_bits: the targets, packed like ``bits``; no group of a method without targets, none if not collected.
    """

    bits: Mapping[str, Bits]
    filters: Mapping[str, int]
    label_N: NDArray[np.int64] | None
    predicted_N: NDArray[np.int64]
    macs_N: NDArray[np.int64]
    dense_macs: int
    target_bits: Mapping[str, Bits]

    def __len__(self) -> int:
        return len(self.predicted_N)

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups in execution order."""
        return tuple(self.bits)

    def mask(self, group: str) -> NDArray[np.bool_]:
        """Which filters ran, bool (N, O)."""
        return self._unpacked(self.bits, group)

    def target(self, group: str) -> NDArray[np.bool_]:
        """Which filters should have run, bool (N, O)."""
        if group in self.bits and group not in self.target_bits:
            raise ConfigError(f"group {group!r} has no targets here: collect them with targets=True, if its method can")
        return self._unpacked(self.target_bits, group)

    def keep_rate(self, group: str) -> NDArray[np.float64]:
        """For how large a share of the images each filter ran, (O,) in [0, 1]."""
        rate_O: NDArray[np.float64] = self.mask(group).mean(0)
        return rate_O

    def _unpacked(self, bits: Mapping[str, Bits], group: str) -> NDArray[np.bool_]:
        if group not in bits:
            raise unknown("group", group, bits)
        return np.unpackbits(bits[group], axis=1, count=self.filters[group]).view(np.bool_)


def collect(gated: nn.Module, loader: AnyLoader, *, targets: bool = False, text: str = "collecting") -> Decisions:
    """The decisions of ``gated`` for all images of ``loader``, in eval mode; memory: a bit per filter and image.

    Args:
        loader: batches of images of one size, with or without labels.
        targets: also what the decisions should have been, which takes longer.
        text: what the progress bar says; empty for none.
    """
    if not isinstance(gated, GatedModel):
        raise ConfigError(f"only gates take decisions: collect needs a gated model, got {type(gated).__name__}")
    require_filters(gated, "collect")
    device = next(gated.parameters()).device
    batches: dict[str, list[NDArray[np.int64]]] = defaultdict(list)
    bits: dict[str, list[Bits]] = {group: [] for group in gated.gates}
    target_bits: dict[str, list[Bits]] = defaultdict(list)
    dense: set[int] = set()

    def watch(group: str, decision: Decision, y_BOHW: Tensor) -> None:
        bits[group].append(packed(decision.mask.bits))
        target_BO = gated.gates.target(gated.gates.sites[group], y_BOHW) if targets else None
        if target_BO is not None:
            target_bits[group].append(packed(target_BO))

    with torch.no_grad(), evaluating(gated), gated.observe(watch):
        for x_BCHW, label_B in feed(loader, text):
            batches["predicted"].append(gated(x_BCHW.to(device)).argmax(1).cpu().numpy())
            cost = gated.cost(input_shape=(int(x_BCHW.shape[1]), int(x_BCHW.shape[2]), int(x_BCHW.shape[3])))
            dense.add(cost.dense_total)
            batches["macs"].append(cost.total("executed").expand(len(x_BCHW)).cpu().numpy())
            if label_B is not None:
                batches["label"].append(label_B.cpu().numpy())
            if len(dense) > 1 or len(batches["label"]) not in (0, len(batches["macs"])):
                raise DataError("collect needs images of one size, all with labels or all without")
    return Decisions(
        bits=_joined(bits),
        filters={group: units[-1].out_channels for group, units in gated.units.groups.items()},
        label_N=np.concatenate(batches["label"]) if batches["label"] else None,
        predicted_N=np.concatenate(batches["predicted"]),
        macs_N=np.concatenate(batches["macs"]),
        dense_macs=dense.pop(),
        target_bits=_joined(target_bits),
    )


def packed(mask_BO: Tensor) -> Bits:
    """A bool mask, eight filters to a byte: uint8 (B, ceil(O / 8))."""
    return np.packbits(mask_BO.cpu().numpy(), axis=1)


def _joined(parts: Mapping[str, list[Bits]]) -> dict[str, Bits]:
    return {group: np.concatenate(batches) for group, batches in parts.items()}
