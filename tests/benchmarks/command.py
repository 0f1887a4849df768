"""The command of a benchmark of one model's step, each round of which is a process: `measure` writes, `show` reads."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

import models
from harness import environment, worktree

_ROOT = Path(__file__).parents[2]


def run(
    module: str,
    description: str | None,
    measure: Callable[..., Any],
    table: Callable[[Mapping[str, Any]], str],
    *,
    model: str = "resnet18",
    batch: int = 128,
    on_cpu: bool = False,
    flags: Mapping[str, str] | None = None,
    summary: Callable[[Sequence[Mapping[str, Any]]], str] | None = None,
) -> None:
    """Parses the command line, and does what it says.

    Args:
        module: the benchmark's name, as `python -m` takes it.
        measure: one round, a function of a module's top level: of a model, a batch size, a precision and a device, and
            of the flags by their names; its result can be written as JSON.
        table: a written document as a Markdown table; the results of `measure` are its `rounds`.
        model, batch: the defaults.
        on_cpu: whether it can do without a GPU.
        flags: names of further options, with their help.
        summary: several documents as one Markdown table; None for a table of each.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    measuring = commands.add_parser("measure", help="measure on this machine")
    measuring.add_argument("--model", choices=models.names(large=True), default=model)
    measuring.add_argument("--batch", type=int, default=batch)
    measuring.add_argument("--precision", choices=("fp32", "amp"), default="amp")
    measuring.add_argument("--rounds", type=int, default=3, help="fresh processes (default: 3)")
    for name, text in (flags or {}).items():
        measuring.add_argument(f"--{name}", action="store_true", help=text)
    measuring.add_argument("file", type=Path, help="where the times are written, as JSON")
    measuring.set_defaults(run=partial(_measure, measure, table, on_cpu, tuple(flags or ())))
    showing = commands.add_parser("show", help="print what was measured as a Markdown table")
    showing.add_argument("files", type=Path, nargs="+", metavar="FILE")
    showing.set_defaults(run=partial(_show, table, summary))
    given = parser.parse_args()
    given.run(given)


def origin() -> dict[str, Any]:
    """What figures are of: the commit, with a word of changes on top of it, or None without git; and the machine."""
    try:
        measured = worktree.snapshot(_ROOT, ["."])
    except worktree.WorktreeError:
        commit = None
    else:
        commit = f"{measured.head}, with changes" if measured.is_changed else measured.head
    return {"commit": commit, "facts": dict(environment.facts())}


def blocks_table(document: Mapping[str, Any], column: str) -> str:
    """Microseconds in blocks as a Markdown table: of each round the fastest and the median block.

    Args:
        column: what there are rows of; a round has a list of microseconds for each.
    """
    rounds: list[dict[str, list[float]]] = document["rounds"]
    lines = [
        f"{document['model']}, batch {document['batch']}, {document['precision']}, commit {document['commit']}, us",
        "",
        f"| {column} |" + "".join(f" round {number + 1} |" for number in range(len(rounds))),
        "|---|" + "--:|" * len(rounds),
    ]
    for name in rounds[0]:
        cells = [f" {min(one[name]):.1f}, {statistics.median(one[name]):.1f} |" for one in rounds]
        lines.append(f"| {name} |" + "".join(cells))
    return "\n".join(lines)


def _show(
    table: Callable[[Mapping[str, Any]], str],
    summary: Callable[[Sequence[Mapping[str, Any]]], str] | None,
    given: argparse.Namespace,
) -> None:
    documents = [json.loads(file.read_text(encoding="utf-8")) for file in given.files]
    print("\n\n".join(map(table, documents)) if summary is None or len(documents) == 1 else summary(documents))


def _measure(
    measure: Callable[..., Any],
    table: Callable[[Mapping[str, Any]], str],
    on_cpu: bool,
    flags: tuple[str, ...],
    given: argparse.Namespace,
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not on_cpu:
        raise SystemExit("this is about GPUs, and there is no CUDA device here")
    settings = {name: getattr(given, name) for name in ("model", "batch", "precision", *flags)}
    rounds = []
    for number in range(given.rounds):
        print(f"round {number + 1} of {given.rounds}, on {device}", flush=True)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            rounds.append(process.submit(measure, device=device, **settings).result())
    document = {**settings, **origin(), "rounds": rounds}
    given.file.write_text(json.dumps(document, indent=1), encoding="utf-8")
    print(table(document))
