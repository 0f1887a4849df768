"""A language model of the kind of Mamba: selective state spaces, scanned position by position."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.gpt2 import next_token_loss
from models.synthetic_text import SyntheticText
from models.workload import Workload

_CONVOLVED = 4


class SelectiveStateSpace(nn.Module):
    """The mixer of Mamba (Gu and Dao, 2023) in plain PyTorch: the scan is a loop over positions.

    `width` units become twice as many inside, each with `num_states` states.
    """

    def __init__(self, width: int, num_states: int) -> None:
        super().__init__()
        inner, rank = 2 * width, max(1, width // 16)
        self.num_states, self.rank = num_states, rank
        self.input = nn.Linear(width, 2 * inner, bias=False)
        self.convolution = nn.Conv1d(inner, inner, _CONVOLVED, groups=inner, padding=_CONVOLVED - 1)
        self.selection = nn.Linear(inner, rank + 2 * num_states, bias=False)
        self.step = nn.Linear(rank, inner)
        self.log_decay = nn.Parameter(torch.log(torch.arange(1.0, num_states + 1)).repeat(inner, 1))
        self.skip = nn.Parameter(torch.ones(inner))
        self.output = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, length, width) of the same."""
        length = x.shape[1]
        inner, gate = self.input(x).chunk(2, dim=-1)
        inner = self.convolution(inner.transpose(1, 2))[..., :length].transpose(1, 2)
        inner = functional.silu(inner)
        output: Tensor = self.output(self._scanned(inner) * functional.silu(gate))
        return output

    def _scanned(self, inner: Tensor) -> Tensor:
        """(N, length, inner) of the same: the recurrence over positions, whose coefficients depend on the input."""
        rank, writes, reads = self.selection(inner).split([self.rank, self.num_states, self.num_states], dim=-1)
        steps = functional.softplus(self.step(rank))
        decays = torch.exp(steps[..., None] * -torch.exp(self.log_decay))
        inputs = (steps * inner)[..., None] * writes[..., None, :]
        state = torch.zeros_like(inputs[:, 0])
        outputs = []
        for decay, added, read in zip(decays.unbind(1), inputs.unbind(1), reads.unbind(1), strict=True):
            state = decay * state + added
            outputs.append((state * read[:, None]).sum(-1))
        return torch.stack(outputs, dim=1) + inner * self.skip


class StateSpaceModel(nn.Module):
    """A language model of selective state spaces, each behind a norm and added to what came in."""

    def __init__(self, vocabulary: int = 8192, width: int = 256, num_layers: int = 4, num_states: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(num_layers))
        self.mixers = nn.ModuleList(SelectiveStateSpace(width, num_states) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, length, vocabulary) of tokens (N, length) int64."""
        hidden = self.embedding(x)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            hidden = hidden + mixer(norm(hidden))
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def workload(*, tiny: bool) -> Workload:
    """Four selective state spaces of 256 units on sequences of 64 tokens."""
    return Workload(
        name="mamba",
        module=StateSpaceModel(64, 16, 2, 4) if tiny else StateSpaceModel(),
        loss_fn=next_token_loss,
        data=SyntheticText(8, 64, num_states=16) if tiny else SyntheticText(64, 8192),
        default_batch_size={"cpu": 2, "cuda": 8},
        learning_rate=1e-3,
    )
