"""What the examples say of themselves."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from examples import chargpt, cifar10, cifar10_loop, data_parallel, finetune, gan, mnist, text, with_profiler

EXAMPLES = (chargpt, cifar10, cifar10_loop, data_parallel, finetune, gan, mnist, text, with_profiler)


@pytest.mark.parametrize("example", EXAMPLES)
def test_options_are_explained(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        example.main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert example.__name__ in printed
    assert "--plain" in printed


@pytest.mark.parametrize("example", [mnist, cifar10, cifar10_loop])
def test_without_the_data_the_way_out_is_named(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        example.main(["--data", str(tmp_path)])
    assert ended.value.code == 2
    assert "--synthetic" in capsys.readouterr().err


def test_a_seed_gives_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--iterations", "3", "--batch-size", "8", "--width", "8", "--log-interval", "1", "--device", "cpu"]
    first, again, other = (gan.main([*options, "--plain", "--seed", seed]) for seed in ("1", "1", "2"))
    assert first.figures == again.figures != other.figures
    assert "Kitsune" not in capsys.readouterr().out


@pytest.mark.support("Ecosystem", "torch.profiler around a loop", "replayed")
@pytest.mark.parametrize("plain", [True, False])
def test_a_profile_has_the_users_ranges(
    plain: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KITSUNE_MODE", "replay")
    options = "--synthetic --limit 12 --batch-size 8 --epochs 1 --wait 4 --active 3 --rows 500 --device cpu --trace"
    run = with_profiler.main([*options.split(), str(tmp_path / "trace.json"), *(["--plain"] if plain else [])])
    printed = capsys.readouterr().out
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for name in (
        "ProfilerStep",
        "forward",
        "backward",
        "Optimizer.step#Adam.step",
        "Optimizer.zero_grad#Adam.zero_grad",
    ):
        assert name in printed
        assert sum(event.get("name", "").startswith(name) for event in events) >= 3, name
    assert [status.mode for status in run.statuses] == ([] if plain else ["replay"])
