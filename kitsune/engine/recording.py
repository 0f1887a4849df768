"""A graph made ready to replay, and the conditions on its inputs."""

from __future__ import annotations

import bisect
import gc
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import fx

from kitsune.config import Config
from kitsune.device import refuse_inductor
from kitsune.errors import Refusal, RefusedError, first_line
from kitsune.execution.cuda_graph import CudaGraph
from kitsune.execution.graph_pool import GraphPool
from kitsune.execution.handout import Handout
from kitsune.execution.in_order import InOrder, Outputs
from kitsune.execution.lanes import lanes_for
from kitsune.execution.lower import Lowered
from kitsune.execution.on_streams import OnStreams
from kitsune.fallback import RefusalLog
from kitsune.graph import dataflow, liveness
from kitsune.native.facts import Fact, attribute, result


class Recording:
    """An executor for `module` and the inputs it was made for.

    Args:
        module: the graph.
        inputs: the tensors of the present call.
        stable: positions of inputs that stay the same tensors from call to call (parameters,
            buffers, optimizer state); a replay uses them in place. All others are copied in, but for those
        in_place: positions of inputs that are used in place too, whose tensors may be others at the same addresses.
        config: `max_memory`, `compile` and `cuda_graphs` apply.
        pool: the memory pool, on a CUDA device.
        log: told when an option cannot be followed.
        warm_up, handout, pieces: see `CudaGraph`.
        lowered: what runs in place of `module`, which it computes; Inductor leaves it as it is.
        live_bytes: tells what its values need at once, if not what those of `module` do in order.
        on_release: told when the memory that `lowered` uses is free again.

    Attributes:
        written: the addresses of the storages of inputs that the graph writes.

    Raises:
        RefusedError: the graph cannot be replayed on copies of these inputs, or would need more
            memory than is allowed or there.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[torch.Tensor],
        *,
        stable: Collection[int],
        config: Config,
        pool: GraphPool,
        log: RefusalLog,
        warm_up: Sequence[torch.Tensor] | None = None,
        lowered: Lowered | None = None,
        live_bytes: Callable[[], int] | None = None,
        on_release: Callable[[], None] | None = None,
        in_place: Collection[int] = (),
        handout: Handout | None = None,
        pieces: Sequence[int] = (),
    ) -> None:
        self._on_release = on_release
        device = inputs[0].device
        passed = [position for position in range(len(inputs)) if position not in stable]
        copied = [position for position in passed if position not in in_place]
        mutated = dataflow.written_inputs(module.graph)
        _refuse_inputs(inputs, passed, mutated, device)
        if config.max_memory is not None:
            live = liveness.peak_bytes(module.graph) if live_bytes is None else live_bytes()
            _refuse_memory(live + _copied_bytes(inputs, (*copied, *mutated)), config.max_memory)
        compile = config.compile
        if compile and (missing := refuse_inductor(device)) is not None:
            log.do_without(missing)
            compile = False
        self._stable = sorted(stable)
        self._tensors = [inputs[place] for place in self._stable]
        self._ids = list(map(id, self._tensors))
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._trained = [tensor.requires_grad for tensor in self._tensors]
        self._copied = copied
        self.written = frozenset(_address(inputs[position]) for position in mutated)
        self.executor: InOrder | OnStreams | CudaGraph
        records = device.type == "cuda" and config.cuda_graphs
        if lowered is None:
            run = InOrder(module, compile=compile)
        elif device.type == "cuda" and lowered.num_streams > 1 and not records:
            self.executor = OnStreams(lowered, pool.streams, device)
            return
        else:
            run = InOrder(lowered.module, lanes=lanes_for(lowered.num_streams, pool.streams, device))
        if not records:
            self.executor = run
            return
        is_for_memory = False
        try:
            self.executor = CudaGraph(
                run,
                inputs,
                copied=copied,
                mutated=mutated,
                pool=pool,
                warm_up=warm_up,
                handout=handout,
                pieces=pieces,
            )
            return
        except torch.OutOfMemoryError:
            is_for_memory = True
            refusal = Refusal("there is too little device memory to capture the step")
        except Exception as error:  # noqa: BLE001 - some operators cannot be recorded, and say so in many ways
            refusal = Refusal(f"recording the step failed: {first_line(error)}")
        # Out of the handlers: an exception that is being handled would keep alive all that was allocated.
        gc.collect()
        torch.cuda.empty_cache()
        raise RefusedError(refusal, for_memory=is_for_memory)

    def fits(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether the stable inputs are still the same tensors, at the same addresses, with gradients or without.

        Not every version of Dynamo guards the latter. Only the first inputs may be passed: those are looked at.
        """
        count = bisect.bisect_left(self._stable, len(inputs))
        tensors = [inputs[place] for place in self._stable[:count]]
        return (
            list(map(id, tensors)) == self._ids[:count]
            and [tensor.data_ptr() for tensor in tensors] == self._addresses[:count]
            and [tensor.requires_grad for tensor in tensors] == self._trained[:count]
        )

    def refuse_written(self, inputs: Sequence[torch.Tensor]) -> None:
        """Looks where inputs that are copied in lie: what the graph writes there, it may write before it is to be read.

        Raises:
            RefusedError: one lies in memory that the graph writes.
        """
        if self.written and any(_address(inputs[place]) in self.written for place in self._copied):
            refusal = Refusal("an argument lies in memory that the model writes", remedy="pass a copy")
            raise RefusedError(refusal, passing=True)

    def misfit(self, inputs: Sequence[torch.Tensor], names: Mapping[int, str]) -> str:
        """What of `inputs` is the first not to fit, by its name of those by `id`, for a refusal."""
        tensors = [inputs[place] for place in self._stable[: bisect.bisect_left(self._stable, len(inputs))]]
        captured = zip(tensors, self._ids, self._addresses, self._trained, strict=False)
        for tensor, known, address, trained in captured:
            name = names.get(id(tensor), "a parameter or a buffer")
            if id(tensor) == known and tensor.data_ptr() != address:
                return f"the memory of {name} (as by assigning its .data)"
            if id(tensor) != known:
                return name
            if tensor.requires_grad != trained:
                return f"requires_grad of {name}"
        return "a parameter or a buffer"

    def facts(self, count: int) -> list[Fact]:
        """What must stay, beside the stable ones among the first `count` inputs, for these to fit as they do."""
        tensors = self._tensors[: bisect.bisect_left(self._stable, count)]
        places = [result(tensor.data_ptr) for tensor in tensors]
        return [*places, *(attribute(tensor, "requires_grad") for tensor in tensors)]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Outputs:
        return self.executor(inputs)

    def release(self) -> None:
        self.executor.release()
        self._tensors.clear()
        if self._on_release is not None:
            self._on_release()


