"""Says what has changed since a capture, and from what to what, where a guard of Dynamo or a fact beside it has failed.

Dynamo tells a guard that has failed as a line of Python, or in words of its own. These texts are private: what has
another form is not told. Nothing here runs before a guard has failed, but `noting`.
"""

from __future__ import annotations

import abc
import ast
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._dynamo.guards import CheckFunctionManager

from kitsune.capture.called import SETTINGS, environment, filters_of_warnings
from kitsune.capture.late_reads import look
from kitsune.capture.named_places import MISSING, UNREADABLE, Place, Scope, read_attribute, read_item
from kitsune.capture.seen_objects import attribute_names
from kitsune.capture.shown_values import class_name, cut, function_name, is_a, of_kind, shown
from kitsune.native.facts import Fact, Kind, PythonFacts

_MISSING_WORD = "missing"
_INDEXED = {"size": "shape[{}]", "stride": "stride()[{}]"}

_NOT_TOLD = (LookupError, SyntaxError, ValueError, TypeError)  # of a text that is not as expected
_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)


class Change(NamedTuple):
    """What has changed.

    Attributes:
        what: its name.
        text: the same, from what and to what.
    """

    what: str
    text: str


Names = dict[int, str]
"""What the objects were that are guarded to be the same, by `id`."""


@contextmanager
def noting() -> Iterator[Names]:
    """Within, what Dynamo guards by its identity is noted: the guard says no more than where it was in memory."""
    names: Names = {}
    refer: Callable[..., int] = CheckFunctionManager.id_ref

    def id_ref(manager: CheckFunctionManager, value: object, name: str) -> int:
        if not name.startswith("type("):  # of a class the guard says the name
            names[id(value)] = sys.intern(shown(value))
        return refer(manager, value, name)

    with mock.patch.object(CheckFunctionManager, "id_ref", id_ref):
        yield names


def of_guards(parts: Sequence[str], scope: Scope, names: Names) -> Change | None:
    """What has changed where one of the guards that are written as `parts` has failed; None where that is not told."""
    told = (_of_guard(part, scope, names) for part in parts)
    return next((change for change in told if change is not None), None)


def of_duplicates(sources: Iterable[str], scope: Scope) -> Change | None:
    """Which of the tensors at these places, which were different ones, are one; None where none are."""
    known: dict[int, Place] = {}
    for source in sources:
        try:
            place = _place(scope, source)
        except _NOT_TOLD:
            continue
        if is_a(place.value, torch.Tensor) and id(place.value) in known:
            what = f"{known[id(place.value)]} and {place}"
            return Change(what, f"{what} are one tensor now")
        known[id(place.value)] = place
    return None


def of_facts(facts: Sequence[Fact]) -> Change | None:
    """What has changed where one of `facts` does not hold; None where that is not told."""
    failed = next((fact for fact in facts if not PythonFacts([fact]).hold()), None)
    return None if failed is None else _of_fact(failed)


def of_answers(answers: Sequence[Fact]) -> Change | None:
    """What has changed where all else holds: what one of the functions gives that are asked; None if there are none.

    These are the user's, and are not asked again.
    """
    functions = dict.fromkeys(f"{function_name(answer.subject.args[0].func)}()" for answer in answers)
    what = f"what {' or '.join(functions)} keeps"
    return Change(what, f"{what} is not what it was") if functions else None


