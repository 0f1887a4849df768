"""An MLP-Mixer."""

from torch import Tensor, nn

from models.synthetic import SyntheticImages
from models.workload import Workload


def perceptron(width: int, hidden: int) -> nn.Sequential:
    """Two linear layers with GELU between: (..., width) to (..., width)."""
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class MixerBlock(nn.Module):
    """A perceptron across patches, then one across channels, each behind LayerNorm and added to what came in."""

    def __init__(self, num_patches: int, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.across_patches = perceptron(num_patches, width // 2)
        self.norm2 = nn.LayerNorm(width)
        self.across_channels = perceptron(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        """(N, patches, width) of the same."""
        x = x + self.across_patches(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        output: Tensor = x + self.across_channels(self.norm2(x))
        return output


class Mixer(nn.Module):
    """MLP-Mixer (Tolstikhin et al., 2021): S/16 for 224x224 images by default."""

    def __init__(self, side: int = 224, patch: int = 16, width: int = 512, num_blocks: int = 8) -> None:
        super().__init__()
        num_patches = (side // patch) ** 2
        self.patches = nn.Conv2d(3, width, kernel_size=patch, stride=patch)
        self.blocks = nn.Sequential(*(MixerBlock(num_patches, width) for _ in range(num_blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, 1000) of images (N, 3, side, side)."""
        hidden = self.patches(x).flatten(2).transpose(1, 2)
        logits: Tensor = self.head(self.norm(self.blocks(hidden)).mean(1))
        return logits


def workload(*, tiny: bool) -> Workload:
    """Mixer-S/16 on 3x224x224 images."""
    return Workload(
        name="mlp_mixer",
        module=Mixer(32, 8, 16, 2) if tiny else Mixer(),
        loss_fn=nn.CrossEntropyLoss(),
        data=SyntheticImages((3, 32, 32) if tiny else (3, 224, 224), signal=0.2),
        default_batch_size={"cpu": 2, "cuda": 32},
        learning_rate=1e-3,
    )
