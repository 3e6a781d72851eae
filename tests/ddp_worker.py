"""One of two gloo processes of test_robustness.py: python ddp_worker.py OUT, with RANK and WORLD_SIZE set."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from small import OwnNet, digest
from torch.nn.parallel import DistributedDataParallel

from cofire import FTWT, GatedModel, Recipe, create_backbone, data, fit, gate, mask_loss

BACKBONES: dict[str, dict[str, Any]] = {"resnet20": {}, "mobilenet_v1": {"width": 0.5}, "vgg11_bn": {}}


def new_gated(name: str, **options: Any) -> GatedModel:
    torch.manual_seed(0)
    return gate(create_backbone(name, **BACKBONES[name]), FTWT(**options))


def own_gated() -> GatedModel:
    torch.manual_seed(0)
    return gate(OwnNet(), FTWT(always=True), input_shape=(3, 8, 8))


def own_loader() -> data.Loader:
    return data.synthetic(32, (3, 8, 8), classes=3).loader(8, train=True)


ALL = Recipe(epochs=2, lr=0.05, schedule="cosine")
FITS: dict[str, tuple[Any, Recipe]] = {
    "all": (own_loader(), ALL),
    "heads": (own_loader(), Recipe(epochs=2, train="heads", schedule="cosine")),
    "list": (list(own_loader()), ALL),
    "average": (own_loader(), dataclasses.replace(ALL, average=0.9)),
    "distill": (own_loader(), dataclasses.replace(ALL, distill=0.5)),
}


def teacher_for(recipe: Recipe) -> OwnNet | None:
    torch.manual_seed(5)
    return OwnNet() if recipe.distill else None


def step(name: str, rank: int) -> dict[str, Any]:
    """Gradients after one step of each rank on a batch of its own."""
    model = DistributedDataParallel(new_gated(name), find_unused_parameters=False)
    x_BCHW = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(rank))
    for _ in range(2):  # the second forward fails if the first left a gradient out
        model.zero_grad()
        (F.cross_entropy(model(x_BCHW), torch.tensor([rank, 3])) + mask_loss(model)).backward()
    gradients = {key: p.grad for key, p in model.module.named_parameters()}
    return {
        "missing": [key for key, gradient in gradients.items() if gradient is None],
        "finite": all(bool(g.isfinite().all()) for g in gradients.values() if g is not None),
        "sums": {key: g.double().abs().sum().item() for key, g in gradients.items() if g is not None},
    }


def main() -> None:
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    fitted = {}
    for name, (loader, recipe) in FITS.items():
        gated = own_gated()
        fit(gated, loader, recipe, teacher=teacher_for(recipe), out=out / name)
        fitted[name] = digest(gated)
        assert dist.get_world_size() == 2
    rank = dist.get_rank()
    result = {"fit": fitted, "steps": {name: step(name, rank) for name in BACKBONES}}
    (out / f"rank{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
