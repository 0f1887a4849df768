"""The examples, on synthetic images and for a short time."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from examples import cifar10, mnist


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]


def test_mnist_learns_as_it_does_without_kitsune(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--synthetic", "--epochs", "2", "--limit", "25", "--batch-size", "32"]
    accuracy = mnist.main(arguments)
    with_kitsune = capsys.readouterr().out
    assert mnist.main([*arguments, "--plain"]) == pytest.approx(accuracy, abs=0.02)
    without = capsys.readouterr().out
    assert losses(with_kitsune) == pytest.approx(losses(without), rel=1e-3)
    assert losses(without)[1] < losses(without)[0]
    assert "Kitsune" in with_kitsune
    assert "Kitsune" not in without


def test_cifar10_runs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--synthetic", "--epochs", "1", "--limit", "4", "--batch-size", "4", "--lr", "0.02"]
    cifar10.main(arguments)
    with_kitsune = capsys.readouterr().out
    cifar10.main([*arguments, "--plain"])
    assert losses(with_kitsune) == pytest.approx(losses(capsys.readouterr().out), rel=1e-2)


@pytest.mark.parametrize("example", [mnist, cifar10])
def test_without_the_data_the_way_out_is_named(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        example.main(["--data", str(tmp_path)])
    assert ended.value.code == 2
    assert "--synthetic" in capsys.readouterr().err
