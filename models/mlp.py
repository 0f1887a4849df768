"""A multilayer perceptron on MNIST shapes."""

import itertools

from torch import Tensor, nn

from models.synthetic import SyntheticImages
from models.workload import Workload, initialization


class MLP(nn.Module):
    """Fully connected layers with ReLU between: 784-512-256-10 by default."""

    def __init__(self, sizes: tuple[int, ...] = (784, 512, 256, 10)) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for fan_in, fan_out in itertools.pairwise(sizes[:-1]):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        layers.append(nn.Linear(sizes[-2], sizes[-1]))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, sizes[-1]) of images (N, ...) of sizes[0] values each."""
        logits: Tensor = self.layers(x)
        return logits


def workload(seed: int) -> Workload:
    """MLP 784-512-256-10 on 1x28x28 images of ten classes."""
    with initialization(seed):
        module = MLP()
    return Workload(
        name="mlp",
        module=module,
        loss_fn=nn.CrossEntropyLoss(),
        data=SyntheticImages((1, 28, 28)),
        default_batch_size={"cpu": 64, "cuda": 64},
        batch_sizes={"cpu": (16, 64, 256), "cuda": (8, 64, 128, 512, 1024)},
        learning_rate=1e-3,
        channels_last=False,
    )
