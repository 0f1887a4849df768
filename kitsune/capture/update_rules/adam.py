"""Adam and its kin: averages of gradients over averages, or maxima, of their sizes.

Sources: Kingma and Ba, arXiv 1412.6980 (Adam, Adamax); Reddi et al., arXiv 1904.09237 (AMSGrad);
Loshchilov and Hutter, arXiv 1711.05101 (AdamW); Dozat, ICLR Workshop 2016 (NAdam); Liu et al.,
arXiv 1908.03265 (RAdam).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch

from kitsune.capture.update_rules.arithmetic import (
    add_scalar_,
    decay_towards,
    decay_towards_squares,
    descent,
    roots_plus,
    step_by_ratio,
)
from kitsune.capture.update_rules.rule import ComposedRule, Options, Rule, Tensors
from kitsune.device import refuse_triton
from kitsune.errors import Refusal
from kitsune.kernels.adam import adam_

Number = TypeVar("Number", float, torch.Tensor)


class AdamRule(Rule):
    """Adam and AdamW, with AMSGrad."""

    def refuse_fused(self, dtype: torch.dtype, device: torch.device, options: Options) -> Refusal | None:
        if _is_imprecise(dtype, device):
            return refuse_triton(device, "the fused Adam update")
        return super().refuse_fused(dtype, device, options)

    def state_names(self, options: Options) -> tuple[str, ...]:
        names = ("exp_avg", "exp_avg_sq")
        return (*names, "max_exp_avg_sq") if options["amsgrad"] else names

    def flags(self, options: Options) -> tuple[bool, ...]:
        decoupled = options["decoupled_weight_decay"]
        return (bool(options["amsgrad"]), bool(options["maximize"]), bool(decoupled), options["weight_decay"] != 0)

    def hyperparameters(self, options: Options) -> dict[str, float]:
        return _betas_eps_and_decay(options)

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
        averages = (state["exp_avg"], state["exp_avg_sq"], state.get("max_exp_avg_sq", []))
        shared = {**self.hyperparameters(options), "lr": lr, "maximize": options["maximize"], "found_inf": found_inf}
        decoupled = options["decoupled_weight_decay"]
        if _is_imprecise(params[0].dtype, params[0].device):
            adam_(params, grads, *averages, steps, decoupled=decoupled, **shared)
            return
        update = torch._fused_adamw_ if decoupled else torch._fused_adam_
        update(params, grads, *averages, steps, amsgrad=options["amsgrad"], grad_scale=None, **shared)

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
        amsgrad, maximize, decoupled, decays = self.flags(options)
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        grads = descent(params, grads, hyper, maximize=maximize, decays=decays, decoupled=decoupled)
        decay_towards(exp_avg, grads, hyper["beta1"])
        decay_towards_squares(exp_avg_sq, grads, hyper["beta2"])
        count = step.to(torch.float64)
        correction1 = 1 - hyper["beta1"] ** count
        correction2 = (1 - hyper["beta2"] ** count).sqrt()
        if amsgrad:
            torch._foreach_maximum_(state["max_exp_avg_sq"], exp_avg_sq)
            exp_avg_sq = state["max_exp_avg_sq"]
        denominator = list(torch._foreach_sqrt(exp_avg_sq))
        torch._foreach_div_(denominator, correction2.to(dtype))
        add_scalar_(denominator, hyper["eps"])
        change = torch._foreach_div(exp_avg, denominator)
        torch._foreach_mul_(change, (hyper["lr"] / correction1).to(dtype))
        torch._foreach_sub_(params, change)


class _TwoMomentsRule(ComposedRule):
    """What NAdam and RAdam have of Adam."""

    tensors = ("exp_avg", "exp_avg_sq")

    def flags(self, options: Options) -> tuple[bool, ...]:
        return bool(options["maximize"]), bool(options["decoupled_weight_decay"]), options["weight_decay"] != 0

    def hyperparameters(self, options: Options) -> dict[str, float]:
        return _betas_eps_and_decay(options)


class NAdamRule(_TwoMomentsRule):
    """NAdam. `mu_product` is the product of all momenta so far."""

    host_scalars = ("mu_product",)

    def hyperparameters(self, options: Options) -> dict[str, float]:
        return {**super().hyperparameters(options), "momentum_decay": options["momentum_decay"]}

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
        maximize, decoupled, decays = self.flags(options)
        exp_avg, exp_avg_sq, product = state["exp_avg"], state["exp_avg_sq"], state["mu_product"][0]
        grads = descent(params, grads, hyper, maximize=maximize, decays=decays, decoupled=decoupled)
        count = step.to(torch.float64)
        momentum = _momentum(hyper["beta1"], hyper["momentum_decay"], count)
        next_momentum = _momentum(hyper["beta1"], hyper["momentum_decay"], count + 1)
        product.mul_(momentum.to(product.dtype))
        decay_towards(exp_avg, grads, hyper["beta1"])
        decay_towards_squares(exp_avg_sq, grads, hyper["beta2"])
        corrected = list(torch._foreach_div(exp_avg_sq, (1 - hyper["beta2"] ** count).to(dtype)))
        denominator = roots_plus(corrected, hyper["eps"])
        past = product.to(torch.float64)
        step_by_ratio(params, grads, denominator, hyper["lr"] * (1 - momentum) / (1 - past))
        step_by_ratio(params, exp_avg, denominator, hyper["lr"] * next_momentum / (1 - past * next_momentum))

    def next_scalar(self, name: str, value: torch.Tensor, step: float, options: Options) -> torch.Tensor:
        momentum: float = _momentum(options["betas"][0], options["momentum_decay"], step)
        return value * momentum


class RAdamRule(_TwoMomentsRule):
    """RAdam: the denominator counts only where its variance is tractable."""

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
        maximize, decoupled, decays = self.flags(options)
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        grads = descent(params, grads, hyper, maximize=maximize, decays=decays, decoupled=decoupled)
        decay_towards(exp_avg, grads, hyper["beta1"])
        decay_towards_squares(exp_avg_sq, grads, hyper["beta2"])
        count = step.to(torch.float64)
        size = hyper["lr"] / (1 - hyper["beta1"] ** count)
        is_tractable, factor = _rectification(hyper["beta2"], count)
        # Where the denominator does not count, it is at least 1, so that nothing is divided by zero.
        denominator = roots_plus(exp_avg_sq, hyper["eps"].masked_fill(~is_tractable, 1))
        change = torch._foreach_mul(exp_avg, size.masked_fill(is_tractable, 0).to(dtype))
        step_by_ratio(params, exp_avg, denominator, (size * factor).masked_fill(~is_tractable, 0))
        torch._foreach_sub_(params, change)


class AdamaxRule(ComposedRule):
    """Adamax: Adam by the infinity norm."""

    tensors = ("exp_avg", "exp_inf")

    def hyperparameters(self, options: Options) -> dict[str, float]:
        return _betas_eps_and_decay(options)

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
        exp_avg, exp_inf = state["exp_avg"], state["exp_inf"]
        grads = descent(params, grads, hyper, maximize=maximize, decays=decays)
        decay_towards(exp_avg, grads, hyper["beta1"])
        sizes = list(torch._foreach_abs(grads))
        add_scalar_(sizes, hyper["eps"])
        torch._foreach_mul_(exp_inf, hyper["beta2"].to(params[0].dtype))
        torch._foreach_maximum_(exp_inf, sizes)
        step_by_ratio(params, exp_avg, exp_inf, hyper["lr"] / (1 - hyper["beta1"] ** step.to(torch.float64)))


def _is_imprecise(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's fused Adam is far less precise than `foreach=True`: see `kitsune.kernels.adam`."""
    return device.type == "cuda" and dtype == torch.float32


def _betas_eps_and_decay(options: Options) -> dict[str, float]:
    beta1, beta2 = options["betas"]
    return {"beta1": beta1, "beta2": beta2, "eps": options["eps"], "weight_decay": options["weight_decay"]}


def _momentum(beta1: Number, momentum_decay: Number, step: Number) -> Number:
    """NAdam's momentum at a step."""
    momentum: Number = beta1 * (1.0 - 0.5 * (0.96 ** (step * momentum_decay)))
    return momentum


def _rectification(beta2: torch.Tensor, step: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether the variance of RAdam's denominator is tractable, and the factor of its step if it is (else anything)."""
    power = beta2**step
    correction = 1 - power
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * step * power / correction
    squared = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    return length > 5, (squared * correction).sqrt()
