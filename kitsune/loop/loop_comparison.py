"""Compares what a loop replays, module calls and updates, with plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from kitsune.capture.ambient import regions_left
from kitsune.capture.trace import same_layout
from kitsune.execution.in_order import with_copies
from kitsune.loop.alive import Alive
from kitsune.loop.guarded_step import Call
from kitsune.loop.places import Places
from kitsune.loop.rounding import change
from kitsune.loop.split_step import SplitStep
from kitsune.loop.update_step import UpdateStep
from kitsune.loop.verifying import Results, State, compare, distance, put_off, spread, tensors_of
from kitsune.verification import Difference

_EPS = torch.finfo(torch.float32).eps


class CallComparison:
    """One comparison of a module's call, with its gradients for random gradients of its outputs.

    The module is called once, and nobody but the user goes back from its outputs. All else runs the graph that Dynamo
    has recorded of it, on copies, and takes the gradients of that for plain PyTorch's.

    Attributes:
        output: of the call.
    """

    def __init__(self, step: SplitStep, eager: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.output: Any = None
        self._step, self._eager, self._args, self._kwargs = step, eager, args, kwargs
        tensors = tensors_of([step.module])
        self._device = next(iter(tensors.values())).device
        self._state = State(tensors, self._device)
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._inputs: dict[str, Tensor] = {}  # of the graph
        self._graph: Callable[..., Sequence[Tensor]] | None = None
        self._exact: Results = {}

    def differences(self) -> list[Difference] | None:
        """See `compare`; None where the call cannot be replayed."""
        return compare(self._state, self._replay, self._plain, self._step.rounding, lambda: spread(self._run_graph))

    def _replay(self) -> Results | None:
        replayed = self._step.replay_apart(self._args, self._kwargs)
        if replayed is None:
            return None
        self._graph = replayed.graph
        names = [self._names.get(id(tensor), f"input {place}") for place, tensor in enumerate(replayed.flat)]
        self._inputs = dict(zip(names, replayed.inputs, strict=True))
        return self._results(self._inputs, replayed.outputs)

    def _run_graph(self, seed: int | None) -> Results:
        """See `spread`."""
        assert self._graph is not None
        values = [tensor.detach() for tensor in self._inputs.values()]
        copies = with_copies(values, range(len(values)))
        if seed is not None:
            put_off(copies, self._step.rounding(), seed)
        before = [tensor.clone() for tensor in copies]
        given = {
            name: one.detach().requires_grad_(tensor.requires_grad)
            for (name, tensor), one in zip(self._inputs.items(), copies, strict=True)
        }
        with regions_left(), torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            results = self._results(given, self._graph(*given.values()))
        if seed is None:
            self._exact = results
        return {**results, **dict(zip(given, map(change, before, copies), strict=True))}

    def _plain(self) -> Results:
        first = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self.output = self._eager(self._args, self._kwargs)
        return {**self._exact, **_matched(self._exact, _made_since(first, self.output))}

    def _results(self, inputs: Mapping[str, Tensor], outputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """The outputs of a run, and gradients of what it started from."""
        roots = [output for output in outputs if output.requires_grad]
        tangents = [_tangent(root, index) for index, root in enumerate(roots)]
        wanted = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
        autocast = self._step.autocast
        with torch.autocast(self._device.type, dtype=autocast, enabled=autocast is not None):
            grads = torch.autograd.grad(roots, list(wanted.values()), tangents, allow_unused=True)
        named: Iterable[tuple[str, Tensor | None]] = zip(wanted, grads, strict=True)
        given = {f"output {index}": output.detach() for index, output in enumerate(outputs)}
        return {**given, **{f"{name}.grad": grad.to_dense() for name, grad in named if grad is not None}}


def _made_since(first: int, output: Any) -> list[Tensor]:
    """The tensors of `output` that autograd goes back from to operators later than the `first`."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if (node := leaf.grad_fn) is not None and node._sequence_nr() >= first]


def _matched(exact: Mapping[str, Tensor], leaves: Sequence[Tensor]) -> dict[str, Tensor]:
    """`leaves`, which a module has returned, by the names of what they are nearest to of what its graph does."""
    found: dict[str, Tensor] = {}
    for index, leaf in enumerate(leaves):
        apart = {name: distance(value, leaf) for name, value in exact.items() if name.startswith("output ")}
        name = min(apart, key=apart.__getitem__, default="")
        is_there = bool(apart) and exact[name].shape == leaf.shape
        found[name if is_there else f"output {index} of the module"] = leaf
    return found


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
    places = Places(alive.modules, alive.owners, leaves.values())
    state = State(alive.tensors, device)
    versions = {name: tensor._version for name, tensor in alive.others.items()}

    def results(returned: Any) -> Results:
        given = [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, Tensor)]
        of_grads = {f"{name}.grad": tensor.grad for name, tensor in leaves.items()}
        present = {name: grad.to_dense() for name, grad in of_grads.items() if grad is not None}
        return {**{f"result {index}": one for index, one in enumerate(given)}, **present}

    def run(call: Callable[[], Any]) -> Results:
        places.restore(copies=True)
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
        places.restore(copies=False)
    return found, [name for name, tensor in alive.others.items() if tensor._version != versions[name]]
