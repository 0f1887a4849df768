"""`kitsune::grouped_mm`: products of groups of rows with a matrix each, as layers of experts compute them on a CPU.

PyTorch's operator takes float32 there, which its description for fake tensors refuses. Here it is described as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, _meta_registrations, fx

_ORIGINAL = torch.ops.aten._grouped_mm.default
_NAME = "kitsune::grouped_mm"


@contextmanager
def described() -> Iterator[None]:
    """Within, PyTorch's operator can be traced with float32 on a CPU. Its description is private."""
    describe: Callable[..., Tensor] = _meta_registrations._meta_grouped_mm_common

    def described_as_it_is(mat_a: Tensor, mat_b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        device = getattr(mat_a, "fake_device", mat_a.device)
        is_known = device.type == "cpu" and mat_a.dtype == mat_b.dtype == torch.float32
        if is_known and not _is_anything(*args, **kwargs):
            return _foreseen(mat_a, mat_b, kwargs["offs"])
        return describe(mat_a, mat_b, *args, **kwargs)

    with mock.patch.object(_meta_registrations, "_meta_grouped_mm_common", described_as_it_is):
        yield


def name_own(module: fx.GraphModule) -> None:
    """Has products in float32 on a CPU under the name of Kitsune's operator, which is the same."""
    found = module.graph.find_nodes(op="call_function", target=_ORIGINAL)
    found = [
        node for node in found if node.meta["val"].dtype == torch.float32 and node.meta["val"].device.type == "cpu"
    ]
    for node in found:
        node.target = torch.ops.kitsune.grouped_mm.default
        node.args, node.kwargs = _operands(*node.args, **node.kwargs), {}
    if found:
        module.recompile()


def _operands(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> tuple[Any, Any, Any]:
    assert bias is None
    return a, b, offs


def _is_anything(*args: Any, offs: Any = None, **kwargs: Any) -> bool:
    """Whether there is anything but offsets: scales, a bias, another dtype."""
    return any(one is not None and one is not False for one in (*args, *kwargs.values()))


def _foreseen(a: Tensor, b: Tensor, offs: Tensor | None) -> Tensor:
    found: Tensor = _meta_registrations._create_grouped_mm_output_tensor(a, b, offs, a.dtype)
    return found


def _run(a: Tensor, b: Tensor, offs: Tensor | None) -> Tensor:
    found: Tensor = _ORIGINAL(a, b, offs)
    return found


torch.library.define(_NAME, "(Tensor a, Tensor b, Tensor? offs) -> Tensor")
torch.library.impl(_NAME, "CPU", _run)
torch.library.register_fake(_NAME, _foreseen)
