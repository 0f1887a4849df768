"""Calls of which an output is computed from another one, as most language models return a loss beside the logits."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import kitsune
from models import transformers_loading
from tests.kitsune.training import Training, batch, compare, sgd

Step = Callable[[Training, Tensor, Tensor], Tensor]


@pytest.fixture
def device(place: str) -> str:
    return place


class WithLoss(nn.Module):
    """Logits and their loss, which reaches them through nothing else."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.last(self.drop(self.first(x).tanh()))
        return functional.cross_entropy(self.drop(logits), y), logits


class Summed(nn.Module):
    """The loss is added up in place: from zero, and with a penalty that is an output, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 3)])

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.layers[0](x).tanh()
        logits, penalty = self.layers[1](hidden), hidden.square().mean()
        loss = x.new_zeros(())
        for factor in (1.0, 2.0):
            loss += functional.cross_entropy(logits * factor, y)
        loss += 0.1 * penalty
        loss /= 2
        return loss, logits, penalty


class Aside(nn.Module):
    """The loss also depends on what the logits are computed from, on their last layer, and on layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x).tanh()
        logits = self.last(hidden)
        again = self.last(hidden.sin()) + self.norm(self.scale(logits))
        return functional.cross_entropy(again, y) + hidden.square().mean(), logits


class Chain(nn.Module):
    """Every layer's result, their sum, and two figures of the last one of which each has nodes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        states = [x]
        for layer in self.layers:
            states.append(states[-1] + layer(states[-1]).tanh())
        logits = states[-1][:, :3].contiguous()
        return {
            "loss": functional.cross_entropy(logits, y),
            "states": states[1:],
            "probabilities": logits.softmax(1),
            "best": logits.argmax(1),
        }


class Mean(nn.Module):
    """Autograd keeps nothing for its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.layer(x).tanh()
        return logits.mean(), logits


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": partial(WithLoss, 0.5),
    "aside": Aside,
    "summed": Summed,
    "chain": Chain,
    "mean": Mean,
}


def parts(outputs: Any) -> tuple[Tensor, Tensor]:
    """The loss, and the output that it is computed from."""
    return (outputs["loss"], outputs["states"][-1]) if isinstance(outputs, dict) else outputs[:2]


def note(training: Training, **tensors: Tensor | None) -> None:
    """Makes tensors part of what is compared: as buffers."""
    for name, tensor in tensors.items():
        value = torch.full((), float("nan")) if tensor is None else tensor.detach().clone()
        training.memo.setdefault("noted", {})[name] = value


def alone(training: Training, loss: Tensor, logits: Tensor) -> None:
    loss.backward()


def and_more(training: Training, loss: Tensor, logits: Tensor) -> None:
    (loss + 0.1 * logits.square().sum()).backward()


def of_logits(training: Training, loss: Tensor, logits: Tensor) -> None:
    logits.square().sum().backward()


def one_by_one(training: Training, loss: Tensor, logits: Tensor) -> None:
    logits.sin().sum().backward(retain_graph=True)
    loss.backward()


