"""The templates, in the order in which they take turns."""

from __future__ import annotations

from kitsune.fusion import batch_norm
from kitsune.fusion.engine import Template

TEMPLATES: tuple[Template, ...] = (batch_norm.forward, batch_norm.backward)
