import ast
import codecs
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from asv.results import iter_results_paths

from harness import records
from harness.continuation import Continuation
from harness.replay_plans import ReplayPlan
from harness.store import ResultsError, Store, reader_modules
from harness.whole_files import write_whole
from tests.harness import sample

MACHINE = "machine"
COMMIT = "a" * 40
OTHER = "b" * 40
CASE = sample.case_fields("mlp", 64, "cpu")


def run(name: str = "r", commit: str = COMMIT, day: int = 1) -> dict[str, object]:
    started = sample.datetime(2026, 1, day, tzinfo=sample.timezone.utc)
    return sample.run_record(name, commit, {"device": "x"}, started=started)


def round_(index: int, name: str = "r") -> dict[str, object]:
    return sample.round_record(name, index, CASE, {"eager_fp32": [1e-3, 2e-3], "kitsune_trainstep_fp32": [5e-4, 1e-3]})


def path_of(root: Path, commit: str = COMMIT) -> Path:
    return root / MACHINE / f"{commit}.samples.jsonl"


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    store = Store(tmp_path)
    skip = sample.skip_record("r", CASE, "compile_fp32", "no compiler")
    path = store.append(MACHINE, COMMIT, [run(), round_(0), round_(1), skip])

    history = store.load(MACHINE)

    assert path == path_of(tmp_path)
    assert store.machines() == [MACHINE]
    assert history.commits == (COMMIT,)
    assert history.damage == ()
    assert [entry.round for entry in history.rounds(COMMIT)] == [0, 1]
    assert history.rounds(COMMIT)[0].blocks["eager_fp32"].wall_s == (1e-3, 2e-3)
    assert history.skips(COMMIT)[0].reason == "no compiler"
    assert history.runs(OTHER) == history.rounds(OTHER) == history.profiles(OTHER) == history.skips(OTHER) == ()


def test_asv_finds_nothing_to_complain_of_in_an_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path)
    store.append(MACHINE, COMMIT, [run(), round_(0)])
    store.load(MACHINE)
    assert any((tmp_path / MACHINE / ".index").iterdir())
    assert list(iter_results_paths(str(tmp_path))) == []
    assert caplog.records == []


def test_the_results_in_this_repository_are_asv_s_own(caplog: pytest.LogCaptureFixture) -> None:
    root = Path(__file__).parents[2] / "results"
    assert [Path(folder).parent for folder, _, _ in iter_results_paths(str(root))][:1] == [root]
    assert caplog.records == []


def test_appending_keeps_earlier_lines_byte_for_byte(tmp_path: Path) -> None:
    path_of(tmp_path).parent.mkdir()
    earlier = b'{"schema": 1,   "kind":"future"}\n\xff\xfe torn li'
    path_of(tmp_path).write_bytes(earlier)

    Store(tmp_path).append(MACHINE, COMMIT, [run()])

    assert path_of(tmp_path).read_bytes().startswith(earlier + b"\n")
    assert len(Store(tmp_path).load(MACHINE).runs(COMMIT)) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"blocks": {"a": {"wall_s": [float("nan")], "device_s": None}}}, "JSON compliant"),
        ({"blocks": {"a": {"wall_s": [0.0], "device_s": None}}}, "cannot be the seconds"),
        ({"round": "first"}, "round: expected a whole number"),
        ({"steps_per_block": 0}, "steps_per_block: expected a whole number"),
        ({"steps_per_block": {"eager_fp32": 3}}, "steps_per_block: kitsune_trainstep_fp32: expected a whole number"),
        ({"schema": 3}, "reads schemas 1 to 2"),
        ({"kind": "rond"}, "kind is 'rond'"),
    ],
)
def test_what_could_not_be_read_again_is_not_written(tmp_path: Path, change: dict[str, object], words: str) -> None:
    store = Store(tmp_path)
    store.append(MACHINE, COMMIT, [run()])
    before = path_of(tmp_path).read_bytes()

    with pytest.raises(ResultsError, match=words) as caught:
        store.append(MACHINE, COMMIT, [round_(0), round_(1) | change])

    assert caught.value.path == path_of(tmp_path)
    assert path_of(tmp_path).read_bytes() == before