def twice(training: Training, loss: Tensor, logits: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        logits.sum().backward()


def by_hand(training: Training, loss: Tensor, logits: Tensor) -> None:
    (grad,) = torch.autograd.grad(loss, logits, retain_graph=True)
    note(training, by_hand=grad)
    logits.backward(grad * 2)


def hooked(training: Training, loss: Tensor, logits: Tensor) -> None:
    """A hook sees the gradient, and may change it; `retain_grad` keeps what comes out."""
    seen: list[Tensor] = []
    logits.retain_grad()
    logits.register_hook(lambda grad: seen.append(grad.clone()))
    logits.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    loss.backward()
    note(training, seen=seen[0], retained=logits.grad)
    assert len(seen) == 1


def hooked_in_vain(training: Training, loss: Tensor, logits: Tensor) -> None:
    loss.register_hook(lambda grad: pytest.fail("called"))
    logits.sum().backward()


def reduced(training: Training, loss: Tensor, logits: Tensor) -> None:
    """What the user computes in place of the model's loss."""
    (logits.exp().mean() * loss.detach()).backward()


WAYS = [alone, and_more, of_logits, one_by_one, twice, by_hand, hooked, hooked_in_vain, reduced]


def step_of(way: Callable[[Training, Tensor, Tensor], None]) -> Step:
    def step(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss, logits = parts(training.model(x, y))
        way(training, loss, logits)
        training.optimizer.step()
        noted = training.memo.pop("noted", {})
        return torch.cat([loss.detach().view(1), logits.detach().flatten(), *(one.flatten() for one in noted.values())])

    return step


def same(
    device: str, model: Callable[[], nn.Module], loop: Step, dtype: torch.dtype = torch.float64, **options: Any
) -> Training:
    """Trains it as plain PyTorch does. In float64 sums in another order make next to no difference."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        built = model().to(device, dtype)
        if device == "cuda":  # where eager and replays draw other numbers
            for dropout in (each for each in built.modules() if isinstance(each, nn.Dropout)):
                dropout.p = 0.0
        return built, sgd(built, lr=0.05)

    batches = partial(batch, dtype=dtype, device=device)
    settings = {"steps": 7, "rtol": 1e-9, "atol": 1e-11, "batches": batches, **options}
    training = compare("drop_in", build, loop=loop, **settings)
    if settings.get("replays") is None:
        assert training.status().mode == "replay", training.status()
        assert {"forward", "backward"} <= set(training.status().covered)
    return training


@pytest.mark.support("Models", "an output computed from another: (loss, logits), labels in transformers", "replayed")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_backward_passes(name: str, way: Callable[[Training, Tensor, Tensor], None], device: str) -> None:
    if name == "mean" and way is twice:
        pytest.skip("autograd keeps something of the logits alone")
    same(device, MODELS[name], step_of(way))


def test_it_is_the_same_bit_by_bit(device: str) -> None:
    if device == "cuda":
        pytest.skip("kernels are chosen anew")
    same(device, partial(WithLoss, 0.5), step_of(alone), torch.float32, rtol=0.0, atol=0.0)


def test_a_loss_of_which_nothing_is_kept(device: str) -> None:
    """It can go back again and again, as without Kitsune."""

    def way(training: Training, loss: Tensor, logits: Tensor) -> None:
        first, second = (torch.autograd.grad(loss, logits)[0] for _ in range(2))
        note(training, first=first, second=second)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        training.optimizer.zero_grad()

    same(device, Mean, step_of(way))


def test_outputs_of_one_stage_have_backward_passes_apart(device: str) -> None:
    def step(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        outputs = training.model(x, y)
        outputs["probabilities"].register_hook(lambda grad: grad * 2)
        (grad,) = torch.autograd.grad(outputs["probabilities"].square().sum(), outputs["states"][-1])
        outputs["loss"].backward()
        training.optimizer.step()
        assert outputs["best"].grad_fn is None
        return torch.cat([outputs["loss"].detach().view(1), grad.flatten(), outputs["best"].float()])

    same(device, Chain, step)


def test_an_output_is_edited_before_the_backward_pass(device: str) -> None:
    """Of the layer's result the loss keeps no more than its exponentials, so eager allows that."""

    class Exponential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.layer(x)
            return logits.exp().mean(), logits

    def way(training: Training, loss: Tensor, logits: Tensor) -> None:
        logits.mul_(2)
        (loss + logits.sum()).backward()

    same(device, Exponential, step_of(way))


def test_an_output_is_edited_that_the_backward_pass_reads() -> None:
    """As in eager, it raises; not where outputs are copies of what graphs keep."""

    def way(training: Training, loss: Tensor, logits: Tensor) -> None:
        with torch.no_grad():
            logits.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        training.optimizer.zero_grad()

    same("cpu", Mean, step_of(way))


def test_calls_before_the_backward_pass_of_the_latest(device: str) -> None:
    def step(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        first, _ = training.model(x, y)
        second, logits = training.model(x + 1, y)
        (first + second + logits.sum()).backward()
        training.optimizer.step()
        return torch.stack([first, second]).detach()

    same(device, Aside, step, replays=0)


def test_several_calls_a_step(device: str) -> None:
    def step(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        losses = []
        for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):
            loss, _ = training.model(part_x, part_y)
            loss.backward()
            losses.append(loss.detach())
        training.optimizer.step()
        return torch.stack(losses)

    same(device, Aside, step)


def test_a_call_between_the_backward_passes_of_another(device: str) -> None:
    """What the earlier call has saved is still needed then."""

    def step(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss, logits = training.model(x, y)
        (grad,) = torch.autograd.grad(loss, logits)
        later, _ = training.model(x + 1, y)
        logits.backward(grad)
        later.backward()
        training.optimizer.step()
        return torch.stack([loss, later]).detach()

    same(device, Aside, step)


class Heads(nn.Module):
    """Two outputs with nothing in common."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x).tanh(), self.b(x).unsqueeze(1).sigmoid().expand(-1, 2, -1).square()


def test_a_call_between_the_backward_passes_of_two_outputs(device: str) -> None:
    """Some of what has been saved is expanded."""

    def step(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        a, b = training.model(x)
        a.square().sum().backward()
        c, d = training.model(x + 1)
        b.square().sum().backward()
        (c.sum() + d.sum()).backward()
        training.optimizer.step()
        return c.sum().detach()

    same(device, Heads, step)


class Penalized(nn.Module):
    """Logits, and a loss that also grows with one of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.last(self.first(x).tanh())
        return functional.cross_entropy(logits, y) + self.last.weight.square().sum(), logits


def test_only_sums_of_gradients_are_copied_for_the_update(device: str) -> None:
    """The last weight gets gradients from two parts, whose sum is new memory."""

    def step(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss, _ = training.model(x, y)
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    training = same(device, Penalized, step)
    update = training.optimizer._loop._update._latest  # type: ignore[attr-defined]
    names = [name for name, _ in training.model.named_parameters()]
    if update.slots:  # none on the CPU, where nothing is static
        assert {names[place] for place in update.copied} == {"last.weight"}
        assert len(update.slots) == len(names)
    else:
        assert device == "cpu"


def test_losses_and_gradients_that_are_kept_stay(device: str) -> None:
    kept: list[tuple[Tensor, Tensor]] = []

    def step(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss, logits = training.model(x, y)
        logits.retain_grad()
        loss.backward()
        kept.extend((one, one.detach().clone()) for one in (loss, logits, logits.grad))
        training.optimizer.step()
        return loss.detach()

    same(device, Aside, step)
    assert all(torch.equal(one, copy) for one, copy in kept)


def test_compared_with_plain_pytorch(device: str) -> None:
    training = same(device, Aside, step_of(alone), verify=2, replays=3)
    assert training.status().refusals == ()


def test_backward_inside_of_autocast(device: str) -> None:
    def step(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss, logits = training.model(x, y)
            (loss + logits.float().square().sum()).backward()
        training.optimizer.step()
        return loss.detach()

    same(device, WithLoss, step, rtol=1e-3, atol=1e-4)


def test_a_differentiated_backward_pass_raises_and_is_refused(device: str) -> None:
    training = Training("drop_in", *_aside(device))
    for index in range(8):
        (x, y), _ = batch(index, device=device)
        training.optimizer.zero_grad()
        loss, logits = training.model(x, y)
        if index == 5:
            with pytest.raises(kitsune.KitsuneError, match="computed from another one"):
                torch.autograd.grad(loss, logits, create_graph=True)
        loss.backward()
        training.optimizer.step()
    assert training.status().mode == "eager"
    assert "create_graph" in training.status().reason


def _aside(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Aside().to(device)
    return model, sgd(model)


def test_graphs_are_given_back() -> None:
    """For the least recent signatures, in the midst of a backward pass too."""

    def step(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        size = 2 + training.memo.setdefault("count", 0) % 3
        training.memo["count"] += 1
        loss, logits = training.model(x[:size], y[:size])
        (loss + logits.sum()).backward()
        training.optimizer.step()
        return loss.detach()

    training = same("cpu", WithLoss, step, steps=16, max_graphs=2, replays=2)
    assert training.status().graphs <= 2


class Gpt(nn.Module):
    """As nanoGPT's: tied weights, and targets that may be absent."""

    def __init__(self, dropout: float = 0.0, size: int = 16, width: int = 8) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(size, width), nn.Embedding(size, width)
        layer = nn.TransformerEncoderLayer(width, 2, 16, dropout, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.ModuleList([layer])
        self.head = nn.Linear(width, size, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        if targets is None:
            return self.head(x[:, [-1]]), None
        logits = self.head(x)
        return logits, functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def tokens(index: int, *, device: str = "cpu", length: int = 6) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(index)
    drawn = torch.randint(16, (3, length + 1), generator=generator).to(device)
    return (drawn[:, :-1].clone(), drawn[:, 1:].clone()), {}


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_model_like_nanogpt(dropout: float, device: str) -> None:
    if dropout and device == "cuda":
        pytest.skip("eager and replays draw other numbers there")

    def step(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad(set_to_none=True)
        _, loss = training.model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        training.optimizer.step()
        return loss.detach()

    same(device, partial(Gpt, dropout), step, batches=partial(tokens, device=device))


def gpt2(**options: Any) -> nn.Module:
    transformers = transformers_loading.import_transformers()
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, **options
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def bert() -> nn.Module:
    transformers = transformers_loading.import_transformers()
    config = transformers.BertConfig(
        vocab_size=16,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        output_hidden_states=True,
    )
    model: nn.Module = transformers.BertForMaskedLM(config)
    return model


TRANSFORMERS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "gpt2 without cache": partial(gpt2, use_cache=False),
    "bert": bert,
}


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_models_of_transformers_with_labels(name: str, device: str) -> None:
    """Each with dropout, as they come. GPT-2 also returns the keys and values of its layers, BERT their results."""

    def step(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        outputs = training.model(input_ids=x, labels=y)
        outputs.logits.retain_grad()
        (outputs.loss + 1e-3 * outputs["logits"].square().mean()).backward()
        training.optimizer.step()
        return torch.cat([outputs.loss.detach().view(1), outputs.logits.grad.flatten()])

    same(device, TRANSFORMERS[name], step, batches=partial(tokens, device=device))
