"""Times the operators of a graph on the user's device, on values that a run of the graph gives them."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from kitsune.graph import dataflow
from kitsune.schedule.limits import DeviceLimits
from kitsune.timing import CostCache, device_us, replayed_us

_OPERATOR_SECONDS = 0.1


@dataclass(frozen=True)
class Gaps:
    """What lies between the operators.

    Attributes:
        launch_us: from one kernel to the next on a stream, in the way a plan is run.
        sync_us: what a fork or a join adds, in that way.
        timer_us: what the timer counts for the smallest kernel, hence too much for every operator.
    """

    launch_us: float
    sync_us: float
    timer_us: float


def measure_gaps(device: torch.device, limits: DeviceLimits, cache: CostCache) -> Gaps:
    """The gaps on `device`, taken from `cache` or put there. The CPU has no streams to measure: `limits` decides."""
    if cache.get("gap timer") is None:
        cache.put("gap timer", device_us(_smallest(device), device))
    timer_us = cache.get("gap timer") or 0.0
    if device.type != "cuda":
        return Gaps(timer_us, limits.sync_us, timer_us)
    if cache.get("gap launch") is None:
        cache.put("gap launch", replayed_us(_smallest(device), device))
    launch_us = cache.get("gap launch") or 0.0
    if cache.get("gap sync") is None:
        # Of the three kernels two follow each other; a fork and a join are the rest.
        cache.put("gap sync", max(0.0, replayed_us(_Fork(device), device) - 2 * launch_us) / 2)
    return Gaps(launch_us, cache.get("gap sync") or 0.0, timer_us)


class _Fork:
    """A kernel, then two at the same time on two streams, then a join."""

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device)
        self._kernels = [_smallest(device) for _ in range(3)]

    def __call__(self) -> None:
        current = torch.cuda.current_stream(self._side.device)
        first, second, third = self._kernels
        first()
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            second()
        third()
        current.wait_stream(self._side)


def _smallest(device: torch.device) -> Callable[[], object]:
    return functools.partial(torch.zeros(1, device=device).add_, 1)


def measure(
    module: fx.GraphModule,
    keys: Mapping[str, str],
    inputs: Sequence[torch.Tensor],
    cache: CostCache,
    device: torch.device,
    *,
    limit_s: float,
) -> None:
    """Puts the times of operators that `cache` lacks into it: `keys` maps the names of their nodes to signatures.

    The graph is run in order, without autograd and autocast, up to the last operator that is to be
    timed; so indices are valid. What it writes of `inputs` and of its constants are copies, and the
    state of the random number generators is restored. It ends early after `limit_s` seconds or when
    device memory does not suffice.
    """
    missing = {key for key in keys.values() if cache.get(key) is None}
    if not missing:
        return
    deadline = time.perf_counter() + limit_s
    with _undisturbed(device):
        try:
            run = _Run(module, inputs)
            for node in module.graph.nodes:
                key = keys.get(node.name)
                if key in missing:
                    remaining = min(_OPERATOR_SECONDS, deadline - time.perf_counter())
                    if remaining <= 0:
                        return
                    cache.put(key, device_us(run.repeatable(node), device, limit_s=remaining))
                    missing.remove(key)
                if not missing:
                    return
                run.step(node)
        except torch.OutOfMemoryError:
            return


class _Run:
    """A run of a graph, node by node, that holds each value as long as it is needed."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> None:
        self._module = module
        self._inputs = iter(inputs)
        self._values: dict[fx.Node, Any] = {}
        self._written = {
            storage
            for node in module.graph.nodes
            for target in dataflow.written(node)
            for storage in dataflow.storages(target)
        }
        self._last_readers = {argument: node for node in module.graph.nodes for argument in node.all_input_nodes}

    def repeatable(self, node: fx.Node) -> Callable[[], object]:
        """The call of `node` that comes next, in a form that writes only to copies."""
        copies = {target: pytree.tree_map_only(torch.Tensor, _copy, self._values[target]) for target in _targets(node)}
        return self._call(node, {**self._values, **copies})

    def step(self, node: fx.Node) -> None:
        """Runs `node`, which is the next."""
        value = self._value(node)
        if node in self._last_readers:
            self._values[node] = value
        for argument in node.all_input_nodes:
            if self._last_readers[argument] is node:
                del self._values[argument]

    def _value(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            value = next(self._inputs)
            return _copy(value) if self._written & dataflow.storages(node) else value.detach()
        if node.op == "get_attr":
            return _copy(operator.attrgetter(str(node.target))(self._module))
        return self._call(node, self._values)()

    def _call(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Callable[[], object]:
        assert callable(node.target)
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
        return functools.partial(node.target, *args, **kwargs)


def _targets(node: fx.Node) -> list[fx.Node]:
    return list(dict.fromkeys(dataflow.written(node)))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same sizes, strides and values with memory of its own."""
    copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Without autograd and autocast, and with the random number generators as they were afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield
