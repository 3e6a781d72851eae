"""Ten known networks: how much of each can be switched off, and what that saves in milliseconds.

Random weights, random masks of uniform keep rate; our engine alone, one thread, batch 1, heads included, interleaved.

Usage: python benchmarks/will_it_help.py [--rounds 60] [--only resnet18] [--json results/bench_will_it_help.json]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import zoo  # its import makes timm importable

from cofire.bench import bench, random_plan
from cofire.bench.masks import pool_for_keep
from cofire.bench.ours import NAME
from cofire.errors import ConfigError
from cofire.experiments.provenance import provenance
from cofire.files.atomic import write_json

NETWORKS = (
    "vgg16_bn_imagenet",
    "resnet18",
    "resnet34",
    "resnet50",
    "mobilenet_v1_imagenet",
    "mobilenet_v2_imagenet",
    "timm:efficientnet_lite0",
    "timm:mobilenetv3_large_100",
    "timm:regnetx_004",
    "timm:densenet121",
)
SHARES = (0.7, 0.5)


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Milliseconds dense and at each share of the MACs that random masks can reach."""
    lowest = pool_for_keep(random_plan(name).gated, 1e-9).macs
    plan = random_plan(name, macs=[share for share in SHARES if share > lowest])
    result = bench(plan, rounds=rounds, warm_up=5, peers=(), text=name)
    dense = result.of(NAME, None)
    if dense is None:
        raise ConfigError(f"{name}: {result.left_out}")
    times = {"1.0": statistics.median(dense.seconds)}
    for number, share in enumerate(plan.asked):
        timed = result.of(NAME, number)
        assert timed is not None, result.left_out
        times[str(share)] = statistics.median(timed.seconds)
    return {"lowest": lowest, "dense_macs": result.dense_macs, "seconds": times, "run": result.to_json()}


def row(name: str, found: dict[str, Any]) -> list[str]:
    """Of the table in docs/will-it-help.md."""
    run, seconds = found["run"], found["seconds"]
    gated, others = len(run["gated"]), len(run["not_gated"])
    kept = [f"{100 * point['keep']:.0f} %" for point in run["points"]]
    heads = f"{100 * run['points'][0]['heads']:.2f} %"
    times = [f"{1e3 * value:.2f}" for value in seconds.values()]
    macs = f"{found['dense_macs'] / 1e6:.0f}"
    return [name, macs, f"{gated} of {gated + others}", f"{100 * found['lowest']:.1f} %", *kept, heads, *times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", choices=NETWORKS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {}
    for name in [args.only] if args.only else NETWORKS:
        results[name] = measure(name, args.rounds)
        print("|", " | ".join(row(name, results[name])), "|", flush=True)
        if args.json:
            write_json(args.json, {"provenance": provenance(), "rounds": args.rounds, "networks": results})


if __name__ == "__main__":
    if zoo.why_not:
        raise SystemExit(zoo.why_not)
    main()
