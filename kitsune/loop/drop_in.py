"""The unchanged loop around a wrapped optimizer: module calls, backward passes and updates, replayed or eager."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from kitsune.budget import CaptureBudget
from kitsune.capture.data_parallel import Reduction, active_wrapper, refuse_reducer
from kitsune.capture.following import unfollowed
from kitsune.capture.frontend import compiled_inside
from kitsune.capture.signature import call_signature
from kitsune.capture.state import note_step, refuse_closure
from kitsune.capture.watch import (
    has_compiled_parts,
    refuse_function_modes,
    refuse_interceptor,
    refuse_module,
)
from kitsune.config import Config
from kitsune.device import refuse_bfloat16, refuse_fusion, refuse_streams, synchronize
from kitsune.errors import KitsuneError, Refusal, RefusedError
from kitsune.execution.stream_pool import StreamPool
from kitsune.fallback import Choice, Chooser, RefusalLog
from kitsune.loop.alive import find_alive
from kitsune.loop.cache import StepCache
from kitsune.loop.first_call import watch_first_backward
from kitsune.loop.guarded_step import Call
from kitsune.loop.interception import ModuleFinder, TakenOver, call_module, others_of, own_parts
from kitsune.loop.rest import Rest, refuse_slight_gains
from kitsune.loop.scaling import LossScale, ScaledLosses
from kitsune.status import Status
from kitsune.verification import Difference, Verification

if TYPE_CHECKING:
    from kitsune.loop.loop_comparison import CallComparison
    from kitsune.loop.split_step import SplitStep
    from kitsune.loop.update_step import UpdateStep

_PATIENCE_CALLS = 20
"""Calls of the model in a loop's first iteration after which `step()` is missed, if it was not called."""

_PARTS_TOLD = 4
"""So many parts of a module are named where it is refused."""


