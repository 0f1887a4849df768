"""Layers of experts of transformers, which compute otherwise where they are being compiled.

Where Dynamo asks, they call an operator of their own, whose backward pass looks at data on the host. In plain PyTorch
they call `torch.nn.functional.grouped_mm`, and so does a captured call on a CPU, with the same numbers.
"""

from __future__ import annotations

import sys
from unittest import mock

import torch
from torch import fx

_MODULE = "transformers.integrations.moe"
_OPERATOR = "transformers.grouped_mm_fallback"


def as_in_eager(module: fx.GraphModule) -> None:
    """Has a graph that Dynamo made call what plain PyTorch does, where that is known."""
    for part in [part for part in module.modules() if isinstance(part, fx.GraphModule)]:
        found = [node for node in part.graph.nodes if _is_fallback(node) and _is_for_compilers_alone(node)]
        for node in found:
            names = ("input", "weight", "offs")
            given = dict(zip(names, node.args, strict=False)) | node.kwargs
            node.target = torch.nn.functional.grouped_mm
            node.args, node.kwargs = (given["input"], given["weight"]), {"offs": given["offs"]}
        if found:
            part.recompile()


def _is_fallback(node: fx.Node) -> bool:
    return node.op == "call_function" and str(node.target).removesuffix(".default") == _OPERATOR


def _is_for_compilers_alone(node: fx.Node) -> bool:
    """Whether plain PyTorch would not call it, as the function of transformers' that decides tells."""
    result = node.meta.get("example_value")
    decide = getattr(sys.modules.get(_MODULE), "_can_use_grouped_mm", None)
    if decide is None or not isinstance(result, torch.Tensor) or result.device.type != "cpu":
        return False
    like = torch.empty(0, dtype=result.dtype)
    with mock.patch(f"{_MODULE}.is_torchdynamo_compiling", return_value=False):
        return bool(decide(like, like, like))
