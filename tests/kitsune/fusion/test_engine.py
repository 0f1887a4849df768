"""What the engine replaces and what it leaves: legality, judgement, alternatives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx

from kitsune.capture.trace import trace
from kitsune.fusion.engine import FusionEngine
from kitsune.fusion.judge import Verdict
from kitsune.fusion.match import Alone, Builder, Match, alone, refuse
from kitsune.fusion.nodes import arguments, aten, calls, is_taken_apart, only_user, result, taken_from
from kitsune.graph import dataflow
from kitsune.passes import pipeline
from tests.kitsune.fusion.running import always, run


def pairs(node: fx.Node) -> Iterator[Match]:
    """exp(sin(x)) becomes sin(x).exp(), by operators that tell themselves apart: `exp2` of a multiple."""
    exp = only_user(node, aten.exp.default)
    if calls(node, aten.sin.default) and exp is not None:
        (x,) = arguments(node)
        yield Match.of("exp of sin", [node, exp], [exp], lambda builder: [_replacement(builder, x)])


def _replacement(builder: Builder, x: fx.Node) -> fx.Node:
    scaled = builder.call(aten.mul.Tensor, builder.call(aten.sin.default, x), 1.4426950408889634)
    return builder.call(aten.exp2.default, scaled)


def engine(judge: Callable[[Alone], Verdict] = always) -> FusionEngine:
    return FusionEngine((pairs,), judge)


def traced(function: Callable[..., list[Tensor]], *inputs: Tensor) -> fx.GraphModule:
    return pipeline.run(trace(function, inputs), pipeline.CLEARING)


X = torch.linspace(-2, 2, 6).view(2, 3)


def count(module: fx.GraphModule, target: object) -> int:
    return sum(node.target is target for node in module.graph.nodes)


def test_every_match_is_replaced() -> None:
    module = traced(lambda x: [x.sin().exp(), x.cos().sin().exp()], X)
    new, fusions = engine().fuse(module)
    assert count(new, aten.exp2.default) == 2
    assert count(new, aten.exp.default) == 0
    assert [fusion.refusal for fusion in fusions] == [None, None]
    assert fusions[0].operators == ("sin", "exp")
    assert fusions[0].won_us == 1.0
    for one, other in zip(run(new, [X]), run(module, [X]), strict=True):
        torch.testing.assert_close(one, other)
    assert count(module, aten.exp.default) == 2, "the graph given was changed"


def test_what_is_not_worth_it_stays() -> None:
    module = traced(lambda x: [x.sin().exp()], X)
    new, (fusion,) = engine(lambda _: Verdict("it is not faster", 1.0, 2.0)).fuse(module)
    assert (fusion.refusal, fusion.before_us, fusion.after_us, fusion.won_us) == ("it is not faster", 1.0, 2.0, 0.0)
    assert [node.target for node in new.graph.nodes] == [node.target for node in module.graph.nodes]


def test_of_alternatives_the_first_that_is_worth_it() -> None:
    judged: list[int] = []

    def judge(parts: Alone) -> Verdict:
        judged.append(len(parts.before.graph.nodes))
        return Verdict(None if len(judged) == 2 else "no", 2.0, 1.0)

    def alternatives(node: fx.Node) -> Iterable[Match]:
        return [*pairs(node), *pairs(node), *pairs(node)]

    new, (fusion,) = FusionEngine((alternatives,), judge).fuse(traced(lambda x: [x.sin().exp()], X))
    assert len(judged) == 2
    assert fusion.refusal is None, "the refusal of another way to replace the same operators is of no interest"
    assert count(new, aten.exp2.default) == 1


@pytest.mark.parametrize(("times", "used"), [((5, 3, 4), 1), ((3, 5, 4), 0), ((8, 8, 4), 2), ((3, 8, 4), 0)])
def test_of_rivals_the_one_that_saves_most(times: tuple[int, ...], used: int) -> None:
    """Each takes 7 where it replaces nothing; the last one is the first without rivals."""

    def rivals(node: fx.Node) -> Iterator[Match]:
        for place in range(4):
            for match in pairs(node):
                yield replace(match, template=str(place), has_rivals=place < 2)

    def judge(_: Alone) -> Verdict:
        after = next(left)
        return Verdict(None if after < 7 else "it is not faster", 7.0, after)

    left = iter(times)
    new, fusions = FusionEngine((rivals,), judge).fuse(traced(lambda x: [x.sin().exp()], X))
    assert count(new, aten.exp2.default) == 1
    outcomes = ["it is not faster" if after > 7 else "another way saves more" for after in times]
    wanted = [None if place == used else outcome for place, outcome in enumerate(outcomes)]
    assert [fusion.refusal for fusion in fusions] == wanted
    assert [fusion.template for fusion in fusions] == ["0", "1", "2"]


def test_ways_to_replace_the_same_operators_are_listed_once() -> None:
    refusals = ["its results differ", "it is not faster", "it is not faster"]

    def ways(node: fx.Node) -> Iterable[Match]:
        return [*pairs(node), *pairs(node), *(replace(match, template="another") for match in pairs(node))]

    engine = FusionEngine((ways,), lambda _: Verdict(refusals.pop(0)))
    _, fusions = engine.fuse(traced(lambda x: [x.sin().exp()], X))
    assert [(fusion.template, fusion.refusal) for fusion in fusions] == [
        ("exp of sin", "its results differ"),
        ("another", "it is not faster"),
    ]


def other_user(x: Tensor) -> list[Tensor]:
    y = x.sin()
    return [y.exp(), y]


def written_between(x: Tensor) -> list[Tensor]:
    y = x.sin()
    x.mul_(2)
    return [y.exp()]


@pytest.mark.parametrize("function", [other_user, written_between])
def test_what_the_graph_does_not_allow_is_not_even_judged(function: Callable[[Tensor], list[Tensor]]) -> None:
    module = traced(function, X.clone())
    new, fusions = engine(lambda _: pytest.fail("judged")).fuse(module)
    assert fusions == ()
    assert all(map(torch.equal, run(new, [X]), run(module, [X])))


def test_an_operator_that_does_not_take_it_is_the_reason() -> None:
    def impossible(node: fx.Node) -> Iterator[Match]:
        if calls(node, aten.exp.default):
            (x,) = arguments(node)
            yield Match.of("product", [node], [node], lambda builder: [builder.call(aten.mm.default, x, x)])

    def narrower(node: fx.Node) -> Iterator[Match]:
        if calls(node, aten.exp.default):
            (x,) = arguments(node)
            yield Match.of("transposed", [node], [node], lambda builder: [builder.call(aten.t.default, x)])

    def of_another_graph(node: fx.Node) -> Iterator[Match]:
        if calls(node, aten.exp.default):
            other = node.graph.find_nodes(op="call_function", target=aten.cos.default)[0]
            yield Match.of("foreign", [node], [node], lambda builder: [builder.call(aten.exp.default, other)])

    module = traced(lambda x: [x.exp(), x.cos()], X)
    new, fusions = FusionEngine((impossible, narrower, of_another_graph), always).fuse(module)
    assert ["it cannot be used here" in (fusion.refusal or "") for fusion in fusions] == [True, True, True]
    assert "(2, 3)" in (fusions[1].refusal or "")
    assert count(new, aten.exp.default) == 1


def split_and_used_early(x: Tensor, y: Tensor) -> list[Tensor]:
    """The first result is used before the second operator comes, whose inputs are there already."""
    first = x.sin()
    early = first.cos()
    return [early, y.exp()]


def together(node: fx.Node) -> Iterator[Match]:
    if calls(node, aten.sin.default):
        exp = next(other for other in node.graph.nodes if calls(other, aten.exp.default))
        x, y = arguments(node)[0], arguments(exp)[0]

        def build(builder: Builder) -> list[fx.Node]:
            return [builder.call(aten.sin.default, x), builder.call(aten.exp.default, y)]

        yield Match.of("both", [node, exp], [node, exp], build)


def test_the_replacement_goes_where_its_results_are_needed() -> None:
    module = traced(split_and_used_early, X, X)
    new, (fusion,) = FusionEngine((together,), always).fuse(module)
    assert fusion.refusal is None
    assert [node.target for node in new.graph.nodes if node.op == "call_function"] == [
        aten.sin.default, aten.exp.default, aten.cos.default,
    ]  # fmt: skip
    assert all(map(torch.equal, run(new, [X, X]), run(module, [X, X])))


def test_views_of_what_was_replaced_share_its_memory() -> None:
    module = traced(lambda x: [x.sin().exp().t().t().t().cos()], X)
    new, _ = engine().fuse(module)
    (exp2,) = new.graph.find_nodes(op="call_function", target=aten.exp2.default)
    (cos,) = new.graph.find_nodes(op="call_function", target=aten.cos.default)
    assert dataflow.storages(exp2) == dataflow.storages(arguments(cos)[0])


def late_input(x: Tensor) -> list[Tensor]:
    early = x.sin().cos()
    return [early, early.tan().exp()]


def written_later(x: Tensor, y: Tensor) -> list[Tensor]:
    early = x.sin()
    x.mul_(2)
    return [early, y.exp()]


@pytest.mark.parametrize(
    ("function", "inputs", "reason"), [(late_input, 1, "used before"), (written_later, 2, "in between")]
)
def test_nothing_moves_past_what_it_depends_on(function: Callable[..., list[Tensor]], inputs: int, reason: str) -> None:
    module = traced(function, *[X.clone() for _ in range(inputs)])
    (match,) = [match for node in module.graph.nodes for match in together(node)]
    assert reason in (refuse(match) or "")


def test_inputs_that_belong_together_are_made_together() -> None:
    """`given` is run to make them, and what it makes of equal numbers is equal on both sides."""

    def template(node: fx.Node) -> Iterator[Match]:
        made = taken_from(arguments(node)[0], 0, aten.sort.default) if calls(node, aten.exp.default) else None
        if made is not None:
            values = arguments(node)[0]
            yield Match.of(
                "sorted", [node], [node], lambda builder: [builder.call(aten.exp.default, values)], given=[made]
            )

    module = traced(lambda x: [x.sort().values.exp()], X)
    (match,) = [match for node in module.graph.nodes for match in template(node)]
    parts = alone(match)
    (values,) = parts.given(torch.tensor([[3.0, 1.0, 2.0]]))
    assert values.tolist() == [[1.0, 2.0, 3.0]]


def test_looking_around() -> None:
    module = traced(lambda x: list(x.sort()), X)
    (sort,) = module.graph.find_nodes(op="call_function", target=aten.sort.default)
    assert arguments(sort) == (sort.args[0], -1, False)
    assert is_taken_apart(sort)
    assert [result(sort, place) is None for place in range(3)] == [False, False, True]
    assert taken_from(result(sort, 1), 1, aten.sort.default) is sort
    assert taken_from(result(sort, 1), 0, aten.sort.default) is None
    assert only_user(sort.args[0], aten.sort.default) is sort
    assert only_user(sort, aten.sort.default) is None
