"""The records of ``results/<machine>/<commit>.samples.jsonl``: what each line means and which lines are refused.

One JSON object a line. Times are seconds per step, memory is bytes. Parsing is strict: a missing field, a wrong type, a
schema this version does not know, or a time that is NaN, infinite, not positive or absurd is a :class:`RecordError`,
because a wrong number that looks right is worse than a missing one. Fields this version does not know are ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TypeVar, get_args

from harness.continuation import Continuation
from harness.memory_timeline import NOT_RECORDED, ON_THE_CPU, MemoryTimeline, Point
from harness.phases import PHASES, Clock
from harness.plan_fields import DamageError
from harness.profiles import Name
from harness.replay_plans import ReplayPlan, replay_plan

SCHEMA = 2
"""Of what is written. In the first one, all variants of a round had blocks of the same number of steps."""

_LEAST_SECONDS = 1e-12
_MOST_SECONDS = 1e9
_TRACE = re.compile(r"traces/[0-9a-f]+/[\w.-]+\.json\.gz")


Choice = TypeVar("Choice", bound=str)


class RecordError(ValueError):
    """A record that cannot be used. The message names the field and what is wrong with it."""


@dataclass(frozen=True)
class Run:
    """One invocation of the measurement on one commit.

    ``facts`` describe the machine and its software (device, driver, cuda, torch, python, …); ``started`` is in UTC.
    ``snapshot_of`` is the commit under which the working tree that was measured lay; None for a commit of the history.
    ``workloads`` are the user's own models among those measured: where each name was built from. ``cases`` are the
    names of those that were asked for, none where that was left to the profile; None in results of earlier versions.
    """

    run: str
    commit: str
    started: datetime
    facts: Mapping[str, object]
    kitsune_file: str | None
    harness_file: str | None
    profile: Name
    snapshot_of: str | None
    workloads: Mapping[str, object]
    cases: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Blocks:
    """Seconds per step of the timed blocks of one variant in one round, in the order they were taken.

    ``device_s`` comes from device events and is None where the device has none (CPU); both have one entry per block.
    """

    wall_s: tuple[float, ...]
    device_s: tuple[float, ...] | None

    @property
    def seconds(self) -> tuple[float, ...]:
        """The times that are judged: by the device's events where there are any."""
        return self.wall_s if self.device_s is None else self.device_s

    def without(self, turns: Collection[int]) -> Blocks:
        """The blocks of the other turns."""
        kept = [turn for turn in range(len(self.wall_s)) if turn not in turns]
        device_s = self.device_s
        return Blocks(
            tuple(self.wall_s[turn] for turn in kept),
            None if device_s is None else tuple(device_s[turn] for turn in kept),
        )


@dataclass(frozen=True)
class Round:
    """One fresh process that timed the variants of one case in turns; entry i of every variant is the same turn.

    ``throttled`` turns, of which the GPU protected itself, were kept in the file and are left out of ``blocks``, unless
    there were no others. ``modes`` and ``plans`` are how Kitsune's variants ran at the end of the round, such as
    "eager", and by what they replayed, of the variants that told; results of earlier versions have none. ``taken`` is
    the share of the host's processors that other processes and, by the hypervisor, other guests had meanwhile; 0 where
    nobody knows.
    """

    run: str
    round: int
    case: str
    model: str
    batch: int
    device: str
    steps_per_block: Mapping[str, int]
    blocks: Mapping[str, Blocks]
    throttled: int = 0
    modes: Mapping[str, str] = field(default_factory=dict)
    plans: Mapping[str, ReplayPlan] = field(default_factory=dict)
    taken: float = 0.0


