"""Does the engine decide as PyTorch does? Masks of a gated model on the CIFAR-10 test set, both running freely.

Of each image whose masks differ, the first decision that does counts: later ones see other inputs. Its logit must be
all but at the threshold, where rounding decides.

Usage: python benchmarks/free_running.py [--run FOLDER] [--json results/bench_free_running.json]

FOLDER is a gated CIFAR-10 model as `cofire train` leaves it; default: the first below ~/.cache/cofire/runs, else a
ResNet-20 with random weights and heads.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cofire
from cofire.files import write_json
from cofire.provenance import provenance
from cofire.runtime.engine import Engine

SHARE_LIMIT = 0.005  # of images with a decision that differs
DISTANCE_LIMIT = 1e-4  # of that decision's logit from the threshold
RUNS = Path("~/.cache/cofire/runs").expanduser()


def trained(folder: Path | None) -> tuple[cofire.GatedModel, str]:
    """A gated model and what to call it."""
    found = [folder] if folder else sorted(path.parent for path in RUNS.glob("*/model.safetensors"))
    if found:
        model = cofire.load(found[0])
        if not isinstance(model, cofire.GatedModel):
            raise SystemExit(f"{found[0]} holds a model without gates: pass a gated one, --run FOLDER")
        return model, found[0].name
    torch.manual_seed(0)
    return cofire.gate(cofire.create_backbone("resnet20"), cofire.FTWT(always=True)), "random"


@torch.no_grad()
def first_differences(model: cofire.GatedModel, engine: Engine, x_BCHW: Tensor) -> dict[int, tuple[str, float]]:
    """Image -> its first group with another mask, and how far the logits there are from the threshold.

    Both sides' logits count, the farther one, for the two lie on either side of the threshold.
    """
    masks = {group: torch.from_numpy(mask) for group, mask in engine.last_masks.items()}
    logits = {group: torch.from_numpy(values) for group, values in engine.logits(x_BCHW).items()}
    found: dict[int, tuple[str, float]] = {}
    for group, mask_BO in masks.items():  # in the order of execution
        decision = model.decisions[group]
        assert decision.logits_BO is not None
        differ_BO = mask_BO != (decision.mask > 0.5)
        away_BO = torch.maximum((decision.logits_BO - model.threshold).abs(), (logits[group] - engine.threshold).abs())
        for image in differ_BO.any(1).nonzero().flatten().tolist():
            found.setdefault(image, (group, float(away_BO[image][differ_BO[image]].max())))
    return found


@torch.no_grad()
def compare(model: cofire.GatedModel, images: cofire.data.Images, batch: int = 250) -> dict[str, Any]:
    engine = cofire.compile(model)
    right = {"pytorch": 0, "engine": 0}
    distances: list[dict[str, Any]] = []
    done = agree = 0
    for x_BCHW, label_B in images.loader(batch):
        assert label_B is not None
        theirs, ours = model(x_BCHW).argmax(1), engine(x_BCHW).argmax(1)
        right["pytorch"] += int((theirs == label_B).sum())
        right["engine"] += int((ours == label_B).sum())
        agree += int((theirs == ours).sum())
        for image, (group, distance) in first_differences(model, engine, x_BCHW).items():
            distances.append({"image": done + image, "group": group, "distance": distance})
        done += len(x_BCHW)
    largest = max((entry["distance"] for entry in distances), default=0.0)
    share = len(distances) / done
    return {
        "images": done,
        "differing": len(distances),
        "share": share,
        "share_limit": SHARE_LIMIT,
        "largest_distance": largest,
        "distance_limit": DISTANCE_LIMIT,
        "holds": share <= SHARE_LIMIT and largest <= DISTANCE_LIMIT,
        "top1": {side: count / done for side, count in right.items()},
        "same_top1": agree / done,
        "first_differences": distances,
        "kernel": engine.kernel,
        "tuning": engine.tuning,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model, name = trained(args.run)
    _, test = cofire.data.cifar10()
    result = compare(model.eval(), test.take(slice(0, args.images)))
    top1 = result["top1"]
    print(
        f"{name}: masks of {result['differing']} of {result['images']} images differ ({100 * result['share']:.2f} %, "
        f"limit {100 * SHARE_LIMIT:g} %), the farthest {result['largest_distance']:.2g} from the threshold "
        f"(limit {DISTANCE_LIMIT:g}); top-1 {100 * top1['pytorch']:.2f} % in PyTorch, {100 * top1['engine']:.2f} % here"
    )
    if args.json:
        write_json(args.json, {"provenance": provenance(), "model": {"name": name, **model.describe()}, **result})


if __name__ == "__main__":
    main()
