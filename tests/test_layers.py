"""The layers hold in this checkout, and the check sees what it must see."""

from pathlib import Path

import pytest

from tests import layers


def test_the_checkout_keeps_its_layers() -> None:
    root = Path(__file__).resolve().parent.parent
    assert [str(violation) for violation in layers.check(root)] == []


def test_no_two_layers_above_each_other() -> None:
    faces = {"step", "optimizer"}
    for name, allowed in layers.LAYERS.items():
        assert set(allowed) <= set(layers.LAYERS), name
        mutual = {other for other in allowed if name in layers.LAYERS[other]}
        assert mutual <= faces, f"{name} and {mutual} import each other"


FACE = {"kitsune/__init__.py": "from kitsune.step import TrainStep as TrainStep"}


def problems(root: Path, files: dict[str, str]) -> list[str]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [str(violation) for violation in layers.check(root)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kitsune/__init__.py", "from kitsune.step import TrainStep\nimport kitsune.optimizer"),
        ("kitsune/config.py", "from kitsune.errors import KitsuneError"),
        (
            "kitsune/capture/trace.py",
            "import torch\nfrom kitsune.graph import dataflow\nfrom kitsune import errors",
        ),
        ("kitsune/capture/trace.py", "from kitsune.capture.signature import Signature\nfrom . import signature"),
        ("kitsune/kernels/linear.py", "import triton.language as tl"),
        ("kitsune/passes/pipeline.py", "from kitsune.passes import fusion\nfrom kitsune.passes.layout import layout"),
        ("kitsune/passes/fusion.py", "from kitsune.kernels.linear import linear"),
        ("harness/measure.py", "import kitsune\nfrom kitsune import TrainStep\nkitsune.TrainStep; kitsune.__version__"),
        ("harness/building.py", "from harness.variants import kitsune\nkitsune.build"),
        ("harness/benchmarks/steps.py", "import models\nfrom harness.measure import measure"),
        ("models/mlp.py", "import torch\nfrom models.workload import Workload"),
    ],
)
def test_allowed(tmp_path: Path, name: str, text: str) -> None:
    assert problems(tmp_path, {**FACE, name: text}) == []


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("kitsune/errors.py", "from kitsune.config import Config", "errors must not import config"),
        ("kitsune/graph/dataflow.py", "import kitsune.plan", "graph must not import plan"),
        ("kitsune/graph/dataflow.py", "from kitsune import plan", "graph must not import plan"),
        ("kitsune/graph/dataflow.py", "from .. import plan", "graph must not import plan"),
        ("kitsune/graph/dataflow.py", "from ..plan import Plan", "graph must not import plan"),
        (
            "kitsune/graph/dataflow.py",
            "def f():\n    from kitsune.loop import x",
            "dataflow.py:2: graph must",
        ),
        ("kitsune/step.py", "from kitsune import TrainStep", "from the module that defines it"),
        ("kitsune/step.py", "import harness.measure", "kitsune must not import harness"),
        ("kitsune/step.py", "from models import build", "kitsune must not import models"),
        ("kitsune/step.py", "import numpy as np", "kitsune must not import numpy"),
        ("kitsune/step.py", "import tests.layers", "kitsune must not import tests"),
        ("kitsune/surprise.py", "", "'surprise' has no layer"),
        ("kitsune/passes/fusion.py", "from kitsune.passes import layout", "passes do not import each other"),
        ("kitsune/passes/fusion.py", "from kitsune.passes.layout import layout", "passes do not import each other"),
        ("kitsune/passes/fusion.py", "import kitsune.passes.layout", "passes do not import each other"),
        ("models/mlp.py", "import kitsune", "models must not import kitsune"),
        ("models/mlp.py", "from harness import measure", "models must not import harness"),
        ("harness/measure.py", "import kitsune.step", "only the names that kitsune exports"),
        ("harness/measure.py", "from kitsune.step import TrainStep", "only the names that kitsune exports"),
        ("harness/measure.py", "from kitsune import capture", "kitsune does not export it"),
        (
            "harness/measure.py",
            "import kitsune\nkitsune.capture.trace",
            "measure.py:2: harness must not use",
        ),
    ],
)
def test_forbidden(tmp_path: Path, name: str, text: str, problem: str) -> None:
    found = problems(tmp_path, {**FACE, name: text})
    assert len(found) == 1
    assert problem in found[0]