def test_a_run_of_another_commit_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="of commit 'bbbb"):
        Store(tmp_path).append(MACHINE, COMMIT, [run(commit=OTHER)])


@pytest.mark.parametrize("machine", ["", ".", "..", ".hidden", "a/b", "../up"])
def test_a_machine_is_one_plain_folder(tmp_path: Path, machine: str) -> None:
    with pytest.raises(ResultsError, match="plain name"):
        Store(tmp_path).append(machine, COMMIT, [run()])


@pytest.mark.parametrize("commit", ["", "abc", "A" * 40, "a" * 39])
def test_a_commit_is_a_full_hash(tmp_path: Path, commit: str) -> None:
    with pytest.raises(ResultsError, match="full lower-case commit hash"):
        Store(tmp_path).append(MACHINE, commit, [run()])


def test_a_loss_that_is_not_finite_is_kept_as_none(tmp_path: Path) -> None:
    profile = sample.profile_record("r", CASE, "eager_fp32", sample.random.Random(0))
    profile["losses"] = [[0, 2.3], [10, float("nan")], (20, float("inf"))]

    Store(tmp_path).append(MACHINE, COMMIT, [run(), profile])

    assert Store(tmp_path).load(MACHINE).profiles(COMMIT)[0].losses == ((0, 2.3), (10, None), (20, None))


@pytest.mark.parametrize("field", ["setup_s", "setup_again_s", "first_replay_s", "first_replay_again_s"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.001, "1.0", True, []])
def test_a_profile_of_impossible_seconds_is_refused(field: str, value: object) -> None:
    profile = sample.profile_record("r", CASE, "kitsune_dropin_fp32", sample.random.Random(0)) | {"schema": 2}
    with pytest.raises(records.RecordError, match=rf"^{field}\b"):
        records.parse_record(profile | {field: value})


CONTINUATION = {"losses": [2.0, None], "eager": [2.0, 1.0], "eager_again": [2.0, 1.0], "num_replays": 2}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"losses": [2.0]}, "continuation: losses of 1 and 2 and 2 steps"),
        ({"losses": [], "eager": [], "eager_again": []}, "continuation: losses of 0 and 0 and 0 steps"),
        ({"eager": 7}, r"continuation\.eager: expected a list of losses, got 7"),
        ({"eager": [2.0, "1"]}, r"continuation\.eager: expected a number, got '1'"),
        ({"num_replays": -1}, "num_replays: expected a whole number from 0, got -1"),
    ],
)
def test_a_profile_of_a_damaged_continuation_is_refused(change: dict[str, object], words: str) -> None:
    profile = sample.profile_record("r", CASE, "kitsune_dropin_fp32", sample.random.Random(0)) | {"schema": 2}
    found = records.parse_record(profile | {"continuation": CONTINUATION})
    assert isinstance(found, records.Profile)
    assert found.continuation == Continuation((2.0, None), (2.0, 1.0), (2.0, 1.0), 2)
    with pytest.raises(records.RecordError, match=words):
        records.parse_record(profile | {"continuation": {**CONTINUATION, **change}})


@pytest.mark.parametrize("cases", ["mlp-b64", [1], {"mlp-b64": 1}])
def test_cases_that_a_run_was_asked_for_are_names(cases: object) -> None:
    with pytest.raises(records.RecordError, match=r"^cases\b"):
        records.parse_record(run() | {"schema": 2, "cases": cases})
    earlier = records.parse_record(run() | {"schema": 2})
    assert isinstance(earlier, records.Run)
    assert earlier.cases is None


