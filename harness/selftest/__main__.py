"""How often the harness errs on this very machine: the same code measured twice, with and without planted slowdowns.

Each row is a benchmark measured at two "commits" that are the same, or of which the second takes longer by a known
share of its step: a busy loop, on a GPU a busy kernel too. Rounds are fresh processes, those of both commits in turn;
there are as many of them, with as many turns, as `harness.run` takes by default, in shorter blocks. The harness judges
the rows of a group of processes together; beside it asv's comparison and a plain Mann-Whitney test judge the same
samples. Results go to a file in results/<machine>/selftest/, which is replaced as a whole after each group: those that
were finished are kept whatever ends the command. Comparisons of such rounds quote them.

Exit codes: 0, rows were measured, or with --resume there were enough; 2, none were, there is nothing to go on with, a
process failed, or the result cannot be written; 130, interrupted.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from harness import environment, profiles, project, variants
from harness.conclusive import MARGIN
from harness.measure import Probe, probe
from harness.processes import Launcher, ProcessFailed
from harness.profiles import Case, Effort
from harness.project import ProjectError
from harness.selftest import judges, outcome
from harness.selftest.arms import ArmsJob, ArmsResult, measure_arms
from harness.selftest.judges import ArmSamples
from harness.selftest.outcome import HARNESS, JudgedRow, Outcome

_INTERRUPTED = 130
_PROBE_SECONDS = 300.0

SLOWDOWNS = (0.01, 0.03, 0.05, 0.10)

MODELS: dict[profiles.DeviceType, tuple[str, ...]] = {"cpu": ("mlp-b64",), "cuda": ("mlp-b64", "lenet-b64")}
VARIANTS: dict[profiles.DeviceType, tuple[str, ...]] = {"cpu": ("eager_fp32",), "cuda": ("handcaptured_fp32",)}
ARMS: dict[profiles.DeviceType, int] = {"cpu": 16, "cuda": 24}
PLANTED: dict[profiles.DeviceType, int] = {"cpu": 2, "cuda": 3}
BLOCK_SECONDS = 0.010
WARM_UP_SECONDS: dict[profiles.DeviceType, float] = {"cpu": 0.08, "cuda": 0.10}


def effort(device: profiles.DeviceType) -> Effort:
    """How thoroughly a row is measured: as by the profile that `harness.run` takes by default, but for shorter blocks
    and shorter warming up, so that there can be many rows; users' verdicts are a little more exact.
    """
    return replace(
        profiles.effort(profiles.DEFAULT, device),
        block_seconds=BLOCK_SECONDS,
        warm_up_seconds=WARM_UP_SECONDS[device],
    )


@dataclass(frozen=True)
class Plan:
    """What is to be measured: groups of arms, each a case and a variant, until there are enough rows or no time."""

    cases: tuple[Case, ...]
    variants: tuple[str, ...]
    slowdowns: tuple[float, ...]
    rows: int
    seconds: float
    margin: float
    effort: Effort

    @property
    def groups(self) -> int:
        """How many groups have as many rows of unchanged code as are wanted."""
        return math.ceil(self.rows / self.slowdowns.count(0.0))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; the value is its exit code."""
    options = _parser().parse_args(arguments)
    begin = time.monotonic()
    launcher = Launcher()
    kept: Outcome | None = None
    try:
        plan, earlier = _begun(options, launcher)
        kept = earlier
        first = len(earlier.rows) // len(plan.slowdowns)
        for rows in measured(plan, first, launcher, begin, print_progress):
            seconds = earlier.seconds + time.monotonic() - begin
            longer = replace(kept, seconds=seconds, rows=(*kept.rows, *rows))
            outcome.write(longer)
            kept = longer
        if first >= plan.groups:
            print(f"There are {plan.rows} rows of unchanged code, or more, already: nothing is measured.")
        elif kept is earlier:
            raise ValueError(f"no row was finished in {plan.seconds:.0f} s; give more with --seconds")
    except KeyboardInterrupt:
        print(f"\nInterrupted: {_what_is_kept(kept)}.", file=sys.stderr)
        return _INTERRUPTED
    except (ProjectError, ValueError, OSError, ProcessFailed) as error:
        print(f"{__package__}: {error}", file=sys.stderr)
        if kept is not None and kept.rows:
            print(f"{__package__}: {_what_is_kept(kept)}", file=sys.stderr)
        return 2
    for line in table(kept.rows):
        print(line)
    print(kept.path)
    return 0


