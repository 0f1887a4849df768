"""Training on a CUDA device: replayed as CUDA graphs, and indistinguishable from eager but for rounding."""

from __future__ import annotations

import functools
import gc
import importlib.util
import threading
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import kitsune
from kitsune.background import wait_until_quiet
from kitsune.execution.handout import PLACES
from kitsune.kernels.adam import adam_
from tests.kitsune.loops import LOOPS
from tests.kitsune.test_step import by_hand
from tests.kitsune.training import FORMS, Batch, Build, Net, Training, adam, batch, plain_loop, sgd
from tests.kitsune.training import compare as compare_anywhere

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")

cuda_batch = functools.partial(batch, device="cuda")


def building(kind: Callable[[], nn.Module] = Net, make: Callable[[nn.Module], torch.optim.Optimizer] = adam) -> Build:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = kind().to(CUDA)
        return model, make(model)

    return build


def compare(form: str, build: Build | None = None, **arguments: Any) -> Training:
    """Like the comparison on the CPU. The learning rate of a captured fused update is a float32 number."""
    options = {"batches": cuda_batch, "rtol": 2e-5, "atol": 2e-6, **arguments}
    training = compare_anywhere(form, build if build is not None else building(), **options)
    if options.get("replays") != 0:
        assert (training.status().executor == "cuda graph") == options.get("cuda_graphs", True)
    return training


