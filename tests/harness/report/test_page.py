from __future__ import annotations

import gzip
import json
import re
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness import compare, project, report
from harness.project import Project
from harness.store import Store
from tests.harness import plans, sample
from tests.harness.report.chromium import Visit, needs_chromium, written

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def test_the_page_is_one_self_contained_file_under_six_megabytes(gpu_page: Path) -> None:
    content = gpu_page.read_text(encoding="utf-8")
    assert gpu_page.stat().st_size < 6_000_000
    assert len(content) < 2_600_000, "Plotly's script is compressed"
    for element in ("figures", "plotly", "dark"):
        assert content.count(f'id="{element}"') == 1
    assert re.findall(r'(?:src|href)="(?!#|data:)', content) == []
    assert "http://" not in content
    assert "https://" not in content


@pytest.fixture(scope="module")
def visit(browser: Browser, gpu_page: Path) -> Visit:
    return Visit(browser, gpu_page)


@needs_chromium
def test_every_chart_is_drawn_and_nothing_is_fetched(visit: Visit, gpu_page: Path) -> None:
    names = visit.page.eval_on_selector_all(".chart", "charts => charts.map((chart) => chart.id)")
    expected = {
        "speedup": 3, "memory": 3, "allocation": 3, "setup": 3, "contribution": 3, "phases": 3, "batches": 3,
        "streams": 6, "history": 3, "spread": 3, "drift": 3, "loss": 3,
    }  # fmt: skip
    assert sorted(names) == sorted(f"{kind}-{index}" for kind, number in expected.items() for index in range(number))
    least = {
        "speedup": 10, "memory": 26, "allocation": 12, "setup": 13, "contribution": 10, "phases": 13, "batches": 2,
        "streams": 80, "history": 10, "spread": 13 * 5 * 7, "drift": 13 * 5 * 7, "loss": 13,
    }  # fmt: skip
    for name in names:
        kind = name.partition("-")[0]
        marks = visit.page.locator(f"#{name} {'.js-line' if kind in ('loss', 'allocation') else '.point'}")
        assert marks.count() >= least[kind], name
    assert visit.page.locator("#speedup-0 .errorbar").count() == 13
    assert visit.page.locator("#history-0 .js-fill").count() == 6
    heights = "paths => paths.map((path) => path.getBoundingClientRect().height)"
    assert min(visit.page.locator(".chart .bars .point path").evaluate_all(heights)) > 5
    assert visit.requests == [gpu_page.as_uri()]
    assert visit.complaints == []


@needs_chromium
def test_a_timeline_tells_what_runs_and_zooms(visit: Visit) -> None:
    chart = visit.page.locator("#streams-1")
    rows = [text.strip() for text in chart.locator(".ytick text").all_text_contents()]
    assert rows == ["stream 1 measured", "stream 1 predicted", "stream 0 measured", "stream 0 predicted"], "from below"
    assert chart.locator(".point").count() == 80
    first = chart.locator(".point path").first
    first.hover(force=True)
    visit.page.wait_for_function("() => document.querySelector('#streams-1 .hovertext')")
    assert "aten.convolution.default" in (chart.locator(".hovertext").first.text_content() or "")

    def width() -> float:
        return float(first.evaluate("path => path.getBoundingClientRect().width"))

    before = width()
    box = chart.locator(".nsewdrag").bounding_box()
    assert box is not None
    visit.page.mouse.move(box["x"] + 2, box["y"] + 5)
    visit.page.mouse.down()
    visit.page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 5, steps=4)
    visit.page.mouse.up()
    visit.page.wait_for_function("() => document.querySelector('#streams-1').layout.xaxis.range[1] < 100")
    assert width() > 3 * before
    visit.page.wait_for_timeout(350)  # Plotly takes clicks within 300 ms for one gesture: three are none
    visit.page.locator("#streams-1 .nsewdrag").dblclick()
    visit.page.wait_for_function("() => document.querySelector('#streams-1').layout.xaxis.range[1] > 200")


@needs_chromium
def test_every_kitsune_variant_has_a_timeline_or_a_reason(visit: Visit) -> None:
    rows = visit.texts("#streams tbody tr")
    assert len(rows) == 36
    assert sum("no timeline: its status holds no plan" in row for row in rows) == 18
    assert sum("219 µs" in row for row in rows) == 18


