"""Where commits are shown: what asv's configuration says of it, and what a page makes of that."""

import json
from pathlib import Path

import pytest

from harness import compare, project
from harness.commit_pages import NO_PAGES, commit_pages
from harness.comparison import compare as compared
from harness.project import Project
from harness.report import html_page, markup
from harness.store import Store
from tests.harness import sample
from tests.harness.checkout import ROOT

ADDRESS = "https://github.com/someone/kitsune/commit/"


def configured(folder: Path, text: str) -> Path:
    path = folder / "asv.conf.json"
    path.write_text(text)
    return path


@pytest.mark.parametrize("value", [ADDRESS, "http://localhost:8000/cgit/commit/?id=", "HTTPS://x/"])
def test_an_address_is_completed_by_the_hash(tmp_path: Path, value: str) -> None:
    pages = commit_pages(configured(tmp_path, json.dumps({"show_commit_url": value})))
    assert (pages.address("a" * 40), pages.problem) == (value + "a" * 40, None)


def test_a_configuration_may_have_comments_as_asv_s_own_has(tmp_path: Path) -> None:
    text = """{
        // "show_commit_url": "http://wrong.example/",
        "repo": "https://elsewhere.example/x.git", /* of several
        lines */ "show_commit_url": "https://right.example/c/", // "quoted"
        "matrix": {"a": [1, 2,], },
    }"""
    assert commit_pages(configured(tmp_path, text)).address("0") == "https://right.example/c/0"


@pytest.mark.parametrize(
    "text", ["{}", '{"show_commit_url": ""}', '{"show_commit_url": "#"}', '{"show_commit_url": null}']
)
def test_where_none_is_named_there_is_none(tmp_path: Path, text: str) -> None:
    assert commit_pages(configured(tmp_path, text)) == NO_PAGES
    assert commit_pages(tmp_path / "no file") == NO_PAGES


@pytest.mark.parametrize(
    "value",
    [
        "javascript:alert(1)//", " javascript:alert(1)", "JaVaScRiPt:alert(1)", "data:text/html,<script>", "ftp://x/",
        "//x/", 'https://x/" onclick="alert(1)', "https://x/<b>", "https://x/\nhttps://y", "https://", "http:alert(1)",
        "https://[x", 5, ["https://x/"],
    ],
)  # fmt: skip
def test_what_is_no_address_of_the_web_is_told_and_not_linked(tmp_path: Path, value: object) -> None:
    pages = commit_pages(configured(tmp_path, json.dumps({"show_commit_url": value})))
    assert pages.address("a" * 40) is None
    assert pages.problem is not None
    assert pages.problem.startswith("asv.conf.json: show_commit_url is ")


@pytest.mark.parametrize("text", ["no json", "[" * 100_000])
def test_a_damaged_configuration_is_told(tmp_path: Path, text: str) -> None:
    pages = commit_pages(configured(tmp_path, text))
    assert pages.problem is not None
    assert pages.problem.startswith("asv.conf.json is not valid JSON")


@pytest.mark.parametrize("address", ["javascript:alert(1)", " javascript:alert(1)", "java\nscript:x", "data:x", "x:y"])
def test_markup_links_to_nothing_that_could_run(address: str) -> None:
    assert markup.linked("<it>", address) == "&lt;it&gt;"


@pytest.mark.parametrize("address", ['https://x/?a="1"&b', 'HTTPS://x/?a="1"', "../results/a%20b/c.json.gz"])
def test_markup_links_to_the_web_and_to_files_beside_it(address: str) -> None:
    assert markup.linked("it", address).startswith('<a href="')
    assert "&quot;" in markup.linked("it", address) or "%20" in markup.linked("it", address)


def test_every_commit_on_the_page_leads_to_its_page_but_states_of_a_working_tree(tmp_path: Path) -> None:
    sample.write_long_history(tmp_path, commits=40, models=4)
    history = Store(tmp_path).load(sample.GPU_MACHINE)
    pages = commit_pages(configured(tmp_path, json.dumps({"show_commit_url": ADDRESS})))
    page = html_page(compared(history, folder=tmp_path, pages=pages))
    last = history.commits[-1]
    assert f'<dd><a href="{ADDRESS}{last}" rel="noopener noreferrer">{last[:8]}</a></dd>' in page
    sections = {name: page[page.index(f'<section id="{name}">') :] for name in ("regressions", "history")}
    assert sections["regressions"].index(f'href="{ADDRESS}') < sections["regressions"].index("</section>")
    for commit in history.commits:
        assert f'<th scope=row><a href="{ADDRESS}{commit}"' in sections["history"]
    assert page.count("<h3>") == html_page(compared(history, folder=tmp_path)).count("<h3>")
    assert "https://" not in html_page(compared(history, folder=tmp_path))


def test_a_state_of_the_working_tree_has_no_page(tmp_path: Path) -> None:
    sample.write_cpu_history(tmp_path)
    commit = "d" * 40
    run = sample.run_record("w", commit, {"device_type": "cpu"}, started=sample.STARTED)
    case = sample.case_fields("mlp", 64, "cpu")
    timed = sample.round_record("w", 0, case, {"eager_fp32": [1e-3, 1e-3]})
    Store(tmp_path).append(sample.CPU_MACHINE, commit, [{**run, "snapshot_of": sample.COMMITS[2]}, timed])
    pages = commit_pages(configured(tmp_path, json.dumps({"show_commit_url": ADDRESS})))
    found = compared(Store(tmp_path).load(sample.CPU_MACHINE), head=commit, folder=tmp_path, pages=pages)
    assert found.head.url is None
    assert found.base is not None
    assert found.base.url == ADDRESS + found.base.sha


def test_the_command_takes_them_from_this_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sample.write_cpu_history(tmp_path / "results")
    monkeypatch.setattr(project, "here", lambda: Project(tmp_path, tmp_path, is_kitsune=True))
    for value, shown in (
        (ADDRESS, ADDRESS + sample.COMMITS[2]),
        ("javascript:alert(1)", "no address of http or https"),
    ):
        configured(tmp_path, json.dumps({"show_commit_url": value}))
        assert compare.main(["--html", str(tmp_path / "report.html")]) == 0
        page = (tmp_path / "report.html").read_text()
        assert shown in page
        assert 'href="javascript' not in page
    assert "show_commit_url is 'javascript:alert(1)'" in capsys.readouterr().out


def test_results_of_another_project_are_not_linked_to_this_one_s_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(project, "here", lambda: Project(tmp_path, tmp_path, is_kitsune=True))
    configured(tmp_path, json.dumps({"show_commit_url": ADDRESS}))
    page = tmp_path / "report.html"
    for name, is_linked in (("results", True), ("another's", False)):
        sample.write_cpu_history(tmp_path / name)
        monkeypatch.chdir(tmp_path)
        assert compare.main(["--results", name, "--html", str(page)]) == 0
        assert (ADDRESS in page.read_text()) == is_linked


def test_this_project_s_configuration_can_be_read() -> None:
    assert commit_pages(ROOT / "asv.conf.json").problem is None
