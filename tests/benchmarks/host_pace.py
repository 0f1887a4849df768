"""What the host does in a replayed step, part by part, beside what the device takes: which of them sets the pace.

    python -m tests.benchmarks.host_pace measure --model mlp --batch 64 --precision amp FILE
    python -m tests.benchmarks.host_pace show FILE

Parts are run by themselves, many times in a row, in the process that trains: "look" finds the inputs of a replay and
sees that nothing has changed, "guards" is the share of it that guards and facts about the call take, "numbers" writes
hyperparameters and step counts, "replay" copies the batch, launches the graph and hands the loss out. "step" is all of
it, as the loop sees it, and "device" the time between steps that the host has issued ahead. Every round is a process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import kitsune
import models
from kitsune.background import wait_until_quiet
from kitsune.timing.busy import keep_busy
from tests.benchmarks import command

_BATCHES = 32
_BLOCKS = 15
_BLOCK = 500
_MOST_STEPS = 20_000
_SETTLED_STEPS = 400
_BUSY_MS = 20.0


def settled(step: kitsune.TrainStep, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Trains until plans have been chosen; returns what replays the step.

    Raises:
        RuntimeError: no plan was chosen, or steps like that are not replayed in the short way.
    """
    replayed = 0
    for index in range(_MOST_STEPS):
        step(*batches[index % len(batches)])
        if index % 50 == 0:
            wait_until_quiet()
        replayed = replayed + 1 if step.status().mode == "replay" else 0
        whole = step._loop._latest
        if replayed >= _SETTLED_STEPS and whole is not None and whole._shortcut is not None:
            return whole
    raise RuntimeError(f"the step is not replayed in the short way:\n{step.status()}")


def measure(model: str, batch: int, precision: str, device: str = "cuda") -> dict[str, list[float]]:
    """Microseconds of each part in each block."""
    torch.backends.cudnn.benchmark = True
    workload = models.build(model, seed=0)
    module = workload.module.to(device)
    batches = [workload.batch(batch, index=index, device=torch.device(device)) for index in range(_BATCHES)]
    optimizer = torch.optim.Adam(module.parameters(), lr=workload.learning_rate)
    step = kitsune.TrainStep(module, workload.loss_fn, optimizer, enable_amp=precision == "amp", setup_share=1.0)
    whole = settled(step, batches)
    shortcut, winner = whole._shortcut, whole._region.winner
    inputs = [shortcut.inputs(args, {}) for args in batches]
    parts: dict[str, Callable[[int], object]] = {
        "step": lambda index: step(*batches[index]),
        "look": lambda index: shortcut.inputs(batches[index], {}),
        "guards": lambda index: shortcut._call.inputs(batches[index], {}),
        "numbers": lambda index: shortcut._update.follow(),
        "nothing": lambda index: None,
    }
    found = {name: [_block(part, device) for _ in range(_BLOCKS)] for name, part in parts.items()}
    if device == "cuda":
        found["device"] = [_device_block(parts["step"]) for _ in range(_BLOCKS)]
    found["replay"] = [_block(lambda index: winner(inputs[index]), device) for _ in range(_BLOCKS)]  # counts no steps
    return found


def _block(part: Callable[[int], object], device: str) -> float:
    started = time.perf_counter()
    for index in range(_BLOCK):
        part(index % _BATCHES)
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / _BLOCK * 1e6


def _device_block(step: Callable[[int], object]) -> float:
    """Of steps that wait in the device's queue, as long as it is kept busy before them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    keep_busy(_BUSY_MS * 1e3, torch.device("cuda"))
    start.record()
    for index in range(_BLOCK):
        step(index % _BATCHES)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / _BLOCK * 1e3


if __name__ == "__main__":
    table = partial(command.blocks_table, column="part")
    command.run("tests.benchmarks.host_pace", __doc__, measure, table, model="mlp", batch=64)
