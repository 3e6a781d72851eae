"""What an estimate costs: one pass for 20 ratios against a plain evaluation of the same images, interleaved.

Usage: python benchmarks/estimate.py [--rounds 7] [--json results/bench_estimate.json]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from timing import interleaved, ratio, summary

import cofire
from cofire.estimate import RATIOS
from cofire.experiments.provenance import provenance
from cofire.files.atomic import write_json

LIMIT = 1.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {}
    for name in ("resnet56", "vgg16_bn", "mobilenet_v1"):
        torch.manual_seed(0)
        model = cofire.create_backbone(name).eval()
        loader = cofire.data.synthetic(args.images).loader(100)

        def plain(model: torch.nn.Module = model, loader: cofire.data.Loader = loader) -> None:
            with torch.no_grad():
                for x_BCHW, _ in loader:
                    model(x_BCHW)

        def estimated(model: torch.nn.Module = model, loader: cofire.data.Loader = loader) -> None:
            cofire.estimate(model, cofire.FTWT(), loader, RATIOS)

        seconds = interleaved({"plain": plain, "estimate": estimated}, args.rounds, warm_up=1)
        share = ratio(seconds["estimate"], seconds["plain"])
        results[name] = {"seconds": seconds, "plain": summary(seconds["plain"]), "ratio": share, "limit": LIMIT}
        print(
            f"{name:14s} plain {results[name]['plain']['median']:6.2f} s  estimate / plain {share['median']:.3f} "
            f"(p10 {share['p10']:.3f}, p90 {share['p90']:.3f}), {len(RATIOS)} ratios, limit {LIMIT}"
        )
    if args.json:
        write_json(args.json, {"provenance": provenance(), "images": args.images, "results": results})


if __name__ == "__main__":
    main()
