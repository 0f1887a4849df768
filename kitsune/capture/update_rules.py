"""Optimizers as updates of tensors: what `torch.optim` does in `step()`, in a form that can be traced.

`torch.optim.Optimizer.step` itself cannot: it reads the step count on the host, and tracing it
would freeze bias corrections as constants. Each rule states its update twice:

- `fused`: few launches for all tensors, by the operators of ATen that `torch.optim` uses with
  `fused=True`, or by Kitsune's own. The learning rate is a tensor; the other hyperparameters are
  constants of the graph.
- `composed`: arithmetic on lists of tensors in which every hyperparameter is a zero-dimensional
  float64 tensor, for loops that change them from step to step, for float64 parameters, whose
  precision exceeds that of the fused operators' learning rate, and where the fused form is refused.

Both update parameters and state in place. Sources: Kingma and Ba, arXiv 1412.6980 (Adam); Reddi et
al., arXiv 1904.09237 (AMSGrad); Loshchilov and Hutter, arXiv 1711.05101 (AdamW); Sutskever et al.,
ICML 2013, in PyTorch's form (momentum). The order of operations is that of `torch.optim`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kitsune.device import refuse_triton
from kitsune.errors import Refusal
from kitsune.kernels.adam import adam_

Tensors = list[torch.Tensor]


def _let_fake_tensors_stand_for_real_ones() -> None:
    """Gives torch's fused updates a form without data, where this torch has none.

    Tracing would otherwise run them for real, on new memory of the size of all parameters and states.
    """
    for operator in ("aten::_fused_adam_.tensor_lr", "aten::_fused_adamw_.tensor_lr", "aten::_fused_sgd_.tensor_lr"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(operator, "Meta"):
            torch.library.impl(operator, "Meta")(lambda *_args, **_options: None)


_let_fake_tensors_stand_for_real_ones()
Options = Mapping[str, Any]


class Rule(ABC):
    """One optimizer's update of one parameter group.

    `options` is the group's dictionary in `optimizer.param_groups`.
    """

    has_step: bool

    @abstractmethod
    def state_names(self, options: Options) -> tuple[str, ...]:
        """The per-parameter state tensors, shaped like the parameter."""

    @abstractmethod
    def flags(self, options: Options) -> tuple[bool, ...]:
        """What selects code, in both forms."""

    @abstractmethod
    def hyperparameters(self, options: Options) -> dict[str, float]:
        """The numeric hyperparameters without the learning rate."""

    def refuse_fused(self, dtype: torch.dtype, device: torch.device) -> Refusal | None:
        """None if the fused form takes parameters of `dtype` on `device`."""
        if device.type in ("cpu", "cuda") and dtype in (torch.float32, torch.bfloat16, torch.float16):
            return None
        return Refusal(f"there is no fused update for parameters of {dtype} on {device.type}")

    @abstractmethod
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
        """Updates in few launches. `steps` are float32 and count this step already; nothing is
        changed where `found_inf` is 1."""

    @abstractmethod
    def composed(
        self,
        params: Tensors,
        grads: Tensors,
        state: Mapping[str, Tensors],
        step: torch.Tensor | None,
        hyper: Mapping[str, torch.Tensor],
        options: Options,
    ) -> None:
        """Updates with live hyperparameters (zero-dimensional float64; `"lr"` among them). `step`
        counts this step already and is shared by all `params`."""


class AdamRule(Rule):
    """Adam and AdamW, with AMSGrad."""

    has_step = True

    def refuse_fused(self, dtype: torch.dtype, device: torch.device) -> Refusal | None:
        if _is_imprecise(dtype, device):
            return refuse_triton(device, "the fused Adam update")
        return super().refuse_fused(dtype, device)

    def state_names(self, options: Options) -> tuple[str, ...]:
        names = ("exp_avg", "exp_avg_sq")
        return (*names, "max_exp_avg_sq") if options["amsgrad"] else names

    def flags(self, options: Options) -> tuple[bool, ...]:
        decoupled = options["decoupled_weight_decay"]
        return (bool(options["amsgrad"]), bool(options["maximize"]), bool(decoupled), options["weight_decay"] != 0)

    def hyperparameters(self, options: Options) -> dict[str, float]:
        beta1, beta2 = options["betas"]
        return {"beta1": beta1, "beta2": beta2, "eps": options["eps"], "weight_decay": options["weight_decay"]}

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
        beta1, beta2 = options["betas"]
        averages = (state["exp_avg"], state["exp_avg_sq"], state.get("max_exp_avg_sq", []))
        numbers = {"beta1": beta1, "beta2": beta2, "weight_decay": options["weight_decay"], "eps": options["eps"]}
        shared = {**numbers, "lr": lr, "maximize": options["maximize"], "found_inf": found_inf}
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
        if maximize:
            grads = list(torch._foreach_neg(grads))
        if decays and decoupled:
            torch._foreach_mul_(params, (1 - hyper["lr"] * hyper["weight_decay"]).to(dtype))
        elif decays:
            grads = list(torch._foreach_add(grads, torch._foreach_mul(params, hyper["weight_decay"].to(dtype))))
        _decay_towards(exp_avg, grads, hyper["beta1"])
        _decay_towards(exp_avg_sq, torch._foreach_mul(grads, grads), hyper["beta2"])
        count = step.to(torch.float64)
        correction1 = 1 - hyper["beta1"] ** count
        correction2 = (1 - hyper["beta2"] ** count).sqrt()
        if amsgrad:
            torch._foreach_maximum_(state["max_exp_avg_sq"], exp_avg_sq)
            exp_avg_sq = state["max_exp_avg_sq"]
        denominator = torch._foreach_sqrt(exp_avg_sq)
        torch._foreach_div_(denominator, correction2.to(dtype))
        # torch._foreach_add_ would take the tensor for a number, and read it on the host.
        torch.ops.aten._foreach_add_.Tensor(denominator, hyper["eps"].to(dtype))
        change = torch._foreach_div(exp_avg, denominator)
        torch._foreach_mul_(change, (hyper["lr"] / correction1).to(dtype))
        torch._foreach_sub_(params, change)


class SGDRule(Rule):
    """SGD with momentum, dampening and Nesterov's variant."""

    has_step = False

    def refuse_fused(self, dtype: torch.dtype, device: torch.device) -> Refusal | None:
        if device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
            return Refusal("torch's fused SGD computes wrong results in half precision on the CPU")  # in torch 2.13
        return super().refuse_fused(dtype, device)

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
        if maximize:
            grads = list(torch._foreach_neg(grads))
        if decays:
            grads = list(torch._foreach_add(grads, torch._foreach_mul(params, hyper["weight_decay"].to(dtype))))
        if has_momentum:
            momentum, buffers = hyper["momentum"].to(dtype), state["momentum_buffer"]
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, torch._foreach_mul(grads, (1 - hyper["dampening"]).to(dtype)))
            grads = list(torch._foreach_add(grads, torch._foreach_mul(buffers, momentum))) if nesterov else buffers
        torch._foreach_sub_(params, torch._foreach_mul(grads, hyper["lr"].to(dtype)))


