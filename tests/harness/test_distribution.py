"""The harness as a project elsewhere has it: what its wheel installs, the workflow of its documentation, the fixture.

The project here has packages called ``models`` and ``harness`` of its own.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.checkout import KITSUNE, ROOT
from tests.harness.repository import git

WORKFLOW = ROOT / "docs" / "ci" / "training-step.yml"
BRIEF = "\n_SHORT = dict.fromkeys(_SHORT, Effort(2, (2, 3), 0.05, 0.001, 0.05, 60.0, 120.0))\n"
WORKLOAD = """
import torch
from torch import nn

from kitsune_harness.models import Workload
from models import Net

class Data:
    def batch(self, batch_size, *, index=0, device="cpu"):
        x = torch.randn(batch_size, 4, generator=torch.Generator().manual_seed(index)).to(device)
        return x, x.sum(1, keepdim=True)

def build():
    return Workload("net", Net(), nn.MSELoss(), Data(), {"cpu": 8})
"""
NET = """
import time
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        time.sleep(PAUSE)
        return self.layer(x)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from a copy: building leaves files behind."""
    copy = tmp_path_factory.mktemp("checkout")
    for package in ("harness", "models", "kitsune"):
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    folder = copy / "harness" / "distribution"
    program = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, check=True)
    (path,) = (folder / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def site(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages: the wheel's, made brief, and a Kitsune that changes nothing."""
    folder = tmp_path_factory.mktemp("site")
    wheel.extractall(folder)
    with (folder / "kitsune_harness" / "profiles.py").open("a") as profiles:
        profiles.write(BRIEF)
    (folder / "kitsune").mkdir()
    (folder / "kitsune" / "__init__.py").write_text(KITSUNE)
    return folder


class Outside:
    """A project with a workload; its branch ``main``, and ``feature``, in which a step takes ``pause`` seconds more."""

    def __init__(self, folder: Path, site: Path, pause: float) -> None:
        self.root = folder / "project"
        self._bin = folder / "bin"
        self._comment = folder / "comment"
        for package in ("models", "harness", "benchmarks"):
            (self.root / package).mkdir(parents=True)
        (self.root / "harness" / "__init__.py").write_text("raise ImportError('the project has its own')\n")
        (self.root / "benchmarks" / "training_step.py").write_text(WORKLOAD)
        git(self.root, "init", "--quiet", "--initial-branch=main")
        self._commit("base", 0.0)
        git(self.root, "update-ref", "refs/remotes/origin/main", "HEAD")
        git(self.root, "checkout", "--quiet", "-b", "feature")
        self._commit("feature", pause)
        self._bin.mkdir()
        self._script("python", f'exec "{sys.executable}" "$@"')
        self._script("gh", f'echo "$@" > "{self._comment}"')
        self.variables = {
            "PATH": f"{self._bin}:{os.environ['PATH']}", "HOME": str(folder), "PYTHONPATH": str(site),
            "HARNESS_MACHINE": "runner", "CUDA_VISIBLE_DEVICES": "", "CXX": "no-such-compiler",
            "OMP_NUM_THREADS": "1", "GITHUB_ENV": str(folder / "env"), "BASE_REF": "main", "PULL_REQUEST": "17",
        }  # fmt: skip

    def _commit(self, message: str, pause: float) -> None:
        (self.root / "models" / "__init__.py").write_text(NET.replace("PAUSE", str(pause)) + f"# {message}\n")
        git(self.root, "add", "--all")
        git(self.root, "commit", "--quiet", "--message", message)

    def _script(self, name: str, body: str) -> None:
        (self._bin / name).write_text(f"#!/bin/sh\n{body}\n")
        (self._bin / name).chmod(0o755)

    def run(self, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a step of a workflow as GitHub's runner does."""
        path = Path(self.variables["GITHUB_ENV"])
        exported = dict(line.split("=", 1) for line in path.read_text().splitlines()) if path.exists() else {}
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", command],
            cwd=self.root,
            env={**self.variables, **variables, **exported},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def workflow(self) -> dict[str, subprocess.CompletedProcess[str]]:
        """Runs the steps of the documented workflow that are commands, all but the installation."""
        jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
        given = {name: value for name, value in jobs["measure"]["env"].items() if "${{" not in value}
        return {
            step["name"]: self.run(step["run"], **given)
            for step in (*jobs["measure"]["steps"], *jobs["comment"]["steps"])
            if "run" in step and step["name"] not in ("Check the settings", "Install")
        }

    @property
    def comment(self) -> str:
        """What ``gh`` was called with."""
        return self._comment.read_text().strip()


def imported_packages(source: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(source)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def test_the_wheel_installs_one_name_and_imports_neither_harness_nor_models(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"kitsune_harness"}
    sources = {name: wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".py")}
    assert {"kitsune_harness/run.py", "kitsune_harness/models/mlp.py"} <= set(sources)
    assert "kitsune_harness/report/page.html" in wheel.namelist()
    for name, source in sources.items():
        assert not imported_packages(source) & {"harness", "models", "tests"}, name


def test_what_serves_the_project_s_own_documents_is_not_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    folders = {name.split("/")[1] for name in wheel.namelist() if name.count("/") > 1}
    assert {"benchmarks", "models", "report", "selftest", "variants"} <= folders
    assert not folders & {"simulation", "distribution"}
    sources = [wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".py")]
    assert not any("kitsune_harness.simulation" in source or "harness.simulation" in source for source in sources)


