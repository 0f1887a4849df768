"""`transformers.Trainer`, given an optimizer that is wrapped in one line: `python -m examples.with_trainer`."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

import kitsune
from examples.run import Run, add_options
from models import torchvision_loading
from models.synthetic_text import SyntheticDocuments

torchvision_loading.import_torchvision("transforms")  # transformers does, and fails where operators of it are missing

from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class Documents(Dataset[dict[str, Tensor]]):
    """Synthetic documents as `transformers` takes them."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        self.tokens, self.labels = SyntheticDocuments(length, vocabulary, signal=0.5).batch(count)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


class Logging(TrainerCallback):
    """Passes the losses on."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs is not None and "loss" in logs:
            self._run.log(f"step {state.global_step}", loss=float(logs["loss"]))


def main(arguments: Sequence[str] | None = None) -> Run:
    """Trains a small BERT to tell documents apart."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.with_trainer", description="BERT with transformers.Trainer."
    )
    add_options(parser, batch_size=16)
    parser.add_argument("--documents", type=int, default=2000, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--width", type=int, default=128, help="of a token (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="batches to an update (default: 1)")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    options = parser.parse_args(arguments)
    run = Run(options)
    config = BertConfig(
        vocab_size=1000,
        hidden_size=options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        intermediate_size=4 * options.width,
        max_position_embeddings=64,
    )
    model = BertForSequenceClassification(config)  # type: ignore[no-untyped-call]  # of two classes
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    if not options.plain:
        optimizer = kitsune.KitsuneOptimizer(optimizer)  # <- the one changed line

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=options.batch_size,
                gradient_accumulation_steps=options.accumulate,
                num_train_epochs=options.epochs,
                dataloader_drop_last=True,
                logging_steps=5,
                bf16=options.bf16,
                use_cpu=run.device.type == "cpu",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                seed=options.seed,
            ),
            train_dataset=Documents(options.documents, 32, 1000),
            optimizers=(optimizer, None),
            callbacks=[Logging(run)],
        )
        trainer.train()
    return run.finish(optimizer)


if __name__ == "__main__":
    main()
