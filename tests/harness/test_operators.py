import pytest
import torch

from harness.operators import Kind, kind_of

_KINDS = {
    Kind.PRODUCT: (
        "aten.mm.default", "aten.addmm.default", "aten.addmm.out", "aten.bmm.default", "aten.convolution.default",
        "aten.convolution_backward.default", "aten.cudnn_convolution.default", "aten::mm",
        "aten._scaled_dot_product_flash_attention.default", "aten._efficient_attention_backward.default",
        "kitsune.linear_activation.default", "kitsune.linear_input_gradient.default", "kitsune.small_conv.default",
        "kitsune.cross_entropy_head.default",
    ),
    Kind.NORMALIZATION: (
        "aten.native_batch_norm.default", "aten.cudnn_batch_norm_backward.default", "aten.native_layer_norm.default",
        "aten.native_group_norm_backward.default", "aten._log_softmax.default", "aten._softmax_backward_data.default",
        "kitsune.batch_norm_join_backward.default",
    ),
    Kind.ELEMENTWISE: (
        "aten.add.Tensor", "aten.add_.Tensor", "aten.mul.Scalar", "aten.relu.default", "aten.relu_.default",
        "aten.threshold_backward.default", "aten.gelu_backward.default", "aten.where.self", "aten.rsqrt.default",
        "aten.native_dropout.default", "aten.logical_not.default", "aten.addcdiv_.default",
        "kitsune_regions.region_0123abcd.default",
    ),
    Kind.OPTIMIZER: (
        "aten._fused_adam_.tensor_lr", "aten._fused_adamw_.default", "aten._fused_sgd_.tensor_lr",
        "aten._foreach_add_.Scalar", "kitsune.adam_.default", "kitsune::adam_",
        "kitsune.linear_adam_.default", "kitsune.linear_sgd_.default",
    ),
    Kind.COPY: (
        "aten.copy_.default", "aten._to_copy.default", "aten.clone.default", "aten.fill_.Scalar", "aten.zeros.default",
        "aten.new_zeros.default", "aten.cat.default", "aten.constant_pad_nd.default", "aten.zeros_like.default",
        "aten.permute_copy.default", "kitsune.cast_many.default",
    ),
    Kind.OTHER: (
        "aten.sum.dim_IntList", "aten.max_pool2d_with_indices.default", "aten.nll_loss_forward.default",
        "aten.amax.out", "aten.embedding_dense_backward.default", "", ".", "a b c", "aten.",
        "kitsune.cross_entropy.default",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("operator", "kind"), [(operator, kind) for kind, operators in _KINDS.items() for operator in operators]
)
def test_the_kind_of_an_operator(operator: str, kind: Kind) -> None:
    assert kind_of(operator) is kind


def test_a_bare_name_is_its_own() -> None:
    assert kind_of("mm") is Kind.PRODUCT


def test_no_pattern_claims_what_torch_calls_pointwise_for_another_kind() -> None:
    """Torch tags its point-wise operators; those of them that a pattern knows must be element-wise (or a copy)."""
    wrong = []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if not isinstance(packet, torch._ops.OpOverloadPacket):
            continue
        for overload in packet.overloads():
            operator = getattr(packet, overload)
            kind = kind_of(str(operator))
            if torch.Tag.pointwise in operator.tags and kind in (Kind.PRODUCT, Kind.NORMALIZATION):
                wrong.append(str(operator))
            if torch.Tag.reduction in operator.tags and kind is Kind.ELEMENTWISE:
                wrong.append(str(operator))
    assert wrong == []
