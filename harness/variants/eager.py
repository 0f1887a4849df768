"""Eager PyTorch and ``torch.compile``: the plain loop, with the flags an expert sets."""

from __future__ import annotations

from harness.variants.catalogue import Variant
from harness.variants.training import Ingredients, LoopTraining, compiled


def start(variant: Variant, ingredients: Ingredients) -> LoopTraining:
    """A training by the plain loop; the model is compiled if the variant says so."""
    optimizer = ingredients.adam(fused=True) if variant.fused else ingredients.adam()
    return LoopTraining(ingredients, compiled(variant, ingredients.model), optimizer)
