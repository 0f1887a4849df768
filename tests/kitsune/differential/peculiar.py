"""Layers whose Python does what few models do: state in containers and settings, rules of their own, exchanged memory.

Each of them keeps the shape of what it is given, and `change` is what may happen to it between two iterations.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class Peculiar(nn.Module):
    """A layer with a weight, and with state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.1]))

    def change(self) -> None:
        """Nothing, where there is nothing to be changed from outside."""

    def numbers(self) -> list[float]:
        """What is to be equal beside the tensors."""
        return []


# What Python looks up


@dataclass
class Settings:
    factor: float


FIRST, SECOND = Settings(0.9), Settings(1.2)


class UnderTwoNames(Peculiar):
    """One object is reached by a global and by an attribute, which then names another one."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = FIRST

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * FIRST.factor * self.settings.factor

    def change(self) -> None:
        self.settings = SECOND if self.settings is FIRST else FIRST


class ComeToBeOne(Peculiar):
    """What is written under one name is read under another one, where both lead to one object; by turns they do."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.read = {"k": 1.1}, {"k": 1.1}

    def forward(self, x: Tensor) -> Tensor:
        self.written["k"] = 0.9
        result = x * self.weight * self.read["k"]
        self.written["k"] = 1.1
        return result

    def change(self) -> None:
        self.read = {"k": 1.1} if self.read is self.written else self.written


class ListInATuple(Peculiar):
    def __init__(self) -> None:
        super().__init__()
        self.held = ([0.9], "factor")

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.held[0][0]

    def change(self) -> None:
        self.held[0][0] = 2.0 - self.held[0][0]


class IsTheSame(UnderTwoNames):
    """The same, compared by `is`."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * (0.8 if self.settings is FIRST else 1.1)


def _factor() -> Callable[[], float]:
    return lambda: 1.0


ONE, OTHER = _factor(), _factor()


class TellsFunctionsApart(Peculiar):
    """Two functions of the same code."""

    def __init__(self) -> None:
        super().__init__()
        self.function = ONE

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * (0.8 if self.function is OTHER else 1.1)

    def change(self) -> None:
        self.function = OTHER if self.function is ONE else ONE


class SignOfZero(Peculiar):
    """A number that is equal to what it was before."""

    def __init__(self) -> None:
        super().__init__()
        self.zero = (0.0, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * (1 + math.copysign(0.1, self.zero[0]))

    def change(self) -> None:
        self.zero = (-self.zero[0], 1)


class MissingAttribute(Peculiar):
    """A key of `__dict__` that comes and goes."""

    def forward(self, x: Tensor) -> Tensor:
        factor = self.__dict__.get("factor", 1.0)
        return x * self.weight * (factor if "factor" in vars(self) else 0.9)

    def change(self) -> None:
        if "factor" in self.__dict__:
            del self.factor
        else:
            self.factor = 1.25


class ReplacedMethod(Peculiar):
    """A method of a class that gives way to another one, as when it is patched."""

    def __init__(self) -> None:
        super().__init__()
        self.settings: Any = type("Settings", (), {"factor": _nine_tenths})()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.settings.factor()

    def change(self) -> None:
        kind = type(self.settings)
        kind.factor = _more if kind.factor is _nine_tenths else _nine_tenths


def _nine_tenths(settings: object) -> float:
    return 0.9


def _more(settings: object) -> float:
    return 1.2


class MissingKey(Peculiar):
    """A key of a dictionary that comes and goes."""

    def __init__(self) -> None:
        super().__init__()
        self.options: dict[str, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.options.get("factor", 0.9)

    def change(self) -> None:
        if self.options.pop("factor", None) is None:
            self.options["factor"] = 1.1


# What Python keeps


class RecentlyUsed(Peculiar):
    """A cache that puts what was used last to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.recent = OrderedDict([(0, 0.9), (1, 1.0), (2, 1.2)])

    def forward(self, x: Tensor) -> Tensor:
        oldest = next(iter(self.recent))
        self.recent.move_to_end(oldest)
        return x * self.weight * self.recent[oldest]

    def numbers(self) -> list[float]:
        return [float(key) for key in self.recent]


