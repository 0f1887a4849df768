"""What was timed at base and is not so much as mentioned at head: a variant that fails or is left out has a record."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from harness.names import is_product, order
from harness.selection import Case, Measurement
from harness.store import Run

_WHY = "may have been renamed or removed, or a run that was interrupted did not come to it"


def notes_on_unknown(older: Measurement, newer: Measurement) -> list[str]:
    """Names Kitsune's forms that were timed at base and of which head knows nothing.

    Every run records something of all variants of its cases, so that one without a record is missing. A case without
    any is missing where a run at head took all cases of the profile by which base came to it; otherwise, and in results
    of earlier versions, which do not tell, nobody may have asked for it.
    """
    known = {*newer.skips, *newer.profiles, *newer.phases}
    known |= {(case, variant) for case in newer.rounds for variant in newer.variants(case)}
    cases = {case for case, _ in known}
    timed = ((case, variant) for case in older.rounds for variant in sorted(older.variants(case), key=order))
    unknown = [(case, variant) for case, variant in timed if is_product(variant) and (case, variant) not in known]
    missing = [entry for entry in unknown if entry[0] in cases or _was_to_be_measured(older, newer, entry[0])]
    unasked = list(dict.fromkeys(case.name for case, variant in unknown if (case, variant) not in missing))
    base, head = older.commit[:8], newer.commit[:8]
    notes = []
    if missing:
        told = _counted(len(missing), f"benchmark of {base} is", f"benchmarks of {base} are")
        notes.append(f"{told} not known at {head}: {_listed(missing)}; {'it' if len(missing) == 1 else 'they'} {_WHY}")
    if unasked:
        told = _counted(len(unasked), f"case of {base} is", f"cases of {base} are")
        notes.append(f"{told} not measured at {head}: {', '.join(unasked)}")
    return notes


def _counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def _was_to_be_measured(older: Measurement, newer: Measurement, case: Case) -> bool:
    """Whether the same profile took a case at base and should have at head, neither being told which cases to take."""
    names = {entry.run for entry in older.rounds[case]}
    before = {_kind(run) for run in older.runs if run.run in names and _takes_all(run)}
    return any(_takes_all(run) and _kind(run) in before for run in newer.runs)


def _takes_all(run: Run) -> bool:
    return run.cases == () and not run.workloads


def _kind(run: Run) -> tuple[str, object]:
    """What decides which cases there are."""
    return run.profile, run.facts.get("device_type")


def _listed(benchmarks: Iterable[tuple[Case, str]]) -> str:
    grouped = groupby(benchmarks, key=lambda entry: entry[0])
    return "; ".join(f"{case.name}: {', '.join(variant for _, variant in members)}" for case, members in grouped)
