"""A plain model as the ONNX file that every other engine is given."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import fx, nn

from cofire.export import folded, onnx_bytes


def portable_onnx(model: nn.Module, x: NDArray[np.float32]) -> bytes:
    """``model`` for batches shaped like ``x``: batch norm folded, strided slices as pooling, which ncnn knows."""
    _, channels, height, width = x.shape
    shape = (channels, height, width)
    return onnx_bytes(pooled_slices(folded(model, shape)), shape, batch=len(x))


def pooled_slices(module: fx.GraphModule) -> fx.GraphModule:
    """``module`` with ``x[:, :, ::s, ::s]`` written as a pooling of windows of one pixel, in place."""
    for node in module.graph.nodes:
        step = _step(node.args[1]) if node.target is operator.getitem else None
        if step is not None:
            node.target, node.args = F.max_pool2d, (node.args[0], 1, step)
    module.recompile()
    return module


def _step(index: Any) -> tuple[int, int] | None:
    """(s, t) of the index ``:, :, ::s, ::t``; None for any other."""
    if not (isinstance(index, tuple) and len(index) == 4 and all(isinstance(part, slice) for part in index)):
        return None
    steps = [part.step or 1 for part in index if (part.start, part.stop) == (None, None)]
    return (steps[2], steps[3]) if len(steps) == 4 and steps[:2] == [1, 1] else None
