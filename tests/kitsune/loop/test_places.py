"""The containers in an object, and their names."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from kitsune.loop.places import containers


class Owner:
    def __init__(self) -> None:
        self.number = 1
        self.history = [1, 2]
        self.seen = {"a", "b"}
        self.groups = [{"lr": 0.1, "params": [1]}]
        self.state: dict[str, Any] = defaultdict(dict)
        self.state["first"]["step"] = 3
        self.kinds = {1: "x", 2: "y"}


def test_containers_have_names_and_come_once() -> None:
    owner = Owner()
    owner.state["itself"] = owner.state
    owner.state["same"] = owner.history
    found = [(name, id(container)) for name, container in containers(owner)]
    assert len({key for _, key in found}) == len(found)
    names = [name for name, _ in found]
    assert sorted(names) == sorted(["", "history", "seen", "groups", "groups", "params", "state", "first", "kinds"])
