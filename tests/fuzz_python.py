"""Atheris on the readers that are Python: whatever a file holds, the error is one of cofire's.

``python tests/fuzz_python.py READER [OPTION OF LIBFUZZER...]``, or ``make fuzz-python`` for all of ``readers.py``, one
after the other. It begins with the reader's folder in ``attacks/``.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import FunctionType

import atheris
from readers import ATTACKS, READERS

from cofire.errors import CofireError

PACKAGES = ("cofire", "tomllib", "json", "tarfile", "PIL")  # whose branches guide the fuzz


def main(name: str, options: list[str]) -> None:
    read = READERS[name]

    def one(data: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder, suppress(CofireError):
            read(Path(folder), data)

    for seed in sorted((ATTACKS / name).iterdir()):  # whatever is imported late is there now
        one(seed.read_bytes())
    for function in gc.get_objects():
        if isinstance(function, FunctionType) and str(function.__module__).split(".")[0] in PACKAGES:
            atheris.instrument_func(function)
    found, corpus = Path("build/fuzz-python/found"), Path("build/fuzz-python") / name
    found.mkdir(parents=True, exist_ok=True)
    corpus.mkdir(exist_ok=True)
    where = [f"-artifact_prefix={found}/{name}-", str(corpus), str(ATTACKS / name)]
    limits = ["-max_len=8192", "-rss_limit_mb=2048", "-timeout=20", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *limits, *options, *where], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
