"""Objects that outlive a call are left by replays as by plain PyTorch: members, order, types, and who is who."""

from __future__ import annotations

import bisect
import heapq
import itertools
import linecache
import re
import sys
import types
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kitsune.capture.guarded_calls import GuardedCalls, batch, picture, weight
from tests.kitsune.versions import skip_before_2_13

_NUM_CALLS = 6
_NAMES = {"bisect": bisect, "heapq": heapq, "OrderedDict": OrderedDict, "Counter": Counter}


class OwnList(list[float]):
    """With methods and attributes of its own."""

    appended = 0

    def append(self, value: float) -> None:
        self.appended += 1
        super().append(value)


class OwnDict(dict[str, float]):
    """With methods and attributes of its own."""

    written = 0

    def __setitem__(self, key: str, value: float) -> None:
        self.written += 1
        super().__setitem__(key, value)

    def __missing__(self, key: str) -> float:
        self[key] = 1.0
        return 1.0


class OwnOrder(OrderedDict[str, float]):
    """Forgets what was not used for long."""

    def __getitem__(self, key: str) -> float:
        self.move_to_end(key)
        return super().__getitem__(key)


class OwnSet(set[int]):
    """Of a class of its own."""


@dataclass
class Record:
    """A plain object."""

    a: float = 1.0
    b: list[float] = field(default_factory=lambda: [1.0, 2.0])


def numbers() -> list[float]:
    return [3.0, 1.0, 2.0]


def by_name() -> dict[str, float]:
    return {"a": 1.0, "b": 2.0, "c": 3.0}


_LIST = """
c.append(c.pop(0)) | c.insert(0, c.pop()) | c.sort() | c.sort(key=lambda v: -v) | c.reverse() | c[0] = 4.0
c[1:] = c[2:] + c[1:2] | c[::2] = [v + 0.0 for v in c[::-2]] | c[0], c[1] = c[1], c[0] | c.__setitem__(0, 4.0)
del c[0]; c.append(5.0) | c.clear(); c.extend([1.0, 2.0]) | c.remove(max(c)); c.append(9.0) | c[:] = c[1:] + c[:1]
self.kept, self.old = c, self.kept | d = c; d[0] = c[1]
"""
_GROWING_LIST = """
c.append(5.0) | c.extend(c[:1]) | c.insert(0, 7.0) | c += [4.0] | c *= 2 | c[len(c):] = [1.0] | c.__imul__(2)
self.kept = [*c]; self.kept.append(c[0])
"""
_DICT = """
c["a"] = 9.0 | c["a"] = c.pop("a") | del c["a"]; c["a"] = 5.0 | c["z"] = 1.0; del c["z"] | c.pop("missing", None)
c.update(b=4.0, q=1.0) | c |= {"q": 1.0, "a": 3.0} | c.setdefault("q", 2.0) | c.clear(); c.update(b=1.0, a=2.0)
k, v = c.popitem(); c[k] = v | k = next(iter(c)); c[k] = c.pop(k) | c["a"], c["b"] = c["b"], c["a"]
for k in sorted(c, reverse=True): c[k] = c.pop(k) | dict.update(c, {"a": 4.0})
self.kept = c.copy(); self.kept["a"] = 8.0 | self.kept = dict(reversed(list(c.items()))) | c.pop("b", None)
"""
_ORDER = """
c.move_to_end("a") | c.move_to_end("a", last=False) | c.move_to_end("b"); c["b"] = 5.0 | OrderedDict.move_to_end(c, "a")
c.move_to_end(next(iter(c))) | c.move_to_end(next(reversed(c)), last=False) | k, v = c.popitem(last=False); c[k] = v
c.move_to_end("b"); c.popitem(last=False); c["n"] = 1.0
"""
_DEQUE = """
c.append(c.popleft()) | c.appendleft(c.pop()) | c.reverse() | c.clear(); c.extend([1.0, 2.0]) | c[0] = 4.0
del c[0]; c.append(2.0) | c.remove(1.0); c.append(1.0) | c.extendleft([c.pop(), c.pop()])
"""
_OBJECT = """
c.a = 5.0 | setattr(c, "a", 3.0) | c.new = 1.0; del c.new | c.b = [*c.b] | c.__dict__["a"] = 4.0 | c.me = c
c.__dict__.update(a=5.0, w=1.0) | object.__setattr__(c, "a", 7.0) | c.b, c.a = [1.0], 2.0 | c.b[0] = c.b[1]
"""

