"""One trained second look at many budgets, runs that prune to as many MACs beside it.

Usage: python benchmarks/second_look.py RUN [--beside RUN ...] [--macs 0.4 0.5 0.55] [--json FILE]
RUN is a finished run of `SecondLook`. Its threshold is calibrated on the run's validation images, without their labels;
each budget is tested once on the whole test set.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import cofire
from cofire.experiments.recipes import read_run
from cofire.experiments.runs import read_result, read_sets
from cofire.files.atomic import write_json
from cofire.gates.gating import GatedModel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--beside", type=Path, nargs="*", default=[], help="finished static runs")
    parser.add_argument("--macs", type=float, nargs="*", default=[0.4, 0.45, 0.5, 0.55, 0.6])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    gated, sets = cofire.load(asked.run), read_sets(read_run(asked.run))
    assert isinstance(gated, GatedModel)
    assert sets.val is not None, "the run needs validation images: [data] val"
    rows = [looked_twice(gated, sets.val.loader(500), sets.test.loader(500), macs) for macs in asked.macs]
    beside = [static(run) for run in asked.beside]
    for row in [*rows, *beside]:
        print(row)
    if asked.json:
        result = read_result(asked.run)
        origin = {key: result[key] for key in ("provenance", "n", "epochs")}
        write_json(asked.json, {"run": result["experiment"], **origin, "rows": rows, "beside": beside})


def looked_twice(gated: GatedModel, val: Any, test: Any, macs: float) -> dict[str, Any]:
    """What the model does at a budget; ``second`` is the share of the images that the network itself looks at."""
    calibrate = {"asked": macs, "calibrated": cofire.calibrate(gated, val, macs=macs, images=5000)}
    report = cofire.evaluate(gated, test, text=f"at {macs:.0%} of the MACs")
    second = next(iter(report.keep_rate.values()))
    executed = 1 - report.reduction["executed+heads"]
    own = {"threshold": gated.threshold, "executed": executed, "second": second, "bits": report.bits}
    return {**calibrate, **own, "n": report.n, "top1": report.top1}


def static(run: Path) -> dict[str, Any]:
    """What a pruned run found."""
    result = read_result(run)
    test, experiment = result["test"], result["experiment"]
    executed = 1 - test["reduction"]["executed"]
    own = {"prune": experiment["prune"], "train": experiment["train"], "provenance": result["provenance"]}
    return {"name": experiment["name"], "executed": executed, "n": test["n"], "top1": test["top1"], **own}


if __name__ == "__main__":
    main()
