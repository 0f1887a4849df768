"""What `status()` returns."""

from __future__ import annotations

import dataclasses
import html
import json
from dataclasses import dataclass
from typing import Any

from kitsune.memory.pool import PoolStatistics
from kitsune.plan import Plan


@dataclass(frozen=True)
class ScheduleTime:
    """A schedule of the captured step, or of a loop's backward pass, that was tried.

    Attributes:
        strategy: how it was made: `"in order"`, `"chains"` or `"list"`.
        num_streams: the streams that it uses.
        fused: whether it is of the graph with its operators fused.
        predicted_us: simulated microseconds of one.
        measured_us: the median time that one took on the device; None where it was not measured. One that is faster
            there is not chosen where it takes longer to launch, and the loop longer with it.
        chosen: whether it is in use.
        roomy: whether it was made to take, if that is faster, what the step captured by hand would take beyond the
            step in order; others need hardly more than that one.
    """

    strategy: str
    num_streams: int
    fused: bool
    predicted_us: float
    measured_us: float | None
    chosen: bool
    roomy: bool = False

    def __str__(self) -> str:
        streams = "1 stream" if self.num_streams == 1 else f"{self.num_streams} streams"
        measured = "not measured" if self.measured_us is None else f"measured {self.measured_us:.0f} us"
        use = ", in use" if self.chosen else ""
        fused = ", fused" if self.fused else ""
        roomy = ", with more memory" if self.roomy else ""
        return f"{self.strategy} on {streams}{fused}{roomy}: predicted {self.predicted_us:.0f} us, {measured}{use}"


@dataclass(frozen=True, repr=False)
class Status:
    """What Kitsune does with the user's training step at this moment, and why.

    Attributes:
        mode: `"replay"`: the captured graph runs; `"measuring"`: steps run eagerly or replayed
            while both are timed; `"eager"`: plain PyTorch runs; `"idle"`: no call of the model was followed yet.
        reason: why `mode` is what it is.
        covered: the parts of the step that the captured graph replaces, of `"forward"`, `"loss"`,
            `"backward"`, `"update"`.
        executor: what runs the captured graph: `"cuda graph"`, `"in order"` or `"inductor"`; None
            where nothing is captured.
        fused: whether operators of the captured graph have been fused.
        setup_seconds: wall time for which the training has waited for tracing, compiling, warming up, capturing and
            trials so far; what goes on beside it takes none.
        eager_seconds: the best measured time of an eager step; None where it was not measured.
        replay_seconds: the same of a replayed step.
        gain: `eager_seconds / replay_seconds`.
        break_even_steps: replayed steps after which the setup has paid for itself.
        graphs: how many captured graphs are held.
        replays: steps that were replayed; in a loop, calls of the model.
        fallbacks: steps (or parts of steps) that were to be replayed and ran eagerly, as what could not be captured.
        refusals: what was not captured or not replayed, and why; each reason once.
        not_in_effect: options that were given, but change nothing.
        schedules: those of the captured step, or of a loop's backward pass, that were tried, the simplest first.
        plan: the plan that is in use; None where there is none.
        memory: what the pool has done that holds the arenas of a `TrainStep`'s plans; None where there is no plan. Most
            values of most plans lie in the memory of PyTorch's allocator, which `torch.cuda.memory_stats` is about.
    """

    mode: str
    reason: str
    covered: tuple[str, ...] = ()
    executor: str | None = None
    fused: bool = False
    setup_seconds: float = 0.0
    eager_seconds: float | None = None
    replay_seconds: float | None = None
    graphs: int = 0
    replays: int = 0
    fallbacks: int = 0
    refusals: tuple[str, ...] = ()
    not_in_effect: tuple[str, ...] = ()
    schedules: tuple[ScheduleTime, ...] = ()
    plan: Plan | None = None
    memory: PoolStatistics | None = None

    @property
    def gain(self) -> float | None:
        if self.eager_seconds is None or self.replay_seconds is None:
            return None
        return self.eager_seconds / self.replay_seconds

    @property
    def break_even_steps(self) -> int | None:
        if self.eager_seconds is None or self.replay_seconds is None or self.replay_seconds >= self.eager_seconds:
            return None
        return int(self.setup_seconds / (self.eager_seconds - self.replay_seconds)) + 1

    def as_dict(self) -> dict[str, Any]:
        """All fields and derived figures, as JSON can hold them."""
        values = dataclasses.asdict(dataclasses.replace(self, plan=None))
        for name in ("covered", "refusals", "not_in_effect", "schedules"):
            values[name] = list(values[name])
        plan = None if self.plan is None else json.loads(self.plan.to_json())
        return {**values, "plan": plan, "gain": self.gain, "break_even_steps": self.break_even_steps}

    def __str__(self) -> str:
        rows = self._rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(["Kitsune", *(f"  {name:<{width}}  {text}" for name, text in rows)])

    def __repr__(self) -> str:
        """As it is printed: consoles and notebooks show this."""
        return str(self)

    def _repr_html_(self) -> str:
        """A table, which notebooks show in place of the text."""
        cells = "".join(
            f"<tr><th style='text-align: left'>{html.escape(name)}</th>"
            f"<td style='text-align: left'>{html.escape(text)}</td></tr>"
            for name, text in self._rows()
        )
        return f"<table><caption>Kitsune</caption>{cells}</table>"

    def _rows(self) -> list[tuple[str, str]]:
        """What a reader is told: names and texts."""
        rows = [("mode", f"{self.mode} ({self.reason})"), ("covered", ", ".join(self.covered) or "nothing")]
        if self.executor:
            rows.append(("executor", self.executor + (", operators fused" if self.fused else "")))
        if self.gain is not None:
            rows.append(("eager step", f"{_duration(self.eager_seconds)}"))
            rows.append(("replayed step", f"{_duration(self.replay_seconds)}, gain {self.gain:.2f}x"))
        rows.append(("setup", f"{self.setup_seconds:.2f} s" + self._pays_off()))
        rows.append(("graphs", f"{self.graphs} held, {self.replays} replays, {self.fallbacks} fallbacks"))
        rows += [("schedule", str(schedule)) for schedule in self.schedules]
        if self.memory is not None:
            rows.append(("arenas", str(self.memory)))
        rows += [("left out", refusal) for refusal in self.refusals]
        return [*rows, *(("not in effect", option) for option in self.not_in_effect)]

    def _pays_off(self) -> str:
        return "" if self.break_even_steps is None else f", pays off after {self.break_even_steps} steps"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "not measured"
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
