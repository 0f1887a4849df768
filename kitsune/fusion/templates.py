"""The templates, in the order in which they take turns."""

from __future__ import annotations

from kitsune.fusion import (
    batch_norm,
    casts,
    conv,
    head,
    linear,
    norms,
    padded_vocabulary,
    padding,
    pool,
    rms_norm,
    small_conv,
    update,
    vocabulary,
)
from kitsune.fusion.engine import Template

OF_LAYERS: tuple[Template, ...] = (
    batch_norm.forward,
    batch_norm.backward,
    pool.backward,
    pool.forward,  # it takes over what the backward has computed anew
    pool.copied,
    small_conv.forward,
    small_conv.backward,
    conv.forward_with_batch_norm,
    conv.forward,
    conv.backward,
    conv.weight_gradient,  # which the one before may have left by itself
    padding.forward,  # of what no kernel of ours takes
    padding.weight_gradient,
    head.forward_and_backward,  # it takes the last linear layer with it
    vocabulary.cross_entropy,
    padded_vocabulary.logits,  # before a linear layer's kernel takes the product that makes them
    vocabulary.embedding,
    vocabulary.embedding_backward,
    norms.backward,
    rms_norm.backward,
    norms.forward,
    rms_norm.forward,
    linear.forward,
    linear.backward,  # it takes over casts of weights that the forward needs no more
)
"""Those with matches in each layer, or in many."""

OF_THE_STEP: tuple[Template, ...] = (
    update.without_casts,
    update.linear,  # it is compared with a library's products, whose results the update reads as they are
    casts.parameters,  # those that no kernel does itself
    casts.results,
    casts.counters,
    casts.steps,  # and what has become of counters
)
"""Those with few matches, for which there must be time left: each of them is about all parameters."""

TEMPLATES = OF_LAYERS + OF_THE_STEP
