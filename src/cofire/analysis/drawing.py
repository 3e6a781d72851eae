"""How figures look and how they are written: print style, colours, values on hover, SVG and PNG."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec
from xml.etree import ElementTree

from cofire.errors import ConfigError
from cofire.extras import require
from cofire.files.atomic import write_atomically

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

P = ParamSpec("P")
FORMATS = (".svg", ".png", ".pdf")

INK = "#202122"
"""Colour of text and axes; in a page it becomes that of the page's text."""
BLUE, ORANGE, GREEN, RED, GREY = "#3d85c6", "#e69f00", "#009e73", "#d55e00", "#9a9a9a"
"""Okabe and Ito's colours, told apart by colour-blind eyes; their blue a little lighter, for dark pages."""
COLOURS = (BLUE, ORANGE, GREEN, RED, GREY)
MARKERS = ("o", "s", "^", "D", "v")
COLOUR_MAP = "cividis"
WIDTH = 3.5  # inches: a column of a printed page; on a phone, letters keep their size

_TIP = "tip:"
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.facecolor": "none",
    "figure.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GREY,
    "grid.alpha": 0.35,
    "grid.linewidth": 0.6,
    "svg.fonttype": "none",
    "savefig.dpi": 200,
}


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Decorator of a figure function: it draws in our style, and says what to install if there is no matplotlib."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with _matplotlib().rc_context(_STYLE):
            return draw(*args, **kwargs)

    return drawn


def new_figure(height: float, width: float = WIDTH) -> Figure:
    """An empty figure that belongs to no window, sizes in inches."""
    figure: Figure = require("matplotlib.figure", "matplotlib", "report").Figure((width, height), layout="constrained")
    return figure


def tip(artist: Artist, text: str) -> None:
    """Give part of a figure a text that a browser shows on hover."""
    artist.set_gid(_TIP + text)


def to_png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    return _saved(figure, "png", {})


def to_svg(figure: Figure, name: str) -> bytes:
    """The figure as an SVG file; the same figure and name give the same bytes."""
    content: bytes = ElementTree.tostring(_svg(figure, name), encoding="utf-8", xml_declaration=True)
    return content


def check_format(path: Path) -> None:
    """Raise unless ``path`` names a kind of file that `write_figure` writes, and there is matplotlib to write it."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"a figure must be a file in {', '.join(FORMATS)}, got {path}")
    _matplotlib()


def write_figure(figure: Figure, path: Path) -> None:
    """The figure as a file: .svg, with values on hover, .png or .pdf."""
    check_format(path)
    kind = path.suffix.lower().removeprefix(".")
    write_atomically(path, to_svg(figure, path.stem) if kind == "svg" else _saved(figure, kind, {}))


def to_inline_svg(figure: Figure, name: str, label: str) -> str:
    """The figure as an SVG element for a page: without background, as wide as its place, text in the page's colour.

    Args:
        name: unique on the page.
        label: what a screen reader says.
    """
    root = _svg(figure, name, facecolor="none")
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    for size in ("width", "height"):
        root.attrib.pop(size)
    root.attrib |= {"role": "img", "aria-label": label, "style": "stroke-linejoin: round"}
    _keep_referenced_ids(root, name)
    for element in root.iter():
        for key in ("style", "fill", "stroke"):
            if INK in element.get(key, ""):
                element.set(key, element.get(key, "").replace(INK, "currentColor"))
    return ElementTree.tostring(root, encoding="unicode")


def _matplotlib() -> Any:
    return require("matplotlib", "matplotlib", "report")


def _saved(figure: Figure, kind: str, style: dict[str, Any], **options: Any) -> bytes:
    file = io.BytesIO()
    with _matplotlib().rc_context({**_STYLE, **style}):
        figure.savefig(file, format=kind, **options)
    return file.getvalue()


def _svg(figure: Figure, name: str, **options: Any) -> ElementTree.Element:
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    content = _saved(figure, "svg", {"svg.hashsalt": name}, metadata={"Date": None}, **options)
    root = ElementTree.fromstring(content)
    for element in root.iter():
        if element.get("id", "").startswith(_TIP):
            title = ElementTree.Element(f"{{{_SVG}}}title")
            title.text = element.attrib.pop("id").removeprefix(_TIP)
            element.insert(0, title)
    return root


def _keep_referenced_ids(root: ElementTree.Element, name: str) -> None:
    """Ids must be unique on a page: those that something points to get the figure's name, the others go."""
    href = f"{{{_XLINK}}}href"
    pointers = [value for element in root.iter() for value in element.attrib.values() if "#" in value]
    for element in root.iter():
        own = element.attrib.pop("id", None)
        if own is not None and any(value == f"#{own}" or f"url(#{own})" in value for value in pointers):
            element.set("id", f"{name}-{own}")
        for key, value in element.items():
            if key == href and value.startswith("#"):
                element.set(key, f"#{name}-{value[1:]}")
            elif "url(#" in value:
                element.set(key, value.replace("url(#", f"url(#{name}-"))
