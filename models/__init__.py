"""The workloads: models with their loss, data and batch sizes.

`build("mlp")` returns a `Workload`, ready to train on synthetic data; `models.datasets` loads the real MNIST and
CIFAR-10, and `models.zoo` has models of many more kinds. Nothing here knows of Kitsune or of the harness. torchvision,
transformers and timm are imported only for what needs them; `missing` says of what they are absent for.
"""

from collections.abc import Callable

from models import bert, gpt2, imagenet, lenet, mlp, resnet, torchvision_loading, transformers_loading, zoo
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
_ZOO = zoo.NAMES

_MISSING: dict[str, Callable[[], str | None]] = {
    **dict.fromkeys(("resnet18", "resnet50", "vit_b_16"), torchvision_loading.missing),
    **dict.fromkeys(("bert_base", "gpt2_small"), transformers_loading.missing),
    **zoo.MISSING,
}


def names(*, large: bool = False, zoo: bool = False) -> tuple[str, ...]:
    """The workloads that a CPU trains in seconds, smallest first; with `large` also those that want a GPU.

    With `zoo` those of the zoo instead.
    """
    if zoo:
        return _ZOO
    return tuple(_WORKLOADS if large else _SMALL)


def missing(name: str) -> str | None:
    """Why the workload called `name` cannot be built here, and what to install; None if it can be.

    Raises ValueError for an unknown name.
    """
    _check(name)
    return _MISSING[name]() if name in _MISSING else None


def build(name: str, *, seed: int = 0, tiny: bool = False) -> Workload:
    """The workload called `name`, its module initialized from `seed`; torch's global random state is left as it is.

    With `tiny` a model of the zoo is a small one of the same layers, on small inputs, for tests.

    Raises ValueError for an unknown name and for others that are to be tiny, ModuleNotFoundError if the model needs
    a package that is not installed: torchvision, transformers or timm.
    """
    _check(name)
    if name in _ZOO:
        return zoo.build(name, seed=seed, tiny=tiny)
    if tiny:
        raise ValueError(f"{name!r} has one size; tiny are models of the zoo alone: {', '.join(_ZOO)}")
    return _WORKLOADS[name](seed)


def _check(name: str) -> None:
    if name not in _WORKLOADS and name not in _ZOO:
        raise ValueError(f"there is no model {name!r}; choose one of: {', '.join((*_WORKLOADS, *_ZOO))}")
