"""A conv's unit as long as nothing gates it; that of a conv inside an opaque call, which nothing ever does."""

from __future__ import annotations

import dataclasses

from cofire.graph.ops import Conv, Op
from cofire.graph.units import Unit


def open_unit(op: Op, conv: Conv) -> Unit:
    """The unit of the conv that ``op`` runs: a group of its own, without norm or activation."""
    return Unit(
        name=conv.module,
        conv=op.name,
        out=op.name,
        in_channels=conv.in_channels,
        out_channels=conv.out_channels,
        groups=conv.groups,
        kernel_size=conv.kernel_size or (1, 1),
        out_size=op.size,
        macs=conv.macs,
        nonnegative=False,
        role="plain",
        group=conv.module,
        gated=False,
        reason="",
    )


def hidden_unit(op: Op, conv: Conv) -> Unit:
    """The unit of a conv that the opaque call ``op`` runs: listed with the reason why it is never gated."""
    reason = f"inside {op.what}, which torch.fx cannot follow and which is run as it is: {op.reason}"
    return dataclasses.replace(open_unit(op, conv), out_size=(), reason=reason)
