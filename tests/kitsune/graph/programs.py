"""Random programs over a few tensors, of operators that compute, view and write in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor, fx

from kitsune.capture.trace import trace

NUM_INPUTS = 3
SIDE = 4

Step = tuple[str, int, int]
Program = list[Step]

# Every operator maps one or two (SIDE, SIDE) tensors to another. All that write change what they write.
OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b,
    "matmul": lambda a, b: a @ b,
    "transpose": lambda a, b: a.t(),
    "view": lambda a, b: a.reshape(-1).view(SIDE, SIDE),
    "alias": lambda a, b: a[:],
    "detach": lambda a, b: a.detach(),
    "add_": lambda a, b: a.add_(1.5),
    "add_other_": lambda a, b: a.add_(b.abs() + 1),
    "row_": lambda a, b: (a[0].add_(2.5), a)[1],
    "column_": lambda a, b: (a.t()[1].sub_(1.25), b)[1],
    "fill_": lambda a, b: a.copy_(b.abs() + a.abs() + 1),
    "list_": lambda a, b: (torch._foreach_add_([a], 3.5), a)[1],
}

programs: st.SearchStrategy[Program] = st.lists(
    st.tuples(st.sampled_from(sorted(OPERATORS)), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=12
)


def run(program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The last two values that the program computes."""
    values = list(inputs)
    for name, first, second in program:
        values.append(OPERATORS[name](values[first % len(values)], values[second % len(values)]))
    return [values[-1], values[-1 - len(values) % 2]]


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SIDE, SIDE, generator=generator) for _ in range(NUM_INPUTS)]


def traced(program: Program) -> fx.GraphModule:
    return trace(lambda *values: run(program, values), inputs())
