"""What two sides can be compared by, besides the time that :mod:`harness.comparison` judges against a control.

A side is a measurement: a commit on a machine. All metrics are better where they are less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal, get_args

from harness.conclusive import MARGIN
from harness.names import order, precision_of, reference_of
from harness.rows import Contrast
from harness.selection import Case, Measurement
from harness.stats import (
    MOST_MARGIN,
    Estimate,
    Pairs,
    Verdict,
    compare_ratios,
    judge,
    margin_band,
    noise_margin,
    paired_ratio,
    round_noise,
    typical_seconds,
)
from harness.store import Profile

Name = Literal["ratio", "time", "setup", "warm-setup", "memory"]
Rounds = Sequence[Pairs]

DEFAULT_MARGINS: Mapping[Name, float] = {
    "ratio": MARGIN,
    "time": MARGIN,
    "setup": 0.25,
    "warm-setup": 0.25,
    "memory": 0.03,
}
"""Relative differences that do not matter; noise may widen those of single rows."""

MEANINGS: Mapping[Name, str] = {
    "ratio": "time of a step as a multiple of that of a control in the same processes (the default)",
    "time": "seconds of a step; between commits whatever slowed the whole machine counts too",
    "setup": "seconds before the first step at full speed, compilers' caches being empty",
    "warm-setup": "the same in a process that finds what an earlier one has left in these caches",
    "memory": "peak bytes: allocated on the GPU, on a CPU the resident set",
}

_WORDS = {
    "time": {entry: entry.value for entry in Verdict},
    "more": {
        Verdict.FASTER: "less",
        Verdict.SAME: "same",
        Verdict.SLOWER: "more",
        Verdict.INCONCLUSIVE: "inconclusive",
    },
}


@dataclass(frozen=True)
class _Single:
    """A metric with one value for each run: where it is, its unit, and a second reading of it by the same process."""

    value: Callable[[Profile], float | None]
    unit: str
    second: Callable[[Profile], float | None]


def _bytes(profile: Profile) -> float | None:
    return profile.peak_rss_bytes if profile.peak_allocated_bytes is None else profile.peak_allocated_bytes


def _bytes_of_a_step(profile: Profile) -> float | None:
    timeline = profile.memory_timeline
    return None if timeline is None else max(allocated for _, allocated, _ in timeline.points)


_SINGLE: Mapping[str, _Single] = {
    "setup": _Single(lambda profile: profile.cold_setup_s, "s", lambda profile: None),
    "warm-setup": _Single(lambda profile: profile.warm_setup_s, "s", lambda profile: None),
    "memory": _Single(_bytes, "bytes", _bytes_of_a_step),
}


def names() -> tuple[Name, ...]:
    """All metrics."""
    return get_args(Name)


def word(metric: str, judged: Verdict) -> str:
    """A verdict as it is said of a metric: "slower" of a time, "more" of memory."""
    return _WORDS["more" if metric == "memory" else "time"][judged]


def samples_of(metric: str) -> str:
    """What there was where an interval could not be formed."""
    return "one run" if metric in _SINGLE else "one round"


def across(
    older: Measurement,
    newer: Measurement,
    metrics: Iterable[Name],
    margins: Mapping[Name, float],
    wanted: Callable[[str], bool],
) -> tuple[Contrast, ...]:
    """The same variants on two sides that were measured apart, metric by metric; "ratio" is that to eager's time.

    Times are judged by the spread between rounds on both sides; a single value for each run by the spread between runs.
    Where a side has one run, only the bytes that torch's allocator counts say something: that they are the same, or
    that they differ by more than :data:`harness.stats.MOST_MARGIN`, at the peak and in a recorded step alike. The peak
    of one process may have something that happens once, such as recording a graph for a recurring batch, which that of
    another has not: with the same plan, an MLP's was 8 or 15 MiB, and its recorded step took 8.

    Args:
        wanted: which variants, by name.
    """
    found = [
        entry
        for case in newer.rounds
        for variant in sorted(filter(wanted, newer.variants(case)), key=order)
        for metric in metrics
        for entry in _across(older, newer, case, variant, metric, margins[metric])
    ]
    return _judged(found)


def within(
    measured: Measurement, base: str, head: str, metrics: Iterable[Name], margins: Mapping[Name, float]
) -> tuple[Contrast, ...]:
    """Two variants of one measurement, case by case; their times by pairs of the same turn."""
    found: list[Contrast] = []
    for case in measured.rounds:
        for metric in metrics:
            if metric in _SINGLE:
                sides = [measured.every_profile(case, variant) for variant in (base, head)]
                found += _single(case, (base, head), metric, sides, margins[metric])
            elif pairs := measured.pairs(case, head, base):
                values = (_seconds(measured, case, base), _seconds(measured, case, head))
                margin = noise_margin(round_noise(pairs), margins[metric])
                found.append(_contrast(case, (base, head), ("time", "s"), values, paired_ratio(pairs), margin))
    return _judged(found)


def _across(
    older: Measurement, newer: Measurement, case: Case, variant: str, metric: Name, margin: float
) -> list[Contrast]:
    """The contrast, if both sides have what it takes."""
    if variant not in older.variants(case):
        return []
    if metric == "ratio":
        return _relative(older, newer, case, variant, margin)
    if metric == "time":
        base, head = (_absolute(side, case, variant) for side in (older, newer))
        values = (_seconds(older, case, variant), _seconds(newer, case, variant))
        return [_compared(case, (variant, variant), ("time", "s"), values, (base, head), margin)]
    sides = [side.every_profile(case, variant) for side in (older, newer)]
    return _single(case, (variant, variant), metric, sides, margin)


def _relative(older: Measurement, newer: Measurement, case: Case, variant: str, margin: float) -> list[Contrast]:
    base, head = (side.pairs(case, variant, reference_of(variant)) for side in (older, newer))
    if variant == reference_of(variant) or not base or not head:
        return []
    values = (paired_ratio(base).ratio, paired_ratio(head).ratio)
    return [_compared(case, (variant, variant), ("ratio", "times eager"), values, (base, head), margin)]


def _single(
    case: Case, variants: tuple[str, str], metric: str, sides: Sequence[Sequence[Profile]], margin: float
) -> list[Contrast]:
    of = _SINGLE[metric]
    base, head = (_values(profiles, of.value) for profiles in sides)
    if not base or not head:
        return []
    values = (median(base), median(head))
    found = _compared(case, variants, (metric, of.unit), values, (_unpaired(base), _unpaired(head)), margin)
    before, after = (_values(profiles, of.second) for profiles in sides)
    return [replace(found, second_ratio=median(after) / median(before) if before and after else None)]


def _compared(
    case: Case,
    variants: tuple[str, str],
    metric: tuple[str, str],
    values: tuple[float, float],
    sides: tuple[Rounds, Rounds],
    margin: float,
) -> Contrast:
    """Two sides, base first, that were measured apart."""
    base, head = sides
    own = noise_margin(round_noise(head, base), margin)
    return _contrast(case, variants, metric, values, compare_ratios(head, base), own)


def _contrast(
    case: Case,
    variants: tuple[str, str],
    metric: tuple[str, str],
    values: tuple[float, float],
    ratio: Estimate,
    margin: float,
) -> Contrast:
    """A contrast that is not judged yet; ``variants`` and ``values`` are base's first, ``metric`` has its unit."""
    return Contrast(
        case=case,
        variant=variants[1],
        base_variant=variants[0],
        precision=precision_of(variants[1]),
        metric=metric[0],
        unit=metric[1],
        base=values[0],
        head=values[1],
        ratio=ratio,
        margin=margin,
        verdict=Verdict.INCONCLUSIVE,
    )


