"""What has changed since a capture is told by its name in the user's program, from what and to what."""

from __future__ import annotations

import dataclasses
import enum
import functools
import gc
import logging
import os
import sys
import types
from abc import ABC
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from kitsune.capture import changes, frontend
from kitsune.capture.named_places import MISSING, UNREADABLE, read_attribute, read_item
from kitsune.capture.shown_values import shown
from kitsune.errors import Refusal, RefusedError
from kitsune.loop.variants import MOST_USELESS, REFUSALS_UNTIL_GIVEN_UP
from tests.kitsune.capture.test_frontend import guarded
from tests.kitsune.training import Net as TrainedNet
from tests.kitsune.training import Training, sgd

HAS_CHANGED = "what the model's Python code depends on has changed"
HERE = __name__

STEP = 1.0
SETTINGS = {"k": 1.0}


class Color(enum.Enum):
    RED = 1.0
    BLUE = 2.0


@dataclasses.dataclass
class Config:
    k: float = 1.0
    color: Color = Color.RED
    other: Any = None


class Plain:
    """An object of no kind in particular."""

    shared = 1.0


class Pair(NamedTuple):
    k: float = 1.0
    other: float = 1.0


class Slotted:
    __slots__ = ("k",)


DEFAULT = Config()
HELPERS: Any = types.ModuleType("helpers_of_the_test")
sys.modules[HELPERS.__name__] = HELPERS
exec("STEP = 1.0\ndef stepped(x):\n    return x * STEP", vars(HELPERS))


def scaled(x: Tensor, by: float = 2.0, *, more: float = 1.0) -> Tensor:
    return x * by * more


def halved(x: Tensor) -> Tensor:
    return x * 0.5


@functools.lru_cache
def kept(size: int) -> Plain:
    found = Plain()
    found.size = size  # type: ignore[attr-defined]
    return found


def counting() -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    factor = 3.0

    def count(x: Tensor) -> Tensor:
        return x * factor

    def set_factor(value: float) -> None:
        nonlocal factor
        factor = value

    return count, set_factor


COUNT, SET_FACTOR = counting()


class Net(nn.Module):
    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.bn = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("mean", torch.ones(4))
        self.mean: Tensor
        self.k, self.zero, self.default = 1.0, 0.0, DEFAULT
        self.name, self.flag, self.nothing = "mean", True, None
        self.config, self.plain, self.slotted = Config(), Plain(), Slotted()
        self.slotted.k = 1.0
        self.numbers, self.sizes, self.names = [1.0, 2.0], (1, 2), {"a", "b"}
        self.pair, self.queue = Pair(), deque([1.0, 2.0])
        self.register_buffer("other_mean", torch.ones(4))
        self.table, self.ordered = {"a": 1.0}, OrderedDict(a=1.0)
        self.act: Any = halved
        self.of_torch = torch.relu
        self.partial = functools.partial(scaled, by=3.0)

    def scaled(self, x: Tensor) -> Tensor:
        return x * 2


IS_3_13_0 = sys.version_info[:3] == (3, 13, 0)  # where what a partial has got is not found again
Use = Callable[[Any, Tensor], Tensor]
Set = Callable[[Any, pytest.MonkeyPatch], object]


def case(name: str, use: Use, change: Set, text: str, *, marks: Any = ()) -> Any:
    return pytest.param(use, change, text, id=name.replace(" ", "-"), marks=marks)


def set_global(patch: pytest.MonkeyPatch, name: str, value: object) -> None:
    patch.setitem(globals(), name, value)


def rename(names: OrderedDict[str, float]) -> None:
    names["b"] = names.pop("a")


def freeze(model: Any, _patch: pytest.MonkeyPatch) -> None:
    model.lin.weight.requires_grad_(False)


