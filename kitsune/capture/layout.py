"""Where the numbers of a tensor lie, and of what kind they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorLayout:
    """Sizes, strides, dtype and device of a tensor."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLayout:
        return cls(tensor.size(), tensor.stride(), tensor.dtype, tensor.device)

    @classmethod
    def of_gradient(cls, tensor: torch.Tensor) -> TensorLayout:
        """Of a gradient of `tensor`: like it, but without gaps where elements of it may share memory."""
        return cls.of(
            torch.empty_like(tensor, memory_format=torch.contiguous_format) if may_overlap(tensor) else tensor
        )

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)

    def fit(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, copied if its strides are others."""
        return tensor if tensor.stride() == self.stride else self.empty().copy_(tensor)

    def without_memory(self) -> torch.Tensor:
        """A tensor of this kind, and of one element's memory: it stands for one in autograd's graph."""
        return torch.empty_strided(self.size, (0,) * len(self.size), dtype=self.dtype, device=self.device)


def may_overlap(tensor: torch.Tensor) -> bool:
    """Whether elements may share memory, as those of an expanded tensor or of windows do."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def cloned(tensor: torch.Tensor) -> torch.Tensor:
    """As `tensor.clone()`, laid out like `tensor` also where elements share memory or lie apart."""
    if tensor.is_contiguous():
        return tensor.clone()
    return copied(tensor) if may_overlap(tensor) else TensorLayout.of(tensor).empty().copy_(tensor)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """As `cloned`, with a copy of all the memory that `tensor` lies in."""
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    storage = tensor.untyped_storage().clone()
    return copy.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
