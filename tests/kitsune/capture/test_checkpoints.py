"""Activation checkpoints in a model: what is computed, what is kept till the backward pass, and what is refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import kitsune
from kitsune.capture import foreseen_layouts, recomputing
from kitsune.capture.checkpoints import checkpoint_of, inline_checkpoints
from kitsune.capture.frontend import GuardedFunction
from kitsune.capture.split_program import trace_split
from kitsune.execution.in_order import InOrder
from kitsune.graph import dataflow
from tests.kitsune.training import FORMS, Training, adam, batch, compare, sgd

Call = Callable[[nn.Module, Tensor], Tensor]

once = partial(checkpoint, use_reentrant=False)
reentrant = partial(checkpoint, use_reentrant=True)


def nested(block: nn.Module, x: Tensor) -> Tensor:
    return once(lambda x: torch.tanh(once(block, x)), x)


def with_several_results(block: nn.Module, x: Tensor) -> Tensor:
    first, (second, third) = once(lambda x, scale: (block(x), [x * scale, x]), x, x.mean())
    return first + second * third


def in_place(block: nn.Module, x: Tensor) -> Tensor:
    return once(lambda x: torch.relu_(block(x)) * 0.5, x)


def of_a_view(block: nn.Module, x: Tensor) -> Tensor:
    return once(lambda x: block(x.view(-1, 2, 4).transpose(1, 2).reshape(-1, 8)), x)


def under_autocast(block: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return once(block, x).float()


def random_numbers(block: nn.Module, x: Tensor) -> Tensor:
    return once(lambda x: block(x) * torch.rand_like(x), x)


def a_part_of_a_result(block: nn.Module, x: Tensor) -> Tensor:
    """What lies in the checkpoint is needed by what comes after it, too."""

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        inner = torch.sigmoid(x)
        return block(inner), inner

    outer, inner = once(both, x)
    return outer * inner.exp()


def written_to_without_a_result(block: nn.Module, x: Tensor) -> Tensor:
    def scale(x: Tensor) -> Tensor:
        inner = block(x) + 1.0
        torch._foreach_mul_([inner], 3.0)
        return torch.sin(inner).exp()

    return once(scale, x)


def noise_that_is_written(block: nn.Module, x: Tensor) -> Tensor:
    return once(lambda x: block(functional.rrelu(x, training=True)).sin(), x)


def attention(block: nn.Module, x: Tensor) -> Tensor:
    def attend(x: Tensor) -> Tensor:
        heads = block(x).view(1, -1, 2, 4).transpose(1, 2)
        return functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(-1, 8)

    return once(attend, x)


CALLS: dict[str, Call] = {
    "once": once,
    "nested": nested,
    "several results": with_several_results,
    "in place": in_place,
    "of a view": of_a_view,
    "autocast": under_autocast,
    "random numbers": random_numbers,
    "a part of a result": a_part_of_a_result,
    "attention": attention,
    "written to without a result": written_to_without_a_result,
    "noise that is written": noise_that_is_written,
}


class Blocks(nn.Module):
    """Three layers, each in a checkpoint, between two that are in none."""

    def __init__(self, call: Call, norm: Callable[[int], nn.Module] = nn.LayerNorm, dropout: float = 0.2) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(norm(8), nn.Linear(8, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 8)) for _ in range(3)
        )
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + self.call(block, x)
        return self.last(x)


def build(call: Call, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Blocks(call, norm)
    return model, adam(model)


@pytest.mark.support("Gradients", "gradient checkpointing in the model", "replayed")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("form", FORMS)
def test_a_training_with_checkpoints(form: str, call: Call) -> None:
    compare(form, partial(build, call))


class TwoHeads(nn.Module):
    """Two outputs that have nothing in common, so that each has a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Blocks(once), Blocks(once)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


