"""study(run) -> Study: every analysis of one run, as panels, arrays and pictures.

Shapes: N images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cofire.analysis import panels
from cofire.analysis.compressibility import compressibility, num_passes
from cofire.analysis.decisions import Decisions, collect
from cofire.analysis.drawing import to_png, to_svg
from cofire.analysis.panels import Panel, Picture
from cofire.analysis.responses import heatmaps, model_units, responses
from cofire.analysis.routes import redundancy, routes
from cofire.analysis.spending import ClassSpending, extremes, shares, spending_per_class
from cofire.analysis.tradeoff import Result
from cofire.data.images import AbstractImages
from cofire.errors import CofireError, unknown
from cofire.evaluation import evaluate
from cofire.experiments.provenance import provenance
from cofire.experiments.recipes import read_run
from cofire.experiments.runs import read_result, read_sets, short_names, weights_path
from cofire.files.atomic import write_atomically, write_json
from cofire.files.tensors import write_tensors
from cofire.gates.gating import GatedModel, gate
from cofire.gates.persistence import load
from cofire.progress import progress
from cofire.text import percent

IMAGES = 2000
_SHOWN, _TRIPLETS, _EXTREMES = 400, 8, 8  # images: of responses, of heatmaps, cheapest and dearest each
_PRUNED_ON, _FEWEST, _MOST_MACS = 200, 100, 10**12  # of compressibility: images, and MACs in all: a minute or so


@dataclass(frozen=True, kw_only=True, eq=False)
class FinishedRun:
    """A finished run: its folder, its model in eval mode, images it has not learned from, and its result.json."""

    folder: Path
    model: nn.Module
    images: AbstractImages
    batch_size: int
    result: Result

    @property
    def name(self) -> str:
        """What figures call it: the last parts of its folder."""
        return next(iter(short_names([self.folder])))


@dataclass(frozen=True, kw_only=True, eq=False)
class Study:
    """What there is to see of a run.

    Args:
        panels: in the order to read them.
        arrays: what they were drawn from, by name.
        pictures: row -> images with a text each: the cheapest and the dearest; empty without gates.
    """

    run: FinishedRun
    panels: tuple[Panel, ...]
    arrays: Mapping[str, Tensor]
    pictures: Mapping[str, Sequence[Picture]]

    def write(self, folder: str | Path) -> None:
        """Each panel as .svg and .png, ``values.json`` with their values, ``arrays.safetensors``."""
        folder = Path(folder)
        with progress("drawing") as bar:
            for panel in bar.track(self.panels, description="drawing"):
                write_atomically(folder / f"{panel.name}.svg", to_svg(panel.figure, panel.name))
                write_atomically(folder / f"{panel.name}.png", to_png(panel.figure))
        values = {panel.name: panel.to_json() for panel in self.panels}
        origin = {"run": self.run.name, "n": len(self.run.images), "provenance": provenance()}
        write_json(folder / "values.json", {**origin, "panels": values})
        write_tensors(folder / "arrays.safetensors", self.arrays, origin)


def open_run(folder: str | Path, images: int = IMAGES) -> FinishedRun:
    """The run in ``folder`` with at most ``images`` of its test images, each class its share.

    Raises:
        FileError: the folder does not hold a finished run; says what is missing.
    """
    folder = Path(folder)
    result, experiment = read_result(folder), read_run(folder)
    test = read_sets(experiment).test
    size = experiment.data.eval_batch_size
    return FinishedRun(folder=folder, model=load(folder), images=_few(test, images), batch_size=size, result=result)


def read_results(folders: Sequence[str | Path]) -> dict[str, Result]:
    """Name -> result.json of some finished runs, each folder once."""
    return {name: read_result(folder) for name, folder in short_names(folders).items()}


def study(run: FinishedRun, *, units: Sequence[str] = ()) -> Study:
    """Every analysis of ``run``; of a model without gates, responses and accuracy per class.

    Args:
        units: whose responses and heatmaps to show. Default: responses of a unit in the middle and of the last one,
            heatmaps of the most pruned one.
    """
    known = [unit.name for unit in model_units(run.model, run.images.shape)]
    for name in units:
        if name not in known:
            raise unknown("unit", name, known)
    chosen = list(units) or list(dict.fromkeys([known[len(known) // 2], known[-1]]))
    few = _few(run.images, _SHOWN)
    found = [responses(run.model, few.loader(run.batch_size), name, text=f"responses of {name}") for name in chosen]
    shown = [panels.response_panel(each, run.images.classes) for each in found]
    arrays = {f"responses/{each.unit}": torch.from_numpy(each.peak_NO) for each in found}
    if not isinstance(run.model, GatedModel):
        return Study(run=run, panels=(*_plain_classes(run), *shown), arrays=arrays, pictures={})
    decisions = collect(run.model, run.images.loader(run.batch_size), targets=True)
    pictures = _extreme_pictures(run.images, decisions)
    return Study(
        run=run,
        panels=(
            *panels.group_panels(decisions),
            panels.cost_panel(decisions),
            *_classes(run, decisions),
            panels.extremes_panel(pictures),
            panels.foretold_panel({run.name: run.result}),
            _compressibility(run, run.model, decisions),
            *shown,
            *_heatmaps(run, run.model, decisions, units),
        ),
        arrays={**arrays, **_arrays(decisions)},
        pictures=pictures,
    )


def find_dense(run: FinishedRun) -> Path | None:
    """The dense run that ``run`` started from, where its recipe names one that is still there."""
    weights = run.result["experiment"]["backbone"].get("weights")
    try:
        folder = weights_path(weights) if weights else None
    except CofireError:  # it was named and has gone
        return None
    return folder if folder is not None and (folder / "result.json").is_file() else None


def _plain_classes(run: FinishedRun) -> list[Panel]:
    if run.images.label_N is None:
        return [panels.empty_panel("class_accuracy", "Accuracy per class", "These images have no labels.")]
    report = evaluate(run.model, run.images.loader(run.batch_size))
    found = {
        label: ClassSpending(n=part.n, top1=part.top1, share=1 - part.reduction, spread=0.0)
        for label, part in report.per_class.items()
    }
    return panels.class_panels(found, run.images.classes, gated=False)


def _classes(run: FinishedRun, decisions: Decisions) -> list[Panel]:
    if decisions.label_N is None:
        return [panels.empty_panel("class_cost", "MACs per class", "These images have no labels.")]
    return panels.class_panels(spending_per_class(decisions), run.images.classes, gated=True)


def _extreme_pictures(images: AbstractImages, decisions: Decisions) -> dict[str, list[Picture]]:
    share_N = shares(decisions)

    def pictures(rows: NDArray[np.int64]) -> list[Picture]:
        texts = [percent(float(share)) for share in share_N[rows]]
        return list(zip(_pixels(images, rows), texts, strict=True))

    cheap, dear = extremes(decisions, _EXTREMES)
    return {"cheapest": pictures(cheap), "dearest": pictures(dear)}


def _compressibility(run: FinishedRun, gated: GatedModel, decisions: Decisions) -> Panel:
    if run.images.label_N is None:
        return panels.empty_panel("compressibility", "Compressibility", "These images have no labels.")
    affordable = _MOST_MACS // (num_passes(len(decisions.groups)) * decisions.dense_macs)
    if affordable < min(_FEWEST, len(run.images)):
        why = "Too long for a default: from Python, cofire.analysis.compressibility(gated, decisions, loader)."
        return panels.empty_panel("compressibility", "Compressibility", why)
    loader = _few(run.images, min(_PRUNED_ON, affordable)).loader(run.batch_size)
    start, which = gated_start(run, gated)
    return panels.compressibility_panel(compressibility(start, decisions, loader), which)


def gated_start(run: FinishedRun, gated: GatedModel) -> tuple[GatedModel, str]:
    """What a gated run started from, behind gates of the same groups, or the run itself; and which it is, in words."""
    if (folder := find_dense(run)) is not None:
        groups = set(gated.gates)
        with suppress(CofireError):  # it has been replaced by another model; the run's own weights answer as well
            start = gate(
                load(folder),
                gated.config,
                filter_fn=lambda unit: unit.group in groups,
                input_shape=gated.graph.input_shape,
            )
            return start.eval(), "the dense run it started from"
    return gated, "this run, with all gates open,"


def _heatmaps(run: FinishedRun, gated: GatedModel, decisions: Decisions, units: Sequence[str]) -> Iterator[Panel]:
    few = _few(run.images, _TRIPLETS)
    rows = np.arange(len(few))
    for unit in units or [_most_pruned(gated, decisions)]:
        found = heatmaps(gated, few.normalise(few.pixels(torch.from_numpy(rows))), unit)
        yield panels.heatmap_panel(found, _pixels(few, rows))


def _most_pruned(gated: GatedModel, decisions: Decisions) -> str:
    """The unit of the most pruned group, among those whose maps are large enough to look at, if any."""
    lasts = {group: members[-1] for group, members in gated.units.groups.items()}
    large = {group: unit for group, unit in lasts.items() if min(unit.out_size) >= 4} or lasts
    found = routes(decisions)
    return large[max(large, key=lambda group: found[group].pruned)].name


def _arrays(decisions: Decisions) -> dict[str, Tensor]:
    arrays: dict[str, Any] = {
        "macs": decisions.macs_N,
        "predicted": decisions.predicted_N,
        "redundancy": redundancy(decisions),
        **{f"mask_bits/{group}": bits for group, bits in decisions.bits.items()},
        **{f"target_bits/{group}": bits for group, bits in decisions.target_bits.items()},
        **{f"keep_rate/{group}": decisions.keep_rate(group) for group in decisions.groups},
    }
    if decisions.label_N is not None:
        arrays["label"] = decisions.label_N
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def _few(images: AbstractImages, count: int) -> AbstractImages:
    """At most ``count`` images, each class its share."""
    return images.split(count)[1] if count < len(images) else images


def _pixels(images: AbstractImages, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Some pictures, (N, H, W, C)."""
    return images.pixels(torch.from_numpy(rows)).permute(0, 2, 3, 1).numpy()
