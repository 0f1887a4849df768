"""The ways of training that are measured side by side. Describing them needs no torch; building them does."""

from harness.variants.catalogue import VARIANTS, Variant, get, names

__all__ = ["VARIANTS", "Variant", "get", "names"]
