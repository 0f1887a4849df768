"""How numbers are written for readers: seconds, bytes, ratios with intervals, changes in percent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from harness.replay_plans import ReplayPlan
from harness.rows import Commit, Parity
from harness.stats import Estimate
from harness.stream_gains import StreamGain

ABSENT = "—"

_LONGEST_LINE = 240


def seconds(value: float | None) -> str:
    """Three digits in the unit that suits: "94.1 µs", "2.60 ms", "1.20 s"."""
    if value is None:
        return ABSENT
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if value * factor < 999.5:
            return f"{_digits(value * factor)} {unit}"
    return f"{_digits(value)} s"


def size(value: int | None) -> str:
    """Whole mebibytes, or gibibytes from 10 on: "523 MiB", "12.4 GiB"."""
    if value is None:
        return ABSENT
    mebibytes = value / 2**20
    return f"{mebibytes:.0f} MiB" if mebibytes < 10 * 1024 else f"{mebibytes / 1024:.1f} GiB"


def ratio(value: float) -> str:
    """Three digits: "1.43", "0.914", "12.1"."""
    return _digits(value)


def ratio_with_interval(estimate: Estimate | None) -> str:
    """ "1.43 [1.40, 1.46]", all with the same number of decimals; without an interval, that there was one round."""
    if estimate is None:
        return ABSENT
    decimals = _decimals(estimate.ratio)
    if not estimate.has_interval:
        return f"{estimate.ratio:.{decimals}f} (one round)"
    return f"{estimate.ratio:.{decimals}f} [{estimate.low:.{decimals}f}, {estimate.high:.{decimals}f}]"


def speedup(estimate: Estimate) -> str:
    """A ratio within a sentence: "1.43× [1.40, 1.46]", "1.43× (one round)"."""
    centre, _, rest = ratio_with_interval(estimate).partition(" ")
    return f"{centre}× {rest}"


def change(estimate: Estimate, single: str = "one round") -> str:
    """A ratio as a change in percent: "+5.2% [+4.1, +6.3]"; without an interval, what there was a ``single`` one of."""
    centre = percent_change(estimate.ratio)
    if not estimate.has_interval:
        return f"{centre} ({single})"
    return f"{centre} [{_percent(estimate.low)}, {_percent(estimate.high)}]"


def percent_change(ratio: float) -> str:
    """A ratio as a change in percent: "+5.2%"."""
    return f"{_percent(ratio)}%"


def share(fraction: float) -> str:
    """A fraction in percent: "3.0%"."""
    return f"{100 * fraction:.1f}%"


def small_share(fraction: float) -> str:
    """A fraction in percent of two significant digits: "0.0013%"; "0" of none, "not finite" where it is not."""
    if not math.isfinite(fraction):
        return "not finite"
    return f"{100 * fraction:.2g}%" if fraction else "0"


def loss(gap: float | None, parity: Parity | None) -> str:
    """The gap in loss in percent of the baseline's progress, with a word where it is not small: "+12% differs"."""
    if gap is None or parity is None:
        return ABSENT
    if not math.isfinite(gap):
        return parity.value
    percent = f"{_signed(100 * gap, 1 if abs(gap) < 1 else 0)}%"
    return percent if parity is Parity.AGREES else f"{percent} {parity.value}"


def steps(value: float | None) -> str:
    """A number of steps with separated thousands; "never" where it is infinite."""
    if value is None:
        return ABSENT
    return f"{value:,.0f}" if math.isfinite(value) else "never"


def counted(number: int, noun: str) -> str:
    """ "1 case", "3 cases"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def replay_plan(plan: ReplayPlan) -> str:
    """ "in order", "list on 2 streams (fused)"."""
    streams = "" if plan.num_streams == 1 else f" on {plan.num_streams} streams"
    return one_line(f"{plan.strategy}{streams}{' (fused)' if plan.fused else ''}")


def plans(gain: StreamGain) -> str:
    """The plans that rounds chose, with the number of rounds: "in order, list on 2 streams ×2".

    Where no round tells, the plan of the profiled process.
    """
    if not any(gain.plans):
        return ABSENT if gain.profiled_plan is None else f"{replay_plan(gain.profiled_plan)} where it was profiled"
    rounds = Counter("not recorded" if plan is None else replay_plan(plan) for plan in gain.plans)
    told = with_numbers(rounds)
    return f"{told} on both sides: the difference is noise" if gain.is_same_plan else told


def with_numbers(names: Mapping[str, int]) -> str:
    """Names with their numbers, where there are several of one: "replay ×3, eager"."""
    return ", ".join(one_line(name) if number == 1 else f"{one_line(name)} ×{number}" for name, number in names.items())


def one_line(text: str) -> str:
    """Text from elsewhere on one line of bounded length, without control characters: lines are joined by " | "."""
    lines = (" ".join(part for part in line.split() if part) for line in text.splitlines())
    joined = " | ".join(line for line in lines if line)
    printable = "".join(character if character.isprintable() else "?" for character in joined)
    if len(printable) <= _LONGEST_LINE:
        return printable
    half = _LONGEST_LINE // 2
    return f"{printable[:half]} … {printable[-half:]}"


def commit(entry: Commit) -> str:
    """ "1a2b3c4d Subject line (2026-01-31)", as far as it is known."""
    known = [entry.short, entry.subject, f"({entry.date})" if entry.date else None]
    return " ".join(part for part in known if part)


def machine(facts: Mapping[str, object]) -> str:
    """The facts a reader asks for first, on one line: device, driver, CUDA, torch, Python."""
    named = (("driver", "driver"), ("cuda", "CUDA"), ("torch", "torch"), ("triton", "Triton"), ("python", "Python"))
    device = str(facts.get("device") or "unknown device")
    cores = f"{facts['cores']} cores" if facts.get("device_type") == "cpu" and facts.get("cores") else None
    on_gpu = facts.get("device_type") == "cuda"
    shown = [f"{word} {facts[name]}" for name, word in named if facts.get(name) and (on_gpu or name not in _GPU_FACTS)]
    return ", ".join(part for part in (device, cores, *shown) if part)


_GPU_FACTS = ("driver", "cuda", "triton")


def _digits(value: float) -> str:
    return f"{value:.{_decimals(value)}f}"


def _decimals(value: float) -> int:
    """How many decimals show three significant digits: at most six, none for a number of three digits or more."""
    rounded = abs(float(f"{value:.3g}"))
    return 0 if rounded == 0 else min(6, max(0, 2 - math.floor(math.log10(rounded))))


def _percent(value: float) -> str:
    return _signed(100 * (value - 1), 1)


def _signed(value: float, decimals: int) -> str:
    """With its sign, except for zero."""
    text = f"{value:+.{decimals}f}"
    return text[1:] if float(text) == 0 else text
