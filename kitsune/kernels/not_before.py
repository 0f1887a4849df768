"""`kitsune::not_before`: a value once more, which is not read before another one is there."""

from __future__ import annotations

import torch

# The schema is silent about the result being the value itself, in the same memory: passes that leave out views which
# show what is there already would leave out this one. What shares memory they ask of the values.
torch.library.define("kitsune::not_before", "(Tensor value, Tensor other) -> Tensor")


def _not_before(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return value.detach()


torch.library.register_fake("kitsune::not_before", _not_before)
torch.library.impl("kitsune::not_before", "CompositeExplicitAutograd", _not_before)

not_before = torch.ops.kitsune.not_before.default
