"""timm: of each family the model with the fewest parameters, with images as small as it takes."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from models import torchvision_loading
from tests.benchmarks.coverage.sample import Batch, Sample

_IMAGES = 2
_CLASSES = 10
_SMALL_SIZES = (96, 112, 128, 192, 224)
_TINY = "test_"
"""Models that timm has for tests of its own are not those of its users."""


def missing() -> str | None:
    """Why timm cannot be used, and what to do; None if it can be."""
    for name in ("timm", "torchvision"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed: pip install timm, with the release of torchvision for this torch"
    return None


def versions() -> dict[str, str]:
    """By name."""
    return {name: importlib.metadata.version(name) for name in ("timm", "torchvision")}


def families() -> list[str]:
    """timm's own: its modules of models."""
    found: list[str] = _timm().list_modules()
    return found


def model_of(family: str) -> str:
    """The model with the fewest parameters; the first of these by name."""
    names = [name for name in _timm().list_models(module=family) if not name.startswith(_TINY)]
    found: str = min(names, key=_num_parameters)
    return found


def build(model: str) -> Sample:
    """One of timm's models, with a classification of images, or the mean of what it gives where it has no classes."""
    made: Any = _timm().create_model(model, **_options(model))
    size = _size(model, made)

    def batch(index: int) -> Batch:
        generator = torch.Generator().manual_seed(index)
        images = torch.randn(_IMAGES, *size, generator=generator)
        return {"images": images, "labels": torch.randint(_CLASSES, (_IMAGES,), generator=generator)}

    return Sample(made, _loss, batch)


def _loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    parts = [part for part in pytree.tree_leaves(model(images)) if isinstance(part, Tensor) and part.requires_grad]
    losses = [
        functional.cross_entropy(part, labels) if part.shape == (_IMAGES, _CLASSES) else part.square().mean()
        for part in parts
    ]
    return torch.stack(losses).sum()


def _timm() -> Any:
    torchvision_loading.import_torchvision("transforms")
    return importlib.import_module("timm")


def _num_parameters(model: str) -> int:
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sum(parameter.numel() for parameter in _timm().create_model(model).parameters())


def _options(model: str) -> dict[str, Any]:
    config = _timm().get_pretrained_cfg(model)
    return {"num_classes": _CLASSES} if config is None or config.num_classes else {}


def _size(name: str, model: Any) -> tuple[int, int, int]:
    """Of one image: the smallest that the model takes; or what it is made for."""
    channels, height, width = model.default_cfg["input_size"]
    if not model.default_cfg.get("fixed_input_size"):
        for size in _SMALL_SIZES:
            if size < min(height, width) and _takes(name, (channels, size, size)):
                return channels, size, size
    return channels, height, width


def _takes(name: str, size: tuple[int, int, int]) -> bool:
    """Whether a model takes images of a size, as a call shows that computes nothing."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = _timm().create_model(name, **_options(name))
        try:
            made(torch.empty(_IMAGES, *size))
        except Exception:  # noqa: BLE001 - each model has words of its own for it
            return False
    return True
