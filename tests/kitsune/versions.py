"""What only some versions of torch can do."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch

IS_BEFORE_2_13 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


def skip_before_2_13(name: str, unsupported: Collection[str]) -> None:
    """Skips a case that torch before 2.13 does not know or cannot capture, so that it runs as plain PyTorch."""
    if IS_BEFORE_2_13 and name in unsupported:
        pytest.skip("torch before 2.13 cannot do this, or not capture it")
