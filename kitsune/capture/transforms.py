"""Transforms of `torch.func` in a call that Dynamo traces.

Dynamo has a transform's operators, entering and leaving it, in its graph, so that tracing that differentiates as the
transform does. What a tensor says of itself there is private of Dynamo's variables.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.tensor import TensorVariable


@contextmanager
def requires_grad_asked() -> Iterator[None]:
    """Within, Python gets `requires_grad` as it is, and not as it was before a transform began to differentiate."""

    def ask(variable: Any, _tx: Any) -> Any:
        return ConstantVariable.create(variable.as_proxy().node.meta["example_value"].requires_grad)

    with mock.patch.object(TensorVariable, "method_attr_requires_grad", ask):
        yield
