"""What gates cost in training: a decoupled step against the dense step, batch 32, one thread, interleaved.

Usage: python benchmarks/training_step.py [--rounds 15] [--json results/bench_training_step.json]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import interleaved, ratio, summary
from torch import nn

import cofire
from cofire.experiments.provenance import provenance
from cofire.files.atomic import write_json

CASES = {
    "resnet56": (cofire.FTWT(), 1.10),
    "vgg16_bn": (cofire.FTWT(), 1.10),
    "mobilenet_v1": (cofire.FTWT(depthwise="separate", always=True), 1.25),
}


def step(model: nn.Module, x_BCHW: torch.Tensor, label_B: torch.Tensor) -> Callable[[], None]:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def run() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x_BCHW), label_B)
        if isinstance(model, cofire.GatedModel):
            loss = loss + cofire.mask_loss(model)
        loss.backward()
        optimizer.step()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=list(CASES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for name, (config, limit) in CASES.items():
        if args.only not in (None, name):
            continue
        torch.manual_seed(0)
        model = cofire.create_backbone(name)
        gated = cofire.gate(model, config)
        x_BCHW, label_B = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
        seconds = interleaved(
            {"dense": step(model, x_BCHW, label_B), "gated": step(gated, x_BCHW, label_B)}, args.rounds
        )
        share = ratio(seconds["gated"], seconds["dense"])
        results[name] = {
            "seconds": seconds,
            "dense": summary(seconds["dense"]),
            "gated": summary(seconds["gated"]),
            "ratio": share,
            "limit": limit,
        }
        print(
            f"{name:14s} dense {1e3 * results[name]['dense']['median']:7.1f} ms  gated / dense "
            f"{share['median']:.3f} (p10 {share['p10']:.3f}, p90 {share['p90']:.3f}), limit {limit}"
        )
    if args.json:
        write_json(args.json, {"provenance": provenance(), "batch": 32, "results": results})


if __name__ == "__main__":
    main()
