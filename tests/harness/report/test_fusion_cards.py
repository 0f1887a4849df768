from dataclasses import replace
from pathlib import Path

import pytest

from harness.comparison import compare
from harness.fusions import StepFusions, UnreadableFusions
from harness.report import html_page
from harness.report.fusion_cards import fusion_cards
from harness.rows import Comparison
from harness.store import Store
from tests.harness import sample


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    root = tmp_path_factory.mktemp("results")
    sample.write_gpu_history(root)
    return compare(Store(root).load(sample.GPU_MACHINE), folder=root)


@pytest.fixture(scope="module")
def first(gpu: Comparison) -> StepFusions:
    entry = gpu.fusions[0]
    assert isinstance(entry, StepFusions)
    return entry


def test_every_case_and_precision_has_a_card_with_its_variants(gpu: Comparison) -> None:
    cards = fusion_cards(gpu.fusions)
    assert cards.count("<figure ") == cards.count("<details>") == 6
    assert "<figcaption>lenet, batch 64, cuda, amp</figcaption>" in cards
    assert cards.count("<small>Kitsune TrainStep and Kitsune TrainStep on one stream</small>") == 6


def test_a_sentence_tells_what_it_is_worth(first: StepFusions) -> None:
    assert first.fused.gain is not None
    cards = fusion_cards([first])
    assert "7 parts fused, which by themselves take 12.5 µs less. The step on one stream is 1.03" in cards
    assert " as fast: 123 µs before, 120 µs after.</p>" in cards


def test_what_is_not_known_is_said(first: StepFusions) -> None:
    missing = replace(first, fused=replace(first.fused, seconds=None, gain=None, missing="no <time>"))
    assert "What the step gains was not measured: no &lt;time&gt;." in fusion_cards([missing])
    apart = replace(first, fused=replace(first.fused, gain=None))
    assert "The step on one stream took 123 µs before, 120 µs after, but not in the same" in fusion_cards([apart])
    eagerly = replace(first, fused=replace(first.fused, mode="eager"))
    assert "120 µs after, which ran eagerly." in fusion_cards([eagerly])
    untimed = replace(first, replaced=first.replaced[-1:], left=())
    cards = fusion_cards([untimed])
    assert "2 parts fused, none of them timed by itself." in cards
    assert "<details>" not in cards


def test_a_step_of_which_nothing_was_replaced_shows_what_was_tried(first: StepFusions) -> None:
    cards = fusion_cards([replace(first, replaced=())])
    assert "Nothing was fused." in cards
    assert cards.count("<table") == 1
    assert "Tried and left: 3" in cards


def test_an_unreadable_plan_is_named(first: StepFusions) -> None:
    notice = fusion_cards([UnreadableFusions(first.case, "kitsune_trainstep_amp", "its plan cannot be <read>")])
    assert notice == (
        '<p class="notice" data-models="[&quot;mlp&quot;]">'
        "mlp, batch 64, cuda, Kitsune TrainStep, amp: its plan cannot be &lt;read&gt;</p>"
    )


def test_without_fusions_there_is_no_section(tmp_path: Path, gpu: Comparison) -> None:
    assert 'id="fusion"' in html_page(gpu)
    without = html_page(replace(gpu, fusions=()))
    assert 'id="fusion"' not in without
    assert "#fusion" not in without
    assert "What was fused" not in without
