"""A function that is captured, and a change of what it reads: the next call must not answer as before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from kitsune.errors import RefusedError
from tests.kitsune.capture.test_frontend import guarded

Build = Callable[[], tuple[Callable[[Tensor], Tensor], Callable[[], object]]]
"""Makes the function, and what makes the change; anew for each run."""


class Holder:
    """An object with whatever attributes it is given."""

    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)


def model(forward: Callable[..., Tensor], **attributes: object) -> nn.Module:
    """A module of a class of its own."""
    made: nn.Module = type("Model", (nn.Module,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def noticed(build: Build) -> str:
    """Demands that replays give what plain PyTorch does, and that none comes after the change; the reason why not."""
    x = torch.full((2,), 3.0)
    function, change = build()
    before = function(x)
    change()
    assert not torch.equal(function(x), before), "the change changes nothing"

    function, change = build()
    call, runner = guarded(lambda x: function(x))
    for _ in range(3):
        assert torch.equal(call(x), before)
    assert len(runner.graphs) == 3
    change()
    with pytest.raises(RefusedError, match="has changed") as caught:
        call(x)
    assert call.misfits
    return str(caught.value)
