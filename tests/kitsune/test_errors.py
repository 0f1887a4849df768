"""Errors and refusals: their texts and their family."""

from __future__ import annotations

import pytest

import kitsune
from kitsune.errors import ConfigError, KitsuneError, Refusal, RefusedError


@pytest.mark.parametrize(
    ("refusal", "text"),
    [
        (Refusal("why"), "why"),
        (Refusal("why", "where"), "why [where]"),
        (Refusal("why", remedy="what to do"), "why; what to do"),
        (Refusal("why", "where", "what to do"), "why [where]; what to do"),
    ],
)
def test_the_text_of_a_refusal(refusal: Refusal, text: str) -> None:
    assert str(refusal) == text
    assert str(RefusedError(refusal)) == text


def test_every_error_has_one_root() -> None:
    error = ConfigError("mode", 3, "'auto'")
    assert isinstance(error, KitsuneError)
    assert isinstance(error, ValueError)
    assert (error.option, error.value, error.allowed) == ("mode", 3, "'auto'")
    assert issubclass(RefusedError, KitsuneError)


def test_a_refusal_is_a_value() -> None:
    assert Refusal("a") == Refusal("a")
    assert Refusal("a") != Refusal("a", "b")
    assert len({Refusal("a"), Refusal("a")}) == 1


def test_the_public_names() -> None:
    classes = {"Config", "ConfigError", "KitsuneError", "KitsuneOptimizer", "Plan", "Refusal", "Status", "TrainStep"}
    names = {*classes, "prefetch"}
    assert all(hasattr(kitsune, name) for name in names)
    assert kitsune.__version__.count(".") == 2
