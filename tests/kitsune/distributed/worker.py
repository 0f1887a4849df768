"""One of several processes that train a model together: `python -m tests.kitsune.distributed.worker RANK SIZE FOLDER`.

It runs every scenario in all forms, by plain PyTorch and with Kitsune, from equal seeds, and saves what they leave
behind as `FOLDER/RANK.pt`: for each form and scenario the list of tensors, and the status as a dictionary.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import kitsune
from kitsune.errors import Refusal, RefusedError
from kitsune.loop.split_step import SplitStep
from tests.kitsune import static_memory
from tests.kitsune.training import Net, batch

STEPS = 12
SECONDS = 60  # that a collective may wait for the others

FORMS = ("plain", "drop_in", "deferred")
"""The last one with `defer_loss`."""

SCENARIOS: dict[str, Callable[[Run], None]] = {}


class Run:
    """A training in one of the forms, on one of the ranks."""

    def __init__(self, scenario: str, rank: int, device: torch.device, form: str) -> None:
        self.scenario, self.rank, self.device, self.form = scenario, rank, device, form
        self.accelerated = form != "plain"
        self.seen: list[Tensor] = []
        self.model: nn.Module = nn.Module()
        self.optimizer: Any = None

    def build(self, net: Callable[[], nn.Module] = Net, *, wrap: bool = True, **options: Any) -> None:
        self.build_with(lambda inner: DistributedDataParallel(inner, **options) if wrap else inner, net)

    def build_with(self, wrap: Callable[[nn.Module], nn.Module], net: Callable[[], nn.Module] = Net) -> None:
        torch.manual_seed(2)
        self.model = wrap(net().to(self.device))
        self.optimizer = self.optimizer_of(self.model)

    def optimizer_of(self, model: nn.Module) -> Any:
        if self.scenario == "sparse gradients":
            plain: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        else:
            plain = torch.optim.Adam(model.parameters(), lr=0.05, fused=True)
        return kitsune.KitsuneOptimizer(plain, **self.options()) if self.accelerated else plain

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"mode": "replay", "defer_loss": self.form == "deferred"}
        if self.scenario == "verified":
            options["verify"] = 2
        if self.scenario == "a part of what is wrapped":
            options["model"] = self.model.get_submodule("module.first")
        if self.scenario == "scaled losses in float16":
            options |= {"enable_amp": True, "amp_dtype": torch.float16}
        return options

    def batch(self, index: int, size: int = 6) -> tuple[Tensor, Tensor]:
        """Each rank has its own."""
        (x, y), _ = batch(10 * index + self.rank, size=size)
        return x.to(self.device), y.to(self.device)

    def loss(self, index: int, size: int = 6) -> Tensor:
        x, y = self.batch(index, size)
        return functional.cross_entropy(self.model(x), y)

    def step(self, index: int, size: int = 6) -> None:
        self.optimizer.zero_grad()
        loss = self.loss(index, size)
        loss.backward()
        self.note(loss)
        self.optimizer.step()

    def note(self, *tensors: Tensor) -> None:
        """Remembers tensors, and all gradients."""
        grads = [param.grad for param in self.model.parameters() if param.grad is not None]
        self.seen += [_local(tensor).clone() for tensor in (*tensors, *grads)]

    def end(self) -> None:
        self.seen += [_local(tensor).clone() for tensor in self.model.state_dict().values()]


def _local(tensor: Tensor) -> Tensor:
    """What this rank has of it."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _normed() -> nn.Module:
    """Without a bias before the norm: its gradient is nothing but rounding, by which Adam makes whole steps."""
    model = Net(batch_norm=True)
    model.first = nn.Linear(4, 8, bias=False)
    return model


