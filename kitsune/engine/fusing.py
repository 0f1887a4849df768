"""A captured step is made faster while it trains: by the worker, or in this process where there can be no worker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from kitsune.background import Background, is_quiet
from kitsune.capture.retention import no_traces
from kitsune.engine.rewriting import Course, Rewritten, Telling, form_of, rewriting
from kitsune.engine.store import ProgramStore
from kitsune.engine.worker.client import Ticket, Worker, refuse_worker, worker_of
from kitsune.engine.worker.delivery import loaded
from kitsune.errors import Refusal, first_line
from kitsune.graph.values import mode_of

_log = logging.getLogger("kitsune")


class Memory(NamedTuple):
    """What was chosen for one program, on disk."""

    store: ProgramStore
    key: str

    def read(self) -> Mapping[str, Any] | None:
        """None where that is not known."""
        return self.store.read_choice(self.key)

    def write(self, choice: Mapping[str, Any]) -> None:
        """Keeps it for the next process."""
        self.store.write_choice(self.key, choice)


class _Way(Protocol):
    """Somewhere a program is made faster.

    Attributes:
        memory: see `Fusing`.
        wanted: the form of what is of use; None for all.
    """

    memory: Memory | None
    wanted: str | None

    def may_go_on(self) -> bool:
        """Whether `advance` would do something. It takes next to nothing to ask."""

    def advance(self) -> bool:
        """Goes on for a moment; whether it has come to an end. May raise what went wrong."""

    def new(self) -> list[Rewritten]:
        """What was found since this was last asked."""

    def describe(self) -> str:
        """What is being done."""

    def close(self) -> None:
        """Ends it."""


class _UnservedError(Exception):
    """The worker cannot take the program."""


class Fusing:
    """Makes what computes the same as a captured step and may be faster: its operators fused, and with other layouts.

    It is under way while the step goes on training. `advance` is to be called inside the user's steps, before anything
    of them runs: the device is timed then, for a small share of the time.

    Args:
        module: the step.
        inputs: such as it takes.
        refused: told what was given up on the way, and why.
        is_whole: whether code is to be generated for all of it as one, too.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[torch.Tensor],
        refused: Callable[[Refusal], None] = lambda _: None,
        *,
        is_whole: bool = False,
    ) -> None:
        self.module, self._device = module, inputs[0].device
        self._error: Exception | None = None
        self._is_over = False
        self._found: list[Rewritten] = []
        self._num_given = 0
        self._way: _Way = _way(module, inputs, refused, is_whole)

    def may_go_on(self) -> bool:
        """Whether `advance` would do something. To be asked at each step, so that the user is told meanwhile."""
        return self._way.may_go_on()

    def advance(self) -> bool:
        """Goes on, as far as nothing has to be waited for. Whether it has come to an end, and there is a `result`.

        After an interrupt, which it passes on, it begins anew: what was compiled and timed is known.
        """
        if self._is_over:
            return True
        if not self.may_go_on():
            return False
        try:
            with no_traces(), torch.no_grad(), torch.autocast(self._device.type, enabled=False):
                self._is_over = self._way.advance()
                self._found += self._way.new()
        except _UnservedError as error:
            _log.info("kernels are tried in this process: %s", error)
            self._way = _Here(self.module, self._device)
        except Exception as error:  # noqa: BLE001 - compilers, drivers and too little memory fail in many ways
            self._error = error.with_traceback(None)  # which would keep alive all that was allocated
            self._is_over = True
        return self._is_over

    def result(self) -> tuple[Rewritten, ...]:
        """All graphs that were found; none where there is nothing to fuse and only one layout.

        Raises:
            Exception: what went wrong.
        """
        assert self._is_over
        if self._error is not None:
            raise self._error
        return tuple(self._found)

    def new(self) -> tuple[Rewritten, ...]:
        """Those that were found since this was last asked; there may be some before the end."""
        new = tuple(self._found[self._num_given :])
        self._num_given = len(self._found)
        return new

    @property
    def memory(self) -> Memory | None:
        """Where it is kept what was chosen for the program; None if that is not kept."""
        return self._way.memory

    def want(self, form: str) -> None:
        """From now on only programs of that form (see `kitsune.engine.rewriting.form_of`) are of use."""
        self._way.wanted = form

    def describe(self) -> str:
        """What is being done, as a `Status` says it."""
        return self._way.describe()

    def close(self) -> None:
        """Ends it. Kernels that are being compiled are finished in the background, as when it is deleted."""
        self._way.close()


