"""The whole method on data that ships with scikit-learn: train, estimate, solve for half the MACs, gate, compare."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType
from rich.table import Table

from cofire import data
from cofire.backbones import create_backbone
from cofire.estimate import estimate, solve_ratio
from cofire.evaluation import Report, bar, evaluate
from cofire.experiments.provenance import provenance
from cofire.experiments.recipes import BackbonePart, DataPart, Experiment, as_table
from cofire.files.atomic import write_json
from cofire.gates.ftwt import FTWT
from cofire.gates.gating import gate
from cofire.gates.persistence import save
from cofire.graph.cost import COLUMNS
from cofire.text import percent
from cofire.training.loop import FitResult, fit
from cofire.training.recipe import Recipe

_DATA = DataPart(name="digits", batch_size=64, augment="crop", pad=1, val=200, eval_batch_size=200)
_SHOWN_RATIOS = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0)


def run(out: str | Path, say: Callable[[RenderableType], None]) -> dict[str, Any]:
    """Run the demo, put the models into ``out``, and return its figures as JSON values.

    Args:
        say: is handed each text or table for people, as it comes.
    """
    out, began = Path(out), time.perf_counter()
    train, test = data.digits()
    rest, held_out = train.split(200)
    feed = rest.loader(_DATA.batch_size, train=True, augment=_DATA.augment, pad=_DATA.pad)
    val, images, final = held_out.loader(200), rest.loader(200), test.loader(200)
    counts = {"train": len(rest), "val": len(held_out), "test": len(test)}
    torch.manual_seed(0)

    say(f"[bold]1. A dense network[/bold]: a residual CNN on {len(rest)} digits of 8x8 pixels")
    model = create_backbone("resnet8_digits")
    dense_run = Experiment(
        name="demo",
        data=_DATA,
        backbone=BackbonePart(name="resnet8_digits"),
        gate=None,
        train=Recipe(epochs=15, lr=0.1, schedule="cosine"),
    )
    fitted = fit(model, feed, dense_run.train, val=val)
    dense = evaluate(model, final, text="")
    save(model, out / "dense")
    _write_run(out / "dense", dense_run, fitted, dense, counts)
    say(f"   top-1 {percent(dense.top1, 2)} on {dense.n} test digits, {dense.dense_macs:,} MACs\n")

    say("[bold]2. What would each ratio r save?[/bold] One pass over the training images, nothing trained yet")
    say(estimate(model, FTWT(), images, _SHOWN_RATIOS))

    say("\n[bold]3. The ratio for half the MACs[/bold]")
    solution = solve_ratio(model, FTWT(), images, macs=0.5)
    say(f"   {solution}\n")

    say("[bold]4. Gate it and train on[/bold]: backbone and heads together, decoupled")
    gated = gate(model, solution.config)
    gated_run = dataclasses.replace(
        dense_run,
        backbone=BackbonePart(name="resnet8_digits", weights=str(out / "dense")),
        gate=solution.config,
        train=Recipe(epochs=60, lr=0.02, head_lr=3.0, schedule="cosine", select="last"),
    )
    fitted = fit(gated, feed, gated_run.train, val=val)
    report = evaluate(gated, final, text="")
    gated.save(out / "gated")
    estimated = {"independent": {"executed": solution.independent}, "cascade": {"executed": solution.cascade}}
    _write_run(out / "gated", gated_run, fitted, report, counts, {"images": len(rest), **estimated})
    result = {
        "provenance": provenance(),
        "ratio": solution.config.ratio,
        "independent": solution.independent,
        "cascade": solution.cascade,
        "dense": dense.to_json(),
        "gated": report.to_json(),
        "seconds": time.perf_counter() - began,
    }
    write_json(out / "result.json", result)
    say(_comparison(dense, report))
    say(
        f"\nSaved: {out / 'gated'} (load it with cofire.load), {out / 'dense'}, {out / 'result.json'}; "
        f"{result['seconds']:.0f} s in all. Look closer: cofire report {out / 'gated'}"
    )
    return result


def _write_run(
    folder: Path,
    experiment: Experiment,
    fitted: FitResult,
    report: Report,
    counts: dict[str, int],
    estimated: dict[str, Any] | None = None,
) -> None:
    """What `cofire train` leaves beside a model, so that the other commands take it for a run."""
    table = as_table(experiment)
    write_json(folder / "experiment.json", table)
    result = {
        "experiment": table,
        "provenance": provenance(),
        "n": counts,
        "estimated": estimated,
        "epochs": [dataclasses.asdict(record) for record in fitted.epochs],
        "selected_epoch": fitted.selected,
        "test": report.to_json(),
    }
    write_json(folder / "result.json", result)


def _comparison(dense: Report, gated: Report) -> Table:
    table = Table(title=f"\n5. Dense and gated on {gated.n} test digits", title_justify="left", title_style="bold")
    for column in ("", "dense", "gated"):
        table.add_column(column)
    table.add_row("top-1", percent(dense.top1, 2), percent(gated.top1, 2))
    for column in COLUMNS:
        saved = [percent(report.reduction[column]) for report in (dense, gated)]
        table.add_row(f"MACs saved: {column}", *saved)
    table.add_section()
    table.add_row("[bold]filters run[/bold]")
    for group, rate in gated.keep_rate.items():
        table.add_row(group, f"{bar(1.0, 16)} 100 %", f"{bar(rate, 16)} {percent(rate, 0)}")
    return table
