"""What was fused in a graph before it was planned, and what that won."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fusion:
    """A part of the graph for which there was a replacement.

    Attributes:
        template: what replaces it.
        operators: the names of its operators.
        before_us: microseconds of device time that it took by itself; None where it was not measured.
        after_us: what the replacement takes; None where it was not measured.
        refusal: why it was left as it is; None if it was replaced.
    """

    template: str
    operators: tuple[str, ...]
    before_us: float | None
    after_us: float | None
    refusal: str | None

    @property
    def won_us(self) -> float:
        """What the replacement won; 0 where there is none, or its worth is not known."""
        if self.refusal is not None or self.before_us is None or self.after_us is None:
            return 0.0
        return self.before_us - self.after_us
