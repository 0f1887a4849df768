"""Objects that count as false do so in captured calls, or the calls are refused."""

from __future__ import annotations

import collections
import enum
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from kitsune.errors import RefusedError
from tests.kitsune.capture.changing import model
from tests.kitsune.capture.test_frontend import guarded


class HasLength:
    def __len__(self) -> int:
        return 0


class HasTruth:
    def __bool__(self) -> bool:
        return False


class HasBoth(HasLength):
    def __bool__(self) -> bool:
        return True


Switches = enum.Flag("Switches", ["ONE", "OTHER"])

KINDS: list[Callable[..., Any]] = [list, tuple, set, frozenset, dict, str, bytes, int, float, complex]
MAKERS: dict[str, Callable[[], Any]] = {
    **{kind.__name__: kind for kind in KINDS},
    **{f"class of {kind.__name__}": type("Own", (kind,), {}) for kind in KINDS},
    "ordered": collections.OrderedDict,
    "counter": collections.Counter,
    "default": lambda: collections.defaultdict(float),
    "deque": collections.deque,
    "chain": lambda: collections.ChainMap({}),
    "user dict": collections.UserDict,
    "user list": collections.UserList,
    "proxy": lambda: types.MappingProxyType({}),
    "keys": lambda: {}.keys(),
    "range": lambda: range(0),
    "modules": nn.ModuleList,
    "named modules": nn.ModuleDict,
    "parameters": nn.ParameterList,
    "sequence": nn.Sequential,
    "size": lambda: torch.Size([]),
    "none": lambda: None,
    "flag": lambda: Switches(0),
    "length": HasLength,
    "truth": HasTruth,
    "both": HasBoth,
}

QUESTIONS: dict[str, Callable[[Any], float]] = {
    "if": lambda it: 2.0 if it else 1.0,
    "not": lambda it: 2.0 if not it else 1.0,
    "bool": lambda it: 2.0 if bool(it) else 1.0,
    "and": lambda it: 2.0 if (it and True) else 1.0,
    "all": lambda it: 2.0 if all([it]) else 1.0,
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_what_is_false_is_not_taken_for_true(question: str) -> None:
    ask, x = QUESTIONS[question], torch.full((2,), 3.0)
    refused = []
    for name, make in MAKERS.items():
        asking = model(lambda self, x: x * ask(self.it), it=make())
        call, _ = guarded(lambda x: asking(x))  # noqa: B023 - it is called here
        try:
            assert torch.equal(call(x), asking(x)), name
        except RefusedError:
            refused.append(name)
    assert not set(refused) & {"list", "tuple", "dict", "str", "int", "float", "none"}


def test_it_may_become_true() -> None:
    names = dict[str, float]()
    asking = model(lambda self, x: x * (2.0 if names else 1.0))
    call, _ = guarded(lambda x: asking(x))
    x = torch.ones(2)
    assert torch.equal(call(x), x)
    names["a"] = 1.0
    with suppress(RefusedError):
        assert torch.equal(call(x), 2 * x)
