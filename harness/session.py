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
from harness import caches, environment, memory, profiles, variants, workloads
from harness.caches import Caches
from harness.conclusive import is_conclusive
from harness.context import Context, ContextError
from harness.continuation import Continuation
from harness.earlier import Earlier, earlier
from harness.measure import (
    Probe,
    ProfileJob,
    ProfileResult,
    RoundJob,
    RoundResult,
    SetupJob,
    SetupResult,
    Task,
    measure_profile,
    measure_round,
    measure_setup,
    median_step_seconds,
    probe,
)
from harness.memory_timeline import MemoryTimeline
from harness.phase_recording import PhasesJob, PhasesResult, measure_phases
from harness.phases import WHOLE
from harness.processes import Launcher, ProcessFailed
from harness.profiles import Case
from harness.progress import ROUND, ProgressFile, Step, phases_step
from harness.store import Store
from harness.timer import BlockTime
from harness.traces import TraceFile

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
        self._progress_file = ProgressFile(context.progress)
        self._steps_done = 0
        self._steps = 0
        self._run_record: dict[str, object] | None = None
        self._earlier = Earlier()

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
        self._run_record = {
            "kind": "run",
            "commit": self._context.commit,
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "facts": dict(found.facts),
            "profile": self._context.profile,
            "sampling": {"until": self._context.sampling.until, **asdict(effort)},
            "snapshot_of": self._context.snapshot_of,
            "workloads": {model.name: model.source for model in self._context.own},
            "cases": list(self._context.selection.cases),
            **origins,
        }
        if self._context.resume:
            self._earlier = self._read_earlier(found.facts)
        folders = Caches(self._context.caches, self._context.commit, found.facts)
        folders.clear()
        cases = self._context.cases(device_type)
        plan = [(case, tasks) for case in cases if (tasks := self._tasks(case, found, folders))]
        steps = [step for case, tasks in plan for step in self._steps_of(case, tasks, effort)]
        self._steps = len(steps)
        self._progress_file.begin(self._context.commit, steps)
        for case, tasks in plan:
            self._measure_case(case, tasks, effort)
        folders.clear()
        return self._measured

    def _origins(self) -> dict[str, str | None]:
        """Where the code comes from.

        ``harness`` and ``models`` must be the working tree's; a ``kitsune`` from anywhere but the checkout does not
        count, and its variants are then skipped.
        """
        root = self._context.root.resolve()
        for package in (harness, models):
            assert package.__file__ is not None
            if not Path(package.__file__).resolve().is_relative_to(root.joinpath(*package.__name__.split("."))):
                raise ContextError(f"{package.__file__} is imported, and not that of the working tree {root}")
        spec = importlib.util.find_spec("kitsune")
        origin = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
        if origin is not None and self._context.kitsune_root is not None:
            origin = origin if origin.is_relative_to(self._context.kitsune_root.resolve()) else None
        return {
            "kitsune_file": None if origin is None else str(origin),
            "harness_file": str(Path(str(harness.__file__)).resolve()),
        }

    def _probe(self) -> Probe:
        """The machine's facts. Where a forked process cannot use a GPU that is there, all processes are spawned."""
        try:
            found = self._launcher.run(probe, self._context.kitsune_root, timeout_s=_PROBE_SECONDS)
        except ProcessFailed:
            if self._launcher.method == "spawn":
                raise
        else:
            gpu_is_missed = found.facts["device_type"] == "cpu" and environment.visible_gpu() is not None
            if self._launcher.method == "spawn" or not gpu_is_missed:
                return found
        self._launcher = Launcher("spawn")
        return self._launcher.run(probe, self._context.kitsune_root, timeout_s=_PROBE_SECONDS)

    def _tasks(self, case: Case, found: Probe, folders: Caches) -> tuple[Task, ...]:
        """What is measured of a case; of the other variants the reason is recorded."""
        tasks = []
        missing = workloads.missing(case.model, self._context.own, self._context.workload_root)
        for variant in variants.VARIANTS.values():
            unavailable = missing or found.unavailable.get(variant.name)
            left_out = self._context.left_out(case, variant)
            if unavailable is not None:
                self._leave_out(case, variant.name, "skipped", unavailable)
            elif left_out is not None:
                self._leave_out(case, variant.name, "left out", left_out)
            else:
                tasks.append(Task(variant.name, folders.folder(case.name, variant)))
        return tuple(tasks)

    def _measure_case(self, case: Case, tasks: tuple[Task, ...], effort: profiles.Effort) -> None:
        for task in self._to_profile(case, tasks):
            self._profile(case, task, effort)
        runnable = self._time_case(case, self._without_failed(case, tasks), effort)
        for task in self._to_divide(case, tasks):
            if task in runnable:
                self._divide(case, task, effort)
            else:
                step = phases_step(case.name, task.variant)
                self._progress(step, f"phases of {task.variant}: not told apart, as it failed", None)

    def _time_case(self, case: Case, tasks: tuple[Task, ...], effort: profiles.Effort) -> tuple[Task, ...]:
        """As many rounds as there should be; the variants that came through all of them."""
        taken = 0
        while taken < self._missing_rounds(case, tasks, effort.rounds):
            tasks = self._round(case, tasks, effort, taken)
            taken += 1
        if self._context.sampling.until == "rounds":
            return tasks
        while tasks and taken < self._missing_rounds(case, tasks, effort.most_rounds):
            if is_conclusive([*self._earlier.seconds(case.name), *self._timed.get(case.name, [])]):
                return tasks
            self._steps += 1
            tasks = self._round(case, tasks, effort, taken)
            taken += 1
        return tasks

    def _steps_of(self, case: Case, tasks: tuple[Task, ...], effort: profiles.Effort) -> list[Step]:
        alone = [Step(case.name, task.variant) for task in self._to_profile(case, tasks)]
        divided = [phases_step(case.name, task.variant) for task in self._to_divide(case, tasks)]
        return [*alone, *[Step(case.name, ROUND)] * self._missing_rounds(case, tasks, effort.rounds), *divided]

    def _missing_rounds(self, case: Case, tasks: tuple[Task, ...], wanted: int) -> int:
        return self._earlier.missing_rounds(case.name, [task.variant for task in tasks], wanted)

    def _to_profile(self, case: Case, tasks: tuple[Task, ...]) -> list[Task]:
        profile, at_head = self._context.profile, self._context.at_head
        return [
            task
            for task in tasks
            if profiles.needs_profile(profile, variants.get(task.variant), at_head=at_head)
            and self._earlier.profile(case.name, task.variant) is None
        ]

    def _to_divide(self, case: Case, tasks: tuple[Task, ...]) -> list[Task]:
        """Those whose phases are to be told apart."""
        if not self._context.phases:
            return []
        return [task for task in tasks if not self._earlier.has_phases(case.name, task.variant)]

    def _read_earlier(self, facts: Mapping[str, object]) -> Earlier:
        """What need not be measured again."""
        machine, commit = self._context.machine, self._context.commit
        if machine not in self._store.machines():
            return Earlier()
        return earlier(self._store.load(machine, [commit]), commit, self._context.profile, facts)

    def _profile(self, case: Case, task: Task, effort: profiles.Effort) -> None:
        """Measures one variant alone, and its set-up once more where the first one has filled its caches."""
        begin = time.monotonic()
        goes_on = profiles.needs_continuation(self._context.profile)
        try:
            result = self._launcher.run(
                measure_profile, ProfileJob(case, task, effort, goes_on), timeout_s=effort.process_seconds
            )
        except ProcessFailed as failure:
            self._leave_out(case, task.variant, "failed", failure.reason)
            what = f"failed: {failure.reason.splitlines()[0]}"
        else:
            again = self._set_up_again(case, task, effort, result)
            self._append(**_profile_record(case, task, result, again))
            _add_profile(self._entry(case, task.variant), result.setup_s, result.peak)
            what = f"set up in {result.setup_s:.2f} s{'' if again is None else f', again in {again.setup_s:.2f} s'}"
        self._progress(Step(case.name, task.variant), f"{task.variant}: {what}", begin)

    def _set_up_again(
        self, case: Case, task: Task, effort: profiles.Effort, first: ProfileResult
    ) -> SetupResult | None:
        """Set-up in a process that finds what the first one has left in empty caches; None where that is
        nothing, or is not to be measured, or the process fails, and the variant with it.
        """
        is_wanted = profiles.needs_second_setup(self._context.profile, at_head=self._context.at_head)
        if not is_wanted or first.caches != "cold" or caches.is_cold(task.caches):
            return None
        try:
            return self._launcher.run(measure_setup, SetupJob(case, task, effort), timeout_s=effort.process_seconds)
        except ProcessFailed as failure:
            self._leave_out(case, task.variant, "failed", f"set up again, with filled caches: {failure.reason}")
            return None

    def _divide(self, case: Case, task: Task, effort: profiles.Effort) -> None:
        """Tells the phases of one variant's step apart. If that fails, what was measured of the variant stands."""
        begin = time.monotonic()
        try:
            result = self._launcher.run(measure_phases, PhasesJob(case, task, effort), timeout_s=effort.process_seconds)
        except ProcessFailed as failure:
            self._append(**_phases_record(case, task, failure.reason))
            what = f"failed: {failure.reason.splitlines()[0]}"
        else:
            self._keep_phases(case, task, result)
            what = "a single one" if WHOLE in result.times.phases_s else "told apart"
        self._progress(phases_step(case.name, task.variant), f"phases of {task.variant}: {what}", begin)

    def _keep_phases(self, case: Case, task: Task, result: PhasesResult) -> None:
        """The trace, then the record that names it: neither is kept without the other."""
        if result.trace.content is None:
            self._append(**_phases_record(case, task, result))
            return
        machine = self._context.results / self._context.machine
        variant = f"{case.name}-{case.device_type}-{task.variant}"
        trace = TraceFile(machine, self._context.commit, self._run, variant)
        trace.write(result.trace.content)
        try:
            self._append(**_phases_record(case, task, result, trace.name))
        except BaseException:
            trace.withdraw()
            raise
        trace.replace_earlier()

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
                self._progress(Step(case.name, ROUND), self._round_named(number, effort), begin)
                return self._without_failed(case, tasks)
            tasks = self._without_failed(case, tasks)
        self._progress(Step(case.name, ROUND), f"{self._round_named(number, effort)}: nothing left to measure", begin)
        return ()

    def _round_named(self, number: int, effort: profiles.Effort) -> str:
        is_fixed = self._context.sampling.until == "rounds"
        return f"round {number + 1} of {effort.rounds if is_fixed else f'at most {effort.most_rounds}'}"

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
            steps_per_block=dict(result.steps_per_block),
            blocks=blocks,
            throttled=list(result.throttled),
            ended=result.ended,
            half_width=result.half_width if math.isfinite(result.half_width) else None,
            gpu=dict(result.gpu),
            host=dict(result.host),
            modes=dict(result.modes),
            plans={variant: asdict(plan) for variant, plan in result.plans.items()},
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
        if not self._earlier.has_skip(case.name, variant, status, reason):
            precision = variants.get(variant).precision
            self._append(
                kind="skip", variant=variant, precision=precision, status=status, reason=reason, **_case_fields(case)
            )
        measured = self._entry(case, variant)
        measured["status"], measured["reason"] = status, reason

    def _entry(self, case: Case, variant: str) -> Measured:
        """What asv gets of a variant; it begins with what earlier runs have measured where these count."""
        if (case.name, variant) not in self._measured:
            entry = Measured(status="measured", reason="", step_s=[], setup_s=[], peak_bytes=[], peak_reserved_bytes=[])
            entry["step_s"] += self._earlier.step_s(case.name, variant)
            profile = self._earlier.profile(case.name, variant)
            if profile is not None:
                rss_bytes = profile.peak_rss_bytes or 0
                peak = memory.Peak(profile.peak_allocated_bytes, profile.peak_reserved_bytes, rss_bytes)
                _add_profile(entry, profile.setup_s, peak)
            self._measured[case.name, variant] = entry
        return self._measured[case.name, variant]

    def _append(self, **record: object) -> None:
        """Appends a record, and before the first one that of the run: a run that measures nothing leaves no trace."""
        records = [record] if self._run_record is None else [self._run_record, record]
        fields = [
            {"run": self._run, **{name: _portable(value, self._context.root) for name, value in entry.items()}}
            for entry in records
        ]
        self._store.append(self._context.machine, self._context.commit, fields)
        self._run_record = None

    def _progress(self, step: Step, what: str, begin: float | None) -> None:
        """Says what was done, to asv, which takes a silent process for hung, and to whoever watches the progress.

        Args:
            begin: when the step began; None for one that falls away.
        """
        self._steps_done += 1
        seconds = None if begin is None else time.monotonic() - begin
        position = f"{self._context.commit[:8]} {self._steps_done:>3}/{self._steps}"
        line = f"{position}  {step.case:<14} {what}{'' if seconds is None else f'  [{seconds:.1f} s]'}"
        print(line, flush=True)
        self._progress_file.done(self._context.commit, step, line, seconds)


