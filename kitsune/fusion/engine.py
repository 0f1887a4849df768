"""The `FusionEngine`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch import fx

from kitsune.errors import first_line
from kitsune.fusion.judge import Judge
from kitsune.fusion.match import Match, alone, refuse, splice
from kitsune.plan.fusions import Fusion

Template = Callable[[fx.Node], Iterable[Match]]
"""The matches that are found from a node, the largest ones first. At most one of them is used."""

_OUTDONE = "another way saves more"


class FusionEngine:
    """Replaces parts of a graph that templates fit, where that is better.

    Args:
        templates: they take turns; each sees what those before it have left.
        judge: decides whether a replacement is better.
    """

    def __init__(self, templates: Sequence[Template], judge: Judge) -> None:
        self._templates, self._judge = templates, judge

    def fuse(self, module: fx.GraphModule) -> tuple[fx.GraphModule, tuple[Fusion, ...]]:
        """A copy of `module` with the same inputs, results and effects, and what was tried, used or not."""
        graph = copy.deepcopy(module.graph)
        fusions: list[Fusion] = []
        for template in self._templates:
            for node in list(graph.nodes):
                if node.op == "call_function" and not node._erased:
                    fusions += self._try(graph, template(node))
        graph.lint()
        return fx.GraphModule(module, graph), tuple(fusions)

    def _try(self, graph: fx.Graph, matches: Iterable[Match]) -> Iterable[Fusion]:
        """What was tried; of several ways to replace the same operators the one used, else the first."""
        tried: dict[tuple[str, tuple[str, ...]], Fusion] = {}
        best: tuple[Match, Fusion] | None = None
        for match in matches:
            fusion = self._judged(match)
            if fusion is None:
                continue
            if fusion.refusal is None and (best is None or _saved_us(fusion) > _saved_us(best[1])):
                best = match, fusion
            tried.setdefault(_way(fusion), replace(fusion, refusal=fusion.refusal or _OUTDONE))
            if fusion.refusal is None and not match.has_rivals:
                break
        if best is not None:
            match, fusion = best
            tried[_way(fusion)] = fusion
            splice(graph, match)
        return tried.values()

    def _judged(self, match: Match) -> Fusion | None:
        """None where the graph does not allow the replacement."""
        if refuse(match) is not None:
            return None
        names = tuple(node.name for node in match.nodes)
        try:
            parts = alone(match)
        except (ValueError, TypeError, RuntimeError) as error:  # the operator's own check of its arguments
            return Fusion(match.template, names, None, None, f"it cannot be used here: {first_line(error)}")
        verdict = self._judge(parts)
        return Fusion(match.template, names, verdict.before_us, verdict.after_us, verdict.refusal)


def _way(fusion: Fusion) -> tuple[str, tuple[str, ...]]:
    return fusion.template, fusion.operators


def _saved_us(fusion: Fusion) -> float:
    return 0.0 if fusion.before_us is None or fusion.after_us is None else fusion.before_us - fusion.after_us