def _way(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], refused: Callable[[Refusal], None], is_whole: bool
) -> _Way:
    device = inputs[0].device
    refusal = refuse_worker(device)
    if refusal is None:
        worker = worker_of(device)
        try:
            ticket = worker.hand_over(module, inputs, is_whole=is_whole)
            return _InWorker(ticket, worker, mode_of(module.graph), refused)
        except (OSError, TypeError, ValueError) as error:
            refusal = Refusal(f"the program cannot be handed over to a second process: {error}")
    _log.info("kernels are tried in this process: %s", refusal)
    return _Here(module, device)


class _Here:
    """In this process: kernels are compiled in the background, and the step waits while they are timed."""

    def __init__(self, module: fx.GraphModule, device: torch.device) -> None:
        self.memory: Memory | None = None
        self.wanted: str | None = None
        self._module, self._device = module, device
        self._telling = Telling(waits=True)
        self._course: Course | None = None
        self._background: Background[bool | None] | None = None  # the latest
        self._found: list[Rewritten] = []

    def may_go_on(self) -> bool:
        if is_quiet():
            return True
        if self._background is not None:
            self._telling.tell_progress(self._background)
        return False

    def advance(self) -> bool:
        self._course = self._course or rewriting(self._module, self._device, self._telling)
        try:
            self._background = next(self._course)
        except StopIteration as end:
            self._found += end.value
            return True
        except BaseException as error:
            if not isinstance(error, Exception):  # an interrupt
                self._course = None
            raise
        return False

    def new(self) -> list[Rewritten]:
        found, self._found = self._found, []
        return found

    def describe(self) -> str:
        if self._background is None:
            return "operators of the captured step are about to be fused"
        compiled = f"{self._background.num_done} of {self._background.num_jobs} parts"
        return f"kernels of fused operators are being compiled ({compiled}); steps are replayed as captured meanwhile"

    def close(self) -> None:
        if self._course is not None:
            self._course.close()


class _InWorker:
    """By the worker. A thread loads what it has found, beside the training: generated code takes seconds to load."""

    def __init__(
        self, ticket: Ticket, worker: Worker, mode: FakeTensorMode, refused: Callable[[Refusal], None]
    ) -> None:
        self.memory: Memory | None = Memory(worker.store, ticket.key)
        self.wanted: str | None = None
        self._ticket, self._worker, self._mode, self._refused = ticket, worker, mode, refused
        self._num_taken = 0  # of what was found
        self._loading: Background[Rewritten] | None = None
        self._arrived: list[Rewritten] = []

    def may_go_on(self) -> bool:
        if self._loading is not None:
            return self._loading.num_done > 0
        return self._num_taken < len(self._ticket.found) or self._ticket.is_over or self._worker.may_look()

    def advance(self) -> bool:
        if self._loading is not None:
            self._end_loading(self._loading)
        elif self._num_taken < len(self._ticket.found):
            one = self._ticket.found[self._num_taken]
            self._num_taken += 1
            if self.wanted in (None, form_of(one.fusions)):
                load = partial(loaded, one, self._mode, self._worker.device)
                self._loading = Background([load], 1, _nothing)
        elif not self._ticket.is_over:
            self._worker.look()
            while self._ticket.refusals:
                self._refused(self._ticket.refusals.pop(0))
        if self._loading is not None or self._num_taken < len(self._ticket.found) or not self._ticket.is_over:
            return False
        if self._ticket.failure is not None:
            raise (_UnservedError if self._ticket.is_unserved else RuntimeError)(self._ticket.failure)
        return True

    def new(self) -> list[Rewritten]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def describe(self) -> str:
        if self._loading is not None:
            return "a faster form of the captured step is being loaded"
        num_done, num_parts = self._ticket.progress
        compiled = f" ({num_done} of {num_parts} parts are compiled)" if num_parts else ""
        return f"faster forms are tried in a second process{compiled}; steps are replayed as captured meanwhile"

    def close(self) -> None:
        self._worker.cancel(self._ticket)

    def _end_loading(self, loading: Background[Rewritten]) -> None:
        """What cannot be loaded is left out."""
        try:
            self._arrived += loading.results()
        except Exception as error:  # noqa: BLE001 - compilers and drivers fail in many ways
            reason = f"a program that the second process has found cannot be loaded ({type(error).__name__}"
            self._refused(Refusal(f"{reason}: {first_line(error)})"))
        self._loading = None


def _nothing() -> None:
    """A thread that loads code comes to its end soon."""
