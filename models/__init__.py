"""The workloads: models with their loss, data and batch sizes.

`build("mlp")` returns a `Workload`, ready to train on synthetic data; `models.datasets` loads the real MNIST and
CIFAR-10. Nothing here knows of Kitsune or of the harness. torchvision is imported only for what needs it.
"""

from collections.abc import Callable

from models import lenet, mlp, resnet
from models.workload import Workload

__all__ = ["Workload", "build", "names"]

_WORKLOADS: dict[str, Callable[[int], Workload]] = {
    "mlp": mlp.workload,
    "lenet": lenet.workload,
    "resnet18": resnet.workload,
}


def names() -> tuple[str, ...]:
    """The workloads there are, smallest first."""
    return tuple(_WORKLOADS)


def build(name: str, *, seed: int = 0) -> Workload:
    """The workload called `name`, its module initialized from `seed`; torch's global random state is left as it is.

    Raises ValueError for an unknown name, ModuleNotFoundError if the model needs torchvision and it is not installed.
    """
    if name not in _WORKLOADS:
        raise ValueError(f"there is no model {name!r}; choose one of: {', '.join(names())}")
    return _WORKLOADS[name](seed)
