"""The peak of held memory against a count by brute force."""

from __future__ import annotations

import torch
from hypothesis import example, given
from torch import Tensor, fx

from kitsune.capture.trace import trace
from kitsune.graph import dataflow, liveness
from tests.kitsune.graph import programs


def peak_by_definition(graph: fx.Graph) -> int:
    """At every node: the bytes of all storages that exist by then and that it or a later node still reads or makes."""
    nodes = list(graph.nodes)
    inputs = {storage for node in nodes if node.op == "placeholder" for storage in dataflow.storages(node)}
    sizes = {
        dataflow.storage_of(tensor): tensor.untyped_storage().nbytes()
        for node in nodes
        for tensor in dataflow.tensors(node)
    }
    touched = [
        dataflow.storages(node)
        | {storage for argument in node.all_input_nodes for storage in dataflow.storages(argument)}
        for node in nodes
    ]
    peak = 0
    for index in range(len(nodes)):
        made = set().union(*(dataflow.storages(node) for node in nodes[: index + 1]))
        wanted = set().union(*touched[index:])
        peak = max(peak, sum(sizes[storage] for storage in (made & wanted) - inputs))
    return peak


@given(programs.programs)
def test_the_peak_is_that_of_the_definition(program: programs.Program) -> None:
    graph = programs.traced(program).graph
    assert liveness.peak_bytes(graph) == peak_by_definition(graph)


@example([("add", 0, 0), ("add", 0, 0), ("add", 0, 0), ("add_", 3, 0), ("add", 0, 0)])  # writes to what nobody reads
@given(programs.programs)
def test_no_real_run_holds_more(program: programs.Program) -> None:
    """With every value dropped after its last use, or at once without any, as a compiled graph drops it."""
    module = programs.traced(program)
    inputs = programs.inputs()
    given_storages = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    peak = 0

    class Holding(fx.Interpreter):
        def run_node(self, node: fx.Node) -> object:
            nonlocal peak
            value = super().run_node(node)
            values = [*(kept for other, kept in self.env.items() if other.users), value]
            held = {
                tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
                for tensor in values
                if isinstance(tensor, Tensor)
            }
            peak = max(peak, sum(size for storage, size in held.items() if storage not in given_storages))
            return value

    module.graph.eliminate_dead_code()
    Holding(module).run(*inputs)
    assert peak <= liveness.peak_bytes(module.graph)


def test_a_chain_holds_two_values() -> None:
    def chain(x: Tensor) -> list[Tensor]:
        for _ in range(6):
            x = x + 1
        return [x]

    graph = trace(chain, [torch.ones(256)]).graph
    assert liveness.peak_bytes(graph) == 2 * 256 * 4


def test_saved_values_are_held_together() -> None:
    def fan(x: Tensor) -> list[Tensor]:
        parts = [x + index for index in range(5)]
        return [torch.stack([part.sum() for part in reversed(parts)]).sum()]

    assert liveness.peak_bytes(trace(fan, [torch.ones(256)]).graph) >= 5 * 1024


def test_views_and_inputs_are_free() -> None:
    graph = trace(lambda x: [x.view(16, 16).t(), x], [torch.ones(256)]).graph
    assert liveness.peak_bytes(graph) == 0


def test_a_view_of_a_value_keeps_all_of_it() -> None:
    def function(x: Tensor) -> list[Tensor]:
        small = (x + 1)[:1]
        return [small, torch.ones(64) + small]

    assert liveness.peak_bytes(trace(function, [torch.ones(256)]).graph) >= 1024
