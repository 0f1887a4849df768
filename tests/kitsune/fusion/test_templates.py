"""All templates, one after the other, on whole steps of language and vision models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kitsune.fusion.templates import TEMPLATES
from kitsune.graph.values import wrong_value
from kitsune.passes.regions import fuse_regions
from tests.kitsune.fusion.running import always, fuse, run
from tests.kitsune.fusion.transformer_steps import (
    assert_close_to_the_original,
    bert_step,
    gpt2_step,
    llama_step,
    vit_step,
)
from tests.kitsune.passes.running import OPERATORS
from tests.kitsune.steps import TracedStep

UNALIGNED = 1301
"""So many logits of 2 bytes fill no multiple of 16 bytes."""


def gpt2_of_many_tokens(dtype: torch.dtype) -> TracedStep:
    return gpt2_step(dtype, vocabulary=UNALIGNED)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "step_of", [gpt2_step, gpt2_of_many_tokens, llama_step, bert_step, vit_step], ids=lambda f: f.__name__
)
def test_a_step_with_all_that_fits_replaced(step_of: Callable[[torch.dtype], TracedStep], dtype: torch.dtype) -> None:
    """Each replacement agrees with what it replaces, and all of them with the step, regions included."""
    step = step_of(dtype)
    new, fusions = fuse(step.module, TEMPLATES, always)
    assert wrong_value(new.graph) is None
    names = {fusion.template for fusion in fusions if fusion.refusal is None}
    half = dtype != torch.float32
    assert ("logits of a padded vocabulary" in names) == (half and step_of is gpt2_of_many_tokens)
    assert any(name.endswith("copy") for name in names) == half
    fused = fuse_regions(new, OPERATORS)
    assert len(fused.regions) > len(fused.refused)
    wanted = run(step.module, step.inputs)
    for module in (new, fused.module):
        assert_close_to_the_original(run(module, step.inputs), wanted, dtype)
