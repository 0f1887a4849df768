"""Small models of einops, timm, transformers and torchmetrics train in each form as by hand, and are replayed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.kitsune.training import FORMS, Batch, Training, adam, compare

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]

_WORDS, _LENGTH, _CLASSES = 32, 8, 3


def library(name: str) -> Any:
    """Skips where it is missing, or cannot be imported: timm needs a torchvision that was built for this torch."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        return pytest.skip(f"{name} cannot be imported: {error}")


def words(index: int) -> Batch:
    generator = torch.Generator().manual_seed(index)
    return (torch.randint(_WORDS, (4, _LENGTH), generator=generator),), {}


def sentences(index: int) -> Batch:
    (tokens,), _ = words(index)
    return (tokens, tokens.sum(1) % _CLASSES), {}


def images(index: int) -> Batch:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(4, 3, 32, 32, generator=generator)
    return (x, torch.randint(_CLASSES, (4,), generator=generator)), {}


class Attention(nn.Module):
    """As it is written with einops: patterns in the call, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.einops, layers = library("einops"), library("einops.layers.torch")
        self.words, self.qkv = nn.Embedding(_WORDS, 16), nn.Linear(16, 48)
        self.head = nn.Sequential(layers.Reduce("b n c -> b c", "mean"), nn.Linear(16, _CLASSES))

    def forward(self, tokens: Tensor) -> Tensor:
        qkv = self.einops.rearrange(self.qkv(self.words(tokens)), "b n (three h d) -> three b h n d", three=3, h=2)
        q, k, v = qkv.unbind(0)
        weights = self.einops.einsum(q, k, "b h i d, b h j d -> b h i j").softmax(-1)
        found: Tensor = self.head(self.einops.rearrange(weights @ v, "b h n d -> b n (h d)"))
        return found + self.einops.repeat(found.mean(1), "b -> b c", c=_CLASSES)


class Logits(nn.Module):
    """The logits of a model that returns an object."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x).logits
        return logits


def vision_transformer() -> nn.Module:
    made: nn.Module = library("timm.models.vision_transformer").VisionTransformer(
        img_size=32, patch_size=8, num_classes=_CLASSES, embed_dim=32, depth=2, num_heads=2
    )
    return made


def efficient_network() -> nn.Module:
    made: nn.Module = library("timm").create_model("efficientnet_lite0", num_classes=_CLASSES, drop_rate=0.0)
    return made


def bert() -> nn.Module:
    transformers = library("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=_WORDS, num_labels=_CLASSES, **sizes)
    return Logits(transformers.BertForSequenceClassification(config))


def vit() -> nn.Module:
    transformers = library("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(image_size=32, patch_size=8, num_labels=_CLASSES, **sizes)
    return Logits(transformers.ViTForImageClassification(config))


def gpt2() -> nn.Module:
    transformers = library("transformers")
    config = transformers.GPT2Config(vocab_size=_WORDS, n_positions=_LENGTH, n_embd=16, n_layer=2, n_head=2)
    made: nn.Module = transformers.GPT2LMHeadModel(config)
    return made


def llama() -> nn.Module:
    transformers = library("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    made: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=_WORDS, **sizes))
    return made


CLASSIFIERS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "einops": (Attention, sentences),
    "timm ViT": (vision_transformer, images),
    "timm EfficientNet": (efficient_network, images),
    "transformers BERT": (bert, sentences),
    "transformers ViT": (vit, images),
}


def building(make: Callable[[], nn.Module]) -> Callable[[], tuple[nn.Module, torch.optim.Optimizer]]:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        made = make()
        return made, adam(made, lr=1e-3)

    return build


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers(name: str, form: str) -> None:
    make, batches = CLASSIFIERS[name]
    training = compare(form, building(make), batches=batches, rtol=1e-5, atol=1e-6)
    assert training.status().mode == "replay"


def language_loop(training: Training, tokens: Tensor) -> Tensor:
    training.optimizer.zero_grad()
    loss: Tensor = training.model(tokens, labels=tokens).loss
    loss.backward()
    training.optimizer.step()
    return loss.detach()


def language_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens, labels=tokens).loss
    return loss


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", [gpt2, llama])
def test_language_models(make: Callable[[], nn.Module], form: str) -> None:
    build = building(make)
    step = {"step": {"forward": language_loss}} if form == "train_step" else {}
    training = compare(form, build, batches=words, loop=language_loop, rtol=1e-5, atol=1e-6, **step)
    assert training.status().mode == "replay"


@pytest.mark.parametrize("defer_loss", [False, True])
def test_metrics_of_torchmetrics_are_those_of_plain_pytorch(defer_loss: bool) -> None:
    classification = library("torchmetrics.classification")

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        if "accuracy" not in training.memo:
            training.memo["accuracy"] = classification.MulticlassAccuracy(_CLASSES)
        training.optimizer.zero_grad()
        logits = training.model(x)
        loss = functional.cross_entropy(logits, y)
        loss.backward()
        training.optimizer.step()
        training.memo.setdefault("seen", []).append(float(training.memo["accuracy"](logits, y)))
        return loss.detach()

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        made = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, _CLASSES))
        return made, adam(made)

    options = {"defer_loss": True} if defer_loss else {}
    seen = []
    for form in ("eager", "drop_in"):
        torch.manual_seed(7)
        training = Training(form, *build(), loop=loop, **(options if form == "drop_in" else {}))
        training.run(6, images)
        seen.append((training.memo["seen"], float(training.memo["accuracy"].compute())))
    assert seen[0] == seen[1]
    assert training.status().replays >= 4
