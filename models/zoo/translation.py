"""T5 from transformers, translating."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from models.drawing import generator
from models.gpt2 import next_token_loss
from models.synthetic_text import SyntheticText
from models.transformers_loading import EncoderDecoderLogits, attention_without_masks, import_transformers
from models.workload import Workload
from models.zoo.drawn import Drawn

START = 0
"""The token with which a decoder begins."""


@dataclass(frozen=True)
class Translations(Drawn):
    """Texts of a synthetic language, and the same texts word for word in another."""

    length: int
    vocabulary: int
    num_states: int = 256

    def draw(self, batch_size: int, source: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Texts, and what the decoder has seen before each token; the translations. All (batch_size, length) int64."""
        text, _ = numbered_text(batch_size, self.length, self.vocabulary, self.num_states, source)
        translated = _dictionary(self.vocabulary)[text]
        return (text, shifted(translated)), translated


def numbered_text(
    batch_size: int, length: int, vocabulary: int, num_states: int, source: torch.Generator
) -> tuple[Tensor, Tensor]:
    """A batch of `SyntheticText` whose number comes from `source`: tokens, and those after them."""
    index = int(torch.randint(2**31, (), generator=source))
    return SyntheticText(length, vocabulary, num_states).batch(batch_size, index=index)


def shifted(tokens: Tensor) -> Tensor:
    """What a decoder has seen before each of its tokens (N, length) int64: the start, then the token before."""
    return torch.cat([torch.full_like(tokens[:, :1], START), tokens[:, :-1]], dim=1)


@functools.lru_cache(maxsize=4)
def _dictionary(vocabulary: int) -> Tensor:
    """(vocabulary,) int64: the other language's word for each token."""
    return torch.randperm(vocabulary, generator=generator("dictionary", vocabulary), device="cpu")


def configuration(**sizes: int) -> object:
    """transformers' `T5Config`: T5-Small but for `sizes`, and without dropout, which differs from run to run.

    Raises ModuleNotFoundError without transformers.
    """
    return import_transformers().T5Config(
        dropout_rate=0.0, use_cache=False, attn_implementation=attention_without_masks(), **sizes
    )


def workload(*, tiny: bool) -> Workload:
    """T5-Small (Raffel et al., 2019) on texts of 128 tokens."""
    if tiny:
        config = configuration(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
        data = Translations(8, 64, 16)
    else:
        config, data = configuration(), Translations(128, 32_128)
    return Workload(
        name="t5_small",
        module=EncoderDecoderLogits(import_transformers().T5ForConditionalGeneration(config)),
        loss_fn=next_token_loss,
        data=data,
        default_batch_size={"cpu": 1, "cuda": 16},
        learning_rate=1e-4,
    )
