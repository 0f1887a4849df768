"""How many bytes a graph's intermediate values hold at once when its nodes run in order."""

from __future__ import annotations

from torch import fx

from kitsune.graph import dataflow


def peak_bytes(graph: fx.Graph) -> int:
    """The most bytes that intermediates and outputs hold at once, inputs not counted.

    A storage lives from the node that allocates it to the last reader of any value that lies in
    it; outputs live to the end. Scratch memory inside operators is not counted.
    """
    inputs = {storage for node in dataflow.placeholders(graph) for storage in dataflow.storages(node)}
    sizes: dict[int, int] = {}
    last_use: dict[int, int] = {}
    first_use: dict[int, int] = {}
    for index, node in enumerate(graph.nodes):
        for tensor in dataflow.tensors(node):
            storage = dataflow.storage_of(tensor)
            if storage not in inputs:
                sizes[storage] = tensor.untyped_storage().nbytes()
                first_use.setdefault(storage, index)
                last_use[storage] = index
        for argument in node.all_input_nodes:
            for storage in dataflow.storages(argument):
                if storage in sizes:
                    last_use[storage] = index
    changes: dict[int, int] = {}
    for storage, size in sizes.items():
        changes[first_use[storage]] = changes.get(first_use[storage], 0) + size
        changes[last_use[storage] + 1] = changes.get(last_use[storage] + 1, 0) - size
    held = peak = 0
    for index in sorted(changes):
        held += changes[index]
        peak = max(peak, held)
    return peak
