from dataclasses import replace
from datetime import datetime, timezone

import pytest

from harness.regressions import Regression
from harness.report.regression_list import regression_list
from harness.rows import LISTED_CHANGES, Commit
from harness.selection import Case
from harness.stats import Estimate, Verdict

MEASURED = datetime(2026, 1, 1, tzinfo=timezone.utc)
SLOWER = Regression(
    case=Case("mlp-b8", "mlp", 8, "cuda"),
    variant="kitsune_trainstep_amp",
    precision="amp",
    metric="time",
    before=Commit("a" * 40, "Before & <all>", None, MEASURED),
    after=Commit("b" * 40, None, None, MEASURED),
    ratio=Estimate(1.12, 1.08, 1.16, 5, 35),
    limit=1.03,
    p_value=None,
    reason=None,
    command="python -m harness.run 'a<b'",
)


def test_an_interval_is_told_by_its_nearer_end() -> None:
    told = regression_list([SLOWER], [])
    assert "+12.0% [+8.0, +16.0] time<small>+3.0% allowed, so at least 5.0 points beyond it</small>" in told
    assert '<code class="command">python -m harness.run &#x27;a&lt;b&#x27;</code>' in told
    assert "bbbbbbbb, against aaaaaaaa Before &amp; &lt;all&gt;" in told
    assert 'id="regression-time-mlp-b8-cuda-kitsune_trainstep_amp"' in told


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (
            replace(SLOWER, metric="memory", ratio=Estimate(1.12, 0.0, float("inf"), 1, 1)),
            "+12.0% (one run) memory<small>+3.0% allowed, so 9.0 points beyond it</small>",
        ),
        (
            replace(SLOWER, ratio=Estimate(1.12, 0.0, float("inf"), 1, 0), limit=1.02, p_value=0.004),
            "+12.0% time, lasting<small>+2.0% allowed, and by chance with a probability of 0.004</small>",
        ),
        (
            replace(SLOWER, ratio=None, limit=None, reason="failed: <broke>"),
            "no longer measured<small>failed: &lt;broke&gt;</small>",
        ),
    ],
)
def test_each_kind_says_what_it_rests_on(entry: Regression, words: str) -> None:
    assert words in regression_list([entry], [])


def test_commits_lead_to_their_pages() -> None:
    shown = replace(SLOWER, before=replace(SLOWER.before, url="https://example.org/c/?a=1&id=" + "a" * 40))
    told = regression_list([shown], [])
    link = f'<a href="https://example.org/c/?a=1&amp;id={"a" * 40}" rel="noopener noreferrer">aaaaaaaa</a>'
    assert f"bbbbbbbb, against {link} Before &amp; &lt;all&gt;" in told


def test_a_level_says_after_which_commit() -> None:
    level = replace(SLOWER, ratio=Estimate(1.12, 0.0, float("inf"), 1, 0), p_value=0.004)
    assert "bbbbbbbb, after aaaaaaaa" in regression_list([level], [])
    assert 'id="level-time-bbbbbbbb-mlp-b8-cuda-kitsune_trainstep_amp"' in regression_list([level], [])


def test_of_many_lasting_changes_the_first_ones_are_listed_and_the_others_counted() -> None:
    level = replace(SLOWER, ratio=Estimate(1.12, 0.0, float("inf"), 1, 0), p_value=0.004)
    least = replace(level, after=replace(SLOWER.after, sha="c" * 40))
    whole = regression_list([SLOWER, *[level] * (LISTED_CHANGES - 1), least], [])
    assert whole.count('<li id="level-') == LISTED_CHANGES
    assert whole.endswith("</ol>")
    told = regression_list([SLOWER, *[level] * LISTED_CHANGES, least, least], [])
    assert told.count('<li id="regression-') == 1
    assert told.count('<li id="level-') == LISTED_CHANGES
    assert "cccccccc" not in told
    assert "Beside these, 2 smaller changes for the worse lasted: they are among the" in told


def test_memory_that_was_not_judged_stands_beside_what_was_found_and_beside_nothing() -> None:
    growth = "memory: 1 row takes more than at aaaaaaaa (a&b +13.8%); --metric memory judges it"
    told = (
        "Beside what was judged, memory: 1 row takes more than at aaaaaaaa (a&amp;b +13.8%); --metric memory judges it."
    )
    assert regression_list([SLOWER], [Verdict.SLOWER], growth).endswith(f'</ol><p class="notice">{told}</p>')
    assert regression_list([], [Verdict.SAME], growth).endswith(f"and in the history. {told}</p>")


@pytest.mark.parametrize(
    ("judged", "words"),
    [
        ([], "None found in the history; no form of Kitsune was compared between the two commits."),
        ([Verdict.SAME], "None found in 1 comparison and in the history."),
        (
            [Verdict.SAME, Verdict.INCONCLUSIVE, Verdict.INCONCLUSIVE],
            "None found in 3 comparisons and in the history. 2 of them inconclusive: more rounds would decide.",
        ),
    ],
)
def test_that_nothing_was_found_claims_no_more_than_was_looked_at(judged: list[Verdict], words: str) -> None:
    assert regression_list([], judged) == f'<p class="notice">{words}</p>'
