"""What feeding costs: making a CIFAR-10 batch (128, augmented) against the training step it feeds, interleaved.

Usage: python benchmarks/feeding.py [--rounds 30] [--threads 2] [--json results/bench_feeding.json]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from timing import interleaved, ratio, summary
from training_step import step

import cofire
from cofire.data import Augment, Batch, Images
from cofire.experiments.provenance import provenance
from cofire.files.atomic import write_json

BATCH = 128
LIMIT = 0.10  # of a ResNet-20 step
CASES: tuple[Augment, ...] = ("none", "crop-flip", "resized-crop-flip")


def cifar10() -> Images:
    """The training set; where there is no copy, as many synthetic images of its size."""
    try:
        return cofire.data.cifar10()[0]
    except cofire.FileError as error:
        print(f"{error}\nsynthetic images of the same size stand in")
        return cofire.data.synthetic(50_000)


def feeder(images: Images, augment: Augment) -> Callable[[], Batch]:
    """Gives one batch after the other, over epochs."""

    def batches() -> Iterator[Batch]:
        loader = images.loader(BATCH, train=True, augment=augment)
        epoch = 0
        while True:
            yield from loader.batches(epoch)
            epoch += 1

    found = batches()
    return lambda: next(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    images = cifar10()
    x_BCHW, label_B = next(iter(images.loader(BATCH)))
    assert label_B is not None
    contestants: dict[str, Callable[[], object]] = {
        "step": step(cofire.create_backbone("resnet20"), x_BCHW, label_B),
        **{augment: feeder(images, augment) for augment in CASES},
    }
    seconds = interleaved(contestants, args.rounds)
    results = {
        name: {"seconds": seconds[name], **summary(seconds[name]), "of_step": ratio(seconds[name], seconds["step"])}
        for name in contestants
    }
    print(f"{images.name}, batch {BATCH}, {args.threads} threads: step {1e3 * results['step']['median']:.1f} ms")
    for name in CASES:
        share = results[name]["of_step"]
        print(
            f"{name:18s} {1e3 * results[name]['median']:7.2f} ms = {100 * share['median']:.2f} % of a step "
            f"(p10 {100 * share['p10']:.2f}, p90 {100 * share['p90']:.2f}), limit {100 * LIMIT:.0f} %"
        )
    if args.json:
        described = {"data": images.name, "batch": BATCH, "backbone": "resnet20", "limit": LIMIT}
        write_json(args.json, {"provenance": provenance(), **described, "results": results})


if __name__ == "__main__":
    main()
