"""Machines that lack something: what needs it is refused with a reason, and training is right."""

from __future__ import annotations

import math
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kitsune
from kitsune import device as device_module
from kitsune.capture.update_rules import AdamRule, SGDRule
from kitsune.capture.update_rules.rule import Rule
from kitsune.device import leave_recordings_alone, refuse_bfloat16, refuse_inductor, refuse_triton
from tests.kitsune.training import FORMS, Net, Training, compare, sgd

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NOT_FUSED: dict[str, Any] = {"fused": None}


def pretend(monkeypatch: pytest.MonkeyPatch, *, capability: tuple[int, int], bf16: bool) -> None:
    """A CUDA device of that kind, as far as Kitsune asks about it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Imaginary 100")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16)
    monkeypatch.setattr(device_module.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("CC", sys.executable)  # any program
    monkeypatch.setattr(device_module.Path, "exists", lambda path: True)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)


# A C++ compiler


def test_a_compiler_on_the_path_or_in_cxx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_compiler: None) -> None:
    refusal = refuse_inductor(CPU)
    assert refusal is not None
    assert "C++ compiler" in refusal.reason
    assert "g++, clang++, c++" in refusal.reason
    for name in ("clang++", "my-compiler"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
        if name == "my-compiler":
            (tmp_path / "clang++").unlink()
            monkeypatch.setenv("CXX", name)
        assert refuse_inductor(CPU) is None
    (tmp_path / "my-compiler").unlink()
    refusal = refuse_inductor(CPU)
    assert refusal is not None
    assert "my-compiler" in refusal.reason


@pytest.mark.parametrize("form", FORMS)
def test_training_without_a_compiler(form: str, no_compiler: None) -> None:
    training = compare(form, compile=True, rtol=2e-6, atol=1e-7)
    status = training.status()
    assert status.mode == "replay"
    assert status.executor == "in order"
    assert any("C++ compiler" in refusal for refusal in status.refusals)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_training_compiled(form: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net(dropout=0.2)
        return model, sgd(model)

    if refuse_inductor(CPU) is not None:
        pytest.skip("there is no C++ compiler")
    training = compare(form, build, compile=True, rtol=1e-4, atol=1e-5)
    assert training.status().executor == "inductor"


# Triton and old GPUs


def test_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, capability=(9, 0), bf16=True)
    monkeypatch.setattr(device_module.importlib.util, "find_spec", lambda name: None)
    refusal = refuse_inductor(CUDA)
    assert refusal is not None
    assert "Triton, which is not installed" in refusal.reason
    assert refusal.remedy == "pip install kitsune-torch[triton]"


@pytest.mark.parametrize(("capability", "fits"), [((6, 1), False), ((7, 0), True), ((8, 0), True), ((9, 0), True)])
def test_old_gpus_compile_nothing(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fits: bool) -> None:
    pretend(monkeypatch, capability=capability, bf16=capability >= (8, 0))
    refusal = refuse_inductor(CUDA)
    assert (refusal is None) == fits
    if refusal is not None:
        assert "Imaginary 100" in refusal.reason


@pytest.mark.parametrize("lacking", ["compiler", "headers"])
def test_triton_builds_launchers(monkeypatch: pytest.MonkeyPatch, no_compiler: None, lacking: str) -> None:
    pretend(monkeypatch, capability=(9, 0), bf16=True)
    assert refuse_triton(CUDA, "the update") is None
    if lacking == "compiler":
        monkeypatch.delenv("CC")
    else:
        monkeypatch.setattr(device_module.Path, "exists", lambda path: False)
    refusal = refuse_triton(CUDA, "the update")
    assert refusal is not None
    assert refusal.reason.startswith("the update needs Triton")
    assert {"compiler": "C compiler", "headers": "Python.h"}[lacking] in refusal.reason


@pytest.mark.parametrize("command", ["gcc '", "", " ", "gcc -O2", "no-such-compiler", "/", "\udcff"])
def test_triton_takes_cc_for_the_name_of_a_program(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    pretend(monkeypatch, capability=(9, 0), bf16=True)
    monkeypatch.setenv("CC", command)
    refusal = refuse_triton(CUDA, "the update")
    assert refusal is not None
    assert repr(command) in refusal.reason
    assert refusal.remedy is not None
    assert "CC" in refusal.remedy


@pytest.mark.parametrize("installed", [True, False])
def test_fused_adam_on_cuda(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    """In float32 it is Kitsune's kernel, which needs Triton; in half precision it is torch's."""
    pretend(monkeypatch, capability=(9, 0), bf16=True)
    if not installed:
        monkeypatch.setattr(device_module.importlib.util, "find_spec", lambda name: None)
    rule = AdamRule()
    refusal = rule.refuse_fused(torch.float32, CUDA, NOT_FUSED)
    assert (refusal is None) == installed
    assert refusal is None or "the fused Adam update needs Triton" in refusal.reason
    assert rule.refuse_fused(torch.bfloat16, CUDA, NOT_FUSED) is None
    assert rule.refuse_fused(torch.float32, CPU, NOT_FUSED) is None
    assert SGDRule().refuse_fused(torch.float32, CUDA, NOT_FUSED) is None


@pytest.mark.parametrize("rule", [AdamRule(), SGDRule()])
def test_half_precision_on_a_cpu_is_rounded_as_the_optimizer_rounds_it(rule: Rule) -> None:
    refusal = rule.refuse_fused(torch.bfloat16, CPU, NOT_FUSED)
    assert refusal is not None
    assert "no fused update for parameters of torch.bfloat16 on cpu" in refusal.reason
    assert rule.refuse_fused(torch.bfloat16, CPU, {"fused": True}) is None


# bfloat16


def test_bfloat16_is_asked_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refuse_bfloat16(CPU) is None
    pretend(monkeypatch, capability=(9, 0), bf16=True)
    assert refuse_bfloat16(CUDA) is None
    pretend(monkeypatch, capability=(7, 5), bf16=False)
    refusal = refuse_bfloat16(CUDA)
    assert refusal is not None
    assert "Imaginary 100 has no bfloat16" in refusal.reason
    assert "GradScaler" in str(refusal)


@pytest.mark.parametrize("form", FORMS)
def test_training_without_bfloat16(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """enable_amp is not followed, the status says so, and training is that of float32."""
    refusal = kitsune.Refusal("no bfloat16 here")
    monkeypatch.setattr("kitsune.step.refuse_bfloat16", lambda device: refusal)
    monkeypatch.setattr("kitsune.loop.drop_in.refuse_bfloat16", lambda device: refusal)
    training = compare(form, enable_amp=True, reference={})
    assert training.status().mode == "replay"
    assert "no bfloat16 here" in training.status().refusals


# The real machine


def test_recordings_are_left_alone_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []

    class Driver:
        def __init__(self, name: str) -> None:
            assert name == "libcuda.so.1"

        def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> None:
            modes.append(mode._obj.value)

    monkeypatch.setattr(device_module.ctypes, "CDLL", Driver)
    leave_recordings_alone(CPU)
    assert modes == []
    leave_recordings_alone(CUDA)
    assert modes == [2]

    def missing(name: str) -> Driver:
        raise OSError(name)

    monkeypatch.setattr(device_module.ctypes, "CDLL", missing)
    leave_recordings_alone(CUDA)


@pytest.mark.gpu
def test_allocations_of_another_thread_break_no_recording() -> None:
    """Of the user's own, in the mode that is torch's default."""
    held, go_on, enough = list[Tensor](), threading.Event(), threading.Event()

    def allocate() -> None:
        with torch.cuda.device(0):
            leave_recordings_alone(CUDA)
            go_on.wait(60)
            for _ in range(8):
                held.append(torch.zeros(64 << 20, dtype=torch.uint8, device=CUDA))
        enough.set()

    thread = threading.Thread(target=allocate)
    thread.start()
    x, graph = torch.zeros(8, device=CUDA), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
        go_on.set()
        assert enough.wait(60)
        x += 1
    thread.join()
    graph.replay()
    assert len(held) == 8
    assert x.tolist() == [2.0] * 8


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_four_gigabytes(form: str) -> None:
    """What does not fit beside a large model is not captured, and training goes on."""
    device = torch.device("cuda")
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(4 * 2**30 / total)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(2048, 2048), nn.ReLU()))).to(device)
        training = Training(form, model, torch.optim.Adam(model.parameters(), lr=1e-4), loss_fn=nn.functional.mse_loss)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(24576, 2048, generator=generator).to(device)
        # As numbers: the tensor that mse_loss returns keeps memory of the size of its arguments.
        losses = [training.step(x, x * 0.5).item() for _ in range(6)]
        assert all(math.isfinite(loss) for loss in losses)
        assert losses[-1] < losses[0]
        status = training.status()
        assert status.mode == "replay" or "memory" in status.reason, status
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_max_memory_bounds_what_capturing_uses(form: str) -> None:
    device = torch.device("cuda")
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 8)).to(device)
    training = Training(form, model, torch.optim.SGD(model.parameters(), lr=0.01), max_memory="1MB")
    x = torch.randn(4096, 1024, device=device)
    y = torch.randint(8, (4096,), device=device)
    for _ in range(4):
        loss: Tensor = training.step(x, y)
    assert bool(torch.isfinite(loss))
    status = training.status()
    assert status.mode == "eager"
    assert "max_memory" in status.reason
