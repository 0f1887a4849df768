"""The page as its reader uses it: filters, one model, links to rows, commands, colours, print."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.harness import sample
from tests.harness.report.chromium import Visit, needs_chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = needs_chromium

LINK = "#row-lenet-b64-cuda-kitsune_trainstep_amp"


@pytest.fixture(scope="module")
def opened(browser: Browser, gpu_page: Path) -> Visit:
    return Visit(browser, gpu_page, draw=None)


@pytest.fixture
def visit(opened: Visit) -> Iterator[Visit]:
    """The same page in every test, each of which leaves it as it was: to open it takes longer than to use it."""
    yield opened
    assert opened.complaints == []
    opened.page.emulate_media(media="screen", color_scheme="light")


def test_charts_are_dark_on_a_dark_page_and_light_on_paper(visit: Visit) -> None:
    visit.page.emulate_media(color_scheme="dark")
    visit.page.locator("#memory").scroll_into_view_if_needed()
    visit.page.wait_for_selector("#memory-0 .main-svg")
    ink = "() => getComputedStyle(document.querySelector('#memory-0 .annotation-text')).fill"
    visit.page.wait_for_function(f"() => ({ink})() === 'rgb(230, 232, 235)'")
    assert visit.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    visit.page.emulate_media(media="print")
    visit.page.wait_for_function(f"() => ({ink})() === 'rgb(31, 35, 40)'")
    assert visit.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_charts_are_drawn_as_they_come_near_and_on_paper_all(visit: Visit) -> None:
    heights = "all => all.map((chart) => chart.getBoundingClientRect().height)"
    kept = visit.page.locator(".chart").evaluate_all(heights)
    assert visit.page.locator("#loss .main-svg").count() == 0
    visit.page.locator("#loss").scroll_into_view_if_needed()
    visit.page.wait_for_selector("#loss-0 .main-svg")
    assert visit.page.locator("#history .main-svg").count() == 0
    visit.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert visit.page.locator(".chart:not(:has(.main-svg))").count() == 0
    assert visit.page.locator(".chart").evaluate_all(heights) == kept, "or what a link leads to would move away"
    visit.page.emulate_media(media="print")
    for control in ("nav", ".filter", ".copy", "td.again"):
        assert visit.page.locator(f"{control}:visible").count() == 0


@pytest.fixture
def phone(browser: Browser, gpu_page: Path) -> Iterator[Visit]:
    visit = Visit(browser, gpu_page, width=390, draw=None, folded=True)
    yield visit
    assert visit.complaints == []
    visit.page.context.close()


OPEN = "#{} > .fold[open]"


def test_a_phone_has_the_answer_first_and_the_rest_folded(phone: Visit) -> None:
    assert phone.page.evaluate("document.documentElement.scrollHeight") < 4 * 900
    assert phone.page.locator("#summary table:visible").count() == 1
    assert phone.page.locator("#regressions .command:visible").count() == 1
    assert phone.page.locator(".fold[open]").count() == 0
    assert phone.page.locator("main h2:visible").count() == phone.page.locator("main > section:visible").count()
    phone.page.locator("#speed-up h2").click()
    phone.page.wait_for_selector("#speedup-0 .main-svg")
    assert phone.page.locator("#memory .main-svg").count() == 0
    phone.page.locator("#variants h2").click()
    heights = phone.page.locator("#variants .scroller").evaluate_all("all => all.map((one) => one.offsetHeight)")
    assert max(heights) <= 0.75 * 900


def test_what_a_phone_has_folded_is_opened_by_links_and_on_paper(phone: Visit) -> None:
    for _ in range(2):
        phone.page.locator("nav a[href='#memory']").click()
        phone.page.wait_for_selector(OPEN.format("memory"))
        assert phone.page.locator("nav").evaluate("nav => nav.getBoundingClientRect().top") == 0
        phone.page.locator("#memory h2").click()
        assert phone.page.locator(OPEN.format("memory")).count() == 0
    phone.page.evaluate("link => { window.location.hash = link; }", LINK)
    phone.page.wait_for_selector("tr:target")
    assert phone.page.locator("tr:target").is_visible()
    assert phone.page.locator(".fold[open]").count() == 1
    phone.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert phone.page.locator(".fold:not([open])").count() == 0
    assert phone.page.locator(".chart:not(:has(.main-svg))").count() == 0


def test_without_scripts_a_phone_has_all_open(browser: Browser, gpu_page: Path) -> None:
    visit = Visit(browser, gpu_page, width=390, scripts=False)
    assert visit.page.locator(".fold:not([open])").count() == 0
    visit.page.locator("#variants h2").click()
    assert visit.page.locator("#variants table:visible").count() == 0


def test_a_wide_page_has_all_open(visit: Visit) -> None:
    assert visit.page.locator(".fold:not([open])").count() == 0


def test_words_filter_the_rows_of_a_table(visit: Visit) -> None:
    words = visit.page.locator("#variants .filter input")
    words.fill("AMP trainstep")
    assert visit.page.locator("#variants tbody tr:visible").count() == 9
    assert visit.page.locator("#variants output").inner_text() == "9 of 65 rows"
    words.fill("no such words")
    assert visit.page.locator("#variants tbody tr:visible").count() == 0
    words.fill("")
    assert visit.page.locator("#variants tbody tr:visible").count() == 65
    assert visit.page.locator("#changes tbody tr:visible").count() == 12, "each table has its own filter"


def test_everything_follows_the_model_that_is_picked(visit: Visit) -> None:
    everything = visit.sections()
    visit.page.get_by_label("model").select_option("resnet18")
    for table, rows in (("variants", 21), ("changes", 4), ("streams", 12)):
        shown = visit.texts(f"#{table} tbody tr:visible")
        assert len(shown) == rows
        assert all(row.startswith("resnet18") for row in shown)
    titles = visit.texts("figcaption:visible")
    assert len(titles) == 11 + 2 + 2, "one of each kind, two of streams and of fusion"
    assert all(title.startswith("resnet18") for title in titles)
    assert set(everything) - set(visit.sections()) == {"regressions"}, "it was LeNet's"
    assert visit.page.locator("nav a[href='#regressions']:visible").count() == 0
    visit.page.locator("#variants .filter input").fill("amp")
    assert visit.page.locator("#variants tbody tr:visible").count() == 10, "both filters hold"
    assert visit.page.evaluate("window.location.hash") == "#model=resnet18"
    visit.page.locator("#variants .filter input").fill("")
    visit.page.get_by_label("model").select_option("all")
    assert visit.sections() == everything
    assert visit.page.evaluate("window.location.hash") == ""


def test_a_link_to_a_row_shows_it_whatever_hides_it(visit: Visit) -> None:
    visit.page.get_by_label("model").select_option("mlp")
    visit.page.locator("#variants .filter input").fill("tf32")
    visit.page.evaluate("link => { window.location.hash = link; }", LINK)
    visit.page.wait_for_selector("tr:target")
    assert visit.page.locator("tr:target").is_visible()
    assert visit.page.get_by_label("model").input_value() == ""
    visit.page.locator("#variants .filter input").fill("")


def test_a_command_is_copied_by_the_keyboard_alone(visit: Visit) -> None:
    visit.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    row = visit.page.locator("#variants tbody tr").first
    row.locator("summary").press("Enter")
    row.locator(".copy").press("Enter")
    visit.page.wait_for_function("() => document.querySelector('.copy:focus').textContent !== 'copy'")
    command = row.locator(".command").inner_text()
    assert command.startswith("python -m harness.run c05d61efc05d --profile full --case mlp-b64 --variant ")
    assert visit.page.evaluate("window.getSelection().toString()").strip() == command
    assert visit.page.evaluate("document.activeElement.textContent") in ("copied", "selected")


def test_every_judged_row_has_its_command(visit: Visit) -> None:
    head, base = (commit[:12] for commit in (sample.COMMITS[2], sample.COMMITS[1]))
    for table, rows, commits in (("changes", 12, f"{base} {head}"), ("variants", 65, head)):
        commands = visit.page.locator(f"#{table} td.again .command").all_text_contents()
        assert len(commands) == rows
        assert all(text.startswith(f"python -m harness.run {commits} --") for text in commands)


def test_a_regression_is_told_against_its_margin(visit: Visit) -> None:
    card = visit.page.locator("#regressions li")
    text = card.inner_text()
    for part in ("lenet, batch 64, cuda: Kitsune TrainStep, amp", "+12.8% [+12.1, +13.5] time", "+3.0% allowed"):
        assert part in text
    assert card.locator(".command").inner_text().endswith("--variant handcaptured_amp --variant kitsune_trainstep_amp")
    band, interval = (card.locator(part).bounding_box() for part in (".band", ".interval"))
    assert band is not None
    assert interval is not None
    assert interval["x"] > band["x"] + band["width"]


@pytest.mark.slow
def test_links_to_a_row_and_to_a_model_survive_a_reload(visit: Visit) -> None:
    near = "() => document.querySelector('tr:target')?.getBoundingClientRect().top < 900"
    visit.page.evaluate("link => { window.location.hash = ''; window.location.hash = link; }", LINK)
    visit.page.wait_for_function(near)
    visit.page.reload()
    visit.page.wait_for_function(near)
    row = visit.page.locator("tr:target")
    assert row.inner_text().split("\t")[3].splitlines()[0] == "Kitsune TrainStep"
    assert row.locator("a").get_attribute("href") == LINK
    visit.page.get_by_label("model").select_option("resnet18")
    visit.page.reload()
    assert visit.page.get_by_label("model").input_value() == "resnet18"
    assert all(title.startswith("resnet18") for title in visit.texts("figcaption:visible"))
