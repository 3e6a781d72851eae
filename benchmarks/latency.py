"""The engine against the fastest dense engine: one thread, batch 1, heads included, random masks of uniform keep rate.

For each network three runs of interleaved rounds; of each ratio the middle run counts, beside its limit. Needs the
other engines: pip install '.[peers]'.

Usage: python benchmarks/latency.py [--only resnet34] [--runs 3] [--rounds 100] [--json results/bench_latency.json]
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from cofire.bench import Result, bench, random_plan
from cofire.bench.ours import NAME
from cofire.bench.peers import PEERS
from cofire.experiments.provenance import provenance
from cofire.files.atomic import write_json

DENSE = 1.0
LIMITS: dict[str, dict[float, float]] = {  # network -> share of the MACs that remains -> largest ratio
    "resnet34": {DENSE: 0.92, 0.74: 0.76, 0.62: 0.68, 0.48: 0.58},
    "resnet18": {DENSE: 1.00, 0.48: 0.65},
    "vgg16_bn": {DENSE: 0.85, 0.48: 0.55, 0.25: 0.42},
    "resnet56": {DENSE: 0.80, 0.62: 0.65},
    "mobilenet_v1_imagenet": {DENSE: 1.10, 0.48: 0.70},
}


def ratios(result: Result, limits: dict[float, float]) -> dict[float, float | None]:
    """Share of the MACs that remains -> ratio of one run; None where our engine did not run."""
    shares = [share for share in limits if share != DENSE]
    points: dict[float, int | None] = {DENSE: None, **{share: number for number, share in enumerate(shares)}}
    return {share: result.ratio(result.of(NAME, point)) for share, point in points.items()}


def middle(found: list[float | None]) -> float | None:
    """The middle of several runs, of which each must have a ratio."""
    return statistics.median_low([ratio for ratio in found if ratio is not None]) if None not in found else None


def measure(name: str, runs: int, rounds: int, warm_up: int, threads: int) -> dict[str, Any]:
    limits = LIMITS[name]
    plan = random_plan(name, macs=[share for share in limits if share != DENSE])
    results = []
    for number in range(runs):
        results.append(bench(plan, threads=threads, rounds=rounds, warm_up=warm_up, text=f"{name}, run {number + 1}"))
    by_run = [ratios(result, limits) for result in results]
    rows = []
    for share, limit in limits.items():
        each = [run[share] for run in by_run]
        rows.append({"macs": share, "ratios": each, "middle": middle(each), "limit": limit})
    return {"rows": rows, "runs": [result.to_json() for result in results]}


def show(name: str, found: dict[str, Any]) -> None:
    fastest = sorted({run["fastest_dense"] for run in found["runs"]})
    print(f"{name}: against {', '.join(fastest)}")
    for row in found["rows"]:
        what = "dense" if row["macs"] == DENSE else f"{100 * row['macs']:.0f} % of MACs"
        if row["middle"] is None:
            print(f"  {what:14s} our engine did not run; limit {row['limit']:.2f}")
            continue
        each = ", ".join(f"{ratio:.3f}" for ratio in row["ratios"])
        verdict = "holds" if row["middle"] <= row["limit"] else "MISSED"
        print(f"  {what:14s} {row['middle']:.3f} of ({each}), limit {row['limit']:.2f}: {verdict}")
    for engine, why in found["runs"][0]["left_out"].items():
        print(f"  left out: {engine}: {why}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(LIMITS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--warm-up", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    missing = sorted({package for peer in PEERS for package in peer.missing})
    if missing:
        print(f"WARNING: not installed: {' '.join(missing)}; the fastest dense engine may be among them")
    found = {}
    for name in [args.only] if args.only else LIMITS:
        found[name] = measure(name, args.runs, args.rounds, args.warm_up, args.threads)
        show(name, found[name])
        if args.json:
            write_json(args.json, {"provenance": provenance(), "networks": found})


if __name__ == "__main__":
    main()
