"""A model by its name on the command line, and what it expects of pictures."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from cofire import zoo
from cofire.backbones import Backbone, create_backbone, load_weights
from cofire.data.sources import MEAN, STD
from cofire.errors import ConfigError
from cofire.files.card import Card
from cofire.gates.gating import has_gates
from cofire.gates.persistence import load, read_card
from cofire.importing import imported

LIBRARIES = ("timm", "torchvision")
SIZE = 224


@dataclass(frozen=True)
class Named:
    """A model in eval mode, and its card."""

    model: nn.Module
    card: Card


def named_model(
    name: str,
    weights: str | Path | None = None,
    *,
    size: int | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
) -> Named:
    """The model that ``name`` stands for.

    Args:
        name: folder of a run or of a saved model; an ``.onnx`` file; ``zoo:NAME``; a registered backbone,
            ``timm:NAME`` or ``torchvision:NAME``, with ``weights``; or ``MODULE:FUNCTION``, which is imported, found
            from the current folder too, and called: run it only if you trust it.
        weights: a file of weights, or ``published:NAME``.
        size, mean, std: of the pictures, where the model does not say; default 224 and the colours of ImageNet.

    Raises:
        ConfigError: there is no such model, it has gates already, or its weights are not named.
    """
    folder = zoo.folder(name.removeprefix("zoo:")) if name.startswith("zoo:") else Path(name)
    has_weights = folder.is_dir() or is_file(folder)
    if has_weights and weights is not None:
        raise ConfigError(f"--weights goes with the name of a network, and {name} has weights of its own")
    if is_file(folder):
        found = model_of_file(folder, size=size, mean=mean, std=std)
    else:
        model = load(folder) if folder.is_dir() else _made(name, weights)
        card = read_card(folder) if folder.is_dir() else None
        if card is None:
            card = _card(model.input_shape if isinstance(model, Backbone) else (3, SIZE, SIZE))
        channels, height, width = card.input_shape
        found = _named(model, card, (channels, size or height, size or width), mean, std)
    if has_gates(found.model):
        raise ConfigError(f"{name} has gates already; speedup takes the dense network they were made for")
    return found


def is_file(path: Path) -> bool:
    """Whether it is the name of a file with a graph: ``.onnx``, or ``.pt2``, which `imported` says more of."""
    return path.suffix in (".onnx", ".pt2")


def model_of_file(
    path: Path, *, size: int | None, mean: tuple[float, ...] | None, std: tuple[float, ...] | None
) -> Named:
    """The model of an ONNX file, and what it expects of pictures."""
    graph = imported(path, None if size is None else (3, size, size))
    return _named(graph.model, graph.card or _card(graph.input_shape), graph.input_shape, mean, std)


def _card(shape: tuple[int, int, int]) -> Card:
    """A guess: the colours of ImageNet where there are three."""
    colours = (MEAN, STD) if shape[0] == 3 else ((0.5,) * shape[0], (0.5,) * shape[0])
    return Card(input_shape=shape, mean=colours[0], std=colours[1])


def _named(
    model: nn.Module,
    card: Card,
    shape: tuple[int, int, int],
    mean: tuple[float, ...] | None,
    std: tuple[float, ...] | None,
) -> Named:
    card = Card(input_shape=shape, mean=mean or card.mean, std=std or card.std, classes=card.classes, data=card.data)
    return Named(model.eval(), card)


def _made(name: str, weights: str | Path | None) -> nn.Module:
    module, _, function = name.partition(":")
    if function and module not in LIBRARIES:
        model = _called(module, function)
        if weights is not None:
            load_weights(model, weights)
        return model
    if weights is None:
        raise ConfigError(f"{name} is no folder, and as the name of a network it needs --weights FILE")
    return create_backbone(name, weights=weights)


def _called(module: str, function: str) -> nn.Module:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        model = vars(importlib.import_module(module))[function]()
    except KeyError:
        raise ConfigError(f"module {module} has no function {function!r}") from None
    except Exception as error:
        raise ConfigError(
            f"{module}:{function} must give a model, but raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{module}:{function} must give an nn.Module, got {type(model).__name__}")
    return model
