"""Heads fitted without training, beside the fixed twin: accuracy on the CIFAR-10 test set at several budgets.

Usage: python benchmarks/offline_heads.py [--network resnet56] [--macs 0.75 0.65 0.5] [--images 4000]
                                          [--json results/bench_offline_heads_resnet56.json]
Needs CIFAR-10 and the published weights of the network (``published:NAME_cifar10``).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

import cofire
from cofire.evaluation import Report
from cofire.experiments.provenance import provenance
from cofire.files.atomic import write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", default="resnet56")
    parser.add_argument("--macs", type=float, nargs="+", default=[0.75, 0.65, 0.5])
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = cofire.create_backbone(args.network, weights=f"published:{args.network}_cifar10").eval()
    train, test = cofire.data.cifar10()
    drawn = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[: args.images]
    images, final = train.take(drawn.tolist()).loader(500), test.loader(500)
    about = {"provenance": provenance(), "network": args.network, "images": args.images, "seed": 0}
    rows: list[dict[str, Any]] = []
    for macs in args.macs:
        began = time.perf_counter()
        gated = cofire.fit_heads(model, images, macs=macs, images=args.images)
        seconds = time.perf_counter() - began
        twin = cofire.static_twin(model, gated, images, images=args.images)
        found = [cofire.evaluate(part, final, text="") for part in (gated, twin)]
        rows.append({"macs": macs, "seconds": seconds, "gated": short(found[0]), "twin": short(found[1])})
        print(
            f"{args.network}, {macs:.0%} of the MACs asked for: {100 * found[0].top1:.2f} % at "
            f"{100 * found[0].reduction['executed+heads']:.2f} % saved, {found[0].bits:.3f} bits per filter, fitted in "
            f"{seconds:.0f} s; twin {100 * found[1].top1:.2f} % at {100 * found[1].reduction['executed']:.2f} %",
            flush=True,
        )
        if args.json:  # after each budget, so that nothing is lost
            write_json(args.json, {**about, "rows": rows})


def short(report: Report) -> dict[str, Any]:
    """What a row of a table needs."""
    whole = report.to_json()
    return {name: whole[name] for name in ("n", "top1", "reduction", "spread", "bits", "keep_rate")}


if __name__ == "__main__":
    main()
