"""The registry of backbones: a name and its arguments -> a plain CNN, with or without stored weights."""

from __future__ import annotations

import fnmatch
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import safetensors.torch
import torch
from torch import Tensor, nn

from cofire.backbones.published import PREFIX, published_file, verify
from cofire.errors import ConfigError, FileError, unknown
from cofire.plugins import load_installed, lookup

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


@dataclass(frozen=True, kw_only=True)
class BackboneSpec:
    """All that is needed to build a backbone again: ``create_backbone(spec.name, **spec.args)``.

    ``args`` holds every argument, also the ones left at their default, so that a stored spec keeps its
    meaning when a default changes.
    """

    name: str
    args: dict[str, Json]


class Backbone(nn.Module, ABC):
    """Base of our networks: images (B, C, H, W) -> logits (B, num_classes).

    Attributes:
        spec: name and arguments it was made with; set by `create_backbone`.
        input_shape: the (C, H, W) it was made for; set by `create_backbone`.
    """

    spec: BackboneSpec
    input_shape: tuple[int, int, int]

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor: ...

    @staticmethod
    def own_key(key: str) -> str:
        """Our name of a state-dict key; overridden where checkpoints with other names are common."""
        return key


@dataclass(frozen=True, kw_only=True)
class _Entry:
    factory: Callable[..., Backbone]
    input_shape: tuple[int, int, int]

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.factory).parameters


Library: TypeAlias = Callable[[str, dict[str, Json]], Backbone]
"""(name, arguments) -> a network of another package, its ``input_shape`` set."""

_entries: dict[str, _Entry] = {}
_libraries: dict[str, Library] = {}
_Factory = TypeVar("_Factory", bound=Callable[..., Backbone])


def register_backbone(name: str, *, input_shape: tuple[int, int, int]) -> Callable[[_Factory], _Factory]:
    """Decorator that makes a factory known to `create_backbone` under ``name``.

    Args:
        name: must not be taken yet.
        input_shape: the (C, H, W) of the images the network is made for.

    The factory's signature, such as ``(num_classes: int = 10, *, width: float = 1.0)``, says which arguments
    there are, their types and their defaults.
    """

    def register(factory: _Factory) -> _Factory:
        if name in _entries:
            raise ConfigError(f"backbone {name!r} is registered already; choose another name")
        entry = _Entry(factory=factory, input_shape=input_shape)
        if "num_classes" not in entry.parameters:
            raise ConfigError(f"the factory of backbone {name!r} must take num_classes, got {list(entry.parameters)}")
        _entries[name] = entry
        return factory

    return register


def register_library(prefix: str) -> Callable[[Library], Library]:
    """Decorator that makes ``prefix:NAME`` known to `create_backbone` for every NAME that the function can build."""

    def register(library: Library) -> Library:
        _libraries[prefix] = library
        return library

    return register


def list_backbones(pattern: str | None = None) -> list[str]:
    """Names of all registered backbones in alphabetical order, or of those that match ``pattern``.

    >>> list_backbones("resnet?0")
    ['resnet20', 'resnet50']
    """
    load_installed()
    return sorted(_entries) if pattern is None else fnmatch.filter(sorted(_entries), pattern)


def create_backbone(
    name: str,
    *,
    num_classes: int | None = None,
    weights: str | Path | None = None,
    new_head: bool = False,
    **args: Json,
) -> Backbone:
    """A new network of a registered architecture, or of another package.

    Args:
        name: one of `list_backbones`, or ``timm:NAME`` or ``torchvision:NAME``, e.g. ``timm:resnet18``.
        num_classes: number of logits; by default as many as ``weights`` have, without them 10 for CIFAR-sized and 1000
            for ImageNet-sized networks.
        weights: a file or a name for `load_weights`; by default the weights are random.
        new_head: the weights are of a network with other classes: its last layer stays random here.
        args: the architecture's own arguments, such as ``width`` of the MobileNets.
    """
    make = _from_library if ":" in name else _registered
    model = make(name, args if num_classes is None else {"num_classes": num_classes, **args})
    if weights is None:
        return model
    if num_classes is None and not new_head and (classes := _other_classes(model, weights)) is not None:
        model = make(name, {"num_classes": classes, **args})
    load_weights(model, weights, new_head=new_head)
    return model


def _other_classes(model: Backbone, path: str | Path) -> int | None:
    """How many classes a file's network has, if they are all that keeps its weights from fitting ``model``."""
    if str(path).startswith(PREFIX):
        return None
    weights = _own_names(model, Path(path))
    return next((len(weights[key]) for key in _of_other_classes(model, weights)), None)


def _registered(name: str, given: Mapping[str, Json]) -> Backbone:
    entry = lookup("backbone", name, lambda: _entries)
    spec = BackboneSpec(name=name, args=_complete_args(name, entry.parameters, given))
    model = entry.factory(**spec.args)
    if not isinstance(model, Backbone):
        raise ConfigError(f"the factory of backbone {name!r} must return a Backbone, got {type(model).__name__}")
    model.spec = spec
    model.input_shape = entry.input_shape
    return model


def _from_library(name: str, given: Mapping[str, Json]) -> Backbone:
    prefix, _, inner = name.partition(":")
    library = lookup("library of backbones", prefix, lambda: _libraries)
    spec = BackboneSpec(name=name, args={"num_classes": 1000, **given})
    model = library(inner, spec.args)
    model.spec = spec
    return model


