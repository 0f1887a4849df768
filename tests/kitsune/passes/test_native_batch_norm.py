"""cuDNN's batch norm becomes PyTorch's own. Its operators are traced here, and run on a GPU only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from kitsune.capture.trace import trace
from kitsune.passes.native_batch_norm import native_batch_norm
from kitsune.passes.pipeline import run
from tests.kitsune.passes.running import calls, names, values_are_right

aten = torch.ops.aten

PASS = (("native batch norm", native_batch_norm),)


def inputs(device: str = "cpu") -> list[Tensor]:
    """Images, a gradient, weight and bias, running mean and variance."""
    images = [torch.randn(4, 3, 5, 2).to(memory_format=torch.channels_last) for _ in range(2)]
    return [tensor.to(device) for tensor in (*images, *(torch.rand(3) for _ in range(4)))]


def by_cudnn(keep: bool) -> Callable[..., list[Tensor]]:
    """Batch norm and its backward, as they are captured on a GPU; `keep` the graph of autograd."""

    def function(x: Tensor, grad: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> list[Tensor]:
        y, *saved, reserve = aten.cudnn_batch_norm.default(x, weight, bias, mean, var, True, 0.2, 1e-3)
        reserve = reserve.clone() if keep else reserve
        return [y, *aten.cudnn_batch_norm_backward.default(x, grad, weight, mean, var, *saved, 1e-3, reserve)]

    return function


def by_autograd(x: Tensor, grad: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
    y = F.batch_norm(leaves[0], mean, var, *leaves[1:], training=True, momentum=0.2, eps=1e-3)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def outcome(module: fx.GraphModule, given: list[Tensor]) -> list[Tensor]:
    copies = [tensor.clone() for tensor in given]
    return [*module(*copies), *copies]


@pytest.mark.parametrize("keep", [False, True])
def test_both_directions_become_those_of_pytorch(keep: bool) -> None:
    new = run(trace(by_cudnn(keep), inputs()), PASS, verify=True)
    assert [name for name in names(new) if not name.startswith("getitem")] == [
        "cudnn_batch_norm",
        "cudnn_batch_norm_backward",
    ]
    assert len(calls(new, aten.native_batch_norm.default)) == 1
    assert len(calls(new, aten.native_batch_norm_backward.default)) == 1
    assert values_are_right(new, inputs())
    given = inputs()
    wanted = outcome(trace(by_autograd, given), given)
    assert all(map(torch.equal, outcome(new, given), wanted))


@pytest.mark.gpu
def test_on_a_gpu_they_compute_what_cudnn_does() -> None:
    given = inputs("cuda")
    module = trace(by_autograd, given)
    assert calls(module, aten.cudnn_batch_norm.default), names(module)
    new = run(module, PASS, verify=True)
    assert not calls(new, aten.cudnn_batch_norm.default)
    assert values_are_right(new, inputs("cuda"))
    for one, other in zip(outcome(new, given), outcome(module, given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, check_stride=True)


def test_what_else_reads_the_reserve_keeps_it() -> None:
    def function(*given: Tensor) -> list[Tensor]:
        x, _, *parameters = given
        *results, reserve = aten.cudnn_batch_norm.default(x, *parameters, True, 0.2, 1e-3)
        return [*results, reserve.view(-1)]

    module = trace(function, inputs())
    assert names(run(module, PASS, verify=True)) == names(module)


def test_in_evaluation_it_stays() -> None:
    def function(x: Tensor, _: Tensor, *parameters: Tensor) -> list[Tensor]:
        return [aten.cudnn_batch_norm.default(x, *parameters, False, 0.2, 1e-3)[0]]

    new = run(trace(function, inputs()), PASS, verify=True)
    assert calls(new, aten.cudnn_batch_norm.default)
