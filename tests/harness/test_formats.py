import math

import pytest

from harness import formats
from harness.replay_plans import ReplayPlan
from harness.rows import Parity
from harness.selection import Case
from harness.stats import Estimate, Verdict
from harness.stream_gains import StreamGain


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "—"),
        (9.41e-5, "94.1 µs"),
        (1.2e-6, "1.20 µs"),
        (9.994e-4, "999 µs"),
        (9.996e-4, "1.00 ms"),
        (2.6e-3, "2.60 ms"),
        (0.305, "305 ms"),
        (0.9999, "1.00 s"),
        (19.66, "19.7 s"),
        (1234.5, "1234 s"),
        (0.0, "0 µs"),
    ],
)
def test_seconds(value: float | None, expected: str) -> None:
    assert formats.seconds(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "—"), (0, "0 MiB"), (548405248, "523 MiB"), (10 * 2**30, "10.0 GiB"), (13314398617, "12.4 GiB")],
)
def test_size(value: int | None, expected: str) -> None:
    assert formats.size(value) == expected


@pytest.mark.parametrize(
    ("estimate", "expected"),
    [
        (None, "—"),
        (Estimate(1.4321, 1.399, 1.46, 3, 9), "1.43 [1.40, 1.46]"),
        (Estimate(0.9961, 0.962, 1.031, 3, 9), "0.996 [0.962, 1.031]"),
        (Estimate(12.04, 9.96, 14.1, 3, 9), "12.0 [10.0, 14.1]"),
        (Estimate(0.0923, 0.0917, 0.0928, 3, 9), "0.0923 [0.0917, 0.0928]"),
        (Estimate(250.4, 240, 260, 3, 9), "250 [240, 260]"),
        (Estimate(2.0, 0.0, math.inf, 1, 9), "2.00 (one round)"),
    ],
)
def test_ratio_with_interval(estimate: Estimate | None, expected: str) -> None:
    assert formats.ratio_with_interval(estimate) == expected


@pytest.mark.parametrize(
    ("estimate", "expected"),
    [
        (Estimate(1.052, 1.041, 1.063, 3, 9), "+5.2% [+4.1, +6.3]"),
        (Estimate(0.99996, 0.95, 1.05, 3, 9), "0.0% [-5.0, +5.0]"),
        (Estimate(1.5, 0.0, math.inf, 1, 9), "+50.0% (one round)"),
    ],
)
def test_change(estimate: Estimate, expected: str) -> None:
    assert formats.change(estimate) == expected


@pytest.mark.parametrize(
    ("gap", "parity", "expected"),
    [
        (None, None, "—"),
        (-0.0001, Parity.AGREES, "0.0%"),
        (0.004, Parity.AGREES, "+0.4%"),
        (-0.12, Parity.DIFFERS, "-12.0% differs"),
        (3.0, Parity.DIFFERS, "+300% differs"),
        (math.inf, Parity.DIVERGED, "diverged"),
    ],
)
def test_loss(gap: float | None, parity: Parity | None, expected: str) -> None:
    assert formats.loss(gap, parity) == expected


@pytest.mark.parametrize(("value", "expected"), [(None, "—"), (0, "0"), (12345.0, "12,345"), (math.inf, "never")])
def test_steps(value: float | None, expected: str) -> None:
    assert formats.steps(value) == expected


def test_a_machine_is_told_by_what_it_has() -> None:
    facts = {
        "device": "NVIDIA H200", "device_type": "cuda", "driver": "580", "cuda": "13.0", "torch": "2.13.0",
        "triton": None, "python": "3.12.3", "cores": 16,
    }  # fmt: skip
    assert formats.machine(facts) == "NVIDIA H200, driver 580, CUDA 13.0, torch 2.13.0, Python 3.12.3"
    cpu = facts | {"device": "A CPU", "device_type": "cpu", "driver": None, "triton": "3.6.0"}
    assert formats.machine(cpu) == "A CPU, 16 cores, torch 2.13.0, Python 3.12.3"
    assert formats.machine({}) == "unknown device"


IN_ORDER, ON_STREAMS = ReplayPlan("in order", 1, fused=False), ReplayPlan("list", 2, fused=True)


def gain_by(*plans: ReplayPlan | None, is_same_plan: bool = False, profiled: ReplayPlan | None = None) -> StreamGain:
    return StreamGain(
        case=Case("mlp-b64", "mlp", 64, "cuda"), precision="fp32", variant="kitsune_trainstep_fp32",
        one_stream_seconds=1e-3, chosen_seconds=1e-3, gain=Estimate(1.0, 0.9, 1.1, 3, 21), verdict=Verdict.SAME,
        plans=plans, is_same_plan=is_same_plan, profiled_plan=profiled,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("gain", "expected"),
    [
        (gain_by(IN_ORDER, ON_STREAMS, ON_STREAMS), "in order, list on 2 streams (fused) ×2"),
        (gain_by(ON_STREAMS, None, None, profiled=IN_ORDER), "list on 2 streams (fused), not recorded ×2"),
        (gain_by(IN_ORDER, IN_ORDER, is_same_plan=True), "in order ×2 on both sides: the difference is noise"),
        (gain_by(None, None, profiled=ON_STREAMS), "list on 2 streams (fused) where it was profiled"),
        (gain_by(None, None), "—"),
    ],
)
def test_plans_are_counted_over_rounds(gain: StreamGain, expected: str) -> None:
    assert formats.plans(gain) == expected
