"""What of a module Dynamo's guards do not see: hooks on modules and parameters.

The hook dictionaries of modules and tensors have no public reader; this module is where they are read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.modules import module as torch_module

from kitsune.errors import Refusal

_GLOBAL_HOOKS = (
    torch_module._global_forward_pre_hooks,
    torch_module._global_forward_hooks,
    torch_module._global_backward_pre_hooks,
    torch_module._global_backward_hooks,
)

own_global_hooks: set[int] = set()
"""The ids of Kitsune's own global hooks, which a replay need not run."""


class ModuleWatch:
    """Watches the hooks of `module` and of `params` from the moment it is made."""

    def __init__(self, module: torch.nn.Module, params: Sequence[torch.nn.Parameter]) -> None:
        self._params = tuple(params)
        modules = list(module.modules())
        self._backward = [hooks for part in modules for hooks in (part._backward_hooks, part._backward_pre_hooks)]
        forward = [hooks for part in modules for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        self._empty = [hooks for hooks in forward if not hooks]
        self._filled = [(hooks, dict(hooks)) for hooks in forward if hooks]

    def refuse(self) -> Refusal | None:
        """None if no hook is registered that a replay would not run."""
        if any(hooks.keys() - own_global_hooks for hooks in _GLOBAL_HOOKS):
            return Refusal("global module hooks are registered, which a replay would not run")
        if any(self._backward):
            return Refusal("a module has backward hooks, which a replay would not run")
        return None

    def refuse_parameter_hooks(self) -> Refusal | None:
        """None if no parameter has a hook. A replay that hands gradients to autograd runs them; others do not."""
        for param in self._params:
            if param._backward_hooks or param._post_accumulate_grad_hooks:
                return Refusal(
                    f"a parameter of shape {tuple(param.shape)} has a gradient hook, which a replay would not run"
                )
        return None

    def forward_hooks_changed(self) -> bool:
        """Whether forward hooks came or went since the watch began; the ones that were there are part of the graph."""
        return any(self._empty) or any(hooks != before for hooks, before in self._filled)


def refuse_module(module: torch.nn.Module) -> Refusal | None:
    """None if `module` is of a kind that can be captured."""
    for name, part in module.named_modules():
        place = f"module {name!r}" if name else "the model"
        if isinstance(part, torch.nn.parallel.DistributedDataParallel):
            return Refusal(f"{place} is a DistributedDataParallel, whose reducer would not run in a replay")
        if part._compiled_call_impl is not None or isinstance(part, torch._dynamo.OptimizedModule):
            return Refusal(f"{place} is compiled by torch.compile already", remedy="pass the module itself")
    for name, param in module.named_parameters():
        if type(param) is not torch.nn.Parameter:
            return Refusal(f"the parameter {name!r} is a {type(param).__name__}, not a plain Parameter")
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if len(devices) > 1:
        return Refusal(f"the model lies on several devices ({', '.join(sorted(map(str, devices)))})")
    return None
