"""BERT from transformers, classifying documents."""

from typing import Any

from torch import nn

from models.synthetic_text import SyntheticDocuments
from models.transformers_loading import Logits, attention_without_masks, import_transformers
from models.workload import Workload, initialization

_LENGTH = 128


def configuration(**sizes: int) -> Any:
    """transformers' `BertConfig` for two classes: BERT-Base but for `sizes`, and without dropout.

    Dropout would make losses differ from run to run. Raises ModuleNotFoundError without transformers.
    """
    return import_transformers().BertConfig(
        num_labels=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation=attention_without_masks(),
        **sizes,
    )


def classifier(config: Any) -> nn.Module:
    """BERT (Devlin et al., 2018) with a linear classifier on its pooled output, randomly initialized.

    Maps tokens (N, length) int64 to logits (N, 2).
    """
    return Logits(import_transformers().BertForSequenceClassification(config))


def workload(seed: int) -> Workload:
    """BERT-Base on documents of 128 tokens and two classes."""
    with initialization(seed):
        config = configuration()
        module = classifier(config)
    return Workload(
        name="bert_base",
        module=module,
        loss_fn=nn.CrossEntropyLoss(),
        data=SyntheticDocuments(_LENGTH, config.vocab_size),
        default_batch_size={"cpu": 1, "cuda": 16},
        batch_sizes={"cpu": (1,), "cuda": (4, 16)},
        learning_rate=5e-5,
        channels_last=False,
    )
