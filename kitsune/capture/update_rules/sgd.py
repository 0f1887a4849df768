"""Gradient descent by the gradient itself: with momentum, or averaged.

Sources: Sutskever et al., ICML 2013, in PyTorch's form (momentum); Polyak and Juditsky, SIAM Journal
on Control and Optimization 30(4), 1992 (ASGD).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kitsune.capture.update_rules.arithmetic import descent
from kitsune.capture.update_rules.rule import ComposedRule, Options, Rule, Tensors


class SGDRule(Rule):
    """SGD with momentum, dampening and Nesterov's variant."""

    has_step = False
    reads_step = False

    def state_names(self, options: Options) -> tuple[str, ...]:
        return ("momentum_buffer",) if options["momentum"] != 0 else ()

    def flags(self, options: Options) -> tuple[bool, ...]:
        return (
            options["momentum"] != 0,
            bool(options["nesterov"]),
            bool(options["maximize"]),
            options["weight_decay"] != 0,
        )

    def hyperparameters(self, options: Options) -> dict[str, float]:
        return {name: options[name] for name in ("momentum", "dampening", "weight_decay")}

    def fused(
        self,
        params: Tensors,
        grads: Tensors,
        state: Mapping[str, Tensors],
        steps: Tensors,
        lr: torch.Tensor,
        options: Options,
        found_inf: torch.Tensor | None,
    ) -> None:
        torch._fused_sgd_(
            params,
            grads,
            state.get("momentum_buffer", []),
            weight_decay=options["weight_decay"],
            momentum=options["momentum"],
            lr=lr,
            dampening=options["dampening"],
            nesterov=options["nesterov"],
            maximize=options["maximize"],
            is_first_step=False,
            grad_scale=None,
            found_inf=found_inf,
        )

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
        has_momentum, nesterov, maximize, decays = self.flags(options)
        grads = descent(params, grads, hyper, maximize=maximize, decays=decays)
        if has_momentum:
            momentum, buffers = hyper["momentum"].to(dtype), state["momentum_buffer"]
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, torch._foreach_mul(grads, (1 - hyper["dampening"]).to(dtype)))
            grads = list(torch._foreach_add(grads, torch._foreach_mul(buffers, momentum))) if nesterov else buffers
        torch._foreach_sub_(params, torch._foreach_mul(grads, hyper["lr"].to(dtype)))

    def writes_gradients(self, options: Options, foreach: bool) -> bool:
        """torch's `foreach` form adds Nesterov's momentum to them, unless it computes on a copy for another reason."""
        has_momentum, nesterov, maximize, decays = self.flags(options)
        if not (has_momentum and nesterov) or maximize or decays:
            return False
        is_left_to_torch = options["foreach"] is None and options["fused"] is None
        return foreach if is_left_to_torch else bool(options["foreach"])

    def write_gradients(
        self, grads: Tensors, state: Mapping[str, Tensors], options: Options, found_inf: torch.Tensor | None
    ) -> None:
        momentum, buffers = float(options["momentum"]), state["momentum_buffer"]
        if found_inf is None:
            torch._foreach_add_(grads, buffers, alpha=momentum)
            return
        for grad, buffer in zip(grads, buffers, strict=True):
            grad.copy_(torch.where(found_inf == 1, grad, grad.add(buffer, alpha=momentum)))


class ASGDRule(ComposedRule):
    """Averaged SGD. `eta` is the next step's learning rate, `mu` the weight of the parameters in their average `ax`."""

    tensors = ("ax",)
    numbers = ("lambd", "alpha", "t0", "weight_decay")

    def scalar_names(self) -> tuple[str, ...]:
        return ("eta", "mu")

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
        dtype = params[0].dtype
        maximize, decays = self.flags(options)
        eta, mu = state["eta"][0], state["mu"][0]
        grads = descent(params, grads, hyper, maximize=maximize, decays=decays)
        torch._foreach_mul_(params, (1 - hyper["lambd"] * eta.to(torch.float64)).to(dtype))
        torch._foreach_sub_(params, torch._foreach_mul(grads, eta.to(dtype)))
        change = torch._foreach_sub(params, state["ax"])
        torch._foreach_mul_(change, mu.to(dtype))
        for param, average, step_of_average in zip(params, state["ax"], change, strict=True):
            average.copy_(torch.where(mu == 1, param, average + step_of_average))
        count = step.to(torch.float64)
        # torch rounds both to its default dtype, whatever theirs is.
        rounded = torch.get_default_dtype()
        eta.copy_((hyper["lr"] / (1 + hyper["lambd"] * hyper["lr"] * count) ** hyper["alpha"]).to(rounded))
        mu.copy_((1 / torch.clamp(count - hyper["t0"], min=1)).to(rounded))
