"""Models for other engines: batch norm folded away, and ONNX files, also of gated models."""

from __future__ import annotations

import copy
import io
import json
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from cofire.errors import TraceError
from cofire.extras import require
from cofire.files.atomic import write_atomically
from cofire.files.card import Card
from cofire.files.strict import unstructure
from cofire.gates.gating import GatedModel
from cofire.graph.graph import default_input_shape
from cofire.graph.tracing import trace_calls

INPUT, OUTPUT = "images", "logits"
MODEL_KEY, CARD_KEY = "cofire.model", "cofire.card"
"""Of a file's metadata: what a gated model is made of, and its card."""


def to_onnx(
    model: nn.Module,
    path: str | Path,
    input_shape: tuple[int, int, int] | None = None,
    *,
    batch: int | None = None,
    card: Card | None = None,
) -> Path:
    """Write ``model``, in eval mode, as an ONNX file with input ``images`` and output ``logits``.

    A gated model goes with its heads, its threshold as it is now, and its masks as multiplications: the file gives the
    same logits everywhere, but no other engine skips anything for it. `cofire.compile` finds the gates of one of
    cofire's backbones in the file again. Needs the package onnx.

    Args:
        model: plain or gated; it is left alone.
        input_shape: (C, H, W). Default: what the model was gated or made for, else 224 x 224.
        batch: images per call; by default any number.
        card: what the model expects of images; kept in the file's metadata.
    """
    write_atomically(Path(path), onnx_bytes(model, input_shape, batch=batch, card=card))
    return Path(path)


def onnx_bytes(
    model: nn.Module,
    input_shape: tuple[int, int, int] | None = None,
    *,
    batch: int | None = None,
    card: Card | None = None,
) -> bytes:
    """What `to_onnx` writes."""
    require("onnx", package="onnx", extra="export")
    default = model.graph.input_shape if isinstance(model, GatedModel) else default_input_shape(model)
    shape = input_shape or default
    model = copy.deepcopy(model).eval()  # a forward leaves the gates' last decisions behind
    like = next(model.parameters(), torch.zeros(1))
    images = torch.zeros(batch or 2, *shape, dtype=like.dtype, device=like.device)
    dynamic = {} if batch else {INPUT: {0: "batch"}, OUTPUT: {0: "batch"}}
    options: dict[str, Any] = {"input_names": [INPUT], "output_names": [OUTPUT], "dynamic_axes": dynamic}
    metadata = {} if card is None else {CARD_KEY: unstructure(card)}
    if isinstance(model, GatedModel):  # every weight as it is, under its name: the model can be made again of them
        options |= {"training": torch.onnx.TrainingMode.PRESERVE, "do_constant_folding": False}
        metadata[MODEL_KEY] = model.describe()
    content: Any = io.BytesIO()
    try:
        # The older of torch's two exporters: the newer one also needs onnxscript, and gives the same graph here.
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # it is said to be old, and to have seen checks of shapes
            torch.onnx.export(model, (images,), content, dynamo=False, **options)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise TraceError(f"the model cannot be written as ONNX for images of shape {shape}: {reason}") from error
    return _with_metadata(content.getvalue(), metadata)


def _with_metadata(content: bytes, metadata: Mapping[str, Any]) -> bytes:
    if not metadata:
        return content
    onnx = require("onnx", package="onnx", extra="export")
    model = onnx.load_from_string(content)
    for key, table in metadata.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, json.dumps(table)
    written: bytes = model.SerializeToString()
    return written


def folded(model: nn.Module, input_shape: tuple[int, int, int] | None = None) -> fx.GraphModule:
    """A copy of a plain model in eval mode, in which each batch norm has become part of the conv before it."""
    model = copy.deepcopy(model).eval()
    return fx.GraphModule(model, fold_norms(trace_calls(model, input_shape or default_input_shape(model)), model))


def fold_norms(calls: fx.Graph, model: nn.Module) -> fx.Graph:
    """Fold batch norms into the convs of ``model``, which is changed as ``calls`` is.

    Only where the norm alone reads the conv, and neither module is called elsewhere. Other calls keep their names.
    """
    num_calls = Counter(str(node.target) for node in calls.nodes if node.op == "call_module")
    for norm in list(calls.nodes):
        conv = norm.all_input_nodes[0] if norm.op == "call_module" else norm
        if norm.op != "call_module" or conv.op != "call_module" or len(conv.users) > 1:
            continue
        names = str(conv.target), str(norm.target)
        first, second = (model.get_submodule(name) for name in names)
        if any(num_calls[name] > 1 for name in names):
            continue
        if type(first) is nn.Conv2d and type(second) is nn.BatchNorm2d:
            model.set_submodule(names[0], fuse_conv_bn_eval(first, second))
            norm.replace_all_uses_with(conv)
            calls.erase_node(norm)
    return calls