class TurnedRound(Peculiar):
    """A queue that turns with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = deque([0.9, 1.1])

    def forward(self, x: Tensor) -> Tensor:
        self.queue.rotate(1)
        return x * self.weight * self.queue[0]

    def numbers(self) -> list[float]:
        return list(self.queue)


class Counts(Peculiar):
    """Counts its calls, which nothing depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[int] = []
        self.seen: dict[str, int] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.history.append(len(x))
        self.seen["calls"] = self.seen.get("calls", 0) + 1
        return x * self.weight

    def numbers(self) -> list[float]:
        return [*map(float, self.history), float(self.seen.get("calls", 0))]


class AssignsToAClass(Peculiar):
    """Its object has another attribute from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.settings: Any = type("Settings", (), {"turn": 0})()

    def forward(self, x: Tensor) -> Tensor:
        type(self.settings).turn = 1 - self.settings.turn
        return x * self.weight * (1.1 if self.settings.turn else 0.9)

    def numbers(self) -> list[float]:
        return [self.settings.turn]


class KeepsATensor(Peculiar):
    """What it has computed the last time is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        before = 0.0 if self.last is None else self.last
        self.last = x.detach().mean()
        return x * self.weight + before

    def numbers(self) -> list[float]:
        return [0.0 if self.last is None else float(self.last)]


class FirstOfSet(Peculiar):
    """The order of a set is that of its members' hashes."""

    def __init__(self) -> None:
        super().__init__()
        self.members = [1, 8]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * (1 + 0.05 * next(iter(set(self.members))))


class Size:
    """Is equal to another one of the same length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and self.length == other.length

    def __hash__(self) -> int:
        return hash(self.length)


class KeyByValue(Peculiar):
    """What a dictionary has for an object that is equal to the key."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * {Size(3): 1.1}.get(Size(3), 0.7)


class Stream:
    """Each pass through it is a new epoch."""

    def __init__(self) -> None:
        self.epoch = self.left = 0

    def __iter__(self) -> Stream:
        self.epoch, self.left = self.epoch + 1, 2
        return self

    def __next__(self) -> float:
        self.left -= 1
        if self.left < 0:
            raise StopIteration
        return 0.01 * self.epoch


class Epochs(Peculiar):
    def __init__(self) -> None:
        super().__init__()
        self.stream = Stream()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * (1 + sum(self.stream))

    def numbers(self) -> list[float]:
        return [self.stream.epoch]


class Annotated(Peculiar):
    """Depends on what a function's arguments are said to be."""

    def __init__(self) -> None:
        super().__init__()

        def annotated(x: int) -> int:
            return x

        self.function = annotated

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * (1 + 0.1 * len(self.function.__annotations__))

    def change(self) -> None:
        annotations = self.function.__annotations__
        if annotations.pop("y", None) is None:
            annotations["y"] = int


# What the loop changes by turns


class Settings(dict[str, float]):
    """Has attributes, and no items."""


class WithSettings(Peculiar):
    def __init__(self) -> None:
        super().__init__()
        self.settings: Any = Settings()
        self.settings.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.settings.factor

    def change(self) -> None:
        self.settings.factor *= 0.9


class Experts(Peculiar):
    """One of several weights, by turns."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterList([nn.Parameter(torch.tensor([0.9 + 0.1 * number])) for number in range(3)])
        self.active = 0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.experts[self.active] * self.weight

    def change(self) -> None:
        self.active = (self.active + 1) % 3


class FrozenByTurns(Peculiar):
    """Its weight is trained at times."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight

    def change(self) -> None:
        self.weight.requires_grad_(not self.weight.requires_grad)


class Momentum(Peculiar):
    """Running statistics that are left alone at times, as in sharpness-aware minimization."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.norm(x.reshape(len(x), -1).mean(1, keepdim=True)).mean()

    def change(self) -> None:
        self.norm.momentum = 0.0 if self.norm.momentum else 0.1


# What has a backward pass of its own


class _Two(torch.autograd.Function):
    """Gradients that are absent stay so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        first, second = grads
        if second is None:
            return None if first is None else first * 5
        return second if first is None else first + second


