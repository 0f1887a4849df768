"""Chooses between eager execution and replay, by measuring both; counts and reports what was chosen."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal

from kitsune.background import is_quiet
from kitsune.config import Mode
from kitsune.errors import Refusal, RefusedError

Choice = Literal["eager", "replay"]

_log = logging.getLogger("kitsune")

# The first eager step initialises libraries and optimizer state; the first replay captures.
_UNTIMED = 1
_SAMPLES = 4

# Short steps are timed again, in turns, unless the difference is clear, and no earlier replay was faster: the first of
# each are slowed by cold caches, and whatever else the machine does for a moment slows one of them alone.
_CLEARLY_FASTER = 0.5
_PATIENCE_SECONDS = 0.1

# Replays that are no slower than this, beside eager steps, are kept as long as they may become faster: where the device
# sets the pace, the operators of the captured step take as long as they did, and fusing alone makes the difference.
# Those that torch.compile has fused take less.
_NARROWLY = 1.1
_NARROWLY_UNFUSED = 2.0

_MISSES_UNTIL_PAUSE = 3

# Where replay has lost, both are timed again when eager steps have become this much slower, which is looked at now and
# then, and after each loss half as often.
_PROBE_EVERY = 5000
_DRIFT = 1.2

_FREE_CAPTURES = 4
_REPLAYS_PER_CAPTURE = 20


class Chooser:
    """Decides how the steps of one signature run.

    In `"auto"` mode some steps run eagerly and are timed, the next are replayed and timed, and what
    was faster stays; where that is not clear, it is repeated for a while. All of them are the user's
    own steps, so measuring changes no result. What runs while kernels are compiled in the background is
    not timed, and counts for nothing. Where eager steps that were faster become slower later, both are
    timed again. In `"replay"` mode the first step is eager (it
    initialises the optimizer's state) and nothing is timed.

    Args:
        mode: the configured mode.
        synchronize: waits for the device, so that times are of work done and not of work queued.
        is_compiled: tells whether what runs eagerly is fused, as replays are yet to be; asked where that matters.
        was_met: whether there was a step of the signature before; it ran eagerly.

    Attributes:
        may_improve: replays are yet to be made faster, after which they are timed anew. Until then those that lose
            narrowly stay.
    """

    def __init__(
        self,
        mode: Mode,
        synchronize: Callable[[], None],
        *,
        is_compiled: Callable[[], bool] = lambda: False,
        was_met: bool = False,
    ) -> None:
        self.refusal: Refusal | None = None
        if mode == "eager":
            self.refusal = Refusal("mode='eager' was asked for")
        self._auto = mode == "auto"
        self._wanted = _UNTIMED + (_SAMPLES if self._auto else 0)  # steps of each kind, before one is chosen
        self._synchronize = synchronize
        self._is_compiled = is_compiled
        self._seen: dict[Choice, int] = {"eager": _UNTIMED if was_met else 0, "replay": 0}
        self._best: dict[Choice, float] = {}
        self._started: float | None = None
        self._spent = 0.0
        self._was_quiet = True  # at the start of the step
        self._misses = 0
        self._lost_to: float | None = None  # seconds of an eager step, where replays were measured no faster
        self._probe_every = _PROBE_EVERY
        self._since = 0  # steps that were not probed
        self._probes: list[float] = []
        self.settled = mode == "eager"
        self.may_improve = self._is_spared = False
        self._rival: float | None = None
        self.has_lost = False

    def next(self) -> Choice:
        """How the coming step shall run."""
        if self.refusal is not None:
            return "eager"
        return "eager" if self._seen["eager"] < self._wanted else "replay"

    def start(self) -> None:
        """Marks the start of a step. The device is waited for only where the step may be timed."""
        self._was_quiet, self._started = is_quiet(), None
        is_timed = self._timing() and self._seen[self.next()] >= _UNTIMED
        if self._was_quiet and (is_timed or self._is_probing()):
            self._synchronize()
            self._started = time.perf_counter()

    def finish(self, choice: Choice, steps: int = 1) -> None:
        """Marks the end of a step (or of several) that ran as `choice`."""
        if self._auto and not (self._was_quiet and is_quiet()):
            return
        if self.settled:
            if self._is_probing():
                self._probe(steps)
            else:
                self._since += 1
            return
        expected = self.next()
        self._misses = self._misses + 1 if expected != choice else 0
        self._seen[choice] += 1
        if self._started is not None and self._timing() and self._seen[choice] > _UNTIMED:
            self._synchronize()
            elapsed = time.perf_counter() - self._started
            self._spent += elapsed
            seconds = elapsed / steps
            self._best[choice] = min(seconds, self._best.get(choice, seconds))
        if self._seen["replay"] < self._wanted or (self._auto and "replay" not in self._best):
            return
        if self._is_clear():
            self._settle()
        else:
            self._seen = {"eager": 0, "replay": 0}

    def refuse(self, refusal: Refusal) -> None:
        """From now on steps of this signature run eagerly."""
        self.refusal, self._lost_to = refusal, None
        self.settled = True

    def reopen(self, rival: float | None = None) -> None:
        """Times both again: replays have changed since.

        Args:
            rival: seconds that a replay took before. If one takes longer now, that is left to say `has_lost`, and
                replays count as fast as they were.
        """
        if self._auto and self.refusal is None:
            self._rival, self.has_lost = rival, False
            self._seen = {"eager": 0, "replay": 0}
            self._best.clear()
            self._spent, self.settled, self._is_spared = 0.0, False, False

    def will_not_improve(self) -> None:
        """Replays stay as they are: those that lose narrowly have lost."""
        self.may_improve = False
        if self._is_spared:
            self.reopen()

    def describe(self) -> tuple[str, str]:
        """The mode and its reason, as a `Status` gives them."""
        if self.refusal is not None:
            return "eager", str(self.refusal)
        if not self.settled and not self._auto:
            return "eager", "the latest step was the first of its signature, which runs eagerly"
        if not self.settled:
            return "measuring", "steps of this signature are being timed, eagerly and replayed"
        if not self._auto:
            return "replay", "mode='replay' was asked for"
        if self._is_spared:
            return "replay", "replay was measured about as fast as eager, and is to become faster"
        return "replay", "replay was measured faster than eager"

    @property
    def eager_seconds(self) -> float | None:
        return self._best.get("eager")

    @property
    def replay_seconds(self) -> float | None:
        return self._best.get("replay")

    def _timing(self) -> bool:
        # Timing waits for the device, so it pauses while replays fail one after the other.
        return self._auto and not self.settled and self._misses < _MISSES_UNTIL_PAUSE

    def _is_probing(self) -> bool:
        return self._lost_to is not None and self._since >= self._probe_every

    def _probe(self, steps: int) -> None:
        """Times an eager step; the last one of a few tells whether they have become slower."""
        assert self._lost_to is not None and self._started is not None
        self._synchronize()
        self._probes.append((time.perf_counter() - self._started) / steps)
        if len(self._probes) < _SAMPLES:
            return
        is_slower = min(self._probes) > _DRIFT * self._lost_to
        self._probes, self._since = [], 0
        if is_slower:
            self.refusal = self._lost_to = None
            self._probe_every *= 2
            self.reopen()

    def _is_clear(self) -> bool:
        if not self._auto or self._spent >= _PATIENCE_SECONDS:
            return True
        if self._rival is not None and self._best["replay"] > self._rival:
            return False
        return self._best["replay"] < _CLEARLY_FASTER * self._best["eager"]

    def _settle(self) -> None:
        self.settled = True
        if self._rival is not None and self._best["replay"] > self._rival:
            self._best["replay"], self.has_lost = self._rival, True
        if not self._auto or self._best["replay"] < self._best["eager"]:
            return
        narrowly = _NARROWLY_UNFUSED if self._is_compiled() else _NARROWLY
        self._is_spared = self.may_improve and self._best["replay"] < narrowly * self._best["eager"]
        if not self._is_spared:
            times = f"{self._best['replay'] * 1e6:.0f} us against {self._best['eager'] * 1e6:.0f} us"
            self.refusal = Refusal(f"replay was measured no faster than eager ({times})")
            self._lost_to, self._since = self._best["eager"], 0


class CaptureBudget:
    """Limits how often something may be captured again: each capture must be followed by enough replays."""

    def __init__(self) -> None:
        self.captures = 0

    def spend(self, replays: int, cause: Refusal | None = None) -> None:
        """Counts one capture.

        Args:
            cause: why what was captured before is no longer of use.

        Raises:
            RefusedError: there were too many for the number of replays so far.
        """
        self.captures += 1
        if self.captures > _FREE_CAPTURES + replays // _REPLAYS_PER_CAPTURE:
            text = f"it would have to be captured a {self.captures}th time after {replays} replays"
            raise RefusedError(Refusal(text if cause is None else f"{text}: {cause.reason}"))


class RefusalLog:
    """Remembers every refusal once, and logs it once."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._seen: dict[str, None] = {}

    def part(self, name: str) -> RefusalLog:
        """The same log for a part of what it is about: what is logged is said of that part alone."""
        part = RefusalLog(f"{name} of {self._subject}")
        part._seen = self._seen
        return part

    def add(self, refusal: Refusal | RefusedError) -> None:
        """Notes a refusal; a passing one, after which replay is tried again, is no warning."""
        if isinstance(refusal, RefusedError) and refusal.passing:
            self._note(logging.INFO, "%s ran a step as plain PyTorch: %s", refusal)
        else:
            self._note(logging.WARNING, "%s runs as plain PyTorch: %s", refusal)

    def do_without(self, refusal: Refusal | RefusedError) -> None:
        """Notes why something that was asked for is left out of what is replayed."""
        self._note(logging.WARNING, "%s does without what may be faster: %s", refusal)

    def tell(self, refusal: Refusal) -> None:
        """Notes what numbers depend on, and the loop may not expect."""
        self._note(logging.WARNING, "%s: %s", refusal)

    def _note(self, level: int, message: str, refusal: Refusal | RefusedError) -> None:
        text = str(refusal)
        if text not in self._seen:
            self._seen[text] = None
            _log.log(level, message, self._subject, text)

    def reasons(self) -> tuple[str, ...]:
        return tuple(self._seen)
