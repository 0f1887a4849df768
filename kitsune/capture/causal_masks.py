"""Whether an attention mask is the causal one, at whose values torch's transformers look where they are not told.

`nn.TransformerEncoder` and `nn.TransformerDecoder` leave such a mask to kernels that need none (`is_causal=`). A mask
that is made of sizes and numbers alone is the same in every replay, so it is looked at once. Any other is applied as it
is, which is right whatever it holds.

Private are the function of torch's that looks, and Dynamo's variables.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor, fx
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch.nn.modules import transformer

from kitsune.capture.constant_tensors import made_again

_detect: Callable[[Tensor, None, int], bool] = transformer._detect_is_causal_mask
_PARAMETERS = inspect.signature(_detect)


@contextmanager
def answered() -> Iterator[None]:
    """Within, Dynamo takes `answer` for the result of a call, where it gives one."""
    inline: Callable[..., Any] = InliningInstructionTranslator.inline_call

    def inline_call(parent: Any, function: Any, args: Sequence[Any], kwargs: Any, **options: Any) -> Any:
        known = answer(function, args, kwargs)
        return inline(parent, function, args, kwargs, **options) if known is None else known

    with mock.patch.object(InliningInstructionTranslator, "inline_call", inline_call):
        yield


def answer(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any | None:
    """What Dynamo takes for the result of a call of torch's function that looks; None for calls that it has to trace.

    Those are calls of other functions, and those that look at no values. So is that of a mask with a gradient: the
    causal one gets none in plain PyTorch.

    Args:
        function, args, kwargs: the call, in Dynamo's variables.
    """
    if getattr(function, "fn", None) is not _detect:
        return None
    mask, hint, length = (argument.realize() for argument in _PARAMETERS.bind(*args, **kwargs).args)
    if not isinstance(mask, TensorVariable) or mask.requires_grad or hint.as_python_constant() is not None:
        return None
    return ConstantVariable.create(_is_always_causal(mask.as_proxy().node, length.as_python_constant()))


def _is_always_causal(mask: fx.Node, length: int) -> bool:
    """Whether it is, and depends on nothing that could be otherwise in a replay."""
    made = made_again(mask)
    return made is not None and _detect(made, None, length)
