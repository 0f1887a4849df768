"""Models of speech from transformers: HuBERT classifies recordings, Whisper writes them down."""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.drawing import generator
from models.gpt2 import next_token_loss
from models.transformers_loading import EncoderDecoderLogits, Logits, attention_without_masks, import_transformers
from models.workload import Workload
from models.zoo.drawn import Drawn
from models.zoo.translation import numbered_text, shifted

_NUM_CLASSES = 10
_SAMPLE_RATE = 16_000
_NUM_MELS = 80


@dataclass(frozen=True)
class Recordings(Drawn):
    """Recordings of ten classes: each is a chord of three tones of its own, in noise."""

    num_samples: int

    def draw(self, batch_size: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
        """Recordings (batch_size, num_samples) float32, 16,000 samples a second, and classes (batch_size,) int64."""
        classes = torch.randint(_NUM_CLASSES, (batch_size,), generator=source)
        tones = 200 + 3000 * torch.rand((_NUM_CLASSES, 3), generator=generator("tones of chords"))
        phases = 2 * math.pi * torch.rand((batch_size, 3, 1), generator=source)
        seconds = torch.arange(self.num_samples) / _SAMPLE_RATE
        chords = torch.sin(2 * math.pi * tones[classes][..., None] * seconds + phases).sum(1)
        return 0.5 * chords + 0.5 * torch.randn(chords.shape, generator=source), classes


@dataclass(frozen=True)
class Dictations(Drawn):
    """Texts, and spectra in which each token sounds for equally long, in noise."""

    num_frames: int
    length: int
    vocabulary: int
    num_states: int = 256

    def draw(self, batch_size: int, source: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Spectra (batch_size, 80, num_frames) float32, and what the decoder has seen before each token; the texts.

        The last two are (batch_size, length) int64.
        """
        text, _ = numbered_text(batch_size, self.length, self.vocabulary, self.num_states, source)
        token_of_frame = torch.arange(self.num_frames) * self.length // self.num_frames
        spectra = _sounds(self.vocabulary)[text].transpose(1, 2)[..., token_of_frame]
        return (0.7 * spectra + 0.7 * torch.randn(spectra.shape, generator=source), shifted(text)), text


@functools.lru_cache(maxsize=4)
def _sounds(vocabulary: int) -> Tensor:
    """(vocabulary, 80) float32: the spectrum of each token."""
    source = generator("sounds", vocabulary)
    return torch.randn((vocabulary, _NUM_MELS), generator=source, dtype=torch.float32, device="cpu")


def hubert(*, tiny: bool) -> Workload:
    """HuBERT-Base (Hsu et al., 2021) on recordings of two seconds, with nothing masked or dropped at random."""
    transformers = import_transformers()
    sizes: dict[str, object] = {}
    if tiny:
        sizes = {
            "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
            "conv_dim": (8, 8, 8), "conv_kernel": (10, 3, 2), "conv_stride": (5, 2, 2),
            "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 16,
        }  # fmt: skip
    config = transformers.HubertConfig(
        num_labels=_NUM_CLASSES,
        hidden_dropout=0.0,
        activation_dropout=0.0,
        attention_dropout=0.0,
        final_dropout=0.0,
        layerdrop=0.0,
        apply_spec_augment=False,
        attn_implementation=attention_without_masks(),
        **sizes,
    )
    return Workload(
        name="hubert",
        module=Logits(transformers.HubertForSequenceClassification(config)),
        loss_fn=nn.CrossEntropyLoss(),
        data=Recordings(1000 if tiny else 2 * _SAMPLE_RATE),
        default_batch_size={"cpu": 1, "cuda": 8},
        learning_rate=5e-5,
    )


def whisper(*, tiny: bool) -> Workload:
    """Whisper-Tiny (Radford et al., 2022): spectra of 3,000 frames, which are half a minute, and 64 tokens."""
    transformers = import_transformers()
    num_frames, vocabulary = (32, 64) if tiny else (3000, 51_865)
    sizes: dict[str, int] = {}
    if tiny:
        sizes = {
            "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
            "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_target_positions": 16,
            "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0,
        }  # fmt: skip
    config = transformers.WhisperConfig(
        vocab_size=vocabulary,
        max_source_positions=num_frames // 2,
        num_mel_bins=_NUM_MELS,
        use_cache=False,
        attn_implementation=attention_without_masks(),
        **sizes,
    )
    return Workload(
        name="whisper_tiny",
        module=EncoderDecoderLogits(transformers.WhisperForConditionalGeneration(config)),
        loss_fn=next_token_loss,
        data=Dictations(num_frames, 8, vocabulary, 16) if tiny else Dictations(num_frames, 64, vocabulary),
        default_batch_size={"cpu": 1, "cuda": 8},
        learning_rate=1e-4,
    )
