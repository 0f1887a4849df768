"""The attempts are plans of the whole step; what they are worth is measured on a GPU."""

from __future__ import annotations

import pytest

from kitsune.plan import task_graph
from kitsune.schedule import check
from tests.benchmarks import stream_attempts
from tests.benchmarks.stream_attempts import Captured


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KITSUNE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        return stream_attempts.capture("lenet", 2, "fp32", "cpu")


@pytest.mark.parametrize("attempt", stream_attempts.attempts(), ids=lambda attempt: attempt.idea)
def test_an_attempt_is_a_legal_plan(
    attempt: stream_attempts.Attempt,
    captured: Captured,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    monkeypatch.setenv("KITSUNE_CACHE_DIR", str(tmp_path_factory.getbasetemp()))
    plan = stream_attempts.plan(captured, attempt).plan
    assert check(plan.graph, plan.schedule) == []


def test_weights_wait_for_inputs(captured: Captured) -> None:
    split = stream_attempts.pipeline.run(captured.module, stream_attempts.pipeline.splitting(1))
    before = task_graph(split.graph)
    after = stream_attempts.weights_after_inputs(before)
    added = [
        (task.operator, before.tasks[dependency.task].operator)
        for task, old in zip(after.tasks, before.tasks, strict=True)
        for dependency in set(task.after) - set(old.after)
    ]
    assert added
    assert all("convolution_backward" in name for names in added for name in names)


def test_the_table_compares_with_the_first() -> None:
    def entry(idea: str, times: list[float]) -> dict[str, object]:
        return {
            "idea": idea, "strategy": "list", "num_streams": 2, "waits": 3, "live_bytes": 2**20, "predicted_us": 5.0,
            "measured_us": times,
        }  # fmt: skip

    rounds = [
        [entry("first", [10.0, 20.0]), entry("second", [5.0, 10.0]), entry("third", [1.0, 1.0])],
        [entry("first", [10.0, 20.0]), entry("second", [5.0, 10.0])],
    ]
    lines = stream_attempts.table({"rounds": rounds}).splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("| first | list, 2 | 3 | 5 us | 15 us | 1.000 |")
    assert "| 0.500 [0.500, 0.500] | 1 MiB |" in lines[3]
