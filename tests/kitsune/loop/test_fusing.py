"""Which layouts are tried when a step is rewritten."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from kitsune.fusion.ahead import compile_ahead
from kitsune.fusion.judge import Verdict
from kitsune.fusion.match import Alone
from kitsune.loop import fusing
from tests.kitsune.fusion.running import never
from tests.kitsune.passes.running import OPERATORS
from tests.kitsune.passes.test_channels_last import step
from tests.kitsune.passes.test_spare_copies import step as attention_step


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
    monkeypatch.setattr(fusing, "Measured", lambda *_, **__: Never())
    monkeypatch.setattr(fusing, "INDUCTOR", OPERATORS)
    found = fusing.rewritten(step(name, half=half).module, torch.device("cpu"))
    used = [fusion.template for _, fusions in found for fusion in fusions if fusion.refusal is None]
    assert used == ["channels last"] * tried


def test_a_graph_with_fewer_copies_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing, "Measured", lambda *_, **__: Never())
    monkeypatch.setattr(fusing, "INDUCTOR", OPERATORS)
    module = attention_step(half=True).module
    ((found, fusions),) = fusing.rewritten(module, torch.device("cpu"))
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

    def record(parts: list[Alone], *args: object, **options: object) -> None:
        some.extend(parts)
        compile_ahead(parts, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setenv("KITSUNE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(fusing, "INDUCTOR", OPERATORS)
    monkeypatch.setattr(fusing, "compile_ahead", record)
    return some


def test_all_layouts_are_prepared_before_one_is_tried(prepared: list[Alone], monkeypatch: pytest.MonkeyPatch) -> None:
    counts = set()

    class Watching(Never):
        def __call__(self, alone: object) -> Verdict:
            counts.add(len(prepared))
            return super().__call__(alone)

    monkeypatch.setattr(fusing, "Measured", lambda *_, **__: Watching())
    fusing.rewritten(step("lenet", half=True).module, torch.device("cpu"))
    assert counts == {len(prepared)} != {0}


def test_what_is_known_is_neither_prepared_nor_tried_where_it_is_refused(
    prepared: list[Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusing, "known", lambda *_: Verdict("it is not faster", 1.0, 2.0))
    monkeypatch.setattr(fusing, "Measured", lambda *_, **__: Never())
    monkeypatch.setattr(Never, "__call__", lambda *_: pytest.fail("tried"))
    monkeypatch.setattr(fusing, "_with_regions", lambda fused, *_: fused)
    found = fusing.rewritten(step("lenet", half=True).module, torch.device("cpu"))
    assert [fusion.template for _, fusions in found for fusion in fusions if fusion.refusal is None] == [
        "channels last"
    ]
    assert prepared == []


def test_what_is_known_to_be_used_is_prepared_and_not_tried(
    prepared: list[Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusing, "known", lambda *_: Verdict(None, 2.0, 1.0))
    monkeypatch.setattr(fusing, "Measured", lambda *_, **__: Never())
    found = fusing.rewritten(step("lenet", half=True).module, torch.device("cpu"))
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
            return self._limit_s != fusing._SECONDS_FOR_THE_STEP

    monkeypatch.setattr(fusing, "_SECONDS_FOR_THE_STEP", 17.0)
    monkeypatch.setattr(fusing, "Measured", Late)
    ((_, fusions), *_) = fusing.rewritten(step("lenet", half=True).module, torch.device("cpu"))
    used = {fusion.template for fusion in fusions if fusion.refusal is None}
    late = {fusion.template for fusion in fusions if "no time left" in (fusion.refusal or "")}
    assert used == {"casts of many inputs", "step counts"}
    assert {"linear + relu", "region"} <= late


def test_it_tells_the_user_while_it_compiles(
    prepared: list[Alone], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fusing, "_SILENT_SECONDS", 0.0)
    monkeypatch.setattr(fusing, "Measured", lambda *_, **__: Never())

    def compile_and_stop(parts: list[Alone], device: torch.device, **options: object) -> None:
        compile_ahead(parts, device, **options)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(fusing, "compile_ahead", compile_and_stop)
    with caplog.at_level(logging.WARNING, "kitsune"), pytest.raises(KeyboardInterrupt):
        fusing.rewritten(step("lenet", half=True).module, torch.device("cpu"))
    assert [record.message for record in caplog.records if "are being fused" in record.message]