class Signs(nn.Module):
    """Looks up which numbers are positive; with sparse gradients on a CPU, where they can be sent."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(2, 8, sparse=device.type == "cpu"), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table((x > 0).long()).mean(1))


def scenario(function: Callable[[Run], None]) -> Callable[[Run], None]:
    SCENARIOS[function.__name__.replace("_", " ")] = function
    return function


@scenario
def plainly(run: Run) -> None:
    run.build()
    for index in range(STEPS):
        run.step(index)


@scenario
def verified(run: Run) -> None:
    plainly(run)


@scenario
def a_part_of_what_is_wrapped(run: Run) -> None:
    plainly(run)


@scenario
def sparse_gradients(run: Run) -> None:
    run.build(lambda: Signs(run.device))
    for index in range(STEPS):
        run.step(index)


@scenario
def gradients_in_buckets(run: Run) -> None:
    run.build(gradient_as_bucket_view=True, bucket_cap_mb=1e-4)
    for index in range(STEPS):
        run.step(index)


@scenario
def gradients_sent_during_the_backward_pass(run: Run) -> None:
    """Those of the last layer are on their way when that of the first one arrives."""
    run.build(bucket_cap_mb=1e-4)
    assert isinstance(run.model, DistributedDataParallel)
    sent: list[int] = []

    def send(group: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        sent.append(bucket.index())
        return allreduce_hook(dist.group.WORLD, bucket)

    send.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}  # it wants no strings
    run.model.register_comm_hook(None, send)
    first = run.model.module.get_submodule("first")
    assert isinstance(first.weight, nn.Parameter)
    first.weight.register_hook(lambda grad: run.seen.append(torch.tensor([0 in sent, len(sent)])))
    for index in range(STEPS):
        sent.clear()
        run.step(index)


@scenario
def gradients_sent_by_hooks(run: Run) -> None:
    """In one order everywhere, also where a rank has a batch of another shape."""

    def send(param: Tensor) -> None:
        assert param.grad is not None
        dist.all_reduce(param.grad)

    run.build(wrap=False)
    for param in run.model.parameters():
        param.register_post_accumulate_grad_hook(send)
    for index in range(STEPS):
        run.step(index, size=4 if run.rank == 1 and index in (5, 6, 9) else 6)


@scenario
def batch_norm_with_buffers_of_the_first_rank(run: Run) -> None:
    run.build(_normed)
    for index in range(STEPS):
        run.step(index)


@scenario
def compiled_inside(run: Run) -> None:
    def net() -> nn.Module:
        model: nn.Module = torch.compile(Net(), backend="eager")
        return model

    run.build(net)
    for index in range(STEPS):
        run.step(index)


@scenario
def scaled_losses_in_float16(run: Run) -> None:
    """A loss overflows on one rank; both leave out the update."""
    run.build()
    kind = run.device.type
    scaler = torch.amp.GradScaler(kind, enabled=not run.accelerated)
    for index in range(STEPS):
        run.optimizer.zero_grad()
        x, y = run.batch(index)
        with torch.autocast(kind, dtype=torch.float16, enabled=not run.accelerated):
            output = run.model(x)
        loss = functional.cross_entropy(output.float(), y)
        if run.rank == 1 and index == 6:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.unscale_(run.optimizer)
        run.note(loss)
        scaler.step(run.optimizer)
        scaler.update()
    scale = run.optimizer.loss_scale if run.accelerated else scaler
    run.note(torch.tensor(scale.get_scale()))


@scenario
def accumulation_without_reduction(run: Run) -> None:
    run.build()
    assert isinstance(run.model, DistributedDataParallel)
    for index in range(STEPS):
        run.optimizer.zero_grad()
        for part in range(3):
            with run.model.no_sync() if part < 2 else nullcontext():
                loss = run.loss(3 * index + part)
                (loss / 3).backward()
                run.note(loss)
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
        run.optimizer.step()


@scenario
def accumulation_into_gradients_that_stay(run: Run) -> None:
    run.build()
    assert isinstance(run.model, DistributedDataParallel)
    for index in range(STEPS):
        run.optimizer.zero_grad(set_to_none=False)
        with run.model.no_sync():
            run.loss(2 * index).backward()
        run.loss(2 * index + 1).backward()
        run.note()
        run.optimizer.step()


@scenario
def gradients_that_are_kept(run: Run) -> None:
    run.build()
    for index in range(STEPS):
        run.step(index)
        if index % 3 < 2:
            run.seen += [param.grad for param in run.model.parameters() if param.grad is not None]


@scenario
def scaled_by_a_gradient_scaler(run: Run) -> None:
    """A loss overflows on one rank; both leave out the update."""
    run.build()
    scaler = torch.amp.GradScaler(run.device.type, init_scale=64.0, growth_interval=3)
    for index in range(STEPS):
        run.optimizer.zero_grad()
        loss = run.loss(index)
        if run.rank == 1 and index == 6:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        run.note(loss)
        scaler.step(run.optimizer)
        scaler.update()
    run.note(torch.tensor(scaler.get_scale()))


@scenario
def a_backward_pass_for_each_of_two_calls(run: Run) -> None:
    """The gradients of the first one are reduced, those of the second one are added to them as they are."""
    run.build()
    for index in range(STEPS):
        if index % 4 < 2:
            run.step(index)
            continue
        run.optimizer.zero_grad()
        first, second = run.loss(index), run.loss(100 + index)
        first.backward()
        run.note(first)
        second.backward()
        run.note(second)
        run.optimizer.step()


@scenario
def calls_without_a_backward_pass(run: Run) -> None:
    """The next gradients are reduced instead, whosever they are."""
    run.build()
    assert isinstance(run.model, DistributedDataParallel)
    for index in range(STEPS):
        run.optimizer.zero_grad()
        if index % 3 == 2:
            run.note(run.loss(100 + index))
        with run.model.no_sync() if index % 3 else nullcontext():
            loss = run.loss(index)
            loss.backward()
        run.note(loss)
        if index % 3 == 0:
            (other,) = torch.autograd.grad(run.loss(200 + index), [run.model.module.get_parameter("first.weight")])
            run.note(other)
        if index % 6 == 5:
            run.model.module(run.batch(index)[0]).sum().backward()  # not called by the wrapper
            run.note()
        run.optimizer.step()


@scenario
def two_models_in_one_loss(run: Run) -> None:
    """Their reducers send in one order, also where a rank has another batch."""
    run.build(lambda: nn.Linear(4, 3))
    other = DistributedDataParallel(nn.Linear(4, 3).to(run.device))
    optimizer = run.optimizer_of(other)
    for index in range(STEPS):
        x, y = run.batch(index, size=4 if run.rank == 1 and index % 4 == 3 else 6)
        run.optimizer.zero_grad()
        optimizer.zero_grad()
        first = functional.cross_entropy(run.model(x), y)
        second = functional.mse_loss(other(x), torch.ones_like(x[:, :3]))
        if index % 4 > 1:
            (second + first).backward()
        else:
            first.backward()
            second.backward()
        run.note(first, second, *(param.grad for param in other.parameters() if param.grad is not None))
        run.optimizer.step()
        optimizer.step()


@scenario
def another_optimizer_in_between(run: Run) -> None:
    """After a call without a backward pass, so that the next gradients are reduced; then there is none any more."""
    run.build()
    assert isinstance(run.model, DistributedDataParallel)
    for index in range(STEPS):
        run.optimizer.zero_grad()
        if index % 4 == 3:
            run.loss(100 + index)
            run.optimizer = None if index == 7 else run.optimizer_of(run.model)
            gc.collect()
            run.optimizer = run.optimizer or torch.optim.SGD(run.model.parameters(), lr=0.05)
        with run.model.no_sync() if index % 4 in (0, 3) else nullcontext():
            loss = run.loss(index)
            loss.backward()
        run.note(loss)
        run.optimizer.step()
        if index == 8:
            run.optimizer = run.optimizer_of(run.model)


@scenario
def hooks_that_raise(run: Run) -> None:
    """The gradients of a later backward pass are reduced in place of those that did not come."""
    run.build()
    assert isinstance(run.model, DistributedDataParallel)
    for index in range(STEPS):
        run.optimizer.zero_grad()
        if index % 4 == 3:
            handles = [param.register_hook(_raise) for param in run.model.parameters()]
            with pytest.raises(ValueError, match="no good"):
                run.loss(100 + index).backward()
            for handle in handles:
                handle.remove()
            run.optimizer.zero_grad()
            with run.model.no_sync():
                run.loss(200 + index).backward()
            run.note()
        loss = run.loss(index)
        loss.backward()
        run.note(loss)
        run.optimizer.step()


def _raise(_grad: Tensor) -> None:
    raise ValueError("no good")


@scenario
def validation_between(run: Run) -> None:
    run.build(_normed)
    for index in range(STEPS):
        run.step(index)
        if index % 4 == 3:
            run.model.eval()
            with torch.no_grad():
                run.note(run.loss(100 + index))
            run.model.train()


@scenario
def another_shape_on_one_rank(run: Run) -> None:
    run.build()
    for index in range(STEPS):
        run.step(index, size=4 if run.rank == 1 and index in (5, 6, 9) else 6)


@scenario
def a_hook_on_one_rank(run: Run) -> None:
    run.build()
    assert isinstance(run.model, DistributedDataParallel)
    for index in range(STEPS):
        if run.rank == 0 and index == 5:
            handle = run.model.module.register_forward_hook(lambda module, args, output: output * 2)
        if run.rank == 0 and index == 9:
            handle.remove()
        run.step(index)


@scenario
def out_of_memory_on_one_rank(run: Run) -> None:
    def record(*_: object) -> None:
        raise RefusedError(Refusal("there is too little device memory to capture the step"))

    run.build()
    with pytest.MonkeyPatch.context() as patch:
        if run.rank == 1:
            patch.setattr(SplitStep, "_record", record)
        for index in range(STEPS):
            run.step(index)


@scenario
def slower_on_one_rank(run: Run) -> None:
    """There the loop runs eagerly from the sixth step on."""
    run.build()
    for index in range(STEPS):
        if run.accelerated and run.rank == 0 and index == 6:
            run.optimizer._loop._latest.chooser.refuse(Refusal("replay was measured no faster than eager"))
        run.step(index)


@scenario
def an_error_on_all_ranks(run: Run) -> None:
    run.build()
    for index in range(STEPS):
        if index == 6:
            with pytest.raises(RuntimeError):
                run.model(torch.zeros(2, 3, device=run.device))
        run.step(index)


@scenario
def uneven_inputs(run: Run) -> None:
    run.build()
    assert isinstance(run.model, DistributedDataParallel)
    with run.model.join():
        for index in range(STEPS - 2 * run.rank):
            run.step(index)


@scenario
def wrapped_after_some_steps(run: Run) -> None:
    """It may look at autograd's graph, in which a replay is one node."""
    run.build(wrap=False)
    for index in range(5):
        run.step(index)
    run.model = DistributedDataParallel(run.model, find_unused_parameters=True)
    for index in range(5, STEPS):
        run.step(index)