def _begun(options: argparse.Namespace, launcher: Launcher) -> tuple[Plan, Outcome]:
    """What is to be measured, and the self-test that it belongs to: a new one, or an earlier one to go on with.

    Raises:
        ValueError: a case or a variant is unknown, or cannot run here, or there is nothing to go on with.
    """
    started = datetime.now(timezone.utc)
    machine = environment.machine_name()
    found = launcher.run(probe, None, timeout_s=_PROBE_SECONDS)
    plan = _plan(options, found)
    method = {
        "commit": _commit(),
        "margin": plan.margin,
        "effort": asdict(plan.effort),
        "cases": [case.name for case in plan.cases],
        "variants": plan.variants,
        "slowdowns": plan.slowdowns,
    }
    folder = (options.results or project.here().results) / machine
    new = outcome.begun(folder, started, found.facts, method)
    return plan, outcome.newest_alike(folder, new) if options.resume else new


def _what_is_kept(kept: Outcome | None) -> str:
    """The rows that are in the results folder now, and how to have more; ``kept`` is None before anything was begun."""
    if kept is None or not kept.rows:
        return "nothing is kept"
    return f"{len(kept.rows)} rows are kept in {kept.path}; the same command with --resume goes on with them"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(case.name for case in profiles.CASES if case.device_type == "cpu")
    parser.add_argument("--models", nargs="+", metavar="CASE", help=f"cases to measure, such as {names.split(', ')[0]}")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="variants to measure, such as eager_fp32")
    parser.add_argument("--rows", type=_positive, default=300, help="rows of unchanged code (default: %(default)s)")
    parser.add_argument("--seconds", type=_seconds, default=1200.0, help="the most it may take (default: %(default)s)")
    parser.add_argument("--arms", type=_positive, metavar="N", help="unchanged copies in a process (GPU: 24, CPU: 16)")
    parser.add_argument(
        "--planted", type=_positive, metavar="N", help="copies for each planted slowdown (GPU: 3, CPU: 2)"
    )
    parser.add_argument(
        "--rounds", type=_at_least_two, metavar="N", help="rounds of each commit (default: those of harness.run)"
    )
    parser.add_argument("--margin", type=_margin, default=MARGIN, help="the least margin (default: %(default)s)")
    parser.add_argument("--results", type=Path, metavar="DIR", help="results folder (default: this project's)")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the newest result of this commit, environment and these options, until it has --rows in all",
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _at_least_two(text: str) -> int:
    rounds = _positive(text)
    if rounds < 2:
        raise argparse.ArgumentTypeError("of one round no verdict is given: two or more")
    return rounds


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds


def _margin(text: str) -> float:
    try:
        margin = float(text)
    except ValueError:
        margin = 0.0
    if not 0 < margin < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction between 0 and 1, such as {MARGIN}")
    return margin


def _plan(options: argparse.Namespace, found: Probe) -> Plan:
    """The options, and for what they leave open what suits the device.

    Raises:
        ValueError: a case or a variant is unknown, or cannot run here.
    """
    device: profiles.DeviceType = "cuda" if found.facts["device_type"] == "cuda" else "cpu"
    cases = {case.name: case for case in profiles.CASES if case.device_type == device}
    chosen = tuple(options.models or MODELS[device])
    named = tuple(options.variants or VARIANTS[device])
    for name in chosen:
        if name not in cases:
            raise ValueError(f"{name!r} is no case of this device; there are: {', '.join(cases)}")
    for name in named:
        if name not in variants.VARIANTS:
            raise ValueError(f"{name!r} is no variant; there are: {', '.join(variants.names())}")
        if name in found.unavailable:
            raise ValueError(f"{name} cannot run here: {found.unavailable[name]}")
    default = effort(device)
    unchanged, planted = options.arms or ARMS[device], options.planted or PLANTED[device]
    slowdowns = (0.0,) * unchanged + tuple(share for share in SLOWDOWNS for _ in range(planted))
    return Plan(
        cases=tuple(cases[name] for name in chosen),
        variants=named,
        slowdowns=slowdowns,
        rows=options.rows,
        seconds=options.seconds,
        margin=options.margin,
        effort=replace(default, rounds=options.rounds or default.rounds),
    )


