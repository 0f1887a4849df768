"""Steps on several CUDA streams under stress: at random delays, over many replays and captures, and after failures.

Kitsune's own results are compared to the last bit: those of a plan on several streams with those of the same operators
one after another. Whether these agree with eager is asked elsewhere.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import kitsune
import models
from kitsune.background import wait_until_quiet
from kitsune.capture.trace import trace
from kitsune.config import Config
from kitsune.engine import by_address, planning, region
from kitsune.engine.planning import Planned
from kitsune.engine.recording import Recording
from kitsune.errors import Refusal, RefusedError
from kitsune.execution.graph_pool import GraphPool
from kitsune.execution.handout import PLACES
from kitsune.execution.in_order import InOrder
from kitsune.execution.lower import Lowered, lower
from kitsune.execution.on_streams import OnStreams
from kitsune.execution.stream_pool import StreamPool
from kitsune.fallback import RefusalLog
from kitsune.memory.pool import MemoryPool
from kitsune.plan import Schedule, Wait, task_graph
from tests.kitsune.delays import (
    Trajectory,
    first_difference,
    guarding_waits,
    one_after_another,
    random_delays,
    trajectory,
    with_delays,
    without,
)
from tests.kitsune.plans import fused_at_once, let_win
from tests.kitsune.steps import traced_step
from tests.kitsune.test_streams import costs_of_a_gpu

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
NUM_STREAMS = 4
BATCH_SIZES = {"mlp": 64, "lenet": 64, "resnet18": 16}
NUM_BATCHES = 8

REPLAYS = 1000  # in float32, and as many under autocast
PLACEMENTS = 5  # of delays, for each plan
LOOK_EVERY = 10

LONG_CYCLES = 4_000_000  # 2 ms, in which an MLP's step is over many times
MOST_WAITS = 5  # that are left out, for each plan

CAPTURES = 100
COUNTERS = (
    "num_device_alloc",
    "segment.all.allocated",
    "allocation.all.allocated",
    "allocated_bytes.all.current",
    "allocated_bytes.all.peak",
)


@pytest.fixture(autouse=True)
def _one_algorithm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every call of an operator computes the same to the bit, and the user's cache of costs stays as it is."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setenv("KITSUNE_CACHE_DIR", str(tmp_path))


class Dropping(nn.Sequential):
    """Draws random numbers in two places; the sizes of its inputs and outputs are 64."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(64, 64), nn.Dropout(0.5), nn.ReLU(), nn.Linear(64, 64), nn.Dropout(0.2), nn.Linear(64, 64)
        )


class Autocast(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Tensor) -> Tensor:
        with torch.autocast(CUDA.type, torch.bfloat16):
            return self.module(*args)


def workload(name: str) -> tuple[nn.Module, nn.Module, list[tuple[Tensor, Tensor]]]:
    """Module, loss and batches, on the GPU."""
    if name == "dropout":
        labels = [torch.randint(64, (32,), device=CUDA) for _ in range(NUM_BATCHES)]
        return Dropping().to(CUDA), nn.CrossEntropyLoss(), [(torch.randn(32, 64, device=CUDA), y) for y in labels]
    built = models.build(name)
    batches = [built.batch(BATCH_SIZES[name], index=index, device=CUDA) for index in range(NUM_BATCHES)]
    return built.module.to(CUDA), built.loss_fn, batches