@scenario
def wrapped_once_more(run: Run) -> None:
    run.build(lambda: nn.Sequential(Net()))
    for index in range(6):
        run.step(index)
    assert isinstance(run.model, DistributedDataParallel)
    inner = run.model.module
    run.model = nn.Module()
    gc.collect()
    run.model = DistributedDataParallel(inner)
    for index in range(6, STEPS):
        run.step(index)


@scenario
def sharded_parameters(run: Run) -> None:
    mesh = init_device_mesh(run.device.type, (dist.get_world_size(),))
    run.build_with(partial(fully_shard, mesh=mesh))
    for index in range(STEPS):
        run.step(index)


@scenario
def flat_sharded_parameters(run: Run) -> None:
    run.build_with(partial(FullyShardedDataParallel, device_id=run.device, use_orig_params=True))
    for index in range(STEPS):
        run.step(index)


@scenario
def unused_parameters_are_looked_for(run: Run) -> None:
    run.build(find_unused_parameters=True)
    for index in range(STEPS):
        run.step(index)


@scenario
def a_static_graph(run: Run) -> None:
    run.build(static_graph=True)
    for index in range(STEPS):
        run.step(index)


@scenario
def gradients_sent_late(run: Run) -> None:
    """Those of the last layer, at once, when that of the first one arrives."""

    def wrap(net: nn.Module) -> nn.Module:
        late = [(f"last.{name}", param) for name, param in net.get_submodule("last").named_parameters()]
        first = net.get_parameter("first.weight")
        on = [run.device] if run.device.type == "cuda" else None  # the wrapper's buffer lies on the CPU without it
        return DistributedDataParallel(
            net, device_ids=on, delay_all_reduce_named_params=late, param_to_hook_all_reduce=first
        )

    run.build_with(wrap)
    for index in range(STEPS):
        run.optimizer.zero_grad()
        run.loss(index).backward()
        dist.barrier()  # the wrapper does not wait
        run.note()
        run.optimizer.step()