def measured(
    plan: Plan, first: int, launcher: Launcher, begin: float, progress: Callable[[str, float, float], None]
) -> Iterator[list[JudgedRow]]:
    """The rows of each group as soon as it is finished, until there are enough or time is up.

    Args:
        first: the number of the group to begin with; those before it were measured earlier.
        begin: when the budget began, by the monotonic clock.
        progress: is told what was done, the seconds used, and about how many are left.

    Raises:
        ProcessFailed: a process did not return its times.
    """

    def used() -> float:
        return time.monotonic() - begin

    kinds = [(case, variant) for case in plan.cases for variant in plan.variants]
    longest = 0.0
    for group in range(first, plan.groups):
        case, variant = kinds[group % len(kinds)]
        arms: list[ArmSamples] = [ArmSamples([], []) for _ in plan.slowdowns]
        for number in range(plan.effort.rounds):
            if used() + longest > plan.seconds:
                return
            before = used()
            arms = _with_round(arms, plan, case, variant, f"{group} {number}", launcher)
            longest = max(longest, used() - before)
            share = (group - first + (number + 1) / plan.effort.rounds) / (plan.groups - first)
            left = max(0.0, min(plan.seconds - used(), used() * (1 / share - 1)))
            rows = group * len(plan.slowdowns)
            progress(f"{case.name} {variant}: group {group + 1}, round {number + 1}; {rows} rows", used(), left)
        yield list(_rows(arms, plan, case, variant))


def _with_round(
    arms: Sequence[ArmSamples], plan: Plan, case: Case, variant: str, seed: str, launcher: Launcher
) -> list[ArmSamples]:
    """The arms with a round more of each commit, which take turns in coming first."""
    unchanged = (0.0,) * len(plan.slowdowns)
    jobs = {
        "base": ArmsJob(case, variant, unchanged, plan.effort, f"{seed} base"),
        "head": ArmsJob(case, variant, plan.slowdowns, plan.effort, f"{seed} head"),
    }
    order = ("base", "head") if len(arms[0].base) % 2 == 0 else ("head", "base")
    results = {side: launcher.run(measure_arms, jobs[side], timeout_s=plan.effort.process_seconds) for side in order}
    return [
        ArmSamples([*arm.base, _pairs(results["base"], index)], [*arm.head, _pairs(results["head"], index)])
        for index, arm in enumerate(arms)
    ]


def _pairs(result: ArmsResult, index: int) -> list[tuple[float, float]]:
    return list(zip(result.arms[index], result.control, strict=True))


def _rows(arms: Sequence[ArmSamples], plan: Plan, case: Case, variant: str) -> Iterator[JudgedRow]:
    rivals = judges.rivals(plan.margin)
    verdicts = judges.harness_verdicts(arms, plan.margin)
    for arm, slowdown, judged in zip(arms, plan.slowdowns, verdicts, strict=True):
        estimate = judged.estimate
        others = {name: verdict(arm).value for name, verdict in rivals.items()}
        yield JudgedRow(
            case=case.name,
            variant=variant,
            slowdown=slowdown,
            ratio=estimate.ratio,
            low=estimate.low if estimate.has_interval else None,
            high=estimate.high if estimate.has_interval else None,
            margin=judged.margin,
            rounds=plan.effort.rounds,
            verdicts={HARNESS: judged.verdict.value, **others},
        )


def print_progress(what: str, used_s: float, left_s: float) -> None:
    """A line of progress."""
    print(f"[{used_s:6.0f} s, about {left_s:.0f} s left]  {what}", flush=True)


def table(rows: Sequence[JudgedRow]) -> Iterator[str]:
    """The outcome as lines of text."""
    columns = f"{'judge':<24}{'slowdown':>10}{'measured':>10}{'rows':>7}"
    yield f"{columns}{'slower':>9}{'faster':>9}{'same':>9}{'inconclusive':>14}"
    for rate in outcome.rates(rows):
        shares = [rate.slower, rate.faster, rate.same, rate.inconclusive]
        told = [f"{100 * number / rate.rows:.1f}%" for number in shares]
        planted = "none" if rate.slowdown == 0 else f"{100 * rate.slowdown:g}%"
        numbers = f"{100 * rate.measured:>9.1f}%{rate.rows:>7}"
        yield f"{rate.judge:<24}{planted:>10}{numbers}{told[0]:>9}{told[1]:>9}{told[2]:>9}{told[3]:>14}"


def _commit() -> str | None:
    """The commit that is checked out; None where there is none."""
    command = ["git", "-C", str(project.here().root), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    return done.stdout.strip() or None


if __name__ == "__main__":
    sys.exit(main())