def _of_fact(fact: Fact) -> Change | None:
    subject, key = fact.subject, fact.key
    if fact.kind == Kind.DEFINITION:
        return _of_class(fact)
    if fact.kind == Kind.ATTRIBUTE and key == "__code__":
        return _replaced(f"the code of {function_name(subject)}()")
    if fact.kind == Kind.ATTRIBUTE:
        owner = class_name(subject) if isinstance(subject, type) else function_name(subject)
        return _between(Place(f"{owner}.{key}", getattr(subject, key)), shown(fact.expected))
    if fact.kind == Kind.ABSENCE:
        place = Place(key, read_item(subject, key), "the global ", f" of module {subject.get('__name__')}")
        return _between(place, _MISSING_WORD)
    if fact.kind == Kind.ITEM and subject is sys.modules:
        return _replaced(f"the module {key}")
    if fact.kind == Kind.RESULT and subject is environment:
        before, now = dict(fact.expected), dict(environment())
        changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        shown_names = ", ".join(name.decode(errors="replace") for name in changed)
        what = f"the environment variable {shown_names}" if len(changed) == 1 else f"the environment ({shown_names})"
        return Change(what, f"{what} was changed")
    if fact.kind == Kind.RESULT and subject is abc.get_cache_token:
        what = "the classes that count as abstract ones"
        return Change(what, f"{what} have changed (as by ABC.register)")
    if fact.kind == Kind.RESULT and subject is filters_of_warnings:
        return Change("warnings.filters", "warnings.filters has changed")
    if fact.kind == Kind.RESULT and subject is look:
        source, _, names = key
        what = Scope(names["L"], names["G"]).told(source)
        return Change(what, f"{what}, which the backward pass reads, is not what it was")
    if fact.kind == Kind.RESULT and subject is attribute_names:
        what = f"which attributes {of_kind(class_name(type(key[0])))} has"
        return Change(what, f"{what}, on which a backward pass may depend, has changed")
    if fact.kind == Kind.RESULT and subject in SETTINGS:
        return _between(Place(f"sys.{subject.__name__}()", subject()), shown(fact.expected))
    return None


def _of_class(fact: Fact) -> Change:
    kind: type = fact.subject
    before = dict(zip(fact.key, fact.expected[1:], strict=True))
    now = vars(kind)
    for name in {**before, **now}:
        path = f"{class_name(kind)}.{name}"
        if name not in before:
            return _between(Place(path, now[name]), _MISSING_WORD)
        if name not in now:
            return Change(path, f"{path} was deleted")
        if before[name] is not ... and before[name] is not now[name]:
            return _replaced(path)
    what = f"the order of what {class_name(kind)} defines" if kind.__mro__ is fact.expected[0] else _bases(kind)
    return Change(what, f"{what} has changed")


def _bases(kind: type) -> str:
    return f"what {class_name(kind)} inherits"


def _replaced(what: str) -> Change:
    return Change(what, f"{what} was replaced")


def _between(place: Place, before: str | None, now: str | None = None) -> Change:
    """The change of what is at `place`.

    Args:
        before: what it was; None if that is not known.
        now: what it is, if that is not its value.
    """
    what = str(place)
    if now is None and place.value is not UNREADABLE:
        now = _MISSING_WORD if place.value is MISSING else shown(place.value)
    if now == before and now is not None:
        return Change(what, f"{what} was {before}, is another one")
    if before is None:
        return Change(what, f"{what} has changed" if now is None else f"{what} is {now} now")
    return Change(what, f"{what} is no longer {before}" if now is None else f"{what} was {before}, is {now}")


def _of_guard(part: str, scope: Scope, names: Names) -> Change | None:
    for pattern, tell in _PATTERNS:
        found = pattern.match(part)
        if found is None:
            continue
        try:
            return tell(scope, names, *found.groups())
        except _NOT_TOLD:
            return None
    return None


def _place(scope: Scope, source: str) -> Place:
    return scope.find(ast.parse(source, mode="eval").body)


def _tell_type(scope: Scope, _names: Names, source: str, name: str) -> Change:
    return _between(_place(scope, source), of_kind(name.rpartition("<locals>.")[2].rpartition(".")[2]))


def _tell_identity(scope: Scope, names: Names, source: str, number: str) -> Change:
    place = _place(scope, source)
    if is_a(place.value, types.CodeType) and place.kind.startswith("the code of "):
        return _tell_function(scope, source, names.get(int(number)))
    return _between(place, names.get(int(number)))


def _tell_function(scope: Scope, source: str, before: str | None) -> Change:
    """Of a function Dynamo guards the code alone."""
    place = _place(scope, source.removesuffix(".__code__"))
    if before == shown(read_attribute(place.value, "__code__")):
        return _between(place, shown(place.value))
    name = None if before is None else f"the function {before.removeprefix('that of ').removesuffix('()')}"
    return _between(place, name)


def _tell_no_function(scope: Scope, _names: Names, source: str) -> Change:
    return _between(_place(scope, source.removesuffix(".__code__")), "a function written in Python")


def _tell_missing(scope: Scope, _names: Names, source: str) -> Change:
    return _between(_place(scope, source), "there")


