"""Deterministic token sequences with learnable structure, for training language models without any file or network."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from models.drawing import batch_generator, check_signal, generator

_NUM_SUCCESSORS = 4


@dataclass(frozen=True)
class SyntheticDocuments:
    """An endless set of labelled documents, cut into numbered batches.

    Tokens are independent draws from Zipf-like distributions, as words of texts are: some from the class's own, with
    frequent tokens of its own, the others from one that all classes share. Batches are drawn as those of
    `SyntheticImages`: the same everywhere, and fresh for every number.
    """

    length: int
    vocabulary: int
    num_classes: int = 2
    seed: int = 0
    signal: float = 0.3
    """The share of a document's tokens that its class decides, in (0, 1)."""

    def __post_init__(self) -> None:
        check_signal(self.signal)

    def batch(self, batch_size: int, *, index: int = 0, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Batch number `index`: tokens (batch_size, length) int64 and labels (batch_size,) int64.

        Raises ValueError for a batch size below 1 or a negative index.
        """
        source = batch_generator(self, batch_size, index)
        shape = (batch_size, self.length)
        labels = torch.randint(self.num_classes, (batch_size,), generator=source, device="cpu")
        own = torch.rand(shape, generator=source, dtype=torch.float64, device="cpu") < self.signal
        uniform = torch.rand(shape, generator=source, dtype=torch.float64, device="cpu")
        ranks = ((self.vocabulary + 1) ** uniform).long() - 1  # rank k with a probability close to 1 / (k + 1)
        tables = _tokens_by_rank(self.vocabulary, self.num_classes + 1, self.seed)
        tokens = tables[torch.where(own, labels[:, None], self.num_classes), ranks]
        return tokens.to(device), labels.to(device)


@dataclass(frozen=True)
class SyntheticText:
    """An endless text, cut into numbered batches of sequences: a Markov chain over some tokens of the vocabulary.

    After each of these tokens one of four follows, all equally likely: no model's loss on fresh batches can be expected
    to fall below log 4. Batches are drawn as those of `SyntheticImages`: the same everywhere, and fresh for every
    number.
    """

    length: int
    vocabulary: int
    num_states: int = 256
    """How many of the vocabulary's tokens occur."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not _NUM_SUCCESSORS <= self.num_states <= self.vocabulary:
            raise ValueError(
                f"num_states must lie between {_NUM_SUCCESSORS} and the vocabulary's {self.vocabulary}, "
                f"not be {self.num_states}"
            )

    def batch(self, batch_size: int, *, index: int = 0, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Batch number `index`: tokens and the tokens after them, both (batch_size, length) int64.

        Raises ValueError for a batch size below 1 or a negative index.
        """
        source = batch_generator(self, batch_size, index)
        tokens, successors = _chain(self.vocabulary, self.num_states, self.seed)
        state = torch.randint(self.num_states, (batch_size,), generator=source, device="cpu")
        choices = torch.randint(_NUM_SUCCESSORS, (self.length, batch_size), generator=source, device="cpu")
        states = [state]
        for choice in choices:
            state = successors[state, choice]
            states.append(state)
        text = tokens[torch.stack(states, dim=1)]
        return text[:, :-1].contiguous().to(device), text[:, 1:].contiguous().to(device)


@functools.lru_cache(maxsize=8)
def _tokens_by_rank(vocabulary: int, num_tables: int, seed: int) -> Tensor:
    """(num_tables, vocabulary) int64: in each row all tokens, the most frequent first."""
    source = generator("tokens by rank", vocabulary, num_tables, seed)
    return torch.stack([torch.randperm(vocabulary, generator=source, device="cpu") for _ in range(num_tables)])


@functools.lru_cache(maxsize=8)
def _chain(vocabulary: int, num_states: int, seed: int) -> tuple[Tensor, Tensor]:
    """The token of each state, (num_states,) int64, and the states that may follow it, (num_states, 4) int64."""
    source = generator("chain", vocabulary, num_states, seed)
    tokens = torch.randperm(vocabulary, generator=source, device="cpu")[:num_states]
    orders = torch.rand((num_states, num_states), generator=source, dtype=torch.float64, device="cpu")
    return tokens, orders.argsort(dim=1)[:, :_NUM_SUCCESSORS]
