"""What a variant's name says: its precision, its family, its place in a table, and how to call it before a reader."""

from __future__ import annotations

from harness.variants import VARIANTS

_PRECISIONS = ("fp32", "tf32", "amp")
_FAMILIES = ("eager", "compile", "handcaptured", "kitsune")


def is_kitsune(variant: str) -> bool:
    """Whether Kitsune runs a variant."""
    return family_of(variant) == "kitsune"


def is_diagnostic(variant: str) -> bool:
    """Whether it is Kitsune with something switched off, to tell what that contributes."""
    return variant in VARIANTS and VARIANTS[variant].is_diagnostic


def is_product(variant: str) -> bool:
    """Whether it is Kitsune as users run it: what is judged, against its peers and from commit to commit."""
    return is_kitsune(variant) and not is_diagnostic(variant)


def family_of(variant: str) -> str:
    """The first part of the name: "eager", "compile", "handcaptured", "kitsune", or that of one's own variant."""
    return variant.partition("_")[0]


def precision_of(variant: str) -> str:
    """The last part of the name: "fp32", "tf32", "amp", or that of one's own variant."""
    return variant.rpartition("_")[2]


def label(variant: str) -> str:
    """The variant in words, without its precision; an unknown name as it is."""
    return VARIANTS[variant].title.rpartition(", ")[0] if variant in VARIANTS else variant


def reference_of(variant: str) -> str:
    """The variant another one's time is a multiple of: eager in the same precision."""
    return f"eager_{precision_of(variant)}"


def order(variant: str) -> tuple[int, int, str]:
    """Sort key: by precision, then family (eager, compiled, by hand, Kitsune), then name; unknown ones last."""
    way, _, precision = variant.rpartition("_")
    return _place(precision, _PRECISIONS), _place(family_of(variant), _FAMILIES), way


def _place(name: str, known: tuple[str, ...]) -> int:
    return known.index(name) if name in known else len(known)