class DropInLoop:
    """What a `KitsuneOptimizer` does with the loop that it finds itself in.

    An iteration is everything between two calls of `step`. The calls of a module with one
    signature are decided on together: their iterations run eagerly or replayed, and are timed from
    the first call to the end of `step`.

    At most `config.max_graphs` of these hold graphs, which keep them for as long as they are used now and then. Where
    graphs keep their memory, a call before the backward pass of an earlier one has graphs of its own, as if of another
    signature.

    Args:
        only: the modules whose calls are replayed; None for the outermost ones that own trained parameters.
        scale: of the losses; None where they are not to be scaled.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: Config,
        log: RefusalLog,
        only: Sequence[torch.nn.Module] | None = None,
        scale: LossScale | None = None,
    ) -> None:
        self._optimizer, self._config, self._log = optimizer, config, log
        self._scale = scale
        self._losses = None if scale is None else ScaledLosses(scale, partial(_params, optimizer))
        self._only = None if only is None else weakref.WeakSet(only)
        self._gradients: dict[int, torch.Tensor] = {}
        self._streams = StreamPool()
        self._update_log = log.part("the update")
        self._budget = CaptureBudget(config)
        self._modules: dict[int, torch.nn.Module] = {}
        self._calls: dict[int, Call] = {}
        self._compiled: dict[int, Call] = {}  # of those that torch.compile has compiled, what their calls are
        self._witnesses: dict[int, torch.nn.Parameter] = {}  # that modules are trained, the latest one of each
        self._refusals: dict[int, Refusal] = {}
        self._reduced: dict[int, Reduction] = {}  # of the modules of which a wrapper reduces the gradients
        self._taken: dict[int, TakenOver] = {}
        self._rest = Rest(config.verify)
        self._num_parts: dict[int, int] = {}  # of modules
        self._put_off: dict[int, float] = {}  # modules that were called in this iteration, and when captures may begin
        self._steps: StepCache[SplitStep] = StepCache(config.max_graphs, self._budget, log)
        self._differentiated: set[Hashable] = set()  # signatures whose backward pass was, before they had a step
        self._iteration: dict[SplitStep, tuple[Choice, int]] = {}  # how their calls ran, and how many there were
        self._latest: SplitStep | None = None
        self._latest_updated = False
        self._has_called = True  # in the latest iteration, or in this one
        self._num_new_calls = 0  # in this iteration, with signatures that were not met before
        self._was_all_new = False  # the latest iteration
        self._waits_until: float | None = None  # captures of its calls
        self._has_stepped = False
        self._fallbacks = 0
        self._is_paused = False
        self._finder = ModuleFinder(self._params(), self, self._only)
        self._number = next(_numbers)
        _loops[self._number] = self

    @cached_property
    def _update(self) -> UpdateStep:
        kind: type[UpdateStep] = _loaded("update_step").UpdateStep
        return kind(
            self._optimizer,
            self._gradients,
            config=self._config,
            streams=self._streams,
            budget=self._budget,
            log=self._update_log,
        )

    def found(self, module: torch.nn.Module, *, is_running: bool) -> None:
        """Takes over the calls of `module`, which owns trained parameters; see `CallTaker`."""
        inside = compiled_inside(module)
        key = id(inside)
        if key in self._modules or key in self._refusals:
            return
        refusal = refuse_interceptor(vars(module).get("forward")) or refuse_module(inside)
        if refusal is not None:
            refusal = self._with_parts(refusal, inside)
            self._log.add(refusal)
            self._refusals[key] = refusal
            return
        kind, amp = _device(self._optimizer).type, self._amp_dtype()
        taken = TakenOver(module, self)
        self._taken[key] = taken
        self._modules[key] = inside
        self._num_parts[key] = sum(1 for _ in inside.modules())
        self._calls[key] = _under_amp(_module_call(inside), kind, amp)
        if taken.compiled is not None:
            self._compiled[key] = _under_amp(_compiled_call(taken.compiled), kind, amp)
        if amp is not None and is_running:
            _run_this_call_under_amp(module, kind, amp, self._losses)
        if is_running:
            signature, differentiated = partial(_signature, inside, _device(self._optimizer)), self._differentiated
            watch_first_backward(module, signature, differentiated.add)
        if self._config.mode == "eager" and self._may_rest():
            taken.stand_aside()

    def _with_parts(self, refusal: Refusal, module: torch.nn.Module) -> Refusal:
        """A refusal of `module`, with the parts that may be named in its place, where others train the rest of it."""
        parts = own_parts(module, self)
        if not parts or not others_of(module, self):
            return refusal
        kind, names = type(module).__name__, ", ".join(list(parts)[:_PARTS_TOLD])
        remedy = f"name the parts of {kind} that this optimizer trains: KitsuneOptimizer(..., model=), with {names}"
        return dataclasses.replace(refusal, remedy=remedy)

    def wraps(self, wrapper: DistributedDataParallel) -> None:
        """Lets `wrapper` reduce the gradients of the module that it is about to call."""
        refusal, inside = refuse_reducer(wrapper), compiled_inside(wrapper.module)
        if refusal is None:
            self._reduced[id(inside)] = Reduction.of(wrapper)
            self._begin_plainly(inside)
        else:
            self._log.add(refusal)
            self._refusals[id(inside)] = refusal

    def _refuse_wrapper(self, module: torch.nn.Module) -> Refusal | None:
        """None unless `module` is being called by a wrapper that reduces gradients and was not met; see `wraps`."""
        wrapper = active_wrapper()
        if wrapper is None or id(module) in self._reduced:
            return None
        if compiled_inside(wrapper.module) is module:
            return Refusal("the model was called before a DistributedDataParallel wrapped it")
        return Refusal("a DistributedDataParallel wraps more than the model, and reduces the gradients of all of it")

    def call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Answers a call of a module that was taken over."""
        if self._losses is None:
            return self._answer(module, args, kwargs)
        return self._losses.follow(self._answer(module, unfollowed(args), unfollowed(kwargs)))

    def _answer(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        is_traced = torch.compiler.is_compiling()  # by Dynamo, which is to look no further then
        latest = None if is_traced or self._is_paused else self._latest
        if latest is not None and latest.module is module:
            output = latest.repeat(args, kwargs)
            if output is not None:
                self._note_call(latest, "replay")
                return output
        call = self._calls[id(module)]
        eager = self._compiled.get(id(module), call)
        args, kwargs = unfollowed(args), unfollowed(kwargs)
        if is_traced or not (torch.is_grad_enabled() and self._is_trained(module, args, kwargs)):
            return eager(args, kwargs)
        if self._is_paused or self._config.mode == "eager":
            self._begin_plainly(module)
            return eager(args, kwargs)
        if (wrapper := self._refuse_wrapper(module)) is not None:
            self._refusals[id(module)] = wrapper
            self._log.add(RefusedError(wrapper, passing=True))
            return eager(args, kwargs)
        if (mode := refuse_function_modes()) is not None:
            self._log.add(RefusedError(mode, passing=True))
            self._begin_plainly(module)
            return eager(args, kwargs)
        signature = _signature(module, _device(self._optimizer), args, kwargs)
        if self._config.mode == "auto" and self._steps.is_new(signature):
            self._num_new_calls += 1
            self._begin_plainly(module)
            return eager(args, kwargs)
        if (begins := self._put_off_until(module, signature)) is not None:
            self._put_off[id(module)] = begins
            self._begin_plainly(module)
            return eager(args, kwargs)
        step = self._latest = self._steps.get(signature, args, kwargs, partial(self._make, module, call))
        if signature in self._differentiated:
            self._differentiated.remove(signature)
            step.refuse_backward()
        choice = step.chooser.next()
        if step not in self._iteration:
            step.chooser.start()
        done, output = False, None
        if choice == "replay" and step.verified < self._config.verify:
            self._begin_plainly(module)
            done, output = self._verified(step, args, kwargs)
            choice = "eager"
        if choice == "replay":
            done, output = step.replay(args, kwargs)
        if not done:
            self._fallbacks += choice == "replay"
            choice = "eager"
            self._begin_plainly(module)
            output = eager(args, kwargs)
            step.watch_backward(output)
        self._note_call(step, choice)
        return output

    def _put_off_until(self, module: torch.nn.Module, signature: Hashable) -> float | None:
        """When calls of a signature may be captured, by `time.perf_counter()`; None for now, or if that is decided."""
        return None if signature in self._steps else self._budget.put_off_until(self._num_parts[id(module)])

    def call_eagerly(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Answers a call that is not looked at."""
        return self._compiled.get(id(module), self._calls[id(module)])(unfollowed(args), unfollowed(kwargs))

    @property
    def is_plain(self) -> bool:
        """Whether eager calls are what they would be without this loop."""
        return not self._config.enable_amp

    def _is_trained(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether gradients are wanted of a call: of a parameter or an input. Else it is as if within `no_grad`."""
        witness = self._witnesses.get(id(module))
        if witness is not None and witness.requires_grad:
            return True
        for param in module.parameters():
            if param.requires_grad:
                self._witnesses[id(module)] = param
                return True
        return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves((args, kwargs)))

    def _begin_plainly(self, module: torch.nn.Module) -> None:
        """A call runs as it is, or as if."""
        reduction = self._reduced.get(id(module))
        if reduction is not None:
            reduction.begin_plainly()

    def _note_call(self, step: SplitStep, choice: Choice) -> None:
        """A call of `step` in this iteration ran as `choice`; if they differ, all of them count as eager."""
        earlier, count = self._iteration.get(step, (choice, 0))
        self._iteration[step] = (choice if choice == earlier else "eager", count + 1)

    def _num_calls(self, module: torch.nn.Module) -> int:
        """How many there were in this iteration, of which some may have been replayed."""
        return sum(count for step, (_, count) in self._iteration.items() if step.module is module)

    def step(self, **arguments: Any) -> Any:
        """`optimizer.step()`, and the end of the iteration. Where gradients overflow in float16 there is neither.

        Updates with `arguments`, which some optimizers take, run eagerly.
        """
        self._has_stepped = True
        if self._scale is None or self._losses is None:
            return self._step(**arguments)
        if not self._losses.was_scaled and any(param.grad is not None for param in self._params()):
            reason = (
                "a loss in float16 is not scaled, as it was not made of the model's outputs by torch's functions alone"
            )
            self._log.tell(Refusal(reason, remedy="scale it by a torch.amp.GradScaler in the loop"))
        self._losses.was_scaled = False
        return self._scale.update_unless_infinite(self._optimizer.param_groups, partial(self._step, **arguments))

    def _step(self, **arguments: Any) -> Any:
        self._settle_calls()
        if self._is_paused:
            return self._optimizer.step(**arguments)
        replays = not arguments and "replay" in [step.chooser.next() for step in self._iteration]
        if replays and self._update.verified < self._config.verify and self._verified_update():
            self._latest_updated = False
            self._finish_iteration()
            return None
        is_passing = True in [step.has_new_cases for step in self._iteration]
        self._latest_updated = replays and not is_passing and self._update.replay()
        result = None if self._latest_updated else self._optimizer.step(**arguments)
        self._finish_iteration()
        return result

    def note_scaler(self) -> None:
        """A gradient scaler of the loop's calls `step`: losses are scaled by that, and not here."""
        if self._scale is not None:
            self._log.tell(Refusal("the loop has a gradient scaler: losses are not scaled by another one"))
            self._scale = self._losses = None

    def step_with_closure(self, closure: Callable[[], Any], **arguments: Any) -> Any:
        """`optimizer.step(closure)`, and the end of the iteration."""
        self._has_stepped = True
        refusal = refuse_closure(self._optimizer)
        if refusal is None and not (self._is_paused and self._scale is None):
            with torch.enable_grad():
                result = closure()
            self.step(**arguments)
            return result
        if self._scale is not None:
            reason = f"float16 needs an optimizer that calls its closure once, at the beginning: {refusal}"
            raise KitsuneError(reason)
        if refusal is not None:
            reason = f"step(closure) runs the update eagerly: {refusal.reason}"
            self._log.add(RefusedError(Refusal(reason), passing=True))
        self._latest_updated = False
        self._settle_calls()
        result = self._optimizer.step(closure, **arguments)
        self._finish_iteration()
        return result

    def _settle_calls(self) -> None:
        """Has calls run that were put off, and whose outputs may still be asked for: an update follows.

        Whether that is replayed, nothing is to show.
        """
        note_step(self._optimizer)
        for step in self._iteration:
            step.settle()

    def _finish_iteration(self) -> None:
        for step, (choice, _) in self._iteration.items():
            was_settled = step.chooser.settled
            step.chooser.finish(choice, self._num_calls(step.module))
            self._fallbacks += step.end_iteration()
            self._steps.settle(step)
            if step.chooser.refusal is not None and not was_settled:
                self._time_others_again(step)
        self._was_all_new = self._num_new_calls > 0 and not self._iteration and not self._put_off
        self._has_called = bool(self._iteration or self._put_off or self._rest)
        self._waits_until = max(self._put_off.values(), default=None if self._iteration else self._waits_until)
        self._let_rest()
        self._num_new_calls = 0
        self._iteration.clear()
        self._put_off.clear()
        self._finder.count_step()
        if not self._modules and (refusal := self._finder.refusal()) is not None:
            self._log.add(refusal)

    def _time_others_again(self, lost: SplitStep) -> None:
        """Other calls of the module in this iteration were timed while those of `lost` were replayed by turns."""
        for step in self._iteration:
            if step is not lost and step.module is lost.module:
                step.chooser.reopen()

    def _let_rest(self) -> None:
        """Leaves modules whose calls run eagerly anyway to themselves, until the next look."""
        self._rest.advance()
        for step in self._iteration:
            self._rest.note_use(step)
        choices = [choice for choice, _ in self._iteration.values()]
        if self._num_new_calls or not ("eager" in choices or self._put_off) or not self._may_rest():
            return
        if "replay" in choices:
            refuse_slight_gains(self._iteration)
            if self._config.defer_loss:  # what they do with outputs that are followed would be followed, too
                return
        for key in dict.fromkeys((*(id(step.module) for step in self._iteration), *self._put_off)):
            deadline = self._put_off.get(key, math.inf)
            self._rest.consider(self._taken[key], self._steps.of(self._modules[key]), deadline)

    def _may_rest(self) -> bool:
        """Whether nothing but replays depends on seeing the calls."""
        return self._losses is None and not self._reduced

    def verify(self, iteration: Callable[[], Any]) -> Verification:
        """Compares an iteration of the loop with the same as plain PyTorch, and leaves everything as it was.

        That includes what else is trained, by other loops or without any: the iteration may be one of several of them.
        """
        gc.collect()  # of loops that are over
        replays = self._steps.replays
        loops = list(_loops.values())
        modules = {key: module for loop in loops for key, module in loop._modules.items()}
        optimizers = [loop._optimizer for loop in loops]

        def paused() -> Any:
            for loop in loops:
                loop._is_paused = True
            try:
                return iteration()
            finally:
                for loop in loops:
                    loop._is_paused = False

        def eps() -> float:
            return max(loop._rounding() for loop in loops)

        alive = find_alive(list(modules.values()), optimizers)
        differences = _loaded("loop_comparison").iteration_differences
        found, written = differences(iteration, paused, alive, eps, _device(self._optimizer))
        if self._steps.replays == replays:
            return Verification(False, reason=self._mode()[1], written=tuple(written))
        return Verification(True, tuple(found), written=tuple(written))

    def _rounding(self) -> float:
        return 0.0 if self._latest is None else self._latest.rounding()

    def _verified(self, step: SplitStep, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
        """(True, the output of plain PyTorch), compared with that of a replay; (False, None), with nothing done."""
        call = self._calls[id(step.module)]
        comparison: CallComparison = _loaded("loop_comparison").CallComparison(step, call, args, kwargs)
        found = comparison.differences()
        if found is None:
            return False, None
        if found:
            refusal = _differs(found)
            self._log.add(refusal)
            step.chooser.refuse(refusal)
        else:
            step.verified += 1
        step.watch_backward(comparison.output)
        return True, comparison.output

    def _verified_update(self) -> bool:
        """Whether plain PyTorch has updated, compared with a replay; else nothing is done."""
        modules, device = list(self._modules.values()), _device(self._optimizer)
        differences = _loaded("loop_comparison").update_differences
        found: list[Difference] | None = differences(self._update, self._optimizer, modules, device)
        if found:
            self._update.refusal = _differs(found)
            self._update_log.add(self._update.refusal)
        elif found is not None:
            self._update.verified += 1
        return found is not None

    def expect_params(self) -> None:
        """The optimizer was given further parameters, perhaps of modules that were not found yet."""
        self._finder.stop()
        owned = {id(param) for module in self._modules.values() for param in module.parameters()}
        self._finder = ModuleFinder((param for param in self._params() if id(param) not in owned), self, self._only)

    def close(self) -> None:
        """Gives back all calls, graphs and memory."""
        self._finder.stop()
        self._rest.end()
        for taken in self._taken.values():
            taken.give_back()
        for reduction in self._reduced.values():
            reduction.arm()
        self._steps.clear()
        if "_update" in vars(self):
            self._update.release()
        self._latest = None
        _loops.pop(self._number, None)

    def status(self) -> Status:
        latest = self._latest
        mode, reason = self._mode()
        covered: tuple[str, ...] = ()
        if mode == "replay" and latest is not None:
            covered = (*latest.covered, *(["update"] if self._latest_updated else []))
        return Status(
            mode=mode,
            reason=reason,
            covered=covered,
            executor=None if latest is None else latest.executor,
            fused=latest is not None and latest.is_fused,
            setup_seconds=self._budget.seconds,
            eager_seconds=None if latest is None else latest.chooser.eager_seconds,
            replay_seconds=None if latest is None else latest.chooser.replay_seconds,
            graphs=self._steps.graphs,
            replays=self._steps.replays,
            fallbacks=self._fallbacks,
            refusals=self._log.reasons(),
            not_in_effect=self._config.not_in_effect(
                uses_streams=refuse_streams(_device(self._optimizer)) is None, can_fuse=self._can_fuse(), is_loop=True
            ),
            schedules=() if latest is None else latest.schedules,
        )

    def _mode(self) -> tuple[str, str]:
        if self._config.mode == "eager":
            return "eager", "mode='eager' was asked for"
        if (refusal := self._refuse_unstepped()) is not None:
            return "eager", str(refusal)
        if self._waits_until is not None and self._waits_until > time.perf_counter():
            return "measuring", str(self._budget.put_off(self._waits_until))
        if self._latest is not None and self._has_called:
            return self._latest.describe()
        if self._was_all_new:
            return "measuring", "the latest call was the first one of its signature: shapes, numbers, modes"
        if self._latest is not None:
            missing = "its methods cannot, nor can other modules that hold its parameters"
            return "eager", f"the latest iteration had no call of the model that can be replayed: {missing}"
        if self._refusals:
            return "eager", str(next(iter(self._refusals.values())))
        if not self._modules and (refusal := self._finder.refusal()) is not None:
            return "eager", str(refusal)
        if self._modules:
            return "idle", "the model was found in its first call, which had begun eagerly"
        return "idle", "no module that owns the optimizer's parameters has been called with gradients enabled yet"

    def _refuse_unstepped(self) -> Refusal | None:
        """None if `step()` was called, or may still be."""
        num_calls = self._num_new_calls + sum(count for _, count in self._iteration.values())
        if self._has_stepped or num_calls < _PATIENCE_CALLS:
            return None
        return Refusal(
            f"step() of the KitsuneOptimizer was not called in {num_calls} calls of the model, nothing is replayed yet",
            remedy="call it, or wrap the optimizer whose step() is called, as that inside of another optimizer",
        )

    def _can_fuse(self) -> bool:
        return refuse_fusion(_device(self._optimizer)) is None

    def _params(self) -> list[torch.nn.Parameter]:
        return _params(self._optimizer)

    def _amp_dtype(self) -> torch.dtype | None:
        if not self._config.enable_amp:
            return None
        refusal = refuse_bfloat16(_device(self._optimizer)) if self._config.amp_dtype is torch.bfloat16 else None
        if refusal is None:
            return self._config.amp_dtype
        self._log.do_without(refusal)
        return None

    def _make(self, module: torch.nn.Module, call: Call, was_met: bool) -> SplitStep:
        # Nothing here may refer to the loop: it must die with its optimizer.
        is_whole = id(module) in self._compiled
        chooser = Chooser(
            self._config.mode,
            partial(_synchronize, self._optimizer),
            is_compiled=lambda: is_whole or has_compiled_parts(module),
            was_met=was_met or self._config.mode == "auto",
        )
        config = self._config
        if self._losses is not None:  # from the loss on, gradients would not go through the nodes that scale them
            config = dataclasses.replace(config, defer_loss=False)
        kind: type[SplitStep] = _loaded("split_step").SplitStep
        return kind(
            module,
            call,
            self._gradients,
            config=config,
            streams=self._streams,
            chooser=chooser,
            admission=self._steps,
            budget=self._budget,
            log=self._log,
            reduction=self._reduced.get(id(module)) if config.defer_loss else None,
        )


def _loaded(name: str) -> Any:
    """A module of what is captured, loaded when that is wanted: with all that plans, fuses and records, it takes longer
    than the rest, and a training that ends before has not waited for it.
    """
    return import_module(f"kitsune.loop.{name}")


_loops: weakref.WeakValueDictionary[int, DropInLoop] = weakref.WeakValueDictionary()
"""All that have not been closed, by number, in the order of their making."""

_numbers = itertools.count()


def _differs(found: Sequence[Difference]) -> Refusal:
    return Refusal(f"a replay differed from plain PyTorch: {found[0]}", found[0].operator)


def _params(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _device(optimizer: torch.optim.Optimizer) -> torch.device:
    device: torch.device = next(param for group in optimizer.param_groups for param in group["params"]).device
    return device


def _synchronize(optimizer: torch.optim.Optimizer) -> None:
    synchronize(_device(optimizer))


def _signature(
    module: torch.nn.Module, device: torch.device, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Hashable:
    return id(module), call_signature(args, kwargs, module, device)


def _module_call(module: torch.nn.Module) -> Call:
    def call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return call_module(module, args, kwargs)

    return call


def _compiled_call(compiled: Callable[..., Any]) -> Call:
    def call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return compiled(*args, **kwargs)

    return call


def _under_amp(call: Call, device_type: str, amp: torch.dtype | None) -> Call:
    if amp is None:
        return call

    def autocast_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with torch.autocast(device_type, dtype=amp):
            output = call(args, kwargs)
        return pytree.tree_map(_as_float32, output)

    return autocast_call


def _run_this_call_under_amp(
    module: torch.nn.Module, device_type: str, amp: torch.dtype, losses: ScaledLosses | None
) -> None:
    """Autocast for a call that has begun: its pre-hooks are running, its forward hooks are still to come."""
    context = torch.autocast(device_type, dtype=amp)
    context.__enter__()

    def leave(_module: torch.nn.Module, _args: Any, output: Any) -> Any:
        handle.remove()
        context.__exit__(None, None, None)
        output = pytree.tree_map(_as_float32, output)
        return output if losses is None else losses.follow(output)

    handle = module.register_forward_hook(leave, always_call=True)


def _as_float32(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.float()
    return value
