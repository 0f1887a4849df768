"""Splits an optimizer's update of all parameters into updates of groups, which need not wait for the last gradient."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence

from torch import fx

from kitsune.graph import dataflow
from kitsune.graph.dependencies import operations

# They treat parameters independently of each other: what they take as lists has an entry for each, or none at all.
_UPDATES = {
    "aten._fused_adam_.tensor_lr",
    "aten._fused_adamw_.tensor_lr",
    "aten._fused_sgd_.tensor_lr",
    "kitsune.adam_.default",
}


def split_update(module: fx.GraphModule, num_parts: int) -> fx.GraphModule:
    """A copy of `module` in which each multi-tensor update is split into `num_parts` calls, or one for each parameter.

    Parameters are grouped in the order in which the graph makes their gradients, in groups of about as many bytes.
    Tensors that all share, like the learning rate, are passed to each call. The results are the same to the bit.

    Raises:
        ValueError: `num_parts` is less than 1.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts is {num_parts}; an update has at least 1 part")
    graph = copy.deepcopy(module.graph)
    if num_parts > 1:
        for node, ready in _updates(graph):
            _split(node, ready, num_parts)
    return fx.GraphModule(module, graph)


def partition(num_bytes: Sequence[int], num_parts: int) -> list[range]:
    """Cuts a sequence of sizes into `num_parts` runs, or one for each size, that are as equal as can be.

    The sum of the squares of the runs' sizes is the smallest there is. By dynamic programming over the number of runs;
    the best place of the last cut moves only to the right as a sequence gets longer, which bounds the search
    (divide and conquer; Aggarwal et al., Geometric applications of a matrix-searching algorithm, 1987).
    """
    num_sizes = len(num_bytes)
    sums = [0, *itertools.accumulate(num_bytes)]
    best: list[int] = [total**2 for total in sums]  # by the number of sizes, in one run
    cuts: list[list[int]] = []
    for done in range(1, min(num_parts, num_sizes)):
        best, cut = _one_more_run(sums, best, done)
        cuts.append(cut)
    ends = [num_sizes]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    return [range(start, end) for start, end in itertools.pairwise([0, *reversed(ends)]) if start < end]


def _one_more_run(sums: Sequence[int], best: Sequence[int], done: int) -> tuple[list[int], list[int]]:
    """By the number of sizes: the least sum of squares in `done + 1` runs, and where the last begins.

    `best` is that of `done` runs. There must be at least as many sizes as runs; the rest of the lists means nothing.
    """
    least, cut = [0] * len(sums), [0] * len(sums)
    pending = [(done + 1, len(sums), done, len(sums) - 2)]
    while pending:
        first, end, lowest, highest = pending.pop()
        if first >= end:
            continue
        middle = (first + end) // 2
        places = range(lowest, min(middle - 1, highest) + 1)
        least[middle], cut[middle] = min((best[place] + (sums[middle] - sums[place]) ** 2, place) for place in places)
        pending += [(first, middle, lowest, cut[middle]), (middle + 1, end, cut[middle], highest)]
    return least, cut


def _updates(graph: fx.Graph) -> list[tuple[fx.Node, Mapping[int, int]]]:
    """The updates of `graph`, each with the latest operation before it that writes each storage."""
    ready: dict[int, int] = {}
    found: list[tuple[fx.Node, Mapping[int, int]]] = []
    for index, operation in enumerate(operations(graph).listed):
        if str(operation.node.target) in _UPDATES:
            found.append((operation.node, dict(ready)))
        ready.update(dict.fromkeys(operation.writes, index))
    return found


def _split(node: fx.Node, ready: Mapping[int, int], num_parts: int) -> None:
    params, grads = _nodes(node.args[0]), _nodes(node.args[1])
    made = [max((ready.get(storage, -1) for storage in dataflow.storages(grad)), default=-1) for grad in grads]
    order = sorted(range(len(params)), key=lambda place: (made[place], place))
    sizes = [sum(tensor.nbytes for tensor in dataflow.tensors(params[place])) for place in order]
    runs = partition(sizes, num_parts)
    if len(runs) < 2:
        return
    for run in runs:
        places = sorted(order[position] for position in run)
        with node.graph.inserting_before(node):
            args = tuple(_selected(value, places) for value in node.args)
            kwargs = {name: _selected(value, places) for name, value in node.kwargs.items()}
            new = node.graph.create_node("call_function", node.target, args, kwargs)
        new.meta = dict(node.meta)
    node.graph.erase_node(node)


def _selected(value: fx.node.Argument, places: Sequence[int]) -> fx.node.Argument:
    """The entries at `places` of a list of tensors, if it is one that is not empty; anything else as it is."""
    entries = _nodes(value)
    return [entries[place] for place in places] if entries else value


def _nodes(value: fx.node.Argument) -> list[fx.Node]:
    """The entries of a list of tensors; nothing for anything else."""
    if not isinstance(value, (list, tuple)):
        return []
    return [entry for entry in value if isinstance(entry, fx.Node)]
