"""A plan in Graphviz's language: https://graphviz.org/doc/info/lang.html."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kitsune.plan.tasks import Kind

if TYPE_CHECKING:
    from kitsune.plan.plan import Plan

_FILLS = ("#dbe9f6", "#fde3cf", "#d9f0d3", "#eadcf0", "#fff3b8", "#d5efec", "#f9d7dd", "#e4e4e4")
"""Colours of streams; after the last, the first again."""

_LINES: dict[Kind, str] = {
    "true": 'style=solid color="#1f2328"',
    "anti": 'style=dashed color="#1f2328"',
    "output": 'style=dotted color="#1f2328"',
    "order": 'style=solid color="#b6bbc2"',
}
_WAIT = 'style=bold color="#d9540b" constraint=false'


def digraph(plan: Plan) -> str:
    """Tasks as nodes `t<index>`, in a cluster for each stream, in the order in which they are issued.

    Dependencies are edges from the earlier task: solid where a result is read, dashed where what was
    read is written, dotted where both write, grey where both draw random numbers. A wait is a
    bold edge beside them.
    """
    lines = ["digraph plan {", "  rankdir=TB;", '  node [shape=box style=filled fontname="monospace" fontsize=10];']
    for stream in range(plan.schedule.num_streams):
        lines += _cluster(plan, stream)
    lines += _dependencies(plan)
    lines += [f"  t{wait.earlier} -> t{wait.later} [{_WAIT}];" for wait in plan.schedule.waits]
    return "\n".join([*lines, "}", ""])


def _cluster(plan: Plan, stream: int) -> Iterator[str]:
    fill = _FILLS[stream % len(_FILLS)]
    yield f"  subgraph cluster_{stream} {{"
    yield f"    label={_quoted(f'stream {stream}')};"
    for index in plan.schedule.order:
        if plan.schedule.streams[index] != stream:
            continue
        task, cost = plan.graph.tasks[index], plan.costs.tasks[index]
        label = f"{index} {task.name}\n{task.operator}\n{cost.us:.2f} us, {cost.bound}"
        yield f'    t{index} [label={_quoted(label)} fillcolor="{fill}"];'
    yield "  }"


def _dependencies(plan: Plan) -> Iterator[str]:
    for task in plan.graph.tasks:
        for dependency in task.after:
            yield f"  t{dependency.task} -> t{task.index} [{_LINES[dependency.kind]}];"


def _quoted(text: str) -> str:
    """A label that shows `text` as it is: Graphviz reads backslashes and HTML's entities in labels."""
    escaped = text.replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
