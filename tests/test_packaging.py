"""What is shipped and how it is driven: the wheel, the pins, the Makefile."""

import email.message
import email.parser
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this checkout, built from a copy: building leaves files behind."""
    copy = tmp_path_factory.mktemp("checkout")
    ignore = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "results")
    shutil.copytree(ROOT, copy, ignore=ignore, dirs_exist_ok=True)
    program = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", program], cwd=copy, capture_output=True, check=True)
    (path,) = (copy / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.parser.BytesParser().parsebytes(wheel.read(name))


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    parts = (line.partition(";")[0].strip().partition("==") for line in lines if line)
    return {normalized(name): version for name, _, version in parts}


def test_the_wheel_installs_kitsune_alone(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"kitsune"}
    sources = {f"kitsune/native/{path.name}" for path in (ROOT / "kitsune" / "native").glob("*.[ch]")}
    assert {"kitsune/py.typed", "kitsune/native/module.c"} <= {"kitsune/py.typed", *sources} <= set(wheel.namelist())


def test_the_wheel_says_what_it_needs(metadata: email.message.Message) -> None:
    import kitsune

    assert metadata["Name"] == "kitsune-torch"
    assert metadata["Version"] == kitsune.__version__
    assert set(metadata["Requires-Python"].split(",")) == {">=3.10", "<3.14"}
    assert metadata["License-Expression"] == "MIT"
    assert set(metadata.get_all("Provides-Extra", [])) == {"triton", "nlp", "dev", "integrations", "all"}
    unconditional = [each for each in metadata.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert unconditional == ["torch<2.14,>=2.11"]


def test_every_requirement_is_pinned(metadata: email.message.Message) -> None:
    names = {re.split(r"[^\w.-]", requirement)[0] for requirement in metadata.get_all("Requires-Dist", [])}
    assert {normalized(name) for name in names} - {"kitsune-torch"} <= set(pins())
    assert all(re.fullmatch(r"[\w.]+", version) for version in pins().values())
    assert pins()["torch"] == "2.13.0"


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
class TestMakefile:
    def test_help_names_every_command(self) -> None:
        shown = make("help").stdout
        for target in ("bench", "bench-full", "test", "test-full", "lint", "report", "clean", "help"):
            assert f"make {target} " in shown

    def test_the_present_interpreter_installs_nothing(self) -> None:
        plan = make("--dry-run", "bench", "test", "PYTHON_ENV=system", f"PYTHON={sys.executable}")
        assert plan.returncode == 0
        assert f"{sys.executable} -m harness.run --until rounds --report report.html" in plan.stdout
        assert f"{sys.executable} -m pytest" in plan.stdout
        assert "pip" not in plan.stdout
        assert ".venv" not in plan.stdout.replace(sys.executable, "")

    def test_an_unknown_environment_is_refused_with_the_choices(self) -> None:
        refused = make("help", "PYTHON_ENV=conda")
        assert refused.returncode != 0
        assert 'PYTHON_ENV is "conda"' in refused.stderr
        assert '"venv"' in refused.stderr
        assert '"system"' in refused.stderr

    def test_an_unfit_interpreter_is_named(self) -> None:
        refused = make("test", "PYTHON_ENV=system", "PYTHON=false")
        assert refused.returncode != 0
        assert "false is not a Python 3.10 to 3.13" in refused.stderr
