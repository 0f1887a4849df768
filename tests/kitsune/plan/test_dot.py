"""The text is read back by a parser of the part of Graphviz's language that it uses."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given

from kitsune.plan import Plan, Task
from tests.kitsune.plan import plans

_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|->|[A-Za-z0-9_.]+|[{}\[\];=])', re.DOTALL)


@dataclass
class Drawn:
    """What a text of the language describes; nodes and edges with their attributes, nodes by cluster."""

    clusters: dict[str, list[str]] = field(default_factory=dict)
    nodes: dict[str, dict[str, str]] = field(default_factory=dict)
    edges: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)


def parse(text: str) -> Drawn:
    """Reads `digraph name { ... }` with subgraphs, attributes, nodes and edges.

    Raises:
        ValueError: the text is not of the language.
    """
    tokens, place = [], 0
    while text[place:].strip():
        found = _TOKEN.match(text, place)
        if found is None:
            raise ValueError(f"no token at {text[place : place + 20]!r}")
        tokens.append(found[1])
        place = found.end()
    tokens.reverse()
    drawn = Drawn()
    assert [tokens.pop(), tokens.pop(), tokens.pop()] == ["digraph", "plan", "{"]
    _statements(tokens, drawn, None)
    if tokens:
        raise ValueError(f"{tokens[::-1]} after the end")
    return drawn


def _statements(tokens: list[str], drawn: Drawn, cluster: str | None) -> None:
    while True:
        name = tokens.pop()
        if name == "}":
            return
        if name == "subgraph":
            inner = tokens.pop()
            drawn.clusters[inner] = []
            assert tokens.pop() == "{"
            _statements(tokens, drawn, inner)
            continue
        following = tokens.pop()
        if following == "=":
            tokens.pop()
        elif following == "->":
            head = tokens.pop()
            assert tokens.pop() == "["
            drawn.edges.append((name, head, _attributes(tokens)))
        elif following == "[":
            attributes = _attributes(tokens)
            if name != "node":
                assert cluster is not None
                drawn.nodes[name] = attributes
                drawn.clusters[cluster].append(name)
        else:
            raise ValueError(f"{following!r} after {name!r}")
        assert tokens.pop() == ";"


def _attributes(tokens: list[str]) -> dict[str, str]:
    found = {}
    while (name := tokens.pop()) != "]":
        assert tokens.pop() == "="
        found[name] = _unquoted(tokens.pop())
    return found


def _unquoted(token: str) -> str:
    if not token.startswith('"'):
        return token
    plain = re.sub(r"\\(.)", lambda escape: "\n" if escape[1] == "n" else escape[1], token[1:-1], flags=re.DOTALL)
    return html.unescape(plain)


_LINES = {
    "true": ("solid", "#1f2328"), "anti": ("dashed", "#1f2328"), "output": ("dotted", "#1f2328"),
    "order": ("solid", "#b6bbc2"),
}  # fmt: skip


@given(plans.plans())
def test_every_task_dependency_and_wait_is_drawn_once(plan: Plan) -> None:
    drawn = parse(plan.to_dot())
    for stream in range(plan.schedule.num_streams):
        on_it = [f"t{task}" for task in plan.schedule.order if plan.schedule.streams[task] == stream]
        assert drawn.clusters[f"cluster_{stream}"] == on_it
    assert len(drawn.clusters) == plan.schedule.num_streams
    expected = Counter(
        (f"t{dependency.task}", f"t{task.index}", *_LINES[dependency.kind])
        for task in plan.graph.tasks
        for dependency in task.after
    )
    expected += Counter((f"t{wait.earlier}", f"t{wait.later}", "bold", "#d9540b") for wait in plan.schedule.waits)
    assert Counter((tail, head, line["style"], line["color"]) for tail, head, line in drawn.edges) == expected


@given(plans.plans())
def test_a_label_names_the_task_and_a_colour_its_stream(plan: Plan) -> None:
    drawn = parse(plan.to_dot())
    fills: dict[int, set[str]] = {}
    for task, cost, stream in zip(plan.graph.tasks, plan.costs.tasks, plan.schedule.streams, strict=True):
        node = drawn.nodes[f"t{task.index}"]
        assert node["label"] == f"{task.index} {task.name}\n{task.operator}\n{cost.us:.2f} us, {cost.bound}"
        fills.setdefault(stream, set()).add(node["fillcolor"])
    assert all(len(colours) == 1 for colours in fills.values())
    assert len(set.union(set(), *fills.values())) == len(fills)


HOSTILE = ['a"b', "a\\", '\\"];x', "\\N", "a -> b; }", "&lt;&amp;", "<b>", "a\nb", "é\u2028"]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_stay_text(name: str) -> None:
    drawn = parse(_named(name).to_dot())
    assert drawn.nodes["t0"]["label"].startswith(f"0 {name}\n{name}\n")
    assert len(drawn.nodes) == 5


def test_the_parser_finds_an_unescaped_quote() -> None:
    text = _named("a").to_dot()
    with pytest.raises((ValueError, AssertionError)):
        parse(text.replace("0 a", '0 a"b', 1))


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
@pytest.mark.parametrize("name", HOSTILE)
def test_graphviz_reads_it(name: str) -> None:
    result = subprocess.run(
        ["dot", "-Tplain"], input=_named(name).to_dot(), capture_output=True, text=True, timeout=30, check=True
    )
    assert result.stderr == ""
    assert sum(line.startswith("node ") for line in result.stdout.splitlines()) == 5


def _named(name: str) -> Plan:
    plan = plans.small()
    tasks = (Task(0, name, name, (name,)), *plan.graph.tasks[1:])
    return replace(plan, graph=replace(plan.graph, tasks=tasks))
