"""The host's memory allocator, told to keep what is freed.

By default glibc gives large freed blocks back to the system and asks for them again, page by page, at the next step;
or it does not, depending on what happens to lie behind them. On the CPU that makes the same training up to twice as
slow in one process as in the next. Who cares about training on CPUs uses tcmalloc, jemalloc or these settings.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # mallopt(3)
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """From here on, this process reuses the memory it frees. False where the C library has no such setting."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _NEVER)) and bool(mallopt(_MMAP_MAX, 0))
