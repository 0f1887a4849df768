"""torchvision's ResNet-50 and ViT-B/16 on ImageNet shapes."""

from torch import nn

from models.synthetic import SyntheticImages
from models.torchvision_loading import import_torchvision
from models.workload import Workload, initialization

_IMAGES = SyntheticImages((3, 224, 224), signal=0.2)
"""Of ten classes, so that they can be learned in hundreds of steps; the models have ImageNet's thousand outputs."""


def resnet50(seed: int) -> Workload:
    """ResNet-50 (He et al., 2015) on 3x224x224 images."""
    return _workload("resnet50", seed, learning_rate=1e-3, channels_last=True)


def vit_b_16(seed: int) -> Workload:
    """ViT-B/16 (Dosovitskiy et al., 2020) on 3x224x224 images."""
    return _workload("vit_b_16", seed, learning_rate=1e-4, channels_last=False)


def _workload(name: str, seed: int, *, learning_rate: float, channels_last: bool) -> Workload:
    """torchvision's model of that name, with 1000 outputs, randomly initialized."""
    with initialization(seed):
        module: nn.Module = import_torchvision("models").get_model(name, weights=None)
    return Workload(
        name=name,
        module=module,
        loss_fn=nn.CrossEntropyLoss(),
        data=_IMAGES,
        default_batch_size={"cpu": 1, "cuda": 32},
        batch_sizes={"cpu": (1,), "cuda": (8, 32)},
        learning_rate=learning_rate,
        channels_last=channels_last,
    )
