"""Kitsune's errors, and the value that says why something was not accelerated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """Why something runs as plain PyTorch.

    Attributes:
        reason: what stands in the way, in one sentence.
        culprit: the source line or the operator that caused it, where one is known.
        remedy: what the user can do about it, where something can be done.
        topic: what others have in common with it that are told once, with the first of them; itself if None.
    """

    reason: str
    culprit: str | None = None
    remedy: str | None = None
    topic: str | None = None

    def __str__(self) -> str:
        text = self.reason
        if self.culprit:
            text += f" [{self.culprit}]"
        if self.remedy:
            text += f"; {self.remedy}"
        return text


class KitsuneError(Exception):
    """The root of Kitsune's exceptions."""


class ConfigError(KitsuneError, ValueError):
    """An option that does not exist, has a value that is not allowed, or contradicts another.

    Attributes:
        option: the option's name.
        value: what was passed.
        allowed: the values that are allowed, in words.
    """

    def __init__(self, option: str, value: object, allowed: str) -> None:
        super().__init__(f"option {option!r} got {value!r}; allowed: {allowed}")
        self.option = option
        self.value = value
        self.allowed = allowed


class RefusedError(KitsuneError):
    """Carries a `Refusal` from where it was found to where it is answered by running eagerly.

    It never reaches the user.

    Attributes:
        refusal: the reason.
        passing: whether the next step may succeed where this one could not.
        for_memory: whether it may succeed once others have given device memory back.
    """

    def __init__(self, refusal: Refusal, *, passing: bool = False, for_memory: bool = False) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal
        self.passing = passing
        self.for_memory = for_memory


def first_line(error: BaseException) -> str:
    """What `error` says, in a line; what it is where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
