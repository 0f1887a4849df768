"""The examples as they are: steps are replayed where that is measured to be faster."""

from __future__ import annotations

import pytest

from tests.examples.cases import FINETUNE, GAN, GPT, MNIST_ADAM, PACKED, RESNET, TEXT, Case, assert_same, parametrize


@pytest.mark.slow
@parametrize(MNIST_ADAM, RESNET, GPT, GAN, TEXT, PACKED, FINETUNE)
def test_measuring_changes_no_result(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KITSUNE_MODE", raising=False)
    run = case.run()
    printed = capsys.readouterr().out
    assert run.statuses
    for status in run.statuses:
        assert status.reason
        assert str(status) in printed
    assert_same(run, case)
