"""LeNet-5 on MNIST shapes."""

from torch import Tensor, nn

from models.synthetic import SyntheticImages
from models.workload import Workload, initialization


class LeNet(nn.Module):
    """LeNet-5 (LeCun et al., 1998) as it is trained today: ReLU, max-pooling, all channels connected.

    The first convolution pads by 2, so that 28x28 images stand for the paper's 32x32.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(16 * 5 * 5, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, 10) of images (N, 1, 28, 28)."""
        logits: Tensor = self.classifier(self.features(x))
        return logits


def workload(seed: int) -> Workload:
    """LeNet-5 on 1x28x28 images of ten classes."""
    with initialization(seed):
        module = LeNet()
    return Workload(
        name="lenet",
        module=module,
        loss_fn=nn.CrossEntropyLoss(),
        data=SyntheticImages((1, 28, 28)),
        default_batch_size={"cpu": 64, "cuda": 64},
        batch_sizes={"cpu": (16, 64, 256), "cuda": (8, 64, 128, 512, 1024)},
        learning_rate=1e-3,
        channels_last=True,
    )
