"""A look as HTML: two cards, a wall of lights, heatmaps. Everything is inline; nothing is fetched."""

from __future__ import annotations

import base64
import html
import io

import numpy as np
from numpy.typing import NDArray

from cofire.analysis.responses import Heatmaps
from cofire.explore.look import Look, Side
from cofire.explore.subject import Pixels
from cofire.text import percent

LIGHT, PER_ROW = 10, 32
CSS = """
.cofire-sides {display: flex; flex-wrap: wrap; gap: 12px}
.cofire-side {flex: 1 1 200px; border: 1px solid currentColor; border-radius: 8px; padding: 10px; min-width: 0}
.cofire-side b {font-size: 1.1em}
.cofire-bar {height: 8px; background: #f59e0b; border-radius: 4px; margin: 2px 0 6px}
.cofire-picture {image-rendering: pixelated; width: 128px; height: 128px; border-radius: 8px}
.cofire-heats {display: flex; gap: 12px}
.cofire-heat {image-rendering: pixelated; width: 128px; height: 128px}
.cofire-wall {width: 100%; height: auto; display: block}
.cofire-wall .on {fill: #f59e0b} .cofire-wall .off {fill: currentColor; opacity: 0.15}
.cofire-layer {margin: 6px 0 10px}
#pictures .grid-container {grid-template-columns: repeat(auto-fill, minmax(76px, 1fr)); grid-auto-rows: auto}
#threshold .head, #k .head {flex-wrap: nowrap; gap: 12px}
"""


def drawn(look: Look, heat: Heatmaps | None) -> str:
    """The whole of what is known of a picture."""
    saved = 1 - look.gated.macs / max(look.dense.macs, 1)
    return (
        f'<div class="cofire-sides"><img class="cofire-picture" alt="the picture" src="{_png(look.pixels_CHW)}">'
        f"{_side('All filters', look.dense)}{_side(f'Gated, {percent(saved)} of the MACs saved', look.gated)}</div>"
        f"<h3>Filters that fire</h3>{wall(look.masks)}{_heat(heat)}"
    )


def wall(masks: dict[str, NDArray[np.bool_]]) -> str:
    """A light for each filter, group by group; lit where it ran."""
    if not masks:
        return "<p>This model has no gates: every filter runs for every picture.</p>"
    return "".join(_layer(name, mask_O) for name, mask_O in masks.items())


def _layer(name: str, mask_O: NDArray[np.bool_]) -> str:
    lights = "".join(
        f'<rect class="{"on" if on else "off"}" x="{LIGHT * (n % PER_ROW)}" y="{LIGHT * (n // PER_ROW)}" '
        f'width="{LIGHT - 2}" height="{LIGHT - 2}" rx="2"/>'
        for n, on in enumerate(mask_O)
    )
    rows = -(-len(mask_O) // PER_ROW)
    told = f"{html.escape(name)}: {int(mask_O.sum())} of {len(mask_O)}"
    size = f"0 0 {LIGHT * PER_ROW} {LIGHT * rows}"
    drawing = f'<svg class="cofire-wall" viewBox="{size}" role="img" aria-label="{told}">{lights}</svg>'
    return f'<div class="cofire-layer"><small>{told}</small>{drawing}</div>'


def _side(title: str, side: Side) -> str:
    bars = "".join(
        f'{html.escape(name)}: {percent(share)}<div class="cofire-bar" style="width: {100 * share:.1f}%"></div>'
        for name, share in zip(side.classes, side.probabilities, strict=True)
    )
    cost = f"{side.macs:,} MACs, {side.milliseconds:.3f} ms"
    return f'<div class="cofire-side"><b>{html.escape(title)}</b><br>{cost}<br><br>{bars}</div>'


def _heat(heat: Heatmaps | None) -> str:
    if heat is None:
        return ""
    most = float(heat.dense_NHW.max()) or 1.0
    maps = {"all filters": heat.dense_NHW[0], "gated": heat.gated_NHW[0]}
    images = "".join(
        f'<img class="cofire-heat" alt="{title}" title="{title}" src="{_png(_coloured(map_HW / most))}">'
        for title, map_HW in maps.items()
    )
    title = f"Where {html.escape(heat.unit)} responds: all filters, then gated"
    return f'<h3>{title}</h3><div class="cofire-heats">{images}</div>'


def _coloured(share_HW: NDArray[np.floating]) -> Pixels:
    """From black over red to yellow, (3, H, W)."""
    share = np.clip(share_HW, 0, 1)
    red, green = np.clip(2 * share, 0, 1), np.clip(2 * share - 1, 0, 1)
    return (255 * np.stack([red, green, np.zeros_like(share)])).astype(np.uint8)


def _png(pixels_CHW: Pixels) -> str:
    """As a link that holds the picture itself."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(as_picture(pixels_CHW)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def as_picture(pixels_CHW: Pixels) -> Pixels:
    """(H, W, 3), as Pillow and browsers have it."""
    three = np.repeat(pixels_CHW, 3, 0) if len(pixels_CHW) == 1 else pixels_CHW
    return np.ascontiguousarray(three.transpose(1, 2, 0))
