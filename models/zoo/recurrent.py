"""A recurrent language model."""

from torch import Tensor, nn

from models.gpt2 import next_token_loss
from models.synthetic_text import SyntheticText
from models.workload import Workload


class RecurrentLanguageModel(nn.Module):
    """Two LSTM layers between an embedding and a linear layer (Zaremba et al., 2014), without dropout."""

    def __init__(self, vocabulary: int = 10_000, width: int = 640) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, length, vocabulary) of tokens (N, length) int64; each sequence begins with states of 0."""
        hidden, _ = self.lstm(self.embedding(x))
        logits: Tensor = self.head(hidden)
        return logits


def workload(*, tiny: bool) -> Workload:
    """The LSTM of 640 units on sequences of 64 tokens."""
    return Workload(
        name="lstm",
        module=RecurrentLanguageModel(64, 16) if tiny else RecurrentLanguageModel(),
        loss_fn=next_token_loss,
        data=SyntheticText(8, 64, num_states=16) if tiny else SyntheticText(64, 10_000),
        default_batch_size={"cpu": 4, "cuda": 32},
        learning_rate=1e-3,
    )
