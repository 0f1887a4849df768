"""Regions as operators: what is in them, that the graph still means the same, and the code that Inductor makes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, product
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch.nn import functional

import models
from kitsune.capture.trace import trace
from kitsune.device import refuse_inductor
from kitsune.errors import Refusal
from kitsune.execution.in_order import InOrder
from kitsune.execution.lower import lower
from kitsune.graph import dataflow
from kitsune.kernels.inductor import INDUCTOR
from kitsune.kernels.regions import Backend, Code, region_operator
from kitsune.passes import pipeline
from kitsune.passes.regions import Fused, Region, fuse_regions
from kitsune.passes.regions.grouping import Item, grouped
from kitsune.plan import TaskGraph, task_graph
from kitsune.plan.legality import problem
from kitsune.schedule import DataflowScheduler
from kitsune.schedule.cost import measured_costs
from kitsune.timing import CostCache
from tests.kitsune.passes.running import (
    OPERATORS,
    InFloat64,
    able,
    interpreted,
    names,
    results,
    values_are_right,
)
from tests.kitsune.plan.running import effects, node_order, random_order
from tests.kitsune.steps import TracedStep, bits, dropout_step, model_step, traced_step

CPU = torch.device("cpu")
ROWS, COLUMNS = 6, 8


# Steps of models


class Block(nn.Module):
    """A transformer block on tokens of 16 features, (N, L, 16), and a head of 5 classes."""

    def __init__(self, *, width: int = 32, num_heads: int = 4) -> None:
        super().__init__()
        self.width, self.num_heads = width, num_heads
        self.embedding = nn.Linear(16, width)
        self.first_norm, self.last_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.combine = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        heads = self.project(self.first_norm(x)).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        scores = heads[0] @ heads[1].transpose(-1, -2) * (self.width // self.num_heads) ** -0.5
        x = x + self.combine((scores.softmax(-1) @ heads[2]).transpose(1, 2).flatten(2))
        x = x + self.contract(functional.gelu(self.expand(self.last_norm(x))))
        return self.head(x.mean(1))


def block_step() -> TracedStep:
    return traced_step(Block(), functional.cross_entropy, torch.randn(3, 6, 16), torch.randint(5, (3,)))


STEPS: dict[str, Callable[[], TracedStep]] = {
    "mlp": lambda: model_step("mlp"),
    "lenet": lambda: model_step("lenet"),
    "dropout": dropout_step,
    "block": block_step,
}


def cleared(module: fx.GraphModule) -> fx.GraphModule:
    return pipeline.run(module, pipeline.CLEARING, verify=True)


def finished(module: fx.GraphModule) -> fx.GraphModule:
    return pipeline.run(module, pipeline.FINISHING)


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_the_same_bits_in_any_legal_order(name: str) -> None:
    step, rng = STEPS[name](), random.Random(0)
    before = cleared(step.module)
    fused = fuse_regions(before, OPERATORS)
    assert fused.regions
    assert fused.refused == ()
    for module in (fused.module, finished(fused.module)):
        assert results(module, step.fresh_inputs()) == results(step.module, step.fresh_inputs())
        assert values_are_right(module, step.fresh_inputs())
        tasks = task_graph(module.graph)
        assert problem(module.graph, tasks) is None
        expected = effects(module, names(module), step.fresh_inputs())
        order = node_order(module, tasks, random_order(tasks, rng))
        assert effects(module, order, step.fresh_inputs()) == expected
    assert_sound(before, fused)


def test_what_is_fused_in_an_mlp() -> None:
    """Of each layer the gradient of its activation with the sum for its bias; the loss as far as the CPU allows."""
    fused = fuse_regions(cleared(model_step("mlp").module), OPERATORS)
    assert [region.nodes for region in fused.regions] == [
        ("nll_loss_backward", "_log_softmax_backward_data", "sum_1"),
        ("threshold_backward", "sum_2"),
        ("threshold_backward_1", "sum_3"),
    ]
    assert [(region.num_inputs, region.num_outputs) for region in fused.regions] == [(4, 2), (2, 2), (2, 2)]
    assert {region.name for region in fused.regions} <= set(names(fused.module))


@pytest.mark.slow
def test_residual_connections_are_added_and_activated_at_once() -> None:
    step = model_step("resnet18")
    fused = fuse_regions(cleared(step.module), OPERATORS)
    assert results(finished(fused.module), step.fresh_inputs()) == results(step.module, step.fresh_inputs())
    targets = [[name.rstrip("_0123456789") for name in region.nodes] for region in fused.regions]
    assert targets.count(["add", "relu"]) == 7
    assert targets.count(["add", "threshold_backward"]) == 8
    assert len({region.operator for region in fused.regions}) < len(fused.regions)


def test_the_pass_leaves_its_argument_alone() -> None:
    module = cleared(model_step("mlp").module)
    before = str(module.graph)
    fuse_regions(module, OPERATORS)
    assert str(module.graph) == before


def test_planning_measuring_and_lowering_take_regions() -> None:
    step = model_step("mlp")
    fused = fuse_regions(cleared(step.module), OPERATORS).module
    tasks = task_graph(fused.graph)
    costs = measured_costs(fused, tasks, step.fresh_inputs(), CostCache(None, {}))
    assert costs.source == "measured"
    schedule = DataflowScheduler(num_streams=1).schedule(tasks, costs)
    lowered = lower(fused, tasks, schedule).module
    wanted = bits(list(InOrder(step.module)(step.fresh_inputs())))
    assert bits(list(InOrder(fused)(step.fresh_inputs()))) == wanted
    assert bits(list(InOrder(lowered)(step.fresh_inputs()))) == wanted


# Random programs

Operator = Callable[[Tensor, Tensor], Tensor]


def _norm(a: Tensor, b: Tensor) -> Tensor:
    return functional.layer_norm(a, (4,), b[0], b[1])


# Each maps one or two (4, 4) tensors to another.
PIECES: Mapping[str, Operator] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "tanh": lambda a, b: a.tanh(),
    "gelu": lambda a, b: functional.gelu(a),
    "where": lambda a, b: torch.where(a > b, a, b * 0.5),
    "cast": lambda a, b: a.bfloat16().float(),
    "copy": lambda a, b: a.clone(),
    "ones": lambda a, b: a + torch.ones(4, 4),
    "sum": lambda a, b: a + b.sum(1, keepdim=True),
    "mean": lambda a, b: b.mean(0).expand(4, 4) + a,
    "var_mean": lambda a, b: torch.var_mean(a, 1, keepdim=True)[0] * b,
    "softmax": lambda a, b: a.softmax(1),
    "layer_norm": _norm,
    "cat": lambda a, b: torch.cat([a[:2], b[2:]]),
    "split": lambda a, b: torch.stack([*a.unbind(0)][::-1]),
    "transpose": lambda a, b: a.t(),
    "view": lambda a, b: a.reshape(-1).view(4, 4),
    "alias": lambda a, b: a[:],
    "matmul": lambda a, b: a @ b,
    "sort": lambda a, b: torch.sort(a)[0],
    "dropout": lambda a, b: functional.dropout(a, 0.5),
    "relu_": lambda a, b: a.relu_(),
    "add_": lambda a, b: a.add_(b.abs() + 1),
    "row_": lambda a, b: (a[0].mul_(2.5), a)[1],
    "copy_": lambda a, b: torch.empty_like(a).copy_(b),
}

# What the passes before this one are not made for.
WIDER_PIECES = PIECES | {"t_": lambda a, b: a.t_()}

Program = list[tuple[str, int, int]]


def programs_of(pieces: Mapping[str, Operator]) -> st.SearchStrategy[Program]:
    steps = st.tuples(st.sampled_from(sorted(pieces)), st.integers(0, 30), st.integers(0, 30))
    return st.lists(steps, min_size=2, max_size=16)


def program_inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 4, generator=generator) for _ in range(3)]


def run(program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The last two values and one in the middle."""
    values = list(inputs)
    for name, first, second in program:
        values.append(WIDER_PIECES[name](values[first % len(values)], values[second % len(values)]))
    return [values[-1], values[-2], values[len(values) // 2]]


@given(programs_of(WIDER_PIECES))
def test_a_program_does_the_same(program: Program) -> None:
    module = trace(lambda *inputs: run(program, inputs), program_inputs())
    assert_equivalent(module, fuse_regions(module, OPERATORS))


@given(programs_of(PIECES))
def test_a_program_that_overwrites_nothing_does_the_same(program: Program) -> None:
    module = cleared(trace(lambda *inputs: run(program, inputs), program_inputs()))
    fused = fuse_regions(module, OPERATORS)
    assert_equivalent(module, fused)
    last = finished(fused.module)
    assert results(last, program_inputs()) == results(module, program_inputs())
    assert problem(last.graph, task_graph(last.graph)) is None


def assert_equivalent(module: fx.GraphModule, fused: Fused) -> None:
    assert fused.refused == ()
    assert results(fused.module, program_inputs()) == results(module, program_inputs())
    assert values_are_right(fused.module, program_inputs())
    assert problem(fused.module.graph, task_graph(fused.module.graph)) is None
    assert_sound(module, fused)


def assert_sound(before: fx.GraphModule, fused: Fused) -> None:
    """Every operator runs once, no region lies around others, none depends on more library calls than before."""
    old, new = task_graph(before.graph), task_graph(fused.module.graph)
    inside = {name: region for region in fused.regions for name in region.nodes}
    assert len(inside) == sum(len(region.nodes) for region in fused.regions)
    kept = {task.name for task in new.tasks} - {region.name for region in fused.regions}
    assert kept | inside.keys() == {task.name for task in old.tasks}
    assert kept.isdisjoint(inside)
    for region in fused.regions:
        assert not _surrounded(old, region)
        assert len(region.nodes) > 1 or "backward" in region.nodes[0]
    library = {task.name for task in old.tasks if task.operator.split(".")[1] in ("mm", "addmm", "bmm", "convolution")}
    depths = _depths(old, library)
    assert {name: depth for name, depth in _depths(new, library).items() if name in library} == {
        name: depths[name] for name in library
    }


def _surrounded(tasks: TaskGraph, region: Region) -> bool:
    """Whether something outside depends on one operator of the region, and another one on that."""
    members = {task.index for task in tasks.tasks if task.name in region.nodes}
    following: set[int] = set()
    for task in tasks.tasks:
        earlier = {dependency.task for dependency in task.after}
        if task.index in members:
            if earlier & following:
                return True
        elif earlier & (members | following):
            following.add(task.index)
    return False


def _depths(tasks: TaskGraph, counted: set[str]) -> dict[str, int]:
    """By name, how many tasks of `counted` are on the longest way to the end of each task."""
    depths: list[int] = []
    for task in tasks.tasks:
        earlier = max((depths[dependency.task] for dependency in task.after), default=0)
        depths.append(earlier + (task.name in counted))
    return {task.name: depth for task, depth in zip(tasks.tasks, depths, strict=True)}


# Grouping


@st.composite
def graphs(draw: st.DrawFn) -> list[Item]:
    """Random items, each after some of the latest before it, of which it reads some."""
    items: list[Item] = []
    for place in range(draw(st.integers(6, 14))):
        earlier = (
            st.sets(st.integers(max(0, place - 5), place - 1), min_size=1, max_size=3) if place else st.just(set[int]())
        )
        after = sorted(draw(earlier))
        producers = tuple(one for one in after if draw(st.booleans()))
        reads = tuple(sorted(draw(st.sets(st.integers(0, 2), max_size=1))))
        items.append(Item(draw(st.integers(0, 4)) > 0, tuple(after), producers, draw(st.integers(1, 2)), reads))
    return items


# The first group, of the first item and the last one, lies between the other two, although none of its items does.
CROSSED = [
    Item(True, (), (), 1, (0,)),
    Item(True, (), (), 1, (1,)),
    Item(True, (0,), (), 1, (1,)),
    Item(True, (1,), (), 1, (0,)),
]


@example(CROSSED)
@given(graphs())
def test_groups_are_allowed_and_could_not_be_larger(items: list[Item]) -> None:
    groups = grouped(items)
    assert sorted(place for group in groups for place in group) == [
        place for place, item in enumerate(items) if item.fusible
    ]
    assert allowed(items, groups)
    for one, two in combinations(groups, 2):
        if any(related(items, *sorted(pair)) for pair in product(one, two)):
            joined = [group for group in groups if group not in (one, two)] + [tuple(sorted((*one, *two)))]
            assert not allowed(items, joined)


def related(items: Sequence[Item], earlier: int, later: int) -> bool:
    first, second = items[earlier], items[later]
    return earlier in second.producers or (
        first.num_elements == second.num_elements and bool({*first.reads} & {*second.reads})
    )


def allowed(items: Sequence[Item], groups: Sequence[tuple[int, ...]]) -> bool:
    """Whether all can run, and nothing waits for longer than without groups but what only its own group follows."""
    alone, together = waits(items, []), waits(items, groups)
    assert alone is not None
    home = {place: group for group in groups for place in group}
    followed = {
        earlier for place, item in enumerate(items) for earlier in item.after if earlier not in home.get(place, ())
    }
    return together is not None and all(alone[place] == together[place] for place in followed)


def waits(items: Sequence[Item], groups: Sequence[tuple[int, ...]]) -> dict[int, int] | None:
    """By item, how many items that are not fusible lie before its end if groups run at once; None if they cannot."""
    home = {place: group for group in groups for place in group}
    done: dict[int, int] = {}
    while len(done) < len(items):
        for place in range(len(items)):
            group = home.get(place, (place,))
            needed = {earlier for member in group for earlier in items[member].after} - set(group)
            if place not in done and needed <= done.keys():
                start = max((done[earlier] for earlier in needed), default=0)
                done |= {member: start + (not items[member].fusible) for member in group}
                break
        else:
            return None
    return done


# What belongs together


def fused_of(function: Callable[..., list[Tensor]], *inputs: Tensor) -> Fused:
    """The regions of a function, which is found to do the same with them."""
    module = trace(function, inputs)
    fused = fuse_regions(cleared(module), OPERATORS)
    copies = [[tensor.clone() for tensor in inputs] for _ in range(2)]
    assert results(fused.module, copies[0]) == results(module, copies[1])
    assert problem(fused.module.graph, task_graph(fused.module.graph)) is None
    return fused


def members(fused: Fused) -> list[tuple[str, ...]]:
    return [region.nodes for region in fused.regions]


def matrix(rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    return torch.randn(rows, columns)


def square() -> Tensor:
    return torch.randn(COLUMNS, COLUMNS)


def test_readers_of_one_value_are_one_region_if_they_iterate_alike() -> None:
    fused = fused_of(lambda x, w: [(y := x @ w).exp(), y.sum(0), (y[0] + 1)], matrix(), square())
    assert members(fused) == [("exp", "sum_1")]


def test_what_has_nothing_in_common_stays_apart() -> None:
    assert members(fused_of(lambda x, y: [x.exp(), y.exp(), x[0].sin(), x[1].cos()], matrix(), matrix())) == []


def test_a_value_does_not_wait_for_what_comes_late() -> None:
    """`exp` is needed early by `mm`, and `mul` would make it wait for another one."""

    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        late = torch.relu(w @ w) @ w
        early = x.exp()
        return [early @ w, early * (x @ late)]

    assert members(fused_of(function, matrix(), square())) == []


def test_a_value_that_nothing_else_reads_may_wait() -> None:
    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        return [x.exp() * (x @ (torch.relu(w @ w) @ w))]

    assert members(fused_of(function, matrix(), square())) == [("exp", "mul")]


def test_no_region_lies_around_a_library_call() -> None:
    assert members(fused_of(lambda x, w: [(y := x.exp()) + y @ w], matrix(), square())) == []


def test_shared_constants_are_made_in_their_region() -> None:
    def function(x: Tensor) -> list[Tensor]:
        ones = torch.ones(ROWS, COLUMNS)
        return [(x + ones).exp() * ones]

    assert members(fused_of(function, matrix())) == [("ones", "add", "exp", "mul")]


def test_a_region_needs_two_kernels() -> None:
    """Memory without content is none. A view's gradient is one operator, but two kernels: zeros and a copy."""
    assert members(fused_of(lambda x: [torch.empty(COLUMNS, ROWS).copy_(x.t())], matrix())) == []
    backward = torch.ops.aten.select_backward
    assert members(fused_of(lambda x: [backward(x, [3, ROWS, COLUMNS], 0, 1)], matrix())) == [("select_backward",)]


# Memory


def test_views_of_results_stay_outside() -> None:
    fused = fused_of(lambda x: [(y := (x + 1).exp()).t(), y.view(-1), y.sum()], matrix())
    (region,) = fused.regions
    assert region.nodes == ("add", "exp", "sum_1")
    assert region.num_outputs == 2
    views = [node for node in fused.module.graph.nodes if node.target in (torch.ops.aten.t.default,)]
    (base,) = views[0].all_input_nodes
    assert base.name == "exp"
    assert dataflow.storages(views[0]) == dataflow.storages(base)


def test_two_views_of_a_value_are_read_as_one() -> None:
    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        y = x @ w
        return [y.view(-1) * 2, (y.t() + 1) * y.unbind(0)[0][:, None]]

    assert [region.num_inputs for region in fused_of(function, matrix(), square()).regions] == [1]


def test_results_are_laid_out_as_they_were() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        return [(x.relu() + 1), (x.t() * 2).exp(), (y * 2).sum((2, 3)), y.exp()]

    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    fused = fused_of(function, matrix(), images)
    assert [region.nodes for region in fused.regions] == [("relu", "add", "mul", "exp"), ("mul_1", "sum_1", "exp_1")]
    for node in fused.module.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "kitsune_regions":
            inputs = [torch.randn_like(tensor) for one in node.args for tensor in dataflow.tensors(one)]
            checks = torch.library.opcheck(node.target, inputs, test_utils=("test_schema", "test_faketensor"))
            assert set(checks.values()) == {"SUCCESS"}


def test_dead_values_are_not_computed() -> None:
    module = trace(lambda x: [(y := x.exp()) + 1, y * 2], [matrix()])
    graph = module.graph
    graph.output_node().args = ([graph.output_node().args[0][0]],)
    (region,) = fuse_regions(module, OPERATORS).regions
    assert region.nodes == ("exp", "add", "mul")
    assert region.num_outputs == 1


def test_values_written_in_place_are_functional_in_a_region() -> None:
    """`y` is read by an alias before it is written and by another one afterwards."""

    def function(x: Tensor) -> list[Tensor]:
        y = x * 2
        before = y + 1
        y.add_(before).relu_()
        return [before * y.view(-1)[:COLUMNS], y]

    assert members(fused_of(function, matrix())) == [("mul", "add", "add_", "relu_", "mul_1")]


def test_what_writes_in_place_is_in_no_region() -> None:
    """So neither is anything that must come before it together with anything that must come after it."""

    def function(x: Tensor) -> list[Tensor]:
        y = x * 2
        z = y + 1
        y.add_(3)
        return [(z * y).exp()]

    module = trace(function, [matrix()])
    fused = fuse_regions(module, OPERATORS)
    assert members(fused) == [("mul", "add"), ("mul_1", "exp")]
    x = matrix()
    assert results(fused.module, [x.clone()]) == results(module, [x.clone()])


def test_views_are_made_before_their_base_is_reshaped() -> None:
    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        y = x @ w
        row = y[0]
        y.t_()
        return [(row + 1).exp(), y]

    module = trace(function, [matrix(), square()])
    fused, inputs = fuse_regions(module, OPERATORS), [matrix(), square()]
    assert results(fused.module, inputs) == results(module, inputs)


def test_inputs_of_the_graph_are_written_where_they_were() -> None:
    def function(x: Tensor) -> list[Tensor]:
        before = x.exp() + 1
        x.mul_(2)
        return [before, (x * 3).exp() + before]

    fused = fused_of(function, matrix())
    assert "mul_" not in {name for region in fused.regions for name in region.nodes}
    assert ("exp", "add") in members(fused)


LEFT_OUT: dict[str, Callable[[Tensor], Tensor]] = {
    "aten.rand_like.default": torch.rand_like,
    "aten.sort.default": lambda x: x.sort()[0],
    "aten.cumsum.default": lambda x: x.cumsum(0),
    "aten.embedding.default": lambda x: functional.embedding(torch.zeros(ROWS, COLUMNS, dtype=torch.int64), x),
    "aten.index_put.default": lambda x: x.index_put((torch.zeros(2, dtype=torch.int64),), x[:2], accumulate=True),
    "aten.max_pool2d_with_indices.default": lambda x: functional.max_pool2d(x[None, None], 3, 1, 1)[0, 0],
    "aten.complex.default": lambda x: torch.view_as_real(torch.complex(x, x))[..., 0],
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_operators_that_are_left_out(name: str) -> None:
    def function(x: Tensor) -> list[Tensor]:
        y = LEFT_OUT[name]((x + 1) * 2)
        return [y[:ROWS, :COLUMNS].exp() * 3]

    fused = fused_of(function, torch.randn(COLUMNS, COLUMNS))
    assert name in {task.operator for task in task_graph(fused.module.graph).tasks}
    assert fused.regions


# Operators and their code


def chain(factor: float) -> Callable[[Tensor], list[Tensor]]:
    return lambda x: [(x * factor).exp().sum(0)]


def fuse(function: Callable[..., list[Tensor]], inputs: Sequence[Tensor], backend: Backend) -> Fused:
    return fuse_regions(cleared(trace(function, inputs)), backend)


def test_equal_regions_share_an_operator() -> None:
    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        y = ((x + 1).exp() @ w + 1).exp() @ w
        return [(y + 2).exp() @ w, (y.t().contiguous().t() + 1).exp() @ w]

    fused = fused_of(function, matrix(), square())
    first, second, *others = [region.operator for region in fused.regions]
    assert first == second
    assert len({first, *others}) == 1 + len(others)


def test_code_is_made_once_in_a_process() -> None:
    made: list[fx.GraphModule] = []

    def noting(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Code:
        made.append(module)
        return interpreted(module, inputs)

    counting = Backend("counting", able, noting)
    (first,) = fuse(chain(2.0), [matrix()], counting).regions
    (second,) = fuse(chain(2.0), [matrix()], counting).regions
    assert first.operator == second.operator
    assert len(made) == 1
    (other,) = fuse(chain(2.5), [matrix()], counting).regions
    (larger,) = fuse(chain(2.0), [matrix(ROWS + 1)], counting).regions
    (turned,) = fuse(chain(2.0), [matrix(COLUMNS, ROWS).t()], counting).regions
    assert len({region.operator for region in (first, other, larger, turned)}) == len(made) == 4


def test_two_threads_may_make_the_same_operator() -> None:
    together = threading.Barrier(2, timeout=10)

    def waiting(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Code:
        together.wait()
        return interpreted(module, inputs)

    graph = fx.Graph()
    graph.output([graph.call_function(torch.ops.aten.exp.default, (graph.placeholder("x"),))])
    module, backend = fx.GraphModule({}, graph), Backend("waiting", able, waiting)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: region_operator(module, [matrix()], [matrix()], backend), range(2))
    assert first is second


def changed(change: Callable[[list[Tensor], tuple[Tensor, ...]], Any]) -> Callable[..., Code]:
    """Code whose results are changed: `change` gets them and the inputs."""

    def compile(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Code:
        code = interpreted(module, inputs)
        return lambda *tensors: change(list(code(*tensors)), tensors)

    return compile


def failing(_module: fx.GraphModule, _inputs: Sequence[Tensor]) -> Code:
    raise NotImplementedError("no such operator\nin this compiler")


BAD: dict[str, tuple[Callable[..., Code], str]] = {
    "fails": (failing, "fails failed: NotImplementedError: no such operator"),
    "breaks": (changed(lambda results, inputs: results[5]), "breaks failed: IndexError"),
    "short": (changed(lambda results, inputs: results[:0]), "returns 0 tensors, not 1"),
    "turned": (
        changed(lambda results, inputs: [results[0].t().contiguous().t()]),
        "returns torch.float32 (6, 8) (1, 6)",
    ),
    "cast": (changed(lambda results, inputs: [results[0].double()]), "returns torch.float64"),
    "alias": (changed(lambda results, inputs: [inputs[0]]), "returns a tensor in the memory of another one"),
}


def test_strides_of_dimensions_with_one_place_do_not_matter() -> None:
    """Code may return others than those of the operators; users of the results see the latter."""
    x = matrix()
    strides = (1000, 1000, *x.stride())
    compile = changed(lambda results, inputs: [results[0].as_strided((1, 1, *x.shape), strides)])
    module = cleared(trace(lambda x: [(x[None, None] + 1).exp()], [x]))
    fused = fuse_regions(module, Backend("strided", able, compile))
    assert fused.refused == ()
    (result,) = fused.module(x)
    assert result.stride() == x[None, None].stride() != strides
    assert torch.equal(result, (x[None, None] + 1).exp())


@pytest.mark.parametrize("name", BAD)
def test_regions_without_code_stay_as_they_are(name: str) -> None:
    compile, reason = BAD[name]
    module = cleared(trace(lambda x: [(x + 1).exp().relu_()], [matrix()]))
    fused = fuse_regions(module, Backend(name, able, compile))
    assert fused.regions == ()
    (refused,) = fused.refused
    assert refused.nodes == ("add", "exp", "relu_")
    assert reason in refused.refusal.reason
    assert names(finished(fused.module)) == ["add", "exp", "relu_"]


def test_without_a_compiler_nothing_is_fused() -> None:
    missing = Refusal("there is no compiler")
    fused = fuse(chain(3.0), [matrix()], Backend("missing", lambda device: missing, interpreted))
    assert [refused.refusal for refused in fused.refused] == [missing]


def test_a_refused_region_does_not_keep_others_from_being_fused() -> None:
    def picky(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Code:
        if any(node.target is torch.ops.aten.tanh.default for node in module.graph.nodes):
            raise RuntimeError("tanh")
        return interpreted(module, inputs)

    x, w = matrix(), square()
    fused = fuse(lambda x, w: [((x + 1).tanh() @ w + 1).exp()], [x, w], Backend("picky", able, picky))
    assert members(fused) == [("add_1", "exp")]
    assert [refused.nodes for refused in fused.refused] == [("add", "tanh")]
    assert torch.equal(fused.module(x, w)[0], ((x + 1).tanh() @ w + 1).exp())


# Inductor

needs_compiler = pytest.mark.skipif(refuse_inductor(CPU) is not None, reason="needs a C++ compiler")


@pytest.mark.slow
@needs_compiler
def test_inductor_keeps_the_roundings_between_operators() -> None:
    """Products and sums are not contracted, and bfloat16 is rounded to after every operator."""

    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        return [(x * y + x) / (y * y + 1) - x, (x.t() * 2 + 1).abs()]

    for dtype in (torch.float32, torch.bfloat16):
        inputs = [matrix(40, 50).to(dtype), matrix(40, 50).to(dtype)]
        fused = fuse(function, inputs, INDUCTOR)
        assert fused.refused == ()
        assert bits([one.float() for one in fused.module(*inputs)]) == bits([one.float() for one in function(*inputs)])


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", ["mlp", "block"])
def test_steps_with_inductors_code(name: str) -> None:
    step = STEPS[name]()
    fused = fuse_regions(cleared(step.module), INDUCTOR)
    assert fused.refused == ()
    assert_as_accurate(fused.module, step)


@pytest.mark.slow
@needs_compiler
def test_inductor_finds_its_code_on_disk() -> None:
    inputs = [matrix(7, 9)]
    fuse(chain(1.5), inputs, INDUCTOR)
    torch._dynamo.reset()
    counters.clear()
    (region,) = fuse(chain(1.5), inputs, Backend("inductoragain", INDUCTOR.refuse, INDUCTOR.compile)).regions
    assert region.operator.startswith("kitsune_regions.inductoragain_")
    assert counters["inductor"]["fxgraph_cache_hit"] == 1


def outputs(module: fx.GraphModule, step: TracedStep) -> list[Tensor]:
    """The loss and the gradients."""
    torch.manual_seed(3)
    return list(InOrder(module)(step.fresh_inputs()))


# GPU


def cuda_step(name: str) -> TracedStep:
    if name == "block":
        x, y = torch.randn(16, 32, 16, device="cuda"), torch.randint(5, (16,), device="cuda")
        return traced_step(Block(width=64).cuda(), functional.cross_entropy, x, y)
    workload = models.build(name)
    batch = [tensor.cuda() for tensor in workload.batch(16)]
    return traced_step(workload.module.cuda(), workload.loss_fn, *batch)


def in_float64(step: TracedStep) -> list[Tensor]:
    """The loss and the gradients by the same operators in float64."""
    inputs = [one.double() if one.is_floating_point() else one for one in step.fresh_inputs()]
    with torch.no_grad():
        return list(InFloat64(step.module).run(*inputs))


def assert_as_accurate(fused: fx.GraphModule, step: TracedStep) -> None:
    """Results are as far from the exact ones as those of the operators are, to a factor."""
    triples = zip(outputs(fused, step), outputs(step.module, step), in_float64(step), strict=True)
    for found, eager, exact in triples:
        assert found.stride() == eager.stride()
        least = 1e-6 * exact.abs().max().clamp(min=1e-2)
        assert (found - exact).abs().max() <= 4 * (eager - exact).abs().max() + least


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mlp", "block"])
def test_steps_on_a_gpu_are_as_accurate_as_eager(name: str) -> None:
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False, deterministic=True):
        step = cuda_step(name)
        fused = fuse_regions(cleared(step.module), INDUCTOR)
        assert fused.refused == ()
        assert_as_accurate(fused.module, step)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mlp", "block"])
def test_a_recorded_step_does_the_same(name: str) -> None:
    step = cuda_step(name)
    module = finished(fuse_regions(cleared(step.module), INDUCTOR).module)
    inputs = step.fresh_inputs()
    initial = [tensor.clone() for tensor in inputs]
    wanted = [tensor.clone() for tensor in InOrder(module)(inputs)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = InOrder(module)(inputs)
    for tensor, value in zip(inputs, initial, strict=True):
        tensor.copy_(value)
    graph.replay()
    for found, expected in zip(recorded, wanted, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.gpu
def test_the_loss_is_one_region_on_a_gpu() -> None:
    fused = fuse_regions(cleared(cuda_step("mlp").module), OPERATORS)
    loss = ("_log_softmax", "nll_loss_forward", "nll_loss_backward", "_log_softmax_backward_data", "sum_1")
    assert loss in members(fused)
