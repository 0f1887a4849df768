"""Guards that what a call changes is still another object than all else that it reaches.

Dynamo knows an object by the way in which it met it first, and what the call changes there it knows there alone. Where
another way comes to lead to the same object, what is read there would have to be what was written before. That an
object and its `__dict__` are two ways to the same attributes it does not know at all. Dynamo's list of known objects,
the end of its tracing and its guard builder are private.
"""

from __future__ import annotations

import functools
import types
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._dynamo.guards import GuardBuilder, get_verbose_code_parts, install_guard
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.source import AttrSource, GlobalSource, is_from_skip_guard_source
from torch._dynamo.variables.misc import NewGlobalVariable

from kitsune.capture.called import own_method
from kitsune.capture.identity import UNKNOWN, object_of
from kitsune.capture.named_places import Scope
from kitsune.capture.refusing import refuse

_GLOBALS = GlobalSource("globals()")


class _Way(NamedTuple):
    """A way to an object: where it is found, and whether the call changes what is found there."""

    found: Any
    source: Any
    is_changed: bool


@contextmanager
def guarded() -> Iterator[None]:
    """Within, Dynamo guards that no other way leads to an object that the call changes."""
    finish = OutputGraph.compile_subgraph

    def compile_subgraph(graph: OutputGraph, tx: Any, *args: Any, **options: Any) -> Any:
        scope = Scope(graph.local_scope, graph.global_scope)
        for source, *others in _kept_apart(list(_ways(tx)), scope):
            install_guard(source.make_guard(functools.partial(_distinct, others=others)))
        return finish(graph, tx, *args, **options)

    with mock.patch.object(OutputGraph, "compile_subgraph", compile_subgraph):
        yield


def _ways(tx: Any) -> Iterator[_Way]:
    effects = tx.output.side_effects
    for variable in effects.id_to_variable.values():
        if isinstance(variable, NewGlobalVariable):  # Dynamo has other names for those of other modules
            if effects.is_modified(variable):
                yield _Way(tx.output.global_scope, _GLOBALS, True)
            continue
        found = UNKNOWN if is_from_skip_guard_source(variable.source) else object_of(tx, variable)
        if found is not UNKNOWN and not isinstance(found, torch.Tensor):  # tensors have to be those of the capture
            yield _Way(found, variable.source, effects.is_modified(variable))


def _kept_apart(ways: Sequence[_Way], scope: Scope) -> Iterator[Sequence[Any]]:
    """The sources of objects, by classes, that cannot become one: those that are changed come first.

    Raises:
        Unsupported: the attributes of an object are changed, and reached as a dictionary too.
    """
    groups: dict[type, dict[int, _Way]] = defaultdict(dict)
    for way in (*ways, *_attributes(ways)):
        known = groups[type(way.found)].setdefault(id(way.found), way)
        if known.source != way.source and (known.is_changed or way.is_changed):
            names = f"{scope.told(known.source.name)} and {scope.told(way.source.name)}"
            refuse(f"{names} are one dictionary, which the call changes")
    for group in groups.values():
        in_order = sorted(group.values(), key=lambda way: not way.is_changed)
        in_order = [way for way in in_order if way.source is not _GLOBALS]  # which no guard can name
        if in_order and in_order[0].is_changed and len(in_order) > 1:
            yield [way.source for way in in_order]


def _attributes(ways: Sequence[_Way]) -> Iterator[_Way]:
    """The dictionaries in which objects have their attributes: of all if a dictionary is changed."""
    is_any = any(way.is_changed and type(way.found) is dict for way in ways)
    for found, source, is_changed in ways:
        kind = type(found)
        if not (is_any or is_changed) or not kind.__dictoffset__ or isinstance(found, type):
            continue
        if not own_method(kind, "__getattribute__") and not _is_of_torch(found):
            yield _Way(found.__dict__, AttrSource(source, "__dict__"), is_changed)


def _is_of_torch(found: Any) -> bool:
    """Whether this is one of torch's modules of Python, of which there are many."""
    return isinstance(found, types.ModuleType) and found.__name__.partition(".")[0] == "torch"


def _distinct(builder: GuardBuilder, guard: Any, others: Sequence[Any]) -> None:
    """As Dynamo's guard that an object under two names is one, that several are all different ones."""
    references = [builder.arg_ref(guard), *(builder.arg_ref(other.name) for other in others)]
    code = f"len({{{', '.join(f'id({reference})' for reference in references)}}}) == {len(references)}"
    builder.object_aliasing_guard_codes.append((code, get_verbose_code_parts(code, guard)[0]))
