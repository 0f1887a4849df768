"""What several streams gain, case by case: the plan that Kitsune chose against the same step in order on one stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.breakdown import Breakdown
from harness.selection import Case
from harness.stats import Estimate, Verdict, verdict
from harness.timelines import NoTimeline, Timeline


@dataclass(frozen=True)
class StreamGain:
    """A step in order on one stream beside the same step by the plan that Kitsune chose, timed in the same rounds.

    ``gain`` is the time on one stream over that by the chosen plan; ``verdict`` judges the latter. ``num_streams`` and
    ``strategy`` are those of the plan in use where the variant was profiled; None where there is no such plan.
    """

    case: Case
    precision: str
    variant: str
    one_stream_seconds: float
    chosen_seconds: float
    gain: Estimate
    verdict: Verdict
    num_streams: int | None
    strategy: str | None


def stream_gains(
    breakdowns: Iterable[Breakdown], timelines: Iterable[Timeline | NoTimeline], margin: float
) -> tuple[StreamGain, ...]:
    """The cases and precisions that were timed both ways: model by model, then by batch size and precision.

    Args:
        margin: the relative difference in time that does not matter.
    """
    plans = {(entry.case, entry.variant): entry for entry in timelines if isinstance(entry, Timeline)}
    found: dict[tuple[str, str], list[StreamGain]] = {}
    for breakdown in breakdowns:
        *_, chosen = breakdown.stages
        name = f"kitsune_trainstep_one_stream_{breakdown.precision}"
        one_stream = next((stage.seconds for stage in breakdown.stages if stage.variant == name), None)
        if one_stream is None or chosen.seconds is None or chosen.gain is None:
            continue
        plan = plans.get((breakdown.case, chosen.variant))
        gain = StreamGain(
            case=breakdown.case,
            precision=breakdown.precision,
            variant=chosen.variant,
            one_stream_seconds=one_stream,
            chosen_seconds=chosen.seconds,
            gain=chosen.gain,
            verdict=verdict(chosen.gain.inverted(), margin),
            num_streams=None if plan is None else plan.num_streams,
            strategy=None if plan is None else plan.strategy,
        )
        found.setdefault((breakdown.case.model, breakdown.case.device), []).append(gain)
    return tuple(gain for gains in found.values() for gain in _by_batch(gains))


def largest_gain(gains: Iterable[StreamGain]) -> int | None:
    """The largest batch size at which several streams are faster than one: where the gain ends. None without any."""
    return max((gain.case.batch for gain in gains if gain.verdict is Verdict.FASTER), default=None)


def _by_batch(gains: Sequence[StreamGain]) -> list[StreamGain]:
    """By batch size; precisions stay in the order of the breakdowns."""
    return sorted(gains, key=lambda gain: gain.case.batch)
