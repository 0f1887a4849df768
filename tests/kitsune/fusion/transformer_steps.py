"""Training steps of small transformers, as graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import bert, gpt2, torchvision_loading
from models.transformers_loading import attention_without_masks, import_transformers
from tests.kitsune.fusion.running import InAutocast, in_autocast
from tests.kitsune.steps import TracedStep, traced_step

LENGTH, VOCABULARY = 12, 300

_LossFunction = Callable[[Tensor, Tensor], Tensor]


class OwnLoss(nn.Module):
    """A language model of transformers that computes the loss of the next tokens itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.model.loss_type = "ForCausalLM"  # what the class of the configuration would tell

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


@cache
def gpt2_step(
    dtype: torch.dtype, *, dropout: float = 0.0, own_loss: bool = False, vocabulary: int = VOCABULARY
) -> TracedStep:
    pytest.importorskip("transformers", reason="transformers is not installed")
    config = gpt2.configuration(n_layer=2, n_head=2, n_embd=16, vocab_size=vocabulary, n_positions=LENGTH)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = dropout
    if own_loss:
        return _step(partial(_with_own_loss, "GPT2LMHeadModel", config), dtype)
    return _step(lambda: (gpt2.language_model(config), gpt2.next_token_loss, _tokens(), _tokens()), dtype)


@cache
def llama_step(dtype: torch.dtype) -> TracedStep:
    pytest.importorskip("transformers", reason="transformers is not installed")
    config = import_transformers().LlamaConfig(
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, hidden_size=16, intermediate_size=32,
        vocab_size=VOCABULARY, max_position_embeddings=LENGTH, use_cache=False, bos_token_id=None, eos_token_id=None,
        attn_implementation=attention_without_masks(),
    )  # fmt: skip
    return _step(partial(_with_own_loss, "LlamaForCausalLM", config), dtype)


@cache
def bert_step(dtype: torch.dtype, *, dropout: float = 0.0) -> TracedStep:
    pytest.importorskip("transformers", reason="transformers is not installed")
    config = bert.configuration(
        num_hidden_layers=2, num_attention_heads=2, hidden_size=16, intermediate_size=32, vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = dropout
    return _step(lambda: (bert.classifier(config), F.cross_entropy, _tokens(), torch.tensor([0, 1])), dtype)


@cache
def vit_step(dtype: torch.dtype) -> TracedStep:
    if torchvision_loading.missing() is not None:
        pytest.skip("torchvision is not installed")
    transformer = torchvision_loading.import_torchvision("models").VisionTransformer
    sizes = {"image_size": 8, "patch_size": 4, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}

    def make() -> tuple[nn.Module, _LossFunction, Tensor, Tensor]:
        model = transformer(**sizes, num_classes=10)
        nn.init.normal_(model.heads.head.weight)  # zeros at first, with which nothing else has a gradient
        return model, F.cross_entropy, torch.randn(2, 3, 8, 8), torch.tensor([3, 7])

    return _step(make, dtype)


def _with_own_loss(name: str, config: Any) -> tuple[nn.Module, _LossFunction, Tensor, Tensor]:
    tokens = _tokens()
    return OwnLoss(getattr(import_transformers(), name)(config)), lambda loss, _: loss, tokens, tokens


def _tokens() -> Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH))


def _step(make: Callable[[], tuple[nn.Module, _LossFunction, Tensor, Tensor]], dtype: torch.dtype) -> TracedStep:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        module, loss_fn, x, y = make()
        # Not Adam, whose steps are as large where a gradient is 0 but for rounding, such as that of keys' biases.
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        return traced_step(InAutocast(module.train(), dtype), in_autocast(loss_fn, dtype), x, y, optimizer)


def assert_close_to_the_original(found: list[Tensor], wanted: list[Tensor], dtype: torch.dtype) -> None:
    """Equal in form, and in value but for rounding to `dtype`."""
    tolerance = 2 * torch.finfo(dtype).eps ** 0.75
    for one, other in zip(found, wanted, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        difference = torch.linalg.vector_norm((one - other).double())
        assert difference <= tolerance * torch.linalg.vector_norm(other.double()) + 1e-5
