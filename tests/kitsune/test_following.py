"""What a loop does between a replayed call and `backward()`, with `defer_loss`: nothing of the replay shows."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import CodeType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import convert_frame
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import kitsune
from kitsune.capture.following import FollowedTensor, PendingTensor
from kitsune.loop.tail_step import TailStep
from tests.kitsune import static_memory
from tests.kitsune.followed_loops import REPLAYED, STEPS, Body, Loop, alike, plain, stepped
from tests.kitsune.training import Net, Training, adam, compare

PLACES = [
    pytest.param("in order", marks=pytest.mark.slow),
    "static memory",
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=PLACES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "static memory":
        static_memory.install(monkeypatch)
    return torch.device("cuda" if request.param == "cuda" else "cpu")


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many backward passes were replayed from a loss on."""
    counts: list[int] = []
    original = TailStep.replay

    def counted(self: TailStep, *args: Any, **more: Any) -> Any:
        results = original(self, *args, **more)
        if results is not None:
            counts.append(1)
        return results

    monkeypatch.setattr(TailStep, "replay", counted)
    return lambda: len(counts)


def test_forward_loss_and_backward_are_replayed(device: torch.device, replays: Callable[[], int]) -> None:
    loop = alike(plain, device)
    assert replays() == REPLAYED
    assert loop.optimizer.status().covered == ("forward", "loss", "backward", "update")


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda loss: loss.item(),
    "float": lambda loss: float(loss.detach()),
    "text": lambda loss: f"{loss:.2f}",
    "detached": lambda loss: loss.detach().clone(),
    "array": lambda loss: loss.detach().cpu().numpy().copy().tolist(),
    "compared": lambda loss: bool(loss < 1.0),
    "on the CPU": lambda loss: loss.cpu().detach(),
    "a copy": lambda loss: copy.deepcopy(loss.detach()),
    "pickled": lambda loss: pickle.loads(pickle.dumps(loss.detach())),
    "arithmetic": lambda loss: (loss * 2 + 1).item(),
    "metadata": lambda loss: (loss.shape, loss.dtype, loss.device.type, loss.requires_grad, loss.dim(), loss.numel()),
    "leaf": lambda loss: (loss.is_leaf, loss.grad_fn is None),
}


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", READS)
def test_a_loss_is_read(name: str, when: str, device: torch.device, replays: Callable[[], int]) -> None:
    read = READS[name]

    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        loss = functional.cross_entropy(loop.model(x), y)
        early = read(loss) if when == "before" else None
        stepped(loop, loss)
        return early if when == "before" else read(loss)

    alike(body, device)
    assert replays() >= REPLAYED - (when == "before") or (name, when) == ("leaf", "before")


@pytest.mark.parametrize("read", [lambda out: out.argmax(1), lambda out: out.detach().clone(), lambda out: out.cpu()])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_output_is_read(read: Callable[[Tensor], Tensor], when: str, device: torch.device) -> None:
    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        out = loop.model(x)
        early = read(out) if when == "before" else None
        stepped(loop, functional.cross_entropy(out, y))
        return early if when == "before" else read(out)

    alike(body, device)


def test_losses_and_outputs_are_kept(device: torch.device, replays: Callable[[], int]) -> None:
    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        out = loop.model(x)
        loss = stepped(loop, functional.cross_entropy(out, y))
        loop.memo.setdefault("losses", []).append(loss)
        loop.memo.setdefault("outputs", []).append(out)
        return [*loop.memo["losses"], *loop.memo["outputs"]]

    alike(body, device)
    assert replays() == REPLAYED


def test_intermediate_results_are_kept(device: torch.device, replays: Callable[[], int]) -> None:
    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        logs = functional.log_softmax(loop.model(x), 1)
        flat = logs.view(-1)
        loss = functional.nll_loss(logs, y) / 2
        stepped(loop, loss)
        loop.memo.setdefault("kept", []).append((logs, flat, loss))
        return list(loop.memo["kept"])

    alike(body, device)
    assert replays() == REPLAYED


