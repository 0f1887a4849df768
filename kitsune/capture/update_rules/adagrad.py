"""Gradients over the roots of sums, or of running averages, of their squares.

Sources: Duchi et al., JMLR 12, 2011 (Adagrad); Zeiler, arXiv 1212.5701 (Adadelta); Tieleman and Hinton,
COURSERA lecture 6.5, 2012, and Graves, arXiv 1308.0850 (RMSprop, centered).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kitsune.capture.update_rules.arithmetic import (
    add_scalar,
    decay_towards_squares,
    descent,
    roots_plus,
    step_by_ratio,
)
from kitsune.capture.update_rules.rule import ComposedRule, Options, Tensors


class AdagradRule(ComposedRule):
    """Adagrad, with decay of the learning rate."""

    tensors = ("sum",)
    numbers = ("lr_decay", "eps", "weight_decay")

    def composed(
        self,
        params: Tensors,
        grads: Tensors,
        state: Mapping[str, Tensors],
        step: torch.Tensor | None,
        hyper: Mapping[str, torch.Tensor],
        options: Options,
    ) -> None:
        assert step is not None
        maximize, decays = self.flags(options)
        grads = descent(params, grads, hyper, maximize=maximize, decays=decays)
        torch._foreach_addcmul_(state["sum"], grads, grads)
        size = hyper["lr"] / (1 + (step.to(torch.float64) - 1) * hyper["lr_decay"])
        step_by_ratio(params, grads, roots_plus(state["sum"], hyper["eps"]), size)


class AdadeltaRule(ComposedRule):
    """Adadelta: steps in proportion to the steps before."""

    reads_step = False
    tensors = ("square_avg", "acc_delta")
    numbers = ("rho", "eps", "weight_decay")

    def composed(
        self,
        params: Tensors,
        grads: Tensors,
        state: Mapping[str, Tensors],
        step: torch.Tensor | None,
        hyper: Mapping[str, torch.Tensor],
        options: Options,
    ) -> None:
        maximize, decays = self.flags(options)
        square_avg, acc_delta = state["square_avg"], state["acc_delta"]
        grads = descent(params, grads, hyper, maximize=maximize, decays=decays)
        decay_towards_squares(square_avg, grads, hyper["rho"])
        delta = _roots_of_sums(acc_delta, hyper["eps"])
        torch._foreach_div_(delta, _roots_of_sums(square_avg, hyper["eps"]))
        torch._foreach_mul_(delta, grads)
        decay_towards_squares(acc_delta, delta, hyper["rho"])
        torch._foreach_sub_(params, torch._foreach_mul(delta, hyper["lr"].to(params[0].dtype)))


class RMSpropRule(ComposedRule):
    """RMSprop, centered or not, with momentum."""

    reads_step = False
    numbers = ("alpha", "eps", "weight_decay", "momentum")

    def state_names(self, options: Options) -> tuple[str, ...]:
        momentum, centered, *_ = self.flags(options)
        names = (("square_avg", True), ("momentum_buffer", momentum), ("grad_avg", centered))
        return tuple(name for name, is_used in names if is_used)

    def flags(self, options: Options) -> tuple[bool, ...]:
        momentum, centered = options["momentum"] > 0, bool(options["centered"])
        return momentum, centered, bool(options["maximize"]), options["weight_decay"] != 0

    def composed(
        self,
        params: Tensors,
        grads: Tensors,
        state: Mapping[str, Tensors],
        step: torch.Tensor | None,
        hyper: Mapping[str, torch.Tensor],
        options: Options,
    ) -> None:
        dtype = params[0].dtype
        has_momentum, centered, maximize, decays = self.flags(options)
        squares = state["square_avg"]
        grads = descent(params, grads, hyper, maximize=maximize, decays=decays)
        decay_towards_squares(squares, grads, hyper["alpha"])
        if centered:
            means = state["grad_avg"]
            # In torch's own rounding, which decides whether a variance of nearly zero turns out negative.
            for mean, grad in zip(means, grads, strict=True):
                mean.lerp_(grad, (1 - hyper["alpha"]).to(dtype))
            squares = list(torch._foreach_addcmul(squares, means, means, value=-1))
        denominator = roots_plus(squares, hyper["eps"])
        if not has_momentum:
            step_by_ratio(params, grads, denominator, hyper["lr"])
            return
        buffers = state["momentum_buffer"]
        torch._foreach_mul_(buffers, hyper["momentum"].to(dtype))
        torch._foreach_addcdiv_(buffers, grads, denominator)
        torch._foreach_sub_(params, torch._foreach_mul(buffers, hyper["lr"].to(dtype)))


def _roots_of_sums(squares: Tensors, eps: torch.Tensor) -> Tensors:
    """`sqrt(squares + eps)`."""
    return list(torch._foreach_sqrt(add_scalar(squares, eps)))
