"""The table of peak memory and what of it is fragmented, and of which variants a step's memory is not known."""

from __future__ import annotations

from dataclasses import dataclass

from harness import formats
from harness.memory_timeline import ON_THE_CPU
from harness.names import label
from harness.rows import Comparison, Row, StepMemory
from harness.selection import Case
from harness.tables import Cell, Column, Subject, Table, variant_tone

_NOT_AVAILABLE = "not available"
_OVER_TIME = "A step's memory over time is not"
_UNCOUNTED = "not counted by the version of the harness that measured it"


def memory_table(comparison: Comparison) -> Table:
    """Every variant whose memory was measured at the newer commit."""
    columns = (
        Column("model", "the workload"),
        Column("batch", "samples per step", numeric=True),
        Column("device", "where it ran", needless_if_same=True),
        Column("precision", "fp32: PyTorch's defaults; amp: bfloat16 autocast"),
        Column("variant", "what was measured"),
        Column("allocated", "peak bytes of tensors, with the whole memory of captured graphs", numeric=True),
        Column("reserved", "peak bytes that PyTorch's allocator holds of the device", numeric=True),
        Column("fragmentation", "reserved and not allocated, at the peak", numeric=True),
        Column(
            "inactive splits",
            "unused pieces of blocks that are partly in use, at their peak: what cannot be returned to the device",
            numeric=True,
        ),
        Column("resident", "peak memory of the process on the host", numeric=True),
        Column("remark", "why something is not available"),
    )
    steps = {(entry.case, entry.variant): entry for entry in comparison.step_memory}
    measured = [(row, steps[row.case, row.variant]) for row in comparison.rows if (row.case, row.variant) in steps]
    return Table(
        columns,
        tuple(_cells(row, step) for row, step in measured),
        tuple(Subject(row.case, row.variant) for row, _ in measured),
    )


@dataclass(frozen=True)
class Missing:
    """Cases without a timeline for one and the same reason, and how many variants of them."""

    reason: str
    cases: tuple[Case, ...]
    num_variants: int


def missing_timelines(comparison: Comparison) -> tuple[Missing, ...]:
    """Of what there is no timeline, by the reason."""
    reasons: dict[str, list[StepMemory]] = {}
    for entry in comparison.step_memory:
        if entry.timeline is None:
            reasons.setdefault(entry.missing or _NOT_AVAILABLE, []).append(entry)
    return tuple(
        Missing(reason, tuple(dict.fromkeys(entry.case for entry in entries)), len(entries))
        for reason, entries in reasons.items()
    )


def sentence(missing: Missing) -> str:
    """What is not available, of what, and why."""
    what = "Neither fragmentation nor a step's memory over time is" if missing.reason == ON_THE_CPU else _OVER_TIME
    cases = ", ".join(f"{case.name} on {case.device}" for case in missing.cases)
    variants = formats.counted(missing.num_variants, "variant")
    return f"{what} available for {variants} of {cases}: {formats.one_line(missing.reason)}."


def _cells(row: Row, step: StepMemory) -> tuple[Cell, ...]:
    unused = row.fragmentation_bytes
    share = f"{unused / row.reserved_bytes:.0%} of reserved" if unused is not None and row.reserved_bytes else None
    return (
        Cell(row.case.model),
        Cell(str(row.case.batch), row.case.batch),
        Cell(row.case.device),
        Cell(row.precision),
        Cell(row.variant, tone=variant_tone(row.variant), words=label(row.variant)),
        _size(row.allocated_bytes),
        _size(row.reserved_bytes),
        _size(unused, share),
        _size(row.inactive_split_bytes),
        _size(row.rss_bytes),
        Cell(_remark(row, step)),
    )


def _size(value: int | None, detail: str | None = None) -> Cell:
    if value is None:
        return Cell(_NOT_AVAILABLE)
    return Cell(formats.size(value), value, detail=detail)


def _remark(row: Row, step: StepMemory) -> str:
    if row.allocated_bytes is None:
        return ON_THE_CPU
    splits = None if row.inactive_split_bytes is not None else f"inactive splits: {_UNCOUNTED}"
    timeline = None if step.missing is None else f"no timeline: {formats.one_line(step.missing)}"
    return "; ".join(part for part in (splits, timeline) if part)
