"""Chooses the plan by which a backward pass is replayed: in order, or on several streams.

A backward pass reads what the forward pass left, and writes its own results alone. So it can be replayed for timing at
once, again and again; the user's own steps need not be timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import fx

from kitsune.engine import planning
from kitsune.engine.planning import Planned
from kitsune.engine.recording import Recording
from kitsune.errors import Refusal, RefusedError
from kitsune.graph import dataflow
from kitsune.status import ScheduleTime
from kitsune.timing import device_us

_TRIAL_SECONDS = 0.1
_LAUNCHES = 7

# What is no faster than this against the plan in order, which is the simplest, is noise.
_MARGIN = 0.98


class Fastest(NamedTuple):
    """What replays in the least time; `times_us` are those of all plans, None where one was not recorded."""

    recording: Recording
    place: int
    times_us: tuple[float | None, ...]

    def schedules(self, plans: Sequence[Planned], *, fused: bool) -> tuple[ScheduleTime, ...]:
        """The same as a `Status` has it; `plans` are in order of their places."""
        timed = zip(plans, self.times_us, strict=True)
        return tuple(
            ScheduleTime(
                strategy=planned.plan.schedule.strategy,
                num_streams=planned.plan.schedule.num_streams,
                fused=fused,
                predicted_us=planned.plan.predicted_us,
                measured_us=us,
                chosen=place == self.place,
            )
            for place, (planned, us) in enumerate(timed)
        )


def computed(forward: fx.Graph) -> list[bool]:
    """For each result of a forward pass whether it has memory of its own, and is not an input or a view of one."""
    given = {storage for node in dataflow.placeholders(forward) for storage in dataflow.storages(node)}
    return [node is not None and given.isdisjoint(dataflow.storages(node)) for node in dataflow.outputs(forward)]


def fill(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Makes `tensor` equal to `value`, another result of the same operators: both are laid out alike in their memory.

    Elements may share memory, where `Tensor.copy_` would raise.
    """
    tensor.untyped_storage().copy_(value.untyped_storage())


def plans(
    module: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    num_streams: int,
    max_bytes: int | None,
    refused: Callable[[Refusal], None],
) -> tuple[Planned, ...]:
    """Of a backward pass: the plan in order, and others on 2 to `num_streams` streams that are worth a trial.

    Args:
        inputs: values that it may have; operators are timed on them.
        max_bytes: what the values of the others may need at once; None: there is no bound.
    """
    with torch.no_grad(), torch.autocast(inputs[0].device.type, enabled=False):
        in_order = planning.in_order(module, inputs[0].device, inputs)
    others = planning.others(module, inputs, num_streams=num_streams, max_bytes=max_bytes)
    return in_order, *others


def fastest(
    in_order: Recording,
    others: Sequence[Planned],
    record: Callable[[Planned], Recording],
    inputs: Sequence[torch.Tensor],
    refused: Callable[[RefusedError], None],
) -> Fastest:
    """Replays all plans for a while, and releases all recordings but the fastest; `in_order` is left if it fails.

    A replay takes what the device takes for it, or what the host takes to launch it, if that is more.

    Args:
        in_order: of the plan that has place 0.
        others: plans on several streams.
        record: records one of those; `refused` is told where it raises a `RefusedError`.
        inputs: what the recordings are of, with valid values.
    """
    first_us = _replay_us(in_order, inputs)
    times_us: list[float | None] = [first_us]
    held, best, limit_us = {0: in_order}, 0, _MARGIN * first_us
    try:
        for place, planned in enumerate(others, 1):
            times_us.append(None)
            try:
                held[place] = record(planned)
            except RefusedError as error:
                refused(error)
                continue
            us = times_us[place] = _replay_us(held[place], inputs)
            if us < limit_us:
                best, limit_us = place, us
            _keep(held, 0, best)
    except BaseException:
        _keep(held, 0)
        raise
    _keep(held, best)
    return Fastest(held[best], best, tuple(times_us))


def _keep(held: dict[int, Recording], *places: int) -> None:
    for place in held.keys() - places:
        held.pop(place).release()


def _replay_us(recording: Recording, inputs: Sequence[torch.Tensor]) -> float:
    on_device_us = device_us(lambda: recording(inputs), inputs[0].device, limit_s=_TRIAL_SECONDS)
    launches = []
    for _ in range(_LAUNCHES):
        started = time.perf_counter()
        recording(inputs)
        launches.append((time.perf_counter() - started) * 1e6)
    return max(on_device_us, statistics.median(launches))
