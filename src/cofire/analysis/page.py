"""A study and results to compare with -> one HTML page that needs nothing beside itself."""

from __future__ import annotations

import base64
import io
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cofire.analysis.drawing import to_inline_svg
from cofire.analysis.panels import Panel, trade_off_panel
from cofire.analysis.study import Study
from cofire.analysis.tradeoff import Result, kind, paper_points
from cofire.extras import require
from cofire.files.atomic import write_text
from cofire.graph.cost import COLUMNS
from cofire.text import percent

TEMPLATE = Path(__file__).with_name("report.html.jinja")


def write_page(path: str | Path, study: Study, results: Mapping[str, Result], command: Sequence[str]) -> None:
    """Write the report of ``study`` as one file, without network, scripts or fonts.

    Args:
        results: name -> result.json of every run in the summary, that of ``study`` first.
        command: what was called, for the page to say how it was made.
    """
    write_text(Path(path), page(study, results, command))


def page(study: Study, results: Mapping[str, Result], command: Sequence[str]) -> str:
    """The page as text; see :func:`write_page`."""
    jinja2 = require("jinja2", "jinja2", "report")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE.parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = cell
    drawn = [panel for panel in study.panels if panel.name != "extremes"]  # the page shows the pictures themselves
    result = study.run.result
    trade_off = [_trade_off(results, result)] if len(results) > 1 else []
    text: str = environment.get_template(TEMPLATE.name).render(
        study=study,
        num_images=len(study.run.images),
        names=list(results),
        summary=_summary(results.values()),
        panels=[_shown(panel) for panel in (*trade_off, *drawn)],
        pictures={row: [(_png(pixels), text) for pixels, text in found] for row, found in study.pictures.items()},
        recipe=_recipe(result["experiment"]),
        provenance=_flat(result["provenance"]),
        commands=[
            f"cofire train recipe.toml --out {shlex.quote(str(study.run.folder))}",
            f"cofire eval {shlex.quote(str(study.run.folder))}",
            shlex.join(command),
        ],
    )
    return text


def _trade_off(results: Mapping[str, Result], result: Result) -> Panel:
    """In the paper's count where the paper has points of this network, else in ours."""
    paper = paper_points(result)
    return trade_off_panel(results, paper, "paper" if paper else "executed")


def cell(value: Any) -> str:
    """A value of a table as text."""
    if isinstance(value, float):
        return "none" if math.isnan(value) else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _summary(results: Sequence[Result] | Any) -> list[tuple[str, list[str]]]:
    """(what, a text for each run)."""
    found: list[Result] = list(results)

    def row(name: str, tell: Any) -> tuple[str, list[str]]:
        return name, [str(tell(result)) for result in found]

    def machine(result: Result) -> str:
        about = result["provenance"]["machine"]
        return f"{about['cpu']}, {about['cores']} cores"

    def bits(result: Result) -> str:
        found = result["test"].get("bits")
        return "" if found is None else f"{found:.3f}"

    def twin(result: Result) -> str:
        return percent(result["twin"]["top1"], 2) if "twin" in result else ""

    dynamic = [row("static twin, top-1", twin), row("bits per filter", bits)]
    return [
        row("kind", kind),
        row("network", lambda r: f"{r['experiment']['backbone']['name']}, {r['experiment']['data']['name']}"),
        row("top-1", lambda r: percent(r["test"]["top1"], 2)),
        *(
            row(f"MACs saved, {column}", lambda r, column=column: percent(r["test"]["reduction"][column], 2))
            for column in COLUMNS
        ),
        *(line for line in dynamic if any(line[1])),
        row("n, test images", lambda r: f"{r['test']['n']:,}"),
        row("seed", lambda r: r["experiment"]["train"]["seed"]),
        row("epochs", lambda r: len(r["epochs"])),
        row("commit", lambda r: (r["provenance"]["commit"] or "unknown")[:10]),
        row("machine", machine),
    ]


def _shown(panel: Panel) -> dict[str, Any]:
    markup = require("markupsafe", "jinja2", "report").Markup
    svg = to_inline_svg(panel.figure, panel.name.replace(".", "-"), f"{panel.title}. {panel.text}")
    return {"panel": panel, "svg": markup(svg)}


def _png(pixels_HWC: NDArray[np.uint8]) -> str:
    """A picture as the address of itself."""
    image = require("matplotlib.image", "matplotlib", "report")
    rgb_HWC = np.repeat(pixels_HWC, 3, 2) if pixels_HWC.shape[2] == 1 else pixels_HWC
    file = io.BytesIO()
    image.imsave(file, rgb_HWC, format="png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _recipe(table: Mapping[str, Any]) -> str:
    text: str = require("tomli_w", "tomli-w", "report").dumps(_without_none(table))
    return text


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    """TOML has no null; what is left out is None again."""
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in table.items()
        if value is not None
    }


def _flat(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in table.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{key} ")
        else:
            rows.append((prefix + key, ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    return rows
