"""How fast the example scripts run at real size, with their one changed line and without, once set-up is over.

    python -m tests.benchmarks.example_pace measure [--example NAME] [--rounds N] FILE
    python -m tests.benchmarks.example_pace show FILE

Every run is a process, with and without Kitsune by turns; the first one with Kitsune fills the caches and is not
counted. A run's pace is that of its last third: the median of the seconds between two lines of progress there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from examples.run import Run
from tests.benchmarks import command

EXAMPLES: Mapping[str, str] = {
    "mnist": "--synthetic --epochs 8",
    "mnist --optimizer adam": "--synthetic --epochs 8",
    "cifar10_loop": "--synthetic --epochs 15",
    "chargpt": "--iterations 1000 --eval-interval 1000000",
    "gan": "--iterations 4000",
    "text": "--epochs 30",
    "text --pad-to 1": "--epochs 30",
    "finetune": "--batches 600",
}
"""Their names, with what tells runs of one example apart, and the options that make them long enough."""

ALLOWED = 1.03
"""How much longer a step may take than without Kitsune."""


def paces(example: str, options: Sequence[str], plain: bool) -> dict[str, Any]:
    """Runs an example in this process.

    Returns:
        "seconds": between lines of progress, of the last third of those that belong to training; "mode": Kitsune's at
        the end, of each optimizer.
    """
    name, *more = example.split()
    times: list[float] = []
    original = Run.log

    def log(run: Run, place: str, **figures: float) -> None:
        if "loss" in figures or "distance" in figures:
            times.append(time.perf_counter())
        original(run, place, **figures)

    Run.log = log  # type: ignore[method-assign]
    try:
        main = importlib.import_module(f"examples.{name}").main
        run = main([*more, *options, *(["--plain"] if plain else [])])
    finally:
        Run.log = original  # type: ignore[method-assign]
    late = times[len(times) * 2 // 3 :]
    between = [after - before for before, after in pairwise(late)]
    return {"seconds": between, "mode": [status.mode for status in run.statuses]}


def measure(names: Sequence[str], rounds: int) -> dict[str, Any]:
    """By example, what `paces` tells of each run: under "plain" and under "kitsune"."""
    found: dict[str, Any] = {}
    context = multiprocessing.get_context("spawn")
    for name in names:
        runs = found[name] = {"options": EXAMPLES[name], "plain": [], "kitsune": []}
        for turn in range(-1, 2 * rounds):
            plain = turn >= 0 and turn % 2 == (turn // 2) % 2  # each is the first of a pair as often
            with ProcessPoolExecutor(1, context) as process:
                run = process.submit(paces, name, EXAMPLES[name].split(), plain).result()
            if turn >= 0:
                runs["plain" if plain else "kitsune"].append(run)
        print(line(name, runs), flush=True)
    return found


def line(name: str, runs: Mapping[str, Any]) -> str:
    """What is found of an example: how many times as long a step takes with Kitsune, and whether that is allowed."""
    plain, accelerated = ([statistics.median(run["seconds"]) for run in runs[form]] for form in ("plain", "kitsune"))
    ratio = statistics.median(accelerated) / statistics.median(plain)
    modes = sorted({mode for run in runs["kitsune"] for mode in run["mode"]})
    verdict = "" if ratio <= ALLOWED else f", more than {ALLOWED}"
    return f"{name}: {ratio:.3f} of plain PyTorch's time ({', '.join(modes)}){verdict}"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.example_pace", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="run them and write what is found")
    measuring.add_argument("--example", action="append", choices=EXAMPLES, help="this one (default: all)")
    measuring.add_argument("--rounds", type=int, default=2, metavar="N", help="runs of each kind (default: 2)")
    measuring.add_argument("file", type=Path)
    commands.add_parser("show", help="print what was found").add_argument("file", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "show":
        document = json.loads(options.file.read_text(encoding="utf-8"))
        print("\n".join(line(name, runs) for name, runs in document["examples"].items()))
        return
    found = measure(options.example or list(EXAMPLES), options.rounds)
    document = {**command.origin(), "examples": found}
    options.file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
