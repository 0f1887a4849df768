"""Chooses between eager execution and replay, by measuring both; counts and reports what was chosen."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal

from kitsune.background import is_quiet
from kitsune.budget import CaptureBudget
from kitsune.config import Mode
from kitsune.errors import Refusal, RefusedError
from kitsune.timing.samples import Samples, involuntary_switches

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
_MISSES_UNTIL_REST = 20

# Where replay has lost, both are timed again when eager steps have become this much slower, which is looked at now and
# then, and after each loss half as often.
_PROBE_EVERY = 5000
_DRIFT = 1.2

# What was measured while something else disturbed the host is measured again so much later, each time more.
_REVIEWS_SECONDS = (5.0, 30.0, 180.0)

_UNDECIDED = "undecided while the host is disturbed"


class Chooser:
    """Decides how the steps of one signature run.

    In `"auto"` mode some steps run eagerly and are timed, the next are replayed and timed, which makes a round, and
    what was faster stays; where that is not clear, there are more rounds for a while. All of them are the user's
    own steps, so measuring changes no result. What runs while anything is captured, or compiled in the background, is
    not timed, and counts for nothing. Where eager steps that were faster become slower later, both are
    timed again; so they are, a few times, where what they took was disturbed by something else on the host. In
    `"replay"` mode the first step is eager (it initialises the optimizer's state) and nothing is timed.

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
        self._round: dict[Choice, Samples] = {"eager": Samples(), "replay": Samples()}  # the present one
        self._rounds: list[tuple[float, float]] = []  # what an eager step took in each, and a replayed one
        self._samples: dict[Choice, Samples] = {"eager": Samples(), "replay": Samples()}  # of all rounds
        self._started: float | None = None
        self._spent = 0.0
        self._was_quiet = True  # at the start of the step
        self._num_spells = self._num_switches = 0  # the same
        self._misses = 0
        self._lost_to: float | None = None  # seconds of an eager step, where replays were measured no faster
        self._probe_every = _PROBE_EVERY
        self._since = 0  # steps that were not probed
        self._probes: list[float] = []
        self._reviews = list(_REVIEWS_SECONDS)
        self._review_at: float | None = None  # where the choice was made under disturbance
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
        self._num_spells = CaptureBudget.num_spells
        is_timed = self._timing() and self._seen[self.next()] >= _UNTIMED
        if self._was_quiet and (is_timed or self._is_probing()):
            self._synchronize()
            self._num_switches = involuntary_switches()
            self._started = time.perf_counter()

    def finish(self, choice: Choice, steps: int = 1) -> None:
        """Marks the end of a step (or of several) that ran as `choice`."""
        if self._auto and not (self._was_quiet and is_quiet()):
            return
        has_captured = self._auto and self._num_spells != CaptureBudget.num_spells
        if self.settled:
            if self._review_at is not None and time.perf_counter() >= self._review_at:
                self._review()
            elif not self._is_probing():
                self._since += 1
            elif not has_captured:
                self._probe(steps)
            return
        expected = self.next()
        self._misses = self._misses + 1 if expected != choice else 0
        if has_captured and self._seen[choice] >= _UNTIMED:
            return
        self._seen[choice] += 1
        if self._started is not None and self._timing() and self._seen[choice] > _UNTIMED:
            self._sample(choice, steps)
        if self._seen["replay"] < self._wanted or (self._auto and not self._round["replay"]):
            return
        if self._round["eager"]:
            self._rounds.append((self._round["eager"].median(), self._round["replay"].median()))
        if not self._auto or self._is_clear():
            self._settle()
        else:
            self._begin_round()

    def refuse(self, refusal: Refusal) -> None:
        """From now on steps of this signature run eagerly."""
        self.refusal, self._lost_to, self._review_at = refusal, None, None
        self.settled = True

    def reopen(self, rival: float | None = None) -> None:
        """Times both again: replays have changed since.

        Args:
            rival: seconds that a replay took before. If one takes longer now, that is left to say `has_lost`, and
                replays count as fast as they were.
        """
        if self._auto and self.refusal is None:
            self._rival, self.has_lost = rival, False
            self._begin_round()
            self._rounds.clear()
            self._samples = {"eager": Samples(), "replay": Samples()}
            self._spent, self.settled, self._is_spared, self._review_at = 0.0, False, False, None

    def will_not_improve(self) -> None:
        """Replays stay as they are: those that lose narrowly have lost."""
        self.may_improve = False
        if self._is_spared:
            self.reopen()

    @property
    def is_undecided(self) -> bool:
        """Whether both will be timed again, as something disturbed the host when they were."""
        return self._review_at is not None

    @property
    def review_at(self) -> float | None:
        """When that will be, by `time.perf_counter()`; None where it will not."""
        return self._review_at

    @property
    def is_at_rest(self) -> bool:
        """Whether steps run eagerly, and the next ones may do so without being told of here; see `pass_by`.

        So it is where replays have lost or are refused, and where they are tried at every step for long, and none can
        be made.
        """
        if self.settled:
            return self.refusal is not None and not self._is_probing()
        return self._auto and self._misses >= _MISSES_UNTIL_REST

    def pass_by(self, steps: int) -> None:
        """So many steps ran eagerly, of which nothing was told."""
        self._since += steps

    def describe(self) -> tuple[str, str]:
        """The mode and its reason, as a `Status` gives them."""
        mode, reason = self._describe()
        return mode, f"{reason}; {_UNDECIDED}" if self.is_undecided else reason

    def _describe(self) -> tuple[str, str]:
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
        """What an eager step takes, in the round whose gain is the median of all."""
        return self._seconds("eager")

    @property
    def replay_seconds(self) -> float | None:
        """What a replayed step takes in the same round, or took before if it had been faster than now."""
        return self._rival if self.has_lost else self._seconds("replay")

    def _seconds(self, choice: Choice) -> float | None:
        if self._rounds:
            eager, replay = self._median_round()
            return eager if choice == "eager" else replay
        return self._round[choice].median() if self._round[choice] else None

    def _median_round(self) -> tuple[float, float]:
        """The round with the median of the gains, the lower one of two."""
        ranked = sorted(self._rounds, key=lambda times: times[0] / max(times[1], 1e-9))
        return ranked[(len(ranked) - 1) // 2]

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

    def _sample(self, choice: Choice, steps: int) -> None:
        assert self._started is not None
        self._synchronize()
        elapsed = time.perf_counter() - self._started
        num_switches = involuntary_switches() - self._num_switches
        self._spent += elapsed
        for samples in (self._round[choice], self._samples[choice]):
            samples.add(elapsed / steps, num_switches)

    def _begin_round(self) -> None:
        self._seen = {"eager": 0, "replay": 0}
        self._round = {"eager": Samples(), "replay": Samples()}

    def _was_disturbed(self) -> bool:
        return any(samples.were_disturbed() for samples in self._samples.values())

    def _is_clear(self) -> bool:
        if not self._rounds:
            return False
        if self._spent >= _PATIENCE_SECONDS:
            return True
        eager, replay = self._median_round()
        if (self._rival is not None and replay > self._rival) or self._was_disturbed():
            return False
        return replay < _CLEARLY_FASTER * eager

    def _settle(self) -> None:
        self.settled = True
        if not self._auto:
            return
        eager, replay = self._median_round()
        if self._rival is not None and replay > self._rival:
            self.has_lost, replay = True, self._rival
        if self._was_disturbed() and self._reviews:
            self._review_at = time.perf_counter() + self._reviews.pop(0)
        if replay < eager:
            return
        narrowly = _NARROWLY_UNFUSED if self._is_compiled() else _NARROWLY
        self._is_spared = self.may_improve and replay < narrowly * eager
        if not self._is_spared:
            times = f"{replay * 1e6:.0f} us against {eager * 1e6:.0f} us"
            lost = "replay was measured no faster than eager"
            self.refusal = Refusal(f"{lost} ({times})", topic=lost)
            self._lost_to, self._since = eager, 0

    def _review(self) -> None:
        """Times both again, as far as that decides anything."""
        if self._lost_to is not None:
            self.refusal = self._lost_to = None
        self.reopen()


class RefusalLog:
    """Remembers every refusal once, and logs it once; once more as a warning if it was none before."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._seen: dict[str, tuple[str, int]] = {}  # by topic: the text, and how loud it was told

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
        told = refusal.refusal if isinstance(refusal, RefusedError) else refusal
        topic = told.topic or text
        if topic not in self._seen or level > self._seen[topic][1]:
            self._seen[topic] = text, level
            _log.log(level, message, self._subject, text)

    def reasons(self) -> tuple[str, ...]:
        return tuple(text for text, _ in self._seen.values())