@dataclass(frozen=True)
class Profile:
    """Set-up seconds, peak memory and losses of one variant, from a process of its own.

    ``losses`` are (step, loss) pairs; a loss of None was not finite. ``kitsune`` is the status of a Kitsune variant.
    ``memory_timeline`` is of one steady step on a GPU, or else ``memory_timeline_missing`` says why there is none.
    ``caches`` is whether those of compilers were "cold" or "warm" when ``setup_s`` was measured; None of a variant that
    compiles nothing, and in results of earlier versions, whose peers had theirs in common. ``setup_again_s`` is the
    set-up in another process after that, where the first one has left something in its caches. ``first_replay_s`` and
    ``first_replay_again_s`` are the part of each until the end of the first step that Kitsune replayed; None where it
    replayed none, of peers, and in results of earlier versions. ``continuation`` is how it went on from a given state
    beside eager, where that was asked for, or else ``continuation_missing`` says why it could not.
    """

    run: str
    case: str
    model: str
    batch: int
    device: str
    variant: str
    precision: str
    setup_s: float
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    peak_rss_bytes: int | None
    losses: tuple[tuple[int, float | None], ...]
    kitsune: Mapping[str, object] | None
    inactive_split_bytes: int | None = None
    memory_timeline: MemoryTimeline | None = None
    memory_timeline_missing: str | None = None
    caches: str | None = None
    setup_again_s: float | None = None
    first_replay_s: float | None = None
    first_replay_again_s: float | None = None
    continuation: Continuation | None = None
    continuation_missing: str | None = None

    @property
    def cold_setup_s(self) -> float | None:
        """Seconds of set-up where there is nothing in the compilers' caches, if there are any."""
        return None if self.caches == "warm" else self.setup_s

    @property
    def warm_setup_s(self) -> float | None:
        """Seconds of set-up with what an earlier process has left in the caches."""
        return self.setup_s if self.caches == "warm" else self.setup_again_s

    @property
    def cold_first_replay_s(self) -> float | None:
        """The part of :attr:`cold_setup_s` until the end of the first step that was replayed."""
        return None if self.caches == "warm" else self.first_replay_s

    @property
    def warm_first_replay_s(self) -> float | None:
        """That of :attr:`warm_setup_s`."""
        return self.first_replay_s if self.caches == "warm" else self.first_replay_again_s


@dataclass(frozen=True)
class Skip:
    """A variant that was not measured.

    ``status`` is "skipped" (cannot run here), "left out" (the profile does not measure it) or "failed" (tried, and it
    broke).
    """

    run: str
    case: str
    model: str
    batch: int
    device: str
    variant: str
    precision: str
    status: str
    reason: str


@dataclass(frozen=True)
class Phases:
    """How the steps of one variant divide into phases, profiled in a process of its own.

    ``phases_s`` has one entry for each profiled step, in each of the phases that the step has; with those of
    ``host_gap_s`` (None where the ``clock`` is "wall": a CPU) they add up to the step. ``trace`` is the file with the
    last two of these steps, below the machine's folder; where it was shortened, ``trace_shortened`` says what it has,
    and where there is none, ``trace_missing`` says why. Where the profiling failed, ``failure`` says why, and there is
    nothing else.
    """

    run: str
    case: str
    model: str
    batch: int
    device: str
    variant: str
    precision: str
    clock: Clock
    phases_s: Mapping[str, tuple[float, ...]]
    host_gap_s: tuple[float, ...] | None
    trace: str | None
    trace_shortened: str | None
    trace_missing: str | None
    failure: str | None


Record = Run | Round | Profile | Phases | Skip


def parse_record(fields: object) -> Record:
    """Turn one decoded JSON value into a record.

    Raises:
        RecordError: naming the field and what is wrong with it.
    """
    if not isinstance(fields, Mapping):
        raise RecordError(f"expected a JSON object, got {_shown(fields)}")
    schema = fields.get("schema")
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        raise RecordError(f"schema is {_shown(schema)}; this version reads schemas 1 to {SCHEMA}")
    kind = fields.get("kind")
    if kind == "run":
        return _run(fields)
    if kind == "round":
        return _round(fields)
    if kind == "profile":
        return _profile(fields)
    if kind == "phases":
        return _phases(fields)
    if kind == "skip":
        return _skip(fields)
    raise RecordError(f"kind is {_shown(kind)}; expected one of run, round, profile, phases, skip")


