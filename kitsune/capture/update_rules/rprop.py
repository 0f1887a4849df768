"""Steps by the signs of gradients. Source: Riedmiller and Braun, IEEE ICNN 1993."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kitsune.capture.update_rules.rule import ComposedRule, Options, Tensors


class RpropRule(ComposedRule):
    """Rprop. The learning rate is only where step sizes start."""

    reads_step = False
    tensors = ("prev", "step_size")

    def flags(self, options: Options) -> tuple[bool, ...]:
        return (bool(options["maximize"]),)

    def hyperparameters(self, options: Options) -> dict[str, float]:
        (etaminus, etaplus), (smallest, largest) = options["etas"], options["step_sizes"]
        return {"etaminus": etaminus, "etaplus": etaplus, "step_size_min": smallest, "step_size_max": largest}

    def composed(
        self,
        params: Tensors,
        grads: Tensors,
        state: Mapping[str, Tensors],
        step: torch.Tensor | None,
        hyper: Mapping[str, torch.Tensor],
        options: Options,
    ) -> None:
        (maximize,) = self.flags(options)
        number = {name: value.to(params[0].dtype) for name, value in hyper.items()}
        if maximize:
            grads = list(torch._foreach_neg(grads))
        for grad, prev, step_size in zip(grads, state["prev"], state["step_size"], strict=True):
            agreement = (grad * prev).sign()
            factor = torch.where(agreement > 0, number["etaplus"], agreement)
            factor = torch.where(agreement < 0, number["etaminus"], factor)
            factor.masked_fill_(agreement == 0, 1)
            step_size.mul_(factor).clamp_(number["step_size_min"], number["step_size_max"])
            prev.copy_(grad.masked_fill(agreement < 0, 0))
        directions = [prev.sign() for prev in state["prev"]]
        torch._foreach_addcmul_(params, directions, state["step_size"], value=-1)
