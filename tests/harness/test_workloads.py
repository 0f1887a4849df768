"""The user's own models: how they are found, and what is wrong with those that cannot be used."""

from importlib import metadata
from pathlib import Path

import pytest
import torch

from harness import context, profiles, variants, workloads
from harness.own_models import OwnModel, WorkloadError, decoded, encoded
from harness.variants.building import start
from harness.variants.training import prepare
from tests.harness.checkout import ROOT

EXAMPLE = ROOT / "examples" / "own_model.py"
GOOD = """
import torch
from torch import nn
from models import Workload

class Data:
    def batch(self, batch_size, *, index=0, device="cpu"):
        return torch.ones(batch_size, 3, device=device), torch.zeros(batch_size, 1, device=device)

def build():
    return Workload("tiny", nn.Linear(3, 1), nn.MSELoss(), Data(), {"cpu": 4})
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    return path


def test_the_example_trains_as_every_variant_that_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    found = workloads.own_model(f"{EXAMPLE}:build", ROOT)
    assert (found.name, found.source) == ("spirals", "examples/own_model.py:build")
    assert [(case.name, case.default) for case in found.cases()] == [
        ("spirals-b64", True), ("spirals-b256", False),
        ("spirals-b64", False), ("spirals-b256", True), ("spirals-b1024", False),
    ]  # fmt: skip
    monkeypatch.setenv("HARNESS_WORKLOADS", encoded([found]))
    monkeypatch.setenv("ASV_CONF_DIR", str(ROOT))
    device = torch.device("cpu")
    losses = []
    for name in ("eager_fp32", "kitsune_dropin_fp32", "kitsune_trainstep_fp32"):
        training = start(variants.get(name), prepare(variants.get(name), "spirals", 64, device))
        losses.append((training.run(1).item(), training.run(300).item()))
    assert losses[0][1] < 0.5 * losses[0][0]
    for pair in losses[1:]:
        assert pair == pytest.approx(losses[0], rel=1e-2)


def test_weights_are_the_same_each_time_and_torch_s_random_numbers_untouched(file: Path) -> None:
    model = OwnModel("tiny", f"{file}:build", {"cpu": 4}, {"cpu": (4,)})
    before = torch.get_rng_state()
    first, second = (workloads.build("tiny", [model], file.parent).module.state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_file_may_import_what_lies_beside_it(file: Path) -> None:
    (file.parent / "parts_of_mine.py").write_text("SIZE = 3\n")
    file.write_text(GOOD.replace("nn.Linear(3", "nn.Linear(parts_of_mine.SIZE") + "\nimport parts_of_mine\n")
    assert workloads.own_model(f"{file}:build", ROOT).source == f"{file}:build"


def test_packages_offer_workloads_by_entry_points(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(file.parent)
    entry = metadata.EntryPoint("small", "mine:build", workloads.ENTRY_POINTS)
    monkeypatch.setattr(workloads.metadata, "entry_points", lambda group: [entry] if group == entry.group else [])
    found = workloads.own_model("small", ROOT)
    assert (found.name, found.source) == ("tiny", "small")
    with pytest.raises(WorkloadError, match=r"'large' is neither FILE.py:FUNCTION nor .* there are: small"):
        workloads.own_model("large", ROOT)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("def build", "def other"), "has no function 'build'"),
        (("import torch\n", "import nothing_like_it\n"), "cannot be imported: ModuleNotFoundError: .*nothing_like_it"),
        (('"tiny", nn.Linear(3, 1)', '"tiny", nn.Linear(-3)'), "cannot be built: TypeError"),
        (("return Workload", "return str"), "cannot be built: TypeError"),
        (("return Workload(", "return tuple(("), "cannot be imported: SyntaxError"),
        (('"tiny"', '"Tiny Net"'), "the name 'Tiny Net' cannot be used"),
        (('"tiny"', '"mlp"'), "the name 'mlp' cannot be used"),
        (('{"cpu": 4}', '{"tpu": 4}'), "give sizes for 'cpu', 'cuda' or both"),
        (('{"cpu": 4}', '{"cpu": 0}'), "each must be a whole number from 1"),
        (("nn.Linear(3, 1)", "nn.Linear(4, 1)"), "cannot compute the loss of a batch of two: RuntimeError"),
        (("nn.Linear(3, 1)", "(lambda x: x)"), "the module is a function"),
        (("nn.MSELoss()", "nn.MSELoss(reduction='none')"), "must be a tensor of one value"),
        (("nn.Linear(3, 1)", "nn.Linear(3, 1).requires_grad_(False)"), "does not depend on any parameter"),
    ],
)
def test_what_is_wrong_is_told_with_the_file(file: Path, change: tuple[str, str], words: str) -> None:
    file.write_text(GOOD.replace(*change))
    with pytest.raises(WorkloadError, match=rf"mine\.py.*{words}"):
        workloads.own_model(f"{file}:build", ROOT)


def test_what_is_no_workload_at_all(file: Path) -> None:
    file.write_text("def build(): return 7\n")
    with pytest.raises(WorkloadError, match=r"returned a int, not a models\.workload\.Workload"):
        workloads.own_model(f"{file}:build", ROOT)


def test_a_commit_without_the_file_says_so(file: Path) -> None:
    model = OwnModel("tiny", "absent.py:build", {"cpu": 4}, {"cpu": (4,)})
    assert workloads.missing("tiny", [model], file.parent) == "there is no file absent.py here"
    assert workloads.missing("mlp", [model], file.parent) is None
    with pytest.raises(WorkloadError, match=r"there is no file absent\.py here"):
        workloads.build("tiny", [model], file.parent)


def test_the_measuring_process_knows_the_cases_of_own_models_alone() -> None:
    model = OwnModel("tiny", "mine.py:build", {"cpu": 4}, {"cpu": (2, 4)})
    variables = {
        "ASV_CONF_DIR": str(ROOT), "ASV_ENV_DIR": "/env", "ASV_COMMIT": "a" * 40, "HARNESS_HEAD": "a" * 40,
        "HARNESS_MACHINE": "here", "HARNESS_WORKLOADS": encoded([model]),
    }  # fmt: skip
    found = context.from_environment(variables)
    assert found.own == (model,)
    assert [case.name for case in found.cases("cpu")] == ["tiny-b4"]
    assert found.cases("cuda") == ()
    sweep = context.from_environment({**variables, "HARNESS_PROFILE": "sweep"})
    assert [case.name for case in sweep.cases("cpu")] == ["tiny-b2", "tiny-b4"]
    named = context.from_environment({**variables, "HARNESS_CASES": "tiny-b2"})
    assert [case.name for case in named.cases("cpu")] == ["tiny-b2"]


def test_own_models_travel_as_text() -> None:
    model = OwnModel("tiny", "mine.py:build", {"cpu": 4}, {"cpu": (2, 4)})
    assert decoded(encoded([model])) == (model,)
    assert decoded(encoded([])) == ()
    for damaged in ("no json", "7", '[{"name": "tiny"}]'):
        with pytest.raises(ValueError, match="not a list of workloads"):
            decoded(damaged)


def test_what_the_profile_measures_of_own_models() -> None:
    (case,) = OwnModel("tiny", "mine.py:build", {"cpu": 4}, {"cpu": (4,)}).cases()
    measured = [
        name for name in variants.names() if profiles.left_out("quick", case, variants.get(name), at_head=True) is None
    ]
    assert measured == ["eager_fp32", "kitsune_dropin_fp32", "kitsune_trainstep_fp32"]
