"""What is made on the host of constants and used on a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, fx, nn

from kitsune.capture.trace import trace
from kitsune.errors import RefusedError
from tests.kitsune.training import FORMS, batch, compare, sgd

MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "copied": lambda x: x + torch.arange(4.0).to(x.device),
    "copied in the dtype of another": lambda x: x * torch.tensor([1, 2, 3, 4]).to(x),
    "a number": lambda x: x * torch.tensor(2.0).to(x.device),
    "computed": lambda x: x + torch.full((4, 4), 2.0).triu(1).sum(0).to(x.device),
    "written to before": lambda x: x + torch.zeros(4).index_fill_(0, torch.tensor([1, 2]), 3.0).to(x.device),
    "written to afterwards": lambda x: x + torch.ones(4).to(x.device).mul_(3.0),
    "chosen": lambda x: x[:, torch.tensor([3, 2, 0, 1])],
    "assigned": lambda x: x.clone().index_put_((torch.tensor([0, 1]),), torch.tensor(4.0)),
}


def written_between(x: Tensor) -> Tensor:
    """The first copy is of the value as it was."""
    made = torch.ones(4)
    before = made.to(x.device)
    made.add_(1)
    return x * before + made.to(x.device)


def assigned_a_row(x: Tensor) -> Tensor:
    y = x.clone()
    y[0] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return y


MADE |= {"written to between": written_between, "assigned a row": assigned_a_row}


def constants(graph: fx.GraphModule) -> dict[str, Tensor]:
    return {node.target: getattr(graph, node.target) for node in graph.graph.find_nodes(op="get_attr")}


@pytest.mark.parametrize("kind", MADE)
def test_the_device_takes_it_from_where_it_lies(kind: str) -> None:
    graph = trace(lambda x: [MADE[kind](x)], [torch.ones(3, 4, device="meta")])
    devices = {node.meta["val"].device.type for node in graph.graph.nodes if node.op == "call_function"}
    assert devices == {"meta"}
    assert {constant.device.type for constant in constants(graph).values()} == {"meta"}
    assert graph(torch.ones(3, 4, device="meta"))[0].shape == (3, 4)


def test_numbers_that_kernels_take_stay_on_the_host() -> None:
    graph = trace(lambda x: [x * torch.tensor(2.0).mul_(3.0)], [torch.ones(3, device="meta")])
    (constant,) = constants(graph).values()
    assert constant.device.type == "cpu"
    assert "mul_" in graph.code


def test_random_numbers_of_the_host_are_refused() -> None:
    with pytest.raises(RefusedError, match="several devices"):
        trace(lambda x: [x + torch.rand(3).to(x.device)], [torch.ones(3, device="meta")])


def test_operators_of_others_do_not_run() -> None:
    ran: list[int] = []

    @torch.library.custom_op("test_host_constants::noting", mutates_args=())
    def noting(size: int) -> Tensor:
        ran.append(size)
        return torch.ones(size)

    noting.register_fake(lambda size: torch.empty(size))
    with pytest.raises(RefusedError, match="may do anything on the host"):
        trace(lambda x: [x + noting(3).to(x.device)], [torch.ones(3, device="meta")])
    assert not ran


def test_a_graph_on_the_host_stays_as_it_is() -> None:
    graph = trace(lambda x: [x + torch.arange(3.0).to(x.device)], [torch.ones(3)])
    assert "arange" in graph.code


class Making(nn.Module):
    """A layer around what `MADE` has."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.make(self.first(x)))
        return output


@pytest.mark.gpu
@pytest.mark.support(
    "Models", "masks, positions, indices that are made on the host and copied to the device", "replayed"
)
@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("form", FORMS)
def test_training_on_a_gpu(form: str, kind: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Making(MADE[kind]).to("cuda")
        return model, sgd(model, lr=0.01)

    compare(form, build, batches=partial(batch, device="cuda"), rtol=1e-4, atol=1e-5)