def _add_profile(entry: Measured, setup_s: float, peak: memory.Peak) -> None:
    entry["setup_s"].append(setup_s)
    entry["peak_bytes"].append(peak.rss_bytes if peak.allocated_bytes is None else peak.allocated_bytes)
    if peak.reserved_bytes is not None:
        entry["peak_reserved_bytes"].append(peak.reserved_bytes)


def _without_throttled(times: Sequence[BlockTime], throttled: Collection[int]) -> Sequence[BlockTime]:
    """The blocks that are judged: of turns in which the GPU was not throttled, if there are any."""
    return [block for turn, block in enumerate(times) if turn not in throttled] or times


def _case_fields(case: Case) -> dict[str, object]:
    return {"case": case.name, "model": case.model, "batch": case.batch, "device": case.device_type}


def _profile_record(case: Case, task: Task, result: ProfileResult, again: SetupResult | None) -> dict[str, object]:
    return {
        "kind": "profile",
        **_case_fields(case),
        "variant": task.variant,
        "precision": variants.get(task.variant).precision,
        "setup_s": result.setup_s,
        "caches": result.caches,
        "setup_again_s": None if again is None else again.setup_s,
        "first_replay_s": result.first_replay_s,
        "first_replay_again_s": None if again is None else again.first_replay_s,
        "peak_allocated_bytes": result.peak.allocated_bytes,
        "peak_reserved_bytes": result.peak.reserved_bytes,
        "peak_rss_bytes": result.peak.rss_bytes,
        "inactive_split_bytes": result.peak.inactive_split_bytes,
        **_memory_fields(result.memory_timeline),
        "losses": [list(entry) for entry in result.losses],
        **_continuation_fields(result.continuation),
        "kitsune": None if result.status is None else dict(result.status),
    }