def _run(fields: Mapping[str, object]) -> Run:
    return Run(
        run=_text(fields, "run"),
        commit=_text(fields, "commit"),
        started=_moment(fields, "started"),
        facts=_mapping(fields, "facts"),
        kitsune_file=_optional_text(fields, "kitsune_file"),
        harness_file=_optional_text(fields, "harness_file"),
        profile=_choice(fields, "profile", get_args(Name)),
        snapshot_of=_optional_text(fields, "snapshot_of"),
        workloads={} if fields.get("workloads") is None else _mapping(fields, "workloads"),
        cases=None if fields.get("cases") is None else _names(fields, "cases"),
    )


def _round(fields: Mapping[str, object]) -> Round:
    named = _mapping(fields, "blocks")
    if not named:
        raise RecordError("blocks is empty")
    blocks = {variant: _blocks(variant, entry) for variant, entry in named.items()}
    lengths = {variant: len(entry.wall_s) for variant, entry in blocks.items()}
    if len(set(lengths.values())) > 1:
        raise RecordError(f"blocks: variants have different numbers of blocks, so turns cannot be paired: {lengths}")
    throttled = _turns(fields.get("throttled", ()), next(iter(lengths.values())))
    if 0 < len(throttled) < min(lengths.values()):
        blocks = {variant: entry.without(throttled) for variant, entry in blocks.items()}
    return Round(
        run=_text(fields, "run"),
        round=_whole(fields, "round", least=0),
        case=_text(fields, "case"),
        model=_text(fields, "model"),
        batch=_whole(fields, "batch", least=1),
        device=_text(fields, "device"),
        steps_per_block=_steps_per_block(fields, blocks),
        blocks=blocks,
        throttled=len(throttled),
        modes={} if fields.get("modes") is None else _modes(_mapping(fields, "modes"), blocks),
        plans={} if fields.get("plans") is None else _plans(_mapping(fields, "plans"), blocks),
        taken=0.0 if fields.get("host") is None else _taken(_mapping(fields, "host")),
    )


def _taken(host: Mapping[str, object]) -> float:
    known = {name: host.get(name) for name in ("busy_elsewhere", "stolen")}
    return sum(_number(share, f"host: {name}") for name, share in known.items() if share is not None)


def _steps_per_block(fields: Mapping[str, object], timed: Collection[str]) -> dict[str, int]:
    """The steps of each variant's blocks; in results of earlier versions all of them have the same number."""
    if type(fields.get("steps_per_block")) is int:
        return dict.fromkeys(timed, _whole(fields, "steps_per_block", least=1))
    steps = _mapping(fields, "steps_per_block")
    try:
        return {variant: _whole(steps, variant, least=1) for variant in timed}
    except RecordError as error:
        raise RecordError(f"steps_per_block: {error}") from None


def _turns(entries: object, count: int) -> frozenset[int]:
    """Numbers of some of so many turns."""
    if not isinstance(entries, (list, tuple)):
        raise RecordError(f"throttled: expected a list of turns, got {_shown(entries)}")
    for entry in entries:
        if type(entry) is not int or not 0 <= entry < count:
            raise RecordError(f"throttled: there is no turn {_shown(entry)} among {count}")
    return frozenset(entries)


def _modes(named: Mapping[str, object], timed: Collection[str]) -> dict[str, str]:
    """Modes of some of the variants that were timed."""
    _check_timed("modes", named, timed)
    return {variant: _text(named, variant) for variant in named}


def _check_timed(field: str, named: Mapping[str, object], timed: Collection[str]) -> None:
    for variant in named:
        if variant not in timed:
            raise RecordError(f"{field}: there are no blocks of {_shown(variant)}")


