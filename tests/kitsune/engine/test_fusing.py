"""Which layouts are tried when a step is rewritten, and what goes on meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import fx

from kitsune.background import Background, is_quiet, wait_until_quiet
from kitsune.engine import rewriting
from kitsune.engine.fusing import Fusing
from kitsune.engine.rewriting import Rewritten
from kitsune.fusion.judge import Verdict
from kitsune.fusion.match import Alone
from tests.kitsune.compiling import Compiling
from tests.kitsune.fusion.running import never
from tests.kitsune.passes.running import OPERATORS
from tests.kitsune.passes.test_channels_last import step
from tests.kitsune.passes.test_spare_copies import step as attention_step
from tests.kitsune.plans import compile_at_once, fused_at_once


def rewritten(module: fx.GraphModule, device: torch.device) -> tuple[Rewritten, ...]:
    return fused_at_once(module, device).result()


class Never:
    def __call__(self, alone: object) -> Verdict:
        return never(alone)

    def is_late(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("name", "half", "allow_tf32", "tried"),
    [
        ("lenet", True, True, True),
        ("lenet", False, False, True),
        ("lenet", False, True, False),  # it would be rounded in this layout, and is not in the user's
    ],
)
def test_channels_last_is_tried_where_it_changes_no_precision(
    name: str, half: bool, allow_tf32: bool, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allow_tf32)
    monkeypatch.setattr(rewriting, "Measured", lambda *_, **__: Never())
    monkeypatch.setattr(rewriting, "INDUCTOR", OPERATORS)
    found = rewritten(step(name, half=half).module, torch.device("cpu"))
    used = [fusion.template for _, fusions in found for fusion in fusions if fusion.refusal is None]
    assert used == ["channels last"] * tried


def test_a_graph_with_fewer_copies_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriting, "Measured", lambda *_, **__: Never())
    monkeypatch.setattr(rewriting, "INDUCTOR", OPERATORS)
    module = attention_step(half=True).module
    ((found, fusions),) = rewritten(module, torch.device("cpu"))
    (spared,) = (fusion for fusion in fusions if fusion.refusal is None)
    assert spared.template == "spared copies"
    copies = [node.name for node in module.graph.nodes if node.target is torch.ops.aten.clone.default]
    assert set(spared.operators) <= set(copies)
    left = [node for node in found.graph.nodes if node.target is torch.ops.aten.clone.default]
    assert len(left) < len(copies)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Alone]:
    """The parts that are compiled ahead."""
    some: list[Alone] = []

    def record(parts: list[Alone], device: torch.device, *, limit_s: float) -> Iterator[Background[bool | None]]:
        some.extend(parts)
        return compile_at_once(parts, device, limit_s=limit_s)

    monkeypatch.setenv("KITSUNE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(rewriting, "INDUCTOR", OPERATORS)
    monkeypatch.setattr(rewriting, "compile_ahead", record)
    return some


def test_all_layouts_are_prepared_before_one_is_tried(prepared: list[Alone], monkeypatch: pytest.MonkeyPatch) -> None:
    counts = set()

    class Watching(Never):
        def __call__(self, alone: object) -> Verdict:
            counts.add(len(prepared))
            return super().__call__(alone)

    monkeypatch.setattr(rewriting, "Measured", lambda *_, **__: Watching())
    rewritten(step("lenet", half=True).module, torch.device("cpu"))
    assert counts == {len(prepared)} != {0}


def test_what_is_known_is_neither_prepared_nor_tried_where_it_is_refused(
    prepared: list[Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewriting, "known", lambda *_: Verdict("it is not faster", 1.0, 2.0))
    monkeypatch.setattr(rewriting, "Measured", lambda *_, **__: Never())
    monkeypatch.setattr(Never, "__call__", lambda *_: pytest.fail("tried"))
    monkeypatch.setattr(rewriting, "_with_regions", lambda fused, *_: fused)
    found = rewritten(step("lenet", half=True).module, torch.device("cpu"))
    assert [fusion.template for _, fusions in found for fusion in fusions if fusion.refusal is None] == [
        "channels last"
    ]
    assert prepared == []


def test_what_is_known_to_be_used_is_prepared_and_not_tried(
    prepared: list[Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewriting, "known", lambda *_: Verdict(None, 2.0, 1.0))
    monkeypatch.setattr(rewriting, "Measured", lambda *_, **__: Never())
    found = rewritten(step("lenet", half=True).module, torch.device("cpu"))
    assert prepared
    used = {fusion.template for _, fusions in found for fusion in fusions if fusion.refusal is None}
    assert "linear + relu" in used, "it was tried, and refused"


def test_layers_leave_time_for_what_is_about_the_whole_step(
    prepared: list[Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so does the step for regions."""

    class Late(Never):
        """Has no time for layers, nor for regions."""

        def __init__(self, device: torch.device, cache: object, *, limit_s: float) -> None:
            self._limit_s = limit_s

        def __call__(self, alone: object) -> Verdict:
            return Verdict("there was no time left to try it") if self.is_late() else Verdict(None, 2.0, 1.0)

        def is_late(self) -> bool:
            return self._limit_s != rewriting._SECONDS_FOR_THE_STEP

    monkeypatch.setattr(rewriting, "_SECONDS_FOR_THE_STEP", 17.0)
    monkeypatch.setattr(rewriting, "Measured", Late)
    ((_, fusions), *_) = rewritten(step("lenet", half=True).module, torch.device("cpu"))
    used = {fusion.template for fusion in fusions if fusion.refusal is None}
    late = {fusion.template for fusion in fusions if "no time left" in (fusion.refusal or "")}
    assert used == {"casts of many inputs", "casts of many results", "step counts"}
    assert {"linear + relu", "region"} <= late