CASES = [
    # attributes
    case("attribute", lambda m, x: x * m.k, lambda m, _: setattr(m, "k", 2.0), "model.k was 1.0, is 2.0"),
    case("type", lambda m, x: x * m.k, lambda m, _: setattr(m, "k", 1), "model.k was 1.0, is 1"),
    case("sign of zero", lambda m, x: x * m.zero, lambda m, _: setattr(m, "zero", -0.0), "model.zero was 0.0, is -0.0"),
    case(
        "flag",
        lambda m, x: x if m.flag else -x,
        lambda m, _: setattr(m, "flag", False),
        "model.flag was True, is False",
    ),
    case(
        "text",
        lambda m, x: x if m.name == "mean" else -x,
        lambda m, _: setattr(m, "name", "a" * 99),
        f"model.name was 'mean', is '{'a' * 34}'...",
    ),
    case(
        "none",
        lambda m, x: x if m.nothing is None else -x,
        lambda m, _: setattr(m, "nothing", m.config),
        "model.nothing was None, is a Config",
    ),
    case("gone", lambda m, x: x * m.k, lambda m, _: delattr(m, "k"), "model.k was there, is missing"),
    case(
        "come",
        lambda m, x: x * getattr(m, "zoom", 1.0),
        lambda m, _: setattr(m, "zoom", 2.0),
        "model.zoom was missing, is 2.0",
    ),
    case(
        "dict of the object",
        lambda m, x: x * m.__dict__.get("zoom", 1.0),
        lambda m, _: setattr(m, "zoom", 2.0),
        "model.zoom was missing, is 2.0",
    ),
    case(
        "over the class",
        lambda m, x: x * m.gain,
        lambda m, _: setattr(m, "gain", 2.0),
        "model.gain was that of the class Net, is 2.0",
    ),
    case("training", lambda m, x: m.bn(x), lambda m, _: m.bn.eval(), "model.bn.training was True, is False"),
    case(
        "momentum",
        lambda m, x: m.bn(x),
        lambda m, _: setattr(m.bn, "momentum", 0.5),
        "model.bn.momentum was 0.1, is 0.5",
    ),
    case(
        "slot",
        lambda m, x: x * m.slotted.k,
        lambda m, _: setattr(m.slotted, "k", 2.0),
        "model.slotted.k was 1.0, is 2.0",
    ),
    case(
        "dataclass",
        lambda m, x: x * m.config.k,
        lambda m, _: setattr(m.config, "k", 2.0),
        "model.config.k was 1.0, is 2.0",
    ),
    case(
        "other dataclass",
        lambda m, x: x * m.config.k,
        lambda m, _: setattr(m, "config", Config(5.0)),
        "model.config.k was 1.0, is 5.0",
    ),
    case(
        "class of the object",
        lambda m, x: x * m.config.k,
        lambda m, _: setattr(m, "config", m.slotted),
        "model.config was a Config, is a Slotted",
    ),
    case(
        "enumeration",
        lambda m, x: x * m.config.color.value,
        lambda m, _: setattr(m.config, "color", Color.BLUE),
        "model.config.color was Color.RED, is Color.BLUE",
    ),
    # containers
    case("item", lambda m, x: x * m.table["a"], lambda m, _: m.table.update(a=2.0), "model.table['a'] was 1.0, is 2.0"),
    case(
        "item of ordered",
        lambda m, x: x * m.ordered["a"],
        lambda m, _: m.ordered.update(a=2.0),
        "model.ordered['a'] was 1.0, is 2.0",
    ),
    case(
        "key gone",
        lambda m, x: x * m.table["a"],
        lambda m, _: m.table.clear(),
        "model.table['a'] was there, is missing",
    ),
    case(
        "key come",
        lambda m, x: x * m.table.get("b", 1.0),
        lambda m, _: m.table.update(b=2.0),
        "model.table['b'] was missing, is 2.0",
    ),
    case(
        "size of dict",
        lambda m, x: x * sum(m.table.values()),
        lambda m, _: m.table.update(b=2.0),
        "the length of model.table was 1, is 2",
    ),
    case(
        "length",
        lambda m, x: x * sum(m.numbers),
        lambda m, _: m.numbers.append(3.0),
        "the length of model.numbers was 2, is 3",
    ),
    case(
        "member",
        lambda m, x: x * m.numbers[1],
        lambda m, _: m.numbers.__setitem__(1, 3.0),
        "model.numbers[1] was 2.0, is 3.0",
    ),
    case(
        "tuple",
        lambda m, x: x.view(m.sizes[0], -1),
        lambda m, _: setattr(m, "sizes", (2, 2)),
        "model.sizes was (1, 2), is (2, 2)",
    ),
    case(
        "set",
        lambda m, x: x if "a" in m.names else -x,
        lambda m, _: m.names.discard("a"),
        "'a' in model.names was True, is False",
    ),
    case(
        "named tuple",
        lambda m, x: x * m.pair.k,
        lambda m, _: setattr(m, "pair", Pair(2.0)),
        "model.pair.k was 1.0, is 2.0",
    ),
    case(
        "deque",
        lambda m, x: x * len(m.queue),
        lambda m, _: m.queue.append(3.0),
        "the length of model.queue was 2, is 3",
    ),
    case(
        "order of keys",
        lambda m, x: x * len(",".join(m.ordered)),
        lambda m, _: rename(m.ordered),
        "key 0 of model.ordered was 'a', is 'b'",
    ),
    # variables
    case(
        "global of another module",
        lambda m, x: HELPERS.stepped(x),
        lambda _, p: p.setattr(HELPERS, "STEP", 2.0),
        "the global STEP of module helpers_of_the_test was 1.0, is 2.0",
    ),
    case(
        "global",
        lambda m, x: x * STEP,
        lambda _, p: set_global(p, "STEP", 2.0),
        f"the global STEP of module {HERE} was 1.0, is 2.0",
    ),
    case(
        "global object",
        lambda m, x: x * DEFAULT.k,
        lambda _, p: p.setattr(DEFAULT, "k", 2.0),
        f"the global DEFAULT.k of module {HERE} was 1.0, is 2.0",
    ),
    case(
        "global item",
        lambda m, x: x * SETTINGS["k"],
        lambda _, p: p.setitem(SETTINGS, "k", 2.0),
        f"the global SETTINGS['k'] of module {HERE} was 1.0, is 2.0",
    ),
    case(
        "closure",
        lambda m, x: COUNT(x),
        lambda *_: SET_FACTOR(COUNT.__closure__[0].cell_contents + 1),
        "the variable factor of count() was 3.0, is 4.0",
    ),  # type: ignore[attr-defined]
    case(
        "default",
        lambda m, x: scaled(x),
        lambda _, p: p.setattr(scaled, "__defaults__", (5.0,)),
        "the default of by in scaled() was 2.0, is 5.0",
    ),
    case(
        "keyword default",
        lambda m, x: scaled(x),
        lambda _, p: p.setitem(scaled.__kwdefaults__, "more", 5.0),
        "the default of more in scaled() was 1.0, is 5.0",
    ),
    case(
        "class attribute",
        lambda m, x: x * Plain.shared,
        lambda _, p: p.setattr(Plain, "shared", 2.0),
        "Plain.shared was 1.0, is 2.0",
    ),
    case(
        "class attribute by the object",
        lambda m, x: x * m.plain.shared,
        lambda _, p: p.setattr(Plain, "shared", 2.0),
        "Plain.shared was 1.0, is 2.0",
    ),
    # which object it is
    case(
        "one",
        lambda m, x: x if m.config is DEFAULT else -x,
        lambda m, _: setattr(m, "config", DEFAULT),
        f"model.config and the global DEFAULT of module {HERE} are one object now",
    ),
    case(
        "two",
        lambda m, x: x * m.default.k * DEFAULT.k,
        lambda m, p: setattr(m, "default", Config()),
        f"model.default and the global DEFAULT of module {HERE} are two objects now",
    ),
    case(
        "none that is an object",
        lambda m, x: x if m.plain is m.config.other else -x,
        lambda m, _: setattr(m.config, "other", m.plain),
        "model.config.other was None, is a Plain",
    ),
    case(
        "function",
        lambda m, x: m.act(x),
        lambda m, _: setattr(m, "act", scaled),
        "model.act was the function halved, is the function scaled",
    ),
    case(
        "function of torch",
        lambda m, x: m.of_torch(x),
        lambda m, _: setattr(m, "of_torch", torch.tanh),
        "model.of_torch was the function relu, is the function tanh",
    ),
    case(
        "partial",
        lambda m, x: m.partial(x),
        lambda m, _: setattr(m, "partial", functools.partial(scaled, by=4.0)),
        "model.partial.keywords['by'] " + ("is no longer 3.0" if IS_3_13_0 else "was 3.0, is 4.0"),
    ),
    # what runs
    case("method", lambda m, x: m.scaled(x), lambda _, p: p.setattr(Net, "scaled", halved), "Net.scaled was replaced"),
    case(
        "method of an object",
        lambda m, x: m.scaled(x),
        lambda m, _: setattr(m, "scaled", halved),
        "model.scaled was that of the class Net, is the function halved",
    ),
    case(
        "method come",
        lambda m, x: m.scaled(x),
        lambda _, p: p.setattr(Net, "late", halved, raising=False),
        "Net.late was missing, is the function halved",
    ),
    case(
        "code",
        lambda m, x: halved(x),
        lambda _, p: p.setattr(halved, "__code__", (lambda x: -x).__code__),
        "the code of halved() was replaced",
    ),
    case(
        "builtin",
        lambda m, x: x * len(m.numbers),
        lambda _, p: p.setitem(globals(), "len", max),
        f"the global len of module {HERE} was missing, is the function max",
    ),
    case(
        "environment",
        lambda m, x: x if "KITSUNE_TEST" in os.environ else -x,
        lambda _, p: p.setenv("KITSUNE_TEST", "1"),
        "the environment variable KITSUNE_TEST was changed",
    ),
    case(
        "abstract class",
        lambda m, x: x if isinstance(m.plain, ABC) else -x,
        lambda *_: ABC.register(Slotted),
        "the classes that count as abstract ones have changed (as by ABC.register)",
    ),
    case(
        "kept result",
        lambda m, x: x * kept(2).size,
        lambda *_: kept.cache_clear(),
        "what kept() keeps is not what it was",
    ),  # type: ignore[attr-defined]
    # tensors and modules
    case(
        "one tensor",
        lambda m, x: x * m.mean * m.other_mean,
        lambda m, _: setattr(m, "other_mean", m.mean),
        "model.mean and model.other_mean are one tensor now",
    ),
    case(
        "frozen",
        lambda m, x: m.lin(x),
        freeze,
        "model.lin.weight.requires_grad was True, is False",
        marks=pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo has no such guard; recordings look"),
    ),
    case(
        "shape",
        lambda m, x: x * m.mean,
        lambda m, _: setattr(m, "mean", torch.ones(1)),
        "model.mean.shape[0] was 4, is 1",
    ),
    case(
        "dtype",
        lambda m, x: x * m.mean,
        lambda m, _: setattr(m, "mean", m.mean.double()),
        "model.mean.dtype was Float, is Double",
    ),
    case(
        "module",
        lambda m, x: m.lin(x),
        lambda m, _: setattr(m, "lin", nn.Identity()),
        "model.lin was a Linear, is an Identity",
    ),
    case(
        "module in a list",
        lambda m, x: m.layers[1](x),
        lambda m, _: m.layers.__setitem__(1, nn.Tanh()),
        "model.layers.1 was a Linear, is a Tanh",
    ),
    case(
        "hook",
        lambda m, x: m.lin(x),
        lambda m, _: m.lin.register_forward_hook(lambda *_: None),
        "the length of model.lin._forward_hooks was 0, is 1",
    ),
    case(
        "autocast",
        lambda m, x: m.lin(x),
        lambda _, p: torch.set_autocast_enabled("cpu", True),
        "the state of torch has changed (autocast(cpu)_enabled)",
    ),
]


