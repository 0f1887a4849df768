"""What a training waits for until the end of its first replayed step, stage by stage.

    python -m tests.benchmarks.setup_pace measure --model resnet18 --batch 128 --precision amp FILE
    python -m tests.benchmarks.setup_pace show FILE

Stages are apart from one another: "plain steps" are those that run as plain PyTorch before, cuDNN's search for
algorithms and the first use of the device among them; "loading" is what torch loads of itself for a first capture;
"Dynamo" has the model's Python code become a graph, without "guards"; "tracing" makes it the graph of the whole step;
"recording" records and replays that; "rest" is all else. Every round is a process, and finds what is in the caches.

cuDNN looks for the fastest algorithms among as many as torch has it try, or with `--exhaustive` among all of them, as
the harness lets it do for all variants: that is a part of the plain steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch._dynamo import guards

import kitsune
import models
from kitsune.capture.frontend import GuardedFunction
from kitsune.loop import whole_step
from kitsune.loop.step_loop import StepLoop
from kitsune.loop.whole_step import WholeStep
from tests.benchmarks import command

_MOST_STEPS = 50

STAGES: Mapping[str, tuple[Any, str]] = {
    "plain steps": (StepLoop, "_eager"),
    "loading": (GuardedFunction, "__init__"),
    "Dynamo": (GuardedFunction, "__call__"),
    "guards": (guards.CheckFunctionManager, "__init__"),
    "tracing": (whole_step, "trace_step"),
    "recording": (WholeStep, "_answer"),
}
"""By their names the functions that they are spent in."""


class Stages:
    """Divides time among functions that call one another: what a function takes goes to it, and not to its caller."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._wait = wait  # for the device, at the end of each
        self._within: list[str] = []
        self._since = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within, functions are timed."""
        with ExitStack() as patches:
            for name, (owner, attribute) in STAGES.items():
                timed = self._timed(name, getattr(owner, attribute))
                patches.enter_context(mock.patch.object(owner, attribute, timed))
            yield

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._turn()
            self._within.append(name)
            try:
                return function(*args, **kwargs)
            finally:
                self._wait()
                self._turn()
                self._within.pop()

        return call

    def _turn(self) -> None:
        """Counts the time since the last turn for what it was spent in."""
        now = time.perf_counter()
        if self._within:
            self.seconds[self._within[-1]] += now - self._since
        self._since = now


def measure(model: str, batch: int, precision: str, device: str = "cuda", exhaustive: bool = False) -> dict[str, float]:
    """Seconds of each stage, and of all of them.

    Raises:
        RuntimeError: the step is not replayed.
    """
    torch.backends.cudnn.benchmark = True
    if exhaustive:
        torch.backends.cudnn.benchmark_limit = 0
    workload = models.build(model, seed=0)
    module = workload.module.to(device)
    args = workload.batch(batch, index=0, device=torch.device(device))
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    stages = Stages(wait)
    with stages.watched():
        started = time.perf_counter()
        optimizer = torch.optim.Adam(module.parameters(), lr=workload.learning_rate)
        amp = precision == "amp"
        step = kitsune.TrainStep(module, workload.loss_fn, optimizer, enable_amp=amp, setup_share=1.0)
        for _ in range(_MOST_STEPS):
            step(*args)
            wait()
            if step.status().replays:
                break
        else:
            raise RuntimeError(f"the step is not replayed:\n{step.status()}")
        seconds = time.perf_counter() - started
    return {**stages.seconds, "rest": seconds - sum(stages.seconds.values()), "in all": seconds}


def table(document: Mapping[str, Any]) -> str:
    """The stages as a Markdown table: of each the median of the rounds, and its share."""
    rounds: list[dict[str, float]] = document["rounds"]
    medians = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    search = ", exhaustive search" if document["exhaustive"] else ""
    lines = [
        f"{document['model']}, batch {document['batch']}, {document['precision']}{search}, commit {document['commit']}",
        "",
        "| until the first replay | s | |",
        "|---|--:|--:|",
    ]
    lines += [f"| {name} | {found:.2f} | {found / medians['in all']:.0%} |" for name, found in medians.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    search = {"exhaustive": "cuDNN tries all of its algorithms in the plain steps"}
    command.run("tests.benchmarks.setup_pace", __doc__, measure, table, on_cpu=True, flags=search)
