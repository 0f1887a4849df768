"""The plan in a Kitsune variant's status, and what its fields must be.

It is read from its JSON form and nothing else, since it may be an older commit's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_FORMAT = "kitsune plan"
_VERSIONS = (1, 2)  # the second tells of fusions besides
_MOST_US = 1e12


class DamageError(ValueError):
    """A part of a plan that is not as it should be. The message names it."""


def plan_of(status: Mapping[str, object]) -> tuple[Mapping[str, object], int]:
    """The plan that a status holds under the key ``plan``, as decoded JSON, and the version of its form.

    Raises:
        DamageError: it is no plan, or of another version.
    """
    document = as_object(status.get("plan"), "the plan")
    version = document.get("version")
    if document.get("format") != _FORMAT or type(version) is not int or version not in _VERSIONS:
        raise DamageError(f"it is not of format {_FORMAT!r}, version {' or '.join(map(str, _VERSIONS))}")
    return as_object(document.get("plan"), "plan"), version


def part(plan: Mapping[str, object], name: str) -> Mapping[str, object]:
    """The object of this name; DamageError if there is none."""
    return as_object(plan.get(name), name)


def as_object(value: object, where: str) -> Mapping[str, object]:
    """The value; DamageError if it is not an object."""
    if not isinstance(value, Mapping):
        raise DamageError(f"{where} is not an object")
    return value


def as_list(value: object, where: str, length: int | None = None) -> Sequence[object]:
    """The value; DamageError if it is not a list, or not of this length."""
    if not isinstance(value, (list, tuple)):
        raise DamageError(f"{where} is not a list")
    if length is not None and len(value) != length:
        raise DamageError(f"{where} has {len(value)} entries instead of {length}")
    return value


def as_us(value: object, where: str) -> float:
    """The value as microseconds; DamageError if it cannot be a time."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MOST_US:
        raise DamageError(f"{where}: {value!r:.60} cannot be a time in microseconds")
    return float(value)


def as_text(value: object, where: str) -> str:
    """The value; DamageError if it is not a text."""
    if not isinstance(value, str):
        raise DamageError(f"{where} is not a text")
    return value
