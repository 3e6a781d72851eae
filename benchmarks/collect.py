"""What collecting decisions costs: against a plain evaluation of the same gated model and images, interleaved.

Usage: python benchmarks/collect.py [--rounds 5] [--images 10000] [--json results/bench_collect.json]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from timing import interleaved, ratio, summary

import cofire
from cofire.experiments.provenance import provenance
from cofire.files.atomic import write_json

LIMIT = 1.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    gated = cofire.gate(cofire.create_backbone("resnet20"), cofire.FTWT())
    loader = cofire.data.synthetic(args.images).loader(250)
    contestants = {
        "evaluate": lambda: cofire.evaluate(gated, loader, text=""),
        "collect": lambda: cofire.analysis.collect(gated, loader, text=""),
        "collect with targets": lambda: cofire.analysis.collect(gated, loader, targets=True, text=""),
    }
    seconds = interleaved(contestants, args.rounds, warm_up=1)
    decisions = cofire.analysis.collect(gated, loader, text="")
    held = sum(bits.nbytes for bits in decisions.bits.values())
    results = {
        name: {"seconds": found, **summary(found), "ratio": ratio(found, seconds["evaluate"]), "limit": LIMIT}
        for name, found in seconds.items()
    }
    for name, found in results.items():
        share = found["ratio"]
        print(
            f"{name:22s} {found['median']:6.2f} s, to evaluate {share['median']:.3f} "
            f"(p10 {share['p10']:.3f}, p90 {share['p90']:.3f}), limit {LIMIT}"
        )
    print(f"{held:,} bytes of masks for {args.images} images and {sum(decisions.filters.values())} filters")
    if args.json:
        about = {"provenance": provenance(), "network": "resnet20", "images": args.images, "mask_bytes": held}
        write_json(args.json, {**about, "results": results})


if __name__ == "__main__":
    main()
