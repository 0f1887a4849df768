"""One run on one commit: which processes are started, what they found out, and what is kept of it.

Every result is appended to the store as soon as it is there, so that a run that is stopped loses nothing it measured.
"""

from __future__ import annotations

import importlib.util
import math
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TypedDict

import harness
import models
from harness import environment, profiles, variants
from harness.caches import Caches
from harness.conclusive import is_conclusive
from harness.context import Context, ContextError
from harness.measure import (
    Probe,
    ProfileJob,
    ProfileResult,
    RoundJob,
    RoundResult,
    Task,
    measure_profile,
    measure_round,
    median_step_seconds,
    probe,
)
from harness.processes import Launcher, ProcessFailed
from harness.profiles import Case
from harness.store import Store
from harness.timer import BlockTime

_PROBE_SECONDS = 300.0


class Measured(TypedDict):
    """What asv is given of one variant of one case, in plain values; lower is better for each list.

    ``status`` is "measured" or that of a :class:`harness.records.Skip`, with its ``reason``. ``step_s`` has one entry
    for each round: the median of its blocks. ``peak_bytes`` is what torch allocated on the device, on the CPU the
    resident set.
    """

    status: str
    reason: str
    step_s: list[float]
    setup_s: list[float]
    peak_bytes: list[int]
    peak_reserved_bytes: list[int]


