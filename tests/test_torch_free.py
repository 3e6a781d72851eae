"""A program runs where numpy is all there is; `import cofire` loads PyTorch only for who asks for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small import tiny_gated, tiny_plain

import cofire

# What a folder with numpy and cofire alone would have; everything else cannot be imported.
ALONE = """
import sys, sysconfig
ALLOWED = {"numpy", "cofire", "_cofire_editable", *sys.stdlib_module_names}
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in ALLOWED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nothing())
"""
RUN = """
import json, sys, numpy as np, cofire
engine = cofire.load_program(sys.argv[1])
x = np.load(sys.argv[2])
out = engine(x)
masks, macs = engine.last_masks, engine.last_macs
np.savez(sys.argv[3], out=out, logits=np.concatenate([*engine.logits(x).values()] or [out], 1),
         masks=np.concatenate([*masks.values()] or [out], 1), macs=np.stack([*macs.values()]))
engine.threshold = 1e9
engine(x)
engine.profile(x, rounds=1)
print(json.dumps([engine.input_shape, engine.output_shape, engine.groups, cofire.__version__]))
assert "torch" not in sys.modules
"""


def alone(code: str, *arguments: object) -> str:
    """Output of ``code`` in a process that has numpy and cofire alone; it must succeed."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("make", [tiny_gated, tiny_plain])
def test_a_program_gives_the_same_bits_without_torch(make: type, tmp_path: Path) -> None:
    cofire.compile(make()).save(tmp_path / "a.cofire")
    engine = cofire.load_program(tmp_path / "a.cofire")
    x_BCHW = np.random.default_rng(0).standard_normal((3, *engine.input_shape)).astype(np.float32)
    np.save(tmp_path / "x.npy", x_BCHW)
    told = json.loads(alone(RUN, tmp_path / "a.cofire", tmp_path / "x.npy", tmp_path / "found.npz"))
    assert told == [
        list(engine.input_shape),
        list(engine.output_shape),
        {group.name: group.filters for group in engine.program.groups},
        cofire.__version__,
    ]
    found = np.load(tmp_path / "found.npz")
    assert found["out"].tobytes() == engine(x_BCHW).tobytes()
    assert np.array_equal(found["macs"], np.stack([*engine.last_macs.values()]))
    if engine.groups:
        assert np.array_equal(found["masks"], np.concatenate([*engine.last_masks.values()], 1))
        assert np.array_equal(found["logits"], np.concatenate([*engine.logits(x_BCHW).values()], 1))


def test_what_needs_torch_says_so() -> None:
    code = """
import cofire
try:
    cofire.gate
except ImportError as error:
    print(error)
try:
    cofire.gait
except AttributeError as error:
    print(error)
try:
    cofire.load_program("gone.cofire")
except cofire.FileError as error:
    print(error)
"""
    assert alone(code).splitlines() == [
        "cofire.gate needs torch, which is not installed: pip install cofire",
        "module 'cofire' has no attribute 'gait'",
        "gone.cofire cannot be read: [Errno 2] No such file or directory: 'gone.cofire'",
    ]


def test_import_cofire_loads_neither_torch_nor_the_command_line() -> None:
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, cofire; print(*sys.modules)"], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "numpy" in loaded
    assert set(loaded) & {"torch", "rich", "typer", "safetensors", "accelerate"} == set()


def test_every_public_name_is_there_and_no_file_hides_it() -> None:
    """`cofire.estimate` is a function, also after its file of the same name was imported by another way."""
    code = """
import importlib, types, cofire
for name in cofire.__all__:
    try:
        importlib.import_module(f"cofire.{name}")
    except ModuleNotFoundError:
        pass
files = {name for name in cofire.__all__ if isinstance(getattr(cofire, name), types.ModuleType)}
assert files == {"analysis", "data", "signatures", "zoo"}, files
assert set(cofire.__all__) <= set(dir(cofire))
from cofire import *
assert estimate is cofire.estimate
print(cofire.experiments.__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "cofire.experiments\n"), done.stderr
