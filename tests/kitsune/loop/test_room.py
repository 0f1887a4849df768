"""Who keeps graphs where more are used than there is room for: counts of uses."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from kitsune.errors import Refusal
from kitsune.loop.room import USES_BEFORE_OTHERS_GIVE_WAY, Room

ROUNDS = 4 * USES_BEFORE_OTHERS_GIVE_WAY


def captures(room: Room, uses: Iterable[int]) -> list[int]:
    """Who captured, in order, where each user captures as soon as it may."""
    holders, order = set[int](), []
    for user in uses:
        room.note_use(user)
        if user in holders:
            continue
        place = room.place_for(user, sorted(holders))
        if isinstance(place, Refusal):
            continue
        holders.discard(place if isinstance(place, int) else -1)
        holders.add(user)
        order.append(user)
    return order


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("more", [1, 2, 30])
def test_those_who_are_used_in_turn_stay_as_they_are(size: int, more: int) -> None:
    uses = [user for _ in range(ROUNDS) for user in range(size + more)]
    assert captures(Room(size), uses) == list(range(size))


def test_those_who_are_used_at_random_stay_as_they_are() -> None:
    draw = random.Random(0)
    assert len(captures(Room(8), [draw.randrange(12) for _ in range(5000)])) == 8


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_used_no_more_gives_way(size: int) -> None:
    """The least recently used one first, and only for somebody who is used much."""
    early = [user for _ in range(ROUNDS) for user in range(size)]
    once_each = list(range(100, 100 + ROUNDS))
    assert captures(Room(size), [*early, *once_each]) == list(range(size))
    late = [7] * (USES_BEFORE_OTHERS_GIVE_WAY - 1)
    assert captures(Room(size), [*early, *late]) == list(range(size))
    assert captures(Room(size), [*early, *late, 7]) == [*range(size), 7]
    assert captures(Room(size), [*early, *[7] * ROUNDS, *[0] * ROUNDS]) == [*range(size), 7, 0]


def test_what_is_used_now_and_then_stays() -> None:
    """As the graphs of a smaller last batch, once an epoch: nobody without graphs is used more meanwhile."""
    epoch = [0] * 100 + [1]
    assert captures(Room(2), epoch * 5) == [0, 1]
    assert captures(Room(1), epoch * 5) == [0]


def test_what_is_forgotten_has_not_been_used() -> None:
    room = Room(1)
    room.note_use(1)
    for _ in range(USES_BEFORE_OTHERS_GIVE_WAY - 1):
        room.note_use(2)
    assert isinstance(room.place_for(2, [1]), Refusal)
    room.forget(1)
    room.note_use(2)
    assert room.place_for(2, [1]) == 1
    room.forget(2)
    room.note_use(2)
    assert isinstance(room.place_for(2, [1]), Refusal)


def test_the_refusal_says_how_many_there_are() -> None:
    room = Room(3, remedy="a larger max_graphs keeps more")
    place = room.place_for(9, [1, 2, 3])
    assert isinstance(place, Refusal)
    assert str(place) == (
        "there is room for the graphs of 3, and those that are there are in use; a larger max_graphs keeps more"
    )


def test_users_who_never_come_back_take_no_memory() -> None:
    room = Room(2)
    for user in range(10_000):
        room.note_use(user)
    assert len(room._uses) < 100
