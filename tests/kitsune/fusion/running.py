"""Graphs with their operators fused, and the comparison with what they were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx, nn

from kitsune.capture.trace import trace
from kitsune.fusion.agreement import agree
from kitsune.fusion.engine import FusionEngine, Template
from kitsune.fusion.judge import Verdict
from kitsune.fusion.match import Alone
from kitsune.passes import pipeline
from kitsune.plan import Fusion

Function = Callable[..., Sequence[Tensor | None]]


def parts(before: Function, after: Function, *inputs: Tensor) -> Alone:
    """A part of a graph and its replacement, which both take `inputs`."""
    graphs = (trace(function, inputs) for function in (before, after, lambda *tensors: list(tensors)))
    return Alone(*graphs)


def always(alone: Alone) -> Verdict:
    """Takes every replacement, and sees that it agrees with what it replaces."""
    device = next(node.meta["val"].device for node in alone.before.graph.nodes if node.op == "placeholder")
    assert agree(alone, device), f"{alone.before.graph}\ndiffers from\n{alone.after.graph}"
    return Verdict(None, 2.0, 1.0)


def never(_alone: Alone) -> Verdict:
    return Verdict("it is not faster", 1.0, 2.0)


def fuse(
    module: fx.GraphModule, templates: Sequence[Template], judge: Callable[[Alone], Verdict] = always
) -> tuple[fx.GraphModule, tuple[Fusion, ...]]:
    """`module` as a step is fused, every pass verified."""
    cleared = pipeline.run(module, pipeline.CLEARING, verify=True)
    fused, fusions = FusionEngine(templates, judge).fuse(cleared)
    assert pipeline.problem(cleared.graph, fused.graph) is None
    result = pipeline.run(fused, pipeline.FINISHING, verify=True)
    result.meta["fusions"] = fusions
    return result, fusions


def fused(
    function: Function, inputs: Sequence[Tensor], templates: Sequence[Template]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The graph of `function`, and what becomes of it where every replacement is taken."""
    module = trace(function, inputs)
    return module, fuse(module, templates)[0]


def operators(module: fx.GraphModule, namespace: str = "kitsune") -> Counter[str]:
    """How often the operators of a namespace are called, by their names without it."""
    targets = [node.target for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return Counter(target.overloadpacket.__name__ for target in targets if target.namespace == namespace)


def told(module: fx.GraphModule) -> str:
    """What was tried to make `module`, and what is left: for the failure of a test."""
    tried = [f"{fusion.template}: {fusion.refusal or 'used'}" for fusion in module.meta["fusions"]]
    return "\n".join([*(tried or ["no template fits"]), *operators(module, "aten")])


def run(module: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The results, and what the inputs hold afterwards; `inputs` themselves stay as they are."""
    copies = [torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device).copy_(x) for x in inputs]
    with torch.no_grad():
        outputs = module(*copies)
    return [*(output for output in outputs if output is not None), *copies]


def assert_alike(found: Sequence[Tensor], wanted: Sequence[Tensor], *, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    """Equal in shape, type and layout, and in value but for rounding."""
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol, check_stride=True)


def in_autocast(function: Callable[..., Tensor], dtype: torch.dtype) -> Callable[..., Tensor]:
    """`function` under autocast to `dtype`; in float32 as it is."""

    def call(*tensors: Tensor) -> Tensor:
        with torch.autocast(tensors[0].device.type, dtype, enabled=dtype != torch.float32):
            return function(*tensors)

    return call


class InAutocast(nn.Module):
    """`module` under autocast to `dtype`; in float32 as it is."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, x: Tensor) -> Tensor:
        return in_autocast(self.module, self.dtype)(x)
