"""Weights that others published: where to get them, and how to know them again.

They are not part of cofire. A file of them, in any format that `load_weights` reads, goes into `weights_root` under its
name here; ``weights = "published:NAME"`` of a recipe, and ``create_backbone(..., weights="published:NAME")``, find it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cofire.errors import FileError, unknown

PREFIX = "published:"
_SUFFIXES = (".safetensors", ".pth", ".pt", ".th")


@dataclass(frozen=True, kw_only=True)
class Published:
    """One set of weights.

    Args:
        origin: where they come from.
        tensors: SHA-256 as `digest` takes it, so that the format of the file does not matter; or else
        file: how the SHA-256 of the original file begins.
    """

    origin: str
    tensors: str = ""
    file: str = ""


PUBLISHED = {
    "mobilenet_v1_imagenet": Published(
        origin="TensorFlow's MobileNetV1 1.0/224 checkpoint (github.com/tensorflow/models, research/slim), its "
        "variables renamed to those of cofire's mobilenet_v1_imagenet",
        tensors="6b41923e94581bfb55c493d1976db41e8b894ba60ff5a2f1d2e3837cea3b34f0",
    ),
    "resnet18_imagenet": Published(
        origin="torchvision (IMAGENET1K_V1), download.pytorch.org/models/resnet18-f37072fd.pth", file="f37072fd"
    ),
    "resnet20_cifar10": Published(
        origin="github.com/akamaster/pytorch_resnet_cifar10, pretrained_models/resnet20-12fca82f.th",
        tensors="8de90efa2e03ff0fb9d55520f6aea36dbd0c21ae8f0adfea479e620603d18c2b",
    ),
    "resnet34_imagenet": Published(
        origin="torchvision (IMAGENET1K_V1), download.pytorch.org/models/resnet34-b627a593.pth", file="b627a593"
    ),
    "resnet56_cifar10": Published(
        origin="github.com/akamaster/pytorch_resnet_cifar10, pretrained_models/resnet56-4bfd9763.th",
        tensors="0088e95d230427195d273c679370f806238e61907dfc855d0081d46e786c8c5e",
    ),
}


def weights_root() -> Path:
    """Where files of published weights lie: $COFIRE_WEIGHTS, else ~/.cache/cofire/weights."""
    return Path(os.environ.get("COFIRE_WEIGHTS") or Path.home() / ".cache" / "cofire" / "weights").expanduser()


def published_file(name: str) -> Path:
    """The file of published weights.

    Raises:
        FileError: it is not there; says where to get it and where to put it.
    """
    if name not in PUBLISHED:
        raise unknown("published weights", name, PUBLISHED)
    candidates = [weights_root() / f"{name}{suffix}" for suffix in _SUFFIXES]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise FileError(
            f"the published weights {name!r} are not here: get them from {PUBLISHED[name].origin}, and put the file "
            f"at {candidates[0]} (or {', '.join(_SUFFIXES[1:])}); the variable COFIRE_WEIGHTS names another folder"
        )
    return found


def verify(name: str, weights: Mapping[str, Tensor], path: Path) -> None:
    """Raise unless ``weights``, read from ``path``, are the published ones."""
    known = PUBLISHED[name]
    if known.tensors:
        kind, wanted, got = "tensors have", known.tensors, digest(weights)
    else:
        kind, wanted, got = "file has", known.file, hashlib.sha256(path.read_bytes()).hexdigest()
    if not got.startswith(wanted):
        raise FileError(
            f"{path} must hold the published weights {name!r}, whose {kind} SHA-256 {wanted}, got {got}; get them from "
            f"{known.origin}, or name your file itself as weights"
        )


def digest(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of the tensors as float32, in the order of their names, without batch norms' counters."""
    found = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        if not name.endswith("num_batches_tracked"):
            found.update(f"{name} {tuple(tensor.shape)};".encode())
            found.update(tensor.detach().cpu().to(torch.float32).contiguous().numpy().tobytes())
    return found.hexdigest()
