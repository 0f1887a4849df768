"""``python -m harness.compare [BASE] [HEAD]``: judge measured variants and commits, and write reports.

Exit codes: 0, the comparison was formed; 1, there is something that ``--fail-on`` names; 2, it could not be formed, an
output could not be written, or the search that ``--bisect`` starts failed, with one line that says why.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from io import UnsupportedOperation
from pathlib import Path
from typing import get_args

from harness import bisection, memory_growth, metrics, project, render, render_sides
from harness.commit_pages import NO_PAGES, CommitPages, commit_pages
from harness.comparison import compare
from harness.environment import machine_name
from harness.names import is_diagnostic, is_product
from harness.narrowing import Only, narrowed, narrowed_sides
from harness.project import ProjectError
from harness.report import ReportError, html_page, sides_page
from harness.revisions import fork_point, parse_range
from harness.rows import Comparison, Parity, Reproduction, Row, SideBySide
from harness.selection import ComparisonError, Measurement, choose_commits, choose_machine, choose_measurements
from harness.sides import two_machines, two_variants
from harness.stats import Verdict
from harness.store import History, ResultsError, Store
from harness.whole_files import write_whole
from harness.worktree import WorktreeError, snapshot

_METRICS = "\n".join(f"  {name:<8} {meaning}" for name, meaning in metrics.MEANINGS.items())
_EPILOG = f"""
BASE and HEAD are git revisions (HEAD~2, a tag, a branch) or the beginning of a measured commit's hash; BASE..HEAD is
the same as both, BASE...HEAD starts where HEAD's branch left BASE. Without HEAD it is the newest measured commit,
without BASE the measured commit before HEAD. A commit against itself is its newest run against its earlier ones.

metrics:
{_METRICS}

A margin is the relative difference that does not matter: the one given, or up to 10% where a benchmark's own noise asks
for more. A variant is "faster" or "slower" if its whole 95% interval lies beyond the margin (and not by chance, among
so many rows), "same" if it lies within, and "inconclusive" otherwise: more rounds would decide. A regression is a
Kitsune variant that is slower than at BASE by more than the margin, as a multiple of a peer measured in the same
processes (the one whose time was closest at BASE, else eager), or that takes more by another metric asked for, or that
could be measured at BASE and cannot at HEAD. Kitsune on one stream or unfused is no such variant: it tells what that
contributes.

