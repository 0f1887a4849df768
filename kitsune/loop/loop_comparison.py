"""Compares what a loop replays, module calls and updates, with plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from kitsune.capture.ambient import regions_left
from kitsune.capture.trace import same_layout
from kitsune.engine.rounding import change
from kitsune.execution.in_order import with_copies
from kitsune.loop.alive import Alive
from kitsune.loop.guarded_step import Call
from kitsune.loop.split_step import SplitStep, leaves_of, roots_of
from kitsune.loop.update_step import UpdateStep
from kitsune.loop.verifying import Results, State, compare, is_comparable, put_off, spread, tensors_of
from kitsune.verification import Difference

_EPS = torch.finfo(torch.float32).eps


class CallComparison:
    """One comparison of a module's call, with its gradients for random gradients of its outputs.

    The measure is the module itself, called as plain PyTorch and differentiated by autograd: nothing of it comes from
    the capture. That call and all others but the last are undone, with what they do to Python objects; the last one is
    the user's. Hooks of parameters and arguments, which belong to the user's backward pass, run in that alone.

    Both go back from the outputs that the loop goes back from: the gradients of others are missing, which is no zero to
    a function with a backward pass of its own.

    Attributes:
        output: of the last call.
    """

    def __init__(self, step: SplitStep, eager: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.output: Any = None
        self._step, self._eager, self._args, self._kwargs = step, eager, args, kwargs
        tensors = tensors_of([step.module])
        self._device = next(iter(tensors.values())).device
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = set(map(id, tensors.values()))
        inputs = {f"argument {place}": leaf for place, leaf in enumerate(given) if id(leaf) not in known}
        written = {name: tensor for name, tensor in inputs.items() if is_comparable(tensor)}
        roots = (("the model", step.module), ("the arguments", (args, kwargs)))
        self._state = State({**written, **tensors}, self._device, roots)
        self._names = {id(tensor): name for name, tensor in (*inputs.items(), *tensors.items())}
        self._wanted: dict[str, Tensor] = {}  # of the graph's tensors, those that get a gradient

    def differences(self) -> list[Difference] | None:
        """See `compare`; None where the call cannot be replayed. Afterwards `output` is there, unless it is None."""
        with self._state.undone():
            found = compare(
                self._state, self._replay, self._plain, self._step.rounding, lambda: spread(self._run_graph)
            )
        torch.clear_autocast_cache()  # of casts whose backward pass has run
        if found is not None:
            self.output = self._eager(self._args, self._kwargs)
        return found

    def _replay(self) -> Results | None:
        replayed = self._step.replay_apart(self._args, self._kwargs)
        if replayed is None:
            return None
        names = [self._names.get(id(tensor), f"tensor {place}") for place, tensor in enumerate(replayed.flat)]
        self._wanted = {name: one for name, one in zip(names, replayed.flat, strict=True) if one.requires_grad}
        inputs = dict(zip(names, replayed.inputs, strict=True))
        return self._results({name: inputs[name] for name in self._wanted}, replayed.output)

    def _run_graph(self, seed: int | None) -> Results:
        """See `spread`."""
        copies: list[Tensor] = []
        before: list[Tensor] = []
        names: list[str] = []
        given: dict[str, Tensor] = {}

        def stand_in(flat: Sequence[Tensor]) -> list[Tensor]:
            """Copies of a graph's tensors, a little off; also kept by name, with what they were."""
            copies[:] = with_copies([tensor.detach() for tensor in flat], range(len(flat)))
            if seed is not None:
                put_off(copies, self._step.rounding(), seed)
            before[:] = [one.clone() for one in copies]
            names[:] = [self._names.get(id(tensor), f"tensor {place}") for place, tensor in enumerate(flat)]
            pairs = zip(copies, flat, strict=True)
            inputs = [one.detach().requires_grad_(tensor.requires_grad) for one, tensor in pairs]
            given.update({name: one for name, one in zip(names, inputs, strict=True) if name in self._wanted})
            return inputs

        with self._state.undone(), regions_left(), torch.compiler.set_stance("default"):
            results = self._results(given, self._step.run_on(self._args, self._kwargs, stand_in))
        return {**results, **dict(zip(names, map(change, before, copies), strict=True))}

    def _plain(self) -> Results:
        output = self._eager(self._args, self._kwargs)
        with _without_hooks(self._wanted.values()):
            return self._results(self._wanted, output)

    def _results(self, wanted: Mapping[str, Tensor], output: Any) -> dict[str, Tensor]:
        """The tensors in the output of a run, and gradients of what it started from."""
        leaves = [leaf for leaf in leaves_of(output) if isinstance(leaf, Tensor)]
        used = self._step.used_roots
        roots = [root for place, root in enumerate(roots_of(output)) if not used or place in used]
        tangents = [_tangent(root, index) for index, root in enumerate(roots)]
        autocast = self._step.autocast
        grads: Sequence[Tensor | None] = ()
        if roots and wanted:
            with torch.autocast(self._device.type, dtype=autocast, enabled=autocast is not None):
                grads = torch.autograd.grad(roots, list(wanted.values()), tangents, allow_unused=True)
        named: Iterable[tuple[str, Tensor | None]] = zip(wanted, grads, strict=False)
        given = {f"output {index}": leaf.detach().clone() for index, leaf in enumerate(leaves)}
        return {**given, **{f"{name}.grad": grad.to_dense() for name, grad in named if grad is not None}}


