"""Costs: the work of operators against counting by hand, the estimate's shape, and measuring that leaves no trace."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from kitsune.capture.trace import trace
from kitsune.graph.signature import signature
from kitsune.plan import Costs, Task, TaskGraph
from kitsune.schedule import measure as measure_module
from kitsune.schedule.analytic import Work, launches, work
from kitsune.schedule.cost import analytic_cost, analytic_costs, measured_cost, measured_costs
from kitsune.schedule.limits import cpu_limits, cuda_limits, device_limits
from kitsune.timing import CostCache

H200 = cuda_limits("H200", (9, 0))
Function = Callable[..., Any]
sizes = st.integers(1, 6)


def traced(function: Function, *inputs: Tensor) -> fx.GraphModule:
    def flat(*values: Tensor) -> list[Tensor]:
        results = function(*values)
        return [results] if isinstance(results, Tensor) else list(results or values)

    return trace(flat, inputs)


def operators(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def tasks_of(graph: fx.Graph) -> TaskGraph:
    """A task for each operator that launches something, with the views and allocations that follow it."""
    groups: list[list[str]] = []
    for node in operators(graph):
        if launches(node) or not groups:
            groups.append([])
        groups[-1].append(node.name)
    return TaskGraph(tuple(Task(index, names[0], names[0], tuple(names)) for index, names in enumerate(groups)))


def only_work(function: Function, *inputs: Tensor) -> Work:
    (node,) = filter(launches, operators(traced(function, *inputs).graph))
    return work(node)


def traffic(function: Function, *inputs: Tensor) -> tuple[int, int]:
    job = only_work(function, *inputs)
    return job.bytes_read, job.bytes_written


def multiplications(ones: Tensor) -> int:
    """How many products of ones a result was added up from, which is the definition of its arithmetic."""
    return int(ones.double().sum().item())


def analytic(function: Function, *inputs: Tensor) -> Costs:
    module = traced(function, *inputs)
    return analytic_costs(module.graph, tasks_of(module.graph), H200)


# ---------------------------------------------------------------- bytes, by hand

A = torch.zeros(64, 32)  # 8192 bytes
ROW = torch.zeros(32)  # 128 bytes


@pytest.mark.parametrize(
    ("function", "inputs", "expected"),
    [
        (lambda a, b: a + b, (A, A.clone()), (16384, 8192)),
        (lambda a: a + a, (A,), (8192, 8192)),
        (lambda a, row: a + row, (A, ROW), (8192 + 128, 8192)),
        (lambda a, row: a + row.expand(64, 32), (A, ROW), (8192 + 128, 8192)),
        (lambda a: a.double(), (A,), (8192, 16384)),
        (lambda a: a.sum(), (A,), (8192, 4)),
        (lambda a, b: a.add_(b), (A, A.clone()), (16384, 8192)),
        (lambda a, b: a.copy_(b), (A, A.clone()), (8192, 8192)),
        (lambda a: a.zero_(), (A,), (0, 8192)),
        (lambda a: a[3].mul_(2), (A,), (128, 128)),
        (lambda a: a.t().contiguous(), (A,), (8192, 8192)),
        (lambda a, b: a @ b, (A, torch.zeros(32, 16)), (8192 + 2048, 4096)),
        (lambda a, b: torch._foreach_add_([a, b], 1), (A, ROW), (8320, 8320)),
        (lambda t, i: F.embedding(i, t), (torch.zeros(10_000, 32), torch.zeros(7, dtype=torch.long)), (952, 896)),
        (lambda t, i: t[i], (torch.zeros(10_000, 32), torch.zeros(7, dtype=torch.long)), (952, 896)),
        (
            lambda t, i, v: t.index_put_([i], v),
            (torch.zeros(10_000, 32), torch.zeros(7, dtype=torch.long), torch.zeros(7, 32)),
            (896 + 56 + 896, 896),
        ),
        (lambda a: torch.zeros(5, 5), (A,), (0, 100)),
        (lambda a: a + torch.empty(0), (torch.zeros(0),), (0, 0)),
    ],
)
def test_bytes(function: Function, inputs: Sequence[Tensor], expected: tuple[int, int]) -> None:
    assert traffic(function, *inputs) == expected


def test_bytes_of_a_fused_update() -> None:
    def update(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor, lr: Tensor) -> None:
        torch._fused_adam_(
            [p], [g], [m], [v], [], [step], lr=lr, beta1=0.9, beta2=0.9,
            weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    tensors = [torch.zeros(1000) for _ in range(4)]
    read, written = traffic(update, *tensors, torch.zeros(()), torch.zeros(()))
    assert 16_000 <= read <= 16_008, "parameter, gradient and moments, and two scalars"
    assert 12_000 <= written <= 12_008, "all but the gradient"


def test_views_and_allocations_launch_nothing() -> None:
    module = traced(lambda a: [a.t(), a.view(-1)[3:], a.expand(2, 64, 32), a.detach(), torch.empty(3)], A)
    assert operators(module.graph)
    assert not any(map(launches, operators(module.graph)))
    costs = analytic_costs(module.graph, tasks_of(module.graph), H200)
    assert [cost.us for cost in costs.tasks] == [0.0]


def test_what_writes_in_place_or_copies_launches() -> None:
    module = traced(lambda a: [a.add_(1), a.t().reshape(-1)], A)
    assert [str(node.target) for node in operators(module.graph) if launches(node)] == [
        "aten.add_.Tensor",
        "aten.clone.default",
    ]


# ---------------------------------------------------------------- arithmetic, against its definition


@given(batch=sizes, rows=sizes, inner=sizes, columns=sizes)
def test_flops_of_matrix_products(batch: int, rows: int, inner: int, columns: int) -> None:
    a, b = torch.ones(batch, rows, inner), torch.ones(batch, inner, columns)
    assert only_work(torch.bmm, a, b).flops == 2 * multiplications(a @ b)
    assert only_work(torch.mm, a[0], b[0]).flops == 2 * multiplications(a[0] @ b[0])
    assert only_work(torch.addmm, torch.ones(columns), a[0], b[0]).flops == 2 * multiplications(a[0] @ b[0])
    assert only_work(torch.baddbmm, torch.ones(columns), a, b).flops == 2 * multiplications(a @ b)


@given(
    batch=sizes,
    groups=st.integers(1, 3),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    image=st.integers(4, 7),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    transposed=st.booleans(),
)
def test_flops_of_convolutions_forward_and_backward(
    batch: int, groups: int, channels: tuple[int, int], image: int, kernel: int, stride: int, transposed: bool
) -> None:
    x = torch.ones(batch, channels[0] * groups, image, image)
    first, second = (channels[0] * groups, channels[1]) if transposed else (channels[1] * groups, channels[0])
    weight = torch.ones(first, second, kernel, kernel)
    settings = ([stride] * 2, [0, 0], [1, 1], transposed, [0, 0], groups)

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return torch.convolution(x, weight, None, *settings)

    out = forward(x, weight)
    wanted = 2 * multiplications(out)
    job = only_work(forward, x, weight)
    assert (job.flops, job.convolution) == (wanted, True)
    for mask in itertools.product([False, True], repeat=2):
        if not any(mask):
            continue

        def backward(grad: Tensor, x: Tensor, weight: Tensor, mask: tuple[bool, bool] = mask) -> list[Tensor]:
            grads = torch.ops.aten.convolution_backward(grad, x, weight, None, *settings, [*mask, False])
            return [grad for grad in grads if grad is not None]

        grads = backward(torch.ones_like(out), x, weight)
        counted = 2 * sum(map(multiplications, grads))
        assert only_work(backward, torch.ones_like(out), x, weight).flops == counted == wanted * sum(mask)


def test_flops_of_attention_forward_and_backward() -> None:
    query, key, value = torch.zeros(2, 3, 5, 8), torch.zeros(2, 3, 7, 8), torch.zeros(2, 3, 7, 8)
    product = 2 * 2 * 3 * 5 * 7 * 8  # of queries and keys, or of scores and values
    module = traced(F.scaled_dot_product_attention, query, key, value)
    assert sum(work(node).flops for node in operators(module.graph) if launches(node)) == 2 * product

    def backward(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        loss = F.scaled_dot_product_attention(query, key, value).sum()
        return torch.autograd.grad(loss, (query, key, value))

    module = traced(backward, *(tensor.requires_grad_() for tensor in (query, key, value)))
    flops = [work(node).flops for node in operators(module.graph) if launches(node)]
    assert sum(flops) == 7 * product, "the backward pass computes the scores again, and four gradients' products"


def test_other_operators_have_no_matrix_arithmetic() -> None:
    assert only_work(torch.relu, A).flops == 0
    assert only_work(lambda a: a.softmax(1), A).flops == 0


# ---------------------------------------------------------------- the estimate


@given(shape=st.tuples(*[st.integers(1, 2000)] * 3), factor=st.integers(2, 5), axis=st.integers(0, 2))
def test_the_estimate_grows_with_the_size(shape: tuple[int, int, int], factor: int, axis: int) -> None:
    larger = [size * (factor if place == axis else 1) for place, size in enumerate(shape)]

    def product_us(rows: int, inner: int, columns: int) -> float:
        flops, items = 2 * rows * inner * columns, rows * columns
        traffic = 4 * (rows * inner + inner * columns)
        job = Work(traffic, 4 * items, flops, max(items, flops // 1024), torch.float32)
        return analytic_cost(job, H200).us

    # Rounded parts of long sums leave a step of less than one part.
    assert product_us(*larger) >= product_us(*shape) * (1 - 1e-3)


@given(elements=st.integers(1, 10**8), more=st.integers(0, 10**8))
def test_an_elementwise_estimate_is_its_traffic(elements: int, more: int) -> None:
    def cost(count: int) -> tuple[float, float]:
        estimate = analytic_cost(Work(8 * count, 4 * count, 0, count, torch.float32), H200)
        return estimate.us, estimate.share

    us, share = cost(elements)
    assert us == pytest.approx(max(0.1, 12 * elements / 4.26e12 * 1e6))
    assert 0 < share <= 1
    assert all(second >= first for first, second in zip((us, share), cost(elements + more), strict=True))


def test_what_bounds_an_operator() -> None:
    def cost(moved: int, flops: int, dtype: torch.dtype = torch.bfloat16) -> tuple[str, float]:
        estimate = analytic_cost(Work(moved, 0, flops, 10**9, dtype), H200)
        return estimate.bound, estimate.us

    assert cost(4_260_000_000, 0) == ("memory", pytest.approx(1000.0))
    assert cost(0, 782_000_000_000) == ("compute", pytest.approx(1000.0))
    assert cost(4_260, 0)[0] == "latency"
    bound, us = cost(0, 782_000_000_000, torch.float32)
    assert (bound, us) == ("compute", pytest.approx(1000 * 989.4 / 66.9))


def test_a_small_matrix_product_cannot_use_the_whole_device() -> None:
    flops = 2 * 128 * 64 * 512
    job = Work(0, 0, flops, 128 * 64, torch.bfloat16)
    cost = analytic_cost(job, H200)
    assert cost.share == pytest.approx(1 / 132), "one tile on one multiprocessor"
    assert cost.us == pytest.approx(flops / (782e12 / 132) * 1e6)


def test_a_measured_operator_is_its_time_without_the_gap() -> None:
    job = Work(4_260_000_000, 0, 0, 10**9, torch.float32)
    assert measured_cost(job, H200, 2001.5, 1.5).us == 2000.0
    assert measured_cost(job, H200, 1.0, 1.5).us > 0
    half = measured_cost(job, H200, 2000.0, 0.0)
    assert (half.bound, half.share) == ("memory", pytest.approx(0.75)), "half the bandwidth, but a full grid"
    assert measured_cost(job, H200, 500.0, 0.0).share == 1.0, "caches may beat the memory"
    tiny = measured_cost(Work(4, 4, 0, 1, torch.float32), H200, 2.0, 1.0)
    assert (tiny.bound, tiny.share < 0.01) == ("latency", True)


def test_costs_follow_the_tasks() -> None:
    x, weight = torch.zeros(512, 1024), torch.zeros(1024, 1024)
    costs = analytic(lambda x, weight: torch.relu(x @ weight.t()).sum(), x, weight)
    assert len(costs.tasks) == 4, "the transposed weight, the product, relu, the sum"
    assert costs.tasks[0].us == 0
    assert costs.tasks[1].us == max(costs.tasks, key=lambda cost: cost.us).us
    assert (costs.launch_us, costs.sync_us, costs.source) == (0.96, 1.0, "analytic")


# ---------------------------------------------------------------- limits


def test_the_limits_of_an_h200_are_the_measured_ones() -> None:
    assert H200.bytes_per_s == pytest.approx(4.26e12)
    assert H200.flops_per_s(torch.bfloat16, convolution=False) == pytest.approx(782e12)
    assert (H200.launch_us, H200.sync_us, H200.parallel_items) == (0.96, 1.0, 132 * 8192)


def test_tf32_follows_the_flags() -> None:
    limits = cuda_limits("H200", (9, 0), tf32_matmul=False, tf32_convolution=True)
    assert limits.flops_per_s(torch.float32, convolution=True) == limits.tf32_flops
    assert limits.flops_per_s(torch.float32, convolution=False) == limits.single_flops
    assert limits.flops_per_s(torch.float16, convolution=False) == limits.half_flops
    assert limits.flops_per_s(torch.float64, convolution=True) == limits.double_flops


@pytest.mark.parametrize("capability", [(5, 0), (7, 2), (8, 7), (9, 0), (10, 3), (13, 0)])
def test_every_capability_has_limits(capability: tuple[int, int]) -> None:
    whole, half = cuda_limits("gpu", capability, 100), cuda_limits("gpu", capability, 50)
    assert whole.bytes_per_s == pytest.approx(2 * half.bytes_per_s)
    assert whole.half_flops >= whole.tf32_flops >= whole.single_flops >= whole.double_flops > 0


def test_the_cpu_has_limits() -> None:
    assert device_limits(torch.device("cpu")) == cpu_limits(torch.get_num_threads())
    assert cpu_limits(4).bytes_per_s == 4 * cpu_limits(1).bytes_per_s


@pytest.mark.gpu
def test_this_gpu_has_limits() -> None:
    limits = device_limits(torch.device("cuda"))
    assert limits.name == torch.cuda.get_device_name()
    assert limits.bytes_per_s > 1e10


# ---------------------------------------------------------------- signatures


def key(function: Function, *inputs: Tensor) -> str:
    (node,) = filter(launches, operators(traced(function, *inputs).graph))
    return signature(node)


def test_signatures_tell_apart_what_takes_different_time() -> None:
    base = torch.zeros(65, 64)
    keys = [
        key(torch.relu, A),
        key(torch.relu, A.double()),
        key(torch.relu, torch.zeros(32, 64)),
        key(torch.relu, torch.zeros(64, 64)[:, :32]),
        key(torch.relu, base.view(-1)[1 : 1 + 64 * 32].view(64, 32)),
        key(torch.sigmoid, A),
        key(lambda a: a.sum(0), A),
        key(lambda a: a.sum(1), A),
        key(lambda a: torch._foreach_add([a], 1), A),
        key(lambda a: torch._foreach_add([a, a], 1), A),
    ]
    assert len(set(keys)) == len(keys)


def test_signatures_are_the_same_wherever_the_call_stands() -> None:
    module = traced(lambda a, b: [torch.relu(a), torch.relu(b.exp()), torch.relu(a)], A, A.clone())
    relus = [node for node in operators(module.graph) if node.target is torch.ops.aten.relu.default]
    assert len({signature(node) for node in relus}) == 1 < len(relus)
    assert signature(relus[0]) == key(torch.relu, A)


def test_flags_that_choose_kernels_are_part_of_the_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(torch.relu, A)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert key(torch.relu, A) != before


# ---------------------------------------------------------------- measuring


class Calls(TorchDispatchMode):
    """Counts the calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def step(x: Tensor, index: Tensor, weight: Tensor, table: Tensor, mean: Tensor, variance: Tensor) -> list[Tensor]:
    """Reads by computed indices, draws random numbers, writes inputs, statistics and intermediates."""
    chosen = F.embedding((index + 1) % 4, table)
    hidden = F.dropout(F.batch_norm(x @ weight.t() + chosen, mean, variance, training=True), 0.5)
    if x.device.type == "cpu":
        hidden.add_(torch.tensor([1.0, 2.0, 3.0]))  # a constant of the graph
    weight.sub_(hidden.t() @ x)
    torch._foreach_mul_([table, variance], 0.5)
    return [hidden.sum(), weight.detach()]