def _judged(contrasts: Sequence[Contrast]) -> tuple[Contrast, ...]:
    """The contrasts with their verdicts, which depend on how many there are of a metric."""
    verdicts = {}
    for metric in {entry.metric for entry in contrasts}:
        members = [entry for entry in contrasts if entry.metric == metric]
        verdicts[metric] = iter(judge([entry.ratio for entry in members], [entry.margin for entry in members]))
    return tuple(replace(entry, verdict=_confirmed(entry, next(verdicts[entry.metric]))) for entry in contrasts)


def _confirmed(entry: Contrast, judged: Verdict) -> Verdict:
    """A verdict that neither rests on one run nor is contradicted by the second reading, as far as there is one."""
    if entry.metric == "memory" and entry.case.device == "cuda" and not entry.ratio.has_interval:
        return _of_one_run(entry)
    if judged not in (Verdict.FASTER, Verdict.SLOWER) or entry.second_ratio is None:
        return judged
    return judged if _by_value(entry.second_ratio, entry.margin) is judged else Verdict.INCONCLUSIVE


def _of_one_run(entry: Contrast) -> Verdict:
    if _by_value(entry.ratio.ratio, entry.margin) is Verdict.SAME:
        return Verdict.SAME
    widest = max(entry.margin, MOST_MARGIN)
    second = Verdict.SAME if entry.second_ratio is None else _by_value(entry.second_ratio, widest)
    is_confirmed = second is not Verdict.SAME and second is _by_value(entry.ratio.ratio, widest)
    return second if is_confirmed else Verdict.INCONCLUSIVE


def _by_value(ratio: float, margin: float) -> Verdict:
    least, most = margin_band(margin)
    if ratio > most:
        return Verdict.SLOWER
    return Verdict.FASTER if ratio < least else Verdict.SAME


def _values(profiles: Sequence[Profile], value: Callable[[Profile], float | None]) -> list[float]:
    """The positive values of the pooled runs, one of each; those of a variant that was never profiled are none."""
    return [found for profile in profiles if (found := value(profile)) is not None and found > 0]


def _absolute(measured: Measurement, case: Case, variant: str) -> list[list[tuple[float, float]]]:
    rounds = [entry.blocks[variant].seconds for entry in measured.rounds[case] if variant in entry.blocks]
    return [[(seconds, 1.0) for seconds in times] for times in rounds]


def _unpaired(values: Sequence[float]) -> list[list[tuple[float, float]]]:
    return [[(value, 1.0)] for value in values]


def _seconds(measured: Measurement, case: Case, variant: str) -> float:
    return typical_seconds(
        [entry.blocks[variant].seconds for entry in measured.rounds[case] if variant in entry.blocks]
    )
