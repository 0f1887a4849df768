"""What Dynamo's guards do not see: modes and hooks around a call, hooks of parameters, kinds of modules.

None of it has a public reader in `torch`; this module is where it is read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel
from torch.utils._device import DeviceContext

from kitsune.capture.data_parallel import active_wrapper
from kitsune.capture.frontend import dynamo_facts, is_wrapper, refuse_dynamo
from kitsune.capture.global_hooks import global_hook_facts, refuse_global_hooks
from kitsune.errors import Refusal
from kitsune.native.facts import Fact, attribute, contents, result


def refuse_surroundings() -> Refusal | None:
    """None if nothing around the present call wants to see its operators one by one."""
    if (hooks := refuse_global_hooks()) is not None:
        return hooks
    if (mode := refuse_modes()) is not None:
        return mode
    if torch.is_anomaly_enabled():
        return Refusal("anomaly detection is on, which would not see the functions of a replay")
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return Refusal("saved-tensor hooks are active (checkpointing, offloading), which a replay would bypass")
    if forward_ad._current_level >= 0:
        return Refusal("forward-mode differentiation is active, which a replay cannot follow")
    return refuse_dynamo()


def is_watched() -> bool:
    """Whether something at this moment wants to see each operator, or what it saves, or stands in for its tensors."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    transforms = torch._C._are_functorch_transforms_active()
    return hooks is not None or transforms or torch._C._len_torch_dispatch_stack() > 0


def is_profiled() -> bool:
    """Whether a profiler is on, and wants to be told what begins and ends."""
    return torch._C._autograd._profiler_enabled()


def surrounding_facts() -> list[Fact]:
    """What must stay for `refuse_surroundings` to answer as it does."""
    return [
        *global_hook_facts(),
        *mode_facts(),
        result(torch.is_anomaly_enabled),
        result(torch._C._autograd._top_saved_tensors_default_hooks, True),
        attribute(forward_ad, "_current_level"),
        *dynamo_facts(),
    ]


def refuse_modes() -> Refusal | None:
    """None if no mode is active that would see the operators, or the functions, of what is replayed."""
    if torch._C._len_torch_dispatch_stack() > 0:
        return Refusal("a TorchDispatchMode is active, which would not see the operators of a replay")
    return refuse_function_modes()


def mode_facts() -> list[Fact]:
    """What must stay for `refuse_modes` to answer as it does."""
    places = range(torch._C._len_torch_function_stack())
    return [
        result(torch._C._len_torch_dispatch_stack),
        result(torch._C._len_torch_function_stack),
        *(result(torch._C._get_function_stack_at, place) for place in places),
    ]


def refuse_function_modes() -> Refusal | None:
    """None if no mode is active that would see even the attributes of tensors that Kitsune reads."""
    for place in range(torch._C._len_torch_function_stack()):
        if not isinstance(torch._C._get_function_stack_at(place), DeviceContext):
            return Refusal("a TorchFunctionMode is active, which would not see the functions of a replay")
    return None


def refuse_backward_hooks(module: torch.nn.Module) -> Refusal | None:
    """None if no part of `module` has a backward hook. Dynamo refuses them, too; but they may go again."""
    if any(part._backward_hooks or part._backward_pre_hooks for part in module.modules()):
        return Refusal("a module has backward hooks, which a replay would not run")
    return None


def wrappers_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The parts of `module` that `torch.compile` has wrapped, as wrappers."""
    return [part for part in module.modules() if is_wrapper(part)]


_WRAPPER_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def refuse_wrapper_hooks(wrappers: Iterable[torch.nn.Module]) -> Refusal | None:
    """None if no wrapper of `torch.compile`'s has hooks of its own. Dynamo sees none of them."""
    if any(vars(wrapper)[name] for wrapper in wrappers for name in _WRAPPER_HOOKS):
        problem = "a module that torch.compile has wrapped has hooks of the wrapper, which a replay would not run"
        return Refusal(problem, remedy="register them with the module inside")
    return None


def wrapper_hook_facts(wrappers: Iterable[torch.nn.Module]) -> list[Fact]:
    """What must stay for `refuse_wrapper_hooks` to answer as it does."""
    return [contents(vars(wrapper)[name]) for wrapper in wrappers for name in _WRAPPER_HOOKS]


def refuse_parameter_hooks(params: Iterable[torch.Tensor]) -> Refusal | None:
    """None if no parameter has a hook. A replay that hands gradients to autograd runs them; others do not."""
    for param in params:
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            shape = tuple(param.shape)
            return Refusal(f"a parameter of shape {shape} has a gradient hook, which a replay would not run")
    return None


