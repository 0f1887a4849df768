"""Progress lines and the time that is left."""

from pathlib import Path

import pytest

from harness.progress import ROUND, ProgressFile, Step, Watch

ONE, TWO = "1" * 40, "2" * 40
ALONE, TOGETHER = Step("mlp-b64", "eager_fp32"), Step("mlp-b64", ROUND)
STEPS = [ALONE, TOGETHER, TOGETHER]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "progress"


def watch(file: Path, *commits: str) -> Watch:
    return Watch(file, dict.fromkeys(commits, STEPS), file.with_name("durations.json"))


def test_what_is_left_is_told_by_the_pace_of_the_same_steps(file: Path) -> None:
    watching, writing = watch(file, ONE, TWO), ProgressFile(file)
    assert watching.remaining_s() is None
    writing.begin(ONE, STEPS)
    writing.done(ONE, ALONE, "alone", 4.0)
    assert watching.new_lines() == ["alone"]
    assert watching.remaining_s() is None  # no round has been seen
    writing.done(ONE, TOGETHER, "first", 10.0)
    assert watching.new_lines() == ["first  about 34 s left"]
    assert watching.remaining_s() == 10 + 4 + 2 * 10
    writing.done(ONE, TOGETHER, "second", 20.0)
    assert watching.new_lines() == ["second  about 34 s left"]  # the median of 10 and 20, twice, and 4
    assert watching.new_lines() == []


def test_what_a_commit_says_of_itself_replaces_what_was_expected(file: Path) -> None:
    watching, writing = watch(file, ONE, TWO), ProgressFile(file)
    writing.begin(ONE, [TOGETHER])
    writing.done(ONE, TOGETHER, "only", 5.0)
    writing.begin(TWO, [])
    assert watching.new_lines() == ["only"]
    assert watching.remaining_s() == 0


def test_a_step_never_seen_takes_as_long_as_others_of_its_kind(file: Path) -> None:
    watching, writing = watch(file), ProgressFile(file)
    writing.begin(ONE, [TOGETHER, Step("lenet-b64", ROUND)])
    writing.done(ONE, TOGETHER, "one", 200.0)
    assert watching.new_lines() == ["one  about 3 min left"]


def test_a_step_that_falls_away_is_not_waited_for_and_tells_nothing_of_its_time(file: Path) -> None:
    watching, writing = watch(file), ProgressFile(file)
    writing.begin(ONE, [ALONE, TOGETHER])
    writing.done(ONE, TOGETHER, "timed", 5.0)
    writing.done(ONE, ALONE, "passed over", None)
    assert watching.new_lines() == ["timed", "passed over"]
    assert watching.remaining_s() == 0
    watching.remember()
    again = watch(file, ONE)
    assert again.remaining_s() is None, "how long it takes is still unknown"


def test_half_a_line_is_waited_for(file: Path) -> None:
    watching, writing = watch(file), ProgressFile(file)
    writing.done(ONE, TOGETHER, "one", 1.0)
    whole = file.read_bytes()
    file.write_bytes(whole[:10])
    assert watching.new_lines() == []
    file.write_bytes(whole)
    assert watching.new_lines() == ["one"]


def test_the_next_run_begins_with_the_pace_of_the_last(file: Path) -> None:
    watching, writing = watch(file, ONE), ProgressFile(file)
    for step, seconds in zip(STEPS, (4.0, 3600.0, 7200.0), strict=True):
        writing.done(ONE, step, "x", seconds)
    watching.new_lines()
    watching.remember()
    again = watch(file, ONE)
    assert again.remaining_s() == 4 + 2 * 5400
    ProgressFile(file).done(ONE, ALONE, "x", 4.0)
    assert again.new_lines() == ["x  about 3.0 h left"]


@pytest.mark.parametrize("content", [b"", b"no json", b"{}", b'[["a", "b"], ["a", "b", "c"], 7]', b"\xff"])
def test_a_damaged_memory_is_no_memory(file: Path, content: bytes) -> None:
    file.with_name("durations.json").write_bytes(content)
    assert watch(file, ONE).remaining_s() is None


def test_without_a_file_nothing_is_written() -> None:
    ProgressFile(None).begin(ONE, STEPS)
