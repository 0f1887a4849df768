"""The most captures of one model, whatever their signatures."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from kitsune.errors import Refusal, RefusedError

# Memory that is given back after a capture is taken again by the next one, but not all of it: objects that live longer
# lie between. See docs/limits.md for what was measured.
_MOST_CAPTURES = 256
_REPLAYS_PER_FURTHER = 1000

_REACHED = Refusal(
    f"{_MOST_CAPTURES} captures of the model were made, and each leaves some of the host's memory behind: what is not "
    "captured now runs as plain PyTorch",
    remedy="pad to few shapes (kitsune.bucketed), or pass numbers that change as tensors",
)


@dataclass
class _Spent:
    captures: int = 0
    replays: int = 0


_spent: weakref.WeakKeyDictionary[torch.nn.Module, _Spent] = weakref.WeakKeyDictionary()


def spend_capture(module: torch.nn.Module, replays: int) -> None:
    """Counts one more capture of `module`.

    Args:
        replays: of what was captured before for the same signature, and is captured again; they earn further captures.

    Raises:
        RefusedError: there were as many as there may be.
    """
    spent = _spent.setdefault(module, _Spent())
    spent.replays += replays
    if spent.captures >= _MOST_CAPTURES + spent.replays // _REPLAYS_PER_FURTHER:
        raise RefusedError(_REACHED)
    spent.captures += 1
