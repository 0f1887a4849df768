"""What was captured of one thing, by the state it depends on."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kitsune.errors import Refusal, RefusedError
from kitsune.loop.variants import MOST_USELESS, REFUSALS_UNTIL_GIVEN_UP, REPLAYS_OF_USE, Variants

CAUSE = Refusal("the number has changed")


@dataclass(eq=False)
class Capture:
    """One for a state; some of the same may be busy."""

    state: str
    is_busy: bool = False
    replays: int = 0


def make(*states: str) -> tuple[Variants[Capture], list[Capture]]:
    variants, captures = Variants[Capture](8), [Capture(state) for state in states]
    for capture in captures:
        variants.add(capture)
    return variants, captures


def find(variants: Variants[Capture], state: str) -> tuple[Capture | None, list[Capture]]:
    return variants.find(lambda one: one.state == state, lambda one: one.is_busy)


def test_what_fits_is_found_and_comes_first_from_then_on() -> None:
    variants, (a, b, c) = make("a", "b", "c")
    assert find(variants, "b") == (b, [])
    assert list(variants) == [b, a, c]
    assert find(variants, "c") == (c, [])
    assert list(variants) == [c, b, a]
    assert find(variants, "d") == (None, [])


def test_those_of_one_state_keep_their_order() -> None:
    """The first call of an iteration is answered by the same one each time."""
    variants, (a, first, second) = make("a", "b", "b")
    for _ in range(3):
        assert find(variants, "b") == (first, [])
        first.is_busy = True
        assert find(variants, "b") == (second, [first])
        second.is_busy = True
        assert find(variants, "b") == (None, [first, second])
        first.is_busy = second.is_busy = False
        assert find(variants, "a") == (a, [])


def useless(variants: Variants[Capture], count: int) -> list[Capture]:
    captures = []
    for index in range(count):
        assert variants.refuse(CAUSE) is None
        captures.append(Capture(f"state {index}"))
        variants.add(captures[-1])
        variants.note_capture(captures[-1])
        captures[-1].replays += 1
    return captures


def test_few_captures_are_made_that_are_not_replayed() -> None:
    variants, _ = make()
    captures = useless(variants, MOST_USELESS)
    error = variants.refuse(CAUSE)
    assert error is not None
    assert error.passing
    assert str(error.refusal) == (
        f"it would have to be captured again, and {MOST_USELESS} of {MOST_USELESS} captures failed or were replayed "
        f"less than {REPLAYS_OF_USE} times: the number has changed"
    )
    captures[0].replays += REPLAYS_OF_USE
    assert variants.refuse(CAUSE) is None


def test_what_was_removed_counts_as_it_was() -> None:
    variants, _ = make()
    for capture in useless(variants, MOST_USELESS):
        variants.remove(capture)
    assert isinstance(variants.refuse(None), RefusedError)


def test_captures_that_are_replayed_are_not_counted() -> None:
    variants, (capture,) = make("a")
    for _ in range(50):
        assert variants.refuse(CAUSE) is None
        variants.note_capture(capture)
        capture.replays += REPLAYS_OF_USE
    assert variants.num_captures == 50


def test_captures_that_fail_are_few_unless_one_is_made_in_the_end() -> None:
    """An optimizer makes its state by and by."""
    variants, (early, late) = make("a", "b")
    for _ in range(MOST_USELESS - 1):
        variants.note_capture(early)
    assert variants.refuse(CAUSE) is None
    variants.note_capture(early)
    assert variants.refuse(CAUSE) is not None, "none was made"
    early.replays += 1
    assert variants.refuse(CAUSE) is None, "the last one was"
    for _ in range(MOST_USELESS - 1):
        variants.note_capture(late)
    assert variants.refuse(CAUSE) is not None


@pytest.mark.parametrize("most", [8, 40])
def test_it_is_given_up_where_nothing_fits_for_long(most: int) -> None:
    variants = Variants[Capture](most)
    captures = useless(variants, MOST_USELESS)
    patience = max(REFUSALS_UNTIL_GIVEN_UP, 2 * most)
    for _ in range(patience - 1):
        error = variants.refuse(CAUSE)
        assert error is not None
        assert error.passing
    assert find(variants, captures[1].state)[0] is captures[1]
    for index in range(patience):
        error = variants.refuse(CAUSE)
        assert error is not None
        assert error.passing == (index < patience - 1)
