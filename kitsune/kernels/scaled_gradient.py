"""`kitsune::scaled_gradient`: a value once more, whose gradient is multiplied on its way back.

In float16 small gradients become zero. What goes back through a model is multiplied by a scale where it comes in, at
the outputs, and divided by it where it goes out, at parameters and inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

torch.library.define("kitsune::scaled_gradient", "(Tensor value, Tensor scale) -> Tensor")


def _value(value: Tensor, scale: Tensor) -> Tensor:
    return value.clone()


def _keep_scale(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _multiply(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    (scale,) = ctx.saved_tensors
    return gradient * scale, None


torch.library.register_fake("kitsune::scaled_gradient", _value)
torch.library.impl("kitsune::scaled_gradient", "CompositeExplicitAutograd", _value)
torch.library.register_autograd("kitsune::scaled_gradient", _multiply, setup_context=_keep_scale)

scaled_gradient = torch.ops.kitsune.scaled_gradient.default
