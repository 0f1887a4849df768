"""Rewrites a captured step: layouts, then templates, then regions of what they have left."""

from __future__ import annotations

import dataclasses
import logging
import operator
import time

import torch
from torch import fx

from kitsune.errors import Refusal
from kitsune.fusion.engine import FusionEngine
from kitsune.fusion.judge import Judge, Measured, Verdict
from kitsune.fusion.match import Alone
from kitsune.fusion.operands import convolutions_allow_tf32
from kitsune.fusion.templates import TEMPLATES
from kitsune.graph import dataflow
from kitsune.passes import pipeline
from kitsune.passes.channels_last import channels_last
from kitsune.passes.regions import INDUCTOR, Fused, fuse_regions
from kitsune.plan import Fusion
from kitsune.timing import CostCache

_log = logging.getLogger("kitsune")

_SILENT_SECONDS = 3.0

_CONVOLUTIONS = {torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default}


Rewritten = tuple[fx.GraphModule, tuple[Fusion, ...]]
"""A graph, and what was tried to make it."""


def rewritten(module: fx.GraphModule, device: torch.device) -> tuple[Rewritten, ...]:
    """What computes the same as `module` and may be faster on `device`: its operators fused, and with other layouts.

    Nothing where there is nothing to fuse and only one layout.
    """
    cleared = pipeline.run(module, pipeline.CLEARING)
    other = cleared if _rounds_by_layout(cleared) else channels_last(cleared)
    found = [_fused(cleared, device, ())]
    if other is not cleared:
        convolutions = tuple(node.name for node in other.graph.nodes if node.target in _CONVOLUTIONS)
        found.append(_fused(other, device, (Fusion("channels last", convolutions, None, None, None),)))
    return tuple(one for one in found if any(fusion.refusal is None for fusion in one[1]))


def _rounds_by_layout(module: fx.GraphModule) -> bool:
    """Whether cuDNN may round operands of convolutions to TF32: it does in one layout and not in another."""
    convolutions = [node for node in module.graph.nodes if node.target in _CONVOLUTIONS]
    return convolutions_allow_tf32() and any(node.args[0].meta["val"].dtype == torch.float32 for node in convolutions)


def _fused(cleared: fx.GraphModule, device: torch.device, before: tuple[Fusion, ...]) -> Rewritten:
    """With operators fused where that is measured to be faster."""
    cache = CostCache.of(device)
    measured = Measured(device, cache)
    judge = _Telling(measured)
    judged = _JudgedRegions(judge)

    def refuse(device: torch.device) -> Refusal | None:
        return Refusal("there was no time left to try it") if measured.is_late() else INDUCTOR.refuse(device)

    try:
        result, fusions = FusionEngine(TEMPLATES, judge).fuse(cleared)
        regions = fuse_regions(result, dataclasses.replace(INDUCTOR, refuse=refuse), judged)
    finally:  # an interrupt, perhaps: what is known by now need not be found out again
        note = cache.save()
        if note is not None:
            _log.info(note)
    return pipeline.run(regions.module, pipeline.FINISHING), (*before, *fusions, *judged.fusions(regions))


class _Telling:
    """A judge that tells the user why a step takes so long."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._begun = time.monotonic()
        self._has_told = False
        self._count = 0

    def __call__(self, alone: Alone) -> Verdict:
        self._count += 1
        _log.info("fusion, part %d: %s", self._count, " ".join(str(node) for node in alone.after.graph.nodes))
        if not self._has_told and time.monotonic() - self._begun > _SILENT_SECONDS:
            self._has_told = True
            _log.warning("operators of the training step are being fused: trying that out takes up to a minute, once")
        return self._judge(alone)


class _JudgedRegions:
    """Compares regions' operators with the graphs that they compute, and remembers the outcome."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._verdicts: dict[str, Verdict] = {}

    def __call__(self, module: fx.GraphModule, target: torch._ops.OpOverload) -> Refusal | None:
        verdict = self._verdicts[str(target)] = self._judge(_compared(module, target))
        return None if verdict.refusal is None else Refusal(verdict.refusal)

    def fusions(self, regions: Fused) -> tuple[Fusion, ...]:
        used = [
            Fusion(
                "region", one.nodes, self._verdicts[one.operator].before_us, self._verdicts[one.operator].after_us, None
            )
            for one in regions.regions
        ]
        left = [Fusion("region", one.nodes, None, None, str(one.refusal)) for one in regions.refused]
        return (*used, *left)


def _compared(module: fx.GraphModule, target: torch._ops.OpOverload) -> Alone:
    """A region's graph and a call of its operator, with the same inputs and results."""
    inputs = dataflow.placeholders(module.graph)
    after, given = fx.Graph(), fx.Graph()
    taken = [_copy_of(node, after) for node in inputs]
    call = after.call_function(target, tuple(taken))
    count = len(target._schema.returns)
    after.output([call] if count == 1 else [after.call_function(operator.getitem, (call, n)) for n in range(count)])
    given.output([_copy_of(node, given) for node in inputs])
    return Alone(module, fx.GraphModule({}, after), fx.GraphModule({}, given))


def _copy_of(node: fx.Node, graph: fx.Graph) -> fx.Node:
    copy = graph.placeholder(node.name)
    copy.meta["val"] = node.meta["val"]
    return copy
