"""Dependencies against pairwise definitions: what a real run does to each byte, and what operators declare."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from kitsune.capture.trace import trace
from kitsune.errors import RefusedError
from kitsune.graph import dataflow
from kitsune.graph.dependencies import Operations, operations
from tests.kitsune.graph import programs

Pair = tuple[int, int]
WIDER = programs.programs_of(programs.WIDER_OPERATORS)


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def place(tensor: Tensor) -> set[tuple[int, int]]:
    """The bytes that a tensor covers: (storage, byte)."""
    storage = tensor.untyped_storage()
    width = tensor.element_size()
    elements = torch.arange(storage.nbytes() // width).as_strided(
        tensor.shape, tensor.stride(), tensor.storage_offset()
    )
    return {(storage._cdata, start * width + byte) for start in elements.flatten().tolist() for byte in range(width)}


class Observer(fx.Interpreter):
    """Runs a graph and finds out which bytes each node reads and writes, and what else it changes.

    What is written is what has changed. What is read are the arguments, unless the operator only makes views.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.kept: list[Tensor] = []
        self.reads: dict[fx.Node, set[Any]] = {}
        self.writes: dict[fx.Node, set[Any]] = {}

    def contents(self) -> dict[int, list[int]]:
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in self.kept}
        return {key: torch.tensor([], dtype=torch.uint8).set_(storage).tolist() for key, storage in storages.items()}

    def forms(self) -> dict[int, object]:
        return {id(tensor): (tensor.shape, tensor.stride()) for tensor in self.kept}

    def run_node(self, node: fx.Node) -> Any:
        if node.op != "call_function":
            value = super().run_node(node)
            self.kept += tensors(value) if node.op != "output" else []
            return value
        arguments = tensors(self.fetch_args_kwargs_from_env(node))
        before, forms, random = self.contents(), self.forms(), torch.get_rng_state()
        value = super().run_node(node)
        self.kept += [tensor for tensor in tensors(value) if all(tensor is not one for one in self.kept)]
        after, forms_after = self.contents(), self.forms()
        writes: set[Any] = {("form", key) for key, form in forms.items() if forms_after[key] != form}
        for key, data in after.items():
            old = before.get(key, [None] * len(data))
            writes |= {(key, byte) for byte in range(len(data)) if data[byte] != old[byte]}
        draws = not torch.equal(random, torch.get_rng_state())
        only_views = not writes and not draws and after.keys() == before.keys()
        reads: set[Any] = {("form", id(tensor)) for tensor in arguments if node.target is not operator.getitem}
        if not only_views:
            reads |= set().union(*map(place, arguments))
        self.reads[node], self.writes[node] = reads, writes | ({"random"} if draws else set())
        return value


def closure(found: Operations) -> set[Pair]:
    """All pairs (earlier, later) of which the later follows the earlier, directly or not."""
    before: list[set[int]] = []
    for operation in found.listed:
        before.append(set(operation.after).union(*(before[earlier] for earlier in operation.after)))
    return {(earlier, later) for later, all_earlier in enumerate(before) for earlier in all_earlier}


def transitive(pairs: Iterable[Pair], count: int) -> set[Pair]:
    """By Warshall's algorithm."""
    reach = [[False] * count for _ in range(count)]
    for earlier, later in pairs:
        reach[earlier][later] = True
    for middle in range(count):
        for first in range(count):
            if reach[first][middle]:
                reach[first] = [one or two for one, two in zip(reach[first], reach[middle], strict=True)]
    return {(first, second) for first in range(count) for second in range(count) if reach[first][second]}


def collide(reads: list[set[Any]], writes: list[set[Any]]) -> set[Pair]:
    return {
        (one, two)
        for one, two in combinations(range(len(reads)), 2)
        if writes[one] & (reads[two] | writes[two]) or reads[one] & writes[two]
    }


@given(WIDER)
def test_what_a_run_does_to_the_same_bytes_is_ordered(program: programs.Program) -> None:
    module = programs.traced(program)
    found = operations(module.graph)
    observer = Observer(module)
    with torch.no_grad():
        observer.run(*programs.inputs())
    reads = [set().union(*(observer.reads[node] for node in one.nodes)) for one in found.listed]
    writes = [set().union(*(observer.writes[node] for node in one.nodes)) for one in found.listed]
    assert collide(reads, writes) <= closure(found)
    owners = {node: index for index, one in enumerate(found.listed) for node in one.nodes}
    needed = {
        (owners[argument], owner) for node, owner in owners.items() for argument in node.all_input_nodes
        if argument in owners and owners[argument] != owner
    }  # fmt: skip
    assert needed <= closure(found)
    assert not any(observer.writes[node] for node in found.prologue)


def declared(module: fx.GraphModule, found: Operations) -> set[Pair]:
    """Pairs of which one writes, makes or reshapes a storage that the other touches, or both draw random numbers."""
    reads: list[set[Any]] = []
    writes: list[set[Any]] = []
    for one in found.listed:
        outside = {argument for node in one.nodes for argument in node.all_input_nodes} - set(one.nodes)
        reads.append({storage for argument in outside for storage in dataflow.storages(argument)})
        changed = {storage for target in dataflow.written(one.node) for storage in dataflow.storages(target)}
        made = {storage for node in one.nodes for storage in dataflow.storages(node)}
        writes.append(changed | made | ({-1} if dataflow.draws_random_numbers(one.node) else set()))
    return collide(reads, writes)


@given(WIDER)
def test_nothing_is_ordered_that_need_not_be(program: programs.Program) -> None:
    module = programs.traced(program)
    found = operations(module.graph)
    assert closure(found) == transitive(declared(module, found), len(found.listed))