@contextmanager
def _static_memory_on_the_cpu(run: Run) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if run.device.type == "cpu":
            static_memory.install(patch)
        yield
        if run.accelerated:
            run.optimizer._loop.close()


@scenario
def static_memory_on_the_cpu(run: Run) -> None:
    with _static_memory_on_the_cpu(run):
        run.build(gradient_as_bucket_view=True, bucket_cap_mb=1e-4)
        for index in range(STEPS):
            run.step(index)


@scenario
def kept_gradients_in_static_memory_on_the_cpu(run: Run) -> None:
    with _static_memory_on_the_cpu(run):
        gradients_that_are_kept(run)


@scenario
def accumulation_in_static_memory_on_the_cpu(run: Run) -> None:
    with _static_memory_on_the_cpu(run):
        accumulation_without_reduction(run)


@scenario
def several_calls_before_a_backward_pass(run: Run) -> None:
    """Also without reduction, to which later gradients are added."""
    with _static_memory_on_the_cpu(run):
        run.build(bucket_cap_mb=1e-4)
        assert isinstance(run.model, DistributedDataParallel)
        for index in range(STEPS):
            run.optimizer.zero_grad()
            if index % 4 == 3:
                with run.model.no_sync():
                    (run.loss(index + 200) + run.loss(index + 300)).backward()
            loss = run.loss(index) + run.loss(index + 100)
            loss.backward()
            run.note(loss)
            run.optimizer.step()


