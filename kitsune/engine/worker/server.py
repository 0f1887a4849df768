"""The worker: runs the course of `kitsune.engine.rewriting` for programs that the training process hands over."""

from __future__ import annotations

import importlib
import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection

import torch
from torch import fx

from kitsune.background import is_quiet, wait_until_quiet
from kitsune.device import synchronize
from kitsune.engine.rewriting import Rewritten, Telling, generated, is_final, rewriting
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
    Region,
    Result,
    Told,
    Trying,
    Turn,
)
from kitsune.engine.worker.samples import drawn
from kitsune.engine.worker.switches import set_switches
from kitsune.errors import first_line
from kitsune.graph import dataflow
from kitsune.graph.serialize import packed, packed_tensors, unpacked
from kitsune.graph.signature import graph_signature
from kitsune.kernels import regions
from kitsune.passes import programs
from kitsune.timing import CostCache, trials, turns

IDLE_SECONDS = 180.0
"""After so long without a job it ends, and gives back what it holds of the device."""

_LOOK_SECONDS = 0.1

_MOST_MEMORY = 0.25
"""Of what is free on the device when a job begins."""


class _Cancelled(Exception):
    """Nobody waits for the job any more."""


class Server:
    """Serves one training process, whose end of `connection` is `kitsune.engine.worker.client`."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._sending = connection, threading.Lock()
        self._number = 0  # of the present job
        self._device = torch.device("cpu")
        self._is_final = True  # another worker would find no more

    def run(self) -> None:
        """Takes jobs until none has come for long.

        Raises:
            EOFError, OSError: the other end is closed.
        """
        importlib.import_module("torch._inductor.compile_fx")  # takes seconds, and every job needs it
        turns.ask_by(self._turn)
        logger = logging.getLogger("kitsune")
        logger.addHandler(_Teller(self._send))
        logger.setLevel(logging.INFO)
        logger.propagate = False
        self._send(Ready())
        while self._connection.poll(IDLE_SECONDS):
            message = self._connection.recv()
            if isinstance(message, Job):
                self._do(message)

    def _do(self, job: Job) -> None:
        self._number, self._device = job.number, job.device
        trials.watch_by(self._trying, one_by_one=job.is_careful)
        try:
            _take_device(job)
            set_switches(job.switches)
            _set_inductor(job.inductor)
            module = unpacked(job.program)
        except Exception as error:  # noqa: BLE001 - drivers and torch refuse in many ways
            self._send(Failed(job.number, _told(error), is_unserved=True))
            return
        try:
            outcome: Result | Failed = self._outcome(module, job)
        except _Cancelled:
            outcome = Failed(job.number, "it was cancelled", is_unserved=False)
        except (EOFError, OSError):
            raise
        except Exception as error:  # noqa: BLE001 - compilers, drivers and too little memory fail in many ways
            outcome = Failed(job.number, _told(error), is_unserved=False)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._send(outcome)

    def _outcome(self, module: fx.GraphModule, job: Job) -> Result:
        cache = CostCache.of(job.device)
        known = cache.entries()
        self._is_final = True
        if job.is_whole:
            for make in generated(module, cache):
                self._find(make, job)
        for one in self._rewritten(module, job.device):
            self._is_final &= is_final(one)
            self._find(partial(_the, one), job)
        costs = {key: us for key, us in cache.entries().items() if known.get(key) != us}
        return Result(job.number, costs, self._is_final)

    def _find(self, make: Callable[[], Rewritten], job: Job) -> None:
        """Makes a program, runs it once, and hands it over; what fails is left out."""
        try:
            found = make()
            self._run(found, job)
        except _Cancelled:
            raise
        except Exception as error:  # noqa: BLE001 - compilers and drivers fail in many ways, and the rest is tried
            self._is_final &= not isinstance(error, torch.OutOfMemoryError)
            self._send(Told(logging.INFO, f"a faster form of the program is left out: {_told(error)}"))
        else:
            self._send(Found(job.number, _faster(found)))

    def _run(self, rewritten: Rewritten, job: Job) -> None:
        """Runs a program once on inputs as those that it will get, before the training does, if there is memory."""
        module, fusions = rewritten
        key = f"program {graph_signature(module.graph)}"
        if CostCache.of(job.device).get(key) == trials.KILLED_US:
            raise RuntimeError("it ended the process that ran it, or hung there")
        names = ", ".join(dict.fromkeys(fusion.template for fusion in fusions if fusion.refusal is None))
        trials.trying(f"the program with {names}", {key: trials.KILLED_US})
        values = [node.meta["val"] for node in dataflow.placeholders(module.graph)]
        try:
            with torch.no_grad(), torch.autocast(job.device.type, enabled=False):
                module.forward(*drawn(pickle.loads(job.samples), values))
            synchronize(job.device)
        except torch.OutOfMemoryError:
            self._send(Told(logging.INFO, f"there is too little memory to run the program with {names} beforehand"))

    def _rewritten(self, module: fx.GraphModule, device: torch.device) -> tuple[Rewritten, ...]:
        course = rewriting(module, device, Telling(waits=False))
        try:
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                while True:
                    background = next(course)
                    while not is_quiet():
                        self._send(Progress(background.num_done, background.num_jobs))
                        self._look(_LOOK_SECONDS)
        except StopIteration as end:
            found: tuple[Rewritten, ...] = end.value
            return found
        finally:
            course.close()
            wait_until_quiet()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        self._send(Turn())
        while not isinstance(self._receive(), Go):
            pass
        try:
            yield
        finally:
            synchronize(self._device)
            self._send(Done())

    def _trying(self, what: str, costs: Mapping[str, float], seconds: float) -> None:
        self._look(0.0)
        self._send(Trying(what, dict(costs), seconds))

    def _look(self, seconds: float) -> None:
        """Waits for so long; shorter where the job is cancelled, and then it raises `_Cancelled`."""
        end = time.monotonic() + seconds
        while self._connection.poll(max(0.0, end - time.monotonic())):
            self._receive()

    def _receive(self) -> object:
        message = self._connection.recv()
        if isinstance(message, Cancel) and message.number == self._number:
            raise _Cancelled
        return message

    def _send(self, message: tuple[object, ...]) -> None:
        with self._sending:  # what is logged comes from several threads
            self._connection.send(message)


class _Teller(logging.Handler):
    """Hands what is logged to the training process."""

    def __init__(self, send: Callable[[tuple[object, ...]], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(Told(record.levelno, record.getMessage()))


def _the(one: Rewritten) -> Rewritten:
    return one


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _take_device(job: Job) -> None:
    """Makes the job's device the current one, and bounds what this process takes of its memory."""
    if job.device.type != "cuda":
        return
    torch.cuda.set_device(job.device)
    uuid = str(torch.cuda.get_device_properties(job.device).uuid)
    if uuid != job.uuid:
        raise RuntimeError(f"{job.device} is another device here: CUDA_VISIBLE_DEVICES has changed")
    free_bytes, all_bytes = torch.cuda.mem_get_info(job.device)
    torch.cuda.set_per_process_memory_fraction(_MOST_MEMORY * free_bytes / all_bytes, job.device)


def _set_inductor(options: Mapping[str, object]) -> None:
    from torch._inductor import config

    config.load_config(dict(options))


def _faster(rewritten: Rewritten) -> Faster:
    module, fusions = rewritten
    targets = dict.fromkeys(
        node.target for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)
    )
    return Faster(packed(module), tuple(region for target in targets for region in _regions(target)), fusions)


def _regions(target: torch._ops.OpOverload) -> list[Region]:
    """How a generated operator is made; nothing for others."""
    name = target._schema.name.partition("::")[2]
    if target.namespace == regions.NAMESPACE:
        module, inputs, outputs = regions.definition(name)
        return [Region(name, packed(module), (packed_tensors(inputs), packed_tensors(outputs)))]
    if target.namespace == programs.NAMESPACE:
        return [Region(name, packed(programs.definition(name)), None)]
    return []
