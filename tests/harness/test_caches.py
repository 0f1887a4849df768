"""Whose caches are whose."""

import os
from pathlib import Path

import pytest

from harness import caches, variants
from harness.caches import Caches

FACTS = {"torch": "2.13.0+cu130", "triton": "3.6.0", "python": "3.12.3", "device": "NVIDIA H200"}
KITSUNE, PEER = variants.get("kitsune_trainstep_fp32"), variants.get("compile_fp32")


def test_kitsune_s_belong_to_the_commit_and_peers_to_the_versions(tmp_path: Path) -> None:
    first, second = Caches(tmp_path, "a" * 40, FACTS), Caches(tmp_path, "b" * 40, FACTS)
    assert first.folder("mlp-b64", PEER) == second.folder("mlp-b64", PEER)
    assert first.folder("mlp-b64", PEER) != first.folder("lenet-b64", PEER)
    assert first.folder("mlp-b64", PEER) != first.folder("mlp-b64", variants.get("compile_amp"))
    assert first.folder("mlp-b64", KITSUNE) != second.folder("mlp-b64", KITSUNE)
    switched_off = variants.get("kitsune_trainstep_one_stream_fp32")
    assert first.folder("mlp-b64", switched_off) == first.folder("mlp-b64", KITSUNE)
    assert first.folder("mlp-b64", variants.get("kitsune_dropin_fp32")) != first.folder("mlp-b64", KITSUNE)
    loop, deferred = (variants.get(f"kitsune_{form}_fp32") for form in ("dropin", "deferred"))
    assert first.folder("mlp-b64", loop) != first.folder("mlp-b64", deferred), "users run both, each with cold caches"
    newer = Caches(tmp_path, "a" * 40, {**FACTS, "triton": "3.7.0"})
    assert newer.folder("mlp-b64", PEER) != first.folder("mlp-b64", PEER)


def test_clearing_spares_the_peers_and_other_commits(tmp_path: Path) -> None:
    mine, other = Caches(tmp_path, "a" * 40, FACTS), Caches(tmp_path, "b" * 40, FACTS)
    kept = [mine.folder("mlp-b64", PEER), other.folder("mlp-b64", KITSUNE)]
    for folder in (*kept, mine.folder("mlp-b64", KITSUNE)):
        folder.mkdir(parents=True)
    mine.clear()
    mine.clear()
    assert all(folder.exists() for folder in kept)
    assert not mine.folder("mlp-b64", KITSUNE).exists()


VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "KITSUNE_CACHE_DIR")


def test_the_folder_is_used_from_then_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "elsewhere")
    caches.use(None)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"
    assert caches.is_cold(tmp_path / "mine")
    caches.use(tmp_path / "mine")
    for variable in VARIABLES:
        folder = Path(os.environ[variable])
        assert folder.is_dir()
        assert folder.is_relative_to(tmp_path / "mine")
    assert caches.is_cold(tmp_path / "mine")
    (Path(os.environ["TRITON_CACHE_DIR"]) / "kernel.json").write_text("{}")
    assert not caches.is_cold(tmp_path / "mine")
