"""What asv tracks of training: seconds per step, set-up seconds and peak memory of every variant of every case."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from harness import context, profiles, variants
from harness.failures import describe
from harness.processes import Launcher
from harness.progress import ProgressFile

if TYPE_CHECKING:
    from harness.session import Measured

_LONGEST_SILENCE_S = 3600.0

Track = TypeVar("Track", bound=Callable[..., object])


def _tracked(unit: str) -> Callable[[Track], Track]:
    """Marks a benchmark with its unit and with the version of the method, by which asv tells comparable results."""

    def mark(function: Track) -> Track:
        vars(function).update(unit=unit, version=profiles.METHOD_VERSION)
        return function

    return mark


class Training:
    """One run of the measurement, read by several cheap benchmarks.

    asv's medians are over rounds; the times of all blocks, in pairs, are in the results' ``.samples.jsonl`` files.
    """

    params = (list(variants.names()), list(dict.fromkeys(case.name for case in profiles.CASES)))
    param_names = ("variant", "case")
    timeout = 120.0

    def setup_cache(self) -> dict[tuple[str, str], Measured]:
        """Measures this commit. Runs once, before all benchmarks of this class."""
        launcher = Launcher()
        from harness.session import Session  # imports torch, which the processes that only read results need not

        surroundings = context.from_environment()
        try:
            context.check_checkout(surroundings)
            return Session(surroundings, launcher).measure()
        except Exception as error:
            ProgressFile(surroundings.progress).problem(surroundings.commit, describe(error))
            raise

    vars(setup_cache)["timeout"] = _LONGEST_SILENCE_S

    def setup(self, measured: dict[tuple[str, str], Measured], variant: str, case: str) -> None:
        """Skips what was not measured, by the exception with which asv skips."""
        entry = measured.get((case, variant))
        if entry is None:
            raise NotImplementedError(f"{case} is not a case of this machine and profile")
        if entry["status"] in ("skipped", "left out"):
            raise NotImplementedError(entry["reason"])

    @_tracked("seconds")
    def track_step_seconds(self, measured: dict[tuple[str, str], Measured], variant: str, case: str) -> object:
        """Time of a step."""
        entry = _successful(measured[case, variant])
        return _samples(entry["step_s"])

    @_tracked("seconds")
    def track_setup_seconds(self, measured: dict[tuple[str, str], Measured], variant: str, case: str) -> object:
        """From constructing the optimizer to the end of the first step in the steady state."""
        entry = _successful(measured[case, variant])
        return _samples(entry["setup_s"])

    @_tracked("bytes")
    def track_peak_memory_bytes(self, measured: dict[tuple[str, str], Measured], variant: str, case: str) -> object:
        """Peak memory in the steady state: allocated on the GPU, else the process's resident set."""
        entry = _successful(measured[case, variant])
        return _samples(entry["peak_bytes"])

    @_tracked("bytes")
    def track_peak_reserved_bytes(self, measured: dict[tuple[str, str], Measured], variant: str, case: str) -> object:
        """Peak memory that torch took from the GPU in the steady state; there is none on the CPU."""
        entry = _successful(measured[case, variant])
        return _samples(entry["peak_reserved_bytes"])


if context.measures_zoo():

    class Zoo(Training):
        """The same of the zoo's models: benchmarks of another name, so that asv's results of the others keep the
        parameters that they have. Only where some of them are measured: asv starts a process for each that it skips.
        """

        params = (list(variants.names()), list(dict.fromkeys(case.name for case in profiles.ZOO)))


_OWN_CASES = [case.name for model in context.own_models() for case in model.cases()]

if _OWN_CASES:

    class OwnModels(Training):
        """The same of the user's own models: benchmarks of another name, so that asv's results of the harness's own
        models keep the parameters that they have.
        """

        params = (list(variants.names()), list(dict.fromkeys(_OWN_CASES)))


def _successful(entry: Measured) -> Measured:
    """The entry of a variant that was measured. For one that failed, asv's process ends here with the reason, and so
    asv counts a failure; a traceback of its own would only show this file."""
    if entry["status"] == "failed":
        sys.exit(f"failed while it was measured: {entry['reason'].splitlines()[0]}")
    return entry


def _samples(values: Sequence[float]) -> object:
    """In the form in which asv computes median and interval itself; NaN, its word for skipped, if there are none."""
    return {"samples": list(values), "number": 1} if values else math.nan