@pytest.fixture(autouse=True)
def _one_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets eager's fused Adam compute as Kitsune's kernel does, whose precision has tests of its own.

    Torch's is less precise, and Adam makes large steps of small differences where a gradient is
    nothing but rounding, as that of a bias before batch normalization.
    """
    for name, decoupled in (("_fused_adam_", False), ("_fused_adamw_", True)):
        monkeypatch.setattr(torch, name, functools.partial(fused_adam, getattr(torch, name), decoupled))


def fused_adam(
    by_torch: Callable[..., None],
    decoupled: bool,
    *lists: list[Tensor],
    lr: float | Tensor,
    amsgrad: bool,
    grad_scale: Tensor | None,
    **options: Any,
) -> None:
    params, grads = lists[:2]
    if any(param.dtype != torch.float32 for param in params):
        by_torch(*lists, lr=lr, amsgrad=amsgrad, grad_scale=grad_scale, **options)
        return
    if grad_scale is not None:
        torch._foreach_div_(grads, grad_scale)
    rate = torch.as_tensor(lr, dtype=torch.float32, device=CUDA)
    adam_(*lists, lr=rate, decoupled=decoupled, **options)


def at_rest() -> tuple[int, int]:
    """Bytes allocated and reserved when nothing is going on."""
    wait_until_quiet()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        return self.head(torch.relu(self.second(hidden)).mean((2, 3)))


def image_batch(index: int, *, size: int = 16) -> Batch:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(size, 3, 12, 12, generator=generator)
    return (x.to(CUDA), torch.randint(3, (size,), generator=generator).to(CUDA)), {}


# Equal to eager


@pytest.mark.parametrize(
    "kind", [Net, lambda: Net(batch_norm=True), lambda: Net(dropout=0.5)], ids=["net", "norm", "dropout"]
)
@pytest.mark.parametrize("make", [adam, sgd], ids=["adam", "sgd"])
@pytest.mark.parametrize("form", FORMS)
def test_training(form: str, make: Callable[[nn.Module], torch.optim.Optimizer], kind: Callable[[], nn.Module]) -> None:
    training = compare(form, building(kind, make), steps=10)
    whole = ("forward", "loss", "backward", "update")
    assert training.status().covered == (whole if form == "train_step" else ("forward", "backward", "update"))
    assert training.status().refusals == ()


@pytest.mark.parametrize("form", FORMS)
def test_without_cuda_graphs_operators_are_issued_one_by_one(form: str) -> None:
    training = compare(form, building(lambda: Net(batch_norm=True, dropout=0.3)), steps=10, cuda_graphs=False)
    assert training.status().executor == "in order"


@pytest.mark.support("Random numbers", "dropout draws another mask at each step", "replayed")
@pytest.mark.parametrize("form", FORMS)
def test_dropout_masks_differ_from_replay_to_replay(form: str) -> None:
    training = Training(form, *building(lambda: Net(dropout=0.5), lambda model: adam(model, lr=0.0))())
    losses = training.run(12, lambda index: cuda_batch(0))
    assert training.status().replays >= 10
    assert len(set(losses)) == 12


@pytest.mark.parametrize("form", FORMS)
def test_shapes_that_alternate_share_memory_and_nothing_else(form: str) -> None:
    training = compare(
        form,
        building(lambda: Net(batch_norm=True)),
        steps=24,
        replays=14,
        batches=lambda i: cuda_batch(i, size=4 + i % 3),
    )
    assert training.status().graphs == 3


@pytest.mark.parametrize("form", FORMS)
def test_modes_that_alternate(form: str) -> None:
    def edit(training: Training, index: int) -> None:
        training.model.train(index % 3 != 2)

    compare(form, building(lambda: Net(batch_norm=True, dropout=0.3)), steps=18, edit=edit, replays=12)


@pytest.mark.parametrize("name", ["lr", "betas", "eps", "weight_decay"])
@pytest.mark.parametrize("form", FORMS)
def test_hyperparameters(form: str, name: str) -> None:
    """The step count lies on the host, where torch keeps it, and a copy of it on the device."""

    def edit(training: Training, index: int) -> None:
        value: Any = 0.1 + index / 50
        training.optimizer.param_groups[0][name] = (value, 1 - value / 10) if name == "betas" else value

    training = compare(form, steps=12, edit=edit, replays=7, rtol=1e-4, atol=1e-5)
    for state in training.plain.state.values():
        assert state["step"].device.type == ("cuda" if training.plain.param_groups[0]["fused"] else "cpu")


@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"fused": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_optimizers_that_keep_their_step_count_elsewhere(form: str, options: dict[str, Any]) -> None:
    make = functools.partial(torch.optim.Adam, lr=0.05, **options)

    def edit(training: Training, index: int) -> None:
        if index == 5:
            for state in training.plain.state.values():
                state["step"].fill_(2)

    compare(
        form,
        building(make=lambda model: make(model.parameters())),
        steps=10,
        edit=edit,
        replays=6,
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("form", FORMS)
def test_autocast(form: str) -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = training.loss_fn(training.model(x), y)
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    options = {"enable_amp": True} if form == "train_step" else {}
    compare(form, building(make=sgd), steps=8, loop=loop, reference={"loop": loop}, rtol=1e-2, atol=1e-3, **options)


@pytest.mark.parametrize(
    "step", [{"clip_grad_norm": 0.05}, {"accumulate": 2}, {"accumulate": 4, "clip_grad_norm": 0.1}], ids=str
)
def test_parts_of_the_step(step: dict[str, Any]) -> None:
    compare("train_step", step=step, reference={"loop": by_hand(**step)}, steps=24, replays=12)


def test_kept_gradients_are_the_users() -> None:
    model, optimizer = building()()
    step = kitsune.TrainStep(model, functional.cross_entropy, optimizer, keep_grads=True, mode="replay")
    held = []
    for index in range(8):
        step(*cuda_batch(index)[0])
        held += [(param.grad, param.grad.clone()) for param in model.parameters() if param.grad is not None]
    assert len(held) == 32
    assert all(torch.equal(*pair) for pair in held)


@pytest.mark.parametrize("form", FORMS)
def test_losses_are_the_users(form: str) -> None:
    training = Training(form, *building()())
    losses = [training.step(*cuda_batch(index)[0]) for index in range(8)]
    values = [loss.item() for loss in losses]
    training.run(4, cuda_batch, start=8)
    assert [loss.item() for loss in losses] == values
    assert len(set(values)) == 8


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("form", FORMS)
def test_convolutions(form: str, layout: torch.memory_format, search: bool) -> None:
    def kind() -> nn.Module:
        return Images().to(memory_format=layout)

    def batches(index: int) -> Batch:
        (x, y), _ = image_batch(index)
        return (x.contiguous(memory_format=layout), y), {}

    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = search, False
    try:
        compare(form, building(kind, sgd), batches=batches, steps=8, rtol=1e-3, atol=1e-4)
    finally:
        torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("form", FORMS)
def test_flags_that_choose_kernels_are_part_of_the_signature(form: str) -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    training = Training(form, *building()())
    training.run(4, cuda_batch)
    try:
        torch.backends.cuda.matmul.allow_tf32 = not before
        training.run(1, cuda_batch, start=4)
        assert training.status().mode != "replay"
        training.run(3, cuda_batch, start=5)
        assert training.status().graphs == 2
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


# Loops


class Attention(nn.Module):
    """Attention with dropout, over eight parts of an item."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3 * 2 * 8 * 16), nn.Linear(2 * 8 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.first(x).view(-1, 3, 2, 8, 16).unbind(1)
        out = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.3, is_causal=True)
        return self.last(out.flatten(1))


