"""The call of a module that runs while the module is found, of which nothing else is seen."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

Describe = Callable[[tuple[Any, ...], Mapping[str, Any]], Hashable]


def watch_first_backward(module: torch.nn.Module, describe: Describe, tell: Callable[[Hashable], None]) -> None:
    """If the backward pass of the call that has begun is differentiated (`create_graph`), `tell` gets its signature.

    Args:
        describe: makes the signature of the arguments, after the call.
    """

    def look_at(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        handle.remove()
        nodes = {leaf.grad_fn for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)} - {None}
        signature = describe(args, kwargs) if nodes else None

        def look(_gradients: Any) -> None:
            if torch.is_grad_enabled():
                tell(signature)

        for node in nodes:
            assert node is not None
            node.register_prehook(look)

    handle = module.register_forward_hook(look_at, with_kwargs=True, always_call=True)
