"""Decoder-only language models of the kinds of Llama and Mistral."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.gpt2 import next_token_loss
from models.synthetic_text import SyntheticText
from models.workload import Workload

_ROTARY_BASE = 10_000.0


class RootMeanSquareNorm(nn.Module):
    """Divides by the root of the mean square over the last dimension, in float32, and scales."""

    def __init__(self, width: int, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) of the same, in the dtype of `x`."""
        exact = x.float()
        normalized: Tensor = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.epsilon)
        scaled: Tensor = self.weight * normalized.to(x.dtype)
        return scaled


class Attention(nn.Module):
    """Causal self-attention with rotary positions and fewer heads of keys and values than of queries.

    With a `window`, a position sees itself and so many before it but one.
    """

    cosines: Tensor
    sines: Tensor
    mask: Tensor | None

    def __init__(self, width: int, num_heads: int, num_key_heads: int, length: int, window: int | None) -> None:
        super().__init__()
        self.head_width = width // num_heads
        self.num_key_heads = num_key_heads
        self.repeats = num_heads // num_key_heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, num_key_heads * self.head_width, bias=False)
        self.value = nn.Linear(width, num_key_heads * self.head_width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        positions = torch.arange(length)
        frequencies = _ROTARY_BASE ** -(torch.arange(0, self.head_width, 2) / self.head_width)
        angles = torch.cat([positions[:, None] * frequencies] * 2, dim=-1)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)
        distances = positions[:, None] - positions
        mask = None if window is None else (distances >= 0) & (distances < window)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, length, width) of the same."""
        q, k, v = (self._heads(layer(x)) for layer in (self.query, self.key, self.value))
        q, k = self._rotated(q), self._rotated(k)
        if self.mask is None:
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            k, v = k.repeat_interleave(self.repeats, dim=1), v.repeat_interleave(self.repeats, dim=1)
            attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        output: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return output

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.head_width))
        return heads.transpose(1, 2)

    def _rotated(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        rotated: Tensor = x * self.cosines + torch.cat([-second, first], dim=-1) * self.sines
        return rotated.to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, 2020): one projection gates another."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) of the same."""
        output: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return output


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and added to what came in."""

    def __init__(self, attention: Attention, width: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = RootMeanSquareNorm(width)
        self.attention = attention
        self.norm2 = RootMeanSquareNorm(width)
        self.perceptron = FeedForward(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(N, length, width) of the same."""
        x = x + self.attention(self.norm1(x))
        output: Tensor = x + self.perceptron(self.norm2(x))
        return output


class Decoder(nn.Module):
    """A language model of Llama's design (Touvron et al., 2023), for sequences of `length` tokens.

    With a `window` its attention slides, as Mistral's does (Jiang et al., 2023). Queries have `num_heads` heads, keys
    and values `num_key_heads`.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 32_000,
        length: int = 1024,
        width: int = 768,
        num_layers: int = 12,
        num_heads: int = 12,
        num_key_heads: int = 4,
        hidden: int = 2048,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(
            *(
                Block(Attention(width, num_heads, num_key_heads, length, window), width, hidden)
                for _ in range(num_layers)
            )
        )
        self.norm = RootMeanSquareNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, length, vocabulary) of tokens (N, length) int64."""
        logits: Tensor = self.head(self.norm(self.blocks(self.embedding(x))))
        return logits


def llama(*, tiny: bool) -> Workload:
    """Llama's design with 12 layers of 768 units on sequences of 1,024 tokens."""
    return _workload("llama", None, tiny)


def mistral(*, tiny: bool) -> Workload:
    """The same with attention to the last 256 tokens alone."""
    return _workload("mistral", 4 if tiny else 256, tiny)


def _workload(name: str, window: int | None, tiny: bool) -> Workload:
    if tiny:
        module = Decoder(
            vocabulary=64, length=16, width=32, num_layers=2, num_heads=4, num_key_heads=2, hidden=64, window=window
        )
        data = SyntheticText(16, 64, num_states=16)
    else:
        module, data = Decoder(window=window), SyntheticText(1024, 32_000)
    return Workload(
        name=name,
        module=module,
        loss_fn=next_token_loss,
        data=data,
        default_batch_size={"cpu": 1, "cuda": 4},
        learning_rate=3e-4,
    )
