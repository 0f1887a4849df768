from typing import Any

import pytest

from harness.plan_fields import DamageError
from harness.replay_plans import ReplayPlan, plan_in_use, replay_plan
from kitsune.status import ScheduleTime, Status

IN_ORDER = ScheduleTime("in order", 1, fused=False, predicted_us=9.0, measured_us=8.0, chosen=False)
ON_STREAMS = ScheduleTime("list", 2, fused=True, predicted_us=7.0, measured_us=6.0, chosen=True)


def status(*schedules: ScheduleTime, mode: str = "replay") -> dict[str, Any]:
    return Status(mode, "a test", schedules=schedules).as_dict()


def test_what_is_chosen_is_in_use() -> None:
    assert plan_in_use(status(IN_ORDER, ON_STREAMS)) == ReplayPlan("list", 2, fused=True)


@pytest.mark.parametrize("mode", ["eager", "measuring", "idle"])
def test_without_replays_no_plan_is_in_use(mode: str) -> None:
    assert plan_in_use(status(IN_ORDER, ON_STREAMS, mode=mode)) is None


def test_no_single_plan_stands_for_several_parts() -> None:
    assert plan_in_use(status(IN_ORDER, ON_STREAMS, IN_ORDER, ON_STREAMS)) is None
    assert plan_in_use(status(IN_ORDER)) is None
    assert plan_in_use(status()) is None


@pytest.mark.parametrize("schedules", [None, "list", [None], [{"strategy": "list", "num_streams": 2, "chosen": True}]])
def test_a_status_of_an_older_commit_says_nothing(schedules: object) -> None:
    assert plan_in_use({"mode": "replay", "schedules": schedules}) is None
    assert plan_in_use({}) is None


def test_a_plan_is_read_and_other_fields_are_ignored() -> None:
    fields = {"strategy": "chains", "num_streams": 3, "fused": False, "chosen": True}
    assert replay_plan(fields, "it") == ReplayPlan("chains", 3, fused=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"strategy": ""}, "it: '' is not a strategy"),
        ({"strategy": None}, "it: None is not a strategy"),
        ({"num_streams": 0}, "it: 0 is not a number of streams"),
        ({"num_streams": True}, "it: True is not a number of streams"),
        ({"fused": 1}, "it: fused is 1; expected true or false"),
    ],
)
def test_a_damaged_plan_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(DamageError, match=words):
        replay_plan({"strategy": "list", "num_streams": 2, "fused": True} | change, "it")
    with pytest.raises(DamageError, match="it is not an object"):
        replay_plan("list", "it")
