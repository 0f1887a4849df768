"""The report as one HTML file that works offline: readable without scripts, interactive with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from harness import batch_tables, curve_tables, memory_growth, memory_tables, step_tables, tables
from harness.comparison import LOSS_TOLERANCE
from harness.regressions import regressions
from harness.report import batch_figures, figures, markup, memory_figures, sample_figures, step_figures
from harness.report.document import Section, asset, card, cards, document
from harness.report.downloads import downloads
from harness.report.figures import Figure
from harness.report.fusion_cards import fusion_cards
from harness.report.header import summary, top
from harness.report.history_tables import history_tables
from harness.report.regression_list import regression_list
from harness.rows import LISTED_CHANGES, LISTED_POINTS, SHOWN_POINTS, Comparison
from harness.zoo_tables import zoo_table


def html_page(comparison: Comparison, beside: Path | None = None) -> str:
    """The whole report, Plotly's script included.

    Args:
        beside: the folder that it will lie in, from which it links to traces; None leaves it without such links.

    Raises:
        ReportError: Plotly is not installed.
    """
    charts: dict[str, Sequence[Figure]] = {
        "speedup": figures.speedups(comparison),
        "sweep": batch_figures.batch_speedups(comparison),
        "memory": figures.memory(comparison),
        "allocation": memory_figures.timelines(comparison),
        "setup": figures.setups(comparison),
        "contribution": step_figures.contributions(comparison),
        "phases": step_figures.phases(comparison),
        "batches": step_figures.stream_gains(comparison),
        "streams": step_figures.timelines(comparison),
        "history": figures.history(comparison),
        "spread": sample_figures.distributions(comparison),
        "drift": sample_figures.drifts(comparison),
        "loss": figures.losses(comparison),
    }
    return document(
        f"Kitsune benchmarks: {comparison.machine}, {comparison.head.short}",
        top(comparison),
        _sections(comparison, charts, beside),
        [figure for group in charts.values() for figure in group],
    )


def _sections(comparison: Comparison, charts: Mapping[str, Sequence[Figure]], beside: Path | None) -> list[Section]:
    """All sections in order; those without a body have nothing to say and are left out."""
    commands = comparison.commands()
    return [
        Section("Summary", "Summary", "", summary(comparison), folds=False),
        Section(
            "Regressions",
            "Regressions",
            "What became worse: between the two commits by more than its margin (shaded; the bar is the 95% interval),"
            " and, over the history, to a level that lasted. Each with the command that measures it again.",
            _regressions(comparison),
            folds=False,
        ),
        Section(
            "Changes",
            "Commit against commit",
            "Kitsune's time as a multiple of that of a peer in the same processes, the control, at the older and the"
            " newer commit, and its change: above 0 is slower.",
            _changes(comparison, comparison.commands_since_base()),
        ),
        Section(
            "Variants",
            "All variants",
            "Click a heading to sort. Kitsune's rows are coloured, and grey where something is switched off to tell"
            " what that contributes; * marks the best peer of its precision.",
            markup.table(tables.variant_table(comparison), anchor="row", commands=commands),
        ),
        Section(
            "Zoo",
            "Models of many kinds",
            "The zoo's models, each with eager and its best peer, and how each form of Kitsune stands to that peer."
            " Where Kitsune steps aside, and steps run as plain PyTorch, its reason is given. Models whose package is"
            " not installed, and forms that failed, have a row with the reason. Below are the geometric means over the"
            " models that all forms have.",
            _zoo(comparison, commands),
        ),
        Section(
            "Speed-up",
            "Speed-up over eager",
            "Eager in the same precision is the line at 1×, the margin is shaded, bars are 95% intervals. The axis is"
            " logarithmic. Hollow marks rest on a single round.",
            cards(charts["speedup"]),
        ),
        Section(
            "Batch sweep",
            "Speed-up over batch sizes",
            "How many times as fast Kitsune is as eager, and as the best peer of each size, where a model was measured"
            " at several batch sizes: the line at 1× is the other one, the margin is shaded, bars are 95% intervals."
            " Solid lines are fp32, dashed ones amp; hollow marks rest on a single round. A gain ends at the smallest"
            " size from which on no interval lies above 1 any more.",
            _batch_sweep(comparison, charts["sweep"]),
        ),
        Section(
            "Memory",
            "Peak memory",
            "Bytes allocated to tensors and, in brackets and paler, reserved by PyTorch's allocator, with the share of"
            " these that no tensor uses (fragmentation); on a CPU, resident memory of the process. Below, the bytes"
            " allocated over one steady step, by the time at which the host asks for them.",
            _memory(comparison, charts["memory"], charts["allocation"]),
        ),
        Section(
            "Set-up",
            "Set-up and break-even",
            "Seconds before the first step at full speed, and after how many steps they are earned back against eager:"
            " with empty caches of compilers, paler, and with those that a process before it has filled, in brackets."
            " What compiles nothing has one set-up. Lines across the bars mark the first step that Kitsune replayed.",
            cards(charts["setup"]),
        ),
        Section(
            "Contributions",
            "What each optimization contributes",
            "The time of a step with one optimization after the other: as it is, with forward and backward captured"
            " (drop-in on one stream, unfused), with the optimizer in the same replay (TrainStep, likewise), with those"
            " operators fused that TrainStep fuses by default, and with the streams that it chooses by measurement."
            " Where one of these forms was not measured, the next bar adds several of these things at once, and names"
            " them all. Each × says how many times as fast it is as the one above it: by pairs of blocks in the same"
            " process, so that it may differ from the ratio of the bars.",
            _explained(charts["contribution"], markup.table(step_tables.contribution_table(comparison))),
        ),
        Section(
            "Phases",
            "Phases of a step",
            "What the time of a step goes to, by torch.profiler, in a process of its own. On a GPU it is the device's"
            " time of the work that each phase launched and, hatched, the host gap: the device is idle because its next"
            " work was not launched yet. On a CPU it is the host's time. A step that runs as one thing is one phase."
            " Profiling makes the host slower: shares tell more than times, and gaps are wider than without it.",
            _phases(comparison, charts["phases"], beside),
        ),
        Section(
            "Fusion",
            "What was fused",
            "Parts of the step that were replaced by fused operators, by template: how long one takes before and after,"
            " by itself on the device, and what all of them win. The step may gain less or more than their sum.",
            fusion_cards(comparison.fusions),
        ),
        Section(
            "Batch sizes",
            "Streams over batch sizes",
            "TrainStep with the streams that it chooses by measurement against the same step in order on one stream,"
            " which is the line at 1×; the margin is shaded, bars are 95% intervals. Solid lines are fp32, dashed ones"
            " amp; hollow marks rest on a single round. Each process chooses anew: plans are those of the rounds, with"
            " the number of rounds, or else that of the process in which set-up and memory were measured. Where both"
            " sides ran the very same plan in all rounds, the difference is noise.",
            _stream_gains(comparison, charts["batches"]),
        ),
        Section(
            "Streams",
            "Streams",
            "What runs when within a step: a bar is an operator, coloured by its kind, in the row of its stream; paler"
            " rows are predicted beside measured ones. These are drawn from a replay with an event before and after"
            " each operator, which makes it longer, most of all where operators are short: look at the order, not at"
            " the whole. The table has the time of a replay without events; the step of the tables above also has what"
            " the loop does around it. Drag to zoom in, click twice to see all. Plans of Kitsune with"
            " something switched off are in the table alone.",
            _streams(comparison, charts["streams"]),
        ),
        Section(
            "History",
            "History",
            "Kitsune's speed-up over the step captured by hand, which hosts hardly change (over eager where that is"
            f" missing), at the last {SHOWN_POINTS} measured commits, oldest first, with its 95% interval. Solid lines"
            " are fp32, dashed ones amp. Where a dotted line stands, a level changed for three commits or more; a grey"
            " one of long dashes is a change of the environment. Below are these, of the levels the last"
            f" {LISTED_CHANGES}, and the numbers of the last {LISTED_POINTS} commits; those of all that is drawn are"
            " among the raw data.",
            _history(comparison, charts["history"]),
        ),
        Section(
            "Samples",
            "Distributions",
            "Every timed block at the newer commit, as its distance from the variant's time: the box holds the middle"
            " half, its line is the median.",
            _explained(charts["spread"], markup.table(tables.sample_table(comparison))),
        ),
        Section(
            "Drift",
            "Drift over turns and rounds",
            "The same blocks in the order in which they were timed. In a turn every variant is timed once, so what"
            " moves all lines together is the machine; a dotted line stands between rounds, which are fresh processes.",
            _explained(charts["drift"], markup.table(curve_tables.drift_table(comparison))),
        ),
        Section(
            "Loss",
            "Training loss",
            "The same batches in the same order for every variant. Solid lines are fp32, dotted ones tf32, dashed ones"
            " amp. Click a name in the legend to hide its curves.",
            _explained(charts["loss"], markup.table(curve_tables.loss_table(comparison))),
        ),
        Section(
            "Not measured",
            "Not measured",
            "What could not run here, or broke, with the reason the measurement gave.",
            markup.table(tables.skip_table(comparison)),
        ),
        Section(
            "Damage",
            "Damaged results",
            "These parts of the results could not be read and were left out. Everything else was used.",
            markup.table(tables.damage_table(comparison.damage)),
        ),
        Section(
            "Raw data",
            "Raw data",
            "Compressed JSON, with times in seconds, memory in bytes, and fractions rounded to five digits. It is part"
            " of this page: nothing is fetched.",
            downloads(comparison),
        ),
        Section("How to read", "How to read this", "", _reading(comparison)),
    ]


def _regressions(comparison: Comparison) -> str:
    """Empty where there is nothing to hold anything against."""
    if len(comparison.commits) < 2 and comparison.base is None:
        return ""
    growth = memory_growth.sentence(comparison)
    return regression_list(regressions(comparison), comparison.judgements, growth)


def _changes(comparison: Comparison, commands: markup.Commands) -> str:
    """Times against a control, then the other metrics that were asked for."""
    times = markup.table(tables.change_table(comparison), anchor="change", commands=commands)
    if comparison.base is None or not comparison.contrasts:
        return times
    by_metric = tables.contrast_table(comparison.contrasts, comparison.base.short, comparison.head.short)
    named = ", ".join(dict.fromkeys(entry.metric for entry in comparison.contrasts))
    return f"{times}<h3>{escape(named.capitalize())}</h3>{markup.table(by_metric, commands=commands)}"


def _zoo(comparison: Comparison, commands: markup.Commands) -> str:
    """Empty where no model of the zoo was asked for."""
    listed = markup.table(zoo_table(comparison), commands=commands)
    return listed and listed + markup.table(tables.summary_table(comparison.zoo_summaries))


def _explained(drawn: Sequence[Figure], numbers: str) -> str:
    if not drawn:
        return ""
    return f"{cards(drawn)}<details><summary>The numbers behind these charts</summary>{numbers}</details>"


def _history(comparison: Comparison, drawn: Sequence[Figure]) -> str:
    """The lines, the changes of level, those of the environment; empty where there is but one commit."""
    if len(comparison.commits) < 2:
        return ""
    levels, environments = (
        markup.table(tables.level_table(comparison)),
        markup.table(tables.environment_table(comparison)),
    )
    listed = (f"<h3>{escape(tables.level_title(comparison))}</h3>{levels}" if levels else "") + environments
    commits = markup.table(tables.commit_table(comparison))
    return (
        f"{_explained(drawn, history_tables(comparison))}{listed}"
        f"<details><summary>The measured commits</summary>{commits}</details>"
    )


def _batch_sweep(comparison: Comparison, drawn: Sequence[Figure]) -> str:
    """Empty where no model was measured at several batch sizes."""
    if not drawn:
        return ""
    numbers = markup.table(batch_tables.gain_table(comparison))
    return f"{_explained(drawn, numbers)}{markup.table(batch_tables.end_table(comparison))}"


def _memory(comparison: Comparison, peaks: Sequence[Figure], steps: Sequence[Figure]) -> str:
    """The peaks, the steps, the numbers, and of what there is no timeline and why."""
    if not peaks:
        return ""
    timelines = f'<div class="charts">{"".join(map(card, steps))}</div>' if steps else ""
    notices = "".join(map(_without_timeline, memory_tables.missing_timelines(comparison)))
    table = markup.table(memory_tables.memory_table(comparison))
    numbers = f"<details><summary>The numbers behind these charts</summary>{table}</details>"
    return f"{cards(peaks)}{timelines}{notices}{numbers}"


def _without_timeline(missing: memory_tables.Missing) -> str:
    models = dict.fromkeys(case.model for case in missing.cases)
    return f'<p class="notice"{markup.models(*models)}>{escape(memory_tables.sentence(missing))}</p>'


def _phases(comparison: Comparison, drawn: Sequence[Figure], beside: Path | None) -> str:
    """Empty where nobody asked for phases."""
    if not comparison.phases:
        return ""
    return f"{cards(drawn)}{markup.table(step_tables.phase_table(comparison, beside))}"


def _stream_gains(comparison: Comparison, drawn: Sequence[Figure]) -> str:
    if not drawn:
        return (
            '<p class="notice">TrainStep was not timed both on one stream and with streams of its choice, so there is'
            " nothing to compare.</p>"
        )
    return f"{cards(drawn)}{markup.table(step_tables.stream_table(comparison))}"


def _streams(comparison: Comparison, drawn: Sequence[Figure]) -> str:
    """The timelines and, always in sight, which variants have none and why."""
    if not comparison.timelines:
        return '<p class="notice">No Kitsune variant was measured, so there is no step to show.</p>'
    return f"{cards(drawn)}{markup.table(step_tables.plan_table(comparison))}"


def _reading(comparison: Comparison) -> str:
    text = Template(asset("reading.html")).substitute(
        margin=f"{100 * comparison.margin:g}%", tolerance=f"{100 * LOSS_TOLERANCE:g}%"
    )
    recipes, facts = markup.table(tables.recipe_table(comparison)), markup.table(tables.facts_table(comparison))
    return (
        f"{text}<details><summary>How each variant is set up</summary>{recipes}</details>"
        f"<details><summary>Facts of the machine</summary>{facts}</details>"
    )
