"""Where commits are shown on the web: asv's ``show_commit_url``, the beginning of an address that a hash completes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

_KEY = "show_commit_url"
_ASV_S_DEFAULT = "#"
_ALLOWED = re.compile(r"[A-Za-z0-9._~:/?#\[\]@!$&()*+,;=%-]+")
"""The characters of addresses: nothing that ends an attribute or a line. Pages escape it nevertheless."""
_STRING = r'"(?:\\.|[^"\\])*"'
_COMMENT = re.compile(rf"({_STRING})|//[^\n]*|/\*.*?\*/", re.DOTALL)
_LAST_COMMA = re.compile(rf"({_STRING})|,(?=\s*[}}\]])")


@dataclass(frozen=True)
class CommitPages:
    """The beginning of the addresses of commits' pages; None where there are none. ``problem`` says what is wrong with
    the one that is configured.
    """

    beginning: str | None = None
    problem: str | None = None

    def address(self, sha: str) -> str | None:
        """The page of a commit."""
        return None if self.beginning is None else self.beginning + sha


NO_PAGES = CommitPages()


def commit_pages(configuration: Path) -> CommitPages:
    """The pages that asv's configuration names, where there is such a file.

    Only addresses of http and https count: a page must not be made to run what stands in a configuration.
    """
    try:
        text = configuration.read_text(encoding="utf-8")
    except FileNotFoundError:
        return NO_PAGES
    except (OSError, UnicodeError) as error:
        return CommitPages(problem=f"{configuration.name} cannot be read ({error}), so commits are not linked")
    try:
        content = json.loads(_plain_json(text))
    except (ValueError, RecursionError) as error:
        return CommitPages(problem=f"{configuration.name} is not valid JSON ({error}), so commits are not linked")
    value = content.get(_KEY) if isinstance(content, dict) else None
    if value in (None, "", _ASV_S_DEFAULT):
        return NO_PAGES
    if not isinstance(value, str) or not _is_web_address(value):
        problem = f"{configuration.name}: {_KEY} is {value!r:.100}, no address of http or https"
        return CommitPages(problem=f"{problem}, so commits are not linked")
    return CommitPages(value)


def _plain_json(text: str) -> str:
    """asv's configuration may have comments, and commas behind the last entries."""
    without_comments = _COMMENT.sub(lambda match: match[1] or " ", text)
    return _LAST_COMMA.sub(lambda match: match[1] or "", without_comments)


def _is_web_address(value: str) -> bool:
    if not _ALLOWED.fullmatch(value):
        return False
    try:
        parts = urlsplit(value)
        return parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        return False