def test_the_wheel_offers_the_fixture_and_names_what_it_needs(wheel: zipfile.ZipFile) -> None:
    (entries,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "kitsune_harness = kitsune_harness.pytest_plugin" in wheel.read(entries).decode()
    (metadata,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
    told = wheel.read(metadata).decode()
    assert "Name: kitsune-harness" in told
    for package in ("asv", "kitsune-torch", "plotly"):
        assert f"Requires-Dist: {package}" in told


@pytest.mark.slow
def test_a_slower_step_fails_the_workflow_with_a_comment(site: Path, tmp_path: Path) -> None:
    outside = Outside(tmp_path, site, pause=0.03)  # what is slept takes at least so long
    done = outside.workflow()
    assert {name: step.returncode for name, step in done.items()} == {
        "Find the base": 0, "Measure": 0, "Compare": 1, "Comment": 0,
    }, "\n".join(step.stdout for step in done.values())  # fmt: skip
    assert outside.comment == "pr comment 17 --body-file comment.md --edit-last --create-if-none"
    assert "regression" in (outside.root / "comment.md").read_text().splitlines()[0]
    document: dict[str, Any] = json.loads((outside.root / "comparison.json").read_text())
    times = {entry["variant"]: entry["verdict"] for entry in document["contrasts"] if entry["metric"] == "time"}
    assert times == dict.fromkeys(("eager_fp32", "kitsune_dropin_fp32", "kitsune_trainstep_fp32"), "slower")
    assert all(row["rounds"] == 4 for row in document["rows"])
    assert "python -m kitsune_harness.run" in document["rows"][0]["reproduce"]
    assert (outside.root / "report.html").stat().st_size > 0
    assert git(outside.root, "status", "--porcelain", "--", ".kitsune-harness") == ""

    again = outside.run("python -m asv --config .kitsune-harness/asv.conf.json show HEAD")
    assert again.returncode == 0, again.stdout
    assert "training.OwnModels.track_step_seconds" in again.stdout


@pytest.mark.slow
def test_the_same_step_passes_the_workflow(site: Path, tmp_path: Path) -> None:
    outside = Outside(tmp_path, site, pause=0.0)
    job = yaml.safe_load(WORKFLOW.read_text())["jobs"]["measure"]
    steps = {step["name"]: step["run"] for step in job["steps"] if "run" in step}
    given = {"WORKLOAD": job["env"]["WORKLOAD"], "TIME_MARGIN": "0.99", "MEMORY_MARGIN": "0.99"}
    for name in ("Find the base", "Measure", "Compare"):
        done = outside.run(steps[name], **given)
        assert done.returncode == 0, done.stdout
    assert (outside.root / "comment.md").read_text().startswith("## No regression")


def test_the_workflow_asks_for_no_more_than_it_needs() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert all("${{" not in step.get("run", "") for step in steps)  # nothing of a pull request is run by a shell
    (install,) = (step["run"] for step in steps if step.get("name") == "Install")
    assert "#subdirectory=harness/distribution" in install
    assert (ROOT / "harness" / "distribution" / "pyproject.toml").exists()


def test_one_step_alone_is_given_a_token_and_none_of_the_measured_code_runs_beside_it() -> None:
    text = WORKFLOW.read_text()
    jobs = yaml.safe_load(text)["jobs"]
    assert "permissions" not in jobs["measure"], "those of the workflow, which are to read"
    assert jobs["comment"]["permissions"] == {"pull-requests": "write"}
    (check_out,) = (step for step in jobs["measure"]["steps"] if "checkout" in step.get("uses", ""))
    assert check_out["with"]["persist-credentials"] is False
    assert "env" not in jobs["comment"]
    fetch, comment = jobs["comment"]["steps"]
    assert "download-artifact" in fetch["uses"]
    assert comment["env"]["GH_TOKEN"] == "${{ github.token }}"
    assert text.count("github.token") == 1
    assert "secrets." not in text
    (keep,) = (step for step in jobs["measure"]["steps"] if "upload-artifact" in step.get("uses", ""))
    assert keep["with"]["name"] == fetch["with"]["name"]
    assert "comment.md" in keep["with"]["path"].split()


class Settings:
    """The first step of the workflow, run by itself with a value of its variable, and what the next step then sees."""

    def __init__(self, folder: Path, value: str) -> None:
        job = yaml.safe_load(WORKFLOW.read_text())["jobs"]["measure"]
        first = job["steps"][0]
        assert first["name"] == "Check the settings"
        exported = folder / "exported"
        exported.touch()
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", first["run"]],
            env={"PATH": os.environ["PATH"], "GITHUB_ENV": str(exported), "KITSUNE_URL": value},
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        self.code, self.out, self.exported = done.returncode, done.stdout, exported.read_text()


def test_the_workflow_takes_kitsune_from_one_variable_and_nothing_is_left_to_replace() -> None:
    text = WORKFLOW.read_text()
    job = yaml.safe_load(text)["jobs"]["measure"]
    assert job["env"]["KITSUNE_URL"] == "${{ vars.KITSUNE_URL }}"
    assert "KITSUNE" not in job["env"]
    assert "OWNER" not in text
    assert "REVISION" not in text
    assert "KITSUNE_URL" in (ROOT / "docs" / "benchmarks.md").read_text()


@pytest.mark.parametrize(
    "address", ["https://github.com/someone/kitsune", "https://git.example/a/b/kitsune.git@v0.1.0"]
)
def test_the_variable_becomes_what_pip_installs(tmp_path: Path, address: str) -> None:
    settings = Settings(tmp_path, address)
    assert (settings.code, settings.out) == (0, "")
    assert settings.exported == f"KITSUNE=git+{address}\n"
    job = yaml.safe_load(WORKFLOW.read_text())["jobs"]["measure"]
    (install,) = (step["run"] for step in job["steps"] if step.get("name") == "Install")
    pip = 'python() { printf "%s\\n" "$@"; }\n'
    variables = {"PATH": os.environ["PATH"], "KITSUNE": f"git+{address}"}
    command = ["bash", "-eo", "pipefail", "-c", pip + install]
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f"kitsune-torch @ git+{address}" in done.stdout.splitlines()
    assert f"kitsune-harness @ git+{address}#subdirectory=harness/distribution" in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("", "::error title=KITSUNE_URL is not set::Set the repository's variable KITSUNE_URL to the address of"),
        ("kitsune", "::error title=KITSUNE_URL is no address::KITSUNE_URL is 'kitsune'; it must begin with https://"),
        ("git+https://x/y", "KITSUNE_URL is 'git+https://x/y'; it must begin with https://"),
        ("https://", "KITSUNE_URL is 'https://'; it must begin with https://"),
        ("https://github.com/owner", "KITSUNE_URL is 'https://github.com/owner'; it must begin with https:// and name"),
        ("https://<host>/<owner>/kitsune@<tag>", "no blanks and no angle brackets"),
        ("https://github.com/owner/kitsune ", "KITSUNE_URL is 'https://github.com/owner/kitsune '; it must"),
        ("https://github.com/owner/kitsune\nPATH=x", "kitsune PATH=x'; it must"),
    ],
)
def test_where_the_variable_is_unset_or_wrong_the_workflow_says_so_first(tmp_path: Path, value: str, told: str) -> None:
    settings = Settings(tmp_path, value)
    assert (settings.code, settings.exported) == (1, "")
    assert told in settings.out
    assert len(settings.out.splitlines()) == 1, "GitHub reads an annotation from one line"


