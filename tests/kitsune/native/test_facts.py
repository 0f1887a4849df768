"""Both checkers of facts: what they see, what they leave alone, and that they agree."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.native.build import facts_type
from kitsune.native.facts import (
    Fact,
    Facts,
    PythonFacts,
    absence,
    attribute,
    contents,
    definition,
    item,
    members,
    result,
)

Checker = Callable[[Sequence[Fact]], Facts]


@pytest.fixture(params=["python", "c"])
def checker(request: pytest.FixtureRequest) -> Checker:
    return compiled() if request.param == "c" else PythonFacts


def compiled() -> Checker:
    checker = facts_type()
    if checker is PythonFacts:
        pytest.skip("there is no C compiler")
    return checker


class World:
    """One object of each kind about which there are facts, and all facts about them."""

    def __init__(self) -> None:
        self.parts = [object() for _ in range(4)]
        one, two, three, _ = self.parts
        self.holder = SimpleNamespace(part=one)
        self.pair: Any = {"a": one, "b": two}
        self.ordered: Any = OrderedDict(x=one, y=three)
        self.empty: dict[str, Any] = {}
        self.row: list[Any] = [one, two]
        self.number = 1.5
        self.base = type("Base", (), {})
        self.other_base = type("OtherBase", (), {})
        self.kind: Any = type("Kind", (self.base,), {"run": lambda self: 1, "number": 1, "text": property(str)})

    def read(self, factor: float) -> float:
        return self.number * factor

    def facts(self) -> list[Fact]:
        return [
            attribute(self.holder, "part"),
            attribute(self, "number"),
            item(self.pair, "a"),
            item(self.ordered, "y"),
            item(self.row, 1),
            result(self.read, 2.0),
            result(len, self.row),
            members(self.row),
            contents(self.pair),
            contents(self.ordered),
            contents(self.empty),
            definition(self.kind),
            definition(self.base),
            absence(self.pair, "c"),
            absence(self.ordered, "z"),
        ]


def set_part(world: World) -> None:
    world.holder.part = world.parts[3]


def delete_part(world: World) -> None:
    del world.holder.part


def set_item(world: World) -> None:
    world.pair["a"] = world.parts[3]


def rename_item(world: World) -> None:
    world.pair["c"] = world.pair.pop("b")


def reorder_items(world: World) -> None:
    world.pair["a"] = world.pair.pop("a")


def clear_items(world: World) -> None:
    world.ordered.clear()


def fill_empty(world: World) -> None:
    world.empty["new"] = world.parts[0]


def set_member(world: World) -> None:
    world.row[0] = world.parts[3]


def swap_members(world: World) -> None:
    world.row.reverse()


def grow_row(world: World) -> None:
    world.row.append(world.parts[2])


def shrink_row(world: World) -> None:
    world.row.pop()


def change_number(world: World) -> None:
    world.number = 2.5


def set_equal_number(world: World) -> None:
    world.number = float("1.5")


def replace_method(world: World) -> None:
    world.kind.run = lambda self: 2


def replace_property(world: World) -> None:
    world.kind.text = property(repr)


def make_false(world: World) -> None:
    world.base.__bool__ = lambda self: False  # type: ignore[attr-defined]


def take_method(world: World) -> None:
    del world.kind.run


def rename_method(world: World) -> None:
    run = world.kind.run
    del world.kind.run
    world.kind.walk = run


def set_number_of_class(world: World) -> None:
    world.kind.number = 2


def change_bases(world: World) -> None:
    world.kind.__bases__ = (world.other_base,)


def break_reading(world: World) -> None:
    world.read = None  # type: ignore[assignment,method-assign]
    world.number = None  # type: ignore[assignment]


CHANGES: dict[Callable[[World], None], set[int]] = {
    set_part: {0},
    delete_part: {0},
    set_item: {2, 8},
    rename_item: {8, 13},
    reorder_items: {8},
    clear_items: {3, 9},
    fill_empty: {10},
    set_member: {7},
    swap_members: {4, 7},
    grow_row: {6, 7},
    shrink_row: {4, 6, 7},
    change_number: {1, 5},
    set_equal_number: {1},
    break_reading: {1, 5},
    replace_method: {11},
    replace_property: {11},
    make_false: {12},
    take_method: {11},
    rename_method: {11},
    set_number_of_class: set(),
    change_bases: {11},
}
"""Changes of a world, and the places of the facts that no longer hold."""


def broken(checker: Checker, facts: Sequence[Fact]) -> set[int]:
    return {place for place, fact in enumerate(facts) if not checker([fact]).hold()}


def test_a_key_that_is_there_is_not_absent() -> None:
    with pytest.raises(KeyError):
        absence({"a": 1}, "a")


def test_a_class_that_was_changed_and_changed_back_is_as_it_was(checker: Checker) -> None:
    """What was looked up of it before is no longer kept by Python then."""
    world = World()
    facts = checker([definition(world.kind)])
    run = world.kind.run
    for _ in range(3):
        assert world.kind().run() == 1
        assert facts.hold()
        world.kind.run = len
        assert not facts.hold()
        world.kind.run = run
        assert facts.hold()


def test_no_facts_hold(checker: Checker) -> None:
    assert checker([]).hold() is True


@pytest.mark.parametrize("change", CHANGES)
def test_what_breaks_a_fact(checker: Checker, change: Callable[[World], None]) -> None:
    world = World()
    facts = world.facts()
    together = checker(facts)
    assert together.hold() is True
    change(world)
    assert broken(checker, facts) == CHANGES[change]
    assert together.hold() is (not CHANGES[change])


@given(st.lists(st.sampled_from(list(CHANGES)), max_size=8))
def test_both_agree(changes: list[Callable[[World], None]]) -> None:
    world = World()
    facts = world.facts()
    in_c, in_python = compiled()(facts), PythonFacts(facts)
    for change in changes:
        try:
            change(world)
        except (AttributeError, KeyError, IndexError):  # an earlier one has taken away what it changes
            continue
        assert broken(compiled(), facts) == broken(PythonFacts, facts)
        assert in_c.hold() is in_python.hold()


class Raising:
    error: BaseException | None = None

    @property
    def part(self) -> int:
        if self.error is not None:
            raise self.error
        return 1

    def __getitem__(self, key: str) -> int:
        return self.part

    def __call__(self) -> int:
        return self.part


RAISED = {"attribute": lambda it: attribute(it, "part"), "item": lambda it: item(it, "key"), "result": result}


@pytest.mark.parametrize("kind", RAISED)
def test_what_raises_does_not_hold(checker: Checker, kind: str) -> None:
    subject = Raising()
    facts = checker([RAISED[kind](subject)])
    assert facts.hold()
    subject.error = ValueError("no")
    assert facts.hold() is False
    subject.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        facts.hold()
    subject.error = None
    assert facts.hold() is True


def test_a_comparison_that_raises_does_not_hold(checker: Checker) -> None:
    class Incomparable:
        def __eq__(self, other: object) -> bool:
            raise RuntimeError("no")

    facts = checker([result(Incomparable)])
    assert facts.hold() is False


def test_references_are_counted_right(checker: Checker) -> None:
    world = World()
    subjects = [*world.parts, world.holder, world.pair, world.ordered, world.row, world.empty, world.kind, world.base]
    before = list(map(sys.getrefcount, subjects))
    facts = checker(world.facts())
    for _ in range(1000):
        facts.hold()
    world.row.append(world.parts[0])
    for _ in range(1000):
        facts.hold()
    world.row.pop()
    del facts
    assert list(map(sys.getrefcount, subjects)) == before


def test_a_cycle_through_facts_is_collected(checker: Checker) -> None:
    world = World()
    world.parts.append(checker([attribute(world, "parts")]))
    reference = weakref.ref(world)
    del world
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize(
    "row",
    [
        (0, object(), 1, None),
        (2, len, [], 0),
        (3, (), None, ()),
        (4, [], (), ()),
        (4, {}, (1,), ()),
        (5, {}, (), (None,)),
        (5, int, (), ()),
        (5, int, ("a",), (None,)),
        (6, [], 1, None),
        (7, {}, (), ()),
        (-1, {}, (), ()),
        (10**30, {}, (), ()),
        (1, {}, ()),
        None,
    ],
)
def test_what_is_no_fact_is_refused_in_c(row: Any) -> None:
    with pytest.raises((TypeError, OverflowError)):
        compiled()([row])


def test_what_python_puts_into_a_class_at_its_first_use_is_no_change(checker: Checker) -> None:
    class Kind:
        def __init__(self) -> None:
            self.number = 1.0

    facts = checker([definition(Kind)])
    copy.deepcopy(Kind())
    assert Kind().__reduce_ex__(2)
    assert Kind.__annotations__ == {}
    assert facts.hold()
