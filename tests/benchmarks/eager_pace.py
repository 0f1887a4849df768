"""What Kitsune costs where it cannot help: small calls that are settled on eager, and scripts that end soon.

    python -m tests.benchmarks.eager_pace calls      # 30 small calls a step, beside plain PyTorch
    python -m tests.benchmarks.eager_pace scripts    # whole processes, beside the same without Kitsune

Both run on a CPU. Of the calls, plain PyTorch and Kitsune take turns in one process, in short blocks: the ratio is that
of all blocks, in which looks at the calls come as often as in any training. Replays count as slower than they are, so
that all is settled on eager. Function calls are counted too, since they do not depend on what else the machine does.
Scripts take turns as processes, with the imports of torch and all else.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import kitsune
from kitsune.errors import Refusal
from kitsune.fallback import Chooser
from kitsune.loop.rest import LOOK_EVERY
from tests.benchmarks.loop_pace import _num_calls

CALLS = 30
VARIANTS = ("plain", "loop", "deferred")
_SETTLED_STEPS = 60
_BLOCKS, _BLOCK = 300, 7
_SCRIPT = Path(__file__).with_name("short_script.py")
SCRIPTS = {"mlp": 600, "conv": 40}
"""Steps of each: about a second."""


class Cell(nn.Module):
    """A cell of a recurrent network."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.hidden = nn.Linear(8, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return torch.tanh(self.input(x) + self.hidden(hidden))


class Loop:
    """A loop that calls a small module `CALLS` times a step."""

    def __init__(self, variant: str) -> None:
        torch.manual_seed(0)
        self.model = Cell()
        plain = torch.optim.Adam(self.model.parameters())
        self.optimizer = _wrapped(plain, variant)
        self._batch = torch.randn(CALLS, 4, 8)

    def iterate(self) -> None:
        self.optimizer.zero_grad()
        hidden = torch.zeros(4, 32)
        for x in self._batch:
            hidden = self.model(x, hidden)
        hidden.square().mean().backward()
        self.optimizer.step()


def _wrapped(optimizer: torch.optim.Optimizer, variant: str) -> torch.optim.Optimizer:
    if variant == "plain":
        return optimizer
    return kitsune.KitsuneOptimizer(optimizer, defer_loss=variant == "deferred", setup_share=1.0)


def _lose(chooser: Chooser) -> None:
    chooser.refuse(Refusal("replays are to lose"))


def measure_calls() -> dict[str, dict[str, float]]:
    """Of each variant the microseconds of a step, its ratio to plain PyTorch, and the function calls of a step."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Chooser, "_settle", _lose)
        patch.setattr(Chooser, "_is_clear", lambda _: True)
        loops = {variant: Loop(variant) for variant in VARIANTS}
        for loop in loops.values():
            for _ in range(_SETTLED_STEPS):
                loop.iterate()
        seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for _ in range(_BLOCKS):
            for variant, loop in loops.items():
                seconds[variant].append(_seconds(loop.iterate))
        calls = {name: [_num_calls(loop.iterate) for _ in range(LOOK_EVERY)] for name, loop in loops.items()}
    return {
        variant: {
            "step_us": statistics.median(seconds[variant]) / _BLOCK * 1e6,
            "ratio": sum(seconds[variant]) / sum(seconds["plain"]),
            "median_ratio": statistics.median(
                one / plain for one, plain in zip(seconds[variant], seconds["plain"], strict=True)
            ),
            "calls": statistics.mean(calls[variant]),
            "median_calls": float(statistics.median(calls[variant])),
        }
        for variant in VARIANTS
    }


def _seconds(part: Callable[[], object]) -> float:
    started = time.perf_counter()
    for _ in range(_BLOCK):
        part()
    return time.perf_counter() - started


def measure_scripts(rounds: int) -> dict[str, dict[str, float]]:
    """Of each script and variant the seconds of the processor in the median, as long as it has but one thread.

    Python finds all modules compiled, as where they are installed: a first process of each, which is not counted, does
    that.
    """
    found: dict[str, dict[str, list[float]]] = {name: {one: [] for one in VARIANTS} for name in SCRIPTS}
    with tempfile.TemporaryDirectory() as bytecode:
        for index in range(rounds + 1):
            for name in SCRIPTS:
                for variant in VARIANTS:
                    seconds = _processor_seconds(name, variant, bytecode)
                    if index:
                        found[name][variant].append(seconds)
    return {
        name: {variant: statistics.median(times) for variant, times in variants.items()}
        for name, variants in found.items()
    }


def _processor_seconds(name: str, variant: str, bytecode: str) -> float:
    before = os.times()
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "PYTHONPYCACHEPREFIX": bytecode,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(_SCRIPT), name, variant, str(SCRIPTS[name])]
    subprocess.run(command, env=environment, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def calls_table(found: Mapping[str, Mapping[str, float]]) -> str:
    """As Markdown. A look comes every `LOOK_EVERY` steps; medians are of steps without one."""
    lines = [
        f"| {CALLS} small calls a step | µs | to plain | without looks | function calls | without looks |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for variant, one in found.items():
        ratios = f"{one['ratio']:.3f} | {one['median_ratio']:.3f}"
        lines.append(
            f"| {variant} | {one['step_us']:.0f} | {ratios} | {one['calls']:.0f} | {one['median_calls']:.0f} |"
        )
    return "\n".join(lines)


def scripts_table(found: Mapping[str, Mapping[str, float]]) -> str:
    """As Markdown."""
    lines = ["| script | " + " | ".join(f"{one} (s)" for one in VARIANTS) + " |", "|---|" + "--:|" * len(VARIANTS)]
    for name, times in found.items():
        cells = (f"{times[one]:.2f} ({times[one] / times['plain'] - 1:+.0%})" for one in VARIANTS)
        lines.append(f"| {name}, {SCRIPTS[name]} steps | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.eager_pace",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("calls", help="small calls that are settled on eager")
    scripts = kinds.add_parser("scripts", help="scripts that end before anything could pay off")
    scripts.add_argument("--rounds", type=int, default=5, help="processes of each (default: 5)")
    given = parser.parse_args(arguments)
    if given.kind == "calls":
        print(calls_table(measure_calls()))
    else:
        print(scripts_table(measure_scripts(given.rounds)))


if __name__ == "__main__":
    main()
