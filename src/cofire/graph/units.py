"""Units: the filters of a model that can be switched off together, and the sites where gates act; only data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rich.table import Table

from cofire.text import rendered

Role = Literal["plain", "residual", "shortcut", "depthwise", "linear"]


@dataclass(frozen=True)
class Unit:
    """A conv with the norm and activation that follow it: the only definition of what can be switched off."""

    name: str
    """The conv's qualified name in the model."""
    conv: str
    """Graph op of the conv."""
    out: str
    """Graph op whose output the mask multiplies."""
    in_channels: int
    out_channels: int
    groups: int
    kernel_size: tuple[int, ...]
    out_size: tuple[int, ...]
    """(H, W) of the output map."""
    macs: int
    """Dense MACs of one sample."""
    nonnegative: bool
    """Its output cannot be negative, as after a ReLU."""
    role: Role
    group: str
    """Name of the unit whose gate decides; units of one group share one mask."""
    gated: bool
    reason: str
    """Why it is not gated, in words a user understands; of a gated unit, what is known of its gate, if anything."""


MaskKind = Literal["filters", "pixels", "block"]
"""What a mask switches off: filters of units, positions of a unit's output, a residual branch as a whole."""


@dataclass(frozen=True)
class Site:
    """A place where one decision is taken per sample: on the output of ``x``, masking the output of ``out``."""

    name: str
    kind: MaskKind
    x: str
    """Graph op whose output the decision is taken on."""
    first: str
    """Graph op before which the decision is taken: the first that a mask can save."""
    out: str
    """Graph op whose output the mask is written on."""
    convs: tuple[str, ...]
    """Graph ops of the convs (and, in a branch, linear layers) that a mask saves."""
    units: tuple[Unit, ...]
    """The gated units it decides for, in execution order."""
    after: str | None = None
    """The site whose masked output is this one's ``x``, if there is one."""
    partial: int = 0
    """Of pixels: so many input channels, the first of each of the conv's groups, are added up at every position, and
    the others where the mask is on. 0: where it is off nothing is computed."""

    @property
    def filters(self) -> int:
        """Filters of the last unit: O of the output that is masked."""
        return self.units[-1].out_channels


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where gates may sit; every gate config begins with these options.

    Args:
        site: mask of a residual block's last conv on its norm's output (``pre_add``) or on the activated sum
            (``post_add``).
        depthwise: ``grouped`` gives a depthwise conv the mask of the conv that feeds it; ``separate`` its own.
        linear: gate convs that no activation follows (a linear bottleneck's projection) as well.
        always: gate also where the head costs as many MACs as the unit.
    """

    site: Literal["pre_add", "post_add"] = "pre_add"
    depthwise: Literal["grouped", "separate"] = "grouped"
    linear: bool = False
    always: bool = False


class Units(tuple[Unit, ...]):
    """The units of a model in execution order; prints as a table."""

    @property
    def groups(self) -> dict[str, list[Unit]]:
        """Group name -> its gated units, in execution order."""
        found: dict[str, list[Unit]] = {}
        for unit in self:
            if unit.gated:
                found.setdefault(unit.group, []).append(unit)
        return found

    def __str__(self) -> str:
        return rendered(self.__rich__())

    def __rich__(self) -> Table:
        table = Table(title=f"{sum(u.gated for u in self)} of {len(self)} units gated", title_justify="left")
        table.add_column("unit", no_wrap=True)
        for column in ("filters", "kernel", "map"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("MACs", justify="right", no_wrap=True)
        table.add_column("role")
        table.add_column("gate, or why not")
        for unit in self:
            filters = f"{unit.in_channels} -> {unit.out_channels}" + (f" /{unit.groups}" if unit.groups > 1 else "")
            sizes = ("x".join(map(str, unit.kernel_size)), "x".join(map(str, unit.out_size)))
            own = "own" if unit.group == unit.name else f"of {unit.group}"
            own += f": {unit.reason}" if unit.reason else ""
            table.add_row(
                unit.name,
                filters,
                *sizes,
                f"{unit.macs:,}",
                unit.role,
                own if unit.gated else f"no: {unit.reason}",
            )
        return table


def head_macs(group: list[Unit]) -> int:
    """MACs of a linear head for a group: it reads the first unit's input and has a logit per filter."""
    return group[0].in_channels * group[-1].out_channels


def group_macs(group: list[Unit]) -> int:
    """Dense MACs of a group's units."""
    return sum(unit.macs for unit in group)
