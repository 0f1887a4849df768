from __future__ import annotations

import os
import threading

import pytest

from harness import parallel
from harness.parallel import mapped


def process_of(number: int) -> tuple[int, int]:
    return number, os.getpid()


def refuse(number: int) -> int:
    raise ValueError(f"{number} is refused")


@pytest.mark.usefixtures("no_other_threads")
@pytest.mark.parametrize("count", [0, 1, 2, 3, 100])
def test_results_are_in_the_order_of_the_items(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_processors", lambda: 3)
    found = mapped(process_of, range(count), is_long=True)
    assert [number for number, _ in found] == list(range(count))
    assert (os.getpid() in {process for _, process in found}) == (count == 1)


@pytest.mark.parametrize(("is_long", "processors", "methods"), [
    (False, 3, ["fork"]), (True, 1, ["fork"]), (True, 3, ["spawn"]),
])  # fmt: skip
def test_where_it_is_not_worth_it_no_process_is_started(
    is_long: bool, processors: int, methods: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "_processors", lambda: processors)
    monkeypatch.setattr(parallel.multiprocessing, "get_all_start_methods", lambda: methods)
    assert mapped(process_of, range(10), is_long=is_long) == [(number, os.getpid()) for number in range(10)]


def test_beside_other_threads_no_process_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_processors", lambda: 3)
    end = threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()
    try:
        assert mapped(process_of, range(10), is_long=True) == [(number, os.getpid()) for number in range(10)]
    finally:
        end.set()
        other.join()


@pytest.mark.usefixtures("no_other_threads")
def test_the_function_need_not_be_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_processors", lambda: 2)
    tripled = {number: 3 * number for number in range(10)}
    assert mapped(lambda number: tripled[number], range(10), is_long=True) == list(tripled.values())


@pytest.mark.usefixtures("no_other_threads")
@pytest.mark.parametrize("is_long", [False, True])
def test_what_the_function_raises_is_raised(is_long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_processors", lambda: 2)
    with pytest.raises(ValueError, match="0 is refused"):
        mapped(refuse, range(3), is_long=is_long)
