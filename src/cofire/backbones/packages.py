"""Networks of timm and torchvision as backbones: ``timm:resnet18``, ``torchvision:resnet18``.

A name comes from a recipe or a model file, so it must be one that the package lists, and no argument may make the
package read another file: weights come from cofire alone.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from typing import Any, final

from torch import Tensor, nn

from cofire.backbones.registry import Backbone, Json, register_library
from cofire.errors import ConfigError

_WEIGHTS = ("pretrained", "weights", "checkpoint", "cache_dir")  # how arguments begin that name files or addresses


@final
class Packaged(Backbone):
    """A network of another package, in a submodule ``net``; files with the package's own keys can be loaded too."""

    def __init__(self, net: nn.Module, input_shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.net = net
        self.input_shape = input_shape

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    @staticmethod
    def own_key(key: str) -> str:
        return key if key.startswith("net.") else f"net.{key}"


@register_library("timm")
def from_timm(name: str, args: dict[str, Json]) -> Packaged:
    """A network of timm with random weights."""
    timm = _package("timm")
    _check("timm", name, timm.list_models(), args)
    net = _built("timm", name, lambda: timm.create_model(name, pretrained=False, **args))
    return Packaged(net, tuple(net.default_cfg["input_size"]))


@register_library("torchvision")
def from_torchvision(name: str, args: dict[str, Json]) -> Packaged:
    """A classifier of torchvision with random weights."""
    models = _package("torchvision.models")
    _check("torchvision", name, models.list_models(module=models), args)
    return Packaged(_built("torchvision", name, lambda: models.get_model(name, weights=None, **args)), (3, 224, 224))


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # torchvision beside another torch raises a RuntimeError
        package = name.partition(".")[0]
        raise ConfigError(
            f"backbones of {package} need the package {package}, which fails to import: {error}\n"
            f"{_way_out(package, error)}"
        ) from error


def _way_out(package: str, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"Install it into this environment: pip install {package}"
    return "It may be made for another version of torch; install torch, torchvision and timm together, in one command."


def _check(package: str, name: str, names: Sequence[str], args: dict[str, Json]) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ConfigError(f"{package} has no classifier named {name!r}{hint}")
    if refused := [key for key in args if key.startswith(_WEIGHTS)]:
        raise ConfigError(
            f"{refused[0]} is no argument of backbone '{package}:{name}' here: its weights are random, or come from a "
            "file that you name: [backbone] weights, or create_backbone(..., weights=FILE)"
        )


def _built(package: str, name: str, build: Any) -> Any:
    try:
        return build()
    except Exception as error:
        raise ConfigError(f"{package} cannot make {name!r}: {type(error).__name__}: {error}") from error
