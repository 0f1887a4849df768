"""A shorter way to replay a step that goes on as it did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kitsune.capture.ambient import ambient_facts
from kitsune.capture.frontend import GuardedFunction, Repetition
from kitsune.capture.reads import Argument
from kitsune.capture.state import Binding, hook_facts
from kitsune.capture.step_program import StepProgram, StepSpec, scaling
from kitsune.capture.watch import parameter_hook_facts, surrounding_facts
from kitsune.loop.by_address import ByAddress
from kitsune.native.build import facts_type
from kitsune.native.facts import Fact, Facts, attribute, result

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class Shortcut:
    """Finds the inputs of a replay without running any of the user's Python code.

    Dynamo's code would do nothing but pass them to the graph, as long as all that Dynamo guards holds and all that the
    code reads is the same. That, and whatever else must be as it was when the step was replayed in the long way, is a
    list of facts, checked as one. They are made of the present state, which must be found to be good afterwards.

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
        self._binding: Binding = program.binding
        self._inputs = [*repetition.sources, *program.state]
        self._places = _argument_places(repetition.sources)
        values = (*args, *kwargs.values())
        self._constants = [(place, value) for place, value in enumerate(values) if type(value) is not torch.Tensor]
        if not all(isinstance(value, _CONSTANTS) for _, value in self._constants):
            raise LookupError("an argument may change in place")
        if not program.stable.isdisjoint(position for position, _ in self._places):
            raise LookupError("a part of the model is an argument")
        self._num_args, self._names = len(args), tuple(kwargs)
        self._guards, self._variables = repetition.guards, repetition.variables
        self._args_name, self._kwargs_name = repetition.names
        self._facts = _facts(repetition, spec, program, recording)
        self._numbers = self._number_facts()

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
        if self._numbers is None or not self._numbers.hold():
            present = self._number_facts()  # before they are written: what changes meanwhile is written next time
            if not self._binding.follow_numbers():
                return None
            self._numbers = present
        if not self._binding.follow_counts():
            return None
        inputs: list[Any] = self._inputs.copy()
        for position, place in self._places:
            inputs[position] = values[place]
        return inputs

    def _number_facts(self) -> Facts | None:
        facts = self._binding.number_facts()
        return None if facts is None else facts_type()(facts)


def _argument_places(sources: Sequence[object]) -> list[tuple[int, int]]:
    """For the inputs of the graph that are arguments: position among the inputs, place among the arguments."""
    return [(position, source.place) for position, source in enumerate(sources) if isinstance(source, Argument)]


def _facts(repetition: Repetition, spec: StepSpec, program: StepProgram, recording: ByAddress) -> Facts:
    """All that must stay as it is, but for arguments, numbers, step counts, and what Dynamo guards."""
    assert program.binding is not None
    update = program.binding.facts()
    if update is None:
        raise LookupError("an option of the optimizer may change in place")
    trained, scaler = spec.params(), spec.scaler
    num_checked = len(repetition.sources) + (len(program.state) if scaler is not None else 0)
    facts: list[Fact] = [
        attribute(spec.module, "training"),
        *ambient_facts(trained[0].device),
        *surrounding_facts(),
        *parameter_hook_facts(trained),
        *hook_facts(spec.optimizer),
        *repetition.facts,
        *recording.facts(num_checked),
        *update,
    ]
    if not spec.keep_grads:
        facts += [attribute(param, "grad") for param in spec.owned()]
    if scaler is not None:
        facts += [result(scaling, scaler), attribute(scaler, "_scale"), attribute(scaler, "_growth_tracker")]
    return facts_type()(facts)
