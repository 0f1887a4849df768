"""Eager PyTorch and ``torch.compile``: the plain loop, with the flags an expert sets."""

from __future__ import annotations

from harness.variants.catalogue import Variant
from harness.variants.training import Ingredients, LoopTraining, compiled

_STEPS_TO_GRAPHS = 3
"""With mode "reduce-overhead" the first step compiles, the second records CUDA graphs, and the third replays them."""


def start(variant: Variant, ingredients: Ingredients) -> LoopTraining:
    """A training by the plain loop; the model is compiled if the variant says so."""
    optimizer = ingredients.adam(fused=True) if variant.fused else ingredients.adam()
    settles_after = _STEPS_TO_GRAPHS if variant.compile_mode == "reduce-overhead" else 1
    return LoopTraining(ingredients, compiled(variant, ingredients.model), optimizer, settles_after)
