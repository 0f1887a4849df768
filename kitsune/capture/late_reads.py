"""What backward passes read of Python's objects, which may have changed since the call that they go back from.

Dynamo's guards are asked before the call alone. Its sources, and the names by which they are looked up, are private.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._dynamo.guards import _get_closure_vars
from torch._dynamo.source import LocalSource
from torch._guards import ChainedSource, Source

from kitsune.capture.seen_objects import seen
from kitsune.native.build import facts_type
from kitsune.native.facts import Fact, result

_MARK = "kitsune_late_reads"
_TORCH = "G['__import_torch"  # begins the names of places in torch's modules


class LateReads(NamedTuple):
    """What backward passes go by.

    Attributes:
        alone: facts about what nothing else has read.
        shared: facts about what the forward pass of the same function has read, too.
    """

    alone: tuple[Fact, ...] = ()
    shared: tuple[Fact, ...] = ()


def late_reads(late: Iterable[Source], early: Collection[Source], output: Any, *, runs_again: bool) -> LateReads:
    """That what is found at the sources `late` is what it is at present. Tensors are left out: graphs read those.

    Args:
        early: what the forward pass reads.
        output: Dynamo's state of the call that it traces.
        runs_again: whether what reads runs itself, where a call is repeated, and is no part of a graph.

    Raises:
        LookupError: a source is an argument of the call, or belongs to one: it is another object at each call.
    """
    found = {source: fact for source in late if (fact := _fact(source, output)) is not None}
    alone = [fact for source, fact in found.items() if source not in early]
    shared = [fact for source, fact in found.items() if source in early]
    (alone if runs_again else shared).extend(
        (result(torch.get_default_dtype), result(torch.are_deterministic_algorithms_enabled))
    )
    return LateReads(tuple(alone), tuple(shared))


def facts_about(sources: Iterable[Source], output: Any) -> tuple[Fact, ...]:
    """That what is found at `sources` is what it is at present, but for tensors and arguments of the call."""
    return tuple(_facts_about(sources, output))


def _facts_about(sources: Iterable[Source], output: Any) -> Iterator[Fact]:
    for source in sources:
        try:
            fact = _fact(source, output)
        except (LookupError, AttributeError, NameError):  # of an argument, or of what Dynamo itself has made
            continue
        if fact is not None and facts_type()([fact]).hold():
            yield fact


def _fact(source: Source, output: Any) -> Fact | None:
    """That what is found there looks as it does at present; None of a tensor."""
    root: Any = source
    while isinstance(root, ChainedSource):
        root = root.base
    namespace = {**_get_closure_vars(), "G": output.global_scope, "L": {}}
    if isinstance(root, LocalSource):
        namespace["L"] = {root.local_name: output.local_scope[root.local_name]}
    name: str = source.name
    code = compile(name, "<a backward pass>", "eval")
    if isinstance(eval(code, namespace), torch.Tensor):
        return None
    traced = output.root_tx.f_code
    if isinstance(root, LocalSource) and root.local_name in traced.co_varnames[: traced.co_argcount]:
        raise LookupError(name)
    return result(look, name, code, namespace)


def look(name: str, code: types.CodeType, namespace: dict[str, Any]) -> object:
    """What is seen of the object at a place. Of torch's own, as its hooks of all modules, which object it is."""
    found = eval(code, namespace)
    return found if name.startswith(_TORCH) else seen(found)


def read_late(node: fx.Node, reads: LateReads) -> None:
    """Notes down that the backward pass of `node` goes by `reads`."""
    node.meta[_MARK] = reads


def hand_on(node: fx.Node, other: fx.Node) -> None:
    """What the backward pass of `node` goes by, that of `other` goes by as well."""
    if _MARK in node.meta:
        one, both = node.meta[_MARK], other.meta.get(_MARK, LateReads())
        other.meta[_MARK] = LateReads(both.alone + one.alone, both.shared + one.shared)


def read_by(module: fx.GraphModule) -> LateReads:
    """What the backward pass of `module` goes by."""
    found = [node.meta[_MARK] for node in module.graph.nodes if _MARK in node.meta]
    return LateReads(
        tuple(fact for reads in found for fact in reads.alone), tuple(fact for reads in found for fact in reads.shared)
    )
