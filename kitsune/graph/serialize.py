"""Graphs as bytes, for another process: operators by name, and of each value how it lies in memory.

`torch.fx` itself pickles a graph as the Python code that it prints, which has neither the values of its nodes nor
operators other than by import.
"""

from __future__ import annotations

import hashlib
import io
import operator
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from kitsune.graph.dataflow import storage_of

_KEPT = ("stack_trace",)
"""What is kept of a node beside its value: where the user's code made it."""


class UnknownOperatorError(LookupError):
    """An operator of a graph is not registered in this process; `name` is `namespace::operator`."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the operator {name} is not registered in this process")
        self.name = name


@dataclass(frozen=True)
class _Node:
    """The node at that place of its graph."""

    place: int


@dataclass(frozen=True)
class _Operator:
    name: str
    overload: str


@dataclass(frozen=True)
class _Value:
    """A tensor: a part of the storage with that number."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Storage(NamedTuple):
    num_bytes: int
    device: torch.device


class _Listed(NamedTuple):
    op: str
    name: str
    target: object
    args: Any
    kwargs: Any
    value: Any
    kept: Mapping[str, str]


class _Packed(NamedTuple):
    nodes: list[_Listed]
    storages: list[_Storage]
    attributes: dict[str, torch.Tensor]


def packed(module: fx.GraphModule) -> bytes:
    """`module`, a graph of operators over plain tensors, as bytes.

    Raises:
        TypeError, ValueError: a value or an argument has no such form: a sparse tensor, a symbolic size, a function.
    """
    return dumped(_listed(module))


def _listed(module: fx.GraphModule) -> _Packed:
    places = {node: _Node(place) for place, node in enumerate(module.graph.nodes)}
    storages = _Storages()
    attributes: dict[str, torch.Tensor] = {}
    nodes = []
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(module)
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"{node.name} is an attribute of type {type(value).__name__}, not a tensor")
            attributes[str(node.target)] = value
        args, kwargs = pytree.tree_map_only(fx.Node, places.__getitem__, (node.args, dict(node.kwargs)))
        value = pytree.tree_map(storages.value, node.meta.get("val"))
        kept = {name: node.meta[name] for name in _KEPT if isinstance(node.meta.get(name), str)}
        nodes.append(_Listed(node.op, node.name, _named(node.target), args, kwargs, value, kept))
    return _Packed(nodes, storages.listed, attributes)


def digest(module: fx.GraphModule) -> str:
    """Equal for graphs with equal operators, values, memory that these share, and constants; in all processes.

    Raises:
        TypeError, ValueError: as `packed`.
    """
    listed = _listed(module)
    text = hashlib.sha256()
    for node in listed.nodes:
        text.update(repr((node.op, node.name, node.target, node.args, node.kwargs, node.value)).encode())
    text.update(repr(listed.storages).encode())
    for name, constant in sorted(listed.attributes.items()):
        text.update(name.encode() + dumped(constant))
    return text.hexdigest()[:32]


def unpacked(content: bytes, mode: FakeTensorMode | None = None) -> fx.GraphModule:
    """The module of `packed`. Content is trusted: it comes from a process of the same program.

    Args:
        mode: that of its values; a new one by default.

    Raises:
        UnknownOperatorError: this process has no such operator.
    """
    listed: _Packed = pickle.loads(content)
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    memory = _Memory(_mode(mode), listed.storages)
    with torch.no_grad():
        for one in listed.nodes:
            args, kwargs = pytree.tree_map_only(_Node, lambda node: nodes[node.place], (one.args, one.kwargs))
            node = graph.create_node(one.op, _target(one.target), args, kwargs, one.name)
            node.meta.update(one.kept)
            if one.value is not None or one.op == "call_function":
                node.meta["val"] = pytree.tree_map_only(_Value, memory.tensor, one.value)
            nodes.append(node)
    return fx.GraphModule(listed.attributes, graph)


def packed_tensors(tensors: Sequence[torch.Tensor]) -> bytes:
    """How tensors lie in memory, as bytes; not what they hold.

    Raises:
        ValueError: one is no plain tensor.
    """
    storages = _Storages()
    values = [storages.value(tensor) for tensor in tensors]
    return pickle.dumps((values, storages.listed), pickle.HIGHEST_PROTOCOL)


def unpacked_tensors(content: bytes, mode: FakeTensorMode | None = None) -> list[torch.Tensor]:
    """Fake tensors that lie as those of `packed_tensors`; `mode` as for `unpacked`."""
    values, storages = pickle.loads(content)
    memory = _Memory(_mode(mode), storages)
    with torch.no_grad():
        return [memory.tensor(value) for value in values]


def _mode(mode: FakeTensorMode | None) -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True) if mode is None else mode


class _Storages:
    """Numbers storages in the order in which they are met."""

    def __init__(self) -> None:
        self.listed: list[_Storage] = []
        self._numbers: dict[int, int] = {}

    def value(self, leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.layout is not torch.strided or leaf.is_quantized:
            raise ValueError(f"a value is no plain tensor: its layout is {leaf.layout}")
        storage = leaf.untyped_storage()
        key = storage_of(leaf)
        if key not in self._numbers:
            self._numbers[key] = len(self.listed)
            self.listed.append(_Storage(int(storage.nbytes()), leaf.device))
        size, stride = tuple(map(int, leaf.size())), tuple(map(int, leaf.stride()))
        return _Value(self._numbers[key], leaf.dtype, size, stride, int(leaf.storage_offset()))


class _Memory:
    """Makes fake tensors that share memory as those did which were packed."""

    def __init__(self, mode: FakeTensorMode, storages: Sequence[_Storage]) -> None:
        self._mode, self._devices = mode, [one.device for one in storages]
        self._storages = [torch.UntypedStorage(one.num_bytes, device="meta") for one in storages]

    def tensor(self, value: _Value) -> FakeTensor:
        plain = torch.empty(0, dtype=value.dtype, device="meta")
        plain.set_(self._storages[value.storage], value.offset, value.size, value.stride)
        return FakeTensor(self._mode, plain, self._devices[value.storage])


def _named(target: object) -> object:
    if isinstance(target, torch._ops.OpOverload):
        return _Operator(target._schema.name, target._overloadname)
    if isinstance(target, str) or target is operator.getitem:
        return target
    raise TypeError(f"{target} is no operator")


def _target(named: object) -> Callable[..., Any] | str:
    if not isinstance(named, _Operator):
        return named  # type: ignore[return-value]
    namespace, name = named.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None or named.overload not in packet.overloads():
        raise UnknownOperatorError(named.name)
    target: Callable[..., Any] = getattr(packet, named.overload)
    return target


class _Pickler(pickle.Pickler):
    """Tensors travel by their values, on their device."""

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        content = io.BytesIO()
        torch.save(value.detach().cpu(), content)
        return _loaded, (content.getvalue(), value.device)


def _loaded(content: bytes, device: torch.device) -> torch.Tensor:
    loaded: torch.Tensor = torch.load(io.BytesIO(content), weights_only=True)
    return loaded.to(device)


def dumped(value: object) -> bytes:
    """A value as `pickle` has it, with tensors in it by their values; `pickle.loads` makes them on their devices."""
    content = io.BytesIO()
    _Pickler(content, pickle.HIGHEST_PROTOCOL).dump(value)
    return content.getvalue()