@pytest.mark.parametrize("defer_loss", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["memory-efficient", "flash"])
def test_attention_with_dropout(dtype: torch.dtype | None, micro_batches: int, defer_loss: bool) -> None:
    """Of its passes one may be replayed and the other run, or recorded after it: both know the same random numbers."""

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        for part_x, part_y in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
            with torch.autocast("cuda", torch.bfloat16, enabled=dtype is not None):
                loss = training.loss_fn(training.model(part_x), part_y)
            loss.backward()
        training.optimizer.step()
        return loss.detach()

    options: dict[str, Any] = {} if dtype is None else {"rtol": 1e-2, "atol": 1e-3}
    batches = functools.partial(cuda_batch, size=8)
    compare(
        "drop_in",
        building(Attention, sgd),
        loop=loop,
        reference={"loop": loop},
        batches=batches,
        steps=10,
        defer_loss=defer_loss,
        **options,
    )


def test_attention_with_dropout_in_a_train_step() -> None:
    compare("train_step", building(Attention, sgd), steps=10)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop(name: str) -> None:
    loop, replays = LOOPS[name]
    training = compare("drop_in", building(lambda: Net(batch_norm=True)), loop=loop, steps=8, replays=replays)
    held = training.memo.get("held", [])
    assert all(torch.equal(*pair) for pair in held), "a gradient in the user's hands was overwritten"
    assert bool(held) == name.startswith("holding")


def test_outputs_and_saved_values_of_a_pending_call_are_safe() -> None:
    """A second call before the first one's backward pass must not touch what that needs."""
    results = []
    for form in ("eager", "drop_in"):
        torch.manual_seed(0)
        training = Training(form, *building()())
        training.run(4, cuda_batch)
        (x, y), _ = cuda_batch(4)
        training.optimizer.zero_grad()
        first = training.model(x)
        second = training.model(-x)
        training.loss_fn(first, y).backward()
        training.loss_fn(second, y).backward()
        results.append([param.grad.clone() for param in training.model.parameters() if param.grad is not None])
        training.run(3, cuda_batch, start=5)
    torch.testing.assert_close(results[1], results[0], rtol=2e-5, atol=2e-6)


def test_a_graph_that_is_released_while_its_backward_pass_is_pending() -> None:
    training = Training("drop_in", *building()())
    training.run(4, cuda_batch)
    (x, y), _ = cuda_batch(4)
    loss = training.loss_fn(training.model(x), y)
    expected = torch.autograd.grad(training.loss_fn(training.model.forward(x), y), list(training.model.parameters()))
    assert isinstance(training.optimizer, kitsune.KitsuneOptimizer)
    training.optimizer.hand_over()
    training.optimizer.zero_grad()
    gc.collect()
    torch.randn(1 << 20, device=CUDA)
    loss.backward()
    for param, wanted in zip(training.model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, wanted)


# Streams


@pytest.mark.parametrize("form", FORMS)
def test_replays_run_on_the_users_stream(form: str) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        return plain_loop(training, x, y)

    def batches(index: int) -> Batch:
        (x, y), _ = cuda_batch(index)
        late = torch.zeros_like(x)
        torch.cuda._sleep(20_000_000)
        late.copy_(x)
        return (late, y), {}

    with torch.cuda.stream(stream):
        compare(form, batches=batches, loop=loop, steps=6)
        assert torch.cuda.current_stream() == stream
    torch.cuda.current_stream().wait_stream(stream)


def test_capturing_leaves_the_stream_and_the_device_alone() -> None:
    stream, device = torch.cuda.current_stream(), torch.cuda.current_device()
    compare("train_step")
    assert torch.cuda.current_stream() == stream
    assert torch.cuda.current_device() == device
    assert torch.cuda.get_sync_debug_mode() == 0


# What waits for the device


