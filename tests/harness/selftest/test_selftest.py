"""The self-test, with processes that only pretend to measure, and with one that does."""

import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest
from asv.results import iter_results_paths

from harness import profiles, project
from harness.measure import Probe
from harness.processes import Launcher, ProcessFailed
from harness.profiles import Case, Effort
from harness.selftest import __main__ as selftest
from harness.selftest import judges, outcome
from harness.selftest.arms import ArmsJob, ArmsResult, Delayed, measure_arms
from harness.selftest.judges import ArmSamples
from harness.selftest.outcome import JudgedRow
from harness.stats import Verdict

FACTS = {"device_type": "cpu", "device": "a CPU", "torch": "2"}
CASE = Case("mlp", 4, "cpu", 3)


class Pretender(Launcher):
    """Processes whose arms take what they are told to, with noise between processes and between blocks."""

    def __init__(self, process: float = 0.004, block: float = 0.01) -> None:
        self.process, self.block = process, block
        self.jobs: list[ArmsJob] = []

    def run(self, function: object, job: Any, *, timeout_s: float) -> Any:
        if not isinstance(job, ArmsJob):
            return Probe(FACTS, {"handcaptured_fp32": "needs a GPU"})
        self.jobs.append(job)
        rng = random.Random(job.seed)
        arms = [self.times(1 + share, rng) for share in (0.0, *job.slowdowns)]
        return ArmsResult(arms[0], tuple(arms[1:]))

    def times(self, level: float, rng: random.Random) -> tuple[float, ...]:
        level *= math.exp(rng.gauss(0, self.process))
        return tuple(1e-3 * level * math.exp(rng.gauss(0, self.block)) for _ in range(8))


def silent(what: str, used_s: float, left_s: float) -> None:
    """Progress that nobody reads."""


def plan(**changes: Any) -> selftest.Plan:
    slowdowns = (0.0,) * 6 + (0.01, 0.03, 0.05, 0.10)
    return replace(selftest.Plan((CASE,), ("eager_fp32",), slowdowns, 12, 1e6, 0.03, selftest.effort("cpu")), **changes)