@needs_chromium
def test_fragmentation_and_the_memory_of_a_step_are_told_or_why_not(visit: Visit) -> None:
    written = [text.strip() for text in visit.page.locator("#memory-0 .bartext").all_text_contents()]
    assert written[0] == "38 MiB (46 MiB, 17% unused)"
    right = "all => all.map((element) => element.getBoundingClientRect().right)"
    (end, *_) = visit.page.locator("#memory-0 .main-svg").evaluate_all(right)
    assert max(visit.page.locator("#memory-0 .bartext").evaluate_all(right)) <= end
    told = visit.page.locator("#memory .notice").inner_text()
    assert told.startswith("A step's memory over time is not available for 3 variants of mlp-b64 on cuda, lenet-b64")
    assert "torch 9 does not record its allocations" in told
    visit.page.locator("#memory .fold details summary").click()
    rows = [row.split("\t") for row in visit.texts("#memory tbody tr")]
    assert len(rows) == 65
    assert [cell.strip() for cell in rows[0][4:9]] == ["38 MiB", "46 MiB", "8 MiB\n17% of reserved", "3 MiB", "458 MiB"]


@needs_chromium
def test_a_cpu_has_no_fragmentation_and_the_page_says_so(browser: Browser, tmp_path: Path) -> None:
    sample.write_cpu_history(tmp_path)
    visit = Visit(browser, written(tmp_path, tmp_path / "report.html"))
    told = visit.page.locator("#memory .notice").inner_text()
    assert told.startswith("Neither fragmentation nor a step's memory over time is available for 10 variants")
    assert told.endswith("measured on the CPU, where torch's allocator does not count.")
    assert visit.page.locator("[id^=allocation-]").count() == 0
    visit.page.locator("#memory .fold details summary").click()
    for row in visit.texts("#memory tbody tr"):
        assert row.count("not available") == 4
        assert "measured on the CPU" in row
    assert visit.complaints == []


@needs_chromium
def test_the_phases_of_a_step_are_stacked_and_named(visit: Visit) -> None:
    chart = visit.page.locator("#phases-0")
    entries = [text.strip() for text in chart.locator(".legendtext").all_text_contents()]
    assert entries == ["data", "forward", "backward", "optimizer", "whole step", "host gap"]
    told = [text.strip() for text in chart.locator(".bartext").all_text_contents()]
    assert len(told) == 15
    assert told[0] == "1.32 ms, 20% gap"
    boxes = "paths => paths.map((path) => path.getBoundingClientRect()).map((box) => [box.y, box.left, box.right])"
    bars = [box for box in chart.locator(".bars .point path").evaluate_all(boxes) if box[2] - box[1] > 0.5]
    by_row: dict[int, list[tuple[float, float]]] = {}
    for top, left, right in bars:
        by_row.setdefault(round(top), []).append((left, right))
    assert len(by_row) == 15
    for parts in by_row.values():
        ends = [right for _, right in sorted(parts)[:-1]]
        assert ends == pytest.approx([left for left, _ in sorted(parts)[1:]], abs=1), "one after the other"
    rows = visit.texts("#phases tbody tr")
    assert len(rows) == 65
    assert sum("one phase: the step runs as one thing" in row for row in rows) == 30
    assert sum("failed: TraceError: in 3 of 12 steps" in row for row in rows) == 3


@needs_chromium
def test_each_contribution_is_told_beside_its_time(visit: Visit) -> None:
    written = [text.strip() for text in visit.page.locator("#contribution-1 .bartext").all_text_contents()]
    assert ["×" in text for text in written] == [False, True, True, True, True] * 2
    visit.page.locator("#contributions .fold details summary").click()
    rows = visit.texts("#contributions tbody tr")
    assert len(rows) == 30
    assert not any("not measured" in row for row in rows)