@pytest.mark.support("Gradients", "clip_grad_norm_ in a replayed loop waits for nothing", "replayed")
@pytest.mark.parametrize("defer_loss", [False, True])
def test_clipping_in_a_replayed_loop_waits_for_nothing(defer_loss: bool) -> None:
    model, plain = building()()
    optimizer = kitsune.KitsuneOptimizer(plain, mode="replay", defer_loss=defer_loss)
    batches = [cuda_batch(index)[0] for index in range(10)]

    def iterate(index: int) -> None:
        x, y = batches[index]
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    for index in range(6):
        iterate(index)
    replays = optimizer.status().replays
    torch.cuda.set_sync_debug_mode("error")
    try:
        for index in range(6, 10):
            iterate(index)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert optimizer.status().replays == replays + 4
    assert "update" in optimizer.status().covered


# Memory


def test_a_thousand_replays_allocate_nothing_but_rows_for_their_losses() -> None:
    model, optimizer = building(lambda: Net(batch_norm=True, dropout=0.2))()
    step = kitsune.TrainStep(model, functional.cross_entropy, optimizer, mode="replay")
    (x, y), _ = cuda_batch(0)
    for _ in range(5):
        step(x, y)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    for _ in range(1000):
        step(x, y)
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    assert step.status().replays == 1004
    assert after["allocation.all.allocated"] - before["allocation.all.allocated"] <= 1000 // PLACES + 1
    assert after["allocated_bytes.all.current"] == before["allocated_bytes.all.current"]
    assert after["segment.all.allocated"] == before["segment.all.allocated"], "no memory was asked of the driver"


def test_replays_of_a_loop_ask_the_driver_for_nothing() -> None:
    training = Training("drop_in", *building()())
    training.run(6, cuda_batch)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    training.run(200, lambda index: cuda_batch(0), start=6)
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    assert after["allocated_bytes.all.current"] == before["allocated_bytes.all.current"]
    assert after["segment.all.allocated"] == before["segment.all.allocated"]


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_fifty_captures_leave_no_memory_behind(form: str, released: bool) -> None:
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 8)).to(CUDA)
    x, y = torch.randn(256, 512, device=CUDA), torch.randint(8, (256,), device=CUDA)

    def once() -> None:
        training = Training(form, model, torch.optim.SGD(model.parameters(), lr=0.01))
        for _ in range(4):
            training.step(x, y)
        assert training.status().replays >= 2
        if released and training.train_step is not None:
            training.train_step.release()
        elif released:
            assert isinstance(training.optimizer, kitsune.KitsuneOptimizer)
            training.optimizer.hand_over()
        model.zero_grad()

    for _ in range(3):
        once()
    before = at_rest()
    for _ in range(50):
        once()
    after = at_rest()
    assert after[0] <= before[0] + 2**20
    assert after[1] <= before[1] + 32 * 2**20


@pytest.fixture
def little_memory() -> Iterator[Callable[[int], None]]:
    """Bounds this process's memory to that many bytes."""
    total = torch.cuda.get_device_properties(CUDA).total_memory

    def bound(size: int) -> None:
        torch.cuda.set_per_process_memory_fraction(size / total)

    yield bound
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("form", FORMS)
def test_too_little_memory_to_capture_is_enough_to_train(form: str, little_memory: Callable[[int], None]) -> None:
    """Warming up needs a second set of whatever is written: parameters and momentum, or gradients."""

    def losses(kind: str) -> tuple[list[float], Training]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8192, 8192), nn.ReLU(), nn.Linear(8192, 8192)).to(CUDA)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        training = Training(kind, model, optimizer, loss_fn=functional.mse_loss)
        x = torch.randn(64, 8192, device=CUDA)
        return [training.step(x, x).item() for _ in range(6)], training

    reserved = at_rest()[1]
    torch.cuda.reset_peak_memory_stats()
    expected = losses("eager")[0]
    needed = torch.cuda.max_memory_reserved() - reserved
    little_memory(at_rest()[1] + needed + 2**26)
    found, training = losses(form)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-3, atol=1e-5)
    status = training.status()
    assert status.mode == "eager", status
    assert "too little device memory" in status.reason
    assert status.graphs == 0


