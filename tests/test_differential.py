"""A short form of ``make fuzz-readers``: both readers, all kernel sets and the interpreter agree on mutated programs."""

from __future__ import annotations

import differential
import pytest
import torch


@pytest.mark.parametrize("seed", [1, 2])
def test_readers_and_kernels_agree_on_mutants(seed: int) -> None:
    torch.set_num_threads(1)
    tally = differential.fuzz(1000, seed, 0.5)
    assert tally.files == 1000
    assert tally.taken > 100, "too few mutants are programs: the fuzz looks at nothing"
    assert tally.compared > 200, "too few programs stand beside the interpreter"
