"""Optimizers as updates of tensors: what `torch.optim` does in `step()`, in a form that can be traced.

`torch.optim.Optimizer.step` itself cannot: it reads the step count on the host, and tracing it
would freeze bias corrections as constants. A rule states its update in one or two forms:

- `fused` (Adam, AdamW, SGD): few launches for all tensors, by the operators of ATen that
  `torch.optim` uses with `fused=True`, or by Kitsune's own. The learning rate is a tensor; the
  other hyperparameters are constants of the graph.
- `composed` (all): arithmetic on lists of tensors in which every hyperparameter is a
  zero-dimensional float64 tensor, for loops that change them from step to step, for float64
  parameters, whose precision exceeds that of the fused operators' learning rate, and where there
  is no fused form or it is refused. What depends on the step count is computed from its tensor.

Both update parameters and state in place. The order of operations is that of `torch.optim`; each
module names the sources of its algorithms.
"""

from __future__ import annotations

import torch

from kitsune.capture.update_rules.adagrad import AdadeltaRule, AdagradRule, RMSpropRule
from kitsune.capture.update_rules.adam import AdamaxRule, AdamRule, NAdamRule, RAdamRule
from kitsune.capture.update_rules.rprop import RpropRule
from kitsune.capture.update_rules.rule import Rule
from kitsune.capture.update_rules.sgd import ASGDRule, SGDRule
from kitsune.errors import Refusal

__all__ = [
    "ASGDRule",
    "AdadeltaRule",
    "AdagradRule",
    "AdamRule",
    "AdamaxRule",
    "NAdamRule",
    "RAdamRule",
    "RMSpropRule",
    "RpropRule",
    "Rule",
    "SGDRule",
    "rule_for",
]

_RULES: dict[type[torch.optim.Optimizer], Rule] = {
    torch.optim.Adam: AdamRule(),
    torch.optim.AdamW: AdamRule(),
    torch.optim.SGD: SGDRule(),
    torch.optim.NAdam: NAdamRule(),
    torch.optim.RAdam: RAdamRule(),
    torch.optim.Adamax: AdamaxRule(),
    torch.optim.Adagrad: AdagradRule(),
    torch.optim.Adadelta: AdadeltaRule(),
    torch.optim.RMSprop: RMSpropRule(),
    torch.optim.Rprop: RpropRule(),
    torch.optim.ASGD: ASGDRule(),
}


def _let_fake_tensors_stand_for_real_ones() -> None:
    """Gives torch's fused updates a form without data, where this torch has none.

    Tracing would otherwise run them for real, on new memory of the size of all parameters and states.
    """
    for operator in ("aten::_fused_adam_.tensor_lr", "aten::_fused_adamw_.tensor_lr", "aten::_fused_sgd_.tensor_lr"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(operator, "Meta"):
            torch.library.impl(operator, "Meta")(lambda *_args, **_options: None)


_let_fake_tensors_stand_for_real_ones()


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
