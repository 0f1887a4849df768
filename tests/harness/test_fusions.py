from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from harness.breakdown import Breakdown, Stage, breakdowns
from harness.fusions import Parts, StepFusions, UnreadableFusions, step_fusions
from harness.selection import Case, measurement
from harness.store import Store
from kitsune.plan import Plan
from tests.harness import plans, sample
from tests.kitsune.plan.plans import plans as random_plans

CASE = Case("mlp-b64", "mlp", 64, "cuda")
CHOSEN, ONE_STREAM = "kitsune_trainstep_fp32", "kitsune_trainstep_one_stream_fp32"
UNFUSED = "kitsune_trainstep_unfused_fp32"
SECONDS = {UNFUSED: 2e-3, ONE_STREAM: 1.6e-3, CHOSEN: 1.5e-3}


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Breakdown, ...]:
    return measured(tmp_path_factory.mktemp("results"), SECONDS)


def measured(root: Path, seconds: Mapping[str, float]) -> tuple[Breakdown, ...]:
    case = sample.case_fields("mlp", 64, "cuda")
    started = datetime(2026, 1, 1, tzinfo=timezone.utc)
    records = [sample.run_record("run", sample.COMMITS[0], {"device": "x"}, started=started)]
    blocks = {variant: [time, 1.5 * time] for variant, time in seconds.items()}
    records += [sample.round_record("run", index, case, blocks) for index in range(2)]
    Store(root).append("machine", sample.COMMITS[0], records)
    return breakdowns(measurement(Store(root).load("machine"), sample.COMMITS[0]))


def fused(**changes: object) -> dict[str, Any]:
    document = plans.document(num_tasks=2, fusions=plans.FUSIONS)
    document["plan"] |= changes
    return document


def read(stages: tuple[Breakdown, ...], **documents: object) -> tuple[StepFusions | UnreadableFusions, ...]:
    statuses = [(CASE, variant, {"mode": "replay", "plan": plan}) for variant, plan in documents.items()]
    return step_fusions(statuses, stages)


def told(stages: tuple[Breakdown, ...], **documents: object) -> StepFusions:
    (found,) = read(stages, **documents)
    assert isinstance(found, StepFusions), found
    return found


def test_parts_of_a_template_with_the_same_outcome_are_told_together(stages: tuple[Breakdown, ...]) -> None:
    found = told(stages, kitsune_trainstep_fp32=fused())
    assert (found.case, found.precision, found.variants) == (CASE, "fp32", (CHOSEN,))
    assert found.replaced == (
        Parts("batch norm + relu", None, 4, 7.0, 4.5, 10.0),
        Parts("gradients of linear layers + adam", None, 1, 12.25, 9.75, 2.5),
        Parts("region", None, 2, None, None, None),
    )
    assert found.left == (
        Parts("linear + relu", "it is not faster", 2, 6.0, 6.5, None),
        Parts("region", "there was no time left to try it", 1, None, None, None),
    )
    assert (found.num_replaced, found.num_left, found.won_us) == (7, 3, 12.5)


@given(plan=random_plans())
def test_what_kitsune_writes_is_read(stages: tuple[Breakdown, ...], plan: Plan) -> None:
    """Every part is counted once, and what they won is the sum of the plan's own figures."""
    found = read(stages, kitsune_trainstep_fp32=plans.decoded(plan))
    if not plan.fusions:
        assert found == ()
        return
    (entry,) = found
    assert isinstance(entry, StepFusions)
    assert entry.num_replaced == sum(fusion.refusal is None for fusion in plan.fusions)
    assert entry.num_left == sum(fusion.refusal is not None for fusion in plan.fusions)
    won_us = sum(fusion.won_us for fusion in plan.fusions)
    assert (entry.won_us or 0.0) == pytest.approx(won_us, abs=1e-6)


def test_variants_with_the_same_outcome_share_an_entry(stages: tuple[Breakdown, ...]) -> None:
    alike = told(stages, **{CHOSEN: fused(), ONE_STREAM: fused()})
    assert alike.variants == (CHOSEN, ONE_STREAM)
    first, second = read(stages, **{CHOSEN: fused(), ONE_STREAM: fused(fusions=fused()["plan"]["fusions"][:3])})
    assert isinstance(first, StepFusions)
    assert isinstance(second, StepFusions)
    assert (first.variants, first.num_replaced) == ((CHOSEN,), 7)
    assert (second.variants, second.num_replaced) == ((ONE_STREAM,), 3)


def test_the_contribution_is_the_breakdowns_stage(stages: tuple[Breakdown, ...]) -> None:
    found = told(stages, **{CHOSEN: fused()})
    assert (found.unfused.variant, found.fused.variant) == (UNFUSED, ONE_STREAM)
    assert found.fused.stage is Stage.FUSION
    assert found.fused.gain is not None
    assert found.fused.gain.ratio == pytest.approx(1.25)


def test_without_a_time_of_the_unfused_step_the_reason_is_kept(tmp_path: Path) -> None:
    found = told(measured(tmp_path, {CHOSEN: 1e-3}), **{CHOSEN: fused()})
    assert found.fused.missing == "there is no time without it to compare with (not measured)"
    assert found.num_replaced == 7


def test_where_nothing_is_known_of_fusion_nothing_is_told(stages: tuple[Breakdown, ...]) -> None:
    old = fused() | {"version": 1}
    del old["plan"]["fusions"]
    assert read(stages, **{CHOSEN: old, ONE_STREAM: plans.document(num_tasks=2), UNFUSED: None}) == ()
    assert step_fusions([(CASE, CHOSEN, None), (CASE, UNFUSED, {"mode": "eager"})], stages) == ()
    assert step_fusions([(CASE, "kitsune_mine_fp8", {"mode": "replay", "plan": fused()})], stages) == ()


def put(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda plan: plan["fusions"][1].update({name: value})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda plan: plan.pop("fusions"), "fusions is not a list"),
        (lambda plan: plan.update(fusions={"a": 1}), "fusions is not a list"),
        (lambda plan: plan["fusions"].insert(1, 7), "fusion 1 is not an object"),
        (put("template", None), "a template is not a text"),
        (put("refusal", 3), "a refusal is not a text"),
        (put("before_us", -1.0), "before_us: -1.0 cannot be a time"),
        (put("after_us", "soon"), "after_us: 'soon' cannot be a time"),
        (put("after_us", float("nan")), "after_us: nan cannot be a time"),
    ],
)
def test_damaged_fusions_give_a_reason(
    stages: tuple[Breakdown, ...], change: Callable[[dict[str, Any]], object], problem: str
) -> None:
    """And leave those of the other variants."""
    damaged = fused()
    change(damaged["plan"])
    fine, unreadable = read(stages, **{CHOSEN: damaged, ONE_STREAM: fused()})
    assert isinstance(fine, StepFusions)
    assert fine.variants == (ONE_STREAM,)
    assert isinstance(unreadable, UnreadableFusions)
    assert (unreadable.case, unreadable.variant) == (CASE, CHOSEN)
    assert unreadable.reason.startswith(f"its plan cannot be read: {problem}")


@pytest.mark.parametrize(
    "document",
    [[], {}, {"format": "kitsune plan", "version": 3}, {"version": 2}, {"format": "kitsune plan", "version": True}],
)
def test_a_plan_of_another_form_gives_a_reason(stages: tuple[Breakdown, ...], document: object) -> None:
    (found,) = read(stages, **{CHOSEN: document})
    assert isinstance(found, UnreadableFusions)
    assert found.reason.startswith("its plan cannot be read: ")
