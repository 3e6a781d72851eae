"""Atheris on the readers that are Python: ``make fuzz-python``. Whatever a file holds, the error is one of cofire's.

The first byte of a case says which reader gets the rest.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["cofire"]):
    from cofire import load, load_program
    from cofire.data.layouts import open_prepared, prepare
    from cofire.data.sources import cifar10
    from cofire.errors import CofireError
    from cofire.experiments.recipes import read_experiment
    from cofire.experiments.runs import read_result
    from cofire.files.tensors import read_tensors
    from cofire.importing import imported

GOLDEN = sorted((Path(__file__).parent / "golden" / "program_v1").glob("*.cofire"))[0].read_bytes()


def _tuning(folder: Path, content: bytes) -> None:
    (folder / "x.cofire").write_bytes(GOLDEN)
    (folder / "x.cofire.tuning").write_bytes(content)
    load_program(folder / "x.cofire")


def _parquet(folder: Path, content: bytes) -> None:
    for part in ("train", "val"):
        (folder / f"{part}.parquet").write_bytes(content)
    prepare(folder, folder / "home")


def _picture(folder: Path, content: bytes) -> None:
    for part in ("train", "val"):
        (folder / part / "a").mkdir(parents=True, exist_ok=True)
        (folder / part / "a" / "x.png").write_bytes(content)
    prepare(folder, folder / "home")


def _model(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    (folder / "model.safetensors").write_bytes(content)
    load(folder)


def _archive(folder: Path, content: bytes) -> None:
    (folder / "cifar-10-python.tar.gz").write_bytes(content)
    cifar10(folder)


def _file(name: str, read: object) -> object:
    def reads(folder: Path, content: bytes) -> None:
        (folder / name).write_bytes(content)
        read(folder / name if "." in name and name != "result.json" and name != "set.json" else folder)  # type: ignore[operator]

    return reads


READERS = [
    _tuning,
    _parquet,
    _picture,
    _model,
    _archive,
    _file("recipe.toml", read_experiment),
    _file("result.json", read_result),
    _file("set.json", open_prepared),
    _file("x.safetensors", read_tensors),
    _file("x.onnx", imported),
]


def one(data: bytes) -> None:
    """One case."""
    if not data:
        return
    with tempfile.TemporaryDirectory() as folder, suppress(CofireError):
        READERS[data[0] % len(READERS)](Path(folder), data[1:])  # type: ignore[operator]


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
