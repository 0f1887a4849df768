"""What decides which functions a captured call runs: code, classes, builtins, modules, and the environment."""

from __future__ import annotations

import abc
import collections.abc
import dataclasses
import operator
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from kitsune.errors import RefusedError
from tests.kitsune.capture.changing import model, noticed
from tests.kitsune.capture.test_frontend import guarded
from tests.kitsune.versions import skip_before_2_13

MODULE = "kitsune_test_module"


class Base:
    def method(self) -> float:
        return 1.0

    def inherited(self) -> float:
        return 1.0

    @property
    def value(self) -> float:
        return 1.0

    @classmethod
    def of_class(cls) -> float:
        return 1.0

    @staticmethod
    def static() -> float:
        return 1.0


def classes() -> Any:
    """A class and its base, made anew, that change as they are changed."""
    base: Any = type("Base", (Base,), dict(vars(Base)))
    derived: Any = type("Derived", (base,), {"own": 2.0, "method": lambda self: base.method(self) + 1.0})
    return base, derived


def another(*_: Any) -> float:
    return 5.0


def attempt(read: Callable[[], Any]) -> float:
    try:
        return float(read())
    except (AttributeError, TypeError):
        return 1.0


DEFINITIONS: dict[str, tuple[Callable[[Any], float], Callable[[Any, Any], object]]] = {
    "own method": (lambda it: it.method(), lambda base, kind: setattr(kind, "method", another)),
    "method by super": (lambda it: it.method(), lambda base, kind: setattr(base, "method", another)),
    "inherited method": (lambda it: it.inherited(), lambda base, kind: setattr(base, "inherited", another)),
    "method that hides one": (lambda it: it.inherited(), lambda base, kind: setattr(kind, "inherited", another)),
    "property": (lambda it: it.value, lambda base, kind: setattr(base, "value", property(another))),
    "class method": (lambda it: it.of_class(), lambda base, kind: setattr(base, "of_class", classmethod(another))),
    "static method": (lambda it: it.static(), lambda base, kind: setattr(base, "static", staticmethod(another))),
    "property that hides": (lambda it: it.place, lambda base, kind: setattr(base, "place", property(another))),
    "class attribute": (lambda it: it.own, lambda base, kind: setattr(kind, "own", 5.0)),
    "class attribute that was missing": (
        lambda it: attempt(lambda: type(it).late),
        lambda base, kind: setattr(base, "late", 5.0),
    ),
    "default for a class": (
        lambda it: getattr(type(it), "late", 1.0),
        lambda base, kind: setattr(base, "late", 5.0),
    ),
    "dictionary of a class": (
        lambda it: type(it).__dict__.get("late", 1.0),
        lambda base, kind: setattr(kind, "late", 5.0),
    ),
    "truth": (lambda it: 2.0 if it else 1.0, lambda base, kind: setattr(base, "__bool__", lambda self: False)),
    "length": (lambda it: 2.0 if it else 1.0, lambda base, kind: setattr(base, "__len__", lambda self: 0)),
    "call": (lambda it: 2.0 if callable(it) else 1.0, lambda base, kind: setattr(base, "__call__", another)),
    "equality": (
        lambda it: 2.0 if it == it.other else 1.0,
        lambda base, kind: setattr(base, "__eq__", lambda self, other: True),
    ),
    "number": (lambda it: attempt(lambda: float(it)), lambda base, kind: setattr(base, "__float__", another)),
    "product": (lambda it: attempt(lambda: it * 2.0), lambda base, kind: setattr(base, "__mul__", another)),
    "attributes": (
        lambda it: getattr(it, "late", 1.0),
        lambda base, kind: setattr(base, "__getattr__", lambda self, name: 5.0),
    ),
    "every attribute": (
        lambda it: it.place,
        lambda base, kind: setattr(base, "__getattribute__", lambda self, name: 5.0),
    ),
    "bases": (
        lambda it: 2.0 if isinstance(it, Base) else 1.0,
        lambda base, kind: setattr(kind, "__bases__", (type("Other", (), {}),)),
    ),
}


