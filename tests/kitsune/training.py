"""One training, run by hand, with `TrainStep` or with `KitsuneOptimizer`, and the comparison of all that it shows."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import kitsune
from kitsune.capture import global_hooks

FORMS = ("train_step", "drop_in")

Batch = tuple[tuple[Any, ...], dict[str, Any]]
Build = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]
Observation = dict[str, Tensor | None]


class Net(nn.Module):
    """Two linear layers, 4 to 8 to 3, with batch norm and dropout between where they are asked for."""

    def __init__(self, *, batch_norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8) if batch_norm else nn.Identity()
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.last = nn.Linear(8, 3)
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(x))))) * self.gain


class Nothing(torch.autograd.Function):
    """Passes on no gradient at all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


def adam(model: nn.Module, **options: Any) -> torch.optim.Adam:
    """Adam in the form whose arithmetic Kitsune replays, so that results can be compared bit by bit."""
    return torch.optim.Adam(model.parameters(), **{"lr": 0.05, "fused": True, **options})


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, "fused": True, **options})


def net_and_adam() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net()
    return model, adam(model)


def batch(index: int, *, size: int = 6, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Batch:
    """Inputs (size, 4) and labels (size,) of three classes, a function of `index` alone."""
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(size, 4, generator=generator).to(device, dtype)
    y = torch.randint(3, (size,), generator=generator).to(device)
    return (x, y), {}


def num_looking() -> int:
    """How many look for models now, those of other tests among them: torch knows of one hook for all of them."""
    gc.collect()
    return len(global_hooks._own._looks)


def plain_loop(training: Training, *args: Any, **kwargs: Any) -> Tensor:
    """The loop body that `TrainStep` documents, as a user writes it around any optimizer."""
    training.optimizer.zero_grad()
    loss = training.loss_fn(training.model(*args[:-1], **kwargs), args[-1])
    loss.backward()
    training.optimizer.step()
    return loss.detach()


class Training:
    """A model being trained in one of the forms, or in the form `"eager"`, which is plain PyTorch.

    Attributes:
        optimizer: what the user's loop holds: the Kitsune optimizer in the form `"drop_in"`, else `plain`.
        plain: the `torch.optim` optimizer.
        memo: for tests to keep a scheduler, a hook handle and the like.
    """

    def __init__(
        self,
        form: str,
        model: nn.Module,
        plain: torch.optim.Optimizer,
        *,
        loss_fn: Callable[..., Tensor] = functional.cross_entropy,
        loop: Callable[..., Tensor] = plain_loop,
        step: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.form, self.model, self.plain, self.loss_fn = form, model, plain, loss_fn
        self.optimizer, self.memo = plain, dict[str, Any]()
        self._loop = loop
        options = {"mode": "replay", **options}
        self.train_step: kitsune.TrainStep | None = None
        if form == "train_step":
            step = dict(step or {})
            loss = None if "forward" in step else loss_fn
            self.train_step = kitsune.TrainStep(model, loss, plain, **step, **options)
        elif form == "drop_in":
            self.optimizer = kitsune.KitsuneOptimizer(plain, **options)

    def step(self, *args: Any, **kwargs: Any) -> Tensor:
        """One step; returns the detached loss."""
        if self.train_step is not None:
            return self.train_step(*args, **kwargs)
        return self._loop(self, *args, **kwargs)

    def run(self, steps: int, batches: Callable[[int], Batch] = batch, *, start: int = 0) -> list[float]:
        """Steps `start` to `start + steps`; returns their losses."""
        losses = []
        for index in range(start, start + steps):
            args, kwargs = batches(index)
            losses.append(float(self.step(*args, **kwargs)))
        return losses

    def status(self) -> kitsune.Status:
        source = self.train_step if self.train_step is not None else self.optimizer
        assert isinstance(source, (kitsune.TrainStep, kitsune.KitsuneOptimizer))
        return source.status()

    def observe(self, loss: Tensor | None = None) -> Observation:
        """Copies of everything that training changes: parameters, buffers, optimizer state, gradients, random state."""
        seen: Observation = {} if loss is None else {"loss": loss.detach().clone()}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            seen[name] = tensor.detach().clone()
            seen[f"{name}.grad"] = None if tensor.grad is None else tensor.grad.detach().clone()
        places = {id(param): name for name, param in self.model.named_parameters()}
        for param, state in self.plain.state.items():
            for name, value in state.items():
                if isinstance(value, (Tensor, int, float)):
                    seen[f"{places.get(id(param), 'other')}.{name}"] = torch.as_tensor(value).detach().clone()
        seen["random state"] = torch.get_rng_state()
        if next(self.model.parameters()).is_cuda:
            seen["random state of the GPU"] = torch.cuda.get_rng_state()
        return seen


def compare(
    form: str,
    build: Build = net_and_adam,
    *,
    steps: int = 6,
    batches: Callable[[int], Batch] = batch,
    edit: Callable[[Training, int], None] | None = None,
    replays: int | None = None,
    gradients: bool = True,
    rtol: float = 0.0,
    atol: float = 0.0,
    reference: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Training:
    """Trains by hand and in `form`, from equal seeds, and demands that every step leaves the same behind.

    Args:
        build: makes the model and its optimizer.
        edit: called before each step with the training and the step's number, in both runs.
        replays: how many steps must have been replayed, so that agreement means something; None: all but those that
            are eager by design, the first with `TrainStep` and the first two in a loop.
        gradients: whether `.grad` must be equal too, in a loop; after a `TrainStep` it is None.
        reference: arguments of `Training` for the run by hand, in place of `arguments`.
        arguments: of `Training`.

    Returns:
        The training in `form`, after its last step.
    """
    expected = _trace("eager", build, steps, batches, edit, arguments if reference is None else reference)
    wanted = [observation for _, observation in expected]
    for index, (current, found) in enumerate(_trace(form, build, steps, batches, edit, arguments)):
        training = current
        compared = gradients and form == "drop_in"
        assert_same(found, wanted[index], f"step {index}", gradients=compared, rtol=rtol, atol=atol)
    status = training.status()
    least = steps - (1 if form == "train_step" else 2) if replays is None else replays
    assert status.replays >= least, f"{status.replays} of {steps} steps were replayed, not {least}\n{status}"
    return training


def _trace(
    form: str,
    build: Build,
    steps: int,
    batches: Callable[[int], Batch],
    edit: Callable[[Training, int], None] | None,
    arguments: Mapping[str, Any],
) -> Iterator[tuple[Training, Observation]]:
    torch.manual_seed(7)
    model, optimizer = build()
    training = Training(form, model, optimizer, **arguments)
    for index in range(steps):
        if edit is not None:
            edit(training, index)
        args, kwargs = batches(index)
        loss = training.step(*args, **kwargs)
        yield training, training.observe(loss)


def assert_same(
    found: Observation, wanted: Observation, place: str, *, gradients: bool = True, rtol: float = 0.0, atol: float = 0.0
) -> None:
    """Equal names, and equal values but for the tolerance; `.grad` counts where `gradients` says so."""
    assert found.keys() == wanted.keys(), f"{place}: {sorted(found.keys() ^ wanted.keys())}"
    for name, value in wanted.items():
        if name.endswith(".grad") and not gradients:
            continue
        other = found[name]
        if value is None or other is None:
            assert value is other, f"{place}: {name} is {other}, not {value}"
            continue
        torch.testing.assert_close(
            other, value, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text, n=name: f"{place}, {n}: {text}"
        )
