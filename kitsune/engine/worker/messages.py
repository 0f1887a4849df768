"""What the training process and the worker tell each other; each a tuple that `pickle` carries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from kitsune.plan import Fusion


class Job(NamedTuple):
    """To the worker: a captured program to make faster.

    Attributes:
        number: tells it from others.
        program: see `kitsune.graph.serialize`.
        device: where it runs.
        uuid: of that device, which may have another number in another process.
        switches: torch's, on which kernels depend; see `switches`.
        inductor: the options of Inductor that are not at their defaults.
        samples: of the program's inputs, see `samples` and `kitsune.graph.serialize`.
        is_whole: whether code is to be generated for all of the program as one, too.
        is_careful: whether nothing is tried while something else is, since the worker has ended in the midst of it.
    """

    number: int
    program: bytes
    device: torch.device
    uuid: str
    switches: Mapping[str, Any]
    inductor: Mapping[str, Any]
    samples: bytes
    is_whole: bool
    is_careful: bool


class Go(NamedTuple):
    """To the worker: it has the device to itself until it says `Done`."""


class Cancel(NamedTuple):
    """To the worker: nobody waits for the job with that number any more."""

    number: int


class Ready(NamedTuple):
    """From the worker: it has imported what it needs, and has the device."""


class Turn(NamedTuple):
    """From the worker: it asks for the device, to time something."""


class Done(NamedTuple):
    """From the worker: it has timed what it asked for."""


class Trying(NamedTuple):
    """From the worker: it begins to compile or to run something that was never seen to work here.

    If the process ends, or says nothing more, that is to blame.

    Attributes:
        what: as the user is told.
        costs: to be kept of it then, so that nobody tries it again.
        seconds: after which it is taken to hang, unless it says anything.
    """

    what: str
    costs: Mapping[str, float]
    seconds: float


class Progress(NamedTuple):
    """From the worker: so many parts of the job are compiled."""

    num_done: int
    num_parts: int


class Told(NamedTuple):
    """From the worker: a record of the logger `kitsune`."""

    level: int
    text: str


class Region(NamedTuple):
    """A generated operator in a program: of a part of it, or of all of it.

    Attributes:
        name: of the operator.
        module: the graph that it computes, see `kitsune.graph.serialize`.
        layouts: the tensors that a part takes, and those that it returns, likewise; None for a whole program.
    """

    name: str
    module: bytes
    layouts: tuple[bytes, bytes] | None


class Faster(NamedTuple):
    """A program that computes the same, and may be faster.

    Attributes:
        program: see `kitsune.graph.serialize`.
        regions: the generated operators in it.
        fusions: what was tried to make it.
    """

    program: bytes
    regions: tuple[Region, ...]
    fusions: tuple[Fusion, ...]


class Found(NamedTuple):
    """From the worker: a program that may be faster; others may follow.

    Attributes:
        number: the job's.
        program: it.
    """

    number: int
    program: Faster


class Result(NamedTuple):
    """From the worker: the job is done.

    Attributes:
        number: the job's.
        costs: what was measured meanwhile, in microseconds by signature.
        is_final: whether another run would find no more.
    """

    number: int
    costs: Mapping[str, float]
    is_final: bool


class Failed(NamedTuple):
    """From the worker: the job has come to nothing.

    Attributes:
        number: the job's.
        reason: why.
        is_unserved: whether the worker cannot take the program at all: it knows another device, or not all operators.
    """

    number: int
    reason: str
    is_unserved: bool