@pytest.fixture
def _nothing_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriting, "Measured", lambda *_, **__: Never())
    monkeypatch.setattr(rewriting, "INDUCTOR", OPERATORS)


@pytest.mark.usefixtures("_nothing_is_faster")
def test_it_waits_for_nothing_and_tries_when_all_is_compiled(
    compiling: Compiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[object] = []
    monkeypatch.setattr(Never, "__call__", lambda _, alone: tried.append(alone) or never(alone))
    under_way = Fusing(step("lenet", half=True).module, [torch.empty(0)])
    assert under_way.may_go_on()
    for count, end in zip((3, 2), compiling.ends, strict=True):
        for _ in range(3):
            assert not under_way.advance()
            assert not under_way.may_go_on()
        assert f"0 of {count} parts" in under_way.describe()
        assert not tried
        end.set()
        wait_until_quiet()
        assert under_way.may_go_on()
    assert under_way.advance()
    assert tried
    assert len(under_way.result()) == 1
    count = len(tried)
    assert under_way.advance()
    assert len(tried) == count


@pytest.mark.usefixtures("_nothing_is_faster")
def test_modes_of_the_user_are_left_alone(compiling: Compiling, monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, modes = Fusing(step("lenet", half=True).module, [torch.empty(0)]), list[tuple[bool, bool]]()

    def judge(_: Never, alone: object) -> Verdict:
        modes.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return never(alone)

    monkeypatch.setattr(Never, "__call__", judge)
    state = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        for end in compiling.ends:
            assert not under_way.advance()
            assert torch.is_grad_enabled()
            assert torch.is_autocast_enabled("cpu")
            end.set()
            wait_until_quiet()
        assert under_way.advance()
        assert torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert set(modes) == {(False, False)}
    assert torch.equal(torch.get_rng_state(), state)


def test_what_goes_wrong_is_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(rewriting, "compile_ahead", fail)
    under_way = Fusing(step("lenet", half=True).module, [torch.empty(0)])
    assert under_way.advance()
    with pytest.raises(torch.OutOfMemoryError) as raised:
        under_way.result()
    assert all("fail" not in str(entry.name) for entry in raised.traceback), "its values are kept alive"


@pytest.mark.usefixtures("_nothing_is_faster")
def test_after_an_interrupt_it_begins_anew(compiling: Compiling, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> Verdict:
        raise KeyboardInterrupt

    under_way = Fusing(step("lenet", half=True).module, [torch.empty(0)])
    for end in compiling.ends:
        assert not under_way.advance()
        end.set()
        wait_until_quiet()
    with monkeypatch.context() as patch:
        patch.setattr(Never, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            under_way.advance()
    while not under_way.advance():
        wait_until_quiet()
    assert len(under_way.result()) == 1


@pytest.mark.usefixtures("_nothing_is_faster")
@pytest.mark.parametrize("way", ["close", "delete"])
def test_without_its_owner_it_ends(way: str, compiling: Compiling) -> None:
    before = set(threading.enumerate())
    under_way = Fusing(step("lenet", half=True).module, [torch.empty(0)])
    assert not under_way.advance()
    assert not is_quiet()
    if way == "close":
        under_way.close()
    del under_way
    assert compiling.ends[0].is_set()
    wait_until_quiet()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=60)
        assert not thread.is_alive()


@pytest.mark.usefixtures("_nothing_is_faster")
def test_others_are_waited_for(compiling: Compiling) -> None:
    """Two at a time would take twice the memory, and each would disturb what the other times."""
    first, second = (Fusing(step("lenet", half=True).module, [torch.empty(0)]) for _ in range(2))
    assert not first.advance()
    assert not second.may_go_on()
    assert not second.advance()
    assert "about to be fused" in second.describe()


@pytest.mark.usefixtures("_nothing_is_faster")
def test_it_tells_the_user_while_it_compiles(
    compiling: Compiling, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rewriting, "_SILENT_SECONDS", 0.0)
    under_way = Fusing(step("lenet", half=True).module, [torch.empty(0)])
    with caplog.at_level(logging.INFO, "kitsune"):
        assert not under_way.advance()
        for _ in range(3):
            assert not under_way.may_go_on()
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    (warning,) = (text for level, text in told if level == "WARNING")
    assert "are being fused" in warning
    assert ("INFO", "fusion: kernels of 0 of 3 parts are compiled") in told
