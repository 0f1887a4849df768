"""What a measurement is told by its surroundings."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import context, profiles
from tests.harness.checkout import ROOT

ASV = {"ASV_CONF_DIR": str(ROOT), "ASV_ENV_DIR": "/environments/one", "ASV_COMMIT": "a" * 40}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_MACHINE", "here")


def test_a_plain_asv_run_measures_the_quick_profile() -> None:
    found = context.from_environment({**ASV, "HARNESS_HEAD": "b" * 40})
    assert found == context.Context(
        root=ROOT,
        checkout=Path("/environments/one/project"),
        commit="a" * 40,
        at_head=False,
        machine="here",
        profile="quick",
        progress=None,
    )
    assert found.results == ROOT / "results"


def test_the_harness_s_own_variables() -> None:
    variables = {"HARNESS_PROFILE": "full", "HARNESS_HEAD": "a" * 40, "HARNESS_PROGRESS": "/progress"}
    found = context.from_environment({**ASV, **variables})
    assert (found.profile, found.at_head, found.progress) == ("full", True, Path("/progress"))


def test_head_is_what_git_says_where_nothing_else_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_head", lambda root: "a" * 40)
    assert context.from_environment(ASV).at_head


@pytest.mark.parametrize("missing", sorted(ASV))
def test_outside_asv_the_missing_variable_is_named(missing: str) -> None:
    with pytest.raises(context.ContextError, match=missing):
        context.from_environment({name: value for name, value in ASV.items() if name != missing})


def test_an_unknown_profile_is_named_with_those_allowed() -> None:
    with pytest.raises(context.ContextError, match=r"HARNESS_PROFILE is 'slow'; allowed: 'quick', 'sweep', 'full'"):
        context.from_environment({**ASV, "HARNESS_HEAD": "b" * 40, "HARNESS_PROFILE": "slow"})


def test_git_that_cannot_say_head_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(context.ContextError, match="rev-parse HEAD"):
        context.from_environment({**ASV, "ASV_CONF_DIR": str(tmp_path)})


def test_sampling_is_the_profile_s_unless_it_is_told() -> None:
    assert context.from_environment({**ASV, "HARNESS_HEAD": "b" * 40}).sampling == profiles.AS_THE_PROFILE_SAYS
    variables = {
        "HARNESS_UNTIL": "conclusive",
        "HARNESS_MOST_ROUNDS": "9",
        "HARNESS_NARROW_WITHIN": "0.002",
        "HARNESS_TIMED_SECONDS": "3",
    }
    found = context.from_environment({**ASV, "HARNESS_HEAD": "b" * 40, **variables}).sampling
    assert found == profiles.Sampling("conclusive", 9, 0.002, 3.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HARNESS_UNTIL", "bored"),
        ("HARNESS_MOST_ROUNDS", "0"),
        ("HARNESS_MOST_ROUNDS", "2.5"),
        ("HARNESS_NARROW_WITHIN", "-1"),
        ("HARNESS_TIMED_SECONDS", "long"),
        ("HARNESS_TIMED_SECONDS", "inf"),
    ],
)
def test_unusable_limits_are_named(name: str, value: str) -> None:
    with pytest.raises(context.ContextError, match=f"{name} is '{value}'"):
        context.from_environment({**ASV, "HARNESS_HEAD": "b" * 40, name: value})


def test_what_is_measured_can_be_narrowed_down() -> None:
    variables = {
        "HARNESS_HEAD": "b" * 40, "HARNESS_CASES": "mlp-b64 lenet-b64", "HARNESS_VARIANTS": "eager_fp32",
        "HARNESS_RESUME": "1", "HARNESS_PHASES": "1", "HARNESS_RESULTS": "/elsewhere",
    }  # fmt: skip
    found = context.from_environment({**ASV, **variables})
    assert found.selection == profiles.Selection(("mlp-b64", "lenet-b64"), ("eager_fp32",))
    assert found.resume
    assert found.phases
    assert not context.from_environment({**ASV, "HARNESS_HEAD": "b" * 40}).phases
    assert found.results == Path("/elsewhere")
    assert [case.name for case in found.cases("cpu")] == ["mlp-b64", "lenet-b64"]


def test_the_zoo_is_measured_by_its_profile_or_by_name() -> None:
    for variables, expected in (
        ({}, False),
        ({"HARNESS_PROFILE": "full"}, False),
        ({"HARNESS_PROFILE": "zoo"}, True),
        ({"HARNESS_PROFILE": "zoo", "HARNESS_CASES": "mlp-b64"}, False),
        ({"HARNESS_CASES": "mlp-b64 dlrm-b2048"}, True),
    ):
        assert context.measures_zoo(variables) is expected


@pytest.mark.parametrize(("name", "words"), [("CASES", "no case 'x'; there are"), ("VARIANTS", "no variant 'x'")])
def test_unknown_names_are_told(name: str, words: str) -> None:
    with pytest.raises(context.ContextError, match=words):
        context.from_environment({**ASV, "HARNESS_HEAD": "b" * 40, f"HARNESS_{name}": "x"})


def test_asv_has_benchmarks_of_the_zoo_only_where_it_is_measured() -> None:
    script = (
        "from harness.benchmarks import training; print(len(training.Zoo.params[1]) if hasattr(training, 'Zoo') else 0)"
    )
    for profile, expected in (("quick", 0), ("zoo", len({case.name for case in profiles.ZOO}))):
        variables = {**os.environ, "HARNESS_PROFILE": profile, "HARNESS_CASES": ""}
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=variables, capture_output=True, check=True)
        assert int(done.stdout) == expected
