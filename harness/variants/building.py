"""From a variant's description to a training that is ready to run."""

from __future__ import annotations

from harness.variants import eager
from harness.variants.catalogue import Variant
from harness.variants.handcaptured import HandCapturedTraining
from harness.variants.training import Ingredients, Training


def start(variant: Variant, ingredients: Ingredients) -> Training:
    """A training in which no step has been taken. Expects that the variant is available here."""
    if variant.family == "handcaptured":
        return HandCapturedTraining(variant, ingredients)
    if variant.is_kitsune:
        from harness.variants import kitsune  # older commits have none

        if variant.family == "kitsune_dropin":
            return kitsune.DropInTraining(ingredients, variant.options)
        return kitsune.TrainStepTraining(ingredients, variant.options)
    return eager.start(variant, ingredients)