class Program:
    """A captured step with Adam, its plans, and what their recordings share, as those of a loop do.

    Args:
        fused: the plans are those that users get: of the fused graph, by measured costs, placed as is found best.
            Else they are of the graph as it was captured, and the same in each run.
    """

    def __init__(self, name: str, *, amp: bool, fused: bool = False) -> None:
        module, loss_fn, batches = workload(name)
        if amp:
            module, loss_fn = Autocast(module), Autocast(loss_fn)
        self._step = traced_step(module, loss_fn, *batches[0], keep_grads=False)
        places = [_place(self._step.inputs, tensor) for tensor in batches[0]]
        self._batches = [dict(zip(places, batch, strict=True)) for batch in batches]
        self._stable = set(range(len(self._step.inputs))) - set(places)
        self.streams, self._memory = StreamPool(), MemoryPool()
        self._graphs = GraphPool(self.streams)
        found = self._users_plans() if fused else self._repeatable_plans()
        strategies = {planned.plan.schedule.strategy for planned in found}
        self.plans = [_widest(found, strategy) for strategy in ("list", "chains") if strategy in strategies]
        self.in_order = one_after_another(self.plans[0])

    def _repeatable_plans(self) -> Sequence[Planned]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planning, "measured_costs", costs_of_a_gpu)
            # All that can be placed in an arena is: it is what races would damage first.
            patch.setattr(planning, "pooled_bytes", lambda graph, _: sum(value.num_bytes for value in graph.values))
            return planning.challengers(self._step.module, self._step.inputs, NUM_STREAMS)

    def _users_plans(self) -> Sequence[Planned]:
        refusals: list[Refusal] = []
        found = planning.others(
            self._step.module,
            self._step.inputs,
            num_streams=NUM_STREAMS,
            fusing=fused_at_once(self._step.module, CUDA),
            max_bytes=None,
            refused=refusals.append,
        )
        assert not refusals
        plans = [planned for planned in found if planned.plan.schedule.num_streams > 1]
        assert plans
        assert all(planned.plan.is_fused for planned in plans)
        return plans

    @contextmanager
    def lowered(self, planned: Planned) -> Iterator[Lowered]:
        arena = self._memory.arena(planned.plan.memory.arena_bytes, CUDA)
        try:
            yield planned.lowered(arena)
        finally:
            self._memory.give(arena)

    @contextmanager
    def recorded(self, planned: Planned, lowered: Lowered) -> Iterator[tuple[Recording, list[Tensor]]]:
        """The recording of `lowered`, which runs `planned`, and inputs of its own, in the state after capture."""
        inputs = self._step.fresh_inputs()
        recording = Recording(
            planned.module,
            inputs,
            stable=self._stable,
            config=Config(),
            pool=self._graphs,
            log=RefusalLog("the test"),
            lowered=lowered,
        )
        try:
            yield recording, inputs
        finally:
            recording.release()

    def replay(self, planned: Planned, num_steps: int, delays: Callable[[Lowered], Mapping[str, int]]) -> Trajectory:
        """What replays of a recording with delays leave behind."""
        with (
            self.lowered(planned) as lowered,
            self.recorded(planned, with_delays(lowered, delays(lowered))) as (recording, inputs),
        ):
            return self._trajectory(recording, inputs, num_steps)

    def run(self, planned: Planned, num_steps: int, delays: Callable[[Lowered], Mapping[str, int]]) -> Trajectory:
        """The same on live streams."""
        with self.lowered(planned) as lowered:
            run = OnStreams(with_delays(lowered, delays(lowered)), self.streams, CUDA)
            return self._trajectory(run, self._step.fresh_inputs(), num_steps)

    def run_in_order(self, num_steps: int) -> Trajectory:
        """The same on the stream of the caller, without delays."""
        with self.lowered(self.in_order) as lowered:
            return self._trajectory(InOrder(lowered.module), self._step.fresh_inputs(), num_steps)

    def release(self) -> None:
        """Frees the memory that no plan uses."""
        self._memory.release()

    def _trajectory(self, run: Any, inputs: list[Tensor], num_steps: int) -> Trajectory:
        return trajectory(run, inputs, self._batches, num_steps=num_steps, look_every=LOOK_EVERY)


def _place(tensors: Sequence[Tensor], wanted: Tensor) -> int:
    (place,) = [place for place, tensor in enumerate(tensors) if tensor is wanted]
    return place


def _widest(plans: Sequence[Planned], strategy: str) -> Planned:
    """Of the plans of a strategy, the one on the most streams."""
    made = [planned for planned in plans if planned.plan.schedule.strategy == strategy]
    return max(made, key=lambda planned: planned.plan.schedule.num_streams)


@pytest.fixture(scope="module")
def programs() -> Iterator[Callable[..., Program]]:
    """What makes programs, each once for all tests."""
    made = functools.cache(Program)
    yield made
    made.cache_clear()


def no_delays(_lowered: Lowered) -> Mapping[str, int]:
    return {}


def counters() -> dict[str, int]:
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    return {name: stats[name] for name in COUNTERS}


