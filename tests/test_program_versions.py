"""Program files of every version that was ever written still load, and give what they gave when they were made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_golden import this_cpu
from test_kernels import WHY_NOT, with_kernel

from cofire.runtime import _native
from cofire.runtime.program_file import read


def _folder(version: int) -> Path:
    return Path(__file__).parent / "golden" / f"program_v{version}"


VERSIONS = (1, 2)
PROGRAMS = [(version, path.stem) for version in VERSIONS for path in sorted(_folder(version).glob("*.cofire"))]


@pytest.mark.parametrize(("version", "count"), [(1, 7), (2, 6)])
def test_there_are_programs_of_every_version(version: int, count: int) -> None:
    paths = sorted(_folder(version).glob("*.cofire"))
    assert len(paths) == count
    for path in paths:
        assert rf"\"version\": {version},".encode() in path.read_bytes()


@pytest.mark.parametrize("reader", ["python", "native"])
@pytest.mark.parametrize("kernel", ["ref", "v2", "v3", "v4"])
@pytest.mark.parametrize(("version", "name"), PROGRAMS)
def test_an_old_program_gives_what_it_gave(version: int, name: str, kernel: str, reader: str) -> None:
    """Bit for bit on the CPU that made the results (the code of its day made them), nearly so elsewhere."""
    if WHY_NOT.get(kernel):
        pytest.skip(WHY_NOT[kernel])
    folder = _folder(version)
    notes, results = json.loads((folder / "results.json").read_text()), load_file(folder / "results.safetensors")
    program, x = read(folder / f"{name}.cofire"), results[f"{name} x"]
    tuning = "" if kernel == "ref" else notes["tunings"][f"{name} {kernel}"]
    engine = with_kernel(kernel, program, tuning)
    if reader == "native":  # which reads the old file itself; Python's has made a new one of it
        engine._native = _native.Engine((folder / f"{name}.cofire").read_bytes(), kernel, tuning)
    found = {"out": engine(x)}
    for what, values in (("mask", engine.last_masks), ("logits", engine.logits(x)), ("macs", engine.last_macs)):
        found |= {f"{what} {key}": torch.as_tensor(value) for key, value in values.items()}
    prefix = f"{name} {kernel} "
    wanted = {key.removeprefix(prefix): value for key, value in results.items() if key.startswith(prefix)}
    assert found.keys() == wanted.keys()
    exact = notes["made on"] == this_cpu()
    for key, value in found.items():
        same = torch.equal(value, wanted[key])
        assert same or (not exact and torch.allclose(value.double(), wanted[key].double(), atol=1e-4)), key
