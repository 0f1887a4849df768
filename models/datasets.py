"""The real MNIST and CIFAR-10, read and fetched by torchvision, checked against their published checksums."""

import http.client
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.utils.data import Dataset

from models.torchvision_loading import import_torchvision

_MNIST_FILES = (
    ("train-images-idx3-ubyte", "6bbc9ace898e44ae57da46a324031adb"),
    ("train-labels-idx1-ubyte", "a25bea736e30d166cdddb491f175f624"),
    ("t10k-images-idx3-ubyte", "2646ac647ad5339dbf082846283269ea"),
    ("t10k-labels-idx1-ubyte", "27ae3e4e09519cfbb04c329615203637"),
)
"""The unpacked files and their MD5: torchvision itself checks only the packed ones, when it fetches them."""


class DatasetError(Exception):
    """A data set cannot be read. `dataset` is its name, `root` the folder that was searched."""

    def __init__(self, dataset: str, root: Path, problem: str) -> None:
        super().__init__(
            f"{dataset}: {problem}. Without it, train on synthetic images of the same shape: "
            f"models.build(...).batch(...), or models.synthetic.SyntheticImages"
        )
        self.dataset = dataset
        self.root = root


class DatasetUnavailableError(DatasetError):
    """The files are absent and were not, or could not be, fetched; the cause is chained where there is one."""


class DatasetDamagedError(DatasetError):
    """`path` is present, but its content is not what was published."""

    def __init__(self, dataset: str, root: Path, path: Path) -> None:
        super().__init__(dataset, root, f"{path} is damaged (wrong checksum); delete it to have it fetched again")
        self.path = path


def mnist(root: Path | str, *, train: bool = True, download: bool = True) -> Dataset[tuple[Tensor, int]]:
    """The 60,000 training (or 10,000 test) images of MNIST: float32 (1, 28, 28), normalized, with their digits.

    Files are looked for in `root`/MNIST/raw; those that are absent are fetched there if `download`.
    Raises DatasetUnavailableError, DatasetDamagedError, and ModuleNotFoundError without torchvision.
    """
    root = Path(root)
    files = [(root / "MNIST" / "raw" / name, md5) for name, md5 in _MNIST_FILES]
    dataset_class = import_torchvision("datasets").MNIST
    return _load("MNIST", dataset_class, root, files, train, download, mean=(0.1307,), std=(0.3081,))


def cifar10(root: Path | str, *, train: bool = True, download: bool = True) -> Dataset[tuple[Tensor, int]]:
    """The 50,000 training (or 10,000 test) images of CIFAR-10: float32 (3, 32, 32), normalized, with their classes.

    Files are looked for in `root`/cifar-10-batches-py; those that are absent are fetched there if `download`.
    Raises DatasetUnavailableError, DatasetDamagedError, and ModuleNotFoundError without torchvision.
    """
    root = Path(root)
    dataset_class = import_torchvision("datasets").CIFAR10
    published = [*dataset_class.train_list, *dataset_class.test_list]
    published.append((dataset_class.meta["filename"], dataset_class.meta["md5"]))
    files = [(root / dataset_class.base_folder / name, md5) for name, md5 in published]
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    return _load("CIFAR-10", dataset_class, root, files, train, download, mean=mean, std=std)


def _load(
    name: str,
    dataset_class: Any,
    root: Path,
    files: Sequence[tuple[Path, str]],
    train: bool,
    download: bool,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Dataset[tuple[Tensor, int]]:
    check_integrity = import_torchvision("datasets.utils").check_integrity
    for path, md5 in files:
        if path.exists() and not check_integrity(path, md5):
            raise DatasetDamagedError(name, root, path)
    absent = [path.name for path, _ in files if not path.exists()]
    if absent and not download:
        raise DatasetUnavailableError(name, root, f"{', '.join(absent)} not in {files[0][0].parent}; download is off")
    transforms = import_torchvision("transforms")
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(mean, std)])
    try:
        dataset = dataset_class(root, train=train, transform=transform, download=download)
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        reason = " ".join(str(error).split())
        problem = f"not in {files[0][0].parent} and could not be fetched ({reason})"
        raise DatasetUnavailableError(name, root, problem) from error
    return cast(Dataset[tuple[Tensor, int]], dataset)
