"""Masks of torch's transformers, which look whether they are given the causal one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.kitsune.capture.test_frontend import guarded
from tests.kitsune.training import FORMS, Batch, Training, adam, compare, sgd

LENGTH = 5
STEPS = 8

causal = nn.Transformer.generate_square_subsequent_mask


def by_comparison(model: nn.Module, x: Tensor) -> Tensor:
    """As in tutorials."""
    mask = (torch.triu(torch.ones(x.shape[1], x.shape[1], device=x.device)) == 1).transpose(0, 1)
    return mask.float().masked_fill(mask == 0, float("-inf")).masked_fill(mask == 1, 0.0)


def boolean(model: nn.Module, x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)


def set_afterwards(model: nn.Module, x: Tensor) -> Tensor:
    mask = torch.zeros(x.shape[1], x.shape[1], device=x.device)
    mask[0, 1] = float("-inf")
    return mask


MADE: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "made": lambda model, x: causal(x.shape[1]).to(x.device),
    "made by comparison": by_comparison,
    "boolean": boolean,
    "written to": lambda model, x: torch.full((x.shape[1], x.shape[1]), float("-inf"), device=x.device).triu_(1),
    "set afterwards": set_afterwards,
    "random": lambda model, x: (torch.rand(x.shape[1], x.shape[1], device=x.device) < 0.5).float(),
    "of two tensors": lambda model, x: model.kept + x[0, 0, 0],
    "everything is seen": lambda model, x: torch.zeros(x.shape[1], x.shape[1], device=x.device),
    "kept": lambda model, x: model.kept,
    "a part of what is kept": lambda model, x: model.large[: x.shape[1], : x.shape[1]],
}


class Masked(nn.Module):
    """Two transformer layers, with the mask that `mask` makes of the model and the input, or that is given."""

    def __init__(self, mask: Callable[[nn.Module, Tensor], Tensor] | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(4, 3)
        self.mask = mask
        self.kept = causal(LENGTH)
        self.register_buffer("large", causal(2 * LENGTH))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.mask is not None:
            mask = self.mask(self, x)
        output: Tensor = self.last(self.encoder(x, mask)).mean(1)
        return output


def masked(
    mask: Callable[[nn.Module, Tensor], Tensor] | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Masked(mask, dropout=0.2)
    return model, adam(model)


def sequences(index: int, *masks: Tensor, device: str = "cpu") -> Batch:
    generator = torch.Generator().manual_seed(index)
    x, y = torch.randn(3, LENGTH, 4, generator=generator), torch.randint(3, (3,), generator=generator)
    return tuple(tensor.to(device) for tensor in (x, *masks, y)), {}


@pytest.mark.support("Models", "torch's transformers with masks, told which is causal or not", "replayed")
@pytest.mark.parametrize("kind", MADE)
def test_masks_that_the_model_has(kind: str) -> None:
    compare("drop_in", partial(masked, MADE[kind]), steps=STEPS, batches=sequences)


@pytest.mark.parametrize("form", FORMS)
def test_masks_that_are_given(form: str) -> None:
    """Anew at each step, as tutorials make them, and not always the same."""
    masks = [causal(LENGTH)] * 4 + [torch.zeros(LENGTH, LENGTH)] * 2 + [causal(LENGTH).roll(1, 0)] * 2
    compare(form, masked, steps=STEPS, batches=lambda index: sequences(index, masks[index].clone()))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["made", "given", "a part of what is kept"])
@pytest.mark.parametrize("form", FORMS)
def test_masks_on_a_gpu(form: str, kind: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Masked(MADE.get(kind)).to("cuda")  # with dropout, eager and replays would draw other numbers there
        return model, sgd(model)

    masks = [causal(LENGTH)] if kind == "given" else []
    compare(
        form, build, steps=STEPS, batches=lambda index: sequences(index, *masks, device="cuda"), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("write", [Tensor.copy_, lambda mask, other: mask.data.copy_(other)], ids=["mask", "data"])
@pytest.mark.parametrize("kind", ["kept", "a part of what is kept"])
def test_a_mask_that_is_kept_is_written_to(kind: str, write: Callable[[Tensor, Tensor], Tensor]) -> None:
    def edit(training: Training, index: int) -> None:
        if index == 5:
            for mask in (training.model.kept, training.model.large):
                assert isinstance(mask, Tensor)
                write(mask, torch.zeros_like(mask))

    compare("drop_in", partial(masked, MADE[kind]), steps=STEPS, batches=sequences, edit=edit)


def test_a_mask_that_is_kept_is_replaced() -> None:
    def edit(training: Training, index: int) -> None:
        if index == 5:
            training.model.kept = torch.zeros(LENGTH, LENGTH)

    compare("drop_in", partial(masked, MADE["kept"]), steps=STEPS, batches=sequences, edit=edit)


@pytest.mark.parametrize("kind", ["made", "made by comparison", "kept", "random", "set afterwards"])
def test_only_a_mask_that_is_always_causal_is_left_to_the_kernel(kind: str) -> None:
    x = torch.randn(3, LENGTH, 4)
    model, _ = masked(MADE[kind])
    call, runner = guarded(lambda x: model(x))
    call(x)
    nodes = runner.graphs[0].graph.find_nodes(op="call_function", target=functional.multi_head_attention_forward)
    assert [node.kwargs["is_causal"] for node in nodes] == [kind.startswith("made")] * 2


def test_a_mask_with_a_gradient_is_refused() -> None:
    """Of the causal one plain PyTorch gives none."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Masked(lambda model, x: model.bias)
        model.bias = nn.Parameter(torch.zeros(LENGTH, LENGTH))
        return model, adam(model)

    training = compare("drop_in", build, steps=4, batches=sequences, replays=0)
    assert training.status().replays == 0
    assert "values of a tensor" in str(training.status().refusals)


class Translator(nn.Module):
    """With all masks that `nn.Transformer` takes, but that of its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 4)
        self.transformer = nn.Transformer(4, 2, 1, 1, 8, dropout=0.1, batch_first=True)
        self.last = nn.Linear(4, 9)

    def forward(self, source: Tensor, target: Tensor, *masks: Tensor) -> Tensor:
        x, y = self.tokens(source), self.tokens(target)
        hidden = self.transformer(x, y, masks[0], masks[1], None, masks[2], masks[3], masks[2])
        output: Tensor = self.last(hidden).transpose(1, 2)
        return output


def translations(index: int) -> Batch:
    generator = torch.Generator().manual_seed(index)
    source, target = (torch.randint(1, 9, (3, length), generator=generator) for length in (LENGTH, LENGTH + 1))
    source[0, 3:], target[1, 4:] = 0, 0
    given = target[:, :-1]
    masks = torch.zeros(LENGTH, LENGTH, dtype=torch.bool), causal(LENGTH) != 0, source == 0, given == 0
    return (source, given, *masks, target[:, 1:]), {}


@pytest.mark.parametrize("form", FORMS)
def test_translation(form: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Translator()
        return model, adam(model)

    loss_fn: Any = partial(functional.cross_entropy, ignore_index=0)
    compare(form, build, steps=STEPS, batches=translations, loss_fn=loss_fn)
