"""Training loops as values, and the models, optimizers and schedulers that they are about."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.kitsune.differential.actions import CONSTANTS
from tests.kitsune.differential.peculiar import PECULIAR

Layer = str | tuple[Any, ...]
"""A name in `LAYERS`, or the name of a way to put layers together (in `NESTED`) followed by them."""

WIDTH = 4
CLASSES = 3
NESTED = ("residual", "twice", "frozen", "checkpoint")


@dataclass(frozen=True)
class Program:
    """One training loop. Its `repr` can be pasted into a test.

    Attributes:
        inputs: `"features"`, `"images"` or `"tokens"`.
        layers: those between the first one, which fits the inputs, and the last, which is linear.
        unused: whether the model has parameters that its forward pass does not use.
        calls: of the model for each backward pass; of all but the first it is asked that they agree with that.
        losses: names in `LOSSES`, whose sum is minimized.
        optimizer: a name in `torch.optim`; `options` go to it, and `bias_options` to a group of its own for all
            parameters of one dimension, where they are given.
        rate_is_tensor: whether the optimizer gets its learning rate as a tensor.
        scheduler: a name in `SCHEDULERS`.
        autocast: the dtype to which the forward pass and the loss run under autocast, or None.
        scaler: the options of a `GradScaler`, or None for none.
        unscale: whether the loop unscales gradients itself, before it clips them; else the update does.
        micro_batches: backward passes for each update.
        clip: `"norm"`, `"value"` or None.
        zero: who sets gradients to zero, and when: the optimizer, `"before"` or `"after"` the step or `"between"` the
            forward and the backward pass; or the `"model"`, before the step.
        sizes: of the batches: `"constant"`, `"smaller last"`, `"alternating"`, three of them `"in turn"`, or `"ragged"`
            among the micro-batches.
        habits: names of actions, done in every iteration.
        events: iterations and names of actions, done once.
        max_graphs, defer_loss: the options of Kitsune.
        static_memory: whether recordings keep their outputs where they are, as CUDA graphs do.
    """

    inputs: str = "features"
    layers: tuple[Layer, ...] = ()
    unused: bool = False
    calls: int = 1
    losses: tuple[str, ...] = ("cross_entropy",)
    optimizer: str = "SGD"
    options: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.05, "fused": True})
    bias_options: Mapping[str, Any] | None = None
    rate_is_tensor: bool = False
    scheduler: str | None = None
    autocast: str | None = None
    scaler: Mapping[str, Any] | None = None
    unscale: bool = False
    micro_batches: int = 1
    clip: str | None = None
    zero: str = "before"
    set_to_none: bool = True
    sizes: str = "constant"
    habits: tuple[str, ...] = ()
    events: tuple[tuple[int, str], ...] = ()
    iterations: int = 6
    max_graphs: int = 8
    defer_loss: bool = False
    static_memory: bool = False
    seed: int = 0

    def actions(self, index: int) -> list[str]:
        """What is done in an iteration, in order, beside training."""
        return [*self.habits, *(name for at, name in self.events if at == index)]

    def names(self) -> set[str]:
        return {*self.habits, *(name for _, name in self.events)}

    def rounds_differently(self, form: str, device: str) -> bool:
        """Whether what is captured of an update may round in another way than the optimizer itself.

        Kitsune's has the arithmetic of `fused=True` on a CPU, or one of its own where hyperparameters change but for
        the rate; where clipping is captured, norms are summed in another order.
        """
        if device != "cpu":
            return True
        if form == "train_step" and self.clip is not None:
            return True
        return not self.options.get("fused") or self.scheduler in CYCLING or bool(self.names() & CONSTANTS)

    def scales_in_update(self) -> bool:
        """Whether by hand the optimizer's own kernels unscale the gradients."""
        return self.scaler is not None and not self.unscale and bool(self.options.get("fused"))

    def writes_gradients(self) -> bool:
        """Whether updates by hand may leave something else in `.grad` than they find there."""
        return bool(self.options.get("nesterov")) and not self.options.get("fused")

    def batches(self, index: int) -> list[tuple[Tensor, Tensor]]:
        """The micro-batches of an iteration."""
        return [self._batch(1 + index * 10 + part, self._size(index, part)) for part in range(self.micro_batches)]

    def test_batch(self) -> Tensor:
        return self._batch(0, 5)[0]

    def _size(self, index: int, part: int) -> int:
        smaller = {
            "constant": False,
            "smaller last": index % 3 == 2,
            "alternating": index % 2 == 1,
            "ragged": part == self.micro_batches - 1,
            "in turn": False,
        }
        if self.sizes == "in turn":
            return 3 + index % 3
        return 4 if smaller[self.sizes] else 6

    def _batch(self, number: int, size: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        y = torch.randint(CLASSES, (size,), generator=generator)
        if self.inputs == "tokens":
            return torch.randint(9, (size, 5), generator=generator), y
        shape = (3, 6, 6) if self.inputs == "images" else (5,)
        return torch.randn(size, *shape, generator=generator), y


def shares_weights(layers: tuple[Layer, ...]) -> bool:
    """Whether a parameter may be used more than once in a forward pass."""
    return not {*_flat(layers)}.isdisjoint(("tied", "twice"))


def has_checkpoint(layers: tuple[Layer, ...]) -> bool:
    return "checkpoint" in _flat(layers)


def has_experts(layers: tuple[Layer, ...]) -> bool:
    """Whether there are parameters that take part later than others."""
    return "experts" in _flat(layers)


def _flat(layers: tuple[Layer, ...]) -> Iterator[str]:
    for layer in layers:
        if isinstance(layer, str):
            yield layer
        else:
            yield from _flat(layer)


def peculiar(layers: tuple[Layer, ...]) -> set[str]:
    """The names of `PECULIAR` layers among them."""
    return PECULIAR.keys() & {*_flat(layers)}


# Models


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x))


