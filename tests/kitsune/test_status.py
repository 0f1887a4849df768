"""The status: true figures, a text to read, and a form that JSON can hold."""

from __future__ import annotations

import dataclasses
import json
from xml.etree import ElementTree

import pytest
from torch import Tensor

from kitsune.memory.pool import PoolStatistics
from kitsune.status import Status
from tests.kitsune.training import FORMS, Net, Training, adam, net_and_adam

FULL = Status(
    mode="replay",
    reason="replay was measured faster than eager",
    covered=("forward", "loss", "backward", "update"),
    executor="cuda graph",
    fused=True,
    setup_seconds=1.5,
    eager_seconds=2e-3,
    replay_seconds=5e-4,
    graphs=2,
    replays=40,
    fallbacks=3,
    refusals=("the first", "the second"),
    not_in_effect=("num_streams",),
    memory=PoolStatistics(3, 2, 3 * 2**20, 2**21, 2**22, 0.25),
)


def test_derived_figures() -> None:
    assert FULL.gain == pytest.approx(4.0)
    assert FULL.break_even_steps == 1001
    slower = dataclasses.replace(FULL, replay_seconds=4e-3)
    assert slower.gain == pytest.approx(0.5)
    assert slower.break_even_steps is None
    unmeasured = dataclasses.replace(FULL, eager_seconds=None)
    assert unmeasured.gain is None
    assert unmeasured.break_even_steps is None


def test_the_dictionary_survives_json() -> None:
    values = FULL.as_dict()
    assert json.loads(json.dumps(values)) == values
    assert set(values) == {field.name for field in dataclasses.fields(Status)} | {"gain", "break_even_steps"}
    assert values["covered"] == ["forward", "loss", "backward", "update"]
    assert values["gain"] == FULL.gain
    assert values["memory"]["high_water_bytes"] == 2**22


def test_the_text() -> None:
    assert str(FULL) == "\n".join(
        [
            "Kitsune",
            "  mode           replay (replay was measured faster than eager)",
            "  covered        forward, loss, backward, update",
            "  executor       cuda graph, operators fused",
            "  eager step     2.00 ms",
            "  replayed step  500 us, gain 4.00x",
            "  setup          1.50 s, pays off after 1001 steps",
            "  graphs         2 held, 40 replays, 3 fallbacks",
            "  arenas         3.0 MiB held, 2.0 MiB in use, 4.0 MiB at most, fragmentation 25%, 3 hits, 2 misses",
            "  left out       the first",
            "  left out       the second",
            "  not in effect  num_streams",
        ]
    )
    assert "covered  nothing" in str(Status("idle", "no step has run yet"))


def test_the_table_for_notebooks_has_the_rows_of_the_text() -> None:
    status = dataclasses.replace(FULL, refusals=("<b> & others",))
    table = ElementTree.fromstring(status._repr_html_())
    rows = [[cell.text for cell in row] for row in table.iter("tr")]
    lines = [line.strip().split("  ", 1) for line in str(status).splitlines()[1:]]
    assert ["left out", "<b> & others"] in rows
    assert [name for name, _ in rows] == [name for name, _ in lines]
    assert all(line.endswith(text) for (_, text), (_, line) in zip(rows, lines, strict=True))


@pytest.mark.support("Speed", "set-up time, gain and break-even steps are reported", "replayed")
@pytest.mark.parametrize("form", FORMS)
def test_the_figures_of_a_measured_training(form: str) -> None:
    model, optimizer = net_and_adam()
    training = Training(form, model, optimizer, mode="auto")
    for index in range(0, 8000, 20):
        training.run(20, start=index)
        status = training.status()
        if None not in (status.eager_seconds, status.replay_seconds) and status.mode != "measuring":
            break
    assert status.eager_seconds is not None
    assert status.replay_seconds is not None
    assert status.setup_seconds > 0
    assert status.gain == status.eager_seconds / status.replay_seconds
    assert (status.break_even_steps is None) == (status.gain <= 1)
    assert (status.mode == "replay") == (status.gain > 1)


@pytest.mark.support("Speed", "status() tells what is replayed, and what of the options has no effect", "replayed")
@pytest.mark.parametrize("form", FORMS)
def test_the_status_of_a_training(form: str) -> None:
    model, optimizer = net_and_adam()
    training = Training(form, model, optimizer, enable_fusion=True)
    assert training.status().mode == "idle"
    assert training.status().covered == ()
    eager = 1 if form == "train_step" else 2
    training.run(eager)
    assert training.status().replays == 0
    assert training.status().setup_seconds == 0.0
    training.run(3, start=eager)
    status = training.status()
    assert (status.mode, status.replays, status.fallbacks, status.graphs) == ("replay", 3, 0, 1)
    whole = ("forward", "loss", "backward", "update")
    assert status.covered == (whole if form == "train_step" else ("forward", "backward", "update"))
    assert status.executor == "in order"
    assert status.setup_seconds > 0
    assert status.refusals == ()
    assert status.not_in_effect == ("enable_fusion",)
    assert (status.gain, status.break_even_steps) == (None, None)
    training.run(5, start=eager + 3)
    assert training.status().setup_seconds == status.setup_seconds
    json.dumps(status.as_dict())


@pytest.mark.parametrize("form", FORMS)
def test_replay_mode_measures_nothing_and_does_not_say_so(form: str) -> None:
    model, optimizer = net_and_adam()
    training = Training(form, model, optimizer)
    for index in range(4):
        training.run(1, start=index)
        assert training.status().mode != "measuring"


@pytest.mark.parametrize("form", FORMS)
def test_the_covered_parts_follow_what_runs(form: str) -> None:
    """A step that fell back covers nothing, whatever the one before did."""
    model, optimizer = net_and_adam()
    training = Training(form, model, optimizer)
    training.run(5)
    model.gain = 0.5
    training.run(1, start=5)
    status = training.status()
    assert status.mode == "eager"
    assert status.reason == "what the model's Python code depends on has changed: model.gain was 1.0, is 0.5"
    assert not {"forward", "backward"} & set(status.covered)
    training.run(2, start=6)
    assert training.status().mode == "replay"


@pytest.mark.parametrize("form", FORMS)
def test_a_capture_that_fails_is_setup_too(form: str) -> None:
    class Branching(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y if y.sum().item() > 0 else -y

    model = Branching()
    training = Training(form, model, adam(model))
    training.run(4)
    status = training.status()
    assert (status.mode, status.replays) == ("eager", 0)
    assert status.setup_seconds > 0
