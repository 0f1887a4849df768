"""What a loop does beside training: reads, edits and changes of mind, each at its place in an iteration."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

from tests.kitsune.differential.peculiar import change_all
from tests.kitsune.training import Training


class Loop(Protocol):
    """What an action sees of the loop.

    Attributes:
        training: the model and its optimizer.
        test_batch: what the model is evaluated on.
        output, loss: of the present micro-batch.
        notes: what was read in this iteration, by name.
        kept: tensors that are held on to.
        updates: whether the optimizer's step is still to be made in this iteration.
    """

    training: Training
    test_batch: Tensor
    output: Tensor
    loss: Tensor
    notes: dict[str, Tensor]
    kept: list[Tensor]
    updates: bool


Action = Callable[[Loop], None]


def _params(loop: Loop) -> list[Tensor]:
    return [param for group in loop.training.optimizer.param_groups for param in group["params"]]


def _with_gradient(loop: Loop) -> list[Tensor]:
    return [param for param in _params(loop) if param.grad is not None]


# Before the iteration


def _evaluate(loop: Loop) -> None:
    model = loop.training.model
    model.eval()
    with torch.no_grad():
        loop.notes["evaluation"] = model(loop.test_batch).clone()
    model.train()


def _average(loop: Loop) -> None:
    memo = loop.training.memo
    if "average" not in memo:
        memo["average"] = swa_utils.AveragedModel(
            loop.training.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=False
        )
    memo["average"].update_parameters(loop.training.model)
    with torch.no_grad():
        loop.notes["average"] = memo["average"].eval()(loop.test_batch)


def _edit_parameters(loop: Loop) -> None:
    with torch.no_grad():
        for param in _params(loop):
            param.mul_(0.9)


def _edit_data(loop: Loop) -> None:
    for param in _params(loop):
        param.data.clamp_(-0.3, 0.3)


def _edit_buffers(loop: Loop) -> None:
    for buffer in loop.training.model.buffers():
        if buffer.is_floating_point():
            buffer.mul_(0.5)


def _reload_optimizer(loop: Loop) -> None:
    loop.training.optimizer.load_state_dict(copy.deepcopy(loop.training.optimizer.state_dict()))


def _reload_model(loop: Loop) -> None:
    loop.training.model.load_state_dict(copy.deepcopy(loop.training.model.state_dict()))


def _rewind(loop: Loop) -> None:
    """Takes the state of training the first time, and goes back to it at other times."""
    training = loop.training
    if "taken" not in training.memo:
        training.memo["taken"] = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))
        return
    model_state, optimizer_state = training.memo["taken"]
    training.model.load_state_dict(model_state)
    training.optimizer.load_state_dict(optimizer_state)


def _add_group(loop: Loop) -> None:
    owned = set(_params(loop))
    late = [param for param in loop.training.model.head.parameters() if param not in owned]
    if late:
        loop.training.optimizer.add_param_group({"params": late, "lr": 0.01})


def _unfreeze(loop: Loop) -> None:
    frozen = [param for param in loop.training.model.parameters() if not param.requires_grad]
    for param in frozen:
        param.requires_grad_(True)
    owned = set(_params(loop))
    late = [param for param in frozen if param not in owned]
    if late:
        loop.training.optimizer.add_param_group({"params": late})


def _freeze(loop: Loop) -> None:
    loop.training.model.first.requires_grad_(False)


def _set_in_groups(name: str, value: Callable[[Any], Any]) -> Action:
    def act(loop: Loop) -> None:
        for group in loop.training.optimizer.param_groups:
            if name in group:
                group[name] = value(group[name])

    return act


def _reseed(loop: Loop) -> None:
    torch.manual_seed(5)


def _copy(loop: Loop) -> None:
    loop.kept += [copy.deepcopy(param) for param in loop.training.model.parameters()]
    copied: nn.Module = copy.deepcopy(loop.training.model)
    with torch.no_grad():
        loop.notes["copied"] = copied(loop.test_batch)


def _forward_only(loop: Loop) -> None:
    loop.notes["unused output"] = loop.training.model(loop.test_batch).detach().clone()


def _evaluation_mode(loop: Loop) -> None:
    loop.training.model.train(not loop.training.model.training)


def _call_frozen(loop: Loop) -> None:
    """As loops do that train one of two models at a time."""
    frozen = [param for param in loop.training.model.parameters() if param.requires_grad]
    for param in frozen:
        param.requires_grad_(False)
    loop.notes["frozen"] = loop.training.model(loop.test_batch).clone()
    for param in frozen:
        param.requires_grad_(True)


def _change_layers(loop: Loop) -> None:
    change_all(loop.training.model)


BEFORE: dict[str, Action] = {
    "evaluate": _evaluate,
    "average": _average,
    "edit_parameters": _edit_parameters,
    "edit_data": _edit_data,
    "edit_buffers": _edit_buffers,
    "reload_optimizer": _reload_optimizer,
    "reload_model": _reload_model,
    "rewind": _rewind,
    "add_group": _add_group,
    "unfreeze": _unfreeze,
    "freeze": _freeze,
    "halve_rate": _set_in_groups("lr", lambda rate: rate / 2),
    "change_decay": _set_in_groups("weight_decay", lambda decay: decay + 0.05),
    "reseed": _reseed,
    "copy": _copy,
    "forward_only": _forward_only,
    "evaluation_mode": _evaluation_mode,
    "call_frozen": _call_frozen,
    "change_layers": _change_layers,
}


# Between the forward and the backward pass


def _read_loss(loop: Loop) -> None:
    loop.notes["loss read"] = torch.tensor(loop.loss.item())


def _print_output(loop: Loop) -> None:
    loop.notes["output printed"] = torch.tensor(list(repr(loop.output.detach()).encode()))


def _keep_output(loop: Loop) -> None:
    loop.kept.append(loop.output)


def _keep_loss(loop: Loop) -> None:
    loop.kept.append(loop.loss)


def _backward_twice(loop: Loop) -> None:
    loop.loss.backward(retain_graph=True)


def _overflow(loop: Loop) -> None:
    loop.loss = loop.loss * float("inf")


AFTER_FORWARD: dict[str, Action] = {
    "read_loss": _read_loss,
    "print_output": _print_output,
    "keep_output": _keep_output,
    "keep_loss": _keep_loss,
    "backward_twice": _backward_twice,
    "evaluate_meanwhile": _evaluate,
    "forward_meanwhile": _forward_only,
    "overflow": _overflow,
}


# Between the backward pass and the update


def _read_gradients(loop: Loop) -> None:
    norms = [param.grad.norm() for param in _with_gradient(loop) if param.grad is not None]
    loop.notes["norm of gradients"] = torch.stack(norms)


def _scale_gradients(loop: Loop) -> None:
    for param in _with_gradient(loop):
        if param.grad is not None:
            param.grad.mul_(0.5)


def _replace_gradients(loop: Loop) -> None:
    for param in _with_gradient(loop):
        if param.grad is not None:
            param.grad = param.grad * 2


def _keep_gradients(loop: Loop) -> None:
    loop.kept += [param.grad for param in _with_gradient(loop) if param.grad is not None]


def _drop_gradient(loop: Loop) -> None:
    _with_gradient(loop)[0].grad = None


def _skip_update(loop: Loop) -> None:
    loop.updates = False


AFTER_BACKWARD: dict[str, Action] = {
    "read_gradients": _read_gradients,
    "scale_gradients": _scale_gradients,
    "replace_gradients": _replace_gradients,
    "keep_gradients": _keep_gradients,
    "drop_gradient": _drop_gradient,
    "skip_update": _skip_update,
}

IN_THE_LOOP = {**AFTER_FORWARD, **AFTER_BACKWARD}
"""What has no place in a step that is one call."""

CONSTANTS = {"change_decay"}
"""What changes a hyperparameter other than the learning rate."""

MORE_GROUPS = {"add_group", "unfreeze"}

WITH_SCALER = {"overflow"}
"""What ruins the parameters, unless a gradient scaler skips the update."""

AT_TIMES = {*CONSTANTS, *MORE_GROUPS, "freeze", "skip_update", "halve_rate", "evaluation_mode", "edit_data", "rewind"}
"""What is no habit."""
