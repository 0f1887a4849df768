"""The short way is taken where a step goes on as it did, and left at once for everything that has changed."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler

from kitsune.capture import ambient
from kitsune.engine.recording import Recording
from kitsune.loop import shortcut as shortcut_module
from kitsune.loop.shortcut import Shortcut
from kitsune.native.build import facts_type
from kitsune.native.facts import PythonFacts
from tests.kitsune.training import Batch, Build, Net, Training, adam, batch, compare, net_and_adam, sgd

Change = Callable[[Training], None]

# The first step is eager, the second captures, the third goes the long way, after which the state has settled.
FIRST = 3


@pytest.fixture(params=["c", pytest.param("python", marks=pytest.mark.slow)], autouse=True)
def _checker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(shortcut_module, "facts_type", lambda: PythonFacts)
    elif facts_type() is PythonFacts:
        pytest.skip("there is no C compiler")


def places(taken: list[bool]) -> list[int]:
    """The numbers of the steps that took the short way; the first step has nothing to repeat."""
    return [place + 1 for place, answer in enumerate(taken) if answer]


def net_and_sgd() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net()
    return model, sgd(model)


def norm_and_adam() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net(batch_norm=True)
    return model, adam(model)


@pytest.mark.parametrize("build", [net_and_adam, net_and_sgd, norm_and_adam])
def test_it_is_taken_as_soon_as_the_step_has_settled(taken: list[bool], build: Build) -> None:
    compare("train_step", build, steps=8)
    assert places(taken) == list(range(FIRST, 8))


@pytest.mark.parametrize(
    "step",
    [
        {"clip_grad_norm": 0.1},
        {"keep_grads": True},
        {"forward": lambda model, x, y, *, scale: functional.cross_entropy(model(x), y) * scale},
    ],
    ids=["clip", "keep", "forward"],
)
def test_it_is_taken_for_other_kinds_of_steps(taken: list[bool], step: dict[str, Any]) -> None:
    def batches(index: int) -> Batch:
        args, _ = batch(index)
        return args, {"scale": torch.tensor(0.5 + index)} if "forward" in step else {}

    def by_hand(training: Training, x: Tensor, y: Tensor, scale: Tensor | None = None) -> Tensor:
        training.optimizer.zero_grad()
        loss = functional.cross_entropy(training.model(x), y) * (1.0 if scale is None else scale)
        loss.backward()
        if "clip_grad_norm" in step:
            nn.utils.clip_grad_norm_(training.model.parameters(), step["clip_grad_norm"])
        training.optimizer.step()
        return loss.detach()

    training = compare("train_step", steps=7, batches=batches, step=step, loop=by_hand, rtol=1e-6, atol=1e-7)
    assert places(taken) == [3, 4, 5, 6]
    assert all((param.grad is not None) == ("keep_grads" in step) for param in training.model.parameters())


def test_kept_gradients_are_those_of_the_latest_step(taken: list[bool]) -> None:
    trainings = []
    for form in ("eager", "train_step"):
        torch.manual_seed(1)
        training = Training(form, *net_and_adam(), step={"keep_grads": True})
        training.run(6)
        trainings.append(training)
    by_hand, replayed = (list(training.model.parameters()) for training in trainings)
    assert taken[-1]
    kept = [param.grad for param in replayed]
    before = [grad.clone() for grad in kept if grad is not None]
    assert all(torch.equal(one.grad, other) for one, other in zip(by_hand, before, strict=True))
    trainings[1].run(1, start=6)
    assert all(torch.equal(grad, other) for grad, other in zip(kept, before, strict=True)), "they are the user's"


def losses_with_a_scaler() -> tuple[list[float], float]:
    torch.manual_seed(1)
    model = Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    training = Training("train_step", model, adam(model), step={"grad_scaler": scaler})
    losses = training.run(5)
    scaler.set_growth_factor(3.0)
    losses += training.run(5, start=5)
    scaler._scale = scaler._scale * 2
    losses += training.run(4, start=10)
    return losses, float(scaler.get_scale())


def test_a_scaler_whose_constants_and_tensors_are_replaced(taken: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    short = losses_with_a_scaler()
    assert {3, 4, 9} <= set(places(taken))
    assert not {5, 10} & set(places(taken))
    taken.clear()
    monkeypatch.setattr(Shortcut, "of", lambda *_: None)
    assert losses_with_a_scaler() == short
    assert not any(taken)


# What is changed before one step, which must not be answered by the short way


def set_grad(training: Training) -> None:
    training.model.first.weight.grad = torch.ones_like(training.model.first.weight)


def swap_submodules(training: Training) -> None:
    model = training.model
    for name in ("first", "last"):
        old = getattr(model, name)
        new = nn.Linear(old.in_features, old.out_features)
        new.weight, new.bias = old.weight, old.bias
        setattr(model, name, new)


def same_data_elsewhere(training: Training) -> None:
    training.model.first.weight.data = training.model.first.weight.data.clone()


def moved_state(training: Training) -> None:
    for state in training.plain.state.values():
        state["exp_avg"].data = state["exp_avg"].data.clone() * 2


def renamed_state(training: Training) -> None:
    for state in training.plain.state.values():
        first, second = state["exp_avg"], state["exp_avg_sq"]
        state.update(exp_avg=second, exp_avg_sq=first.abs())


def swapped_states(training: Training) -> None:
    states = training.plain.state
    one, other = training.model.first.bias, nn.Parameter(torch.zeros(8))
    states[other] = states.pop(one)
    states[one] = {name: value.clone() for name, value in states.pop(other).items()}


def reordered_params(training: Training) -> None:
    training.plain.param_groups[0]["params"].reverse()


def new_group_dictionary(training: Training) -> None:
    training.plain.param_groups[0] = {**training.plain.param_groups[0], "lr": 0.01}


def new_groups_list(training: Training) -> None:
    training.plain.param_groups = [{**training.plain.param_groups[0], "lr": 0.01}]


def new_state_dictionary(training: Training) -> None:
    state = training.plain.state_dict()
    for each in state["state"].values():
        each["exp_avg"] = each["exp_avg"] * 2
    training.plain.load_state_dict(state)


def frozen(training: Training) -> None:
    training.model.first.bias.requires_grad_(False)


def evaluated(training: Training) -> None:
    """Nothing in it looks at the mode, but it belongs to the signature."""
    training.model.eval()


def evaluated_part(training: Training) -> None:
    training.model.norm.eval()


def buffer_elsewhere(training: Training) -> None:
    training.model.norm.running_mean.data = training.model.norm.running_mean.data + 1


def buffer_missing(training: Training) -> None:
    training.model.norm.running_mean = training.model.norm.running_var = None


def momentum_replaced(training: Training) -> None:
    for state in training.plain.state.values():
        state["momentum_buffer"] = state["momentum_buffer"] * 3


def no_nesterov(training: Training) -> None:
    training.plain.param_groups[0]["nesterov"] = True


CHANGES: dict[Change, Build] = {
    set_grad: net_and_adam,
    swap_submodules: net_and_adam,
    same_data_elsewhere: net_and_adam,
    moved_state: net_and_adam,
    renamed_state: net_and_adam,
    swapped_states: net_and_adam,
    reordered_params: net_and_adam,
    new_group_dictionary: net_and_adam,
    new_groups_list: net_and_adam,
    new_state_dictionary: net_and_adam,
    frozen: net_and_adam,
    evaluated: net_and_adam,
    evaluated_part: norm_and_adam,
    buffer_elsewhere: norm_and_adam,
    buffer_missing: norm_and_adam,
    momentum_replaced: net_and_sgd,
    no_nesterov: net_and_sgd,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_steps(taken: list[bool], change: Change) -> None:
    def edit(training: Training, index: int) -> None:
        if index == 5:
            assert training.form == "eager" or places(taken) == [3, 4]
            change(training)

    compare("train_step", CHANGES[change], steps=10, edit=edit, replays=4, rtol=2e-6, atol=1e-7)
    assert not taken[4], "the step after the change"


def test_a_switch_that_dynamo_does_not_guard(taken: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA there are many of them."""
    switch = {"is_on": False}
    switches = ambient._switches
    monkeypatch.setattr(ambient, "_switches", lambda kind: (*switches(kind), (switch.get, ("is_on",))))

    def edit(_training: Training, index: int) -> None:
        switch["is_on"] = index == 5

    compare("train_step", steps=9, edit=edit, replays=7)
    assert places(taken) == [3, 4, 7, 8]


