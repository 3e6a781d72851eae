"""Tables as text: one way to print what the command line and ``print`` show."""

from __future__ import annotations

from rich.console import Console, RenderableType


def rendered(what: RenderableType, width: int = 120) -> str:
    """``what`` as plain text without colours or trailing blanks."""
    console = Console(width=width, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(what)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def percent(share: float, digits: int = 1) -> str:
    """0.1234 -> '12.3 %'."""
    return f"{100 * share:.{digits}f} %"
