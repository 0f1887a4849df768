"""The check itself: it notices each kind of program that goes wrong once the mend for it is taken back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kitsune.differential.agreement import run_both
from tests.kitsune.differential.programs import Program
from tests.kitsune.mends import NEEDED, forms_of, take_back
from tests.kitsune.versions import skip_before_2_13


@pytest.mark.parametrize(("name", "form"), [(name, form) for name in NEEDED for form in forms_of(name)])
def test_the_check_notices(name: str, form: str) -> None:
    skip_before_2_13(name, {"assigns to a class", "key by value"})
    program = Program(
        layers=("mixing", name, "tanh"),
        defer_loss=form == "deferred",
        iterations=5,
        events=((3, "change_layers"),),
        habits=("read_gradients",) if form != "train_step" else (),
    )
    differences: list[str] = []

    @settings(max_examples=1, database=None)
    @given(st.just(program))
    def run(program: Program) -> None:  # which may be given up as one of those that say nothing
        found, _ = run_both(program, "train_step" if form == "train_step" else "drop_in")
        differences.extend(found)

    with pytest.MonkeyPatch.context() as patch:
        take_back(patch, *NEEDED[name])
        run()
    assert differences
