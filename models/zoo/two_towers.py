"""A model of the kind of CLIP: a tower for images and one for captions, trained to find each other."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.drawing import generator
from models.synthetic import SyntheticImages
from models.workload import Workload
from models.zoo.drawn import Drawn

_NUM_SUBJECTS = 256
_PATCH = 16


@dataclass(frozen=True)
class Sizes:
    """Images of `side` pixels and captions of `length` tokens; towers of `num_layers` layers of `width` units."""

    side: int = 128
    length: int = 32
    vocabulary: int = 8192
    width: int = 384
    num_layers: int = 6
    num_heads: int = 6


class Tower(nn.Module):
    """A transformer over vectors with learned positions; the mean of what comes out, projected to length 1."""

    def __init__(self, sizes: Sizes, length: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(0.02 * torch.randn(length, sizes.width))
        layer = nn.TransformerEncoderLayer(
            sizes.width, sizes.num_heads, 4 * sizes.width, dropout=0.0, activation="gelu", batch_first=True,
            norm_first=True,
        )  # fmt: skip
        self.layers = nn.TransformerEncoder(layer, sizes.num_layers, nn.LayerNorm(sizes.width), False)
        self.projection = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, width) of (N, length, width)."""
        pooled = self.layers(x + self.positions).mean(1)
        return functional.normalize(self.projection(pooled).float(), dim=-1)


class TwoTowers(nn.Module):
    """CLIP (Radford et al., 2021): how well each image goes with each caption, at a temperature that is learned."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, sizes.width, kernel_size=_PATCH, stride=_PATCH)
        self.image_tower = Tower(sizes, (sizes.side // _PATCH) ** 2)
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.caption_tower = Tower(sizes, sizes.length)
        self.scale = nn.Parameter(torch.tensor(1 / 0.07).log())

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        """Logits (N, N), images by captions, of images (N, 3, side, side) and captions (N, length) int64."""
        pictures, captions = x
        images = self.image_tower(self.patches(pictures).flatten(2).transpose(1, 2))
        texts = self.caption_tower(self.tokens(captions))
        logits: Tensor = self.scale.exp() * images @ texts.T
        return logits


@dataclass(frozen=True)
class CaptionedImages(Drawn):
    """Images of 256 subjects, each with a caption: its subject's, with an eighth of the tokens replaced."""

    side: int
    length: int
    vocabulary: int

    def draw(self, batch_size: int, source: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Images (batch_size, 3, side, side) float32, captions (batch_size, length) int64; the captions' places."""
        index = int(torch.randint(2**31, (), generator=source))
        pictures = SyntheticImages((3, self.side, self.side), _NUM_SUBJECTS, signal=0.5)
        images, subjects = pictures.batch(batch_size, index=index)
        shape = (batch_size, self.length)
        others = torch.randint(self.vocabulary, shape, generator=source)
        is_replaced = torch.rand(shape, generator=source) < 1 / 8
        captions = torch.where(is_replaced, others, _captions(self.length, self.vocabulary)[subjects])
        return (images, captions), torch.arange(batch_size)


@functools.lru_cache(maxsize=4)
def _captions(length: int, vocabulary: int) -> Tensor:
    """(256, length) int64: the caption of each subject."""
    source = generator("captions", length, vocabulary)
    return torch.randint(vocabulary, (_NUM_SUBJECTS, length), generator=source, device="cpu")


def contrastive_loss(logits: Tensor, places: Tensor) -> Tensor:
    """The mean cross-entropy of logits (N, N) against the pairs' places (N,) int64, over captions and over images."""
    return (functional.cross_entropy(logits, places) + functional.cross_entropy(logits.T, places)) / 2


def workload(*, tiny: bool) -> Workload:
    """Two towers of six layers of 384 units, on 3x128x128 images and captions of 32 tokens."""
    sizes = Sizes(32, 8, 64, 32, 1, 2) if tiny else Sizes()
    return Workload(
        name="clip",
        module=TwoTowers(sizes),
        loss_fn=contrastive_loss,
        data=CaptionedImages(sizes.side, sizes.length, sizes.vocabulary),
        default_batch_size={"cpu": 4, "cuda": 64},
        learning_rate=1e-4,
    )
