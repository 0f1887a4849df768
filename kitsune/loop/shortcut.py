"""A shorter way to replay a step that goes on as it did."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from kitsune.capture.ambient import ambient_facts
from kitsune.capture.direct_calls import Repetition
from kitsune.capture.frontend import GuardedFunction
from kitsune.capture.reads import Argument
from kitsune.capture.state import Binding, hook_facts
from kitsune.capture.step_program import StepProgram, StepSpec, scaling
from kitsune.capture.watch import parameter_hook_facts, surrounding_facts, wrapper_hook_facts, wrappers_of
from kitsune.engine.by_address import ByAddress
from kitsune.native.build import facts_type
from kitsune.native.facts import Fact, Facts, attribute, result

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)

_FREE_SHORTCUTS = 4
_REPLAYS_PER_SHORTCUT = 100


def may_try_shortcut(count: int, replays: int) -> bool:
    """Whether another one may be looked for after `count` of them: that takes as long as some replays do."""
    return count < _FREE_SHORTCUTS + replays // _REPLAYS_PER_SHORTCUT


def same_tensors(first: Sequence[object], second: Sequence[object]) -> bool:
    """Whether two lists consist of the same objects."""
    return len(first) == len(second) and all(one is other for one, other in zip(first, second, strict=True))


class CallShortcut:
    """Finds the inputs of a graph that a call would run, without running any of the user's Python code.

    Dynamo's code would do nothing but pass them to the graph, as long as all that Dynamo guards holds and all that the
    code reads is the same. That, and whatever else must be as it was when the call was replayed in the long way, is a
    list of facts, checked as one. They are made of the present state, which must be found to be good afterwards.

    Args:
        repetition: of the present call.
        facts: what must hold beside the repetition's.
        args, kwargs: of the present call.
        stable: positions of inputs that stay the same tensors from call to call.
        written: addresses of storages in which no argument may lie; see `Recording.refuse_written`.
        more: tensors that the graph takes after those of the call.

    Raises:
        LookupError: the long way would have to look closer than the facts do.
    """

    def __init__(
        self,
        repetition: Repetition,
        facts: Iterable[Fact],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        stable: Collection[int],
        written: Collection[int],
        more: Sequence[torch.Tensor] = (),
    ) -> None:
        self._inputs = [*repetition.sources, *more]
        self._places = _argument_places(repetition.sources)
        values = (*args, *kwargs.values())
        self._constants = [(place, value) for place, value in enumerate(values) if type(value) is not torch.Tensor]
        if not all(isinstance(value, _CONSTANTS) for _, value in self._constants):
            raise LookupError("an argument may change in place")
        # Of tensors that require no gradient, which guards look at, there is no other kind.
        tensors = [(place, value) for place, value in enumerate(values) if type(value) is torch.Tensor]
        self._leaves = [(place, value.is_leaf) for place, value in tensors if value.requires_grad]
        if not set(stable).isdisjoint(position for position, _ in self._places):
            raise LookupError("a part of the model is an argument")
        self._written = written
        self._num_args, self._names = len(args), tuple(kwargs)
        self._guards, self._variables = repetition.guards, repetition.variables
        self._args_name, self._kwargs_name = repetition.names
        self._facts = facts_type()([*repetition.facts, *facts])
        self._answers = facts_type()(repetition.answers)

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor] | None:
        """The inputs of the graph for a call; None if the long way has to tell."""
        if len(args) != self._num_args or tuple(kwargs) != self._names:
            return None
        variables = self._variables.copy()
        variables[self._args_name], variables[self._kwargs_name] = args, kwargs
        if not (self._facts.hold() and self._guards(variables)):
            return None
        values = (*args, *kwargs.values()) if kwargs else args
        for place, value in self._constants:
            if values[place] is not value:
                return None
        for place, is_leaf in self._leaves:
            if values[place].is_leaf is not is_leaf:
                return None
        inputs: list[Any] = self._inputs.copy()
        for position, place in self._places:
            inputs[position] = values[place]
            if self._written and values[place].untyped_storage().data_ptr() in self._written:
                return None
        return inputs if self._answers.hold() else None


class UpdateShortcut:
    """Writes the numbers and step counts of an update where its graph reads them.

    Args:
        binding: of the update, which must be found to be good afterwards.
        facts: what must hold for the update to be the same, beside what the binding names.

    Raises:
        LookupError: an option of the optimizer may change in place.
    """

    def __init__(self, binding: Binding, facts: Iterable[Fact] = ()) -> None:
        found = binding.facts()
        if found is None:
            raise LookupError("an option of the optimizer may change in place")
        self._binding = binding
        self._facts = facts_type()([*found, *facts])
        self._numbers = self._number_facts()

    def follow(self) -> bool:
        """Whether all is as it was, but for numbers and counts, which are written."""
        if not self._facts.hold():
            return False
        if self._numbers is None or not self._numbers.hold():
            present = self._number_facts()  # before they are written: what changes meanwhile is written next time
            if not self._binding.follow_numbers():
                return False
            self._numbers = present
        return self._binding.follow_counts()

    def _number_facts(self) -> Facts | None:
        facts = self._binding.number_facts()
        return None if facts is None else facts_type()(facts)


class Shortcut:
    """Finds the inputs of a replay of a whole step, update included, as `CallShortcut` does for calls.

    Args:
        repetition: of the present call.
        spec, program: the step, which has an update.
        recording: what it is recorded as.
        args, kwargs: of the present call.

    Raises:
        LookupError: the long way would have to look closer than the facts do.
    """

    def __init__(
        self,
        repetition: Repetition,
        spec: StepSpec,
        program: StepProgram,
        recording: ByAddress,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        assert program.binding is not None
        facts = _step_facts(len(repetition.sources), spec, program, recording)
        self._call = CallShortcut(repetition, facts, args, kwargs, program.stable, recording.written, program.state)
        self._update = UpdateShortcut(program.binding)

    @classmethod
    def of(
        cls,
        guarded: GuardedFunction,
        spec: StepSpec,
        program: StepProgram,
        recording: ByAddress,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Shortcut | None:
        """One for a step of which the latest call had these arguments; None if it must go the long way."""
        repetition = guarded.repetition(args, kwargs)
        if repetition is None:
            return None
        try:
            return cls(repetition, spec, program, recording, args, kwargs)
        except LookupError:
            return None

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor] | None:
        """The inputs of the replay that answers a call, with all numbers written; None if the long way has to tell."""
        inputs = self._call.inputs(args, kwargs)
        return inputs if inputs is not None and self._update.follow() else None


def _argument_places(sources: Sequence[object]) -> list[tuple[int, int]]:
    """For the inputs of the graph that are arguments: position among the inputs, place among the arguments."""
    return [(position, source.place) for position, source in enumerate(sources) if isinstance(source, Argument)]


def call_facts(module: torch.nn.Module, device: torch.device) -> list[Fact]:
    """What must stay around the calls of a module, for the next to run as the present one does."""
    hooks = wrapper_hook_facts(wrappers_of(module))
    return [attribute(module, "training"), *ambient_facts(device), *surrounding_facts(), *hooks]


def _step_facts(num_sources: int, spec: StepSpec, program: StepProgram, recording: ByAddress) -> list[Fact]:
    """All that must stay as it is, but for arguments, the update, and what Dynamo guards."""
    trained, scaler = spec.params(), spec.scaler
    num_checked = num_sources + (len(program.state) if scaler is not None else 0)
    facts: list[Fact] = [
        *call_facts(spec.module, trained[0].device),
        *parameter_hook_facts(trained),
        *hook_facts(spec.optimizer),
        *recording.facts(num_checked),
    ]
    if not spec.keep_grads:
        facts += [attribute(param, "grad") for param in spec.owned()]
    if scaler is not None:
        facts += [result(scaling, scaler), attribute(scaler, "_scale"), attribute(scaler, "_growth_tracker")]
    return facts
