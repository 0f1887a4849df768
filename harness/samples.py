"""The single samples behind a step's time: every block of every round, in the order of the turns."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from harness.names import is_diagnostic, order, precision_of
from harness.selection import Case, Measurement
from harness.stats import typical_seconds

_FAR_OUT = 3.0
"""How many times the width of the middle half a sample lies away from it that tells of a disturbance."""


@dataclass(frozen=True)
class Samples:
    """Seconds per step of each block of a variant: one entry for each round of its case, None where it was not timed.

    Entry i of a round is the same turn in all variants of the case.
    """

    case: Case
    variant: str
    precision: str
    rounds: tuple[tuple[float, ...] | None, ...]

    @property
    def seconds(self) -> list[float]:
        """All of them, round after round."""
        return [seconds for times in self.rounds for seconds in times or ()]

    @property
    def typical_seconds(self) -> float:
        """The median over rounds: the time that is judged."""
        return typical_seconds([times for times in self.rounds if times])

    @property
    def quartiles(self) -> tuple[float, float]:
        """Between them lies the middle half of all samples."""
        if len(self.seconds) < 2:
            return self.seconds[0], self.seconds[0]
        lower, _, upper = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return lower, upper

    @property
    def usual_range(self) -> tuple[float, float]:
        """The least and greatest of the deviations that are not far out (Tukey, Exploratory Data Analysis, 1977)."""
        lower, upper = self.quartiles
        reach = _FAR_OUT * (upper - lower)
        usual = [seconds for seconds in self.seconds if lower - reach <= seconds <= upper + reach]
        return min(usual) / self.typical_seconds - 1, max(usual) / self.typical_seconds - 1

    def deviations(self) -> tuple[tuple[float, ...] | None, ...]:
        """By what share of the typical time each sample lies above it, or below, where negative."""
        typical = self.typical_seconds
        return tuple(times and tuple(seconds / typical - 1 for seconds in times) for times in self.rounds)


def samples(measured: Measurement) -> tuple[Samples, ...]:
    """The samples of what charts hold against each other, case by case."""
    return tuple(
        Samples(
            case=case,
            variant=variant,
            precision=precision_of(variant),
            rounds=tuple(
                entry.blocks[variant].seconds if variant in entry.blocks else None for entry in measured.rounds[case]
            ),
        )
        for case in measured.rounds
        for variant in sorted(measured.variants(case), key=order)
        if not is_diagnostic(variant)
    )