exit codes: 0, compared; 1, there is something that --fail-on names; 2, it could not be done, and one line says why.
"""

_FAILURES: Mapping[str, Callable[[Comparison], bool]] = {
    "regression": lambda comparison: comparison.regressions > 0,
    "inconclusive": lambda comparison: Verdict.INCONCLUSIVE in comparison.judgements,
    "loss": lambda comparison: any(row.is_product and _has_another_loss(row) for row in comparison.rows),
    "failure": lambda comparison: any(group.status == "failed" for group in comparison.skips),
    "damage": lambda comparison: bool(comparison.damage),
}
_SIDE_FAILURES: Mapping[str, Callable[[SideBySide], bool]] = {
    "regression": lambda sides: sides.regressions > 0,
    "inconclusive": lambda sides: any(entry.verdict is Verdict.INCONCLUSIVE for entry in sides.contrasts),
    "damage": lambda sides: bool(sides.damage),
}


def _has_another_loss(row: Row) -> bool:
    """Whether a row's loss does not agree with eager's, from the first step on or from the same state."""
    went_on_apart = row.continuation is not None and not row.continuation.agrees
    return went_on_apart or row.parity in (Parity.DIFFERS, Parity.DIVERGED)


class OutputError(Exception):
    """What there is to say cannot be printed. The message says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the value is its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _check(parser, options)
    try:
        if options.variants or options.machines:
            return _sides(options)
        return _commits(options)
    except (ComparisonError, OutputError, ResultsError, ReportError, ProjectError, WorktreeError) as error:
        print(f"{__package__}.compare: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.compare",
        description="Judge Kitsune against its peers at a measured commit, and against an earlier commit.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "base", nargs="?", metavar="BASE", help="older commit, or a range (default: measured before HEAD)"
    )
    parser.add_argument("head", nargs="?", metavar="HEAD", help="newer commit (default: the newest measured)")
    parser.add_argument(
        "--worktree",
        action="store_true",
        help="HEAD is the working tree as it is now; BASE is by default what it lies on",
    )
    parser.add_argument(
        "--variants", nargs=2, metavar=("A", "B"), help="hold variant B against A at one commit (BASE, if given)"
    )
    parser.add_argument(
        "--machines", nargs=2, metavar=("A", "B"), help="hold machine B against A at one commit (BASE, if given)"
    )
    what = parser.add_argument_group("what is judged")
    what.add_argument(
        "--machine", metavar="NAME", help="whose results (default: this machine's, else the most recently measured)"
    )
    what.add_argument("--results", type=Path, metavar="DIR", help="results folder (default: this project's)")
    what.add_argument(
        "--model", action="append", default=[], metavar="NAME", help="these models alone; may be given several times"
    )
    what.add_argument(
        "--metric", action="append", choices=metrics.names(), help="see below; may be given several times"
    )
    what.add_argument(
        "--margin", action="append", default=[], type=_margin, metavar="[METRIC=]FRACTION",
        help="the margin of a metric, without its name of all; defaults: "
        + ", ".join(f"{name}={margin}" for name, margin in metrics.DEFAULT_MARGINS.items()),
    )  # fmt: skip
    what.add_argument(
        "--fail-on", action="append", default=[], choices=tuple(_FAILURES),
        help="exit with code 1 if there is one: a regression, a change that is inconclusive, a loss of Kitsune's that "
        "does not agree with eager's, a variant that failed, damaged results; may be given several times",
    )  # fmt: skip
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--only", choices=get_args(Only), help="list these changes alone; all are judged and counted")
    shown.add_argument("--reproduce", action="store_true", help="list for every row the command that measures it again")
    shown.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="auto: in a terminal, unless NO_COLOR is set",
    )
    shown.add_argument("--html", type=Path, metavar="PATH", help="write the interactive report, one offline file")
    shown.add_argument("--json", type=Path, metavar="PATH", help="write everything as JSON")
    shown.add_argument("--markdown", type=Path, metavar="PATH", help="write tables for a pull request")
    parser.add_argument(
        "--bisect", nargs="?", const=bisection.WORST, metavar="CASE:VARIANT",
        help="search the commit that brought a regression, with `asv find`; without a value, the largest",
    )  # fmt: skip
    return parser


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program where options contradict one another."""
    _check_outputs(parser, options)
    _check_margins(parser, options)
    found = None if options.base is None else parse_range(options.base)
    if found is not None and ".." in found.newer:
        parser.error(f"{options.base} has more than two ends: give A..B or A...B")
    if found is not None and (options.head is not None or options.worktree):
        parser.error(f"{options.base} is a range already: leave out what is given beside it")
    if options.head is not None and parse_range(options.head) is not None:
        parser.error(f"{options.head} is a range: give it alone")
    if options.worktree and options.head is not None:
        parser.error("with --worktree the working tree is HEAD: give BASE alone")
    if options.variants and options.machines:
        parser.error("--variants and --machines cannot be compared at the same time")
    if not options.variants and not options.machines:
        return
    if found is not None or options.head is not None or options.worktree:
        parser.error("variants and machines are compared at one commit: give one")
    if options.machines and options.machine:
        parser.error("--machines names the machines: leave out --machine")
    for name in ("bisect", "reproduce"):
        if getattr(options, name):
            parser.error(f"--{name} is for the comparison of commits")
    for failure in options.fail_on:
        if failure not in _SIDE_FAILURES:
            parser.error(f"--fail-on {failure} is for the comparison of commits")


def _check_outputs(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program where two outputs would be one file."""
    names: dict[str, str] = {}
    for name in ("html", "json", "markdown"):
        path = getattr(options, name)
        if path is None:
            continue
        first = names.setdefault(os.path.realpath(path), name)
        if first != name:
            parser.error(f"--{first} and --{name} name the same file: {path}")


