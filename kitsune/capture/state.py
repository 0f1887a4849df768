"""The optimizer's side of a captured step: which of its tensors and numbers the graph uses, and
whether they still are what they were.

A `Binding` is made once for a captured graph. Before each replay `refresh` checks that parameters,
state tensors and code-selecting options are the ones that were captured, and writes the numbers
that changed (learning rate, step count) into the graph's inputs; after it `advance` does what
`optimizer.step()` does on the host.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.optim import optimizer as torch_optimizer

from kitsune.capture.mirrors import Mirrors
from kitsune.capture.shown_values import shown
from kitsune.capture.trace import same_layout
from kitsune.capture.update_rules import Rule, rule_for
from kitsune.errors import Refusal, RefusedError
from kitsune.native.facts import Fact, attribute, contents, item, members, result

Style = Literal["fused", "composed"]

_COMPOSED_DTYPES = (torch.float32, torch.float64)
_CHANGED = "changed since the capture"


@dataclass(frozen=True)
class Difference:
    """Something that is no longer as it was captured.

    Attributes:
        what: its name.
        how: the rest of the sentence that begins with `what`.
        is_constant: the fused update holds it as a constant, so that the composed one should be captured instead.
        is_option: the optimizer does something else now, and what was captured may be of use again.
    """

    what: str
    how: str = _CHANGED
    is_constant: bool = False
    is_option: bool = False

    def refusal(self) -> Refusal:
        """Why what was captured is of no use at present."""
        return Refusal(f"{self.what} {self.how}")


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Tells `torch.optim.lr_scheduler`, which warns of a missing `step()`, that there was one."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def refuse_hooks(optimizer: torch.optim.Optimizer) -> Refusal | None:
    """None if `optimizer.step()` is that of its class, as written there, and runs no hooks of the user's.

    The hook dictionaries have no public reader, and `lr_scheduler` patches `step` to count calls.
    """
    usual = type(optimizer).step
    step = vars(optimizer).get("step", usual)
    writers = {_package(type(optimizer).__module__), "torch"}
    is_known = all(_writer(layer) in writers for layer in (*_layers(step), *_layers(usual)))
    if inspect.unwrap(step) is not inspect.unwrap(usual) or not is_known:
        return Refusal("optimizer.step was replaced")
    own = vars(optimizer)  # without hooks where a class leaves out `super().__init__()`
    hooks = (
        own.get("_optimizer_step_pre_hooks"),
        own.get("_optimizer_step_post_hooks"),
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    if any(hooks):
        return Refusal("the optimizer has step hooks, which a replay would not run")
    return None


def refuse_closure(optimizer: torch.optim.Optimizer) -> Refusal | None:
    """None if `optimizer.step(closure)` calls the closure once, and then does what `step()` does."""
    rule = rule_for(optimizer)
    return rule if isinstance(rule, Refusal) else refuse_hooks(optimizer)


def hook_facts(optimizer: torch.optim.Optimizer) -> list[Fact]:
    """What must stay for `refuse_hooks` to answer as it does."""
    own, kind = attribute(optimizer, "__dict__"), attribute(optimizer, "__class__")
    steps = [result(own.expected.get, "step"), attribute(kind.expected, "step")]
    hooks = [
        attribute(optimizer, "_optimizer_step_pre_hooks"),
        attribute(optimizer, "_optimizer_step_post_hooks"),
        attribute(torch_optimizer, "_global_optimizer_pre_hooks"),
        attribute(torch_optimizer, "_global_optimizer_post_hooks"),
    ]
    wrappers = [wrapper for step in steps for wrapper in _wrapper_facts(step.expected)]
    return [own, kind, *steps, *wrappers, *hooks, *(contents(fact.expected) for fact in hooks)]


def _layers(function: Any) -> list[Any]:
    """`function`, and what it wraps, down to what wraps nothing."""
    layers = [function]
    while hasattr(layers[-1], "__wrapped__"):
        layers.append(layers[-1].__wrapped__)
    return layers


def _writer(function: Any) -> str:
    """The package that `function` was written in, whatever it says of itself by `functools.wraps`."""
    return _package(getattr(function, "__globals__", {}).get("__name__", ""))


def _package(module: str) -> str:
    return module.partition(".")[0]


def _wrapper_facts(function: Any) -> list[Fact]:
    """That `inspect.unwrap` finds what it finds."""
    return [attribute(layer, "__wrapped__") for layer in _layers(function)[:-1]]


@dataclass
class _Slot:
    """Parameters of one group, by its index, that are updated together.

    `foreach` is whether torch updates those of the group at once, where the group leaves that to it.
    """

    group: int
    params: list[torch.nn.Parameter]
    state: dict[str, list[torch.Tensor]]
    steps: list[torch.Tensor]
    scalars: dict[str, torch.Tensor]
    foreach: bool
    written: dict[str, float] = field(default_factory=dict)


class Binding:
    """The tensors of `optimizer` that an update of `params` reads and writes.

    Args:
        optimizer: a plain `torch.optim` optimizer whose state is initialised for `params`.
        params: the parameters that have a gradient in the captured step.
        composed: use the composed form of the update even where the fused one would do.
        found_inf: a float32 scalar on the device; the update changes nothing where it is 1.

    Raises:
        RefusedError: the update cannot be captured.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Sequence[torch.nn.Parameter],
        *,
        composed: bool = False,
        found_inf: torch.Tensor | None = None,
    ) -> None:
        rule = rule_for(optimizer)
        if isinstance(rule, Refusal):
            raise RefusedError(rule)
        repeated = _refuse_repeated(optimizer)
        if repeated is not None:
            raise RefusedError(repeated)
        self._rule: Rule = rule
        self._optimizer = optimizer
        self._found_inf = found_inf
        self.params = tuple(params)
        self._is_composable = all(param.dtype in _COMPOSED_DTYPES for param in self.params)
        self.style: Style = self._choose_style(composed)
        self._mirrors = Mirrors(rule)
        self._group_ids = _group_ids(optimizer)
        self._selection = self._select()
        self._options = [_options(group) for group in self._groups()]
        self._slots = self._make_slots()
        self._watched = self._watch()
        self._latest_state: list[tuple[Any, ...]] | None = None
        self._state_tensors = [tensor for _, tensors in self._watched for _, tensor in tensors]
        for tensor in self._state_tensors:
            if tensor.layout is not torch.strided:
                raise RefusedError(Refusal(f"state of the optimizer of shape {tuple(tensor.shape)} is sparse"))
        self._addresses = [tensor.data_ptr() for tensor in self._state_tensors]
        unseen = {id(param) for group in self._groups() if group.get("fused") for param in group["params"]}
        versioned = [param for param in self.params if id(param) not in unseen]  # torch's fused updates count none
        self._counted = (*versioned, *self._mirrors.originals)  # tensors whose versions an update counts
        self._take_numbers()

    @staticmethod
    def is_initialised(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> bool:
        """Whether `optimizer` has made the state that updating `param` needs; it does so in the first `step()`."""
        rule = rule_for(optimizer)
        if isinstance(rule, Refusal):
            raise RefusedError(rule)
        group = next(group for group in optimizer.param_groups if any(param is other for other in group["params"]))
        names = (*rule.state_names(group), *rule.scalar_names(), *(("step",) if rule.has_step else ()))
        state = optimizer.state.get(param, {})
        return all(isinstance(state.get(name), torch.Tensor) for name in names)

    def inputs(self) -> list[torch.Tensor]:
        """The tensors that `update` needs beside parameters and gradients, in a fixed order, each once."""
        tensors = [] if self._found_inf is None else [self._found_inf]
        for slot in self._slots:
            tensors += [tensor for values in slot.state.values() for tensor in values]
            tensors += [*slot.steps, *slot.scalars.values()]
        return _distinct(tensors)

    def update(
        self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> None:
        """The update itself, on stand-ins for `self.params`, their gradients and `self.inputs()`."""
        stand_in = {
            id(real): fake for real, fake in zip((*self.params, *self.inputs()), (*params, *inputs), strict=True)
        }
        gradient = {id(real): grad for real, grad in zip(self.params, grads, strict=True)}
        found_inf = None if self._found_inf is None else stand_in[id(self._found_inf)]
        steps = list({id(step): stand_in[id(step)] for slot in self._slots for step in slot.steps}.values())
        if steps:
            if found_inf is None:
                torch._foreach_add_(steps, 1)
            else:  # torch._foreach_add_ would take the tensor for a number, and read it on the host
                torch.ops.aten._foreach_add_.Tensor(steps, 1 - found_inf)
        for slot in self._slots:
            self._update_slot(slot, stand_in, gradient, found_inf)

    def refresh(self) -> Difference | None:
        """Makes the graph's inputs those of the coming step; None, or what has changed since the capture."""
        if _group_ids(self._optimizer) != self._group_ids:
            return Difference("what the optimizer's param_groups hold")
        if self._select() != self._selection:
            return self._changed_option()
        if not self._has_same_state():
            return self._changed_state()
        if [tensor.data_ptr() for tensor in self._state_tensors] != self._addresses:
            return self._changed_state()
        if not self.follow_counts():
            return Difference("the optimizer's step counts")
        self._take_numbers()
        return None

    def suits(self) -> bool:
        """Whether `refresh` would not answer with an option."""
        return self._select() == self._selection or self._may_be_composed()

    def misfit(self) -> Difference | None:
        """The option that `refresh` would answer with; None if there is none."""
        return None if self.suits() else self._changed_option()

    def facts(self) -> list[Fact] | None:
        """What must stay for `refresh` to have nothing to do but to follow step counts and numbers.

        None if it would have to look closer: at options that may change in place.
        """
        groups, states = self._groups(), self._optimizer.state
        options = [item(group, name) for group in groups for name in group if name != "params"]
        fixed = [option for option in options if not self._is_live(option)]
        if not all(_is_constant(option.expected) for option in fixed):
            return None
        return [
            attribute(self._optimizer, "param_groups"),
            members(groups),
            *(item(group, "params") for group in groups),
            *(members(group["params"]) for group in groups),
            *fixed,
            attribute(self._optimizer, "state"),
            contents(states),
            *(contents(state) for state in states.values()),
            *(result(tensor.data_ptr) for tensor in self._state_tensors),
        ]

    def number_facts(self) -> list[Fact] | None:
        """What must stay, beside `facts`, for the numbers of the latest step; None if they may change in place."""
        options = [item(group, name) for group in self._groups() for name in group if name != "params"]
        live = [option for option in options if self._is_live(option)]
        return live if all(_is_constant(option.expected) for option in live) else None

    def follow_numbers(self) -> bool:
        """Makes the numbers those of the coming step; False if they select other code than was captured."""
        if self._select() != self._selection:
            return False
        self._take_numbers()
        return True

    def follow_counts(self) -> bool:
        """Makes the step counts those of the coming step; False if they no longer agree."""
        return self._mirrors.refresh()

    def advance(self, skipped: bool = False) -> None:
        """What `optimizer.step()` does on the host: counts, and tells schedulers and autograd that it ran."""
        note_step(self._optimizer)
        if skipped:
            return
        self._mirrors.advance(self._groups())
        if self._counted:
            torch.autograd.graph.increment_version(self._counted)

    def writes_gradients(self) -> bool:
        """Whether `optimizer.step()` leaves something else in gradients than it finds there."""
        return bool(self._writing)

    def write_gradients(self) -> None:
        """Leaves in `.grad` of `params` what `optimizer.step()` does, after the update."""
        for slot in self._writing:
            grads = [param.grad for param in slot.params if param.grad is not None]
            with torch.no_grad():
                self._rule.write_gradients(grads, slot.state, self._groups()[slot.group], self._found_inf)

    def needs_skip(self) -> bool:
        """Whether `advance` has to know if the update was skipped: reading that waits for the device."""
        return bool(self._mirrors.originals)

    def _choose_style(self, composed: bool) -> Style:
        if not composed and self._refuse_fused() is None and self._is_uniform():
            return "fused"
        if self._is_composable:
            return "composed"
        dtypes = ", ".join(sorted({str(param.dtype) for param in self.params}))
        raise RefusedError(Refusal(f"there is no captured update for parameters of {dtypes}"))

    def _may_be_composed(self) -> bool:
        """Whether numbers that are constants here would be inputs of another update."""
        return self.style == "fused" and self._is_composable

    def _refuse_fused(self) -> Refusal | None:
        taken = set(map(id, self.params))
        refusals = (
            self._rule.refuse_fused(param.dtype, param.device, group)
            for group in self._optimizer.param_groups
            for param in group["params"]
            if id(param) in taken
        )
        return next((refusal for refusal in refusals if refusal is not None), None)

    def _is_uniform(self) -> bool:
        """Whether parameters are dense and their state is laid out like them, as the fused updates take for granted."""
        for group in self._optimizer.param_groups:
            names = self._rule.state_names(group)
            for param in group["params"]:
                if not same_layout(torch.empty_like(param, device="meta"), param):
                    return False
                state = self._optimizer.state.get(param, {})
                tensors = [state[name] for name in names if isinstance(state.get(name), torch.Tensor)]
                if not all(same_layout(tensor, param) for tensor in tensors):
                    return False
        return True

    def _is_live(self, option: Fact) -> bool:
        """Whether an option in a group is written into the graph's inputs, rather than a part of the graph."""
        if self.style == "fused":
            return bool(option.key == "lr")
        parts = option.expected if isinstance(option.expected, tuple) else (option.expected,)
        return all(isinstance(part, (int, float, torch.Tensor)) and not isinstance(part, bool) for part in parts)

    def _groups(self) -> list[dict[str, Any]]:
        """The groups as they are now: `load_state_dict` replaces their dictionaries."""
        return self._optimizer.param_groups

    def _make_slots(self) -> list[_Slot]:
        wanted = {id(param) for param in self.params}
        slots = []
        for index, group in enumerate(self._groups()):
            params = [param for param in group["params"] if id(param) in wanted]
            if not params:
                continue
            state = {name: [self._moment(param, name) for param in params] for name in self._rule.state_names(group)}
            steps = [self._step(param) for param in params] if self._rule.has_step else []
            for name in self._rule.scalar_names():
                state[name] = [self._scalar(param, index, name) for param in params]
            scalars = self._make_scalars(group, params[0].device)
            _, foreach = torch_optimizer._default_to_fused_or_foreach(list(params), differentiable=False)
            slots += self._split(_Slot(index, params, state, steps, scalars, foreach))
        return slots

    def _watch(self) -> list[tuple[torch.nn.Parameter, list[tuple[str, torch.Tensor]]]]:
        """The state of each parameter, by name."""
        watched = []
        for slot in self._slots:
            names = (*slot.state, "step") if slot.steps else tuple(slot.state)
            watched += [(param, [(name, self._state(param, name)) for name in names]) for param in slot.params]
        return watched

    def _has_same_state(self) -> bool:
        """Whether the state of all parameters consists of the tensors that were captured."""
        states = self._optimizer.state
        present = [(id(param), *state, *map(id, state.values())) for param, state in states.items()]
        if present == self._latest_state:
            return True
        for param, tensors in self._watched:
            state = states.get(param, {})
            if not all(state.get(name) is tensor for name, tensor in tensors):
                return False
        self._latest_state = present
        return True

    def _changed_state(self) -> Difference:
        """The first tensor of the state that is not the one that was captured, or has moved."""
        states, addresses = self._optimizer.state, iter(self._addresses)
        for param, tensors in self._watched:
            state = states.get(param, {})
            for name, tensor in tensors:
                shape, address = tuple(param.shape), next(addresses)
                what = f"{name!r} in the optimizer's state of a parameter of shape {shape}"
                if state.get(name) is not tensor:
                    return Difference(what, "was replaced" if name in state else "is missing")
                if tensor.data_ptr() != address:
                    return Difference(what, "has other memory than when it was captured (as by assigning its .data)")
        return Difference("the optimizer's state")

    def _changed_option(self) -> Difference:
        """The first option that makes the update another one."""
        is_constant = self._may_be_composed()
        for index, (group, captured) in enumerate(zip(self._groups(), self._options, strict=False)):
            for name in captured:
                if self._selected({**captured, name: group.get(name)}) != self._selection[index]:
                    what = f"the optimizer's param_groups[{index}][{name!r}]"
                    return Difference(
                        what, f"was {shown(captured[name])}, is {shown(group.get(name))}", is_constant, not is_constant
                    )
        return Difference("an option of the optimizer", _CHANGED, is_constant, not is_constant)

    def _split(self, slot: _Slot) -> list[_Slot]:
        """Fused updates want one dtype a launch; composed ones also one step count, if they read it, and scalars."""
        shared = [slot.state[name] for name in self._rule.scalar_names()]
        if slot.steps and self.style == "composed" and self._rule.reads_step:
            shared.append(slot.steps)
        keys = [(param.dtype, *(id(tensors[index]) for tensors in shared)) for index, param in enumerate(slot.params)]
        parts = []
        for key in dict.fromkeys(keys):
            chosen = [index for index, other in enumerate(keys) if other == key]
            state = {name: [tensors[index] for index in chosen] for name, tensors in slot.state.items()}
            steps = [slot.steps[index] for index in chosen] if slot.steps else []
            params = [slot.params[index] for index in chosen]
            parts.append(_Slot(slot.group, params, state, steps, slot.scalars, slot.foreach, slot.written))
        return parts

    def _state(self, param: torch.nn.Parameter, name: str) -> torch.Tensor:
        value = self._optimizer.state.get(param, {}).get(name)
        if not isinstance(value, torch.Tensor):
            shape = tuple(param.shape)
            refusal = Refusal(f"the optimizer has no state {name!r} yet for a parameter of shape {shape}")
            raise RefusedError(refusal, passing=True)
        return value

    def _moment(self, param: torch.nn.Parameter, name: str) -> torch.Tensor:
        """State of the parameter's shape, of its dtype: with another one some of torch's updates raise."""
        value = self._state(param, name)
        if value.dtype != param.dtype:
            reason = f"the optimizer's state {name!r} is of {value.dtype}, and a parameter of {param.dtype}"
            raise RefusedError(Refusal(reason), passing=True)
        return value

    def _step(self, param: torch.nn.Parameter) -> torch.Tensor:
        return self._mirrors.step(self._state(param, "step"), param.device)

    def _scalar(self, param: torch.nn.Parameter, group: int, name: str) -> torch.Tensor:
        return self._mirrors.scalar(name, self._state(param, name), self._state(param, "step"), group, param.device)

    def _make_scalars(self, group: dict[str, Any], device: torch.device) -> dict[str, torch.Tensor]:
        # The fused operators read a float32 learning rate on the device, and any dtype on the CPU.
        single = self.style == "fused" and device.type != "cpu"
        dtype = torch.float32 if single else torch.float64
        return {name: torch.zeros((), dtype=dtype, device=device) for name in self._numbers(group)}

    def _numbers(self, group: dict[str, Any]) -> dict[str, Any]:
        live = {"lr": group["lr"]}
        return live if self.style == "fused" else {**live, **self._rule.hyperparameters(group)}

    def _select(self) -> list[tuple[Any, ...]]:
        return list(map(self._selected, self._groups()))

    def _selected(self, group: dict[str, Any]) -> tuple[Any, ...]:
        """What of a group's options is a part of the graph."""
        is_fused = self.style == "fused"
        return self._rule.flags(group), tuple(self._rule.hyperparameters(group).values()) if is_fused else ()

    def _take_numbers(self) -> None:
        """Writes those of the coming step where the graph reads them. They tell whose gradients it leaves otherwise."""
        groups = self._groups()
        self._writing = [one for one in self._slots if self._rule.writes_gradients(groups[one.group], one.foreach)]
        for slot in self._slots:
            for name, value in self._numbers(groups[slot.group]).items():
                if isinstance(value, torch.Tensor):
                    slot.scalars[name].copy_(value.reshape(()))
                    slot.written.pop(name, None)
                elif slot.written.get(name) != value:
                    slot.scalars[name].fill_(value)
                    slot.written[name] = value

    def _update_slot(
        self,
        slot: _Slot,
        stand_in: dict[int, torch.Tensor],
        gradient: dict[int, torch.Tensor],
        found_inf: torch.Tensor | None,
    ) -> None:
        def stand_ins(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [stand_in[id(tensor)] for tensor in tensors]

        params, state = stand_ins(slot.params), {name: stand_ins(tensors) for name, tensors in slot.state.items()}
        grads, steps = [gradient[id(param)] for param in slot.params], stand_ins(slot.steps)
        scalars = {name: stand_in[id(scalar)] for name, scalar in slot.scalars.items()}
        options = self._groups()[slot.group]
        if self.style == "fused":
            self._rule.fused(params, grads, state, steps, scalars["lr"], options, found_inf)
            return
        step, changing = steps[0] if steps else None, _distinct([*params, *itertools.chain(*state.values())])
        before = [] if found_inf is None else [tensor.clone() for tensor in changing]
        self._rule.composed(params, grads, state, step, scalars, options)
        if found_inf is not None:
            for tensor, value in zip(changing, before, strict=True):
                tensor.copy_(torch.where(found_inf == 1, value, tensor))


def _distinct(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _refuse_repeated(optimizer: torch.optim.Optimizer) -> Refusal | None:
    """None if every parameter is there once: torch warns of others, and updates them as often as they are there."""
    ids = list(itertools.chain.from_iterable(_group_ids(optimizer)))
    if len(set(ids)) == len(ids):
        return None
    return Refusal(
        "the optimizer has a parameter more than once, which torch updates as often",
        remedy="give it each parameter once",
    )


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _group_ids(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in optimizer.param_groups]


def _is_constant(value: object) -> bool:
    """Whether `value` stays equal as long as it is the same object."""
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return value is None or type(value) in (bool, int, float, str)
