"""Import transformers where it is installed, and make modules of its models that take and return plain tensors."""

import importlib
import importlib.util
from types import ModuleType
from typing import Any, cast

from torch import Tensor, nn

from models import torchvision_loading

_ATTENTION = "sdpa_of_whole_sequences"


def missing() -> str | None:
    """Why transformers cannot be imported, and what to do; None if it can be."""
    if importlib.util.find_spec("transformers") is not None:
        return None
    return "transformers is not installed: install the project's extra for language models, `pip install -e '.[nlp]'`"


def import_transformers() -> ModuleType:
    """transformers, which imports torchvision where that is installed, and so needs its operators declared.

    Raises ModuleNotFoundError where transformers is not installed.
    """
    reason = missing()
    if reason is not None:
        raise ModuleNotFoundError(reason, name="transformers")
    if torchvision_loading.missing() is None:
        torchvision_loading.import_torchvision("transforms")
    return importlib.import_module("transformers")


def attention_without_masks() -> str:
    """The name of an attention implementation for sequences of one length, to be put into a model's configuration.

    It is transformers' own `sdpa`, without its search for padded and packed sequences. There are none in the synthetic
    data, the search waits for the device in every eager forward pass of a decoder, and where it cannot look (in a
    compiler, in a CUDA graph) it masks to be safe, so that variants of one model would run different kernels.
    """
    import_transformers()
    sdpa = importlib.import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward
    importlib.import_module("transformers.modeling_utils").AttentionInterface.register(_ATTENTION, sdpa)
    return _ATTENTION


class EncoderDecoderLogits(nn.Module):
    """A transformers encoder-decoder as a module from what both are given to the decoder's logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        """The logits (N, length, vocabulary) of inputs without padding and the decoder's tokens (N, length) int64."""
        inputs, tokens = x
        output: Any = self.model(inputs, decoder_input_ids=tokens, use_cache=False)
        return cast(Tensor, output.logits)


class Logits(nn.Module):
    """A transformers model as a module from one tensor, such as tokens (N, length) int64, to its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """The model's `logits` of inputs (N, length, ...) without padding."""
        output: Any = self.model(x)
        return cast(Tensor, output.logits)
