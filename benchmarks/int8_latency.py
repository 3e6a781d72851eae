"""Our engine in int8 beside itself in float32 and ONNX Runtime in float32: one thread, batch 1, interleaved.

Random weights and images; random masks of uniform keep rate, heads included. Ratios to other int8 engines are not here
yet.

Usage: python benchmarks/int8_latency.py [--rounds 40] [--only resnet34] [--json results/bench_int8_latency.json]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timing import interleaved, ratio, summary

import cofire
from cofire.bench import random_plan
from cofire.bench.peers import PEERS
from cofire.experiments.provenance import provenance
from cofire.files.atomic import write_json

NETWORKS = {"resnet34": 0.48, "resnet18": 0.48, "mobilenet_v1_imagenet": 0.48, "resnet56": 0.62, "vgg16_bn": 0.48}
RIVAL = "ONNX Runtime, float32"


def measure(name: str, share: float, rounds: int) -> dict[str, Any]:
    plan = random_plan(name, macs=[share])
    (pool,) = plan.pools
    assert pool is not None
    plain, images = plan.gated.backbone, torch.from_numpy(plan.images)
    shape = plan.gated.graph.input_shape
    engines = {
        "float32, dense": (cofire.compile(plain, shape), None),
        f"float32, {share:.0%} of MACs": (cofire.compile(plan.gated), pool),
        "int8, dense": (cofire.compile(plain, shape, precision="int8", images=images), None),
        f"int8, {share:.0%} of MACs": (cofire.compile(plan.gated, precision="int8", images=images), pool),
    }
    x = plan.images[:1]
    peer = next(peer for peer in PEERS if peer.name == "ONNX Runtime")
    infer = peer.build(plain, x, 1)
    contestants: dict[str, Callable[[], object]] = {RIVAL: lambda: infer(x)}
    with ExitStack() as forced:  # laid out once: that is not what an image costs
        for what, (engine, masks) in engines.items():
            forced.enter_context(engine.force({} if masks is None else masks.number(0), heads=True))
            contestants[what] = partial(engine, x, 1)
        seconds = interleaved(contestants, rounds, warm_up=5)
    return {
        what: {"seconds": summary(times), "to the rival": ratio(times, seconds[RIVAL])}
        for what, times in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", choices=NETWORKS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name in [args.only] if args.only else NETWORKS:
        found[name] = measure(name, NETWORKS[name], args.rounds)
        for what, row in found[name].items():
            times, to = row["seconds"], row["to the rival"]
            print(f"{name:24s}{what:26s}{1e3 * times['median']:8.2f} ms, {to['median']:.3f} of {RIVAL}", flush=True)
        if args.json:
            write_json(args.json, {"provenance": provenance(), "rounds": args.rounds, "networks": found})


if __name__ == "__main__":
    main()