def _plans(named: Mapping[str, object], timed: Collection[str]) -> dict[str, ReplayPlan]:
    """Plans of some of the variants that were timed."""
    _check_timed("plans", named, timed)
    try:
        return {variant: replay_plan(entry, f"plans[{variant!r}]") for variant, entry in named.items()}
    except DamageError as error:
        raise RecordError(str(error)) from None


def _blocks(variant: str, entry: object) -> Blocks:
    where = f"blocks[{variant!r}]"
    if not isinstance(entry, Mapping):
        raise RecordError(f"{where}: expected an object, got {_shown(entry)}")
    wall = _times(entry.get("wall_s"), f"{where}.wall_s")
    if entry.get("device_s") is None:
        return Blocks(wall, None)
    device = _times(entry["device_s"], f"{where}.device_s")
    if len(device) != len(wall):
        raise RecordError(f"{where}: {len(wall)} wall times but {len(device)} device times")
    return Blocks(wall, device)


def _profile(fields: Mapping[str, object]) -> Profile:
    return Profile(
        run=_text(fields, "run"),
        case=_text(fields, "case"),
        model=_text(fields, "model"),
        batch=_whole(fields, "batch", least=1),
        device=_text(fields, "device"),
        variant=_text(fields, "variant"),
        precision=_text(fields, "precision"),
        setup_s=_setup_seconds(fields, "setup_s"),
        peak_allocated_bytes=_optional_bytes(fields, "peak_allocated_bytes"),
        peak_reserved_bytes=_optional_bytes(fields, "peak_reserved_bytes"),
        peak_rss_bytes=_optional_bytes(fields, "peak_rss_bytes"),
        losses=_losses(fields.get("losses")),
        kitsune=None if fields.get("kitsune") is None else _mapping(fields, "kitsune"),
        inactive_split_bytes=_optional_bytes(fields, "inactive_split_bytes"),
        memory_timeline=_memory_timeline(fields),
        memory_timeline_missing=_missing_timeline(fields),
        caches=_caches(fields),
        setup_again_s=_optional_setup_seconds(fields, "setup_again_s"),
        first_replay_s=_optional_setup_seconds(fields, "first_replay_s"),
        first_replay_again_s=_optional_setup_seconds(fields, "first_replay_again_s"),
        continuation=_continuation(fields),
        continuation_missing=_optional_text(fields, "continuation_missing"),
    )


def _continuation(fields: Mapping[str, object]) -> Continuation | None:
    if fields.get("continuation") is None:
        return None
    found = _mapping(fields, "continuation")
    curves = [_consecutive_losses(found, name) for name in ("losses", "eager", "eager_again")]
    if len({len(curve) for curve in curves}) > 1 or not curves[0]:
        raise RecordError(f"continuation: losses of {' and '.join(str(len(curve)) for curve in curves)} steps")
    losses, eager, eager_again = curves
    return Continuation(losses, eager, eager_again, _whole(found, "num_replays", least=0))


def _consecutive_losses(fields: Mapping[str, object], name: str) -> tuple[float | None, ...]:
    entries = fields.get(name)
    if not isinstance(entries, (list, tuple)):
        raise RecordError(f"continuation.{name}: expected a list of losses, got {_shown(entries)}")
    return tuple(None if entry is None else _number(entry, f"continuation.{name}") for entry in entries)


def _caches(fields: Mapping[str, object]) -> str | None:
    if "setup_again_s" not in fields or fields.get("caches") is None:
        return None
    return _choice(fields, "caches", ("cold", "warm"))


def _setup_seconds(fields: Mapping[str, object], name: str) -> float:
    seconds = _number(fields.get(name), name)
    if seconds < 0:
        raise RecordError(f"{name} is {seconds}; expected 0 or more seconds")
    return seconds


def _optional_setup_seconds(fields: Mapping[str, object], name: str) -> float | None:
    return None if fields.get(name) is None else _setup_seconds(fields, name)