def _complete_args(
    name: str, parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Json]
) -> dict[str, Json]:
    """``given`` with the defaults filled in; a value must have the type of its default."""
    for key in given:
        if key not in parameters:
            raise unknown(f"argument of backbone {name!r}", key, parameters)
    complete: dict[str, Json] = {}
    for key, parameter in parameters.items():
        value = given.get(key, parameter.default)
        if value is inspect.Parameter.empty:
            raise ConfigError(f"backbone {name!r} must be given {key}")
        kind = int if key == "num_classes" else type(parameter.default)
        if kind in (bool, int, float, str):
            if type(value) is not kind and (kind, type(value)) != (float, int):
                raise ConfigError(f"{key} of backbone {name!r} must be of type {kind.__name__}, got {value!r}")
            value = kind(value)
        if key == "num_classes" and value < 1:
            raise ConfigError(f"num_classes of backbone {name!r} must be at least 1, got {value}")
        complete[key] = value
    return complete


def init_weights(model: nn.Module) -> None:
    """Random weights in place: Kaiming normal (fan out) for convs, the identity for batch norms.

    The fan is that of one group: `nn.init.kaiming_normal_` does not know of groups, and the signal of a fresh
    MobileNet would vanish in its depthwise convs.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels // module.groups * math.prod(module.kernel_size)
            nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)


def load_weights(model: nn.Module, path: str | Path, *, new_head: bool = False) -> None:
    """Fill ``model`` with the weights of a file; the model is left alone if they do not fit.

    A ``.safetensors`` file is read as such, any other as a PyTorch checkpoint of plain tensors
    (``weights_only=True``: nothing in it is executed). The wrapper ``{"state_dict": ...}`` and the prefix
    ``module.`` of data-parallel checkpoints are taken off, and a `Backbone` translates foreign keys by its
    ``own_key``. Every key must be there in its shape, but for batch norm's ``num_batches_tracked``.

    ``published:NAME`` is one of `cofire.backbones.published`; what its file holds is checked.

    Args:
        new_head: leave the model's last layer as it is, for weights of a network with another number of classes.
    """
    name = str(path).removeprefix(PREFIX) if str(path).startswith(PREFIX) else None
    path = Path(path) if name is None else published_file(name)
    weights = _own_names(model, path)
    head = _of_other_classes(model, weights)
    _check_fit(model, weights, path, head, new_head)
    if name is not None:
        verify(name, weights, path)
    model.load_state_dict({key: tensor for key, tensor in weights.items() if key not in head}, strict=False)


def _of_other_classes(model: nn.Module, weights: Mapping[str, Tensor]) -> set[str]:
    """The tensors of the last layer, if the weights have another number of classes and differ in nothing else."""
    wanted = model.state_dict()
    other = {key for key, tensor in wanted.items() if key in weights and weights[key].shape != tensor.shape}
    sizes = {(len(wanted[key]), len(weights[key])) for key in other if weights[key].shape[1:] == wanted[key].shape[1:]}
    layers = {key.rpartition(".")[0] for key in other}
    only_rows = all(weights[key].shape[1:] == wanted[key].shape[1:] for key in other)
    return other if only_rows and len(sizes) == len(layers) == 1 else set()


def _own_names(model: nn.Module, path: Path) -> dict[str, Tensor]:
    """What a file holds, in the model's names."""
    found = _read_tensors(path)
    if all(key.startswith("module.") for key in found):
        found = {key.removeprefix("module."): tensor for key, tensor in found.items()}
    weights: dict[str, Tensor] = {}
    for key, tensor in found.items():
        own_key = model.own_key(key) if isinstance(model, Backbone) else key
        if own_key in weights:
            raise FileError(f"weights file {path.name!r} holds {own_key!r} twice, under different names")
        weights[own_key] = tensor
    return weights


def _check_fit(model: nn.Module, weights: Mapping[str, Tensor], path: Path, head: set[str], new_head: bool) -> None:
    wanted = model.state_dict()
    missing = [key for key in wanted if key not in weights and not key.endswith("num_batches_tracked")]
    unexpected = [key for key in weights if key not in wanted]
    misshaped = [
        f"{key} must be {tuple(tensor.shape)}, got {tuple(weights[key].shape)}"
        for key, tensor in wanted.items()
        if key in weights and weights[key].shape != tensor.shape and not (new_head and key in head)
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "wrong shape": misshaped}
    problems = [f"{kind}: {_first_few(items)}" for kind, items in kinds.items() if items]
    if problems:
        hint = "; they are of a network with other classes: new_head=True keeps a fresh last layer" if head else ""
        network = model.spec.name if isinstance(model, Backbone) else type(model).__name__
        raise FileError(f"weights file {path.name!r} does not fit {network}; " + "; ".join(problems) + hint)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileError(f"weights file '{path}' does not exist")
    try:
        content: Any
        if path.suffix == ".safetensors":
            content = safetensors.torch.load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can fail anywhere in its parser
        reason = str(error).strip().partition("\n")[0].partition(". ")[0] or type(error).__name__
        raise FileError(
            f"weights file '{path}' is truncated, damaged or holds more than tensors: {reason}; write it with "
            "torch.save(model.state_dict(), FILE)"
        ) from error
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items()
    ):
        raise FileError(f"weights file '{path}' must hold a state dict of tensors, got {type(content).__name__}")
    return dict(content)


def _first_few(items: Iterable[str], count: int = 3) -> str:
    items = list(items)
    rest = f" and {len(items) - count} more" if len(items) > count else ""
    return ", ".join(items[:count]) + rest