SETTLING: dict[str, tuple[Callable[[], Any], str]] = {
    "list": (numbers, _LIST),
    "class of lists": (lambda: OwnList(numbers()), _LIST),
    "user list": (lambda: UserList(numbers()), "c.append(c.pop(0)) | c[0] = 4.0 | c.reverse() | c.sort()"),
    "dict": (by_name, _DICT),
    "class of dicts": (lambda: OwnDict(by_name()), _DICT),
    "ordered dict": (lambda: OrderedDict(by_name()), f"{_DICT}\n{_ORDER}".replace("\n\n", "\n")),
    "default dict": (lambda: defaultdict(float, by_name()), f"{_DICT}c['new']"),
    "user dict": (
        lambda: UserDict(by_name()),
        "c['a'] = 4.0 | c['a'] = c.pop('a') | c.update(q=1.0) | c.setdefault('q', 3)",
    ),
    "counter": (
        lambda: Counter("aabbc"),
        "c['a'] = 4 | del c['none'] | del c['a']; c['a'] = 1 | c.pop('b'); c['b'] = 3",
    ),
    "chain": (
        lambda: ChainMap({"a": 1.0}, {"b": 2.0}),
        "c['a'] = 3.0 | c.maps[1]['b'] = 4.0 | c.pop('a'); c['a'] = 2.0",
    ),
    "deque": (lambda: deque(numbers()), _DEQUE),
    "set": (lambda: {1, 2, 3}, "c.add(5) | c.add(1) | c.discard(77) | c |= {2}"),
    "object": (Record, _OBJECT),
}
"""What leaves an object built as it is after a few calls, so that the code of one call is that of the next."""

CHANGING: dict[str, tuple[Callable[[], Any], str]] = {
    "list": (numbers, _GROWING_LIST),
    "class of lists": (lambda: OwnList(numbers()), "c.append(5.0) | c.extend(c[:1]) | c.insert(0, 7.0)"),
    "dict": (by_name, "c['a'] = c['a'] + 1 | for k in list(c): c[k] = c[k] + 1 | k, v = c.popitem(); c[k] = v + 1"),
    "class of dicts": (lambda: OwnDict(by_name()), "c['a'] = c['a'] + 1 | c['missing'] = c['missing'] + 1"),
    "counter": (lambda: Counter("aabbc"), "c['a'] += 1 | c.update('ab') | c.subtract({'a': 1}) | c += Counter('a')"),
    "deque": (lambda: deque(numbers()), "c.append(5.0) | c.appendleft(5.0) | c += [4.0] | c[0] = c[0] + 1"),
    "set": (lambda: {1, 2, 3}, "c.add(max(c) + 1)"),
    "iterator": (lambda: itertools.count(), "self.kept = next(c) | self.kept = [next(c), next(c)]"),
    "object": (Record, "c.a = c.a + 1 | c.a += 1 | c.b.append(c.b[0] + c.a) | c.b = c.b + [1.0]"),
    "nested": (lambda: [[1.0], [2.0]], "c.append(c[0]); c[0].append(1.0) | c[0], c[1] = c[1], c[0]; c[0].append(3.0)"),
}


