"""The table of the zoo: what stands in it, and where."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness import render
from harness.comparison import compare
from harness.report import html_page
from harness.rows import Comparison
from harness.store import Store
from harness.tables import Cell, Tone
from harness.zoo_tables import zoo_table
from tests.harness import sample

FORMS = ["kitsune_deferred_amp", "kitsune_dropin_amp", "kitsune_trainstep_amp"]


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    sample.write_zoo_history(tmp_path)
    return compare(Store(tmp_path).load(sample.GPU_MACHINE), folder=tmp_path)


def cells(comparison: Comparison, model: str, form: str) -> dict[str, Cell]:
    """The row of a form on a model, by the columns' headings."""
    table = zoo_table(comparison)
    headings = [column.heading for column in table.columns]
    place = next(
        index for index, subject in enumerate(table.subjects) if (subject.case.model, subject.variant) == (model, form)
    )
    return dict(zip(headings, table.rows[place], strict=True))


def test_every_form_of_every_model_has_a_row_in_the_zoo_s_order(comparison: Comparison) -> None:
    subjects = [(subject.case.model, subject.variant) for subject in zoo_table(comparison).subjects]
    assert subjects == [(model, form) for model in ("dlrm", "policy_value", "lstm", "timm_vit_small") for form in FORMS]


def test_a_row_stands_beside_eager_and_its_best_peer(comparison: Comparison) -> None:
    row = cells(comparison, "policy_value", "kitsune_trainstep_amp")
    rows = {entry.variant: entry for entry in comparison.rows if entry.case.model == "policy_value"}
    step, peer = rows["kitsune_trainstep_amp"], rows["handcaptured_compile_amp"]
    assert row["best peer"].text == step.best_peer == "handcaptured_compile_amp"
    assert row["its set-up"].key == peer.setup_s
    assert row["eager"].key == rows["eager_amp"].seconds
    assert row["memory of eager"].key == rows["eager_amp"].allocated_bytes
    assert row["memory"].key == step.allocated_bytes
    assert step.peer_ratio is not None
    assert row["over best peer"].key == 1 / step.peer_ratio.ratio > 1
    assert "[" in row["over best peer"].text
    assert row["waited"].text == "2.50 s"
    assert row["first replay"].key == step.first_replay_s
    assert row["how it ran"].text == "replay"


def test_losses_are_held_against_eager_in_the_same_precision(comparison: Comparison) -> None:
    for row in comparison.rows:
        assert row.parity is not None
        if row.variant == "eager_amp":
            assert row.loss_gap == 0


def test_losses_from_the_same_state_are_told_with_what_eager_differs_from_itself(comparison: Comparison) -> None:
    row = cells(comparison, "policy_value", "kitsune_trainstep_amp")
    assert (row["loss apart"].text, row["loss apart"].tone) == ("0.1% [0.05%]", Tone.PLAIN)
    assert row["of it replayed"].text == "20 of 20"
    wrong = cells(comparison, "policy_value", "kitsune_dropin_amp")["loss apart"]
    assert (wrong.text, wrong.tone) == ("30% [0.05%] differs", Tone.BAD)
    assert cells(comparison, "lstm", "kitsune_dropin_amp")["of it replayed"].text == "0 of 20"


def test_why_a_variant_could_not_go_on_is_told(comparison: Comparison) -> None:
    rows = tuple(
        replace(row, continuation=None, continuation_missing="it could not go on: out of luck")
        for row in comparison.rows
    )
    row = cells(replace(comparison, rows=rows), "dlrm", "kitsune_dropin_amp")
    assert row["loss apart"].text == "it could not go on: out of luck"
    assert row["of it replayed"].text == "—"


def test_where_kitsune_loses_it_is_said(comparison: Comparison) -> None:
    row = cells(comparison, "lstm", "kitsune_trainstep_amp")
    assert (row["verdict"].text, row["verdict"].tone) == ("slower", Tone.BAD)
    assert row["over best peer"].key is not None
    assert row["over best peer"].key < 1


def test_where_kitsune_steps_aside_its_reason_is_told(comparison: Comparison) -> None:
    told = cells(comparison, "lstm", "kitsune_dropin_amp")["how it ran"].text
    assert told == "eager: a recurrent layer of torch is called"


def test_a_model_that_cannot_be_built_is_in_the_table_with_its_reason(comparison: Comparison) -> None:
    row = cells(comparison, "timm_vit_small", "kitsune_dropin_amp")
    assert row["how it ran"].text == "skipped: timm is not installed: install it"
    assert row["over best peer"].text == row["eager"].text == "—"


def test_means_are_over_the_zoo_s_models(comparison: Comparison, tmp_path: Path) -> None:
    assert [(summary.variant, summary.cases) for summary in comparison.zoo_summaries] == [(form, 3) for form in FORMS]
    assert comparison.summaries == comparison.zoo_summaries, "nothing else was measured"
    sample.write_gpu_history(tmp_path)
    both = compare(Store(tmp_path).load(sample.GPU_MACHINE), folder=tmp_path)
    zoo = {summary.variant: summary.over_eager.ratio for summary in both.zoo_summaries}
    assert zoo == {summary.variant: summary.over_eager.ratio for summary in comparison.zoo_summaries}
    assert {summary.cases for summary in both.summaries} == {3}
    assert set(zoo) < {summary.variant for summary in both.summaries}


def test_all_outputs_show_it(comparison: Comparison) -> None:
    title = "The zoo: models of many kinds, each beside its best peer"
    text, markdown = render.text(comparison), render.markdown(comparison)
    assert title in text
    assert f"### {title}" in markdown
    for shown in (text, markdown):
        assert shown.count("geometric mean of 3 cases") == 2 * len(FORMS)
    document = json.loads(render.json_document(comparison))
    assert [entry["variant"] for entry in document["zoo_summaries"]] == FORMS
    told = {(row["case"]["model"], row["variant"]): row["continuation"] for row in document["rows"]}
    wrong = told["policy_value", "kitsune_dropin_amp"]
    assert (round(wrong["gap"], 3), wrong["agrees"], wrong["num_replays"]) == (0.3, False, 20)
    page = html_page(comparison)
    assert '<section id="zoo">' in page
    assert "a recurrent layer of torch is called" in page


def test_without_the_zoo_nothing_is_shown_of_it(tmp_path: Path) -> None:
    sample.write_gpu_history(tmp_path, rounds=2)
    comparison = compare(Store(tmp_path).load(sample.GPU_MACHINE), folder=tmp_path)
    assert zoo_table(comparison).rows == ()
    assert comparison.zoo_summaries == ()
    assert "zoo" not in render.text(comparison)
    assert 'id="zoo"' not in html_page(comparison)
