"""What the host does in an iteration of the unchanged loop, part by part, with `defer_loss` or without.

    python -m tests.benchmarks.loop_pace
    python -m tests.benchmarks.loop_pace --beside ../other --rounds 5   # by turns with another checkout's Kitsune

No GPU is needed: graphs are recorded as on one, and replays but copy inputs in. What is left is Python: Kitsune's, and
torch's around it, of which `eager` tells how much there is without Kitsune (its operators are those of tiny tensors).
Times are of the fastest of many blocks; calls are of functions, written in Python or C. Every round is a process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import kitsune
from tests.kitsune import static_memory

_SETTLED_STEPS = 60
_BLOCKS = 40
_BLOCK = 50
PARTS = ("zero_grad", "model", "loss", "backward", "step")
VARIANTS = ("eager", "replayed", "deferred")


class Still(static_memory.StaticMemory):
    """Replays nothing: what it was recorded with stays as its result."""

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        for position, static in zip(self._copied, self._static, strict=True):
            static.copy_(inputs[position])
        return self._outputs


class Loop:
    """A training loop of a small model, with the parts of its iterations apart."""

    def __init__(self, variant: str, precision: str, layers: int) -> None:
        torch.manual_seed(0)
        sizes = [8] * layers + [3]
        self.model = nn.Sequential(*(nn.Linear(one, other) for one, other in itertools.pairwise(sizes)))
        plain = torch.optim.Adam(self.model.parameters(), foreach=True)
        self.optimizer = plain if variant == "eager" else _wrapped(plain, variant)
        self._batches = [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(8)]
        self._index = 0
        self._autocast: Callable[[], AbstractContextManager[object]] = nullcontext
        if precision == "amp":
            self._autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)

    def demand_replays(self) -> None:
        """Raises a RuntimeError unless the latest iteration was replayed as it should be."""
        if not isinstance(self.optimizer, kitsune.KitsuneOptimizer):
            return
        loss = ["loss"] if self.optimizer.config.defer_loss else []
        covered = ("forward", *loss, "backward", "update")
        if self.optimizer.status().covered != covered:
            raise RuntimeError(f"iterations are not replayed as a whole:\n{self.optimizer.status()}")

    def iterate(self) -> None:
        """One iteration, as users write it."""
        x, y = self._batches[self._index % len(self._batches)]
        self._index += 1
        self.optimizer.zero_grad()
        with self._autocast():
            loss = functional.cross_entropy(self.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def iterate_in_parts(self) -> list[float]:
        """The same, with microseconds for each of the parts."""
        clock, marks = time.perf_counter, [0.0] * (len(PARTS) + 1)
        x, y = self._batches[self._index % len(self._batches)]
        self._index += 1
        marks[0] = clock()
        self.optimizer.zero_grad()
        marks[1] = clock()
        with self._autocast():
            output = self.model(x)
            marks[2] = clock()
            loss = functional.cross_entropy(output, y)
        marks[3] = clock()
        loss.backward()  # type: ignore[no-untyped-call]
        marks[4] = clock()
        self.optimizer.step()
        marks[5] = clock()
        return [(end - start) * 1e6 for start, end in itertools.pairwise(marks)]


def _wrapped(optimizer: torch.optim.Optimizer, variant: str) -> kitsune.KitsuneOptimizer:
    return kitsune.KitsuneOptimizer(optimizer, mode="replay", defer_loss=variant == "deferred")


def measure(variant: str, precision: str, layers: int) -> dict[str, float]:
    """Microseconds of an iteration and of each of its parts, and the function calls of an iteration."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(static_memory, "StaticMemory", Still)
        static_memory.install(patch)
        loop = Loop(variant, precision, layers)
        for _ in range(_SETTLED_STEPS):
            loop.iterate()
        loop.demand_replays()
        found = {"iteration": min(_block_us(loop.iterate) for _ in range(_BLOCKS))}
        parts = zip(*(loop.iterate_in_parts() for _ in range(_BLOCKS * _BLOCK)), strict=True)
        found |= {name: statistics.median(times_us) for name, times_us in zip(PARTS, parts, strict=True)}
        found["calls"] = float(_num_calls(loop.iterate))
    return found


def _block_us(part: Callable[[], object]) -> float:
    started = time.perf_counter()
    for _ in range(_BLOCK):
        part()
    return (time.perf_counter() - started) / _BLOCK * 1e6


def _num_calls(part: Callable[[], object]) -> int:
    """How many functions are called, the part itself among them."""
    count = 0

    def note(_frame: object, event: str, _function: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        part()
    finally:
        sys.setprofile(None)
    return count - 1  # the one that ends it


def _in_another_process(checkout: Path, *given: str) -> dict[str, float]:
    """What `measure` finds with the Kitsune of a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, __file__, "--measure", *given]
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(printed.splitlines()[-1])
    return found


def table(rounds: Sequence[dict[str, dict[str, float]]]) -> str:
    """Of each column and part the median over the rounds, as a Markdown table."""
    columns = list(rounds[0])
    lines = ["| |" + "".join(f" {name} |" for name in columns), "|---|" + "--:|" * len(columns)]
    for part in rounds[0][columns[0]]:
        cells = (statistics.median(one[name][part] for one in rounds) for name in columns)
        lines.append(f"| {part} |" + "".join(f" {cell:.1f} |" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.loop_pace",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--precision", choices=("fp32", "amp"), default="amp")
    parser.add_argument("--layers", type=int, default=3, help="linear layers of the model (default: 3)")
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes for each column (default: 3)")
    parser.add_argument("--beside", type=Path, action="append", default=[], help="another checkout of this project")
    parser.add_argument("--measure", choices=VARIANTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    options = ("--precision", given.precision, "--layers", str(given.layers))
    if given.measure is not None:
        print(json.dumps(measure(given.measure, given.precision, given.layers)))
        return
    here = Path(__file__).parents[2]
    rounds = []
    for _ in range(given.rounds):
        found = {"eager": _in_another_process(here, "eager", *options)}
        for variant in VARIANTS[1:]:
            for checkout in (*given.beside, here):
                name = f"{variant}, {checkout.resolve().name}" if given.beside else variant
                found[name] = _in_another_process(checkout, variant, *options)
        rounds.append(found)
    print(table(rounds))


if __name__ == "__main__":
    main()
