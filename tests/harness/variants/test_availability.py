"""What cannot run here says why."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from harness import variants
from harness.variants.availability import unavailable

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


class FakeGpu:
    """A CUDA device as torch describes it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, capability: tuple[int, int], bfloat16: bool) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bfloat16)


def reason(variant: str, device: torch.device = CPU, root: Path | None = None) -> str:
    found = unavailable(variants.get(variant), device, root)
    assert found is not None
    return found


@pytest.mark.parametrize("variant", ["handcaptured_fp32", "compile_reduce_overhead_amp"])
def test_cuda_graphs_need_cuda(variant: str) -> None:
    assert "CUDA graphs" in reason(variant)


def test_streams_need_cuda() -> None:
    assert reason("kitsune_trainstep_one_stream_amp") == "without CUDA there are no streams to choose from"


def test_tf32_needs_cuda_and_ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "CUDA" in reason("eager_tf32")
    FakeGpu(monkeypatch, capability=(7, 5), bfloat16=False)
    assert "compute capability 8.0" in reason("eager_tf32", CUDA)
    FakeGpu(monkeypatch, capability=(8, 0), bfloat16=True)
    assert unavailable(variants.get("eager_tf32"), CUDA, None) is None


def test_autocast_needs_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpu(monkeypatch, capability=(7, 5), bfloat16=False)
    assert reason("eager_amp", CUDA) == "a GPU has no bfloat16 arithmetic"
    assert unavailable(variants.get("eager_fp32"), CUDA, None) is None


def test_compiling_on_the_cpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "C++ compiler" in reason("compile_fp32")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler" in reason("compile_fp32")


def test_compiling_on_cuda_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpu(monkeypatch, capability=(9, 0), bfloat16=True)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "Triton" in reason("compile_amp", CUDA)
    assert "Triton" in reason("handcaptured_compile_fp32", CUDA)


@pytest.fixture
def commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkout from which `kitsune` is imported; its `kitsune/__init__.py` is still to be written."""
    (tmp_path / "kitsune").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    real = _forget_kitsune()
    yield tmp_path
    _forget_kitsune()
    sys.modules.update(real)


def _forget_kitsune() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == "kitsune"]
    return {name: sys.modules.pop(name) for name in names}


def test_a_commit_without_kitsune(commit: Path, tmp_path: Path) -> None:
    (commit / "kitsune" / "__init__.py").write_text("TrainStep = KitsuneOptimizer = object\n")
    assert unavailable(variants.get("kitsune_dropin_fp32"), CPU, commit) is None
    elsewhere = tmp_path / "elsewhere"
    assert reason("kitsune_dropin_fp32", root=elsewhere) == "this commit has no kitsune"


def test_a_kitsune_that_does_not_import(commit: Path) -> None:
    (commit / "kitsune" / "__init__.py").write_text("raise RuntimeError('not today')\n")
    assert reason("kitsune_trainstep_fp32", root=commit).endswith("cannot be imported: RuntimeError: not today")


def test_a_kitsune_from_before_its_public_names(commit: Path) -> None:
    (commit / "kitsune" / "__init__.py").write_text("KitsuneOptimizer = object\n")
    assert reason("kitsune_trainstep_fp32", root=commit) == "this commit's kitsune has no TrainStep"


@pytest.mark.parametrize(
    ("names", "absent"),
    [
        ("TrainStep = KitsuneOptimizer = object\n", "Config"),
        ("TrainStep = KitsuneOptimizer = object\n@dataclass\nclass Config:\n    mode: str\n", "option defer_loss"),
    ],
)
def test_a_kitsune_from_before_an_option(commit: Path, names: str, absent: str) -> None:
    (commit / "kitsune" / "__init__.py").write_text(f"from dataclasses import dataclass\n{names}")
    assert reason("kitsune_deferred_fp32", root=commit) == f"this commit's kitsune has no {absent}"
    assert unavailable(variants.get("kitsune_dropin_fp32"), CPU, commit) is None


def test_a_kitsune_with_all_options(commit: Path) -> None:
    names = "TrainStep = KitsuneOptimizer = object\n@dataclass\nclass Config:\n    mode: str\n    defer_loss: bool\n"
    (commit / "kitsune" / "__init__.py").write_text(f"from dataclasses import dataclass\n{names}")
    assert unavailable(variants.get("kitsune_deferred_fp32"), CPU, commit) is None


def test_no_kitsune_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = ModuleType("kitsune")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: empty.__spec__)
    assert reason("kitsune_dropin_amp") == "this commit has no kitsune"