@pytest.mark.parametrize("what", DEFINITIONS)
def test_a_class_is_defined_otherwise(what: str) -> None:
    skip_before_2_13(what, {"number", "product"})
    read, change = DEFINITIONS[what]

    def build() -> Any:
        base, kind = classes()
        it = kind()
        it.place, it.other = 1.0, kind()
        return model(lambda self, x: x * read(it)), lambda: change(base, kind)

    noticed(build)


def test_a_method_of_the_model_is_defined_otherwise() -> None:
    def build() -> Any:
        made = model(lambda self, x: x * 2)
        return made, lambda: setattr(type(made), "forward", lambda self, x: x * 3)

    noticed(build)


def test_data_of_a_class_that_is_not_read_may_change() -> None:
    _, kind = classes()
    it = kind()
    call, runner = guarded(lambda x: x * it.method())
    for number in range(3):
        kind.own = float(number)
        assert call(torch.ones(2)).tolist() == [2.0, 2.0]
    assert len(runner.graphs) == 3


def abstract(own: bool) -> Any:
    kind: Any = abc.ABCMeta("Abstract", (), {}) if own else collections.abc.Sequence
    subject = type("Subject", (), {})
    return kind, subject


@pytest.mark.parametrize("own", [True, False], ids=["the model's", "Python's"])
@pytest.mark.parametrize(
    "ask",
    [
        lambda subject, kind: isinstance(subject(), kind),
        lambda subject, kind: issubclass(subject, kind),
        lambda subject, kind: isinstance(subject(), (int, kind)),
    ],
    ids=["isinstance", "issubclass", "one of several"],
)
def test_a_class_joins_an_abstract_one(own: bool, ask: Callable[[Any, Any], bool]) -> None:
    def build() -> Any:
        kind, subject = abstract(own)
        return model(lambda self, x: x * (2.0 if ask(subject, kind) else 1.0)), lambda: kind.register(subject)

    noticed(build)


def test_a_class_joins_an_abstract_one_of_which_nobody_asks() -> None:
    call, runner = guarded(lambda x: x * (2.0 if isinstance(x, (Tensor, int | float)) else 1.0))
    for _ in range(3):
        assert call(torch.ones(2)).tolist() == [2.0, 2.0]
        collections.abc.Sequence.register(type("Subject", (), {}))
    assert len(runner.graphs) == 3


def of_a_function() -> Any:
    def scale(x: Tensor) -> Tensor:
        return x * 2

    return lambda x: scale(x), scale


def of_a_method() -> Any:
    kind = type("Kind", (), {"scale": lambda self, x: x * 2})
    it = kind()
    return lambda x: it.scale(x), kind.scale


def of_forward() -> Any:
    made = model(lambda self, x: x * 2)
    return made, type(made).forward


@pytest.mark.parametrize("build", [of_a_function, of_a_method, of_forward])
def test_a_function_gets_other_code(build: Callable[[], Any]) -> None:
    """As reloading modules in place does."""

    def built() -> Any:
        function, changed = build()
        instead = (lambda self, x: x * 5) if changed.__code__.co_argcount == 2 else (lambda x: x * 5)
        return function, lambda: setattr(changed, "__code__", instead.__code__)

    noticed(built)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    globals().pop("abs", None)
    sys.modules.pop(MODULE, None)


def shortest() -> float:
    return float(abs(-2.0))


def test_a_global_comes_to_hide_a_builtin() -> None:
    def build() -> Any:
        globals().pop("abs", None)
        return lambda x: x * shortest(), lambda: globals().update(abs=lambda _: 5.0)

    noticed(build)


def install(k: float) -> None:
    made = types.ModuleType(MODULE)
    made.k = k  # type: ignore[attr-defined]
    sys.modules[MODULE] = made