def arguments(device: torch.device) -> list[Tensor]:
    index = torch.tensor([0, 1, 2, 3, 0], device=device)
    tensors = [torch.randn(5, 2), torch.randn(3, 2), torch.randn(4, 3), torch.zeros(3), torch.ones(3)]
    x, *rest = (tensor.to(device) for tensor in tensors)
    return [x, index, *rest]


def measured(module: fx.GraphModule, inputs: Sequence[Tensor], cache: CostCache, **options: float) -> Costs:
    return measured_costs(module, tasks_of(module.graph), inputs, cache, **options)


@pytest.fixture
def cache() -> CostCache:
    return CostCache(None, {})


def test_measuring_gives_every_operator_a_time(device: torch.device, cache: CostCache) -> None:
    inputs = arguments(device)
    module = trace(step, inputs)
    costs = measured(module, inputs, cache, limit_s=60.0)
    assert costs.source == "measured"
    assert costs.launch_us > 0
    assert costs.sync_us >= 0
    for task, cost in zip(tasks_of(module.graph).tasks, costs.tasks, strict=True):
        runs = any(launches(node) for node in module.graph.nodes if node.name in task.nodes)
        assert (cost.us > 0) == runs
        assert math.isfinite(cost.us)
        assert 0 < cost.share <= 1


