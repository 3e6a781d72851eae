"""Does the engine decide as PyTorch does? Masks of gated models on the CIFAR-10 test set, both sides running freely.

Of each image whose masks differ, the first decision that does counts: later ones see other inputs. Its logit must be
all but at the edge, where rounding decides: at the threshold, or for a fixed number of filters between the last that
runs and the first that does not. Heads at random on the same backbone are the harder case, for more of their decisions
hang on the image; heads fitted offline choose a fixed number.

Usage: python benchmarks/free_running.py [--run FOLDER] [--json results/bench_free_running.json]

FOLDER is a gated CIFAR-10 model as `cofire train` leaves it; default: the one of the zoo.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cofire
from cofire.experiments.provenance import provenance
from cofire.files.atomic import write_json
from cofire.runtime.engine import Engine

SHARE_LIMIT = 0.005  # of images with a decision that differs
DISTANCE_LIMIT = 1e-4  # of that decision's logit from the edge
FITTED = 2000  # training images, without their labels


def trained(folder: Path) -> cofire.GatedModel:
    model = cofire.load(folder)
    if not isinstance(model, cofire.GatedModel):
        raise SystemExit(f"{folder} holds a model without gates: pass a gated one, --run FOLDER")
    return model


@torch.no_grad()
def with_random_heads(model: cofire.GatedModel) -> cofire.GatedModel:
    """The same backbone behind heads whose logits lie on both sides of the threshold."""
    gated = cofire.gate(model.backbone, cofire.FTWT(always=True), input_shape=model.graph.input_shape)
    generator = torch.Generator().manual_seed(0)
    for gate in gated.gates.values():
        linear = gate.head.linear
        linear.weight.normal_(0.0, linear.in_features**0.5, generator=generator)
        linear.bias.normal_(0.2, 0.2, generator=generator)
    return gated


def with_fitted_heads(model: cofire.GatedModel, images: cofire.data.Images) -> cofire.GatedModel:
    """The same backbone, not trained, at 60 % of its MACs; as many filters for every image."""
    return cofire.fit_heads(model.backbone, images.loader(250), macs=0.6, images=len(images))


def edge_B1(logits_BO: Tensor, mask_BO: Tensor, threshold: float | None) -> Tensor:
    """Where a logit decides: the threshold, or halfway from the last filter that runs to the first that does not."""
    if threshold is not None:
        return logits_BO.new_full((len(logits_BO), 1), threshold)
    kept = int(mask_BO[0].sum())
    sorted_BO = logits_BO.sort(dim=1, descending=True).values
    return sorted_BO[:, kept - 1 : kept + 1].mean(1, keepdim=True)


@torch.no_grad()
def first_differences(model: cofire.GatedModel, engine: Engine, x_BCHW: Tensor) -> dict[int, tuple[str, float]]:
    """Image -> its first group with another mask, and how far the logits there are from the edge.

    Both sides' logits count, the farther one, for the two lie on either side of the edge.
    """
    masks = {group: torch.from_numpy(mask) for group, mask in engine.last_masks.items()}
    logits = {group: torch.from_numpy(values) for group, values in engine.logits(x_BCHW).items()}
    found: dict[int, tuple[str, float]] = {}
    for group, mask_BO in masks.items():  # in the order of execution
        decision = model.decisions[group]
        on_BO = decision.mask.on > 0.5
        differ_BO = mask_BO != on_BO
        if not differ_BO.any():
            continue
        assert decision.logits_BO is not None  # a group without a head is the same for every image
        sides = [(decision.logits_BO, on_BO), (logits[group], mask_BO)]
        away_BO = torch.stack([(x_BO - edge_B1(x_BO, kept_BO, model.threshold)).abs() for x_BO, kept_BO in sides]).amax(
            0
        )
        for image in differ_BO.any(1).nonzero().flatten().tolist():
            found.setdefault(image, (group, float(away_BO[image][differ_BO[image]].max())))
    return found


@torch.no_grad()
def compare(model: cofire.GatedModel, images: cofire.data.Images, batch: int = 250) -> dict[str, Any]:
    engine = cofire.compile(model)
    right = {"pytorch": 0, "engine": 0}
    distances: list[dict[str, Any]] = []
    on = {group.name: torch.zeros(group.filters) for group in engine.program.groups}
    done = agree = 0
    for x_BCHW, label_B in images.loader(batch):
        assert label_B is not None
        theirs, ours = model(x_BCHW).argmax(1), engine(x_BCHW).argmax(1)
        right["pytorch"] += int((theirs == label_B).sum())
        right["engine"] += int((ours == label_B).sum())
        agree += int((theirs == ours).sum())
        for image, (group, distance) in first_differences(model, engine, x_BCHW).items():
            distances.append({"image": done + image, "group": group, "distance": distance})
        for group, mask_BO in engine.last_masks.items():
            on[group] += torch.from_numpy(mask_BO).sum(0)
        done += len(x_BCHW)
    largest = max((entry["distance"] for entry in distances), default=0.0)
    share = len(distances) / done
    on_O = torch.cat(list(on.values()))
    return {
        "images": done,
        "filters": len(on_O),
        "filters_that_depend_on_the_image": int(((on_O > 0) & (on_O < done)).sum()),
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
    parser.add_argument("--run", type=Path, default=cofire.zoo.folder("resnet20_cifar10_ftwt"))
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = trained(args.run)
    train, test = cofire.data.cifar10()
    fitted = with_fitted_heads(model, train.take(slice(0, FITTED)))
    models = {"trained heads": model, "random heads": with_random_heads(model), "fitted heads": fitted}
    results = {}
    for name, gated in models.items():
        found = results[name] = compare(gated.eval(), test.take(slice(0, args.images)))
        top1 = found["top1"]
        print(
            f"{name}: masks of {found['differing']} of {found['images']} images differ ({100 * found['share']:.2f} %, "
            f"limit {100 * SHARE_LIMIT:g} %), the farthest {found['largest_distance']:.2g} from the edge "
            f"(limit {DISTANCE_LIMIT:g}); {found['filters_that_depend_on_the_image']} of {found['filters']} filters "
            f"depend on the image; top-1 {100 * top1['pytorch']:.2f} % in PyTorch, {100 * top1['engine']:.2f} % here"
        )
    if args.json:
        write_json(args.json, {"provenance": provenance(), "model": model.describe(), "results": results})


if __name__ == "__main__":
    main()
