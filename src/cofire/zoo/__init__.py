"""The zoo: small models that ship with cofire, trained here from scratch.

Each is a folder beside this file, a finished run without its checkpoints: model, recipe and result. So whatever takes
a run folder takes ``zoo.folder(NAME)``.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from cofire.errors import FileError, unknown
from cofire.files.atomic import read_json
from cofire.gates.persistence import gate_config_from
from cofire.gates.persistence import load as load_folder
from cofire.text import percent

_HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A model of the zoo, and what it does on its test set of ``n`` images; shares in [0, 1]."""

    name: str
    network: str
    data: str
    method: str
    n: int
    top1: float
    reduction: dict[str, float]

    def __str__(self) -> str:
        saved = f", {percent(self.reduction['executed+heads'])} of the MACs saved" if self.method != "dense" else ""
        told = f"{self.network} on {self.data}, {self.method}: top-1 {percent(self.top1, 2)} on {self.n} images{saved}"
        return f"{self.name}: {told}"


def names() -> list[str]:
    """All models of the zoo, in alphabetical order."""
    return sorted(path.parent.name for path in _HERE.glob("*/model.safetensors"))


def folder(name: str) -> Path:
    """The run folder of a model; it is not to be written to."""
    if name not in names():
        raise unknown("model in the zoo:", name, names())
    return _HERE / name


def entry(name: str) -> Entry:
    """What is known of a model."""
    result: dict[str, Any] = read_json(folder(name) / "result.json")
    experiment, test = result["experiment"], result["test"]
    return Entry(
        name=name,
        network=experiment["backbone"]["name"],
        data=experiment["data"]["name"],
        method=_method(folder(name), experiment),
        n=test["n"],
        top1=test["top1"],
        reduction=test["reduction"],
    )


def _method(run: Path, experiment: dict[str, Any]) -> str:
    """What makes the model cheaper than its network: pruning, gates, both or nothing."""
    parts = [f"{prune['type']}, {percent(prune['macs'], 0)} of the MACs"] if (prune := experiment.get("prune")) else []
    if gate := read_json(run / "config.json")["gate"]:
        parts.append(gate_config_from(gate, f"{run} gate").label)
    return " and ".join(parts) or "dense"


def copy(name: str, out: str | Path) -> Path:
    """A copy of the model's run folder, which must not exist yet; it is there as a whole or not at all."""
    out = Path(out)
    part = out.with_name(f"{out.name}.part")
    try:
        if out.exists():
            raise FileExistsError("it is there already")
        shutil.rmtree(part, ignore_errors=True)  # of a copy that was killed
        return Path(shutil.copytree(folder(name), part)).rename(out)
    except OSError as error:
        raise FileError(f"{out} must be a new folder that can be written: {error}") from error


def load(name: str) -> nn.Module:
    """A model of the zoo, in eval mode: a :class:`~cofire.GatedModel`, or a plain network."""
    return load_folder(folder(name))
