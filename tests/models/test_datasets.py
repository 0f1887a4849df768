"""The loaders of the real sets, on small files in torchvision's format, served by this machine to itself."""

import functools
import gzip
import hashlib
import http.server
import pickle
import struct
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models import datasets
from models.torchvision_loading import import_torchvision

TRAIN, TEST = 6, 4


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def idx(array: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the requests are the test's own."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address at which `tmp_path` / "mirror" is served."""
    (tmp_path / "mirror").mkdir()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    handler = functools.partial(QuietHandler, directory=str(tmp_path / "mirror"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}/"
        running.shutdown()
        thread.join()


@pytest.fixture
def mnist_mirror(tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that stands for MNIST's server."""
    mirror = tmp_path / "mirror"
    generator = np.random.default_rng(0)
    resources, unpacked = [], []
    for prefix, count in (("train", TRAIN), ("t10k", TEST)):
        images = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        for name, array in ((f"{prefix}-images-idx3-ubyte", images), (f"{prefix}-labels-idx1-ubyte", labels)):
            packed = gzip.compress(idx(array))
            (mirror / f"{name}.gz").write_bytes(packed)
            resources.append((f"{name}.gz", md5(packed)))
            unpacked.append((name, md5(idx(array))))
    mnist_class = import_torchvision("datasets").MNIST
    monkeypatch.setattr(mnist_class, "mirrors", [server])
    monkeypatch.setattr(mnist_class, "resources", resources)
    monkeypatch.setattr(datasets, "_MNIST_FILES", tuple(unpacked))
    return mirror


@pytest.fixture
def cifar_mirror(tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that stands for CIFAR-10's server."""
    mirror = tmp_path / "mirror"
    source = mirror / "cifar-10-batches-py"
    source.mkdir()
    generator = np.random.default_rng(0)
    contents: dict[str, object] = {"batches.meta": {"label_names": [f"class {number}" for number in range(10)]}}
    for name, count in (("data_batch_1", TRAIN), ("test_batch", TEST)):
        pixels = generator.integers(0, 256, (count, 3 * 32 * 32), dtype=np.uint8)
        contents[name] = {"data": pixels, "labels": [number % 10 for number in range(count)]}
    checksums = {}
    for name, content in contents.items():
        (source / name).write_bytes(pickle.dumps(content))
        checksums[name] = md5((source / name).read_bytes())
    archive = mirror / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(source, arcname=source.name)
    cifar_class = import_torchvision("datasets").CIFAR10
    monkeypatch.setattr(cifar_class, "url", f"{server}{archive.name}")
    monkeypatch.setattr(cifar_class, "tgz_md5", md5(archive.read_bytes()))
    monkeypatch.setattr(cifar_class, "train_list", [["data_batch_1", checksums["data_batch_1"]]])
    monkeypatch.setattr(cifar_class, "test_list", [["test_batch", checksums["test_batch"]]])
    monkeypatch.setattr(cifar_class, "meta", {**cifar_class.meta, "md5": checksums["batches.meta"]})
    return mirror


LOADERS = [
    pytest.param("mnist", (1, 28, 28), "MNIST/raw/t10k-images-idx3-ubyte", id="mnist"),
    pytest.param("cifar10", (3, 32, 32), "cifar-10-batches-py/test_batch", id="cifar10"),
]


@pytest.fixture
def mirror(request: pytest.FixtureRequest, name: str) -> Path:
    path: Path = request.getfixturevalue({"mnist": "mnist_mirror", "cifar10": "cifar_mirror"}[name])
    return path


@pytest.mark.parametrize(("name", "shape", "file"), LOADERS)
class TestEveryLoader:
    def test_fetches_checks_and_normalizes(
        self, tmp_path: Path, mirror: Path, name: str, shape: tuple[int, ...], file: str
    ) -> None:
        load, root = getattr(datasets, name), tmp_path / "data"
        train, test = load(root), load(str(root), train=False)
        assert (len(train), len(test)) == (TRAIN, TEST)
        assert [label for _, label in train] == list(range(TRAIN))
        images = torch.stack([image for image, _ in train])
        assert (images.shape, images.dtype) == ((TRAIN, *shape), torch.float32)
        assert images.min() < -0.3
        assert images.max() > 1

    def test_files_at_hand_need_no_server(
        self, tmp_path: Path, mirror: Path, name: str, shape: tuple[int, ...], file: str
    ) -> None:
        load, root = getattr(datasets, name), tmp_path / "data"
        first = load(root)
        for path in mirror.glob("*.gz"):
            path.unlink()
        again = load(root, download=False)
        assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))

    def test_absent_files_and_no_server_name_the_alternative(
        self, tmp_path: Path, mirror: Path, name: str, shape: tuple[int, ...], file: str
    ) -> None:
        for path in mirror.glob("*.gz"):
            path.unlink()
        with pytest.raises(
            datasets.DatasetUnavailableError, match=r"could not be fetched .*synthetic images"
        ) as caught:
            getattr(datasets, name)(tmp_path / "data")
        assert caught.value.root == tmp_path / "data"
        assert caught.value.__cause__ is not None

    def test_absent_files_without_download_are_named(
        self, tmp_path: Path, mirror: Path, name: str, shape: tuple[int, ...], file: str
    ) -> None:
        with pytest.raises(datasets.DatasetUnavailableError, match=f"{Path(file).name}.*download is off"):
            getattr(datasets, name)(tmp_path / "data", download=False)
        assert not (tmp_path / "data").exists()

    def test_a_damaged_download_is_refused(
        self, tmp_path: Path, mirror: Path, name: str, shape: tuple[int, ...], file: str
    ) -> None:
        for path in mirror.glob("*.gz"):
            path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(datasets.DatasetUnavailableError, match="corrupted"):
            getattr(datasets, name)(tmp_path / "data")

    @pytest.mark.parametrize("damage", ["shortened", "one bit", "empty"])
    def test_a_damaged_file_is_named(
        self, tmp_path: Path, mirror: Path, name: str, shape: tuple[int, ...], file: str, damage: str
    ) -> None:
        load, root = getattr(datasets, name), tmp_path / "data"
        load(root)
        content = (root / file).read_bytes()
        flipped = content[:-1] + bytes([content[-1] ^ 1])
        (root / file).write_bytes({"shortened": content[:-9], "one bit": flipped, "empty": b""}[damage])
        with pytest.raises(datasets.DatasetDamagedError, match=r"is damaged .*delete it") as caught:
            load(root)
        assert caught.value.path == root / file
        (root / file).unlink()
        assert len(load(root, train=False)) == TEST
