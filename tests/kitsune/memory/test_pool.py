"""The memory pool, by what it asks its allocator for."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kitsune.memory.planner import plan_memory
from kitsune.memory.pool import GRANULE, Block, MemoryPool, PoolStatistics, class_bytes
from kitsune.memory.views import place
from tests.kitsune.memory.graphs import in_order, training_step

CPU = torch.device("cpu")


class Allocator:
    """Counts what it is asked for, and what of it still exists; at most `limit` bytes at once."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.limit, self.calls, self.most_bytes = limit, 0, 0
        self._made: list[weakref.ref[torch.Tensor]] = []

    def __call__(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        if self.held_bytes + num_bytes > self.limit:
            raise torch.OutOfMemoryError(f"no {num_bytes} bytes left")
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.calls += 1
        self.most_bytes = max(self.most_bytes, self.held_bytes + num_bytes)
        self._made.append(weakref.ref(memory))
        return memory

    @property
    def held_bytes(self) -> int:
        return sum(memory.numel() for made in self._made if (memory := made()) is not None)


@given(st.integers(0, 1 << 40))
def test_a_size_class_is_the_smallest_that_fits(num_bytes: int) -> None:
    classes = sorted({512, 1024, 1536, *(step << power for power in range(9, 42) for step in (4, 5, 6, 7))})
    assert class_bytes(num_bytes) == next(size for size in classes if size >= num_bytes)


@given(st.integers(2048, 1 << 40))
def test_a_fifth_of_a_block_is_wasted_at_most(num_bytes: int) -> None:
    size = class_bytes(num_bytes)
    assert size % GRANULE == 0
    assert 5 * (size - num_bytes) <= size


def test_a_block_is_handed_out_again() -> None:
    allocator = Allocator()
    pool = MemoryPool(allocator)
    block = pool.take(2100, CPU)
    assert (block.num_bytes, block.memory.dtype, block.memory.shape) == (2560, torch.uint8, (2560,))
    pool.give(block)
    again = pool.take(2500, "cpu")
    assert again.memory.data_ptr() == block.memory.data_ptr()
    other = pool.take(2500, CPU)
    assert other.memory.data_ptr() != block.memory.data_ptr()
    assert allocator.calls == 2


def test_statistics_count_what_happened() -> None:
    pool = MemoryPool()
    assert pool.statistics() == PoolStatistics(0, 0, 0, 0, 0, 0.0)
    first, second = pool.take(2304, CPU), pool.take(512, CPU)
    assert pool.statistics() == PoolStatistics(0, 2, 3072, 3072, 3072, 256 / 3072)
    pool.give(first)
    assert pool.statistics() == PoolStatistics(0, 2, 3072, 512, 3072, 0.0)
    pool.take(2560, CPU)
    pool.take(1, CPU)
    assert pool.statistics() == PoolStatistics(1, 3, 3584, 3584, 3584, pytest.approx(511 / 3584))
    pool.give(second)
    pool.release()
    assert pool.statistics() == PoolStatistics(1, 3, 3072, 3072, 3584, pytest.approx(511 / 3072))


@given(st.lists(st.integers(0, 20_000), max_size=40), st.integers(0, 10**6))
def test_blocks_in_use_never_overlap_and_the_books_are_right(sizes: list[int], seed: int) -> None:
    chance = random.Random(seed)
    allocator = Allocator()
    pool = MemoryPool(allocator)
    used: list[tuple[Block, int]] = []
    high_water = 0
    for request, size in enumerate(sizes):
        used.append((pool.take(size, CPU), size))
        high_water = max(high_water, sum(block.num_bytes for block, _ in used))
        while used and chance.random() < 0.4:
            pool.give(used.pop(chance.randrange(len(used)))[0])
        statistics = pool.statistics()
        taken = sum(block.num_bytes for block, _ in used)
        asked = sum(number for _, number in used)
        assert (statistics.hits + statistics.misses, statistics.misses) == (request + 1, allocator.calls)
        assert (statistics.used_bytes, statistics.high_water_bytes) == (taken, high_water)
        assert statistics.held_bytes == allocator.held_bytes
        assert statistics.fragmentation == pytest.approx(1 - asked / taken if taken else 0.0)
    extents = sorted((block.memory.data_ptr(), block.num_bytes) for block, _ in used)
    assert all(begin + size <= extents[k + 1][0] for k, (begin, size) in enumerate(extents[:-1]))


def test_a_block_is_given_back_once_and_to_its_own_pool() -> None:
    pool = MemoryPool()
    block = pool.take(10, CPU)
    with pytest.raises(ValueError, match="512 bytes"):
        MemoryPool().give(block)
    pool.give(block)
    with pytest.raises(ValueError, match="has it back"):
        pool.give(block)
    arena = pool.arena(10, CPU)
    pool.give(arena)
    with pytest.raises(ValueError, match="has it back"):
        pool.give(arena)


def test_a_size_is_not_negative() -> None:
    with pytest.raises(ValueError, match="-1"):
        MemoryPool().take(-1, CPU)
    with pytest.raises(ValueError, match="-1"):
        MemoryPool().arena(-1, CPU)


def test_devices_do_not_share() -> None:
    pool = MemoryPool()
    pool.give(pool.take(100, "meta"))
    assert pool.take(100, CPU).memory.device == CPU
    assert pool.arena(100, "meta").memory.device != pool.arena(100, CPU).memory.device
    assert pool.statistics().hits == 0


def test_release_frees_what_is_not_handed_out() -> None:
    allocator = Allocator()
    pool = MemoryPool(allocator)
    kept, given = pool.take(512, CPU), pool.take(1024, CPU)
    arena = pool.arena(2048, CPU)
    pool.give(given)
    del given
    pool.release()
    assert allocator.held_bytes == pool.statistics().held_bytes == 512 + 2048
    assert pool.arena(2048, CPU).memory is arena.memory
    pool.give(kept)
    del kept
    pool.release()
    assert allocator.held_bytes == 2048


def test_plans_share_the_arena_of_the_largest() -> None:
    allocator = Allocator()
    pool = MemoryPool(allocator)
    large = pool.arena(5000, CPU)
    small, equal = pool.arena(100, CPU), pool.arena(5120, CPU)
    assert large.num_bytes == 5120
    assert large.memory is small.memory is equal.memory
    assert large is not small
    assert pool.statistics() == PoolStatistics(2, 1, 5120, 5120, 5120, 0.0)
    pool.give(equal)
    assert pool.statistics().fragmentation == 120 / 5120
    pool.give(small)
    pool.give(large)
    assert pool.statistics() == PoolStatistics(2, 1, 5120, 0, 5120, 0.0)
    assert pool.arena(5000, CPU).memory is large.memory


def test_a_larger_arena_leaves_the_older_to_its_plans() -> None:
    allocator = Allocator()
    pool = MemoryPool(allocator)
    old, older = pool.arena(1024, CPU), pool.arena(512, CPU)
    old.memory.fill_(7)
    address = old.memory.data_ptr()
    new = pool.arena(4096, CPU)
    assert new.memory.data_ptr() != address
    assert (old.memory.data_ptr(), old.memory.unique().tolist()) == (address, [7])
    assert pool.arena(512, CPU).memory is new.memory
    assert pool.statistics().held_bytes == allocator.held_bytes == 1024 + 4096
    pool.give(old)
    assert pool.statistics().held_bytes == 1024 + 4096
    pool.give(older)
    del old, older
    assert pool.statistics().held_bytes == allocator.held_bytes == 4096


def test_an_arena_that_nobody_uses_makes_way_for_a_larger_one() -> None:
    allocator = Allocator()
    pool = MemoryPool(allocator)
    pool.give(pool.arena(1024, CPU))
    assert pool.arena(4096, CPU).num_bytes == 4096
    assert allocator.most_bytes == 4096


def test_unused_blocks_make_way_when_memory_runs_out() -> None:
    allocator = Allocator(limit=4096)
    pool = MemoryPool(allocator)
    pool.give(pool.take(3072, CPU))
    block = pool.take(2048, CPU)
    assert pool.statistics().held_bytes == allocator.held_bytes == 2048
    with pytest.raises(torch.OutOfMemoryError, match="2560"):
        pool.take(2560, CPU)
    assert pool.statistics() == PoolStatistics(0, 2, 2048, 2048, 3072, 0.0)
    pool.give(block)


def test_replays_allocate_nothing() -> None:
    allocator = Allocator()
    pool = MemoryPool(allocator)
    graphs = [training_step(layers) for layers in (6, 3)]
    plans = [plan_memory(graph, in_order(graph)) for graph in graphs]
    arenas = [pool.arena(plan.arena_bytes, CPU) for plan in plans]
    placed = [
        [
            place(arena, offset, (value.num_bytes,), (1,), torch.uint8)
            for value, offset in zip(graph.values, plan.offsets, strict=True)
            if offset is not None
        ]
        for graph, plan, arena in zip(graphs, plans, arenas, strict=True)
    ]
    before = pool.statistics()
    for _ in range(3):
        for values in placed:
            for value in values:
                value.fill_(1)
    assert allocator.calls == 1
    assert pool.statistics() == before
    assert allocator.held_bytes == max(plan.arena_bytes for plan in plans)


def test_a_dropped_pool_leaves_no_memory() -> None:
    allocator = Allocator()
    pool = MemoryPool(allocator)
    pool.give(pool.take(512, CPU))
    pool.arena(512, CPU)
    pool.arena(5120, CPU)
    del pool
    gc.collect()
    assert allocator.held_bytes == 0


@pytest.mark.gpu
def test_a_device_without_index_is_the_current_one() -> None:
    pool = MemoryPool()
    block = pool.take(1000, "cuda")
    pool.give(block)
    again = pool.take(1000, torch.device("cuda", torch.cuda.current_device()))
    assert again.memory.data_ptr() == block.memory.data_ptr()
    assert again.memory.data_ptr() % GRANULE == 0