def refuse_sending_hooks(params: Iterable[torch.Tensor]) -> Refusal | None:
    """None if no parameter has a hook that may send its gradient to other processes.

    There the hooks of all have to come in one order, and those of a replay come in another one than plain PyTorch's.
    """
    for param in _sent_by_hooks(params):
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            shape = tuple(param.shape)
            problem = (
                f"a parameter of shape {shape} has a gradient hook, which may send to other processes: those of a "
                "replay come in another order, and other processes may not replay"
            )
            return Refusal(problem, remedy="let a DistributedDataParallel send the gradients")
    return None


def sending_hook_facts(params: Iterable[torch.Tensor]) -> list[Fact]:
    """What must stay for `refuse_sending_hooks` to answer as it does, in the same `DistributedDataParallel`."""
    return [*_peer_facts(), *parameter_hook_facts(_sent_by_hooks(params))]


def _sent_by_hooks(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those whose gradients go to other processes by hooks, if at all: no `DistributedDataParallel` sends them."""
    if not _has_peers():
        return []
    wrapper = active_wrapper()
    reduced = set() if wrapper is None else set(map(id, wrapper._module_parameters))
    return [param for param in params if id(param) not in reduced]


def _has_peers() -> bool:
    """Whether there are other processes to send anything to."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _peer_facts() -> list[Fact]:
    """What must stay for `_has_peers` to answer as it does. They keep no process group alive."""
    if dist.is_available() and not dist.is_initialized():
        return [attribute(dist.group, "WORLD")]  # the same as to ask, in a third of the time
    return [result(_has_peers)]


def parameter_hook_facts(params: Iterable[torch.Tensor]) -> list[Fact]:
    """What must stay for `refuse_parameter_hooks` to answer as it does."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    facts = [attribute(param, name) for param in params for name in names]
    return [*facts, *(contents(fact.expected) for fact in facts if fact.expected is not None)]


class Interceptor(ABC):
    """Stands in for the call of a module, in the place that `Module.compile` uses, or for what `torch.compile` has made
    the `forward` of a wrapper. What is there is a function, see `interceptor_in`."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answers a call."""

    @abstractmethod
    def gives_way(self) -> bool:
        """Gives the calls back if nobody is there any more to answer them; whether it did."""


def interceptor_in(call: object) -> Interceptor | None:
    """The interceptor behind what a module is called by, if that is Kitsune's own: a function that names it."""
    found = getattr(call, "interceptor", None)
    return found if isinstance(found, Interceptor) else None


def refuse_interceptor(call: object, place: str = "the model") -> Refusal | None:
    """None if nobody answers the calls of a module that is called by `call`, or gives them back."""
    interceptor = interceptor_in(call)
    if interceptor is None or interceptor.gives_way():
        return None
    remedy = "give one optimizer all parameters, as groups, or drop the other one"
    return Refusal(f"the calls of {place} are answered for another KitsuneOptimizer", remedy=remedy)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `module` is a wrapper made by `torch.compile`, or was compiled in place."""
    call = module._compiled_call_impl
    return is_wrapper(module) or (call is not None and interceptor_in(call) is None)


def has_compiled_parts(module: torch.nn.Module) -> bool:
    """Whether any part of `module`, or all of it, is compiled."""
    return any(map(is_compiled, module.modules()))


def refuse_module(module: torch.nn.Module) -> Refusal | None:
    """None if `module` is of a kind that can be captured."""
    for name, part in module.named_modules():
        place = f"module {name!r}" if name else "the model"
        if isinstance(part, DistributedDataParallel):
            return Refusal(
                f"{place} is a DistributedDataParallel, whose reducer would not run in a replay of a whole step"
            )
        if isinstance(part, torch.nn.DataParallel):
            return Refusal(f"{place} is a DataParallel, which calls copies of its module")
        if isinstance(part, torch.jit.ScriptModule):
            remedy = "train the module that it was made of, and convert that afterwards"
            return Refusal(f"{place} is a module of torch.jit.script or torch.jit.trace", remedy=remedy)
        if (answered := refuse_interceptor(part._compiled_call_impl, place)) is not None:
            return answered
    for name, param in module.named_parameters():
        if type(param) is not torch.nn.Parameter:
            return Refusal(f"the parameter {name!r} is a {type(param).__name__}, not a plain Parameter")
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if len(devices) > 1:
        return Refusal(f"the model lies on several devices ({', '.join(sorted(map(str, devices)))})")
    return None
