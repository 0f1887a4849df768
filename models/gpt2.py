"""GPT-2 from transformers, predicting the next token."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from models.synthetic_text import SyntheticText
from models.transformers_loading import Logits, attention_without_masks, import_transformers
from models.workload import Workload, initialization

_LENGTH = 512


def configuration(**sizes: int) -> Any:
    """transformers' `GPT2Config`: GPT-2 Small but for `sizes`, without dropout and without what generating text needs.

    Dropout would make losses differ from run to run. Raises ModuleNotFoundError without transformers.
    """
    return import_transformers().GPT2Config(
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=attention_without_masks(),
        **sizes,
    )


def language_model(config: Any) -> nn.Module:
    """GPT-2 (Radford et al., 2019) with its output layer tied to the embedding, randomly initialized.

    Maps tokens (N, length) int64 to logits (N, length, vocabulary).
    """
    return Logits(import_transformers().GPT2LMHeadModel(config))


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of logits (N, length, vocabulary) against the tokens that follow, (N, length) int64."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def workload(seed: int) -> Workload:
    """GPT-2 Small on sequences of 512 tokens."""
    with initialization(seed):
        config = configuration()
        module = language_model(config)
    return Workload(
        name="gpt2_small",
        module=module,
        loss_fn=next_token_loss,
        data=SyntheticText(_LENGTH, config.vocab_size),
        default_batch_size={"cpu": 1, "cuda": 4},
        batch_sizes={"cpu": (1,), "cuda": (1, 4)},
        learning_rate=3e-4,
        channels_last=False,
    )
