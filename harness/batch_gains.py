"""What Kitsune gains at each batch size of a model, and at which size the gain ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.rows import Row
from harness.stats import Estimate

Speedups = Sequence[tuple[Row, Estimate]]
"""Rows of ascending batch sizes, each with how many times as fast it is as what it is held against."""


@dataclass(frozen=True)
class BatchGains:
    """One of Kitsune's forms in a model on a device, measured at several batch sizes: ``rows`` are in their order."""

    model: str
    device: str
    variant: str
    rows: tuple[Row, ...]

    @property
    def over_eager(self) -> Speedups:
        """How many times as fast it is as eager in the same precision, where both were timed."""
        return [(row, row.ratio.inverted()) for row in self.rows if row.ratio is not None]

    @property
    def over_peer(self) -> Speedups:
        """How many times as fast it is as the best peer of each size, where there is one."""
        return [(row, row.peer_ratio.inverted()) for row in self.rows if row.peer_ratio is not None]


def batch_gains(rows: Sequence[Row]) -> tuple[BatchGains, ...]:
    """Kitsune as users run it, wherever a model was measured at more than one batch size; models in the rows' order."""
    models: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        if row.is_product:
            models.setdefault((row.case.model, row.case.device), {}).setdefault(row.variant, []).append(row)
    return tuple(
        BatchGains(*subject, variant, tuple(sorted(members, key=lambda row: row.case.batch)))
        for subject, variants in models.items()
        for variant, members in variants.items()
        if len(members) > 1
    )


def gain_end(speedups: Speedups) -> str:
    """Where a gain ends, in words: at the smallest size from which on no interval lies above 1 any more."""
    if not speedups:
        return "nothing to compare with"
    if not all(speedup.has_interval for _, speedup in speedups):
        return "not known: one round"
    gaining = [index for index, (_, speedup) in enumerate(speedups) if speedup.low > 1]
    if not gaining:
        return "none at any size"
    if gaining[-1] == len(speedups) - 1:
        return f"does not end within the sizes measured, up to {speedups[-1][0].case.batch}"
    return f"ends at batch {speedups[gaining[-1] + 1][0].case.batch}"
