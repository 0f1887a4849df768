"""The training's side of the worker: hands programs over, grants turns on the device, survives the worker."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import fx

from kitsune.device import synchronize
from kitsune.engine.store import ProgramStore, key_of
from kitsune.engine.worker import start
from kitsune.engine.worker.messages import (
    Cancel,
    Done,
    Failed,
    Faster,
    Found,
    Go,
    Job,
    Progress,
    Ready,
    Result,
    Told,
    Trying,
    Turn,
)
from kitsune.engine.worker.samples import sampled
from kitsune.engine.worker.switches import switches
from kitsune.errors import Refusal
from kitsune.fusion import ahead
from kitsune.graph.serialize import digest, dumped, packed
from kitsune.kernels import triton_key
from kitsune.timing import CostCache

_log = logging.getLogger("kitsune")

# Of any second, turns take so much at most; several follow each other while a slice lasts.
_SHARE = 0.1
_WINDOW_SECONDS = 1.0
_SLICE_SECONDS = 0.03

# What is timed comes to its end within this time, or the training goes on beside it.
_LONGEST_TURN_SECONDS = 0.25
_NEXT_TURN_SECONDS = 0.002

_LEAST_PROCESSORS = 2
"""With fewer, a second process would take its time from the training."""

_LEAST_BYTES = 2 * 2**30
"""Of the device's memory that must be free for a second process: it takes half a gigabyte to begin with."""

_START_SECONDS = 120.0  # to import torch on a busy machine
_MOST_ENDS = 6  # of workers, for one program


@dataclass
class Ticket:
    """A program that was handed over.

    Attributes:
        job: what the worker gets.
        key: see `kitsune.engine.store`.
        found: programs that may be faster, as far as they are known.
        is_done: whether that is all.
        refusals: what ended a worker, since the last look of whoever waits.
        failure: why there is none; None as long as there may be one.
        is_unserved: whether that is because the worker cannot take the program at all.
        progress: parts that are compiled, and how many there are.
        ends: how many workers it has survived.
        is_cancelled: whether nobody waits for it any more.
    """

    job: Job
    key: str
    found: list[Faster] = field(default_factory=list)
    is_done: bool = False
    failure: str | None = None
    is_unserved: bool = False
    refusals: list[Refusal] = field(default_factory=list)
    progress: tuple[int, int] = (0, 0)
    ends: int = 0
    is_cancelled: bool = False

    @property
    def is_over(self) -> bool:
        return self.is_done or self.failure is not None


class Slices:
    """Says when a turn may begin, so that turns take a small share of any second.

    Args:
        share: of the time.
    """

    def __init__(self, share: float = _SHARE) -> None:
        self._share = share
        self._spent: deque[tuple[float, float]] = deque()  # when a slice ended, and how long it was

    def may_begin(self, now: float) -> bool:
        """Whether there is time for a slice."""
        while self._spent and self._spent[0][0] < now - _WINDOW_SECONDS:
            self._spent.popleft()
        return sum(seconds for _, seconds in self._spent) + _SLICE_SECONDS <= self._share * _WINDOW_SECONDS

    def note(self, now: float, seconds: float) -> None:
        """A slice has ended."""
        self._spent.append((now, seconds))