def rows(launcher: Pretender, **changes: Any) -> list[JudgedRow]:
    return [row for group in selftest.measured(plan(**changes), 0, launcher, 0.0, silent) for row in group]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes at each look at the clock."""
    ticks = iter(range(10**9))
    monkeypatch.setattr(selftest.time, "monotonic", lambda: float(next(ticks)))


def test_unchanged_code_is_not_flagged_and_planted_slowdowns_are_found() -> None:
    launcher = Pretender(process=0.001, block=0.003)
    found = {rate.slowdown: rate for rate in outcome.rates(rows(launcher, rows=60)) if rate.judge == outcome.HARNESS}
    assert found[0.0].rows == 60
    assert found[0.0].found == 0
    assert found[0.10].found == found[0.10].rows == 10
    assert found[0.05].found >= 9
    assert found[0.01].found == 0


def test_both_commits_have_as_many_rounds_and_take_turns_in_coming_first() -> None:
    launcher = Pretender()
    rows(launcher, rows=1)
    changed = [any(job.slowdowns) for job in launcher.jobs]
    assert changed == [False, True, True, False, False, True]
    assert len({job.seed for job in launcher.jobs}) == len(launcher.jobs)


def test_it_stops_at_the_rows_that_were_asked_for_or_when_time_is_up() -> None:
    assert len([row for row in rows(Pretender(), rows=7) if row.slowdown == 0]) == 12
    assert rows(Pretender(), seconds=1.0) == []
    some = rows(Pretender(), seconds=200.0, rows=10**6)
    assert some
    assert len(some) % 10 == 0
    assert {row.rounds for row in some} == {3}


@pytest.mark.parametrize("first", [0, 7])
def test_progress_tells_what_is_left(first: int) -> None:
    told: list[tuple[float, float]] = []

    def tell(what: str, used: float, left: float) -> None:
        told.append((used, left))

    groups = list(selftest.measured(plan(seconds=300.0, rows=60), first, Pretender(), 0.0, tell))
    assert len(groups) == 10 - first
    assert told[-1][1] == 0
    assert [used for used, _ in told] == sorted(used for used, _ in told)
    assert all(0 <= left <= 300 - used + 2 for used, left in told)


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: Pretender, *arguments: str) -> int:
    monkeypatch.setattr(selftest, "Launcher", lambda: launcher)
    monkeypatch.setenv("HARNESS_MACHINE", "here")
    return selftest.main(["--results", str(tmp_path), "--seconds", "100000", *arguments])


def test_the_result_is_a_file_beside_the_machine_s_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(tmp_path, monkeypatch, Pretender(), "--rows", "20", "--arms", "10", "--planted", "1", "--models", "mlp-b16")
        == 0
    )

    (path,) = (tmp_path / "here" / "selftest").iterdir()
    content = json.loads(path.read_text())
    assert content["facts"] == FACTS
    assert content["effort"]["rounds"] == profiles.effort(profiles.DEFAULT, "cpu").rounds == 3
    assert {row["case"] for row in content["rows"]} == {"mlp-b16"}
    assert str(path) in capsys.readouterr().out
    found, problems = outcome.load(tmp_path / "here", FACTS, 0.03)
    assert len(found) == len(content["rows"]) == 28
    assert problems == []
    told = outcome.sentence(found, 0.03, 3)
    assert told is not None
    assert "of 20 rows falsely flagged" in told
    assert re.search(r"10% \(measured: (9|10)\.\d%\): 100% of 2", told)
    assert "in 3 rounds of each commit of mlp-b16 eager_fp32:" in told
    assert outcome.load(tmp_path / "here", FACTS | {"torch": "3"}, 0.03)[0] == ()
    assert outcome.load(tmp_path / "here", FACTS, 0.05)[0] == ()


def test_of_other_numbers_of_rounds_nothing_is_told_but_how_to_measure_it() -> None:
    measured = rows(Pretender())
    for rounds in (2, 8):
        told = outcome.sentence(measured, 0.03, rounds)
        assert told is not None
        assert f"for verdicts that rest on 3 rounds of each commit, not for {rounds}" in told
        assert "falsely flagged" not in told
    assert outcome.sentence([row for row in measured if row.slowdown], 0.03, 2) is None


def test_the_slowdown_that_was_measured_stands_beside_the_planted_one() -> None:
    unchanged, planted = outcome.rates([row for row in rows(Pretender()) if row.slowdown in (0.0, 0.10)])[:2]
    assert abs(unchanged.measured) < 0.01
    assert planted.measured == pytest.approx(0.10, abs=0.02)


def test_asv_reads_none_of_it_as_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, monkeypatch, Pretender(), "--rows", "1", "--arms", "1")
    (tmp_path / "here" / "machine.json").write_text('{"machine": "here", "version": 1}')
    assert any((tmp_path / "here" / "selftest").iterdir())
    assert list(iter_results_paths(str(tmp_path))) == []
    assert caplog.records == []


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "selftest").mkdir()
    (tmp_path / "selftest" / "x.selftest").write_text("{}")
    found, (problem,) = outcome.load(tmp_path, FACTS, 0.03)
    assert found == ()
    assert "x.selftest" in problem
    assert outcome.sentence(found, 0.03, 3) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content["rows"][1].update(slowdown="x"), "row 2 tells no slowdown"),
        (lambda content: content["rows"][1].update(ratio=None, rounds=[3]), "row 2 tells no ratio, rounds"),
        (lambda content: content["rows"][1].update(ratio=float("nan")), "row 2 tells no ratio"),
        (lambda content: content["rows"][1]["verdicts"].update(another="same"), "row 2 tells no verdicts"),
        (lambda content: content["rows"][1]["verdicts"].update(harness="maybe"), "row 2 tells no verdicts"),
        (lambda content: content["rows"][0].update(verdicts=None), "row 1 tells no verdicts"),
        (lambda content: content.update(facts=None), "it tells nothing of the machine"),
        (lambda content: content.update(seconds="long"), "or of the time that it took"),
        (lambda content: content.update(rows=3), "not iterable"),
        (lambda content: content["rows"].append(3), "must be a mapping"),
    ],
)
def test_damaged_files_are_named_and_others_read(
    change: Callable[[Any], None], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, monkeypatch, Pretender(), "--rows", "1", "--arms", "2", "--planted", "1")
    (path,) = (tmp_path / "here" / "selftest").iterdir()
    whole, _ = outcome.load(tmp_path / "here", FACTS, 0.03)
    content = json.loads(path.read_text())
    change(content)
    (path.parent / "damaged.selftest").write_text(json.dumps(content))
    found, (problem,) = outcome.load(tmp_path / "here", FACTS, 0.03)
    assert found == whole != ()
    assert "damaged.selftest: no self-test that can be read" in problem
    assert words in problem


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--models", "nothing-b1"], "is no case of this device"),
        (["--variants", "nothing"], "is no variant"),
        (["--variants", "handcaptured_fp32"], "needs a GPU"),
        (["--seconds", "0.5"], "give more with --seconds"),
    ],
)
def test_what_cannot_be_measured_is_told(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(tmp_path, monkeypatch, Pretender(), *arguments) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


class Broken(Pretender):
    """Processes of which the one after so many does not come to its end."""

    def __init__(self, processes: int, error: BaseException) -> None:
        super().__init__()
        self.processes, self.error = processes, error

    def run(self, function: object, job: Any, *, timeout_s: float) -> Any:
        if len(self.jobs) == self.processes:
            raise self.error
        return super().run(function, job, timeout_s=timeout_s)


BREAKS = [(KeyboardInterrupt(), 130), (ProcessFailed("it died", None), 2)]
TWO_CASES = ("--models", "mlp-b16", "mlp-b64", "--arms", "4", "--planted", "1", "--rows", "20")
"""Five groups, each of 6 processes and of 8 rows."""


@pytest.mark.parametrize(("error", "code"), BREAKS)
def test_what_is_broken_off_in_the_first_group_leaves_nothing(
    error: BaseException,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(tmp_path, monkeypatch, Broken(5, error), *TWO_CASES) == code
    assert list(tmp_path.iterdir()) == []
    told = capsys.readouterr().err
    assert "rows are kept" not in told
    assert ("nothing is kept" in told) == (code == 130)


@pytest.mark.parametrize(("error", "code"), BREAKS)
def test_what_is_resumed_is_what_would_have_been_measured_at_once(
    error: BaseException,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    at_once = Pretender()
    assert run(tmp_path / "at once", monkeypatch, at_once, *TWO_CASES) == 0
    (whole,) = read(tmp_path / "at once")

    broken, resumed = Broken(6 * 3 + 2, error), Pretender()
    assert run(tmp_path / "parts", monkeypatch, broken, *TWO_CASES) == code
    (path,) = (tmp_path / "parts" / "here" / "selftest").iterdir()
    assert f"24 rows are kept in {path}; the same command with --resume" in capsys.readouterr().err
    (part,) = read(tmp_path / "parts")
    assert part["rows"] == whole["rows"][:24]

    monkeypatch.setattr(selftest, "datetime", Later)
    assert run(tmp_path / "parts", monkeypatch, resumed, *TWO_CASES, "--resume") == 0
    assert list(path.parent.iterdir()) == [path]
    (both,) = read(tmp_path / "parts")
    assert broken.jobs[:18] + resumed.jobs == at_once.jobs
    assert both["rows"] == whole["rows"]
    assert both["rates"] == whole["rates"]
    assert {row["case"] for row in both["rows"][:8] + both["rows"][16:24]} == {"mlp-b16"}
    assert both["started"] == part["started"]
    assert both["seconds"] > part["seconds"] > 0
    assert both.keys() == part.keys() == whole.keys()


class Later(datetime):
    """A clock that is a year fast."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> "Later":
        return super().now(tz) + timedelta(days=365)