class Checkpoint(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Model(nn.Module):
    """The first layer, the layers of a program, the mean over places or tokens, and the head."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.inputs = program.inputs
        first = {
            "features": lambda: nn.Linear(5, WIDTH),
            "images": lambda: nn.Conv2d(3, WIDTH, 3),
            "tokens": lambda: nn.Embedding(9, WIDTH),
        }
        self.first = first[program.inputs]()
        tied: list[nn.Module] = []
        images = program.inputs == "images"
        self.layers = nn.Sequential(*(_build(layer, images, tied) for layer in program.layers))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.spare = nn.Linear(2, 2) if program.unused else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.inputs == "tokens":
            x = x.mean(1)
        x = self.layers(x)
        if self.inputs == "images":
            x = x.mean((2, 3))
        return self.head(x)


def _mixing(images: bool, **options: Any) -> nn.Module:
    return nn.Conv2d(WIDTH, WIDTH, 3, padding=1, **options) if images else nn.Linear(WIDTH, WIDTH, **options)


def _batch_norm(images: bool, **options: Any) -> nn.Module:
    return nn.BatchNorm2d(WIDTH, **options) if images else nn.BatchNorm1d(WIDTH, **options)


LAYERS: dict[str, Callable[[bool], nn.Module]] = {
    "mixing": _mixing,  # a convolution of images, or a linear layer
    "mixing, relu_": lambda images: nn.Sequential(_mixing(images, bias=False), nn.ReLU(inplace=True)),
    "batch_norm": _batch_norm,
    "group_norm": lambda images: nn.GroupNorm(2, WIDTH),
    "layer_norm": lambda images: nn.GroupNorm(1, WIDTH) if images else nn.LayerNorm(WIDTH),
    "max_pool": lambda images: nn.MaxPool2d(3, 1, 1) if images else nn.MaxPool1d(3, 1, 1),
    "dropout": lambda images: nn.Dropout(0.3),
    "channel_dropout": lambda images: nn.Dropout2d(0.3) if images else nn.AlphaDropout(0.3),
    "relu": lambda images: nn.ReLU(),
    "gelu": lambda images: nn.GELU(),
    "tanh": lambda images: nn.Tanh(),
    "silu": lambda images: nn.SiLU(),
}


def _build(layer: Layer, images: bool, tied: list[nn.Module]) -> nn.Module:
    if layer == "tied":
        module = _mixing(images)
        if tied:
            module.weight = tied[0].weight
        tied.append(module)
        return module
    if isinstance(layer, str):
        return PECULIAR[layer]() if layer in PECULIAR else LAYERS[layer](images)
    name, *inner = layer
    module = nn.Sequential(*(_build(part, images, tied) for part in inner))
    if name == "frozen":
        return module.requires_grad_(False)
    return {"residual": Residual, "twice": Twice, "checkpoint": Checkpoint}[name](module)


# Losses

LOSSES: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda model, output, y: functional.cross_entropy(output, y),
    "smoothed": lambda model, output, y: functional.cross_entropy(output, y, label_smoothing=0.1),
    "mse": lambda model, output, y: functional.mse_loss(output, functional.one_hot(y, CLASSES).to(output.dtype)),
    "penalty": lambda model, output, y: 0.01 * sum(param.square().sum() for param in model.parameters()),
}


def loss_of(program: Program, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The output of the model and the loss."""
    # With autocast's cache, the gradients of a shared weight are added up in bfloat16 by hand, in float32 by a replay.
    cache = not shares_weights(program.layers) and program.calls == 1
    dtype = getattr(torch, program.autocast or "bfloat16")
    with torch.autocast(x.device.type, dtype, enabled=program.autocast is not None, cache_enabled=cache):
        output = model(x)
        others = [model(x.roll(number, 0)) for number in range(1, program.calls)]
        losses = [LOSSES[name](model, output, y) for name in program.losses]
        losses += [functional.mse_loss(other, output) for other in others]
        return output, sum(losses[1:], losses[0])


# Optimizers and schedulers


def build_optimizer(program: Program, model: Model) -> torch.optim.Optimizer:
    """Of all parameters that are trained from the beginning."""
    late = set(model.head.parameters()) if "add_group" in program.names() else set()
    params = [param for param in model.parameters() if param.requires_grad and param not in late]
    groups: list[dict[str, Any]] = [{"params": params}]
    if program.bias_options is not None:
        biases = [param for param in params if param.ndim < 2]
        groups = [{"params": [param for param in params if param.ndim > 1]}, {"params": biases, **program.bias_options}]
    kind = getattr(torch.optim, program.optimizer)
    options = dict(program.options)
    if program.rate_is_tensor:
        options["lr"] = torch.tensor(options["lr"])
    return kind([group for group in groups if group["params"]], **options)


Make = Callable[[torch.optim.Optimizer], Any]
_schedules = torch.optim.lr_scheduler


def _cycles_momentum(optimizer: torch.optim.Optimizer) -> bool:
    return not {"momentum", "betas"}.isdisjoint(optimizer.defaults)


SCHEDULERS: dict[str, Make] = {
    "step": lambda optimizer: _schedules.StepLR(optimizer, 3, gamma=0.5),
    "cosine": lambda optimizer: _schedules.CosineAnnealingLR(optimizer, 8),
    "one_cycle": lambda optimizer: _schedules.OneCycleLR(
        optimizer, 0.1, total_steps=10, cycle_momentum=_cycles_momentum(optimizer)
    ),
    "cyclic": lambda optimizer: _schedules.CyclicLR(
        optimizer, 0.01, 0.05, step_size_up=2, cycle_momentum=_cycles_momentum(optimizer)
    ),
    "plateau": lambda optimizer: _schedules.ReduceLROnPlateau(optimizer, patience=0),
    "chained": lambda optimizer: _schedules.ChainedScheduler(
        [_schedules.LinearLR(optimizer, total_iters=3), _schedules.ExponentialLR(optimizer, 0.9)]
    ),
    "sequential": lambda optimizer: _schedules.SequentialLR(
        optimizer, [_schedules.ConstantLR(optimizer, 0.5, 2), _schedules.ExponentialLR(optimizer, 0.8)], [3]
    ),
}

CYCLING = ("one_cycle", "cyclic")
"""The schedulers that change momentum or betas, where the optimizer has any."""
