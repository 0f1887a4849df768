"""The order of sets that a call makes or changes: that of Python, or none."""

from __future__ import annotations

import pytest
import torch

from tests.kitsune.capture.guarded_calls import GuardedCalls, batch
from tests.kitsune.capture.test_side_effects import Effects, compare

# Without spaces around `|`, which parts statements.
KNOWN = [
    "self.kept = sorted({30, 2}|{17})",
    "self.kept = max({30, 2, 17}) + len({1, 30}|{2})",
    "self.kept = [any(v > 20 for v in (30, 2)), any({0, 30} - {0})]",
    "self.kept = [v for v in {30, 2, 17}]",
    "self.kept = list(c)",
    "self.kept = list(set([0, 1, 2]))",
    "self.kept = list({30, 2} - {2})",
    "self.kept = 30 in {1, 30}.union([2, 17])",
]

UNKNOWN = [
    "self.kept = list(set([30, 2, 17, 5]))",
    "self.kept = list({1, 30}|{2, 17})",
    "s = set(); s.add(30); s.add(2); s.add(17); self.kept = tuple(s)",
    "self.kept = [v for v in frozenset([30, 2, 17, 5])]",
    "self.kept = list(c|{9, 40})",
    "c.add(40); self.kept = [v for v in c]",
]


@pytest.mark.parametrize("statement", KNOWN)
def test_a_known_order(statement: str) -> None:
    calls = compare(lambda: Effects(lambda: {8, 1, 2}, statement, reads=False))
    assert calls.replays >= 3, calls.reasons


@pytest.mark.parametrize("statement", UNKNOWN)
def test_an_unknown_order(statement: str) -> None:
    torch.manual_seed(0)
    calls = GuardedCalls(Effects(lambda: {8, 1, 2}, statement, reads=False))
    calls(batch(0))
    assert calls.replays == 0
    assert "the order of a set" in calls.reasons[0]


def test_the_first_member_is_taken() -> None:
    calls = GuardedCalls(Effects(lambda: {8, 1, 2}, "s = {30, 2, 17}; self.kept = s.pop()", reads=False))
    calls(batch(0))
    assert calls.replays == 0
    assert "pop() of a set" in calls.reasons[0]