def at_rest() -> tuple[int, int]:
    """Bytes allocated and reserved when nothing is going on."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


# Races


def assert_delays_change_nothing(program: Program, num_steps: int) -> None:
    """Replays all its plans so often, for each placement of delays."""
    expected = program.replay(program.in_order, num_steps, no_delays)
    again = program.replay(program.in_order, num_steps, no_delays)
    assert first_difference(again, expected) is None, "on one stream already: an operator is not deterministic"
    for planned in program.plans:
        for seed in range(PLACEMENTS):
            found = program.replay(planned, num_steps, functools.partial(random_delays, seed=seed))
            assert first_difference(found, expected) is None, f"{planned.plan.schedule.strategy}, delays {seed}"


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", ["mlp", "lenet", "dropout", pytest.param("resnet18", marks=pytest.mark.slow)])
def test_no_delay_changes_what_a_thousand_replays_leave_behind(
    name: str, amp: bool, programs: Callable[..., Program]
) -> None:
    program = programs(name, amp=amp)
    assert_delays_change_nothing(program, -(-REPLAYS // (len(program.plans) * PLACEMENTS)))


@pytest.mark.slow
@pytest.mark.parametrize("amp", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", ["mlp", "lenet", "resnet18"])
def test_no_delay_changes_what_a_thousand_replays_of_fused_plans_leave_behind(
    name: str, amp: bool, programs: Callable[..., Program]
) -> None:
    assert_delays_change_nothing(programs(name, amp=amp, fused=True), REPLAYS // PLACEMENTS)


def test_a_wait_that_is_left_out_is_seen(programs: Callable[..., Program]) -> None:
    """What a delayed task writes is read too early then: so these tests would see a race."""
    program = programs("mlp", amp=False)
    expected = program.replay(program.in_order, NUM_BATCHES, no_delays)
    differences = []
    for planned in program.plans:
        for wait in guarding_waits(planned.plan)[:MOST_WAITS]:
            late = {planned.plan.graph.tasks[wait.earlier].name: LONG_CYCLES}
            found = program.replay(planned, NUM_BATCHES, lambda _, late=late: late)
            assert first_difference(found, expected) is None, f"{planned.plan.schedule.strategy}, {late}"
            racing = program.replay(without(planned, wait), NUM_BATCHES, lambda _, late=late: late)
            differences.append(first_difference(racing, expected))
    assert any(differences)


@pytest.mark.parametrize("name", ["mlp", "lenet", "dropout"])
def test_no_delay_changes_what_runs_on_live_streams(name: str, programs: Callable[..., Program]) -> None:
    program = programs(name, amp=False)
    num_steps = 30
    expected = program.run_in_order(num_steps)
    for planned in program.plans:
        for seed in range(PLACEMENTS):
            found = program.run(planned, num_steps, functools.partial(random_delays, seed=seed))
            assert first_difference(found, expected) is None, f"{planned.plan.schedule.strategy}, delays {seed}"


# Memory


@pytest.mark.parametrize("name", ["mlp", "lenet"])
def test_a_thousand_replays_allocate_nothing(name: str, programs: Callable[..., Program]) -> None:
    program = programs(name, amp=False)
    for planned in program.plans:
        with (
            program.lowered(planned) as lowered,
            program.recorded(planned, lowered) as (recording, inputs),
        ):
            for _ in range(2):
                recording(inputs)
            torch.cuda.reset_peak_memory_stats()
            before = counters()
            for _ in range(1000):
                recording(inputs)
            assert counters() == before


def settle(step: kitsune.TrainStep, x: Tensor, y: Tensor) -> None:
    """Steps until all ways to replay have been tried."""
    replayed = 0
    for _ in range(2000):
        step(x, y)
        wait_until_quiet()
        replayed = replayed + 1 if step.status().mode == "replay" else 0
        if replayed == 20:
            return
    pytest.fail(f"not settled:\n{step.status()}")


@pytest.fixture
def _streams_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the plan on several streams win that the simulation ranks highest."""
    let_win(monkeypatch, lambda plan: plan.schedule.num_streams > 1)


