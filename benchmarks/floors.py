"""Where the time goes: that of ops beside their floors, dense and gated, in both precisions; one thread, batch 1.

Random weights, images and masks of uniform keep rate; heads are evaluated, and their time is that of the convs they
decide on. Ops of one algorithm on maps of one size are one row. Writes what docs/floors.md shows.

Usage: python benchmarks/floors.py [--rounds 50] [--only resnet34] [--json results/bench_floors.json]
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import cofire
from cofire.bench import Plan, random_plan
from cofire.bench.rounds import pinned
from cofire.experiments.provenance import provenance
from cofire.files.atomic import write_json
from cofire.results import floors_tables
from cofire.runtime.engine import Precision
from cofire.runtime.profile import Profile

NETWORKS = ("resnet34", "mobilenet_v1_imagenet", "vgg16_bn")
DENSE, FEWER = 1.0, 0.48  # shares of the MACs


def rows(engine: cofire.Engine, profile: Profile) -> dict[str, list[float]]:
    """Algorithm and pixels -> milliseconds; those of products alone and of bytes alone; the larger ones of each op."""
    found: dict[str, list[float]] = {}
    for number, op in enumerate(engine.program.ops):
        _, height, _ = engine.program.buffers[op.dst]
        kind = type(op).__name__.lower() if profile.algorithms[number] == "-" else profile.algorithms[number]
        floors = profile.floors[number]
        row = found.setdefault(f"{kind}, {height} x {height}", [0.0] * 4)
        for part, value in enumerate((profile.milliseconds[number], *floors, max(floors))):
            row[part] += value
    return found


def measure(plan: Plan, precision: Precision, macs: float, rounds: int) -> dict[str, Any]:
    """One engine's ops, as floors_tables() takes them."""
    dense = macs == DENSE
    model, x = plan.gated.backbone if dense else plan.gated, torch.from_numpy(plan.images)
    shape, (pool,) = plan.gated.graph.input_shape, plan.pools
    assert pool is not None
    with pinned(1):
        engine = cofire.compile(model, shape, precision=precision, images=x if precision == "int8" else None)
        with nullcontext() if dense else engine.force(pool.number(0), heads=True):
            profile = engine.profile(x[:1], rounds)
    about = {"network": plan.network, "precision": precision, "macs": macs, "kernel": engine.kernel}
    return {**about, "speeds": vars(profile.speeds), "rows": rows(engine, profile)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--only", choices=NETWORKS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    engines = []
    for name in [args.only] if args.only else NETWORKS:
        plan = random_plan(name, macs=[FEWER])
        for precision in ("float32", "int8"):
            engines += [measure(plan, precision, macs, args.rounds) for macs in (DENSE, FEWER)]
    print(floors_tables(engines))
    if args.json:
        write_json(args.json, {"provenance": provenance(), "rounds": args.rounds, "engines": engines})


if __name__ == "__main__":
    main()