_RULES: dict[type[torch.optim.Optimizer], Rule] = {
    torch.optim.Adam: AdamRule(),
    torch.optim.AdamW: AdamRule(),
    torch.optim.SGD: SGDRule(),
}


def rule_for(optimizer: torch.optim.Optimizer) -> Rule | Refusal:
    """The rule that does what `optimizer.step()` does; a subclass may do something else and has none."""
    rule = _RULES.get(type(optimizer))
    if rule is None:
        names = ", ".join(kind.__name__ for kind in _RULES)
        return Refusal(f"there is no update rule for {type(optimizer).__name__} (there is for {names})")
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return Refusal("the optimizer's differentiable=True cannot be replayed")
        for name, value in rule.hyperparameters(group).items():
            if not isinstance(value, (int, float)):
                return Refusal(f"the hyperparameter {name} is a {type(value).__name__}, not a number")
    return rule


def _is_imprecise(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's fused Adam is far less precise than `foreach=True`: see `kitsune.kernels.adam`."""
    return device.type == "cuda" and dtype == torch.float32


def _decay_towards(averages: Tensors, values: Sequence[torch.Tensor], decay: torch.Tensor) -> None:
    dtype = averages[0].dtype
    torch._foreach_mul_(averages, decay.to(dtype))
    torch._foreach_add_(averages, torch._foreach_mul(list(values), (1 - decay).to(dtype)))