@pytest.mark.usefixtures("replay_is_faster", "_streams_win")
def test_without_cuda_graphs_plans_run_on_live_streams() -> None:
    """They train as the same plan in a CUDA graph does, from one state, before rounding makes much of a difference."""
    states, losses = [], []
    for cuda_graphs in (True, False):
        torch.manual_seed(0)
        module, loss_fn, batches = workload("lenet")
        optimizer = torch.optim.Adam(module.parameters(), fused=True)
        step = kitsune.TrainStep(
            module, loss_fn, optimizer, mode="auto", num_streams=NUM_STREAMS, cuda_graphs=cuda_graphs,
            enable_fusion=False,
        )  # fmt: skip
        untrained = {name: value.clone() for name, value in module.state_dict().items()}
        for index in range(500):
            step(*batches[index % NUM_BATCHES])
        module.load_state_dict(untrained)
        for state in optimizer.state.values():
            for value in state.values():
                value.zero_()
        losses.append(torch.stack([step(*batches[index % NUM_BATCHES]) for index in range(20)]))
        status = step.status()
        assert status.executor == ("cuda graph" if cuda_graphs else "streams"), str(status)
        plan = step.plan()
        assert plan is not None
        assert plan.schedule.num_streams > 1
        states.append(module.state_dict())
    recorded, live = losses
    torch.testing.assert_close(live, recorded, rtol=1e-3, atol=1e-4)
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-2, atol=1e-3)


@pytest.mark.usefixtures("replay_is_faster", "_streams_win")
def test_a_thousand_steps_allocate_nothing_but_rows_for_their_losses() -> None:
    module, loss_fn, batches = workload("lenet")
    x, y = batches[0]
    optimizer = torch.optim.Adam(module.parameters(), fused=True)
    step = kitsune.TrainStep(module, loss_fn, optimizer, mode="auto", num_streams=NUM_STREAMS)
    settle(step, x, y)
    for _ in range(200):
        step(x, y)  # what comes from one place again and again gets a recording of its own
    plan = step.plan()
    assert plan is not None
    assert plan.schedule.num_streams > 1
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step(x, y)
    before, replays = counters(), step.status().replays
    for _ in range(1000):
        step(x, y)
    after = counters()
    assert step.status().replays == replays + 1000
    assert after["allocation.all.allocated"] - before["allocation.all.allocated"] <= 1000 // PLACES + 1
    assert {**after, "allocation.all.allocated": None} == {**before, "allocation.all.allocated": None}


def test_shapes_of_one_step_share_the_memory_of_their_graphs() -> None:
    """Those of smaller batches need little beside the largest one's: their inputs."""

    def reserved(*sizes: int) -> int:
        layers = [layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
        model = nn.Sequential(*layers).to(CUDA)
        before = at_rest()[1]
        step = kitsune.TrainStep(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), mode="replay")
        for size in sizes * 3:
            step(*torch.randn(2, size, 1024, device=CUDA))
        assert step.status().graphs == len(sizes), str(step.status())
        return at_rest()[1] - before

    reserved(4096)  # libraries load
    alone, smaller = reserved(4096), reserved(3072)
    together = reserved(4096, 3072, 2048)
    assert together - alone < smaller / 2


def test_a_hundred_captures_leave_no_memory_behind(programs: Callable[..., Program]) -> None:
    program = programs("dropout", amp=False)
    planned = max(program.plans, key=lambda planned: planned.plan.schedule.num_streams)
    num_streams = planned.plan.schedule.num_streams
    assert num_streams > 2

    def once() -> None:
        with (
            program.lowered(planned) as lowered,
            program.recorded(planned, lowered) as (recording, inputs),
        ):
            for _ in range(2):
                recording(inputs)
        program.release()

    for _ in range(2):
        once()
    before = at_rest()
    streams = program.streams.on(CUDA, num_streams)
    for _ in range(CAPTURES - 2):
        once()
    assert at_rest() == before
    assert len(program.streams._streams[CUDA]) == num_streams
    assert program.streams.on(CUDA, num_streams) == streams


@pytest.mark.slow
@pytest.mark.usefixtures("replay_is_faster", "_streams_win")
def test_training_steps_that_are_released_leave_no_memory_behind() -> None:
    """With all that is tried before a plan is chosen."""
    module, loss_fn, ((x, y), *_) = workload("dropout")
    optimizer = torch.optim.Adam(module.parameters(), fused=True)

    def once() -> tuple[int, int]:
        step = kitsune.TrainStep(module, loss_fn, optimizer, mode="auto", num_streams=NUM_STREAMS)
        settle(step, x, y)
        plan = step.plan()
        assert plan is not None
        assert plan.schedule.num_streams > 1
        step.release()
        del step
        return at_rest()

    _, before, *after = [once() for _ in range(4)]
    assert after == [before, before]


# Inputs


