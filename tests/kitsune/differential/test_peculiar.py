"""Each peculiar layer by itself, in each form: changed once in the midst of training, and by turns."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kitsune.differential.agreement import run_both
from tests.kitsune.differential.peculiar import PECULIAR, Peculiar
from tests.kitsune.differential.programs import Program

FORMS = {"drop_in": False, "drop_in, deferred": True, "train_step": False}
ONCE = ((4, "change_layers"),)
CHANGING = sorted(name for name, make in PECULIAR.items() if type(make()).change is not Peculiar.change)


def check(name: str, form: str, **options: object) -> None:
    program = Program(layers=("mixing", name, "tanh"), defer_loss=FORMS[form], iterations=8, **options)  # type: ignore[arg-type]
    differences: list[list[str]] = []

    @settings(max_examples=1, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.just(program))
    def run(program: Program) -> None:  # which may be given up as one of those that say nothing
        found, done = run_both(program, form.partition(",")[0])
        differences.append([*found, str(done.training.status())] if found else [])

    run()
    assert differences
    assert not differences[0], differences[0]


@pytest.mark.support("Models", "rules of their own for gradients, exchanged memory, state in containers", "replayed")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PECULIAR)
def test_it_does_what_it_does_by_hand(name: str, form: str) -> None:
    check(name, form, events=ONCE)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CHANGING)
def test_it_may_change_by_turns(name: str, form: str) -> None:
    check(name, form, habits=("change_layers",))


@pytest.mark.parametrize("form", FORMS)
def test_more_shapes_than_graphs_may_come_in_turn(form: str) -> None:
    check("counts", form, sizes="in turn", max_graphs=2)
