"""Who may hold graphs, where there is room for a few."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Hashable
from typing import TypeVar

from kitsune.errors import Refusal

USES_BEFORE_OTHERS_GIVE_WAY = 20
"""So often somebody is used without graphs, before others that were not used meanwhile give way to them."""

_REMEMBERED_PER_PLACE = 32

H = TypeVar("H", bound=Hashable)


class Room:
    """Who holds graphs, of at most `size`: those who came first, for as long as they are used.

    They give way to somebody who was used `USES_BEFORE_OTHERS_GIVE_WAY` times since they were used last. So, where more
    are used in turn than there is room for, those that have graphs keep them; which of them was used least recently
    says nothing there, since that is the one that is needed next.

    Args:
        size: how many may hold graphs.
        remedy: what the user can do where there is no room.
    """

    def __init__(self, size: int, remedy: str | None = None) -> None:
        self._size = size
        self._now = 0
        self._uses: OrderedDict[Hashable, deque[int]] = OrderedDict()  # when, the latest ones
        reason = f"there is room for the graphs of {size}, and those that are there are in use"
        self._refusal = Refusal(reason, remedy=remedy)

    def note_use(self, user: Hashable) -> None:
        """`user` is used, whether it holds graphs or not."""
        self._now += 1
        if user not in self._uses:
            self._uses[user] = deque(maxlen=USES_BEFORE_OTHERS_GIVE_WAY)
            if len(self._uses) > self._size * _REMEMBERED_PER_PLACE:
                self._uses.popitem(last=False)
        self._uses[user].append(self._now)
        self._uses.move_to_end(user)

    def forget(self, user: Hashable) -> None:
        """`user` will not be used any more."""
        self._uses.pop(user, None)

    def place_for(self, user: Hashable, holders: Collection[H]) -> H | Refusal | None:
        """None if there is room for `user` beside `holders`; else the one that gives way, or why none does."""
        if len(holders) < self._size:
            return None
        oldest = min(holders, key=self._latest_use)
        uses = self._uses.get(user, deque())
        is_wanted = len(uses) == USES_BEFORE_OTHERS_GIVE_WAY and uses[0] > self._latest_use(oldest)
        return oldest if is_wanted else self._refusal

    def _latest_use(self, user: Hashable) -> int:
        return self._uses[user][-1] if user in self._uses else 0
