"""The whole way on data that ships with scikit-learn: train, estimate, solve, gate, look twice, compare.

Three ordinary runs, of the three recipes beside this file.
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
from cofire.text import percent

DENSE, GATED, SECOND_LOOK = (
    Path(__file__).parent / "experiments" / f"demo_{kind}.toml" for kind in ("dense", "gated", "second_look")
)
_TIMED = 60  # images
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
    say("[bold]5. Or look twice[/bold]: a copy with 30 % of the MACs learns the network's answers; in doubt it asks\n")
    twice = train_experiment(read_experiment(SECOND_LOOK, [f"backbone.weights={out / 'dense'}"]), out / "second_look")
    models = {kind: load(out / kind) for kind in ("dense", "gated", "second_look")}
    engines = {f"engine, {kind.replace('_', ' ')}": compile(model) for kind, model in models.items()}
    pictures = next(read_sets(dense).test.loader(_TIMED).batches(0))[0]
    result = {
        "provenance": provenance(),
        "ratio": ratio,
        "independent": solution.independent,
        "cascade": solution.cascade,
        "dense": before["test"],
        "gated": after["test"],
        "second_look": twice["test"],
        "milliseconds": timed(engines, models["dense"], pictures),
        "seconds": time.perf_counter() - began,
    }
    write_json(out / "result.json", result)
    say(_comparison(before["test"], after["test"], twice["test"]))
    told = ", ".join(f"{name} {ms:.3f} ms" for name, ms in result["milliseconds"].items())
    say(f"\n[bold]7. One image, one thread[/bold], mean of {len(pictures)}, by turns: {told}")
    say(
        f"\nSaved: {', '.join(str(out / kind) for kind in models)} (load them with cofire.load), "
        f"{out / 'result.json'}; {result['seconds']:.0f} s in all.\n"
        f"Look closer: cofire explore {out / 'gated'} (a page), cofire report {out / 'gated'} (a file)"
    )
    return result


def _comparison(dense: dict[str, Any], gated: dict[str, Any], twice: dict[str, Any]) -> Table:
    """Three reports as JSON values, side by side."""
    title = f"\n6. Dense, gated, and with a second look, on {gated['n']} test images"
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("", "dense", "gated", "second look"):
        table.add_column(column)
    table.add_row("top-1", *(percent(report["top1"], 2) for report in (dense, gated, twice)))
    for column in COLUMNS:
        saved = [percent(report["reduction"][column]) for report in (dense, gated, twice)]
        table.add_row(f"MACs saved: {column}", *saved)
    table.add_section()
    table.add_row("[bold]filters run[/bold]")
    (network,) = twice["keep_rate"].values()
    for group, rate in gated["keep_rate"].items():
        table.add_row(group, *(f"{bar(share, 12)} {percent(share, 0)}" for share in (1.0, rate, network)))
    return table