def _tell_gradient(scope: Scope, _names: Names, source: str, before: str) -> Change:
    place = _place(scope, source)
    named = replace(place, path=f"{place.path}.requires_grad")
    return _between(named, str(before == "1"), str(before != "1"))


def _tell_tensor(
    scope: Scope, _names: Names, source: str, what: str, index: str | None, before: str, now: str
) -> Change:
    place = _place(scope, source)
    if index is not None and what in _INDEXED:
        named = replace(place, path=f"{place.path}.{_INDEXED[what].format(index)}")
    elif what.isidentifier():
        named = replace(place, path=f"{place.path}.{what}")
    else:
        named = replace(place, kind=f"the {what} of {place.kind}")
    return _between(named, cut(before), cut(now))


def _tell_no_tensor(scope: Scope, _names: Names, source: str) -> Change:
    return _between(_place(scope, source), "a tensor")


def _tell_length(scope: Scope, _names: Names, source: str, before: str) -> Change:
    return _between(_length(_place(scope, source)), before)


def _tell_written(scope: Scope, _names: Names, source: str, before: str) -> Change:
    return _between(_place(scope, source), cut(before))


def _tell_state(_scope: Scope, _names: Names, what: str) -> Change:
    return Change("the state of torch", f"the state of torch has changed ({', '.join(what.split())})")


def _tell_modes(_scope: Scope, _names: Names) -> Change:
    what = "what torch functions are overridden by"
    return Change(what, f"{what} has changed (as by torch.set_default_device)")


def _length(place: Place) -> Place:
    """Of a container, where it is."""
    kinds: tuple[type[Any], ...] = (dict, list, tuple, set, frozenset, deque)
    kind = next((kind for kind in kinds if is_a(place.value, kind)), None)
    value = UNREADABLE if kind is None else kind.__len__(place.value)
    return replace(place, value=value, kind=f"the length of {place.kind}")


def _tell_expression(scope: Scope, _names: Names, text: str) -> Change | None:
    match ast.parse(text, mode="eval").body:
        case ast.Compare(
            left=left, ops=[ast.Is() | ast.IsNot() | ast.Eq() | ast.NotEq() as operator], comparators=[right]
        ):
            return _of_comparison(scope, left, operator, right)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _of_denial(scope, operand)
        case ast.BoolOp(op=ast.And(), values=[ast.Compare(left=ast.Call(args=[subject])), ast.Call()]):
            return _between(scope.find(subject), "nan")
        case ast.Call(func=function, args=[first, second]):
            return _of_presence(scope, ast.unparse(function), first, second, is_there=True)
    return None


def _of_denial(scope: Scope, node: ast.expr) -> Change | None:
    if isinstance(node, ast.Call) and len(node.args) == 2:
        return _of_presence(scope, ast.unparse(node.func), *node.args, is_there=False)
    return _between(_length(scope.find(node)), "0")


def _of_presence(scope: Scope, function: str, first: ast.expr, second: ast.expr, *, is_there: bool) -> Change | None:
    """Whether a container has a member, or an object an attribute."""
    if function == "set.__contains__":
        place, member = scope.find(first), shown(ast.literal_eval(second))
        is_now = is_a(place.value, set, frozenset) and ast.literal_eval(second) in place.value
        return _between(replace(place, kind=f"{member} in {place.kind}"), str(not is_now), str(is_now))
    if function == "hasattr":
        place = scope.find(ast.Call(func=ast.Name("getattr"), args=[first, second], keywords=[]))
    elif function == "___dict_contains":
        place = scope.find(ast.Subscript(value=second, slice=first))
    else:
        return None
    if not is_there and isinstance(second, ast.Attribute) and second.attr == "__dict__":
        owner, name = scope.find(second.value), ast.literal_eval(first)
        if not is_a(owner.value, type) and any(name in vars(kind) for kind in type(owner.value).__mro__):
            return _between(place, f"that of the class {class_name(type(owner.value))}")
    return _between(place, "there" if is_there else _MISSING_WORD)


