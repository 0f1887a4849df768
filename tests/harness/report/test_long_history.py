"""A page of a long history: 200 series at 200 commits, made and opened as any other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.harness import sample
from tests.harness.report.chromium import Visit, needs_chromium, written

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.slow

FIRST_PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


@pytest.fixture(scope="module")
def long_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("long")
    sample.write_long_history(root)
    return written(root, root / "report.html")


def test_it_is_under_six_megabytes(long_page: Path) -> None:
    assert long_page.stat().st_size < 6_000_000


@needs_chromium
def test_it_is_painted_within_a_second(browser: Browser, long_page: Path) -> None:
    Visit(browser, long_page, draw=None).page.context.close()
    visit = Visit(browser, long_page, draw=None)
    assert visit.page.evaluate(FIRST_PAINT) < 1000


@needs_chromium
def test_a_reader_finds_the_way_about(browser: Browser, long_page: Path) -> None:
    visit = Visit(browser, long_page, draw=None)
    page = visit.page
    assert page.locator("#variants tbody tr").count() == 300

    page.locator("#variants th button", has_text="time").click()
    assert page.locator("#variants th[aria-sort=ascending]").inner_text().strip() == "time"

    page.locator("#variants .filter input").fill("model21 trainstep")
    assert page.locator("#variants tbody tr:visible").count() == 2
    page.locator("#variants .filter input").fill("")

    since, lasting = (page.locator(f"#regressions li[id^='{kind}-']") for kind in ("regression", "level"))
    assert {text.split(",")[0] for text in since.locator("h3").all_inner_texts()} == {
        "model05", "model21", "model37",
    }  # fmt: skip
    slower = {text.split(",")[0] for text in lasting.locator("h3").all_inner_texts()}
    assert {"model03", "model13", "model23", "model33", "model43"} <= slower

    page.locator("#model").select_option("model13")
    assert page.locator("#variants tbody tr:visible").count() == 6
    page.locator("#history").scroll_into_view_if_needed()
    page.wait_for_selector("#history .main-svg")
    chart = page.locator("#history .chart:visible")
    assert chart.count() == 1
    assert chart.locator(".js-fill").count() == 4
    assert chart.locator(".scatterlayer .points path").count() == 4 * 200
    assert "driver" in (chart.locator(".shape-label").all_text_contents())

    page.evaluate("window.location.hash = 'row-model37-b64-cuda-kitsune_dropin_amp'")
    page.wait_for_selector("tr:target:visible")
    assert page.locator("#model").input_value() == ""

    page.emulate_media(color_scheme="dark")
    page.wait_for_function(
        "() => getComputedStyle(document.querySelector('#history .ytick text')).fill === 'rgb(230, 232, 235)'"
    )

    page.set_viewport_size({"width": 390, "height": 900})
    page.wait_for_function("() => document.documentElement.scrollWidth === 390")
    assert visit.requests == [long_page.as_uri()]
    assert visit.complaints == []


@needs_chromium
def test_its_history_is_readable_without_scripts(browser: Browser, long_page: Path) -> None:
    visit = Visit(browser, long_page, scripts=False)
    assert visit.page.locator("#history table.plain").count() == 50
    assert visit.page.locator("#history table.plain").first.locator("tbody td").count() == 100 * 4
    assert visit.page.locator("#regressions .command:visible").count() > 12