HARMLESS: list[Change] = [
    lambda training: training.plain.param_groups[0].update(lr=0.5),
    lambda training: training.plain.zero_grad(),
    lambda training: training.model.first.weight.data.mul_(0.5),
    lambda training: training.model.requires_grad_(True),
    lambda training: [state["exp_avg"].zero_() for state in training.plain.state.values()],
    lambda training: setattr(training.model, "unread", 3),
]


@pytest.mark.parametrize("place", range(len(HARMLESS)))
def test_what_a_graph_follows_is_no_reason_to_leave_it(taken: list[bool], place: int) -> None:
    def edit(training: Training, index: int) -> None:
        if index == 5:
            HARMLESS[place](training)

    compare("train_step", steps=8, edit=edit)
    assert places(taken) == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("composed", [False, True])
def test_a_schedule_of_every_step(taken: list[bool], composed: bool) -> None:
    """Hyperparameters beside the learning rate are followed as soon as they have proved to change."""

    def edit(training: Training, index: int) -> None:
        if index == 0:
            training.memo["schedule"] = lr_scheduler.ExponentialLR(training.plain, 0.9)
        elif index > 1:
            training.memo["schedule"].step()
            if composed:
                training.plain.param_groups[0]["betas"] = (0.9 - 0.01 * index, 0.99)

    compare("train_step", steps=12, edit=edit, replays=8, rtol=2e-6, atol=1e-7)
    assert places(taken)[-4:] == [8, 9, 10, 11]