def _memory_fields(timeline: MemoryTimeline | str) -> dict[str, object]:
    if isinstance(timeline, str):
        return {"memory_timeline": None, "memory_timeline_missing": timeline}
    return {"memory_timeline": {"step_us": timeline.step_us, "points": [list(point) for point in timeline.points]}}


def _continuation_fields(found: Continuation | str | None) -> dict[str, object]:
    if isinstance(found, Continuation):
        return {"continuation": asdict(found)}
    return {} if found is None else {"continuation": None, "continuation_missing": found}


def _phases_record(case: Case, task: Task, result: PhasesResult | str, trace: str | None = None) -> dict[str, object]:
    """What became of profiling a variant: its phases, with the name of their trace, or why there are none."""
    fields: dict[str, object] = {
        "kind": "phases",
        **_case_fields(case),
        "variant": task.variant,
        "precision": variants.get(task.variant).precision,
    }
    if isinstance(result, str):
        clock = "device" if case.device_type == "cuda" else "wall"
        return {**fields, "clock": clock, "phases_s": {}, "failure": result}
    gap = result.times.host_gap_s
    return {
        **fields,
        "clock": result.times.clock,
        "phases_s": {phase: list(times) for phase, times in result.times.phases_s.items()},
        "host_gap_s": None if gap is None else list(gap),
        "trace": trace,
        "trace_shortened": result.trace.shortened,
        "trace_missing": result.trace.missing,
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
