"""Which operators may be part of a region, and what they are there."""

from __future__ import annotations

import operator

import torch
from torch import fx

from kitsune.graph import dataflow

_aten = torch.ops.aten

_DTYPES = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip

_VIEWS = {
    _aten._unsafe_view.default, _aten.alias.default, _aten.detach.default, _aten.diagonal.default,
    _aten.expand.default, _aten.permute.default, _aten.select.int, _aten.slice.Tensor, _aten.split.Tensor,
    _aten.split_with_sizes.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.t.default,
    _aten.transpose.int, _aten.unbind.int, _aten.unfold.default, _aten.unsqueeze.default, _aten.view.default,
}  # fmt: skip

_CREATIONS = {
    _aten.arange, _aten.full, _aten.full_like, _aten.new_full, _aten.new_ones, _aten.new_zeros, _aten.ones,
    _aten.ones_like, _aten.scalar_tensor, _aten.zeros, _aten.zeros_like,
}  # fmt: skip

_WITHOUT_CONTENT = {
    _aten.empty, _aten.empty_like, _aten.empty_permuted, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided,
}  # fmt: skip

# Casts and copies, and point-wise operators that are not tagged as such.
_POINTWISE = {
    _aten._to_copy, _aten.binary_cross_entropy, _aten.binary_cross_entropy_backward,
    _aten.binary_cross_entropy_with_logits, _aten.copy, _aten.elu_backward, _aten.fill, _aten.hardsigmoid_backward,
    _aten.hardswish, _aten.hardswish_backward, _aten.hardtanh_backward, _aten.huber_loss, _aten.huber_loss_backward,
    _aten.leaky_relu_backward, _aten.log_sigmoid_backward, _aten.log_sigmoid_forward, _aten.masked_fill,
    _aten.mish_backward, _aten.mse_loss, _aten.mse_loss_backward, _aten.smooth_l1_loss,
    _aten.smooth_l1_loss_backward, _aten.softplus_backward, _aten.where, _aten.zero,
}  # fmt: skip

_MOVES = {
    _aten.cat, _aten.constant_pad_nd, _aten.flip, _aten.repeat, _aten.select_backward, _aten.slice_backward,
    _aten.stack, _aten.tril, _aten.triu,
}  # fmt: skip

_REDUCTIONS = {
    _aten._log_softmax, _aten._log_softmax_backward_data, _aten._softmax, _aten._softmax_backward_data, _aten.all,
    _aten.amax, _aten.amin, _aten.any, _aten.linalg_vector_norm, _aten.logsumexp, _aten.mean,
    _aten.native_layer_norm, _aten.native_layer_norm_backward, _aten.nll_loss_backward, _aten.prod, _aten.std,
    _aten.std_mean, _aten.sum, _aten.var, _aten.var_mean,
}  # fmt: skip

# On the CPU it raises an IndexError for a wrong target, which generated code does not.
_ON_CUDA = {_aten.nll_loss_forward}

# Tagged as point-wise, but of random numbers or without a result on the device.
_UNFIT = {_aten.equal, _aten.rrelu}

_FUSIBLE = _POINTWISE | _MOVES | _REDUCTIONS | _CREATIONS | _WITHOUT_CONTENT

# ATen computes these by several kernels, a generator of code by one.
_SEVERAL_KERNELS = {_aten._softmax_backward_data, _aten.logsumexp, _aten.select_backward, _aten.slice_backward}


def is_view(node: fx.Node) -> bool:
    """Whether `node` is a view that may be made again anywhere its base is, or one of several such views."""
    if node.target is operator.getitem:
        base = node.args[0]
        return isinstance(base, fx.Node) and base.target in _VIEWS
    return node.target in _VIEWS


def is_fusible(node: fx.Node, device: torch.device) -> bool:
    """Whether `node`, which writes to none of its arguments, may be in a region on `device`.

    Its tensors must be plain ones on that device, and each of its results must fill memory of its own: that is what
    a region returns.
    """
    if not _is_fusible_operator(node.target, device) or dataflow.draws_random_numbers(node):
        return False
    if any(dataflow.written(node)) or "out" in node.kwargs:
        return False
    results = dataflow.tensors(node)
    arguments = [tensor for argument in node.all_input_nodes for tensor in dataflow.tensors(argument)]
    if not results or any("val" not in argument.meta for argument in node.all_input_nodes):
        return False
    taken = {dataflow.storage_of(tensor) for tensor in arguments}
    own = {dataflow.storage_of(tensor) for tensor in results}
    return (
        all(_is_plain(tensor, device) for tensor in (*arguments, *results))
        and all(_fills_its_memory(tensor) for tensor in results)
        and taken.isdisjoint(own)
        and len(own) == len(results)
        and _is_taken_apart(node)
    )


def _is_fusible_operator(target: object, device: torch.device) -> bool:
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    packet = target.overloadpacket
    if packet in _FUSIBLE or (packet in _ON_CUDA and device.type == "cuda"):
        return True
    return torch.Tag.pointwise in target.tags and packet not in _UNFIT


def is_pointwise(node: fx.Node) -> bool:
    """Whether a fusible operator computes each element of its result from those at the same place, and little else."""
    packet = _packet(node)
    is_tagged = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
    return packet in _POINTWISE or is_tagged


def launches(node: fx.Node) -> bool:
    """Whether a fusible operator runs a kernel, rather than only take memory."""
    return _packet(node) not in _WITHOUT_CONTENT


def gains_alone(node: fx.Node) -> bool:
    """Whether a region of `node` alone has fewer kernels than its operator."""
    return _packet(node) in _SEVERAL_KERNELS


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has a storage of its own, without gaps."""
    dense = torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
    return bool(dense) and tensor.storage_offset() == 0 and tensor.nbytes == tensor.untyped_storage().nbytes()


def _packet(node: fx.Node) -> object:
    assert isinstance(node.target, torch._ops.OpOverload)
    return node.target.overloadpacket


def _is_plain(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.device == device and tensor.layout == torch.strided and tensor.dtype in _DTYPES


def _is_taken_apart(node: fx.Node) -> bool:
    """Whether several results are used one by one, each under one name."""
    if isinstance(node.meta["val"], torch.Tensor):
        return True
    places = [user.args[1] for user in node.users if user.target is operator.getitem]
    return len(places) == len(node.users) == len(set(places))