def _missing_timeline(fields: Mapping[str, object]) -> str | None:
    """Why there is no timeline of memory; results of earlier versions say nothing of it."""
    if fields.get("memory_timeline") is not None:
        return None
    told = _optional_text(fields, "memory_timeline_missing")
    return told or (NOT_RECORDED if fields.get("device") == "cuda" else ON_THE_CPU)


def _memory_timeline(fields: Mapping[str, object]) -> MemoryTimeline | None:
    if fields.get("memory_timeline") is None:
        return None
    timeline = _mapping(fields, "memory_timeline")
    step_us = _number(timeline.get("step_us"), "memory_timeline.step_us")
    entries = timeline.get("points")
    if not isinstance(entries, (list, tuple)) or not entries:
        raise RecordError(f"memory_timeline.points: expected at least one point, got {_shown(entries)}")
    points: list[Point] = []
    for entry in entries:
        if not isinstance(entry, (list, tuple)) or len(entry) != 3 or not all(type(size) is int for size in entry[1:]):
            raise RecordError(f"memory_timeline.points: expected [us, allocated, reserved], got {_shown(entry)}")
        time = _number(entry[0], "memory_timeline.points")
        if not (points[-1][0] if points else 0) <= time <= step_us or min(entry[1:]) < 0:
            raise RecordError(f"memory_timeline.points: {_shown(entry)} is out of order, or less than nothing")
        points.append((time, entry[1], entry[2]))
    return MemoryTimeline(step_us, tuple(points))


def _phases(fields: Mapping[str, object]) -> Phases:
    failure, clock, trace = (_optional_text(fields, name) for name in ("failure", "clock", "trace"))
    if clock not in get_args(Clock):
        raise RecordError(f"clock is {_shown(clock)}; expected one of {', '.join(get_args(Clock))}")
    if trace is not None and not _TRACE.fullmatch(trace):
        raise RecordError(f"trace: {_shown(trace)} is no file below the folder of traces")
    phases_s = _mapping(fields, "phases_s")
    for name in phases_s:
        if name not in PHASES:
            raise RecordError(f"phases_s: {_shown(name)} is none of {', '.join(PHASES)}")
    times = {name: _spans(phases_s[name], f"phases_s[{name!r}]") for name in PHASES if name in phases_s}
    gap = None if fields.get("host_gap_s") is None else _spans(fields["host_gap_s"], "host_gap_s")
    lengths = {len(values) for values in (*times.values(), *(() if gap is None else (gap,)))}
    if failure is None and (not times or len(lengths) != 1 or 0 in lengths):
        raise RecordError(f"phases_s: expected one time of each phase for each step, got {_shown(phases_s)}")
    return Phases(
        run=_text(fields, "run"),
        case=_text(fields, "case"),
        model=_text(fields, "model"),
        batch=_whole(fields, "batch", least=1),
        device=_text(fields, "device"),
        variant=_text(fields, "variant"),
        precision=_text(fields, "precision"),
        clock="device" if clock == "device" else "wall",
        phases_s=times,
        host_gap_s=gap,
        trace=trace,
        trace_shortened=_optional_text(fields, "trace_shortened"),
        trace_missing=_optional_text(fields, "trace_missing"),
        failure=failure,
    )


def _skip(fields: Mapping[str, object]) -> Skip:
    return Skip(
        run=_text(fields, "run"),
        case=_text(fields, "case"),
        model=_text(fields, "model"),
        batch=_whole(fields, "batch", least=1),
        device=_text(fields, "device"),
        variant=_text(fields, "variant"),
        precision=_text(fields, "precision"),
        status=_choice(fields, "status", ("skipped", "left out", "failed")),
        reason=_text(fields, "reason"),
    )


