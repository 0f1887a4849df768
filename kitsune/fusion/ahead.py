"""Compiles kernels of many parts beside the training, before the parts are tried one by one."""

from __future__ import annotations

import logging
import math
import operator
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import fx

from kitsune.background import Background
from kitsune.device import leave_recordings_alone, synchronize
from kitsune.errors import first_line
from kitsune.fusion.examples import examples
from kitsune.fusion.judge import Verdict, key_of
from kitsune.fusion.match import Alone
from kitsune.graph import dataflow
from kitsune.graph.signature import graph_signature
from kitsune.kernels import compile_client, triton_key
from kitsune.kernels.tuning import Compilers, NotChosenYet
from kitsune.timing import CostCache

_log = logging.getLogger("kitsune")

# So many parts run at a time, and fewer where their values would take more than that of the memory that is free; what
# takes more alone is compiled when it is tried. The training, which goes on beside them, has run the step before: for
# whatever else it does meanwhile, three quarters of what it has never needed are left.
_MOST_PARTS = 16
_MOST_MEMORY = 0.25

_CONVOLUTIONS = {torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default}


class Foresight:
    """A judge that guesses: it takes what it does not know to be refused. So an engine meets what it will meet.

    What is tried only after a refusal is not foreseen.

    Args:
        known: the verdict on what has that `key_of`; None where it takes a trial.

    Attributes:
        parts: what it has taken, in order, by the `graph_signature` of the replacement.
        is_certain: whether every verdict was known.
    """

    def __init__(self, known: Callable[[str], Verdict | None]) -> None:
        self._known = known
        self.parts: dict[str, Alone] = {}
        self.is_certain = True

    def __call__(self, alone: Alone) -> Verdict:
        verdict = self._known(key_of(alone))
        if verdict is None:
            self.is_certain = False
        if verdict is None or verdict.refusal is None:
            self.parts.setdefault(graph_signature(alone.after.graph), alone)
        return verdict or Verdict(None)


def expect(device: torch.device) -> None:
    """Kernels for `device` will probably be needed soon; all have to be compiled where nothing was ever timed on it."""
    triton_key.make_ahead()
    if CostCache.of(device).is_empty:
        compile_client.start()


def compile_ahead(
    parts: Sequence[Alone], device: torch.device, *, limit_s: float
) -> Generator[Background[bool | None], None, None]:
    """Runs what would replace `parts` on random values, so that its kernels are compiled, in all forms worth timing.

    Threads do that. It yields what they do; to be resumed when the device is quiet, on the thread of the training,
    which may go on until then. When it has ended, its threads have, too. If it is closed before, they end soon: kernels
    that are being compiled are finished, no other is begun.

    Variants of a kernel for which one form is chosen are compiled in that form: where there are several, the forms of
    the first are timed when it is resumed, as its trial would do. What fails here, for want of memory perhaps, is
    compiled when it is tried, and fails there.

    Args:
        limit_s: threads begin no kernel after so many seconds; nor are forms timed for longer.
    """
    begun, waiting = yield from _compile_all([part for part in parts if _has_kernels(part)], device, limit_s)
    if not waiting:
        return
    deadline = time.monotonic() + limit_s
    for part in begun:
        if time.monotonic() < deadline:
            _run(part, device)
    yield from _compile_all(waiting, device, limit_s)


def _compile_all(
    parts: Sequence[Alone], device: torch.device, limit_s: float
) -> Generator[Background[bool | None], None, tuple[list[Alone], list[Alone]]]:
    """Returns those that ran, and those that wait for a choice between the forms that were compiled for these."""
    most_bytes = _most_bytes(device)
    parts = [part for part in parts if _num_bytes(part) <= most_bytes]
    if not parts:
        return [], []
    at_a_time = min(_MOST_PARTS, most_bytes / max(1, *map(_num_bytes, parts)))
    compilers = Compilers(limit_s)
    jobs = [partial(_compile, part, device, compilers) for part in parts]
    background = Background(jobs, int(at_a_time), compilers.stop)
    try:
        yield background
    finally:  # it may be closed, and not be resumed
        compilers.stop()
    with compilers:
        outcomes = list(zip(parts, background.results(), strict=True))
    synchronize(device)
    return [part for part, waits in outcomes if waits is False], [part for part, waits in outcomes if waits]


def _most_bytes(device: torch.device) -> float:
    """How many all parts that run at a time may take beside the training."""
    if device.type != "cuda":
        return math.inf
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return _MOST_MEMORY * free_bytes


def _num_bytes(part: Alone) -> int:
    """Of all its values, as if none gave its memory to another."""
    graphs = (part.given.graph, part.after.graph)
    return sum(tensor.nbytes for graph in graphs for node in graph.nodes for tensor in dataflow.tensors(node))


def _compile(part: Alone, device: torch.device, compilers: Compilers) -> bool | None:
    """On a thread of its own: what `choose` does meanwhile on others is as ever.

    True if the part is to wait for a choice; None if it was too late for it.
    """
    if compilers.have_stopped:
        return None
    leave_recordings_alone(device)
    with compilers.ahead():
        return _run(part, device)


def _run(part: Alone, device: torch.device) -> bool:
    on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    try:
        with on_device, torch.no_grad(), torch.autocast(device.type, enabled=False):
            part.after.forward(*examples(part, device))
    except NotChosenYet:
        return True
    except Exception as error:  # noqa: BLE001 - its trial will fail as well, and tell
        _log.debug("fusion: a part was not compiled ahead: %s: %s", type(error).__name__, first_line(error))
    return False


def _has_kernels(part: Alone) -> bool:
    """Whether there is something to compile, and no convolution of PyTorch's to run.

    cuDNN may time its algorithms at their first run, which nothing must disturb.
    """
    targets = {node.target for module in (part.after, part.given) for node in module.graph.nodes if not _is_end(node)}
    return targets.isdisjoint(_CONVOLUTIONS) and not all(map(_is_of_torch, targets))


def _is_end(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output")


def _is_of_torch(target: object) -> bool:
    is_aten = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
    return is_aten or target is operator.getitem
