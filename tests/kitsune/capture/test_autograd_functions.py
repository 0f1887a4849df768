"""Models with functions that have a backward pass of their own (`torch.autograd.Function`), and what their `ctx` can.

Every function gives other gradients than its forward pass has, so that a backward pass that is not its own shows.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import kitsune
from kitsune.capture import frontend, split_program
from kitsune.capture import late_reads as late
from tests.kitsune.training import Batch, Build, Training, adam, batch, compare
from tests.kitsune.versions import skip_before_2_13

FORMS = ("drop_in", "deferred", "train_step")
HALF = 0.5

Forward = Callable[["Parts", Tensor], Tensor]


class Settings:
    """What functions read; `count` and `log` are what they write."""

    def __init__(self) -> None:
        self.scale, self.count = 1.0, 0
        self.log: list[int] = []


SETTINGS = Settings()
COUNT = 0
TABLE = torch.linspace(0.5, 1.5, 8, dtype=torch.float64)


class Parts(nn.Module):
    """Layers to be put together: 4 to 8, and two from 8 to 3."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.first, self.last, self.other = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8))
        self.scale = 1.0
        self.function: Any = None
        self.register_buffer("buffer", torch.linspace(0.5, 1, 8))
        self._forward = forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, x)


def built(forward: Forward, **attributes: Any) -> Build:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Parts(forward).double()
        for name, value in attributes.items():
            setattr(model, name, value)
        return model, adam(model)

    return build


def doubles(index: int) -> Batch:
    return batch(index, dtype=torch.float64)


def alike(form: str, build: Build, **options: Any) -> Training:
    """Trains in `form` and by hand, and demands the same results, but for rounding."""
    if form == "deferred":
        form, options = "drop_in", {"defer_loss": True, **options}
    return compare(form, build, **{"batches": doubles, "rtol": 1e-10, "atol": 1e-12, **options})


def reasons(training: Training) -> str:
    return "\n".join(map(str, training.status().refusals))


# Functions


def combined(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return first * 10 if first is not None else second * 20 if second is not None else None
    return first * 2 + second * 3


class Told(Function):
    """Its backward pass is told which gradients are missing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Tensor | None:
        return combined(first, second)


def not_materialized(ctx: Any) -> None:
    getattr(ctx, "set_" + "materialize_grads")(False)


class ToldByHelper(Told):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        not_materialized(ctx)
        return x * 2, x * 3


class ToldByAttribute(Told):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.materialize_grads = False
        return x * 2, x * 3


class ToldBySetup(Function):
    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor, int]:
        return x * 2, x * 3, 4

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None, third: None) -> Tensor | None:
        return combined(first, second)


class Zeros(Function):
    """Gets zeros for gradients that are missing, and does not give zero for zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * weight

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return first * 2 + second.cos(), (second * HALF + 1).sum(0)


class Auxiliary(Function):
    """Adds a loss whose gradient is one, whatever comes back, as mixtures of experts do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype, ctx.is_needed = loss.dtype, loss.requires_grad
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        return grad, torch.ones((), dtype=ctx.dtype) if ctx.is_needed else None


class Needs(Function):
    """Does otherwise where an input needs no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight * (1 if ctx.needs_input_grad[0] else 5)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x = grad * weight * 2 if ctx.needs_input_grad[0] else None
        return of_x, (grad * x).sum(0) * 3 if ctx.needs_input_grad[1] else None


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight.clone())
        ctx.mark_dirty(x)
        return x.mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad * ctx.saved_tensors[0] * 2, grad.sum(0)


class Sorted(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = x.sort(dim=1)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places)
        return values, places

    @staticmethod
    def backward(ctx: Any, grad: Tensor, none: Tensor) -> Tensor:
        (places,) = ctx.saved_tensors
        return torch.zeros_like(grad).scatter_(1, places, grad * 2) + none.sum()


