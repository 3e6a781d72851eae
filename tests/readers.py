"""The readers of files from elsewhere that are Python: name -> what one file's content goes through.

The names are those of folders in ``attacks/``, whose files are the seeds of ``fuzz_python.py``. ``test_readers.py``
reads every one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from cofire import FTWT, create_backbone, gate, load, load_program, save
from cofire.data import archives
from cofire.data.layouts import open_prepared, prepare
from cofire.errors import CofireError
from cofire.experiments.recipes import read_experiment
from cofire.experiments.runs import read_result
from cofire.files.tensors import read_tensors
from cofire.importing import imported
from cofire.runtime import _native

ATTACKS = Path(__file__).parents[1] / "attacks"
PROGRAM = ATTACKS / "program" / "plain.cofire"


def _written(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@cache
def _weights() -> bytes:
    """Of the model that ``configs/plain.json`` describes."""
    with tempfile.TemporaryDirectory() as folder:
        save(gate(create_backbone("resnet8_digits"), FTWT()), folder)
        return (Path(folder) / "model.safetensors").read_bytes()


@cache
def _shards() -> dict[str, bytes]:
    """Of a set of one picture in each part."""
    with tempfile.TemporaryDirectory() as folder:
        origin, home = Path(folder) / "origin", Path(folder) / "home"
        for part in ("train", "val"):
            _written(origin / part / "a" / "x.png", (ATTACKS / "pictures" / "plain.png").read_bytes())
        prepare(origin, home)
        return {str(path.relative_to(home)): path.read_bytes() for path in home.rglob("*") if path.is_file()}


def _recipe(folder: Path, content: bytes) -> None:
    read_experiment(_written(folder / "recipe.toml", content))


def _result(folder: Path, content: bytes) -> None:
    """The file of a run, and then of its static twin."""
    _written(folder / "experiment.json", b"{}")
    _written(folder / "result.json", content)
    with suppress(CofireError):
        read_result(folder)
    _written(folder / "result.json", b'{"test": {}}')
    _written(folder / "twin" / "result.json", content)
    read_result(folder)


def _config(folder: Path, content: bytes) -> None:
    _written(folder / "config.json", content)
    _written(folder / "model.safetensors", _weights())
    load(folder)


def _tensors(folder: Path, content: bytes) -> None:
    read_tensors(_written(folder / "model.safetensors", content))


def _tuning(folder: Path, content: bytes) -> None:
    """``MACHINE`` stands for this one: a tuning of another is not looked at."""
    program = _written(folder / "x.cofire", PROGRAM.read_bytes())
    _written(folder / "x.cofire.tuning", content.replace(b"MACHINE", _native.machine().encode()))
    load_program(program)


def _parquet(folder: Path, content: bytes) -> None:
    for part in ("train", "val"):
        _written(folder / f"{part}.parquet", content)
    prepare(folder, folder / "home")


def _picture(folder: Path, content: bytes) -> None:
    for part in ("train", "val"):
        _written(folder / part / "a" / "x.png", content)
    prepare(folder, folder / "home")


def _set(folder: Path, content: bytes) -> None:
    """Beside the shards of ``plain.json``."""
    for name, shard in _shards().items():
        _written(folder / name, shard)
    _written(folder / "set.json", content)
    open_prepared(folder)


def _archive(folder: Path, content: bytes) -> None:
    """Beyond the checksum, which no other file passes."""
    del folder
    for archive in archives.ARCHIVES["cifar10"]:
        with suppress(CofireError):
            archives._unpacked(archive, content, "archive")


def _onnx(folder: Path, content: bytes) -> None:
    imported(_written(folder / "x.onnx", content))


READERS: dict[str, Callable[[Path, bytes], None]] = {
    "recipes": _recipe,
    "results": _result,
    "configs": _config,
    "tensors": _tensors,
    "tunings": _tuning,
    "parquet": _parquet,
    "pictures": _picture,
    "sets": _set,
    "archives": _archive,
    "onnx": _onnx,
}
