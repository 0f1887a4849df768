"""What each of Kitsune's optimizations contributes: the step's time from eager to all of them, one added at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from harness.selection import Case, Measurement
from harness.stats import Estimate, paired_ratio, typical_seconds
from harness.variants import VARIANTS


class Stage(Enum):
    """What is added to the stage before, as a reader calls it."""

    EAGER = "eager"
    CAPTURED = "forward and backward captured"
    WHOLE = "optimizer in the step"
    FUSION = "operators fused"
    STREAMS = "streams"


@dataclass(frozen=True)
class StageTime:
    """The time of a step at one stage.

    ``adds`` is what its variant has and the last measured one before it has not: more than the stage itself where forms
    in between were not measured. ``seconds`` is None where it is ``missing``, which then says why. ``speedup`` is
    eager's time over this one's and ``gain`` that of the last stage before that was measured; None where there is
    nothing to compare with.
    """

    stage: Stage
    variant: str
    adds: tuple[Stage, ...]
    seconds: float | None
    speedup: Estimate | None
    gain: Estimate | None
    mode: str | None
    missing: str | None

    @property
    def added(self) -> str:
        """``adds`` in words."""
        return self.stage.value if self.adds == (self.stage,) else ", ".join(_IN_A_LIST[part] for part in self.adds)


_IN_A_LIST = {
    Stage.EAGER: "eager",
    Stage.CAPTURED: "capture",
    Stage.WHOLE: "optimizer",
    Stage.FUSION: "fusion",
    Stage.STREAMS: "streams",
}


@dataclass(frozen=True)
class Breakdown:
    """All stages of a case in one precision, in order."""

    case: Case
    precision: str
    stages: tuple[StageTime, ...]


def breakdowns(measured: Measurement) -> tuple[Breakdown, ...]:
    """A breakdown for each case and each precision that Kitsune has variants of, in the order of the results."""
    precisions = tuple(dict.fromkeys(variant.precision for variant in VARIANTS.values() if variant.is_kitsune))
    return tuple(_breakdown(measured, case, precision) for case in measured.rounds for precision in precisions)


def _breakdown(measured: Measurement, case: Case, precision: str) -> Breakdown:
    stages: list[StageTime] = []
    present: set[Stage] = set()
    for stage, variant, missing in _plan(measured, case, precision):
        has = _parts(case, variant)
        current = StageTime(
            stage=stage,
            variant=variant,
            adds=tuple(part for part in has if missing is None and part not in present) or (stage,),
            seconds=_seconds(measured, case, variant) if missing is None else None,
            speedup=None,
            gain=None,
            mode=_mode(measured, case, variant),
            missing=missing,
        )
        known = [entry for entry in stages if entry.seconds is not None]
        if missing is None and known:
            gain = _speedup(measured, case, variant, known[-1].variant)
            over_eager = _speedup(measured, case, variant, known[0].variant) if known[0].stage is Stage.EAGER else None
            current = replace(current, gain=gain, speedup=over_eager)
        stages.append(current)
        if missing is None:
            present |= set(has)
    return Breakdown(case, precision, tuple(stages))


def _parts(case: Case, variant: str) -> tuple[Stage, ...]:
    """What a variant has, in order. Nothing is fused without CUDA, and there are no streams."""
    made = VARIANTS[variant]
    if not made.is_kitsune:
        return (Stage.EAGER,)
    on_gpu = case.device == "cuda"
    has = {
        Stage.CAPTURED: True,
        Stage.WHOLE: made.family == "kitsune_trainstep",
        Stage.FUSION: on_gpu and made.enable_fusion is not False,
        Stage.STREAMS: on_gpu and made.num_streams != 1,
    }
    return tuple(stage for stage, it_has in has.items() if it_has)


def _plan(measured: Measurement, case: Case, precision: str) -> list[tuple[Stage, str, str | None]]:
    """For each stage the variant that shows it, and why it cannot be shown; None where it can.

    Of the forms of the whole step, the first that was measured shows that stage; what it has already is no stage of
    its own then. What comes before it must not have more.
    """
    whole = {
        Stage.WHOLE: f"kitsune_trainstep_unfused_{precision}",
        Stage.FUSION: f"kitsune_trainstep_one_stream_{precision}",
        Stage.STREAMS: f"kitsune_trainstep_{precision}",
    }
    first = next((stage for stage, variant in whole.items() if variant in measured.variants(case)), Stage.STREAMS)
    captured = f"kitsune_dropin_unfused_{precision}" if first is Stage.WHOLE else f"kitsune_dropin_{precision}"
    plan = [
        (stage, variant, _missing(measured, case, variant))
        for stage, variant in (
            (Stage.EAGER, f"eager_{precision}"),
            (Stage.CAPTURED, captured),
            (Stage.WHOLE, whole[first]),
        )
    ]
    without = Stage.WHOLE
    for stage in (Stage.FUSION, Stage.STREAMS):
        missing = _missing(measured, case, whole[stage])
        if list(whole).index(stage) <= list(whole).index(first):
            missing = f"there is no time without it to compare with ({_missing(measured, case, whole[without])})"
        plan.append((stage, whole[stage], missing))
        without = stage
    return plan


def _seconds(measured: Measurement, case: Case, variant: str) -> float:
    return typical_seconds(
        [entry.blocks[variant].seconds for entry in measured.rounds[case] if variant in entry.blocks]
    )


def _speedup(measured: Measurement, case: Case, variant: str, earlier: str) -> Estimate | None:
    """How much faster a variant is than another; None where no round timed both."""
    pairs = measured.pairs(case, variant, earlier)
    return paired_ratio(pairs).inverted() if pairs else None


def _mode(measured: Measurement, case: Case, variant: str) -> str | None:
    profile = measured.profiles.get((case, variant))
    mode = None if profile is None or profile.kitsune is None else profile.kitsune.get("mode")
    return None if mode is None else str(mode)


def _missing(measured: Measurement, case: Case, variant: str) -> str | None:
    if variant in measured.variants(case):
        return None
    skip = measured.skips.get((case, variant))
    return "not measured" if skip is None else f"{skip.status}: {skip.reason}"
