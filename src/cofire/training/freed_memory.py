"""What one step frees is kept for the next one."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # of mallopt(3)


def keep_freed_memory() -> bool:
    """Have this process keep the memory that it frees, as far as its C library can; returns whether.

    glibc gives large blocks back to the system at once, and gets them anew, page by page, in the next step.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return False
    asked = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 1 << 26}
    return all([mallopt(option, value) == 1 for option, value in asked.items()])