class Effects(nn.Module):
    """Runs statements at each call, each on a container `c` of its own."""

    effects: Callable[[Any, Tensor], None]

    def __init__(self, make: Callable[[], Any], statements: str, *, reads: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        parts = [one.strip() for line in statements.strip().splitlines() for one in line.split(" | ")]
        self.containers = [make() for _ in parts]
        self.kept, self.old, self.reads = None, None, reads
        self.effects = _compiled(parts)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.effects(self, h)
        return h * (1 + 0.01 * sum(map(weight, self.containers))) if self.reads else h


def _compiled(statements: Sequence[str]) -> Callable[[Any, Tensor], None]:
    lines = ["def effects(self, h):"]
    for place, statement in enumerate(statements):
        lines += [f"    c = self.containers[{place}]", f"    {statement}"]
    text = "\n".join(lines)
    name = f"<effects {hash(text)}>"
    linecache.cache[name] = (len(text), None, [f"{line}\n" for line in lines], name)
    module = types.ModuleType(f"effects_{abs(hash(text))}")
    vars(module).update(_NAMES)
    sys.modules[module.__name__] = module  # where captures look for what is global in it
    exec(compile(text, name, "exec"), vars(module))
    effects: Callable[[Any, Tensor], None] = vars(module)["effects"]
    return effects


def compare(build: Callable[[], Effects], edit: Callable[[Effects], None] = lambda _: None) -> GuardedCalls:
    """Calls as plain PyTorch and guarded, which must leave the same behind. The loop's own edit comes before the 5th.

    Guarded calls come after a plain one.
    """
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    guarded = build()
    calls = GuardedCalls(guarded)
    for index in range(_NUM_CALLS):
        if index == 4:
            edit(plain)
            edit(guarded)
        expected = plain(batch(index))
        found = calls(batch(index)) if index else guarded(batch(index))
        assert torch.equal(found, expected), f"call {index}"
        assert picture(guarded) == picture(plain), f"call {index}"
    return calls


@pytest.mark.parametrize(
    ("kind", "reads"), [*((kind, kind != "object") for kind in SETTLING), ("dict", False), ("ordered dict", False)]
)
def test_what_settles(kind: str, reads: bool) -> None:
    skip_before_2_13(kind, {"object"} if not reads else ())
    make, statements = SETTLING[kind]
    calls = compare(lambda: Effects(make, statements, reads=reads))
    assert calls.replays >= 2, calls.reasons


@pytest.mark.parametrize("kind", CHANGING)
def test_what_changes_at_each_call(kind: str) -> None:
    skip_before_2_13(kind, {"list", "deque", "iterator"})
    make, statements = CHANGING[kind]
    calls = compare(lambda: Effects(make, statements, reads=False))
    assert calls.replays >= 2, calls.reasons


REFUSED: list[tuple[Callable[[], Any], str, str]] = [
    (lambda: OwnOrder(by_name()), "c['a']", "the call changes a OwnOrder .*of a class of its own"),
    (lambda: OwnSet({1, 2}), "c.add(5); c.discard(5); c.add(7)", "the call changes a OwnSet .*of a class of its own"),
    (numbers, "c.__iadd__([1.0])", "the call changes a list .*does not note down"),
    (numbers, "c.append(c)", "the call changes a list .*a member of itself"),
    (numbers, "heapq.heappush(c, 0.5)", "heappush.* is called"),
    (numbers, "bisect.insort(c, 2.5)", "insort.* is called"),
    (numbers, "self.kept = iter(c)", "an iterator that the call makes is kept"),
    (numbers, "self.kept = zip(c, c)", "an iterator that the call makes is kept"),
    (lambda: {1, 2, 3}, "c.update([14, 15, 16])", "the call changes a set .*more than one new member"),
    (lambda: {1, 2, 3}, "c.clear(); c.add(4)", "the call changes a set"),
    (lambda: {1, 2, 3}, "c.pop(); c.add(1)", r"pop\(\) of a set"),
    (Record, "del c.a; c.a = 2.0", "'a' is deleted and assigned again"),
    (
        lambda: type("Own", (Record,), {})(),
        "type(c).total = 3.0",
        "the attribute 'total' of a class .*Own.* is assigned|Failed to trace builtin operator",
    ),
    (numbers, "self.kept = self.linear.weight.grad", "the call keeps what is in .*grad"),
    (numbers, "self.linear.weight.grad = None", "the attribute 'grad' of a tensor is assigned"),
    (numbers, "self.linear.weight.__setattr__('data', h.detach())", r"__setattr__\(\) of a tensor"),
    (
        numbers,
        "self.linear.bias.tag, c[0] = 1.0, 2.0; self.linear.bias.grad = h.sum(0)",
        "'grad' of a tensor is assigned",
    ),
]


@pytest.mark.parametrize(("make", "statement", "reason"), REFUSED, ids=[statement for _, statement, _ in REFUSED])
def test_what_is_refused(make: Callable[[], Any], statement: str, reason: str) -> None:
    calls = GuardedCalls(Effects(make, statement, reads=False))
    calls(batch(0))
    assert calls.replays == 0
    assert re.search(reason, calls.reasons[0]), calls.reasons[0]


@pytest.mark.parametrize("reads", [False, True], ids=["written", "read"])
@pytest.mark.parametrize(
    ("make", "statement", "edit"),
    [
        (lambda: OrderedDict(by_name()), "c['a'] = 4.0", lambda c: c.move_to_end("a")),
        (lambda: OrderedDict(by_name()), "c.popitem(); c['n'] = 1.0", lambda c: c.move_to_end("a")),
        (lambda: defaultdict(float, by_name()), "c.pop('a'); c['a'] = 1.0", lambda c: c.update(z=3.0)),
        (by_name, "c.pop('a'); c['a'] = 1.0", lambda c: c.update(z=3.0)),
        (by_name, "k, v = c.popitem(); c[k] = v", lambda c: c.update(a=c.pop("a"))),
        (by_name, "c.clear(); c['a'] = 1.0", lambda c: c.update(z=3.0)),
        (numbers, "c.reverse()", lambda c: c.insert(0, 7.0)),
        (lambda: deque(numbers()), "c.append(c.popleft())", lambda c: c.rotate(1)),
    ],
)
def test_the_loop_changes_it_too(
    make: Callable[[], Any], statement: str, edit: Callable[[Any], None], reads: bool
) -> None:
    """What Dynamo does not look at when a container is changed: other keys, and their order."""
    calls = compare(lambda: Effects(make, statement, reads=reads), lambda one: edit(one.containers[0]))
    assert calls.replays >= 2, calls.reasons


def test_a_cache_of_tensors_keeps_its_order() -> None:
    """A least recently used one, whose order the second replay got wrong."""

    def make() -> OrderedDict[str, Tensor]:
        return OrderedDict((name, torch.full((3, 2), 1.0 + place)) for place, name in enumerate("abc"))

    statement = "c.move_to_end(next(iter(c))); self.kept = h * c[next(reversed(c))]"
    calls = compare(lambda: Effects(make, statement))
    assert calls.replays >= 3, calls.reasons
