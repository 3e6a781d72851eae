"""The whole method on data that ships with scikit-learn: train, estimate, solve for half the MACs, gate, compare.

Two ordinary runs, of the two recipes beside this file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from cofire.evaluation import bar
from cofire.experiments.provenance import provenance
from cofire.experiments.recipes import read_experiment
from cofire.experiments.runs import estimate_experiment, read_sets, solve_experiment, train_experiment
from cofire.files.atomic import write_json
from cofire.gates.persistence import load
from cofire.graph.cost import COLUMNS
from cofire.runtime.engine import compile
from cofire.speedup.measure import timed
from cofire.speedup.whole import DENSE as DENSE_ENGINE
from cofire.speedup.whole import GATED as GATED_ENGINE
from cofire.text import percent

DENSE, GATED = (Path(__file__).parent / "experiments" / f"demo_{kind}.toml" for kind in ("dense", "gated"))
_TIMED = 8  # images
_SHOWN_RATIOS = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0)


def run(out: str | Path, say: Callable[[RenderableType], None]) -> dict[str, Any]:
    """Run the demo, put its runs into ``out``, and return its figures as JSON values; an interrupted one goes on.

    Args:
        say: is handed each text or table for people, as it comes.
    """
    out, began = Path(out), time.perf_counter()
    dense, gated = read_experiment(DENSE), read_experiment(GATED, [f"backbone.weights={out / 'dense'}"])

    say(f"[bold]1. A dense network[/bold]: {dense.backbone.name}, {dense.train.epochs} epochs on {dense.data.name}")
    before = train_experiment(dense, out / "dense")
    test = before["test"]
    say(f"   top-1 {percent(test['top1'], 2)} on {test['n']} test images, {test['dense_macs']:,} MACs\n")

    say("[bold]2. What would each ratio r save?[/bold] One pass over the training images, nothing trained yet")
    say(estimate_experiment(gated, ratios=_SHOWN_RATIOS))

    say("\n[bold]3. The ratio for half the MACs[/bold]")
    solution = solve_experiment(gated, macs=0.5)
    say(f"   {solution}\n")

    say("[bold]4. Gate it and train on[/bold]: backbone and heads together; then the threshold for half the MACs")
    ratio = solution.config.ratio
    chosen = read_experiment(GATED, [f"backbone.weights={out / 'dense'}", f"gate.ratio={ratio!r}"])
    after = train_experiment(chosen, out / "gated")
    models = {kind: load(out / kind) for kind in ("dense", "gated")}
    engines = {DENSE_ENGINE: compile(models["dense"]), GATED_ENGINE: compile(models["gated"])}
    pictures = [read_sets(dense).test.loader(_TIMED).batches(0).__next__()[0]]
    result = {
        "provenance": provenance(),
        "ratio": ratio,
        "independent": solution.independent,
        "cascade": solution.cascade,
        "dense": before["test"],
        "gated": after["test"],
        "milliseconds": timed(engines, models["dense"], pictures),
        "seconds": time.perf_counter() - began,
    }
    write_json(out / "result.json", result)
    say(_comparison(before["test"], after["test"]))
    told = ", ".join(f"{name} {ms:.3f} ms" for name, ms in result["milliseconds"].items())
    say(f"\n[bold]6. One image, one thread[/bold], by turns: {told}")
    say(
        f"\nSaved: {out / 'gated'} (load it with cofire.load), {out / 'dense'}, {out / 'result.json'}; "
        f"{result['seconds']:.0f} s in all. Look closer: cofire report {out / 'gated'}"
    )
    return result


def _comparison(dense: dict[str, Any], gated: dict[str, Any]) -> Table:
    """Two reports as JSON values, side by side."""
    table = Table(title=f"\n5. Dense and gated on {gated['n']} test images", title_justify="left", title_style="bold")
    for column in ("", "dense", "gated"):
        table.add_column(column)
    table.add_row("top-1", percent(dense["top1"], 2), percent(gated["top1"], 2))
    for column in COLUMNS:
        saved = [percent(report["reduction"][column]) for report in (dense, gated)]
        table.add_row(f"MACs saved: {column}", *saved)
    table.add_section()
    table.add_row("[bold]filters run[/bold]")
    for group, rate in gated["keep_rate"].items():
        table.add_row(group, f"{bar(1.0, 16)} 100 %", f"{bar(rate, 16)} {percent(rate, 0)}")
    return table
