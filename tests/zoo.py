"""torchvision and timm for tests, wherever they can be imported.

torchvision's compiled part fits one build of torch only. The models do without it, but the package does not import
unless two of its operators are at least declared.
"""

from __future__ import annotations

import importlib.util
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

_declared = torch.library.Library("torchvision", "FRAGMENT")  # the declarations live as long as this


def _why_not() -> str:
    """Text of the error that importing the two packages ends in; empty if there is none."""
    try:
        spec = importlib.util.find_spec("torchvision")
        for compiled in Path(spec.origin).parent.glob("_C.*") if spec and spec.origin else ():
            with suppress(OSError):
                torch.ops.load_library(compiled)
        for operator in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, operator):
                _declared.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import timm  # noqa: F401
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError) as error:
        return f"torchvision and timm are needed: {error}"
    return ""


why_not = _why_not()


def build(name: str, **options: Any) -> nn.Module:
    """``torchvision/resnet18`` or ``timm/resnet18`` with random weights, the same each time, in eval mode."""
    library, model = name.split("/")
    torch.manual_seed(0)
    if library == "timm":
        import timm

        return timm.create_model(model, pretrained=False, **options).eval()
    import torchvision

    return torchvision.models.get_model(model, weights=None, **options).eval()
