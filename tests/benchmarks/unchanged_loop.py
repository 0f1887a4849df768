"""What an iteration of the unchanged loop takes by the clock, alone in its process, with `defer_loss` and eagerly.

    python -m tests.benchmarks.unchanged_loop measure --model mlp --batch 64 --precision amp FILE
    python -m tests.benchmarks.unchanged_loop show FILE...

The eager loop runs first, then that with Kitsune, from the step on at which everything is replayed. Batches lie on the
device, and come in turn. Every round is a process.

Before each block some Python is timed that is always the same: a replayed loop is bound by the host, and where others
use the other half of a processor, all Python takes up to twice as long. Blocks are told apart by whether it took about
as long as it ever did on that machine (`at full pace`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch

import kitsune
import models
from kitsune.background import wait_until_quiet
from tests.benchmarks import command

_BATCHES = 32
_BLOCKS = {"eager": 20, "deferred": 60}
_BLOCK = {"eager": 50, "deferred": 200}
_MOST_STEPS = 20_000
_SETTLED_STEPS = 400
_COVERED = ("forward", "loss", "backward", "update")
_PYTHON = "Python before {}"
_FULL_PACE = 1.1  # times the fastest


class Loop:
    """A training loop as users write it; with Kitsune, an iteration is put off until its backward pass."""

    def __init__(self, model: str, batch: int, precision: str, device: str, *, is_deferred: bool) -> None:
        workload = models.build(model, seed=0)
        self._module, self._loss_fn = workload.module.to(device), workload.loss_fn
        self._batches = [workload.batch(batch, index=index, device=torch.device(device)) for index in range(_BATCHES)]
        self._optimizer: torch.optim.Optimizer = torch.optim.Adam(self._module.parameters(), lr=workload.learning_rate)
        if is_deferred:
            self._optimizer = kitsune.KitsuneOptimizer(self._optimizer, defer_loss=True, setup_share=1.0)
        self._autocast: Callable[[], AbstractContextManager[object]] = nullcontext
        if precision == "amp":
            self._autocast = partial(torch.autocast, device, dtype=torch.bfloat16)

    def iterate(self, index: int) -> None:
        """One iteration, with the batch of that number."""
        x, y = self._batches[index % _BATCHES]
        self._optimizer.zero_grad()
        with self._autocast():
            loss = self._loss_fn(self._module(x), y)
        loss.backward()
        self._optimizer.step()

    def settle(self) -> None:
        """Trains until iterations are replayed as a whole, and no plan is tried any more.

        Raises:
            RuntimeError: they never are.
        """
        replayed = 0
        for index in range(_MOST_STEPS):
            self.iterate(index)
            if index % 50 == 0:
                wait_until_quiet()
            replayed = replayed + 1 if self._optimizer.status().covered == _COVERED else 0
            if replayed >= _SETTLED_STEPS:
                return
        raise RuntimeError(f"iterations are not replayed as a whole:\n{self._optimizer.status()}")


def measure(model: str, batch: int, precision: str, device: str = "cuda") -> dict[str, list[float]]:
    """Microseconds of an iteration in each block, and of the Python before it."""
    found: dict[str, list[float]] = {}
    for variant, count in _BLOCKS.items():
        loop = Loop(model, batch, precision, device, is_deferred=variant == "deferred")
        if variant == "deferred":
            loop.settle()
        _block_us(loop, variant, device)
        found[variant], found[_PYTHON.format(variant)] = [], []
        for _ in range(count):
            found[_PYTHON.format(variant)].append(_python_us())
            found[variant].append(_block_us(loop, variant, device))
    return found


def _python_us() -> float:
    started = time.perf_counter()
    number = 0
    for index in range(10_000):
        number += index * index & 7
    return (time.perf_counter() - started) * 1e6


def table(document: Mapping[str, Any]) -> str:
    """The blocks as a Markdown table, and a line for each loop on those at full pace; earlier files do not tell."""
    lines, blocks = [command.blocks_table(document, column="loop")], {}
    for variant in _BLOCKS:
        known = [one for one in document["rounds"] if _PYTHON.format(variant) in one]
        pairs = (zip(one[_PYTHON.format(variant)], one[variant], strict=True) for one in known)
        blocks[variant] = list(chain.from_iterable(pairs))
    fastest = min((python for some in blocks.values() for python, _ in some), default=0.0)
    for variant, some in blocks.items():
        if some:
            found = [us for python, us in some if python <= _FULL_PACE * fastest]
            figures = f": {min(found):.1f}, {statistics.median(found):.1f}" if found else ""
            lines.append(f"{variant}, at full pace: {len(found)} of {len(some)} blocks{figures}")
    return "\n\n".join(lines)


def summary(documents: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table with a row for each commit, precision and machine, from its start to its end.

    Of its processes there are the fastest Python before any block, and the least and the most of their fastest blocks,
    and of their median ones.
    """
    lines = [
        "| model, batch | commit | precision | processes | Python, us | fastest, us | median, us | eager, median, us |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    rows: dict[tuple[str, ...], list[dict[str, list[float]]]] = {}
    for one in documents:
        head, *changes = str(one["commit"]).split(", ")
        commit = ", ".join([f"`{head[:7]}`", *changes])
        place = f"{one['model']}, {one['batch']}", commit, one["precision"], one["facts"]["boot_id"]
        rows.setdefault(place, []).extend(one["rounds"])
    for (size, commit, precision, _), rounds in rows.items():
        python = [min(one[_PYTHON.format("deferred")]) for one in rounds if _PYTHON.format("deferred") in one]
        cells = [
            f"{min(python):.0f}" if python else "",
            _range([min(one["deferred"]) for one in rounds]),
            *(_range([statistics.median(one[variant]) for one in rounds]) for variant in ("deferred", "eager")),
        ]
        lines.append(f"| {size} | {commit} | {precision} | {len(rounds)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _range(found: Sequence[float]) -> str:
    texts = dict.fromkeys(f"{us:.0f}" for us in (min(found), max(found)))
    return " to ".join(texts)


def _block_us(loop: Loop, variant: str, device: str) -> float:
    started = time.perf_counter()
    for index in range(_BLOCK[variant]):
        loop.iterate(index)
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / _BLOCK[variant] * 1e6


if __name__ == "__main__":
    command.run("tests.benchmarks.unchanged_loop", __doc__, measure, table, model="mlp", batch=64, summary=summary)
