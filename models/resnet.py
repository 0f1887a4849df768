"""torchvision's ResNet-18 on CIFAR shapes."""

from typing import cast

from torch import nn

from models.synthetic import SyntheticImages
from models.torchvision_loading import import_torchvision
from models.workload import Workload, initialization


def cifar_resnet18(num_classes: int = 10) -> nn.Module:
    """ResNet-18 (He et al., 2015) from torchvision with the stem used for 32x32 images.

    A 3x3 convolution of stride 1 replaces the 7x7 of stride 2, and there is no max-pooling before the first block.
    Maps images (N, 3, H, W) to logits (N, num_classes). Raises ModuleNotFoundError without torchvision.
    """
    module = cast(nn.Module, import_torchvision("models").resnet18(weights=None, num_classes=num_classes))
    stem = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
    module.conv1 = stem
    module.maxpool = nn.Identity()
    return module


def workload(seed: int) -> Workload:
    """ResNet-18 with the CIFAR stem on 3x32x32 images of ten classes."""
    with initialization(seed):
        module = cifar_resnet18()
    return Workload(
        name="resnet18",
        module=module,
        loss_fn=nn.CrossEntropyLoss(),
        data=SyntheticImages((3, 32, 32), signal=0.2),
        default_batch_size={"cpu": 4, "cuda": 128},
        batch_sizes={"cpu": (4, 8, 32), "cuda": (8, 64, 128, 512, 1024)},
        learning_rate=1e-3,
        channels_last=True,
    )
