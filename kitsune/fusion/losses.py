"""Finds losses in a graph, for templates."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from kitsune.fusion.moves import HALVES
from kitsune.fusion.nodes import arguments, aten, calls, is_taken_apart, only_user, result


class CrossEntropy(NamedTuple):
    """The negative log-likelihood, in float32 and without weights, of a log-softmax of rows, and its backward.

    Autocast on GPUs leaves the log-softmax of logits in half precision as it is, and casts what it gives.

    Attributes:
        softmax, forward, backward, softmax_backward: the operators that compute it; the last one gives the gradient of
            what the first one takes.
        casts: between those operators.
    """

    softmax: fx.Node
    forward: fx.Node
    backward: fx.Node
    softmax_backward: fx.Node
    casts: tuple[fx.Node, ...]

    @property
    def nodes(self) -> list[fx.Node]:
        """All that compute it."""
        return [self.softmax, self.forward, *self.forward.users, self.backward, self.softmax_backward, *self.casts]


def find_cross_entropy(softmax: fx.Node) -> CrossEntropy | None:
    """The loss of which `softmax` is the first operator. Others may use its values, too."""
    if not calls(softmax, aten._log_softmax.default) or arguments(softmax)[1] not in (1, -1):
        return None
    widened = _user(softmax, aten._to_copy.default)
    likelihoods = widened or softmax
    forward = _user(likelihoods, aten.nll_loss_forward.default)
    backward = _user(likelihoods, aten.nll_loss_backward.default)
    softmax_backward = _user(softmax, aten._log_softmax_backward_data.default)
    if forward is None or backward is None or softmax_backward is None or not is_taken_apart(forward):
        return None
    of, targets, weight, *_ = arguments(forward)
    scale, *same, total_weight = arguments(backward)
    is_known = of is likelihoods and weight is None and targets is not likelihoods
    belongs = same == list(arguments(forward)) and total_weight is result(forward, 1) and scale is not likelihoods
    narrowed = None if widened is None else only_user(backward, aten._to_copy.default)
    grad, output, dim, _ = arguments(softmax_backward)
    is_its_backward = (grad, output) == (narrowed or backward, softmax) and dim in (1, -1)
    if not is_known or not belongs or not is_its_backward or _dtype(likelihoods) != torch.float32:
        return None
    casts = tuple(cast for cast in (widened, narrowed) if cast is not None)
    is_cast_back = narrowed is not None and _dtype(softmax) in HALVES and _dtype(narrowed) == _dtype(softmax)
    return CrossEntropy(softmax, forward, backward, softmax_backward, casts) if is_cast_back or not casts else None


def _user(node: fx.Node, target: Any) -> fx.Node | None:
    """The one user of `node` that calls `target`."""
    found = [user for user in node.users if calls(user, target)]
    return found[0] if len(found) == 1 else None


def _dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype
