"""What a process keeps of captures, as a process of its own: `python -m tests.kitsune.memory_growth --form drop_in`.

Prints JSON: how much the memory and the number of Python's blocks have grown from the end of the warm-up on.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import kitsune

STEPS_PER_SHAPE = 3  # eager, captured, replayed


def network(layers: int) -> nn.Module:
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(16, 16), nn.ReLU())), nn.Linear(16, 4))


def training(form: str, model: nn.Module, mode: str) -> tuple[Callable[[int], None], Any]:
    """A step of training `model` with a batch of the size that it is given, and what tells its status."""
    optimizer: Any = torch.optim.Adam(model.parameters())
    if form == "train_step":
        step = kitsune.TrainStep(model, functional.mse_loss, optimizer, mode=mode, setup_share=1.0)
        return lambda size: (step(torch.randn(size, 16), torch.randn(size, 4)), None)[1], step
    if form != "plain":
        optimizer = kitsune.KitsuneOptimizer(optimizer, mode=mode, defer_loss=form == "deferred", setup_share=1.0)

    def iterate(size: int) -> None:
        optimizer.zero_grad()
        functional.mse_loss(model(torch.randn(size, 16)), torch.randn(size, 4)).backward()
        optimizer.step()

    return iterate, optimizer


def shapes(options: argparse.Namespace) -> Iterator[Any]:
    """One model, and batches of ever new sizes, each of which comes back."""
    iterate, told = training(options.form, network(options.layers), options.mode)
    for size in range(1, options.warm_up + options.count + 1):
        for _ in range(STEPS_PER_SHAPE):
            iterate(size)
        yield told


def models(options: argparse.Namespace) -> Iterator[Any]:
    """Models that are made, trained and dropped."""
    for _ in range(options.warm_up + options.count):
        iterate, told = training(options.form, network(options.layers), options.mode)
        for _ in range(STEPS_PER_SHAPE):
            iterate(8)
        yield told
        del iterate, told


def steps(options: argparse.Namespace) -> Iterator[Any]:
    """One model, and batches of three sizes by turns."""
    iterate, told = training(options.form, network(options.layers), options.mode)
    for index in range(options.warm_up + options.count):
        iterate(8 + index % 3)
        yield told


def resident_bytes() -> int:
    kilobytes = Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]
    return int(kilobytes) * 1024


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rounds = {"shapes": shapes, "models": models, "steps": steps}[options.what](options)
    for index, latest in enumerate(rounds, start=1):
        if index == options.warm_up:
            gc.collect()
            blocks, resident = sys.getallocatedblocks(), resident_bytes()
        told = latest
    status = None if options.form == "plain" else told.status()
    rounds.close()
    del latest, told, rounds
    gc.collect()
    return {
        "blocks": sys.getallocatedblocks() - blocks,
        "resident_bytes": resident_bytes() - resident,
        "replays": 0 if status is None else status.replays,
        "refusals": [] if status is None else status.refusals,
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", choices=("shapes", "models", "steps"), default="shapes")
    parser.add_argument("--form", choices=("plain", "drop_in", "deferred", "train_step"), default="drop_in")
    parser.add_argument("--mode", choices=("auto", "replay"), default="replay")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--count", type=int, default=10)
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(measure(parsed())))