def read(results: Path) -> list[Any]:
    return [json.loads(path.read_text()) for path in sorted((results / "here" / "selftest").iterdir())]


def test_seconds_of_all_parts_are_summed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: list[float] = []
    for number in range(1, 4):
        more = ["--resume"] if seconds else []
        run(tmp_path, monkeypatch, Pretender(), "--arms", "4", "--rows", str(4 * number), *more)
        (content,) = read(tmp_path)
        seconds.append(content["seconds"])
    assert seconds == [seconds[0], 2 * seconds[0], 3 * seconds[0]]


def test_the_newest_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, monkeypatch, Pretender(), "--arms", "4", "--rows", "4")
    monkeypatch.setattr(selftest, "datetime", Later)
    run(tmp_path, monkeypatch, Pretender(), "--arms", "4", "--rows", "4")
    run(tmp_path, monkeypatch, Pretender(), "--arms", "4", "--rows", "8", "--resume")
    assert [content["rates"][0]["rows"] for content in read(tmp_path)] == [4, 8]


@pytest.mark.parametrize("rows", ["20", "17", "1"])
def test_where_there_are_enough_rows_nothing_is_measured(
    rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, monkeypatch, Pretender(), *TWO_CASES)
    (before,) = read(tmp_path)
    *_, table = capsys.readouterr().out.partition("judge ")
    launcher = Pretender()
    assert run(tmp_path, monkeypatch, launcher, *TWO_CASES, "--rows", rows, "--resume") == 0
    assert launcher.jobs == []
    assert read(tmp_path) == [before]
    told = capsys.readouterr().out
    assert f"There are {rows} rows of unchanged code, or more, already" in told
    assert told.endswith(table)