class Constant(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * 2
        ctx.mark_non_differentiable(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise AssertionError("nothing comes back")


class Saving(Function):
    """An input, nothing, an intermediate result and the result; what it has saved before is forgotten."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        sine = x.sin()
        result = sine * weight
        ctx.save_for_backward(x, None, sine, result, weight)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        _, nothing, sine, result, weight = ctx.saved_tensors
        again, *_ = ctx.saved_tensors
        assert nothing is None
        return grad * weight * again.cos() + result * HALF, (grad * sine).sum(0)


class Attributes(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x, ctx.exp, ctx.more, ctx.names = x, x.exp(), [x.sin()], {"factor": 3.0}
        return ctx.exp * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.exp + ctx.more[0] * ctx.names["factor"] * grad + ctx.x


class WithRules(Function):
    """Has rules for other kinds of differentiation."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, factor: float = 2.0) -> tuple[Tensor, Tensor]:
        return x * factor, x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]
        ctx.save_for_backward(inputs[0], output[1])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, None]:
        return first * ctx.factor * 1.5 + second * ctx.saved_tensors[0].cos(), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> tuple[Tensor, Tensor]:
        return tangent * 7, tangent * 8


class Vjp(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def vjp(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


class Once(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def function(
    backward: Callable[..., Any], forward: Callable[..., Any] = lambda ctx, x: x.sin(), name: str = "Made"
) -> Any:
    """One of these methods."""
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (Function,), methods)


OnlyFirst = function(lambda ctx, grad: (grad * 2, None), lambda ctx, x, weight: x * weight)
NoGradient = function(lambda ctx, grad: None)
TooManyNone = function(lambda ctx, grad: (grad * 2, None, None))
Expanded = function(lambda ctx, grad: grad.sum(0, keepdim=True).expand_as(grad))
Broadcast = function(lambda ctx, grad: (grad, grad * 3), lambda ctx, x, weight: x * weight)
Transposed = function(lambda ctx, grad: (grad * 2).t().contiguous().t(), lambda ctx, x: x * 1)
Single = function(lambda ctx, grad: grad.float() * 2)
Mutating = function(lambda ctx, grad: grad.mul_(2))
Random = function(lambda ctx, grad: grad * torch.rand_like(grad))
Identity = function(lambda ctx, grad: grad * 2, lambda ctx, x: x)
Product = function(lambda ctx, grad: (grad * 2, grad * 3), lambda ctx, x, y: x * y)
Listed = function(lambda ctx, grad: (grad * 2, None), lambda ctx, x, weights: x * weights[0] * weights[1])
Flat = function(lambda ctx, grad: grad.view(6, 8) * 2, lambda ctx, x: x.view(-1))
Halves = function(lambda ctx, one, two: torch.cat([one, two * 2], 1), lambda ctx, x: (x[:, :4], x[:, 4:]))
Alone = function(lambda ctx, grad: grad * 2, lambda ctx, x: (x * 2,))
Twins = function(lambda ctx, one, two: one * 2 + two * 3, lambda ctx, x: (x * 2,) * 2)
Whole = function(lambda ctx, one, two, three: one * 2 + two, lambda ctx, x: (x * 2, x > 0, x.argmax(1)))
AskingAutocast = function(
    lambda ctx, grad: grad * (2 if torch.is_autocast_enabled("cpu") else 3),
    lambda ctx, x: x * (2 if torch.is_autocast_enabled("cpu") else 3),
)
AskingKind = function(lambda ctx, grad: grad * len(type(ctx).__name__))


class Dropped(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        kept = torch.rand_like(x) > HALF
        ctx.save_for_backward(kept)
        return x * kept

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0] * 2


class Mixed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, int, None, str, int]:
        return x * 2, 3, None, "name", len(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *nothing: None) -> Tensor:
        return grad * (2 if nothing == (None,) * 4 else 3)


class Keywords(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, factor: float = 2.0) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.factor = factor
        return x * weight * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad * ctx.saved_tensors[0], grad.sum(0) * ctx.factor, None


class Nested(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return Vjp.apply(x) + 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Once.apply(grad * ctx.saved_tensors[0])


class Autocast(Function):
    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.t() * 2, x.t() @ grad


class Given(Function):
    """Takes an object that is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, settings: Settings) -> Tensor:
        ctx.settings = settings
        return x * settings.scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.settings.scale * 2, None


class Calling(Function):
    """Takes a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.call = call
        return call(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 2 + ctx.call(grad), None


# Models


def around(function: Any) -> Forward:
    return lambda parts, x: parts.last(function.apply(parts.first(x)))


def weighted(function: Any) -> Forward:
    return lambda parts, x: parts.last(function.apply(parts.first(x), parts.weight))


def one_result(function: Any, place: int) -> Forward:
    return lambda parts, x: parts.last(function.apply(parts.first(x))[place])


def all_results(function: Any) -> Forward:
    return lambda parts, x: parts.last(sum(function.apply(parts.first(x))))


def edited_input(parts: Parts, x: Tensor) -> Tensor:
    h = parts.first(x) * 1
    return parts.last(h + InPlace.apply(h, parts.weight))


def edited_without_gradient(parts: Parts, x: Tensor) -> Tensor:
    h = parts.first(x).detach()
    InPlace.apply(h, parts.weight)
    return parts.last(h if h.requires_grad else h * 3)


def without_gradient(parts: Parts, x: Tensor) -> Tensor:
    """There is nothing to differentiate, and yet the result is another tensor."""
    y = Identity.apply(x)
    with torch.no_grad():
        h = Vjp.apply(parts.first(x))
    return parts.last(h) + parts.last(parts.first(y * 3 if y is x else y))


def sorted_results(parts: Parts, x: Tensor) -> Tensor:
    values, places = Sorted.apply(parts.first(x))
    return parts.last(values * (1 + places) * (5 if places.requires_grad else 1))


def numbers(parts: Parts, x: Tensor) -> Tensor:
    h, three, nothing, name, size = Mixed.apply(parts.first(x))
    return parts.last(h) * three * size * (1 if nothing is None and name == "name" else 7)


def wholes(parts: Parts, x: Tensor) -> Tensor:
    h, is_positive, place = Whole.apply(parts.first(x))
    return parts.last(h * is_positive) + place[:, None]


def in_autocast(function: Any) -> Forward:
    def forward(parts: Parts, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return parts.last(function(parts, parts.first(x)))

    return forward


def shared_gradient(parts: Parts, x: Tensor) -> Tensor:
    h = parts.first(x)
    return parts.last(Mutating.apply(h) + h.tanh())


def in_checkpoint(function: Callable[[Tensor], Tensor]) -> Forward:
    return lambda parts, x: parts.last(checkpoint(function, parts.first(x), use_reentrant=False))


def several_times(parts: Parts, x: Tensor) -> Tensor:
    h = parts.first(x)
    return parts.last(Vjp.apply(Vjp.apply(h)) + Vjp.apply(h))


def matrix(parts: Parts) -> Tensor:
    return torch.outer(parts.weight, parts.weight)


REPLAYED: dict[str, Forward] = {
    "set_materialize_grads(False), the second result is not used": one_result(Told, 0),
    "set_materialize_grads(False), the first result is not used": one_result(Told, 1),
    "set_materialize_grads(False), all results are used": all_results(Told),
    "set_materialize_grads(False) in a helper": one_result(ToldByHelper, 0),
    "materialize_grads is set": one_result(ToldByAttribute, 0),
    "set_materialize_grads(False) in setup_context": one_result(ToldBySetup, 1),
    "set_materialize_grads(False) in a checkpoint": in_checkpoint(lambda h: Told.apply(h)[0]),
    "zeros for what is missing": lambda parts, x: parts.last(Zeros.apply(parts.first(x), parts.weight)[0]),
    "a gradient that depends on nothing": lambda parts, x: parts.last(
        Auxiliary.apply(parts.first(x), parts.weight.square().sum())
    ),
    "needs_input_grad, all": weighted(Needs),
    "needs_input_grad, not of the first": lambda parts, x: parts.last(Needs.apply(parts.first(x).data, parts.weight)),
    "needs_input_grad, by name": lambda parts, x: parts.last(Needs.apply(parts.first(x), weight=parts.buffer)),
    "mark_dirty": edited_input,
    "mark_dirty of what had no gradient": edited_without_gradient,
    "mark_non_differentiable": sorted_results,
    "mark_non_differentiable of the only result": lambda parts, x: parts.last(parts.first(x) * Constant.apply(x.sum())),
    "save_for_backward": weighted(Saving),
    "attributes of ctx": around(Attributes),
    "the class of ctx": around(AskingKind),
    "setup_context, jvp and generate_vmap_rule": all_results(WithRules),
    "setup_context with an argument by name": lambda parts, x: parts.last(
        sum(WithRules.apply(parts.first(x), factor=3.0))
    ),
    "vjp": around(Vjp),
    "once_differentiable": around(Once),
    "None for an input": weighted(OnlyFirst),
    "None alone": lambda parts, x: parts.last(NoGradient.apply(parts.first(x))) + parts.other(parts.first(x)),
    "None for inputs that there are not": around(TooManyNone),
    "an expanded gradient": around(Expanded),
    "a gradient to be summed": weighted(Broadcast),
    "a gradient that is laid out otherwise": lambda parts, x: parts.last(
        nn.functional.linear(x, Transposed.apply(parts.first.weight))
    ),
    "a gradient of another data type": around(Single),
    "a gradient is written to": around(Mutating),
    "a gradient is written to that goes elsewhere, too": shared_gradient,
    "random numbers in backward": around(Random),
    "random numbers in forward": around(Dropped),
    "the input is returned": around(Identity),
    "nothing needs a gradient": without_gradient,
    "a view is returned": lambda parts, x: parts.last(Flat.apply(parts.first(x)).view(6, 8)),
    "several views are returned": lambda parts, x: parts.last(torch.cat(Halves.apply(parts.first(x)), 1)),
    "a tuple of one": one_result(Alone, 0),
    "the same result twice": all_results(Twins),
    "results that are no tensors": numbers,
    "results of whole numbers": wholes,
    "arguments by name": lambda parts, x: parts.last(Keywords.apply(parts.first(x), weight=parts.weight, factor=3.0)),
    "arguments are left out": weighted(Keywords),
    "the same input twice": lambda parts, x: parts.last(Product.apply(*[parts.first(x)] * 2)),
    "a list of tensors": lambda parts, x: parts.last(Listed.apply(parts.first(x), [parts.weight, parts.buffer])),
    "an object": lambda parts, x: parts.last(Given.apply(parts.first(x), SETTINGS)),
    "a function": lambda parts, x: parts.last(Calling.apply(parts.first(x), torch.sin)),
    "one within another": around(Nested),
    "several times": several_times,
    "custom_fwd and custom_bwd": in_autocast(lambda parts, h: Autocast.apply(h, matrix(parts))),
    "custom_fwd and custom_bwd, without autocast": lambda parts, x: parts.last(
        Autocast.apply(parts.first(x), matrix(parts))
    ),
    "autocast is asked for": in_autocast(lambda parts, h: AskingAutocast.apply(h)),
}


@pytest.fixture(autouse=True)
def _settings() -> None:
    SETTINGS.__init__()  # type: ignore[misc]


_GIVEN_BY_NAME = {"needs_input_grad, by name", "setup_context with an argument by name", "arguments by name"}


@pytest.mark.support("Gradients", "an `autograd.Function` of the model's, with all that its `ctx` can", "replayed")
@pytest.mark.parametrize("name", REPLAYED)
def test_functions_in_a_loop(name: str) -> None:
    skip_before_2_13(name, _GIVEN_BY_NAME)
    alike("drop_in", built(REPLAYED[name]), steps=4)


IN_OTHER_FORMS = (
    "set_materialize_grads(False), the second result is not used",
    "needs_input_grad, all",
    "mark_dirty",
    "save_for_backward",
    "random numbers in backward",
    "a gradient is written to that goes elsewhere, too",
    "custom_fwd and custom_bwd",
)


@pytest.mark.parametrize("name", IN_OTHER_FORMS)
@pytest.mark.parametrize("form", ["deferred", "train_step"])
def test_functions_in_other_forms(form: str, name: str) -> None:
    alike(form, built(REPLAYED[name]), steps=4)


def two_heads(function: Callable[[Parts, Tensor], Any]) -> Forward:
    return lambda parts, x: function(parts, parts.first(x).tanh())


def loss_of(*used: int) -> Callable[[Any, Tensor], Tensor]:
    return lambda outputs, y: sum(nn.functional.cross_entropy(outputs[place], y) for place in used)


HEADS: dict[str, Forward] = {
    "gradients of some results": lambda parts, x: Told.apply(parts.last(parts.first(x))),
    "zeros for some results": lambda parts, x: Zeros.apply(parts.last(parts.first(x)), parts.weight[:3]),
    "a gradient that depends on nothing": two_heads(
        lambda parts, h: (Auxiliary.apply(parts.last(h), parts.weight.square().sum()), parts.other(h))
    ),
}


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("name", HEADS)
def test_a_backward_pass_from_some_of_the_outputs(name: str, used: tuple[int, ...]) -> None:
    """What is computed from a missing gradient alone is no zero within a function."""
    training = alike("drop_in", built(HEADS[name]), steps=4, replays=0, loss_fn=loss_of(*used))
    assert any(one in reasons(training) for one in ("lead to the same outputs", "not computed from those"))


# Refused


def counting(ctx: Any, grad: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return grad * 2


def logging(ctx: Any, grad: Tensor) -> Tensor:
    SETTINGS.log.append(1)
    return grad * 2


def setting(ctx: Any, grad: Tensor) -> Tensor:
    SETTINGS.count += 1
    return grad * 2


def setting_ctx(ctx: Any, grad: Tensor) -> Tensor:
    ctx.count = 2
    return grad * ctx.count


def forward_with_a_log(ctx: Any, x: Tensor) -> Tensor:
    SETTINGS.log.append(1)
    return x.sin()


class Overridden(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 5, None

    @classmethod
    def apply(cls, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().apply(x, 3.0)


def after_a_change(parts: Parts, x: Tensor) -> Tensor:
    SETTINGS.scale = 2.0
    return parts.last(Given.apply(parts.first(x), SETTINGS))


CHANGES = "changes objects of Python"

REFUSED: dict[str, tuple[Forward, str]] = {
    "a counter in backward": (around(function(counting)), CHANGES),
    "a list in backward": (around(function(logging)), CHANGES),
    "an attribute in backward": (around(function(setting)), CHANGES),
    "ctx in backward": (around(function(setting_ctx)), CHANGES),
    "a list in forward": (
        around(function(lambda ctx, grad: grad * 2, forward_with_a_log)),
        CHANGES,
    ),
    "an attribute of autograd's ctx": (
        around(function(lambda ctx, grad: grad * len(ctx.next_functions))),
        "ctx.next_fun",
    ),
    "a tensor from elsewhere": (around(function(lambda ctx, grad: grad * TABLE)), "not among its arguments"),
    "an apply() of its own": (around(Overridden), "an apply() of its own"),
    "what the call has set": (after_a_change, "which the same call has set before"),
    "a list is returned": (
        one_result(function(lambda ctx, one: one, lambda ctx, x: [x * 2, x * 3]), 0),
        "something else than a tensor or a tuple",
    ),
}


@pytest.mark.support(
    "Gradients", "an `autograd.Function` that changes objects of Python", "plain PyTorch, with a reason"
)
@pytest.mark.parametrize("name", REFUSED)
def test_functions_that_are_not_replayed(name: str) -> None:
    forward, reason = REFUSED[name]
    if name == "a list is returned":  # it has no gradient
        forward = lambda parts, x, inner=forward: inner(parts, x) + parts.other(parts.first(x))  # noqa: E731
    training = alike("drop_in", built(forward), steps=4, replays=0)
    assert reason in reasons(training)


def test_what_is_refused_runs_as_often_as_in_plain_pytorch() -> None:
    def run(form: str) -> int:
        SETTINGS.__init__()  # type: ignore[misc]
        training = Training(form, *built(around(function(logging)))())
        training.run(4, doubles)
        return len(SETTINGS.log)

    assert run("drop_in") == run("eager") == 4


def test_an_output_that_is_saved_and_edited_raises_as_in_plain_pytorch() -> None:
    saving = function(lambda ctx, grad: grad * ctx.saved_tensors[0], lambda ctx, x: save_result(ctx, x.exp()))
    training = Training("drop_in", *built(lambda parts, x: parts.last(saving.apply(parts.first(x)).mul_(2)))())
    for index in range(3):
        args, _ = doubles(index)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            training.step(*args)


def save_result(ctx: Any, result: Tensor) -> Tensor:
    ctx.save_for_backward(result)
    return result


# Changes


def replaced(ctx: Any, grad: Tensor) -> Tensor:
    return grad * 7


class Plainly(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class WithSetup(Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.factor


@pytest.mark.parametrize("base", [Plainly, WithSetup])
@pytest.mark.parametrize("is_inherited", [False, True])
def test_a_backward_pass_that_is_replaced(base: type[Function], is_inherited: bool) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        methods = {name: value for name, value in vars(base).items() if isinstance(value, staticmethod)}
        own: Any = type("Own", (Function,), methods)
        kind = type("Inheriting", (own,), {}) if is_inherited else own
        model, optimizer = built(lambda parts, x: parts.last(parts.function.apply(parts.first(x))), function=kind)()
        model.base = own
        return model, optimizer

    def edit(training: Training, index: int) -> None:
        if index == 4:
            training.model.base.backward = staticmethod(replaced)

    alike("drop_in", build, steps=7, edit=edit, replays=3)


def read(ctx: Any, grad: Tensor) -> Tensor:
    return grad * SETTINGS.scale


def read_twice(ctx: Any, x: Tensor) -> Tensor:
    return x.sin() * SETTINGS.scale


def read_by_hook(parts: Parts, x: Tensor) -> Tensor:
    h = parts.first(x)
    h.register_hook(lambda grad: grad * SETTINGS.scale)
    return parts.last(h)


READING = {
    "a function": around(function(read)),
    "both passes of a function": around(function(read, read_twice)),
    "a hook": read_by_hook,
}


@pytest.mark.parametrize("name", READING)
def test_what_a_backward_pass_reads_changes_between_steps(name: str) -> None:
    def edit(training: Training, index: int) -> None:
        SETTINGS.scale = 1.0 if index < 4 else 2.0

    alike("drop_in", built(READING[name]), steps=7, edit=edit, replays=3)


def changing_before_backward(training: Training, x: Tensor, y: Tensor) -> Tensor:
    training.optimizer.zero_grad()
    SETTINGS.scale = 1.0
    loss = training.loss_fn(training.model(x), y)
    SETTINGS.scale = 3.0
    loss.backward()
    training.optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("form", ["drop_in", "deferred"])
def test_what_a_backward_pass_reads_changes_before_it_runs(form: str) -> None:
    training = alike(form, built(READING["a function"]), steps=5, loop=changing_before_backward, replays=1)
    assert "changes after the call" in reasons(training)


@pytest.mark.parametrize("name", ["both passes of a function", "a hook"])
def test_what_cannot_be_told_from_the_call_raises(name: str) -> None:
    training = Training("drop_in", *built(READING[name])(), loop=changing_before_backward)
    training.run(2, doubles)
    with pytest.raises(kitsune.KitsuneError, match="has changed since the model was called"):
        training.run(1, doubles, start=2)
    training.run(2, doubles, start=3)
    assert training.status().mode == "eager"


# What such a pass reads that has no value of its own: lengths, what is missing, what hides something else


class Read:
    """What there is to be read; each training begins with one."""

    shared = 1.0

    def __init__(self) -> None:
        self.names: dict[str, float] = {}
        self.numbers = [1.0]
        self.members = {1}

    def factor(self) -> float:
        return 1.0


def doubled(_self: Read) -> float:
    return 2.0


LATE = Read()

LATE_READS: dict[str, tuple[Callable[[], float], Callable[[], object]]] = {
    "missing key": (lambda: LATE.names.get("k", 1.0), lambda: LATE.names.update(k=2.0)),
    "key that is there": (lambda: 2.0 if "k" in LATE.names else 1.0, lambda: LATE.names.update(k=2.0)),
    "missing attribute": (lambda: getattr(LATE, "k", 1.0), lambda: vars(LATE).update(k=2.0)),
    "hidden attribute": (lambda: LATE.shared, lambda: vars(LATE).update(shared=2.0)),
    "attribute of a class": (lambda: Read.shared, lambda: setattr(Read, "shared", 2.0)),
    "method": (lambda: LATE.factor(), lambda: setattr(Read, "factor", doubled)),
    "length": (lambda: len(LATE.numbers), lambda: LATE.numbers.append(1.0)),
    "item": (lambda: LATE.numbers[0], lambda: LATE.numbers.__setitem__(0, 2.0)),
    "sum": (lambda: sum(LATE.numbers), lambda: LATE.numbers.append(1.0)),
    "member": (lambda: 2.0 if 2 in LATE.members else 1.0, lambda: LATE.members.add(2)),
    "environment": (
        lambda: float(os.environ.get("KITSUNE_TESTS", "1")),
        lambda: os.environ.update(KITSUNE_TESTS="2"),
    ),
    "switch": (
        lambda: 2.0 if torch.are_deterministic_algorithms_enabled() else 1.0,
        lambda: torch.use_deterministic_algorithms(True),
    ),
}


def renewed() -> None:
    LATE.__dict__.clear()
    LATE.__init__()  # type: ignore[misc]
    Read.shared, Read.factor = 1.0, FACTOR  # type: ignore[method-assign]
    os.environ.pop("KITSUNE_TESTS", None)
    torch.use_deterministic_algorithms(False)


FACTOR = Read.factor


def kept_by_a_function(ctx: Any, x: Tensor, held: Any) -> Tensor:
    ctx.held = held
    return x.sin()


PLACES: dict[str, Callable[[Callable[[], float]], Forward]] = {
    "a function": lambda read: around(function(lambda ctx, grad: grad * read())),
    "a hook": lambda read: lambda parts, x: parts.last(hooked(parts.first(x), lambda grad: grad * read())),
    "a checkpoint": lambda read: (
        lambda parts, x: parts.last(checkpoint(lambda h: (h * read()).sin(), parts.first(x), use_reentrant=False))
    ),
    "a function, and the model before": lambda read: also_before(read, function(lambda ctx, grad: grad * read())),
}


def also_before(read: Callable[[], float], function: Any) -> Forward:
    return lambda parts, x: around(function)(parts, x * read())


def hooked(h: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    h.register_hook(hook)
    return h


def alike_or_raises(
    build: Build, change: Callable[[nn.Module], object], renew: Callable[[nn.Module], object] = lambda _model: None
) -> None:
    """Trains, with a `change` between call and backward pass from the third step on."""
    steps: dict[Training, int] = {}  # which keeps them apart

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        steps[training] = steps.get(training, 0) + 1
        training.optimizer.zero_grad()
        renewed()
        renew(training.model)
        loss = training.loss_fn(training.model(x), y)
        if steps[training] > 3:
            change(training.model)
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    try:
        alike("drop_in", build, steps=6, loop=loop, replays=1)
    except kitsune.KitsuneError as error:
        if "has changed since the model was called" not in str(error):
            raise
    finally:
        renewed()


@pytest.mark.parametrize("what", LATE_READS)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_looked_at_in_a_backward_pass_changes_before_it_runs(place: str, what: str) -> None:
    read, change = LATE_READS[what]
    alike_or_raises(built(PLACES[place](read)), lambda _model: change())


OF_LAYERS: dict[str, tuple[Callable[[Any], float], Callable[[Any], object]]] = {
    "missing attribute": (lambda layer: getattr(layer, "late", 1.0), lambda layer: setattr(layer, "late", 2.0)),
    "missing buffer": (
        lambda layer: 2.0 if hasattr(layer, "late") else 1.0,
        lambda layer: layer.register_buffer("late", torch.ones(1)),
    ),
    "list": (lambda layer: len(layer.history), lambda layer: layer.history.append(1.0)),
    "list of a usual name": (lambda layer: len(layer.own.training), lambda layer: layer.own.training.append(1.0)),
}


@pytest.mark.parametrize("what", OF_LAYERS)
@pytest.mark.parametrize("place", ["a hook", "a function"])
def test_what_is_given_to_a_layer_of_torch_changes_before_the_backward_pass(place: str, what: str) -> None:
    read, change = OF_LAYERS[what]

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        layer = nn.Linear(2, 2)
        return built(PLACES[place](lambda: read(layer)), given=[layer])()

    def renew(model: Any) -> None:
        layer: Any = model.given[0]
        layer.history, layer.own = [1.0], Read()
        layer.own.training = [1.0]
        vars(layer).pop("late", None)
        layer._buffers.pop("late", None)
        layer._non_persistent_buffers_set.clear()

    alike_or_raises(build, lambda model: change(model.given[0]), renew)  # type: ignore[index]


KEPT: dict[str, tuple[Callable[[Any], float], Callable[[Any], object]]] = {
    "item": (lambda held: held.numbers[0], lambda held: held.numbers.__setitem__(0, 2.0)),
    "length": (lambda held: len(held.numbers), lambda held: held.numbers.append(1.0)),
    "missing key": (lambda held: held.names.get("k", 1.0), lambda held: held.names.update(k=2.0)),
    "missing attribute": (lambda held: getattr(held, "k", 1.0), lambda held: vars(held).update(k=2.0)),
}


@pytest.mark.parametrize("what", KEPT)
def test_what_ctx_keeps_changes_before_the_backward_pass(what: str) -> None:
    read, change = KEPT[what]
    made = function(lambda ctx, grad: (grad * read(ctx.held), None), kept_by_a_function)
    forward: Forward = lambda parts, x: parts.last(made.apply(parts.first(x), LATE))  # noqa: E731
    alike_or_raises(built(forward), lambda _model: change(LATE))


def test_a_list_that_ctx_keeps_changes_before_the_backward_pass() -> None:
    made = function(lambda ctx, grad: (grad * ctx.held[0], None), kept_by_a_function)
    forward: Forward = lambda parts, x: parts.last(made.apply(parts.first(x), LATE.numbers))  # noqa: E731
    alike_or_raises(built(forward), lambda _model: LATE.numbers.__setitem__(0, 2.0))


ARGUMENTS: dict[str, tuple[object, Callable[[Any], float], bool]] = {
    "list": ([2.0], lambda held: held[0], False),
    "dictionary": ({"k": 2.0}, lambda held: held["k"], False),
    "list in a tuple": (([2.0],), lambda held: held[0][0], False),
    "number": (2.0, lambda held: held, True),
    "tuple": ((2.0, None), lambda held: held[0], True),
}


@pytest.mark.parametrize("what", ARGUMENTS)
@pytest.mark.parametrize("place", ["a hook", "a checkpoint"])
def test_what_a_backward_pass_reads_of_an_argument(place: str, what: str) -> None:
    """An argument that may change until then is another one at each call, of which nothing can be noted."""
    held, read, is_replayed = ARGUMENTS[what]

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss = training.loss_fn(training.model(x, held), y)
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    class Given(Parts):
        def forward(self, x: Tensor, held: Any) -> Any:
            return PLACES[place](lambda: read(held))(self, x)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Given(around(Plainly)).double()
        return model, adam(model)

    training = alike("drop_in", build, steps=4, loop=loop, replays=2 if is_replayed else 0)
    assert ("reads in backward() what may be another object then" in reasons(training)) is not is_replayed


def test_what_a_backward_pass_looks_at_changes_later_in_the_call() -> None:
    made = function(lambda ctx, grad: grad * len(LATE.numbers))

    def forward(parts: Parts, x: Tensor) -> Tensor:
        result = parts.last(made.apply(parts.first(x)))
        LATE.numbers.append(1.0)
        return result

    def edit(_training: Training, _index: int) -> None:
        renewed()

    training = alike("drop_in", built(forward), steps=4, edit=edit, replays=0)
    assert "reads a container, which is changed before it runs" in reasons(training)


def test_what_a_backward_pass_does_not_look_at_may_change() -> None:
    """Attributes that come between two steps, and values that it does not read between call and backward pass."""

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss = training.loss_fn(training.model(x), y)
        training.model.calls = getattr(training.model, "calls", 0) + 1  # type: ignore[operator, assignment]
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    def forward(parts: Parts, x: Tensor) -> Tensor:
        return parts.last(hooked(parts.first(x), lambda grad: grad * parts.scale))

    alike("drop_in", built(forward, calls=0), steps=6, loop=loop)


def test_what_torch_itself_has_may_change() -> None:
    """A checkpoint calls modules in its backward pass, which look at torch's hooks of all modules."""

    def forward(parts: Parts, x: Tensor) -> Tensor:
        return parts.last(checkpoint(parts.first, x, use_reentrant=False))

    def edit(_training: Training, index: int) -> None:
        if index == 4:
            nn.modules.module.register_module_forward_pre_hook(lambda *_: None).remove()

    alike("drop_in", built(forward), steps=9, edit=edit, replays=7)


# Each mend, taken back


def differs(build: Build, **options: Any) -> bool:
    try:
        alike("drop_in", build, steps=4, **options)
    except AssertionError:
        return True
    return False


def test_without_calls_of_the_functions_themselves_gradients_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend.autograd_functions, "called_themselves", lambda _called: nullcontext())
    assert differs(built(one_result(Told, 0)))


def test_without_a_look_at_what_gradients_start_from_they_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_program, "going_back_from", lambda _tangents: nullcontext())
    assert differs(built(HEADS["zeros for some results"]), loss_fn=loss_of(0), replays=0)


def test_without_late_reads_gradients_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_program, "read_by", lambda _module: late.LateReads())
    assert differs(built(READING["a function"]), loop=changing_before_backward, replays=0)