@pytest.mark.support("Failure", "out of memory while capturing", "plain PyTorch, with a reason")
@pytest.mark.parametrize("form", FORMS)
def test_running_out_of_memory_while_capturing(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: Any, **_options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("kitsune.engine.recording.CudaGraph", fail)
    training = compare(form, replays=0)
    assert training.status().mode == "eager"
    assert "too little device memory" in training.status().reason


# What is refused


@pytest.mark.parametrize("form", FORMS)
def test_arguments_on_the_cpu(form: str) -> None:
    class Moving(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(self.first.weight.device))

    def batches(index: int) -> Batch:
        (x, y), _ = batch(index)
        return (x, y.to(CUDA)), {}

    training = compare(form, building(Moving), batches=batches, replays=0)
    assert training.status().mode == "eager"


@pytest.mark.parametrize("form", FORMS)
def test_a_scalar_tensor_on_the_cpu_is_not_frozen(form: str) -> None:
    class Weighted(Net):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return super().forward(x) * weight

    def batches(index: int) -> Batch:
        (x, y), _ = cuda_batch(index)
        return (x, torch.tensor(1.0 + index / 10), y), {}

    compare(form, building(Weighted), batches=batches, replays=0)


@pytest.mark.parametrize("form", FORMS)
def test_random_numbers_of_the_cpu_are_not_frozen(form: str) -> None:
    class Noisy(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * torch.rand(())

    compare(form, building(Noisy), steps=8, replays=0)


@pytest.mark.parametrize("form", FORMS)
def test_an_operator_that_waits_for_the_device(form: str) -> None:
    """Refused, and the device, its streams and its generator are as they were."""

    class Masking(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.relu(self.first(x)).clone()
            hidden[hidden > 1] = 1
            return self.last(functional.dropout(hidden, 0.3))

    stream = torch.cuda.current_stream()
    compare(form, building(Masking), steps=8, replays=0)
    assert torch.cuda.current_stream() == stream
    torch.randn(3, device=CUDA)
    compare(form, building(lambda: Net(dropout=0.3)))


def test_workspaces_that_others_free() -> None:
    """`torch.compile(mode="reduce-overhead")` clears the workspaces of cuBLAS around its own recordings."""

    def edit(_training: Training, index: int) -> None:
        if index == 5:
            torch._C._cuda_clearCublasWorkspaces()
            junk.append(torch.full((1 << 25,), 3.0, device=CUDA))

    junk: list[Tensor] = []
    model = lambda: nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))  # noqa: E731

    def batches(index: int) -> Batch:
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(index)).to(CUDA)
        return (x, x), {}

    for form in FORMS:
        compare(
            form,
            building(model, sgd),
            batches=batches,
            loss_fn=functional.mse_loss,
            steps=10,
            edit=edit,
            rtol=1e-4,
            atol=1e-5,
        )
        assert all(bool((tensor == 3).all()) for tensor in junk), "a replay wrote into memory that is not its own"
        junk.clear()


# Gradient scaling in half precision


@pytest.mark.parametrize(
    "make", [lambda model: torch.optim.Adam(model.parameters(), lr=1e-3), sgd, adam], ids=["adam", "sgd", "fused"]
)
@pytest.mark.parametrize("form", FORMS)
def test_the_course_of_the_scale_over_300_steps(form: str, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    overflows = {7, 8, 40, 41, 42, 100, 163, 250, 299}

    def course(kind: str) -> tuple[list[float], Training]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3)).to(CUDA)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12, growth_interval=25)

        def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
            training.optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = training.loss_fn(training.model(x), y)
            scaler.scale(loss).backward()
            scaler.step(training.optimizer)
            scaler.update()
            return loss.detach()

        options: dict[str, Any] = {"loop": loop}
        if kind == "train_step":
            options |= {"enable_amp": True, "amp_dtype": torch.float16, "step": {"grad_scaler": scaler}}
        training = Training(kind, model, make(model), **options)
        scales = []
        for index in range(300):
            (x, y), _ = cuda_batch(index, size=32)
            if index in overflows:
                x[0, 0] = float("inf")
            training.step(x, y)
            scales.append(scaler.get_scale())
        return scales, training

    scales, training = course(form)
    expected, eager = course("eager")
    assert scales == expected
    assert len(set(scales)) > 3
    assert training.status().replays >= 295
    for param, other in zip(training.model.parameters(), eager.model.parameters(), strict=True):
        assert bool(torch.isfinite(param).all())
        torch.testing.assert_close(param, other, rtol=0.1, atol=0.05)
    steps = [float(state["step"]) for state in training.plain.state.values() if "step" in state]
    assert all(step == 300 - len(overflows) for step in steps)


# Machines that lack something


