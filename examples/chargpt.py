"""A small GPT that learns the characters of this repository's documentation: `python -m examples.chargpt`.

The loop of https://github.com/karpathy/nanoGPT: AdamW with weight decay for matrices only, gradients accumulated over
several batches and clipped by norm, a learning rate that warms up and decays along a cosine, set by hand.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import kitsune
from examples.run import Run, add_options

_ROOT = Path(__file__).resolve().parent.parent


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each added to what it takes."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        x = x + functional.dropout(self.out(y.transpose(1, 2).reshape(x.shape)), self.dropout, self.training)
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class GPT(nn.Module):
    """Decoder-only transformer; the embedding of characters is also the last layer."""

    def __init__(self, vocabulary: int, context: int, width: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.context = context
        self.characters, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.characters.weight
        for param in self.parameters():
            if param.dim() == 2:
                nn.init.normal_(param, std=0.02)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (N, L, vocabulary) of characters (N, L), or their loss where there are `targets` (N, L)."""
        positions = torch.arange(x.shape[1], device=x.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.characters(x) + self.positions(positions))))
        if targets is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, x: Tensor, count: int) -> Tensor:
        """`x` (N, L), continued by `count` characters."""
        for _ in range(count):
            logits = self(x[:, -self.context :])
            x = torch.cat([x, torch.multinomial(logits[:, -1].softmax(-1), 1)], dim=1)
        return x


def main(arguments: Sequence[str] | None = None) -> Run:
    """Trains, evaluates and writes some text."""
    options = _parse(arguments)
    run = Run(options)
    device = run.device
    text = "\n".join(path.read_text(encoding="utf-8") for path in options.text)
    characters = sorted(set(text))
    data = torch.tensor([characters.index(character) for character in text])
    parts = {"train": data[: len(data) * 9 // 10], "val": data[len(data) * 9 // 10 :]}

    def get_batch(part: str) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(parts[part]) - options.context, (options.batch_size, 1))
        windows = parts[part][starts + torch.arange(options.context + 1)].to(device)
        return windows[:, :-1], windows[:, 1:]

    @torch.no_grad()
    def estimate_loss(part: str) -> float:
        model.eval()
        losses = [model(*get_batch(part)).item() for _ in range(options.eval_batches)]
        model.train()
        return float(sum(losses) / len(losses))

    model = GPT(len(characters), options.context, options.width, options.heads, options.layers, options.dropout)
    model.to(device)
    matrices = [param for param in model.parameters() if param.dim() >= 2]
    vectors = [param for param in model.parameters() if param.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.99))
    if not options.plain:
        optimizer = kitsune.KitsuneOptimizer(optimizer)  # <- the one changed line

    for iteration in range(1, options.iterations + 1):
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(iteration, options)
        mean = torch.zeros((), device=device)
        for _ in range(options.accumulate):
            x, y = get_batch("train")
            loss = model(x, y) / options.accumulate
            loss.backward()
            mean += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if iteration % options.log_interval == 0:
            run.log(f"iteration {iteration}", loss=mean.item(), lr=optimizer.param_groups[0]["lr"])
        if iteration % options.eval_interval == 0:
            losses = {f"{part}_loss": estimate_loss(part) for part in parts}
            run.log(f"iteration {iteration}, evaluated", **losses)

    model.eval()
    start = torch.tensor([[characters.index("\n")]], device=device)
    print("".join(characters[index] for index in model.generate(start, options.generate)[0].tolist()))
    return run.finish(optimizer)


def _learning_rate(iteration: int, options: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if iteration <= options.warmup:
        return float(options.lr * iteration / options.warmup)
    progress = (iteration - options.warmup) / (options.iterations - options.warmup)
    return float(options.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress))))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.chargpt", description="A GPT that learns characters.")
    add_options(parser, batch_size=16)
    own = [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]
    parser.add_argument("--text", type=Path, nargs="+", default=own, help="what to learn (default: the documentation)")
    parser.add_argument("--iterations", type=int, default=2000, metavar="N", help="updates (default: %(default)s)")
    parser.add_argument("--accumulate", type=int, default=4, metavar="N", help="batches per update")
    parser.add_argument("--lr", type=float, default=1e-3, help="the highest learning rate (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=100, metavar="N", help="updates until it is reached")
    parser.add_argument("--context", type=int, default=128, metavar="N", help="characters that the model sees")
    parser.add_argument("--width", type=int, default=128, metavar="N")
    parser.add_argument("--heads", type=int, default=4, metavar="N")
    parser.add_argument("--layers", type=int, default=4, metavar="N")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--log-interval", type=int, default=20, metavar="N")
    parser.add_argument("--eval-interval", type=int, default=200, metavar="N")
    parser.add_argument("--eval-batches", type=int, default=20, metavar="N")
    parser.add_argument("--generate", type=int, default=400, metavar="N", help="characters to write at the end")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
