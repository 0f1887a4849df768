"""What each of Kitsune's optimizations contributes: the step's time from eager to all of them, one added at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from harness.selection import Case, Measurement
from harness.stats import Estimate, paired_ratio, typical_seconds
from harness.variants import VARIANTS


class Stage(Enum):
    """What is added to the stage before, as a reader calls it. The last two differ in the order of the same work."""

    EAGER = "eager"
    CAPTURED = "forward and backward captured"
    WHOLE = "optimizer in the step"
    STREAMS = "streams"


_FAMILIES = {
    Stage.EAGER: "eager",
    Stage.CAPTURED: "kitsune_dropin",
    Stage.WHOLE: "kitsune_trainstep",
    Stage.STREAMS: "kitsune_trainstep_streams",
}

_MOST_US = 1e12


@dataclass(frozen=True)
class StageTime:
    """The time of a step at one stage.

    ``seconds`` is None where it is ``missing``, which then says why. ``speedup`` is eager's time over this one's and
    ``gain`` that of the last stage before that was measured; None where there is nothing to compare with.
    ``is_own`` marks seconds that Kitsune took itself while it chose between ways, outside the paired measurement.
    """

    stage: Stage
    variant: str
    seconds: float | None
    speedup: Estimate | None
    gain: Estimate | None
    is_own: bool
    mode: str | None
    missing: str | None


@dataclass(frozen=True)
class Breakdown:
    """All stages of a case in one precision, in order."""

    case: Case
    precision: str
    stages: tuple[StageTime, ...]


def breakdowns(measured: Measurement) -> tuple[Breakdown, ...]:
    """A breakdown for each case and each precision that Kitsune has variants of, in the order of the results."""
    precisions = tuple(dict.fromkeys(variant.precision for variant in VARIANTS.values() if variant.is_kitsune))
    return tuple(_breakdown(measured, case, precision) for case in measured.rounds for precision in precisions)


def _breakdown(measured: Measurement, case: Case, precision: str) -> Breakdown:
    variants = {stage: f"{family}_{precision}" for stage, family in _FAMILIES.items()}
    is_apart = variants[Stage.STREAMS] in measured.variants(case)
    own = {} if is_apart else _own_times(measured, case, variants[Stage.WHOLE])
    stages: list[StageTime] = []
    for stage, variant in variants.items():
        seconds = own.get(stage, _seconds(measured, case, variant))
        current = StageTime(
            stage=stage,
            variant=variant,
            seconds=seconds,
            speedup=None,
            gain=None,
            is_own=stage in own,
            mode=_mode(measured, case, variant),
            missing=_reason(measured, case, variant) if seconds is None else None,
        )
        known = [entry for entry in stages if entry.seconds is not None]
        if seconds is not None and known:
            gain = _speedup(measured, case, current, known[-1])
            over_eager = _speedup(measured, case, current, known[0]) if known[0].stage is Stage.EAGER else None
            current = replace(current, gain=gain, speedup=over_eager)
        stages.append(current)
    return Breakdown(case, precision, tuple(stages))


def _seconds(measured: Measurement, case: Case, variant: str) -> float | None:
    rounds = [entry.blocks[variant].seconds for entry in measured.rounds[case] if variant in entry.blocks]
    return typical_seconds(rounds) if rounds else None


def _own_times(measured: Measurement, case: Case, variant: str) -> dict[Stage, float]:
    """Kitsune's own seconds at the last two stages, of the ``schedules`` in a status; nothing unless both are there."""
    schedules = _status(measured, case, variant).get("schedules")
    if not isinstance(schedules, (list, tuple)):
        return {}
    found: dict[Stage, float] = {}
    for entry in schedules:
        timed = _schedule_time(entry)
        if timed is None:
            continue
        num_streams, seconds = timed
        stage = Stage.WHOLE if num_streams == 1 else Stage.STREAMS
        found[stage] = min(seconds, found.get(stage, seconds))
    return found if len(found) == 2 else {}


def _schedule_time(entry: object) -> tuple[int, float] | None:
    """How many streams a schedule uses and the seconds of a step; None where it was not timed or cannot be read."""
    if not isinstance(entry, Mapping):
        return None
    num_streams, us = entry.get("num_streams"), entry.get("measured_us")
    if type(num_streams) is not int or num_streams < 1:
        return None
    if isinstance(us, bool) or not isinstance(us, (int, float)) or not 0 < us < _MOST_US:
        return None
    return num_streams, us * 1e-6


def _speedup(measured: Measurement, case: Case, current: StageTime, earlier: StageTime) -> Estimate | None:
    """How much faster ``current`` is: by paired rounds; without an interval where a time is Kitsune's own."""
    if current.is_own or earlier.is_own:
        assert current.seconds is not None and earlier.seconds is not None
        return Estimate(earlier.seconds / current.seconds, 0.0, math.inf, 1, 1)
    pairs = measured.pairs(case, current.variant, earlier.variant)
    return paired_ratio(pairs).inverted() if pairs else None


def _mode(measured: Measurement, case: Case, variant: str) -> str | None:
    mode = _status(measured, case, variant).get("mode")
    return None if mode is None else str(mode)


def _status(measured: Measurement, case: Case, variant: str) -> Mapping[str, object]:
    profile = measured.profiles.get((case, variant))
    return {} if profile is None or profile.kitsune is None else profile.kitsune


def _reason(measured: Measurement, case: Case, variant: str) -> str:
    skip = measured.skips.get((case, variant))
    return "not measured" if skip is None else f"{skip.status}: {skip.reason}"