def captured(use: Use, model: nn.Module) -> Callable[[], Tensor]:
    def call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        return use(model, *args, **kwargs)

    guarded_call, runner = guarded(call)
    args = (torch.ones(3, 4),)
    for _ in range(2):
        guarded_call(args, {})
    assert len(runner.graphs) == 2

    def again() -> Tensor:
        assert all(graph is runner.graphs[0] for graph in runner.graphs)
        result: Tensor = guarded_call(args, {})
        return result

    return again


@pytest.mark.parametrize(("use", "change", "text"), CASES)
def test_a_change_is_told(use: Use, change: Set, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KITSUNE_TEST", raising=False)
    SET_FACTOR(3.0)
    model = Net()
    call = captured(use, model)
    try:
        change(model, monkeypatch)
        with pytest.raises(RefusedError) as caught:
            call()
    finally:
        torch.set_autocast_enabled("cpu", False)
    assert caught.value.refusal.reason == f"{HAS_CHANGED}: {text}"
    assert caught.value.passing


def test_what_is_gone_is_told() -> None:
    """As a built-in method, which Dynamo knows by its address, where another one may lie later."""
    holder: Any = types.SimpleNamespace(note=[1.0].append)
    call = captured(lambda _, x: x if holder.note is None else x * 2, nn.Module())
    holder.note = None
    gc.collect()
    with pytest.raises(RefusedError, match="has changed: something that the model used no longer exists"):
        call()


def test_what_cannot_be_told_is_a_change_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    call = captured(lambda m, x: x * m.k, model)
    model.k = 2.0
    monkeypatch.setattr(changes, "_PATTERNS", ())
    with pytest.raises(RefusedError, match=f"^{HAS_CHANGED} since the capture$"):
        call()
    monkeypatch.undo()
    with pytest.raises(RefusedError, match=f"^{HAS_CHANGED}: model.k was 1.0, is 2.0$"):
        call()


class Peculiar:
    """Whose every method is the user's code, which is not to run for a message."""

    own = 1.0

    @property
    def computed(self) -> float:
        raise AssertionError

    def __getattr__(self, name: str) -> Any:
        raise AssertionError

    def __repr__(self) -> str:
        raise AssertionError

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError

    __str__ = __len__ = __eq__ = __hash__ = __bool__ = __repr__  # type: ignore[assignment]


class Answering(dict[Any, Any]):
    """A dictionary that makes what it does not have."""

    def __missing__(self, key: object) -> Any:
        raise AssertionError

    __getitem__ = __contains__ = __len__ = __iter__ = __missing__  # type: ignore[assignment]


def test_reading_runs_no_code_of_the_users() -> None:
    peculiar = Peculiar()
    assert read_attribute(peculiar, "own") == 1.0
    assert read_attribute(peculiar, "computed") is UNREADABLE
    assert read_attribute(peculiar, "unknown") is MISSING
    assert read_attribute(torch.ones(2), "grad") is UNREADABLE
    assert read_item(Answering(a=1), "a") == 1
    assert read_item(Answering(), "a") is MISSING
    assert read_item([1, 2], 5) is MISSING
    assert read_item({}, []) is UNREADABLE
    assert read_item(peculiar, "own") is UNREADABLE
    assert shown(peculiar) == "a Peculiar"
    assert shown([peculiar, 1]) == "[a Peculiar, 1]"


def test_a_message_runs_no_code_of_the_users() -> None:
    model = Net()
    model.config.other = 1
    call = captured(lambda m, x: x if m.config.other is None else x * 2, model)
    model.config.other = Peculiar()
    with pytest.raises(RefusedError, match=r"model\.config\.other was 1, is a Peculiar$"):
        call()


def test_a_property_is_told_by_what_it_reads() -> None:
    class Computing(nn.Module):
        factor = 1.0

        @property
        def doubled(self) -> float:
            return self.factor * 2

    model: Any = Computing()
    call = captured(lambda m, x: x * m.doubled, model)
    model.factor = 2.0
    with pytest.raises(RefusedError, match=r"model\.factor was that of the class Computing, is 2.0$"):
        call()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "1"),
        (10**100, "a large int"),
        ("a" * 100, f"'{'a' * 34}'..."),
        ((1, "a", None), "(1, 'a', None)"),
        ((1,), "(1,)"),
        ([], "[]"),
        (list(range(100)), "a list of 100"),
        ([[1], 2], "[..., 2]"),
        (torch.float16, "torch.float16"),
        (torch.Size([2, 3]), "(2, 3)"),
        (torch.ones(3), "a Tensor"),
        (nn.Linear(2, 2), "a Linear"),
        (Color.RED, "Color.RED"),
        (Config, "the class Config"),
        (scaled, "the function scaled"),
        (len, "the function len"),
        (Net.scaled, "the function Net.scaled"),
        (sys, "the module sys"),
        ({"a": 1}, "a dict"),
    ],
)
def test_values_are_shown_in_short(value: object, text: str) -> None:
    assert shown(value) == text