@contextmanager
def _without_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Within, hooks of these tensors do not run."""
    kept = [(hooks, dict(hooks)) for one in tensors if (hooks := one._backward_hooks)]
    try:
        for hooks, _ in kept:
            hooks.clear()
        yield
    finally:
        for hooks, content in kept:
            hooks.update(content)


def _tangent(root: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(root.device).manual_seed(seed)
    values = torch.randn(root.shape, generator=generator, device=root.device, dtype=torch.float32)
    return torch.empty_like(root, requires_grad=False).copy_(values)


def update_differences(
    update: UpdateStep, optimizer: torch.optim.Optimizer, modules: list[torch.nn.Module], device: torch.device
) -> list[Difference] | None:
    """See `compare`, of an update with the present gradients; None where it cannot be replayed."""
    tensors = tensors_of(modules, [optimizer])
    names = {id(tensor): name for name, tensor in tensors.items()}
    params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    # Some updates write to gradients. Those that are laid out in another way are not replayed.
    usual = [param for param in params if param.grad.layout is torch.strided and same_layout(param, param.grad)]
    all_tensors = {**tensors, **{f"{names[id(param)]}.grad": param.grad for param in usual}}

    def run_copy(seed: int | None) -> Results:
        copies: dict[int, Any] = {}
        twin = copy.deepcopy(optimizer, copies)
        for param in params:
            copies[id(param)].grad = copies[id(param.grad)] = param.grad.clone()
        copied = {name: copies[id(tensor)] for name, tensor in all_tensors.items() if id(tensor) in copies}
        state = State(copied, device)
        if seed is not None:
            state.offset(_EPS, seed)
        saved = state.save()
        twin.step()
        return state.changes_since(saved)

    def plain() -> Results:
        optimizer.step()
        return {}

    state = State(all_tensors, device)
    return compare(state, lambda: {} if update.replay() else None, plain, lambda: _EPS, lambda: spread(run_copy))


def iteration_differences(
    iteration: Callable[[], Any],
    paused: Callable[[], Any],
    alive: Alive,
    eps: Callable[[], float],
    device: torch.device,
) -> tuple[list[Difference], list[str]]:
    """Compares a whole iteration with the same one as plain PyTorch; afterwards what is `alive` is as it was.

    Args:
        iteration: one of the user's loop.
        paused: the same, replaying nothing.

    Returns:
        See `compare`; and the names of what else was written to, which is not as it was.
    """
    leaves = {name: tensor for name, tensor in alive.tensors.items() if tensor.is_leaf}
    gradients = [(tensor, tensor.grad) for tensor in leaves.values()]
    modules = ((f"module {index}" if index else "the model", one) for index, one in enumerate(alive.modules))
    owners = ((type(one).__name__, one) for one in alive.owners)
    roots = (*modules, *owners, ("the iteration", iteration))
    state = State(alive.tensors, device, roots, left_out=alive.others.values())
    versions = {name: tensor._version for name, tensor in alive.others.items()}

    def results(returned: Any) -> Results:
        given = [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, Tensor)]
        of_grads = {f"{name}.grad": tensor.grad for name, tensor in leaves.items()}
        present = {name: grad.to_dense() for name, grad in of_grads.items() if grad is not None}
        return {**{f"result {index}": one for index, one in enumerate(given)}, **present}

    def run(call: Callable[[], Any]) -> Results:
        for tensor, grad in gradients:
            tensor.grad = None if grad is None else grad.clone()  # these may be added to
        torch.clear_autocast_cache()  # of casts of what has been written to since
        return results(call())

    def run_apart(seed: int | None) -> Results:
        with state.undone() as saved:
            if seed is not None:
                state.offset(eps(), seed)
                saved = state.save()
            found = run(paused)
            return {**{name: value.detach().clone() for name, value in found.items()}, **state.changes_since(saved)}

    try:
        with state.undone():
            found = compare(state, lambda: run(iteration), lambda: run(paused), eps, lambda: spread(run_apart)) or []
    finally:
        for tensor, grad in gradients:
            tensor.grad = grad
    return found, [name for name, tensor in alive.others.items() if tensor._version != versions[name]]
