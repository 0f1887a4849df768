"""What comparing replays with plain PyTorch has found."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """Something that a replay leaves otherwise than plain PyTorch does, by more than rounding explains.

    Attributes:
        name: of the tensor: `"loss"`, a parameter's or buffer's name in the model, `"<parameter>.<state>"` of the
            optimizer, `"<parameter>.grad"`; or of a Python object that the step changes: `"the model.layer.cache"`.
        error: the norm of the difference; of what was changed, where a tensor is changed. Infinite where nothing can be
            subtracted: of other objects, other shapes, and of what only one of both has left.
        allowed: the largest that rounding explains.
        operator: what makes or writes it in the captured graph; None where that is not known.
    """

    name: str
    error: float
    allowed: float
    operator: str | None = None

    def __str__(self) -> str:
        made = "" if self.operator is None else f", made by {self.operator}"
        if math.isinf(self.error) and self.allowed == 0:
            return f"{self.name}{made}: not what plain PyTorch leaves there"
        return f"{self.name}{made}: off by {self.error:.3g}, rounding explains {self.allowed:.3g}"


@dataclass(frozen=True, repr=False)
class Verification:
    """Whether a replayed step does what plain PyTorch does.

    Attributes:
        replayed: whether there was a replay to compare; if not, `reason` says why.
        differences: the largest first, as multiples of what is allowed; none if all agrees.
        reason: why nothing was replayed; empty if it was.
        written: names of tensors of modules that the iteration of a loop has written to, as often as it ran, and that
            were not put back: nothing had told that they are trained, neither an optimizer nor `requires_grad`.
    """

    replayed: bool
    differences: tuple[Difference, ...] = ()
    reason: str = ""
    written: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether a replay was compared, and nothing differed."""
        return self.replayed and not self.differences

    def __repr__(self) -> str:
        """As it is printed: consoles and notebooks show this."""
        return str(self)

    def __str__(self) -> str:
        if not self.replayed:
            lines = [f"nothing was compared: {self.reason}"]
        elif not self.differences:
            lines = ["the replay does what plain PyTorch does"]
        else:
            lines = ["the replay differs from plain PyTorch:", *(f"  {one}" for one in self.differences)]
        if self.written:
            lines += ["written to besides, and not put back:", *(f"  {name}" for name in self.written)]
        return "\n".join(lines)
