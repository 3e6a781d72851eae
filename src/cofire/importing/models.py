"""Any graph -> the module that computes it, and the size of its images."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.export import ExportedProgram

from cofire.errors import CofireError, CompileError, ConfigError, FileError
from cofire.export import CARD_KEY, MODEL_KEY
from cofire.files.card import Card
from cofire.files.strict import structure
from cofire.gates.persistence import fill, rebuild
from cofire.importing import exported, onnx_graph
from cofire.importing.onnx_file import OnnxGraph, read_onnx


class Imported(NamedTuple):
    """A module in eval mode, (C, H, W) of an image, and the card that cofire left in the file."""

    model: nn.Module
    input_shape: tuple[int, int, int]
    card: Card | None = None


def imported(source: str | Path | ExportedProgram, input_shape: tuple[int, int, int] | None = None) -> Imported:
    """The network of an ``.onnx`` file or of a program of `torch.export`, in float32, for any batch.

    A file that `cofire.export.to_onnx` wrote of a gated model gives that gated model again.

    Args:
        input_shape: (C, H, W), needed where an ONNX file leaves sizes open.

    Raises:
        ConfigError: another kind of file, or a shape that does not fit.
        FileError: the file is missing or damaged.
        CompileError: names a node that there is nothing like.
    """
    if isinstance(source, ExportedProgram):
        shape = exported.input_shape_of(source, input_shape)
        return Imported(exported.module_of(source, shape), shape)
    if not isinstance(source, (str, Path)):
        raise ConfigError(f"a model, the path of an .onnx file or a program of torch.export is needed, got {source!r}")
    path = Path(source)
    if path.suffix != ".onnx":
        why = "reading it can run code from it: torch.export.load it yourself, if you trust it, and compile the result"
        told = why if path.suffix == ".pt2" else "a path must be that of an .onnx file"
        raise ConfigError(f"{path} cannot be compiled: {told}")
    graph = read_onnx(path)
    shape = onnx_graph.input_shape_of(graph, path, input_shape)
    model = _gated(graph, path) if MODEL_KEY in graph.metadata else onnx_graph.module_of(graph, shape)
    return Imported(model, shape, _card(graph, path))


def _card(graph: OnnxGraph, path: Path) -> Card | None:
    if CARD_KEY not in graph.metadata:
        return None
    try:
        return structure(Card, json.loads(graph.metadata[CARD_KEY]), "card")
    except (ConfigError, ValueError, RecursionError) as error:
        raise FileError(f"{path} is damaged: {error}") from error


def _gated(graph: OnnxGraph, path: Path) -> nn.Module:
    """The model that the file was written of; its weights have their names in it."""
    tensors: dict[str, Tensor] = dict(graph.constants)
    for node in graph.nodes:
        if node.kind == "Identity" and node.inputs[0] in tensors:  # exporters keep equal tensors once
            tensors[node.outputs[0]] = tensors[node.inputs[0]]
    try:
        config: Mapping[str, Any] = json.loads(graph.metadata[MODEL_KEY])
        if config["backbone"] is None:
            raise CompileError(
                f"{path} holds a gated model that is not one of cofire's backbones, so that its gates cannot be told "
                "from the file: compile the model itself, cofire.compile(gated), or export the dense network"
            )
        model = rebuild(config, None, tensors, str(path))
        own = model.state_dict()
        untold = {name: own[name] for name in own if name.endswith("num_batches_tracked")}  # only training asks for it
        fill(model, untold | {name: tensor for name, tensor in tensors.items() if name in own}, str(path))
    except CofireError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise FileError(f"{path} is damaged: {error!r}") from error
    return model.eval()