def imported() -> float:
    import kitsune_test_module as made

    return float(made.k)


def imported_from() -> float:
    from kitsune_test_module import k

    return float(k)


@pytest.mark.parametrize("read", [imported, imported_from])
def test_a_module_is_replaced(read: Callable[[], float]) -> None:
    def build() -> Any:
        install(2.0)
        return lambda x: x * read(), lambda: install(5.0)

    noticed(build)


def test_a_function_of_a_module_that_was_replaced_before_is_refused() -> None:
    """Dynamo would look for its globals in the other one."""
    install(2.0)
    exec("def read(): return k", vars(sys.modules[MODULE]))
    read = sys.modules[MODULE].read
    install(5.0)
    call, _ = guarded(lambda x: x * read())
    with pytest.raises(RefusedError, match=f"of a module '{MODULE}' that is not the one in sys.modules"):
        call(torch.ones(2))


@pytest.mark.parametrize(
    "read",
    [
        lambda: float(os.environ.get("KITSUNE_TEST", "1")),
        lambda: float(os.getenv("KITSUNE_TEST", "1")),
        lambda: 2.0 if "KITSUNE_TEST" in os.environ else 1.0,
    ],
)
def test_the_environment_is_noticed_where_it_is_read(read: Callable[[], float]) -> None:
    def build() -> Any:
        os.environ.pop("KITSUNE_TEST", None)
        return lambda x: x * read(), lambda: os.environ.update(KITSUNE_TEST="5")

    noticed(build)
    del os.environ["KITSUNE_TEST"]


def test_the_environment_is_not_noticed_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    call, runner = guarded(lambda x: x * 2)
    call(torch.ones(2))
    monkeypatch.setenv("KITSUNE_TEST", "1")
    call(torch.ones(2))
    assert len(runner.graphs) == 2


NUMPY = [
    "isinstance(self.number, np.floating)",
    "isinstance(self.number, float)",
    "type(self.number) is np.float64",
    "self.number.__class__ is np.float64",
    "isinstance(self.many[0], np.integer)",
    "type(self.named['a']) is np.bool_",
    "isinstance(self.array, np.ndarray)",
    "type(self.part.start) is np.int64",
]


@pytest.mark.parametrize("question", NUMPY)
def test_the_type_of_what_numpy_makes_is_not_asked_in_a_capture(question: str) -> None:
    namespace: dict[str, Any] = {"np": numpy}
    exec(f"def forward(self, x):\n    return x * (2.0 if {question} else 3.0)", namespace)
    asking = model(
        namespace["forward"],
        number=numpy.float64(2.0),
        many=(numpy.int64(1), 2),
        named={"a": numpy.bool_(True)},
        array=numpy.ones(2),
        part=slice(numpy.int64(1), None),
    )
    call, _ = guarded(lambda x: asking(x))
    with pytest.raises(RefusedError, match="the type, the shape or the length of an array or a number of NumPy's"):
        call(torch.ones(2))


def test_a_number_of_numpys_may_change_without_another_capture() -> None:
    """The sign of a zero, too."""
    scaled = model(lambda self, x: torch.copysign(x, x * self.number), number=numpy.float64(0.0))
    call, runner = guarded(lambda x: scaled(x))
    assert call(torch.ones(2)).tolist() == [1.0, 1.0]
    scaled.number = numpy.float64(-0.0)
    assert call(torch.ones(2)).tolist() == [-1.0, -1.0]
    assert len(runner.graphs) == 2


def test_warnings_that_become_errors_are_raised() -> None:
    with warnings.catch_warnings():

        def build() -> Any:
            warnings.resetwarnings()
            warnings.simplefilter("ignore")

            def forward(self: Any, x: Tensor) -> Tensor:
                warnings.warn("each place once", stacklevel=1)
                return x * len(warnings.filters)

            return model(forward), lambda: warnings.simplefilter("error", DeprecationWarning)

        assert "warnings.filters has changed" in noticed(build)


