"""What Python does by itself, and Dynamo otherwise: as plain PyTorch, by a replay or by a refusal."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from kitsune.errors import RefusedError
from tests.kitsune.capture.test_frontend import guarded

LOG: list[float] = []


class ByValue:
    """Equal to what holds the same."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByValue) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)


class Never:
    """Not even equal to itself, as NaN."""

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = object.__hash__


class Always:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


class NeitherNor(Never):
    def __ne__(self, other: object) -> bool:
        return False


@dataclasses.dataclass(unsafe_hash=True)
class Size:
    wide: int


@dataclasses.dataclass(frozen=True)
class Frozen:
    held: object


class Epochs:
    """Each pass through it is the next epoch."""

    def __init__(self) -> None:
        self.epoch = 0.0

    def __iter__(self) -> Iterator[float]:
        self.epoch += 1
        self.left = 2
        return self

    def __next__(self) -> float:
        self.left -= 1
        if self.left < 0:
            raise StopIteration
        return self.epoch


class Counted:
    """Whose length is asked for by `list`, which Dynamo does not."""

    def __iter__(self) -> Iterator[float]:
        return iter([1.0])

    def __len__(self) -> int:
        LOG.append(1.0)
        return 1


class CountedInPlace(Counted):
    """The same, noted by way of a slice, which has an instruction of its own since Python 3.12."""

    def __len__(self) -> int:
        LOG[len(LOG) :] = [1.0]
        return 1


class Failing:
    """A property that raises leads to `__getattr__`."""

    @property
    def wide(self) -> float:
        raise AttributeError

    def __getattr__(self, name: str) -> float:
        return 2.0


class Logging:
    def __getattr__(self, name: str) -> float:
        if name.startswith("_"):
            raise AttributeError(name)
        LOG.append(1.0)
        return 2.0


class Base:
    def __add__(self, other: object) -> float:
        return 1.0


class Derived(Base):
    def __radd__(self, other: object) -> float:
        return 2.0


class Closed:
    __contains__ = None

    def __iter__(self) -> Iterator[float]:
        return iter([1.0])


class Three:
    def __get__(self, instance: object, owner: type) -> float:
        return 3.0

    def __set__(self, instance: object, value: float) -> None:
        """Nobody may."""


class Hiding:
    factor = Three()

    def __init__(self) -> None:
        self.__dict__["factor"] = 9.0


Pair = collections.namedtuple("Pair", "first second")


def is_in(value: float, container: Any) -> float:
    try:
        return 2.0 if value in container else 1.0
    except TypeError:
        return 7.0


def finally_noted() -> Iterator[float]:
    try:
        yield 1.0
        yield 2.0
    finally:
        LOG.append(1.0)


@contextlib.contextmanager
def noted() -> Iterator[None]:
    try:
        yield
    finally:
        LOG.append(1.0)


def with_noted() -> Iterator[float]:
    with noted():
        yield 1.0


def left_in_a_loop() -> float:
    for value in finally_noted():
        if value == 1.0:
            break
    return 1.0


def unpacked(values: Iterator[float]) -> float:
    first, *_ = values
    return first


def groups() -> float:
    grouped = itertools.groupby([1, 1, 2])
    (_, first), (_, second) = next(grouped), next(grouped)
    return 1.0 + len(list(first)) * 10 + len(list(second))


def then_the_rest(use: Callable[[Iterator[float]], object]) -> Callable[[], float]:
    def read() -> float:
        values = iter([2.0, 3.0, 4.0])
        use(values)
        return 1.0 + sum(values)

    return read


HELD = ByValue(1.0)
TABLE: Mapping[object, float] = {ByValue(1.0): 5.0}
HIDING = Hiding()
NEVER, NEITHER, LOGGING = Never(), (NeitherNor(), NeitherNor()), Logging()

