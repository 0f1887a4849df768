"""DistilBERT from transformers, classifying documents."""

from torch import nn

from models.synthetic_text import SyntheticDocuments
from models.transformers_loading import Logits, attention_without_masks, import_transformers
from models.workload import Workload


def workload(*, tiny: bool) -> Workload:
    """DistilBERT (Sanh et al., 2019) on documents of 128 tokens and two classes, without dropout."""
    transformers = import_transformers()
    sizes = {"vocab_size": 64, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32} if tiny else {}
    config = transformers.DistilBertConfig(
        num_labels=2,
        dropout=0.0,
        attention_dropout=0.0,
        seq_classif_dropout=0.0,
        attn_implementation=attention_without_masks(),
        **sizes,
    )
    return Workload(
        name="distilbert",
        module=Logits(transformers.DistilBertForSequenceClassification(config)),
        loss_fn=nn.CrossEntropyLoss(),
        data=SyntheticDocuments(8 if tiny else 128, config.vocab_size),
        default_batch_size={"cpu": 1, "cuda": 32},
        learning_rate=5e-5,
    )
