"""Lightning, Accelerate and `transformers.Trainer` train as with plain PyTorch, replayed."""

from __future__ import annotations

import importlib
import importlib.util

import pytest

from tests.examples.cases import Case, assert_same

pytestmark = pytest.mark.libraries

_MNIST = "--synthetic --limit 12 --batch-size 8 --epochs 2"
_BERT = "--documents 96 --batch-size 8 --width 32 --layers 1 --epochs 2"

CASES = [
    ("with_accelerate", "accelerate", _MNIST, ()),
    ("with_accelerate", "accelerate", f"{_MNIST} --precision bf16 --accumulate 1", pytest.mark.slow),
    ("with_lightning", "lightning", _MNIST, ()),
    ("with_lightning", "lightning", f"{_MNIST} --manual", ()),
    ("with_trainer", "accelerate", _BERT, ()),
    ("with_trainer", "accelerate", f"{_BERT} --accumulate 2 --bf16", pytest.mark.slow),
]


def skip_without(package: str, example: str) -> None:
    """Without importing them, which the examples do in an order of their own."""
    for name in (package, *(["transformers"] if example == "with_trainer" else [])):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


@pytest.mark.support("Libraries", "Lightning (automatic and manual), Accelerate, transformers.Trainer", "replayed")
@pytest.mark.parametrize(
    ("example", "package", "options"),
    [pytest.param(*case[:3], marks=case[3], id=" ".join(case[::2][:2])) for case in CASES],
)
@pytest.mark.filterwarnings("ignore")  # of the libraries' own
def test_it_trains_as_with_plain_pytorch(
    example: str, package: str, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without(package, example)
    if package == "accelerate":
        state = importlib.import_module("accelerate.state")
        state.AcceleratorState._reset_state(True)  # the precision of an earlier test would stay
    monkeypatch.setenv("KITSUNE_MODE", "replay")
    rounded = "bf16" in options
    module = importlib.import_module(f"examples.{example}")
    case = Case(example, module.main, options, tolerance=2e-2 if rounded else 1e-4, accuracy=0.05)
    run = case.run()
    assert_same(run, case)
    (status,) = run.statuses
    assert status.mode == "replay"
    assert status.covered == ("forward", "backward", "update")


@pytest.mark.parametrize("example", ["with_accelerate", "with_lightning", "with_trainer"])
def test_options_are_explained(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    skip_without("lightning" if example == "with_lightning" else "accelerate", example)
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"examples.{example}").main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert f"examples.{example}" in printed
    assert "--plain" in printed
