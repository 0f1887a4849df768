"""What the zoo's decoders may see, and how their parts relate to torch's own."""

import pytest
import torch
from torch import Tensor

import models
from models.zoo.decoder import Attention, Decoder, RootMeanSquareNorm

LENGTH = 12


def decoder(window: int | None) -> Decoder:
    torch.manual_seed(0)
    return Decoder(
        vocabulary=32, length=LENGTH, width=16, num_layers=1, num_heads=4, num_key_heads=2, hidden=32, window=window
    )


def differing(module: torch.nn.Module, place: int) -> list[int]:
    """The positions whose logits change with the token at a place."""
    tokens = torch.randint(32, (1, LENGTH))
    changed = tokens.clone()
    changed[:, place] = (changed[:, place] + 1) % 32
    apart: Tensor = (module(tokens) - module(changed)).abs().amax((0, 2))
    return torch.nonzero(apart > 1e-6).flatten().tolist()


def test_a_position_sees_itself_and_what_is_before_it() -> None:
    assert differing(decoder(None), 5) == list(range(5, LENGTH))


def test_a_window_slides() -> None:
    assert differing(decoder(3), 5) == [5, 6, 7]


def test_a_window_over_everything_is_none() -> None:
    tokens = torch.randint(32, (2, LENGTH))
    torch.testing.assert_close(decoder(LENGTH)(tokens), decoder(None)(tokens))


def test_attention_depends_on_distances_alone() -> None:
    torch.manual_seed(0)
    attention = Attention(16, 4, 2, LENGTH, 3)
    x = torch.randn(1, LENGTH, 16)
    moved = torch.cat([x[:, :1], x[:, :-1]], dim=1)
    torch.testing.assert_close(attention(moved)[:, 4:], attention(x)[:, 3:-1], rtol=1e-4, atol=1e-5)


def test_the_norm_is_torch_s() -> None:
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(RootMeanSquareNorm(16)(x), torch.nn.functional.rms_norm(x, (16,), eps=1e-5))


@pytest.mark.parametrize("name", ["t5_small", "whisper_tiny"])
def test_encoder_decoders_of_transformers_do_not_see_what_they_predict(name: str) -> None:
    reason = models.missing(name)
    if reason is not None:
        pytest.skip(reason)
    workload = models.build(name, tiny=True)
    x, _ = workload.batch(2)
    assert isinstance(x, tuple)
    inputs, tokens = x
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 64
    before, after = workload.module((inputs, tokens)), workload.module((inputs, changed))
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])
