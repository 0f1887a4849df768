"""Maximum matchings, against trying all."""

from hypothesis import given
from hypothesis import strategies as st

from kitsune.schedule.matching import maximum_matching
from tests.kitsune.schedule.oracles import largest_matching

_NUM_RIGHT = 6


@given(st.lists(st.lists(st.integers(0, _NUM_RIGHT - 1), unique=True, max_size=3), max_size=6))
def test_a_matching_is_legal_and_as_large_as_can_be(edges: list[list[int]]) -> None:
    matching = maximum_matching(edges, _NUM_RIGHT)
    matched = {left: right for left, right in enumerate(matching) if right is not None}
    assert len(matching) == len(edges)
    assert all(right in edges[left] for left, right in matched.items())
    assert len(set(matched.values())) == len(matched)
    assert len(matched) == largest_matching({(left, right) for left, rights in enumerate(edges) for right in rights})


def test_a_greedy_choice_is_undone() -> None:
    assert maximum_matching([[0, 1], [0]], 2) == [1, 0]


def test_a_long_alternating_path_is_flipped() -> None:
    size = 3000  # far beyond what recursion allows
    edges = [[left, left + 1] for left in range(size)] + [[0]]
    assert maximum_matching(edges, size + 1) == [*range(1, size + 1), 0]


def test_the_first_choice_is_kept_where_it_costs_nothing() -> None:
    assert maximum_matching([[1, 0], [2, 0]], 3) == [1, 2]
