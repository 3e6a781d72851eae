"""A short form of ``make fuzz-readers``: readers, kernel sets and the interpreter agree on mutated programs."""

from __future__ import annotations

from pathlib import Path

import differential
import pytest
import torch


@pytest.mark.parametrize("seed", [1, 2])
def test_readers_and_kernels_agree_on_mutants(seed: int, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    tally = differential.fuzz(1000, seed, tmp_path)
    assert tally.files == 1000
    assert tally.taken > 100, "too few mutants are programs: the fuzz looks at nothing"
    assert tally.compared > 200, "too few programs stand beside the interpreter"
