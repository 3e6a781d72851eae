"""python tests/alone.py PYTHON FOLDER [JSON]: does a program give the same bits where numpy and cofire are alone?

Prints what the import takes there, and what cofire takes on disk, which are to stay below 0.15 s and 15 MB. JSON is
where to keep the figures. `make wheels` makes PYTHON and FOLDER and calls it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

import cofire
from cofire.experiments.provenance import provenance
from cofire.files.atomic import write_json

ROUNDS = 15
MEGABYTES = 15
THERE = """
import sys, time
begin = time.perf_counter()
import numpy as np
numpy_there = time.perf_counter()
import cofire
end = time.perf_counter()
import json, pathlib
root = pathlib.Path(cofire.__file__).parent
x = np.load("x.npy")
np.save("there.npy", cofire.load_program("program.cofire")(x))
assert "torch" not in sys.modules
print(json.dumps({
    "numpy_seconds": numpy_there - begin,
    "cofire_seconds": end - numpy_there,
    "megabytes": sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) / 1e6,
    "place": str(root),
}))
"""


def main(python: str, folder: Path, kept: Path | None = None) -> None:
    """Compile here, run there, compare."""
    engine = cofire.compile(cofire.zoo.load("resnet20_cifar10_ftwt"))
    engine.save(folder / "program.cofire")
    x_BCHW = np.random.default_rng(0).standard_normal((8, *engine.input_shape)).astype(np.float32)
    np.save(folder / "x.npy", x_BCHW)
    command = [str(Path(python).absolute()), "-I", "-c", THERE]
    rounds = [
        json.loads(subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout)
        for _ in range(1 + ROUNDS)
    ][1:]  # the first fills the caches
    told = {key: statistics.median(one[key] for one in rounds) for key in ("numpy_seconds", "cofire_seconds")}
    told["megabytes"] = rounds[0]["megabytes"]
    assert "site-packages" in rounds[0]["place"]
    assert told["megabytes"] < MEGABYTES
    assert (folder / "there.npy").read_bytes() == _saved(folder / "here.npy", engine(x_BCHW))
    print(
        f"beside numpy alone the program gives the same bits; import, median of {ROUNDS}: "
        f"numpy {told['numpy_seconds']:.3f} s, cofire {told['cofire_seconds']:.3f} s more; "
        f"{told['megabytes']:.1f} MB installed"
    )
    if kept is not None:
        write_json(kept, {"provenance": provenance(), "rounds": ROUNDS, **told})


def _saved(path: Path, array: np.ndarray) -> bytes:
    np.save(path, array)
    return path.read_bytes()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
