"""A recommender of the kind of DLRM: embeddings of categories, their products, and two perceptrons."""

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.drawing import generator
from models.workload import Workload
from models.zoo.drawn import Drawn

_NUM_NUMBERS = 13


class Recommender(nn.Module):
    """DLRM (Naumov et al., 2019): numbers and categories become vectors, whose products a perceptron judges.

    `num_tables` tables of `num_rows` vectors with `width` values each; `bottom` and `top` are the hidden layers' sizes.
    """

    pairs: Tensor

    def __init__(
        self,
        num_tables: int = 26,
        num_rows: int = 20_000,
        width: int = 64,
        bottom: int = 512,
        top: tuple[int, int] = (512, 256),
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(num_rows, width) for _ in range(num_tables))
        self.bottom = nn.Sequential(nn.Linear(_NUM_NUMBERS, bottom), nn.ReLU(), nn.Linear(bottom, width), nn.ReLU())
        pairs = torch.tril_indices(num_tables + 1, num_tables + 1, -1)
        layers: list[nn.Module] = []
        for fan_in, fan_out in itertools.pairwise((width + pairs.shape[1], *top)):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        self.top = nn.Sequential(*layers, nn.Linear(top[-1], 1))
        self.register_buffer("pairs", pairs)

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        """Logits (N, 1) of numbers (N, 13) float32 and categories (N, num_tables) int64."""
        numbers, categories = x
        dense = self.bottom(numbers)
        vectors = [dense, *(table(categories[:, index]) for index, table in enumerate(self.tables))]
        stacked = torch.stack(vectors, dim=1)
        products = stacked @ stacked.transpose(1, 2)
        logits: Tensor = self.top(torch.cat([dense, products[:, self.pairs[0], self.pairs[1]]], dim=1))
        return logits


@dataclass(frozen=True)
class Clicks(Drawn):
    """Visits that end in a click where the numbers, and the scores of the categories, add up to more than nothing."""

    num_tables: int
    num_rows: int

    def draw(self, batch_size: int, source: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Numbers (batch_size, 13) float32 and categories (batch_size, num_tables) int64; clicks (batch_size, 1)."""
        numbers = torch.randn((batch_size, _NUM_NUMBERS), generator=source)
        categories = torch.randint(self.num_rows, (batch_size, self.num_tables), generator=source)
        scores = _scores(self.num_tables, self.num_rows)[torch.arange(self.num_tables), categories]
        clicks = numbers.mean(1) * _NUM_NUMBERS**0.5 + scores.mean(1) * self.num_tables**0.5 > 0
        return (numbers, categories), clicks[:, None].float()


@functools.lru_cache(maxsize=4)
def _scores(num_tables: int, num_rows: int) -> Tensor:
    """(num_tables, num_rows) float32: what each category adds."""
    source = generator("scores of categories", num_tables, num_rows)
    return torch.randn((num_tables, num_rows), generator=source, dtype=torch.float32, device="cpu")


def click_loss(logits: Tensor, clicks: Tensor) -> Tensor:
    """The mean binary cross-entropy of logits (N, 1) against clicks (N, 1) float32, computed in float32."""
    return functional.binary_cross_entropy_with_logits(logits.float(), clicks)


def workload(*, tiny: bool) -> Workload:
    """The recommender with 26 tables of 20,000 vectors of 64 values."""
    return Workload(
        name="dlrm",
        module=Recommender(4, 50, 8, 16, (16, 16)) if tiny else Recommender(),
        loss_fn=click_loss,
        data=Clicks(4, 50) if tiny else Clicks(26, 20_000),
        default_batch_size={"cpu": 64, "cuda": 2048},
        learning_rate=1e-3,
    )
