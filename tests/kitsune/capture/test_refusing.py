from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo import exc
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables.builder import VariableBuilder

from kitsune.capture.refusing import for_good, refuse, take_back

SAID = "it is not to be"


def swallowed(is_taken_back: bool) -> Any:
    """Whatever the call reads is refused, and Dynamo goes on all the same."""
    wrap = VariableBuilder._wrap

    def wrapped(builder: Any, value: Any) -> Any:
        try:
            refuse(SAID)
        except exc.Unsupported as error:
            if is_taken_back:
                take_back(error)
        return wrap(builder, value)

    return mock.patch.object(VariableBuilder, "_wrap", wrapped)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.fixture
def compiled() -> Any:
    torch._dynamo.reset()
    return torch.compile(double, backend="eager", fullgraph=True)


def test_a_refusal_holds_where_dynamo_goes_on(compiled: Any) -> None:
    with swallowed(is_taken_back=False), for_good(), pytest.raises(exc.Unsupported, match=SAID) as raised:
        compiled(torch.ones(2))
    assert "x * 2" in str(raised.value)  # the line that was refused


def test_one_that_is_taken_back_does_not(compiled: Any) -> None:
    with swallowed(is_taken_back=True), for_good():
        assert compiled(torch.ones(2)).tolist() == [2, 2]


def test_it_holds_for_one_capture(compiled: Any) -> None:
    with for_good(), pytest.raises(exc.Unsupported, match=SAID):
        refuse(SAID)
    with for_good():
        assert compiled(torch.ones(2)).tolist() == [2, 2]
    assert OutputGraph.compile_subgraph.__module__ == "torch._dynamo.output_graph"
