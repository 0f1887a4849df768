"""torchvision is imported late, and with or without its compiled operators.

What happens at import happens once per process, so each case runs in a process of its own.
"""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(program: str) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr


def test_only_what_needs_torchvision_imports_it() -> None:
    run("""
        import sys
        import models
        import models.datasets
        models.build("mlp")
        models.build("lenet")
        assert "torchvision" not in sys.modules
        models.build("resnet18")
        assert "torchvision" in sys.modules
    """)


@pytest.mark.slow
def test_operators_work_where_they_load_and_say_so_where_not() -> None:
    run("""
        import torch
        from models.torchvision_loading import import_torchvision
        ops = import_torchvision("ops")
        boxes, scores = torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 1.9], [5, 5, 6, 6]]), torch.tensor([0.9, 0.8, 0.7])
        if import_torchvision("extension")._has_ops():
            assert ops.nms(boxes, scores, 0.5).tolist() == [0, 2]
        else:
            try:
                ops.nms(boxes, scores, 0.5)
            except RuntimeError as error:
                assert "Couldn't load custom C++ ops" in str(error)
            else:
                raise AssertionError("an operator without implementation answered")
    """)


def test_models_and_data_sets_load_without_the_compiled_library() -> None:
    run("""
        import torch
        def refuse(path):
            raise OSError(f"{path}: cannot be loaded here")
        torch.ops.load_library = refuse
        from models.torchvision_loading import import_torchvision
        assert import_torchvision("models").resnet18(num_classes=10)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
        assert import_torchvision("datasets").MNIST and import_torchvision("datasets").CIFAR10
        assert not import_torchvision("extension")._has_ops()
    """)


def test_absent_torchvision_is_named() -> None:
    run("""
        import importlib.util
        importlib.util.find_spec = lambda name: None
        from models.torchvision_loading import import_torchvision
        try:
            import_torchvision("models")
        except ModuleNotFoundError as error:
            assert error.name == "torchvision" and "install the release made for torch" in str(error)
        else:
            raise AssertionError("torchvision was imported")
    """)