@pytest.mark.parametrize("form", FORMS)
def test_outputs_with_backward_passes_of_their_own(form: str) -> None:
    def loss_fn(outputs: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        return functional.cross_entropy(outputs[0], y) + functional.cross_entropy(outputs[1], y)

    compare(form, lambda: (model := TwoHeads(), adam(model)), loss_fn=loss_fn)


class TwoResults(nn.Module):
    """Two outputs of one checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        def both(x: Tensor) -> tuple[Tensor, Tensor]:
            inner = torch.tanh(self.second(x))
            return self.last(inner.exp()), inner.sin()

        first, second = once(both, self.first(x))
        return first, second


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("apart", [False, True])
def test_some_of_the_results_of_a_checkpoint(used: tuple[int, ...], apart: bool) -> None:
    """What is computed again for one of them does not depend on the gradient of the other."""

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        outputs = training.model(x)
        losses = [outputs[index].square().mean() for index in used]
        if apart:
            for loss in losses:
                loss.backward(retain_graph=True)
        else:
            sum(losses).backward()
        training.optimizer.step()
        return losses[0].detach()

    compare("drop_in", lambda: (model := TwoResults(), adam(model, weight_decay=0.1)), loop=loop, steps=8, replays=4)


def test_a_version_of_torch_that_does_not_tell_what_lies_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputing, "checkpoint_of", lambda node: None if "val" in node.meta else checkpoint_of(node))
    training = compare("drop_in", partial(build, once), replays=0)
    assert "cannot be told" in str(training.status().refusals[0])


@pytest.mark.parametrize("form", FORMS)
def test_replays_are_verified(form: str) -> None:
    training = compare(form, partial(build, once), verify=3)
    assert "differ" not in str(training.status())


def test_a_loss_that_is_deferred() -> None:
    compare("drop_in", partial(build, once), defer_loss=True)


@pytest.mark.parametrize("form", FORMS)
def test_parameters_that_are_not_the_optimizers_keep_their_gradients(form: str) -> None:
    def of_some() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Blocks(reentrant)
        model.last.bias.grad = torch.ones(3)
        return model, torch.optim.SGD([*model.first.parameters(), model.last.weight], lr=0.1, fused=True)

    training = compare(form, of_some, gradients=False, replays=0)
    if form == "train_step":
        assert training.model.last.bias.grad.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("form", FORMS)
def test_checkpoints_are_switched_on_in_mid_training(form: str) -> None:
    def edit(training: Training, index: int) -> None:
        training.model.call = {4: once, 7: reentrant}.get(index, training.model.call)

    training = compare(form, partial(build, plainly), steps=10, edit=edit, replays=3)
    assert any("use_reentrant=False" in refusal for refusal in training.status().refusals)


def reentrant_from_a_leaf(block: nn.Module, x: Tensor) -> Tensor:
    """No parameter lies behind the checkpoint, only in it: torch would leave it out, and raise nothing."""
    return reentrant(block, x.detach().requires_grad_())


class Reading(Blocks):
    """Looks at its input on the host."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * x.abs().max().clamp_max(1.0).item())


@pytest.mark.parametrize("later", [reentrant, reentrant_from_a_leaf])
@pytest.mark.parametrize(("kind", "mode"), [(Blocks, "eager"), (Reading, "replay")])
def test_checkpoints_are_switched_on_where_nothing_is_ever_replayed(kind: type[Blocks], mode: str, later: Call) -> None:
    def edit(training: Training, index: int) -> None:
        training.model.call = {2: once, 4: later, 6: plainly, 7: later}.get(index, training.model.call)

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = kind(plainly)
        return model, adam(model)

    training = compare("train_step", make, steps=9, edit=edit, replays=0, mode=mode)
    assert training.status().replays == 0


# What is kept


def live_bytes(call: Call) -> int:
    """How much of a step's values is alive at once."""
    torch.manual_seed(0)
    model = Blocks(call)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = kitsune.TrainStep(model, functional.cross_entropy, optimizer, mode="replay")
    for _ in range(3):
        step(torch.randn(512, 4), torch.randint(3, (512,)))
    return step.plan().memory.live_bytes


def plainly(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def squashed(block: nn.Module, x: Tensor) -> Tensor:
    return torch.tanh(block(x))


def changed_in_place(block: nn.Module, x: Tensor) -> Tensor:
    return torch.relu_(block(x)) * 0.5


@pytest.mark.parametrize(("call", "without"), [(once, plainly), (nested, squashed), (in_place, changed_in_place)])
def test_a_step_keeps_less(call: Call, without: Call) -> None:
    kept_per_block = 512 * (8 + 32)  # its result, and a random mask
    of_one_block = 512 * (8 * 8 + 4 * 32)
    assert live_bytes(call) < 4 * (3 * kept_per_block + of_one_block)
    assert live_bytes(call) < 0.8 * live_bytes(without)


def saved_shapes(model: nn.Module) -> list[list[int]]:
    """Those of what the forward pass of a call keeps for its backward pass, inputs left out."""
    found: list[list[int]] = []

    class Split:
        def run(self, graph: fx.GraphModule, flat: list[Tensor]) -> list[Tensor]:
            program = trace_split(graph, flat)
            nodes = dataflow.outputs(program.forward.graph)[len(program.differentiable) :]
            given = {key for node in dataflow.placeholders(program.forward.graph) for key in dataflow.storages(node)}
            found[:] = [list(node.meta["val"].shape) for node in nodes if not dataflow.storages(node) <= given]
            return list(graph(*flat))

    split = Split()
    GuardedFunction(lambda x: model(x), split.run)(torch.randn(512, 4))
    return found


def test_a_call_keeps_what_lies_between_checkpoints_and_random_numbers() -> None:
    assert sum(size == [512, 32] for size in saved_shapes(Blocks(plainly))) > 3
    assert sorted(saved_shapes(Blocks(once))) == [[512, 8]] * 4 + [[512, 32]] * 3


def test_each_checkpoint_is_computed_again_when_gradients_have_come_to_it() -> None:
    """Not all of them at once, before the first of them is needed."""
    program = None

    class Split:
        def run(self, graph: fx.GraphModule, flat: list[Tensor]) -> list[Tensor]:
            nonlocal program
            program = trace_split(graph, flat)
            return list(graph(*flat))

    split, model = Split(), Blocks(once)
    GuardedFunction(lambda x: model(x), split.run)(torch.randn(6, 4))
    assert program is not None
    (part,) = program.parts
    targets = [node.target for node in part.backward.graph.nodes]
    norms = torch.ops.aten.native_layer_norm.default, torch.ops.aten.native_layer_norm_backward.default
    assert [target for target in targets if target in norms] == [*norms] * 3


# What is refused


def writing(block: nn.Module, x: Tensor) -> Tensor:
    return once(block, x)


def drawing_again(block: nn.Module, x: Tensor) -> Tensor:
    return once(block, x, preserve_rng_state=False)


def drawing_again_within(block: nn.Module, x: Tensor) -> Tensor:
    return once(lambda x: once(block, x, preserve_rng_state=False), x)


def reentrant_without_gradients(block: nn.Module, x: Tensor) -> Tensor:
    return reentrant(block, x.detach())


def reentrant_of_a_tuple(block: nn.Module, x: Tensor) -> Tensor:
    return reentrant(lambda pair: block(pair[0]) + pair[1], (x, x))


def overwritten(block: nn.Module, x: Tensor) -> Tensor:
    """What the checkpoint read is not there any more when it is computed again; autograd does not see it."""
    shift = torch.ones(8)
    result = once(lambda x: block(x + shift), x)
    shift.mul_(2)
    return result


def keeps_all() -> object:
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


def choosing(block: nn.Module, x: Tensor) -> Tensor:
    return once(block, x, context_fn=keeps_all)


REFUSED: dict[str, tuple[Call, str]] = {
    "batch norm": (writing, "writes to what was there before"),
    "other random numbers": (drawing_again, "preserve_rng_state=False"),
    "other random numbers, nested": (drawing_again_within, "preserve_rng_state=False"),
    "reentrant": (reentrant, "use_reentrant=False"),
    "reentrant, without gradients": (reentrant_without_gradients, "use_reentrant=False"),
    "reentrant, of a tuple": (reentrant_of_a_tuple, "use_reentrant=False"),
    "overwritten": (overwritten, "overwritten"),
    "context_fn": (choosing, "context_fn"),
}


@pytest.mark.support("Gradients", "checkpoints whose second run differs from the first", "plain PyTorch, with a reason")
@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize(("call", "reason"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("form", FORMS)
def test_what_plain_pytorch_computes_otherwise_the_second_time(form: str, call: Call, reason: str) -> None:
    norm = nn.BatchNorm1d if call is writing else nn.LayerNorm
    training = compare(form, partial(build, call, norm), replays=0)
    status = training.status()
    assert status.mode == "eager"
    assert any(reason in str(refusal) and "test_checkpoints.py" in str(refusal) for refusal in status.refusals), status


def test_a_graph_without_checkpoints_is_left_alone() -> None:
    module = fx.symbolic_trace(nn.Linear(2, 2))
    before = str(module.graph)
    inline_checkpoints(module)
    assert str(module.graph) == before


def test_it_trains_at_all() -> None:
    """Against plain layers: checkpoints change nothing but what is kept."""
    torch.manual_seed(0)
    losses = []
    for call in (once, plainly):
        torch.manual_seed(7)
        model, optimizer = build(call)
        losses.append(Training("train_step", model, optimizer).run(6))
    assert losses[0] == losses[1]


class Living(TorchDispatchMode):
    """How many bytes of what operators make within are alive, and were at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._known.update(one.untyped_storage() for one in pytree.tree_leaves(args) if isinstance(one, Tensor))
        result = func(*args, **(kwargs or {}))
        for one in pytree.tree_leaves(result):
            if isinstance(one, Tensor) and (storage := one.untyped_storage()) not in self._known:
                self._known.add(storage)
                self._count(storage.nbytes())
                weakref.finalize(storage, self._count, -storage.nbytes())
        return result

    def _count(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.most = max(self.most, self.now)


def most_bytes(form: str, call: Call, owner: Any, name: str) -> int:
    """How many are alive at most within any call of a function, `owner`'s of that name, in a training."""
    function, most = getattr(owner, name), [0]

    def within(*args: Any) -> Any:
        with Living() as living:
            result = function(*args)
        most.append(living.most)
        return result

    torch.manual_seed(0)
    model = Blocks(call)
    training = Training(form, model, sgd(model))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, within)
        training.run(6, partial(batch, size=1 << 12))
    assert training.status().replays >= 4
    return max(most)


@pytest.mark.parametrize("place", [(foreseen_layouts, "_find"), (InOrder, "__call__")], ids=["capture", "replay"])
@pytest.mark.parametrize("form", FORMS)
def test_it_takes_less_memory(form: str, place: tuple[Any, str]) -> None:
    saving, plain = (most_bytes(form, call, *place) for call in (once, plainly))
    assert 0 < saving < 0.8 * plain


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("form", FORMS)
def test_a_training_with_checkpoints_on_a_gpu(form: str, call: Call) -> None:
    def on_the_gpu() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Blocks(call).cuda()
        return model, sgd(model)

    rtol, atol = (2e-2, 2e-3) if call is under_autocast else (2e-5, 2e-6)
    training = compare(form, on_the_gpu, batches=partial(batch, device="cuda"), rtol=rtol, atol=atol)
    assert training.status().executor == "cuda graph"


def peak_bytes(form: str, call: Call) -> int:
    """How much memory a training takes at most, of what torch gives: replays take what they were recorded with."""
    torch.manual_seed(0)
    model = Blocks(call).cuda()
    training = Training(form, model, sgd(model))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    training.run(6, partial(batch, size=1 << 16, device="cuda"))
    assert training.status().executor == "cuda graph"
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_replays_on_a_gpu_take_less_memory(form: str) -> None:
    assert peak_bytes(form, once) < 0.8 * peak_bytes(form, plainly)


SETTINGS = {"factor": 1.0}


class Scaled(nn.Module):
    """What lies in its checkpoint depends on something that is no tensor, and so do its gradients."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.first, self.last, self.factor = nn.Linear(4, 4), nn.Linear(4, 3), 1.0
        factor = 1.0

        def set_factor(value: float) -> None:
            nonlocal factor
            factor = self.factor = SETTINGS["factor"] = value

        places: dict[str, Callable[[], float]] = {
            "attribute": lambda: self.factor,
            "global": lambda: SETTINGS["factor"],
            "closure": lambda: factor,
        }
        self.read, self.set_factor = places[place], set_factor

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.block, x, use_reentrant=False))

    def block(self, x: Tensor) -> Tensor:
        return (self.first(x).sin() * self.read()).sin()


@pytest.mark.parametrize("defer_loss", [False, True])
@pytest.mark.parametrize("place", ["attribute", "global", "closure"])
def test_what_a_checkpoint_reads_changes_before_its_backward_pass(place: str, defer_loss: bool) -> None:
    """Plain PyTorch computes again with what is there then; a replay would not."""
    model = Scaled(place)
    model.set_factor(1.0)
    training = Training("drop_in", model, sgd(model), defer_loss=defer_loss)
    training.run(4)
    assert training.status().replays >= 2
    (x, y), _ = batch(4)
    for error in (True, False):
        training.optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        model.set_factor(2.0)
        if error:
            with pytest.raises(kitsune.KitsuneError, match="a checkpoint of the model reads has changed since"):
                loss.backward()
        else:
            loss.backward()
        model.set_factor(1.0)
    assert "changes after the call" in training.status().reason
    found = model.first.weight.grad
    plain = Scaled(place)
    plain.load_state_dict(model.state_dict())
    loss = functional.cross_entropy(plain(x), y)
    plain.set_factor(2.0)
    loss.backward()
    assert found is not None
    assert torch.equal(found, plain.first.weight.grad)  # type: ignore[arg-type]