@needs_chromium
def test_what_was_fused_is_told_case_by_case(visit: Visit) -> None:
    cards = visit.page.locator("#fusion figure")
    assert visit.texts("#fusion figcaption") == [
        f"{case}, cuda, {precision}"
        for case in ("mlp, batch 64", "lenet, batch 64", "resnet18, batch 128")
        for precision in ("fp32", "amp")
    ]
    card = cards.nth(1)
    told = card.locator("p").inner_text()
    assert "7 parts fused, which by themselves take 12.5 µs less." in told
    assert "117 µs before, 111 µs after" in told
    rows = [[cell.strip() for cell in row.split("\t")] for row in card.locator("tbody tr:visible").all_inner_texts()]
    assert rows == [
        ["batch norm + relu", "4", "7.00 µs", "4.50 µs", "10.0 µs"],
        ["gradients of linear layers + adam", "1", "12.2 µs", "9.75 µs", "2.50 µs"],
        ["region", "2", "—", "—", "—"],
    ]
    card.locator("summary").click()
    assert "there was no time left to try it" in card.locator("details table:visible").inner_text()
    widths = "cards => cards.map((card) => card.scrollWidth - card.clientWidth)"
    assert max(cards.evaluate_all(widths)) <= 0


@needs_chromium
def test_what_streams_gain_is_drawn_over_batch_sizes(browser: Browser, tmp_path: Path) -> None:
    sample.write_gpu_history(tmp_path, sweep=True)
    visit = Visit(browser, written(tmp_path, tmp_path / "report.html"), draw="#batches-1")
    chart = visit.page.locator("#batches-1")
    assert chart.locator(".xtick text").all_text_contents() == ["8", "64", "128", "512"]
    assert chart.locator(".legendtext").all_text_contents() == ["fp32", "amp"]
    assert chart.locator(".point").count() == chart.locator(".errorbar").count() == 4 + 1
    rows = [row.split("\t") for row in visit.texts("#batch-sizes tbody tr")]
    assert len(rows) == 3 * (4 + 1)
    assert [row[6].strip() for row in rows if row[1].strip() == "8"] == ["faster"] * 3
    assert visit.requests == [(tmp_path / "report.html").as_uri()]
    assert visit.complaints == []
    for section, charts in (("speed-up", 12), ("contributions", 12), ("memory", 6), ("history", 3)):
        assert visit.page.locator(f"#{section} .chart").count() == charts, section


@needs_chromium
@pytest.mark.parametrize("width", [390, 1400])
def test_the_gain_over_batch_sizes_is_drawn_with_its_end(browser: Browser, tmp_path: Path, width: int) -> None:
    sample.write_gpu_history(tmp_path, sweep=True)
    page = written(tmp_path, tmp_path / "report.html")
    visit = Visit(browser, page, width=width, draw="#sweep-0-eager, #sweep-2-peer")
    captions = visit.texts("#batch-sweep figcaption")
    assert captions[0] == (
        "mlp, cuda: gain over eager (Kitsune TrainStep, amp: does not end within the sizes measured, up to 512)"
    )
    assert captions[-1] == "resnet18, cuda: gain over the best peer (Kitsune TrainStep, amp: ends at batch 128)"
    for name in ("sweep-0-eager", "sweep-2-peer"):
        chart = visit.page.locator(f"#{name}")
        assert chart.locator(".xtick text").all_text_contents() == ["8", "64", "128", "512"]
        assert chart.locator(".point").count() == chart.locator(".errorbar").count() == 4
    rows = [row.split("\t") for row in visit.texts("#batch-sweep .fold > .scroller tbody tr")]
    assert [row[0].strip() for row in rows] == ["mlp", "lenet", "resnet18"]
    assert [row[5].strip() for row in rows][2] == "ends at batch 128"
    assert visit.complaints == []


