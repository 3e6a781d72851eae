"""Small models and images that several test files share; each is a function of its seed alone."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cofire import FTWT, Backbone, GatedModel, create_backbone, data, gate
from cofire.data import Images

ROOT = Path(__file__).parents[1]
SHARED = Path(os.environ.get("COFIRE_SHARED", Path(__file__).parents[2] / "shared"))  # real data and weights, if any


def tiny_images(n: int = 48, labelled: bool = True) -> Images:
    """Learnable 8x8 images of 10 classes."""
    images = data.synthetic(n, (1, 8, 8), classes=10)
    return images if labelled else Images(**{**vars(images), "label_N": None})


def tiny_plain(seed: int = 0) -> Backbone:
    torch.manual_seed(seed)
    return create_backbone("resnet8_digits")


def tiny_gated(seed: int = 0, **options: Any) -> GatedModel:
    return gate(tiny_plain(seed), FTWT(**options))


def digest(model: nn.Module) -> str:
    """One text for all parameters and buffers, bit by bit."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(name.encode())
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class OwnNet(nn.Module):
    """A user's network that is not in the registry; 3 classes, 3x8x8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.last(x.mean((2, 3)))  # type: ignore[no-any-return]