def test_measuring_changes_nothing_of_the_users(device: torch.device, cache: CostCache) -> None:
    inputs = arguments(device)
    module = trace(step, inputs)
    before = [tensor.clone() for tensor in inputs]
    versions = [tensor._version for tensor in inputs]
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device.type == "cuda" else [])]
    with torch.autocast(device.type, torch.bfloat16):
        measured(module, inputs, cache)
        assert torch.is_autocast_enabled(device.type)
    assert torch.is_grad_enabled()
    assert all(torch.equal(*pair) for pair in zip(inputs, before, strict=True))
    assert [tensor._version for tensor in inputs] == versions
    after = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device.type == "cuda" else [])]
    assert all(torch.equal(*pair) for pair in zip(states, after, strict=True))


def test_the_oracle_of_untouched_inputs_sees_the_graph_itself() -> None:
    inputs = arguments(torch.device("cpu"))
    module = trace(step, inputs)
    before = [tensor.clone() for tensor in inputs]
    module(*inputs)
    assert [torch.equal(*pair) for pair in zip(inputs, before, strict=True)].count(False) == 4


def test_the_second_time_nothing_is_run(cache: CostCache) -> None:
    inputs = arguments(torch.device("cpu"))
    module = trace(step, inputs)
    with Calls() as first:
        costs = measured(module, inputs, cache)
    with Calls() as second:
        again = measured(module, inputs, cache)
    assert first.counts["aten.mm.default"] > 2
    assert not second.counts
    assert again == costs


