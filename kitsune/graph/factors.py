"""Values told as views of other values, whatever the strides: by the factors that the sizes of both consist of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True, eq=False)
class Factor:
    """A part of a dimension, of more than one element."""

    size: int


Dims = tuple[tuple[Factor, ...], ...]
"""For each dimension its factors, the outermost first; none where it has one element."""


@dataclass(frozen=True)
class Form:
    """A value of before, told as another order of the factors of a value of now.

    Attributes:
        base: has the elements.
        split: its dimensions.
        dims: those of the value of before, of the same factors.
    """

    base: fx.Node
    split: Dims
    dims: Dims

    def strides(self) -> dict[Factor, int]:
        """The distances of neighbours along each factor, if the base lies as it was traced."""
        found: dict[Factor, int] = {}
        for factors, stride in zip(self.split, self.base.meta["val"].stride(), strict=True):
            for factor in reversed(factors):
                found[factor] = stride
                stride *= factor.size
        return found

    def refined(self, sizes: Sequence[Sequence[int]], *, of_base: bool = False) -> Form:
        """With factors of these sizes in the dimensions, or in those of the base; these are parts of those it has."""
        parts: dict[Factor, tuple[Factor, ...]] = {}
        for factors, wanted in zip(self.split if of_base else self.dims, sizes, strict=True):
            left = list(wanted)
            for factor in factors:
                taken: list[Factor] = []
                while math.prod(part.size for part in taken) < factor.size:
                    taken.append(Factor(left.pop(0)))
                parts[factor] = tuple(taken) if len(taken) > 1 else (factor,)

        def replaced(dims: Dims) -> Dims:
            return tuple(tuple(part for one in factors for part in parts[one]) for factors in dims)

        return Form(self.base, replaced(self.split), replaced(self.dims))

    def renamed(self) -> Form:
        """With factors of its own."""
        own = {factor: Factor(factor.size) for factor in itertools.chain(*self.split)}
        split, dims = (
            tuple(tuple(map(own.__getitem__, factors)) for factors in one) for one in (self.split, self.dims)
        )
        return Form(self.base, split, dims)

    def as_it_lies(self) -> Dims:
        """The dimensions, each with its factors in the order in which they lie."""
        strides = self.strides()
        return tuple(tuple(sorted(factors, key=lambda one: -strides[one])) for factors in self.dims)

    def permuted(self, order: Sequence[int]) -> Form:
        """With its dimensions in this order."""
        return Form(self.base, self.split, tuple(self.dims[place] for place in order))

    def regrouped(self, sizes: Sequence[int]) -> Form | None:
        """With dimensions of other sizes, of the same elements; None if they are not of the same factors."""
        whole = Form(self.base, self.split, (tuple(itertools.chain(*self.dims)),))
        common = common_parts([sizes_of(whole.dims), [[size for size in sizes if size > 1]]])
        if common is None:
            return None
        refined = whole.refined(common)
        left, dims = list(refined.dims[0]), []
        for size in sizes:
            dim: list[Factor] = []
            while size_of(dim) < size:
                dim.append(left.pop(0))
            dims.append(tuple(dim))
        return Form(refined.base, refined.split, tuple(dims))


def of_itself(node: fx.Node) -> Form:
    """A value that is told as what it is."""
    dims = tuple((Factor(size),) if size > 1 else () for size in node.meta["val"].size())
    return Form(node, dims, dims)


def common_parts(splits: Sequence[Sequence[Sequence[int]]]) -> list[list[int]] | None:
    """For each dimension the sizes of the parts that all these splits of it consist of, as few as there may be.

    Args:
        splits: of a tensor's dimensions, each into sizes whose product it is, the outermost first.

    Returns:
        None if there are no such parts, as of 6 into 2 times 3 and into 3 times 2.
    """
    found: list[list[int]] = []
    for dims in zip(*splits, strict=True):
        ends = {math.prod(sizes[place:]) for sizes in dims for place in range(len(sizes))}
        parts: list[int] = []
        last = 1
        for end in sorted(ends):
            if end % last:
                return None
            parts.insert(0, end // last)
            last = end
        found.append(parts)
    return found


def sizes_of(dims: Dims) -> list[list[int]]:
    return [[factor.size for factor in factors] for factors in dims]


def size_of(factors: Sequence[Factor]) -> int:
    return math.prod(factor.size for factor in factors)
