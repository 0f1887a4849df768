"""The guarded front end: Dynamo finds out what Python does in a call, and watches whether that changes.

This is the only module that touches `torch._dynamo`, but for `aliases`, `apart`, `attribute_reads`,
`autograd_functions`, `called`, `causal_masks`, `changes`, `compilations`, `dict_attributes`, `direct_calls`,
`equality`, `function_looks`, `identity`, `kept_results`, `known_answers`, `late_reads`, `leaves`, `lookups`,
`protocols`, `recurrent`, `refusing`, `retention`, `set_order`, `side_effects`, `texts`, `transforms` and `truth`.
`torch.compile` with a backend of one's own is public. What is not: the switch that guards hooks, the switches that keep
numbers drawn on the host from being frozen, the guards, that a call asks whether it is being compiled, what Dynamo
takes a sequence for, the advice that it gives, and its marks on tensors.
"""

from __future__ import annotations

import logging
import threading
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NoReturn, cast
from unittest import mock

import torch
from torch import fx
from torch._dynamo import config, eval_frame, exc
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.misc import RandomVariable
from torch.utils import _pytree as pytree

from kitsune.capture import (
    aliases,
    apart,
    attribute_reads,
    autograd_functions,
    causal_masks,
    dict_attributes,
    equality,
    experts,
    identity,
    kept_results,
    known_answers,
    leaves,
    lookups,
    protocols,
    recurrent,
    refusing,
    set_order,
    side_effects,
    texts,
    transforms,
    truth,
)
from kitsune.capture.called import Called, noting
from kitsune.capture.changes import Names, of_answers, of_facts
from kitsune.capture.changes import noting as noting_names
from kitsune.capture.direct_calls import DirectCall, Repetition
from kitsune.capture.global_hooks import is_of_global_hooks, without_own
from kitsune.capture.host_draws import HostDraws, take_draws
from kitsune.capture.refusing import refuse
from kitsune.capture.result_views import take_views
from kitsune.capture.retention import Retention
from kitsune.capture.signature import MARKED
from kitsune.capture.sole import sole_capture
from kitsune.capture.uncaptured_calls import refusal_of
from kitsune.errors import KitsuneError, Refusal, RefusedError
from kitsune.graph import grouped_products
from kitsune.native.build import facts_type
from kitsune.native.facts import Fact, attribute, result

Run = Callable[[fx.GraphModule, Sequence[torch.Tensor]], Sequence[Any]]

_LIBRARIES = frozenset({"kitsune", "torch", "torchvision", "torchaudio", "transformers", "accelerate"})
"""What these compute does not depend on whether they are being compiled, though they ask."""

_HAS_CHANGED = "what the model's Python code depends on has changed"
_CHANGED = Refusal(f"{_HAS_CHANGED} since the capture")


