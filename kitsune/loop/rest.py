"""Modules whose calls run eagerly anyway are called as if nobody had taken them over, but for a look now and then."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kitsune.errors import Refusal
from kitsune.fallback import Choice
from kitsune.loop.interception import TakenOver

if TYPE_CHECKING:
    from kitsune.loop.split_step import SplitStep

LOOK_EVERY = 97
"""Every so many iterations one is looked at: a prime number, so that of shapes that come in turn each is met."""

RECENT = 50
"""What was called so many iterations ago may be called again soon: what loses, as the last batch of an epoch, does not
let what gains go by."""

# To look at a call takes some tens of microseconds, which is nothing beside this.
_LONG_CALL_SECONDS = 5e-3

# A replay of few calls, beside many eager ones, has to gain so much of the iteration, or it costs more to look at all.
_GAIN_OF_FEW = 0.1

_HARDLY_GAINS = Refusal(
    "most calls of the model run as plain PyTorch, and to replay the others was measured to gain less than a tenth"
)


class Rest:
    """Which modules of a loop rest: their calls are not looked at.

    Args:
        verify: so many replays of each step are to be compared with plain PyTorch.
    """

    def __init__(self, verify: int) -> None:
        self._verify = verify
        self._now = 0  # iterations
        self._began = 0
        self._deadline = math.inf
        self._resting: list[tuple[TakenOver, Sequence[SplitStep]]] = []

    def __bool__(self) -> bool:
        """Whether any module rests."""
        return bool(self._resting)

    def advance(self) -> None:
        """To be called after each iteration, before `consider`."""
        self._now += 1
        if self._resting and (self._now - self._began >= LOOK_EVERY - 1 or time.perf_counter() >= self._deadline):
            self.look()

    def look(self) -> None:
        """Has the calls of the coming iteration looked at."""
        for taken, steps in self._resting:
            taken.come_back()
            for step in steps:
                step.chooser.pass_by(self._now - self._began)
        self._resting.clear()

    def end(self) -> None:
        """Nothing comes back any more."""
        self._resting.clear()

    def note_use(self, step: SplitStep) -> None:
        """`step` was called in the iteration that ends."""
        step.used_at = self._now

    def consider(self, taken: TakenOver, steps: Sequence[SplitStep], deadline: float) -> None:
        """Lets a module rest that was called in the iteration that has ended, if nothing is missed.

        Args:
            steps: all of the module.
            deadline: when to look at the latest, by `time.perf_counter()`.
        """
        recent = [step for step in steps if self._now - step.used_at < RECENT]
        if not all(map(self._is_at_rest, recent)) or (recent and all(map(_is_long, recent))):
            return
        if not self._resting:
            self._began, self._deadline = self._now, math.inf
        reviews = [step.chooser.review_at for step in recent]
        self._deadline = min([self._deadline, deadline, *(review for review in reviews if review is not None)])
        self._resting.append((taken, recent))
        taken.stand_aside()

    def _is_at_rest(self, step: SplitStep) -> bool:
        """Whether calls of `step` are eager, unless something has changed meanwhile."""
        is_verified = step.chooser.refusal is not None or step.verified >= self._verify
        return step.chooser.is_at_rest and is_verified


def refuse_slight_gains(iteration: Mapping[SplitStep, tuple[Choice, int]]) -> None:
    """Where most calls of a module are eager for good, others that gain next to nothing are to be, too.

    Args:
        iteration: of each step how its calls ran, and how many there were.
    """
    for step, (choice, count) in iteration.items():
        if choice != "replay" or not step.chooser.settled or step.chooser.refusal is not None:
            continue
        eager, replay = step.chooser.eager_seconds, step.chooser.replay_seconds
        if eager is None or replay is None or replay < (1.0 - _GAIN_OF_FEW) * eager:
            continue
        others = [(other, num) for other, (_, num) in iteration.items() if other.module is step.module]
        if sum(num for other, num in others if other.chooser.is_at_rest) > count:
            step.chooser.refuse(_HARDLY_GAINS)


def _is_long(step: SplitStep) -> bool:
    seconds = step.chooser.eager_seconds
    return seconds is not None and seconds > _LONG_CALL_SECONDS
