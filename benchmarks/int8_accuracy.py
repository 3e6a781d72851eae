"""int8 beside float32 of the same model: accuracy on all test images, and gate decisions that flip.

Usage: python benchmarks/int8_accuracy.py [--network resnet20] [--macs 0.75 0.65] [--calibrate 256] [--exact 1000]
                                          [--json results/int8_accuracy_resnet20.json]
Needs the weights and pictures that ``offline_heads.py`` needs. Gated models are those whose heads are fitted offline.
The first ``--exact`` test images also run through the simulation in PyTorch, under the engine's masks, whose logits
must be the engine's bit for bit.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from offline_heads import NETWORKS
from torch import nn

import cofire
from cofire.experiments.provenance import provenance
from cofire.files.atomic import write_json
from cofire.runtime.interpreter import trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=NETWORKS, default="resnet20")
    parser.add_argument("--macs", type=float, nargs="*", default=[0.75])
    parser.add_argument("--fit", type=int, default=4000, help="images that heads are fitted to")
    parser.add_argument("--calibrate", type=int, default=256, help="images that ranges are fitted to")
    parser.add_argument("--exact", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model, (train, test) = NETWORKS[args.network]()
    model.eval()
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0)).tolist()
    calibration = train.take(order[: args.calibrate])
    rows: list[dict[str, Any]] = []
    for macs in [None, *args.macs]:
        compared: nn.Module = model
        if macs is not None:
            loader = train.take(order[: args.fit]).loader(500)
            compared = cofire.fit_heads(model, loader, macs=macs, images=args.fit)
        row = {"macs asked for": macs, **comparison(compared, calibration, test, args.exact)}
        rows.append(row)
        print(
            f"{args.network}, {'dense' if macs is None else f'{macs:.0%} of the MACs'}: float32 "
            f"{100 * row['float32']['top1']:.2f} %, int8 {100 * row['int8']['top1']:.2f} %; same class "
            f"{100 * row['same class']:.2f} %; decisions that flip {100 * row['flips']:.3f} %; engine = simulation on "
            f"{row['exact']} images",
            flush=True,
        )
        if args.json:
            about = {"network": args.network, "calibration images": args.calibrate, "seed": 0}
            write_json(args.json, {"provenance": provenance(), **about, "rows": rows})


def comparison(model: nn.Module, calibration: Any, test: Any, exact: int) -> dict[str, Any]:
    """Both engines on all test images, and the simulation on the first of them."""
    batch = 250 if test.shape[1] < 100 else 25
    quantized = cofire.quantize(model, calibration.loader(batch), most=len(calibration))
    engines = {"float32": cofire.compile(model, test.shape), "int8": cofire.compile(quantized)}
    right, macs = dict.fromkeys(engines, 0), dict.fromkeys(engines, 0)
    same = flips = decisions = done = equal = 0
    for x_BCHW, label_B in test.loader(batch):
        logits, masks = {}, {}
        for name, engine in engines.items():
            logits[name] = engine(x_BCHW)
            masks[name] = engine.last_masks
            right[name] += int((logits[name].argmax(1) == label_B).sum())
            macs[name] += sum(int(part.sum()) for part in engine.last_macs.values())
        same += int((logits["int8"].argmax(1) == logits["float32"].argmax(1)).sum())
        for group, mask_BO in masks["float32"].items():
            flips += int(np.sum(mask_BO != masks["int8"][group]))
            decisions += mask_BO.size
        if done < exact:
            forced = {group: torch.from_numpy(mask_BO) for group, mask_BO in masks["int8"].items()}
            simulated = trace(quantized.program, x_BCHW, forced=forced).out
            equal += int((simulated == logits["int8"]).all(1).sum())
        done += len(label_B)
    return {
        **{name: {"top1": right[name] / done, "macs": macs[name] / done} for name in engines},
        "n": done,
        "same class": same / done,
        "flips": flips / max(decisions, 1),
        "decisions": decisions,
        "exact": f"{equal} of {min(-(-exact // batch) * batch, done)}",
        "float32 layers": [op.name for op in quantized.program.ops if type(op).__name__ == "Conv"],
    }


if __name__ == "__main__":
    main()