class GuardedFunction:
    """A Python function that runs as a flat graph, as long as Dynamo's guards hold.

    Args:
        function: called with the arguments of each call; must be a plain function whose closure
            holds everything it uses.
        run: a bound method, called with the graph of a call (a `GraphModule` over flat tensors:
            parameters, buffers and arguments in the order of their use) and its flat tensors;
            returns the graph's outputs. Its object is not kept alive.

    Dynamo keeps its graphs, and a limit on their number, with a function's code object, so each
    `GuardedFunction` gets a code object of its own.

    Attributes:
        misfits: the latest call did not fit: what the graph depends on was not as at the capture. It may be again.
        stale: no call will fit any more.
    """

    def __init__(self, function: Callable[..., Any], run: Run) -> None:
        own = types.FunctionType(
            function.__code__.replace(),
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        self.misfits = self.stale = False
        self._function, self._retention = own, Retention(self, own.__code__)
        self._direct: DirectCall | None = None
        self._is_direct_sought = False
        self._graph: fx.GraphModule | None = None
        self._ends: fx.GraphModule | None = None  # see `take_views`
        self._draws = HostDraws()
        self._refusal: Refusal | None = None  # of its graph
        self._called = self._answers = facts_type()([])
        self._called_facts: tuple[Fact, ...] = ()
        self._answers_facts: tuple[Fact, ...] = ()
        self._names: Names = {}  # of what is guarded
        self._thread = threading.local()
        self._run = weakref.WeakMethod(run)
        self._compiled = torch.compile(
            own, backend=_backend(self), fullgraph=True, dynamic=False, options={"guard_filter_fn": _are_needed}
        )

    def __call__(self, *args: Any) -> Any:
        """Calls the function.

        Raises:
            RefusedError: Dynamo cannot express the call as one graph, or a guard has failed. The
                function has not run.
        """
        self._thread.ran = False
        is_captured = self._graph is not None
        if is_captured and not self.fits(*args):
            raise RefusedError(self._changed(args), passing=True)
        try:
            if self._direct is not None:
                result = self._direct.run(*args)
            elif is_captured:
                with sole_capture():  # what Dynamo has compiled refuses to run while anything is traced
                    result = self._compiled(*args)
            else:
                _refuse_marks(args)
                with _strict_capture() as called, self._retention.noted(), noting_names() as names:
                    result = self._compiled(*args)
                self._called_facts, self._names = tuple(called.facts()), names
                self._answers_facts = tuple(called.answers())
                self._called, self._answers = facts_type()(self._called_facts), facts_type()(self._answers_facts)
        except exc.TorchDynamoException as error:
            if is_captured:  # Dynamo tries again only after a guard has failed
                self.misfits = self.stale = True
                raise RefusedError(_CHANGED, passing=True) from error
            # Dynamo looks at what other threads may change meanwhile, such as the hooks of all modules.
            passing = isinstance(error, exc.InternalTorchDynamoError) and threading.active_count() > 1
            raise RefusedError(refusal_of(error), passing=passing) from error
        except RefusedError:
            raise
        except Exception as error:
            if self._thread.ran:
                raise
            # Dynamo passes on some of torch's, as of lengths that depend on data, and assertions of its own, as of a
            # guard that fails when it is asked for the first time.
            raise RefusedError(refusal_of(error), passing=isinstance(error, AssertionError)) from error
        if not self._thread.ran:
            raise KitsuneError("torch.compile ran the call without its graph; use mode='eager' and report this")
        return result

    def fits(self, *args: Any) -> bool:
        """Whether a call would run the graph that was captured. Where only Dynamo can tell, as if it would."""
        if self._graph is None:
            return True
        if not self._is_direct_sought:
            self._is_direct_sought, self._direct = True, DirectCall.of(self._function)
        direct = self._direct
        self.stale |= direct is not None and direct.is_void
        fits = self._called.hold() and (direct is None or direct.fits(args)) and self._answers.hold()
        self.misfits = self.stale or not fits
        return not self.misfits

    def through(self, run: Run, *args: Any) -> Any:
        """As a call, effects on Python objects included, but that `run` answers in place of the captured graph.

        What `run` returns is not completed by `results`.

        Raises:
            RefusedError: as a call.
        """
        self._thread.instead = run
        try:
            return self(*args)
        finally:
            self._thread.instead = None

    def results(self, outputs: Sequence[torch.Tensor], flat: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """What the call returns, with the views of what its graph has given for `flat`."""
        return outputs if self._ends is None else self._ends(*outputs, *flat)

    def repetition(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Repetition | None:
        """What would make another call with `args` and `kwargs` pass the same objects to the graph as this one did.

        None where calls do more than to run the graph and to return its result, or where that cannot be told.
        """
        if self._direct is None or self._ends is not None or self._draws.calls:
            return None
        repetition = self._direct.repetition(args, kwargs)
        if repetition is None:
            return None
        return replace(repetition, facts=(*repetition.facts, *self._called_facts), answers=self._answers_facts)

    def _changed(self, args: tuple[Any, ...]) -> Refusal:
        """Why a call that has just been found not to fit does not."""
        change = of_facts(self._called_facts)
        if change is None and self._direct is not None:
            fits = self._direct.fits(args)
            change = of_answers(self._answers_facts) if fits else self._direct.change(args, self._names)
        if change is None:
            return _CHANGED
        return Refusal(f"{_HAS_CHANGED}: {change.text}", topic=f"{_HAS_CHANGED}: {change.what}")

    def _on_call(self, flat: Sequence[torch.Tensor]) -> Sequence[Any]:
        self._thread.ran = True
        run = self._run()
        if self.stale or run is None:
            raise RefusedError(_CHANGED, passing=True)
        if self._refusal is not None:
            raise RefusedError(self._refusal)
        assert self._graph is not None
        instead: Run | None = getattr(self._thread, "instead", None)
        results = self.results(run(self._graph, flat), flat) if instead is None else instead(self._graph, flat)
        self._draws.draw()
        return results

    def _on_capture(self, graph: fx.GraphModule) -> None:
        # A second graph comes from a failed guard, outside of the strict capture: it must not be run.
        self.stale = self._graph is not None
        self._refusal = leaves.refuse_kept(graph.graph) or recurrent.refuse_elsewhere(graph)
        experts.as_in_eager(graph)
        self._draws = take_draws(graph)
        self._graph, self._ends = graph, take_views(graph)


def _backend(guarded: GuardedFunction) -> Callable[..., Callable[..., Sequence[Any]]]:
    """Dynamo keeps backends and what they return for ever, so these must not keep `guarded` alive."""
    reference = weakref.ref(guarded)

    def backend(graph: fx.GraphModule, _examples: Sequence[torch.Tensor]) -> Callable[..., Sequence[Any]]:
        owner = reference()
        assert owner is not None
        owner._on_capture(graph)

        def call(*flat: torch.Tensor) -> Sequence[Any]:
            owner = reference()
            assert owner is not None
            return owner._on_call(flat)

        return call

    return backend


def _are_needed(guards: Sequence[Any]) -> list[bool]:
    """Without those about hooks of saved tensors and of all modules: `refuse_surroundings` asks before every replay.

    Dynamo makes the others a second time. By then what a property makes at each look is another object, which it takes
    for an error of its own unless the guard has forgotten the first one.
    """
    for guard in guards:
        guard.orig_guard.obj_weakref = None
    return [
        guard.guard_type != "AUTOGRAD_SAVED_TENSORS_HOOKS" and not is_of_global_hooks(guard.name) for guard in guards
    ]


def is_wrapper(module: torch.nn.Module) -> bool:
    """Whether `torch.compile` has made `module` of another one, for which Dynamo takes it."""
    return isinstance(module, eval_frame.OptimizedModule)


def compiled_inside(module: torch.nn.Module) -> torch.nn.Module:
    """The module that `torch.compile` has wrapped as `module`; `module` itself if that is no such wrapper."""
    return cast(torch.nn.Module, module._orig_mod) if is_wrapper(module) else module


def refuse_dynamo() -> Refusal | None:
    """None if `torch.compile` works at this moment."""
    if config.disable or eval_frame._stance.stance != "default":
        return Refusal("torch.compile is switched off or under a stance that forbids compiling")
    return None


def dynamo_facts() -> list[Fact]:
    """That `torch.compile` is switched on or off as it is."""
    # Reading `config.disable` takes as long as thirty other facts. Of what it looks at, this alone can change.
    option = vars(config)["_config"]["disable"]
    is_variable = isinstance(option.user_override, ContextVar)
    disable = result(option.user_override.get) if is_variable else attribute(option, "user_override")
    return [disable, attribute(eval_frame, "_stance"), attribute(eval_frame._stance, "stance")]


@contextmanager
def _strict_capture() -> Iterator[Called]:
    """Guards the hooks of modules, and refuses random numbers of the host that Dynamo would freeze or take from torch.

    Constants are told from others that are only equal, and what is looked up in vain is guarded. Refused is also a
    model that asks whether it is being compiled: it would be told so, and is not by plain PyTorch. So is one with a
    deque that has a bound: Dynamo takes it for one without. What it yields is filled meanwhile.

    What is compiled tells no profiler of its own bytecode, which would cost a tenth of a small step on the host. What a
    `DistributedDataParallel` calls is one graph, not one for each of its buckets. Guards are asked one by one, where
    torch 2.11 would leave out those below a module whose dictionaries it finds as they were: cells of closures, and
    what they hold, are not among these. Dynamo's metrics are without its settings, as torch 2.11 fails to write down
    the functions that are among them. Its advice to those who call `torch.compile` is not for users who did not: what
    stands in the way is told as a refusal.

    Raises:
        RefusedError: another thread is in the midst of a capture.
    """
    contexts = (
        sole_capture(),
        without_own(),
        config.patch(
            skip_nnmodule_hook_guards=False,
            trace_numpy=False,
            specialize_float=True,
            skip_guards_on_constant_func_defaults=False,  # True before torch 2.13
            record_runtime_overhead=False,
            optimize_ddp=False,
            use_recursive_dict_tags_for_guards=False,
            skip_tensor_guards_with_matching_dict_tags=False,  # such a tensor may be changed in place
            ignore_logger_methods={*config.ignore_logger_methods, *_said_once()},
        ),
        refusing.for_good(),
        equality.strict(),
        lookups.guarded(),
        dict_attributes.guarded(),
        aliases.guarded(),
        identity.guarded(),
        apart.guarded(),
        side_effects.written_or_refused(),
        set_order.known_or_refused(),
        truth.known_or_refused(),
        texts.known_or_refused(),
        protocols.refused(),
        causal_masks.answered(),
        known_answers.given(),
        leaves.followed(),
        recurrent.followed(),
        grouped_products.described(),
        mock.patch.object(RandomVariable, "call_method", _refuse_generator),
        mock.patch.object(InstructionTranslatorBase, "mark_inconsistent_side_effects", _refuse_question()),
        _bounded_refused(),
        transforms.requires_grad_asked(),
        mock.patch.object(dynamo_utils, "warn_once"),
        mock.patch.object(dynamo_utils, "_get_dynamo_config_for_logging", return_value=None),
    )
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        called = stack.enter_context(noting())
        stack.enter_context(attribute_reads.noted(called))
        stack.enter_context(kept_results.answered(called))
        stack.enter_context(autograd_functions.called_themselves(called))
        yield called


def _refuse_marks(args: Sequence[Any]) -> None:
    """Before Dynamo does, which would log an error of its own."""
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    marks = ("_dynamo_dynamic_indices", "_dynamo_unbacked_indices")
    if any(getattr(tensor, mark, None) for tensor in tensors for mark in marks):
        raise RefusedError(MARKED)


def _refuse_question() -> Callable[[Any], None]:
    """What Dynamo calls when `torch.compiler.is_compiling` is, or what means the same."""
    mark = InstructionTranslatorBase.mark_inconsistent_side_effects

    def answer(frame: Any) -> None:
        asking = frame
        while asking.f_code.co_name.startswith("is_") and getattr(asking, "parent", None) is not None:
            asking = asking.parent  # on whose behalf a library's function asks
        if asking.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES:
            refuse("the model asks whether it is being compiled, and would be told so")
        mark(frame)

    return answer


@contextmanager
def _bounded_refused() -> Iterator[None]:
    """Within, sequences with a bound are refused."""
    wrap: Callable[..., Any] = VariableBuilder._wrap

    def wrap_unbounded(builder: Any, value: Any) -> Any:
        if isinstance(value, deque) and value.maxlen is not None:
            refuse("a collections.deque with a maxlen is used, which replays would fill beyond that")
        return wrap(builder, value)

    with mock.patch.object(VariableBuilder, "_wrap", wrap_unbounded):
        yield


def _said_once() -> list[Any]:
    """What says nothing when it is called again, as eager calls came first: methods that `transformers` gives loggers,
    and warnings, unless a filter shows each of them, or raises them. NumPy has one for its own, but is not called in a
    graph.
    """
    methods = [method for method in vars(logging.Logger).values() if hasattr(method, "cache_info")]
    shown = [category for action, _, category, *_ in warnings.filters if action in ("always", "all", "error")]
    if any(category.__module__.partition(".")[0] != "numpy" for category in shown):
        return methods
    return [*methods, warnings.warn]


def _refuse_generator(*_args: Any, **_kwargs: Any) -> NoReturn:
    refuse("numbers drawn from a random.Random object would be the same at every replay")
