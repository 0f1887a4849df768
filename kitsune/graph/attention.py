"""What PyTorch's kernels of attention demand of their operands, and where they look for random numbers.

The kernels read heads whose elements lie one after the other. PyTorch picks a kernel by the layout of its operands.
Kitsune calls the kernel that was picked, so it must keep to that layout. Where it does not, cuDNN raises at the first
call, and the second such call ends the process (seen in torch 2.11): the graph that could not be built stays empty in
the cache of built graphs. So `unmet_demand` is asked before anything is called.

Memory-efficient attention with dropout has another catch, where one of its passes is recorded into a CUDA graph and the
other is not. A forward pass that is recorded leaves the seed and the offset of its random numbers on the device,
another one on the host. The backward pass looks for them where a forward pass run like itself would have left them
(Note [Seed and Offset Device] in PyTorch's sources). Where the forward pass was run otherwise, it takes an address of
the device for one of the host, or the other way round. The operators here look first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

_aten = torch.ops.aten

ATTENTIONS = frozenset(
    {
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_cudnn_attention_backward.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_efficient_attention_backward.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_backward.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    }
)

_OF_HEADS = frozenset(("query", "key", "value"))  # gradients may lie in any way

_STATE = ("philox_seed", "philox_offset")


def unmet_demand(target: Any, args: Sequence[Any]) -> str | None:
    """What attention by `target` would refuse in its operands; None if nothing, or if `target` is no attention.

    Args:
        args: its positional arguments: tensors of the layouts that it would get.
    """
    operator = original(target)
    if operator not in ATTENTIONS:
        return None
    for argument, given in zip(operator._schema.arguments, args, strict=False):
        if argument.name in _OF_HEADS and given.size(-1) > 1 and given.stride(-1) != 1:
            return (
                f"{target} takes heads whose elements lie one after the other: {argument.name} of shape "
                f"{tuple(given.size())} has strides {given.stride()}"
            )
    return None


def look_for_random_state(module: fx.GraphModule) -> None:
    """Has backward passes of memory-efficient attention find the state of random numbers wherever it is."""
    found = [node for node in module.graph.nodes if node.target in _LOOKING]
    for node in found:
        node.target = _LOOKING[node.target]
    if found:
        module.recompile()


def original(target: Any) -> Any:
    """The operator of PyTorch's that `target` runs after a look; else `target` itself."""
    return _ORIGINALS.get(target, target)


def run_looking(operator: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """`operator(*args, **kwargs)`, a backward pass, with the state of random numbers where it reads it.

    Raises:
        RuntimeError: it is being recorded, and the state is on the host.
    """
    names = [argument.name for argument in operator._schema.arguments]
    if args[names.index("dropout_p")]:
        places = [names.index(name) for name in _STATE]
        args = tuple(_found(one, args[0]) if place in places else one for place, one in enumerate(args))
    return operator(*args, **kwargs)


def _define(operator: torch._ops.OpOverload) -> torch._ops.OpOverload:
    name = operator._schema.name.removeprefix("aten::_")
    schema = str(operator._schema)
    torch.library.define(f"kitsune::{name}", schema[schema.index("(") :])
    torch.library.impl(f"kitsune::{name}", "CompositeExplicitAutograd", partial(run_looking, operator))
    torch.library.register_fake(f"kitsune::{name}", operator)
    overload: torch._ops.OpOverload = getattr(torch.ops.kitsune, name).default
    return overload


def _found(state: Tensor, grad: Tensor) -> Tensor:
    """`state` where a backward pass that is run now for `grad` reads it."""
    if grad.device.type != "cuda":
        return state
    with torch.cuda.device(grad.device):
        if not torch.cuda.is_current_stream_capturing():
            return _on_host(state)
    if state.device != grad.device:
        raise RuntimeError(
            "the backward pass of attention is recorded, but its forward pass was not: its random numbers are unknown"
        )
    return state


def _on_host(state: Tensor) -> Tensor:
    """The host waits for it, also where a recording is rehearsed, in which it would not have to."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        return state.cpu()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


_LOOKING: Mapping[Any, torch._ops.OpOverload] = {
    operator: _define(operator)
    for operator in (
        _aten._efficient_attention_backward.default,
        _aten._scaled_dot_product_efficient_attention_backward.default,
    )
}
_ORIGINALS = {looking: operator for operator, looking in _LOOKING.items()}
