"""Tensors in blocks."""

import pytest
import torch

from kitsune.memory.pool import Block, MemoryPool
from kitsune.memory.views import place


@pytest.fixture
def block() -> Block:
    return MemoryPool().take(2048, "cpu")


def address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
def test_a_tensor_lies_where_it_was_placed(block: Block, dtype: torch.dtype) -> None:
    tensor = place(block, 512, (3, 4), (4, 1), dtype)
    assert (tensor.dtype, tensor.shape, tensor.stride()) == (dtype, (3, 4), (4, 1))
    assert address(tensor) == address(block.memory) + 512
    block.memory.zero_()
    tensor.fill_(1)
    touched = block.memory.nonzero()
    assert 512 <= int(touched.min()) <= int(touched.max()) < 512 + tensor.nbytes
    assert torch.equal(tensor, torch.ones(3, 4, dtype=dtype))


def test_strides_are_kept(block: Block) -> None:
    expected = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tensor = place(block, 0, expected.shape, expected.stride(), torch.float32)
    assert tensor.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(tensor.copy_(expected), expected)
    expanded = place(block, 0, (7, 3), (0, 1), torch.float32)
    assert expanded.stride() == (0, 1)


def test_a_tensor_may_be_a_scalar_empty_or_the_whole_block(block: Block) -> None:
    assert place(block, 2044, (), (), torch.float32).shape == ()
    assert place(block, 2048, (0, 3), (3, 1), torch.float32).numel() == 0
    assert place(block, 0, (256,), (1,), torch.float64).nbytes == block.num_bytes


def test_writing_to_one_tensor_is_no_change_of_another(block: Block) -> None:
    first, second = (place(block, offset, (4,), (1,), torch.float32) for offset in (0, 512))
    version = second._version
    first.zero_()
    assert second._version == version
    assert first._version > 0
    assert not first._is_view()


def test_a_tensor_keeps_the_memory() -> None:
    pool = MemoryPool()
    tensor = place(pool.take(512, "cpu"), 0, (4,), (1,), torch.float32)
    del pool
    assert tensor.fill_(3).tolist() == [3, 3, 3, 3]


def test_a_block_may_begin_inside_its_storage() -> None:
    memory = torch.zeros(2048, dtype=torch.uint8)
    tensor = place(Block(memory[512:1024]), 256, (2,), (1,), torch.int32)
    assert address(tensor) == address(memory) + 768


@pytest.mark.parametrize(
    ("offset", "size", "stride", "message"),
    [
        (2, (1,), (1,), "offset 2 is no multiple of 4"),
        (-4, (1,), (1,), "offset -4"),
        (2048, (1,), (1,), "from byte 2048 to 2052 is not inside a block of 2048 bytes"),
        (0, (2, 2), (511, 1), "to 2052"),
        (0, (2, 2), (1,), "do not describe a tensor"),
        (0, (2,), (-1,), "do not describe a tensor"),
        (0, (-2,), (1,), "do not describe a tensor"),
    ],
)
def test_what_does_not_fit_is_refused(
    block: Block, offset: int, size: tuple[int, ...], stride: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        place(block, offset, size, stride, torch.float32)
