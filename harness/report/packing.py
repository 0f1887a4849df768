"""Compressed content within a page: base64 has no character that could end what it stands in."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode

_DIGITS = 5
"""How many digits of a number are kept: more than any measurement has, and a page has many numbers."""


def packed(text: str) -> str:
    """A text, compressed with gzip, in base64; the same text always gives the same. Half a character, as damage leaves
    it in a name, becomes a question mark.
    """
    return b64encode(gzip.compress(text.encode(errors="replace"), mtime=0)).decode()


def compact(value: object) -> str:
    """A value as JSON without spaces, its numbers rounded.

    Raises:
        ValueError: a number is not finite.
    """
    return json.dumps(_rounded(value), separators=(",", ":"), allow_nan=False)


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, (list, tuple)):
        return [_rounded(entry) for entry in value]
    if isinstance(value, dict):
        return {name: _rounded(entry) for name, entry in value.items()}
    return value
