"""What two sides can be compared by, besides the time that :mod:`harness.comparison` judges against a control.

A side is a measurement: a commit on a machine. All metrics are better where they are less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from harness.conclusive import MARGIN
from harness.names import order, precision_of, reference_of
from harness.rows import Contrast
from harness.selection import Case, Measurement
from harness.stats import (
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

Name = Literal["ratio", "time", "setup", "memory"]
Rounds = Sequence[Pairs]

DEFAULT_MARGINS: Mapping[Name, float] = {"ratio": MARGIN, "time": MARGIN, "setup": 0.25, "memory": 0.03}
"""Relative differences that do not matter; noise may widen those of single rows."""

MEANINGS: Mapping[Name, str] = {
    "ratio": "time of a step as a multiple of that of a control in the same processes (the default)",
    "time": "seconds of a step; between commits whatever slowed the whole machine counts too",
    "setup": "seconds before the first fast step",
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
    """A metric with one value for each run: where it is, its unit, and whether repeating it gives the same again."""

    value: Callable[[Profile], float | None]
    unit: str
    repeats: Callable[[Case], bool]


def _bytes(profile: Profile) -> float | None:
    return profile.peak_rss_bytes if profile.peak_allocated_bytes is None else profile.peak_allocated_bytes


_SINGLE: Mapping[str, _Single] = {
    "setup": _Single(lambda profile: profile.setup_s, "s", lambda case: False),
    "memory": _Single(_bytes, "bytes", lambda case: case.device == "cuda"),
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

    Times are judged by the spread between rounds on both sides; a single value for each run by the spread between runs,
    and without one only where repeating it on the same machine gives the same.

    Args:
        wanted: which variants, by name.
    """
    found = [
        _across(older, newer, case, variant, metric, margins[metric])
        for case in newer.rounds
        for variant in sorted(filter(wanted, newer.variants(case)), key=order)
        for metric in metrics
    ]
    return _judged([entry for entry in found if entry is not None])


def within(
    measured: Measurement, base: str, head: str, metrics: Iterable[Name], margins: Mapping[Name, float]
) -> tuple[Contrast, ...]:
    """Two variants of one measurement, case by case; their times by pairs of the same turn."""
    found = []
    for case in measured.rounds:
        for metric in metrics:
            if metric in _SINGLE:
                sides = [_values(measured, case, variant, metric) for variant in (base, head)]
                if all(sides):
                    found.append(_single(case, (base, head), metric, sides, margins[metric]))
            elif pairs := measured.pairs(case, head, base):
                values = (_seconds(measured, case, base), _seconds(measured, case, head))
                margin = noise_margin(round_noise(pairs), margins[metric])
                found.append(_contrast(case, (base, head), ("time", "s"), values, paired_ratio(pairs), margin))
    return _judged(found)


def _across(
    older: Measurement, newer: Measurement, case: Case, variant: str, metric: Name, margin: float
) -> Contrast | None:
    if variant not in older.variants(case):
        return None
    if metric == "ratio":
        return _relative(older, newer, case, variant, margin)
    if metric == "time":
        base, head = (_absolute(side, case, variant) for side in (older, newer))
        values = (_seconds(older, case, variant), _seconds(newer, case, variant))
        return _compared(case, (variant, variant), ("time", "s"), values, (base, head), margin)
    sides = [_values(side, case, variant, metric) for side in (older, newer)]
    return _single(case, (variant, variant), metric, sides, margin) if all(sides) else None


def _relative(older: Measurement, newer: Measurement, case: Case, variant: str, margin: float) -> Contrast | None:
    base, head = (side.pairs(case, variant, reference_of(variant)) for side in (older, newer))
    if variant == reference_of(variant) or not base or not head:
        return None
    values = (paired_ratio(base).ratio, paired_ratio(head).ratio)
    return _compared(case, (variant, variant), ("ratio", "times eager"), values, (base, head), margin)


def _single(
    case: Case, variants: tuple[str, str], metric: str, sides: Sequence[Sequence[float]], margin: float
) -> Contrast:
    base, head = sides
    values = (typical_seconds([base]), typical_seconds([head]))
    return _compared(case, variants, (metric, _SINGLE[metric].unit), values, (_unpaired(base), _unpaired(head)), margin)


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
    judged = [replace(entry, verdict=next(verdicts[entry.metric])) for entry in contrasts]
    return tuple(
        replace(entry, verdict=_by_value(entry.ratio.ratio, entry.margin)) if _is_exact(entry) else entry
        for entry in judged
    )


def _is_exact(entry: Contrast) -> bool:
    """Whether single values without an interval say enough: repeating them gives the same again."""
    return entry.metric in _SINGLE and not entry.ratio.has_interval and _SINGLE[entry.metric].repeats(entry.case)


def _by_value(ratio: float, margin: float) -> Verdict:
    least, most = margin_band(margin)
    if ratio > most:
        return Verdict.SLOWER
    return Verdict.FASTER if ratio < least else Verdict.SAME


def _values(measured: Measurement, case: Case, variant: str, metric: str) -> list[float]:
    """The positive values of the pooled runs, one of each; those of a variant that was never profiled are none."""
    found = [_SINGLE[metric].value(profile) for profile in measured.every_profile(case, variant)]
    return [value for value in found if value is not None and value > 0]


def _absolute(measured: Measurement, case: Case, variant: str) -> list[list[tuple[float, float]]]:
    rounds = [entry.blocks[variant].seconds for entry in measured.rounds[case] if variant in entry.blocks]
    return [[(seconds, 1.0) for seconds in times] for times in rounds]


def _unpaired(values: Sequence[float]) -> list[list[tuple[float, float]]]:
    return [[(value, 1.0)] for value in values]


def _seconds(measured: Measurement, case: Case, variant: str) -> float:
    return typical_seconds(
        [entry.blocks[variant].seconds for entry in measured.rounds[case] if variant in entry.blocks]
    )
