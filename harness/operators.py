"""What kind of work an operator does, by its name: what charts of a step are coloured by."""

from __future__ import annotations

import re
from enum import Enum


class Kind(Enum):
    """Kinds of operators, as a reader calls them."""

    PRODUCT = "matrix products and convolutions"
    NORMALIZATION = "normalization and softmax"
    ELEMENTWISE = "element-wise"
    OPTIMIZER = "optimizer"
    COPY = "copies and fills"
    OTHER = "other"


_NAMES = {
    Kind.OPTIMIZER: r"_fused_(adam|adamw|adagrad|sgd)|_foreach_.*|(linear_)?(adamw?|sgd)",
    Kind.PRODUCT: (
        r"mm|bmm|addmm|_addmm_activation|baddbmm|addbmm|mv|addmv|dot|addr|matmul|linear|_scaled_mm|_grouped_mm|_?conv.*|"
        r"(cudnn|miopen|mkldnn)_conv.*|.*_attention.*|linear_(activation|input_gradient)|small_conv.*|cross_entropy_head"
    ),
    Kind.NORMALIZATION: r".*(batch|layer|group|instance|rms)_norm.*|.*softmax.*",
    Kind.COPY: (
        r"copy|_?to_copy|clone|contiguous|fill|zero|zeros|ones|full|arange|scalar_tensor|(zeros|ones|full|empty)_like|"
        r"new_.*|cast_many|cat|stack|repeat|constant_pad_nd|(slice|select|diagonal|as_strided)_scatter|.*_copy"
    ),
    Kind.ELEMENTWISE: (
        r"(add|sub|rsub|mul|div|addcmul|addcdiv|lerp|neg|abs|sign|exp|expm1|log|log1p|sqrt|rsqrt|pow|square|reciprocal|"
        r"sin|cos|erf|tanh|sigmoid|relu|gelu|silu|elu|mish|softplus|hardtanh|hardswish|leaky_relu|threshold|where|"
        r"eq|ne|lt|le|gt|ge|minimum|maximum|clamp|clamp_min|clamp_max|masked_fill|dropout|native_dropout|"
        r"mse_loss|l1_loss|smooth_l1_loss|huber_loss|logical_\w+|bitwise_\w+)(_backward)?"
    ),
}
"""In this order the first pattern that the whole name matches decides."""

_GENERATED = "kitsune_regions"
"""Where operators generated for groups of element-wise ones and reductions are; their names say nothing."""

_PATTERNS = {kind: re.compile(names) for kind, names in _NAMES.items()}


def kind_of(operator: str) -> Kind:
    """The kind of an operator such as ``aten.mm.default`` or ``kitsune::adam_``; OTHER where the name says nothing."""
    parts = operator.replace("::", ".").split(".")
    if parts[0] == _GENERATED:
        return Kind.ELEMENTWISE
    name = parts[min(1, len(parts) - 1)].removesuffix("_")
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.fullmatch(name)), Kind.OTHER)