@needs_chromium
def test_tables_are_filled_and_sort(visit: Visit) -> None:
    time = "#variants td:nth-child(5)"
    assert visit.page.locator("#variants tbody tr").count() == 65
    assert visit.page.locator("#changes tbody tr").count() == 12
    assert all(visit.texts(time))

    def milliseconds() -> list[float]:
        factors = {"µs": 1e-3, "ms": 1.0, "s": 1e3}
        return [float(text.split()[0]) * factors[text.split()[1]] for text in visit.texts(time)]

    unsorted = milliseconds()
    visit.page.locator("#variants th button", has_text="time").click()
    assert milliseconds() == sorted(unsorted)
    assert visit.page.locator("#variants th[aria-sort=ascending]").inner_text().strip() == "time"
    visit.page.locator("#variants th button", has_text="time").press("Enter")
    assert milliseconds() == sorted(unsorted, reverse=True)
    visit.page.locator("#variants th button", has_text="variant").click()
    names = [name.splitlines()[0].removesuffix(" *") for name in visit.texts("#variants td:nth-child(4)")]
    assert names == sorted(names, key=str.casefold)
    visit.page.locator("#variants th button", has_text="over best peer").click()
    peers = visit.texts("#variants td:nth-child(7)")
    assert peers[18:] == ["—"] * 47
    assert "—" not in peers[:18]
    assert visit.complaints == []


@needs_chromium
def test_the_header_says_what_this_is_and_how_it_ended(visit: Visit) -> None:
    assert "1 regression found in 12 comparisons" in visit.page.locator(".outcome").inner_text()
    facts = visit.page.locator("dl.facts").inner_text()
    for part in ("NVIDIA H200", "driver 580.159.03", "torch 2.13.0", sample.COMMITS[2][:8], sample.COMMITS[1][:8]):
        assert part in facts
    assert visit.texts(".tally")[0].split() == [
        "Kitsune", "against", "eager", "18", "faster", "0", "same", "0", "slower", "0", "inconclusive",
    ]  # fmt: skip
    assert visit.page.locator("#changes td.bad").all_inner_texts() == ["slower"]
    assert "CUDA graph replay overwrote" in visit.page.locator("#not-measured").inner_text()
    reading = visit.page.locator("#how-to-read").inner_text()
    for word in ("wall clock", "best peer", "margin of 3%", "control", "bfloat16", "MiB", "Break-even", "±5%"):
        assert word in reading
    for link in visit.page.locator("nav a").all():
        assert visit.page.locator(link.get_attribute("href") or "none").count() == 1


@needs_chromium
def test_a_phone_scrolls_down_only(browser: Browser, gpu_page: Path) -> None:
    kinds = ("speedup", "memory", "setup", "contribution", "batches", "streams", "history", "spread", "drift", "loss")
    visit = Visit(browser, gpu_page, width=390, draw=", ".join(f"#{kind}-0" for kind in kinds))
    assert visit.page.evaluate("document.documentElement.scrollWidth") == 390
    widths = visit.page.locator(".chart .main-svg").evaluate_all("all => all.map((svg) => svg.clientWidth)")
    assert max(widths) <= 390
    assert visit.page.locator("#speedup-0 .annotation").count() == 13
    visit.page.locator("#fusion .fold details summary").first.click()
    tables = visit.page.locator("#fusion .scroller:visible")
    assert max(tables.evaluate_all("all => all.map((table) => table.scrollWidth - table.clientWidth)")) <= 0
    visit.page.set_viewport_size({"width": 1280, "height": 900})
    visit.page.wait_for_function("() => !document.querySelector('#speedup-0 .annotation')")
    assert visit.complaints == []


@needs_chromium
def test_the_tables_are_readable_without_scripts(browser: Browser, gpu_page: Path) -> None:
    visit = Visit(browser, gpu_page, scripts=False)
    assert visit.page.locator("#variants tbody tr:visible").count() == 65
    assert visit.page.locator("#fusion tbody tr:visible").count() == 6 * 3
    assert visit.page.locator(".unscripted:visible").count() == 11
    assert visit.page.locator(".chart:visible").count() == 0
    visit.page.locator("#history .fold details summary").first.click()
    for case in visit.page.locator("#history .fold details details summary").all():
        case.click()
    assert visit.page.locator("#history table.plain tbody tr:visible").count() == 3 * 3
    assert visit.page.locator("#history table.plain tbody td:visible").count() == 3 * 3 * 6
    assert visit.page.locator("#regressions .command:visible").count() == 1
    assert visit.page.locator("#regressions .contrast:visible").count() == 1
    visit.page.locator("#variants td.again summary").first.click()
    assert "python -m harness.run c05d61efc05d" in visit.page.locator("#variants .command:visible").inner_text()
    for control in (".copy", ".filter", "#model"):
        assert visit.page.locator(f"{control}:visible").count() == 0, "what does nothing is not there"
    with visit.page.expect_download() as download:
        visit.page.locator("#raw-data a", has_text="comparison").click()
    content = json.loads(gzip.decompress(download.value.path().read_bytes()))
    assert content["kind"] == "commits"
    assert len(content["rows"]) == 65


