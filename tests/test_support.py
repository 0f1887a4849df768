"""The table of what is supported says what the tests say."""

from pathlib import Path

import pytest

from tests import support


def test_the_document_is_up_to_date() -> None:
    written = support.DOCUMENT.read_text(encoding="utf-8")
    assert written == support.document(support.claims()), "run `python -m tests.support`"


PAINS = {
    "gradient accumulation is wrong under graphs": ["accumulation over 2, 4 and 8 micro-batches", "tied weights"],
    "hyperparameters are frozen at capture": [
        "every scheduler of torch.optim.lr_scheduler",
        "OneCycle and Cyclic, with momentum or betas",
    ],
    "a gradient scaler's skipped step is invisible": [
        "GradScaler over 1,000 steps with infinities: the same course of the scale"
    ],
    "clipping synchronizes": [
        "clipping by norm and by value",
        "clip_grad_norm_ in a replayed loop waits for nothing",
    ],
    "changing shapes": [
        "more shapes than graphs are kept, in turn: the first ones stay",
        "shapes that do not come back",
    ],
    "it takes minutes to be ready": [
        "set-up time, gain and break-even steps are reported",
        "the training goes on while kernels for it are compiled",
    ],
    "graphs need memory": ["out of memory while capturing", "more memory than max_memory would be needed"],
    "dropout is wrong under replay": [
        "dropout draws another mask at each step",
        "masks repeat from a seed, and after a checkpoint was loaded",
    ],
    "new arguments are ignored": ["a batch that is written where the last one was"],
    "several processes hang": [
        "DistributedDataParallel: buckets, no_sync, join, buffers; "
        "a shape, a hook, an error or a choice on one rank alone"
    ],
    "the wrapper is not an optimizer": [
        "state_dict from and into a plain optimizer",
        "deepcopy and pickle",
        "add_param_group in mid-training",
        "step(closure)",
        "Lightning (automatic and manual), Accelerate, transformers.Trainer",
    ],
    "slower than eager, silently": ["replay that is no faster than eager is not used"],
    "an option does nothing, silently": ["status() tells what is replayed, and what of the options has no effect"],
}
"""What users of other accelerators suffer from, and the lines that show that it is not so here."""


@pytest.mark.parametrize("pain", PAINS)
def test_what_others_suffer_from_has_a_test(pain: str) -> None:
    assert {claim.what for claim in support.claims()}.issuperset(PAINS[pain])


def test_all_areas_are_there() -> None:
    areas = {claim.area for claim in support.claims()}
    assert {"Gradients", "Hyperparameters", "Precision", "Shapes and modes", "Several processes", "Failure"} <= areas


@pytest.mark.parametrize("mark", ['support("area", "what")', 'support("area", "what", "somehow")', "support(1, 2, 3)"])
def test_a_wrong_mark_is_named(mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "ROOT", tmp_path)
    (tmp_path / "test_one.py").write_text(f"import pytest\n\n@pytest.mark.{mark}\ndef test_it(): ...\n")
    with pytest.raises(ValueError, match=r"test_one.py, line 3: support\(area, what, how\)"):
        support.claims(tmp_path)


def test_equal_lines_are_one() -> None:
    claims = [support.Claim("Area", "what", "replayed", "tests/a.py", f"test_{name}") for name in ("one", "other")]
    assert "| what | replayed | [one](../tests/a.py), [other](../tests/a.py) |" in support.document(claims)