FIXTURE_TEST = """
import pytest
from training_step import build

def test_step(kitsune_benchmark):
    step = kitsune_benchmark(build, rounds=2, form="dropin")
    assert (step.case, step.ratio.rounds) == ("net-b8", 2)
    assert len(step.eager_s) == len(step.kitsune_s) >= 4
    assert step.ratio.low < step.ratio.ratio < step.ratio.high

def test_a_function_that_no_process_can_find(kitsune_benchmark):
    with pytest.raises(ValueError, match="no function at the top of a file"):
        kitsune_benchmark(lambda: build())
"""


def with_tests(site: Path, folder: Path) -> tuple[Outside, dict[str, str]]:
    """A project with tests that use the fixture, and the variables to run them with."""
    outside = Outside(folder, site, pause=0.0)
    (outside.root / "test_step.py").write_text(FIXTURE_TEST)
    return outside, {"PYTHONPATH": f"{site}:{outside.root}:{outside.root / 'benchmarks'}"}


@pytest.mark.slow
def test_a_fixture_measures_a_step_against_eager(site: Path, tmp_path: Path) -> None:
    outside, variables = with_tests(site, tmp_path)
    options = "-q -p no:cacheprovider --benchmark-json out.json"
    done = outside.run(f"python -m pytest {options} test_step.py", **variables)
    assert done.returncode == 0, done.stdout
    (kept,) = json.loads((outside.root / "out.json").read_text())["benchmarks"]
    info = kept["extra_info"]
    assert info["verdict"] in ("faster", "same", "slower", "inconclusive")
    assert info["low"] < info["ratio"] < info["high"]
    assert info["case"] == "net-b8"
    assert kept["stats"]["rounds"] >= 4
    assert kept["stats"]["median"] == pytest.approx(info["kitsune_s"])


@pytest.mark.slow
def test_the_fixture_measures_where_benchmarks_are_disabled_too(site: Path, tmp_path: Path) -> None:
    outside, variables = with_tests(site, tmp_path)
    disabled = outside.run("python -m pytest -q --benchmark-disable test_step.py", **variables)
    assert disabled.returncode == 0, disabled.stdout
