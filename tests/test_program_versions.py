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

FOLDER = Path(__file__).parent / "golden" / "program_v1"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.cofire"))
NOTES = json.loads((FOLDER / "results.json").read_text())


def test_there_are_programs_of_version_1() -> None:
    assert len(PROGRAMS) == 7
    for name in PROGRAMS:
        assert rb"\"version\": 1," in (FOLDER / f"{name}.cofire").read_bytes()


@pytest.mark.parametrize("reader", ["python", "native"])
@pytest.mark.parametrize("kernel", ["ref", "v2", "v3", "v4"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_version_1_gives_what_it_gave(name: str, kernel: str, reader: str) -> None:
    """Bit for bit on the CPU that made the results (cofire 0.1 made them), nearly so elsewhere."""
    if WHY_NOT.get(kernel):
        pytest.skip(WHY_NOT[kernel])
    results = load_file(FOLDER / "results.safetensors")
    program, x = read(FOLDER / f"{name}.cofire"), results[f"{name} x"]
    tuning = "" if kernel == "ref" else NOTES["tunings"][f"{name} {kernel}"]
    engine = with_kernel(kernel, program, tuning)
    if reader == "native":  # which reads the old file itself; Python's has made a new one of it
        engine._native = _native.Engine((FOLDER / f"{name}.cofire").read_bytes(), kernel, tuning)
    found = {"out": engine(x)}
    for what, values in (("mask", engine.last_masks), ("logits", engine.logits(x)), ("macs", engine.last_macs)):
        found |= {f"{what} {key}": torch.as_tensor(value) for key, value in values.items()}
    prefix = f"{name} {kernel} "
    wanted = {key.removeprefix(prefix): value for key, value in results.items() if key.startswith(prefix)}
    assert found.keys() == wanted.keys()
    exact = NOTES["made on"] == this_cpu()
    for key, value in found.items():
        same = torch.equal(value, wanted[key])
        assert same or (not exact and torch.allclose(value.double(), wanted[key].double(), atol=1e-4)), key