@pytest.mark.parametrize("read", [imported, imported_from])
def test_a_module_that_replaced_another_is_replaced(read: Callable[[], float]) -> None:
    install(1.0)
    call, _ = guarded(lambda x: x * read())
    assert call(torch.ones(2)).tolist() == [1.0, 1.0]

    def build() -> Any:
        install(2.0)
        return lambda x: x * read(), lambda: setattr(sys.modules[MODULE], "k", 5.0)

    noticed(build)
    with pytest.raises(RefusedError, match=f"the module {MODULE} was replaced"):
        call(torch.ones(2))


def test_a_module_is_replaced_that_functions_of_several_modules_import() -> None:
    """Dynamo has a name for it in each of them."""
    namespaces: list[dict[str, Any]] = [{"__name__": f"importer_{number}"} for number in range(2)]
    for namespace in namespaces:
        exec(f"def scaled(x):\n    import {MODULE} as made\n    return x * made.k", namespace)
    for k in (2.0, 5.0):
        install(k)
        for namespace in namespaces:
            call, _ = guarded(namespace["scaled"])
            assert call(torch.ones(1)).item() == k


def made_with_default(factor: float) -> type:
    class Made:
        def __init__(self, factor: float = factor) -> None:
            self.factor = factor

    return Made


def made_with_keyword(factor: float) -> type:
    class Made:
        def __init__(self, *, factor: float = factor) -> None:
            self.factor = factor

    return Made


def made_as_record(factor: float) -> type:
    @dataclasses.dataclass
    class Made:
        factor: float

    Made.__init__.__defaults__ = (factor,)  # type: ignore[attr-defined]
    return Made


def set_defaults(kind: Any) -> None:
    kind.__init__.__defaults__ = (2.0,)


def set_keywords(kind: Any) -> None:
    kind.__init__.__kwdefaults__ = {"factor": 2.0}


def set_keyword(kind: Any) -> None:
    kind.__init__.__kwdefaults__["factor"] = 2.0


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (made_with_default, set_defaults),
        (made_with_keyword, set_keywords),
        (made_with_keyword, set_keyword),
        (made_as_record, set_defaults),
    ],
)
def test_the_defaults_of_a_class_that_is_called(make: Callable[[float], type], change: Callable[[Any], None]) -> None:
    def build() -> Any:
        kind = make(1.0)
        return model(lambda self, x: x * kind().factor), lambda: change(kind)

    noticed(build)


def test_the_closure_of_a_class_that_is_called() -> None:
    def build() -> Any:
        factor = 1.0

        class Made:
            def __init__(self) -> None:
                self.factor = factor

        def change() -> None:
            nonlocal factor
            factor = 2.0

        return model(lambda self, x: x * Made().factor), change

    noticed(build)


@pytest.mark.support(
    "Models",
    "a class that is called, with a list among the defaults of its `__init__()`",
    "plain PyTorch, with a reason",
)
def test_a_container_in_the_defaults_of_a_class_that_is_called() -> None:
    class Made:
        def __init__(self, factors: list[float] = [1.0]) -> None:  # noqa: B006 - that is what it is about
            self.factor = factors[0]

    call, _ = guarded(lambda x: x * Made().factor)
    with pytest.raises(RefusedError, match="has a container in its defaults"):
        call(torch.ones(2))


@pytest.mark.parametrize("change", [operator.iadd, operator.imul, operator.isub])
def test_an_array_is_not_changed_by_a_capture(change: Callable[[Any, int], object]) -> None:
    array = numpy.ones(2)

    def forward(self: Any, x: Tensor) -> Tensor:
        change(array, 3)
        return x

    made = model(forward)
    call, _ = guarded(lambda x: made(x))
    with pytest.raises(RefusedError, match="an array of NumPy is changed in place"):
        call(torch.ones(2))
    assert array.tolist() == [1, 1]
