"""Both ways to copy bytes: what they ask of a tensor, in what order they give up, and that they let everything go.

What they copy of real tensors is looked at with the copier that uses them.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from kitsune.native.build import plain_copy_type
from kitsune.native.plain_copy import COPY, PlainCopy, PythonPlainCopy

STREAM = 7
Kind = Callable[..., PlainCopy]


class Device:
    def __init__(self, index: int) -> None:
        self.index = index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.index == self.index

    __hash__ = None  # type: ignore[assignment]


class Bytes:
    """Answers what a tensor of six numbers would."""

    def __init__(self, text: bytes = b"abcdef") -> None:
        self.memory = ctypes.create_string_buffer(text, 6)
        self.dtype: Any = float
        self.shape, self.nbytes, self.device = (2, 3), 6, Device(1)
        self.strides, self.is_negative, self.has_memory = (3, 1), False, True

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def is_neg(self) -> bool:
        return self.is_negative

    def data_ptr(self) -> int:
        return ctypes.addressof(self.memory) if self.has_memory else 0


class Copies:
    """A driver that notes the streams it copies on.

    Attributes:
        status: what it returns.
    """

    def __init__(self) -> None:
        self.streams: list[int | None] = []
        self.status = 0
        self._function = COPY(self._copy)
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value or 0

    def _copy(self, to: int, address: int, num_bytes: int, stream: int | None) -> int:
        self.streams.append(stream)
        if self.status == 0:
            ctypes.memmove(to, address, num_bytes)
        return self.status


@pytest.fixture(params=["python", "c"])
def kind(request: pytest.FixtureRequest) -> Kind:
    if request.param == "python":
        return PythonPlainCopy
    if plain_copy_type() is PythonPlainCopy:
        pytest.skip("there is no C compiler")
    return plain_copy_type()


@pytest.fixture
def copies() -> Copies:
    return Copies()


def test_bytes_are_copied(kind: Kind, copies: Copies) -> None:
    memory = Bytes(b"------")
    copy = kind(memory, copies.address, lambda: 1, lambda: STREAM)
    for text in (b"abcdef", b"ghijkl"):
        assert copy(Bytes(text)) is True
        assert memory.memory.raw == text
    assert copies.streams == [STREAM, STREAM]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", int),
        ("strides", (1, 2)),
        ("shape", (3, 2)),
        ("device", Device(0)),
        ("is_negative", True),
        ("has_memory", False),
    ],
)
def test_what_is_otherwise_is_left_alone(kind: Kind, copies: Copies, name: str, value: object) -> None:
    memory, tensor = Bytes(b"------"), Bytes()
    copy = kind(memory, copies.address, lambda: 1, lambda: STREAM)
    setattr(tensor, name, value)
    assert copy(tensor) is False
    assert copies.streams == []


def test_another_current_device(kind: Kind, copies: Copies) -> None:
    assert kind(Bytes(), copies.address, lambda: 0, lambda: STREAM)(Bytes()) is False
    assert kind(Bytes(), copies.address, lambda: None, lambda: STREAM)(Bytes()) is False
    assert copies.streams == []


def test_a_driver_that_refuses(kind: Kind, copies: Copies) -> None:
    memory = Bytes(b"------")
    copies.status = 1
    assert kind(memory, copies.address, lambda: 1, lambda: STREAM)(Bytes()) is False
    assert memory.memory.raw == b"------"


@pytest.mark.parametrize("name", ["dtype", "shape", "device", "stride", "is_neg", "data_ptr"])
def test_what_a_tensor_raises_is_raised(kind: Kind, copies: Copies, name: str) -> None:
    class Raising(Bytes):
        def __getattribute__(self, asked: str) -> Any:
            if asked == name and armed:
                raise KeyError(name)
            return super().__getattribute__(asked)

    armed = False
    copy, tensor = kind(Bytes(), copies.address, lambda: 1, lambda: STREAM), Raising()
    armed = True
    with pytest.raises(KeyError, match=name):
        copy(tensor)
    assert copies.streams == []


def test_what_readers_raise_is_raised(kind: Kind, copies: Copies) -> None:
    def fail() -> int:
        raise OSError("gone")

    for readers in ((fail, lambda: STREAM), (lambda: 1, fail)):
        with pytest.raises(OSError, match="gone"):
            kind(Bytes(), copies.address, *readers)(Bytes())
    assert copies.streams == []


def test_wrong_calls(kind: Kind, copies: Copies) -> None:
    copy: Any = kind(Bytes(), copies.address, lambda: 1, lambda: STREAM)
    for arguments in ((), (Bytes(), Bytes())):
        with pytest.raises(TypeError):
            copy(*arguments)
    with pytest.raises(AttributeError):
        kind(object(), copies.address, lambda: 1, lambda: STREAM)


def test_nothing_is_held(kind: Kind, copies: Copies) -> None:
    memory, tensor = Bytes(), Bytes()
    copy = kind(memory, copies.address, lambda: 1, lambda: STREAM)
    parts = (tensor, tensor.dtype, tensor.shape, tensor.strides, tensor.device)
    before = list(map(sys.getrefcount, parts))
    for _ in range(100):
        assert copy(tensor)
        tensor.dtype = int
        assert not copy(tensor)
        tensor.dtype = float
    assert list(map(sys.getrefcount, parts)) == before


def test_cycles_are_collected(kind: Kind, copies: Copies) -> None:
    class Holder:
        copy: PlainCopy

        def stream(self) -> int:
            return STREAM

    holder = Holder()
    holder.copy = kind(Bytes(), copies.address, lambda: 1, holder.stream)
    reference = weakref.ref(holder)
    del holder
    gc.collect()
    assert reference() is None
