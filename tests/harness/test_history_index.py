import random
import shutil
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from harness import history_index, parallel, store
from harness.history_index import Key, Value, series_values
from harness.selection import measurement
from harness.stats import paired_ratio
from harness.store import Store
from tests.harness import sample

MACHINE = "machine"
CASE = sample.case_fields("mlp", 64, "cpu")


def write(root: Path, number: int, *, run: str = "r", torch: str = "2.13.0", machine: str = MACHINE) -> str:
    commit = f"{number:040x}"
    simulator = sample.Simulator(random.Random(number))
    started = datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(hours=number)
    facts = {"device": "x", "torch": torch}
    seconds = {"eager_fp32": 1e-3, "kitsune_dropin_fp32": 5e-4, "compile_fp32": 6e-4}
    records = [sample.run_record(run, commit, facts, started=started)]
    records += [sample.round_record(run, index, CASE, simulator.blocks(seconds)) for index in range(3)]
    Store(root).append(machine, commit, records)
    return commit


def values(root: Path, machine: str = MACHINE) -> dict[Key, list[Value]]:
    """Those against eager, the only control on a CPU."""
    return {key: list(held["eager_fp32"]) for key, held in series_values(Store(root).load(machine)).items()}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files whose samples are read, as they are."""
    names: list[str] = []
    original = store._read

    def read(path: Path, commit: str) -> object:
        names.append(path.name)
        return original(path, commit)

    monkeypatch.setattr(store, "_read", read)
    return names


def test_values_are_those_of_the_samples(tmp_path: Path) -> None:
    commits = [write(tmp_path, number) for number in range(1, 4)]
    history = Store(tmp_path).load(MACHINE)

    ((case, variant),) = series_values(history)
    held = series_values(history)[case, variant]
    found = held["eager_fp32"]

    assert list(held) == ["eager_fp32"]
    assert variant == "kitsune_dropin_fp32"
    assert [value.commit for value in found] == commits
    for value in found:
        pairs = measurement(history, value.commit).pairs(case, variant, "eager_fp32")
        assert value.ratio == paired_ratio(pairs)
        assert value.seconds == pytest.approx(5e-4, rel=0.2)


def test_a_second_look_reads_no_samples(tmp_path: Path, reads: list[str]) -> None:
    for number in range(1, 4):
        write(tmp_path, number)
    first = values(tmp_path)
    assert len(set(reads)) == 3
    reads.clear()
    assert values(tmp_path) == first
    assert reads == []


@pytest.mark.usefixtures("no_other_threads")
def test_what_all_processors_read_is_what_one_reads(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 8):
        path = Store(tmp_path).root / MACHINE / f"{write(tmp_path, number)}.samples.jsonl"
        path.write_bytes(path.read_bytes() + b"no JSON\n" * (number % 3))
    first, damage = values(tmp_path), Store(tmp_path).load(MACHINE).damage
    shutil.rmtree(tmp_path / MACHINE / ".index")
    reads.clear()
    monkeypatch.setattr(store, "MANY_BYTES", 0)
    monkeypatch.setattr(parallel, "_processors", lambda: 2)

    assert Store(tmp_path).load(MACHINE).damage == damage
    assert values(tmp_path) == first
    assert reads == []  # by this process
    assert len(damage) == 7


def test_only_what_is_new_or_changed_is_read(tmp_path: Path, reads: list[str]) -> None:
    commits = [write(tmp_path, number) for number in range(1, 5)]
    values(tmp_path)
    reads.clear()
    write(tmp_path, 2, run="again")
    commits.append(write(tmp_path, 9))
    Store(tmp_path / "x").root.mkdir()
    (tmp_path / MACHINE / f"{commits[0]}.samples.jsonl").unlink()

    (found,) = values(tmp_path).values()

    assert [value.commit for value in found] == commits[1:]
    assert found[0].ratio.rounds == 6
    assert {name[:40] for name in reads} == {commits[1], commits[4]}
    shutil.rmtree(tmp_path / MACHINE / ".index")
    assert list(values(tmp_path).values()) == [found]


def test_an_index_made_by_other_code_is_made_again(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    first = values(tmp_path)
    reads.clear()
    monkeypatch.setattr(history_index, "_code", lambda: "other")
    assert values(tmp_path) == first
    assert len(reads) == 1


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x05\x06" + bytes(18)])
def test_a_damaged_index_is_made_again(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, 1)
    first = values(tmp_path)
    (tmp_path / MACHINE / ".index" / "history.npz").write_bytes(content)
    assert values(tmp_path) == first


def test_results_of_machines_and_branches_are_merged_by_copying_files(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for number in (1, 2):
        write(here, number)
    values(here)
    write(there, 3)
    write(there, 4, machine="other")
    shutil.copytree(there, here, dirs_exist_ok=True)

    (found,) = values(here).values()

    assert [value.commit for value in found] == [f"{number:040x}" for number in (1, 2, 3)]
    assert Store(here).machines() == [MACHINE, "other"]
    assert [len(found) for found in values(here, "other").values()] == [1]


def test_a_part_of_a_history_reads_the_index_of_the_whole(tmp_path: Path, reads: list[str]) -> None:
    commits = [write(tmp_path, number) for number in (1, 2, 3)]
    facts = {"device": "x", "torch": "2.13.0"}
    lenet = sample.case_fields("lenet", 64, "cpu")
    seconds = {"eager_fp32": [1e-3, 1e-3], "kitsune_dropin_fp32": [5e-4, 5e-4]}
    run = sample.run_record("s", commits[1], facts, started=datetime(2026, 1, 2, tzinfo=timezone.utc))
    rounds = [sample.round_record("s", 0, case, seconds) for case in (CASE, lenet)]
    Store(tmp_path).append(MACHINE, commits[1], [{**run, "snapshot_of": commits[0]}, *rounds])
    history = Store(tmp_path).load(MACHINE)

    (part,) = series_values(history.of_models(["lenet"])).values()
    assert part["eager_fp32"].commits == [commits[1]]
    reads.clear()
    (committed,) = series_values(history.without_snapshots()).values()
    assert committed["eager_fp32"].commits == [commits[0], commits[2]]
    everything = {case.model: held["eager_fp32"].commits for (case, _), held in series_values(history).items()}
    assert everything == {"mlp": commits, "lenet": [commits[1]]}
    assert reads == []