def test_profiles_of_earlier_versions_have_no_first_replay() -> None:
    profile = sample.profile_record("r", CASE, "kitsune_dropin_fp32", sample.random.Random(0)) | {"schema": 2}
    names = ("first_replay_s", "first_replay_again_s")
    earlier = records.parse_record({name: value for name, value in profile.items() if name not in names})
    assert isinstance(earlier, records.Profile)
    assert (earlier.first_replay_s, earlier.first_replay_again_s) == (None, None)
    assert earlier == records.parse_record(profile | dict.fromkeys(names))


def test_damage_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(MACHINE, COMMIT, [run(), round_(0), round_(1)])
    good = path_of(tmp_path).read_bytes()
    first_round = good.splitlines()[1]
    bad_lines = [
        b"\x00\xff\xfe garbage",
        first_round[: len(first_round) // 2],
        first_round.replace(b'"schema":2', b'"schema":7').replace(b'"round":0', b'"round":5'),
        first_round.replace(b"0.001", b"NaN", 1).replace(b'"round":0', b'"round":6'),
        first_round.replace(b"0.001", b"1e999", 1).replace(b'"round":0', b'"round":7'),
        first_round.replace(b"0.001", b"-0.001", 1).replace(b'"round":0', b'"round":8'),
        first_round.replace(b'"run":"r"', b'"run":"unknown"'),
        first_round,
        b"[" * 100_000,
        b"42",
    ]
    path_of(tmp_path).write_bytes(good + b"\n".join(bad_lines))

    history = store.load(MACHINE)

    assert [entry.round for entry in history.rounds(COMMIT)] == [0, 1]
    assert [(entry.path, entry.line) for entry in sorted(history.damage, key=lambda entry: entry.line or 0)] == [
        (path_of(tmp_path), 4 + index) for index in range(len(bad_lines))
    ]
    told = "\n".join(entry.problem for entry in history.damage)
    for words in (
        "not valid JSON",
        "schema is 7",
        "NaN",
        "inf",
        "cannot be the seconds",
        "'unknown'",
        "repeats line 2",
    ):
        assert words in told


def test_every_truncation_of_a_file_keeps_the_whole_lines(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(MACHINE, COMMIT, [run(), round_(0), round_(1)])
    content = path_of(tmp_path).read_bytes()
    ends = [index for index, byte in enumerate(content) if byte == ord("\n")]
    for length in range(ends[0], len(content), 7):
        path_of(tmp_path).write_bytes(content[:length])
        assert len(store.load(MACHINE).rounds(COMMIT)) == sum(end <= length for end in ends[1:])


def test_unusable_files_are_damage(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(MACHINE, COMMIT, [run()])
    folder = path_of(tmp_path).parent
    (folder / "notahash.samples.jsonl").write_text("{}\n")
    (folder / f"{OTHER}.samples.jsonl").mkdir()
    os.mkfifo(folder / f"{'f' * 40}.samples.jsonl")
    (folder / f"{COMMIT[:8]}-env.json").write_text("no JSON of asv's")

    history = store.load(MACHINE)

    assert history.commits == (COMMIT,)
    asv_s = {f"{COMMIT[:8]}-env.json", "benchmarks.json", "machine.json"}
    assert {entry.path.name for entry in history.damage} == {
        "notahash.samples.jsonl", f"{OTHER}.samples.jsonl", f"{'f' * 40}.samples.jsonl", *asv_s
    }  # fmt: skip
    assert all(entry.line is None for entry in history.damage)


def test_what_editors_put_before_a_file_is_no_damage(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = store.append(MACHINE, COMMIT, [run()])
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    history = store.load(MACHINE)
    assert history.commits == (COMMIT,)
    assert path not in {entry.path for entry in history.damage}


def test_an_unknown_machine_is_an_error_that_names_the_known(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="none yet"):
        Store(tmp_path / "absent").load(MACHINE)
    Store(tmp_path).append(MACHINE, COMMIT, [run()])
    with pytest.raises(ResultsError, match=f"machines with results: {MACHINE}"):
        Store(tmp_path).load("other")


def test_only_the_commits_asked_for_are_read(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(MACHINE, COMMIT, [run()])
    store.append(MACHINE, OTHER, [run(commit=OTHER)])

    assert store.load(MACHINE, [OTHER]).commits == (OTHER,)


def test_commits_unknown_to_git_are_ordered_by_their_first_run(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(MACHINE, COMMIT, [run(day=5), run("r2", day=9)])
    store.append(MACHINE, OTHER, [run(commit=OTHER, day=7)])

    history = store.load(MACHINE)

    assert history.commits == (COMMIT, OTHER)
    assert [entry.run for entry in history.runs(COMMIT)] == ["r", "r2"]


def test_commits_known_to_git_are_ordered_by_its_history(tmp_path: Path) -> None:
    older, newer = commits_of_a_repository(tmp_path)
    store = Store(tmp_path / "results")
    store.append(MACHINE, newer, [run(commit=newer, day=1)])
    store.append(MACHINE, older, [run(commit=older, day=9)])
    store.append(MACHINE, OTHER, [run(commit=OTHER, day=20)])

    assert store.load(MACHINE).commits == (OTHER, older, newer)


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_rounds, args=(tmp_path, writer)) for writer in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)

    history = Store(tmp_path).load(MACHINE)

    assert [writer.exitcode for writer in writers] == [0] * 4
    assert history.damage == ()
    assert len(history.runs(COMMIT)) == 4
    assert len(history.rounds(COMMIT)) == 4 * 15
    assert sorted(path.name for path in path_of(tmp_path).parent.glob("[!.]*")) == [path_of(tmp_path).name]


def write_rounds(root: Path, writer: int) -> None:
    store = Store(root)
    store.append(MACHINE, COMMIT, [run(f"r{writer}")])
    for index in range(15):
        store.append(MACHINE, COMMIT, [round_(index, f"r{writer}")])


def test_a_killed_writer_loses_nothing_and_blocks_nobody(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; import sys, itertools\n"
        "from harness.store import Store\n"
        "from tests.harness import test_store as t\n"
        "store = Store(Path(sys.argv[1])); store.append(t.MACHINE, t.COMMIT, [t.run()])\n"
        "print('ready', flush=True)\n"
        "for k in itertools.count(): store.append(t.MACHINE, t.COMMIT, [t.round_(k)]); print(k, flush=True)\n"
    )
    for delay in (0.0, 0.013, 0.029, 0.05):
        root = tmp_path / str(delay)
        victim = subprocess.Popen([sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE, text=True)
        assert victim.stdout is not None
        assert victim.stdout.readline() == "ready\n"
        time.sleep(delay)
        os.kill(victim.pid, signal.SIGKILL)
        told = [int(line) for line in victim.communicate()[0].splitlines()]

        Store(root).append(MACHINE, COMMIT, [round_(10_000)])

        history = Store(root).load(MACHINE)
        found = [entry.round for entry in history.rounds(COMMIT)]
        assert history.damage == ()
        assert found[-1] == 10_000
        assert found[:-1] == list(range(len(found) - 1))
        assert len(found) - 1 >= len(told)
        assert [path.name for path in path_of(root).parent.glob("[!.]*")] == [path_of(root).name]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.append(MACHINE, COMMIT, [run()])
    before = path_of(tmp_path).read_bytes()

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(ResultsError, match=r"No space left on device.*earlier results are untouched"):
        store.append(MACHINE, COMMIT, [round_(0)])

    assert path_of(tmp_path).read_bytes() == before
    assert [path.name for path in path_of(tmp_path).parent.iterdir()] == [path_of(tmp_path).name]


def test_write_whole_replaces_a_file(tmp_path: Path) -> None:
    write_whole(tmp_path / "page.html", b"old")
    write_whole(tmp_path / "page.html", b"new")

    assert (tmp_path / "page.html").read_bytes() == b"new"
    assert len(list(tmp_path.iterdir())) == 1


def test_lines_are_plain_json_with_a_schema(tmp_path: Path) -> None:
    path = Store(tmp_path).append(MACHINE, COMMIT, [run(), round_(0)])

    assert [json.loads(line)["schema"] for line in path.read_text().splitlines()] == [2, 2]


def commits_of_a_repository(folder: Path) -> list[str]:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init", "--quiet")
    commits = []
    for subject in ("First", "Second"):
        git("commit", "--quiet", "--allow-empty", "--message", subject)
        commits.append(git("rev-parse", "HEAD"))
    return commits


def test_throttled_turns_are_left_out_unless_there_are_no_others(tmp_path: Path) -> None:
    store = Store(tmp_path)
    some, all_ = round_(0) | {"throttled": [1]}, round_(1) | {"throttled": [0, 1]}
    store.append(MACHINE, COMMIT, [run(), some, all_])
    first, second = store.load(MACHINE).rounds(COMMIT)
    assert (first.throttled, first.blocks["eager_fp32"].seconds) == (1, (1e-3,))
    assert (second.throttled, second.blocks["eager_fp32"].seconds) == (2, (1e-3, 2e-3))
    for unusable in ([2], [-1], ["x"], 1):
        with pytest.raises(ResultsError, match="throttled"):
            store.append(MACHINE, COMMIT, [round_(2) | {"throttled": unusable}])


def test_a_round_has_the_plans_that_it_records(tmp_path: Path) -> None:
    store = Store(tmp_path)
    plans = {"kitsune_trainstep_fp32": sample.plan_fields("list", 2)}
    store.append(MACHINE, COMMIT, [run(), round_(0), round_(1) | {"plans": {}}, round_(2) | {"plans": plans}])
    found = [entry.plans for entry in store.load(MACHINE).rounds(COMMIT)]
    assert found == [{}, {}, {"kitsune_trainstep_fp32": ReplayPlan("list", 2, fused=True)}]


def test_a_round_has_the_modes_that_it_records(tmp_path: Path) -> None:
    store = Store(tmp_path)
    modes = {"kitsune_trainstep_fp32": "eager"}
    store.append(MACHINE, COMMIT, [run(), round_(0), round_(1) | {"modes": modes}])
    assert [entry.modes for entry in store.load(MACHINE).rounds(COMMIT)] == [{}, modes]


@pytest.mark.parametrize(
    ("modes", "words"),
    [
        ([], r"modes: expected an object, got \[\]"),
        ({"eager_amp": "eager"}, "modes: there are no blocks of 'eager_amp'"),
        ({"kitsune_trainstep_fp32": 1}, "kitsune_trainstep_fp32"),
    ],
)
def test_a_round_of_damaged_modes_is_refused(tmp_path: Path, modes: object, words: str) -> None:
    with pytest.raises(ResultsError, match=words):
        Store(tmp_path).append(MACHINE, COMMIT, [run(), round_(0) | {"modes": modes}])


@pytest.mark.parametrize(
    ("plans", "words"),
    [
        ([], r"plans: expected an object, got \[\]"),
        ({"eager_amp": sample.plan_fields("list", 2)}, "plans: there are no blocks of 'eager_amp'"),
        ({"kitsune_trainstep_fp32": None}, r"plans\['kitsune_trainstep_fp32'\] is not an object"),
        ({"kitsune_trainstep_fp32": sample.plan_fields("list", 0)}, "fp32'\\]: 0 is not a number of streams"),
    ],
)
def test_a_round_of_damaged_plans_is_refused(tmp_path: Path, plans: object, words: str) -> None:
    with pytest.raises(ResultsError, match=words):
        Store(tmp_path).append(MACHINE, COMMIT, [run(), round_(0) | {"plans": plans}])


def test_an_index_is_made_again_when_what_decides_on_records_changes() -> None:
    """The modules that records are checked with are part of its digest."""
    tree = ast.parse(Path(str(records.__file__)).read_text(encoding="utf-8"))
    used = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules = {module.__name__ for module in reader_modules()}
    assert {"harness.records", "harness.store"} | {
        name for name in used if name and name.startswith("harness")
    } <= modules
