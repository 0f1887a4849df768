"""What torch's CUDA allocator does in one step, event by event.

The only place that uses ``torch.cuda.memory._record_memory_history`` and ``_snapshot``. They are private, but torch's
own guide to memory tells users to call them, and nothing public shows single allocations: statistics can be read
between operators only, so that what a backward pass or a fused optimizer takes and returns within one call would stay
unseen. Where torch has changed them there is no timeline, with the reason, and all else is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from harness import memory
from harness.failures import describe
from harness.memory_timeline import ON_THE_CPU, RecordedStep, graph_ranges

_MOST_EVENTS = 200_000


def recorded_step(step: Callable[[], object], device: torch.device) -> RecordedStep | str:
    """Takes a step on the current device and records it; why there is no record where there is none.

    Nothing is raised, neither by torch's recording nor by the step: it is one more, and what was measured stands.
    """
    if device.type != "cuda":
        return ON_THE_CPU
    try:
        return _recorded(step, device)
    except Exception as error:  # noqa: BLE001  # a variant may raise anything
        reason = describe(error).splitlines()[0]
        return f"a step could not be recorded with torch {torch.__version__}: {reason}"


def _recorded(step: Callable[[], object], device: torch.device) -> RecordedStep | str:
    torch.cuda.synchronize(device)
    allocated, reserved = memory.in_use(device)
    graphs = graph_ranges(torch.cuda.memory_snapshot())
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=_MOST_EVENTS)
    try:
        begin_us = time.time_ns() / 1e3
        step()
        end_us = time.time_ns() / 1e3
        torch.cuda.synchronize(device)
        snapshot = torch.cuda.memory._snapshot(device)
    finally:
        torch.cuda.memory._record_memory_history(None)
    events = snapshot["device_traces"][torch.cuda.current_device()]
    if len(events) >= _MOST_EVENTS:
        return f"a step has {_MOST_EVENTS:,} allocations or more, and no more are recorded"
    return RecordedStep(events, begin_us, end_us, allocated, reserved, graphs)
