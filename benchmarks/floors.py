"""Where the time of a dense network goes: time of its ops beside their floors, in both precisions; one thread, batch 1.

Random weights and images. Ops of one algorithm on maps of one size are one row; Markdown on standard output.

Usage: python benchmarks/floors.py [--rounds 50] [--only resnet34] [--json results/bench_floors.json]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import cofire
from cofire.bench import random_plan
from cofire.bench.rounds import pinned
from cofire.experiments.provenance import provenance
from cofire.files.atomic import write_json
from cofire.runtime.profile import Profile
from cofire.text import markdown

NETWORKS = ("resnet34", "mobilenet_v1_imagenet")


def rows(engine: cofire.Engine, profile: Profile) -> dict[str, list[float]]:
    """Algorithm and pixels -> milliseconds, and those of products and bytes alone."""
    found: dict[str, list[float]] = {}
    for number, op in enumerate(engine.program.ops):
        _, height, _ = engine.program.buffers[op.dst]
        kind = type(op).__name__.lower() if profile.algorithms[number] == "-" else profile.algorithms[number]
        row = found.setdefault(f"{kind}, {height} x {height}", [0.0, 0.0, 0.0])
        for part, value in enumerate((profile.milliseconds[number], *profile.floors[number])):
            row[part] += value
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--only", choices=NETWORKS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    told: dict[str, Any] = {}
    for name in [args.only] if args.only else NETWORKS:
        plan = random_plan(name)
        plain, shape, x = plan.gated.backbone, plan.gated.graph.input_shape, torch.from_numpy(plan.images)
        for precision in ("float32", "int8"):
            with pinned(1):
                calibration = x if precision == "int8" else None
                engine = cofire.compile(plain, shape, precision=precision, images=calibration)
                profile = engine.profile(x[:1], args.rounds)
            found, speeds = rows(engine, profile), profile.speeds
            best = speeds.macs8 if precision == "int8" else speeds.macs
            print(f"\n{name}, {precision}, kernels {engine.kernel}: at best {best / 1e9:.0f} MACs / ns, ", end="")
            print(f"{speeds.bytes / 1e9:.1f} GB/s\n")
            whole = [sum(values) for values in zip(*found.values(), strict=True)]
            cells = [[what, *(f"{ms:.3f}" for ms in times)] for what, times in {**found, "all": whole}.items()]
            print(markdown(["ops, pixels", "ms", "ms of products alone", "ms of bytes alone"], cells))
            told[f"{name}, {precision}"] = {"kernel": engine.kernel, "speeds": vars(speeds), "rows": found}
    if args.json:
        write_json(args.json, {"provenance": provenance(), "rounds": args.rounds, "networks": told})


if __name__ == "__main__":
    main()
