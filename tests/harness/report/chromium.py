"""A page of the report in Chromium, as its reader has it before them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness import compare

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

EXECUTABLE = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
)  # fmt: skip

needs_chromium = pytest.mark.skipif(EXECUTABLE is None, reason="no chromium on the PATH (Debian: apt install chromium)")


def written(results: Path, path: Path, *options: str) -> Path:
    assert compare.main(["--results", str(results), "--html", str(path), *options]) == 0
    return path


class Visit:
    """A page opened in Chromium, with everything it asked for and complained about.

    The charts that ``draw`` selects are drawn before anything is looked at; others as they come in sight. Sections are
    opened before, unless they are to be ``folded`` as a phone has them.
    """

    def __init__(
        self,
        browser: Browser,
        path: Path,
        *,
        width: int = 1280,
        scripts: bool = True,
        draw: str | None = ".chart",
        folded: bool = False,
    ) -> None:
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            java_script_enabled=scripts,
            reduced_motion="reduce",
        )
        self.page: Page = context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(path.as_uri(), wait_until="load")
        if scripts and not folded:
            self.page.locator(".fold").evaluate_all("all => all.forEach((fold) => { fold.open = true; })")
        if scripts and draw is not None:
            self.page.evaluate("chosen => ready.then(() => document.querySelectorAll(chosen).forEach(draw))", draw)

    def texts(self, selector: str) -> list[str]:
        return [text.strip() for text in self.page.locator(selector).all_inner_texts()]

    def sections(self) -> list[str]:
        """The identifiers of the sections in sight."""
        return [
            str(name)
            for name in self.page.locator("main > section:visible").evaluate_all("all => all.map((s) => s.id)")
        ]
