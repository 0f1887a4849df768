"""Random programs over a few tensors, of operators that compute, view and write in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor, fx

from kitsune.capture.trace import trace

NUM_INPUTS = 3
SIDE = 4

Step = tuple[str, int, int]
Program = list[Step]
Operator = Callable[[Tensor, Tensor], Tensor]

# Every operator maps one or two (SIDE, SIDE) tensors to another. All that write change what they write.
OPERATORS: dict[str, Operator] = {
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


def _batch_norm(a: Tensor, b: Tensor) -> Tensor:
    statistics = b.clone().abs() + 1
    result = torch.nn.functional.batch_norm(a, b[0], statistics[1], training=True)
    return result + statistics


# Random numbers, memory without content, several results, writes that a schema hides, strides changed in place.
WIDER_OPERATORS: dict[str, Operator] = OPERATORS | {
    "dropout": lambda a, b: torch.nn.functional.dropout(a, 0.5),
    "uniform_": lambda a, b: a.uniform_(),
    "rand": lambda a, b: torch.rand_like(a) + b,
    "empty": lambda a, b: torch.empty_like(a).copy_(b),
    "empty_view": lambda a, b: a.new_empty(SIDE * SIDE).view(SIDE, SIDE).copy_(b).t(),
    "zeros": lambda a, b: a.new_zeros(SIDE, SIDE),
    "constant": lambda a, b: a * torch.tensor(1.5),
    "sort": lambda a, b: torch.sort(a)[0],
    "sorted_places": lambda a, b: torch.sort(a)[1] + b,
    "split": lambda a, b: torch.cat([*a.split(1)][::-1]),
    "unbind_": lambda a, b: (a.unbind(0)[1].add_(b.sum().abs() + 1), a)[1],
    "list": lambda a, b: torch._foreach_mul([a, b], 0.5)[1],
    "batch_norm": _batch_norm,
    "t_": lambda a, b: a.t_(),
    "out": lambda a, b: torch.add(a, b, out=torch.empty(SIDE, SIDE)),
}


def programs_of(operators: Mapping[str, Operator], *, max_size: int = 12) -> st.SearchStrategy[Program]:
    steps = st.tuples(st.sampled_from(sorted(operators)), st.integers(0, 30), st.integers(0, 30))
    return st.lists(steps, min_size=1, max_size=max_size)


programs = programs_of(OPERATORS)


def run(program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The last two values that the program computes."""
    values = list(inputs)
    for name, first, second in program:
        values.append(WIDER_OPERATORS[name](values[first % len(values)], values[second % len(values)]))
    return [values[-1], values[-1 - len(values) % 2]]


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SIDE, SIDE, generator=generator) for _ in range(NUM_INPUTS)]


def traced(program: Program) -> fx.GraphModule:
    return trace(lambda *values: run(program, values), inputs())
