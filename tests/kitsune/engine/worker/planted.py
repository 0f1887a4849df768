"""Imported by a worker: templates whose replacements end the process, hang, or give other numbers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, fx

from kitsune.engine import rewriting
from kitsune.fusion import judge
from kitsune.fusion.match import Builder, Match
from kitsune.timing import trials

_aten = torch.ops.aten
NAMES = {
    _aten.relu.default: "fault",
    _aten.tanh.default: "hang",
    _aten.sigmoid.default: "other",
    _aten.exp.default: "good",
}


def _fault(x: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGSEGV)
    return x


def _hang(x: Tensor) -> Tensor:
    time.sleep(600.0)
    return x


_RUN = {"fault": _fault, "hang": _hang, "other": lambda x: x.sigmoid() + 1.0, "good": lambda x: x.exp()}

for name, run in _RUN.items():
    torch.library.define(f"planted::{name}", "(Tensor x) -> Tensor")
    torch.library.impl(f"planted::{name}", "CPU", run)
    torch.library.register_fake(f"planted::{name}", torch.empty_like)


def template(node: fx.Node) -> Iterator[Match]:
    """Replaces an operator by the one that is planted for it."""
    name = NAMES.get(node.target)
    if name is not None:

        def build(builder: Builder) -> Sequence[fx.Node]:
            return [builder.call(getattr(torch.ops.planted, name).default, node.args[0])]

        yield Match.of(f"planted {name}", [node], [node], build)


def plant() -> None:
    """In the worker: nothing else is tried, and nothing takes longer than a second."""
    rewriting.OF_LAYERS = rewriting.TEMPLATES = (template,)
    rewriting.OF_THE_STEP = ()
    rewriting._with_regions = lambda fused, *_: fused
    trials.TRIAL_SECONDS = 1.5
    judge.device_us = lambda *_, **__: 1.0
    judge._CLEARLY_FASTER = 1.0