def names_in(module: torch.nn.Module) -> dict[int, str]:
    """The names of a module's parameters and buffers, by their `id`."""
    return {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _refuse_inputs(
    inputs: Sequence[torch.Tensor], passed: Sequence[int], mutated: dict[int, fx.Node], device: torch.device
) -> None:
    for position in passed:
        if position in mutated:
            node = mutated[position]
            raise RefusedError(Refusal(f"{node.target} writes to an argument of the step", node.name))
    for tensor in inputs:
        if tensor.device != device:
            raise RefusedError(Refusal(f"the step uses tensors on {device} and on {tensor.device}"))


def most_live_bytes(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], stable: Collection[int], config: Config
) -> int | None:
    """What the values of a plan for `module` may need at once, recorded for `inputs`; None: there is no bound."""
    if config.max_memory is None:
        return None
    copied = [position for position in range(len(inputs)) if position not in stable]
    return max(0, config.max_memory - _copied_bytes(inputs, (*copied, *dataflow.written_inputs(module.graph))))


def _copied_bytes(inputs: Sequence[torch.Tensor], positions: Iterable[int]) -> int:
    """Bytes of copies of the inputs that are copied in at each replay, or that are written, to warm up on."""
    return sum(inputs[position].untyped_storage().nbytes() for position in set(positions))


def _refuse_memory(needed: int, max_memory: int) -> None:
    if needed > max_memory:
        raise RefusedError(
            Refusal(
                f"capturing needs about {needed / 2**20:.1f} MiB, max_memory allows {max_memory / 2**20:.1f}",
                remedy="raise max_memory or lower the batch size",
            )
        )