@pytest.mark.parametrize("code", [130, 2])
def test_a_part_without_a_finished_group_changes_nothing(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, monkeypatch, Broken(6, KeyboardInterrupt()), *TWO_CASES)
    before = read(tmp_path)
    capsys.readouterr()
    launcher = Broken(1, KeyboardInterrupt()) if code == 130 else Pretender()
    limit = [] if code == 130 else ["--seconds", "0.5"]
    assert run(tmp_path, monkeypatch, launcher, *TWO_CASES, *limit, "--resume") == code
    assert read(tmp_path) == before
    told = capsys.readouterr().err
    assert "8 rows are kept in" in told
    assert ("give more with --seconds" in told) == (code == 2)


@pytest.mark.parametrize(
    ("arguments", "differs"),
    [
        ([], None),
        (["--margin", "0.05"], "margin"),
        (["--rounds", "5"], "effort"),
        (["--models", "mlp-b64", "mlp-b16"], "cases"),
        (["--variants", "eager_amp"], "variants"),
        (["--arms", "5"], "slowdowns"),
        (["--planted", "2"], "slowdowns"),
    ],
)
def test_what_was_measured_in_another_way_is_not_resumed(
    arguments: list[str],
    differs: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(tmp_path, monkeypatch, Pretender(), *TWO_CASES)
    before, launcher = read(tmp_path), Pretender()
    code = run(tmp_path, monkeypatch, launcher, *TWO_CASES, "--rows", "24", *arguments, "--resume")
    if differs is None:
        assert code == 0
        assert len(launcher.jobs) == 6
        return
    assert code == 2
    assert launcher.jobs == []
    assert read(tmp_path) == before
    told = capsys.readouterr().err
    assert f"has another or does not tell: {differs};" in told
    assert "leave out --resume to begin one" in told


@pytest.mark.parametrize(("name", "value"), [("commit", "1" * 40), ("commit", None), ("facts", FACTS | {"torch": "3"})])
def test_another_commit_or_environment_is_not_resumed(
    name: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, monkeypatch, Pretender(), *TWO_CASES)
    change_file(tmp_path, name, value)
    if value is None:
        monkeypatch.setattr(selftest, "_commit", lambda: None)
    assert run(tmp_path, monkeypatch, Pretender(), *TWO_CASES, "--rows", "24", "--resume") == 2
    assert f"does not tell: {'torch' if name == 'facts' else 'commit'};" in capsys.readouterr().err


def change_file(results: Path, name: str, value: object) -> None:
    (path,) = (results / "here" / "selftest").iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))


def test_files_that_do_not_tell_how_they_were_measured_are_loaded_but_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, monkeypatch, Pretender(), *TWO_CASES)
    (path,) = (tmp_path / "here" / "selftest").iterdir()
    (content,) = read(tmp_path)
    earlier = {name: content[name] for name in content if name not in ("cases", "variants", "slowdowns")}
    path.write_text(json.dumps(earlier))
    assert len(outcome.load(tmp_path / "here", FACTS, 0.03)[0]) == 40
    assert run(tmp_path, monkeypatch, Pretender(), *TWO_CASES, "--resume") == 2
    assert "does not tell: cases, variants, slowdowns;" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(project.here().results.glob("*/selftest/*")), ids=lambda path: path.stem)
def test_the_results_of_this_project_are_loaded(path: Path) -> None:
    content = json.loads(path.read_text())
    found, problems = outcome.load(path.parent.parent, content["facts"], content["margin"])
    assert problems == []
    assert len(found) >= len(content["rows"]) > 0