@pytest.mark.usefixtures("replay_is_faster")
def test_prefetched_batches_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefetcher's copies go to few places, and in the end many replays read there."""
    replayed: list[bool] = []
    recorded = Recording.__init__
    replay = Recording.__call__

    def record(recording: Recording, *args: Any, in_place: Collection[int] = (), **more: Any) -> None:
        recording.reads_in_place = bool(in_place)  # type: ignore[attr-defined]
        recorded(recording, *args, in_place=in_place, **more)

    def count(recording: Recording, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        replayed.append(recording.reads_in_place)  # type: ignore[attr-defined]
        return replay(recording, inputs)

    monkeypatch.setattr(Recording, "__init__", record)
    monkeypatch.setattr(Recording, "__call__", count)
    monkeypatch.setattr(by_address, "_SIGHTINGS", 10)
    workload_on_cpu = models.build("mlp", seed=0)
    loader = [workload_on_cpu.batch(64, index=index) for index in range(400)]
    places: set[tuple[int, int]] = set()

    def train(reads_in_place: bool) -> list[Tensor]:
        monkeypatch.setattr(region, "_copies_matter", lambda *_: reads_in_place)
        module, loss_fn, _ = workload("mlp")
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-3, fused=True)
        step = kitsune.TrainStep(module, loss_fn, optimizer, mode="auto", num_streams=1)
        losses = []
        for x, y in kitsune.prefetch(loader, CUDA):
            places.add((x.data_ptr(), y.data_ptr()))
            losses.append(step(x, y))
        return [torch.stack(losses), *(parameter.detach().clone() for parameter in module.parameters())]

    copied = train(reads_in_place=False)
    assert not any(replayed)
    for found, wanted in zip(train(reads_in_place=True), copied, strict=True):
        assert torch.equal(found, wanted)
    seen = f"{replayed.count(True)} of {len(replayed)} read in place, of {len(places)} places"
    assert sum(replayed[-200:]) > 20, seen


# Failures


def reads_back(x: Tensor) -> Tensor:
    return x.sigmoid() * x.sum().item()


def raises(x: Tensor) -> Tensor:
    raise RuntimeError("no such kernel")


def raises_while_recording(x: Tensor) -> Tensor:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("this cannot be recorded")
    return x.sigmoid()


def forked() -> fx.GraphModule:
    """Three tasks: the second does not depend on the first, and the third needs both."""
    return trace(lambda x: [x.relu() + x.sigmoid()], [torch.ones(64, 64, device=CUDA)])


def with_side_stream(module: fx.GraphModule, sigmoid: Callable[[Tensor], Tensor]) -> Lowered:
    """What `forked` returned with its second task, for which `sigmoid` stands in, on a stream of its own."""
    lowered = lower(module, task_graph(module.graph), Schedule("by hand", (0, 1, 2), (0, 1, 0), (Wait(2, 1),)))
    (node,) = [node for node in lowered.module.graph.nodes if node.target == torch.ops.aten.sigmoid.default]
    node.target = sigmoid
    lowered.module.recompile()
    return lowered


@pytest.mark.parametrize("rehearsed", [True, False])
@pytest.mark.parametrize("failing", [reads_back, raises, raises_while_recording])
def test_a_failure_on_a_side_stream_is_refused_and_undone(
    failing: Callable[[Tensor], Tensor], rehearsed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not rehearsed:  # then a wait for the device is met while recording only
        monkeypatch.setattr("kitsune.execution.cuda_graph._rehearse", lambda run, inputs: run(inputs))
    module, pool = forked(), GraphPool(StreamPool())
    x = torch.randn(64, 64, device=CUDA)
    expected = x.relu() + x.sigmoid()

    def record(sigmoid: Callable[[Tensor], Tensor]) -> Recording:
        lowered = with_side_stream(module, sigmoid)
        log = RefusalLog("the test")
        return Recording(module, [x], stable=set(), config=Config(), pool=pool, log=log, lowered=lowered)

    record(torch.sigmoid).release()
    stream, state = torch.cuda.current_stream(), torch.cuda.get_rng_state()
    numbers = torch.rand(8, device=CUDA)
    torch.cuda.set_rng_state(state)
    before = at_rest()
    with pytest.raises(RefusedError, match="recording the step failed"):
        record(failing)
    assert torch.cuda.current_stream() == stream
    assert torch.cuda.get_sync_debug_mode() == 0
    assert gc.isenabled()
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert at_rest() == before
    assert torch.equal(torch.rand(8, device=CUDA), numbers)
    recording = record(torch.sigmoid)
    for _ in range(3):
        (found,) = recording([x])
        assert torch.equal(found, expected)
    recording.release()
