"""The workloads: models with their loss, data and batch sizes.

`build("mlp")` returns a `Workload`, ready to train on synthetic data; `models.datasets` loads the real MNIST and
CIFAR-10. Nothing here knows of Kitsune or of the harness. torchvision and transformers are imported only for what needs
them; `missing` says of what they are absent for.
"""

from collections.abc import Callable

from models import bert, gpt2, imagenet, lenet, mlp, resnet, torchvision_loading, transformers_loading
from models.workload import Data, Workload

__all__ = ["Data", "Workload", "build", "missing", "names"]

_SMALL: dict[str, Callable[[int], Workload]] = {
    "mlp": mlp.workload,
    "lenet": lenet.workload,
    "resnet18": resnet.workload,
}
_LARGE: dict[str, Callable[[int], Workload]] = {
    "resnet50": imagenet.resnet50,
    "vit_b_16": imagenet.vit_b_16,
    "bert_base": bert.workload,
    "gpt2_small": gpt2.workload,
}
_WORKLOADS = _SMALL | _LARGE

_MISSING: dict[str, Callable[[], str | None]] = {
    **dict.fromkeys(("resnet18", "resnet50", "vit_b_16"), torchvision_loading.missing),
    **dict.fromkeys(("bert_base", "gpt2_small"), transformers_loading.missing),
}


def names(*, large: bool = False) -> tuple[str, ...]:
    """The workloads that a CPU trains in seconds, smallest first; with `large` also those that want a GPU."""
    return tuple(_WORKLOADS if large else _SMALL)


def missing(name: str) -> str | None:
    """Why the workload called `name` cannot be built here, and what to install; None if it can be.

    Raises ValueError for an unknown name.
    """
    _check(name)
    return _MISSING[name]() if name in _MISSING else None


def build(name: str, *, seed: int = 0) -> Workload:
    """The workload called `name`, its module initialized from `seed`; torch's global random state is left as it is.

    Raises ValueError for an unknown name, ModuleNotFoundError if the model needs torchvision or transformers and that
    is not installed.
    """
    _check(name)
    return _WORKLOADS[name](seed)


def _check(name: str) -> None:
    if name not in _WORKLOADS:
        raise ValueError(f"there is no model {name!r}; choose one of: {', '.join(_WORKLOADS)}")