class Worker:
    """The worker of this process for one device. It is started by the first program, and again when it has ended.

    Nothing here waits for it, but for a turn that was granted.

    Args:
        device: where programs run.
        modules: that the process imports before it works, as those that define operators of programs.

    Attributes:
        device: as above.
        store: where it is kept what was found.
        turn_seconds: for which the training has waited so far.
    """

    def __init__(self, device: torch.device, modules: Sequence[str] = ()) -> None:
        self.device, self._modules = device, modules
        self.store = ProgramStore.of_user()
        self._slices = Slices()
        self._tickets: deque[Ticket] = deque()  # the first one is in work, or about to be
        self._number = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._owner = os.getpid()
        self._is_ready = self._is_at_work = self._wants_turn = self._is_overdue = False
        self._trying: Trying | None = None
        self._deadline = 0.0
        self.turn_seconds = 0.0

    def start(self) -> None:
        """Starts the process, unless it runs: it needs seconds to import what it works with.

        Raises:
            OSError: no process can be started.
        """
        if self._connection is not None or os.getpid() != self._owner:
            return
        ours, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", start.__file__, str(theirs.fileno()), str(self._owner)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if _log.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
                start_new_session=True,  # an interrupt from the keyboard is for the training
            )
        self._connection = ours
        self._is_ready = self._is_at_work = self._wants_turn = self._is_overdue = False
        self._trying, self._deadline = None, time.monotonic() + _START_SECONDS
        self._send((list(sys.path), list(self._modules)))

    def hand_over(self, module: fx.GraphModule, inputs: Sequence[torch.Tensor], *, is_whole: bool = False) -> Ticket:
        """Has `module` made faster.

        Args:
            inputs: such as it takes.
            is_whole: whether code is to be generated for all of it as one, too.

        Raises:
            OSError: there is no worker.
            TypeError, ValueError: it cannot be handed over.
        """
        inductor, set_so = _inductor(), switches()
        options = {"inductor": sorted(inductor.items()), "switches": sorted(set_so.items()), "is_whole": is_whole}
        key = key_of(digest(module), self.device, options)
        self._number += 1
        uuid = str(torch.cuda.get_device_properties(self.device).uuid) if self.device.type == "cuda" else ""
        job = Job(
            number=self._number,
            program=packed(module),
            device=self.device,
            uuid=uuid,
            switches=set_so,
            inductor=inductor,
            samples=dumped(sampled(inputs)),
            is_whole=is_whole,
            is_careful=False,
        )
        known = self.store.read(key)
        if known is not None:
            return Ticket(job, key, list(known), is_done=True)
        ticket = Ticket(job, key)
        if self._process is not None and self._process.poll() is not None:  # for want of programs
            self._kill()
        self.start()
        self._tickets.append(ticket)
        try:
            if self._is_ready and not self._is_at_work:
                self._begin()
        except OSError:
            self._kill()
            self._tickets.remove(ticket)
            raise
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for it any more."""
        ticket.is_cancelled = True
        if not any(one is ticket for one in self._tickets) or os.getpid() != self._owner:
            return
        if self._tickets[0] is ticket and self._is_at_work and self._connection is not None:
            with contextlib.suppress(OSError):  # it has ended, which the next look finds
                self._send(Cancel(ticket.job.number))
        else:
            self._tickets = deque(one for one in self._tickets if one is not ticket)

    def may_look(self) -> bool:
        """Whether `look` has something to do."""
        if os.getpid() != self._owner or self._connection is None:
            return bool(self._tickets)
        has_news = self._connection.poll() or time.monotonic() > self._deadline
        return has_news or (self._wants_turn and self._slices.may_begin(time.monotonic()))

    def look(self) -> None:
        """Takes what the worker has sent, and grants it a turn if it is time for one. To be called between steps."""
        if os.getpid() != self._owner:
            self._give_up("this process was forked from the one that has the worker")
            return
        if not self._tickets:
            return
        try:
            self.start()
            self._read()
            if self._wants_turn and self._slices.may_begin(time.monotonic()):
                self._grant()
        except (EOFError, OSError) as error:
            self._ended(str(error) or "it ended")
            return
        if time.monotonic() > self._deadline:
            self._ended("it says nothing")

    def close(self) -> None:
        """Ends it at once."""
        self._kill()
        self._tickets.clear()

    def _read(self, timeout: float = 0.0) -> bool:
        """Takes all messages that are there, or come within so many seconds. Whether a turn has ended."""
        assert self._connection is not None
        has_ended = False
        while self._connection.poll(timeout):
            timeout = 0.0
            message = self._connection.recv()
            has_ended |= isinstance(message, Done)
            self._take(message)
            if has_ended:
                break
        return has_ended

    def _take(self, message: object) -> None:
        ticket = self._tickets[0] if self._tickets else None
        self._deadline = time.monotonic() + (self._trying.seconds if self._trying is not None else _START_SECONDS)
        if isinstance(message, Ready):
            self._is_ready = True
            self._begin()
        elif isinstance(message, Turn):
            self._wants_turn, self._deadline = True, float("inf")  # it waits for this process
        elif isinstance(message, Done):
            self._is_overdue = False
        elif isinstance(message, Trying):
            self._trying, self._deadline = message, time.monotonic() + message.seconds
        elif isinstance(message, Told):
            _log.log(message.level, message.text)
        elif ticket is not None and isinstance(message, Progress):
            ticket.progress = message.num_done, message.num_parts
        elif ticket is not None and isinstance(message, Found):
            ticket.found.append(message.program)
        elif isinstance(message, (Result, Failed)):
            self._finish(message)

    def _begin(self) -> None:
        while self._tickets and self._tickets[0].is_cancelled:
            self._tickets.popleft()
        self._is_at_work = bool(self._tickets)
        self._trying = None
        if self._tickets:
            self._send(self._tickets[0].job)
            self._deadline = time.monotonic() + _START_SECONDS
        else:
            self._deadline = float("inf")

    def _finish(self, message: Result | Failed) -> None:
        ticket = self._tickets.popleft()
        assert ticket.job.number == message.number
        if isinstance(message, Result):
            CostCache.of(self.device).adopt(message.costs)
            ticket.is_done = True
            if message.is_final:
                self.store.write(ticket.key, ticket.found)
        else:
            ticket.failure, ticket.is_unserved = message.reason, message.is_unserved
        self._begin()

    def _grant(self) -> None:
        """Lets the worker have the device for a slice of time."""
        begun = time.perf_counter()
        synchronize(self.device)
        while self._wants_turn and time.perf_counter() - begun < _SLICE_SECONDS:
            self._wants_turn = False
            self._send(Go())
            self._is_overdue = True
            self._deadline = time.monotonic() + (_START_SECONDS if self._trying is None else self._trying.seconds)
            end = begun + _LONGEST_TURN_SECONDS
            while self._is_overdue and (left := end - time.perf_counter()) > 0:
                self._read(left)
            if self._is_overdue:
                break
            self._read(_NEXT_TURN_SECONDS)
        seconds = time.perf_counter() - begun
        self.turn_seconds += seconds
        self._slices.note(time.monotonic(), seconds)

    def _ended(self, reason: str) -> None:
        """The process has ended, or hangs. What it was trying is never tried again, if it is certain what that was."""
        was_at_work = self._is_at_work
        self._kill()
        if not self._tickets:
            return
        ticket, trying = self._tickets[0], self._trying
        if ticket.is_cancelled:
            self._tickets.popleft()
            return
        ticket.ends += 1
        _log.info("the process that tries kernels is started anew: %s", reason)
        if ticket.job.is_careful and trying is not None:
            costs = CostCache.of(self.device)
            costs.adopt(trying.costs)
            costs.save()
            ended = "did not come to an end" if reason == "it says nothing" else "ended the process that tried it"
            ticket.refusals.append(Refusal(f"it {ended}: {trying.what}"))
        ticket.job = ticket.job._replace(is_careful=True, is_whole=ticket.job.is_whole and not ticket.found)
        self._trying = None
        if ticket.ends >= _MOST_ENDS or not was_at_work:
            self._tickets.popleft()
            ticket.failure = f"the process that tries kernels has ended {ticket.ends} times ({reason})"
            ticket.is_unserved = not was_at_work  # it could not even begin

    def _give_up(self, reason: str) -> None:
        while self._tickets:
            ticket = self._tickets.popleft()
            ticket.failure, ticket.is_unserved = reason, True

    def _kill(self) -> None:
        """With its children: it leads a session."""
        connection, process = self._connection, self._process
        self._connection = self._process = None
        self._is_ready = self._is_at_work = self._wants_turn = self._is_overdue = False
        if connection is not None:
            connection.close()
        if process is not None and process.returncode is None and os.getpid() == self._owner:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _send(self, message: Sequence[Any]) -> None:
        assert self._connection is not None
        self._connection.send(message)


def _inductor() -> Mapping[str, Any]:
    """The options of Inductor, as another process can take them."""
    from torch._inductor import config  # takes a second to import

    return config.save_config_portable()


_workers: dict[torch.device, Worker] = {}


def worker_of(device: torch.device) -> Worker:
    """The one of this process for `device`."""
    if device not in _workers or _workers[device]._owner != os.getpid():
        _workers[device] = Worker(device)
    return _workers[device]


def expect(device: torch.device) -> None:
    """Programs on `device` will probably be made faster soon: what that needs is begun, for it takes seconds."""
    if refuse_worker(device) is not None:
        ahead.expect(device)
        return
    triton_key.make_ahead()
    try:
        worker_of(device).start()
    except OSError as error:
        _log.info("no second process can be started: %s", error)


def refuse_worker(device: torch.device) -> Refusal | None:
    """None if programs on `device` may be made faster by a second process."""
    if device.type != "cuda":
        return Refusal(f"a second process tries kernels on CUDA devices, not on {device.type}")
    if (os.cpu_count() or 1) < _LEAST_PROCESSORS:
        return Refusal("there is one processor")
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if free_bytes < _LEAST_BYTES:
        return Refusal(f"{free_bytes / 2**30:.1f} GiB of the device's memory are free")
    return None
