"""The examples with every step replayed that can be."""

from __future__ import annotations

import pytest

from tests.examples.cases import (
    ANY_LENGTH,
    BFLOAT16,
    DATA_PARALLEL,
    FINETUNE,
    FLOAT16,
    GAN,
    GPT,
    MNIST,
    PACKED,
    PROFILED,
    RESNET,
    TEXT,
    WHOLE_STEP,
    Case,
    assert_same,
    parametrize,
    plain,
)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step\\(\\)`")  # the scaler skips the first update
@parametrize(
    MNIST,
    RESNET,
    BFLOAT16,
    FLOAT16,
    WHOLE_STEP,
    DATA_PARALLEL,
    GPT,
    GAN,
    TEXT,
    ANY_LENGTH,
    PACKED,
    FINETUNE,
    PROFILED,
)
def test_replays_train_as_plain_pytorch_does(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.learns:
        learned = plain(case).series(case.learns)
        assert learned[-1] < 0.95 * learned[0]

    monkeypatch.setenv("KITSUNE_MODE", "replay")
    run = case.run()
    assert_same(run, case)
    assert run.statuses
    for status in run.statuses:
        if case.refused:
            assert (status.mode, status.replays) == ("eager", 0)
            assert case.refused in status.reason
            continue
        assert status.replays > 0
        if case.settles:
            assert status.mode == "replay"
            assert {"forward", "backward"} <= set(status.covered)
            assert "update" in status.covered or any("no update rule" in refusal for refusal in status.refusals)
