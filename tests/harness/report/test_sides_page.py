"""The page of two sides: as readable, linked and closed in itself as that of two commits."""

from __future__ import annotations

import gzip
import json
from base64 import b64decode
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.harness import sample
from tests.harness.report.chromium import Visit, needs_chromium, written

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sides")
    sample.write_gpu_history(root)
    (root / sample.GPU_MACHINE).rename(root / "other-gpu")
    sample.write_gpu_history(root, slowdown=1.5)
    return root


def test_two_machines_have_a_page(browser: Browser, results: Path, tmp_path: Path) -> None:
    sides = ("--machines", "other-gpu", sample.GPU_MACHINE)
    visit = Visit(browser, written(results, tmp_path / "report.html", *sides))
    assert f"{sample.GPU_MACHINE} takes less than other-gpu in 0 of 65 rows" in visit.texts(".outcome")[0]
    assert visit.texts("dl.facts dt")[0] == "Machines"
    assert visit.page.locator("#rows tbody tr").count() == 65
    assert "slower" in visit.texts("#rows tbody tr")[0], "what became worse comes first"
    assert visit.page.locator("#ratios .chart .main-svg").count() > 0
    assert visit.page.locator("#ratios .errorbar").count() == 65
    visit.page.get_by_label("model").select_option("lenet")
    assert all(row.startswith("lenet") for row in visit.texts("#rows tbody tr:visible"))
    assert visit.requests == [(tmp_path / "report.html").as_uri()]
    assert visit.complaints == []


def test_two_variants_have_a_page_of_all_metrics(browser: Browser, results: Path, tmp_path: Path) -> None:
    sides = ("--machine", sample.GPU_MACHINE, "--variants", "handcaptured_amp", "kitsune_trainstep_amp")
    page = written(results, tmp_path / "report.html", *sides, "--metric", "time", "--metric", "memory")
    visit = Visit(browser, page, width=390)
    assert visit.texts(".tally h3") == ["Time of kitsune_trainstep_amp", "Memory of kitsune_trainstep_amp"]
    assert visit.page.locator("#rows tbody tr").count() == visit.page.locator("#ratios .points path").count() == 6
    assert visit.page.evaluate("document.documentElement.scrollWidth") == 390
    (address,) = visit.page.locator("#raw-data a").evaluate_all("all => all.map((link) => link.href)")
    document = json.loads(gzip.decompress(b64decode(address.partition(",")[2])))
    assert (document["kind"], len(document["contrasts"])) == ("variants", 6)
    assert visit.complaints == []
