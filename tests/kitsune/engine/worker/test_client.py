"""The training goes on whatever becomes of the process that tries kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kitsune.capture.trace import trace
from kitsune.engine.worker import client
from kitsune.engine.worker.client import Slices, Ticket, Worker
from kitsune.engine.worker.delivery import loaded
from kitsune.graph.values import mode_of

CPU = torch.device("cpu")


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Makes workers that keep what they find in a folder of the test, and ends them."""
    monkeypatch.setenv("KITSUNE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(client, "_START_SECONDS", 300.0)
    made: list[Worker] = []

    def make(*modules: str) -> Worker:
        made.append(Worker(CPU, modules))
        return made[-1]

    yield make
    for one in made:
        one.close()


def wait_for(worker: Worker, ticket: Ticket, seconds: float = 240.0) -> int:
    """Looks as a loop does, between its steps; returns how many steps those were."""
    deadline, steps = time.monotonic() + seconds, 0
    while not ticket.is_over:
        assert time.monotonic() < deadline, ticket
        time.sleep(0.001)
        steps += 1
        if worker.may_look():
            worker.look()
    return steps


def program(x: torch.Tensor) -> list[torch.Tensor]:
    return [x.relu() * 2, x.tanh() * 3, x.sigmoid() * 4, x.exp() * 5]


def test_what_faults_hangs_or_gives_other_numbers_is_refused_by_name_and_the_rest_is_used(
    make: Callable[..., Worker],
) -> None:
    inputs = [torch.randn(64, 64)]
    module = trace(program, inputs)
    worker = make("tests.kitsune.engine.worker.plant")
    ticket = worker.hand_over(module, inputs)
    steps = wait_for(worker, ticket)
    assert steps > 1000, "the training waited"
    assert ticket.failure is None
    assert [str(one) for one in ticket.refusals] == [
        "it ended the process that tried it: planted.fault.default",
        "it did not come to an end: planted.hang.default",
    ]
    fusions = {fusion.template: fusion.refusal for one in ticket.found for fusion in one.fusions}
    assert fusions["planted fault"] == fusions["planted hang"] == "it ended the process that tried it, or hung there"
    assert fusions["planted other"] == "its results differ from those of what it would replace"
    again = make("tests.kitsune.engine.worker.plant").hand_over(module, inputs)
    assert again.is_over, "what was found is on disk"
    assert again.found == ticket.found
    assert (again.ends, again.refusals) == (0, [])


def test_a_program_is_made_faster_beside_the_training(make: Callable[..., Worker]) -> None:
    """What comes back computes the same, with generated operators that are loaded here."""
    inputs = [torch.randn(512, 512), torch.randn(512)]

    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [((x * y).sin() + y).exp().sum(0), x.t() @ x]

    module = trace(function, inputs)
    worker = make()
    ticket = worker.hand_over(module, inputs, is_whole=True)
    wait_for(worker, ticket)
    assert ticket.failure is None
    found = [loaded(one, mode_of(module.graph), CPU) for one in ticket.found]
    used = [[fusion.template for fusion in fusions if fusion.refusal is None] for _, fusions in found]
    assert used == [["generated code, the whole step"], ["region"]]
    for faster, _ in found:
        for one, other in zip(module(*inputs), faster(*inputs), strict=True):
            torch.testing.assert_close(one, other)


def test_turns_take_a_tenth_of_any_second() -> None:
    slices, now, spent = Slices(), 0.0, list[tuple[float, float]]()
    while now < 5.0:
        if slices.may_begin(now):
            now += 0.03
            slices.note(now, 0.03)
            spent.append((now, 0.03))
        now += 0.001
    for begin in range(400):
        within = sum(seconds for end, seconds in spent if begin / 100 <= end < begin / 100 + 1.0)
        assert within <= 0.1 + 1e-9
    assert sum(seconds for _, seconds in spent) > 0.4


def test_of_a_worker_that_cannot_begin_the_reason_is_told(
    make: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make("there.is.no.such.module")
    inputs = [torch.randn(4)]
    ticket = worker.hand_over(trace(program, inputs), inputs)
    wait_for(worker, ticket)
    assert ticket.found == []
    assert ticket.failure is not None
    assert ticket.ends == 1


def test_who_does_not_wait_any_more_keeps_nobody_else_waiting(make: Callable[..., Worker]) -> None:
    worker, module = make("tests.kitsune.engine.worker.plant"), trace(lambda x: [x.exp()], [torch.randn(64)])
    first, second = (worker.hand_over(module, [torch.randn(64)], is_whole=whole) for whole in (False, True))
    worker.cancel(first)
    wait_for(worker, second)
    assert second.failure is None


def test_a_program_that_was_being_tried_when_the_worker_died_can_be_given_up(make: Callable[..., Worker]) -> None:
    """As by a training that is over: nothing raises, and the next program is served."""
    worker, module = make("tests.kitsune.engine.worker.plant"), trace(lambda x: [x.tanh()], [torch.randn(64)])
    first = worker.hand_over(module, [torch.randn(64)])
    while not worker._is_at_work:
        time.sleep(0.01)
        worker.look()
    assert worker._process is not None
    worker._process.kill()
    worker._process.wait()
    worker.cancel(first)
    other = trace(lambda x: [x.exp()], [torch.randn(64)])
    second = worker.hand_over(other, [torch.randn(64)])
    wait_for(worker, second)
    assert second.failure is None
