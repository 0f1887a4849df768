"""Triton's key of itself, a part of the names under which it keeps compiled kernels.

Triton makes it once in a process, before it looks for the first kernel: it hashes its own files, hundreds of megabytes.
It has no public name.
"""

from __future__ import annotations

import threading
from contextlib import suppress


def make_ahead() -> None:
    """Has a thread make it, beside whatever goes on; does nothing where there is no Triton."""
    try:
        from triton.runtime.cache import triton_key  # Triton is optional
    except ImportError:
        return
    with suppress(RuntimeError):  # there can be no thread, and whoever needs the key makes it
        threading.Thread(target=triton_key, name="kitsune-triton-key", daemon=True).start()
