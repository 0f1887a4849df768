"""Rewrites a captured step while it trains: layouts, then templates, then regions of what they have left."""

from __future__ import annotations

import dataclasses
import logging
import operator
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import fx

from kitsune.background import Background
from kitsune.errors import Refusal
from kitsune.fusion.ahead import Foresight, compile_ahead
from kitsune.fusion.engine import FusionEngine
from kitsune.fusion.judge import LATE, SHORT_OF_MEMORY, Judge, Measured, Verdict, known
from kitsune.fusion.match import Alone
from kitsune.fusion.operands import convolutions_allow_tf32
from kitsune.fusion.templates import OF_LAYERS, OF_THE_STEP, TEMPLATES
from kitsune.graph import dataflow
from kitsune.graph.signature import graph_signature
from kitsune.kernels.inductor import PROGRAMS
from kitsune.kernels.regions import Code
from kitsune.passes import pipeline
from kitsune.passes.channels_last import channels_last
from kitsune.passes.compose_updates import compose_updates, is_update
from kitsune.passes.programs import part, program_operator
from kitsune.passes.regions import INDUCTOR, Fused, fuse_regions
from kitsune.passes.spare_copies import spare_copies
from kitsune.plan import Fusion
from kitsune.timing import CostCache, trials

_log = logging.getLogger("kitsune")

_SILENT_SECONDS = 3.0

# For all layouts, and as long again for variants; what is not compiled then is compiled when it is tried.
_COMPILING_SECONDS = 30.0

# For each layout. Large models have more layers than are tried in that time; what is left then is tried in a process
# to come, with the same cache.
_SECONDS_FOR_LAYERS = 30.0
_SECONDS_FOR_THE_STEP = 15.0
_SECONDS_FOR_REGIONS = 15.0

_CONVOLUTIONS = {torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default}


Rewritten = tuple[fx.GraphModule, tuple[Fusion, ...]]
"""A graph, and what was tried to make it."""


def form_of(fusions: Sequence[Fusion]) -> str:
    """What was done to a program, in words: which code was generated for all of it, or its layout and fusions."""
    used = [fusion.template for fusion in fusions if fusion.refusal is None]
    named = [name for name in used if name.startswith(GENERATED) or name in LAYOUTS]
    return ", ".join(named or (["fused"] if used else ["as captured"]))


def is_final(rewritten: Rewritten) -> bool:
    """Whether nothing was left out that may be tried another time."""
    return not any(fusion.refusal in (LATE, SHORT_OF_MEMORY) for fusion in rewritten[1])


Course = Generator[Background[bool | None], None, tuple[Rewritten, ...]]
"""Yields what is done in the background; to be resumed when that is over."""


CHANNELS_LAST, SPARED_COPIES = "channels last", "spared copies"
LAYOUTS = (CHANNELS_LAST, SPARED_COPIES)
"""The names of what is done for the layout of a whole program."""

GENERATED = "generated code"
"""The beginning of the names of fusions of all operators, or nearly all."""


def generated(module: fx.GraphModule, cache: CostCache) -> Iterator[Callable[[], Rewritten]]:
    """Ways to make one operator of `module`, a captured step, for which Inductor generates code, the quickest first.

    All but the update, for all parameters of which there are fused operators; and all of it.

    Each may raise anything: Inductor does not compile it, or ended a process that tried that.
    """
    cleared = pipeline.run(module, pipeline.CLEARING)
    if any(is_update(node) for node in cleared.graph.nodes):
        yield partial(_generated, cleared, is_update, cache, "all but the update")
    composed = pipeline.run(cleared, (("compose updates", compose_updates),))
    yield partial(_generated, composed, lambda _: False, cache, "the whole step")


def _generated(module: fx.GraphModule, stays: Callable[[fx.Node], bool], cache: CostCache, what: str) -> Rewritten:
    taken = part(module, stays)
    entry = f"program {graph_signature(taken.module.graph)}"
    if cache.get(entry) == trials.KILLED_US:
        raise RuntimeError("it ended the process that compiled it, or hung there")
    trials.trying(f"generated code for {what}", {entry: trials.KILLED_US}, trials.PROGRAM_SECONDS)
    made = taken.rebuilt(program_operator(taken.module, PROGRAMS))
    return made, (Fusion(f"{GENERATED}, {what}", taken.names, None, None, None),)


def rewriting(module: fx.GraphModule, device: torch.device, telling: Telling) -> Course:
    """Makes what computes the same as `module`, a captured step on `device`, and may be faster."""
    layouts, cache = _layouts(module), CostCache.of(device)
    guesses = [_guessed(layout.module, device, cache) for layout in layouts]
    parts = {key: part for guess in guesses for key, part in guess.parts.items()}
    if not trials.are_one_by_one():
        yield from compile_ahead(list(parts.values()), device, limit_s=_COMPILING_SECONDS)
    found = _fused(layouts, guesses, device, cache, telling)
    return tuple(one for one in found if any(fusion.refusal is None for fusion in one[1]))


