"""Published weights through our networks and our data give the published accuracy. Needs the files, else skips.

The first pictures of a set stand for it: what all of them give was measured once, and a wrong mean shows in few.
"""

import os
from pathlib import Path

import pytest
import torch

import cofire

SHARED = Path(os.environ.get("COFIRE_SHARED", Path(__file__).parents[2] / "shared"))


def _file(name: str) -> Path:
    if not (SHARED / name).exists():
        pytest.skip(f"{name} is not beside the project")
    return SHARED / name


@pytest.mark.slow
def test_mobilenet_v1_in_its_tensorflow_form_scores_as_its_source_says():
    weights, pictures = _file("weights/mobilenet_v1_imagenet.safetensors"), _file("data/imagenet/val20.parquet")
    model = cofire.create_backbone("mobilenet_v1_imagenet", tensorflow=True, weights=weights)
    half = (0.5, 0.5, 0.5)  # x / 127.5 - 1
    images = cofire.data.imagenet_parquet(pictures, mean=half, std=half)
    report = cofire.evaluate(model, images.take(slice(0, 200)).loader(50))
    assert report.top1 == pytest.approx(0.615, abs=0.0051)  # 65.4 % of all 500


@pytest.mark.slow
@pytest.mark.parametrize(("name", "top1"), [("resnet20", 0.9165), ("resnet56", 0.9260)])  # 91.73, 93.39 % of all
def test_cifar_resnets_score_as_published(name, top1):
    weights = _file(f"weights/{name}_cifar10.safetensors")
    _, test = cofire.data.cifar10(_file("data/cifar10/test.parquet").parents[1])
    model = cofire.create_backbone(name, weights=weights).eval()
    report = cofire.evaluate(model, test.take(slice(0, 2000 if name == "resnet20" else 1000)).loader(250))
    assert report.top1 == pytest.approx(top1, abs=0.0011)
    assert not any(report.reduction.values())
    assert torch.isfinite(torch.tensor(report.loss))