FORMS: dict[str, dict[str, Any]] = {
    "train_step": {},
    "drop_in": {},
    "deferred": {"defer_loss": True},
    "train_step under autocast": {"enable_amp": True},
    "drop_in under autocast": {"enable_amp": True},
}


def training(form: str) -> Training:
    model = TrainedNet(batch_norm=True)
    return Training("drop_in" if form == "deferred" else form.partition(" ")[0], model, sgd(model), **FORMS[form])


@pytest.mark.parametrize("form", FORMS)
def test_the_status_tells_what_has_changed(form: str) -> None:
    run = training(form)
    run.run(6)
    run.model.norm.momentum = 0.5
    run.run(6, start=6)
    status = run.status()
    assert status.mode == "replay", status
    assert f"{HAS_CHANGED}: model.norm.momentum was 0.1, is 0.5" in status.refusals


@pytest.mark.parametrize("form", FORMS)
def test_what_changes_for_ever_is_told_once_and_is_the_reason(form: str, caplog: pytest.LogCaptureFixture) -> None:
    run = training(form)
    with caplog.at_level(logging.INFO, logger="kitsune"):
        for index in range(8 + MOST_USELESS + REFUSALS_UNTIL_GIVEN_UP):
            run.model.gain = 1.0 + index
            run.run(1, start=index)
    status = run.status()
    assert status.mode == "eager", status
    assert f"{HAS_CHANGED}: model.gain was" in status.reason
    told = [refusal for refusal in status.refusals if refusal.startswith(HAS_CHANGED)]
    assert len(told) == 1
    assert sum(f"plain PyTorch: {HAS_CHANGED}" in message for message in caplog.messages) == 1


def test_replays_ask_for_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def changed(_self: Any, args: tuple[Any, ...]) -> Refusal:
        asked.append(args)
        return Refusal("changed")

    monkeypatch.setattr(frontend.GuardedFunction, "_changed", changed)
    model = Net()
    call = captured(lambda m, x: x * m.k, model)
    for _ in range(3):
        call()
    assert not asked
    model.k = 2.0
    with pytest.raises(RefusedError, match=r"^changed$"):
        call()
    assert len(asked) == 1
