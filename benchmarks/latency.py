"""The engine against the fastest dense engine of the same precision: one thread, batch 1, heads included.

Random weights, images and masks of uniform keep rate. For each network three runs of interleaved rounds; of each ratio
the middle run counts, beside its limit. Needs the other engines: make peers.

Usage: python benchmarks/latency.py [--only resnet34] [--runs 3] [--rounds 100] [--json results/bench_latency.json]

--avx2 stands in for a CPU that has no more than AVX2: our kernels are v3, and OpenVINO is held to AVX2 by its own
switch. The others cannot be held. So ONNX Runtime in int8, to which VNNI is worth most, is left out; in float32 the
others keep AVX-512, which makes our ratio the harder one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from cofire.bench import Result, bench_runs, random_plan
from cofire.bench.ours import NAME
from cofire.bench.peers import PEERS, PYTORCH, Peer
from cofire.experiments.provenance import provenance
from cofire.files.atomic import write_json
from cofire.runtime.engine import Precision

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import zoo  # noqa: F401  makes timm import beside any build of torch

DENSE = 1.0
REPORT = None  # no limit
Limits = dict[float, float | None]  # share of the MACs that remains -> largest ratio
LIMITS: dict[str, dict[Precision, Limits]] = {
    "resnet34": {
        "float32": {DENSE: 0.90, 0.74: 0.76, 0.62: 0.68, 0.48: 0.50},
        "int8": {DENSE: 0.90, 0.48: 0.50},
    },
    "resnet18": {"float32": {DENSE: 0.90, 0.48: 0.52}, "int8": {DENSE: 0.95, 0.48: 0.55}},
    "resnet50": {"float32": {DENSE: REPORT, 0.48: REPORT}, "int8": {DENSE: REPORT, 0.48: REPORT}},
    "mobilenet_v2_imagenet": {"float32": {DENSE: REPORT, 0.48: REPORT}, "int8": {DENSE: REPORT, 0.48: REPORT}},
    "timm:tf_efficientnet_lite0": {"float32": {DENSE: REPORT, 0.48: REPORT}, "int8": {DENSE: REPORT, 0.48: REPORT}},
    "vgg16_bn": {"float32": {DENSE: 0.80, 0.48: 0.52, 0.25: 0.42}, "int8": {DENSE: 0.90, 0.48: 0.50}},
    "resnet56": {"float32": {DENSE: 0.72, 0.62: 0.60}, "int8": {DENSE: 0.85, 0.62: 0.65}},
    "mobilenet_v1_imagenet": {"float32": {DENSE: 1.05, 0.48: 0.60}, "int8": {DENSE: 1.10, 0.48: 0.65}},
}
RIVALS = tuple(peer for peer in PEERS if peer.name != PYTORCH)  # which is never the fastest, and slow
HELD = {"COFIRE_KERNEL": "v3", "ONEDNN_MAX_CPU_ISA": "AVX2"}  # variables that ours and OpenVINO read


def held(peer: Peer) -> bool:
    """Whether an engine has a place beside those that are held to AVX2."""
    return peer.name == "OpenVINO" or peer.precision == "float32"


def shares(limits: dict[Precision, Limits]) -> list[float]:
    """The points that are measured; dense is none of them."""
    return sorted({share for each in limits.values() for share in each if share != DENSE}, reverse=True)


def rows(results: list[Result], limits: dict[Precision, Limits]) -> list[dict[str, Any]]:
    """A row for each precision and share, with the ratio of each run."""
    points: dict[float, int | None] = {DENSE: None, **{share: n for n, share in enumerate(shares(limits))}}
    found = []
    for precision, each in limits.items():
        for share, limit in each.items():
            ratios = [run.ratio(run.of(NAME, points[share], precision), precision) for run in results]
            row = {"precision": precision, "macs": share, "ratios": ratios, "middle": middle(ratios), "limit": limit}
            found.append(row)
    return found


def middle(found: list[float | None]) -> float | None:
    """The middle of several runs, of which each must have a ratio."""
    return statistics.median_low([ratio for ratio in found if ratio is not None]) if None not in found else None


def measure(name: str, rivals: tuple[Peer, ...], runs: int, rounds: int, warm_up: int, threads: int) -> dict[str, Any]:
    limits = LIMITS[name]
    plan = random_plan(name, macs=shares(limits))
    results = bench_runs(plan, runs, threads=threads, rounds=rounds, warm_up=warm_up, peers=rivals, text=name)
    return {"rows": rows(results, limits), "runs": [result.to_json() for result in results]}


def show(name: str, found: dict[str, Any]) -> None:
    for key, precision in (("fastest_dense", "float32"), ("fastest_dense_int8", "int8")):
        print(f"{name}: {precision} against {', '.join(sorted({str(run[key]) for run in found['runs']}))}")
    for row in found["rows"]:
        what = "dense" if row["macs"] == DENSE else f"{100 * row['macs']:.0f} % of MACs"
        limit = "no limit" if row["limit"] is None else f"limit {row['limit']:.2f}"
        if row["middle"] is None:
            print(f"  {row['precision']:8s}{what:14s} our engine or every other did not run; {limit}")
            continue
        each = ", ".join(f"{ratio:.3f}" for ratio in row["ratios"])
        verdict = "" if row["limit"] is None else ": holds" if row["middle"] <= row["limit"] else ": MISSED"
        print(f"  {row['precision']:8s}{what:14s} {row['middle']:.3f} of ({each}), {limit}{verdict}")
    for engine, why in found["runs"][0]["left_out"].items():
        print(f"  left out: {engine}: {why}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(LIMITS), nargs="+")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--avx2", action="store_true", help="as on a CPU without AVX-512, see above")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rivals = tuple(filter(held, RIVALS)) if args.avx2 else RIVALS
    os.environ.update(HELD if args.avx2 else {})
    missing = sorted({package for peer in rivals for package in peer.missing})
    if missing:
        print(f"WARNING: not installed: {' '.join(missing)}; the fastest dense engine may be among them: make peers")
    found = {}
    for name in args.only or LIMITS:
        found[name] = measure(name, rivals, args.runs, args.rounds, args.warm_up, args.threads)
        show(name, found[name])
        if args.json:
            held_by = {"held_by": HELD} if args.avx2 else {}
            write_json(args.json, {"provenance": provenance(), **held_by, "networks": found})


if __name__ == "__main__":
    main()