def _train(run: Run, index: int) -> None:
    run.step(index)


def _train_locally(run: Run, index: int) -> None:
    with _no_sync(run):
        run.loss(index).backward()
    run.note()


def _call_alone(run: Run, index: int) -> None:
    run.note(run.loss(index))


def _call_alone_locally(run: Run, index: int) -> None:
    with _no_sync(run):
        loss = run.loss(index)
    run.note(loss)
    loss.backward()
    run.note()


def _go_back_locally(run: Run, index: int) -> None:
    loss = run.loss(index)
    with _no_sync(run):
        loss.backward()
    run.note(loss)


def _go_back_once(run: Run, index: int) -> None:
    (run.loss(index) + run.loss(100 + index)).backward()
    run.note()


def _go_back_twice(run: Run, index: int) -> None:
    first, second = run.loss(index), run.loss(100 + index)
    second.backward()
    run.note(second)
    first.backward()
    run.note(first)


def _go_back_again(run: Run, index: int) -> None:
    loss = run.loss(index)
    loss.backward(retain_graph=True)
    run.note(loss)
    loss.backward()
    run.note()


def _ask_for_gradients(run: Run, index: int) -> None:
    loss = run.loss(index)
    params = list(run.model.parameters())
    run.seen += torch.autograd.grad(loss, params[index % 2 :], retain_graph=True)
    if index % 3:
        loss.backward()
    run.note(loss)


def _look_first(run: Run, index: int) -> None:
    loss = run.loss(index)
    run.seen.append(torch.tensor(loss.item()))
    loss.backward()
    run.note()


def _call_inside(run: Run, index: int) -> None:
    assert isinstance(run.model, DistributedDataParallel)
    run.model.module(run.batch(index)[0]).square().sum().backward()
    run.note()


def _go_back_beside(run: Run, index: int) -> None:
    """The gradients of the penalty are reduced, those of the loss are added to them as they are."""
    loss = run.loss(index)
    penalty = sum(param.square().sum() for param in run.model.parameters())
    assert isinstance(penalty, Tensor)
    penalty.backward()
    run.note(loss)
    loss.backward()
    run.note()


def _validate(run: Run, index: int) -> None:
    run.model.eval()
    with torch.no_grad():
        run.note(run.loss(index))
    run.model.train()


def _clear(run: Run, index: int) -> None:
    run.optimizer.zero_grad(set_to_none=index % 3 > 0)


def _update(run: Run, _index: int) -> None:
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
    run.optimizer.step()


def _no_sync(run: Run) -> AbstractContextManager[None]:
    assert isinstance(run.model, DistributedDataParallel)
    return run.model.no_sync()


ACTIONS = (
    *[_train] * 6,
    *[_train_locally] * 2,
    *[_clear] * 2,
    *[_update] * 2,
    _call_alone,
    _call_alone_locally,
    _go_back_locally,
    _go_back_once,
    _go_back_twice,
    _go_back_again,
    _ask_for_gradients,
    _look_first,
    _call_inside,
    _go_back_beside,
    _validate,
)


def _mixed(seed: int, run: Run) -> None:
    """In two of three loops one rank runs plain PyTorch in all forms."""
    run.accelerated &= seed % 3 != run.rank
    run.build(bucket_cap_mb=1e-4 if seed % 2 else 25)
    actions = random.Random(seed).choices(ACTIONS, k=30)
    for index, action in enumerate([*[_train] * 6, *actions]):
        action(run, index)


SCENARIOS |= {f"mixed loop {seed}": partial(_mixed, seed) for seed in range(3)}


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    on_gpus = torch.cuda.device_count() >= size
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpus else "gloo",
        init_method=f"file://{folder / 'meeting'}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=SECONDS),
    )
    found: dict[str, Any] = {}
    for name, function in SCENARIOS.items():
        for form in FORMS:
            run = Run(name, rank, device, form)
            function(run)
            run.end()
            status = run.optimizer.status().as_dict() if run.accelerated else {}
            found[form, name] = [tensor.cpu() for tensor in run.seen], status
    torch.save(found, folder / f"{rank}.pt")
    del run
    gc.collect()  # a wrapper that is given up after its process group may wait for ever, with plain PyTorch too
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
