"""What a benchmark trains: a module with its loss, its data, and the sizes that make sense for each device."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Inputs = Tensor | tuple[Tensor, ...]
"""The one argument of a workload's module: a tensor, or a tuple of them."""


def tensors_of(x: Inputs) -> tuple[Tensor, ...]:
    """The tensors that a module is given, one or several."""
    return x if isinstance(x, tuple) else (x,)


def map_tensors(change: Callable[[Tensor], Tensor], x: Inputs) -> Inputs:
    """What a module is given, each tensor of it changed."""
    return tuple(map(change, x)) if isinstance(x, tuple) else change(x)


class Data(Protocol):
    """An endless set of examples, cut into numbered batches."""

    def batch(self, batch_size: int, *, index: int = 0, device: torch.device | str = "cpu") -> tuple[Inputs, Tensor]:
        """Batch number `index`: what the module takes, and what the loss compares its output with.

        Both have `batch_size` rows, are functions of data set, size and index alone, and are the caller's to change.
        Different numbers are fresh draws. torch's global random state is left as it is.
        Raises ValueError for a batch size below 1 or a negative index.
        """
        ...


@dataclass(frozen=True, eq=False)
class Workload:
    """One model, ready to train. `module` is the caller's to train and to move; everything else is constant."""

    name: str
    module: nn.Module
    """On the CPU, float32, in train mode, initialized from the seed that `build` was given."""
    loss_fn: Callable[[Any, Tensor], Tensor]
    """`loss_fn(module(x), y)` is the mean loss of a batch, a float32 scalar. The module may return several tensors."""
    data: Data
    default_batch_size: Mapping[str, int]
    """By device type: "cpu" and "cuda"."""
    batch_sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The sizes of a sweep, ascending, by device type; the default is among them. None are the default alone."""
    learning_rate: float = 1e-3
    """For Adam on the synthetic data."""
    channels_last: bool = False
    """Whether an expert would train it in `torch.channels_last`."""

    def batch(self, batch_size: int, *, index: int = 0, device: torch.device | str = "cpu") -> tuple[Inputs, Tensor]:
        """Batch number `index` of the synthetic data: see `Data.batch`."""
        return self.data.batch(batch_size, index=index, device=device)


@contextlib.contextmanager
def initialization(seed: int) -> Iterator[None]:
    """Modules built inside are float32 on the CPU and a function of `seed`; torch's global state is as before after."""
    with torch.random.fork_rng(devices=[]), float32_on_the_cpu():
        torch.default_generator.manual_seed(seed)
        yield


@contextlib.contextmanager
def float32_on_the_cpu() -> Iterator[None]:
    """Tensors made inside are float32 on the CPU where nothing else is asked for."""
    default_dtype = torch.get_default_dtype()
    with torch.device("cpu"):
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(default_dtype)
