"""What it could be worth to make filters neighbours that fire together: as many of them, scattered and side by side.

Random weights and images; of each group the same number of filters is on, once at random places and once the first of
them, as no order of real filters could do better. Both are forced on one engine by turns: one thread, batch 1, heads
included. The ratio is the most that an order of channels, chosen when a program is compiled, could save.

Usage: python benchmarks/channel_order.py [--rounds 100] [--only resnet34] [--json results/bench_channel_order.json]
"""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch

import cofire
from cofire.bench import Plan, random_plan
from cofire.bench.masks import MaskPool
from cofire.bench.rounds import Contestant, interleaved, pinned, ratio_by_round, spread
from cofire.experiments.provenance import provenance
from cofire.files.atomic import write_json
from cofire.runtime.engine import Precision

NETWORKS = ("resnet34", "vgg16_bn", "mobilenet_v1_imagenet", "resnet56")
FEWER = 0.48  # share of the MACs


def sorted_pool(pool: MaskPool) -> MaskPool:
    """As many filters of each group, the first of them."""
    masks = {group: mask.sort(dim=1, descending=True).values for group, mask in pool.masks.items()}
    return MaskPool(masks=masks, keep=pool.keep, macs=pool.macs, heads=pool.heads)


def measure(plan: Plan, precision: Precision, rounds: int) -> dict[str, Any]:
    """Milliseconds of both, and their ratio."""
    shape, (scattered,) = plan.gated.graph.input_shape, plan.pools
    assert scattered is not None
    images = torch.from_numpy(plan.images) if precision == "int8" else None

    def forced(pool: MaskPool, number: int) -> AbstractContextManager[object]:
        return engine.force(pool.number(number), heads=True)

    with pinned(1):
        engine = cofire.compile(plan.gated, shape, precision=precision, images=images)
        image = plan.image(0)
        pools = {"scattered": scattered, "neighbours": sorted_pool(scattered)}
        contestants = {name: Contestant(lambda: engine(image), partial(forced, pool)) for name, pool in pools.items()}
        seconds = interleaved(contestants, rounds, warm_up=10)
    ratio = ratio_by_round(seconds["neighbours"], seconds["scattered"])
    milliseconds = {name: vars(spread([1e3 * second for second in each])) for name, each in seconds.items()}
    about = {"network": plan.network, "precision": precision, "macs": scattered.macs, "kernel": engine.kernel}
    return {**about, "milliseconds": milliseconds, "ratio": vars(ratio)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--only", choices=NETWORKS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = []
    for name in [args.only] if args.only else NETWORKS:
        plan = random_plan(name, macs=[FEWER])
        for precision in ("float32", "int8"):
            row = measure(plan, precision, args.rounds)
            found.append(row)
            both = ", ".join(f"{name} {each['median']:.3f} ms" for name, each in row["milliseconds"].items())
            ratio = "{median:.3f} ({p10:.3f} to {p90:.3f})".format(**row["ratio"])
            print(f"{row['network']}, {precision}: {both}; {ratio}")
    if args.json:
        write_json(args.json, {"provenance": provenance(), "rounds": args.rounds, "networks": found})


if __name__ == "__main__":
    main()
