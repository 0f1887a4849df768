"""How far apart rounding takes two computations of the same."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from kitsune.capture.layout import cloned, may_overlap
from kitsune.fusion.operands import convolutions_allow_tf32
from kitsune.graph import dataflow

_TF32_EPS = 2.0**-10


def rounding(graph: fx.Graph) -> float:
    """The coarsest rounding of a graph's values, relative to them."""
    values = [tensor for node in graph.nodes for tensor in dataflow.tensors(node) if tensor.is_floating_point()]
    eps = max((torch.finfo(value.dtype).eps for value in values), default=0.0)
    matmul = torch.backends.cuda.matmul.fp32_precision
    rounds = any(value.is_cuda for value in values) and (convolutions_allow_tf32() or matmul == "tf32")
    return max(eps, _TF32_EPS) if rounds else eps


def off_by(eps: float, tensor: Tensor, generator: torch.Generator) -> Tensor:
    """A copy of `tensor` with every number off by up to `eps` of it; `tensor` itself if it holds integers.

    The copy has exactly the strides of `tensor`, those of dimensions of one element too, by which convolutions choose
    the layout of their results. Elements that share memory stay equal.
    """
    if not _is_rounded(tensor):
        return tensor
    result = cloned(tensor)
    cells = _cells(result)
    dtype = torch.promote_types(tensor.dtype, torch.float32).to_real()  # one more than float64's eps is one in float32
    noise = torch.empty_like(cells, dtype=dtype).uniform_(-eps, eps, generator=generator)
    cells.copy_(cells * (1 + noise))
    return result


def _cells(tensor: Tensor) -> Tensor:
    """Each number in memory once: `tensor` itself, or all its memory where elements share some."""
    if not may_overlap(tensor):
        return tensor
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def change(before: Tensor, after: Tensor) -> Tensor:
    """In float32 where that loses nothing."""
    dtype = torch.promote_types(before.dtype, torch.float32) if _is_rounded(before) else torch.float64
    return after.to(dtype) - before.to(dtype)


def unit(tensor: Tensor) -> float:
    """The norm of what is lost at most where such values are stored."""
    return torch.finfo(tensor.dtype).eps * norm(tensor) if _is_rounded(tensor) else 0.0


def unit_of_loss(loss: Tensor, eps: float) -> float:
    """The norm of what is lost at most in a loss whose step rounds by `eps`.

    Of outputs that are all alike, as they are when training begins, it is a mean of numbers that were rounded to the
    same side. No draw of the weights shows that.
    """
    return max(unit(loss), eps * norm(loss)) if loss.is_floating_point() and loss.dim() == 0 else unit(loss)


def norm(tensor: Tensor) -> float:
    """The 2-norm, in float64."""
    return float(torch.linalg.vector_norm(doubled(tensor.detach())))


def doubled(tensor: Tensor) -> Tensor:
    """In float64, or complex128."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _is_rounded(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
