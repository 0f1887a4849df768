"""What an update rule states of an optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from kitsune.errors import Refusal

Tensors = list[torch.Tensor]
Options = Mapping[str, Any]


class Rule(ABC):
    """One optimizer's update of one parameter group.

    `options` is the group's dictionary in `optimizer.param_groups`.

    Attributes:
        has_step: whether the optimizer counts the steps of each parameter.
        reads_step: whether the composed form reads that count.
        host_scalars: those of `scalar_names` that torch keeps on the host, as it does the count, unless told otherwise.
    """

    has_step: bool = True
    reads_step: bool = True
    host_scalars: tuple[str, ...] = ()

    @abstractmethod
    def state_names(self, options: Options) -> tuple[str, ...]:
        """The per-parameter state tensors, shaped like the parameter."""

    def scalar_names(self) -> tuple[str, ...]:
        """The per-parameter state tensors of one element, beside the step count."""
        return self.host_scalars

    @abstractmethod
    def flags(self, options: Options) -> tuple[bool, ...]:
        """What selects code, in both forms."""

    @abstractmethod
    def hyperparameters(self, options: Options) -> dict[str, float]:
        """The numeric hyperparameters without the learning rate."""

    def refuse_fused(self, dtype: torch.dtype, device: torch.device, options: Options) -> Refusal | None:
        """None if the fused form takes parameters of `dtype` on `device`.

        It computes in float32, so that in half precision it is another update than one of operators, which round one by
        one. It stands for that on CUDA alone, where it saves much more than on a CPU.
        """
        is_half = dtype in (torch.bfloat16, torch.float16)
        is_taken = dtype == torch.float32 or (is_half and (device.type == "cuda" or bool(options.get("fused"))))
        if device.type in ("cpu", "cuda") and is_taken:
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
        counts this step already; it and the scalars in `state` are shared by all `params`."""

    def next_scalar(self, name: str, value: torch.Tensor, step: float, options: Options) -> torch.Tensor:
        """One of `host_scalars` after a step that `step` counts already, from its `value` on the host before, in
        torch's arithmetic."""
        raise NotImplementedError(f"{type(self).__name__} keeps no {name} on the host")

    def writes_gradients(self, options: Options, foreach: bool) -> bool:
        """Whether torch's update leaves something else in gradients than it finds there.

        Args:
            foreach: whether torch updates lists of parameters at once where the options leave that to it.
        """
        return False

    def write_gradients(
        self, grads: Tensors, state: Mapping[str, Tensors], options: Options, found_inf: torch.Tensor | None
    ) -> None:
        """Leaves there what torch's does, after the update; nothing is changed where `found_inf` is 1."""
        raise NotImplementedError(f"{type(self).__name__} leaves gradients as they are")


class ComposedRule(Rule):
    """A rule without a fused form.

    Attributes:
        tensors: what `state_names` answers.
        numbers: the options that are hyperparameters.
    """

    tensors: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()

    def state_names(self, options: Options) -> tuple[str, ...]:
        return self.tensors

    def flags(self, options: Options) -> tuple[bool, ...]:
        return bool(options["maximize"]), options["weight_decay"] != 0

    def hyperparameters(self, options: Options) -> dict[str, float]:
        return {name: options[name] for name in self.numbers}

    def refuse_fused(self, dtype: torch.dtype, device: torch.device, options: Options) -> Refusal | None:
        return Refusal("the optimizer has no fused update")

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
        raise AssertionError("refuse_fused refuses all parameters")