class _Rounded(torch.autograd.Function):
    """Almost straight through; transforms of functions take those that are written like this."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.round(x * 4) / 4

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 1.5


class _Product(torch.autograd.Function):
    """Looks which gradients are wanted."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.factor = 0.5
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x = grads[0] * weight if ctx.needs_input_grad[0] else None
        return of_x, (grads[0] * x * ctx.factor).sum().reshape(1) if ctx.needs_input_grad[1] else None


class _Exponential(torch.autograd.Function):
    """Written by a separate `setup_context`, and saves its result."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        result = torch.exp(-x * x)
        return result, result.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        result, rounded = output
        ctx.mark_non_differentiable(rounded)
        ctx.save_for_backward(inputs[0], result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x, result = ctx.saved_tensors
        return grads[0] * result * -2 * x


def _of(function: Callable[[Tensor, Tensor], Tensor]) -> type[Peculiar]:
    class Layer(Peculiar):
        def forward(self, x: Tensor) -> Tensor:
            return function(x, self.weight)

    return Layer


# What differentiates in the forward pass, and what exchanges memory


def _with_gradient(x: Tensor, weight: Tensor) -> Tensor:
    return x + torch.func.grad(lambda y: _Rounded.apply(y * weight).square().sum())(x) * 0.1


def _asking(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight + torch.func.grad(lambda y: (y.sin() * (0.2 if y.requires_grad else 0.3)).sum())(x)


def _mapped(x: Tensor, weight: Tensor) -> Tensor:
    return torch.vmap(lambda item: item * weight + item.mean())(x)


class Exchanged(Peculiar):
    """The weight gets other memory once it was used."""

    def forward(self, x: Tensor) -> Tensor:
        result = x * self.weight
        self.weight.data = self.weight.data * 0.98
        return result


class LooksAtGradients(Peculiar):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * (1.0 if self.weight.grad is None else 0.9)


WITHOUT_STATE: dict[str, Callable[[], nn.Module]] = {
    "absent gradients": _of(lambda x, weight: _Two.apply(x * weight)[0]),
    "straight through": _of(lambda x, weight: _Rounded.apply(x * weight)),
    "wanted gradients": _of(_Product.apply),
    "saved result": _of(lambda x, weight: x * weight + _Exponential.apply(x)[0]),
    "gradient in the call": _of(_with_gradient),
    "asks in the call": _of(_asking),
    "mapped": _of(_mapped),
}

TRANSFORMS = ("gradient in the call", "asks in the call", "mapped")

WITH_STATE: dict[str, Callable[[], nn.Module]] = {
    "under two names": UnderTwoNames,
    "come to be one": ComeToBeOne,
    "list in a tuple": ListInATuple,
    "is the same": IsTheSame,
    "tells functions apart": TellsFunctionsApart,
    "sign of zero": SignOfZero,
    "missing attribute": MissingAttribute,
    "replaced method": ReplacedMethod,
    "missing key": MissingKey,
    "recently used": RecentlyUsed,
    "turned round": TurnedRound,
    "counts": Counts,
    "assigns to a class": AssignsToAClass,
    "keeps a tensor": KeepsATensor,
    "first of a set": FirstOfSet,
    "key by value": KeyByValue,
    "epochs": Epochs,
    "annotated": Annotated,
    "settings": WithSettings,
    "experts": Experts,
    "frozen by turns": FrozenByTurns,
    "momentum by turns": Momentum,
    "exchanged memory": Exchanged,
    "looks at gradients": LooksAtGradients,
}

PECULIAR = {**WITHOUT_STATE, **WITH_STATE}


def change_all(model: nn.Module) -> None:
    """Has all such layers of a model change."""
    for layer in model.modules():
        if isinstance(layer, Peculiar):
            layer.change()


def numbers_of(model: nn.Module) -> dict[str, Tensor]:
    """The state of all such layers, by name."""
    found = ((name, layer.numbers()) for name, layer in model.named_modules() if isinstance(layer, Peculiar))
    return {f"state of {name}": torch.tensor(numbers, dtype=torch.float64) for name, numbers in found}