@pytest.mark.parametrize("content", [None, "{}"])
def test_where_there_is_nothing_to_resume_it_is_said(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "here" / "selftest"
    if content is not None:
        folder.mkdir(parents=True)
        (folder / "x.selftest").write_text(content)
    assert run(tmp_path, monkeypatch, Pretender(), "--resume") == 2
    told = capsys.readouterr().err
    assert f"no self-test in {folder} was measured in this way; leave out --resume to begin one" in told
    assert ("x.selftest: no self-test that can be read" in told) == (content is not None)


def samples(ratio: float, noise: float = 0.01) -> ArmSamples:
    rng = random.Random(0)

    def rounds(level: float) -> list[list[tuple[float, float]]]:
        return [[(level * math.exp(rng.gauss(0, noise)), 1.0) for _ in range(8)] for _ in range(5)]

    return ArmSamples(rounds(1.0), rounds(ratio))


@pytest.mark.parametrize(
    ("ratio", "asv", "asv_at_margin", "mann_whitney"),
    [
        (1.0, Verdict.SAME, Verdict.SAME, Verdict.SAME),
        (1.05, Verdict.SAME, Verdict.SLOWER, Verdict.SLOWER),
        (1.3, Verdict.SLOWER, Verdict.SLOWER, Verdict.SLOWER),
        (0.7, Verdict.FASTER, Verdict.FASTER, Verdict.FASTER),
    ],
)
def test_the_other_judges(ratio: float, asv: Verdict, asv_at_margin: Verdict, mann_whitney: Verdict) -> None:
    verdicts = [judge(samples(ratio)) for judge in judges.rivals(0.03).values()]
    assert verdicts == [asv, asv_at_margin, mann_whitney]


def test_rows_are_judged_as_a_comparison_judges_them() -> None:
    clear, unclear = judges.harness_verdicts([samples(1.5), samples(1.03)], 0.03)
    assert (clear.verdict, unclear.verdict) == (Verdict.SLOWER, Verdict.INCONCLUSIVE)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_row_has_the_rounds_and_turns_that_users_get(device: profiles.DeviceType) -> None:
    ours, theirs = selftest.effort(device), profiles.effort(profiles.DEFAULT, device)
    assert (ours.rounds, ours.turns, ours.narrow_within) == (theirs.rounds, theirs.turns, theirs.narrow_within)
    assert ours.block_seconds < theirs.block_seconds


def test_other_numbers_of_rounds_can_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Pretender()
    assert run(tmp_path, monkeypatch, launcher, "--rows", "1", "--rounds", "5") == 0
    assert len(launcher.jobs) == 10
    (path,) = (tmp_path / "here" / "selftest").iterdir()
    assert {row["rounds"] for row in json.loads(path.read_text())["rows"]} == {5}


@pytest.mark.parametrize("rounds", ["1", "0", "x"])
def test_one_round_decides_nothing(rounds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        selftest.main(["--rounds", rounds])
    assert "--rounds" in capsys.readouterr().err


class Steps:
    def __init__(self) -> None:
        self.steps = 0

    def run(self, steps: int) -> int:
        self.steps += steps
        return self.steps


def test_a_delay_is_added_to_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("harness.selftest.arms.busy_wait", waits.append)
    arm = Delayed(Steps(), None)  # type: ignore[arg-type]
    arm.delay_s = 0.25
    assert arm.run(3) == 3  # type: ignore[comparison-overlap]
    assert waits == [0.25] * 3


def test_a_step_without_a_delay_has_its_kernel_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    cycles: list[int] = []
    monkeypatch.setattr("torch.cuda._sleep", cycles.append)
    arm = Delayed(Steps(), 1e6)  # type: ignore[arg-type]
    arm.run(2)
    arm.delay_s = 1e-3
    arm.run(1)
    assert cycles == [0, 0, 1000]


def test_arms_are_measured_in_a_process() -> None:
    effort = Effort(1, (2, 3), 0.05, 0.002, 0.02, 30.0, 120.0)
    job = ArmsJob(CASE, "eager_fp32", (0.0, 1.0), effort, "seed")
    result = Launcher().run(measure_arms, job, timeout_s=120)
    assert len(result.arms) == 2
    assert {len(times) for times in (result.control, *result.arms)} <= {2, 3}
    assert all(seconds > 0 for times in (result.control, *result.arms) for seconds in times)
