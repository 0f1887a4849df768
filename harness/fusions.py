"""What was fused in a step and what was left as it is, from the plans in Kitsune's statuses, and what that is worth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from harness.breakdown import Breakdown, Stage, StageTime
from harness.names import precision_of
from harness.plan_fields import DamageError, as_list, as_object, as_text, as_us, plan_of
from harness.selection import Case


@dataclass(frozen=True)
class Parts:
    """Parts of a step that one template fits, all with the same outcome.

    ``refusal`` says why they were left as they are; None where they were replaced. Times are microseconds of device
    time that a part takes by itself, means over those that were timed; ``won_us`` is the sum of what replacing these
    won. They are None where nothing was timed, and ``won_us`` where nothing was replaced.
    """

    template: str
    refusal: str | None
    num_parts: int
    before_us: float | None
    after_us: float | None
    won_us: float | None


@dataclass(frozen=True)
class StepFusions:
    """What fusion did to the step of a case in one precision, alike in all these variants.

    ``unfused`` and ``fused`` are the stages of the breakdown without and with fusion, the latter ``missing`` where the
    two were not timed side by side.
    """

    case: Case
    precision: str
    variants: tuple[str, ...]
    replaced: tuple[Parts, ...]
    left: tuple[Parts, ...]
    unfused: StageTime
    fused: StageTime

    @property
    def num_replaced(self) -> int:
        """How many parts were replaced."""
        return sum(parts.num_parts for parts in self.replaced)

    @property
    def num_left(self) -> int:
        """How many replacements were tried in vain."""
        return sum(parts.num_parts for parts in self.left)

    @property
    def won_us(self) -> float | None:
        """Microseconds that the replaced parts, each by itself, take less; None where none was timed."""
        known = [parts.won_us for parts in self.replaced if parts.won_us is not None]
        return math.fsum(known) if known else None


@dataclass(frozen=True)
class UnreadableFusions:
    """A variant whose plan cannot tell what was fused, and why."""

    case: Case
    variant: str
    reason: str


def step_fusions(
    statuses: Iterable[tuple[Case, str, Mapping[str, object] | None]], breakdowns: Iterable[Breakdown]
) -> tuple[StepFusions | UnreadableFusions, ...]:
    """What was fused in each variant whose plan tells of it, in the order of ``statuses``; unreadable ones last.

    Variants without a plan, and those for which there was nothing to fuse, are left out.

    Args:
        statuses: of Kitsune's variants, each with its case; None for one that was not profiled.
        breakdowns: a variant without one of its case and precision is left out.
    """
    stages = {(part.case, part.precision): {stage.stage: stage for stage in part.stages} for part in breakdowns}
    alike: dict[tuple[Case, str, tuple[Parts, ...]], list[str]] = {}
    unreadable: list[UnreadableFusions] = []
    for case, variant, status in statuses:
        if status is None or status.get("plan") is None or (case, precision_of(variant)) not in stages:
            continue
        try:
            parts = _parts(status)
        except DamageError as error:
            unreadable.append(UnreadableFusions(case, variant, f"its plan cannot be read: {error}"))
            continue
        if parts:
            alike.setdefault((case, precision_of(variant), parts), []).append(variant)
    told = (
        StepFusions(
            case=case,
            precision=precision,
            variants=tuple(variants),
            replaced=tuple(entry for entry in parts if entry.refusal is None),
            left=tuple(entry for entry in parts if entry.refusal is not None),
            unfused=stages[case, precision][Stage.WHOLE],
            fused=stages[case, precision][Stage.FUSION],
        )
        for (case, precision, parts), variants in alike.items()
    )
    return (*told, *unreadable)


def _parts(status: Mapping[str, object]) -> tuple[Parts, ...]:
    plan, version = plan_of(status)
    if version == 1:
        return ()
    groups: dict[tuple[str, str | None], list[tuple[float, float] | None]] = {}
    for index, entry in enumerate(as_list(plan.get("fusions"), "fusions")):
        fields = as_object(entry, f"fusion {index}")
        template = as_text(fields.get("template"), "a template")
        refusal = fields.get("refusal")
        outcome = None if refusal is None else as_text(refusal, "a refusal")
        groups.setdefault((template, outcome), []).append(_times(fields))
    return tuple(_summed(template, refusal, times) for (template, refusal), times in groups.items())


def _times(fields: Mapping[str, object]) -> tuple[float, float] | None:
    """Before and after; None where they were not measured."""
    before, after = fields.get("before_us"), fields.get("after_us")
    return None if before is None or after is None else (as_us(before, "before_us"), as_us(after, "after_us"))


def _summed(template: str, refusal: str | None, times: list[tuple[float, float] | None]) -> Parts:
    known = [pair for pair in times if pair is not None]
    before, after = (math.fsum(side) for side in zip(*known, strict=True)) if known else (0.0, 0.0)
    return Parts(
        template=template,
        refusal=refusal,
        num_parts=len(times),
        before_us=before / len(known) if known else None,
        after_us=after / len(known) if known else None,
        won_us=before - after if known and refusal is None else None,
    )
