"""save / load: a folder with ``config.json`` and ``model.safetensors``. Loading never runs code from a file."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from cofire.backbones import Backbone, create_backbone
from cofire.errors import CofireError, ConfigError, FileError
from cofire.files.atomic import read_json
from cofire.files.card import Card
from cofire.files.strict import structure, unstructure
from cofire.files.tensors import MODEL_FORMAT, read_tensors, write_model
from cofire.gates.base import GateConfig, gate_types
from cofire.gates.gating import GatedModel, describe_backbone, gate, num_filters
from cofire.plugins import lookup


def save(model: nn.Module, folder: str | Path, card: Card | None = None) -> Path:
    """Write ``model``, gated or plain, into ``folder``; an older model there is replaced, its card too.

    A backbone of the registry, pruned or not, can be loaded without the code that made it; any other model needs to
    be handed to :func:`load` again.

    Args:
        card: what the model expects of images, and what is known of it; :func:`read_card` reads it.
    """
    described = model.describe() if isinstance(model, GatedModel) else _describe_plain(model)
    return write_model(
        folder, model.state_dict(), described if card is None else described | {"card": unstructure(card)}
    )


def _describe_plain(model: nn.Module) -> dict[str, Any]:
    shape = {"input_shape": list(model.input_shape)} if isinstance(model, Backbone) else {}
    return {"backbone": describe_backbone(model), "filters": num_filters(model), "gate": None, **shape}


def read_card(folder: str | Path) -> Card | None:
    """The card of the model in ``folder``; None if it has none, as those that cofire 0.1 saved."""
    path = Path(folder) / "config.json"
    table = _read_config(path).get("card")
    try:
        return None if table is None else structure(Card, table, "card")
    except ConfigError as error:
        raise FileError(f"{path} is damaged: {error}") from error


def load(folder: str | Path, model: nn.Module | None = None) -> nn.Module:
    """The model in ``folder``: a :class:`GatedModel`, or a plain one if it was saved without gates.

    Args:
        model: the plain model, needed if it is not one of cofire's backbones; a copy of it is filled. It may be as
            wide as it was before pruning.
    """
    folder = Path(folder)
    config = _read_config(folder / "config.json")
    tensors, _ = read_tensors(folder / "model.safetensors")
    try:
        loaded = rebuild(config, model, tensors, str(folder))
    except CofireError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError, OverflowError) as error:
        raise FileError(f"{folder / 'config.json'} is damaged: {error!r}") from error
    fill(loaded, tensors, str(folder))
    return loaded.eval()


def _read_config(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise FileError(
            f"{path.parent} holds no model: it has no config.json; `cofire train`, `cofire speedup` and cofire.save "
            "make such folders"
        )
    config = read_json(path)
    if not isinstance(config, Mapping) or config.get("format") != MODEL_FORMAT:
        found = config.get("format") if isinstance(config, Mapping) else config
        raise FileError(f"{path} must have format {MODEL_FORMAT!r}, got {found!r}")
    return config


def rebuild(config: Mapping[str, Any], model: nn.Module | None, tensors: Mapping[str, Tensor], where: str) -> nn.Module:
    """A model with the structure that ``config`` describes, as wide as ``tensors``, and fresh weights."""
    if model is None:
        if config["backbone"] is None:
            raise ConfigError(
                f"{where} holds a model that is not one of cofire's backbones: pass it, load(path, model=...)"
            )
        model = create_backbone(config["backbone"]["name"], **config["backbone"]["args"])
    if config.get("filters", num_filters(model)) != num_filters(model):  # it was pruned
        model = _narrowed(model, tensors)
    model = copy.deepcopy(model)
    shape = _shape(config["input_shape"]) if "input_shape" in config else None
    if isinstance(model, Backbone) and shape is not None:
        model.input_shape = shape
    if config["gate"] is None:
        return model
    groups = set(config["groups"])
    gate_config = gate_config_from(config["gate"], f"{where} gate")
    gated = gate(model, gate_config, filter_fn=lambda unit: unit.group in groups, input_shape=shape)
    if set(gated.gates) != groups:
        raise FileError(f"{where}: the model has no units {sorted(groups - set(gated.gates))}; is it the right one?")
    gated.threshold = config["threshold"]
    return gated


def _shape(values: Sequence[Any]) -> tuple[int, int, int]:
    channels, height, width = map(int, values)
    return channels, height, width


def _narrowed(model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy with layers cut to the width they have in ``tensors``; `fill` reports what still does not fit."""
    model = copy.deepcopy(model)
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
        for name, tensor in own.items():
            wanted = tensors.get(prefix + name, tensor).shape
            if len(wanted) == tensor.ndim and any(map(int.__lt__, wanted, tensor.shape)):
                resized = tensor.detach().new_empty(wanted)
                parameter = isinstance(tensor, nn.Parameter)
                setattr(module, name, nn.Parameter(resized, tensor.requires_grad) if parameter else resized)
        if isinstance(module, nn.Conv2d):
            if module.groups > 1:  # what left was whole groups of filters
                module.groups = len(module.weight) // (module.out_channels // module.groups)
            module.out_channels, module.in_channels = len(module.weight), module.weight.shape[1] * module.groups
        elif isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, _NormBase) and module.weight is not None:
            module.num_features = len(module.weight)
        elif isinstance(module, nn.PReLU):
            module.num_parameters = len(module.weight)
    return model


def gate_config_from(table: Mapping[str, Any], where: str) -> GateConfig:
    """A gate config from ``{type, fields}``."""
    return structure(lookup("gate type", str(table["type"]), gate_types), table["fields"], where)


def fill(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Load a state_dict, with an error that names what does not fit."""
    own = model.state_dict()
    missing, surplus = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    shapes = [key for key in own.keys() & tensors.keys() if own[key].shape != tensors[key].shape]
    for what, keys in (
        ("lacks", missing),
        ("has unknown", surplus),
        ("has other shapes for", sorted(shapes)),
    ):
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise FileError(f"{where} {what} {', '.join(keys[:3])}{more}; it belongs to another model")
    own.update(tensors)  # not a new dict: what modules note beside their tensors, such as a version, stays with it
    model.load_state_dict(own)
