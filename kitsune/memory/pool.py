"""Device memory for plans: blocks in size classes that are handed out again, and arenas that plans share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

GRANULE = 512
"""Bytes; all sizes of blocks are multiples of it."""

Allocate = Callable[[int, torch.device], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Block:
    """Memory that a pool has handed out.

    Attributes:
        memory: one-dimensional, uint8, with any values; as large as the block's size class or arena.
    """

    memory: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.memory.numel()


@dataclass(frozen=True)
class PoolStatistics:
    """What a pool has done and holds, over all devices.

    Attributes:
        hits: requests that were met by memory that was there.
        misses: requests for which memory was allocated.
        held_bytes: in blocks, whether handed out or not.
        used_bytes: in blocks that are handed out; an arena counts once, however many share it.
        high_water_bytes: the most that `used_bytes` has been.
        fragmentation: the share of `used_bytes` that nobody asked for, from 0 to 1: what rounding up to size
            classes wastes. Of an arena, what the largest of those that share it leaves.
    """

    hits: int
    misses: int
    held_bytes: int
    used_bytes: int
    high_water_bytes: int
    fragmentation: float

    def __str__(self) -> str:
        held, used, most = (size / 2**20 for size in (self.held_bytes, self.used_bytes, self.high_water_bytes))
        return (
            f"{held:.1f} MiB held, {used:.1f} MiB in use, {most:.1f} MiB at most, fragmentation "
            f"{self.fragmentation:.0%}, {self.hits} hits, {self.misses} misses"
        )


def class_bytes(num_bytes: int) -> int:
    """The size class of a request: the smallest that holds it.

    Classes are the powers of two with four steps between one and the next: 2,048, 2,560, 3,072, 3,584, 4,096, 5,120
    and so on, and below them the multiples of 512. At most a fifth of a block above 2,048 bytes is unused.
    """
    granules = max(1, -(-num_bytes // GRANULE))
    step = 1 << max(0, (granules - 1).bit_length() - 3)
    return -(-granules // step) * step * GRANULE


def _allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


@dataclass(eq=False)
class _Arena:
    """Memory that several plans use, and the blocks by which they hold it."""

    memory: torch.Tensor
    blocks: set[Block]


class MemoryPool:
    """Hands out memory of any device, and takes it back to hand it out again.

    Whoever replays a plan takes its memory once, before it records the plan, and keeps it: replays use the pool not
    at all. A block that is taken while a CUDA graph is being recorded may come from that graph's own pool, so take
    none then.

    The pool does not know what streams do with its blocks. Whoever gives one back has seen to it that the work that
    uses it is over, or comes, on the device, before whatever the next owner does with it.

    It has one owner, for example a training step, and is used by one thread at a time; nothing in it is locked.

    Args:
        allocate: makes a one-dimensional uint8 tensor of so many bytes on a device.
    """

    def __init__(self, allocate: Allocate = _allocate) -> None:
        self._allocate = allocate
        self._free: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
        self._requests: dict[Block, int] = {}  # of each block that is handed out
        self._arenas: dict[torch.device, _Arena] = {}
        self._arena_of: dict[Block, _Arena] = {}
        self._hits = self._misses = 0
        self._used_bytes = self._high_water_bytes = 0

    def take(self, num_bytes: int, device: torch.device | str) -> Block:
        """A block of at least `num_bytes` bytes that nobody else has, until it is given back.

        Raises:
            ValueError: `num_bytes` is negative.
        """
        _require_size(num_bytes)
        size, device = class_bytes(num_bytes), _with_index(device)
        free = self._free.get((device, size))
        if free:
            self._hits += 1
            memory = free.pop()
        else:
            memory = self._make(size, device)
        block = Block(memory)
        self._requests[block] = num_bytes
        self._use(block.num_bytes)
        return block

    def arena(self, num_bytes: int, device: torch.device | str) -> Block:
        """A block of at least `num_bytes` bytes for a plan that never runs at the same time as the other owners of
        arenas of this device.

        All of them get the same memory, as large as the largest request so far, not rounded up to a size class. It
        never moves: a request that it is too small for gets new memory, which later requests share, while plans that
        use the old one keep it. That is freed when all of them have given it back. Until then both are held, so
        that, where memory matters more than the time to record a plan again, the owner records the older ones again
        in arenas that they take after the larger one, or asks for the largest first.

        What a plan leaves in the arena, its outputs too, lasts only until another one of them runs.

        Raises:
            ValueError: `num_bytes` is negative.
        """
        _require_size(num_bytes)
        arena = self._shared_arena(num_bytes, _with_index(device))
        if not arena.blocks:
            self._use(arena.memory.numel())
        block = Block(arena.memory)
        arena.blocks.add(block)
        self._arena_of[block] = arena
        self._requests[block] = num_bytes
        return block

    def give(self, block: Block) -> None:
        """Takes back what `take` or `arena` returned.

        Raises:
            ValueError: the block is not this pool's, or was given back already.
        """
        if self._requests.pop(block, None) is None:
            raise ValueError(f"this pool has not handed out the block of {block.num_bytes} bytes, or has it back")
        arena = self._arena_of.pop(block, None)
        if arena is not None:
            arena.blocks.remove(block)
            self._used_bytes -= 0 if arena.blocks else block.num_bytes
            return
        self._used_bytes -= block.num_bytes
        self._free.setdefault((block.memory.device, block.num_bytes), []).append(block.memory)

    def release(self) -> None:
        """Frees all memory that is not handed out. What is handed out stays with its owners."""
        self._free.clear()
        self._arenas = {device: arena for device, arena in self._arenas.items() if arena.blocks}

    def statistics(self) -> PoolStatistics:
        used_arenas = {id(arena): arena for arena in self._arena_of.values()}.values()
        asked = sum(number for block, number in self._requests.items() if block not in self._arena_of)
        asked += sum(max(self._requests[block] for block in arena.blocks) for arena in used_arenas)
        unused = sum(size * len(blocks) for (_, size), blocks in self._free.items())
        unused += sum(arena.memory.numel() for arena in self._arenas.values() if not arena.blocks)
        return PoolStatistics(
            hits=self._hits,
            misses=self._misses,
            held_bytes=self._used_bytes + unused,
            used_bytes=self._used_bytes,
            high_water_bytes=self._high_water_bytes,
            fragmentation=(self._used_bytes - asked) / self._used_bytes if self._used_bytes else 0.0,
        )

    def _shared_arena(self, num_bytes: int, device: torch.device) -> _Arena:
        """The arena of the device that new plans share, a new one where there is none or a smaller one."""
        if device in self._arenas and self._arenas[device].memory.numel() >= num_bytes:
            self._hits += 1
            return self._arenas[device]
        self._arenas.pop(device, None)  # first, so that it does not take the place of the larger one
        size = max(1, -(-num_bytes // GRANULE)) * GRANULE
        arena = self._arenas[device] = _Arena(self._make(size, device), set())
        return arena

    def _make(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        try:
            memory = self._allocate(num_bytes, device)
        except torch.OutOfMemoryError:
            self.release()  # blocks of other classes may be in the way
            memory = self._allocate(num_bytes, device)
        self._misses += 1
        return memory

    def _use(self, num_bytes: int) -> None:
        self._used_bytes += num_bytes
        self._high_water_bytes = max(self._high_water_bytes, self._used_bytes)


def _require_size(num_bytes: int) -> None:
    if num_bytes < 0:
        raise ValueError(f"a block cannot have {num_bytes} bytes")


def _with_index(device: torch.device | str) -> torch.device:
    """The device as tensors name it: `cuda` alone is the current one of several."""
    return torch.empty(0, device=device).device
