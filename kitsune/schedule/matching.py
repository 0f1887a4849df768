"""Maximum matching in bipartite graphs."""

from __future__ import annotations

from kitsune.schedule.edges import Edges

_FREE = -1


def maximum_matching(edges: Edges, num_right: int) -> list[int | None]:
    """A largest set of edges that share no vertex: by index of the left vertex, its right one, or None.

    Hopcroft and Karp (1973), O(edges * sqrt(vertices)), after a greedy start that gives each left vertex, in order,
    the first of its right ones that is free. A vertex that is matched once stays matched.

    Args:
        edges: by index of the left vertex, its right vertices, the preferred ones first.
        num_right: how many right vertices there are.
    """
    partner = [_FREE] * len(edges)
    owner = [_FREE] * num_right
    for left, rights in enumerate(edges):
        for right in rights:
            if owner[right] == _FREE:
                partner[left], owner[right] = right, left
                break
    while (levels := _levels(edges, partner, owner)) is not None:
        tried = [0] * len(edges)
        for left, right in enumerate(partner):
            if right == _FREE and edges[left]:
                _augment(left, edges, partner, owner, levels, tried)
    return [None if right == _FREE else right for right in partner]


def _levels(edges: Edges, partner: list[int], owner: list[int]) -> list[int] | None:
    """By index of the left vertex, its distance from a free one along alternating paths; None if none ends free."""
    frontier = [left for left, right in enumerate(partner) if right == _FREE and edges[left]]
    levels = [_FREE] * len(edges)
    for left in frontier:
        levels[left] = 0
    found = False
    while frontier and not found:
        following = []
        for left in frontier:
            for right in edges[left]:
                nearest = owner[right]
                if nearest == _FREE:
                    found = True
                elif levels[nearest] == _FREE:
                    levels[nearest] = levels[left] + 1
                    following.append(nearest)
        frontier = following
    return levels if found else None


def _augment(
    start: int, edges: Edges, partner: list[int], owner: list[int], levels: list[int], tried: list[int]
) -> None:
    """Flips a shortest path from the free left vertex `start` to a free right one, if one is left."""
    path = [start]
    while path:
        left = path[-1]
        if tried[left] == len(edges[left]):
            path.pop()
            continue
        right = edges[left][tried[left]]
        tried[left] += 1
        if owner[right] == _FREE:
            _flip(path, edges, partner, owner, tried)
            return
        if levels[owner[right]] == levels[left] + 1:
            path.append(owner[right])


def _flip(path: list[int], edges: Edges, partner: list[int], owner: list[int], tried: list[int]) -> None:
    """Gives every left vertex on `path` the right vertex that it tried last."""
    for left in path:
        right = edges[left][tried[left] - 1]
        partner[left], owner[right] = right, left
