"""Units of convs inside modules that are one opaque call: never gated, listed with the reason."""

from __future__ import annotations

from cofire.graph.ops import Conv, Op
from cofire.graph.units import Unit


def hidden_unit(op: Op, conv: Conv) -> Unit:
    """The unit of a conv that the opaque call ``op`` runs."""
    return Unit(
        name=conv.module,
        conv=op.name,
        out=op.name,
        in_channels=conv.in_channels,
        out_channels=conv.out_channels,
        groups=conv.groups,
        kernel_size=conv.kernel_size,
        out_size=(),
        macs=conv.macs,
        nonnegative=False,
        role="plain",
        group=conv.module,
        gated=False,
        reason=f"inside {op.what}, which torch.fx cannot follow and which is run as it is: {op.reason}",
    )
