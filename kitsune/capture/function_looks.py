"""What Dynamo is shown of a function with a backward pass of its own, and what the graph has of its call.

What Dynamo has seen of the function is of no use, but for the guards, for what it refuses, and for the tensors that the
function takes from elsewhere. Its variables, and how it looks into a function, are private.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, NamedTuple

from torch import fx
from torch._dynamo import exc
from torch._dynamo.output_graph import SubgraphTracer
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import ConstantVariable, TupleVariable, higher_order_ops
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.higher_order_ops import AutogradFunctionApplyVariable
from torch._dynamo.variables.misc import AutogradFunctionContextVariable
from torch._guards import Source
from torch.autograd import Function
from torch.autograd.function import _is_setup_context_defined

from kitsune.capture.applied_functions import AppliedFunction, name_of
from kitsune.capture.refusing import refuse, take_back

_MOST_RESULTS = 4
"""Of a function whose backward pass is told which gradients are missing: it is looked into for each set of these."""


@dataclass
class Look:
    """A look into what runs in a backward pass.

    Attributes:
        name: of what.
        early, late: what is read in the call, and in its backward pass; `late` is None until that is looked into.
    """

    name: str
    early: dict[Source, None] = field(default_factory=dict)
    late: dict[Source, None] | None = None

    def may_change(self, item: Any) -> bool:
        """Whether an object that was there before may be changed."""
        return isinstance(item, AutogradFunctionContextVariable)  # in torch 2.11 Dynamo has one for hooks


class FunctionLook(Look):
    """A look into a function. What Dynamo has seen in it is of no use but to tell which tensors it takes.

    Attributes:
        results: what it returns.
    """

    results: Any

    def __init__(
        self, tx: Any, function: type[Function], source: Source, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        super().__init__(name_of(function))
        self._tx, self._rule = tx, _Rule(function, source)
        self._ctx = self._rule.prepare_ctx_vt(tx, args, kwargs)
        self._tracer = SubgraphTracer(tx.output, parent=tx.output.current_tracer, source_target=self._rule._HOP_NAME)
        self._given = {one.as_proxy() for one in _tensors((args, kwargs))}

    def may_change(self, item: Any) -> bool:
        return item is self._ctx and self.late is None

    def kept(self) -> list[Any]:
        """What `ctx` has in attributes of the function's own."""
        return list(self._tx.output.side_effects.store_attr_mutations.get(self._ctx, {}).values())

    def at_forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        seen = self._rule.trace_forward_graph(self._tx, self._ctx, self._tracer, args, kwargs)
        self._forward, self.results = seen[:2]
        self._refuse_others()

    def at_backward(self, applied: AppliedFunction) -> None:
        """Looks for each set of gradients that may be missing, where the function is told which are."""
        self.late = {}
        effects = self._tx.output.side_effects
        is_set = effects.has_pending_mutation_of_attr(self._ctx, "materialize_grads")
        if not is_set or effects.load_attr(self._ctx, "materialize_grads").as_python_constant():
            self._at_backward(self.results)
            return
        places = applied.differentiable
        if len(places) > _MOST_RESULTS:
            refuse(f"{self.name}, with set_materialize_grads(False), has {len(places)} results")
        applied.missing = set()
        for given in itertools.chain.from_iterable(
            itertools.combinations(places, n) for n in range(len(places), -1, -1)
        ):
            try:
                self._at_backward(self._gradients(given))
            except exc.TorchDynamoException as error:
                if given == tuple(places):
                    raise
                take_back(error)
                continue  # if it runs so, that is refused then
            applied.missing.add(frozenset(places) - frozenset(given))

    def _gradients(self, given: Sequence[int]) -> Any:
        """What stands for the gradients of the results at some places, and None for the others."""
        items = [self.results] if self.results.is_tensor() else self.results.items
        none = ConstantVariable.create(None)
        return TupleVariable([one if place in given else none for place, one in enumerate(items)])

    def _at_backward(self, gradients: Any) -> None:
        self._rule.trace_backward_graph(self._tx, self._ctx, self._tracer, gradients, self._forward)
        self._refuse_others()

    def _refuse_others(self) -> None:
        if not self._given.issuperset(self._tracer.lifted_freevars):
            refuse(f"{self.name} uses a tensor that is not among its arguments")


