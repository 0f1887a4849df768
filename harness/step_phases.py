"""How the step of each variant at a commit divides into phases, as the newest run that was asked for it found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from harness import traces
from harness.names import order
from harness.phases import WHOLE, Clock
from harness.selection import Case, Measurement


@dataclass(frozen=True)
class StepPhases:
    """The phases of a step, means over the profiled steps in seconds; with the host gap they add up to the step.

    ``host_gap_s`` is None where there is no device that could wait. ``trace`` is a file, of
    which ``trace_shortened`` says what it has where that is less than two steps, or ``trace_missing`` says why there is
    none.
    """

    case: Case
    variant: str
    clock: Clock
    num_steps: int
    seconds: Mapping[str, float]
    host_gap_s: float | None
    trace: Path | None
    trace_shortened: str | None
    trace_missing: str | None

    @property
    def total_s(self) -> float:
        """The profiled step."""
        return sum(self.seconds.values()) + (self.host_gap_s or 0.0)

    @property
    def is_whole(self) -> bool:
        """Whether the step runs as one thing, so that its parts cannot be told apart."""
        return WHOLE in self.seconds


@dataclass(frozen=True)
class NoPhases:
    """A variant whose phases could not be told apart, and why."""

    case: Case
    variant: str
    reason: str


def step_phases(measured: Measurement, folder: Path) -> tuple[StepPhases | NoPhases, ...]:
    """The phases of all variants that were profiled for them, case by case in the order of tables.

    Args:
        folder: that of the machine's results, in which traces lie.
    """
    places = {case: place for place, case in enumerate(measured.rounds)}
    known = sorted(measured.phases.items(), key=lambda item: (places.get(item[0][0], len(places)), order(item[0][1])))
    found: list[StepPhases | NoPhases] = []
    for (case, variant), entry in known:
        if entry.failure is not None:
            found.append(NoPhases(case, variant, entry.failure))
            continue
        trace = None if entry.trace is None else traces.found(folder, entry.trace)
        gone = None if entry.trace is None or trace is not None else "its file is not here"
        found.append(
            StepPhases(
                case=case,
                variant=variant,
                clock=entry.clock,
                num_steps=len(next(iter(entry.phases_s.values()))),
                seconds={phase: fmean(times) for phase, times in entry.phases_s.items()},
                host_gap_s=None if entry.host_gap_s is None else fmean(entry.host_gap_s),
                trace=trace,
                trace_shortened=entry.trace_shortened,
                trace_missing=entry.trace_missing or gone,
            )
        )
    return tuple(found)
