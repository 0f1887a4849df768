"""What the examples share around their training loops: options, seeds, printed progress, the summary at the end."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence

import torch

import kitsune


def add_options(parser: argparse.ArgumentParser, *, batch_size: int) -> None:
    """The options of every example."""
    parser.add_argument("--batch-size", type=int, default=batch_size, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same run (default: %(default)s)")
    parser.add_argument("--device", help="(default: cuda where there is a GPU, else cpu)")
    parser.add_argument("--plain", action="store_true", help="plain PyTorch, to compare with")


class Run:
    """One run of an example, from its seed to its summary.

    Attributes:
        device: where to train.
        figures: what was logged, in order: for each line its numbers by name.
        statuses: what Kitsune says at the end, for each optimizer or step that it accelerated.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        random.seed(options.seed)
        torch.manual_seed(options.seed)
        self.device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.figures: list[dict[str, float]] = []
        self.statuses: list[kitsune.Status] = []
        self._is_plain: bool = options.plain
        self._started = time.perf_counter()

    def log(self, place: str, **figures: float) -> None:
        """Prints a line of progress."""
        self.figures.append(figures)
        seconds = time.perf_counter() - self._started
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        print(f"{place}: {numbers} ({seconds:.1f} s)", flush=True)

    def finish(self, *accelerated: torch.optim.Optimizer | kitsune.TrainStep) -> Run:
        """Prints how long it took, and what Kitsune did unless `--plain` was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        print(f"trained in {time.perf_counter() - self._started:.1f} s on {self.device}")
        for each in accelerated:
            if isinstance(each, (kitsune.KitsuneOptimizer, kitsune.TrainStep)) and not self._is_plain:
                self.statuses.append(each.status())
                print(self.statuses[-1])
        return self

    def series(self, name: str) -> Sequence[float]:
        """The numbers that were logged as `name`."""
        return [figures[name] for figures in self.figures if name in figures]
