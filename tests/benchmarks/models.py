"""The workloads' modules, each remembered with the workload it belongs to."""

from weakref import WeakKeyDictionary

from torch import nn

import models

_WORKLOADS: WeakKeyDictionary[nn.Module, models.Workload] = WeakKeyDictionary()


def create_mlp(seed: int = 0) -> nn.Module:
    """A multilayer perceptron for MNIST shapes, on the CPU."""
    return _create("mlp", seed)


def create_lenet(seed: int = 0) -> nn.Module:
    """LeNet-5 for MNIST shapes, on the CPU."""
    return _create("lenet", seed)


def create_resnet18(seed: int = 0) -> nn.Module:
    """ResNet-18 for CIFAR-10 shapes, on the CPU."""
    return _create("resnet18", seed)


def workload_of(model: nn.Module) -> models.Workload:
    """The workload of a module that was created here.

    Raises:
        ValueError: it was not.
    """
    workload = _WORKLOADS.get(model)
    if workload is None:
        raise ValueError(
            f"a {type(model).__name__} has no known data and loss; create the model with create_mlp, create_lenet or "
            "create_resnet18 of tests.benchmarks.models"
        )
    return workload


def _create(name: str, seed: int) -> nn.Module:
    workload = models.build(name, seed=seed)
    _WORKLOADS[workload.module] = workload
    return workload.module
