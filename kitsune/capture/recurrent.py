"""Recurrent layers of torch (`nn.RNN`, `nn.GRU`, `nn.LSTM`), which Dynamo follows only where it is told to.

On the host they are operators like others: one of oneDNN's for each layer of an LSTM, several for each time step of
others. On a GPU torch chooses by the addresses of the weights, which are not known while a call is traced, and cuDNN
keeps the state of its dropout out of sight; so calls there are refused. Dynamo's switch is private.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, fx
from torch._dynamo import config
from torch.utils import _pytree as pytree

from kitsune.errors import Refusal
from kitsune.graph.verify import source_line

REMEDY = "name the parts of the model without any: KitsuneOptimizer(..., model=)"

_NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_FUNCTIONS = frozenset(getattr(place, name) for place in (torch, torch._VF) for name in _NAMES)


def followed() -> AbstractContextManager[None]:
    """Within, Dynamo has them in its graph."""
    patch: AbstractContextManager[None] = config.patch(allow_rnn=True)
    return patch


def refuse_elsewhere(module: fx.GraphModule) -> Refusal | None:
    """None if a graph that Dynamo has made has no recurrent layers but on the host."""
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            if node.op == "call_function" and node.target in _FUNCTIONS and not _is_on_host(node):
                reason = "a recurrent layer of torch is called on a GPU (nn.RNN, nn.GRU, nn.LSTM)"
                return Refusal(reason, source_line(node), REMEDY)
    return None


def _is_on_host(node: fx.Node) -> bool:
    results = pytree.tree_leaves(node.meta.get("example_value"))
    return all(isinstance(result, Tensor) and result.device.type == "cpu" for result in results)
