"""`kitsune::pack_bucket`: gradients in one flat tensor, ready to be summed up over processes while others are computed.

Once the values are there an event is recorded, in a CUDA graph as a node of its own: what is queued after a replay may
wait for that node alone, and begin while the rest of the graph runs ("Cross-stream Dependencies and Events" in the CUDA
C++ Programming Guide).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch

torch.library.define("kitsune::pack_bucket", "(Tensor[] grads, int[] orders, float share, int ticket) -> Tensor")


PACK_BUCKET = torch.ops.kitsune.pack_bucket.default


class Ready:
    """Tells when a bucket has been packed, on a CUDA device.

    Attributes:
        ticket: names it to the operator.
        event: recorded by the operator, each time that it runs.
    """

    def __init__(self) -> None:
        self.ticket = next(_tickets)
        self.event = torch.cuda.Event(external=True)
        _waiting[self.ticket] = self


_tickets = itertools.count(1)
_waiting: weakref.WeakValueDictionary[int, Ready] = weakref.WeakValueDictionary()


def pack_bucket(
    grads: Sequence[torch.Tensor], orders: Sequence[Sequence[int]], share: float, ready: Ready | None
) -> torch.Tensor:
    """The values of tensors one after the other, each multiplied by a number.

    Args:
        grads: at least one, all of one dtype and on one device.
        orders: for each its dimensions, from that which has the greatest stride in the bucket on.
        share: the number.
        ready: is told; None where nobody waits.

    Returns:
        A tensor of one dimension.

    Raises:
        ValueError: dtypes, devices or orders are not as above.
    """
    ticket = 0 if ready is None else ready.ticket
    first = grads[0]
    if any(grad.dtype != first.dtype or grad.device != first.device for grad in grads):
        raise ValueError("pack_bucket takes tensors of one dtype on one device")
    if any(sorted(order) != list(range(grad.dim())) for grad, order in zip(grads, orders, strict=True)):
        raise ValueError("pack_bucket takes an order of all dimensions of each tensor")
    flat = list(itertools.chain.from_iterable(orders))
    packed: torch.Tensor = PACK_BUCKET(list(grads), flat, share, ticket)
    return packed


def _fake(grads: Sequence[torch.Tensor], orders: Sequence[int], share: float, ticket: int) -> torch.Tensor:
    return grads[0].new_empty(sum(grad.numel() for grad in grads))


def _pack(grads: Sequence[torch.Tensor], orders: Sequence[int], share: float, ticket: int) -> torch.Tensor:
    left = iter(orders)
    flat = [grad.permute(list(itertools.islice(left, grad.dim()))).reshape(-1) for grad in grads]
    packed = torch.cat(flat).mul_(share)
    if (ready := _waiting.get(ticket)) is not None:
        ready.event.record(torch.cuda.current_stream(packed.device))
    return packed


torch.library.register_fake("kitsune::pack_bucket", _fake)
torch.library.impl("kitsune::pack_bucket", "CompositeExplicitAutograd", _pack)  # of torch's own operators
