"""A small model of a family, with batches to train it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from torch import Tensor, nn

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Sample:
    """A model that is trained.

    Attributes:
        loss: called with the model and a batch, by names.
        batch: a function of its number alone.
    """

    model: nn.Module
    loss: Callable[..., Tensor]
    batch: Callable[[int], Batch]


class Library(Protocol):
    """A module that knows one library."""

    def missing(self) -> str | None:
        """Why the library cannot be used, and what to do; None if it can be."""

    def versions(self) -> dict[str, str]:
        """By name, of the library and of what it needs, beside torch."""

    def families(self) -> list[str]:
        """Of which there is a sample each."""

    def model_of(self, family: str) -> str:
        """The name of a small model of a family."""

    def build(self, model: str) -> Sample:
        """Random parameters, from torch's random state; nothing is downloaded."""


LIBRARIES = {
    "timm": "tests.benchmarks.coverage.timm_models",
    "transformers": "tests.benchmarks.coverage.transformers_models",
}
"""By name, the module of each."""


def library(module: str) -> Library:
    """What a module knows, by its name."""
    found: Any = importlib.import_module(module)
    return cast(Library, found)
