"""What two sides can be compared by, besides the time that :mod:`harness.comparison` judges against a control.

A side is a measurement: a commit on a machine. All metrics are better where they are less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from harness.names import order, precision_of, reference_of
from harness.rows import Contrast
from harness.selection import Case, Measurement
from harness.stats import Estimate, Verdict, compare_ratios, margin_band, paired_ratio, typical_seconds, verdict
from harness.store import Profile

Name = Literal["ratio", "time", "setup", "memory"]

DEFAULT_MARGINS: Mapping[Name, float] = {"ratio": 0.03, "time": 0.03, "setup": 0.25, "memory": 0.03}
"""Relative differences that do not matter."""

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
    return tuple(
        contrast
        for case in newer.rounds
        for variant in sorted(filter(wanted, newer.variants(case)), key=order)
        for metric in metrics
        if (contrast := _across(older, newer, case, variant, metric, margins[metric])) is not None
    )


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
                ratio = paired_ratio(pairs)
                seconds = (_seconds(measured, case, base), _seconds(measured, case, head))
                found.append(_timed(case, (base, head), seconds, ratio, margins[metric]))
    return tuple(found)


def _across(
    older: Measurement, newer: Measurement, case: Case, variant: str, metric: Name, margin: float
) -> Contrast | None:
    if variant not in older.variants(case):
        return None
    variants = (variant, variant)
    if metric == "ratio":
        return _relative(older, newer, case, variant, margin)
    if metric == "time":
        ratio = compare_ratios(_absolute(newer, case, variant), _absolute(older, case, variant))
        seconds = (_seconds(older, case, variant), _seconds(newer, case, variant))
        return _timed(case, variants, seconds, ratio, margin)
    sides = [_values(side, case, variant, metric) for side in (older, newer)]
    return _single(case, variants, metric, sides, margin) if all(sides) else None


def _relative(older: Measurement, newer: Measurement, case: Case, variant: str, margin: float) -> Contrast | None:
    base, head = (side.pairs(case, variant, reference_of(variant)) for side in (older, newer))
    if variant == reference_of(variant) or not base or not head:
        return None
    ratio = compare_ratios(head, base)
    return Contrast(
        case, variant, variant, precision_of(variant), "ratio", "times eager",
        paired_ratio(base).ratio, paired_ratio(head).ratio, ratio, verdict(ratio, margin),
    )  # fmt: skip


def _timed(
    case: Case, variants: tuple[str, str], seconds: tuple[float, float], ratio: Estimate, margin: float
) -> Contrast:
    base, head = variants
    return Contrast(
        case, head, base, precision_of(head), "time", "s", seconds[0], seconds[1], ratio, verdict(ratio, margin)
    )


def _single(
    case: Case, variants: tuple[str, str], metric: str, sides: Sequence[Sequence[float]], margin: float
) -> Contrast:
    base, head = sides
    ratio = compare_ratios(_unpaired(head), _unpaired(base))
    judged = verdict(ratio, margin)
    if not ratio.has_interval and _SINGLE[metric].repeats(case):
        judged = _by_value(ratio.ratio, margin)
    return Contrast(
        case, variants[1], variants[0], precision_of(variants[1]), metric, _SINGLE[metric].unit,
        typical_seconds([base]), typical_seconds([head]), ratio, judged,
    )  # fmt: skip


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