class Session:
    """A run of the context's profile on the context's commit.

    Args:
        context: which commit, where, and how thoroughly.
        launcher: starts the measuring processes; by default forked from a server that has torch imported.
    """

    def __init__(self, context: Context, launcher: Launcher | None = None) -> None:
        self._context = context
        self._launcher = launcher or Launcher()
        self._store = Store(context.results)
        self._run = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
        self._measured: dict[tuple[str, str], Measured] = {}
        self._timed: dict[str, list[Mapping[str, Sequence[float]]]] = {}
        self._steps_done = 0
        self._steps = 0

    def measure(self) -> dict[tuple[str, str], Measured]:
        """Measures everything that the profile asks for and appends it to the store.

        Returns:
            What asv keeps, by case and variant.

        Raises:
            ContextError: the code being measured does not come from where it must.
            ProcessFailed: not even the machine's facts could be found out.
            ResultsError: the results cannot be written.
        """
        origins = self._origins()
        found = self._probe()
        device_type = found.facts["device_type"]
        assert device_type == "cpu" or device_type == "cuda"
        effort = self._context.sampling.applied(profiles.effort(self._context.profile, device_type))
        self._append(
            kind="run",
            commit=self._context.commit,
            started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            facts=dict(found.facts),
            profile=self._context.profile,
            sampling={"until": self._context.sampling.until, **asdict(effort)},
            **origins,
        )
        caches = Caches(self._context.caches, self._context.commit, found.facts)
        caches.clear()
        cases = profiles.cases(self._context.profile, device_type)
        plan = [(case, tasks) for case in cases if (tasks := self._tasks(case, found, caches))]
        self._steps = sum(len(self._to_profile(tasks)) + effort.rounds for case, tasks in plan)
        for case, tasks in plan:
            self._measure_case(case, tasks, effort)
        caches.clear()
        return self._measured

    def _origins(self) -> dict[str, str | None]:
        """Where the code comes from.

        ``harness`` and ``models`` must be the working tree's; a ``kitsune`` from anywhere but the checkout does not
        count, and its variants are then skipped.
        """
        root = self._context.root.resolve()
        for package in (harness, models):
            assert package.__file__ is not None
            if not Path(package.__file__).resolve().is_relative_to(root / package.__name__):
                raise ContextError(f"{package.__file__} is imported, and not that of the working tree {root}")
        spec = importlib.util.find_spec("kitsune")
        origin = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
        if origin is not None and not origin.is_relative_to(self._context.checkout.resolve()):
            origin = None
        return {
            "kitsune_file": None if origin is None else str(origin),
            "harness_file": str(Path(str(harness.__file__)).resolve()),
        }

    def _probe(self) -> Probe:
        """The machine's facts. Where a forked process cannot use a GPU that is there, all processes are spawned."""
        try:
            found = self._launcher.run(probe, self._context.checkout, timeout_s=_PROBE_SECONDS)
        except ProcessFailed:
            if self._launcher.method == "spawn":
                raise
        else:
            gpu_is_missed = found.facts["device_type"] == "cpu" and environment.visible_gpu() is not None
            if self._launcher.method == "spawn" or not gpu_is_missed:
                return found
        self._launcher = Launcher("spawn")
        return self._launcher.run(probe, self._context.checkout, timeout_s=_PROBE_SECONDS)

    def _tasks(self, case: Case, found: Probe, caches: Caches) -> tuple[Task, ...]:
        """What is measured of a case; of the other variants the reason is recorded."""
        tasks = []
        missing = models.missing(case.model)
        for variant in variants.VARIANTS.values():
            unavailable = missing or found.unavailable.get(variant.name)
            left_out = profiles.left_out(self._context.profile, case, variant, at_head=self._context.at_head)
            if unavailable is not None:
                self._leave_out(case, variant.name, "skipped", unavailable)
            elif left_out is not None:
                self._leave_out(case, variant.name, "left out", left_out)
            else:
                tasks.append(Task(variant.name, caches.folder(case.name, variant)))
        return tuple(tasks)

    def _measure_case(self, case: Case, tasks: tuple[Task, ...], effort: profiles.Effort) -> None:
        for task in self._to_profile(tasks):
            self._profile(case, task, effort)
        runnable = self._without_failed(case, tasks)
        for number in range(effort.rounds):
            runnable = self._round(case, runnable, effort, number)
        if self._context.sampling.until == "rounds":
            return
        for number in range(effort.rounds, effort.most_rounds):
            if not runnable or is_conclusive(self._timed.get(case.name, [])):
                return
            self._steps += 1
            runnable = self._round(case, runnable, effort, number)

    def _to_profile(self, tasks: tuple[Task, ...]) -> list[Task]:
        profile, at_head = self._context.profile, self._context.at_head
        return [task for task in tasks if profiles.needs_profile(profile, variants.get(task.variant), at_head=at_head)]

    def _profile(self, case: Case, task: Task, effort: profiles.Effort) -> None:
        """Measures one variant alone."""
        begin = time.monotonic()
        try:
            result = self._launcher.run(
                measure_profile, ProfileJob(case, task, effort), timeout_s=effort.process_seconds
            )
        except ProcessFailed as failure:
            self._leave_out(case, task.variant, "failed", failure.reason)
            self._progress(case, f"{task.variant}: failed: {failure.reason.splitlines()[0]}", begin)
            return
        self._append(**_profile_record(case, task, result))
        measured = self._entry(case, task.variant)
        measured["setup_s"].append(result.setup_s)
        if result.peak.allocated_bytes is None:
            measured["peak_bytes"].append(result.peak.rss_bytes)
        else:
            measured["peak_bytes"].append(result.peak.allocated_bytes)
        if result.peak.reserved_bytes is not None:
            measured["peak_reserved_bytes"].append(result.peak.reserved_bytes)
        self._progress(case, f"{task.variant}: set up in {result.setup_s:.2f} s", begin)

    def _round(self, case: Case, tasks: tuple[Task, ...], effort: profiles.Effort, number: int) -> tuple[Task, ...]:
        """One round; the variants left for the next. Without a variant that kills the process, it is tried again."""
        begin = time.monotonic()
        while tasks:
            job = RoundJob(case, tasks, effort, number)
            try:
                result = self._launcher.run(measure_round, job, timeout_s=effort.process_seconds)
            except ProcessFailed as failure:
                at_work = [task.variant for task in tasks if task.variant == failure.note]
                for variant in at_work or [task.variant for task in tasks]:
                    self._leave_out(case, variant, "failed", f"in round {number}: {failure.reason}")
            else:
                self._keep_round(case, number, result)
                self._progress(case, f"round {number + 1} of {self._rounds_named(effort)}", begin)
                return self._without_failed(case, tasks)
            tasks = self._without_failed(case, tasks)
        self._progress(case, f"round {number + 1} of {self._rounds_named(effort)}: nothing left to measure", begin)
        return ()

    def _rounds_named(self, effort: profiles.Effort) -> str:
        return str(effort.rounds) if self._context.sampling.until == "rounds" else f"at most {effort.most_rounds}"

    def _keep_round(self, case: Case, number: int, result: RoundResult) -> None:
        for variant, reason in result.failures.items():
            self._leave_out(case, variant, "failed", f"in round {number}: {reason}")
        if not result.blocks:
            return
        blocks = {
            variant: {
                "wall_s": [block.wall_s for block in times],
                "device_s": None if times[0].device_s is None else [block.device_s for block in times],
            }
            for variant, times in result.blocks.items()
        }
        self._append(
            kind="round",
            round=number,
            steps_per_block=result.steps_per_block,
            blocks=blocks,
            throttled=list(result.throttled),
            ended=result.ended,
            half_width=result.half_width if math.isfinite(result.half_width) else None,
            gpu=dict(result.gpu),
            host=dict(result.host),
            **_case_fields(case),
        )
        good = {name: _without_throttled(times, result.throttled) for name, times in result.blocks.items()}
        self._timed.setdefault(case.name, []).append(
            {name: [block.seconds for block in times] for name, times in good.items()}
        )
        for variant, times in good.items():
            self._entry(case, variant)["step_s"].append(median_step_seconds(times))

    def _without_failed(self, case: Case, tasks: tuple[Task, ...]) -> tuple[Task, ...]:
        return tuple(task for task in tasks if self._entry(case, task.variant)["status"] == "measured")

    def _leave_out(self, case: Case, variant: str, status: str, reason: str) -> None:
        precision = variants.get(variant).precision
        self._append(
            kind="skip", variant=variant, precision=precision, status=status, reason=reason, **_case_fields(case)
        )
        measured = self._entry(case, variant)
        measured["status"], measured["reason"] = status, reason

    def _entry(self, case: Case, variant: str) -> Measured:
        nothing = Measured(status="measured", reason="", step_s=[], setup_s=[], peak_bytes=[], peak_reserved_bytes=[])
        return self._measured.setdefault((case.name, variant), nothing)

    def _append(self, **record: object) -> None:
        fields = {name: _portable(value, self._context.root) for name, value in record.items()}
        self._store.append(self._context.machine, self._context.commit, [{"run": self._run, **fields}])

    def _progress(self, case: Case, what: str, begin: float) -> None:
        """Says what was done, to asv, which takes a silent process for hung, and to whoever watches the progress."""
        self._steps_done += 1
        position = f"{self._context.commit[:8]} {self._steps_done:>3}/{self._steps}"
        line = f"{position}  {case.name:<14} {what}  [{time.monotonic() - begin:.1f} s]"
        print(line, flush=True)
        if self._context.progress is not None:
            with self._context.progress.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def _without_throttled(times: Sequence[BlockTime], throttled: Collection[int]) -> Sequence[BlockTime]:
    """The blocks that are judged: of turns in which the GPU was not throttled, if there are any."""
    return [block for turn, block in enumerate(times) if turn not in throttled] or times


def _case_fields(case: Case) -> dict[str, object]:
    return {"case": case.name, "model": case.model, "batch": case.batch, "device": case.device_type}


def _profile_record(case: Case, task: Task, result: ProfileResult) -> dict[str, object]:
    return {
        "kind": "profile",
        **_case_fields(case),
        "variant": task.variant,
        "precision": variants.get(task.variant).precision,
        "setup_s": result.setup_s,
        "caches": result.caches,
        "peak_allocated_bytes": result.peak.allocated_bytes,
        "peak_reserved_bytes": result.peak.reserved_bytes,
        "peak_rss_bytes": result.peak.rss_bytes,
        "losses": [list(entry) for entry in result.losses],
        "kitsune": None if result.status is None else dict(result.status),
    }


def _portable(value: object, root: Path) -> object:
    """The value as others can read it: paths in its texts are relative to the working tree where they lie in it."""
    if isinstance(value, str):
        return value.replace(f"{root}/", "")
    if isinstance(value, Mapping):
        return {name: _portable(entry, root) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_portable(entry, root) for entry in value]
    return value
