"""Heads fitted without training the network, beside the fixed twin: the whole test set at several budgets.

Usage: python benchmarks/offline_heads.py [--network resnet56] [--macs 0.75 0.65 0.5] [--images 4000] [--distill 3]
                                          [--json results/bench_offline_heads_resnet56.json]
With --distill, model and twin then follow the dense network's answers on the same images for so many epochs, without
labels; the model's heads stay as they are, or are fitted again.
Needs the network's weights below $COFIRE_WEIGHTS and its pictures below $COFIRE_DATA: CIFAR-10, or for the networks of
ImageNet imagenet/sample.parquet, which heads are fitted on, and imagenet/val20.parquet.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import cofire
from cofire.analysis.decisions import collect
from cofire.analysis.drawing import write_figure
from cofire.analysis.figures import clusters
from cofire.analysis.routes import routes
from cofire.backbones.published import weights_root
from cofire.data.feeding import first_images
from cofire.data.images import AbstractImages
from cofire.evaluation import Report
from cofire.experiments.provenance import provenance
from cofire.files.atomic import write_json
from cofire.gates.ftwt_offline import Look
from cofire.speedup.distilling import distilled, twin, with_network_of

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import zoo  # noqa: F401  makes timm import beside any build of torch

Sets = tuple[AbstractImages, AbstractImages]


def pictures(mean: float, std: float) -> Sets:
    """A thousand pictures to fit on, and 500 of 20 classes to test on."""
    places = {"train": "data:imagenet/sample.parquet", "test": "data:imagenet/val20.parquet"}
    return cofire.data.pictures(**places, labelled=False, mean=(mean,) * 3, std=(std,) * 3)


def cifar(name: str) -> tuple[nn.Module, Sets]:
    return cofire.create_backbone(name, weights=f"published:{name}_cifar10"), cofire.data.cifar10()


def mobilenet_v1() -> tuple[nn.Module, Sets]:
    name = "mobilenet_v1_imagenet"
    return cofire.create_backbone(name, weights=f"published:{name}", tensorflow=True), pictures(0.5, 0.5)


def efficientnet_lite0() -> tuple[nn.Module, Sets]:
    weights = weights_root() / "efficientnet_lite0_imagenet.safetensors"
    return cofire.create_backbone("timm:tf_efficientnet_lite0", weights=weights), pictures(127 / 255, 128 / 255)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Sets]]] = {
    "resnet20": lambda: cifar("resnet20"),
    "resnet56": lambda: cifar("resnet56"),
    "mobilenet_v1": mobilenet_v1,
    "efficientnet_lite0": efficientnet_lite0,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=NETWORKS, default="resnet56")
    parser.add_argument("--macs", type=float, nargs="+", default=[0.75, 0.65, 0.5])
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--distill", type=int, default=0, help="epochs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path, help="unique masks of each group, for the first budget (.svg, .png)")
    args = parser.parse_args()
    model, (train, test) = NETWORKS[args.network]()
    model.eval()
    drawn = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[: args.images]
    images, final = train.take(drawn.tolist()).loader(500), test.loader(500 if test.shape[1] < 100 else 50)
    dense = short(cofire.evaluate(model, final, text=""))
    about = {"provenance": provenance(), "network": args.network, "images": len(drawn), "seed": 0, "dense": dense}
    print(f"{args.network}, dense: {100 * dense['top1']:.2f} % of {dense['n']} images", flush=True)
    rows: list[dict[str, Any]] = []
    began = time.process_time()
    batches = first_images(images, args.images)
    look = Look(model, batches)
    looked = time.process_time() - began
    for macs in args.macs:
        began = time.process_time()
        gated = look.fitted(macs)
        seconds = looked + time.process_time() - began
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        fitted = {"gated": gated, "twin": cofire.static_twin(model, gated, images, images=args.images)}
        found = tested(fitted, final)
        fixed = len(gated.config.fixed)
        rows.append(
            {
                "macs": macs,
                "seconds": seconds,
                "memory": memory,
                "groups": len(gated.gates),
                "fixed": fixed,
                **found,
            }
        )
        if args.figure and len(rows) == 1:
            decided = routes(collect(gated, final, text=""))
            write_figure(clusters(decided, rows[-1]["gated"]["n"]), args.figure)
        if args.distill:
            student = distilled(gated, model, batches, args.distill)
            again = with_network_of(gated, student)
            look.refit(again)
            trained = {
                "gated": student,
                "fitted again": again,
                "twin": twin(model, gated, macs, batches, args.distill),
            }
            rows[-1]["distilled"] = {"epochs": args.distill, **tested(trained, final)}
        print(
            f"{args.network}, {macs:.0%} of the MACs asked for, {fixed} of {len(gated.gates)} groups fixed, "
            f"fitted in {seconds:.0f} s, {memory / 1e9:.1f} GB at most; {told(found)}",
            *[f"distilled for {args.distill} epochs: {told(rows[-1]['distilled'])}"] * bool(args.distill),
            sep="; ",
            flush=True,
        )
        if args.json:  # after each budget, so that nothing is lost
            write_json(args.json, {**about, "rows": rows})


def tested(models: dict[str, nn.Module], final: Any) -> dict[str, dict[str, Any]]:
    """Each on the whole test set."""
    return {name: short(cofire.evaluate(model, final, text="")) for name, model in models.items()}


def told(found: dict[str, Any]) -> str:
    """Reports in a line."""
    reports = {name: report for name, report in found.items() if name != "epochs"}
    return ", ".join(
        f"{name} {100 * report['top1']:.2f} % at {100 * report['reduction']['executed+heads']:.2f} % saved"
        f" ({report['bits'] or 0:.3f} bits)"
        for name, report in reports.items()
    )


def short(report: Report) -> dict[str, Any]:
    """What a row of a table needs."""
    whole = report.to_json()
    return {name: whole[name] for name in ("n", "top1", "reduction", "spread", "bits", "keep_rate")}


if __name__ == "__main__":
    main()
