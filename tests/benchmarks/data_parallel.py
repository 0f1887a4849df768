"""What an iteration of the unchanged loop takes around a `DistributedDataParallel` of several processes.

    python -m tests.benchmarks.data_parallel measure --model resnet18 --batch 128 --precision amp FILE
    python -m tests.benchmarks.data_parallel show FILE

There is a process for each GPU, and there must be two or more; without any, two processes meet by gloo. The eager loop,
the usual one with Kitsune, and the one with `defer_loss` are timed by turns in the same processes, once the last two
are replayed in all of these and nothing is tried any more. Times are those of the first process; in every iteration it
waits for the gradients of the others.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.nn.parallel import DistributedDataParallel

import kitsune
import models
from kitsune.background import wait_until_quiet
from tests.benchmarks import command

_VARIANTS = ("eager", "replayed", "deferred")
_BATCHES = 8
_BLOCKS = 20
_BLOCK = 40
_MOST_STEPS = 20_000
_SETTLED_STEPS = 400
_MODE: Literal["auto", "replay"] = "auto"


class Loop:
    """A training loop as users write it around a `DistributedDataParallel`."""

    def __init__(self, variant: str, model: str, batch: int, precision: str, device: torch.device) -> None:
        workload = models.build(model, seed=0)
        self._loss_fn, first = workload.loss_fn, dist.get_rank() * _BATCHES
        self._batches = [workload.batch(batch, index=first + index, device=device) for index in range(_BATCHES)]
        ids = [device.index] if device.type == "cuda" else None
        self._model = DistributedDataParallel(workload.module.to(device), device_ids=ids)
        self._optimizer: torch.optim.Optimizer = torch.optim.Adam(self._model.parameters(), lr=workload.learning_rate)
        if variant != "eager":
            self._optimizer = kitsune.KitsuneOptimizer(self._optimizer, mode=_MODE, defer_loss=variant == "deferred")
        self._autocast: Callable[[], AbstractContextManager[object]] = nullcontext
        if precision == "amp":
            self._autocast = partial(torch.autocast, device.type, dtype=torch.bfloat16)

    def iterate(self, index: int) -> None:
        """One iteration, with the batch of that number."""
        x, y = self._batches[index % _BATCHES]
        self._optimizer.zero_grad()
        with self._autocast():
            loss = self._loss_fn(self._model(x), y)
        loss.backward()
        self._optimizer.step()

    def settle(self) -> None:
        """Trains until iterations are replayed in all processes, and no other plan is tried in any of them.

        Raises:
            RuntimeError: they never are.
        """
        if not isinstance(self._optimizer, kitsune.KitsuneOptimizer):
            return
        replayed = 0
        for index in range(_MOST_STEPS):
            self.iterate(index)
            if index % 50 == 0:
                wait_until_quiet()
            status = self._optimizer.status()
            is_replayed = status.mode == "replay" and "update" in status.covered
            replayed = replayed + 1 if is_replayed else 0
            if index % 50 == 49 and _in_all(replayed >= _SETTLED_STEPS, self._batches[0][0].device):
                return
        raise RuntimeError(f"iterations are not replayed:\n{self._optimizer.status()}")


def measure(model: str, batch: int, precision: str, device: str = "cuda") -> dict[str, list[float]]:
    """Microseconds of an iteration in each block."""
    size = torch.cuda.device_count() if device == "cuda" else 2
    if size < 2:
        raise SystemExit("this is about several GPUs, and there is one")
    with tempfile.TemporaryDirectory() as folder:
        given = (size, model, batch, precision, device, folder)
        multiprocessing.start_processes(_rank, given, nprocs=size, start_method="spawn")
        found: dict[str, list[float]] = json.loads((Path(folder) / "times").read_text(encoding="utf-8"))
    return found


def _rank(rank: int, size: int, model: str, batch: int, precision: str, kind: str, folder: str) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend, meeting = "nccl" if kind == "cuda" else "gloo", f"file://{folder}/meeting"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=size)
    times = _times({variant: Loop(variant, model, batch, precision, device) for variant in _VARIANTS}, device)
    if rank == 0:
        (Path(folder) / "times").write_text(json.dumps(times), encoding="utf-8")
    gc.collect()  # a wrapper that is given up after its process group may wait for ever
    dist.destroy_process_group()


def _times(loops: Mapping[str, Loop], device: torch.device) -> dict[str, list[float]]:
    for loop in loops.values():
        loop.settle()
    times: dict[str, list[float]] = {variant: [] for variant in loops}
    for block in range(_BLOCKS + 1):
        for variant, loop in loops.items():
            taken = _block_us(loop, device)
            if block:  # the first one is for warming up
                times[variant].append(taken)
    return times


def _in_all(is_so: bool, device: torch.device) -> bool:
    """Whether it is so in all processes."""
    answer = torch.tensor(int(is_so), device=device)
    dist.all_reduce(answer, dist.ReduceOp.MIN)
    return bool(answer)


def _block_us(loop: Loop, device: torch.device) -> float:
    _in_all(True, device)  # they begin together
    started = time.perf_counter()
    for index in range(_BLOCK):
        loop.iterate(index)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - started) / _BLOCK * 1e6


if __name__ == "__main__":
    table = partial(command.blocks_table, column="loop")
    command.run("tests.benchmarks.data_parallel", __doc__, measure, table, on_cpu=True)
