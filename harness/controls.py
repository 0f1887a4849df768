"""What a change between two measurements is held against: peers that no commit touches and that wait for the same.

A step waits for the host or for the device, and machines of one kind differ in these apart: among virtual machines with
an H200, eager PyTorch took twice as long on some as on others, steps captured by hand the same within 1%. A ratio to a
peer that waits for something else tells of the machine. So, unless both sides were measured on one machine:

- A step that takes about as long as one captured by hand, on both sides, waits for the device, as that one does; all
  such peers are its controls.
- Of any other it is not known what it waits for. Its controls are all peers, among them eager, which waits for the
  host, and on a GPU one that waits for the device: where none was captured by hand, the clock, as devices of one kind
  keep their pace.

A change is what stands against each control.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from harness.names import family_of, is_kitsune, order, precision_of, reference_of
from harness.selection import Case, Measurement, on_one_machine
from harness.stats import Estimate, Pairs, compare_ratios, paired_ratio, round_noise, standing_against_all

UNLIKE = math.log(2)
"""How far apart times are, as the logarithm of their ratio, of what may wait for something else."""

Sides = tuple[list[list[tuple[float, float]]], list[list[tuple[float, float]]]]
"""Rounds of pairs at base and at head."""


@dataclass(frozen=True)
class Controlled:
    """A variant's change of time between two measurements.

    ``control`` is the peer against which least of it is left, and ``base`` and ``head`` are ratios to that one.
    ``ratio`` stands against all ``controls``, which differ by the factor ``apart`` in what they make of the change.
    ``noise`` is by how much rounds differ.
    """

    control: str
    controls: tuple[str, ...]
    base: Estimate
    head: Estimate
    ratio: Estimate
    apart: float
    noise: float | None


def controlled_change(older: Measurement, newer: Measurement, case: Case, variant: str) -> Controlled | None:
    """The change of a variant from one measurement to another; None where no peer can tell it from the machines'."""
    peers = _peers(older, newer, case, variant)
    chosen = _controls(older, newer, case, variant, peers)
    if not chosen:
        return None
    against = {peer: compare_ratios(head, base) for peer in chosen for base, head in [peers[peer]]}
    every = list(against.values())
    if _needs_clock(older, newer, case, chosen):
        every.append(compare_ratios(_seconds(newer, case, variant), _seconds(older, case, variant)))
    control = min(against, key=lambda peer: abs(math.log(against[peer].ratio)))
    base, head = peers[control]
    return Controlled(
        control=control,
        controls=tuple(chosen),
        base=paired_ratio(base),
        head=paired_ratio(head),
        ratio=standing_against_all(every),
        apart=max(entry.ratio for entry in every) / min(entry.ratio for entry in every),
        noise=round_noise(head, base),
    )


def is_captured(peer: str) -> bool:
    """Whether a peer is replayed as one graph, so that the host hardly has a part in its time."""
    return family_of(peer) == "handcaptured"


def _peers(older: Measurement, newer: Measurement, case: Case, variant: str) -> dict[str, Sides]:
    """Peers in the variant's precision that were timed beside it on both sides."""
    return {
        peer: (base, head)
        for peer in sorted(newer.variants(case), key=order)
        if not is_kitsune(peer)
        and peer != variant
        and precision_of(peer) == precision_of(variant)
        and (head := newer.pairs(case, variant, peer))
        and (base := older.pairs(case, variant, peer))
    }


def _controls(
    older: Measurement, newer: Measurement, case: Case, variant: str, peers: Mapping[str, Sides]
) -> list[str]:
    distances = {peer: max(_distance(rounds) for rounds in sides) for peer, sides in peers.items()}
    if peers and on_one_machine(older, newer):
        return [min(peers, key=distances.__getitem__)]
    alike = [peer for peer in peers if is_captured(peer) and distances[peer] < UNLIKE]
    if alike:
        return alike
    return list(peers) if case.device == "cpu" or reference_of(variant) in peers else []


def _needs_clock(older: Measurement, newer: Measurement, case: Case, controls: list[str]) -> bool:
    return not (case.device == "cpu" or on_one_machine(older, newer) or any(map(is_captured, controls)))


def _distance(rounds: list[list[tuple[float, float]]]) -> float:
    return abs(math.log(paired_ratio(rounds).ratio))


def _seconds(measured: Measurement, case: Case, variant: str) -> list[Pairs]:
    rounds = [entry.blocks[variant].seconds for entry in measured.rounds[case] if variant in entry.blocks]
    return [[(seconds, 1.0) for seconds in times] for times in rounds]