class _Rule(AutogradFunctionApplyVariable):
    """A function for Dynamo's methods that look into its passes, which know where it has its methods from."""

    def __init__(self, function: type[Function], source: Source) -> None:
        super().__init__(None, None, source)
        self._function, self._source = function, source

    def prepare_fn_vt(self, tx: Any, ctx: Any, method_name: str, args: Sequence[Any]) -> tuple[Any, list[Any]]:
        function: Any = self._function
        if method_name == "backward":
            has_vjp = function.vjp is not Function.vjp
            return self._method(tx, "vjp" if has_vjp else "backward"), [ctx, *args]
        forward = self._method(tx, "forward")
        if _is_setup_context_defined(function.setup_context):
            inlined = higher_order_ops._make_inlined(tx, _with_setup)  # type: ignore[attr-defined]
            forward = inlined(forward, self._method(tx, "setup_context"))
        return forward, [ctx, *args]

    def _method(self, tx: Any, name: str) -> Any:
        method = getattr(self._function, name)
        if not isinstance(method, types.FunctionType):
            refuse(f"{name_of(self._function)}.{name} is no static method that is written in Python")
        return VariableTracker.build(tx, method, AttrSource(self._source, name))


def _with_setup(forward: Callable[..., Any], setup_context: Callable[..., Any]) -> Callable[..., Any]:
    """Both, as a forward pass that has a `ctx`."""

    def with_setup(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        setup_context(ctx, args, output)
        return output

    return with_setup


class Call(NamedTuple):
    """A call of a function in the graph, and its results, for Dynamo."""

    applied: AppliedFunction
    node: fx.Node
    returned: Any


def add_call(tx: Any, function: type[Function], args: Sequence[Any], kwargs: Mapping[str, Any], seen: Any) -> Call:
    """Has the graph call `function`, which Dynamo has `seen` return something."""
    applied = AppliedFunction(function)
    places = tuple(_argument(applied, place, one) for place, one in enumerate(args))
    names = {name: _argument(applied, name, one) for name, one in kwargs.items()}
    proxy = tx.output.create_proxy("call_function", applied.target(), places, names)
    found: Any = wrap_fx_proxy(tx=tx, proxy=proxy)
    for one in args:
        if one.is_tensor():
            one.synchronize_attributes(tx)  # it may have been written to
    is_alone = seen.is_tensor()
    tensors = [found] if found.is_tensor() else found.items
    expected = [seen] if is_alone else seen.items
    if is_alone != found.is_tensor() or len(tensors) != sum(one.is_tensor() for one in expected):
        refuse(f"{name_of(function)} returns something else than a tensor or a tuple")
    rest = iter(tensors)
    items: list[Any] = [next(rest) if one.is_tensor() else one for one in expected]
    applied.differentiable = [place for place, one in enumerate(items) if one.is_tensor() and one.requires_grad]
    return Call(applied, proxy.node, found if is_alone else TupleVariable(items))


def _argument(applied: AppliedFunction, key: int | str, variable: Any) -> Any:
    """`variable` as a graph may have it: tensors, and numbers. Other objects are given to `applied`."""
    if _tensors(variable):
        return variable.as_proxy()
    try:
        value = variable.as_python_constant()
    except (NotImplementedError, exc.Unsupported):
        if variable.source is None or not hasattr(variable, "value"):
            kind = variable.python_type_name()
            refuse(f"{name_of(applied.function)} is given a {kind} that the call has made")
        value = variable.value
    if type(value) in (type(None), bool, int, float, str):
        return value
    applied.objects[key] = value
    return None


def _tensors(variables: Any) -> list[Any]:
    """Those among `variables`, and in them."""
    found: list[Any] = []
    VariableTracker.visit(lambda one: found.append(one) if one.is_tensor() else None, variables)
    return found


def by_place(
    tx: Any, function: type[Function], args: list[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments as `apply` passes them on: most by place, and those that are left out, for a `setup_context`."""
    has_setup = _is_setup_context_defined(function.setup_context)
    if not kwargs and not has_setup:
        return args, kwargs
    begin = () if has_setup else (ConstantVariable.create(None),)  # in place of `ctx`
    try:
        bound = signature(function.forward).bind(*begin, *args, **kwargs)
    except TypeError as error:
        refuse(f"{name_of(function)} is called with other arguments than it has: {error}")
    if has_setup:
        bound.apply_defaults()
    named = {name: _variable(tx, one) for name, one in bound.kwargs.items()}
    return [_variable(tx, one) for one in bound.args[len(begin) :]], named


def _variable(tx: Any, value: Any) -> Any:
    return value if isinstance(value, VariableTracker) else VariableTracker.build(tx, value)
