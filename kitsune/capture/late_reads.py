"""What backward passes read of Python's objects, which may have changed since the call that they go back from.

Dynamo's guards are asked before the call alone. Its sources, and the names by which they are looked up, are private.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._dynamo.guards import _get_closure_vars
from torch._dynamo.source import AttrSource, LocalSource
from torch._guards import ChainedSource, Source

from kitsune.capture.seen_objects import attribute_names, class_facts, own_classes, seen
from kitsune.native.build import facts_type
from kitsune.native.facts import Fact, result

_MARK = "kitsune_late_reads"
_TORCH = "G['__import_torch"  # begins the names of places in torch's modules
_OF_MODULES = frozenset(vars(torch.nn.Module()))
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, type(...), torch.dtype, torch.device)


class ArgumentReadError(Exception):
    """What a backward pass would read belongs to an argument of the call: each call has another one."""


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
        ArgumentReadError: a source belongs to an argument of the call that may change.
    """
    early_names = {name for source in early if (name := _name(source)) is not None}
    alone, shared = _Found(), _Found()
    for source in late:
        (shared if _name(source) in early_names else alone).look_at(source, output)
    found = tuple(alone.facts(but=shared)), tuple(shared.facts())
    if runs_again:
        return LateReads((*found[0], *_switches()), found[1])
    return LateReads(found[0], (*found[1], *_switches()))


def facts_about(sources: Iterable[Source], output: Any) -> tuple[Fact, ...]:
    """That what is found at `sources` is what it is at present, but for tensors.

    Raises:
        ArgumentReadError: a source belongs to an argument of the call that may change.
    """
    found = _Found()
    for source in sources:
        with suppress(LookupError, AttributeError, NameError):  # of what Dynamo itself has made
            found.look_at(source, output)
    return (*_switches(), *(fact for fact in found.facts() if facts_type()([fact]).hold()))


def _switches() -> tuple[Fact, ...]:
    """Of torch, which any function may ask about."""
    return result(torch.get_default_dtype), result(torch.are_deterministic_algorithms_enabled)


class _Found:
    """What is found at sources, each looked at once; the classes of these objects, and modules of torch's classes."""

    def __init__(self) -> None:
        self._facts: dict[str, Fact] = {}
        self._classes: dict[type, None] = {}
        self._modules: dict[torch.nn.Module, None] = {}

    def look_at(self, source: Source, output: Any) -> None:
        """Raises what `_looked_at` does."""
        if source.name in self._facts:
            return
        looked = _looked_at(source, output)
        if looked is not None:
            fact, found = looked
            self._facts[source.name] = fact
            if fact.subject is look:
                self._classes |= dict.fromkeys(own_classes(found))
            elif isinstance(found, torch.nn.Module):
                self._modules[found] = None

    def facts(self, but: _Found | None = None) -> Iterator[Fact]:
        """All there are; without those about classes that another one has, too."""
        yield from self._facts.values()
        yield from (result(attribute_names, module) for module in self._modules)
        for kind in self._classes:
            if but is None or kind not in but._classes:
                yield from class_facts(kind)


def _name(source: Source) -> str | None:
    try:
        name: str = source.name
    except NotImplementedError:  # of what has none
        return None
    return name


def _looked_at(source: Source, output: Any) -> tuple[Fact, object] | None:
    """That what is found there looks as it does at present, and what it is; None where nothing can change but tensors.

    Raises:
        ArgumentReadError: it belongs to an argument of the call, and may change.
    """
    root: Any = source
    while isinstance(root, ChainedSource):
        root = root.base
    namespace = {**_get_closure_vars(), "G": output.global_scope, "L": {}}
    if isinstance(root, LocalSource):
        namespace["L"] = {root.local_name: output.local_scope[root.local_name]}
    name: str = source.name
    code = compile(name, "<a backward pass>", "eval")
    found = eval(code, namespace)
    if isinstance(found, torch.Tensor):
        return None
    traced = output.root_tx.f_code
    if isinstance(root, LocalSource) and root.local_name in traced.co_varnames[: traced.co_argcount]:
        if source is root or _is_unchangeable(found):  # Kitsune's own tuple and dictionary of them do not change
            return None
        raise ArgumentReadError(name)
    if type(found) in _CONSTANTS or _is_of_torch(found) or _is_in_every_module(source, namespace):
        return result(eval, code, namespace), found
    return result(look, name, code, namespace), found


def _is_unchangeable(value: object) -> bool:
    """Whether nothing can change of it, but for tensors."""
    if type(value) is tuple:
        return all(map(_is_unchangeable, value))
    return type(value) in _CONSTANTS or isinstance(value, torch.Tensor)


def look(_name: str, code: types.CodeType, namespace: dict[str, Any]) -> object:
    """What is seen of the object at a place."""
    return seen(eval(code, namespace))


def _is_of_torch(found: object) -> bool:
    """Whether an object is a module of Python, or its class, or the function or the class that it is, is torch's."""
    defined = found if isinstance(found, (type, types.FunctionType, types.BuiltinFunctionType)) else type(found)
    return isinstance(found, types.ModuleType) or (defined.__module__ or "").partition(".")[0] == "torch"


def _is_in_every_module(source: Any, namespace: dict[str, Any]) -> bool:
    """Whether what is found at a source is torch's own, as are the dictionaries that every `torch.nn.Module` has."""
    if source.name.startswith(_TORCH):
        return True
    is_named_so = isinstance(source, AttrSource) and source.member in _OF_MODULES
    return is_named_so and isinstance(eval(source.base.name, namespace), torch.nn.Module)


def is_close_look(fact: Fact) -> bool:
    """Whether no guard of Dynamo's, and nothing that is noted of a call, is about the same."""
    return fact.subject is look or fact.subject is attribute_names


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