@given(WIDER)
def test_no_dependency_can_be_dropped_unless_others_imply_it(program: programs.Program) -> None:
    module = programs.traced(program)
    found = operations(module.graph)
    direct = {(earlier, later) for later, one in enumerate(found.listed) for earlier in one.after}
    pairs = declared(module, found)
    for pair in direct:
        rest = transitive(direct - {pair}, len(found.listed))
        assert pair in rest or not pairs <= rest


@given(WIDER)
def test_every_operator_runs_once_and_kinds_are_right(program: programs.Program) -> None:
    module = programs.traced(program)
    found = operations(module.graph)
    nodes = [*found.prologue, *(node for one in found.listed for node in one.nodes)]
    assert sorted(nodes) == [node for node in module.graph.nodes if node.op == "call_function"]
    for later, one in enumerate(found.listed):
        assert list(one.after) == sorted(one.after)
        assert all(earlier < later for earlier in one.after)
        for earlier, kind in one.after.items():
            other = found.listed[earlier]
            holds = {
                "true": set(other.writes) & set(one.reads),
                "anti": set(other.reads) & set(one.writes),
                "output": set(other.writes) & set(one.writes),
                "order": all(dataflow.draws_random_numbers(each.node) for each in (other, one)),
            }
            assert holds[kind]


def grouped(function: Callable[..., list[Tensor]], *inputs: Tensor) -> tuple[list[str], list[list[str]]]:
    found = operations(trace(function, inputs).graph)
    return [node.name for node in found.prologue], [[node.name for node in one.nodes] for one in found.listed]


def test_views_belong_to_what_they_are_views_of() -> None:
    def function(x: Tensor) -> list[Tensor]:
        rows = x.unbind(0)
        product = x.t() @ x
        return [product.t()[0], rows[1], product.reshape(-1), product.t().reshape(-1)]

    prologue, listed = grouped(function, torch.ones(2, 3))
    assert prologue == ["unbind", "getitem", "getitem_1", "t"]
    assert listed == [["mm", "t_1", "select", "view", "t_2"], ["clone", "_unsafe_view"]]


def test_empty_memory_belongs_to_its_first_writer() -> None:
    def function(x: Tensor) -> list[Tensor]:
        torch.empty(3)
        read = torch.empty(3)
        filled = torch.empty(6).view(2, 3)
        total = read + x[0]
        return [filled.copy_(x).t(), total, torch.nn.functional.dropout(x, 0.5)]

    prologue, listed = grouped(function, torch.ones(2, 3))
    assert prologue == ["select"]
    assert listed == [
        ["empty"],
        ["empty_1"],
        ["add"],
        ["empty_2", "view", "copy_", "t"],
        ["empty_like", "bernoulli_"],
        ["div_"],
        ["mul"],
    ]


def test_a_tensor_that_is_reshaped_in_place_has_no_free_views() -> None:
    def function(x: Tensor) -> list[Tensor]:
        y = x + 1
        first = y.t()
        y.unsqueeze_(0)
        return [first, y.t() if y.dim() == 2 else y.view(-1)]

    _, listed = grouped(function, torch.ones(2, 3))
    assert listed == [["add"], ["t"], ["unsqueeze_"], ["view"]]


def test_a_tensor_that_moves_to_other_memory_is_refused() -> None:
    def function(x: Tensor) -> list[Tensor]:
        y, z = x + 1, x + 2
        y.set_(z)
        return [y.t()]

    with pytest.raises(RefusedError, match="a tensor is given other memory in the call"):
        grouped(function, torch.ones(2, 3))


def test_a_view_that_needs_results_of_two_operations_stands_alone() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(1, 3)
    one = graph.call_function(torch.ops.aten.sin.default, (x,))
    one.meta["val"] = torch.empty(1, 3)
    two = graph.call_function(torch.ops.aten.new_zeros.default, (x, [2, 3]))
    two.meta["val"] = torch.empty(2, 3)
    joined = graph.call_function(torch.ops.aten.expand_as.default, (one, two))
    joined.meta["val"] = one.meta["val"].expand(2, 3)
    last = graph.call_function(torch.ops.aten.cos.default, (joined,))
    last.meta["val"] = torch.empty(2, 3)
    graph.output([last])
    listed = operations(graph).listed
    assert [one.node for one in listed] == [one, two, joined, last]
    assert [list(one.after) for one in listed] == [[], [], [0, 1], [2]]


@pytest.mark.parametrize("training", [False, True])
def test_hidden_writes_and_fused_updates(training: bool) -> None:
    """A reader of running statistics waits for batch norm; an update waits for readers of its parameters."""

    def function(x: Tensor, mean: Tensor, var: Tensor, param: Tensor, grad: Tensor) -> list[Tensor]:
        torch.nn.functional.batch_norm(x, mean, var, training=training)
        total, use = mean + var, param * 2
        torch._fused_sgd_(
            [param], [grad], [], weight_decay=0.0, momentum=0.0, lr=var.sum(), dampening=0.0, nesterov=False,
            maximize=False, is_first_step=False, grad_scale=None, found_inf=None,
        )  # fmt: skip
        return [total, use, grad.sin(), param.cos()]

    inputs = [torch.rand(4, 3), *(torch.rand(3) for _ in range(4))]
    listed = operations(trace(function, inputs).graph).listed
    names = [one.node.name for one in listed]
    after = {one.node.name: {names[earlier]: kind for earlier, kind in one.after.items()} for one in listed}
    norm = {"native_batch_norm": "true"} if training else {}
    assert after["add"] == after["sum_1"] == norm
    assert after["_fused_sgd_"] == {"mul": "anti", "sum_1": "true"}
    assert after["sin"] == after["mul"] == after["native_batch_norm"] == {}
    assert after["cos"] == {"_fused_sgd_": "true"}
