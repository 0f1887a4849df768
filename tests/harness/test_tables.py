from dataclasses import replace
from pathlib import Path

from harness import formats, tables
from harness.comparison import compare
from harness.rows import LISTED_CHANGES, LevelChange
from harness.store import Store
from harness.tables import Tone
from tests.harness import sample


def test_each_variant_s_set_up_is_told_where_it_is_not_the_default(tmp_path: Path) -> None:
    sample.write_gpu_history(tmp_path, rounds=1)
    table = tables.recipe_table(compare(Store(tmp_path).load(sample.GPU_MACHINE), folder=tmp_path))
    assert [column.heading for column in table.columns[-3:]] == ["streams", "fusion", "loss deferred"]
    told = {row[0].text: [cell.text for cell in row[-3:]] for row in table.rows}
    assert told["kitsune_trainstep_amp"] == told["kitsune_dropin_amp"] == told["eager_amp"] == ["—"] * 3
    assert told["kitsune_trainstep_one_stream_amp"] == ["1", "—", "—"]
    assert told["kitsune_trainstep_unfused_amp"] == ["1", "off", "—"]
    assert told["kitsune_deferred_amp"] == ["—", "—", "on"]


def test_kitsune_stands_out_unless_something_is_switched_off() -> None:
    assert tables.variant_tone("kitsune_dropin_fp32") is Tone.STRONG
    assert tables.variant_tone("kitsune_trainstep_unfused_fp32") is Tone.FAINT
    assert tables.variant_tone("eager_fp32") is Tone.PLAIN


def test_rounds_that_ran_otherwise_are_told(tmp_path: Path) -> None:
    sample.write_gpu_history(tmp_path, rounds=1)
    comparison = compare(Store(tmp_path).load(sample.GPU_MACHINE), folder=tmp_path)
    place = next(index for index, row in enumerate(comparison.rows) if row.variant == "kitsune_trainstep_amp")

    def told(modes: dict[str, int]) -> str:
        row = replace(comparison.rows[place], modes=modes)
        rows = (*comparison.rows[:place], row, *comparison.rows[place + 1 :])
        table = tables.variant_table(replace(comparison, rows=rows)).on(tables.Medium.TEXT)
        column = [column.heading for column in table.columns].index("mode")
        return table.rows[place][column].text

    assert told({}) == told({"replay": 4}) == "replay"
    assert told({"eager": 4}) == "eager"
    assert told({"replay": 3, "eager": 1}) == "replay ×3, eager"


def test_means_are_speed_ups_as_the_rows_are(tmp_path: Path) -> None:
    sample.write_gpu_history(tmp_path, rounds=2)
    comparison = compare(Store(tmp_path).load(sample.GPU_MACHINE), folder=tmp_path)
    for row, summary in zip(tables.summary_table(comparison.summaries).rows, comparison.summaries, strict=True):
        assert row[3].text == formats.ratio_with_interval(summary.over_eager)
        assert row[3].key == summary.over_eager.ratio > 1


def test_rows_about_variants_have_their_subjects(tmp_path: Path) -> None:
    sample.write_gpu_history(tmp_path, rounds=2)
    comparison = compare(Store(tmp_path).load(sample.GPU_MACHINE), folder=tmp_path)
    for table in (tables.variant_table(comparison), tables.change_table(comparison), tables.sample_table(comparison)):
        shown = table.on(tables.Medium.PAGE)
        assert [(row[0].text, row[1].text) for row in shown.rows] == [
            (subject.case.model, str(subject.case.batch)) for subject in shown.subjects
        ]


def test_commits_are_listed_with_what_changed_around_them(tmp_path: Path) -> None:
    sample.write_long_history(tmp_path, commits=4, models=1)
    comparison = compare(Store(tmp_path).load(sample.GPU_MACHINE), folder=tmp_path)
    rows = tables.commit_table(comparison).rows
    assert [row[0].text for row in rows] == [commit.short for commit in reversed(comparison.commits)]
    assert [row[4].text for row in rows] == ["driver: 580.159.03 → 590.44.01", "", "", ""]


def test_of_many_changes_of_level_the_last_ones_are_listed_and_the_title_says_of_how_many(tmp_path: Path) -> None:
    sample.write_gpu_history(tmp_path, rounds=1)
    comparison = compare(Store(tmp_path).load(sample.GPU_MACHINE), folder=tmp_path)
    series = comparison.history[0]
    early, late = (
        LevelChange(before, first, first, missing=0, ratio=1.1, p_value=0.003, is_worse=True)
        for before, first in zip(comparison.commits, comparison.commits[1:], strict=False)
    )
    few = replace(comparison, history=(replace(series, changes=(early, *[late] * (LISTED_CHANGES - 1))),))
    assert len(tables.level_table(few).rows) == LISTED_CHANGES
    assert tables.level_title(few) == "Changes of level"
    many = replace(comparison, history=(replace(series, changes=(early, *[late] * 1200)),))
    table = tables.level_table(many)
    place = [column.heading for column in table.columns].index("first at")
    assert [row[place].text for row in table.rows] == [late.first.short] * LISTED_CHANGES
    assert tables.level_title(many) == "Changes of level: the last 100 of 1,201; JSON has all"
