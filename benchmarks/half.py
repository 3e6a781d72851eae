"""Half of the MACs asked for: what is executed on images that nothing was fitted to, by fixed k and by threshold.

Heads are fitted without training to images without labels, once for a fixed number of filters per group; the same heads
then decide by a threshold that `calibrate` sets on the same images. The engine counts what it executes.

Usage: python benchmarks/half.py [--network resnet20] [--macs 0.5] [--images 2000]
                                 [--json results/bench_half_resnet20.json]
Needs weights and pictures as benchmarks/offline_heads.py does.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch
from offline_heads import NETWORKS

import cofire
from cofire.data.feeding import first_images
from cofire.experiments.provenance import provenance
from cofire.files.atomic import write_json
from cofire.gates.gating import GatedModel
from cofire.text import percent

ENGINE = 100  # images that the engine counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, default="resnet20")
    parser.add_argument("--macs", type=float, default=0.5)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    model, (train, test) = NETWORKS[asked.network]()
    drawn = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[: asked.images]
    images, final = train.take(drawn.tolist()).loader(250), test.loader(250 if test.shape[1] < 100 else 50)
    fixed_k = cofire.fit_heads(model.eval(), images, macs=asked.macs, images=asked.images)
    threshold = by_threshold(fixed_k)
    cofire.calibrate(threshold, images, macs=asked.macs, images=asked.images)
    rows = {name: row(gated, final) for name, gated in (("fixed k", fixed_k), ("threshold", threshold))}
    for name, found in rows.items():
        engine = found["engine"]
        print(
            f"{asked.network}, {name}: asked {percent(asked.macs)}, reached {percent(found['reached'], 2)} on "
            f"{found['n']} images (spread {percent(found['spread'], 2)}), top-1 {percent(found['top1'], 2)}; "
            f"the engine {engine['least']:,} to {engine['most']:,} of {engine['dense']:,} MACs"
        )
    if asked.json:
        about = {"provenance": provenance(), "network": asked.network, "asked": asked.macs, "images": len(drawn)}
        write_json(asked.json, {**about, "rows": rows})


def by_threshold(gated: GatedModel) -> GatedModel:
    """The same network and heads; what runs are the filters whose logits are above one threshold."""
    config, groups = dataclasses.replace(gated.config, select="threshold", signature=None), set(gated.gates)
    found = cofire.gate(
        gated.backbone, config, filter_fn=lambda unit: unit.group in groups, input_shape=gated.graph.input_shape
    )
    found.gates.load_state_dict(gated.gates.state_dict())
    return found.eval()


def row(gated: GatedModel, final: Any) -> dict[str, Any]:
    """On all test images, and what the engine counts on the first few."""
    report = cofire.evaluate(gated, final, text="")
    engine, counted = cofire.compile(gated), []
    for image in torch.cat(first_images(final, ENGINE)).split(1):
        engine(image)
        counted.append(int(sum(engine.last_macs.values())[0]))
    return {
        "n": report.n,
        "reached": 1 - report.reduction["executed+heads"],
        "spread": report.spread["executed+heads"],
        "top1": report.top1,
        "bits": report.bits,
        "engine": {"n": len(counted), "least": min(counted), "most": max(counted), "dense": report.dense_macs},
    }


if __name__ == "__main__":
    main()