def test_results_are_edited_after_the_backward_pass(device: torch.device, replays: Callable[[], int]) -> None:
    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        out = loop.model(x)
        loss = stepped(loop, functional.cross_entropy(out, y))
        before = out.detach()
        out.view(-1)[:2].zero_()
        loss.mul_(2)
        with torch.no_grad():
            out[1] = 5
        return out, loss, before, loss.item()

    alike(body, device)
    assert replays() == REPLAYED


def test_what_a_result_was_saved_as_is_not_edited_by_looking_at_it(
    device: torch.device, replays: Callable[[], int]
) -> None:
    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        out = loop.model(x)
        stepped(loop, functional.cross_entropy(out, y))
        weight = torch.ones(3, device=device, requires_grad=True)
        product = (weight * out.detach()).sum()
        total = out.sum()
        product.backward()
        return total, weight.grad

    alike(body, device)
    assert replays() == REPLAYED


@pytest.mark.parametrize("when", ["before", "after"])
def test_results_get_other_shapes(when: str, device: torch.device) -> None:
    """In place, so that nobody else is told."""

    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        out = loop.model(x)
        loss = functional.cross_entropy(out, y)
        if when == "before" and loop.index > 4:
            out.unsqueeze_(0)
        stepped(loop, loss)
        if when == "after":
            out.t_()
            loss.unsqueeze_(0)
        return list(out.shape), out.stride(), len(out), list(loss.shape), out, loss

    alike(body, device)


def test_losses_are_detached_after_the_backward_pass(device: torch.device) -> None:
    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        loss = stepped(loop, functional.cross_entropy(loop.model(x), y))
        if loop.index > 3:
            loss.detach_()
            return loss.requires_grad, loss.is_leaf, loss.cpu().numpy().item(), loss + 1
        return loss

    alike(body, device)


def test_losses_are_added_up(device: torch.device, replays: Callable[[], int]) -> None:
    """With their graphs, as careless loops do; nothing can be differentiated a second time."""

    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        loss = stepped(loop, functional.cross_entropy(loop.model(x), y))
        loop.memo["total"] = loop.memo.get("total", 0) + loss
        with pytest.raises(RuntimeError, match="second time"):
            loop.memo["total"].backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        return loop.memo["total"]

    alike(body, device)
    assert replays() == REPLAYED


def test_kept_losses_keep_no_graph(device: torch.device) -> None:
    torch.manual_seed(3)
    model = Net().to(device)
    loop = Loop(model, kitsune.KitsuneOptimizer(adam(model), mode="replay", defer_loss=True), device)
    outputs, losses = [], []
    for loop.index in range(STEPS):
        x, y = loop.batch()
        out = model(x)
        outputs.append(weakref.ref(out))
        losses.append(stepped(loop, functional.cross_entropy(out, y)))
        del out
    gc.collect()
    assert isinstance(losses[-1], PendingTensor)
    assert outputs[-1]() is None
    assert not losses[-1].follower._outputs  # type: ignore[attr-defined]


def two_losses(loop: Loop, x: Tensor, y: Tensor) -> Any:
    out = loop.model(x)
    loss = functional.cross_entropy(out, y) + 0.1 * out.square().mean()
    return stepped(loop, loss).item()


def sliced(loop: Loop, x: Tensor, y: Tensor) -> Any:
    """As language models do."""
    shifted = loop.model(x)[..., :-1, :].contiguous()
    return stepped(loop, functional.cross_entropy(shifted.view(-1, 3), y[1:].view(-1))).item()


def smoothed(loop: Loop, x: Tensor, y: Tensor) -> Any:
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5], device=x.device), label_smoothing=0.1)
    return stepped(loop, criterion(loop.model(x), y)).item()


def stacked(loop: Loop, x: Tensor, y: Tensor) -> Any:
    out = loop.model(x)
    losses = [functional.cross_entropy(out, y), functional.mse_loss(out, torch.ones_like(out))]
    return stepped(loop, torch.stack(losses).sum()).item()


def added(loop: Loop, x: Tensor, y: Tensor) -> Any:
    out = loop.model(x)
    return stepped(loop, sum([functional.cross_entropy(out, y), out.abs().mean()])).item()


