"""The tables of what Kitsune gains at each batch size."""

from __future__ import annotations

from harness import formats
from harness.batch_gains import batch_gains, gain_end
from harness.names import label
from harness.rows import Comparison, Row
from harness.stats import Estimate
from harness.tables import Cell, Column, Subject, Table, variant_tone, verdict_cell

_PRECISION = Column("precision", "fp32: PyTorch's defaults; amp: bfloat16 autocast")
_VARIANT = Column("variant", "what was measured")


def end_table(comparison: Comparison) -> Table:
    """For each of Kitsune's forms of each model where its gain ends, over eager and over the best peer."""
    columns = (
        Column("model", "the workload"),
        Column("device", "where it ran", needless_if_same=True),
        _PRECISION,
        _VARIANT,
        Column("batch sizes", "those that were measured"),
        Column("gain over eager", "the smallest size from which on no 95% interval lies above 1"),
        Column("gain over the best peer", "the same against the fastest peer of each size"),
    )
    gains = batch_gains(comparison.rows)
    rows = [
        (
            Cell(entry.model),
            Cell(entry.device),
            Cell(entry.rows[0].precision),
            Cell(entry.variant, tone=variant_tone(entry.variant), words=label(entry.variant)),
            Cell(", ".join(str(row.case.batch) for row in entry.rows)),
            Cell(gain_end(entry.over_eager)),
            Cell(gain_end(entry.over_peer)),
        )
        for entry in gains
    ]
    return Table(columns, tuple(rows), tuple(Subject(entry.rows[-1].case, entry.variant) for entry in gains))


def gain_table(comparison: Comparison) -> Table:
    """The same forms at each batch size: their speed-ups over eager and over the best peer."""
    columns = (
        Column("model", "the workload"),
        Column("batch", "samples per step", numeric=True),
        Column("device", "where it ran", needless_if_same=True),
        _PRECISION,
        _VARIANT,
        Column("time", "seconds per training step", numeric=True),
        Column("over eager", "speed-up over eager in the same precision, with its 95% interval", numeric=True),
        Column("verdict", "whether the whole interval lies beyond the margin"),
        Column("over best peer", "speed-up over the fastest peer in the same precision", numeric=True),
        Column("peer", "which peer that is"),
        Column("peer verdict", "whether the whole interval lies beyond the margin"),
    )
    shown = [row for entry in batch_gains(comparison.rows) for row in entry.rows]
    return Table(columns, tuple(map(_gain_cells, shown)), tuple(Subject(row.case, row.variant) for row in shown))


def _gain_cells(row: Row) -> tuple[Cell, ...]:
    return (
        Cell(row.case.model),
        Cell(str(row.case.batch), row.case.batch),
        Cell(row.case.device),
        Cell(row.precision),
        Cell(row.variant, tone=variant_tone(row.variant), words=label(row.variant)),
        Cell(formats.seconds(row.seconds), row.seconds),
        _speedup(row.ratio),
        verdict_cell(row.verdict),
        _speedup(row.peer_ratio),
        Cell(formats.ABSENT if row.best_peer is None else label(row.best_peer)),
        verdict_cell(row.peer_verdict),
    )


def _speedup(ratio: Estimate | None) -> Cell:
    return (
        Cell(formats.ABSENT) if ratio is None else Cell(formats.ratio_with_interval(ratio.inverted()), 1 / ratio.ratio)
    )
