"""The table of the zoo: Kitsune's forms on models of many kinds, beside eager and the best peer of each."""

from __future__ import annotations

from collections.abc import Mapping

from harness import formats
from harness.names import is_product, label, order, precision_of, reference_of
from harness.profiles import ZOO_MODELS, ZOO_VARIANTS
from harness.rows import Comparison, Row
from harness.selection import Case
from harness.tables import (
    CASE_COLUMNS,
    LOSS_COLUMN,
    Cell,
    Column,
    Medium,
    Subject,
    Table,
    Tone,
    case_cells,
    loss_cell,
    memory_cell,
    mode_of,
    speedup_cell,
    variant_tone,
    verdict_cell,
)

_Key = tuple[Case, str]
"""A case and a variant."""

_REPLAYED = "replay"
_NOTHING = Cell(formats.ABSENT)


def zoo_table(comparison: Comparison) -> Table:
    """One row for each of Kitsune's forms on each of the zoo's models, whether it could be measured or not."""
    columns = (
        *CASE_COLUMNS,
        Column("precision", "amp: bfloat16 autocast; fp32: PyTorch's defaults", needless_if_same=True),
        Column("eager", "seconds per training step of eager in the same precision", numeric=True),
        Column("memory of eager", "peak bytes allocated to tensors; on a CPU, resident", numeric=True),
        Column("best peer", "the fastest variant in the same precision that is not Kitsune's"),
        Column("its set-up", "seconds before that peer's first step at full speed, with empty caches", numeric=True),
        Column("form", "one of Kitsune's"),
        Column("over best peer", "speed-up over that peer, with its 95% interval: below 1 Kitsune loses", numeric=True),
        Column("verdict", "whether the whole interval lies beyond the margin", only=Medium.TEXT),
        Column("over eager", "speed-up over eager", numeric=True),
        Column("waited", "seconds for which training has waited for Kitsune's set-up, trials included", numeric=True),
        Column("first replay", "seconds until the end of the first step that Kitsune replayed", numeric=True),
        Column("memory", "peak bytes allocated to tensors; on a CPU, resident", numeric=True),
        Column(
            "loss apart",
            "the largest relative difference in loss from eager, step by step, when both go on from the same state; in"
            " brackets that of eager and itself",
            numeric=True,
        ),
        Column("of it replayed", "how many of these steps Kitsune replayed", numeric=True),
        LOSS_COLUMN,
        Column("how it ran", "replayed; or else why Kitsune steps aside, or why this was not measured"),
    )
    rows = {(row.case, row.variant): row for row in comparison.rows if row.is_of_zoo}
    reasons = _reasons(comparison)
    shown = sorted((key for key in {**reasons, **rows} if is_product(key[1])), key=_place)
    cells = (_cells(rows[key], rows) if key in rows else _unmeasured_cells(*key, reasons[key]) for key in shown)
    return Table(columns, tuple(cells), tuple(Subject(case, variant) for case, variant in shown))


def _reasons(comparison: Comparison) -> dict[_Key, str]:
    """Why what the zoo's profile measures of its models was not."""
    return {
        (case, variant): f"{group.status}: {group.reason}"
        for group in comparison.skips
        for case in group.cases
        for variant in group.variants
        if case.model in ZOO_MODELS and group.status != "left out" and variant in ZOO_VARIANTS.get(case.device, ())
    }


def _place(key: _Key) -> tuple[object, ...]:
    case, variant = key
    return ZOO_MODELS.index(case.model), case.batch, case.device, order(variant)


def _cells(row: Row, rows: Mapping[_Key, Row]) -> tuple[Cell, ...]:
    eager = rows.get((row.case, reference_of(row.variant)))
    peer = None if row.best_peer is None else rows.get((row.case, row.best_peer))
    waited = None if row.kitsune is None else row.kitsune.get("setup_seconds")
    seconds = waited if isinstance(waited, float) else None
    return (
        *case_cells(row.case),
        Cell(row.precision),
        _NOTHING if eager is None else Cell(formats.seconds(eager.seconds), eager.seconds),
        _NOTHING if eager is None else memory_cell(eager),
        _NOTHING if peer is None else Cell(peer.variant, words=label(peer.variant)),
        _NOTHING if peer is None else _setup_cell(peer),
        _form_cell(row.variant),
        speedup_cell(row.peer_ratio, row.peer_verdict),
        verdict_cell(row.peer_verdict),
        speedup_cell(row.ratio, row.verdict),
        Cell(formats.seconds(seconds), seconds),
        Cell(formats.seconds(row.first_replay_s), row.first_replay_s),
        memory_cell(row),
        *_continuation_cells(row),
        loss_cell(row),
        _manner_cell(row),
    )


def _unmeasured_cells(case: Case, variant: str, reason: str) -> tuple[Cell, ...]:
    unknown = (_NOTHING,) * 4
    rest = (_NOTHING, Cell(""), *(_NOTHING,) * 7)
    tone = Tone.BAD if reason.startswith("failed") else Tone.FAINT
    return (
        *case_cells(case),
        Cell(precision_of(variant)),
        *unknown,
        _form_cell(variant),
        *rest,
        Cell(formats.one_line(reason), tone=tone),
    )


def _form_cell(variant: str) -> Cell:
    return Cell(variant, tone=variant_tone(variant), words=label(variant))


def _setup_cell(peer: Row) -> Cell:
    """The seconds of a peer's set-up; those with filled caches, which tell less, where there are no others."""
    if peer.setup_s is None and peer.warm_setup_s is not None:
        return Cell(f"{formats.seconds(peer.warm_setup_s)} (warm)", peer.warm_setup_s)
    return Cell(formats.seconds(peer.setup_s), peer.setup_s)


def _continuation_cells(row: Row) -> tuple[Cell, Cell]:
    """How far apart losses from the same state are, and how many of the steps were replayed."""
    found = row.continuation
    if found is None:
        missing = row.continuation_missing
        return _NOTHING if missing is None else Cell(formats.one_line(missing), tone=Tone.BAD), _NOTHING
    gap, noise = (formats.small_share(value) for value in (found.gap, found.noise))
    tone = Tone.PLAIN if found.agrees else Tone.BAD
    apart = Cell(f"{gap} [{noise}]{'' if found.agrees else ' differs'}", found.gap, tone)
    return apart, Cell(f"{found.num_replays} of {len(found.losses)}", found.num_replays)


def _manner_cell(row: Row) -> Cell:
    """How the steps ran, and the reason where they were not all replayed."""
    mode = mode_of(row) or formats.ABSENT
    reason = None if row.kitsune is None else row.kitsune.get("reason")
    if mode == _REPLAYED or reason is None:
        return Cell(mode)
    return Cell(formats.one_line(f"{mode}: {reason}"), tone=Tone.FAINT)
