"""How a failure is put into words for a record: what happened in its first line, then the end of what was written."""

from __future__ import annotations

import traceback

_LINES = 30


def describe(error: BaseException) -> str:
    """The exception in one line, then the last lines of its traceback."""
    summary = traceback.format_exception_only(type(error), error)[-1].strip()
    return f"{summary}\n{last_lines(''.join(traceback.format_exception(type(error), error, error.__traceback__)))}"


def last_lines(text: str) -> str:
    """The last lines of a text."""
    return "\n".join(text.strip().splitlines()[-_LINES:])
