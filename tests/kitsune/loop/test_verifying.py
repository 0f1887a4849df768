"""What runs leave behind, and how far apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kitsune.loop.verifying import State, compare, put_off

NUMBERS = {
    "float32": torch.tensor([1.0, -2.0]),
    "complex64": torch.tensor([1 + 1j, 2 - 1j]),
    "int64": torch.tensor([1, 2]),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", NUMBERS)
def test_a_difference_is_found_in_numbers_of_every_kind(dtype: str) -> None:
    """The imaginary part of complex ones included."""
    numbers = NUMBERS[dtype].clone()

    def off() -> dict[str, Tensor]:
        numbers[0] += 1j if numbers.is_complex() else 1
        return {}

    state = State({"numbers": numbers}, torch.device("cpu"))
    differences = compare(state, off, dict, lambda: 0.0, dict)
    assert differences is not None
    assert [(one.name, one.error) for one in differences] == [("numbers", 1.0)]
    assert torch.equal(numbers, NUMBERS[dtype])
    assert compare(state, dict, dict, lambda: 0.0, dict) == []


@pytest.mark.parametrize("is_coalesced", [False, True])
@pytest.mark.parametrize("row", [1, 3])
def test_a_difference_is_found_in_sparse_numbers(row: int, is_coalesced: bool) -> None:
    """In a row that is there, or in another one. Never are all rows laid out: there are too many."""
    size = (10**8, 10**5)
    rows = torch.tensor([[1, 7]])

    def sparse(rows: Tensor, values: Tensor) -> Tensor:
        made = torch.sparse_coo_tensor(rows[[0, 0]], values, size, check_invariants=True)
        return made.coalesce() if is_coalesced else made

    numbers = sparse(rows, torch.tensor([1.0, -2.0]))

    def off(by: float) -> dict[str, Tensor]:
        numbers.add_(sparse(torch.tensor([[row]]), torch.tensor([by])))
        return {}

    state = State({"numbers": numbers}, torch.device("cpu"))
    differences = compare(state, lambda: off(2.0), lambda: off(0.0), lambda: 0.0, dict)
    assert differences is not None
    assert [(one.name, one.error) for one in differences] == [("numbers", 2.0)]
    saved = state.save()
    off(3.0)
    state.load(saved)
    assert numbers.is_coalesced() == saved.values["numbers"].is_coalesced()
    assert torch.equal(numbers.coalesce().values(), saved.values["numbers"].coalesce().values())
    assert compare(state, lambda: off(2.0), lambda: off(2.0), lambda: 0.0, dict) == []


@pytest.mark.parametrize("dtype", NUMBERS)
def test_numbers_are_put_off_where_they_are_rounded(dtype: str) -> None:
    numbers = NUMBERS[dtype].clone()
    put_off([numbers], 0.01, seed=1)
    assert torch.equal(numbers, NUMBERS[dtype]) == (dtype == "int64")
    assert torch.allclose(numbers, NUMBERS[dtype], rtol=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
def test_numbers_are_put_off_by_their_own_rounding(dtype: torch.dtype) -> None:
    """Or nothing would be left to rounding in the comparison of a training in float64."""
    numbers = torch.rand(64).to(dtype) + 1
    before, eps = numbers.clone(), torch.finfo(dtype).eps
    put_off([numbers], 4 * eps, seed=1)
    assert 0 < (numbers - before).abs().max() <= 10 * eps