def _layouts(module: fx.GraphModule) -> list[_Layout]:
    cleared = pipeline.run(module, pipeline.CLEARING)
    other = cleared if _rounds_by_layout(cleared) else channels_last(cleared)
    layouts = [_Layout(cleared, ())]
    if other is not cleared:
        convolutions = [node.name for node in other.graph.nodes if node.target in _CONVOLUTIONS]
        layouts.append(_Layout(other, _of_layout(CHANNELS_LAST, convolutions)))
    spared = spare_copies(cleared)
    if spared is not cleared:
        layouts.append(_Layout(spared, _of_layout(SPARED_COPIES, sorted(_copies(cleared) - _copies(spared)))))
    return layouts


class _Layout(NamedTuple):
    """A cleared graph in one of the layouts, and what was done for it."""

    module: fx.GraphModule
    done: tuple[Fusion, ...]


def _of_layout(name: str, operators: Sequence[str]) -> tuple[Fusion, ...]:
    """What was done to these operators; it is measured with the whole step."""
    return (Fusion(name, tuple(operators), None, None, None),)


def _copies(module: fx.GraphModule) -> set[str]:
    return {node.name for node in module.graph.nodes if node.target is torch.ops.aten.clone.default}


def _rounds_by_layout(module: fx.GraphModule) -> bool:
    """Whether cuDNN may round operands of convolutions to TF32: it does in one layout and not in another."""
    convolutions = [node for node in module.graph.nodes if node.target in _CONVOLUTIONS]
    return convolutions_allow_tf32() and any(node.args[0].meta["val"].dtype == torch.float32 for node in convolutions)


def _fused(
    layouts: Sequence[_Layout], guesses: Sequence[_Guess], device: torch.device, cache: CostCache, telling: Telling
) -> list[Rewritten]:
    """With operators fused where that is measured to be faster."""
    found: list[Rewritten] = []
    try:
        for layout, guess in zip(layouts, guesses, strict=True):
            tried = guess.fused
            if tried is None:
                layers = telling.judge(Measured(device, cache, limit_s=_SECONDS_FOR_LAYERS))
                module, of_layers = FusionEngine(OF_LAYERS, layers).fuse(layout.module)
                step = telling.judge(Measured(device, cache, limit_s=_SECONDS_FOR_THE_STEP))
                module, of_step = FusionEngine(OF_THE_STEP, step).fuse(module)
                tried = module, (*of_layers, *of_step)
            regions = Measured(device, cache, limit_s=_SECONDS_FOR_REGIONS)
            result, fusions = _with_regions(tried, telling.judge(regions), regions.is_late, cache)
            found.append((result, (*layout.done, *fusions)))
    finally:  # an interrupt, perhaps: what is known by now need not be found out again
        note = cache.save()
        if note is not None:
            _log.info(note)
    return found


class _Guess(NamedTuple):
    """What fusing a graph will probably meet.

    Attributes:
        parts: will be tried or used.
        fused: the outcome, where it is certain.
    """

    parts: Mapping[str, Alone]
    fused: Rewritten | None


def _guessed(module: fx.GraphModule, device: torch.device, cache: CostCache) -> _Guess:
    foresight = Foresight(lambda key: known(key, device, cache))
    fused = FusionEngine(TEMPLATES, foresight).fuse(module)
    return _Guess(foresight.parts, fused if foresight.is_certain else None)


def _with_regions(fused: Rewritten, judge: Judge, is_late: Callable[[], bool], cache: CostCache) -> Rewritten:
    module, fusions = fused
    judged = _JudgedRegions(judge)

    def refuse(device: torch.device) -> Refusal | None:
        return Refusal(LATE) if is_late() else INDUCTOR.refuse(device)

    def compile(region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Code:
        entry = f"region {graph_signature(region.graph)}"
        if cache.get(entry) == trials.KILLED_US:
            raise RuntimeError("it ended the process that compiled it, or hung there")
        trials.trying(f"generated code: {' '.join(map(str, region.graph.nodes))}", {entry: trials.KILLED_US})
        return INDUCTOR.compile(region, inputs)

    backend = dataclasses.replace(INDUCTOR, refuse=refuse, compile=compile)
    regions = fuse_regions(module, backend, judged)
    return pipeline.run(regions.module, pipeline.FINISHING), (*fusions, *judged.fusions(regions))


class Telling:
    """Tells the user what goes on, and why a step takes so long.

    Args:
        waits: whether the training waits while something is timed.
    """

    def __init__(self, *, waits: bool) -> None:
        self._begun = self._latest = time.monotonic()
        self._has_told = not waits
        self._count = 0

    def tell(self) -> None:
        """To be called now and then."""
        if not self._has_told and time.monotonic() - self._begun > _SILENT_SECONDS:
            self._has_told = True
            _log.warning(
                "operators of the training step are being fused: that takes up to three minutes, once; "
                "the training goes on while kernels are compiled, and waits while operators are timed"
            )

    def tell_progress(self, background: Background[bool | None]) -> None:
        """To be called now and then while kernels are compiled."""
        self.tell()
        if time.monotonic() - self._latest > _SILENT_SECONDS:
            self._latest = time.monotonic()
            _log.info("fusion: kernels of %d of %d parts are compiled", background.num_done, background.num_jobs)

    def judge(self, judge: Judge) -> Judge:
        """The same, but that it tells."""

        def judged(alone: Alone) -> Verdict:
            self._count += 1
            _log.info("fusion, part %d: %s", self._count, " ".join(str(node) for node in alone.after.graph.nodes))
            self.tell()
            return judge(alone)

        return judged


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
