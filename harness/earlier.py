"""What earlier runs measured of a commit, so that a run may be taken up again where it was stopped."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.records import Phases, Profile, Round, Skip
from harness.selection import changed_facts
from harness.store import History


@dataclass(frozen=True)
class Earlier:
    """Rounds, profiles, phases and skips that count for a run: of the same commit, by the same profile of the harness,
    in the same environment. Without any, everything is still to be measured.
    """

    rounds: tuple[Round, ...] = ()
    profiles: tuple[Profile, ...] = ()
    skips: tuple[Skip, ...] = ()
    phases: tuple[Phases, ...] = ()

    def num_rounds(self, case: str, variant: str) -> int:
        """In how many rounds of a case a variant was timed."""
        return sum(entry.case == case and variant in entry.blocks for entry in self.rounds)

    def missing_rounds(self, case: str, variants: Sequence[str], wanted: int) -> int:
        """How many rounds it takes until each of these variants was timed in as many as wanted."""
        return max((wanted - self.num_rounds(case, variant) for variant in variants), default=wanted)

    def profile(self, case: str, variant: str) -> Profile | None:
        """The newest profile of a variant."""
        found = [entry for entry in self.profiles if (entry.case, entry.variant) == (case, variant)]
        return found[-1] if found else None

    def has_phases(self, case: str, variant: str) -> bool:
        """Whether the phases of a variant were told apart."""
        return any((entry.case, entry.variant) == (case, variant) and not entry.failure for entry in self.phases)

    def has_skip(self, case: str, variant: str, status: str, reason: str) -> bool:
        """Whether that a variant was not measured is on record, for this reason."""
        return any(
            (entry.case, entry.variant, entry.status, entry.reason) == (case, variant, status, reason)
            for entry in self.skips
        )

    def seconds(self, case: str) -> list[dict[str, Sequence[float]]]:
        """The seconds of each variant's blocks, of each round of a case."""
        return [
            {variant: times.seconds for variant, times in entry.blocks.items()}
            for entry in self.rounds
            if entry.case == case
        ]

    def step_s(self, case: str, variant: str) -> list[float]:
        """The median time of a step in each round of a case that timed the variant."""
        return [
            statistics.median(entry.blocks[variant].seconds)
            for entry in self.rounds
            if entry.case == case and variant in entry.blocks
        ]


def earlier(history: History, commit: str, profile: str, facts: Mapping[str, object]) -> Earlier:
    """What counts for a run of this profile on this commit, where these are the facts of the machine."""
    runs = {run.run for run in history.runs(commit) if run.profile == profile and not changed_facts(run.facts, facts)}
    return Earlier(
        rounds=tuple(entry for entry in history.rounds(commit) if entry.run in runs),
        profiles=tuple(entry for entry in history.profiles(commit) if entry.run in runs),
        skips=tuple(entry for entry in history.skips(commit) if entry.run in runs),
        phases=tuple(entry for entry in history.phases(commit) if entry.run in runs),
    )