@needs_chromium
def test_a_cpu_page_is_whole_too(browser: Browser, tmp_path: Path) -> None:
    sample.write_cpu_history(tmp_path)
    visit = Visit(browser, written(tmp_path, tmp_path / "report.html"), draw="#contribution-0, #memory-0, #drift-0")
    assert visit.page.locator(".chart").count() == 24
    assert "no timeline: its status holds no plan" in visit.page.locator("#streams").inner_text()
    assert visit.page.locator("#not-measured tbody tr").count() == 4
    assert visit.page.locator("#fusion").count() == 0
    assert visit.page.locator("#contribution-0 .ytick").count() == 3
    assert "TrainStep was not timed both on one stream" in visit.page.locator("#batch-sizes").inner_text()
    assert "resident" in visit.page.locator("#variants").inner_text()
    assert visit.complaints == []


@needs_chromium
def test_names_from_results_stay_text(browser: Browser, tmp_path: Path) -> None:
    """Every text a result file can carry tries to leave the page's markup, Plotly's texts and the embedded JSON."""
    hostile = (
        "</script><script>window.broken=1</script><img src=x onerror=window.broken=1>"
        "\"'><a href='javascript:window.broken=1'>%{x}"
    )
    case = sample.case_fields(hostile, 8, "cpu") | {"case": hostile}

    def slower(variant: str, commit: int, turn: int) -> list[float]:
        return [(1 + commit * variant.startswith("kitsune")) * time for time in (1.0 + turn / 9, 1.1)]

    rng = sample.random.Random(0)
    for index, commit in enumerate(sample.COMMITS[:2]):
        started = datetime(2026, 1, 1 + index, tzinfo=timezone.utc)
        facts = {"device": hostile, "device_type": hostile, hostile: hostile, "torch": hostile + str(index)}
        variants = ("eager_fp32", "kitsune_trainstep_fp32", f"kitsune_{hostile}_fp32", hostile)
        records = [sample.run_record(hostile, commit, facts, started=started)]
        records += [
            sample.round_record(hostile, k, case, {variant: slower(variant, index, k) for variant in variants})
            for k in range(3)
        ]
        for variant in variants:
            profile = sample.profile_record(hostile, case | {"model": "mlp"}, variant, rng) | case
            plan = plans.document(num_tasks=1, fusions=plans.FUSIONS)
            plan["plan"]["graph"]["tasks"][0] |= {"name": hostile, "operator": hostile}
            plan["plan"]["schedule"]["strategy"] = hostile
            plan["plan"]["fusions"][0]["template"] = plan["plan"]["fusions"][-1]["refusal"] = hostile
            if variant == "kitsune_trainstep_fp32":
                plan["plan"]["fusions"][1]["before_us"] = hostile
            status = {"mode": hostile, "reason": hostile, "plan": plan}
            records.append(profile | {"precision": hostile, "kitsune": status})
        records.append(sample.skip_record(hostile, case, f"kitsune_dropin_{hostile}", hostile, "failed"))
        path = Store(tmp_path).append("machine", commit, records)
    path.write_bytes(path.read_bytes() + b'{"schema":"' + hostile.replace('"', "").encode() + b'","kind":"round"}\n')

    visit = Visit(browser, written(tmp_path, tmp_path / "report.html"))

    assert visit.page.evaluate("window.broken") is None
    assert visit.page.locator("img, svg a, main script").count() == 0
    assert visit.page.locator("main a:not([href^='#']):not([href^='data:application/gzip;base64,'])").count() == 0
    assert hostile in visit.page.locator("dl.facts").inner_text()
    assert hostile.replace('"', "")[:20] in visit.page.locator("#damage").inner_text()
    assert hostile[:20] in visit.page.locator("#fusion tbody").first.inner_text()
    regressions = visit.page.locator("#regressions li")
    assert regressions.count() == 2
    assert hostile[:20] in regressions.first.locator("h3").inner_text()
    assert "<script>window.broken=1</script>" in regressions.first.locator(".command").inner_text()
    assert len(set(visit.page.locator("#variants tbody tr").evaluate_all("rows => rows.map((row) => row.id)"))) == 4
    visit.page.locator("#variants tbody tr a").last.click()
    assert visit.page.locator("#variants tr:target").count() == 1
    visit.page.locator("#fusion .fold details summary").click()
    assert hostile[:20] in visit.page.locator("#fusion .fold details").inner_text()
    assert "its plan cannot be read: before_us: " in visit.page.locator("#fusion .notice").inner_text()
    visit.page.locator("#streams-0 .point path").first.hover(force=True)
    visit.page.wait_for_function("() => document.querySelector('#streams-0 .hovertext')")
    assert hostile[:20] in (visit.page.locator("#streams-0 .hovertext").first.text_content() or "")
    assert visit.page.evaluate("window.broken") is None
    assert visit.page.locator("#speedup-0 .ytick text").first.text_content() is not None
    assert visit.requests == [(tmp_path / "report.html").as_uri()]
    assert visit.complaints == []