def test_equal_calls_are_timed_once(cache: CostCache, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[object] = []

    def count(run: Callable[[], object], device: torch.device, *, limit_s: float = 1.0) -> float:
        timed.append(run())
        return 5.0

    monkeypatch.setattr(measure_module, "device_us", count)
    inputs = [torch.zeros(8, 8)]
    module = trace(lambda a: [a.relu().exp().relu().exp().relu()], inputs)
    costs = measured(module, inputs, cache)
    assert len(timed) == 1 + 2, "the gap, relu and exp"
    assert len(costs.tasks) == 5


def test_operators_that_write_are_timed_on_copies_of_what_they_write(
    cache: CostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def often(run: Callable[[], object], device: torch.device, *, limit_s: float = 1.0) -> float:
        for _ in range(3):
            run()
        return 5.0

    seen: list[Tensor] = []
    monkeypatch.setattr(measure_module, "device_us", often)
    monkeypatch.setattr(measure_module._Run, "step", spying(seen))
    inputs = [torch.ones(4), torch.zeros(4)]
    module = trace(lambda a, b: [a.add_(1).mul_(3), b.copy_(a)], inputs)
    measured(module, inputs, cache)
    assert [tensor.tolist() for tensor in seen[-2:]] == [[2.0] * 4, [6.0] * 4], "as if each had run once"
    assert inputs[0].tolist() == [1.0] * 4


def spying(seen: list[Tensor]) -> Callable[[Any, fx.Node], None]:
    """`_Run.step` that keeps a copy of each operator's value."""
    original = measure_module._Run.step

    def step(self: Any, node: fx.Node) -> None:
        original(self, node)
        if node.op == "call_function" and node in self._values:
            seen.append(self._values[node].clone())

    return step


def test_without_time_the_rest_is_estimated_and_measured_later(
    cache: CostCache, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = arguments(torch.device("cpu"))
    module = trace(step, inputs)
    with caplog.at_level(logging.INFO, logger="kitsune"):
        estimated = measured(module, inputs, cache, limit_s=0.0)
    assert estimated.source == "analytic"
    assert "not measured" in caplog.text
    limits = device_limits(torch.device("cpu"))
    assert estimated.tasks == analytic_costs(module.graph, tasks_of(module.graph), limits).tasks
    assert measured(module, inputs, cache).source == "measured"


def test_what_was_measured_counts_although_time_ran_out(cache: CostCache, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [torch.zeros(8, 8)]
    module = trace(lambda a: [a.relu().exp().tanh()], inputs)
    moments = itertools.chain([0.0, 0.0], itertools.repeat(10.0))
    monkeypatch.setattr(measure_module, "device_us", lambda run, device, *, limit_s=1.0: 50.0)
    monkeypatch.setattr(measure_module.time, "perf_counter", lambda: next(moments))
    costs = measured(module, inputs, cache, limit_s=1.0)
    assert costs.source == "analytic"
    estimated = analytic_costs(module.graph, tasks_of(module.graph), device_limits(torch.device("cpu"))).tasks
    assert costs.tasks[0] != estimated[0]
    assert costs.tasks[1:] == estimated[1:]


def test_without_memory_the_rest_is_estimated(cache: CostCache, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = arguments(torch.device("cpu"))
    module = trace(step, inputs)

    def full(self: Any, node: fx.Node) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(measure_module._Run, "step", full)
    state = torch.get_rng_state()
    assert measured(module, inputs, cache).source == "analytic"
    assert torch.equal(torch.get_rng_state(), state)


def test_values_are_held_no_longer_than_needed() -> None:
    module = trace(lambda a: [a.relu().exp().tanh().sum()], [A])
    run = measure_module._Run(module, [A])
    held = []
    for node in module.graph.nodes:
        if node.op != "output":
            run.step(node)
            held.append(len(run._values))
    assert max(held) == 1


def test_times_are_kept_on_disk_for_the_next_process(tmp_path: Any) -> None:
    inputs = arguments(torch.device("cpu"))
    module = trace(step, inputs)
    costs = measured(module, inputs, CostCache(tmp_path, {"device": "test"}))
    with Calls() as calls:
        again = measured(module, inputs, CostCache(tmp_path, {"device": "test"}))
    assert not calls.counts
    assert again == costs


def test_a_cache_that_cannot_be_written_is_told_and_borne(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    inputs = arguments(torch.device("cpu"))
    with caplog.at_level(logging.INFO, logger="kitsune"):
        costs = measured(trace(step, inputs), inputs, CostCache(tmp_path / "file" / "cache", {"device": "test"}))
    assert costs.source == "measured"
    assert "not kept" in caplog.text


@pytest.mark.gpu
def test_forks_and_launches_of_a_gpu_are_measured(cache: CostCache) -> None:
    device = torch.device("cuda")
    gaps = measure_module.measure_gaps(device, device_limits(device), cache)
    assert 0.2 < gaps.launch_us < 10
    assert 0 <= gaps.sync_us < 20
    assert 0.2 < gaps.timer_us < 20
    assert measure_module.measure_gaps(device, device_limits(device), cache) == gaps
