"""The templates, in the order in which they take turns."""

from __future__ import annotations

from kitsune.fusion import batch_norm, casts, head, linear, pool, small_conv, update
from kitsune.fusion.engine import Template

TEMPLATES: tuple[Template, ...] = (
    batch_norm.forward,
    batch_norm.backward,
    pool.backward,
    pool.forward,  # it takes over what the backward has computed anew
    small_conv.forward,
    small_conv.backward,
    head.forward_and_backward,  # it takes the last linear layer with it
    linear.forward,
    linear.backward,  # it takes over casts of weights that the forward needs no more
    update.linear,
    update.without_casts,
    casts.parameters,  # those that no kernel does itself
    casts.counters,
)