# Where the tensors of a step come from


HOLDER = SimpleNamespace()


def holder_replaced(training: Training) -> None:
    globals()["HOLDER"] = SimpleNamespace(first=twin_of(training.model).first, last=training.model.last)


def layer_of_holder_replaced(training: Training) -> None:
    HOLDER.first = twin_of(training.model).first


def twin_of(model: nn.Module) -> Net:
    twin = Net()
    twin.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    return twin


@pytest.mark.parametrize("change", [holder_replaced, layer_of_holder_replaced])
def test_a_global_that_leads_to_parts_of_the_model(taken: list[bool], change: Change) -> None:
    """The model's own parts stay as they are, and what is found in the place of one looks alike."""

    def forward(_model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(HOLDER.last(torch.relu(HOLDER.first(x))), y)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        HOLDER.first, HOLDER.last = model.first, model.last
        return model, adam(model)

    def edit(training: Training, index: int) -> None:
        if index == 5:
            assert training.form == "eager" or taken[-1]
            change(training)

    def by_hand(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.model.zero_grad()
        loss = forward(training.model, x, y)
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    compare("train_step", build, steps=8, edit=edit, step={"forward": forward}, loop=by_hand, replays=3)
    assert not taken[4]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_tensor_of_the_loss(taken: list[bool], is_replaced: bool) -> None:
    criteria: dict[str, nn.CrossEntropyLoss] = {}

    def arguments(form: str) -> dict[str, Any]:
        criteria[form] = nn.CrossEntropyLoss(weight=torch.ones(3))
        return {"loss_fn": criteria[form]}

    def edit(training: Training, index: int) -> None:
        weight = criteria[training.form].weight
        if index == 5 and is_replaced:
            criteria[training.form].weight = torch.tensor([1.0, 2.0, 3.0])
        elif index == 5:
            weight.copy_(torch.tensor([1.0, 2.0, 3.0]))

    compare("train_step", steps=9, edit=edit, reference=arguments("eager"), **arguments("train_step"))
    assert taken[4] is not is_replaced
    assert taken[-1]


def test_a_forward_that_counts_goes_the_long_way(taken: list[bool]) -> None:
    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count = self.count + 1
            return super().forward(x) * self.count

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Counting()
        return model, adam(model)

    compare("train_step", build, replays=0)
    assert not any(taken)


# Arguments


def two_inputs(model: nn.Module, x: Tensor, z: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x) + 2 * model(z), y)


def by_hand_of_two(training: Training, *args: Tensor, **kwargs: Tensor) -> Tensor:
    training.optimizer.zero_grad()
    loss = two_inputs(training.model, *args, **kwargs)
    loss.backward()
    training.optimizer.step()
    return loss.detach()


def pair_of(index: int) -> tuple[Tensor, Tensor, Tensor]:
    ((x, y), _), ((z, _), _) = batch(index), batch(100 + index)
    return x, z, y


def swapped(index: int) -> Batch:
    x, z, y = pair_of(index)
    return (z, x, y), {}


def the_same_twice(index: int) -> Batch:
    x, _, y = pair_of(index)
    return (x, x, y), {}


def by_name(index: int) -> Batch:
    x, z, y = pair_of(index)
    return (x, z), {"y": y}


def longer(index: int) -> Batch:
    x, z, y = pair_of(index)
    return (x.repeat(2, 1), z.repeat(2, 1), y.repeat(2)), {}


def strided(index: int) -> Batch:
    x, z, y = pair_of(index)
    return (x.t().contiguous().t(), z, y), {}


def of_another_dtype(index: int) -> Batch:
    x, z, y = pair_of(index)
    return (x, z, y.to(torch.uint8)), {}


def differentiable(index: int) -> Batch:
    x, z, y = pair_of(index)
    return (x.requires_grad_(), z, y), {}


@pytest.mark.parametrize(
    ("other", "is_short"),
    [
        (swapped, True),
        (the_same_twice, False),
        (by_name, False),
        (longer, False),
        (strided, False),
        (of_another_dtype, False),
        (differentiable, False),
    ],
)
def test_other_arguments(taken: list[bool], other: Callable[[int], Batch], is_short: bool) -> None:
    def batches(index: int) -> Batch:
        return other(index) if index in (5, 9) else (pair_of(index), {})

    compare("train_step", steps=10, batches=batches, step={"forward": two_inputs}, loop=by_hand_of_two, replays=6)
    assert taken[4] is taken[8] is is_short
    assert taken[3]
    assert taken[7]


def test_keywords_in_another_order(taken: list[bool]) -> None:
    def batches(index: int) -> Batch:
        x, z, y = pair_of(index)
        return (), {"x": x, "z": z, "y": y} if index % 7 < 6 else {"z": z, "x": x, "y": y}

    compare("train_step", steps=12, batches=batches, step={"forward": two_inputs}, loop=by_hand_of_two, replays=8)
    assert places(taken) == [3, 4, 5, 8, 9, 10, 11]


def test_scalars(taken: list[bool]) -> None:
    """The same object is the same number; a number that is equal, but another, is looked at in the long way."""

    def forward(model: nn.Module, x: Tensor, y: Tensor, gain: float, name: str) -> Tensor:
        return functional.cross_entropy(model(x), y) + torch.atan2(torch.tensor(gain), torch.tensor(-1.0))

    def by_hand(training: Training, *args: Any) -> Tensor:
        training.optimizer.zero_grad()
        loss = forward(training.model, *args)
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    zero, negative = 0.0, -0.0

    def batches(index: int) -> Batch:
        args, _ = batch(index)
        return (*args, negative if index == 5 else zero, "name"), {}

    compare("train_step", steps=9, batches=batches, step={"forward": forward}, loop=by_hand, replays=6)
    assert places(taken) == [3, 4, 7, 8]


# The loop


def test_two_shapes_by_turns_keep_their_short_ways(taken: list[bool]) -> None:
    def batches(index: int) -> Batch:
        return batch(index, size=4 if index % 4 == 3 else 6)

    training = compare("train_step", steps=24, batches=batches, replays=18)
    assert [place for place in places(taken) if place > 12] == [13, 14, 17, 18, 21, 22]
    assert training.train_step is not None
    assert training.train_step._loop._latest._num_shortcuts <= 2


def test_the_work_for_short_ways_is_bounded(taken: list[bool]) -> None:
    """Something that changes at every step leaves it at the long way."""
    training = compare("train_step", steps=30, edit=lambda training, _: set_grad(training))
    assert not any(taken)
    assert training.train_step is not None
    step = training.train_step._loop._latest
    assert step is not None
    assert step._num_shortcuts <= 4


def test_replays_and_the_latest_reason_are_kept(taken: list[bool]) -> None:
    training = Training("train_step", *net_and_adam())
    training.run(10)
    assert len(places(taken)) == 7
    status = training.status()
    assert (status.mode, status.replays, status.fallbacks) == ("replay", 9, 0)


def test_calls_from_several_threads_in_turns(taken: list[bool]) -> None:
    """Modes belong to threads."""

    def run(training: Training, index: int) -> None:
        # In the same context: what an earlier test has set back in torch's configuration counts as set there alone.
        within = contextvars.copy_context()
        thread = threading.Thread(target=within.run, args=(training.run, 1), kwargs={"start": index})
        thread.start()
        thread.join()

    trainings = []
    for form in ("eager", "train_step"):
        torch.manual_seed(1)
        training = Training(form, *net_and_adam())
        training.run(5)
        with torch.autocast("cpu", dtype=torch.bfloat16):  # of this thread alone
            for index in range(5, 8):
                run(training, index)
        training.run(2, start=8)
        trainings.append(training)
    assert places(taken) == list(range(FIRST, 10))
    for one, other in zip(*(training.model.parameters() for training in trainings), strict=True):
        assert torch.equal(one, other)


def test_an_interrupted_step_is_not_counted(taken: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    call = Recording.__call__
    interrupts = iter([KeyboardInterrupt])

    def interrupted(recording: Recording, inputs: Any) -> Any:
        for error in interrupts:
            raise error
        return call(recording, inputs)

    def edit(training: Training, index: int) -> None:
        if training.form == "train_step" and index == 5:
            assert taken[-1]
            monkeypatch.setattr(Recording, "__call__", interrupted)
            (args, _) = batch(77)
            with pytest.raises(KeyboardInterrupt):
                training.step(*args)

    compare("train_step", steps=10, edit=edit, replays=6)
    assert taken[-1], "after another capture"


def test_an_interrupt_while_facts_are_checked(taken: list[bool]) -> None:
    class Interrupting(Net):
        error: type[BaseException] | None = None

        @property
        def watched(self) -> nn.Module:
            if Interrupting.error is not None:
                raise Interrupting.error
            return self

    model = Interrupting()
    training = Training("train_step", model, adam(model))
    training.run(5)
    latest = training.train_step._loop._latest if training.train_step is not None else None
    assert latest is not None
    assert latest._shortcut is not None
    before = training.observe()
    shortcut_facts = latest._shortcut._call._facts
    try:
        Interrupting.error = KeyboardInterrupt
        latest._shortcut._call._facts = PythonFacts([(0, model, "watched", model)])  # type: ignore[list-item]
        with pytest.raises(KeyboardInterrupt):
            training.run(1, start=5)
    finally:
        Interrupting.error = None
        latest._shortcut._call._facts = shortcut_facts
    after = training.observe()
    assert all(torch.equal(after[name], value) for name, value in before.items() if value is not None)
    training.run(1, start=5)
    assert taken[-1]


def test_released_graphs_are_not_repeated(taken: list[bool]) -> None:
    training = Training("train_step", *net_and_adam())
    training.run(5)
    assert taken[-1]
    assert training.train_step is not None
    step = training.train_step._loop._latest
    training.train_step.release()
    assert step is not None
    assert step.repeat(*batch(0)) is None
    training.run(5, start=5)
    assert taken[-1]


def test_a_plan_measured_in_between(taken: list[bool]) -> None:
    def edit(training: Training, index: int) -> None:
        if index == 5 and training.train_step is not None:
            args, kwargs = batch(77)
            plan = training.train_step.plan(*args, **kwargs)
            assert plan is not None
            assert plan.measured_spans

    compare("train_step", steps=8, edit=edit)
    assert places(taken) == [3, 4, 5, 6, 7]


def test_accumulation_goes_the_long_way(taken: list[bool]) -> None:
    training = Training("train_step", *net_and_adam(), step={"accumulate": 2})
    training.run(10)
    assert not any(taken)
    assert training.status().replays > 4