SAME_OR_REFUSED: dict[str, Callable[[], float]] = {
    "key of a dictionary": lambda: TABLE.get(ByValue(1.0), 1.0),
    "key that is made": lambda: 2.0 if ByValue(1.0) in {ByValue(1.0): 1} else 1.0,
    "members of a set": lambda: float(len({ByValue(1.0), ByValue(1.0)})),
    "key of a data class": lambda: 2.0 if Size(1) in {Size(1): 1} else 1.0,
    "key that is a tuple": lambda: 2.0 if (ByValue(1.0), 1) in {(ByValue(1.0), 1): 1} else 1.0,
    "key that holds one": lambda: 2.0 if Frozen(ByValue(1.0)) in {Frozen(ByValue(1.0)): 1} else 1.0,
    "unequal to itself": lambda: 2.0 if NEVER in [NEVER] else 1.0,
    "unequal to itself, in a deque": lambda: 2.0 if NEVER in collections.deque([NEVER]) else 1.0,
    "unequal to itself, in values": lambda: 2.0 if NEVER in {"a": NEVER}.values() else 1.0,
    "equal to a constant": lambda: 2.0 if 3 in [Always()] else 1.0,
    "neither equal nor unequal": lambda: 2.0 if {"a": NEITHER[0]} == {"a": NEITHER[1]} else 1.0,
    "sum of an iterator": lambda: sum(Epochs()),
    "member of an iterator": lambda: 2.0 if 1.0 in Epochs() else 1.0,
    "iterator unpacked": lambda: unpacked(Epochs()),
    "iterator reduced": lambda: functools.reduce(operator.add, Epochs()),
    "length of a list": lambda: next(iter(list(Counted()))),
    "length of a list, noted in a slice": lambda: next(iter(list(CountedInPlace()))),
    "default for a property": lambda: getattr(Failing(), "wide", 5.0),
    "property that is there": lambda: 2.0 if hasattr(Failing(), "wide") else 1.0,
    "generator left": left_in_a_loop,
    "first of a generator": lambda: next(finally_noted()),
    "generator within with": lambda: next(with_noted()),
    "any of a generator": lambda: 2.0 if any(finally_noted()) else 1.0,
    "end of a group": groups,
    "operator of a derived class": lambda: Base() + Derived(),
    "contains nothing": lambda: is_in(1.0, Closed()),
    "hidden attribute": lambda: HIDING.factor,
    "key that is a named tuple": lambda: 2.0 if (1, 2) in {Pair(1, 2): 1} else 1.0,
    "named tuple as a key": lambda: 2.0 if Pair(1, 2) in {Pair(1, 2): 1} else 1.0,
    "named tuple for a tuple": lambda: 2.0 if Pair(1, 2) in {(1, 2): 1} else 1.0,
    "mapped": then_the_rest(lambda values: next(map(float, values))),
    "filtered": then_the_rest(lambda values: next(filter(None, values))),
    "maximum": then_the_rest(max),
    "any": then_the_rest(any),
    "list": then_the_rest(list),
    "first and rest": then_the_rest(unpacked),
    "extended": then_the_rest(lambda values: [1.0].extend(values)),
    "sum": then_the_rest(sum),
    "reversed": lambda: (lambda values: next(values) + sum(values) * 2)(reversed([1.0, 2.0, 3.0])),
}


@pytest.mark.parametrize("name", SAME_OR_REFUSED)
def test_it_is_as_in_plain_pytorch(name: str) -> None:
    read = SAME_OR_REFUSED[name]
    x = torch.ones(2)
    LOG.clear()
    expected = [x * read() for _ in range(3)], len(LOG)

    LOG.clear()
    call, runner = guarded(lambda x: x * read())
    try:
        found = [call(x) for _ in range(3)], len(LOG)
    except RefusedError:
        assert not runner.graphs
        assert not LOG, "the capture had effects"
    else:
        assert torch.equal(torch.stack(found[0]), torch.stack(expected[0]))
        assert found[1] == expected[1]


def finally_nothing() -> Iterator[float]:
    try:
        yield 1.0
        yield 2.0
    finally:
        pass


def typed_except(values: list[float]) -> Iterator[float]:
    index = 0
    try:
        while True:
            yield values[index]
            index += 1
    except IndexError:
        return


REPLAYED: dict[str, tuple[Callable[[], float], float]] = {
    "key of a frozen data class": (lambda: {Frozen(1): 2.0}[Frozen(1)], 2.0),
    "generator left within except": (lambda: next(typed_except([2.0, 3.0])), 2.0),
    "generator read to its end": (lambda: sum(finally_nothing()), 3.0),
    "in a list of equals": (lambda: 2.0 if ByValue(2.0) in [ByValue(1.0), ByValue(2.0)] else 1.0, 2.0),
    "rest after the first": (then_the_rest(next), 8.0),
    "rest after the maximum": (then_the_rest(max), 1.0),
}


@pytest.mark.parametrize("name", REPLAYED)
def test_what_dynamo_does_as_python_is_captured(name: str) -> None:
    read, value = REPLAYED[name]
    call, runner = guarded(lambda x: x * read())
    assert [call(torch.ones(1)).item() for _ in range(3)] == [value] * 3
    assert len(runner.graphs) == 3


def test_a_getattr_with_effects_is_not_asked_by_guards() -> None:
    LOG.clear()
    call, runner = guarded(lambda x: x * (2.0 if hasattr(LOGGING, "wide") else 1.0))
    with pytest.raises(RefusedError, match=r"Logging.__getattr__\(\) changes something"):
        call(torch.ones(1))
    assert not runner.graphs
    assert not LOG
