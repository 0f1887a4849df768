from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.harness import sample
from tests.harness.report.chromium import ARGUMENTS, EXECUTABLE, written

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=EXECUTABLE, args=list(ARGUMENTS))
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def gpu_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of three commits and three models, in which one of Kitsune's forms became slower."""
    root = tmp_path_factory.mktemp("gpu")
    sample.write_gpu_history(root, slowdown=1.12)
    return written(root, root / "report.html")