def test_without_plotly_the_other_outputs_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sample.write_gpu_history(tmp_path, rounds=2)
    monkeypatch.setitem(sys.modules, "plotly.offline.offline", None)
    outputs = ["--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]

    assert compare.main(["--results", str(tmp_path), *outputs]) == 2

    assert "pip install plotly" in capsys.readouterr().err
    assert (tmp_path / "a.json").exists()
    assert not (tmp_path / "a.html").exists()


def test_a_report_of_the_first_commit_alone(tmp_path: Path) -> None:
    sample.write_gpu_history(tmp_path, rounds=1)
    store = Store(tmp_path)
    comparison = compare.compare(store.load(sample.GPU_MACHINE, [sample.COMMITS[0]]), folder=tmp_path)

    page = report.html_page(comparison)

    assert 'id="history"' not in page
    assert 'id="changes"' not in page
    assert "no earlier commit is measured" in page
    assert "(one round)" in page


def test_other_metrics_are_on_the_page_of_one_model(tmp_path: Path) -> None:
    sample.write_cpu_history(tmp_path)
    options = ("--model", "mlp", "--metric", "ratio", "--metric", "memory", "--metric", "setup")
    page = written(tmp_path, tmp_path / "report.html", *options).read_text(encoding="utf-8")
    changes = page[page.index('<section id="changes">') : page.index('<section id="variants">')]
    assert "<h3>Setup, memory</h3>" in changes
    assert changes.count("<table ") == 2
    assert '<select id="model">' not in page, "there is nothing to choose"


@needs_chromium
def test_commits_lead_to_their_pages_which_nothing_fetches(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample.write_cpu_history(tmp_path / "results")
    address = "https://example.org/us/kitsune/commit/"
    (tmp_path / "asv.conf.json").write_text(json.dumps({"show_commit_url": address}))
    monkeypatch.setattr(project, "here", lambda: Project(tmp_path, tmp_path, is_kitsune=True))
    visit = Visit(browser, written(tmp_path / "results", tmp_path / "report.html"))
    visit.page.locator("#history .fold details summary").last.click()
    places = ("header dd a", "#history table.sortable tbody td:first-child a")
    links = [visit.page.locator(place).evaluate_all("all => all.map((link) => link.href)") for place in places]
    newest, older = (address + commit for commit in sample.COMMITS[:0:-1])
    assert links[0] == [newest, older]
    assert links[1][:2] == [newest, older]
    assert visit.requests == [(tmp_path / "report.html").as_uri()]
    assert visit.complaints == []


_INSIDE = """texts => texts.filter((text) => {
  const [inner, outer] = [text.getBoundingClientRect(), text.closest(".chart").getBoundingClientRect()];
  return inner.left < outer.left - 1 || inner.right > outer.right + 1;
}).map((text) => text.textContent)"""
"""Which texts stick out of their charts, so that they are cut."""


@needs_chromium
@pytest.mark.parametrize("width", [390, 1000, 1400])
def test_what_is_written_in_charts_is_not_cut(browser: Browser, gpu_page: Path, width: int) -> None:
    visit = Visit(browser, gpu_page, width=width, draw="#memory .chart, #set-up .chart, #samples .chart")
    assert visit.page.locator("#memory .bartext").count() > 0
    assert visit.page.locator("#set-up .bartext", has_text=" steps (").count() > 0
    assert visit.page.locator("#memory .bartext, #set-up .bartext, #samples .xtitle").evaluate_all(_INSIDE) == []
    overlaps = """charts => charts.filter((chart) => {
      const boxOf = (name) => chart.querySelector(name).getBoundingClientRect();
      const [share, bytes] = [boxOf(".xtick text"), boxOf(".ytick text")];
      return share.left < bytes.right && share.top < bytes.bottom;
    }).length"""
    assert visit.page.locator("#memory [id^=allocation]").evaluate_all(overlaps) == 0


@needs_chromium
def test_a_point_of_the_history_tells_its_commit_and_interval(browser: Browser, gpu_page: Path) -> None:
    visit = Visit(browser, gpu_page, draw="#history-0")
    visit.page.locator("#history-0 .points path").first.hover(force=True)
    visit.page.wait_for_selector("#history-0 .hovertext")
    told = visit.page.locator("#history-0 .hovertext").first.text_content() or ""
    numbers = r"0\.\d{3} \[0\.\d{3}, 0\.\d{3}\]"
    name = f"Kitsune drop-in, loss deferred · fp32{sample.COMMITS[2][:8]}"
    assert re.fullmatch(rf"{name}{numbers} × as fast as captured by hand\d{{3}}µs per step", told)


@needs_chromium
def test_no_buttons_lie_over_a_chart_on_a_phone(browser: Browser, gpu_page: Path) -> None:
    for width, number in ((390, 0), (1400, 1)):
        visit = Visit(browser, gpu_page, width=width, draw="#speedup-0")
        visit.page.locator("#speedup-0").hover()
        assert visit.page.locator("#speedup-0 .modebar").count() == number


@needs_chromium
def test_all_sections_can_be_reached_or_the_bar_says_that_there_are_more(browser: Browser, gpu_page: Path) -> None:
    room = "nav => nav.clientWidth - nav.scrollWidth"
    for width in (1000, 1400):
        visit = Visit(browser, gpu_page, width=width, draw=None)
        assert visit.page.locator("nav").evaluate(room) >= 0
        visit.page.locator('nav a[href="#memory"]').click()
        below = "nav => document.querySelector('#memory h2').getBoundingClientRect().top - nav.offsetHeight"
        assert visit.page.locator("nav").evaluate(below) >= 0
    visit = Visit(browser, gpu_page, width=390, draw=None)
    assert visit.page.locator("nav").evaluate(room) < 0
    assert visit.page.locator("nav").evaluate("nav => getComputedStyle(nav, '::after').content") == '"›"'


@needs_chromium
def test_no_row_is_tall_because_of_a_column_out_of_sight(browser: Browser, gpu_page: Path) -> None:
    visit = Visit(browser, gpu_page, width=390, draw=None)
    assert (
        visit.page.locator("#streams tbody tr").evaluate_all("all => Math.max(...all.map((r) => r.offsetHeight))") < 60
    )


@needs_chromium
def test_without_scripts_curves_have_tables(browser: Browser, gpu_page: Path) -> None:
    visit = Visit(browser, gpu_page, scripts=False)
    for section in ("loss", "drift", "samples"):
        assert visit.page.locator(f"#{section} tbody tr").count() > 20, section
    visit.page.locator("#loss .fold details summary").click()
    first = visit.texts("#loss tbody tr")[0].split("\t")
    assert first[0].strip() == "mlp"
    assert [cell.split()[1:] for cell in first[4:]] == [["step", str(step)] for step in (0, 50, 100, 150, 200)]
    visit.page.locator("#drift .fold details summary").click()
    assert len(visit.texts("#drift th")) == 4 + 5