def accumulated(loop: Loop, x: Tensor, y: Tensor) -> Any:
    losses = []
    for part in range(3):
        loss = functional.cross_entropy(loop.model(x[2 * part : 2 * part + 2]), y[2 * part : 2 * part + 2]) / 3
        loss.backward()
        losses.append(loss.item())
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return losses


def zeroed(loop: Loop, x: Tensor, y: Tensor) -> Any:
    """Gradients that stay, as zeros."""
    loop.optimizer.zero_grad(set_to_none=False)
    loss = functional.cross_entropy(loop.model(x), y)
    loss.backward()
    loop.optimizer.step()
    return loss.item()


def clipped(loop: Loop, x: Tensor, y: Tensor) -> Any:
    loss = functional.cross_entropy(loop.model(x), y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return loss.item(), norm


def in_autocast(loop: Loop, x: Tensor, y: Tensor) -> Any:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        loss = functional.cross_entropy(loop.model(x), y)
    return stepped(loop, loss).item()


def partly_in_autocast(loop: Loop, x: Tensor, y: Tensor) -> Any:
    """A matrix product that autocast would round comes after it."""
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        out = loop.model(x)
    scores = out.float() @ torch.eye(3, device=x.device)
    return stepped(loop, functional.cross_entropy(scores, y)).item()


COMMON: dict[str, tuple[Body, int]] = {
    "two losses": (two_losses, REPLAYED),
    "slices": (sliced, REPLAYED),
    "weights and smoothing": (smoothed, REPLAYED),
    "stacked": (stacked, REPLAYED),
    "sum": (added, REPLAYED),
    "accumulation": (accumulated, 3 * STEPS - 4),
    "gradients of zero": (zeroed, REPLAYED),
    "clipping": (clipped, REPLAYED),
    "autocast": (in_autocast, REPLAYED),
    "autocast in part": (partly_in_autocast, REPLAYED),
}


@pytest.mark.parametrize("name", COMMON)
def test_a_common_loop(name: str, device: torch.device, replays: Callable[[], int]) -> None:
    body, count = COMMON[name]
    alike(body, device)
    assert replays() == count


def test_scaled_losses(device: torch.device, replays: Callable[[], int]) -> None:
    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        scaler = loop.memo.setdefault("scaler", torch.amp.GradScaler(x.device.type, init_scale=8.0, growth_interval=2))
        loss = functional.cross_entropy(loop.model(x), y)
        if loop.index == 5:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()
        return loss.item(), scaler.get_scale()

    alike(body, device)
    assert replays() >= REPLAYED - 2


class WithLoss(Net):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        return {"loss": functional.cross_entropy(logits, y), "logits": logits.detach()}


def test_the_model_returns_the_loss(device: torch.device, replays: Callable[[], int]) -> None:
    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        answer = loop.model(x, y)
        stepped(loop, answer["loss"])
        return answer["loss"], answer["logits"]

    alike(body, device, WithLoss)
    assert replays() == REPLAYED


class TwoHeads(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = torch.relu(self.first(x))
        return self.last(hidden), self.other(hidden)


@pytest.mark.parametrize("both", [True, False])
def test_several_outputs(both: bool, device: torch.device, replays: Callable[[], int]) -> None:
    """Parameters that nothing uses have no gradient."""

    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        first, second = loop.model(x)
        loss = functional.cross_entropy(first, y)
        return stepped(loop, loss + second.square().mean() if both else loss).item()

    alike(body, device, TwoHeads)
    assert replays() == REPLAYED


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x * 2.0


@torch.compile(backend="eager")
def compiled(out: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(out * 2, y)


def of_output(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda out, y: functional.cross_entropy(function(out), y)


def of_loss(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda out, y: function(functional.cross_entropy(out, y))


doubled = torch.compile(lambda out, y: 2 * functional.cross_entropy(out, y), backend="aot_eager")

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a function of autograd's, of the output": of_output(Doubled.apply),
    "a function of autograd's, of the loss": of_loss(Doubled.apply),
    "a script function of the output": of_output(scripted),
    "a script function of the loss": of_loss(scripted),
    "a compiled function": compiled,
    "a compiled function with its backward pass": lambda out, y: doubled(out, y),
    "a checkpoint": of_output(lambda out: checkpoint(torch.tanh, out, use_reentrant=False)),
    "a reentrant checkpoint": of_output(lambda out: checkpoint(torch.tanh, out, use_reentrant=True)),
    "random numbers": of_output(lambda out: functional.dropout(out, 0.5)),
    "vmap": of_output(torch.vmap(torch.tanh)),
    "written in place": of_output(lambda out: out.mul_(2)),
    "relu in place": of_output(lambda out: functional.relu(out, inplace=True)),
    "a loss written in place": of_loss(lambda loss: loss.mul_(2)),
    "out=": of_output(lambda out: torch.mul(out.detach(), 2, out=torch.empty_like(out.detach())) + out),
    "an outer gradient": lambda out, y: functional.cross_entropy(out * torch.ones(3, requires_grad=True).to(out), y),
    "an item": of_output(lambda out: out[:, torch.tensor([2, 1, 0])]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_made_otherwise(name: str, device: torch.device) -> None:
    loss_of = LOSSES[name]

    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        return stepped(loop, loss_of(loop.model(x), y)).detach()

    alike(body, device)


def test_nothing_of_what_follows_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where compiled functions leave something to Python, Dynamo looks at all that this calls."""
    compiled_code: list[CodeType] = []
    compile_code = convert_frame._compile

    def watched(code: CodeType, *args: Any, **kwargs: Any) -> Any:
        compiled_code.append(code)
        return compile_code(code, *args, **kwargs)

    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        out.tolist()
        return functional.cross_entropy(out * 2, y)

    compiled_loss_of = torch.compile(loss_of, backend="eager")

    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        return stepped(loop, compiled_loss_of(loop.model(x), y)).detach()

    monkeypatch.setattr(convert_frame, "_compile", watched)
    alike(body, torch.device("cpu"))
    files = [code.co_filename for code in compiled_code]
    assert __file__ in files
    assert not [name for name in files if name.endswith("following.py") and name != __file__], files


class Listening(TorchFunctionMode):
    """Remembers which functions it was told of."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.told.append(function)
        return function(*args, **(kwargs or {}))


def told_to_a_mode(loop: Loop, loss: Tensor) -> None:
    with Listening() as mode:
        loss.backward()
    loop.seen.append(mode.told == [Tensor.backward])


def inside_of_autocast(loop: Loop, loss: Tensor) -> None:
    with torch.autocast(loss.device.type, dtype=torch.bfloat16):
        loss.backward()
    loop.seen.extend(param.grad.clone() for param in loop.model.parameters())


BACKWARDS: dict[str, Callable[[Loop, Tensor], None]] = {
    "torch.autograd.backward": lambda loop, loss: torch.autograd.backward(loss),
    "as a function": lambda loop, loss: Tensor.backward(loss),
    "told to a mode": told_to_a_mode,
    "inside of autocast": inside_of_autocast,
    "of a list": lambda loop, loss: torch.autograd.backward([loss, loss * 2]),
    "a gradient": lambda loop, loss: loss.backward(torch.full_like(loss, 3.0)),
    "retained": lambda loop, loss: (loss.backward(retain_graph=True), loss.backward()),
    "for some": lambda loop, loss: loss.backward(inputs=list(loop.model.parameters())[:2]),
    "torch.autograd.grad": lambda loop, loss: loop.seen.extend(
        torch.autograd.grad(loss, list(loop.model.parameters()), retain_graph=True)
    ),
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_a_backward_pass_otherwise(name: str, device: torch.device) -> None:
    """At each other step, so that the usual one is known."""

    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        loop.optimizer.zero_grad()
        loss = functional.cross_entropy(loop.model(x), y)
        if loop.index % 2 and loop.index > 2:
            BACKWARDS[name](loop, loss)
        else:
            loss.backward()
        loop.optimizer.step()
        return loss.item()

    alike(body, device)


def test_a_backward_pass_from_an_output_though_there_is_a_loss(device: torch.device) -> None:
    """Which is but looked at, afterwards."""

    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        loop.optimizer.zero_grad()
        out = loop.model(x)
        loss = functional.cross_entropy(out, y)
        if loop.index % 3 == 2:
            out.backward((out.detach().softmax(1) - functional.one_hot(y, 3)) / len(y))
        else:
            loss.backward()
        loop.optimizer.step()
        return loss.item()

    alike(body, device)


def test_a_backward_pass_is_moved_into_autocast(device: torch.device, replays: Callable[[], int]) -> None:
    """After others have been replayed outside of it."""

    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        loop.optimizer.zero_grad()
        loss = functional.cross_entropy(loop.model(x), y)
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=loop.index == STEPS - 1):
            loss.backward()  # type: ignore[no-untyped-call]
        loop.optimizer.step()
        return loss.item()

    alike(body, device)
    assert replays() == REPLAYED - 1


def test_hooks_of_results(device: torch.device) -> None:
    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        found: list[Tensor] = []
        out = loop.model(x)
        loss = functional.cross_entropy(out, y)
        if loop.index in (4, 6):
            out.register_hook(lambda grad: found.append(grad.clone()))
        if loop.index == 5:
            loss.register_hook(lambda grad: grad * 2)
        if loop.index == 6:
            out.retain_grad()
        stepped(loop, loss)
        return [*found, out.grad if loop.index == 6 else None]

    alike(body, device)


def test_hooks_of_parameters(device: torch.device) -> None:
    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        found: list[Tensor] = []
        if loop.index == 4:
            weight = loop.model.first.weight
            loop.memo["handle"] = weight.register_post_accumulate_grad_hook(
                lambda param: found.append(param.grad.clone())
            )
        loss = functional.cross_entropy(loop.model(x), y)
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        if loop.index == 5:
            loop.memo["handle"].remove()
        return found

    alike(body, device)


def test_labels_written_between_loss_and_backward(device: torch.device, replays: Callable[[], int]) -> None:
    """The loss is of what they were."""

    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        target = functional.one_hot(y, 3).float()
        loss = functional.l1_loss(loop.model(x), target) + 0.0 * target.sum()
        early = loss.item() if loop.index == 5 else None
        target.data.zero_()
        return early, stepped(loop, loss).item()

    alike(body, device)
    assert replays() == REPLAYED


def test_outputs_written_between_model_and_loss(device: torch.device) -> None:
    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        out = loop.model(x)
        if loop.index == 4:
            out.detach().mul_(2)
        if loop.index == 5:
            out.data.mul_(2)
        if loop.index == 6:
            with torch.no_grad():
                out[0] = 0
        return stepped(loop, functional.cross_entropy(out, y)).item()

    alike(body, device)


def test_outputs_written_between_loss_and_backward(device: torch.device) -> None:
    """Autograd may refuse that; what it saved may be something else."""

    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        out = loop.model(x)
        loss = out.square().sum()
        if loop.index in (4, 6):
            out.detach().mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            return None
        return stepped(loop, loss).item()

    alike(body, device)


@pytest.mark.parametrize(
    "write", [partial(functional.relu, inplace=True), partial(functional.dropout, p=0.0, inplace=True)]
)
def test_outputs_written_by_a_term_that_comes_later(write: Callable[[Tensor], Tensor], device: torch.device) -> None:
    """The loss does not need the output for its backward pass."""

    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        out = loop.model(x)
        loss = functional.cross_entropy(out, y)
        if loop.index > 3:
            loss = loss + 0.1 * write(out).mean()
        return stepped(loop, loss).item()

    alike(body, device)


def test_parameters_written_between_model_and_backward(device: torch.device) -> None:
    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        loss = functional.cross_entropy(loop.model(x), y)
        if loop.index == 5:
            with torch.no_grad():
                loop.model.last.weight.mul_(2)
            with pytest.raises(RuntimeError, match="inplace"):
                loss.backward()
            return None
        return stepped(loop, loss).item()

    alike(body, device)


def test_a_loss_that_changes(device: torch.device, replays: Callable[[], int]) -> None:
    losses = [functional.cross_entropy, lambda out, y: functional.mse_loss(out, functional.one_hot(y, 3).float())]

    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        return stepped(loop, losses[loop.index // 2 % 2](loop.model(x), y)).item()

    alike(body, device, steps=12)
    assert replays() >= 7


def test_a_factor_that_always_changes(device: torch.device) -> None:
    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        return stepped(loop, functional.cross_entropy(loop.model(x), y) * (1 + loop.index / 10)).item()

    alike(body, device, steps=12)


def test_outputs_without_a_backward_pass(device: torch.device, replays: Callable[[], int]) -> None:
    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        if loop.index in (4, 5):
            return functional.cross_entropy(loop.model(x), y).item()
        with torch.no_grad():
            early = functional.cross_entropy(loop.model(x), y)
        return early, stepped(loop, functional.cross_entropy(loop.model(x), y)).item()

    alike(body, device)
    assert replays() == REPLAYED - 1


def test_a_model_called_twice_before_backward(device: torch.device) -> None:
    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        first, second = loop.model(x), loop.model(x + 1)
        return stepped(loop, functional.cross_entropy(first, y) + functional.cross_entropy(second, y)).item()

    alike(body, device)


def test_an_input_that_needs_a_gradient(device: torch.device) -> None:
    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        x.requires_grad_()
        stepped(loop, functional.cross_entropy(loop.model(x), y))
        return x.grad

    alike(body, device)


def test_a_model_with_buffers(device: torch.device, replays: Callable[[], int]) -> None:
    """They are written at the call."""

    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        out = loop.model(x)
        seen = loop.model.norm.running_mean.clone()
        stepped(loop, functional.cross_entropy(out, y))
        return seen

    def build() -> nn.Module:
        model = Net(batch_norm=True)
        model.first.bias.requires_grad_(False)  # noise is all that its gradient would be
        return model

    alike(body, device, build)
    assert replays() == REPLAYED


def test_dropout_in_the_model(device: torch.device, replays: Callable[[], int]) -> None:
    """Random numbers between call and backward pass are those of an eager loop."""

    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        out = loop.model(x)
        noise = torch.rand(3)
        return stepped(loop, functional.cross_entropy(out, y)).item(), noise

    if device.type == "cuda":
        pytest.skip("a dropout's random numbers are compared on the CPU")
    alike(body, device, lambda: Net(dropout=0.5))
    assert replays() == REPLAYED


def test_frozen_and_thawed(device: torch.device) -> None:
    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        if loop.index in (4, 6):
            loop.model.first.requires_grad_(loop.index == 6)
        return stepped(loop, functional.cross_entropy(loop.model(x), y)).item()

    alike(body, device, steps=12)


def test_saved_and_printed(device: torch.device) -> None:
    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        out = loop.model(x)
        stepped(loop, loss := functional.cross_entropy(out, y))
        file = io.BytesIO()
        torch.save({"loss": loss.detach(), "out": out.detach()}, file)
        file.seek(0)
        kinds = [type(value) for value in torch.load(file).values()]
        return kinds, repr(loss)[:7], repr(out)[:7], isinstance(loss, Tensor)

    alike(body, device)


def test_an_interrupt_in_the_loss(device: torch.device) -> None:
    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        loss = functional.cross_entropy(loop.model(x), y)
        if loop.index == 4:
            with pytest.raises(ZeroDivisionError):
                _ = loss / 2 + 1 / 0
            return None
        return stepped(loop, loss).item()

    alike(body, device)


def test_a_batch_whose_loss_raises_is_left_out(device: torch.device, replays: Callable[[], int]) -> None:
    """Later batches are none the worse for it, though the loop still has the loss."""
    if device.type == "cuda":
        pytest.skip("a label out of range ends the process's use of the device")

    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        try:
            loop.memo["loss"] = functional.cross_entropy(loop.model(x), y + 3 * (loop.index == 4))
            return stepped(loop, loop.memo["loss"]).item()
        except IndexError as error:
            return str(error)

    alike(body, device)
    assert replays() >= REPLAYED - 2  # the next call may find the memory in use, by outputs that are still there


def test_a_loss_that_raises_does_so_when_it_is_asked_for(device: torch.device) -> None:
    """And in no call of the model for another batch, whose labels are where its own were."""
    if device.type == "cuda":
        pytest.skip("a label out of range ends the process's use of the device")

    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        if loop.index == 4:
            with suppress(IndexError):
                loop.memo["loss"] = functional.cross_entropy(loop.model(x), y + 3)
            return None
        value = stepped(loop, functional.cross_entropy(loop.model(x), y)).item()
        if loop.index > 4 and "loss" in loop.memo:
            with pytest.raises(IndexError, match="out of bounds"):
                loop.memo["loss"].item()
            with pytest.raises(IndexError, match="out of bounds"):
                loop.memo["loss"].backward()
        return value

    assert "loss" in alike(body, device).memo


def test_a_loss_that_writes_to_outer_tensors(device: torch.device) -> None:
    """Batch norm without parameters does, and torch's version counters do not tell.

    A bias before it would have a gradient of rounding errors alone, which Adam scales up.
    """

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3, bias=False))

    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        norm = loop.memo.setdefault("norm", nn.BatchNorm1d(3, affine=False).to(x.device))
        loss = functional.cross_entropy(norm(loop.model(x)), y)
        return stepped(loop, loss).item(), norm.running_mean.clone()

    alike(body, device, build)


def test_sizes_that_depend_on_values(device: torch.device) -> None:
    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        chosen = loop.model(x)[y > 0]
        count = len(chosen)
        return count, stepped(loop, chosen.square().sum()).item()

    alike(body, device)


def test_functions_of_other_libraries(device: torch.device) -> None:
    """They may do more than to compute."""
    calls: list[int] = []

    def tripled(x: Tensor) -> Tensor:
        if torch.overrides.has_torch_function_unary(x):
            result: Tensor = torch.overrides.handle_torch_function(tripled, (x,), x)
            return result
        calls.append(1)
        return x * 3

    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        calls.clear()
        loss = stepped(loop, functional.cross_entropy(tripled(loop.model(x)), y))
        return loss.item(), len(calls)

    alike(body, device)


def several_at_once(loop: Loop, x: Tensor, y: Tensor) -> Any:
    """Losses that wait for their backward passes at the same time, of labels of their own."""
    losses = [functional.cross_entropy(loop.model(x + part), (y + part) % 3) for part in range(3)]
    for loss in losses:
        loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return [loss.item() for loss in losses]


def now_and_then_summed(loop: Loop, x: Tensor, y: Tensor) -> Any:
    parts = range(3 if loop.index in (5, 7) else 1)
    return stepped(loop, sum(functional.cross_entropy(loop.model(x + part), (y + part) % 3) for part in parts)).item()


def kept_and_read_late(loop: Loop, x: Tensor, y: Tensor) -> Any:
    out = loop.model(x)
    loss = functional.cross_entropy(out, y)
    stepped(loop, loss if loop.index < 5 else out.square().sum())
    loop.memo.setdefault("losses", []).append(loss)
    return [float(one.detach()) for one in loop.memo["losses"]] if loop.index == STEPS - 1 else None


class Doubling(Tensor):
    """Its mean squared errors are twice those of others."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result.as_subclass(Tensor) * 2 if function is functional.mse_loss else result


def of_another_subclass(loop: Loop, x: Tensor, y: Tensor) -> Any:
    target = functional.one_hot(y, 3).float().as_subclass(Doubling)
    return stepped(loop, functional.mse_loss(loop.model(x), target)).item()


def views_of_gradients(loop: Loop, x: Tensor, y: Tensor) -> Any:
    """They show what is added later."""
    functional.cross_entropy(loop.model(x), y).backward()
    views = [param.grad.view(-1) for param in loop.model.parameters()]
    functional.cross_entropy(loop.model(-x), y).backward()
    seen = [view.clone() for view in views]
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return seen


def frozen_between(loop: Loop, x: Tensor, y: Tensor) -> Any:
    loss = functional.cross_entropy(loop.model(x), y)
    if loop.index in (5, 7):
        loop.model.last.bias.requires_grad_(False)
    stepped(loop, loss)
    loop.model.last.bias.requires_grad_(True)
    return loss.item()


def view_as_another(loop: Loop, x: Tensor, y: Tensor) -> Any:
    out = loop.model(x)
    double = out * 2
    return stepped(loop, (double + out.view_as(double)).square().mean()).item()


def read_in_inference_mode(loop: Loop, x: Tensor, y: Tensor) -> Any:
    loss = functional.cross_entropy(loop.model(x), y)
    with torch.inference_mode():
        early = loss.item()
    stepped(loop, loss)
    return early


def transformed(loop: Loop, x: Tensor, y: Tensor) -> Any:
    out = loop.model(x)
    seen = torch.vmap(lambda factor: (out * factor).square().sum())(torch.arange(3.0, device=x.device)).detach()
    return seen, stepped(loop, functional.cross_entropy(out, y)).item()


def multiplied_afterwards(loop: Loop, x: Tensor, y: Tensor) -> Any:
    loss = stepped(loop, functional.cross_entropy(loop.model(x), y) / 4)
    loss *= 4
    return loss.item()


def packed(loop: Loop, x: Tensor, y: Tensor) -> Any:
    """With hooks around the loss alone."""
    calls: list[Any] = []
    out = loop.model(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: calls.append(1) or one, lambda one: one):
        loss = functional.cross_entropy(out, y)
    return stepped(loop, loss).item(), len(calls)


def two_calls_whose_losses_begin_alike(loop: Loop, x: Tensor, y: Tensor) -> Any:
    """Both are open when nothing is known yet of what the loop does."""
    first, second = loop.model(x), loop.model(x + 1)
    one, other = functional.cross_entropy(first, y), functional.cross_entropy(second, 2 - y) * 3
    loop.optimizer.zero_grad()
    one.backward()
    other.backward()
    grads = [param.grad.clone() for param in loop.model.parameters() if param.grad is not None]
    loop.optimizer.step()
    return one.item(), other.item(), grads


UNUSUAL: list[Body] = [
    several_at_once,
    now_and_then_summed,
    kept_and_read_late,
    of_another_subclass,
    views_of_gradients,
    frozen_between,
    view_as_another,
    read_in_inference_mode,
    transformed,
    multiplied_afterwards,
    packed,
]


@pytest.mark.parametrize("body", UNUSUAL, ids=lambda body: body.__name__)
def test_an_unusual_loop(body: Body, device: torch.device) -> None:
    alike(body, device)


def test_two_calls_whose_losses_begin_alike() -> None:
    """Where both can be open: with static memory the second one would wait for the first."""
    alike(two_calls_whose_losses_begin_alike, torch.device("cpu"), lambda: nn.Linear(4, 3))


def test_only_the_loops_own_results_are_followed(device: torch.device) -> None:
    torch.manual_seed(3)
    model = Net().to(device)
    loop = Loop(model, kitsune.KitsuneOptimizer(adam(model), mode="replay", defer_loss=True), device)
    for loop.index in range(STEPS):
        plain(loop, *loop.batch())
    x, y = loop.batch()
    out = model(x)
    loss = functional.cross_entropy(out, y)
    assert isinstance(out, FollowedTensor)
    assert isinstance(loss, PendingTensor)
    assert type(out.argmax(1)) is type(out.detach().exp()) is Tensor
    stepped_loss = stepped(loop, loss)
    assert type(stepped_loss.detach()) is type(stepped_loss + 1) is type(out.detach()) is Tensor
    assert all(type(state) is Tensor for one in loop.optimizer.state.values() for state in one.values())


class Swapped(nn.Module):
    """Two outputs, which it computes in another order than it returns them in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.first(x))
        right = self.right(x)
        return self.left(x), right


@pytest.mark.parametrize("used", ["both", "left", "right"])
def test_outputs_in_another_order_than_computed(used: str) -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        left, right = training.model(x)
        losses = {"left": functional.cross_entropy(left, y), "right": right.square().mean()}
        loss = sum(losses.values()) if used == "both" else losses[used]
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    training = compare("drop_in", lambda: (model := Swapped(), adam(model)), loop=loop, steps=8, defer_loss=True)
    assert training.status().replays > 4
