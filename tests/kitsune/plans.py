"""Decides which plan a step is replayed by, whatever is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import fx

from kitsune.background import Background, wait_until_quiet
from kitsune.engine import contest, planning, region, rewriting
from kitsune.engine.fusing import Fusing
from kitsune.fusion import judge
from kitsune.fusion.ahead import compile_ahead
from kitsune.fusion.match import Alone
from kitsune.kernels import tuning
from kitsune.plan import Plan


def let_win(monkeypatch: pytest.MonkeyPatch, is_wanted: Callable[[Plan], bool]) -> None:
    """Of the plans that may be faster than the one in order the first that `is_wanted` is tried, after few steps wins.

    Whatever memory it takes. Without one, the plan in order stays.
    """
    others = planning.others

    def only(*args: Any, **options: Any) -> tuple[planning.Planned, ...]:
        return tuple(planned for planned in others(*args, **options) if is_wanted(planned.plan))[:1]

    add = region.Region._add

    def add_one(one: region.Region, found: Sequence[planning.Planned], inputs: Sequence[torch.Tensor]) -> None:
        wanted = [planned for planned in found if is_wanted(planned.plan)]
        add(one, wanted[: 1 - len(one._others)], inputs)

    monkeypatch.setattr(planning, "others", only)
    monkeypatch.setattr(region.Region, "_add", add_one)
    monkeypatch.setattr(region.Region, "_most_and_room", lambda *_: (None, None))
    monkeypatch.setattr(contest.Contest, "_best", lambda contest: 1)
    for name, value in (("_SAMPLES", 1), ("_TURN", 2), ("_RUNOFF_TURNS", 1), ("_RUNOFF_TURN", 2)):
        monkeypatch.setattr(contest, name, value)


def compile_at_once(
    parts: Sequence[Alone], device: torch.device, *, limit_s: float
) -> Iterator[Background[bool | None]]:
    """As `compile_ahead`, but that nothing is left to the background."""
    for background in compile_ahead(parts, device, limit_s=limit_s):
        assert background.num_jobs
        wait_until_quiet()
    yield from ()


def fused_at_once(module: fx.GraphModule, device: torch.device) -> Fusing:
    """One that has its result."""
    under_way = Fusing(module, [torch.empty(0, device=device)])
    while not under_way.advance():
        wait_until_quiet()
    return under_way


def fuse_all_that_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets replacements be used whatever their times, in channels_last where that is tried. Kernels keep one form."""
    result, new = Fusing.result, Fusing.new
    monkeypatch.setattr(Fusing, "result", lambda under_way: result(under_way)[-1:])
    monkeypatch.setattr(Fusing, "new", lambda under_way: new(under_way)[-1:])
    monkeypatch.setattr(rewriting, "compile_ahead", lambda *_, **__: ())
    monkeypatch.setattr(judge, "device_us", lambda *_, **__: 1.0)
    monkeypatch.setattr(judge, "_CLEARLY_FASTER", 1.0)
    monkeypatch.setattr(judge.Measured, "is_late", lambda _: False)
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setattr(tuning, "_fastest", lambda _key, forms, _run, _device: forms[0])