def _check_margins(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program where the margin of a metric is given that is not judged. A ratio to eager always is, but for
    two sides."""
    is_of_sides = options.variants is not None or options.machines is not None
    judged = {*(options.metric or ["time" if is_of_sides else "ratio"]), *(() if is_of_sides else ("ratio",))}
    for name, margin in options.margin:
        if name is not None and name not in judged:
            parser.error(f"--margin {name}={margin:g} is of a metric that is not judged: add --metric {name}")


def _margin(text: str) -> tuple[str | None, float]:
    name, found, fraction = text.rpartition("=")
    if found and name not in metrics.names():
        raise argparse.ArgumentTypeError(f"{name!r} is no metric; there are {', '.join(metrics.names())}")
    try:
        margin = float(fraction)
    except ValueError:
        margin = 0.0
    if not 0 < margin < 1:
        raise argparse.ArgumentTypeError(f"{fraction!r} is not a fraction between 0 and 1, such as 0.03")
    return name or None, margin


def _margins(options: argparse.Namespace) -> dict[metrics.Name, float]:
    """The margin of each metric: one given by name stands above one given for all, later ones above earlier ones."""
    margins = dict(metrics.DEFAULT_MARGINS)
    margins.update({name: margin for every, margin in options.margin if every is None for name in margins})
    margins.update({name: margin for name, margin in options.margin if name is not None})
    return margins


def _commits(options: argparse.Namespace) -> int:
    comparison = _comparison(options)
    shown = comparison if options.only is None else narrowed(comparison, options.only)
    colour = _colour(options.color)
    _print(render.text(comparison, shown=shown, colour=colour, commands=options.reproduce))
    _write(options.json, lambda: render.json_document(comparison, shown=shown))
    _write(options.markdown, lambda: render.markdown(comparison, shown=shown, commands=options.reproduce))
    _write(options.html, lambda: html_page(comparison, options.html.absolute().parent))
    if options.bisect is not None and not _bisect(comparison, options.bisect):
        return 2
    for failure in options.fail_on:
        reason = _CANNOT_HAPPEN[failure](comparison) if failure in _CANNOT_HAPPEN else None
        if reason is not None:
            print(f"{__package__}.compare: --fail-on {failure} cannot be met: {reason}", file=sys.stderr)
    return 1 if any(_FAILURES[failure](comparison) for failure in options.fail_on) else 0


def _without_judgements(comparison: Comparison) -> str | None:
    is_compared = bool(comparison.judgements or comparison.lost)
    return None if is_compared else "nothing of Kitsune's was compared with an earlier commit"


def _without_losses(comparison: Comparison) -> str | None:
    is_compared = any(row.is_product and row.parity is not None for row in comparison.rows)
    return None if is_compared else "no loss of Kitsune's was measured beside that of eager"


_CANNOT_HAPPEN: Mapping[str, Callable[[Comparison], str | None]] = {
    "regression": _without_judgements,
    "inconclusive": _without_judgements,
    "loss": _without_losses,
}
"""Of what may be failed on, what says that there is nothing to be found in, and why; None where there is."""


def _sides(options: argparse.Namespace) -> int:
    store, margins = _store(options), _margins(options)
    chosen = options.metric or ["time"]
    if options.variants:
        machine = choose_machine(store, options.machine, _this_machine())
        history = _of_models(store.load(machine), options.model)
        variants = (options.variants[0], options.variants[1])
        sides = two_variants(history, options.base, variants, folder=store.root, chosen=chosen, margins=margins)
    else:
        first, second = (_of_models(store.load(name), options.model) for name in options.machines)
        sides = two_machines((first, second), options.base, folder=store.root, chosen=chosen, margins=margins)
    shown = sides if options.only is None else narrowed_sides(sides, options.only)
    _print(render_sides.text(sides, shown=shown, colour=_colour(options.color)))
    _write(options.json, lambda: render_sides.json_document(sides, shown=shown))
    _write(options.markdown, lambda: render_sides.markdown(sides, shown=shown))
    _write(options.html, lambda: sides_page(sides))
    return 1 if any(_SIDE_FAILURES[failure](sides) for failure in options.fail_on) else 0


def _comparison(options: argparse.Namespace) -> Comparison:
    store, here, margins = _store(options), _this_machine(), _margins(options)
    machine = choose_machine(store, options.machine, here)
    history = _of_models(store.load(machine), options.model)
    base, head = _revisions(options, history, store.root)
    base_commit, head_commit = choose_commits(history, base, head, store.root)
    history = history.without_snapshots(but=filter(None, (base_commit, head_commit)))
    comparison = compare(
        history,
        base_commit,
        head_commit,
        folder=store.root,
        margin=margins["ratio"],
        judges_ratios=not options.metric or "ratio" in options.metric,
        pages=_commit_pages(store.root),
    )
    runs = history.runs(head_commit)
    sources = {name: source for run in runs for name, source in run.workloads.items()}
    comparison = replace(comparison, reproduction=Reproduction(runs[-1].profile, sources))
    if options.metric:
        comparison = _with_metrics(comparison, history, options.metric, margins)
    if "memory" not in (options.metric or ()):
        comparison = _with_memory_growth(comparison, history, margins["memory"])
    passed_over = history.commits[history.commits.index(head_commit) + 1 :] if head is None else ()
    spoilt = [f"{commit[:8]} is passed over: damage has left no timings of it" for commit in passed_over]
    comparison = replace(comparison, notes=(*spoilt, *comparison.notes))
    if options.machine is None and machine != here:
        note = f"this machine ({here}) has no results; these are of {machine}, measured most recently"
        comparison = replace(comparison, notes=(note, *comparison.notes))
    return comparison


def _with_metrics(
    comparison: Comparison, history: History, chosen: Sequence[metrics.Name], margins: Mapping[metrics.Name, float]
) -> Comparison:
    """The comparison judged by these metrics too."""
    others = [metric for metric in metrics.names() if metric in chosen and metric != "ratio"]
    older, newer = _measurements(comparison, history)
    if older is None:
        return comparison
    contrasts = metrics.across(older, newer, others, margins, _judged_variants())
    unknown = [metric for metric in others if metric not in {contrast.metric for contrast in contrasts}]
    notes = [f"no variant has its {metric} at both commits, so no change of it can be judged" for metric in unknown]
    return replace(
        comparison,
        contrasts=contrasts,
        margins={metric: margins[metric] for metric in others},
        notes=(*comparison.notes, *notes),
    )


def _with_memory_growth(comparison: Comparison, history: History, margin: float) -> Comparison:
    """The comparison with a note of what takes more memory, which nobody asked for."""
    older, newer = _measurements(comparison, history)
    if older is None:
        return comparison
    grown = memory_growth.memory_growth(older, newer, margin, _judged_variants())
    comparison = replace(comparison, memory_growth=grown)
    told = memory_growth.sentence(comparison)
    return comparison if told is None else replace(comparison, notes=(told, *comparison.notes))


def _measurements(comparison: Comparison, history: History) -> tuple[Measurement | None, Measurement]:
    base = None if comparison.base is None else comparison.base.sha
    return choose_measurements(history, base, comparison.head.sha)


def _judged_variants() -> Callable[[str], bool]:
    """Of which variants other metrics than the ratio to a control are judged."""
    return is_product if project.has_own_checkout() else _is_way_of_training


def _is_way_of_training(variant: str) -> bool:
    """What is judged where it is not Kitsune that changes from commit to commit: eager PyTorch too."""
    return not is_diagnostic(variant)


def _revisions(options: argparse.Namespace, history: History, folder: Path) -> tuple[str | None, str | None]:
    """BASE and HEAD as they were asked for: None for what is left to choose.

    Raises:
        ComparisonError: the working tree is not measured as it is, or a range has no beginning.
    """
    if options.worktree:
        return options.base, _snapshot(history)
    found = None if options.base is None else parse_range(options.base)
    if found is None:
        # One revision alone is BASE: what came after it is judged.
        return options.base, options.head
    if not found.from_fork:
        return found.older, found.newer
    older = next(filter(None, (fork_point(found.older, found.newer, place) for place in (folder, Path.cwd()))), None)
    if older is None:
        raise ComparisonError(f"git finds no commit from which both {found.older!r} and {found.newer!r} come")
    return older, found.newer


def _snapshot(history: History) -> str:
    measured = project.here()
    now = snapshot(measured.root, measured.measured_paths)
    if not now.is_changed:
        raise ComparisonError(f"the working tree is {now.head[:8]}: nothing that is measured was changed")
    if now.commit not in history.commits:
        raise ComparisonError(
            f"the working tree as it is now is not measured on {history.machine}:"
            f" run `python -m {__package__}.run --worktree`"
        )
    return now.commit


def _bisect(comparison: Comparison, which: str) -> bool:
    """Searches with asv, on this machine; whether asv was able to."""
    here, change = _this_machine(), bisection.chosen(comparison, which)
    if comparison.machine != here:
        raise ComparisonError(f"the regression was measured on {comparison.machine}, and this is {here}: search there")
    of = project.here()
    search = bisection.search(comparison, change, of)
    of.prepare()
    _print(f"\nsearching what made {change.variant} of {change.case.name} worse:\n")
    return search.run(of) == 0


def _store(options: argparse.Namespace) -> Store:
    return Store(options.results or project.here().results)


def _commit_pages(results: Path) -> CommitPages:
    """Those of this project for its own results. The commits of others, which may be looked at too, are not there."""
    try:
        of = project.here()
    except ProjectError:
        return NO_PAGES
    return commit_pages(of.configuration) if results.resolve() == of.results.resolve() else NO_PAGES


def _of_models(history: History, models: Sequence[str]) -> History:
    for model in models:
        if model not in history.models:
            measured = ", ".join(history.models) or "none"
            raise ComparisonError(f"model {model!r} is not measured on {history.machine}; measured: {measured}")
    return history.of_models(models) if models else history


def _this_machine() -> str:
    try:
        return machine_name()
    except ValueError as error:
        raise ComparisonError(str(error)) from error


def _write(path: Path | None, document: Callable[[], str]) -> None:
    """Write a file if it was asked for, whole or not at all; half a character, as in a damaged name, as "?"."""
    if path is None:
        return
    content = document().encode(errors="replace")
    try:
        write_whole(path, content)
    except OSError as error:
        raise ResultsError(path, f"cannot be written ({error.strerror})") from error
    _print(f"wrote {path}\n")


def _colour(wish: str) -> bool:
    if wish == "auto":
        return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return wish == "always"


def _print(text: str) -> None:
    """Prints a text with what standard output cannot show replaced: "µ" in a terminal that knows only ASCII.

    Where nobody reads on, as after ``| head``, the rest is dropped, and everything else is done.

    Raises:
        OutputError: standard output cannot be written otherwise, as where a disk is full.
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_what_is_printed()
    except OSError as error:
        _drop_what_is_printed()
        raise OutputError(f"standard output cannot be written ({error.strerror})") from error


def _drop_what_is_printed() -> None:
    """From now on, what is left in the buffer included: at the end of the process it would fail again."""
    with suppress(UnsupportedOperation):  # of one that is no file, nothing is written at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
