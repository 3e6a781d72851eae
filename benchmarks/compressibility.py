"""Does a layer's core share foretell how much of it can leave for good? The paper asks; trained networks answer.

Each group of the network that a gated run started from is pruned alone, its filters leaving by their weights (L1), or
by how rarely the gates let them run.

Usage: python benchmarks/compressibility.py [RUN...] [--images 2000] [--json results/compressibility.json]

RUN is a gated model as `cofire train` leaves it; default: the gated models of the zoo.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any, get_args

import cofire
from cofire.analysis import collect, compressibility
from cofire.analysis.compressibility import Order
from cofire.analysis.study import gated_start, open_run
from cofire.experiments.provenance import provenance
from cofire.files.atomic import write_json


def answers(folder: Path, images: int) -> dict[str, Any]:
    run = open_run(folder, images)
    if not isinstance(run.model, cofire.GatedModel):
        raise SystemExit(f"{folder} must hold a gated model")
    decisions = collect(run.model, run.images.loader(run.batch_size))
    start, which = gated_start(run, run.model)
    found = {}
    for by in get_args(Order):
        answer = compressibility(start, decisions, run.images.loader(run.batch_size), by=by)
        print(f"{run.name}, {by}: rank correlation {answer.correlation:.2f}, p {answer.p_value:.3f}")
        found[by] = dataclasses.asdict(answer)
    return {"n": len(run.images), "pruned": which, "experiment": run.result["experiment"], "by": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    zoo = [cofire.zoo.folder(name) for name in cofire.zoo.names() if cofire.zoo.entry(name).method != "dense"]
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN", default=zoo)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = {"provenance": provenance(), "runs": {run.name: answers(run, args.images) for run in args.runs}}
    if args.json:
        write_json(args.json, found)


if __name__ == "__main__":
    main()
