"""Machine facts, the machine's name, and asv's machine file."""

import json
from pathlib import Path

import pytest

from harness import environment


@pytest.fixture
def machine_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HARNESS_MACHINE", "here")
    return tmp_path / "machines.json"


def test_facts_can_be_stored_and_name_the_device() -> None:
    facts = json.loads(json.dumps(environment.facts()))
    assert facts["device_type"] in ("cpu", "cuda")
    assert facts["device"]
    assert facts["cores"] >= 1
    assert facts["ram_bytes"] > 2**20
    for name in (
        "driver",
        "cuda",
        "cudnn",
        "torch",
        "triton",
        "python",
        "os",
        "cpu",
        "gpu_memory_bytes",
        "gpu_uuid",
        "boot_id",
    ):
        assert name in facts


def test_the_name_is_made_of_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HARNESS_MACHINE", raising=False)
    monkeypatch.setattr(environment, "visible_gpu", lambda: environment.Gpu("NVIDIA H200", "580.1", 2**37))
    assert environment.machine_name() == "nvidia-h200"
    monkeypatch.setattr(environment, "visible_gpu", lambda: None)
    monkeypatch.setattr(environment, "_cpu", lambda: "Some(R) CPU @ 2.70GHz")
    monkeypatch.setattr(environment, "_cores", lambda: 2)
    assert environment.machine_name() == "some-r-cpu-2.70ghz-2-cores"


@pytest.mark.parametrize("name", ["../elsewhere", "Two Words", ".hidden", "a/b"])
def test_a_chosen_name_must_fit_a_folder(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("HARNESS_MACHINE", name)
    with pytest.raises(ValueError, match="HARNESS_MACHINE"):
        environment.machine_name()


def test_the_driver_names_the_gpu_that_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text('#!/bin/sh\necho "$@" >arguments\necho "NVIDIA H200, 580.159.04, 143771"\n')
    command.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(environment, "_torch_cuda_version", lambda: "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    look = environment.visible_gpu.__wrapped__
    assert look() == environment.Gpu("NVIDIA H200", "580.159.04", 143771 * 2**20)
    assert "--id=3" in (tmp_path / "arguments").read_text()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert look() is None


def test_a_torch_without_cuda_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_torch_cuda_version", lambda: None)
    assert environment.visible_gpu.__wrapped__() is None


def test_writing_the_machine_file_keeps_other_machines(machine_file: Path) -> None:
    other = {"machine": "other", "os": "Linux", "note": "kept as it is"}
    machine_file.write_text(json.dumps({"other": other, "version": 1}))
    assert environment.write_asv_machine_file(machine_file) == "here"
    written = json.loads(machine_file.read_text())
    assert written["other"] == other
    assert written["version"] == 1
    assert written["here"]["machine"] == "here"
    assert {"os", "arch", "cpu", "num_cpu", "ram", "gpu", "driver", "cuda", "torch", "triton"} <= set(written["here"])
    assert all(isinstance(value, str) for value in written["here"].values())


def test_a_machine_file_that_is_up_to_date_is_not_written(machine_file: Path) -> None:
    environment.write_asv_machine_file(machine_file)
    before = machine_file.stat()
    environment.write_asv_machine_file(machine_file)
    after = machine_file.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.parametrize("content", ["{not json", "[]", '{"version": 99}'])
def test_a_damaged_machine_file_is_named_and_left_alone(machine_file: Path, content: str) -> None:
    machine_file.write_text(content)
    with pytest.raises(environment.MachineFileError, match=r"machines\.json"):
        environment.write_asv_machine_file(machine_file)
    assert machine_file.read_text() == content


def test_a_machine_file_that_cannot_be_written_is_named(machine_file: Path) -> None:
    with pytest.raises(environment.MachineFileError, match="absent"):
        environment.write_asv_machine_file(machine_file.parent / "absent" / "machines.json")
