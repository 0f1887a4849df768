"""What `import kitsune` and the first optimizer import: modules are counted, not seconds."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kitsune
from tests.layers import _public_names

ROOT = Path(__file__).parents[2]


def imported(before: str, program: str) -> set[str]:
    """The modules that `program` imports after `before`, in a new process."""
    script = f"import sys\n{before}\nbefore = set(sys.modules)\n{program}\nprint(sorted(set(sys.modules) - before))"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    return set(ast.literal_eval(run.stdout.splitlines()[-1]))


def test_the_import_of_kitsune_imports_nothing_else() -> None:
    assert imported("import torch", "import kitsune") == {"kitsune"}


def test_what_is_heavy_is_imported_by_torchs_own_optimizer_if_at_all() -> None:
    """Dynamo is: torch's optimizers import it when the first one is made."""
    made = "import torch\noptimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)"
    found = imported(made, "import kitsune\nkitsune.KitsuneOptimizer(optimizer)")
    heavy = ("torch._dynamo.", "torch._inductor.", "torch._functorch.", "torch.distributed.", "sympy.", "triton.")
    assert "kitsune.loop.drop_in" in found
    assert [name for name in sorted(found) if name.startswith(heavy)] == []


def test_public_names_are_those_that_type_checkers_see() -> None:
    names = {name for name in _public_names(ROOT / "kitsune" / "__init__.py") if not name.startswith("__")}
    assert set(kitsune.__all__) == names <= set(dir(kitsune))
    assert all(getattr(kitsune, name).__name__ == name for name in names)


def test_a_module_of_the_same_name_hides_no_public_name() -> None:
    run = imported("", "import kitsune.verify\nimport kitsune\nassert kitsune.verify.__module__ == 'kitsune.verify'")
    assert "kitsune.step" in run


def test_names_that_are_not_there_are_told() -> None:
    with pytest.raises(AttributeError, match="module 'kitsune' has no attribute 'Trainer'"):
        kitsune.Trainer  # noqa: B018 # type: ignore[attr-defined]
