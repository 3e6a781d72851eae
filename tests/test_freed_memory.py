"""Memory that is freed and asked for again costs no page faults."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource
from cofire.training.freed_memory import keep_freed_memory
assert keep_freed_memory()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = bytearray(b"x") * (1 << 25)
    del block
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these options")
def test_a_block_that_is_asked_for_again_costs_no_page_faults() -> None:
    """In a process of its own: it is for good."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert int(done.stdout) < (1 << 25) // 4096 // 100