def lack(patch: pytest.MonkeyPatch, what: str) -> None:
    """Of the machine, what Triton needs, or Triton itself."""
    if what == "Triton":
        found = importlib.util.find_spec
        patch.setattr(
            "importlib.util.find_spec", lambda name, *more: None if name == what.lower() else found(name, *more)
        )
    elif what == "a C compiler":
        patch.delenv("CC", raising=False)
        patch.setattr("shutil.which", lambda name, *_, **__: None)
    else:
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (6, 1))


@pytest.mark.parametrize("what", ["Triton", "a C compiler", "compute capability 7.0"])
@pytest.mark.parametrize("make", [functools.partial(adam, fused=False), sgd], ids=["adam", "sgd"])
@pytest.mark.parametrize("form", FORMS)
def test_without_kernels_of_our_own(
    form: str, make: Callable[[nn.Module], torch.optim.Optimizer], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are replayed all the same, as CUDA graphs of PyTorch's operators."""
    lack(monkeypatch, what)
    training = compare(form, building(make=make), enable_fusion=True, rtol=1e-4, atol=1e-5)
    assert training.status().not_in_effect == ("enable_fusion",)
    assert not training.status().fused


@pytest.mark.parametrize("form", FORMS)
def test_without_bfloat16(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training is that of float32, and the status says so."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    training = compare(form, enable_amp=True, reference={})
    assert any("no bfloat16" in refusal for refusal in training.status().refusals)


# Several trainings


def test_two_trainings_take_turns() -> None:
    def run(kinds: tuple[str, str]) -> list[list[float]]:
        torch.manual_seed(0)
        pair = [Training(kind, *building(lambda: Net(batch_norm=True))()) for kind in kinds]
        losses: list[list[float]] = [[], []]
        for index in range(10):
            for place, training in enumerate(pair):
                losses[place] += training.run(1, cuda_batch, start=2 * index + place)
        return losses

    found, expected = run(("train_step", "drop_in")), run(("eager", "eager"))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_the_model_moves_to_the_gpu_in_mid_training(form: str) -> None:
    def edit(training: Training, index: int) -> None:
        if index == 3:
            training.model.to(CUDA)
            training.plain.load_state_dict(training.plain.state_dict())

    def batches(index: int) -> Batch:
        return batch(index, device="cpu" if index < 3 else "cuda")

    training = compare_anywhere(
        form, lambda: (model := Net(), sgd(model)), steps=9, edit=edit, batches=batches, replays=4, rtol=1e-4, atol=1e-5
    )
    assert training.status().executor == "cuda graph"


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_training_compiled(form: str) -> None:
    training = compare(form, building(make=sgd), compile=True, rtol=1e-4, atol=1e-5)
    assert training.status().executor == "cuda graph"


@pytest.mark.parametrize("form", FORMS)
def test_auto_mode_measures_and_keeps_the_faster(form: str) -> None:
    """Whichever it is: the status tells both times, and agrees with them."""
    training = Training(form, *building()(), mode="auto")
    for _ in range(50):
        training.run(100, cuda_batch)
        wait_until_quiet()
        status = training.status()
        if status.mode != "measuring":
            break
    assert status.eager_seconds is not None
    assert status.replay_seconds is not None
    assert status.mode == ("replay" if status.replay_seconds < status.eager_seconds else "eager")


def train_beside_others(form: str, barrier: Any) -> str:
    """Compares a training with eager's in a process of its own, while others do the same."""
    barrier.wait(120)
    training = compare(form, building(lambda: Net(batch_norm=True), sgd), steps=300, replays=200, rtol=1e-3, atol=1e-4)
    return training.status().executor


@pytest.mark.support("Failure", "two processes on one GPU", "replayed")
def test_two_processes_on_one_gpu() -> None:
    context = get_context("spawn")
    with context.Manager() as manager, context.Pool(2) as pool:
        barrier = manager.Barrier(2)
        found = pool.starmap_async(train_beside_others, [(form, barrier) for form in FORMS]).get(250)
    assert found == ["cuda graph"] * 2


def test_what_cudnn_has_searched_for_serves_the_capture() -> None:
    """It keeps that by thread: the eager steps of a `TrainStep` go back in the thread that captures."""
    threads = set[int]()

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            threads.add(threading.get_ident())
            return grad

    model = Net().to(CUDA)

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(Note.apply(model(x)), y)

    step = kitsune.TrainStep(model, optimizer=adam(model), forward=forward, mode="eager")
    (x, y), _ = cuda_batch(0)
    step(x, y)
    assert threads == {threading.get_ident()}
