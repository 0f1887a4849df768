"""The plan by which a Kitsune variant replays, in few words: what one process chose, and another may not choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.plan_fields import DamageError, as_list, as_object


@dataclass(frozen=True)
class ReplayPlan:
    """The plan by which a variant replays its step, or a drop-in loop its backward pass.

    ``strategy`` is how its schedule was made, such as "in order" or "list", on ``num_streams`` CUDA streams; ``fused``
    says whether it is of the graph with its operators fused.
    """

    strategy: str
    num_streams: int
    fused: bool


def replay_plan(value: object, where: str) -> ReplayPlan:
    """The plan in a decoded JSON object, whose other fields are ignored.

    Raises:
        DamageError: a field is missing, or not as it should be; the message begins with ``where``.
    """
    fields = as_object(value, where)
    strategy, num_streams, fused = (fields.get(name) for name in ("strategy", "num_streams", "fused"))
    if not isinstance(strategy, str) or not strategy:
        raise DamageError(f"{where}: {strategy!r:.60} is not a strategy")
    if type(num_streams) is not int or num_streams < 1:
        raise DamageError(f"{where}: {num_streams!r:.60} is not a number of streams")
    if not isinstance(fused, bool):
        raise DamageError(f"{where}: fused is {fused!r:.60}; expected true or false")
    return ReplayPlan(strategy, num_streams, fused)


def plan_in_use(status: Mapping[str, object]) -> ReplayPlan | None:
    """The plan that a variant's status says it replays by; None where it does not replay, or does not say.

    ``TrainStep`` tells the schedules of its latest step, of which one is chosen. A drop-in loop tells those of its
    backward pass, of which one is chosen in each part that is replayed by itself: where there are several, no single
    plan stands for them, and it is None. Statuses of older commits may lack what is asked for, and say nothing then.
    """
    if status.get("mode") != "replay":
        return None
    try:
        schedules = [as_object(entry, "a schedule") for entry in as_list(status.get("schedules"), "schedules")]
        chosen = [replay_plan(entry, "a schedule") for entry in schedules if entry.get("chosen") is True]
    except DamageError:
        return None
    return chosen[0] if len(chosen) == 1 else None
