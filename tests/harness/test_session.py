"""What a run starts, keeps and returns, with processes that only pretend to measure."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

import harness
from harness import profiles, session, variants
from harness.context import Context, ContextError
from harness.continuation import Continuation
from harness.measure import Probe, ProfileJob, ProfileResult, RoundJob, RoundResult, SetupJob, SetupResult
from harness.memory import Peak
from harness.memory_timeline import MemoryTimeline
from harness.phase_recording import PhasesJob, PhasesResult
from harness.phases import KeptTrace, PhaseTimes
from harness.processes import Launcher, ProcessFailed
from harness.profiles import Case
from harness.replay_plans import ReplayPlan
from harness.session import Measured, Session
from harness.store import History, ResultsError, Store
from harness.timer import BlockTime

COMMIT = "c" * 40
ROOT = Path(harness.__file__).resolve().parents[1]
CASES = (Case("mlp", 4, "cpu", 3, default=True), Case("lenet", 4, "cpu", 3, default=True))
FACTS = {"device_type": "cpu", "device": "a CPU", "torch": "2", "triton": None, "python": "3"}
EAGER, DROPIN, TRAINSTEP = "eager_fp32", "kitsune_dropin_fp32", "kitsune_trainstep_fp32"


@dataclass
class Pretender(Launcher):
    """Answers jobs at once. ``on_profile`` and ``on_round`` may raise or answer in its place."""

    method: str = "forkserver"  # type: ignore[assignment]
    facts: Mapping[str, object] = field(default_factory=lambda: FACTS)
    unavailable: Mapping[str, str] = field(default_factory=dict)
    on_profile: Callable[[ProfileJob], ProfileResult | None] = lambda job: None
    on_setup: Callable[[SetupJob], SetupResult | None] = lambda job: None
    on_round: Callable[[RoundJob], RoundResult | None] = lambda job: None
    on_phases: Callable[[PhasesJob], PhasesResult | None] = lambda job: None
    jobs: list[object] = field(default_factory=list)

    def run(self, function: object, job: object, *, timeout_s: float) -> object:  # type: ignore[override]
        self.jobs.append(job)
        if isinstance(job, ProfileJob):
            return self.on_profile(job) or ProfileResult(0.5, None, Peak(None, None, 1000), ((0, 2.0), (2, 1.0)), None)
        if isinstance(job, SetupJob):
            return self.on_setup(job) or SetupResult(0.25, 0.125)
        if isinstance(job, RoundJob):
            return self.on_round(job) or timed([task.variant for task in job.tasks])
        if isinstance(job, PhasesJob):
            return self.on_phases(job) or DIVIDED
        return Probe(self.facts, self.unavailable)

    def divided(self) -> list[tuple[str, str]]:
        """Cases and variants whose phases were told apart."""
        return [(job.case.name, job.task.variant) for job in self.jobs if isinstance(job, PhasesJob)]

    def rounds(self, case: str) -> list[list[str]]:
        """The variants of each round that was started for a case."""
        jobs = [job for job in self.jobs if isinstance(job, RoundJob) and job.case.name == case]
        return [[task.variant for task in job.tasks] for job in jobs]


DIVIDED = PhasesResult(
    PhaseTimes("wall", {"forward": (0.1, 0.2), "other": (0.0, 0.1)}, None), KeptTrace(b"a trace", "one step only", None)
)


def timed(names: list[str], failures: Mapping[str, str] | None = None) -> RoundResult:
    blocks = (BlockTime(0.2, None), BlockTime(0.1, None), BlockTime(0.3, None))
    return RoundResult(dict.fromkeys(names, 7), dict.fromkeys(names, blocks), failures or {})


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "CASES", CASES)
    monkeypatch.setattr(session.environment, "visible_gpu", lambda: None)


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.setattr(Context, "results", property(lambda self: tmp_path / "results"))
    monkeypatch.setattr(Context, "caches", property(lambda self: tmp_path / "caches"))
    return Context(ROOT, ROOT, COMMIT, at_head=False, machine="here", profile="quick", progress=tmp_path / "progress")


def run(context: Context, launcher: Launcher) -> tuple[dict[tuple[str, str], Measured], History]:
    measured = Session(context, launcher).measure()
    history = Store(context.results).load("here")
    assert history.damage == ()
    return measured, history


def test_everything_measured_is_stored_and_returned(context: Context) -> None:
    pretender = Pretender()
    measured, history = run(context, pretender)
    rounds = profiles.effort("quick", "cpu").rounds
    assert pretender.rounds("mlp-b4") == [[EAGER, DROPIN, TRAINSTEP]] * rounds
    assert measured["mlp-b4", EAGER] == {
        "status": "measured",
        "reason": "",
        "step_s": [0.2] * rounds,
        "setup_s": [0.5],
        "peak_bytes": [1000],
        "peak_reserved_bytes": [],
    }
    (stored,) = history.runs(COMMIT)
    assert (stored.profile, stored.facts) == ("quick", FACTS)
    assert stored.harness_file == "harness/__init__.py"
    assert [(entry.case, entry.round) for entry in history.rounds(COMMIT)] == [
        (case.name, number) for case in CASES for number in range(rounds)
    ]
    assert history.rounds(COMMIT)[0].steps_per_block[DROPIN] == 7
    assert history.rounds(COMMIT)[0].blocks[DROPIN].wall_s == (0.2, 0.1, 0.3)
    profile = history.profiles(COMMIT)[0]
    assert (profile.variant, profile.peak_rss_bytes, profile.losses) == (EAGER, 1000, ((0, 2.0), (2, 1.0)))
    assert len(history.profiles(COMMIT)) == 6


def test_every_variant_is_measured_or_skipped_with_a_reason(context: Context) -> None:
    _, history = run(context, Pretender(unavailable={DROPIN: "this commit has no kitsune"}))
    skips = {(entry.case, entry.variant): entry for entry in history.skips(COMMIT)}
    profiled = {(entry.case, entry.variant) for entry in history.profiles(COMMIT)}
    assert not set(skips) & profiled
    assert set(skips) | profiled == {(case.name, variant) for case in CASES for variant in variants.names()}
    assert skips["mlp-b4", DROPIN].reason == "this commit has no kitsune"
    assert "at HEAD only" in skips["mlp-b4", "compile_fp32"].reason
    assert {entry.status for (_, variant), entry in skips.items() if variant == DROPIN} == {"skipped"}
    assert {entry.status for (_, variant), entry in skips.items() if variant != DROPIN} == {"left out"}


def test_a_model_that_cannot_be_built_is_skipped_with_a_reason(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = {"lenet": "transformers is not installed"}
    monkeypatch.setattr(session.models, "missing", reasons.get)
    measured, history = run(context, Pretender())
    assert {entry.case for entry in history.profiles(COMMIT)} == {"mlp-b4"}
    skips = [entry for entry in history.skips(COMMIT) if entry.case == "lenet-b4"]
    assert {entry.variant for entry in skips} == set(variants.names())
    assert {(entry.status, entry.reason) for entry in skips} == {("skipped", "transformers is not installed")}
    assert measured["lenet-b4", EAGER]["status"] == "skipped"


def test_head_is_compiled_once(context: Context) -> None:
    measured, _ = run(replace(context, at_head=True), Pretender())
    assert measured["mlp-b4", "compile_fp32"]["status"] == "measured"
    assert measured["lenet-b4", "compile_fp32"]["status"] == "left out"


def test_a_variant_that_fails_alone_costs_only_itself(context: Context) -> None:
    def crash(job: ProfileJob) -> None:
        if job.task.variant == DROPIN and job.case.model == "mlp":
            raise ProcessFailed(f"killed by SIGSEGV\nFile {ROOT}/kitsune/step.py", None)

    pretender = Pretender(on_profile=crash)
    measured, history = run(context, pretender)
    (failed,) = [entry for entry in history.skips(COMMIT) if entry.status == "failed"]
    assert (failed.case, failed.variant, failed.reason) == ("mlp-b4", DROPIN, "killed by SIGSEGV\nFile kitsune/step.py")
    assert measured["mlp-b4", DROPIN]["status"] == "failed"
    assert all(DROPIN not in names for names in pretender.rounds("mlp-b4"))
    assert measured["lenet-b4", DROPIN]["status"] == "measured"


def compiled(job: ProfileJob) -> ProfileResult:
    """Drop-in loops find empty caches and leave something there, whole steps leave nothing, compiled ones find some."""
    found = {DROPIN: "cold", TRAINSTEP: "cold", "compile_fp32": "warm"}.get(job.task.variant)
    assert job.task.caches is not None
    if job.task.variant in (DROPIN, "compile_fp32"):
        job.task.caches.mkdir(parents=True, exist_ok=True)
        (job.task.caches / "kernel").write_text("compiled")
    first_replay_s = 0.375 if job.task.variant in (DROPIN, TRAINSTEP) else None
    peak, losses = Peak(None, None, 1000), ((0, 2.0), (2, 1.0))
    return ProfileResult(0.5, found, peak, losses, None, first_replay_s=first_replay_s)


def test_what_has_filled_its_caches_is_set_up_once_more(context: Context, capsys: pytest.CaptureFixture[str]) -> None:
    pretender = Pretender(on_profile=compiled)
    measured, history = run(replace(context, at_head=True), pretender)
    again = [(job.case.name, job.task.variant) for job in pretender.jobs if isinstance(job, SetupJob)]
    assert again == [("mlp-b4", DROPIN), ("lenet-b4", DROPIN)]
    caches = {job.task.variant: job.task.caches for job in pretender.jobs if isinstance(job, SetupJob)}
    assert caches == {
        job.task.variant: job.task.caches
        for job in pretender.jobs
        if isinstance(job, ProfileJob) and job.case.name == "lenet-b4" and job.task.variant == DROPIN
    }
    told = {entry.variant: (entry.setup_s, entry.caches, entry.setup_again_s) for entry in history.profiles(COMMIT)}
    assert told == {
        EAGER: (0.5, None, None),
        DROPIN: (0.5, "cold", 0.25),
        TRAINSTEP: (0.5, "cold", None),
        "compile_fp32": (0.5, "warm", None),
    }
    replayed = {entry.variant: (entry.first_replay_s, entry.first_replay_again_s) for entry in history.profiles(COMMIT)}
    assert replayed == {
        EAGER: (None, None),
        DROPIN: (0.375, 0.125),
        TRAINSTEP: (0.375, None),
        "compile_fp32": (None, None),
    }
    assert measured["mlp-b4", DROPIN]["setup_s"] == [0.5]
    assert f"{DROPIN}: set up in 0.50 s, again in 0.25 s" in capsys.readouterr().out


@pytest.mark.parametrize(("profile", "at_head", "times"), [("quick", False, 0), ("quick", True, 2), ("full", False, 2)])
def test_the_second_set_up_is_for_head_and_the_full_profile(
    context: Context, profile: profiles.Name, at_head: bool, times: int
) -> None:
    pretender = Pretender(on_profile=compiled)
    run(replace(context, at_head=at_head, profile=profile), pretender)
    assert sum(isinstance(job, SetupJob) for job in pretender.jobs) == times


def test_a_variant_that_its_own_caches_break_has_failed(context: Context) -> None:
    def crash(job: SetupJob) -> None:
        raise ProcessFailed("killed by SIGSEGV", None)

    pretender = Pretender(on_profile=compiled, on_setup=crash)
    measured, history = run(replace(context, at_head=True), pretender)
    (reason,) = {entry.reason for entry in history.skips(COMMIT) if entry.status == "failed"}
    assert reason == "set up again, with filled caches: killed by SIGSEGV"
    assert measured["mlp-b4", DROPIN]["status"] == "failed"
    assert all(DROPIN not in names for names in pretender.rounds("mlp-b4"))
    (profile,) = [entry for entry in history.profiles(COMMIT) if (entry.case, entry.variant) == ("mlp-b4", DROPIN)]
    assert (profile.caches, profile.setup_again_s) == ("cold", None)


def test_a_round_that_a_variant_kills_is_repeated_without_it(context: Context) -> None:
    def crash(job: RoundJob) -> None:
        if job.round == 1 and any(task.variant == TRAINSTEP for task in job.tasks):
            raise ProcessFailed("killed by SIGSEGV", TRAINSTEP)

    pretender = Pretender(on_round=crash)
    measured, history = run(context, pretender)
    rest = [EAGER, DROPIN]
    assert pretender.rounds("mlp-b4") == [[*rest, TRAINSTEP], [*rest, TRAINSTEP], rest, rest]
    assert measured["mlp-b4", TRAINSTEP]["reason"] == "in round 1: killed by SIGSEGV"
    assert [set(entry.blocks) for entry in history.rounds(COMMIT) if entry.case == "mlp-b4"] == [
        {*rest, TRAINSTEP},
        set(rest),
        set(rest),
    ]


def test_a_variant_that_raises_in_a_round_leaves_it(context: Context) -> None:
    def fail(job: RoundJob) -> RoundResult:
        others = [task.variant for task in job.tasks if task.variant != EAGER]
        return timed([EAGER], dict.fromkeys(others, "ValueError: no"))

    pretender = Pretender(on_round=fail)
    measured, history = run(context, pretender)
    assert pretender.rounds("lenet-b4")[1:] == [[EAGER], [EAGER]]
    assert measured["lenet-b4", DROPIN]["status"] == "failed"
    assert len([entry for entry in history.skips(COMMIT) if entry.status == "failed"]) == 4


def test_a_round_that_dies_without_a_word_fails_all_of_it(context: Context) -> None:
    def crash(job: RoundJob) -> None:
        raise ProcessFailed("the process was killed", None)

    measured, history = run(context, Pretender(on_round=crash))
    assert {measured["mlp-b4", name]["status"] for name in (EAGER, DROPIN, TRAINSTEP)} == {"failed"}
    assert history.rounds(COMMIT) == ()
    assert len(history.profiles(COMMIT)) == 6


def test_what_was_measured_before_an_interrupt_is_kept(context: Context) -> None:
    def interrupt(job: RoundJob) -> None:
        if job.case.model == "lenet":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Session(context, Pretender(on_round=interrupt)).measure()
    history = Store(context.results).load("here")
    assert history.damage == ()
    assert {entry.case for entry in history.rounds(COMMIT)} == {"mlp-b4"}
    assert {entry.case for entry in history.profiles(COMMIT)} == {"mlp-b4", "lenet-b4"}


def test_progress_is_visible_line_by_line(context: Context, capsys: pytest.CaptureFixture[str]) -> None:
    run(context, Pretender())
    assert context.progress is not None
    begin, *events = map(json.loads, context.progress.read_text().splitlines())
    lines = [event["line"] for event in events]
    assert begin["steps"] == [[event["case"], event["part"]] for event in events]
    total = len(CASES) * (3 + profiles.effort("quick", "cpu").rounds)
    assert len(lines) == total
    assert lines[-1].startswith(f"cccccccc  {total}/{total}  lenet-b4")
    assert capsys.readouterr().out.splitlines() == lines


def test_device_memory_is_what_asv_gets_on_a_gpu(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "CASES", (Case("mlp", 4, "cuda", 3, default=True),))
    timeline = MemoryTimeline(9.5, ((0.0, 8, 20), (3.5, 10, 20)))
    result = ProfileResult(
        0.5, "cold", Peak(10, 20, 1000, 3), ((0, float("nan")),), {"mode": "replay"}, memory_timeline=timeline
    )
    pretender = Pretender(facts={**FACTS, "device_type": "cuda"}, on_profile=lambda job: result)
    measured, history = run(replace(context, at_head=True), pretender)
    entry = measured["mlp-b4", "handcaptured_amp"]
    assert (entry["peak_bytes"], entry["peak_reserved_bytes"]) == ([10], [20])
    stored = history.profiles(COMMIT)[0]
    assert stored.losses == ((0, None),)
    assert (stored.inactive_split_bytes, stored.memory_timeline) == (3, timeline)
    assert stored.memory_timeline_missing is None
    assert set(history.rounds(COMMIT)[0].blocks) == set(variants.names()) - {"handcaptured_compile_max_autotune_amp"}


@pytest.mark.parametrize("facts", [FACTS, None])
def test_where_forking_loses_the_gpu_processes_are_spawned(
    context: Context, monkeypatch: pytest.MonkeyPatch, facts: Mapping[str, object] | None
) -> None:
    class Forked(Pretender):
        def run(self, function: object, job: object, *, timeout_s: float) -> object:
            assert isinstance(job, Path), "nothing is measured in these processes"
            if facts is None:
                raise ProcessFailed("RuntimeError: Cannot re-initialize CUDA in forked subprocess", None)
            return Probe(facts, {})

    monkeypatch.setattr(profiles, "CASES", (Case("mlp", 4, "cuda", 3, default=True),))
    monkeypatch.setattr(session.environment, "visible_gpu", lambda: "a GPU")
    spawned = Pretender(method="spawn", facts={**FACTS, "device_type": "cuda"})
    monkeypatch.setattr(session, "Launcher", lambda method: spawned)
    measured, _ = run(context, Forked())
    assert measured["mlp-b4", EAGER]["status"] == "measured"


def test_a_machine_that_cannot_be_probed_is_an_error(context: Context) -> None:
    class Broken(Pretender):
        def run(self, function: object, job: object, *, timeout_s: float) -> object:
            raise ProcessFailed("ImportError: no torch", None)

    with pytest.raises(ProcessFailed, match="no torch"):
        Session(context, Broken(method="spawn")).measure()


def test_a_harness_from_elsewhere_is_refused(context: Context, tmp_path: Path) -> None:
    with pytest.raises(ContextError, match="working tree"):
        Session(replace(context, root=tmp_path), Pretender()).measure()
    assert not context.results.exists()


def test_a_kitsune_from_elsewhere_does_not_count(context: Context, tmp_path: Path) -> None:
    _, history = run(replace(context, checkout=tmp_path / "project"), Pretender())
    (stored,) = history.runs(COMMIT)
    assert stored.kitsune_file is None


def test_records_hold_no_path_of_this_machine(context: Context) -> None:
    status = {"mode": "eager", "refusals": [f"a branch on data [{ROOT}/models/mlp.py:3]"]}
    result = ProfileResult(0.5, None, Peak(None, None, 1000), ((0, 2.0),), status)
    _, history = run(context, Pretender(on_profile=lambda job: result))
    assert history.profiles(COMMIT)[0].kitsune == {"mode": "eager", "refusals": ["a branch on data [models/mlp.py:3]"]}
    (path,) = context.results.glob("*/*.samples.jsonl")
    assert str(ROOT) not in path.read_text()
    assert all(json.loads(line)["schema"] == 2 for line in path.read_text().splitlines())


def test_before_head_a_gpu_s_quick_profile_times_peers_without_profiling_them(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "CASES", (Case("mlp", 4, "cuda", 3, default=True),))
    measured, history = run(context, Pretender(facts={**FACTS, "device_type": "cuda"}))
    assert set(history.rounds(COMMIT)[0].blocks) == set(profiles._EARLIER)
    assert "handcaptured_amp" not in {entry.variant for entry in history.profiles(COMMIT)}
    entry = measured["mlp-b4", "handcaptured_amp"]
    assert entry["step_s"]
    assert not entry["setup_s"]


SWEEP = [
    "eager_amp",
    "handcaptured_amp",
    "handcaptured_compile_amp",
    "kitsune_trainstep_amp",
    "kitsune_trainstep_one_stream_amp",
]


def test_the_sweep_times_all_batch_sizes_and_compares_memory(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (Case("mlp", 4, "cuda", 3, default=True), Case("mlp", 8, "cuda", 3))
    monkeypatch.setattr(profiles, "CASES", cases)
    pretender = Pretender(facts={**FACTS, "device_type": "cuda"})
    measured, history = run(replace(context, profile="sweep"), pretender)
    rounds = profiles.effort("sweep", "cuda").rounds
    assert pretender.rounds("mlp-b8") == pretender.rounds("mlp-b4") == [SWEEP] * rounds
    whole = {(entry.case, entry.variant) for entry in history.profiles(COMMIT)}
    assert whole == {(case.name, name) for case in cases for name in ("handcaptured_amp", "kitsune_trainstep_amp")}
    left_out = {
        entry.variant for entry in history.skips(COMMIT) if (entry.case, entry.status) == ("mlp-b8", "left out")
    }
    assert left_out == set(variants.names()) - set(SWEEP)
    entry = measured["mlp-b8", SWEEP[0]]
    assert entry["status"] == "measured"
    assert entry["step_s"]
    assert not entry["setup_s"]
    assert context.progress is not None
    last = json.loads(context.progress.read_text().splitlines()[-1])["line"]
    done, total = last.split()[1].split("/")
    assert done == total
    assert "nothing left to measure" not in context.progress.read_text()


def test_on_the_zoo_every_variant_goes_on_beside_eager_and_sets_up_once(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "ZOO", (Case("policy_value", 4, "cuda", 20, default=True),))
    found = Continuation((2.0, None), (2.0, 1.0), (2.0, 1.5), num_replays=2)
    peak, losses = Peak(None, None, 1000), ((0, 2.0), (2, 1.0))
    asked: list[bool] = []

    def went_on(job: ProfileJob) -> ProfileResult:
        asked.append(job.goes_on)
        told = "it could not go on" if job.task.variant == "compile_amp" else found
        return ProfileResult(0.5, "cold", peak, losses, None, continuation=told)

    pretender = Pretender(on_profile=went_on, facts={**FACTS, "device_type": "cuda"})
    _, history = run(replace(context, profile="zoo"), pretender)
    entries = {entry.variant: entry for entry in history.profiles(COMMIT)}
    assert set(entries) == set(profiles.ZOO_VARIANTS["cuda"])
    assert asked == [True] * len(entries)
    assert entries["compile_amp"].continuation is None
    assert entries["compile_amp"].continuation_missing == "it could not go on"
    assert entries["kitsune_trainstep_amp"].continuation == found
    assert all(entry.setup_again_s is None for entry in entries.values())
    assert not any(profiles.needs_continuation(profile) for profile in ("quick", "sweep", "full", "check"))


def test_a_round_keeps_what_disturbed_it_and_leaves_throttled_turns_out(context: Context) -> None:
    def throttled(job: RoundJob) -> RoundResult:
        result = timed([task.variant for task in job.tasks])
        return replace(
            result, throttled=(2,), ended="seconds", half_width=0.02, gpu={"readings": 4}, host={"stolen": 0}
        )

    measured, history = run(context, Pretender(on_round=throttled))
    entry = history.rounds(COMMIT)[0]
    assert (entry.throttled, entry.blocks[EAGER].wall_s) == (1, (0.2, 0.1))
    assert measured["mlp-b4", EAGER]["step_s"][0] == pytest.approx(0.15)
    lines = (context.results / "here" / f"{COMMIT}.samples.jsonl").read_text().splitlines()
    stored = next(record for record in map(json.loads, lines) if record["kind"] == "round")
    assert stored["throttled"] == [2]
    assert (stored["ended"], stored["half_width"]) == ("seconds", 0.02)
    assert (stored["gpu"], stored["host"]) == ({"readings": 4}, {"stolen": 0})
    assert len(stored["blocks"][EAGER]["wall_s"]) == 3


def test_a_round_keeps_the_modes_and_plans_in_use(context: Context) -> None:
    plan = ReplayPlan("list", 2, fused=True)

    def planned(job: RoundJob) -> RoundResult:
        return replace(
            timed([task.variant for task in job.tasks]), modes={TRAINSTEP: "replay"}, plans={TRAINSTEP: plan}
        )

    _, history = run(context, Pretender(on_round=planned))
    assert {TRAINSTEP: plan} == history.rounds(COMMIT)[0].plans
    assert history.rounds(COMMIT)[0].modes == {TRAINSTEP: "replay"}


def alternating(job: RoundJob) -> RoundResult:
    """Ratios to eager that are far apart from round to round."""
    seconds = {EAGER: 1.0, DROPIN: 1.0 if job.round % 2 else 0.8, TRAINSTEP: 0.5}
    blocks = {task.variant: (BlockTime(seconds[task.variant], None),) * 3 for task in job.tasks}
    return RoundResult(dict.fromkeys(blocks, 7), blocks, {})


def test_until_conclusive_there_are_more_rounds_where_a_verdict_is_not(context: Context) -> None:
    sampling = profiles.Sampling(until="conclusive", most_rounds=7)

    clear, unclear = Pretender(), Pretender(on_round=alternating)
    run(replace(context, sampling=sampling), clear)
    _, history = run(replace(context, sampling=sampling, commit="d" * 40), unclear)

    assert len(clear.rounds("mlp-b4")) == profiles.effort("quick", "cpu").rounds
    assert len(unclear.rounds("mlp-b4")) == 7
    assert len(history.rounds("d" * 40)) == 14


def test_the_limits_of_sampling_are_recorded(context: Context) -> None:
    sampling = profiles.Sampling(most_rounds=2, narrow_within=0.001, timed_seconds=0.5)
    pretender = Pretender()
    run(replace(context, sampling=sampling), pretender)
    lines = (context.results / "here" / f"{COMMIT}.samples.jsonl").read_text().splitlines()
    recorded = json.loads(lines[0])["sampling"]
    assert len(pretender.rounds("mlp-b4")) == 2
    assert (recorded["until"], recorded["rounds"], recorded["most_rounds"]) == ("rounds", 2, 2)
    assert (recorded["narrow_within"], recorded["timed_seconds"]) == (0.001, 0.5)


def resumed(context: Context, launcher: Launcher) -> tuple[dict[tuple[str, str], Measured], History]:
    return run(replace(context, resume=True), launcher)


def test_a_run_that_was_stopped_is_taken_up_where_it_was(context: Context) -> None:
    complete, _ = run(replace(context, results_folder=None), Pretender())
    (context.results / "here" / f"{COMMIT}.samples.jsonl").unlink()
    pretender = Pretender()

    def stop(job: RoundJob) -> None:
        if job.case.name == "mlp-b4" and len(pretender.rounds("mlp-b4")) == 2:
            raise KeyboardInterrupt

    pretender.on_round = stop
    with pytest.raises(KeyboardInterrupt):
        run(context, pretender)

    again = Pretender()
    measured, history = resumed(context, again)

    rounds = profiles.effort("quick", "cpu").rounds
    assert again.rounds("mlp-b4") == [[EAGER, DROPIN, TRAINSTEP]] * (rounds - 1)
    assert [job.task.variant for job in again.jobs if isinstance(job, ProfileJob) and job.case.model == "mlp"] == []
    assert len(history.runs(COMMIT)) == 2
    assert len([entry for entry in history.rounds(COMMIT) if entry.case == "mlp-b4"]) == rounds
    assert measured == complete


def test_what_was_inconclusive_is_taken_up_with_more_rounds_and_what_was_not_is_left(context: Context) -> None:
    sampling = profiles.Sampling(until="conclusive", most_rounds=7)
    again = Pretender(on_round=alternating)
    run(replace(context, commit="d" * 40), Pretender())
    run(context, Pretender(on_round=alternating))
    rounds = profiles.effort("quick", "cpu").rounds

    _, history = resumed(replace(context, sampling=sampling), again)
    assert len(again.rounds("mlp-b4")) == 7 - rounds
    assert len([entry for entry in history.rounds(COMMIT) if entry.case == "mlp-b4"]) == 7

    clear = Pretender()
    resumed(replace(context, sampling=sampling, commit="d" * 40), clear)
    assert clear.rounds("mlp-b4") == []


def test_what_is_complete_is_not_measured_again_and_leaves_no_trace(context: Context) -> None:
    complete, history = run(context, Pretender())
    again = Pretender()
    measured, after = resumed(context, again)
    assert len(again.jobs) == 1  # what the machine can do
    assert after == history
    assert measured == complete


def test_what_failed_is_tried_again_beside_the_others(context: Context) -> None:
    def fail(job: RoundJob) -> RoundResult:
        names = [task.variant for task in job.tasks]
        return timed([name for name in names if name != TRAINSTEP], {TRAINSTEP: "no"} if TRAINSTEP in names else {})

    run(context, Pretender(on_round=fail))
    again = Pretender()
    measured, history = resumed(context, again)
    rounds = profiles.effort("quick", "cpu").rounds
    assert again.rounds("mlp-b4") == [[EAGER, DROPIN, TRAINSTEP]] * rounds
    assert measured["mlp-b4", TRAINSTEP]["status"] == "measured"
    assert len(measured["mlp-b4", EAGER]["step_s"]) == 2 * rounds
    assert len(history.runs(COMMIT)) == 2


def test_runs_of_another_profile_or_environment_do_not_count(context: Context) -> None:
    run(replace(context, profile="full"), Pretender())
    again = Pretender(facts={**FACTS, "torch": "3"})
    run(context, again)
    newest = Pretender()
    resumed(context, newest)
    assert len(newest.rounds("mlp-b4")) == profiles.effort("quick", "cpu").rounds


def test_what_was_named_is_measured_and_nothing_else(context: Context) -> None:
    pretender = Pretender()
    selection = profiles.Selection(("lenet-b4",), (EAGER, "compile_fp32"))
    _, history = run(replace(context, selection=selection), pretender)
    rounds = profiles.effort("quick", "cpu").rounds
    assert pretender.rounds("mlp-b4") == []
    assert pretender.rounds("lenet-b4") == [[EAGER, "compile_fp32"]] * rounds
    assert {entry.reason for entry in history.skips(COMMIT) if entry.status == "left out"} == {"not asked for"}
    assert history.runs(COMMIT)[0].cases == ("lenet-b4",)


def test_a_state_of_the_working_tree_is_marked(context: Context) -> None:
    _, history = run(replace(context, snapshot_of="d" * 40), Pretender())
    assert history.runs(COMMIT)[0].snapshot_of == "d" * 40
    assert history.is_snapshot(COMMIT)
    assert history.without_snapshots().commits == ()
    assert history.without_snapshots(but=[COMMIT]).commits == (COMMIT,)


def traces(context: Context) -> list[Path]:
    return sorted(path for path in (context.results / "here" / "traces").rglob("*") if path.is_file())


def test_phases_are_told_apart_on_request_after_everything_else_of_a_case(context: Context) -> None:
    pretender = Pretender()
    run(context, pretender)
    assert pretender.divided() == []
    assert not (context.results / "here" / "traces").exists()

    pretender = Pretender()
    _, history = run(replace(context, phases=True, commit="d" * 40), pretender)
    variants_of_a_case = [EAGER, DROPIN, TRAINSTEP]
    assert pretender.divided() == [(case.name, variant) for case in CASES for variant in variants_of_a_case]
    of_the_first = [job for job in pretender.jobs[1:] if job.case.name == "mlp-b4"]  # type: ignore[attr-defined]
    assert [type(job) for job in of_the_first] == [ProfileJob] * 3 + [RoundJob] * 3 + [PhasesJob] * 3
    entry = history.phases("d" * 40)[0]
    assert (entry.case, entry.variant, entry.clock) == ("mlp-b4", EAGER, "wall")
    assert entry.phases_s == {"forward": (0.1, 0.2), "other": (0.0, 0.1)}
    assert (entry.host_gap_s, entry.failure, entry.trace_missing) == (None, None, None)
    assert entry.trace is not None
    assert entry.trace_shortened == "one step only"
    assert (context.results / "here" / entry.trace).read_bytes() == b"a trace"
    assert len(traces(context)) == 6
    assert context.progress is not None
    begin, *done = [json.loads(line) for line in context.progress.read_text().splitlines() if "d" * 40 in line]
    assert begin["steps"] == [[event["case"], event["part"]] for event in done]


def test_what_failed_before_falls_away_and_takes_no_time(context: Context) -> None:
    """Else the time that is left would count its phases to the end."""

    def crash(job: ProfileJob) -> None:
        if job.task.variant == DROPIN:
            raise ProcessFailed("killed by SIGSEGV", None)

    def fail(job: RoundJob) -> RoundResult:
        names = [task.variant for task in job.tasks]
        failures = {name: "no memory" for name in names if name == TRAINSTEP}
        return timed([name for name in names if name not in failures], failures)

    pretender = Pretender(on_profile=crash, on_round=fail)
    run(replace(context, phases=True), pretender)
    assert pretender.divided() == [(case.name, EAGER) for case in CASES]
    assert context.progress is not None
    begin, *done = [json.loads(line) for line in context.progress.read_text().splitlines()]
    assert sorted(begin["steps"]) == sorted([event["case"], event["part"]] for event in done)
    passed_over = [event for event in done if event["seconds"] is None]
    assert [event["part"] for event in passed_over] == [f"phases of {name}" for name in (DROPIN, TRAINSTEP)] * 2
    assert passed_over[0]["line"].endswith(f"phases of {DROPIN}: not told apart, as it failed")


def test_a_resumed_run_tells_apart_what_was_not(context: Context) -> None:
    def fail(job: PhasesJob) -> None:
        if job.task.variant == DROPIN:
            raise ProcessFailed("TraceError: nothing was seen\nTraceback", None)

    run(context, Pretender())
    failing = Pretender(on_phases=fail)
    measured, history = resumed(replace(context, phases=True), failing)
    assert failing.rounds("mlp-b4") == []
    assert measured["mlp-b4", DROPIN]["status"] == "measured", "its times stand"
    assert [entry.failure for entry in history.phases(COMMIT) if entry.case == "mlp-b4"] == [
        None, "TraceError: nothing was seen\nTraceback", None,
    ]  # fmt: skip

    again = Pretender()
    resumed(replace(context, phases=True), again)
    assert again.divided() == [(case.name, DROPIN) for case in CASES]


def test_a_trace_replaces_that_of_an_earlier_run_and_one_that_is_too_large_is_not_kept(context: Context) -> None:
    run(replace(context, phases=True), Pretender())
    first = traces(context)
    run(replace(context, phases=True), Pretender())
    second = traces(context)
    assert len(first) == len(second) == 6
    assert not set(first) & set(second)

    missing = replace(DIVIDED, trace=KeptTrace(None, None, "a single step takes 9 bytes"))
    _, history = run(replace(context, phases=True), Pretender(on_phases=lambda job: missing))
    newest = history.phases(COMMIT)[-1]
    assert (newest.trace, newest.trace_missing) == (None, "a single step takes 9 bytes")
    assert traces(context) == second


def test_a_trace_is_kept_with_its_record_or_not_at_all(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    append = Store.append

    def full(store: Store, machine: str, commit: str, records: Sequence[Mapping[str, object]]) -> Path:
        if any(record["kind"] == "phases" for record in records):
            raise ResultsError(store.root, "cannot be written (No space left on device)")
        return append(store, machine, commit, records)

    monkeypatch.setattr(Store, "append", full)
    with pytest.raises(ResultsError, match="No space left"):
        Session(replace(context, phases=True), Pretender()).measure()
    assert traces(context) == []


def test_a_trace_that_cannot_be_written_is_an_error_that_names_it(context: Context) -> None:
    (context.results / "here").mkdir(parents=True)
    (context.results / "here" / "traces").write_text("in the way")
    with pytest.raises(ResultsError, match=r"traces.*cannot be written"):
        Session(replace(context, phases=True), Pretender()).measure()
    history = Store(context.results).load("here")
    assert history.damage == ()
    assert history.phases(COMMIT) == ()
    assert len(history.rounds(COMMIT)) == 3, "what was measured before it"
