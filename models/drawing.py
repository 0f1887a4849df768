"""What every synthetic data set draws with: generators that are a function of what is drawn alone."""

import hashlib

import torch


def generator(*key: object) -> torch.Generator:
    """A CPU generator whose state is a function of `key` alone; equal keys have equal `repr`."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest, "little") >> 1)


def batch_generator(data: object, batch_size: int, index: int) -> torch.Generator:
    """The generator of batch number `index` of a data set, whose `repr` tells it from others.

    Raises ValueError for a batch size below 1 or a negative index.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    if index < 0:
        raise ValueError(f"index must not be negative, not {index}")
    return generator("batch", data, batch_size, index)


def check_signal(signal: float) -> None:
    """Raises ValueError unless it is a share that leaves something to the noise."""
    if not 0 < signal < 1:
        raise ValueError(f"signal must lie between 0 and 1, not be {signal}")
