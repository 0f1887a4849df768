"""The templates, in the order in which they take turns."""

from __future__ import annotations

from kitsune.fusion import batch_norm, head, linear, update
from kitsune.fusion.engine import Template

TEMPLATES: tuple[Template, ...] = (
    batch_norm.forward,
    batch_norm.backward,
    head.forward_and_backward,  # it takes the last linear layer with it
    linear.forward,
    linear.backward,  # it takes over casts of weights that the forward needs no more
    update.linear,
    update.without_casts,
)
