"""Replays an optimizer's update, reading the gradients from `.grad`."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kitsune.background import refuse_recording
from kitsune.budget import CaptureBudget
from kitsune.capture.retention import no_traces
from kitsune.capture.sole import sole_capture
from kitsune.capture.state import Binding, Difference, hook_facts, refuse_hooks
from kitsune.capture.trace import same_layout, trace
from kitsune.capture.watch import is_profiled, mode_facts, refuse_modes
from kitsune.config import Config
from kitsune.engine.recording import Recording
from kitsune.errors import Refusal, RefusedError
from kitsune.execution.graph_pool import GraphPool
from kitsune.execution.stream_pool import StreamPool
from kitsune.fallback import RefusalLog
from kitsune.loop.room import Room
from kitsune.loop.shortcut import UpdateShortcut, same_tensors
from kitsune.loop.variants import Variants
from kitsune.native.facts import attribute

_MAX_GRAPHS = 4
_MAX_IN_PLACE = 2

_Key = tuple[tuple[int, ...], tuple[int, ...]]
_References = list["weakref.ref[torch.Tensor] | None"]


@dataclass(eq=False)
class _Update:
    """The captured update of one set of parameters, with one set of the optimizer's options.

    `slots` hold the gradients where the recording reads them; empty where it takes any. Those at the places in `copied`
    are its own, the others are where the captured backward pass leaves gradients. The `shortcut` tells whether all but
    the gradients is as it was at the latest replay.
    """

    key: _Key
    binding: Binding
    recording: Recording
    slots: list[torch.Tensor]
    copied: frozenset[int]
    shortcut: UpdateShortcut | None = None
    latest_inputs: Sequence[torch.Tensor] = ()
    replays: int = 0

    def __post_init__(self) -> None:
        self.strides = [slot.stride() for slot in self.slots]
        self.addresses = [slot.data_ptr() for slot in self.slots]

    def inputs(self, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        return [*self.binding.params, *_into_slots(grads, self.slots), *self.binding.inputs()]

    def fits(self, grads: Sequence[Any]) -> bool:
        """Whether these gradients, some of which may be None, lie in the slots, but for those that are copied there."""
        try:
            strides = list(map(torch.Tensor.stride, grads))
            addresses = list(map(torch.Tensor.data_ptr, grads))
        except (TypeError, RuntimeError):  # one is missing, or sparse
            return False
        if strides != self.strides:
            return False
        if not self.copied:
            return addresses == self.addresses
        return all(
            grad.dtype == slot.dtype if place in self.copied else address == self.addresses[place]
            for place, (grad, slot, address) in enumerate(zip(grads, self.slots, addresses, strict=True))
        )


class UpdateStep:
    """Replays `optimizer.step()`.

    Args:
        optimizer: a plain `torch.optim` optimizer.
        gradients: static gradients by address. Of gradients that lie in those, the captured update reads them
            there; of others, such as sums of what several calls gave, it reads copies in memory of its own.
        budget: bounds the time that captures take.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        gradients: Mapping[int, torch.Tensor],
        *,
        config: Config,
        streams: StreamPool,
        budget: CaptureBudget,
        log: RefusalLog,
    ) -> None:
        self.verified = 0  # replays that were compared with plain PyTorch, since the latest capture
        self.refusal: Refusal | None = None
        self._optimizer, self._gradients = optimizer, gradients
        self._config, self._budget, self._log = config, budget, log
        self._pool = GraphPool(streams)
        self._declined: Refusal | None = None  # why what was captured last does not serve
        self._composed = config.compile
        self._updates = Variants[_Update](_MAX_GRAPHS)
        self._room = Room(_MAX_GRAPHS)
        self._latest: _Update | None = None
        self._in_place: list[_References] = []  # slots that are read where they are
        self._captured: set[_Key] = set()

    def replay(self) -> bool:
        """Updates the parameters that have a gradient; False, with nothing done, if that has to run eagerly."""
        if self.refusal is not None:
            return False
        if self._repeat():
            return True
        try:
            self._run()
        except RefusedError as refused:
            self._log.add(refused)
            if not refused.passing:
                self.refusal = refused.refusal
                self.release()
            return False
        return True

    def release(self) -> None:
        """Gives the graphs and their memory back."""
        for update in self._updates:
            self._give_up(update)
        self._latest = None

    def _repeat(self) -> bool:
        """Updates as the latest replay did, if only the gradients' values are others; else nothing is done."""
        update = self._latest
        if update is None or update.shortcut is None:
            return False
        grads = [param.grad for param in update.binding.params]
        if not update.fits(grads) or not update.shortcut.follow():
            return False
        if update.copied:
            _into_slots([grad for grad in grads if grad is not None], update.slots)
        self._update(update, update.latest_inputs)
        return True

    def _update(self, update: _Update, inputs: Sequence[torch.Tensor]) -> None:
        if is_profiled():  # as torch's own optimizers tell it
            with torch.profiler.record_function(f"Optimizer.step#{type(self._optimizer).__name__}.step"):
                update.recording(inputs)
        else:
            update.recording(inputs)
        update.binding.advance()
        update.binding.write_gradients()
        update.replays += 1

    def _run(self) -> None:
        if self._latest is not None:
            self._room.note_use(self._latest)  # that it was repeated
            self._latest = None
        watcher = refuse_modes() or refuse_hooks(self._optimizer)
        if watcher is not None:
            raise RefusedError(watcher, passing=True)
        params, grads = self._params_and_grads()
        slots = self._slots_in_place(grads)
        key = (tuple(map(id, params)), _addresses(slots))
        update, _ = self._updates.find(lambda update: update.key == key and update.binding.suits())
        self._room.note_use(update or key)
        if update is None:
            refusal = refuse_recording()
            if refusal is not None:
                raise RefusedError(refusal, passing=True)
            self._release_stale()
            with sole_capture(), no_traces():
                self._make_room(key)
                with self._budget.capturing():
                    update = self._capture(key, params, grads, slots)
            self._updates.add(update)
            self._updates.note_capture(update)
            self._captured.add(key)
            inputs = update.inputs(grads)
        else:
            inputs = update.inputs(grads)
            self._refresh(update, inputs)
        if update.binding.writes_gradients() and not _are_apart(grads):
            reason = "gradients share memory, to which the update writes"
            raise RefusedError(Refusal(reason), passing=True)
        self._update(update, inputs)
        if update.slots:
            update.latest_inputs = inputs
            update.shortcut = update.shortcut or self._shortcut(update)
        self._latest = update

    def _shortcut(self, update: _Update) -> UpdateShortcut | None:
        """For updates with gradients in the same slots, of the same parameters."""
        if update.copied and update.binding.writes_gradients():  # the gradients' memory is to be looked at each time
            return None
        taken = {id(param) for param in update.binding.params}
        others = [
            param for group in self._optimizer.param_groups for param in group["params"] if id(param) not in taken
        ]
        facts = [
            *mode_facts(),
            *hook_facts(self._optimizer),
            *update.recording.facts(len(taken)),
            *(attribute(param, "grad") for param in others),
        ]
        try:
            return UpdateShortcut(update.binding, facts)
        except LookupError:
            return None

    def _slots_in_place(self, grads: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """The static gradients that `grads` lie in; None for those that lie elsewhere, or are to be copied.

        Static gradients that are no more are forgotten. Others may have come to their addresses since.
        """
        slots = [self._static_at(grad.data_ptr()) for grad in grads]
        if all(slot is None for slot in slots):
            return slots
        self._in_place = [known for known in self._in_place if self._are_there(known)]
        if not any(same_tensors(_tensors(known), slots) for known in self._in_place):
            if len(self._in_place) == _MAX_IN_PLACE:
                return [None for _ in slots]
            self._in_place.append([None if slot is None else weakref.ref(slot) for slot in slots])
        return slots

    def _static_at(self, address: int) -> torch.Tensor | None:
        """The static gradient at an address. Its storage may have got other memory, as by `share_memory_()`."""
        tensor = self._gradients.get(address)
        return tensor if tensor is not None and tensor.data_ptr() == address else None

    def _are_there(self, references: _References) -> bool:
        """Whether all that is referred to are static gradients still."""
        for reference, tensor in zip(references, _tensors(references), strict=True):
            if reference is not None and (tensor is None or self._static_at(tensor.data_ptr()) is not tensor):
                return False
        return True

    def _are_static(self, addresses: tuple[int, ...]) -> bool:
        """Whether there are still static gradients at these addresses, 0 standing for those that lie elsewhere."""
        return all(self._static_at(address) is not None for address in addresses if address)

    def _params_and_grads(self) -> tuple[list[torch.nn.Parameter], list[torch.Tensor]]:
        params = [
            param for group in self._optimizer.param_groups for param in group["params"] if param.grad is not None
        ]
        grads = [param.grad for param in params if param.grad is not None]
        if not params:
            raise RefusedError(Refusal("no parameter has a gradient"), passing=True)
        written = {tensor.data_ptr() for param in params for tensor in (param, *self._state_of(param))}
        for param, grad in zip(params, grads, strict=True):
            if grad.layout is not torch.strided:
                reason = f"a gradient of shape {tuple(grad.shape)} is sparse, so the update runs eagerly"
                raise RefusedError(Refusal(reason), passing=True)
            if grad.dtype != param.dtype or not same_layout(param, grad):
                raise RefusedError(
                    Refusal(f"a gradient of shape {tuple(grad.shape)} is laid out unlike its parameter"), passing=True
                )
            if grad.data_ptr() in written and grad.numel():
                reason = f"a gradient of shape {tuple(grad.shape)} lies where the update writes to"
                raise RefusedError(Refusal(reason, remedy="give the parameter a copy"), passing=True)
        return params, grads

    def _state_of(self, param: torch.nn.Parameter) -> list[torch.Tensor]:
        values = self._optimizer.state.get(param, {}).values()
        return [value for value in values if isinstance(value, torch.Tensor) and value.layout is torch.strided]

    def _names(self) -> dict[int, str]:
        """The optimizer's parameters by their `id`: it does not know their names in a model."""
        return {
            id(param): f"param_groups[{index}]['params'][{place}]"
            for index, group in enumerate(self._optimizer.param_groups)
            for place, param in enumerate(group["params"])
        }

    def _refresh(self, update: _Update, inputs: list[torch.Tensor]) -> None:
        difference = update.binding.refresh()
        if difference is None and not update.recording.fits(inputs):
            difference = Difference(update.recording.misfit(inputs, self._names()))
        if difference is None:
            return
        self._composed |= difference.is_constant
        self._give_up(update)
        self._declined = difference.refusal()
        raise RefusedError(self._declined, passing=True)

    def _capture(
        self,
        key: _Key,
        params: list[torch.nn.Parameter],
        grads: list[torch.Tensor],
        found: list[torch.Tensor | None],
    ) -> _Update:
        self.verified = 0
        binding = Binding(self._optimizer, params, composed=self._composed)
        count = len(params)

        def function(*inputs: torch.Tensor) -> list[torch.Tensor]:
            with torch.no_grad():
                stand_ins = [param.detach() for param in inputs[:count]]
                binding.update(stand_ins, inputs[count : 2 * count], inputs[2 * count :])
            return []

        slots, copied = list[torch.Tensor](), frozenset[int]()
        if any(slot is not None for slot in found) or params[0].device.type == "cuda":
            slots = [torch.empty_like(grad) if slot is None else slot for grad, slot in zip(grads, found, strict=True)]
            copied = frozenset(place for place, slot in enumerate(found) if slot is None)
        # One tensor may be the gradient of several parameters now, for which tracing would read it ever after.
        apart = [grad.detach() for grad in grads]
        inputs = [*params, *_into_slots(apart, slots), *binding.inputs()]
        stable = set(range(len(inputs)))
        if not slots:
            stable -= set(range(count, 2 * count))
        module = trace(function, inputs)
        recording = Recording(module, inputs, stable=stable, config=self._config, pool=self._pool, log=self._log)
        return _Update(key, binding, recording, slots, copied)

    def _release_stale(self) -> None:
        """Gives up the updates of static gradients that are no more: they would keep their memory."""
        self._captured = {key for key in self._captured if self._are_static(key[1])}
        for update in self._updates:
            if not self._are_static(update.key[1]):
                self._give_up(update)

    def _make_room(self, key: _Key) -> None:
        """Another update is about to be captured.

        Raises:
            RefusedError: it may not be. Those of static gradients not met before may: of these there are few for each
                recorded call.
        """
        is_bounded = key in self._captured or not any(key[1])
        if is_bounded:
            others = [update for update in self._updates if update.key == key]
            options = [option for update in others if (option := update.binding.misfit()) is not None]
            error = self._updates.refuse(options[0].refusal() if options else self._declined)
            if error is not None:
                raise error
        place = self._room.place_for(key, tuple(self._updates))
        refusal = place if isinstance(place, Refusal) else self._budget.refuse() if is_bounded else None
        if refusal is not None:
            raise RefusedError(refusal, passing=True)
        if isinstance(place, _Update):
            self._give_up(place)

    def _give_up(self, update: _Update) -> None:
        self._updates.remove(update)
        self._room.forget(update)
        update.recording.release()


def _tensors(references: _References) -> list[torch.Tensor | None]:
    return [None if reference is None else reference() for reference in references]


def _addresses(slots: Sequence[torch.Tensor | None]) -> tuple[int, ...]:
    return tuple(0 if slot is None else slot.data_ptr() for slot in slots)


def _are_apart(grads: Sequence[torch.Tensor]) -> bool:
    """Whether no two of them lie in memory that begins before the other's ends."""
    spans = sorted(_span(grad) for grad in grads if grad.numel())
    return all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Where the memory of its elements begins and ends."""
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _into_slots(grads: list[torch.Tensor], slots: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies the gradients that do not lie in their slots already; without slots, the gradients themselves."""
    if not slots:
        return grads
    away = [(slot, grad) for slot, grad in zip(slots, grads, strict=True) if slot.data_ptr() != grad.data_ptr()]
    if away:
        torch._foreach_copy_([slot for slot, _ in away], [grad for _, grad in away])
    return slots
