"""Results written to planned memory: which, where, and the same to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, reject
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.nn import functional

from kitsune.capture.foreseen_layouts import lay_out_as_foreseen
from kitsune.capture.trace import trace
from kitsune.errors import RefusedError
from kitsune.execution.in_order import InOrder
from kitsune.execution.lanes import HostLanes
from kitsune.execution.lower import lower
from kitsune.execution.placing import only, places, writers
from kitsune.memory.planner import plan_memory
from kitsune.memory.pool import Block
from kitsune.plan import Schedule, task_graph
from tests.kitsune.execution.test_lower import PROGRAMS, any_schedule
from tests.kitsune.graph.programs import Program, inputs, traced


class Placed:
    """A graph lowered to a schedule, with every value that can be placed in an arena of garbage."""

    def __init__(self, module: fx.GraphModule, schedule: Schedule) -> None:
        self.tasks = task_graph(module.graph)
        self.writers = writers(module.graph)
        self.plan = plan_memory(only(self.tasks, self.writers), schedule)
        self.arena = Block(torch.full((self.plan.arena_bytes,), 0xFF, dtype=torch.uint8))  # NaN, in floating point
        placed = places(module.graph, self.tasks, self.writers, self.plan, self.arena)
        self.lowered = lower(module, self.tasks, schedule, placed)

    def __call__(self, values: list[Tensor]) -> list[Tensor]:
        lanes = HostLanes if self.lowered.num_streams > 1 else None
        return list(InOrder(self.lowered.module, lanes=lanes)(values))


@example([("empty_view", 0, 0), ("batch_norm", 3, 0), ("batch_norm", 0, 4)], 0, 1)  # laid out otherwise than foreseen
@given(PROGRAMS, st.integers(0, 2**20), st.integers(1, 3))
def test_the_results_are_the_same_to_the_bit(program: Program, seed: int, num_streams: int) -> None:
    module = traced(program)
    try:
        lay_out_as_foreseen(module, inputs())
    except RefusedError:
        reject()
    expected_values, values = inputs(), inputs()
    torch.manual_seed(seed)
    expected = InOrder(module)(expected_values)
    placed = Placed(module, any_schedule(task_graph(module.graph), seed, num_streams))
    for _ in range(2):
        again = [value.clone() for value in values]
        torch.manual_seed(seed)
        for one, other in zip((*placed(again), *again), (*expected, *expected_values), strict=True):
            assert torch.equal(one, other)


class Addresses(fx.Interpreter):
    """Notes where the results of nodes lie."""

    def run_node(self, n: fx.Node) -> object:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.found[n.name] = result.data_ptr()
        return result

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: dict[str, int] = {}


def test_values_lie_where_the_plan_says() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        hidden = torch.tanh(x @ y)
        return [(hidden @ y + hidden).sum(0)]

    module = trace(function, [torch.randn(8, 8), torch.randn(8, 8)])
    graph = task_graph(module.graph)
    placed = Placed(module, Schedule("in order", tuple(range(len(graph.tasks))), (0,) * len(graph.tasks)))
    addresses = Addresses(placed.lowered.module)
    addresses.run(torch.randn(8, 8), torch.randn(8, 8))
    base = placed.arena.memory.data_ptr()
    offsets = {
        value.name: offset
        for value, offset in zip(graph.values, placed.plan.offsets, strict=True)
        if offset is not None
    }
    assert len(offsets) == 4
    assert {name: addresses.found[name] - base for name in offsets} == offsets
    assert placed.plan.arena_bytes < 512 * len(offsets), "nothing shares memory"


@pytest.mark.parametrize(
    ("function", "placed"),
    [
        (lambda x: [(x @ x).sum()], ["mm"]),
        (lambda x: [x @ x], []),  # a result belongs to the caller
        (lambda x: [(x @ x).t()], []),
        (lambda x: [x.add_(1).sum()], []),
        (lambda x: [torch.bernoulli(x.sigmoid()).sum()], ["sigmoid"]),  # random numbers stay as they are
        (lambda x: [x.clone().sum()], []),  # no kernel of its own writes it
        (lambda x: [functional.conv2d(x[None, None], x[None, None]).sum()], []),
        (lambda x: [x.expand(4, 8, 8).sum()], []),
        (lambda x: [torch.max(x, 0)[0].sum()], []),  # several results
        (lambda x: [(x.double() @ x.double()).sum()], ["mm"]),
        (lambda x: [(x @ x)[0].sum()], ["mm"]),  # a view of a placed value is one as well
        (lambda x: [(x @ x)[0]], []),
        (lambda x: [(x @ x).t_().sum()], []),  # the planned tensor would stay transposed
        (lambda x: [(x > 0).sum()], ["gt"]),
    ],
)
def test_what_can_be_placed(function: Callable[[Tensor], list[Tensor]], placed: list[str]) -> None:
    module = trace(function, [torch.randn(8, 8)])
    assert list(writers(module.graph)) == placed


def test_looking_for_writers_leaves_torch_s_operators_alone() -> None:
    """torch compares operators by identity, and makes a new object where one is asked for in the wrong way."""
    before = torch.ops.aten.mm.default, torch.ops.aten.mm.out
    writers(trace(lambda x: [(x @ x).sum()], [torch.randn(8, 8)]).graph)
    assert torch.ops.aten.mm.default is before[0]
    assert torch.ops.aten.mm.out is before[1]