def _of_comparison(scope: Scope, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Change | None:
    if ast.unparse(left) == "utils_device.CURRENT_DEVICE":
        device: Any = torch.utils._device.CURRENT_DEVICE
        return _between(Place("the default device", device), ast.unparse(right))
    if _is_place(right) and _is_place(left):
        return _of_pair(scope.find(left), operator, scope.find(right))
    before = _shown_constant(right)
    match left:
        case ast.Call(func=ast.Name("len"), args=[ast.Set(elts=identities)]):
            return _of_distinct([scope.find(one.args[0]) for one in identities if isinstance(one, ast.Call)])
        case ast.Call(func=ast.Name("len"), args=[subject]):
            return _between(_length(scope.find(subject)), before)
        case ast.Call(func=ast.Name("list"), args=[ast.Call(args=[subject])]):
            return _of_keys(scope.find(subject), ast.unparse(right))
        case ast.Call(func=ast.Name("repr"), args=[ast.Call(args=[ast.Call(args=[subject])])]):
            return _of_keys(scope.find(subject), str(ast.literal_eval(right)))
        case ast.Call(func=ast.Name("int" | "float" | "str" | "complex" | "bytes" | "bool"), args=[subject]):
            return _between(scope.find(subject), before)
    if isinstance(operator, ast.IsNot):
        return _between(scope.find(left), f"not {before}")
    return _between(scope.find(left), before)


def _of_keys(place: Place, before: str) -> Change | None:
    """The keys of a dictionary, which were written as `before`."""
    now = f"[{', '.join(map(shown, dict.keys(place.value)))}]" if is_a(place.value, dict) else None
    if now == before:
        return None  # these are the same
    named = replace(place, value=UNREADABLE, kind=f"the keys of {place.kind}")
    return _between(named, cut(before), None if now is None else cut(now))


def _of_distinct(places: Sequence[Place]) -> Change | None:
    """Which of what were different objects are one."""
    known: dict[int, Place] = {}
    for place in places:
        other = known.setdefault(id(place.value), place)
        if other is not place and place.value is not UNREADABLE:
            what = f"{other} and {place}"
            return Change(what, f"{what} are one object now")
    return None


def _of_pair(left: Place, operator: ast.cmpop, right: Place) -> Change | None:
    """What was one object is two, or the other way round."""
    if left.value is UNREADABLE or right.value is UNREADABLE:
        return None
    is_one = left.value is right.value
    if isinstance(operator, (ast.Eq, ast.NotEq)):  # methods are made whenever they are read
        are_methods = [is_a(place.value, *_METHODS) for place in (left, right)]
        if not any(are_methods):
            return None
        is_one = all(are_methods) and bool(left.value == right.value)
    if is_one == isinstance(operator, (ast.Is, ast.Eq)):
        return None  # this one holds
    what = f"{left} and {right}"
    return Change(what, f"{what} are {'one object' if is_one else 'two objects'} now")


def _is_place(node: ast.expr) -> bool:
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return not names.isdisjoint("LG") and not (isinstance(node, ast.Call) and node.args)


def _shown_constant(node: ast.expr) -> str:
    try:
        return shown(ast.literal_eval(node))
    except ValueError:
        return cut(ast.unparse(node))


Tell = Callable[..., Change | None]

_PATTERNS: tuple[tuple[re.Pattern[str], Tell], ...] = (
    (re.compile(r"___check_type_id\((.+?), \d+\), type=<(?:class|enum) '([^']*)'"), _tell_type),
    (re.compile(r"___check_obj_id\((.+?), (\d+)\), type="), _tell_identity),
    (re.compile(r"(?:KeyError|IndexError) on (.+)"), _tell_missing),
    (re.compile(r"getattr failed on source (.+)"), _tell_missing),
    (re.compile(r"CodeGuardAccessor: Not a function on (.+)"), _tell_no_function),
    (re.compile(r"tensor '(.+)' requires_grad mismatch\. expected requires_grad=(\d)"), _tell_gradient),
    (re.compile(r"tensor '(.+)' (.+?) mismatch(?: at index (\d+))?\. expected (.+?), actual (.+)"), _tell_tensor),
    (re.compile(r"expected type of '(.+)' to be a tensor type"), _tell_no_tensor),
    (re.compile(r"len\((.+)\) != (\d+)$"), _tell_length),
    (re.compile(r"(.+?) is written (.+)$"), _tell_written),
    (re.compile(r"GLOBAL_STATE changed: (.+)"), _tell_state),
    (re.compile(r"___check_torch_function_mode_stack\(\)"), _tell_modes),
    (re.compile(r"(.+?)(?:\s+\(HINT: .*)?$"), _tell_expression),
)
