"""`KitsuneOptimizer`: an optimizer whose loop runs accelerated, and is otherwise left as it is."""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sized
from typing import Any

import torch

from kitsune.capture.watch import is_profiled
from kitsune.config import Config, option_names
from kitsune.errors import ConfigError
from kitsune.fallback import RefusalLog
from kitsune.loop.drop_in import DropInLoop
from kitsune.loop.scaling import LossScale
from kitsune.status import Status
from kitsune.verification import Verification


class KitsuneOptimizer(torch.optim.Optimizer):
    """A `torch.optim` optimizer that accelerates the training loop it is used in.

    Two forms:

        optimizer = KitsuneOptimizer(torch.optim.Adam, model.parameters(), lr=1e-3)
        optimizer = KitsuneOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), enable_amp=True)

    The loop stays as it is. The outermost modules that own the optimizer's parameters are found at
    their first call; from then on, where that is measured faster, their forward and backward passes
    and the optimizer's update are replayed from captured graphs. Everything that an optimizer
    offers (`param_groups`, `state`, `state_dict`, hooks, schedulers, gradient scalers) is that of
    the wrapped one. Calls whose backward pass is differentiated (`create_graph`) run as plain PyTorch;
    the first of these raises a `KitsuneError` if it comes after replays and the call cannot be
    repeated (docs/limits.md).

    Args:
        optimizer: an optimizer class, or an optimizer.
        params: the parameters or groups, with a class.
        model: the module whose calls are replayed, or several; None for those that the loop calls first and that own
            trained parameters. Name it where a part of what is called is to be replayed, each part by itself.
        config: the options, and
        **options: single options (fields of `Config`), which take precedence; with a class, all
            other keywords go to it.

    Attributes:
        loss_scale: with `enable_amp` in float16, by how much losses are multiplied for their backward passes, with a
            `state_dict` that belongs into a checkpoint; None otherwise. Updates are left out where gradients overflow.

    Raises:
        ConfigError: an unknown option, or a value that is not allowed; a `model` of which nothing is trained.
        TypeError: neither an optimizer class with `params` nor an optimizer; a `model` that is no module.
    """

    def __init__(
        self,
        optimizer: type[torch.optim.Optimizer] | torch.optim.Optimizer,
        params: Iterable[Any] | None = None,
        *,
        model: torch.nn.Module | Iterable[torch.nn.Module] | None = None,
        config: Config | None = None,
        **options: Any,
    ) -> None:
        own = {name: value for name, value in options.items() if name in option_names()}
        others = {name: value for name, value in options.items() if name not in own}
        wrapped = _optimizer(optimizer, params, others)
        if others and isinstance(optimizer, torch.optim.Optimizer):
            Config.from_options(others)  # raises, naming the unknown option
        self.config = Config.from_options(own, config)
        self._wrapped = wrapped
        self.loss_scale = _loss_scale(self.config, wrapped)
        self._models = None if model is None else _models(model, wrapped)
        self._log = RefusalLog("the training loop")
        self._waits = False
        self._loop: DropInLoop | None = DropInLoop(wrapped, self.config, self._log, self._models, self.loss_scale)
        _alive[next(_numbers)] = self

    @classmethod
    def alive(cls) -> list[KitsuneOptimizer]:
        """All that there are and that accelerate a loop, in the order of their making."""
        return [one for one in _alive.values() if one._loop is not None]

    @property
    def wrapped(self) -> torch.optim.Optimizer:
        """The optimizer inside."""
        return self._wrapped

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._wrapped.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self._wrapped.param_groups = value

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        return self._wrapped.state

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, Any]) -> None:
        self._wrapped.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        return self._wrapped.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self._wrapped.defaults = value

    def step(self, closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        """Updates the parameters, as the wrapped optimizer does, which may take `arguments` of its own."""
        if self._waits:
            self._begin()
        if self._loop is None:
            return self._wrapped.step(*(() if closure is None else (closure,)), **arguments)
        if closure is not None:
            return self._loop.step_with_closure(closure, **arguments)
        return self._loop.step(**arguments)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As the wrapped optimizer does: without an argument by its own default, which for torch's is True."""
        if self._waits:
            self._begin()
        usual = getattr(self._wrapped.zero_grad, "__func__", None) is torch.optim.Optimizer.zero_grad
        if set_to_none not in (None, True) or not usual or is_profiled():
            self._wrapped.zero_grad(*(() if set_to_none is None else (set_to_none,)))
            return
        # torch asks first whether a profiler wants to know, which takes several times as long.
        for group in self._wrapped.param_groups:
            for param in group["params"]:
                param.grad = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._wrapped.add_param_group(param_group)
        if self._loop is not None:
            self._loop.expect_params()

    def state_dict(self) -> dict[str, Any]:
        return self._wrapped.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._wrapped.load_state_dict(state_dict)

    def status(self) -> Status:
        """What the latest iteration of the loop did and why, with figures over all iterations so far."""
        if self._loop is None:
            reason = (
                "this copy has not been used yet" if self._waits else "its optimizer was handed over, as to a TrainStep"
            )
            return Status(
                "eager",
                reason,
                not_in_effect=self.config.not_in_effect(uses_streams=False, can_fuse=False, is_loop=True),
            )
        return self._loop.status()

    def verify(self, iteration: Callable[[], Any]) -> Verification:
        """Compares an iteration of the loop, replayed, with the same as plain PyTorch, and trains nothing.

        Both start from the present state; what rounding explains is no difference. What other optimizers train is put
        back too, whichever are alive: no other thread may train meanwhile. (Whatever else `iteration` does, it does
        several times.)

        Args:
            iteration: what the body of the loop does with one batch, `step()` included.
        """
        if self._loop is None:
            return Verification(False, reason=self.status().reason)
        return self._loop.verify(iteration)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Gradient scalers ask for it before they call `step`: else they would hand their scale to this object, and the
        wrapped optimizer would not see it.
        """
        if self._loop is not None:
            self._loop.note_scaler()
        return False

    def hand_over(self) -> torch.optim.Optimizer:
        """Stops accelerating the loop and returns the wrapped optimizer."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None
        self._waits = False
        return self._wrapped

    def __repr__(self) -> str:
        return f"KitsuneOptimizer({self._wrapped!r})"

    def __getstate__(self) -> dict[str, Any]:
        kept = {"config": self.config, "wrapped": self._wrapped, "models": self._models}
        return {**kept, "loss_scale": self.loss_scale}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "wrapped" not in state:  # what optimizers take, as by those who reset their state like that
            self._wrapped.__setstate__(state)
            return
        self.config, self._wrapped, self._models = state["config"], state["wrapped"], state["models"]
        self.loss_scale = state["loss_scale"]
        self._log = RefusalLog("the training loop")
        self._loop = None
        self._waits = True  # a copy that is only kept must not look for modules
        _alive[next(_numbers)] = self

    def __getattr__(self, name: str) -> Any:
        # Hooks and whatever else a particular optimizer has are the wrapped one's.
        if name == "_wrapped":
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    def _begin(self) -> None:
        self._waits = False
        self._loop = DropInLoop(self._wrapped, self.config, self._log, self._models, self.loss_scale)


_alive: weakref.WeakValueDictionary[int, KitsuneOptimizer] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _loss_scale(config: Config, optimizer: torch.optim.Optimizer) -> LossScale | None:
    if not config.scales_losses():
        return None
    params = (param for group in optimizer.param_groups for param in group["params"])
    return LossScale(next(params).device.type)


def _models(
    model: torch.nn.Module | Iterable[torch.nn.Module], optimizer: torch.optim.Optimizer
) -> list[torch.nn.Module]:
    given = list(model) if isinstance(model, Iterable) and not isinstance(model, torch.nn.Module) else [model]
    if not given:
        raise ConfigError("model", given, "modules that own a parameter of the optimizer, or None to find them")
    trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for one in given:
        if not isinstance(one, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, or several, got {type(one).__name__}")
        if trained.isdisjoint(map(id, one.parameters())):
            raise ConfigError("model", type(one).__name__, "modules that own a parameter of the optimizer")
    return given


def _kind_of(value: object) -> str:
    """What kind of object a value is: what it is written as may fill many screens."""
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    number = f" of {len(value)}" if isinstance(value, Sized) else ""
    return f"an object of type {type(value).__name__}{number}"


def _optimizer(kind: object, params: Iterable[Any] | None, options: dict[str, Any]) -> torch.optim.Optimizer:
    if isinstance(kind, KitsuneOptimizer):
        raise TypeError("the optimizer is a KitsuneOptimizer already")
    if isinstance(kind, torch.optim.Optimizer):
        if params is not None:
            raise TypeError("params belong to an optimizer class; this is an optimizer, which has its own")
        return kind
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise TypeError(
            f"expected a torch.optim optimizer, or its class and the parameters, got {_kind_of(kind)}: write "
            "KitsuneOptimizer(torch.optim.Adam, model.parameters(), lr=1e-3)"
        )
    if params is None:
        raise TypeError(f"params are missing: KitsuneOptimizer({kind.__name__}, model.parameters(), ...)")
    accepted = inspect.signature(kind).parameters
    unknown = sorted(set(options) - set(accepted))
    if unknown and not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values()):
        names = ", ".join(sorted(option_names()))
        allowed = f"the options of Kitsune ({names}) and those of {kind.__name__} ({', '.join(list(accepted)[1:])})"
        raise ConfigError(unknown[0], options[unknown[0]], allowed)
    return kind(params, **options)