def _losses(entries: object) -> tuple[tuple[int, float | None], ...]:
    if not isinstance(entries, (list, tuple)):
        raise RecordError(f"losses: expected a list of [step, loss], got {_shown(entries)}")
    curve: list[tuple[int, float | None]] = []
    for entry in entries:
        if not isinstance(entry, (list, tuple)) or len(entry) != 2 or type(entry[0]) is not int:
            raise RecordError(f"losses: expected [step, loss], got {_shown(entry)}")
        step, loss = entry
        if curve and step <= curve[-1][0]:
            raise RecordError(f"losses: step {step} does not come after step {curve[-1][0]}")
        curve.append((step, None if loss is None else _number(loss, f"losses at step {step}")))
    return tuple(curve)


def _times(entries: object, where: str) -> tuple[float, ...]:
    if not isinstance(entries, (list, tuple)) or not entries:
        raise RecordError(f"{where}: expected a list of at least one time, got {_shown(entries)}")
    if set(map(type, entries)) == {float} and math.isfinite(sum(entries)):
        times = tuple(entries)  # nearly all of a long history: they need no closer look
    else:
        times = tuple(_number(entry, where) for entry in entries)
    for time in (min(times), max(times)):
        if not _LEAST_SECONDS <= time <= _MOST_SECONDS:
            raise RecordError(f"{where}: {time} cannot be the seconds of a training step")
    return times


def _spans(entries: object, where: str) -> tuple[float, ...]:
    """Parts of steps, which may be none of it."""
    if not isinstance(entries, (list, tuple)):
        raise RecordError(f"{where}: expected a list of times, got {_shown(entries)}")
    times = tuple(_number(entry, where) for entry in entries)
    for time in times:
        if not 0 <= time <= _MOST_SECONDS:
            raise RecordError(f"{where}: {time} cannot be seconds of a training step")
    return times


def _number(value: object, where: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise RecordError(f"{where}: expected a number, got {_shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RecordError(f"{where}: {_shown(value)} is not a finite number")
    return number


def _text(fields: Mapping[str, object], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise RecordError(f"{name}: expected a text that is not empty, got {_shown(value)}")
    return value


def _optional_text(fields: Mapping[str, object], name: str) -> str | None:
    return None if fields.get(name) is None else _text(fields, name)


def _choice(fields: Mapping[str, object], name: str, allowed: tuple[Choice, ...]) -> Choice:
    value = fields.get(name)
    for choice in allowed:
        if choice == value:
            return choice
    raise RecordError(f"{name} is {_shown(value)}; expected one of {', '.join(allowed)}")


def _whole(fields: Mapping[str, object], name: str, *, least: int) -> int:
    value = fields.get(name)
    if type(value) is not int or value < least:
        raise RecordError(f"{name}: expected a whole number from {least}, got {_shown(value)}")
    return value


def _optional_bytes(fields: Mapping[str, object], name: str) -> int | None:
    return None if fields.get(name) is None else _whole(fields, name, least=0)


def _names(fields: Mapping[str, object], name: str) -> tuple[str, ...]:
    value = fields.get(name)
    if not isinstance(value, (list, tuple)) or not all(isinstance(entry, str) for entry in value):
        raise RecordError(f"{name}: expected a list of names, got {_shown(value)}")
    return tuple(value)


def _mapping(fields: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = fields.get(name)
    if not isinstance(value, Mapping):
        raise RecordError(f"{name}: expected an object, got {_shown(value)}")
    return value


def _moment(fields: Mapping[str, object], name: str) -> datetime:
    text = _text(fields, name)
    try:
        moment = datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith("Z") else text)
    except ValueError:
        raise RecordError(f"{name}: {text!r} is not an ISO 8601 date and time") from None
    if moment.tzinfo is None:
        raise RecordError(f"{name}: {text!r} has no time zone; expected UTC, such as 2026-01-31T12:00:00+00:00")
    return moment.astimezone(timezone.utc)


def _shown(value: object) -> str:
    """The value in a message: short, and recognisable when absent."""
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
