"""The numbers behind curves: losses over a training run, and times over the rounds of a measurement."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from harness import formats
from harness.names import label
from harness.rows import Comparison, LossCurve
from harness.samples import Samples
from harness.tables import Cell, Column, Subject, Table, variant_tone

_COLUMNS = (
    Column("model", "the workload"),
    Column("batch", "samples per step", numeric=True),
    Column("device", "where it ran", needless_if_same=True),
    Column("precision", "fp32: PyTorch's defaults; amp: bfloat16 autocast"),
    Column("variant", "what was measured"),
)
_PLACES = {"first": 0.0, "a quarter in": 0.25, "half way": 0.5, "three quarters in": 0.75, "last": 1.0}
"""Which losses of a run a table shows, as shares of it."""


def loss_table(comparison: Comparison) -> Table:
    """For each curve the losses at its ends and at three places in between, each with its step."""
    columns = (*_COLUMNS, *(Column(name, "the loss there, and after which step", numeric=True) for name in _PLACES))
    return Table(
        columns,
        tuple((*_begin(curve), *_losses(curve.losses)) for curve in comparison.losses),
        tuple(Subject(curve.case, curve.variant) for curve in comparison.losses),
    )


def drift_table(comparison: Comparison) -> Table:
    """For each variant the median of each round, as its distance from the variant's time."""
    most = max((len(entry.rounds) for entry in comparison.samples), default=0)
    columns = (
        *_COLUMNS,
        *(Column(f"round {number}", "its median", numeric=True) for number in range(1, most + 1)),
    )
    return Table(
        columns,
        tuple((*_begin(entry), *_rounds(entry, most)) for entry in comparison.samples),
        tuple(Subject(entry.case, entry.variant) for entry in comparison.samples),
    )


def _begin(entry: LossCurve | Samples) -> tuple[Cell, ...]:
    return (
        Cell(entry.case.model),
        Cell(str(entry.case.batch), entry.case.batch),
        Cell(entry.case.device),
        Cell(entry.precision),
        Cell(entry.variant, tone=variant_tone(entry.variant), words=label(entry.variant)),
    )


def _losses(losses: Sequence[tuple[int, float | None]]) -> list[Cell]:
    chosen = [losses[round(share * (len(losses) - 1))] for share in _PLACES.values()]
    return [
        Cell("not finite" if loss is None else f"{loss:.4g}", loss, detail=f"step {step:,}") for step, loss in chosen
    ]


def _rounds(entry: Samples, most: int) -> list[Cell]:
    medians = [None if times is None else 1 + statistics.median(times) for times in entry.deviations()]
    medians += [None] * (most - len(medians))
    return [
        Cell(formats.ABSENT) if median is None else Cell(formats.percent_change(median), median) for median in medians
    ]
