"""What was captured of one thing: variants, by the state that each depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from kitsune.errors import Refusal, RefusedError

REPLAYS_OF_USE = 20
"""A capture that was replayed so often was of use."""

MOST_USELESS = 4
"""Captures that are of no use, or not yet, before another one is made."""

REFUSALS_UNTIL_GIVEN_UP = 20
"""So many captures are refused in a row, with nothing that fits between, before the last one is refused for good."""


class Variant(Protocol):
    """A capture, and what is captured in its place."""

    @property
    def replays(self) -> int:
        """How often it was replayed."""


V = TypeVar("V", bound=Variant)


class Variants(Generic[V]):
    """The variants of one thing.

    Each replays the thing in the state in which it was captured, and is kept while that is another one: it may come
    back. Of states that do not, few variants are made: no more once `MOST_USELESS` captures were replayed less than
    `REPLAYS_OF_USE` times, or failed and were not made since.

    Args:
        most: how many variants there may be; states that return in turn are no more than these.

    Attributes:
        num_captures: how many were made.
    """

    def __init__(self, most: int) -> None:
        self.num_captures = 0
        self._all: list[V] = []
        self._captured_at: dict[int, int] = {}  # replays of a variant, by its `id`, at its latest capture
        self._failures: dict[int, int] = {}  # of captures of a variant, by its `id`, since one did not
        self._past_useless = 0  # captures that are over
        self._replays_seen: dict[int, int] = {}  # of each, by its `id`, when this was last asked
        self._patience = max(REFUSALS_UNTIL_GIVEN_UP, 2 * most)
        self._num_refused = 0  # captures, in a row

    def __iter__(self) -> Iterator[V]:
        return iter(tuple(self._all))

    def __len__(self) -> int:
        return len(self._all)

    def add(self, variant: V) -> None:
        self._all.append(variant)

    def remove(self, variant: V) -> None:
        """The state of `variant` is over, or others take its place."""
        self._end_capture(variant)
        self._past_useless += self._failures.pop(id(variant), 0)
        self._all.remove(variant)

    def find(
        self, fits: Callable[[V], bool], is_busy: Callable[[V], bool] = lambda _: False
    ) -> tuple[V | None, list[V]]:
        """The first variant that fits the present state and is not busy, and those before it that fit and are.

        Those of the state that was found last come first, in their order.
        """
        first_misfit, busy = None, list[V]()
        for place, variant in enumerate(self._all):
            if not fits(variant):
                first_misfit = place if first_misfit is None else first_misfit
            elif is_busy(variant):
                busy.append(variant)
            else:
                if first_misfit is not None:
                    self._all.insert(first_misfit, self._all.pop(place))
                self._num_refused = 0
                return variant, busy
        return None, busy

    def refuse(self, cause: Refusal | None) -> RefusedError | None:
        """None if another capture may be made; else why not, for good where that has been so for long.

        Args:
            cause: why there is none that serves.
        """
        num_useless = self._past_useless + sum(map(self._num_useless, self._all))
        if num_useless < MOST_USELESS:
            return None
        self._num_refused += 1
        useless = (
            f"{num_useless} of {self.num_captures} captures failed or were replayed less than {REPLAYS_OF_USE} times"
        )
        text = f"it would have to be captured again, and {useless}"
        refusal = Refusal(text if cause is None else f"{text}: {cause.reason}")
        return RefusedError(refusal, passing=self._num_refused < self._patience)

    def note_capture(self, variant: Variant) -> None:
        """`variant` is captured now, in place of what it was captured as before."""
        self._end_capture(variant)
        self.num_captures += 1
        self._captured_at[id(variant)] = variant.replays

    def unused(self) -> list[V]:
        """Those that were not replayed since this was last asked, if it was asked and there are others."""
        before, self._replays_seen = self._replays_seen, {id(one): one.replays for one in self._all}
        idle = [one for one in self._all if before.get(id(one)) == one.replays]
        return idle if len(idle) < len(self._all) else []

    def _num_useless(self, variant: Variant) -> int:
        """The captures of a variant that are of no use, or not yet."""
        captured_at = self._captured_at.get(id(variant), -REPLAYS_OF_USE)
        replays = variant.replays - captured_at
        return (self._failures.get(id(variant), 0) if not replays else 0) + (replays < REPLAYS_OF_USE)

    def _end_capture(self, variant: Variant) -> None:
        captured_at = self._captured_at.pop(id(variant), None)
        if captured_at is None:
            return
        replays = variant.replays - captured_at
        if replays:
            self._failures.pop(id(variant), None)
            self._past_useless += replays < REPLAYS_OF_USE
        else:  # it failed: one that is made is replayed at once
            self._failures[id(variant)] = self._failures.get(id(variant), 0) + 1
