"""Two threads against one: one image split inside its layers, and a batch of 8; the machine's own limits beside them.

The limits are what two cores give to work that shares nothing: two engines side by side, each with an image of its own,
and sums over memory. Where two "cores" are two threads of one, both are well below 2.

Usage: python benchmarks/threads.py [--rounds 60] [--json results/bench_threads.json]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from timing import interleaved, ratio, summary

import cofire
from cofire.bench.masks import pool_for_macs
from cofire.experiments.provenance import provenance
from cofire.files.atomic import write_json

NETWORK, BATCH, MACS = "resnet34", 8, 0.48
LIMITS = {"one image": 1.5, "batch of 8": 1.6}
BYTES = 1 << 28  # far beyond any cache


def side_by_side(pool: ThreadPoolExecutor, call: Callable[[], object]) -> None:
    """The same call twice at once."""
    for done in [pool.submit(call), pool.submit(call)]:
        done.result()


def speedups(contestants: dict[str, tuple[Callable[[], object], Callable[[], object], float]], rounds: int) -> dict:
    """Name -> how much faster the second call does the work of the first; the last number is how much more it does."""
    flat = {f"{name}/{which}": call for name, calls in contestants.items() for which, call in enumerate(calls[:2])}
    seconds = interleaved(flat, rounds, warm_up=5)
    found = {}
    for name, (*_, work) in contestants.items():
        one, two = seconds[f"{name}/0"], seconds[f"{name}/1"]
        times = {key: work * value for key, value in ratio(one, two).items()}
        found[name] = {"one": summary(one), "two": summary(two), "speedup": times, "limit": LIMITS.get(name)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = cofire.create_backbone(NETWORK)
    gated = cofire.gate(model, cofire.FTWT())
    masks = {group: mask[0] for group, mask in pool_for_macs(gated, MACS).number(0).items()}
    generator = np.random.default_rng(0)
    image, batch = (generator.normal(size=(n, *model.input_shape)).astype(np.float32) for n in (1, BATCH))
    memory = np.ones(BYTES // 4, dtype=np.float32)
    results = {}
    with ThreadPoolExecutor(2) as pool:
        for what, engine, forced in (
            ("dense", cofire.compile(model), {}),
            (f"{MACS:.0%} of MACs", cofire.compile(gated), masks),
        ):

            def run(x: np.ndarray, threads: int, engine: cofire.Engine = engine, forced: dict = forced) -> None:
                with engine.force(forced, heads=True):
                    engine(x, threads=threads)

            results[what] = speedups(
                {
                    "one image": (partial(run, image, 1), partial(run, image, 2), 1),
                    "batch of 8": (partial(run, batch, 1), partial(run, batch, 2), 1),
                    "two engines": (partial(run, image, 1), partial(side_by_side, pool, partial(run, image, 1)), 2),
                    "memory": (memory.sum, partial(side_by_side, pool, memory.sum), 2),
                },
                args.rounds,
            )
    for what, found in results.items():
        for name, row in found.items():
            times = row["speedup"]
            asked = f", asked for {row['limit']}" if row["limit"] else ""
            print(
                f"{NETWORK}, {what}: {name:11} {1e3 * row['one']['median']:7.1f} ms with one, speed-up "
                f"{times['median']:.2f} (p10 {times['p10']:.2f}, p90 {times['p90']:.2f}){asked}"
            )
    rate = BYTES / results["dense"]["memory"]["one"]["median"] / 1e9
    print(f"memory: {rate:.1f} GB/s with one thread")
    if args.json:
        write_json(args.json, {"provenance": provenance(), "network": NETWORK, "batch": BATCH, "results": results})


if __name__ == "__main__":
    main()
