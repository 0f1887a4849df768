"""What several streams gain, case by case: the plan that Kitsune chose against the same step in order on one stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.breakdown import Breakdown
from harness.replay_plans import ReplayPlan, plan_in_use
from harness.selection import Case, Measurement
from harness.stats import Estimate, Verdict, verdict


@dataclass(frozen=True)
class StreamGain:
    """A step in order on one stream beside the same step by the plan that Kitsune chose, timed in the same rounds.

    ``gain`` is the time on one stream over that by the chosen plan; ``verdict`` judges the latter. Each process chooses
    anew: ``plans`` has the plan chosen in each round that timed both, None where the round does not tell.
    ``is_same_plan`` says that in each of these rounds both replayed by the very same plan: they differ by noise.
    ``profiled_plan`` is that of the process in which the chosen plan's variant was profiled, where it tells.
    """

    case: Case
    precision: str
    variant: str
    one_stream_seconds: float
    chosen_seconds: float
    gain: Estimate
    verdict: Verdict
    plans: tuple[ReplayPlan | None, ...]
    is_same_plan: bool
    profiled_plan: ReplayPlan | None


def stream_gains(measured: Measurement, breakdowns: Iterable[Breakdown], margin: float) -> tuple[StreamGain, ...]:
    """The cases and precisions that were timed both ways: model by model, then by batch size and precision.

    Args:
        measured: what the breakdowns are of.
        margin: the relative difference in time that does not matter.
    """
    found: dict[tuple[str, str], list[StreamGain]] = {}
    for breakdown in breakdowns:
        *_, chosen = breakdown.stages
        name = f"kitsune_trainstep_one_stream_{breakdown.precision}"
        one_stream = next((stage.seconds for stage in breakdown.stages if stage.variant == name), None)
        if one_stream is None or chosen.seconds is None or chosen.gain is None:
            continue
        rounds = measured.rounds_of_both(breakdown.case, name, chosen.variant)
        plans = [(entry.plans.get(name), entry.plans.get(chosen.variant)) for entry in rounds]
        gain = StreamGain(
            case=breakdown.case,
            precision=breakdown.precision,
            variant=chosen.variant,
            one_stream_seconds=one_stream,
            chosen_seconds=chosen.seconds,
            gain=chosen.gain,
            verdict=verdict(chosen.gain.inverted(), margin),
            plans=tuple(plan for _, plan in plans),
            is_same_plan=all(plan is not None and plan == other for other, plan in plans),
            profiled_plan=_profiled_plan(measured, breakdown.case, chosen.variant),
        )
        found.setdefault((breakdown.case.model, breakdown.case.device), []).append(gain)
    return tuple(gain for gains in found.values() for gain in _by_batch(gains))


def largest_gain(gains: Iterable[StreamGain]) -> int | None:
    """The largest batch size at which several streams are faster than one: where the gain ends. None without any.

    What was faster by the very same plan was so by chance.
    """
    faster = (gain for gain in gains if gain.verdict is Verdict.FASTER and not gain.is_same_plan)
    return max((gain.case.batch for gain in faster), default=None)


def _profiled_plan(measured: Measurement, case: Case, variant: str) -> ReplayPlan | None:
    profile = measured.profiles.get((case, variant))
    return None if profile is None or profile.kitsune is None else plan_in_use(profile.kitsune)


def _by_batch(gains: Sequence[StreamGain]) -> list[StreamGain]:
    """By batch size; precisions stay in the order of the breakdowns."""
    return sorted(gains, key=lambda gain: gain.case.batch)
