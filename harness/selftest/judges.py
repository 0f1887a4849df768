"""Who says that a benchmark has changed: the harness, asv, and a test of Mann and Whitney, all on the same samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from asv import _stats
from asv.commands.compare import _is_result_better
from asv_runner.statistics import compute_stats

from harness.stats import Estimate, Pairs, Verdict, compare_ratios, judge, noise_margin, round_noise

MANN_WHITNEY_LEVEL = 0.05
ASV_FACTOR = 1.1
"""asv's own default: ``asv compare --factor``."""

CLEAR = (Verdict.FASTER, Verdict.SLOWER)


@dataclass(frozen=True)
class ArmSamples:
    """An arm's rounds at the older and at the newer state, as (its seconds, the control's) of each turn."""

    base: Sequence[Pairs]
    head: Sequence[Pairs]


@dataclass(frozen=True)
class Judged:
    """What the harness says of a row, and from which estimate and margin."""

    verdict: Verdict
    estimate: Estimate
    margin: float


def harness_verdicts(arms: Sequence[ArmSamples], margin: float) -> list[Judged]:
    """The harness's verdicts on rows that are measured together, as a comparison judges them."""
    estimates = [compare_ratios(arm.head, arm.base) for arm in arms]
    margins = [noise_margin(round_noise(arm.head, arm.base), margin) for arm in arms]
    return list(map(Judged, judge(estimates, margins), estimates, margins))


def asv_verdict(arm: ArmSamples, factor: float) -> Verdict:
    """What ``asv compare`` says of all blocks of all processes together, as it pools samples."""
    base, head = _pooled(arm.base), _pooled(arm.head)
    old, old_stats = compute_stats(base, 1)
    new, new_stats = compute_stats(head, 1)
    before, after = (old_stats, base), (new_stats, head)
    if _is_result_better(new, old, after, before, factor):
        return Verdict.FASTER
    return Verdict.SLOWER if _is_result_better(old, new, before, after, factor) else Verdict.SAME


def mann_whitney_verdict(arm: ArmSamples) -> Verdict:
    """What a plain two-sided test says of the same pooled blocks at 5% (Mann and Whitney, Annals of Mathematical
    Statistics 1947)."""
    base, head = _pooled(arm.base), _pooled(arm.head)
    u, p = _stats.mann_whitney_u(head, base, method="normal")
    if p >= MANN_WHITNEY_LEVEL:
        return Verdict.SAME
    return Verdict.SLOWER if u > len(head) * len(base) / 2 else Verdict.FASTER


def rivals(margin: float) -> Mapping[str, Callable[[ArmSamples], Verdict]]:
    """The other judges, by name."""
    return {
        f"asv, factor {ASV_FACTOR:g}": lambda arm: asv_verdict(arm, ASV_FACTOR),
        f"asv, factor {1 + margin:g}": lambda arm: asv_verdict(arm, 1 + margin),
        f"Mann-Whitney, p < {MANN_WHITNEY_LEVEL:g}": mann_whitney_verdict,
    }


def _pooled(rounds: Sequence[Pairs]) -> list[float]:
    return [seconds for pairs in rounds for seconds, _ in pairs]
