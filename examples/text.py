"""A classifier of texts of different lengths: `python -m examples.text`.

A collate function pads batches to a multiple of `--pad-to`, and the last one of an epoch is smaller: Kitsune captures
the step for each shape that comes back. `--model lstm` packs its sequences by lengths that it reads on the host, which
no graph can hold; that model runs as plain PyTorch, and the status says why.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader

import kitsune
from examples.run import Run, add_options

_VOCABULARY = 200
_CLASSES = 4
_PADDING = 0

Text = tuple[Tensor, int]
Batches = DataLoader[tuple[Tensor, Tensor, Tensor]]


def synthetic_texts(count: int, longest: int, generator: torch.Generator) -> list[Text]:
    """Random tokens, of which some tell the class: one in four is of the class's own part of the vocabulary."""
    texts = []
    for index in range(count):
        label = index % _CLASSES
        length = int(torch.randint(longest // 4, longest + 1, (), generator=generator))
        tokens = torch.randint(1, _VOCABULARY, (length,), generator=generator)
        own = 1 + tokens % (_VOCABULARY // _CLASSES - 1) + label * (_VOCABULARY // _CLASSES)
        texts.append((torch.where(torch.rand(length, generator=generator) < 0.25, own, tokens), label))
    return texts


def collate(texts: Sequence[Text], pad_to: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (N, L), where they are padding (N, L), and labels (N,); L is a multiple of `pad_to`."""
    tokens = pad_sequence([text for text, _ in texts], batch_first=True, padding_value=_PADDING)
    tokens = nn.functional.pad(tokens, (0, -tokens.shape[1] % pad_to), value=_PADDING)
    return tokens, tokens == _PADDING, torch.tensor([label for _, label in texts])


class Transformer(nn.Module):
    """A transformer encoder and the mean over what is no padding."""

    def __init__(self, width: int, longest: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, width, padding_idx=_PADDING)
        self.positions = nn.Parameter(0.02 * torch.randn(longest, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        x = self.encoder(x, src_key_padding_mask=padding)
        present = ~padding[..., None]
        logits: Tensor = self.head((x * present).sum(1) / present.sum(1))
        return logits


class LSTM(nn.Module):
    """An LSTM over packed sequences, and its last state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, width, padding_idx=_PADDING)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        lengths = (~padding).sum(1).cpu()
        packed = pack_padded_sequence(self.embedding(tokens), lengths, batch_first=True, enforce_sorted=False)
        _, (state, _) = self.lstm(packed)
        logits: Tensor = self.head(state[-1])
        return logits


def main(arguments: Sequence[str] | None = None) -> Run:
    """Trains and tests."""
    parser = argparse.ArgumentParser(prog="python -m examples.text", description="A classifier of synthetic texts.")
    add_options(parser, batch_size=32)
    parser.add_argument("--model", choices=["transformer", "lstm"], default="transformer")
    parser.add_argument("--epochs", type=int, default=5, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--texts", type=int, default=4000, metavar="N", help="to train on (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=64, metavar="N", help="tokens of a text (default: %(default)s)")
    parser.add_argument("--pad-to", type=int, default=16, metavar="N", help="1: no more than the longest of a batch")
    parser.add_argument("--width", type=int, default=64, metavar="N", help="of the model (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: %(default)s)")
    options = parser.parse_args(arguments)
    run = Run(options)
    device = run.device
    source = torch.Generator().manual_seed(options.seed)
    texts = synthetic_texts(options.texts, options.longest, source)
    held_out = synthetic_texts(options.texts // 4, options.longest, source)
    padded = partial(collate, pad_to=options.pad_to)
    train: Batches = DataLoader(texts, options.batch_size, shuffle=True, collate_fn=padded)  # type: ignore[arg-type]
    test: Batches = DataLoader(held_out, options.batch_size, collate_fn=padded)  # type: ignore[arg-type]

    longest = options.longest + -options.longest % options.pad_to
    model = Transformer(options.width, longest) if options.model == "transformer" else LSTM(options.width)
    model.to(device)
    loss_fn = nn.CrossEntropyLoss()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    if not options.plain:
        optimizer = kitsune.KitsuneOptimizer(optimizer)  # <- the one changed line

    for epoch in range(1, options.epochs + 1):
        model.train()
        total = torch.zeros((), device=device)
        for batch in train:
            tokens, padding, labels = (tensor.to(device) for tensor in batch)
            optimizer.zero_grad()
            loss = loss_fn(model(tokens, padding), labels)
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(labels)

        model.eval()
        right = 0
        with torch.no_grad():
            for batch in test:
                tokens, padding, labels = (tensor.to(device) for tensor in batch)
                right += int((model(tokens, padding).argmax(1) == labels).sum())
        run.log(f"epoch {epoch}", loss=total.item() / len(texts), accuracy=right / len(held_out))
    return run.finish(optimizer)


if __name__ == "__main__":
    main()
